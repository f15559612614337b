"""What a battle shows: available actions, observations and the global state, column by column as in SMAC."""

import math

from envs.batch import EPISODE, KEY, STEP
from envs.battle import paths
from envs.battle.rules import (
    ATTACK,
    CONE,
    COOLDOWN,
    COOLDOWN_SCALE,
    ENERGY,
    F32,
    FACING,
    FACINGS,
    FOR_SIGHT,
    HALF,
    HEALTH,
    LAST_ACTION,
    MAX_HEALTH,
    MAX_SHIELD,
    NO_OP,
    NORTH,
    ONE,
    SHIELD,
    STOP,
    TYPE_BIT,
    ZERO,
    X,
    Y,
    compass,
    flies,
    inside,
    is_healer,
    reaches,
    sees,
    squared_distance,
    stat,
    traits,
)  # fmt: skip
from envs.compiler import barrier, root, scalar, uniform

COSINES = tuple(F32(round(math.cos(2 * math.pi * k / FACINGS), 7)) for k in range(FACINGS))
FIRST_SCOUT = 1 << 24  # in an enemy's LAST_ACTION: 1 + the agent that sighted it first; below: bits of who knows of it

POINTS = (
    (0, 4),
    (0, -4),
    (4, 0),
    (-4, 0),
    (2, 2),
    (-2, -2),
    (2, -2),
    (-2, 2),
    (0, 0),
)  # where pathing and height are read


@scalar
def walkable(column, row, g):
    return g.ground[row * g.rule.width + column] != paths.WALL


@scalar
def available(m, a, action, g):
    if g.real[HEALTH, m, a] <= ZERO:
        return action == NO_OP
    if action <= STOP:
        return action == STOP
    if action < ATTACK:
        dx, dy = compass(action)
        column, row = int(g.real[X, m, a] + dx), int(g.real[Y, m, a] + dy)
        return inside(column, row, g) and walkable(column, row, g)
    if g.rule.cone is not None and action < g.rule.attack:
        return True  # an agent may look anywhere
    return is_offered(m, a, action - g.rule.attack, g.rule.free_aim is None, g)


@scalar
def is_offered(m, a, v, near, g):
    """Whether agent a may shoot at enemy v, or heal ally v; `near`: from where it is."""
    if is_healer(m, a, g):
        if v >= g.rule.allies or flies(m, v, g):
            return False
    else:
        v += g.rule.allies
        if v >= g.rule.units:
            return False
    reach = reaches(m, a, g)
    in_reach = not near or (squared_distance(m, a, v, X, g) <= reach * reach and looks_at(m, a, v, g))
    return g.real[HEALTH, m, v] > ZERO and in_reach


@scalar
def looks_at(m, a, v, g):
    """Whether unit v is in the cone that agent a looks into, where there are cones."""
    if g.rule.cone is None:
        return True
    fx, fy = direction(m, a, g)
    dx, dy = g.real[X, m, v] - g.real[X, m, a], g.real[Y, m, v] - g.real[Y, m, a]
    return dx * fx + dy * fy >= CONE * root(dx * dx + dy * dy)


@scalar
def direction(m, a, g):
    """Where agent a looks."""
    k = traits(m, a, g) // FACING
    return COSINES[k], COSINES[(k + FACINGS - FACINGS // 4) % FACINGS]


@scalar
def knows(m, a, u, g):
    """Whether agent a, which has unit u in sight, is shown it: of an enemy it may be that only some are."""
    if g.rule.few_know is None or u < g.rule.allies:
        return True
    known = (g.whole[LAST_ACTION, m, u] >> a) & 1 == 1
    if g.rule.released is not None:
        for v in range(u + 1, g.rule.units):
            known &= (g.whole[LAST_ACTION, m, v] >> a) & 1 == 1
    return known


@scalar
def sight_of(m, a, u, g):
    """Whether agent a has unit u in sight."""
    sight = sees(m, a, g)
    return g.real[HEALTH, m, a] > ZERO and squared_distance(m, a, u, X, g) < sight * sight and looks_at(m, a, u, g)


@scalar
def spread_word(m, u, g):
    """Who knows of enemy u: who sighted it first, and each of the others with a chance, until one of both is dead."""
    key, episode, step = g.match[m, KEY], g.match[m, EPISODE], g.match[m, STEP]
    word = max(g.whole[LAST_ACTION, m, u], 0)
    scout = word // FIRST_SCOUT - 1
    if g.real[HEALTH, m, u] <= ZERO or (scout >= 0 and g.real[HEALTH, m, scout] <= ZERO):
        word, scout = 0, -1
    if scout < 0 and (g.real[HEALTH, m, u] > ZERO or g.rule.released is not None):  # there the dead are sighted, too
        first = F32(2)
        for a in range(g.rule.allies):
            turn = uniform(key, episode, step, a * 8 + FOR_SIGHT)  # agents look one after the other, in any order
            if turn < first and sight_of(m, a, u, g):
                first, scout = turn, a
        if scout >= 0:
            word = FIRST_SCOUT * (scout + 1)
            for a in range(g.rule.allies):
                told = uniform(key, episode, step, (1000 + u * 32 + a) * 8 + FOR_SIGHT) < g.rule.told
                if a == scout or told:
                    word |= 1 << a
    g.whole[LAST_ACTION, m, u] = word


@scalar
def height_at(column, row, g):
    ground = g.ground[row * g.rule.width + column]
    if ground == paths.WALL:
        return ZERO
    return HALF if ground == paths.LOW else (F32(0.75) if ground == paths.RAMP else ONE)


@scalar
def flag(condition):
    return ONE if condition else ZERO


@scalar
def observe_ground(m, a, line, i, g):
    """The columns that are there if asked for: the ground round agent a and the time, into line[i]."""
    alive, x, y = g.real[HEALTH, m, a] > ZERO, int(g.real[X, m, a]), int(g.real[Y, m, a])
    column = ATTACK - NORTH
    if g.rule.pathing_grid:
        for k in range(len(POINTS) - 1):
            east, north = x + POINTS[k][0], y + POINTS[k][1]
            line[i, column] = flag(alive and (not inside(east, north, g) or walkable(east, north, g)))
            column += 1
    if g.rule.terrain_height:
        for k in range(len(POINTS)):
            east, north = x + POINTS[k][0], y + POINTS[k][1]
            line[i, column] = ZERO if not alive else (height_at(east, north, g) if inside(east, north, g) else ONE)
            column += 1
    if g.rule.obs_time:
        line[i, g.rule.obs_dim - 1] = F32(g.match[m, STEP]) / F32(g.rule.limit)


@scalar
def observe_unit(m, a, u, line, i, g):
    """The columns of agent a about unit u, an enemy, another ally or itself: into line[i]."""
    column, width, shield = g.rule.self_at, 1 + g.rule.ally_shield + g.rule.types, g.rule.ally_shield
    if g.rule.own_place is not None:
        width += 2
    if g.rule.cone is not None:
        width += 2
    if u >= g.rule.allies:
        width, shield = g.rule.enemy_width, g.rule.enemy_shield
        column = g.rule.enemies_at + (u - g.rule.allies) * width
    elif u != a:
        width = g.rule.friend_width
        column = g.rule.friends_at + (u if u < a else u - 1) * width
    dx, dy = g.real[X, m, u] - g.real[X, m, a], g.real[Y, m, u] - g.real[Y, m, a]
    squared, sight = dx * dx + dy * dy, sees(m, a, g)
    hidden = u != a and not (looks_at(m, a, u, g) and knows(m, a, u, g))
    if g.real[HEALTH, m, a] <= ZERO or g.real[HEALTH, m, u] <= ZERO or squared >= sight * sight or hidden:
        for k in range(column, column + width):
            line[i, k] = ZERO
        return
    if u != a:
        line[i, column] = flag(u < g.rule.allies or is_offered(m, a, u - g.rule.allies, True, g))
        line[i, column + 1] = root(squared) / sight
        line[i, column + 2] = dx / sight
        line[i, column + 3] = dy / sight
        column += 4
    line[i, column] = g.real[HEALTH, m, u] / stat(MAX_HEALTH, m, u, g)
    column += 1
    if shield:
        line[i, column] = g.real[SHIELD, m, u] / stat(MAX_SHIELD, m, u, g) if stat(MAX_SHIELD, m, u, g) > ZERO else ZERO
        column += 1
    if g.rule.own_place is not None and u == a:
        line[i, column] = g.real[X, m, u] / F32(g.rule.width)
        line[i, column + 1] = g.real[Y, m, u] / F32(g.rule.height)
        column += 2
    if g.rule.cone is not None and u == a:
        line[i, column], line[i, column + 1] = direction(m, a, g)
        column += 2
    for bit in range(g.rule.types):
        line[i, column + bit] = flag(stat(TYPE_BIT, m, u, g) == F32(bit))
    if g.rule.last_action and u < g.rule.allies and u != a:
        for action in range(g.rule.actions):
            line[i, column + g.rule.types + action] = flag(g.whole[LAST_ACTION, m, u] == action)


@scalar
def state_of_unit(m, u, line, i, g):
    """The columns of the global state about unit u: into line[i]."""
    ally_width, enemy_width = 4 + g.rule.ally_shield + g.rule.types, 3 + g.rule.enemy_shield + g.rule.types
    if g.rule.cone is not None:
        ally_width += 2
    ally, enemies_at = u < g.rule.allies, g.rule.allies * ally_width
    column, width, shield = u * ally_width, ally_width, g.rule.ally_shield
    if not ally:
        column, width, shield = enemies_at + (u - g.rule.allies) * enemy_width, enemy_width, g.rule.enemy_shield
    if g.real[HEALTH, m, u] <= ZERO:
        for k in range(column, column + width):
            line[i, k] = ZERO
        return
    line[i, column] = g.real[HEALTH, m, u] / stat(MAX_HEALTH, m, u, g)
    column += 1
    if ally:
        charge = g.real[ENERGY, m, u] if is_healer(m, u, g) else max(g.real[COOLDOWN, m, u], ZERO)
        line[i, column] = charge / stat(COOLDOWN_SCALE, m, u, g)
        column += 1
    line[i, column] = (g.real[X, m, u] - F32(g.rule.width) * HALF) / F32(g.rule.width)
    line[i, column + 1] = (g.real[Y, m, u] - F32(g.rule.height) * HALF) / F32(g.rule.height)
    column += 2
    if shield:
        line[i, column] = g.real[SHIELD, m, u] / stat(MAX_SHIELD, m, u, g) if stat(MAX_SHIELD, m, u, g) > ZERO else ZERO
        column += 1
    if g.rule.cone is not None and ally:
        line[i, column], line[i, column + 1] = direction(m, u, g)
        column += 2
    for bit in range(g.rule.types):
        line[i, column + bit] = flag(stat(TYPE_BIT, m, u, g) == F32(bit))


@scalar
def observe_match(shown, m, row, lane, lanes, g, game):
    """Writes the outputs of match m if they are to be shown. It has barriers, so all lanes always call it."""
    obs, state, avail, alone = game.obs[m], game.state, game.avail, lanes == 1
    agents, units, actions = g.rule.agents, g.rule.units, g.rule.actions
    if g.rule.few_know is not None:
        if shown:
            for u in range(agents + lane, units, lanes):
                spread_word(row, u, g)
        barrier()
    for a in range(agents):
        # one lane writes in place; many lanes fill a line in shared memory together, then copy it out
        line, i = (obs, a) if alone else (g.line, row)
        if shown:
            if lane == 0:
                game.alive[m, a] = g.real[HEALTH, row, a] > ZERO
                if g.rule.pathing_grid or g.rule.terrain_height or g.rule.obs_time:
                    observe_ground(row, a, line, i, g)
            for action in range(lane, actions, lanes):
                can = available(row, a, action, g)
                avail[m, a, action] = can
                if action >= NORTH and action < ATTACK:
                    line[i, action - NORTH] = flag(can)
            for u in range(lane, units, lanes):
                observe_unit(row, a, u, line, i, g)
        barrier()
        if shown and not alone:
            for column in range(lane, g.rule.obs_dim, lanes):
                obs[a, column] = g.line[row, column]
        barrier()
    line, i = (state, m) if alone else (g.line, row)
    if shown and not g.rule.state_is_obs:
        for u in range(lane, units, lanes):
            state_of_unit(row, u, line, i, g)
    barrier()
    if shown and g.rule.state_is_obs:
        for a in range(agents):
            for column in range(lane, g.rule.obs_dim, lanes):
                state[m, a * g.rule.obs_dim + column] = obs[a, column]
    elif shown:
        if not alone:
            for column in range(lane, g.rule.state_units, lanes):
                state[m, column] = g.line[row, column]
        if g.rule.state_actions:
            for a in range(agents):
                for action in range(lane, actions, lanes):
                    column = g.rule.state_units + a * actions + action
                    state[m, column] = flag(g.whole[LAST_ACTION, row, a] == action)
        if g.rule.state_time and lane == 0:
            state[m, g.rule.state_dim - 1] = F32(g.match[row, STEP]) / F32(g.rule.limit)
    barrier()

"""What a battle shows: available actions, observations and the global state, column by column as in SMAC."""

from envs import paths
from envs.batch import STEP
from envs.battle_rules import (
    ATTACK,
    COOLDOWN,
    COOLDOWN_SCALE,
    ENERGY,
    F32,
    HALF,
    HEALTH,
    LAST_ACTION,
    MAX_HEALTH,
    MAX_SHIELD,
    NO_OP,
    NORTH,
    ONE,
    SHIELD,
    SHOOT,
    SIGHT,
    STOP,
    TYPE_BIT,
    ZERO,
    X,
    Y,
    compass,
    flies,
    inside,
    is_healer,
    squared_distance,
)  # fmt: skip
from envs.vector import barrier, root, scalar

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
    v = action - ATTACK
    if is_healer(a, g):
        if v >= g.rule.allies or flies(v, g):
            return False
    else:
        v += g.rule.allies
    return g.real[HEALTH, m, v] > ZERO and squared_distance(m, a, v, X, g) <= SHOOT * SHOOT


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
    if u >= g.rule.allies:
        width, shield = g.rule.enemy_width, g.rule.enemy_shield
        column = g.rule.enemies_at + (u - g.rule.allies) * width
    elif u != a:
        width = g.rule.friend_width
        column = g.rule.friends_at + (u if u < a else u - 1) * width
    dx, dy = g.real[X, m, u] - g.real[X, m, a], g.real[Y, m, u] - g.real[Y, m, a]
    squared = dx * dx + dy * dy
    if g.real[HEALTH, m, a] <= ZERO or g.real[HEALTH, m, u] <= ZERO or squared >= SIGHT * SIGHT:
        for k in range(column, column + width):
            line[i, k] = ZERO
        return
    if u != a:
        line[i, column] = flag(u < g.rule.allies or available(m, a, ATTACK + u - g.rule.allies, g))
        line[i, column + 1] = root(squared) / SIGHT
        line[i, column + 2] = dx / SIGHT
        line[i, column + 3] = dy / SIGHT
        column += 4
    line[i, column] = g.real[HEALTH, m, u] / g.stat[MAX_HEALTH, u]
    column += 1
    if shield:
        line[i, column] = g.real[SHIELD, m, u] / g.stat[MAX_SHIELD, u] if g.stat[MAX_SHIELD, u] > ZERO else ZERO
        column += 1
    for bit in range(g.rule.types):
        line[i, column + bit] = flag(g.stat[TYPE_BIT, u] == F32(bit))
    if g.rule.last_action and u < g.rule.allies and u != a:
        for action in range(g.rule.actions):
            line[i, column + g.rule.types + action] = flag(g.whole[LAST_ACTION, m, u] == action)


@scalar
def state_of_unit(m, u, line, i, g):
    """The columns of the global state about unit u: into line[i]."""
    ally_width, enemy_width = 4 + g.rule.ally_shield + g.rule.types, 3 + g.rule.enemy_shield + g.rule.types
    ally, enemies_at = u < g.rule.allies, g.rule.allies * ally_width
    column, width, shield = u * ally_width, ally_width, g.rule.ally_shield
    if not ally:
        column, width, shield = enemies_at + (u - g.rule.allies) * enemy_width, enemy_width, g.rule.enemy_shield
    if g.real[HEALTH, m, u] <= ZERO:
        for k in range(column, column + width):
            line[i, k] = ZERO
        return
    line[i, column] = g.real[HEALTH, m, u] / g.stat[MAX_HEALTH, u]
    column += 1
    if ally:
        charge = g.real[ENERGY, m, u] if is_healer(u, g) else max(g.real[COOLDOWN, m, u], ZERO)
        line[i, column] = charge / g.stat[COOLDOWN_SCALE, u]
        column += 1
    line[i, column] = (g.real[X, m, u] - F32(g.rule.width) * HALF) / F32(g.rule.width)
    line[i, column + 1] = (g.real[Y, m, u] - F32(g.rule.height) * HALF) / F32(g.rule.height)
    column += 2
    if shield:
        line[i, column] = g.real[SHIELD, m, u] / g.stat[MAX_SHIELD, u] if g.stat[MAX_SHIELD, u] > ZERO else ZERO
        column += 1
    for bit in range(g.rule.types):
        line[i, column + bit] = flag(g.stat[TYPE_BIT, u] == F32(bit))


@scalar
def observe_match(shown, m, row, lane, lanes, g, game):
    """Writes the outputs of match m if they are to be shown. It has barriers, so all lanes always call it."""
    obs, state, avail, alone = game.obs[m], game.state, game.avail, lanes == 1
    agents, units, actions = g.rule.agents, g.rule.units, g.rule.actions
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

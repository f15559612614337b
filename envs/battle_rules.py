"""The rules of the battles: what one unit does in one game loop, as scalar code for CPU and CUDA.

An environment step is eight game loops. A loop has two phases. Each phase is a function of one unit that reads only
what the phase before it wrote, so that the order of the units does not matter:

    decide          pick a target, fire or heal if it is in range, else say where one wants to go
    suffer, move    take the damage of the shots fired; then move, keeping apart from the others

Arrays are indexed by field, match m and unit u (allies first, then enemies): `g.real[HEALTH, m, u]`. docs/battles.md
has the rules in words.
"""

from collections import namedtuple

import numpy as np

from envs import paths
from envs.batch import EPISODE, KEY, RULE, TENSORS
from envs.battle_setup import LOOPS_PER_SECOND, SPAWN_SHIFT
from envs.vector import draw, pop_bit, root, scalar, uniform

F32 = np.float32

# ---- the fields of a unit: real[field, m, u] and whole[field, m, u]; all but the KEPT ones last one step ----
REAL = ("X", "Y", "HEALTH", "SHIELD", "COOLDOWN", "ENERGY", "HURT_AT", "GOAL_X", "GOAL_Y", "BEFORE", "HITS_IN",
        "STANDS_UNTIL", "QUIET_UNTIL", "NEXT_X", "NEXT_Y", "WANT_X", "WANT_Y", "SOLID", "HEALING")  # fmt: skip
(X, Y, HEALTH, SHIELD, COOLDOWN, ENERGY, HURT_AT, GOAL_X, GOAL_Y, BEFORE, HITS_IN,
 STANDS_UNTIL, QUIET_UNTIL, NEXT_X, NEXT_Y, WANT_X, WANT_Y, SOLID, HEALING) = range(len(REAL))  # fmt: skip
KEPT_REAL = NEXT_X
# HURT_AT: the loop of the last damage; SOLID: the room it takes on the ground; BEFORE: health and shield at first;
# HITS_IN: loops to the next hit of an attack under way, else 0; STANDS_UNTIL, QUIET_UNTIL: the loops from which it may
# walk after an attack, and call for help again
WHOLE = ("TARGET", "ORDER", "STANCE", "SHOOTER", "FUSE", "DETOUR", "LAST_ACTION", "SHOT")
TARGET, ORDER, STANCE, SHOOTER, FUSE, DETOUR, LAST_ACTION, SHOT = range(len(WHOLE))
KEPT_WHOLE = SHOT
# SHOOTER: the foe that hit it in the last loop, or NOBODY, or SHOT_AT_OTHERS; FUSE: explodes in the next loop;
# DETOUR: loops still to walk sideways, left or (negative) right
# ---- what never changes about a unit: stat[field, u] ----
STAT = ("RADIUS", "SEPARATION", "RANGE", "SLOP", "SCAN", "SPEED", "PERIOD", "WIND_UP", "INTERVAL", "BACKSWING",
        "DAMAGE", "HITS", "VERSUS_LIGHT", "VERSUS_ARMOURED", "ARMOUR", "LIGHT", "ARMOURED", "BIOLOGICAL", "FLIES",
        "CLIMBS", "HITS_AIR", "SPLASH", "HEALS", "MAX_HEALTH", "MAX_SHIELD", "REGENERATION", "COOLDOWN_SCALE",
        "TYPE_BIT")  # fmt: skip
(RADIUS, SEPARATION, RANGE, SLOP, SCAN, SPEED, PERIOD, WIND_UP, INTERVAL, BACKSWING, DAMAGE, HITS, VERSUS_LIGHT,
 VERSUS_ARMOURED, ARMOUR, LIGHT, ARMOURED, BIOLOGICAL, FLIES, CLIMBS, HITS_AIR, SPLASH, HEALS, MAX_HEALTH, MAX_SHIELD,
 REGENERATION, COOLDOWN_SCALE, TYPE_BIT) = range(len(STAT))  # fmt: skip
# ---- where it starts and what its order is: start[field, u], read at resets only ----
START = ("SPAWN_X", "SPAWN_Y", "GROUP", "ORDER_X", "ORDER_Y", "SPAN_X", "SPAN_Y")
SPAWN_X, SPAWN_Y, GROUP, ORDER_X, ORDER_Y, SPAN_X, SPAN_Y = range(len(START))

NOBODY, SHOT_AT_OTHERS = -1, -2  # in the place of a SHOOTER: no foe has fired, or none at this unit
STAY, GO, ENGAGE, FIGHT = range(4)  # orders: stand, walk to GOAL, attack or heal TARGET, behave as the enemy does
FREE, PROVOKED, FIRING = range(3)  # stances: looks round, goes for one from beyond its scan range, fires at its target
NOTHING, HEALED, EXPLODED, SWEPT = 0, -1, -2, -3  # what a unit's SHOT was in this loop; 1 + v: a hit on unit v alone
SINGLE, LINE, BLAST = range(3)  # splash shapes
NO_OP, STOP, NORTH, SOUTH, EAST, WEST, ATTACK = range(7)  # actions; ATTACK + j is enemy (or patient) j

LOOPS = 8  # game loops in an environment step
SIGHT, SHOOT = F32(9), F32(6)  # SMAC's, from centre to centre, for every unit
MOVE = F32(2)  # how far ahead a move action points; SMAC asks whether half of it is free
ZERO, HALF, ONE = F32(0), F32(0.5), F32(1)
FAR, TINY = F32(1e9), F32(1e-6)
SHIELD_DELAY, SHIELD_REGENERATION = F32(10 * LOOPS_PER_SECOND), F32(2 / LOOPS_PER_SECOND)
HEAL_RATE, HEALTH_PER_ENERGY = F32(9 / LOOPS_PER_SECOND), F32(3)
ENERGY_START, ENERGY_MAX, ENERGY_REGENERATION = F32(50), F32(200), F32(0.5625 / LOOPS_PER_SECOND)
DELAY_LEAST, DELAY_SPREAD = F32(-1), F32(3)  # loops added at random to every attack's period
CALL_RADIUS, CALL_PAUSE = F32(4), F32(2 * LOOPS_PER_SECOND)  # from edge to edge; loops from call to call
PURSUIT = F32(13)  # who was shot at, or called, from afar goes for one no farther off than this, from edge to edge
BLAST_RADIUS = F32(2.2)
LINE_ACROSS, LINE_DEEP = F32(2.8 / 2), F32(0.3 / 2)
FOLLOW = F32(2)  # a Medivac with nobody to heal keeps this near to the nearest friend
BLOCKED = F32(0.3)  # who gets on by less than this part of a step, for one who stands, goes sideways for a while
DETOUR_LOOPS = 6
TOUCH = F32(1e-5)  # who slides past another at no distance must not be held by the last digit of a float
CROWD = 32  # units on a map
BITS = 62  # units in one mask
FOR_SPAWN, FOR_ORDER, FOR_DELAY, FOR_SIDESTEP, FOR_ACTION = range(5)  # what a random number is for

# ---- what never changes about a match ----
COMMON = " ".join(RULE)  # allies below: the units of the agents, as many as there are agents
Rule = namedtuple(
    "Rule",
    f"{COMMON} allies units width height auto_allies medivacs_do_not_count "
    "open_ground healers fliers splash unarmed "  # what maps without need not ask
    "near many "  # how near others matter to a mover; from how many foes on it pays to ask first whether any is near
    "look_again strike_back call_for_help "
    "sparse only_positive win defeat death negative_scale scale "
    "ally_shield enemy_shield types last_action pathing_grid terrain_height obs_time "
    "state_actions state_time state_is_obs "
    "enemies_at enemy_width friends_at friend_width self_at state_units",  # columns
)
# What the rules work on, called `g`. On CUDA real, whole, match, stat and line are in shared memory.
World = namedtuple("World", "real whole match stat line start ground waypoints rule")
Game = namedtuple("Game", (*TENSORS, "real", "whole", "stat", "line", "start", "ground", "waypoints"))  # of the batch


@scalar
def world_of(real, whole, match, stat, line, rule, game):
    return World(real, whole, match, stat, line, game.start, game.ground, game.waypoints, rule)


@scalar
def world_in_place(rule, game):
    """The world on the arrays of the batch, not on copies in shared memory."""
    return world_of(game.real, game.whole, game.match, game.stat, game.line, rule, game)


# ---- geometry; `at` is X, or NEXT_X in every other loop ----
@scalar
def squared_distance(m, u, v, at, g):
    dx, dy = g.real[at, m, v] - g.real[at, m, u], g.real[at + 1, m, v] - g.real[at + 1, m, u]
    return dx * dx + dy * dy


@scalar
def within(m, u, v, at, reach, g):
    """Whether v is no farther from u than `reach`, from edge to edge: how weapons measure."""
    reach += g.stat[RADIUS, u] + g.stat[RADIUS, v]
    return squared_distance(m, u, v, at, g) <= reach * reach


@scalar
def cell_of(x, y, g):
    """(column, row)"""
    return min(max(int(x), 0), g.rule.width - 1), min(max(int(y), 0), g.rule.height - 1)


@scalar
def inside(column, row, g):
    return column >= 0 and row >= 0 and column < g.rule.width and row < g.rule.height


@scalar
def may_stand(column, row, x, y, climbs, g):
    """Whether a unit in the cell of that column and row may set foot on (x, y), at most a neighbouring cell away."""
    east, north = int(x), int(y)
    if x < ZERO or y < ZERO or not inside(east, north, g):
        return False
    if east == column and north == row:
        return True
    here, there = g.ground[row * g.rule.width + column], g.ground[north * g.rule.width + east]
    if g.rule.open_ground or here == paths.WALL:  # nothing else parts cells, or put there by hand: out of it again
        return there != paths.WALL
    return (
        paths.joined(here, there, climbs)
        and paths.joined(here, g.ground[north * g.rule.width + column], climbs)
        and paths.joined(here, g.ground[row * g.rule.width + east], climbs)
    )


@scalar
def compass(action):
    """The direction of a move."""
    if action == NORTH:
        return ZERO, ONE
    if action == SOUTH:
        return ZERO, -ONE
    return (ONE if action == EAST else -ONE), ZERO


@scalar
def heading(m, u, at, x, y, g):
    """The point to walk to next on the way to (x, y)."""
    if not g.rule.open_ground and g.stat[FLIES, u] == ZERO:
        layer = min(int(g.stat[CLIMBS, u]), g.waypoints.shape[0] - 1)
        (column, row), (east, north) = cell_of(g.real[at, m, u], g.real[at + 1, m, u], g), cell_of(x, y, g)
        there = north * g.rule.width + east
        next_cell = g.waypoints[layer, row * g.rule.width + column, there]
        if next_cell != there:
            return F32(next_cell % g.rule.width) + HALF, F32(next_cell // g.rule.width) + HALF
    return x, y


# ---- phase one: decide ----
@scalar
def walk(m, u, at, x, y, g):
    x, y = heading(m, u, at, x, y, g)
    dx, dy = x - g.real[at, m, u], y - g.real[at + 1, m, u]
    length, step = root(dx * dx + dy * dy), g.stat[SPEED, u]
    if length > step:
        part = step / length
        dx, dy = dx * part, dy * part
    detour = g.whole[DETOUR, m, u]
    if detour > 0:
        dx, dy = -dy, dx
        g.whole[DETOUR, m, u] = detour - 1
    elif detour < 0:
        dx, dy = dy, -dx
        g.whole[DETOUR, m, u] = detour + 1
    g.real[WANT_X, m, u], g.real[WANT_Y, m, u] = dx, dy


@scalar
def is_healer(u, g):
    return g.rule.healers == 1 and g.stat[HEALS, u] > ZERO


@scalar
def flies(u, g):
    return g.rule.fliers == 1 and g.stat[FLIES, u] > ZERO


@scalar
def can_hit(u, v, g):
    return not is_healer(u, g) and (not flies(v, g) or g.stat[HITS_AIR, u] > ZERO)


@scalar
def can_heal(u, v, g):
    return is_healer(u, g) and u != v and g.stat[BIOLOGICAL, v] > ZERO and not flies(v, g)


@scalar
def foes_of(u, g):
    """(first, behind the last)"""
    return (g.rule.allies, g.rule.units) if u < g.rule.allies else (0, g.rule.allies)


@scalar
def friends_of(u, g):
    return (0, g.rule.allies) if u < g.rule.allies else (g.rule.allies, g.rule.units)


@scalar
def is_armed(u, v, g):
    """Whether v counts as one that can hit u back, as a Medivac does. Maps where all can need not ask."""
    return not g.rule.unarmed or is_healer(v, g) or (g.stat[DAMAGE, v] > ZERO and can_hit(v, u, g))


@scalar
def any_foe_within(m, u, at, reach, g):
    """Whether a living foe is no farther than `reach`. Without branches, so that the CPU looks at several at a time."""
    near, (first, last) = False, foes_of(u, g)
    for v in range(first, last):
        near |= (g.real[HEALTH, m, v] > ZERO) & within(m, u, v, at, reach, g)
    return near


@scalar
def nearest_foe(m, u, at, reach, armed_only, g):
    """The nearest living foe that u can hit, no farther than `reach` from edge to edge; -1 if there is none."""
    best, who = FAR, -1
    first, last = foes_of(u, g)
    if last - first >= g.rule.many and not any_foe_within(m, u, at, reach, g):
        return -1
    for v in range(first, last):
        squared = squared_distance(m, u, v, at, g)
        if (
            (g.real[HEALTH, m, v] > ZERO) & (squared < best)
            and can_hit(u, v, g)
            and within(m, u, v, at, reach, g)
            and (not armed_only or is_armed(u, v, g))
        ):
            best, who = squared, v
    return who


@scalar
def may_target(m, u, v, g):
    """Whether v is a living unit, not one of those below 0, that u can hit."""
    return v >= 0 and g.real[HEALTH, m, v] > ZERO and can_hit(u, v, g)


@scalar
def nearest_friend(m, u, at, hurt_only, g):
    """The nearest living friend that u can heal; -1 if there is none."""
    best, who = FAR, -1
    first, last = friends_of(u, g)
    for v in range(first, last):
        if g.real[HEALTH, m, v] > ZERO and can_heal(u, v, g):
            squared = squared_distance(m, u, v, at, g)
            if squared < best and not (hurt_only and g.real[HEALTH, m, v] >= g.stat[MAX_HEALTH, v]):
                best, who = squared, v
    return who


@scalar
def who_hit_a_friend(m, u, at, loop, g):
    """The nearest foe that u can hit among those at whom friends near u have just called for help; -1 if none."""
    best, who = FAR, -1
    first, last = friends_of(u, g)
    for v in range(first, last):
        if g.real[QUIET_UNTIL, m, v] == F32(loop) - ONE + CALL_PAUSE and within(m, u, v, at, CALL_RADIUS, g):
            shooter = g.whole[SHOOTER, m, v]
            if may_target(m, u, shooter, g) and squared_distance(m, u, shooter, at, g) < best:
                best, who = squared_distance(m, u, shooter, at, g), shooter
    return who


@scalar
def choose_target(m, u, at, loop, g):
    """The enemy's way: keep an armed target in weapon range, else take the nearest, else whoever shoots from afar."""
    target, stance, in_range = g.whole[TARGET, m, u], g.whole[STANCE, m, u], False
    if target >= 0 and g.real[HEALTH, m, target] <= ZERO:
        target = -1
    if target >= 0:
        reach = g.stat[RANGE, u] if g.rule.look_again else g.stat[SCAN, u]
        in_range = within(m, u, target, at, reach + (g.stat[SLOP, u] if stance == FIRING else ZERO), g)
        if in_range and is_armed(u, target, g):
            return target
    found, far = nearest_foe(m, u, at, g.stat[RANGE, u] if in_range else g.stat[SCAN, u], True, g), False
    if g.rule.strike_back and found < 0 and may_target(m, u, g.whole[SHOOTER, m, u], g):
        found, far = g.whole[SHOOTER, m, u], True
    if found < 0 and target >= 0 and (in_range or (stance == PROVOKED and within(m, u, target, at, PURSUIT, g))):
        return target
    if g.rule.unarmed and found < 0:
        found = nearest_foe(m, u, at, g.stat[SCAN, u], False, g)
    if g.rule.call_for_help and found < 0 and g.whole[SHOOTER, m, u] != NOBODY:
        found = who_hit_a_friend(m, u, at, loop, g)
        far = found >= 0
    g.whole[TARGET, m, u], g.whole[STANCE, m, u], g.real[HITS_IN, m, u] = found, PROVOKED if far else FREE, ZERO
    return found


@scalar
def strike(m, u, target, early, first, loop, g):
    """u's attack does its damage in this loop, by rights `early` of a loop ago (0 or less), or it heals its target."""
    g.real[HITS_IN, m, u] = ZERO
    if is_healer(u, g):
        missing = g.stat[MAX_HEALTH, target] - g.real[HEALTH, m, target]
        amount = min(min(HEAL_RATE, missing), g.real[ENERGY, m, u] * HEALTH_PER_ENERGY)
        g.real[HEALING, m, u] = amount
        g.real[ENERGY, m, u] -= amount / HEALTH_PER_ENERGY
        g.whole[SHOT, m, u] = HEALED
        return
    if g.rule.splash and g.stat[SPLASH, u] == BLAST:
        g.whole[SHOT, m, u] = EXPLODED
        return
    g.whole[SHOT, m, u] = SWEPT if g.rule.splash and g.stat[SPLASH, u] == LINE else 1 + target
    if first:  # not the second blow of a zealot
        delay = DELAY_LEAST + DELAY_SPREAD * uniform(g.match[m, KEY], g.match[m, EPISODE], loop, u * 8 + FOR_DELAY)
        g.real[COOLDOWN, m, u] = early + g.stat[PERIOD, u] - g.stat[WIND_UP, u] + delay - ONE
        g.real[STANDS_UNTIL, m, u] = F32(loop) + g.stat[BACKSWING, u]
        if g.stat[INTERVAL, u] > ZERO:
            g.real[HITS_IN, m, u] = early + g.stat[INTERVAL, u]


@scalar
def decide(m, u, at, loop, g):
    g.real[WANT_X, m, u], g.real[WANT_Y, m, u], g.whole[SHOT, m, u] = ZERO, ZERO, NOTHING
    if g.real[HEALTH, m, u] <= ZERO:
        g.real[SOLID, m, u] = ZERO
        if g.rule.splash and g.whole[FUSE, m, u]:
            g.whole[FUSE, m, u], g.whole[SHOT, m, u] = 0, EXPLODED
        return
    g.real[SOLID, m, u] = ZERO if flies(u, g) else g.stat[SEPARATION, u]

    order, target = g.whole[ORDER, m, u], -1
    goes, x, y = order == GO or order == FIGHT, g.real[GOAL_X, m, u], g.real[GOAL_Y, m, u]
    if order == ENGAGE:
        target = g.whole[TARGET, m, u]
        if g.real[HEALTH, m, target] <= ZERO or not (can_hit(u, target, g) or can_heal(u, target, g)):
            target = -1
    elif order == FIGHT:
        if is_healer(u, g):  # heal the nearest who is hurt, else stay with the others
            target = nearest_friend(m, u, at, True, g)
            g.whole[TARGET, m, u] = target
            friend = nearest_friend(m, u, at, False, g)
            goes = friend >= 0 and not within(m, u, friend, at, FOLLOW, g)
            if goes:
                x, y = g.real[at, m, friend], g.real[at + 1, m, friend]
        else:
            target = choose_target(m, u, at, loop, g)

    overdue = g.real[COOLDOWN, m, u]  # below zero: ready for that part of a loop, which counts for the next reload
    g.real[COOLDOWN, m, u] = overdue - ONE if overdue > ZERO else ZERO
    if target >= 0:
        hits_in, slop = g.real[HITS_IN, m, u], g.stat[SLOP, u] if g.whole[STANCE, m, u] == FIRING else ZERO
        goes = not within(m, u, target, at, g.stat[RANGE, u] + slop, g)
        if goes:
            x, y = g.real[at, m, target], g.real[at + 1, m, target]
            g.real[HITS_IN, m, u] = ZERO
            if g.whole[STANCE, m, u] == FIRING:
                g.whole[STANCE, m, u] = FREE
        elif hits_in > ZERO or overdue <= ZERO:
            g.whole[STANCE, m, u] = FIRING
            hits_in = hits_in - ONE if hits_in > ZERO else overdue + g.stat[WIND_UP, u]
            if hits_in <= ZERO:
                strike(m, u, target, hits_in, overdue <= ZERO, loop, g)
            else:
                g.real[HITS_IN, m, u] = hits_in
    if goes and F32(loop) >= g.real[STANDS_UNTIL, m, u]:
        walk(m, u, at, x, y, g)
    if is_healer(u, g):
        g.real[ENERGY, m, u] = min(g.real[ENERGY, m, u] + ENERGY_REGENERATION, ENERGY_MAX)


# ---- phase two: clash ----
@scalar
def in_the_line(m, u, v, at, g):
    """Whether v is touched by u's fire: a line across the direction from u to its target, at the target."""
    target = g.whole[TARGET, m, u]
    fx, fy = g.real[at, m, target] - g.real[at, m, u], g.real[at + 1, m, target] - g.real[at + 1, m, u]
    length = root(fx * fx + fy * fy)
    if length > ZERO:
        fx, fy = fx / length, fy / length
    dx, dy = g.real[at, m, v] - g.real[at, m, target], g.real[at + 1, m, v] - g.real[at + 1, m, target]
    deep, across = abs(dx * fx + dy * fy), abs(dx * fy - dy * fx)
    return deep <= LINE_DEEP + g.stat[RADIUS, v] and across <= LINE_ACROSS + g.stat[RADIUS, v]


@scalar
def splashed(m, u, v, at, g):
    """Whether what u has just done to more than one hits its foe v."""
    if flies(v, g):
        return False
    if g.whole[SHOT, m, u] == EXPLODED:
        reach = BLAST_RADIUS + g.stat[RADIUS, v]
        return squared_distance(m, u, v, at, g) <= reach * reach
    return g.whole[SHOT, m, u] == SWEPT and in_the_line(m, u, v, at, g)


@scalar
def hit(u, v, health, shield, g):
    """(health, shield) of u after an attack by v: shields first, which have no armour."""
    damage = (
        g.stat[DAMAGE, v]
        + g.stat[VERSUS_LIGHT, v] * g.stat[LIGHT, u]
        + g.stat[VERSUS_ARMOURED, v] * g.stat[ARMOURED, u]
    )
    for _ in range(int(g.stat[HITS, v])):
        absorbed = min(shield, damage)
        shield -= absorbed
        if damage > absorbed:
            health -= max(HALF, damage - absorbed - g.stat[ARMOUR, u])
    return health, shield


@scalar
def suffer(m, u, at, loop, g):
    health, shield = g.real[HEALTH, m, u], g.real[SHIELD, m, u]
    if health <= ZERO:
        return
    shooter, shots = NOBODY, NOTHING
    first, last = foes_of(u, g)
    for v in range(first, last):
        shots |= g.whole[SHOT, m, v]
    if shots != NOTHING:
        shooter = SHOT_AT_OTHERS
        for v in range(first, last):
            shot = g.whole[SHOT, m, v]
            if shot == 1 + u or (g.rule.splash and shot < 0 and splashed(m, v, u, at, g)):
                health, shield = hit(u, v, health, shield, g)
                shooter = v
        if shooter >= 0:
            g.real[HURT_AT, m, u] = F32(loop)
            if F32(loop) >= g.real[QUIET_UNTIL, m, u]:
                g.real[QUIET_UNTIL, m, u] = F32(loop) + CALL_PAUSE
    g.whole[SHOOTER, m, u] = shooter
    if g.rule.splash and g.stat[SPLASH, u] == BLAST:
        if g.whole[SHOT, m, u] == EXPLODED:
            health = ZERO
        elif health <= ZERO:
            g.whole[FUSE, m, u] = 1
    if health <= ZERO:
        g.real[HEALTH, m, u], g.real[SHIELD, m, u] = ZERO, ZERO
        return
    health += g.stat[REGENERATION, u]
    if g.rule.healers:
        first, last = friends_of(u, g)
        for v in range(first, last):
            if g.whole[SHOT, m, v] == HEALED and g.whole[TARGET, m, v] == u:
                health += g.real[HEALING, m, v]
    if F32(loop) - g.real[HURT_AT, m, u] >= SHIELD_DELAY:
        shield += SHIELD_REGENERATION
    g.real[HEALTH, m, u] = min(health, g.stat[MAX_HEALTH, u])
    g.real[SHIELD, m, u] = min(shield, g.stat[MAX_SHIELD, u])


@scalar
def who_is_near(m, u, first, at, g):
    """The bits of those, from `first` on, who stand near enough to matter to u's next step."""
    x, y, reach = g.real[at, m, u], g.real[at + 1, m, u], g.stat[SEPARATION, u] + g.rule.near
    mask, k = 0, 0
    while k < min(BITS, g.rule.units - first):
        v = first + k
        dx, dy, solid = g.real[at, m, v] - x, g.real[at + 1, m, v] - y, g.real[SOLID, m, v]
        if (dx * dx + dy * dy < (solid + reach) * (solid + reach)) & (solid > ZERO):
            mask |= 1 << k
        k += 1
    return mask & ~(1 << (u - first)) if first <= u and u < first + BITS else mask


@scalar
def room(m, u, v, at, g):
    """(direction x, y from u to v, how far u may go that way).

    Two that both want to move may each take half of the gap between them, so that whatever they do they do not overlap.
    """
    dx, dy = g.real[at, m, v] - g.real[at, m, u], g.real[at + 1, m, v] - g.real[at + 1, m, u]
    length = root(dx * dx + dy * dy)
    part = ONE / max(length, TINY)
    free = length - g.real[SOLID, m, v] - g.stat[SEPARATION, u]
    if (free < ZERO) | (g.real[WANT_X, m, v] != ZERO) | (g.real[WANT_Y, m, v] != ZERO):
        free *= HALF
    if length < TINY:  # one on the other
        return (ONE if u < v else -ONE), ZERO, free
    return dx * part, dy * part, free


@scalar
def worst_of(m, u, at, x, y, mask, first, worst, who, g):
    """Of those near, whom the step (x, y) would run into most, and how far, if that is more than `worst` (of `who`)."""
    while mask != 0:
        bit, mask = pop_bit(mask)
        dx, dy, free = room(m, u, first + bit, at, g)
        excess = x * dx + y * dy - free
        if excess > worst:
            worst, who = excess, first + bit
    return worst, who


@scalar
def share_of(m, u, at, x, y, mask, first, share, g):
    """How much of the step (x, y), at most `share`, keeps apart from those near."""
    while mask != 0:
        bit, mask = pop_bit(mask)
        dx, dy, free = room(m, u, first + bit, at, g)
        ahead, free = x * dx + y * dy, max(free, ZERO)
        if ahead * share > free + TOUCH:
            share = free / ahead
    return share


@scalar
def move(m, u, at, loop, g):
    px, py = g.real[at, m, u], g.real[at + 1, m, u]
    wx, wy = g.real[WANT_X, m, u], g.real[WANT_Y, m, u]
    wanted, to = wx * wx + wy * wy, NEXT_X - at
    if g.real[SOLID, m, u] == ZERO:  # in the air, or dead
        px = min(max(px + wx, ZERO), F32(g.rule.width) - F32(0.001))
        py = min(max(py + wy, ZERO), F32(g.rule.height) - F32(0.001))
    elif wanted > ZERO or loop % LOOPS == 0:  # who stands only makes room, and once a step is enough for that
        x, y, mask, near, blocker = wx, wy, 0, 0, -1
        # past the one most in the way (or apart from the one most overlapped); in a crowd past the next as well
        for turn in range(2 if g.rule.units > CROWD else 1):
            first, worst, who = 0, ZERO, -1
            while first < g.rule.units:
                if turn == 0 or g.rule.units > BITS:
                    mask = who_is_near(m, u, first, at, g)
                near |= mask
                worst, who = worst_of(m, u, at, x, y, mask, first, worst, who, g)
                first += BITS
            if who < 0:
                break
            dx, dy, _ = room(m, u, who, at, g)
            x, y = x - worst * dx, y - worst * dy
            if turn == 0:
                blocker = who
        stands = blocker >= 0 and g.real[WANT_X, m, blocker] == ZERO and g.real[WANT_Y, m, blocker] == ZERO
        if stands and x * wx + y * wy < BLOCKED * wanted and g.whole[DETOUR, m, u] == 0:
            left = draw(g.match[m, KEY], g.match[m, EPISODE], loop // 64, u * 8 + FOR_SIDESTEP) & 1
            g.whole[DETOUR, m, u] = DETOUR_LOOPS if left else -DETOUR_LOOPS
        crowded = near & (near - 1) != 0 or g.rule.units > BITS  # by more than one
        (column, row), climbs = cell_of(px, py, g), g.stat[CLIMBS, u] > ZERO
        for attempt in range(3):  # the step; where a wall is in the way, its part along the wall
            sx, sy, share, first = (ZERO if attempt == 2 else x), (ZERO if attempt == 1 else y), ONE, 0
            while crowded and first < g.rule.units:  # and no farther than the others allow
                if g.rule.units > BITS:
                    mask = who_is_near(m, u, first, at, g)
                share = share_of(m, u, at, sx, sy, mask, first, share, g)
                first += BITS
            if may_stand(column, row, px + sx * share, py + sy * share, climbs, g):
                px, py = px + sx * share, py + sy * share
                break
            crowded = near != 0
    g.real[to, m, u], g.real[to + 1, m, u] = px, py


# ---- a step's beginning and end ----
@scalar
def take_order(m, u, action, g):
    """Agent u's action becomes the order of its unit for this step."""
    g.whole[LAST_ACTION, m, u] = action
    if g.rule.auto_allies:
        return
    g.whole[ORDER, m, u], g.whole[DETOUR, m, u], g.real[STANDS_UNTIL, m, u] = STAY, 0, ZERO
    target = action - ATTACK + (0 if g.stat[HEALS, u] > ZERO else g.rule.allies)
    if action < ATTACK or target != g.whole[TARGET, m, u]:  # an attack under way is broken off
        g.real[HITS_IN, m, u], g.whole[STANCE, m, u] = ZERO, FREE
    if action >= ATTACK:
        g.whole[ORDER, m, u], g.whole[TARGET, m, u] = ENGAGE, target
    elif action >= NORTH:
        g.whole[ORDER, m, u] = GO
        dx, dy = compass(action)
        g.real[GOAL_X, m, u], g.real[GOAL_Y, m, u] = g.real[X, m, u] + MOVE * dx, g.real[Y, m, u] + MOVE * dy


@scalar
def battle_reward(m, g):
    """SMAC's shaped reward for the change since BEFORE, without win or defeat, not yet scaled."""
    dealt, taken = ZERO, ZERO
    for u in range(g.rule.units):
        before = g.real[BEFORE, m, u]
        if before > ZERO:
            lost = before - g.real[HEALTH, m, u] - g.real[SHIELD, m, u]
            if g.real[HEALTH, m, u] <= ZERO:
                lost = before + g.rule.death
            if u < g.rule.allies:
                taken += lost
            else:
                dealt += lost
    if g.rule.only_positive:
        return abs(dealt)
    return dealt - taken * g.rule.negative_scale


@scalar
def judge(m, g):
    """(reward, terminated, won) of the step that has just been played."""
    allies, enemies = 0, 0
    for u in range(g.rule.units):
        if g.real[HEALTH, m, u] > ZERO and not (g.rule.medivacs_do_not_count and g.stat[HEALS, u] > ZERO):
            if u < g.rule.allies:
                allies += 1
            else:
                enemies += 1
    won, lost = allies > 0 and enemies == 0, allies == 0 and enemies > 0
    terminated = allies == 0 or enemies == 0
    if g.rule.sparse:
        return (ONE if won else (-ONE if lost else ZERO)), terminated, won
    reward = battle_reward(m, g)
    if won:
        reward += g.rule.win
    if lost:
        reward += g.rule.defeat
    return reward / g.rule.scale, terminated, won


# ---- reset ----
@scalar
def place(m, u, g):
    """Unit u at the start of a match."""
    key, episode, group = g.match[m, KEY], g.match[m, EPISODE], int(g.start[GROUP, u])
    shift_x = (uniform(key, episode, group, FOR_SPAWN) * F32(2) - ONE) * F32(SPAWN_SHIFT)
    shift_y = (uniform(key, episode, group + 1000, FOR_SPAWN) * F32(2) - ONE) * F32(SPAWN_SHIFT)
    along = uniform(key, episode, 0, FOR_ORDER)
    for field in range(len(REAL)):
        g.real[field, m, u] = ZERO
    for field in range(len(WHOLE)):
        g.whole[field, m, u] = 0
    g.real[X, m, u], g.real[Y, m, u] = g.start[SPAWN_X, u] + shift_x, g.start[SPAWN_Y, u] + shift_y
    g.real[HEALTH, m, u], g.real[SHIELD, m, u] = g.stat[MAX_HEALTH, u], g.stat[MAX_SHIELD, u]
    if g.stat[HEALS, u] > ZERO:
        g.real[ENERGY, m, u] = ENERGY_START
    g.whole[TARGET, m, u], g.whole[SHOOTER, m, u], g.whole[LAST_ACTION, m, u] = -1, NOBODY, -1
    if u >= g.rule.allies or g.rule.auto_allies:
        g.whole[ORDER, m, u] = FIGHT
        g.real[GOAL_X, m, u] = g.start[ORDER_X, u] + along * g.start[SPAN_X, u]
        g.real[GOAL_Y, m, u] = g.start[ORDER_Y, u] + along * g.start[SPAN_Y, u]

"""The rules of the battles: what one unit does in one game loop, as scalar code for CPU and CUDA.

An environment step is eight game loops. A loop has two phases. Each phase is a function of one unit that reads only
what the phase before it wrote, so that the order of the units does not matter:

    decide          pick a target, fire or heal if it is in range, else say where one wants to go
    suffer, move    take the damage of the shots fired; then move, keeping apart from the others

Arrays are indexed by field, match m and unit u (allies first, then enemies): `g.real[HEALTH, m, u]`. docs/battles.md
has the rules in words.
"""

import math
from collections import namedtuple

import numpy as np

from envs.batch import EPISODE, KEY, RULE, TENSORS
from envs.battle import paths
from envs.battle.setup import LOOPS_PER_SECOND, SPAWN_SHIFT
from envs.compiler import draw, pop_bit, root, scalar, uniform

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
WHOLE = ("TARGET", "ORDER", "STANCE", "SHOOTER", "TRAITS", "DETOUR", "LAST_ACTION", "SHOT")
TARGET, ORDER, STANCE, SHOOTER, TRAITS, DETOUR, LAST_ACTION, SHOT = range(len(WHOLE))
KEPT_WHOLE = SHOT
# SHOOTER: the foe that hit it in the last loop, or NOBODY, or SHOT_AT_OTHERS; TRAITS: in random teams its kind and, in
# units of FACING, where an agent looks; -1 minus that: explodes in the next loop; LAST_ACTION: or who knows an enemy;
# DETOUR: loops still to walk sideways, left or (negative) right
# ---- what never changes about a unit, or in random teams about a kind: stat[field, u] ----
STAT = ("RADIUS", "SEPARATION", "RANGE", "SLOP", "SCAN", "SPEED", "PERIOD", "WIND_UP", "INTERVAL", "BACKSWING",
        "DAMAGE", "HITS", "VERSUS_LIGHT", "VERSUS_ARMOURED", "ARMOUR", "LIGHT", "ARMOURED", "BIOLOGICAL", "FLIES",
        "CLIMBS", "HITS_AIR", "SPLASH", "HEALS", "MAX_HEALTH", "MAX_SHIELD", "REGENERATION", "COOLDOWN_SCALE",
        "TYPE_BIT")  # fmt: skip
(RADIUS, SEPARATION, RANGE, SLOP, SCAN, SPEED, PERIOD, WIND_UP, INTERVAL, BACKSWING, DAMAGE, HITS, VERSUS_LIGHT,
 VERSUS_ARMOURED, ARMOUR, LIGHT, ARMOURED, BIOLOGICAL, FLIES, CLIMBS, HITS_AIR, SPLASH, HEALS, MAX_HEALTH, MAX_SHIELD,
 REGENERATION, COOLDOWN_SCALE, TYPE_BIT) = range(len(STAT))  # fmt: skip
# ---- where it starts and what its order is: start[field, u], read at resets only ----
# In random teams SPAWN is a place in a crowd. A kind has SHARE, the chance of this or an earlier one, RANK in the order
# of the agents, SEES and REACHES, how far it sees and may be told to shoot.
START = ("SPAWN_X", "SPAWN_Y", "GROUP", "ORDER_X", "ORDER_Y", "SPAN_X", "SPAN_Y", "SHARE", "RANK", "SEES", "REACHES")
SPAWN_X, SPAWN_Y, GROUP, ORDER_X, ORDER_Y, SPAN_X, SPAN_Y, SHARE, RANK, SEES, REACHES = range(len(START))

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
HEAL_SCAN = F32(6)  # within which SMACv2's enemy Medivac, which does not follow others, finds those who are hurt
KINDS, MOST_IN_TEAM, MOST_DRAFTS = 3, 128, 1000  # of random teams
HALF_FIELD = F32(15)  # how far from the edge allies start who face their mirror image
FOLLOW = F32(2)  # a Medivac with nobody to heal keeps this near to the nearest friend
BLOCKED = F32(0.3)  # who gets on by less than this part of a step, because of another, goes sideways for a while
DETOUR_LOOPS = 12
TOUCH = F32(1e-5)  # who slides past another at no distance must not be held by the last digit of a float
CROWD = 32  # units on a map
BITS = 62  # units in one mask
FOR_SPAWN, FOR_ORDER, FOR_DELAY, FOR_SIDESTEP, FOR_ACTION, FOR_KIND, FOR_PLACE, FOR_SIGHT = range(8)
# what a random number is for
FACING, FACINGS = 4, 12  # in TRAITS: the first bit of a direction; directions in which an agent may look
CONE = F32(math.cos(math.radians(15)))  # of the angle from the middle of what it sees to the edge

# ---- what never changes about a match ----
COMMON = " ".join(RULE)  # allies below: the units of the agents, as many as there are agents
Rule = namedtuple(
    "Rule",
    f"{COMMON} allies units width height auto_allies medivacs_do_not_count "
    "open_ground healers fliers splash unarmed scan_anew "  # what maps without need not ask
    "near many "  # how near others matter to a mover; from how many foes on it pays to ask first whether any is near
    "look_again strike_back call_for_help surround "
    "rare pitch attack told "
    "random_teams own_place unit_ranges cone free_aim few_know released "  # see RandomBattle; 1, or None: no
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


@scalar
def traits(m, u, g):
    value = g.whole[TRAITS, m, u]
    return value if value >= 0 else -1 - value


@scalar
def stat(field, m, u, g):
    """What never changes about unit u."""
    return g.stat[field, u if g.rule.random_teams is None else traits(m, u, g) % FACING]


@scalar
def sees(m, a, g):
    """How far agent a sees, from centre to centre."""
    return SIGHT if g.rule.unit_ranges is None else g.start[SEES, traits(m, a, g) % FACING]


@scalar
def reaches(m, a, g):
    """How far agent a may be told to shoot or heal, from centre to centre."""
    return SHOOT if g.rule.unit_ranges is None else g.start[REACHES, traits(m, a, g) % FACING]


# ---- geometry; `at` is X, or NEXT_X in every other loop ----
@scalar
def squared_distance(m, u, v, at, g):
    dx, dy = g.real[at, m, v] - g.real[at, m, u], g.real[at + 1, m, v] - g.real[at + 1, m, u]
    return dx * dx + dy * dy


@scalar
def within(m, u, v, at, reach, g):
    """Whether v is no farther from u than `reach`, from edge to edge: how weapons measure."""
    reach += stat(RADIUS, m, u, g) + stat(RADIUS, m, v, g)
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
    if not g.rule.open_ground and stat(FLIES, m, u, g) == ZERO:
        layer = min(int(stat(CLIMBS, m, u, g)), g.waypoints.shape[0] - 1)
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
    length, step = root(dx * dx + dy * dy), stat(SPEED, m, u, g)
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
def is_healer(m, u, g):
    return g.rule.healers == 1 and stat(HEALS, m, u, g) > ZERO


@scalar
def flies(m, u, g):
    return g.rule.fliers == 1 and stat(FLIES, m, u, g) > ZERO


@scalar
def can_hit(m, u, v, g):
    return not is_healer(m, u, g) and (not flies(m, v, g) or stat(HITS_AIR, m, u, g) > ZERO)


@scalar
def can_heal(m, u, v, g):
    return is_healer(m, u, g) and u != v and stat(BIOLOGICAL, m, v, g) > ZERO and not flies(m, v, g)


@scalar
def foes_of(u, g):
    """(first, behind the last)"""
    return (g.rule.allies, g.rule.units) if u < g.rule.allies else (0, g.rule.allies)


@scalar
def friends_of(u, g):
    return (0, g.rule.allies) if u < g.rule.allies else (g.rule.allies, g.rule.units)


@scalar
def is_armed(m, u, v, g):
    """Whether v counts as one that can hit u back, as a Medivac does. Maps where all can need not ask."""
    return not g.rule.unarmed or is_healer(m, v, g) or (stat(DAMAGE, m, v, g) > ZERO and can_hit(m, v, u, g))


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
            and can_hit(m, u, v, g)
            and within(m, u, v, at, reach, g)
            and (not armed_only or is_armed(m, u, v, g))
        ):
            best, who = squared, v
    return who


@scalar
def may_target(m, u, v, g):
    """Whether v is a living unit, not one of those below 0, that u can hit."""
    return v >= 0 and g.real[HEALTH, m, v] > ZERO and can_hit(m, u, v, g)


@scalar
def nearest_friend(m, u, at, hurt_only, g):
    """The nearest living friend that u can heal; -1 if there is none."""
    best, who = FAR, -1
    first, last = friends_of(u, g)
    for v in range(first, last):
        if g.real[HEALTH, m, v] > ZERO and can_heal(m, u, v, g):
            squared = squared_distance(m, u, v, at, g)
            if squared < best and not (hurt_only and g.real[HEALTH, m, v] >= stat(MAX_HEALTH, m, v, g)):
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
    """The enemy's way: keep an armed target in weapon range, else take the nearest, else whoever shoots from afar.

    Who cannot move keeps it for one attack.
    """
    target, stance, in_range = g.whole[TARGET, m, u], g.whole[STANCE, m, u], False
    if target >= 0 and g.real[HEALTH, m, target] <= ZERO:
        target = -1
    if target >= 0:
        reach = stat(RANGE, m, u, g) if g.rule.look_again else stat(SCAN, m, u, g)
        in_range = within(m, u, target, at, reach + (stat(SLOP, m, u, g) if stance == FIRING else ZERO), g)
        rescans = g.rule.scan_anew and stat(SPEED, m, u, g) == ZERO and g.real[HITS_IN, m, u] <= ZERO
        if in_range and is_armed(m, u, target, g) and not rescans:
            return target
    found, far = nearest_foe(m, u, at, stat(RANGE, m, u, g) if in_range else stat(SCAN, m, u, g), True, g), False
    if g.rule.strike_back and found < 0 and may_target(m, u, g.whole[SHOOTER, m, u], g):
        found, far = g.whole[SHOOTER, m, u], True
    if found < 0 and target >= 0 and (in_range or (stance == PROVOKED and within(m, u, target, at, PURSUIT, g))):
        return target
    if g.rule.unarmed and found < 0:
        found = nearest_foe(m, u, at, stat(SCAN, m, u, g), False, g)
    if g.rule.call_for_help and found < 0 and g.whole[SHOOTER, m, u] != NOBODY:
        found = who_hit_a_friend(m, u, at, loop, g)
        far = found >= 0
    g.whole[TARGET, m, u], g.whole[STANCE, m, u], g.real[HITS_IN, m, u] = found, PROVOKED if far else FREE, ZERO
    return found


@scalar
def hunted(m, u, at, loop, g):
    """The way of SMACv2's enemy: go for one foe until it is dead, then for the one that is nearest at the next step."""
    target = g.whole[TARGET, m, u]
    if target >= 0 and g.real[HEALTH, m, target] > ZERO:
        return target
    best, target = FAR, -1
    if loop % LOOPS == 0:
        first, last = foes_of(u, g)
        for v in range(first, last):
            squared = squared_distance(m, u, v, at, g)
            if (g.real[HEALTH, m, v] > ZERO) & (squared < best):
                best, target = squared, v
    if target < 0 or not can_hit(m, u, target, g):  # an order that cannot be carried out is none
        target = nearest_foe(m, u, at, stat(SCAN, m, u, g), True, g)
    g.whole[TARGET, m, u], g.whole[STANCE, m, u], g.real[HITS_IN, m, u] = target, FREE, ZERO
    return target


@scalar
def weakest_friend(m, u, at, g):
    """Whom a Medivac heals by itself: of those hurt and near, the one with the smallest share of its health; or -1."""
    least, who = ONE, -1
    first, last = friends_of(u, g)
    for v in range(first, last):
        if g.real[HEALTH, m, v] > ZERO and can_heal(m, u, v, g) and within(m, u, v, at, HEAL_SCAN, g):
            left = g.real[HEALTH, m, v] / stat(MAX_HEALTH, m, v, g)
            if left < least:
                least, who = left, v
    g.whole[TARGET, m, u] = who
    return who


@scalar
def strike(m, u, target, early, first, loop, g):
    """u's attack does its damage in this loop, by rights `early` of a loop ago (0 or less), or it heals its target."""
    g.real[HITS_IN, m, u] = ZERO
    if is_healer(m, u, g):
        missing = stat(MAX_HEALTH, m, target, g) - g.real[HEALTH, m, target]
        amount = min(min(HEAL_RATE, missing), g.real[ENERGY, m, u] * HEALTH_PER_ENERGY)
        g.real[HEALING, m, u] = amount
        g.real[ENERGY, m, u] -= amount / HEALTH_PER_ENERGY
        g.whole[SHOT, m, u] = HEALED
        return
    if g.rule.splash and stat(SPLASH, m, u, g) == BLAST:
        g.whole[SHOT, m, u] = EXPLODED
        return
    g.whole[SHOT, m, u] = SWEPT if g.rule.splash and stat(SPLASH, m, u, g) == LINE else 1 + target
    if first:  # not the second blow of a zealot
        delay = DELAY_LEAST + DELAY_SPREAD * uniform(g.match[m, KEY], g.match[m, EPISODE], loop, u * 8 + FOR_DELAY)
        g.real[COOLDOWN, m, u] = early + stat(PERIOD, m, u, g) - stat(WIND_UP, m, u, g) + delay - ONE
        g.real[STANDS_UNTIL, m, u] = F32(loop) + stat(BACKSWING, m, u, g)
        if stat(INTERVAL, m, u, g) > ZERO:
            g.real[HITS_IN, m, u] = early + stat(INTERVAL, m, u, g)


@scalar
def decide(m, u, at, loop, g):
    g.real[WANT_X, m, u], g.real[WANT_Y, m, u], g.whole[SHOT, m, u] = ZERO, ZERO, NOTHING
    if g.real[HEALTH, m, u] <= ZERO:
        g.real[SOLID, m, u] = ZERO
        if g.rule.splash and g.whole[TRAITS, m, u] < 0:
            g.whole[TRAITS, m, u], g.whole[SHOT, m, u] = traits(m, u, g), EXPLODED
        return
    g.real[SOLID, m, u] = ZERO if flies(m, u, g) else stat(SEPARATION, m, u, g)

    order, target = g.whole[ORDER, m, u], -1
    goes = order == GO or (order == FIGHT and g.rule.random_teams is None)
    x, y = g.real[GOAL_X, m, u], g.real[GOAL_Y, m, u]
    if order == ENGAGE:
        target = g.whole[TARGET, m, u]
        if g.real[HEALTH, m, target] <= ZERO or not (can_hit(m, u, target, g) or can_heal(m, u, target, g)):
            target = -1
    elif order == FIGHT and g.rule.random_teams is not None:
        target = weakest_friend(m, u, at, g) if is_healer(m, u, g) else hunted(m, u, at, loop, g)
    elif order == FIGHT:
        if is_healer(m, u, g):  # heal the nearest who is hurt, else stay with the others
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
        hits_in, slop = g.real[HITS_IN, m, u], stat(SLOP, m, u, g) if g.whole[STANCE, m, u] == FIRING else ZERO
        goes = not within(m, u, target, at, stat(RANGE, m, u, g) + slop, g)
        if goes:
            x, y = g.real[at, m, target], g.real[at + 1, m, target]
            g.real[HITS_IN, m, u] = ZERO
            if g.whole[STANCE, m, u] == FIRING:
                g.whole[STANCE, m, u] = FREE
        elif hits_in > ZERO or overdue <= ZERO:
            g.whole[STANCE, m, u] = FIRING
            hits_in = hits_in - ONE if hits_in > ZERO else overdue + stat(WIND_UP, m, u, g)
            if hits_in <= ZERO:
                strike(m, u, target, hits_in, overdue <= ZERO, loop, g)
            else:
                g.real[HITS_IN, m, u] = hits_in
    if goes and F32(loop) >= g.real[STANDS_UNTIL, m, u]:
        walk(m, u, at, x, y, g)
    if is_healer(m, u, g):
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
    return deep <= LINE_DEEP + stat(RADIUS, m, v, g) and across <= LINE_ACROSS + stat(RADIUS, m, v, g)


@scalar
def splashed(m, u, v, at, g):
    """Whether what u has just done to more than one hits its foe v."""
    if flies(m, v, g):
        return False
    if g.whole[SHOT, m, u] == EXPLODED:
        reach = BLAST_RADIUS + stat(RADIUS, m, v, g)
        return squared_distance(m, u, v, at, g) <= reach * reach
    return g.whole[SHOT, m, u] == SWEPT and in_the_line(m, u, v, at, g)


@scalar
def hit(m, u, v, health, shield, g):
    """(health, shield) of u after an attack by v: shields first, which have no armour."""
    damage = (
        stat(DAMAGE, m, v, g)
        + stat(VERSUS_LIGHT, m, v, g) * stat(LIGHT, m, u, g)
        + stat(VERSUS_ARMOURED, m, v, g) * stat(ARMOURED, m, u, g)
    )
    for _ in range(int(stat(HITS, m, v, g))):
        absorbed = min(shield, damage)
        shield -= absorbed
        if damage > absorbed:
            health -= max(HALF, damage - absorbed - stat(ARMOUR, m, u, g))
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
                health, shield = hit(m, u, v, health, shield, g)
                shooter = v
        if shooter >= 0:
            g.real[HURT_AT, m, u] = F32(loop)
            if F32(loop) >= g.real[QUIET_UNTIL, m, u]:
                g.real[QUIET_UNTIL, m, u] = F32(loop) + CALL_PAUSE
    g.whole[SHOOTER, m, u] = shooter
    if g.rule.splash and stat(SPLASH, m, u, g) == BLAST:
        if g.whole[SHOT, m, u] == EXPLODED:
            health = ZERO
        elif health <= ZERO:
            g.whole[TRAITS, m, u] = -1 - traits(m, u, g)
    if health <= ZERO:
        g.real[HEALTH, m, u], g.real[SHIELD, m, u] = ZERO, ZERO
        return
    health += stat(REGENERATION, m, u, g)
    if g.rule.healers:
        first, last = friends_of(u, g)
        for v in range(first, last):
            if g.whole[SHOT, m, v] == HEALED and g.whole[TARGET, m, v] == u:
                health += g.real[HEALING, m, v]
    if F32(loop) - g.real[HURT_AT, m, u] >= SHIELD_DELAY:
        shield += SHIELD_REGENERATION
    g.real[HEALTH, m, u] = min(health, stat(MAX_HEALTH, m, u, g))
    g.real[SHIELD, m, u] = min(shield, stat(MAX_SHIELD, m, u, g))


@scalar
def who_is_near(m, u, first, at, g):
    """The bits of those, from `first` on, who stand near enough to matter to u's next step."""
    x, y, reach = g.real[at, m, u], g.real[at + 1, m, u], stat(SEPARATION, m, u, g) + g.rule.near
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
    free = length - g.real[SOLID, m, v] - stat(SEPARATION, m, u, g)
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
def way_round(m, u, at, loop, blocker, mask, g):
    """For how many loops u, whom the blocker holds up, walks sideways: to the side on which fewer are near."""
    crowd, first = ZERO, 0  # how far those near are to the left, all together
    if g.rule.surround:
        while first < g.rule.units:
            if g.rule.units > BITS:
                mask = who_is_near(m, u, first, at, g)
            while mask != 0:
                bit, mask = pop_bit(mask)
                dx, dy, _ = room(m, u, first + bit, at, g)
                crowd += g.real[WANT_X, m, u] * dy - g.real[WANT_Y, m, u] * dx
            first += BITS
    elif g.real[WANT_X, m, blocker] != ZERO or g.real[WANT_Y, m, blocker] != ZERO:
        return 0  # it gets out of the way by itself
    if crowd == ZERO:
        left = draw(g.match[m, KEY], g.match[m, EPISODE], loop // 64, u * 8 + FOR_SIDESTEP) & 1
        return DETOUR_LOOPS if left else -DETOUR_LOOPS
    return DETOUR_LOOPS if crowd < ZERO else -DETOUR_LOOPS


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
        if blocker >= 0 and x * wx + y * wy < BLOCKED * wanted and g.whole[DETOUR, m, u] == 0:
            g.whole[DETOUR, m, u] = way_round(m, u, at, loop, blocker, mask, g)
        crowded = near & (near - 1) != 0 or g.rule.units > BITS  # by more than one
        (column, row), climbs = cell_of(px, py, g), stat(CLIMBS, m, u, g) > ZERO
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
    if g.rule.cone is not None and action >= ATTACK and action < g.rule.attack:  # the order before goes on
        g.whole[TRAITS, m, u] = traits(m, u, g) % FACING + FACING * (action - ATTACK)
        return
    target = action - g.rule.attack + (0 if stat(HEALS, m, u, g) > ZERO else g.rule.allies)
    if g.rule.free_aim is not None and action >= g.rule.attack:
        reach = reaches(m, u, g)
        if squared_distance(m, u, target, X, g) > reach * reach:
            return  # here, too
    g.whole[ORDER, m, u], g.whole[DETOUR, m, u], g.real[STANDS_UNTIL, m, u] = STAY, 0, ZERO
    if action < ATTACK or target != g.whole[TARGET, m, u]:  # an attack under way is broken off
        g.real[HITS_IN, m, u], g.whole[STANCE, m, u] = ZERO, FREE
    if action >= g.rule.attack:
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
        return abs(dealt) if g.rule.random_teams is None else max(dealt, ZERO)
    return dealt - taken * g.rule.negative_scale


@scalar
def judge(m, g):
    """(reward, terminated, won) of the step that has just been played."""
    allies, enemies = 0, 0
    for u in range(g.rule.units):
        if g.real[HEALTH, m, u] > ZERO and not (g.rule.medivacs_do_not_count and stat(HEALS, m, u, g) > ZERO):
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
    return reward / scale_of(m, g), terminated, won


@scalar
def scale_of(m, g):
    """What rewards are divided by. With random teams the best return of every match is the same."""
    if g.rule.random_teams is None:
        return g.rule.scale
    if g.rule.scale == ZERO:
        return ONE
    best = g.rule.win
    for u in range(g.rule.allies, g.rule.units):
        best += g.rule.death + stat(MAX_HEALTH, m, u, g) + stat(MAX_SHIELD, m, u, g)
    return best / g.rule.scale


# ---- reset ----
@scalar
def chance(m, number, purpose, g):
    return uniform(g.match[m, KEY], g.match[m, EPISODE], number, purpose)


@scalar
def drawn_kind(m, draft, i, g):
    number, kind = chance(m, draft * MOST_IN_TEAM + i, FOR_KIND, g), 0
    while kind < KINDS - 1 and number >= g.start[SHARE, kind]:
        kind += 1
    return kind


@scalar
def first_draft(m, first, last, g):
    """The first draft of a team in which not all, from number `first` on, are of the rare kind."""
    draft, found = 0, g.rule.rare < 0 or last <= first
    while not found and draft < MOST_DRAFTS:
        for i in range(first, last):
            found |= drawn_kind(m, draft, i, g) != g.rule.rare
        if not found:
            draft += 1
    return draft


@scalar
def ally_spawn(m, i, surrounded, g):
    """Where the ally that is drawn as number i starts."""
    if surrounded:
        return F32(g.rule.width) * HALF + g.start[SPAWN_X, i], F32(g.rule.height) * HALF + g.start[SPAWN_Y, i]
    return chance(m, i, FOR_PLACE, g) * HALF_FIELD, chance(m, 1000 + i, FOR_PLACE, g) * F32(g.rule.height)


@scalar
def crowded(point, k, size, field, most, g):
    """Where number k of a group stands on one axis: round the point or, where there is no room, inwards of it."""
    offset, extent = g.start[field, k], ZERO
    for j in range(size):
        extent = max(extent, abs(g.start[field, j]))
    if point >= extent and point + extent < most:
        return point + offset
    inwards = ONE if point < most * HALF else -ONE
    offset *= inwards
    offset = F32(2) * offset - g.rule.pitch if offset > ZERO else F32(-2) * offset  # those of both sides in turn
    return point + inwards * offset


@scalar
def ambush_spawn(m, i, g):
    """Where the enemy of number i starts round the allies: on one of four diagonals, with all of its group."""
    groups, width, height = 1 + int(chance(m, 2000, FOR_PLACE, g) * F32(4)), F32(g.rule.width), F32(g.rule.height)
    enemies = g.rule.units - g.rule.allies
    before, group, size = 0, 0, 0  # of the groups, one after the other, up to the one that has number i
    for k in range(groups):
        size = 0
        for j in range(enemies):
            size += int(int(chance(m, 2100 + j, FOR_PLACE, g) * F32(groups)) == k)
        group = k
        if i < before + size:
            break
        before += size
    taken, corner = 0, 0
    for k in range(group + 1):  # each group has a diagonal of its own
        corner = int(chance(m, 2200 + k, FOR_PLACE, g) * F32(4 - k))
        for j in range(4):
            if j <= corner and (taken >> j) & 1:
                corner += 1
        taken |= 1 << corner
    t, east, north = chance(m, 2300 + group, FOR_PLACE, g), corner >= 2, corner == 1 or corner == 2
    cx, cy = width if east else ZERO, height if north else ZERO
    ix, iy = width * HALF + (F32(2) if east else F32(-2)), height * HALF + (F32(2) if north else F32(-2))
    x, y = t * ix + (ONE - t) * cx, t * iy + (ONE - t) * cy
    return crowded(x, i - before, size, SPAWN_X, width, g), crowded(y, i - before, size, SPAWN_Y, height, g)


@scalar
def member(m, u, g):
    """(kind, x, y) of unit u at the start of a match with random teams."""
    allies, enemies, surrounded = g.rule.allies, g.rule.units - g.rule.allies, chance(m, 3000, FOR_PLACE, g) > HALF
    draft, i, kind, x, y = first_draft(m, 0, allies, g), u - allies, 0, ZERO, ZERO
    if u >= allies:
        kind = drawn_kind(m, draft if i < allies else first_draft(m, allies, enemies, g), i, g)
        if surrounded:
            x, y = ambush_spawn(m, i, g)
        elif i < allies:  # a mirror image
            x, y = ally_spawn(m, i, False, g)
            x = F32(g.rule.width) - x
        else:
            x, y = F32(g.rule.width) * HALF * (ONE + chance(m, i, FOR_PLACE, g)), chance(m, 1000 + i, FOR_PLACE, g)
            y *= F32(g.rule.height)
    else:  # agents are numbered by kind, then by place
        for j in range(allies):
            kind, (x, y), place = drawn_kind(m, draft, j, g), ally_spawn(m, j, surrounded, g), 0
            for k in range(allies):
                other, (ox, oy) = drawn_kind(m, draft, k, g), ally_spawn(m, k, surrounded, g)
                rank, others_rank = g.start[RANK, kind], g.start[RANK, other]
                same_x = others_rank == rank and ox == x
                first = others_rank < rank or (others_rank == rank and ox < x)
                place += int(first or (same_x and oy < y) or (same_x and oy == y and k < j))
            if place == u:
                break
    edge = F32(0.001)
    return kind, min(max(x, edge), F32(g.rule.width) - edge), min(max(y, edge), F32(g.rule.height) - edge)


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
    if g.rule.random_teams is not None:
        g.whole[TRAITS, m, u], g.real[X, m, u], g.real[Y, m, u] = member(m, u, g)
    else:
        g.real[X, m, u], g.real[Y, m, u] = g.start[SPAWN_X, u] + shift_x, g.start[SPAWN_Y, u] + shift_y
    g.real[HEALTH, m, u], g.real[SHIELD, m, u] = stat(MAX_HEALTH, m, u, g), stat(MAX_SHIELD, m, u, g)
    if stat(HEALS, m, u, g) > ZERO:
        g.real[ENERGY, m, u] = ENERGY_START
    g.whole[TARGET, m, u], g.whole[SHOOTER, m, u], g.whole[LAST_ACTION, m, u] = -1, NOBODY, -1
    if u >= g.rule.allies or g.rule.auto_allies:
        g.whole[ORDER, m, u] = FIGHT
        g.real[GOAL_X, m, u] = g.start[ORDER_X, u] + along * g.start[SPAN_X, u]
        g.real[GOAL_Y, m, u] = g.start[ORDER_Y, u] + along * g.start[SPAN_Y, u]

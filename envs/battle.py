"""Battles after SMAC, the StarCraft multi-agent challenge: its 23 maps, observations, actions, masks and rewards.

One match is scalar code. An environment step is eight game loops, a loop two phases, each a function of one unit that
reads only what the phase before it wrote, so that no order of units favours anyone:

    decide   pick a target, fire or heal if it is in range, else say where one wants to go
    clash    take the damage of the shots fired, then move, keeping apart from the others

Arrays are indexed by field, match m and unit u (allies first, then enemies): `g.real[HEALTH, m, u]`. docs/battles.md
has the rules in words.
"""

from collections import namedtuple

import numpy as np
import torch

from envs import paths, vector
from envs.batch import (
    EPISODE,
    FINAL,
    FROZEN,
    HANDS,
    KEY,
    LOOK,
    OUTPUTS,
    OVER,
    PLAY,
    RESTART,
    RUNNING,
    STAGE,
    STEP,
    Batch,
)  # fmt: skip
from envs.battle_data import MAPS, TERRAINS, TYPES
from envs.battle_setup import LOOPS_PER_SECOND, SPAWN_SHIFT, build_units, resize
from envs.vector import barrier, draw, pop_bit, root, scalar, uniform

F32 = np.float32

# ---- the fields of a unit: real[field, m, u] and whole[field, m, u]; all but the KEPT ones last one step ----
REAL = ("X", "Y", "HEALTH", "SHIELD", "COOLDOWN", "ENERGY", "HURT_AT", "GOAL_X", "GOAL_Y", "BEFORE",
        "NEXT_X", "NEXT_Y", "WANT_X", "WANT_Y", "SOLID", "HEALING")  # fmt: skip
(X, Y, HEALTH, SHIELD, COOLDOWN, ENERGY, HURT_AT, GOAL_X, GOAL_Y, BEFORE,
 NEXT_X, NEXT_Y, WANT_X, WANT_Y, SOLID, HEALING) = range(len(REAL))  # fmt: skip
KEPT_REAL = NEXT_X
# HURT_AT: the loop of the last damage; SOLID: the room it takes on the ground; BEFORE: health and shield at first
WHOLE = ("TARGET", "ORDER", "PROVOKED", "SHOOTER", "FUSE", "DETOUR", "LAST_ACTION", "SHOT")
TARGET, ORDER, PROVOKED, SHOOTER, FUSE, DETOUR, LAST_ACTION, SHOT = range(len(WHOLE))
KEPT_WHOLE = SHOT
# FUSE: explodes in the next loop; DETOUR: loops still to walk sideways, left or (negative) right
# ---- what never changes about a unit: stat[field, u] ----
STAT = ("RADIUS", "SEPARATION", "RANGE", "SCAN", "SPEED", "PERIOD", "DAMAGE", "HITS", "VERSUS_LIGHT", "VERSUS_ARMOURED",
        "ARMOUR", "LIGHT", "ARMOURED", "BIOLOGICAL", "FLIES", "CLIMBS", "HITS_AIR", "SPLASH", "HEALS", "MAX_HEALTH",
        "MAX_SHIELD", "REGENERATION", "COOLDOWN_SCALE", "TYPE_BIT", "SPAWN_X", "SPAWN_Y", "GROUP", "ORDER_X", "ORDER_Y",
        "SPAN_X", "SPAN_Y")  # fmt: skip
(RADIUS, SEPARATION, RANGE, SCAN, SPEED, PERIOD, DAMAGE, HITS, VERSUS_LIGHT, VERSUS_ARMOURED, ARMOUR, LIGHT, ARMOURED,
 BIOLOGICAL, FLIES, CLIMBS, HITS_AIR, SPLASH, HEALS, MAX_HEALTH, MAX_SHIELD, REGENERATION, COOLDOWN_SCALE, TYPE_BIT,
 SPAWN_X, SPAWN_Y, GROUP, ORDER_X, ORDER_Y, SPAN_X, SPAN_Y) = range(len(STAT))  # fmt: skip

STAY, GO, ENGAGE, FIGHT = range(4)  # orders: stand, walk to GOAL, attack or heal TARGET, behave as the enemy does
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
BLAST_RADIUS = F32(2.2)
LINE_ACROSS, LINE_DEEP = F32(2.8 / 2), F32(0.3 / 2)
FOLLOW = F32(2)  # a Medivac with nobody to heal keeps this near to the nearest friend
BLOCKED = F32(0.3)  # who gets on by less than this part of a step, for one who stands, goes sideways for a while
DETOUR_LOOPS = 6
TOUCH = F32(1e-5)  # who slides past another at no distance must not be held by the last digit of a float
CROWD = 32  # units on a map
BITS = 62  # units in one mask
FOR_SPAWN, FOR_ORDER, FOR_DELAY, FOR_SIDESTEP, FOR_ACTION = range(5)  # what a random number is for

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

SCORE = LOOK + 1  # one more thing that a batch of battles can be told

# ---- what never changes about a match ----
Rule = namedtuple(
    "Rule",
    "allies units actions width height limit autoreset auto_allies medivacs_do_not_count "
    "open_ground healers fliers splash near "  # what maps without need not ask; how near others matter to a mover
    "sparse only_positive win defeat death negative_scale scale "
    "ally_shield enemy_shield types last_action pathing_grid terrain_height obs_time "
    "state_actions state_time state_is_obs "
    "enemies_at enemy_width friends_at friend_width self_at obs_dim state_dim state_units",  # columns
)
World = namedtuple(
    "World", "real whole match stat line ground waypoints rule"
)  # all that the rules need: the `g` below
Game = namedtuple(
    "Game", ("real", "whole", "match", "stat", "line", "ground", "waypoints", *OUTPUTS, *FINAL, *HANDS)
)  # the same for all matches of a batch, with what comes in and goes out


@scalar
def world_of(real, whole, match, stat, line, rule, game):
    return World(real, whole, match, stat, line, game.ground, game.waypoints, rule)


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
def nearest_foe(m, u, at, reach, g):
    """The nearest living foe that u can hit, no farther than `reach` from edge to edge; -1 if there is none."""
    best, who = FAR, -1
    first, last = foes_of(u, g)
    for v in range(first, last):
        squared = squared_distance(m, u, v, at, g)
        if (g.real[HEALTH, m, v] > ZERO) & (squared < best) and can_hit(u, v, g) and within(m, u, v, at, reach, g):
            best, who = squared, v
    return who


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
def choose_target(m, u, at, g):
    """The enemy's way: keep the target until it dies or gets away, else take the nearest, else who shot from afar."""
    target = g.whole[TARGET, m, u]
    if target >= 0:
        leash = SIGHT if g.whole[PROVOKED, m, u] else g.stat[SCAN, u]
        if g.real[HEALTH, m, target] <= ZERO or not within(m, u, target, at, leash, g):
            target = -1
    if target < 0:
        target = nearest_foe(m, u, at, g.stat[SCAN, u], g)
        g.whole[PROVOKED, m, u] = 0
        shooter = g.whole[SHOOTER, m, u]
        if target < 0 and shooter >= 0 and g.real[HEALTH, m, shooter] > ZERO and can_hit(u, shooter, g):
            target = shooter
            g.whole[PROVOKED, m, u] = 1
        g.whole[TARGET, m, u] = target
    g.whole[SHOOTER, m, u] = -1
    return target


@scalar
def fire(m, u, target, overdue, loop, g):
    """u attacks its target, which is in range, or heals it."""
    if is_healer(u, g):
        missing = g.stat[MAX_HEALTH, target] - g.real[HEALTH, m, target]
        amount = min(min(HEAL_RATE, missing), g.real[ENERGY, m, u] * HEALTH_PER_ENERGY)
        g.real[HEALING, m, u] = amount
        g.real[ENERGY, m, u] -= amount / HEALTH_PER_ENERGY
        g.whole[SHOT, m, u] = HEALED
    elif g.rule.splash and g.stat[SPLASH, u] == BLAST:
        g.whole[SHOT, m, u] = EXPLODED
    else:
        delay = DELAY_LEAST + DELAY_SPREAD * uniform(g.match[m, KEY], g.match[m, EPISODE], loop, u * 8 + FOR_DELAY)
        g.real[COOLDOWN, m, u] = overdue + g.stat[PERIOD, u] + delay - ONE
        g.whole[SHOT, m, u] = SWEPT if g.rule.splash and g.stat[SPLASH, u] == LINE else 1 + target


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
            target = choose_target(m, u, at, g)

    overdue = g.real[COOLDOWN, m, u]  # below zero: ready for that part of a loop, which counts for the next reload
    g.real[COOLDOWN, m, u] = overdue - ONE if overdue > ZERO else ZERO
    if target >= 0:
        goes = not within(m, u, target, at, g.stat[RANGE, u], g)
        if goes:
            x, y = g.real[at, m, target], g.real[at + 1, m, target]
        elif overdue <= ZERO:
            fire(m, u, target, overdue, loop, g)
    if goes:
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
    first, last = foes_of(u, g)
    for v in range(first, last):
        shot = g.whole[SHOT, m, v]
        if shot == 1 + u or (g.rule.splash and shot < 0 and splashed(m, v, u, at, g)):
            health, shield = hit(u, v, health, shield, g)
            g.real[HURT_AT, m, u], g.whole[SHOOTER, m, u] = F32(loop), v
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
    g.whole[ORDER, m, u], g.whole[DETOUR, m, u] = STAY, 0
    if action >= ATTACK:
        g.whole[ORDER, m, u] = ENGAGE
        g.whole[TARGET, m, u] = action - ATTACK + (0 if g.stat[HEALS, u] > ZERO else g.rule.allies)
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
    """(reward, terminated, truncated, won) of the step that has just been played."""
    allies, enemies = 0, 0
    for u in range(g.rule.units):
        if g.real[HEALTH, m, u] > ZERO and not (g.rule.medivacs_do_not_count and g.stat[HEALS, u] > ZERO):
            if u < g.rule.allies:
                allies += 1
            else:
                enemies += 1
    g.match[m, STEP] += 1
    won, lost = allies > 0 and enemies == 0, allies == 0 and enemies > 0
    terminated = allies == 0 or enemies == 0
    truncated = not terminated and g.match[m, STEP] >= g.rule.limit
    if terminated or truncated:
        g.match[m, STAGE] = OVER
    if g.rule.sparse:
        return (ONE if won else (-ONE if lost else ZERO)), terminated, truncated, won
    reward = battle_reward(m, g)
    if won:
        reward += g.rule.win
    if lost:
        reward += g.rule.defeat
    return reward / g.rule.scale, terminated, truncated, won


# ---- reset ----
@scalar
def place(m, u, g):
    """Unit u at the start of a match."""
    key, episode, group = g.match[m, KEY], g.match[m, EPISODE], int(g.stat[GROUP, u])
    shift_x = (uniform(key, episode, group, FOR_SPAWN) * F32(2) - ONE) * F32(SPAWN_SHIFT)
    shift_y = (uniform(key, episode, group + 1000, FOR_SPAWN) * F32(2) - ONE) * F32(SPAWN_SHIFT)
    along = uniform(key, episode, 0, FOR_ORDER)
    for field in range(len(REAL)):
        g.real[field, m, u] = ZERO
    for field in range(len(WHOLE)):
        g.whole[field, m, u] = 0
    g.real[X, m, u], g.real[Y, m, u] = g.stat[SPAWN_X, u] + shift_x, g.stat[SPAWN_Y, u] + shift_y
    g.real[HEALTH, m, u], g.real[SHIELD, m, u] = g.stat[MAX_HEALTH, u], g.stat[MAX_SHIELD, u]
    if g.stat[HEALS, u] > ZERO:
        g.real[ENERGY, m, u] = ENERGY_START
    g.whole[TARGET, m, u], g.whole[SHOOTER, m, u], g.whole[LAST_ACTION, m, u] = -1, -1, -1
    if u >= g.rule.allies or g.rule.auto_allies:
        g.whole[ORDER, m, u] = FIGHT
        g.real[GOAL_X, m, u] = g.stat[ORDER_X, u] + along * g.stat[SPAN_X, u]
        g.real[GOAL_Y, m, u] = g.stat[ORDER_Y, u] + along * g.stat[SPAN_Y, u]


# ---- what the agents see ----
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
def reveal(m, u, line, i, g):
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


# ---- the program: a match from one call to the next ----
@scalar
def run_one(op, m, row, lane, lanes, g, game):
    """Match m of the batch: its outputs are game's row m, its simulation row `row` of g."""
    state, avail, alone = game.state, game.avail, lanes == 1
    agents, units, actions = g.rule.allies, g.rule.units, g.rule.actions
    stage = g.match[row, STAGE]
    playing = op == PLAY and stage == RUNNING
    freezing = op == PLAY and stage == OVER
    restarting = op == RESTART and game.mask[m]
    barrier()
    if op == PLAY:
        if playing:
            for u in range(lane, units, lanes):
                g.real[BEFORE, row, u] = g.real[HEALTH, row, u] + g.real[SHIELD, row, u]
            for a in range(lane, agents, lanes):
                action = game.actions[m, a]
                if action < 0 or action >= actions or not avail[m, a, action]:
                    action = STOP if g.real[HEALTH, row, a] > ZERO else NO_OP
                take_order(row, a, action, g)
        barrier()
        for k in range(LOOPS):
            loop, at = np.uint32(g.match[row, STEP] * LOOPS + k), NEXT_X * (k & 1)
            if playing:
                for u in range(lane, units, lanes):
                    decide(row, u, at, loop, g)
            barrier()
            if playing:
                for u in range(lane, units, lanes):
                    suffer(row, u, at, loop, g)
                    move(row, u, at, loop, g)
            barrier()
        if playing and lane == 0:
            reward, game.terminated[m], game.truncated[m], game.won[m] = judge(row, g)
            for a in range(agents):
                game.reward[m, a] = reward
        if freezing:
            for u in range(lane, units, lanes):
                g.real[HEALTH, row, u], g.whole[LAST_ACTION, row, u] = ZERO, -1
            for a in range(lane, agents, lanes):
                game.reward[m, a] = ZERO
            if lane == 0:
                g.match[row, STAGE] = FROZEN
        barrier()

    if op == SCORE and lane == 0:
        game.reward[m, 0] = battle_reward(row, g) / g.rule.scale
    shown = playing or freezing or op == LOOK
    for turn in range(2):  # once for what there is, once more for a match that starts
        if turn == 1:
            keep = playing and g.rule.autoreset == 1 and g.match[row, STAGE] == OVER
            restarting = restarting or keep
            barrier()
            if keep:
                for a in range(agents):
                    for column in range(lane, g.rule.obs_dim, lanes):
                        game.final_obs[m, a, column] = game.obs[m * agents + a, column]
                    for action in range(lane, actions, lanes):
                        game.final_avail[m, a, action] = avail[m, a, action]
                for column in range(lane, g.rule.state_dim, lanes):
                    game.final_state[m, column] = state[m, column]
            elif restarting:
                for a in range(lane, agents, lanes):
                    game.reward[m, a] = ZERO
                if lane == 0:
                    game.terminated[m], game.truncated[m], game.won[m] = False, False, False
            if restarting and lane == 0:
                g.match[row, EPISODE] += 1
                g.match[row, STEP], g.match[row, STAGE] = 0, RUNNING
            barrier()
            if restarting:
                for u in range(lane, units, lanes):
                    place(row, u, g)
            barrier()
            shown = restarting
        for a in range(agents):
            line, i = (
                (game.obs, m * agents + a) if alone else (g.line, row)
            )  # many lanes write a line together, then out at once
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
                    game.obs[m * agents + a, column] = g.line[row, column]
            barrier()
        line, i = (state, m) if alone else (g.line, row)
        if shown and not g.rule.state_is_obs:
            for u in range(lane, units, lanes):
                reveal(row, u, line, i, g)
        barrier()
        if shown and g.rule.state_is_obs:
            for a in range(agents):
                for column in range(lane, g.rule.obs_dim, lanes):
                    state[m, a * g.rule.obs_dim + column] = game.obs[m * agents + a, column]
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


# ---- scripted policies: one action for one agent; what it may do is avail[m, a] ----
POLICIES = ("nearest", "weakest", "kite", "random", "hold")
NEAREST, WEAKEST, KITE, RANDOM, HOLD = range(len(POLICIES))


@scalar
def step_towards(m, a, dx, dy, avail):
    """The available move that goes most in direction (dx, dy); stop if none does."""
    best, choice = ZERO, STOP
    for action in range(NORTH, ATTACK):
        x, y = compass(action)
        ahead = dx * x + dy * y
        if avail[m, a, action] and ahead > best:
            best, choice = ahead, action
    return choice


@scalar
def approach(m, a, v, avail, g):
    x, y = heading(m, a, X, g.real[X, m, v], g.real[Y, m, v], g)
    return step_towards(m, a, x - g.real[X, m, a], y - g.real[Y, m, a], avail)


@scalar
def random_action(m, a, avail, g):
    number = draw(g.match[m, KEY], g.match[m, EPISODE], g.match[m, STEP], a * 8 + FOR_ACTION)
    action = number % g.rule.actions
    for k in range(64):  # draw until an available one comes up
        if avail[m, a, action]:
            return action
        number = draw(number, k, 0, 0)
        action = number % g.rule.actions
    while not avail[m, a, action]:
        action = (action + 1) % g.rule.actions
    return action


@scalar
def scripted_action(m, a, policy, avail, g):
    if g.real[HEALTH, m, a] <= ZERO:
        return NO_OP
    if policy == RANDOM:
        return random_action(m, a, avail, g)
    if is_healer(a, g):
        friend = nearest_friend(m, a, X, True, g)
        if friend < 0:
            friend = nearest_friend(m, a, X, False, g)
            if friend < 0 or within(m, a, friend, X, FOLLOW, g):
                return STOP
            return STOP if policy == HOLD else approach(m, a, friend, avail, g)
        if avail[m, a, ATTACK + friend]:
            return ATTACK + friend
        return STOP if policy == HOLD else approach(m, a, friend, avail, g)
    foe = nearest_foe(m, a, X, FAR, g)
    if foe < 0:
        return STOP
    if policy == HOLD:
        reached = avail[m, a, ATTACK + foe - g.rule.allies] and within(m, a, foe, X, g.stat[RANGE, a], g)
        return ATTACK + foe - g.rule.allies if reached else STOP
    if policy == KITE and g.real[COOLDOWN, m, a] > ZERO and squared_distance(m, a, foe, X, g) <= SHOOT * SHOOT:
        return step_towards(m, a, g.real[X, m, a] - g.real[X, m, foe], g.real[Y, m, a] - g.real[Y, m, foe], avail)
    if policy == WEAKEST:
        least = FAR
        for v in range(g.rule.allies, g.rule.units):
            if avail[m, a, ATTACK + v - g.rule.allies] and can_hit(a, v, g):
                left = g.real[HEALTH, m, v] + g.real[SHIELD, m, v]
                if left < least:
                    least, foe = left, v
    if avail[m, a, ATTACK + foe - g.rule.allies]:
        return ATTACK + foe - g.rule.allies
    return approach(m, a, foe, avail, g)


# ---- the programs, on a batch as it lies ----
@scalar
def run_here(op, m, lane, lanes, rule, game):
    run_one(op, m, m, lane, lanes, world_of(game.real, game.whole, game.match, game.stat, game.line, rule, game), game)


@scalar
def act_here(op, m, lane, lanes, rule, game):
    g = world_of(game.real, game.whole, game.match, game.stat, game.line, rule, game)
    for a in range(lane, rule.allies, lanes):
        game.scripted[m, a] = scripted_action(m, a, game.policy[m, a], game.avail, g)


def _shots(real, whole, stat, step):
    """Who hit or healed whom in the last step, [from, to, "hit" or "heal"], as far as it can be told from its end.

    Shots are not kept. But whoever fires in a step has nearly all of its reloading still before it, and its target is
    hurt in the same step; once in a while one shot is told of twice. A baneling that has just died has exploded.
    """
    shots = []
    for u, target in enumerate(whole[TARGET].tolist()):
        if target < 0 or whole[ORDER, u] not in (ENGAGE, FIGHT):
            continue
        lives, hurt = real[HEALTH, u] > 0, real[HURT_AT, target] >= (step - 1) * LOOPS
        if stat[HEALS, u]:
            reach = stat[RANGE, u] + stat[RADIUS, u] + stat[RADIUS, target]
            near = np.hypot(*(real[[X, Y], u] - real[[X, Y], target])) <= reach
            if lives and near and real[HEALTH, target] > 0 and real[ENERGY, u] > 0:
                shots.append([u, target, "heal"])
        elif stat[SPLASH, u] == BLAST:
            if not lives and real[BEFORE, u] > 0:
                shots.append([u, target, "hit"])
        elif lives and hurt and real[COOLDOWN, u] > max(stat[PERIOD, u] + DELAY_LEAST - LOOPS, 0):
            shots.append([u, target, "hit"])
    return shots


class Battle(Batch):
    """Matches on one map. docs/battles.md describes the rules and the options; envs.make builds one."""

    policies = POLICIES
    hit_distance = 1.0  # how near a predicted place must be to count as right

    def __init__(
        self,
        name,
        num_envs=1,
        device="cpu",
        seed=0,
        n_agents=None,
        *,
        autoreset=False,
        check=None,
        auto_allies=False,
        map_spec=None,
        obs_last_action=False,
        obs_pathing_grid=False,
        obs_terrain_height=False,
        obs_timestep_number=False,
        obs_instead_of_state=False,
        state_last_action=True,
        state_timestep_number=False,
        reward_sparse=False,
        reward_only_positive=True,
        reward_death_value=10.0,
        reward_win=200.0,
        reward_defeat=0.0,
        reward_negative_scale=0.5,
        reward_scale=True,
        reward_scale_rate=20.0,
    ):
        spec = map_spec or MAPS[name]
        ground = paths.read_terrain(TERRAINS[spec.terrain])
        waypoints = paths.waypoints(TERRAINS[spec.terrain])
        groups = resize(spec, n_agents, name)
        kinds, facts = build_units(spec, groups, ground)
        stat = np.stack([facts[name.lower()] for name in STAT])
        allies = sum(count for count, _, _ in groups[0])
        enemies = len(kinds) - allies
        actions = ATTACK + enemies
        types, ally_shield, enemy_shield = (
            len(TYPES[spec.types][1]),
            int(spec.races[0] == "P"),
            int(spec.races[1] == "P"),
        )
        enemies_at = ATTACK - NORTH + (len(POINTS) - 1) * obs_pathing_grid + len(POINTS) * obs_terrain_height
        enemy_width, friend_width = 5 + enemy_shield + types, 5 + ally_shield + types + actions * obs_last_action
        friends_at = enemies_at + enemies * enemy_width
        self_at = friends_at + (allies - 1) * friend_width
        obs_dim = self_at + 1 + ally_shield + types + obs_timestep_number
        state_units = allies * (4 + ally_shield + types) + enemies * (3 + enemy_shield + types)
        state_dim = state_units + allies * actions * state_last_action + state_timestep_number
        if obs_instead_of_state:
            state_dim = allies * obs_dim
        self.n_enemies, self.unit_kinds = enemies, kinds
        self._ground_rows = list(reversed(TERRAINS[spec.terrain].split()))
        super().__init__(
            name, num_envs, device, seed, [f"{kind}_{a}" for a, kind in enumerate(kinds[:allies])],
            (actions, obs_dim, state_dim, spec.limit), autoreset, check,
            {"real": (torch.float32, (len(REAL), num_envs, len(kinds))),
             "whole": (torch.int32, (len(WHOLE), num_envs, len(kinds)))},
        )  # fmt: skip

        full = stat[MAX_HEALTH, allies:].sum() + stat[MAX_SHIELD, allies:].sum()
        best = reward_death_value * enemies + reward_win + full
        rule = Rule(
            allies=allies, units=len(kinds), actions=actions, width=ground.shape[1], height=ground.shape[0],
            limit=spec.limit, autoreset=int(autoreset), auto_allies=int(auto_allies),
            medivacs_do_not_count=int(spec.types == "MMM"),
            open_ground=int(waypoints is None), healers=int(stat[HEALS].any()), fliers=int(stat[FLIES].any()),
            splash=int(stat[SPLASH].any()), near=F32(2 * stat[SPEED].max() + 0.01),
            sparse=int(reward_sparse), only_positive=int(reward_only_positive), win=F32(reward_win),
            defeat=F32(reward_defeat), death=F32(reward_death_value), negative_scale=F32(reward_negative_scale),
            scale=F32(best / reward_scale_rate if reward_scale else 1.0),
            ally_shield=ally_shield, enemy_shield=enemy_shield, types=types, last_action=int(obs_last_action),
            pathing_grid=int(obs_pathing_grid), terrain_height=int(obs_terrain_height),
            obs_time=int(obs_timestep_number),
            state_actions=int(state_last_action), state_time=int(state_timestep_number),
            state_is_obs=int(obs_instead_of_state),
            enemies_at=enemies_at, enemy_width=enemy_width, friends_at=friends_at,
            friend_width=friend_width, self_at=self_at, obs_dim=obs_dim, state_dim=state_dim, state_units=state_units,
        )  # fmt: skip
        self._rule = rule
        constant = {
            "stat": stat,
            "line": np.zeros((1, 1), np.float32),  # CUDA has a line in shared memory for each match
            "ground": ground.reshape(-1),
            "waypoints": np.zeros((1, 1, 1), np.int16) if waypoints is None else waypoints,
        }
        self._constant = {key: torch.as_tensor(value).to(self.device) for key, value in constant.items()}
        tensors = {**self._tensors(), **self._constant}
        tensors["obs"] = tensors["obs"].view(num_envs * allies, obs_dim)
        game = Game(**{key: vector.view(tensor) for key, tensor in tensors.items()})
        staged = vector.Staged(run_one, world_of, KEPT_REAL, KEPT_WHOLE, max(obs_dim, state_units))
        lanes = vector.lanes_for(len(kinds))
        self._run = vector.Runner(run_here, rule, game, self.device, lanes, staged)
        self._act = vector.Runner(act_here, rule, game, self.device, lanes)

    def set_units(self, x=None, y=None, health=None, shield=None, cooldown=None, energy=None, last_action=None):
        """Sets units by hand, (num_envs, allies + enemies) each, `last_action` (num_envs, n_agents) with -1 for none.

        Cooldown is in game loops. Setting health or shield counts as damage just taken. Returns (obs, info); no step.
        """
        if not self._started:
            raise RuntimeError("reset() comes before set_units()")
        real, whole = self._simulation["real"], self._simulation["whole"]
        fields = {X: x, Y: y, HEALTH: health, SHIELD: shield, COOLDOWN: cooldown, ENERGY: energy}
        for field, values in fields.items():
            if values is not None:
                real[field] = self._fitting(REAL[field].lower(), values, real[field])
        if health is not None or shield is not None:
            real[HURT_AT] = (self._simulation["match"][:, STEP] * LOOPS).unsqueeze(1).to(real.dtype)
        if last_action is not None:
            agents = whole[LAST_ACTION, :, : self.n_agents]
            agents[:] = self._fitting("last_action", last_action, agents)
        self._run(LOOK)
        return self._outputs["obs"], self._info

    def reward_since(self, health, shield):
        """(num_envs,) the shaped reward, without win or defeat, for coming from that health and shield to now."""
        real, reward = self._simulation["real"], self._outputs["reward"]
        real[BEFORE] = self._fitting("health", health, real[HEALTH]) + self._fitting("shield", shield, real[SHIELD])
        shown = reward.clone()
        self._run(SCORE)
        worth = reward[:, 0].clone()
        reward.copy_(shown)
        return worth

    def units(self):
        """What a match is made of now, by name, each (num_envs, allies + enemies): views, not copies."""
        real = self._simulation["real"]
        named = {"x": X, "y": Y, "health": HEALTH, "shield": SHIELD, "cooldown": COOLDOWN, "energy": ENERGY}
        return {key: real[field] for key, field in named.items()}

    def places(self, obs):
        """(x and y of every other unit from the agent (..., others, 2), whether it is seen), read off observations.

        Enemies first, then allies in order without the agent itself.
        """
        rule = self._rule
        enemies = obs[..., rule.enemies_at : rule.friends_at].unflatten(-1, (-1, rule.enemy_width))
        friends = obs[..., rule.friends_at : rule.self_at].unflatten(-1, (-1, rule.friend_width))
        both = torch.cat((enemies[..., 1:5], friends[..., 1:5]), -2)  # distance, x, y, health
        return both[..., 1:3] * float(SIGHT), both[..., 3] > 0

    def scene(self, index=0):
        """One match as it stands, in plain words and numbers, to be drawn."""
        real = self._simulation["real"][:KEPT_REAL, index].cpu().numpy()
        whole, stat = self._simulation["whole"][:, index].cpu().numpy(), self._constant["stat"].cpu().numpy()
        terminated, won = bool(self._outputs["terminated"][index]), bool(self._outputs["won"][index])
        match = self._simulation["match"][index].tolist()
        status = "running"
        if match[STAGE] != RUNNING:
            status = "won" if won else ("lost" if terminated else "time")
        unit_facts = zip(
            self.unit_kinds, *real[[X, Y, HEALTH, SHIELD]].tolist(), *stat[[RADIUS, MAX_HEALTH, MAX_SHIELD]].tolist()
        )
        return {
            "game": "battle",
            "title": self.name,
            "step": match[STEP],
            "limit": self.episode_limit,
            "width": len(self._ground_rows[0]),
            "height": len(self._ground_rows),
            "ground": self._ground_rows,
            "sight": float(SIGHT),
            "units": [
                {
                    "side": int(u >= self.n_agents),
                    "kind": kind,
                    "x": x,
                    "y": y,
                    "radius": radius,
                    "health": health,
                    "max_health": max_health,
                    "shield": shield,
                    "max_shield": max_shield,
                }
                for u, (kind, x, y, health, shield, radius, max_health, max_shield) in enumerate(unit_facts)
            ],
            "shots": [] if match[STAGE] == FROZEN else _shots(real, whole, stat, match[STEP]),
            "status": status,
        }

    def _fitting(self, name, values, like):
        values = torch.as_tensor(values, device=self.device)
        if values.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(like.shape)}, not {tuple(values.shape)}")
        return values.to(like.dtype)

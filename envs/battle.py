"""Battles after SMAC, the StarCraft multi-agent challenge: its 23 maps, observations, actions, masks and rewards.

One match is scalar code. An environment step is eight game loops, a loop two phases, each a function of one unit that
reads only what the phase before it wrote, so that no order of units favours anyone:

    decide   pick a target, fire or heal if it is in range, else say where one wants to go
    clash    take the damage of the shots fired, then move, keeping apart from the others

Arrays are indexed by match m, field and unit u (allies first, then enemies): `g.real[m, HEALTH, u]`. docs/battles.md
has the rules in words.
"""

import math
from collections import namedtuple

import gymnasium
import numpy as np
import torch

from envs import paths, vector
from envs.battle_data import MAPS, TERRAINS, TYPES, UNITS
from envs.vector import barrier, draw, root, scalar, uniform

F32 = np.float32

# ---- the fields of a unit: real[m, field, u] ----
REAL = ("X", "Y", "NEXT_X", "NEXT_Y", "HEALTH", "SHIELD", "COOLDOWN", "ENERGY", "HURT_AT", "WANT_X", "WANT_Y", "SOLID",
        "GOAL_X", "GOAL_Y", "HEALING", "BEFORE")  # fmt: skip
X, Y, NEXT_X, NEXT_Y, HEALTH, SHIELD, COOLDOWN, ENERGY, HURT_AT, WANT_X, WANT_Y, SOLID, GOAL_X, GOAL_Y, HEALING, BEFORE = (
    range(len(REAL))
)  # HURT_AT: the loop of the last damage; SOLID: the room it takes on the ground; BEFORE: health and shield at the step's start
WHOLE = ("TARGET", "ORDER", "SHOT", "PROVOKED", "SHOOTER", "FUSE", "LAST_ACTION")
TARGET, ORDER, SHOT, PROVOKED, SHOOTER, FUSE, LAST_ACTION = range(len(WHOLE))  # FUSE: explodes in the next loop
# ---- of a match: match[m, field] ----
MATCH = ("KEY", "EPISODE", "STEP", "STAGE")
KEY, EPISODE, STEP, STAGE = range(len(MATCH))
RUNNING, OVER, FROZEN = range(3)  # stages; the step after OVER freezes the match
# ---- what never changes about a unit: stat[field, u] ----
STAT = ("RADIUS", "SEPARATION", "RANGE", "SCAN", "SPEED", "PERIOD", "DAMAGE", "HITS", "VERSUS_LIGHT", "VERSUS_ARMOURED",
        "ARMOUR", "LIGHT", "ARMOURED", "BIOLOGICAL", "FLIES", "CLIMBS", "HITS_AIR", "SPLASH", "HEALS", "MAX_HEALTH",
        "MAX_SHIELD", "REGENERATION", "COOLDOWN_SCALE", "TYPE_BIT", "SPAWN_X", "SPAWN_Y", "GROUP", "ORDER_X", "ORDER_Y",
        "SPAN_X", "SPAN_Y")  # fmt: skip
(RADIUS, SEPARATION, RANGE, SCAN, SPEED, PERIOD, DAMAGE, HITS, VERSUS_LIGHT, VERSUS_ARMOURED, ARMOUR, LIGHT, ARMOURED,
 BIOLOGICAL, FLIES, CLIMBS, HITS_AIR, SPLASH, HEALS, MAX_HEALTH, MAX_SHIELD, REGENERATION, COOLDOWN_SCALE, TYPE_BIT,
 SPAWN_X, SPAWN_Y, GROUP, ORDER_X, ORDER_Y, SPAN_X, SPAN_Y) = range(len(STAT))  # fmt: skip

STAY, GO, ENGAGE, FIGHT = range(4)  # orders: stand, walk to GOAL, attack or heal TARGET, behave as the enemy does
NOTHING, FIRED, HEALED, EXPLODED = range(4)  # what a unit's SHOT was in this loop
SINGLE, LINE, BLAST = range(3)  # splash shapes
NO_OP, STOP, NORTH, SOUTH, EAST, WEST, ATTACK = range(7)  # actions; ATTACK + j is enemy (or patient) j

LOOPS = 8  # game loops in an environment step
LOOPS_PER_SECOND = 16
SIGHT, SHOOT = F32(9), F32(6)  # SMAC's, from centre to centre, for every unit
MOVE = F32(2)  # how far ahead a move action points; SMAC asks whether half of it is free
SCAN_AT_LEAST = 5.0
ZERO, HALF, ONE, THREE = F32(0), F32(0.5), F32(1), F32(3)
FAR = F32(1e9)
SHIELD_DELAY, SHIELD_REGENERATION = F32(10 * LOOPS_PER_SECOND), F32(2 / LOOPS_PER_SECOND)
HEAL_RATE, HEALTH_PER_ENERGY = F32(9 / LOOPS_PER_SECOND), F32(3)
ENERGY_START, ENERGY_MAX, ENERGY_REGENERATION = F32(50), F32(200), F32(0.5625 / LOOPS_PER_SECOND)
DELAY_LEAST, DELAY_SPREAD = F32(-1), F32(3)  # loops added at random to every attack's period
BLAST_RADIUS = F32(2.2)
LINE_ACROSS, LINE_DEEP = F32(2.8 / 2), F32(0.3 / 2)
FOLLOW = F32(2)  # a Medivac with nobody to heal keeps this near to the nearest friend
SPAWN_SHIFT = F32(0.1)
FOR_SPAWN, FOR_ORDER, FOR_DELAY, FOR_SIDESTEP, FOR_ACTION = range(5)  # what a random number is for

# ---- the columns of observation and state: layout[column] = (whose, which one, what, argument) ----
SELF, ENEMY, FRIEND, ANY = range(4)
(AVAILABLE, WALKABLE_AT, HEIGHT_AT, SEEN, DISTANCE, OFFSET_X, OFFSET_Y, PART_HEALTH, PART_SHIELD, IS_TYPE, LAST_WAS, TIME,
 CHARGE, PLACE_X, PLACE_Y) = range(15)  # fmt: skip
POINTS = ((0, 4), (0, -4), (4, 0), (-4, 0), (2, 2), (-2, -2), (2, -2), (-2, 2), (0, 0))  # where pathing and height are read

PLAY, RESTART, LOOK = range(3)  # what a batch can be told to do

# ---- what never changes about a match: rule[field], value[field] ----
RULE = ("ALLIES", "UNITS", "WIDTH", "HEIGHT", "OPEN_GROUND", "HEALERS", "MEDIVACS_DO_NOT_COUNT", "AUTO_ALLIES", "AUTORESET",
        "LIMIT", "STATE_IS_OBS", "SPARSE", "ONLY_POSITIVE")  # fmt: skip
(ALLIES, UNITS_IN_ALL, WIDTH, HEIGHT, OPEN_GROUND, HEALERS, MEDIVACS_DO_NOT_COUNT, AUTO_ALLIES, AUTORESET, LIMIT, STATE_IS_OBS,
 SPARSE, ONLY_POSITIVE) = range(len(RULE))  # fmt: skip
VALUE = ("NEAR", "WIN", "DEFEAT", "DEATH", "NEGATIVE_SCALE", "SCALE")
NEAR, WIN, DEFEAT, DEATH, NEGATIVE_SCALE, SCALE = range(len(VALUE))

SIMULATION = ("real", "whole", "match", "stat", "rule", "value", "ground", "waypoints")
OUTPUTS = ("obs", "state", "avail", "alive", "reward", "terminated", "truncated", "won", "final_obs", "final_state", "final_avail")
World = namedtuple("World", SIMULATION)  # all that the rules need: the `g` of the functions below
Game = namedtuple("Game", (*SIMULATION, *OUTPUTS, "obs_layout", "state_layout", "actions", "mask", "policy", "scripted"))


# ---- geometry ----
@scalar
def distance(m, u, v, at, g):
    dx, dy = g.real[m, at, v] - g.real[m, at, u], g.real[m, at + 1, v] - g.real[m, at + 1, u]
    return root(dx * dx + dy * dy)


@scalar
def gap_between(m, u, v, at, g):
    """Edge to edge: how weapons measure."""
    return distance(m, u, v, at, g) - g.stat[RADIUS, u] - g.stat[RADIUS, v]


@scalar
def cell_of(x, y, g):
    column, row = min(max(int(x), 0), g.rule[WIDTH] - 1), min(max(int(y), 0), g.rule[HEIGHT] - 1)
    return row * g.rule[WIDTH] + column


@scalar
def inside(column, row, g):
    return column >= 0 and row >= 0 and column < g.rule[WIDTH] and row < g.rule[HEIGHT]


@scalar
def may_stand(here, x, y, climbs, g):
    """Whether a unit in cell `here` may set foot on (x, y), at most a neighbouring cell away."""
    if x < ZERO or y < ZERO or not inside(int(x), int(y), g):
        return False
    there = int(y) * g.rule[WIDTH] + int(x)
    if there == here:
        return True
    if g.ground[here] == paths.WALL:  # put there by hand: out of it again
        return g.ground[there] != paths.WALL
    if not paths.joined(g.ground[here], g.ground[there], climbs):
        return False
    corner_1 = there // g.rule[WIDTH] * g.rule[WIDTH] + here % g.rule[WIDTH]
    corner_2 = here // g.rule[WIDTH] * g.rule[WIDTH] + there % g.rule[WIDTH]
    return paths.joined(g.ground[here], g.ground[corner_1], climbs) and paths.joined(g.ground[here], g.ground[corner_2], climbs)


@scalar
def heading(m, u, at, x, y, g):
    """The point to walk to next on the way to (x, y)."""
    if not g.rule[OPEN_GROUND] and g.stat[FLIES, u] == ZERO:
        layer = min(int(g.stat[CLIMBS, u]), g.waypoints.shape[0] - 1)
        there = cell_of(x, y, g)
        next_cell = g.waypoints[layer, cell_of(g.real[m, at, u], g.real[m, at + 1, u], g), there]
        if next_cell != there:
            return F32(next_cell % g.rule[WIDTH]) + HALF, F32(next_cell // g.rule[WIDTH]) + HALF
    return x, y


# ---- phase one: decide ----
@scalar
def walk(m, u, at, x, y, g):
    x, y = heading(m, u, at, x, y, g)
    dx, dy = x - g.real[m, at, u], y - g.real[m, at + 1, u]
    length, step = root(dx * dx + dy * dy), g.stat[SPEED, u]
    if length > step:
        part = step / length
        dx, dy = dx * part, dy * part
    g.real[m, WANT_X, u], g.real[m, WANT_Y, u] = dx, dy


@scalar
def can_hit(u, v, g):
    return g.stat[DAMAGE, u] > ZERO and (g.stat[FLIES, v] == ZERO or g.stat[HITS_AIR, u] > ZERO)


@scalar
def can_heal(u, v, g):
    return g.stat[HEALS, u] > ZERO and u != v and g.stat[BIOLOGICAL, v] > ZERO and g.stat[FLIES, v] == ZERO


@scalar
def nearest_foe(m, u, at, within, g):
    """The nearest living foe that u can hit, no farther than `within` from edge to edge; -1 if there is none."""
    best, who = within, -1
    first, last = (g.rule[ALLIES], g.rule[UNITS_IN_ALL]) if u < g.rule[ALLIES] else (0, g.rule[ALLIES])
    for v in range(first, last):
        if g.real[m, HEALTH, v] > ZERO and can_hit(u, v, g):
            gap = gap_between(m, u, v, at, g)
            if gap < best or (gap == best and who < 0):
                best, who = gap, v
    return who


@scalar
def nearest_friend(m, u, at, hurt_only, g):
    """The nearest living friend that u can heal; -1 if there is none."""
    best, who = FAR, -1
    first, last = (0, g.rule[ALLIES]) if u < g.rule[ALLIES] else (g.rule[ALLIES], g.rule[UNITS_IN_ALL])
    for v in range(first, last):
        if g.real[m, HEALTH, v] > ZERO and can_heal(u, v, g):
            if not hurt_only or g.real[m, HEALTH, v] < g.stat[MAX_HEALTH, v]:
                gap = gap_between(m, u, v, at, g)
                if gap < best:
                    best, who = gap, v
    return who


@scalar
def choose_target(m, u, at, g):
    """The enemy's behaviour: keep the target until it dies or gets away, else take the nearest, else whoever shot from afar."""
    target = g.whole[m, TARGET, u]
    if target >= 0:
        leash = SIGHT if g.whole[m, PROVOKED, u] else g.stat[SCAN, u]
        if g.real[m, HEALTH, target] <= ZERO or gap_between(m, u, target, at, g) > leash:
            target = -1
    if target < 0:
        target = nearest_foe(m, u, at, g.stat[SCAN, u], g)
        g.whole[m, PROVOKED, u] = 0
        shooter = g.whole[m, SHOOTER, u]
        if target < 0 and shooter >= 0 and g.real[m, HEALTH, shooter] > ZERO and can_hit(u, shooter, g):
            target = shooter
            g.whole[m, PROVOKED, u] = 1
    g.whole[m, SHOOTER, u] = -1
    g.whole[m, TARGET, u] = target
    return target


@scalar
def tend(m, u, at, g):
    """The enemy Medivac's behaviour: heal the nearest who is hurt, else stay with the others."""
    patient = nearest_friend(m, u, at, True, g)
    if patient < 0:
        friend = nearest_friend(m, u, at, False, g)
        if friend >= 0 and gap_between(m, u, friend, at, g) > FOLLOW:
            walk(m, u, at, g.real[m, at, friend], g.real[m, at + 1, friend], g)
    g.whole[m, TARGET, u] = patient
    return patient


@scalar
def decide(m, u, at, loop, g):
    g.real[m, WANT_X, u], g.real[m, WANT_Y, u] = ZERO, ZERO
    g.whole[m, SHOT, u] = NOTHING
    if g.real[m, HEALTH, u] <= ZERO:
        g.real[m, SOLID, u] = ZERO
        if g.whole[m, FUSE, u]:
            g.whole[m, FUSE, u], g.whole[m, SHOT, u] = 0, EXPLODED
        return
    g.real[m, SOLID, u] = g.stat[SEPARATION, u] if g.stat[FLIES, u] == ZERO else ZERO

    order, target = g.whole[m, ORDER, u], -1
    if order == ENGAGE:
        target = g.whole[m, TARGET, u]
        if g.real[m, HEALTH, target] <= ZERO or not (can_hit(u, target, g) or can_heal(u, target, g)):
            target = -1
    elif order == FIGHT:
        target = tend(m, u, at, g) if g.stat[HEALS, u] > ZERO else choose_target(m, u, at, g)

    cooldown = g.real[m, COOLDOWN, u]
    ready = cooldown <= ZERO
    if ready:
        g.real[m, COOLDOWN, u] = ZERO
    else:
        g.real[m, COOLDOWN, u] = cooldown - ONE

    if target >= 0:
        if gap_between(m, u, target, at, g) > g.stat[RANGE, u]:
            walk(m, u, at, g.real[m, at, target], g.real[m, at + 1, target], g)
        elif g.stat[HEALS, u] > ZERO:
            missing = g.stat[MAX_HEALTH, target] - g.real[m, HEALTH, target]
            amount = min(min(HEAL_RATE, missing), g.real[m, ENERGY, u] * HEALTH_PER_ENERGY)
            g.real[m, HEALING, u] = amount
            g.real[m, ENERGY, u] -= amount / HEALTH_PER_ENERGY
            g.whole[m, SHOT, u] = HEALED
        elif ready:
            if g.stat[SPLASH, u] == BLAST:
                g.whole[m, SHOT, u] = EXPLODED
            else:
                delay = DELAY_LEAST + DELAY_SPREAD * uniform(g.match[m, KEY], g.match[m, EPISODE], loop, u * 8 + FOR_DELAY)
                g.real[m, COOLDOWN, u] = cooldown + g.stat[PERIOD, u] + delay - ONE  # what it was overdue is kept
                g.whole[m, SHOT, u] = FIRED
    elif order == GO or (order == FIGHT and g.stat[HEALS, u] == ZERO):
        walk(m, u, at, g.real[m, GOAL_X, u], g.real[m, GOAL_Y, u], g)
    if g.stat[HEALS, u] > ZERO:
        g.real[m, ENERGY, u] = min(g.real[m, ENERGY, u] + ENERGY_REGENERATION, ENERGY_MAX)


# ---- phase two: clash ----
@scalar
def in_the_line(m, u, v, at, g):
    """Whether v is touched by u's fire: a line across the direction from u to its target, at the target."""
    target = g.whole[m, TARGET, u]
    fx, fy = g.real[m, at, target] - g.real[m, at, u], g.real[m, at + 1, target] - g.real[m, at + 1, u]
    length = root(fx * fx + fy * fy)
    if length > ZERO:
        fx, fy = fx / length, fy / length
    dx, dy = g.real[m, at, v] - g.real[m, at, target], g.real[m, at + 1, v] - g.real[m, at + 1, target]
    deep, across = abs(dx * fx + dy * fy), abs(dx * fy - dy * fx)
    return deep <= LINE_DEEP + g.stat[RADIUS, v] and across <= LINE_ACROSS + g.stat[RADIUS, v]


@scalar
def hits_taken(m, u, v, at, g):
    """How often the shot that u has just fired hits its foe v."""
    if g.whole[m, SHOT, u] == EXPLODED:
        near = distance(m, u, v, at, g) - g.stat[RADIUS, v] <= BLAST_RADIUS
        return 1 if near and g.stat[FLIES, v] == ZERO else 0
    if g.stat[SPLASH, u] == LINE:
        return int(g.stat[HITS, u]) if g.stat[FLIES, v] == ZERO and in_the_line(m, u, v, at, g) else 0
    return int(g.stat[HITS, u]) if g.whole[m, TARGET, u] == v else 0


@scalar
def damage_to(m, u, v, health, shield, g):
    """(health, shield) of u after one hit by v: shields first, which have no armour."""
    damage = g.stat[DAMAGE, v] + g.stat[VERSUS_LIGHT, v] * g.stat[LIGHT, u] + g.stat[VERSUS_ARMOURED, v] * g.stat[ARMOURED, u]
    absorbed = min(shield, damage)
    if damage > absorbed:
        health -= max(HALF, damage - absorbed - g.stat[ARMOUR, u])
    return health, shield - absorbed


@scalar
def suffer(m, u, at, loop, g):
    health, shield = g.real[m, HEALTH, u], g.real[m, SHIELD, u]
    if health <= ZERO:
        return
    first, last = (g.rule[ALLIES], g.rule[UNITS_IN_ALL]) if u < g.rule[ALLIES] else (0, g.rule[ALLIES])
    for v in range(first, last):
        if g.whole[m, SHOT, v] == FIRED or g.whole[m, SHOT, v] == EXPLODED:
            for _ in range(hits_taken(m, v, u, at, g)):
                health, shield = damage_to(m, u, v, health, shield, g)
                g.real[m, HURT_AT, u], g.whole[m, SHOOTER, u] = F32(loop), v
    if health <= ZERO or g.whole[m, SHOT, u] == EXPLODED:
        g.real[m, HEALTH, u], g.real[m, SHIELD, u] = ZERO, ZERO
        if g.stat[SPLASH, u] == BLAST and g.whole[m, SHOT, u] != EXPLODED:
            g.whole[m, FUSE, u] = 1
        return
    health += g.stat[REGENERATION, u]
    if g.rule[HEALERS]:
        first, last = (0, g.rule[ALLIES]) if u < g.rule[ALLIES] else (g.rule[ALLIES], g.rule[UNITS_IN_ALL])
        for v in range(first, last):
            if g.whole[m, SHOT, v] == HEALED and g.whole[m, TARGET, v] == u:
                health += g.real[m, HEALING, v]
    if F32(loop) - g.real[m, HURT_AT, u] >= SHIELD_DELAY:
        shield += SHIELD_REGENERATION
    g.real[m, HEALTH, u] = min(health, g.stat[MAX_HEALTH, u])
    g.real[m, SHIELD, u] = min(shield, g.stat[MAX_SHIELD, u])


@scalar
def room(m, u, v, at, g):
    """(direction x, y from u to v, how far u may go that way); far if v is not near enough to matter.

    Two that both want to move may each take half of the gap between them, so that whatever they do they do not overlap.
    """
    touch = g.real[m, SOLID, v]
    if touch == ZERO or u == v:
        return ZERO, ZERO, FAR
    touch += g.stat[SEPARATION, u]
    dx, dy = g.real[m, at, v] - g.real[m, at, u], g.real[m, at + 1, v] - g.real[m, at + 1, u]
    squared, near = dx * dx + dy * dy, touch + g.value[NEAR]
    if squared >= near * near:
        return ZERO, ZERO, FAR
    length = root(squared)
    if length > ZERO:
        dx, dy = dx / length, dy / length
    else:
        dx, dy = (ONE if u < v else -ONE), ZERO
    free = length - touch
    if free < ZERO or g.real[m, WANT_X, v] != ZERO or g.real[m, WANT_Y, v] != ZERO:
        free *= HALF
    return dx, dy, free


@scalar
def keep_apart(m, u, at, x, y, g):
    """The step (x, y) without what would run into others (or, where they overlap, with what parts them)."""
    first = 0 if u < g.rule[ALLIES] else g.rule[ALLIES]
    contacts = 0
    for k in range(first, first + g.rule[UNITS_IN_ALL]):
        v = k if k < g.rule[UNITS_IN_ALL] else k - g.rule[UNITS_IN_ALL]  # own side first, on both sides
        dx, dy, free = room(m, u, v, at, g)
        if free < FAR:
            ahead = x * dx + y * dy
            if ahead > free:
                x, y = x - (ahead - free) * dx, y - (ahead - free) * dy
            contacts += 1
    return x, y, contacts


@scalar
def shorten(m, u, at, x, y, g):
    """As much of the step (x, y) as keeps apart from everyone."""
    share = ONE
    for v in range(g.rule[UNITS_IN_ALL]):
        dx, dy, free = room(m, u, v, at, g)
        ahead = x * dx + y * dy
        if ahead > ZERO and ahead * share > max(free, ZERO):
            share = max(free, ZERO) / ahead
    return x * share, y * share


@scalar
def move(m, u, at, loop, g):
    px, py = g.real[m, at, u], g.real[m, at + 1, u]
    wx, wy = g.real[m, WANT_X, u], g.real[m, WANT_Y, u]
    to = NEXT_X - at
    if g.real[m, SOLID, u] == ZERO:  # in the air, or dead
        g.real[m, to, u] = min(max(px + wx, ZERO), F32(g.rule[WIDTH]) - F32(0.001))
        g.real[m, to + 1, u] = min(max(py + wy, ZERO), F32(g.rule[HEIGHT]) - F32(0.001))
        return
    wanted = wx * wx + wy * wy
    if wanted == ZERO and loop % LOOPS != 0:  # who stands only makes room, and once a step is enough for that
        g.real[m, to, u], g.real[m, to + 1, u] = px, py
        return
    x, y, contacts = keep_apart(m, u, at, wx, wy, g)
    if contacts > 0 and wanted > ZERO and x * wx + y * wy < F32(0.3) * wanted:  # blocked: try to get round, a while each way
        left = draw(g.match[m, KEY], g.match[m, EPISODE], loop // LOOPS_PER_SECOND, u * 8 + FOR_SIDESTEP) & 1
        x, y = (-wy, wx) if left else (wy, -wx)
        x, y, contacts = keep_apart(m, u, at, x, y, g)
        contacts += 1
    if x != ZERO or y != ZERO:
        if contacts > 1:
            x, y = shorten(m, u, at, x, y, g)
        here, climbs = cell_of(px, py, g), g.stat[CLIMBS, u] > ZERO
        if not may_stand(here, px + x, py + y, climbs, g):  # along the wall, if there is a way
            along_x, _ = shorten(m, u, at, x, ZERO, g)
            _, along_y = shorten(m, u, at, ZERO, y, g)
            if may_stand(here, px + along_x, py, climbs, g):
                x, y = along_x, ZERO
            elif may_stand(here, px, py + along_y, climbs, g):
                x, y = ZERO, along_y
            else:
                x, y = ZERO, ZERO
    g.real[m, to, u], g.real[m, to + 1, u] = px + x, py + y


# ---- a step's beginning and end ----
@scalar
def take_order(m, u, actions, avail, g):
    g.real[m, BEFORE, u] = g.real[m, HEALTH, u] + g.real[m, SHIELD, u]
    if u >= g.rule[ALLIES]:
        return
    action = actions[m, u]
    if action < 0 or action >= avail.shape[2] or not avail[m, u, action]:
        action = STOP if g.real[m, HEALTH, u] > ZERO else NO_OP
    g.whole[m, LAST_ACTION, u] = action
    if g.rule[AUTO_ALLIES]:
        return
    g.whole[m, ORDER, u] = STAY
    if action >= ATTACK:
        g.whole[m, ORDER, u] = ENGAGE
        g.whole[m, TARGET, u] = action - ATTACK + (0 if g.stat[HEALS, u] > ZERO else g.rule[ALLIES])
    elif action >= NORTH:
        g.whole[m, ORDER, u] = GO
        g.real[m, GOAL_X, u] = g.real[m, X, u] + MOVE * F32((action == EAST) - (action == WEST))
        g.real[m, GOAL_Y, u] = g.real[m, Y, u] + MOVE * F32((action == NORTH) - (action == SOUTH))


@scalar
def battle_reward(m, g):
    """SMAC's shaped reward for the change since BEFORE, without win or defeat, not yet scaled."""
    dealt, taken = ZERO, ZERO
    for u in range(g.rule[UNITS_IN_ALL]):
        before = g.real[m, BEFORE, u]
        if before > ZERO:
            lost = before - g.real[m, HEALTH, u] - g.real[m, SHIELD, u]
            if g.real[m, HEALTH, u] <= ZERO:
                lost = before + g.value[DEATH]
            if u < g.rule[ALLIES]:
                taken += lost
            else:
                dealt += lost
    if g.rule[ONLY_POSITIVE]:
        return abs(dealt)
    return dealt - taken * g.value[NEGATIVE_SCALE]


@scalar
def judge(m, reward, terminated, truncated, won, g):
    """Who is left, what was it worth."""
    allies, enemies = 0, 0
    for u in range(g.rule[UNITS_IN_ALL]):
        if g.real[m, HEALTH, u] > ZERO and not (g.rule[MEDIVACS_DO_NOT_COUNT] and g.stat[HEALS, u] > ZERO):
            if u < g.rule[ALLIES]:
                allies += 1
            else:
                enemies += 1
    g.match[m, STEP] += 1
    is_won, is_lost = allies > 0 and enemies == 0, allies == 0 and enemies > 0
    terminated[m] = allies == 0 or enemies == 0
    truncated[m] = not terminated[m] and g.match[m, STEP] >= g.rule[LIMIT]
    won[m] = is_won
    if g.rule[SPARSE]:
        worth = ONE if is_won else (-ONE if is_lost else ZERO)
    else:
        worth = battle_reward(m, g)
        if is_won:
            worth += g.value[WIN]
        if is_lost:
            worth += g.value[DEFEAT]
    for a in range(g.rule[ALLIES]):
        reward[m, a] = worth / g.value[SCALE]
    if terminated[m] or truncated[m]:
        g.match[m, STAGE] = OVER


# ---- reset ----
@scalar
def place(m, u, g):
    """Unit u at the start of a match."""
    key, episode, group = g.match[m, KEY], g.match[m, EPISODE], int(g.stat[GROUP, u])
    shift_x = (uniform(key, episode, group, FOR_SPAWN) * F32(2) - ONE) * SPAWN_SHIFT
    shift_y = (uniform(key, episode, group + 1000, FOR_SPAWN) * F32(2) - ONE) * SPAWN_SHIFT
    along = uniform(key, episode, 0, FOR_ORDER)
    for field in range(g.real.shape[1]):
        g.real[m, field, u] = ZERO
    for field in range(g.whole.shape[1]):
        g.whole[m, field, u] = 0
    g.real[m, X, u], g.real[m, Y, u] = g.stat[SPAWN_X, u] + shift_x, g.stat[SPAWN_Y, u] + shift_y
    g.real[m, HEALTH, u], g.real[m, SHIELD, u] = g.stat[MAX_HEALTH, u], g.stat[MAX_SHIELD, u]
    if g.stat[HEALS, u] > ZERO:
        g.real[m, ENERGY, u] = ENERGY_START
    g.whole[m, TARGET, u], g.whole[m, SHOOTER, u], g.whole[m, LAST_ACTION, u] = -1, -1, -1
    if u >= g.rule[ALLIES] or g.rule[AUTO_ALLIES]:
        g.whole[m, ORDER, u] = FIGHT
        g.real[m, GOAL_X, u] = g.stat[ORDER_X, u] + along * g.stat[SPAN_X, u]
        g.real[m, GOAL_Y, u] = g.stat[ORDER_Y, u] + along * g.stat[SPAN_Y, u]


# ---- what the agents see ----
@scalar
def walkable(column, row, g):
    return g.ground[row * g.rule[WIDTH] + column] != paths.WALL


@scalar
def available(m, a, action, g):
    if g.real[m, HEALTH, a] <= ZERO:
        return action == NO_OP
    if action == NO_OP:
        return False
    if action == STOP:
        return True
    x, y = g.real[m, X, a], g.real[m, Y, a]
    if action < ATTACK:
        column = int(x + F32((action == EAST) - (action == WEST)))
        row = int(y + F32((action == NORTH) - (action == SOUTH)))
        return inside(column, row, g) and walkable(column, row, g)
    v = action - ATTACK
    if g.stat[HEALS, a] > ZERO:
        if v >= g.rule[ALLIES] or g.stat[FLIES, v] > ZERO:
            return False
    else:
        v += g.rule[ALLIES]
    return g.real[m, HEALTH, v] > ZERO and distance(m, a, v, X, g) <= SHOOT


@scalar
def height_at(column, row, g):
    ground = g.ground[row * g.rule[WIDTH] + column]
    if ground == paths.WALL:
        return ZERO
    return HALF if ground == paths.LOW else (F32(0.75) if ground == paths.RAMP else ONE)


@scalar
def feature(m, u, what, argument, g):
    """A fact about unit u that does not depend on who looks."""
    if what == PART_HEALTH:
        return g.real[m, HEALTH, u] / g.stat[MAX_HEALTH, u]
    if what == PART_SHIELD:
        return g.real[m, SHIELD, u] / g.stat[MAX_SHIELD, u] if g.stat[MAX_SHIELD, u] > ZERO else ZERO
    if what == IS_TYPE:
        return ONE if g.stat[TYPE_BIT, u] == F32(argument) else ZERO
    if what == LAST_WAS:
        return ONE if g.whole[m, LAST_ACTION, u] == argument else ZERO
    if what == CHARGE:
        full = g.real[m, ENERGY, u] if g.stat[HEALS, u] > ZERO else max(g.real[m, COOLDOWN, u], ZERO)
        return full / g.stat[COOLDOWN_SCALE, u]
    if what == PLACE_X:
        return (g.real[m, X, u] - F32(g.rule[WIDTH]) * HALF) / F32(g.rule[WIDTH])
    return (g.real[m, Y, u] - F32(g.rule[HEIGHT]) * HALF) / F32(g.rule[HEIGHT])


@scalar
def observation(m, a, column, layout, avail, g):
    """One number of what agent a observes."""
    whose, which, what, argument = layout[column, 0], layout[column, 1], layout[column, 2], layout[column, 3]
    if what == TIME:
        return F32(g.match[m, STEP]) / F32(g.rule[LIMIT])
    if g.real[m, HEALTH, a] <= ZERO:
        return ZERO
    x, y = g.real[m, X, a], g.real[m, Y, a]
    if whose == SELF:
        if what == AVAILABLE:
            return ONE if avail[m, a, argument] else ZERO
        if what == WALKABLE_AT or what == HEIGHT_AT:
            column, row = int(x) + which, int(y) + argument
            if not inside(column, row, g):
                return ONE
            if what == HEIGHT_AT:
                return height_at(column, row, g)
            return ONE if walkable(column, row, g) else ZERO
        return feature(m, a, what, argument, g)
    u = which + g.rule[ALLIES] if whose == ENEMY else (which if which < a else which + 1)
    dx, dy = g.real[m, X, u] - x, g.real[m, Y, u] - y
    squared = dx * dx + dy * dy
    if squared >= SIGHT * SIGHT or g.real[m, HEALTH, u] <= ZERO:
        return ZERO
    if what == AVAILABLE:
        return ONE if avail[m, a, argument] else ZERO
    if what == SEEN:
        return ONE
    if what == DISTANCE:
        return root(squared) / SIGHT
    if what == OFFSET_X:
        return dx / SIGHT
    if what == OFFSET_Y:
        return dy / SIGHT
    return feature(m, u, what, argument, g)


@scalar
def state_value(m, column, layout, g):
    """One number of the global state."""
    u, what = layout[column, 1], layout[column, 2]
    if what == TIME:
        return F32(g.match[m, STEP]) / F32(g.rule[LIMIT])
    if what != LAST_WAS and g.real[m, HEALTH, u] <= ZERO:
        return ZERO
    return feature(m, u, what, layout[column, 3], g)


# ---- the program: a match from one call to the next ----
@scalar
def world_of(game):
    return World(
        game.real, game.whole, game.match, game.stat, game.rule, game.value, game.ground, game.waypoints
    )  # fmt: skip


@scalar
def run_one(op, m, lane, lanes, game):
    g = world_of(game)
    obs, state, avail = game.obs, game.state, game.avail
    agents, units, actions, obs_dim, state_dim = obs.shape[1], g.real.shape[2], avail.shape[2], obs.shape[2], state.shape[1]
    stage = g.match[m, STAGE]
    playing = op == PLAY and stage == RUNNING
    freezing = op == PLAY and stage == OVER
    restarting = op == RESTART and game.mask[m]
    barrier()
    if op == PLAY:
        if playing:
            for u in range(lane, units, lanes):
                take_order(m, u, game.actions, avail, g)
        barrier()
        for k in range(LOOPS):
            loop, at = g.match[m, STEP] * LOOPS + k, NEXT_X * (k % 2)
            if playing:
                for u in range(lane, units, lanes):
                    decide(m, u, at, loop, g)
            barrier()
            if playing:
                for u in range(lane, units, lanes):
                    suffer(m, u, at, loop, g)
                    move(m, u, at, loop, g)
            barrier()
        if playing and lane == 0:
            judge(m, game.reward, game.terminated, game.truncated, game.won, g)
        if freezing:
            for u in range(lane, units, lanes):
                g.real[m, HEALTH, u] = ZERO
                g.whole[m, LAST_ACTION, u] = -1
            for a in range(lane, agents, lanes):
                game.reward[m, a] = ZERO
            if lane == 0:
                g.match[m, STAGE] = FROZEN
        barrier()

    shown = playing or freezing or op == LOOK
    for turn in range(2):  # once for what there is, once more for a match that starts
        if turn == 1:
            restarting = restarting or (g.rule[AUTORESET] and playing and g.match[m, STAGE] == OVER)
            barrier()
            if restarting:
                if playing:
                    for a in range(agents):
                        for column in range(lane, obs_dim, lanes):
                            game.final_obs[m, a, column] = obs[m, a, column]
                        for action in range(lane, actions, lanes):
                            game.final_avail[m, a, action] = avail[m, a, action]
                    for column in range(lane, state_dim, lanes):
                        game.final_state[m, column] = state[m, column]
                else:
                    for a in range(lane, agents, lanes):
                        game.reward[m, a] = ZERO
                    game.terminated[m], game.truncated[m], game.won[m] = False, False, False
                if lane == 0:
                    g.match[m, EPISODE] += 1
                    g.match[m, STEP], g.match[m, STAGE] = 0, RUNNING
            barrier()
            if restarting:
                for u in range(lane, units, lanes):
                    place(m, u, g)
            barrier()
            shown = restarting
        if shown:
            for a in range(lane, agents, lanes):
                game.alive[m, a] = g.real[m, HEALTH, a] > ZERO
            for a in range(agents):
                for action in range(lane, actions, lanes):
                    avail[m, a, action] = available(m, a, action, g)
        barrier()
        if shown:
            for a in range(agents):
                for column in range(lane, obs_dim, lanes):
                    obs[m, a, column] = observation(m, a, column, game.obs_layout, avail, g)
            if not g.rule[STATE_IS_OBS]:
                for column in range(lane, state_dim, lanes):
                    state[m, column] = state_value(m, column, game.state_layout, g)
        barrier()
        if shown and g.rule[STATE_IS_OBS]:
            for a in range(agents):
                for column in range(lane, obs_dim, lanes):
                    state[m, a * obs_dim + column] = obs[m, a, column]


# ---- scripted policies: one action for one agent ----
POLICIES = ("nearest", "weakest", "kite", "random", "hold")
NEAREST, WEAKEST, KITE, RANDOM, HOLD = range(len(POLICIES))


@scalar
def step_towards(m, a, dx, dy, avail):
    """The available move that goes most in direction (dx, dy); stop if none does."""
    best, choice = ZERO, STOP
    for action in range(NORTH, ATTACK):
        ahead = dx * F32((action == EAST) - (action == WEST)) + dy * F32((action == NORTH) - (action == SOUTH))
        if avail[m, a, action] and ahead > best:
            best, choice = ahead, action
    return choice


@scalar
def approach(m, a, v, avail, g):
    x, y = heading(m, a, X, g.real[m, X, v], g.real[m, Y, v], g)
    return step_towards(m, a, x - g.real[m, X, a], y - g.real[m, Y, a], avail)


@scalar
def random_action(m, a, avail, g):
    actions, count = avail.shape[2], 0
    for action in range(actions):
        count += avail[m, a, action]
    skip = draw(g.match[m, KEY], g.match[m, EPISODE], g.match[m, STEP], a * 8 + FOR_ACTION) % count
    for action in range(actions):
        if avail[m, a, action]:
            if skip == 0:
                return action
            skip -= 1
    return STOP


@scalar
def scripted_action(m, a, policy, avail, g):
    if g.real[m, HEALTH, a] <= ZERO:
        return NO_OP
    if policy == RANDOM:
        return random_action(m, a, avail, g)
    if g.stat[HEALS, a] > ZERO:
        friend = nearest_friend(m, a, X, True, g)
        if friend < 0:
            friend = nearest_friend(m, a, X, False, g)
            if friend < 0 or gap_between(m, a, friend, X, g) <= FOLLOW:
                return STOP
            return STOP if policy == HOLD else approach(m, a, friend, avail, g)
        if avail[m, a, ATTACK + friend]:
            return ATTACK + friend
        return STOP if policy == HOLD else approach(m, a, friend, avail, g)
    foe = nearest_foe(m, a, X, FAR, g)
    if foe < 0:
        return STOP
    if policy == HOLD:
        return ATTACK + foe - g.rule[ALLIES] if gap_between(m, a, foe, X, g) <= g.stat[RANGE, a] else STOP
    if policy == KITE and g.real[m, COOLDOWN, a] > ZERO and distance(m, a, foe, X, g) <= SHOOT:
        return step_towards(m, a, g.real[m, X, a] - g.real[m, X, foe], g.real[m, Y, a] - g.real[m, Y, foe], avail)
    if policy == WEAKEST:
        least = FAR
        for v in range(g.rule[ALLIES], g.rule[UNITS_IN_ALL]):
            if avail[m, a, ATTACK + v - g.rule[ALLIES]] and can_hit(a, v, g):
                left = g.real[m, HEALTH, v] + g.real[m, SHIELD, v]
                if left < least:
                    least, foe = left, v
    if avail[m, a, ATTACK + foe - g.rule[ALLIES]]:
        return ATTACK + foe - g.rule[ALLIES]
    return approach(m, a, foe, avail, g)


@scalar
def act_one(op, m, lane, lanes, game):
    for a in range(lane, game.scripted.shape[1], lanes):
        game.scripted[m, a] = scripted_action(m, a, game.policy[m, a], game.avail, world_of(game))


# ---- from a map to arrays ----
def lattice(point, count, pitch, facing, ground):
    """`count` places on a square lattice round the point, nearest first, where a unit can stand.

    Ties go to the front: `facing` is the way to the foe, so that two sides face each other as in a mirror.
    """
    side = math.ceil(math.sqrt(count))
    half = (side - 1) / 2
    height, width = ground.shape
    places = []
    for i in range(-side, 2 * side):
        for j in range(-side, 2 * side):
            forward, sideways = (i - half) * pitch, (j - half) * pitch
            x, y = (forward * facing[0], sideways) if facing[0] else (sideways, forward * facing[1])
            corners = [
                (math.floor(point[0] + x + dx), math.floor(point[1] + y + dy))
                for dx in (-SPAWN_SHIFT, SPAWN_SHIFT)
                for dy in (-SPAWN_SHIFT, SPAWN_SHIFT)
            ]
            if all(0 <= c < width and 0 <= r < height and ground[r, c] != paths.WALL for c, r in corners):
                places.append((forward**2 + sideways**2, -forward, sideways, point[0] + x, point[1] + y))
    if len(places) < count:
        raise ValueError(f"{count} units do not fit round {point}: there is room for {len(places)}")
    return [(x, y) for *_, x, y in sorted(places)[:count]]


def muster(groups, facing, ground):
    """The units of one side as (kind, x, y, point), in the order of the groups, from the rear to the front."""
    units = [[] for _ in groups]
    for point in dict.fromkeys(point for _, _, point in groups):
        for flies in (False, True):
            here = [i for i, (_, kind, at) in enumerate(groups) if at == point and UNITS[kind].flies == flies]
            if not here:
                continue
            separation = max(UNITS[groups[i][1]].separation or UNITS[groups[i][1]].radius for i in here)
            places = lattice(point, sum(groups[i][0] for i in here), 2 * separation, facing, ground)
            for i in here:
                count, kind, _ = groups[i]
                mine, places = places[:count], places[count:]
                mine.sort(key=lambda p: (p[0] * facing[0] + p[1] * facing[1], p[1] if facing[0] else p[0]))
                units[i] = [(kind, x, y, point) for x, y in mine]
    return [unit for group in units for unit in group]


def resize(spec, n_agents, name):
    """The map's groups with n_agents allies and the map's difference in numbers."""
    allies, enemies = [list(group) for group in spec.allies], [list(group) for group in spec.enemies]
    own = sum(count for count, _, _ in allies)
    extra = 0 if n_agents is None else n_agents - own
    if extra == 0:
        return allies, enemies
    if len({kind for _, kind, _ in allies}) > 1 or len({kind for _, kind, _ in enemies}) > 1:
        raise ValueError(f"{name} has several kinds of units: it is played by {own} agents, not {n_agents}")
    least = max(1, own - sum(count for count, _, _ in enemies) + 1)
    if n_agents < least:
        raise ValueError(f"{name} with n_agents={n_agents} would leave no one to fight: at least {least}")
    for side in (allies, enemies):
        turn = 0
        for _ in range(abs(extra)):
            while extra < 0 and side[turn % len(side)][0] == 0:
                turn += 1
            side[turn % len(side)][0] += 1 if extra > 0 else -1
            turn += 1
    return [g for g in allies if g[0]], [g for g in enemies if g[0]]


def centre(groups):
    return np.average([point for _, _, point in groups], axis=0, weights=[count for count, _, _ in groups])


def build_units(spec, groups, ground, auto_allies):
    """(names of the kinds, stat) of all units, allies first, numbered as SMAC numbers them."""
    allies, enemies = groups
    towards = centre(enemies) - centre(allies)
    axis = int(abs(towards[1]) > abs(towards[0]))
    facing = [0, 0]
    facing[axis] = 1 if towards[axis] >= 0 else -1
    ally_kinds, enemy_bits = TYPES[spec.types]
    ours = sorted(muster(allies, facing, ground), key=lambda unit: (ally_kinds.index(unit[0]), unit[1], unit[2]))
    theirs = muster(enemies, [-f for f in facing], ground)
    kinds = [unit[0] for unit in ours + theirs]
    points = list(dict.fromkeys([("ally", u[3]) for u in ours] + [("enemy", u[3]) for u in theirs]))

    stat = np.zeros((len(STAT), len(kinds)), np.float32)
    for u, (kind, x, y, point) in enumerate(ours + theirs):
        unit, ally = UNITS[kind], u < len(ours)
        stat[:, u] = [
            unit.radius, unit.separation or unit.radius, unit.range, max(unit.range, SCAN_AT_LEAST),
            unit.speed / LOOPS_PER_SECOND, unit.period * LOOPS_PER_SECOND, unit.damage, unit.hits, unit.versus_light,
            unit.versus_armoured, unit.armour, unit.light, unit.armoured, unit.biological, unit.flies, unit.climbs,
            unit.hits_air, ("", "line", "blast").index(unit.splash), unit.heals, unit.health, unit.shield,
            unit.regeneration / LOOPS_PER_SECOND, unit.cooldown_scale, -1, x, y,
            points.index(("ally" if ally else "enemy", point)), x, y, 0, 0,
        ]  # fmt: skip
        bits = ally_kinds if ally else enemy_bits
        if enemy_bits:
            stat[TYPE_BIT, u] = bits.index(kind)
        order = spec.order if not ally else (("hunt",) if spec.order == ("hunt",) else ("go", tuple(centre(enemies))))
        if order == ("hunt",):
            stat[SCAN, u] = FAR
        elif order[0] != "stay":
            goal = np.array(order[1])
            offset = np.array([x, y]) - point
            column, row = np.floor(goal + offset).astype(int)
            free = 0 <= row < ground.shape[0] and 0 <= column < ground.shape[1] and ground[row, column] != paths.WALL
            stat[ORDER_X : ORDER_Y + 1, u] = goal + offset if free else goal
            if order[0] == "go_between":
                stat[SPAN_X : SPAN_Y + 1, u] = np.array(order[2]) - goal
    return kinds, stat


def observation_layout(spec, allies, enemies, actions, last_action, pathing_grid, terrain_height, timestep):
    """One row for each number an agent observes, in SMAC's order: (whose, which one, what, argument)."""
    bits = len(TYPES[spec.types][1])
    shield = {side: [(PART_SHIELD, 0)] if race == "P" else [] for side, race in zip((FRIEND, ENEMY), spec.races)}
    types = [(IS_TYPE, bit) for bit in range(bits)]
    place = [(DISTANCE, 0), (OFFSET_X, 0), (OFFSET_Y, 0), (PART_HEALTH, 0)]

    rows = [(SELF, 0, AVAILABLE, action) for action in range(NORTH, ATTACK)]
    if pathing_grid:
        rows += [(SELF, x, WALKABLE_AT, y) for x, y in POINTS[:-1]]
    if terrain_height:
        rows += [(SELF, x, HEIGHT_AT, y) for x, y in POINTS]
    for j in range(enemies):
        rows += [(ENEMY, j, what, argument) for what, argument in [(AVAILABLE, ATTACK + j), *place, *shield[ENEMY], *types]]
    acts = [(LAST_WAS, action) for action in range(actions)] if last_action else []
    for j in range(allies - 1):
        rows += [(FRIEND, j, what, argument) for what, argument in [(SEEN, 0), *place, *shield[FRIEND], *types, *acts]]
    rows += [(SELF, 0, what, argument) for what, argument in [(PART_HEALTH, 0), *shield[FRIEND], *types]]
    if timestep:
        rows.append((ANY, 0, TIME, 0))
    return np.array(rows, np.int32)


def state_layout(spec, allies, enemies, actions, last_action, timestep):
    types = [(IS_TYPE, bit) for bit in range(len(TYPES[spec.types][1]))]
    shield = [[(PART_SHIELD, 0)] if race == "P" else [] for race in spec.races]
    rows = []
    for u in range(allies):
        facts = [(PART_HEALTH, 0), (CHARGE, 0), (PLACE_X, 0), (PLACE_Y, 0), *shield[0], *types]
        rows += [(ANY, u, what, argument) for what, argument in facts]
    for u in range(allies, allies + enemies):
        facts = [(PART_HEALTH, 0), (PLACE_X, 0), (PLACE_Y, 0), *shield[1], *types]
        rows += [(ANY, u, what, argument) for what, argument in facts]
    if last_action:
        rows += [(ANY, u, LAST_WAS, action) for u in range(allies) for action in range(actions)]
    if timestep:
        rows.append((ANY, 0, TIME, 0))
    return np.array(rows, np.int32)


class Battle:
    """`num_envs` matches on one map. docs/battles.md describes the interface; envs.make builds one."""

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
        kinds, stat = build_units(spec, groups, ground, auto_allies)
        allies = sum(count for count, _, _ in groups[0])
        enemies = len(kinds) - allies

        self.name, self.num_envs, self.device = name, num_envs, torch.device(device)
        self.n_agents, self.n_enemies, self.n_actions = allies, enemies, ATTACK + enemies
        self.episode_limit = spec.limit
        self.unit_kinds = kinds
        self.agents = [f"{kind}_{a}" for a, kind in enumerate(kinds[:allies])]
        self.autoreset = autoreset
        self.check = num_envs <= 64 and self.device.type == "cpu" if check is None else check
        obs_rows = observation_layout(
            spec, allies, enemies, self.n_actions, obs_last_action, obs_pathing_grid, obs_terrain_height, obs_timestep_number
        )
        state_rows = state_layout(spec, allies, enemies, self.n_actions, state_last_action, state_timestep_number)
        self.obs_dim = len(obs_rows)
        self.state_dim = allies * self.obs_dim if obs_instead_of_state else len(state_rows)
        self.metadata = {
            "name": name,
            "render_modes": [],
            "autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP if autoreset else gymnasium.vector.AutoresetMode.DISABLED,
        }
        box, multi = gymnasium.spaces.Box, gymnasium.spaces.MultiDiscrete
        self.single_observation_space = box(-1.0, 1.0, (allies, self.obs_dim), np.float32)
        self.single_action_space = multi([self.n_actions] * allies)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)

        full = stat[MAX_HEALTH, allies:].sum() + stat[MAX_SHIELD, allies:].sum()
        best = reward_death_value * enemies + reward_win + full

        def blank(dtype, *shape):
            return torch.zeros((num_envs, *shape), dtype=dtype, device=self.device)

        real, whole, boolean, integer = torch.float32, torch.int32, torch.bool, torch.int64
        kept = num_envs if autoreset else 0
        self._simulation = {
            "real": blank(real, len(REAL), len(kinds)),
            "whole": blank(whole, len(WHOLE), len(kinds)),
            "match": blank(integer, len(MATCH)),
        }
        self._outputs = {
            "obs": blank(real, allies, self.obs_dim),
            "state": blank(real, self.state_dim),
            "avail": blank(boolean, allies, self.n_actions),
            "alive": blank(boolean, allies),
            "reward": blank(real, allies),
            "terminated": blank(boolean),
            "truncated": blank(boolean),
            "won": blank(boolean),
            "final_obs": blank(real, allies, self.obs_dim)[:kept],
            "final_state": blank(real, self.state_dim)[:kept],
            "final_avail": blank(boolean, allies, self.n_actions)[:kept],
        }
        self.actions = blank(integer, allies)
        self._mask = blank(boolean)
        self._simulation["match"][:, STAGE] = FROZEN
        self._started = False
        self._seed = seed

        self._policy, self._scripted = blank(integer, allies), blank(integer, allies)
        constant = {
            "stat": stat,
            "ground": ground.reshape(-1),
            "waypoints": np.zeros((1, 1, 1), np.int16) if waypoints is None else waypoints,
            "obs_layout": obs_rows,
            "state_layout": state_rows,
            "rule": np.array(
                [allies, len(kinds), ground.shape[1], ground.shape[0], waypoints is None, stat[HEALS].any(),
                 spec.types == "MMM", auto_allies, autoreset, spec.limit, obs_instead_of_state, reward_sparse,
                 reward_only_positive], np.int64,
            ),
            "value": np.array(
                [2 * stat[SPEED].max() + 0.01, reward_win, reward_defeat, reward_death_value, reward_negative_scale,
                 best / reward_scale_rate if reward_scale else 1.0], np.float32,
            ),
        }  # fmt: skip
        self._constant = {key: torch.as_tensor(value).to(self.device) for key, value in constant.items()}
        hands = {"actions": self.actions, "mask": self._mask, "policy": self._policy, "scripted": self._scripted}
        tensors = {**self._simulation, **self._outputs, **hands, **self._constant}
        self._game = Game(**{key: vector.view(tensor) for key, tensor in tensors.items()})
        self._run = vector.Runner(run_one, num_envs, len(kinds), self.device)
        self._act = vector.Runner(act_one, num_envs, allies, self.device)
        shown = ("state", "avail", "alive", "won") + (("final_obs", "final_state", "final_avail") if autoreset else ())
        self._info = {key: self._outputs[key] for key in shown}
        self._info["invalid"] = blank(boolean)

    # ---- playing ----
    def reset(self, seed=None, mask=None):
        """Starts all matches, or those of the mask, anew; with a seed their random streams begin again too."""
        if mask is None:
            self._mask.fill_(True)
        else:
            mask = torch.as_tensor(mask, device=self.device)
            if mask.shape != (self.num_envs,) or mask.dtype != torch.bool:
                raise ValueError(f"mask is a boolean tensor of shape ({self.num_envs},), not {mask.dtype} {tuple(mask.shape)}")
            self._mask.copy_(mask)
        if seed is None and not self._started:
            seed = self._seed
        if seed is not None:
            self._seed_matches(seed, None if not self._started else self._mask)
        self._started = True
        self._run(RESTART, self._game)
        return self._outputs["obs"], self._info

    def step(self, actions):
        """Plays one step of all running matches. What it returns is overwritten by the next call."""
        if not self._started:
            raise RuntimeError("reset() comes before step()")
        if actions is not self.actions:
            actions = torch.as_tensor(actions)
            if actions.shape != self.actions.shape or actions.dtype.is_floating_point or actions.dtype == torch.bool:
                raise ValueError(
                    f"actions are integers of shape {tuple(self.actions.shape)}, not {actions.dtype} {tuple(actions.shape)}"
                )
            self.actions.copy_(actions)
        if self.check:
            self._refuse_unavailable()
        self._run(PLAY, self._game)
        out = self._outputs
        return out["obs"], out["reward"], out["terminated"], out["truncated"], self._info

    def scripted_actions(self, policy="nearest"):
        """What a built-in policy does now: a name for all, or an integer tensor (num_envs, n_agents) of places in `policies`.

        (num_envs, n_agents) integers, overwritten by the next call. `random` draws anew each step, not each call.
        """
        if isinstance(policy, str):
            if policy not in POLICIES:
                raise ValueError(f"unknown policy {policy!r}: one of {', '.join(POLICIES)}")
            self._policy.fill_(POLICIES.index(policy))
        else:
            self._policy.copy_(torch.as_tensor(policy))
        self._act(0, self._game)
        return self._scripted

    policies = POLICIES

    # ---- looking into it ----
    def snapshot(self):
        """A copy of the whole simulation, random streams included: tensors by name."""
        return {key: tensor.clone() for key, tensor in {**self._simulation, **self._outputs}.items()}

    def restore(self, snapshot):
        """Puts a snapshot back; returns (obs, info) as they were then."""
        tensors = {**self._simulation, **self._outputs}
        for key, tensor in tensors.items():
            if key not in snapshot or snapshot[key].shape != tensor.shape:
                raise ValueError(f"the snapshot does not fit: {key} should be {tuple(tensor.shape)}")
        for key, tensor in tensors.items():
            tensor.copy_(snapshot[key])
        self._started = True
        return self._outputs["obs"], self._info

    def set_units(self, x=None, y=None, health=None, shield=None, cooldown=None, energy=None, last_action=None):
        """Sets units by hand, (num_envs, allies + enemies) each, `last_action` (num_envs, n_agents) with -1 for none.

        Cooldown is in game loops. Setting health or shield counts as damage just taken. Returns (obs, info), without a step.
        """
        if not self._started:
            raise RuntimeError("reset() comes before set_units()")
        real, whole = self._simulation["real"], self._simulation["whole"]
        fields = {X: x, Y: y, HEALTH: health, SHIELD: shield, COOLDOWN: cooldown, ENERGY: energy}
        for field, values in fields.items():
            if values is not None:
                real[:, field] = self._fitting(REAL[field].lower(), values, real[:, field])
        if health is not None or shield is not None:
            real[:, HURT_AT] = (self._simulation["match"][:, STEP] * LOOPS).unsqueeze(1).to(real.dtype)
        if last_action is not None:
            agents = whole[:, LAST_ACTION, : self.n_agents]
            agents[:] = self._fitting("last_action", last_action, agents)
        self._run(LOOK, self._game)
        return self._outputs["obs"], self._info

    def units(self):
        """What a match is made of now, by name, each (num_envs, allies + enemies): views, not copies."""
        real = self._simulation["real"]
        named = {"x": X, "y": Y, "health": HEALTH, "shield": SHIELD, "cooldown": COOLDOWN, "energy": ENERGY}
        return {key: real[:, field] for key, field in named.items()}

    def close(self):
        pass

    def _seed_matches(self, seed, mask):
        match = self._simulation["match"]
        numbers = np.arange(self.num_envs)
        base = np.random.SeedSequence(int(seed) % (1 << 63)).generate_state(1)[0]
        keys = [draw(int(base), int(m), 0, 0) for m in numbers]
        keys = torch.tensor(keys, dtype=torch.int64, device=self.device)
        chosen = slice(None) if mask is None else mask
        match[chosen, KEY] = keys[chosen]
        match[chosen, EPISODE] = -1

    def _fitting(self, name, values, like):
        values = torch.as_tensor(values, device=self.device)
        if values.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(like.shape)}, not {tuple(values.shape)}")
        return values.to(like.dtype)

    def _refuse_unavailable(self):
        actions, avail = self.actions, self._outputs["avail"]
        known = actions.clamp(0, self.n_actions - 1)
        wrong = (actions != known) | ~avail.gather(2, known.unsqueeze(2)).squeeze(2)
        if wrong.any():
            m, a = wrong.nonzero()[0].tolist()
            allowed = avail[m, a].nonzero().flatten().tolist()
            raise ValueError(
                f"match {m}, agent {a} ({self.agents[a]}): action {int(actions[m, a])} is not available, only {allowed}"
            )

"""The scripted policies of the battles: one action for one agent. What it may do is avail[m, a]."""

from envs.batch import EPISODE, KEY, STEP
from envs.battle.rules import (
    ATTACK,
    COOLDOWN,
    FAR,
    FOLLOW,
    FOR_ACTION,
    HEALTH,
    NO_OP,
    NORTH,
    RANGE,
    SHIELD,
    STOP,
    ZERO,
    X,
    Y,
    can_hit,
    compass,
    heading,
    is_healer,
    nearest_foe,
    nearest_friend,
    reaches,
    squared_distance,
    stat,
    within,
    world_in_place,
)  # fmt: skip
from envs.compiler import draw, scalar

POLICIES = ("nearest", "weakest", "kite", "random", "hold")
NEAREST, WEAKEST, KITE, RANDOM, HOLD = range(len(POLICIES))
MELEE = 1.0  # the range from which a unit shoots


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
def is_near(m, a, foe, g):
    reach = reaches(m, a, g)
    return squared_distance(m, a, foe, X, g) <= reach * reach


@scalar
def scripted_action(m, a, policy, avail, g):
    if g.real[HEALTH, m, a] <= ZERO:
        return NO_OP
    if policy == RANDOM:
        return random_action(m, a, avail, g)
    if is_healer(m, a, g):
        friend = nearest_friend(m, a, X, True, g)
        if friend < 0:
            friend = nearest_friend(m, a, X, False, g)
            if friend < 0 or within(m, a, friend, X, FOLLOW, g):
                return STOP
            return STOP if policy == HOLD else approach(m, a, friend, avail, g)
        if avail[m, a, g.rule.attack + friend]:
            return g.rule.attack + friend
        return STOP if policy == HOLD else approach(m, a, friend, avail, g)
    foe = nearest_foe(m, a, X, FAR, False, g)
    if foe < 0:
        return STOP
    if policy == HOLD:
        reached = avail[m, a, g.rule.attack + foe - g.rule.allies] and within(m, a, foe, X, stat(RANGE, m, a, g), g)
        return g.rule.attack + foe - g.rule.allies if reached else STOP
    if policy == KITE and g.real[COOLDOWN, m, a] > ZERO and is_near(m, a, foe, g):
        return step_towards(m, a, g.real[X, m, a] - g.real[X, m, foe], g.real[Y, m, a] - g.real[Y, m, foe], avail)
    if policy == WEAKEST and stat(RANGE, m, a, g) >= MELEE:  # who has to walk up to its target takes the nearest
        least = FAR
        for v in range(g.rule.allies, g.rule.units):
            if avail[m, a, g.rule.attack + v - g.rule.allies] and can_hit(m, a, v, g):
                left = g.real[HEALTH, m, v] + g.real[SHIELD, m, v]
                if left < least:
                    least, foe = left, v
    if avail[m, a, g.rule.attack + foe - g.rule.allies]:
        return g.rule.attack + foe - g.rule.allies
    return approach(m, a, foe, avail, g)


@scalar
def act_here(op, m, lane, lanes, rule, game):
    """The program of the scripted policies."""
    g = world_in_place(rule, game)
    for a in range(lane, rule.agents, lanes):
        game.scripted[m, a] = scripted_action(m, a, game.policy[m, a], game.avail, g)

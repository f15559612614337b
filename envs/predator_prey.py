"""Predators chase prey among round obstacles: `simple_tag` as in MPE2, and `popp`, LIAM's variant with a short view.

One match is scalar code on arrays indexed by match m and agent a, predators first; behind the agents come the
obstacles. The physics is in float64, as MPE2's: a contact doubles rounding errors at every step. It uses only
operations that round alike on the CPU and on CUDA. docs/predator_prey.md has the rules in words.
"""

import functools
import math
import re
from collections import namedtuple

import numpy as np
import torch

from envs import batch
from envs.batch import EPISODE, KEY, OBSERVE, RULE, RUNNING, STAGE, STEP, TENSORS, Batch, observe_last_action
from envs.compiler import draw, scalar, uniform

NONE, LEFT, RIGHT, DOWN, UP = range(5)
ACTIONS = ("none", "left", "right", "down", "up")
POLICIES = ("chase", "close", "far", "fellow", "loyal", "random")
CHASE, CLOSE, FAR, FELLOW, LOYAL, RANDOM = range(len(POLICIES))
FOR_PLACE, FOR_ACTION, FOR_GOAL, FOR_TURN = range(4)  # what a random number is for
IDS = ("simple_tag", "popp")
PATTERN = re.compile(r"simple_tag_(\d+)v(\d+)")
MOST_AGENTS = 16  # predators, prey and obstacles, each
FARTHEST = 1000.0  # where things can be put, and how fast

TIME_STEP, KEPT_SPEED, STIFFNESS, MARGIN = 0.1, 0.75, 100.0, 0.001
OBSTACLE_RADIUS, OBSTACLE_AREA = 0.2, 0.9
WALL, WALL_HALF = 1.3, 0.05  # of popp: the middle of a wall, and half of its width
VIEW, HIDDEN = 0.5, -5.0  # of popp's prey: how far it sees on each axis, and what stands for what it does not see
NEGLIGIBLE = 40.0  # e to the minus this is nothing beside 1
ALARM = 0.5  # how near a predator comes before a shy prey runs
CORNER, INSIDE = 0.55, 0.8  # where prey turn on their rounds, and how far out they hide: at full speed they overshoot

Rule = namedtuple(
    "Rule",
    (*RULE, "predators", "prey", "obstacles", "velocity_first", "hidden", "predator_radius", "prey_radius", "area")
    + ("view_dim", "obs_last_action"),
)
Tag = namedtuple("Tag", (*TENSORS, "place", "velocity", "force", "last", "earned", "touches", "goal", "alarmed"))
# place: of agents and obstacles; goal: the agent that a loyal predator follows, the corner that a prey on its rounds
# runs to; alarmed: whether a predator has come near; touches: of predators and prey so far


# ---- exponential and logarithm, of operations that every device rounds alike ----
@scalar
def exp_minus(value):
    """e to the minus value, for values from 0 to NEGLIGIBLE."""
    part, result = value / 64.0, 1.0
    for i in range(14):
        result = 1.0 - part / (14 - i) * result
    for _ in range(6):
        result = result * result
    return result


@scalar
def log_one_plus(value):
    """log(1 + value), for values from 0 to 1: twice the area tangent of value / (2 + value)."""
    ratio, result = value / (2.0 + value), 0.0
    for i in range(18):
        result = result * (ratio * ratio) + 1.0 / (2 * (17 - i) + 1)
    return 2.0 * ratio * result


@scalar
def softplus(value):
    """log(1 + e^value)"""
    if value > NEGLIGIBLE:
        return value
    if value < -NEGLIGIBLE:
        return 0.0
    return max(value, 0.0) + log_one_plus(exp_minus(abs(value)))


# ---- agents and obstacles ----
@scalar
def radius_of(e, rule):
    if e < rule.predators:
        return rule.predator_radius
    return rule.prey_radius if e < rule.agents else OBSTACLE_RADIUS


@scalar
def distance(m, a, b, game):
    x, y = game.place[m, a, 0] - game.place[m, b, 0], game.place[m, a, 1] - game.place[m, b, 1]
    return math.sqrt(x * x + y * y)


@scalar
def touching(m, a, b, rule, game):
    """Whether they touch, for the reward; in popp from twice as far away."""
    reach = radius_of(a, rule) + radius_of(b, rule)
    return distance(m, a, b, game) < (2.0 * reach if rule.hidden == 1 else reach)


@scalar
def nearest(m, a, first, behind, game):
    """The nearest to a of the agents or obstacles from `first` to `behind`, without itself; -1 if there is none."""
    found, least = -1, 0.0
    for b in range(first, behind):
        if b != a:
            far = distance(m, a, b, game)
            if found < 0 or far < least:
                found, least = b, far
    return found


# ---- a step: forces, movement, rewards ----
@scalar
def push_apart(m, a, b, rule, game):
    """The contact force between an agent and another, or an obstacle, which stays where it is."""
    x, y = game.place[m, a, 0] - game.place[m, b, 0], game.place[m, a, 1] - game.place[m, b, 1]
    touch = radius_of(a, rule) + radius_of(b, rule)
    far = touch + NEGLIGIBLE * MARGIN
    squared = x * x + y * y
    if squared > far * far or squared == 0:
        return
    apart = math.sqrt(squared)
    penetration = softplus(-(apart - touch) / MARGIN) * MARGIN
    x, y = STIFFNESS * x / apart * penetration, STIFFNESS * y / apart * penetration
    game.force[m, a, 0] += x
    game.force[m, a, 1] += y
    if b < rule.agents:
        game.force[m, b, 0] -= x
        game.force[m, b, 1] -= y


@scalar
def push_from_wall(place, radius):
    """The force of the two walls across an axis on an agent at this place of it."""
    penetration = softplus(-(WALL - WALL_HALF - radius - abs(place)) / MARGIN) * MARGIN
    return -STIFFNESS * penetration if place > 0 else STIFFNESS * penetration


@scalar
def gather_forces(m, rule, game):
    for a in range(rule.agents):
        action, push = game.last[m, a], 3.0 if a < rule.predators else 4.0
        game.force[m, a, 0] = -push if action == LEFT else (push if action == RIGHT else 0.0)
        game.force[m, a, 1] = -push if action == DOWN else (push if action == UP else 0.0)
    for a in range(rule.agents):
        for b in range(a + 1, rule.agents + rule.obstacles):
            push_apart(m, a, b, rule, game)
        if rule.hidden == 1:
            for axis in range(2):
                game.force[m, a, axis] += push_from_wall(game.place[m, a, axis], radius_of(a, rule))


@scalar
def move(m, a, rule, game):
    if rule.velocity_first == 0:
        for axis in range(2):
            game.place[m, a, axis] += game.velocity[m, a, axis] * TIME_STEP
    x = game.velocity[m, a, 0] * KEPT_SPEED + game.force[m, a, 0] * TIME_STEP
    y = game.velocity[m, a, 1] * KEPT_SPEED + game.force[m, a, 1] * TIME_STEP
    speed, most = math.sqrt(x * x + y * y), 1.0 if a < rule.predators else 1.3
    if speed > most:
        x, y = x / speed * most, y / speed * most
    game.velocity[m, a, 0], game.velocity[m, a, 1] = x, y
    if rule.velocity_first == 1:
        for axis in range(2):
            game.place[m, a, axis] += game.velocity[m, a, axis] * TIME_STEP


@scalar
def cost_of_leaving(place):
    """What a prey pays on one axis for being outside, or nearly so."""
    away = abs(place)
    if away < 0.9:
        return 0.0
    if away < 1.0:
        return (away - 0.9) * 10.0
    return min(1.0 / exp_minus(2.0 * away - 2.0), 10.0) if away < 3.0 else 10.0


@scalar
def reward_of_prey(m, a, touches, rule, game):
    x, y = game.place[m, a, 0], game.place[m, a, 1]
    if rule.hidden == 0:
        return -10.0 * touches - cost_of_leaving(x) - cost_of_leaving(y)
    reward = 1.0 if touches == 1 else (-1.0 if touches > 1 else 0.0)
    return reward - 10.0 if abs(x) > 0.99 or abs(y) > 0.99 else reward


@scalar
def reward_of_predators(m, touches, rule, game):
    if rule.hidden == 0:
        return 10.0 * touches
    reward = 0.0
    for a in range(rule.predators):
        reward -= 0.1 * distance(m, a, nearest(m, a, rule.predators, rule.agents, game), game)
    return reward - 1.0 if touches == 1 else (reward + 1.0 if touches > 1 else reward)


@scalar
def step_one(m, rule, game):
    for a in range(rule.agents):
        action = game.actions[m, a]
        game.last[m, a] = action if 0 <= action <= UP else NONE
    gather_forces(m, rule, game)
    for a in range(rule.agents):
        move(m, a, rule, game)
    touches, prey_earned = 0, np.float32(0)
    for a in range(rule.predators, rule.agents):
        own = 0
        for b in range(rule.predators):
            own += touching(m, a, b, rule, game)
        touches += own
        game.reward[m, a] = reward_of_prey(m, a, own, rule, game)
        prey_earned += game.earned[m, a] + game.reward[m, a]
    shared = reward_of_predators(m, touches, rule, game)
    for a in range(rule.agents):
        if a < rule.predators:
            game.reward[m, a] = shared
        game.earned[m, a] += game.reward[m, a]
        remember(m, a, rule, game)
    game.touches[m] += touches
    return False, game.touches[m] > 0 if rule.hidden == 0 else prey_earned > 0


@scalar
def reset_one(m, rule, game):
    key, episode = game.match[m, KEY], game.match[m, EPISODE]
    for e in range(rule.agents + rule.obstacles):
        area = rule.area if e < rule.agents else OBSTACLE_AREA
        for axis in range(2):
            game.place[m, e, axis] = area * (2.0 * np.float64(uniform(key, episode, 2 * e + axis, FOR_PLACE)) - 1.0)
    for a in range(rule.agents):
        game.velocity[m, a, 0] = game.velocity[m, a, 1] = 0.0
        game.last[m, a], game.earned[m, a], game.alarmed[m, a] = NONE, 0, 0
        number = draw(key, episode, a, FOR_GOAL)
        game.goal[m, a] = (a + 1 + number % (rule.agents - 1)) % rule.agents if a < rule.predators else number % 4
    game.touches[m] = 0


# ---- what the agents see ----
@scalar
def from_place(m, a, k, axis, rule, game):
    """The k-th of the obstacles and the other agents, on this axis, as seen from agent a's place."""
    b = rule.agents + k if k < rule.obstacles else k - rule.obstacles
    b += k >= rule.obstacles and b >= a
    return game.place[m, b, axis] - game.place[m, a, axis]


@scalar
def seen(m, a, column, rule, game):
    """A number of agent a's full view: its velocity and place, then obstacles and the other agents, as seen from its
    place, then velocities of the other prey.
    """
    k, axis = (column - 4) // 2, column % 2
    if column < 2:
        return game.velocity[m, a, axis]
    if column < 4:
        return game.place[m, a, axis]
    if k < rule.obstacles + rule.agents - 1:
        return from_place(m, a, k, axis, rule, game)
    b = rule.predators + k - (rule.obstacles + rule.agents - 1)
    b += a >= rule.predators and b >= a
    return 0.0 if b >= rule.agents else game.velocity[m, b, axis]


@scalar
def seen_from_near(m, a, column, number, rule, game):
    """The number of the full view as a prey of popp sees it."""
    k, axis = (column - 4) // 2, column % 2
    if column < 4:
        return number
    if k >= rule.obstacles + rule.agents - 1:
        return 0.0
    away = from_place(m, a, k, 1 - axis, rule, game)
    return HIDDEN if abs(number) > VIEW or abs(away) > VIEW else number


@scalar
def sees_agent(m, a, b, rule, game):
    x, y = game.place[m, b, 0] - game.place[m, a, 0], game.place[m, b, 1] - game.place[m, a, 1]
    return rule.hidden == 0 or (abs(x) <= VIEW and abs(y) <= VIEW)


@scalar
def observe_one(m, lane, lanes, rule, game):
    for a in range(rule.agents):
        predator = a < rule.predators
        start = a * rule.view_dim - (0 if predator else 2 * (a - rule.predators))
        for column in range(lane, rule.view_dim, lanes):
            number = seen(m, a, column, rule, game)
            if predator or column < rule.view_dim - 2:  # a prey has one less to see the velocity of: padded with zeros
                game.state[m, start + column] = number
            if rule.hidden == 1 and not predator:
                number = seen_from_near(m, a, column, number, rule, game)
            game.obs[m, a, column] = number
        if rule.obs_last_action:
            for k in range(lane, rule.agents - 1, lanes):
                b = k + (k >= a)
                observe_last_action(m, a, b, k, predator or sees_agent(m, a, b, rule, game), rule, game)
        for action in range(lane, rule.actions, lanes):
            game.avail[m, a, action] = True
    for a in range(lane, rule.agents, lanes):
        game.alive[m, a] = True


# ---- scripted predators and prey ----
@scalar
def way(x, y):
    """The move along the axis that has farther to go."""
    if abs(x) >= abs(y):
        return RIGHT if x >= 0 else LEFT
    return UP if y >= 0 else DOWN


@scalar
def corner_place(corner, axis):
    """Corners 0 to 3 in turn, a little inside."""
    high = corner == 1 or corner == 2 if axis == 0 else corner >= 2
    return CORNER if high else -CORNER


@scalar
def remember(m, a, rule, game):
    """What scripted agents keep in mind, whoever plays the seat."""
    if a < rule.predators:  # a loyal predator follows one agent until it touches it, then the next
        if touching(m, a, game.goal[m, a], rule, game):
            following = (game.goal[m, a] + 1) % rule.agents
            game.goal[m, a] = following if following != a else (following + 1) % rule.agents
        return
    corner = game.goal[m, a]
    x, y = corner_place(corner, 0) - game.place[m, a, 0], corner_place(corner, 1) - game.place[m, a, 1]
    if x * x + y * y < 0.09:  # on its rounds it turns left or right at corners, as drawn for the match
        right = draw(game.match[m, KEY], game.match[m, EPISODE], a, FOR_TURN) % 2 == 1
        game.goal[m, a] = (corner + (3 if right else 1)) % 4
    if distance(m, a, nearest(m, a, 0, rule.predators, game), game) < ALARM:
        game.alarmed[m, a] = 1


@scalar
def farthest_axis(m, a, rule, game):
    """The move along the largest difference on either axis to any other agent."""
    best, chosen = -1.0, NONE
    for b in range(rule.agents):
        for axis in range(2):
            gap = game.place[m, b, axis] - game.place[m, a, axis]
            if b != a and abs(gap) > best:
                best, chosen = abs(gap), way(gap, 0.0) if axis == 0 else way(0.0, gap)
    return chosen


@scalar
def flee(m, a, rule, game):
    """The move that leads farthest from the nearest predator, but not out of the area or into an obstacle."""
    best, chosen = 0.0, NONE
    for action in range(len(ACTIONS)):
        x = game.place[m, a, 0] + (0.25 if action == RIGHT else (-0.25 if action == LEFT else 0.0))
        y = game.place[m, a, 1] + (0.25 if action == UP else (-0.25 if action == DOWN else 0.0))
        score = 10.0
        for b in range(rule.predators):
            dx, dy = x - game.place[m, b, 0], y - game.place[m, b, 1]
            score = min(score, math.sqrt(dx * dx + dy * dy))
        for b in range(rule.agents, rule.agents + rule.obstacles):
            dx, dy = x - game.place[m, b, 0], y - game.place[m, b, 1]
            score -= max(OBSTACLE_RADIUS + rule.prey_radius - math.sqrt(dx * dx + dy * dy), 0.0) * 5.0
        score -= (max(abs(x) - 0.85, 0.0) + max(abs(y) - 0.85, 0.0)) * 5.0
        if action == NONE or score > best:
            best, chosen = score, action
    return chosen


@scalar
def safest_corner(m, rule, game):
    """The corner that is farthest from the predator nearest to it."""
    best, chosen = -1.0, 0
    for corner in range(4):
        near = 100.0
        for b in range(rule.predators):
            x = corner_place(corner, 0) - game.place[m, b, 0]
            y = corner_place(corner, 1) - game.place[m, b, 1]
            near = min(near, x * x + y * y)
        if near > best:
            best, chosen = near, corner
    return chosen


@scalar
def shelter_place(m, a, axis, rule, game):
    """The place behind the nearest obstacle, as the nearest predator sees it, but inside the area."""
    shelter = nearest(m, a, rule.agents, rule.agents + rule.obstacles, game)
    hunter = nearest(m, a, 0, rule.predators, game)
    away = max(distance(m, shelter, hunter, game), 0.001)
    stretch = 1.0 + (OBSTACLE_RADIUS + 2.0 * rule.prey_radius) / away
    place = game.place[m, hunter, axis] + stretch * (game.place[m, shelter, axis] - game.place[m, hunter, axis])
    return min(max(place, -INSIDE), INSIDE)


@scalar
def act_as_prey(m, a, policy, rule, game):
    if policy == CHASE or (policy == CLOSE and rule.obstacles == 0) or (policy == LOYAL and game.alarmed[m, a] == 1):
        return flee(m, a, rule, game)
    if policy == LOYAL:
        return NONE
    corner = safest_corner(m, rule, game) if policy == FAR else game.goal[m, a]
    x, y = 0.0, 0.0
    for axis in range(2):
        goal = shelter_place(m, a, axis, rule, game) if policy == CLOSE else corner_place(corner, axis)
        away = goal - game.place[m, a, axis]
        x, y = y, away
    return NONE if x * x + y * y < 0.0025 else way(x, y)


@scalar
def act_as_predator(m, a, policy, number, rule, game):
    if policy == FAR:
        return farthest_axis(m, a, rule, game)
    if policy == FELLOW and rule.predators > 1:
        target = (a + 1 + number % (rule.predators - 1)) % rule.predators
    elif policy == LOYAL:
        target = game.goal[m, a]
    else:
        target = nearest(m, a, 0 if policy == CLOSE else rule.predators, rule.agents, game)
    return way(game.place[m, target, 0] - game.place[m, a, 0], game.place[m, target, 1] - game.place[m, a, 1])


@scalar
def act_one(m, a, policy, rule, game):
    if not game.alive[m, a]:
        return NONE
    number = draw(game.match[m, KEY], game.match[m, EPISODE], game.match[m, STEP], 4 * a + FOR_ACTION)
    if policy == RANDOM:
        return number % len(ACTIONS)
    if a < rule.predators:
        return act_as_predator(m, a, policy, number, rule, game)
    return act_as_prey(m, a, policy, rule, game)


class PredatorPrey(Batch):
    """Predators and prey. docs/predator_prey.md describes the rules and the options; envs.make builds one."""

    policies = POLICIES
    team_reward = False
    return_scale = 100.0
    hit_distance = 0.1  # how near a predicted place must be to count as right: a step at full speed

    def __init__(
        self,
        name,
        num_envs=1,
        n_agents=None,
        *,
        predators=None,
        prey=None,
        obstacles=2,
        limit=None,
        velocity_first=None,
        learner=None,
        obs_last_action=False,
        **common,
    ):
        hidden = name == "popp"
        sizes = PATTERN.fullmatch(name)
        prey = prey if prey is not None else (int(sizes[2]) if sizes else 1)
        if predators is None:
            predators = int(sizes[1]) if sizes else 3
            if n_agents is not None and isinstance(n_agents, int) and isinstance(prey, int):
                predators = n_agents - prey
        limit = limit if limit is not None else (50 if hidden else 25)
        learner = learner if learner is not None else ("prey" if hidden else "predator")
        for word, number, least in (("predators", predators, 1), ("prey", prey, 1), ("obstacles", obstacles, 0)):
            batch.check_whole_number(f"{name}: {word}", number, least, MOST_AGENTS)
        batch.check_whole_number(f"{name}: limit", limit, 1, batch.MOST_STEPS)
        if learner not in ("predator", "prey"):
            raise ValueError(f'{name}: learner is "predator" or "prey", not {learner!r}')
        agents = predators + prey
        self.predators, self.prey, self.obstacles, self.hidden = predators, prey, obstacles, hidden
        self.sides = (0,) * predators + (1,) * prey
        self.learner_side = 0 if learner == "predator" else 1
        start = 0.9 if hidden else 1.0
        self.obs_bound = -HIDDEN if hidden else 2.1 + 2 * limit * TIME_STEP * 1.3  # nobody is faster than 1.3
        velocity_first = hidden if velocity_first is None else velocity_first
        batch.check_flag(f"{name}: velocity_first", velocity_first)
        batch.check_flag(f"{name}: obs_last_action", obs_last_action)
        far = 2 * FARTHEST + limit  # nobody gets farther from where it was put
        goals = torch.tensor([agents - 1] * predators + [3] * prey)
        self.ranges = {"place": (-far, far), "velocity": (-far, far), "last": (NONE, UP), "goal": (0, goals),
                       "touches": (0, predators * prey * limit), "alarmed": (0, 1)}  # fmt: skip
        real, whole = torch.float64, torch.int32
        view_dim = 4 + 2 * (obstacles + agents - 1 + prey)
        obs_dim = view_dim + (agents - 1) * len(ACTIONS) * obs_last_action
        super().__init__(
            name, num_envs,
            [*(f"predator_{a}" for a in range(predators)), *(f"prey_{a}" for a in range(prey))],
            (len(ACTIONS), obs_dim, agents * view_dim - 2 * prey, limit),
            {"place": (real, (num_envs, agents + obstacles, 2)), "velocity": (real, (num_envs, agents, 2)),
             "last": (whole, (num_envs, agents)), "earned": (torch.float32, (num_envs, agents)),
             "touches": (whole, (num_envs,)), "goal": (whole, (num_envs, agents)),
             "alarmed": (whole, (num_envs, agents))}, **common,
        )  # fmt: skip
        self._room = {"force": torch.zeros((num_envs, agents, 2), dtype=real, device=self.device)}
        self.compile_rules(
            (reset_one, step_one, observe_one, act_one), Tag, Rule, NONE, self._room, lanes=4,
            predators=predators, prey=prey, obstacles=obstacles, velocity_first=int(velocity_first),
            hidden=int(hidden), predator_radius=0.07 if hidden else 0.075, prey_radius=0.07 if hidden else 0.05,
            area=start, view_dim=view_dim, obs_last_action=int(obs_last_action),
        )  # fmt: skip

    def set_world(self, places=None, velocities=None, obstacles=None):
        """Puts things by hand: places and velocities (num_envs, n_agents, 2), obstacles (num_envs, obstacles, 2).

        None leaves things as they are. Returns (obs, info), without a step.
        """
        if not self._started:
            raise RuntimeError("reset() comes before set_world()")
        place, velocity = self._simulation["place"], self._simulation["velocity"]
        targets = {
            "places": (places, place[:, : self.n_agents]),
            "velocities": (velocities, velocity),
            "obstacles": (obstacles, place[:, self.n_agents :]),
        }
        given = {}
        for name, (values, target) in targets.items():
            if values is not None:
                values = self._given(values, f"{name} has shape {tuple(target.shape)}")
                if values.shape != target.shape or values.is_complex():
                    shapes = f"{tuple(target.shape)}, not {values.dtype} {tuple(values.shape)}"
                    raise ValueError(f"{name} has real numbers of shape {shapes}")
                batch.check_range(values, -FARTHEST, FARTHEST, functools.partial(self._called, name))
                given[name] = values
        for name, values in given.items():
            targets[name][1].copy_(values)
        self._run(OBSERVE)
        return self._shown()

    def units(self):
        """Where the agents are and how fast, by name, each (num_envs, n_agents): views, not copies."""
        place, velocity = self._simulation["place"], self._simulation["velocity"]
        return {
            "x": place[:, : self.n_agents, 0],
            "y": place[:, : self.n_agents, 1],
            "vx": velocity[..., 0],
            "vy": velocity[..., 1],
        }

    @property
    def visible(self):
        if not self.hidden:
            return super().visible
        place = self._simulation["place"][:, : self.n_agents]
        near = ((place.unsqueeze(1) - place.unsqueeze(2)).abs() <= VIEW).all(-1)
        near[:, : self.predators] = True
        return near

    def _about_others(self, column):
        return column >= 4 + 2 * self.obstacles

    def places(self, obs):
        """(x and y of every other agent from the agent (..., others, 2), whether it is seen), read off observations."""
        first = 4 + 2 * self.obstacles
        others = obs[..., first : first + 2 * (self.n_agents - 1)].unflatten(-1, (-1, 2))
        return others, (others > HIDDEN + VIEW).all(-1) if self.hidden else torch.ones_like(others[..., 0]).bool()

    def scene(self, index=0):
        """What a picture of one match shows, as plain numbers and words."""
        self._check_index(index)
        match, place, velocity, earned = (
            self._simulation[name][index].tolist() for name in ("match", "place", "velocity", "earned")
        )
        radii = (0.07, 0.07) if self.hidden else (0.075, 0.05)
        reach = 2 * sum(radii) if self.hidden else sum(radii)
        agents = []
        for a in range(self.n_agents):
            rivals = place[: self.predators] if self.sides[a] else place[self.predators : self.n_agents]
            agents.append(
                {
                    "kind": ("predator", "prey")[self.sides[a]], "x": place[a][0], "y": place[a][1],
                    "vx": velocity[a][0], "vy": velocity[a][1], "radius": radii[self.sides[a]], "alive": True,
                    "sight": VIEW if self.hidden and self.sides[a] else None,
                    "touching": any(math.dist(place[a], rival) < reach for rival in rivals), "return": earned[a],
                }
            )  # fmt: skip
        half = 1.4 if self.hidden else 1.5
        return {
            "game": "tag", "title": self.name, "step": match[STEP], "limit": self.episode_limit,
            "width": 2 * half, "height": 2 * half, "edge": WALL - WALL_HALF if self.hidden else 1.0,
            "obstacles": [{"x": x, "y": y, "radius": OBSTACLE_RADIUS} for x, y in place[self.n_agents :]],
            "agents": agents, "status": "running" if match[STAGE] == RUNNING else "time",
        }  # fmt: skip


def is_tag(name):
    return name in IDS or PATTERN.fullmatch(str(name)) is not None

"""The Markov stag hunt of HOP: hunters on a grid take hares alone or a stag together, each for its own reward.

One match is scalar code on arrays indexed by match m and hunter a. Hunters and prey stand on cells, numbered row by
row; GONE is no cell. docs/stag_hunt.md has the rules in words.
"""

import re
from collections import namedtuple
from numbers import Real

import numpy as np
import torch

from envs.batch import EPISODE, KEY, OBSERVE, RULE, RUNNING, STAGE, STEP, TENSORS, Batch, available_action, check_flag
from envs.compiler import draw, pick_bit, scalar

UP, DOWN, LEFT, RIGHT, STAY, HUNT_STAG, HUNT_HARE = range(7)
ACTIONS = ("up", "down", "left", "right", "stay", "hunt stag", "hunt hare")
POLICIES = ("NS", "NH", "RAND", "SWITCH", "FOLLOW")
NS, NH, RAND, SWITCH, FOLLOW = range(len(POLICIES))  # to the nearest stag, to the nearest hare, anything that is
# allowed, now a stag and now a hare, a stag if another goes for it
PATIENCE = 8  # steps for which FOLLOW waits for another
SHORTEST, LONGEST = 3, 8  # steps for which SWITCH keeps its mind
GONE = -1
LEAST, MOST = 1e-6, 1_000_000  # of rewards, strengths and limits: float32 has room for their products
MOST_HUNTERS = 64
FREE, OBSTACLE = range(2)
DRAWS, TRIES = 16, 64  # of a whole map, and of a piece on it; a piece that finds no place by then is left out
FOR_PIECE, FOR_HUNTER, FOR_PREY, FOR_ACTION, FOR_MIND = range(5)  # what a random number is for
IDS = {"stag_hunt": (8, 8, 4, 1, 5), "stag_hunt_4x4": (4, 4, 4, 1, 0)}  # height, width, hares, stags, obstacle pieces
PATTERN = re.compile(r"stag_hunt_(\d+)x(\d+)_(\d+)h(\d+)s")

Rule = namedtuple(
    "Rule", (*RULE, "stags", "prey", "height", "width", "pieces", "prosocial", "radius", "stag_worth", "hare_worth")
)
Hunt = namedtuple(
    "Hunt", (*TENSORS, "hunter", "target", "prey", "ground", "last", "earned", "joins", "strength", "away", "queue")
)
# hunter, prey: their cells; target: a hunter's after this step; last: actions; joins: whether another has stood on a
# stag's cell; away, queue: room to search in


# ---- where things are ----
@scalar
def beside(cell, action, rule):
    """The cell that a move leads to, which is its own at the edge."""
    if action == UP:
        return cell - rule.width if cell >= rule.width else cell
    if action == DOWN:
        return cell + rule.width if cell < rule.width * (rule.height - 1) else cell
    if action == LEFT:
        return cell - 1 if cell % rule.width > 0 else cell
    if action == RIGHT:
        return cell + 1 if cell % rule.width < rule.width - 1 else cell
    return cell


@scalar
def hunters_at(m, cell, rule, game):
    count = 0
    for a in range(rule.agents):
        if game.hunter[m, a] == cell:
            count += 1
    return count


@scalar
def prey_at(m, cell, first, behind, game):
    for p in range(first, behind):
        if game.prey[m, p] == cell:
            return True
    return False


@scalar
def stag_at(m, cell, rule, game):
    return prey_at(m, cell, 0, rule.stags, game)


@scalar
def hare_at(m, cell, rule, game):
    return prey_at(m, cell, rule.stags, rule.prey, game)


@scalar
def others_on_stags(m, a, rule, game):
    """Whether another hunter stands on a stag's cell."""
    for b in range(rule.agents):
        if b != a and game.hunter[m, b] != GONE and stag_at(m, game.hunter[m, b], rule, game):
            return True
    return False


@scalar
def allowed(m, a, action, rule, game):
    cell = game.hunter[m, a]
    if cell == GONE:
        return action == STAY
    if action == HUNT_STAG:
        return stag_at(m, cell, rule, game) and hunters_at(m, cell, rule, game) >= 2
    if action == HUNT_HARE:
        return hare_at(m, cell, rule, game)
    return True


# ---- a step: everyone acts at once, on what stood there before ----
@scalar
def spoils(m, a, action, worth, rule, game):
    """Hunter a's part of the prey it hunts with those who do the same on its cell; 0 for a stag hunted alone."""
    together, strength = 0, np.float32(0)
    for b in range(rule.agents):
        if game.hunter[m, b] == game.hunter[m, a] and game.last[m, b] == action:
            together += 1
            strength += game.strength[b]
    if action == HUNT_STAG and together < 2:
        return np.float32(0)
    return worth * (game.strength[a] / strength)


@scalar
def step_one(m, rule, game):
    for a in range(rule.agents):
        action = game.actions[m, a]
        if action < 0 or action > HUNT_HARE or not allowed(m, a, action, rule, game):
            action = STAY
        game.last[m, a] = action
    team, left = np.float32(0), 0
    for a in range(rule.agents):
        cell, action, reward = game.hunter[m, a], game.last[m, a], np.float32(0)
        target = cell
        if cell != GONE and action >= HUNT_STAG:
            reward = spoils(m, a, action, rule.stag_worth if action == HUNT_STAG else rule.hare_worth, rule, game)
            if reward > 0:
                target = GONE
        elif cell != GONE:
            target = beside(cell, action, rule)
            if game.ground[m, target] == OBSTACLE:
                target = cell
        game.target[m, a], game.reward[m, a] = target, reward
        team += reward
        left += target == GONE
    stags = 0
    for p in range(rule.prey):
        for a in range(rule.agents):
            if game.reward[m, a] > 0 and game.hunter[m, a] == game.prey[m, p]:
                game.prey[m, p] = GONE
        stags += p < rule.stags and game.prey[m, p] != GONE
    for a in range(rule.agents):
        game.hunter[m, a] = game.target[m, a]
        if rule.prosocial:
            game.reward[m, a] = team / np.float32(rule.agents)
        game.earned[m, a] += game.reward[m, a]
        game.joins[m, a] = game.joins[m, a] == 1 or others_on_stags(m, a, rule, game)
    return left == rule.agents, rule.stags > 0 and stags == 0


# ---- reset ----
@scalar
def flood(m, a, rule, game):
    """How many cells can be reached from the first ones in the queue, whose distance `away` is 0 (else -1)."""
    head, tail = 0, 0
    for cell in range(rule.height * rule.width):
        if game.away[m, a, cell] == 0:
            game.queue[m, a, tail] = cell
            tail += 1
    while head < tail:
        cell = game.queue[m, a, head]
        head += 1
        for move in range(STAY):
            there = beside(cell, move, rule)
            if game.away[m, a, there] < 0 and game.ground[m, there] == FREE:
                game.away[m, a, there] = game.away[m, a, cell] + 1
                game.queue[m, a, tail] = there
                tail += 1
    return tail


@scalar
def length_of(form):
    return 3 + form % 2


@scalar
def piece_cell(start, form, k, rule):
    """The k-th cell of the obstacle piece that starts there; GONE if it is off the grid."""
    direction, straight = form // 2 % 4, form // 8 % 2 == 1
    corner = k if straight else 1 + form // 16 % (length_of(form) - 2)
    turned = (direction // 2 * 2 + 2 + form // 32 % 2) % 4  # up or down becomes left or right, and the reverse
    cell = start
    for j in range(k):
        ahead = beside(cell, direction if j < corner else turned, rule)
        if ahead == cell:
            return GONE
        cell = ahead
    return cell


@scalar
def connected(m, rule, game):
    """Whether there are free cells, and a way from each to every other."""
    free, start = 0, GONE
    for cell in range(rule.height * rule.width):
        game.away[m, 0, cell] = -1
        if game.ground[m, cell] == FREE:
            free, start = free + 1, cell
    if start == GONE:
        return False
    game.away[m, 0, start] = 0
    return flood(m, 0, rule, game) == free


@scalar
def lay_piece(m, start, form, rule, game):
    """Puts a piece down if it lies on free cells and leaves the others connected; whether it did."""
    for k in range(length_of(form)):
        cell = piece_cell(start, form, k, rule)
        if cell == GONE or game.ground[m, cell] == OBSTACLE:
            return False
    for k in range(length_of(form)):
        game.ground[m, piece_cell(start, form, k, rule)] = OBSTACLE
    if connected(m, rule, game):
        return True
    for k in range(length_of(form)):
        game.ground[m, piece_cell(start, form, k, rule)] = FREE
    return False


@scalar
def lay_pieces(m, rule, game):
    cells, tries = rule.height * rule.width, rule.pieces * TRIES
    for attempt in range(DRAWS):
        for cell in range(cells):
            game.ground[m, cell] = FREE
        laid = 0
        for number in range(attempt * tries, (attempt + 1) * tries):
            if laid < rule.pieces:
                drawn = draw(game.match[m, KEY], game.match[m, EPISODE], number, FOR_PIECE)
                laid += lay_piece(m, drawn % cells, drawn // cells, rule, game)
        if laid == rule.pieces:
            return


@scalar
def free_cell(m, number, apart, rule, game):
    """One of the free cells, by a random number; apart: of those without prey."""
    count, chosen = 0, GONE
    for turn in range(2):  # count them, then go to the one
        place = number % count if turn == 1 else -1
        for cell in range(rule.height * rule.width):
            if game.ground[m, cell] == FREE and not (apart and prey_at(m, cell, 0, rule.prey, game)):
                if place == 0:
                    chosen = cell
                count, place = count + 1, place - 1
    return chosen


@scalar
def reset_one(m, rule, game):
    key, episode = game.match[m, KEY], game.match[m, EPISODE]
    lay_pieces(m, rule, game)
    for p in range(rule.prey):
        game.prey[m, p] = GONE
    for p in range(rule.prey):
        game.prey[m, p] = free_cell(m, draw(key, episode, p, FOR_PREY), True, rule, game)
    for a in range(rule.agents):
        game.hunter[m, a] = free_cell(m, draw(key, episode, a, FOR_HUNTER), False, rule, game)
        game.last[m, a], game.earned[m, a], game.joins[m, a] = -1, 0, 0


# ---- what the hunters see ----
@scalar
def in_view(m, a, cell, rule, game):
    own = game.hunter[m, a]
    if own == GONE or cell == GONE:
        return False
    if rule.radius < 0:
        return True
    rows, columns = cell // rule.width - own // rule.width, cell % rule.width - own % rule.width
    return abs(rows) <= rule.radius and abs(columns) <= rule.radius


@scalar
def hunter_from(a, k, rule):
    """Who comes k after hunter a, the last followed by the first: the order in which a sees the others."""
    return a + k if a + k < rule.agents else a + k - rule.agents


@scalar
def shows(m, first, channel, cell, rule, game):
    """Whether the cell holds what the channel is for: a hunter, counted from `first`, an obstacle, a stag, a hare."""
    if channel < rule.agents:
        return game.hunter[m, hunter_from(first, channel, rule)] == cell
    if channel == rule.agents:
        return game.ground[m, cell] == OBSTACLE
    if channel == rule.agents + 1:
        return stag_at(m, cell, rule, game)
    return hare_at(m, cell, rule, game)


@scalar
def observe_one(m, lane, lanes, rule, game):
    channels = rule.agents + 3
    numbers = rule.height * rule.width * channels
    for a in range(rule.agents + 1):  # the last is nobody: the global state
        cell, channel = 0, lane
        for column in range(lane, numbers, lanes):
            while channel >= channels:
                cell, channel = cell + 1, channel - channels
            if a == rule.agents:
                game.state[m, column] = shows(m, 0, channel, cell, rule, game)
            else:
                seen = in_view(m, a, cell, rule, game)
                game.obs[m, a, column] = seen and shows(m, a, channel, cell, rule, game)
            channel += lanes
    for a in range(rule.agents):
        here = game.hunter[m, a] != GONE
        for action in range(lane, len(ACTIONS), lanes):
            can = allowed(m, a, action, rule, game)
            game.avail[m, a, action] = can
            game.obs[m, a, numbers + action] = here and can
        for k in range(lane, rule.agents * len(ACTIONS), lanes):  # everyone's last action, own first
            other = hunter_from(a, k // len(ACTIONS), rule)
            done = game.last[m, other] == k % len(ACTIONS)
            game.obs[m, a, numbers + len(ACTIONS) + k] = done and in_view(m, a, game.hunter[m, other], rule, game)
    for a in range(lane, rule.agents, lanes):
        game.alive[m, a] = game.hunter[m, a] != GONE
    if lane == 0:
        game.state[m, numbers] = np.float32(game.match[m, STEP]) / np.float32(rule.limit)


# ---- scripted hunters ----
@scalar
def step_towards(m, a, wanted, number, rule, game):
    """A move on a shortest way to the nearest prey of that kind, one of the best by a random number; STAY if none."""
    cells = rule.height * rule.width
    for cell in range(cells):
        here = stag_at(m, cell, rule, game) if wanted == HUNT_STAG else hare_at(m, cell, rule, game)
        game.away[m, a, cell] = 0 if here else -1
    flood(m, a, rule, game)
    distance, best = game.away[m, a, game.hunter[m, a]], 0
    if distance > 0:
        for move in range(STAY):
            if game.away[m, a, beside(game.hunter[m, a], move, rule)] == distance - 1:
                best |= 1 << move
    return pick_bit(best, number) if best != 0 else STAY


@scalar
def act_one(m, a, policy, rule, game):
    if not game.alive[m, a]:
        return STAY
    number = draw(game.match[m, KEY], game.match[m, EPISODE], game.match[m, STEP], a * 4 + FOR_ACTION)
    if policy == RAND:
        return available_action(m, a, number, rule, game)
    wanted = HUNT_STAG if policy == NS else HUNT_HARE
    if policy == SWITCH:
        mind = draw(game.match[m, KEY], game.match[m, EPISODE], a, FOR_MIND)
        period = SHORTEST + mind // 2 % (LONGEST - SHORTEST + 1)
        wanted = HUNT_STAG if (mind + game.match[m, STEP] // period) % 2 == 0 else HUNT_HARE
    if policy == FOLLOW and (game.joins[m, a] == 1 or others_on_stags(m, a, rule, game)):
        wanted = HUNT_STAG
    elif policy == FOLLOW and game.match[m, STEP] < PATIENCE:
        return STAY
    return wanted if game.avail[m, a, wanted] else step_towards(m, a, wanted, number, rule, game)


class StagHunt(Batch):
    """Hunts on one size of grid. docs/stag_hunt.md describes the rules and the options; envs.make builds one."""

    policies = POLICIES
    default_others = ("NS", "NH", "RAND")
    ego_first = True
    hit_distance = 0.5  # cells: a predicted place is right if it is the very one
    goals = ("stag", "hare")

    def __init__(
        self,
        name,
        num_envs=1,
        n_agents=None,
        *,
        pieces=None,
        limit=35,
        strengths=None,
        stag_reward=10.0,
        hare_reward=1.0,
        prosocial=False,
        view_radius=None,
        **common,
    ):
        height, width, hares, stags, usual_pieces = size_of(name)
        pieces = usual_pieces if pieces is None else pieces
        agents = 4 if n_agents is None else n_agents
        refuse_what_does_not_fit(name, agents, height, width, stags, hares, pieces, limit, strengths, view_radius)
        check_flag("prosocial", prosocial)
        if not (positive(stag_reward) and positive(hare_reward)):
            raise ValueError(
                f"rewards are above 0, from {LEAST:g} to {MOST:g}, "
                f"not {stag_reward!r} for a stag and {hare_reward!r} for a hare"
            )
        strengths = [1.0] * agents if strengths is None else list(strengths)
        cells, channels = height * width, agents + 3
        self.height, self.width, self.stags, self.hares = height, width, stags, hares
        self.view_radius, self.team_reward = view_radius, prosocial
        self.grid = (height, width, channels)
        self.return_scale = (stags * stag_reward + hares * hare_reward) / agents or 1.0
        self.ranges = {"hunter": (GONE, cells - 1), "prey": (GONE, cells - 1), "ground": (FREE, OBSTACLE),
                       "last": (-1, len(ACTIONS) - 1), "joins": (0, 1)}  # fmt: skip
        whole, short = torch.int32, torch.int16
        super().__init__(
            name, num_envs, [f"hunter_{a}" for a in range(agents)],
            (len(ACTIONS), cells * channels + len(ACTIONS) * (1 + agents), cells * channels + 1, limit),
            {"hunter": (whole, (num_envs, agents)), "prey": (whole, (num_envs, stags + hares)),
             "ground": (torch.int8, (num_envs, cells)), "last": (whole, (num_envs, agents)),
             "earned": (torch.float32, (num_envs, agents)), "joins": (torch.int8, (num_envs, agents))}, **common,
        )  # fmt: skip
        room = {
            "target": torch.zeros((num_envs, agents), dtype=whole),
            "away": torch.zeros((num_envs, agents, cells), dtype=short),
            "queue": torch.zeros((num_envs, agents, cells), dtype=short),
            "strength": torch.tensor(strengths, dtype=torch.float32),
        }
        self._room = {key: tensor.to(self.device) for key, tensor in room.items()}
        self.compile_rules(
            (reset_one, step_one, observe_one, act_one), Hunt, Rule, STAY, self._room,
            stags=stags, prey=stags + hares, height=height, width=width, pieces=pieces, prosocial=int(prosocial),
            radius=-1 if view_radius is None else view_radius,
            stag_worth=np.float32(stag_reward), hare_worth=np.float32(hare_reward),
        )  # fmt: skip

    def set_grid(self, hunters=None, stags=None, hares=None, obstacles=None):
        """Puts things by hand: cells (num_envs, how many), -1 for gone; obstacles (num_envs, height, width).

        None leaves things as they are. Returns (obs, info), without a step.
        """
        if not self._started:
            raise RuntimeError("reset() comes before set_grid()")
        prey = self._simulation["prey"]
        places = {
            "hunters": (hunters, self._simulation["hunter"]),
            "stags": (stags, prey[:, : self.stags]),
            "hares": (hares, prey[:, self.stags :]),
            "obstacles": (obstacles, self._simulation["ground"].view(self.num_envs, self.height, self.width)),
        }
        given = {}
        for name, (values, place) in places.items():
            if values is not None:
                given[name] = self._grid_values(name, values, place)
        for name, values in given.items():
            places[name][1].copy_(values)
        self._run(OBSERVE)
        return self._shown()

    def _grid_values(self, name, values, place):
        values = self._given(values, f"{name} has shape {tuple(place.shape)}")
        if values.is_complex():
            raise ValueError(f"{name} has whole numbers, not {values.dtype}")
        if values.shape != place.shape:
            raise ValueError(f"{name} has shape {tuple(place.shape)}, not {tuple(values.shape)}")
        if name == "obstacles":
            if not ((values == FREE) | (values == OBSTACLE)).all():
                raise ValueError(f"obstacles are {OBSTACLE}, other cells {FREE}")
        elif not ((values >= GONE) & (values < self.height * self.width) & (values.double() % 1 == 0)).all():
            raise ValueError(f"{name} stand on cells 0 to {self.height * self.width - 1}, or {GONE} for gone")
        return values

    def goal_reached(self, action, left, over):
        """The number in `goals` of what a step brought each agent (..., agents), -1 for nothing.

        action: what it did; left: whether it left in this step; over (..., 1): whether the match ended with it
        """
        return torch.where(left & (action >= HUNT_STAG), action - HUNT_STAG, -1)

    @property
    def visible(self):
        cell = self._simulation["hunter"]
        here, near = cell != GONE, torch.ones_like(cell, dtype=torch.bool).unsqueeze(2)
        if self.view_radius is not None:
            row, column = cell // self.width, cell % self.width
            near = torch.maximum(*((x.unsqueeze(2) - x.unsqueeze(1)).abs() for x in (row, column))) <= self.view_radius
        myself = torch.eye(self.n_agents, dtype=torch.bool, device=self.device)
        return near & here.unsqueeze(1) & here.unsqueeze(2) | myself

    def _about_others(self, column):
        numbers, channel = self.height * self.width * (self.n_agents + 3), column % (self.n_agents + 3)
        return torch.where(
            column < numbers, (channel > 0) & (channel < self.n_agents), column >= numbers + 2 * len(ACTIONS)
        )

    def places(self, obs):
        """(row and column of every other hunter (..., others, 2), whether it is there), read off observations."""
        grid = obs[..., : self.height * self.width * (self.n_agents + 3)].unflatten(-1, (-1, self.n_agents + 3))
        others = grid[..., 1 : self.n_agents].transpose(-1, -2)  # (..., others, cells)
        highest, cell = others.max(-1)
        return torch.stack((cell // self.width, cell % self.width), -1).to(obs.dtype), highest > 0.5

    def scene(self, index=0):
        """What a picture of one match shows, as plain numbers and words."""
        self._check_index(index)
        match, hunter, prey, last, earned, ground = (
            self._simulation[name][index].tolist() for name in ("match", "hunter", "prey", "last", "earned", "ground")
        )
        status = "running"
        if match[STAGE] != RUNNING:
            status = "over" if all(cell == GONE for cell in hunter) else "time"
        return {
            "game": "hunt", "title": self.name, "step": match[STEP], "limit": self.episode_limit,
            "width": self.width, "height": self.height,
            "obstacles": [list(divmod(cell, self.width)) for cell, what in enumerate(ground) if what == OBSTACLE],
            "prey": [
                {"kind": "stag" if p < self.stags else "hare", "row": cell // self.width, "col": cell % self.width}
                for p, cell in enumerate(prey) if cell != GONE
            ],
            "hunters": [
                {"row": cell // self.width, "col": cell % self.width, "alive": cell != GONE,
                 "action": ACTIONS[action] if action >= 0 else "", "return": income}
                for cell, action, income in zip(hunter, last, earned)
            ],
            "radius": self.view_radius, "status": status,
        }  # fmt: skip


def is_hunt(name):
    return name in IDS or PATTERN.fullmatch(str(name)) is not None


def size_of(name):
    """(height, width, hares, stags, obstacle pieces) of an id."""
    if name in IDS:
        return IDS[name]
    return (*(int(number) for number in PATTERN.fullmatch(name).groups()), 0)


def positive(number):
    return isinstance(number, Real) and LEAST <= number <= MOST


def refuse_what_does_not_fit(name, agents, height, width, stags, hares, pieces, limit, strengths, view_radius):
    def refuse(what):
        raise ValueError(f"{name}: {what}")

    for word, number, least in (("n_agents", agents, 1), ("pieces", pieces, 0), ("limit", limit, 1)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            refuse(f"{word} is a whole number from {least} up, not {number!r}")
        if number > MOST:
            refuse(f"{word} is at most {MOST:g}, not {number}")
    if agents > MOST_HUNTERS:
        refuse(f"n_agents is at most {MOST_HUNTERS}, not {agents}")
    if view_radius is not None and (not isinstance(view_radius, int) or not 0 <= view_radius <= MOST):
        refuse(f"view_radius is a whole number from 0 up, or None for a full view, not {view_radius!r}")
    if strengths is not None and not (
        isinstance(strengths, (list, tuple)) and len(strengths) == agents and all(map(positive, strengths))
    ):
        refuse(f"strengths are {agents} numbers above 0, from {LEAST:g} to {MOST:g}, one a hunter, not {strengths!r}")
    if not (1 <= height <= 64 and 1 <= width <= 64):
        refuse(f"a grid has 1 to 64 rows and columns, not {height} x {width}")
    if stags + hares < 1:
        refuse("there is nothing to hunt: at least one hare or stag")
    if stags > 0 and hares == 0 and agents == 1:
        refuse("one hunter alone cannot take a stag: at least 2 hunters, or a hare")
    if pieces > 0 and min(height, width) < 3:
        refuse(f"obstacle pieces need at least 3 rows and 3 columns, not {height} x {width}")
    if 8 * pieces > height * width:
        fits = height * width // 8
        refuse(
            f"{pieces} obstacle pieces of up to 4 cells are more than half of {height} x {width} cells: at most {fits}"
        )
    free = height * width - 4 * pieces
    if stags + hares > free:
        refuse(
            f"{stags + hares} prey do not fit on {free} free cells ({height} x {width} less {pieces} pieces of up to 4)"
        )

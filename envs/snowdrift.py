"""The Markov snowdrift game of HOP: whoever removes a drift pays for it, and everybody gains.

One match is scalar code on arrays indexed by match m and player a. Cells are numbered row by row. docs/games.md has
the rules in words.
"""

import math
from collections import namedtuple

import numpy as np
import torch

from envs import batch
from envs.batch import EPISODE, KEY, RULE, RUNNING, STAGE, STEP, TENSORS, Batch, observe_last_action
from envs.compiler import draw, pick_bit, scalar

UP, DOWN, LEFT, RIGHT, STAY, REMOVE = range(6)
ACTIONS = ("up", "down", "left", "right", "stay", "remove")
POLICIES = ("ND", "FIX", "REC", "RAND")
ND, FIX, REC, RAND = range(len(POLICIES))  # cleaner, defector, reciprocator, anything that is allowed
NONE = -1
FOR_PLAYER, FOR_DRIFT, FOR_ACTION = range(3)  # what a random number is for
IDS = {"snowdrift": 8, "snowdrift_4x4": 4}
MOST_CELLS, MOST_PLAYERS = 64, 16  # of a row; of a match

Rule = namedtuple("Rule", (*RULE, "size", "drifts", "gain", "cost", "obs_last_action"))
Game = namedtuple("Game", (*TENSORS, "player", "drift", "left", "removed", "last", "earned"))
# player: cells; drift: of each cell, whether it has one; left: drifts; removed: how many a player has had a part in


@scalar
def beside(cell, action, size):
    """The cell that a move leads to, which is its own at the edge."""
    if action == UP and cell >= size:
        return cell - size
    if action == DOWN and cell < size * (size - 1):
        return cell + size
    if action == LEFT and cell % size > 0:
        return cell - 1
    if action == RIGHT and cell % size < size - 1:
        return cell + 1
    return cell


@scalar
def reset_one(m, rule, game):
    key, episode, cells = game.match[m, KEY], game.match[m, EPISODE], rule.size * rule.size
    for cell in range(cells):
        game.drift[m, cell] = 0
    for d in range(rule.drifts):  # the place-th of the cells that have none
        place = draw(key, episode, d, FOR_DRIFT) % (cells - d)
        for cell in range(cells):
            if game.drift[m, cell] == 0:
                if place == 0:
                    game.drift[m, cell] = 1
                place -= 1
    for a in range(rule.agents):
        game.player[m, a] = draw(key, episode, a, FOR_PLAYER) % cells
        game.removed[m, a], game.last[m, a], game.earned[m, a] = 0, NONE, 0
    game.left[m] = rule.drifts


@scalar
def step_one(m, rule, game):
    for a in range(rule.agents):
        action = game.actions[m, a]
        if action < 0 or action > REMOVE or (action == REMOVE and game.drift[m, game.player[m, a]] == 0):
            action = STAY
        game.last[m, a], game.reward[m, a] = action, 0
    gone = 0
    for a in range(rule.agents):
        if game.last[m, a] == REMOVE:
            cell, together, before = game.player[m, a], 0, 0
            for b in range(rule.agents):
                if game.last[m, b] == REMOVE and game.player[m, b] == cell:
                    together += 1
                    before += b < a
            if before == 0:  # everyone counts a drift once
                gone += 1
                game.drift[m, cell] = 0
            game.reward[m, a] -= rule.cost / np.float32(together)
            game.removed[m, a] += 1
    game.left[m] -= gone
    for a in range(rule.agents):
        game.player[m, a] = beside(game.player[m, a], game.last[m, a], rule.size)
        game.reward[m, a] += rule.gain * np.float32(gone)
        game.earned[m, a] += game.reward[m, a]
    return game.left[m] == 0, game.left[m] == 0


@scalar
def shows(m, first, channel, cell, rule, game):
    """Whether the cell holds what the channel is for: a player, counted from `first`, an obstacle, a drift."""
    if channel < rule.agents:
        a = first + channel if first + channel < rule.agents else first + channel - rule.agents
        return game.player[m, a] == cell
    return channel > rule.agents and game.drift[m, cell] == 1


@scalar
def observe_one(m, lane, lanes, rule, game):
    channels = rule.agents + 2
    numbers = rule.size * rule.size * channels
    for a in range(rule.agents):
        cell, channel = 0, lane
        for column in range(lane, numbers, lanes):
            while channel >= channels:
                cell, channel = cell + 1, channel - channels
            shown = shows(m, a, channel, cell, rule, game)
            game.obs[m, a, column] = shown
            if a == 0:
                game.state[m, column] = shown
            channel += lanes
        if rule.obs_last_action:
            for k in range(lane, rule.agents - 1, lanes):
                b = a + 1 + k if a + 1 + k < rule.agents else a + 1 + k - rule.agents
                observe_last_action(m, a, b, k, True, rule, game)
        for action in range(lane, len(ACTIONS), lanes):
            game.avail[m, a, action] = action != REMOVE or game.drift[m, game.player[m, a]] == 1
    for a in range(lane, rule.agents, lanes):
        game.alive[m, a] = True
    if lane == 0:
        game.state[m, numbers] = np.float32(game.match[m, STEP]) / np.float32(rule.limit)


# ---- scripted players ----
@scalar
def step_to_drift(m, a, number, rule, game):
    """A move on a shortest way to the nearest drift, one of the best by a random number; STAY if there is none."""
    here, least, best = game.player[m, a], 2 * rule.size, 0
    for cell in range(rule.size * rule.size):
        if game.drift[m, cell] == 1:
            rows, columns = cell // rule.size - here // rule.size, cell % rule.size - here % rule.size
            far = abs(rows) + abs(columns)
            if far < least:
                least, best = far, 0
            if far == least:  # the moves that lead there, as bits
                best |= (
                    int(rows < 0) << UP | int(rows > 0) << DOWN | int(columns < 0) << LEFT | int(columns > 0) << RIGHT
                )
    return pick_bit(best, number) if best != 0 else STAY


@scalar
def act_one(m, a, policy, rule, game):
    if not game.alive[m, a]:
        return STAY
    number = draw(game.match[m, KEY], game.match[m, EPISODE], game.match[m, STEP], a * 4 + FOR_ACTION)
    on_drift = game.drift[m, game.player[m, a]] == 1
    if policy == FIX:
        return number % REMOVE
    if policy == RAND:
        return number % (REMOVE + int(on_drift))
    if policy == REC:
        most = 0
        for b in range(rule.agents):
            if b != a:
                most = max(most, game.removed[m, b])
        if game.removed[m, a] > most:
            return STAY
    return REMOVE if on_drift else step_to_drift(m, a, number, rule, game)


class Snowdrift(Batch):
    """Snowdrift games on a square grid. docs/games.md describes the rules and options; envs.make builds one."""

    policies = POLICIES
    team_reward = False
    ego_first = True
    hit_distance = 0.5  # cells: a predicted place is right if it is the very one
    goals = ("remove", "idle")

    def __init__(
        self,
        name,
        num_envs=1,
        n_agents=None,
        *,
        size=None,
        drifts=6,
        limit=50,
        gain=6.0,
        cost=4.0,
        obs_last_action=False,
        **common,
    ):
        size = IDS[name] if size is None else size
        agents = 4 if n_agents is None else n_agents
        batch.check_whole_number(f"{name}: n_agents", agents, 1, MOST_PLAYERS)
        batch.check_whole_number(f"{name}: size", size, 1, MOST_CELLS)
        batch.check_whole_number(f"{name}: drifts", drifts, 1, size * size)
        batch.check_whole_number(f"{name}: limit", limit, 1, batch.MOST_STEPS)
        batch.check_flag(f"{name}: obs_last_action", obs_last_action)
        batch.check_number(f"{name}: gain", gain, -batch.MOST_REWARD, batch.MOST_REWARD)
        batch.check_number(f"{name}: cost", cost, -batch.MOST_REWARD, batch.MOST_REWARD)
        self.size, self.drifts, self.return_scale = size, drifts, drifts * max(abs(gain), abs(cost)) or 1.0
        self.ranges = {"player": (0, size * size - 1), "drift": (0, 1), "left": (0, drifts),
                       "removed": (0, drifts), "last": (NONE, REMOVE)}  # fmt: skip
        whole, number = torch.int32, torch.float32
        simulation = dict.fromkeys(("player", "removed", "last"), (whole, (num_envs, agents)))
        simulation |= {
            "drift": (torch.int8, (num_envs, size * size)), "left": (whole, (num_envs,)),
            "earned": (number, (num_envs, agents)),
        }  # fmt: skip
        numbers = size * size * (agents + 2)
        self.grid = (size, size, agents + 2)
        names = [f"player_{a}" for a in range(agents)]
        sizes = len(ACTIONS), numbers + (agents - 1) * len(ACTIONS) * obs_last_action, numbers + 1, limit
        super().__init__(name, num_envs, names, sizes, simulation, **common)
        self.compile_rules(
            (reset_one, step_one, observe_one, act_one), Game, Rule, STAY,
            size=size, drifts=drifts, gain=np.float32(gain), cost=np.float32(cost),
            obs_last_action=int(obs_last_action),
        )  # fmt: skip

    def goal_reached(self, action, left, over):
        """The number in `goals` of what a step brought each player (..., agents), -1 for nothing.

        action: what it did; over (..., 1): whether the match ended with it. Who removes nothing to the end was idle.
        """
        return torch.where(action == REMOVE, 0, torch.where(over, 1, -1))

    def _about_others(self, column):
        channel = column % (self.n_agents + 2)
        return (channel > 0) & (channel < self.n_agents) | (column >= math.prod(self.grid))

    def places(self, obs):
        """(row and column of every other player (..., others, 2), whether it is there), read off observations."""
        grid = obs[..., : math.prod(self.grid)].unflatten(-1, (-1, self.n_agents + 2))
        highest, cell = grid[..., 1 : self.n_agents].max(-2)
        return torch.stack((cell // self.size, cell % self.size), -1).to(obs.dtype), highest > 0.5

    def scene(self, index=0):
        """What a picture of one match shows, as plain numbers and words."""
        self._check_index(index)
        match, player, drift, last, earned = (
            self._simulation[key][index].tolist() for key in ("match", "player", "drift", "last", "earned")
        )
        status = "running"
        if match[STAGE] != RUNNING:
            status = "time" if any(drift) else "over"
        return {
            "game": "hunt", "title": self.name, "step": match[STEP], "limit": self.episode_limit,
            "width": self.size, "height": self.size, "obstacles": [],
            "prey": [
                {"kind": "drift", "row": cell // self.size, "col": cell % self.size}
                for cell, there in enumerate(drift) if there
            ],
            "hunters": [
                {"row": cell // self.size, "col": cell % self.size, "alive": True,
                 "action": ACTIONS[action] if action >= 0 else "", "return": income}
                for cell, action, income in zip(player, last, earned)
            ],
            "radius": None, "status": status,
        }  # fmt: skip

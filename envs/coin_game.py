"""The coin game: two players on a small torus collect coins, and taking the other's coin costs the other.

One match is scalar code on arrays indexed by match m and player a. Cells are numbered row by row; NOWHERE is no cell.
docs/games.md has the rules in words.
"""

from collections import namedtuple

import numpy as np
import torch

from envs import batch
from envs.batch import EPISODE, KEY, RULE, RUNNING, STAGE, STEP, TENSORS, Batch, observe_last_action
from envs.compiler import draw, pick_bit, scalar

RIGHT, LEFT, DOWN, UP, STAY = range(5)
ACTIONS = ("right", "left", "down", "up", "stay")
POLICIES = (
    "own_only", "good_greedy", "evil_greedy", "random_greedy", "other_first", "reciprocator", "grim", "stay", "random",
)  # fmt: skip
OWN_ONLY, GOOD, EVIL, RANDOM_GREEDY, OTHER_FIRST, RECIPROCATOR, GRIM, STILL, RANDOM = range(len(POLICIES))
NOWHERE = -1
NEVER = -1
FOR_PLAYER, FOR_COIN, FOR_ACTION = 0, 2, 4  # what a random number is for, plus the player
IDS = {"coin_game": 3, "coin_game_5x5": 5}
LIMITS = {"jaxmarl": 100, "lola": 150}
MOST_CELLS = 16  # of a row

Rule = namedtuple("Rule", (*RULE, "size", "lola", "patience", "obs_last_action"))
Game = namedtuple("Game", (*TENSORS, "player", "coin", "since", "taken", "last", "earned", "payoff"))
# player, coin: their cells; since: steps since the other last took a coin of this player's; taken: coins by player and
# owner


# ---- where things are ----
@scalar
def beside(cell, action, size):
    """The cell that a move leads to; the edges are joined."""
    row, column = cell // size, cell % size
    if action == RIGHT:
        column = column + 1 if column + 1 < size else 0
    if action == LEFT:
        column = column - 1 if column > 0 else size - 1
    if action == DOWN:
        row = row + 1 if row + 1 < size else 0
    if action == UP:
        row = row - 1 if row > 0 else size - 1
    return row * size + column


@scalar
def distance(cell, other, size):
    rows, columns = abs(cell // size - other // size), abs(cell % size - other % size)
    return min(rows, size - rows) + min(columns, size - columns)


@scalar
def free_cell(m, number, rule, game):
    """A cell without a player, by a random number."""
    first, second = min(game.player[m, 0], game.player[m, 1]), max(game.player[m, 0], game.player[m, 1])
    cell = number % (rule.size * rule.size - (1 if first == second else 2))
    if cell >= first:
        cell += 1
    if first != second and cell >= second:
        cell += 1
    return cell


@scalar
def put_coin(m, owner, time, rule, game):
    number = draw(game.match[m, KEY], game.match[m, EPISODE], time, FOR_COIN + owner)
    game.coin[m, owner] = free_cell(m, number, rule, game) if rule.lola else number % (rule.size * rule.size)


@scalar
def reset_one(m, rule, game):
    key, episode, cells = game.match[m, KEY], game.match[m, EPISODE], rule.size * rule.size
    first, second = draw(key, episode, 0, FOR_PLAYER), draw(key, episode, 0, FOR_PLAYER + 1)
    game.player[m, 0] = first % cells
    game.player[m, 1] = second % cells
    if rule.lola:  # on different cells
        game.player[m, 1] = (first % cells + 1 + second % (cells - 1)) % cells
    for a in range(2):
        game.coin[m, a], game.since[m, a], game.last[m, a], game.earned[m, a] = NOWHERE, NEVER, NOWHERE, 0
        game.taken[m, a, 0], game.taken[m, a, 1] = 0, 0
    for a in range(2):
        if not rule.lola or a == draw(key, episode, 0, FOR_ACTION) % 2:
            put_coin(m, a, 0, rule, game)


# ---- a step: both move at once, then coins are taken and replaced ----
@scalar
def step_one(m, rule, game):
    for a in range(2):
        action = game.actions[m, a]
        if action < 0 or action >= rule.actions:
            action = STAY
        game.last[m, a] = action
        game.player[m, a] = beside(game.player[m, a], action, rule.size)
        game.reward[m, a] = 0
        if game.since[m, a] != NEVER:
            game.since[m, a] += 1
    together = game.coin[m, 0] == game.coin[m, 1]  # then nobody can take one without the other
    for owner in range(2):
        gone = False
        for a in range(2):
            if game.coin[m, owner] == game.player[m, a]:
                gone = True
                game.taken[m, a, owner] += 1
                game.reward[m, a] += game.payoff[a, 0 if a == owner else 1]
                if a != owner:
                    game.reward[m, owner] += game.payoff[owner, 2]
                    if not together:
                        game.since[m, owner] = 0
        if gone and rule.lola:
            game.coin[m, owner] = NOWHERE
            put_coin(m, 1 - owner, game.match[m, STEP] + 1, rule, game)
            break
        if gone:
            put_coin(m, owner, game.match[m, STEP] + 1, rule, game)
    for a in range(2):
        game.earned[m, a] += game.reward[m, a]
    return False, False


# ---- what the players see: everyone is the first player, whose coin is the first ----
@scalar
def shows(m, a, channel, cell, game):
    if channel < 2:
        return game.player[m, (a + channel) % 2] == cell
    return game.coin[m, (a + channel) % 2] == cell


@scalar
def observe_one(m, lane, lanes, rule, game):
    numbers = 4 * rule.size * rule.size
    for column in range(lane, numbers, lanes):
        game.obs[m, 0, column] = game.state[m, column] = shows(m, 0, column % 4, column // 4, game)
        game.obs[m, 1, column] = shows(m, 1, column % 4, column // 4, game)
    if rule.obs_last_action:
        for a in range(lane, 2, lanes):
            observe_last_action(m, a, 1 - a, 0, True, rule, game)
    for k in range(lane, 2 * rule.actions, lanes):
        game.avail[m, k // rule.actions, k % rule.actions] = True
    for a in range(lane, 2, lanes):
        game.alive[m, a] = True
    if lane == 0:
        game.state[m, numbers] = np.float32(game.match[m, STEP]) / np.float32(rule.limit)


# ---- scripted players ----
@scalar
def towards(m, a, target, avoid, number, rule, game):
    """An action that comes nearest to the target and does not end on `avoid`, one of the best by a random number.

    Without a target it stays, where it can.
    """
    here = game.player[m, a]
    least, best = 2 * rule.size, 0
    for action in range(rule.actions):
        there = beside(here, action, rule.size)
        far = int(action != STAY) if target == NOWHERE else distance(there, target, rule.size)
        if there != avoid and far < least:
            least, best = far, 0
        if there != avoid and far == least:
            best |= 1 << action
    return pick_bit(best, number)


@scalar
def act_one(m, a, policy, rule, game):
    number = draw(game.match[m, KEY], game.match[m, EPISODE], game.match[m, STEP], FOR_ACTION + a)
    if not game.alive[m, a]:
        return rule.idle
    if policy == RANDOM:
        return number % rule.actions
    here, own, other = game.player[m, a], game.coin[m, a], game.coin[m, 1 - a]
    since = game.since[m, a]
    if policy == RECIPROCATOR:
        policy = GOOD if since != NEVER and since < rule.patience else OWN_ONLY
    if policy == GRIM:
        policy = GOOD if since != NEVER else OWN_ONLY
    target, avoid = NOWHERE, NOWHERE
    if policy == OWN_ONLY:
        target = own
        if other != own:
            avoid = other
    elif policy == OTHER_FIRST:
        target = other if other != NOWHERE else own
    elif policy != STILL and (own == NOWHERE or other == NOWHERE):
        target = own if other == NOWHERE else other
    elif policy != STILL:
        nearer = distance(here, own, rule.size) - distance(here, other, rule.size)
        if nearer == 0:
            nearer = -1 if policy == GOOD or (policy == RANDOM_GREEDY and number // 64 % 2 == 0) else 1
        target = own if nearer < 0 else other
    return towards(m, a, target, avoid, number, rule, game)


class CoinGame(Batch):
    """The coin game on one size of torus. docs/games.md describes the rules and options; envs.make builds one."""

    policies = POLICIES
    team_reward = False
    ego_first = True
    hit_distance = 0.5  # cells: a predicted place is right if it is the very one

    def __init__(
        self,
        name,
        num_envs=1,
        n_agents=None,
        *,
        size=None,
        rules="jaxmarl",
        limit=None,
        payoffs=((1, 1, -2), (1, 1, -2)),
        patience=10,
        obs_last_action=False,
        **common,
    ):
        size = IDS[name] if size is None else size
        if rules not in tuple(LIMITS):
            raise ValueError(f"{name}: rules are one of {', '.join(LIMITS)}, not {rules!r}")
        limit = LIMITS[rules] if limit is None else limit
        batch.check_whole_number(f"{name}: size", size, 2, MOST_CELLS)
        for word, number in (("limit", limit), ("patience", patience)):
            batch.check_whole_number(f"{name}: {word}", number, 1, batch.MOST_STEPS)
        batch.check_flag(f"{name}: obs_last_action", obs_last_action)
        payoff = batch.number_table(payoffs, (2, 3))
        if payoff is None:
            numbers = f"numbers from {-batch.MOST_REWARD:g} to {batch.MOST_REWARD:g}"
            raise ValueError(
                f"{name}: payoffs are (own coin, other's, penalty) of both players, {numbers}, not {payoffs!r}"
            )
        self.return_scale = limit * payoff.abs().max().item() / 4 or 1.0
        self.size, self.actions_named = size, ACTIONS[: 4 if rules == "lola" else 5]
        cells = size * size
        self.ranges = {"player": (0, cells - 1), "coin": (NOWHERE, cells - 1), "since": (NEVER, limit),
                       "last": (NOWHERE, STAY), "taken": (0, limit)}  # fmt: skip
        whole, number = torch.int32, torch.float32
        simulation = dict.fromkeys(("player", "coin", "since", "last"), (whole, (num_envs, 2)))
        simulation |= {"taken": (whole, (num_envs, 2, 2)), "earned": (number, (num_envs, 2))}
        numbers = 4 * size * size
        sizes = len(self.actions_named), numbers + len(self.actions_named) * obs_last_action, numbers + 1, limit
        super().__init__(name, num_envs, ["player_0", "player_1"], sizes, simulation, **common)
        self._tables = {"payoff": payoff.to(self.device)}
        self.compile_rules(
            (reset_one, step_one, observe_one, act_one), Game, Rule, self.n_actions - 1, self._tables, lanes=8,
            size=size, lola=int(rules == "lola"), patience=patience, obs_last_action=int(obs_last_action),
        )  # fmt: skip

    def _about_others(self, column):
        return (column % 4 == 1) | (column >= 4 * self.size * self.size)

    def places(self, obs):
        """(row and column of the other player (..., 1, 2), whether it is there), read off observations."""
        highest, cell = obs[..., 1 : 4 * self.size * self.size : 4].max(-1, keepdim=True)
        return torch.stack((cell // self.size, cell % self.size), -1).to(obs.dtype), highest > 0.5

    def scene(self, index=0):
        """What a picture of one match shows, as plain numbers and words."""
        self._check_index(index)
        match, player, coin, last, earned = (
            self._simulation[key][index].tolist() for key in ("match", "player", "coin", "last", "earned")
        )
        return {
            "game": "hunt", "title": self.name, "step": match[STEP], "limit": self.episode_limit,
            "width": self.size, "height": self.size, "obstacles": [],
            "prey": [
                {"kind": f"coin_{owner}", "row": cell // self.size, "col": cell % self.size}
                for owner, cell in enumerate(coin) if cell != NOWHERE
            ],
            "hunters": [
                {"row": cell // self.size, "col": cell % self.size, "alive": True,
                 "action": ACTIONS[action] if action >= 0 else "", "return": income}
                for cell, action, income in zip(player, last, earned)
            ],
            "radius": None, "status": "running" if match[STAGE] == RUNNING else "time",
        }  # fmt: skip

"""Repeated matrix games: two players choose one of two actions again and again, and a table has what both earn.

One match is scalar code on arrays indexed by match m and player a. docs/games.md has the games and strategies.
"""

from collections import namedtuple

import numpy as np
import torch

from envs import batch
from envs.batch import EPISODE, KEY, RULE, RUNNING, STAGE, STEP, TENSORS, Batch
from envs.compiler import scalar, uniform

FIRST, SECOND = range(2)  # actions: cooperate, heads, stag, dove; defect, tails, hare, hawk
NONE = -1
# name: (names of the actions, payoffs of (row, column) for both actions of the row and the column player)
GAMES = {
    "matrix_ipd": (("C", "D"), (((-1, -1), (-3, 0)), ((0, -3), (-2, -2)))),
    "matrix_stag": (("stag", "hare"), (((4, 4), (0, 2)), ((2, 0), (2, 2)))),
    "matrix_chicken": (("dove", "hawk"), (((3, 3), (2, 5)), ((5, 2), (0, 0)))),
    "matrix_bos": (("Bach", "Strav."), (((3, 2), (0, 0)), ((0, 0), (2, 3)))),
    "matrix_pennies": (("heads", "tails"), (((1, -1), (-1, 1)), ((-1, 1), (1, -1)))),
}
MEMORY_ONE = {  # probability of the first action at the start and after CC, CD, DC, DD, the own action first
    "all_c": (1, 1, 1, 1, 1),
    "all_d": (0, 0, 0, 0, 0),
    "random": (0.5, 0.5, 0.5, 0.5, 0.5),
    "tft": (1, 1, 0, 1, 0),
    "suspicious_tft": (0, 1, 0, 1, 0),
    "wsls": (1, 1, 0, 0, 1),
    "grim": (1, 1, 0, 0, 0),
    "generous_tft": (1, 1, 1 / 3, 1, 1 / 3),
    "joss": (1, 0.9, 0, 0.9, 0),
    "soft_joss": (1, 1, 0.1, 1, 0.1),
    "grofman": (1, 1, 2 / 7, 2 / 7, 1),
    "stochastic_wsls": (1, 0.95, 0.05, 0.05, 0.95),
    "zd_extort": (1, 8 / 9, 1 / 2, 1 / 3, 0),
    "stochastic_cooperator": (1, 0.935, 0.229, 0.266, 0.42),
}
POLICIES = (*MEMORY_ONE, "two_tats", "hard_majority", "alternator", "periodic_ccd")
TWO_TATS, HARD_MAJORITY, ALTERNATOR, PERIODIC = range(len(MEMORY_ONE), len(POLICIES))

Rule = namedtuple("Rule", RULE)
Game = namedtuple("Game", (*TENSORS, "last", "streak", "times", "earned", "payoff", "strategy"))
# streak: how often a player has just chosen the second action in a row; times: how often in all


def exact_value(first, second, payoffs, gamma=0.96, steps=None):
    """(what the row player, what the column player earns a step) of two memory-one strategies, as in MEMORY_ONE.

    The mean over `steps` steps, or over a game without end, in which step t weighs gamma ** t.
    """
    p, q = np.array(first, float), np.array(second, float)[[0, 1, 3, 2, 4]]  # the column player's view, swapped
    joint = np.stack((p * q, p * (1 - q), (1 - p) * q, (1 - p) * (1 - q)), 1)  # (START and outcome, next outcome)
    chance, total, weights = joint[0], np.zeros(2), 0.0
    if steps is None:
        occupancy = (1 - gamma) * chance @ np.linalg.inv(np.eye(4) - gamma * joint[1:])
        return tuple(occupancy @ np.array(payoffs, float).reshape(4, 2))
    for t in range(steps):
        total, weights = total + gamma**t * chance @ np.array(payoffs, float).reshape(4, 2), weights + gamma**t
        chance = chance @ joint[1:]
    return tuple(total / weights)


# ---- the game ----
@scalar
def situation(m, a, game):
    """0 at the start; then 1 to 4: what both did last, the player's own action first."""
    if game.last[m, a] == NONE:
        return 0
    return 1 + 2 * game.last[m, a] + game.last[m, 1 - a]


@scalar
def reset_one(m, rule, game):
    for a in range(2):
        game.last[m, a], game.streak[m, a], game.times[m, a], game.earned[m, a] = NONE, 0, 0, 0


@scalar
def step_one(m, rule, game):
    for a in range(2):
        game.last[m, a] = SECOND if game.actions[m, a] == SECOND else FIRST
        game.times[m, a] += game.last[m, a]
        game.streak[m, a] = game.streak[m, a] + 1 if game.last[m, a] == SECOND else 0
    for a in range(2):
        game.reward[m, a] = game.payoff[game.last[m, 0], game.last[m, 1], a]
        game.earned[m, a] += game.reward[m, a]
    return False, False


@scalar
def observe_one(m, lane, lanes, rule, game):
    for column in range(lane, 10, lanes):
        a = column // 5
        game.obs[m, a, column % 5] = situation(m, a, game) == (column % 5 + 1) % 5  # CC, CD, DC, DD, START
    for column in range(lane, 5, lanes):
        game.state[m, column] = situation(m, 0, game) == (column + 1) % 5
    for a in range(lane, 2, lanes):
        game.alive[m, a] = game.avail[m, a, FIRST] = game.avail[m, a, SECOND] = True
    if lane == 0:
        game.state[m, 5] = np.float32(game.match[m, STEP]) / np.float32(rule.limit)


# ---- the strategies ----
@scalar
def act_one(m, a, policy, rule, game):
    step, other = game.match[m, STEP], 1 - a
    if not game.avail[m, a, SECOND]:
        return FIRST
    if policy == TWO_TATS:
        return SECOND if game.streak[m, other] >= 2 else FIRST
    if policy == HARD_MAJORITY:
        return SECOND if 2 * game.times[m, other] >= step else FIRST
    if policy == ALTERNATOR:
        return step % 2
    if policy == PERIODIC:
        return SECOND if step % 3 == 2 else FIRST
    number = uniform(game.match[m, KEY], game.match[m, EPISODE], step, a)
    return FIRST if number < game.strategy[policy, situation(m, a, game)] else SECOND


class MatrixGame(Batch):
    """A repeated matrix game. docs/games.md describes them; envs.make builds one."""

    policies = POLICIES
    team_reward = False

    def __init__(
        self,
        name,
        num_envs=1,
        n_agents=None,
        *,
        limit=100,
        payoffs=None,
        **common,
    ):
        batch.check_whole_number(f"{name}: limit", limit, 1, batch.MOST_STEPS)
        self.action_names, usual = GAMES[name]
        payoff = batch.number_table(usual if payoffs is None else payoffs, (2, 2, 2))
        if payoff is None:
            example = "[[(-1, -1), (-3, 0)], [(0, -3), (-2, -2)]]"
            numbers = f"numbers from {-batch.MOST_REWARD:g} to {batch.MOST_REWARD:g}"
            raise ValueError(f"{name}: payoffs are 2 x 2 pairs of {numbers}, such as {example}, not {payoffs!r}")
        self.payoffs, self.zero_sum = payoff.tolist(), not payoff.sum(-1).any()
        self.return_scale = limit * payoff.abs().max().item() / 2 or 1.0
        self.ranges = {"last": (NONE, SECOND), "streak": (0, limit), "times": (0, limit)}
        whole, number = torch.int32, torch.float32
        simulation = dict.fromkeys(("last", "streak", "times"), (whole, (num_envs, 2)))
        simulation["earned"] = (number, (num_envs, 2))
        super().__init__(name, num_envs, ["player_0", "player_1"], (2, 5, 6, limit), simulation, **common)
        tables = {"payoff": payoff, "strategy": torch.tensor(list(MEMORY_ONE.values()), dtype=number)}
        self._tables = {key: tensor.to(self.device) for key, tensor in tables.items()}
        self.compile_rules((reset_one, step_one, observe_one, act_one), Game, Rule, FIRST, self._tables, lanes=2)

    def scene(self, index=0):
        """What a picture of one match shows: the table, and beside it the row and the column chosen last."""
        self._check_index(index)
        match, last, earned = (self._simulation[key][index].tolist() for key in ("match", "last", "earned"))
        words = [[0, 1 + k, name] for k, name in enumerate(self.action_names)]
        words += [[1 + k, 0, name] for k, name in enumerate(self.action_names)]
        for row in range(2):
            for column in range(2):
                words.append([1 + row, 1 + column, ", ".join(f"{x:g}" for x in self.payoffs[row][column])])
        places = [(1 + last[0], 3), (3, 1 + last[1])] if last[0] != NONE else [(3, 3), (3, 3)]
        return {
            "game": "hunt", "title": self.name, "step": match[STEP], "limit": self.episode_limit,
            "width": 4, "height": 4, "obstacles": [], "prey": [], "words": words,
            "hunters": [
                {"row": row, "col": column, "alive": True, "action": "", "return": income}
                for (row, column), income in zip(places, earned)
            ],
            "radius": None, "status": "running" if match[STAGE] == RUNNING else "time",
        }  # fmt: skip

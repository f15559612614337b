"""Kuhn poker over many hands: two players, three cards, and an opponent whose habits show from hand to hand.

One match is scalar code on arrays indexed by match m and player a. docs/games.md has the rules in words.
"""

from collections import namedtuple

import numpy as np
import torch

from envs import batch
from envs.batch import EPISODE, KEY, RULE, RUNNING, STAGE, STEP, TENSORS, Batch
from envs.compiler import draw, scalar, uniform

WAIT, PASS, BET = range(3)
ACTIONS = ("wait", "pass", "bet")
CARDS = ("J", "Q", "K")
JACK, QUEEN, KING = range(3)
TURNS = 3  # of a hand at most
NONE = -1
FOR_DEAL, FOR_ACTION = range(2)  # what a random number is for

# A strategy is five probabilities: of betting with J, calling with Q and betting with K as the first player; of calling
# with Q and betting with J as the second. All other decisions have one sensible answer.
ALPHA, BETA, GAMMA, ETA, XI = range(5)
NEVER, ALWAYS = -1, -2
SEEN = ((0.0, 1.0), (0.67, 1.0), (1.0, 0.67), (0.0, 0.17), (1.0, 0.0), (0.17, 0.0))  # (eta, xi)
UNSEEN = ((0.45, 0.90), (0.10, 0.65), (0.85, 0.55), (0.12, 0.28), (0.75, 0.15), (0.25, 0.05))
TYPES = len(SEEN)
FIXED = {
    **{f"seen_{'abcdef'[k]}": (xi, eta, 1.0, eta, xi) for k, (eta, xi) in enumerate(SEEN)},
    **{f"unseen_{'abcdef'[k]}": (xi, eta, 1.0, eta, xi) for k, (eta, xi) in enumerate(UNSEEN)},
    "equilibrium": (1 / 3, 2 / 3, 1.0, 1 / 3, 1 / 3),
    "constant": (0.0, 1.0, 1.0, 1.0, 1.0),  # the best of those that do not adapt, against the seen ones
}
POLICIES = (*FIXED, "oracle", "bayes", "bayes_unseen", "counter", "random")
ORACLE, BAYES, BAYES_UNSEEN, COUNTER, RANDOM = range(len(FIXED), len(POLICIES))
DOUBT = 0.02  # how far from 0 and 1 the Bayes players keep the probabilities of a type
TIE = 1e-9  # a gain up to here is none

Rule = namedtuple("Rule", RULE)
Game = namedtuple(
    "Game",
    (*TENSORS, "card", "last_card", "bets", "last_bets", "turn", "hands", "earned", "counts", "strategy", "likely"),
)
# bets: the actions of a hand; last_: of the hand before; counts: by decision, how often a player bet and did not, as
# far as its cards were shown


# ---- the closed form ----
def value(alpha, beta, gamma, eta, xi):
    """What the first player earns a hand."""
    return (alpha * (1 - 3 * eta) + beta * (3 * xi - 1) + gamma * (eta - xi) - xi) / 6


def best_response(eta, xi):
    """(alpha, beta, gamma) of the first player against a second one."""
    return float(eta < 1 / 3), float(xi > 1 / 3), float(eta > xi)


# ---- a hand ----
@scalar
def deal(m, game):
    number = draw(game.match[m, KEY], game.match[m, EPISODE], game.hands[m], FOR_DEAL)
    game.card[m, 0] = number % 3
    game.card[m, 1] = (number % 3 + 1 + number // 3 % 2) % 3
    game.turn[m] = 0
    for turn in range(TURNS):
        game.bets[m, turn] = NONE


@scalar
def decision(card, turn, first_bet):
    """Which probability of its strategy a player goes by; NEVER or ALWAYS bets where it has no choice to speak of."""
    if turn == 0:
        return ALPHA if card == JACK else (GAMMA if card == KING else NEVER)
    if card == KING:
        return ALWAYS
    if turn == 2:
        return BETA if card == QUEEN else NEVER
    if first_bet:
        return ETA if card == QUEEN else NEVER
    return XI if card == JACK else NEVER


@scalar
def outcome(m, game):
    """(whether the hand is over, what the first player earns)"""
    turn, first, second, third = game.turn[m], game.bets[m, 0], game.bets[m, 1], game.bets[m, 2]
    sign = 1 if game.card[m, 0] > game.card[m, 1] else -1
    if turn < 2 or (turn == 2 and first == PASS and second == BET):
        return False, 0
    if first == BET:
        return True, 2 * sign if second == BET else 1
    if second == PASS:
        return True, sign
    return True, 2 * sign if third == BET else -1


@scalar
def step_one(m, rule, game):
    turn = game.turn[m]
    game.bets[m, turn] = BET if game.actions[m, turn % 2] == BET else PASS
    game.turn[m] = turn + 1
    over, gain = outcome(m, game)
    if over:
        for t in range(game.turn[m]):
            kind = decision(game.card[m, t % 2], t, game.bets[m, 0] == BET)
            if kind >= 0:
                game.counts[m, kind, int(game.bets[m, t] == BET)] += 1
        game.hands[m] += 1
        game.last_card[m, 0], game.last_card[m, 1] = game.card[m, 0], game.card[m, 1]
        for t in range(TURNS):
            game.last_bets[m, t] = game.bets[m, t]
        deal(m, game)
    game.reward[m, 0], game.reward[m, 1] = gain, -gain
    game.earned[m] += gain
    return False, game.earned[m] > 0


@scalar
def reset_one(m, rule, game):
    game.hands[m], game.earned[m] = 0, 0
    game.last_card[m, 0], game.last_card[m, 1] = NONE, NONE
    for t in range(TURNS):
        game.last_bets[m, t] = NONE
    for kind in range(5):
        game.counts[m, kind, 0], game.counts[m, kind, 1] = 0, 0
    deal(m, game)


# ---- what the players see ----
@scalar
def observe_one(m, lane, lanes, rule, game):
    turn = game.turn[m]
    for column in range(lane, 2 * rule.obs_dim, lanes):
        a, c = column // rule.obs_dim, column % rule.obs_dim
        if c < 2:
            shown = c == a
        elif c < 5:
            shown = game.card[m, a] == c - 2
        elif c < 11:
            shown = game.bets[m, (c - 5) // 2] == PASS + (c - 5) % 2
        elif c < 14:
            shown = turn == 0 and game.last_card[m, 1 - a] == c - 11
        else:
            shown = turn == 0 and game.last_bets[m, (c - 14) // 2] == PASS + (c - 14) % 2
        game.obs[m, a, c] = shown
    for column in range(lane, rule.state_dim - 1, lanes):
        if column < 6:
            held = game.card[m, column // 3] == column % 3
        elif column < 12:
            held = game.bets[m, (column - 6) // 2] == PASS + column % 2
        elif column < 18:
            held = game.last_card[m, (column - 12) // 3] == column % 3
        else:
            held = game.last_bets[m, (column - 18) // 2] == PASS + column % 2
        game.state[m, column] = held
    for a in range(lane, 2, lanes):
        game.alive[m, a] = True
        game.avail[m, a, WAIT] = a != turn % 2
        game.avail[m, a, PASS] = game.avail[m, a, BET] = a == turn % 2
    if lane == 0:
        game.state[m, rule.state_dim - 1] = np.float32(game.match[m, STEP]) / np.float32(rule.limit)


# ---- scripted players ----
@scalar
def gain_of_betting(kind, alpha, beta, gamma, eta, xi):
    """What a player gains by betting at a decision, up to a factor, against that strategy: see `value`."""
    if kind == ALPHA:
        return 1 - 3 * eta
    if kind == BETA:
        return 3 * xi - 1
    if kind == GAMMA:
        return eta - xi
    if kind == ETA:
        return 3 * alpha - gamma
    return gamma + 1 - 3 * beta


@scalar
def gain_against(kind, k, game):
    s = game.strategy
    return gain_of_betting(kind, s[k, ALPHA], s[k, BETA], s[k, GAMMA], s[k, ETA], s[k, XI])


@scalar
def frequency(m, kind, game):
    """How often that decision was a bet, counted from one of each."""
    bets, passes = game.counts[m, kind, 1], game.counts[m, kind, 0]
    return (bets + 1.0) / (bets + passes + 2.0)


@scalar
def expected_gain(m, a, kind, first, game):
    """The gain of betting over types `first` and on, weighted by how likely they make the hands so far."""
    total, weights = 0.0, 0.0
    for k in range(first, first + TYPES):
        weight = 1.0
        for other in range(5):
            if (other >= ETA) == (a == 0):  # a decision of the opponent's
                for _ in range(game.counts[m, other, 1]):
                    weight *= game.likely[k, other]
                for _ in range(game.counts[m, other, 0]):
                    weight *= 1.0 - game.likely[k, other]
        total += weight * gain_against(kind, k, game)
        weights += weight
    return total / weights if weights > 0 else 0.0


@scalar
def act_one(m, a, policy, rule, game):
    if not game.avail[m, a, BET]:
        return WAIT
    number = uniform(game.match[m, KEY], game.match[m, EPISODE], game.match[m, STEP], FOR_ACTION)
    kind = decision(game.card[m, a], game.turn[m], game.bets[m, 0] == BET)
    if policy == RANDOM:
        return BET if number < np.float32(0.5) else PASS
    if kind < 0:
        return BET if kind == ALWAYS else PASS
    if policy < ORACLE:
        return BET if number < game.strategy[policy, kind] else PASS
    if policy == ORACLE:
        told = game.policy[m, 1 - a]
        gain = gain_against(kind, told if told < ORACLE else 2 * TYPES, game)  # adaptive ones: as the equilibrium
    elif policy == COUNTER:
        gain = gain_of_betting(
            kind, frequency(m, ALPHA, game), frequency(m, BETA, game), frequency(m, GAMMA, game),
            frequency(m, ETA, game), frequency(m, XI, game),
        )  # fmt: skip
    else:
        gain = expected_gain(m, a, kind, 0 if policy == BAYES else TYPES, game)
    return BET if gain > TIE else PASS


class Kuhn(Batch):
    """Hands of Kuhn poker. docs/games.md describes the rules and the players; envs.make builds one."""

    policies = POLICIES
    default_others = POLICIES[:TYPES]
    team_reward = False
    zero_sum = True
    sides = (0, 1)  # the first player is the learner's seat

    def __init__(self, name, num_envs=1, n_agents=None, *, limit=100, **common):
        batch.check_whole_number(f"{name}: limit", limit, 1, batch.MOST_STEPS)
        self.return_scale, whole = 0.15 * limit, torch.int32
        self.ranges = {"card": (JACK, KING), "last_card": (NONE, KING), "bets": (NONE, BET),
                       "last_bets": (NONE, BET), "turn": (0, TURNS - 1),
                       "hands": (0, limit), "counts": (0, limit), "earned": (-2 * limit, 2 * limit)}  # fmt: skip
        super().__init__(
            name, num_envs, ["player_0", "player_1"], (len(ACTIONS), 20, 25, limit),
            {"card": (whole, (num_envs, 2)), "last_card": (whole, (num_envs, 2)), "bets": (whole, (num_envs, TURNS)),
             "last_bets": (whole, (num_envs, TURNS)),
             "turn": (whole, (num_envs,)), "hands": (whole, (num_envs,)), "earned": (whole, (num_envs,)),
             "counts": (whole, (num_envs, 5, 2))}, **common,
        )  # fmt: skip
        strategy = torch.tensor(list(FIXED.values()), dtype=torch.float64)
        tables = {"strategy": strategy, "likely": strategy.clamp(DOUBT, 1 - DOUBT)}
        self._tables = {key: tensor.to(self.device) for key, tensor in tables.items()}
        self.compile_rules((reset_one, step_one, observe_one, act_one), Game, Rule, WAIT, self._tables, lanes=8)

    def scene(self, index=0):
        """What a picture of one match shows: a row for each player, with card and actions."""
        self._check_index(index)
        match, card, bets, last = (
            self._simulation[key][index].tolist() for key in ("match", "card", "bets", "last_card")
        )
        earned, hands = (int(self._simulation[key][index]) for key in ("earned", "hands"))
        words = [[a, 1, CARDS[card[a]]] for a in range(2)]
        words += [[t % 2, 2 + t, ACTIONS[bet]] for t, bet in enumerate(bets) if bet != NONE]
        words += [[a, 5, f"last {CARDS[last[a]]}"] for a in range(2) if last[a] != NONE]
        return {
            "game": "hunt", "title": f"{self.name}, hand {hands + 1}", "step": match[STEP], "limit": self.episode_limit,
            "width": 6, "height": 2, "obstacles": [], "prey": [], "words": words,
            "hunters": [
                {"row": a, "col": 0, "alive": True, "action": "", "return": float(earned if a == 0 else -earned)}
                for a in range(2)
            ],
            "radius": None, "status": "running" if match[STAGE] == RUNNING else "time",
        }  # fmt: skip

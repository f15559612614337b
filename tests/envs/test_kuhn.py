"""Kuhn poker: its rules against a plain restatement, its closed form against enumeration, its players' earnings."""

import itertools

import numpy as np
import pytest
import torch

import envs
import envs.gym
from envs.kuhn import FIXED, SEEN, UNSEEN, best_response, value

WAIT, PASS, BET = range(3)
MATCHES = 1500  # against each of six opponents
CORNERS = list(itertools.product((0.0, 1.0), repeat=3))
THIRD = np.linspace(0, 1, 13)


# ---- the closed form, by enumeration ----
def hands(first, second):
    """(probability, actions, what the first player earns) of all that can happen in a hand."""
    (alpha, beta, gamma), (eta, xi) = first, second
    for mine, yours in itertools.permutations(range(3), 2):
        sign = 1 if mine > yours else -1
        bet = (alpha, 0, gamma)[mine]
        call_later = (0, beta, 1)[mine]
        call, bet_after_check = (0, eta, 1)[yours], (xi, 0, 1)[yours]
        for chance, actions, gain in (
            (bet * call, 2, 2 * sign),
            (bet * (1 - call), 2, 1),
            ((1 - bet) * (1 - bet_after_check), 2, sign),
            ((1 - bet) * bet_after_check * call_later, 3, 2 * sign),
            ((1 - bet) * bet_after_check * (1 - call_later), 3, -1),
        ):
            yield chance / 6, actions, gain


def per_hand(first, second):
    return sum(chance * gain for chance, _, gain in hands(first, second))


def per_episode(first, second, turns=100):
    """The exact mean return of an episode; a hand that is not finished counts nothing."""
    means, all_hands = [0.0], list(hands(first, second))
    for left in range(1, turns + 1):
        means.append(sum(c * (gain + means[left - actions]) for c, actions, gain in all_hands if actions <= left))
    return means[-1]


def test_closed_form_equals_enumeration():
    chance = np.random.default_rng(0)
    for numbers in [*itertools.product((0, 1), repeat=5), *chance.random((50, 5))]:
        assert value(*numbers) == pytest.approx(per_hand(numbers[:3], numbers[3:]))


@pytest.mark.parametrize("alpha", [0, 0.1, 0.25, 1 / 3])
def test_the_equilibrium_earns_the_same_against_everybody(alpha):
    for eta, xi in itertools.product(THIRD, THIRD):
        assert value(alpha, alpha + 1 / 3, 3 * alpha, eta, xi) == pytest.approx(-1 / 18)


def test_nobody_beats_the_equilibrium():
    assert max(value(*corner, 1 / 3, 1 / 3) for corner in CORNERS) == pytest.approx(-1 / 18)


def test_the_best_response_is_the_best():
    for eta, xi in itertools.product(THIRD, THIRD):
        assert value(*best_response(eta, xi), eta, xi) == pytest.approx(max(value(*c, eta, xi) for c in CORNERS))
    assert best_response(0.2, 0.3) == (1, 0, 0)


# ---- the rules ----
class Table:
    """A match in plain Python. It takes the cards as they are dealt."""

    def __init__(self):
        self.bets, self.card, self.last, self.last_bets = [], None, (None, None), []

    def play(self, action):
        """What the first player earns."""
        self.bets.append("b" if action == BET else "p")
        story, sign = "".join(self.bets), 1 if self.card[0] > self.card[1] else -1
        gain = {"pp": sign, "bb": 2 * sign, "bp": 1, "pbp": -1, "pbb": 2 * sign}.get(story)
        if gain is not None:
            self.bets, self.last, self.last_bets = [], self.card, self.bets
        return gain or 0

    def seen_by(self, a):
        def card(number):
            return [float(number == c) for c in range(3)]

        def actions(bets):
            return [float(bet == kind) for bet in [*bets, "", "", ""][:3] for kind in "pb"]

        last = [0.0] * 9 if self.bets else [*card(self.last[1 - a]), *actions(self.last_bets)]
        return [float(a == 0), float(a == 1), *card(self.card[a]), *actions(self.bets), *last]


def test_a_plain_restatement_plays_and_sees_the_same():
    env = envs.make("kuhn", num_envs=32, check=False)
    obs, info = env.reset(seed=1)
    tables, chance = [Table() for _ in range(32)], np.random.default_rng(0)
    earned = np.zeros(32)
    for step in range(100):
        for m, (table, cards) in enumerate(zip(tables, env.snapshot()["card"].tolist())):
            assert len(set(cards)) == 2 and (not table.bets or table.card == cards)
            table.card = cards
            mover = len(table.bets) % 2
            assert obs[m].tolist() == [table.seen_by(0), table.seen_by(1)]
            assert info["avail"][m].tolist() == [[a != mover, a == mover, a == mover] for a in (0, 1)]
            assert info["state"][m, :3].argmax() == cards[0] and info["state"][m, 3:6].argmax() == cards[1]
            assert info["state"][m, 6:12].tolist() == obs[m, 0, 5:11].tolist()
            if not table.bets:  # how the last hand was played
                assert info["state"][m, 18:24].tolist() == obs[m, 0, 14:].tolist()
        assert (info["state"][:, -1] == np.float32(step) / np.float32(100)).all() and info["alive"].all()
        actions = chance.integers(-1, 4, (32, 2))  # anything but a bet is a pass
        obs, reward, terminated, truncated, info = env.step(actions)
        for m, table in enumerate(tables):
            gain = table.play(actions[m, len(table.bets) % 2])
            earned[m] += gain
            assert reward[m].tolist() == [gain, -gain]
        assert not terminated.any() and truncated.all() == (step == 99)
    assert info["won"].tolist() == (earned > 0).tolist()
    assert 0 < (earned > 0).sum() < 32


def test_whether_a_bet_was_called_is_seen():
    """The hand ends with the answer to a bet, and the next one is dealt in the same step."""
    env = envs.make("kuhn", num_envs=2)
    env.reset(seed=0)
    env.step([[BET, WAIT], [BET, WAIT]])
    obs, *_ = env.step([[WAIT, BET], [WAIT, PASS]])
    for a in (0, 1):
        assert obs[:, a, 14:].tolist() == [[0, 1, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0]]


@pytest.mark.slow
def test_cards_are_dealt_evenly():
    env = envs.make("kuhn", num_envs=6000)
    env.reset()
    card = env.snapshot()["card"]
    counts = (card[:, 0] * 3 + card[:, 1]).bincount(minlength=9)
    assert counts[[0, 4, 8]].sum() == 0
    assert ((counts[[1, 2, 3, 5, 6, 7]] - 1000) ** 2 / 1000).sum() < 30


def test_checked_mode_refuses_a_bet_out_of_turn():
    env = envs.make("kuhn", check=True)
    env.reset()
    with pytest.raises(ValueError, match=r"agent 1 \(player_1\): action 2 is not available, only \[0\]"):
        env.step([[PASS, BET]])


@pytest.mark.parametrize("limit", [0, 2.5, True])
def test_an_invalid_limit_is_refused(limit):
    with pytest.raises(ValueError, match="limit is a whole number from 1 to 100000"):
        envs.make("kuhn", limit=limit)


# ---- the players ----
@pytest.fixture(scope="module")
def earned():
    """earned(ego, pool) -> (6, MATCHES): what the first player earns in episodes with each of the six opponents."""
    env, made = envs.make("kuhn", num_envs=6 * MATCHES, check=False), {}

    def get(ego, pool="seen", seat=0):
        if (ego, pool, seat) not in made:
            policy = torch.full((6 * MATCHES, 2), env.policies.index(ego))
            others = torch.tensor([env.policies.index(f"{pool}_{letter}") for letter in "abcdef"])
            policy[:, 1 - seat] = others.repeat_interleave(MATCHES)
            env.reset(seed=1)
            total = torch.zeros(6 * MATCHES)
            for _ in range(100):
                total += env.step(env.scripted_actions(policy))[1][:, seat]
            hands_played = env.snapshot()["hands"]
            assert hands_played.min() >= 33 and hands_played.max() <= 50
            made[ego, pool, seat] = total.view(6, MATCHES)
        return made[ego, pool, seat]

    return get


def assert_close(samples, exact):
    """Of each row, within four standard errors."""
    means, errors = samples.mean(1), samples.std(1) / samples.shape[1] ** 0.5
    assert ((means - torch.tensor(exact)).abs() < 4 * errors).all(), (means, exact)


@pytest.mark.parametrize(("pool", "opponents", "mean"), [("seen", SEEN, 7.11), ("unseen", UNSEEN, 4.00)])
def test_an_oracle_earns_what_the_closed_form_says(earned, pool, opponents, mean):
    exact = [per_episode(best_response(*opponent), opponent) for opponent in opponents]
    assert sum(exact) / 6 == pytest.approx(mean, abs=0.01)
    assert_close(earned("oracle", pool), exact)
    assert earned("oracle", pool).mean() == pytest.approx(mean, abs=0.2)


@pytest.mark.parametrize("ego", ["constant", "equilibrium"])
@pytest.mark.parametrize(("pool", "opponents"), [("seen", SEEN), ("unseen", UNSEEN)])
def test_fixed_strategies_earn_what_the_closed_form_says(earned, ego, pool, opponents):
    assert_close(earned(ego, pool), [per_episode(FIXED[ego][:3], opponent) for opponent in opponents])


def test_a_strategy_that_does_not_adapt_earns_nothing():
    means = [sum(per_episode(corner, opponent) for opponent in SEEN) / 6 for corner in CORNERS]
    assert max(means) == pytest.approx(-0.31, abs=0.01)
    assert CORNERS[int(np.argmax(means))] == FIXED["constant"][:3]


@pytest.mark.parametrize(
    ("ego", "pool", "mean"), [("bayes", "seen", 4.9), ("bayes_unseen", "unseen", 1.8), ("counter", "seen", 3.9)]
)
def test_players_who_learn_their_opponent_earn_in_between(earned, ego, pool, mean):
    assert earned(ego, pool).mean() == pytest.approx(mean, abs=0.25)
    assert earned("constant", pool).mean() < earned(ego, pool).mean() < earned("oracle", pool).mean()


@pytest.mark.slow
def test_the_second_seat_has_an_oracle_too(earned):
    def best_of(first):
        return max(-per_episode(first, second) for second in itertools.product((0.0, 1.0), repeat=2))

    opponents = [FIXED[f"seen_{letter}"][:3] for letter in "abcdef"]
    assert_close(earned("oracle", "seen", 1), [best_of(first) for first in opponents])
    assert earned("bayes", "seen", 1).mean() < earned("oracle", "seen", 1).mean()


def test_a_bayes_player_starts_every_match_anew():
    env = envs.make("kuhn", num_envs=64)
    env.reset()
    for _ in range(30):
        env.step(env.scripted_actions("bayes"))
    assert env.snapshot()["counts"].any()
    env.reset()
    assert not env.snapshot()["counts"].any()


def test_the_seen_six_are_the_others_by_default():
    env = envs.gym.OneLearnerVector("kuhn", num_envs=64)
    env.reset(seed=0)
    assert {env._matches.batch.policies[p] for p in env._matches.policy[:, 1].tolist()} == set(list(FIXED)[:6])


def test_scene():
    env = envs.make("kuhn", limit=3)
    env.reset(seed=0)
    env.step([[BET, WAIT]])
    scene = env.scene()
    assert [0, 2, "bet"] in scene["words"] and len(scene["words"]) == 3 and scene["status"] == "running"
    env.step([[WAIT, PASS]])
    scene = env.scene()
    assert scene["title"] == "kuhn, hand 2" and [hunter["return"] for hunter in scene["hunters"]] == [1, -1]
    assert len(scene["words"]) == 4  # two cards, and the two of the hand before
    env.step([[PASS, WAIT]])
    assert env.scene()["status"] == "time" and env.render().shape[1] == 480

"""The small games: repeated matrix games, coin game and snowdrift against plain restatements; what all of them keep."""

import itertools

import numpy as np
import pytest
import torch

import envs
from envs.matrix_games import GAMES, MEMORY_ONE, exact_value

COPIES = 8
SMALL = {  # id -> options, one of each program
    "kuhn": {"limit": 12},
    "matrix_ipd": {"limit": 9},
    "coin_game": {"limit": 9},
    "snowdrift_4x4": {"limit": 12, "n_agents": 3, "drifts": 4},
}
EVERY_GAME = pytest.mark.parametrize("name", SMALL)


def make(name, num_envs=COPIES, **options):
    return envs.make(name, num_envs, **{**SMALL[name], **options})


def drawn_policies(env, seed=0):
    shape = env.num_envs, env.n_agents
    return torch.randint(len(env.policies), shape, generator=torch.Generator().manual_seed(seed))


def played(env, policy, steps=None):
    """(steps, matches, agents) rewards under scripted policies, and the last info."""
    _, info = env.reset()
    rewards = [env.step(env.scripted_actions(policy))[1].clone() for _ in range(steps or env.episode_limit)]
    return torch.stack(rewards), info


def roles(env, *names):
    return torch.tensor([env.policies.index(name) for name in names]).repeat(env.num_envs, 1)


# ---- what all of them keep ----
@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("kuhn", "turn", 3), ("matrix_ipd", "last", 2), ("coin_game", "player", 9), ("snowdrift_4x4", "player", -1)],
)
def test_a_snapshot_out_of_range_is_refused(name, key, value):
    env = make(name)
    env.reset()
    snapshot = env.snapshot()
    snapshot[key][3] = value
    with pytest.raises(ValueError, match=rf"{key}\[3.* is {value}, which is not a number from"):
        env.restore(snapshot)


# ---- repeated matrix games ----
@pytest.mark.parametrize("name", GAMES)
def test_matrix_games_pay_by_their_table_and_show_the_last_actions(name):
    env = envs.make(name, COPIES, limit=20, check=False)
    names, payoffs = GAMES[name]
    obs, info = env.reset()
    assert obs[0].tolist() == [[0, 0, 0, 0, 1]] * 2 and info["avail"].all()
    chance, earned = np.random.default_rng(0), np.zeros((COPIES, 2))
    for step in range(1, 21):
        actions = chance.integers(-1, 3, (COPIES, 2))  # anything but 1 is 0
        obs, reward, terminated, truncated, info = env.step(actions)
        for m, (row, column) in enumerate((actions == 1).astype(int)):
            earned[m] += payoffs[row][column]
            assert reward[m].tolist() == list(payoffs[row][column])
            assert obs[m, 0].argmax() == 2 * row + column and obs[m, 1].argmax() == 2 * column + row
            assert info["state"][m].tolist() == [*obs[m, 0].tolist(), float(np.float32(step) / np.float32(20))]
        assert (obs.sum(-1) == 1).all()
        assert not terminated.any() and truncated.all() == (step == 20) and not info["won"].any()
    assert env.scene()["hunters"][0]["return"] == earned[0, 0] and env.scene()["words"][0][2] == names[0]
    assert env.zero_sum == (name == "matrix_pennies") and not env.team_reward


@pytest.mark.parametrize(
    "name",
    [name if name in ("matrix_ipd", "matrix_bos") else pytest.param(name, marks=pytest.mark.slow) for name in GAMES],
)
def test_memory_one_strategies_earn_what_the_exact_solution_says(name):
    """All pairs: discounted means of simulated games and of the Markov chain of the two strategies."""
    pairs, copies, gamma, steps = list(itertools.product(MEMORY_ONE, repeat=2)), 60, 0.96, 100
    env = envs.make(name, len(pairs) * copies, check=False)
    policy = torch.tensor([[env.policies.index(player) for player in pair] for pair in pairs])
    rewards, _ = played(env, policy.repeat_interleave(copies, 0), steps)
    weights = gamma ** torch.arange(steps).double()
    means = torch.einsum("t,tma->ma", weights / weights.sum(), rewards.double()).view(len(pairs), copies, 2)
    errors = means.std(1) / copies**0.5
    for k, (one, other) in enumerate(pairs):
        exact = exact_value(MEMORY_ONE[one], MEMORY_ONE[other], GAMES[name][1], gamma, steps)
        difference = (means[k].mean(0) - torch.tensor(exact)).abs()
        assert (difference <= 4.5 * errors[k] + 1e-5).all(), (one, other, means[k].mean(0), exact)


def test_the_exact_solution_of_the_game_without_end():
    payoffs = GAMES["matrix_ipd"][1]
    value = {
        pair: exact_value(*(MEMORY_ONE[name] for name in pair), payoffs)
        for pair in itertools.product(MEMORY_ONE, repeat=2)
    }
    assert value["tft", "tft"] == pytest.approx((-1, -1)) and value["all_d", "all_c"] == pytest.approx((0, -3))
    assert value["random", "random"] == pytest.approx((-1.5, -1.5))
    assert value["tft", "all_d"] == pytest.approx((0.04 * -3 + 0.96 * -2, 0.96 * -2))
    for (one, other), numbers in value.items():
        assert value[other, one] == pytest.approx(numbers[::-1])  # the game is symmetric
    for one in ("grofman", "zd_extort", "wsls"):
        finite = exact_value(MEMORY_ONE[one], MEMORY_ONE["joss"], payoffs, 0.96, 500)
        assert finite == pytest.approx(value[one, "joss"])


def test_strategies_with_a_longer_memory():
    env = envs.make("matrix_ipd", COPIES, limit=30)
    chance = np.random.default_rng(1)
    row = chance.integers(0, 2, (30, COPIES))
    env.reset()
    for step in range(30):
        for name in ("two_tats", "hard_majority", "alternator", "periodic_ccd"):
            action = env.scripted_actions(name)[:, 1].tolist()
            for m in range(COPIES):
                seen = row[:step, m]
                assert (
                    action[m]
                    == {
                        "two_tats": int(step >= 2 and seen[-2:].sum() == 2),
                        "hard_majority": int(seen.sum() >= step - seen.sum()),
                        "alternator": step % 2,
                        "periodic_ccd": int(step % 3 == 2),
                    }[name]
                )
        env.step(np.stack((row[step], row[step]), 1))


def test_a_matrix_of_ones_own():
    table = [[(1, 2), (3, 4)], [(5, 6), (7, 8)]]
    env = envs.make("matrix_ipd", COPIES, payoffs=table)
    env.reset()
    assert env.step([[1, 0]] * COPIES)[1][0].tolist() == [5, 6] and not env.zero_sum
    assert envs.make("matrix_ipd", payoffs=[[(1, -1), (0, 0)], [(2, -2), (3, -3)]]).zero_sum
    for wrong in ([[1, 2], [3, 4]], [[(1, 2), (3, 4)]], "CD", [[(1, 2), (3, float("nan"))], [(5, 6), (7, 8)]], 3):
        with pytest.raises(ValueError, match=r"matrix_ipd: payoffs are 2 x 2 pairs of numbers from -1e\+06 to 1e\+06"):
            envs.make("matrix_ipd", payoffs=wrong)
    with pytest.raises(ValueError, match="limit is a whole number from 1 to 100000, not 0"):
        envs.make("matrix_bos", limit=0)


# ---- coin game ----
MOVES = {0: (0, 1), 1: (0, -1), 2: (1, 0), 3: (-1, 0)}
COIN_GAMES = [("coin_game", "jaxmarl"), ("coin_game", "lola"), ("coin_game_5x5", "jaxmarl"), ("coin_game_5x5", "lola")]


class Torus:
    """A match of a batch as it stands, in rows and columns."""

    def __init__(self, size, players, coins):
        self.size = size
        self.players, self.coins = (
            [None if cell < 0 else divmod(cell, size) for cell in cells] for cells in (players, coins)
        )

    def after(self, actions):
        """(players, rewards, which coins are taken) after a step."""
        players, rewards, taken = [], [0, 0], [False, False]
        for (row, column), action in zip(self.players, actions):
            down, right = MOVES.get(action, (0, 0))
            players.append(((row + down) % self.size, (column + right) % self.size))
        for owner, coin in enumerate(self.coins):
            for a, place in enumerate(players):
                if place == coin:
                    taken[owner] = True
                    rewards[a] += 1
                    if a != owner:
                        rewards[owner] -= 2
        return players, rewards, taken

    def seen_by(self, a):
        planes = np.zeros((self.size, self.size, 4), np.float32)
        for plane, place in enumerate((self.players[a], self.players[1 - a], self.coins[a], self.coins[1 - a])):
            if place is not None:
                planes[(*place, plane)] = 1
        return planes.ravel()


def tori(env):
    snapshot = env.snapshot()
    return [Torus(env.size, *cells) for cells in zip(snapshot["player"].tolist(), snapshot["coin"].tolist())]


@pytest.mark.parametrize(("name", "rules"), COIN_GAMES)
def test_a_plain_restatement_plays_the_coin_game(name, rules):
    env = envs.make(name, 24, rules=rules, check=False, seed=4, limit=25)
    obs, info = env.reset()
    lola, chance, ties, takes = rules == "lola", np.random.default_rng(0), 0, 0
    assert env.n_actions == (4 if lola else 5)
    assert envs.make(name, rules=rules).episode_limit == (150 if lola else 100)
    for step in range(env.episode_limit):
        before = tori(env)
        places, visible = env.places(obs)
        for m, torus in enumerate(before):
            for a in range(2):
                np.testing.assert_array_equal(obs[m, a], torus.seen_by(a))
                assert places[m, a].tolist() == [list(torus.players[1 - a])] and visible.all()
            np.testing.assert_array_equal(info["state"][m], [*torus.seen_by(0), np.float32(step / env.episode_limit)])
        actions = chance.integers(0, env.n_actions + 1, (24, 2))  # one too many: stay
        obs, reward, terminated, truncated, info = env.step(actions)
        for m, (torus, now) in enumerate(zip(before, tori(env))):
            players, rewards, taken = torus.after([4 if action == env.n_actions else action for action in actions[m]])
            assert now.players == players and reward[m].tolist() == rewards
            takes += sum(taken)
            ties += any(taken) and players[0] == players[1]
            if lola:
                owner = 1 - torus.coins.index(None)
                assert now.coins[owner] == (None if taken[owner] else torus.coins[owner])
                assert (now.coins[1 - owner] is None) != taken[owner]
                assert not taken[owner] or now.coins[1 - owner] not in players
            else:
                assert all(now.coins[c] == torus.coins[c] for c in range(2) if not taken[c])
                assert None not in now.coins
        assert not terminated.any() and truncated.all() == (step + 1 == env.episode_limit)
    assert takes > 20 and (ties > 0 or name == "coin_game_5x5")


@pytest.mark.parametrize(("name", "rules"), COIN_GAMES)
@pytest.mark.slow
def test_starts_are_even(name, rules):
    env = envs.make(name, 4000, rules=rules)
    env.reset()
    player, coin = (env.snapshot()[key] for key in ("player", "coin"))
    cells = env.size**2
    for places in (*player.unbind(1), *coin.unbind(1)):
        places = places[places >= 0]
        expected = len(places) / cells
        assert ((places.bincount(minlength=cells) - expected) ** 2 / expected).sum() < cells + 7 * cells**0.5
    if rules == "lola":
        assert ((coin >= 0).sum(1) == 1).all() and 0.45 < (coin[:, 0] >= 0).float().mean() < 0.55
        assert (player[:, 0] != player[:, 1]).all() and (coin.max(1).values.unsqueeze(1) != player).all()
    else:
        assert abs((player[:, 0] == player[:, 1]).float().mean() - 1 / cells) < 0.03


@pytest.mark.slow
def test_what_pairs_of_players_earn_on_the_coin_game():
    env = envs.make("coin_game", 2000, check=False)
    steps = env.episode_limit

    def means(*names):
        return (played(env, roles(env, *names))[0].sum(0).mean(0) / steps).tolist()

    assert means("random", "random") == pytest.approx([0, 0], abs=0.02)
    assert means("random_greedy", "random_greedy") == pytest.approx([0, 0], abs=0.03)
    good = means("own_only", "own_only")
    assert good[0] == pytest.approx(good[1], abs=0.02) and good[0] > 0.3
    victim, robber = means("own_only", "evil_greedy")
    assert victim < 0 < good[0] < robber
    assert means("reciprocator", "own_only") == pytest.approx(good, abs=0.02)
    assert means("reciprocator", "evil_greedy")[1] < good[1] - 0.2, "sharing with it pays more than taking all"


@pytest.mark.parametrize("rules", ["jaxmarl", "lola"])
def test_own_only_harms_nobody_and_spite_takes_the_others_coins_first(rules):
    env = envs.make("coin_game_5x5", 200, rules=rules, check=False)
    played(env, roles(env, "own_only", "random"))
    snapshot = env.snapshot()
    assert snapshot["taken"][:, 0, 0].float().mean() > 3
    assert (snapshot["since"][:, 1] == -1).all(), "only where both coins lay on one cell"
    assert (snapshot["taken"][:, 0, 1].sum() > 0) == (rules == "jaxmarl")
    played(env, roles(env, "other_first", "random"))
    taken = env.snapshot()["taken"][:, 0].sum(0)
    assert taken[1] > (taken[0] if rules == "lola" else 5 * taken[0]) * 0.9


def test_grim_and_reciprocator_remember():
    env = envs.make("coin_game_5x5", COPIES, patience=3)
    env.reset()
    snapshot = env.snapshot()

    def placed(since):
        """The other's coin is to the right, the own one two cells up."""
        snapshot["player"][:] = torch.tensor([0, 12])
        snapshot["coin"][:] = torch.tensor([15, 1])
        snapshot["since"][:] = since
        env.restore(snapshot)
        return [env.scripted_actions(name)[0, 0].item() for name in ("reciprocator", "grim")]

    right, up, stay = 0, 3, 4
    assert placed(-1) == [up, up] and placed(2) == [right, right] and placed(3) == [up, right]
    env.step([[stay, right]] * COPIES)
    assert env.snapshot()["since"][0].tolist() == [4, 4]
    snapshot["player"][:] = torch.tensor([0, 14])
    snapshot["since"][:] = -1
    env.restore(snapshot)
    env.step([[stay, 2]] * COPIES)  # from the edge down and round: not yet
    assert env.snapshot()["since"][0].tolist() == [-1, -1]
    snapshot["player"][:] = torch.tensor([0, 19])
    env.restore(snapshot)
    env.step([[stay, right]] * COPIES)  # round the edge to the other's coin
    assert env.snapshot()["since"][0].tolist() == [0, -1] and env.scripted_actions("grim").shape == (COPIES, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": "pax"}, "rules are one of jaxmarl, lola, not 'pax'"),
        ({"size": 1}, "size is a whole number from 2 to 16, not 1"),
        ({"patience": 0}, "patience is a whole number from 1 to 100000, not 0"),
        ({"limit": 1.5}, "limit is a whole number from 1 to 100000, not 1.5"),
        ({"payoffs": [[1, 1], [1, 1]]}, "payoffs are"),
    ],
)
def test_what_the_coin_game_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        envs.make("coin_game", **options)


def test_payoffs_of_the_coin_game():
    env = envs.make("coin_game", COPIES, payoffs=((5, 7, -3), (11, 13, -17)))
    env.reset()
    snapshot = env.snapshot()
    snapshot["player"][:], snapshot["coin"][:] = torch.tensor([0, 4]), torch.tensor([4, 0])
    env.restore(snapshot)
    assert env.step([[4, 4]] * COPIES)[1][0].tolist() == [7 - 3, 13 - 17]
    env.restore(snapshot | {"coin": torch.tensor([[4, 4]] * COPIES, dtype=torch.int32)})
    assert env.step([[4, 4]] * COPIES)[1][0].tolist() == [-3, 13 + 11]


# ---- snowdrift ----
GRID_MOVES = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1)}


@pytest.mark.parametrize(("name", "options"), [("snowdrift", {}), ("snowdrift_4x4", {"n_agents": 3, "gain": 5.0})])
def test_a_plain_restatement_plays_snowdrift(name, options):
    env = envs.make(name, COPIES, check=False, seed=2, **options)
    obs, info = env.reset()
    n, size, gain = env.n_agents, env.size, options.get("gain", 6.0)
    chance, running, together = np.random.default_rng(0), range(COPIES), 0
    drifts = env.snapshot()["drift"].view(COPIES, size, size).numpy().copy()
    players = [[divmod(cell, size) for cell in row] for row in env.snapshot()["player"].tolist()]
    assert (drifts.sum((1, 2)) == 6).all()
    for step in range(env.episode_limit):
        for m in running:
            for a in range(n):
                planes = np.zeros((size, size, n + 2), np.float32)
                for k in range(n):
                    planes[(*players[m][(a + k) % n], k)] = 1
                planes[..., n + 1] = drifts[m]
                np.testing.assert_array_equal(obs[m, a], planes.ravel())
                assert info["avail"][m, a].tolist() == [True] * 5 + [drifts[m][players[m][a]] == 1]
                if a == 0:
                    state = [*planes.ravel(), np.float32(step) / np.float32(env.episode_limit)]
                    np.testing.assert_array_equal(info["state"][m], state)
        places, visible = env.places(obs)
        scripted = env.scripted_actions("ND").numpy()
        actions = np.where(chance.random(scripted.shape) < 0.5, scripted, chance.integers(-1, 7, scripted.shape))
        obs, reward, terminated, _, info = env.step(actions)
        for m in running:
            assert places[m, 0].tolist() == [list(place) for place in players[m][1:]] and visible[m].all()
            removers = {}
            for a, place in enumerate(players[m]):
                if actions[m, a] == 5 and drifts[m][place]:
                    removers.setdefault(place, []).append(a)
            together += sum(len(who) > 1 for who in removers.values())
            earned = [gain * len(removers)] * n
            for place, who in removers.items():
                drifts[m][place] = 0
                for a in who:
                    earned[a] -= 4 / len(who)
            for a, (row, column) in enumerate(players[m]):
                down, right = GRID_MOVES.get(actions[m, a], (0, 0))
                players[m][a] = min(max(row + down, 0), size - 1), min(max(column + right, 0), size - 1)
            assert reward[m].tolist() == pytest.approx(earned)
            assert terminated[m] == info["won"][m] == (drifts[m].sum() == 0)
        running = [m for m in running if not terminated[m]]
    assert together > 0 and len(running) < COPIES


@pytest.mark.parametrize(
    ("names", "low", "high"),
    [
        ("ND ND ND ND", [30] * 4, [30] * 4),
        ("ND FIX FIX FIX", [12, 36, 36, 36], [12, 36, 36, 36]),
        ("FIX FIX FIX FIX", [0] * 4, [0] * 4),
        ("REC FIX FIX FIX", [2, 6, 6, 6], [2, 6, 6, 6]),
        ("REC REC REC ND", [26] * 4, [34] * 4),
    ],
)
@pytest.mark.slow
def test_what_scripted_players_earn_on_snowdrift(names, low, high):
    env = envs.make("snowdrift_4x4", 500)
    rewards, info = played(env, roles(env, *names.split()))
    earned = rewards.sum(0)
    assert earned.sum(1).max() <= 120.001
    means = earned.mean(0)
    assert (means >= torch.tensor(low) - 0.6).all() and (means <= torch.tensor(high) + 0.6).all(), means
    assert info["won"].all() == ("ND" in names)


def test_cleaners_walk_shortest_ways():
    env = envs.make("snowdrift", 64, n_agents=1, drifts=2)
    env.reset()
    for _ in range(20):
        snapshot = env.snapshot()
        action = env.scripted_actions("ND")[:, 0].tolist()
        for m in range(64):
            here = divmod(int(snapshot["player"][m, 0]), 8)
            goals = [divmod(cell, 8) for cell in snapshot["drift"][m].nonzero().flatten().tolist()]

            def far(place, goals=goals):
                return min((abs(place[0] - row) + abs(place[1] - column) for row, column in goals), default=0)

            if not goals:
                assert action[m] == 4
            elif far(here) == 0:
                assert action[m] == 5
            else:
                down, right = GRID_MOVES[action[m]]
                assert far((here[0] + down, here[1] + right)) == far(here) - 1
        env.step(env.scripted_actions("ND"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 65}, "size is a whole number from 1 to 64, not 65"),
        ({"drifts": 17}, "drifts is a whole number from 1 to 16, not 17"),
        ({"drifts": 0}, "drifts is a whole number from 1 to 16, not 0"),
        ({"n_agents": 0}, "n_agents is a whole number from 1 to 16, not 0"),
        ({"gain": float("inf")}, "gain is a number from .* not inf"),
    ],
)
def test_what_snowdrift_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        envs.make("snowdrift_4x4", **options)


def test_scenes():
    env = envs.make("snowdrift_4x4", COPIES, n_agents=1, drifts=1, limit=10)
    env.reset()
    assert [prey["kind"] for prey in env.scene()["prey"]] == ["drift"]
    played(env, "ND")
    assert (env.scene()["status"], env.scene()["prey"]) == ("over", [])
    env = envs.make("coin_game", COPIES)
    env.reset()
    assert [prey["kind"] for prey in env.scene()["prey"]] == ["coin_0", "coin_1"]
    for name in SMALL:
        env = make(name)
        env.reset()
        picture = env.render()
        assert picture.shape[1] == 480 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 10


# ---- scripts ----
@pytest.mark.parametrize("name", ["vdn", "qmix"])
@pytest.mark.slow
def test_team_scripts_reject_a_zero_sum_game(name, tmp_path):
    from helpers import train  # slow to import, and the restatement in plain Python does without

    with pytest.raises(SystemExit, match="--env-id matrix_pennies: the rewards add up to zero"):
        train(name, tmp_path, env_id="matrix_pennies")

"""Foraging: every rule against the package lbforaging, and what is ours: time limit, options, scripted orders."""

import importlib
import random
import sys
import types
import warnings
from pathlib import Path

import gymnasium
import lbforaging.foraging
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from lbforaging.foraging import ForagingEnv
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test
from pettingzoo.utils import parallel_to_aec

import envs
from envs.foraging import HEURISTICS, ORDERS, POLICIES
from envs.pettingzoo import parallel_env
from envs.pictures import render

NONE, NORTH, SOUTH, WEST, EAST, LOAD = range(6)
COPIES = 8  # of a match placed by hand
SIZES = [
    "Foraging-8x8-2p-3f-v3",
    "Foraging-2s-8x8-2p-2f-coop-v3",
    "Foraging-5x5-4p-3f-v3",
    "Foraging-2s-10x10-3p-4f-v3",
    "Foraging-15x15-4p-5f-v3",
    "Foraging-8x8-3p-3f-coop-v3",
    "Foraging-2s-6x9-5p-4f-ind-pen-v3",
    "Foraging-1s-7x7-9p-9f-pen-v3",
]


# ---- matches placed by hand ----
def placed(name, players, foods, levels=None, food_levels=None, **options):
    """Matches, all alike, with players and foods on (row, column) each, of level 1 unless said otherwise."""
    env = envs.make(name, num_envs=COPIES, **options)
    env.reset()
    cells = [[row * env.cols + col for row, col in spots] for spots in (players, foods)]
    levels, food_levels = levels or [1] * len(players), food_levels or [1] * len(foods)
    missing = env.foods - len(foods)
    rows = cells[0], levels, cells[1] + [-1] * missing, food_levels + [0] * missing
    env.set_grid(*(torch.tensor([row] * COPIES) for row in rows))
    return env


def act(env, *actions):
    """Plays the actions in all copies of a match; the rewards of the first."""
    reward = env.step(torch.tensor([actions] * COPIES))[1]
    assert (reward == reward[0]).all()
    return pytest.approx(reward[0].tolist())


def spots(env, match=0):
    snapshot = env.snapshot()
    return list(zip(snapshot["row"][match].tolist(), snapshot["col"][match].tolist()))


def foods(env, match=0):
    """(row, column) -> level"""
    rows, cols, levels = (env.snapshot()[key][match].tolist() for key in ("food_row", "food_col", "food"))
    return {(row, col): level for row, col, level in zip(rows, cols, levels) if level}


# ---- the package ----
def originals(name, count, seed):
    """Matches of the package, of sizes that it has no ids for too."""
    env = envs.make(name)
    made = [
        ForagingEnv(
            players=env.n_agents, min_player_level=1, max_player_level=2, min_food_level=1,
            max_food_level=1 if "-ind" in name else None, field_size=(env.rows, env.cols), max_num_food=env.foods,
            sight=env.sight, max_episode_steps=50, force_coop="-coop" in name, penalty=0.1 if "-pen" in name else 0.0,
        )
        for _ in range(count)
    ]  # fmt: skip
    if env.rows != env.cols:  # the package has the sides of its space the wrong way round, and checks it
        for each in made:
            wider = gymnasium.spaces.Box(-1, 20, (env.obs_dim,), np.float32)
            each.observation_space = gymnasium.spaces.Tuple((wider,) * env.n_agents)
    return made, [each.reset(seed=seed + k)[0] for k, each in enumerate(made)]


def start_as(env, theirs):
    """Puts our matches where the package's are."""
    players = torch.tensor([[p.position[0] * env.cols + p.position[1] for p in each.players] for each in theirs])
    levels = torch.tensor([[p.level for p in each.players] for each in theirs])
    cells, worth = torch.full((len(theirs), env.foods), -1), torch.zeros(len(theirs), env.foods, dtype=torch.long)
    for match, each in enumerate(theirs):
        for f, cell in enumerate(np.flatnonzero(each.field)):
            cells[match, env.foods - 1 - f], worth[match, env.foods - 1 - f] = int(cell), int(each.field.flat[cell])
    return env.set_grid(players, levels, cells, worth)


def compare(name, episodes, seed=0):
    """Plays the package's matches and ours with the same actions; how many foods were taken and matches cleared."""
    theirs, seen = originals(name, episodes, seed)
    env = envs.make(name, num_envs=episodes, seed=seed, check=False, patience=None)
    env.reset()
    obs, info = start_as(env, theirs)
    chance, taken, cleared, running = np.random.default_rng(seed), 0, 0, list(range(episodes))
    policy = chance.integers(len(POLICIES) - 1, size=(episodes, 1)).repeat(env.n_agents, 1)
    for step in range(50):
        for match in running:
            np.testing.assert_array_equal(obs[match].numpy(), np.stack(seen[match]))
            valid = [[action.value for action in theirs[match]._valid_actions[p]] for p in theirs[match].players]
            assert [row.nonzero().flatten().tolist() for row in info["avail"][match]] == valid
        # anything at all, or what is scripted: by chance alone few foods are loaded
        wanders = chance.random(policy.shape) < 0.2
        actions = np.where(wanders, chance.integers(6, size=policy.shape), env.scripted_actions(policy))
        reward, terminated, truncated = (tensor for tensor in env.step(actions)[1:4])
        snapshot = env.snapshot()
        rows, cols, food = snapshot["row"].numpy(), snapshot["col"].numpy(), snapshot["food"].numpy()
        for match in list(running):
            each = theirs[match]
            seen[match], rewards, done, _, _ = each.step(actions[match])
            np.testing.assert_array_equal(reward[match].numpy(), np.float32(rewards))
            assert list(zip(rows[match], cols[match])) == [player.position for player in each.players]
            field = np.zeros(each.field.shape, int)
            field[snapshot["food_row"][match], snapshot["food_col"][match]] += food[match]
            np.testing.assert_array_equal(field, each.field)
            assert done == (terminated[match] or truncated[match]) and terminated[match] == (each.field.sum() == 0)
            taken += sum(rewards) > 0
            if done:
                cleared += bool(terminated[match])
                assert info["won"][match] == terminated[match] and (terminated[match] or step == 49)
                np.testing.assert_array_equal(obs[match].numpy(), np.stack(seen[match]))
                running.remove(match)
    assert not running
    return taken, cleared


@pytest.mark.parametrize("name", [SIZES[0], *SIZES[-3:]])
def test_the_package_plays_the_same(name):
    taken, _ = compare(name, 12)
    assert taken >= 12


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_the_package_plays_the_same_over_many_matches(name):
    taken, cleared = compare(name, 60, seed=1000)
    assert taken >= 60 and cleared >= 2


@pytest.mark.slow
def test_ids_registered_by_the_package_have_its_sizes():
    import lbforaging  # noqa: F401  registers them

    for name in ("Foraging-8x8-2p-3f-v3", "Foraging-2s-12x12-5p-2f-coop-v3", "Foraging-19x19-9p-4f-v3"):
        theirs, ours = gymnasium.make(name).unwrapped, envs.make(name)
        space = ours.single_observation_space
        assert ours.obs_dim == theirs.observation_space[0].shape[0] and ours.n_agents == theirs.n_agents
        assert ours.n_actions == theirs.action_space[0].n and ours.episode_limit == theirs._max_episode_steps
        np.testing.assert_array_equal(space.low[0], theirs.observation_space[0].low)
        assert (space.high[0] <= theirs.observation_space[0].high).all()


@pytest.fixture
def heuristic_agent(monkeypatch):
    """The package's module of that name. Its folder's others need pandas, and it imports a name that there is not."""
    folder = types.ModuleType("lbforaging.agents")
    folder.__path__ = [str(Path(lbforaging.__file__).parent / "agents")]
    monkeypatch.setitem(sys.modules, "lbforaging.agents", folder)
    monkeypatch.setitem(sys.modules, "foraging", lbforaging.foraging)
    monkeypatch.setitem(sys.modules, "foraging.environment", lbforaging.foraging.environment)
    return importlib.import_module("lbforaging.agents.heuristic_agent")


@pytest.mark.parametrize("name", ["Foraging-8x8-2p-3f-v3", "Foraging-2s-7x7-4p-4f-v3"])
def test_the_packages_own_agents_act_the_same(name, heuristic_agent, monkeypatch):
    """Where they act at random, ours do something that is available."""
    theirs, _ = originals(name, 16, 5)
    env = envs.make(name, num_envs=16, check=False)
    env.reset()
    _, info = start_as(env, theirs)
    monkeypatch.setattr(random, "choice", lambda actions: None)
    chance, decided, guessed = np.random.default_rng(0), 0, 0
    for _ in range(25):
        for k, kind in enumerate(HEURISTICS):
            ours = env.scripted_actions(kind).clone()
            for match, each in enumerate(theirs):
                for seat, player in enumerate(each.players):
                    player.set_controller(getattr(heuristic_agent, kind)(player))
                    if each.game_over:
                        continue
                    action = player.step(each._make_obs(player))
                    if action is None:
                        guessed += 1
                        assert info["avail"][match, seat, ours[match, seat]]
                    else:
                        decided += 1
                        assert ours[match, seat] == action.value, (kind, match, seat)
            if k == 0:
                played = ours
        wander = torch.as_tensor(chance.random(played.shape) < 0.3)
        played = torch.where(wander, torch.as_tensor(chance.integers(6, size=played.shape)), played)
        env.step(played)
        for match, each in enumerate(theirs):
            if not each.game_over:
                each.step(played[match].tolist())
    assert decided > 1000 and guessed > 50


# ---- make ----
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Foraging-8x8-2p-3f-v3", (8, 8, 2, 3, 8)),
        ("Foraging-2s-12x12-5p-2f-coop-v3", (12, 12, 5, 2, 2)),
        ("Foraging-3s-6x9-1p-1f-ind-pen-v3", (6, 9, 1, 1, 3)),
        ("foraging_orders", (8, 8, 2, 5, 8)),
    ],
)
def test_sizes(name, sizes):
    env = envs.make(name)
    assert (env.rows, env.cols, env.n_agents, env.foods, env.sight) == sizes
    assert env.agents == [f"player_{a}" for a in range(env.n_agents)]
    assert env.state_dim == 3 * (env.foods + env.n_agents) + 1
    if name != "foraging_orders":
        assert env.obs_dim == 3 * (env.foods + env.n_agents)


def test_unknown_ids_show_the_pattern():
    for unknown in ("Foraging-8x8-2p-3f-v2", "Foraging-8x8-3f-v3", "foraging-9x9-2p-3f-v3", "Foraging-8x8-2s-2p-3f-v3"):
        with pytest.raises(ValueError, match=r"unknown environment.*Foraging-8x8-2p-3f-v3.*\{players\}p-\{foods\}f"):
            envs.make(unknown)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Foraging-4x8-2p-3f-v3", {}, "5 to 64 rows and columns, not 4 x 8"),
        ("Foraging-8x65-2p-3f-v3", {}, "5 to 64 rows and columns, not 8 x 65"),
        ("Foraging-8x8-0p-3f-v3", {}, "1 to 9 players and 1 to 9 foods, not 0 and 3"),
        ("Foraging-8x8-2p-10f-v3", {}, "1 to 9 players and 1 to 9 foods, not 2 and 10"),
        ("Foraging-0s-8x8-2p-3f-v3", {}, "at least 1 cell"),
        ("Foraging-8x8-2p-3f-v3", {"n_agents": 3}, "played by 2 agents, not 3"),
        ("Foraging-8x8-2p-3f-v3", {"limit": 0}, "limit is a whole number from 1 to 100000, not 0"),
        (
            "Foraging-8x8-2p-3f-v3",
            {"patience": 0},
            "patience, if it is not None .* is a whole number from 1 to 100000, not 0",
        ),
        (
            "Foraging-8x8-2p-3f-v3",
            {"max_player_level": 1.5},
            "max_player_level is a whole number from 1 to 1000, not 1.5",
        ),
        ("Foraging-8x8-2p-3f-v3", {"penalty": -1}, "penalty is a number from 0 to 1e\\+06, not -1"),
        ("Foraging-8x8-2p-3f-v3", {"sight": 2}, "no option 'sight'"),
    ],
)
def test_what_does_not_fit_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        envs.make(name, **options)


def test_set_grid_says_what_it_takes():
    env = envs.make("Foraging-8x8-2p-3f-v3", num_envs=COPIES)
    with pytest.raises(RuntimeError, match="reset"):
        env.set_grid()
    env.reset()
    with pytest.raises(ValueError, match=r"players has shape \(8, 2\), not \(2,\)"):
        env.set_grid(players=[0, 1])
    with pytest.raises(ValueError, match="players are whole numbers from 0 to 63"):
        env.set_grid(players=[[0, 64]] * COPIES)
    with pytest.raises(ValueError, match="come together"):
        env.set_grid(foods=[[0, 1, 2]] * COPIES)


# ---- moves ----
@pytest.mark.parametrize(
    ("start", "actions", "end"),
    [
        ([(0, 0), (7, 7)], [NORTH, SOUTH], [(0, 0), (7, 7)]),  # the edge
        ([(0, 0), (7, 7)], [WEST, EAST], [(0, 0), (7, 7)]),
        ([(3, 4), (4, 4)], [EAST, NORTH], [(3, 5), (3, 4)]),  # into a cell that its occupant leaves
        ([(3, 4), (4, 4)], [SOUTH, NORTH], [(4, 4), (3, 4)]),  # neighbours swap
        ([(3, 4), (4, 4)], [NONE, NORTH], [(3, 4), (4, 4)]),  # nobody is pushed away
        ([(3, 3), (3, 5)], [EAST, WEST], [(3, 3), (3, 5)]),  # both want the same cell
        ([(1, 2), (5, 5)], [NORTH, LOAD], [(0, 2), (5, 5)]),  # what is invalid counts as none
        ([(2, 1), (5, 5)], [NORTH, 17], [(2, 1), (5, 5)]),  # food is in the way
    ],
)
def test_moves(start, actions, end):
    env = placed("Foraging-8x8-2p-3f-v3", start, [(1, 1)], check=False)
    act(env, *actions)
    assert spots(env) == end


def test_a_player_sent_back_may_share_its_cell():
    """The third enters the cell that the first wanted to leave."""
    env = placed("Foraging-8x8-3p-3f-v3", [(3, 3), (3, 5), (4, 3)], [(1, 1)])
    act(env, EAST, WEST, NORTH)
    assert spots(env) == [(3, 3), (3, 5), (3, 3)]


# ---- loading ----
def test_food_is_shared_by_level():
    env = placed("Foraging-8x8-3p-3f-v3", [(2, 3), (4, 3), (0, 0)], [(3, 3), (6, 6)], [1, 2, 2], [3, 2])
    assert act(env, LOAD, LOAD, NONE) == [1 / 5, 2 / 5, 0]
    assert foods(env) == {(6, 6): 2} and not env.terminated.any()


def test_too_weak_a_group_gets_nothing_and_pays_the_penalty():
    for name, penalty in (("Foraging-8x8-2p-3f-v3", 0), ("Foraging-8x8-2p-3f-pen-v3", -0.1)):
        env = placed(name, [(2, 3), (4, 3)], [(3, 3)], [1, 1], [3])
        assert act(env, LOAD, LOAD) == [penalty, penalty]
        assert act(env, LOAD, NONE) == [penalty, 0]
        assert foods(env) == {(3, 3): 3}
    env = placed("Foraging-8x8-2p-3f-v3", [(2, 3), (4, 3)], [(3, 3)], [1, 1], [3], penalty=0.5)
    assert act(env, NONE, LOAD) == [0, -0.5]


def test_one_who_stands_by_does_not_help():
    env = placed("Foraging-8x8-2p-2f-coop-v3", [(2, 3), (4, 3)], [(3, 3)], [1, 2], [3])
    assert act(env, LOAD, NONE) == [0, 0]
    assert act(env, LOAD, LOAD) == [1 / 3, 2 / 3]


def test_all_foods_are_worth_one():
    env = envs.make("Foraging-10x10-3p-3f-v3", num_envs=500)
    env.reset()
    earned = sum(env.step(env.scripted_actions("rows"))[1].clone() for _ in range(50))
    won = env.info["won"]
    assert 0.2 < won.float().mean() < 0.8
    assert torch.allclose(earned[won].sum(1), torch.tensor(1.0)) and (earned[~won].sum(1) < 0.99).all()


def test_prosocial_pays_everyone_the_mean():
    env = placed("Foraging-8x8-2p-3f-v3", [(2, 3), (6, 6)], [(3, 3), (1, 1)], [2, 1], [2, 2], prosocial=True)
    assert act(env, LOAD, NONE) == [0.25, 0.25]
    assert env.team_reward and not envs.make("Foraging-8x8-2p-2f-coop-v3").team_reward
    assert envs.make("foraging_orders").team_reward and not envs.make("foraging_orders", prosocial=False).team_reward


# ---- endings ----
def test_the_time_limit_truncates():
    env = placed("Foraging-8x8-2p-3f-v3", [(0, 0), (7, 7)], [(3, 3)], limit=2)
    env.step(torch.zeros(COPIES, 2, dtype=torch.long))
    obs, _, terminated, truncated, info = env.step(torch.zeros(COPIES, 2, dtype=torch.long))
    assert truncated.all() and not terminated.any() and not info["won"].any()
    assert obs.any() and info["alive"].all() and info["state"][0, -1] == 1
    obs, reward, _, truncated, info = env.step(torch.zeros(COPIES, 2, dtype=torch.long))
    assert truncated.all() and not obs.any() and not reward.any() and not info["alive"].any()
    assert info["avail"].nonzero()[:, 2].unique().tolist() == [NONE]
    for policy in POLICIES:
        assert (env.scripted_actions(policy) == NONE).all()


def test_the_last_food_ends_a_match_also_in_the_last_step():
    env = placed("Foraging-8x8-2p-3f-v3", [(2, 3), (7, 7)], [(3, 3)], limit=1)
    _, _, terminated, truncated, info = env.step(torch.tensor([[LOAD, NONE]] * COPIES))
    assert terminated.all() and not truncated.any() and info["won"].all()


# ---- reset ----
@pytest.mark.parametrize("name", ["Foraging-8x8-2p-3f-v3", "Foraging-5x5-9p-2f-coop-v3", "Foraging-8x8-4p-9f-v3"])
def test_starts(name):
    env = envs.make(name, num_envs=5000)
    env.reset()
    snapshot = {key: env.snapshot()[key].numpy() for key in ("row", "col", "level", "food_row", "food_col", "food")}
    row, col, level, food_row, food_col, food = snapshot.values()
    cell = row * env.cols + col
    assert (np.sort(cell)[:, 1:] != np.sort(cell)[:, :-1]).all()  # no two players on one cell
    counts = np.bincount(cell[:, 0], minlength=env.rows * env.cols)
    assert abs(counts - counts.mean()).max() < 6 * counts.mean() ** 0.5
    assert abs((level == 2).mean() - 0.5) < 0.02 and set(np.unique(level)) == {1, 2}
    there = food > 0
    assert there[:, 0].all() and (food_row[there] >= 1).all() and (food_row[there] <= env.rows - 2).all()
    assert (food_col[there] >= 1).all() and (food_col[there] <= env.cols - 2).all()
    on_player = (food_row[:, :, None] == row[:, None]) & (food_col[:, :, None] == col[:, None]) & there[..., None]
    assert not on_player.any()
    for f in range(env.foods):
        for g in range(f):
            apart = abs(food_row[:, f] - food_row[:, g]) + abs(food_col[:, f] - food_col[:, g])
            before = food_row[:, g] * env.cols + food_col[:, g] < food_row[:, f] * env.cols + food_col[:, f]
            both = there[:, f] & there[:, g]
            assert (apart[both] > 2).all() and before[both].all()
    highest = np.sort(level)[:, :3].sum(1)
    if "coop" in name:
        assert (food[there] == np.broadcast_to(highest[:, None], food.shape)[there]).all()
    else:
        for top in np.unique(highest):  # any level up to the highest, equally often
            levels = food[highest == top][there[highest == top]]
            assert levels.max() == top
            assert abs(np.bincount(levels)[1:] / len(levels) - 1 / top).max() < 0.05
    if env.foods == 9:
        assert there.sum(1).min() < 9, "where they do not fit there are fewer"


@pytest.mark.parametrize(
    ("name", "matches"),
    [("Foraging-5x6-3p-2f-v3", 1000), pytest.param("Foraging-5x7-3p-4f-v3", 400, marks=pytest.mark.slow)],
)
def test_foods_lie_where_the_package_lays_them(name, matches):
    """How many matches have a food on each cell, of which levels, and how many have so many foods."""
    theirs, _ = originals(name, matches, 0)
    env = envs.make(name, num_envs=matches)
    env.reset()
    field = np.zeros((matches, env.rows, env.cols))
    for f in range(env.foods):
        rows, cols, levels = (env.snapshot()[key][:, f].numpy() for key in ("food_row", "food_col", "food"))
        field[np.arange(matches), rows, cols] += levels
    original = np.stack([each.field for each in theirs])
    assert abs((field > 0).mean(0) - (original > 0).mean(0)).max() < 0.15
    assert abs(field.mean(0) - original.mean(0)).max() < 0.5
    counts = [np.bincount((each > 0).sum((1, 2)), minlength=env.foods + 1) / matches for each in (field, original)]
    assert abs(counts[0] - counts[1]).max() < 0.1


# ---- what the players see beyond the package's observation ----
def test_the_state_lists_foods_players_and_time():
    env = placed("Foraging-2s-8x8-2p-3f-v3", [(2, 3), (7, 7)], [(6, 6), (3, 3)], [1, 2], [1, 1], limit=4)
    state = [3, 3, 1, 6, 6, 1, -1, -1, 0, 2, 3, 1, 7, 7, 2]
    assert env.set_grid()[1]["state"][0].tolist() == [*state, 0]
    act(env, LOAD, NONE)
    assert env.info["state"][0].tolist() == [-1, -1, 0, *state[3:], 0.25]


@pytest.mark.parametrize("name", ["Foraging-8x8-2p-3f-v3", "Foraging-2s-6x9-4p-3f-v3"])
def test_one_hot_observations_hold_the_same(name):
    plain, coded = (envs.make(name, num_envs=32, seed=3, one_hot=one_hot) for one_hot in (False, True))
    rows, cols = min(2 * plain.sight + 1, plain.rows), min(2 * plain.sight + 1, plain.cols)
    for obs, codes in ((plain.reset()[0], coded.reset()[0]), (plain.obs, coded.obs)):
        numbers, codes = obs.unflatten(-1, (-1, 3)), codes.unflatten(-1, (-1, rows + cols + 1))
        for axis, part in enumerate((codes[..., :rows], codes[..., rows:-1])):
            seen = numbers[..., axis] >= 0
            assert torch.equal(part.sum(-1), seen.float())
            assert torch.equal(part.argmax(-1)[seen], numbers[..., axis].long()[seen])
        assert torch.equal(codes[..., -1], numbers[..., 2])
        assert coded.single_observation_space.contains(coded.obs[0].numpy())
        for _ in range(10):
            actions = plain.scripted_actions("random").clone()
            plain.step(actions)
            coded.step(actions)


def test_players_farther_than_player_sight_are_not_seen():
    everything, near = (envs.make("Foraging-8x8-3p-3f-v3", num_envs=64, player_sight=sight) for sight in (64, 2))
    obs, there = everything.reset()[0].unflatten(-1, (-1, 3)), near.reset()[0].unflatten(-1, (-1, 3))
    assert torch.equal(obs[..., :4, :], there[..., :4, :])  # foods and oneself
    distance = (obs[..., 4:, :2] - obs[..., 3:4, :2]).abs().amax(-1)
    assert torch.equal((distance <= 2).sum(-1), (there[..., 4:, 2] > 0).sum(-1))
    assert 0 < (distance <= 2).float().mean() < 1


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("name", ["Foraging-8x8-3p-3f-v3", "Foraging-2s-10x7-3p-3f-v3"])
def test_places_and_origin(name, one_hot):
    env = envs.make(name, num_envs=64, one_hot=one_hot)
    obs, _ = env.reset()
    place, seen = env.places(obs)
    assert place.shape == (64, 3, 2, 2) and seen.shape == (64, 3, 2)
    assert seen.all() == (env.sight == 8) and seen.any()
    for match in range(64):
        for seat in range(3):
            origin = env.origin(seat, match)
            found = [tuple((p + origin).int().tolist()) for p, s in zip(place[match, seat], seen[match, seat]) if s]
            others = [spot for other, spot in enumerate(spots(env, match)) if other != seat]
            assert found == others if env.sight == 8 else set(found) <= set(others)


# ---- scripted orders ----
FIELD = [(1, 6), (2, 2), (3, 4), (6, 1), (6, 6)]
EXPECTED = {
    "rows": [(1, 6), (2, 2), (3, 4), (6, 1), (6, 6)],
    "rows_back": [(6, 6), (6, 1), (3, 4), (2, 2), (1, 6)],
    "columns": [(6, 1), (2, 2), (3, 4), (1, 6), (6, 6)],
    "columns_back": [(6, 6), (1, 6), (3, 4), (2, 2), (6, 1)],
    "diagonal": [(2, 2), (1, 6), (3, 4), (6, 1), (6, 6)],
    "inside": [(3, 4), (2, 2), (1, 6), (6, 1), (6, 6)],
    "outside": [(1, 6), (6, 1), (6, 6), (2, 2), (3, 4)],
}


def visited(env, policy, seat=0, steps=400):
    """The foods at which a player loads, in order, while the other does nothing."""
    foods_seen = []
    for _ in range(steps):
        actions = env.scripted_actions(policy).clone()
        actions[:, 1 - seat] = NONE
        if actions[0, seat] == LOAD:
            row, col = spots(env)[seat]
            (near,) = [food for food in foods(env) if abs(food[0] - row) + abs(food[1] - col) == 1]
            foods_seen.append(near)
        env.step(actions)
    return foods_seen


def test_every_order_has_a_test():
    assert set(EXPECTED) | {"near"} == set(ORDERS)
    assert len({tuple(order) for order in EXPECTED.values()}) == len(EXPECTED)


@pytest.mark.parametrize("policy", EXPECTED)
def test_orders_are_kept_and_given_up_after_some_tries(policy):
    env = placed("foraging_orders", [(0, 0), (7, 7)], FIELD, [1, 1], [2] * 5, limit=400, patience=3)
    tried = visited(env, policy, steps=150)
    rounds = [food for food in EXPECTED[policy] for _ in range(3)]
    assert tried[:30] == rounds + rounds


def test_near_goes_to_the_nearest_it_has_not_given_up():
    env = placed("foraging_orders", [(0, 0), (7, 7)], FIELD, [1, 1], [2] * 5, limit=400, patience=2)
    assert visited(env, "near", steps=60)[:10:2] == [(2, 2), (3, 4), (1, 6), (6, 6), (6, 1)]


def test_one_without_end_of_patience_waits():
    env = placed("foraging_orders", [(0, 0), (7, 7)], FIELD, [1, 1], [2] * 5, limit=400, patience=None)
    assert set(visited(env, "columns", steps=60)) == {(6, 1)}


def test_tries_count_loads_that_fail_by_whoever_acts():
    env = placed("foraging_orders", [(1, 2), (3, 2)], FIELD, [1, 1], [2] * 5)
    act(env, LOAD, NONE)
    act(env, LOAD, NONE)
    assert env.snapshot()["tries"][0].tolist() == [[0, 2, 0, 0, 0], [0] * 5]
    assert act(env, LOAD, LOAD) == [0.1, 0.1]
    assert env.snapshot()["tries"][0].sum() == 2 and foods(env).keys() == set(FIELD) - {(2, 2)}


def test_orders_go_round_a_player_that_stands_in_the_way():
    for start, blocker in (([4, 2], (3, 2)), ([2, 5], (2, 3)), ([3, 3], (3, 2))):
        env = placed("foraging_orders", [start, blocker], [(2, 2)], [1, 1], [2], limit=100)
        assert set(visited(env, "rows", steps=30)) == {(2, 2)}


def test_two_who_want_the_same_cell_do_not_stay_stuck():
    env = placed("foraging_orders", [(2, 4), (4, 4)], [(3, 6)], [1, 1], [2])
    earned = sum(env.step(env.scripted_actions("rows"))[1].clone() for _ in range(25))
    assert (earned == 0.5).all()


def test_meet_goes_where_another_goes():
    """It wins nearly every match, whatever the other's order, and a guess of one order for all does not."""
    env = envs.make("foraging_orders", num_envs=512, seed=3, check=False)
    others = torch.tensor([POLICIES.index(order) for order in ORDERS]).repeat(64)
    won = {}
    for policy in ("meet", "near", "rows"):
        env.reset()
        policies = torch.stack((torch.full_like(others, POLICIES.index(policy)), others), 1)
        for _ in range(env.episode_limit):
            *_, info = env.step(env.scripted_actions(policies))
        won[policy] = info["won"].view(64, len(ORDERS)).float().mean(0)
    assert won["meet"].min() > 0.85 and won["near"].max() < 0.3 and won["rows"][1:].max() < 0.3


@pytest.mark.slow
def test_orders_reach_every_food_on_crowded_fields():
    """Round other foods: whoever walks an order alone has tried every food in time."""
    env = envs.make("Foraging-8x8-1p-9f-coop-v3", num_envs=100, limit=400, patience=1, max_player_level=1)
    for policy in ORDERS:
        env.reset()
        won = env.info["won"]
        for _ in range(250):
            env.step(env.scripted_actions(policy))
        assert won.all(), policy


@pytest.mark.slow
def test_random_players_take_every_available_action_alike():
    env = placed("Foraging-8x8-2p-3f-v3", [(2, 3), (0, 0)], [(3, 3)])
    many = envs.make("Foraging-8x8-2p-3f-v3", num_envs=6000)
    many.reset()
    one = env.snapshot()
    cells = (one["row"] * 8 + one["col"])[:1].repeat(6000, 1)
    many.set_grid(cells, one["level"][:1].repeat(6000, 1), [[27, -1, -1]] * 6000, [[1, 0, 0]] * 6000)
    actions = many.scripted_actions("random").clone()
    for seat, expected in enumerate(([NONE, NORTH, WEST, EAST, LOAD], [NONE, SOUTH, EAST])):
        counts = actions[:, seat].bincount(minlength=6)
        assert counts[expected].sum() == 6000 and counts[expected].min() > 0.85 * 6000 / len(expected)
    assert torch.equal(many.scripted_actions("random"), actions)
    assert abs(np.corrcoef(actions.T)[0, 1]) < 0.1


def test_default_others_are_orders_where_foods_take_all():
    assert envs.make("Foraging-8x8-2p-3f-v3").default_others == HEURISTICS
    assert envs.make("Foraging-8x8-2p-2f-coop-v3").default_others == ORDERS
    gym_env = gymnasium.make("omg/foraging_orders-v0")
    gym_env.reset(seed=0)
    assert set(gym_env.unwrapped._matches.roster) == {POLICIES.index(order) for order in ORDERS}


# ---- bridges and pictures ----
@pytest.mark.filterwarnings("ignore:Observation")
@pytest.mark.slow
def test_pettingzoo():
    name = "Foraging-2s-8x8-2p-2f-coop-v3"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(parallel_env(name), num_cycles=200)
    parallel_seed_test(lambda: parallel_env(name), num_cycles=100)
    api_test(parallel_to_aec(parallel_env(name)), num_cycles=100)


@pytest.mark.parametrize("name", ["Foraging-8x8-2p-3f-v3", "foraging_orders"])
@pytest.mark.slow
def test_gymnasium(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(f"omg/{name}-v0", seat="random", render_mode="rgb_array").unwrapped)


def test_scene_and_picture():
    env = placed("Foraging-2s-8x8-2p-3f-v3", [(2, 3), (7, 7)], [(3, 3), (6, 2)], [1, 2], [1, 3], limit=2)
    act(env, LOAD, NORTH)
    scene = env.scene()
    assert (scene["step"], scene["limit"], scene["status"]) == (1, 2, "running")
    assert (scene["height"], scene["width"], scene["radius"]) == (8, 8, 2)
    assert scene["prey"] == [{"kind": "food", "row": 6, "col": 2, "level": 3}]
    assert scene["hunters"] == [
        {"row": 2, "col": 3, "alive": True, "action": "load", "return": 0.25, "level": 1},
        {"row": 6, "col": 7, "alive": True, "action": "up", "return": 0.0, "level": 2},
    ]
    picture = env.render().astype(int)
    red = np.abs(picture - np.array([0xC8, 0x45, 0x3B])).max(2) < 12
    scale, left = (480 - render.HEADER - render.FOOTER) / 8, (480 - (480 - render.HEADER - render.FOOTER)) / 2
    rows, cols = np.nonzero(red)
    assert (rows.min() - render.HEADER) / scale > 6 and (rows.max() - render.HEADER) / scale < 7
    assert (cols.min() - left) / scale > 2 and (cols.max() - left) / scale < 3
    act(env, NONE, NONE)
    assert env.scene()["status"] == "time"
    env = placed("Foraging-8x8-2p-3f-v3", [(2, 3), (7, 7)], [(3, 3)])
    act(env, LOAD, NONE)
    assert env.scene()["status"] == "won" and env.scene()["radius"] is None


# ---- other ways to run it ----

"""The interface every environment has: what make, reset, step and the rest take, return and refuse."""

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import gymnasium
import numba
import numpy as np
import pytest
import torch

import envs
from envs.battle.data import MAPS

NO_OP, STOP, NORTH, SOUTH, EAST, WEST, ATTACK = range(7)
INFO = ["state", "avail", "alive", "won", "invalid"]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")


def stops(env):
    """Everyone stands still; the dead do nothing."""
    alive = env.units()["health"][:, : env.n_agents] > 0
    return torch.where(alive, STOP, NO_OP)


def shown(env, result):
    """A copy of everything a call returned, by name."""
    names = ("obs", "info") if len(result) == 2 else ("obs", "reward", "terminated", "truncated", "info")
    tensors = dict(zip(names, result))
    info = tensors.pop("info")
    return {key: tensor.clone() for key, tensor in {**tensors, **info}.items()}


def play(env, steps, policy="random"):
    """`steps` steps of a scripted policy: what each returned, with the positions and health it led to."""
    history = []
    for _ in range(steps):
        result = env.step(env.scripted_actions(policy))
        history.append({**shown(env, result), **{key: values.clone() for key, values in env.units().items()}})
    return history


def same(first, second, rows=slice(None)):
    return all(torch.equal(a[key][rows], b[key][rows]) for a, b in zip(first, second, strict=True) for key in a)


def duel(**options):
    """3m with all six marines in reach of one another and the enemies one shot from death."""
    env = envs.make("3m", **options)
    env.reset()
    health = torch.tensor([[45.0, 45, 45, 1, 1, 1]]).expand(env.num_envs, 6)
    x, y = torch.tensor([[10.0, 10, 10, 13, 13, 13]]), torch.tensor([[14.0, 16, 18, 14, 16, 18]])
    env.set_units(x=x.expand_as(health), y=y.expand_as(health), health=health)
    return env


# ---- what make refuses ----
@pytest.mark.parametrize(
    ("env_id", "question"),
    [
        ("4m", "did you mean 3m or 8m? "),
        ("3m ", "did you mean 3m? "),
        ("mmm", "did you mean MMM? "),
        ("Stag_Hunt_4X4", "did you mean stag_hunt_4x4? "),
        ("sc2/3n", "did you mean sc2/3m? "),
        ("terran_5_vs_5", "did you mean smacv2/terran_5_vs_5? "),
        ("coingame,size=5", "did you mean coin_game? "),
        ("stag_hunt_4x4x4", "did you mean stag_hunt_4x4 or stag_hunt_{height}x{width}_{hares}h{stags}s? "),
        ("Breakout", ""),
        ("", ""),
        (None, ""),
        ([], ""),
    ],
)
def test_unknown_id_asks_for_the_one_that_is_like_it(env_id, question):
    with pytest.raises(ValueError) as error:
        envs.make(env_id)
    name = env_id and env_id.partition(",")[0]
    assert str(error.value) == f"unknown environment {name!r}: {question}envs.list_ids() has all ids"


def test_unknown_id_names_a_few_ids_at_most():
    for env_id in (*envs.list_ids(), "sc2/", "m" * 10_000):
        with pytest.raises(ValueError, match="unknown environment") as error:
            envs.make(f"{env_id}_")
        names = str(error.value).partition("did you mean ")[2].partition("?")[0].split(" or ")
        assert len(names) <= 4 and (env_id not in envs.list_ids() or env_id in names)


def test_options_can_be_part_of_the_id():
    env = envs.make("coin_game,size=5,rules=lola,limit=7")
    same = envs.make("coin_game", size=5, rules="lola", limit=7)
    assert env.name == "coin_game,size=5,rules=lola,limit=7"
    assert (env.obs_dim, env.episode_limit) == (same.obs_dim, same.episode_limit) == (5 * 5 * 4, 7)
    payoffs = [[(1.5, -1), (0, 0)], [(0, 0), (2, 1)]]
    assert envs.make(f"matrix_bos,payoffs={payoffs}").payoffs[0][0] == [1.5, -1]
    assert envs.make("stag_hunt_4x4,prosocial=True,view_radius=None").team_reward


@pytest.mark.parametrize(
    "env_id", ["3m,", "3m,5", "3m,a=b=c", "3m,limit=f(1)", "3m,**x", "3m,a=1)+(2", "3m,a=" + "(" * 500]
)
def test_options_in_an_id_are_names_and_values(env_id):
    with pytest.raises(ValueError, match="size=5"):
        envs.make(env_id)


def test_an_option_is_given_once():
    with pytest.raises(ValueError, match="limit"):
        envs.make("kuhn,limit=5", limit=6)


@pytest.mark.parametrize("device", ["cuda:77", "tpu", "meta", 3.5])
def test_unknown_device_names_those_there_are(device):
    with pytest.raises(ValueError, match="cpu"):
        envs.make("3m", device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU here")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="cpu"):
        envs.make("3m", device="cuda")


def test_policies_by_number_are_checked_however_many_matches_there_are():
    """The rules look up what a number means."""
    env = envs.make("kuhn", num_envs=65)
    assert not env.check
    env.reset()
    for wrong in (-1, len(env.policies), 10**9):
        with pytest.raises(ValueError, match=f"policies are numbered 0 to {len(env.policies) - 1}: "):
            env.scripted_actions(torch.full((65, 2), wrong))


@pytest.mark.parametrize("num_envs", [0, -1, 1.5, "8", True])
def test_wrong_number_of_matches_says_what_is_allowed(num_envs):
    with pytest.raises(ValueError, match=r"num_envs.* 1"):
        envs.make("3m", num_envs=num_envs)
    assert type(envs.make("kuhn", num_envs=np.int64(3)).num_envs) is int


def test_unknown_option_names_all_options():
    with pytest.raises(ValueError, match="obs_last_actoin") as error:
        envs.make("3m", obs_last_actoin=True)
    assert all(name in str(error.value) for name in ("autoreset", "check", "obs_last_action", "reward_sparse"))


@pytest.mark.parametrize(("name", "n_agents"), [("2s3z", 6), ("MMM", 9), ("1c3s5z", 1), ("bane_vs_bane", 25)])
def test_number_of_agents_is_fixed_where_allies_differ(name, n_agents):
    with pytest.raises(ValueError, match=str(envs.make(name).n_agents)):
        envs.make(name, n_agents=n_agents)
    assert envs.make(name, n_agents=envs.make(name).n_agents).n_agents == envs.make(name).n_agents


@pytest.mark.parametrize(("name", "n_agents"), [("2m_vs_1z", 1), ("2s_vs_1sc", 1), ("3m", 0), ("8m", -1), ("3m", 2.5)])
def test_number_of_agents_that_leaves_no_match_is_refused(name, n_agents):
    with pytest.raises(ValueError, match="n_agents"):
        envs.make(name, n_agents=n_agents)


# ---- other numbers of agents ----
@pytest.mark.parametrize(
    ("name", "n_agents", "enemies", "like"),
    [("3m", 8, 8, "8m"), ("3m", 25, 25, "25m"), ("5m_vs_6m", 8, 9, "8m_vs_9m"), ("27m_vs_30m", 1, 4, None)],
)
def test_number_of_agents_keeps_the_difference_and_the_limit(name, n_agents, enemies, like):
    env = envs.make(name, n_agents=n_agents)
    assert (env.n_agents, env.n_enemies, env.n_actions) == (n_agents, enemies, 6 + enemies)
    assert len(env.agents) == n_agents and len(env.unit_kinds) == n_agents + enemies
    assert env.episode_limit == MAPS[name].limit
    if like:
        twin = envs.make(like)
        assert (env.obs_dim, env.state_dim, env.n_actions) == (twin.obs_dim, twin.state_dim, twin.n_actions)
    obs, info = env.reset()
    assert obs.shape == (1, n_agents, env.obs_dim) and info["alive"].all()
    env.step(env.scripted_actions("nearest"))


def test_extra_allies_are_dealt_to_the_spawn_points_in_turn():
    env = envs.make("2m_vs_1z", n_agents=5)
    env.reset()
    assert env.n_enemies == 4
    near_west = (env.units()["x"][0, :5] - 13).abs() < 2
    near_east = (env.units()["x"][0, :5] - 19).abs() < 2
    assert (near_west.sum(), near_east.sum()) == (3, 2)


# ---- attributes and spaces ----
@pytest.mark.parametrize("name", MAPS)
def test_attributes_and_spaces(name):
    env = envs.make(name, num_envs=5)
    assert env.num_envs == 5 and env.device == torch.device("cpu")
    assert len(env.agents) == len(set(env.agents)) == env.n_agents
    assert len(env.unit_kinds) == env.n_agents + env.n_enemies
    assert isinstance(env.metadata, dict)
    assert env.single_observation_space.shape == (env.n_agents, env.obs_dim)
    assert env.observation_space.shape == (5, env.n_agents, env.obs_dim)
    assert env.single_action_space == gymnasium.spaces.MultiDiscrete([env.n_actions] * env.n_agents)
    assert env.action_space.shape == (5, env.n_agents)
    assert env.action_space.contains(np.full((5, env.n_agents), env.n_actions - 1))
    assert not env.action_space.contains(np.full((5, env.n_agents), env.n_actions))
    obs, _ = env.reset()
    assert env.observation_space.contains(obs.numpy())
    for step in play(env, 5):
        assert env.observation_space.contains(step["obs"].numpy())


@pytest.mark.parametrize("autoreset", [False, True])
def test_metadata_tells_the_autoreset_mode(autoreset):
    mode = envs.make("3m", autoreset=autoreset).metadata["autoreset_mode"]
    assert mode == (gymnasium.vector.AutoresetMode.SAME_STEP if autoreset else gymnasium.vector.AutoresetMode.DISABLED)


def test_shapes_and_types():
    env = envs.make("5m_vs_6m", num_envs=7)
    obs, info = env.reset()
    assert set(INFO) <= set(info)
    obs, reward, terminated, truncated, info = env.step(stops(env))
    expected = {
        "obs": (obs, torch.float32, (7, 5, 55)),
        "reward": (reward, torch.float32, (7, 5)),
        "terminated": (terminated, torch.bool, (7,)),
        "truncated": (truncated, torch.bool, (7,)),
        "state": (info["state"], torch.float32, (7, 98)),
        "avail": (info["avail"], torch.bool, (7, 5, 12)),
        "alive": (info["alive"], torch.bool, (7, 5)),
        "won": (info["won"], torch.bool, (7,)),
        "invalid": (info["invalid"], torch.bool, (7,)),
    }
    for name, (tensor, dtype, shape) in expected.items():
        assert (tensor.dtype, tuple(tensor.shape), tensor.device) == (dtype, shape, env.device), name
    assert not info["invalid"].any()


@pytest.mark.parametrize("num_envs", [1, 64])
@pytest.mark.parametrize("autoreset", [False, True])
def test_tensors_are_written_in_place(num_envs, autoreset):
    env = envs.make("3m", num_envs=num_envs, autoreset=autoreset)

    def addresses(result):
        obs, *others, info = result
        return [tensor.data_ptr() for tensor in (obs, *others, *info.values())]

    first_reset = addresses(env.reset())
    first = addresses(env.step(stops(env)))
    obs = env.step(stops(env))[0]
    before = obs.clone()
    assert addresses(env.step(env.scripted_actions("nearest"))) == first
    assert not torch.equal(obs, before)
    assert addresses(env.reset()) == first_reset


# ---- actions ----
def test_step_comes_after_reset():
    env = envs.make("3m")
    with pytest.raises(RuntimeError, match="reset"):
        env.step(torch.ones(1, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    "actions",
    [
        torch.ones(3, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.int64),
        torch.ones(1, 4, dtype=torch.int64),
        torch.ones(1, 3, 1, dtype=torch.int64),
        torch.ones(1, 3),
        torch.ones(1, 3, dtype=torch.bool),
    ],
    ids=["one match left out", "matches", "agents", "dimensions", "float", "bool"],
)
def test_wrong_actions_are_refused(actions):
    env = envs.make("3m")
    env.reset()
    with pytest.raises(ValueError, match=r"integer.*\(1, 3\)"):
        env.step(actions)


@pytest.mark.parametrize("kind", ["int64", "int32", "int8", "numpy", "list"])
def test_any_integers_will_do(kind):
    actions = torch.tensor([[NORTH, SOUTH, EAST]])
    actions = {"numpy": actions.numpy(), "list": actions.tolist()}.get(kind, actions)
    if isinstance(actions, torch.Tensor):
        actions = actions.to(getattr(torch, kind))
    env, twin = envs.make("3m"), envs.make("3m")
    env.reset()
    twin.reset()
    env.step(actions)
    twin.step(torch.tensor([[NORTH, SOUTH, EAST]]))
    assert torch.equal(env.units()["x"], twin.units()["x"]) and torch.equal(env.units()["y"], twin.units()["y"])


@pytest.mark.parametrize("wrong", [NO_OP, ATTACK, ATTACK + 3, -1, 10**9])
def test_unavailable_action_is_an_error_when_checked(wrong):
    env = envs.make("3m", num_envs=4, check=True)
    env.reset()
    actions = stops(env)
    actions[2, 1] = wrong
    before = env.units()["x"].clone()
    with pytest.raises(ValueError, match=rf"match 2\b.*agent 1\b.*{wrong}") as error:
        env.step(actions)
    assert "1, 2, 3, 4, 5" in str(error.value)
    assert torch.equal(env.units()["x"], before)
    env.step(stops(env))


def test_check_is_on_for_up_to_64_matches():
    for num_envs, checked in ((1, True), (64, True), (65, False)):
        env = envs.make("3m", num_envs=num_envs)
        env.reset()
        if checked:
            with pytest.raises(ValueError, match="agent"):
                env.step(torch.zeros(num_envs, 3, dtype=torch.int64))
        else:
            env.step(torch.zeros(num_envs, 3, dtype=torch.int64))


@pytest.mark.parametrize("wrong", [NO_OP, ATTACK, ATTACK + 3, -1, 10**9])
def test_unavailable_action_counts_as_stop_when_not_checked(wrong):
    env, twin = envs.make("3m", num_envs=4, check=False), envs.make("3m", num_envs=4, check=False)
    for each in (env, twin):
        each.reset()
        each.set_units(health=torch.tensor([[45.0, 45, 0, 45, 45, 45]]).repeat(4, 1))
    after = shown(env, env.step(torch.full((4, 3), wrong)))
    expected = shown(twin, twin.step(torch.tensor([[STOP, STOP, NO_OP]]).repeat(4, 1)))
    assert same([after], [expected])


def test_dead_agent_counts_as_no_op_when_not_checked():
    env, twin = envs.make("3m", check=False), envs.make("3m", check=False)
    for each in (env, twin):
        each.reset()
        each.set_units(health=torch.tensor([[45.0, 45, 0, 45, 45, 45]]))
    after = shown(env, env.step(torch.tensor([[STOP, STOP, NORTH]])))
    expected = shown(twin, twin.step(torch.tensor([[STOP, STOP, NO_OP]])))
    assert same([after], [expected])


# ---- the end of a match ----
def assert_frozen(env, result, matches):
    _, reward, _, _, info = result
    assert (reward[matches] == 0).all()
    assert not info["alive"][matches].any()
    only_no_op = torch.zeros(env.n_actions, dtype=torch.bool)
    only_no_op[NO_OP] = True
    assert (info["avail"][matches] == only_no_op).all()


def test_last_step_of_a_match_is_shown_and_then_it_is_frozen():
    env = duel(num_envs=3)
    actions = stops(env)
    actions[1] = torch.tensor([ATTACK, ATTACK + 1, ATTACK + 2])
    obs, reward, terminated, truncated, info = env.step(actions)
    assert terminated.tolist() == info["won"].tolist() == [False, True, False] and not truncated.any()
    assert (reward[1] > 10).all()
    assert info["alive"][1].all() and (obs[1].abs().sum(1) > 0).all() and info["state"][1].abs().sum() > 0
    assert info["avail"][1, :, STOP].all() and not info["avail"][1, :, NO_OP].any()
    assert not info["avail"][1, :, ATTACK:].any(), "the enemies are dead"
    running = env.units()["health"][0].clone()

    assert_frozen(env, env.step(stops(env)), [1])
    result = env.step(stops(env))
    assert_frozen(env, result, [1])
    assert result[4]["alive"][0].any() and not torch.equal(env.units()["health"][0], running), "the others go on"

    _, info = env.reset(mask=torch.tensor([False, True, False]))
    assert info["alive"][1].all() and info["avail"][1, :, STOP].all()
    env.step(stops(env))


def test_truncated_match_shows_its_last_observation_and_is_frozen():
    env = envs.make("3m", num_envs=2, map_spec=dataclasses.replace(MAPS["3m"], limit=3))
    env.reset()
    for step in range(3):
        obs, _, terminated, truncated, info = env.step(stops(env))
        assert truncated.tolist() == [step == 2] * 2 and not terminated.any()
    assert info["alive"].all() and (obs.abs().sum(2) > 0).all() and not info["won"].any()
    assert_frozen(env, env.step(stops(env)), [0, 1])


@pytest.mark.parametrize("name", ["3m", "2s3z"])
def test_autoreset_plays_what_resetting_by_hand_plays(name):
    spec = dataclasses.replace(MAPS[name], limit=40)
    auto = envs.make(name, num_envs=32, seed=5, autoreset=True, map_spec=spec)
    hand = envs.make(name, num_envs=32, seed=5, map_spec=spec)
    auto.reset()
    hand.reset()
    endings = torch.zeros(32)
    for _ in range(150):
        actions = auto.scripted_actions("nearest").clone()
        after, expected = shown(auto, auto.step(actions)), shown(hand, hand.step(actions))
        for key in ("reward", "terminated", "truncated", "won"):
            assert torch.equal(after[key], expected[key]), key
        over = expected["terminated"] | expected["truncated"]
        endings += over
        for key in ("obs", "state", "avail"):
            assert torch.equal(after[f"final_{key}"][over], expected[key][over]), key
            assert torch.equal(after[key][~over], expected[key][~over]), key
        if over.any():
            obs, info = hand.reset(mask=over)
            for key, tensor in {
                "obs": obs,
                "state": info["state"],
                "avail": info["avail"],
                "alive": info["alive"],
            }.items():
                assert torch.equal(after[key], tensor), key
            assert after["alive"][over].all()
    assert (endings >= 2).all()


def test_reset_with_a_mask_leaves_the_others_alone():
    env = envs.make("3m", num_envs=6)
    env.reset()
    before = play(env, 8, "nearest")[-1]
    mask = torch.tensor([True, False, False, True, False, False])
    obs, info = env.reset(mask=mask)
    after = {"obs": obs, **{key: info[key] for key in INFO}, **env.units()}
    for key, tensor in after.items():
        assert torch.equal(tensor[~mask], before[key][~mask]), key
    assert (after["health"][mask] == 45).all()
    assert (after["x"][mask] != before["x"][mask]).all()
    assert (info["state"][mask][:, -27:] == 0).all(), "no last action"
    with pytest.raises(ValueError, match=r"mask.*\(6,\)"):
        env.reset(mask=torch.ones(5, dtype=torch.bool))


# ---- seeds ----
def test_same_seed_same_matches():
    first, second = (envs.make("8m", num_envs=16, seed=11) for _ in range(2))
    assert torch.equal(first.reset()[0], second.reset()[0])
    assert same(play(first, 30), play(second, 30))


def test_another_seed_other_matches():
    first, second = (envs.make("8m", num_envs=16, seed=seed) for seed in (11, 12))
    assert not torch.equal(first.reset()[0], second.reset()[0])


@pytest.mark.parametrize("name", ["2s3z", "corridor"])
def test_a_match_does_not_depend_on_how_many_are_played_with_it(name, threads):
    """Few matches run on one thread, many on all of them."""
    few, many = envs.make(name, num_envs=4, seed=2), envs.make(name, num_envs=64, seed=2)
    few.reset()
    many.reset()
    for a, b in zip(play(few, 40, "nearest"), play(many, 40, "nearest")):
        for key in a:
            assert torch.equal(a[key], b[key][:4]), key


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="numba has one thread here")
def test_number_of_threads_changes_nothing(threads):
    before = numba.get_num_threads()
    histories = []
    try:
        for threads in (1, 2):
            numba.set_num_threads(threads)
            env = envs.make("MMM", num_envs=48, seed=9)
            env.reset()
            histories.append(play(env, 40, "nearest"))
    finally:
        numba.set_num_threads(before)
    assert same(*histories)


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="numba has one thread here")
@pytest.mark.parametrize(
    ("variables", "of_torch", "of_numba"),
    [({}, 3, None), ({"OMP_NUM_THREADS": "1"}, 1, 1), ({"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}, 1, 2)],
)
def test_environments_use_the_threads_they_may_and_leave_torch_its_own(variables, of_torch, of_numba):
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")} | variables
    environment["PYTHONPATH"] = str(Path(envs.__file__).parents[1])
    code = "import numba, torch, envs; {}; env = envs.make('matrix_ipd', 64); env.reset(); {}".format(
        "pass" if variables else "torch.set_num_threads(3)",
        "print(torch.get_num_threads(), numba.get_num_threads())",
    )
    found = subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300, capture_output=True)
    torch_threads, numba_threads = map(int, found.stdout.split())
    assert torch_threads == of_torch and numba_threads == (of_numba or numba_threads)


def test_matches_of_a_batch_differ():
    env = envs.make("3m", num_envs=200)
    env.reset()
    assert len(env.units()["x"][:, 0].unique()) > 190
    x, y = (
        torch.tensor([10.0, 10, 10, 13, 13, 13]).repeat(200, 1),
        torch.tensor([14.0, 16, 18, 14, 16, 18]).repeat(200, 1),
    )
    env.set_units(x=x, y=y)  # from here on only the random delays of attacks tell them apart
    play(env, 6, "nearest")
    assert len(env.units()["cooldown"][:, 0].unique()) > 150


def test_reset_with_a_seed_restarts_the_streams():
    env = envs.make("3m", num_envs=8, seed=1)
    start = env.reset()[0].clone()
    first = play(env, 20)
    assert not torch.equal(env.reset()[0], start), "the next episode is another one"
    assert not same(first, play(env, 20))
    assert torch.equal(env.reset(seed=1)[0], start)
    assert same(first, play(env, 20))
    assert not torch.equal(env.reset(seed=7)[0], start)


def test_reset_with_seed_and_mask_restarts_only_those_streams():
    env = envs.make("3m", num_envs=8, seed=1)
    start = env.reset()[0].clone()
    play(env, 5)
    mask = torch.arange(8) < 3
    other = env.units()["x"][~mask].clone()
    obs, _ = env.reset(seed=1, mask=mask)
    assert torch.equal(obs[mask], start[mask]) and torch.equal(env.units()["x"][~mask], other)


# ---- snapshot, restore, set_units ----
@pytest.mark.parametrize("name", ["3m", "MMM", "so_many_baneling"])
@pytest.mark.parametrize("autoreset", [False, True])
def test_restore_replays_exactly(name, autoreset):
    env = envs.make(name, num_envs=8, seed=4, autoreset=autoreset)
    env.reset()
    play(env, 15, "nearest")
    saved = env.snapshot()
    first = play(env, 60)

    env.restore(saved)
    assert same(first, play(env, 60))

    fresh = envs.make(name, num_envs=8, seed=99, autoreset=autoreset)
    obs, info = fresh.restore(saved)
    assert obs.shape == (8, fresh.n_agents, fresh.obs_dim) and info["avail"].any(2).all()
    env.restore(saved)
    assert same(play(env, 10), play(fresh, 10)), "in another environment"


def test_snapshot_is_a_copy():
    env = envs.make("3m")
    env.reset()
    saved = env.snapshot()
    x = env.units()["x"].clone()
    play(env, 5)
    assert not torch.equal(env.units()["x"], x)
    env.restore(saved)
    assert torch.equal(env.units()["x"], x)


def test_snapshot_of_another_shape_is_refused():
    env, other = envs.make("3m", num_envs=2), envs.make("3m", num_envs=3)
    env.reset()
    other.reset()
    with pytest.raises(ValueError, match="snapshot"):
        env.restore(other.snapshot())


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("name", ["3m", "stag_hunt_4x4"])
def test_a_batch_is_not_copied_but_by_snapshots(name, duplicate):
    with pytest.raises(TypeError, match=r"snapshot\(\).*restore\(\)"):
        duplicate(envs.make(name))


def test_set_units_sets_what_it_is_given_and_nothing_else():
    env = envs.make("MMM", num_envs=3, obs_timestep_number=True)
    env.reset()
    play(env, 4)
    for key in ("x", "y", "health", "shield", "cooldown", "energy"):
        before = {name: values.clone() for name, values in env.units().items()}
        values = torch.rand(3, 20) * 10 + 5
        obs, info = env.set_units(**{key: values})
        for name, now in env.units().items():
            assert torch.allclose(now, values if name == key else before[name]), f"{name} after setting {key}"
        assert obs.shape == (3, 10, env.obs_dim) and torch.allclose(obs[:, :, -1], torch.tensor(4 / 150)), (
            "no step was made"
        )
    last = torch.randint(0, 16, (3, 10))
    _, info = env.set_units(last_action=last)
    assert torch.equal(info["state"][:, -160:].reshape(3, 10, 16).argmax(2), last)


@pytest.mark.parametrize("key", ["x", "y", "health", "shield", "cooldown", "energy", "last_action"])
def test_set_units_refuses_other_shapes(key):
    env = envs.make("5m_vs_6m", num_envs=2)
    env.reset()
    expected = r"\(2, 5\)" if key == "last_action" else r"\(2, 11\)"
    for shape in ((2, 4), (11,), (1, 11), (2, 12)):
        with pytest.raises(ValueError, match=rf"{key}.*{expected}"):
            env.set_units(**{key: torch.zeros(shape, dtype=torch.int64)})


def test_units_are_live_views():
    env = envs.make("3m", num_envs=2)
    env.reset()
    units = env.units()
    assert all(values.shape == (2, 6) for values in units.values())
    before = units["x"].clone()
    env.step(torch.full((2, 3), EAST))
    assert (units["x"][:, :3] > before[:, :3]).all()


# ---- scripted policies ----
def test_there_are_five_policies_and_another_is_refused():
    env = envs.make("3m")
    env.reset()
    assert set(env.policies) == {"nearest", "weakest", "kite", "random", "hold"}
    with pytest.raises(ValueError, match=r"clever.*nearest.*hold"):
        env.scripted_actions("clever")


@pytest.mark.parametrize("name", MAPS)
def test_policies_only_choose_available_actions(name):
    env = envs.make(name, num_envs=10, check=False)
    seats = torch.arange(10)[:, None].expand(10, env.n_agents) % len(env.policies)
    _, info = env.reset()
    for _ in range(25):
        actions = env.scripted_actions(seats)
        assert actions.shape == (10, env.n_agents) and actions.dtype == torch.int64 and actions.device == env.device
        wrong = ~info["avail"].gather(2, actions[:, :, None])[:, :, 0]
        assert not wrong.any(), [env.policies[seat] for seat in seats[wrong].unique()]
        *_, info = env.step(actions)


def test_policies_can_differ_by_seat():
    env = envs.make("8m", num_envs=6, seed=3)
    env.reset()
    play(env, 12, "nearest")
    alone = torch.stack([env.scripted_actions(policy).clone() for policy in env.policies])  # (policy, match, agent)
    assert len({tuple(actions.flatten().tolist()) for actions in alone}) == len(env.policies), (
        "each does something else"
    )
    seats = torch.randint(0, len(env.policies), (6, 8), generator=torch.Generator().manual_seed(0))
    assert torch.equal(env.scripted_actions(seats), alone.gather(0, seats[None])[0])


def skirmish(ally_cooldown=0.0, enemy_health=(45.0, 45.0, 45.0), enemy_x=(13.0, 14.0, 15.5)):
    env = envs.make("3m")
    env.reset()
    env.set_units(
        x=torch.tensor([[10.0, 10, 10, *enemy_x]]),
        y=torch.tensor([[16.0, 17, 15, 16, 16, 16]]),
        health=torch.tensor([[45.0, 45, 45, *enemy_health]]),
        cooldown=torch.tensor([[ally_cooldown] * 3 + [0.0] * 3]),
    )
    return env


def test_nearest_attacks_the_nearest_and_walks_up_to_it():
    assert skirmish().scripted_actions("nearest").tolist() == [[ATTACK] * 3]
    assert skirmish(enemy_x=(15.0, 14.0, 13.0)).scripted_actions("nearest").tolist() == [[ATTACK + 2] * 3]
    assert skirmish(enemy_x=(20.0, 21.0, 22.0)).scripted_actions("nearest").tolist() == [[EAST] * 3]
    assert skirmish(enemy_x=(1.0, 21.0, 22.0)).scripted_actions("nearest").tolist() == [[WEST] * 3]


def test_weakest_attacks_the_lowest_health_in_reach():
    assert skirmish(enemy_health=(45.0, 20.0, 30.0)).scripted_actions("weakest").tolist() == [[ATTACK + 1] * 3]
    far_and_weak = skirmish(enemy_health=(45.0, 20.0, 30.0), enemy_x=(13.0, 25.0, 14.0))
    assert far_and_weak.scripted_actions("weakest").tolist() == [[ATTACK + 2] * 3]
    env = envs.make("2s3z", num_envs=20)
    env.reset()
    play(env, 5, "nearest")
    env.set_units(health=env.units()["health"] / torch.arange(1, 11))
    differs = (env.scripted_actions("weakest").clone() != env.scripted_actions("nearest")).any(0).tolist()
    assert differs == [kind == "stalker" for kind in env.unit_kinds[:5]]  # zealots would have to walk up to it


def test_kite_shoots_and_steps_back_while_reloading():
    assert skirmish().scripted_actions("kite").tolist() == [[ATTACK] * 3]
    assert skirmish(ally_cooldown=10.0).scripted_actions("kite").tolist() == [[WEST] * 3]


def test_hold_never_moves():
    env = skirmish(enemy_x=(20.0, 21.0, 22.0))
    assert env.scripted_actions("hold").tolist() == [[STOP] * 3]
    assert skirmish().scripted_actions("hold").tolist() == [[ATTACK] * 3]


def test_random_uses_all_that_is_available():
    env = envs.make("3m", num_envs=500)
    env.reset()
    actions = env.scripted_actions("random")
    for action in (STOP, NORTH, SOUTH, EAST, WEST):
        assert 0.15 < (actions == action).float().mean() < 0.25
    before = actions.clone()
    env.step(actions)
    assert not torch.equal(before, env.scripted_actions("random"))


@pytest.mark.parametrize("policy", ["nearest", "weakest", "kite", "hold"])
def test_medivac_heals_the_hurt(policy):
    env = envs.make("MMM")
    env.reset()
    medivac, patient = env.unit_kinds.index("medivac"), env.unit_kinds.index("marine")
    health = env.units()["health"].clone()
    health[0, patient] = 20
    env.set_units(health=health)
    assert env.scripted_actions(policy)[0, medivac] == ATTACK + patient


def test_nearest_wins_more_often_than_random():
    env = envs.make("8m", num_envs=200)
    wins = {}
    for policy in ("nearest", "random"):
        env.reset()
        wins[policy] = play(env, env.episode_limit, policy)[-1]["won"].float().mean()
    assert wins["nearest"] > wins["random"] + 0.2


# ---- one source for plain Python, CPU threads and CUDA ----
SHORT_MATCH = """
import sys, numpy as np, torch, envs
env = envs.make(sys.argv[2], num_envs=2, seed=6, n_agents=3)
env.reset()
x, y = torch.tensor([[10.0, 10, 10, 15, 15, 15]] * 2), torch.tensor([[14.0, 16, 18, 14, 16, 18]] * 2)
env.set_units(x=x, y=y)
rows = []
for step in range(6):
    obs, reward, terminated, truncated, info = env.step(env.scripted_actions("nearest" if step % 2 else "random"))
    tensors = [obs, reward, terminated, truncated, *info.values(), *env.units().values()]
    rows.append(np.concatenate([tensor.float().flatten().numpy() for tensor in tensors]))
np.save(sys.argv[1], np.stack(rows))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["3m", "smacv2/zerg_5_vs_5,conic_fov=True,released_obs=True,prob_obs_enemy=0.5"])
def test_plain_python_plays_what_compiled_code_plays(name, tmp_path):
    histories = []
    for disabled in ("0", "1"):
        file = tmp_path / f"{disabled}.npy"
        environment = {**os.environ, "NUMBA_DISABLE_JIT": disabled, "PYTHONPATH": str(Path(envs.__file__).parents[1])}
        subprocess.run([sys.executable, "-c", SHORT_MATCH, str(file), name], env=environment, check=True, timeout=300)
        histories.append(np.load(file))
    assert (histories[0][0] != histories[0][-1]).any()
    np.testing.assert_allclose(histories[1], histories[0], atol=1e-4)


@needs_cuda
@pytest.mark.parametrize(
    "name",
    ["8m", "MMM", "1c3s5z", "so_many_baneling", "2c_vs_64zg", "smacv2/terran_10_vs_11", "smacv2/protoss_5_vs_5",
     "smacv2/zerg_20_vs_23,prob_obs_enemy=0.5,action_mask=False", "smacv2/protoss_5_vs_5,conic_fov=True"],
)  # fmt: skip
def test_cuda_plays_what_the_cpu_plays(name):
    cpu, gpu = (envs.make(name, num_envs=1000, seed=8, device=device, check=False) for device in ("cpu", "cuda"))
    cpu.reset()
    gpu.reset()
    equal = torch.ones(1000, dtype=torch.bool)
    for _ in range(20):
        actions = cpu.scripted_actions("random")
        expected = shown(cpu, cpu.step(actions))
        after = shown(gpu, gpu.step(actions.to("cuda")))
        for key, tensor in expected.items():
            there = after[key].cpu()
            assert there.dtype == tensor.dtype
            equal &= torch.isclose(there.float(), tensor.float(), atol=1e-4).reshape(1000, -1).all(1)
    assert equal.float().mean() >= 0.99


@needs_cuda
def test_cuda_step_neither_waits_nor_allocates():
    env = envs.make("8m", num_envs=256, device="cuda")
    env.reset()
    actions = env.scripted_actions("nearest").clone()
    env.step(actions)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            env.step(actions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]) == before


@needs_cuda
def test_cuda_policies_are_those_of_the_cpu():
    cpu, gpu = (envs.make("MMM", num_envs=100, seed=8, device=device, check=False) for device in ("cpu", "cuda"))
    cpu.reset()
    gpu.reset()
    for policy in cpu.policies:
        actions = gpu.scripted_actions(policy)
        assert actions.device.type == "cuda"
        assert (actions.cpu() == cpu.scripted_actions(policy)).float().mean() > 0.99

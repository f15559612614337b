"""What every environment of four functions keeps: seeds, snapshots, autoreset, plain Python, CUDA."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from worlds import assert_same, shown

import envs
from envs import compiler

COPIES = 8
WORLDS = {  # id -> options, one of each program
    "stag_hunt_5x5_3h1s": {"limit": 9, "pieces": 2, "view_radius": 2, "strengths": (1, 2, 3, 4)},
    "Foraging-2s-6x7-3p-4f-pen-v3": {"limit": 9, "patience": 1},
    "simple_tag_6v2": {"limit": 9},
    "kuhn": {"limit": 12},
    "matrix_ipd": {"limit": 9},
    "coin_game": {"limit": 9},
    "snowdrift_4x4": {"limit": 12, "n_agents": 3, "drifts": 4},
}
MORE = {"stag_hunt_4x4": {"limit": 9}, "foraging_orders": {"limit": 9}, "popp": {"limit": 9}}  # other branches of these
EVERY_WORLD = pytest.mark.parametrize("name", {**WORLDS, **MORE})
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")


def make(name, num_envs=COPIES, **options):
    return envs.make(name, num_envs, **{**WORLDS, **MORE}[name], **options)


def drawn_policies(env, seed=0):
    shape = env.num_envs, env.n_agents
    return torch.randint(len(env.policies), shape, generator=torch.Generator().manual_seed(seed)).to(env.device)


@EVERY_WORLD
def test_seeds(name):
    first, same, other, more = (make(name, n, seed=seed) for n, seed in ((16, 5), (16, 5), (16, 6), (32, 5)))
    for env in (first, same, other, more):
        env.reset()
    different = False
    for _ in range(12):
        actions = [env.scripted_actions(drawn_policies(more)[: env.num_envs]) for env in (first, same, other, more)]
        results = [shown(env.step(action)) for env, action in zip((first, same, other, more), actions)]
        assert_same(results[0], results[1])
        assert_same(results[0], {key: tensor[:16] for key, tensor in results[3].items()})
        different |= not torch.equal(results[0]["obs"], results[2]["obs"])
    assert different
    states = [env.reset()[1]["state"].clone() for env in (first, same)]
    assert torch.equal(*states) and torch.equal(first.reset(seed=9)[0], same.reset(seed=9)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_threads_play_what_one_plays(name, threads):
    few, many = make(name, 4, seed=5), make(name, 16, seed=5)
    first, second = shown(few.reset()), shown(many.reset())
    for step in range(13):
        assert_same(first, {key: tensor[:4] for key, tensor in second.items()})
        policy = drawn_policies(many, step)
        actions = few.scripted_actions(policy[:4]), many.scripted_actions(policy)
        assert torch.equal(actions[0], actions[1][:4])
        first, second = shown(few.step(actions[0])), shown(many.step(actions[1]))


@EVERY_WORLD
def test_reset_of_some_leaves_the_others(name):
    env = make(name, 16)
    env.reset()
    for step in range(5):
        before = shown(env.step(env.scripted_actions(drawn_policies(env, step))))
    mask = torch.arange(16) % 3 == 0
    after = shown(env.reset(mask=mask))
    assert_same({key: before[key] for key in after}, after, ~mask)
    snapshot = env.snapshot()
    assert after["alive"][mask].any() and not env.steps[mask].any() and env.steps[~mask].all()
    assert not snapshot["reward"][mask].any() and not snapshot["earned"][mask].any()


@EVERY_WORLD
def test_a_snapshot_holds_everything(name):
    env, other = make(name, 16, seed=1), make(name, 16, seed=2)
    policy = drawn_policies(env)
    env.reset()
    for _ in range(5):
        env.step(env.scripted_actions(policy))
    obs, info = other.restore(env.snapshot())
    assert torch.equal(obs, env.obs) and torch.equal(info["avail"], env.info["avail"])
    for _ in range(10):
        assert_same(*(shown(each.step(each.scripted_actions(policy))) for each in (env, other)))


@EVERY_WORLD
def test_autoreset_shows_the_last_of_the_old_match_and_the_first_of_the_new(name):
    by_itself, by_hand = (make(name, 64, autoreset=autoreset) for autoreset in (True, False))
    policy = drawn_policies(by_hand)
    by_itself.reset()
    by_hand.reset()
    endings = 0
    for _ in range(30):
        actions = by_hand.scripted_actions(policy)
        assert torch.equal(by_itself.scripted_actions(policy), actions)
        auto, hand = shown(by_itself.step(actions)), shown(by_hand.step(actions))
        over = hand["terminated"] | hand["truncated"]
        for key in ("reward", "terminated", "truncated", "won"):
            assert torch.equal(auto[key], hand[key])
        for key in ("obs", "state", "avail"):
            assert torch.equal(auto["final_" + key][over], hand[key][over])
        endings += over.sum()
        fresh = shown(by_hand.reset(mask=over))
        for key in ("obs", "state", "avail", "alive"):
            assert torch.equal(auto[key], fresh[key])
    assert endings >= 128


@EVERY_WORLD
def test_scripted_actions_are_available_also_in_a_match_that_is_over(name):
    env = make(name, 64, check=True)
    env.reset()
    for step in range(env.episode_limit + 2):
        obs, _, _, _, info = env.step(env.scripted_actions(drawn_policies(env, step)))
        assert env.single_observation_space.contains(obs[step % 64].numpy())
    assert not obs.any() and not info["alive"].any() and (info["avail"].sum(-1) == 1).all()


# ---- the same everywhere ----
def history(name, device="cpu", num_envs=COPIES, matches=1):
    """Some steps of everything, as one array."""
    env = make(name, num_envs, seed=7, device=device, autoreset=True, check=False, matches_per_episode=matches)
    rows = []
    env.reset()
    for step in range(16 * matches):
        actions = env.scripted_actions(drawn_policies(env, step // 4))
        tensors = [actions.clone(), *shown(env.step(actions)).values(), *env.snapshot().values()]
        rows.append(np.concatenate([tensor.cpu().double().flatten().numpy() for tensor in tensors]))
    return np.stack(rows)


@pytest.mark.slow
def test_plain_python_plays_what_compiled_code_plays(tmp_path):
    file, here = tmp_path / "history.npz", Path(__file__)
    folders = os.pathsep.join([str(here.parents[2]), str(here.parent)])
    program = (
        "import sys, numpy, test_worlds as test\n"
        "numpy.savez(sys.argv[1], **{name: test.history(name) for name in {**test.WORLDS, **test.MORE}})"
    )
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": folders}
    subprocess.run([sys.executable, "-c", program, str(file)], env=environment, check=True, timeout=600)
    with np.load(file) as plain:
        for name in {**WORLDS, **MORE}:
            compiled = history(name)
            assert (compiled[0] != compiled[-1]).any()
            np.testing.assert_array_equal(plain[name], compiled)


@needs_cuda
@pytest.mark.parametrize("matches", [1, 3])
@pytest.mark.parametrize("name", {**WORLDS, **MORE})
def test_cuda_plays_what_the_cpu_plays(name, matches):
    """To the last bit."""
    expected = history(name, "cpu", 1000, matches)
    np.testing.assert_array_equal(expected, history(name, "cuda", 1000, matches))


def loops(n, lane, lanes):
    """Loops that assign their own counter or their bounds; the last one as lanes share units."""
    total = 0
    for _ in range(n % 7):
        _, total = 50, total + 1
    for k in range(2, n):
        n -= 1
        if k == 4:
            continue
        for _ in range(3):
            for _ in range(2):
                total += k
    for unit in range(lane, n, lanes):
        total, n = total + unit, n + 1
        lanes += 0
    return total


def test_loops_are_rewritten_for_cuda_with_the_same_meaning():
    """There they count in 32 bits, by while."""
    tree = ast.parse(inspect.getsource(loops))
    scope = {"int32": int}
    rewritten = ast.fix_missing_locations(compiler._CountedLoops().visit(tree))
    exec(compile(rewritten, "rewritten", "exec"), scope)
    assert "for" not in {type(node).__name__.lower() for node in ast.walk(rewritten)}
    for n in range(20):
        for lane in range(3):
            assert scope["loops"](n, lane, 3) == loops(n, lane, 3)

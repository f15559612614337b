"""The example of docs/environments.md, "A new environment in one file": it is short, and plays as it says."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pettingzoo.test import parallel_api_test

import envs
from envs.pettingzoo import parallel_env

ROOT = Path(__file__).parents[2]
CHAPTER = (
    (ROOT / "docs" / "environments.md").read_text(encoding="utf-8").split("## 4. A new environment in one file")[1]
)
EXAMPLE, USE = (block.split("```")[0] for block in CHAPTER.split("```python\n")[1:])
LEFT, RIGHT, STAY = range(3)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")


def load(folder, text=EXAMPLE):
    """The module `meet` with this text."""
    file = folder / "meet.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("meet", file)
    sys.modules["meet"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def meet(tmp_path_factory):
    yield load(tmp_path_factory.mktemp("example"))
    del sys.modules["meet"]


def history(env, policy="come", steps=40):
    """All that is returned in these steps, a row each."""
    rows = []
    env.reset(seed=3)
    for _ in range(steps):
        *tensors, info = env.step(env.scripted_actions(policy))
        rows.append(np.concatenate([tensor.cpu().double().flatten() for tensor in (*tensors, *info.values())]))
    return np.stack(rows)


def test_it_is_short_and_in_good_style():
    assert len(EXAMPLE.splitlines()) <= 60
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(ROOT / "envs" / "meet.py"), "-"]
        result = subprocess.run(ruff, cwd=ROOT, input=EXAMPLE, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def test_it_is_used_as_shown(meet, capsys):
    exec(USE, {})
    assert 0.45 < float(capsys.readouterr().out[len("tensor(") : -2]) < 0.55


def test_a_plain_restatement_plays_the_same(meet):
    """Under random actions, some of them not available or none at all."""
    cells, grid, chance = 6, np.eye(6), np.random.default_rng(0)
    env = meet.Meet("meet", 64, cells=cells, check=False)
    places = env.reset(seed=1)[0][:, :, :cells].argmax(2).tolist()
    assert {tuple(place) for place in places} == {(left, right) for left in (0, 1, 2) for right in (3, 4, 5)}
    for step in range(1, env.episode_limit + 1):
        actions = chance.integers(-1, 4, (64, 2))
        obs, reward, terminated, truncated, info = env.step(actions)
        for m, place in enumerate(places):
            playing = place[0] != place[1]
            if playing:
                for a, action in enumerate(actions[m]):
                    place[a] = min(max(place[a] + (action == RIGHT) * 1 - (action == LEFT) * 1, 0), cells - 1)
            met = place[0] == place[1]
            assert (terminated[m], truncated[m]) == (met, not met and step == env.episode_limit)
            assert info["won"][m] == met and reward[m].tolist() == [met and playing] * 2
            assert info["alive"][m].tolist() == [playing] * 2
            if playing:
                np.testing.assert_array_equal(obs[m, 0], grid[place].flatten())
                np.testing.assert_array_equal(obs[m, 1], grid[place[::-1]].flatten())
                np.testing.assert_array_equal(info["state"][m], obs[m, 0])
                assert info["avail"][m].tolist() == [[cell > 0, cell < cells - 1, True] for cell in place]
            else:
                assert not obs[m].any() and info["avail"][m].tolist() == [[False, False, True]] * 2


@pytest.mark.parametrize("policies", [("come", "come"), ("come", "wait"), ("wait", "come"), ("wait", "wait")])
def test_how_soon_they_meet(meet, policies):
    env = meet.Meet("meet", 64)
    left, right = env.reset(seed=1)[0][:, :, :8].argmax(2).unbind(1)
    speed = policies.count("come")
    steps = (right - left) / speed if speed else torch.full((64,), torch.inf)
    steps[steps != steps.round()] = torch.inf  # they pass each other by
    numbers = torch.tensor([env.policies.index(policy) for policy in policies]).expand(64, 2)
    for step in range(1, env.episode_limit + 1):
        *_, info = env.step(env.scripted_actions(numbers))
        assert info["won"].tolist() == (steps <= step).tolist()


@pytest.mark.slow
def test_plain_python_plays_what_compiled_code_plays(meet, tmp_path):
    file, folder = tmp_path / "history.npy", Path(meet.__file__).parent
    program = (
        "import sys, numpy, meet, test_new_environment as test\n"
        "env = meet.Meet('meet', 20, autoreset=True)\n"
        "numpy.save(sys.argv[1], test.history(env))"
    )
    folders = os.pathsep.join(map(str, (folder, ROOT, Path(__file__).parent)))
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": folders}
    subprocess.run([sys.executable, "-c", program, str(file)], env=environment, check=True, timeout=300)
    np.testing.assert_array_equal(np.load(file), history(meet.Meet("meet", 20, autoreset=True)))


@needs_cuda
def test_cuda_plays_what_the_cpu_plays(meet):
    played = [history(meet.Meet("meet", 1000, device, autoreset=True)) for device in ("cpu", "cuda")]
    np.testing.assert_array_equal(*played)


def test_make_and_the_bridges_know_it_by_its_entry(meet, monkeypatch):
    monkeypatch.setitem(envs.KINDS, "meet", meet.Meet)
    assert "meet" in envs.list_ids() and envs.make("meet", cells=12).obs_dim == 24
    with pytest.raises(ValueError, match=r"no option 'rows': .*cells"):
        envs.make("meet", rows=2)
    with pytest.raises(ValueError, match="2 agents, not 3"):
        envs.make("meet", n_agents=3)
    parallel_api_test(parallel_env("meet"), num_cycles=100)


@pytest.mark.slow
def test_an_edit_is_compiled_anew(meet, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "meet", meet)  # to be put back
    edited = EXAMPLE.replace("game.reward[m, 1] = met", "game.reward[m, 1] = 2 * met")
    assert edited != EXAMPLE
    for text, worth in ((EXAMPLE, 1), (edited, 2)):
        env = load(tmp_path, text).Meet("meet", cells=2)
        env.reset()
        assert env.step([[RIGHT, STAY]])[1].tolist() == [[worth, worth]]

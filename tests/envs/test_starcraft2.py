"""The real game's side of the interface, played against a stand-in for smac (tests/envs/fake_smac).

Where SMAC is installed, it is also played with SMAC itself and a stand-in for StarCraft II (tests/envs/fake_sc2.py).
"""

import dataclasses
import gc
import importlib.util
import json
import os
import platform
import re
import shlex
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import envs
from envs.batch import GameFailed
from envs.battle.data import MAPS, TERRAINS, TYPES
from envs.external import processes, starcraft2, worker
from training import episodes
from training.episodes import EpisodeRunner, RandomPlayer, Stopped
from training.team import Team

NO_OP, STOP, NORTH, SOUTH, EAST, WEST, ATTACK = range(7)
FAKE = Path(__file__).parent / "fake_smac"
INSTALL = 'pip install "smac @ git+https://github.com/oxwhirl/smac.git" "tensorboard==2.20.0" "wandb==0.25.0"'
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")


def is_running(pid):
    if os.name == "nt":
        listed = subprocess.run(["tasklist", "/FI", f"PID eq {pid}"], capture_output=True, text=True, check=True)
        return str(pid) in listed.stdout
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # a zombie does not run
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


class World:
    """A folder with a StarCraft II that is none, and the notes of the games that were played."""

    def __init__(self, folder):
        here = starcraft2.PLATFORMS[platform.system()]
        self.sc2, self.notes, self.made = folder / "sc2", folder / "notes", []
        binary, maps = self.sc2 / "Versions" / "Base1" / here.binary, self.sc2 / "Maps" / "SMAC_Maps"
        for needed in (binary.parent, maps, self.notes):
            needed.mkdir(parents=True)
        binary.touch()
        for name in ("3m", "MMM"):
            (maps / f"{name}.SC2Map").touch()

    def make(self, *arguments, **options):
        self.made.append(envs.make(*arguments, **options))
        return self.made[-1]

    def south(self, fault):
        (self.notes / "south").write_text(fault)

    def every_step(self, fault):
        (self.notes / "every_step").write_text(fault)

    def read(self, name):
        file = self.notes / name
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def running(self):
        return [pid for pid in set(self.read("pids")) if is_running(pid)]

    def wait_for_hangs(self, count):
        while len(self.read("hangs")) < count:
            time.sleep(0.05)

    def wait_for_the_end(self, seconds=5.0, pids=None):
        """Which of `pids` (None: all) still run after so many seconds: a killed game takes a moment to end.

        5 seconds are less than the 10 after which the process of a game ends by itself.
        """
        deadline = time.monotonic() + seconds
        while (left := set(self.running()) & set(pids or self.read("pids"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path)
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setenv("SC2PATH", str(world.sc2))
    monkeypatch.setenv("FAKE_SMAC", str(world.notes))
    yield world
    for env in world.made:
        env.close()
    assert not world.wait_for_the_end()


@pytest.mark.parametrize("name", ["3m", "MMM"])
@pytest.mark.parametrize("options", [{}, {"obs_timestep_number": True}], ids=str)
def test_observations_tell_of_the_others_where_those_of_battles_do(name, options, world):
    env, battle = world.make(f"sc2/{name}", **options), envs.make(name, **options)
    assert env.about_others.shape == (env.obs_dim,)
    env.obs_dim = battle.obs_dim  # the stand-in's observations are shorter than the game's
    assert torch.equal(env.about_others, battle.about_others)


def attack(env):
    """Everyone shoots the enemy opposite, who falls at the second shot."""
    return (torch.arange(env.n_agents) + ATTACK).repeat(env.num_envs, 1)


def everyone(env, action):
    return torch.full((env.num_envs, env.n_agents), action)


def one_goes_south(env, match=0):
    actions = everyone(env, STOP)
    actions[match, 0] = SOUTH
    return actions


def copied(result):
    *tensors, info = result
    names = ("obs",) if len(result) == 2 else ("obs", "reward", "terminated", "truncated")
    return {key: tensor.clone() for key, tensor in {**dict(zip(names, tensors)), **info}.items()}


# ---- messages where something is missing ----
def hide(monkeypatch, package):
    find_spec = starcraft2.importlib.util.find_spec
    monkeypatch.setattr(
        starcraft2.importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )


def rejection(world):
    with pytest.raises(ValueError, match="sc2/3m: ") as error:
        world.make("sc2/3m")
    assert error.value.__suppress_context__ and "\n" not in str(error.value)
    return str(error.value)


def test_missing_package(world, monkeypatch):
    hide(monkeypatch, "smac")
    message = rejection(world)
    assert message.endswith(INSTALL) and "smac is missing" in message


def test_automls_smac_in_its_place(world, monkeypatch, tmp_path):
    other = tmp_path / "site-packages"
    (other / "smac" / "facade").mkdir(parents=True)
    (other / "smac" / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    monkeypatch.syspath_prepend(other)
    message = rejection(world)
    assert message.endswith(f"pip uninstall -y smac && {INSTALL}") and str(other) in message and "AutoML" in message


def test_missing_pysc2(world, monkeypatch):
    hide(monkeypatch, "pysc2")
    message = rejection(world)
    assert message.endswith(INSTALL) and "pysc2" in message


def test_smac_that_cannot_be_imported(world):
    (world.notes / "broken").write_text("yes")
    message = rejection(world)
    assert message.endswith(INSTALL) and "Descriptors cannot be created directly." in message


def test_no_sc2path(world, monkeypatch, tmp_path):
    here = starcraft2.PLATFORMS[platform.system()]
    default = tmp_path / "nowhere"
    monkeypatch.setitem(starcraft2.PLATFORMS, platform.system(), here._replace(folder=str(default)))
    monkeypatch.delenv("SC2PATH")
    message = rejection(world)
    assert message.endswith(here.get) and "SC2PATH is not set" in message and str(default) in message


def test_sc2path_that_leads_nowhere(world, monkeypatch, tmp_path):
    monkeypatch.setenv("SC2PATH", str(tmp_path / "nowhere"))
    message = rejection(world)
    assert message.endswith(starcraft2.PLATFORMS[platform.system()].get) and str(tmp_path / "nowhere") in message


def test_no_binary(world):
    here = starcraft2.PLATFORMS[platform.system()]
    (world.sc2 / "Versions" / "Base1" / here.binary).unlink()
    message = rejection(world)
    assert message.endswith(here.get) and here.binary in message


def test_missing_map(world):
    (world.sc2 / "Maps" / "SMAC_Maps" / "3m.SC2Map").unlink()
    message = rejection(world)
    assert "map 3m" in message and message.endswith(f'-m zipfile -e SMAC_Maps.zip "{world.sc2 / "Maps"}"')


@pytest.mark.parametrize("system", starcraft2.PLATFORMS)
def test_every_system_has_a_message_how_to_get_the_game(system):
    assert "SC2PATH" in starcraft2.PLATFORMS[system].get and "https://" in starcraft2.PLATFORMS[system].get


# ---- what make takes ----
def test_ids_follow_the_battles():
    assert [name for name in envs.list_ids() if name.startswith("sc2/")] == [f"sc2/{name}" for name in MAPS]


@pytest.mark.slow
def test_it_is_imported_only_when_asked_for():
    script = "import sys, envs; print([name for name in sys.modules if 'starcraft2' in name or 'sc2' in name])"
    shown = subprocess.run([sys.executable, "-c", script], cwd=FAKE.parents[2], capture_output=True, text=True)
    assert shown.stdout.strip() == "[]", shown.stderr


def test_other_numbers_of_agents_are_rejected(world):
    with pytest.raises(ValueError, match=r"sc2/3m .*\b3 agents, not 4"):
        world.make("sc2/3m", n_agents=4)
    assert world.make("sc2/3m", n_agents=3).n_agents == 3


@pytest.mark.parametrize("option", ["obs_last_actoin", "map_name", "seeds", "auto_allies"])
def test_unknown_option_names_all_options(world, option):
    with pytest.raises(ValueError, match=option) as error:
        world.make("sc2/3m", **{option: 1})
    assert all(name in str(error.value) for name in ("autoreset", "step_timeout", "obs_last_action", "difficulty"))


@pytest.mark.parametrize("options", [{"step_timeout": 0}, {"reset_timeout": "long"}, {"difficulty": "11"}])
def test_invalid_values_are_rejected(world, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        world.make("sc2/3m", **options)


def test_options_reach_smac(world):
    env = world.make("sc2/3m", obs_timestep_number=True, obs_instead_of_state=True, difficulty="A")
    obs, info = env.reset()
    assert (env.obs_dim, env.state_dim) == (4, 12) and torch.equal(info["state"][0], obs.flatten())
    obs, *_ = env.step(everyone(env, STOP))
    assert torch.allclose(obs[0, :, 3], torch.tensor(1 / 6)) and (obs[0, :, 2] > 0).all(), "time is the last column"


# ---- the interface of the battles ----
def test_attributes_shapes_and_types(world):
    env, battle = world.make("sc2/3m", num_envs=2), envs.make("3m", num_envs=2)
    assert (env.agents, env.unit_kinds, env.n_enemies) == (battle.agents, battle.unit_kinds, battle.n_enemies)
    assert (env.n_actions, env.obs_dim, env.state_dim, env.episode_limit) == (9, 3, 6, 6)
    obs, info = env.reset()
    ours, theirs = (
        copied(env.step(everyone(env, STOP))),
        copied((battle.reset(), battle.step(everyone(battle, STOP)))[1]),
    )
    assert list(ours) == list(theirs)
    for key, tensor in ours.items():
        assert (tensor.dtype, tensor.dim(), tensor.device) == (theirs[key].dtype, theirs[key].dim(), env.device), key
    assert env.observation_space.contains(obs.numpy()) and env.action_space.contains(everyone(env, STOP).numpy())
    assert info["alive"].all() and info["avail"][:, :, STOP:].all() and not info["avail"][:, :, NO_OP].any()
    with pytest.raises(ValueError, match="agent 0"):
        env.step(everyone(env, NO_OP))


def test_match_is_won_then_frozen_and_the_others_go_on(world):
    env = world.make("sc2/3m", num_envs=2, check=False)
    env.reset()
    actions = everyone(env, STOP)
    actions[1] = attack(env)[1]
    env.step(actions)
    obs, reward, terminated, truncated, info = env.step(actions)
    assert terminated.tolist() == info["won"].tolist() == [False, True] and not truncated.any()
    assert reward.tolist() == [[0] * 3, [13] * 3]
    assert (obs != 0).any(2).all() and info["alive"].all() and not info["avail"][1, :, ATTACK:].any()
    before = copied(env.step(everyone(env, STOP)))
    assert not before["alive"][1].any() and (before["reward"] == 0).all() and (before["obs"][1] == 0).all()
    assert before["avail"][1].nonzero()[:, 1].tolist() == [NO_OP] * 3
    assert before["won"][1] and before["terminated"][1] and before["alive"][0].all()

    obs, info = env.reset(mask=torch.tensor([False, True]))
    assert torch.equal(obs[0], before["obs"][0]) and info["alive"].all() and not info["won"].any()
    assert env.scene(0)["step"] == 3 and env.scene(1)["step"] == 0
    env.step(everyone(env, STOP))
    assert len(world.read("launches")) == 2, "the game stays the same from match to match"


def test_time_limit_is_truncation(world):
    env = world.make("sc2/3m")
    env.reset()
    for step in range(6):
        obs, _, terminated, truncated, info = env.step(everyone(env, STOP))
        assert truncated.item() == (step == 5) and not terminated and not info["won"] and not info["invalid"]
    assert (obs != 0).any() and env.scene(0)["status"] == "time"


@pytest.mark.parametrize("wrong", [NO_OP, -1, 99])
def test_unavailable_action_counts_as_stop_when_not_checked(world, wrong):
    env = world.make("sc2/3m", check=False)
    env.reset()
    env.step(one_goes_south(env))  # which kills
    obs, _, _, _, info = env.step(everyone(env, wrong))
    assert info["alive"].tolist() == [[False, True, True]] and not info["invalid"].any()
    assert (obs[0, 0] == 0).all() and info["avail"][0, 0].nonzero().flatten().tolist() == [NO_OP]


def test_autoreset_plays_what_resetting_by_hand_plays(world):
    auto, hand = (world.make("sc2/3m", num_envs=2, autoreset=autoreset, check=False) for autoreset in (True, False))
    auto.reset()
    hand.reset()
    endings = torch.zeros(2)
    for step in range(14):
        actions = everyone(auto, STOP)
        actions[0] = attack(auto)[0] if step > 2 else STOP
        after, expected = copied(auto.step(actions)), copied(hand.step(actions))
        for key in ("reward", "terminated", "truncated", "won", "invalid"):
            assert torch.equal(after[key], expected[key]), key
        over = expected["terminated"] | expected["truncated"]
        endings += over
        for key in ("obs", "state", "avail"):
            assert torch.equal(after[f"final_{key}"][over], expected[key][over]), key
        if over.any():
            obs, info = hand.reset(mask=over)
            expected.update(copied((obs, info)))
        for key in ("obs", "state", "avail", "alive"):
            assert torch.equal(after[key], expected[key]), key
    assert (endings >= 2).all()


def test_matches_left_out_of_the_first_reset_wait(world):
    env = world.make("sc2/3m", num_envs=2)
    _, info = env.reset(mask=torch.tensor([True, False]))
    assert info["alive"].tolist() == [[True] * 3, [False] * 3]
    assert info["avail"][1].nonzero()[:, 1].tolist() == [NO_OP] * 3
    env.step(torch.tensor([[STOP] * 3, [NO_OP] * 3]))
    assert len(world.read("launches")) == 1


# ---- seeds ----
def test_same_seed_same_matches(world):
    first, second, other = (world.make("sc2/3m", num_envs=2, seed=seed) for seed in (5, 5, 6))
    start = first.reset()[0].clone()
    assert torch.equal(start, second.reset()[0]) and not torch.equal(start, other.reset()[0])
    assert not torch.equal(start[0], start[1])
    launched = world.read("launches")
    assert len(launched) == 6 and len(set(launched)) == 4 and all(0 <= seed < 1 << 32 for seed in launched)
    assert torch.equal(first.reset(seed=6)[0], other.reset(seed=6)[0])
    assert torch.equal(first.reset(seed=5)[0], start)


def test_reset_in_the_middle_of_the_first_match_leaves_no_game_behind(world):
    env = world.make("sc2/3m")
    start = env.reset()[0].clone()
    env.step(everyone(env, STOP))
    assert not torch.equal(env.reset()[0], start), "the next match is another one"
    assert len(world.read("launches")) == 2
    assert len(world.running()) == 2, "the process and one game"


# ---- policies ----
def test_random_policy(world):
    env = world.make("sc2/3m", num_envs=4)
    env.reset()
    seen = set()
    for _ in range(5):
        actions = env.scripted_actions("random").clone()
        assert env._outputs["avail"].gather(2, actions[:, :, None]).all()
        assert torch.equal(actions, env.scripted_actions("random")), "it draws anew each step, not each call"
        seen.add(tuple(actions.flatten().tolist()))
        env.step(actions)
    assert len(seen) == 5


def test_hold_shoots_the_nearest_and_a_medivac_heals(world):
    env = world.make("sc2/MMM")
    env.reset()
    medivac = env.unit_kinds.index("medivac")
    assert env.scripted_actions("hold").tolist() == [
        [ATTACK + a if a != medivac else ATTACK + medivac - 1 for a in range(10)]
    ]
    env.step(env.scripted_actions("hold"))
    env._units[0, 10:, 0] += 20
    assert env.scripted_actions("hold").tolist() == [
        [STOP if a != medivac else ATTACK + medivac - 1 for a in range(10)]
    ]
    with pytest.raises(ValueError, match=r"nearest.*random, hold"):
        env.scripted_actions("nearest")


# ---- scenes and replays ----
def test_scene(world):
    env = world.make("sc2/3m", num_envs=2)
    env.reset()
    actions = everyone(env, STOP)
    actions[1] = attack(env)[1]
    for _ in range(2):
        env.step(actions)
    scene = env.scene(1)
    units = scene.pop("units")
    assert scene == {
        "game": "battle", "title": "sc2/3m", "step": 2, "limit": 6, "width": 32, "height": 32, "ground": [],
        "sight": 9.0, "shots": [], "status": "won",
    }  # fmt: skip
    assert [unit["side"] for unit in units] == [0] * 3 + [1] * 3 and {unit["kind"] for unit in units} == {"marine"}
    assert [unit["health"] for unit in units] == [40] * 3 + [0] * 3 and units[0]["max_health"] == 45
    assert 10 <= units[0]["x"] < 11 and units[0]["y"] == 10 and units[0]["radius"] == 0.375
    assert units[0]["shield"] == units[0]["max_shield"] == 0
    assert env.scene()["status"] == "running"
    assert (env.render() != env.render(sight=0)).any()


def test_replay(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = world.make("sc2/3m", num_envs=2)
    with pytest.raises(RuntimeError, match=r"game 1: .*not been started"):
        env.save_replay(1)
    env.reset()
    env.step(everyone(env, STOP))
    path = env.save_replay(1, "films")
    assert Path(path).parent == tmp_path / "films" and Path(path).read_text() == "1 steps" and "3m_1" in path
    env.step(everyone(env, STOP))
    assert not env._info["invalid"].any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_replay_that_hangs_costs_the_match(world):
    (world.notes / "hang_replay").write_text("yes")
    env = world.make("sc2/3m", num_envs=2, step_timeout=2.0)
    env.reset()
    with pytest.raises(RuntimeError, match="no replay of game 0: it did not answer"):
        env.save_replay(0)
    *_, info = env.step(everyone(env, STOP))
    assert info["invalid"].tolist() == [True, False] and env.restarts == 1


def test_snapshots_are_rejected(world):
    env = world.make("sc2/3m")
    env.reset()
    for call in (env.snapshot, lambda: env.restore({})):
        with pytest.raises(NotImplementedError, match="neither saved nor restored"):
            call()


# ---- games that fail ----
@pytest.mark.parametrize(
    "fault", ["crash", "die", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("error", "exit", "hang"))]
)
def test_game_that_fails_makes_its_match_invalid_and_no_other(world, fault):
    env = world.make("sc2/3m", num_envs=2, step_timeout=2.0 if fault == "hang" else 60.0)
    env.reset()
    before = copied(env.step(everyone(env, STOP)))
    world.south(fault)
    with pytest.warns(RuntimeWarning, match="sc2/3m: game 0 is restarted"):
        after = copied(env.step(one_goes_south(env)))
    assert after["invalid"].tolist() == after["truncated"].tolist() == [True, False]
    assert not after["terminated"].any() and not after["won"].any() and (after["reward"] == 0).all()
    for key in ("obs", "state", "avail"):
        assert torch.equal(after[key][0], before[key][0]), f"{key} is the last there was"
    assert env.restarts == 1 and after["alive"][1].all()

    frozen = copied(env.step(everyone(env, STOP)))
    assert frozen["invalid"].tolist() == [True, False] and frozen["alive"].tolist() == [[False] * 3, [True] * 3]
    _, info = env.reset(mask=torch.tensor([True, False]))
    assert info["alive"].all() and not info["invalid"].any()
    for _ in range(3):
        *_, truncated, info = env.step(everyone(env, STOP))
    assert truncated.tolist() == [False, True] and not info["invalid"].any()
    assert len(world.running()) == 4, "two processes, two games"


def test_game_that_fails_is_replaced_in_the_same_step_with_autoreset(world):
    env = world.make("sc2/3m", num_envs=2, autoreset=True)
    before = copied(env.reset())
    world.south("crash")
    with pytest.warns(RuntimeWarning, match="the game crashed"):
        after = copied(env.step(one_goes_south(env, match=1)))
    assert after["invalid"].tolist() == after["truncated"].tolist() == [False, True]
    assert torch.equal(after["final_obs"][1], before["obs"][1])
    assert after["alive"].all() and not torch.equal(after["obs"][1], before["obs"][1])
    *_, truncated, info = env.step(everyone(env, STOP))
    assert not truncated.any() and not info["invalid"].any() and env.restarts == 1


@pytest.mark.parametrize(
    ("fault", "reason"), [("fail_resets", "Failed to create the socket"), ("crash_resets", "the game crashed")]
)
def test_game_that_does_not_start_is_tried_again(world, fault, reason):
    (world.notes / fault).write_text("2")
    env = world.make("sc2/3m")
    with pytest.warns(RuntimeWarning, match=reason):
        _, info = env.reset()
    assert env.restarts == 2 and info["alive"].all() and not info["invalid"].any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_game_that_never_starts_is_an_error(world):
    (world.notes / "fail_resets").write_text("99")
    env = world.make("sc2/3m", num_envs=2)
    with pytest.raises(GameFailed, match=r"failed 5 times in a row .*SystemExit: .*random_agents"):
        env.reset()
    assert not world.wait_for_the_end()
    with pytest.raises(RuntimeError, match="closed"):
        env.reset()


def make_runner(env):
    return EpisodeRunner(env, Team(env, "self"), RandomPlayer())


def test_game_that_crashes_at_every_step_ends_an_evaluation(world):
    world.every_step("crash")
    env = world.make("sc2/3m")
    message = "sc2/3m: game 0 failed 5 times in a row without finishing a match "
    with pytest.raises(GameFailed, match=message) as error, pytest.warns(RuntimeWarning) as warnings:
        make_runner(env).evaluate(1)
    assert "\n" not in str(error.value) and "the game crashed" in str(error.value)
    assert env.restarts == 4 and not world.wait_for_the_end()
    shown = [str(warning.message) for warning in warnings if "is restarted" in str(warning.message)]
    assert [f"(restart {number})" in text for number, text in enumerate(shown, 1)] == [True] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_failures_are_counted_since_the_last_match_that_was_finished(world, monkeypatch):
    monkeypatch.setattr(processes, "MAX_FAILURES", 2)
    world.south("crash")
    env = world.make("sc2/3m")
    for _ in range(2):
        env.reset()
        assert env.step(one_goes_south(env))[-1]["invalid"].all()
        env.reset()
        for _ in range(2):
            env.step(attack(env))
        assert env.terminated.all()
    env.reset()
    env.step(one_goes_south(env))
    env.reset()
    with pytest.raises(GameFailed, match="game 0 failed 2 times in a row"):
        env.step(one_goes_south(env))
    assert env.restarts == 3


def test_rounds_without_a_valid_match_end():
    from helpers import two_step_game

    game = two_step_game(2)
    runner = make_runner(game)
    runner.evaluate(2)
    game.info["invalid"].fill_(True)
    with pytest.raises(GameFailed, match=f"no valid match in {episodes.MAX_INVALID_ROUNDS} rounds in a row"):
        runner.evaluate(2)


# ---- asked to stop ----
def test_stop_is_asked_for_in_every_step(world):
    env = world.make("sc2/3m", num_envs=2)
    runner = make_runner(env)
    asked = []
    runner.should_stop = lambda: asked.append(env.steps.max().item())
    runner.play()
    assert set(asked) >= set(range(int(runner.lengths.max())))
    runner.should_stop = lambda: env.steps.max() == 1
    with pytest.raises(Stopped):
        runner.play()
    assert env.steps.tolist() == [1, 1]


@pytest.mark.parametrize("hanging", ["every_step", pytest.param("hang_resets", marks=pytest.mark.slow)])
def test_stop_is_asked_for_while_a_game_hangs(world, monkeypatch, hanging):
    (world.notes / hanging).write_text("hang")
    monkeypatch.setattr(worker, "SECONDS_TO_CLOSE", 1.0)  # then it is killed
    env = world.make("sc2/3m", step_timeout=1e6, reset_timeout=1e6)
    runner = make_runner(env)
    runner.should_stop = lambda: len(world.read("hangs")) > 0
    with pytest.raises(Stopped):
        runner.evaluate(1)
    assert env.restarts == 0 and not world.wait_for_the_end()


@posix
def test_start_can_be_interrupted(world, monkeypatch):
    """Ctrl-C while smac is imported, which here never ends."""
    slow = world.notes / "slow"
    (slow / "smac" / "env" / "starcraft2").mkdir(parents=True)
    (slow / "smac" / "__init__.py").touch()
    (slow / "smac" / "env" / "__init__.py").write_text(
        "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(600)"
    )
    monkeypatch.syspath_prepend(slow)
    monkeypatch.setattr(worker, "SECONDS_TO_CLOSE", 1.0)
    started = []
    monkeypatch.setattr(
        starcraft2,
        "GameProcess",
        lambda *given, make=starcraft2.GameProcess: started.append(make(*given)) or started[-1],
    )
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            world.make("sc2/3m", reset_timeout=1e6)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not is_running(started[0]._process.pid)


# ---- nothing is left behind ----
def test_close_ends_all_processes(world):
    env = world.make("sc2/3m", num_envs=2)
    env.reset()
    assert len(world.running()) == 4
    env.close()
    assert not world.wait_for_the_end()
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.step(everyone(env, STOP))


def test_environment_that_is_forgotten_ends_its_processes(world):
    env = envs.make("sc2/3m")
    env.reset()
    assert len(world.running()) == 2
    del env
    gc.collect()
    assert not world.wait_for_the_end()


def test_game_whose_process_was_killed_is_not_left_behind(world):
    env = world.make("sc2/3m")
    env.reset()
    process, *_, game = world.read("pids")
    os.kill(process, getattr(signal, "SIGKILL", signal.SIGTERM))
    with pytest.raises(RuntimeError, match="no replay of game 0: its process died"):
        env.save_replay(0)
    with pytest.warns(RuntimeWarning, match="its process died"):
        *_, info = env.step(everyone(env, STOP))
    assert info["invalid"].all() and env.restarts == 1
    if os.name != "nt":
        end = time.monotonic() + 10
        while is_running(game) and time.monotonic() < end:  # a busy machine takes its time to end a process
            time.sleep(0.05)
        assert not is_running(game)


SCRIPT = """
import signal, sys, torch, envs
from envs.external import worker
worker.SECONDS_TO_CLOSE = 2.0
signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background may have it ignored
env = envs.make("sc2/3m", num_envs=2, autoreset=True)
env.reset()
print("ready", flush=True)
while True:
    actions = env.scripted_actions("hold").clone()
    actions[0, 0] = int(sys.argv[1])
    env.step(actions)
"""


def start_script(action):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FAKE.parents[2]), str(FAKE)])}
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(action)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    assert "ready" in script.stdout.readline(), script.communicate()
    return script


@pytest.mark.slow
def test_exception_leaves_no_process(world):
    script = start_script(action=99)
    _, errors = script.communicate(timeout=60)
    assert script.returncode == 1 and "action 99 is not available" in errors
    assert not world.wait_for_the_end()


@posix
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "hang"])
def test_a_script_that_is_interrupted_or_killed_leaves_no_process(world, fault):
    world.south(fault)
    (world.notes / "seconds_to_close").write_text("2")
    action = SOUTH if fault else STOP
    interrupted = start_script(action)
    processes = world.running()
    assert len(processes) == 4, "two of the environment, two games"
    killed = start_script(action)
    assert len(world.running()) == 8
    world.wait_for_hangs(2 if fault else 0)
    killed.kill()
    interrupted.send_signal(signal.SIGINT)
    _, errors = interrupted.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors and not world.wait_for_the_end(pids=processes)
    killed.communicate()
    assert not world.wait_for_the_end(30)


@needs_cuda
def test_tensors_are_on_the_device(world):
    gpu, cpu = (world.make("sc2/3m", num_envs=2, device=device, check=True) for device in ("cuda", "cpu"))
    gpu.reset()
    cpu.reset()
    for _ in range(4):
        actions = gpu.scripted_actions("hold")
        assert actions.device == gpu.device
        after, expected = copied(gpu.step(actions)), copied(cpu.step(actions.cpu()))
        for key, tensor in after.items():
            assert tensor.device == gpu.device and torch.equal(tensor.cpu(), expected[key]), key
    assert after["won"].all()


# ---- SMAC and pysc2 themselves, with a program that speaks StarCraft's protocol (tests/envs/fake_sc2.py) ----
SEED = 7
OPTIONS = {
    "obs_last_action": True, "obs_pathing_grid": True, "obs_timestep_number": True, "state_timestep_number": True,
    "reward_only_positive": False, "reward_defeat": -50.0,
}  # fmt: skip


def why_no_smac():
    """None where the package smac is SMAC, and can be run."""
    if platform.system() != "Linux":
        return "the stand-in for StarCraft II is started as on Linux"
    if not all(importlib.util.find_spec(package) for package in ("smac", "pysc2")):
        return f"SMAC is not installed: {INSTALL}"
    places = importlib.util.find_spec("smac").submodule_search_locations or []
    sources = [Path(place) / "env" / "starcraft2" / "starcraft2.py" for place in places]
    if not any(source.is_file() and "class StarCraft2Env" in source.read_text() for source in sources):
        return f"the package smac is not SMAC: pip uninstall -y smac && {INSTALL}"
    return None


needs_smac = pytest.mark.skipif(why_no_smac() is not None, reason=why_no_smac() or "")
each_map = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "3m" else [pytest.mark.slow]) for name in MAPS]
)


@pytest.fixture
def sc2(tmp_path, monkeypatch):
    """sc2(name, settings, **options) -> sc2/name, played by SMAC with the stand-in for StarCraft II."""
    made = []

    def make(name, settings, **options):
        binary = tmp_path / "Versions" / "Base75689" / "SC2_x64"
        maps = tmp_path / "Maps" / "SMAC_Maps"
        for folder in (binary.parent, maps):
            folder.mkdir(parents=True, exist_ok=True)
        (maps / f"{name}.SC2Map").touch()
        command = shlex.join([sys.executable, str(FAKE.parent / "fake_sc2.py")])
        binary.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(FAKE.parents[2]))} exec {command} "$@"\n')
        binary.chmod(0o755)
        monkeypatch.setenv("SC2PATH", str(tmp_path))
        monkeypatch.setenv("FAKE_SC2", json.dumps({"seed": SEED, **settings}))
        made.append(envs.make(f"sc2/{name}", **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


def assert_same(real_result, battle_result, state_scale):
    seen, expected = copied(real_result), copied(battle_result)
    seen["state"] *= state_scale
    for key, values in seen.items():
        assert torch.allclose(values.float(), expected[key].float(), rtol=0, atol=1e-6), key


def compare(real, battle, policies, state_scale=1.0):
    """Plays a match of both with the actions of each policy of the battle; returns how they ended."""
    ends = []
    for match, policy in enumerate(policies):
        seed = SEED if match == 0 else None
        obs, info = battle.reset(seed=seed)
        assert_same(real.reset(), (obs, info), state_scale)
        over = False
        while not over:
            actions = torch.ones_like(battle.actions) if policy == "stop" else battle.scripted_actions(policy)
            actions = torch.where(info["alive"], actions, NO_OP)
            *result, info = battle.step(actions)
            assert_same(real.step(actions), (*result, info), state_scale)
            over = bool(result[-2] | result[-1])  # terminated, truncated
        ends.append("won" if info["won"] else "time" if result[-1] else "lost")
    return ends


@needs_smac
@each_map
def test_smac_shows_what_the_battles_show(sc2, name):
    real, battle = sc2(name, {}), envs.make(name)
    sizes = ("n_actions", "obs_dim", "state_dim", "episode_limit", "agents", "unit_kinds")
    assert [getattr(real, size) for size in sizes] == [getattr(battle, size) for size in sizes]
    ends = compare(real, battle, ["nearest", "random"])
    assert len(ends) == 2 and real.restarts == 0


@needs_smac
@each_map
def test_smac_at_the_time_limit_and_with_a_smaller_playable_area(sc2, name):
    """SMAC divides the places in the state by the size of the playable area, the battles by that of the map."""
    area = {"playable": [2, 3, 30, 29]}
    spec = dataclasses.replace(MAPS[name], order=("stay",))
    real, battle = sc2(name, {"stay": True, **area}), envs.make(name, map_spec=spec)
    ally_width, enemy_width = (
        base + (race == "P") + len(TYPES[spec.types][1]) for base, race in zip((4, 3), spec.races)
    )
    scale = torch.ones(battle.state_dim)
    x = [2 + a * ally_width for a in range(battle.n_agents)]
    x += [1 + battle.n_agents * ally_width + e * enemy_width for e in range(battle.n_enemies)]
    scale[x], scale[[column + 1 for column in x]] = 28 / 32, 26 / 32
    ends = compare(real, battle, ["stop"], scale)
    assert ends == ["lost" if name == "6h_vs_8z" else "time"]  # there they stand too near


@needs_smac
@pytest.mark.parametrize("name", ["2s3z", pytest.param("MMM", marks=pytest.mark.slow)])
@pytest.mark.parametrize("extra", [{}, {"obs_instead_of_state": True}])
def test_smac_with_other_options(sc2, name, extra):
    options = {**OPTIONS, **extra}
    compare(sc2(name, {}, **options), envs.make(name, **options), ["nearest"])


@needs_smac
def test_smac_whose_game_dies(sc2, tmp_path):
    real = sc2("3m", {"dies": 3, "once": str(tmp_path / "died")})
    real.reset()
    for step in range(2):
        *_, info = real.step(everyone(real, STOP))
        assert not info["invalid"].any(), step
    with pytest.warns(RuntimeWarning, match=r"game 0 is restarted .*the game crashed"):
        *_, truncated, info = real.step(everyone(real, STOP))
    assert info["invalid"].all() and truncated.all() and real.restarts == 1
    assert compare(real, envs.make("3m"), ["nearest"]) in (["won"], ["lost"])


@needs_smac
def test_replay_by_smac(sc2, tmp_path):
    real = sc2("3m", {})
    real.reset()
    assert Path(real.save_replay(0, tmp_path / "films")).read_bytes() == b"a replay"


def real_maps():
    folder = Path(os.environ.get("SC2PATH", "~/StarCraftII")).expanduser() / "Maps" / "SMAC_Maps"
    return folder if all((folder / f"{name}.SC2Map").is_file() for name in MAPS) else None


@pytest.mark.skipif(real_maps() is None, reason="SMAC's maps are not in SC2PATH")
@pytest.mark.skipif(not importlib.util.find_spec("mpyq"), reason="mpyq, which comes with pysc2, is not installed")
@pytest.mark.parametrize("name", MAPS)
def test_playable_areas_of_the_maps_are_the_whole_map(name):
    import mpyq

    content = mpyq.MPQArchive(str(real_maps() / f"{name}.SC2Map")).read_file("MapInfo")
    size, bounds = re.match(rb"IpaM.{12}(.{8}).*?Dark\0\w+\0(.{16})", content, re.DOTALL).groups()
    terrain = TERRAINS[MAPS[name].terrain].split()
    assert struct.unpack("<2I", size) == (len(terrain[0]), len(terrain))
    assert struct.unpack("<4I", bounds) == (0, 0, len(terrain[0]), len(terrain))  # left, bottom, right, top

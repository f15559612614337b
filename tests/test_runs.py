"""Runs of the training scripts: what they write, and how they stop, go on and refuse."""

import ast
import contextlib
import difflib
import errno
import gc
import importlib.util
import json
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from scripts import ROOT, SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_starcraft2 import FAKE, World

import envs
from envs.battle import Battle
from envs.starcraft2 import StarCraft2
from envs.team import read_runs

EVERY = pytest.mark.parametrize("name", SCRIPTS)
IQL, VDN, QMIX = SCRIPTS.values()
QUICK = {
    "num_envs": 4, "batch_size": 4, "buffer_size": 8, "train_frequency": 60, "total_timesteps": 600,
    "eval_interval": 300, "eval_episodes": 4, "final_eval_episodes": 6, "hidden_dim": 16, "log_interval": 0,
}  # fmt: skip
OF_THE_CLOCK = ("charts/SPS",)
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")


class Killed(BaseException):
    """What a process that is killed does not get to handle."""


def command_line(name, folder, options):
    words = [str(ROOT / f"{name}.py")]
    for key, value in {**QUICK, "run_root": folder, **options}.items():
        option = key.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{option}"] if isinstance(value, bool) else [f"--{option}", str(value)]
    return words


def train(name, folder, **options):
    """Runs a script in this process; returns the names that it had at the end."""
    before, handlers = sys.argv, {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.argv = command_line(name, folder, options)
    try:
        return runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = before
        torch.use_deterministic_algorithms(False)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def stopped(name, folder, **options):
    """Runs a script that stops after a round; returns the run's folder."""
    with pytest.raises(SystemExit, match=r"stopped at step [\d,]+; go on with --resume ") as stop:
        train(name, folder, **{"time_limit": 1e-9, **options})
    return Path(str(stop.value).split("--resume ")[1])


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """Complete runs, each made once: complete(name, env_id) -> (the run's folder, the names it had at the end)."""
    made = {}

    def get(name, env_id="3m"):
        if (name, env_id) not in made:
            names = train(name, tmp_path_factory.mktemp("complete"), env_id=env_id)
            made[name, env_id] = names["run"], names
        return made[name, env_id]

    return get


def read(file):
    return torch.load(file, weights_only=True)


def leaves(content, path=""):
    """All values in nested dictionaries and lists, by path."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(content, (list, tuple)):
        for number, value in enumerate(content):
            yield from leaves(value, f"{path}/{number}")
    else:
        yield path, content


def learned(run):
    """What two runs have in common if they went the same way: networks, optimiser, counts and evaluations."""
    saved = read(run / "checkpoint.pt")
    del saved["args"]
    return {path: value for path, value in leaves(saved) if not path.endswith("seconds")}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for path, value in one.items():
        same = torch.equal(value, other[path]) if isinstance(value, torch.Tensor) else value == other[path]
        assert same, f"{path}: {value} is not {other[path]}"


def scalars(run):
    """(step, value) of each key in the log."""
    events = EventAccumulator(str(run)).Reload()
    return {key: [(event.step, event.value) for event in events.Scalars(key)] for key in events.Tags()["scalars"]}


def curves(run):
    return {key: curve for key, curve in scalars(run).items() if key not in OF_THE_CLOCK}


# ---- smoke ----
@pytest.mark.parametrize("env_id", ["3m", "2s3z", "MMM", "stag_hunt_4x4"])
@EVERY
def test_it_runs(complete, name, env_id):
    run, names = complete(name, env_id)
    results = json.loads((run / "results.json").read_text())
    assert (results["env_id"], results["algorithm"], results["complete"]) == (env_id, name, True)
    assert results["final"]["episodes"] == 6 and len(results["final"]["returns_by_agent"]) == names["env"].n_agents
    low, high = results["final"]["win_rate_interval"]
    assert 0 <= low <= results["final"]["win_rate"] <= high <= 1
    assert results["steps"] >= 600 and results["updates"] == names["learner"].updates == results["steps"] // 60 > 0
    log = scalars(run)
    assert {"charts/episodic_return", "losses/td_loss", "eval/win_rate"} <= log.keys()
    assert ("charts/episodic_return_3" in log) == (env_id == "stag_hunt_4x4")
    for key, curve in log.items():
        steps, values = zip(*curve)
        assert sorted(steps) == list(steps) and steps[-1] <= results["steps"], key
        assert torch.isfinite(torch.tensor(values)).all(), key
    assert all(torch.isfinite(p).all() for p in names["learner"].parameters)


@pytest.mark.parametrize(
    "options",
    [
        {"share_parameters": False},
        {"share_parameters": False, "env_id": "stag_hunt_4x4"},
        {"buffer_device": "cpu"},
        {"n_agents": 8},
        {"n_agents": 2, "env_id": "stag_hunt_4x4"},
    ],
    ids=str,
)
@EVERY
def test_it_runs_with(name, options, tmp_path):
    names = train(name, tmp_path, total_timesteps=200, **options)
    seats = {"3m": 3, "stag_hunt_4x4": 4}[options.get("env_id", "3m")]
    assert read(names["run"] / "checkpoint.pt")["sizes"]["n_agents"] == options.get("n_agents", seats)
    assert names["learner"].updates > 0


@EVERY
def test_a_video_of_the_final_policy(name, tmp_path):
    names = train(name, tmp_path, total_timesteps=1, capture_video=True, env_id="stag_hunt_4x4")
    with Image.open(names["run"] / "match.gif") as video:
        assert video.n_frames > 1


def test_without_a_gpu_it_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = train("iql", tmp_path, total_timesteps=1, cuda=True)
    assert "There is no GPU that torch can use: going on with the CPU." in capsys.readouterr().out
    assert names["device"].type == "cpu" and read(names["run"] / "checkpoint.pt")["args"]["cuda"] is False


@pytest.fixture
def real_game(tmp_path, monkeypatch):
    world = World(tmp_path / "world")
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setenv("SC2PATH", str(world.sc2))
    monkeypatch.setenv("FAKE_SMAC", str(world.notes))
    yield world
    gc.collect()  # games end when their environment is forgotten
    assert not world.wait_for_the_end(20)


@pytest.mark.slow
@EVERY
def test_the_real_game(name, tmp_path, real_game, capsys):
    names = train(name, tmp_path, env_id="sc2/3m", num_envs=2, buffer_size=4, total_timesteps=100)
    names["env"].close()
    assert names["learner"].updates > 0 and names["eval_env"] is names["env"]
    run = stopped(name, tmp_path / "stopped", env_id="sc2/3m", num_envs=2, buffer_size=4)  # has no copy of the matches
    names = train(name, tmp_path / "stopped", env_id="sc2/3m", num_envs=2, buffer_size=4, resume=run)
    names["env"].close()
    assert read(run / "checkpoint.pt")["progress"]["complete"]


@pytest.mark.slow
def test_a_game_that_fails_does_not_end_a_run(tmp_path, real_game, monkeypatch):
    step, failed = StarCraft2.step, []

    def step_until_one_fails(self, actions):
        result = step(self, actions)
        if self.info["invalid"].any():
            real_game.south("")
            failed.append(self.info["invalid"].sum().item())
        return result

    real_game.south("crash")
    monkeypatch.setattr(StarCraft2, "step", step_until_one_fails)
    options = {"num_envs": 2, "batch_size": 2, "buffer_size": 64, "total_timesteps": 40}
    with pytest.warns(RuntimeWarning, match="is restarted"):
        names = train("iql", tmp_path, env_id="sc2/3m", **options)
    names["env"].close()
    assert failed and names["progress"]["episodes"] == (names["buffer"].lengths > 0).sum()
    assert (names["run"] / "results.json").exists()


# ---- repeating ----
def test_a_run_repeats_exactly(complete, tmp_path):
    for name in SCRIPTS:
        again = train(name, tmp_path / name)["run"]
        assert_same(learned(complete(name)[0]), learned(again))
        assert curves(complete(name)[0]) == curves(again)


def test_another_seed_is_another_run(complete, tmp_path):
    other = train("iql", tmp_path, seed=2)["run"]
    assert curves(complete("iql")[0]) != curves(other)
    assert "__iql__2__" in other.name


@pytest.mark.slow
def test_another_process_repeats_it(complete, tmp_path):
    options = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *command_line("qmix", tmp_path, {})], env=options, check=True, cwd=ROOT)
    (run,) = tmp_path.iterdir()
    assert_same(learned(complete("qmix")[0]), learned(run))
    assert curves(complete("qmix")[0]) == curves(run)


# ---- stopping and going on ----
def test_a_run_that_was_killed_before_its_results_writes_them(tmp_path):
    run = train("iql", tmp_path)["run"]
    before, results = learned(run), json.loads((run / "results.json").read_text())
    (run / "results.json").unlink()
    train("iql", tmp_path, resume=run)
    again = json.loads((run / "results.json").read_text())
    assert_same(before, learned(run))
    assert (again["steps"], again["updates"], again["evals"]) == (
        results["steps"],
        results["updates"],
        results["evals"],
    )


@pytest.mark.parametrize(("name", "env_id"), [("iql", "3m"), ("vdn", "stag_hunt_4x4"), ("qmix", "3m")])
def test_a_run_stopped_after_every_round_ends_as_if_it_had_not_been(complete, name, env_id, tmp_path):
    run, sessions = stopped(name, tmp_path, env_id=env_id), 1
    while not (run / "results.json").exists():
        sessions += 1
        with contextlib.suppress(SystemExit):
            train(name, tmp_path, env_id=env_id, resume=run, time_limit=1e-9)
    assert sessions > 3
    straight, _ = complete(name, env_id)
    assert_same(learned(straight), learned(run))
    assert curves(straight) == curves(run)
    assert not (run / "resume.pt").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_run_that_can_go_on(complete, number, tmp_path, monkeypatch):
    step, calls = Battle.step, []

    def step_and_signal(self, actions):
        calls.append(0)
        if len(calls) == 70:  # in the middle of a round
            signal.raise_signal(number)
        return step(self, actions)

    with monkeypatch.context() as patched:
        patched.setattr(Battle, "step", step_and_signal)
        run = stopped("iql", tmp_path, time_limit=None)
    train("iql", tmp_path, resume=run)
    assert_same(learned(complete("iql")[0]), learned(run))


@posix
@pytest.mark.slow
def test_a_signal_from_outside(tmp_path):
    words = command_line("iql", tmp_path, {"total_timesteps": 10**9})
    options = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, *words], env=options, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while "steps/s" not in process.stdout.readline():
            assert process.poll() is None
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "go on with --resume" in errors
    (run,) = tmp_path.iterdir()
    assert sorted(file.name.split(".")[0] for file in run.iterdir()) == ["checkpoint", "events", "resume"]
    assert IQL.as_before(IQL.Args(resume=str(run))).total_timesteps == 10**9


def test_without_its_buffer_a_run_goes_on_with_an_empty_one(tmp_path, capsys):
    options = {"save_buffer": False, "buffer_size": 64, "batch_size": 4}
    run = stopped("iql", tmp_path, **options)
    assert not {"episodes", "lengths"} & read(run / "resume.pt").keys()
    before = read(run / "checkpoint.pt")["progress"]["episodes"]
    names = train("iql", tmp_path, resume=run, **options)
    assert "saved without its buffer: going on with an empty one" in capsys.readouterr().out
    assert (names["buffer"].lengths > 0).sum() == names["progress"]["episodes"] - before


def test_without_resume_pt_a_run_goes_on_with_new_matches(tmp_path, capsys):
    run = stopped("iql", tmp_path)
    (run / "resume.pt").unlink()
    train("iql", tmp_path, resume=run)
    assert "going on with new matches and an empty buffer" in capsys.readouterr().out


def test_what_cannot_be_resumed(complete, tmp_path):
    run, done = stopped("iql", tmp_path), complete("iql")[0]
    cases = [
        (IQL, {"resume": str(tmp_path)}, r"there is no checkpoint\.pt"),
        (VDN, {"resume": str(run)}, r"is a run of iql\.py"),
        (IQL, {"resume": str(done)}, "that run is complete"),
        (
            IQL,
            {"resume": str(run), "gamma": 0.5, "hidden_dim": 7},
            r"--gamma 0\.99 \(not 0\.5\), --hidden-dim 16 \(not 7\)",
        ),
        (IQL, {"resume": str(run), "env_id": "8m"}, r"--env-id 3m \(not 8m\)"),
    ]
    for module, options, message in cases:
        with pytest.raises(SystemExit, match=message):
            module.as_before(module.Args(**options))
    args = IQL.as_before(IQL.Args(resume=str(run), time_limit=5.0, hidden_dim=16, track=True))
    assert (args.num_envs, args.hidden_dim, args.time_limit, args.track) == (4, 16, 5.0, True)


def test_a_run_of_before_there_was_an_option_goes_on(tmp_path):
    run = stopped("iql", tmp_path)
    saved = read(run / "checkpoint.pt")
    del saved["args"]["init"]
    torch.save(saved, run / "checkpoint.pt")
    assert IQL.as_before(IQL.Args(resume=str(run))).init is None


@EVERY
def test_a_run_with_an_option_that_is_gone_plays_but_does_not_go_on(name, tmp_path):
    run = stopped(name, tmp_path)
    saved = read(run / "checkpoint.pt")
    saved["args"]["updates_per_round"] = 16
    torch.save(saved, run / "checkpoint.pt")
    env = envs.make("3m")
    assert SCRIPTS[name].load_policy(run, env)(*env.reset()).shape == (1, 3)
    with pytest.raises(SystemExit, match="of another version: it has updates_per_round"):
        SCRIPTS[name].as_before(SCRIPTS[name].Args(resume=str(run)))


@EVERY
def test_saving_takes_nothing_from_the_log(name, tmp_path, monkeypatch):
    """A line has the mean over all updates since the line before, whether or not there was a save between them."""
    rounds, reset = [0], Battle.reset

    def counted(env, *arguments, **options):
        rounds[0] += 1
        return reset(env, *arguments, **options)

    monkeypatch.setattr(Battle, "reset", counted)
    monkeypatch.setattr(time, "time", lambda: float(rounds[0]))  # a clock that saving does not move
    found = []
    for interval in (1e9, 0):
        rounds[0] = 0
        options = {"log_interval": 3, "checkpoint_interval": interval, "total_timesteps": 2000}
        log = scalars(train(name, tmp_path / str(interval), **options)["run"])
        found.append({key: curve for key, curve in log.items() if key.startswith("losses/")})
    assert found[0] == found[1] and len(found[0]["losses/td_loss"]) > 2


# ---- starting from another run ----
def networks(run):
    saved = read(run / "checkpoint.pt")
    return dict(leaves({which: saved[which] for which in ("online", "target")}))


@pytest.mark.parametrize(("name", "earlier"), [("iql", "qmix"), ("vdn", "iql"), ("qmix", "qmix"), ("qmix", "vdn")])
def test_a_run_starts_from_the_networks_that_both_have(complete, name, earlier, tmp_path):
    run, _ = complete(earlier)
    begun = train(name, tmp_path, init=run, batch_size=8, total_timesteps=1)  # too little for an update
    assert begun["learner"].updates == 0 and not begun["learner"].optimizer.state
    before, after = networks(run), networks(begun["run"])
    both = [key for key in after if "/agents/" in key or (name == earlier and "/mixer/" in key)]
    assert len(both) == (2 * (8 + 8) if name == earlier else 2 * 8)
    assert_same({key: before[key] for key in both}, {key: after[key] for key in both})
    key = "agents/out.weight"
    assert not torch.equal(before[f"/online/{key}"], before[f"/target/{key}"])


def test_a_mixer_for_other_seats_is_a_new_one(complete, tmp_path):
    run, _ = complete("qmix")
    begun = train("qmix", tmp_path, init=run, team="2nearest1learner", batch_size=8, total_timesteps=1)["run"]
    before, after = networks(run), networks(begun)
    assert torch.equal(before["/online/agents/out.weight"], after["/online/agents/out.weight"])
    assert before["/online/mixer/first.weight"].shape != after["/online/mixer/first.weight"].shape


@EVERY
def test_what_a_run_cannot_start_from(complete, name, tmp_path):
    run, done = stopped("iql", tmp_path / "stopped"), complete("iql")[0]
    separate = train("iql", tmp_path / "separate", share_parameters=False, total_timesteps=1)["run"]
    cases = [
        ({"init": tmp_path / "nowhere"}, r"--init .*nowhere: there is no checkpoint\.pt"),
        ({"init": done, "env_id": "8m"}, r"is of 3m \{'n_agents': 3, .*; this is 8m \{'n_agents': 8, "),
        ({"init": done, "n_agents": 5}, r"is of 3m \{'n_agents': 3, .*; this is 3m \{'n_agents': 5, "),
        ({"init": done, "hidden_dim": 8}, r"a run of iql\.py with hidden_dim 16, share_parameters True: its agents do"),
        ({"init": separate}, "with hidden_dim 16, share_parameters False: its agents do not fit"),
        ({"init": done, "resume": run}, "--init starts a new run and --resume goes on with an old one"),
    ]
    for number, (options, message) in enumerate(cases):
        with pytest.raises(SystemExit, match=message):
            train(name, tmp_path / str(number), **options)
        assert not (tmp_path / str(number)).exists()


# ---- saving ----
def save_half(content, file):
    """What is on the disk when a save does not come to its end."""
    TORCH_SAVE(content, file)
    whole = Path(file).read_bytes()
    Path(file).write_bytes(whole[: len(whole) // 2])


TORCH_SAVE = torch.save


@pytest.mark.parametrize("fatal", ["half of checkpoint.pt", "half of resume.pt", "checkpoint.pt has no name yet"])
def test_killed_during_a_save(complete, fatal, tmp_path, monkeypatch, capsys):
    """What was saved before is there."""
    calls, deadly = [], 4 if "resume" in fatal else 3  # a save writes two files

    def deadly_save(content, file):
        calls.append(file)
        if len(calls) == deadly and "half" in fatal:
            save_half(content, file)
            raise Killed
        TORCH_SAVE(content, file)

    def deadly_replace(*names, replace=os.replace):
        if len(calls) == deadly:
            raise Killed
        replace(*names)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", deadly_save)
        patched.setattr(os, "replace", deadly_replace)
        with pytest.raises(Killed):
            train("iql", tmp_path, checkpoint_interval=0)
    run = calls[0].parent
    steps = [read(run / "checkpoint.pt")["progress"]["steps"], read(run / "resume.pt")["steps"]]
    assert (steps[0] == steps[1]) == ("resume" not in fatal)
    train("iql", tmp_path, resume=run)
    new_matches = "going on with new matches and an empty buffer" in capsys.readouterr().out
    assert new_matches == ("resume" in fatal)
    if not new_matches:
        assert_same(learned(complete("iql")[0]), learned(run))
        assert curves(complete("iql")[0]) == curves(run)  # what was logged after the checkpoint counts no more


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("failed to write")])
def test_a_full_disk_is_a_warning(error, tmp_path, monkeypatch, capsys):
    def full(content, file):
        save_half(content, file)
        raise error

    monkeypatch.setattr(torch, "save", full)
    run = train("iql", tmp_path, checkpoint_interval=0)["run"]
    warnings = capsys.readouterr().err
    assert f"warning: {run / 'checkpoint.pt'} was not written" in warnings and "resume.pt was not written" in warnings
    assert {file.name.split(".")[0] for file in run.iterdir()} == {"events", "results"}


def test_if_only_the_last_save_fails_the_one_before_can_be_resumed(complete, tmp_path, monkeypatch):
    def full_at_last(content, file):
        TORCH_SAVE(content, file)
        if content.get("progress", {}).get("complete"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full_at_last)
        run = train("iql", tmp_path, checkpoint_interval=0)["run"]
    assert {file.name.split(".")[0] for file in run.iterdir()} == {"checkpoint", "events", "results", "resume"}
    train("iql", tmp_path, resume=run)
    assert_same(learned(complete("iql")[0]), learned(run))


@EVERY
def test_a_checkpoint_is_small_and_plain(complete, name):
    run, _ = complete(name)
    assert (run / "checkpoint.pt").stat().st_size < 4e6
    for path, value in leaves(read(run / "checkpoint.pt")):
        assert isinstance(value, (torch.Tensor, str, int, float, bool, type(None))), path
    assert sorted(file.name.split(".")[0] for file in run.iterdir()) == ["checkpoint", "events", "results"]


def test_resume_pt_is_plain_too(tmp_path):
    for _, value in leaves(read(stopped("qmix", tmp_path) / "resume.pt")):
        assert isinstance(value, (torch.Tensor, str, int, float, bool, type(None)))


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@EVERY
def test_code_in_a_checkpoint_is_not_run(name, tmp_path):
    module, trace = SCRIPTS[name], tmp_path / "trace"
    TORCH_SAVE({"algorithm": name, "progress": Evil(trace)}, tmp_path / "checkpoint.pt")
    for load in (
        lambda: module.as_before(module.Args(resume=str(tmp_path))),
        lambda: module.load_policy(tmp_path, None),
    ):
        with pytest.raises(pickle.UnpicklingError):
            load()
    assert not trace.exists()


@EVERY
def test_the_online_network_explores_and_the_target_network_plays_greedily(complete, name):
    run, names = complete(name)
    learner, env = names["learner"], envs.make("3m", num_envs=4)
    assert names["rollout"].agents is learner.online["agents"]
    assert names["eval_rollout"].agents is learner.target["agents"]
    weights = read_runs((str(run),), env)[0]["weights"]
    assert all(torch.equal(value, learner.target["agents"].state_dict()[key]) for key, value in weights.items())
    assert any(not torch.equal(value, learner.online["agents"].state_dict()[key]) for key, value in weights.items())


@EVERY
def test_a_saved_policy_plays_as_it_was_evaluated(complete, name):
    run, names = complete(name)
    rollout = names["eval_rollout"]
    env = envs.make("3m", num_envs=4)
    env.restore(rollout.env.snapshot())
    act = SCRIPTS[name].load_policy(run, env)
    for _ in range(2):  # the second match starts without a memory of the first
        (obs, info), total = env.reset(), torch.zeros(4, 3)
        for _ in range(env.episode_limit):
            obs, reward, _, _, info = env.step(act(obs, info))
            total += reward
        torch.testing.assert_close(total, rollout.play(epsilon=0.0)[0])


def test_a_policy_of_another_map_is_refused(complete, tmp_path):
    run, _ = complete("iql")
    with pytest.raises(ValueError, match=r"is of 3m \{'n_agents': 3, .* this is 8m \{'n_agents': 8, "):
        IQL.load_policy(run, envs.make("8m"))
    twin = {**torch.load(run / "checkpoint.pt", weights_only=True), "env_id": "twin"}  # another map of the same sizes
    torch.save(twin, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"is of twin .* this is 3m "):
        IQL.load_policy(tmp_path, envs.make("3m"))


# ---- what is not finite ----
@pytest.mark.parametrize("saved_before", [True, False])
@EVERY
def test_a_run_that_is_not_finite_stops(name, saved_before, tmp_path, monkeypatch):
    step, calls = Battle.step, []

    def poisoned(self, actions):
        calls.append(0)
        result = step(self, actions)
        if len(calls) > 100:
            self.reward.fill_(float("inf"))
        return result

    monkeypatch.setattr(Battle, "step", poisoned)
    told = r"the last good checkpoint is .*checkpoint\.pt" if saved_before else "no checkpoint was saved before"
    with pytest.raises(SystemExit, match=rf"stopped at step [\d,]+: the loss was not finite; {told}"):
        intervals = (0, 1000) if saved_before else (1000, 0)  # found when it would be saved, or when it would be logged
        train(name, tmp_path, **dict(zip(("checkpoint_interval", "log_interval"), intervals)), total_timesteps=5000)
    (run,) = tmp_path.iterdir()
    assert (run / "checkpoint.pt").exists() == saved_before and not (run / "results.json").exists()
    if saved_before:
        for path, value in leaves(read(run / "checkpoint.pt")):
            assert not isinstance(value, torch.Tensor) or torch.isfinite(value).all(), path


# ---- what is refused ----
BAD = [
    ({"num_envs": 0}, "--num-envs is above 0, not 0"),
    ({"total_timesteps": -1}, "--total-timesteps is above 0, not -1"),
    ({"eval_interval": 0}, "--eval-interval is above 0, not 0"),
    ({"eval_episodes": 0}, "--eval-episodes is above 0"),
    ({"final_eval_episodes": 0}, "--final-eval-episodes is above 0"),
    ({"buffer_size": 0}, "--buffer-size is above 0"),
    ({"batch_size": 0}, "--batch-size is above 0"),
    ({"train_frequency": 0}, "--train-frequency is above 0"),
    ({"hidden_dim": 0}, "--hidden-dim is above 0"),
    ({"learning_rate": 0.0}, "--learning-rate is above 0"),
    ({"learning_rate": float("nan")}, "--learning-rate is above 0, not nan"),
    ({"max_grad_norm": -1.0}, "--max-grad-norm is above 0"),
    ({"time_limit": 0.0}, "--time-limit is above 0"),
    ({"checkpoint_interval": -1.0}, "--checkpoint-interval is from 0 up, not -1.0"),
    ({"log_interval": -1.0}, "--log-interval is from 0 up, not -1.0"),
    ({"gamma": 1.1}, "--gamma is from 0 to 1, not 1.1"),
    ({"gamma": float("nan")}, "--gamma is from 0 to 1, not nan"),
    ({"td_lambda": -0.1}, "--td-lambda is from 0 to 1"),
    ({"tau": 2.0}, "--tau is from 0 to 1"),
    ({"start_e": 1.5}, "--start-e is from 0 to 1"),
    ({"end_e": -1.0}, "--end-e is from 0 to 1"),
    ({"exploration_fraction": 3.0}, "--exploration-fraction is from 0 to 1"),
    ({"buffer_device": "gpu"}, "--buffer-device is same or cpu, not gpu"),
    ({"buffer_size": 10, "num_envs": 20}, "at least a round and a batch, 32 episodes, not 10"),
    ({"buffer_size": 40, "num_envs": 50}, "at least a round and a batch, 50 episodes, not 40"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: str(value)[:30])
@EVERY
def test_bad_values_are_refused_with_what_is_allowed(name, options, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        SCRIPTS[name].check(SCRIPTS[name].Args(**options))


@pytest.mark.parametrize("option", ["mixing_dim", "hypernet_dim"])
def test_bad_values_of_qmix(option):
    with pytest.raises(SystemExit, match=f"--{option.replace('_', '-')} is above 0, not 0"):
        QMIX.check(QMIX.Args(**{option: 0}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_id": "4m"}, "--env-id 4m: unknown environment '4m': one of 3m, "),
        ({"env_id": "MMM", "n_agents": 0}, "--env-id MMM: "),
        ({"buffer_size": 10**9}, r"does not fit into the [\d.]+ GiB that are free: --buffer-size \d+ would"),
    ],
)
@EVERY
def test_runs_that_cannot_be_made_leave_nothing_behind(name, options, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        train(name, tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_the_buffer_that_would_fit_does(monkeypatch):
    story = {"obs": torch.zeros(9, 2, 1000)}
    monkeypatch.setattr(IQL, "free_memory", lambda: 10_000_000)
    with pytest.raises(SystemExit, match=r"--buffer-size 250 would"):
        IQL.Buffer(story, 251, torch.device("cpu"), 0)
    assert IQL.Buffer(story, 250, torch.device("cpu"), 0).data["obs"].shape == (9, 250, 1000)


@pytest.mark.parametrize(
    ("options", "kilobytes", "size"),
    [
        ({"cuda": False, "team": "self"}, 1, 4096),
        ({"cuda": False, "team": "scripted"}, 100, 16384),
        ({"cuda": False, "team": "scripted"}, 256, 8192),  # 2 GiB of them
        ({"cuda": False, "team": "scripted"}, 1024, 4096),
        ({"cuda": True, "team": "self"}, 1, 8192),
        ({"cuda": True, "team": "scripted"}, 100, 32768),
        ({"cuda": True, "team": "scripted"}, 256, 16384),  # 4 GiB of them
        ({"cuda": True, "team": "scripted"}, 1024, 8192),
        ({"cuda": True, "team": "scripted"}, 4096, 4096),  # 16 GiB
        ({"cuda": True, "team": "self"}, 4096, 4096),
        ({"cuda": False, "team": "self"}, 4096, 2048),  # 8 GiB
        ({"cuda": False, "team": "self", "num_envs": 3000}, 4096, 3000),
        ({"cuda": False, "team": "self", "num_envs": 5000}, 1, 5000),
        ({"cuda": False, "team": "self", "batch_size": 6000}, 1, 6000),
    ],
)
def test_the_usual_buffer(options, kilobytes, size):
    args = IQL.Args(**{"num_envs": 4, "batch_size": 4, **options})
    assert IQL.usual_size({"obs": torch.zeros(2, 3, kilobytes * 128)}, args) == size


@pytest.mark.parametrize(
    ("env_id", "team", "sizes"),
    [
        ("3m", "self", (64, 1_000_000, 200)),
        ("3m", "scripted", (512, 4_000_000, 400)),
        ("sc2/3m", "self", (8, 1_000_000, 60)),
        ("sc2/3m", "2nearest1learner", (8, 1_000_000, 60)),
    ],
)
def test_the_usual_sizes_on_the_cpu(env_id, team, sizes):
    args = IQL.Args(env_id=env_id, team=team)
    IQL.check(args)
    assert (args.num_envs, args.total_timesteps, args.train_frequency) == sizes


@EVERY
def test_a_run_has_the_usual_buffer_and_says_so(name, tmp_path):
    names = train(name, tmp_path, buffer_size=None, total_timesteps=1)
    assert len(names["buffer"].lengths) == 4096
    assert read(names["run"] / "checkpoint.pt")["args"]["buffer_size"] == 4096


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux says so")
def test_memory_that_caches_files_counts_as_free():
    assert IQL.free_memory() >= os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2


# ---- wandb ----
@pytest.mark.slow
@EVERY
def test_wandb_is_not_needed(name, tmp_path):
    (tmp_path / "wandb.py").write_text("raise ImportError('wandb is not installed')")
    options = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(ROOT / f"{name}.py"), "--help"]
    told = subprocess.run(words, env=options, check=True, capture_output=True, text=True).stdout
    for field in SCRIPTS[name].Args.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in told
    words = command_line(name, tmp_path / "runs", {"total_timesteps": 1})
    subprocess.run([sys.executable, *words], env=options, check=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_mirrors_the_log(tmp_path):
    options = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = command_line("iql", tmp_path / "runs", {"track": True})
    subprocess.run([sys.executable, *words], env=options, check=True, cwd=ROOT)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"losses/td_loss" in file.read_bytes()


# ---- one text ----
MEANT_TO_DIFFER = {
    ("iql", "vdn"): {"Learner.loss"},
    ("vdn", "qmix"): {"Learner.__init__", "Learner.mix", "Learner.loss", "check"},
    ("iql", "qmix"): {"Learner.__init__", "Learner.loss", "check"},
}


def blocks(name):
    """The source of every function, method and field of a script, by name."""
    text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    lines, found = text.splitlines(), {}

    def add(nodes, prefix=""):
        for node, following in zip(nodes, [*nodes[1:], None]):
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{node.name}.")
            elif isinstance(node, (ast.FunctionDef, ast.AnnAssign)):
                start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
                documented = isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr)
                key = node.name if isinstance(node, ast.FunctionDef) else node.target.id
                found[prefix + key] = "\n".join(lines[start - 1 : (following if documented else node).end_lineno])

    add(ast.parse(text).body)
    return found


@pytest.mark.parametrize("pair", MEANT_TO_DIFFER, ids=" ".join)
def test_what_scripts_have_in_common_is_equal(pair):
    one, other = map(blocks, pair)
    assert len(one) > 70 and {"Args.gamma", "Rollout.play", "save", "lambda_returns"} <= one.keys() & other.keys()
    assert {key for key in one.keys() & other.keys() if one[key] != other[key]} == MEANT_TO_DIFFER[pair]


@pytest.mark.parametrize("pair", [("iql", "vdn"), ("vdn", "qmix")], ids=" ".join)
def test_neighbours_differ_in_few_lines(pair):
    texts = [(ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines() for name in pair]
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    kept = sum(block.size for block in matcher.get_matching_blocks())
    assert len(texts[0]) + len(texts[1]) - 2 * kept < 80


@EVERY
def test_every_logged_key_is_on_the_scripts_page(complete, name):
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    told = re.findall(r"`((?:charts|losses|eval)/[^`]+)`", page)
    for key in {*scalars(complete(name)[0]), *scalars(complete(name, "stag_hunt_4x4")[0])}:
        seat = re.fullmatch(r"(.*_)\d+", key)  # charts/episodic_return_0 may be charts/episodic_return_{seat}
        assert key in told or (seat and any(one.startswith(f"{seat[1]}") for one in told)), key

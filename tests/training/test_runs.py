"""Runs of the training scripts and training/run.py: what they write, how they stop and resume, and what they reject."""

import contextlib
import importlib.util
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import tyro
from helpers import (
    ALL_SCRIPTS,
    ROOT,
    SCRIPTS,
    TEAM_SCRIPTS,
    command_line,
    read_log,
    resume_file,
    stopped,
    train,
    write_run,
)
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import envs
import iql
import omg_iql
from envs.battle.battle import Battle
from envs.external.starcraft2 import StarCraft2
from experiments.results import curves as curves_of
from experiments.results import load_results, rows_of, table
from training import checkpoints, files
from training.args import buffer_size, default_buffer_size, free_memory, parse_args
from training.checkpoints import read
from training.episodes import EpisodeRunner, ScriptedPlayer, Stopped, load_runner
from training.exits import NO_MEMORY, UsageError
from training.log import Log, Metrics, Progress, duration
from training.run import Run, initialise_from, make_folder, seed_for, set_up_torch, summary_of, write_json
from training.team import Team, read_pool

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY_SCRIPT = pytest.mark.parametrize("name", SCRIPTS)
TEAM_SCRIPT = pytest.mark.parametrize("name", TEAM_SCRIPTS)
CPU = torch.device("cpu")
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")


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


def outcome(folder):
    """What two equal runs have in common: networks, optimiser, counts and evaluations."""
    saved = read(folder / "checkpoint.pt")
    del saved["args"]
    return {path: value for path, value in leaves(saved) if not path.endswith("seconds")}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for path, value in one.items():
        same = torch.equal(value, other[path]) if isinstance(value, torch.Tensor) else value == other[path]
        assert same, f"{path}: {value} is not {other[path]}"


def curves(folder):
    """The log without measured time."""
    return {key: curve for key, curve in read_log(folder).items() if key != "charts/SPS"}


def assert_same_run(folder, other):
    assert_equal(outcome(folder), outcome(other))
    assert curves(folder) == curves(other)


def files_in(folder):
    return sorted(re.split(r"[.-]", file.name)[0] for file in folder.iterdir() if not file.name.startswith("."))


# ---- complete runs ----
@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        *((name, "3m") for name in SCRIPTS),
        *((name, "stag_hunt_4x4") for name in ("iql", "belief_iql")),
        *(
            pytest.param(name, "stag_hunt_4x4", marks=pytest.mark.slow)
            for name in SCRIPTS
            if name not in ("iql", "belief_iql")
        ),
        pytest.param("qmix", "MMM", marks=pytest.mark.slow),
    ],
)
def test_a_run_completes_with_results_and_log(complete_run, name, env_id):
    names = complete_run(name, env_id)
    folder, learner = names["run"].folder, names["learner"]
    results = json.loads((folder / "results.json").read_text())
    assert (results["env_id"], results["algorithm"], results["complete"]) == (env_id, name, True)
    assert results["final"]["episodes"] == 6
    assert len(results["final"]["returns_by_agent"]) == names["team"].learner_seats.shape[1]
    low, high = results["final"]["win_rate_interval"]
    assert 0 <= low <= results["final"]["win_rate"] <= high <= 1
    assert results["steps"] >= 400 and results["updates"] == learner.updates == results["steps"] // 60 > 0
    log = read_log(folder)
    assert {"charts/episodic_return", "losses/td_loss", "eval/win_rate"} <= log.keys()
    assert ("charts/episodic_return_0" in log) == (env_id == "stag_hunt_4x4")
    for key, curve in log.items():
        steps, values = zip(*curve)
        assert sorted(steps) == list(steps) and steps[-1] <= results["steps"], key
        assert torch.isfinite(torch.tensor(values)).all(), key
    assert all(torch.isfinite(p).all() for p in learner.parameters)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"share_parameters": False}) for name in TEAM_SCRIPTS),
        ("iql", {"share_parameters": False, "env_id": "stag_hunt_4x4"}),
        ("iql", {"n_agents": 2, "env_id": "stag_hunt_4x4"}),
        ("iql", {"env_id": "2s3z", "buffer_device": "cpu"}),
        ("qmix", {"n_agents": 8}),
        ("qmix", {"team": "2nearest1learner"}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_runs_with_other_options(name, options, tmp_path):
    names = train(name, tmp_path, total_timesteps=200, **options)
    seats = {"3m": 3, "2s3z": 5, "stag_hunt_4x4": 4}[options.get("env_id", "3m")]
    assert read(names["run"].folder / "checkpoint.pt")["sizes"]["n_agents"] == options.get("n_agents", seats)
    assert names["learner"].updates > 0


def test_an_update_per_episode(tmp_path):
    names = train("iql", tmp_path, total_timesteps=200, train_frequency=0, env_id="stag_hunt_4x4")
    results = json.loads((names["run"].folder / "results.json").read_text())
    assert results["updates"] == results["episodes"] > 0  # a round is a batch, so there is no waiting for one


@pytest.mark.slow
def test_a_video_of_the_final_policy_and_the_figures_are_in_tensorboard(tmp_path):
    names = train("iql", tmp_path, total_timesteps=1, capture_video=True, env_id="stag_hunt_4x4", team="3NS1learner")
    folder = names["run"].folder
    with Image.open(folder / "match.gif") as video:
        assert video.n_frames > 1
    events = EventAccumulator(str(folder)).Reload()
    assert events.Images("eval/match")[0].encoded_image_string == (folder / "match.gif").read_bytes()
    results = json.loads((folder / "results.json").read_text())
    for group in ("final", "best", "best_script"):
        assert events.Scalars(f"{group}/episodic_return")[0].value == pytest.approx(results[group]["episodic_return"])
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= events.summary_metadata.keys()


@pytest.mark.parametrize(("env_id", "matches"), [("stag_hunt_4x4", 1), ("stag_hunt_4x4", 3), ("kuhn", 1)])
def test_the_best_script_plays_the_matches_of_the_evaluation(env_id, matches):
    """Against evaluations of their own, from the same seed, with each script in the learner's seat. Rewards are one's
    own here, so it is the best by return: in Kuhn `won` is the first player's success, and the learner is the second.
    """
    results = {}
    for policy in envs.make(env_id).policies:
        env = envs.make(env_id, num_envs=8, seed=3)
        spec, seat = ("1NS2NH1learner", "rotate") if env_id != "kuhn" else ("scripted", "1")
        team = Team(env, spec, seat=seat, seed=4, matches_per_partner=matches)
        runner = EpisodeRunner(env, team, ScriptedPlayer(env, policy))
        runner.evaluate(10)
        before = runner.state_dict()
        results[policy] = summary_of(*runner.evaluate(20))
    args, bar = iql.Args(final_eval_episodes=20), Mock()
    run = SimpleNamespace(state={"eval_runner": runner}, args=args, before_evaluation=before, bar=bar, _set_bar=Mock())
    found = Run._best_script(run)
    results = {policy: results[policy] for policy in env.default_others or env.policies}
    run._set_bar.assert_called_once_with("scripts in the learner's seat: ", len(results), "policies")
    assert [call.args for call in bar.show.call_args_list] == [(number + 1,) for number in range(len(results))]
    best = max(results, key=lambda policy: results[policy]["episodic_return"])
    assert found == {"policy": best, **results[best]}
    assert len({str(result) for result in results.values()}) == len(results)
    runner.team.used = []  # nobody else plays
    assert Run._best_script(SimpleNamespace(state={"eval_runner": runner})) is None


def test_the_last_line_says_what_the_learner_is_worth(tmp_path, capsys):
    folder = train("iql", tmp_path, team="2nearest1learner")["run"].folder
    results = json.loads((folder / "results.json").read_text())
    final, script = results["final"], results["best_script"]
    low, high = final["win_rate_interval"]
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"of 6 greedy matches won {final['win_rate']:.1%} ({100 * low:.1f} to {100 * high:.1f}), return "
        f"{final['episodic_return']:.2f}; `{script['policy']}` in its seat: {script['win_rate']:.1%}, return "
        f"{script['episodic_return']:.2f}"
    )


def test_sides_that_learn_against_each_other_have_returns_of_their_own(tmp_path, capsys):
    """The mean over both would be 0, whatever is learned; and who wins is the success of one side only."""
    folder = train("iql", tmp_path, env_id="kuhn", team="self")["run"].folder
    found, lines = load_results(folder / "results.json"), capsys.readouterr().out.splitlines()
    keys = [f"episodic_return_side_{side}" for side in (0, 1)]
    log, final = read_log(folder), found["final"]
    for key, earned in zip(keys, final["returns_by_agent"], strict=True):
        assert final[key] == pytest.approx(earned)
        for group in ("eval", "final"):
            assert log[f"{group}/{key}"][-1][1] == pytest.approx(earned)
    assert final[keys[0]] == pytest.approx(-final[keys[1]]) != 0
    assert all(row.keys() >= {*keys} for row in found["evals"])
    assert found["best"] == {"win_rate": None, "episodic_return": None}
    assert not {"eval/episodic_return", "final/episodic_return", "best/episodic_return"} & log.keys()
    assert not {"final/win_rate", "best/win_rate"} & log.keys() and not any("won" in line for line in lines)
    means = "return {:.2f} of one side, {:.2f} of the other".format(*final["returns_by_agent"])
    assert lines[-1] == f"6 greedy matches, {means}"
    groups = {("iql", "kuhn"): [found]}
    assert [cell.strip() for cell in table(rows_of(groups)).splitlines()[-1].split("|")[4:10]] == ["-"] * 6
    curves_of(groups, tmp_path / "curves.png")


# ---- progress ----
class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_final_evaluation_has_done_the_matches_of_whole_rounds():
    eval_runner = SimpleNamespace(rounds=3, env=SimpleNamespace(num_envs=16))  # the third round has begun
    bar = SimpleNamespace(unit="matches", show=lambda done: shown.append(done))
    for before, expected in ((0, 32), (2, 0)):
        shown = []
        Run.show_progress(SimpleNamespace(bar=bar, state={"eval_runner": eval_runner}, rounds_before=before))
        assert shown == [expected]


def test_progress_in_a_file_is_a_line_every_few_seconds(monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Progress, "started", 990.0)
    with Progress("playing: ", 2000, "steps", 400) as progress:
        for done in range(600, 2001, 200):
            now[0] += 2
            progress.show(done, f"error {done / 1000}")
            if done == 1600:  # within a round, what is done stays as it was
                now[0] += 3
                progress.show(done)
    assert capsys.readouterr().out.splitlines() == [
        "   14.0 s  playing: 800 of 2,000 steps (40%), 12 s left: error 0.8",
        "   18.0 s  playing: 1,200 of 2,000 steps (60%), 8 s left: error 1.2",
        "   22.0 s  playing: 1,600 of 2,000 steps (80%), 4 s left: error 1.6",
        "   25.0 s  playing: 1,600 of 2,000 steps (80%), 1 s left: error 1.6",
        "   29.0 s  playing: 2,000 of 2,000 steps (100%), 0 s left: error 2.0",
        "playing: 2,000 steps, 19 s: error 2.0",
    ]
    assert [duration(seconds) for seconds in (0.4, 99, 100, 5999, 6000)] == [
        "0 s",
        "99 s",
        "2 min",
        "100 min",
        "1.7 h",
    ]


def test_progress_in_a_terminal_is_one_bar_that_moves_within_a_round(tmp_path, monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("training.log.BAR_INTERVAL", 0.0)
    names = train("omg_iql", tmp_path, env_id="stag_hunt_4x4", total_timesteps=400, log_interval=1e9)
    shown = [part for part in re.split(r"[\r\n]", terminal.getvalue()) if "steps [" in part and "Pre" not in part]
    rounds = names["run"].progress["episodes"] / 4
    assert len({re.search(r"\| *([\d.k]+)/", part)[1] for part in shown}) > rounds  # moves within them
    assert all(terminal.getvalue().count(f"{what}: 100%") <= 3 for what in ("VAE", "CVAE"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines if line.startswith("Pre-training")] == [
        "Pre-training, play of the others", "Pre-training, VAE", "Pre-training, CVAE",
    ]  # fmt: skip
    assert not any("% " in line or " left" in line for line in lines[:-1])


def test_without_a_gpu_a_run_uses_the_cpu_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = train("iql", tmp_path, total_timesteps=1, cuda=True)
    assert "There is no GPU that torch can use: going on with the CPU." in capsys.readouterr().out
    assert names["device"].type == "cpu" and read(names["run"].folder / "checkpoint.pt")["args"]["cuda"] is False


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iql", "omg_iql"])
def test_the_real_game(name, tmp_path, real_game):
    options = {"env_id": "sc2/3m", "num_envs": 2, "buffer_size": 4}
    names = train(name, tmp_path, total_timesteps=100, **options)
    names["env"].close()
    assert names["learner"].updates > 0 and names["eval_env"] is names["env"]
    folder = stopped(name, tmp_path / "stopped", **options)  # matches of the real game cannot be saved
    names = train(name, tmp_path / "stopped", resume=folder, **options)
    names["env"].close()
    assert read(folder / "checkpoint.pt")["progress"]["complete"]


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
    assert failed and names["run"].progress["episodes"] == len(names["buffer"])
    assert (names["run"].folder / "results.json").exists()


@TEAM_SCRIPT
def test_the_online_network_explores_and_the_target_network_plays_greedily(complete_run, name):
    names = complete_run(name)
    learner = names["learner"]
    assert names["runner"].player.agents is learner.agents
    assert names["eval_runner"].player.agents is learner.target_agents
    folder, env = names["run"].folder, envs.make("3m", num_envs=4)
    for weights in (read_pool([str(folder)], env)[0].weights, load_runner(folder, env).player.agents.state_dict()):
        assert all(torch.equal(value, learner.target_agents.state_dict()[key]) for key, value in weights.items())
        assert any(not torch.equal(value, learner.agents.state_dict()[key]) for key, value in weights.items())


@TEAM_SCRIPT
def test_a_saved_policy_plays_as_it_was_evaluated(complete_run, name):
    names = complete_run(name)
    eval_runner = names["eval_runner"]
    env = envs.make("3m", num_envs=4)
    env.restore(eval_runner.env.snapshot())
    act = load_runner(names["run"].folder, env).policy
    for _ in range(2):  # the second match starts without the hidden state of the first
        (obs, info), total = env.reset(), torch.zeros(4, 3)
        for _ in range(env.episode_limit):
            obs, reward, _, _, info = env.step(act(obs, info))
            total += reward
        torch.testing.assert_close(total, eval_runner.play(epsilon=0.0).returns)


def test_a_policy_of_another_map_is_rejected(complete_run, tmp_path):
    folder = complete_run("iql")["run"].folder
    with pytest.raises(ValueError, match=r"is of 3m \{'n_agents': 3, .* this is 8m \{'n_agents': 8, "):
        load_runner(folder, envs.make("8m"))
    saved = read(folder / "checkpoint.pt")
    saved["env_id"] = saved["args"]["env_id"] = "twin"  # of the same sizes
    torch.save(saved, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"is of twin .* this is 3m "):
        load_runner(tmp_path, envs.make("3m"))


# ---- stopping and resuming ----
@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        ("iql", "3m"),
        pytest.param("vdn", "stag_hunt_4x4", marks=pytest.mark.slow),
        pytest.param("qmix", "3m", marks=pytest.mark.slow),
    ],
)
def test_a_run_stopped_after_every_round_equals_one_that_was_not(complete_run, name, env_id, tmp_path):
    """This also shows that runs repeat exactly."""
    folder, sessions = stopped(name, tmp_path, env_id=env_id), 1
    while not (folder / "results.json").exists():
        steps, sessions = read(folder / "checkpoint.pt")["progress"]["steps"], sessions + 1
        with contextlib.suppress(SystemExit):
            train(name, tmp_path, env_id=env_id, resume=folder, time_limit=1e-9)
        assert read(folder / "checkpoint.pt")["progress"]["steps"] > steps > 0  # each session plays a round
    assert sessions > 2
    assert_same_run(complete_run(name, env_id)["run"].folder, folder)
    assert files_in(folder) == ["checkpoint", *["events"] * sessions, "results"]


@pytest.mark.parametrize("name", ["iql", *(pytest.param(name, marks=pytest.mark.slow) for name in list(SCRIPTS)[1:])])
def test_a_run_reads_no_memory_that_was_not_written(complete_run, name, tmp_path, monkeypatch):
    """With NaN in all memory that torch hands out, which `set_up_torch` prevents for speed, it is the same run."""
    expected = complete_run(name)["run"].folder

    def set_up_and_fill(args):
        device = set_up_torch(args)
        assert not torch.utils.deterministic.fill_uninitialized_memory
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        assert torch.empty(9).isnan().all()
        return device

    monkeypatch.setattr("training.run.set_up_torch", set_up_and_fill)
    assert_same_run(expected, train(name, tmp_path)["run"].folder)
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("iql", {"team": "2nearest1learner", "teammate_epsilon": 0.3}),
        ("omg_iql", {"code": "sample"}),
        pytest.param("brdiv", {}, marks=pytest.mark.slow),
    ],
)
def test_evaluations_change_nothing_in_what_is_learned(name, options, tmp_path):
    once, often = (train(name, tmp_path, eval_interval=steps, **options)["run"] for steps in (400, 1))
    assert len(often.progress["evals"]) > len(once.progress["evals"])
    assert_equal(*(dict(leaves(checkpoints.read_run(run.folder)["networks"])) for run in (once, often)))


def test_another_seed_is_another_run(complete_run, tmp_path):
    other = train("iql", tmp_path, seed=2)["run"].folder
    assert curves(complete_run("iql")["run"].folder) != curves(other)
    assert "__iql__2__" in other.name


@pytest.mark.slow
def test_a_run_repeats_exactly_in_another_process(complete_run, tmp_path):
    variables = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *command_line("qmix", tmp_path, {})], env=variables, check=True, cwd=ROOT)
    (folder,) = tmp_path.iterdir()
    assert_same_run(complete_run("qmix")["run"].folder, folder)


def test_a_run_killed_before_its_results_finds_the_same_on_resuming(complete_run, tmp_path, monkeypatch):
    """With the clock set back at every look, too."""
    with monkeypatch.context() as patched:
        patched.setattr("training.run.write_json", Mock(side_effect=Killed))
        patched.setattr(time, "time", itertools.count(2e9, -3600.0).__next__)
        with pytest.raises(Killed):
            train("iql", tmp_path, env_id="stag_hunt_4x4")
    (folder,) = tmp_path.iterdir()
    assert checkpoints.read_run(folder)["progress"]["complete"]
    train("iql", tmp_path, env_id="stag_hunt_4x4", resume=folder)
    expected = complete_run("iql", "stag_hunt_4x4")["run"].folder
    assert_equal(outcome(expected), outcome(folder))
    found = [json.loads((path / "results.json").read_text()) for path in (expected, folder)]
    assert found[0]["final"] == found[1]["final"] and found[0]["best"] == found[1]["best"]
    assert found[1]["seconds"] >= 0


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_stops_a_run_which_can_be_resumed(complete_run, number, tmp_path, monkeypatch):
    step, calls = Battle.step, []

    def step_and_signal(self, actions):
        calls.append(0)
        if len(calls) == 70:  # in the middle of a round
            signal.raise_signal(number)
        return step(self, actions)

    with monkeypatch.context() as patched:
        patched.setattr(Battle, "step", step_and_signal)
        folder = stopped("iql", tmp_path, time_limit=1e9)
    train("iql", tmp_path, resume=folder)
    assert_equal(outcome(complete_run("iql")["run"].folder), outcome(folder))


@pytest.mark.slow
def test_a_run_saved_without_its_buffer_resumes_with_an_empty_one(tmp_path, capsys):
    options = {"save_buffer": False, "buffer_size": 64, "batch_size": 4}
    folder = stopped("iql", tmp_path, **options)
    assert not {"episodes", "lengths"} & read(resume_file(folder))["buffer"].keys()
    before = read(folder / "checkpoint.pt")["progress"]["episodes"]
    names = train("iql", tmp_path, resume=folder, **options)
    assert "saved without its buffer: going on with an empty one" in capsys.readouterr().out
    assert len(names["buffer"]) == names["run"].progress["episodes"] - before


@pytest.mark.slow
def test_a_run_without_its_resume_file_resumes_with_new_matches(tmp_path, capsys):
    folder = stopped("iql", tmp_path)
    resume_file(folder).unlink()
    train("iql", tmp_path, resume=folder)
    assert "going on with new matches and an empty buffer" in capsys.readouterr().out


def parse(monkeypatch, name, *words):
    """The arguments of a command line; those of the run where it resumes one."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
    return parse_args(SCRIPTS[name].Args, f"{name}.py")


def test_arguments_of_a_resumed_run(complete_run, tmp_path, monkeypatch):
    folder, complete = stopped("iql", tmp_path, log_interval=7.0), complete_run("iql")["run"].folder
    for name, words, message in (
        ("iql", ["--resume", tmp_path], r"there is no checkpoint\.pt"),
        ("vdn", ["--resume", folder], r"is a run of iql\.py"),
        ("iql", ["--resume", complete], "that run is complete"),
        ("iql", ["--resume", folder, "--gamma", 0.5, "--hidden-dim", 7],
         r"has --gamma 0\.97 \(not 0\.5\), --hidden-dim 16 \(not 7\)"),
        ("iql", ["--resume", folder, "--env-id", "8m"], r"has --env-id 3m \(not 8m\)"),
        ("iql", ["--resume", folder, "--hidden-dim", 64], r"has --hidden-dim 16 \(not 64\)"),  # the default
        ("iql", ["--resume", folder, "--init", complete], "--init starts a new run and --resume continues an old one"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=message):
            parse(monkeypatch, name, *words)
    args = parse(monkeypatch, "iql", "--resume", folder, "--time-limit", 5, "--hidden-dim", 16, "--track")
    assert (args.num_envs, args.hidden_dim, args.time_limit, args.track) == (4, 16, 5.0, True)
    assert args.log_interval == 7.0


def test_a_resumed_run_keeps_its_pool(tmp_path, monkeypatch):
    """Its pattern names the run itself by now."""
    monkeypatch.chdir(tmp_path)
    pattern, pool = "runs/3m__iql__*", ("runs/3m__iql__old", "nearest")
    write_run(tmp_path / pool[0], "iql", envs.make("3m"))
    folder = stopped("iql", "runs", team="2other1learner", pool=(pattern, "nearest"))
    for words in ((), ("--pool", pattern, "nearest"), ("--pool", *pool)):
        assert parse(monkeypatch, "iql", "--resume", folder, *words).pool == pool
    for words in (("--pool", "nearest"), ("--pool", pattern, "nearest", "kite")):
        with pytest.raises(SystemExit, match=r"has --pool \('runs/3m__iql__old', 'nearest'\) \(not"):
            parse(monkeypatch, "iql", "--resume", folder, *words)
    saved = read(folder / "checkpoint.pt")
    torch.save({**saved, "args": {**saved["args"], "pool": (pattern, "nearest")}}, folder / "checkpoint.pt")
    assert parse(monkeypatch, "iql", "--resume", folder).pool == pool, "of an older version"


def test_runs_of_other_versions(tmp_path, monkeypatch):
    """An option that a run does not have yet gets its default; with one that is gone it plays, but is not resumed."""
    folder = stopped("iql", tmp_path)
    saved = read(folder / "checkpoint.pt")
    del saved["args"]["init"]
    torch.save(saved, folder / "checkpoint.pt")
    assert parse(monkeypatch, "iql", "--resume", folder).init is None
    saved["args"]["updates_per_round"] = 16
    torch.save(saved, folder / "checkpoint.pt")
    env = envs.make("3m")
    assert load_runner(folder, env).policy(*env.reset()).shape == (1, 3)
    with pytest.raises(SystemExit, match="of another version: it has updates_per_round"):
        parse(monkeypatch, "iql", "--resume", folder)


def test_how_many_policies_a_belief_is_about_is_no_option(tmp_path, monkeypatch):
    """The team says it, and the weights. Runs of a version whose arguments had it are played and resumed."""
    with pytest.raises(SystemExit):
        parse(monkeypatch, "belief_iql", "--n-policies", 3)
    env = envs.make("stag_hunt_4x4")
    folder = stopped("belief_iql", tmp_path, env_id=env.name)
    saved = read(folder / "checkpoint.pt")
    saved["args"]["n_policies"] = 99
    torch.save(saved, folder / "checkpoint.pt")
    learner = load_runner(folder, env).player.learner
    assert learner.model.belief_shape == (3, len(env.default_others or env.policies))
    found = train("belief_iql", tmp_path, resume=folder)["run"]
    assert found.progress["complete"] and "n_policies" not in read(folder / "checkpoint.pt")["args"]


# ---- starting from another run ----
def weights_of(folder):
    return dict(leaves(read(folder / "checkpoint.pt")["networks"]))


@pytest.mark.parametrize(("name", "earlier"), [("iql", "qmix"), ("vdn", "iql"), ("qmix", "qmix"), ("qmix", "vdn")])
def test_a_run_starts_from_the_networks_that_both_have(complete_run, name, earlier, tmp_path):
    folder = complete_run(earlier)["run"].folder
    names = train(name, tmp_path, init=folder, batch_size=8, total_timesteps=1)  # too little for an update
    assert names["learner"].updates == 0 and not names["learner"].optimizer.state
    before, after = weights_of(folder), weights_of(names["run"].folder)
    both = before.keys() & after.keys()
    assert len(both) == (32 if name == earlier else 16)  # 8 tensors of each network
    assert_equal({key: before[key] for key in both}, {key: after[key] for key in both})
    assert not torch.equal(before["/agents/fc2.weight"], before["/target_agents/fc2.weight"])


def test_a_target_network_that_the_run_lacks_is_a_copy(complete_run, tmp_path):
    saved = read(complete_run("iql")["run"].folder / "checkpoint.pt")
    del saved["networks"]["target_agents"]
    torch.save(saved, tmp_path / "checkpoint.pt")
    weights = weights_of(train("iql", tmp_path, init=tmp_path, batch_size=8, total_timesteps=1)["run"].folder)
    for key, value in saved["networks"]["agents"].items():
        assert torch.equal(weights[f"/agents/{key}"], value) and torch.equal(weights[f"/target_agents/{key}"], value)


@pytest.mark.parametrize(("name", "earlier"), [("iql", "coma"), ("coma", "iql")])
def test_values_do_not_become_policies(name, earlier, tmp_path):
    folder = write_run(tmp_path / "run", earlier, envs.make("3m"))  # the networks have the same sizes
    with pytest.raises(
        SystemExit, match=rf"--init .*: the agents of a run of {earlier}\.py have .* and here they have"
    ):
        train(name, tmp_path, init=folder)


def test_a_mixer_for_other_seats_stays_new(complete_run, tmp_path):
    folder = complete_run("qmix")["run"].folder
    names = train("qmix", tmp_path, init=folder, team="2nearest1learner", batch_size=8, total_timesteps=1)
    before, after = weights_of(folder), weights_of(names["run"].folder)
    assert torch.equal(before["/agents/fc2.weight"], after["/agents/fc2.weight"])
    assert before["/mixer/w1.weight"].shape != after["/mixer/w1.weight"].shape


def test_networks_that_do_not_fit_are_rejected(complete_run, tmp_path):
    complete = complete_run("iql")["run"].folder
    separate = train("iql", tmp_path / "separate", share_parameters=False, total_timesteps=1)["run"].folder
    cases = [
        ({"init": tmp_path / "missing"}, r"--init .*missing: there is no checkpoint\.pt"),
        ({"init": complete, "env_id": "8m"}, r"is of 3m \{'n_agents': 3, .*; this is 8m \{'n_agents': 8, "),
        ({"init": complete, "n_agents": 5}, r"is of 3m \{'n_agents': 3, .*; this is 3m \{'n_agents': 5, "),
        ({"init": complete, "hidden_dim": 8}, r"the agents of a run of iql\.py have other sizes or options"),
        ({"init": separate}, r"the agents of a run of iql\.py have other sizes or options"),
    ]
    for number, (options, message) in enumerate(cases):
        with pytest.raises(SystemExit, match=message):
            train("vdn", tmp_path / str(number), **options)
        assert not (tmp_path / str(number)).exists()


# ---- saving ----
class Killed(BaseException):
    """What a process that is killed does not get to handle."""


@pytest.mark.parametrize("file", ["resume", "checkpoint"])
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("half of it is written", marks=pytest.mark.slow),
        pytest.param("before it is renamed", marks=pytest.mark.slow),
        "after it is renamed",
    ],
)
def test_killed_during_a_save(complete_run, file, moment, tmp_path, monkeypatch):
    """Whenever it is killed, the run goes on exactly: the old pair of files is valid, or the new one."""
    paths = []

    def interrupted_write(path, save, write=files.write):
        if path.name.startswith(file):
            paths.append(path)
        if len(paths) == 2 and path == paths[-1]:  # the second save
            if moment == "after it is renamed":
                write(path, save)
            else:
                with open(path.with_name(f".{path.name}.1.part"), "wb") as part:
                    save(part)
                    if "half" in moment:
                        part.truncate(part.tell() // 2)
            raise Killed
        write(path, save)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write", interrupted_write)
        with pytest.raises(Killed):
            train("iql", tmp_path, checkpoint_interval=0)
    folder = paths[0].parent
    assert resume_file(folder).exists()
    train("iql", tmp_path, resume=folder)
    assert_same_run(complete_run("iql")["run"].folder, folder)
    assert not list(folder.glob("resume*"))


def test_large_checkpoints_are_written_less_often(tmp_path, monkeypatch):
    written = []

    def slow_write(*arguments, write=checkpoints.write):
        time.sleep(0.3)
        written.append(time.monotonic())
        return write(*arguments)

    monkeypatch.setattr(checkpoints, "write", slow_write)
    run = train("iql", tmp_path, checkpoint_interval=0.1)["run"]
    assert run.save_at - written[-1] >= 3


@posix
@pytest.mark.slow
def test_killed_from_outside_in_saves(tmp_path):
    """Four kills at random moments of saves: the run goes on exactly, and no half-written file stays."""
    options = {"total_timesteps": 6000, "checkpoint_interval": 0}
    expected = outcome(train("iql", tmp_path / "whole", **options)["run"].folder)
    root = tmp_path / "killed"
    words = command_line("iql", root, options)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    rng, resume, kills = np.random.default_rng(0), [], 0
    while kills < 4:
        process = subprocess.Popen(
            [sys.executable, *words, *resume], env=variables, cwd=ROOT, stdout=subprocess.DEVNULL
        )
        seen, wanted = set(), rng.integers(2, 7)  # a save writes two files: let it get on by a save or more
        while len(seen) < wanted and process.poll() is None:
            seen.update(root.glob(f"*/.*.{process.pid}.part"))
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01))
        process.kill()
        assert process.wait() == -signal.SIGKILL, "it was complete before it was killed four times"
        kills += 1
        (folder,) = root.iterdir()
        resume = ["--resume", str(folder)]
        saved = read(folder / "checkpoint.pt")
        assert (folder / saved["resume"]).exists()
    subprocess.run([sys.executable, *words, *resume], env=variables, cwd=ROOT, check=True)
    assert_equal(expected, outcome(folder))
    assert not list(folder.glob("resume*")) and not list(folder.glob(".*.part"))


@contextlib.contextmanager
def full_disk(room=0):
    """No file can become longer than `room` bytes."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 20_000])
@pytest.mark.slow
def test_a_full_disk_does_not_end_a_run(room, tmp_path, monkeypatch, capsys):
    """From its second save on there is no room, until its fourth: it goes on, and saves then."""
    options = {"total_timesteps": 1500, "checkpoint_interval": 0}
    expected = outcome(train("iql", tmp_path / "undisturbed", **options)["run"].folder)
    for module in ("log", "run"):
        monkeypatch.setattr(f"training.{module}.RETRY", 0)
    save, saved, disk = Run.save, [], contextlib.ExitStack()

    def save_on_a_full_disk(self):
        if len(saved) == 1:
            disk.enter_context(full_disk(room))
        if len(saved) == 3:
            disk.close()
        saved.append(save(self))
        return saved[-1]

    monkeypatch.setattr(Run, "save", save_on_a_full_disk)
    with disk:
        folder = train("iql", tmp_path, **options)["run"].folder
    assert saved[:4] == [True, False, False, True] and all(saved[3:])
    warnings = capsys.readouterr().err
    assert "warning: disk full: " in warnings and "was not written; the run goes on" in warnings
    assert "Traceback" not in warnings and "Exception" not in warnings
    assert_equal(expected, outcome(folder))
    assert set(files_in(folder)) == {"checkpoint", "events", "results"}
    assert read_log(folder)["losses/td_loss"][-1][0] == read(folder / "checkpoint.pt")["progress"]["steps"]


def test_a_disk_that_stays_full_is_an_error_in_the_end(tmp_path, capsys):
    with full_disk(), pytest.raises(SystemExit, match="the results could not be written to ") as end:
        train("iql", tmp_path)
    assert end.value.code == 1 and "greedy matches won" in capsys.readouterr().out
    with full_disk(), pytest.raises(SystemExit, match="not saved; no checkpoint was saved before") as end:
        train("iql", tmp_path, time_limit=1e-9)
    assert end.value.code == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_lines_that_cannot_be_printed_are_dropped(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", Mock(write=Mock(side_effect=OSError("full"))))
        assert not checkpoints.write({}, tmp_path / "missing" / "file")
        assert not write_json({}, tmp_path / "missing" / "file")
        log = Log(iql.Args(), tmp_path)
        log._write(Mock(side_effect=OSError("full")))
        assert log.failed and UsageError("wrong").code == 2
    read, write = os.pipe()
    os.close(read)  # as by `| head`
    for file in ("/dev/full", write):
        for text in (
            open(file, "w", closefd=file != write),  # noqa: SIM115
            io.TextIOWrapper(open(file, "wb", buffering=0, closefd=file != write), write_through=True),  # noqa: SIM115 (python -u)
        ):
            lenient = files.lenient(text)
            assert lenient is not text and files.lenient(lenient) is lenient and not lenient.isatty()
            print("x" * 10**6, file=lenient, flush=True)
            lenient.close()
    assert files.lenient(None).write("x") == 1  # closed before the start
    words, variables = command_line("iql", tmp_path, {"total_timesteps": 1}), {**os.environ, "OMP_NUM_THREADS": "1"}
    with open("/dev/full", "w") as full:
        subprocess.run([sys.executable, *words], env=variables, check=True, cwd=ROOT, stdout=full, stderr=write)
    assert list(tmp_path.glob("*/results.json"))


def test_a_run_whose_folder_is_gone_ends(tmp_path, monkeypatch):
    count = Run.count
    monkeypatch.setattr(Run, "count", lambda self, *numbers: shutil.rmtree(self.folder) or count(self, *numbers))
    with pytest.raises(SystemExit, match=r"the run folder .* is gone: nothing can be saved"):
        train("iql", tmp_path, checkpoint_interval=0)


def test_runs_started_at_once_have_folders_of_their_own(tmp_path):
    args = iql.Args(run_root=str(tmp_path / "runs"))
    found = [make_folder(args, 1000.0) for _ in range(3)]
    assert [folder.name for folder in found] == [f"3m__iql__1__1000{suffix}" for suffix in ("", "-2", "-3")]
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "runs", "\0"):
        with pytest.raises(SystemExit, match=r"--run-root .*: no folder can be made there"):
            make_folder(iql.Args(run_root=str(root)), 0)
    with pytest.raises(SystemExit, match=r"no folder can be made there \(File name too long\)") as end:
        make_folder(iql.Args(run_root=str(tmp_path), exp_name="x" * 300), 0)
    assert end.value.code == 2
    with pytest.raises(SystemExit, match=r"--exp-name is a name without a path, not 'v1\.\.2'"):
        iql.check_args(iql.Args(exp_name="v1..2"))  # its checkpoint would not be accepted


def test_a_folder_in_use_is_not_resumed(tmp_path):
    folder = stopped("iql", tmp_path)
    assert files.is_locked(folder) is None
    lock = files.FolderLock(folder)
    lock.acquire()
    assert files.is_locked(folder) == f"process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(SystemExit, match=f"is in use by process {os.getpid()} on ") as end:
        train("iql", tmp_path, resume=folder)
    assert end.value.code == 2
    lock.release()
    train("iql", tmp_path, resume=folder)


# ---- the end of a program ----
@posix
def test_signals_after_the_end_of_a_run_do_not_change_its_exit_code(tmp_path, monkeypatch):
    release, found = files.FolderLock.release, []
    note = lambda lock: found.append(signal.getsignal(signal.SIGTERM)) or release(lock)  # noqa: E731
    monkeypatch.setattr(files.FolderLock, "release", note)  # the last thing that a run does
    train("iql", tmp_path, total_timesteps=1)
    assert found == [signal.SIG_IGN]


@posix
@pytest.mark.slow
def test_exit_codes(tmp_path, monkeypatch):
    """A run that is interrupted, again and again, is saved; so is one whose parent is gone."""
    codes, processes = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, "EOF": 143}, {}
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    options = {"total_timesteps": 10**9, "log_interval": 0.5}  # few lines: nobody reads them until its turn comes
    for way in codes:
        processes[way] = subprocess.Popen(
            [sys.executable, *command_line("iql", tmp_path / way, options)], cwd=ROOT, text=True,
            env={**variables, "OMG_STOP_ON_EOF": str(int(way == "EOF"))}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also where these tests ignore it
        )  # fmt: skip
    for way, process in processes.items():
        with process:
            while "steps/s" not in process.stdout.readline():
                assert process.poll() is None
            if way == "EOF":
                process.stdin.close()
            while way != "EOF" and process.poll() is None:
                process.send_signal(getattr(signal, way))
                time.sleep(0.05)
            errors = process.stderr.read()
        assert "continue with --resume" in errors and "Traceback" not in errors
        assert process.returncode == codes[way]
        (folder,) = (tmp_path / way).iterdir()
        assert files_in(folder) == ["checkpoint", "events", "resume"]
        assert parse(monkeypatch, "iql", "--resume", folder).total_timesteps == 10**9


@posix
@pytest.mark.slow
def test_a_signal_that_is_ignored_stays_ignored(tmp_path, monkeypatch):
    """As by nohup: who logs out does not stop the run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    count = Run.count
    monkeypatch.setattr(
        Run, "count", lambda self, *numbers: signal.raise_signal(signal.SIGHUP) or count(self, *numbers)
    )
    try:
        assert (train("iql", tmp_path)["run"].folder / "results.json").exists()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_bad_arguments_have_exit_code_2(tmp_path):
    for options in ({"gamma": 2}, {"env_id": "4m"}, {"team": "9x"}, {"seed": -1}, {"hidden_dim": 10**9}):
        with pytest.raises(SystemExit) as end:
            train("iql", tmp_path, **options)
        assert end.value.code == 2


def assert_plain(content):
    for path, value in leaves(content):
        assert isinstance(value, (torch.Tensor, str, int, float, bool, type(None))), path


def test_copies_of_early_policies_can_be_team_mates(tmp_path, monkeypatch):
    folder = train("iql", tmp_path, env_id="3m", keep_checkpoints=(0.3, 0.9))["run"].folder
    found = [read(path / "checkpoint.pt") for path in (folder / "at-0.3", folder / "at-0.9", folder)]
    steps = [content["progress"]["steps"] for content in found]
    assert 120 <= steps[0] < 360 <= steps[1] <= steps[2]
    weights = [content["networks"]["target_agents"]["fc2.weight"] for content in found]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    env = envs.make("3m")
    team = Team(env, "2iql1learner", pool=[str(folder), str(folder / "at-*")])
    assert [Path(run.path).name for run in team.runs] == [folder.name, "at-0.3", "at-0.9"]
    with pytest.raises(SystemExit, match="is in rising order"):
        iql.check_args(iql.Args(keep_checkpoints=(0.6, 0.3)))
    (folder / "at-0.9").rename(tmp_path / "moved")
    for copy in (folder / "at-0.3", tmp_path / "moved"):
        with pytest.raises(SystemExit, match="that is a copy for pools, which cannot be continued"):
            parse(monkeypatch, "iql", "--resume", copy)


@EVERY_SCRIPT
def test_a_checkpoint_is_small_and_has_plain_types_only(complete_run, name):
    folder = complete_run(name)["run"].folder
    assert (folder / "checkpoint.pt").stat().st_size < 4e6
    assert_plain(read(folder / "checkpoint.pt"))
    assert files_in(folder) == ["checkpoint", "events", "results"]


def test_a_resume_file_has_plain_types_only(tmp_path):
    assert_plain(read(resume_file(stopped("qmix", tmp_path))))


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_is_not_run(tmp_path, monkeypatch):
    """In none of the places that read one."""
    trace, env = tmp_path / "trace", envs.make("3m")
    torch.save({"algorithm": "iql", "progress": Malicious(trace)}, tmp_path / "checkpoint.pt")
    for load in (
        lambda: parse(monkeypatch, "iql", "--resume", tmp_path),
        lambda: initialise_from(tmp_path, SimpleNamespace(env=env)),
        lambda: load_runner(tmp_path, env),
        lambda: read_pool([str(tmp_path)], env),
        lambda: checkpoints.read_networks(tmp_path / "checkpoint.pt", {}),
    ):
        with pytest.raises((ValueError, SystemExit), match="damaged or not a file of this project: Weights only load"):
            load()
    assert not trace.exists()


# ---- logging ----
def test_metrics_are_means_over_the_updates_since_the_last_log():
    metrics = Metrics(CPU)
    assert metrics.pop() == {}
    for number in (1.0, 2.0, 6.0):
        finite = metrics.add({"loss": torch.tensor(number, requires_grad=True), "shares": torch.tensor([number, -1.0])})
        assert finite.item() is True
    metrics.check_finite()  # as before a save: that takes nothing from the log
    means = metrics.pop()
    assert list(means) == ["loss", "shares"] and means["loss"] == 3.0 and isinstance(means["loss"], float)
    assert means["shares"].tolist() == [3.0, -1.0] and not means["shares"].requires_grad
    assert metrics.pop() == {}  # no updates since
    metrics.add({"loss": torch.tensor(5.0), "shares": torch.tensor([0.0, 1.0])})
    means = metrics.pop()
    assert means["loss"] == 5.0 and means["shares"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["loss", "shares"])
def test_metrics_name_what_is_not_finite_and_do_not_count_it(name, bad):
    metrics = Metrics(CPU)
    good = {"loss": torch.tensor(1.0), "shares": torch.tensor([2.0, 3.0]), "norm": torch.tensor([[4.0]])}
    metrics.add(good)
    metrics.check_finite()
    wrong = {key: value.clone() + 10 for key, value in good.items()}
    wrong[name].view(-1)[-1] = bad
    assert metrics.add(wrong).item() is False
    metrics.add(good)
    for check in (metrics.check_finite, metrics.pop, metrics.pop):  # it is not forgotten
        with pytest.raises(FloatingPointError, match=f"^{name} was not finite$"):
            check()
    metrics.errors.zero_()
    assert {key: torch.as_tensor(value).tolist() for key, value in metrics.pop().items()} == {
        "loss": 1.0, "shares": [2.0, 3.0], "norm": [[4.0]],
    }  # fmt: skip


@pytest.mark.slow
def test_saving_takes_nothing_from_the_log(tmp_path, monkeypatch):
    """A line has the mean over all updates since the line before, whether or not there was a save between them."""
    rounds, reset = [0], Battle.reset

    def counted(env, *arguments, **options):
        rounds[0] += 1
        return reset(env, *arguments, **options)

    monkeypatch.setattr(Battle, "reset", counted)
    monkeypatch.setattr(time, "monotonic", lambda: float(rounds[0]))  # a clock that saving does not move
    found = []
    for interval in (1e9, 0):
        rounds[0] = 0
        options = {"log_interval": 2, "checkpoint_interval": interval, "total_timesteps": 1200, "eval_interval": 2000}
        log = read_log(train("iql", tmp_path / str(interval), **options)["run"].folder)
        found.append({key: curve for key, curve in log.items() if key.startswith("losses/")})
    assert found[0] == found[1] and len(found[0]["losses/td_loss"]) > 1


@pytest.mark.parametrize("saved_before", [True, False])
def test_a_run_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(saved_before, tmp_path, monkeypatch):
    step, calls = Battle.step, []

    def infinite_reward(self, actions):
        calls.append(0)
        result = step(self, actions)
        if len(calls) > 100:
            self.reward.fill_(float("inf"))
        return result

    monkeypatch.setattr(Battle, "step", infinite_reward)
    good = r"the last good checkpoint is .*checkpoint\.pt" if saved_before else "no checkpoint was saved before"
    intervals = (0, 1000) if saved_before else (1000, 0)  # found when it would be saved, or when it would be logged
    options = dict(zip(("checkpoint_interval", "log_interval"), intervals))
    with pytest.raises(SystemExit, match=rf"stopped at step [\d,]+: losses/td_loss was not finite; {good}"):
        train("iql", tmp_path, total_timesteps=5000, **options)
    (folder,) = tmp_path.iterdir()
    assert (folder / "checkpoint.pt").exists() == saved_before and not (folder / "results.json").exists()
    if saved_before:
        for path, value in leaves(read(folder / "checkpoint.pt")):
            assert not isinstance(value, torch.Tensor) or torch.isfinite(value).all(), path


@pytest.mark.parametrize("stopped", [False, True])
def test_weights_that_are_not_finite_are_not_saved(stopped, tmp_path, monkeypatch):
    """Nor what the optimiser keeps, whatever the losses were."""
    for part in ("weights", "moments"):
        calls = []

        def damaged(run, part=part, calls=calls):
            calls.append(run)
            if len(calls) == 2:
                (first, *_) = run.learner.parameters
                values = first.data if part == "weights" else run.learner.optimizer.state[first]["exp_avg"]
                values.view(-1)[-1] = float("inf")
                if stopped:
                    raise Stopped
            return True

        monkeypatch.setattr(Run, "save_due", damaged)
        name = "networks.agents.fc1.weight" if part == "weights" else r"optimizer\.state\.0\.exp_avg"
        with pytest.raises(SystemExit, match=f"{name} was not finite; the last good checkpoint is "):
            train("iql", tmp_path / part)
        checkpoints.read_run(calls[0].folder)


# ---- arguments ----
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("iql", {"num_envs": 0}, "--num-envs is above 0, not 0"),
        ("iql", {"total_timesteps": -1}, "--total-timesteps is above 0, not -1"),
        ("iql", {"learning_rate": 0.0}, "--learning-rate is above 0"),
        ("iql", {"learning_rate": float("nan")}, "--learning-rate is above 0, not nan"),
        ("iql", {"checkpoint_interval": -1.0}, "--checkpoint-interval is from 0 up, not -1.0"),
        ("iql", {"gamma": 1.1}, "--gamma is from 0 to 1, not 1.1"),
        ("iql", {"gamma": float("nan")}, "--gamma is from 0 to 1, not nan"),
        ("iql", {"teammate_epsilon": 1.5}, "--teammate-epsilon is from 0 to 1"),
        ("qmix", {"mixing_dim": 0}, "--mixing-dim is above 0, not 0"),
        ("qmix", {"hypernet_dim": 0}, "--hypernet-dim is above 0, not 0"),
        ("iql", {"buffer_size": 10, "num_envs": 20}, "--buffer-size is at least 32 (a round and a batch), not 10"),
        ("iql", {"buffer_size": 40, "num_envs": 50}, "--buffer-size is at least 50 (a round and a batch), not 40"),
        ("vdn", {"team": "scripted", "share_parameters": False}, "--no-share-parameters is for --team self"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_values_are_rejected_with_what_is_allowed(name, options, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        SCRIPTS[name].check_args(SCRIPTS[name].Args(**options))


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_every_number_has_a_range(name):
    """But for the seed, and the number of agents, which the environment checks."""
    module = ALL_SCRIPTS[name]
    types = {field.name: {field.type, *get_args(field.type)} for field in fields(module.Args)}
    numbers = {key for key, found in types.items() if {int, float} & found}
    assert {"num_envs", "gamma", "time_limit"} <= numbers
    for key in numbers - {"n_agents"}:
        args = module.Args(**{key: -1})
        with pytest.raises(SystemExit, match=f"--{key.replace('_', '-')} is (above 0|from 0 up|from 0 to 1), not -1"):
            module.check_args(args)


def test_a_choice_that_does_not_exist_is_rejected(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(iql.Args, args=["--buffer-device", "gpu"])
    assert "same" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_id": "4m"}, r"--env-id 4m: unknown environment '4m': did you mean 3m or 8m\?"),
        ({"env_id": "MMM", "n_agents": 0}, "--env-id MMM: "),
        ({"team": "2nearest"}, "--team 2nearest: team '2nearest' has 2 seats, but 3m has 3"),
        ({"buffer_size": 10**9}, r"does not fit into the [\d.]+ GiB that are free: --buffer-size \d+ would"),
    ],
)
@pytest.mark.parametrize("name", ["iql", "omg_iql"])
def test_a_run_that_is_rejected_writes_nothing(name, options, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        train(name, tmp_path, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("env_id", "team", "sizes"),
    [
        ("3m", "self", (64, 1_000_000, 200)),
        ("3m", "scripted", (512, 2_000_000, 400)),
        ("sc2/3m", "self", (8, 1_000_000, 60)),
        ("pettingzoo:mpe2.simple_spread_v3", "self", (8, 1_000_000, 60)),
        ("sc2/3m", "2nearest1learner", (8, 1_000_000, 60)),
    ],
)
def test_default_sizes_on_the_cpu(env_id, team, sizes):
    args = iql.Args(env_id=env_id, team=team)
    iql.check_args(args)
    assert (args.num_envs, args.total_timesteps, args.train_frequency) == sizes
    assert args.eval_interval == args.total_timesteps // 50


# ---- memory ----
def test_a_buffer_of_the_largest_size_that_is_suggested_fits(monkeypatch):
    episodes = {"obs": torch.zeros(9, 2, 1000)}
    monkeypatch.setattr("training.args.free_memory", lambda device: 10_000_000)
    with pytest.raises(SystemExit, match=r"--buffer-size 250 would") as stop:
        buffer_size(iql.Args(buffer_size=251), episodes, CPU)
    assert stop.value.code == NO_MEMORY
    assert buffer_size(iql.Args(buffer_size=250), episodes, CPU) == 250


def test_lack_of_memory_is_a_line_and_an_exit_code():
    """Which sweep.py knows."""
    code = "import sys\nfrom training import exits\n"
    code += "sys.excepthook = exits.report_lack_of_memory\nraise MemoryError('none')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (NO_MEMORY, "out of memory: none\n")


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
def test_default_buffer_size(options, kilobytes, size):
    args = iql.Args(**{"num_envs": 4, "batch_size": 4, **options})
    assert default_buffer_size(args, kilobytes * 1024) == size


def test_a_run_chooses_a_buffer_size_and_leaves_its_options_alone(tmp_path, capsys):
    names = train("iql", tmp_path, buffer_size=None, total_timesteps=1, batch_size=6)
    out, err = capsys.readouterr()
    assert "warning: --batch-size 6: the run has at most 5 episodes, so it learns nothing" in err
    assert "Nothing was learned: the run was too short for a single update." in out
    assert names["buffer"].size == len(names["buffer"].lengths) == 4096
    assert names["args"].buffer_size is None
    with pytest.raises(AttributeError, match="read-only once they are checked: gamma"):
        names["args"].gamma = 0.5


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux reports it")
def test_memory_that_caches_files_counts_as_free():
    assert free_memory(CPU) >= os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2


# ---- start-up ----
WITHOUT_DYNAMO = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iql", "omg_iql"])
def test_a_run_does_not_import_torch_compile(name, tmp_path):
    """That takes seconds at every start."""
    words = command_line(name, tmp_path, {"env_id": "stag_hunt_4x4", "total_timesteps": 200})
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", WITHOUT_DYNAMO, *words], env=variables, check=True, cwd=ROOT)
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "results.json").read_text())["updates"] > 0


OPTIMIZER_STEPS = """
import sys
import torch
from training import run

for make in (
    lambda p: torch.optim.Adam([{"params": p[:1]}, {"params": p[1:], "lr": 0.03}], 0.01, eps=1e-5, fused=True),
    lambda p: torch.optim.Adam(p, 0.01),
    lambda p: torch.optim.RMSprop(p, 0.01),
):
    if sys.argv[1] == "ours":
        run._do_not_import_torch_compile()  # every run of a process does
    torch.manual_seed(0)
    network = torch.nn.Linear(7, 5)
    optimizer = make(list(network.parameters()))
    for number in range(4):
        optimizer.zero_grad()
        network(torch.randn(3, 7)).square().sum().backward()
        if optimizer.defaults.get("fused"):
            optimizer.found_inf = torch.tensor(float(number == 2))  # this step is skipped
        optimizer.step()
    assert all(p.requires_grad for p in network.parameters()) and torch.is_grad_enabled()
    values = [*network.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    print([[number.hex() for number in value.detach().double().flatten().tolist()] for value in values])
assert sys.argv[1] != "ours" or "torch._dynamo" not in sys.modules
step, wrappers = torch.optim.Adam.step, 0
while hasattr(step, "__wrapped__"):
    step, wrappers = step.__wrapped__, wrappers + 1
assert wrappers == 2, "no_grad and torch's profiler, once each"
"""


@pytest.mark.slow
def test_optimisers_compute_exactly_what_those_of_torch_do():
    found = [
        subprocess.run([sys.executable, "-c", OPTIMIZER_STEPS, which], check=True, cwd=ROOT, capture_output=True).stdout
        for which in ("ours", "torch's")
    ]
    assert found[0] == found[1] and found[0].count(b"\n") == 3 and b"0x1." in found[0]


# ---- wandb ----
@pytest.mark.slow
def test_wandb_is_not_needed(tmp_path):
    (tmp_path / "wandb.py").write_text("raise ImportError('wandb is not installed')")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = command_line("iql", tmp_path / "runs", {"total_timesteps": 1})
    subprocess.run([sys.executable, *words], env=variables, check=True, cwd=ROOT)


def wandb_records(file, block=2**15):
    """Of an offline run, a log as LevelDB has it: its rows by number, what metrics are drawn against, its summary."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, content = file.read_bytes(), 7, b""
    rows, axes, summary = {}, {}, {}
    while place + 7 <= len(data):
        if block - place % block < 7:  # no room for a header
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        content += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record, content = Record.FromString(content), b""
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            rows |= {int(items["_step"]): items} if items else {}
            axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            summary |= {"/".join(item.nested_key) or item.key: item.value_json for item in record.summary.update}
    return rows, axes, summary


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_mirrors_the_log_and_a_run_that_goes_on_goes_on_there(tmp_path):
    variables = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = command_line("iql", tmp_path / "runs", {"env_id": "stag_hunt_4x4", "team": "3NS1learner"})
    for more in (["--time-limit", "0.1"], []):  # stops after a round
        more += ["--track", "--capture-video", "--log-interval", "0"]
        subprocess.run([sys.executable, *words, *more], env=variables, cwd=ROOT)
        (folder,) = (tmp_path / "runs").iterdir()
        words = [words[0], "--resume", str(folder)]
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    (first, _, _), (rows, axes, summary) = map(wandb_records, files)
    assert 0 < min(first) <= max(first) < min(rows)
    assert axes["*"] == axes["eval/win_rate"] == "steps" and axes["pretrain/*"] == "pretrain/update"
    assert all(row["steps"] == str(number) for number, row in rows.items())
    assert list(files[1].parent.glob("files/media/videos/eval/match*.gif"))
    assert {"losses/td_loss", "charts/win_rate"} <= {key for row in rows.values() for key in row}
    results = json.loads((folder / "results.json").read_text())
    for group in ("final", "best", "best_script"):
        assert float(summary[f"{group}/episodic_return"]) == pytest.approx(results[group]["episodic_return"])


def test_rows_of_pretraining_come_before_the_steps_in_wandb(tmp_path):
    log, logged = Log(omg_iql.Args(), tmp_path, rows_before=200), []
    log.wandb = SimpleNamespace(log=lambda row, step: logged.append((row, step)), finish=lambda: None)
    log.add_scalar("pretrain/kl", 3.0, 110)
    log.add_scalar("charts/SPS", 5.0, 7)
    log.close()
    (row, number), (next_row, next_number) = logged
    assert row == {"pretrain/kl": 3.0, "pretrain/update": 110} and next_row == {"charts/SPS": 5.0, "steps": 7}
    assert number < next_number


def test_random_numbers_depend_on_the_seed_and_the_purpose():
    seeds = {seed_for(seed, purpose) for seed in range(100) for purpose in ("training", "evaluation", "buffer")}
    assert len(seeds) == 300 and all(0 <= seed < 2**63 for seed in seeds)
    matches = {}
    for seed in (1, 2):
        for purpose in ("training", "evaluation"):
            obs, _ = iql.make_env(iql.Args(env_id="stag_hunt_4x4", seed=seed), 8, torch.device("cpu"), purpose).reset()
            matches[seed, purpose] = obs.clone()
    different = itertools.combinations(matches.values(), 2)
    assert all(not torch.equal(one, other) for one, other in different)


def test_a_checkpoint_of_before_networks_had_names_is_rejected(tmp_path):
    torch.save({"algorithm": "iql", "env_id": "3m", "online": {}, "target": {}}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="another version of this project"):
        checkpoints.read_run(tmp_path)
    with pytest.raises(SystemExit, match=r"--resume .* another version of this project"):
        train("iql", tmp_path, resume=tmp_path)

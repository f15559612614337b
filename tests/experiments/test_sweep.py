"""Sweeps: what is run, tried again, resumed and skipped, here and on a cluster, and the tables and reports of them."""

import contextlib
import errno
import io
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import run_script

from experiments import cluster, evaluate, paper, results, search, sweep
from experiments.jobs import TRIES, Evaluation, Here, Job, Output, lock_job, multi_process_service, place_of, run_all
from training import files

TOY = Path(__file__).with_name("toy_script.py")
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")


def command(*words, scripts=(TOY,), options=()):
    words = ["--script", *scripts, *words, "--", *options]
    return [sys.executable, "-m", "experiments.sweep", *map(str, words)]


def run(folder, *words, **options):
    """Runs a sweep in this process, which has imported what it needs: (whether it failed, its output)."""
    argv, cwd, output = sys.argv, Path.cwd(), io.StringIO()
    sys.argv = [sweep.__file__, *command(*words, **options)[3:]]
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as stop:
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = argv
        os.chdir(cwd)
    return stop.value.code, output.getvalue()


def launches(folder):
    """(environment, seed) of every run that is done, and the steps at which it was started and resumed."""
    found = {}
    for path in sorted(folder.glob("runs/*/results.json")):
        env_id, _, seed, _ = path.parent.name.split("__")
        assert (env_id, int(seed)) not in found, "a run was made twice"
        found[env_id, int(seed)] = json.loads(path.read_text())["launches"]
    return found


def wait_for(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("env_id", "together"), [("8m", True), ("sc2/8m", True), ("stag_hunt_4x4", False), ("my", True)]
)
def test_curves_show_returns_where_everyone_plays_for_itself(env_id, together):
    assert results.is_won_together(env_id) == together


def test_a_crashed_run_is_resumed_and_what_is_done_is_skipped(tmp_path):
    words = ("--env-ids", "a", "b", "--seeds", 2, "--jobs", 4)
    failed, output = run(tmp_path, *words, options=("--crash", "5x1"))
    assert not failed, output
    assert launches(tmp_path) == {(env_id, seed): [0, 5] for env_id in "ab" for seed in (1, 2)}
    assert output.count("crashed on purpose") == 4
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*")}
    _, output = run(tmp_path, *words, options=("--crash", "5x1"))
    assert "4 of 4 runs are done already" in output and "starts" not in output
    assert before == {path: path.stat().st_mtime_ns for path in before}
    rows = json.loads((tmp_path / "runs" / "sweep.json").read_text())
    assert [(row["env_id"], row["runs"], row["win_rate"]["mean"]) for row in rows] == [
        ("a", 2, pytest.approx(0.15)), ("b", 2, pytest.approx(0.15)), ("all", 4, pytest.approx(0.15))
    ]  # fmt: skip
    assert results.table(rows) in output and results.table(rows) in (tmp_path / "runs" / "sweep.md").read_text()
    assert (tmp_path / "runs" / "sweep.png").stat().st_size > 1000
    content = json.loads((tmp_path / "runs" / "sweep_marl_eval.json").read_text())["own"]
    assert list(content) == ["a", "b"] and list(content["a"]) == ["toy_script"]
    runs_of_a = content["a"]["toy_script"]
    assert list(runs_of_a) == ["seed_1", "seed_2"] and len(runs_of_a["seed_2"]) == 11
    assert runs_of_a["seed_2"]["step_4"] == {"step_count": 4, "win_rate": [0.04], "return": [2]}
    assert list(runs_of_a["seed_2"])[-1] == "absolute_metrics"
    assert runs_of_a["seed_2"]["absolute_metrics"] == {"win_rate": [0.2], "return": [2]}


def test_without_open_files_runs_wait_for_others(tmp_path, monkeypatch, capsys):
    popen, running = subprocess.Popen, []

    def limited(*arguments, **options):
        running[:] = [process for process in running if process.poll() is None]
        if len(running) == room:
            raise OSError(errno.EMFILE, "Too many open files")
        running.append(popen(*arguments, **options))
        return running[-1]

    monkeypatch.setattr(subprocess, "Popen", limited)
    room, words = 1, ("--env-ids", "a", "b", "--seeds", 1, "--jobs", 2)
    failed, output = run(tmp_path, *words)
    assert not failed and "waits (Too many open files)" in output
    room = 0
    assert run(tmp_path, *words, "--run-root", "others")[0] == 1
    (tmp_path / "file").touch()
    assert run(tmp_path, *words, "--run-root", "file/runs")[0] == 2
    assert capsys.readouterr().err.splitlines()[-1] == "no folder can be made at file/runs/logs (Not a directory)"


def test_names_with_dollar_signs_are_drawn_as_they_are(tmp_path):
    name = r"a$\frac$b"
    results.curves({(name, name): [run_of(1, 3)]}, tmp_path / "curves.png")
    row = {"ego": name, "adapted": 0, "other": name, "win_rate": 0.5}
    evaluate.draw(tmp_path, [row], "win_rate")
    assert all((tmp_path / file).stat().st_size > 1000 for file in ("curves.png", "heatmap.png"))


def run_of(seed, evals, won=1.0):
    rows = [{"steps": 10 * n, "win_rate": 0.5, "episodic_return": n} for n in range(evals)]
    return {"seed": seed, "evals": rows, "final": {"win_rate": won, "episodic_return": 9.0}}


def test_marl_eval_has_as_many_evaluations_of_every_run_of_a_game():
    groups = {("iql", "MMM"): [run_of(1, 3)], ("vdn", "3m"): [run_of(1, 2)], ("iql", "coin_game"): [run_of(4, 5)]}
    content = results.marl_eval(groups)
    assert list(content["battle"]) == ["mmm", "3m"] and list(content["coingame"]) == ["coin_game"]
    battle, coins = content["battle"], content["coingame"]["coin_game"]
    assert [len(runs["seed_1"]) for runs in (battle["mmm"]["iql"], battle["3m"]["vdn"])] == [3, 3]
    assert len(coins["iql"]["seed_4"]) == 6


def test_marl_eval_reads_it(capsys):
    """The package wants an old pandas: pip install --no-deps id-marl-eval, and colorama, is enough for this."""
    processing = pytest.importorskip("marl_eval.utils.data_processing_utils")
    from marl_eval.utils.diagnose_data_errors import DiagnoseData

    groups = {
        (label, env_id): [run_of(seed, 3 + seed, won / seed) for seed in (1, 2)]
        for won, label in ((0.5, "iql"), (1.0, "vdn team=1a,1b")) for env_id in ("MMM", "3m", "coin_game")
    }  # fmt: skip
    content = json.loads(json.dumps(results.marl_eval(groups)))
    checks = DiagnoseData(content).check_data()
    assert list(checks) == ["battle", "coingame"] and all(all(found.values()) for found in checks.values())
    processed = processing.data_process_pipeline(content, ["return"])
    final, over_time = processing.create_matrices_for_rliable(processed, "battle", ["return"])
    assert {name: values.tolist() for name, values in final["mean_win_rate"].items()} == {
        "iql": [[0.5, 0.5], [0.25, 0.25]], "vdn team=1a;1b": [[1.0, 1.0], [0.5, 0.5]]
    }  # fmt: skip
    assert over_time["mean_win_rate"]["iql"].shape == (2, 2, 4), "runs, tasks, evaluations"
    assert "issue" not in capsys.readouterr().out


def test_a_run_that_crashes_twice_is_given_up_and_the_others_are_made(tmp_path):
    words, options = ("--env-ids", "a", "--seeds", 2, "--jobs", 2), ("--crash", "5x9", "--crash-seed", 2)
    failed, output = run(tmp_path, *words, options=options)
    assert failed and launches(tmp_path) == {("a", 1): [0]}
    assert output.count("crashed on purpose") == 2 and "__2 failed: see" in output
    assert "goes on" in run(tmp_path, *words, options=options)[1], "the same command tries it again"


def test_a_checkpoint_that_cannot_be_resumed_is_abandoned(tmp_path):
    job = Job(TOY, "a", 1, ("--total-timesteps", "3"))
    broken = tmp_path / f"{job.name}__1"
    broken.mkdir()
    (broken / "checkpoint.pt").write_text("{")
    place = Here(sweep.Args((), (), jobs=1), tmp_path)
    assert run_all([job], place, tmp_path)
    assert job.done(tmp_path) != broken


def test_other_arguments_make_other_runs(tmp_path):
    args = sweep.Args((str(TOY),), ("a",), seeds=1, vary=(("pause", "0", "0.01"),), jobs=4)
    jobs = list(sweep.jobs_of(args, ["--total-timesteps", "3"]))
    args.vary, args.first_seed = (), 7  # seeds to choose settings on
    jobs += sweep.jobs_of(args, ["--total-timesteps", "4"])
    assert run_all(jobs, Here(args, tmp_path), tmp_path)
    made = [json.loads(path.read_text()) for path in tmp_path.glob("*/results.json")]
    found = sorted((one["args"]["pause"], one["steps"], one["args"]["seed"]) for one in made)
    assert found == [(0.0, 3, 1), (0.0, 4, 7), (0.01, 3, 1)]


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_stopped_sweep_is_continued_by_the_same_command(tmp_path, number):
    words, options = ("--env-ids", "a", "--seeds", 3, "--jobs", 2), ("--pause", 0.05, "--total-timesteps", 20)
    process = subprocess.Popen(command(*words, options=options), cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.STDOUT)  # fmt: skip
    wait_for(lambda: len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 2)
    process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == 128 + number and "stopped with 3 of 3 runs to do: the same command goes on" in output
    saved = {json.loads(path.read_text())["steps"] for path in tmp_path.glob("runs/*/checkpoint.pt")}
    assert max(saved) < 20
    os.rename(tmp_path / "runs", tmp_path / "elsewhere")  # another machine, say
    failed, output = run(tmp_path, *words, "--run-root", "elsewhere", options=options)
    assert not failed and output.count("goes on") == 2, output
    os.rename(tmp_path / "elsewhere", tmp_path / "runs")
    found = launches(tmp_path)
    assert found.pop(("a", 3)) == [0]
    assert {steps[1] for steps in found.values()} == saved


def test_jobs_wait_for_what_they_need(tmp_path):
    first = Job(TOY, "a", 1, ("--total-timesteps", "3"))
    second = Job(TOY, "a", 2, ("--reads", Output(first, "results.json")))
    third = Job(TOY, "a", 3, ("--reads", Output(Job(TOY, "a", 4), "results.json")))
    place = Here(sweep.Args((), (), jobs=3), tmp_path)
    assert not run_all([third, second, first], place, tmp_path), "nobody makes what the third needs"
    assert json.loads((second.done(tmp_path) / "results.json").read_text())["read"] == 3
    assert third.done(tmp_path) is None


class Watched(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_every_run_at_work_has_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Watched())
    monkeypatch.setattr(shutil, "get_terminal_size", lambda **fallback: (40, 24))  # pytest asks for it too
    jobs = [Job(TOY, "a", seed, ("--total-timesteps", "8", "--pause", "0.2")) for seed in (1, 2)]
    assert run_all(jobs, Here(sweep.Args((), (), jobs=2), tmp_path), tmp_path)
    drawn = [text.split("\n") for text in sys.stdout.getvalue().split("\x1b[J")]
    live = [lines for lines in drawn if "0 of 2 done, 2 at work" in lines[-2]]
    assert len(live) >= 2, "it is drawn again and again, over the last"
    assert [line.split("  ")[0] for line in live[-1][:2]] == [job.name for job in jobs]
    assert all("steps" in line and len(line) < 40 for line in live[-1][:2])
    assert sorted(drawn[-1]) == ["", *(f"{job.name} is done: counted" for job in jobs)], "only the events are left"


@pytest.mark.parametrize(
    ("given", "extra", "message"),
    [
        ({"seeds": 0}, [], "--seeds is from 1 up, not 0"),
        ({"first_seed": 0}, [], "--first-seed is from 1 up, not 0"),
        ({"vary": (("pause",),)}, [], "--vary takes an option and its values"),
        ({}, ["--seed", "3"], "--seed is the sweep's to set: use --seeds"),
        ({"vary": (("env-id", "a"),)}, [], "--env-id is the sweep's to set: use --env-ids"),
        ({}, ["--run_root=elsewhere"], "--run-root is the sweep's to set: use --run-root before --"),
        ({"vary": (("env_id", "a"),)}, [], "--env-id is the sweep's to set: use --env-ids"),
        ({"script": (str(TOY), str(TOY))}, [], "several of one name, .*: toy_script toy_script"),
        ({"script": ("nothing.py",)}, [], "--script nothing.py: there is no such file"),
        ({"report": "../sweep"}, [], r"--report \.\./sweep is a name, not a path"),
        ({"search": ("seed=1..3",)}, [], "--seed is the sweep's to set: use --seeds"),
        ({"search": ("pause=1..3",), "vary": (("pause", "1"),)}, [], "--search takes one script"),
        (
            {"search": ("pause=1..3",), "env_ids": ("a", "kuhn")},
            [],
            "--search ranks by a return, and both sides",
        ),
        ({"report": "a/b"}, [], "--report a/b is a name, not a path"),
    ],
)
def test_invalid_arguments_are_rejected(given, extra, message):
    args = sweep.Args(**{"script": (str(TOY),), "env_ids": ("a",), **given})
    with pytest.raises(SystemExit, match=message) as stop:
        sweep.check_args(args, extra)
    assert stop.value.code == 2


def test_runs_share_gpus_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.jobs.gpus", lambda: ["3", "5"])
    monkeypatch.setattr("experiments.jobs.shutil.which", lambda name: None)
    place = Here(sweep.Args((), (), cuda=True, runs_per_gpu=2), tmp_path)
    assert place.room() == 4
    jobs = [Job(TOY, "a", seed) for seed in range(4)]
    started = [place.start(job, tmp_path, ".", None, tmp_path / f"{job.seed}") for job in jobs]
    assert Counter(gpu for _, gpu in place.running) == {"3": 2, "5": 2}
    for process in started:
        process.process.wait()


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A fake control of NVIDIA's Multi-Process Service: returns a function that reads what it was asked to do.

    There is one GPU, on which the test of the service succeeds.
    """
    control, python = tmp_path / "nvidia-cuda-mps-control", tmp_path / "python"
    control.write_text(f'#!/bin/sh\necho "$1 $(cat)" >> {tmp_path}/requests\n')
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || exec {sys.executable} "$@"\n')
    for file in (control, python):
        file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    requests = tmp_path / "requests"
    return lambda: requests.read_text().split() if requests.exists() else []


SHARED = "Runs share the GPU through NVIDIA's Multi-Process Service (--no-mps turns it off)."


@posix
def test_the_service_is_used_only_if_it_works(service, monkeypatch, capsys):
    with multi_process_service() as settings:
        assert Path(settings["CUDA_MPS_PIPE_DIRECTORY"]).is_dir() and capsys.readouterr().out == SHARED + "\n"
        assert service() == ["-d"]
    assert service() == ["-d", "quit"] and not Path(settings["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    monkeypatch.setattr(sys, "executable", "/bin/false")  # the GPU cannot be used with the service
    with multi_process_service() as settings:
        assert settings == {} and "does not start here" in capsys.readouterr().out
    assert service() == ["-d", "quit"] * 2, "nothing is left running"
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "somewhere")
    with multi_process_service() as settings:
        assert settings == {} and capsys.readouterr().out == "", "a service that runs already is left alone"
    assert service() == ["-d", "quit"] * 2


@posix
@pytest.mark.parametrize("option", ["--mps", "--no-mps", "--runs-per-gpu=1"])
def test_a_sweep_shares_the_gpu_through_the_service(service, tmp_path, option):
    """It says so, and stops the service at the end. A run that has the GPU to itself does not need it."""
    failed, output = run(tmp_path, "--env-ids", "a", "--seeds", 1, "--cuda", option)
    assert not failed
    (path,) = tmp_path.glob("runs/*/results.json")
    environment = json.loads(path.read_text())["environment"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert ("CUDA_MPS_PIPE_DIRECTORY" in environment) == (option == "--mps")
    assert service() == (["-d", "quit"] if option == "--mps" else [])
    assert (SHARED in output) == (option == "--mps")


@posix
@pytest.mark.parametrize("option", ["--mps", "--no-mps"])
def test_the_papers_runs_share_the_gpu_through_the_service(service, tmp_path, monkeypatch, capsys, option):
    def run_none(jobs, place, root):
        assert ("CUDA_MPS_PIPE_DIRECTORY" in place.settings) == (option == "--mps")
        assert service() == (["-d"] if option == "--mps" else [])
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.jobs.run_all", run_none)
    monkeypatch.setattr(sys, "argv", ["paper.py", "--map", "3m", "--cuda", "--out", str(tmp_path / "all"), option])
    with pytest.raises(KeyboardInterrupt):
        paper.main()
    assert service() == (["-d", "quit"] if option == "--mps" else []), "it is stopped, whatever happens"
    assert (SHARED in capsys.readouterr().out) == (option == "--mps")


def test_ids_that_differ_in_signs_alone_have_folders_of_their_own():
    one, other, plain, real = (
        Job(TOY, env_id, 1) for env_id in ("pettingzoo:a.b,c='d e'", "pettingzoo:a.b,c='d-e'", "a", "sc2/3m")
    )
    assert files.as_name(one.env_id) == files.as_name(other.env_id) and one.name != other.name
    assert plain.exp_name == real.exp_name, "the folders of other ids have the names that they had"


# ---- a search over settings ----
def test_a_search_goes_on_and_ends_in_the_best_command(tmp_path):
    pytest.importorskip("optuna")
    words = ("--env-ids", "a", "--seeds", 2, "--jobs", 4, "--search", "skill=0..0.5", "pause=0,0.001")
    failed, output = run(tmp_path, *words, "--trials", 3, options=("--total-timesteps", 2))
    assert not failed and output.count("starts") == 6, output
    file = tmp_path / "runs" / "sweep_trials.json"
    first = json.loads(file.read_text())["settings"]
    next(tmp_path.glob(f"runs/*skill={first[1]['skill']}*__2__*/results.json")).unlink()  # it was interrupted there
    failed, output = run(tmp_path, *words, "--trials", 5, options=("--total-timesteps", 2))
    assert not failed and output.count("starts") == 4 and output.count("goes on") == 1, output
    settings = json.loads(file.read_text())["settings"]
    assert settings[:3] == first and len({json.dumps(one) for one in settings}) == 5
    best = max(settings, key=lambda one: float(one["skill"]))
    assert f"best of 5, win rate {0.15 + float(best['skill']):.4g} over 2 runs:\n" in output
    line = f"--env-id a --total-timesteps 2 --skill {best['skill']} --pause {best['pause']}\n"
    assert output.endswith(f"python {TOY} {line}")
    rows = json.loads((tmp_path / "runs" / "sweep.json").read_text())
    means = [row["win_rate"]["mean"] for row in rows]
    assert len(rows) == 5 and means == sorted(means, reverse=True) and rows[0]["runs"] == 2
    before = file.read_text()
    assert run(tmp_path, *words[:-1])[0] == 2 and file.read_text() == before, "another search has another report"
    for bad in ({"env-id": "b"}, {"pause": "--env-id=b"}, {"skill": "7"}):
        found = json.loads(before)
        found["settings"][0] |= bad
        file.write_text(json.dumps(found))
        failed, output = run(tmp_path, *words, "--trials", 6, options=("--total-timesteps", 2))
        assert failed == 2 and not output, output


def test_a_search_finds_the_best_setting(tmp_path):
    """Returns are highest at 0.03; one trial in three fails. Then somebody wins, and that is what counts."""
    pytest.importorskip("optuna")

    def jobs_of(setting):
        distance = abs(np.log10(float(setting["rate"])) + 1.5)
        final = {"win_rate": max(won - distance, 0.0), "episodic_return": -distance}
        if len(found.jobs) % 3 == 2:
            return [SimpleNamespace(env_id="3m", done=lambda root: None)]
        folder = tmp_path / f"{len(found.jobs)}_{won}"
        folder.mkdir()
        content = {"final": final, "best": final, "evals": [], "seconds": 1.0, "args": {}}
        (folder / "results.json").write_text(json.dumps(content))
        return [SimpleNamespace(env_id="3m", done=lambda root: folder)]

    for won in (0.0, 1.0):
        space = search.parse_space(["rate=1e-4..10", "kind=a,b"])
        found = search.Search(space, 60, [], tmp_path / f"trials_{won}.json", tmp_path, jobs_of)
        while found.more(()):
            pass
        rates = [abs(np.log10(float(setting["rate"])) + 1.5) for setting in found.settings]
        assert len(rates) == 60 and np.median(rates[30:]) < 0.8, "1.25 by chance"
        trials, measure = found.best_first()
        assert measure == ("win_rate" if won else "episodic_return")
        assert trials[0][0] == pytest.approx(won - min(r for n, r in enumerate(rates) if n % 3 < 2))
        assert [score for score, *_ in trials[-20:]] == [None] * 20


def test_ranges_and_choices_of_a_search(monkeypatch):
    optuna = pytest.importorskip("optuna")
    kinds = optuna.distributions
    words = ["learning-rate=1e-4..1e-2", "gamma=0.99..0.999", "batch-size=16..32", "n=1..64", "td-lambda=0,0.7"]
    space = search.parse_space(words)
    assert list(space.values()) == [
        kinds.FloatDistribution(1e-4, 1e-2, log=True), kinds.FloatDistribution(0.99, 0.999),
        kinds.IntDistribution(16, 32), kinds.IntDistribution(1, 64, log=True),
        kinds.CategoricalDistribution(("0", "0.7")),
    ]  # fmt: skip
    assert search.as_text(0.000316227766, space["learning-rate"]) == "0.000316"
    assert search.as_text(0.99899999, space["gamma"]) == "0.999" and search.as_text(24, space["batch-size"]) == "24"
    for word in ("gamma", "gamma=", "gamma=1", "gamma=1,,2", "gamma=1,1", "gamma=0.9..0.8", "gamma=0..inf", "g=a..b"):
        with pytest.raises(ValueError, match=rf"not {word}$"):
            search.parse_space([word])
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r'pip install -e "\.\[search\]"'):
        search.parse_space(words)


# ---- one run at a time ----
def start_sweep(folder, *words, **options):
    return subprocess.Popen(command(*words, **options), cwd=folder, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)  # fmt: skip


def in_use(error):
    """The process that the message of a refusal names."""
    words = re.search(r"__1.* is in use by process (\d+)", error)
    assert words and "Traceback" not in error, error
    return int(words[1])


@posix
@pytest.mark.slow
def test_runs_end_with_a_sweep_that_is_killed(tmp_path, capsys):
    """Until the last has saved, the same command refuses; then it continues."""
    words = ("--env-ids", "a", "--seeds", 2, "--jobs", 2)
    options = ("--pause", 0.05, "--total-timesteps", 60, "--end-after", "end")
    process = start_sweep(tmp_path, *words, options=options)
    wait_for(lambda: len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 2)
    process.kill()
    process.communicate()
    logs = list(tmp_path.glob("runs/logs/*.log"))
    wait_for(lambda: all(log.read_text().endswith("stops\n") for log in logs))
    code, _ = run(tmp_path, *words, options=options)
    assert code == 2 and in_use(capsys.readouterr().err) != process.pid, "it names the run, not the sweep that is gone"
    (tmp_path / "end").touch()
    wait_for(lambda: not any(files.is_locked(lock) for lock in tmp_path.glob("runs/logs/*.lock")))
    failed, output = run(tmp_path, *words, options=options)
    assert not failed and output.count("goes on") == 2, output
    assert all(len(steps) == 2 and 0 < steps[1] < 60 for steps in launches(tmp_path).values())


@pytest.mark.slow
def test_two_sweeps_do_not_start_the_same_run(tmp_path, capsys):
    """Not even where it has no folder yet."""
    words, options = ("--env-ids", "a", "--seeds", 1), ("--begin-after", "begin", "--total-timesteps", 3)
    process = start_sweep(tmp_path, *words, options=options)
    wait_for(lambda: list(tmp_path.glob("runs/logs/*.log")))
    code, _ = run(tmp_path, *words, options=options)
    assert code == 2 and in_use(capsys.readouterr().err)
    assert not list(tmp_path.glob("runs/a__*"))
    (tmp_path / "begin").touch()
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert launches(tmp_path) == {("a", 1): [0]}


def test_a_run_that_somebody_else_continues_is_left_alone(tmp_path, capsys):
    job = Job(TOY, "a", 1)
    (tmp_path / f"{job.name}__1").mkdir()
    lock = files.FolderLock(tmp_path / f"{job.name}__1")
    lock.acquire()
    with pytest.raises(SystemExit) as stop:
        run_all([job], Here(sweep.Args((), (), jobs=1), tmp_path), tmp_path)
    assert stop.value.code == 2 and in_use(capsys.readouterr().err) == os.getpid()
    lock.release()
    assert run_all([job], Here(sweep.Args((), (), jobs=1), tmp_path), tmp_path)


@pytest.mark.parametrize("other", ["works", "has done it"])
def test_what_another_sweep_began_in_the_meantime_is_not_begun_again(tmp_path, capsys, other):
    first, second = (Job(TOY, "a", seed, ("--total-timesteps", "3")) for seed in (1, 2))
    held, started = [], []

    class Place(Here):
        def start(self, job, root, *words):
            started.append(job)
            if other == "works":
                held.append(lock_job(second, root))
            else:
                write_results(root / f"{second.name}__1")
            return super().start(job, root, *words)

    complete = run_all([first, second], Place(sweep.Args((), (), jobs=1), tmp_path), tmp_path)
    assert started == [first] and complete == (other == "has done it")
    assert (f"{second.name}.lock is in use by process {os.getpid()}" in capsys.readouterr().out) != complete


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        (TOY, ("--no-such-option",), "unrecognized arguments"),
        pytest.param("iql.py", ("--gamma", 7), "--gamma is from 0 to 1, not 7", marks=pytest.mark.slow),
    ],
)
def test_invalid_arguments_are_not_tried_again(tmp_path, script, options, message):
    failed, output = run(tmp_path, "--env-ids", "3m", "--seeds", 1, scripts=(script,), options=options)
    assert failed and output.count("was rejected: ") == output.count(message) == output.count("starts") == 1, output
    assert "crashed" not in output and "goes on" not in output


def test_a_run_without_memory_waits_for_those_at_work(tmp_path):
    taken = tmp_path / "taken"
    words = ("--env-ids", "a", "--seeds", 2, "--jobs", 2)
    failed, output = run(tmp_path, *words, options=("--memory", taken, "--pause", 0.3))
    assert not failed and launches(tmp_path) == {("a", 1): [0], ("a", 2): [0]}, output
    assert "waits for memory: no memory is free" in output and "crashed" not in output

    taken.touch()  # by somebody else, for good
    failed, output = run(tmp_path, *words, options=("--memory", taken))
    assert failed and output.count("crashed: no memory is free") == 2 * TRIES, output


# ---- files ----
def write_results(folder, **changes):
    final = {"win_rate": 0.5, "episodic_return": 1.0}
    content = {"final": final, "best": final, "evals": [{"steps": 1, **final}], "seconds": 1.0, "args": {}, **changes}
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "changes",
    [
        {"final": None}, {"final": {"win_rate": "high", "episodic_return": 1.0}}, {"best": {}}, {"evals": [3]},
        {"evals": [{"steps": 1}]}, {"seconds": float("nan")}, {"seconds": 10**400}, {"args": []}, {"rows": 3},
        {"rows": [{"ego": "a"}]}, {"rows": [{"ego": "a", "other": "b", "group": "c", "episodes": 1}]},
    ],
)  # fmt: skip
def test_wrong_results_are_named(tmp_path, changes):
    write_results(tmp_path / "run")
    assert results.is_done(tmp_path / "run") and results.load_results(tmp_path / "run" / "results.json")["seconds"] == 1
    write_results(tmp_path / "run", **changes)
    with pytest.raises(ValueError, match=r"results\.json is cut or not of a run \("):
        results.load_results(tmp_path / "run" / "results.json")
    assert not results.is_done(tmp_path / "run")


def test_runs_with_unusable_results_are_done_again(tmp_path):
    words, options = ("--env-ids", "a", "--seeds", 5), ("--total-timesteps", 3)
    assert not run(tmp_path, *words, options=options)[0]
    paths = sorted(tmp_path.glob("runs/*/results.json"))
    good = paths[0].read_bytes()
    for path, content in zip(paths, (b"", good[: len(good) // 2], b"[]", b"\xff" * 9)):
        path.write_bytes(content)
    failed, output = run(tmp_path, *words, options=options)
    assert not failed and "1 of 5 runs are done already" in output
    for path in paths[:4]:
        assert f"{path.relative_to(tmp_path)} is cut or not of a run (" in output
    assert output.count("that run is done again") == output.count("goes on") == 4
    assert launches(tmp_path) == {("a", seed): [0] + [3] * (seed < 5) for seed in range(1, 6)}
    assert json.loads((tmp_path / "runs" / "sweep.json").read_text())[0]["runs"] == 5


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_text(path, "before")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        files.write_text(path, "after")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["file"]


@pytest.fixture
def moved(monkeypatch):
    """The names of the files that were moved into place."""
    names, replace = set(), os.replace

    def note(source, target):
        names.add(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", note)
    return names


def test_results_of_a_sweep_are_moved_into_place(tmp_path, moved):
    assert not run(tmp_path, "--env-ids", "a", "--seeds", 1, "--report", "mine")[0]
    assert {"mine.json", "mine.md", "mine.png"} <= moved


# ---- statistics ----
def test_iqm_is_the_mean_of_the_middle_half():
    assert results.iqm(np.arange(1, 9)) == 4.5
    assert results.iqm([1000, 2, 3, -1000]) == 2.5
    assert results.iqm([4.0, 6.0, 11.0]) == 7.0, "of three none is left out"
    assert results.iqm([[1, 2, 3, 4], [8, 6, 5, 7]]).tolist() == [2.5, 6.5]


def test_students_quantiles():
    for freedom, expected in ((1, 12.7062), (2.5, 3.5599), (4, 2.7764), (9, 2.2622), (12, 2.1788), (100, 1.9840)):
        assert results.t_quantile(freedom) == pytest.approx(expected, rel=0.01 if freedom != 2.5 else 0.02)


def test_the_interval_of_a_mean_varies_within_strata():
    """Two environments of seeds that agree leave nothing to chance; mixed, they would."""
    assert results.mean_interval([[0.0] * 5, [1.0] * 5]) == [0.5, 0.5]
    low, high = results.mean_interval([[0.0] * 5 + [1.0] * 5])
    assert low < 0.3 and high > 0.7
    values = np.array([1.0, 2.0, 4.0, 9.0])
    half = 3.182 * values.std(ddof=1) / 2
    assert results.mean_interval([values]) == pytest.approx([4 - half, 4 + half])
    assert results.summary([values])["mean_interval"] == results.mean_interval([values])
    assert results.summary([[0.02, 0.1, 0.9]], 0, 1)["mean_interval"] == [0, 1]  # not -87% to 155%


def test_the_interval_of_the_iqm_has_its_known_width():
    """A trimmed mean has the variance of the values clipped at the quartiles, by the square of the share left."""
    values = (np.arange(2000) + 0.5) / 2000
    variance = np.clip(values, 0.25, 0.75).var() / 0.5**2 / len(values)
    for strata in ([values], [values[::2], values[1::2]]):
        low, high = results.iqm_interval(strata)
        assert high - low == pytest.approx(2 * 1.96 * variance**0.5, rel=0.1)
        assert (low + high) / 2 == pytest.approx(0.5, abs=0.005)


def table(rng, seeds, strangers, noise):
    """Of five seeds and nine strangers, with a mean of 0 in the long run."""
    sizes = ((seeds, (5, 1)), (strangers, (1, 9)), (noise, (5, 9)))
    return sum(rng.normal(0, scale, shape) for scale, shape in sizes)


def two_tables(rng):
    """Of two methods with the same strangers, who are more to the one or to the other, as well."""
    strangers = table(rng, 0, 2, 0)
    return [strangers + table(rng, 0.2, 0.5, 0.3) for _ in range(2)]


@pytest.mark.parametrize(
    ("function", "draw", "least", "most"),
    [
        (results.mean_interval, lambda rng: [rng.normal(0, 1, 5)], 0.935, 0.965),
        (results.mean_interval, lambda rng: [rng.normal(k, abs(k), 5) for k in (-3, 1, 2)], 0.93, 0.97),
        (results.iqm_interval, lambda rng: [rng.normal(0, 1, 5)], 0.92, 0.965),
        (results.crossed_interval, lambda rng: table(rng, 1, 1, 1), 0.93, 0.975),
        (results.crossed_interval, lambda rng: table(rng, 1, 0.1, 0.1), 0.93, 0.975),
        (results.crossed_interval, lambda rng: table(rng, 0.1, 1, 0.1), 0.93, 0.975),
        (results.crossed_interval, lambda rng: table(rng, 0, 0, 1), 0.95, 1.0),
        (lambda tables: results.crossed_difference(*tables)[1], two_tables, 0.93, 0.975),
        (lambda tables: results.mean_interval([np.subtract(*tables).mean(1)]), two_tables, 0.0, 0.8),  # seeds alone
    ],
    ids=["mean", "strata", "IQM", "both", "seeds", "strangers", "neither", "difference", "difference over seeds"],
)
def test_95_of_100_intervals_cover_the_truth(function, draw, least, most):
    rng, trials = np.random.default_rng(0), 2000
    covered = [low <= 0 <= high for low, high in (function(draw(rng)) for _ in range(trials))]
    assert least <= np.mean(covered) <= most


# ---- a cluster ----
@pytest.fixture
def node(tmp_path, monkeypatch):
    """The folder for temporary files of a node."""
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    return tmp_path / "node"


CODE = {"script.py": b"print('ours')", "envs/module.py": b"pass"}


def run_on_node():
    """What a script printed, and the files that it has made."""
    runner, code, made = cluster.NodeRunner(CODE, {"run/checkpoint.pt": b"1"}, "script.py", []), None, {}
    while code is None:
        code, _, files = runner.report()
        made |= files
    assert code == 0
    return made.pop("log").decode(), made


def tampered(home, how, elsewhere):
    if how == "changed":
        (home / "script.py").write_text("print('theirs')")
    elif how == "linked":
        (elsewhere / "script.py").write_text("print('ours')")
        (home / "script.py").unlink()
        (home / "script.py").symlink_to(elsewhere / "script.py")
    elif how == "linked folder":
        shutil.move(home / "envs", elsewhere / "envs")
        (home / "envs").symlink_to(elsewhere / "envs")
    elif how == "added":
        (home / "print.py").write_text("")
    elif how == "removed":
        (home / "envs" / "module.py").unlink()
    elif how == "open to others":
        home.parent.chmod(0o777)
    elif how == "linked parent":
        shutil.move(home.parent, elsewhere / "parent")
        home.parent.symlink_to(elsewhere / "parent")


@posix
@pytest.mark.parametrize(
    "how", ["changed", "linked", "linked folder", "added", "removed", "open to others", "linked parent"]
)
def test_code_that_somebody_has_put_on_a_node_is_not_used(node, tmp_path, how):
    home, kept = cluster.code_folder(CODE)
    assert kept and home.is_relative_to(node) and cluster.code_folder(CODE) == (home, True)
    assert home.parent.stat().st_mode & 0o777 == 0o700 and str(os.getuid()) in home.parent.name
    cache = home / "envs" / "__pycache__"
    cache.mkdir()
    (cache / "module.cpython-311.pyc").touch()
    assert cluster.code_folder(CODE) == (home, True), "it may have been used"
    tampered(home, how, tmp_path)
    fresh, kept = cluster.code_folder(CODE)
    assert fresh != home and not kept and fresh.stat().st_mode & 0o777 == 0o700
    found = {path.relative_to(fresh).as_posix(): path.read_bytes() for path in fresh.rglob("*") if path.is_file()}
    assert found == CODE and not fresh.is_symlink()


@posix
def test_a_folder_of_another_user_is_not_used(node, monkeypatch):
    home, _ = cluster.code_folder(CODE)
    somebody = os.getuid() + 1
    os.rename(home.parent, node / f"omg-marl-{somebody}")
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    fresh, kept = cluster.code_folder(CODE)
    assert not kept and fresh.parent == node


def test_a_node_runs_the_code_that_it_was_sent(node):
    for _ in range(2):
        assert run_on_node() == ("ours\n" if os.name != "nt" else "ours\r\n", {})
        for path in node.rglob("script.py"):
            path.write_text("print('theirs')")
    assert len(list(node.rglob("script.py"))) == 1, "what was not kept is removed"


SAVES = b"""
import os, pathlib
run = pathlib.Path("run")
run.mkdir()
for step in range(1, 400):
    (run / f"resume-{step}.pt").write_bytes(b"%d" % step * 1000)
    (run / "checkpoint.part").write_bytes(b"%d" % step)
    os.replace(run / "checkpoint.part", run / "checkpoint.pt")
    (run / f"resume-{step - 1}.pt").unlink(missing_ok=True)
    (run / ".lock").touch()
(run / f"resume-{step}.pt").unlink()
"""


@posix
def test_what_comes_from_a_node_is_of_one_save(node, tmp_path):
    runner, root, steps, ended = (
        cluster.NodeRunner({"script.py": SAVES}, {}, "script.py", []),
        tmp_path / "here",
        set(),
        None,
    )
    while ended is None:
        ended = runner.process.poll()
        changes = None
        while changes is None:
            changes = runner.changes()
        cluster.put_files(changes, root)
        if (root / "run" / "checkpoint.pt").exists() and ended is None:
            step = (root / "run" / "checkpoint.pt").read_text()
            if step != "399":
                assert (root / "run" / f"resume-{step}.pt").read_text() == step * 1000
            steps.add(step)
    assert ended == 0 and len(steps) > 3
    assert os.listdir(root / "run") == ["checkpoint.pt"], "nothing that is gone there is left, and no lock"


@pytest.mark.parametrize("name", ["../a", "a/../../b", "HERE/a", "C:a", "\\\\host\\a", "a\\..\\..\\b", "..", ""])
def test_names_of_files_do_not_lead_elsewhere(tmp_path, name):
    (tmp_path / "here").mkdir()
    name = name.replace("HERE", tmp_path.as_posix())
    with pytest.raises(ValueError, match="is not in the folder"):
        cluster.put_files({"good": b"", name: b""}, tmp_path / "here")
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def start_cluster():
    """A Ray cluster on this machine, without nodes that run anything; it takes 8 seconds to notice that one is lost."""
    from ray.cluster_utils import Cluster

    health = {"health_check_period_ms": 1000, "health_check_failure_threshold": 8}
    for _ in range(3):  # Ray gives itself half a minute, in which a busy machine may not have started its processes
        try:
            return Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": health})
        except Exception as error:
            late = error
            if "timed out during startup" not in str(error):
                raise
    raise late


@posix
@pytest.mark.slow
def test_on_a_cluster_a_run_that_loses_its_node_is_resumed_elsewhere(tmp_path):
    pytest.importorskip("ray")
    words = ("--env-ids", "a", "--seeds", 4, "--ray-address")
    options = ("--pause", 0.1, "--total-timesteps", 60, "--reads", "input/number.json")
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "number.json").write_text('{"steps": 7}')
    cluster = start_cluster()
    try:
        _, other = (cluster.add_node(num_cpus=2) for _ in range(2))
        cluster.wait_for_nodes()
        process = subprocess.Popen(command(*words, cluster.address, options=options), cwd=tmp_path, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        wait_for(lambda: len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 4)
        time.sleep(2)
        cluster.remove_node(other, allow_graceful=False)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        found = launches(tmp_path)
        assert len(found) == 4 and sorted(map(len, found.values())) == [1, 1, 2, 2], found
        assert all(steps[1] > 1 for steps in found.values() if len(steps) > 1), "it goes on, it does not begin again"
        made = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/results.json")]
        assert {one["read"] for one in made} == {7}, "what arguments name has gone along"

        options = ("--pause", 0.1, "--total-timesteps", 40)
        process = subprocess.Popen(command(*words, cluster.address, options=options), cwd=tmp_path, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        wait_for(lambda: len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 6)
        process.send_signal(signal.SIGINT)
        assert "stopped with 4 of 4 runs to do: the same command goes on" in process.communicate(timeout=60)[0]
        failed, output = run(tmp_path, *words[:-1], "--jobs", 4, options=options)
        assert not failed and output.count("goes on") == output.count("starts") == 2, output
    finally:
        cluster.shutdown()


def stop_in_a_save(run):
    """Stops the process of a run while it saves; returns its number."""
    pid = int(re.search(r"process (\d+)", files.is_locked(run))[1])
    for pause in itertools.cycle((0.003, 0.005, 0.007, 0.011)):
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZ":
            time.sleep(0.001)
        if any(path.suffix == ".part" for path in run.iterdir()):
            return pid
        assert not (run / "results.json").exists(), "it was not met in a save"
        os.kill(pid, signal.SIGCONT)
        time.sleep(pause)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.slow
def test_on_a_cluster_a_run_whose_node_is_lost_in_a_save_ends_as_if_it_had_not_been(tmp_path):
    """A training script, on nodes that have different folders for temporary files."""
    pytest.importorskip("ray")
    words = ("--env-ids", "stag_hunt_4x4", "--seeds", 1)
    sizes = {
        "num-envs": 4, "batch-size": 4, "buffer-size": 64, "train-frequency": 60, "total-timesteps": 10_000,
        "hidden-dim": 16, "eval-interval": 4000, "eval-episodes": 4, "final-eval-episodes": 8, "checkpoint-interval": 0,
    }  # fmt: skip
    options = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    nodes, lost = {}, None
    cluster = start_cluster()
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            nodes[name] = cluster.add_node(num_cpus=1, env_vars={"TMPDIR": str(tmp_path / name)})
        cluster.wait_for_nodes()
        ray_words = (*words, "--run-root", "cluster", "--ray-address", cluster.address)
        process = start_sweep(tmp_path, *ray_words, scripts=("iql.py",), options=options)
        wait_for(lambda: list(tmp_path.glob("cluster/*/checkpoint.pt")), 200)  # comes after what belongs to it
        (run_there,) = tmp_path.glob("*/omg-marl-run-*/stag_hunt_4x4__*")
        lost = run_there.parent.parent.name
        pid = stop_in_a_save(run_there)
        cluster.remove_node(nodes[lost], allow_graceful=False)
        os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0 and "lost its node" in output and "goes on" in output, output
    finally:
        cluster.shutdown()
    assert list(tmp_path.glob(f"{lost}/omg-marl-[0-9]*/*/iql.py")), "it was at work there"
    failed, output = run(tmp_path, *words, "--jobs", 2, scripts=("iql.py",), options=options)
    assert not failed, output
    ends = []
    for root in ("cluster", "runs"):
        (folder,) = tmp_path.glob(f"{root}/stag_hunt_4x4__*")
        assert not list(folder.glob("resume-*.pt")), "a complete run has none"
        results = json.loads((folder / "results.json").read_text())
        evals = [{key: value for key, value in one.items() if key != "seconds"} for one in results["evals"]]
        networks = torch.load(folder / "checkpoint.pt", weights_only=True)["networks"]
        ends.append((results["final"], evals, results["steps"], results["updates"], networks))
    assert ends[0][:4] == ends[1][:4]
    for name, weights in ends[0][4].items():
        for key, value in weights.items():
            assert torch.equal(value, ends[1][4][name][key]), f"{name}.{key}"


def test_without_ray_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit, match=r'pip install -e "\.\[ray\]"'):
        place_of(sweep.Args((), (), ray_address="auto"), tmp_path)


# ---- the paper's experiment ----
def pretend(plan, root, seed=0):
    """Folders as if every job of a plan were done, with results at random."""
    rng = np.random.default_rng(seed)
    for job in plan.jobs:
        if isinstance(job, Evaluation):
            rows = [
                {"ego": ego, "other": other, "group": group, "episodes": episodes, "win_rate": rng.random(),
                 "win_rate_low": 0.0, "return": 5 * rng.random(), "hit_ratio": rng.random(), "hit_ratio_low": 0.0}
                for ego in ("ego 1", "ego 2")
                for group, other, episodes in (("homologue", "one", 10), ("homologue", "two", 30),
                                               ("homologue", "all", 40), ("non-homologue", "mixed", 40))
            ]  # fmt: skip
            (root / job.name).mkdir(parents=True)
            args = {"ego": [f"{run.name}__1" for run in job.needs], "others": []}
            (root / job.name / "results.json").write_text(json.dumps({"rows": rows, "seconds": 1.0, "args": args}))
        else:
            final = {"win_rate": rng.random(), "episodic_return": 5 * rng.random()}
            evals = [{"steps": step, **final} for step in (1, 2)]
            about = {"args": {"cuda": False}, "versions": {"python": "3"}, "final": final, "best": final}
            about |= {"evals": evals, "seconds": 1.0}
            (root / f"{job.name}__1").mkdir(parents=True)
            (root / f"{job.name}__1" / "results.json").write_text(json.dumps(about))


def read_table(text, head, keys):
    """{the first cells, joined: {column: cell}} of the table of a report whose first cell is `head`."""
    lines = text[text.index(f"| {head} ") :].split("\n\n")[0].split("\n")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found, name = {}, ""
    for row in cells[2:]:
        name = row[0] or name  # an empty cell is that above
        found[" ".join([name, *row[1:keys]])] = dict(zip(cells[0][keys:], row[keys:]))
    return found


@pytest.mark.parametrize(
    ("env_id", "mates"), [("8m", 7), pytest.param("2c_vs_64zg", 1, marks=pytest.mark.slow), ("stag_hunt_4x4", 3)]
)
def test_the_report_has_the_numbers_of_the_evaluations(tmp_path, monkeypatch, capsys, moved, env_id, mates):
    words = ["--map", env_id, "--seeds", "2", "--pool-runs", "3", "--test-runs", "2", "--out", str(tmp_path / "all")]
    args = paper.tyro.cli(paper.Args, args=words)
    paper.set_sizes(args)
    plan = paper.make_plan(args)
    pretend(plan, tmp_path / "all")
    (tmp_path / "all" / "seconds.json").write_text("")  # cut
    monkeypatch.setattr(sys, "argv", [paper.__file__, *words])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert stop.value.code == 0
    assert {"report.json", "report.md", "results.png", "curves.png", "seconds.json"} <= moved
    text, measure = (tmp_path / "all" / "report.md").read_text(), "return" if mates == 3 else "win_rate"
    assert text in capsys.readouterr().out and f"python -m experiments.paper --map {env_id} --seeds 2 " in text
    ours, checked, tables = read_table(text, "others", 2), 0, {}
    gaps = read_table(text[text.index("## Differences") :], "others", 2)
    for method, others, count, job in plan.evaluations:
        rows = json.loads((tmp_path / "all" / job.name / "results.json").read_text())["rows"]
        for group in ("homologue", "non-homologue"):
            won, played = {"ego 1": 0.0, "ego 2": 0.0}, Counter()
            for row in rows:
                if row["group"] == group and row["other"] != "all":
                    won[row["ego"]] += row[measure] * row["episodes"]
                    played[row["ego"]] += row["episodes"]
            shares = sorted(won[ego] / played[ego] for ego in won)
            scale, form = (1, "{:.2f}") if measure == "return" else (100, "{:.1f}")
            table = [[row[measure] for row in rows if row["group"] == group and row["other"] != "all"
                      and row["ego"] == ego] for ego in won]  # fmt: skip
            ends = results.crossed_interval(table)
            half = 12.706 * (shares[1] - shares[0]) / 2  # Student's t of two seeds
            over_seeds = [sum(shares) / 2 - half, sum(shares) / 2 + half]
            if group == "non-homologue":  # one row a seed
                assert ends == pytest.approx(over_seeds)
            if others == "seen":  # the pool's policies are no sample
                ends = over_seeds
            ends = np.clip(ends, 0, 1) if scale == 100 else ends
            expected = [form.format(scale * value) for value in (sum(shares) / 2, *ends)]
            base, diverse, _ = method.partition(", diverse")
            name, table = f"{count} {group}{', of the pool' * (others == 'seen')}", np.array(table)
            by_seed = np.array([[won[ego] / played[ego]] for ego in won])
            tables[method, name] = by_seed if others == "seen" else table
            for other, label in ((f"IQL{diverse}", f"{diverse[2:]}{', ' * bool(diverse)}minus IQL{diverse}"),
                                 (base, "diverse, minus not diverse")):  # fmt: skip
                if (other, name) in tables and other != method and method != paper.POOL:
                    gap = tables[method, name] - tables[other, name]
                    words = [form.format(scale * value) for value in (gap.mean(), *results.crossed_interval(gap))]
                    assert gaps[f"{name} {label}"][base] == "{} ({} to {})".format(*words)
            cell = ours[f"{name} ours{diverse}"][base]
            assert cell == "{} ({} to {})".format(*expected)
            checked += 1
        if (others, count) == ("unseen", mates):
            hits = [row["hit_ratio"] for row in rows if row["other"] == "all"]
            assert read_table(text, "metric", 1)["hit_ratio"][method] == f"{np.mean(hits):.3f}"
    assert checked == 2 * len(plan.evaluations)
    assert sum(cell != "" for row in gaps.values() for cell in row.values()) >= 2 * 13
    if env_id == "8m":
        assert ours["7 non-homologue paper"]["OMG optimistic"] == "70.5"
        assert ours["6 homologue paper"]["LIAM"] == "79.7"
        assert ours["7 homologue paper"][paper.POOL] == "61.0"
    assert all((tmp_path / "all" / name).stat().st_size > 1000 for name in ("results.png", "curves.png"))


def test_a_map_without_a_pool_is_rejected():
    args = paper.Args(map="coin_game", quick=True)
    paper.set_sizes(args)
    with pytest.raises(SystemExit, match=r"--map coin_game has .* no NS, NH and RAND to learn with"):
        paper.make_plan(args)


def test_the_plan_is_the_papers():
    args = paper.Args()
    paper.set_sizes(args)
    plan = paper.make_plan(args)
    counts = Counter(job.script.stem for job in plan.jobs)
    assert counts == {"qmix": 20, "iql": 20, "vdn": 10, "pretrain_cvae": 5, "liam_iql": 10, "naive_om_iql": 10,
                      "omg_iql": 20, "evaluate": 32}  # fmt: skip
    assert len({job.name for job in plan.jobs}) == len(plan.jobs)
    pool, strangers = (
        plan.others["pool_qmix"],
        {job for label in plan.others if "test" in label for job in plan.others[label]},
    )
    assert not {job.seed for job in pool} & {job.seed for job in strangers}
    published = [job for job in plan.jobs if job.script.stem in ("omg_iql", "pretrain_cvae")]
    assert len(published) == 25 and all("--paper" in job.arguments for job in published)
    for runs in plan.learners.values():
        assert [job.seed for job in runs] == [1, 2, 3, 4, 5]
        assert all(set(pool) <= set(job.needs) and not strangers & set(job.needs) for job in runs)
    for method, others, count, job in plan.evaluations:
        egos = plan.learners.get(method, pool)
        assert set(job.needs) == {*egos, *(strangers if others == "unseen" else pool)}
        assert f"{count}other{8 - count}ego" in job.arguments


class InProcess:
    """Runs every job in this process, which has imported what scripts need."""

    def __init__(self, args, folder):
        self.folder = folder

    def room(self):
        return 1

    def start(self, job, root, run_root, resume, log, lock):
        cwd = Path.cwd()
        os.chdir(self.folder)
        try:
            run_script([str(job.script), *map(str, job.options(job.words(cwd / root, run_root), run_root, resume))])
        finally:
            os.chdir(cwd)
        return SimpleNamespace(poll=lambda: 0, line=lambda: "complete", asked=0)

    def close(self):
        pass


@pytest.mark.slow
def test_the_quick_experiment_can_be_stopped_and_ends_in_a_report(tmp_path, monkeypatch, capsys, one_thread):
    """With one method in the second part, and shorter runs than --quick has."""
    sizes = ["--pool-timesteps", "500", "--learner-timesteps", "500", "--episodes", "3"]
    words = ["--map", "3m", "--quick", *sizes, "--out"]
    if os.name != "nt":
        command = [sys.executable, "-m", "experiments.paper", *words, "all"]
        process = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        wait_for(lambda: list(tmp_path.glob("all/3m*__pool_qmix*/results.json")), 200)
        process.send_signal(signal.SIGTERM)
        assert "the same command goes on" in process.communicate()[0]
        os.rename(tmp_path / "all", tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [paper.__file__, *words, "moved"])
    monkeypatch.setattr(paper, "METHODS", {"OMG optimistic": paper.METHODS["OMG optimistic"]})
    monkeypatch.setattr(paper, "PROTOCOLS", {"": ()})
    monkeypatch.setattr("experiments.jobs.place_of", InProcess)
    assert paper.main() == 0
    assert os.name == "nt" or "done already" in capsys.readouterr().out
    report = json.loads((tmp_path / "moved" / "report.json").read_text())
    assert {result["method"] for result in report["results"]} == {"OMG optimistic", paper.POOL}
    assert all(0 <= result["mean"] <= 1 and result["matches"] >= 3 for result in report["results"])
    assert "hit_ratio" in report["metrics"]["OMG optimistic"]

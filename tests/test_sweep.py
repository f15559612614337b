"""Sweeps: what is run, tried again, resumed and skipped, here and on a cluster; and what the table says of it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import sweep  # noqa: E402

TOY = ROOT / "tests" / "toy_script.py"
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")


def command(*words, options=()):
    return [sys.executable, str(ROOT / "sweep.py"), "--script", str(TOY), *map(str, words), "--", *map(str, options)]


def run(folder, *words, options=()):
    return subprocess.run(command(*words, options=options), cwd=folder, capture_output=True, text=True, check=False)


def parts(folder):
    """For every run that is done: (environment, seed) and the steps at which its parts began."""
    found = {}
    for path in sorted(folder.glob("runs/*/results.json")):
        env_id, _, seed, _ = path.parent.name.split("__")
        assert (env_id, int(seed)) not in found, "a run was made twice"
        found[env_id, int(seed)] = json.loads(path.read_text())["parts"]
    return found


def wait_for(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "it did not happen"
        time.sleep(0.05)


def test_a_crashed_run_goes_on_from_its_checkpoint_and_what_is_done_is_skipped(tmp_path):
    words = ("--env-ids", "a", "b", "--seeds", 2, "--jobs", 4)
    first = run(tmp_path, *words, options=("--crash", "5x1"))
    assert first.returncode == 0, first.stderr
    assert parts(tmp_path) == {(env_id, seed): [0, 5] for env_id in "ab" for seed in (1, 2)}
    assert first.stdout.count("crashed on purpose") == 4
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*")}
    again = run(tmp_path, *words, options=("--crash", "5x1"))
    assert "4 of 4 runs are done already" in again.stdout and "starts" not in again.stdout
    assert before == {path: path.stat().st_mtime_ns for path in before}
    rows = json.loads((tmp_path / "runs" / "sweep.json").read_text())
    assert [(row["env_id"], row["runs"], row["win_rate"]["mean"]) for row in rows] == [
        ("a", 2, pytest.approx(0.15)), ("b", 2, pytest.approx(0.15)), ("all", 4, pytest.approx(0.15))
    ]  # fmt: skip
    assert sweep.table(rows) in again.stdout and sweep.table(rows) in (tmp_path / "runs" / "sweep.md").read_text()
    assert (tmp_path / "runs" / "sweep.png").stat().st_size > 1000


def test_a_run_that_crashes_twice_is_given_up_and_the_others_are_made(tmp_path):
    done = run(tmp_path, "--env-ids", "a", "--seeds", 2, "--jobs", 2, options=("--crash", "5x9", "--crash-seed", 2))
    assert done.returncode == 1
    assert parts(tmp_path) == {("a", 1): [0]}
    assert done.stdout.count("crashed on purpose") == 2 and "__2 failed: see" in done.stdout
    again = run(tmp_path, "--env-ids", "a", "--seeds", 2, "--jobs", 2, options=("--crash", "5x9", "--crash-seed", 2))
    assert "goes on" in again.stdout, "the same command tries it again"


def test_a_checkpoint_that_cannot_be_gone_on_from_is_left(tmp_path):
    job = sweep.Job(TOY, "a", 1, ("--total-timesteps", "3"))
    broken = tmp_path / f"{job.name}__1"
    broken.mkdir()
    (broken / "checkpoint.pt").write_text("{")
    place = sweep.Here(sweep.Args((), (), jobs=1), tmp_path)
    assert sweep.run_all([job], place, tmp_path)
    assert job.done(tmp_path) != broken


def test_other_arguments_make_other_runs(tmp_path):
    run(tmp_path, "--env-ids", "a", "--seeds", 1, "--vary", "pause", "0", "0.01", options=("--total-timesteps", 3))
    run(tmp_path, "--env-ids", "a", "--seeds", 1, options=("--total-timesteps", 4))
    made = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/results.json")]
    assert sorted((one["args"]["pause"], one["steps"]) for one in made) == [(0.0, 3), (0.0, 4), (0.01, 3)]


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_sweep_goes_on(tmp_path, number):
    words, options = ("--env-ids", "a", "--seeds", 3, "--jobs", 2), ("--pause", 0.05, "--total-timesteps", 20)
    process = subprocess.Popen(command(*words, options=options), cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.STDOUT)  # fmt: skip
    wait_for(lambda: len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 2)
    process.send_signal(number)
    said, _ = process.communicate()
    assert process.returncode == 1 and "stopped with 3 runs to do: the same command goes on" in said
    saved = {json.loads(path.read_text())["steps"] for path in tmp_path.glob("runs/*/checkpoint.pt")}
    assert max(saved) < 20
    os.rename(tmp_path / "runs", tmp_path / "elsewhere")  # another machine, say
    done = run(tmp_path, *words, "--run-root", "elsewhere", options=options)
    assert done.returncode == 0 and done.stdout.count("goes on") == 2, done.stdout
    os.rename(tmp_path / "elsewhere", tmp_path / "runs")
    began = parts(tmp_path)
    assert began.pop(("a", 3)) == [0]
    assert {part[1] for part in began.values()} == saved


def test_jobs_wait_for_what_they_need(tmp_path):
    first = sweep.Job(TOY, "a", 1, ("--total-timesteps", "3"))
    second = sweep.Job(TOY, "a", 2, ("--reads", sweep.Output(first, "results.json")))
    third = sweep.Job(TOY, "a", 3, ("--reads", sweep.Output(sweep.Job(TOY, "a", 4), "results.json")))
    place = sweep.Here(sweep.Args((), (), jobs=3), tmp_path)
    assert not sweep.run_all([third, second, first], place, tmp_path), "nobody makes what the third needs"
    assert json.loads((second.done(tmp_path) / "results.json").read_text())["read"] == 3
    assert third.done(tmp_path) is None


@pytest.mark.parametrize(
    ("given", "extra", "said"),
    [
        ({"seeds": 0}, [], "--seeds is from 1 up, not 0"),
        ({"vary": (("pause",),)}, [], "--vary takes an option and its values"),
        ({}, ["--seed", "3"], "--seed is the sweep's to set: use --seeds"),
        ({"vary": (("env-id", "a"),)}, [], "--env-id is the sweep's to set: use --env-ids"),
        ({"script": ("nothing.py",)}, [], "--script nothing.py: there is no such file"),
    ],
)
def test_refusals(given, extra, said):
    args = sweep.Args(**{"script": (str(TOY),), "env_ids": ("a",), **given})
    with pytest.raises(SystemExit, match=said):
        sweep.check(args, extra)


def test_runs_share_gpus_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "gpus", lambda: ["3", "5"])
    monkeypatch.setattr(sweep.shutil, "which", lambda name: None)
    place = sweep.Here(sweep.Args((), (), cuda=True, runs_per_gpu=2), tmp_path)
    assert place.room() == 4
    jobs = [sweep.Job(TOY, "a", seed) for seed in range(4)]
    started = [place.start(job, tmp_path, ".", None, tmp_path / f"{job.seed}") for job in jobs]
    assert Counter(gpu for _, gpu in place.running) == {"3": 2, "5": 2}
    for process in started:
        process.process.wait()


@posix
def test_the_gpu_is_shared_only_if_the_service_works(tmp_path, monkeypatch, capsys):
    """A stand-in for the service's control, which notes what it is told; there is no GPU for the probe here."""
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f'#!/bin/sh\necho "$1 $(cat)" >> {tmp_path}/told\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sweep.sys, "executable", "/bin/false")
    with sweep.shared_gpu() as settings:
        assert settings == {} and "does not start here" in capsys.readouterr().out
    monkeypatch.setattr(sweep.sys, "executable", "/bin/true")
    with sweep.shared_gpu() as settings:
        assert Path(settings["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    assert (tmp_path / "told").read_text().split() == ["-d", "quit"] * 2
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "somewhere")
    with sweep.shared_gpu() as settings:
        assert settings == {}, "whoever runs the service already keeps it"


# ---- statistics ----
def test_iqm_is_the_mean_of_the_middle_half():
    assert sweep.iqm(np.arange(1, 9)) == 4.5
    assert sweep.iqm([1000, 2, 3, -1000]) == 2.5
    assert sweep.iqm([4.0, 6.0, 11.0]) == 7.0, "of three none is left out"
    assert sweep.iqm([[1, 2, 3, 4], [8, 6, 5, 7]]).tolist() == [2.5, 6.5]


def test_the_bootstrap_of_a_mean_is_the_closed_form():
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = sweep.bootstrap([values], np.mean)
    margin = 1.96 * values.std() / len(values) ** 0.5
    assert (low, high) == (
        pytest.approx(values.mean() - margin, abs=0.02),
        pytest.approx(values.mean() + margin, abs=0.02),
    )


def test_the_bootstrap_draws_within_strata():
    """Two environments of seeds that agree leave nothing to chance; mixed, they would."""
    assert sweep.bootstrap([[0.0] * 5, [1.0] * 5], np.mean) == [0.5, 0.5]
    low, high = sweep.bootstrap([[0.0] * 5 + [1.0] * 5], np.mean)
    assert low < 0.3 and high > 0.7
    spread = [np.random.default_rng(seed).normal(10.0 * seed, 1.0, 200) for seed in (0, 1)]
    low, high = sweep.bootstrap(spread, np.mean)
    margin = 1.96 * (sum(values.var() / len(values) for values in spread) / 4) ** 0.5
    assert high - low == pytest.approx(2 * margin, rel=0.1)


def test_the_bootstrap_of_the_iqm_has_its_known_width():
    """A trimmed mean has the variance of the values drawn in to the quartiles, by the square of what is kept."""
    values = (np.arange(2000) + 0.5) / 2000
    low, high = sweep.bootstrap([values], sweep.iqm)
    variance = np.clip(values, 0.25, 0.75).var() / 0.5**2 / len(values)
    assert high - low == pytest.approx(2 * 1.96 * variance**0.5, rel=0.1)
    assert (low + high) / 2 == pytest.approx(0.5, abs=0.005)


# ---- a cluster ----
@posix
@pytest.mark.slow
def test_on_a_cluster_a_run_that_loses_its_node_goes_on_elsewhere(tmp_path):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    words = ("--env-ids", "a", "--seeds", 4, "--ray-address")
    options = ("--pause", 0.2, "--total-timesteps", 50, "--reads", "input/number.json")
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "number.json").write_text('{"steps": 7}')
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        _, other = (cluster.add_node(num_cpus=2) for _ in range(2))
        cluster.wait_for_nodes()
        process = subprocess.Popen(command(*words, cluster.address, options=options), cwd=tmp_path, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        wait_for(lambda: len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 4)
        time.sleep(3)
        cluster.remove_node(other, allow_graceful=False)
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said
        began = parts(tmp_path)
        assert len(began) == 4 and sorted(map(len, began.values())) == [1, 1, 2, 2], began
        assert all(part[1] > 1 for part in began.values() if len(part) > 1), "it goes on, it does not begin again"
        made = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/results.json")]
        assert {one["read"] for one in made} == {7}, "what arguments name has gone along"

        options = ("--pause", 0.2, "--total-timesteps", 40)
        process = subprocess.Popen(command(*words, cluster.address, options=options), cwd=tmp_path, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        wait_for(lambda: len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 6)
        process.send_signal(signal.SIGINT)
        assert "stopped with 4 runs to do: the same command goes on" in process.communicate(timeout=60)[0]
        here = run(tmp_path, *words[:-1], "--jobs", 4, options=options)
        assert here.returncode == 0 and here.stdout.count("goes on") == here.stdout.count("starts") == 2, here.stdout
    finally:
        cluster.shutdown()


def test_without_ray_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit, match=r'pip install -e "\.\[ray\]"'):
        sweep.OnRay(sweep.Args((), ()), tmp_path)

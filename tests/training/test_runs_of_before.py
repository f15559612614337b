"""Runs that were made before environments, training and experiments were packages: they go on as if nothing had moved.

The weights of omg_iql.py's are rounded, so that the file is small.
"""

import json
import tarfile

import pytest
import torch
from helpers import ROOT, run_script

import envs
from experiments import evaluate
from training import checkpoints, play
from training.args import use_new_names
from training.episodes import load_runner
from training.team import Team

STEPS = {"iql": 93, "omg_iql": 400, "ippo": 96}  # at which they were stopped
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=STEPS)
def run(request, tmp_path):
    """The folder of a run that was stopped."""
    with tarfile.open(ROOT / "tests" / "data" / "runs_of_before" / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path)
    return tmp_path / request.param


def test_it_is_resumed(run, capsys):
    saved = checkpoints.read_run(run)
    assert saved["progress"]["steps"] == STEPS[run.name] and not saved["progress"]["complete"]
    names = run_script([str(ROOT / f"{run.name}.py"), "--resume", str(run)])
    assert "is missing" not in capsys.readouterr().out, "it goes on exactly"
    results = json.loads((run / "results.json").read_text())
    assert results["complete"] and results["steps"] >= saved["args"]["total_timesteps"]
    assert results["updates"] > saved["updates"] and names["run"].first_step == STEPS[run.name]


def test_it_is_played_and_plays_in_teams(run):
    saved = checkpoints.read_run(run)
    env = envs.make(saved["env_id"], num_envs=4)
    returns, lengths, _ = load_runner(run, env).evaluate(8)
    assert returns.isfinite().all() and (lengths > 0).all()
    act, *_ = play.load_policy(str(run), envs.make(saved["env_id"]))
    assert callable(act)
    team = Team(env, f"{env.n_agents - 1}other1learner", pool=[run])
    env.reset()
    action = torch.zeros(team.learner_seats.shape, dtype=torch.long)
    joint = team.joint_action(action, torch.full((4, env.n_agents), -1))
    assert joint.shape == (4, env.n_agents)


def test_it_is_evaluated(run, tmp_path):
    saved = checkpoints.read_run(run)
    policy = envs.make(saved["env_id"]).policies[0]
    evaluate.main(evaluate.Args((str(run),), (policy,), episodes=6, out=tmp_path / "out"))
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert rows[0]["algorithm"] == run.name and rows[0]["episodes"] == 6


def test_options_of_before_are_accepted_and_named(capsys):
    words = ["--encounter=5", "--keep-memory", "--no-tell-who", "--checkpoint_at", "0.5", "--tau", "0.1", "encounter"]
    names = ["--matches-per-partner=5", "--persist-hidden", "--no-oracle", "--keep-checkpoints", "0.5"]
    assert use_new_names(words) == [*names, "--tau", "0.1", "encounter"]
    assert (
        "--encounter is --matches-per-partner now.\n--keep-memory is --persist-hidden now." in capsys.readouterr().out
    )

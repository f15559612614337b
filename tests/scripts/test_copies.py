"""Copies of scripts with changed networks: their runs can be played, evaluated, and trained with, as any others."""

import json
import os

import pytest
import torch
from helpers import ALL_SCRIPTS, ROOT, command_line, run_script, train, write_run
from PIL import Image
from test_sweep import run as sweep
from test_team import compare_with_scripts

import envs
from experiments import evaluate
from training import checkpoints, play
from training.stacked import can_stack
from training.team import Team, read_pool


def write_copy(path, original, *changes):
    """Writes a copy of a script with some of its text replaced."""
    text = (ROOT / f"{original}.py").read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{original}.py has changed: {old}"
        text = text.replace(old, new)
    path.write_text(text)


# ---- copies with an extra layer, through the commands ----
COPIES = {
    "mine": (
        "qmix",
        (
            "            self.fc1 = nn.Linear(inputs, args.hidden_dim)\n",
            "            self.fc1 = nn.Linear(inputs, args.hidden_dim)\n"
            "            self.fc_extra = nn.Linear(args.hidden_dim, args.hidden_dim)\n",
        ),
        ("        h = self.rnn(x, h)", "        h = self.rnn(F.relu(self.fc_extra(x)), h)"),
    ),
    "my_omg": (
        "omg_iql",
        (
            "        self.code = nn.Linear(64,",
            "        self.fc_extra = nn.Linear(64, 64)\n        self.code = nn.Linear(64,",
        ),
        ("self.code(F.relu(self.fc1(", "self.code(self.extra(self.fc1("),
        (
            "    def unroll(self, obs, visible_last_action, seat):",
            "    def extra(self, x):\n        return F.relu(self.fc_extra(F.relu(x)))\n\n"
            "    def unroll(self, obs, visible_last_action, seat):",
        ),
    ),
}  # name -> the script that it is a copy of, and changes


def options_of(original, **options):
    """The words of a small training run after the script's name."""
    return command_line(original, "runs", options)[1:]


def results_of(folder, pattern):
    (path,) = folder.glob(f"{pattern}/results.json")
    return path.parent.relative_to(folder), json.loads(path.read_text())


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """(a folder with the copies, their runs by name, a run of qmix.py)"""
    folder = tmp_path_factory.mktemp("copies")
    for name, (original, *changes) in COPIES.items():
        write_copy(folder / f"{name}.py", original, *changes)
    made = {}
    for name, (original, *_) in COPIES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            run_script([f"{name}.py", *options_of(original)])
        path, results = results_of(folder, f"runs/3m__{name}__1__*")
        assert results["algorithm"] == name and results["steps"] >= 400 and results["updates"] > 0
        made[name] = path
        networks = checkpoints.read_run(folder / path)["networks"]
        assert any("fc_extra.weight" in weights for weights in networks.values())
    write_run(folder / "runs" / "stranger", "qmix", envs.make("3m"))
    return folder, made, "runs/stranger"


@pytest.mark.slow
def test_copies_are_evaluated_as_egos_and_as_others(copies, monkeypatch, one_thread):
    folder, made, stranger = copies
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMG_SCRIPTS", "")
    algorithms = {**{str(path): name for name, path in made.items()}, "weakest": "scripted"}  # of the egos
    others = (*map(str, made.values()), stranger)
    scripts = tuple(f"{name}.py" for name in COPIES)
    command = evaluate.Args(tuple(algorithms), others, episodes=3, out=folder / "evaluation", script=scripts)
    evaluate.main(command)
    rows = json.loads((folder / "evaluation" / "results.json").read_text())["rows"]
    assert [(row["ego"], row["other"]) for row in rows] == [
        (ego, other) for ego in algorithms for other in (*others, "all", "mixed")
    ]
    for row in rows:
        assert row["algorithm"] == algorithms[row["ego"]]
        assert row["episodes"] == (3 if row["other"] in others else 9)
        assert ("hit_ratio" in row) == (row["algorithm"] == "my_omg"), "the model's metrics"


@pytest.mark.slow
def test_omg_learns_in_a_team_with_copies(copies, monkeypatch, one_thread):
    folder, made, _ = copies
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMG_SCRIPTS", os.pathsep.join(f"{name}.py" for name in COPIES))
    train("omg_iql", "with_copies", team="1mine1my_omg1omg", pool=tuple(made.values()))
    _, results = results_of(folder, "with_copies/3m__omg_iql__1__*")
    assert results["algorithm"] == "omg_iql" and results["updates"] > 0
    assert set(results["omg"]) >= {"hit_ratio", "active_dims"}
    assert {"swap_same", "swap_other"} & set(results["omg"])


@pytest.mark.slow
def test_a_sweep_runs_copies_beside_the_originals(copies, monkeypatch):
    folder, *_ = copies
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = options_of("qmix", total_timesteps=300, eval_interval=200)
    at = options.index("--run-root")
    del options[at : at + 2]  # the sweep has its own
    words = ("--env-ids", "3m", "--seeds", 1, "--jobs", 2, "--run-root", "sweep")
    failed, output = sweep(folder, *words, scripts=("mine.py", "qmix.py"), options=options)
    assert not failed, output
    rows = json.loads((folder / "sweep" / "sweep.json").read_text())
    assert [(row["script"], row["env_id"], row["runs"]) for row in rows] == [("mine", "3m", 1), ("qmix", "3m", 1)]
    _, results = results_of(folder, "sweep/3m__mine-*")
    assert results["algorithm"] == "mine"


@pytest.mark.slow
def test_matches_of_copies_are_rendered(copies, monkeypatch):
    folder, made, _ = copies
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMG_SCRIPTS", "")
    for name, path in made.items():
        play.main(play.Args("3m", policy=str(path), out=folder / f"{name}.gif", script=(f"{name}.py",)))
        with Image.open(folder / f"{name}.gif") as image:
            assert image.n_frames > 5


# ---- copies as team-mates: whose weights can be stacked ----
EXTRA_LAYER = COPIES["mine"][1:]
CHANGES = {
    "another activation": [("x = F.relu(self.fc1(", "x = torch.tanh(self.fc1(")],
    "scaled observations": [("self.fc1(torch.cat((obs, ", "self.fc1(torch.cat((0.5 * obs, ")],
    "no seat": [("last_action, seat), -1)", "last_action, 0 * seat), -1)")],
    "no last action": [("torch.cat((obs, last_action, ", "torch.cat((obs, 0 * last_action, ")],
    "a hidden state that decays": [("h = self.rnn(x, h)", "h = self.rnn(x, 0.5 * h)")],
    "an extra layer": EXTRA_LAYER,
}


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """make_run(changes, env, ...) -> a run of changed_iql.py, a copy of iql.py that is in the current folder"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMG_SCRIPTS", "changed_iql.py")

    def make(changes, env, seed=0, scale=3):
        write_copy(tmp_path / "changed_iql.py", "iql", *changes)
        monkeypatch.setitem(ALL_SCRIPTS, "changed_iql", checkpoints.load_script("changed_iql"))
        return write_run(tmp_path / "runs" / f"{seed}_{scale}", "changed_iql", env, seed, scale)

    return make


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_that_computes_something_else_is_not_stacked(make_run, change, one_thread):
    """Not even where it has the same layers, and whether or not its policy has learned to prefer some actions."""
    env = envs.make("8m", num_envs=4)
    for seed in range(2):
        for scale in (1, 3):
            (run,) = read_pool([make_run(CHANGES[change], env, seed, scale)], env)
            assert not can_stack(run, env), (seed, scale)


@pytest.mark.parametrize("change", [None, "another activation", "an extra layer"])
def test_a_copy_acts_as_its_script_does(make_run, change, one_thread):
    env = envs.make("8m", num_envs=12)
    path = make_run(CHANGES[change] if change else (), env)
    original = write_run(path.parent / "original", "iql", env, 1)
    team = Team(env, "4changed_iql1nearest2iql1learner", pool=[path, original], seed=3)
    assert len(team.players) == (0 if change is None else 1)
    assert len(team.networks.slots) == (2 if change is None else 1), "an unchanged copy is stacked"
    compare_with_scripts(team)


# ---- runs whose script cannot be used ----
@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("gone", r"there is no script gone\.py in .*; one elsewhere runs only if you name it"),
        ("here", r"there is no script here\.py in .*; one elsewhere runs only if you name it"),
        ("../iql", r"algorithm is the name of a script, not .\.\./iql"),
        ("notes", r"notes\.py is not a training script: it has no load_player"),
    ],
)
def test_a_run_without_its_script_is_rejected_in_one_line(tmp_path, monkeypatch, algorithm, message, one_thread):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.py").write_text("raise RuntimeError('it is not imported')\n")
    (tmp_path / "here.py").write_text(
        "raise RuntimeError('it is not imported')\ndef load_player(run, env, seats): ...\n"
    )
    monkeypatch.setenv("OMG_SCRIPTS", "notes.py")
    env = envs.make("3m", num_envs=4)
    folder = write_run(tmp_path / "run", "iql", env)
    saved = checkpoints.read_run(folder)
    torch.save({**saved, "algorithm": algorithm}, folder / "checkpoint.pt")
    arguments = {"others": ("nearest",), "episodes": 3, "out": tmp_path / "out"}
    rejections = [
        lambda: Team(env, "2other1learner", pool=[folder]),
        lambda: train("iql", tmp_path, team="2other1learner", pool=(folder,)),
        lambda: evaluate.main(evaluate.Args(ego=(str(folder),), **arguments)),
        lambda: evaluate.main(evaluate.Args(ego=("nearest",), **{**arguments, "others": (str(folder),)})),
        lambda: play.load_policy(str(folder), env),
    ]
    for reject in rejections:
        with pytest.raises((ValueError, SystemExit), match=message) as error:
            reject()
        assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()

"""Files from somebody else: whatever is wrong with one, it is refused in one line before a network is built."""

import copy
import functools
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import QUICK, ROOT, resume_file, run_script, stopped

import envs
import iql
import omg_iql
from experiments import evaluate
from experiments.jobs import run_all
from training import checkpoints, files, play
from training.args import parse_args
from training.episodes import load_runner
from training.pretraining import load_pretrained
from training.run import initialise_from
from training.team import Team, read_pool

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """(the folder of a stopped run, its checkpoint, its resume file)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda number: None)
        folder = stopped("iql", tmp_path_factory.mktemp("original"))
    return folder, checkpoints.read(folder / "checkpoint.pt"), checkpoints.read(resume_file(folder))


def put(content, path, value):
    """A copy with another value at a path of keys; `...` removes the key."""
    content = copy.deepcopy(content)
    *parents, last = path.split("/")
    place = content
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return content


WEIGHT = "networks/target_agents/fc1.weight"
KEYS = ("algorithm", "env_id", "sizes", "args", "networks", "optimizer", "updates", "progress")
VALUES = {
    "algorithm": ["os", "../../evil", "missing", 3, "a b"],
    "env_id": ["8m", "../3m", 3],
    "sizes": [{}, {"n_agents": 3}, []],
    "sizes/n_agents": [-1, "3", 10**30, 4],
    "sizes/obs_dim": [7, 2.0, True],
    "args": [[], {3: 4}],
    "args/hidden_dim": [10**9, 10**5, 17, -1, 0, "16", None, 2.5, True],
    "args/exp_name": ["../../x", "/etc/x", 5, ".."],
    "args/env_id": ["../../3m", "", 3],
    "args/gamma": [float("nan"), "a", 7],
    "args/share_parameters": [False, 3],
    "args/seed": [-1, "1"],
    "args/seat": ["x" * 10**4],
    "networks": [[], {}, {"agents": 3}, {"target_agents": {"fc1.weight": 3}}],
    WEIGHT: [torch.full((16, 36), torch.nan), torch.zeros(2, 2), torch.zeros(1).expand(10**6, 10**6), 3, ...],
    "networks/target_agents/a\nb": [torch.zeros(2)],
    "optimizer": [{}, {"state": {}, "param_groups": []}, 3],
    "optimizer/state/0/exp_avg": [3, None, torch.zeros(()), torch.zeros(2, 2), ...],
    "updates": [-1, "1", 1.5],
    "progress/steps": [-1, 10**30, "4", ...],
    "progress/evals": [3, ...],
    "progress/complete": [3],
    "resume": [torch.zeros(2), torch.zeros(0), "../checkpoint.pt", 3],
}
CHECKPOINTS = [pytest.param(key, ..., marks=pytest.mark.slow) for key in KEYS]
for path, (first, *others) in VALUES.items():
    CHECKPOINTS += [(path, first), *(pytest.param(path, value, marks=pytest.mark.slow) for value in others)]
PLAYS = {"optimizer", "updates", "args/seed", "args/seat", "args/gamma"}  # what a player does not need


def name_of(value):
    return "removed" if value is ... else f"tensor {tuple(value.shape)}" if torch.is_tensor(value) else str(value)[:30]


def refused(action):
    """One line, and exit code 2 where the program ends."""
    with pytest.raises((ValueError, SystemExit)) as error:
        action()
    message = str(error.value)
    assert message and "\n" not in message and len(message) < 600
    assert getattr(error.value, "code", 2) == 2
    return message


def resume(folder):
    run_script([str(ROOT / "iql.py"), "--resume", str(folder)])


@pytest.mark.parametrize(("path", "value"), CHECKPOINTS, ids=name_of)
def test_checkpoints(original, path, value, tmp_path):
    folder, content, _ = original
    torch.save(put(content, path, value), tmp_path / "checkpoint.pt")
    (tmp_path / content["resume"]).write_bytes((folder / content["resume"]).read_bytes())
    env = envs.make("3m", num_envs=2)
    refused(lambda: resume(tmp_path))
    players = [lambda: load_runner(tmp_path, env), lambda: Team(env, "2other1learner", pool=[str(tmp_path)])]
    for load in players:
        if path.split("/")[0] in PLAYS | {"progress", "resume"} or path in PLAYS:
            continue
        refused(load)


def test_a_file_names_no_code(original, tmp_path, monkeypatch):
    """Its id of an environment, its options and its script."""
    folder, content, _ = original
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(envs, "code_asked_for", set())
    world = "open('called', 'w')\nfrom pettingzoo import ParallelEnv\nclass parallel_env(ParallelEnv): ..."
    Path("world.py").write_text(world)
    bad, manifest = "pettingzoo:world", Path("manifest.json")
    manifest.write_text(json.dumps({"env_id": bad, "measure": "return", "strangers": []}))
    run = tmp_path / "run"
    run.mkdir()
    (run / content["resume"]).write_bytes((folder / content["resume"]).read_bytes())
    torch.save(put(put(content, "env_id", bad), "args/env_id", bad), run / "checkpoint.pt")
    ego = {"ego": (str(run),), "others": ("random",), "out": tmp_path / "out"}
    for load, option in {
        lambda: resume(run): "--env-id",
        lambda: play.main(play.Args(policy=str(run))): "python -m training.play",
        lambda: evaluate.main(evaluate.Args(**ego)): "--env-id",
        lambda: evaluate.main(evaluate.Args(**{**ego, "ego": ("random",), "others": (str(run),)})): "--env-id",
        lambda: evaluate.main(evaluate.Args(**{**ego, "bounds": manifest})): "--env-id",
        lambda: checkpoints.script_of(run): "--env-id",
    }.items():
        assert refused(load).endswith(f"is of an environment whose code runs only if you name it: {option} {bad}")
    assert not Path("called").exists()
    monkeypatch.setattr("training.args.exit_on_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", ["iql.py", "--resume", str(run), "--env-id", bad])
    args = parse_args(iql.Args, "iql.py")
    args.size_limit.remove()
    assert args.env_id == bad


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_nothing_is_written_through_links(original, tmp_path):
    folder, *_ = original
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("file", "checkpoint.pt"):
        (outside / name).write_text("mine")
    for number, name in enumerate((".lock", "match.gif", "at-0.5", "at-1/checkpoint.pt")):
        run = shutil.copytree(folder, tmp_path / str(number), ignore=shutil.ignore_patterns(".lock"))
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(outside if name == "at-0.5" else outside / "file")
        assert f"{name} is a link" in refused(functools.partial(resume, run))
    (run / ".lock").symlink_to(outside / "file")
    with pytest.raises(OSError, match="is a link"):
        files.FolderLock(run).acquire()
    (run / ".lock").unlink()
    os.link(outside / "file", run / ".lock")
    with pytest.raises(OSError, match="is a link"):
        files.FolderLock(run).acquire()
    (run / f".results.json.{os.getpid()}.part").symlink_to(outside / "file")
    files.write_text(run / "results.json", "new")
    files.write_text(run / "at-1" / "checkpoint.pt", "new")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "3m__iql__1.log").symlink_to(outside / "file")
    with pytest.raises(SystemExit):
        run_all([], None, tmp_path)
    assert {path.read_text() for path in outside.iterdir()} == {"mine"}


def test_a_file_does_not_say_where_the_log_goes(original, tmp_path, monkeypatch):
    _, content, _ = original
    bad = put(put(content, "args/track", True), "args/wandb_entity", "theirs")
    torch.save(bad, tmp_path / "checkpoint.pt")
    monkeypatch.setattr("training.args.exit_on_signals", lambda: None)
    for words, expected in (([], (False, None)), (["--track", "--wandb-entity", "mine"], (True, "mine"))):
        monkeypatch.setattr(sys, "argv", ["iql.py", "--resume", str(tmp_path), *words])
        args = parse_args(iql.Args, "iql.py")
        args.size_limit.remove()
        assert (args.track, args.wandb_entity) == expected


@pytest.mark.parametrize("content", [b"", b"x" * 1000, "cut", [1, 2], "torch.nn.Linear", {}], ids=str)
def test_files_of_other_kinds(original, content, tmp_path):
    folder, _, _ = original
    path = tmp_path / "checkpoint.pt"
    if content == "cut":
        whole = (folder / "checkpoint.pt").read_bytes()
        content = whole[: len(whole) // 2]
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(torch.nn.Linear(2, 2) if isinstance(content, str) else content, path)
    env, vae = envs.make("3m"), SimpleNamespace(latent_dim=1, subgoal_input="obs", predict="view")
    for load in (
        lambda: resume(tmp_path),
        lambda: load_runner(tmp_path, env),
        lambda: read_pool([str(tmp_path)], env),
        lambda: initialise_from(tmp_path, SimpleNamespace(env=env)),
        lambda: load_pretrained("--vae", path, omg_iql.requirements(vae, env), None, "model"),
    ):
        assert str(tmp_path) in refused(load)


def repeated():
    """2**60 parts in a kilobyte."""
    value = []
    for _ in range(60):
        value = [value, value]
    return value


def nested():
    """As deep as pickling allows."""
    value = []
    for _ in range(150):
        value = {"a": value}
    return value


def inside_itself():
    value = []
    value.append(value)
    return value


HOSTILE = {
    "repeated": (repeated, "has too many parts"),
    "nested": (nested, "has too many parts"),
    "inside itself": (inside_itself, "has too many parts"),
    "long name": (lambda: {"x" * 10**4: 1}, "has a part named"),
    "no name": (lambda: {(1, 2): 1}, "has a part named"),
    "many digits": (lambda: 10**50, "is of the type int"),
    "complex": (lambda: complex("nan"), "is of the type complex"),
    "bytes": (lambda: b"1", "is of the type bytes"),
    "complex tensor": (lambda: torch.full((2,), complex("nan")), "no plain tensor"),
    "meta": (lambda: torch.ones(10**9, device="meta"), "no plain tensor"),
    "float8": (lambda: torch.ones(2).to(torch.float8_e4m3fn), "no plain tensor"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "no plain tensor"),
    "nested tensor": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "no plain tensor"),
}


@pytest.mark.filterwarnings("ignore")  # some kinds of tensors are about to go
@pytest.mark.parametrize("kind", HOSTILE)
def test_what_no_file_of_this_project_has(original, kind, tmp_path):
    (make, reason), (_, content, _) = HOSTILE[kind], original
    for place in ("args", "progress", "networks"):
        torch.save({**content, place: {**content[place], "x": make()}}, tmp_path / "checkpoint.pt")
        assert reason in refused(lambda: resume(tmp_path))
        assert reason in refused(lambda: read_pool([str(tmp_path)], envs.make("3m")))


def test_archives_that_would_grow(original, tmp_path):
    """Compressed entries, one piece of data under many names, and more than is read."""
    path = tmp_path / "checkpoint.pt"
    with zipfile.ZipFile(original[0] / "checkpoint.pt") as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}

    def write(compression=zipfile.ZIP_STORED, times=1, extra=b""):
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, data in entries.items():
                archive.writestr(name, data + extra * name.endswith("data.pkl"))
            largest = max(archive.infolist(), key=lambda entry: entry.file_size)
            archive.infolist().extend([largest] * (times - 1))

    write()
    assert checkpoints.read_run(tmp_path)["algorithm"] == "iql"
    for options, reason in (
        ({"compression": zipfile.ZIP_DEFLATED}, "it is compressed"),
        ({"times": 100}, "it claims to be larger than it is"),
        ({"extra": bytes(2**22)}, "it has too many parts"),
    ):
        write(**options)
        assert reason in refused(lambda: checkpoints.read_run(tmp_path))
    entries = {name.replace("data.pkl", "DATA.PKL"): data for name, data in entries.items()}  # torch finds it, too
    entries[next(name for name in entries if name.endswith("DATA.PKL"))] += bytes(2**22)
    write()
    assert "it has too many parts" in refused(lambda: checkpoints.read_run(tmp_path))
    torch.save({"networks": {}}, path, _use_new_zipfile_serialization=False)  # torch goes by the first bytes
    old = path.read_bytes()
    entries = {"archive/version": b"3"}
    write()
    path.write_bytes(old + path.read_bytes())
    assert "in front of its archive" in refused(lambda: checkpoints.read_run(tmp_path))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("steps", 10**6),
        ("rng", ...),
        ("rng", [torch.zeros(3)]),
        ("buffer", {}),
        ("buffer/lengths", torch.full((8,), 10**6)),
        ("buffer/lengths", torch.full((8,), -1)),
        ("buffer/lengths", torch.ones(10**6, dtype=torch.long)),
        ("buffer/cursor", 10**9),
        ("buffer/episodes/obs", torch.zeros(1)),
        ("buffer/episodes/obs", torch.ones(2, 8).to_sparse()),
        ("buffer/episodes/action", ...),
        ("runner", {}),
        ("runner/matches/match", torch.zeros(1)),
    ],
    ids=name_of,
)
def test_resume_files(original, path, value, tmp_path):
    folder, content, state = original
    (tmp_path / "checkpoint.pt").write_bytes((folder / "checkpoint.pt").read_bytes())
    torch.save(put(state, path, value), tmp_path / content["resume"])
    assert "damaged" in refused(lambda: resume(tmp_path))
    (tmp_path / content["resume"]).write_bytes(b"cut")
    assert "damaged" in refused(lambda: resume(tmp_path))


def test_a_network_larger_than_that_of_the_file_is_not_built(original, tmp_path):
    """hidden_dim passes the script's check, but the file has no such weights."""
    _, content, _ = original
    torch.save(put(content, "args/hidden_dim", 8192), tmp_path / "checkpoint.pt")
    assert "larger networks than it has" in refused(lambda: load_runner(tmp_path, envs.make("3m")))
    assert "larger networks than it has" in refused(lambda: resume(tmp_path))
    assert iql.QNetwork(iql.Args(**QUICK), envs.make("3m")).fc1.weight.numel() < checkpoints.LARGEST_WEIGHT

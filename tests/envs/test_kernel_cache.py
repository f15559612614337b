"""Compiled code is kept between runs: never when what it came from was edited, and never at the cost of an error."""

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from numba.core import event

from envs import compiler

ROOT = Path(__file__).parents[2]
HELPER = """
from envs.compiler import scalar

LENGTH, WIDTH = 10, 100
TABLE = (1000, 2000)


@scalar
def stride():
    return 1


def not_compiled():
    return 0
"""
PROGRAM = """
import helper
from envs.compiler import scalar
from helper import LENGTH, TABLE, stride


@scalar
def run_one(op, m, lane, lanes, rule, game):
    game.out[m] = stride() + LENGTH + helper.WIDTH + TABLE[1]
"""
Rule, Game = namedtuple("Rule", "size"), namedtuple("Game", "match out")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")


def played(folder, old="", new="", device="cpu"):
    """(what the program writes, how many functions were compiled for it) with `old` replaced in the helper."""
    for name, text in (("helper", HELPER.replace(old, new) if old else HELPER), ("program", PROGRAM)):
        sys.modules.pop(name, None)
        (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
    sys.path.insert(0, str(folder))
    try:
        run_one = importlib.import_module("program").run_one
    finally:
        sys.path.remove(str(folder))
    out = torch.zeros(2, dtype=torch.int64, device=device)
    game = Game(compiler.view(torch.zeros((2, 4), dtype=torch.int64, device=device)), compiler.view(out))
    with event.install_recorder("numba:compile") as recorder:
        compiler.CompiledRules(run_one, Rule(1), game, out.device, lanes=1)()
    return out[0].item(), len(recorder.buffer)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the program is; NUMBA_CACHE_DIR is the folder `cache` in it."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python tells edits apart by whole seconds
    return tmp_path


EDITS = [("return 1", "return 2", 2112), ("LENGTH, WIDTH = 10, 100", "LENGTH, WIDTH = 20, 200", 2221),
         ("2000", "3000", 3111)]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "value"), EDITS)
def test_an_edit_in_another_module_is_compiled(folder, old, new, value):
    assert played(folder)[0] == 2111
    assert played(folder, old, new)[0] == value


def test_what_is_not_compiled_may_change(folder):
    value, first = played(folder)
    assert first > 0
    assert played(folder) == (value, 0)
    assert played(folder, "return 0", "return 'anything else'") == (value, 0)


@needs_cuda
@pytest.mark.parametrize(("old", "new", "value"), EDITS)
def test_an_edit_in_another_module_is_compiled_for_cuda(folder, old, new, value):
    assert played(folder, device="cuda")[0] == 2111
    assert played(folder, old, new, device="cuda")[0] == value


def test_numba_is_as_it_was_for_other_threads(folder):
    """While a program is compiled, what other threads compile waits, and in the end Numba is as it was."""
    from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
    from numba.np import arrayobj

    def patched():
        return arrayobj.fix_integer_index, JITCodeLibrary.finalize, JITCPUCodegen.set_env, numba.config.CACHE_DIR

    before, left, found = patched(), threading.Event(), []
    played(folder)
    run_one = sys.modules["program"].run_one

    def compile_too():
        with compiler._compiling("cpu", run_one):
            left.wait()

    def last_of_two():
        found.append(numba.njit(lambda values, place: values[place])(np.arange(9)[4:6], -1))

    threads = [threading.Thread(target=target) for target in (last_of_two, compile_too)]
    with compiler._compiling("cpu", run_one):
        for thread in threads:
            thread.start()
            thread.join(1)  # as far as it gets
    left.set()
    for thread in threads:
        thread.join()
    assert patched() == before and found == [5]


DAMAGE = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "garbage": lambda content: bytes(reversed(content)),
    "altered": lambda content: content[:-2000] + np.random.default_rng(0).bytes(1000) + content[-1000:],
    "a folder": None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_compiled_anew(folder, damage):
    value, first = played(folder)
    files = [path for path in (folder / "cache").rglob("*") if path.is_file()]
    assert files
    for path in files:
        content = path.read_bytes()
        path.unlink()
        if DAMAGE[damage]:
            path.write_bytes(DAMAGE[damage](content))
        else:
            path.mkdir()
    assert played(folder) == (value, first)
    if DAMAGE[damage]:
        assert played(folder) == (value, 0)  # and kept again


@contextlib.contextmanager
def full_disk():
    """No file can become longer than 0 bytes."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_keeps_nothing(folder):
    played(folder, "return 1", "return 5")  # what else there is to write
    before = sorted((folder / "cache").rglob("*"))
    for name, text in (("helper", HELPER), ("program", PROGRAM)):
        (folder / f"{name}.py").write_text(text)
    with full_disk(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *_: None)  # the program is there
        patch.setattr(sys, "dont_write_bytecode", True)
        assert played(folder)[0] == 2111
    assert sorted((folder / "cache").rglob("*")) == before
    value, compiled = played(folder)
    assert value == 2111 and compiled > 0


def copy_of_envs(folder):
    shutil.copytree(ROOT / "envs", folder / "envs", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run_in(folder, program, **environment):
    """What a new process prints that imports envs from there."""
    paths = os.pathsep.join((str(folder), str(Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize("place", ["beside the modules", "nowhere"])
@pytest.mark.slow
def test_without_a_place_to_write_it_goes_elsewhere_or_does_without(tmp_path, place):
    """Files where there should be folders: root may write to any folder."""
    copy_of_envs(tmp_path)
    (tmp_path / "file").touch()
    if place == "nowhere":
        (tmp_path / "envs" / "__pycache__").touch()
    old, new, value = EDITS[0]
    program = (
        "from pathlib import Path\n"
        "import test_kernel_cache as test\n"
        f"print(test.played(Path.cwd())[0], test.played(Path.cwd(), {old!r}, {new!r})[0], test.played(Path.cwd())[1])"
    )
    places = dict.fromkeys(("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"), str(tmp_path / "file"))
    first, second, compiled = run_in(tmp_path, program, **places)
    assert (int(first), int(second)) == (2111, value)
    assert (int(compiled) > 0) == (place == "nowhere")


FINGERPRINTS = """
import sys
from envs import compiler, stag_hunt
from envs.battle import battle
from envs.battle import policies as battle_policies
from envs.batch import _programs
functions = stag_hunt.reset_one, stag_hunt.step_one, stag_hunt.observe_one, stag_hunt.act_one
print(compiler.fingerprint(battle.run_here), compiler.fingerprint(battle_policies.act_here))
print(*map(compiler.fingerprint, _programs(*functions)))
"""
BATTLE, BATTLE_POLICIES, HUNT, HUNT_POLICIES = range(4)


@pytest.mark.slow
def test_every_program_goes_by_what_it_is_made_of_and_nothing_else(tmp_path):
    copy_of_envs(tmp_path)
    edits = [
        ("pictures/render.py", None, "SPARE = 1\n", []),
        ("battle/scene.py", None, "SPARE = 1\n", []),
        ("battle/setup.py", "SPAWN_SHIFT = 0.1", "SPAWN_SHIFT = 0.2", [BATTLE]),
        ("battle/paths.py", "return climbs or abs(a - b) < HIGH - LOW", "return abs(a - b) < HIGH - LOW", [BATTLE]),
        ("battle/rules.py", "ENERGY_START, ENERGY_MAX", "ENERGY_MAX, ENERGY_START", [BATTLE]),
        ("batch.py", "match[row, STEP] += 1", "match[row, STEP] += 2", [BATTLE, HUNT]),
        ("compiler.py", "0x7FEB352D", "0x7FEB352F", [BATTLE, BATTLE_POLICIES, HUNT, HUNT_POLICIES]),
        ("stag_hunt.py", "TRIES = 16, 64", "TRIES = 16, 65", [HUNT]),
        ("stag_hunt.py", "best |= 1 << move", "best |= 2 << move", [HUNT_POLICIES]),
    ]
    program = (
        "import sys\nfrom pathlib import Path\n"
        f"text = {FINGERPRINTS!r}\n"
        "exec(text)\n"
        f"for name, old, new, _ in {edits!r}:\n"
        "    path = Path('envs') / name\n"
        "    before = path.read_text(encoding='utf-8')\n"
        "    assert old is None or old in before, (name, old)\n"
        "    path.write_text(before + new if old is None else before.replace(old, new), encoding='utf-8')\n"
        "    for module in [module for module in sys.modules if module.partition('.')[0] == 'envs']:\n"
        "        del sys.modules[module]\n"
        "    exec(text)\n"
        "    path.write_text(before, encoding='utf-8')\n"
    )
    words = run_in(tmp_path, program)
    first, *others = (words[i : i + 4] for i in range(0, len(words), 4))
    assert len(set(first)) == 4 and len(others) == len(edits)
    for edit, prints in zip(edits, others):
        assert [i for i in range(4) if prints[i] != first[i]] == edit[-1], edit


@pytest.mark.slow
def test_edited_rules_are_played(tmp_path):
    """With NUMBA_CACHE_DIR set, as after a pull; an edit of what is not compiled compiles nothing."""
    copy_of_envs(tmp_path)
    program = (
        "from numba.core import event\nimport envs\n"
        "env = envs.make('matrix_ipd')\n"
        "with event.install_recorder('numba:compile') as recorder:\n"
        "    env.reset(seed=0)\n"
        "print(float(env.step([[1, 1]])[1][0, 0]), len(recorder.buffer))"
    )
    rules, other = tmp_path / "envs" / "matrix_games.py", tmp_path / "envs" / "pictures" / "render.py"
    seen = [run_in(tmp_path, program, NUMBA_CACHE_DIR=str(tmp_path / "cache"))]
    other.write_text(other.read_text(encoding="utf-8") + "\nSPARE = 1\n", encoding="utf-8")
    seen.append(run_in(tmp_path, program, NUMBA_CACHE_DIR=str(tmp_path / "cache")))
    before = rules.read_text(encoding="utf-8")
    rules.write_text(before.replace("reward[m, a] = game.payoff", "reward[m, a] = 7 * game.payoff"), encoding="utf-8")
    seen.append(run_in(tmp_path, program, NUMBA_CACHE_DIR=str(tmp_path / "cache")))
    (first, compiled), (second, again), (third, _) = seen
    assert float(first) == float(second) == -2 and int(compiled) > 0 and int(again) == 0
    assert float(third) == -14

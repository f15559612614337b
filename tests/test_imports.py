"""Environments, training, scripts, experiments: nothing imports what stands to its right."""

import ast
import subprocess
import sys

import pytest
from helpers import ALL_SCRIPTS, ROOT
from helpers import SCRIPTS as SCRIPTS_WITH_BUFFERS

from training.options import RunArgs, TeamArgs

PACKAGES = ("envs", "training", "scripts", "experiments")  # in the order of imports
SCRIPTS = (*ALL_SCRIPTS, "pretrain_cvae")
FILES = {
    **{path.relative_to(ROOT).as_posix(): path.relative_to(ROOT).parts[0]
       for package in ("envs", "training", "experiments") for path in (ROOT / package).rglob("*.py")},
    **{path.name: "scripts" for path in ROOT.glob("*.py")},
}  # fmt: skip


def imported(text):
    """The names of all modules that a file imports, also within functions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield node.module


def package_of(module):
    top = module.partition(".")[0]
    return "scripts" if top in SCRIPTS else top


def test_only_the_training_scripts_stand_at_the_top():
    assert {path.stem for path in ROOT.glob("*.py")} == set(SCRIPTS) and len(SCRIPTS) == 15


def test_imports_are_found():
    text = "import torch, envs.gym\ndef f():\n    from training.run import Run\n    import iql\n"
    assert [package_of(name) for name in imported(text)] == ["torch", "envs", "training", "scripts"]


@pytest.mark.parametrize("name", FILES)
def test_nothing_imports_to_the_right(name):
    place = PACKAGES.index(FILES[name])
    found = {package_of(module) for module in imported((ROOT / name).read_text(encoding="utf-8"))}
    assert not found & set(PACKAGES[place + 1 :])


# ---- shared code knows no algorithm ----
def own_options(name):
    (args,) = (
        node for node in ast.parse((ROOT / f"{name}.py").read_text()).body if getattr(node, "name", "") == "Args"
    )
    return {node.target.id for node in args.body if isinstance(node, ast.AnnAssign)}


IN_COMMON = set.intersection(*map(own_options, SCRIPTS_WITH_BUFFERS))
OF_RUNS = RunArgs.__dataclass_fields__.keys() | TeamArgs.__dataclass_fields__.keys()
OF_ALGORITHMS = set.union(*map(own_options, ALL_SCRIPTS)) - IN_COMMON - OF_RUNS


def asked_for(text):
    """The options that code reads from `args`, and the names of scripts that it has."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] == "args":
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node).startswith(("getattr(args, '", "hasattr(args, '")):
            yield node.args[1].value
        elif isinstance(node, ast.Constant) and node.value in SCRIPTS:
            yield node.value


def test_options_of_algorithms_are_found():
    assert {"td_lambda", "oracle", "num_envs"} <= IN_COMMON and {"latent_dim", "sims", "mixing_dim"} <= OF_ALGORITHMS
    text = 'self.args.sims, getattr(args, "trees", 1), f(name == "qmix"), args.gamma'
    assert {*asked_for(text)} == {"sims", "trees", "qmix", "gamma"}


@pytest.mark.parametrize("name", [name for name in FILES if FILES[name] in ("envs", "training")])
def test_shared_code_asks_for_no_algorithm(name):
    assert not {*asked_for((ROOT / name).read_text(encoding="utf-8"))} & {*OF_ALGORITHMS, *SCRIPTS}


def test_what_answers_help_is_there_at_once():
    code = "import sys, training.options; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

"""What people who join the project find: the notebook, versions, the citation, continuous integration."""

import importlib.metadata
import json
import re
import sys

import pytest
from helpers import ROOT

import envs

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


# ---- the notebook ----
NOTEBOOK = json.loads(text_of("notebooks/quickstart.ipynb"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
COMMAND = re.compile(r"^(\s*)([!%])(.*)$", re.MULTILINE)  # of the shell, or of the notebook itself


def test_the_notebook_has_the_format_of_notebooks():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5) and isinstance(NOTEBOOK["metadata"], dict)
    for cell in NOTEBOOK["cells"]:
        assert {"cell_type", "id", "metadata", "source"} <= cell.keys() and re.fullmatch(r"[\w-]{1,64}", cell["id"])
        assert all(isinstance(line, str) for line in cell["source"])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None  # nothing of a run is kept
        else:
            assert cell["cell_type"] == "markdown" and cell.keys() == {"cell_type", "id", "metadata", "source"}
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids) < 10  # one page


def test_the_code_of_the_notebook_compiles():
    assert len(CODE) >= 4
    for number, cell in enumerate(CODE):
        compile(COMMAND.sub(r"\1pass", cell), f"cell {number}", "exec")


def test_the_commands_of_the_notebook_exist():
    commands = [found[3] for cell in CODE for found in COMMAND.finditer(cell)]
    programs = [re.match(r"python (?:-m )?(\S+)", command) for command in commands]
    for command, program in zip(commands, programs):
        if program is None:
            assert command.startswith(("git clone ", "pip install "))
            continue
        module = importlib.import_module(program[1].removesuffix(".py"))
        options = set(re.findall(r"--([a-z-]+)", command))
        assert options <= {name.replace("_", "-") for name in module.Args.__dataclass_fields__}
    assert [program[1] for program in programs if program] == ["qmix.py", "training.play"]
    names = {name for cell in CODE for name in re.findall(r"^(\w+) = ", cell, re.MULTILINE)}
    assert set(re.findall(r"\{(\w+)\}", " ".join(commands))) <= names  # what commands take from the cells


# ---- versions ----
def test_a_copy_that_is_not_installed_has_a_version_too(monkeypatch):
    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    assert re.fullmatch(r"\d+\.\d+\.\d+|0\+unknown", envs.__version__)
    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert envs._version() == "0+unknown"


@pytest.mark.skipif(tomllib is None, reason="this Python reads no TOML")
def test_one_version_everywhere():
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    assert envs.__version__ in (project["version"], "0+unknown")
    assert f"\nversion: {project['version']}\n" in text_of("CITATION.cff")
    assert f"\n## {project['version']}" in text_of("CHANGELOG.md")
    for classifier in project["classifiers"]:
        minor = re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", classifier)
        assert not minor or 10 <= int(minor[1]) < 14  # as requires-python has it
    assert project["requires-python"] == ">=3.10,<3.14"


# ---- files for other programs ----
def test_the_citation_has_the_project_and_the_paper():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    (paper,) = citation["references"]
    title, year = re.search(r"title += \{(.*?)\}.*year += \{(\d+)\}", text_of("README.md"), re.DOTALL).groups()
    assert (paper["title"], paper["year"]) == (title, int(year))
    names = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    assert f"author    = {{{names}}}" in text_of("README.md")


def test_continuous_integration_and_hooks():
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load(text_of(".github/workflows/ci.yml"))["jobs"].values()
    assert job["steps"][-1] == {"run": "bash .ci/run"}
    (repo,) = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"]
    assert [hook["entry"].split()[:2] for hook in repo["hooks"]] == [["ruff", "check"], ["ruff", "format"]]
    for command in ('pip install -e ".[test]"', "ruff check --fix . && ruff format .", "pytest -m 'not slow'"):
        assert f"\n{command} " in text_of("CONTRIBUTING.md")

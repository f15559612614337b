"""The pages in docs/ and the help texts against the code: options, commands, logged keys and links."""

import ast
import functools
import importlib.util
import re
import subprocess
import sys

import pytest
import tyro
from helpers import ALL_SCRIPTS, PLANNERS, POLICY_SCRIPTS, ROOT, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.args import option
from training.checkpoints import FORMER_OPTIONS

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "results").glob("*.md")),
]
SCRIPT_FILES = [f"{name}.py" for name in (*ALL_SCRIPTS, "pretrain_cvae")]
TOOLS = [
    "training/play.py",
    *(f"experiments/{name}.py" for name in ("sweep", "evaluate", "strangers", "paper", "compare")),
]
BENCHMARKS = {f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py")}
PROGRAMS = [*SCRIPT_FILES, *TOOLS, *sorted(BENCHMARKS - {"benchmarks/rmsprop.py"})]  # which has no options
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
PAGE_OF = {  # of scripts that share one
    **dict.fromkeys(("vdn", "qmix", "qtran"), "value_factorisation"),
    **dict.fromkeys(("ippo", "mappo"), "ppo"),
    **dict.fromkeys(("naive_om_iql", "liam_iql", "mix_iql"), "opponent_models"),
    "pretrain_cvae": "omg_iql",
}
KEY = re.compile(r"`((?:charts|losses|eval|final|best|best_script|brdiv|omg?|pretrain)/\w+(?:/\w+)?)`")
OF_OTHER_PROGRAMS = re.compile(r"\b(?:tensorboard|ray start|ruff check|pip install) [^#`\n]*")
EXAMPLES = {"--help", "--my-option"}
pytestmark = pytest.mark.usefixtures("one_thread")


# ---- options ----
@functools.cache
def fields_of(program, name="Args"):
    """name -> (its type, its text: a comment, or a string below) of every field of a program's Args."""
    text = (ROOT / program).read_text(encoding="utf-8")
    lines = text.splitlines()
    (args,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {}
    for base in args.bases:
        found |= fields_of("training/options.py", base.id)
    for node, following in zip(args.body, [*args.body[1:], None]):
        if not isinstance(node, ast.AnnAssign):
            continue
        above, line = lines[node.lineno - 2].strip(), lines[node.end_lineno - 1]
        help_text = line[node.end_col_offset :].strip() or (above if above.startswith("#") else "")
        if isinstance(following, ast.Expr):
            help_text = following.value.value
        found[node.target.id] = ast.unparse(node.annotation), " ".join(help_text.removeprefix("#").split())
    return found


@functools.cache
def options_of(program):
    options = set()
    for name, (kind, _) in fields_of(program).items():
        option = name.replace("_", "-")
        options |= {f"--{option}", f"--no-{option}"} if kind == "bool" else {f"--{option}"}
    return options


def test_options_are_found():
    assert {"--cuda", "--no-cuda", "--env-id"} <= options_of("iql.py") and "--no-env-id" not in options_of("iql.py")
    assert fields_of("iql.py")["gamma"] == ("float", "discount factor")


def args_class(program, monkeypatch):
    if "/" not in program:
        return importlib.import_module(program.removesuffix(".py")).Args
    spec = importlib.util.spec_from_file_location(program.replace("/", "_").removesuffix(".py"), ROOT / program)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where tyro looks for its source
    spec.loader.exec_module(module)
    return module.Args


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_option_has_a_help_text(program, capsys, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        tyro.cli(args_class(program, monkeypatch), args=["--help"])
    assert not ended.value.code
    shown = re.sub(r"[│╭╮╰╯─\s]", "", capsys.readouterr().out)  # without its frame and line breaks
    for name, (_, help_text) in fields_of(program).items():
        assert help_text, f"--{name} has no help text"
        assert "".join(help_text.split()) in shown, f"--help does not show the text of --{name}"


@pytest.mark.slow
@pytest.mark.parametrize("program", ["iql.py", *TOOLS])
def test_every_command_answers_help(program):
    module = program.removesuffix(".py").replace("/", ".")
    words, name = (["-m", module], f"python -m {module}") if "/" in program else ([program], program)
    ended = subprocess.run([sys.executable, *words, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith(f"usage: {name} [-h]")


def test_play_answers_to_its_old_name():
    words = [sys.executable, "-m", "envs.play", "--help"]
    assert subprocess.check_output(words, cwd=ROOT, text=True).startswith("usage: python -m training.play [-h]")


# ---- commands and options in the text ----
def commands(text):
    """(program, options) of every command with python; options behind ` -- ` are those of another program."""
    for line in text.replace("\\\n", " ").splitlines():
        for found in re.finditer(r"python (?:-m (training\.play|experiments\.\w+)|([\w/]+\.py))([^#`|;&]*)", line):
            program = f"{found[1].replace('.', '/')}.py" if found[1] else found[2]
            yield program, re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", found[3].partition(" -- ")[0])


def test_commands_are_found():
    text = "`python iql.py --cuda` and\n"
    text += "python -m experiments.sweep --seeds 5 \\\n  --vary tau 1 -- --gamma 1  # --not-this\n"
    assert list(commands(text)) == [("iql.py", ["--cuda"]), ("experiments/sweep.py", ["--seeds", "--vary"])]
    assert list(commands("python -m training.play 3m --out a.gif")) == [("training/play.py", ["--out"])]


@EVERY_PAGE
def test_commands_have_options_that_exist(page):
    for program, options in commands(page.read_text(encoding="utf-8")):
        if program == "mine.py":  # an example
            continue
        assert (ROOT / program).is_file(), program
        if program in PROGRAMS:
            assert set(options) - EXAMPLES <= options_of(program), f"{program}: {set(options) - options_of(program)}"


@EVERY_PAGE
def test_options_in_the_text_exist(page):
    text = OF_OTHER_PROGRAMS.sub("", page.read_text(encoding="utf-8"))
    known = EXAMPLES.union(*map(options_of, PROGRAMS), map(option, FORMER_OPTIONS))  # the change log has these
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)) <= known


# ---- logged keys ----
@pytest.fixture(scope="module")
def logged_keys(complete_run, tmp_path_factory):
    """logged_keys(script): what a short run logs where agents have rewards of their own; numbers at the end are N."""

    @functools.cache
    def get(name, env_id="stag_hunt_4x4"):
        if name in ("omg_iql", "pretrain_cvae"):  # pre-training logs something every 100 updates
            folder = tmp_path_factory.mktemp(name)
            video = {"capture_video": True} if name == "omg_iql" else {}  # and it is the one with a video
            names = train(name, folder, env_id="stag_hunt_4x4", pretrain_updates=100, **video)
        else:
            names = complete_run(name, env_id)
        folder = names["folder"] if name == "pretrain_cvae" else names["run"].folder
        tags = EventAccumulator(str(folder)).Reload().Tags()
        return {numbered(key) for kind in ("scalars", "histograms", "images") for key in tags[kind]}

    return get


def numbered(key):
    return re.sub(r"\d+$", "N", key)


def page_of(script):
    return PAGE_OF.get(script, script)


def keys_on(page):
    return {numbered(key) for key in KEY.findall((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_every_logged_key_is_documented(name, logged_keys):
    keys = logged_keys(name)
    loss = "losses/policy_loss" if name in (*POLICY_SCRIPTS, *PLANNERS) else "losses/td_loss"
    assert {"charts/episodic_return_N", loss, "eval/win_rate"} <= keys
    assert (name == "omg_iql") == ({"omg/kl_per_dim", "omg/selected_k", "pretrain/kl"} <= keys)
    assert keys - keys_on(page_of(name)) - keys_on("iql") == set()


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({*map(page_of, ALL_SCRIPTS), "scripts"}))
def test_every_documented_key_is_logged(page, logged_keys):
    logged = set().union(*map(logged_keys, (*ALL_SCRIPTS, "pretrain_cvae")))
    logged |= logged_keys("liam_iql", "3m") | logged_keys("iql", "kuhn")  # who wins counts there; sides learn there
    assert keys_on(page) - logged == set()


def test_every_script_has_its_page():
    for script in SCRIPT_FILES:
        page = f"docs/{page_of(script.removesuffix('.py'))}.md"
        assert page in (ROOT / script).read_text(encoding="utf-8")
        assert script in (ROOT / page).read_text(encoding="utf-8"), f"{page} says nothing of {script}"


# ---- links ----
def anchors(path):
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@EVERY_PAGE
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"\w+:", target):  # on the web
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target

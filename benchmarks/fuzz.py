"""Random input for as long as asked: nothing may end in a signal, a hang, a NaN or an error from inside.

    python benchmarks/fuzz.py --minutes 10
    python benchmarks/fuzz.py --parts api --seed 17 --cases 1    one case again

Each part is a function of a seed that yields what came of every try: "done", "refused" or "FAILED" and why. The cases
run in child processes, which are started anew after a crash or a hang.
"""

import _thread
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import json
import math
import os
import queue
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import tyro

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

try:
    import resource
except ImportError:  # Windows
    resource = None

import envs
import iql
import omg_iql
from training.episodes import load_runner
from training.exits import SIGNALS
from training.team import Team

MEMORY = 12 * 2**30  # bytes that a child may have
REFUSALS = (ValueError, TypeError, RuntimeError)


@dataclass
class Args:
    minutes: float = 10.0  # how long to go on, for each part
    parts: list[str] = field(default_factory=lambda: [*PARTS])  # what to try
    ids: list[str] = field(default_factory=lambda: [*IDS])  # environments of the part api
    seed: int = 0  # the first case
    cases: int = 10**9  # how many cases at most, for each part
    patience: float = 120.0  # seconds; a case that takes longer hangs
    child: bool = False  # run the cases here


# ---- random calls of the environments' interface ----
IDS = (
    "3m", "3m", "MMM", "2s3z", "stag_hunt", "stag_hunt_4x4", "stag_hunt_5x3_2h2s", "Foraging-8x8-2p-3f-v3",
    "foraging_orders", "simple_tag_2v2", "popp", "kuhn", "matrix_ipd", "coin_game", "snowdrift_4x4",
)  # fmt: skip
NUMBERS = (-1, 0, 1, 2, 7, 2**31, -(2**63), 10**12, 10**30, 0.5, -1e-3, 1e9, 1e39, math.nan, math.inf, -math.inf)
ODD = (None, True, "", "x", "nearest", "RAND", [], {}, (), [[]], [1, [2]], object(), b"\0", 1j, print)


def pick(rng, items):
    return items[int(rng.integers(len(items)))]


def scalar(rng):
    return pick(rng, ODD if rng.random() < 0.5 else NUMBERS)


def garbage(rng):
    kind = rng.integers(4)
    if kind < 2:
        return scalar(rng)
    array = numbers(rng, pick(rng, ((), (1,), (2, 3), (4, 4), (0,), (3, 1, 2))))
    return array if kind == 2 else torch.as_tensor(array)


def numbers(rng, shape):
    """An array of that shape, of some type and with some values, possible ones or not."""
    kind = rng.integers(5)
    if kind == 0:
        return rng.integers(-2, 9, shape)
    if kind == 1:
        return rng.random(shape) < 0.5
    if kind == 2:
        return rng.random(shape).astype(np.float32) * np.float32(40)
    if kind == 3:
        return rng.integers(-(2**62), 2**62, shape)
    array = np.asarray(rng.random(shape) * 10)
    array[rng.random(shape) < 0.3] = pick(rng, (math.nan, math.inf, -1.0, 1e30))
    return array


def options_of(rng, env_id):
    kind = envs._kind(env_id)
    parameters = [p for p in inspect.signature(kind.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
    options = {}
    for parameter in parameters:
        if rng.random() < 0.08:
            usual = isinstance(parameter.default, bool) and rng.random() < 0.9
            options[parameter.name] = bool(rng.random() < 0.5) if usual else scalar(rng)
    return options


def mutated(rng, snapshot):
    snapshot = dict(snapshot)
    for _ in range(int(rng.integers(1, 4))):
        key = pick(rng, [*snapshot])
        value, kind = snapshot[key], rng.integers(7)
        if kind == 0:
            del snapshot[key]
        elif kind == 1 or not isinstance(value, torch.Tensor):
            snapshot[key] = garbage(rng)
        elif kind == 2:
            snapshot[key] = value.to(pick(rng, (torch.float32, torch.int64, torch.bool, torch.float16)))
        elif kind == 3:
            snapshot[key] = value[:-1] if value.dim() else value
        elif kind == 4:
            snapshot[key] = torch.as_tensor(numbers(rng, tuple(value.shape))).to(value.dtype)
        elif value.numel():
            snapshot[key] = value.clone()
            place = int(rng.integers(value.numel()))
            number = pick(rng, (-2, -1, 0, 1, 3, 8, 2**31 - 1, -(2**31), math.nan, math.inf, 5.5, 1e9))
            whole = number if value.is_floating_point() or math.isfinite(number) else -9
            limits = torch.iinfo(value.dtype) if value.dtype in (torch.int8, torch.int32) else None
            whole = min(max(int(whole), limits.min), limits.max) if limits else whole
            snapshot[key].view(-1)[place] = whole
    return snapshot


def put_by_hand(env):
    """(the method that puts things by hand, the shapes that it takes), None if there is none"""
    n, agents = env.num_envs, env.n_agents
    if hasattr(env, "set_units"):
        names = ("x", "y", "health", "shield", "cooldown", "energy")
        return "set_units", {**dict.fromkeys(names, (n, agents + env.n_enemies)), "last_action": (n, agents)}
    if hasattr(env, "stags"):
        shapes = {"hunters": (n, agents), "stags": (n, env.stags), "hares": (n, env.hares)}
        return "set_grid", {**shapes, "obstacles": (n, env.height, env.width)}
    if hasattr(env, "foods"):
        shapes = {"players": (n, agents), "levels": (n, agents)}
        return "set_grid", {**shapes, "foods": (n, env.foods), "food_levels": (n, env.foods)}
    if hasattr(env, "set_world"):
        shapes = {"places": (n, agents, 2), "velocities": (n, agents, 2)}
        return "set_world", {**shapes, "obstacles": (n, env.obstacles, 2)}
    return None


def random_call(rng, env):
    """(what is called, a function that does it)"""
    n, agents = env.num_envs, env.n_agents
    fits = rng.random() < 0.6
    shaped = numbers(rng, (n, agents)) if fits else garbage(rng)
    kind = rng.integers(9)
    if kind == 0:
        mask = rng.random(n) < 0.5 if fits else garbage(rng)
        seed = pick(rng, (None, 3, -1, scalar(rng)))
        return "reset", lambda: env.reset(seed=seed, mask=mask)
    if kind == 1:
        return "step", lambda: env.step(shaped)
    if kind == 2:
        return "scripted_actions", lambda: env.scripted_actions(shaped)
    if kind == 3:
        return "restore", lambda: env.restore(mutated(rng, env.snapshot()))
    if kind == 4:
        arguments = {"index": scalar(rng)} if rng.random() < 0.5 else {}
        for name in ("size", "sight", "goals"):
            if rng.random() < 0.3:
                arguments[name] = scalar(rng)
        return "render", lambda: env.render(**arguments)
    if kind == 5:
        return "scene", lambda: env.scene(scalar(rng))
    if kind == 6 and put_by_hand(env):
        name, shapes = put_by_hand(env)
        values = {
            key: numbers(rng, shape) if fits else garbage(rng) for key, shape in shapes.items() if rng.random() < 0.4
        }
        return name, lambda: getattr(env, name)(**values)
    return "play", lambda: [env.step(env.scripted_actions(pick(rng, env.policies))) for _ in range(3)]


def tried(name, call):
    """What came of a call: an error of our own, in one line, is a refusal."""
    try:
        return "done", name, call()
    except Exception as error:
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        ours = not {ROOT / "envs", ROOT / "training"}.isdisjoint(Path(frames[-1]).parents)
        if isinstance(error, REFUSALS) and ours and str(error) and "\n" not in str(error):
            return "refused", name, None
        where = f"{Path(frames[-1]).name} for {name}"
        return "FAILED", f"{type(error).__name__} in {where}: {str(error)[:200]!r}", None


def api(seed):
    """A batch with random options, and random calls of it."""
    rng = np.random.default_rng(seed)
    env_id = pick(rng, IDS) if rng.random() < 0.97 else scalar(rng)
    arguments = {"num_envs": int(rng.integers(1, 12)) if rng.random() < 0.9 else scalar(rng)}
    if rng.random() < 0.1:
        arguments["seed"] = scalar(rng)
    if rng.random() < 0.2:
        arguments["n_agents"] = scalar(rng)
    known = isinstance(env_id, str) and env_id in IDS
    made = tried("make", lambda: envs.make(env_id, **arguments, **(options_of(rng, env_id) if known else {})))
    yield made[:2]
    env = made[2]
    if env is None:
        return
    if rng.random() < 0.9:
        yield tried("reset", env.reset)[:2]
    for _ in range(12):
        outcome = tried(*random_call(rng, env))
        yield outcome[:2]
        shown = {"obs": env.obs, "state": env.info["state"], "reward": env.reward}
        for name, tensor in shown.items():
            if not tensor.isfinite().all():
                yield "FAILED", f"{name} is not finite after {outcome[1]}"


# ---- random command lines ----
TINY = {
    "num_envs": 4, "batch_size": 4, "buffer_size": 8, "train_frequency": 60, "total_timesteps": 300, "time_limit": 2.0,
    "eval_interval": 150, "eval_episodes": 4, "final_eval_episodes": 4, "hidden_dim": 8, "log_interval": 0.0,
    "pretrain_timesteps": 100, "pretrain_updates": 3, "latent_dim": 4, "episodes": 3, "seeds": 1, "num_steps": 16,
    "update_epochs": 2, "num_minibatches": 2, "population_size": 2,
}  # fmt: skip
SCRIPTS = ("iql", "vdn", "qmix", "qtran", "coma", "naive_om_iql", "liam_iql", "mix_iql", "belief_iql", "omg_iql",
           "ippo", "mappo", "brdiv", "pretrain_cvae", "evaluate", "play", "sweep")  # fmt: skip
TINY_IDS = ("3m", "stag_hunt_4x4", "Foraging-5x5-2p-1f-v3", "simple_tag", "popp", "kuhn", "matrix_ipd", "coin_game")
WORDS = (
    "", "x", "-", "--", "a b", "3m", "8m", "../x", "..", "/dev/null", "/proc/nothing", "*", "[", "x" * 300, "\u2603",
    "0", "1", "2", "3", "7", "-1", "0.5", "-0.0", "1e-300", "1e39", "nan", "inf", "-inf", "1000000000000", "9" * 30,
    "2147483648", "self", "scripted", "2chase1learner", "1other1learner", "1learner1tft", "999999999999learner", "iql",
    "os", "no.gif", "x.gif", "x/y.html", "x.mp4", "learned", "stopped", "stopped/checkpoint.pt", "vae.pt", "random",
)  # fmt: skip
CODES = (0, 1, 2, 130, 143)  # what a program may end with


PACKAGES = {"play": "training.", "evaluate": "experiments.", "sweep": "experiments."}


def module_of(script):
    return importlib.import_module(f"{PACKAGES.get(script, '')}{script}")


def path_of(script):
    return Path(module_of(script).__file__)


def flag(name):
    return f"--{name.replace('_', '-')}"


def words_for(rng, script):
    """Small sizes, so that what is accepted ends soon, and a few options with any values."""
    args_class, env_id = module_of(script).Args, pick(rng, TINY_IDS)
    fields = {field.name: field for field in dataclasses.fields(args_class)}
    given = {name: [str(value)] for name, value in TINY.items() if name in fields}
    given |= {"env_id": [env_id], "env_ids": [env_id], "script": ["iql.py" if script == "sweep" else "omg_iql"]}
    given |= {"ego": [pick(rng, ("learned", "random"))], "others": ["random"], "jobs": ["1"]}
    words = []
    for _ in range(int(rng.integers(0, 4))):
        name = pick(rng, [*fields])
        if "bool" in str(fields[name].type) and rng.random() < 0.9:
            words.append(flag(name) if rng.random() < 0.5 else flag(f"no_{name}"))
        else:
            given[name] = [pick(rng, WORDS) for _ in range(int(rng.choice([0, 1, 1, 1, 1, 1, 2])))]
    if script == "play":
        words = [*given.pop("env_id"), *words]
    for name, values in given.items():
        if name in fields:
            words += [flag(name), *values]
    return [*words, "--", *words_for(rng, "iql")] if script == "sweep" and rng.random() < 0.1 else words


def run_script(script, words, patience=8.0):
    """What came of a command line: it ends with one of CODES, says why in one line, and obeys signals."""
    argv, hook, thread_hook = sys.argv, sys.excepthook, threading.excepthook
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    ended, errors = threading.Event(), io.StringIO()
    threading.Thread(target=interrupt, args=(ended, patience), daemon=True).start()
    sys.argv = [str(path_of(script)), *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            runpy.run_path(sys.argv[0], run_name="__main__")
        code, message = 0, ""
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        message = str(end)
    except BaseException as error:
        with contextlib.redirect_stderr(errors):
            sys.excepthook(type(error), error, error.__traceback__)  # it has a line for a lack of memory
        code, message = 1, ""
    finally:
        ended.set()
        sys.argv, sys.excepthook, threading.excepthook = argv, hook, thread_hook
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.nn.modules.module._global_parameter_registration_hooks.clear()  # limits of sizes
    if "Traceback" in errors.getvalue() or code not in CODES or "\n" in message or len(message) > 2000:
        last = (errors.getvalue().strip().splitlines() or [message])[-1]
        places = [line.strip() for line in errors.getvalue().splitlines() if line.startswith("  File ")]
        return "FAILED", f"{script} {shlex.join(map(str, words))}: exit code {code}, {last[:300]} {places[-1:]}"
    return "refused" if code in (1, 2) else "done", script


def interrupt(ended, patience):
    """Sends signals to a program that has not ended after some seconds."""
    while not ended.wait(patience):
        _thread.interrupt_main(signal.SIGINT)


def commands(seed):
    rng = np.random.default_rng(seed)
    originals()
    script = pick(rng, SCRIPTS)
    yield run_script(script, words_for(rng, script))


# ---- mutated files ----
HOSTILE = (
    None, True, False, -1, 0, 1, 3, 10**9, 10**30, -(2**63), 2.5, -0.0, math.nan, math.inf, "", "x", "../x", "/etc/x",
    "\0", "3m", "8m", "os", "a\nb", "x" * 10**4, (), [], {}, [1], {"x": 1}, {3: 4}, b"x",
)  # fmt: skip
TENSORS = (
    lambda like: torch.zeros(()),
    lambda like: torch.zeros(0),
    lambda like: torch.full_like(like, math.nan) if like.is_floating_point() else torch.full_like(like, 1),
    lambda like: torch.full(like.shape, 1e30),
    lambda like: torch.full(like.shape, -1),
    lambda like: torch.full(like.shape, 2**40),
    lambda like: like.double(),
    lambda like: like.to(torch.int8),
    lambda like: like[..., :1],
    lambda like: torch.zeros(1).expand(10**6, 10**6),
    lambda like: like.to_sparse(),
    lambda like: like.to(torch.complex64),
)


@functools.cache
def originals():
    """The files of small runs, made in the current folder: name -> bytes."""
    env = envs.make("3m", num_envs=2)
    folders = {}
    made = (("learned", "iql", None), ("stopped", "iql", 1e-9), ("subgoals", "omg_iql", 1e-9), ("policy", "ippo", 1e-9))
    for name, script, limit in made:
        options = {**TINY, "time_limit": limit, "env_id": "3m", "run_root": f"made_{name}"}
        options = {key: value for key, value in options.items() if value is not None}
        result = run_script(script, to_argv(options, module_of(script).Args), 600.0)
        assert result[0] == "done", result
        folders[name] = next(Path(f"made_{name}").iterdir()).rename(name)
    args = omg_iql.Args(env_id="3m", latent_dim=4)
    model = omg_iql.OpponentModel(args, env)
    content = {"requirements": omg_iql.requirements(args, env), "networks": {"model": model.state_dict()}}
    torch.save(content, "vae.pt")
    kept = {name: {path.name: path.read_bytes() for path in folder.glob("*.pt")} for name, folder in folders.items()}
    return {**kept, "vae": {"vae.pt": Path("vae.pt").read_bytes()}}


def spoiled(rng, data):
    """The bytes of a file, with some of them or of its content changed."""
    kind = rng.integers(10)
    if kind == 0:
        return data[: int(rng.integers(len(data)))]
    if kind == 1:
        return data + rng.bytes(int(rng.integers(1, 1000)))
    if kind == 2:
        changed = bytearray(data)
        for _ in range(int(rng.integers(1, 20))):
            changed[int(rng.integers(len(data)))] = int(rng.integers(256))
        return bytes(changed)
    content = torch.load(io.BytesIO(data), weights_only=True)
    for _ in range(int(rng.choice([1, 1, 1, 2, 5]))):
        content = changed_leaf(rng, content)
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def changed_leaf(rng, content):
    """A copy in which something is replaced, removed or added."""
    places = content.keys() if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    if not len(places) or rng.random() < 0.02:
        is_tensor = isinstance(content, torch.Tensor)
        is_plain = is_tensor and content.layout == torch.strided and content.dim() > 0 and content.numel() < 10**9
        like = content if is_plain else torch.zeros(2)  # it may have been changed before
        return pick(rng, TENSORS)(like) if rng.random() < (0.7 if is_tensor else 0.1) else pick(rng, HOSTILE)
    copied, place = content.copy(), pick(rng, [*places])
    if rng.random() < 0.1:
        del copied[place]
    elif rng.random() < 0.03 and isinstance(content, dict):
        copied[pick(rng, ("x", 3, "", "fc1.weight", "../x"))] = pick(rng, HOSTILE)
    else:
        copied[place] = changed_leaf(rng, content[place])
    return copied


def read_by(rng, name, folder):
    """(what reads it, a function that does it)"""
    env = envs.make("3m", num_envs=2)
    if name == "vae":
        args = omg_iql.Args(env_id="3m", latent_dim=4, vae=str(folder / "vae.pt"))
        return "--vae", lambda: omg_iql.load_vae(args, env, omg_iql.OpponentModel(args, env))
    script = {"subgoals": "omg_iql", "policy": "ippo"}.get(name, "iql")
    kind = rng.integers(4)
    if kind == 0:
        return "load_runner", lambda: load_runner(folder, env).play()
    if kind == 1:
        return "Team", lambda: Team(env, "2other1learner", pool=[str(folder)])
    if kind == 2:
        return "--init", lambda: run_script("iql", ["--init", str(folder), *to_argv(TINY, iql.Args)])
    return "--resume", lambda: run_script(script, ["--resume", str(folder)])


def to_argv(options, args_class):
    known = {field.name for field in dataclasses.fields(args_class)}
    return [word for name, value in options.items() if name in known for word in (flag(name), str(value))]


def checkpoint_files(seed):
    rng = np.random.default_rng(seed)
    name = pick(rng, [*originals()])
    files = dict(originals()[name])
    file = pick(rng, [*files])
    folder = Path(f"case_{seed}")
    folder.mkdir()
    for key, data in files.items():
        (folder / key).write_bytes(spoiled(rng, data) if key == file else data)
    reader, read = read_by(rng, name, folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            result, what, returned = tried(f"{reader} of {name}/{file}", read)
    except SystemExit as end:
        one_line = end.code == 2 and "\n" not in str(end) and len(str(end)) < 1000
        result, what, returned = "refused" if one_line else "FAILED", f"{reader} of {name}/{file}: {end}", None
    if isinstance(returned, tuple) and returned[0] == "FAILED":
        result, what = returned
    elif isinstance(returned, tuple) and returned[0] == "refused":
        result = "refused"
    yield result, what
    shutil.rmtree(folder)


PARTS = {"api": api, "commands": commands, "files": checkpoint_files}


# ---- running them ----
def run_here(args):
    """The cases from args.seed on: a line of JSON when one starts, and one with what came of it."""
    torch.set_num_threads(1)
    torch.set_num_threads = lambda number: None
    if resource is not None:  # what is asked for too much of is refused, and not taken from others
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # programs that are started print elsewhere
        for seed in range(args.seed, args.seed + args.cases):
            print(json.dumps([seed]), file=out, flush=True)
            print(json.dumps([seed, list(PARTS[args.parts[0]](seed))]), file=out, flush=True)


def collect(pipe, lines):
    for line in pipe:
        lines.put(line)
    lines.put("")


def run_part(part, args):
    """(tried, refused, failures) of one part; children are killed when they take too long."""
    counts, failures = {"done": 0, "refused": 0, "FAILED": 0}, []
    seed, deadline = args.seed, time.monotonic() + 60 * args.minutes
    settings = {**os.environ, "WANDB_MODE": "disabled", "NUMBA_NUM_THREADS": "1"}
    script = os.path.abspath(__file__)
    while seed < args.seed + args.cases and time.monotonic() < deadline:
        left = args.seed + args.cases - seed
        command = [sys.executable, script, "--child", "--parts", part, "--seed", str(seed), "--cases", str(left)]
        command += ["--ids", *args.ids]
        folder = tempfile.mkdtemp()
        inside = Path(folder) / "a" / "b"  # what leads out of it stays in the folder
        inside.mkdir(parents=True)
        child = subprocess.Popen(
            command, cwd=inside, env=settings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        lines, end = queue.SimpleQueue(), "came to no end"
        threading.Thread(target=collect, args=(child.stdout, lines), daemon=True).start()
        while time.monotonic() < deadline:
            try:
                line = lines.get(timeout=args.patience)
            except queue.Empty:
                end = f"took more than {args.patience:g} seconds"
                break
            if not line:
                break
            seed, *outcome = json.loads(line)
            for result, what in outcome[0] if outcome else ():
                counts[result] += 1
                if result == "FAILED":
                    failures.append(f"{part}, seed {seed}: {what}")
            if outcome:
                seed += 1
        else:
            end = ""  # time is up
        if end == "came to no end" and child.wait() == 0:
            end = ""
        child.kill()
        code = child.wait()
        shutil.rmtree(folder, ignore_errors=True)
        if end:
            failures.append(f"{part}, seed {seed}: {end}, exit code {code}")
            counts["FAILED"] += 1
            seed += 1
    return counts, failures


if __name__ == "__main__":
    args = tyro.cli(Args)
    IDS = tuple(args.ids)
    if args.child:
        run_here(args)
        sys.exit()
    failed = 0
    for part in args.parts:
        counts, failures = run_part(part, args)
        print(f"{part}: {sum(counts.values())} tried, {counts['refused']} refused in one line, {len(failures)} failed")
        for failure in failures:
            print(f"  {failure}")
        failed += len(failures)
    sys.exit(failed > 0)

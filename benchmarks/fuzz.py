"""Random input for as long as asked: nothing may end in a signal, a hang, a NaN or an error from inside.

    python benchmarks/fuzz.py --minutes 10
    python benchmarks/fuzz.py --parts api --seed 17 --cases 1    one case again

Each part is a function of a seed that yields what came of every try: "done", "refused" or "FAILED" and why. The cases
run in child processes, which are started anew after a crash or a hang.
"""

import inspect
import json
import math
import queue
import subprocess
import sys
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

import envs  # noqa: E402

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
        ours = Path(frames[-1]).parent == ROOT / "envs"
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


PARTS = {"api": api}


# ---- running them ----
def run_here(args):
    """The cases from args.seed on: a line of JSON when one starts, and one with what came of it."""
    for seed in range(args.seed, args.seed + args.cases):
        print(json.dumps([seed]), flush=True)
        print(json.dumps([seed, list(PARTS[args.parts[0]](seed))]), flush=True)


def collect(pipe, lines):
    for line in pipe:
        lines.put(line)
    lines.put("")


def run_part(part, args):
    """(tried, refused, failures) of one part; children are killed when they take too long."""
    counts, failures = {"done": 0, "refused": 0, "FAILED": 0}, []
    seed, deadline = args.seed, time.monotonic() + 60 * args.minutes
    while seed < args.seed + args.cases and time.monotonic() < deadline:
        left = args.seed + args.cases - seed
        command = [sys.executable, __file__, "--child", "--parts", part, "--seed", str(seed), "--cases", str(left)]
        command += ["--ids", *args.ids]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
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

"""A training script in small: counts to --total-timesteps, saves, continues, and crashes where --crash says.

--begin-after and --end-after name files that it waits for: before it makes its folder, and when it was asked to stop.
--memory names a file that is there while one script has the memory; another ends as if its buffer did not fit.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("env-id", "exp-name", "run-root", "resume", "crash", "reads", "begin-after", "end-after", "memory"):
    parser.add_argument(f"--{name}", default="")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--total-timesteps", type=int, default=10)
parser.add_argument("--crash-seed", type=int)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--skill", type=float, default=0.0)
parser.add_argument("--cuda", action="store_true")
args, started, stopping = parser.parse_args(), time.time(), []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: stopping.append(1))
if os.environ.get("OMG_STOP_ON_EOF") == "1":
    threading.Thread(target=lambda: stopping.append(os.read(0, 1)), daemon=True).start()


def wait_for(file):
    while file and not Path(file).exists():
        time.sleep(0.02)


wait_for(args.begin_after)
if args.memory:
    try:
        Path(args.memory).touch(exist_ok=False)
    except FileExistsError:
        print("no memory is free", flush=True)
        sys.exit(3)
if args.resume:
    run = Path(args.resume)
    state = json.loads((run / "checkpoint.pt").read_text())
    args = argparse.Namespace(**state["args"])
else:
    run = Path(args.run_root) / f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns()}"
    state = {"args": vars(args), "steps": 0, "launches": [], "evals": []}
run.mkdir(parents=True, exist_ok=True)
state["launches"].append(state["steps"])  # the step at which the script was started or resumed
state["environment"] = {name: value for name, value in os.environ.items() if name.startswith("CUDA_")}


def save(file, content):
    temporary = run / "temporary.part"
    temporary.write_text(json.dumps(content))
    temporary.replace(run / file)


while state["steps"] < args.total_timesteps:
    state["steps"] += 1
    state["evals"].append({"steps": state["steps"], "win_rate": state["steps"] / 100, "episodic_return": args.seed})
    print(f"{state['steps']} steps", flush=True)
    time.sleep(args.pause)
    save("checkpoint.pt", state)
    crash_at, _, times = args.crash.partition("x")  # 5x2: at step 5, in the first two launches
    crashes = args.crash and args.crash_seed in (None, args.seed)
    if crashes and state["steps"] >= int(crash_at) and len(state["launches"]) <= int(times):
        raise RuntimeError("crashed on purpose")
    if stopping:
        print("stops", flush=True)
        wait_for(args.end_after)
        sys.exit(143)
if args.reads:
    state["read"] = json.loads(Path(args.reads).read_text())["steps"]
final = {"win_rate": args.seed / 10 + args.skill, "episodic_return": float(args.seed)}
save("results.json", {"final": final, "best": final, "seconds": time.time() - started, **state})
if args.memory:
    Path(args.memory).unlink()
print("counted")

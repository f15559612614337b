"""HOP's table: normalised scores of HOP and direct-OM among three co-players of one kind; or how fast it decides.

python benchmarks/hop_table.py --cuda
python benchmarks/hop_table.py --env-id stag_hunt_4x4 --timesteps 15000 --sims 50 --trees 3 --episodes 32
python benchmarks/hop_table.py --speed --cuda

HOP and direct-OM learn by self-play. They are tested in encounters with co-players they have not met, as they are and
again after they have learned among these for a few steps (--adapt): random ones, cooperators (NS), defectors (NH), and
learned ones, IPPO with its own reward and IPPO with the team's. A score of 1 is the return of a best response: the best
of IPPO and IQL trained among these co-players (--responses), the scripts, and the co-players themselves; 0 is that of
random actions. Each network is tested with every length of rollouts (--rollout-steps); none learns with rollouts.
"""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for hop.py

import hop
from training.args import check_ranges
from training.episodes import Inputs

SCRIPTS = ("RAND", "NS", "NH")
METHODS = {"HOP": (), "direct-OM": ("--no-goals",)}
PUBLISHED = {  # the same columns on 8 x 8; ours has no LOLA (HOP .97, direct-OM .64)
    "HOP": {"IPPO": 0.80, "prosocial IPPO": 0.93, "RAND": 0.96, "NS": 0.74, "NH": 0.51},
    "direct-OM": {"IPPO": 0.57, "prosocial IPPO": 0.79, "RAND": 0.91, "NS": 0.56, "NH": 0.44},
}


@dataclass
class Args:
    env_id: str = "stag_hunt"  # the environment
    cuda: bool = False  # whether to use the GPU
    seeds: int = 1  # runs of each method
    jobs: int = 8  # runs at a time
    timesteps: int = 400_000  # steps of HOP's and direct-OM's self-play
    adapt: int = 2400  # steps for which they learn among the co-players before they are tested again
    learned_timesteps: int | None = None  # steps of learned co-players and best responses (default: 20 million, CPU 1)
    sims: int = 200  # simulations of a tree
    trees: int = 5  # trees of a decision
    train_sims: int | None = None  # simulations of a tree in self-play (default: as hop.py has it)
    rollout_steps: tuple[int, ...] = (0, 8)  # steps of rollouts in tests, each setting with the same networks
    responses: tuple[str, ...] = ("ippo", "iql")  # scripts that learn to respond to the co-players
    options: str = ""  # further options of hop.py, in quotes
    episodes: int = 64  # partners of each kind of co-players
    matches_per_partner: int = 10  # matches with the same partners
    run_root: Path = Path("runs/hop_table")  # of runs and tests; complete ones of the same commands are used again
    speed: bool = False  # only measure how many decisions a second are searched
    planners: int = 1024  # decisions searched at a time, with --speed


def speed(args, rollout_steps):
    """Prints decisions a second of new networks, at the beginning of matches."""
    device = torch.device("cuda" if args.cuda else "cpu")
    same = {name: getattr(args, name) for name in ("env_id", "cuda", "planners", "sims", "trees")}
    hop_args = hop.Args(**same, rollout_steps=rollout_steps)
    hop.check_args(hop_args)
    env = hop.make_env(hop_args, args.planners, device, "training")
    seat = torch.arange(args.planners, device=device).unsqueeze(1) % env.n_agents
    player = hop.Player(hop.Learner(hop_args, env), env, seat)
    env.reset()
    player.reset(torch.ones_like(env.terminated))
    own = torch.arange(args.planners, device=device).unsqueeze(1), seat
    last = torch.full_like(env.actions, -1)
    inputs = Inputs(env.obs[own], env.info["avail"][own], last[own], last, seat)
    times = []
    with torch.no_grad():
        for _ in range(5 if args.cuda else 2):  # the first compiles and captures
            started = time.monotonic()
            player.act(inputs, 0.0)
            if args.cuda:
                torch.cuda.synchronize()
            times.append(time.monotonic() - started)
    seconds = min(times[1:])
    where = torch.cuda.get_device_name() if args.cuda else "CPU"
    print(
        f"{args.env_id}, {where}: {args.planners} decisions at {args.sims} simulations, {args.trees} trees, "
        f"{rollout_steps} rollout steps in {seconds:.2f} s: {args.planners / seconds:,.0f} decisions a second "
        f"({times[0]:.1f} s the first time)"
    )


def complete_run(args, exp_name, command):
    """The folder of the newest run of that name if this command made it, else None."""
    made_by, found = args.run_root / f"{exp_name}.json", sorted(args.run_root.glob(f"*__{exp_name}__*/results.json"))
    return found[-1].parent if found and made_by.exists() and json.loads(made_by.read_text()) == command else None


def run_all(args, jobs):
    """Runs scripts, some at a time; returns the run folders by name.

    jobs: name -> (script, options, co-players to play with: a scripted policy, another of the jobs, or None)
    """
    waiting, running, folders = dict(jobs), {}, {}
    try:
        while waiting or running:
            ready = [name for name, (*_, other) in waiting.items() if other not in jobs or other in folders]
            for name in ready[: args.jobs - len(running)]:
                script, options, other = waiting.pop(name)
                if other is not None:
                    options = (*options, "--team", "3other1learner", "--pool", str(folders.get(other, other)))
                exp_name = name.replace(" ", "_")
                command = [sys.executable, str(ROOT / f"{script}.py"), "--exp-name", exp_name]
                command += ["--run-root", str(args.run_root), *options, *["--cuda"] * args.cuda]
                found = complete_run(args, exp_name, command)
                if found:
                    folders[name] = found
                    continue
                print(" ".join(command[1:]), flush=True)
                log = open(args.run_root / f"{exp_name}.log", "w")  # noqa: SIM115 (closed with the process)
                running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), exp_name, command
            for name, (process, exp_name, command) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                if process.returncode:
                    raise SystemExit(f"{name} failed: {args.run_root / exp_name}.log")
                (args.run_root / f"{exp_name}.json").write_text(json.dumps(command))
                folders[name] = complete_run(args, exp_name, command)
            time.sleep(0.2)
    finally:
        for process, *_ in running.values():
            process.terminate()
    return folders


def with_rollouts(args, folder, steps):
    """A copy of a run's networks that plans with so many rollout steps."""
    copy = args.run_root / "tested" / f"{folder.name}__{steps}_rollout_steps"
    copy.mkdir(parents=True, exist_ok=True)
    checkpoint = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    checkpoint["args"]["rollout_steps"] = steps
    torch.save(checkpoint | {"optimizer": {}, "resume": None}, copy / "checkpoint.pt")
    return copy


def returns(args, egos, other, episodes, matches, name):
    """(ego, other) -> mean return among co-players of one kind, as it is evaluated; a test of before is used again"""
    folder = name.replace(" ", "_")
    command = [sys.executable, "-m", "experiments.evaluate", "--ego", *egos, "--others", other]
    command += ["--groups", "homologue", "--env-id", args.env_id]
    command += ["--episodes", str(episodes), "--matches-per-partner", str(matches)]
    command += ["--out", str(args.run_root / folder), *["--cuda"] * args.cuda]
    results, made_by = args.run_root / folder / "results.json", args.run_root / f"{folder}.json"
    if not (results.exists() and made_by.exists() and json.loads(made_by.read_text()) == command):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        made_by.write_text(json.dumps(command))
    found = {(row["ego"], row["other"]): row["return"] for row in json.loads(results.read_text())["rows"]}
    print(f"{name}: " + ", ".join(f"{found[ego, other]:.2f}" for ego in egos), flush=True)
    return found


def evaluated(timesteps, matches):
    """Options of a run that is evaluated at its end alone: with rollouts that takes longer than learning does."""
    return "--eval-interval", str(10 * timesteps), "--eval-episodes", matches, "--final-eval-episodes", matches


def main(args):
    started = time.monotonic()
    args.learned_timesteps = args.learned_timesteps or (20_000_000 if args.cuda else 1_000_000)
    args.run_root.mkdir(parents=True, exist_ok=True)
    learned = ("--total-timesteps", str(args.learned_timesteps), "--eval-interval", str(args.learned_timesteps))
    search = ("--sims", str(args.sims), "--trees", str(args.trees), *args.options.split())
    if args.train_sims is not None:
        search += ("--train-sims", str(args.train_sims))
    jobs = {
        "IPPO": ("ippo", ("--env-id", args.env_id, *learned), None),
        "prosocial IPPO": ("ippo", ("--env-id", f"{args.env_id},prosocial=True", *learned), None),
    }
    for seed in range(1, args.seeds + 1):
        for method, options in METHODS.items():
            options = ("--env-id", args.env_id, "--seed", str(seed), *search, *options)
            options += ("--total-timesteps", str(args.timesteps), *evaluated(args.timesteps, "64"))
            jobs[f"{method} {seed}"] = "hop", options, None
    for name in PUBLISHED["HOP"]:
        for script in args.responses:
            jobs[f"{script} with {name}"] = script, ("--env-id", args.env_id, *learned), name
    folders = run_all(args, jobs)
    columns = {name: str(folders.get(name, name)) for name in PUBLISHED["HOP"]}
    print(f"{time.monotonic() - started:.0f} s: all are trained", flush=True)

    planners = [name for name in folders if name.split()[0] in METHODS]
    adapting = ("--total-timesteps", str(args.adapt), "--num-envs", "16", "--batch-size", "256", *search)
    adapting += ("--matches-per-partner", str(args.matches_per_partner))
    jobs = {}
    for name, other in columns.items():
        for planner in planners:
            options = ("--env-id", args.env_id, *METHODS[planner.split()[0]], "--init", str(folders[planner]))
            jobs[f"{planner} adapted to {name}"] = "hop", (*options, *adapting, *evaluated(args.adapt, "1")), other
    folders |= run_all(args, jobs)
    print(f"{time.monotonic() - started:.0f} s: they have adapted", flush=True)

    tests, bounding, tested = [], {}, {}  # each in its own process: a single one leaves most of the GPU idle
    for name, other in columns.items():
        bounding[name] = {*SCRIPTS, other, *(str(folders[f"{script} with {name}"]) for script in args.responses)}
        tests.append((sorted(bounding[name]), other, 2048, 1, f"test bounds {name}"))
    for adapted in (False, True):
        for steps in args.rollout_steps:
            for name, other in columns.items():
                for planner in planners:
                    run = f"{planner} adapted to {name}" if adapted else planner
                    ego = tested[run, steps] = str(with_rollouts(args, folders[run], steps))
                    label = f"test {planner} {name} {steps}{' adapted' if adapted else ''}"
                    tests.append(([ego], other, args.episodes, args.matches_per_partner, label))
    found = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for part in pool.map(lambda test: returns(args, *test), tests):
            found |= part
    bounds = {}
    for name, other in columns.items():
        bounds[name] = found["RAND", other], max(found[ego, other] for ego in bounding[name])

    print("| | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for label, place in (("random actions", 0), ("best response", 1)):
        print(f"| {label}, return | " + " | ".join(f"{bounds[name][place]:.2f}" for name in columns) + " |")
    for method in METHODS:
        mine = [planner for planner in planners if planner.split()[0] == method]
        for steps in args.rollout_steps:
            for after, run in (("", "{}"), (f" after {args.adapt:,} steps", "{} adapted to {}")):
                earned, scores = [], []
                for name, (low, high) in bounds.items():
                    egos = [tested[run.format(planner, name), steps] for planner in mine]
                    earned.append(sum(found[ego, columns[name]] for ego in egos) / len(egos))
                    scores.append((earned[-1] - low) / (high - low) if high > low else float("nan"))
                label = f"{method}, {steps} rollout steps{after}"
                print(f"| {label}, return | " + " | ".join(f"{value:.2f}" for value in earned) + " |")
                print(f"| {label} | " + " | ".join(f"{value:.2f}" for value in scores) + " |")
        print(f"| {method}, published | " + " | ".join(f"{PUBLISHED[method][name]:.2f}" for name in columns) + " |")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    positive = "seeds jobs timesteps adapt learned_timesteps trees episodes matches_per_partner planners"
    check_ranges(args, positive=positive, non_negative="sims train_sims rollout_steps")
    if args.speed:
        for steps in args.rollout_steps:
            speed(args, steps)
    else:
        main(args)

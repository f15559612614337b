"""Held-out sets of strangers: policies that no learner has met, and what can be earned with each of them.

A stage is a task: an environment, a pool to learn with, and strangers to be tested with, scripted and learned ones.
Here the learned ones are trained, and for every stranger a few responses: the best one's score is its upper bound, the
random policy's the lower one. manifest.json has all of it, for `--bounds` of experiments/evaluate.py.

    python -m experiments.strangers --stage kuhn --cuda         docs/evaluate.md has the stages and the manifest
"""

import contextlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

import envs
from experiments.jobs import EVALUATE, Evaluation, Job, check_counts, place_of, read_results, run_all
from experiments.results import has_headroom
from training import files
from training.args import fill_in
from training.checkpoints import ROOT
from training.run import versions, writable_folder


@dataclass
class Stage:
    env_id: str
    pool: tuple[str, ...] | int  # scripted policies to learn with, or a number of QMIX runs
    scripted: tuple[str, ...] = ()  # scripted strangers
    learned: tuple[str, ...] = ()  # scripts whose runs are strangers, all of whose seats learned
    matches_per_partner: int = 1  # matches in a row with the same partners
    timesteps: int = 5_000_000  # of every run, on the GPU


BATTLE = ("iql", "vdn", "qmix")
SEEN = ("all_c", "all_d", "tft", "wsls", "grim", "generous_tft", "joss", "grofman", "zd_extort", "periodic_ccd")
UNSEEN = ("two_tats", "hard_majority", "alternator", "suspicious_tft", "stochastic_wsls", "soft_joss")
STAGES = {
    "kuhn": Stage(
        "kuhn", tuple(f"seen_{k}" for k in "abcdef"), tuple(f"unseen_{k}" for k in "abcdef"), matches_per_partner=5,
    ),
    "ipd": Stage("matrix_ipd", SEEN, UNSEEN, matches_per_partner=10),
    "chicken": Stage("matrix_chicken", SEEN, UNSEEN, matches_per_partner=10),
    "coin-game": Stage(
        "coin_game,obs_last_action=True", ("own_only", "good_greedy", "evil_greedy", "other_first", "grim", "stay"),
        ("random_greedy", "reciprocator"), ("iql",), matches_per_partner=5,
    ),
    "snowdrift": Stage(
        "snowdrift_4x4,obs_last_action=True", ("ND", "FIX", "REC"), ("RAND",), ("iql",), matches_per_partner=5,
    ),
    "stag-hunt": Stage("stag_hunt_4x4", ("NS", "NH", "SWITCH"), ("FOLLOW", "RAND"), ("iql",), matches_per_partner=5),
    "foraging-orders": Stage(
        "foraging_orders,player_sight=2,limit=40,obs_last_action=True",
        ("rows", "rows_back", "columns", "columns_back", "diagonal", "inside"), ("outside", "near", "H1", "H2"),
        ("iql",), timesteps=8_000_000,
    ),
    "popp": Stage("popp,obs_last_action=True", ("chase", "close", "fellow"), ("far", "loyal")),
    "2c_vs_64zg": Stage("2c_vs_64zg,obs_last_action=True", 4, learned=BATTLE, timesteps=8_000_000),
    "3s_vs_5z": Stage("3s_vs_5z,obs_last_action=True", 4, learned=BATTLE, timesteps=8_000_000),
    "8m": Stage("8m,obs_last_action=True", 4, learned=BATTLE, timesteps=8_000_000),
}  # fmt: skip
FIRST_SEED = 101  # of learned strangers; the pool's begin at 1, learners' wherever one likes


@dataclass
class Args:
    stage: Literal[tuple(STAGES)]  # the environment, training pool and strangers: see docs/evaluate.md
    cuda: bool = False  # whether to use the GPU
    quick: bool = False  # whether to run a tiny version, which only shows that everything works
    runs: int | None = None  # learned strangers by each of the stage's scripts (default: 3)
    responses: int | None = None  # runs that learn to respond to each stranger, of which the best counts (default: 3)
    timesteps: int | None = None  # steps of every run (default: the stage's on the GPU, 500,000 on the CPU)
    episodes: int | None = None  # matches that each bound is measured in (default: 1024)
    out: str | None = None  # the folder of the runs and the manifest (default: strangers/STAGE)
    jobs: int | None = None  # runs at a time (default: one to a core, or --runs-per-gpu to a GPU)
    runs_per_gpu: int = 6  # runs that share a GPU
    mps: bool = True  # whether runs share a GPU through NVIDIA's Multi-Process Service, where it is installed
    ray_address: str | None = None  # a Ray cluster to run on, such as auto


def set_sizes(args):
    if args.quick:
        defaults = {"runs": 1, "responses": 1, "timesteps": 3000, "episodes": 8}
        defaults["out"] = f"strangers/quick_{args.stage}"
    else:
        steps = STAGES[args.stage].timesteps if args.cuda else 500_000
        defaults = {"runs": 3, "responses": 3, "timesteps": steps, "episodes": 1024, "out": f"strangers/{args.stage}"}
    fill_in(args, defaults)
    check_counts(args, (*defaults, "jobs", "runs_per_gpu"))


@dataclass
class Plan:
    pool: list  # names of scripted policies, or jobs
    strangers: list
    responses: list  # of every stranger a list of jobs: the best last evaluation is its upper bound
    lower: Evaluation  # of the random policy with all of them

    @property
    def jobs(self):
        trained = [one for one in (*self.pool, *self.strangers) if isinstance(one, Job)]
        return [*trained, *(job for jobs in self.responses for job in jobs), self.lower]


def make_plan(args):
    stage, device = STAGES[args.stage], ("--cuda",) * args.cuda
    env = envs.make(stage.env_id)
    others = env.n_agents - 1
    small = ("--num-envs", "16", "--eval-interval", "3000", "--eval-episodes", "16")
    training = (*device, "--total-timesteps", str(args.timesteps), *(small if args.quick else ()))

    def job(script, seed, *arguments, label):
        return Job(ROOT / f"{script}.py", stage.env_id, seed, (*training, *arguments), label)

    pool = stage.pool
    if isinstance(pool, int):
        pool = [job("qmix", 1 + k, label="pool") for k in range(args.runs if args.quick else pool)]
    learned = [job(s, FIRST_SEED + k, label=f"stranger_{s}") for s in stage.learned for k in range(args.runs)]
    strangers = [*stage.scripted, *learned]
    among = ("--final-eval-episodes", str(args.episodes), "--team", f"{others}other1learner", "--pool")
    responses = [
        [job("iql", 1 + k, *among, one, label=f"response_{number}") for k in range(args.responses)]
        for number, one in enumerate(strangers)
    ]
    (random,) = {"random", "RAND"} & set(env.policies)
    words = ("--ego", random, "--others", *strangers, "--groups", "homologue", "--episodes", str(args.episodes))
    words += ("--env-id", stage.env_id, *device)
    lower = Evaluation(EVALUATE, stage.env_id, 1, words, "lower")
    return Plan(list(pool), strangers, responses, lower)


def manifest_of(args, plan, root):
    stage = STAGES[args.stage]
    env = envs.make(stage.env_id)
    measure = "win_rate" if env.team_reward else "return"

    def name(one):
        return one if isinstance(one, str) else one.done(root).relative_to(root).as_posix()

    lowest = {Path(row["other"]).name: row[measure] for row in read_results(plan.lower, root)["rows"]}
    strangers = []
    key = "win_rate" if env.team_reward else "episodic_return"
    for one, jobs in zip(plan.strangers, plan.responses):
        policy, scores = name(one), [read_results(job, root)["final"][key] for job in jobs]
        best = max(range(len(jobs)), key=scores.__getitem__)
        bounds = {"lower": lowest[policy], "upper": scores[best], "response": name(jobs[best]), "responses": scores}
        strangers.append({"policy": policy, **bounds})
    return {
        "stage": args.stage, "env_id": stage.env_id, "measure": measure, "team": f"{env.n_agents - 1}other1learner",
        "matches_per_partner": stage.matches_per_partner, "pool": [name(one) for one in plan.pool],
        "strangers": strangers,
        "args": asdict(args), "versions": versions(),
        "command": " ".join(["python -m experiments.strangers", *sys.argv[1:]]),
    }  # fmt: skip


def main():
    args = tyro.cli(Args, prog="python -m experiments.strangers")
    files.drop_what_cannot_be_printed()
    set_sizes(args)
    plan, root = make_plan(args), writable_folder(args.out)
    with contextlib.closing(place_of(args, root)) as place:
        if not run_all(plan.jobs, place, root):
            return 1
    manifest = manifest_of(args, plan, root)
    files.write_text(root / "manifest.json", json.dumps(manifest, indent=1))
    for one in manifest["strangers"]:
        scored = has_headroom(manifest["measure"], one["lower"], one["upper"])
        remark = "" if scored else "  not clearly better than random: it gives no scores"
        print("{policy:40} {lower:8.3f} to {upper:8.3f}".format(**one) + remark)
    print(f"{root / 'manifest.json'} has the strangers and their bounds, for python -m experiments.evaluate --bounds")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

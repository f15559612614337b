"""Runs scripts over environments, seeds and settings, and summarises them: a table with intervals, and curves.

Runs share a GPU or take a core each, here or on a Ray cluster. Finished runs are skipped and interrupted ones continue.

    python -m experiments.sweep --script iql.py qmix.py --env-ids 3m 8m --seeds 5 -- --total-timesteps 2000000
                                                                                     docs/benchmarks.md has the details
"""

import contextlib
import itertools
import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import tyro


@dataclass
class Args:
    script: tuple[str, ...]  # training scripts, to be compared
    env_ids: tuple[str, ...]  # environments: see envs.list_ids()
    seeds: int = 5  # how many seeds every setting is run with: 1, 2, ...
    first_seed: int = 1  # the first seed; choose settings on other seeds than those that you report
    # an option of the script and its values, such as: learning-rate 1e-3 5e-4 (again for another option)
    vary: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    # options that Optuna chooses, from a range or choices: learning-rate=1e-4..1e-2 td-lambda=0.5,0.7,0.9
    search: tuple[str, ...] = ()
    trials: int = 30  # settings that the search tries, each with all seeds
    cuda: bool = False  # whether the runs use the GPU
    jobs: int | None = None  # runs at a time (default: one to a core, or --runs-per-gpu to a GPU)
    runs_per_gpu: int = 6  # runs that share a GPU
    mps: bool = True  # whether runs share a GPU through NVIDIA's Multi-Process Service, where it is installed
    run_root: str = "runs"  # the folder of the run folders
    report: str = "sweep"  # the name of the table and the curves, in that folder
    ray_address: str | None = None  # a Ray cluster to run on, such as auto


if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):
    tyro.cli(Args, prog="python -m experiments.sweep")  # prints the help and exits, before the slow imports

from experiments.cluster import escapes_folder
from experiments.jobs import Job, check_counts, options_of, place_of, read_results, run_all
from experiments.results import COLOURS, curves, has_sides, marl_eval, rows_of, table
from experiments.search import Search, parse_space
from training import files
from training.checkpoints import ROOT
from training.exits import UsageError


def check_args(args, extra):
    """Rejects invalid arguments, and says what is allowed."""
    for script in args.script:
        find_script(script)
    if escapes_folder(args.report) or Path(args.report).name != args.report:
        raise UsageError(f"--report {args.report} is a name, not a path: the report is in --run-root")
    check_counts(args, ("seeds", "first_seed", "jobs", "runs_per_gpu", "trials"))
    if args.search and (args.vary or len(args.script) > 1):
        raise UsageError("--search takes one script, and its options instead of --vary")
    for env_id in args.env_ids if args.search and options_of(extra, ("team",))[1:] in ([], ["self"]) else ():
        if has_sides(env_id):
            message = (
                f"--search ranks by a return, and both sides of {env_id} may learn: say who does, -- --team scripted"
            )
            raise UsageError(message)
    stems = [Path(script).stem for script in args.script]
    if len(set(stems)) < len(stems):
        raise UsageError(f"--script: several of one name, which is all that runs have of it: {' '.join(stems)}")
    chosen = [setting[0] for setting in args.vary if setting] + [word.partition("=")[0] for word in args.search]
    chosen = [name.replace("_", "-") for name in chosen]
    own = {"env-id": "--env-ids", "seed": "--seeds", "cuda": "--cuda before --", "run-root": "--run-root before --"}
    own |= {"exp-name": "--report", "resume": "the same command again", "time-limit": "Ctrl-C"}
    for name, instead in own.items():
        if options_of(extra, (name,)) or name in chosen:
            raise UsageError(f"--{name} is the sweep's to set: use {instead}")
    for setting in args.vary:
        if len(setting) < 2:
            example = "learning-rate 1e-3 5e-4"
            raise UsageError(f"--vary takes an option and its values, such as {example}, not {setting}")


def find_script(name):
    """Where it is from here, or among the training scripts."""
    path = next((path for path in (Path(name), ROOT / name) if path.is_file()), None)
    if path is None:
        raise UsageError(f"--script {name}: there is no such file, here or in {ROOT}")
    return path.resolve()


def jobs_of(args, extra):
    given = tuple(["--cuda"] * args.cuda + extra)
    names, values = [setting[0] for setting in args.vary], [setting[1:] for setting in args.vary]
    for script, env_id, setting in itertools.product(args.script, args.env_ids, itertools.product(*values)):
        varied = tuple(word for name, value in zip(names, setting) for word in (f"--{name}", value))
        label = " ".join([Path(script).stem, *(f"{name}={value}" for name, value in zip(names, setting))])
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            yield Job(find_script(script), env_id, seed, given + varied, label)


def search_of(args, extra):
    def jobs_with(setting):
        return jobs_of(replace(args, vary=tuple(setting.items())), extra)

    key, root = [args.script[0], list(args.env_ids), args.cuda, extra], Path(args.run_root)
    key += [args.first_seed] * (args.first_seed > 1)
    path = root / f"{args.report}_trials.json"
    try:
        return Search(parse_space(args.search), args.trials, key, path, root, jobs_with)
    except ValueError as error:
        raise UsageError(error) from None


if __name__ == "__main__":
    words, extra = sys.argv[1:], []
    if "--" in words:
        words, extra = words[: words.index("--")], words[words.index("--") + 1 :]
    args = tyro.cli(Args, args=words, prog="python -m experiments.sweep")
    files.drop_what_cannot_be_printed()
    check_args(args, extra)
    root = Path(args.run_root)
    search = search_of(args, extra) if args.search else None
    jobs = [] if search else list({job.name: job for job in jobs_of(args, extra)}.values())
    with contextlib.closing(place_of(args, ".")) as place:
        complete = run_all(jobs, place, root, args.run_root, search and search.more)
    groups = {}
    if search:
        trials, measure = search.best_first()
        jobs = [job for *_, mine in trials for job in mine]
    for job in jobs:
        results = read_results(job, root) if job.done(root) else {}
        if "final" in results:
            groups.setdefault((job.label, job.env_id), []).append({**results, "seed": job.seed})
    if groups:
        rows = rows_of(groups)
        files.write_text(root / f"{args.report}.json", json.dumps(rows, indent=1))
        files.write_text(root / f"{args.report}_marl_eval.json", json.dumps(marl_eval(groups), indent=1))
        files.write_text(root / f"{args.report}.md", table(rows) + "\n")
        curves(dict([*groups.items()][: len(COLOURS)]) if search else groups, root / f"{args.report}.png")
        print(f"{table(rows)}\n{root / args.report}.md, .json and .png have this and the curves")
    if search and trials and trials[0][0] is not None:
        print(f"best of {len(trials)}, {measure.replace('_', ' ')} {trials[0][0]:.4g} over {len(trials[0][2])} runs:")
        for env_id in args.env_ids:
            print(shlex.join(["python", args.script[0], "--env-id", env_id, *trials[0][2][0].arguments]))
    raise SystemExit(not complete)

"""The experiment of the OMG paper in one command.

Learners play with a pool of QMIX runs. They are tested with strangers: runs of IQL, VDN and QMIX with other seeds. Each
method learns with the pool over several seeds, and then plays with the pool and the strangers. In a stag hunt the pool
is scripted. report.md has the results beside the paper's.

    python -m experiments.paper --map 8m --cuda         docs/benchmarks.md has the details; --quick tries it out
"""

import json
import sys
import textwrap
from dataclasses import dataclass

import numpy as np
import tyro

import envs
from experiments import compare
from experiments.jobs import EVALUATE, Evaluation, Job, Output, check_counts, read_results, run_and_time
from experiments.results import crossed_difference, crossed_interval, curves, markdown, summary
from training import files
from training.args import fill_in
from training.checkpoints import ROOT
from training.exits import UsageError
from training.run import writable_folder

METHODS = {
    "IQL": ("iql.py",),
    "LIAM": ("liam_iql.py",),
    "naive OM": ("naive_om_iql.py",),
    "OMG conservative": ("omg_iql.py", "--paper", "--subgoal-mode", "conservative"),
    "OMG optimistic": ("omg_iql.py", "--paper", "--subgoal-mode", "optimistic"),
}  # another method is another line: a script and its options
PROTOCOLS = {"": (), ", diverse": ("--mix-teammates", "--teammate-epsilon", "0.2")}  # the paper's, and one with
# team-mates that differ and err: what helps with strangers most (docs/results)
OVER = "over seeds and strangers, of mixed teams and the pool over seeds"  # what intervals are for
POOL = "QMIX of the pool"  # plays in the learner's seat as well, to compare with
PAPER = {
    ("8m", "non-homologue", 7): {"IQL": 64.9, "LIAM": 67.2, "naive OM": 66.0, "OMG conservative": 68.7,
                                 "OMG optimistic": 70.5, POOL: 21.6},
    ("8m", "homologue", 6): {"IQL": 80.4, "LIAM": 79.7, "naive OM": 82.7, "OMG conservative": 84.1,
                             "OMG optimistic": 86.8, POOL: 65.6},
    ("8m", "homologue", 7): {"IQL": 88.7, "LIAM": 87.7, "naive OM": 87.8, "OMG conservative": 87.2,
                             "OMG optimistic": 90.2, POOL: 61.0},
    ("3s_vs_5z", "non-homologue", 2): {"IQL": 20.8, "LIAM": 24.9, "naive OM": 24.3, "OMG conservative": 23.6,
                                       "OMG optimistic": 35.3},
    ("3s_vs_5z", "homologue", 2): {"IQL": 46.5, "LIAM": 49.5, "naive OM": 50.0, "OMG conservative": 46.6,
                                   "OMG optimistic": 56.9},
    ("2c_vs_64zg", "homologue", 1): {"IQL": 43.3, "LIAM": 48.4, "naive OM": 41.2, "OMG conservative": 55.9,
                                     "OMG optimistic": 64.4},
}  # fmt: skip

COLUMNS = (
    "ego", "algorithm", "adapted", "group", "other", "episodes", "wins", "win_rate", "return", "return_std", "length",
)  # of a row of evaluate.py, beside the metrics of opponent models and the ends of intervals  # fmt: skip


@dataclass
class Args:
    map: str = "8m"  # the environment, such as 3s_vs_5z
    cuda: bool = False  # whether to use the GPU
    # whether to run a tiny version, which only shows that everything works: 2 runs in the pool, 3 strangers, 1 seed
    quick: bool = False
    pool_runs: int | None = None  # QMIX runs to learn with (default: 10)
    test_runs: int | None = None  # runs of each of IQL, VDN and QMIX to be tested with (default: 10)
    seeds: int | None = None  # seeds of each method (default: 5)
    pool_timesteps: int | None = None  # steps of each such run (default: 10 million on the GPU, 500,000 on the CPU)
    learner_timesteps: int | None = None  # steps of a learner (default: 10 million on the GPU, 2 million on the CPU)
    episodes: int | None = None  # matches of every learner with every stranger (default: 128)
    out: str | None = None  # the folder of all runs and the report (default: runs/paper_MAP, or runs/quick_MAP)
    jobs: int | None = None  # runs at a time (default: one to a core, or --runs-per-gpu to a GPU)
    runs_per_gpu: int = 6  # runs that share a GPU
    mps: bool = True  # whether runs share a GPU through NVIDIA's Multi-Process Service, where it is installed
    ray_address: str | None = None  # a Ray cluster to run on, such as auto


def set_sizes(args):
    """Sets the sizes that were not given."""
    name = args.map.replace("/", "-")
    if args.quick:
        defaults = {"pool_runs": 2, "test_runs": 1, "seeds": 1, "episodes": 8, "out": f"runs/quick_{name}"}
        defaults |= {"pool_timesteps": 3000, "learner_timesteps": 3000}
    else:
        defaults = {"pool_runs": 10, "test_runs": 10, "seeds": 5, "episodes": 128, "out": f"runs/paper_{name}"}
        defaults["pool_timesteps"] = 10_000_000 if args.cuda else 500_000
        defaults["learner_timesteps"] = 10_000_000 if args.cuda else 2_000_000
    fill_in(args, defaults)
    check_counts(args, (*defaults, "jobs", "runs_per_gpu"))


# ---- the plan ----
@dataclass
class Plan:
    others: dict  # label -> runs to play with: the pool and the strangers
    learners: dict  # method -> runs
    evaluations: list  # (method, "seen" or "unseen", how many others, job)
    jobs: list


def make_plan(args):
    try:
        env = envs.make(args.map.removeprefix("sc2/"))
    except ValueError as error:
        raise UsageError(f"--map {args.map}: {error}") from None
    if env.n_agents < 2:
        raise UsageError(f"--map {args.map} has nobody to play with")
    mates, device = env.n_agents - 1, ("--cuda",) * args.cuda
    small = ("--num-envs", "16") if args.quick else ()
    brief = (*small, "--eval-interval", "3000", "--eval-episodes", "16", "--final-eval-episodes", "16")
    training = (*device, *(brief if args.quick else ()))

    def job(script, seed, *arguments, label):
        return Job(ROOT / script, envs.with_last_actions(args.map), seed, arguments, label)

    def to_play_with(algorithm, label, runs, first_seed):
        """Runs of different length, so that they differ in skill: from 80 to 120% of the steps."""
        steps = np.linspace(0.8, 1.2, runs) * args.pool_timesteps if runs > 1 else [args.pool_timesteps]
        return [
            job(f"{algorithm}.py", first_seed + k, *training, "--total-timesteps", str(int(steps[k])), label=label)
            for k in range(runs)
        ]

    strangers = {
        f"test_{algorithm}": to_play_with(algorithm, f"test_{algorithm}", args.test_runs, 101)
        for algorithm in ("iql", "vdn", "qmix")
    }
    unseen = [run for runs in strangers.values() for run in runs]
    if env.team_reward:
        pool, team = to_play_with("qmix", "pool_qmix", args.pool_runs, 1), f"{mates}qmix1learner"
    elif not {"NS", "NH", "RAND"} <= set(env.policies):
        raise UsageError(f"--map {args.map} has rewards of one's own and no NS, NH and RAND to learn with: try --stage")
    else:
        pool, team, unseen = ["NS", "NH"], f"{mates}other1learner", ["RAND", *unseen]
    among = ("--team", team, "--pool", *pool)
    short = ("--pretrain-timesteps", "2000", "--pretrain-updates", "100") if args.quick else ()
    vaes = [
        job("pretrain_cvae.py", 1 + k, "--paper", *device, *small, *short, *among, label="vae")
        for k in range(args.seeds)
    ]  # one for every seed, so that seeds are independent
    learners = {}
    for method, (script, *options) in METHODS.items():
        has_vae = "--paper" in options  # whose settings they are for
        options += ("--total-timesteps", str(args.learner_timesteps))
        for suffix, protocol in PROTOCOLS.items():
            words = (*training, *options, *among, *protocol)
            learners[method + suffix] = [
                job(script, 1 + k, *words, *(("--vae", Output(vae, "vae.pt")) if has_vae else ()),
                    label=compare.label_of(method + suffix))
                for k, vae in enumerate(vaes)
            ]  # fmt: skip

    egos = {**learners, **({POOL: pool} if env.team_reward else {})}
    evaluations = list(evaluations_of(args, env, egos, pool, unseen))
    networks = {**({"pool_qmix": pool} if env.team_reward else {}), **strangers}
    runs = {**networks, "vae": vaes, **learners, "evaluations": [job for *_, job in evaluations]}
    first = ("pool_qmix", "vae", *learners)  # whom others wait for; the strangers fill the gaps
    order = sorted(runs, key=lambda label: label not in first)
    return Plan(networks, learners, evaluations, [job for label in order for job in runs[label]])


def evaluations_of(args, env, egos, pool, unseen):
    """Every method with strangers in all seats but its own, or (where they are many) one less, and with the pool."""
    mates = env.n_agents - 1
    fewer = [("unseen", unseen, mates - 1)] if mates > 2 and env.team_reward else []
    for method, runs in egos.items():
        for others, policies, count in (("unseen", unseen, mates), *fewer, ("seen", pool, mates)):
            if runs is policies:
                continue
            groups = ("homologue", "non-homologue") if count == mates > 1 else ("homologue",)
            who = ("--ego", *runs, "--others", *policies, "--team", f"{count}other{mates + 1 - count}ego")
            words = (*who, "--groups", *groups, "--episodes", str(args.episodes), *("--cuda",) * args.cuda)
            label = f"evaluate_{compare.label_of(method)}_{others}_{count}"
            env_id = envs.with_last_actions(args.map)
            yield method, others, count, Evaluation(EVALUATE, env_id, 1, words, label)


# ---- the report ----
def mean_of(rows, measure):
    """Over all matches of these rows."""
    return float(np.average([row[measure] for row in rows], weights=[row["episodes"] for row in rows]))


def means_by(kind, rows, measure):
    """The same for every kind of row."""
    return {k: mean_of([row for row in rows if kind(row) == k], measure) for k in dict.fromkeys(map(kind, rows))}


def metrics_of(rows):
    """The means of what an opponent model is measured by: whatever evaluate.py adds to a row's own columns."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in COLUMNS]
    names = [name for name in names if not name.endswith(("_low", "_high"))]
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}


def rivals(method):
    """Whom a method is compared with: IQL that learned in the same way, and itself without diverse team-mates."""
    name, _, protocol = method.partition(", ")
    base = "IQL" + (f", {protocol}" if protocol else "")
    return [other for other in (base, name) if other != method]


def make_report(args, command, plan, root, seconds):
    """All that the report says, as plain values."""
    battle = args.map.removeprefix("sc2/") if "pool_qmix" in plan.others else None
    measure, most = "win_rate" if battle else "return", max(count for _, _, count, _ in plan.evaluations)
    algorithm = {job.done(root).name: job.script.stem for runs in plan.others.values() for job in runs}
    results, metrics, tables = [], {}, {}
    for method, others, count, job in plan.evaluations:
        rows = [row for row in read_results(job, root)["rows"] if row["episodes"]]
        for group in dict.fromkeys(row["group"] for row in rows):
            mine = [row for row in rows if row["group"] == group and row["other"] != "all"]
            by_seed = list(means_by(lambda row: row["ego"], mine, measure).values())
            by_both = list(means_by(lambda row: (row["ego"], row["other"]), mine, measure).values())  # seed after seed
            complete = len(by_both) == len(by_seed) * len({row["other"] for row in mine})  # no row without a match
            crossed = complete and others == "unseen"  # seeds by strangers; the pool's policies are no sample
            table = np.reshape(by_both if crossed else by_seed, (len(by_seed), -1))
            tables[method, others, group, count] = table
            interval = crossed_interval(table)
            if battle:
                interval = np.clip(interval, 0, 1).tolist()
            ahead_of = {
                name: [gap, *ends]
                for name in rivals(method)
                if (base := tables.get((name, others, group, count), np.empty(0))).shape == table.shape
                for gap, ends in [crossed_difference(table, base)]
            }
            results.append({
                "method": method, "others": others, "group": group, "count": count, "by_seed": by_seed,
                "by_other": means_by(lambda row: algorithm.get(row["other"], row["other"]), mine, measure),
                "matches": sum(row["episodes"] for row in mine), **summary([by_seed]), "mean_interval": interval,
                "ahead_of": ahead_of,
                "paper": PAPER.get((battle, group, count), {}).get(method) if others == "unseen" else None,
            })  # fmt: skip
            if (others, group, count) == ("unseen", "homologue", most):
                metrics[method] = metrics_of([row for row in rows if row["other"] == "all"])
    finals = {
        label: [read_results(job, root)["final"] for job in runs]
        for label, runs in {**plan.others, **plan.learners}.items()
    }
    runs = {
        label: {key: [final[key] for final in mine] for key in ("win_rate", "episodic_return")}
        for label, mine in finals.items()
    }
    sizes = ("pool_runs", "test_runs", "seeds", "pool_timesteps", "learner_timesteps", "episodes")
    first = read_results(next(iter(plan.learners.values()))[0], root)
    device = "GPU" if first["args"].get("cuda") else "CPU"
    return {
        "map": args.map, "command": command, "measure": measure, "sizes": {name: getattr(args, name) for name in sizes},
        "device": device, "versions": first.get("versions", {}), "seconds": seconds,
        "pool": "QMIX runs" if battle else "scripted, NS and NH", "results": results, "metrics": metrics, "runs": runs,
    }  # fmt: skip


def differences(results, methods, number):
    """Rows of how far methods are ahead of IQL, and of themselves without diverse team-mates."""
    pairs = (("minus IQL", "{}", "IQL"), ("diverse, minus IQL, diverse", "{}, diverse", "IQL, diverse"),
             ("diverse, minus not diverse", "{}, diverse", "{}"))  # fmt: skip
    rows = []
    for name in dict.fromkeys(map(condition, results)):
        mine = {result["method"]: result["ahead_of"] for result in results if condition(result) == name}
        for label, one, other in pairs:
            gaps = [mine.get(one.format(m), {}).get(other.format(m)) for m in methods]
            if any(gaps):
                rows.append([name, label, *("{} ({} to {})".format(*map(number, gap)) if gap else "" for gap in gaps)])
                name = ""
    return rows


def condition(result):
    return f"{result['count']} {result['group']}" + ("" if result["others"] == "unseen" else ", of the pool")


def text_of(report):
    """report.md"""
    share = report["measure"] == "win_rate"

    def number(value):
        return f"{100 * value:.1f}" if share else f"{value:.2f}"

    def ours(result):
        if len(result["by_seed"]) == 1:
            return number(result["mean"])
        low, high = result["mean_interval"]
        return f"{number(result['mean'])} ({number(low)} to {number(high)})"

    results = report["results"]
    everyone, conditions = list(dict.fromkeys(r["method"] for r in results)), dict.fromkeys(map(condition, results))
    methods = [m for m in everyone if not m.endswith(", diverse")]
    learners = [m for m in methods if m != POOL]
    gaps = differences(results, learners, number)
    rows, kinds = [], []
    for name in conditions:
        mine = {result["method"]: result for result in results if condition(result) == name}
        rows.append([name, "ours", *(ours(mine[m]) if m in mine else "" for m in methods)])
        if any(f"{m}, diverse" in mine for m in methods):
            diverse = [mine.get(f"{m}, diverse") for m in methods]
            rows.append(["", "ours, diverse", *(ours(result) if result else "" for result in diverse)])
        if any(result["paper"] for result in mine.values()):
            paper = [mine[m]["paper"] if m in mine else None for m in methods]
            rows.append(["", "paper", *("" if value is None else f"{value:.1f}" for value in paper)])
        for kind in dict.fromkeys(kind for result in mine.values() for kind in result["by_other"] if kind != "mixed"):
            of_kind = [mine[m]["by_other"].get(kind) if m in mine else None for m in everyone]
            kinds.append([name, kind, *("" if value is None else number(value) for value in of_kind)])
    names = dict.fromkeys(name for values in report["metrics"].values() for name in values)
    known = [m for m in everyone if report["metrics"].get(m)]
    measured = [[name, *(f"{report['metrics'][m][name]:.3f}" if name in report["metrics"][m] else "" for m in known)]
                for name in names]  # fmt: skip
    key = "win_rate" if share else "episodic_return"
    finals = [[label, str(len(values[key])), *(number(f(values[key])) for f in (np.mean, min, max))]
              for label, values in report["runs"].items()]  # fmt: skip
    what, seeds = "Test win %" if share else "Mean return of the learner", report["sizes"]["seeds"]
    over = f"mean over {seeds} seeds with its 95% interval {OVER} (Student's t)" if seeds > 1 else "one seed"
    sizes = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in report["sizes"].items())
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    matches = sum(result["matches"] for result in results)
    parts = [
        f"# {report['map']}: team-mates never seen before",
        f"{what}, {over}. Homologue: all others of a match play by one policy; non-homologue: each by one of its own. "
        "The others are strangers, except where it says that they are of the pool. Diverse: learned with team-mates "
        f"that each have a policy of their own and err in 20% of steps. {matches:,} matches in all.",
        markdown(["others", "", *methods], rows),
        "![results](results.png)",
        "## Differences",
        "Between methods that played with the same others, with 95% intervals of the same kind.",
        markdown(["others", "", *learners], gaps) if gaps else "There is nothing to compare with.",
        "## By who the others are",
        markdown(["others", "policy", *everyone], kinds),
        "## What the opponent models know",
        markdown(["metric", *known], measured) if measured else "No method has an opponent model.",
        "Mean over seeds, with homologue strangers; the pages of the scripts define them. Hit ratio: the share of "
        "places, decoded from the inferred subgoal for every other unit that the learner sees, that this unit comes "
        "within 1.0 of later in the match (stag hunt: the very cell).",
        "## The runs themselves",
        markdown(["runs", "number", "mean", "lowest", "highest"], finals),
        "The last greedy evaluation of each: of a learner, with those it learned with.",
        "![learning curves](curves.png)",
        "## How it was made",
        f"```bash\n{report['command']}\n```",
        f"The pool: {report['pool']}. Sizes: {sizes}. Seconds at work: {report['seconds']:.0f}, on the "
        f"{report['device']}. Versions: {versions}.",
    ]
    return "\n\n".join(parts) + "\n"


def draw(report, path):
    """A panel for every condition: methods as dots with intervals, by protocol; the paper's figures as crosses."""
    from matplotlib.figure import Figure

    results, scale = report["results"], 100 if report["measure"] == "win_rate" else 1
    conditions = list(dict.fromkeys(map(condition, results)))
    methods = list(dict.fromkeys(result["method"].partition(", ")[0] for result in results))
    width = 2.9 * len(conditions) + 1.5
    figure = Figure(figsize=(width, 0.42 * len(methods) + 1.5), layout="constrained")
    looks = {"": ("o", "#0072B2", 0.14), "diverse": ("s", "#D55E00", -0.14)}  # distinct without colours, too
    for axes, name in zip(figure.subplots(1, len(conditions), sharey=True, squeeze=False)[0], conditions):
        for result in (result for result in results if condition(result) == name):
            method, _, protocol = result["method"].partition(", ")
            mark, colour, shift = looks[protocol]
            y = len(methods) - methods.index(method) + shift
            mean, (low, high) = scale * result["mean"], (scale * value for value in result["mean_interval"])
            axes.errorbar(mean, y, xerr=[[mean - low], [high - mean]], fmt=mark, color=colour, ms=5, capsize=2, lw=1)
            if result["paper"] is not None:
                axes.plot(result["paper"], y, "kx", ms=6)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("test wins, %" if scale == 100 else "mean return")
        axes.grid(alpha=0.3)
        axes.set_yticks(range(len(methods), 0, -1), methods)
    names = {"": "ours", "diverse": "ours, with diverse team-mates"}
    for protocol, (mark, colour, _) in looks.items():
        axes.plot([], [], mark, color=colour, label=names[protocol])
    if any(result["paper"] is not None for result in results):
        axes.plot([], [], "kx", label="the paper")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    note = "Homologue: all others of a match play by one policy. Non-homologue: each by one of its own."
    figure.supxlabel(textwrap.fill(f"{note} 95% intervals {OVER}.", int(15 * width)), fontsize=8)
    files.write(path, lambda file: figure.savefig(file, dpi=120))


def main():
    args = tyro.cli(Args, prog="python -m experiments.paper")
    files.drop_what_cannot_be_printed()
    set_sizes(args)
    plan, root = make_plan(args), writable_folder(args.out)
    complete, seconds = run_and_time(plan.jobs, args, root)
    if not complete:
        return 1
    report = make_report(args, " ".join(["python -m experiments.paper", *sys.argv[1:]]), plan, root, seconds)
    files.write_text(root / "report.json", json.dumps(report, indent=1))
    files.write_text(root / "report.md", text_of(report))
    draw(report, root / "results.png")
    learning = {(m, args.map): [read_results(job, root) for job in runs] for m, runs in plan.learners.items()}
    curves(learning, root / "curves.png")
    print(text_of(report), f"{root / 'report.md'} has this and the pictures", sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

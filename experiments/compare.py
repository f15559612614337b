"""When does it pay to model the other agents? Every method on the stages of strangers.py, between IQL and an oracle.

Every method learns with a stage's pool, over several seeds. The oracle is an IQL whose observations include the others'
policies. Belief Q-learning learns from the same labels, which no other method gets. Scores with the pool are scaled so
that IQL is 0 and the oracle 1: a method's share of the headroom. Scores with the stage's strangers are scaled so that
the random policy is 0 and a best response 1.

    python -m experiments.compare --stage all --cuda    docs/benchmarks.md has the details; --quick tries it out
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

import envs
from experiments import strangers
from experiments.jobs import EVALUATE, Evaluation, Job, check_counts, read_results, run_and_time
from experiments.results import (
    COLOURS,
    crossed_difference,
    crossed_interval,
    curves,
    has_headroom,
    interval,
    markdown,
    normalise,
    plain_text,
)
from training import checkpoints, files
from training.args import fill_in
from training.checkpoints import ROOT
from training.episodes import load_runner
from training.run import writable_folder

BASE, ORACLE, OURS, POOL = "IQL", "oracle", "belief", "a run of the pool"
METHODS = {
    BASE: ("iql",),
    "LIAM": ("liam_iql",),
    "naive OM": ("naive_om_iql",),
    "MIX": ("mix_iql",),
    "OMG": ("omg_iql",),
    "OMG, no subgoals": ("omg_iql", "--inference-weight", "0", "--q-subgoal", "inferred"),  # networks and inputs alone
    OURS: ("belief_iql",),
    ORACLE: ("iql", "--oracle"),
}  # another method is another line: a script and its options
LABELS = {OURS: "who the others are, while it learns", ORACLE: "who the others are, always"}  # what these are told
MEMORY_KEPT = ", memory kept"
WITH_MEMORY = {
    f"{name}{MEMORY_KEPT}": (*METHODS[name], "--persist-hidden")
    for name in (BASE, "LIAM", "naive OM", "MIX", "OMG, no subgoals")
}  # one long episode
WITH_ERRORS = {
    f"{name}, erring others": (*METHODS[name], "--teammate-epsilon", "0", "0.2") for name in (BASE, OURS)
}  # learned with partners that err in up to a fifth of their actions, drawn for each match; tested without errors


@dataclass
class Args:
    stage: tuple[Literal[(*strangers.STAGES, "all")], ...]  # what to compare on: see docs/evaluate.md
    cuda: bool = False  # whether to use the GPU
    quick: bool = False  # whether to run a tiny version, which only shows that everything works
    test_runs: int | None = None  # learned strangers by each of a stage's scripts (default: 3)
    seeds: int | None = None  # seeds of each method (default: 5)
    learner_timesteps: int | None = None  # steps of every run (default: the stage's on the GPU, 500,000 on the CPU)
    episodes: int | None = None  # matches of every learner with every stranger (default: 256)
    out: str | None = None  # the folder of all runs and the report (default: runs/stage_STAGES)
    jobs: int | None = None  # runs at a time (default: one to a core, or --runs-per-gpu to a GPU)
    runs_per_gpu: int = 6  # runs that share a GPU
    mps: bool = True  # whether runs share a GPU through NVIDIA's Multi-Process Service, where it is installed
    ray_address: str | None = None  # a Ray cluster to run on, such as auto


def set_sizes(args):
    """Sets the sizes that were not given; steps are the stage's own."""
    small, large = {"test_runs": 1, "seeds": 1, "episodes": 8}, {"test_runs": 3, "seeds": 5, "episodes": 256}
    out = {"out": f"runs/{'quick_' * args.quick}stage_{'_'.join(args.stage)}"}
    fill_in(args, (small if args.quick else large) | out)
    check_counts(args, (*small, "learner_timesteps", "jobs", "runs_per_gpu"))


@dataclass
class Plan:
    stage: str
    held_out: strangers.Plan
    learners: dict  # method -> runs
    tests: dict  # method, or a run of the pool where it has runs -> its evaluation with the strangers
    known: dict  # method that learns with errors -> its evaluation with the pool, which then makes none

    @property
    def jobs(self):
        learners = [
            job for k in range(len(self.learners[BASE])) for job in (runs[k] for runs in self.learners.values())
        ]
        return [*self.held_out.jobs, *learners, *self.tests.values(), *self.known.values()]


def stages_of(args):
    return list(strangers.STAGES) if "all" in args.stage else list(dict.fromkeys(args.stage))


def methods_of(stage):
    """The methods on a stage, the oracle last."""
    methods = METHODS | WITH_ERRORS | (WITH_MEMORY if stage.matches_per_partner > 1 else {})
    return {name: methods[name] for name in sorted(methods, key=lambda name: name == ORACLE)}


def label_of(method):
    """A method's name as part of a folder's."""
    return method.replace(",", "").replace(" ", "_").lower()


def make_plan(args, name):
    stage, quick = strangers.STAGES[name], args.quick
    device = ("--cuda",) * args.cuda
    steps = args.learner_timesteps or (3000 if quick else stage.timesteps if args.cuda else 500_000)
    sizes = {"responses": 1, "episodes": 16} if quick else {"responses": 3, "episodes": 1024}
    held_out = strangers.Args(name, args.cuda, quick, args.test_runs, timesteps=steps, **sizes)
    held_out = strangers.make_plan(held_out)
    team = (
        "--team",
        f"{envs.make(stage.env_id).n_agents - 1}other1learner",
        "--matches-per-partner",
        str(stage.matches_per_partner),
    )
    few = ("--num-envs", "16", "--eval-interval", "3000", "--eval-episodes", "16", "--final-eval-episodes", "16")
    many = ("--eval-episodes", "256", "--final-eval-episodes", "4096")
    common = (*device, "--total-timesteps", str(steps), *(few if quick else many), *team, "--pool", *held_out.pool)

    def evaluation(egos, others, label):
        words = ("--ego", *egos, "--others", *others, "--matches-per-partner", str(stage.matches_per_partner))
        words += ("--groups", "homologue", "--episodes", str(args.episodes), *device)
        return Evaluation(EVALUATE, stage.env_id, 1, words, label)

    learners, tests, known = {}, {}, {}
    for method, (script, *options) in methods_of(stage).items():
        label = label_of(method)
        short = ("--pretrain-timesteps", "2000", "--pretrain-updates", "100") if quick and script == "omg_iql" else ()
        learners[method] = [
            Job(ROOT / f"{script}.py", stage.env_id, 1 + k, (*common, *options, *short), label)
            for k in range(args.seeds)
        ]
        if method != ORACLE:  # the number of a stranger says nothing
            tests[method] = evaluation(learners[method], held_out.strangers, f"evaluate_{label}")
        if method in WITH_ERRORS:
            known[method] = evaluation(learners[method], held_out.pool, f"evaluate_{label}_pool")
    if isinstance(stage.pool, int):  # how many runs
        tests[POOL] = evaluation(held_out.pool, held_out.strangers, "evaluate_pool")
    return Plan(name, held_out, learners, tests, known)


# ---- the results ----
def variance_of_mean(values, weight=1.0):
    """[(the variance of weight * mean, its degrees of freedom)], for `interval`; nothing of a single value."""
    return [(weight**2 * np.var(values, ddof=1) / len(values), len(values) - 1)] if len(values) > 1 else []


def difference(ours, theirs):
    """(the difference of two means over seeds, its 95% interval by Welch)"""
    mean = float(np.mean(ours) - np.mean(theirs))
    return mean, interval(mean, variance_of_mean(ours) + variance_of_mean(theirs))


def share(method, base, oracle):
    """(the share of the headroom, its 95% interval over seeds), by the first-order error of a ratio."""
    headroom = np.mean(oracle) - np.mean(base)
    value = float((np.mean(method) - np.mean(base)) / headroom)
    samples = ((method, 1 / headroom), (base, (value - 1) / headroom), (oracle, -value / headroom))  # and derivatives
    return value, interval(value, [part for sample in samples for part in variance_of_mean(*sample)])


def results_of(args, plan, root):
    """All that the report says of a stage, as plain values."""
    stage = strangers.STAGES[plan.stage]
    key = "win_rate" if envs.make(stage.env_id).team_reward else "episodic_return"
    found = read_learners(plan, root)
    held_out = strangers.manifest_of(replace(strangers.Args(plan.stage), cuda=args.cuda), plan.held_out, root)
    seen = {method: [run["final"][key] for run in runs] for method, runs in found.items()}
    for method, job in plan.known.items():
        seen[method] = [row[held_out["measure"]] for row in rows_of(job, root, whole=True)]
    headroom, ends = difference(seen[ORACLE], seen[BASE])
    exists = has_headroom(key, np.mean(seen[BASE]), np.mean(seen[ORACLE])) and (args.seeds == 1 or ends[0] > 0)
    rows = {method: rows_of(job, root, whole=False) for method, job in plan.tests.items()}
    held_out["strangers"] = raised(held_out, [row for mine in rows.values() for row in mine])
    bounds = {one["policy"]: (held_out["measure"], one["lower"], one["upper"]) for one in held_out["strangers"]}
    unseen, raw = {}, {}  # method -> seeds by strangers
    for method, mine in rows.items():
        mine = [{**row, "adapted": 0, "other": name_in(bounds, row["other"])} for row in mine]
        normalise(mine, bounds)
        raw[method] = table_of(mine, held_out["measure"])
        unseen[method] = table_of(mine, "normalised")
    return {
        "stage": plan.stage, "env_id": stage.env_id, "matches_per_partner": stage.matches_per_partner, "measure": key,
        "seen": seen,
        "headroom": [headroom, ends], "exists": bool(exists),
        "share": {m: share(values, seen[BASE], seen[ORACLE]) for m, values in seen.items()} if exists else {},
        "ahead": {m: difference(seen[OURS], values) for m, values in seen.items() if m != OURS},
        "unseen": unseen, "unseen_scores": raw, "strangers": held_out["strangers"],
        "matches": {m: match_means(runs) for m, runs in found.items() if m not in plan.known},
        "models": {m: model_means([run.get("om", run.get("omg", {})) for run in runs]) for m, runs in found.items()},
        "seconds": {m: float(np.mean([run["seconds"] for run in runs])) for m, runs in found.items()},
        "pretraining": {m: runs[0].get("args", {}).get("pretrain_timesteps", 0) for m, runs in found.items()},
        "steps": found[BASE][0].get("steps"), "versions": found[BASE][0].get("versions", {}),
    }  # fmt: skip


def read_learners(plan, root):
    """method -> the results of its runs, by the match also where an encounter is one episode"""
    found = {method: [read_results(job, root) for job in runs] for method, runs in plan.learners.items()}
    matches = strangers.STAGES[plan.stage].matches_per_partner
    for run in (run for method, runs in found.items() if method.endswith(MEMORY_KEPT) for run in runs):
        for scores in (run["final"], run["best"], *run["evals"]):
            scores["episodic_return"] /= matches
    return found


def rows_of(job, root, whole):
    """The rows of an evaluation: of every seed with all others together, or with each of them."""
    rows = [row for row in read_results(job, root)["rows"] if row["group"] == "homologue"]
    return [row for row in rows if row["episodes"] and (row["other"] == "all") == whole]


def name_in(strangers, other):
    """The name of a stranger among these: the folder of a run may be written in another way."""
    return next((name for name in strangers if Path(name).name == Path(other).name), other)


def raised(held_out, rows):
    """The strangers, whose best response may be a run of any method that was tested with them."""
    found = []
    for one in held_out["strangers"]:
        scores = [row[held_out["measure"]] for row in rows if Path(row["other"]).name == Path(one["policy"]).name]
        found.append({**one, "upper": max([one["upper"], *scores]), "best_response": one["upper"]})
    return found


def table_of(rows, measure):
    """A list of scores with the strangers for every ego; empty where somebody lacks one."""
    found = {}
    for row in rows:
        if measure in row:
            found.setdefault(row["ego"], []).append(row[measure])
    return list(found.values()) if len({len(scores) for scores in found.values()}) == 1 else []


def match_means(runs):
    """Returns by the number of a match with the same partners."""
    by_match = [run.get("encounter") or {} for run in runs]
    return np.mean([list(one.values()) for one in by_match], 0).tolist() if all(by_match) else []


def model_means(metrics):
    return {name: float(np.mean([one[name] for one in metrics if name in one])) for one in metrics for name in one}


# ---- the report ----
def text_of(command, results, seconds):
    """report.md"""
    most = max((strangers.STAGES[result["stage"]] for result in results), key=lambda stage: stage.matches_per_partner)
    methods = list(methods_of(most))

    def number(result, value, sign=""):
        return f"{100 * value:{sign}.1f}%" if result["measure"] == "win_rate" else f"{value:{sign}.2f}"

    def with_interval(result, mean, ends, sign=""):
        low, high = (number(result, end, sign) for end in ends)
        return number(result, mean, sign) if low == high else f"{number(result, mean, sign)} ({low} to {high})"

    def crossed(result, table):
        return with_interval(result, float(np.mean(table)), crossed_interval(table)) if table else ""

    def gap(result, ours, theirs):
        """How far scores with the same strangers are ahead."""
        ours, theirs = (result["unseen"].get(m, []) for m in (ours, theirs))
        if not ours or np.shape(ours) != np.shape(theirs):
            return ""
        mean, (low, high) = crossed_difference(ours, theirs)
        return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"

    tested = [*methods[:-1], *([POOL] if any(POOL in result["unseen"] for result in results) else [])]
    rival_names, erring = [m for m in methods if m != OURS], {m: m.partition(",")[0] for m in WITH_ERRORS}
    shares, scores, unseen, raw, matches, ahead, ahead_unseen, gains = ([] for _ in range(8))
    left_out, chance, reached = [], [], []
    for result in results:
        name, seen = result["stage"], result["seen"]
        headroom = with_interval(result, *result["headroom"], "+")
        cells = {m: f"{s:.2f} ({low:.2f} to {high:.2f})" for m, (s, (low, high)) in result["share"].items()}
        cells = cells or {BASE: "no headroom"}
        shares.append([name, headroom, *(cells.get(m, "") for m in methods[:-1])])
        means = {m: with_interval(result, *difference(values, [0.0])) for m, values in seen.items()}
        scores.append([name, *(means.get(m, "") for m in methods)])
        tables = {m: result["unseen"].get(m, []) for m in tested}
        ends = {m: (np.mean(t), *crossed_interval(t)) for m, t in tables.items() if t}
        unseen.append([name, *("{:.2f} ({:.2f} to {:.2f})".format(*ends[m]) if m in ends else "" for m in tested)])
        random = float(np.mean([one["lower"] for one in result["strangers"]]))
        tables = {m: result["unseen_scores"].get(m, []) for m in tested}
        raw.append([name, number(result, random), *(crossed(result, t) for t in tables.values())])
        means = [float(np.mean(t)) for m, t in tables.items() if t and m != POOL]
        if means and random > max(means):
            ends = " to ".join(number(result, f(means)) for f in (min, max))
            chance.append(f"{name} ({number(result, random)}; the methods {ends})")
        ahead_unseen.append([name, *(gap(result, OURS, m) for m in rival_names[:-1])])
        gains.append([name, *(gap(result, m, base) for m, base in erring.items())])
        flat = [s for s in result["strangers"] if not has_headroom(result["measure"], s["lower"], s["upper"])]
        left_out += [f"{len(flat)} of {len(result['strangers'])} in {name}"] if flat else []
        higher = [s for s in result["strangers"] if s["upper"] > s["best_response"]]
        reached += [f"{len(higher)} of {len(result['strangers'])} in {name}"] if higher else []
        if result["matches_per_partner"] > 1:
            ends = [result["matches"].get(m) for m in methods]
            cells = [f"{number(result, v[0])}, {number(result, np.mean(v[1:]))}" if v else "" for v in ends]
            matches.append([name, *cells])
        rivals = {m: with_interval(result, *values, "+") for m, values in result["ahead"].items()}
        ahead.append([name, *(rivals.get(m, "") for m in rival_names)])
    seeds, responses = len(results[0]["seen"][BASE]), max(len(s["responses"]) for r in results for s in r["strangers"])
    parts = [
        "# When does it pay to model the others?",
        f"{seeds} seeds of every method; means and 95% intervals (Student's t). The oracle is an IQL whose "
        "observations include the others' policies. Steps of learning, others and matches are the same for all. "
        "Hidden state kept: all matches with the same partners are one long episode. "
        "Erring others: learned with partners whose actions are random with a probability of up to 0.2, drawn for each "
        "match, and tested with partners who do not err.",
        "## What differs",
        f"While it learns, {OURS} is told its partners' policies: the labels of the oracle, which no rival gets. "
        "Steps of pre-training come on top of those of learning.",
        markdown(["method", "command", "steps of pre-training", "is told", "keeps from match to match"],
                 [differences_of(m, options, results) for m, options in methods_of(most).items()]),
        "## Share of the headroom, with training partners",
        "0 is IQL, 1 the oracle. Headroom: how far the oracle is ahead of IQL; below three points of the win rate "
        "or 3% of a return, or where the interval has 0, there is none. In the figure a mark with a number below it is "
        "beyond the axis.",
        markdown(["stage", "headroom", *methods[:-1]], shares),
        "![share of the headroom](headroom.png)",
        "## Scores with training partners",
        "Share of matches won, or mean return where everybody has rewards of their own.",
        markdown(["stage", *methods], scores),
        f"How far {OURS} is ahead:",
        markdown(["stage", *rival_names], ahead),
        "## Scores with strangers",
        "0 is the random policy, 1 a best response to that stranger; means over strangers. All intervals of this "
        "section are over seeds and strangers together. A best response is the best of the IQL runs that learned with "
        f"this stranger alone ({responses} each), or a run of a method that has more: {', '.join(reached) or 'none'}. "
        "Strangers whose best response is not clearly better than random (by the same limits) are left out: "
        f"{', '.join(left_out) or 'none'}.",
        markdown(["stage", *tested], unseen),
        "The same as matches won or returns, of all strangers. Random play has more than every method in "
        f"{', '.join(chance) or 'no stage'}.",
        markdown(["stage", "random play", *tested], raw),
        f"How far {OURS} is ahead, in scores from 0 to 1:",
        markdown(["stage", *rival_names[:-1]], ahead_unseen),
        "How much better a method is with strangers for having learned with erring partners, in the same scores:",
        markdown(["stage", *erring.values()], gains),
        *(["## Matches with the same partners", "Return of the first match, and the mean of the later ones.",
           markdown(["stage", *methods], matches)] if matches else []),
        "## The belief in two matches",
        "The board, and the probabilities of the next seat's policies; orange is the true one.",
        "![belief](belief.png)",
        "## Learning",
        "![learning curves](curves.png)",
        "## How it was made",
        f"```bash\n{command}\n```",
        f"Seconds at work: {seconds:.0f}. Versions: {', '.join(map(' '.join, results[0]['versions'].items()))}.",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def differences_of(method, command, results):
    """What a method has that others do not, as a row of a table."""
    script, *options = command
    name = method.partition(",")[0]
    steps = max(result["pretraining"].get(method, 0) for result in results)
    kept = "its belief" if name == OURS else "its hidden state" if method.endswith(MEMORY_KEPT) else "nothing"
    return [method, f"`{' '.join([f'{script}.py', *options])}`", f"{steps:,}", LABELS.get(name, "nothing"), kept]


def draw(results, path):
    """headroom.png: every method's share of the headroom with its interval, stage by stage."""
    from matplotlib.figure import Figure

    shown = [result for result in results if result["exists"]]
    methods, marks = [m for m in METHODS | WITH_MEMORY if m != ORACLE], ".osD^v*P"
    figure = Figure(figsize=(0.21 * len(methods) * max(len(shown), 3) + 1.5, 4.2), layout="constrained")
    axes = figure.subplots()
    low, high = -0.75, 1.75  # where the models learn faster than the oracle, shares may be far above 1
    for number, method in enumerate(methods):
        places = [k for k, result in enumerate(shown) if method in result["share"] and method != BASE]
        if not places:
            continue
        x = np.array(places) + 0.9 * (number / len(methods) - 0.5)
        values = np.array([shown[k]["share"][method][0] for k in places])
        ends = np.array([shown[k]["share"][method][1] for k in places]).reshape(-1, 2).T
        look = {"fmt": marks[number % 8], "color": COLOURS[number % len(COLOURS)], "ms": 6, "capsize": 2, "lw": 1}
        if method == OURS:
            look |= {"color": "black", "ms": 11}
        inside = np.clip(values, low + 0.1, high - 0.1)
        axes.errorbar(x, inside, np.where(inside == values, np.abs(ends - values), 0), label=method, **look)
        for place, value, at in zip(x, values, inside):
            if at != value:  # beyond the axis
                axes.text(place, at - 0.1, f"{value:.1f}", ha="center", va="top", fontsize=7)
    for y, name in ((0, "IQL"), (1, "oracle")):
        axes.axhline(y, color="grey", linewidth=1, zorder=0)
        axes.text(1.005, y, name, transform=axes.get_yaxis_transform(), va="center", color="grey")
    axes.set_xticks(range(len(shown)), [result["stage"] for result in shown])
    axes.set(ylabel="share of the headroom", xlim=(-0.5, max(len(shown), 1) - 0.5), ylim=(low, high))
    if flat := [result["stage"] for result in results if not result["exists"]]:
        axes.set_xlabel(f"without headroom: {', '.join(flat)}", fontsize=8)
    if shown:
        figure.legend(loc="outside upper center", ncols=4, frameon=False)
    files.write(path, lambda file: figure.savefig(file, dpi=120))


def draw_curves(plans, root, path):
    groups = {
        (method, strangers.STAGES[plan.stage].env_id): runs
        for plan in plans for method, runs in read_learners(plan, root).items() if method not in plan.known
    }  # fmt: skip
    curves(groups, path)


@plain_text
def draw_belief(run, path, matches=2, moments=4):
    """belief.png: the board and the belief about the next seat at some moments of matches of a run of belief_iql.py."""
    from matplotlib.figure import Figure

    script, args = checkpoints.script_of(run)
    args.pool = tuple(str(run.parent / one) if (run.parent / one).exists() else one for one in args.pool)
    env = script.make_env(args, 1, torch.device("cpu"), "video")
    team = script.make_team(args, env, "video")
    runner = load_runner(run, env, team)
    names = [Path(team.policy_names[policy]).name for policy in team.used]
    examples = []
    for _ in range(matches):
        (obs, info), over, seen = env.reset(), False, []
        while not over:
            action = runner.policy(obs, info)
            seen.append((env.render(), runner.player.log_belief[0, 0, 0].exp().tolist()))
            obs, _, terminated, truncated, info = env.step(action)
            over = bool(terminated | truncated)
        true = team.used.index(int(team.policy_id[0, (int(team.learner_seats[0, 0]) + 1) % env.n_agents]))
        examples.append((seen, true))
    height, width, _ = seen[0][0].shape
    inches = 2.6 * height / width + 0.3, 1.5  # of a board, of the bars below it
    figure = Figure(figsize=(2.6 * moments, sum(inches) * matches), layout="constrained")
    rows = figure.subplots(2 * matches, moments, squeeze=False, height_ratios=inches * matches)
    for number, (seen, true) in enumerate(examples):
        for column, step in enumerate(np.linspace(0, len(seen) - 1, moments).astype(int)):
            board, bars = rows[2 * number][column], rows[2 * number + 1][column]
            board.imshow(seen[step][0])
            board.set_title(f"match {number + 1}, step {step}", fontsize=9)
            board.axis("off")
            bars.bar(range(len(names)), seen[step][1], color=["C1" if k == true else "C0" for k in range(len(names))])
            bars.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
            bars.set(ylim=(0, 1), ylabel="belief" if column == 0 else "")
    files.write(path, lambda file: figure.savefig(file, dpi=100))


def write_report(args, command, plans, root, seconds):
    """report.md with its pictures and report.json; returns what report.md says."""
    results = [results_of(args, plan, root) for plan in plans]
    files.write_text(
        root / "report.json", json.dumps({"command": command, "seconds": seconds, "stages": results}, indent=1)
    )
    text = text_of(command, results, seconds)
    files.write_text(root / "report.md", text)
    draw(results, root / "headroom.png")
    draw_curves(plans, root, root / "curves.png")
    shown = next((plan for plan in plans if plan.stage == "foraging-orders"), plans[0])
    if (run := shown.learners[OURS][0].done(root)) and (run / "checkpoint.pt").exists():
        draw_belief(run, root / "belief.png")
    return text


def main():
    args = tyro.cli(Args, prog="python -m experiments.compare")
    files.drop_what_cannot_be_printed()
    set_sizes(args)
    plans, root = [make_plan(args, name) for name in stages_of(args)], writable_folder(args.out)
    complete, seconds = run_and_time([job for plan in plans for job in plan.jobs], args, root)
    if not complete:
        return 1
    command = " ".join(["python -m experiments.compare", *sys.argv[1:]])
    text = write_report(args, command, plans, root, seconds)
    print(text, f"{root / 'report.md'} has this and the pictures", sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

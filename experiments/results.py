"""Results of runs: reading results.json, statistics over seeds, tables and curves."""

import functools
import itertools
import json
import math
from pathlib import Path

import numpy as np

import envs
from training import files
from training.run import wilson_interval

COLOURS = (
    "#000000", "#56B4E9", "#009E73", "#CC79A7", "#E69F00", "#D55E00", "#888888", "#0072B2", "#A89C00",
    "#8C564B",
)  # also for colour-blind readers  # fmt: skip


# ---- statistics ----
def iqm(values, axis=-1):
    """The interquartile mean: the mean without the lowest and the highest quarter."""
    values = np.sort(values, axis)
    cut = values.shape[axis] // 4
    return np.take(values, range(cut, values.shape[axis] - cut), axis).mean(axis)


def t_quantile(freedom):
    """The two-sided 95% quantile of Student's t, also between whole numbers."""
    known = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 10: 2.228, 15: 2.131}
    known |= {30: 2.042, 60: 2.000, 1e9: 1.960}
    return float(np.interp(1 / freedom, [1 / n for n in reversed(known)], list(reversed(known.values()))))


def interval(mean, parts):
    """The 95% interval of a mean whose variance is a sum of parts, (estimate, degrees of freedom) each.

    The sum has Satterthwaite's degrees of freedom.
    """
    variance = sum(part for part, _ in parts)
    if variance <= 0:
        return [float(mean), float(mean)]
    freedom = max(variance**2 / sum(part**2 / n for part, n in parts), 1)
    half = t_quantile(freedom) * variance**0.5
    return [float(mean - half), float(mean + half)]


def mean_interval(strata):
    """The 95% interval of the mean of all values, which vary within each stratum (an environment's seeds, say)."""
    strata = [np.asarray(values, float) for values in strata]
    together = np.concatenate(strata)
    parts = [(len(s) * s.var(ddof=1) / len(together) ** 2, len(s) - 1) for s in strata if len(s) > 1]
    return interval(together.mean(), parts)


def iqm_interval(strata, samples=5000, seed=0):
    """The 95% interval of the interquartile mean: Yuen's for one stratum, else a bootstrap within each of them."""
    if len(strata) == 1:
        values = np.sort(np.asarray(strata[0], float))
        cut = len(values) // 4
        left = len(values) - 2 * cut
        if left < 2:
            return [float(values.mean())] * 2
        spread = np.clip(values, values[cut], values[-1 - cut]).var(ddof=1) * (len(values) - 1)
        return interval(iqm(values), [(spread / (left * (left - 1)), left - 1)])
    rng = np.random.default_rng(seed)
    drawn = [rng.choice(np.asarray(values), (samples, len(values))) for values in strata]
    return np.quantile(iqm(np.concatenate(drawn, 1)), (0.025, 0.975)).tolist()


def crossed_interval(values):
    """The 95% interval of the mean of a table, seeds by strangers, where both are drawn at random.

    A sentence about strangers is about those that were not tried, too, which an interval over seeds alone leaves out.
    The variance is that of a two-way layout: of the means of rows plus of columns, less the noise that is in both, and
    not below either alone. Student's t stands for the few seeds and strangers, where a bootstrap is too narrow.
    """
    values = np.asarray(values, float)
    rows, columns = values.shape
    mean, by_row, by_column = values.mean(), values.mean(1), values.mean(0)
    if rows == 1 or columns == 1:
        return mean_interval([values.ravel()])
    rest = values - by_row[:, None] - by_column + mean
    rest_freedom = (rows - 1) * (columns - 1)
    noise = (rest**2).sum() / rest_freedom / values.size
    parts = [(by_row.var(ddof=1) / rows, rows - 1), (by_column.var(ddof=1) / columns, columns - 1)]
    both = interval(mean, [*parts, (-noise, rest_freedom)])  # the noise is in the means of rows and of columns
    return max(both, *(interval(mean, [part]) for part in parts), key=lambda ends: ends[1] - ends[0])


def crossed_difference(ours, theirs):
    """(how far one table is ahead of another, its 95% interval), with the same strangers.

    What a stranger is like drops out of the difference. Seeds of two methods have only their number in common, so that
    any pairs of them will do.
    """
    gaps = np.subtract(ours, theirs)
    return float(gaps.mean()), crossed_interval(gaps)


def summary(strata, least=-np.inf, most=np.inf):
    """Mean and interquartile mean of values within `least` and `most`, with 95% intervals that end there too."""
    together = np.concatenate([np.asarray(values) for values in strata])
    return {
        "mean": float(together.mean()), "mean_interval": np.clip(mean_interval(strata), least, most).tolist(),
        "iqm": float(iqm(together)), "iqm_interval": np.clip(iqm_interval(strata), least, most).tolist(),
    }  # fmt: skip


SIDE = "episodic_return_side_0"  # in a run whose learners play against each other: the mean over both says nothing
MEASURES = {  # None: it says nothing about the run
    "win_rate": lambda run: run["final"]["win_rate"],
    "best_win_rate": lambda run: run["best"]["win_rate"],
    "episodic_return": lambda run: None if SIDE in run["final"] else run["final"]["episodic_return"],
    "best_episodic_return": lambda run: run["best"]["episodic_return"],
    "seconds": lambda run: run["seconds"],
}


# ---- reading ----
def match_summary(sums, metrics):
    """The values of a row with their 95% intervals, from sums over its matches and the metrics of its model."""
    episodes, wins, returns, squares, steps, *by_number = sums
    row = {"episodes": int(episodes), "wins": int(wins)}
    if episodes:
        mean = returns / episodes
        low, high = wilson_interval(wins, episodes)
        variance = max(squares / episodes - mean**2, 0.0) * episodes / max(episodes - 1, 1)
        spread = 1.959964 * (variance / episodes) ** 0.5
        row |= {"win_rate": wins / episodes, "win_rate_low": low, "win_rate_high": high, "return": mean}
        row |= {"return_low": mean - spread, "return_high": mean + spread, "return_std": variance**0.5}
        row["length"] = steps / episodes
        if len(by_number) > 1:  # of the matches of an encounter
            row |= {f"return_{number}": earned / episodes for number, earned in enumerate(by_number, 1)}
    for name in dict.fromkeys(key for one in metrics for key in one):
        values = [one[name] for one in metrics if name in one]
        row[name] = float(np.mean(values))
        if len(values) > 1:
            row[f"{name}_low"], row[f"{name}_high"] = mean_interval([values])
    return row


def load_results(path):
    """The content of a results.json; a ValueError names one that is cut, or lacks what is read here and in paper.py."""
    try:
        results = json.loads(path.read_bytes())
        numbers = [results["seconds"]]
        if "final" in results:
            names = ("win_rate", "episodic_return")
            numbers += [results["final"][name] for name in names]
            numbers += [value for name in names if (value := results["best"][name]) is not None]
            numbers += [e[name] for e in results["evals"] for name in ("steps", *names)]
        for row in results.get("rows", ()):
            numbers += [row["episodes"], *(row[name] for name in ("win_rate", "return") if row["episodes"])]
            numbers += [len(row[name]) for name in ("ego", "group", "other")]
        if "rows" in results:
            numbers += [len(Path(run).name) for run in (*results["args"]["ego"], *results["args"]["others"])]
        if not all(map(math.isfinite, numbers)) or not isinstance(results["args"], dict):
            raise ValueError("no numbers")
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path} is cut or not of a run ({type(error).__name__}: {error})") from None
    return results


def is_done(run):
    try:
        return bool(load_results(run / "results.json"))
    except (OSError, ValueError):
        return False


# ---- scores between bounds ----
def read_bounds(path):
    """Of a manifest of strangers.py: {stranger: (measure, lower, upper)}, and the stage's environment and encounters.

    A stranger is a path or a scripted policy.
    """
    try:
        manifest = json.loads(path.read_bytes())
        found, stage = {}, {"env_id": str(manifest["env_id"])}
        matches = manifest.get("matches_per_partner", manifest.get("encounter", 1))  # its name before
        stage["matches_per_partner"] = int(matches)
        for one in manifest["strangers"]:
            folder = path.parent / one["policy"]
            name = str(folder) if folder.is_dir() else one["policy"]
            found[name] = (manifest["measure"], float(one["lower"]), float(one["upper"]))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path} is not a manifest of strangers ({type(error).__name__}: {error})") from None
    return found, stage


def has_headroom(measure, lower, upper):
    """Whether there is a scale from one score to the other: three points of the win rate, or 3% of a return."""
    return upper - lower > 0.03 * (1 if measure == "win_rate" else abs(upper))


def path_of(name):
    """A run's folder however it is written; a scripted policy's name."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def normalise(rows, bounds):
    """Adds to the rows of evaluate.py what share of the way from the lower to the upper bound they are.

    That of `all` is the mean over the strangers, with its interval over them.
    """
    scores, by_path = {}, {path_of(name): bound for name, bound in bounds.items()}
    for row in rows:
        ego = row["ego"], row["adapted"], row["group"]
        if path_of(row["other"]) in by_path and row["group"] == "homologue" and row["episodes"]:
            measure, lower, upper = by_path[path_of(row["other"])]
            if has_headroom(measure, lower, upper):
                row["normalised"] = (row[measure] - lower) / (upper - lower)
                scores.setdefault(ego, []).append(row["normalised"])
        elif row["other"] == "all" and ego in scores:
            row["normalised"] = float(np.mean(scores[ego]))
            if len(scores[ego]) > 1:
                row["normalised_low"], row["normalised_high"] = mean_interval([scores[ego]])


# ---- tables and curves ----
def rows_of(groups):
    """{(label, environment): results of its runs} -> a row for each, and one for a label's environments together."""
    rows = []
    for label in dict.fromkeys(label for label, _ in groups):
        mine = {env_id: runs for (name, env_id), runs in groups.items() if name == label}
        parts = [(env_id, [runs]) for env_id, runs in mine.items()]
        if len(mine) > 1:
            parts.append(("all", list(mine.values())))
        for env_id, strata in parts:
            row = {"script": label, "env_id": env_id, "runs": sum(map(len, strata))}
            for name, measure in MEASURES.items():
                bounds = (0, 1) if name.endswith("win_rate") else ()
                values = [[measure(run) for run in runs] for runs in strata]
                counts = not bounds or all(map(is_won_together, mine if env_id == "all" else [env_id]))
                known = counts and None not in itertools.chain(*values)
                row[name] = summary(values, *bounds) if known else None
            rows.append(row)
    return rows


def markdown(head, rows):
    """A table that can also be read as it is."""
    widths = [max(len(row[c]) for row in (head, *rows)) for c in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths)] for row in (head, *rows)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(rows):
    def cells(row):
        yield from (row["script"], row["env_id"], str(row["runs"]))
        for name, form in (("win_rate", "{:.1%}"), ("episodic_return", "{:.2f}")):
            if row[name] is None:
                yield from "---"
                continue
            interval = f" ({form} to {form})".format(*row[name]["iqm_interval"]) if row["runs"] > 1 else ""
            yield form.format(row[name]["mean"])
            yield form.format(row[name]["iqm"]) + interval
            yield form.format(row[f"best_{name}"]["mean"]) if row[f"best_{name}"] else "-"
        yield f"{row['seconds']['mean']:.0f}"

    win, earn = (("won, mean", "won, IQM (95%)", "best, mean"), ("return, mean", "return, IQM (95%)", "best, mean"))
    return markdown(["script", "environment", "runs", *win, *earn, "seconds"], [list(cells(row)) for row in rows])


def plain_text(draw):
    """For what draws names of runs: a $ in them is a dollar sign, not where matplotlib's formulas begin."""

    @functools.wraps(draw)
    def drawn(*args, **options):
        import matplotlib

        with matplotlib.rc_context({"text.parse_math": False}):
            return draw(*args, **options)

    return drawn


@plain_text
def curves(groups, path):
    """For every environment the evaluations against steps: each group's mean over seeds, and its 95% interval.

    Where learners play against each other the second side is dashed.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    env_ids, labels = ([*dict.fromkeys(key[part] for key in groups)] for part in (1, 0))
    columns = min(len(env_ids), 3)
    rows, width = -(-len(env_ids) // columns), max(4.2 * columns, 5 if len(labels) < 5 else 8)
    in_a_row = max(int(width / (0.6 + 0.08 * max(map(len, labels), default=0))), 1)  # names in the legend
    height = 3 * rows + 0.4 + 0.2 * -(-len(labels) // in_a_row)
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    colours, lines = (COLOURS * len(labels))[: len(labels)], {}
    for axes, env_id in zip(panels, env_ids):
        metric = metric_of([env_id], [e for (_, env), runs in groups.items() if env == env_id for e in evals_of(runs)])
        for colour, label in zip(colours, labels):
            seeds = [run["evals"] for run in groups.get((label, env_id), ()) if run["evals"]]
            if not seeds:
                continue
            steps = np.linspace(max(e[0]["steps"] for e in seeds), min(e[-1]["steps"] for e in seeds), 100)
            sides = all(SIDE in e for run in seeds for e in run)
            for key, dash in ((SIDE, "-"), (SIDE.replace("0", "1"), "--")) if sides else ((metric, "-"),):
                values = [np.interp(steps, [e["steps"] for e in run], [e[key] for e in run]) for run in seeds]
                band = np.transpose([mean_interval([column]) for column in np.transpose(values)])
                if key == "win_rate":
                    band = band.clip(0, 1)
                line = axes.plot(steps, np.mean(values, 0), dash, color=colour)[0]
                lines.setdefault(label, line)
                axes.fill_between(steps, *band, color=colour, alpha=0.2, linewidth=0)
        words = "share of matches won" if metric == "win_rate" else "return of a match"
        axes.set(title=env_id, xlabel="environment steps", ylabel=words, xlim=(0, None))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    for axes in panels[len(env_ids) :]:
        axes.axis("off")
    if lines:
        names = min(len(lines), in_a_row)
        figure.legend(lines.values(), lines, loc="outside upper center", ncols=names, frameon=False)
    files.write(path, lambda file: figure.savefig(file, dpi=120))


def metric_of(env_ids, evals):
    """What tells runs in these environments apart: who wins, or what they earn where nobody does."""
    won = any(row["win_rate"] > 0 for row in evals) and all(map(is_won_together, env_ids))
    return "win_rate" if won else "episodic_return"


def is_won_together(env_id):
    """Whether winning says how well an agent did: not where each has its own reward, or nobody says who won."""
    if envs.names_code(env_id):
        return False
    try:
        return envs.make(env_id.removeprefix("sc2/")).team_reward
    except ValueError:  # an environment of the script's own
        return True


def has_sides(env_id):
    """Whether there are two sides with opposing interests: if both learn, no return says how good they are."""
    try:
        return not env_id.startswith("pettingzoo:") and envs.make(env_id).sides is not None
    except ValueError:  # an environment of the script's own
        return False


def marl_eval(groups):
    """The runs in the layout of the package marl-eval: environment -> task -> algorithm -> seed -> evaluations.

    It looks names up in lower case, wants no comma in an algorithm's, and as many evaluations of every run of an
    environment: the shortest's.
    """
    names = {"win_rate": "win_rate", "episodic_return": "return"}
    content, fewest = {}, {}
    for (_, env_id), runs in groups.items():
        game = _game_of(env_id)
        fewest[game] = min(fewest.get(game, math.inf), *(len(run["evals"]) for run in runs))
    for (label, env_id), runs in groups.items():
        game = _game_of(env_id)
        seeds = content.setdefault(game, {}).setdefault(env_id.lower(), {}).setdefault(label.replace(",", ";"), {})
        for run in runs:
            steps = {
                f"step_{number}": {"step_count": row["steps"], **{name: [row[key]] for key, name in names.items()}}
                for number, row in enumerate(run["evals"][: fewest[game]], 1)
            }
            final = {name: [run["final"][key]] for key, name in names.items()}
            seeds[f"seed_{run['seed']}"] = {**steps, "absolute_metrics": final}
    return content


def _game_of(env_id):
    """What marl-eval calls the environment of a task: battle, staghunt, foraging, ..."""
    try:
        return envs._kind(envs.parse_id(env_id)[0]).__name__.lower()
    except ValueError:  # an environment of the script's own
        return "own"


def evals_of(runs):
    return [evaluation for run in runs for evaluation in run["evals"]]

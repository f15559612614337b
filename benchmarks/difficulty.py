"""Do the battles rank in difficulty as SMAC's maps do? Win rates of runs beside SMAC's published ones, and a picture.

for id in 2s_vs_1sc 2s3z 3s5z 1c3s5z 10m_vs_11m 2c_vs_64zg bane_vs_bane 5m_vs_6m 3s_vs_5z 3s5z_vs_3s6z \
    6h_vs_8z 27m_vs_30m MMM2 corridor; do for learner in iql vdn qmix; do
        python benchmarks/rmsprop.py $learner.py --env-id $id --cuda --run-root runs/difficulty \
            --total-timesteps 2000000 --num-envs 64 --train-frequency 0 --batch-size 32 --buffer-size 3000 \
            --gamma 0.99 --reward-scale 1 --td-lambda 0 --learning-rate 5e-4 --exploration-fraction 0.025 \
            --eval-interval 25000 --no-save-buffer
done; done
python benchmarks/difficulty.py runs/difficulty/* --out docs/images/difficulty.png

The settings are near PyMARL's, which SMAC's figures were made with: RMSprop, one-step targets, an update of 32
episodes per episode, epsilon down to 0.05 in 50,000 steps. Here unfinished runs are left out.

A figure is what SMAC's table (Samvelyan et al. 2019) has been found to hold: the evaluations of each run as means over
50,000 steps, their median over seeds, and of that the maximum over training. Beside it, in parentheses where nobody
wins, the mean return of the last 10 evaluations, median over seeds: among figures of 0% returns rank. The rank
correlation is Spearman's, over all maps and algorithms that both have.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from matplotlib.figure import Figure

MAPS = ("2s_vs_1sc", "2s3z", "3s5z", "1c3s5z", "10m_vs_11m", "2c_vs_64zg", "bane_vs_bane", "5m_vs_6m", "3s_vs_5z",
        "3s5z_vs_3s6z", "6h_vs_8z", "27m_vs_30m", "MMM2", "corridor")  # fmt: skip
WON = {  # per cent; QTRAN was published as curves on three maps
    "iql": (100, 75, 10, 21, 34, 7, 99, 49, 45, 0, 0, 0, 0, 0),
    "vdn": (100, 97, 84, 91, 97, 21, 94, 70, 91, 2, 0, 0, 1, 0),
    "qmix": (100, 99, 97, 97, 97, 58, 85, 70, 87, 2, 3, 49, 69, 1),
    "coma": (98, 43, 1, 31, 7, 0, 64, 1, 0, 0, 0, 0, 0, 0),
    "qtran": (100, 93, 31),
}
RETURN = {
    "iql": (20.1, 18.0, 13.5, 14.1, 14.1, 17.3, 19.7, 14.3, 19.3, 9.8, 9.9, 10.7, 8.5, 7.9),
    "vdn": (20.3, 19.7, 19.1, 19.4, 19.5, 18.2, 19.8, 16.8, 21.2, 13.1, 13.5, 11.6, 11.2, 11.2),
    "qmix": (20.2, 19.8, 19.8, 19.9, 19.7, 18.8, 18.1, 16.7, 21.0, 14.9, 12.2, 17.9, 16.7, 10.9),
    "coma": (19.2, 15.6, 11.2, 15.6, 11.5, 13.5, 17.5, 8.3, 4.1, 8.1, 8.1, 10.8, 6.1, 1.9),
    "qtran": (20.2, 19.6, 15.9),
}
PUBLISHED = {(m, a): (won, earned) for a in WON for m, won, earned in zip(MAPS, WON[a], RETURN[a])}
TEST_INTERVAL = 10_000  # steps; figures are computed after so many, twice as many, ...
LAST_TESTS = 10


@dataclass
class Args:
    runs: Annotated[list[Path], tyro.conf.Positional]
    """run folders; those of other maps and algorithms, and unfinished ones, are left out"""
    algorithms: tuple[str, ...] = ("iql", "vdn", "qmix")
    """whose runs to show; any may be named, published or not, such as coma, qtran, mappo"""
    out: Path | None = None  # a picture to write, ours against SMAC's
    window: int = 50_000  # steps over which the evaluations of a run are averaged


def ranks(values):
    """From 0 up; those that are equal share the mean of their ranks."""
    values = np.asarray(values, float)
    return ((values[:, None] > values).sum(1) + (values[:, None] >= values).sum(1) - 1) / 2


def hardness(figures):
    """A number for each (win rate, return), larger for the better: by win rates in per cent, those of 0 by returns."""
    keys = [(round(won), earned if round(won) == 0 else 0) for won, earned in figures]
    order = sorted(set(keys))
    return [order.index(key) for key in keys]


def rank_correlation(ours, theirs):
    """Spearman's, of (win rate, return) pairs: how far the order of the one is that of the other, from -1 to 1."""
    one, other = ranks(hardness(ours)), ranks(hardness(theirs))
    return float(np.corrcoef(one, other)[0, 1]) if one.std() and other.std() else float("nan")


def best_so_far(evals, steps, window):
    """Per cent won after each number of steps: the maximum of the median over runs of means over a window.

    evals: of each run its evaluations, as in results.json.
    """
    curves = []
    for run in evals:
        at, won = (np.array([evaluation[key] for evaluation in run]) for key in ("steps", "win_rate"))
        tests = min(max(round(window * len(at) / at[-1]), 1), len(at))  # in a window
        smoothed = np.convolve(won, np.ones(tests) / tests, "valid")
        curves.append(np.interp(steps, at[tests - 1 :], smoothed, left=0))
    return np.maximum.accumulate(100 * np.median(curves, axis=0))


def read_runs(folders, algorithms):
    """(map, algorithm) -> the evaluations of each finished run."""
    found = defaultdict(list)
    for folder in folders:
        if (folder / "results.json").exists():
            run = json.loads((folder / "results.json").read_text())
            if run.get("env_id") in MAPS and run.get("algorithm") in algorithms and run["evals"]:
                found[run["env_id"], run["algorithm"]].append(run["evals"])
    return found


def figures_of(runs, window):
    """(the numbers of steps, (map, algorithm) -> (per cent won after each of them, return at the end))"""
    last = max(run[-1]["steps"] for group in runs.values() for run in group)
    steps, figures = np.arange(TEST_INTERVAL, max(last, TEST_INTERVAL) + 1, TEST_INTERVAL), {}
    for key, group in runs.items():
        returns = [np.mean([e["episodic_return"] for e in run[-LAST_TESTS:]]) for run in group]
        figures[key] = best_so_far(group, steps, window), float(np.median(returns))
    return steps, figures


def cell(won, earned):
    return f"{won:.0f}" if round(won) else f"0 ({earned:.1f})"


def print_table(ours, algorithms):
    header = " | ".join(f"{a.upper()}: ours | SMAC" if a in WON else f"{a.upper()}: ours" for a in algorithms)
    print(f"| map | {header} |\n|{'---|' * (header.count('|') + 2)}")
    for name in (name for name in MAPS if any(key[0] == name for key in ours)):
        cells = []
        for a in algorithms:
            cells.append(cell(*ours[name, a]) if (name, a) in ours else "")
            if a in WON:
                cells.append(cell(*PUBLISHED[name, a]) if (name, a) in PUBLISHED else "")
        print(f"| {name} | {' | '.join(cells)} |")


def print_agreement(steps, figures, ours, name=None):
    """How far those of one algorithm, or all, agree."""
    both = [key for key in figures if key in PUBLISHED and name in (key[1], None)]
    if len(both) < 2:
        return
    correlation = rank_correlation([ours[key] for key in both], [PUBLISHED[key] for key in both])
    apart = np.mean([abs(figures[key][0] - PUBLISHED[key][0]) for key in both], axis=0)
    least = apart.argmin()
    print(f"{name or 'all'}, {len(both)} figures: rank correlation {correlation:.3f}, "
          f"mean absolute difference {apart[-1]:.1f} points, "
          f"at the least {apart[least]:.1f} after {steps[least]:,} steps")  # fmt: skip


def draw(ours, algorithms, path):
    figure = Figure(figsize=(6.4, 6.4), layout="constrained")
    axes = figure.subplots()
    axes.plot((0, 100), (0, 100), color="0.8", zorder=0)
    for number, a in enumerate(algorithms):
        names = [name for name in MAPS if (name, a) in ours and (name, a) in PUBLISHED]
        points = [(PUBLISHED[name, a][0], ours[name, a][0]) for name in names]
        if names:
            axes.scatter(*zip(*points), color=f"C{number}", label=a.upper())
        for name, (x, y) in zip(names, points):
            if not (max(x, y) < 5 or min(x, y) > 95):  # in the corners there are too many
                style = {"textcoords": "offset points", "fontsize": 7, "color": f"C{number}"}
                axes.annotate(name, (x, y), (-4 if x > 60 else 4, 4), ha="right" if x > 60 else "left", **style)
    axes.set(xlabel="won in SMAC, %", ylabel="won here, %", xlim=(-3, 103), ylim=(-3, 103))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    args = tyro.cli(Args)
    runs = read_runs(args.runs, args.algorithms)
    if not runs:
        raise SystemExit(f"no finished run of {', '.join(args.algorithms)} on one of {', '.join(MAPS)}")
    steps, figures = figures_of(runs, args.window)
    ours = {key: (won[-1], earned) for key, (won, earned) in figures.items()}
    print_table(ours, args.algorithms)
    for name in (*args.algorithms, None):
        print_agreement(steps, figures, ours, name)
    if args.out:
        draw(ours, args.algorithms, args.out)

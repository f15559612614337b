"""Learning curves of runs, against environment steps and seconds: seeds thin, the mean of a group thick.

python benchmarks/curves.py runs/8m__qmix__* runs/8m__vdn__* --out 8m.png
python benchmarks/curves.py runs/stag_hunt_4x4__* --metric episodic_return --out stag_hunt.png

Runs of the same algorithm on the same environment are a group. Each run is a folder with results.json.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter


@dataclass
class Args:
    runs: Annotated[list[Path], tyro.conf.Positional]  # run folders
    out: Path  # the picture to write
    metric: Literal["win_rate", "episodic_return"] = "win_rate"  # what to show, of the greedy evaluations


def draw(axes, group, against, metric, colour, label):
    """Every run of a group, and their mean over the stretch that all of them have."""
    curves = [np.array([(e[against], e[metric]) for e in run["evals"]]).T for run in group]
    for x, y in curves:
        axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.5)
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    common = np.unique(np.concatenate([x[(x >= first) & (x <= last)] for x, _ in curves]))
    mean = np.mean([np.interp(common, x, y) for x, y in curves], axis=0)
    axes.plot(common, mean, color=colour, label=f"{label}, {len(group)} seed{'s' * (len(group) > 1)}")


if __name__ == "__main__":
    args = tyro.cli(Args)
    groups = {}
    for folder in args.runs:
        run = json.loads((folder / "results.json").read_text())
        if "evals" in run:  # pre-training has none
            groups.setdefault(f"{run['algorithm']} {run['env_id']}", []).append(run)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, against in zip(figure.subplots(1, 2, sharey=True), ("steps", "seconds")):
        for number, (label, group) in enumerate(sorted(groups.items())):
            draw(axes, group, against, args.metric, f"C{number}", label)
        axes.set(xlabel=against, ylabel=f"eval/{args.metric}", xlim=(0, None))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=120)

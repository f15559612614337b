"""Do the battles rank in difficulty as SMAC's maps do? Win rates of runs beside SMAC's published ones.

python sweep.py --script iql.py vdn.py qmix.py --env-ids 2s_vs_1sc 2s3z 3s5z 1c3s5z 5m_vs_6m 3s_vs_5z MMM2 6h_vs_8z \
    --seeds 1 --cuda --run-root runs/difficulty -- --total-timesteps 2000000 --num-envs 128 --train-frequency 250
python benchmarks/difficulty.py runs/difficulty/*

Published: median test win rate of PyMARL after 2 million steps on StarCraft II (Samvelyan et al. 2019). Ours: the mean
over seeds of the final evaluations. The rank correlation is Spearman's, over all maps and algorithms that both have.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

ALGORITHMS = ("iql", "vdn", "qmix")
PUBLISHED = {
    "2s_vs_1sc": (100, 100, 100), "2s3z": (75, 97, 99), "3s5z": (10, 84, 97), "1c3s5z": (21, 91, 97),
    "10m_vs_11m": (34, 97, 97), "2c_vs_64zg": (7, 21, 58), "bane_vs_bane": (99, 94, 85), "5m_vs_6m": (49, 70, 70),
    "3s_vs_5z": (45, 91, 87), "3s5z_vs_3s6z": (0, 2, 2), "6h_vs_8z": (0, 0, 3), "27m_vs_30m": (0, 0, 49),
    "MMM2": (0, 1, 69), "corridor": (0, 0, 1),
}  # fmt: skip


@dataclass
class Args:
    runs: Annotated[list[Path], tyro.conf.Positional]
    """run folders; those of other maps and scripts, and unfinished ones, are left out"""


def ranks(values):
    """From 0 up; those that are equal share the mean of their ranks."""
    values = np.asarray(values, float)
    return ((values[:, None] > values).sum(1) + (values[:, None] >= values).sum(1) - 1) / 2


def rank_correlation(one, other):
    """Spearman's: how far the order of the one is that of the other, from -1 to 1."""
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def win_rates(folders):
    """(map, algorithm) -> the mean of the final win rates, in per cent."""
    found = defaultdict(list)
    for folder in folders:
        if (folder / "results.json").exists():
            run = json.loads((folder / "results.json").read_text())
            if run.get("env_id") in PUBLISHED and run.get("algorithm") in ALGORITHMS:
                found[run["env_id"], run["algorithm"]].append(100 * run["final"]["win_rate"])
    return {key: float(np.mean(values)) for key, values in found.items()}


if __name__ == "__main__":
    ours = win_rates(tyro.cli(Args).runs)
    if not ours:
        raise SystemExit(f"no finished run of {', '.join(ALGORITHMS)} on one of {', '.join(PUBLISHED)}")
    published = {(m, a): figure for m, figures in PUBLISHED.items() for a, figure in zip(ALGORITHMS, figures)}
    print(f"| map | {' | '.join(f'{a.upper()}: ours | SMAC' for a in ALGORITHMS)} |\n|---|{'---|---|' * 3}")
    for env_id in (env_id for env_id in PUBLISHED if any(m == env_id for m, _ in ours)):
        cells = [
            f"{ours[env_id, a]:.0f} | {published[env_id, a]}" if (env_id, a) in ours else " | " for a in ALGORITHMS
        ]
        print(f"| {env_id} | {' | '.join(cells)} |")
    for name in (*ALGORITHMS, None):
        pairs = [(ours[key], published[key]) for key in ours if name in (key[1], None)]
        if len({a for a, _ in pairs}) > 1 and len({b for _, b in pairs}) > 1:
            print(f"rank correlation, {name or 'all'}: {rank_correlation(*zip(*pairs)):.2f} ({len(pairs)} figures)")

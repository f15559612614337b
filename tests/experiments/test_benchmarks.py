"""What the benchmarks compute: the difficulty table, and the settings of training runs."""

import json
import subprocess
import sys

import pytest
import torch
from helpers import POLICY_SCRIPTS, ROOT, SCRIPTS, command_line

sys.path.insert(0, str(ROOT / "benchmarks"))
import difficulty
import rmsprop
import train_throughput


def test_ranks_are_shared_by_equals():
    assert difficulty.ranks([10, 30, 20, 30, 30]).tolist() == [0, 3, 1, 3, 3]


def test_rank_correlation():
    def correlation(one, other):
        return difficulty.rank_correlation(*([(won, 0) for won in values] for values in (one, other)))

    assert correlation([1, 2, 3, 4], [10, 20, 90, 1000]) == pytest.approx(1)
    assert correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)  # 1 - 6 * 4 / (5 * 24)
    returns = [(0, 5), (0.4, 7), (30, 1), (60, 0)]  # less than half a per cent is none: the return decides
    assert difficulty.rank_correlation(returns, [(0, 1), (0, 2), (5, 9), (9, 5)]) == pytest.approx(1)
    assert difficulty.rank_correlation(returns, [(0, 2), (0, 1), (5, 9), (9, 5)]) == pytest.approx(0.8)


def evaluations(won, earned=(0,)):
    """One in 10,000 steps."""
    earned = [*earned, *earned[-1:] * (len(won) - len(earned))]
    return [{"steps": 10_000 * n, "win_rate": w, "episodic_return": e} for n, (w, e) in enumerate(zip(won, earned), 1)]


def test_a_figure_is_the_maximum_over_training_of_the_median_of_means():
    won = [[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0], [0] * 5 + [0.5] * 7, [1] + [0] * 10 + [1]]
    steps = [10_000 * n for n in range(1, 13)]
    figure = difficulty.best_so_far([evaluations(run) for run in won], steps, window=50_000)
    means = [[sum(run[max(n - 5, 0) : n]) / 5 if n >= 5 else 0 for n in range(1, 13)] for run in won]
    medians = [sorted(three)[1] for three in zip(*means)]
    assert figure.tolist() == pytest.approx([100 * max(medians[:n]) for n in range(1, 13)])


def test_rmsprop_skips_an_update_that_is_not_finite():
    ours, plain = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = rmsprop.RMSprop([ours], 0.1, fused=True, capturable=False, eps=1e-5)
    reference = torch.optim.RMSprop([plain], 0.1, alpha=0.99, eps=1e-5)
    for found_inf in (0.0, 1.0):
        optimizer.found_inf = torch.tensor(found_inf)
        ours.grad = torch.tensor([1.0, 2.0, float("nan") if found_inf else 3.0])
        plain.grad = torch.zeros(3) if found_inf else torch.tensor([1.0, 2.0, 3.0])
        optimizer.step(), reference.step()
        assert torch.equal(ours, plain) and not torch.equal(ours, torch.ones(3))


@pytest.mark.slow
def test_a_script_runs_with_rmsprop(tmp_path):
    words = command_line("iql", tmp_path, {"env_id": "stag_hunt_4x4", "total_timesteps": 200})
    subprocess.run([sys.executable, ROOT / "benchmarks" / "rmsprop.py", *words], check=True, cwd=tmp_path)
    (folder,) = tmp_path.iterdir()
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)["optimizer"]
    assert all("square_avg" in of and "exp_avg" not in of for of in saved["state"].values()) and saved["state"]


def test_the_difficulty_table(tmp_path):
    for number, (env_id, algorithm, *evals) in enumerate(
        [
            ("2s3z", "qmix", [0, 0.9, 0.3]),
            ("2s3z", "qmix", [0.2, 0.8, 0.4]),
            ("corridor", "qmix", [0, 0, 0], [1, 2, 3]),
            ("MMM2", "qmix", [0, 0.1, 0.5]),
            ("MMM2", "coma", [0, 0, 0.002], [4]),
            ("2s3z", "coma", [0, 0.4, 0.1]),
            ("2s3z", "ippo", [0, 0, 1]),
            ("3m", "qmix", [1]),
        ]
    ):
        (tmp_path / f"{number}").mkdir()
        results = {"env_id": env_id, "algorithm": algorithm, "evals": evaluations(*evals)}
        (tmp_path / f"{number}" / "results.json").write_text(json.dumps(results))
    (tmp_path / "unfinished").mkdir()
    command = [sys.executable, ROOT / "benchmarks" / "difficulty.py", *sorted(tmp_path.iterdir()), "--window", "10000",
               "--algorithms", "qmix", "coma", "ippo", "--out", tmp_path / "picture.png"]  # fmt: skip
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert output[0] == "| map | QMIX: ours | SMAC | COMA: ours | SMAC | IPPO: ours |" and output[1].count("|") == 7
    assert output[2:5] == [
        "| 2s3z | 85 | 99 | 40 | 43 | 100 |",
        "| MMM2 | 50 | 69 | 0 (4.0) | 0 (6.1) |  |",
        "| corridor | 0 (2.0) | 1 |  | 0 (1.9) |  |",
    ]
    assert output[5].startswith("qmix, 3 figures: rank correlation 1.000, mean absolute difference 11.3 points, at ")
    assert output[7].startswith("all, 5 figures: rank correlation 0.900, ")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_replay_ratio_counts_samples():
    length = train_throughput.random_length("3m")
    assert 10 < length <= 60
    args = train_throughput.Args(replay_ratio=16, batch_size=512)
    matches, every, batch, ratio = train_throughput.settings("iql", "3m", args)
    assert (matches, batch) == (64, 512) and ratio == pytest.approx(16, rel=0.01)
    assert every == pytest.approx(512 * length / 16, rel=0.1)  # other actions, so about


@pytest.mark.parametrize("name", SCRIPTS)
def test_settings_are_by_default_those_of_the_script(name, monkeypatch):
    monkeypatch.setattr(train_throughput, "random_length", lambda env_id: 25)
    args = SCRIPTS[name].Args(env_id="8m")
    SCRIPTS[name].check_args(args)
    matches, every, batch, ratio = train_throughput.settings(name, "8m", train_throughput.Args())
    assert (matches, every, batch) == (args.num_envs, args.train_frequency, args.batch_size)
    assert ratio == batch * 25 / every


def test_settings_of_rounds(monkeypatch):
    """coma.py learns from every round once."""
    monkeypatch.setattr(train_throughput, "random_length", lambda env_id: 25.5)
    assert train_throughput.settings("coma", "8m", train_throughput.Args(num_envs=64)) == (64, 1632, 64, 1)


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_settings_of_rollouts(name):
    """A batch is some steps of as many matches; the replay ratio is the number of passes."""
    args = POLICY_SCRIPTS[name].Args(env_id="8m")
    POLICY_SCRIPTS[name].check_args(args)
    matches, every, batch, ratio = train_throughput.settings(name, "8m", train_throughput.Args())
    assert (matches, batch, ratio) == (args.num_envs, args.num_envs // args.num_minibatches, args.update_epochs)
    assert every == matches * args.num_steps / (args.update_epochs * args.num_minibatches)
    given = train_throughput.Args(replay_ratio=16, num_envs=256, batch_size=512)
    assert train_throughput.settings(name, "8m", given) == (256, 256 * args.num_steps // 16, 256, 16)

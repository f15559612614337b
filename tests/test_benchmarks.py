"""What the benchmarks compute: the difficulty table, and the settings of training runs."""

import json
import subprocess
import sys

import pytest
from scripts import POLICY_SCRIPTS, ROOT, SCRIPTS

sys.path.insert(0, str(ROOT / "benchmarks"))
import difficulty
import train_throughput


def test_ranks_are_shared_by_equals():
    assert difficulty.ranks([10, 30, 20, 30, 30]).tolist() == [0, 3, 1, 3, 3]


def test_rank_correlation():
    assert difficulty.rank_correlation([1, 2, 3, 4], [10, 20, 90, 1000]) == pytest.approx(1)
    assert difficulty.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert difficulty.rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)  # 1 - 6 * 4 / (5 * 24)


def test_the_difficulty_table(tmp_path):
    for number, (env_id, algorithm, won) in enumerate(
        [
            ("2s3z", "qmix", 0.9),
            ("2s3z", "qmix", 0.8),
            ("corridor", "qmix", 0.1),
            ("MMM2", "qmix", 0.5),
            ("3m", "iql", 1),
        ]
    ):
        (tmp_path / f"{number}").mkdir()
        results = {"env_id": env_id, "algorithm": algorithm, "final": {"win_rate": won}}
        (tmp_path / f"{number}" / "results.json").write_text(json.dumps(results))
    (tmp_path / "unfinished").mkdir()
    command = [sys.executable, ROOT / "benchmarks" / "difficulty.py", *sorted(tmp_path.iterdir())]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = {line.split(" | ")[0].strip("| "): line for line in output.splitlines() if line.startswith("| ")}
    assert set(rows) == {"map", "2s3z", "MMM2", "corridor"}
    assert rows["2s3z"].rstrip().endswith("85 | 99 |") and rows["corridor"].rstrip().endswith("10 | 1 |")
    assert "rank correlation, qmix: 1.00 (3 figures)" in output


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

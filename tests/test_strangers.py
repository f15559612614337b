"""strangers.py: held-out sets with their bounds; and scores between bounds in evaluate.py."""

import json
import sys
from pathlib import Path

import pytest

import envs
import evaluate
import strangers
from envs import results

MANIFEST = {"measure": "return", "strangers": [{"policy": "NS", "lower": 1.0, "upper": 3.0},
                                               {"policy": "run", "lower": -2.0, "upper": 2.0}]}  # fmt: skip


@pytest.mark.parametrize("name", strangers.STAGES)
def test_stages_name_policies_that_are_there_and_nobody_twice(name):
    stage = strangers.STAGES[name]
    env = envs.make(stage.env_id)
    pool = () if isinstance(stage.pool, int) else stage.pool
    assert set(pool) | set(stage.scripted) <= set(env.policies) and not set(pool) & set(stage.scripted)
    plan = strangers.make_plan(strangers.Args(name, runs=2, timesteps=1000, episodes=8))
    assert len(plan.strangers) == len(plan.responses) == len(plan.upper) == len(stage.scripted) + 2 * len(stage.learned)
    names = [job.name for job in plan.jobs]
    assert len(set(names)) == len(names)


def test_scores_lie_between_the_bounds(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    bounds = results.read_bounds(tmp_path / "manifest.json")
    assert bounds == {"NS": ("return", 1.0, 3.0), str(tmp_path / "run"): ("return", -2.0, 2.0)}
    row = {"ego": "a", "adapted": 0, "group": "homologue", "episodes": 8}
    rows = [
        {**row, "other": "NS", "return": 2.5}, {**row, "other": str(tmp_path / "run"), "return": -1.0},
        {**row, "other": "NH", "return": 7.0}, {**row, "other": "RAND", "return": 1.0},
        {**row, "other": "all", "return": 2.8},
        {**row, "group": "non-homologue", "other": "mixed", "return": 1.0},
    ]  # fmt: skip
    results.normalise(rows, bounds | {"RAND": ("return", 2.0, 2.0)})
    assert [row.get("normalised") for row in rows] == [0.75, 0.25, None, None, 0.5, None]
    half = 12.706 * 0.25  # Student's t of two
    assert [rows[4]["normalised_low"], rows[4]["normalised_high"]] == pytest.approx([0.5 - half, 0.5 + half])


@pytest.mark.parametrize("content", ["", "[]", '{"strangers": [{}]}', '{"strangers": 3, "measure": "return"}'])
def test_other_files_are_rejected(content, tmp_path):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match="is not a manifest of strangers"):
        results.read_bounds(tmp_path / "manifest.json")


@pytest.mark.slow
def test_a_set_is_made_and_used(tmp_path, monkeypatch, capsys):
    stage = strangers.Stage("stag_hunt_4x4", ("NS",), ("NH",), ("iql",))
    monkeypatch.setitem(strangers.STAGES, "stag-hunt", stage)
    monkeypatch.setattr(sys, "argv", ["strangers.py", "--stage", "stag-hunt", "--quick", "--out", str(tmp_path)])
    assert strangers.main() == 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    scripted, learned = manifest["strangers"]
    assert (scripted["policy"], manifest["measure"], manifest["pool"]) == ("NH", "return", ["NS"])
    assert (tmp_path / learned["policy"] / "checkpoint.pt").exists() and (tmp_path / learned["response"]).is_dir()
    assert strangers.main() == 0 and "6 of 6 runs are done already" in capsys.readouterr().out
    scripted |= {"lower": -1.0, "upper": 4.0}  # so short a run may be worse than random
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    ego = str(tmp_path / scripted["response"])
    evaluate.main(evaluate.Args((ego,), bounds=tmp_path / "manifest.json", episodes=8, out=tmp_path / "test"))
    rows = json.loads((tmp_path / "test" / "results.json").read_text())["rows"]
    found = {Path(row["other"]).name: row for row in rows}
    assert found["NH"]["normalised"] == pytest.approx((found["NH"]["return"] + 1) / 5)
    assert "normalised" in found["all"] and "normalised" not in found["mixed"]

"""strangers.py: held-out sets with their bounds; scores between bounds; and compare.py, all methods on its stages."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tyro
from helpers import write_run
from PIL import Image

import envs
from experiments import compare, evaluate, results, strangers
from experiments.jobs import Evaluation

MANIFEST = {
    "env_id": "stag_hunt_4x4", "matches_per_partner": 5, "measure": "return",
    "strangers": [{"policy": "NS", "lower": 1.0, "upper": 3.0}, {"policy": "run", "lower": -2.0, "upper": 2.0}],
}  # fmt: skip


@pytest.mark.parametrize("name", strangers.STAGES)
def test_stages_name_policies_that_are_there_and_nobody_twice(name):
    stage = strangers.STAGES[name]
    env = envs.make(stage.env_id)
    assert stage.env_id == envs.with_last_actions(stage.env_id)  # every method is shown what the others do
    pool = () if isinstance(stage.pool, int) else stage.pool
    assert set(pool) | set(stage.scripted) <= set(env.policies) and not set(pool) & set(stage.scripted)
    plan = strangers.make_plan(strangers.Args(name, runs=2, responses=3, timesteps=1000, episodes=8))
    assert len(plan.strangers) == len(plan.responses) == len(stage.scripted) + 2 * len(stage.learned)
    assert all([job.seed for job in jobs] == [1, 2, 3] for jobs in plan.responses)
    names = [job.name for job in plan.jobs]
    assert len(set(names)) == len(names)


def test_scores_lie_between_the_bounds(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    bounds, stage = results.read_bounds(tmp_path / "manifest.json")
    assert stage == {"env_id": "stag_hunt_4x4", "matches_per_partner": 5} and bounds == {
        "NS": ("return", 1.0, 3.0),
        str(tmp_path / "run"): ("return", -2.0, 2.0),
    }
    row = {"ego": "a", "adapted": 0, "group": "homologue", "episodes": 8}
    rows = [
        {**row, "other": "NS", "return": 2.5}, {**row, "other": str(tmp_path / "run"), "return": -1.0},
        {**row, "other": "NH", "return": 7.0}, {**row, "other": "RAND", "return": 1.0},
        {**row, "other": "all", "return": 2.8},
        {**row, "group": "non-homologue", "other": "mixed", "return": 1.0},
    ]  # fmt: skip
    other_form = str(tmp_path / "run" / ".." / "run")
    rows[1]["other"] = other_form  # of the same folder
    results.normalise(rows, bounds | {"RAND": ("return", 1.95, 2.0)})  # within 3%
    assert [row.get("normalised") for row in rows] == [0.75, 0.25, None, None, 0.5, None]
    half = 12.706 * 0.25  # Student's t of two
    assert [rows[4]["normalised_low"], rows[4]["normalised_high"]] == pytest.approx([0.5 - half, 0.5 + half])


def test_scales_span_three_points_of_the_win_rate_or_3_percent_of_a_return():
    assert [results.has_headroom("win_rate", 0.0, upper) for upper in (0.02, 0.04)] == [False, True]
    assert [results.has_headroom("return", lower, -100.0) for lower in (-99.0, -102.0, -104.0)] == [False, False, True]


@pytest.mark.parametrize("content", ["", "[]", '{"strangers": [{}]}', '{"strangers": 3, "measure": "return"}'])
def test_other_files_are_rejected(content, tmp_path):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match="is not a manifest of strangers"):
        results.read_bounds(tmp_path / "manifest.json")


@pytest.mark.slow
def test_a_set_is_made_and_used(tmp_path, monkeypatch, capsys):
    stage = strangers.Stage("stag_hunt_4x4", ("NS",), ("NH",), ("iql",), matches_per_partner=2)
    monkeypatch.setitem(strangers.STAGES, "stag-hunt", stage)
    monkeypatch.setattr(sys, "argv", ["strangers.py", "--stage", "stag-hunt", "--quick", "--out", str(tmp_path)])
    assert strangers.main() == 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    scripted, learned = manifest["strangers"]
    assert (scripted["policy"], manifest["measure"], manifest["pool"]) == ("NH", "return", ["NS"])
    assert (tmp_path / learned["policy"] / "checkpoint.pt").exists() and (tmp_path / learned["response"]).is_dir()
    assert strangers.main() == 0 and "4 of 4 runs are done already" in capsys.readouterr().out
    again = learned["policy"].rpartition("__")[0] + "__9999999999"  # as if it was deleted and made again
    (tmp_path / learned["policy"]).rename(tmp_path / again)
    assert strangers.main() == 0 and "3 of 4 runs are done already" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    scripted, renamed = manifest["strangers"]
    assert renamed == learned | {"policy": again}  # the same run has the same bounds
    scripted |= {"lower": -1.0, "upper": 4.0}  # so short a run may be worse than random
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    ego = str(tmp_path / scripted["response"])
    evaluate.main(evaluate.Args((ego,), bounds=tmp_path / "manifest.json", episodes=8, out=tmp_path / "test"))
    found = json.loads((tmp_path / "test" / "results.json").read_text())
    assert found["args"]["matches_per_partner"] == stage.matches_per_partner == 2
    with pytest.raises(ValueError, match=r"manifest\.json are of stag_hunt_4x4, not of matrix_stag$"):
        evaluate.main(evaluate.Args(("random",), ("tft",), bounds=tmp_path / "manifest.json", env_id="matrix_stag"))
    rows = found["rows"]
    found = {Path(row["other"]).name: row for row in rows}
    assert found["NH"]["normalised"] == pytest.approx((found["NH"]["return"] + 1) / 5)
    assert "normalised" in found["all"] and "normalised" not in found["mixed"]


# ---- the comparison of methods on stages ----
def test_a_comparison_is_fair():
    args = compare.Args(stage=("all",))
    compare.set_sizes(args)
    plans = [compare.make_plan(args, name) for name in compare.stages_of(args)]
    names = [job.name for plan in plans for job in plan.jobs]
    assert len(set(names)) == len(names) and [plan.stage for plan in plans] == list(strangers.STAGES)
    for plan in plans:
        assert plan.learners.keys() - plan.tests.keys() == {"oracle"}
        for method, jobs in plan.learners.items():
            assert [job.seed for job in jobs] == [1, 2, 3, 4, 5]
            options = compare.methods_of(strangers.STAGES[plan.stage])[method][1:]
            script = importlib.import_module(compare.methods_of(strangers.STAGES[plan.stage])[method][0])
            compare.tyro.cli(
                script.Args, args=["--env-id", plan.held_out.lower.env_id, *options]
            )  # it has such options
            words = [word for word in jobs[0].arguments if word not in options]
            assert words == list(plan.learners["IQL"][0].arguments)  # the same steps, matches, team and pool for all
            assert not set(plan.held_out.strangers) & set(jobs[0].arguments)
        for method, job in plan.tests.items():
            egos = plan.held_out.pool if method == compare.POOL else plan.learners[method]
            words = [*egos, "--others", *plan.held_out.strangers]
            assert words == list(job.arguments)[1 : 1 + len(words)]
        for method, job in plan.known.items():
            words = [*plan.learners[method], "--others", *plan.held_out.pool]
            assert words == list(job.arguments)[1 : 1 + len(words)] and "--teammate-epsilon" not in job.arguments


def test_intervals_of_shares_cover_the_truth():
    """Of five seeds each, whose spread is a third of the headroom; also of the difference to another method."""
    rng, truth, covered = np.random.default_rng(0), (1.6, 1.0, 2.0), np.zeros(2)
    for _ in range(2000):
        method, base, oracle = (rng.normal(mean, 0.3, 5) for mean in truth)
        low, high = compare.share(method, base, oracle)[1]
        below, above = compare.difference(method, base)[1]
        covered += (low <= 0.6 <= high, below <= 0.6 <= above)
    assert (covered / 2000 > 0.93).all() and (covered / 2000 < 0.99).all()
    assert compare.share([3.0], [1.0], [5.0]) == (0.5, [0.5, 0.5])


def pretend(plan, root):
    """As if every job of a stage were done: IQL wins 0.2, the oracle 0.8, others more by their place in the list.

    The second response to every stranger is the best. Random play wins nine matches of ten, and earns nothing.
    """
    for job in plan.held_out.jobs:
        folder = root / (job.name if isinstance(job, Evaluation) else f"{job.name}__1")
        rows = [{"ego": "random", "other": one if isinstance(one, str) else f"{one.name}__1", "group": "homologue",
                 "episodes": 8, "win_rate": 0.9, "return": 0.0} for one in plan.held_out.strangers]  # fmt: skip
        rows = rows if isinstance(job, Evaluation) else None
        write_results(folder, 1.0 if job.seed == 2 else 0.95, rows, job.needs)
    pool = {compare.POOL: plan.held_out.pool} if compare.POOL in plan.tests else {}
    for number, (method, jobs) in enumerate((plan.learners | pool).items()):
        for job in jobs if method in plan.learners else ():
            score = 0.8 if method == "oracle" else 0.2 + 0.1 * number
            write_results(root / f"{job.name}__1", score + 0.02 * job.seed)
        if method in plan.tests:
            others = (
                f"elsewhere/{one}" if isinstance(one, str) else f"{one.name}__1" for one in plan.held_out.strangers
            )
            rows = [{"ego": f"{job.name}__1", "other": other, "group": "homologue", **found(method, k, job.seed)}
                    for k, other in enumerate((*others, "all")) for job in jobs]  # fmt: skip
            write_results(root / plan.tests[method].name, 0.0, rows, plan.tests[method].needs)
        if method in plan.known:
            rows = [{"ego": f"{job.name}__1", "other": "all", "group": "homologue", "episodes": 8, "win_rate": 0.0,
                     "return": 0.5 + 0.02 * job.seed} for job in jobs]  # fmt: skip
            write_results(root / plan.known[method].name, 0.0, rows, plan.known[method].needs)


def found(method, stranger, seed):
    """What a method has with a stranger. Belief earns 1.5 with the first, where the best response has 1."""
    if method == "MIX":  # no match of its could be played
        return {"episodes": 0}
    score = 0.4 + 0.05 * stranger + 0.02 * (seed * stranger % 3)
    return {"episodes": 8, "win_rate": score, "return": 1.5 if (method, stranger) == (compare.OURS, 0) else score}


def write_results(folder, score, rows=None, played=()):
    final = {"win_rate": score, "episodic_return": score}
    args = {"ego": [f"{run.name}__1" for run in played], "others": []}
    args |= {"pretrain_timesteps": 2_000_000} if "__omg" in folder.name else {}
    content = {"args": args, "versions": {"python": "3"}, "seconds": 1.0}
    content |= {"final": final, "best": final, "evals": [{"steps": step, **final} for step in (1, 2)]}
    content |= {"encounter": {"return_1": score, "return_2": score + 1, "return_3": score + 2}}
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(content if rows is None else {**content, "rows": rows}))


@pytest.mark.slow
def test_a_picture_of_a_belief(tmp_path):
    env = envs.make("stag_hunt_4x4")
    write_run(tmp_path / "other", "iql", env)
    options = {"team": "3other1learner", "pool": ("NS", "other")}  # a run beside it, by its name
    run = write_run(tmp_path / "run", "belief_iql", env, **options)
    compare.draw_belief(run, tmp_path / "belief.png", matches=1, moments=3)
    with Image.open(tmp_path / "belief.png") as picture:
        assert picture.width == 780 and len(picture.convert("RGB").getcolors(10**6)) > 100


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_the_report_of_a_comparison(tmp_path, monkeypatch, capsys):
    words = ["compare.py", "--stage", "kuhn", "8m", "--seeds", "2", "--out", str(tmp_path)]
    args = tyro.cli(compare.Args, args=words[1:])
    compare.set_sizes(args)
    for name in args.stage:
        pretend(compare.make_plan(args, name), tmp_path)
    monkeypatch.setattr(sys, "argv", words)
    assert compare.main() == 0
    text, report = (tmp_path / "report.md").read_text(), json.loads((tmp_path / "report.json").read_text())
    assert text in capsys.readouterr().out and (tmp_path / "curves.png").exists()
    with Image.open(tmp_path / "headroom.png") as picture:
        assert picture.width > 300
    stage, battle = report["stages"]
    assert compare.POOL not in stage["unseen"] and np.shape(battle["unseen_scores"][compare.POOL]) == (4, 9)
    assert stage["headroom"][0] == pytest.approx(0.6) and stage["exists"]
    shares = {method: share for method, (share, _) in stage["share"].items()}
    erring, erring_too = compare.WITH_ERRORS
    *methods, oracle = (method for method in shares if method not in compare.WITH_ERRORS | compare.WITH_MEMORY)
    assert (methods, oracle) == (list(compare.METHODS)[:-1], "oracle") and compare.WITH_MEMORY.keys() <= shares.keys()
    kept = [f"{name}, memory kept" for name in ("IQL", "LIAM", "naive OM", "MIX", "OMG, no subgoals")]
    assert not compare.WITH_ERRORS.keys() & stage["matches"].keys()
    assert [shares[erring], shares[erring_too]] == pytest.approx([0.5, 0.5])  # without errors, not as in their runs
    assert list(shares.values())[:7] == pytest.approx([k / 6 for k in range(7)]) and shares[oracle] == 1
    places = list(compare.methods_of(strangers.STAGES["kuhn"]))
    assert [shares[m] for m in kept] == pytest.approx([((0.23 + 0.1 * places.index(m)) / 5 - 0.23) / 0.6 for m in kept])
    assert stage["ahead"]["OMG"][0] == pytest.approx(0.2)
    first = stage["strangers"][0]
    assert (first["lower"], first["upper"], first["best_response"]) == (0.0, 1.5, 1.0)  # of a method; of three runs
    assert sorted(first["responses"]) == [0.95, 0.95, 1.0] and [s["upper"] for s in stage["strangers"][1:]] == [1.0] * 5
    raw = {m: np.array([[found(m, k, seed)["return"] for k in range(6)] for seed in (1, 2)]) for m in ("IQL", "belief")}
    scores = {m: table / [1.5, 1, 1, 1, 1, 1] for m, table in raw.items()}
    assert np.allclose(stage["unseen"]["belief"], scores["belief"])
    assert stage["matches"]["IQL"] == pytest.approx([0.23, 1.23, 2.23])
    assert "0.83 (" in text and "0.23, 1.73" in text and "are left out: none." in text
    stage["strangers"][0]["upper"] = battle["strangers"][0]["upper"] = 0.02  # above 0: too near for a win rate alone
    assert "are left out: 1 of 9 in 8m." in compare.text_of("", [stage, battle], 1.0)
    assert "Random play has more than every method in 8m (90.0%; the methods 62.0% to 62.0%)." in text
    assert "each), or a run of a method that has more: 1 of 6 in kuhn." in text
    for method, row in {"OMG": "2,000,000 | nothing", "belief": "0 | who the others are, while it learns"}.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {method} ") and ".py" in line)
        assert row in " ".join(line.split())
    part = text[text.index("## Scores with strangers") : text.index("## Matches with the same partners")]
    unseen, earned, ahead, gains = (
        [cell.strip() for cell in line.split("|")[2:-1]] for line in part.splitlines() if line.startswith("| kuhn")
    )
    columns = [*places[:-1], compare.POOL]
    assert earned.pop(0) == "0.00" and gains[0] == "+0.00 (+0.00 to +0.00)"
    for cells, tables in ((unseen, scores), (earned, raw)):
        expected = ["{:.2f} ({:.2f} to {:.2f})".format(t.mean(), *results.crossed_interval(t)) for t in tables.values()]
        assert [cells[columns.index(m)] for m in tables] == expected
        assert [m for m, cell in zip(columns, cells) if not cell] == [m for m in columns if m in ("MIX", compare.POOL)]
    gap = scores["belief"] - scores["IQL"]
    assert ahead[0] == "{:+.2f} ({:+.2f} to {:+.2f})".format(gap.mean(), *results.crossed_interval(gap))

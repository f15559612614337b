"""Cross-play: who meets whom, what is counted and written, adaptation, and what is rejected."""

import csv
import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import MODEL_SCRIPTS, TEAM_SCRIPTS, write_run
from PIL import Image

import envs
from experiments import evaluate
from training.episodes import Episodes, Inputs, load_player, load_runner

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs on 3m, one of them with a network for each seat and more units than the others."""
    folder, env = tmp_path_factory.mktemp("runs"), envs.make("3m")
    made = {name: write_run(folder / name, name, env, seed) for seed, name in enumerate(TEAM_SCRIPTS)}
    made["separate"] = write_run(folder / "separate", "iql", env, 7, share_parameters=False, hidden_dim=24)
    made["belief"] = write_run(folder / "belief", "belief_iql", env)
    made["brackets"] = write_run(folder / "iql[1]*", "iql", env, 7, share_parameters=False)
    return {name: str(path) for name, path in made.items()}


def arguments(tmp_path, ego, others, **options):
    options = {"episodes": 6, "num_envs": 64, "out": tmp_path / "out", **options}
    return evaluate.Args(ego=tuple(ego), others=tuple(others), **options)


def rows_of(args):
    """What an evaluation finds, without what it writes."""
    egos = evaluate.find(args.ego)
    others = len(evaluate.check_args(args, egos).pool)
    return [row for ego, saved in egos.items() for row in evaluate.evaluate(args, ego, saved, others)]


# ---- counting ----
class Actor:
    """A policy in every seat, without a team. `last_action` is what was done in all seats, also those of others."""

    def __init__(self, name, env):
        self.name, self.env, self.last_action = name, env, torch.full_like(env.actions, -1)
        self.seats = torch.arange(env.n_agents).repeat(env.num_envs, 1)
        self.player = None if name in env.policies else load_player(name, env, self.seats)

    @torch.no_grad()
    def act(self, obs, info):
        if self.player is None:
            return self.env.scripted_actions(self.name).clone()
        inputs = Inputs(obs, info["avail"], self.last_action, self.last_action, self.seats)
        return self.player.act(inputs, torch.zeros(()))


def play_alone(env, seats):
    """The policies' names by match and seat -> (returns, lengths, won), a round of one match after the other's."""
    actors = {name: Actor(name, env) for row in seats for name in row}
    (obs, info), over = env.reset(), [False] * len(seats)
    returns, lengths, won = [0.0] * len(seats), [0] * len(seats), [False] * len(seats)
    while not all(over):
        chosen, actions = {name: actor.act(obs, info) for name, actor in actors.items()}, torch.zeros_like(env.actions)
        for match, row in enumerate(seats):
            for seat, name in enumerate(row):
                actions[match, seat] = chosen[name][match, seat]
        obs, reward, terminated, truncated, info = env.step(actions)
        for actor in actors.values():
            actor.last_action = actions
        for match in range(len(seats)):
            if not over[match]:
                returns[match] += reward[match, 0].item()
                lengths[match] += 1
                over[match] = bool(terminated[match] or truncated[match])
                won[match] = bool(info["won"][match])
    return returns, lengths, won


@pytest.mark.parametrize(
    "ego", ["vdn", *(pytest.param(ego, marks=pytest.mark.slow) for ego in ("nearest", "separate"))]
)
def test_counts_are_those_of_a_plain_loop(runs, ego, tmp_path):
    """Three others, three matches with each, of which five are played at a time."""
    ego, others = runs.get(ego, ego), ["weakest", "nearest", runs["qmix"]]
    found = rows_of(arguments(tmp_path, [ego], others, episodes=3, num_envs=5))

    env = envs.make("3m", num_envs=5, seed=0, check=False)
    env.reset()
    team = evaluate.Schedule(env, SimpleNamespace(team="2other1ego", others=others, seed=0, matches_per_partner=1))
    expected = defaultdict(list)
    for first in range(0, 9, 5):
        matches = range(first, first + 5)
        seats = [[team.policy_names[team.pool[match % 3]]] * 3 for match in matches]
        for match, row in zip(matches, seats):
            row[(2 + match // 3) % 3] = ego
        for match, row, *facts in zip(matches, seats, *play_alone(env, seats)):
            if match < 9:
                (other,) = {*row} - {ego} or {ego}
                expected[other].append(facts)
                expected["all"].append(facts)
    team.begin("non-homologue")
    for first in range(0, 9, 5):
        team.draw()
        seats = [
            [ego if number < 0 else team.policy_names[number] for number in row] for row in team.policy_id.tolist()
        ]
        facts = [*zip(*play_alone(env, seats))]
        expected["mixed"] += facts[: 9 - first]

    assert {row["other"]: row["episodes"] for row in found} == {name: len(facts) for name, facts in expected.items()}
    assert sorted(row["episodes"] for row in found) == [3, 3, 3, 9, 9]
    for row in found:
        returns, lengths, won = map(np.array, zip(*expected[row["other"]]))
        assert row["wins"] == won.sum() and row["win_rate"] == won.mean()
        assert row["length"] == pytest.approx(lengths.mean(), abs=1e-9)
        assert row["return"] == pytest.approx(returns.mean(), abs=1e-4)
        assert row["return_std"] == pytest.approx(returns.std(ddof=1), abs=1e-3)
    if ego == "nearest":
        assert any(row["wins"] for row in found)


class FakeRunner:
    """Matches whose outcome tells who played; some of them are invalid."""

    def __init__(self, env, team, player):
        self.team, self.player = team, player

    def play(self):
        self.team.draw()
        other, match = torch.from_numpy(self.team.other), torch.from_numpy(self.team.match)
        returns = torch.stack((other + 1.0, other + 3.0), 1)  # two seats of the ego's
        return Episodes({}, returns, lengths=match + 1, won=match % 2 == 0, valid=match % 5 != 0)

    def returns_by_match(self):
        return {}


def test_a_match_counts_once_for_its_other_and_an_invalid_one_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "EpisodeRunner", FakeRunner)
    args = arguments(tmp_path, ["kite"], ["nearest", "kite", "hold"], episodes=100, num_envs=64, env_id="3m")
    rows = {row["other"]: row for row in rows_of(args)}
    for place, name in enumerate(("nearest", "kite", "hold")):
        matches = [match for match in range(306) if match % 3 == place and match % 5]
        assert rows[name]["episodes"] == len(matches) and rows[name]["return"] == place + 2
        assert rows[name]["wins"] == sum(match % 2 == 0 for match in matches)
        assert rows[name]["length"] == pytest.approx(np.mean(matches) + 1)
        assert rows[name]["return_low"] == rows[name]["return_high"] == place + 2
    assert rows["all"]["episodes"] == rows["mixed"]["episodes"] == sum(match % 5 > 0 for match in range(306))
    assert rows["all"]["wins"] == sum(rows[name]["wins"] for name in ("nearest", "kite", "hold"))
    half = 4.303 / 3**0.5  # over the three others: their returns are 2, 3 and 4
    assert [rows["all"]["return_low"], rows["all"]["return_high"]] == pytest.approx([3 - half, 3 + half])


# ---- who meets whom ----
@pytest.mark.parametrize("group", ["homologue", "non-homologue"])
@pytest.mark.parametrize(("text", "num_envs"), [("7other1ego", 23), ("6other2ego", 48), ("2other1ego5other", 5)])
def test_every_seat_and_every_other_equally_often(text, num_envs, group):
    policies = ("nearest", "weakest", "hold")
    team = evaluate.Schedule(
        envs.make("8m", num_envs=num_envs), SimpleNamespace(team=text, others=policies, seed=3, matches_per_partner=1)
    )  # fmt: skip
    team.begin(group)
    seats, times = Counter(), Counter()
    total = 3 * 8 * 10
    for _ in range(-(-total // num_envs)):
        team.draw()
        drawn = zip(team.match, team.other, team.learner_seats.tolist(), team.policy_id.tolist())
        for match, other, learner_seats, row in drawn:
            if match < total:
                names = [team.policy_names[number] for number in row if number >= 0]
                seats.update((names[0] if group == "homologue" else "mixed", seat) for seat in learner_seats)
                times.update(names)
                if group == "homologue":
                    assert {*names} == {policies[other]}
                else:
                    assert {*names} == {*policies}
    each = 10 * len(team.learner_seats[0])
    if group == "homologue":
        assert seats == {(name, seat): each for name in policies for seat in range(8)}
        assert len({*times.values()}) == 1
    else:
        assert seats == {("mixed", seat): 3 * each for seat in range(8)}
        assert max(times.values()) - min(times.values()) <= 2 * 7 * (total // num_envs + 1)  # rounds end within a block


def test_mixed_teams_are_of_different_others(runs):
    """With as many others as seats nobody plays twice in a team; and teams are not the same again and again."""
    names = ("nearest", "weakest", "kite", "hold")
    team = evaluate.Schedule(
        envs.make("3m", num_envs=120), SimpleNamespace(team="2other1ego", others=names, seed=0, matches_per_partner=1)
    )  # fmt: skip
    team.begin("non-homologue")
    team.draw()
    pairs = Counter(tuple(sorted(number for number in row if number >= 0)) for row in team.policy_id.tolist())
    assert len(pairs) == 6 and all(one != other for one, other in pairs) and max(pairs.values()) < 60
    assert Counter(team.policy_id[team.policy_id >= 0].tolist()) == dict.fromkeys(team.pool, 60)


def test_groups(runs, tmp_path):
    """Mixed teams where there is something to mix."""
    for others, options, groups in (
        (["nearest", "kite"], {}, ("homologue", "non-homologue")),
        (["nearest"], {}, ("homologue",)),
        (["nearest", "kite"], {"env_id": "3m", "n_agents": 2}, ("homologue",)),
        (["nearest", "kite"], {"groups": ("non-homologue",)}, ("non-homologue",)),
    ):
        args = arguments(tmp_path, ["weakest" if "n_agents" in options else runs["iql"]], others, **options)
        rows = rows_of(args)
        assert args.groups == groups == tuple(dict.fromkeys(row["group"] for row in rows))


def test_a_pool_of_policies_in_the_stag_hunt(tmp_path):
    args = arguments(tmp_path, ["NS", "NH"], ["RAND", "NS"], env_id="stag_hunt_4x4", episodes=4)
    rows = rows_of(args)
    assert [(row["ego"], row["other"]) for row in rows] == [
        (ego, other) for ego in ("NS", "NH") for other in ("RAND", "NS", "all", "mixed")
    ]
    assert all(
        row["algorithm"] == "scripted" and row["episodes"] == (4 if i % 4 < 2 else 8) for i, row in enumerate(rows)
    )
    assert {row["return"] for row in rows if row["ego"] == "NS"} != {
        row["return"] for row in rows if row["ego"] == "NH"
    }


# ---- intervals ----
def test_intervals_are_those_of_the_closed_form():
    z = 1.959964
    for wins, episodes in ((0, 7), (7, 7), (3, 11), (640, 1000)):
        row = evaluate.results.match_summary((episodes, wins, 0.0, 0.0, 0.0), [])
        share = wins / episodes
        for bound in (row["win_rate_low"], row["win_rate_high"]):  # where the share is just not to be rejected
            assert (share - bound) ** 2 == pytest.approx(z**2 * bound * (1 - bound) / episodes, abs=1e-12)
        assert row["win_rate_low"] <= share <= row["win_rate_high"]
    values = np.array([1.0, 2.0, 4.0, 9.0])
    row = evaluate.results.match_summary(
        (4, 1, values.sum(), (values**2).sum(), 40), [{"accuracy": 0.5}, {"accuracy": 0.7, "once": 0.3}]
    )
    half = z * values.std(ddof=1) / 2
    assert (row["return"], row["length"]) == (4.0, 10.0)
    assert [row["return_low"], row["return_high"]] == pytest.approx([4 - half, 4 + half])
    assert [row["accuracy_low"], row["accuracy_high"]] == pytest.approx([0.6 - 1.2706, 0.6 + 1.2706], abs=1e-3)
    assert row["once"] == 0.3 and "once_low" not in row
    assert evaluate.results.match_summary((0, 0, 0.0, 0.0, 0.0), []) == {"episodes": 0, "wins": 0}


# ---- opponent models ----
class Analysed:
    """A player with metrics: whom it met. It records the number of each match, and env.reset was called before."""

    fields = ("number",)

    def __init__(self, runner, sizes):
        self.runner, self.sizes, self.reset = runner, sizes, runner.player.reset
        self.outputs = {"number": torch.arange(runner.env.num_envs).unsqueeze(1)}
        self.act = runner.player.act

    def analyse(self, episodes):
        number, team = episodes["number"][0, :, 0], self.runner.team
        assert (episodes["policy_id"] == team.policy_id[number]).all()
        assert (episodes["seat"][0] == team.learner_seats[number]).all()
        assert (episodes["lengths"] == self.runner.lengths[number]).all()
        assert len(episodes["number"]) == episodes["lengths"].max() + 1
        self.sizes.append(len(number))
        others = episodes["policy_id"][episodes["policy_id"] >= 0]
        return {"policy": others.float().mean().item(), "different": len(others.unique()) + 0.0}


@pytest.mark.slow
def test_metrics_of_a_model_are_measured_other_by_other(runs, tmp_path, monkeypatch):
    sizes = []

    def load_analysed(run, env, team):
        player = Analysed(load_runner(run, env, team), sizes)
        player.runner = evaluate.EpisodeRunner(env, team, player, player.fields)
        return player.runner

    def arguments_of(**options):
        return arguments(tmp_path, [runs["iql"]], ["nearest", "weakest"], **options)

    plain_rows = rows_of(arguments_of(episodes=300, num_envs=400))
    monkeypatch.setattr(evaluate, "load_runner", load_analysed)
    rows = {row["other"]: row for row in rows_of(arguments_of(episodes=300, num_envs=400))}
    for plain in plain_rows:
        same = ("episodes", "wins", "return", "length")  # the same network in the same matches
        assert [plain[key] for key in same] == [rows[plain["other"]][key] for key in same]
        assert "policy" not in plain
    assert rows["nearest"]["policy"] == 0 and rows["weakest"]["policy"] == 1
    assert rows["all"]["policy"] == rows["mixed"]["policy"] == pytest.approx(0.5)
    assert [rows[name]["different"] for name in ("nearest", "weakest", "all", "mixed")] == [1, 1, 2, 2]
    assert rows["all"]["policy_low"] <= 0.5 <= rows["all"]["policy_high"]
    assert {*sizes} == {64} and len(sizes) == 4 * 4  # only full selections
    sizes.clear()
    rows_of(arguments_of(episodes=30, num_envs=12))
    assert sorted(sizes) == [6] * 2 * 4 + [12] * 2 * 4  # small rounds: one of each


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_SCRIPTS)
def test_scripts_with_a_model(runs, name, tmp_path):
    """As egos with their metrics and a picture, and as others."""
    ego = str(write_run(tmp_path / name, name, envs.make("3m"), 3))
    args = arguments(tmp_path, [ego], ["nearest", runs["qmix"], ego], video=True)
    evaluate.main(args)
    rows = json.loads((args.out / "results.json").read_text())["rows"]
    assert [row["other"] for row in rows] == ["nearest", runs["qmix"], ego, "all", "mixed"]
    wanted, use = "hit_ratio" if name == "omg_iql" else "action_accuracy", {"swap_same", "swap_other"}
    assert all(row["algorithm"] == name and wanted in row and use & row.keys() and row["episodes"] > 0 for row in rows)
    with Image.open(args.out / "match.gif") as video:
        assert video.n_frames > 1


# ---- what is written ----
def test_files_and_table_have_the_same_numbers(runs, tmp_path, capsys):
    args = arguments(tmp_path, [runs["iql"], "weakest"], [runs["vdn"], "nearest"], video=True)
    evaluate.main(args)
    results = json.loads((args.out / "results.json").read_text())
    with open(args.out / "results.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(results["rows"]) == len(table) == 2 * 4
    for row, line in zip(results["rows"], table):
        assert {key: str(value) for key, value in row.items()} == {key: text for key, text in line.items() if text}
    printed = capsys.readouterr().out.splitlines()[2:]  # after a line for each ego that is done
    assert len(printed) == 1 + 8 + 1
    for row, line in zip(results["rows"], printed[1:]):
        assert line.startswith(Path(row["ego"]).name) and row["group"] in line
        assert f"{row['win_rate']:.1%}  " in line and f"{row['return_low']:.2f} to {row['return_high']:.2f}" in line
    assert results["args"]["episodes"] == 6 and results["args"]["env_id"] == "3m"
    for picture in ("heatmap.png", "match.gif"):
        with Image.open(args.out / picture) as image:
            assert min(image.size) > 100


def test_files_are_moved_into_place(runs, tmp_path, monkeypatch):
    """results.json is the last of them: it says that all are there."""
    names, replace = [], os.replace

    def note(source, target):
        if Path(target).parent == tmp_path / "out":  # Numba's cache has files of its own
            names.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", note)
    args = arguments(tmp_path, ["nearest"], ["kite"], env_id="3m", episodes=3, video=True)
    evaluate.main(args)
    assert (
        sorted({*names}) == sorted(os.listdir(args.out)) == ["heatmap.png", "match.gif", "results.csv", "results.json"]
    )
    assert names[0] == "results.csv" and names[-1] == "results.json"  # what was found is there before any picture


@pytest.mark.slow
def test_the_same_command_finds_the_same(runs, tmp_path):
    found = [rows_of(arguments(tmp_path, [runs["iql"]], ["nearest", runs["vdn"]])) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0] != rows_of(arguments(tmp_path, [runs["iql"]], ["nearest", runs["vdn"]], seed=1))


def test_patterns_name_many(runs, tmp_path):
    folder = Path(runs["iql"]).parent
    rows = rows_of(arguments(tmp_path, [f"{folder}/*"], [f"{folder}/[vq]*"], episodes=3, groups=("homologue",)))
    assert {row["ego"] for row in rows} == {*runs.values()}
    assert {row["other"] for row in rows} == {runs["vdn"], runs["qmix"], runs["qtran"], "all"}


def test_of_many_rows_the_table_has_the_sums():
    row = {"algorithm": "iql", "adapted": 0, **evaluate.results.match_summary((10, 5, 20.0, 50.0, 100), [])}
    rows = [{**row, "ego": "a", "group": "homologue", "other": f"b{i}"} for i in range(70)]
    rows += [{**row, "ego": "a", "group": "homologue", "other": "all"}]
    assert len(evaluate.table(rows).splitlines()) == 2


@pytest.mark.slow
# ---- adaptation ----
def test_an_ego_continues_to_learn_among_the_others(runs, tmp_path, capfd):
    args = arguments(tmp_path, [runs["qmix"], "nearest"], ["weakest", runs["iql"]], episodes=3, adapt=200)
    evaluate.main(args)
    results = json.loads((args.out / "results.json").read_text())
    assert [(row["ego"], row["adapted"]) for row in results["rows"]] == [
        (ego, steps) for ego, steps in ((runs["qmix"], 0), (runs["qmix"], 200), ("nearest", 0)) for _ in range(4)
    ]
    (run,) = (args.out / "runs").iterdir()
    assert results["adapted"] == {runs["qmix"]: str(run)}
    learned = json.loads((run / "results.json").read_text())
    settings = learned["args"]
    assert learned["algorithm"] == "qmix", "its own script"
    assert learned["updates"] > 0 and settings["train_frequency"] == 100  # not the ego's
    assert (settings["init"], settings["team"], settings["pool"]) == (runs["qmix"], "2other1learner", [*args.others])
    assert (settings["start_e"], settings["end_e"], settings["hidden_dim"]) == (0.05, 0.05, 16)
    with open(args.out / "adaptation.csv", newline="") as file:
        curve = list(csv.DictReader(file))
    assert [int(point["steps"]) for point in curve] == [point["steps"] for point in learned["evals"]]
    assert (args.out / "adaptation.png").exists() and "after 200 steps" in capfd.readouterr().out


def test_an_adaptation_that_fails_says_so(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.subprocess, "run", lambda command, check: SimpleNamespace(returncode=3))
    args = arguments(tmp_path, [runs["iql"]], ["weakest"], episodes=3, adapt=200)
    with pytest.raises(SystemExit, match=r"--adapt: .*iql\.py failed for .*--init"):
        evaluate.main(args)


@pytest.mark.slow
def test_the_real_game(tmp_path, real_game):
    """It is played to its end, and closed."""
    env = envs.make("sc2/3m")
    ego, *others = (str(write_run(tmp_path / name, name, env, 1)) for name in TEAM_SCRIPTS)
    env.close()
    args = arguments(tmp_path, [ego], others, episodes=3, num_envs=2)
    rows = rows_of(args)
    played = 3 * len(others)
    assert [row["episodes"] for row in rows] == [*[3] * len(others), played, played] and all(
        row["length"] > 0 for row in rows
    )


# ---- what is rejected ----
@pytest.mark.parametrize(
    "changes",
    [
        {"exp_name": "a/../../../b"}, {"exp_name": "/a"}, {"exp_name": "a/b"}, {"exp_name": ".."}, {"exp_name": 3},
        {"exp_name": "--run-root=."}, {"hidden_dim": ["16", "--run-root", "."]}, {"optimizer": "--run-root=."},
    ],
)  # fmt: skip
def test_arguments_of_a_run_do_not_lead_out_of_the_folder(runs, changes, tmp_path):
    ego = tmp_path / "ego"
    saved = torch.load(Path(runs["iql"]) / "checkpoint.pt", weights_only=True)
    saved["args"] |= changes
    ego.mkdir()
    torch.save(saved, ego / "checkpoint.pt")
    with pytest.raises(ValueError, match=f"ego.*{next(iter(changes))} is ") as error:
        evaluate.main(arguments(tmp_path, [str(ego)], ["kite"], adapt=10))
    assert "\n" not in str(error.value) and os.listdir(tmp_path) == ["ego"], "nothing is written anywhere"


@pytest.mark.parametrize(
    ("ego", "others", "options", "message"),
    [
        ([], ["kite"], {"env_id": "3m"}, "--ego and --others name somebody"),
        (["kite"], [], {"env_id": "3m"}, "--ego and --others name somebody"),
        (["nearest"], ["kite"], {}, "--env-id says what scripted policies are to play"),
        (["nowhere/*"], ["kite"], {"env_id": "3m"}, r"--ego nowhere/\*: no run .* scripted policies are nearest, "),
        (["iql"], ["nowhere/*"], {}, "no run with a checkpoint.pt at nowhere"),
        (["iql"], ["kite"], {"env_id": "8m"}, r"iql is of 3m \{'n_agents': 3, .*; this is 8m \{'n_agents': 8, "),
        (["iql"], ["kite"], {"n_agents": 2}, r"'n_agents': 3, .*; this is 3m \{'n_agents': 2, "),
        (["kite"], ["iql"], {"env_id": "8m"}, "iql is of 3m .*; this is 8m "),
        (["iql", "iql"], ["kite"], {}, "iql is named more than once"),
        (["iql"], ["kite"], {"team": "3ego"}, "team '3ego' has no seat for the others: name one of them other"),
        (["iql"], ["kite"], {"team": "3other"}, "no seat for the learner: name one of them ego"),
        (["iql"], ["kite"], {"team": "3other1ego"}, "has 4 seats, but 3m has 3"),
        (["iql"], ["kite"], {"episodes": 0}, "--episodes is above 0, not 0"),
        (["iql"], ["kite"], {"num_envs": 0}, "--num-envs is above 0, not 0"),
        (["iql"], ["kite"], {"adapt": -1}, "--adapt is above 0, not -1"),
        (["separate"], ["kite"], {"adapt": 10}, "separate has a network for each seat"),
        (["brackets"], ["kite"], {"adapt": 10}, "has a network for each seat"),
        (["belief"], ["kite"], {"adapt": 10}, "belief tells 2 policies apart, and there are 1 others"),
        (["iql"], ["kite"], {"groups": ("non-homologue",)}, "mixed teams need two others in two seats, not 1 in 2"),
        (["iql"], ["kite"], {"groups": ()}, "--groups is homologue, non-homologue or both"),
    ],
)
def test_invalid_arguments_are_rejected(runs, ego, others, options, message, tmp_path):
    ego, others = ([runs.get(name, name) for name in names] for names in (ego, others))
    with pytest.raises((ValueError, SystemExit), match=message):
        evaluate.main(arguments(tmp_path, ego, others, **options))
    assert not (tmp_path / "out").exists()

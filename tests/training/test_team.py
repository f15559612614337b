"""Team-mates: reading a team, drawing policies and seats, and runs in seats that are not the learner's."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import SCRIPTS, write_run

import envs
from training.checkpoints import env_sizes
from training.episodes import EpisodeRunner, Inputs, RandomPlayer, SeatSelection, load_player, load_runner
from training.stacked import can_stack
from training.team import PoolRun, RunPlayer, Team, read_pool

LEARNERS = ("omg", "iql_omg", "learner")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Runs on 8m: 2 of iql, one of them with a network for each seat, 1 of vdn, 3 of qmix."""
    folder, env = tmp_path_factory.mktemp("pool"), envs.make("8m")
    for name, runs in (("iql", 2), ("vdn", 1), ("qmix", 3)):
        for run in range(runs):
            write_run(folder / f"{name}_{run}", name, env, run + 10 * len(name), share_parameters=run != 1)
    return folder


def make(spec, num_envs=24, env_id="8m", **options):
    return Team(envs.make(env_id, num_envs=num_envs), spec, LEARNERS, **options)


def policies_of(team, match):
    """What plays each seat of a match: an algorithm, a scripted policy or the learner."""
    names = [team.policy_names[policy] if policy >= 0 else "learner" for policy in team.policy_id[match].tolist()]
    return [Path(name).name.split("_")[0] for name in names]


# ---- reading a team ----
@pytest.mark.parametrize(
    ("spec", "env_id", "expected"),
    [
        ("7qmix1omg", "8m", {"qmix": 7, "learner": 1}),
        ("7iql1iql_omg", "8m", {"iql": 7, "learner": 1}),
        ("4iql3qmix1omg", "8m", {"iql": 4, "qmix": 3, "learner": 1}),
        ("6qmix2omg", "8m", {"qmix": 6, "learner": 2}),
        ("7nearest1omg", "8m", {"nearest": 7, "learner": 1}),
        ("3NH1omg", "stag_hunt_4x4", {"NH": 3, "learner": 1}),
        ("1omg2NS1NH", "stag_hunt_4x4", {"NS": 2, "NH": 1, "learner": 1}),
        ("self", "8m", {"learner": 8}),
    ],
)
def test_a_team_has_the_seats_it_names(pool, spec, env_id, expected):
    team = make(spec, env_id=env_id, pool=[f"{pool}/*"] if env_id == "8m" and spec != "self" else ())
    for match in range(24):
        policies = policies_of(team, match)
        assert Counter(policies) == expected
        assert team.learner_seats[match].tolist() == [s for s, name in enumerate(policies) if name == "learner"]


def test_seats_are_in_the_order_of_the_spec_rotated():
    order = ["NS", "NS", "NH", "learner"]
    team = make("2NS1NH1omg", env_id="stag_hunt_4x4")
    rotations = [order[-shift:] + order[:-shift] for shift in range(4)]
    drawn = [policies_of(team, match) for match in range(24)]
    assert all(seats in rotations for seats in drawn) and all(rotation in drawn for rotation in rotations)


@pytest.mark.parametrize(
    ("env_id", "scripted"),
    [
        ("8m", {"nearest", "weakest"}),
        ("3s_vs_5z", {"nearest", "weakest", "kite"}),
        ("stag_hunt_4x4", {"RAND", "NS", "NH"}),
    ],
)
def test_without_a_spec_one_learner_is_among_the_scripted(env_id, scripted):
    team = make(None, env_id=env_id)
    assert set(team.env.policies) >= scripted
    drawn = [set(policies_of(team, match)) - {"learner"} for match in range(24)]
    assert all(len(names) == 1 for names in drawn) and set().union(*drawn) == scripted
    assert team.learner_seats.shape == (24, 1)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("6nearest1omg", {}, "has 7 seats, but 8m has 8"),
        ("7nearest2omg", {}, "has 9 seats, but 8m has 8"),
        ("7nearst1omg", {}, "no 'nearst' in the pool; known are omg, iql_omg, learner, .*nearest"),
        ("7qmix1omg", {}, "no 'qmix' in the pool"),
        ("7other1omg", {}, "no 'other' in the pool"),
        ("8nearest", {}, "no seat for the learner: name one of them omg or iql_omg or learner"),
        ("", {}, "has 0 seats, but 8m has 8"),
        ("nearest7omg1", {}, "numbers and names, such as 7qmix1omg"),
        ("7nearest 1omg", {}, "numbers and names"),
        ("7nearest-1omg", {}, "numbers and names"),
        ("8nearest0omg", {}, "numbers and names"),
        ("7nearest1omg", {"seat": "8"}, "rotate, random or a number from 0 to 7, not '8'"),
        ("7nearest1omg", {"seat": "-1"}, "from 0 to 7"),
        ("7nearest1omg", {"seat": "first"}, "from 0 to 7"),
        *((spec, {"pool": ["hold"]}, "try --team 7other1omg") for spec in (None, "self", "scripted")),
        ("7nearest1omg", {"pool": ["nowhere/*"]}, "no run with a checkpoint.pt at nowhere"),
    ],
)
def test_invalid_teams_are_rejected_with_a_valid_one(spec, options, message):
    with pytest.raises(ValueError, match=message):
        make(spec, **options)


def test_runs_of_another_map_or_size_are_rejected(tmp_path):
    write_run(tmp_path / "map", "iql", envs.make("3m"))
    write_run(tmp_path / "size", "iql", envs.make("8m", n_agents=5))
    same_sizes = "stag_hunt_4x4_2h2s"  # its sizes are those of stag_hunt_4x4
    write_run(tmp_path / "rules", "iql", envs.make(same_sizes))
    for folder, of in (("map", "is of 3m .*; this is 8m "), ("size", "'n_agents': 5.*; this is 8m .*'n_agents': 8")):
        with pytest.raises(ValueError, match=of):
            make("7iql1omg", pool=[tmp_path / folder])
    assert env_sizes(envs.make(same_sizes)) == env_sizes(envs.make("stag_hunt_4x4"))
    with pytest.raises(ValueError, match=f"is of {same_sizes} .*; this is stag_hunt_4x4 "):
        make("3iql1omg", env_id="stag_hunt_4x4", pool=[tmp_path / "rules"])


def test_runs_of_the_real_game_fit_its_simulation(tmp_path):
    write_run(tmp_path / "real", "iql", envs.make("8m"), env_id="sc2/8m")
    assert make("7iql1omg", pool=[tmp_path / "real"]).policy_names[-1] == str(tmp_path / "real")


def test_a_run_that_is_named_twice_is_rejected(pool):
    with pytest.raises(ValueError, match="iql_0 more than once"):
        make("7iql1omg", pool=[pool / "iql_0", f"{pool}/iql_*"])


# ---- drawing policies and seats ----
@pytest.mark.parametrize("spec", ["7nearest1omg", "6nearest2omg", "3kite1omg3nearest1omg"])
def test_rotation_gives_every_seat_equally_often(spec):
    team = make(spec, num_envs=16)
    times = torch.zeros(8, dtype=torch.long)
    for _ in range(3):
        team.draw()
        times += torch.bincount(team.learner_seats.flatten(), minlength=8)
    assert times.unique().tolist() == [3 * 16 * team.learner_seats.shape[1] // 8]


def test_rotation_with_fewer_matches_than_seats_takes_turns():
    team = make("7nearest1omg", num_envs=3)
    times = Counter()
    for _ in range(16):
        team.draw()
        times.update(team.learner_seats.flatten().tolist())
    assert times == dict.fromkeys(range(8), 6)


def test_a_seat_can_be_chosen_or_drawn_at_random():
    for seat in range(8):
        assert make("3kite2omg3nearest", seat=seat).learner_seats.tolist() == [sorted([seat, (seat + 1) % 8])] * 24
        assert make("7nearest1omg", seat=str(seat)).learner_seats.tolist() == [[seat]] * 24
    seats = make("7nearest1omg", num_envs=4000, seat="random").learner_seats.flatten()
    assert ((torch.bincount(seats, minlength=8) - 500).abs() < 120).all()


def test_one_run_plays_all_seats_of_a_group_and_all_runs_play_equally_often(pool):
    team = make("4iql3qmix1omg", pool=[f"{pool}/*"])
    for _ in range(3):
        team.draw()
        for algorithm, runs in (("iql", 2), ("qmix", 3)):
            policies = {p for p, name in enumerate(team.policy_names) if Path(name).name.startswith(algorithm)}
            drawn = [set(row) & policies for row in team.policy_id.tolist()]
            assert all(len(row) == 1 for row in drawn)
            assert Counter(row.pop() for row in drawn) == dict.fromkeys(policies, 24 // runs)


def test_mixed_seats_draw_their_own_run(pool):
    team = make("7qmix1omg", pool=[f"{pool}/qmix_*"], mix=True)
    for _ in range(3):
        team.draw()
        others = team.policy_id[team.policy_id >= 0]
        assert Counter(others.tolist()) == dict.fromkeys(others.unique().tolist(), 24 * 7 // 3)
        assert len(others.unique()) == 3
        assert any(len(set(row)) > 2 for row in team.policy_id.tolist())


@pytest.mark.parametrize("mix", [False, True])
def test_more_runs_than_matches_all_play_in_turn(pool, mix):
    team = make("7qmix1omg", num_envs=2, pool=[f"{pool}/qmix_*"], mix=mix)
    times = Counter()
    for _ in range(6):
        team.draw()
        times.update(team.policy_id[team.policy_id >= 0].tolist())
    assert set(times.values()) == {6 * 2 * 7 // 3}


@pytest.mark.parametrize(
    ("env_id", "spec", "num_envs", "count", "options", "counted", "equal"),
    [
        ("kuhn", "1other1omg", 128, 512, {"pool": [f"seen_{k}" for k in "abcdef"]}, 510, True),
        (
            "matrix_ipd",
            "1other1omg",
            20,
            100,
            {"pool": ["tft", "all_c", "all_d", "grim"], "matches_per_partner": 2},
            112,
            True,
        ),
        ("matrix_ipd", "1other1omg", 32, 70, {"pool": ["tft", "all_c", "all_d", "grim"], "seat": "random"}, 64, True),
        ("stag_hunt_4x4", "2other1NH1omg", 10, 50, {"pool": ["NS", "NH", "RAND"]}, 48, True),
        ("stag_hunt_4x4", "2other1NH1omg", 10, 16, {"pool": ["NS", "NH", "RAND"], "seat": 1}, 15, True),
        ("stag_hunt_4x4", "3other1omg", 10, 20, {"pool": ["NS", "NH", "RAND"]}, 18, False),  # of 12 a cycle
    ],
)
def test_an_evaluation_plays_with_everybody_from_every_seat_equally_often(
    env_id, spec, num_envs, count, options, counted, equal
):
    team, cells, rows = make(spec, num_envs, env_id, seed=3, **options), [], []
    runner = EpisodeRunner(team.env, team, RandomPlayer())
    play, away = runner.play, 2 if spec.startswith("2") else 1  # seats from the learner to the group that is drawn

    def watched():
        episodes, seat = play(), team.learner_seats
        other = team.policy_id.gather(1, (seat - away) % team.env.n_agents)
        cells.extend(zip(seat[:, 0].tolist(), other[:, 0].tolist()))
        rows.append(episodes.returns.clone())
        return episodes

    runner.play = watched
    for _ in range(2):  # the second begins somewhere in a cycle
        cells.clear()
        rows.clear()
        returns, *_ = runner.evaluate(count)
        assert len(returns) == counted
        number = (
            np.arange(len(cells)) // num_envs // team.matches_per_partner * num_envs + np.arange(len(cells)) % num_envs
        )
        taken = np.flatnonzero(number < counted // team.matches_per_partner)  # the first teams that are drawn
        assert (torch.cat(rows)[taken] == returns).all()
        times = Counter(cells[k] for k in taken)
        seats = 1 if env_id == "kuhn" or options.get("seat") == 1 else team.env.n_agents
        assert len(times) == seats * len(options["pool"])
        assert max(times.values()) - min(times.values()) == (0 if equal else 1)


def test_a_round_depends_on_its_seed_and_number_alone(pool):
    options = {"pool": [f"{pool}/*"], "mix": True, "seat": "random"}
    first, same, other = (make("4iql3qmix1omg", seed=seed, **options) for seed in (5, 5, 6))
    rounds = []
    for _ in range(4):
        torch.rand(3)
        for team in (first, same, other):
            team.draw()
        rounds.append(first.policy_id.clone())
        assert (first.policy_id == same.policy_id).all() and (first.learner_seats == same.learner_seats).all()
        assert (first.policy_id != other.policy_id).any()
    same.rounds = first.rounds - 2
    same.draw()
    assert (same.policy_id == rounds[2]).all() and (rounds[2] != rounds[3]).any()


def test_a_stand_in_leaves_no_seat_to_the_learner(pool):
    team = make("4iql2nearest2omg", pool=[f"{pool}/iql_*"], teammates_everywhere=True)
    team.env.reset(seed=0)
    last_action = torch.full_like(team.env.actions, -1)
    assert (team.policy_id >= 0).all() and team.learner_seats.shape == (24, 2)
    pretraining_team = team.policy_id.gather(1, team.learner_seats)
    runs = [policy for policy, name in enumerate(team.policy_names) if "iql_" in name]
    assert set(pretraining_team.flatten().tolist()) == {*runs, team.policy_names.index("nearest")}
    joint = team.joint_action(torch.zeros_like(team.learner_seats), last_action).clone()
    assert (team.joint_action(torch.full_like(team.learner_seats, 5), last_action) == joint).all()
    assert (make("self", teammates_everywhere=True).policy_id == -1).all()


def test_other_is_anybody_of_the_pool(pool):
    team = make("7other1omg", pool=["kite", f"{pool}/vdn_*", "hold", f"{pool}/qmix_*"], num_envs=24)
    names = ["kite", "hold", f"{pool}/vdn_0", *(f"{pool}/qmix_{run}" for run in range(3))]
    assert [team.policy_names[policy] for policy in team.pool] == names
    drawn = [{*row} - {-1} for row in team.policy_id.tolist()]
    assert all(len(row) == 1 for row in drawn)
    assert Counter(team.policy_names[row.pop()] for row in drawn) == dict.fromkeys(names, 4)


def test_seats_can_be_assigned_by_hand():
    team = make("2other1omg", env_id="3m", num_envs=6, pool=["nearest", "kite", "hold"])
    policies = [team.policy_names.index(name) for name in ("nearest", "kite", "hold")]
    team.assign(np.array([0, 1, 2, 0, 1, 2]), lambda seats, count: np.arange(6 * seats) % count)
    expected = [[0, 1, -1], [-1, 2, 0], [1, -1, 2], [0, 1, -1], [-1, 2, 0], [1, -1, 2]]
    assert team.policy_id.tolist() == [[policies[n] if n >= 0 else -1 for n in row] for row in expected]
    assert team.learner_seats.flatten().tolist() == [2, 0, 1, 2, 0, 1]


# ---- playing ----
def test_values_are_selected_and_actions_joined_by_seat():
    team = make("6kite2omg")
    env = team.env
    env.reset(seed=1)
    values = torch.arange(24 * 8 * 5).view(24, 8, 5)
    for match in range(24):
        for place, seat in enumerate(team.learner_seats[match].tolist()):
            assert (team.select(values)[match, place] == values[match, seat]).all()
    action = torch.arange(48).view(24, 2)
    joint = team.joint_action(action, torch.full_like(env.actions, -1))
    kite = env.scripted_actions("kite")
    for match in range(24):
        expected = kite[match].tolist()
        for place, seat in enumerate(team.learner_seats[match].tolist()):
            expected[seat] = int(action[match, place])
        assert joint[match].tolist() == expected


def test_a_team_of_learners_acts_as_they_choose():
    team = make("self")
    action = torch.randint(5, (24, 8))
    assert team.joint_action(action, action) is action and team.select(action) is action


def compare_with_scripts(team, rounds=3, steps=20):
    """Plays rounds in which every run must act as its script plays it alone, with only the match's own history."""
    env, generator = team.env, torch.Generator().manual_seed(0)
    alone = {
        policy: load_runner(path, env, Team(env, "self"))
        for policy, path in enumerate(team.policy_names)
        if policy >= len(env.policies)
    }
    actions = {policy: Counter() for policy in alone}
    for episode in range(rounds):
        team.draw()
        obs, info = env.reset(seed=episode)
        last_action = torch.full_like(env.actions, -1)
        for _ in range(steps):
            noise = torch.rand((env.num_envs, 1, env.n_actions), generator=generator)
            action = (noise * team.select(info["avail"])).argmax(-1)
            joint = team.joint_action(action, last_action).clone()
            assert (joint.gather(1, team.learner_seats) == action).all()
            nearest = env.scripted_actions("nearest").clone()
            assert (joint == nearest)[team.policy_id == env.policies.index("nearest")].all()
            for policy, runner in alone.items():
                expected, seats = runner.policy(obs, info), team.policy_id == policy
                assert (joint[seats] == expected[seats]).all()
                runner.last_action.copy_(joint)  # what was done in all seats, also those that it did not play
                actions[policy].update(joint[seats].tolist())
            obs, *_, info = env.step(joint)
            last_action = joint
    assert alone and all(taken.total() > 100 and len(taken) > 2 for taken in actions.values()), actions


@pytest.mark.parametrize("mix", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_stacked_runs_act_as_their_scripts_play_them(pool, mix):
    team = make("3iql1nearest2qmix1vdn1omg", num_envs=12, pool=[f"{pool}/*"], mix=mix, seed=3)
    assert not team.players and len(team.networks.slots) == 6
    assert team.networks.count == 4 + 2 * 8, "two runs have a network for each seat"
    compare_with_scripts(team)


@pytest.mark.parametrize("mix", [pytest.param(False, marks=pytest.mark.slow), True])
def test_runs_of_other_layouts_act_as_their_scripts_play_them(pool, tmp_path, mix):
    """Each with its own player, among stacked ones. The model of OMG is one without noise here."""
    for name, options in (("naive_om_iql", {}), ("liam_iql", {}), ("omg_iql", {"inference": "mlp"})):
        write_run(tmp_path / name, name, envs.make("8m"), scale=6, **options)
    others = "1naive_om_iql2liam_iql1omg_iql1nearest2iql1omg"
    team = make(others, num_envs=12, pool=[f"{tmp_path}/*", f"{pool}/iql_*"], mix=mix, seed=3)
    assert len(team.players) == 3 and len(team.networks.slots) == 2
    compare_with_scripts(team)


def test_runs_with_other_numbers_of_hidden_units_play_together(pool, tmp_path):
    wide = write_run(tmp_path / "wide", "vdn", envs.make("8m"), hidden_dim=32)
    team = make("4iql1nearest2vdn1omg", num_envs=12, pool=[pool / "iql_0", wide])
    assert len(team.networks.slots) == len(team.players) == 1
    compare_with_scripts(team)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", ["iql", "vdn", "qmix"])
def test_runs_of_the_simple_scripts_are_stacked(tmp_path, name, share):
    """Also runs whose weights are as small as those of a run that has not learned."""
    env = envs.make("3m", num_envs=4)
    for scale in (1, 3):
        path = write_run(tmp_path / f"{scale}", name, env, scale=scale, share_parameters=share)
        (run,) = read_pool([path], env)
        assert can_stack(run, env)


@pytest.mark.parametrize("change", ["a layer more", "a layer of another size", "no weights"])
def test_other_layouts_are_not_stacked(tmp_path, change):
    env = envs.make("3m", num_envs=4)
    (run,) = read_pool([write_run(tmp_path / "run", "iql", env)], env)
    weights = dict(run.weights)
    if change == "a layer more":
        weights |= {"fc3.weight": weights["fc2.weight"]}
    elif change == "a layer of another size":
        weights["fc1.weight"] = weights["fc1.weight"][:, 1:]
    else:
        weights = {}
    assert can_stack(run, env) and not can_stack(PoolRun(run.path, run.algorithm, weights), env)


def test_stacked_and_own_players_act_alike(tmp_path):
    """The same run once with its weights stacked and once with the player of its script, in the same seats."""
    env = envs.make("8m", num_envs=16, check=False)
    for share in (True, False):
        path = str(write_run(tmp_path / f"{share}", "qmix", env, share_parameters=share))
        team = Team(env, "7qmix1learner", pool=[path])
        (policy,) = team.used
        own, taken = RunPlayer(path, env, 16), set()
        for episode in range(2):
            team.draw()
            own.assign((team.policy_id == policy).any(1).numpy())
            env.reset(seed=episode)
            last_action = torch.full_like(env.actions, -1)
            for _ in range(8):
                joint = team.joint_action(torch.ones(16, 1, dtype=torch.long), last_action).clone()
                with torch.no_grad():
                    expected = own.act(last_action)
                assert (joint == expected)[team.policy_id == policy].all()
                taken.update(joint[team.policy_id == policy].tolist())
                env.step(joint)
                last_action = joint
        assert len(taken) > 3


def test_networks_of_every_seat_can_play_some_seats(tmp_path):
    """An ego in two seats, as in evaluations, whose run has a network for each seat."""
    env = envs.make("8m", num_envs=16)
    path = write_run(tmp_path / "run", "vdn", env, share_parameters=False)
    agents = SCRIPTS["vdn"].QNetwork(SCRIPTS["vdn"].Args(hidden_dim=16, share_parameters=False), env)
    agents.load_state_dict(read_pool([path], env)[0].weights)
    team = Team(env, "6nearest2learner")
    runner = load_runner(path, env, team)
    assert isinstance(runner.player, SeatSelection)
    every_seat = torch.arange(8).repeat(16, 1)
    taken = {seat: set() for seat in range(8)}
    for episode in range(2):
        obs, info = env.reset(seed=episode)
        last_action, h = torch.full_like(env.actions, -1), agents.init_hidden(16, 8)
        for _ in range(10):
            with torch.no_grad():
                q, h = agents(obs.unsqueeze(0), last_action.unsqueeze(0), h, every_seat)
            h, expected = h[0], q[0].masked_fill(~info["avail"], -1e9).argmax(-1)
            joint = runner.policy(obs, info).clone()
            for row, wanted, seats in zip(joint.tolist(), expected.tolist(), team.learner_seats.tolist()):
                for seat in seats:
                    assert row[seat] == wanted[seat]
                    taken[seat].add(row[seat])
            obs, *_, info = env.step(joint)
            last_action = joint
    assert all(taken.values()) and sum(len(actions) > 1 for actions in taken.values()) > 4, "policies of all kinds"


def test_random_actions_of_team_mates_come_at_their_rate(pool, tmp_path):
    """Of stacked runs, of others and of scripted policies; of a range every match draws one."""
    liam = write_run(tmp_path / "liam", "liam_iql", envs.make("8m"))
    teams = (("7vdn1omg", pool / "vdn_0", 0.5), ("7liam_iql1omg", liam, 0.5), ("7nearest1omg", "nearest", (0.2, 0.8)))
    for spec, path, rate in teams:
        random, greedy = (make(spec, num_envs=200, pool=[path], epsilon=epsilon) for epsilon in (rate, 0.0))
        torch.manual_seed(0)
        actions = []
        for team in (random, greedy):
            _, info = team.env.reset(seed=4)
            actions.append(team.joint_action(torch.ones_like(team.learner_seats), torch.full_like(team.policy_id, -1)))
            assert info["avail"].gather(2, actions[-1].unsqueeze(2)).all()
        others, choices = random.policy_id >= 0, random.env.info["avail"].sum(-1)
        expected = 0.5 * (1 - (1 / choices[others]).mean().item())
        assert (actions[0] != actions[1])[others].float().mean().item() == pytest.approx(expected, abs=0.05)
    drawn = random._epsilon.flatten().tolist()
    assert 0.2 <= min(drawn) < 0.25 and 0.75 < max(drawn) <= 0.8
    random.draw()
    assert random._epsilon.flatten().tolist() != drawn


def test_others_do_not_learn(pool, tmp_path):
    naive = write_run(tmp_path / "naive", "naive_om_iql", envs.make("8m"))
    team = make("4iql3naive_om_iql1omg", pool=[f"{pool}/iql_*", naive])
    (player,) = team.players.values()
    stacked = [tensor for layer in team.networks.layers.values() for tensor in layer]
    tensors = stacked + list(player.player.agents.state_dict().values())
    before = [tensor.clone() for tensor in tensors]
    team.env.reset(seed=0)
    joint, action = torch.full_like(team.env.actions, -1), torch.ones(24, 1, dtype=torch.long)
    for _ in range(5):
        joint = team.joint_action(action, joint)
        team.env.step(joint)
    assert not joint.requires_grad and not any(tensor.requires_grad for tensor in stacked)
    assert all((tensor == was).all() for tensor, was in zip(tensors, before))


def test_loading_a_run_leaves_the_random_state(pool):
    """Networks are made with random weights before they are loaded; a run must not depend on that."""
    env = envs.make("8m", num_envs=2)
    state = torch.get_rng_state()
    make("7iql1omg", pool=[f"{pool}/iql_*"])
    player = load_player(pool / "iql_0", env, torch.zeros(2, 1, dtype=torch.long))
    assert torch.equal(torch.get_rng_state(), state)
    inputs = Inputs(env.obs[:, :1], env.info["avail"][:, :1], env.actions[:, :1] - 1, env.actions, env.actions[:, :1])
    with torch.no_grad():
        assert player.act(inputs, torch.zeros(())).shape == (2, 1)

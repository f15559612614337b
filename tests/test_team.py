"""Who sits where: reading a team, dealing it out, and networks of earlier runs in seats that are not the learner's."""

import importlib.util
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import envs
from envs.team import Team, sizes_of

ROOT = Path(__file__).parent.parent
LEARNERS = ("omg", "iql_omg", "learner")
torch.set_num_threads(1)


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scripts():
    return {name: script(name) for name in ("iql", "vdn", "qmix")}


def write_run(folder, module, env, seed, share=True, env_id=None, **changes):
    """The folder of a run that has learned nothing: networks with large random weights, saved as the script does."""
    torch.manual_seed(seed)
    args = module.Args(env_id=env_id or env.name, n_agents=env.n_agents, share_parameters=share, **changes)
    agents = module.make_agents(args, env)
    with torch.no_grad():
        for weights in agents.parameters():
            weights.mul_(3)
    about = {"algorithm": module.__name__, "env_id": args.env_id, "sizes": sizes_of(env), "args": asdict(args)}
    folder.mkdir(parents=True)
    torch.save({**about, "target": {"agents": agents.state_dict()}}, folder / "checkpoint.pt")
    return str(folder)


@pytest.fixture(scope="module")
def pool(scripts, tmp_path_factory):
    """Runs on 8m: 2 of iql, one of them with a network for each seat, 1 of vdn, 3 of qmix."""
    folder, env = tmp_path_factory.mktemp("pool"), envs.make("8m")
    for name, runs in (("iql", 2), ("vdn", 1), ("qmix", 3)):
        for run in range(runs):
            write_run(folder / f"{name}_{run}", scripts[name], env, seed=run + 10 * len(name), share=run != 1)
    return folder


def make(text, num_envs=24, env_id="8m", **options):
    return Team(envs.make(env_id, num_envs=num_envs), text, LEARNERS, **options)


def seats_of(team, match):
    """What the seats of a match are played by: an algorithm, a scripted policy or the learner."""
    return [
        "learner" if number < 0 else Path(team.names[number]).name.split("_")[0] for number in team.who[match].tolist()
    ]


# ---- reading a team ----
@pytest.mark.parametrize(
    ("text", "env_id", "expected"),
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
def test_a_team_has_the_seats_it_names(pool, text, env_id, expected):
    team = make(text, env_id=env_id, pool=[f"{pool}/*"] if env_id == "8m" and text != "self" else ())
    for match in range(24):
        assert Counter(seats_of(team, match)) == expected
        assert team.own[match].tolist() == [s for s, who in enumerate(seats_of(team, match)) if who == "learner"]


def test_seats_are_in_the_order_of_the_text_turned():
    order = ["NS", "NS", "NH", "learner"]
    team = make("2NS1NH1omg", env_id="stag_hunt_4x4")
    turns = [order[-turn:] + order[:-turn] for turn in range(4)]
    seen = [seats_of(team, match) for match in range(24)]
    assert all(seats in turns for seats in seen) and all(turn in seen for turn in turns)


@pytest.mark.parametrize(
    ("env_id", "roster"), [("8m", {"nearest", "weakest", "kite"}), ("stag_hunt_4x4", {"RAND", "NS", "NH"})]
)
def test_without_a_text_one_learner_is_among_the_scripted(env_id, roster):
    team = make(None, env_id=env_id)
    assert set(team.env.policies) >= roster
    seen = [set(seats_of(team, match)) - {"learner"} for match in range(24)]
    assert all(len(one) == 1 for one in seen) and set().union(*seen) == roster
    assert team.own.shape == (24, 1)


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("6nearest1omg", {}, "has 7 seats, but 8m has 8"),
        ("7nearest2omg", {}, "has 9 seats, but 8m has 8"),
        ("7nearst1omg", {}, "no 'nearst' in the pool; known are omg, iql_omg, learner, .*nearest"),
        ("7qmix1omg", {}, "no 'qmix' in the pool"),
        ("8nearest", {}, "no seat for the learner: name one of them omg or iql_omg or learner"),
        ("", {}, "has 0 seats, but 8m has 8"),
        ("nearest7omg1", {}, "numbers and names, such as 7qmix1omg"),
        ("7nearest 1omg", {}, "numbers and names"),
        ("7nearest-1omg", {}, "numbers and names"),
        ("8nearest0omg", {}, "numbers and names"),
        ("7nearest1omg", {"seat": "8"}, "rotate, random or a number from 0 to 7, not '8'"),
        ("7nearest1omg", {"seat": "-1"}, "from 0 to 7"),
        ("7nearest1omg", {"seat": "first"}, "from 0 to 7"),
        *((text, {"pool": ["hold"]}, "a team with them is 7other1omg") for text in (None, "self", "scripted")),
        ("7nearest1omg", {"pool": ["nowhere/*"]}, "no run with a checkpoint.pt at nowhere"),
    ],
)
def test_what_makes_no_team_is_refused_with_what_would(text, options, says):
    with pytest.raises(ValueError, match=says):
        make(text, **options)


def test_runs_of_another_map_or_size_are_refused(scripts, tmp_path):
    write_run(tmp_path / "map", scripts["iql"], envs.make("3m"), 1)
    write_run(tmp_path / "size", scripts["iql"], envs.make("8m", n_agents=5), 1)
    twin = "stag_hunt_4x4_2h2s"  # its numbers are those of stag_hunt_4x4
    write_run(tmp_path / "twin", scripts["iql"], envs.make(twin), 1)
    for folder, of in (("map", "is of 3m .*; this is 8m "), ("size", "'n_agents': 5.*; this is 8m .*'n_agents': 8")):
        with pytest.raises(ValueError, match=of):
            make("7iql1omg", pool=[tmp_path / folder])
    assert sizes_of(envs.make(twin)) == sizes_of(envs.make("stag_hunt_4x4"))
    with pytest.raises(ValueError, match=f"is of {twin} .*; this is stag_hunt_4x4 "):
        make("3iql1omg", env_id="stag_hunt_4x4", pool=[tmp_path / "twin"])


def test_runs_of_the_real_game_fit_its_simulation(scripts, tmp_path):
    write_run(tmp_path / "real", scripts["iql"], envs.make("8m"), 1, env_id="sc2/8m")
    assert make("7iql1omg", pool=[tmp_path / "real"]).names[-1] == str(tmp_path / "real")


def test_runs_that_cannot_be_stacked_are_refused(pool, scripts, tmp_path):
    env = envs.make("8m")
    wide = write_run(tmp_path / "wide", scripts["iql"], env, 1, hidden_dim=32)
    with pytest.raises(ValueError, match=r"equally many hidden units, not \[32, 64\]"):
        make("7iql1omg", pool=[wide, pool / "iql_0"])
    with pytest.raises(ValueError, match="iql_0 more than once"):
        make("7iql1omg", pool=[pool / "iql_0", f"{pool}/iql_*"])
    omg = script("omg_iql")
    agents = omg.make_agents(omg.Args(), env).state_dict()
    about = {"algorithm": "omg_iql", "env_id": "8m", "sizes": sizes_of(env), "target": {"agents": agents}}
    (tmp_path / "omg").mkdir()
    torch.save(about, tmp_path / "omg" / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"a run of omg_iql.py cannot be a team-mate"):
        make("7omg_iql1omg", pool=[tmp_path / "omg"])


# ---- dealing ----
@pytest.mark.parametrize("text", ["7nearest1omg", "6nearest2omg", "3kite1omg3nearest1omg"])
def test_rotation_gives_every_seat_equally_often(text):
    team = make(text, num_envs=16)
    learners = torch.zeros(8, dtype=torch.long)
    for _ in range(3):
        team.draw()
        learners += torch.bincount(team.own.flatten(), minlength=8)
    assert learners.unique().tolist() == [3 * 16 * team.own.shape[1] // 8]


def test_rotation_with_fewer_matches_than_seats_takes_turns():
    team = make("7nearest1omg", num_envs=3)
    seats = Counter()
    for _ in range(16):
        team.draw()
        seats.update(team.own.flatten().tolist())
    assert seats == dict.fromkeys(range(8), 6)


def test_a_seat_can_be_chosen_or_left_to_chance():
    for seat in range(8):
        assert make("3kite2omg3nearest", seat=seat).own.tolist() == [sorted([seat, (seat + 1) % 8])] * 24
        assert make("7nearest1omg", seat=str(seat)).own.tolist() == [[seat]] * 24
    seats = torch.bincount(make("7nearest1omg", num_envs=4000, seat="random").own.flatten(), minlength=8)
    assert ((seats - 500).abs() < 120).all()


def test_one_run_plays_all_seats_of_a_part_and_all_runs_play_equally_often(pool):
    team = make("4iql3qmix1omg", pool=[f"{pool}/*"])
    for _ in range(3):
        team.draw()
        for algorithm, runs in (("iql", 2), ("qmix", 3)):
            numbers = {n for n, name in enumerate(team.names) if Path(name).name.startswith(algorithm)}
            dealt = [set(row) & numbers for row in team.who.tolist()]
            assert all(len(one) == 1 for one in dealt)
            assert Counter(one.pop() for one in dealt) == dict.fromkeys(numbers, 24 // runs)


def test_mixed_seats_draw_their_own_run(pool):
    team = make("7qmix1omg", pool=[f"{pool}/qmix_*"], mix=True)
    for _ in range(3):
        team.draw()
        others = team.who[team.who >= 0]
        assert Counter(others.tolist()) == dict.fromkeys(others.unique().tolist(), 24 * 7 // 3)
        assert len(others.unique()) == 3
        assert any(len(set(row)) > 2 for row in team.who.tolist())


@pytest.mark.parametrize("mix", [False, True])
def test_more_runs_than_matches_all_get_their_turn(pool, mix):
    team = make("7qmix1omg", num_envs=2, pool=[f"{pool}/qmix_*"], mix=mix)
    times = Counter()
    for _ in range(6):
        team.draw()
        times.update(team.who[team.who >= 0].tolist())
    assert set(times.values()) == {6 * 2 * 7 // 3}


def test_a_round_depends_on_seed_and_number_alone(pool):
    options = {"pool": [f"{pool}/*"], "mix": True, "seat": "random"}
    first, again, other = (make("4iql3qmix1omg", seed=seed, **options) for seed in (5, 5, 6))
    seen = []
    for _ in range(4):
        torch.rand(3)
        for team in (first, again, other):
            team.draw()
        seen.append(first.who.clone())
        assert (first.who == again.who).all() and (first.own == again.own).all()
        assert (first.who != other.who).any()
    again.rounds = first.rounds - 2
    again.draw()
    assert (again.who == seen[2]).all() and (seen[2] != seen[3]).any()


def test_an_understudy_leaves_no_seat_to_the_learner(pool):
    team = make("4iql2nearest2omg", pool=[f"{pool}/iql_*"], understudy=True)
    team.env.reset(seed=0)
    last = torch.full_like(team.env.actions, -1)
    assert (team.who >= 0).all() and team.own.shape == (24, 2)
    pair = [row[own].tolist() for row, own in zip(team.who, team.own)]
    iql = [n for n, name in enumerate(team.names) if "iql_" in name]
    assert {n for one in pair for n in one} == {*iql, team.names.index("nearest")}
    chosen = team.complete(torch.zeros_like(team.own), last).clone()
    assert (team.complete(torch.full_like(team.own, 5), last) == chosen).all()
    alone = make("self", understudy=True)
    assert (alone.who == -1).all()


def test_other_is_anybody_of_the_pool(pool):
    team = make("7other1omg", pool=["kite", f"{pool}/vdn_*", "hold", f"{pool}/qmix_*"], num_envs=24)
    names = ["kite", "hold", f"{pool}/vdn_0", *(f"{pool}/qmix_{run}" for run in range(3))]
    assert [team.names[number] for number in team.pool] == names
    dealt = [{*row} - {-1} for row in team.who.tolist()]
    assert all(len(one) == 1 for one in dealt)
    assert Counter(team.names[one.pop()] for one in dealt) == dict.fromkeys(names, 4)
    with pytest.raises(ValueError, match="no 'other' in the pool"):
        make("7other1omg")


def test_seats_can_be_dealt_by_hand():
    team = make("2other1omg", env_id="3m", num_envs=6, pool=["nearest", "kite", "hold"])
    places = [team.names.index(name) for name in ("nearest", "kite", "hold")]
    team.deal(np.array([0, 1, 2, 0, 1, 2]), lambda seats, policies: np.arange(6 * seats) % policies)
    expected = [[0, 1, -1], [-1, 2, 0], [1, -1, 2], [0, 1, -1], [-1, 2, 0], [1, -1, 2]]
    assert team.who.tolist() == [[places[n] if n >= 0 else -1 for n in row] for row in expected]
    assert team.own.flatten().tolist() == [2, 0, 1, 2, 0, 1]


# ---- playing ----
def test_mine_and_complete_go_by_seat():
    team = make("6kite2omg")
    env = team.env
    env.reset(seed=1)
    values = torch.arange(24 * 8 * 5).view(24, 8, 5)
    for match in range(24):
        for place, seat in enumerate(team.own[match].tolist()):
            assert (team.mine(values)[match, place] == values[match, seat]).all()
    own = torch.arange(48).view(24, 2)
    everybody = team.complete(own, torch.full_like(env.actions, -1))
    kite = env.scripted_actions("kite")
    for match in range(24):
        expected = kite[match].tolist()
        for place, seat in enumerate(team.own[match].tolist()):
            expected[seat] = int(own[match, place])
        assert everybody[match].tolist() == expected


def test_a_team_of_learners_does_as_they_say():
    team = make("self")
    own = torch.randint(5, (24, 8))
    assert team.complete(own, own) is own and team.mine(own) is own


@pytest.mark.parametrize("mix", [False, True])
def test_networks_act_as_their_scripts_play_them(pool, scripts, mix):
    """Run by run the actions of load_policy, through several rounds, each with memory of its own match alone."""
    team = make("3iql1nearest2qmix1vdn1omg", num_envs=12, pool=[f"{pool}/*"], mix=mix, seed=3)
    env, generator = team.env, torch.Generator().manual_seed(0)
    policies = {
        number: scripts[Path(path).name.split("_")[0]].load_policy(path, env)
        for number, path in enumerate(team.names)
        if "/" in path
    }
    compared = Counter()
    for episode in range(3):
        team.draw()
        obs, info = env.reset(seed=episode)
        last = torch.full_like(env.actions, -1)
        for _ in range(12):
            chances = torch.rand((12, 1, env.n_actions), generator=generator)
            own = (chances * team.mine(info["avail"])).argmax(-1)
            everybody = team.complete(own, last).clone()
            assert (everybody.gather(1, team.own) == own).all()
            nearest = env.scripted_actions("nearest").clone()
            assert (everybody == nearest)[team.who == env.policies.index("nearest")].all()
            for number, act in policies.items():
                before = act(obs, info)  # its own memory of last actions is replaced by what was done
                mine = team.who == number
                assert (everybody[mine] == before[mine]).all()
                before.copy_(everybody)
                compared[number] += int(mine.sum())
            obs, *_, info = env.step(everybody)
            last = everybody
    assert min(compared[number] for number in policies) > 100


def test_random_actions_of_team_mates_come_at_their_chance(pool):
    team, calm = (make("7vdn1omg", num_envs=200, pool=[pool / "vdn_0"], epsilon=e) for e in (0.5, 0.0))
    torch.manual_seed(0)
    actions = []
    for one in (team, calm):
        _, info = one.env.reset(seed=4)
        actions.append(one.complete(torch.ones_like(one.own), torch.full_like(one.env.actions, -1)))
        assert info["avail"].gather(2, actions[-1].unsqueeze(2)).all()
    others, choices = team.who >= 0, team.env.info["avail"].sum(-1)
    expected = 0.5 * (1 - (1 / choices[others]).mean().item())
    assert (actions[0] != actions[1])[others].float().mean().item() == pytest.approx(expected, abs=0.05)


def test_others_do_not_learn(pool):
    team = make("7iql1omg", pool=[f"{pool}/iql_*"])
    before = {key: [part.clone() for part in layer] for key, layer in team.networks.layers.items()}
    team.env.reset(seed=0)
    last, own = torch.full_like(team.env.actions, -1), torch.ones(24, 1, dtype=torch.long)
    for _ in range(5):
        last = team.complete(own, last)
        team.env.step(last)
    for key, layer in team.networks.layers.items():
        assert not any(part.requires_grad for part in layer)
        assert all((part == was).all() for part, was in zip(layer, before[key]))

"""Predators and prey: against MPE2 itself, by the rules on worlds set by hand, and what scripted agents do."""

import itertools
import math
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from helpers import train
from mpe2 import simple_tag_v3
from mpe2._mpe_utils.core import World
from pettingzoo.test import parallel_api_test, parallel_seed_test
from worlds import shown

import envs
from envs import predator_prey
from envs.pettingzoo import parallel_env
from training.team import Team

NONE, LEFT, RIGHT, DOWN, UP = range(5)
POLICIES = ("chase", "close", "far", "fellow", "loyal", "random")
COPIES = 8  # of a match set by hand
FAR_OBSTACLES = ((3.0, 3.0), (3.0, -3.0))


# ---- worlds set by hand ----
def world(name, places, velocities=None, obstacles=FAR_OBSTACLES, **options):
    """Matches, all alike, with agents at these places."""
    env = envs.make(name, num_envs=COPIES, obstacles=len(obstacles), **options)
    env.reset()
    velocities = velocities or [(0.0, 0.0)] * len(places)
    given = (places, velocities, obstacles)
    env.set_world(*(torch.tensor(values, dtype=torch.float64).view(1, -1, 2).repeat(COPIES, 1, 1) for values in given))
    return env


def act(env, *actions):
    """Plays the actions in all copies of a match; the rewards of the first."""
    reward = env.step(torch.tensor([actions] * COPIES))[1]
    assert (reward == reward[0]).all()
    return pytest.approx(reward[0].tolist(), abs=1e-6)


def scripted(env, policy):
    """What each agent of the first copy does under a policy."""
    return env.scripted_actions(policy)[0].tolist()


# ---- make ----
@pytest.mark.parametrize(
    ("name", "options", "predators", "prey", "limit"),
    [
        ("simple_tag", {}, 3, 1, 25),
        ("simple_tag_6v2", {}, 6, 2, 25),
        ("simple_tag", {"predators": 2, "prey": 3, "obstacles": 0, "limit": 7}, 2, 3, 7),
        ("simple_tag", {"n_agents": 6}, 5, 1, 25),
        ("popp", {}, 3, 1, 50),
    ],
)
def test_sizes(name, options, predators, prey, limit):
    env = envs.make(name, **options)
    agents, obstacles = predators + prey, options.get("obstacles", 2)
    assert env.agents == [f"predator_{a}" for a in range(predators)] + [f"prey_{a}" for a in range(prey)]
    assert (env.n_actions, env.episode_limit, env.policies) == (5, limit, POLICIES)
    assert env.obs_dim == 4 + 2 * obstacles + 2 * (agents - 1) + 2 * prey
    assert env.state_dim == agents * env.obs_dim - 2 * prey
    assert not env.team_reward and not env.ego_first and env.sides == (0,) * predators + (1,) * prey
    if (predators, prey, obstacles) == (3, 1, 2):
        assert (env.obs_dim, env.state_dim) == (16, 62)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"predators": 0}, "predators is a whole number from 1 to 16, not 0"),
        ({"prey": 0}, "prey is a whole number from 1 to 16, not 0"),
        ({"n_agents": 1}, "predators is a whole number from 1 to 16, not 0"),
        ({"obstacles": -1}, "obstacles is a whole number from 0 to 16, not -1"),
        ({"limit": 2.5}, "limit is a whole number from 1 to 100000, not 2.5"),
        ({"learner": "cat"}, 'learner is "predator" or "prey", not \'cat\''),
        ({"predators": 2, "n_agents": 5}, "played by 3 agents, not 5"),
        ({"walls": 1}, "no option 'walls'.*velocity_first"),
    ],
)
def test_what_does_not_fit_is_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        envs.make("simple_tag", **options)


def test_unknown_ids_name_the_pattern():
    for unknown in ("simple_tag_3v", "simple_tag_3v1v1"):
        with pytest.raises(ValueError, match=r"unknown environment.*simple_tag.*\{predators\}v\{prey\}"):
            envs.make(unknown)


# ---- against MPE2 ----
def move_velocity_first(world, forces):
    """As OpenAI's original has it."""
    for agent, force in zip(world.agents, forces):
        velocity = agent.state.p_vel * (1 - world.damping) + force / agent.mass * world.dt
        speed = np.linalg.norm(velocity)
        agent.state.p_vel = velocity / speed * agent.max_speed if speed > agent.max_speed else velocity
        agent.state.p_pos = agent.state.p_pos + agent.state.p_vel * world.dt


def compare_with_mpe2(predators, prey, obstacles, matches, seed, policy=None, **options):
    """Plays the same starts and actions here and there, and returns how many steps had a reward for touching."""
    package = simple_tag_v3.parallel_env(num_good=prey, num_adversaries=predators, num_obstacles=obstacles)
    sizes = {"predators": predators, "prey": prey, "obstacles": obstacles}
    env = envs.make("simple_tag", num_envs=matches, seed=seed, **sizes, **options)
    first, info = env.reset()
    first, first_state = first.clone(), info["state"].clone()
    places, chance, history = env.snapshot()["place"].numpy(), np.random.default_rng(seed), []
    for _ in range(25):
        actions = torch.as_tensor(chance.integers(0, 5, (matches, env.n_agents)))
        if policy:  # those who chase are in contact more often
            guided = torch.as_tensor(chance.random(actions.shape) < 0.7)
            actions = torch.where(guided, env.scripted_actions(policy), actions)
        result = shown(env.step(actions))
        history.append((actions, result, {key: values.clone() for key, values in env.units().items()}))
    assert result["truncated"].all() and not result["terminated"].any()
    touched = 0
    close = {"rtol": 0, "atol": 1e-5}
    for m in range(matches):
        seen, _ = package.reset(seed=m)
        entities = package.unwrapped.world.entities
        for entity, place in zip(entities, places[m]):
            entity.state.p_pos = place.copy()
        agents = package.unwrapped.world.agents
        assert len(package.state()) == env.state_dim
        for a, name in enumerate(package.possible_agents):
            size = len(seen[name])
            np.testing.assert_allclose(first[m, a, :size], package.unwrapped.observe(name), **close)
            assert size == env.obs_dim - 2 * (a >= predators) and not first[m, a, size:].any()
        np.testing.assert_allclose(first_state[m], package.state(), **close)
        for actions, result, units in history:
            names = package.possible_agents
            seen, rewards, _, truncated, _ = package.step(dict(zip(names, actions[m].tolist())))
            np.testing.assert_allclose(result["reward"][m], list(rewards.values()), **close)
            np.testing.assert_allclose(result["state"][m], package.state(), **close)
            for a, name in enumerate(names):
                np.testing.assert_allclose(result["obs"][m, a, : len(seen[name])], seen[name], **close)
                assert not result["obs"][m, a, len(seen[name]) :].any()
            for axis in range(2):
                there = [(agent.state.p_pos[axis], agent.state.p_vel[axis]) for agent in agents]
                here = torch.stack((units["xy"[axis]][m], units["v" + "xy"[axis]][m]), 1)
                np.testing.assert_allclose(here, there, rtol=0, atol=1e-9)
            touched += result["reward"][m, 0].item() > 0
        assert all(truncated.values())
    return touched


@pytest.mark.parametrize(("sizes", "policy"), [((3, 1, 2), "chase"), ((4, 2, 3), None)])
def test_a_few_matches_are_those_of_mpe2(sizes, policy):
    compare_with_mpe2(*sizes, matches=8, seed=1, policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "matches"), [((3, 1, 2), 100), ((1, 1, 0), 40), ((2, 3, 1), 40), ((6, 2, 4), 40)], ids=str
)
def test_many_matches_are_those_of_mpe2(sizes, matches):
    touched = compare_with_mpe2(*sizes, matches=matches // 2, seed=2)
    touched += compare_with_mpe2(*sizes, matches=matches // 2, seed=3, policy="chase")
    assert touched > matches // 4


@pytest.mark.parametrize("matches", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_velocity_first_is_the_order_of_the_original(monkeypatch, matches):
    monkeypatch.setattr(World, "integrate_state", move_velocity_first)
    compare_with_mpe2(3, 1, 2, matches, seed=4, policy="chase", velocity_first=True)


# ---- movement ----
@pytest.mark.parametrize("velocity_first", [False, True])
def test_speeds_of_those_who_push_one_way(velocity_first):
    env = world("simple_tag", [(-1, 0.8), (-1, 0.4), (-1, 0), (-1, -0.5)], velocity_first=velocity_first)
    speeds, way = [], []
    for _ in range(8):
        act(env, RIGHT, NONE, UP, RIGHT)
        units = env.units()
        speeds.append((units["vx"][0, 0].item(), units["vx"][0, 3].item()))
        way.append(units["x"][0, 0].item())
    predator, prey = zip(*speeds)
    expected = [0.3, 0.525, 0.69375, 0.8203125, 0.915234375, 0.98642578125, 1.0, 1.0]
    assert predator == pytest.approx(expected)
    assert prey == pytest.approx([0.4, 0.7, 0.925, 1.09375, 1.2203125, 1.3, 1.3, 1.3])
    moved = predator if velocity_first else (0, *predator[:-1])
    assert way == pytest.approx(-1 + 0.1 * np.cumsum(moved))


@pytest.mark.parametrize(
    ("action", "way"), [(NONE, (0, 0)), (LEFT, (-1, 0)), (RIGHT, (1, 0)), (DOWN, (0, -1)), (UP, (0, 1)), (7, (0, 0))]
)
def test_actions(action, way):
    env = world("simple_tag", [(0, 0), (1, 1), (-1, 1), (-1, -1)], check=False)
    act(env, action, NONE, NONE, action)
    for agent, push in ((0, 0.3), (3, 0.4)):
        velocity = env.snapshot()["velocity"][0, agent].tolist()
        assert velocity == pytest.approx([push * part for part in way], abs=1e-12)


@pytest.mark.parametrize("beyond", [-0.06, -0.005, -0.001, 0, 0.0004, 0.002, 0.02, 0.05])
def test_contact_force(beyond):
    env = world("simple_tag", [(0, 0), (1, 1), (-1, 1), (0.125 + beyond, 0)])
    act(env, NONE, NONE, NONE, NONE)
    force = 100 * 0.001 * np.logaddexp(0, -beyond / 0.001)
    velocity = env.snapshot()["velocity"][0, :, 0].tolist()
    assert velocity == pytest.approx([-min(0.1 * force, 1), 0, 0, min(0.1 * force, 1.3)], rel=1e-9, abs=1e-15)
    if beyond == 0:
        assert force == pytest.approx(0.0693, abs=1e-4)


def test_exponential_and_logarithm():
    exp_minus, log_one_plus = (getattr(f, "py_func", f) for f in (predator_prey.exp_minus, predator_prey.log_one_plus))
    for value in np.linspace(0, 40, 400):
        assert exp_minus(value) == pytest.approx(math.exp(-value), rel=1e-12)
    for value in [0.0, 1e-12, 1e-3, *np.linspace(0.01, 1, 100)]:
        assert log_one_plus(value) == pytest.approx(math.log1p(value), rel=1e-14)


def test_agents_in_one_place_do_not_break_the_numbers():
    env = world("simple_tag", [(0, 0), (0, 0), (1, 1), (0.5, 0.5)])
    act(env, RIGHT, LEFT, NONE, NONE)
    assert torch.isfinite(env.obs).all()


# ---- rewards of simple_tag ----
def test_every_predator_earns_for_every_touch():
    env = world("simple_tag_3v2", [(0, 0), (0.2, 0), (0.9, 0.9), (0.1, 0), (0.8, -0.8)])
    assert act(env, *[NONE] * 5) == [20, 20, 20, -20, 0]  # the positions are one step old: nobody moves in the first
    env = world("simple_tag_3v2", [(0, 0), (0.126, 0), (0.9, 0.9), (0, 0.126), (0.85, 0.85)])
    assert act(env, *[NONE] * 5) == [10, 10, 10, 0, -10]


@pytest.mark.parametrize(
    ("place", "cost"), [(0.9, 0), (0.95, 0.5), (1.0, 1.0), (1.5, math.e), (2.151, math.exp(2.302)), (2.2, 10), (9, 10)]
)
def test_a_prey_pays_for_leaving(place, cost):
    for x, y in ((place, 0), (0, -place), (-place, place)):
        env = world("simple_tag", [(0, -5), (0.5, -5), (1, -5), (x, y)])
        assert act(env, NONE, NONE, NONE, NONE) == [0, 0, 0, -cost * ((x != 0) + (y != 0))]


def test_a_match_is_won_when_a_prey_has_been_touched():
    env = world("simple_tag", [(0, 0), (1, 1), (-1, 1), (0.1, 0)], limit=6)
    for step in range(6):
        *_, terminated, truncated, info = env.step(torch.full((COPIES, 4), NONE))
        assert not terminated.any() and info["alive"].all() and info["avail"].all()
        assert truncated.all() == info["won"].all() == (step == 5)
    assert env.obs.any(), "the last observation is real"
    obs, reward, _, truncated, info = env.step(torch.full((COPIES, 4), UP))
    assert not obs.any() and not reward.any() and not info["alive"].any() and truncated.all()
    assert info["avail"].nonzero()[:, 2].unique().tolist() == [NONE]
    untouched = world("simple_tag", [(0, 0), (1, 1), (-1, 1), (0.5, 0)], limit=1)
    act(untouched, NONE, NONE, NONE, NONE)
    assert not untouched.info["won"].any()


# ---- popp ----
@pytest.mark.parametrize(
    ("near", "prey", "bonus"), [(0, 0, 0), (1, 1, -1), (2, -1, 1), (3, -1, 1)], ids=["none", "one", "two", "three"]
)
def test_rewards_of_popp(near, prey, bonus):
    spots = [(0.27, 0), (-0.27, 0), (0, 0.27)]
    places = [spot if a < near else (2 * spot[0], 2 * spot[1]) for a, spot in enumerate(spots)]
    env = world("popp", [*places, (0, 0)])
    distances = 0.27 * near + 0.54 * (3 - near)
    assert act(env, *[NONE] * 4) == [bonus - 0.1 * distances] * 3 + [prey]


def test_a_prey_of_popp_pays_at_the_edge():
    for place, reward in (((0.98, 0), 0), ((-1.0, 0), -10), ((0.2, 1.0), -10)):
        env = world("popp", [(-0.5, -0.5), (0.5, -0.5), (0, -0.5), place])
        act(env, *[NONE] * 4)
        assert env.reward[0, 3] == reward


def test_a_prey_of_popp_sees_what_is_near_on_both_axes():
    places = [(0.5, 0.5), (0.51, 0.0), (-0.2, -0.3), (0.0, 0.0)]
    env = world("popp", places, velocities=[(0.1, 0.2), (0.3, 0.4), (0.5, 0.6), (0.7, 0.8)],
                obstacles=[(0.1, 0.4), (0.1, -0.6)])  # fmt: skip
    prey = [0.7, 0.8, 0, 0, 0.1, 0.4, -5, -5, 0.5, 0.5, -5, -5, -0.2, -0.3, 0, 0]
    assert env.obs[0, 3].tolist() == pytest.approx(prey)
    relative = [0.01, -0.5, -0.7, -0.8, -0.5, -0.5]
    predator = [0.1, 0.2, 0.5, 0.5, -0.4, -0.1, -0.4, -1.1, *relative, 0.7, 0.8]
    assert env.obs[0, 0].tolist() == pytest.approx(predator)
    state = env.info["state"][0].tolist()
    assert state[:16] == pytest.approx(predator)
    assert state[48:] == pytest.approx([0.7, 0.8, 0, 0, 0.1, 0.4, 0.1, -0.6, 0.5, 0.5, 0.51, 0, -0.2, -0.3])
    others, visible = env.places(env.obs[0])
    assert visible.tolist() == [[True] * 3] * 3 + [[True, False, True]]
    assert others[0].flatten().tolist() == pytest.approx(relative)


@pytest.mark.parametrize("action", [LEFT, RIGHT, DOWN, UP])
def test_walls_of_popp_hold_everyone_in(action):
    env = world("popp", [(-0.9, 0.9), (0.9, 0.9), (0.9, -0.9), (-0.9, -0.9)])
    for _ in range(50):
        act(env, *[action] * 4)
        assert env.units()["x"].abs().max() < 1.35 and env.units()["y"].abs().max() < 1.35
    edge = env.units()["x" if action in (LEFT, RIGHT) else "y"][0]
    assert edge[:3].abs().tolist() == pytest.approx([edge[0].abs().item()] * 3, abs=0.2) and edge.abs().min() > 1


def test_popp_is_won_with_a_return_above_zero():
    for places, won in (((0.27, 0.9), True), ((0.9, -0.9), False)):
        env = world("popp", [(places[0], 0), (places[1], 0.9), (-0.9, -0.9), (0, 0)], limit=1)
        act(env, *[NONE] * 4)
        assert env.info["won"].all() == won


# ---- resets, seeds, copies ----
@pytest.mark.parametrize(("name", "area"), [("simple_tag", 1.0), ("popp", 0.9)])
@pytest.mark.slow
def test_starts_are_spread_over_the_area(name, area):
    env = envs.make(name, num_envs=4000)
    env.reset()
    place, velocity = env.snapshot()["place"], env.snapshot()["velocity"]
    assert not velocity.any()
    for things, limit in ((place[:, :4], area), (place[:, 4:], 0.9)):
        assert 0.999 * limit < things.abs().max() <= limit
        for quarter in range(4):
            share = ((things / limit + 1) * 2).floor().clamp(max=3) == quarter
            assert (share.float().mean(0) - 0.25).abs().max() < 0.04
    flat = place.flatten(1).T.numpy()
    assert np.abs(np.corrcoef(flat) - np.eye(len(flat))).max() < 0.08


@pytest.mark.parametrize("name", envs.predator_prey.IDS)
def test_observations_are_in_their_space(name):
    env = envs.make(name, num_envs=16)
    env.reset()
    for policy in ("random", "far"):
        env.reset()
        for _ in range(env.episode_limit):
            obs = env.step(env.scripted_actions(policy))[0]
            assert env.observation_space.contains(obs.numpy())
    straight = envs.make(name, num_envs=COPIES, check=False)
    straight.reset()
    for _ in range(straight.episode_limit):
        straight.step(torch.tensor([[LEFT, LEFT, UP, RIGHT]] * COPIES))
        assert straight.observation_space.contains(straight.obs.numpy())


def test_set_world_says_what_it_takes():
    env = envs.make("simple_tag", num_envs=COPIES)
    with pytest.raises(RuntimeError, match="reset"):
        env.set_world()
    env.reset()
    with pytest.raises(ValueError, match=r"places has real numbers of shape \(8, 4, 2\), not torch.float32 \(4, 2\)"):
        env.set_world(places=torch.zeros(4, 2))


# ---- scripted predators ----
def test_predators_follow_whom_they_are_meant_to():
    # seat 0: the prey is up, seat 1 near and to the right, seat 2 farthest and to the left
    env = world("simple_tag", [(0, 0), (0.3, 0.1), (-0.9, 0.2), (0.1, 0.6)])
    assert [scripted(env, policy)[0] for policy in ("chase", "close", "far")] == [UP, RIGHT, LEFT]
    assert [scripted(env, policy)[2] for policy in ("chase", "close", "far")] == [RIGHT, RIGHT, RIGHT]
    env = world("simple_tag_2v2", [(0, 0), (0.9, 0), (0, -0.3), (-0.5, 0)])
    assert scripted(env, "chase")[:2] == [DOWN, LEFT], "the nearest of several prey"


def test_a_fellow_is_drawn_at_every_step():
    env = envs.make("simple_tag", num_envs=2000)
    env.reset()
    places = torch.tensor([[0.0, 0], [0.5, 0], [-0.5, 0], [0, 0.5]], dtype=torch.float64)
    env.set_world(places.repeat(2000, 1, 1), obstacles=torch.full((2000, 2, 2), 3.0))
    first = env.scripted_actions("fellow").clone()
    assert set(first[:, 0].tolist()) == {LEFT, RIGHT} and abs((first[:, 0] == LEFT).float().mean() - 0.5) < 0.06
    assert torch.equal(env.scripted_actions("fellow"), first), "the same for a second call in one step"
    env.step(torch.zeros_like(first))
    assert (env.scripted_actions("fellow")[:, 0] != first[:, 0]).any()
    alone = world("simple_tag_1v1", [(0, 0), (0.5, 0)])
    assert scripted(alone, "fellow")[0] == RIGHT, "without fellows it chases"


def test_a_loyal_predator_follows_one_until_it_touches_it():
    env = envs.make("simple_tag", num_envs=900)
    env.reset()
    goal = env.snapshot()["goal"]
    for seat in range(3):
        counts = goal[:, seat].bincount(minlength=4)
        assert counts[seat] == 0 and counts[counts > 0].min() > 230 and (counts > 0).sum() == 3
    changes = 0
    for _ in range(25):
        before, place = env.snapshot()["goal"], env.snapshot()["place"]
        env.step(env.scripted_actions("loyal"))
        after, place = env.snapshot()["goal"], env.snapshot()["place"]
        for seat in range(3):
            target = place[torch.arange(900), before[:, seat].long()]
            reach = torch.where(before[:, seat] == 3, 0.125, 0.15)
            touched = (place[:, seat] - target).norm(dim=1) < reach
            assert torch.equal(after[:, seat] != before[:, seat], touched)
            following = (before[:, seat] + 1) % 4
            following = torch.where(following == seat, (following + 1) % 4, following)
            assert torch.equal(after[touched, seat], following[touched])
            changes += int(touched.sum())
    assert changes > 100


# ---- scripted prey ----
def test_a_prey_flees_but_stays_inside():
    env = world("simple_tag", [(-0.3, 0), (-0.8, 0), (-0.9, 0.3), (0, 0)])
    assert scripted(env, "chase")[3] == RIGHT
    env = world("simple_tag", [(0.6, 0), (0.5, 0.4), (0.5, -0.3), (0.85, 0)])
    assert scripted(env, "chase")[3] in (UP, DOWN), "not out of the area"
    caught = {}
    for prey in ("random", "chase"):
        env = envs.make("simple_tag", num_envs=500, limit=50)
        policy = torch.tensor([POLICIES.index("chase")] * 3 + [POLICIES.index(prey)]).repeat(500, 1)
        env.reset()
        caught[prey] = sum((env.step(env.scripted_actions(policy))[1][:, 0] > 0).float().mean() for _ in range(50))
        if prey == "chase":
            assert env.units()["x"][:, 3].abs().max() < 1.5
    assert caught["chase"] < 0.6 * caught["random"]


def test_a_prey_runs_to_the_safest_corner():
    env = world("simple_tag", [(0.9, 0.9), (0.8, -0.8), (-0.7, 0.7), (0, 0)])
    for _ in range(25):
        act(env, NONE, NONE, NONE, scripted(env, "far")[3])
    assert [env.units()[axis][0, 3].item() for axis in "xy"] == pytest.approx([-0.55, -0.55], abs=0.15)


def test_a_prey_hides_behind_an_obstacle():
    env = world(
        "simple_tag", [(0.9, 0), (0.9, 0.9), (0.9, -0.9), (0.1, 0.3)], obstacles=[(0, 0), (-0.9, 0.9)], limit=60
    )
    places = []
    for _ in range(50):
        act(env, NONE, NONE, NONE, scripted(env, "close")[3])
        places.append([env.units()[axis][0, 3].item() for axis in "xy"])
    x, y = np.mean(places[20:], 0)
    assert x < -0.2 and abs(y) < 0.1
    bare = world("simple_tag", [(-0.3, 0), (-0.8, 0), (-0.9, 0.3), (0, 0)], obstacles=[])
    assert scripted(bare, "close")[3] == RIGHT, "without obstacles it flees"


def test_a_prey_on_its_rounds_visits_all_corners_either_way():
    env = envs.make("simple_tag", num_envs=200, limit=120, obstacles=0)
    env.reset()
    env.set_world(places=torch.tensor([[9.0, 9], [9, -9], [-9, 9], [0, 0]]).repeat(200, 1, 1))
    idle = torch.tensor([True, True, True, False])
    visits = [[] for _ in range(200)]
    for _ in range(120):
        env.step(torch.where(idle, 0, env.scripted_actions("fellow")))
        for match, (x, y) in enumerate(zip(*(env.units()[axis][:, 3].tolist() for axis in "xy"))):
            quarter = (x > 0, y > 0)
            if min(abs(x), abs(y)) > 0.25 and quarter not in visits[match][-1:]:
                visits[match].append(quarter)
    turns = {(False, False): 0, (True, False): 1, (True, True): 2, (False, True): 3}
    left = 0
    for visited in visits:
        steps = {(turns[b] - turns[a]) % 4 for a, b in itertools.pairwise(visited)}
        assert len(visited) >= 4 and steps in ({1}, {3})
        left += steps == {1}
    assert 60 < left < 140


def test_a_shy_prey_waits_until_a_predator_comes_near_and_then_runs_for_good():
    env = world("simple_tag", [(-0.9, 0), (-0.9, 0.3), (-0.9, -0.3), (0, 0)])
    act(env, *[NONE] * 4)
    assert scripted(env, "loyal")[3] == NONE
    places = env.snapshot()["place"][:, :4].clone()
    places[:, 0, 0] = -0.45
    env.set_world(places=places)
    act(env, *[NONE] * 4)
    assert scripted(env, "loyal")[3] == RIGHT
    places[:, 0, 0] = -0.9
    env.set_world(places=places)
    act(env, *[NONE] * 4)
    assert scripted(env, "loyal")[3] == scripted(env, "chase")[3] != NONE


@pytest.mark.slow
def test_random_agents_take_every_action_alike():
    env = envs.make("simple_tag", num_envs=2500)
    env.reset()
    actions = env.scripted_actions("random").clone()
    for seat in range(4):
        assert (actions[:, seat].bincount(minlength=5) - 500).abs().max() < 100
    assert abs(np.corrcoef(actions.T)[0, 3]) < 0.1


@pytest.mark.parametrize("policy", POLICIES)
def test_scripted_agents_do_nothing_in_a_match_that_is_over(policy):
    env = envs.make("simple_tag", num_envs=COPIES, limit=1, check=True)
    env.reset()
    for _ in range(3):
        env.step(env.scripted_actions(policy))
    assert (env.scripted_actions(policy) == NONE).all()


# ---- teams and scripts ----
@pytest.mark.parametrize(
    ("name", "options", "spec", "seats"),
    [
        ("simple_tag", {}, "scripted", {(0,), (1,), (2,)}),
        ("simple_tag", {"learner": "prey"}, "scripted", {(3,)}),
        ("popp", {}, "scripted", {(3,)}),
        ("simple_tag", {}, "2learner2chase", {(0, 1), (1, 2)}),
        ("simple_tag", {}, "3learner1chase", {(0, 1, 2)}),
        ("popp", {}, "3learner1chase", {(0, 1, 2)}),
    ],
)
def test_learners_stay_on_their_side(name, options, spec, seats):
    for seat in ("rotate", "random"):
        team = Team(envs.make(name, num_envs=30, **options), spec, seat=seat)
        assert {tuple(row) for row in team.learner_seats.sort(1).values.tolist()} == seats
        assert not team.is_opposed()
    env = envs.make(name, num_envs=30, **options)
    assert set(Team(env, "scripted", seat=3).learner_seats.flatten().tolist()) == {3}
    assert Team(env, "self").is_opposed()


@pytest.mark.parametrize("name", ["vdn", "qmix"])
@pytest.mark.slow
def test_team_scripts_reject_both_sides(name, tmp_path):
    message = "--team self: simple_tag has two sides, of which one can learn: --team 3learner1chase"
    with pytest.raises(SystemExit, match=message):
        train(name, tmp_path, env_id="simple_tag")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "env_id", "options"),
    [
        ("iql", "simple_tag", {}),
        ("qmix", "simple_tag", {"team": "3learner1chase"}),
        ("naive_om_iql", "popp", {}),
        ("liam_iql", "simple_tag", {"seat": 3}),
        ("omg_iql", "popp", {}),
    ],
)
def test_scripts_train_on_it(name, env_id, options, tmp_path):
    names = train(name, tmp_path, env_id=env_id, **options)
    assert names["run"].progress["complete"] and names["learner"].updates > 0


# ---- bridges, pictures, other ways to run it ----
@pytest.mark.parametrize("name", envs.predator_prey.IDS)
@pytest.mark.slow
def test_bridges(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(parallel_env(name), num_cycles=60)
        parallel_seed_test(lambda: parallel_env(name), num_cycles=60)
        check_env(gymnasium.make(f"omg/{name}-v0", seat=3, render_mode="rgb_array").unwrapped)


def test_scene_and_picture():
    env = world("popp", [(0.2, 0), (0.9, 0.9), (-0.9, 0.9), (0, 0)], limit=1)
    scene = env.scene()
    kinds = [(agent["kind"], agent["touching"], agent["sight"]) for agent in scene["agents"]]
    assert kinds == [("predator", True, None), *[("predator", False, None)] * 2, ("prey", True, 0.5)]
    assert scene["obstacles"][0] == {"x": 3.0, "y": 3.0, "radius": 0.2} and scene["status"] == "running"
    plain, seen, marked = env.render(), env.render(sight=3), env.render(goals=[(3, 0.5, -0.5)])
    assert plain.shape == (480, 480, 3) and (plain != seen).any() and (plain != marked).any()
    act(env, RIGHT, NONE, NONE, LEFT)
    after = env.scene()
    assert after["status"] == "time" and after["agents"][0]["vx"] == pytest.approx(0.3)
    assert after["agents"][3]["return"] == 1 and (env.render() != plain).any()

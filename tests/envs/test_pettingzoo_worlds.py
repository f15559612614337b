"""Worlds of PettingZoo behind the interface: against the worlds themselves, played by plain loops."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import train
from lbforaging.foraging import ForagingEnv
from worlds import assert_same, shown

import envs
from envs.batch import GameFailed

SPREAD = "pettingzoo:mpe2.simple_spread_v3"
# Agent a leaves after LIFE[a] steps; its actions, observations and masks differ from the others'.
LEAVING = """
import os
from os import system
from subprocess import getoutput
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

LIFE = {"ant": 2, "bee": 5, "cat": 5}


class World(ParallelEnv):
    metadata = {"name": "leaving"}
    possible_agents = list(LIFE)

    def __init__(self, ends="terminated", masks="observation", fault=""):
        self.ends, self.masks, self.fault = ends, masks, fault

    def observation_space(self, agent):
        size = 1 + self.possible_agents.index(agent)
        seen = {"observation": spaces.Box(-1e3, 1e3, (size,)), "action_mask": spaces.Box(0, 1, (size + 1,), np.int8)}
        return spaces.Dict(seen) if self.masks == "observation" else seen["observation"]

    def action_space(self, agent):
        return spaces.Discrete(2 + self.possible_agents.index(agent), start=7)

    def look(self):
        observations, infos = {}, {}
        for a, agent in enumerate(self.possible_agents):
            size = 2 if self.fault == "short" and self.time and agent == "cat" else a + 1
            seen, mask = np.full(size, self.seed % 100 + self.time / 8), np.ones(a + 2, np.int8)
            mask[self.time % 2] = 0
            both = {"observation": seen, "action_mask": mask}
            observations[agent] = both if self.masks == "observation" else seen
            infos[agent] = {"action_mask": mask} if self.masks == "info" else {}
        return observations, infos

    def reset(self, seed=None, options=None):
        self.seed, self.time, self.agents = seed, 0, list(LIFE)
        return self.look()

    def step(self, actions):
        assert list(actions) == self.agents and all(self.action_space(a).contains(actions[a]) for a in actions), actions
        self.time += 1
        if self.fault == "raise":
            raise RuntimeError("it is broken")
        if self.fault == "die":
            os._exit(1)
        if self.fault == "nan":
            self.seed = np.nan
        rewards = {agent: actions[agent] + self.possible_agents.index(agent) / 10 for agent in self.agents}
        leaves = {agent: LIFE[agent] <= self.time for agent in self.agents}
        late = {agent: leaves[agent] and self.ends == "truncated" and LIFE[agent] == 5 for agent in self.agents}
        terminations = {agent: leaves[agent] and not late[agent] for agent in self.agents}
        self.agents = [agent for agent in self.agents if not leaves[agent]]
        observations, infos = self.look()
        return observations, rewards, terminations, late, infos


def continuous():
    world = World()
    world.action_space = lambda agent: spaces.Box(0, 1, (2,))
    return world


def something():
    return {}
"""
FORAGING = """
from gymnasium import spaces
from lbforaging.foraging import ForagingEnv
from pettingzoo import ParallelEnv


class parallel_env(ParallelEnv):
    metadata = {"name": "foraging"}
    possible_agents = ["one", "two"]

    def __init__(self, **options):
        self.world = ForagingEnv(**options)
        self.observation_space = dict(zip(self.possible_agents, self.world.observation_space)).get
        self.action_space = dict(zip(self.possible_agents, self.world.action_space)).get

    def named(self, values):
        return dict(zip(self.possible_agents, values))

    def reset(self, seed=None, options=None):
        observations, _ = self.world.reset(seed=seed)
        self.agents = list(self.possible_agents)
        return self.named(observations), self.named([{}, {}])

    def step(self, actions):
        observations, rewards, over, late, _ = self.world.step([actions[agent] for agent in self.agents])
        self.agents = [] if over or late else self.agents
        return self.named(observations), self.named(rewards), self.named([over] * 2), self.named([late] * 2), {}
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    (tmp_path / "leaving_world.py").write_text(LEAVING)
    (tmp_path / "foraging_world.py").write_text(FORAGING)
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(*arguments, **options):
        made.append(envs.make(*arguments, **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


def seed_of(env, match):
    """What a match's world was seeded with."""
    key, episode, *_ = env._simulation["match"][match].tolist()
    return (key + episode) % (1 << 32)


@pytest.mark.parametrize("team_reward", [False, True])
def test_simple_spread_plays_as_by_itself(make, team_reward):
    env = make(f"{SPREAD},N=2,max_cycles=6,team_reward={team_reward}", num_envs=2)
    assert (env.n_agents, env.n_actions, env.episode_limit, env.agents) == (2, 5, 6, ["agent_0", "agent_1"])
    assert env.team_reward == team_reward and env.leaving_ends != team_reward and not env.simulated
    world = importlib.import_module("mpe2.simple_spread_v3").parallel_env(N=2, max_cycles=6)
    obs, info = env.reset(seed=3)
    expected, _ = world.reset(seed=seed_of(env, match=1))
    for step in range(7):
        np.testing.assert_array_equal(obs[1], list(expected.values()))
        np.testing.assert_array_equal(info["state"][1], world.state())
        assert info["avail"].all() and info["alive"].all() and not info["won"].any()
        if step == 6:
            break
        actions = env.scripted_actions("random").clone()
        expected, rewards, *_ = world.step({agent: int(actions[1, a]) for a, agent in enumerate(env.agents)})
        obs, reward, terminated, truncated, info = env.step(actions)
        own = np.array(list(rewards.values()), np.float32)
        np.testing.assert_allclose(reward[1], own.mean() if team_reward else own, rtol=1e-6)
    assert truncated.all() and not terminated.any() and not info["invalid"].any()
    env.step(torch.zeros_like(env.actions))  # frozen
    assert not env.obs.any() and not env.reward.any() and info["avail"].sum(2).eq(1).all()


@pytest.mark.parametrize(
    ("ends", "masks"), [("terminated", "observation"), ("truncated", "info"), ("terminated", "none")]
)
def test_agents_leave_and_matches_end(make, ends, masks):
    env = make("pettingzoo:leaving_world:World", ends=ends, masks=masks, episode_limit=9)
    assert (env.n_actions, env.obs_dim, env.state_dim, env.n_agents) == (4, 3, 9, 3)
    obs, info = env.reset(seed=1)
    seed = np.float32(seed_of(env, 0) % 100)
    for time in range(6):
        last = time == 5
        alive = [time < 2, not last or ends == "truncated", not last or ends == "truncated"]
        if last and ends == "terminated":
            alive = [False, True, True]  # the match ends with them
        avail = np.zeros((3, 4), bool)
        seen = np.zeros((3, 3), np.float32)
        for a in range(3):
            avail[a, : a + 2] = alive[a]
            avail[a, time % 2] &= masks == "none"
            avail[a, 0] |= not alive[a]
            seen[a, : a + 1] = (seed + np.float32(time / 8)) * alive[a]
        np.testing.assert_array_equal(info["alive"][0], alive)
        np.testing.assert_array_equal(info["avail"][0], avail)
        np.testing.assert_array_equal(obs[0], seen)
        np.testing.assert_array_equal(info["state"][0], seen.flatten())
        if last:
            break
        actions = env.scripted_actions("random").clone()
        there = torch.tensor(alive)
        obs, reward, terminated, truncated, info = env.step(actions)
        torch.testing.assert_close(reward[0], (actions[0] + 7 + torch.arange(3) / 10) * there)
        assert (terminated.item(), truncated.item()) == (
            (ends == "terminated", ends == "truncated") if time == 4 else (0, 0)
        )


def test_a_match_is_truncated_at_the_limit(make):
    env = make("pettingzoo:leaving_world:World", episode_limit=3, autoreset=True)
    env.reset()
    for _ in range(3):
        _, _, terminated, truncated, info = env.step(env.scripted_actions("random"))
    assert truncated.item() and not terminated.item() and env.steps.item() == 0
    assert info["alive"].all() and info["final_obs"][0, 0].eq(0).all() and info["final_obs"][0, 1, 0] > 0


def test_the_same_seed_plays_the_same_matches(make):
    first, second = (make("pettingzoo:leaving_world:World", num_envs=n, episode_limit=9) for n in (2, 1))
    for seed in (5, None, 5):
        expected = {name: values[:1] for name, values in shown(first.reset(seed=seed)).items()}
        assert_same(expected, shown(second.reset(seed=seed)))


def test_lbforaging_plays_as_by_itself(make):
    options = {
        "players": 2, "min_player_level": 1, "max_player_level": 2, "min_food_level": 1, "max_food_level": None,
        "field_size": (5, 5), "max_num_food": 2, "sight": 5, "max_episode_steps": 8, "force_coop": False,
    }  # fmt: skip
    env = make("pettingzoo:foraging_world", episode_limit=8, **options)
    world = ForagingEnv(**options)
    obs, _ = env.reset(seed=2)
    expected, _ = world.reset(seed=seed_of(env, 0))
    for _ in range(8):
        np.testing.assert_array_equal(obs[0], expected)
        actions = env.scripted_actions("random").clone()
        expected, rewards, over, late, _ = world.step(actions[0].tolist())
        obs, reward, terminated, truncated, _ = env.step(actions)
        np.testing.assert_allclose(reward[0], rewards, rtol=1e-6)
        assert (terminated.item(), truncated.item()) == (over, late and not over)
        if over or late:
            break
    assert over or late


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise", "RuntimeError: it is broken"),
        ("die", "its process died"),
        ("nan", "not finite"),
        ("short", "the observation of cat has 2 numbers, but its space has 3"),
    ],
)
def test_a_world_that_fails_makes_its_match_invalid(make, fault, reason):
    env = make("pettingzoo:leaving_world:World", fault=fault, episode_limit=9)
    env.reset()
    with pytest.warns(RuntimeWarning, match=reason):
        _, _, _, truncated, info = env.step(env.scripted_actions("random"))
    assert info["invalid"].all() and truncated.all() and env.restarts == 1
    if fault == "raise":
        with pytest.raises(GameFailed, match="failed 5 times in a row"), pytest.warns(RuntimeWarning):
            for _ in range(5):
                env.reset()
                env.step(env.scripted_actions("random"))


@pytest.mark.parametrize(
    ("env_id", "reason"),
    [
        ("pettingzoo:no_such_package.world_v1", "no module no_such_package.*pip install no_such_package"),
        ("pettingzoo:mpe2.no_such_world", "No module named 'mpe2.no_such_world'"),
        ("pettingzoo:", "looks like pettingzoo:mpe2.simple_spread_v3"),
        ("pettingzoo:leaving_world", "leaving_world has no parallel_env"),
        ("pettingzoo:leaving_world:continuous", "the actions of ant are Box.*only Discrete"),
        ("pettingzoo:leaving_world:World", "episode_limit=100"),
        ("pettingzoo:leaving_world:something", "returns dict, which is no ParallelEnv"),
        ("pettingzoo:leaving_world:LIFE", "leaving_world:LIFE is no subclass of PettingZoo's ParallelEnv"),
        ("pettingzoo:leaving_world:system,command='echo > called'", "is no subclass"),
        ("pettingzoo:leaving_world:getoutput,cmd='echo > called'", "is no subclass"),
        ("pettingzoo:subprocess:getoutput,cmd='echo > called'", "subprocess is a module of Python itself"),
        (f"{SPREAD},color=3", "unexpected keyword argument 'color'"),
        (f"{SPREAD},team_reward=3", "team_reward is True or False"),
        (f"{SPREAD},step_timeout=0", "step_timeout is a number of seconds"),
    ],
)
def test_worlds_that_cannot_be_played(make, env_id, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=reason) as error:
        make(env_id)
    assert "\n" not in str(error.value) and not Path("called").exists()


def test_pictures_are_the_worlds_own(make):
    env = make(f"{SPREAD},max_cycles=3")
    env.reset()
    with pytest.raises(ValueError, match=f"in its id, {SPREAD},max_cycles=3,render_mode=rgb_array$"):
        env.render()
    env = make(f"{SPREAD},max_cycles=3,render_mode=rgb_array")
    env.reset()
    picture = env.render(size=100)
    assert picture.shape == (100, 100, 3) and picture.dtype == np.uint8 and picture.std() > 0


def test_iql_trains_among_scripted_others(tmp_path):
    options = {"env_id": f"{SPREAD},max_cycles=5", "num_envs": 2, "buffer_size": 64, "total_timesteps": 300}
    names = train("iql", tmp_path, team="2random1learner", **options)
    names["env"].close()
    assert names["learner"].updates > 0 and names["run"].progress["complete"]
    with pytest.raises(SystemExit, match="max_cycles=5,render_mode=rgb_array"):
        train("iql", tmp_path, capture_video=True, **options)
    assert names["team"].used == [0] and names["eval_env"] is names["env"]

"""One match of a PettingZoo environment, as envs/external/worker.py plays it in a process of its own."""

import importlib
import inspect

import numpy as np
from gymnasium import spaces


class Game:
    """A parallel environment as arrays: a row for every possible agent, observations padded to the longest."""

    def __init__(self, options):
        self._options, self._env = options, None

    def sizes(self):
        """(names of the agents, (actions, numbers of an observation, numbers of the state, most steps))"""
        env = self._open()
        env.reset(seed=0)
        self._obs_dim = max(map(spaces.flatdim, self._obs_spaces))
        try:
            state_dim, self._has_state = np.size(env.state()), True
        except (NotImplementedError, AttributeError):
            state_dim, self._has_state = len(self._agents) * self._obs_dim, False  # the observations of all agents
        limit = self._options["episode_limit"] or getattr(env.unwrapped, "max_cycles", None)
        if not isinstance(limit, (int, np.integer)) or limit < 1:
            raise ValueError("it does not say how long a match is: episode_limit=100, for instance, in the id")
        self._limit = int(limit)
        return [str(agent) for agent in self._agents], (self._n_actions, self._obs_dim, state_dim, self._limit)

    def _open(self):
        module, function = self._options["module"], self._options["function"]
        make = getattr(importlib.import_module(module), function, None)
        if make is None:
            raise ValueError(f"the module {module} has no {function}")
        self._env = env = call(make, module, function, self._options["settings"])
        self._agents = list(env.possible_agents)
        self._actions = [env.action_space(agent) for agent in self._agents]
        for agent, space in zip(self._agents, self._actions):
            if not isinstance(space, spaces.Discrete):
                raise ValueError(f"the actions of {agent} are {space}, but only Discrete ones can be played")
        self._n_actions = int(max(space.n for space in self._actions))
        self._obs_spaces = [without_mask(env.observation_space(agent)) for agent in self._agents]
        return env

    def reset(self, seed, anew):
        if self._env is None:
            self.sizes()
        self._steps = 0
        observations, infos = self._env.reset(seed=seed)
        alive = [agent in self._env.agents for agent in self._agents]
        return self._look(observations, infos, alive)

    def step(self, actions):
        env = self._env
        listed = list(env.agents)
        given = {
            agent: int(action + space.start)
            for agent, action, space in zip(self._agents, actions, self._actions)
            if agent in listed
        }
        observations, rewards, terminations, truncations, infos = env.step(given)
        self._steps += 1
        terminated = {agent for agent in listed if terminations.get(agent)}
        truncated = {agent for agent in listed if truncations.get(agent)} - terminated
        playing = set(env.agents) - terminated - truncated
        out_of_time = (bool(playing) and self._steps >= self._limit) or (bool(truncated) and not playing)
        over = out_of_time or not playing
        if out_of_time:
            alive = playing | truncated
        else:
            alive = playing or set(listed)  # those with whom it ends
        reward = np.array([rewards.get(agent, 0.0) for agent in self._agents], np.float32)
        if not np.isfinite(reward).all():
            raise ValueError(f"rewards are {rewards}")
        if self._options["team_reward"]:
            reward[:] = reward.mean()
        won = over and any(bool(infos.get(agent, {}).get("won")) for agent in listed)
        result = reward, over and not out_of_time, out_of_time, won
        return result, self._look(observations, infos, [agent in alive for agent in self._agents])

    def _look(self, observations, infos, alive):
        obs = np.zeros((len(self._agents), self._obs_dim), np.float32)
        avail = np.zeros((len(self._agents), self._n_actions), bool)
        for a, agent in enumerate(self._agents):
            if alive[a] and agent in observations:
                seen, mask = observations[agent], infos.get(agent, {}).get("action_mask")
                if isinstance(seen, dict) and "action_mask" in seen:
                    mask = seen["action_mask"]
                    seen = {key: value for key, value in seen.items() if key != "action_mask"}
                    seen = seen["observation"] if seen.keys() == {"observation"} else seen
                row, wanted = spaces.flatten(self._obs_spaces[a], seen), spaces.flatdim(self._obs_spaces[a])
                if len(row) != wanted:
                    raise ValueError(f"the observation of {agent} has {len(row)} numbers, but its space has {wanted}")
                obs[a, : len(row)] = row
                avail[a, : self._actions[a].n] = True if mask is None else np.asarray(mask, bool)
            if not avail[a].any():  # dead, or nothing to choose
                avail[a, 0] = True
        state = np.ravel(self._env.state()).astype(np.float32) if self._has_state else obs.flatten()
        if not (np.isfinite(obs).all() and np.isfinite(state).all()):
            raise ValueError("an observation or the state has a number that is not finite")
        return obs, state, avail, np.array(alive)

    def render(self):
        return np.asarray(self._env.render())

    def close(self):
        if self._env is not None:
            self._env.close()


def call(make, module, function, settings):
    """The environment that a class or function makes. Nothing else is called, whatever an id names."""
    from pettingzoo import ParallelEnv  # an error here is a reply to who asked, one at the start of this file is not

    if inspect.isclass(make):
        fits = issubclass(make, ParallelEnv)
    else:  # of the same package, or what PettingZoo's parallel_wrapper_fn makes
        packages = module.partition(".")[0], "pettingzoo"
        fits = inspect.isfunction(make) and make.__module__.partition(".")[0] in packages
    if not fits:
        raise ValueError(f"{module}:{function} is no subclass of PettingZoo's ParallelEnv, and no function of {module}")
    env = make(**settings)
    if not isinstance(env, ParallelEnv):
        raise ValueError(f"{module}:{function} returns {type(env).__name__}, which is no ParallelEnv of PettingZoo")
    return env


def without_mask(space):
    """What there is to see in an observation beside the mask of its actions."""
    if not isinstance(space, spaces.Dict) or "action_mask" not in space.spaces:
        return space
    seen = {key: part for key, part in space.spaces.items() if key != "action_mask"}
    return seen["observation"] if seen.keys() == {"observation"} else spaces.Dict(seen)

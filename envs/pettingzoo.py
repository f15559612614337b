"""Any environment as a PettingZoo `ParallelEnv`: one match, NumPy arrays, a dictionary entry for each agent.

    env = parallel_env("3m", render_mode="rgb_array")
    observations, infos = env.reset(seed=0)
    while env.agents:
        masks = {agent: observations[agent]["action_mask"] for agent in env.agents}
        actions = {agent: env.action_space(agent).sample(mask) for agent, mask in masks.items()}
        observations, rewards, terminations, truncations, infos = env.step(actions)

An action that is not available counts as stop (stay in the stag hunt).
"""

import numpy as np
from gymnasium import spaces
from gymnasium.utils import EzPickle

import envs

try:
    from pettingzoo import ParallelEnv
except ImportError as error:
    raise ImportError('envs.pettingzoo needs PettingZoo: pip install -e ".[pettingzoo]"') from error


class parallel_env(ParallelEnv, EzPickle):
    """One match of `envs.make(env_id)`, whose options it takes. Who dies or leaves is terminated and no longer listed.

    With `mask_in="info"` an observation is a plain array, and infos[agent]["action_mask"] has the mask. With
    `keep_dead` all are listed until the match ends: the dead see zeros, can do nothing and share in the team's reward.
    Copies and pickles are new matches, made with the same arguments.
    """

    def __init__(self, env_id, render_mode=None, seed=0, mask_in="observation", keep_dead=False, **options):
        EzPickle.__init__(self, env_id, render_mode, seed, mask_in, keep_dead, **options)
        if mask_in not in ("observation", "info"):
            raise ValueError(f'mask_in is "observation" or "info", not {mask_in!r}')
        self.mask_in, self.keep_dead = mask_in, keep_dead
        self._batch = batch = envs.make(env_id, 1, "cpu", seed, autoreset=False, check=False, **options)
        self.metadata = {"name": env_id, "render_modes": ["rgb_array"], "render_fps": 4, "is_parallelizable": True}
        self.render_mode = render_mode
        self.possible_agents, self.agents = list(batch.agents), []
        seen = batch.single_observation_space
        own = {agent: spaces.Box(seen.low[a], seen.high[a], dtype=seen.dtype) for a, agent in enumerate(batch.agents)}
        mask = spaces.Box(0, 1, (batch.n_actions,), np.int8)
        with_mask = {agent: spaces.Dict(observation=own[agent], action_mask=mask) for agent in batch.agents}
        self._observation_spaces = with_mask if mask_in == "observation" else own
        self._action_spaces = {agent: spaces.Discrete(batch.n_actions) for agent in batch.agents}
        self.state_space = spaces.Box(-np.inf, np.inf, (batch.state_dim,), np.float32)

    def observation_space(self, agent):
        return self._observation_spaces[agent]

    def action_space(self, agent):
        return self._action_spaces[agent]

    def reset(self, seed=None, options=None):
        obs, self._info = self._batch.reset(seed=seed)
        self.agents = list(self.possible_agents)
        return self._outputs(obs, won=False)

    def step(self, actions):
        for agent in self.agents:
            if agent not in actions or not isinstance(actions[agent], (int, np.integer)):
                given = actions.get(agent, "nothing")
                raise ValueError(f"the action of {agent} is one of 0 to {self._batch.n_actions - 1}, not {given!r}")
        for a, agent in enumerate(self.possible_agents):
            self._batch.actions[0, a] = int(actions[agent]) if agent in self.agents else 0
        obs, reward, terminated, truncated, info = self._batch.step(self._batch.actions)
        alive = dict(zip(self.possible_agents, info["alive"][0].tolist()))
        earned = dict(zip(self.possible_agents, reward[0].tolist()))
        over, out_of_time = terminated.item(), truncated.item()
        observations, infos = self._outputs(obs, info["won"].item())
        rewards = {agent: earned[agent] for agent in self.agents}
        # the dead leave at once, or if they are kept at the time limit, unless they share in the team's reward
        dead_leave = not self.keep_dead or (out_of_time and not self._batch.team_reward)
        terminations = {agent: over or (dead_leave and not alive[agent]) for agent in self.agents}
        truncations = {agent: out_of_time and not terminations[agent] for agent in self.agents}
        self.agents = [agent for agent in self.agents if not terminations[agent] and not truncations[agent]]
        return observations, rewards, terminations, truncations, infos

    def state(self):
        return self._info["state"][0].numpy().copy()

    def render(self):
        if self.render_mode != "rgb_array":  # PettingZoo's render test makes one in every mode, so not refused earlier
            raise ValueError(f'render() needs render_mode="rgb_array", not {self.render_mode!r}')
        return self._batch.render()

    def _outputs(self, obs, won):
        """(observations, infos) of the agents that are listed"""
        obs, masks = obs[0].numpy().copy(), self._info["avail"][0].numpy().astype(np.int8)
        observations, infos = {}, {}
        for a, agent in enumerate(self.possible_agents):
            if agent not in self.agents:
                continue
            if self.mask_in == "observation":
                observations[agent], infos[agent] = {"observation": obs[a], "action_mask": masks[a]}, {"won": won}
            else:
                observations[agent], infos[agent] = obs[a], {"won": won, "action_mask": masks[a]}
        return observations, infos

"""One learner among scripted policies, as a Gymnasium environment. `import envs` registers `omg/<id>-v0`.

    env = gymnasium.make("omg/3m-v0", others=("nearest", "weakest"), seat="random")
    many = gymnasium.make_vec("omg/3m-v0", num_envs=64, others=("nearest", "weakest"), seat="random")

In each match every other seat draws a policy from the roster `others`. The observation is the learner's own, the reward
its own, and an action that is not available counts as stop (stay in the stag hunt). `info` has `action_mask`, `state`
and `won`; `action_masks()` is the mask as booleans. All random numbers follow from the seed of `reset`, and match i is
the same however many are played with it, so that `make` plays match 0 of `make_vec`.
"""

import contextlib
from typing import ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

import envs


class Matches:
    """What both environments below share: a batch in which one seat of each match is played from outside."""

    def __init__(self, env_id, num_envs, others, seat, options):
        self.batch = batch = envs.make(env_id, num_envs, device="cpu", seed=0, autoreset=False, check=False, **options)
        if others is None:
            others = batch.default_others or batch.policies
        if isinstance(others, str) or not others or not set(others) <= set(batch.policies):
            raise ValueError(f"others is a tuple of some of {', '.join(batch.policies)}, not {others!r}")
        if seat != "random" and seat not in range(batch.n_agents):
            raise ValueError(f'seat is "random" or one of 0 to {batch.n_agents - 1}, not {seat!r}')
        self.roster, self.chosen_seat = [batch.policies.index(policy) for policy in others], seat
        self.streams = None  # a random generator for each match
        self.rows = torch.arange(num_envs)
        self.seat = torch.zeros(num_envs, dtype=torch.int64)
        self.policy = torch.zeros((num_envs, batch.n_agents), dtype=torch.int64)
        seen = batch.single_observation_space
        self.observation_space = spaces.Box(seen.low[0], seen.high[0], dtype=seen.dtype)
        self.action_space = spaces.Discrete(batch.n_actions)

    def reset(self, env, seed):
        """Starts all matches; with a seed, or for the first time, from the random numbers of `env`."""
        if seed is not None or self.streams is None:
            seed, self.streams = env.np_random_seed, env.np_random.spawn(self.batch.num_envs)
        return self.start(np.ones(self.batch.num_envs, dtype=bool), seed)

    def start(self, mask, seed=None):
        obs, info = self.batch.reset(seed=seed, mask=mask)
        for m in np.flatnonzero(mask):
            stream, agents = self.streams[m], self.batch.n_agents
            self.policy[m] = torch.as_tensor(stream.choice(self.roster, agents))
            self.seat[m] = int(stream.integers(agents)) if self.chosen_seat == "random" else self.chosen_seat
        return self._own(obs).numpy(), self._shown(info)

    def step(self, actions):
        actions = self._whole(actions)
        played = self.batch.scripted_actions(self.policy)
        played[self.rows, self.seat] = actions
        obs, reward, terminated, truncated, info = self.batch.step(played)
        if not self.batch.team_reward:  # those who share in the team's reward stay to the end, dead or not
            terminated = terminated | ~self._own(info["alive"])
        truncated = truncated & ~terminated
        reward = self._own(reward).double()  # as Gymnasium's own vector environments have it
        return self._own(obs).numpy(), reward.numpy(), terminated.numpy().copy(), truncated.numpy(), self._shown(info)

    def action_masks(self):
        """Which actions the learners can take now, (num_envs, n_actions) booleans."""
        return self._own(self.batch.info["avail"]).numpy()

    def _whole(self, actions):
        with contextlib.suppress(TypeError, ValueError):
            array = np.asarray(actions)
            if array.shape == (self.batch.num_envs,) and array.dtype.kind in "iu":
                return torch.as_tensor(array.astype(np.int64))
        raise ValueError(f"actions are integers of shape ({self.batch.num_envs},), not {actions!r}")

    def _own(self, tensor):
        """A copy of what belongs to the learners."""
        return tensor[self.rows, self.seat]

    def _shown(self, info):
        masks = self.action_masks().astype(np.int8)  # the type that Discrete.sample wants
        return {"action_mask": masks, "state": info["state"].numpy().copy(), "won": info["won"].numpy().copy()}


def of_match(info, m):
    return {"action_mask": info["action_mask"][m], "state": info["state"][m], "won": bool(info["won"][m])}


class OneLearner(gymnasium.Env):
    """One match at a time. The options are those of `envs.make`."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(self, env_id, others=None, seat=0, render_mode=None, **options):
        self._matches = Matches(env_id, 1, others, seat, options)
        self.observation_space, self.action_space = self._matches.observation_space, self._matches.action_space
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        obs, info = self._matches.reset(self, seed)
        return obs[0], of_match(info, 0)

    def step(self, action):
        obs, reward, terminated, truncated, info = self._matches.step([action])
        return obs[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), of_match(info, 0)

    def action_masks(self):
        """Which actions can be taken now, (n_actions,) booleans: what sb3-contrib's MaskablePPO asks for."""
        return self._matches.action_masks()[0]

    def render(self):
        return self._matches.batch.render() if self.render_mode == "rgb_array" else None


class OneLearnerVector(gymnasium.vector.VectorEnv):
    """`num_envs` matches in one batch. A match that is over gives way to the next in the same step."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 4, "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, env_id, num_envs=1, others=None, seat=0, render_mode=None, **options):
        self._matches = Matches(env_id, num_envs, others, seat, options)
        self.num_envs, self.render_mode = num_envs, render_mode
        self.single_observation_space = self._matches.observation_space
        self.single_action_space = self._matches.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        obs, info = self._matches.reset(self, seed)
        return obs, self._all_of(info)

    def step(self, actions):
        obs, reward, terminated, truncated, info = self._matches.step(actions)
        final, over = {}, terminated | truncated
        if over.any():
            for m in np.flatnonzero(over):
                final = self._add_info(final, {"final_obs": obs[m], "final_info": of_match(info, m)}, m)
            obs, info = self._matches.start(over)
        return obs, reward, terminated, truncated, final | self._all_of(info)

    def render(self):
        if self.render_mode != "rgb_array":
            return None
        return tuple(self._matches.batch.render(m) for m in range(self.num_envs))

    def _all_of(self, info):
        """With Gymnasium's marks of which matches have the entry: all."""
        return info | {f"_{key}": np.ones(self.num_envs, dtype=bool) for key in info}

"""One game of StarCraft II, as envs/external/worker.py plays it in a process of its own."""

import importlib
from pathlib import Path

import numpy as np

UNIT = ("x", "y", "radius", "health", "max_health", "shield", "max_shield")  # the columns of what is sent of a unit


class Game:
    """SMAC's environment with its traps taken out."""

    def __init__(self, options):
        self._options, self._env, self._has_ended_a_match = options, None, False

    def _new(self, seed):
        smac = importlib.import_module("smac.env")
        # without continuing_episode SMAC does not tell a time limit from a defeat
        return smac.StarCraft2Env(seed=seed, continuing_episode=True, **self._options)

    def sizes(self):
        info = self._new(seed=None).get_env_info()
        return tuple(int(info[key]) for key in ("n_actions", "obs_shape", "state_shape", "episode_limit"))

    def reset(self, seed, anew):
        # SMAC launches the game in every reset until a match has ended, and forgets the one that was running
        if anew or not self._has_ended_a_match:
            self.close()
            self._env, self._has_ended_a_match = self._new(seed), False
        self._env.reset()
        return self._look()

    def step(self, actions):
        reward, over, info = self._env.step(actions)
        if over and not info:
            raise RuntimeError("the game crashed")
        self._has_ended_a_match |= over
        truncated = bool(info.get("episode_limit"))
        result = float(reward), over and not truncated, truncated, bool(info.get("battle_won"))
        return result, self._look()

    def _look(self):
        env = self._env
        if env.force_restarts:  # SMAC has put a new game in the place of one that crashed, but not its units
            raise RuntimeError("the game crashed")
        obs, state = np.array(env.get_obs(), np.float32), np.array(env.get_state(), np.float32)
        if self._options.get("obs_timestep_number"):
            obs = np.delete(obs, -2, axis=1)  # SMAC leaves an empty column before the time, which its sizes leave out
            state = obs.flatten() if self._options.get("obs_instead_of_state") else state
        avail = np.array(env.get_avail_actions(), bool)
        units = [env.agents[a] for a in range(env.n_agents)] + [env.enemies[e] for e in range(env.n_enemies)]
        units = [(u.pos.x, u.pos.y, u.radius, u.health, u.health_max, u.shield, u.shield_max) for u in units]
        return obs, state, avail, np.array(units, np.float32), (env.map_x, env.map_y)

    def save_replay(self, folder, prefix):
        if self._env is None:
            raise RuntimeError("it has not been started")
        folder = Path(folder)
        self._env.replay_dir, self._env.replay_prefix = str(folder), prefix
        self._env.save_replay()
        return str(max(folder.glob(f"{prefix}_*"), key=lambda file: file.stat().st_mtime))

    def close(self):
        if self._env is not None:
            self._env.close()

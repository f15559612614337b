"""PettingZoo environments behind the interface of all others, one process to a match: slow, but every script plays it.

    env = envs.make("pettingzoo:mpe2.simple_spread_v3,N=4", num_envs=8)

docs/environments.md says what becomes of observations, rewards and ends.
"""

import importlib.util
import sys
import time

import numpy as np
import torch

from envs.batch import RUNNING, STAGE, STEP, check_flag, check_number, check_whole_number
from envs.external import pettingzoo_worker
from envs.external.processes import GameLost, GameProcess, ProcessBatch

PREFIX = "pettingzoo:"


class PettingZooWorld(ProcessBatch):
    """Matches of a parallel environment with discrete actions: `pettingzoo:module` or `pettingzoo:module:function`.

    Without `team_reward` every agent has its own reward, with it all have the mean. Options that are not named here go
    to the function.
    """

    obs_bound = float("inf")
    passed_on = None  # any

    def __init__(
        self,
        name,
        num_envs=1,
        n_agents=None,
        *,
        team_reward=False,
        episode_limit=None,
        return_scale=5.0,
        step_timeout=60.0,
        reset_timeout=300.0,
        device="cpu",
        seed=0,
        matches_per_episode=1,
        autoreset=False,
        agent_state=False,
        check=None,
        **settings,
    ):
        check_flag("team_reward", team_reward)
        check_number("return_scale", return_scale, 1e-6, 1e6)
        if episode_limit is not None:
            check_whole_number("episode_limit", episode_limit, 1, 100_000)
        module, _, function = name.removeprefix(PREFIX).partition(":")
        package = module.partition(".")[0]
        if not all(part.isidentifier() for part in (*module.split("."), function or "parallel_env")):
            raise ValueError(f"{name}: such an id looks like pettingzoo:mpe2.simple_spread_v3")
        if package in sys.stdlib_module_names:
            raise ValueError(f"{name}: {package} is a module of Python itself, which has no environments")
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{name}: there is no module {package}; its package may be: pip install {package}")
        if importlib.util.find_spec("pettingzoo") is None:
            raise ValueError(f'{name}: environments of PettingZoo need pip install -e ".[pettingzoo]"')
        self.team_reward, self.return_scale = bool(team_reward), float(return_scale)
        self._draws = settings.get("render_mode") == "rgb_array"
        options = {
            "module": module, "function": function or "parallel_env", "settings": settings,
            "team_reward": self.team_reward, "episode_limit": episode_limit,
        }  # fmt: skip
        try:
            agents, sizes = self.start(
                num_envs, lambda: GameProcess(pettingzoo_worker.__file__, options), step_timeout, reset_timeout
            )
        except GameLost as loss:
            raise ValueError(f"{name} does not start: {loss}") from None
        batch = {"autoreset": autoreset, "agent_state": agent_state, "check": check}
        super().__init__(
            name,
            num_envs,
            agents,
            sizes,
            {},
            device=device,
            seed=seed,
            matches_per_episode=matches_per_episode,
            **batch,
        )

    def _show(self, host, m, look):
        host.obs[m], host.state[m], host.avail[m], host.alive[m] = map(torch.from_numpy, look)

    def scene(self, index=0):
        """The environment's own picture of match `index`, where it was made to draw."""
        if not self._draws:
            drawn = f"{self.name},render_mode=rgb_array"
            raise ValueError(f"{self.name} draws nothing: pictures need render_mode=rgb_array in its id, {drawn}")
        self._games[index].ask("render")
        try:
            picture = self._games[index].answer(time.monotonic() + self.step_timeout)
        except GameLost as loss:
            raise ValueError(f"{self.name}: no picture of match {index}: {loss}") from None
        if picture.ndim != 3 or picture.dtype != np.uint8:
            raise ValueError(f"{self.name}: its picture is {picture.dtype} {picture.shape}, not RGB bytes")
        match, out = self._simulation["match"][index].tolist(), self._outputs
        status = "running"
        if match[STAGE] != RUNNING:
            status = "won" if out["won"][index] else "time" if out["truncated"][index] else "over"
        return {
            "game": "picture", "title": self.name, "step": match[STEP], "limit": self.episode_limit,
            "picture": picture[..., :3], "status": status,
        }  # fmt: skip

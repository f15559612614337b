"""The real StarCraft II, through oxwhirl/smac, behind the interface of the battles: one process to a game.

docs/starcraft2.md says how to install it, what is different from the battles, and what happens when a game fails.
"""

import importlib.util
import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from envs.batch import RUNNING, STAGE, STEP
from envs.battle import paths
from envs.battle.data import MAPS, TERRAINS, TYPES
from envs.battle.setup import build_units, resize
from envs.external import starcraft2_worker
from envs.external.processes import GameLost, GameProcess, ProcessBatch

STOP, ATTACK = 1, 6
SIGHT = 9.0
X, Y, RADIUS, HEALTH, MAX_HEALTH = range(5)  # of the columns starcraft2_worker.UNIT
DIFFICULTIES = tuple("123456789A")

INSTALL = 'pip install "smac @ git+https://github.com/oxwhirl/smac.git" "tensorboard==2.20.0" "wandb==0.25.0"'
MAPS_URL = "https://github.com/oxwhirl/smac/releases/download/v0.1-beta1/SMAC_Maps.zip"


class Platform(NamedTuple):
    folder: str  # where StarCraft II is looked for without SC2PATH
    binary: str  # in Versions/Base...
    get: str  # how to get it


PLATFORMS = {
    "Linux": Platform(
        "~/StarCraftII",
        "SC2_x64",
        "curl -O https://blzdistsc2-a.akamaihd.net/Linux/SC2.4.10.zip && "
        "unzip -P iagreetotheeula SC2.4.10.zip -d ~ && export SC2PATH=~/StarCraftII",
    ),
    "Darwin": Platform(
        "/Applications/StarCraft II",
        "SC2.app/Contents/MacOS/SC2",
        'install it from https://battle.net, then export SC2PATH="/Applications/StarCraft II"',
    ),
    "Windows": Platform(
        "C:/Program Files (x86)/StarCraft II",
        "SC2_x64.exe",
        'install it from https://battle.net, then setx SC2PATH "C:/Program Files (x86)/StarCraft II"',
    ),
}


def find_game(map_name):
    """StarCraft's folder; a ValueError with the command that mends it where something is missing."""
    smac = importlib.util.find_spec("smac")
    if smac is None:
        raise ValueError(f"the package smac is missing: {INSTALL}")
    places = list(smac.submodule_search_locations or [smac.origin])
    if not any((Path(place) / "env" / "starcraft2").is_dir() for place in places):
        other = f"the package smac in {places[0]} is another one (AutoML's optimiser has the same name)"
        raise ValueError(f"{other}: pip uninstall -y smac && {INSTALL}")
    if importlib.util.find_spec("pysc2") is None:
        raise ValueError(f"the package pysc2, which smac needs, is missing: {INSTALL}")

    here = PLATFORMS.get(platform.system(), PLATFORMS["Linux"])
    given = os.environ.get("SC2PATH")
    folder = Path(given or here.folder).expanduser()
    if not folder.is_dir():
        where = "where SC2PATH points" if given else "SC2PATH is not set"
        raise ValueError(f"there is no StarCraft II in {folder} ({where}): {here.get}")
    if not any(folder.glob(f"Versions/Base*/{here.binary}")):
        raise ValueError(f"{folder} has no Versions/Base*/{here.binary}, the game itself: {here.get}")
    if not (folder / "Maps" / "SMAC_Maps" / f"{map_name}.SC2Map").is_file():
        mend = f'curl -LO {MAPS_URL} && python -m zipfile -e SMAC_Maps.zip "{folder / "Maps"}"'
        raise ValueError(f"SMAC's map {map_name} is not in {folder / 'Maps' / 'SMAC_Maps'}: {mend}")
    return folder


class StarCraft2(ProcessBatch):
    """Matches of the real game on one map. docs/starcraft2.md describes the options; envs.make builds one."""

    advice = ". To try it by itself: python -m smac.examples.random_agents"
    return_scale = 20.0  # with SMAC's own settings
    policies = ("random", "hold")
    passed_on = (
        "step_mul", "move_amount", "difficulty", "game_version",
        "obs_all_health", "obs_own_health", "obs_last_action", "obs_pathing_grid", "obs_terrain_height",
        "obs_timestep_number", "obs_instead_of_state", "state_last_action", "state_timestep_number",
        "reward_sparse", "reward_only_positive", "reward_death_value", "reward_win", "reward_defeat",
        "reward_negative_scale", "reward_scale", "reward_scale_rate",
    )  # fmt: skip

    def __init__(
        self,
        name,
        num_envs=1,
        n_agents=None,
        *,
        step_timeout=60.0,
        reset_timeout=300.0,
        **options,
    ):
        smac = {option: options.pop(option) for option in self.passed_on if option in options}
        map_name = name.removeprefix("sc2/")
        spec = MAPS[map_name]
        kinds, self._facts = build_units(spec, resize(spec, None, map_name), paths.read_terrain(TERRAINS[spec.terrain]))
        agents = sum(count for count, _, _ in spec.allies)
        if n_agents not in (None, agents):
            raise ValueError(f"{name} is played by {agents} agents, not {n_agents!r}")
        if "difficulty" in smac and smac["difficulty"] not in DIFFICULTIES:
            raise ValueError(f"difficulty is one of {', '.join(map(repr, DIFFICULTIES))}, not {smac['difficulty']!r}")
        try:
            folder = find_game(map_name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

        self.unit_kinds, self.n_enemies = kinds, len(kinds) - agents
        settings, variables = {"map_name": map_name, **smac}, {"SC2PATH": str(folder)}
        try:
            sizes = self.start(
                num_envs,
                lambda: GameProcess(starcraft2_worker.__file__, settings, variables),
                step_timeout,
                reset_timeout,
            )
        except GameLost as loss:
            raise ValueError(f"{name}: smac does not start ({loss}); to install it anew: {INSTALL}") from None
        health, types = 1 + (spec.races[0] == "P"), len(TYPES[spec.types][1])  # health and shield, one-hot kind of unit
        self._own_width = health * smac.get("obs_own_health", True) + types + smac.get("obs_timestep_number", False)
        self._ally_width = 4 + health * smac.get("obs_all_health", True) + types
        names = [f"{kind}_{a}" for a, kind in enumerate(kinds[:agents])]
        super().__init__(name, num_envs, names, sizes, {}, **options)
        self._ally_width += self.n_actions * smac.get("obs_last_action", False)
        self._units = np.zeros((num_envs, len(kinds), len(starcraft2_worker.UNIT)), np.float32)
        self._map_size = (0, 0)

    def save_replay(self, index, folder="replays"):
        """Saves what the game of match `index` has played since it was launched; returns the file's path."""
        game, prefix = self._games[index], f"{self.name.removeprefix('sc2/')}_{index}"
        game.ask("save_replay", os.path.abspath(folder), prefix)
        try:
            return game.answer(time.monotonic() + self.step_timeout)
        except GameLost as loss:
            raise RuntimeError(f"{self.name}: no replay of game {index}: {loss}") from None

    @property
    def visible(self):
        allies = torch.from_numpy(self._units[:, : self.n_agents]).to(self.device)
        place, alive = allies[..., : Y + 1], allies[..., HEALTH] > 0
        near = (place.unsqueeze(1) - place.unsqueeze(2)).square().sum(-1) < SIGHT**2
        myself = torch.eye(self.n_agents, dtype=torch.bool, device=self.device)
        return near & alive.unsqueeze(1) & alive.unsqueeze(2) | myself

    def _about_others(self, column):
        own_at = self.obs_dim - self._own_width
        return (column < own_at) & (column >= own_at - (self.n_agents - 1) * self._ally_width)

    def scene(self, index=0):
        """What match `index` looks like now, to be drawn."""
        out, match = self._outputs, self._simulation["match"][index].tolist()
        status = "running"
        if match[STAGE] != RUNNING:
            status = "won" if out["won"][index] else "time" if out["truncated"][index] else "lost"
        units = [
            {"side": int(u >= self.n_agents), "kind": kind, **dict(zip(starcraft2_worker.UNIT, row))}
            for u, (kind, row) in enumerate(zip(self.unit_kinds, self._units[index].tolist()))
        ]
        return {
            "game": "battle", "title": self.name, "step": match[STEP], "limit": self.episode_limit,
            "width": self._map_size[0], "height": self._map_size[1], "sight": SIGHT,
            "ground": [], "units": units, "shots": [], "status": status,
        }  # fmt: skip

    # ---- what ProcessBatch calls ----
    def _show(self, host, m, look):
        obs, state, avail, self._units[m], self._map_size = look
        host.obs[m], host.state[m], host.avail[m] = map(torch.from_numpy, (obs, state, avail))
        host.alive[m] = torch.from_numpy(self._units[m, : self.n_agents, HEALTH] > 0)

    def _script(self, m, avail):
        """hold: attack the nearest enemy in range, else stop; a Medivac heals the nearest ally who is hurt."""
        units, facts = self._units[m], self._facts
        actions = avail[:, STOP].astype(np.int64)
        for a in range(self.n_agents):
            heals = facts["heals"][a] > 0
            targets = np.arange(self.n_agents) if heals else np.arange(self.n_agents, len(units))
            gap = np.hypot(*(units[targets, : Y + 1] - units[a, : Y + 1]).T) - units[targets, RADIUS] - units[a, RADIUS]
            if heals:
                fit = units[targets, HEALTH] < units[targets, MAX_HEALTH]
            else:
                fit = (gap <= facts["range"][a]) & ((facts["hits_air"][a] > 0) | (facts["flies"][targets] == 0))
            fit &= avail[a, ATTACK : ATTACK + len(targets)]
            if fit.any():
                actions[a] = ATTACK + np.where(fit, gap, np.inf).argmin()
        return actions

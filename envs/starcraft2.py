"""The real StarCraft II, through oxwhirl/smac, behind the interface of the battles: one process to a game.

docs/starcraft2.md says how to install it, what is different from the battles, and what happens when a game fails.
"""

import contextlib
import importlib.util
import itertools
import os
import pickle
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from envs import paths, starcraft2_worker
from envs.batch import EPISODE, FINAL, FROZEN, KEY, OVER, PLAY, RESTART, RUNNING, STAGE, STEP, Batch
from envs.battle_data import MAPS, TERRAINS, TYPES
from envs.battle_setup import build_units, resize
from envs.episodes import GameFailed

NO_OP, STOP, ATTACK = 0, 1, 6
SIGHT = 9.0
MAX_FAILURES = 5  # of a game in a row, without a match played to its end, before giving up
SECONDS_BETWEEN_CHECKS = 0.2  # whether to go on waiting for a game
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


class GameLost(Exception):
    """A game has crashed, died or not answered in time."""


class Process:
    """A game's process, seen from here."""

    def __init__(self, folder, options):
        own_group = (
            {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if os.name == "nt" else {"start_new_session": True}
        )
        self._process = subprocess.Popen(
            [sys.executable, starcraft2_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "SC2PATH": str(folder)},
            **own_group,  # Ctrl-C does not reach it, and it can be killed with the game
        )
        self._replies = queue.SimpleQueue()
        threading.Thread(target=_collect, args=(self._process.stdout, self._replies), daemon=True).start()
        self._send((sys.path, options))

    def ask(self, method, *arguments):
        self._send((method, arguments))

    def _send(self, message):
        with contextlib.suppress(OSError, ValueError):  # that it is dead is noticed where its answer is awaited
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()

    def answer(self, deadline, while_waiting=None):
        """The reply to what was asked; `while_waiting` is called again and again until then, and may raise."""
        reply = self._wait(deadline, while_waiting)
        if reply is None:
            self._replies.put(None)
            raise GameLost("its process died")
        fine, result = reply
        if not fine:
            raise GameLost(result.splitlines()[0])
        return result

    def _wait(self, deadline, while_waiting):
        while True:
            if while_waiting is not None:
                while_waiting()
            seconds_left = deadline - time.monotonic()
            try:
                # a few moments at a time: on Windows Ctrl-C is noticed only between them
                return self._replies.get(timeout=min(max(0.0, seconds_left), SECONDS_BETWEEN_CHECKS))
            except queue.Empty:
                if seconds_left <= SECONDS_BETWEEN_CHECKS:
                    self.end(deadline)
                    raise GameLost("it did not answer in time") from None

    def hang_up(self):
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def end(self, deadline):
        """Ends the process and the game: by itself until the deadline, then by force."""
        if self._process.returncode is not None:
            return
        self.hang_up()
        with contextlib.suppress(queue.Empty):
            while self._replies.get(timeout=max(0.0, deadline - time.monotonic())) is not None:
                pass
        self._replies.put(None)
        if os.name == "nt":
            tree = ["taskkill", "/F", "/T", "/PID", str(self._process.pid)]
            subprocess.run(tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        else:
            # before wait(): until then nobody else can have this number
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the system has not ended it yet, but will
            self._process.wait(starcraft2_worker.SECONDS_TO_CLOSE)


def _collect(pipe, replies):
    with pipe, contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        while True:
            replies.put(pickle.load(pipe))
    replies.put(None)


def _end_all(games):
    for game in games:
        game.hang_up()
    deadline = time.monotonic() + starcraft2_worker.SECONDS_TO_CLOSE
    for game in games:
        game.end(deadline)


class StarCraft2(Batch):
    """Matches of the real game on one map. docs/starcraft2.md describes the options; envs.make builds one."""

    simulated = False
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
        for option, value in (("step_timeout", step_timeout), ("reset_timeout", reset_timeout)):
            if not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{option} is a number of seconds above 0, not {value!r}")
        if "difficulty" in smac and smac["difficulty"] not in DIFFICULTIES:
            raise ValueError(f"difficulty is one of {', '.join(map(repr, DIFFICULTIES))}, not {smac['difficulty']!r}")
        try:
            folder = find_game(map_name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

        self.step_timeout, self.reset_timeout, self.restarts = step_timeout, reset_timeout, 0
        self.while_waiting = None  # called again and again while a game is waited for; it may raise
        self._failures = [0] * num_envs  # of each game since the last match that it played to its end
        self.unit_kinds, self.n_enemies = kinds, len(kinds) - agents
        self._new_game = lambda: Process(folder, {"map_name": map_name, **smac})
        self._games = []
        self._end = weakref.finalize(self, _end_all, self._games)  # also when it is forgotten, and at exit
        try:
            self._games += [self._new_game() for _ in range(num_envs)]
            self._games[0].ask("sizes")
            sizes = self._games[0].answer(time.monotonic() + reset_timeout)
        except GameLost as loss:
            self.close()
            raise ValueError(f"{name}: smac does not start ({loss}); to install it anew: {INSTALL}") from None
        except BaseException:  # Ctrl-C
            self.close()
            raise
        health, types = 1 + (spec.races[0] == "P"), len(TYPES[spec.types][1])  # health and shield, one-hot kind of unit
        self._own_width = health * smac.get("obs_own_health", True) + types + smac.get("obs_timestep_number", False)
        self._ally_width = 4 + health * smac.get("obs_all_health", True) + types
        names = [f"{kind}_{a}" for a, kind in enumerate(kinds[:agents])]
        super().__init__(name, num_envs, names, sizes, {}, **options)
        self._ally_width += self.n_actions * smac.get("obs_last_action", False)
        self._outputs["avail"][:, :, NO_OP] = True
        self._units = np.zeros((num_envs, len(kinds), len(starcraft2_worker.UNIT)), np.float32)
        self._map_size = (0, 0)

    def close(self):
        self._end()

    def snapshot(self):
        raise NotImplementedError("the real game can be neither saved nor restored; the battles can: envs.make('8m')")

    def restore(self, snapshot):
        self.snapshot()

    def save_replay(self, index, folder="replays"):
        """Saves what the game of match `index` has played since it was launched; returns the file's path."""
        game, prefix = self._games[index], f"{self.name.removeprefix('sc2/')}_{index}"
        game.ask("save_replay", os.path.abspath(folder), prefix)
        try:
            return game.answer(time.monotonic() + self.step_timeout)
        except GameLost as loss:
            raise RuntimeError(f"{self.name}: no replay of game {index}: {loss}") from None

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

    # ---- what Batch calls ----
    def _run(self, op):
        if not self._end.alive:
            raise RuntimeError(f"{self.name} is closed")
        try:
            with self._on_host() as host:
                if op == PLAY:
                    self._play(host)
                elif op == RESTART:
                    self._restart(host, host.mask.nonzero().flatten().tolist())
        except BaseException:  # Ctrl-C too: half a step cannot be played on
            self.close()
            raise

    def _act(self):
        with self._on_host() as host:
            for m in range(self.num_envs):
                avail, match = host.avail[m].numpy(), host.match[m]
                draw = np.random.default_rng([int(match[KEY]), int(match[EPISODE]) + 1, int(match[STEP])])
                at_random = np.where(avail, draw.random(avail.shape), -1.0).argmax(1)
                chosen = np.where(host.policy[m] == self.policies.index("random"), at_random, self._hold(m, avail))
                host.scripted[m] = torch.from_numpy(chosen)

    @contextlib.contextmanager
    def _on_host(self):
        """The batch's tensors by name in the CPU's memory; what is written there is then in the batch."""
        tensors = {**self._tensors(), "invalid": self._info["invalid"]}
        host = {name: tensor.cpu() for name, tensor in tensors.items()}  # on the CPU these are the batch's own
        yield types.SimpleNamespace(**host)
        for name, tensor in tensors.items():
            tensor.copy_(host[name])

    # ---- playing ----
    def _play(self, host):
        stage = host.match[:, STAGE]
        running = (stage == RUNNING).nonzero().flatten().tolist()
        over = stage == OVER
        for name in ("obs", "state", "reward", "alive", "avail"):
            getattr(host, name)[over] = 0
        host.avail[over, :, NO_OP] = True
        stage[over] = FROZEN

        known = host.actions.clamp(0, self.n_actions - 1)
        fine = (known == host.actions) & host.avail.gather(2, known.unsqueeze(2)).squeeze(2)
        actions = torch.where(fine, known, host.avail[:, :, STOP].long())  # stop for the living, no-op for the dead
        replies = self._ask({m: ("step", actions[m].tolist()) for m in running}, self.step_timeout)
        for m, reply in replies.items():
            result = (0.0, False, True, False)
            if reply is not None:
                result, look = reply
                self._show(host, m, look)
                if result[1] or result[2]:
                    self._failures[m] = 0
            host.reward[m], host.terminated[m], host.truncated[m], host.won[m] = result
            host.invalid[m] = reply is None
            host.match[m, STEP] += 1
        ended = [m for m in running if host.terminated[m] or host.truncated[m]]
        stage[ended] = OVER
        if self.autoreset and ended:
            for name in FINAL:
                getattr(host, name)[ended] = getattr(host, name.removeprefix("final_"))[ended]
            self._begin(host, ended)

    def _restart(self, host, matches):
        for name in ("reward", "terminated", "truncated", "won", "invalid"):
            getattr(host, name)[matches] = 0
        self._begin(host, matches)

    def _begin(self, host, matches):
        seeded = {m for m in matches if host.match[m, EPISODE] < 0}
        host.match[matches, EPISODE] += 1
        host.match[matches, STEP] = 0
        host.match[matches, STAGE] = RUNNING
        for attempt in itertools.count():  # up to MAX_FAILURES in a row
            seeds = {m: int(host.match[m, KEY] + host.match[m, EPISODE] + attempt) % (1 << 32) for m in matches}
            replies = self._ask({m: ("reset", seeds[m], m in seeded) for m in matches}, self.reset_timeout)
            for m, look in replies.items():
                if look is not None:
                    self._show(host, m, look)
            matches = [m for m, look in replies.items() if look is None]
            if not matches:
                return

    def _ask(self, requests, timeout):
        """The games' answers by match; None where the game failed, and another has been put in its place."""
        for m, request in requests.items():
            self._games[m].ask(*request)
        deadline = time.monotonic() + timeout
        answers = {}
        for m in requests:
            try:
                answers[m] = self._games[m].answer(deadline, self.while_waiting)
            except GameLost as loss:
                answers[m] = None
                self._replace(m, loss)
        return answers

    def _replace(self, m, loss):
        """Puts a new game in the place of one that failed, unless it has failed too often."""
        self._failures[m] += 1
        if self._failures[m] == MAX_FAILURES:
            raise GameFailed(
                f"{self.name}: game {m} failed {MAX_FAILURES} times in a row without finishing a match "
                f"(the last time: {loss}). To try it by itself: python -m smac.examples.random_agents"
            )
        self.restarts += 1
        message = f"{self.name}: game {m} is restarted (restart {self.restarts}): {loss}"
        warnings.warn(message, RuntimeWarning, stacklevel=6)
        self._games[m].end(deadline=0.0)
        self._games[m] = self._new_game()

    def _show(self, host, m, look):
        obs, state, avail, self._units[m], self._map_size = look
        host.obs[m], host.state[m], host.avail[m] = map(torch.from_numpy, (obs, state, avail))
        host.alive[m] = torch.from_numpy(self._units[m, : self.n_agents, HEALTH] > 0)

    def _hold(self, m, avail):
        """Attack the nearest enemy within weapon range, else stop; a Medivac heals the nearest ally who is hurt."""
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

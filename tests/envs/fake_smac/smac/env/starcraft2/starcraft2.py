"""A stand-in for oxwhirl/smac: its methods, its quirks and its faults, with a process that sleeps for the game.

The folder FAKE_SMAC holds what tests and games tell each other. The games note in `pids` the number of every process,
in `launches` the seed of every launch, in `hangs` who hangs. The tests say in `south` how it fails when agent 0 goes
south (crash, error, exit, hang or die), in `every_step` how it always fails, in `fail_resets` how many resets are still
to fail, in `crash_resets` in how many the game crashes and SMAC starts another, with `hang_resets` that they hang, with
`broken` that smac cannot be used, with `hang_replay` what it says, in `seconds_to_close` how long the process of a game
waits before it ends a game that hangs.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

SIZES = {"3m": (3, 3, 6), "MMM": (10, 10, 6)}  # agents, enemies, a limit short enough for tests
SOUTH, ATTACK = 3, 6


def note(name, line):
    with open(Path(os.environ["FAKE_SMAC"]) / name, "a") as file:
        file.write(f"{line}\n")


def read(name):
    file = Path(os.environ["FAKE_SMAC"]) / name
    return file.read_text().strip() if file.exists() else ""


def one_less(name):
    left, file = int(read(name) or 0), Path(os.environ["FAKE_SMAC"]) / name
    part = file.with_name(f"{name}.{os.getpid()}")  # another game never reads an empty file
    part.write_text(str(max(0, left - 1)))
    os.replace(part, file)
    return left > 0


class StarCraft2Env:
    def __init__(
        self, map_name="8m", seed=None, continuing_episode=False, difficulty="7", obs_timestep_number=False,
        obs_instead_of_state=False, reward_sparse=False, replay_dir="", replay_prefix="",
    ):  # fmt: skip
        if read("broken"):
            raise TypeError("Descriptors cannot be created directly.\nAnd many more lines.")
        self.map_name, self._seed, self.continuing_episode, self.difficulty = (
            map_name,
            seed,
            continuing_episode,
            difficulty,
        )
        self.obs_timestep_number, self.obs_instead_of_state = obs_timestep_number, obs_instead_of_state
        self.reward_sparse, self.replay_dir, self.replay_prefix = reward_sparse, replay_dir, replay_prefix
        self.n_agents, self.n_enemies, self.episode_limit = SIZES[map_name]
        self.n_actions = ATTACK + self.n_enemies
        self.map_x, self.map_y = 0, 0
        self.agents, self.enemies = {}, {}
        self.force_restarts = self.battles_won = self.battles_game = self._episode_count = 0
        self._running, self._sc2_proc = False, None
        note("pids", os.getpid())
        if read("seconds_to_close"):
            sys.modules["__main__"].SECONDS_TO_CLOSE = float(read("seconds_to_close"))

    def get_env_info(self):
        obs = 3 + self.obs_timestep_number
        state = obs * self.n_agents if self.obs_instead_of_state else self.n_agents + self.n_enemies
        return {
            "n_agents": self.n_agents, "n_actions": self.n_actions, "episode_limit": self.episode_limit,
            "obs_shape": obs, "state_shape": state,
        }  # fmt: skip

    def _launch(self):
        print("the game talks on its standard output", flush=True)
        self._sc2_proc = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        note("pids", self._sc2_proc.pid)
        note("launches", self._seed)
        self._draw, self.map_x, self.map_y = np.random.default_rng(self._seed), 32, 32

    def full_restart(self):
        self.close()
        self._launch()
        self.force_restarts += 1

    def reset(self):
        if read("hang_resets"):
            note("hangs", os.getpid())
            time.sleep(600)
        if one_less("fail_resets"):
            sys.exit("Failed to create the socket.")  # as pysc2 does
        if self._episode_count == 0:
            self._launch()
        if one_less("crash_resets"):
            self.full_restart()
        self._steps, self._running = 0, True
        self.agents = {a: self._unit(10, a) for a in range(self.n_agents)}
        self.enemies = {e: self._unit(14, e) for e in range(self.n_enemies)}
        return self.get_obs(), self.get_state()

    def _unit(self, x, number):
        place = SimpleNamespace(x=x + self._draw.uniform(0, 0.05), y=10.0 + number)
        return SimpleNamespace(pos=place, health=40.0, health_max=45.0, shield=0.0, shield_max=0.0, radius=0.375)

    def step(self, actions):
        assert self._running, "a match that is over is not stepped"
        for a, action in enumerate(actions):
            assert self.get_avail_agent_actions(a)[action], f"Agent {a} cannot perform action {action}"
        fault = read("every_step") or (read("south") if actions[0] == SOUTH else "")
        if fault == "crash":
            return 0, True, {}
        if fault == "error":
            raise ConnectionError("the socket is gone")
        if fault == "exit":
            sys.exit("Failed to create the socket.")
        if fault == "hang":
            note("hangs", os.getpid())
            time.sleep(600)
        if fault == "die":
            os._exit(3)
        self._steps += 1
        for action in actions:
            if action >= ATTACK:
                self.enemies[action - ATTACK].health = max(0.0, self.enemies[action - ATTACK].health - 20)
        if actions[0] == SOUTH:
            self.agents[0].health = 0
        info, reward = {"battle_won": False}, float(sum(action >= ATTACK for action in actions))
        won = all(unit.health == 0 for unit in self.enemies.values())
        lost = all(unit.health == 0 for unit in self.agents.values())
        over = won or lost or self._steps >= self.episode_limit
        if won:
            info["battle_won"], reward = True, reward + 10
        elif over and not lost and self.continuing_episode:
            info["episode_limit"] = True
        if over:
            self._running, self._episode_count, self.battles_game = (
                False,
                self._episode_count + 1,
                self.battles_game + 1,
            )
            self.battles_won += won
        return reward, over, info

    def get_obs(self):
        rows = []
        for unit in self.agents.values():
            row = [unit.health / unit.health_max, unit.pos.x / 32, unit.pos.y / 32] if unit.health else [0.0] * 3
            rows.append(np.array(row + [0.0, self._steps / self.episode_limit] * self.obs_timestep_number))
        return rows

    def get_state(self):
        if self.obs_instead_of_state:
            return np.concatenate(self.get_obs())
        return np.array([u.health / u.health_max for u in (*self.agents.values(), *self.enemies.values())])

    def get_avail_actions(self):
        return [self.get_avail_agent_actions(a) for a in range(self.n_agents)]

    def get_avail_agent_actions(self, a):
        if not self.agents[a].health:
            return [1] + [0] * (self.n_actions - 1)
        medivac = self.map_name == "MMM" and a == self.n_agents - 1
        targets = self.agents if medivac else self.enemies
        others = [int(unit.health > 0 and unit is not self.agents[a]) for unit in targets.values()]
        return [0, 1, 1, 1, 1, 1, *others]

    def get_stats(self):
        return {"win_rate": self.battles_won / self.battles_game}

    def save_replay(self):
        if read("hang_replay"):
            time.sleep(600)
        Path(self.replay_dir).mkdir(parents=True, exist_ok=True)
        (Path(self.replay_dir) / f"{self.replay_prefix}_now.SC2Replay").write_text(f"{self._steps} steps")

    def close(self):
        if self._sc2_proc is not None:
            self._sc2_proc.kill()
            self._sc2_proc.wait()
            self._sc2_proc = None

"""A stand-in for the program StarCraft II: it speaks the game's protocol, and its matches are those of the battles.

    python tests/envs/fake_sc2.py -listen 127.0.0.1 -port 5000

pysc2 starts it as it starts the game, so that SMAC and pysc2 run unchanged. FAKE_SC2 holds settings as JSON:

    seed        of the matches, whatever seed SMAC asks for
    stay        the enemy stays where it is
    playable    [x0, y0, x1, y1], the playable area (default: the whole map)
    dies        the step at which the program ends
    once        a file: it is made when the program ends, and while it is there the program goes on
"""

import base64
import dataclasses
import hashlib
import json
import os
import socket
import struct
import sys
from pathlib import Path

import numpy as np
from s2clientprotocol import raw_pb2 as raw
from s2clientprotocol import sc2api_pb2 as sc2

import envs
from envs.battle import paths
from envs.battle.data import MAPS, TERRAINS, TYPES

SETTINGS = json.loads(os.environ.get("FAKE_SC2", "{}"))
STEP = 8  # game loops of a step of SMAC
NO_OP, STOP, NORTH, SOUTH, EAST, WEST, ATTACK = range(7)
STOP_ORDER, MOVE_ORDER, ATTACK_ORDER, HEAL_ORDER = 4, 16, 23, 386  # the abilities that SMAC uses
ALLY, ENEMY = 1, 2  # owners
ALLY_TYPES = 1900  # the first type of SMAC's own units; the enemy has StarCraft's
ENEMY_TYPES = {
    "colossus": 4, "baneling": 9, "marine": 48, "marauder": 51, "medivac": 54, "zealot": 73, "stalker": 74,
    "spinecrawler": 98, "zergling": 105, "hydralisk": 107,
}  # fmt: skip
TAGS_OF_A_MATCH = 1000


class Match:
    """One match after another of one battle, in the words of the protocol."""

    def __init__(self, map_name):
        self.spec = MAPS[map_name]
        if SETTINGS.get("stay"):
            self.spec = dataclasses.replace(self.spec, order=("stay",))
        self.env = envs.make(map_name, check=True, map_spec=self.spec)
        self.env.reset(seed=SETTINGS["seed"])
        self.number = 0
        self.steps = 0
        self.actions = {}

    def next(self):
        self.env.reset()
        self.number += 1
        self.actions = {}

    def units(self):
        allies, _ = TYPES[self.spec.types]
        values = {name: tensor[0].tolist() for name, tensor in self.env.units().items()}
        for u, scene in enumerate(self.env.scene()["units"]):
            if values["health"][u] <= 0:
                continue
            ally, kind = u < self.env.n_agents, self.env.unit_kinds[u]
            unit = raw.Unit(
                tag=TAGS_OF_A_MATCH * self.number + u + 1,
                owner=ALLY if ally else ENEMY,
                alliance=raw.Self if ally else raw.Enemy,
                unit_type=ALLY_TYPES + allies.index(kind) if ally else ENEMY_TYPES[kind],
                display_type=raw.Visible,
                health=values["health"][u],
                shield=values["shield"][u],
                energy=values["energy"][u],
                weapon_cooldown=max(0.0, values["cooldown"][u]),
                health_max=scene["max_health"],
                shield_max=scene["max_shield"],
                radius=scene["radius"],
            )
            unit.pos.x, unit.pos.y = values["x"][u], values["y"][u]
            yield unit

    def order(self, command):
        unit = (command.unit_tags[0] - 1) % TAGS_OF_A_MATCH
        target = (command.target_unit_tag - 1) % TAGS_OF_A_MATCH
        if command.ability_id == STOP_ORDER:
            action = STOP
        elif command.ability_id == MOVE_ORDER:
            here, goal = self.env.units(), command.target_world_space_pos
            east, north = goal.x - float(here["x"][0, unit]), goal.y - float(here["y"][0, unit])
            if abs(east) > abs(north):
                action = EAST if east > 0 else WEST
            else:
                action = NORTH if north > 0 else SOUTH
        elif command.ability_id == ATTACK_ORDER:
            action = ATTACK + target - self.env.n_agents
        elif command.ability_id == HEAL_ORDER:
            action = ATTACK + target
        else:
            raise ValueError(f"unknown order {command.ability_id}")
        self.actions[unit] = action

    def step(self):
        self.steps += 1
        if self.steps == SETTINGS.get("dies") and not Path(SETTINGS["once"]).exists():
            Path(SETTINGS["once"]).touch()
            os._exit(9)
        alive = self.env.units()["health"][0] > 0
        self.env.step([[self.actions.get(a, int(alive[a]) * STOP) for a in range(self.env.n_agents)]])
        self.actions = {}

    def describe(self, map_info):
        ground = paths.read_terrain(TERRAINS[self.spec.terrain])  # row 0 in the south
        height, width = ground.shape
        x0, y0, x1, y1 = SETTINGS.get("playable", (0, 0, width, height))
        area = map_info.playable_area
        area.p0.x, area.p0.y, area.p1.x, area.p1.y = x0, y0, x1, y1
        map_info.map_size.x, map_info.map_size.y = width, height
        map_info.pathing_grid.bits_per_pixel = 1
        map_info.pathing_grid.data = np.packbits(ground != paths.WALL, axis=1).tobytes()
        map_info.terrain_height.bits_per_pixel = 8
        map_info.terrain_height.data = bytes(width * height)


class Game:
    """Answers requests, one method for each kind."""

    def __init__(self):
        self.status = sc2.launched
        self.loop = 0

    def answer(self, request):
        response = sc2.Response(id=request.id)
        kind = request.WhichOneof("request")
        part = getattr(response, kind)
        part.SetInParent()
        getattr(self, kind)(getattr(request, kind), part)
        response.status = self.status
        return response

    def ping(self, request, response):
        response.game_version = "4.10.0"
        response.base_build = response.data_build = 75689

    def create_game(self, request, response):
        self.match = Match(Path(request.local_map.map_path).stem)
        self.status = sc2.init_game

    def join_game(self, request, response):
        response.player_id = ALLY
        self.status = sc2.in_game

    def game_info(self, request, response):
        self.match.describe(response.start_raw)

    def observation(self, request, response):
        response.observation.game_loop = self.loop
        response.observation.raw_data.units.extend(self.match.units())

    def action(self, request, response):
        for action in request.actions:
            self.match.order(action.action_raw.unit_command)
            response.result.append(1)  # success

    def step(self, request, response):
        self.loop += request.count
        response.simulation_loop = self.loop
        if request.count == STEP:  # SMAC takes shorter ones while it waits for the units of the next match
            self.match.step()

    def debug(self, request, response):
        self.match.next()  # SMAC kills all units, upon which its maps make new ones

    def save_replay(self, request, response):
        response.data = b"a replay"

    def quit(self, request, response):
        self.status = sc2.quit


# ---- the part of a websocket's server that pysc2 needs ----
class Connection:
    def __init__(self, listener):
        self.socket, _ = listener.accept()
        self.stream = self.socket.makefile("rb")
        headers = dict(line.split(": ", 1) for line in iter(self._line, "") if ": " in line)
        key = {name.lower(): value for name, value in headers.items()}["sec-websocket-key"]
        digest = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
        lines = [
            "HTTP/1.1 101 Switching Protocols",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Accept: {base64.b64encode(digest).decode()}",
        ]
        self.socket.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode())

    def _line(self):
        return self.stream.readline().decode().strip()

    def receive(self):
        """The next message; None at the end."""
        message = b""
        while True:
            head = self.stream.read(2)
            if len(head) < 2 or head[0] & 15 == 8:
                return None
            size = head[1] & 127
            if size >= 126:
                size = int.from_bytes(self.stream.read(2 if size == 126 else 8), "big")
            mask = np.frombuffer(self.stream.read(4), np.uint8)
            data = np.frombuffer(self.stream.read(size), np.uint8)
            message += (data ^ np.resize(mask, size)).tobytes()
            if head[0] & 128:
                return message

    def send(self, message):
        size = len(message)
        if size < 126:
            head = struct.pack("!BB", 130, size)
        elif size < 1 << 16:
            head = struct.pack("!BBH", 130, 126, size)
        else:
            head = struct.pack("!BBQ", 130, 127, size)
        self.socket.sendall(head + message)


def main():
    options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    with socket.create_server((options["-listen"], int(options["-port"]))) as listener:
        connection, game = Connection(listener), Game()
        while game.status != sc2.quit and (message := connection.receive()) is not None:
            connection.send(game.answer(sc2.Request.FromString(message)).SerializeToString())


if __name__ == "__main__":
    main()

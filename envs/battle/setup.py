"""From a map's entry in the tables to its units: who stands where, under which number, and what each can do."""

import math

import numpy as np

from envs.battle import paths
from envs.battle.data import RACES, RULES, TYPES, UNITS

LOOPS_PER_SECOND = 16
SCAN_AT_LEAST, UNLIMITED = 5.0, 1e9  # how far the enemy looks for targets
MOST_AGENTS = 100
SPAWN_SHIFT = 0.1  # a group's place varies by this much on each axis


def lattice(point, count, pitch, facing, ground):
    """`count` places on a square lattice round the point, nearest first, where a unit can stand.

    Ties go to the front: `facing` is the way to the foe, so that two sides face each other as in a mirror.
    """
    side = math.ceil(math.sqrt(count))
    half = (side - 1) / 2
    height, width = ground.shape
    places = []
    for i in range(-side, 2 * side):
        for j in range(-side, 2 * side):
            forward, sideways = (i - half) * pitch, (j - half) * pitch
            x, y = (forward * facing[0], sideways) if facing[0] else (sideways, forward * facing[1])
            corners = [
                (math.floor(point[0] + x + dx), math.floor(point[1] + y + dy))
                for dx in (-SPAWN_SHIFT, SPAWN_SHIFT)
                for dy in (-SPAWN_SHIFT, SPAWN_SHIFT)
            ]
            if all(0 <= c < width and 0 <= r < height and ground[r, c] != paths.WALL for c, r in corners):
                places.append((forward**2 + sideways**2, -forward, sideways, point[0] + x, point[1] + y))
    if len(places) < count:
        raise ValueError(f"{count} units do not fit round {point}: there is room for {len(places)}")
    return [(x, y) for *_, x, y in sorted(places)[:count]]


def muster(groups, facing, ground):
    """The units of one side as (kind, x, y, point), in the order of the groups, from the rear to the front."""
    units = [[] for _ in groups]
    for point in dict.fromkeys(point for _, _, point in groups):
        for flies in (False, True):
            here = [i for i, (_, kind, at) in enumerate(groups) if at == point and UNITS[kind].flies == flies]
            if not here:
                continue
            separation = max(UNITS[groups[i][1]].separation or UNITS[groups[i][1]].radius for i in here)
            places = lattice(point, sum(groups[i][0] for i in here), 2 * separation, facing, ground)
            for i in here:
                count, kind, _ = groups[i]
                mine, places = places[:count], places[count:]
                mine.sort(key=lambda p: (p[0] * facing[0] + p[1] * facing[1], p[1] if facing[0] else p[0]))
                units[i] = [(kind, x, y, point) for x, y in mine]
    return [unit for group in units for unit in group]


def resize(spec, n_agents, name):
    """The map's groups with n_agents allies and the map's difference in numbers."""
    if n_agents is not None and (isinstance(n_agents, bool) or not isinstance(n_agents, int)):
        raise ValueError(f"n_agents is a whole number, not {n_agents!r}")
    allies, enemies = [list(group) for group in spec.allies], [list(group) for group in spec.enemies]
    own = sum(count for count, _, _ in allies)
    if n_agents is not None and n_agents > MOST_AGENTS:
        raise ValueError(f"n_agents is at most {MOST_AGENTS}, not {n_agents}")
    extra = 0 if n_agents is None else n_agents - own
    if extra == 0:
        return allies, enemies
    if len({kind for _, kind, _ in allies}) > 1 or len({kind for _, kind, _ in enemies}) > 1:
        raise ValueError(f"{name} has several kinds of units: it is played by {own} agents, not {n_agents}")
    least = max(1, own - sum(count for count, _, _ in enemies) + 1)
    if n_agents < least:
        raise ValueError(f"{name} with n_agents={n_agents} would leave no one to fight: at least {least}")
    for side in (allies, enemies):
        turn = 0
        for _ in range(abs(extra)):
            while extra < 0 and side[turn % len(side)][0] == 0:
                turn += 1
            side[turn % len(side)][0] += 1 if extra > 0 else -1
            turn += 1
    return [g for g in allies if g[0]], [g for g in enemies if g[0]]


def centre(groups):
    return np.average([point for _, _, point in groups], axis=0, weights=[count for count, _, _ in groups])


def unit_facts(unit):
    """What never changes about a unit, by name: times in game loops."""
    facts = {
        "separation": unit.separation or unit.radius,
        "scan": max(unit.range, SCAN_AT_LEAST),
        "speed": unit.speed / LOOPS_PER_SECOND,
        "period": (unit.period + unit.recovery * RULES["recovery"]) * LOOPS_PER_SECOND,
        "hits": 1 if unit.interval and RULES["second_blow"] else unit.hits,
        "interval": unit.interval * RULES["second_blow"] * LOOPS_PER_SECOND,
        "wind_up": unit.wind_up * RULES["wind_up"] * LOOPS_PER_SECOND,
        "backswing": unit.backswing * RULES["backswing"] * LOOPS_PER_SECOND,
        "slop": unit.slop * RULES["slop"],
        "regeneration": unit.regeneration / LOOPS_PER_SECOND,
        "splash": ("", "line", "blast").index(unit.splash),
        "max_health": unit.health,
        "max_shield": unit.shield,
    }
    same = ("radius", "range", "damage", "versus_light", "versus_armoured", "armour", "light", "armoured", "biological",
            "flies", "climbs", "hits_air", "heals", "cooldown_scale")  # fmt: skip
    return facts | {name: getattr(unit, name) for name in same}


def build_kinds(race, units, ground):
    """(the kinds of a race, facts by name, distance in a crowd): columns are kinds, or units for places in a crowd."""
    kinds, pitch = RACES[race], 2 * max(UNITS[kind].separation or UNITS[kind].radius for kind in RACES[race])
    middle, side = (ground.shape[1] / 2, ground.shape[0] / 2), math.ceil(math.sqrt(units))
    side += 1 - side % 2  # odd, so that the first of a crowd stands in its middle
    crowd = np.array(lattice(middle, side**2, pitch, (1, 0), ground)[:units]) - middle
    weights = np.cumsum([recruit.weight for recruit in kinds.values()])
    facts = {"spawn_x": crowd[:, 0], "spawn_y": crowd[:, 1], "share": weights / weights[-1]}
    facts |= {"rank": [sorted(kinds).index(kind) for kind in kinds], "type_bit": range(len(kinds))}
    facts |= {"sees": [k.sight for k in kinds.values()], "reaches": [k.reach for k in kinds.values()]}
    columns = [unit_facts(UNITS[kind]) for kind in kinds]
    facts |= {name: [column[name] for column in columns] for name in columns[0]}
    padded = {}
    for name, values in facts.items():
        padded[name] = np.zeros(units, np.float32)
        padded[name][: len(values)] = values
    return list(kinds), padded, pitch


def build_units(spec, groups, ground):
    """(kinds, facts by name) of all units, allies first, numbered as SMAC numbers them."""
    allies, enemies = groups
    towards = centre(enemies) - centre(allies)
    axis = int(abs(towards[1]) > abs(towards[0]))
    facing = [0, 0]
    facing[axis] = 1 if towards[axis] >= 0 else -1
    ally_kinds, enemy_bits = TYPES[spec.types]
    ours = sorted(muster(allies, facing, ground), key=lambda unit: (ally_kinds.index(unit[0]), unit[1], unit[2]))
    theirs = muster(enemies, [-f for f in facing], ground)
    kinds = [unit[0] for unit in ours + theirs]
    points = list(dict.fromkeys([("ally", u[3]) for u in ours] + [("enemy", u[3]) for u in theirs]))

    stat = {}
    for u, (kind, x, y, point) in enumerate(ours + theirs):
        unit, ally = UNITS[kind], u < len(ours)
        group, bits = ("ally" if ally else "enemy", point), ally_kinds if ally else enemy_bits
        goal, span, hunts = np.array([x, y]), np.zeros(2), spec.order[0] == "hunt"
        if ally and not hunts:
            goal = marching_point(centre(enemies), goal - point, ground)
        elif spec.order[0] in ("go", "go_between"):
            span = np.subtract(spec.order[-1], spec.order[1])
            goal = marching_point(np.array(spec.order[1]), goal - point, ground)
        facts = {
            **unit_facts(unit),
            "type_bit": bits.index(kind) if enemy_bits else -1,
            "spawn_x": x,
            "spawn_y": y,
            "group": points.index(group),
            "order_x": goal[0],
            "order_y": goal[1],
            "span_x": span[0],
            "span_y": span[1],
        }
        if hunts:
            facts["scan"] = UNLIMITED
        for name, value in facts.items():
            stat.setdefault(name, []).append(value)
    return kinds, {name: np.array(values, np.float32) for name, values in stat.items()}


def marching_point(goal, offset, ground):
    """A unit marches to its own place round the point, if one can stand there."""
    column, row = np.floor(goal + offset).astype(int)
    free = 0 <= row < ground.shape[0] and 0 <= column < ground.shape[1] and ground[row, column] != paths.WALL
    return goal + offset if free else goal

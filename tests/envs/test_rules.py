"""The rules of a battle, one by one, from units placed by hand.

`battle` puts units of any kind on open ground. An enemy that should do nothing is a `dummy`, a kind of unit that these
tests add to the table; an enemy that should only hold its fire has a long reload ahead of it.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

import envs
from envs.battle import data as battle_data
from envs.battle.data import RULES, TERRAINS, UNITS, Map, Unit
from envs.battle.rules import HURT_AT

NO_OP, STOP, NORTH, SOUTH, EAST, WEST, ATTACK = range(7)
LOOPS, SECOND = 8, 16  # game loops in a step, in a second
DUMMY_RADIUS = 0.375
RELOADING = 1e5
SMALL = 0.01


@pytest.fixture(autouse=True)
def any_kind_of_unit(monkeypatch):
    dummy = Unit(1e6, DUMMY_RADIUS, 0.0, 0.0)
    monkeypatch.setitem(UNITS, "dummy", dummy)
    monkeypatch.setitem(UNITS, "light_dummy", dataclasses.replace(dummy, light=True))
    monkeypatch.setitem(UNITS, "flying_dummy", dataclasses.replace(dummy, flies=True))
    monkeypatch.setitem(battle_data.TYPES, "any", (tuple(UNITS), ()))


def battle(allies, enemies, order=("stay",), terrain="field", num_envs=1, limit=10_000, reloading=(), **options):
    """Units as (kind, x, y), allies in the order of the table of units; those numbered in `reloading` hold fire."""
    groups = [[(1, kind, (x, y)) for kind, x, y in side] for side in (allies, enemies)]
    spec = Map(terrain=terrain, limit=limit, races="TT", types="any", allies=groups[0], enemies=groups[1], order=order)
    env = envs.make("3m", num_envs=num_envs, map_spec=spec, check=False, **options)
    env.reset()
    assert list(env.unit_kinds) == [kind for kind, _, _ in [*allies, *enemies]]
    x, y = (torch.tensor([[unit[i] for unit in [*allies, *enemies]]], dtype=torch.float32) for i in (1, 2))
    cooldown = torch.zeros_like(x)
    cooldown[:, list(reloading)] = RELOADING
    env.set_units(**{k: v.expand(num_envs, -1) for k, v in {"x": x, "y": y, "cooldown": cooldown}.items()})
    return env


def change(env, unit, **values):
    """Sets some fields of one unit in all matches."""
    fields = {key: env.units()[key].clone() for key in values}
    for key, value in values.items():
        fields[key][:, unit] = value
    return env.set_units(**fields)


def step(env, *actions, times=1):
    """The same actions in all matches, one for each ally."""
    for _ in range(times):
        result = env.step(torch.tensor([actions]).expand(env.num_envs, -1))
    return result


def value(env, field, unit):
    return env.units()[field][0, unit].item()


def hurt_at(env, unit):
    """The loop of its last damage."""
    return env._simulation["real"][HURT_AT, 0, unit].item()


def position(env, unit):
    return value(env, "x", unit), value(env, "y", unit)


def touching(kind, other):
    """A distance at which even melee weapons reach: edges 0.05 apart."""
    return UNITS[kind].radius + UNITS[other].radius + 0.05


def letter(terrain, x, y):
    return TERRAINS[terrain].split()[-1 - int(y)][int(x)]


# ---- weapons ----
DAMAGE = [
    # attacker, target, its shield, lost shield, lost health
    ("marine", "marine", 0, 0, 6),
    ("marine", "marauder", 0, 0, 5),
    ("marine", "spinecrawler", 0, 0, 4),
    ("marine", "zealot", 50, 6, 0),
    ("marine", "zealot", 0, 0, 5),
    ("marine", "zealot", 2, 2, 3),
    ("marauder", "marine", 0, 0, 10),
    ("marauder", "marauder", 0, 0, 19),
    ("marauder", "stalker", 80, 20, 0),
    ("marauder", "stalker", 0, 0, 19),
    ("stalker", "marine", 0, 0, 10),
    ("stalker", "marauder", 0, 0, 13),
    ("stalker", "colossus", 150, 14, 0),
    ("zealot", "marine", 0, 0, 16),
    ("zealot", "marauder", 0, 0, 14),
    ("zealot", "zealot", 50, 16, 0),
    ("zealot", "zealot", 10, 10, 5),
    ("colossus", "marauder", 0, 0, 38),
    ("colossus", "marine", 0, 0, 40),
    ("colossus", "zealot", 0, 0, 38),
    ("colossus", "zealot", 20, 20, 19),
    ("hydralisk", "marine", 0, 0, 12),
    ("hydralisk", "marauder", 0, 0, 11),
    ("zergling", "marine", 0, 0, 5),
    ("zergling", "spinecrawler", 0, 0, 3),
    ("baneling", "marine", 0, 0, 35),
    ("baneling", "marauder", 0, 0, 19),
    ("baneling", "zealot", 0, 0, 34),
    ("baneling", "zealot", 10, 10, 24),
    ("spinecrawler", "marine", 0, 0, 25),
    ("spinecrawler", "stalker", 0, 0, 29),
]


@pytest.mark.parametrize("side", ["ally", "enemy"])
@pytest.mark.parametrize(("attacker", "target", "shield", "lost_shield", "lost_health"), DAMAGE)
def test_damage(attacker, target, shield, lost_shield, lost_health, side):
    shooter, victim = (attacker, 10, 16), (target, 10 + touching(attacker, target), 16)
    if side == "ally":
        env, hurt = battle([shooter], [victim], reloading=[1]), 1
    else:
        env, hurt = battle([victim], [shooter], reloading=[0]), 0
    change(env, hurt, shield=shield)
    step(env, ATTACK if side == "ally" else STOP)
    regenerated = UNITS[target].regeneration * LOOPS / SECOND
    assert value(env, "shield", hurt) == pytest.approx(shield - lost_shield, abs=SMALL)
    assert value(env, "health", hurt) == pytest.approx(UNITS[target].health - lost_health, abs=SMALL + regenerated)


def test_a_hit_does_at_least_half_a_point(monkeypatch):
    monkeypatch.setitem(UNITS, "dummy", dataclasses.replace(UNITS["dummy"], armour=50.0, health=100.0))
    env = battle([("marine", 10, 16), ("zealot", 14, 16)], [("dummy", 14 - touching("zealot", "dummy"), 16)])
    step(env, ATTACK, STOP)
    assert value(env, "health", 2) == pytest.approx(99.5)
    change(env, 2, health=100.0)
    step(env, STOP, ATTACK)
    assert value(env, "health", 2) == pytest.approx(99), "two hits"


HITS_AIR = {"marine": 5, "stalker": 13, "hydralisk": 11}
HITS_GROUND_ONLY = ["marauder", "zealot", "colossus", "zergling", "baneling", "spinecrawler"]


@pytest.mark.parametrize("kind", [*HITS_AIR, *HITS_GROUND_ONLY])
def test_weapons_against_a_medivac(kind):
    distance = touching(kind, "medivac")
    env = battle([(kind, 10, 16)], [("medivac", 10 + distance, 16), ("dummy", 30, 30)])
    step(env, ATTACK)
    assert 150 - value(env, "health", 1) == pytest.approx(HITS_AIR.get(kind, 0), abs=SMALL)
    assert value(env, "health", 0) > 0, "a baneling does not blow up under a Medivac"

    env = battle([("dummy", 30, 30), ("medivac", 10 + distance, 16)][::-1], [(kind, 10, 16)])
    step(env, STOP, STOP)
    assert 150 - value(env, "health", 0) == pytest.approx(HITS_AIR.get(kind, 0), abs=SMALL)


@pytest.mark.parametrize(("kind", "reach"), [("marine", 5), ("zealot", 0.1), ("zergling", 0.1), ("stalker", 6)])
def test_range_is_from_edge_to_edge(kind, reach, monkeypatch):
    monkeypatch.setitem(UNITS, "dummy", dataclasses.replace(UNITS["dummy"], radius=0.1))
    if kind == "stalker":  # SMAC lets an agent aim no farther than 6 from centre to centre; the enemy may
        env = battle([("dummy", 10, 16)], [(kind, 10 + reach + UNITS[kind].radius + 0.1 - SMALL, 16)])
        step(env, STOP)
        assert value(env, "health", 0) < 1e6
        env = battle([("dummy", 10, 16)], [(kind, 10 + reach + UNITS[kind].radius + 0.1 + SMALL, 16)])
        step(env, STOP)
        assert value(env, "health", 0) == 1e6
        return
    for beyond in (-SMALL, SMALL):
        env = battle([(kind, 10, 16)], [("dummy", 10 + reach + UNITS[kind].radius + 0.1 + beyond, 16)])
        step(env, ATTACK)
        assert value(env, "health", 1) < 1e6
        walked = value(env, "x", 0) - 10
        assert walked == 0 if beyond < 0 else 0 < walked < 0.2, "just out of reach it takes one loop of walking"


def test_unit_walks_up_to_its_target_and_then_shoots():
    env = battle([("zealot", 10, 16)], [("dummy", 15, 16)])
    loops = math.ceil((5 - 0.1 - 0.5 - DUMMY_RADIUS) / (2.25 / SECOND))
    for played in range(1, 6):
        step(env, ATTACK)
        hurt = 1e6 - value(env, "health", 1)
        blows = sum(played * LOOPS > loop for loop in (loops, loops + 5))
        assert hurt == 8 * blows, f"after {played} steps"
    assert value(env, "x", 0) == pytest.approx(10 + loops * 2.25 / SECOND, abs=SMALL), "it goes no farther than it must"


@pytest.mark.parametrize("kind", ["marine", "marauder", "stalker", "zealot", "colossus", "hydralisk", "zergling"])
def test_cadence_of_fire(kind):
    env = battle([(kind, 10, 16)], [("dummy", 10 + touching(kind, "dummy"), 16)], num_envs=256)
    step(env, ATTACK)
    ready_in = env.units()["cooldown"][:, 0]
    reload = UNITS[kind].period * SECOND
    earliest, latest = reload - 1 - LOOPS, reload + 2 - LOOPS
    assert (ready_in > earliest - SMALL).all() and (ready_in < latest + SMALL).all()
    assert ready_in.min() < earliest + 0.1 and ready_in.max() > latest - 0.1

    steps = 500
    step(env, ATTACK, times=steps - 1)
    hits = (1e6 - env.units()["health"][:, 1]) / UNITS[kind].damage
    assert (hits - hits.round()).abs().max() < SMALL
    shots = (hits / UNITS[kind].hits).ceil()  # the second blow of a zealot may be still to come
    assert shots.std() > 0.2
    interval = steps * LOOPS / (shots.mean() - 0.5)  # the first shot came at once
    assert interval == pytest.approx(reload + 0.5, rel=0.02)


@pytest.mark.parametrize("degrees", [0, 30, 90, 200])
def test_colossus_hits_a_line_across_its_fire(degrees):
    forward = np.array([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])
    across = np.array([-forward[1], forward[0]])
    here = np.array([16.0, 16.0])

    def at(deep, sideways):
        return tuple(here + forward * (5 + deep) + across * sideways)

    enemies = [
        ("dummy", *at(0, 0)),
        ("dummy", *at(0, 1.3)),
        ("light_dummy", *at(0, -1.3)),
        ("dummy", *at(0, 2.1)),
        ("dummy", *at(0, -2.1)),
        ("dummy", *at(1.0, 0)),
        ("dummy", *at(-1.0, 0)),
        ("flying_dummy", *at(0, 0.8)),
    ]
    env = battle([("marine", *at(0.2, 0.6)), ("colossus", *here)], enemies)
    step(env, STOP, ATTACK)
    lost = (1e6 - env.units()["health"][0, 2:]).tolist()
    assert lost == [40, 40, 40, 0, 0, 0, 0, 0]
    assert value(env, "health", 0) == 45, "its own side is unharmed"


def test_baneling_blast():
    near, far, clear = 10 + touching("baneling", "dummy"), 10 - 2.0, 10 - 2.8
    enemies = [("dummy", near, 16), ("light_dummy", far, 16), ("dummy", clear, 16), ("flying_dummy", 10, 17)]
    env = battle([("marine", 10, 14.5), ("baneling", 10, 16)], enemies)
    step(env, STOP, ATTACK)
    assert value(env, "health", 1) == 0
    assert (1e6 - env.units()["health"][0, 2:]).tolist() == [20, 35, 0, 0]
    assert value(env, "health", 0) == 45, "its own side is unharmed"
    step(env, STOP, NO_OP, times=3)
    assert (1e6 - env.units()["health"][0, 2:]).tolist() == [20, 35, 0, 0], "it explodes once"


@pytest.mark.parametrize(("distance", "left"), [(2.0, 10), (4.5, 45)])
def test_baneling_explodes_when_killed(distance, left):
    env = battle([("marine", 10, 16)], [("baneling", 10 + distance, 16), ("dummy", 11 + distance, 16)])
    change(env, 1, health=5.0)
    _, _, terminated, _, _ = step(env, ATTACK)
    assert value(env, "health", 1) == 0 and not terminated.any()
    assert value(env, "health", 0) == left
    assert value(env, "health", 2) == 1e6, "its own side is unharmed"


# ---- shields, regeneration, healing ----
def test_shield_regenerates_ten_seconds_after_damage():
    env = battle([("zealot", 10, 16)], [("marine", 13, 16)])
    step(env, STOP)
    change(env, 1, cooldown=RELOADING)
    assert value(env, "shield", 0) == 44
    step(env, STOP, times=19)
    assert value(env, "shield", 0) == pytest.approx(44, abs=0.13)
    for later in range(1, 4):
        step(env, STOP)
        assert value(env, "shield", 0) == pytest.approx(44 + later, abs=0.13), "2 a second"
    step(env, STOP, times=10)
    assert value(env, "shield", 0) == 50
    assert value(env, "health", 0) == 100


def test_damage_starts_the_wait_for_the_shield_anew():
    env = battle([("zealot", 10, 16)], [("marine", 13, 16)])
    for _ in range(2):
        change(env, 1, cooldown=0.0)
        step(env, STOP)
        change(env, 1, cooldown=RELOADING)
        step(env, STOP, times=14)
    assert value(env, "shield", 0) == 38
    step(env, STOP, times=7)
    assert value(env, "shield", 0) > 38


def test_health_of_protoss_does_not_regenerate_and_no_shield_returns_to_who_has_none():
    env = battle([("marine", 5, 16), ("zealot", 10, 16)], [("dummy", 28, 16)])
    change(env, 0, health=20.0)
    change(env, 1, health=20.0)
    step(env, STOP, STOP, times=30)
    assert env.units()["health"][0, :2].tolist() == [20, 20] and value(env, "shield", 0) == 0


@pytest.mark.parametrize("kind", ["hydralisk", "zergling", "baneling", "spinecrawler"])
def test_zerg_regenerate(kind):
    env = battle([(kind, 10, 16)], [("dummy", 28, 16)])
    change(env, 0, health=10.0)
    step(env, STOP, times=40)
    assert value(env, "health", 0) == pytest.approx(10 + 20 * 0.2734, abs=SMALL)
    change(env, 0, health=UNITS[kind].health - 1)
    step(env, STOP, times=40)
    assert value(env, "health", 0) == UNITS[kind].health


def test_medivac_heals_nine_a_second_for_a_third_of_it_in_energy():
    env = battle([("marine", 10, 16), ("medivac", 13, 16)], [("dummy", 28, 16)])
    assert value(env, "energy", 1) == 50
    change(env, 0, health=10.0)
    step(env, STOP, ATTACK + 0, times=4)
    assert value(env, "health", 0) == pytest.approx(28, abs=SMALL)
    assert value(env, "energy", 1) == pytest.approx(50 - 6 + 2 * 0.5625, abs=SMALL)
    assert position(env, 1) == (13, 16)
    step(env, STOP, ATTACK + 0, times=6)
    assert value(env, "health", 0) == 45
    assert value(env, "energy", 1) == pytest.approx(50 - 35 / 3 + 5 * 0.5625, abs=SMALL), "the healthy cost nothing"


@pytest.mark.parametrize("beyond", [-SMALL, 0.2])
def test_medivac_heals_within_four_edge_to_edge_and_flies_up_to_it(beyond):
    env = battle([("marine", 10, 16), ("medivac", 10 + 4 + 0.375 + 0.75 + beyond, 16)], [("dummy", 28, 16)])
    start = value(env, "x", 1)
    change(env, 0, health=10.0)
    step(env, STOP, ATTACK + 0)
    assert value(env, "health", 0) > 10
    assert (value(env, "x", 1) == start) == (beyond < 0)


def test_medivac_without_energy_heals_no_faster_than_it_gains_energy():
    env = battle([("marine", 10, 16), ("medivac", 13, 16)], [("dummy", 28, 16)])
    change(env, 0, health=10.0)
    change(env, 1, energy=0.0)
    step(env, STOP, ATTACK + 0, times=8)
    gained = 4 * 0.5625
    assert 0 <= value(env, "energy", 1) <= gained
    assert value(env, "health", 0) - 10 == pytest.approx(3 * (gained - value(env, "energy", 1)), abs=SMALL)


def test_energy_grows_to_200():
    env = battle([("medivac", 13, 16)], [("dummy", 28, 16)])
    step(env, STOP, times=10)
    assert value(env, "energy", 0) == pytest.approx(50 + 5 * 0.5625, abs=SMALL)
    change(env, 0, energy=199.0)
    step(env, STOP, times=10)
    assert value(env, "energy", 0) == 200


def test_medivac_heals_biological_ground_units_only():
    allies = [("marine", 12, 16), ("medivac", 13, 14), ("medivac", 13, 18), ("stalker", 10, 16)]
    env = battle(allies, [("dummy", 28, 16)] * 1 + [("dummy", 28, 10), ("dummy", 28, 12), ("dummy", 28, 20)])
    for u in range(4):
        _, info = change(env, u, health=20.0)
    assert info["avail"][0, 1, ATTACK:].tolist() == [True, False, False, True], "SMAC's mask leaves out Medivacs only"
    step(env, STOP, ATTACK + 3, ATTACK + 0, STOP, times=3)
    assert env.units()["health"][0, 1:4].tolist() == [20, 20, 20]
    assert value(env, "health", 0) > 30


def test_enemy_medivac_follows_and_heals():
    env = battle([("dummy", 2, 2)], [("marine", 8, 16), ("medivac", 10, 16)], order=("go", (25, 16)))
    change(env, 1, health=10.0)
    step(env, STOP, times=4)
    assert value(env, "health", 1) == pytest.approx(28, abs=SMALL)
    step(env, STOP, times=30)
    assert math.dist(position(env, 1), position(env, 2)) < 5 and value(env, "x", 1) > 23


# ---- allies do what they are told ----
def test_stop_holds_fire():
    env = battle([("marine", 10, 16)], [("dummy", 12, 16), ("marine", 14, 16)])
    step(env, STOP, times=5)
    assert value(env, "health", 0) < 45, "even under fire"
    assert env.units()["health"][0, 1:].tolist() == [1e6, 45]
    assert position(env, 0) == (10, 16)


def test_attack_stops_with_the_order():
    env = battle([("marine", 10, 16)], [("dummy", 12, 16)])
    step(env, ATTACK, times=4)
    left = value(env, "health", 1)
    step(env, STOP, times=5)
    assert value(env, "health", 1) == left < 1e6


MOBILE = ["marine", "marauder", "medivac", "stalker", "zealot", "colossus", "hydralisk", "zergling", "baneling"]


@pytest.mark.parametrize("kind", MOBILE)
@pytest.mark.parametrize(("action", "dx", "dy"), [(NORTH, 0, 1), (SOUTH, 0, -1), (EAST, 1, 0), (WEST, -1, 0)])
def test_move_distance(kind, action, dx, dy):
    env = battle([(kind, 16, 16)], [("dummy", 2, 2)])
    speed = {"medivac": 2.75, "stalker": 2.9531, "zergling": 2.9531, "baneling": 2.5}.get(kind, 2.25)
    step(env, action)
    assert position(env, 0) == pytest.approx((16 + dx * speed / 2, 16 + dy * speed / 2), abs=1e-3)
    step(env, action, times=2)
    assert position(env, 0) == pytest.approx((16 + dx * speed * 1.5, 16 + dy * speed * 1.5), abs=1e-3)


def test_spinecrawler_does_not_move():
    env = battle([("marine", 12, 16)], [("spinecrawler", 20, 16)])
    step(env, WEST, times=3)
    step(env, EAST, times=3)
    step(env, ATTACK, times=3)
    assert position(env, 1) == (20, 16)
    env = battle([("spinecrawler", 20, 16)], [("dummy", 2, 2)])
    step(env, EAST, times=3)
    assert position(env, 0) == (20, 16)


# ---- ground ----
def drawn(*holes, walls=()):
    """A terrain of open ground with walls (x, y, width, height), and holes in them."""
    cells = np.full((32, 32), ".")
    for x, y, width, height in walls:
        cells[y : y + height, x : x + width] = "#"
    for x, y, width, height in holes:
        cells[y : y + height, x : x + width] = "."
    return "\n".join("".join(row) for row in cells[::-1])


@pytest.mark.parametrize("kind", ["marine", "colossus"])
def test_moves_are_masked_at_walls_and_no_one_walks_into_them(kind, monkeypatch):
    monkeypatch.setitem(TERRAINS, "walled", drawn(walls=[(18, 0, 3, 32)]))
    env = battle([(kind, 16.5, 16.5)], [("dummy", 2, 2)], terrain="walled")
    masks = env.set_units()[1]["avail"]
    assert masks[0, 0, NORTH:ATTACK].all()
    change(env, 0, x=17.5)
    assert masks[0, 0, NORTH:ATTACK].tolist() == [True, True, False, True]
    change(env, 0, x=16.9)
    assert masks[0, 0, EAST]
    step(env, EAST, times=4)
    assert 17 < value(env, "x", 0) < 18 and value(env, "y", 0) == 16.5


def test_moves_are_masked_at_the_edge_of_the_map():
    env = battle([("marine", 31.5, 31.5)], [("dummy", 2, 2)])
    masks = env.set_units()[1]["avail"]
    assert masks[0, 0, NORTH:ATTACK].tolist() == [False, True, False, True]
    change(env, 0, x=0.5, y=0.5)
    assert masks[0, 0, NORTH:ATTACK].tolist() == [True, True, True, True], "SMAC truncates -0.5 to 0"
    step(env, WEST, times=3)
    step(env, SOUTH, times=3)
    assert 0 <= value(env, "x", 0) < 0.5 and 0 <= value(env, "y", 0) < 0.5


def test_medivac_flies_over_walls_and_units(monkeypatch):
    monkeypatch.setitem(TERRAINS, "walled", drawn(walls=[(18, 0, 3, 32)]))
    allies = [("marine", 22.5, 16), ("medivac", 16.6, 16)]
    env = battle(allies, [("dummy", 17.4, 16), ("dummy", 2, 2)], terrain="walled")
    change(env, 0, health=10.0)
    step(env, STOP, ATTACK + 0)
    assert value(env, "x", 1) > 17.2 and value(env, "y", 1) == 16 and value(env, "health", 0) > 10
    step(env, STOP, EAST)
    assert value(env, "x", 1) > 17.2 and position(env, 2) == pytest.approx((17.4, 16))


def test_cliffs_stop_walkers_but_not_a_colossus():
    for kind, climbs in (("marine", False), ("zealot", False), ("colossus", True)):
        env = battle([(kind, 16, 11)], [("dummy", 2, 10)], terrain="plateau")
        for _ in range(5):
            _, _, _, _, info = step(env, NORTH)
        if climbs:
            assert position(env, 0) == pytest.approx((16, 11 + 5 * 1.125), abs=SMALL)
        else:
            assert value(env, "y", 0) < 13, kind
        assert info["avail"][0, 0, NORTH], "SMAC's masks know walls, not cliffs"


def test_ramps_join_low_and_high_ground():
    env = battle([("marine", 2.5, 15.5)], [("dummy", 16, 8)], terrain="plateau")
    step(env, EAST, times=6)
    assert letter("plateau", *position(env, 0)) == "H"
    assert position(env, 0) == pytest.approx((2.5 + 6 * 1.125, 15.5), abs=SMALL)
    step(env, WEST, times=6)
    assert letter("plateau", *position(env, 0)) == "."


def test_zergling_takes_the_ramp_to_a_colossus_above_it():
    env = envs.make("2c_vs_64zg", check=False)
    env.reset()
    units = {key: env.units()[key].clone() for key in ("x", "y", "health")}
    units["health"][0, 3:] = 0
    units["x"][0, :3] = torch.tensor([16.0, 16, 16])
    units["y"][0, :3] = torch.tensor([14.5, 18, 12.5])
    env.set_units(**units)
    way = []
    for _ in range(60):
        step(env, STOP, STOP)
        way.append(position(env, 2))
        if value(env, "shield", 0) < 150:
            break
    assert value(env, "shield", 0) < 150, "it arrives"
    assert len(way) * 0.5 * 2.9531 < 26, "by a short way"
    first_above = next(x for x, y in way if letter("plateau", x, y) == "H")
    assert abs(first_above - 16) > 7, "the ramps begin 9 to the east and to the west"


MAZE = [(8, 0, 2, 32), (16, 0, 2, 32), (24, 0, 2, 32), (28, 0, 4, 4)]
GAPS = [(8, 28, 2, 3), (16, 1, 2, 3), (24, 28, 2, 3), (29, 1, 2, 2)]


@pytest.mark.parametrize("kind", ["marine", "zergling", "colossus"])
def test_path_through_a_maze_arrives(kind, monkeypatch):
    monkeypatch.setitem(TERRAINS, "maze", drawn(*GAPS, walls=MAZE))
    env = battle([("dummy", 30, 2)], [(kind, 4, 16)], order=("go", (28, 16)), terrain="maze")
    corners = [(4, 16), (9, 29), (17, 3), (25, 29), (28, 16)]
    shortest = sum(math.dist(a, b) for a, b in itertools.pairwise(corners))
    for _ in range(math.ceil(1.1 * shortest / UNITS[kind].speed / 0.5)):
        before = position(env, 1)
        step(env, STOP)
        assert math.dist(before, position(env, 1)) <= UNITS[kind].speed / 2 + SMALL
        assert letter("maze", *position(env, 1)) == "."
    assert math.dist(position(env, 1), (28, 16)) < 0.5


def test_no_one_slips_between_walls_that_touch_at_a_corner(monkeypatch):
    monkeypatch.setitem(TERRAINS, "diagonal", drawn(walls=[(i, 31 - i, 1, 1) for i in range(32)]))
    env = battle([("dummy", 2, 22)], [("zergling", 8, 8)], order=("go", (24, 24)), terrain="diagonal")
    for _ in range(60):
        step(env, STOP)
        assert sum(position(env, 1)) < 32
    assert sum(position(env, 1)) > 28, "it went as far as it could"


def test_attack_leads_round_a_corner(monkeypatch):
    monkeypatch.setitem(TERRAINS, "corner", drawn(walls=[(8, 13, 1, 6)]))
    env = battle([("zealot", 7.4, 16)], [("dummy", 9.6, 16)], terrain="corner")
    for _ in range(14):
        step(env, ATTACK)
        assert letter("corner", *position(env, 0)) == "."
    assert value(env, "health", 1) < 1e6


def test_enemy_goes_the_way_through_the_corridor():
    env = envs.make("corridor", check=False)
    env.reset()
    units = {key: env.units()[key].clone() for key in ("x", "y", "health")}
    units["health"][0, 1:6], units["health"][0, 7:] = 0, 0
    units["x"][0, 0], units["y"][0, 0] = 29.5, 15.7
    env.set_units(**units)
    for _ in range(40):
        step(env, STOP, *[NO_OP] * 5)
        assert letter("corridor", *position(env, 6)) == "."
    assert math.dist(position(env, 6), (4.47, 4.3298)) < 4


# ---- bodies ----
def test_a_wall_of_zealots_holds_the_choke_of_corridor():
    env = envs.make("corridor", num_envs=4, check=False)
    env.reset()
    places = {
        "x": [10.4, 11.44, 12.48, 13.52, 14.56, 15.6],
        "y": [13.0] * 6,
    }  # the choke is the line from (10, 13) to (16, 13)
    units = {key: env.units()[key].clone() for key in ("x", "y", "health", "shield")}
    for key, row in places.items():
        units[key][:, :6] = torch.tensor(row)
    env.set_units(**units)
    whole = {key: torch.tensor(full).expand(4, 6) for key, full in (("health", 100.0), ("shield", 50.0))}
    for _ in range(120):
        step(env, *[STOP] * 6)
        assert (env.units()["y"][:, 6:] > 13).all()
        unhurt = {key: env.units()[key].clone() for key in whole}
        for key in whole:
            unhurt[key][:, :6] = whole[key]
        env.set_units(**unhurt)
    assert (env.units()["y"][:, 6:] < 15).sum(1).min() >= 6, "they do press against it"

    gone = env.units()["health"].clone()
    gone[:, 1:6] = 0
    env.set_units(health=gone)
    step(env, *[STOP] * 6, times=20)
    assert (env.units()["y"][:, 6:] < 13).any(1).all(), "and pass when it is gone"


@pytest.mark.parametrize("kind", ["marine", "zealot", "colossus"])
def test_no_unit_passes_another_in_an_alley(kind, monkeypatch):
    monkeypatch.setitem(TERRAINS, "alley", drawn((1, 16, 30, 1), walls=[(0, 0, 32, 32)]))
    env = battle([(kind, 10, 16.5)], [("dummy", 15, 16.5)], terrain="alley")
    step(env, EAST, times=12)
    together = (UNITS[kind].separation or UNITS[kind].radius) + DUMMY_RADIUS
    assert together - 0.05 < math.dist(position(env, 0), (15, 16.5)) < together + 0.5
    assert value(env, "x", 0) < 15 and position(env, 1) == (15, 16.5)


def test_a_unit_gets_round_another_in_the_open():
    env = battle([("dummy", 2, 2)], [("dummy", 12, 16), ("marine", 8, 16)][::-1], order=("go", (20, 16)))
    step(env, STOP, times=24)
    assert math.dist(position(env, 1), (20, 16)) < 0.5


def test_crowd_at_one_point_keeps_apart():
    enemies = [("zergling", 4 + i % 6, 12 + i // 6) for i in range(24)]
    env = battle([("dummy", 30, 30)], enemies, order=("go", (16, 16)))
    for _ in range(20):
        step(env, STOP)
        places = torch.stack([env.units()["x"][0, 1:], env.units()["y"][0, 1:]], 1)
        assert torch.pdist(places).min() > 0.75 - 0.05
    assert (places - 16).norm(dim=1).max() < 6


def test_a_group_on_its_way_to_one_target_does_not_get_stuck_on_itself():
    env = envs.make("6h_vs_8z", num_envs=512, check=False)
    env.reset()
    step(env, *[STOP] * 6, times=10)
    zealots, alive = env.units()["y"][:, 6:], env.units()["health"][:, 6:] > 0
    assert zealots[alive].max() < 14, "all have come from 15 and more to the hydralisks at 10"


# ---- the enemy ----
@pytest.mark.parametrize(
    ("kind", "scan"), [("zealot", 5), ("zergling", 5), ("marine", 5), ("stalker", 6), ("spinecrawler", 7)]
)
def test_enemy_acquires_within_its_scan_range(kind, scan):
    for beyond, acquired in ((-SMALL, True), (SMALL, False)):
        env = battle([("dummy", 10, 16)], [(kind, 10 + scan + UNITS[kind].radius + DUMMY_RADIUS + beyond, 16)])
        start = value(env, "x", 1)
        step(env, STOP, times=10)
        assert (value(env, "health", 0) < 1e6) == acquired
        if UNITS[kind].range < 1:
            assert (value(env, "x", 1) < start - 1) == acquired


def test_enemy_takes_the_nearest():
    env = battle([("dummy", 10, 16), ("dummy", 18, 16)], [("marine", 13.5, 16)])
    step(env, STOP, STOP)
    assert value(env, "health", 0) < 1e6 and value(env, "health", 1) == 1e6


def test_enemy_keeps_its_target_when_another_comes_nearer():
    env = battle([("dummy", 10, 16), ("dummy", 25, 16)], [("marine", 13.5, 16)])
    step(env, STOP, STOP)
    change(env, 1, x=15.0)
    before = value(env, "health", 0)
    step(env, STOP, STOP, times=10)
    assert value(env, "health", 0) < before and value(env, "health", 1) == 1e6
    assert position(env, 2) == (13.5, 16)


def test_enemy_drops_a_target_that_gets_away():
    env = battle([("dummy", 10, 16), ("dummy", 18.2, 16)], [("marine", 13.5, 16)])
    step(env, STOP, STOP)
    change(env, 0, x=13.5 - 5.75 - 1 - 0.1)
    before = value(env, "health", 0)
    step(env, STOP, STOP, times=4)
    assert value(env, "health", 0) == before and value(env, "health", 1) < 1e6


def test_enemy_does_not_chase_what_got_away():
    env = battle([("dummy", 10, 16)], [("zealot", 14, 16)])
    step(env, STOP)
    change(env, 0, x=2.0)
    step(env, STOP, times=12)
    assert math.dist(position(env, 1), (14, 16)) < 0.5


def test_enemy_takes_another_when_its_target_dies():
    env = battle([("dummy", 10, 16), ("dummy", 17.5, 16)], [("marine", 13.5, 16)])
    change(env, 0, health=3.0)
    step(env, STOP, STOP, times=4)
    assert value(env, "health", 0) == 0 and value(env, "health", 1) < 1e6


def test_enemy_turns_on_a_shooter_outside_its_scan_range():
    for shoots in (True, False):
        env = battle([("colossus", 10, 16)], [("zealot", 10 + 1.0 + 0.5 + 5.8, 16)], auto_allies=shoots)
        start = value(env, "x", 1)
        step(env, STOP, times=4)
        assert (value(env, "x", 1) < start - 1) == shoots
        assert (value(env, "shield", 1) < 50) == shoots


def test_spinecrawler_turns_to_another_when_its_target_leaves_its_range():
    reach = 7 + UNITS["spinecrawler"].radius + DUMMY_RADIUS
    env = battle([("dummy", 16, 10), ("dummy", 18, 9)], [("spinecrawler", 16, 16)])
    step(env, STOP, STOP)
    first = value(env, "health", 0)
    assert first < 1e6 and value(env, "health", 1) == 1e6
    change(env, 0, y=16 - reach - SMALL)
    step(env, STOP, STOP, times=5)
    assert value(env, "health", 0) == first and value(env, "health", 1) < 1e6
    change(env, 0, y=12.0)
    step(env, STOP, STOP, times=10)
    assert value(env, "health", 0) == first, "it keeps to the other"


def test_enemy_walks_on_to_the_point_of_its_order_and_still_acquires_there():
    env = battle([("dummy", 2, 28), ("dummy", 2, 30)], [("zealot", 28, 16)], order=("go", (8, 14)))
    straight = math.dist((28, 16), (8, 14)) / 2.25 / 0.5
    step(env, STOP, STOP, times=int(straight))
    assert math.dist(position(env, 2), (8, 14)) < 1.2, "without detours"
    step(env, STOP, STOP, times=6)
    assert math.dist(position(env, 2), (8, 14)) < 0.3
    change(env, 0, x=8.0, y=18.0)
    step(env, STOP, STOP, times=8)
    assert value(env, "health", 0) < 1e6


def test_enemy_fights_what_it_meets_on_its_way_and_then_walks_on():
    env = battle([("dummy", 2, 30), ("dummy", 18, 17)], [("marine", 28, 16)], order=("go", (8, 16)))
    change(env, 1, health=20.0)
    step(env, STOP, STOP, times=10)
    assert 22 < value(env, "x", 2) < 24 and value(env, "health", 1) < 20
    step(env, STOP, STOP, times=26)
    assert value(env, "health", 1) == 0 and math.dist(position(env, 2), (8, 16)) < 0.5


def test_enemy_of_2m_vs_1z_goes_to_a_random_point_between_two():
    env = envs.make("2m_vs_1z", num_envs=64, check=False)
    env.reset()
    x, y = env.units()["x"].clone(), env.units()["y"].clone()
    x[:, :2], y[:, :2] = torch.tensor([6.0, 7.5]), torch.tensor([21.0, 22.0])
    env.set_units(x=x, y=y)
    step(env, STOP, STOP, times=24)
    x, y = env.units()["x"][:, 2], env.units()["y"][:, 2]
    assert ((y - 12).abs() < 0.3).all() and ((x > 12.7) & (x < 19.3)).all()
    assert x.min() < 14 and x.max() > 18 and 15 < x.mean() < 17


def test_zerglings_of_2c_vs_64zg_hunt_the_colossi_wherever_they_are():
    env = envs.make("2c_vs_64zg", num_envs=4, check=False)
    env.reset()
    x, y = env.units()["x"].clone(), env.units()["y"].clone()
    x[:, :2], y[:, :2] = torch.tensor([29.5, 29.5]), torch.tensor([14.5, 17.0])
    env.set_units(x=x, y=y)
    step(env, STOP, STOP, times=30)
    assert (env.units()["shield"][:, :2].sum(1) < 300).all()
    assert (env.units()["x"][:, 2:] > 22).float().mean() > 0.8


# ---- how a unit attacks and whom: each rule with and without its switch ----
WIND_UP = {"marine": 1, "marauder": 0, "stalker": 3, "zealot": 0, "colossus": 2, "hydralisk": 4, "zergling": 3,
           "spinecrawler": 6}  # fmt: skip
both = pytest.mark.parametrize("on", [True, False])


def edges(kind, other, apart):
    """The distance of the centres at which the edges are so far apart."""
    return UNITS[kind].radius + UNITS[other].radius + apart


@both
@pytest.mark.parametrize("side", ["ally", "enemy"])
@pytest.mark.parametrize("kind", WIND_UP)
def test_damage_comes_after_the_wind_up(kind, side, on, monkeypatch):
    monkeypatch.setitem(RULES, "wind_up", on)
    monkeypatch.setitem(RULES, "second_blow", False)
    pair = [(kind, 10, 16)], [("dummy", 10 + touching(kind, "dummy"), 16)]
    env, victim = (battle(*pair), 1) if side == "ally" else (battle(*pair[::-1]), 0)
    change(env, 1 - victim, cooldown=RELOADING)
    step(env, STOP)
    change(env, 1 - victim, cooldown=0.0)
    step(env, ATTACK if side == "ally" else STOP)
    assert hurt_at(env, victim) == LOOPS + on * WIND_UP[kind]
    assert value(env, "health", victim) == 1e6 - UNITS[kind].damage * UNITS[kind].hits, "once"


@both
def test_shot_in_its_wind_up_is_lost_in_the_loop_in_which_the_target_leaves(on, monkeypatch):
    """A stalker that walks away passes 7.0 in loop 4. The crawler begins anew, with the other, in that loop."""
    monkeypatch.setitem(RULES, "wind_up", on)
    monkeypatch.setitem(RULES, "recovery", False)
    reach, stride = edges("spinecrawler", "stalker", 7), UNITS["stalker"].speed / SECOND
    stalkers = [("stalker", 16, 20 - reach + 3.5 * stride), ("stalker", 16 + reach - 0.1, 20)]
    env = battle(stalkers, [("spinecrawler", 16, 20)])
    step(env, SOUTH, STOP)
    assert env.units()["shield"][0, :2].tolist() == ([80, 80] if on else [50, 80])
    step(env, SOUTH, STOP, times=3)
    assert env.units()["shield"][0, :2].tolist() == ([80, 50] if on else [50, 50])
    if on:
        assert hurt_at(env, 1) == 4 + WIND_UP["spinecrawler"]


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize(("kind", "reload", "in_time", "later"), [("hydralisk", 6, 0, 1), ("zealot", 5, 1, 2)])
def test_attack_under_way_goes_on_with_the_same_order_and_no_other(kind, reload, in_time, later, goes_on):
    """The hydralisk begins in loop 6 and hits in loop 10; the zealot hits in loops 5 and 10."""
    env = battle([(kind, 10, 16)], [("dummy", 10 + touching(kind, "dummy"), 16), ("dummy", 10, 17.5)])
    change(env, 0, cooldown=reload)
    step(env, ATTACK)
    assert value(env, "health", 1) == 1e6 - in_time * UNITS[kind].damage
    step(env, ATTACK if goes_on else STOP)
    assert value(env, "health", 1) == 1e6 - (later if goes_on else in_time) * UNITS[kind].damage
    if goes_on:
        assert hurt_at(env, 1) == 10


@both
def test_second_blow_comes_five_loops_after_the_first(on, monkeypatch):
    monkeypatch.setitem(RULES, "second_blow", on)
    env = battle([("marine", 10, 16)], [("zealot", 10 + touching("zealot", "marine"), 16)])
    change(env, 0, health=8.0)
    step(env, STOP)
    assert value(env, "health", 0) == 0 and hurt_at(env, 0) == 0
    env = battle([("marine", 10, 16)], [("zealot", 10 + touching("zealot", "marine"), 16)])
    step(env, STOP)
    assert value(env, "health", 0) == 45 - 16 and hurt_at(env, 0) == (5 if on else 0)
    env = battle([("marine", 10, 16)], [("zealot", 10 + touching("zealot", "marine"), 16)])
    change(env, 1, cooldown=5.0)
    step(env, STOP)
    change(env, 0, x=2.0)
    step(env, STOP)
    assert value(env, "health", 0) == 45 - (8 if on else 16), "not if the target has gone"


@both
@pytest.mark.parametrize("side", ["ally", "enemy"])
def test_backswing_holds_who_acts_by_itself(side, on, monkeypatch):
    """Its only blow falls in loop 5 and kills: then it has half a second to stand, which an order cuts short."""
    monkeypatch.setitem(RULES, "backswing", on)
    here, near, far = ("zealot", 10, 16), ("dummy", 10 - touching("zealot", "dummy"), 16), ("dummy", 14, 16)
    env = battle([here], [near, far]) if side == "ally" else battle([near, far], [here])
    zealot, victim = (0, 1) if side == "ally" else (2, 0)
    change(env, victim, health=8.0)
    change(env, zealot, cooldown=5.0)
    orders = ([ATTACK], [ATTACK + 1]) if side == "ally" else ([STOP, STOP], [NO_OP, STOP])
    step(env, *orders[0])
    assert value(env, "health", victim) == 0
    loops = 0 if side == "ally" or on else 2
    assert value(env, "x", zealot) == pytest.approx(10 + loops * 2.25 / SECOND)
    step(env, *orders[1])
    loops += 3 if side == "enemy" and on else 8
    assert value(env, "x", zealot) == pytest.approx(10 + loops * 2.25 / SECOND)


@both
@pytest.mark.parametrize("side", ["ally", "enemy"])
def test_slop(side, on, monkeypatch):
    """Who fires goes on up to 1 beyond its range without walking; who has to walk walks up to its range."""
    monkeypatch.setitem(RULES, "slop", on)
    pair = [("zealot", 10, 16)], [("dummy", 10 + touching("zealot", "dummy"), 16)]
    env, zealot, victim = (battle(*pair), 0, 1) if side == "ally" else (battle(*pair[::-1]), 1, 0)
    action = ATTACK if side == "ally" else STOP
    step(env, action)
    change(env, victim, x=10 + edges("zealot", "dummy", 1.1 - SMALL))
    step(env, action, times=3)
    assert value(env, "health", victim) == 1e6 - 32, "two attacks of two blows"
    assert (value(env, "x", zealot) == 10) == on
    change(env, zealot, x=10.0)
    change(env, victim, x=10 + edges("zealot", "dummy", 1.1 + SMALL))
    step(env, action, times=4)
    walked = value(env, "x", zealot) - 10
    assert 1 < walked < 1 + 2 * 2.25 / SECOND, "no farther than it must"


@both
def test_chaser_takes_the_nearest_again(on, monkeypatch):
    monkeypatch.setitem(RULES, "look_again", on)
    env = battle([("hydralisk", 13, 16), ("hydralisk", 20, 16)], [("zealot", 16, 16)])
    step(env, STOP, STOP)
    at = value(env, "x", 2)
    assert at == pytest.approx(16 - LOOPS * 2.25 / SECOND, abs=1e-3)
    change(env, 1, x=at + 1.8)
    step(env, STOP, STOP)
    assert (value(env, "health", 1) < 80) == on and (value(env, "health", 0) < 80) != on


@both
def test_fleeing_hydralisk_is_caught_by_a_zealot_that_was_after_another(on, monkeypatch):
    """Zealot 3 is on its way to hydralisk 1 in the north when hydralisk 0 runs past it from zealot 2, to the east."""
    monkeypatch.setitem(RULES, "look_again", on)
    env = battle([("hydralisk", 2, 2), ("hydralisk", 17, 21.5)], [("zealot", 12.5, 16), ("zealot", 17, 16.5)])
    step(env, STOP, STOP)
    assert position(env, 3) == pytest.approx((17, 16.5 + LOOPS * 2.25 / SECOND), abs=1e-3)
    change(env, 0, x=14.5, y=16.0)
    step(env, EAST, STOP, times=4)
    assert (value(env, "health", 0) < 80) == on


@both
def test_armed_targets_come_first(on, monkeypatch):
    monkeypatch.setitem(RULES, "armed_first", on)
    for armed in ("marine", "medivac"):
        env = battle([(armed, 13, 16), ("dummy", 12.9, 16)], [("marine", 10, 16)], reloading=[0])
        change(env, 1, x=8.0)
        step(env, STOP, STOP)
        assert (value(env, "health", 0) < UNITS[armed].health) == on and (value(env, "health", 1) < 1e6) != on


@both
def test_unarmed_target_gives_way_to_an_armed_one_in_weapon_range(on, monkeypatch):
    monkeypatch.setitem(RULES, "armed_first", on)
    env = battle([("marine", 20, 16), ("dummy", 10 - touching("zealot", "dummy"), 16)], [("zealot", 10, 16)])
    step(env, STOP, STOP)
    change(env, 0, x=13.0)
    step(env, STOP, STOP, times=3)
    assert value(env, "health", 1) == 1e6 - 32 and position(env, 2) == (10, 16), "within the scan range is not enough"
    change(env, 0, x=10 + touching("zealot", "marine"))
    change(env, 2, cooldown=0.0)
    step(env, STOP, STOP)
    assert (value(env, "health", 0) < 45) == on


@both
@pytest.mark.parametrize("target", ["none", "armed", "unarmed"])
def test_strike_back(target, on, monkeypatch):
    """A stalker shoots a zealot from beyond its scan range, in loop 3. The zealot may have somebody beside it."""
    monkeypatch.setitem(RULES, "strike_back", on)
    monkeypatch.setitem(RULES, "call_for_help", False)
    monkeypatch.setitem(RULES, "backswing", False)
    x = 10 + edges("stalker", "zealot", 5.8)
    stalker, beside = ("stalker", 10, 16), {"none": [], "armed": ["hydralisk"], "unarmed": ["dummy"]}[target]
    allies = [stalker, *((kind, x + touching("zealot", kind), 16) for kind in beside)]
    env = battle(allies, [("zealot", x, 16)], auto_allies=True, reloading=range(1, len(allies)))
    step(env, *[STOP] * len(allies))
    zealot = len(allies)
    assert hurt_at(env, zealot) == 3
    goes = on and target != "armed"
    assert value(env, "x", zealot) == pytest.approx(x - goes * 4 * 2.25 / SECOND)


@both
def test_call_for_help(on, monkeypatch):
    """Of those within 4, edge to edge, of one that is hit in loop 3, who has no target goes for the attacker."""
    monkeypatch.setitem(RULES, "call_for_help", on)
    x = 10 + edges("stalker", "dummy", 5.8)
    near, far = (x + edges("zealot", "dummy", 4 + beyond) for beyond in (-SMALL, SMALL))
    enemies = [("dummy", x, 16), ("zealot", near, 16), ("zealot", x, 16 + far - x)]
    env = battle([("stalker", 10, 16)], enemies, auto_allies=True)
    step(env, STOP)
    assert hurt_at(env, 1) == 3
    assert value(env, "x", 2) == pytest.approx(near - on * 4 * 2.25 / SECOND)
    assert position(env, 3) == pytest.approx((x, 16 + far - x))


@both
def test_recovery(on, monkeypatch):
    monkeypatch.setitem(RULES, "recovery", on)
    env = battle([("dummy", 10, 16)], [("spinecrawler", 10 + touching("spinecrawler", "dummy"), 16)], num_envs=256)
    step(env, STOP)
    ready_in = env.units()["cooldown"][:, 1] + LOOPS
    reload = (1.6 + on * 0.4) * SECOND
    assert reload - 1 - SMALL < ready_in.min() < reload - 0.9 and reload + 1.9 < ready_in.max() < reload + 2 + SMALL


@both
def test_crawler_takes_the_nearest_for_every_attack(on, monkeypatch):
    """Who comes nearer while it reloads is shot at next; who comes nearer during a wind-up is not."""
    monkeypatch.setitem(RULES, "scan_anew", on)
    env = battle([("stalker", 14, 16), ("stalker", 7, 16)], [("spinecrawler", 10, 16)], reloading=[2])
    step(env, STOP, STOP)
    change(env, 2, cooldown=4.0)  # so loops 4 to 9 are the wind-up
    step(env, STOP, STOP)
    change(env, 0, x=12.5)
    step(env, STOP, STOP)
    assert env.units()["shield"][0, :2].tolist() == [80, 50]
    step(env, STOP, STOP, times=5)
    assert env.units()["shield"][0, :2].tolist() == ([50, 50] if on else [80, 20])


@both
def test_surround(on, monkeypatch):
    """Twelve zerglings in a block meet a wall of three: how many of them bite, from second 4 to 8."""
    monkeypatch.setitem(RULES, "surround", on)
    wall = [("dummy", 10, 15.2 + 0.8 * i) for i in range(3)]
    env = battle(wall, [("zergling", 13 + 0.8 * (i // 4), 14.8 + 0.8 * (i % 4)) for i in range(12)], num_envs=32)
    left = []
    for _ in range(2):
        step(env, STOP, STOP, STOP, times=8)
        left.append(env.units()["health"][:, :3].sum(1).mean().item())
    bites = (left[0] - left[1]) / UNITS["zergling"].damage
    biting = bites / (4 / UNITS["zergling"].period)
    assert biting > 6 if on else biting < 4.5


def test_who_has_a_target_does_not_answer_a_call():
    x = 10 + edges("stalker", "dummy", 5.8)
    allies = [("stalker", 10, 16), ("hydralisk", x + 3 + touching("zealot", "hydralisk"), 16)]
    env = battle(allies, [("dummy", x, 16), ("zealot", x + 3, 16)], auto_allies=True, reloading=[1])
    step(env, STOP, STOP, times=2)
    assert hurt_at(env, 2) == 3 and position(env, 3) == pytest.approx((x + 3, 16))


def test_call_for_help_comes_once_in_two_seconds():
    """The dummy is hit in loop 3, calls, is hit again after 22 to 25 loops, keeps quiet, and calls at the third hit."""
    x = 10 + edges("stalker", "dummy", 5.8)
    env = battle([("stalker", 10, 16)], [("dummy", x, 16), ("zealot", x + 3, 16)], auto_allies=True, num_envs=32)
    change(env, 2, x=30.0)
    step(env, STOP)
    change(env, 2, x=x + 3)
    step(env, STOP, times=3)
    assert (env.units()["health"][:, 1] == 1e6 - 20).all() and (env.units()["x"][:, 2] > x + 3 - SMALL).all()
    step(env, STOP, times=4)
    assert (env.units()["x"][:, 2] < x + 3 - SMALL).all()


# ---- where units start ----
@pytest.mark.parametrize("name", ["3m", "25m", "2c_vs_64zg"])
def test_units_start_on_a_compact_lattice_shifted_a_little(name):
    env = envs.make(name, num_envs=300)
    env.reset()
    enemies = slice(env.n_agents, None)
    x, y = env.units()["x"][:, enemies], env.units()["y"][:, enemies]
    for places in (x, y):
        assert (places.max(0).values - places.min(0).values).max() < 0.2 + SMALL
        assert (places.max(0).values - places.min(0).values).min() > 0.19
    gaps = torch.cdist(torch.stack([x, y], 2), torch.stack([x, y], 2)) + 100 * torch.eye(env.n_enemies)
    assert gaps.min() == pytest.approx(0.75, abs=1e-3), "as close as their separation radii allow"
    assert gaps.min(2).values.max() == pytest.approx(0.75, abs=1e-3)
    from_centre = torch.hypot(x[0] - x[0].mean(), y[0] - y[0].mean())
    corner_of_a_square = (math.ceil(math.sqrt(env.n_enemies)) - 1) / 2 * 0.75 * math.sqrt(2)
    assert from_centre.max() < corner_of_a_square + 0.2


# ---- rewards ----
SCALE_3M = (3 * 45 + 3 * 10 + 200) / 20


def three_marines(enemy_health=(45.0, 45.0, 45.0), ally_health=(45.0, 45.0, 45.0), enemies_fire=False, **options):
    env = envs.make("3m", check=False, **options)
    env.reset()
    hold = 0.0 if enemies_fire else RELOADING
    env.set_units(
        x=torch.tensor([[10.0, 10, 10, 13, 13, 13]]),
        y=torch.tensor([[14.0, 16, 18, 14, 16, 18]]),
        health=torch.tensor([[*ally_health, *enemy_health]]),
        cooldown=torch.tensor([[0.0, 0, 0, hold, hold, hold]]),
    )
    return env


def test_reward_for_damage_and_kills():
    _, reward, *_ = step(three_marines(), ATTACK, ATTACK + 1, STOP)
    assert reward[0].tolist() == pytest.approx([12 / SCALE_3M] * 3)
    _, reward, *_ = step(three_marines(enemy_health=(4.0, 45.0, 45.0)), ATTACK, STOP, STOP)
    assert reward[0].tolist() == pytest.approx([(4 + 10) / SCALE_3M] * 3)


def test_reward_for_the_win():
    env = three_marines(enemy_health=(4.0, 0.0, 0.0))
    _, reward, terminated, truncated, info = step(env, ATTACK, STOP, STOP)
    assert reward[0].tolist() == pytest.approx([(4 + 10 + 200) / SCALE_3M] * 3)
    assert terminated.all() and info["won"].all() and not truncated.any()


def test_flawless_win_is_worth_twenty():
    env = three_marines()
    total = 0.0
    for _ in range(60):
        change(env, slice(3, 6), cooldown=RELOADING)
        _, reward, terminated, _, info = env.step(env.scripted_actions("nearest"))
        total += reward[0, 0].item()
        if terminated.all():
            break
    assert info["won"].all() and total == pytest.approx(20, abs=1e-3)


def test_damage_taken_costs_nothing_by_default():
    env = three_marines(ally_health=(45.0, 3.0, 45.0), enemies_fire=True)
    _, reward, *_ = step(env, STOP, STOP, STOP)
    assert env.units()["health"][0, 1] == 0 and (reward == 0).all()


def test_damage_taken_costs_half_without_reward_only_positive():
    env = three_marines(ally_health=(45.0, 3.0, 45.0), enemies_fire=True, reward_only_positive=False)
    _, reward, *_ = step(env, ATTACK, STOP, STOP)
    assert env.units()["health"][0, :3].tolist() == [39, 0, 39]
    assert reward[0].tolist() == pytest.approx([(6 - (6 + 3 + 6) / 2 - 5) / SCALE_3M] * 3)


@pytest.mark.parametrize(("only_positive", "sign"), [(True, 1), (False, -1)])
def test_regenerating_shields_count_by_their_absolute_value(only_positive, sign):
    env = battle([("dummy", 2, 2)], [("zealot", 28, 16)], reward_only_positive=only_positive)
    change(env, 1, shield=10.0)
    _, reward, *_ = step(env, STOP)
    assert (reward == 0).all()
    _, reward, *_ = step(env, STOP, times=25)
    assert reward[0, 0].item() == pytest.approx(sign * 1 / ((150 + 10 + 200) / 20), abs=1e-4)


@pytest.mark.parametrize("option", [{}, {"reward_scale": False}])
def test_sparse_reward(option):
    damage = three_marines(enemy_health=(4.0, 45.0, 45.0), reward_sparse=True, **option)
    assert step(damage, ATTACK, ATTACK + 1, STOP)[1][0].tolist() == [0, 0, 0]
    win = three_marines(enemy_health=(4.0, 0.0, 0.0), reward_sparse=True, **option)
    assert step(win, ATTACK, STOP, STOP)[1][0].tolist() == [1, 1, 1]
    lost = three_marines(ally_health=(4.0, 0.0, 0.0), enemies_fire=True, reward_sparse=True, **option)
    assert step(lost, STOP, NO_OP, NO_OP)[1][0].tolist() == [-1, -1, -1]


def test_reward_values_are_options():
    kill = {"enemy_health": (4.0, 45.0, 45.0)}
    win = {"enemy_health": (4.0, 0.0, 0.0)}
    loss = {"ally_health": (4.0, 0.0, 0.0), "enemies_fire": True}
    cases = [
        (kill, {"reward_scale": False}, 14),
        (kill, {"reward_scale": False, "reward_death_value": 50.0}, 54),
        (win, {"reward_scale": False, "reward_win": 7.0}, 21),
        (loss, {"reward_scale": False, "reward_defeat": -3.0}, -3),
        (loss, {"reward_scale": False, "reward_only_positive": False, "reward_negative_scale": 0.25}, -14 / 4),
        (kill, {"reward_scale_rate": 10.0}, 14 / (SCALE_3M * 2)),
        (kill, {"reward_win": 100.0}, 14 / ((135 + 30 + 100) / 20)),
    ]
    for layout, options, expected in cases:
        env = three_marines(**layout, **options)
        _, reward, *_ = step(env, ATTACK if "enemy_health" in layout else STOP, STOP, STOP)
        assert reward[0, 0].item() == pytest.approx(expected), options


# ---- the end ----
def test_loss_is_terminated_and_not_won():
    env = three_marines(ally_health=(4.0, 0.0, 0.0), enemies_fire=True)
    _, reward, terminated, truncated, info = step(env, STOP, NO_OP, NO_OP)
    assert terminated.all() and not truncated.any() and not info["won"].any() and (reward == 0).all()


def test_both_sides_dead_at_once_is_terminated_and_not_won():
    env = three_marines(ally_health=(4.0, 0.0, 0.0), enemy_health=(4.0, 0.0, 0.0), enemies_fire=True)
    _, reward, terminated, truncated, info = step(env, ATTACK, NO_OP, NO_OP)
    assert env.units()["health"].sum() == 0
    assert terminated.all() and not truncated.any() and not info["won"].any()
    assert reward[0, 0].item() == pytest.approx((4 + 10) / SCALE_3M)


@pytest.mark.parametrize("name", ["MMM", "MMM2"])
@pytest.mark.parametrize("side", ["allies", "enemies"])
def test_match_ends_when_only_medivacs_are_left(name, side):
    env = envs.make(name, check=False)
    env.reset()
    health = env.units()["health"].clone()
    members = range(env.n_agents) if side == "allies" else range(env.n_agents, len(env.unit_kinds))
    others = [u for u in members if env.unit_kinds[u] != "medivac"]
    health[0, others[1:]] = 0
    env.set_units(health=health)
    _, _, terminated, _, _ = env.step(env.scripted_actions("hold"))
    assert not terminated.any(), "one can still fight"
    health[0, others[0]] = 0
    env.set_units(health=health)
    _, _, terminated, truncated, info = env.step(env.scripted_actions("hold"))
    assert terminated.all() and not truncated.any() and info["won"].item() == (side == "enemies")


def test_limit_is_truncated_and_not_won():
    env = battle([("marine", 4, 16)], [("marine", 28, 16)], limit=5)
    for played in range(1, 6):
        _, _, terminated, truncated, info = step(env, STOP)
        assert truncated.item() == (played == 5) and not terminated.any() and not info["won"].any()


def test_win_in_the_last_step_is_a_win():
    env = battle([("marine", 10, 16)], [("marine", 13, 16)], limit=1, reloading=[1])
    change(env, 1, health=3.0)
    _, _, terminated, truncated, info = step(env, ATTACK)
    assert terminated.all() and info["won"].all() and not truncated.any()

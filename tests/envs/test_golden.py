"""What agents see and earn, against SMAC's own answers and against the rules of the specification told once more.

`data/smac_golden.npz` holds SMAC's answers for five maps. The functions here restate the specification in slow, plain
NumPy from `data/smac_maps.json`; they are first held against SMAC's answers too, then against all 23 maps and options.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import envs

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "smac_golden.npz")
MAPS = json.loads((DATA / "smac_maps.json").read_text())
GOLDEN_MAPS = ["3m", "2s3z", "MMM", "3s_vs_5z", "corridor"]
TOLERANCE = 1e-5

# obs, state, actions, agents, episode limit
SIZES = {
    "3m": (30, 48, 9, 3, 60),
    "8m": (80, 168, 14, 8, 120),
    "25m": (250, 950, 31, 25, 150),
    "5m_vs_6m": (55, 98, 12, 5, 70),
    "8m_vs_9m": (85, 179, 15, 8, 120),
    "10m_vs_11m": (105, 243, 17, 10, 150),
    "27m_vs_30m": (285, 1170, 36, 27, 180),
    "MMM": (160, 290, 16, 10, 150),
    "MMM2": (176, 322, 18, 10, 180),
    "2s3z": (80, 120, 11, 5, 120),
    "3s5z": (128, 216, 14, 8, 150),
    "3s5z_vs_3s6z": (136, 230, 15, 8, 170),
    "3s_vs_3z": (36, 54, 9, 3, 150),
    "3s_vs_4z": (42, 61, 10, 3, 200),
    "3s_vs_5z": (48, 68, 11, 3, 250),
    "1c3s5z": (162, 270, 15, 9, 180),
    "2m_vs_1z": (16, 26, 7, 2, 150),
    "corridor": (156, 282, 30, 6, 400),
    "6h_vs_8z": (78, 140, 14, 6, 150),
    "2s_vs_1sc": (17, 27, 7, 2, 300),
    "so_many_baneling": (202, 397, 38, 7, 100),
    "bane_vs_bane": (336, 984, 30, 24, 200),
    "2c_vs_64zg": (332, 342, 70, 2, 400),
}
HEALTH = {
    "marine": 45, "marauder": 125, "medivac": 150, "stalker": 80, "zealot": 100, "colossus": 200, "hydralisk": 80,
    "zergling": 35, "baneling": 30, "spinecrawler": 300,
}  # fmt: skip
SHIELD = {"stalker": 80, "zealot": 50, "colossus": 150}
MAX_COOLDOWN = {
    "marine": 15, "marauder": 25, "stalker": 35, "zealot": 22, "colossus": 24, "hydralisk": 10, "zergling": 11,
    "baneling": 1,
}  # fmt: skip
ALLY_TYPES = {
    "MMM": ["marauder", "marine", "medivac"],
    "stalkers_and_zealots": ["stalker", "zealot"],
    "colossi_stalkers_zealots": ["colossus", "stalker", "zealot"],
    "bane": ["baneling", "zergling"],
}
ENEMY_TYPES = {**ALLY_TYPES, "stalkers_and_zealots": ["zealot", "stalker"]}
MOVES = [(0, 1), (0, -1), (1, 0), (-1, 0)]
NEIGHBOURS = [(0, 4), (0, -4), (4, 0), (-4, 0), (2, 2), (-2, -2), (2, -2), (-2, 2)]
GROUND_HEIGHT = {"#": 0.0, ".": 0.5, "r": 0.75, "H": 1.0}


# ---- the specification once more ----
def kinds_of(name):
    spawns, types = MAPS[name]["spawns"], ALLY_TYPES.get(MAPS[name]["map_type"])
    allies = [s["unit"] for s in spawns if s["team"] == "ally" for _ in range(s["count"])]
    enemies = [s["unit"] for s in spawns if s["team"] == "enemy" for _ in range(s["count"])]
    return (sorted(allies, key=types.index) if types else allies) + enemies


def letter_at(name, x, y):
    """The terrain letter of a cell; None outside the map."""
    rows = MAPS[name]["terrain_rows_from_y0_up"]
    return rows[y][x] if 0 <= y < len(rows) and 0 <= x < len(rows[0]) else None


def one_hot(which, size):
    return [float(which == i) for i in range(size)]


def type_bits(name, kind, types):
    return (
        one_hot(types[MAPS[name]["map_type"]].index(kind), len(types[MAPS[name]["map_type"]]))
        if MAPS[name]["unit_type_bits"]
        else []
    )


def available_actions(name, kinds, units, agent):
    allies, enemies = MAPS[name]["n_agents"], MAPS[name]["n_enemies"]
    avail = np.zeros(6 + enemies, bool)
    if units["health"][agent] <= 0:
        avail[0] = True
        return avail
    avail[1] = True
    x, y = units["x"][agent], units["y"][agent]
    for direction, (dx, dy) in enumerate(MOVES):
        avail[2 + direction] = letter_at(name, int(x + dx), int(y + dy)) not in (None, "#")
    for j in range(enemies):
        target = j if kinds[agent] == "medivac" else allies + j
        if kinds[agent] == "medivac" and (j >= allies or kinds[j] == "medivac"):
            continue
        near = np.hypot(units["x"][target] - x, units["y"][target] - y) <= 6
        avail[6 + j] = near and units["health"][target] > 0
    return avail


def observation(name, kinds, units, last_action, step, agent, options):
    allies, total = MAPS[name]["n_agents"], len(kinds)
    avail = available_actions(name, kinds, units, agent)
    x, y = units["x"][agent], units["y"][agent]
    alive = units["health"][agent] > 0
    points = [(int(x) + dx, int(y) + dy) for dx, dy in NEIGHBOURS]

    values = [float(a) for a in avail[2:6]]
    if options.get("obs_pathing_grid"):
        values += [float(letter_at(name, *point) != "#") for point in points]
    if options.get("obs_terrain_height"):
        values += [GROUND_HEIGHT.get(letter_at(name, *point), 1.0) for point in [*points, (int(x), int(y))]]
    for other in [*range(allies, total), *(ally for ally in range(allies) if ally != agent)]:
        enemy = other >= allies
        kind, race = kinds[other], MAPS[name]["enemy_race" if enemy else "ally_race"]
        dx, dy = units["x"][other] - x, units["y"][other] - y
        facts = [float(avail[6 + other - allies]) if enemy else 1.0, np.hypot(dx, dy) / 9, dx / 9, dy / 9]
        facts += [units["health"][other] / HEALTH[kind]]
        facts += [units["shield"][other] / SHIELD[kind]] if race == "P" else []
        facts += type_bits(name, kind, ENEMY_TYPES if enemy else ALLY_TYPES)
        if options.get("obs_last_action") and not enemy:
            facts += one_hot(last_action[other], len(avail))
        seen = units["health"][other] > 0 and np.hypot(dx, dy) < 9
        values += facts if seen else [0.0] * len(facts)
    values += [units["health"][agent] / HEALTH[kinds[agent]]]
    values += [units["shield"][agent] / SHIELD[kinds[agent]]] if MAPS[name]["ally_race"] == "P" else []
    values += type_bits(name, kinds[agent], ALLY_TYPES)
    values = values if alive else [0.0] * len(values)
    if options.get("obs_timestep_number"):
        values.append(step / MAPS[name]["episode_limit"])
    return values


def global_state(name, kinds, units, last_action, step, options):
    spec, allies = MAPS[name], MAPS[name]["n_agents"]
    if options.get("obs_instead_of_state"):
        return [v for a in range(allies) for v in observation(name, kinds, units, last_action, step, a, options)]
    values = []
    for u, kind in enumerate(kinds):
        enemy = u >= allies
        facts = [units["health"][u] / HEALTH[kind]]
        if kind == "medivac":
            charge = units["energy"][u] / 200
        else:
            charge = max(units["cooldown"][u], 0) / MAX_COOLDOWN.get(kind, 15)
        facts += [] if enemy else [charge]
        facts += [(units["x"][u] - 16) / 32, (units["y"][u] - 16) / 32]
        facts += [units["shield"][u] / SHIELD[kind]] if spec["enemy_race" if enemy else "ally_race"] == "P" else []
        facts += type_bits(name, kind, ENEMY_TYPES if enemy else ALLY_TYPES)
        values += facts if units["health"][u] > 0 else [0.0] * len(facts)
    if options.get("state_last_action", True):
        values += [bit for action in last_action for bit in one_hot(action, 6 + spec["n_enemies"])]
    if options.get("state_timestep_number"):
        values.append(step / spec["episode_limit"])
    return values


def team_reward(name, kinds, before, after):
    allies = MAPS[name]["n_agents"]
    total = sum(HEALTH[kind] + SHIELD.get(kind, 0) + 10 for kind in kinds[allies:]) + 200
    earned = 0.0
    for u in range(allies, len(kinds)):
        if before["health"][u] > 0:
            earned += before["health"][u] + before["shield"][u]
            earned += 10 if after["health"][u] <= 0 else -after["health"][u] - after["shield"][u]
    return abs(earned) / (total / 20)


# ---- helpers ----
def random_layout(name, matches, seed):
    """Units anywhere on the map, in walls too: what is seen does not depend on how one got there."""
    rng, kinds = np.random.default_rng(seed), kinds_of(name)
    shape = (matches, len(kinds))
    crowd = rng.uniform(0, 32, (matches, 1)), rng.uniform(0, 32, (matches, 1))
    alive = rng.random(shape) < 0.8
    shield = np.array([SHIELD.get(kind, 0) for kind in kinds])
    layout = {
        "x": np.clip(crowd[0] + rng.uniform(-9, 9, shape), 0, 31.99),
        "y": np.clip(crowd[1] + rng.uniform(-9, 9, shape), 0, 31.99),
        "health": rng.uniform(0.01, 1, shape) * np.array([HEALTH[kind] for kind in kinds]) * alive,
        "shield": rng.uniform(0, 1, shape) * shield * (rng.random(shape) < 0.7) * alive,
        "cooldown": rng.uniform(0, 1, shape) * np.array([MAX_COOLDOWN.get(kind, 0) for kind in kinds]) * alive,
        "energy": rng.uniform(0, 200, shape) * np.array([kind == "medivac" for kind in kinds]) * alive,
    }
    last_action = rng.integers(-1, 6 + MAPS[name]["n_enemies"], (matches, MAPS[name]["n_agents"]))
    return {key: value.astype(np.float32) for key, value in layout.items()}, last_action


def assert_as_specified(name, options, units, last_action, step, obs, info):
    kinds, agents = kinds_of(name), range(MAPS[name]["n_agents"])
    for m in range(len(last_action)):
        match = {key: values[m] for key, values in units.items()}
        avail = np.array([available_actions(name, kinds, match, a) for a in agents])
        np.testing.assert_array_equal(info["avail"][m].numpy(), avail, err_msg=f"avail of match {m}")
        seen = np.array([observation(name, kinds, match, last_action[m], step, a, options) for a in agents])
        np.testing.assert_allclose(obs[m].numpy(), seen, atol=TOLERANCE, err_msg=f"obs of match {m}")
        state = global_state(name, kinds, match, last_action[m], step, options)
        np.testing.assert_allclose(info["state"][m].numpy(), state, atol=TOLERANCE, err_msg=f"state of match {m}")


def as_numpy(units):
    return {key: values.numpy().copy() for key, values in units.items()}


def golden(name):
    return {key.removeprefix(f"{name}/"): GOLDEN[key] for key in GOLDEN.files if key.startswith(f"{name}/")}


def at_golden_layout(name):
    data = golden(name)
    env = envs.make(name, num_envs=len(data["x"]))
    env.reset()
    keys = ("x", "y", "health", "shield", "cooldown", "energy", "last_action")
    return env, data, env.set_units(**{key: torch.from_numpy(data[key]) for key in keys})


# ---- SMAC's own answers ----
@pytest.mark.parametrize("name", GOLDEN_MAPS)
def test_observation_state_and_masks_are_those_of_smac(name):
    env, data, (obs, info) = at_golden_layout(name)
    assert list(env.unit_kinds) == data["units"].tolist()
    np.testing.assert_array_equal(info["avail"].numpy(), data["avail"])
    np.testing.assert_allclose(obs.numpy(), data["obs"], atol=TOLERANCE)
    np.testing.assert_allclose(info["state"].numpy(), data["state"], atol=TOLERANCE)


@pytest.mark.parametrize("name", GOLDEN_MAPS)
def test_reward_is_that_of_smac(name):
    env, data, _ = at_golden_layout(name)
    reward = env.reward_since(torch.from_numpy(data["prev_health"]), torch.from_numpy(data["prev_shield"]))
    assert reward.shape == (env.num_envs,)
    np.testing.assert_allclose(reward.cpu().numpy(), data["reward"], atol=TOLERANCE)


@pytest.mark.parametrize("name", GOLDEN_MAPS)
def test_restatement_agrees_with_smac(name):
    """Guards the other tests of this file: a wrong restatement would test nothing."""
    data, kinds = golden(name), kinds_of(name)
    assert kinds == data["units"].tolist()
    for m in range(len(data["x"])):
        units = {key: data[key][m] for key in ("x", "y", "health", "shield", "cooldown", "energy")}
        before = {"health": data["prev_health"][m], "shield": data["prev_shield"][m]}
        for a in range(MAPS[name]["n_agents"]):
            np.testing.assert_array_equal(available_actions(name, kinds, units, a), data["avail"][m, a])
            seen = observation(name, kinds, units, data["last_action"][m], 0, a, {})
            np.testing.assert_allclose(seen, data["obs"][m, a], atol=TOLERANCE)
        state = global_state(name, kinds, units, data["last_action"][m], 0, {})
        np.testing.assert_allclose(state, data["state"][m], atol=TOLERANCE)
        np.testing.assert_allclose(team_reward(name, kinds, before, units), data["reward"][m], atol=TOLERANCE)


# ---- all 23 maps ----
def test_there_are_23_maps():
    assert sorted(SIZES) == sorted(MAPS)
    assert set(SIZES) <= set(envs.list_ids())


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    env = envs.make(name)
    assert (env.obs_dim, env.state_dim, env.n_actions, env.n_agents, env.episode_limit) == SIZES[name]
    obs, info = env.reset()
    assert obs.shape == (1, env.n_agents, env.obs_dim)
    assert info["state"].shape == (1, env.state_dim)
    assert info["avail"].shape == (1, env.n_agents, env.n_actions)
    assert list(env.unit_kinds) == kinds_of(name)


@pytest.mark.parametrize("name", SIZES)
def test_start_is_as_the_map_says(name):
    env = envs.make(name, num_envs=8)
    obs, info = env.reset()
    units, kinds = as_numpy(env.units()), kinds_of(name)
    np.testing.assert_array_equal(units["health"], [[HEALTH[kind] for kind in kinds]] * 8)
    np.testing.assert_array_equal(units["shield"], [[SHIELD.get(kind, 0) for kind in kinds]] * 8)
    np.testing.assert_array_equal(units["energy"], [[50 * (kind == "medivac") for kind in kinds]] * 8)
    allies = MAPS[name]["n_agents"]
    for m in range(8):
        order = [(kinds[a], round(units["x"][m, a], 3), round(units["y"][m, a], 3)) for a in range(allies)]
        for before, after in itertools.pairwise(order):
            assert before[0] != after[0] or before <= after, "allies of a kind are numbered by x, then y"
    for team, members in (("ally", range(allies)), ("enemy", range(allies, len(kinds)))):
        for kind in set(kinds):
            points = [
                s["at"]
                for s in MAPS[name]["spawns"]
                if s["team"] == team and s["unit"] == kind
                for _ in range(s["count"])
            ]
            of_kind = [u for u in members if kinds[u] == kind]
            if of_kind:
                middle = np.array([units["x"][:, of_kind].mean(), units["y"][:, of_kind].mean()])
                assert np.abs(middle - np.mean(points, axis=0)).max() < 2.5
    assert_as_specified(name, {}, units, np.full((8, allies), -1), 0, obs, info)


SOME = ("3m", "2s3z", "MMM", "corridor")  # of all options among the quick tests
OPTIONS = {
    "plain": {},
    "all": {
        "obs_pathing_grid": True,
        "obs_terrain_height": True,
        "obs_last_action": True,
        "obs_timestep_number": True,
        "state_timestep_number": True,
        "state_last_action": False,
    },
    "obs instead of state": {"obs_instead_of_state": True, "obs_terrain_height": True, "obs_timestep_number": True},
    "state only": {"state_timestep_number": True, "obs_pathing_grid": True},
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=() if options in ("plain", "all") or name in SOME else pytest.mark.slow)
        for name in SIZES
        for options in OPTIONS
    ],
)
def test_observation_state_and_masks_are_as_specified(name, options):
    options = OPTIONS[options]
    env = envs.make(name, num_envs=4, seed=3, **options)
    env.reset()
    for _ in range(3):
        actions = env.scripted_actions("random").clone()
        obs, _, _, _, info = env.step(actions)
    assert info["alive"].any(1).all()
    assert_as_specified(name, options, as_numpy(env.units()), actions.numpy(), 3, obs, info)

    layout, last_action = random_layout(name, 4, seed=len(name))
    obs, info = env.set_units(
        **{key: torch.from_numpy(value) for key, value in layout.items()}, last_action=torch.from_numpy(last_action)
    )
    assert_as_specified(name, options, layout, last_action, 3, obs, info)


@pytest.mark.parametrize("name", SIZES)
def test_reward_is_as_specified(name):
    kinds = kinds_of(name)
    env = envs.make(name, num_envs=16)
    env.reset()
    before, _ = random_layout(name, 16, seed=1)
    after, _ = random_layout(name, 16, seed=2)
    for key in ("health", "shield"):
        after[key] *= before["health"] > 0  # nobody rises from the dead
    env.set_units(**{key: torch.from_numpy(after[key]) for key in ("health", "shield")})
    reward = env.reward_since(torch.from_numpy(before["health"]), torch.from_numpy(before["shield"]))
    expected = [
        team_reward(name, kinds, {k: v[m] for k, v in before.items()}, {k: v[m] for k, v in after.items()})
        for m in range(16)
    ]
    np.testing.assert_allclose(reward.cpu().numpy(), expected, atol=TOLERANCE)


def test_options_change_the_sizes_they_say():
    plain = envs.make("2s3z")
    assert envs.make("2s3z", obs_pathing_grid=True).obs_dim == plain.obs_dim + 8
    assert envs.make("2s3z", obs_terrain_height=True).obs_dim == plain.obs_dim + 9
    assert envs.make("2s3z", obs_last_action=True).obs_dim == plain.obs_dim + 4 * plain.n_actions
    assert envs.make("2s3z", obs_timestep_number=True).obs_dim == plain.obs_dim + 1
    assert envs.make("2s3z", state_timestep_number=True).state_dim == plain.state_dim + 1
    assert envs.make("2s3z", state_last_action=False).state_dim == plain.state_dim - 5 * plain.n_actions
    assert envs.make("2s3z", obs_instead_of_state=True).state_dim == 5 * plain.obs_dim

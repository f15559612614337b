"""SMACv2's scenarios: random teams, random places, sight and range by kind, its enemy, and its ways to see less.

The tables and functions here restate the rules in slow, plain Python.
"""

import itertools
import math

import pytest
import torch

import envs
from envs.battle.data import SCENARIOS
from envs.battle.rules import TARGET, TRAITS

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {  # actions, observation of Terran and Zerg, of Protoss, state of both
    (5, 5): (11, 82, 92, 120, 130), (10, 10): (16, 162, 182, 290, 310), (10, 11): (17, 170, 191, 306, 327),
    (20, 20): (26, 322, 362, 780, 820), (20, 23): (29, 346, 389, 858, 901),
}  # fmt: skip
KINDS = {  # in the order of the type bits
    "terran": ("marine", "marauder", "medivac"),
    "protoss": ("stalker", "zealot", "colossus"),
    "zerg": ("zergling", "hydralisk", "baneling"),
}
SIGHT = {"marine": 9, "marauder": 10, "medivac": 11, "stalker": 10, "zealot": 9, "colossus": 10, "zergling": 8,
         "hydralisk": 9, "baneling": 8}  # fmt: skip
REACH = {"marine": 5, "marauder": 6, "medivac": 4, "stalker": 6, "zealot": 2, "colossus": 7, "zergling": 2,
         "hydralisk": 5, "baneling": 2}  # fmt: skip
HEALTH = {"marine": 45, "marauder": 125, "medivac": 150, "stalker": 80, "zealot": 100, "colossus": 200, "zergling": 35,
          "hydralisk": 80, "baneling": 30}  # fmt: skip
SHIELD = {"stalker": 80, "zealot": 50, "colossus": 150}
CHARGE = {"marine": 15, "marauder": 25, "medivac": 200, "stalker": 35, "zealot": 22, "colossus": 24, "zergling": 11,
          "hydralisk": 10, "baneling": 1}  # fmt: skip
NORTH, STOP = 2, 1
COMPILED = pytest.mark.slow  # options that are compiled apart
SEEING_LESS = {"prob_obs_enemy": 0.0, "action_mask": False}  # SMACv2's extended partial observability
OTHERWISE = {"conic_fov": True, "use_unit_ranges": False, "obs_own_pos": False}


# ---- sizes ----
def test_sizes_are_smacv2s():
    assert len(SCENARIOS) == 15
    for race, size in itertools.product(KINDS, SIZES):
        env, protoss = envs.make(f"smacv2/{race}_{size[0]}_vs_{size[1]}"), race == "protoss"
        actions, obs, protoss_obs, state, protoss_state = SIZES[size]
        assert (env.n_agents, env.n_enemies, env.n_actions, env.episode_limit) == (*size, actions, 200)
        assert (env.obs_dim, env.state_dim) == ((protoss_obs, protoss_state) if protoss else (obs, state))


def test_sizes_with_options():
    for race, sizes in {"terran": (12, 90, 144), "protoss": (11, 101, 149), "zerg": (11, 90, 138)}.items():
        env = envs.make(f"smacv2/{race}_5_vs_5", n_agents=6, n_enemies=5)
        assert (env.n_actions, env.obs_dim, env.state_dim) == sizes
    env = envs.make("smacv2/zerg_5_vs_5", conic_fov=True)
    assert (env.n_actions, env.obs_dim, env.state_dim) == (23, 84, 120 + 5 * 2 + 5 * 12)
    for options, message in (
        ({"n_enemies": 0}, "n_enemies"),
        ({"n_agents": 1, "n_enemies": 1}, "together"),
        ({"prob_obs_enemy": 2.0}, "prob_obs_enemy"),
        ({"prob_obs_enemy": 0.5, "n_agents": 25}, "24 agents at most"),
    ):
        with pytest.raises(ValueError, match=message):
            envs.make("smacv2/zerg_5_vs_5", **options)


# ---- random teams and places ----
CHI_SQUARED = {1: 10.8, 2: 13.8, 3: 16.3, 7: 24.3, 9: 27.9}  # degrees of freedom: once in a thousand samples


def assert_drawn_from(shares, counts):
    counts, shares = counts.double(), torch.tensor(shares, dtype=torch.float64)
    expected = counts.sum() * shares
    assert float(((counts - expected) ** 2 / expected).sum()) < CHI_SQUARED[len(shares) - 1]


def assert_uniform(values, least, most, bins):
    assert values.min() >= least and values.max() <= most
    assert_drawn_from([1 / bins] * bins, torch.histc(values.double(), bins, least, most))


@pytest.mark.parametrize("race", KINDS)
def test_distributions_over_100_000_resets(race):
    env = envs.make(f"smacv2/{race}_5_vs_5", num_envs=20_000, seed=1)
    kinds, x, y = [], [], []
    for _ in range(5):
        env.reset()
        kinds.append(env.kinds.clone())
        x.append(env.units()["x"].clone())
        y.append(env.units()["y"].clone())
    kinds, x, y = (torch.cat(values) for values in (kinds, x, y))
    allies, enemies = kinds[:, :5], kinds[:, 5:]
    alone = 0.1**5 if race != "protoss" else 0  # such a team is drawn again
    rare = (0.1 - alone) / (1 - alone)
    assert_drawn_from([(1 - rare) / 2, (1 - rare) / 2, rare], torch.bincount(allies.flatten(), minlength=3))
    assert_drawn_from([0.45, 0.45, 0.1], torch.bincount(enemies[:, 2], minlength=3))  # no place is of one kind
    assert torch.equal(allies.sort(1).values, enemies.sort(1).values)

    by_name = torch.tensor([sorted(KINDS[race]).index(kind) for kind in KINDS[race]])[allies.long()]
    number = torch.stack((by_name.double(), x[:, :5].double()), -1)
    later = number.diff(dim=1)
    assert ((later[..., 0] > 0) | ((later[..., 0] == 0) & (later[..., 1] >= 0))).all()  # by kind, then from the west

    surrounded = ((x[:, :5] - 16).abs() < 3).all(1) & ((y[:, :5] - 16).abs() < 3).all(1)
    assert_drawn_from([0.5, 0.5], torch.bincount(surrounded.long()))
    mx, my = x[~surrounded], y[~surrounded]
    assert_uniform(mx[:, :5].flatten(), 0, 15, 10)
    assert_uniform(my[:, :5].flatten(), 0, 32, 8)
    for theirs, ours in ((32 - mx[:, 5:], mx[:, :5]), (my[:, 5:], my[:, :5])):
        torch.testing.assert_close(theirs.sort(1).values, ours.sort(1).values, atol=2e-3, rtol=0)
    # the first enemy stands where its group does, on a diagonal; five of them never reach into the next corner
    dx, dy = x[surrounded, 5:] - 16, y[surrounded, 5:] - 16
    torch.testing.assert_close(dx[:, 0].abs(), dy[:, 0].abs(), atol=2e-3, rtol=0)
    corner = (dx > 0).long() * 2 + (dy > 0).long()
    assert_drawn_from([0.25] * 4, torch.bincount(corner[:, 0]))
    assert_uniform(torch.hypot(dx[:, 0], dy[:, 0]), 2**1.5 - 1e-3, 16 * 2**0.5 + 1e-3, 10)
    alone = sum(g**-4 for g in (1, 2, 3, 4)) / 4  # the chance that all five are in one of g groups
    assert_drawn_from([1 - alone, alone], torch.bincount((corner == corner[:, :1]).all(1).long()))


def test_surplus_enemies_are_a_team_of_their_own():
    for race in KINDS:
        env = envs.make(f"smacv2/{race}_5_vs_5", num_envs=4_000, seed=2, n_agents=1, n_enemies=3)
        env.reset()
        rare, x = env.kinds == 2, env.units()["x"]
        assert torch.equal(env.kinds[:, 1], env.kinds[:, 0])
        assert rare[:, 0].any() == rare[:, 2:].all(1).any() == (race == "protoss")
        assert rare[:, 2].any()  # but not all of them
        mirrored = (x[:, 1] - (32 - x[:, 0])).abs() < 2e-3
        assert x[mirrored, 2:].min() >= 16 and x[mirrored, 2:].max() > 31
    one_more = envs.make("smacv2/zerg_10_vs_11", num_envs=2_000, seed=3)
    one_more.reset()
    assert (one_more.kinds[:, 20] != 2).all()


def test_teams_depend_on_the_seed_alone():
    one, same, other = (envs.make("smacv2/zerg_5_vs_5", num_envs=64, seed=seed) for seed in (5, 5, 6))
    for env in (one, same, other):
        env.reset()
    assert torch.equal(one.kinds, same.kinds) and not torch.equal(one.kinds, other.kinds)
    before = one.kinds.clone()
    one.reset()
    assert not torch.equal(one.kinds, before)


# ---- what agents see, once more ----
def stage(race, kinds, x, y, options=None, **values):
    """One match of these kinds, allies first, at these places: (env, observations of the agents, info)."""
    agents = len(kinds) // 2
    if len(kinds) == 2:  # and one far away
        kinds, x, y = [*kinds, kinds[1]], [*x, 31.9], [*y, 0.1]
        values = {key: [*value, value[1]] for key, value in values.items()}
    env = envs.make(f"smacv2/{race}_5_vs_5", n_agents=agents, n_enemies=len(kinds) - agents, **(options or {}))
    env.reset()
    set_kinds(env, [[KINDS[race].index(kind) for kind in kinds]])
    values = {"x": x, "y": y, "health": [HEALTH[kind] for kind in kinds], **values}
    obs, info = env.set_units(**{key: torch.tensor([value], dtype=torch.float32) for key, value in values.items()})
    return env, obs[0], info


def set_kinds(env, kinds):
    env._simulation["whole"][TRAITS] = torch.tensor(kinds, dtype=torch.int32)


class Restated:
    """One match as SMACv2 shows it. units: x, y, health, shield, cooldown, energy, each a list with allies first."""

    def __init__(self, race, kinds, agents, units, last_actions, facing, options):
        self.race, self.kinds, self.agents, self.units = race, kinds, agents, units
        self.last_actions, self.facing, self.options = last_actions, facing, options
        enemies = len(kinds) - agents
        self.first_target = 18 if options.get("conic_fov") else 6
        self.actions = self.first_target + (max(agents, enemies) if race == "terran" else enemies)

    def alive(self, u):
        return self.units["health"][u] > 0

    def offset(self, a, u):
        return self.units["x"][u] - self.units["x"][a], self.units["y"][u] - self.units["y"][a]

    def looked_at(self, a, u):
        if not self.options.get("conic_fov"):
            return True
        dx, dy = self.offset(a, u)
        apart = math.atan2(dy, dx) - 2 * math.pi * self.facing[a] / 12
        return abs((apart + math.pi) % (2 * math.pi) - math.pi) < math.radians(15)

    def sight(self, a):
        return SIGHT[self.kinds[a]] if self.options.get("use_unit_ranges", True) else 9

    def reach(self, a):
        return REACH[self.kinds[a]] if self.options.get("use_unit_ranges", True) else 6

    def seen(self, a, u):
        return self.alive(u) and math.hypot(*self.offset(a, u)) < self.sight(a) and self.looked_at(a, u)

    def target(self, a, j):
        """The unit that attack j of agent a means; None: there is none."""
        if self.kinds[a] == "medivac":
            return j if j < self.agents and self.kinds[j] != "medivac" else None
        return self.agents + j if self.agents + j < len(self.kinds) else None

    def in_reach(self, a, j):
        u = self.target(a, j)
        if u is None or not self.alive(u):
            return False
        return math.hypot(*self.offset(a, u)) <= self.reach(a) and self.looked_at(a, u)

    def available(self, a):
        if not self.alive(a):
            return [action == 0 for action in range(self.actions)]
        x, y = self.units["x"][a], self.units["y"][a]
        moves = [int(y + 1) < 32, int(y - 1) >= 0, int(x + 1) < 32, int(x - 1) >= 0]
        looks = [True] * (self.first_target - 6)
        aims = []
        for j in range(self.actions - self.first_target):
            u = self.target(a, j)
            everywhere = not self.options.get("action_mask", True)
            aims.append(u is not None and self.alive(u) and (everywhere or self.in_reach(a, j)))
        return [False, True, *moves, *looks, *aims]

    def type_bits(self, u):
        return [float(self.kinds[u] == kind) for kind in KINDS[self.race]]

    def strength(self, u):
        kind = self.kinds[u]
        shield = [self.units["shield"][u] / SHIELD[kind]] if self.race == "protoss" else []
        return [self.units["health"][u] / HEALTH[kind], *shield]

    def looks(self, a):
        if not self.options.get("conic_fov"):
            return []
        angle = 2 * math.pi * self.facing[a] / 12
        return [math.cos(angle), math.sin(angle)]

    def observation(self, a):
        row = [float(can) for can in self.available(a)[2:6]]
        others = [*range(self.agents, len(self.kinds)), *(u for u in range(self.agents) if u != a)]
        for u in others:
            (dx, dy), sight = self.offset(a, u), self.sight(a)
            first = self.in_reach(a, u - self.agents) if u >= self.agents else 1
            facts = [float(first), math.hypot(dx, dy) / sight, dx / sight, dy / sight]
            facts += self.strength(u) + self.type_bits(u)
            row += facts if self.seen(a, u) else [0.0] * len(facts)
        row += self.strength(a)
        if self.options.get("obs_own_pos", True):
            row += [self.units["x"][a] / 32, self.units["y"][a] / 32]
        row += self.looks(a) + self.type_bits(a)
        return row if self.alive(a) else [0.0] * len(row)

    def state(self):
        row = []
        for u, kind in enumerate(self.kinds):
            health, *shield = self.strength(u)
            charge = self.units["energy" if kind == "medivac" else "cooldown"][u] / CHARGE[kind]
            place = [(self.units[axis][u] - 16) / 32 for axis in ("x", "y")]
            facts = [health, *([charge] if u < self.agents else []), *place, *shield]
            facts += (self.looks(u) if u < self.agents else []) + self.type_bits(u)
            row += facts if self.alive(u) else [0.0] * len(facts)
        for last in self.last_actions:
            row += [float(last == action) for action in range(self.actions)]
        return row

    def reward(self, health, shield):
        """For coming from this health and shield, without the win."""
        best, earned = 200.0, 0.0
        for u in range(self.agents, len(self.kinds)):
            best += 10 + HEALTH[self.kinds[u]] + SHIELD.get(self.kinds[u], 0)
            if health[u] > 0:
                earned += health[u] + shield[u] - self.units["health"][u] - self.units["shield"][u]
                earned += 0 if self.alive(u) else 10
        return max(earned, 0) / best * 20


@pytest.mark.parametrize("options", [{}, *(pytest.param(o, marks=COMPILED) for o in (SEEING_LESS, OTHERWISE))], ids=str)
@pytest.mark.parametrize("race", KINDS)
def test_observation_state_mask_and_reward_restated(race, options):
    """Random teams at random places, near one another, some of them dead, with any last action."""
    matches, agents, enemies = 24, 6, 5
    env = envs.make(f"smacv2/{race}_5_vs_5", num_envs=matches, seed=4, n_agents=agents, n_enemies=enemies, **options)
    env.reset()
    rng = torch.Generator().manual_seed(5)
    shape, facing = (matches, agents + enemies), torch.zeros(matches, agents, dtype=torch.long)
    if options.get("conic_fov"):
        facing = torch.randint(0, 12, facing.shape, generator=rng)
        env.step(6 + facing)
    random = lambda: torch.rand(shape, generator=rng)  # noqa: E731
    names = [[KINDS[race][k] for k in row] for row in env.kinds.tolist()]
    full, most = (torch.tensor([[table.get(name, 0) for name in row] for row in names]) for table in (HEALTH, SHIELD))
    alive = random() < 0.8
    units = {
        "x": (random() * 14 + torch.rand(matches, 1, generator=rng) * 18).float(),
        "y": (random() * 14 + torch.rand(matches, 1, generator=rng) * 18).float(),
        "health": (0.01 + 0.99 * random()) * full * alive,
        "shield": random() * most * alive,
        "cooldown": random() * 9,
        "energy": random() * 200,
    }
    last = torch.randint(-1, env.n_actions, (matches, agents), generator=rng)
    obs, info = env.set_units(**units, last_action=last)
    before = {"health": random() * full, "shield": random() * most}
    rewards = env.reward_since(**before)
    plain = {key: value.tolist() for key, value in units.items()}
    for m in range(matches):
        match = Restated(race, names[m], agents, {key: value[m] for key, value in plain.items()}, last[m].tolist(),
                         facing[m].tolist(), options)  # fmt: skip
        rows = torch.tensor([match.observation(a) for a in range(agents)])
        if "prob_obs_enemy" in options:  # to some an enemy is not shown: only those rows may be empty
            columns = slice(4, 4 + enemies * (9 if race == "protoss" else 8))
            hidden = (obs[m, :, columns].unflatten(1, (enemies, -1)) == 0).all(2)
            rows[:, columns].unflatten(1, (enemies, -1))[hidden] = 0
        torch.testing.assert_close(obs[m], rows, atol=1e-5, rtol=0)
        assert info["avail"][m].tolist() == [match.available(a) for a in range(agents)]
        torch.testing.assert_close(info["state"][m], torch.tensor(match.state()), atol=1e-5, rtol=0)
        earned = match.reward(*(before[key][m].tolist() for key in ("health", "shield")))
        assert float(rewards[m]) == pytest.approx(earned, abs=1e-4)


@pytest.mark.parametrize("race", KINDS)
def test_sight_and_range_of_every_kind(race):
    """Seen nearer than the sight, offered up to the reach."""
    target = KINDS[race][0]
    for kind in KINDS[race]:
        for distance, seen in ((SIGHT[kind] - 0.01, True), (SIGHT[kind], False)):
            _, obs, _ = stage(race, [kind, target], [2, 2 + distance], [16, 16])
            assert bool(obs[0, 5]) == seen
        if kind != "medivac":
            for distance, offered in ((REACH[kind], True), (REACH[kind] + 0.01, False)):
                _, obs, info = stage(race, [kind, target], [2, 2 + distance], [16, 16])
                assert bool(info["avail"][0, 0, 6]) == bool(obs[0, 4]) == offered


def test_places_are_read_off_observations():
    env, obs, _ = stage("terran", ["marine", "medivac", "marine", "marauder"], [4, 8, 6, 9], [16, 20, 12, 17])
    places, seen = env.places(obs)
    assert seen.all()
    torch.testing.assert_close(places[0], torch.tensor([[2.0, -4], [5, 1], [4, 4]]), atol=1e-4, rtol=0)
    torch.testing.assert_close(places[1], torch.tensor([[-2.0, -8], [1, -3], [-4, -4]]), atol=1e-4, rtol=0)


# ---- the enemy ----
def test_the_enemy_keeps_its_target_and_then_takes_the_nearest():
    env, *_ = stage("terran", ["marine", "marauder", "marine", "marine"], [10, 24, 16, 31], [16, 16, 16, 31])
    stop = torch.full((1, 2), STOP)
    env.step(stop)
    assert env._simulation["whole"][TARGET, 0, 2] == 0
    env.set_units(x=torch.tensor([[6.0, 17, 16, 31]]))  # another is nearer now
    for _ in range(4):
        env.step(stop)
        assert env._simulation["whole"][TARGET, 0, 2] == 0
    env.set_units(health=torch.tensor([[0.0, 125, 45, 45]]))
    env.step(torch.tensor([[0, STOP]]))
    assert env._simulation["whole"][TARGET, 0, 2] == 1


def test_a_marauder_has_nothing_to_do_beside_a_medivac_and_a_medivac_stays():
    env, *_ = stage("terran", ["medivac", "marine", "marauder", "medivac"], [16, 1, 18, 28], [16, 1, 16, 28])
    place = [env.units()[axis].clone() for axis in ("x", "y")]
    for _ in range(6):
        env.step(torch.full((1, 2), STOP))
    for before, axis in zip(place, ("x", "y")):
        assert torch.equal(env.units()[axis][0, 2:], before[0, 2:])
    assert env._simulation["whole"][TARGET, 0, 2] == -1


def play(env, policy="nearest"):
    """(return, info of the last step) of one match."""
    total = 0.0
    for _ in range(env.episode_limit):
        _, reward, terminated, truncated, info = env.step(env.scripted_actions(policy))
        total += float(reward[0, 0])
        if terminated[0] or truncated[0]:
            break
    return total, info


def test_medivacs_alone_have_lost():
    env, *_ = stage("terran", ["marine", "marine", "medivac", "marine"], [10, 9, 30, 12], [16] * 4)
    total, info = play(env)
    assert info["won"][0] and float(env.units()["health"][0, 2]) == 150
    assert total == pytest.approx((200 + 10 + 45) / (200 + 2 * 10 + 150 + 45) * 20, abs=0.3)
    env, *_ = stage("terran", ["medivac", "marine", "marine", "marauder"], [2, 14, 16, 15], [2, 16, 16, 17])
    total, info = play(env, "hold")
    assert not info["won"][0] and env.units()["health"][0, 0] == 150 and total < 10


def test_a_flawless_win_is_20_whatever_the_teams():
    for kinds in (["colossus", "stalker", "zealot", "stalker"], ["zealot", "zealot", "stalker", "colossus"]):
        env, *_ = stage("protoss", kinds, [8, 8, 11, 11.5], [16, 17, 16, 17], health=[200, 80, 1e-3, 1e-3],
                        shield=[150, 80, 0, 0])  # fmt: skip
        full = sum(HEALTH[kind] + SHIELD[kind] for kind in kinds[2:])
        total, info = play(env)
        assert info["won"][0] and total == pytest.approx(220 / (220 + full) * 20, abs=0.1)


def test_shields_that_grow_again_cost_nothing():
    env, *_ = stage("protoss", ["zealot", "zealot"], [1, 31], [1, 31], shield=[50.0, 10.0])
    for _ in range(40):
        _, reward, *_ = env.step(torch.full((1, 1), STOP))
        assert reward[0, 0] >= 0


# ---- seeing less ----
@COMPILED
def test_a_cone_is_where_an_agent_looks():
    env, *_ = stage("terran", ["marine", "marine"], [16, 20], [16, 16], OTHERWISE)
    for k in (3, 7, 0):
        angle = 2 * math.pi * k / 12
        x, y = 16 + 4 * math.cos(angle), 16 + 4 * math.sin(angle)
        obs, info = env.set_units(x=torch.tensor([[16, x, 31]]), y=torch.tensor([[16, y, 1]]))
        assert not obs[0, 0, 5] and not info["avail"][0, 0, 18]
        obs, _, _, _, info = env.step(torch.tensor([[6 + k]]))
        assert obs[0, 0, 5] and info["avail"][0, 0, 18]


@COMPILED
def test_the_order_before_goes_on_where_no_command_is_sent():
    env, _, info = stage("terran", ["marine", "marine"], [4, 30], [16, 16], SEEING_LESS)
    assert info["avail"][0, 0, 6]
    env.step(torch.tensor([[NORTH]]))
    y = float(env.units()["y"][0, 0])
    env.step(torch.tensor([[6]]))  # too far to shoot
    assert float(env.units()["y"][0, 0]) > y + 0.5
    assert float(env.units()["x"][0, 0]) == 4


@COMPILED
@pytest.mark.parametrize("told", [0.0, 0.5])
def test_who_sights_an_enemy_first_and_who_is_told(told):
    """Who sights an enemy first knows of it until one of both is dead, and so do those who are told at that moment."""
    options = {"num_envs": 256, "seed": 7, "check": False}
    env = envs.make("smacv2/zerg_5_vs_5", prob_obs_enemy=told, action_mask=False, **options)
    plain = envs.make("smacv2/zerg_5_vs_5", **options)
    for batch in (env, plain):
        batch.reset()
    scout = torch.zeros(256, 5, 5, dtype=torch.bool)  # of agents and enemies: who has sighted whom
    scouts_lost = 0
    for step in range(40):
        seen, in_sight = (batch.obs[..., 4:44].unflatten(-1, (5, 8))[..., 5:].any(-1) for batch in (env, plain))
        assert not (seen & ~in_sight).any()
        if step == 0:  # of those who have an enemy in sight one knows of it, and each of the others if told
            others = (in_sight.sum(1) - 1).clamp(min=0).sum()
            know = seen.sum() - in_sight.any(1).sum()
            assert others > 500 and abs(know - told * others) <= 4 * (told * (1 - told) * others) ** 0.5
        if told == 0:
            alive, had = env.units()["health"] > 0, scout.any(1) & (env.units()["health"] > 0)[:, 5:]
            scout &= alive[:, :5].unsqueeze(2) & alive[:, 5:].unsqueeze(1)
            scouts_lost += int((had & ~scout.any(1)).sum())
            found = in_sight.any(1) & ~scout.any(1)
            scout |= seen & found.unsqueeze(1)  # any of those who have it in sight, but one
            assert torch.equal(scout.sum(1) == 1, scout.any(1)) and scout.any(1)[found].all()
            assert torch.equal(seen, scout & in_sight)
        action = plain.scripted_actions("nearest")
        for batch in (env, plain):
            batch.step(action)
        assert torch.equal(env.units()["x"], plain.units()["x"])  # seeing less changes nothing else
    assert scouts_lost > 10 or told > 0


@COMPILED
def test_released_observations_blank_those_before_an_unknown_enemy():
    kinds = ["zergling"] * 2 + ["hydralisk"] * 3
    x, y = [5, 6, 7, 8, 28], [16] * 5
    options = {"released_obs": True, "conic_fov": True}  # all look east; test_interface.py has the same compiled
    rows = lambda obs: obs[..., 4:28].reshape(2, 3, 8)[..., 1] > 0  # noqa: E731
    env, obs, _ = stage("zerg", kinds, x, y, options)
    assert not rows(obs).any()  # two in sight, but the last one is nobody's
    obs, _ = env.set_units(x=torch.tensor([[5.0, 6, 7, 28, 8]]))
    assert rows(obs).tolist() == [[True, False, True]] * 2  # once sighted it is known
    obs, _ = env.set_units(x=torch.tensor([[5.0, 6, 7, 9, 8]]))
    assert rows(obs).all()  # everybody is known now
    obs, _ = env.set_units(x=torch.tensor([[5.0, 6, 7, 9, 28]]))
    assert rows(obs).tolist() == [[True, True, False]] * 2
    obs, _ = env.set_units(health=torch.tensor([[35.0, 35, 80, 80, 0]]))
    assert not rows(obs).any()  # a corpse that is nobody's
    obs, _ = env.set_units(x=torch.tensor([[5.0, 6, 7, 9, 8]]))
    assert rows(obs).tolist() == [[True, True, False]] * 2


def test_a_match_of_smacv2_is_drawn():
    env = envs.make("smacv2/terran_5_vs_5", seed=9)
    env.reset()
    scene = env.scene()
    names = [unit["kind"] for unit in scene["units"]]
    assert names == [env.unit_kinds[k] for k in env.kinds[0].tolist()] and env.render().std() > 0

"""What holds at every step of every match, whatever the agents do: random play on all maps.

The quick version plays some dozens of matches, fewer on the largest maps. As many as the specification asks for:
`BATTLE_MATCHES=10000 pytest tests/envs/test_invariants.py -m slow`.
"""

import os

import numpy as np
import pytest
import torch

import envs
from envs.battle.data import MAPS, TERRAINS

NO_OP = 0
OVERLAP = 0.05
APART = 30  # steps, at most, after which units that were drawn on top of one another are apart
# health, shield, separation radius
UNITS = {
    "marine": (45, 0, 0.375),
    "marauder": (125, 0, 0.5625),
    "medivac": (150, 0, 0.0),  # it flies
    "stalker": (80, 80, 0.625),
    "zealot": (100, 50, 0.375),
    "colossus": (200, 150, 0.75),
    "hydralisk": (80, 0, 0.625),
    "zergling": (35, 0, 0.375),
    "baneling": (30, 0, 0.375),
    "spinecrawler": (300, 0, 0.875),
}
USUAL = 300
LARGE = {"25m": 80, "27m_vs_30m": 60, "corridor": 40, "so_many_baneling": 80, "bane_vs_bane": 60, "2c_vs_64zg": 16}


def walkable_cells(name):
    rows = TERRAINS[MAPS[name].terrain if name in MAPS else "field"].split()[::-1]
    return torch.tensor(np.array([[letter != "#" for letter in row] for row in rows]))


def deepest_overlap(x, y, separation, solid):
    """How far any two units stand in one another; `solid` (N, U) are those alive and on the ground."""
    distance = torch.hypot(x[:, :, None] - x[:, None], y[:, :, None] - y[:, None])
    apart = distance - separation[:, :, None] - separation[:, None]
    others = solid[:, :, None] & solid[:, None] & ~torch.eye(x.shape[1], dtype=torch.bool)
    return -apart[others].min().item() if others.any() else 0.0


def play_at_random(name, matches, seed, policy="random"):
    """Plays all matches to their end and checks every step of them."""
    env = envs.make(name, num_envs=matches, seed=seed, check=False)
    obs, info = env.reset()
    kinds = list(env.unit_kinds)
    numbers = torch.arange(len(kinds)).expand(matches, -1) if name in MAPS else env.kinds.long()
    facts = torch.tensor([UNITS[kind] for kind in kinds]).float()[numbers]
    full_health, full_shield, separation = facts.unbind(-1)
    grounded = torch.tensor([kind != "medivac" for kind in kinds])[numbers]
    walkable = walkable_cells(name)
    units = env.units()
    returns = torch.zeros(matches)
    over = torch.zeros(matches, dtype=torch.bool)
    dead = units["health"] <= 0
    assert not dead.any()

    for step in range(1, env.episode_limit + 1):
        choice = env.scripted_actions(policy)
        assert info["avail"].gather(2, choice[:, :, None]).all()
        obs, reward, terminated, truncated, info = env.step(choice)
        health, shield, x, y = (units[key] for key in ("health", "shield", "x", "y"))

        for key, tensor in {"obs": obs, "state": info["state"], "reward": reward, **units}.items():
            assert torch.isfinite(tensor).all(), f"{key} at step {step}"
        assert ((health >= 0) & (health <= full_health)).all()
        assert ((shield >= 0) & (shield <= full_shield)).all()

        assert not (dead & (health > 0)).any(), "the dead stay dead"
        dead = health <= 0
        assert torch.equal(info["alive"], ~dead[:, : env.n_agents])
        avail = info["avail"]
        assert avail.any(2).all(), "everyone can do something"
        assert (avail[:, :, NO_OP] == ~info["alive"]).all()
        assert not avail[:, :, NO_OP + 1 :][~info["alive"]].any(), "the dead have no-op only"

        solid = ~dead & grounded
        assert ((x >= 0) & (x < 32) & (y >= 0) & (y < 32)).all()
        assert walkable[y.long(), x.long()][solid].all(), "no one leaves walkable ground"
        if name in MAPS or step > APART:
            assert deepest_overlap(x, y, separation, solid) <= OVERLAP

        assert (reward >= 0).all() and (reward[over] == 0).all() and (reward == reward[:, :1]).all()
        returns += reward[:, 0]
        assert not (truncated & ~over).any() or step == env.episode_limit
        assert not (terminated & truncated).any()
        over |= terminated | truncated
        if step == env.episode_limit:
            assert over.all(), "the limit ends every match"
        if over.all():
            break
    if name in MAPS and set(kinds[env.n_agents :]) == {"marine"}:  # no enemy regenerates or is healed
        assert returns.max() <= 20.5
    assert returns.max() > 0
    return returns


ONE_OF_EACH = (  # of the terrains and of the kinds of units
    "3m", "25m", "MMM", "1c3s5z", "3s_vs_5z", "2s_vs_1sc", "6h_vs_8z", "corridor", "bane_vs_bane", "so_many_baneling",
    "2c_vs_64zg", "smacv2/terran_5_vs_5", "smacv2/protoss_10_vs_11", "smacv2/zerg_10_vs_10",
)  # fmt: skip


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_random_play_quick(name):
    play_at_random(name, LARGE.get(name, USUAL) // 5, seed=1)


@pytest.mark.parametrize("name", ["3m", "2s3z", "MMM", "2m_vs_1z", "6h_vs_8z", "so_many_baneling"])
def test_purposeful_play_quick(name):
    """Random play seldom fights to the end or crowds round a foe; this does."""
    play_at_random(name, 16, seed=2, policy="nearest")


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPS)
def test_random_play(name, threads):
    matches = int(os.environ.get("BATTLE_MATCHES", 2 * LARGE.get(name, USUAL)))
    for seed in range(-(-matches // 1000)):
        play_at_random(name, min(matches, 1000), seed=100 + seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPS)
def test_purposeful_play(name, threads):
    play_at_random(name, LARGE.get(name, USUAL), seed=3, policy="nearest")

"""Neither side, no order of units and no direction is favoured: equal teams of equal behaviour win equally often."""

import dataclasses

import pytest
import torch

import envs
from envs.battle.data import MAPS, TERRAINS

EQUAL_TEAMS = ["3m", "8m", "2s3z", "MMM"]


def share_of_wins(name, matches, policy=None, **options):
    """The allies' wins among the decided matches. Without a policy they behave as the enemy does."""
    env = envs.make(name, num_envs=matches, check=False, auto_allies=policy is None, **options)
    env.reset()
    nothing = torch.zeros(matches, env.n_agents, dtype=torch.int64)
    fighters = torch.tensor([kind != "medivac" for kind in env.unit_kinds])
    over = torch.zeros(matches, dtype=torch.bool)
    if name.startswith("smacv2/"):  # those that are surrounded do not count
        x, fighters = env.units()["x"], fighters[env.kinds.long()]
        over = ((x[:, : env.n_agents].sum(1) + x[:, env.n_agents :].sum(1)) / env.n_agents - 32).abs() > 0.01
        matches = int((~over).sum())
    wins = losses = 0
    for _ in range(env.episode_limit):
        _, _, terminated, truncated, info = env.step(env.scripted_actions(policy) if policy else nothing)
        ends = (terminated | truncated) & ~over
        enemies_left = ((env.units()["health"] > 0) & fighters)[:, env.n_agents :].any(1)
        wins += (ends & info["won"]).sum().item()
        losses += (ends & terminated & enemies_left).sum().item()
        over |= ends
        if over.all():
            break
    assert over.all()
    assert wins + losses > 0.8 * matches, "most matches are decided"
    return wins / (wins + losses)


def mirrored(name, monkeypatch):
    """The map with east and west swapped."""
    spec = MAPS[name]
    rows = TERRAINS[spec.terrain].split()
    monkeypatch.setitem(TERRAINS, "mirrored", "\n".join(row[::-1] for row in rows))
    allies, enemies = (
        [(count, kind, (32 - x, y)) for count, kind, (x, y) in side] for side in (spec.allies, spec.enemies)
    )
    order = (spec.order[0], *((32 - x, y) for x, y in spec.order[1:]))
    return dataclasses.replace(spec, terrain="mirrored", allies=allies, enemies=enemies, order=order)


def test_equal_teams_win_equally_often_quick():
    assert share_of_wins("3m", 4_000) == pytest.approx(0.5, abs=0.05)


def test_mirroring_the_map_changes_no_rate_quick(monkeypatch):
    usual = share_of_wins("8m", 1_000, policy="nearest")
    assert share_of_wins("8m", 1_000, policy="nearest", map_spec=mirrored("8m", monkeypatch)) == pytest.approx(
        usual, abs=0.08
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL_TEAMS)
def test_equal_teams_win_equally_often(name, threads):
    assert share_of_wins(name, 10_000) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("race", ["terran", "protoss", "zerg"])
def test_mirror_images_win_equally_often(race):
    assert share_of_wins(f"smacv2/{race}_5_vs_5", 8_000) == pytest.approx(0.5, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL_TEAMS)
def test_equal_teams_win_equally_often_on_the_mirrored_map(name, monkeypatch, threads):
    assert share_of_wins(name, 10_000, map_spec=mirrored(name, monkeypatch)) == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), [("3m", "nearest"), ("8m", "weakest"), ("MMM", "nearest")])
def test_mirroring_the_map_changes_no_rate(name, policy, monkeypatch, threads):
    usual = share_of_wins(name, 10_000, policy=policy)
    turned = share_of_wins(name, 10_000, policy=policy, map_spec=mirrored(name, monkeypatch))
    assert turned == pytest.approx(usual, abs=0.02)

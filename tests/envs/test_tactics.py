"""What wins a map in StarCraft II wins it here, and what loses there loses here: scripts, no learning."""

import pytest
import torch

import envs
from envs.battle.data import UNITS

NO_OP, STOP, NORTH, SOUTH, EAST, WEST, ATTACK = range(7)
WAYS = torch.tensor([(0, 1), (0, -1), (1, 0), (-1, 0)])  # of the moves
MATCHES = 128


def play(name, script, seed=0, agents=None):
    """(share of wins, share of defeats, mean return) of a script: `script(env, info, memory)` returns the actions.

    With `agents` only so many are alive.
    """
    env = envs.make(name, num_envs=MATCHES, seed=seed, check=False)
    _, info = env.reset()
    health, memory = env.units()["health"].clone(), {}
    health[:, agents or env.n_agents : env.n_agents] = 0
    _, info = env.set_units(health=health)
    won, lost, over = torch.zeros(3, MATCHES, dtype=torch.bool)
    earned = torch.zeros(MATCHES)
    for _ in range(env.episode_limit):
        _, reward, terminated, truncated, info = env.step(script(env, info, memory))
        earned += reward[:, 0].masked_fill(over, 0.0)
        won |= info["won"] & ~over
        lost |= terminated & ~info["won"] & ~over
        over |= terminated | truncated
        if over.all():
            break
    return won.float().mean().item(), lost.float().mean().item(), earned.mean().item()


def between(env):
    """(from agents to living enemies (matches, agents, enemies, 2), their distances; the dead are far away)"""
    units, n = env.units(), env.n_agents
    place = torch.stack((units["x"], units["y"]), -1)
    vectors = place[:, None, n:] - place[:, :n, None]
    return vectors, vectors.norm(dim=-1).masked_fill((units["health"][:, n:] <= 0)[:, None], 99.0)


# ---- 2s_vs_1sc ----
STRIDE = UNITS["stalker"].speed / 2  # in a step


def stand_and_shoot(env, info, memory):
    """Attacks from as far as it may: 6, so that the way out of the crawler's range is short."""
    vectors, _ = between(env)
    after = (vectors - WAYS * STRIDE).norm(dim=-1)
    approach = torch.where(after < 5.95, -after, after).argmin(-1) + NORTH
    return torch.where(info["avail"][..., ATTACK], ATTACK, approach)


def take_turns(env, info, memory):
    """Who has more health and shield left stands nearer and is shot at. Both are in its range all the time."""
    vectors, distance = between(env)
    left = (env.units()["health"] + env.units()["shield"])[:, :2]
    front = memory.get("front", torch.tensor([True, False]))
    front = memory["front"] = torch.where(left == left.flip(1), front, left > left.flip(1))
    wanted = torch.where(front, 4.5, 5.9)
    after = (vectors - WAYS * STRIDE).norm(dim=-1)
    move = (after - wanted.unsqueeze(-1)).abs().argmin(-1) + NORTH
    in_place = (distance[..., 0] - wanted).abs() < 0.56 * STRIDE
    return torch.where(info["avail"][..., ATTACK] & in_place, ATTACK, move)


@pytest.mark.parametrize("seed", [0, 1])
def test_2s_vs_1sc_is_lost_by_standing_and_won_by_taking_turns(seed):
    """Without a rest, in which the crawler would heal and the return rise: SMAC's learners win it with 20.2."""
    assert play("2s_vs_1sc", stand_and_shoot, seed)[:2] == (0, 1)
    won, _, earned = play("2s_vs_1sc", take_turns, seed)
    assert won > 0.95 and earned == pytest.approx(20.2, abs=0.1)


# ---- 3s_vs_3z, 3s_vs_5z ----
def kite(env, info, memory, danger=2.2):
    """Runs from a zealot that is nearer than `danger`, or while reloading, but not into the edge of the map."""
    vectors, distance = between(env)
    units, n = env.units(), env.n_agents
    place = torch.stack((units["x"], units["y"]), -1)[:, :n, None] + WAYS * 1.5
    dead = (units["health"][:, n:] <= 0)[:, None, None]
    free = (vectors[:, :, None] - WAYS[:, None] * 1.5).norm(dim=-1).masked_fill(dead, 99.0).min(-1).values
    free -= ((place - 16).abs().amax(-1) - 9).clamp(min=0)
    run = free.masked_fill(~info["avail"][..., NORTH:ATTACK], -99.0).argmax(-1) + NORTH
    nearest, who = distance.min(-1)
    to_it = vectors.gather(2, who[..., None, None].expand(-1, -1, 1, 2))
    approach = (to_it * WAYS).sum(-1).argmax(-1) + NORTH
    can = info["avail"].gather(2, ATTACK + who[..., None])[..., 0] & (units["cooldown"][:, :n] <= 4)
    return torch.where(nearest < danger, run, torch.where(can, ATTACK + who, torch.where(nearest > 6, approach, run)))


@pytest.mark.parametrize("name", ["3s_vs_3z", "3s_vs_5z"])
def test_zealots_are_beaten_by_kiting_and_not_by_standing(name):
    for policy in ("nearest", "weakest", "hold"):
        assert play(name, lambda env, info, memory, policy=policy: env.scripted_actions(policy))[:2] == (0, 1)
    assert play(name, kite)[0] > 0.9


# ---- 6h_vs_8z ----
def run_away(env, info, memory):
    return kite(env, info, memory, danger=100.0)


@pytest.mark.parametrize("hydralisks", [1, 2])
def test_fleeing_hydralisks_are_caught(hydralisks):
    """They are no slower than the zealots behind them. The others cut them off."""
    assert play("6h_vs_8z", run_away, agents=hydralisks)[1] > 0.95

"""What is drawn of a battle: one match in plain words and numbers, for envs/pictures."""

import numpy as np

from envs.batch import FROZEN, RUNNING, STAGE, STEP
from envs.battle.rules import (
    BEFORE,
    BLAST,
    COOLDOWN,
    DELAY_LEAST,
    ENERGY,
    ENGAGE,
    FIGHT,
    HEALS,
    HEALTH,
    HURT_AT,
    LOOPS,
    MAX_HEALTH,
    MAX_SHIELD,
    ORDER,
    PERIOD,
    RADIUS,
    RANGE,
    SHIELD,
    SIGHT,
    SPLASH,
    TARGET,
    WIND_UP,
    X,
    Y,
)  # fmt: skip


def shots_of(real, whole, stat, step):
    """Who hit or healed whom in the last step, [from, to, "hit" or "heal"], inferred from the state after the step.

    Shots are not kept. But a unit that fired has most of its cooldown left, and its target was hurt in the same step.
    Now and then one shot is reported twice. A baneling that has just died has exploded.
    """
    shots = []
    for u, target in enumerate(whole[TARGET].tolist()):
        if target < 0 or whole[ORDER, u] not in (ENGAGE, FIGHT):
            continue
        lives, hurt = real[HEALTH, u] > 0, real[HURT_AT, target] >= (step - 1) * LOOPS
        if stat[HEALS, u]:
            reach = stat[RANGE, u] + stat[RADIUS, u] + stat[RADIUS, target]
            near = np.hypot(*(real[[X, Y], u] - real[[X, Y], target])) <= reach
            if lives and near and real[HEALTH, target] > 0 and real[ENERGY, u] > 0:
                shots.append([u, target, "heal"])
        elif stat[SPLASH, u] == BLAST:
            if not lives and real[BEFORE, u] > 0:
                shots.append([u, target, "hit"])
        elif lives and hurt and real[COOLDOWN, u] > max(stat[PERIOD, u] - stat[WIND_UP, u] + DELAY_LEAST - LOOPS, 0):
            shots.append([u, target, "hit"])
    return shots


def describe(title, limit, ground, kinds, agents, real, whole, stat, match, terminated, won):
    """The scene of one match.

    ground: rows of the terrain; kinds: names of the units; agents: how many units are allies. The arrays are those of
    envs/battle/rules.py, without the index of the match.
    """
    status = "running"
    if match[STAGE] != RUNNING:
        status = "won" if won else ("lost" if terminated else "time")
    units = zip(kinds, *real[[X, Y, HEALTH, SHIELD]].tolist(), *stat[[RADIUS, MAX_HEALTH, MAX_SHIELD]].tolist())
    return {
        "game": "battle",
        "title": title,
        "step": match[STEP],
        "limit": limit,
        "width": len(ground[0]),
        "height": len(ground),
        "ground": ground,
        "sight": float(SIGHT),
        "units": [
            {
                "side": int(u >= agents),
                "kind": kind,
                "x": x,
                "y": y,
                "radius": radius,
                "health": health,
                "max_health": max_health,
                "shield": shield,
                "max_shield": max_shield,
            }
            for u, (kind, x, y, health, shield, radius, max_health, max_shield) in enumerate(units)
        ],
        "shots": [] if match[STAGE] == FROZEN else shots_of(real, whole, stat, match[STEP]),
        "status": status,
    }

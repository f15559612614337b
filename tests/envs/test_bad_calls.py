"""Hostile calls of the environments, each refused by a ValueError that says what is allowed."""

import math

import gymnasium
import pytest
import torch

import envs
from envs.pettingzoo import parallel_env

NAN = math.nan
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")
X, HEALTH, TARGET, ORDER, LAST_ACTION = 0, 2, 0, 1, 6
ENGAGE = 2


def started(name, device="cpu", **options):
    env = envs.make(name, num_envs=2, device=device, **options)
    env.reset(seed=0)
    env.step(env.scripted_actions(env.policies[0]))
    return env


def restores(env, key, index, value, message):
    """Restoring a snapshot with that value is refused, and nothing has changed."""
    before, snapshot = env.snapshot(), env.snapshot()
    if index is None:
        snapshot[key] = value
    else:
        snapshot[key][index] = value
    with pytest.raises(ValueError, match=message):
        env.restore(snapshot)
    after = env.snapshot()
    assert all(torch.equal(before[name], after[name]) for name in before)


BATTLE = [
    ("real", (X, 1, 2), NAN, "x of match 1, unit 2 is nan.* from 0 to 32"),
    ("real", (X, 1, 2), 1e9, r"x of match 1, unit 2 is 1e\+09.* from 0 to 32"),
    ("real", (HEALTH, 0, 5), 46, "health of match 0, unit 5 is 46.* from 0 to 45"),
    ("whole", (TARGET, 0, 5), 10**9, r"target of match 0, unit 5 is 1e\+09.* from -1 to 5"),
    ("whole", (LAST_ACTION, 0, 1), -9, "last_action of match 0, unit 1 is -9.* from -1 to 8"),
    ("whole", (slice(0, 2), 1, 4), torch.tensor([-1, ENGAGE]), "target of match 1, unit 4.*0 to 5"),
    ("avail", (0, 0), True, r"avail\[0, 0, 0\]"),
    ("obs", (0, 0, 0), NAN, r"obs\[0, 0, 0\] is nan"),
    ("reward", (0, 0), math.inf, r"reward\[0, 0\] is inf"),
    ("real", None, torch.zeros(16, 2, 6, dtype=torch.float64), r"real should be torch.float32.*not torch.float64"),
    ("alive", None, torch.zeros(2, 3), r"alive should be torch.bool"),
    ("won", None, "yes", "won should be a tensor"),
    ("match", (1, 3), 7, "stage of match 1 is 7.* from 0 to 2"),
    ("match", (0, 2), 10**9, r"step of match 0 is 1e\+09.* from 0 to 60"),
]
HUNT = [
    ("hunter", (1, 2), 16, r"hunter\[1, 2\] is 16.* from -1 to 15"),
    ("hunter", (1, 2), -(10**9), r"hunter\[1, 2\] is -1e\+09.* from -1 to 15"),
    ("prey", (0, 0), 2**31 - 1, r"prey\[0, 0\] .* from -1 to 15"),
    ("ground", (0, 3), 7, r"ground\[0, 3\] is 7.* from 0 to 1"),
    ("last", (0, 0), 7, r"last\[0, 0\] is 7.* from -1 to 6"),
    ("earned", (0, 0), NAN, r"earned\[0, 0\] is nan"),
    ("avail", (0, 0), True, r"avail\[0, 0, \d\]"),
]


@pytest.mark.parametrize(("key", "index", "value", "message"), BATTLE)
def test_restore_of_a_battle_names_the_field_and_the_range(key, index, value, message):
    restores(started("3m"), key, index, value, message)


@pytest.mark.parametrize(("key", "index", "value", "message"), HUNT)
def test_restore_of_a_hunt_names_the_field_and_the_range(key, index, value, message):
    restores(started("stag_hunt_4x4"), key, index, value, message)


@needs_cuda
@pytest.mark.parametrize(("name", "case"), [("3m", BATTLE[1]), ("3m", BATTLE[6]), ("stag_hunt_4x4", HUNT[0])])
def test_restore_is_checked_on_cuda(name, case):
    restores(started(name, "cuda"), *case)


def test_a_snapshot_of_anything_else_is_refused():
    env = started("3m")
    for snapshot in (None, [], 3, {}, {"real": 1}):
        with pytest.raises(ValueError, match="snapshot"):
            env.restore(snapshot)


@pytest.mark.parametrize(
    ("field", "value", "limits"),
    [("x", NAN, "0 to 32"), ("x", -1.0, "0 to 32"), ("y", 1e9, "0 to 32"), ("health", NAN, "0 to 45"),
     ("health", -3.0, "0 to 45"), ("energy", 201.0, "0 to 200"), ("cooldown", math.inf, "-inf to inf"),
     ("last_action", 9, "-1 to 8")],
)  # fmt: skip
def test_set_units_names_the_field_and_the_range(field, value, limits):
    env = started("3m")
    before = env.snapshot()
    values = torch.ones(2, 3 if field == "last_action" else 6)
    values[1, 2] = value
    with pytest.raises(ValueError, match=f"{field} of match 1, unit 2 .* from {limits}"):
        env.set_units(**{"health": torch.ones(2, 6), field: values})
    after = env.snapshot()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"obs_last_action": 2}, "obs_last_action is True or False, not 2"), ({"autoreset": 2}, "autoreset is True or"),
     ({"check": "no"}, "check is True or"), ({"reward_win": NAN}, r"reward_win .* from -1e\+06 to 1e\+06, not nan"),
     ({"reward_defeat": math.inf}, "reward_defeat"), ({"reward_scale_rate": 0}, "reward_scale_rate"),
     ({"reward_win": -230.0}, "best return"), ({"map_spec": "8m"}, "map_spec"), ({"seed": NAN}, "seed is a whole"),
     ({"n_agents": 10**9}, "n_agents is at most 100"), ({"num_envs": 10**12}, "num_envs 1000000000000: .* GB")],
)  # fmt: skip
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        envs.make("3m", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"stag_reward": 1e39}, "rewards are above 0"), ({"strengths": [1e-60] * 4}, "strengths"),
     ({"prosocial": 3}, "prosocial"), ({"n_agents": 1000}, "n_agents is at most 64"),
     ({"limit": 10**30}, "limit is at most")],
)  # fmt: skip
def test_options_of_the_hunt_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        envs.make("stag_hunt", **options)


def test_what_is_no_action_or_policy_is_refused():
    env = envs.make("3m")
    with pytest.raises(RuntimeError, match=r"reset\(\) comes before"):
        env.scripted_actions("nearest")
    env.reset()
    for values in ("north", [[NAN] * 3], None, {}, [[1j] * 3], [[1], [2, 3]]):
        with pytest.raises(ValueError, match=r"actions are integers of shape \(1, 3\)"):
            env.step(values)
    with pytest.raises(ValueError, match=r"policies are integers of shape \(1, 3\)"):
        env.scripted_actions([[NAN] * 3])
    for call in (lambda: env.scene(1), lambda: env.render(index=-1), lambda: env.render(size=10**9)):
        with pytest.raises(ValueError, match="is a whole number from"):
            call()


def test_the_bridges_refuse_what_is_no_action():
    one = gymnasium.make("omg/3m-v0").unwrapped
    one.reset(seed=0)
    for action in (NAN, 1.5, "north", [1, 2]):
        with pytest.raises(ValueError, match=r"actions are integers of shape \(1,\)"):
            one.step(action)
    many = parallel_env("3m")
    many.reset(seed=0)
    for actions in ({}, dict.fromkeys(many.agents, NAN)):
        with pytest.raises(ValueError, match="the action of marine_0 is one of 0 to 8"):
            many.step(actions)

"""The stag hunt: its rules on grids placed by hand, and all of it against restatements in plain NumPy."""

from collections import deque

import numpy as np
import pytest
import torch
from worlds import shown

import envs

UP, DOWN, LEFT, RIGHT, STAY, STAG, HARE = range(7)
MOVES = {UP: (-1, 0), DOWN: (1, 0), LEFT: (0, -1), RIGHT: (0, 1)}
NS, NH, RAND, SWITCH, FOLLOW = range(5)
COPIES = 8  # of a match placed by hand


# ---- grids placed by hand, and what is read back from them ----
def placed(name, hunters, stags=(), hares=(), obstacles=(), **options):
    """Matches of that size, all alike, with things on (row, column) each or None for gone; no other prey."""
    env = envs.make(name, num_envs=COPIES, n_agents=len(hunters), pieces=0, **options)
    env.reset()

    def cells(spots, count):
        spots = [*spots, *[None] * (count - len(spots))]
        return torch.tensor([[-1 if spot is None else spot[0] * env.width + spot[1] for spot in spots]] * COPIES)

    blocked = torch.zeros(COPIES, env.height, env.width)
    for row, column in obstacles:
        blocked[:, row, column] = 1
    env.set_grid(cells(hunters, len(hunters)), cells(stags, env.stags), cells(hares, env.hares), blocked)
    return env


def act(env, *actions):
    """Plays the actions, one a hunter, in all copies of a match; the rewards of the first, which all have earned."""
    reward = env.step(torch.tensor([actions] * COPIES))[1]
    assert (reward == reward[0]).all()
    return pytest.approx(reward[0].tolist())


def spots(env, what, match=0):
    """The (row, column), or None for gone, of hunters, stags or hares."""
    snapshot = env.snapshot()
    cells = snapshot["hunter"] if what == "hunters" else snapshot["prey"]
    cells = {"hunters": cells, "stags": cells[:, : env.stags], "hares": cells[:, env.stags :]}[what]
    return [None if cell < 0 else divmod(cell, env.width) for cell in cells[match].tolist()]


def blocked_cells(env):
    return env.snapshot()["ground"].view(env.num_envs, env.height, env.width).numpy() == 1


def returns(env, policy, steps=None):
    """(num_envs, n_agents) what everyone earns in a match under scripted policies, without autoreset."""
    env.reset()
    total = torch.zeros(env.num_envs, env.n_agents)
    for _ in range(steps or env.episode_limit):
        total += env.step(env.scripted_actions(policy))[1]
    return total


def assert_all_alike(counts, expected=None):
    """Pearson's chi-square far from what chance would give, for up to 16 kinds (1 in 100,000)."""
    counts = np.asarray(counts, float)
    expected = counts.sum() / len(counts) if expected is None else expected
    assert ((counts - expected) ** 2 / expected).sum() < 51


def assert_equal_means(samples):
    """Columns whose means differ by no more than five standard errors."""
    means, errors = samples.mean(0), samples.std(0) / len(samples) ** 0.5
    assert errors.max() > 0
    assert (means.max() - means.min()) < 5 * (2**0.5) * errors.max(), means


# ---- make ----
@pytest.mark.parametrize(
    ("name", "agents", "size"),
    [
        ("stag_hunt", 4, (8, 8, 4, 1)),
        ("stag_hunt_4x4", 4, (4, 4, 4, 1)),
        ("stag_hunt_8x8_4h2s", 4, (8, 8, 4, 2)),
        ("stag_hunt_3x5_1h1s", 2, (3, 5, 1, 1)),
    ],
)
def test_sizes(name, agents, size):
    env = envs.make(name, n_agents=agents)
    assert (env.height, env.width, env.hares, env.stags) == size
    assert env.agents == [f"hunter_{a}" for a in range(agents)]
    assert (env.n_actions, env.episode_limit, env.policies) == (7, 35, ("NS", "NH", "RAND", "SWITCH", "FOLLOW"))
    assert env.obs_dim == env.height * env.width * (agents + 3) + 7 + 7 * agents
    assert env.state_dim == env.height * env.width * (agents + 3) + 1


def test_ids_are_listed():
    assert {"stag_hunt", "stag_hunt_4x4"} <= set(envs.list_ids())
    for unknown in ("stag_hunt_4x4x4", "stag_hunt_4x4_4h", "stag_hunt_4x4_4h1s_"):
        with pytest.raises(ValueError, match=r"unknown environment.*stag_hunt_4x4.*\{hares\}h\{stags\}s"):
            envs.make(unknown)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("stag_hunt_3x3_9h1s", {}, "10 prey do not fit on 9 free cells"),
        ("stag_hunt_4x4_8h1s", {"pieces": 2}, r"9 prey do not fit on 8 free cells \(4 x 4 less 2 pieces"),
        ("stag_hunt_4x4", {"pieces": 3}, "3 obstacle pieces.*half of 4 x 4 cells: at most 2"),
        ("stag_hunt_2x9_4h1s", {"pieces": 1}, "at least 3 rows and 3 columns, not 2 x 9"),
        ("stag_hunt_0x4_1h1s", {}, "1 to 64 rows and columns, not 0 x 4"),
        ("stag_hunt_4x65_1h1s", {}, "1 to 64 rows and columns, not 4 x 65"),
        ("stag_hunt_4x4_0h0s", {}, "nothing to hunt"),
        ("stag_hunt_4x4_0h1s", {"n_agents": 1}, "at least 2 hunters"),
        ("stag_hunt", {"n_agents": 0}, "n_agents is a whole number from 1 up, not 0"),
        ("stag_hunt", {"n_agents": 2.5}, "n_agents is a whole number from 1 up, not 2.5"),
        ("stag_hunt", {"pieces": -1}, "pieces is a whole number from 0 up, not -1"),
        ("stag_hunt", {"limit": 0}, "limit is a whole number from 1 up, not 0"),
        ("stag_hunt", {"strengths": [1, 2, 3]}, "strengths are 4 numbers above 0"),
        ("stag_hunt", {"strengths": [1, 2, 3, 0]}, "strengths are 4 numbers above 0"),
        ("stag_hunt", {"strengths": [1, 2, 3, float("inf")]}, "strengths are 4 numbers above 0"),
        ("stag_hunt", {"stag_reward": 0}, "rewards are above 0"),
        ("stag_hunt", {"hare_reward": float("nan")}, "rewards are above 0"),
        ("stag_hunt", {"view_radius": -1}, "view_radius is a whole number from 0 up"),
        ("stag_hunt", {"view_radius": 1.5}, "view_radius is a whole number from 0 up"),
        ("stag_hunt", {"radius": 1}, "no option 'radius'.*view_radius"),
    ],
)
def test_what_does_not_fit_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        envs.make(name, **options)


def test_the_fullest_grids_that_are_allowed_work():
    for name, options in (("stag_hunt_3x3_8h1s", {}), ("stag_hunt_4x4_7h1s", {"pieces": 2})):
        env = envs.make(name, num_envs=1000, **options)
        env.reset()
        prey = env.snapshot()["prey"]
        assert (prey >= 0).all() and all(len(set(cells)) == prey.shape[1] for cells in prey.tolist())
        assert not np.take_along_axis(blocked_cells(env).reshape(1000, -1), prey.numpy(), 1).any()


# ---- moves ----
def test_moves_stop_at_edges():
    corners = [(0, 0), (0, 2), (1, 0), (1, 2)]
    ahead = {
        UP: [(0, 0), (0, 2), (0, 0), (0, 2)],
        DOWN: [(1, 0), (1, 2), (1, 0), (1, 2)],
        LEFT: [(0, 0), (0, 1), (1, 0), (1, 1)],
        RIGHT: [(0, 1), (0, 2), (1, 1), (1, 2)],
        STAY: corners,
    }
    for action, goals in ahead.items():
        env = placed("stag_hunt_2x3_1h0s", corners)
        act(env, *[action] * 4)
        assert spots(env, "hunters") == goals


def test_moves_stop_at_obstacles_and_hunters_share_cells():
    round_the_middle = [(0, 1), (1, 0), (1, 2), (2, 1)]
    env = placed("stag_hunt_3x3_1h0s", round_the_middle, obstacles=[(1, 1)])
    act(env, DOWN, RIGHT, LEFT, UP)
    assert spots(env, "hunters") == round_the_middle
    env = placed("stag_hunt_3x3_1h1s", round_the_middle, stags=[(1, 1)])
    act(env, DOWN, RIGHT, LEFT, UP)
    assert spots(env, "hunters") == [(1, 1)] * 4


# ---- what is legal ----
def test_hunting_is_legal_on_prey_and_a_stag_takes_two():
    env = placed("stag_hunt_4x4_2h2s", [(0, 0), (0, 0), (1, 1), (2, 2)], [(0, 0), (1, 1)], [(2, 2), (3, 3)])
    obs, info = env.set_grid()
    moves = [True] * 5
    assert info["avail"][0].tolist() == [
        [*moves, True, False],
        [*moves, True, False],
        [*moves, False, False],
        [*moves, False, True],
    ]
    assert obs[0, :, -5 * 7 : -4 * 7].tolist() == info["avail"][0].tolist()


@pytest.mark.parametrize("action", [STAG, HARE, -1, 7, 10**9])
def test_an_illegal_action_counts_as_stay(action):
    env = placed("stag_hunt_4x4", [(1, 1)] * 4, check=False)
    assert act(env, action, UP, UP, UP) == [0, 0, 0, 0]
    assert spots(env, "hunters") == [(1, 1)] + [(0, 1)] * 3
    last = env.snapshot()["obs"][0, 0, -4 * 7 : -3 * 7]
    assert last.argmax() == STAY and last.sum() == 1


def test_checked_mode_refuses_what_is_illegal():
    env = placed("stag_hunt_4x4", [(0, 0), (1, 1), (2, 2), (2, 2)], [(1, 1)], [(2, 2)], check=True)
    for seat, action in ((0, HARE), (1, STAG), (2, STAG), (3, 7), (0, -1)):
        actions = torch.full((COPIES, 4), STAY)
        actions[3, seat] = action
        with pytest.raises(ValueError, match=rf"match 3, agent {seat} \(hunter_{seat}\): action {action} is not avail"):
            env.step(actions)
    assert spots(env, "hunters") == [(0, 0), (1, 1), (2, 2), (2, 2)]
    assert act(env, RIGHT, STAY, HARE, STAY) == [0, 0, 1, 0]
    with pytest.raises(ValueError, match=r"agent 2 .*action 0 is not available, only \[4\]"):
        act(env, STAY, STAY, UP, STAY)


# ---- captures ----
def test_a_hare_is_worth_one_and_its_hunter_leaves():
    env = placed("stag_hunt_4x4", [(0, 0), (0, 0), (3, 3), (2, 1)], [(3, 3)], [(0, 0), (2, 1)])
    obs, _, terminated, truncated, info = env.step(torch.tensor([[HARE, STAY, UP, LEFT]] * COPIES))
    assert act(env, STAY, STAY, STAY, STAY) == [0, 0, 0, 0]
    assert spots(env, "hunters") == [None, (0, 0), (2, 3), (2, 0)]
    assert spots(env, "hares") == [None, (2, 1), None, None] and spots(env, "stags") == [(3, 3)]
    assert info["alive"][0].tolist() == [False, True, True, True]
    assert info["avail"][0, 0].tolist() == [action == STAY for action in range(7)]
    assert not obs[0, 0].any() and obs[0, 1:].any()
    assert not terminated.any() and not truncated.any()


def test_hunters_of_one_hare_share_it():
    env = placed("stag_hunt_4x4", [(1, 2)] * 4, [], [(1, 2), (0, 0)])
    assert act(env, HARE, HARE, STAY, UP) == [0.5, 0.5, 0, 0]
    assert spots(env, "hunters") == [None, None, (1, 2), (0, 2)]
    assert spots(env, "hares") == [None, (0, 0), None, None]


@pytest.mark.parametrize("hunting", [2, 3, 4])
def test_hunters_of_a_stag_share_ten(hunting):
    env = placed("stag_hunt_4x4", [(1, 2)] * 4, [(1, 2)], [(0, 0)])
    actions = [STAG] * hunting + [STAY] * (4 - hunting)
    assert act(env, *actions) == [10 / hunting] * hunting + [0] * (4 - hunting)
    assert spots(env, "hunters") == [None] * hunting + [(1, 2)] * (4 - hunting)
    assert spots(env, "stags") == [None] and spots(env, "hares")[0] == (0, 0)


def test_one_alone_does_not_take_a_stag_while_the_other_stands_by():
    env = placed("stag_hunt_4x4", [(1, 2), (1, 2), (0, 0), (0, 0)], [(1, 2)])
    assert act(env, STAG, STAY, STAY, STAY) == [0, 0, 0, 0]
    assert spots(env, "stags") == [(1, 2)] and spots(env, "hunters")[0] == (1, 2)


def test_everyone_acts_at_once_on_what_stood_there_before():
    env = placed("stag_hunt_4x4", [(1, 2), (1, 2), (1, 2), (1, 1)], [(1, 2)])
    # the third steps off while two hunt, the fourth steps on: neither counts, and both live on
    assert act(env, STAG, STAG, LEFT, RIGHT) == [5, 5, 0, 0]
    assert spots(env, "hunters") == [None, None, (1, 1), (1, 2)]
    # one steps off, so the other hunts alone, though it was allowed to; one who steps on does not help
    env = placed("stag_hunt_4x4", [(1, 2), (1, 2), (1, 1), (1, 1)], [(1, 2)])
    assert env.set_grid()[1]["avail"][0, :, STAG].tolist() == [True, True, False, False]
    assert act(env, STAG, LEFT, RIGHT, STAY) == [0, 0, 0, 0]
    assert spots(env, "hunters") == [(1, 2), (1, 1), (1, 2), (1, 1)] and spots(env, "stags") == [(1, 2)]


def test_stags_on_two_cells_are_two_hunts():
    env = placed("stag_hunt_4x4_0h2s", [(0, 0), (0, 0), (3, 3), (3, 3)], [(0, 0), (3, 3)])
    assert act(env, STAG, STAY, STAG, STAG) == [0, 0, 5, 5]
    assert spots(env, "stags") == [(0, 0), None] and spots(env, "hunters") == [(0, 0), (0, 0), None, None]


def test_strengths_weigh_the_shares_and_rewards_can_be_set():
    options = {"strengths": [1, 2, 3, 4], "stag_reward": 6.0, "hare_reward": 3.0}
    env = placed("stag_hunt_4x4", [(1, 2)] * 3 + [(0, 0)], [(1, 2)], [(0, 0)], **options)
    assert act(env, STAG, STAG, STAG, HARE) == [1, 2, 3, 3]
    env = placed("stag_hunt_4x4", [(1, 2)] * 4, [(1, 2)], **options)
    assert act(env, STAG, STAY, STAY, STAG) == [1.2, 0, 0, 4.8]
    env = placed("stag_hunt_4x4", [(1, 2)] * 4, [], [(1, 2)], **options)
    assert act(env, STAY, HARE, STAY, HARE) == [0, 1, 0, 2]


def test_prosocial_pays_everyone_the_mean_those_who_left_too():
    env = placed("stag_hunt_4x4", [(1, 2), (1, 2), (0, 0), (3, 3)], [(1, 2)], [(0, 0), (3, 3)], prosocial=True)
    assert act(env, STAG, STAG, STAY, STAY) == [2.5] * 4
    assert spots(env, "hunters") == [None, None, (0, 0), (3, 3)]
    assert act(env, STAY, STAY, HARE, STAY) == [0.25] * 4
    assert act(env, STAY, STAY, STAY, HARE) == [0.25] * 4
    assert env.team_reward and not envs.make("stag_hunt_4x4").team_reward


# ---- endings ----
@pytest.mark.parametrize("stag_taken", [True, False])
def test_a_match_ends_when_all_have_left(stag_taken):
    start = [(1, 2), (1, 2), (0, 0), (0, 0)] if stag_taken else [(0, 1), (0, 2), (0, 0), (0, 0)]
    env = placed("stag_hunt_4x4", start, [(1, 2)], [(0, 0), (0, 1), (0, 2)])
    first = [STAG, STAG] if stag_taken else [HARE, HARE]
    obs, reward, terminated, truncated, info = env.step(torch.tensor([[*first, STAY, STAY]] * COPIES))
    assert not terminated.any() and not info["won"].any()
    env.step(torch.tensor([[STAY, STAY, HARE, HARE]] * COPIES))
    assert terminated.all() and not truncated.any() and not info["alive"].any()
    assert (info["won"] == stag_taken).all()
    assert reward[0].tolist() == [0, 0, 0.5, 0.5] and not obs.any()


@pytest.mark.parametrize("stag_taken", [True, False])
def test_a_match_ends_at_the_limit(stag_taken):
    env = placed("stag_hunt_4x4", [(1, 2), (1, 2), (0, 0), (0, 0)], [(1, 2)], limit=3)
    for step in range(3):
        assert not env.snapshot()["truncated"].any()
        hunt = STAG if stag_taken and step == 0 else STAY
        obs, _, terminated, truncated, info = env.step(torch.tensor([[hunt, hunt, STAY, STAY]] * COPIES))
        assert info["state"][0, -1] == torch.tensor((step + 1) / 3)
    assert truncated.all() and not terminated.any()
    assert (info["won"] == stag_taken).all()
    assert info["alive"][0].tolist() == [not stag_taken, not stag_taken, True, True]
    assert obs[0, 2].any(), "the last observation is real: a truncated match can be bootstrapped on it"


def test_a_match_is_won_with_all_its_stags():
    env = placed("stag_hunt_4x4_0h2s", [(0, 0)] * 2 + [(3, 3)] * 2, [(0, 0), (3, 3)], limit=2)
    act(env, STAG, STAG, STAY, STAY)
    act(env, STAY, STAY, STAY, STAY)
    assert env.snapshot()["truncated"].all() and not env.snapshot()["won"].any()
    env = placed("stag_hunt_4x4_0h2s", [(0, 0)] * 2 + [(3, 3)] * 2, [(0, 0), (3, 3)], limit=2)
    act(env, STAG, STAG, STAG, STAG)
    assert env.snapshot()["terminated"].all() and env.snapshot()["won"].all()


def test_leaving_in_the_last_step_is_an_end_of_its_own():
    env = placed("stag_hunt_4x4_1h1s", [(0, 0), (0, 0)], hares=[(0, 0)], limit=1)
    _, _, terminated, truncated, _ = env.step(torch.full((COPIES, 2), HARE))
    assert terminated.all() and not truncated.any()


def test_a_match_that_is_over_is_frozen():
    env = placed("stag_hunt_4x4", [(1, 2), (1, 2), (0, 0), (0, 0)], [(1, 2)], limit=1, check=True)
    act(env, STAG, STAG, STAY, STAY)
    for _ in range(3):
        obs, reward, _, truncated, info = env.step(torch.full((COPIES, 4), STAY))
        assert not obs.any() and not reward.any() and not info["state"].any() and not info["alive"].any()
        assert info["avail"].nonzero()[:, 2].unique().tolist() == [STAY]
        assert truncated.all() and info["won"].all()


@pytest.mark.parametrize("policy", ["NS", "NH", "RAND"])
def test_scripted_hunters_stand_still_in_a_match_that_is_over(policy):
    env = envs.make("stag_hunt", num_envs=COPIES, limit=2, check=True)
    returns(env, policy, steps=4)
    assert (env.scripted_actions(policy) == STAY).all()


# ---- reset ----
def reachable(free):
    """(N, H, W) the cells that can be reached from the first free one of each map."""
    reached = np.zeros_like(free)
    reached.reshape(len(free), -1)[np.arange(len(free)), free.reshape(len(free), -1).argmax(1)] = True
    for _ in range(free[0].size):
        wider = np.pad(reached, ((0, 0), (1, 1), (1, 1)))
        wider = wider[:, :-2, 1:-1] | wider[:, 2:, 1:-1] | wider[:, 1:-1, :-2] | wider[:, 1:-1, 2:] | reached
        reached, before = wider & free, reached
        if (reached == before).all():
            break
    return reached


@pytest.mark.parametrize(
    ("name", "pieces", "fewest", "most"),
    [("stag_hunt", None, 15, 20), ("stag_hunt_6x6_4h1s", 4, 12, 16), ("stag_hunt_4x4_4h1s", 2, 6, 8)],
)
def test_free_cells_are_connected_and_hold_everyone(name, pieces, fewest, most):
    env = envs.make(name, num_envs=10_000, pieces=pieces)
    env.reset()
    blocked = blocked_cells(env)
    assert (reachable(~blocked) == ~blocked).all()
    count = blocked.sum((1, 2))
    assert (count.min(), count.max()) == (fewest, most)
    assert len(np.unique(blocked, axis=0)) > (9_000 if name == "stag_hunt" else 100)
    hunter, prey = (env.snapshot()[key].numpy() for key in ("hunter", "prey"))
    for cells in (hunter, prey):
        assert not np.take_along_axis(blocked.reshape(10_000, -1), cells, 1).any()
    assert all(len(set(cells)) == prey.shape[1] for cells in prey.tolist())


def test_pieces_are_straight_or_bent_in_every_direction():
    def cut(cells):
        return tuple(map(tuple, cells[np.ix_(cells.any(1), cells.any(0))].astype(int)))

    env = envs.make("stag_hunt_8x8_4h1s", num_envs=4000, pieces=1)
    env.reset()
    found = {cut(cells) for cells in blocked_cells(env)}
    kinds = [np.array(kind) for kind in ([[1, 1, 1]], [[1, 1, 1, 1]], [[1, 1], [1, 0]], [[1, 1, 1], [1, 0, 0]])]
    assert found == {cut(np.rot90(side, turns)) for kind in kinds for side in (kind, kind.T) for turns in range(4)}


def test_everyone_may_start_anywhere():
    env = envs.make("stag_hunt_4x4", num_envs=8000)
    env.reset()
    hunter, prey = (env.snapshot()[key].numpy() for key in ("hunter", "prey"))
    for cells in (*hunter.T, *prey.T):
        assert_all_alike(np.bincount(cells, minlength=16))
    for seat in range(4):  # nobody's place tells where another is: hunters may start together, and on prey
        assert abs((hunter[:, seat, None] == prey).any(1).mean() - 5 / 16) < 0.03
        assert abs((hunter[:, seat] == hunter[:, seat - 1]).mean() - 1 / 16) < 0.015


def test_set_grid_says_what_it_takes():
    env = envs.make("stag_hunt_4x4", num_envs=COPIES)
    with pytest.raises(RuntimeError, match="reset"):
        env.set_grid()
    env.reset()
    with pytest.raises(ValueError, match=r"hunters has shape \(8, 4\), not \(4,\)"):
        env.set_grid(hunters=[0, 1, 2, 3])
    for cell in (-2, 16):
        with pytest.raises(ValueError, match="stags stand on cells 0 to 15, or -1 for gone"):
            env.set_grid(stags=[[cell]] * COPIES)


# ---- what the hunters see, restated ----
class World:
    """One match of a batch as it stands, in rows and columns."""

    def __init__(self, env, match):
        self.height, self.width, self.n = env.height, env.width, env.n_agents
        self.hunters, self.stags, self.hares = (spots(env, what, match) for what in ("hunters", "stags", "hares"))
        self.last = env.snapshot()["last"][match].tolist()
        self.blocked = blocked_cells(env)[match]

    def legal(self, seat):
        here = self.hunters[seat]
        if here is None:
            return [action == STAY for action in range(7)]
        return [True] * 5 + [here in self.stags and self.hunters.count(here) >= 2, here in self.hares]

    def channels(self, first):
        grid = np.zeros((self.height, self.width, self.n + 3), np.float32)
        for channel in range(self.n):
            if self.hunters[(first + channel) % self.n] is not None:
                grid[(*self.hunters[(first + channel) % self.n], channel)] = 1
        grid[..., self.n] = self.blocked
        for channel, prey in ((self.n + 1, self.stags), (self.n + 2, self.hares)):
            for spot in prey:
                if spot is not None:
                    grid[(*spot, channel)] = 1
        return grid

    def seen_by(self, seat, radius):
        here = self.hunters[seat]
        if here is None:
            return np.zeros(self.height * self.width * (self.n + 3) + 7 + 7 * self.n, np.float32)
        window = np.ones((self.height, self.width), bool)
        if radius is not None:
            rows, columns = np.indices(window.shape)
            window = np.maximum(abs(rows - here[0]), abs(columns - here[1])) <= radius
        last = np.zeros((self.n, 7), np.float32)
        for place in range(self.n):
            other = (seat + place) % self.n
            if self.hunters[other] is not None and window[self.hunters[other]] and self.last[other] >= 0:
                last[place, self.last[other]] = 1
        grid = self.channels(seat) * window[..., None]
        return np.concatenate([grid.ravel(), np.float32(self.legal(seat)), last.ravel()])

    def after(self, actions):
        """The rewards and where everyone is after a step, by the rules of the game in so many words."""
        actions = [a if 0 <= a < 7 and self.legal(seat)[a] else STAY for seat, a in enumerate(actions)]
        rewards, hunters, taken = [0.0] * self.n, list(self.hunters), set()
        for action, worth, needed in ((STAG, 10, 2), (HARE, 1, 1)):
            for cell in {self.hunters[seat] for seat in range(self.n) if actions[seat] == action}:
                party = [seat for seat in range(self.n) if self.hunters[seat] == cell and actions[seat] == action]
                if len(party) >= needed:
                    taken.add(cell)
                    for seat in party:
                        rewards[seat], hunters[seat] = worth / len(party), None
        for seat, (spot, action) in enumerate(zip(self.hunters, actions)):
            if spot is not None and action in MOVES:
                row, column = spot[0] + MOVES[action][0], spot[1] + MOVES[action][1]
                if 0 <= row < self.height and 0 <= column < self.width and not self.blocked[row, column]:
                    hunters[seat] = (row, column)
        stags, hares = ([None if spot in taken else spot for spot in prey] for prey in (self.stags, self.hares))
        return rewards, hunters, stags, hares, actions


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("stag_hunt", {}),
        pytest.param("stag_hunt", {"view_radius": 2}, marks=pytest.mark.slow),
        pytest.param("stag_hunt_4x4", {"view_radius": 0}, marks=pytest.mark.slow),
        ("stag_hunt_5x3_2h2s", {"n_agents": 3, "pieces": 1, "view_radius": 1}),
        ("stag_hunt_2x3_2h1s", {"n_agents": 5}),
    ],
)
def test_a_plain_restatement_plays_and_sees_the_same(name, options):
    env = envs.make(name, num_envs=COPIES, seed=3, check=False, **options)
    obs, info = env.reset()
    random = np.random.default_rng(0)
    running, captures = range(COPIES), 0
    for step in range(env.episode_limit):
        worlds = {match: World(env, match) for match in running}
        for match, world in worlds.items():
            state = np.append(world.channels(0).ravel(), np.float32(step) / np.float32(env.episode_limit))
            np.testing.assert_array_equal(info["state"][match].numpy(), state)
            for seat in range(env.n_agents):
                seen = world.seen_by(seat, options.get("view_radius"))
                np.testing.assert_array_equal(obs[match, seat].numpy(), seen)
                assert info["avail"][match, seat].tolist() == world.legal(seat)
                assert info["alive"][match, seat] == (world.hunters[seat] is not None)
        # anything at all, or what is scripted: hunting by chance is rare on the larger grids
        actions = torch.as_tensor(random.integers(-1, 8, (COPIES, env.n_agents)))
        scripted = env.scripted_actions(random.integers(0, 3, (COPIES, env.n_agents)))
        actions = torch.where(torch.as_tensor(random.random(actions.shape) < 0.5), scripted, actions)
        _, reward, terminated, _, _ = env.step(actions)
        for match in running:
            rewards, hunters, stags, hares, done = worlds[match].after(actions[match].tolist())
            world = World(env, match)
            assert reward[match].tolist() == pytest.approx(rewards)
            assert (world.hunters, world.stags, world.hares, world.last) == (hunters, stags, hares, done)
            assert terminated[match] == (hunters == [None] * env.n_agents)
        captures += (reward > 0).sum().item()
        running = [match for match in running if not terminated[match]]
    assert captures >= COPIES


@pytest.mark.parametrize("options", [{}, {"view_radius": 1}])
def test_rotated_seats_see_and_earn_the_same(options):
    env, turned = (envs.make("stag_hunt_4x4", num_envs=64, seed=4, **options) for _ in range(2))
    env.reset()
    turned.reset()
    earned = 0
    for turn in (1, 2, 3):
        env.reset()
        start = env.snapshot()
        turned.restore(start)
        turned.set_grid(hunters=start["hunter"].roll(turn, 1))
        for step in range(15):
            policy = torch.randint(3, (64, 4), generator=torch.Generator().manual_seed(step))
            actions = env.scripted_actions(policy).clone()
            first, second = shown(env.step(actions)), shown(turned.step(actions.roll(turn, 1)))
            for key in ("obs", "reward", "avail", "alive"):
                assert torch.equal(first[key].roll(turn, 1), second[key]), key
            assert torch.equal(first["terminated"], second["terminated"])
            earned += first["reward"].sum()
    assert earned > 64


def test_last_actions_come_in_the_order_of_the_channels():
    env = placed("stag_hunt_3x3_1h1s", [(1, 1), (0, 0), (2, 2)], [(0, 2)])
    act(env, UP, DOWN, LEFT)
    obs = env.snapshot()["obs"][0]
    spot, action = [(0, 1), (1, 0), (2, 1)], [UP, DOWN, LEFT]
    for seat in range(3):
        grid, last = obs[seat, : 9 * 6].view(3, 3, 6), obs[seat, -3 * 7 :].view(3, 7)
        for place in range(3):
            other = (seat + place) % 3
            assert grid[..., place].nonzero().tolist() == [list(spot[other])]
            assert last[place].nonzero().tolist() == [[action[other]]]


# ---- scripted hunters ----
def distances(blocked, goals):
    """Steps from every cell to the nearest goal, by breadth-first search."""
    far = np.full(blocked.shape, -1)
    queue = deque(goals)
    for spot in goals:
        far[spot] = 0
    while queue:
        row, column = queue.popleft()
        for down, right in MOVES.values():
            there = row + down, column + right
            if 0 <= there[0] < len(far) and 0 <= there[1] < far.shape[1] and far[there] < 0 and not blocked[there]:
                far[there] = far[row, column] + 1
                queue.append(there)
    return far


@pytest.mark.parametrize(("policy", "prey"), [("NS", "stags"), ("NH", "hares")])
def test_scripted_hunters_walk_shortest_ways_round_obstacles(policy, prey):
    env = envs.make("stag_hunt_8x8_3h2s", num_envs=64, n_agents=1, pieces=8, limit=64, seed=1)
    env.reset()
    detours = 0
    away = [distances(blocked_cells(env)[m], spots(env, prey, m)) for m in range(64)]
    for match in range(64):
        here, goals = spots(env, "hunters", match)[0], spots(env, prey, match)
        detours += away[match][here] > min(abs(here[0] - row) + abs(here[1] - column) for row, column in goals)
    assert detours > 5
    for _ in range(30):
        before = [spots(env, "hunters", match)[0] for match in range(64)]
        actions = env.scripted_actions(policy)[:, 0].tolist()
        env.step(env.scripted_actions(policy))
        for match, here in enumerate(before):
            there = spots(env, "hunters", match)[0]
            if here is None:
                assert actions[match] == STAY
            elif away[match][here] > 0:
                assert away[match][there] == away[match][here] - 1
            elif policy == "NH":
                assert actions[match] == HARE and there is None
            else:
                assert actions[match] == STAY and there == here  # alone on the stag's cell, it waits
    if policy == "NH":
        assert not env.snapshot()["alive"].any()


def test_ways_of_the_same_length_are_taken_at_random():
    env = envs.make("stag_hunt_4x4", num_envs=4000, n_agents=2)
    env.reset()
    stag, hares = torch.full((4000, 1), 5), torch.tensor([[5, 0, 15, 10]] * 4000)
    env.set_grid(torch.tensor([[0, 15]] * 4000), stag, torch.full((4000, 4), -1))
    actions = env.scripted_actions("NS").clone()
    for seat, ways in enumerate(([DOWN, RIGHT], [UP, LEFT])):
        counts = actions[:, seat].bincount(minlength=7)
        assert counts[ways].sum() == 4000
        assert_all_alike(counts[ways])
    assert abs(np.corrcoef(actions.T)[0, 1]) < 0.1  # seats do not draw alike
    env.set_grid(torch.tensor([[6, 6]] * 4000), stag, hares)
    counts = env.scripted_actions("NH")[:, 0].bincount(minlength=7)
    assert counts[[LEFT, DOWN]].sum() == 4000
    assert_all_alike(counts[[LEFT, DOWN]])


def test_the_stag_hunters_wait_and_hunt_together():
    env = placed("stag_hunt_4x4", [(1, 1), (1, 2), (3, 3), (0, 0)], [(1, 1)], [(0, 0)])
    roles = torch.tensor([[NS, NS, NS, NH]] * COPIES)
    actions = env.scripted_actions(roles)[0].tolist()
    assert actions[:2] == [STAY, LEFT] and actions[2] in (UP, LEFT) and actions[3] == HARE
    env.step(env.scripted_actions(roles))
    assert env.scripted_actions(roles)[0, :2].tolist() == [STAG, STAG]
    env.step(env.scripted_actions(roles))
    assert env.scripted_actions(roles)[0].tolist() == [STAY] * 4  # no stag is left for the third
    assert env.snapshot()["alive"][0].tolist() == [False, False, True, False]


def test_a_hare_hunter_without_hares_stays():
    env = placed("stag_hunt_4x4", [(1, 1), (1, 2)], [(1, 1)])
    assert (env.scripted_actions("NH") == STAY).all()


def test_random_hunters_take_every_legal_action_alike():
    env = envs.make("stag_hunt_4x4", num_envs=9000, n_agents=4)
    env.reset()
    hunters, hares = torch.tensor([[5, 5, 0, 2]]), torch.tensor([[0, -1, -1, -1]])
    env.set_grid(hunters.repeat(9000, 1), torch.full((9000, 1), 5), hares.repeat(9000, 1))
    legal = env.snapshot()["avail"][0]
    actions = env.scripted_actions("RAND").clone()
    for seat in range(4):
        counts = actions[:, seat].bincount(minlength=7)
        assert counts[~legal[seat]].sum() == 0
        assert_all_alike(counts[legal[seat]])
    assert legal.sum(1).tolist() == [6, 6, 6, 5]
    assert torch.equal(env.scripted_actions("RAND"), actions)  # draws anew each step, not each call
    env.step(actions)
    assert not torch.equal(env.scripted_actions("RAND")[:, 3], actions[:, 3])


def test_switching_hunters_change_their_mind_by_a_rule_of_their_own():
    """Each keeps its mind for 3 to 8 steps, which differs by match and hunter, and both kinds are met at first."""
    env = envs.make("stag_hunt_8x8_1h1s", num_envs=400, n_agents=2)
    env.reset()
    minds = []
    for _ in range(24):  # the stag in one corner, the hare in the other: the way shows the mind
        env.set_grid(torch.tensor([[27, 27]] * 400), torch.tensor([[0]] * 400), torch.tensor([[63]] * 400))
        action = env.scripted_actions("SWITCH").clone()
        minds.append((action == UP) | (action == LEFT))
        env.step(torch.full_like(action, STAY))
    minds = torch.stack(minds)  # (steps, matches, hunters), True for the stag
    assert 0.4 < minds[0].float().mean() < 0.6
    periods = (minds != minds[0]).int().argmax(0)  # when each changes first
    assert set(periods.flatten().tolist()) == {3, 4, 5, 6, 7, 8}
    assert (periods[:, 0] != periods[:, 1]).any()
    steps = torch.arange(24).view(-1, 1, 1)
    assert torch.equal(minds, minds[0] ^ (steps // periods % 2 == 1))


def test_followers_hunt_the_stag_once_another_stands_there():
    roles = torch.tensor([[FOLLOW, FOLLOW]] * COPIES)
    env = placed("stag_hunt_4x4", [(0, 0), (2, 2)], [(3, 3)], [(0, 1)])
    for _ in range(8):  # nobody goes for the stag: they wait, then take hares
        assert (env.scripted_actions(roles) == STAY).all()
        env.step(env.scripted_actions(roles))
    assert env.scripted_actions(roles)[0, 0] == RIGHT
    env = placed("stag_hunt_4x4", [(0, 0), (2, 3)], [(3, 3)], [(0, 1)])
    act(env, STAY, DOWN)
    assert env.scripted_actions(roles)[0, 0] in (RIGHT, DOWN) and env.scripted_actions(roles)[0, 1] == STAY
    act(env, STAY, UP)  # it has been seen, and that is enough
    for _ in range(6):
        assert env.scripted_actions(roles)[0, 0] in (RIGHT, DOWN)
        act(env, env.scripted_actions(roles)[0, 0].item(), STAY)
    assert spots(env, "hunters")[0] == (3, 3) and env.scripted_actions(roles)[0, 1] == DOWN


# ---- bounds, and no seat better than another ----
def test_nobody_beats_the_bound_and_the_best_reach_it():
    env = placed("stag_hunt_4x4", [(1, 2), (1, 2), (0, 0), (3, 3)], [(1, 2)], [(0, 0), (3, 3)])
    assert act(env, STAG, STAG, HARE, HARE) == [5, 5, 1, 1]
    env = envs.make("stag_hunt_4x4", num_envs=4000)
    team = returns(env, torch.randint(3, (4000, 4), generator=torch.Generator().manual_seed(0))).mean(1)
    assert team.max() == 3.0 and team.min() >= 0
    hares = returns(env, "NH")
    assert hares.mean(1).max() == 1.0 and hares.max() == 1.0


def test_four_stag_hunters_share_the_stag():
    env = envs.make("stag_hunt_4x4", num_envs=4000)
    earned = returns(env, "NS")
    assert torch.allclose(earned.sum(1), torch.tensor(10.0)) and env.snapshot()["won"].all()
    assert {2, 3, 4} == set((earned > 0).sum(1).tolist())
    assert_equal_means(earned)
    env = placed("stag_hunt_3x3_4h1s", [(0, 1), (1, 0), (1, 2), (2, 1)], [(1, 1)])
    env.step(env.scripted_actions("NS"))
    assert env.step(env.scripted_actions("NS"))[1][0].tolist() == [2.5] * 4


def test_four_random_hunters_earn_the_same():
    assert_equal_means(returns(envs.make("stag_hunt_4x4", num_envs=8000), "RAND"))


@pytest.mark.slow
def test_a_role_earns_the_same_in_every_seat():
    env = envs.make("stag_hunt_4x4", num_envs=3000)
    roles = torch.tensor([NS, NH, RAND, RAND])
    earned = [returns(env, roles.roll(turn).repeat(3000, 1)).roll(-turn, 1) for turn in range(4)]  # by role
    for role in range(4):
        assert_equal_means(torch.stack([each[:, role] for each in earned], 1))
    assert abs(earned[0][:, 0].mean() - earned[0][:, 1].mean()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stag_hunt", "stag_hunt_8x8_4h2s", "stag_hunt_4x4"])
def test_many_matches_keep_the_bound_and_favour_no_seat(name):
    env = envs.make(name, num_envs=10_000)
    best = 3.0 if env.stags == 1 else 5.0
    for policy in ("NS", "NH", "RAND"):
        earned = returns(env, policy)
        assert earned.mean(1).max() <= best
        assert_equal_means(earned)
    mixed = returns(env, torch.randint(3, (10_000, 4), generator=torch.Generator().manual_seed(0)))
    assert mixed.mean(1).max() == best
    assert_equal_means(mixed)


# ---- a picture of a match ----
def test_scene():
    env = placed("stag_hunt_3x4_2h1s", [(0, 1), (2, 3)], [(1, 2)], [(0, 1)], [(2, 0)], view_radius=1, limit=2)
    act(env, HARE, LEFT)
    scene = env.scene()
    assert (scene["title"], scene["step"], scene["limit"], scene["status"]) == ("stag_hunt_3x4_2h1s", 1, 2, "running")
    assert (scene["height"], scene["width"], scene["radius"], scene["obstacles"]) == (3, 4, 1, [[2, 0]])
    assert scene["prey"] == [{"kind": "stag", "row": 1, "col": 2}]
    assert [hunter["alive"] for hunter in scene["hunters"]] == [False, True]
    assert scene["hunters"][0]["return"] == 1 and scene["hunters"][0]["action"] == "hunt hare"
    assert scene["hunters"][1] == {"row": 2, "col": 2, "alive": True, "action": "left", "return": 0}
    act(env, STAY, STAY)
    assert env.scene()["status"] == "time"


# ---- other ways to run it ----

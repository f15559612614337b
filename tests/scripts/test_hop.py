"""hop.py: trees against plain loops, beliefs, what is learned from a round, runs; copies of single matches."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import QUICK_PLANNER, as_played, read_log, stopped, train
from test_runs import assert_same_run

import envs
import hop
from envs.batch import KEY
from training import play
from training.episodes import EpisodeRunner, Inputs, load_player
from training.team import Team

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")
EVERY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def no_noise(monkeypatch):
    """Samples are the most probable values."""
    monkeypatch.setattr(hop, "gumbel", torch.zeros_like)


def make_args(**options):
    args = hop.Args(**{**QUICK_PLANNER, **options})
    hop.check_args(args)
    return args


class Guess:
    """A network whose outputs are a fixed function of what it is given."""

    def __init__(self, env, outputs, goals=1, seed=0):
        random = torch.Generator().manual_seed(seed)
        self.weight = torch.randn((env.obs_dim, outputs), generator=random).to(env.device)
        self.of_goal = torch.randn((goals, outputs), generator=random).to(env.device)

    def __call__(self, obs, time, goal):
        return obs @ self.weight + time.unsqueeze(1) + torch.where(goal >= 0, self.of_goal[goal].T, 0.0).T


# ---- copies of single matches ----
IDS = ("stag_hunt", "snowdrift_4x4", "3m", "kuhn", "matrix_ipd", "coin_game", "Foraging-8x8-2p-2f-v3", "simple_tag_3v1")


@EVERY_DEVICE
@pytest.mark.parametrize("env_id", IDS)
def test_a_copy_of_a_match_goes_on_like_the_match(env_id, device):
    env = envs.make(env_id, 12, device, seed=3, matches_per_episode=2, check=False)
    env.reset()
    for _ in range(3):
        env.step(env.scripted_actions(env.policies[0]))
    rows = torch.tensor([7, 0, 7, 11, 3, 1, 9, 0, 4], device=device)
    copies = env.make_copy(len(rows))
    copies.set_state(env.match_state(), rows)
    assert torch.equal(copies.obs, env.obs[rows]) and torch.equal(copies.info["avail"], env.info["avail"][rows])
    untouched = env.snapshot()
    for _ in range(5):
        copies.step(copies.scripted_actions(env.policies[-1]))
    for name, values in env.snapshot().items():
        assert torch.equal(values, untouched[name]), name
    stored = {name: values.clone() for name, values in env.match_state().items()}
    actions = env.scripted_actions(env.policies[0]).clone()
    _, reward, terminated, *_ = env.step(actions)
    copies.set_state(stored, rows, look=False, same_chance=True)
    _, again, ended, *_ = copies.step(actions[rows])
    going_on = env.info["match_index"][rows] == 0  # a match of a copy ends; the other goes on with the next one
    assert torch.equal(again, reward[rows]) and torch.equal(ended[going_on], terminated[rows][going_on])
    assert torch.equal(copies.obs[going_on], env.obs[rows][going_on])


@EVERY_DEVICE
@pytest.mark.parametrize(("env_id", "drawn"), [("coin_game", "coin"), ("kuhn", "card")])
def test_copies_do_not_foretell_what_chance_brings(env_id, drawn, device):
    """After the same actions the copies' coins and cards are spread over all there are, whatever the match's are."""
    env = envs.make(env_id, 2, device, seed=3, check=False)
    env.reset()
    rows = torch.arange(6000, device=device) % 2
    copies, again, keys = env.make_copy(6000), env.make_copy(6000), []
    preference = torch.rand(20, env.n_agents, env.n_actions, device=device) + 0.1
    for t in range(20):
        before = env.snapshot()
        again.set_state(env.match_state(), rows)
        if t == 0:
            copies.set_state(env.match_state(), rows)
            assert torch.equal(again.match_state()["match"], copies.match_state()["match"])  # by what is saved alone
        assert torch.equal(again.obs, env.obs[rows])
        for name, values in env.snapshot().items():
            assert torch.equal(values, before[name]), name
        keys.append(again.match_state()["match"][:, KEY].clone())
        for batch in (env, copies):  # whose turn it is does not hang on chance
            batch.step((batch.info["avail"] * preference[t]).argmax(-1))
    keys = torch.cat((env.match_state()["match"][:, KEY], *keys))
    assert len(keys.unique()) == len(keys) and (keys >= 0).all()
    for m in range(2):
        outcomes, counts = copies.match_state()[drawn][m::2].unique(dim=0, return_counts=True)
        assert len(outcomes) >= 6 and counts.max() < 0.2 * 3000  # of two cards there are six


@needs_cuda
def test_copies_have_the_same_chance_on_cuda():
    keys = []
    for device in ("cpu", "cuda"):
        env = envs.make("coin_game", 5, device, seed=1, check=False)
        env.reset()
        copies = env.make_copy(64)
        copies.set_state(env.match_state(), torch.arange(64, device=device) % 5)
        keys.append(copies.match_state()["match"].cpu())
    assert torch.equal(*keys)


def test_the_real_game_has_no_copies():
    env = SimpleNamespace(simulated=False, name="sc2/3m")
    with pytest.raises(ValueError, match="sc2/3m: matches of the real game cannot be copied"):
        envs.batch.Batch.make_copy(env, 3)


# ---- trees ----
def paid(env, own_goal, action, left, ended):
    """What counts for who pursues a goal."""
    reached = -1
    if env.name.startswith("stag_hunt") and left:
        reached = action - 5
    elif env.name.startswith("snowdrift"):
        reached = 0 if action == 5 else 1 if ended else -1
    return 0.0 if reached < 0 else env.return_scale / 2 if reached == own_goal else -env.return_scale / 2


def plain_tree(env, seat, own_goal, goal, agents, model, args):
    """(total, visits, Q) of the root's actions after a search by plain loops in a batch of one match."""

    def predicted():
        obs, time = env.obs[0], env.steps / env.match_limit
        output = agents(obs[seat].unsqueeze(0), time, torch.tensor([own_goal]))[0]
        avail = env.info["avail"][0, seat].clone()
        prior = output[:-1].masked_fill(~avail, -torch.inf).softmax(-1)
        joint = torch.zeros(env.n_agents, dtype=torch.long)
        for k in range(1, env.n_agents):
            other = (seat + k) % env.n_agents
            logits = model(obs[other].unsqueeze(0), time, goal[k - 1].unsqueeze(0))[0]
            joint[other] = logits.masked_fill(~env.info["avail"][0, other], -torch.inf).argmax()
        return prior, avail, joint, output[-1] * env.return_scale

    def step(action, joint):
        joint = joint.clone()
        joint[seat] = action
        _, reward, terminated, truncated, info = env.step(joint.unsqueeze(0))
        ended, left = bool(terminated[0] | truncated[0]), not info["alive"][0, seat]
        earned = reward[0, seat].clone() if own_goal < 0 else paid(env, own_goal, action, left, ended)
        return earned, left or ended

    def node(level, earned, over):
        prior, avail, joint, value = predicted()
        state, likely, others, played, discount, ended = env.snapshot(), prior, joint, 0.0, 1.0, over
        for _ in range(args.rollout_steps):
            if not ended:
                reward, ended = step(int(likely.argmax()), others)
                played, discount = played + discount * reward, discount * args.gamma
                likely, _, others, value = predicted()
        return SimpleNamespace(
            state=state, prior=prior, avail=avail, joint=joint, level=level, over=over, reward=earned, child={},
            value=played + (0.0 if ended else discount * value),
            total=torch.zeros(env.n_actions), visits=torch.zeros(env.n_actions),
        )  # fmt: skip

    root = node(0, 0.0, False)
    for _ in range(args.sims):
        here, path = root, []
        while not here.over and here.level < args.depth:
            first = here.value if args.node_value else 0.0
            score = (here.total + first) / (1 + here.visits)
            score = score + args.c_puct * (1 + here.visits.sum()).sqrt() * here.prior / (1 + here.visits)
            action = int(score.masked_fill(~here.avail, -torch.inf).argmax())
            path.append((here, action))
            if action in here.child:
                here = here.child[action]
                continue
            env.restore(here.state)
            earned, over = step(action, here.joint)
            here.child[action] = here = node(here.level + 1, earned, over)
            break
        value = here.value
        for parent, action in reversed(path):
            value = parent.child[action].reward + args.gamma * value
            parent.total[action] += value
            parent.visits[action] += 1
    return root.total, root.visits, (root.total + (root.value if args.node_value else 0.0)) / (1 + root.visits)


@pytest.mark.parametrize(
    ("env_id", "depth", "node_value", "rollout_steps"),
    [
        ("stag_hunt_4x4", 12, True, 0),
        ("stag_hunt_4x4", 12, False, 3),
        ("snowdrift_4x4", 3, True, 5),
        ("coin_game", 12, True, 2),
    ],
)
def test_trees_are_those_of_plain_loops(env_id, depth, node_value, rollout_steps, no_noise):
    options = {"sims": 60, "trees": 2, "depth": depth, "node_value": node_value, "rollout_steps": rollout_steps}
    args = make_args(env_id=env_id, **options, q_temperature=1.0)
    env = envs.make(env_id, 3, seed=5)
    env.reset()
    for _ in range(4):
        env.step(env.scripted_actions("RAND" if "RAND" in env.policies else "random"))
    goals = max(len(env.goals), 1)
    agents, model = Guess(env, env.n_actions + 1, 2), Guess(env, env.n_actions, goals, seed=1)
    search = hop.Search(args, env, agents, model, 4, 60, rollout_steps, own_goals=True)
    match, seat, own_goal = torch.tensor([0, 0, 1, 1]), torch.tensor([3, 0, 3, 2]), torch.tensor([-1, 0, 1, -1])
    seat, own_goal = seat % env.n_agents, own_goal if env.goals else torch.full_like(own_goal, -1)
    belief = torch.rand(4, env.n_agents, goals).log()
    policy, q = search.plan(env, match, seat, own_goal, belief)
    single, deepest, alike = env.make_copy(1), 0, []
    for i in range(4):
        goal = belief[i].argmax(-1)[(seat[i] + torch.arange(1, env.n_agents)) % env.n_agents]
        found, expected = [], []
        for tree in (2 * i, 2 * i + 1):
            single.set_state(env.match_state(), match[i : i + 1])
            keys = search.states["match"][:61, tree, KEY].unique()
            assert len(keys) == 1 and keys not in env.match_state()["match"][:, KEY]  # one scenario, but not what comes
            single.match_state()["match"][:, KEY] = keys
            total, visits, mean = plain_tree(single, int(seat[i]), int(own_goal[i]), goal, agents, model, args)
            torch.testing.assert_close(search.visits[0, tree], visits)
            torch.testing.assert_close(search.total[0, tree], total, rtol=1e-4, atol=1e-4)
            found.append(total)
            expected.append(mean)
        alike.append(torch.equal(*found))
        deepest = max(deepest, int(search.level[search.child[:, 2 * i].unique(), 2 * i].max()))
        available = torch.isfinite(q[i])
        torch.testing.assert_close(q[i][available], torch.stack(expected).mean(0)[available], rtol=1e-4, atol=1e-4)
    assert not any(alike) if env_id == "coin_game" else all(alike)
    assert deepest == 3 if depth == 3 else deepest > 3
    assert torch.allclose(policy.sum(-1), torch.ones(4)) and (policy[~torch.isfinite(q)] == 0).all()


def hunt(matches, device="cpu"):
    """Seat 0 stands between a hare, two cells to its left, and the stag, two to its right, with another beside it."""
    env = envs.make("stag_hunt_6x6_4h1s", matches, device, check=False)
    env.reset()
    cells = {"hunters": [14, 0, 10, 30], "stags": [16], "hares": [12, 1, 4, 31]}
    env.set_grid(**{name: torch.tensor(places).repeat(matches, 1) for name, places in cells.items()})
    return env


class Script:
    """The others' next actions by a script of the environment, in the copies that a search works in."""

    def __init__(self, name):
        self.name = name

    def __call__(self, obs, time, goal):
        env, others = self.search.env, self.search.others
        action = env.scripted_actions(self.name).gather(1, others).flatten()
        return 50.0 * torch.nn.functional.one_hot(action, env.n_actions).float()


def constant(value):
    """A network whose outputs are all the same."""
    return lambda obs, time, goal: obs.new_full((len(obs), 8), value)


@pytest.mark.parametrize(("others", "move"), [("NH", "left"), ("NS", "right")])
def test_with_a_perfect_model_the_search_goes_for_what_can_be_had(others, move, no_noise):
    """Nobody comes to the stag with hare hunters: the hare, two steps away. With stag hunters the stag is worth it."""
    env, model = hunt(1), Script(others)
    args = make_args(sims=400, trees=3, depth=12, c_puct=5.0, q_temperature=1e6)
    model.search = search = hop.Search(args, env, constant(0.0), model, 1, 400)
    policy, q = search.plan(env, torch.tensor([0]), torch.tensor([0]), torch.tensor([-1]), torch.zeros(1, 4, 2))
    assert policy.argmax() == envs.stag_hunt.ACTIONS.index(move)
    assert policy.max() == 1 and policy.argmax() == q.argmax()  # at an infinite temperature the best Q has it all


def test_rollouts_to_the_end_need_no_values():
    """They find what the others do to the end, however wrong the network's value is; training matches have none."""
    found = {}
    for steps in (0, 35):
        for value in (0.0, 1.0):
            torch.manual_seed(0)
            env, model = hunt(1), Script("NH")
            search = hop.Search(make_args(), env, constant(value), model, 1, 20, steps)
            model.search = search
            found[steps, value] = search.plan(env, *torch.tensor([[0], [0], [-1]]), torch.zeros(1, 4, 2))[1]
    assert found[0, 0.0].nan_to_num(neginf=0).eq(0).all() and found[0, 1.0].max() > 1
    assert torch.equal(found[35, 0.0], found[35, 1.0]) and 0 < found[35, 0.0].max() <= 1
    learner, seats = hop.Learner(make_args(sims=8, train_sims=3, rollout_steps=2), env), torch.zeros(1, 1).long()
    players = [hop.Player(learner, env, seats, explore) for explore in (False, True)]
    assert [(player.sims, player.rollout_steps) for player in players] == [(8, 2), (3, 0)]


@pytest.mark.parametrize("names", [(), ("stag",), ("stag", "hare")])
def test_networks_know_the_goals_that_there_are(names, monkeypatch):
    """Of oneself any in the list, of the others also that they have none; without goals there is nothing to know."""
    env = envs.make("stag_hunt_4x4")
    monkeypatch.setattr(type(env), "goals", names)
    learner = hop.Learner(make_args(goals=bool(names)), env)
    widths = [network.goal and network.goal.in_features for network in (learner.agents, learner.model)]
    assert widths == [len(names) or None, len(names) + 1 if names else None]


def test_without_simulations_the_policy_is_the_prior():
    env = envs.make("stag_hunt_4x4", 3)
    env.reset()
    agents, none = Guess(env, 8), torch.tensor([-1, -1])
    search = hop.Search(make_args(trees=1), env, agents, Guess(env, 7, 2), 2, 0)
    policy, _ = search.plan(env, torch.tensor([2, 1]), torch.tensor([1, 3]), none, torch.zeros(2, 4, 2))
    logits = agents(env.obs[[2, 1], [1, 3]], torch.zeros(2), none)[:, :-1]
    avail = env.info["avail"][[2, 1], [1, 3]]
    torch.testing.assert_close(policy, logits.masked_fill(~avail, -torch.inf).softmax(-1))


@needs_cuda
@pytest.mark.parametrize("env_id", ["stag_hunt", "snowdrift"])
def test_the_search_is_the_same_on_cuda(env_id, no_noise):
    found = []
    for device in ("cpu", "cuda"):
        args = make_args(env_id=env_id, c_puct=2.0, trees=2, q_temperature=2.0, cuda=device == "cuda")
        env = envs.make(env_id, 16, device, seed=2, check=False)
        env.reset()
        networks = Guess(env, env.n_actions + 1, 2), Guess(env, env.n_actions, 2, seed=1)
        search = hop.Search(args, env, *networks, 16, 50, own_goals=True)
        match = torch.arange(16, device=device)
        for _ in range(3):  # warmed up, captured, replayed
            policy, q = search.plan(env, match, match % 4, match % 3 - 1, torch.zeros(16, 4, 2, device=device))
        found.append((policy.cpu(), q.cpu(), search.visits[0].cpu()))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


# ---- beliefs ----
class KnownScripts(hop.Network):
    """A model that is right about the scripts that go for either goal, and of those without one expects anything."""

    def forward(self, obs, time, goal=None):
        if goal is not None:
            return super().forward(obs, time, goal)
        actions = [self.env.scripted_actions(name).flatten().clone() for name in ("NS", "NH")]
        logits = 8.0 * torch.nn.functional.one_hot(torch.stack(actions, 1), self.env.n_actions).float()
        return torch.cat((logits, torch.zeros_like(logits[:, :1])), 1)


def player_in(env, team, **options):
    learner = hop.Learner(make_args(env_id=env.name, **options), env)
    return hop.Player(learner, env, team.learner_seats)


@pytest.mark.parametrize("intra", [True, False])
@pytest.mark.parametrize(("others", "goal"), [("NS", 0), ("RAND", 2)])
def test_belief_in_the_others_goal_rises_above_nine_tenths(others, goal, intra):
    env = envs.make("stag_hunt", 64, seed=1, check=False)
    team = Team(env, f"3{others}1learner")
    player = player_in(env, team, sims=0, trees=1, intra_belief=intra)
    player.learner.model.__class__ = KnownScripts
    player.learner.model.env = env
    runner = EpisodeRunner(env, team, player, ("all_alive", "belief"))
    runner.play()
    is_other = team.policy_id >= 0
    beliefs = [runner.episodes["belief"][t][is_other][:, goal].mean().item() for t in range(8)]
    assert beliefs[0] == pytest.approx(1 / 3)
    assert beliefs == sorted(beliefs) and beliefs[-1] > 0.9 if intra else set(beliefs) == {beliefs[0]}
    told = runner.episodes["belief"][:8].sum(-1)
    torch.testing.assert_close(told, torch.ones_like(told))


@pytest.mark.parametrize(("inter", "options"), [(True, {}), (False, {}), (True, {"belief_decay": 0.0})])
def test_goals_reached_in_an_encounter_move_the_prior_of_the_next_match(inter, options):
    env = envs.make("stag_hunt_4x4", 8, seed=1, check=False)
    team = Team(env, "2NH1RAND1learner", matches_per_partner=4)
    player = player_in(env, team, sims=0, trees=1, inter_belief=inter, **options)
    decay = options.get("belief_decay", 0.8)
    runner, seen = EpisodeRunner(env, team, player, ("all_alive", "all_action", "belief")), set()
    for number in range(8):
        if number % 4 == 0:  # the others are new
            prior, goals = torch.full((8, 4, 3), 1 / 3), []
        lengths = runner.play().lengths
        belief = runner.episodes["belief"][0]
        torch.testing.assert_close(belief, prior if inter else torch.full_like(prior, 1 / 3))
        assert (belief > 0).all()  # what was never seen can still be found out
        if number % 4 == 3:
            hare = (torch.stack(goals) == 1).all(0)  # a hare in the three matches before
            expected = 1 - 2 / 3 * decay**3 if inter else 1 / 3
            assert hare.sum() > 8
            torch.testing.assert_close(belief[hare][:, 1], torch.full((int(hare.sum()),), expected))
        goals.append(torch.full((8, 4), 2))  # the last is for those who reach no goal
        for m in range(8):
            for a in range(4):
                for t in range(int(lengths[m])):
                    alive = runner.episodes["all_alive"][t : t + 2, m, a].tolist()
                    if alive == [True, False]:  # left, with what it hunted
                        goals[-1][m, a] = int(runner.episodes["all_action"][t, m, a]) - 5
                for goal in range(3):
                    prior[m, a, goal] = decay * prior[m, a, goal] + (1 - decay) * (goal == goals[-1][m, a])
        seen |= set(goals[-1].flatten().tolist())
    assert {1, 2} <= seen


# ---- what is learned ----
@pytest.mark.parametrize(("env_id", "spec"), [("stag_hunt_4x4", "self"), ("snowdrift_4x4", "3ND1learner")])
@pytest.mark.parametrize("goals", [True, False])
def test_samples_are_those_of_plain_loops(env_id, spec, goals):
    env = envs.make(env_id, 12, seed=4, check=False)
    team = Team(env, spec, mix=True)
    player = player_in(env, team, sims=0, trees=1, goals=goals, gamma=0.9, commit=0.8)
    player.explore = True
    runner = EpisodeRunner(env, team, player, hop.FIELDS + ("all_reward",))
    lengths = runner.play().lengths
    samples, played = player.learner.samples(runner.episodes, lengths), runner.episodes
    seats, committed = team.learner_seats.tolist(), set()
    for m in range(12):
        end = int(lengths[m])
        assert not samples["plays"][end:, m].any() and not samples["acts"][end:, m].any()
        for a in range(4):
            reached, value = (2 if goals else 0), 0.0
            for t in reversed(range(end)):
                alive, action = bool(played["all_alive"][t, m, a]), int(played["all_action"][t, m, a])
                reward, own_goal = float(played["all_reward"][t, m, a]), -1
                if a in seats[m]:
                    own_goal = int(played["own_goal"][t, m, seats[m].index(a)])
                if own_goal >= 0:
                    left = alive and not played["all_alive"][t + 1, m, a]
                    reward = paid(env, own_goal, action, left, t == end - 1)
                committed.add(own_goal)
                value = reward + 0.9 * value
                if goals and env_id == "snowdrift_4x4":
                    reached = 0 if action == 5 else 1 if t == end - 1 else reached
                elif goals and alive and not played["all_alive"][t + 1, m, a]:
                    reached = action - 5
                learns = len(seats[m]) > 1 or a not in seats[m]
                assert bool(samples["acts"][t, m, a]) == (alive and learns)
                if alive:
                    assert int(samples["goal"][t, m, a]) == (2 if goals and own_goal == 2 else reached)
                if alive and a in seats[m]:
                    s = seats[m].index(a)
                    assert bool(samples["plays"][t, m, s]) == (own_goal < 2)
                    assert own_goal == 2 or float(samples["target"][t, m, s]) == pytest.approx(value)
    assert committed == ({-1, 0, 1, 2} if spec == "self" else {-1})  # a single learner has nobody to show a goal to
    player.learner.learn(as_played(played, lengths))
    assert player.learner.updates > 0


MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1), (0, 0))  # up, down, left, right, stay


@pytest.mark.parametrize("env_id", ["stag_hunt", "snowdrift"])
def test_turned_matches_are_matches(env_id):
    """Where somebody is after a move in a turned grid is where the turned move takes it."""
    env = envs.make(env_id, 256, seed=3)
    env.reset()

    def rows_of(values):
        return values[:, 0].clone()

    def place(obs):
        grid = obs[:, : math.prod(env.grid)].unflatten(1, env.grid)[..., 0]  # the first channel is oneself
        return torch.stack((grid.flatten(1).argmax(1) // env.grid[1], grid.flatten(1).argmax(1) % env.grid[1]), 1)

    action = torch.randint(0, 5, (256,))
    before = {"obs": rows_of(env.obs), "avail": rows_of(env.info["avail"]), "action": action.clone()}
    before["policy"] = torch.nn.functional.one_hot(action, env.n_actions).float()
    straight = place(before["obs"])
    joint = torch.full((256, env.n_agents), 4)
    joint[:, 0] = action
    obs, *_ = env.step(joint)
    after = {"obs": rows_of(obs)}
    moved = (place(after["obs"]) != straight).any(1)
    avail, rest = before["avail"].clone(), before["obs"][:, math.prod(env.grid) :].clone()
    torch.manual_seed(7)
    env.turn(before)
    torch.manual_seed(7)
    env.turn(after)  # in the same ways
    step = place(after["obs"]) - place(before["obs"])
    assert moved.sum() > 100 and torch.equal(step[moved], torch.tensor(MOVES)[before["action"]][moved])
    assert (step[~moved] == 0).all() and torch.equal(before["policy"].argmax(1), before["action"])
    assert torch.equal(before["obs"][:, math.prod(env.grid) :], rest)
    cells, becomes, _ = env.grid_symmetries
    assert len(cells.unique(dim=0)) == 8 and len(becomes.unique(dim=0)) == 8
    one, other = avail.gather(1, action.unsqueeze(1)), before["avail"].gather(1, before["action"].unsqueeze(1))
    assert torch.equal(one, other) and torch.equal(avail.sum(1), before["avail"].sum(1))
    assert (before["action"] != action).any() and (~avail).any()


def test_who_may_leave_earns_what_the_rules_allow():
    env = envs.make("stag_hunt_4x4,limit=10", 8, check=False)
    team = Team(env, "self")
    player = player_in(env, team, sims=12, trees=2, c_puct=1.0)
    returns = EpisodeRunner(env, team, player).play().returns
    assert returns.mean() > 0 and (returns.sum(1) <= 12).all()  # a mean of 3 at most


# ---- runs ----
def test_a_run_completes_resumes_and_is_played(tmp_path, monkeypatch):
    env_id = "stag_hunt_4x4,limit=8"
    options = {
        "env_id": env_id,
        "total_timesteps": 80,
        "eval_interval": 40,
        "team": "2NH2learner",
        "matches_per_partner": 2,
    }
    names = train("hop", tmp_path / "whole", **options)
    folder = names["run"].folder
    results = json.loads((folder / "results.json").read_text())
    assert results["updates"] > 0 and set(results["om"]) == {"action_accuracy", "goal_belief"}
    assert {"losses/policy_loss", "losses/value_loss", "om/loss", "om/goal_belief"} <= read_log(folder).keys()
    part = stopped("hop", tmp_path / "parts", **options)
    train("hop", tmp_path / "parts", resume=part, **options)
    assert_same_run(part, folder)

    env = envs.make(env_id, 4, check=False)
    actions, _, _ = play.load_policy(str(folder), env)
    env.reset()
    chosen = actions(env.obs, env.info)
    assert env.info["avail"].gather(2, chosen.unsqueeze(2)).all()
    monkeypatch.chdir(tmp_path)
    team = Team(env, "3other1learner", pool=[str(folder)])  # as a team-mate: planning in the matches that it plays in
    runner = EpisodeRunner(env, team, load_player(folder, env, team.learner_seats))
    returns = runner.play().returns
    assert returns.shape == (4, 1) and (returns >= 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_id": "3m"}, "--env-id 3m has no list of goals: --no-goals plans without them"),
        ({"env_id": "sc2/3m"}, "--env-id sc2/3m: this script looks ahead in copies of simulated matches"),
        ({"belief_decay": 1.1}, "--belief-decay is"),
        ({"gamma": 0.0}, "--gamma is above 0, not 0.0"),
        ({"sims": 10**6}, "--sims is at most 8192"),
        ({"n_agents": 1, "env_id": "stag_hunt_4x4"}, "--n-agents is at least 2: there is no other agent to model"),
    ],
)
def test_what_cannot_be_planned_is_rejected(options, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        args = make_args(**options)
        hop.make_team(args, hop.make_env(args, 2, "cpu", "test"), "test")


def test_a_team_mate_without_goals_plans_in_a_battle():
    """Any simulated environment can be planned in; the matches of a team-mate are some of the batch."""
    env = envs.make("3m", 6, check=False)
    player = hop.Player(hop.Learner(make_args(env_id="3m", goals=False), env), env, torch.arange(3).repeat(2, 1))
    env.reset()
    match, last = torch.tensor([4, 1]), torch.full((2, 3), -1)
    avail = env.info["avail"][match]
    action = player.act(Inputs(env.obs[match], avail, last, last, torch.arange(3).repeat(2, 1), match=match), 0.0)
    assert avail.gather(2, action.unsqueeze(2)).all()


@pytest.mark.slow
def test_learns_to_hunt_with_a_stag_hunter(tmp_path):
    """A part of the stag is worth 5, a hare 1; new networks earn about 1.4."""
    options = {
        "env_id": "stag_hunt_3x3_2h1s,limit=12",
        "n_agents": 2,
        "team": "1NS1learner",
        "num_envs": 32,
        "depth": 6,
    }
    options |= {"sims": 20, "train_sims": 20, "hidden_dim": 32, "channels": (8,), "learning_rate": 2e-3}
    names = train("hop", tmp_path, **options, total_timesteps=1300, eval_interval=10**6, final_eval_episodes=64)
    results = json.loads((names["run"].folder / "results.json").read_text())
    assert results["final"]["episodic_return"] > 3


def test_options_about_others_are_refused_where_there_are_none():
    for options, name in (({"seat": 1}, "--seat"), ({"teammate_epsilon": 0.3}, "--teammate-epsilon")):
        with pytest.raises(SystemExit, match=f"{name} is for a learner with"):
            make_args(team="self", **options)
    assert make_args(team="self", matches_per_partner=5).matches_per_partner == 5  # beliefs last so long

"""brdiv.py: who plays whom, its loss against plain loops, and confederates as runs of iql.py."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from helpers import QUICK, TinyGame, make_learner, scramble, stopped, train, write_run
from test_td import ACTIONS, ROWS, SEATS, make_batch, plain_returns, with_garbage

import brdiv
import envs
import iql
from training import checkpoints
from training.episodes import EpisodeRunner, load_player, load_runner
from training.stacked import can_stack
from training.team import Team, read_pool

CPU = torch.device("cpu")
POPULATION = 3
PAIRS = ((0, 0), (1, 0), (2, 2), (2, 1))  # (response, confederate) of the four matches of a batch
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make_args(**options):
    options = {"hidden_dim": 8, "batch_size": 4, "num_envs": 4, "buffer_size": 8, **options}
    args = brdiv.Args(**{"population_size": POPULATION, **options})
    brdiv.check_args(args)
    return args


def make_env(team_reward=True, **sizes):
    sizes = {"n_agents": SEATS, "n_actions": ACTIONS, "obs_dim": 2 * ACTIONS, "device": CPU, **sizes}
    return SimpleNamespace(**sizes, team_reward=team_reward, leaving_ends=not team_reward, return_scale=2.0)


def learner_of(team_reward=True, **options):
    """A learner without an environment but for its sizes; all networks have weights of their own."""
    return scramble(brdiv.Learner(make_args(**options), make_env(team_reward)), 0.4)


def batch_of(seed, team_reward=True, pairs=PAIRS, **options):
    """Episodes as those of test_td.py; the seats are a best response's and then a confederate's."""
    batch = make_batch(seed, team_reward, **options)
    batch["policy"] = torch.tensor([[(j, *[i] * (SEATS - 1)) for j, i in pairs]])
    batch["seat"] = (batch["seat"] + torch.arange(len(pairs)).view(1, -1, 1)) % SEATS
    return batch


class ObservedValues(nn.Module):
    """Networks whose action values are some columns of the observation."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def init_hidden(self, matches, seats):
        return torch.zeros(matches, seats, 1)

    def forward(self, obs, last_action, h, seat, number):
        return obs[..., self.columns], h


def observe_values(learner):
    """Online values are the first columns of the observation, target values the last."""
    learner.agents, learner.target_agents = ObservedValues(slice(0, ACTIONS)), ObservedValues(slice(ACTIONS, None))


def gradients(learner, batch):
    learner.optimizer.zero_grad()
    loss, logs = learner.loss(batch)
    loss.backward()
    return [value.detach() for value in logs.values()] + [p.grad.clone() for p in learner.parameters]


# ---- who plays whom ----
@pytest.mark.parametrize("matches", [1, 10, 24])
@pytest.mark.parametrize("population", [2, 4])
def test_all_pairs_take_turns_in_all_seats(population, matches):
    pairs = brdiv.Pairs(SimpleNamespace(num_envs=matches, n_agents=3, device=CPU), population)
    pairs.rounds, counts = 0, {}
    cycle = 2 * population * (population - 1) * 3
    while pairs.rounds * matches < 4 * cycle:
        pairs.draw()
        for seats, policies in zip(pairs.learner_seats.tolist(), pairs.policy_id.tolist()):
            assert sorted(seats) == [0, 1, 2] and policies[1] == policies[2]
            counts.setdefault((policies[1], policies[0]), []).append(seats[0])
    played = [seat for (i, j), seats in counts.items() if i == j for seat in seats]
    total = sum(map(len, counts.values()))
    assert len(counts) == population**2 and abs(len(played) - total / 2) <= 1
    for (i, j), seats in counts.items():
        share = 1 / population if i == j else 1 / (population * (population - 1))
        assert abs(len(seats) - share * total / 2) <= population * 3
        assert all(abs(seats.count(seat) - len(seats) / 3) <= population for seat in range(3))


def test_every_evaluation_has_every_pair():
    """Also one that begins in the middle of a cycle: here two rounds are one."""
    pairs = brdiv.Pairs(SimpleNamespace(num_envs=12, n_agents=2, device=CPU), 4)
    found = []
    for _ in range(6):
        pairs.draw()
        found.append({tuple(pair) for pair in pairs.policy_id.tolist()})
    assert all(len(one | other) == 16 for one, other in itertools.pairwise(found))


def test_actions_go_to_the_seats_whose_observations_were_selected():
    env = SimpleNamespace(num_envs=40, n_agents=3, device=CPU)
    pairs = brdiv.Pairs(env, 3)
    values = torch.arange(120).view(40, 3)
    selected = pairs.select(values)
    assert not torch.equal(selected, values)
    assert torch.equal(selected, values.gather(1, pairs.learner_seats))
    assert torch.equal(pairs.select(values.unsqueeze(-1)).squeeze(-1), selected)
    assert torch.equal(pairs.joint_action(selected, None), values)


def test_recorded_episodes_have_the_best_response_first():
    class Numbers:  # every policy plays its number
        def reset(self, mask):
            pass

        def act(self, inputs, epsilon):
            return team.policy_id.clone()

    env = coordination_game(12)
    team = brdiv.Pairs(env, 2)
    runner = EpisodeRunner(env, team, Numbers(), brdiv.FIELDS)
    returns = runner.play().returns
    response, confederate = runner.episodes["policy"][0].unbind(1)
    assert torch.equal(runner.episodes["action"][0], team.policy_id)
    assert torch.equal(returns, (response == confederate).float().unsqueeze(1).expand(12, 2))
    joint = env.actions_taken
    assert torch.equal(joint.gather(1, runner.episodes["seat"][0]), team.policy_id)


# ---- the loss ----
def plain_loss(learner, batch):
    """(of best responses, of confederates), one number after the other; action values are in the observations."""
    online, target = batch["obs"].double().split(ACTIONS, -1)
    team, gamma, td_lambda = learner.env.team_reward, learner.args.gamma, learner.args.td_lambda
    errors = {"response": [], "confederate": []}
    for m, length in enumerate(batch["lengths"].tolist()):
        response, confederate, _ = batch["policy"][0, m].tolist()
        for a in range(SEATS):
            if a == 0 and response != confederate:
                continue
            factor = 5 / 2.0 * (1 if response == confederate else -learner.args.diversity_weight)
            steps = length if team else int(batch["alive"][:length, m, a].sum())
            over = bool(batch["terminated"][length - 1, m]) if team else not batch["alive"][steps, m, a]
            rewards = factor * batch["reward"][:steps, m, a].double().numpy()
            next_values = []
            for t in range(1, steps + 1):
                available = [i for i in range(ACTIONS) if batch["avail"][t, m, a, i]]
                next_values.append(float(target[t, m, a, max(available, key=lambda i: online[t, m, a, i])]))
            targets = plain_returns(rewards, next_values, over, gamma, td_lambda)
            role = errors["confederate" if a else "response"]
            role += [float(online[t, m, a, batch["action"][t, m, a]]) - targets[t] for t in range(steps)]
    return {role: np.mean(np.square(found)) for role, found in errors.items()}


@pytest.mark.parametrize("diversity_weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("team_reward", [True, False])
def test_loss_equals_plain_loops(team_reward, diversity_weight):
    learner = learner_of(team_reward, diversity_weight=diversity_weight, gamma=0.9)
    observe_values(learner)
    for seed in range(5):
        batch = batch_of(seed, team_reward)
        loss, logs = learner.loss(batch)
        expected = plain_loss(learner, batch)
        assert loss.item() == pytest.approx(sum(expected.values()), rel=1e-5)
        for role, value in expected.items():
            assert logs[f"losses/{role}_loss"].item() == pytest.approx(value, rel=1e-5)


def test_rewards_with_another_best_response_count_with_a_minus():
    """One step that ends a match: the target is the reward, or what it counts."""
    learner = learner_of(diversity_weight=0.25, reward_scale=1.0)
    observe_values(learner)
    for pair, rewards in (((1, 1), (8.0, 8.0)), ((0, 1), (None, -2.0))):
        batch = batch_of(0, pairs=[pair], lengths=(1,))
        batch = {key: torch.zeros_like(value) if value.is_floating_point() else value for key, value in batch.items()}
        batch["terminated"][0], batch["reward"][0] = True, 8.0
        _, logs = learner.loss(batch)
        found = [logs[f"losses/{role}_loss"].item() for role in ("response", "confederate")]
        assert found == pytest.approx([0 if reward is None else reward**2 for reward in rewards])
        batch["obs"][0, ..., :ACTIONS] = rewards[1]  # all values are right
        assert learner.loss(batch)[1]["losses/confederate_loss"].item() == pytest.approx(0)


@pytest.mark.parametrize("team_reward", [True, False])
def test_mask_of_the_loss(team_reward):
    """Steps of an episode, of agents that are there (with a team reward: of all); best responses in self-play only."""
    learner, batch = learner_of(team_reward), batch_of(3, team_reward, survival=0.8)
    observe_values(learner)
    batch["obs"].requires_grad_()
    learner.loss(batch)[0].backward()
    has_gradient = batch["obs"].grad.abs().sum(-1) > 0
    in_episode = torch.arange(ROWS).unsqueeze(1) < batch["lengths"]
    expected = in_episode.unsqueeze(-1) & (batch["alive"] | team_reward)
    expected[:, [1, 3], 0] = False
    assert not batch["alive"][:-1][in_episode[:-1]].all() and torch.equal(has_gradient, expected)


@pytest.mark.parametrize("number", [float("nan"), 7.0])
@pytest.mark.parametrize("team_reward", [True, False])
def test_rows_behind_the_end_of_an_episode_are_masked(team_reward, number):
    learner, batch = learner_of(team_reward), batch_of(1, team_reward)
    assert all(map(torch.equal, gradients(learner, batch), gradients(learner, with_garbage(batch, number))))


def test_data_after_an_agent_has_left_is_masked():
    learner, batch = learner_of(team_reward=False), batch_of(5, team_reward=False, survival=0.8)
    before = gradients(learner, batch)
    gone = ~batch["alive"]
    batch["obs"][gone] = 1e3
    batch["avail"][gone] = ~batch["avail"][gone]
    batch["action"][:-1][gone[:-1]] = 1
    assert gone[1:].any() and all(map(torch.equal, before, gradients(learner, batch)))


def test_a_batch_without_self_play_trains_confederates_only():
    learner, batch = learner_of(), batch_of(1, pairs=((0, 1), (1, 2), (2, 0), (0, 2)))
    learner.optimizer.zero_grad()
    loss, logs = learner.loss(batch)
    loss.backward()
    assert logs["losses/response_loss"] == 0 and loss.isfinite()
    assert not any(p.grad.any() for p in learner.agents.responses.parameters())
    assert all(p.grad.any() for p in learner.agents.confederates.parameters())


# ---- confederates as runs of iql.py ----
@pytest.mark.parametrize("recurrence", [True, False])
def test_a_folded_network_has_the_values_of_the_confederate(recurrence):
    learner, env = learner_of(recurrence=recurrence), make_env()
    obs, action = torch.randn(5, 4, SEATS, env.obs_dim), torch.randint(-1, ACTIONS, (5, 4, SEATS))
    seat, values = torch.stack([torch.randperm(SEATS) for _ in range(4)]), []
    for name, content in learner.exports().items():
        number = torch.full_like(seat, int(name.removeprefix("confederate_")))
        for key, networks in learner.networks().items():
            agents = iql.QNetwork(iql.Args(hidden_dim=8, recurrence=recurrence), env)
            agents.load_state_dict(content["networks"][key])
            h = agents.init_hidden(4, SEATS)
            found = agents(obs, action, h, seat)
            torch.testing.assert_close(found, networks.confederates(obs, action, h, seat, number))
            values.append(found[0])
    assert len(values) == 2 * POPULATION  # all of them different
    assert all((one - other).abs().max() > 0.01 for n, one in enumerate(values) for other in values[:n])


def test_a_run_plays_its_pairs(tmp_path):
    """The best response has the first seat, its confederate the others; each match has a pair drawn for it."""
    env = envs.make("stag_hunt_4x4", num_envs=6)
    run = write_run(tmp_path / "run", "brdiv", env, population_size=3, eval_episodes=12, final_eval_episodes=12)
    agents = brdiv.QNetwork(brdiv.Args(population_size=3, hidden_dim=QUICK["hidden_dim"]), env)
    checkpoints.load_networks(run, env, {"target_agents": agents})
    runner = load_runner(run, env)
    obs, _ = env.reset(seed=1)
    seats = runner.team.learner_seats
    number = runner.player.number
    assert number.unique().tolist() == [0, 1, 2] and torch.equal(number, number[:, :1].expand(6, 4))
    last_action = torch.full((1, 6, 4), -1)
    q, _ = agents(runner.team.select(obs).unsqueeze(0), last_action, agents.init_hidden(6, 4), seats, number)
    greedy = brdiv.greedy_action(q[0], runner.team.select(env.info["avail"]))
    assert torch.equal(runner.policy().gather(1, runner.team.learner_seats), greedy)
    single = load_player(run, env, torch.zeros(6, 1, dtype=torch.long))  # as an ego: the best response
    assert single.h.shape[1] == 1 and Team(env, "3brdiv1learner", pool=[str(run)]).players


def coordination_game(num_envs):
    """Both earn 1 if they take the same of two actions: two conventions, which are incompatible."""
    game = TinyGame([[[1, 0], [0, 1]]], [[[-1, -1], [-1, -1]]], num_envs)
    step = game.step

    def remember(actions):
        if game.stage[0] == 0:
            game.actions_taken = actions.clone()
        return step(actions)

    game.step = remember
    return game


@pytest.mark.slow
def test_two_conventions_are_found_where_there_are_two():
    args = make_args(
        population_size=2, hidden_dim=16, num_envs=32, batch_size=32, buffer_size=256, learning_rate=0.01, tau=0.1,
        diversity_weight=1.0,
    )  # fmt: skip
    env = coordination_game(args.num_envs)
    learner, team, eval_team = brdiv.Learner(args, env), brdiv.Pairs(env, 2), brdiv.Pairs(env, 2)
    runner = EpisodeRunner(env, team, brdiv.Player(learner.agents, team.learner_seats, team.policy_id), brdiv.FIELDS)
    player = brdiv.Player(learner.target_agents, eval_team.learner_seats, eval_team.policy_id)
    eval_runner = EpisodeRunner(env, eval_team, player)
    buffer, means = brdiv.ReplayBuffer(args, runner.episodes, CPU), {}
    goal = {"self_play": 1, "cross_play": 0, "return_0_0": 1, "return_0_1": 0, "return_1_0": 0, "return_1_1": 1}
    while means != goal and learner.updates < 1000:  # how long it takes depends on the weights it begins with
        for _ in range(10):
            buffer.add(runner.play(epsilon=0.5))
            learner.learn(buffer, updates=5)
        results, means = brdiv.evaluate(eval_runner, 50)
    assert means == goal
    assert [len(values) for values in results] == [25, 25, 25] and (results[0] == 1).all()


# ---- options and runs ----
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"population_size": 1}, "--population-size is at least 2, not 1"),
        ({"eval_episodes": 23}, "--eval-episodes is at least 24 .every pair., not 23"),
        ({"final_eval_episodes": 8}, "--final-eval-episodes is at least 24"),
        ({"diversity_weight": -0.1}, "--diversity-weight is from 0 up"),
    ],
)
def test_options_that_are_rejected(options, message):
    with pytest.raises(SystemExit, match=message):
        brdiv.check_args(brdiv.Args(**options))


@pytest.mark.parametrize("env_id", ["kuhn", "simple_tag"])
def test_opponents_are_rejected(env_id):
    with pytest.raises(SystemExit, match=f"--env-id {env_id}: this is for two or more agents on one side"):
        brdiv.make_team(brdiv.Args(env_id=env_id), envs.make(env_id), "training")


OPTIONS = {"env_id": "stag_hunt_4x4", "total_timesteps": 250, "eval_interval": 150}


def same(one, other):
    """Whether two contents of files are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.slow
def test_a_run_is_resumed_exactly_and_its_confederates_play(tmp_path):
    options = OPTIONS | {"keep_checkpoints": (0.5,)}
    whole = train("brdiv", tmp_path / "whole", **options)["run"].folder
    folder = stopped("brdiv", tmp_path / "parts", **options)
    assert (folder / "confederate_1" / "checkpoint.pt").exists()  # with every save
    train("brdiv", tmp_path / "parts", resume=folder, **options)
    one, other = (checkpoints.read_run(path) for path in (whole, folder))
    assert same(one["networks"], other["networks"]) and one["updates"] == other["updates"] > 0
    found, again = (json.loads((path / "results.json").read_text()) for path in (whole, folder))
    assert found["brdiv"] == again["brdiv"] and found["final"] == again["final"]
    assert {"self_play", "cross_play", "return_0_1"} <= found["brdiv"].keys()
    for path in ("confederate_0", "confederate_1", "at-0.5/confederate_0"):
        one, other = (checkpoints.read_run(run / path) for run in (whole, folder))
        assert one["algorithm"] == "iql" and same(one["networks"], other["networks"])

    env = envs.make("stag_hunt_4x4", num_envs=4)
    pool = read_pool([f"{folder}/confederate_*"], env)
    assert len(pool) == 2 and all(can_stack(run, env) for run in pool)
    team = {"team": "3iql1learner", "pool": (f"{tmp_path}/whole/*brdiv*/confederate_*", f"{folder}/at-*/confederate_*")}
    options = {**OPTIONS, **team, "init": folder / "confederate_0"}
    assert train("iql", tmp_path / "iql", **options)["run"].progress["complete"]


@needs_cuda
def test_a_run_on_the_gpu_is_captured_and_repeats_exactly(tmp_path):
    options = OPTIONS | {"cuda": True, "total_timesteps": 1500, "final_eval_episodes": 16}
    one, other = (train("brdiv", tmp_path / folder, **options) for folder in ("a", "b"))
    found, again = (json.loads((names["run"].folder / "results.json").read_text()) for names in (one, other))
    assert found["complete"] and found["args"]["cuda"] and found["brdiv"] == again["brdiv"]
    graphs = one["learner"].graphed_update.graphs
    assert graphs and any(graph is not None for graph in graphs.values())


@needs_cuda
def test_loss_on_the_gpu_equals_that_on_the_cpu():
    learner, batch = learner_of(), batch_of(1)
    on_gpu = make_learner("brdiv", make_env(device=torch.device("cuda")), make_args())
    for name, network in on_gpu.networks().items():
        network.load_state_dict(learner.networks()[name].state_dict())
    for one, other in zip(gradients(learner, batch), gradients(on_gpu, {k: v.cuda() for k, v in batch.items()})):
        torch.testing.assert_close(one, other.cpu(), rtol=1e-3, atol=1e-4)

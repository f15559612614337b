"""What the training scripts learn: returns, targets, masks and mixing, against plain loops."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from helpers import ALL_SCRIPTS, TEAM_SCRIPTS, as_played, make_learner, matrix_game, two_step_game

import iql
import qmix
from training.args import from_command_line
from training.episodes import EpisodeRunner, RandomPlayer
from training.run import wilson_interval
from training.team import Team

CPU = torch.device("cpu")
SEATS, ACTIONS, STATE, ROWS = 3, 4, 5, 17
EVERY_SCRIPT = pytest.mark.parametrize("name", TEAM_SCRIPTS)
OF_VALUES_ALONE = pytest.mark.parametrize("name", ["iql", "vdn", "qmix"])  # not of hidden states, as QTRAN's loss is
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make_args(module, **options):
    args = module.Args(**{"hidden_dim": 8, "batch_size": 4, "num_envs": 4, "buffer_size": 8, **options})
    module.check_args(args)
    return args


def learner_of(name, team_reward=True, device="cpu", **options):
    """A learner without an environment but for its sizes; its target networks differ from the online ones."""
    sizes = {"n_agents": SEATS, "n_actions": ACTIONS, "obs_dim": 2 * ACTIONS, "state_dim": STATE}
    env = SimpleNamespace(
        **sizes,
        episode_limit=ROWS - 1,
        team_reward=team_reward,
        leaving_ends=not team_reward,
        return_scale=2.0,
        device=torch.device(device),
    )
    learner = make_learner(name, env, make_args(TEAM_SCRIPTS[name], cuda=device == "cuda", **options))
    for network in (network for key, network in learner.networks().items() if key.startswith("target_")):
        network.load_state_dict({key: torch.randn_like(value) / 4 for key, value in network.state_dict().items()})
    return learner


def make_batch(seed, team_reward=True, lengths=(16, 1, 5, 9), survival=0.9):
    """Episodes, time first: rows 0 to its length belong to an episode, the others are noise."""
    random, matches = torch.Generator().manual_seed(seed), len(lengths)
    lengths = torch.tensor(lengths)
    shape = (ROWS, matches, SEATS)
    alive = (torch.rand(shape, generator=random) < survival).cumprod(0).bool()
    alive[0] = True
    reward = torch.randn(shape, generator=random)
    ends = torch.rand(matches, generator=random) < 0.5
    if team_reward:
        reward = reward[..., :1].expand(shape).clone()
    else:
        reward[1:] *= alive[:-1]  # an agent that has left earns nothing
        ends = ~alive[lengths, torch.arange(matches)].any(-1)
    terminated = torch.rand(ROWS, matches, generator=random) < 0.5
    for m, length in enumerate(lengths):
        terminated[: length - 1, m], terminated[length - 1, m] = False, ends[m]
    avail = torch.rand((*shape, ACTIONS), generator=random) < 0.6
    avail[..., 0] |= ~avail.any(-1)
    return {
        "obs": torch.randn((*shape, 2 * ACTIONS), generator=random),
        "state": torch.randn((ROWS, matches, STATE), generator=random),
        "action": torch.randint(ACTIONS, shape, generator=random),
        "avail": avail, "alive": alive, "reward": reward, "terminated": terminated,
        "seat": torch.arange(SEATS).repeat(1, matches, 1), "lengths": lengths,
    }  # fmt: skip


def episodes_of(batch):
    return {key: value for key, value in batch.items() if key != "lengths"}


class ObservedValues(nn.Module):
    """A Q-network whose action values are some columns of the observation."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def init_hidden(self, matches, seats):
        return torch.zeros(matches, seats, 1)

    def forward(self, obs, last_action, h, seat):
        return obs[..., self.columns], h


def observe_values(learner):
    """Online values are the first columns of the observation, target values the last."""
    learner.agents, learner.target_agents = ObservedValues(slice(0, ACTIONS)), ObservedValues(slice(ACTIONS, None))


# ---- plain loops ----
def plain_returns(rewards, next_values, ended, gamma, td_lambda):
    """The targets of one sequence; `ended`: whether nothing follows its last step."""
    targets = []
    for reward, next_value in zip(reversed(rewards), reversed(next_values)):
        if not targets:
            targets.append(reward + gamma * (0.0 if ended else next_value))
        else:
            targets.append(reward + gamma * ((1 - td_lambda) * next_value + td_lambda * targets[-1]))
    return targets[::-1]


def plain_mixer(mixer, q, state):
    weights = {key: value.double().numpy() for key, value in mixer.state_dict().items()}

    def linear(key, x):
        return weights[f"{key}.weight"] @ x + weights[f"{key}.bias"]

    x1, x2, x3, b1 = np.split(linear("fc1", state), np.cumsum(mixer.sizes[:-1]))
    hidden = q @ np.abs(linear("w1", np.maximum(x1, 0))).reshape(SEATS, -1) + b1
    hidden = np.where(hidden > 0, hidden, np.exp(np.minimum(hidden, 0)) - 1)
    return hidden @ np.abs(linear("w2", np.maximum(x2, 0))) + linear("b2", np.maximum(x3, 0))[0]


def plain_loss(name, learner, batch):
    """Of episodes whose action values are in the observations, one number after the other."""
    online, target = batch["obs"].double().split(ACTIONS, -1)
    team, gamma, td_lambda = learner.env.team_reward, learner.args.gamma, learner.args.td_lambda
    errors = []

    def mixed(mixer, values, alive, t, m):
        values = np.array([float(v) if team or alive[t, m, a] else 0.0 for a, v in enumerate(values)])
        if name == "vdn":
            return values.sum()
        return plain_mixer(getattr(learner, mixer), values, batch["state"][t, m].double().numpy())

    for m, length in enumerate(batch["lengths"].tolist()):
        alive, ended = batch["alive"], bool(batch["terminated"][length - 1, m])
        taken, following = np.zeros((length, SEATS)), np.zeros((length, SEATS))
        for t in range(length):
            for a in range(SEATS):
                taken[t, a] = online[t, m, a, batch["action"][t, m, a]]
                available = [i for i in range(ACTIONS) if batch["avail"][t + 1, m, a, i]]
                following[t, a] = target[t + 1, m, a, max(available, key=lambda i: online[t + 1, m, a, i])]
        reward = 5 / 2.0 * batch["reward"][:length, m].double().numpy()
        if name == "iql":
            for a in range(SEATS):
                steps = length if team else int(alive[:length, m, a].sum())
                over = ended if team else not alive[steps, m, a]
                targets = plain_returns(reward[:steps, a], following[:steps, a], over, gamma, td_lambda)
                errors += [taken[t, a] - targets[t] for t in range(steps)]
        else:
            reward = reward[:, 0] if team else reward.sum(1)
            next_values = [mixed("target_mixer", following[t], alive, t + 1, m) for t in range(length)]
            targets = plain_returns(reward, next_values, ended, gamma, td_lambda)
            errors += [mixed("mixer", taken[t], alive, t, m) - targets[t] for t in range(length)]
    return np.mean(np.square(errors))


# ---- targets and losses ----
@pytest.mark.parametrize("td_lambda", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 8, 61])
def test_lambda_returns(steps, td_lambda):
    random = np.random.default_rng(steps)
    for how in ("terminated", "truncated", "both"):
        for ends in range(1, steps + 1):
            reward, next_value = random.normal(size=(2, steps, 1))
            terminated, truncated = np.zeros((2, steps, 1), bool)
            terminated[ends - 1 :] = how != "truncated"
            truncated[ends - 1] = how != "terminated"
            tensors = [torch.from_numpy(array) for array in (reward, next_value, terminated, truncated)]
            targets = iql.lambda_returns(*tensors, 0.9, td_lambda)[:ends, 0]
            plain = plain_returns(reward[:ends, 0], next_value[:ends, 0], how != "truncated", 0.9, td_lambda)
            np.testing.assert_allclose(targets, plain, atol=1e-12)


@pytest.mark.parametrize("td_lambda", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("team_reward", [True, False])
@OF_VALUES_ALONE
def test_loss_equals_plain_loops(name, team_reward, td_lambda):
    learner = learner_of(name, team_reward, td_lambda=td_lambda, gamma=0.9)
    observe_values(learner)
    for seed in range(5):
        batch = make_batch(seed, team_reward)
        assert learner.loss(batch)[0].item() == pytest.approx(plain_loss(name, learner, batch), rel=1e-5)


def test_double_q_target_by_hand():
    """One step, then a time limit: the online network picks an available action, the target network values it."""
    learner = learner_of("iql", gamma=0.5, td_lambda=0.7, reward_scale=1.0)
    observe_values(learner)
    batch = {key: torch.zeros_like(value[:9, :1]) for key, value in episodes_of(make_batch(0)).items()}
    batch["lengths"], batch["alive"][:], batch["reward"][0] = torch.tensor([1]), True, 2.0
    batch["obs"][0, 0, :, 1], batch["action"][0] = 3.0, 1  # the value of the action taken
    batch["obs"][1, 0, :] = torch.tensor([9.0, 5.0, 4.0, 0.0, 100.0, 8.0, 100.0, 100.0])
    batch["avail"][1, 0, :, 1:] = True
    assert learner.loss(batch)[0].item() == pytest.approx((3 - (2 + 0.5 * 8)) ** 2)
    batch["terminated"][0] = True
    loss, logs = learner.loss(batch)
    assert loss.item() == logs["losses/td_loss"].item() == pytest.approx((3 - 2) ** 2)
    assert logs["losses/q_values"].item() == pytest.approx(3)


@pytest.mark.parametrize("team_reward", [True, False])
@OF_VALUES_ALONE
def test_mask_of_the_loss(name, team_reward):
    """With a team reward all steps of an episode count, also those of dead agents; else those of agents still there."""
    learner = learner_of(name, team_reward)
    observe_values(learner)
    batch = make_batch(3, team_reward, survival=0.8)
    batch["obs"].requires_grad_()
    learner.loss(batch)[0].backward()
    has_gradient = batch["obs"].grad.abs().sum(-1) > 0
    in_episode = torch.arange(ROWS).unsqueeze(1) < batch["lengths"]
    assert not batch["alive"][:-1][in_episode[:-1]].all()
    assert torch.equal(has_gradient, in_episode.unsqueeze(-1) & (batch["alive"] | team_reward))


@pytest.mark.parametrize("share", [True, False])
@EVERY_SCRIPT
def test_data_after_an_agent_has_left_is_masked(name, share):
    learner = learner_of(name, team_reward=False, share_parameters=share)
    batch = make_batch(5, team_reward=False, survival=0.8)
    before = gradients(learner, batch)
    gone = ~batch["alive"]
    batch["obs"][gone] = 1e3
    batch["avail"][gone] = ~batch["avail"][gone]
    batch["action"][:-1][gone[:-1]] = 1
    assert gone[1:].any() and all(map(torch.equal, before, gradients(learner, batch)))


def gradients(learner, batch):
    """The loss, the mean Q-value and the gradient of every parameter."""
    learner.optimizer.zero_grad()
    loss, logs = learner.loss(batch)
    loss.backward()
    return [loss.detach(), logs["losses/q_values"].detach(), *(p.grad.clone() for p in learner.parameters)]


def with_garbage(batch, number):
    """Other values in the rows behind the ends of the episodes."""
    batch = {key: value.clone() for key, value in batch.items()}
    for m, length in enumerate(batch["lengths"].tolist()):
        for key in ("obs", "state", "reward"):
            batch[key][length + (key != "reward") :, m] = number
        for key in ("avail", "alive", "terminated"):
            rows = slice(length + (key != "terminated"), None)
            batch[key][rows, m] = ~batch[key][rows, m]
        batch["action"][length:, m] = ACTIONS - 1
    return batch


@pytest.mark.parametrize("number", [float("nan"), -3e38, 7.0])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("team_reward", [True, False])
@EVERY_SCRIPT
def test_rows_behind_the_end_of_an_episode_are_masked(name, team_reward, share, number):
    learner, batch = learner_of(name, team_reward, share_parameters=share), make_batch(1, team_reward)
    assert all(map(torch.equal, gradients(learner, batch), gradients(learner, with_garbage(batch, number))))


@EVERY_SCRIPT
def test_loss_does_not_depend_on_the_number_of_rows(name):
    learner, batch = learner_of(name), make_batch(1, lengths=(3, 8, 5, 7))
    short = {key: value[:9] if key != "lengths" else value for key, value in batch.items()}
    for one, other in zip(gradients(learner, batch), gradients(learner, short)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# ---- networks ----
def unrolled(agents, obs, action):
    """Q-values and hidden states of all seats of episodes."""
    matches = obs.shape[1]
    return agents(obs, action, agents.init_hidden(matches, SEATS), torch.arange(SEATS).repeat(matches, 1))


@pytest.mark.parametrize("share", [True, False])
def test_inputs_and_hidden_states_of_seats_are_separate(share):
    agents, batch = learner_of("iql", share_parameters=share).agents, make_batch(2)
    before, _ = unrolled(agents, batch["obs"], batch["action"])
    batch["obs"][:, :, 1], batch["action"][:, :, 1] = 0.5, 2
    after, _ = unrolled(agents, batch["obs"], batch["action"])
    assert torch.equal(before[:, :, [0, 2]], after[:, :, [0, 2]])
    assert ((before[:, :, 1] - after[:, :, 1]).abs().amax(-1) > 0).all()


@pytest.mark.parametrize("share", [True, False])
def test_seats_with_equal_inputs_have_different_values(share):
    agents = learner_of("iql", share_parameters=share).agents
    q, _ = unrolled(agents, torch.ones(1, 1, SEATS, 2 * ACTIONS), torch.zeros(1, 1, SEATS, dtype=torch.long))
    assert len({tuple(row) for row in q[0, 0].tolist()}) == SEATS


@pytest.mark.parametrize("share", [True, False])
def test_single_steps_equal_an_unrolled_episode(share):
    """Step by step with the last action and hidden state of the step before, or the whole episode at once."""
    agents, batch = learner_of("iql", share_parameters=share).agents, make_batch(2)
    last_action = torch.cat((torch.full_like(batch["action"][:1], -1), batch["action"][:-1]))
    all_q, all_h = unrolled(agents, batch["obs"], last_action)
    h = agents.init_hidden(4, SEATS)
    for t in range(ROWS):
        q, h = agents(batch["obs"][t : t + 1], last_action[t : t + 1], h, batch["seat"][0])
        torch.testing.assert_close(q[0], all_q[t], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(h[0], all_h[t], rtol=1e-4, atol=1e-5)
        h = h[0]


def test_layers_for_each_seat_equal_those_of_torch():
    """A seat's own network computes what the shared one does with the same weights."""
    env = SimpleNamespace(n_agents=1, n_actions=ACTIONS, obs_dim=6, device=CPU)
    shared, own = (iql.QNetwork(iql.Args(hidden_dim=8, share_parameters=share), env) for share in (True, False))
    rnn = {name: getattr(shared.rnn, f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    with torch.no_grad():
        for layer, weight, bias in (
            (own.fc1, shared.fc1.weight, shared.fc1.bias),
            (own.rnn.fc_input, rnn["weight_ih"], rnn["bias_ih"]),
            (own.rnn.fc_hidden, rnn["weight_hh"], rnn["bias_hh"]),
            (own.fc2, shared.fc2.weight, shared.fc2.bias),
        ):
            layer.weight[0], layer.bias[0] = weight.T, bias
    obs, action, seat = torch.randn(5, 2, 1, 6), torch.randint(-1, ACTIONS, (5, 2, 1)), torch.zeros(2, 1).long()
    results = [agents(obs, action, agents.init_hidden(2, 1), seat) for agents in (own, shared)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("changed", ["obs", "action", "reward", "terminated"])
def test_independent_learners_learn_from_their_own_data_only(changed):
    """Whatever happens to seat 1, the gradients of the others' networks stay as they are."""
    learner, batch = learner_of("iql", team_reward=False, share_parameters=False), make_batch(4, False, survival=1.0)
    before = gradients(learner, batch)[2:]
    if changed == "terminated":  # all seats have as many steps as before, but for seat 1 nothing follows
        batch["alive"][batch["lengths"], torch.arange(4), 1] = False
    else:
        batch[changed][:, :, 1] = 1
    after = gradients(learner, batch)[2:]
    for one, other in zip(before, after):
        assert len(one) == SEATS and torch.equal(one[[0, 2]], other[[0, 2]])
    assert any(not torch.equal(one[1], other[1]) for one, other in zip(before, after))


@pytest.mark.parametrize("changed", ["obs", "action", "reward"])
def test_independent_learners_with_shared_parameters_too(changed):
    """Seat 1 changes nothing in how the loss depends on what the others observe."""
    learner, batch = learner_of("iql", team_reward=False), make_batch(4, False, survival=1.0)

    def gradient_of_obs():
        obs = batch["obs"].clone().requires_grad_()
        learner.loss({**batch, "obs": obs})[0].backward()
        return obs.grad

    before = gradient_of_obs()
    batch[changed][:, :, 1] = 1
    after = gradient_of_obs()
    torch.testing.assert_close(before[:, :, [0, 2]], after[:, :, [0, 2]], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(before[:, :, 1], after[:, :, 1])


# ---- mixing ----
def test_vdn_sums_the_values_of_seats_that_have_not_left():
    q, alive = torch.randn(5, 2, SEATS), torch.rand(5, 2, SEATS) < 0.5
    torch.testing.assert_close(learner_of("vdn").mix(q, alive).squeeze(-1), q[..., 0] + q[..., 1] + q[..., 2])
    individual = learner_of("vdn", team_reward=False).mix(q, alive)
    torch.testing.assert_close(individual, torch.where(alive, q, 0).sum(-1, keepdim=True))


def test_qmix_is_monotonic_in_every_seats_value():
    env = SimpleNamespace(state_dim=STATE, device=CPU)
    for seed in range(20):
        torch.manual_seed(seed)
        mixer = qmix.Mixer(qmix.Args(mixing_dim=8, hypernet_dim=16), env, SEATS)
        q, state = 10 * torch.randn(50, 20, SEATS), 3 * torch.randn(50, 20, STATE)
        q.requires_grad_()
        total = mixer(q, state)
        (slope,) = torch.autograd.grad(total.sum(), q)
        assert (slope >= 0).all() and (slope > 0).any()
        for a in range(SEATS):
            higher = q.detach().clone()
            higher[..., a] += 1
            assert (mixer(higher, state) >= total - 1e-4).all()


# ---- the replay buffer ----
def make_buffer(episodes, size=8, **options):
    return iql.ReplayBuffer(make_args(iql, buffer_size=size, **options), episodes, CPU)


def filled_buffer(*batches, size=8):
    buffer = make_buffer(episodes_of(batches[0]), size)
    for batch in batches:
        buffer.add(as_played(episodes_of(batch), batch["lengths"]))
    return buffer


def test_the_buffer_is_a_ring():
    first, second, third = make_batch(1), make_batch(2, lengths=(2, 3, 4, 6)), make_batch(3, lengths=(7, 7, 8, 10))
    buffer = make_buffer(episodes_of(first), size=6)
    buffer.add(
        as_played(episodes_of(first), first["lengths"], torch.tensor([True, True, True, False]))
    )  # one is not valid
    assert buffer.lengths.tolist() == [16, 1, 5, 0, 0, 0] and buffer.cursor == len(buffer) == 3
    buffer.add(as_played(episodes_of(second), second["lengths"]))
    assert buffer.lengths.tolist() == [6, 1, 5, 2, 3, 4] and buffer.cursor == 1
    buffer.add(as_played(episodes_of(third), third["lengths"], torch.tensor([False, True, False, False])))
    assert buffer.lengths.tolist() == [6, 7, 5, 2, 3, 4] and buffer.cursor == 2
    for slot, (batch, m) in enumerate(((second, 3), (third, 1), (first, 2), (second, 0), (second, 1), (second, 2))):
        for key, data in buffer.data.items():
            rows = batch["lengths"][m] + 1
            assert torch.equal(data[:rows, slot], batch[key][:rows, m])
    buffer.add(as_played(episodes_of(third), third["lengths"], torch.zeros(4, dtype=torch.bool)))
    assert buffer.cursor == 2 and len(buffer) == 6


def test_sampled_batches_are_different_episodes_of_the_buffer():
    """Each with its own length and rows, cut after the longest one, always in the same memory."""
    batch = make_batch(1, lengths=(16, 1, 5, 9))
    buffer = make_buffer(episodes_of(batch), batch_size=2)
    buffer.add(as_played(episodes_of(batch), batch["lengths"]))
    drawn, memory = set(), set()
    for sampled in buffer.sample(100, 2):
        matches = [batch["lengths"].tolist().index(length) for length in sampled["lengths"].tolist()]
        assert matches[0] != matches[1]
        steps = -(-int(sampled["lengths"].max()) // 8) * 8
        for key, values in episodes_of(sampled).items():
            assert len(values) == (1 if key == "seat" else steps + 1), key
            for place, m in enumerate(matches):
                rows = int(batch["lengths"][m]) + 1
                assert torch.equal(values[:rows, place], batch[key][:rows, m]), key
        drawn.update(matches)
        memory.add(tuple(values.data_ptr() for values in sampled.values()))
    assert drawn == {0, 1, 2, 3} and len(memory) == 1


def test_sampling_never_returns_empty_slots():
    buffer = filled_buffer(make_batch(1), size=64)
    assert all(int(sampled["lengths"].min()) > 0 for sampled in buffer.sample(50, 4))


@EVERY_SCRIPT
def test_a_longer_episode_previously_in_a_slot_leaves_no_trace(name):
    learners = [learner_of(name) for _ in range(2)]
    for key, network in learners[1].networks().items():
        network.load_state_dict(learners[0].networks()[key].state_dict())
    old, new = make_batch(1, lengths=(16, 16, 16, 16)), make_batch(2, lengths=(2, 1, 9, 4))
    for learner, buffer in zip(learners, (filled_buffer(old, new, size=4), filled_buffer(new, size=4))):
        learner.learn(buffer, 3)
    assert all(map(torch.equal, learners[0].parameters, learners[1].parameters))
    assert learners[0].metrics.pop() == learners[1].metrics.pop()


# ---- updates ----
@EVERY_SCRIPT
def test_an_update_is_adams_with_the_clipped_gradient_and_moves_the_target_networks(name):
    learner, batch = learner_of(name, learning_rate=0.01, tau=0.25, max_grad_norm=0.1), make_batch(1)
    _, _, *grads = gradients(learner, batch)
    before, target = ([p.detach().clone() for p in group] for group in (learner.parameters, learner.target_parameters))
    learner.update(batch)
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    assert norm > 0.1 and learner.metrics.pop()["losses/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for old, new, grad in zip(before, learner.parameters, grads):
        grad = grad * 0.1 / norm
        torch.testing.assert_close(new, old - 0.01 * grad / (grad.abs() + 1e-8), rtol=1e-3, atol=1e-5)
    for old, new, online in zip(target, learner.target_parameters, learner.parameters):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * online)


@needs_cuda
@EVERY_SCRIPT
def test_without_cuda_graphs_a_loss_can_be_looked_into(name, capsys):
    learner, batch = learner_of(name, device="cuda", cudagraphs=False), make_batch(1)
    episodes = {key: values.cuda() for key, values in episodes_of(batch).items()}
    buffer = TEAM_SCRIPTS[name].ReplayBuffer(learner.args, episodes, torch.device("cuda"))
    buffer.add(as_played(episodes, batch["lengths"]))
    original = learner.loss

    def loss(batch):
        td_loss, logs = original(batch)
        print("loss", td_loss.item())
        return td_loss, logs

    learner.loss = loss
    learner.learn(buffer, 4)
    values = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.startswith("loss ")]
    assert len(set(values)) == 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("reward", [float("inf"), float("nan"), 3e19])  # 3e19 squared is too large, its slope is not
@EVERY_SCRIPT
def test_an_update_that_is_not_finite_is_skipped_and_reported(name, reward, device):
    learner, batch = learner_of(name, device=device), make_batch(1)
    episodes = {key: values.to(device) for key, values in episodes_of(batch).items()}
    buffer = TEAM_SCRIPTS[name].ReplayBuffer(learner.args, episodes, torch.device(device))
    buffer.add(as_played(episodes, batch["lengths"]))
    learner.learn(buffer, 3)
    learner.metrics.pop()
    before = [p.detach().clone() for p in learner.parameters]
    moments = [value.clone() for state in learner.optimizer.state.values() for value in state.values()]
    buffer.data["reward"][0, 2] = reward
    learner.learn(buffer, 1)
    assert all(map(torch.equal, before, learner.parameters))
    after = [value for state in learner.optimizer.state.values() for value in state.values()]
    assert all(map(torch.equal, moments, after))
    assert all(torch.isfinite(p).all() for p in learner.target_parameters)
    with pytest.raises(FloatingPointError, match="losses/td_loss was not finite"):
        learner.metrics.pop()


def test_a_gradient_that_is_not_finite_is_skipped_and_reported(monkeypatch):
    learner = learner_of("iql")
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(float("inf")))
    before = [p.detach().clone() for p in learner.parameters]
    learner.update(make_batch(1))
    assert all(map(torch.equal, before, learner.parameters))
    with pytest.raises(FloatingPointError, match="losses/grad_norm was not finite"):
        learner.metrics.pop()


# ---- playing ----
def make_runner(env, agents=None, fields=()):
    agents = iql.QNetwork(iql.Args(hidden_dim=8), env) if agents is None else agents
    team = Team(env, "self")
    return EpisodeRunner(env, team, iql.Player(agents, team.learner_seats), fields)


def test_recorded_episodes_are_those_played():
    runner = make_runner(two_step_game(64), fields=qmix.FIELDS)
    for _ in range(2):  # the second round overwrites the first
        played = runner.play(epsilon=1.0)
        returns, lengths, valid = played.returns, played.lengths, played.valid
        episodes = runner.episodes
        assert lengths.tolist() == [2] * 64 and valid.all() and (episodes["seat"] == torch.arange(2)).all()
        assert len({tuple(row) for row in episodes["action"][:2].transpose(0, 1).flatten(1).tolist()}) == 16
        for m in range(64):
            (first, _), second = episodes["action"][:2, m].tolist()
            assert episodes["obs"][:3, m].tolist() == [[[1, 0, 0]] * 2, [[0, 1 - first, first]] * 2, [[0, 0, 0]] * 2]
            assert torch.equal(episodes["state"][:3, m], episodes["obs"][:3, m, 0])
            reward = [7, 7, 7, 7, 0, 1, 1, 8][4 * first + 2 * second[0] + second[1]]
            assert episodes["reward"][:, m, 0].tolist() == [0, reward, *[0] * 7] and returns[m].tolist() == [reward] * 2
            assert episodes["terminated"][:2, m].tolist() == [False, True]


def test_exploration_has_the_given_probability_and_takes_available_actions():
    env = matrix_game(4000)
    runner = make_runner(env, fields=("action",))
    runner.play(epsilon=0.0)
    greedy = runner.episodes["action"][0].clone()
    assert (greedy == greedy[0]).all()
    runner.play(epsilon=0.5)
    others = (runner.episodes["action"][0] != greedy).float().mean()
    assert 0.22 < others < 0.28  # half of the random actions are the greedy ones
    env.info["avail"][..., 1] = False
    runner.play(epsilon=1.0)
    assert not runner.episodes["action"].any()


def test_evaluation_leaves_out_matches_that_failed():
    env = two_step_game(8)
    runner = make_runner(env)
    env.info["invalid"][3:] = True
    assert [len(values) for values in runner.evaluate(7)] == [7, 7, 7]


def test_hidden_state_and_last_action_start_anew_with_each_match():
    class Counter(ObservedValues):  # its hidden state counts its calls
        def forward(self, obs, last_action, h, seat):
            calls.append((last_action[0, :, 0].tolist(), h[:, 0, 0].tolist()))
            return torch.tensor([0.0, 1.0]).expand(1, 2, 2, 2), (h + 1).unsqueeze(0)

    calls, env = [], matrix_game(2)
    env.steps = torch.zeros(2)
    runner = make_runner(env, Counter(slice(None)))
    for steps in ([0, 0], [1, 1], [2, 0], [3, 1]):
        env.steps.copy_(torch.tensor(steps))
        assert (runner.policy() == 1).all()
    assert calls == [([-1, -1], [0, 0]), ([1, 1], [1, 1]), ([1, -1], [2, 0]), ([1, 1], [3, 1])]


def test_wilson_interval():
    assert wilson_interval(5, 10) == pytest.approx([0.2366, 0.7634], abs=1e-4)
    assert wilson_interval(0, 10) == pytest.approx([0.0, 0.2775], abs=1e-4)
    assert all(wilson_interval(0, n)[0] >= 0 and wilson_interval(n, n)[1] <= 1 for n in range(1, 1100))


# ---- tiny games ----
def train(name, game, rounds):
    """The mean greedy return after so many rounds of random play."""
    module = TEAM_SCRIPTS[name]
    args = make_args(
        module, hidden_dim=16, num_envs=32, batch_size=32, buffer_size=256, learning_rate=0.005, tau=0.05,
        td_lambda=0.0, gamma=1.0,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    env = game(args.num_envs)
    learner = make_learner(name, env, args)
    runner = make_runner(env, learner.agents, module.FIELDS)
    buffer = module.ReplayBuffer(args, runner.episodes, CPU)
    for _ in range(rounds):
        buffer.add(runner.play(epsilon=1.0))
        learner.learn(buffer, updates=8)
    learner.metrics.check_finite()
    return float(make_runner(env, learner.target_agents).evaluate(32)[0].mean())


def test_iql_finds_the_best_of_a_matrix_game():
    assert train("iql", matrix_game, rounds=15) == 6


@pytest.mark.slow
def test_qmix_finds_the_best_of_the_two_step_game():
    assert train("qmix", two_step_game, rounds=40) == 8


@pytest.mark.slow
def test_vdn_cannot_represent_the_two_step_game():
    """The best sum for the table of 0, 1, 1 and 8 has 6.5 for its best entry, which is below 7."""
    assert train("vdn", two_step_game, rounds=40) == 7


# ---- PyMARL's settings ----
@pytest.mark.parametrize("name", TEAM_SCRIPTS)
def test_the_target_network_can_be_a_copy_every_few_updates(name):
    env = two_step_game(4)
    learner = make_learner(name, env, make_args(TEAM_SCRIPTS[name], hidden_dim=8, tau=0.0, target_interval=2))
    runner = EpisodeRunner(env, Team(env, "self"), RandomPlayer(), TEAM_SCRIPTS[name].FIELDS)
    runner.play()
    batch = {key: values.clone() for key, values in runner.episodes.items()} | {"lengths": runner.lengths.clone()}
    buffer = SimpleNamespace(sample=lambda updates, size: iter([batch] * updates))
    first = [weights.clone() for weights in learner.target_parameters]
    learner.learn(buffer, 1)
    assert all(map(torch.equal, learner.target_parameters, first))
    learner.learn(buffer, 2)
    assert not all(map(torch.equal, learner.target_parameters, learner.parameters))  # the third update came after it
    learner.learn(buffer, 1)
    assert all(map(torch.equal, learner.target_parameters, learner.parameters))


@pytest.mark.parametrize("name", [*TEAM_SCRIPTS, "coma"])
def test_a_preset_has_pymarls_settings_and_options_go_before_them(name, monkeypatch):
    script = ALL_SCRIPTS[name]
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--preset", "pymarl", "--learning-rate", "0.001"])
    args = from_command_line(script.Args, preset=script.PYMARL)
    published = {"gamma": 0.99, "reward_scale": 1.0, "total_timesteps": 2_050_000, "eval_interval": 10_000}
    if name == "coma":
        published |= {"num_envs": 8, "td_lambda": 0.8, "start_e": 0.5, "end_e": 0.01, "critic_learning_rate": 0.0005}
    else:
        published |= {"num_envs": 1, "train_frequency": 0, "batch_size": 32, "buffer_size": 5000, "td_lambda": 0.0}
        published |= {"tau": 0.0, "target_interval": 200, "start_e": 1.0, "end_e": 0.05, "max_grad_norm": 10.0}
    assert {key: getattr(args, key) for key in published} == published
    assert args.learning_rate == 0.001 and args.hidden_dim == 64
    steps_of_exploring = args.exploration_fraction * args.total_timesteps
    assert steps_of_exploring == pytest.approx(100_000 if name == "coma" else 50_000)

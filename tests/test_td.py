"""What the training scripts learn: returns, targets, masks and mixing, against plain restatements."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from scripts import SCRIPTS, matrix_game, two_step_game

CPU = torch.device("cpu")
SEATS, ACTIONS, STATE, ROWS = 3, 4, 5, 17
EVERY = pytest.mark.parametrize("name", SCRIPTS)
IQL, VDN, QMIX = SCRIPTS.values()
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")


@pytest.fixture(autouse=True)
def quick_and_repeatable():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the networks are tiny
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def arguments(module, **options):
    args = module.Args(**{"hidden_dim": 8, "batch_size": 4, "num_envs": 4, "buffer_size": 8, **options})
    module.check(args)
    return args


def make_learner(name, team_reward=True, device=CPU, **options):
    """A learner, without an environment but for its sizes."""
    sizes = {"n_agents": SEATS, "n_actions": ACTIONS, "obs_dim": 2 * ACTIONS, "state_dim": STATE}
    env = SimpleNamespace(**sizes, episode_limit=ROWS - 1, team_reward=team_reward, device=torch.device(device))
    learner = SCRIPTS[name].Learner(arguments(SCRIPTS[name], cuda=device == "cuda", **options), env)
    for number, network in enumerate(learner.target.values()):  # other numbers than the online ones
        torch.manual_seed(number + 1)
        network.load_state_dict({key: torch.randn_like(value) / 4 for key, value in network.state_dict().items()})
    return learner


def make_batch(seed, team_reward=True, lengths=(16, 1, 5, 9), stay=0.9):
    """Episodes, time first: rows from 0 to its length are an episode's, the others are noise."""
    random, matches = torch.Generator().manual_seed(seed), len(lengths)
    lengths = torch.tensor(lengths)
    shape = (ROWS, matches, SEATS)
    alive = (torch.rand(shape, generator=random) < stay).cumprod(0).bool()
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
        "avail": avail, "alive": alive, "reward": reward, "terminated": terminated, "lengths": lengths,
    }  # fmt: skip


def story_of(batch):
    return {key: value for key, value in batch.items() if key != "lengths"}


class Shown(nn.Module):
    """Action values that are what is observed: the first columns for the online network, the last for the target."""

    def __init__(self, columns):
        super().__init__()
        self.columns, self.scale = columns, nn.Parameter(torch.ones(()))

    def start(self, matches, seats=None):
        return torch.zeros(matches, SEATS, 1)

    def forward(self, obs, last_action, h, seat=None):
        return obs[..., self.columns] * self.scale, h


def show_values(learner):
    learner.online["agents"], learner.target["agents"] = Shown(slice(0, ACTIONS)), Shown(slice(ACTIONS, None))


# ---- plain restatements ----
def plain_returns(rewards, bootstraps, ended, gamma, td_lambda):
    """The targets of one sequence; `ended`: whether nothing follows its last step."""
    targets = []
    for reward, bootstrap in zip(reversed(rewards), reversed(bootstraps)):
        if not targets:
            targets.append(reward + gamma * (0.0 if ended else bootstrap))
        else:
            targets.append(reward + gamma * ((1 - td_lambda) * bootstrap + td_lambda * targets[-1]))
    return targets[::-1]


def plain_mixer(mixer, q, state):
    weights = {key: value.double().numpy() for key, value in mixer.state_dict().items()}

    def linear(key, x):
        return weights[f"{key}.weight"] @ x + weights[f"{key}.bias"]

    into = dict(
        zip(
            ("first", "second", "second_bias", "first_bias"),
            np.split(linear("into", state), np.cumsum(mixer.parts[:-1])),
        )
    )

    def network(key):
        return linear(key, np.maximum(into[key], 0))

    hidden = q @ np.abs(network("first")).reshape(SEATS, -1) + into["first_bias"]
    hidden = np.where(hidden > 0, hidden, np.exp(np.minimum(hidden, 0)) - 1)
    return hidden @ np.abs(network("second")) + network("second_bias")[0]


def plain_loss(name, learner, batch):
    """Of episodes whose action values are shown in the observations, one number after the other."""
    online, target = batch["obs"].double().split(ACTIONS, -1)
    team, gamma, td_lambda = learner.env.team_reward, learner.args.gamma, learner.args.td_lambda
    errors = []

    def value(network, values, alive, t, m):
        values = np.array([float(v) if team or alive[t, m, a] else 0.0 for a, v in enumerate(values)])
        if name == "vdn":
            return values.sum()
        return plain_mixer(learner.__dict__[network]["mixer"], values, batch["state"][t, m].double().numpy())

    for m, length in enumerate(batch["lengths"].tolist()):
        alive, ended = batch["alive"], bool(batch["terminated"][length - 1, m])
        chosen, following = np.zeros((length, SEATS)), np.zeros((length, SEATS))
        for t in range(length):
            for a in range(SEATS):
                chosen[t, a] = online[t, m, a, batch["action"][t, m, a]]
                allowed = [i for i in range(ACTIONS) if batch["avail"][t + 1, m, a, i]]
                following[t, a] = target[t + 1, m, a, max(allowed, key=lambda i: online[t + 1, m, a, i])]
        reward = batch["reward"][:length, m].double().numpy()
        if name == "iql":
            for a in range(SEATS):
                own = length if team else int(alive[:length, m, a].sum())
                over = ended if team else not alive[own, m, a]
                targets = plain_returns(reward[:own, a], following[:own, a], over, gamma, td_lambda)
                errors += [chosen[t, a] - targets[t] for t in range(own)]
        else:
            earned = reward[:, 0] if team else reward.sum(1)
            later = [value("target", following[t], alive, t + 1, m) for t in range(length)]
            targets = plain_returns(earned, later, ended, gamma, td_lambda)
            errors += [value("online", chosen[t], alive, t, m) - targets[t] for t in range(length)]
    return np.mean(np.square(errors))


# ---- targets and losses ----
@pytest.mark.parametrize("td_lambda", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 8, 61])
def test_lambda_returns(steps, td_lambda):
    random = np.random.default_rng(steps)
    for how in ("terminated", "truncated", "both"):
        for ends in range(1, steps + 1):
            reward, bootstrap = random.normal(size=(2, steps, 1))
            ended, last = np.zeros((2, steps, 1), bool)
            ended[ends - 1:], last[ends - 1] = how != "truncated", how != "terminated"  # fmt: skip
            tensors = [torch.from_numpy(array) for array in (reward, bootstrap, ended, last)]
            told = IQL.lambda_returns(*tensors, 0.9, td_lambda)[:ends, 0]
            plain = plain_returns(reward[:ends, 0], bootstrap[:ends, 0], how != "truncated", 0.9, td_lambda)
            np.testing.assert_allclose(told, plain, atol=1e-12)


@pytest.mark.parametrize("td_lambda", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("team_reward", [True, False])
@EVERY
def test_the_loss_is_that_of_plain_loops(name, team_reward, td_lambda):
    learner = make_learner(name, team_reward, td_lambda=td_lambda, gamma=0.9)
    show_values(learner)
    for seed in range(5):
        batch = make_batch(seed, team_reward)
        assert learner.loss(batch)[0].item() == pytest.approx(plain_loss(name, learner, batch), rel=1e-5)


def test_a_target_by_hand():
    """One step, then a time limit: the online network picks the action, among those available, the target rates it."""
    learner = make_learner("iql", gamma=0.5, td_lambda=0.7)
    show_values(learner)
    batch = {key: torch.zeros_like(value[:9, :1]) for key, value in story_of(make_batch(0)).items()}
    batch["lengths"], batch["alive"][:], batch["reward"][0] = torch.tensor([1]), True, 2.0
    batch["obs"][0, 0, :, 1], batch["action"][0] = 3.0, 1  # the value of what was done
    batch["obs"][1, 0, :] = torch.tensor([9.0, 5.0, 4.0, 0.0, 100.0, 8.0, 100.0, 100.0])
    batch["avail"][1, 0, :, 1:] = True
    assert learner.loss(batch)[0].item() == pytest.approx((3 - (2 + 0.5 * 8)) ** 2)
    batch["terminated"][0] = True
    assert learner.loss(batch)[0].item() == pytest.approx((3 - 2) ** 2)
    assert learner.loss(batch)[1].item() == pytest.approx(3)


@pytest.mark.parametrize("team_reward", [True, False])
@EVERY
def test_which_steps_of_which_seats_are_learned_from(name, team_reward):
    """All of an episode where the team earns, those of the dead too; else those of agents that have not left."""
    learner = make_learner(name, team_reward)
    show_values(learner)
    batch = make_batch(3, team_reward, stay=0.8)
    batch["obs"].requires_grad_()
    learner.loss(batch)[0].backward()
    learned = batch["obs"].grad.abs().sum(-1) > 0
    within = torch.arange(ROWS).unsqueeze(1) < batch["lengths"]
    assert not batch["alive"][:-1][within[:-1]].all()
    expected = within.unsqueeze(-1) & (batch["alive"] | team_reward)
    assert torch.equal(learned, expected)


@pytest.mark.parametrize("share", [True, False])
@EVERY
def test_nothing_after_an_agent_has_left_is_learned_from(name, share):
    learner = make_learner(name, team_reward=False, share_parameters=share)
    batch = make_batch(5, team_reward=False, stay=0.8)
    if name != "qmix":  # its state is not the agents'
        del batch["state"]
    before = gradients(learner, batch)
    gone = ~batch["alive"]
    batch["obs"][gone] = 1e3
    batch["avail"][gone] = ~batch["avail"][gone]
    batch["action"][:-1][gone[:-1]] = 1
    assert gone[1:].any() and all(map(torch.equal, before, gradients(learner, batch)))


def gradients(learner, batch):
    """The loss, the mean value and the gradient of every parameter."""
    learner.optimizer.zero_grad()
    loss, value = learner.loss(batch)
    loss.backward()
    return [loss.detach(), value.detach(), *(p.grad.clone() for p in learner.parameters)]


def with_garbage(batch, number):
    """Other rows behind the ends of the episodes."""
    batch = {key: value.clone() for key, value in batch.items()}
    for m, length in enumerate(batch["lengths"].tolist()):
        for key in ("obs", "state", "reward"):
            batch[key][length + (key != "reward") :, m] = number
        for key in ("avail", "alive", "terminated"):
            rows = slice(length + (key != "terminated"), None)
            batch[key][rows, m] = ~batch[key][rows, m]
        batch["action"][length:, m] = ACTIONS - 1
    return batch


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -3e38, 7.0])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("team_reward", [True, False])
@EVERY
def test_what_is_behind_the_end_of_an_episode_does_not_matter(name, team_reward, share, number):
    learner, batch = make_learner(name, team_reward, share_parameters=share), make_batch(1, team_reward)
    assert all(map(torch.equal, gradients(learner, batch), gradients(learner, with_garbage(batch, number))))


@EVERY
def test_nor_does_how_many_rows_there_are(name):
    learner, batch = make_learner(name), make_batch(1, lengths=(3, 8, 5, 7))
    short = {key: value[:9] if key != "lengths" else value for key, value in batch.items()}
    for one, other in zip(gradients(learner, batch), gradients(learner, short)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# ---- seats ----
@pytest.mark.parametrize("share", [True, False])
def test_a_seat_sees_and_remembers_only_its_own(share):
    learner, batch = make_learner("iql", share_parameters=share), make_batch(2)
    agents, start = learner.online["agents"], learner.online["agents"].start(4)
    before, _ = agents(batch["obs"], batch["action"], start)
    batch["obs"][:, :, 1], batch["action"][:, :, 1] = 0.5, 2
    after, _ = agents(batch["obs"], batch["action"], start)
    assert torch.equal(before[:, :, [0, 2]], after[:, :, [0, 2]])
    assert ((before[:, :, 1] - after[:, :, 1]).abs().amax(-1) > 0).all()


def test_seats_differ_though_they_see_the_same():
    for share in (True, False):
        agents = make_learner("iql", share_parameters=share).online["agents"]
        q, _ = agents(torch.ones(1, 1, SEATS, 2 * ACTIONS), torch.zeros(1, 1, SEATS, dtype=torch.long), agents.start(1))
        assert len({tuple(row) for row in q[0, 0].tolist()}) == SEATS


@pytest.mark.parametrize("share", [True, False])
def test_playing_and_learning_compute_the_same_values(share):
    """Step by step with the last action and memory of the step before, or the whole episode at once."""
    agents, batch = make_learner("iql", share_parameters=share).online["agents"], make_batch(2)
    before = torch.cat((torch.full_like(batch["action"][:1], -1), batch["action"][:-1]))
    whole, end = agents(batch["obs"], before, agents.start(4))
    h = agents.start(4)
    for t in range(ROWS):
        q, h = agents(batch["obs"][t : t + 1], before[t : t + 1], h)
        torch.testing.assert_close(q[0], whole[t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(h, end, rtol=1e-4, atol=1e-5)


def test_the_networks_of_seats_are_those_of_torch():
    """One seat's own network computes what the shared one does with the same weights."""
    sizes = SimpleNamespace(n_agents=1, n_actions=ACTIONS, obs_dim=6)
    shared, own = IQL.Agents(sizes, 8, True), IQL.Agents(sizes, 8, False)
    gru = {name: getattr(shared.gru, f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    with torch.no_grad():
        for mine, weight, bias in (
            (own.into, shared.into.weight, shared.into.bias),
            (own.gru.of_input, gru["weight_ih"], gru["bias_ih"]),
            (own.gru.of_state, gru["weight_hh"], gru["bias_hh"]),
            (own.out, shared.out.weight, shared.out.bias),
        ):
            mine.weight[0], mine.bias[0] = weight.T, bias
    obs, action = torch.randn(5, 2, 1, 6), torch.randint(-1, ACTIONS, (5, 2, 1))
    torch.testing.assert_close(own(obs, action, own.start(2)), shared(obs, action, shared.start(2)))


def test_the_unroll_for_the_gpu_has_the_gradients_of_a_gru():
    """Of its inputs, of the state it starts from and of all weights; it is used on CUDA, but computes anywhere."""
    torch.manual_seed(1)
    gru, x, h = nn.GRU(5, 7), torch.randn(11, 3, 5, requires_grad=True), torch.randn(3, 7, requires_grad=True)
    wanted, weight = gru(x, h.unsqueeze(0))[0], torch.randn(11, 3, 7)
    gates = nn.functional.linear(x, gru.weight_ih_l0, gru.bias_ih_l0)
    found = SCRIPTS["iql"].Unroll.apply(gates, h, gru.weight_hh_l0, gru.bias_hh_l0)
    torch.testing.assert_close(found, wanted)
    leaves = (x, h, *gru.parameters())
    for ours, theirs in zip(*(torch.autograd.grad((y * weight).sum(), leaves) for y in (found, wanted))):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("what", ["obs", "action", "reward", "terminal"])
def test_independent_learners_learn_from_their_own_data_only(what):
    """Whatever happens to seat 1, the gradients of the others' networks stay as they are."""
    learner, batch = make_learner("iql", team_reward=False, share_parameters=False), make_batch(4, False, stay=1.0)
    before = gradients(learner, batch)[2:]
    if what == "terminal":  # seats have as many steps as before, but for seat 1 nothing follows
        batch["alive"][batch["lengths"], torch.arange(4), 1] = False
    else:
        batch[what][:, :, 1] = 1
    after = gradients(learner, batch)[2:]
    for one, other in zip(before, after):
        assert len(one) == SEATS and torch.equal(one[[0, 2]], other[[0, 2]])
    assert any(not torch.equal(one[1], other[1]) for one, other in zip(before, after))


@pytest.mark.parametrize("what", ["obs", "action", "reward"])
def test_so_do_those_that_share_a_network(what):
    """Seat 1 changes nothing in how the loss depends on what the others observe."""
    learner, batch = make_learner("iql", team_reward=False), make_batch(4, False, stay=1.0)

    def slopes():
        obs = batch["obs"].clone().requires_grad_()
        learner.loss({**batch, "obs": obs})[0].backward()
        return obs.grad

    before = slopes()
    batch[what][:, :, 1] = 1
    after = slopes()
    torch.testing.assert_close(before[:, :, [0, 2]], after[:, :, [0, 2]], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(before[:, :, 1], after[:, :, 1])


# ---- mixing ----
def test_vdn_sums_and_a_seat_that_left_counts_as_0():
    q, alive = torch.randn(5, 2, SEATS), torch.rand(5, 2, SEATS) < 0.5
    torch.testing.assert_close(make_learner("vdn").mix(q, alive), q[..., 0] + q[..., 1] + q[..., 2])
    own = make_learner("vdn", team_reward=False).mix(q, alive)
    torch.testing.assert_close(own, torch.where(alive, q, 0).sum(-1))


def test_qmix_rises_with_every_seats_value():
    sizes = SimpleNamespace(n_agents=SEATS, state_dim=STATE)
    for seed in range(20):
        torch.manual_seed(seed)
        mixer = QMIX.Mixer(sizes, SEATS, 8, 16)
        q, state = 10 * torch.randn(50, 20, SEATS), 3 * torch.randn(50, 20, STATE)
        q.requires_grad_()
        total = mixer(q, state)
        (slope,) = torch.autograd.grad(total.sum(), q)
        assert (slope >= 0).all() and (slope > 0).any()
        for a in range(SEATS):
            higher = q.detach().clone()
            higher[..., a] += 1
            assert (mixer(higher, state) >= total - 1e-4).all()


# ---- the buffer ----
def fill(name, *batches, size=8):
    buffer = SCRIPTS[name].Buffer(story_of(batches[0]), size, CPU, seed=0)
    for batch in batches:
        buffer.add(story_of(batch), batch["lengths"], torch.ones(len(batch["lengths"]), dtype=torch.bool))
    return buffer


def test_the_buffer_is_a_ring():
    first, second, third = make_batch(1), make_batch(2, lengths=(2, 3, 4, 6)), make_batch(3, lengths=(7, 7, 8, 10))
    buffer = IQL.Buffer(story_of(first), 6, CPU, seed=0)
    buffer.add(story_of(first), first["lengths"], torch.tensor([True, True, True, False]))  # one is not valid
    assert buffer.lengths.tolist() == [16, 1, 5, 0, 0, 0] and buffer.cursor == 3
    (episodes, lengths), _ = buffer.sample(2, 3).tolist()
    assert sorted(zip(episodes, lengths)) == [(0, 16), (1, 1), (2, 5)]
    buffer.add(story_of(second), second["lengths"], torch.ones(4, dtype=torch.bool))
    assert buffer.lengths.tolist() == [6, 1, 5, 2, 3, 4] and buffer.cursor == 1
    buffer.add(story_of(third), third["lengths"], torch.tensor([False, True, False, False]))
    assert buffer.lengths.tolist() == [6, 7, 5, 2, 3, 4] and buffer.cursor == 2
    for slot, (batch, m) in enumerate(((second, 3), (third, 1), (first, 2), (second, 0), (second, 1), (second, 2))):
        for key, data in buffer.data.items():
            rows = batch["lengths"][m] + 1
            assert torch.equal(data[:rows, slot], batch[key][:rows, m])
    buffer.add(story_of(third), third["lengths"], torch.zeros(4, dtype=torch.bool))
    assert buffer.cursor == 2
    drawn = buffer.sample(200, 2)[:, 0]
    assert (drawn[:, 0] != drawn[:, 1]).all() and set(drawn.flatten().tolist()) == set(range(6))


@EVERY
def test_a_longer_episode_that_was_there_before_leaves_no_trace(name):
    learners = [make_learner(name) for _ in range(2)]
    learners[1].online["agents"].load_state_dict(learners[0].online["agents"].state_dict())
    if name == "qmix":
        learners[1].online["mixer"].load_state_dict(learners[0].online["mixer"].state_dict())
    old, new = make_batch(1, lengths=(16, 16, 16, 16)), make_batch(2, lengths=(2, 1, 9, 4))
    for learner, buffer in zip(learners, (fill(name, old, new, size=4), fill(name, new, size=4))):
        learner.learn(buffer, 3)
    assert all(map(torch.equal, learners[0].parameters, learners[1].parameters))
    assert learners[0].report() == learners[1].report()


@EVERY
def test_an_update_is_adams_on_the_clipped_gradient_and_moves_the_target(name):
    learner, batch = make_learner(name, learning_rate=0.01, tau=0.25, max_grad_norm=0.1), make_batch(1)
    _, _, *grads = gradients(learner, batch)
    before, target = ([p.detach().clone() for p in which] for which in (learner.parameters, learner.target_parameters))
    learner.update(batch)
    learner.check_finite()  # what is done before a save takes nothing away from what is logged
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    assert norm > 0.1 and learner.report()["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for old, new, grad in zip(before, learner.parameters, grads):
        grad = grad * 0.1 / norm
        torch.testing.assert_close(new, old - 0.01 * grad / (grad.abs() + 1e-5), rtol=1e-3, atol=1e-5)
    for old, new, online in zip(target, learner.target_parameters, learner.parameters):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * online)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("reward", [float("inf"), float("nan"), 3e19])  # 3e19 squared is too large, its slope is not
@EVERY
def test_an_update_that_is_not_finite_is_skipped_and_stops_the_run(name, reward, device):
    learner, batch = make_learner(name, device=device), make_batch(1)
    buffer = fill(name, batch)
    learner.learn(buffer, 3)
    learner.report()
    before = [p.detach().clone() for p in learner.parameters]
    momentum = [value.clone() for state in learner.optimizer.state.values() for value in state.values()]
    buffer.data["reward"][0, 2] = reward
    learner.learn(buffer, 1)
    assert all(map(torch.equal, before, learner.parameters))
    after = [value for state in learner.optimizer.state.values() for value in state.values()]
    assert all(map(torch.equal, momentum, after))
    assert all(torch.isfinite(p).all() for p in learner.target_parameters)
    with pytest.raises(FloatingPointError, match="the loss was not finite"):
        learner.report()


def test_a_gradient_that_is_not_finite_is_named(monkeypatch):
    learner = make_learner("iql")
    monkeypatch.setattr(IQL.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(float("inf")))
    before = [p.detach().clone() for p in learner.parameters]
    learner.update(make_batch(1))
    assert all(map(torch.equal, before, learner.parameters))
    with pytest.raises(FloatingPointError, match="a gradient was not finite"):
        learner.report()


# ---- playing ----
def test_the_story_is_what_was_played():
    env = two_step_game(64)
    agents = IQL.Agents(env, 8, True)
    rollout = IQL.Rollout(env, agents, ("obs", "state", "avail", "alive", "action", "terminated"))
    for _ in range(2):  # the second time over the first
        returns, lengths, _, valid = rollout.play(epsilon=1.0)
        story = rollout.story
        assert lengths.tolist() == [2] * 64 and valid.all()
        assert len({tuple(row) for row in story["action"][:2].flatten(2).transpose(0, 1).flatten(1).tolist()}) == 16
        for m in range(64):
            (first, _), second = story["action"][:2, m].tolist()
            assert story["obs"][:3, m].tolist() == [[[1, 0, 0]] * 2, [[0, 1 - first, first]] * 2, [[0, 0, 0]] * 2]
            earned = [7, 7, 7, 7, 0, 1, 1, 8][4 * first + 2 * second[0] + second[1]]
            assert story["reward"][:, m, 0].tolist() == [0, earned, *[0] * 7] and returns[m].tolist() == [earned] * 2
            assert story["terminated"][:2, m].tolist() == [False, True]


def test_exploration_is_as_frequent_as_asked_and_takes_available_actions():
    env = matrix_game(4000)
    agents = IQL.Agents(env, 8, True)
    rollout = IQL.Rollout(env, agents, ("action",))
    rollout.play(epsilon=0.0)
    greedy = rollout.story["action"][0].clone()
    assert (greedy == greedy[0]).all()
    rollout.play(epsilon=0.5)
    others = (rollout.story["action"][0] != greedy).float().mean()
    assert 0.22 < others < 0.28  # half of the random ones are the greedy ones
    env.info["avail"][..., 1] = False
    rollout.play(epsilon=1.0)
    assert not rollout.story["action"].any()


def test_matches_that_failed_are_left_out_of_an_evaluation():
    env = two_step_game(8)
    rollout = IQL.Rollout(env, IQL.Agents(env, 8, True), ())
    env.info["invalid"][3:] = True
    assert [len(numbers) for numbers in IQL.evaluate(rollout, 7)] == [7, 7, 7]


@EVERY
def test_a_policy_remembers_its_match_and_no_other(name):
    class Counter(Shown):  # its memory is how often it was asked
        def forward(self, obs, last_action, h):
            asked.append((last_action[0, :, 0].tolist(), h[:, 0, 0].tolist()))
            return torch.zeros(1, 2, SEATS, ACTIONS), h + 1

    asked, info = [], {"avail": torch.zeros(2, SEATS, ACTIONS, dtype=torch.bool)}
    info["avail"][..., 2] = True
    env = SimpleNamespace(num_envs=2, actions=torch.zeros(2, SEATS, dtype=torch.long), steps=torch.zeros(2))
    act = SCRIPTS[name].policy_of(Counter(slice(None)), env)
    for steps in ([0, 0], [1, 1], [2, 0], [3, 1]):
        env.steps.copy_(torch.tensor(steps))
        assert (act(torch.zeros(2, SEATS, 1), info) == 2).all()
    assert asked == [([-1, -1], [0, 0]), ([2, 2], [1, 1]), ([2, -1], [2, 0]), ([2, 2], [3, 1])]


def test_wilsons_interval():
    assert IQL.interval(5, 10) == pytest.approx([0.2366, 0.7634], abs=1e-4)
    assert IQL.interval(0, 10) == pytest.approx([0.0, 0.2775], abs=1e-4)


# ---- tiny games ----
def train(name, game, rounds, **options):
    """The mean greedy return after so many rounds of play at random."""
    module = SCRIPTS[name]
    usual = {"hidden_dim": 16, "num_envs": 32, "batch_size": 32, "buffer_size": 256}
    args = arguments(
        module, **{**usual, "learning_rate": 0.005, "tau": 0.05, "td_lambda": 0.0, "gamma": 1.0, **options}
    )
    torch.manual_seed(args.seed)
    env = game(args.num_envs)
    learner = module.Learner(args, env)
    kept = ("obs", "state", "avail", "alive", "action", "terminated")
    rollout = module.Rollout(env, learner.online["agents"], kept)
    buffer = module.Buffer(rollout.story, args.buffer_size, CPU, args.seed)
    for _ in range(rounds):
        _, lengths, _, valid = rollout.play(epsilon=1.0)
        buffer.add(rollout.story, lengths, valid)
        learner.learn(buffer, updates=8)
    learner.report()
    return float(module.evaluate(module.Rollout(env, learner.target["agents"], ()), 32)[0].mean())


def test_independent_learners_find_the_best_of_a_matrix():
    assert train("iql", matrix_game, rounds=30) == 6


def test_qmix_finds_the_best_of_the_two_step_game():
    assert train("qmix", two_step_game, rounds=100) == 8


def test_a_sum_of_values_cannot_show_it():
    """The best sum for the table of 0, 1, 1 and 8 has 6.5 for its best entry, which is below 7."""
    assert train("vdn", two_step_game, rounds=60) == 7

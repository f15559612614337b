"""qtran.py and coma.py: losses against plain loops, what is masked, a game that needs QTRAN, runs."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    QUICK_EPISODES,
    TEAM_SCRIPTS,
    as_played,
    make_learner,
    matrix_game,
    non_monotonic_game,
    read_log,
    stopped,
    train,
    write_run,
)
from test_runs import assert_same_run
from test_td import (
    ACTIONS,
    ROWS,
    SEATS,
    STATE,
    learner_of,
    make_args,
    make_batch,
    make_runner,
    plain_returns,
    with_garbage,
)

import coma
import envs
import qmix
from training.episodes import EpisodeRunner, Inputs, load_player
from training.team import Team

OBS = 2 * ACTIONS
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")
EVERY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def plain_mlp(network, x):
    """A network of linear layers with ReLUs between them, on one input."""
    weights = [value.double().cpu().numpy() for value in network.state_dict().values()]
    for number, (weight, bias) in enumerate(zip(weights[::2], weights[1::2])):
        x = weight @ (np.maximum(x, 0) if number else x) + bias
    return x


def one_hot(number, size):
    return (np.arange(size) == int(number)).astype(float)


# ---- QTRAN's loss ----
def plain_qtran_loss(learner, batch):
    """(td, opt, nopt), one number after the other; only the agents' own networks are those of the script."""
    args, team = learner.args, learner.env.team_reward
    last_action = torch.cat((torch.full_like(batch["action"][:1], -1), batch["action"][:-1]))
    h, seat = learner.agents.init_hidden(*batch["seat"].shape[1:]), batch["seat"][0]
    with torch.no_grad():
        q, online_h = (x.double().numpy() for x in learner.agents(batch["obs"], last_action, h, seat))
        target_h = learner.target_agents(batch["obs"], last_action, h, seat)[1].double().numpy()

    def counts(t, m, a):
        return team or bool(batch["alive"][t, m, a])

    def joint_values(mixer, h, t, m, actions):
        """The joint value of these actions: one number, or one for every action of every seat."""
        state, memory = batch["state"][t, m].double().numpy(), [h[t, m, a] * counts(t, m, a) for a in range(SEATS)]
        if not args.alt:
            inputs = [np.concatenate((memory[a], one_hot(actions[a], ACTIONS))) for a in range(SEATS)]
            encoding = sum(plain_mlp(mixer.encoder, x) for x in inputs)
            return plain_mlp(mixer.joint, np.concatenate((state, encoding)))
        all_h = sum(plain_mlp(mixer.h_encoder, x) for x in memory)
        values = []
        for a in range(SEATS):
            others = sum(plain_mlp(mixer.action_encoder, one_hot(actions[b], ACTIONS)) for b in range(SEATS) if b != a)
            values.append(plain_mlp(mixer.joint, np.concatenate((state, all_h, one_hot(a, SEATS), others))))
        return np.array(values)

    def of_actions(values, actions):
        return [values[a][actions[a]] for a in range(SEATS)] if args.alt else [values[0]]

    def state_value(t, m):
        state = batch["state"][t, m].double().numpy()
        if args.alt:
            inputs = [online_h[t, m, a] * counts(t, m, a) for a in range(SEATS)]
            encoding = sum(plain_mlp(learner.mixer.value_encoder, x) for x in inputs)
            state = np.concatenate((state, encoding))
        return plain_mlp(learner.mixer.value, state)[0]

    def available(t, m, a):
        return [i for i in range(ACTIONS) if batch["avail"][t, m, a, i]] if counts(t, m, a) else [0]

    def own(t, m, a, action):
        return q[t, m, a, action] if counts(t, m, a) else 0.0

    def greedy(t, m):
        return [max(available(t, m, a), key=lambda i, a=a: own(t, m, a, i)) for a in range(SEATS)]

    errors = {"td": [], "opt": [], "nopt": []}
    for m, length in enumerate(batch["lengths"].tolist()):
        reward = 5 / 2.0 * batch["reward"][:length, m].double().numpy()
        reward = reward[:, 0] if team else reward.sum(1)
        following = []
        for t in range(1, length + 1):
            values = joint_values(learner.target_mixer, target_h, t, m, greedy(t, m))
            following.append(of_actions(values, greedy(t, m)))
        ended = bool(batch["terminated"][length - 1, m])
        targets = [plain_returns(reward, column, ended, args.gamma, args.td_lambda) for column in zip(*following)]
        for t in range(length):
            taken = [int(batch["action"][t, m, a]) if counts(t, m, a) else 0 for a in range(SEATS)]
            values = joint_values(learner.mixer, online_h, t, m, taken)
            errors["td"] += [one - target[t] for one, target in zip(of_actions(values, taken), targets)]
            best, v = greedy(t, m), state_value(t, m)
            sum_best = sum(own(t, m, a, best[a]) for a in range(SEATS))
            joint_best = of_actions(joint_values(learner.mixer, online_h, t, m, best), best)
            errors["opt"] += [sum_best - one + v for one in joint_best]
            sum_taken = sum(own(t, m, a, taken[a]) for a in range(SEATS))
            if not args.alt:
                errors["nopt"].append(min(0.0, sum_taken - values[0] + v))
                continue
            for a in range(SEATS):
                others = sum_taken - own(t, m, a, taken[a])
                gaps = [own(t, m, a, i) + others - values[a, i] + v for i in available(t, m, a)]
                errors["nopt"].append(min(gaps))
    return {name: np.mean(np.square(numbers)) for name, numbers in errors.items()}


@pytest.mark.parametrize(("td_lambda", "layers"), [(0.0, 2), (0.7, 3)])
@pytest.mark.parametrize("team_reward", [True, False])
@pytest.mark.parametrize("alt", [False, True])
def test_losses_of_qtran_equal_plain_loops(alt, team_reward, td_lambda, layers):
    options = {"alt": alt, "td_lambda": td_lambda, "joint_layers": layers, "joint_dim": 6, "gamma": 0.9}
    learner = learner_of("qtran", team_reward, opt_loss=0.5, **options)
    assert learner.args.nopt_min_loss == (1.0 if alt else 0.1)
    for network in learner.networks().values():
        for weights in network.parameters():
            torch.nn.init.normal_(weights, std=0.4)
    batch = make_batch(2, team_reward, survival=0.8)
    loss, logs = learner.loss(batch)
    plain = plain_qtran_loss(learner, batch)
    for name, value in plain.items():
        assert logs[f"losses/{name}_loss"].item() == pytest.approx(value, rel=1e-4)
    weighted = plain["td"] + 0.5 * plain["opt"] + learner.args.nopt_min_loss * plain["nopt"]
    assert loss.item() == pytest.approx(weighted, rel=1e-4) and all(value > 1e-3 for value in plain.values())


@pytest.mark.parametrize("alt", [False, True])
def test_what_each_loss_of_qtran_trains(alt):
    """The TD loss trains joint value and agents, the latter through their hidden states; the others not the former."""
    trained = {}
    for name, weights in (("td", (0.0, 0.0)), ("others", (1.0, 1.0))):
        learner = learner_of("qtran", alt=alt, opt_loss=weights[0], nopt_min_loss=weights[1])
        loss, logs = learner.loss(make_batch(2))
        (loss if name == "td" else loss - logs["losses/td_loss"]).backward()
        networks = {"agents": learner.agents.rnn, "output": learner.agents.fc2, "joint": learner.mixer.joint}
        networks |= {"value": learner.mixer.value}
        trained[name] = {key for key, network in networks.items() if is_trained(network)}
    assert trained == {"td": {"agents", "joint"}, "others": {"agents", "output", "value"}}


def is_trained(network):
    return any(p.grad is not None and p.grad.abs().sum() > 1e-12 for p in network.parameters())


@pytest.mark.parametrize("number", [float("nan"), 7.0])
def test_rows_behind_the_end_are_masked_in_qtran_alt(number):
    """test_td.py has the same of QTRAN-base."""
    learner, batch = learner_of("qtran", alt=True), make_batch(1)
    losses = [learner.loss(values)[0].item() for values in (batch, with_garbage(batch, number))]
    assert losses[0] == losses[1] > 0


# ---- a game that only QTRAN can represent ----
@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), [("qtran", 8), ("vdn", 0), ("qmix", 0)])
def test_qtran_finds_the_best_of_a_game_that_is_not_monotonic(name, expected):
    """Seen alone, the action that is part of the best costs most: sums and monotonic mixtures learn to avoid it."""
    module, env = TEAM_SCRIPTS[name], non_monotonic_game(128)
    sizes = {"hidden_dim": 16, "num_envs": 128, "batch_size": 64, "buffer_size": 256}
    sizes |= {"nopt_min_loss": 1.0} if name == "qtran" else {}
    args = make_args(module, **sizes, learning_rate=0.01, tau=0.05, td_lambda=0.0, gamma=1.0)
    torch.manual_seed(args.seed)
    learner = make_learner(name, env, args)
    runner = make_runner(env, learner.agents, module.FIELDS)
    buffer = module.ReplayBuffer(args, runner.episodes, env.device)
    for _ in range(2):  # all joint actions, about equally often
        buffer.add(runner.play(epsilon=1.0))
    learner.learn(buffer, updates=600)
    assert float(make_runner(env, learner.target_agents).evaluate(32)[0].mean()) == expected


# ---- one-layer hypernetworks of QMIX ----
def test_a_hypernetwork_of_one_layer():
    env = SimpleNamespace(state_dim=STATE, device=torch.device("cpu"))
    mixer = qmix.Mixer(qmix.Args(mixing_dim=3, hypernet_dim=5, hypernet_layers=1), env, SEATS)
    assert {key.split(".")[0] for key in mixer.state_dict()} == {"fc1", "b2"}
    q, state = torch.randn(2, 1, SEATS), torch.randn(2, 1, STATE)
    w1, w2, b2, b1 = mixer.fc1(state).split((9, 3, 5, 3), -1)
    hidden = torch.einsum("tma,tmad->tmd", q, w1.abs().view(2, 1, SEATS, 3)) + b1
    expected = (torch.nn.functional.elu(hidden) * w2.abs()).sum(-1) + mixer.b2(b2.relu()).squeeze(-1)
    torch.testing.assert_close(mixer(q, state), expected)


# ---- COMA's losses ----
def coma_learner(team_reward=True, device="cpu", seats=SEATS, **options):
    env = SimpleNamespace(
        n_agents=SEATS, n_actions=ACTIONS, obs_dim=OBS, state_dim=STATE, episode_limit=ROWS - 1, return_scale=2.0,
        team_reward=team_reward, leaving_ends=not team_reward, device=torch.device(device),
    )  # fmt: skip
    options = {**QUICK_EPISODES, "hidden_dim": 8, "critic_dim": 6, "cuda": device == "cuda", **options}
    args = coma.Args(**options)
    coma.check_args(args)
    learner = coma.Learner(args, env, seats)
    with torch.no_grad():
        for network in learner.networks().values():
            for weights in network.parameters():
                torch.nn.init.normal_(weights, std=0.4)
    return learner


def make_round(seed=0, team_reward=True, seats=range(SEATS), device="cpu"):
    """Episodes as a runner records them; with team-mates only some seats are the learner's."""
    batch = make_batch(seed, team_reward, survival=0.85)
    batch["action"] = greedy_where(batch["avail"], batch["action"])
    batch |= {"all_action": batch["action"], "all_alive": batch["alive"]}
    seats = torch.tensor(list(seats))
    for name in ("obs", "avail", "alive", "action", "reward", "seat"):
        batch[name] = batch[name][:, :, seats]
    lengths = batch.pop("lengths").to(device)
    return {name: values.to(device).contiguous() for name, values in batch.items()}, lengths


def greedy_where(avail, action):
    """The action, or where it is not available the first one that is."""
    return torch.where(avail.gather(-1, action.unsqueeze(-1)).squeeze(-1), action, avail.long().argmax(-1))


def learn(learner, episodes, lengths, epsilon=0.2, valid=None):
    learner.learn(as_played(episodes, lengths, valid), epsilon)


def plain_policy(logits, avail, epsilon, mask_before_softmax):
    chances = [np.exp(x - logits.max()) if ok or not mask_before_softmax else 0.0 for x, ok in zip(logits, avail)]
    chances = np.array(chances) / sum(chances)
    uniform = np.array(avail, float) / sum(avail) if mask_before_softmax else np.full(len(avail), 1 / len(avail))
    mixed = np.where(avail, (1 - epsilon) * chances + epsilon * uniform, 0.0)
    return mixed / mixed.sum()


def plain_critic(critic, episodes, actions, t, m, a):
    """The values of a seat's actions, from one long vector of inputs."""
    number = int(episodes["seat"][0, m, a])
    joint = [one_hot(actions[t, m, b], ACTIONS) * (b != number) for b in range(SEATS)]
    last = [one_hot(actions[t - 1, m, b] if t else -1, ACTIONS) for b in range(SEATS)]
    obs = episodes["obs"][t, m, a].double().numpy() * bool(episodes["alive"][t, m, a])
    state = episodes["state"][t, m].double().numpy()
    return plain_mlp(critic, np.concatenate((state, obs, *joint, *last, one_hot(number, SEATS))))


def plain_actions(learner, episodes, lengths):
    """Everybody's actions; where an episode ends, the most probable of a learner and the last one of the others."""
    actions = torch.where(episodes["all_alive"], episodes["all_action"], 0)
    logits = logits_of(learner, episodes)
    for m, length in enumerate(lengths.tolist()):
        for b in range(SEATS):
            actions[length, m, b] = episodes["all_action"][length - 1, m, b] * episodes["all_alive"][length, m, b]
        for a, b in enumerate(episodes["seat"][0, m].tolist()):
            best = logits[length, m, a].masked_fill(~episodes["avail"][length, m, a], -1e9).argmax()
            actions[length, m, b] = best * episodes["all_alive"][length, m, b]
    return actions


def logits_of(learner, episodes):
    last_action = torch.cat((torch.full_like(episodes["action"][:1], -1), episodes["action"][:-1]))
    seat = episodes["seat"][0]
    with torch.no_grad():
        return learner.agents(episodes["obs"], last_action, learner.agents.init_hidden(*seat.shape), seat)[0]


@pytest.fixture
def greedy_draws(monkeypatch):
    monkeypatch.setattr(coma, "draw", lambda log_probs: log_probs.argmax(-1))


@pytest.mark.parametrize("mask_first", [True, False])
@pytest.mark.parametrize(
    ("team_reward", "seats"), [(True, (0, 1, 2)), (False, (0, 1, 2)), (True, (1,)), (False, (2, 0))]
)
def test_losses_of_coma_equal_plain_loops(team_reward, seats, mask_first, greedy_draws):
    learner = coma_learner(team_reward, seats=len(seats), mask_before_softmax=mask_first, learning_rate=1e-30,
                           critic_learning_rate=1e-30, gamma=0.9, td_lambda=0.6, tau=0.0)  # fmt: skip
    episodes, lengths = make_round(3, team_reward, seats)
    learn(learner, episodes, lengths, epsilon=0.3)
    logs = learner.metrics.pop()
    actions, logits = plain_actions(learner, episodes, lengths), logits_of(learner, episodes).double().numpy()
    critic_errors, gains, entropies = {}, [], []
    for m, length in enumerate(lengths.tolist()):
        reward = 5 / 2.0 * episodes["reward"][:length, m].double().numpy()
        reward = reward[:, 0] if team_reward else reward.sum(1)
        for a, number in enumerate(seats):
            target_q = [plain_critic(learner.target_critic, episodes, actions, t, m, a) for t in range(1, length + 1)]
            following = [q[actions[t + 1, m, number]] for t, q in enumerate(target_q)]
            ended = bool(episodes["terminated"][length - 1, m])
            targets = plain_returns(reward, following, ended, 0.9, 0.6)
            for t in range(length):
                q = plain_critic(learner.critic, episodes, actions, t, m, a)
                critic_errors.setdefault(t, []).append(q[actions[t, m, number]] - targets[t])
                if episodes["alive"][t, m, a]:
                    chances = plain_policy(logits[t, m, a], episodes["avail"][t, m, a].tolist(), 0.3, mask_first)
                    taken = int(episodes["action"][t, m, a])
                    gains.append((q[taken] - chances @ q) * np.log(chances[taken]))
                    entropies.append(-sum(chance * np.log(chance) for chance in chances if chance))
    td_losses = [np.mean(np.square(errors)) for errors in critic_errors.values()]
    assert logs["losses/td_loss"] == pytest.approx(np.mean(td_losses), rel=1e-4)  # a step of the critic for each time
    assert logs["losses/policy_loss"] == pytest.approx(-np.mean(gains), rel=1e-4)
    assert logs["losses/entropy"] == pytest.approx(np.mean(entropies), rel=1e-4)
    assert len(td_losses) == 16 and learner.updates == 1


def test_the_critic_learns_backwards_and_the_policy_from_values_before_each_step(greedy_draws):
    """By hand: one step of Adam for each time from the last to the first, on a target that stays."""
    learner, (episodes, lengths) = coma_learner(critic_learning_rate=0.01, tau=0.25), make_round(1)
    other = coma_learner(critic_learning_rate=0.01, tau=0.25)
    for network, values in learner.networks().items():
        other.networks()[network].load_state_dict(values.state_dict())
    learn(learner, episodes, lengths)
    batch = episodes | {"lengths": lengths}
    other.lengths.copy_(lengths)
    other.epsilon.fill_(0.2)
    other.estimate(batch)
    torch.testing.assert_close(other.target, learner.target)
    optimizer = torch.optim.Adam(other.critic.parameters(), 0.01, eps=1e-5)
    for t in reversed(range(16)):
        other.time.fill_(t)
        loss, q, _ = other.critic_loss(batch)
        torch.testing.assert_close(q[0, lengths > t], learner.q[t, lengths > t], rtol=1e-4, atol=1e-5)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(other.critic.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():
            for target, online in zip(other.target_critic.parameters(), other.critic.parameters()):
                target.lerp_(online, 0.25)
    for name in ("critic", "target_critic"):
        for one, same in zip(learner.networks()[name].parameters(), other.networks()[name].parameters()):
            torch.testing.assert_close(one, same, rtol=1e-3, atol=1e-4)


def weights_after(team_reward, episodes, lengths, valid=None, seats=SEATS):
    torch.manual_seed(0)
    learner = coma_learner(team_reward, seats=seats)
    for _ in range(2):
        learn(learner, episodes, lengths, valid=valid)
    learner.metrics.check_finite()
    return [p.detach().clone() for network in learner.networks().values() for p in network.parameters()]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 7.0])
@pytest.mark.parametrize("team_reward", [True, False])
def test_coma_learns_nothing_from_rows_behind_an_end(team_reward, number):
    episodes, lengths = make_round(1, team_reward)
    garbage = with_garbage(episodes | {"lengths": lengths}, number)
    for m, length in enumerate(lengths.tolist()):
        garbage["all_action"][length:, m] = ACTIONS - 1
        garbage["all_alive"][length + 1 :, m] = ~garbage["all_alive"][length + 1 :, m]
    del garbage["lengths"]
    one, other = (weights_after(team_reward, values, lengths) for values in (episodes, garbage))
    assert all(map(torch.equal, one, other))


def test_coma_learns_nothing_from_who_has_left_or_is_dead():
    """But for the critic's value, since the team goes on; what is recorded of who has left changes nothing."""
    episodes, lengths = make_round(5, team_reward=False)
    other = {name: values.clone() for name, values in episodes.items()}
    gone = ~other["alive"]
    other["obs"][gone] = 1e3
    other["avail"][gone] = ~other["avail"][gone]
    other["action"][gone] = other["all_action"][gone] = 1
    assert gone[1:].any()
    for one, same in zip(weights_after(False, episodes, lengths), weights_after(False, other, lengths)):
        torch.testing.assert_close(one, same, rtol=0, atol=1e-6)


def test_coma_learns_nothing_from_a_match_that_is_not_valid():
    episodes, lengths = make_round(1)
    valid = torch.tensor([True, True, False, True])
    other = {name: values.clone() for name, values in episodes.items()}
    for name in ("obs", "state", "reward"):
        other[name][:, 2] = float("nan")
    one, same = (weights_after(True, values, lengths, valid) for values in (episodes, other))
    assert all(map(torch.equal, one, same))
    assert not all(map(torch.equal, one, weights_after(True, episodes, lengths)))


@EVERY_DEVICE
def test_updates_of_coma_that_are_not_finite_are_skipped_and_reported(device):
    learner, (episodes, lengths) = coma_learner(device=device), make_round(1, device=device)
    for _ in range(3):  # on the GPU: as they are, then as graphs
        learn(learner, episodes, lengths)
    learner.metrics.pop()
    weights = [p for group in learner.optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in weights]
    episodes["reward"][15, 0] = float("inf")  # the last step of the longest match: all targets of this match are off
    learn(learner, episodes, lengths)
    assert all(map(torch.equal, before, weights))
    with pytest.raises(FloatingPointError, match="losses/td_loss was not finite"):
        learner.metrics.pop()


@needs_cuda
def test_captured_updates_of_coma_are_those_of_plain_ones(greedy_draws):
    (episodes, lengths), weights = make_round(1, device="cuda"), []
    for captured in (True, False):
        torch.manual_seed(0)
        learner = coma_learner(device="cuda")
        for graphed in (learner.graphed_estimate, learner.graphed_critic_step, learner.graphed_update):
            graphed.capture = captured
        for epsilon in (0.5, 0.4, 0.3, 0.2):
            learn(learner, episodes, lengths, epsilon)
        assert bool(learner.graphed_critic_step.graphs) == bool(learner.graphed_update.graphs) == captured
        weights.append([p for network in learner.networks().values() for p in network.parameters()])
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)


# ---- COMA's policy ----
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("mask_first", [True, False])
def test_the_policy_of_coma(mask_first, epsilon):
    logits, avail = 4 * torch.randn(200, ACTIONS), torch.rand(200, ACTIONS) < 0.5
    avail[:, 2] |= ~avail.any(1)
    logits[0], avail[0] = torch.tensor([300.0, 0, 0, 0]), torch.tensor([False, True, False, True])
    logits.requires_grad_()
    log_probs = coma_learner(mask_before_softmax=mask_first).policy(logits, avail, torch.tensor(epsilon))
    for row in range(200):
        if row or mask_first or epsilon:  # else all that is available has probability 0 in plain numbers
            plain = plain_policy(logits[row].detach().double().numpy(), avail[row].tolist(), epsilon, mask_first)
            np.testing.assert_allclose(log_probs[row].detach().exp(), plain, atol=1e-6)
    (gradient,) = torch.autograd.grad(log_probs[avail].sum(), logits)
    assert gradient.isfinite().all() and log_probs.exp().sum(1).allclose(torch.ones(200), atol=1e-5)


def test_a_player_of_coma_draws_available_actions_with_the_probabilities_of_the_policy():
    learner, count = coma_learner(), 20000
    seats = torch.arange(SEATS).repeat(count, 1)
    avail = torch.tensor([True, False, True, True]).expand(count, SEATS, -1)
    obs, none = torch.randn(1, SEATS, OBS).expand(count, -1, -1), torch.full((count, SEATS), -1)
    inputs, epsilon = Inputs(obs, avail, none, none, seats), torch.tensor(0.3)
    with torch.no_grad():
        action = coma.Player(learner.agents, seats, learner.policy).act(inputs, epsilon)
        logits, _ = learner.agents(obs[None], none[None], learner.agents.init_hidden(count, SEATS), seats)
        greedy = coma.Player(learner.agents, seats).act(inputs, epsilon)
    for a in range(SEATS):
        plain = plain_policy(logits[0, 0, a].double().numpy(), [True, False, True, True], 0.3, True)
        shares = torch.bincount(action[:, a], minlength=ACTIONS) / count
        np.testing.assert_allclose(shares, plain, atol=0.015)
        assert (greedy[:, a] == int(plain.argmax())).all() and shares[1] == 0


@pytest.mark.parametrize("noise", [0.0, 0.5, 1 - 2**-24])
def test_only_available_actions_are_drawn_whatever_the_random_numbers(noise, monkeypatch):
    avail = torch.eye(ACTIONS) > 0
    learner = coma_learner(mask_before_softmax=False)
    log_probs = learner.policy(9 * torch.randn(ACTIONS, ACTIONS), avail, torch.tensor(0.5))
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, noise))
    assert torch.equal(coma.draw(log_probs), torch.arange(ACTIONS))


# ---- learning and runs ----
def test_coma_finds_the_best_of_a_matrix_game():
    env, options = matrix_game(32), {"num_envs": 32, "hidden_dim": 16, "critic_dim": 16, "critic_learning_rate": 0.02}
    args = coma.Args(**{**QUICK_EPISODES, **options, "learning_rate": 0.02, "tau": 0.1})
    learner, team = make_learner("coma", env, args), Team(env, "self")
    runner = EpisodeRunner(env, team, coma.Player(learner.agents, team.learner_seats, learner.policy), coma.FIELDS)
    for _ in range(60):
        episodes = runner.play(epsilon=0.2)
        learner.learn(episodes, 0.2)
    learner.metrics.check_finite()
    greedy = EpisodeRunner(env, team, coma.Player(learner.agents, team.learner_seats))
    assert float(greedy.evaluate(32)[0].mean()) == 6


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("coma", {}),
        pytest.param("coma", {"team": "2nearest1learner", "matches_per_partner": 2}, marks=pytest.mark.slow),
        pytest.param("coma", {"mask_before_softmax": False, "share_parameters": False}, marks=pytest.mark.slow),
        pytest.param("coma", {"env_id": "stag_hunt_4x4"}, marks=pytest.mark.slow),
        pytest.param("qtran", {"alt": True, "env_id": "stag_hunt_4x4"}, marks=pytest.mark.slow),
        pytest.param("qmix", {"hypernet_layers": 1}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_run_that_was_stopped_equals_one_that_was_not(name, options, tmp_path):
    options = {"total_timesteps": 400, **options}
    whole = train(name, tmp_path / "whole", **options)["run"].folder
    folder = stopped(name, tmp_path / "parts", **options)
    train(name, tmp_path / "parts", resume=folder, **options)
    assert_same_run(whole, folder)
    results = json.loads((folder / "results.json").read_text())
    assert results["complete"] and results["updates"] > 0
    loss = "losses/policy_loss" if name == "coma" else "losses/td_loss"
    assert {"charts/epsilon", loss, "eval/win_rate"} <= read_log(folder).keys()


@needs_cuda
@pytest.mark.parametrize(("name", "options"), [("coma", {}), ("qtran", {}), ("qtran", {"alt": True})])
def test_a_run_on_the_gpu_is_captured_and_repeats_exactly(name, options, tmp_path):
    options |= {"cuda": True, "total_timesteps": 1500, "final_eval_episodes": 16}
    one, other = (train(name, tmp_path / folder, **options)["run"].folder for folder in ("a", "b"))
    found, again = (json.loads((folder / "results.json").read_text()) for folder in (one, other))
    assert found["complete"] and found["args"]["cuda"] and found["final"] == again["final"]


def test_a_run_of_coma_plays_as_a_team_mate_as_it_plays_itself(tmp_path):
    env = envs.make("3m", num_envs=6)
    run = write_run(tmp_path / "coma", "coma", env)
    team, seats = Team(env, "2coma1learner", pool=[str(run)]), torch.arange(3).repeat(6, 1)
    own = EpisodeRunner(env, Team(env, "self"), load_player(run, env, seats))
    env.reset()
    last_action = torch.full((6, 3), -1)
    for _ in range(20):
        action = own.policy()
        assert torch.equal(team.joint_action(team.select(action), last_action), action)
        last_action = action.clone()
        env.step(action)


def test_sizes_that_are_refused():
    with pytest.raises(SystemExit, match="--joint-layers is above 0, not 0"):
        learner_of("qtran", joint_layers=0)
    with pytest.raises(SystemExit, match="--critic-dim is at most 8192, not 1000000"):
        coma_learner(critic_dim=10**6)
    with pytest.raises(SystemExit, match="--nopt-min-loss is from 0 up, not -1"):
        learner_of("qtran", nopt_min_loss=-1.0)

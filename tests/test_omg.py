"""omg_iql.py: its losses against plain loops, what is masked, who remembers what, whole runs, and that it works."""

import contextlib
import importlib.util
import io
import json
import runpy
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch
from scripts import scramble
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributions import Normal, kl_divergence

import envs
from envs import play
from envs.team import sizes_of

ROOT = Path(__file__).parent.parent
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def omg():
    spec = importlib.util.spec_from_file_location("omg_iql", ROOT / "omg_iql.py")
    sys.modules["omg_iql"] = module = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A few matches at a time are played faster by one thread than by several that wait for each other."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


@pytest.fixture
def means(omg, monkeypatch):
    """Codes without noise: a sample is the mean."""
    monkeypatch.setattr(omg, "sample", lambda mean, log_variance: mean)


def sizes(**changes):
    """What a learner wants to know of an environment."""
    usual = {
        "n_agents": 3, "n_actions": 4, "obs_dim": 5, "state_dim": 7, "episode_limit": 8, "team_reward": True,
        "ego_first": False, "device": torch.device("cpu"),
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **changes})


def make_learner(omg, env, seed=0, **changes):
    torch.manual_seed(seed)
    usual = {"hidden_dim": 6, "latent_dim": 4, "horizon": 3, "td_lambda": 0.6, "gamma": 0.9, "kl_weight": 0.01}
    args = omg.Args(**{**usual, **changes})
    omg.check(args)
    return scramble(omg.Learner(args, env), 0.5)


def episodes(env, lengths, seats, deaths=(), latent=4, seed=1):
    """Episodes to learn from, at random; `seats` (matches, own seats); `deaths`: (match, agent, step from which on)."""
    generator = torch.Generator().manual_seed(seed)
    matches, rows, seats = len(lengths), max(lengths) + 2, torch.tensor(seats)

    def number(*shape):
        return torch.randn((rows, matches, *shape), generator=generator)

    own = seats.shape[1]
    batch = {
        "all_obs": number(env.n_agents, env.obs_dim), "state": number(env.state_dim), "reward": number(own),
        "avail": number(own, env.n_actions) > 0, "all_alive": torch.ones(rows, matches, env.n_agents).bool(),
        "all_action": torch.randint(env.n_actions, (rows, matches, env.n_agents), generator=generator),
        "terminated": torch.zeros(rows, matches, dtype=torch.bool), "mean": number(own, latent),
        "log_variance": number(own, latent), "seat": seats.unsqueeze(0), "lengths": torch.tensor(lengths),
    }  # fmt: skip
    batch["avail"][..., 0] = True
    for match, length in enumerate(lengths):
        batch["terminated"][length - 1 :, match] = match % 2 == 0  # the others run into the time limit
    for match, agent, step in deaths:
        batch["all_alive"][step:, match, agent] = False
    for name in ("action", "alive", "obs"):
        batch[name] = torch.stack([batch[f"all_{name}"][:, m, seats[m]] for m in range(matches)], 1)
    return batch


DEATHS = ((0, 0, 3), (1, 2, 2), (2, 1, 1))
LENGTHS, SEATS = (5, 8, 3, 6), ((0, 2), (1, 2), (0, 1), (2, 0))


# ---- the plain version: one match, one seat and one step at a time ----
def linear(layer, x):
    return layer.weight.detach().double().numpy() @ x + layer.bias.detach().double().numpy()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(layer, x, h):
    w, u, b, c = (
        getattr(layer, f"{n}_l0").detach().double().numpy() for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    (r, z, n), (rh, zh, nh) = np.split(w @ x + b, 3), np.split(u @ h + c, 3)
    z, n = sigmoid(z + zh), np.tanh(n + sigmoid(r + rh) * nh)
    return (1 - z) * n + z * h


def one_hot(index, size):
    return np.eye(size)[index] if index >= 0 else np.zeros(size)


def q_step(agents, env, obs, last, seat, subgoal, h):
    x = np.concatenate((obs, one_hot(last, env.n_actions), one_hot(seat, env.n_agents), subgoal))
    h = gru(agents.gru, np.maximum(linear(agents.into, x), 0), h)
    q = linear(agents.out, h)
    return q if agents.value is None else linear(agents.value, h) + q - q.mean(), h


def gaussian(code, x):
    return linear(code.mean, x), np.clip(linear(code.log_variance, x), -10, 10)


def encode(vae, x):
    for layer in (vae.encoder[0], vae.encoder[2]):
        x = linear(layer, x)
        x = np.where(x > 0, x, 0.01 * x)
    return gaussian(vae.code, x)


def kl(mean, log_variance, other_mean, other_log_variance):
    ratio = np.exp(log_variance - other_log_variance)
    return 0.5 * np.sum(ratio - 1 - np.log(ratio) + (mean - other_mean) ** 2 / np.exp(other_log_variance))


def plain(batch):
    return {
        name: values.double().numpy() if values.is_floating_point() else values.numpy()
        for name, values in batch.items()
    }


def td_errors(learner, data, m, place, inferred, same=False):
    """Of one match and seat; `same`: the bootstrap keeps what was inferred at the step."""
    args, env, networks = learner.args, learner.env, (learner.online["agents"], learner.target["agents"])
    seat, length = int(data["seat"][0, m, place]), len(inferred) - 1
    obs, avail, acted, alive = (data[name][:, m, place] for name in ("obs", "avail", "action", "alive"))
    states, unrolled = [np.zeros(args.hidden_dim)] * 2, []
    for t in range(length + 1):
        step = (obs[t], acted[t - 1] if t else -1, seat, inferred[t])
        values, states = zip(*(q_step(network, env, *step, h) for network, h in zip(networks, states)))
        unrolled.append((values, states))
    following, errors = 0.0, []
    for t in reversed(range(length)):
        q, q_target = unrolled[t + 1][0]
        if same:
            step = (obs[t + 1], acted[t], seat, inferred[t])
            q, q_target = (q_step(network, env, *step, h)[0] for network, h in zip(networks, unrolled[t][1]))
        bootstrap = q_target[np.argmax(np.where(avail[t + 1], q, -np.inf))]
        if t == length - 1:
            following = bootstrap
        goal = data["reward"][t, m, place]
        if not data["terminated"][t, m] and (env.team_reward or alive[t + 1]):
            goal += args.gamma * ((1 - args.td_lambda) * bootstrap + args.td_lambda * following)
        following = goal
        if env.team_reward or alive[t]:
            errors.append(unrolled[t][0][0][acted[t]] - goal)
    return errors


def order_of(env, seat):
    """The learner's seat, then the others as its observation has them."""
    if env.ego_first:
        return [(seat + a) % env.n_agents for a in range(env.n_agents)]
    return [seat, *(a for a in range(env.n_agents) if a != seat)]


def plain_losses(learner, batch):
    """(TD loss, model's loss) where samples are means, and the subgoal is not mixed."""
    args, env, model = learner.args, learner.env, learner.model
    online, inference, data = learner.online["agents"], model["inference"], plain(batch)
    errors, model_errors = [], []
    for m, length in enumerate(batch["lengths"].tolist()):
        for place, seat in enumerate(batch["seat"][0, m].tolist()):
            alive = [bool(data["alive"][t, m, place]) for t in range(length + 1)]
            last_there = sum(alive) - 1
            order = order_of(env, seat)
            obs, avail, acted = data["obs"][:, m, place], data["avail"][:, m, place], data["all_action"][:, m]
            view = obs if args.subgoal_input == "obs" else data["state"][:, m]

            memory, inferred = np.zeros(inference.memory), []
            for t in range(length + 1):
                done = [one_hot(acted[t - 1, a] if t else -1, env.n_actions) for a in order]
                before = obs[t - 1] if t else np.zeros(env.obs_dim)
                memory = gru(inference.past, np.concatenate((before, *done)), memory)
                now = np.maximum(linear(inference.now, obs[t]), 0)
                x = np.concatenate((now, memory))
                code = gaussian(inference.code, np.maximum(linear(inference.encoder, x), 0))
                x = np.maximum(linear(inference.decoder, np.concatenate((code[0], memory))), 0)
                wanted = now if args.reconstruct == "features" else obs[t]
                inferred.append((*code, np.mean((linear(inference.out, x) - wanted) ** 2)))

            lasts = [-1, *acted[:, seat]]
            h, selected = np.zeros(args.hidden_dim), []
            for t in range(length):
                values = []
                for k in range(1, args.horizon + 1):
                    candidate = encode(model["vae"], view[min(t + k, last_there)])
                    q, _ = q_step(online, env, obs[t], lasts[t], seat, candidate[0], h)
                    values.append((np.mean(q[avail[t]]), candidate))
                best = max if args.subgoal_mode == "optimistic" else min
                selected.append(best(values, key=lambda value: value[0])[1])
                _, h = q_step(online, env, obs[t], lasts[t], seat, inferred[t][0], h)
                if alive[t]:
                    mean, log_variance, error = inferred[t]
                    goal = selected[t]
                    if args.mix == "kl-target":  # the chance of the selected one is 0
                        goal = data["mean"][t, m, place], data["log_variance"][t, m, place]
                    model_errors.append(error + args.kl_weight * kl(mean, log_variance, *goal))

            subgoals = [selected[t][0] if args.q_subgoal == "selected" else inferred[t][0] for t in range(length)]
            subgoals.append(inferred[length][0])
            errors += td_errors(learner, data, m, place, subgoals, args.bootstrap_subgoal == "same")
    return np.mean(np.square(errors)), np.mean(model_errors)


VARIANTS = (
    {}, {"subgoal_mode": "conservative"}, {"q_subgoal": "inferred"}, {"q_subgoal": "selected"},
    {"bootstrap_subgoal": "next", "q_subgoal": "selected"}, {"bootstrap_subgoal": "next"}, {"subgoal_input": "state"},
    {"mix": "kl-target"}, {"td_lambda": 0.0},
    {"horizon": 12}, {"dueling": True}, {"reconstruct": "features"},
)  # fmt: skip


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("world", [{}, {"team_reward": False, "ego_first": True}], ids=["battle", "hunt"])
def test_the_losses_are_those_of_a_plain_loop(omg, means, changes, world):
    env = sizes(**world)
    learner, batch = make_learner(omg, env, **changes), episodes(env, LENGTHS, SEATS, DEATHS)
    loss, model_loss, _ = learner.loss(batch)
    td, model = plain_losses(learner, batch)
    assert loss.item() == pytest.approx(td, rel=1e-4) and model_loss.item() == pytest.approx(model, rel=1e-4)


def test_the_plain_loop_tells_variants_apart(omg, means):
    env = sizes()
    batch = episodes(env, LENGTHS, SEATS, DEATHS)
    losses = [plain_losses(make_learner(omg, env, **changes), batch) for changes in VARIANTS]
    assert len({round(td, 4) for td, _ in losses}) >= 6 and len({round(model, 4) for _, model in losses}) >= 5


def test_learner_seat_by_seat(omg, means):
    """One match, the learner in each seat: the order of the others' actions and the seat's own rows."""
    for ego_first in (False, True):
        env = sizes(n_agents=4, ego_first=ego_first)
        learner = make_learner(omg, env)
        for seat in range(4):
            batch = episodes(env, (6,), ((seat,),), [(0, seat, 4)])
            td, model = plain_losses(learner, batch)
            loss, model_loss, _ = learner.loss(batch)
            assert loss.item() == pytest.approx(td, rel=1e-4) and model_loss.item() == pytest.approx(model, rel=1e-4)


# ---- divergences and the VAE ----
def test_the_divergence_is_from_the_first_to_the_second(omg):
    torch.manual_seed(0)
    mean, log_variance, other_mean, other_log_variance = torch.randn(4, 50)
    ours = omg.divergence(mean, log_variance, other_mean, other_log_variance)
    first, second = (Normal(m, (v / 2).exp()) for m, v in ((mean, log_variance), (other_mean, other_log_variance)))
    torch.testing.assert_close(ours, kl_divergence(first, second))
    assert (ours - kl_divergence(second, first)).abs().max() > 1
    torch.testing.assert_close(omg.divergence(mean, log_variance, mean, log_variance), torch.zeros(50))


def test_a_sample_has_the_mean_and_variance_it_is_given(omg):
    torch.manual_seed(0)
    drawn = omg.sample(torch.full((20_000,), 2.0), torch.full((20_000,), np.log(9.0)))
    assert drawn.mean() == pytest.approx(2, abs=0.1) and drawn.std() == pytest.approx(3, abs=0.1)


class Told:
    """A rollout whose one round is given."""

    def __init__(self, batch):
        self.story = {name: values for name, values in batch.items() if name != "lengths"}
        self.round = None, batch["lengths"], None, torch.ones(len(batch["lengths"]), dtype=torch.bool)

    def play(self, epsilon):
        return self.round


@pytest.mark.parametrize("subgoal_input", ["obs", "state"])
def test_pretraining_measures_what_the_formulas_say(omg, means, subgoal_input):
    env = sizes()
    learner = make_learner(omg, env, subgoal_input=subgoal_input, pretrain_timesteps=1)
    learner.args.pretrain_updates = 0
    batch = episodes(env, LENGTHS, SEATS, DEATHS)
    for name in ("obs", "state"):
        for match, length in enumerate(LENGTHS):
            batch[name][length + 1 :, match] = torch.nan
    errors = omg.pretrain(learner.args, learner, Told(batch))
    recon, divergence, count, vae = 0.0, 0.0, 0, learner.model["vae"]
    for m, length in enumerate(LENGTHS):
        for place in range(len(SEATS[m])):
            for t in range(length + 1):
                if batch["alive"][t, m, place]:
                    x = (batch["obs"][t, m, place] if subgoal_input == "obs" else batch["state"][t, m]).double().numpy()
                    mean, log_variance = encode(vae, x)
                    y = mean
                    for layer in (vae.decoder[0], vae.decoder[2]):
                        y = linear(layer, y)
                        y = np.where(y > 0, y, 0.01 * y)
                    recon += np.mean((linear(vae.out, y) - x) ** 2)
                    divergence += kl(mean, log_variance, np.zeros(4), np.zeros(4))
                    count += 1
    assert errors["states"] == count
    assert errors["recon"] == pytest.approx(recon / count, rel=1e-4)
    assert errors["kl"] == pytest.approx(divergence / count, rel=1e-4)


def test_pretraining_learns_and_freezes(omg):
    env = sizes()
    learner = make_learner(omg, env, pretrain_timesteps=1, pretrain_updates=1, batch_size=4)
    told = Told(episodes(env, LENGTHS, SEATS))
    first = omg.pretrain(learner.args, learner, told)
    learner.args.pretrain_updates = 300
    later = omg.pretrain(learner.args, learner, told)
    assert later["recon"] < 0.5 * first["recon"] and later["inference"] < 0.5 * first["inference"]
    assert not any(weights.requires_grad for weights in learner.model["vae"].parameters())


def test_pretraining_is_measured_on_matches_it_does_not_learn_from(omg, monkeypatch):
    class Rounds(Told):
        def play(self, epsilon):
            self.story["obs"] += 1000
            return self.round

    env, given = sizes(), []
    learner = make_learner(omg, env, pretrain_timesteps=1)
    monkeypatch.setattr(omg, "train_vae", lambda args, vae, states, held_out, writer: given.extend((states, held_out)))
    monkeypatch.setattr(omg, "warm_up", lambda args, learner, stories: None)
    omg.pretrain(learner.args, learner, Rounds(episodes(env, LENGTHS, SEATS)))
    assert given[0].max() < 1500 < given[1].min()


# ---- the selector ----
class Worth(torch.nn.Module):
    """Q of an action is the subgoal's entry of that number: candidates are valued by hand."""

    def forward(self, obs, last_action, h, seat, subgoal):
        return subgoal, h.expand(*obs.shape[:-1], -1)

    def compare(self, obs, last_action, h, seat, subgoals, index):
        return subgoals[index, 0, 0]


def choose(omg, codes, final, avail=None, **changes):
    """Steps ahead chosen, and the states: one match, one seat; codes (states, actions)."""
    learner = make_learner(omg, sizes(n_actions=2), latent_dim=2, **changes)
    learner.online["agents"] = Worth()
    codes = torch.tensor(codes).view(-1, 1, 1, 2)
    steps = len(codes) - 1
    avail = torch.ones(steps, 1, 1, 2, dtype=torch.bool) if avail is None else torch.tensor(avail).view(-1, 1, 1, 2)
    zeros = torch.zeros(steps, 1, 1, 6)
    last = torch.full((steps, 1, 1), -1)
    index, k = learner.select(
        zeros[..., :5], last, zeros, torch.zeros(1, 1).long(), avail, codes, torch.tensor([[final]])
    )
    assert ((index - 1 - torch.arange(steps).view(-1, 1, 1) <= k) & (index <= final)).all()
    return index.flatten().tolist()


def test_the_best_or_worst_of_the_next_states_is_chosen(omg):
    value = [9.0, 1.0, 3.0, 2.0, 8.0, 0.0]
    codes = [[v, v] for v in value]
    assert choose(omg, codes, 5) == [2, 4, 4, 4, 5]  # of (1, 2, 3), (2, 3, 4), (3, 4, 5), (4, 5), (5)
    assert choose(omg, codes, 5, subgoal_mode="conservative") == [1, 3, 5, 5, 5]
    assert choose(omg, codes, 5, horizon=1) == [1, 2, 3, 4, 5]


def test_nothing_is_chosen_past_the_learners_end(omg):
    codes = [[v, v] for v in (9.0, 1.0, 3.0, 2.0, 80.0, 90.0)]
    assert choose(omg, codes, 3)[:3] == [2, 2, 3]
    assert choose(omg, codes, 3, selector="random")[2] == 3
    codes[4] = codes[5] = [float("nan")] * 2
    assert choose(omg, codes, 3)[:3] == [2, 2, 3]


def test_values_are_means_over_available_actions(omg):
    codes = [[0.0, 0.0], [2.0, 2.0], [1.0, 9.0], [3.0, -9.0]]
    first, both = [True, False], [True, True]
    assert choose(omg, codes, 3, [both, both, both])[0] == 2
    assert choose(omg, codes, 3, [first, both, both])[0] == 3
    assert choose(omg, codes, 3, [[False, False], both, both])[0] in (1, 2, 3)


@pytest.mark.parametrize("dueling", [False, True])
def test_candidates_are_compared_as_single_steps_would_be(omg, dueling):
    env = sizes()
    agents = make_learner(omg, env, dueling=dueling).online["agents"]
    steps, candidates, matches, seat = 5, 3, 4, torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
    shape = (steps, matches, 2)
    obs, h, last = torch.randn(*shape, env.obs_dim), torch.randn(*shape, agents.hidden), torch.randint(-1, 2, shape)
    subgoals, index = torch.randn(steps + 1, matches, 2, 4), torch.randint(steps + 1, (steps, candidates, matches, 2))
    together = agents.compare(obs, last, h, seat, subgoals, index)
    for k in range(candidates):
        mine = subgoals.gather(0, index[:, k].unsqueeze(-1).expand(-1, -1, -1, 4))
        torch.testing.assert_close(together[:, k], omg.single(agents, obs, last, h, seat, mine), rtol=1e-5, atol=1e-5)


def test_other_selectors(omg):
    codes = [[v, v] for v in (0.0, 5.0, 1.0, 2.0, 7.0, 3.0)]
    assert choose(omg, codes, 5, selector="next") == [1, 2, 3, 4, 5]
    assert choose(omg, codes, 5, selector="1") == [1, 2, 3, 4, 5]
    assert choose(omg, codes, 5, selector="2") == [2, 3, 4, 5, 5]
    assert choose(omg, codes, 5, selector="7") == [5] * 5
    drawn = [choose(omg, codes, 5, selector="random", seed=seed) for seed in range(60)]
    assert [{chosen[t] for chosen in drawn} for t in range(5)] == [{1, 2, 3}, {2, 3, 4}, {3, 4, 5}, {4, 5}, {5}]


# ---- mixing ----
def subgoals_of(omg, learner, batch):
    """What the Q-network was given: (subgoals of the unroll that learns, inferred ones); it may be one unroll."""
    given = []
    handle = learner.online["agents"].register_forward_pre_hook(lambda _, inputs: given.append(inputs[4].clone()))
    learner.loss(batch)
    handle.remove()
    unrolls = [subgoal for subgoal in given if len(subgoal) > 1]  # the others are single steps
    assert len(unrolls) == 1 + learner.mixing
    return unrolls[-1], unrolls[0]


@pytest.mark.parametrize(
    ("changes", "share"),
    [({}, 0.3), ({"q_subgoal": "inferred"}, 0), ({"q_subgoal": "selected"}, 1), ({"mix": "kl-target"}, 0)],
    ids=str,
)
def test_the_selected_subgoal_comes_at_its_chance(omg, changes, share):
    env = sizes()
    learner = make_learner(omg, env, **changes)
    learner.mix_chance.fill_(0.3)
    batch = episodes(env, [40] * 20, [[0, 1]] * 20)
    used, inferred = subgoals_of(omg, learner, batch)
    other = (used != inferred).any(-1)
    assert (used != inferred).all(-1).eq(other).all()  # a whole subgoal or none of it
    assert not other[40:].any()
    assert other[:40].float().mean().item() == pytest.approx(share, abs=0.04)


def test_updates_without_mixing_are_those_of_a_chance_of_0(omg):
    env = sizes()
    batch, losses = episodes(env, [40] * 20, [[0, 1]] * 20), []
    for chance in (None, 0):
        learner = make_learner(omg, env)
        if chance is not None:
            learner.mix(chance)
        assert learner.mixing == (chance is None)
        torch.manual_seed(1)
        loss, model_loss, _ = learner.loss(batch)
        (loss + model_loss).backward()
        losses.append([loss, model_loss, *(p.grad for p in (*learner.parameters, *learner.model_parameters))])
    assert all(map(torch.equal, *losses))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")
@pytest.mark.parametrize("chance", [0.5, 0.0])
def test_a_second_stream_changes_no_weight_on_cuda(omg, chance):
    env, weights = sizes(device=torch.device("cuda")), []
    batch = {name: values.to(env.device) for name, values in episodes(env, [40] * 20, [[0, 1]] * 20).items()}
    for streams in (1, 2):
        learner = make_learner(omg, env, cuda=True)
        learner.mix(chance)
        assert learner.side is not None
        learner.side = learner.side if streams == 2 else None
        update = omg.Graphed(lambda learner=learner: learner.update(batch), env.device)
        for _ in range(5):  # the first as it is, the others as a graph
            update()
        weights.append([*learner.parameters, *learner.target_parameters, *learner.model_parameters])
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_the_target_of_the_divergence_is_mixed_at_its_chance(omg, monkeypatch):
    env, targets = sizes(), []
    learner = make_learner(omg, env, mix="kl-target")
    divergence = omg.divergence
    monkeypatch.setattr(omg, "divergence", lambda *numbers: targets.append(numbers[2:]) or divergence(*numbers))
    batch = episodes(env, [40] * 20, [[0, 1]] * 20)
    for chance in (0.0, 0.3, 1.0):
        learner.mix_chance.fill_(chance)
        learner.loss(batch)
        steps = len(batch["mean"]) - 1
        real = torch.arange(steps) < 40
        for new, old in zip(targets.pop(), (batch["mean"], batch["log_variance"])):
            share = (new != old[:-1])[real].all(-1).float().mean().item()
            assert share == pytest.approx(chance, abs=0.04 if chance == 0.3 else 0)


# ---- gradients ----
def gradients(learner, batch, which):
    """Of the Q-network's loss (0) or the model's (1): name -> gradient of all networks."""
    torch.manual_seed(3)
    networks = {**learner.online, **learner.model, "target": learner.target["agents"]}
    for network in networks.values():
        network.zero_grad()
    losses = learner.loss(batch)
    losses[which].backward()
    found = {f"{n}.{p}": w.grad for n, network in networks.items() for p, w in network.named_parameters()}
    return losses[which].item(), {name: grad for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize(
    "changes",
    [{}, {"q_subgoal": "selected"}, {"inference": "mlp"}, {"mix": "kl-target"}, {"reconstruct": "features"}],
    ids=str,
)
def test_each_loss_teaches_its_own_network(omg, changes):
    env = sizes()
    learner, batch = make_learner(omg, env, **changes), episodes(env, LENGTHS, SEATS, DEATHS)
    learner.mix_chance.fill_(0.5)
    assert {name.split(".")[0] for name in gradients(learner, batch, 0)[1]} == {"agents"}
    assert {name.split(".")[0] for name in gradients(learner, batch, 1)[1]} == {"inference"}


def test_features_to_reconstruct_are_not_bent_to_what_is_easy(omg):
    env = sizes()
    inference = make_learner(omg, env, reconstruct="features").model["inference"]
    code = goal = torch.randn(2, 7, 4)
    recon, _ = inference.errors(torch.randn(7, 5), torch.randn(7, 4), torch.randn(7, 96), code, goal)
    recon.sum().backward()
    assert inference.now.weight.grad is None and inference.out.weight.grad.abs().sum() > 0


def test_an_update_moves_what_it_should(omg):
    env = sizes()
    learner, batch = make_learner(omg, env), episodes(env, LENGTHS, SEATS, DEATHS)
    networks = {**learner.online, **learner.model, "target": learner.target["agents"]}
    before = {
        n: torch.cat([w.detach().flatten().clone() for w in network.parameters()]) for n, network in networks.items()
    }
    learner.update(batch)
    after = {
        n: torch.cat([w.detach().flatten().clone() for w in network.parameters()]) for n, network in networks.items()
    }
    assert (before["vae"] == after["vae"]).all()
    assert (before["agents"] != after["agents"]).any() and (before["inference"] != after["inference"]).any()
    moved = before["target"] + learner.args.tau * (after["agents"] - before["target"])
    torch.testing.assert_close(after["target"], moved)
    learner.report()


# ---- what does not count ----
GARBAGE = (float("nan"), float("inf"), 1e30)


def spoil(batch, name, where, garbage):
    """Fills what is real-valued with garbage, flips flags and draws other actions, where the mask says so."""
    values = batch[name]
    mask = where.view(*where.shape, *(1 for _ in values.shape[where.dim() :])).expand_as(values)
    other = torch.full_like(values, garbage) if values.is_floating_point() else values
    if values.dtype == torch.bool:
        other = ~values
    elif "action" in name:
        other = (values + 1) % 4
    batch[name] = torch.where(mask, other, values)


def unchanged(omg, learner, batch, spoiled, which=(0, 1)):
    for part in which:
        loss, found = gradients(learner, batch, part)
        again, other = gradients(learner, spoiled, part)
        assert again == pytest.approx(loss, rel=1e-6)
        assert found.keys() == other.keys()
        for name in found:
            torch.testing.assert_close(other[name], found[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize(
    "changes", [{}, {"mix": "kl-target"}, {"subgoal_input": "state"}, {"inference": "mlp"}], ids=str
)
def test_padding_does_not_count(omg, changes, garbage):
    for world in ({}, {"team_reward": False}):
        env = sizes(**world)
        learner, batch = make_learner(omg, env, **changes), episodes(env, LENGTHS, SEATS, DEATHS)
        learner.mix_chance.fill_(0.5)
        spoiled = dict(batch)
        rows = torch.arange(len(batch["obs"])).unsqueeze(1)
        for name in ("obs", "state", "avail", "alive", "all_alive"):  # known up to the state after the last step
            spoil(spoiled, name, rows > batch["lengths"], garbage)
        for name in ("reward", "action", "all_action", "terminated", "mean", "log_variance"):
            spoil(spoiled, name, rows >= batch["lengths"], garbage)
        unchanged(omg, learner, batch, spoiled)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_after_an_agent_has_left_nothing_counts_where_rewards_are_its_own(omg, garbage):
    env = sizes(team_reward=False)
    learner, batch = make_learner(omg, env), episodes(env, LENGTHS, SEATS, DEATHS)
    learner.mix_chance.fill_(0.5)
    spoiled = dict(batch)
    for name in ("obs", "reward", "avail", "mean", "log_variance"):
        spoil(spoiled, name, ~batch["alive"], garbage)
    unchanged(omg, learner, batch, spoiled)


def test_a_dead_learner_leaves_the_models_loss_and_stays_in_the_teams(omg):
    env = sizes()
    learner, batch = make_learner(omg, env, q_subgoal="inferred"), episodes(env, (6,), ((1,),), [(0, 1, 3)])
    spoiled = dict(batch)
    for name in ("obs", "reward", "avail"):
        spoil(spoiled, name, ~batch["alive"], 7.0)
    unchanged(omg, learner, batch, spoiled, which=[1])
    assert gradients(learner, batch, 0)[0] != pytest.approx(gradients(learner, spoiled, 0)[0], rel=1e-3)


def test_other_seats_count_only_by_their_actions(omg):
    env = sizes()
    learner, batch = make_learner(omg, env), episodes(env, (6, 4), ((1,), (2,)))
    spoiled = {**batch, "all_alive": batch["all_alive"].clone()}
    spoiled["all_alive"][2:, :, 0] = False
    unchanged(omg, learner, batch, spoiled)
    spoiled["all_action"] = batch["all_action"].clone()
    spoiled["all_action"][2, :, 0] = (spoiled["all_action"][2, :, 0] + 1) % 4
    assert gradients(learner, batch, 1)[0] != gradients(learner, spoiled, 1)[0]


# ---- the past as the observation has it ----
def done_of(omg, env, team, obs, last):
    """What the opponent model is told of the last actions, (matches, own seats, agents, actions)."""
    inference, seen, own = omg.Inference(env, omg.Args()), [], team.mine(obs).unsqueeze(0)
    inference.past.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    inference(own, own, last.unsqueeze(0), team.own, inference.start(*team.own.shape))
    return seen[0][0, ..., env.obs_dim :].unflatten(-1, (env.n_agents, env.n_actions))


def test_actions_are_in_the_order_of_the_observation(omg):
    hunt = envs.make("stag_hunt_4x4", num_envs=8)
    battle = envs.make("8m", num_envs=8, obs_last_action=True)
    for env in (hunt, battle):
        team = omg.Team(env, f"{env.n_agents - 2}{env.policies[0]}2omg", ("omg",))
        env.reset(seed=2)
        last = env.scripted_actions(env.policies[0]).clone()
        obs, *_, info = env.step(last)
        assert info["alive"].all()
        done = done_of(omg, env, team, obs, last)
        if env is hunt:
            shown = team.mine(obs)[..., -env.n_agents * env.n_actions :].view_as(done)
            assert (done == shown).all()
        else:
            rule = env._rule
            friends = team.mine(obs)[..., rule.friends_at : rule.self_at].unflatten(-1, (-1, rule.friend_width))
            assert (friends[..., 0] == 1).all()  # all are seen
            assert (done[:, :, 1:] == friends[..., -env.n_actions :]).all()
            assert (done[:, :, 0].argmax(-1) == last.gather(1, team.own)).all()


# ---- acting and learning go through the same computations ----
def make_rollout(omg, env_id, team, num_envs=6, seed=1, **changes):
    torch.manual_seed(seed)
    args = omg.Args(env_id=env_id, team=team, num_envs=num_envs, hidden_dim=16, latent_dim=8, **changes)
    env = omg.make_env(args, num_envs, torch.device("cpu"), seed)
    learner = omg.Learner(args, env)
    with torch.no_grad():
        for network in (learner.online["agents"], learner.model["inference"]):
            for weights in network.parameters():
                weights.mul_(2)
    fields, team = [*omg.SEEN, "terminated", "state", "mean", "log_variance"], omg.make_team(args, env, seed)
    return learner, omg.Rollout(env, learner.online["agents"], learner.model["inference"], fields, team)


WORLDS = [("8m", "6nearest2omg"), ("8m", None), ("stag_hunt_4x4", "2NS2omg"), ("stag_hunt_4x4", "self")]


@pytest.mark.parametrize(("env_id", "team"), WORLDS)
def test_acting_is_the_unroll_of_training(omg, env_id, team):
    learner, rollout = make_rollout(omg, env_id, team)
    agents, inference, noted = learner.online["agents"], learner.model["inference"], []
    forward = type(agents).forward

    def note(obs, last, h, seat, subgoal):
        q, states = forward(agents, obs, last, h, seat, subgoal)
        noted.append((q[0].clone(), subgoal[0].clone(), len(noted)))
        return q, states

    for _ in range(2):  # nothing is left of the round before
        noted.clear()
        agents.forward = note
        rollout.play(0.2)
        del agents.forward
        steps = int(rollout.lengths.max())
        story = {name: values[: steps + 1] for name, values in rollout.story.items()}
        seat, own = story["seat"][0], story["action"][:-1]
        with torch.no_grad():
            _, _, (mean, log_variance) = learner.infer(story["obs"], story["all_action"][:-1], seat)
            last = torch.cat((torch.full_like(own[:1], -1), own))
            subgoals = torch.stack([subgoal for _, subgoal, _ in noted[: steps + 1]])
            start = torch.zeros(*seat.shape, 16)
            q, _ = agents(story["obs"][: len(subgoals)], last[: len(subgoals)], start, seat, subgoals)
        acted = torch.stack([q for q, _, _ in noted[:steps]])
        assert steps > 3 and acted.std() > 0.01 and mean.std() > 0.01
        torch.testing.assert_close(story["mean"][:steps], mean[:steps], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(story["log_variance"][:steps], log_variance[:steps], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(acted, q[:steps], rtol=1e-4, atol=1e-5)
        assert inference.memory == rollout.memory.shape[-1]


@pytest.mark.parametrize(("env_id", "team"), WORLDS)
def test_the_loss_unrolls_what_was_played(omg, means, env_id, team):
    """With the inferred subgoals Q of the loss is Q of acting: the whole way through story, buffer and batch."""
    learner, rollout = make_rollout(omg, env_id, team, q_subgoal="inferred", batch_size=6, buffer_size=6)
    agents, acted, unrolled = learner.online["agents"], [], []
    handle = agents.register_forward_hook(lambda _, inputs, outputs: acted.append(outputs[0][0].clone()))
    _, lengths, _, valid = rollout.play(0.3)
    handle.remove()
    with contextlib.redirect_stdout(io.StringIO()):
        buffer = omg.Buffer(rollout.story, 6, torch.device("cpu"), 0)
    buffer.add(rollout.story, lengths, valid)
    handle = agents.register_forward_hook(lambda _, inputs, outputs: unrolled.append(outputs[0].detach().clone()))
    learner.learn(buffer, 1)
    handle.remove()
    q = [outputs for outputs in unrolled if len(outputs) > 1][-1]
    again = SimpleNamespace(lengths=buffer.lengths, generator=torch.Generator().manual_seed(0))
    for place, match in enumerate(omg.Buffer.sample(again, 1, 6)[0, 0].tolist()):
        length = int(lengths[match])
        mine = torch.stack([step[match] for step in acted[:length]])
        torch.testing.assert_close(mine, q[:length, place], rtol=1e-4, atol=1e-5)


def test_a_story_has_the_learners_rows(omg):
    _, rollout = make_rollout(omg, "stag_hunt_4x4", "1NH2omg1NS", num_envs=8)
    env, team, seen = rollout.env, rollout.team, []
    step = env.step

    def note(actions):
        before = env.obs.clone(), env.info["avail"].clone(), env.info["alive"].clone(), env.info["state"].clone()
        _, reward, *_ = result = step(actions)
        seen.append((*before, actions.clone(), reward.clone()))
        return result

    env.step = note
    returns, *_ = rollout.play(0.5)
    story = rollout.story
    for t, (obs, avail, alive, state, actions, reward) in enumerate(seen):
        assert (story["all_alive"][t] == alive).all() and (story["all_action"][t] == actions).all()
        assert (story["state"][t] == state).all()
        for m in range(8):
            for place, seat in enumerate(team.own[m].tolist()):
                assert (story["obs"][t, m, place] == obs[m, seat]).all()
                assert (story["avail"][t, m, place] == avail[m, seat]).all()
                assert story["reward"][t, m, place] == reward[m, seat]
                assert (
                    story["alive"][t, m, place] == alive[m, seat] and story["action"][t, m, place] == actions[m, seat]
                )
    assert (story["seat"][0] == team.own).all()
    total = sum(reward for *_, reward in seen)
    torch.testing.assert_close(returns, team.mine(total))


# ---- measures ----
def test_hit_ratio_of_a_worked_example(omg):
    """Five states on a line; predictions made at 0 and 1 hit the third and the fourth."""
    places = torch.tensor([0.0, 10, 20, 30, 40]).view(5, 1, 1, 1) * torch.ones(1, 1, 1, 2)
    predicted = torch.tensor([20.5, 30, 20, 10, 0]).view(5, 1, 1, 1) * torch.ones(1, 1, 1, 2)
    seen, there = torch.ones(5, 1, 1, dtype=torch.bool), torch.ones(5, 1, dtype=torch.bool)
    assert omg.hit_ratio(predicted, places, seen, there, 1.0) == pytest.approx(0.4)
    assert omg.hit_ratio(predicted, places, seen, there, 0.5) == pytest.approx(0.2)
    # what nobody is there to see does not count, whatever stands there
    longer = [torch.cat((x, torch.full_like(x[:3], float("nan")))) for x in (predicted, places)]
    longer += [torch.cat((x, x[:3] & flag)) for x, flag in ((seen, True), (there, False))]
    assert omg.hit_ratio(*longer, 1.0) == pytest.approx(0.4)


def test_a_state_met_again_counts_once_and_is_hit_by_any_visit(omg):
    places = torch.tensor([0.0, 10, 0, 10, 50]).view(5, 1, 1, 1) * torch.ones(1, 1, 1, 2)
    predicted = torch.tensor([99.0, 99, 10, 99, 99]).view(5, 1, 1, 1) * torch.ones(1, 1, 1, 2)
    seen, there = torch.ones(5, 1, 1, dtype=torch.bool), torch.ones(5, 1, dtype=torch.bool)
    assert omg.hit_ratio(predicted, places, seen, there, 1.0) == pytest.approx(1 / 3)


def test_everyone_seen_must_be_near_and_the_unseen_need_not(omg):
    places = torch.zeros(2, 1, 2, 2)
    places[1, 0, 1] = 5
    predicted = torch.zeros(2, 1, 2, 2)
    seen, there = torch.ones(2, 1, 2, dtype=torch.bool), torch.ones(2, 1, dtype=torch.bool)
    assert omg.hit_ratio(predicted, places, seen, there, 1.0) == 0
    seen[1, 0, 1] = False
    assert omg.hit_ratio(predicted, places, seen, there, 1.0) == 0.5


def test_probe_reads_what_is_linear_and_nothing_else(omg):
    torch.manual_seed(0)
    features, train = torch.randn(600, 5), torch.arange(600) % 2 == 0
    labels = (features[:, 0] > 0.5).long() * 2 + (features[:, 0] < -0.5).long()
    assert omg.probe(features, labels, 3, train) > 0.75
    scale = torch.tensor([1e-3, 1.0, 1.0, 1.0, 100.0])
    assert omg.probe(features * scale + 5, labels, 3, train) > 0.75
    wide = torch.nn.functional.one_hot(labels, 3) + 0.1 * torch.randn(600, 3)
    assert omg.probe(wide, labels, 3, train) == 1
    assert omg.probe(features, torch.randint(3, (600,)), 3, train) < 0.45


def test_subgoals_inferred_past_an_end_do_not_count_as_exchanged(omg):
    learner, lengths = make_learner(omg, sizes()), (3, 8, 5)
    batch, inferred = episodes(sizes(), lengths, ((0,), (1,), (2,)), ((1, 1, 4),)), torch.randn(10, 3, 1, 4)
    before = omg.sensitivity(learner, batch, inferred)
    for match, end in enumerate((3, 4, 5)):  # the second learner dies
        inferred[end:, match] = 100.0
    assert omg.sensitivity(learner, batch, inferred) == before > 0


def test_of_one_match_nothing_is_said_that_takes_two(omg):
    learner, rollout = make_rollout(omg, "stag_hunt_4x4", "1NS1learner1NH1learner")
    rollout.play(1.0)
    whole = {"hit_ratio", "q_sensitivity", "teammate_probe", "next_action_probe"}
    assert omg.analyse(learner.args, learner, rollout).keys() == whole
    assert omg.analyse(learner.args, learner, rollout, matches=1).keys() == {"hit_ratio"}


def test_places_of_a_perfect_prediction_are_a_hit(omg):
    for env_id, team in (("8m", None), ("stag_hunt_4x4", None)):
        _, rollout = make_rollout(omg, env_id, team)
        rollout.play(1.0)
        obs, env = rollout.story["obs"], rollout.env
        places, seen = env.places(obs)
        next_places = torch.cat((places[1:], places[-1:]))
        flat = [x.flatten(1, 2) for x in (next_places, places, seen, rollout.story["alive"])]
        assert omg.hit_ratio(*flat, env.hit_distance) > 0.5  # all but what was there at the start and what is not seen
        assert seen.any()


# ---- files ----
def test_a_pretrained_file_is_the_start_and_must_fit(omg, tmp_path):
    env = sizes(name="sc2/3m")
    learner, other = make_learner(omg, env, seed=1), make_learner(omg, env, seed=2)
    fits = {"map": "3m", **sizes_of(env), "latent_dim": 4, "subgoal_input": "obs", "reconstruct": "obs"}
    model = {name: network.state_dict() for name, network in other.model.items()}
    torch.save({"fits": fits, "model": model}, tmp_path / "vae.pt")
    omg.load_vae(tmp_path / "vae.pt", learner.args, env, learner)
    for name, network in learner.model.items():
        for key, weights in network.state_dict().items():
            assert (weights == model[name][key]).all()
    assert not any(weights.requires_grad for weights in learner.model["vae"].parameters())
    for change in (
        {"map": "8m"},
        {"latent_dim": 8},
        {"subgoal_input": "state"},
        {"reconstruct": "features"},
        {"obs_dim": 9},
    ):
        torch.save({"fits": {**fits, **change}, "model": model}, tmp_path / "vae.pt")
        with pytest.raises(SystemExit, match=r"is for .*; this run needs"):
            omg.load_vae(tmp_path / "vae.pt", learner.args, env, learner)
    with pytest.raises(SystemExit, match="no such file"):
        omg.load_vae(tmp_path / "nowhere.pt", learner.args, env, learner)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"selector": "best"}, "value, random, next or a number from 1 up, not best"),
        ({"selector": "0"}, "number from 1 up"),
        ({"mix": "kl-target", "q_subgoal": "selected"}, "--q-subgoal is for --mix q-input"),
        ({"horizon": 0}, "--horizon is above 0"),
        ({"latent_dim": -1}, "--latent-dim is above 0"),
        ({"pretrain_timesteps": 0}, "--pretrain-timesteps is above 0"),
        ({"mix_start": 1.5}, "--mix-start is from 0 to 1"),
        ({"teammate_epsilon": 2.0}, "--teammate-epsilon is from 0 to 1"),
        ({"kl_weight": -1.0}, "--kl-weight is from 0 to 1"),
        ({"team": "1omg"}, "--team 1omg: team '1omg' has 1 seats, but 3m has 3"),
        ({"env_id": "stag_hunt_4x4", "n_agents": 1}, "--n-agents 1: there is nobody to model"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(omg, changes, says):
    args = omg.Args(**changes)
    with pytest.raises(SystemExit, match=says):
        omg.check(args)
        omg.make_team(args, omg.make_env(args, 2, torch.device("cpu"), 0), 0)


# ---- whole runs ----
TINY = {
    "num-envs": 8, "batch-size": 4, "buffer-size": 16, "total-timesteps": 400, "eval-interval": 300,
    "eval-episodes": 8, "final-eval-episodes": 8, "hidden-dim": 16, "train-frequency": 60, "log-interval": 0.001,
}  # fmt: skip
PRETRAINED = {"pretrain-timesteps": 200, "pretrain-updates": 10, "latent-dim": 8}


def run(folder, *arguments, stops=False, script="omg_iql"):
    """Runs the script; returns its folder. `run.names` are the names it had at the end."""
    before = set(folder.glob("*"))
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    settings = {} if "--resume" in arguments else TINY | (PRETRAINED if script == "omg_iql" else {})
    if script == "pretrain_cvae":
        settings = {"num-envs": 8, "batch-size": 4, **PRETRAINED}
    tiny = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    argv, sys.argv = sys.argv, [f"{script}.py", *tiny, "--run-root", str(folder), *arguments]
    try:
        with pytest.raises(SystemExit, match="stopped at step") if stops else contextlib.nullcontext():
            run.names = runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    finally:
        sys.argv = argv
        torch.use_deterministic_algorithms(False)
        for number, handler in handlers:
            signal.signal(number, handler)
    return next(iter(set(folder.glob("*")) - before), None)


def results(folder):
    return json.loads((folder / "results.json").read_text())


def same_runs(one, other, about="omg"):
    """Bit by bit: everything that was learned, and every evaluation."""
    first, second = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (one, other))
    for which in ("online", "target", "model"):
        for name, weights in first[which].items():
            for key, values in weights.items():
                assert torch.equal(values, second[which][name][key]), (which, name, key)
    for key in ("final", about, "steps", "episodes", "updates"):
        assert results(one)[key] == results(other)[key]
    evals = [
        [(e["steps"], e["win_rate"], e["episodic_return"]) for e in results(folder)["evals"]] for folder in (one, other)
    ]
    assert evals[0] == evals[1]


def test_a_run_on_3m_with_8_agents_is_filmed_and_can_be_watched(tmp_path):
    folder = run(tmp_path, "--env-id", "3m", "--n-agents", "8", "--capture-video")
    report = results(folder)
    assert report["complete"] and report["final"]["episodes"] == 8 and report["updates"] > 0
    assert 0 <= report["omg"]["hit_ratio"] <= 1 and report["omg"]["q_sensitivity"] > 0
    assert {"teammate_probe", "next_action_probe"} <= report["omg"].keys()
    assert (folder / "match.gif").stat().st_size > 0 and not (folder / "resume.pt").exists()
    play.main(play.Args("3m", policy=str(folder), n_agents=8, out=tmp_path / "match.gif"))
    env = envs.make("3m", n_agents=8)
    act = play.policy_of(str(folder), env)
    obs, info = env.reset(seed=0)
    act(obs, info)
    assert act.goals and all(len(goal) == 3 and np.isfinite(goal).all() for goal in act.goals)
    with pytest.raises(ValueError, match="is of 3m"):
        play.policy_of(str(folder), envs.make("3m"))


def test_a_saved_policy_plays_as_the_run_did(omg, means, tmp_path):
    """The target network, greedy, with the mean for a subgoal: as in an evaluation, match after match."""
    learner, rollout = make_rollout(omg, "stag_hunt_4x4", "2NS2omg", seat="0")
    with torch.no_grad():
        for network in (*learner.target.values(), *learner.model.values()):
            for weights in network.parameters():
                weights.mul_(3)
    rollout.agents = learner.target["agents"]
    about = {"env_id": "stag_hunt_4x4", "sizes": sizes_of(rollout.env), "args": asdict(learner.args)}
    saved = {
        which: {n: x.state_dict() for n, x in getattr(learner, which).items()}
        for which in ("online", "target", "model")
    }
    torch.save({**about, **saved}, tmp_path / "checkpoint.pt")
    env = omg.make_env(learner.args, 6, torch.device("cpu"), 1)
    act, used = omg.load_policy(tmp_path, env), set()
    for episode in range(4):
        rollout.env._seed = episode
        rollout.env._started = False  # so that the next reset goes by the seed
        rollout.play(0.0)
        obs, info = env.reset(seed=episode)
        for t in range(int(rollout.lengths.max())):
            running = t < rollout.lengths
            assert (rollout.story["obs"][t] == obs[:, :2])[running].all()
            actions = act(obs, info)
            assert (actions == rollout.story["all_action"][t])[running].all()
            used |= set(actions[:, :2].flatten().tolist())
            obs, *_, info = env.step(actions)
    assert len(used) > 2


@pytest.mark.parametrize(
    "arguments",
    [
        "--env-id MMM --subgoal-input state --selector random --dueling --reconstruct features",
        "--env-id stag_hunt_4x4 --subgoal-mode conservative --mix kl-target --bootstrap-subgoal next --seat random",
        "--env-id 3m --n-agents 8 --team 6nearest2omg --inference mlp --selector next --q-subgoal selected",
        "--env-id stag_hunt_4x4 --team self --selector 3 --q-subgoal inferred --buffer-device cpu --no-save-buffer",
        "--env-id stag_hunt_4x4 --mix-teammates --seat 2 --td-lambda 0 --horizon 1 --mix-start 1 --mix-fraction 1",
    ],
)
def test_runs_with_the_other_choices(tmp_path, arguments):
    report = results(run(tmp_path, *arguments.split()))
    assert report["complete"] and report["steps"] >= 400 and np.isfinite(report["final"]["episodic_return"])
    assert ("hit_ratio" in report["omg"]) == ("state" not in arguments)


def test_a_run_with_networks_of_an_earlier_run(tmp_path):
    spec = importlib.util.spec_from_file_location("iql", ROOT / "iql.py")
    sys.modules["iql"] = iql = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(iql)
    env, args = envs.make("stag_hunt_4x4"), iql.Args(hidden_dim=16)
    about = {"algorithm": "iql", "env_id": "stag_hunt_4x4", "sizes": sizes_of(env), "args": asdict(args)}
    for name in ("a", "b"):
        agents = iql.make_agents(args, env).state_dict()
        (tmp_path / "pool" / name).mkdir(parents=True)
        torch.save({**about, "target": {"agents": agents}}, tmp_path / "pool" / name / "checkpoint.pt")
    team = (
        "--team",
        "3iql1omg",
        "--pool",
        str(tmp_path / "pool" / "*"),
        "--mix-teammates",
        "--teammate-epsilon",
        "0.1",
    )
    folder = run(tmp_path / "runs", "--env-id", "stag_hunt_4x4", *team)
    assert results(folder)["complete"] and "teammate_probe" in results(folder)["omg"]
    play.main(play.Args("stag_hunt_4x4", policy=str(folder), episodes=2, out=tmp_path / "match.html"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), *SETTING)


SETTING = ("--env-id", "stag_hunt_4x4", "--mix", "kl-target", "--mix-fraction", "1", "--total-timesteps", "800")


def test_a_run_goes_on_where_it_stopped(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("tqdm.tqdm.update", lambda *_: signal.raise_signal(signal.SIGTERM))
        part = run(tmp_path, *SETTING, stops=True)
    steps = [torch.load(part / "checkpoint.pt", weights_only=True)["progress"]["steps"]]
    run(tmp_path, *SETTING, "--resume", str(part), "--time-limit", "0.001", stops=True)
    steps.append(torch.load(part / "checkpoint.pt", weights_only=True)["progress"]["steps"])
    run(tmp_path, *SETTING, "--resume", str(part))
    assert 0 < steps[0] < steps[1] < results(whole)["steps"]
    same_runs(whole, part)
    with pytest.raises(SystemExit, match="is complete"):
        run(tmp_path, *SETTING, "--resume", str(part))


def test_the_same_run_again_is_the_same(whole, tmp_path):
    same_runs(whole, run(tmp_path, *SETTING))


@pytest.mark.parametrize("options", [(), ("--subgoal-input", "state", "--reconstruct", "features", "--no-warm-up")])
def test_a_file_of_the_pretraining_script_is_used(tmp_path, options):
    hunt = ("--env-id", "stag_hunt_4x4", "--team", "2NS1NH1omg")
    folder = run(tmp_path / "first", *hunt, *options, "--pretrain-updates", "200", script="pretrain_cvae")
    saved, errors = torch.load(folder / "vae.pt", weights_only=True), results(folder)
    assert saved["algorithm"] == "pretrain_cvae" and saved["errors"]["recon"] == errors["recon"] > 0
    page = (ROOT / "docs" / "pretrain_cvae.md").read_text(encoding="utf-8")
    events = EventAccumulator(str(folder)).Reload()
    told = {*events.Tags()["scalars"], *events.Tags()["images"]}
    assert told == {"pretrain/recon", "pretrain/kl", *([] if options else ["pretrain/rebuilt"])}
    assert all(f"`{key}`" in page for key in told)
    fields = asdict(runpy.run_path(str(ROOT / "pretrain_cvae.py"))["Args"]())
    assert all(f"`--{field.replace('_', '-')}`" in page for field in fields if "wandb" not in field)
    options = [option for option in options if option != "--no-warm-up"]
    second = run(tmp_path / "second", *hunt, *options, "--vae", str(folder / "vae.pt"))
    later = torch.load(second / "checkpoint.pt", weights_only=True)
    for key, weights in saved["model"]["vae"].items():
        assert torch.equal(weights, later["model"]["vae"][key])


@pytest.mark.parametrize("team", ["self", "4omg"])
def test_pretraining_needs_others_to_watch(tmp_path, team):
    with pytest.raises(SystemExit, match=f"--team {team} has no others to watch"):
        run(tmp_path, "--env-id", "stag_hunt_4x4", "--team", team, script="pretrain_cvae")


def test_ctrl_c_in_pre_training_leaves_without_a_traceback(tmp_path, monkeypatch):
    def interrupted(self, actions):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(envs.make("stag_hunt_4x4")), "step", interrupted)
    with pytest.raises(SystemExit, match="stopped in pre-training, of which nothing is kept"):
        run(tmp_path, "--env-id", "stag_hunt_4x4")


def test_a_run_starts_from_a_pretrained_file(whole, tmp_path):
    saved = torch.load(whole / "checkpoint.pt", weights_only=True)
    file, fits = (
        str(tmp_path / "vae.pt"),
        {"map": "stag_hunt_4x4", **saved["sizes"], "latent_dim": 8, "subgoal_input": "obs", "reconstruct": "obs"},
    )
    torch.save({"fits": fits, "model": saved["model"]}, file)
    second = run(tmp_path / "runs", "--env-id", "stag_hunt_4x4", "--vae", file, "--seed", "5")
    later = torch.load(second / "checkpoint.pt", weights_only=True)
    for key, weights in saved["model"]["vae"].items():
        assert torch.equal(weights, later["model"]["vae"][key])
    for key, weights in saved["model"]["inference"].items():  # these learn on from there, in a few small steps
        assert not torch.equal(weights, later["model"]["inference"][key])
        torch.testing.assert_close(weights, later["model"]["inference"][key], rtol=0, atol=0.02)
    with pytest.raises(SystemExit, match="this run needs"):
        run(tmp_path, "--env-id", "stag_hunt_4x4", "--vae", file, "--subgoal-input", "state")

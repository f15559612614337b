"""What is omg_iql.py's alone: VAE and pre-training, the selection and mixing of subgoals, streams, metrics, files."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
from helpers import QUICK, QUICK_MODEL, QUICK_PRETRAINING, ROOT, SCRIPTS, as_played, stopped, train, write_run
from reference import CPU, NO_LOG, assert_unchanged, env_spec, gradients, make_runner, random_batch, random_learner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributions import Normal
from torch.distributions import kl_divergence as torch_kl_divergence

import envs
import omg_iql
from training import checkpoints
from training.episodes import EpisodeRunner, load_runner, visible_last_action
from training.graphs import SideStream
from training.metrics import exchanged, hit_ratio, last_alive_row, linear_probe, place_errors, split_by_seat, usage
from training.opponents import learner_inputs
from training.pretraining import load_pretrained
from training.run import Run
from training.team import Team

pytestmark = pytest.mark.usefixtures("one_thread")


def make_learner(env=None, **options):
    return random_learner("omg_iql", env or env_spec(), **options)


def long_batch(env):
    """20 matches of 40 steps, for shares."""
    return random_batch(env, [40] * 20, [[0, 1]] * 20, deaths=())


# ---- codes ----
def test_the_kl_divergence_is_from_the_first_to_the_second():
    torch.manual_seed(0)
    mean, log_variance, other_mean, other_log_variance = torch.randn(4, 50)
    found = omg_iql.kl_divergence(mean, log_variance, other_mean, other_log_variance)
    first, second = (Normal(m, (v / 2).exp()) for m, v in ((mean, log_variance), (other_mean, other_log_variance)))
    torch.testing.assert_close(found, torch_kl_divergence(first, second))
    assert (found - torch_kl_divergence(second, first)).abs().max() > 1
    torch.testing.assert_close(omg_iql.kl_divergence(mean, log_variance, mean, log_variance), torch.zeros(50))


def test_samples_have_the_mean_and_the_variance_of_the_code():
    torch.manual_seed(0)
    samples = omg_iql.sample(torch.full((20_000,), 2.0), torch.full((20_000,), np.log(9.0)))
    assert samples.mean() == pytest.approx(2, abs=0.1) and samples.std() == pytest.approx(3, abs=0.1)


def test_the_features_to_reconstruct_are_not_trained_by_the_reconstruction():
    model = make_learner(predict="features").model
    code = target = torch.randn(2, 7, 4)
    error, _ = model.errors(torch.randn(7, 5), torch.randn(7, 4), torch.randn(7, 96), code, target, None)
    error.sum().backward()
    assert model.fc_obs.weight.grad is None and model.out.weight.grad.abs().sum() > 0


def test_features_that_are_0_or_1_cost_their_cross_entropy():
    """Against a plain loop. Others, and those of which pre-training saw one value only, have squared errors."""
    env, states = env_spec(), torch.rand(30, 5)
    states[:, 1], states[:, 4] = torch.arange(30) % 2, 1.0
    learner = make_learner(env, subgoal_input="obs", pretrain_timesteps=1, pretrain_updates=1)
    runner = RecordedRunner(random_batch(env, deaths=()))
    runner.episodes["obs"] = states[torch.randint(30, runner.episodes["obs"].shape[:3])]
    pretrain(learner, runner)
    vae = learner.model.vae
    assert vae.binary.tolist() == [False, True, False, False, False]
    with torch.no_grad():
        vae.out.weight.mul_(0.01)
    codes = torch.randn(30, 4)
    found = vae.error(codes, states)
    for code, state, errors in zip(codes, states.tolist(), found.tolist()):
        x = reference.decode(vae, code.double().numpy())
        for k in range(5):
            share = 1 / (1 + np.exp(-x[k]))
            chance = share if state[k] == 1 else 1 - share
            expected = -np.log(chance) if k == 1 else (x[k] - state[k]) ** 2
            assert errors[k] == pytest.approx(expected, rel=1e-3, abs=1e-5)
        decoded = vae.decode(code)
        assert decoded[1].item() == pytest.approx(1 / (1 + np.exp(-x[1])), rel=1e-3)
        assert decoded[0].item() == pytest.approx(x[0], rel=1e-3, abs=1e-5)


def test_published_pretraining_has_squared_errors_only():
    env = env_spec()
    learner = make_learner(env, paper=True, pretrain_timesteps=1, pretrain_updates=1)
    runner = RecordedRunner(random_batch(env, deaths=()))
    runner.episodes["obs"] = (runner.episodes["obs"] > 0).float()
    pretrain(learner, runner)
    assert not learner.model.vae.binary.any()


def test_a_feature_beyond_0_and_1_costs_no_less_than_nothing():
    """One that was 0 or 1 in pre-training may not be later: its cross-entropy would have no lower bound."""
    vae = make_learner().model.vae
    vae.binary.fill_(True)
    assert vae.error(100 * torch.randn(50, 4), 5 * torch.randn(50, 3)).min() >= 0


# ---- pre-training ----
class RecordedRunner:
    """A runner whose rounds are all the same."""

    def __init__(self, batch):
        self.episodes = {name: values for name, values in batch.items() if name != "lengths"}
        self.lengths = batch["lengths"]

    collect, check_stop = EpisodeRunner.collect, EpisodeRunner.check_stop

    def should_stop(self):
        return False

    def play(self, epsilon=0.0):
        return as_played(self.episodes, self.lengths)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def pretrain(learner, runner):
    return omg_iql.Pretraining(learner.args, learner.model, runner).run(NO_LOG)


@pytest.mark.usefixtures("samples_are_means")
@pytest.mark.parametrize("predict", ["future", "view"])
@pytest.mark.parametrize("subgoal_input", ["others", "obs", "state"])
def test_errors_of_pretraining_equal_plain_loops(subgoal_input, predict):
    env = env_spec()
    learner = make_learner(env, subgoal_input=subgoal_input, predict=predict, pretrain_timesteps=1)
    learner.args = replace(learner.args, pretrain_updates=0)
    batch, terms = random_batch(env), {"recon": [], "kl": [], "inference": []}
    data, vae = reference.as_numpy(batch), learner.model.vae
    for name in ("obs", "state"):
        for m, length in enumerate(reference.LENGTHS):
            batch[name][length + 1 :, m] = torch.nan
    errors = pretrain(learner, RecordedRunner(batch))
    for m, length in enumerate(reference.LENGTHS):
        for place in range(2):
            states = data["state"][:, m] if subgoal_input == "state" else data["obs"][:, m, place]
            states = states[:, env.about_others.numpy()] if subgoal_input == "others" else states
            inferred = reference.plain_inference(learner, learner.model, data, m, place, length)
            for t in range(length + 1):
                if not data["alive"][t, m, place]:
                    continue
                code = reference.encode(vae, states[t])
                terms["recon"].append(np.mean((reference.decode(vae, code[0]) - states[t]) ** 2))
                terms["kl"].append(reference.kl(*code, np.zeros(4), np.zeros(4)))
                if t > 0:  # the state that was to be expected before
                    *expected, error = inferred[t - 1]
                    if predict == "future":
                        error = reference.decoding_error(vae, expected[0], states[t]).sum()
                    terms["inference"].append(error + learner.args.kl_weight * reference.kl(*expected, *code))
    assert errors["states"] == len(terms["recon"])
    for name, values in terms.items():
        assert errors[name] == pytest.approx(np.mean(values), rel=1e-4)


@pytest.mark.parametrize("paper", [False, True])
def test_pretraining_trains_both_networks_one_after_the_other(paper):
    """The published pre-training is of the VAE alone."""
    env, options = env_spec(), {"pretrain_timesteps": 1, "batch_size": 4, "model_learning_rate": 5e-3, "paper": paper}
    learner = make_learner(env, pretrain_updates=1, **options)
    runner = RecordedRunner(random_batch(env, deaths=()))
    first = pretrain(learner, runner)
    before = learner.model.rnn.weight_hh_l0.detach().clone()
    learner.args = replace(learner.args, pretrain_updates=600)
    second = pretrain(learner, runner)
    assert second["recon"] < 0.5 * first["recon"]
    if not paper:
        assert second["inference"] < 0.5 * first["inference"]
    assert torch.equal(learner.model.rnn.weight_hh_l0, before) == paper
    for name, weights in learner.model.named_parameters():
        assert weights.requires_grad != name.startswith("vae.")


def test_pretraining_is_measured_on_episodes_that_it_does_not_learn_from(monkeypatch):
    class Rounds(RecordedRunner):
        def play(self, epsilon=0.0):
            self.episodes["obs"] += 1000
            return super().play(epsilon)

    env, vae_states, cvae_rounds = env_spec(), [], set()
    learner = make_learner(env, pretrain_timesteps=3 * sum(reference.LENGTHS), pretrain_updates=20)
    update_vae, update_cvae = omg_iql.Pretraining.update_vae, omg_iql.Pretraining.update_cvae
    held_out, errors = [], omg_iql.Pretraining.errors
    monkeypatch.setattr(
        omg_iql.Pretraining,
        "errors",
        lambda self, states, episodes: held_out.extend((states, episodes["obs"])) or errors(self, states, episodes),
    )
    monkeypatch.setattr(
        omg_iql.Pretraining,
        "update_vae",
        lambda self, states: vae_states.append(states) or update_vae(self, states),
    )
    monkeypatch.setattr(
        omg_iql.Pretraining,
        "update_cvae",
        lambda self, episodes: (
            cvae_rounds.add(round(float(episodes["obs"].mean()) / 1000)) or update_cvae(self, episodes)
        ),
    )
    pretrain(learner, Rounds(random_batch(env)))
    states = vae_states[0]
    assert states.min() < 1500 < 1900 < states.max() < 2500 < min(values.min() for values in held_out)
    assert len(vae_states) == 20 and cvae_rounds == {1, 2}


def test_the_learning_rate_of_the_vae_rises_and_falls(monkeypatch):
    """To six times the model's after a tenth of the updates, then to 0; that of the CVAE stays."""
    env, step, rates = env_spec(), omg_iql.Pretraining.step, []

    def recorded_step(self, optimizer, loss):
        rates.append(optimizer.param_groups[0]["lr"])
        step(self, optimizer, loss)

    monkeypatch.setattr(omg_iql.Pretraining, "step", recorded_step)
    learner = make_learner(env, model_learning_rate=0.01, pretrain_timesteps=1, pretrain_updates=100)
    pretrain(learner, RecordedRunner(random_batch(env)))
    assert rates[:10] == sorted(rates[:10]) and rates[10:100] == sorted(rates[10:100], reverse=True)
    assert rates[0] < 0.001 and max(rates) == pytest.approx(0.06, rel=0.1) and 0 < rates[99] < 0.001
    assert rates[100:] == [0.01] * 10


@pytest.mark.parametrize("paper", [False, True])
def test_weights_of_the_divergence(paper):
    """Beside the error summed over features, or with the published settings beside its mean."""
    learner = make_learner(paper=paper, kl_weight=0.1, vae_kl_weight=0.2)
    size = 5 if paper else 3
    loss, recon, kl = omg_iql.vae_loss(learner.args, learner.model.vae, torch.randn(50, size))
    expected = recon + 0.1 * kl if paper else (size * recon + 0.2 * kl) / size
    torch.testing.assert_close(loss, expected)


# ---- the selection of subgoals ----
class SubgoalValues(torch.nn.Module):
    """Q of an action is the subgoal's number at that place: the value of a candidate is in its code."""

    def compare(self, obs, last_action, h, seat, subgoals, index):
        return subgoals[index, 0, 0]


def selected_rows(codes, last_row, avail=None, **options):
    """The rows selected for one match and one seat; codes (rows, actions)."""
    learner = make_learner(env_spec(n_actions=2), latent_dim=2, **{"selector": "value", **options})
    learner.agents = SubgoalValues()
    codes = torch.tensor(codes).view(-1, 1, 1, 2)
    steps = len(codes) - 1
    batch = {"avail": torch.ones(steps + 1, 1, 1, 2, dtype=torch.bool), "seat": torch.zeros(1, 1, 1, dtype=torch.long)}
    if avail is not None:
        batch["avail"][:-1] = torch.tensor(avail).view(-1, 1, 1, 2)
    obs, h, last_action = torch.zeros(steps, 1, 1, 5), torch.zeros(steps, 1, 1, 6), torch.full((steps, 1, 1), -1)
    rows, k = learner.select(batch, obs, last_action, h, codes, torch.tensor([[last_row]]))
    assert ((rows - 1 - torch.arange(steps).view(-1, 1, 1) <= k) & (rows <= last_row)).all()
    return rows.flatten().tolist()


def test_the_best_or_the_worst_of_the_next_states_is_selected():
    codes = [[value, value] for value in (9.0, 1.0, 3.0, 2.0, 8.0, 0.0)]
    assert selected_rows(codes, 5) == [2, 4, 4, 4, 5]  # of (1, 2, 3), (2, 3, 4), (3, 4, 5), (4, 5), (5)
    assert selected_rows(codes, 5, subgoal_mode="conservative") == [1, 3, 5, 5, 5]
    assert selected_rows(codes, 5, horizon=1) == [1, 2, 3, 4, 5]


def test_nothing_is_selected_behind_the_last_row_of_the_learner():
    codes = [[value, value] for value in (9.0, 1.0, 3.0, 2.0, 80.0, 90.0)]
    assert selected_rows(codes, 3)[:3] == [2, 2, 3]
    assert selected_rows(codes, 3, selector="random")[2] == 3
    codes[4] = codes[5] = [float("nan")] * 2
    assert selected_rows(codes, 3)[:3] == [2, 2, 3]


def test_a_subgoal_is_of_the_same_life():
    """In encounters that are one episode, the learner is alive again in the next match."""
    env = env_spec()
    learner, batch = make_learner(env, selector="3"), random_batch(env, (8,), ((0,),), deaths=())
    batch["alive"][3:5] = False
    found = []
    select = learner.select
    learner.select = lambda *args: found.append(select(*args)) or found[-1]
    reference.loss_of(learner, batch)
    rows = found[0][0].flatten().tolist()
    assert rows[:3] == [2, 2, 2] and rows[5:8] == [8, 8, 8]
    assert max(rows[3:5]) <= 2  # masked: but nothing from behind


def test_the_value_of_a_state_is_the_mean_over_available_actions():
    codes = [[0.0, 0.0], [2.0, 2.0], [1.0, 9.0], [3.0, -9.0]]
    first, both = [True, False], [True, True]
    assert selected_rows(codes, 3, [both, both, both])[0] == 2
    assert selected_rows(codes, 3, [first, both, both])[0] == 3
    assert selected_rows(codes, 3, [[False, False], both, both])[0] in (1, 2, 3)


def test_other_selectors():
    codes = [[value, value] for value in (0.0, 5.0, 1.0, 2.0, 7.0, 3.0)]
    assert selected_rows(codes, 5, selector="next") == [1, 2, 3, 4, 5]
    assert selected_rows(codes, 5, selector="1") == [1, 2, 3, 4, 5]
    assert selected_rows(codes, 5, selector="2") == [2, 3, 4, 5, 5]
    assert selected_rows(codes, 5, selector="7") == [5] * 5
    found = [selected_rows(codes, 5, selector="random", seed=seed) for seed in range(60)]
    assert [{rows[t] for rows in found} for t in range(5)] == [{1, 2, 3}, {2, 3, 4}, {3, 4, 5}, {4, 5}, {5}]


@pytest.mark.parametrize("dueling", [False, True])
def test_candidates_are_valued_as_single_steps(dueling):
    env = env_spec()
    agents = make_learner(env, dueling=dueling).agents
    steps, candidates, matches, seat = 5, 3, 4, torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
    shape = (steps, matches, 2)
    obs, h = torch.randn(*shape, env.obs_dim), torch.randn(*shape, agents.hidden_dim)
    last_action = torch.randint(-1, 2, shape)
    subgoals, index = torch.randn(steps + 1, matches, 2, 4), torch.randint(steps + 1, (steps, candidates, matches, 2))
    found = agents.compare(obs, last_action, h, seat, subgoals, index)
    for k in range(candidates):
        subgoal = subgoals.gather(0, index[:, k].unsqueeze(-1).expand(-1, -1, -1, 4))
        expected = agents.step(obs, last_action, h, seat, subgoal)
        torch.testing.assert_close(found[:, k], expected, rtol=1e-5, atol=1e-5)


# ---- mixing ----
@pytest.mark.parametrize(
    ("options", "share"),
    [({}, 0.3), ({"q_subgoal": "inferred"}, 0), ({"q_subgoal": "selected"}, 1), ({"mix": "kl-target"}, 0)],
    ids=str,
)
def test_the_q_network_has_the_selected_subgoal_with_its_probability(options, share):
    env = env_spec()
    learner = make_learner(env, **options)
    learner.set_mix_probability(0.3)
    subgoals = []
    learner.agents.register_forward_pre_hook(lambda _, inputs: subgoals.append(inputs[4].clone()))
    reference.loss_of(learner, long_batch(env))
    unrolls = [subgoal for subgoal in subgoals if len(subgoal) > 1]  # the others are single steps
    assert len(unrolls) == 1 + learner.mixing == 1 + (share > 0)
    inferred, used = unrolls[0], unrolls[-1]
    replaced = (used != inferred).any(-1)
    assert torch.equal(replaced, (used != inferred).all(-1))  # a whole subgoal or none of it
    assert not replaced[40:].any()
    assert replaced[:40].float().mean().item() == pytest.approx(share, abs=0.04)


def test_the_target_of_the_kl_divergence_is_the_selected_subgoal_with_its_probability(monkeypatch):
    env, targets, kl_divergence = env_spec(), [], omg_iql.kl_divergence
    learner, batch = make_learner(env, mix="kl-target"), long_batch(env)
    monkeypatch.setattr(omg_iql, "kl_divergence", lambda *codes: targets.append(codes[2:]) or kl_divergence(*codes))
    for probability in (0.0, 0.3, 1.0):
        learner.set_mix_probability(probability)
        targets.clear()
        reference.loss_of(learner, batch)
        for target, acted in zip(targets[0], (batch["mean"], batch["log_variance"])):
            share = (target != acted[:-1])[:40].all(-1).float().mean().item()
            assert share == pytest.approx(probability, abs=0.04 if probability == 0.3 else 0)


@pytest.mark.parametrize("options", [{}, {"q_gradient": False}], ids=str)
def test_updates_without_mixing_are_those_with_probability_0(options):
    env = env_spec()
    batch, found = long_batch(env), []
    for mixing in (True, False):
        learner = make_learner(env, **options)
        if not mixing:
            learner.set_mix_probability(0)
        assert learner.mixing == mixing
        torch.manual_seed(1)
        loss, logs = reference.loss_of(learner, batch)
        loss.backward()
        found.append([loss, *logs.values(), *(p.grad for p in (*learner.parameters, *learner.model_parameters))])
    assert all(map(torch.equal, *found))


# ---- both losses together ----
@pytest.mark.parametrize(
    "options",
    [{}, {"q_subgoal": "inferred"}, {"q_subgoal": "selected"}, {"mix": "kl-target"}, {"bootstrap_subgoal": "same"}],
    ids=str,
)
def test_losses_are_the_models_and_the_q_networks_one_after_the_other(options):
    """The order of `update`, which is for two streams, makes no difference: by hand there are no streams."""
    env, found = env_spec(), []
    batch = random_batch(env)

    def by_hand(learner):
        inputs, seat = learner_inputs(learner.env, batch), batch["seat"][0]
        obs, last_action, _ = inputs
        inferred = learner.model.unroll(obs, batch["visible_last_action"], seat)
        h = learner.agents.init_hidden(*seat.shape)
        with torch.no_grad():
            averaged = learner.target_model.unroll(obs, batch["visible_last_action"], seat)
            subgoals = [inferred[0], averaged[0]]
            _, hidden = learner.agents(obs, last_action, h, seat, subgoals[0])
        subgoals, model_loss, model_logs = learner.model_loss(batch, inputs, hidden, inferred, subgoals)
        q, hidden = learner.agents(obs, last_action, h, seat, subgoals[0])
        td_loss, logs = learner.td_loss(batch, inputs, subgoals, q, hidden)
        return td_loss + model_loss, logs | model_logs

    for compute in (lambda learner: reference.loss_of(learner, batch), by_hand):
        learner = make_learner(env, **options)
        learner.set_mix_probability(0.5)
        torch.manual_seed(1)
        loss, logs = compute(learner)
        loss.backward()
        found.append((loss, logs, [p.grad for p in (*learner.parameters, *learner.model_parameters)]))
    (loss, logs, grads), (expected, expected_logs, expected_grads) = found
    assert torch.equal(loss, expected) and loss.item() > 0
    assert logs.keys() == expected_logs.keys() and all(torch.equal(logs[key], expected_logs[key]) for key in logs)
    for gradient, wanted in zip(grads, expected_grads):  # terms of a sum are in another order
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


def test_a_side_stream_on_the_cpu_runs_everything_in_order():
    side_stream, order = SideStream(CPU), []
    with side_stream:
        order.append("inside")
    order.append("after")
    side_stream.join()
    assert order == ["inside", "after"] and side_stream.stream is None
    with pytest.raises(ValueError, match="inside"), side_stream:
        raise ValueError("inside")


# ---- what the model reads ----
@pytest.mark.parametrize(
    ("env_id", "numbers"),
    [
        ("3m", 2 * 5), ("2s3z", 4 * 8), ("stag_hunt_4x4", 16 * 3 + 3 * 7), ("Foraging-8x8-2p-3f-v3", 3),
        ("coin_game", 9), ("snowdrift", 64 * 3), ("simple_tag", 2 * 3 + 2), ("popp", 2 * 3 + 2), ("matrix_ipd", None),
    ],
)  # fmt: skip
def test_what_observations_tell_of_the_others(env_id, numbers):
    """It is all that their places are read off, and nothing else tells of them."""
    env = envs.make(env_id, num_envs=16)
    assert env.about_others.shape == (env.obs_dim,)
    if numbers is None:  # no part of it is told apart
        assert env.about_others.all()
        return
    assert env.about_others.sum() == numbers
    env.reset(seed=1)
    for _ in range(3):
        env.step(env.scripted_actions("random" if "random" in env.policies else env.policies[0]))
    shown = torch.where(env.about_others, env.obs, 0.0)
    for whole, part in zip(env.places(env.obs), env.places(shown)):
        assert torch.equal(whole[:, :, 1 - env.n_agents :], part[:, :, 1 - env.n_agents :])


def test_of_the_others_only_their_actions_matter():
    env = env_spec()
    learner, batch = make_learner(env), random_batch(env, (6, 4), ((1,), (2,)), deaths=())
    changed = {**batch, "all_alive": batch["all_alive"].clone()}
    changed["all_alive"][2:, :, 0] = False
    assert_unchanged(learner, batch, changed)
    changed["visible_last_action"] = batch["visible_last_action"].clone()
    changed["visible_last_action"][3, ..., 0] = (changed["visible_last_action"][3, ..., 0] + 1) % 4
    assert gradients(learner, batch, 1)[0] != gradients(learner, changed, 1)[0]


@pytest.mark.parametrize("name", ["omg_iql", "naive_om_iql"])
@pytest.mark.parametrize("env_id", ["stag_hunt_4x4", "8m"])
def test_last_actions_are_in_the_order_of_the_observation(name, env_id):
    env = envs.make(env_id, num_envs=8, **({"obs_last_action": True} if env_id == "8m" else {}))
    team = Team(env, f"{env.n_agents - 2}{env.policies[0]}2learner")
    env.reset(seed=2)
    last_action = env.scripted_actions(env.policies[0]).clone()
    obs, *_, info = env.step(last_action)
    assert info["alive"].all()
    obs, seats, inputs = team.select(obs), team.learner_seats, []
    model = SCRIPTS[name].OpponentModel(SCRIPTS[name].Args(), env)
    model.rnn.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    seen = visible_last_action(team.select(env.visible), last_action).unsqueeze(0)
    assert seen[0].equal(last_action.unsqueeze(1).expand_as(seen[0]).short())  # everybody is near enough
    model(obs.unsqueeze(0), obs.unsqueeze(0), seen, seats, model.init_hidden(*seats.shape))
    actions = inputs[0][0, ..., env.obs_dim :].unflatten(-1, (env.n_agents, env.n_actions))
    if env_id == "8m":
        rule = env._rule
        friends = obs[..., rule.friends_at : rule.self_at].unflatten(-1, (-1, rule.friend_width))
        assert (friends[..., 0] == 1).all()  # all are seen
        assert (actions[:, :, 1:] == friends[..., -env.n_actions :]).all()
        assert (actions[:, :, 0].argmax(-1) == last_action.gather(1, seats)).all()
    else:
        assert (actions == obs[..., -env.n_agents * env.n_actions :].view_as(actions)).all()


TEAMS = [
    pytest.param("8m", "6nearest2omg", marks=pytest.mark.slow),
    ("8m", "scripted"),
    ("stag_hunt_4x4", "2NS2omg"),
    pytest.param("stag_hunt_4x4", "self", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("env_id", "team"), TEAMS)
def test_acting_infers_and_values_as_the_unroll_of_training(env_id, team):
    learner, runner = make_runner("omg_iql", env_id, team)
    agents, steps_taken = learner.agents, []
    for _ in range(2):  # nothing is left of the round before
        steps_taken.clear()
        hook = agents.register_forward_hook(
            lambda _, inputs, outputs: steps_taken.append((outputs[0][0].clone(), inputs[4][0].clone()))
        )
        runner.play(0.2)
        hook.remove()
        steps = int(runner.lengths.max())
        episodes = {name: values[: steps + 1] for name, values in runner.episodes.items()}
        seat, action = episodes["seat"][0], episodes["action"][: steps - 1]
        acted, subgoals = (torch.stack(values) for values in zip(*steps_taken[:steps]))
        with torch.no_grad():
            _, _, (mean, log_variance) = learner.model.unroll(episodes["obs"], episodes["visible_last_action"], seat)
            last_action = torch.cat((torch.full_like(action[:1], -1), action))
            q, _ = agents(episodes["obs"][:steps], last_action, agents.init_hidden(*seat.shape), seat, subgoals)
        assert steps > 3 and acted.std() > 0.01 and mean.std() > 0.01
        torch.testing.assert_close(episodes["mean"][:steps], mean[:steps], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(episodes["log_variance"][:steps], log_variance[:steps], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(acted, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("paper", [False, True])
def test_the_averaged_inference_model_plays_greedily(paper):
    """It moves with every update as the target network does; the published one is the newest."""
    env = env_spec()
    learner, batch = make_learner(env, paper=paper, tau=0.25), long_batch(env)
    before = [weights.detach().clone() for weights in learner.target_model_parameters]
    learner.update(batch)
    for old, newest, averaged in zip(before, learner.model_parameters, learner.target_model_parameters):
        torch.testing.assert_close(averaged, newest if paper else 0.75 * old + 0.25 * newest)
    seats = torch.tensor([[0]])
    assert omg_iql.Player(learner, learner.target_agents, seats).model is learner.target_model
    assert omg_iql.Player(learner, learner.agents, seats).model is learner.model


def test_by_default_nothing_is_drawn_but_what_is_mixed():
    """What the Q-network reads, and what is selected from, are means."""
    env, read = env_spec(), []
    learner, batch = make_learner(env), long_batch(env)
    learner.set_mix_probability(1.0)
    learner.agents.register_forward_pre_hook(lambda _, inputs: read.append(inputs[4].clone()))
    for seed in (1, 2):
        torch.manual_seed(seed)
        reference.loss_of(learner, batch)
    inferred, mixed, *again = read
    assert torch.equal(inferred, again[0]) and torch.equal(mixed, again[1]) and not torch.equal(inferred, mixed)
    inputs = learner_inputs(learner.env, batch)
    _, _, (mean, _) = learner.model.unroll(inputs[0], batch["visible_last_action"], batch["seat"][0])
    torch.testing.assert_close(inferred, mean)
    codes, _ = learner.model.vae.encode(inputs[0][..., env.about_others])
    torch.testing.assert_close(mixed[:30], codes[2:32])  # --selector 2


def test_the_last_row_of_a_life():
    """Against a plain loop, with agents that die and live again, as in encounters."""
    torch.manual_seed(0)
    alive = torch.rand(12, 30, 2) < 0.8
    alive[0] = True
    found = last_alive_row(alive)
    for match in range(30):
        for seat in range(2):
            mine, last = alive[:, match, seat].tolist(), 0
            for row in range(12):
                if mine[row]:
                    last = next((t for t in range(row, 12) if not mine[t]), 12) - 1
                assert found[row, match, seat] == last


def test_an_oracle_is_told_whom_pretraining_watches(tmp_path):
    """Whoever plays then; runs can be among them."""
    run = write_run(tmp_path / "run", "qmix", envs.make("stag_hunt_4x4"))
    team = {"env_id": "stag_hunt_4x4", "team": "2qmix1NS1omg", "pool": run, "oracle": True}
    names = train("omg_iql", tmp_path / "runs", total_timesteps=1, **team)
    runner, size = names["pretrain_runner"], names["plain_env"].obs_dim
    runner.play()
    told = runner.env.obs[:, 0, size:].unflatten(-1, (3, -1)).argmax(-1)
    assert torch.equal(torch.tensor(runner.team.used)[told], runner.team.policy_id[:, 1:])


def test_published_settings(tmp_path):
    """Options that are given hold, also with the value of the default; the others are the paper's."""
    ablation = HUNT | {"paper": True, "selector": "2", "code": "mean", "q_gradient": True}
    folder = stopped("omg_iql", tmp_path, **ablation)
    args = train("omg_iql", tmp_path, resume=folder, paper=True)["args"]
    assert (args.subgoal_input, args.predict, args.code, args.selector) == ("obs", "view", "mean", "2")
    assert args.q_gradient and args.inference_weight == 1.0
    file = train("pretrain_cvae", tmp_path, paper=True, **HUNT)["folder"] / "vae.pt"
    args = train("omg_iql", tmp_path / "runs", paper=True, vae=file, total_timesteps=1, **HUNT)["args"]
    assert (args.subgoal_input, args.predict, args.code, args.selector) == ("obs", "view", "sample", "value")


def test_recorded_episodes_have_the_learners_rows():
    _, runner = make_runner("omg_iql", "stag_hunt_4x4", "1NH2omg1NS", num_envs=8)
    env, team, taken = runner.env, runner.team, []
    step = env.step

    def recorded_step(actions):
        before = [values.clone() for values in (env.obs, *(env.info[name] for name in ("avail", "alive", "state")))]
        result = step(actions)
        taken.append((*before, actions.clone(), result[1].clone()))
        return result

    env.step = recorded_step
    returns = runner.play(0.5).returns
    episodes = runner.episodes
    for t, (obs, avail, alive, state, actions, reward) in enumerate(taken):
        assert (episodes["all_alive"][t] == alive).all() and (episodes["all_action"][t] == actions).all()
        assert (episodes["state"][t] == state).all()
        for m in range(8):
            for place, seat in enumerate(team.learner_seats[m].tolist()):
                assert (episodes["obs"][t, m, place] == obs[m, seat]).all()
                assert (episodes["avail"][t, m, place] == avail[m, seat]).all()
                assert episodes["reward"][t, m, place] == reward[m, seat]
                assert episodes["alive"][t, m, place] == alive[m, seat]
                assert episodes["action"][t, m, place] == actions[m, seat]
    assert (episodes["seat"][0] == team.learner_seats).all()
    torch.testing.assert_close(returns, team.select(sum(reward for *_, reward in taken)))


# ---- metrics ----
def on_a_line(*numbers):
    """Places (steps, 1 trajectory, 1 other, 2)."""
    return torch.tensor(numbers).view(-1, 1, 1, 1) * torch.ones(1, 1, 1, 2)


def test_hit_ratio_of_an_example():
    """Five places on a line; the first two predictions are places that follow, the next two are not."""
    places, predicted = on_a_line(0.0, 10, 20, 30, 40), on_a_line(20.5, 30, 20, 10, 0)
    visible, mask = torch.ones(5, 1, 1, dtype=torch.bool), torch.ones(5, 1, dtype=torch.bool)
    assert hit_ratio(predicted, places, visible, mask, 1.0) == pytest.approx(2 / 4)
    assert hit_ratio(predicted, places, visible, mask, 0.5) == pytest.approx(1 / 4)
    # what is masked does not count
    longer = [torch.cat((values, torch.full_like(values[:3], float("nan")))) for values in (predicted, places)]
    longer += [torch.cat((visible, visible[:3])), torch.cat((mask, ~mask[:3]))]
    assert hit_ratio(*longer, 1.0) == pytest.approx(2 / 4)


def test_hits_count_for_each_other_where_it_is_visible():
    places, predicted = torch.zeros(2, 1, 2, 2), torch.zeros(2, 1, 2, 2)
    places[1, 0, 1] = 5
    visible, mask = torch.ones(2, 1, 2, dtype=torch.bool), torch.ones(2, 1, dtype=torch.bool)
    assert hit_ratio(predicted, places, visible, mask, 1.0) == 0.5
    visible[0, 0, 1] = False
    assert hit_ratio(predicted, places, visible, mask, 1.0) == 1


def test_errors_of_places_beside_those_without_a_model():
    """One other walks 1, 2, 3, ... along both axes; predicted is where it will be in two steps, but for one step."""
    places = on_a_line(*map(float, range(9)))
    predicted = places + 2
    predicted[3] += 1
    visible, mask = torch.ones(9, 1, 1, dtype=torch.bool), torch.ones(9, 1, dtype=torch.bool)
    found = place_errors(predicted, places, visible, mask, 2)
    assert found["place_error"] == pytest.approx(2**0.5 / 6) and found["place_error_moving"] == 0
    assert found["place_error_still"] == pytest.approx(2 * 2**0.5)
    assert place_errors(predicted[:3], places[:3], visible[:3], mask[:3], 2) == {}


def test_perfect_predictions_of_places_are_hits():
    for env_id in ("8m", "stag_hunt_4x4"):
        _, runner = make_runner("omg_iql", env_id, "scripted")
        runner.play(1.0)
        places, visible = runner.env.places(runner.episodes["obs"])
        next_places = torch.cat((places[1:], places[-1:]))
        values = [x.flatten(1, 2) for x in (next_places, places, visible, runner.episodes["alive"])]
        assert visible.any()
        assert hit_ratio(*values, runner.env.hit_distance) > 0.5  # all but the first states and what is not visible


def test_a_linear_probe_reads_what_is_linear_and_nothing_else():
    torch.manual_seed(0)
    features, train = torch.randn(600, 5), torch.arange(600) % 2 == 0
    labels = (features[:, 0] > 0.5).long() * 2 + (features[:, 0] < -0.5).long()
    assert linear_probe(features, labels, 3, train) > 0.75
    scale = torch.tensor([1e-3, 1.0, 1.0, 1.0, 100.0])
    assert linear_probe(features * scale + 5, labels, 3, train) > 0.75
    separate = torch.nn.functional.one_hot(labels, 3) + 0.1 * torch.randn(600, 3)
    assert linear_probe(separate, labels, 3, train) == 1
    assert linear_probe(features, torch.randint(3, (600,)), 3, train) < 0.45
    first = int((labels == 2).nonzero()[0])  # where nearly all learners die early a single row may be left
    alone = torch.arange(600) == first
    assert linear_probe(features, labels, 3, alone) == (labels[~alone] == 2).float().mean()


def test_what_is_inferred_is_exchanged_within_and_across_policies():
    policy_id = torch.tensor([[-1, 3], [3, -1], [-1, 4], [-1, 5], [5, -1]])
    assert exchanged(policy_id).tolist() == [[1, 0, -1, 4, 3], [2, 2, 3, 0, 0]]


class ActsAsInferred:
    """A Q-network whose values are what is inferred."""

    def init_hidden(self, matches, seats):
        return torch.zeros(matches, seats, 1)

    def __call__(self, obs, last_action, h, seat, inferred):
        return inferred, h


@pytest.mark.parametrize(
    ("told", "within", "across"),
    [(1.0, 0, 1), (0.0, 0.75, 0.75), (0.5, 0.375, 0.875)],  # of four actions, noise changes three in four
    ids=["the policy", "noise", "half of the steps"],
)
def test_usage_is_what_depends_on_the_policies(told, within, across):
    """What is inferred asks for the action of the policy's number in a share of the steps, else for a random one."""
    env = env_spec()
    learner, batch = make_learner(env), long_batch(env)
    batch["avail"][:] = True
    policy = torch.arange(20) % 2
    batch["policy_id"] = torch.stack((torch.full((20,), -1), torch.full((20,), -1), policy), 1)
    torch.manual_seed(0)
    action = torch.randint(4, (42, 20, 2))
    action[: round(40 * told)] = policy.view(1, -1, 1)
    inferred = torch.nn.functional.one_hot(action, 4).float()
    found = usage(ActsAsInferred(), batch, learner_inputs(learner.env, batch), inferred)
    tolerance = 0 if told == 1 else 0.03
    assert found["swap_same"] == pytest.approx(within, abs=tolerance)
    assert found["swap_other"] == pytest.approx(across, abs=tolerance)
    assert found["usage"] == pytest.approx(found["swap_other"] - found["swap_same"])
    batch["avail"][..., 1:] = False  # there is nothing to choose
    assert set(usage(ActsAsInferred(), batch, learner_inputs(learner.env, batch), inferred).values()) == {0.0}


def test_what_is_inferred_behind_an_end_is_not_exchanged():
    env = env_spec()
    learner, batch = make_learner(env), random_batch(env, (3, 8, 5), ((0,), (1,), (2,)), ((1, 1, 4),))
    batch["policy_id"] = torch.tensor([[-1, 1, 1], [2, -1, 2], [1, 1, -1]])
    inferred = torch.randn(10, 3, 1, 4)
    before = usage(learner.target_agents, batch, learner_inputs(learner.env, batch), inferred)
    for match, end in enumerate((3, 4, 5)):  # the second learner dies
        inferred[end:, match] = 100.0
    assert usage(learner.target_agents, batch, learner_inputs(learner.env, batch), inferred) == before


def test_both_halves_of_the_matches_have_every_seat():
    seat = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]).unsqueeze(1)
    half = split_by_seat(seat)
    assert [int((seat[half] == k).sum()) for k in range(3)] == [2, 2, 2]


def test_a_single_match_has_no_metrics_that_take_two():
    _, runner = make_runner("omg_iql", "stag_hunt_4x4", "1NS1learner1NH1learner")
    runner.play(1.0)
    of_codes = {"active_dims", "noise_share", "hit_ratio", "place_error", "place_error_still", "place_error_moving"}
    kinds = {f"{name}{end}" for name in ("teammate_probe", "next_action_probe") for end in ("", "_view")}
    assert runner.player.analyse(runner.selection()).keys() == of_codes | kinds | {"swap_same"}
    assert runner.player.analyse(runner.selection(slice(1))).keys() == of_codes


# ---- the file of pretrain_cvae.py ----
HUNT = {"env_id": "stag_hunt_4x4", "team": "2NS1NH1omg", "latent_dim": 8}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """The folder of a pre-training for HUNT, made once."""
    made = []

    def get():
        if not made:
            folder = tmp_path_factory.mktemp("pretrained")
            made.append(train("pretrain_cvae", folder, pretrain_updates=100, **HUNT)["folder"])
        return made[0]

    return get


def model_of(folder):
    return checkpoints.read_run(folder)["networks"]["model"]


def assert_same_weights(found, expected, prefix=""):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected if key.startswith(prefix))


@pytest.mark.slow
def test_what_pretraining_writes(pretrained):
    folder = pretrained()
    saved, found = checkpoints.read(folder / "vae.pt"), json.loads((folder / "results.json").read_text())
    assert saved["algorithm"] == "omg_iql" and saved["args"]["team"] == HUNT["team"]
    assert saved["errors"].keys() == {"recon", "kl", "inference", "states"}
    assert {key: found[key] for key in saved["errors"]} == saved["errors"] and saved["errors"]["recon"] > 0
    events = EventAccumulator(str(folder)).Reload().Tags()
    assert set(events["scalars"]) == {"pretrain/recon", "pretrain/kl", "pretrain/inference"}


@pytest.mark.slow
def test_a_run_loads_exactly_what_pretraining_saved(pretrained, tmp_path, capsys):
    file = pretrained() / "vae.pt"
    expected = checkpoints.read(file)["networks"]["model"]
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:  # stops when it is about to play
        patch.setattr("training.run.Run.in_progress", lambda run: (run.save(), sys.exit()))
        train("omg_iql", tmp_path / "start", vae=file, **HUNT)
    (folder,) = (tmp_path / "start").iterdir()
    assert_same_weights(model_of(folder), expected)
    capsys.readouterr()
    names = train("omg_iql", tmp_path / "whole", vae=file, seed=5, **HUNT)
    assert "Pre-training" not in capsys.readouterr().out
    trained = model_of(names["run"].folder)
    for key in expected.keys() - {"vae.binary"}:  # trained on, in a few small steps
        assert not torch.equal(trained[key], expected[key])
        torch.testing.assert_close(trained[key], expected[key], rtol=0, atol=0.02)


def test_the_published_vae_is_frozen_after_pretraining(tmp_path, capsys):
    options = HUNT | {"subgoal_input": "state", "predict": "features", "paper": True}
    names = train("pretrain_cvae", tmp_path, **options)
    file = names["folder"] / "vae.pt"
    command = "python omg_iql.py --paper --env-id stag_hunt_4x4 --team 2NS1NH1omg --latent-dim 8 "
    command += f"--subgoal-input state --predict features --vae {file}"
    assert f"use it with: {command}\n" in capsys.readouterr().out
    run = train("omg_iql", tmp_path / "runs", vae=file, total_timesteps=100, **options)["run"]
    assert_same_weights(model_of(run.folder), checkpoints.read(file)["networks"]["model"], prefix="vae.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_id": "3m", "team": "scripted"}, "map 'stag_hunt_4x4', not 3m, n_agents 4, not 3, "),
        ({"n_agents": 3, "team": "2NS1omg"}, "n_agents 4, not 3, "),
        ({"latent_dim": 16}, "latent_dim 8, not 16$"),
        ({"subgoal_input": "state"}, "subgoal_input 'others', not state$"),
        ({"predict": "features"}, "predict 'future', not features$"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_file_for_something_else_is_rejected(pretrained, options, message, tmp_path):
    file = pretrained() / "vae.pt"
    with pytest.raises(SystemExit, match=f"--vae .*vae.pt: it is for {message}"):
        train("omg_iql", tmp_path / "runs", vae=file, **HUNT | options)
    assert not (tmp_path / "runs").exists()


def test_a_file_is_for_a_map_real_or_simulated(tmp_path):
    simulation = env_spec(name="3m")
    learner, other = make_learner(simulation, seed=1), make_learner(simulation, seed=2)
    args = learner.args
    args = replace(args, vae=tmp_path / "vae.pt")
    with pytest.raises(SystemExit, match="no such file"):
        load_pretrained("--vae", args.vae, omg_iql.requirements(args, simulation), learner.model, "model")
    networks = {"model": other.model.state_dict()}
    torch.save({"requirements": omg_iql.requirements(args, simulation), "networks": networks}, args.vae)
    real = env_spec(name="sc2/3m")
    load_pretrained("--vae", args.vae, omg_iql.requirements(args, real), learner.model, "model")
    assert_same_weights(learner.model.state_dict(), networks["model"])
    for change in ({"name": "8m"}, {"obs_dim": 9}):  # another map of the same sizes, other sizes of the same map
        with pytest.raises(SystemExit, match=r"is for (map '3m', not 8m|obs_dim 5, not 9)$"):
            required = omg_iql.requirements(args, env_spec(**{"name": "3m", **change}))
            load_pretrained("--vae", args.vae, required, learner.model, "model")


@pytest.mark.parametrize("team", ["self", "4omg"])
def test_pretraining_needs_others_to_watch(team, tmp_path):
    with pytest.raises(SystemExit, match=f"--team {team} has no others to watch"):
        train("pretrain_cvae", tmp_path, env_id="stag_hunt_4x4", team=team)


def test_pretraining_needs_a_script(tmp_path):
    with pytest.raises(SystemExit, match=r"--script missing: there is no script missing\.py in "):
        train("pretrain_cvae", tmp_path, script="missing")


STOPPED = {"env_id": "stag_hunt_4x4", "latent_dim": 8, "total_timesteps": 100, "pretrain_updates": 20}


@pytest.fixture(scope="module")
def not_stopped(tmp_path_factory):
    return train("omg_iql", tmp_path_factory.mktemp("whole"), **STOPPED)["run"].folder


@pytest.mark.parametrize("update", [21, *(pytest.param(update, marks=pytest.mark.slow) for update in (1, 7, 20, 22))])
def test_a_run_stopped_in_pretraining_goes_on_there(update, not_stopped, tmp_path, monkeypatch):
    """20 updates of the VAE and 2 of the CVAE; the result is that of a run that was not stopped."""
    save_or_stop, updates = Run.save_or_stop, []

    def after_update(run):
        updates.append(run.state["pretraining"].progress["update"])
        if len(updates) == update:
            signal.raise_signal(signal.SIGINT)
        save_or_stop(run)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save_or_stop", after_update)
        folder = stopped("omg_iql", tmp_path / "stopped", time_limit=1e6, **STOPPED)
        saved = checkpoints.read_run(folder)
        assert saved["progress"]["steps"] == 0 and len(updates) == update
        train("omg_iql", tmp_path / "stopped", resume=folder, **STOPPED)
    assert updates == list(range(1, 23))
    assert_same_weights(model_of(folder), model_of(not_stopped))


def test_the_time_limit_ends_pretraining_too(tmp_path):
    options = {"env_id": "stag_hunt_4x4", "latent_dim": 8, "pretrain_updates": 10**6}
    folder = stopped("omg_iql", tmp_path, time_limit=1e-6, **options)
    resume = checkpoints.read(folder / checkpoints.read_run(folder)["resume"])
    assert resume["steps"] == 0 and resume["pretraining"]["update"] == 1  # at least one: it gets on


# ---- a modified copy ----
def run_script(folder, path, **options):
    """Runs a script in a process of its own, in `folder`; returns (the only folder in its run_root, its output)."""
    words = [sys.executable, str(path)]
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = (folder / options["run_root"]).iterdir()
    return found, done.stdout


@pytest.mark.slow
def test_a_copy_with_another_opponent_model_is_pretrained_and_trained(tmp_path, monkeypatch):
    text = (ROOT / "omg_iql.py").read_text()
    layer = "self.fc1 = nn.Linear(32 + hidden_dim, 64)\n"
    deeper = "self.fc1 = nn.Sequential(nn.Linear(32 + hidden_dim, 64), nn.ReLU(), nn.Linear(64, 64))\n"
    assert text.count(layer) == 1
    (tmp_path / "omg_deeper.py").write_text(text.replace(layer, deeper))
    pretraining = QUICK_PRETRAINING | HUNT | {"run_root": "pretrained", "script": "omg_deeper"}
    folder, _ = run_script(tmp_path, ROOT / "pretrain_cvae.py", **pretraining)
    file = folder / "vae.pt"
    saved = checkpoints.read(file)
    assert saved["algorithm"] == "omg_deeper" and saved["networks"]["model"]["fc1.2.weight"].shape == (64, 64)
    with_file, output = run_script(tmp_path, "omg_deeper.py", **QUICK, **HUNT, run_root="runs", vae=file)
    assert "Pre-training" not in output
    by_itself, output = run_script(tmp_path, "omg_deeper.py", **QUICK, **QUICK_MODEL, **HUNT, run_root="others")
    assert "Pre-training" in output
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMG_SCRIPTS", "omg_deeper.py")
    for folder in (with_file, by_itself):
        found = json.loads((folder / "results.json").read_text())
        assert found["complete"] and found["algorithm"] == "omg_deeper" and found["updates"] > 0
        runner = load_runner(folder, envs.make("stag_hunt_4x4", num_envs=4))
        assert len(runner.player.learner.model.fc1) == 3 and runner.play().returns.shape == (4, 1)


def test_copies_of_the_target_network_come_with_the_newest_inference_model():
    env = env_spec()
    learner, batch = make_learner(env, tau=0.0, target_interval=2), long_batch(env)
    learner.learn(SimpleNamespace(sample=lambda updates, size: iter([batch] * updates)), 2)
    for averaged, newest in (
        (learner.target_parameters, learner.parameters),
        (learner.target_model_parameters, learner.model_parameters),
    ):
        assert all(map(torch.equal, averaged, newest))

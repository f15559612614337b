"""What naive_om_iql.py, liam_iql.py and omg_iql.py have in common: losses against plain loops, masks, whole runs.

And that each opponent model is of use. What is OMG's alone is in test_omg.py.
"""

import json
import signal
import sys
from dataclasses import asdict

import numpy as np
import pytest
import reference
import torch
from helpers import MODEL_SCRIPTS, NOT_TRAINED, SCRIPTS, stopped, train, write_run
from reference import (
    CPU,
    NO_LOG,
    assert_unchanged,
    corrupt,
    env_spec,
    gradients,
    make_runner,
    random_batch,
    random_learner,
)

import envs
from omg_iql import Pretraining
from training import checkpoints, play
from training.episodes import EpisodeRunner, load_runner
from training.graphs import Graphed
from training.run import Run, seed_for
from training.team import Team

pytestmark = pytest.mark.usefixtures("one_thread")
ALL = pytest.mark.parametrize("name", MODEL_SCRIPTS)
BASELINES = ("naive_om_iql", "liam_iql", "mix_iql", "belief_iql")
PAPER = {"paper": True}
OMG_VARIANTS = (
    {}, {"selector": "value"}, {"subgoal_input": "obs"}, {"subgoal_input": "state"},
    {"predict": "view"}, {"inference_weight": 0.3},
    *(PAPER | options for options in (
        {}, {"subgoal_mode": "conservative"}, {"q_subgoal": "inferred"}, {"q_subgoal": "selected"},
        {"bootstrap_subgoal": "same", "q_subgoal": "selected"}, {"bootstrap_subgoal": "same"}, {"mix": "kl-target"},
        {"td_lambda": 0.0}, {"horizon": 12}, {"dueling": True}, {"predict": "features"},
    )),
)  # fmt: skip
VARIANTS = [(name, options) for name in BASELINES for options in ({}, {"dueling": True, "td_lambda": 0.0})]
VARIANTS += [("mix_iql", {"gate": "expert", "q_gradient": False, "steps_ahead": 1, "temperature": 1.0})]
VARIANTS += [("omg_iql", options) for options in OMG_VARIANTS]
KINDS_OF_REWARDS = {"team reward": {}, "own rewards": {"team_reward": False, "ego_first": True}}
REWARDS = pytest.mark.parametrize("rewards", KINDS_OF_REWARDS)
CASES = [  # the published variants with one kind of rewards each
    (name, options, rewards)
    for number, (name, options) in enumerate(VARIANTS)
    for rewards in ([*KINDS_OF_REWARDS][number % 2 :][:1] if "paper" in options else KINDS_OF_REWARDS)
]
GARBAGE = pytest.mark.parametrize("garbage", [float("nan"), 1e30])


# ---- losses ----
def assert_losses_equal_plain_loops(name, learner, batch):
    expected = reference.plain_losses(name, learner, batch)
    td, model = reference.losses(learner, batch)
    assert td.item() == pytest.approx(expected["td"], rel=1e-4)
    assert model.item() == pytest.approx(expected["model"], rel=1e-4)
    return expected


@pytest.mark.usefixtures("samples_are_means")
@pytest.mark.parametrize(("name", "options", "rewards"), CASES, ids=str)
def test_losses_equal_plain_loops(name, options, rewards):
    env = env_spec(**KINDS_OF_REWARDS[rewards])
    learner, batch = random_learner(name, env, **options), random_batch(env)
    expected = assert_losses_equal_plain_loops(name, learner, batch)
    if name == "omg_iql":
        _, logs = reference.loss_of(learner, batch)
        found = {key: logs[f"omg/{key}"].item() for key in ("recon", "kl")}
    else:
        episodes = batch | {"policy_id": torch.arange(len(batch["lengths"]))}
        logs = sys.modules[type(learner).__module__].analyse(learner, episodes)
        found = {"correct": logs["action_accuracy"]}
        keys = ("obs_error", "state_error", "return_loss", "policy_accuracy")
        found |= {key: logs[key] for key in keys if key in logs}
        assert 0 < expected["correct"] < 1
    for key, value in found.items():
        assert value == pytest.approx(expected[key], rel=1e-4)


@pytest.mark.slow
def test_plain_losses_of_variants_differ():
    env = env_spec()
    batch = random_batch(env, (8,), ((1, 2),), [(0, 2, 5)])
    found = [
        reference.plain_losses("omg_iql", random_learner("omg_iql", env, **options), batch) for options in OMG_VARIANTS
    ]
    assert len({round(losses["td"], 4) for losses in found}) >= 8
    assert len({round(losses["model"], 4) for losses in found}) >= 9


@pytest.mark.usefixtures("samples_are_means")
@ALL
@pytest.mark.parametrize("ego_first", [False, True])
def test_losses_of_each_seat(name, ego_first):
    """One match with the learner in each seat: the order of the others and the learner's own rows."""
    env = env_spec(n_agents=4, ego_first=ego_first)
    learner, found = random_learner(name, env), set()
    for seat in range(4):
        batch = random_batch(env, (6,), ((seat,),), [(0, seat, 4), (0, (seat + 1) % 4, 2)])
        found.add(round(assert_losses_equal_plain_loops(name, learner, batch)["model"], 6))
    assert len(found) == 4


def test_liam_weighs_observations_and_actions_as_its_release():
    """Half of the sum over features, and the cross-entropy, each summed over the others: with outputs of 0 by hand."""
    env = env_spec()
    learner, batch = random_learner("liam_iql", env), random_batch(env, (4,), ((1,),), deaths=())
    with torch.no_grad():
        for weights in (*learner.model.obs_decoder[-1].parameters(), *learner.model.action_decoder[-1].parameters()):
            weights.zero_()
    seen = batch["all_obs"][:4, 0, [0, 2]]
    expected = 0.5 * seen.square().sum((1, 2)).mean() + 2 * np.log(env.n_actions)
    assert reference.losses(learner, batch)[1].item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("gate", ["feature", "expert"])
def test_mix_has_a_weight_for_each_feature_of_the_projected_embeddings(gate):
    agents = random_learner("mix_iql", env_spec(), gate=gate).agents
    embeddings = torch.randn(5, 6, 2, 16)
    mixed, weight = agents.mix(embeddings)
    assert weight.shape == (5, 6, 2, 4, 4 if gate == "feature" else 1) and mixed.shape == (5, 6, 2, 4)
    torch.testing.assert_close(weight.sum(-2), torch.ones_like(weight[..., 0, :]))
    projected = [project(part) for project, part in zip(agents.project, embeddings.chunk(4, -1))]
    with torch.no_grad():  # the gate's bias alone: feature f of expert f, or the third expert
        agents.gate.weight.zero_()
        agents.gate.bias.copy_(1e3 * (torch.eye(4).flatten() if gate == "feature" else torch.eye(4)[2]))
    chosen = [projected[f if gate == "feature" else 2][..., f] for f in range(4)]
    torch.testing.assert_close(agents.mix(embeddings)[0], torch.stack(chosen, -1))
    for project, values in zip(agents.project, projected):  # layer-normalised
        plain = (values - project[1].bias) / project[1].weight
        torch.testing.assert_close(plain.mean(-1), torch.zeros(5, 6, 2), atol=1e-4, rtol=0)


# ---- gradients ----
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"dueling": dueling}) for name in BASELINES[:2] for dueling in (False, True)),
        *(("mix_iql", {"q_gradient": False, "gate": gate}) for gate in ("feature", "expert")),
        *(("belief_iql", {"dueling": dueling, "q_features": 0}) for dueling in (False, True)),
        *(("omg_iql", {"q_gradient": False} | options) for options in (
            {}, {"code": "sample"}, {"q_subgoal": "selected"}, {"inference": "mlp"}, {"mix": "kl-target"},
            {"dueling": True},
        )),
        ("omg_iql", PAPER), ("omg_iql", PAPER | {"predict": "features"}),
    ],
    ids=str,
)  # fmt: skip
def test_each_loss_trains_its_own_network(name, options):
    env = env_spec()
    learner, batch = random_learner(name, env, **options), random_batch(env)
    for probability in (0.5, 0) if name == "omg_iql" else (None,):
        if probability is not None:
            learner.set_mix_probability(probability)
        found = (gradients(learner, batch, which)[1] for which in (0, 1))
        td, model = ({key for key, gradient in part.items() if gradient.any()} for part in found)
        assert td == {f"agents.{key}" for key, _ in learner.agents.named_parameters()}
        assert len(td) == (10 if options.get("dueling") else 8) + 18 * (name == "mix_iql")  # projections and gate
        frozen = "vae." if options.get("paper") else ()
        assert model == {f"model.{key}" for key, _ in learner.model.named_parameters() if not key.startswith(frozen)}


@pytest.mark.parametrize("probability", [0, 0.5, 1])
@pytest.mark.parametrize("code", ["mean", "sample"])
def test_the_td_loss_trains_the_inference_model(code, probability):
    """Not where the selected subgoal is read."""
    env = env_spec()
    learner, batch = random_learner("omg_iql", env, code=code), random_batch(env)
    learner.set_mix_probability(probability)
    found = gradients(learner, batch, 0)[1]
    trained = {key: gradient for key, gradient in found.items() if key.startswith("model.")}
    names = {f"model.{name}" for name, _ in learner.model.named_parameters()}
    assert trained.keys() == {name for name in names if not name.startswith("model.vae.")}
    assert any(gradient.any() for gradient in trained.values()) == (probability < 1)


def test_the_td_loss_trains_the_embeddings_of_mix():
    """Through the gate; not the decoders, nor the target networks."""
    env = env_spec()
    learner, batch = random_learner("mix_iql", env), random_batch(env)
    td = {name for name, gradient in gradients(learner, batch, 0)[1].items() if gradient.any()}
    embedding = {f"model.{name}" for name, _ in learner.model.named_parameters() if name.startswith(("rnn", "fc"))}
    assert td == {f"agents.{name}" for name, _ in learner.agents.named_parameters()} | embedding
    assert len(embedding) == 8


def test_the_td_loss_trains_the_features_of_a_belief():
    """And the memory that they are made of; not the heads that predict."""
    env = env_spec()
    learner, batch = random_learner("belief_iql", env), random_batch(env)
    td, model = (gradients(learner, batch, which)[1] for which in (0, 1))
    names = {f"model.{name}" for name, _ in learner.model.named_parameters()}
    assert {n for n in td if n.startswith("model.")} == {n for n in names if not n.startswith("model.head.")}
    assert set(model) == names
    for name in ("model.fc1.weight", "model.fc1.bias"):  # its first outputs are the features
        features, hidden = td[name].split(learner.model.fc1_widths)
        assert features.any() and not hidden.any()
        features, hidden = model[name].split(learner.model.fc1_widths)
        assert hidden.any() and not features.any()


@ALL
def test_an_update_trains_both_networks_and_the_target_network_follows(name):
    env = env_spec()
    learner, batch = random_learner(name, env), random_batch(env)

    def weights():
        networks = learner.networks()
        if name == "omg_iql":
            networks["vae"] = learner.model.vae
        return {
            key: torch.cat([p.detach().flatten() for p in network.parameters()]) for key, network in networks.items()
        }

    before = weights()
    learner.update(batch)
    after = weights()
    assert (before["agents"] != after["agents"]).any() and (before["model"] != after["model"]).any()
    moved = before["target_agents"] + learner.args.tau * (after["agents"] - before["target_agents"])
    torch.testing.assert_close(after["target_agents"], moved)
    assert name != "omg_iql" or (before["vae"] != after["vae"]).any()
    assert learner.metrics.pop()["omg/loss" if name == "omg_iql" else "om/loss"] > 0
    batch["reward"][0, 0, 0] = torch.nan
    learner.update(batch)
    skipped = weights()
    assert torch.equal(skipped["agents"], after["agents"]) and torch.equal(skipped["model"], after["model"])
    with pytest.raises(FloatingPointError, match="losses/td_loss was not finite"):
        learner.metrics.pop()


# ---- masks ----
MASKED = [*((name, {}) for name in MODEL_SCRIPTS)]
MASKED += [("omg_iql", options) for options in ({"mix": "kl-target"}, {"subgoal_input": "state"}, {"inference": "mlp"})]


@GARBAGE
@REWARDS
@pytest.mark.parametrize(("name", "options"), MASKED, ids=str)
def test_what_is_recorded_behind_the_end_of_an_episode_does_not_matter(name, options, rewards, garbage):
    env = env_spec(**KINDS_OF_REWARDS[rewards])
    learner, batch = random_learner(name, env, **options), random_batch(env)
    if name == "omg_iql":
        learner.mix_probability.fill_(0.5)
    rows, corrupted = torch.arange(len(batch["obs"])).unsqueeze(1), dict(batch)
    for key in ("obs", "all_obs", "state", "avail", "alive", "all_alive", "visible_last_action"):
        # recorded after the last step too
        corrupted[key] = corrupt(batch, key, rows > batch["lengths"], garbage)
    for key in ("reward", "action", "all_action", "terminated", "mean", "log_variance"):
        corrupted[key] = corrupt(batch, key, rows >= batch["lengths"], garbage)
    assert_unchanged(learner, batch, corrupted)


@GARBAGE
@ALL
def test_with_own_rewards_nothing_matters_after_an_agent_has_left(name, garbage):
    env = env_spec(team_reward=False)
    learner, batch = random_learner(name, env), random_batch(env)
    if name == "omg_iql":
        learner.mix_probability.fill_(0.5)
    fields = ("obs", "reward", "avail", "mean", "log_variance")
    assert_unchanged(learner, batch, batch | {key: corrupt(batch, key, ~batch["alive"], garbage) for key in fields})


@ALL
def test_a_dead_learner_counts_in_the_teams_td_loss_but_not_in_the_models(name):
    env = env_spec()
    options = {"q_subgoal": "inferred"} if name == "omg_iql" else {}
    learner, batch = random_learner(name, env, **options), random_batch(env, (6,), ((1,),), [(0, 1, 3)])
    fields = ("obs", "reward", "avail")
    corrupted = batch | {key: corrupt(batch, key, ~batch["alive"], 7.0) for key in fields}
    assert_unchanged(learner, batch, corrupted, which=[1])
    assert gradients(learner, batch, 0)[0] != pytest.approx(gradients(learner, corrupted, 0)[0], rel=1e-3)


@GARBAGE
@pytest.mark.parametrize("name", BASELINES)
def test_actions_and_observations_of_dead_others_are_no_targets(name, garbage):
    env = env_spec()
    deaths = [(0, 0, 3), (1, 0, 2), (2, 1, 1), (3, 1, 4)]
    learner, batch = random_learner(name, env), random_batch(env, seats=((1,), (2,), (0,), (2,)), deaths=deaths)
    fields = ("all_obs", "all_action")
    assert_unchanged(learner, batch, batch | {key: corrupt(batch, key, ~batch["all_alive"], garbage) for key in fields})
    of_living = batch | {"all_action": corrupt(batch, "all_action", batch["all_alive"], garbage)}
    assert gradients(learner, batch, 1)[0] != gradients(learner, of_living, 1)[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")
@pytest.mark.parametrize(
    ("name", "mix_probability"), [*((name, None) for name in BASELINES), ("omg_iql", 0.5), ("omg_iql", 0.0)]
)
def test_a_second_stream_changes_no_weight(name, mix_probability):
    env, weights = env_spec(device=torch.device("cuda")), []
    batch = random_batch(env, [40] * 64, [[0, 1]] * 64, deaths=())
    batch = {key: values.to(env.device) for key, values in batch.items()}
    for streams in (1, 2):
        learner = random_learner(name, env, cuda=True, hidden_dim=64)
        if mix_probability is not None:
            learner.set_mix_probability(mix_probability)
        assert learner.side_stream.stream is not None
        if streams == 1:
            learner.side_stream.stream = None
        update = Graphed(learner.update, env.device)
        for _ in range(20):  # the first as it is, the others as a graph
            update(batch)
        weights.append([*learner.parameters, *learner.target_parameters, *learner.model_parameters])
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if name == "omg_iql" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(*weights, **tolerance)


# ---- acting and learning compute the same ----
@pytest.mark.usefixtures("samples_are_means")
@ALL
@pytest.mark.parametrize(
    ("env_id", "team"),
    [
        pytest.param("8m", "scripted", marks=pytest.mark.slow),
        ("stag_hunt_4x4", "2NS2learner"),
        pytest.param("stag_hunt_4x4", "self", marks=pytest.mark.slow),
    ],
)
def test_the_loss_unrolls_what_was_played(name, env_id, team):
    """The Q-values of the loss are those of acting, by way of recorded episodes, buffer and batch."""
    options = {"q_subgoal": "inferred"} if name == "omg_iql" else {}
    if (name, team) == ("belief_iql", "self"):
        team = "1NS3learner"  # it needs somebody else
    learner, runner = make_runner(name, env_id, team, batch_size=6, buffer_size=6, **options)
    acted, unrolled = [], []
    for _ in range(2):  # nothing is left of the round before
        acted.clear()
        handle = learner.agents.register_forward_hook(lambda _, inputs, outputs: acted.append(outputs[0][0].clone()))
        episodes = runner.play(0.3)
        handle.remove()
    buffer = SCRIPTS[name].ReplayBuffer(learner.args, runner.episodes, CPU)
    buffer.add(episodes)
    hook = learner.agents.register_forward_hook(lambda _, inputs, outputs: unrolled.append(outputs[0].detach().clone()))
    learner.learn(buffer, 1)
    hook.remove()
    q = next(outputs for outputs in unrolled if len(outputs) > 1)  # OMG's bootstrap makes single steps
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed_for(learner.args.seed, "buffer")))
    for place, match in enumerate(order.tolist()):
        length = int(episodes.lengths[match])
        expected = torch.stack([step[match] for step in acted[:length]])
        torch.testing.assert_close(q[:length, place], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("samples_are_means")
@ALL
def test_a_loaded_run_plays_as_it_did_when_it_was_saved(name, tmp_path):
    """Greedily, with the target network: as in an evaluation, match after match."""
    learner, runner = make_runner(name, "stag_hunt_4x4", "2NS2learner", seat="0")
    with torch.no_grad():
        for network in (learner.target_agents, learner.model):
            for weights in network.parameters():
                weights.mul_(3)
    runner.player = SCRIPTS[name].Player(learner, learner.target_agents, runner.team.learner_seats)
    content = {"algorithm": name, "env_id": "stag_hunt_4x4", "sizes": checkpoints.env_sizes(runner.env)}
    content["networks"] = {key: network.state_dict() for key, network in learner.networks().items()}
    torch.save({**content, "args": asdict(learner.args), **NOT_TRAINED}, tmp_path / "checkpoint.pt")
    env = envs.make("stag_hunt_4x4", num_envs=6)
    loaded, used = load_runner(tmp_path, env), set()
    for episode in range(2):
        runner.env.reset(seed=episode)
        env.reset(seed=episode)
        runner.play(0.0)
        obs, info = env.reset()
        for t in range(int(runner.lengths.max())):
            running = t < runner.lengths
            assert (runner.episodes["obs"][t] == obs[:, :2])[running].all()
            actions = loaded.policy(obs, info)
            assert (actions == runner.episodes["all_action"][t])[running].all()
            used |= set(actions[:, :2].flatten().tolist())
            obs, *_, info = env.step(actions)
    assert len(used) > 1
    other = envs.make("stag_hunt_4x4", num_envs=2)
    returns = load_runner(tmp_path, other, Team(other, "3NH1learner")).play().returns
    assert returns.shape == (2, 1)
    for env_id in ("3m", "8m"):
        with pytest.raises(ValueError, match=f"is of stag_hunt_4x4 .*; this is {env_id}"):
            load_runner(tmp_path, envs.make(env_id), Team(envs.make(env_id)))


@ALL
def test_the_others_never_learn(name, tmp_path):
    write_run(tmp_path / "iql", "iql", envs.make("stag_hunt_4x4"))
    options = {"pool": (str(tmp_path / "iql"),), "batch_size": 6, "buffer_size": 6}
    learner, runner = make_runner(name, "stag_hunt_4x4", "3iql1learner", **options)
    layers = runner.team.networks.layers
    before = {key: [weights.clone() for weights in layer] for key, layer in layers.items()}
    episodes = runner.play(0.3)
    buffer = SCRIPTS[name].ReplayBuffer(learner.args, runner.episodes, CPU)
    buffer.add(episodes)
    own = learner.agents.fc2.weight.detach().clone()
    learner.learn(buffer, 3)
    assert layers and (learner.agents.fc2.weight != own).any()
    for key, layer in layers.items():
        assert all(torch.equal(new, old) and not new.requires_grad for new, old in zip(layer, before[key]))


# ---- metrics ----
@pytest.mark.parametrize("name", BASELINES)
def test_metrics_of_the_last_round(name):
    learner, runner = make_runner(name, "stag_hunt_4x4", "3NH1learner")
    runner.play(0.0)
    episodes = runner.selection(slice(5))
    metrics = runner.player.analyse(episodes)
    expected = reference.plain_losses(name, learner, episodes)
    assert metrics["action_accuracy"] == pytest.approx(expected["correct"], abs=1e-6) and "swap_same" in metrics
    for key in ("obs_error", "policy_accuracy"):
        assert metrics.get(key) == (pytest.approx(expected[key], rel=1e-4) if key in expected else None)
    assert "swap_same" not in runner.player.analyse(runner.selection(slice(1)))
    with torch.no_grad():  # a Q-network that ignores what is inferred
        inferred = learner.agents.fc1.in_features - runner.env.obs_dim - runner.env.n_actions - runner.env.n_agents
        learner.target_agents.fc1.weight[:, -inferred:] = 0
    assert runner.player.analyse(episodes)["swap_same"] == 0


# ---- whole runs ----
def results(folder):
    return json.loads((folder / "results.json").read_text())


RUN = {"env_id": "stag_hunt_4x4", "total_timesteps": 800}


def options_of(name):
    return RUN | ({"mix": "kl-target", "mix_fraction": 1.0, "latent_dim": 8} if name == "omg_iql" else {})


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A complete run of each script, made once: the names that it had at the end."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = train(name, tmp_path_factory.mktemp(name), **options_of(name))
        return made[name]

    return get


def assert_same_runs(one, other):
    """Bit by bit: everything that was learned, and every evaluation."""
    first, second = (checkpoints.read_run(folder)["networks"] for folder in (one, other))
    assert first.keys() == second.keys()
    for name, weights in first.items():
        for key, values in weights.items():
            assert torch.equal(values, second[name][key]), (name, key)
    first, second = results(one), results(other)
    metrics = "omg" if "omg" in first else "om"
    for key in ("final", metrics, "steps", "episodes", "updates"):
        assert first[key] == second[key]
    evaluations = [
        [(e["steps"], e["win_rate"], e["episodic_return"]) for e in found["evals"]] for found in (first, second)
    ]
    assert evaluations[0] == evaluations[1] != []


@ALL
@pytest.mark.slow
def test_a_run_on_3m_with_8_agents_with_a_video(name, tmp_path):
    episodes = {"eval_episodes": 8, "final_eval_episodes": 8}
    folder = train(name, tmp_path, env_id="3m", n_agents=8, capture_video=True, **episodes)["run"].folder
    found = results(folder)
    metrics = found["omg" if name == "omg_iql" else "om"]
    assert found["complete"] and found["final"]["episodes"] == 8 and found["updates"] > 0
    assert {"swap_same", "swap_other"} & metrics.keys()
    if name == "omg_iql":
        assert 0 <= metrics["hit_ratio"] <= 1 and {"teammate_probe", "next_action_probe"} <= metrics.keys()
    else:
        assert 0 < metrics["action_accuracy"] < 1
        assert ("obs_error" in metrics) == (name in ("liam_iql", "mix_iql"))
    assert (folder / "match.gif").stat().st_size > 0 and not (folder / "resume.pt").exists()
    play.main(play.Args(policy=str(folder), out=tmp_path / "match.gif"))  # the environment is the run's
    assert (tmp_path / "match.gif").stat().st_size > 0
    env = envs.make("3m", n_agents=8)
    act, goals, seats = play.load_policy(str(folder), env)
    act(*env.reset(seed=0))
    assert len(seats()) == 1 and seats()[0] in range(8)
    assert bool(goals()) == (name == "omg_iql")
    assert all(len(goal) == 3 and np.isfinite(goal).all() for goal in goals())
    with pytest.raises(ValueError, match="is of 3m"):
        play.load_policy(str(folder), envs.make("3m"))


OTHER_OPTIONS = [
    {"env_id": "MMM", "dueling": True, "seat": "random", "mix_teammates": True, "buffer_device": "cpu"},
    {"env_id": "stag_hunt_4x4", "team": "self", "td_lambda": 0.0, "save_buffer": False},
]
OMG_OPTIONS = [
    OTHER_OPTIONS[0] | {"subgoal_input": "state", "selector": "random", "predict": "features"},
    OTHER_OPTIONS[1] | {"selector": "3", "q_subgoal": "inferred", "horizon": 1},
    {"env_id": "3m", "n_agents": 8, "team": "6nearest2omg", "inference": "mlp", "selector": "next"}
    | {"q_subgoal": "selected", "bootstrap_subgoal": "same", "oracle": True},
    {"env_id": "stag_hunt_4x4", "seat": "2", "mix_start": 1.0, "mix_fraction": 1.0}
    | {"paper": True, "subgoal_mode": "conservative"},
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, options) for name in BASELINES[:-1] for options in OTHER_OPTIONS),
        *(("belief_iql", {**options, "team": "scripted", "matches_per_partner": 2}) for options in OTHER_OPTIONS),
        *(("omg_iql", options) for options in OMG_OPTIONS),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("team", value["env_id"]),
)
@pytest.mark.slow
def test_runs_with_other_options(name, options, tmp_path):
    found = results(train(name, tmp_path, **options)["run"].folder)
    assert found["complete"] and found["steps"] >= 400 and np.isfinite(found["final"]["episodic_return"])
    if name == "omg_iql":
        assert ("hit_ratio" in found["omg"]) == (options.get("subgoal_input") != "state")


@ALL
@pytest.mark.slow
def test_a_run_among_earlier_runs(name, tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "pool" / str(seed), "iql", envs.make("stag_hunt_4x4"), seed=seed)
    learner = name.removesuffix("_iql")
    options = {"team": f"3iql1{learner}", "pool": tmp_path / "pool" / "*", "teammate_epsilon": 0.1}
    folder = train(name, tmp_path / "runs", env_id="stag_hunt_4x4", mix_teammates=True, **options)["run"].folder
    assert results(folder)["complete"]
    assert name != "omg_iql" or "teammate_probe" in results(folder)["omg"]
    play.main(play.Args("stag_hunt_4x4", policy=str(folder), episodes=2, out=tmp_path / "match.html"))


@ALL
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")
def test_a_run_on_the_gpu_is_captured_and_repeats_exactly(name, tmp_path):
    options = {"env_id": "stag_hunt_4x4", "cuda": True, "total_timesteps": 1500, "final_eval_episodes": 16}
    one, other = (train(name, tmp_path / folder, **options)["run"].folder for folder in ("a", "b"))
    assert results(one)["complete"] and results(one)["args"]["cuda"]
    assert results(one)["final"] == results(other)["final"]


@pytest.mark.slow
@ALL
def test_a_run_repeats_exactly_also_if_it_is_stopped_and_resumed(name, complete, tmp_path, monkeypatch):
    expected, options = complete(name)["run"].folder, options_of(name)
    assert_same_runs(expected, train(name, tmp_path / "again", **options)["run"].folder)
    count = Run.count
    with monkeypatch.context() as patch:  # a signal in each round
        patch.setattr(Run, "count", lambda *values: count(*values) or signal.raise_signal(signal.SIGTERM))
        folder = stopped(name, tmp_path, time_limit=1e6, **options)
        steps = [checkpoints.read_run(folder)["progress"]["steps"]]
        assert stopped(name, tmp_path, time_limit=1e6, resume=folder, **options) == folder
        steps.append(checkpoints.read_run(folder)["progress"]["steps"])
    assert 0 < steps[0] < steps[1] < results(expected)["steps"]
    train(name, tmp_path, resume=folder, **options)
    assert_same_runs(expected, folder)
    with pytest.raises(SystemExit, match="is complete"):
        train(name, tmp_path, resume=folder, **options)


@ALL
@pytest.mark.slow
def test_the_online_network_explores_and_the_target_network_plays_greedily(name, complete):
    names = complete(name)
    learner = names["learner"]
    assert names["runner"].player.agents is learner.agents
    assert names["eval_runner"].player.agents is learner.target_agents
    player = load_runner(names["run"].folder, envs.make("stag_hunt_4x4")).player
    assert player.agents is player.learner.target_agents
    assert all(map(torch.equal, player.agents.parameters(), learner.target_agents.parameters()))
    assert not all(map(torch.equal, player.agents.parameters(), learner.agents.parameters()))


@ALL
@pytest.mark.slow
def test_a_run_starts_from_the_networks_of_another(name, complete, tmp_path, capsys):
    first = complete(name)["run"].folder
    capsys.readouterr()
    options = options_of(name) | {"total_timesteps": 200, "init": first}
    rates = {"learning_rate": 1e-9, "model_learning_rate": 1e-9, "tau": 0.0}
    second = train(name, tmp_path, seed=5, **options, **rates)["run"].folder
    assert "Pre-training" not in capsys.readouterr().out
    before, after = checkpoints.read_run(first), checkpoints.read_run(second)
    for network, weights in before["networks"].items():
        for key, values in weights.items():
            torch.testing.assert_close(after["networks"][network][key], values, rtol=0, atol=1e-6)
    assert after["progress"]["steps"] < before["progress"]["steps"]
    for changes, message in (
        ({"env_id": "3m"}, r"is of stag_hunt_4x4 .*; this is 3m"),
        ({"hidden_dim": 8}, r"the agents of a run of .* have other sizes or options"),
        ({"init": tmp_path / "missing"}, r"there is no checkpoint\.pt"),
    ):
        with pytest.raises(SystemExit, match=message):
            train(name, tmp_path / "rejected", **options | changes)


COMMON_ERRORS = [
    ({"model_learning_rate": 0.0}, "--model-learning-rate is above 0"),
    ({"gamma": float("nan")}, "--gamma is from 0 to 1"),
    ({"teammate_epsilon": 2.0}, "--teammate-epsilon is from 0 to 1"),
    ({"checkpoint_interval": -1.0}, "--checkpoint-interval is from 0 up"),
    ({"team": "1learner"}, "--team 1learner: team '1learner' has 1 seats, but 3m has 3"),
    ({"env_id": "stag_hunt_4x4", "n_agents": 1}, "--n-agents is at least 2: there is no other agent to model"),
]
OMG_ERRORS = [
    ({"selector": "best"}, "value, random, next or a number from 1 up, not best"),
    ({"selector": "0"}, "number from 1 up"),
    ({"mix": "kl-target", "q_subgoal": "selected"}, "--q-subgoal is for --mix q-input"),
    ({"subgoal_mode": "conservative"}, "--subgoal-mode is for --selector value"),
    ({"horizon": 0}, "--horizon is above 0"),
    ({"vae_kl_weight": -1.0}, "--vae-kl-weight is from 0 to 1"),
    ({"latent_dim": -1}, "--latent-dim is above 0"),
    ({"pretrain_timesteps": 0}, "--pretrain-timesteps is above 0"),
    ({"mix_start": 1.5}, "--mix-start is from 0 to 1"),
    ({"kl_weight": -1.0}, "--kl-weight is from 0 to 1"),
]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, *error) for name in MODEL_SCRIPTS for error in COMMON_ERRORS),
        *(("omg_iql", *error) for error in OMG_ERRORS),
    ],
)
def test_invalid_arguments_are_rejected(name, options, message):
    args = SCRIPTS[name].Args(**options)
    with pytest.raises(SystemExit, match=message):
        SCRIPTS[name].check_args(args)
        SCRIPTS[name].make_team(args, SCRIPTS[name].make_env(args, 2, CPU, "test"), "test")


# ---- what a model remembers is of use ----
class TwoGoals:
    """Two players walk left or right, each to its goal. Who goes in step 3 where the other is heading earns 1.

    Everyone sees the other's last move except in step 3: it takes memory to know it there.
    """

    name, policies, simulated, team_reward, ego_first = "two_goals", ("left", "right"), True, False, False
    return_scale, about_others = 5.0, torch.ones(9, dtype=torch.bool)
    n_agents, n_actions, obs_dim, state_dim, episode_limit = 2, 2, 9, 1, 6
    matches_per_episode, leaving_ends, sides, default_others = 1, True, None, ()

    def __init__(self, num_envs):
        self.num_envs, self.device, self.t = num_envs, CPU, 0
        self.obs, self.reward = torch.zeros(num_envs, 2, 9), torch.zeros(num_envs, 2)
        self.actions = torch.zeros(num_envs, 2, dtype=torch.long)
        self.terminated, alive = torch.zeros(num_envs, dtype=torch.bool), torch.ones(num_envs, 2, dtype=torch.bool)
        no = torch.zeros_like(self.terminated)
        self.info = {"avail": alive.unsqueeze(-1).expand(-1, -1, 2), "alive": alive, "won": no, "invalid": no}
        self.info["state"] = torch.zeros(num_envs, 1)
        self.visible = torch.ones(num_envs, 2, 2, dtype=torch.bool)

    def look(self):
        self.obs.zero_()
        self.obs[:, :, self.t] = 1
        self.info["state"].fill_(self.t)
        if self.t not in (0, 3):
            self.obs[:, :, 7:] = torch.nn.functional.one_hot(self.actions.flip(1), 2)
        return self.obs

    def reset(self):
        self.t = 0
        self.terminated.fill_(False)
        return self.look(), self.info

    def scripted_actions(self, policy):
        return policy

    def snapshot(self):
        return {}

    def restore(self, snapshot):
        pass

    def step(self, actions):
        self.actions.copy_(actions)
        self.reward.copy_((actions == actions.flip(1)) * (self.t == 3))
        self.t = min(self.t + 1, 6)
        self.terminated.fill_(self.t == 6)
        return self.look(), self.reward, self.terminated, torch.zeros_like(self.terminated), self.info


class WithoutMemory(torch.nn.Module):
    """A recurrent layer whose hidden state is 0 at each step."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x, h):
        steps = x.flatten(0, 1).unsqueeze(0)
        return self.rnn(steps, torch.zeros_like(steps[0])).view_as(x)

    def branch(self, x, h):
        return self.rnn.branch(x, torch.zeros_like(h))


def two_goals(name, **options):
    """(learner, runner, a runner whose other policies play the learner's seat too), without memory in the Q-network."""
    torch.manual_seed(1)
    module = SCRIPTS[name]
    if name != "iql":
        options["model_learning_rate"] = 3e-3
    args = module.Args(num_envs=64, buffer_size=1024, hidden_dim=32, td_lambda=0.0, learning_rate=3e-3, **options)
    env = TwoGoals(64)
    module.check_args(args)
    learner = module.Learner(args, env, *([(0, 1)] if name == "belief_iql" else []))
    for agents in (learner.agents, learner.target_agents):
        agents.rnn = WithoutMemory(agents.rnn)
    runners = []
    for teammates_everywhere in (False, True):
        team = Team(env, seed=1, teammates_everywhere=teammates_everywhere)
        networks = (learner.agents,) if name == "iql" else (learner, learner.agents)
        player = module.Player(*networks, team.learner_seats)
        runners.append(EpisodeRunner(env, team, player, dict.fromkeys((*module.FIELDS, "terminated"))))
    return learner, *runners


def test_metrics_of_an_environment_without_places():
    _, runner, _ = two_goals("omg_iql")
    runner.play(0.0)
    metrics = runner.player.analyse(runner.selection())
    kinds = {f"{name}{end}" for name in ("teammate_probe", "next_action_probe") for end in ("", "_view")}
    assert metrics.keys() == {"active_dims", "noise_share", "usage", "swap_same", "swap_other"} | kinds
    assert metrics["teammate_probe"] > 0.8  # even random weights remember the other's actions, which tell who it is
    assert metrics["teammate_probe"] > metrics["next_action_probe"] > 0.8  # which are asked for in the first step too


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iql", *MODEL_SCRIPTS])
def test_a_q_network_without_memory_acts_on_what_the_model_remembers(name):
    rounds, module = 20, SCRIPTS[name]
    options = {"latent_dim": 8, "horizon": 3, "pretrain_timesteps": 6000, "pretrain_updates": 200}
    learner, runner, stand_in_runner = two_goals(name, **(options if name == "omg_iql" else {}))
    if name == "omg_iql":
        Pretraining(learner.args, learner.model, stand_in_runner).run(NO_LOG)
    buffer = module.ReplayBuffer(learner.args, runner.episodes, CPU)
    for number in range(rounds):
        if name == "omg_iql":
            learner.set_mix_probability(max(0.5 - number / rounds, 0))
        buffer.add(runner.play(epsilon=max(1 - 2 * number / rounds, 0.05)))
        learner.learn(buffer, 8)
    returns, *_ = runner.evaluate(256)
    earned = returns.mean().item()
    assert 0.4 < earned < 0.6 if name == "iql" else earned > 0.95

"""naive_om_iql.py and liam_iql.py: losses against plain loops, masks, runs; and that every opponent model works."""

import contextlib
import difflib
import io
import re
import signal
from dataclasses import asdict

import numpy as np
import pytest
import test_omg as omg
import torch
from scripts import ROOT, load, scramble
from test_omg import one_thread as one_thread
from test_runs import blocks, scalars

import envs
from envs import play
from envs.team import Team, sizes_of

NAMES = ("naive_om_iql", "liam_iql")
BOTH = pytest.mark.parametrize("name", NAMES)
ALL = pytest.mark.parametrize("name", (*NAMES, "omg_iql"))
SCRIPTS = {name: load(name) for name in (*NAMES, "omg_iql", "iql")}
CPU = torch.device("cpu")


def make_learner(name, env, seed=0, **changes):
    torch.manual_seed(seed)
    module = SCRIPTS[name]
    latent = {} if name == "naive_om_iql" else {"latent_dim": 4}
    args = module.Args(**{"hidden_dim": 6, "td_lambda": 0.6, "gamma": 0.9, **latent, **changes})
    module.check(args)
    return scramble(module.Learner(args, env), 0.4)


# ---- the plain version: one match, one seat and one step at a time ----
def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def plain_naive(learner, data, m, place, length, order):
    """At every step: (the probabilities of the others' next actions, their logarithms, nothing rebuilt)."""
    env, inference, h = learner.env, learner.model["inference"], np.zeros(96)
    obs, acted = data["obs"][:, m, place], data["all_action"][:, m]
    for t in range(length + 1):
        done = [omg.one_hot(acted[t - 1, a] if t else -1, env.n_actions) for a in order]
        h = omg.gru(inference.past, np.concatenate((obs[t - 1] if t else np.zeros(env.obs_dim), *done)), h)
        x = np.concatenate((np.maximum(omg.linear(inference.now, obs[t]), 0), h))
        logs = omg.linear(inference.head, np.maximum(omg.linear(inference.encoder, x), 0)).reshape(-1, env.n_actions)
        yield np.exp(log_softmax(logs)).ravel(), log_softmax(logs), None


def plain_liam(learner, data, m, place, length, order):
    """At every step: (the embedding, the logarithms of the others' actions, their observations)."""
    env, inference, h = learner.env, learner.model["inference"], np.zeros(96)
    for t in range(length + 1):
        last = omg.one_hot(data["action"][t - 1, m, place] if t else -1, env.n_actions)
        h = omg.gru(inference.past, np.concatenate((data["obs"][t, m, place], last)), h)
        code = omg.linear(inference.code, h)
        x = np.maximum(omg.linear(inference.decoder, code), 0)
        logs = log_softmax(omg.linear(inference.action_out, x).reshape(-1, env.n_actions))
        yield code, logs, omg.linear(inference.obs_out, x).reshape(-1, env.obs_dim)


def plain_losses(name, learner, batch):
    """(TD loss, model's loss, share of actions that are right, error of observations)"""
    data, errors, crosses, right, gaps = omg.plain(batch), [], [], [], []
    for m, length in enumerate(batch["lengths"].tolist()):
        for place, seat in enumerate(batch["seat"][0, m].tolist()):
            order = omg.order_of(learner.env, seat)
            answers = (plain_naive if name == "naive_om_iql" else plain_liam)(learner, data, m, place, length, order)
            inferred = []
            for t, (code, logs, rebuilt) in enumerate(answers):
                inferred.append(code)
                if t == length or not data["alive"][t, m, place]:
                    continue
                for number, other in enumerate(order[1:]):
                    if data["all_alive"][t, m, other]:
                        action = data["all_action"][t, m, other]
                        crosses.append(-logs[number, action])
                        right.append(np.argmax(logs[number]) == action)
                        if rebuilt is not None:
                            gaps.append(np.mean((rebuilt[number] - data["all_obs"][t, m, other]) ** 2))
            errors += omg.td_errors(learner, data, m, place, inferred)
    gap = np.mean(gaps) if gaps else 0.0
    return np.mean(np.square(errors)), np.mean(crosses) + gap, np.mean(right), gap


WORLDS = pytest.mark.parametrize("world", [{}, {"team_reward": False, "ego_first": True}], ids=["battle", "hunt"])


@BOTH
@WORLDS
@pytest.mark.parametrize("changes", [{}, {"dueling": True, "td_lambda": 0.0}], ids=str)
def test_the_losses_are_those_of_a_plain_loop(name, world, changes):
    env = omg.sizes(**world)
    learner, batch = make_learner(name, env, **changes), omg.episodes(env, omg.LENGTHS, omg.SEATS, omg.DEATHS)
    td, model, right, gap = plain_losses(name, learner, batch)
    loss, model_loss, _ = learner.loss(batch)
    assert loss.item() == pytest.approx(td, rel=1e-4) and model_loss.item() == pytest.approx(model, rel=1e-4)
    _, _, numbers = learner.model_loss(batch, *learner.inputs(batch))
    assert 0 < right < 1 and numbers["action_accuracy"].item() == pytest.approx(right)
    assert name == "naive_om_iql" or numbers["obs_error"].item() == pytest.approx(gap, rel=1e-4)


@BOTH
@pytest.mark.parametrize("ego_first", [False, True])
def test_learner_seat_by_seat(name, ego_first):
    """One match, the learner in each seat: the order of the others and the seat's own rows."""
    env = omg.sizes(n_agents=4, ego_first=ego_first)
    learner, losses = make_learner(name, env), set()
    for seat in range(4):
        batch = omg.episodes(env, (6,), ((seat,),), [(0, seat, 4), (0, (seat + 1) % 4, 2)])
        td, model, *_ = plain_losses(name, learner, batch)
        loss, model_loss, _ = learner.loss(batch)
        assert loss.item() == pytest.approx(td, rel=1e-4) and model_loss.item() == pytest.approx(model, rel=1e-4)
        losses.add(round(model, 6))
    assert len(losses) == 4


# ---- gradients, and what does not count ----
@BOTH
@pytest.mark.parametrize("dueling", [False, True])
def test_each_loss_teaches_its_own_network(name, dueling):
    env = omg.sizes()
    learner, batch = make_learner(name, env, dueling=dueling), omg.episodes(env, omg.LENGTHS, omg.SEATS, omg.DEATHS)
    found = [omg.gradients(learner, batch, which)[1] for which in (0, 1)]
    assert {key.split(".")[0] for key in found[0]} == {"agents"}
    assert {key.split(".")[0] for key in found[1]} == {"inference"}
    assert len(found[0]) == len(list(learner.online["agents"].parameters())) == (10 if dueling else 8)
    assert len(found[1]) == len(list(learner.model["inference"].parameters()))


@BOTH
def test_an_update_moves_both_and_the_target_follows(name):
    env = omg.sizes()
    learner, batch = make_learner(name, env), omg.episodes(env, omg.LENGTHS, omg.SEATS, omg.DEATHS)

    def numbers():
        networks = {**learner.online, **learner.model, "target": learner.target["agents"]}
        return {
            key: torch.cat([w.detach().flatten() for w in network.parameters()]) for key, network in networks.items()
        }

    before = numbers()
    learner.update(batch)
    after = numbers()
    assert (before["agents"] != after["agents"]).any() and (before["inference"] != after["inference"]).any()
    moved = before["target"] + learner.args.tau * (after["agents"] - before["target"])
    torch.testing.assert_close(after["target"], moved)
    assert learner.report()["model_loss"] > 0
    batch["reward"][0, 0, 0] = torch.nan
    learner.update(batch)
    same = numbers()
    assert (same["agents"] == after["agents"]).all() and (same["inference"] == after["inference"]).all()
    with pytest.raises(FloatingPointError, match="the loss was not finite"):
        learner.report()


@BOTH
@WORLDS
@pytest.mark.parametrize("garbage", omg.GARBAGE)
def test_padding_does_not_count(name, world, garbage):
    env = omg.sizes(**world)
    learner, batch = make_learner(name, env), omg.episodes(env, omg.LENGTHS, omg.SEATS, omg.DEATHS)
    spoiled, rows = dict(batch), torch.arange(len(batch["obs"])).unsqueeze(1)
    for key in ("obs", "all_obs", "avail", "alive", "all_alive"):  # known up to the state after the last step
        omg.spoil(spoiled, key, rows > batch["lengths"], garbage)
    for key in ("reward", "action", "all_action", "terminated"):
        omg.spoil(spoiled, key, rows >= batch["lengths"], garbage)
    omg.unchanged(None, learner, batch, spoiled)


@BOTH
@pytest.mark.parametrize("garbage", omg.GARBAGE)
def test_after_an_agent_has_left_nothing_counts_where_rewards_are_its_own(name, garbage):
    env = omg.sizes(team_reward=False)
    learner, batch = make_learner(name, env), omg.episodes(env, omg.LENGTHS, omg.SEATS, omg.DEATHS)
    spoiled = dict(batch)
    for key in ("obs", "reward", "avail"):
        omg.spoil(spoiled, key, ~batch["alive"], garbage)
    omg.unchanged(None, learner, batch, spoiled)


@BOTH
@pytest.mark.parametrize("garbage", omg.GARBAGE)
def test_what_dead_others_do_and_see_is_no_target(name, garbage):
    env = omg.sizes()
    deaths = [(0, 0, 3), (1, 0, 2), (2, 1, 1), (3, 1, 4)]
    learner, batch = make_learner(name, env), omg.episodes(env, omg.LENGTHS, ((1,), (2,), (0,), (2,)), deaths)
    infer = getattr(learner, "infer", None)
    if infer:  # what they did is a part of the past, which is as it was: only the targets are spoiled
        learner.infer = lambda obs, everybody, seat: infer(obs, batch["all_action"][:-1], seat)
    spoiled = dict(batch)
    for key in ("all_obs", "all_action"):
        omg.spoil(spoiled, key, ~batch["all_alive"], garbage)
    omg.unchanged(None, learner, batch, spoiled)
    alive = dict(batch)
    omg.spoil(alive, "all_action", batch["all_alive"], garbage)
    assert omg.gradients(learner, batch, 1)[0] != omg.gradients(learner, alive, 1)[0]


@BOTH
def test_a_dead_learner_leaves_the_models_loss_and_stays_in_the_teams(name):
    env = omg.sizes()
    learner, batch = make_learner(name, env), omg.episodes(env, (6,), ((1,),), [(0, 1, 3)])
    spoiled = dict(batch)
    for key in ("obs", "reward", "avail"):
        omg.spoil(spoiled, key, ~batch["alive"], 7.0)
    omg.unchanged(None, learner, batch, spoiled, which=[1])
    assert omg.gradients(learner, batch, 0)[0] != pytest.approx(omg.gradients(learner, spoiled, 0)[0], rel=1e-3)


# ---- acting and learning go through the same computations ----
def make_rollout(name, env_id, team, num_envs=6, seed=1, **changes):
    torch.manual_seed(seed)
    module = SCRIPTS[name]
    args = module.Args(env_id=env_id, team=team, num_envs=num_envs, hidden_dim=16, **changes)
    env = module.make_env(args, num_envs, CPU, seed)
    learner = module.Learner(args, env)
    with torch.no_grad():
        for network in (learner.online["agents"], learner.model["inference"]):
            for weights in network.parameters():
                weights.mul_(2)
    networks = learner.online["agents"], learner.model["inference"]
    kept = (*module.SEEN, "terminated")
    return learner, module.Rollout(env, *networks, kept, module.make_team(args, env, seed))


@BOTH
@pytest.mark.parametrize(
    ("env_id", "team"), [("8m", None), ("stag_hunt_4x4", "2NS2learner"), ("stag_hunt_4x4", "self")]
)
def test_the_loss_unrolls_what_was_played(name, env_id, team):
    """Q of the loss is Q of acting: the whole way through story, buffer and batch."""
    learner, rollout = make_rollout(name, env_id, team, batch_size=6, buffer_size=6)
    agents, acted, unrolled = learner.online["agents"], [], []
    for _ in range(2):  # nothing is left of the round before
        acted.clear()
        handle = agents.register_forward_hook(lambda _, inputs, outputs: acted.append(outputs[0][0].clone()))
        _, lengths, _, valid = rollout.play(0.3)
        handle.remove()
    with contextlib.redirect_stdout(io.StringIO()):
        buffer = SCRIPTS[name].Buffer(rollout.story, 6, CPU, 0)
    buffer.add(rollout.story, lengths, valid)
    handle = agents.register_forward_hook(lambda _, inputs, outputs: unrolled.append(outputs[0].detach().clone()))
    learner.learn(buffer, 1)
    handle.remove()
    order = torch.arange(6)[torch.randperm(6, generator=torch.Generator().manual_seed(0))]
    for place, match in enumerate(order.tolist()):
        length = int(lengths[match])
        mine = torch.stack([step[match] for step in acted[:length]])
        torch.testing.assert_close(mine, unrolled[0][:length, place], rtol=1e-4, atol=1e-5)


@BOTH
def test_a_saved_policy_plays_as_the_run_did(name, tmp_path):
    learner, rollout = make_rollout(name, "stag_hunt_4x4", "2NS2learner", seat="0")
    with torch.no_grad():
        for weights in learner.target["agents"].parameters():
            weights.mul_(3)
    rollout.agents = learner.target["agents"]
    about = {"env_id": "stag_hunt_4x4", "sizes": sizes_of(rollout.env), "args": asdict(learner.args)}
    saved = {
        which: {n: x.state_dict() for n, x in getattr(learner, which).items()}
        for which in ("online", "target", "model")
    }
    torch.save({**about, **saved}, tmp_path / "checkpoint.pt")
    env = SCRIPTS[name].make_env(learner.args, 6, CPU, 1)
    act, used = SCRIPTS[name].load_policy(tmp_path, env), set()
    for episode in range(3):
        rollout.env._seed = episode
        rollout.env._started = False  # so that the next reset goes by the seed
        rollout.play(0.0)
        obs, info = env.reset(seed=episode)
        for t in range(int(rollout.lengths.max())):
            running = t < rollout.lengths
            actions = act(obs, info)
            assert (actions == rollout.story["all_action"][t])[running].all()
            used |= set(actions[:, :2].flatten().tolist())
            obs, *_, info = env.step(actions)
    assert len(used) > 1
    other = envs.make("stag_hunt_4x4", num_envs=2)
    args, _, again = SCRIPTS[name].load_rollout(tmp_path, other, Team(other, "3NH1learner", ("learner",)))
    returns, *_ = again.play(epsilon=0.0)
    assert args.team == "2NS2learner" and returns.shape == (2, 1)
    for wrong in ("3m", "8m"):
        with pytest.raises(ValueError, match=f"is of stag_hunt_4x4 .*; this is {wrong}"):
            SCRIPTS[name].load_policy(tmp_path, envs.make(wrong))


@ALL
def test_the_others_never_learn(name, tmp_path):
    iql, env = SCRIPTS["iql"], envs.make("stag_hunt_4x4")
    args = iql.Args(hidden_dim=16)
    about = {"algorithm": "iql", "env_id": "stag_hunt_4x4", "sizes": sizes_of(env), "args": asdict(args)}
    torch.save({**about, "target": {"agents": iql.make_agents(args, env).state_dict()}}, tmp_path / "checkpoint.pt")
    options = {"pool": (str(tmp_path),), "batch_size": 6, "buffer_size": 6}
    learner, rollout = make_rollout(name, "stag_hunt_4x4", "3iql1learner", **options)
    before = {key: [x.clone() for x in layer] for key, layer in rollout.team.networks.layers.items()}
    _, lengths, _, valid = rollout.play(0.3)
    with contextlib.redirect_stdout(io.StringIO()):
        buffer = SCRIPTS[name].Buffer(rollout.story, 6, CPU, 0)
    buffer.add(rollout.story, lengths, valid)
    mine = learner.online["agents"].out.weight.detach().clone()
    learner.learn(buffer, 3)
    assert (learner.online["agents"].out.weight != mine).any()
    for key, layer in rollout.team.networks.layers.items():
        assert all(torch.equal(new, old) and not new.requires_grad for new, old in zip(layer, before[key]))


# ---- measures ----
@BOTH
def test_analysis_measures_the_round_just_played(name):
    learner, rollout = make_rollout(name, "stag_hunt_4x4", "3NH1learner")
    rollout.play(0.0)
    found = SCRIPTS[name].analyse(learner.args, learner, rollout, matches=5)
    data = {key: values[:, :5] for key, values in rollout.story.items()} | {"lengths": rollout.lengths[:5]}
    _, _, right, gap = plain_losses(name, learner, data)
    assert found["action_accuracy"] == pytest.approx(right, abs=1e-6) and found["q_sensitivity"] > 0
    assert found.get("obs_error", 0.0) == pytest.approx(gap, rel=1e-4)
    assert "q_sensitivity" not in SCRIPTS[name].analyse(learner.args, learner, rollout, matches=1)
    with torch.no_grad():  # a Q-network that does not listen
        learner.target["agents"].into.weight[:, -learner.model["inference"].past.hidden_size :] = 0
        extra = learner.target["agents"].into.in_features - rollout.env.obs_dim - rollout.env.n_actions - 4
        learner.target["agents"].into.weight[:, -extra:] = 0
    assert SCRIPTS[name].analyse(learner.args, learner, rollout)["q_sensitivity"] == 0


# ---- whole runs ----
@BOTH
def test_a_run_on_3m_with_8_agents_is_filmed_and_can_be_watched(name, tmp_path):
    folder = omg.run(tmp_path, "--env-id", "3m", "--n-agents", "8", "--capture-video", script=name)
    report = omg.results(folder)
    assert report["complete"] and report["final"]["episodes"] == 8 and report["updates"] > 0
    assert 0 < report["om"]["action_accuracy"] < 1 and report["om"]["q_sensitivity"] > 0
    assert ("obs_error" in report["om"]) == (name == "liam_iql")
    assert (folder / "match.gif").stat().st_size > 0 and not (folder / "resume.pt").exists()
    play.main(play.Args("3m", policy=str(folder), n_agents=8, out=tmp_path / "match.gif"))
    with pytest.raises(ValueError, match="is of 3m"):
        play.policy_of(str(folder), envs.make("3m"))


@BOTH
@pytest.mark.parametrize(
    "arguments",
    [
        "--env-id MMM --dueling",
        "--env-id stag_hunt_4x4 --seat random --mix-teammates --buffer-device cpu --no-save-buffer",
        "--env-id stag_hunt_4x4 --team self --td-lambda 0",
        "--env-id 3m --n-agents 8 --team 6nearest2{learner}",
    ],
)
def test_runs_with_other_choices(name, arguments, tmp_path):
    learner = {"naive_om_iql": "naive_om", "liam_iql": "liam"}[name]
    report = omg.results(omg.run(tmp_path, *arguments.format(learner=learner).split(), script=name))
    assert report["complete"] and report["steps"] >= 400 and np.isfinite(report["final"]["episodic_return"])


@ALL
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")
def test_a_run_on_the_gpu_is_captured_and_the_same_again(name, tmp_path):
    setting = ("--env-id", "stag_hunt_4x4", "--cuda", "--total-timesteps", "1500", "--final-eval-episodes", "16")
    one, other = (omg.run(tmp_path / part, *setting, script=name) for part in ("a", "b"))
    assert omg.results(one)["complete"] and omg.results(one)["args"]["cuda"]
    assert omg.results(one)["final"] == omg.results(other)["final"]


SETTING = ("--env-id", "stag_hunt_4x4", "--total-timesteps", "800")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A complete run of each script, made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = omg.run(tmp_path_factory.mktemp("whole"), *SETTING, script=name)
        return made[name]

    return get


@BOTH
def test_a_run_goes_on_where_it_stopped_and_the_same_again_is_the_same(name, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("tqdm.tqdm.update", lambda *_: signal.raise_signal(signal.SIGTERM))
        part = omg.run(tmp_path, *SETTING, script=name, stops=True)
    omg.run(tmp_path, *SETTING, "--resume", str(part), "--time-limit", "0.001", script=name, stops=True)
    omg.run(tmp_path, *SETTING, "--resume", str(part), script=name)
    omg.same_runs(whole(name), part, "om")
    omg.same_runs(whole(name), omg.run(tmp_path / "again", *SETTING, script=name), "om")
    with pytest.raises(SystemExit, match="is complete"):
        omg.run(tmp_path, *SETTING, "--resume", str(part), script=name)


@ALL
def test_the_online_network_explores_and_the_target_network_plays_greedily(name, tmp_path):
    folder = omg.run(tmp_path, "--env-id", "stag_hunt_4x4", script=name)
    names = omg.run.names
    target = names["learner"].target["agents"]
    assert names["rollout"].agents is names["learner"].online["agents"] and names["eval_rollout"].agents is target
    _, learner, rollout = SCRIPTS[name].load_rollout(folder, envs.make("stag_hunt_4x4"))
    assert rollout.agents is learner.target["agents"]
    assert all(map(torch.equal, rollout.agents.state_dict().values(), target.state_dict().values()))


@ALL
def test_a_run_starts_from_the_networks_of_another(name, whole, tmp_path):
    first = whole(name)
    options = ("--env-id", "stag_hunt_4x4", "--seed", "5", "--learning-rate", "1e-9", "--model-learning-rate", "1e-9")
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        second = omg.run(tmp_path, *options, "--tau", "0", "--init", str(first), script=name)
    before, after = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (first, second))
    for which in ("online", "target", "model"):
        for network, weights in before[which].items():
            for key, values in weights.items():
                torch.testing.assert_close(after[which][network][key], values, rtol=0, atol=1e-6)
    assert after["progress"]["steps"] < before["progress"]["steps"] and "Pre-training" not in text.getvalue()
    with pytest.raises(SystemExit, match=r"is of stag_hunt_4x4 .*; this is 3m"):
        omg.run(tmp_path, "--env-id", "3m", "--init", str(first), script=name)
    with pytest.raises(SystemExit, match=r"the agents of a run of .* do not fit"):
        omg.run(tmp_path, "--env-id", "stag_hunt_4x4", "--hidden-dim", "8", "--init", str(first), script=name)
    with pytest.raises(SystemExit, match=r"there is no checkpoint\.pt"):
        omg.run(tmp_path, "--env-id", "stag_hunt_4x4", "--init", str(tmp_path / "nowhere"), script=name)


@BOTH
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_learning_rate": 0.0}, "--model-learning-rate is above 0"),
        ({"gamma": float("nan")}, "--gamma is from 0 to 1"),
        ({"checkpoint_interval": -1.0}, "--checkpoint-interval is from 0 up"),
        ({"team": "1learner"}, "--team 1learner: team '1learner' has 1 seats, but 3m has 3"),
        ({"n_agents": 1}, "--n-agents 1: there is nobody to model"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(name, changes, says):
    args = SCRIPTS[name].Args(**changes)
    with pytest.raises(SystemExit, match=says):
        SCRIPTS[name].check(args)
        SCRIPTS[name].make_team(args, SCRIPTS[name].make_env(args, 2, CPU, 0), 0)


# ---- one text ----
@ALL
def test_every_option_and_logged_key_is_on_the_scripts_page(name, whole):
    pages = [(ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in (name, "iql")]
    told = {key for page in pages for key in re.findall(r"`((?:charts|losses|eval|omg?|pretrain)/[^`]+)`", page)}
    keys = set(scalars(whole(name)))
    assert keys & {"om/action_accuracy", "omg/hit_ratio"} and keys & {"om/loss", "omg/kl"}
    for key in keys:
        assert re.sub(r"\d+$", "0", key) in told or re.sub(r"\d+$", "1", key) in told or key in told, key
    for field in SCRIPTS[name].Args.__dataclass_fields__:
        assert any(f"`--{field.replace('_', '-')}`" in page for page in pages), field


OF_ALL = {"Args.team", "Inference.__init__", "Inference.forward", "Learner.model_loss", "Rollout.__init__"}
OF_ALL |= {"Rollout.act", "analyse", "check", "make_agents", "make_model", "make_team", "policy_of"}
MEANT_TO_DIFFER = {
    ("iql", "naive_om_iql"): {
        "Agents.__init__", "Agents.forward", "Args.team", "Learner.__init__", "Learner.check_finite", "Learner.loss",
        "Learner.report", "Learner.update", "Rollout.__init__", "Rollout.mine", "Rollout.play", "Rollout.steps",
        "SharedGRU.forward", "check", "film", "load_policy", "make_agents", "make_team", "policy_of", "restore", "save",
    },
    ("naive_om_iql", "liam_iql"): OF_ALL | {"Rollout.play"},
    ("naive_om_iql", "omg_iql"): OF_ALL | {
        "Learner.__init__", "Learner.infer", "Learner.loss", "Learner.report", "Rollout.steps", "film", "load_policy",
    },
    ("omg_iql", "pretrain_cvae"): {
        "Args.batch_size", "Args.pretrain_timesteps", "Args.pretrain_updates", "Args.subgoal_input", "Args.team",
        "Rollout.__init__", "Rollout.play", "Rollout.steps", "check", "collect", "pretrain",
    },
}  # fmt: skip


@pytest.mark.parametrize("pair", MEANT_TO_DIFFER, ids=" ".join)
def test_what_scripts_have_in_common_is_equal(pair):
    one, other = map(blocks, pair)
    different = {key for key in one.keys() & other.keys() if one[key] != other[key]}
    assert different - {"start_from"} == MEANT_TO_DIFFER[pair]
    assert len(one.keys() & other.keys()) > (40 if "pretrain_cvae" in pair else 70)


def test_the_baselines_differ_in_little_but_the_model():
    texts = [(ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines() for name in NAMES]
    kept = sum(block.size for block in difflib.SequenceMatcher(None, *texts, autojunk=False).get_matching_blocks())
    assert len(texts[0]) + len(texts[1]) - 2 * kept < 110


# ---- it works ----
class TwoGoals:
    """Two players walk left or right, each to its goal. Who goes in step 3 where the other is heading earns 1.

    Everyone sees the other's last move, but for step 3, where there is fog: it takes memory to know.
    """

    name, policies, simulated, team_reward, ego_first = "two_goals", ("left", "right"), True, False, False
    n_agents, n_actions, obs_dim, state_dim, episode_limit = 2, 2, 9, 1, 6

    def __init__(self, num_envs):
        self.num_envs, self.device, self.t = num_envs, CPU, 0
        self.obs, self.reward = torch.zeros(num_envs, 2, 9), torch.zeros(num_envs, 2)
        self.actions = torch.zeros(num_envs, 2, dtype=torch.long)
        self.terminated, yes = torch.zeros(num_envs, dtype=torch.bool), torch.ones(num_envs, 2, dtype=torch.bool)
        no = torch.zeros_like(self.terminated)
        self.info = {"avail": yes.unsqueeze(-1).expand(-1, -1, 2), "alive": yes, "won": no, "invalid": no}

    def look(self):
        self.obs.zero_()
        self.obs[:, :, self.t] = 1
        if self.t not in (0, 3):
            self.obs[:, :, 7:] = torch.nn.functional.one_hot(self.actions.flip(1), 2)
        return self.obs

    def reset(self):
        self.t = 0
        self.terminated.fill_(False)
        return self.look(), self.info

    def scripted_actions(self, policy):
        return policy

    def step(self, actions):
        self.actions.copy_(actions)
        self.reward.copy_((actions == actions.flip(1)) * (self.t == 3))
        self.t = min(self.t + 1, 6)
        self.terminated.fill_(self.t == 6)
        return self.look(), self.reward, self.terminated, torch.zeros_like(self.terminated), self.info


class Forgetful(torch.nn.Module):
    """A recurrent layer for which every step is the first."""

    def __init__(self, gru):
        super().__init__()
        self.gru = gru

    def forward(self, x, h):
        steps = x.flatten(0, 1).unsqueeze(0)
        y = self.gru(steps, torch.zeros_like(steps[0]))
        return (y[0].view_as(x), h) if isinstance(y, tuple) else y.view_as(x)

    def fork(self, x, h):
        return self.gru.fork(x, torch.zeros_like(h))


def make_world(name, **changes):
    torch.manual_seed(1)
    module, options = SCRIPTS[name], {"num_envs": 64, "buffer_size": 1024, "hidden_dim": 32, "td_lambda": 0.0}
    args, env = module.Args(**options, **changes), TwoGoals(64)
    module.check(args)
    learner = module.Learner(args, env)
    for agents in (learner.online["agents"], learner.target["agents"]):
        agents.gru = Forgetful(agents.gru)
    networks = [learner.online["agents"], *([learner.model["inference"]] if name != "iql" else [])]
    kept = getattr(module, "SEEN", ("obs", "avail", "alive", "action"))
    teams = [Team(env, None, seed=1, understudy=understudy) for understudy in (False, True)]
    return learner, [module.Rollout(env, *networks, (*kept, "terminated"), team) for team in teams]


def test_a_world_without_places_is_analysed_as_far_as_it_goes():
    learner, (rollout, _) = make_world("omg_iql")
    rollout.play(0.0)
    found = SCRIPTS["omg_iql"].analyse(learner.args, learner, rollout)
    assert found.keys() == {"q_sensitivity", "teammate_probe", "next_action_probe"} and found["q_sensitivity"] > 0
    assert found["teammate_probe"] > 0.8  # what the other has done is remembered even at random, and tells who it is
    assert found["teammate_probe"] == found["next_action_probe"]


@pytest.mark.parametrize("name", ["iql", *NAMES, "omg_iql"])
def test_a_q_network_without_memory_acts_on_what_the_model_remembers(name):
    rounds, module = 40, SCRIPTS[name]
    options = {"latent_dim": 8, "horizon": 3, "pretrain_timesteps": 6000, "pretrain_updates": 400}
    learner, (rollout, of_others) = make_world(name, **(options if name == "omg_iql" else {}))
    if name == "omg_iql":
        module.pretrain(learner.args, learner, of_others)
    buffer = module.Buffer(rollout.story, 1024, CPU, 1)
    for number in range(rounds):
        if name == "omg_iql":
            learner.mix_chance.fill_(max(0.5 - number / rounds, 0))
        _, lengths, _, valid = rollout.play(epsilon=max(1 - 2 * number / rounds, 0.05))
        buffer.add(rollout.story, lengths, valid)
        learner.learn(buffer, 8)
    earned = module.evaluate(rollout, 256)[0].mean().item()
    assert 0.4 < earned < 0.6 if name == "iql" else earned > 0.95

"""Encounters: several matches in a row with the same others; what a learner remembers of them, and what it is told."""

import itertools
import json
import math

import pytest
import torch
from helpers import QUICK, stopped, train, write_run
from reference import kuhn_log_likelihood, make_runner, memory_one_log_likelihood

import belief_iql
import envs
import iql
from envs import kuhn
from envs.matrix_games import MEMORY_ONE
from experiments import evaluate
from training import checkpoints
from training.episodes import EpisodeRunner, Inputs, RandomPlayer, load_runner
from training.metrics import calibration
from training.opponents import learner_inputs, others_policies
from training.oracle import PartnerOracle
from training.team import Team

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = 80  # rounds
IPD = {"env_id": "matrix_ipd,limit=25", "team": "scripted", "total_timesteps": 400}


@pytest.mark.parametrize("env_id", ["stag_hunt_4x4", pytest.param("3m", marks=pytest.mark.slow), "kuhn"])
@pytest.mark.parametrize("autoreset", [False, True])
def test_an_encounter_is_the_matches_of_a_batch_without_encounters(env_id, autoreset):
    """One after the other: the same observations, rewards and ends, but the end of an episode comes with the last."""
    single = envs.make(env_id, num_envs=4, seed=3, autoreset=True)
    batch = envs.make(env_id, num_envs=4, seed=3, matches_per_episode=3, autoreset=autoreset)
    assert batch.episode_limit == 3 * single.episode_limit and batch.match_limit == single.match_limit
    obs, info = batch.reset()
    torch.testing.assert_close(obs, single.reset()[0], rtol=0, atol=0)
    matches = torch.zeros(4, dtype=torch.long)
    policy = "RAND" if env_id == "stag_hunt_4x4" else single.policies[0]
    ended = torch.zeros(4, dtype=torch.bool)
    for _ in range(batch.episode_limit):
        running = ~ended
        expected = single.step(single.scripted_actions(policy))
        obs, reward, terminated, truncated, info = batch.step(batch.scripted_actions(policy))
        matches += expected[2] | expected[3]
        last = (matches == 3) & running
        assert torch.equal((terminated | truncated) & running, last)
        assert torch.equal(terminated & last, expected[2] & last)
        assert torch.equal(reward[running], expected[1][running])
        goes_on = running & ~last
        assert torch.equal(obs[goes_on], expected[0][goes_on])
        assert torch.equal(info["match_index"][goes_on], matches[goes_on])
        assert torch.equal(info["avail"][goes_on], expected[4]["avail"][goes_on])
        if autoreset:
            assert (info["match_index"][last] == 0).all() and torch.equal(obs[last], expected[0][last])
            assert torch.equal(info["final_obs"][last], expected[4]["final_obs"][last])
        ended |= last
        if ended.all():
            break
    assert ended.all() and (matches == 3).any()


def test_what_cannot_be_an_encounter():
    for number in (0, -1, 1.5, True, "3", 10**9):
        with pytest.raises(ValueError, match="matches_per_episode is a whole number from 1 to 10000"):
            envs.make("3m", matches_per_episode=number)


def test_an_encounter_is_saved_with_its_number():
    batch, other = (envs.make("matrix_ipd", num_envs=3, seed=seed, matches_per_episode=2) for seed in (1, 2))
    batch.reset()
    other.reset()
    for _ in range(batch.match_limit + 5):
        batch.step(batch.scripted_actions("random"))
    saved = batch.snapshot()
    assert (saved["match_index"] == 1).all()
    other.restore(saved)
    assert torch.equal(other.step(other.scripted_actions("random"))[1], batch.step(batch.scripted_actions("random"))[1])
    with pytest.raises(ValueError, match="match_index"):
        other.restore({**saved, "match_index": torch.full((3,), 2)})


# ---- the others ----
def test_others_stay_for_as_many_rounds_as_an_encounter_has():
    env = envs.make("matrix_ipd", num_envs=64)
    runner = EpisodeRunner(env, Team(env, matches_per_partner=3), RandomPlayer())
    drawn = []
    for _ in range(7):
        runner.play()
        drawn.append(runner.team.policy_id.clone())
    same = [torch.equal(one, other) for one, other in itertools.pairwise(drawn)]
    assert same == [True, True, False, True, True, False]


def test_others_start_anew_in_every_match_of_an_encounter():
    """Networks among the others forget the match before: their last action is none."""
    env = envs.make("matrix_ipd", num_envs=2, matches_per_episode=2)
    runner, seen = EpisodeRunner(env, Team(env), RandomPlayer()), []
    joint_action = runner.team.joint_action
    runner.team.joint_action = lambda action, last: seen.append(last.clone()) or joint_action(action, last)
    runner.play()
    starts = [t for t, last in enumerate(seen[: env.episode_limit]) if (last < 0).all()]
    assert starts == [0, env.match_limit] and not any((last < 0).any() for last in seen[1 : env.match_limit])


def test_returns_by_match_add_up_to_the_episode():
    env = envs.make("matrix_ipd", num_envs=16, matches_per_episode=3)
    runner = EpisodeRunner(env, Team(env), RandomPlayer())
    returns, _, _ = runner.evaluate(16)
    assert list(runner.match_returns) == ["return_1", "return_2", "return_3"]
    assert sum(runner.match_returns.values()) == pytest.approx(returns.mean().item(), rel=1e-4)
    share = returns.mean().item() / 3  # below 0, as all rewards are
    assert all(1.5 * share < value < 0.5 * share for value in runner.match_returns.values())


# ---- runs ----
@pytest.mark.parametrize(("name", "persist_hidden"), [("iql", True), ("iql", False), ("belief_iql", False)])
@pytest.mark.slow
def test_a_run_with_encounters_resumes_exactly(name, persist_hidden, tmp_path):
    options = {**IPD, "matches_per_partner": 2, "persist_hidden": persist_hidden}
    whole = train(name, tmp_path / "whole", **options)["run"].folder
    folder = stopped(name, tmp_path / "stopped", **options)
    train(name, tmp_path / "stopped", resume=folder, **options)
    expected, found = (json.loads((run / "results.json").read_text()) for run in (whole, folder))
    assert found["final"] == expected["final"] and found["encounter"] == expected["encounter"]
    assert [e["episodic_return"] for e in found["evals"]] == [e["episodic_return"] for e in expected["evals"]]
    assert expected["encounter"].keys() <= {"return_1", "return_2"} and expected["encounter"]
    if name == "belief_iql":
        assert found["om"] == expected["om"] and {"policy_log_loss_1", "policy_confidence_2"} <= found["om"].keys()


def test_values_reach_from_one_match_to_the_next(monkeypatch):
    """With memory kept, the end of a match within an encounter is no end for the targets."""
    seen = []
    lambda_returns = iql.lambda_returns
    monkeypatch.setattr(iql, "lambda_returns", lambda *a: seen.append(a[2].squeeze(-1)) or lambda_returns(*a))
    for encounters in (1, 3):
        env = envs.make("stag_hunt_4x4", num_envs=8, matches_per_episode=encounters)
        args = iql.Args(**QUICK, env_id="stag_hunt_4x4", team="scripted")
        team, learner = Team(env), iql.Learner(args, env)
        runner = EpisodeRunner(env, team, iql.Player(learner.agents, team.learner_seats), iql.FIELDS)
        lengths = runner.play(1.0).lengths
        assert not runner.episodes["alive"][1:35].all()  # somebody leaves in the first match
        batch = {name: values[: int(lengths.max()) + 1] for name, values in runner.episodes.items()}
        learner.loss({**batch, "lengths": lengths})
        before_the_end = torch.arange(len(seen[-1])).unsqueeze(1) < lengths - 1
        assert (seen[-1] & before_the_end).any() == (encounters == 1)  # who leaves the only match has ended


@pytest.mark.slow
def test_a_run_that_keeps_its_memory_plays_single_matches_and_encounters(tmp_path):
    folder = train("iql", tmp_path, **IPD, matches_per_partner=2, persist_hidden=True)["run"].folder
    for encounters in (1, 2):
        env = envs.make(IPD["env_id"], num_envs=4, seed=5, matches_per_episode=encounters)
        runner = load_runner(folder, env, Team(env, "1tft1learner"))
        episodes = runner.play()
        returns, lengths = episodes.returns, episodes.lengths
        assert (lengths == encounters * env.match_limit).all()
        step_by_step = load_runner(folder, env, Team(env, "1tft1learner"))
        obs, info = env.reset(seed=5)
        total = torch.zeros(4, 2)
        for _ in range(env.episode_limit):
            obs, reward, _, _, info = env.step(step_by_step.policy(obs, info))
            total += reward
        assert torch.equal(step_by_step.team.select(total), returns)


# ---- a belief that is kept from match to match ----
@pytest.mark.parametrize(
    ("env_id", "team", "carry_belief"),
    [
        ("matrix_ipd", "scripted", True),
        pytest.param("matrix_ipd", "scripted", False, marks=pytest.mark.slow),
        ("stag_hunt_4x4", "1NS1NH2learner", True),
        ("stag_hunt_4x4", "1NS1NH2learner", False),
    ],
)
def test_a_belief_starts_where_the_last_match_ended(env_id, team, carry_belief):
    learner, runner = make_runner("belief_iql", env_id, team, matches_per_partner=3, carry_belief=carry_belief)
    model, total = learner.model, None
    for number in range(4):
        lengths = runner.play(0.5).lengths
        evidence = runner.episodes["evidence"][0]
        if number % 3 and carry_belief:
            torch.testing.assert_close(evidence, total, rtol=1e-4, atol=1e-5)
            assert evidence.abs().max() > 0.1
        else:
            assert not evidence.any()
        episodes = runner.selection()
        obs, _, _ = learner_inputs(learner.env, episodes)
        with torch.no_grad():
            *_, log_belief = model.unroll(obs, episodes["visible_last_action"], episodes["seat"][0], evidence)
        alive = episodes["alive"].clone()
        for match, length in enumerate(lengths.tolist()):
            alive[length:, match] = False
        last_step = len(alive) - 1 - alive.int().flip(0).argmax(0)  # at which a seat lives and its match goes on
        total = torch.stack([torch.stack([log_belief[t, match, seat] for seat, t in enumerate(steps)])
                            for match, steps in enumerate(last_step.tolist())])  # fmt: skip


def test_how_good_a_belief_is_is_counted_by_the_number_of_the_match():
    learner, runner = make_runner("belief_iql", "stag_hunt_4x4", "1NS1NH2learner", matches_per_partner=2, seat="0")
    played, play, used = [], runner.play, learner.used.tolist()
    policy = runner.team.policy_id

    def play_and_count():
        results = play()
        rows = []
        for m, belief in enumerate(runner.player.log_belief.exp().tolist()):
            for place, seat in enumerate(runner.team.learner_seats[m].tolist()):
                for k in range(3):
                    other = int(policy[m, (seat + 1 + k) % 4])
                    if other in used:  # no learner
                        chances = belief[place][k]
                        true, most = chances[used.index(other)], max(chances)
                        rows.append((-math.log(true), most, true == most))
        assert len(rows) == 6 * 2 * 2
        played.append(torch.tensor(rows, dtype=torch.float64).mean(0))
        return results

    runner.play = play_and_count
    runner.evaluate(24)
    names, means = ("log_loss", "confidence", "accuracy"), torch.stack(played).view(2, 2, 3).mean(0)
    expected = {f"policy_{name}_{n + 1}": means[n, k].item() for n in range(2) for k, name in enumerate(names)}
    assert runner.match_metrics == pytest.approx(expected, rel=1e-4)


class ActsOnBelief:
    """In the Q-network's place: the action, one of the last two, says which policy is most probable."""

    def __init__(self, n_actions):
        self.n_actions = n_actions

    def init_hidden(self, matches, seats):
        return torch.zeros(matches, seats, 1)

    def __call__(self, obs, last_action, h, seat, inferred):
        action = inferred[..., -4:].argmax(-1) % 2 + self.n_actions - 2
        return torch.nn.functional.one_hot(action, self.n_actions).float(), h.unsqueeze(0)


BAYES = {
    "matrix_ipd,limit=5": ("random", "generous_tft", "joss", "stochastic_cooperator"),
    "kuhn,limit=9": ("seen_c", "seen_d", "seen_e", "seen_f"),
}


@pytest.mark.slow
@pytest.mark.parametrize("env_id", BAYES)
def test_a_belief_comes_close_to_exact_bayes(env_id):
    """In every match of an encounter, although the learner's actions repeat what earlier matches showed."""
    torch.manual_seed(1)
    sizes = {"num_envs": 256, "batch_size": 64, "buffer_size": 2048, "matches_per_partner": 4, "q_features": 0}
    args = belief_iql.Args(env_id=env_id, team="1other1learner", pool=BAYES[env_id], **sizes)
    env = belief_iql.make_env(args, args.num_envs, torch.device("cpu"), "test")
    team, cards, step = belief_iql.make_team(args, env, "test"), [], env.step
    learner = belief_iql.Learner(args, env, team.used)
    player = belief_iql.Player(learner, ActsOnBelief(env.n_actions), team.learner_seats)
    runner = EpisodeRunner(env, team, player, belief_iql.FIELDS)
    buffer = belief_iql.ReplayBuffer(args, runner.episodes, torch.device("cpu"))
    optimizer = torch.optim.Adam(learner.model.parameters())
    for number in range(TRAINING):
        optimizer.param_groups[0]["lr"] = 0.005 * (1 - number / TRAINING)
        buffer.add(runner.play(0.02))
        for batch in buffer.sample(8, args.batch_size):
            optimizer.zero_grad()
            learner.model_loss(batch, *learner_inputs(learner.env, batch))[1].backward()
            optimizer.step()

    def step_and_remember(actions):
        cards.append(env._simulation["card"].tolist())
        return step(actions)

    if env_id.startswith("kuhn"):
        env.step = step_and_remember
    of_bayes, of_model = {}, {}
    for number in range(8):  # two encounters
        if number % 4 == 0:
            exact = torch.zeros(args.num_envs, 4, dtype=torch.float64)
        cards.clear()
        runner.play(0.02)
        episodes = runner.selection()
        steps = int(runner.lengths[0]) - 1  # what the last step shows comes too late
        for match in range(args.num_envs):
            actions, seat = episodes["all_action"][:steps, match].tolist(), int(episodes["seat"][0, match, 0])
            for k, name in enumerate(env.policies[policy] for policy in team.used):
                if cards:
                    hands = [both[match] for both in cards[:steps]]
                    exact[match, k] += kuhn_log_likelihood(kuhn.FIXED[name], actions, hands)
                else:
                    exact[match, k] += memory_one_log_likelihood(MEMORY_ONE[name], actions, 1 - seat)
        policy, known = others_policies(
            episodes, learner.model.seat_order, episodes["lengths"].unsqueeze(0), learner.used
        )
        beliefs = (of_bayes, exact.log_softmax(-1).view_as(player.log_belief)), (of_model, player.log_belief)
        for found, log_belief in beliefs:
            for name, value in calibration(log_belief, policy, known).items():
                found.setdefault(name.removeprefix("policy_"), []).append(value)
        assert player.after_match(episodes) == calibration(player.log_belief, policy, known)
    of_bayes, of_model = ({key: torch.tensor(values).view(2, 4).mean(0) for key, values in found.items()}
                          for found in (of_bayes, of_model))  # fmt: skip
    assert (of_bayes["log_loss"].diff() < -0.03).all()  # every match shows more
    assert (of_model["log_loss"] - of_bayes["log_loss"] < 0.12).all()
    for found in (of_bayes, of_model):
        assert (found["confidence"] - found["accuracy"])[1:].mean() < 0.08  # no excess of confidence


def test_a_belief_of_team_mates_is_not_kept():
    _, runner = make_runner("belief_iql", "matrix_ipd", "scripted", matches_per_partner=3)
    player, env = runner.player, runner.env
    inputs = Inputs(*(runner.team.select(x) for x in (env.obs, env.info["avail"], env.actions)), env.actions,
                    runner.team.learner_seats, visible_last_action=env.actions.unsqueeze(1))  # fmt: skip
    for _ in range(3):
        player.reset(torch.ones(env.num_envs, dtype=torch.bool))
        player.act(inputs, 0.0)
        assert not player.evidence.any()


@pytest.mark.parametrize("name", ["belief_iql", "iql"])
def test_cross_play_tells_the_matches_of_an_encounter_apart(name, tmp_path):
    """For a run with a belief, whose matches are episodes, and for one that keeps its memory through one episode."""
    options = (
        {"matches_per_partner": 3, "policies": 5}
        if name == "belief_iql"
        else {"matches_per_partner": 3, "persist_hidden": True}
    )
    run = str(write_run(tmp_path / "run", name, envs.make("matrix_ipd"), **options))
    others = ("tft", "grim", "all_d")
    args = evaluate.Args((run,), others, episodes=4, num_envs=6, matches_per_partner=3, out=tmp_path / "out")
    egos = evaluate.find([run])
    evaluate.check_args(args, egos)
    rows = evaluate.evaluate(args, run, egos[run], len(others))
    assert [row["other"] for row in rows] == [*others, "all"]
    for row in rows:
        assert row["episodes"] == (12 if name == "belief_iql" else 4) * (3 if row["other"] == "all" else 1)
        earned = [row[f"return_{number}"] for number in (1, 2, 3)]
        assert row["return"] == pytest.approx(sum(earned) / 3, rel=1e-6) and "return_4" not in row
    assert rows[2]["return_1"] <= -200 < rows[0]["return_1"]  # who never cooperates never gives more


def test_evaluations_play_encounters_to_their_end():
    env = envs.make("matrix_ipd", num_envs=4)
    runner = EpisodeRunner(env, Team(env, matches_per_partner=3), RandomPlayer())
    for count, played in ((4, 12), (13, 24)):
        assert len(runner.evaluate(count)[0]) == played and runner.rounds % 3 == 0
    runner.play()  # an evaluation that was stopped in an encounter
    runner.load_state_dict(runner.state_dict())
    assert len(runner.evaluate(4)[0]) == 12 and runner.rounds % 3 == 0
    state = runner.state_dict()
    for damaged in (["x"], [torch.zeros(3)], 7):
        with pytest.raises((TypeError, RuntimeError)):
            runner.load_state_dict(state | {"rng": damaged})


# ---- an oracle ----
def test_an_oracle_is_told_who_the_others_are():
    env = envs.make("stag_hunt_4x4", num_envs=12)
    team = Team(env, "2NS1NH1learner")
    told = PartnerOracle(env, team)
    runner = EpisodeRunner(told, team, RandomPlayer(), ("obs",))
    runner.play()
    who = runner.episodes["obs"][:, :, 0, env.obs_dim :].view(-1, 12, 3, 2)
    assert told.obs_dim == env.obs_dim + 6 and len(team.used) == 2
    for m in range(12):
        seat = int(team.learner_seats[m, 0])
        expected = [int(team.policy_id[m, (seat + k) % 4]) for k in (1, 2, 3)]
        assert [team.used[int(one_hot.argmax())] for one_hot in who[0, m]] == expected
        assert torch.equal(who[0, m].sum(-1), torch.ones(3)) and torch.equal(who[5, m], who[0, m])


@pytest.mark.parametrize("name", ["foraging_orders", "stag_hunt_4x4", "snowdrift", "coin_game", "popp", "3m", "kuhn"])
def test_places_are_read_off_what_an_oracle_sees(name):
    env = envs.make(name, num_envs=4)
    told = PartnerOracle(env, Team(env, "scripted"))
    obs, _ = told.reset()
    assert hasattr(told, "places") == hasattr(env, "places") == (name != "kuhn")
    if name != "kuhn":
        assert all(torch.equal(mine, its) for mine, its in zip(told.places(obs), env.places(env.obs)))


@pytest.mark.parametrize("option", ["oracle", pytest.param("recurrence", marks=pytest.mark.slow)])
def test_an_oracle_and_a_learner_without_memory_train(option, tmp_path):
    folder = train("iql", tmp_path, **IPD, **{option: option == "oracle"})["run"].folder
    sizes = checkpoints.read_run(folder)["sizes"]
    assert (sizes["obs_dim"] == envs.make("matrix_ipd").obs_dim) == (option == "recurrence")


def test_without_recurrence_only_the_present_matters():
    env = envs.make("matrix_ipd", num_envs=3)
    agents = iql.QNetwork(iql.Args(**QUICK, recurrence=False), env)
    obs, h = torch.randn(4, 3, 2, env.obs_dim), agents.init_hidden(3, 2)
    last_action, seat = torch.zeros(4, 3, 2, dtype=torch.long), torch.tensor([[0, 1]] * 3)
    together, _ = agents(obs, last_action, h, seat)
    alone = torch.cat([agents(obs[t : t + 1], last_action[t : t + 1], h + 1, seat)[0] for t in range(4)])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"oracle": True, "team": "self"}, "--oracle is for a learner with"),
        ({"oracle": True, "capture_video": True}, "--oracle has no video"),
        ({"persist_hidden": True}, "--persist-hidden is for several matches with the same partners"),
        ({"matches_per_partner": 0}, "--matches-per-partner is above 0, not 0"),
        ({"matches_per_partner": 5, "team": "self"}, "--matches-per-partner is for a learner with"),
        ({"teammate_epsilon": (0.0, 0.3), "team": "self"}, "--teammate-epsilon is for a learner with"),
        ({"seat": 1, "team": "self"}, "--seat is for a learner with"),
        ({"mix_teammates": True, "team": "self"}, "--mix-teammates is for a learner with"),
    ],
)
def test_options_that_do_not_go_together(options, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        train("iql", tmp_path, **{**IPD, **options})

"""ippo.py and mappo.py: advantages and masks against plain loops, rollouts that go on, runs, what the critic sees."""

import json
from types import SimpleNamespace

import pytest
import torch
from helpers import POLICY_SCRIPTS, QUICK, QUICK_POLICY, make_learner, matrix_game, read_log, stopped, train, write_run
from test_runs import assert_same_run

import envs
import ippo
import iql
from training import checkpoints
from training.episodes import EpisodeRunner, Inputs, load_player
from training.rollouts import RolloutRunner
from training.team import Team

STEPS, MATCHES, SEATS, ACTIONS, OBS, STATE = 12, 5, 3, 4, 6, 7
EVERY_SCRIPT = pytest.mark.parametrize("name", POLICY_SCRIPTS)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")
EVERY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make_args(name, **options):
    args = POLICY_SCRIPTS[name].Args(**{**QUICK_POLICY, **options})
    POLICY_SCRIPTS[name].check_args(args)
    return args


def learner_of(name, team_reward=True, device="cpu", **options):
    """A learner without an environment but for its sizes."""
    env = SimpleNamespace(
        n_agents=SEATS, n_actions=ACTIONS, obs_dim=OBS, agent_state_dim=STATE, device=torch.device(device),
        team_reward=team_reward, leaving_ends=not team_reward,
    )  # fmt: skip
    sizes = {"num_envs": MATCHES, "num_steps": STEPS, "num_minibatches": 1, "cuda": device == "cuda"}
    return make_learner(name, env, make_args(name, **sizes, **options))


def make_rollout(seed=0):
    """Matches that end within a rollout and start anew at once."""
    random = torch.Generator().manual_seed(seed)
    shape = (STEPS, MATCHES, SEATS)
    terminated = torch.rand(shape[:2], generator=random) < 0.15
    truncated = (torch.rand(shape[:2], generator=random) < 0.15) & ~terminated
    over = terminated | truncated
    alive, last_action, running = torch.zeros(*shape).bool(), torch.zeros(shape).long(), torch.ones(MATCHES, SEATS) > 0
    action = torch.randint(ACTIONS, shape, generator=random)
    next_alive = alive.clone()
    for t in range(STEPS):
        alive[t] = running
        starts = over[t - 1].unsqueeze(1) if t else torch.zeros(MATCHES, 1) > 0
        last_action[t] = torch.where(starts, -1, action[t - 1])
        running = running & (torch.rand(running.shape, generator=random) < 0.9)
        next_alive[t] = running
        running = running | over[t].unsqueeze(1)
    found = {"terminated": terminated, "truncated": truncated, "action": action, "alive": alive}
    found |= {"last_action": last_action, "next_alive": next_alive, "avail": torch.ones(*shape, ACTIONS).bool()}
    for name, size in (("obs", OBS), ("agent_state", STATE)):
        values = torch.randn((STEPS + 1, *shape[1:], size), generator=random)
        final = torch.randn((STEPS, *shape[1:], size), generator=random)
        found |= {name: values[:-1], f"next_{name}": torch.where(over[..., None, None], final, values[1:])}
    found["log_prob"] = torch.randn(shape, generator=random) / 4 - 1.4
    found["reward"] = torch.randn(shape, generator=random)
    found |= {"seat": torch.arange(SEATS).repeat(1, MATCHES, 1), "h": torch.zeros(1, MATCHES, SEATS, 16)}
    return found, over


class ObservedValue:
    """A critic whose value is the first number that it sees."""

    def __call__(self, x, last_action, h, seat):
        return x[..., :1], h.expand(*x.shape[:3], -1) if h.dim() == 3 else h

    def statistics(self):
        return torch.tensor(0.5), torch.tensor(2.0)

    def update_statistics(self, returns, mask):
        pass


# ---- advantages and value targets ----
@pytest.mark.parametrize(("team_reward", "bootstrap"), [(True, True), (False, True), (True, False)])
@EVERY_SCRIPT
def test_advantages_and_targets_are_those_of_plain_loops(name, team_reward, bootstrap):
    learner = learner_of(name, team_reward, death_mask=False, bootstrap_truncated=bootstrap)
    rollout, over = make_rollout()
    learner.critic = ObservedValue()
    learner.estimate(rollout)
    gamma, gae_lambda, seen = learner.args.gamma, learner.args.gae_lambda, POLICY_SCRIPTS[name].CRITIC_INPUT
    expected, entries = {}, []
    for m in range(MATCHES):
        for a in range(SEATS):
            following = 0.0
            for t in reversed(range(STEPS)):
                left = not team_reward and not rollout["alive"][t, m, a]
                if left:
                    continue
                value = 2 * rollout[seen][t, m, a, 0].item() + 0.5
                next_value = 2 * rollout[f"next_{seen}"][t, m, a, 0].item() + 0.5
                leaves = not team_reward and not rollout["next_alive"][t, m, a]
                if rollout["terminated"][t, m] or leaves or (rollout["truncated"][t, m] and not bootstrap):
                    next_value = 0.0
                if over[t, m] or leaves or t == STEPS - 1:
                    following = 0.0
                following = (
                    rollout["reward"][t, m, a].item() + gamma * next_value - value + gamma * gae_lambda * following
                )
                expected[t, m, a] = following, following + value
                if rollout["alive"][t, m, a]:
                    entries.append(following)
    advantages = torch.tensor(entries)
    mean, std = advantages.mean(), advantages.std(correction=0)
    for entry, (advantage, target) in expected.items():
        assert learner.estimates["target"][entry].item() == pytest.approx(target, abs=1e-4)
        normalised = (advantage - mean) / (std + 1e-5)
        assert learner.estimates["advantage"][entry].item() == pytest.approx(normalised.item(), abs=1e-4)
    assert int(learner.estimates["value_mask"].sum()) == len(expected)
    assert int(learner.estimates["policy_mask"].sum()) == len(entries) < MATCHES * STEPS * SEATS


@EVERY_SCRIPT
def test_targets_do_not_depend_on_value_normalisation(name):
    learner, (rollout, _) = learner_of(name), make_rollout()
    learner.estimate(rollout)
    plain = {key: learner.estimates[key].clone() for key in ("target", "advantage")}
    mean, std = learner.critic.statistics()
    assert std > 0.1 and (mean, std) != (0, 1)
    with torch.no_grad():  # the same values in other units
        learner.critic.fc2.weight /= std
        learner.critic.fc2.bias.sub_(mean).div_(std)
    learner.critic_h.zero_()
    learner.estimate(rollout)
    for key, values in plain.items():
        torch.testing.assert_close(learner.estimates[key], values, rtol=1e-4, atol=1e-4)


def test_statistics_are_those_of_the_returns():
    critic, returns = learner_of("ippo").critic, 3 + 2 * torch.randn(50, 40)
    assert [x.item() for x in critic.statistics()] == [0, 1]
    mask = torch.rand(50, 40) < 0.5
    critic.update_statistics(torch.where(mask, returns, 1e6), mask)
    mean, std = critic.statistics()
    torch.testing.assert_close(mean, returns[mask].mean(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(std, returns[mask].std(correction=0), rtol=1e-3, atol=1e-3)


def test_every_entry_counts_the_same_in_the_statistics_of_the_returns():
    """Also one of a rollout that has few which count."""
    critic, mask = learner_of("ippo").critic, torch.arange(100).view(10, 10) < 90
    critic.update_statistics(torch.full((10, 10), 1.0), mask)
    critic.update_statistics(torch.full((10, 10), 11.0), ~mask)
    older = ippo.VALUE_NORM_DECAY
    expected = (90 * older * 1.0 + 10 * 11.0) / (90 * older + 10)
    assert critic.statistics()[0].item() == pytest.approx(expected, rel=1e-4)


# ---- masks ----
@EVERY_SCRIPT
def test_a_dead_agent_contributes_nothing_to_the_gradient_of_the_policy(name):
    def gradient(**options):
        torch.manual_seed(0)
        learner, (rollout, _) = learner_of(name, **options), make_rollout()
        learner.estimate(rollout)
        obs = rollout["obs"].clone().requires_grad_()
        learner.loss({**rollout, **learner.estimates, "obs": obs})[0].backward()
        return obs.grad.abs().sum(-1) > 0

    alive = make_rollout()[0]["alive"]
    assert torch.equal(gradient(), alive)
    assert (gradient(policy_alive_mask=False) & ~alive).any()


@EVERY_SCRIPT
def test_masks_of_the_critic(name):
    """Its loss has the dead too, unless they are left out; with the death mask it sees nothing of them."""
    seen, alive = POLICY_SCRIPTS[name].CRITIC_INPUT, make_rollout()[0]["alive"]
    for options, masked, hidden in (({}, False, True), ({"value_alive_mask": True}, True, True),
                                    ({"death_mask": False}, False, False)):  # fmt: skip
        learner, (rollout, _) = learner_of(name, **options), make_rollout()
        learner.estimate(rollout)
        assert (learner.estimates["value_mask"] & ~alive).any() != masked
        assert bool((learner.critic_input(rollout) == rollout[seen])[~alive].any()) != hidden
        assert torch.equal(learner.critic_input(rollout)[alive], rollout[seen][alive])


# ---- memory ----
@EVERY_SCRIPT
def test_nothing_of_the_last_match_gets_into_the_next(name):
    learner, (rollout, _) = learner_of(name), make_rollout()
    closed = learner.agents.rnn.weight_ih_l0[:32, -1]
    learner.learn(rollout, 0.0)
    assert (closed == -1e4).all()  # it gets no gradient
    x, last_action, seat = rollout["obs"], rollout["last_action"].clamp(min=0), rollout["seat"][0]
    last_action[4] = -1
    for network in (learner.agents, learner_of(name, recurrence=False).agents):
        outputs = []
        for other in (x, torch.cat((torch.randn_like(x[:4]), x[4:]))):
            h = torch.randn(MATCHES, SEATS, 16)
            outputs.append(network(other, last_action, h, seat)[0])
        assert torch.equal(outputs[0][4:], outputs[1][4:]) and not torch.equal(outputs[0][:4], outputs[1][:4])
    alone = network(x[7:8], last_action[7:8], h, seat)[0]  # without recurrence: of the present alone
    torch.testing.assert_close(alone[0], outputs[0][7])


@EVERY_DEVICE
@EVERY_SCRIPT
def test_an_update_that_is_not_finite_is_skipped_and_reported(name, device):
    learner = learner_of(name, device=device)
    rollout = {key: values.to(device) for key, values in make_rollout()[0].items()}
    for _ in range(2):  # on the GPU: as it is, then as a graph
        learner.learn(rollout, 0.0)
    before = [p.detach().clone() for p in learner.parameters]
    rollout["reward"][0, 2] = float("inf")
    learner.learn(rollout, 0.0)
    assert all(map(torch.equal, before, learner.parameters))
    with pytest.raises(FloatingPointError, match="losses/policy_loss was not finite"):
        learner.metrics.pop()


@needs_cuda
@EVERY_SCRIPT
def test_captured_updates_are_those_of_plain_ones(name):
    rollout, weights = {key: values.to("cuda") for key, values in make_rollout()[0].items()}, []
    for captured in (True, False):
        torch.manual_seed(0)
        learner = learner_of(name, device="cuda")
        learner.graphed_estimate.capture = learner.graphed_update.capture = captured
        for progress in (0.0, 0.3, 0.6, 0.9):
            learner.learn(rollout, progress)
        assert bool(learner.graphed_estimate.graphs) == bool(learner.graphed_update.graphs) == captured
        weights.append([*learner.parameters, learner.critic.moments, learner.critic_h])
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_the_learning_rate_falls_to_0():
    for anneal_lr, expected in ((True, 0.25), (False, 1.0)):
        learner, (rollout, _) = learner_of("ippo", anneal_lr=anneal_lr, learning_rate=1.0), make_rollout()
        learner.learn(rollout, 0.75)
        assert learner.optimizer.param_groups[0]["lr"].item() == expected


# ---- rollouts ----
def make_runner(name, steps, team="self", seed=0, learner=None, device="cpu", **options):
    torch.manual_seed(seed)
    args = make_args(name, num_steps=steps, num_envs=8, team=team, cuda=device == "cuda", **options)
    module, env = POLICY_SCRIPTS[name], envs.make("3m", num_envs=8, seed=3, device=device, agent_state=True)
    team = Team(env, team)
    seats = team.learner_seats
    learner = learner or module.Learner(args, env, seats.shape[1])
    player = module.Player(learner.agents, seats, explore=True)
    return RolloutRunner(env, team, player, module.FIELDS, steps), learner


@EVERY_DEVICE
@EVERY_SCRIPT
def test_the_ratio_is_1_before_the_first_update(name, device):
    runner, learner = make_runner(name, 24, device=device)
    tolerance = 1e-6 if device == "cpu" else 1e-4  # there a step and a sequence are different kernels
    torch.nn.init.orthogonal_(learner.agents.fc2.weight, 8.0)  # probabilities that differ
    for _ in range(3):  # later ones start in the middle of matches
        rollout = runner.next_rollout()
        learner.estimate(rollout)
        logs = learner.loss({**rollout, **learner.estimates})[1]
        assert logs["losses/approx_kl"].abs() < tolerance and logs["losses/clip_fraction"] == 0
        assert logs["losses/entropy"] < 1.5
    assert (rollout["last_action"][1:] < 0).any() and not (rollout["last_action"][0] < 0).all()


@EVERY_DEVICE
@EVERY_SCRIPT
def test_the_next_value_is_that_of_the_next_row(name, device):
    """In the next rollout too: the critic remembers what the policy remembers. But not where a match has ended."""
    runner, learner = make_runner(name, 24, device=device, gae_lambda=0.0, value_norm=False)
    torch.nn.init.orthogonal_(learner.critic.fc2.weight, 8.0)
    found = []
    for _ in range(3):
        rollout = runner.next_rollout()
        learner.estimate(rollout)
        parts = {**rollout, **learner.estimates, "over": rollout["terminated"] | rollout["truncated"]}
        found.append({key: parts[key].clone() for key in ("reward", "target", "value", "over", "terminated")})
    reward, target, value, over, terminated = (torch.cat([part[key] for part in found]) for key in found[0])
    next_value = (target - reward)[:-1] / learner.args.gamma
    tolerance = 1e-4 if device == "cpu" else 1e-2
    torch.testing.assert_close(next_value[~over[:-1]], value[1:][~over[:-1]], rtol=tolerance, atol=tolerance)
    assert over.any() and terminated.any() and not next_value[terminated[:-1]].any()


@EVERY_SCRIPT
def test_only_available_actions_are_drawn_whatever_the_random_numbers(name, monkeypatch):
    learner = learner_of(name)
    player = POLICY_SCRIPTS[name].Player(learner.agents, torch.zeros(MATCHES, SEATS).long(), explore=True)
    avail = torch.arange(ACTIONS) == torch.arange(MATCHES * SEATS).view(MATCHES, SEATS, 1) % ACTIONS
    last_action = torch.zeros(MATCHES, SEATS).long()
    inputs = Inputs(torch.randn(MATCHES, SEATS, OBS), avail, last_action, last_action, last_action)
    for noise in (0.0, 0.5, 1 - 2**-24):
        monkeypatch.setattr(torch, "rand_like", lambda like, noise=noise: torch.full_like(like, noise))
        assert torch.equal(player.act(inputs, 0.0), avail.long().argmax(-1))
        assert player.outputs["log_prob"].abs().max() < 1e-6


def test_the_next_rollout_goes_on_where_the_last_one_stopped():
    long, learner = make_runner("ippo", 48)
    short, _ = make_runner("ippo", 16, learner=learner)
    torch.manual_seed(1)
    expected = long.next_rollout()
    torch.manual_seed(1)
    ended = 0
    for part in range(3):
        rollout, rows = short.next_rollout(), slice(16 * part, 16 * part + 16)
        ended += short.counts[1].item()
        for name in ("obs", "action", "reward", "last_action", "terminated", "next_obs", "log_prob"):
            assert torch.equal(rollout[name], expected[name][rows]), name
    assert ended == long.counts[1].item() > 0 and long.counts[0].item() == 8 * 48


def test_rows_of_a_rollout_follow_each_other():
    runner, _ = make_runner("mappo", 48)
    rollout = runner.next_rollout()
    over = rollout["terminated"] | rollout["truncated"]
    assert over.any() and not over.all(0).any()
    for seen in ("alive", "agent_state"):
        if seen in rollout:
            same = (rollout[seen][1:] == rollout[f"next_{seen}"][:-1]).flatten(2).all(-1)
            assert same[~over[:-1]].all()
            assert not same[over[:-1]].any() or seen == "alive"
    begins = (rollout["last_action"][1:] < 0).all(-1)
    assert torch.equal(begins, over[:-1])
    assert torch.equal(rollout["last_action"][1:][~begins], rollout["action"][:-1][~begins])
    results = runner.results
    m = int(results.valid.nonzero()[0])
    last = int(over[:, m].nonzero()[-1])
    first = last + 1 - int(results.lengths[m])
    torch.testing.assert_close(results.returns[m], rollout["reward"][first : last + 1, m].sum(0))


def test_with_team_mates_matches_start_anew_at_once(tmp_path):
    """Team-mates stay for a round of several matches, each of which they begin without a memory of the last."""
    env = envs.make("stag_hunt_4x4", num_envs=6, seed=3)
    pool = [write_run(tmp_path / str(seed), "iql", env, seed) for seed in (1, 2)]
    agents = [iql.QNetwork(iql.Args(**QUICK), env) for _ in pool]
    for run, network in zip(pool, agents):
        checkpoints.load_networks(run, env, {"target_agents": network})
    team = Team(env, "3other1learner", pool=pool, mix=True)
    learner = POLICY_SCRIPTS["ippo"].Learner(make_args("ippo", num_envs=6, num_steps=32), env, 1)
    fields = (*ippo.FIELDS, "all_obs", "all_action", "all_avail")
    runner = RolloutRunner(env, team, ippo.Player(learner.agents, team.learner_seats, explore=True), fields, 32)
    rounds, seats, cut, before = [], torch.arange(4).repeat(6, 1), 0, None
    in_round = -(-4 * env.match_limit // 32)
    for number in range(2 * in_round):
        rollout = runner.next_rollout()
        over = rollout["terminated"] | rollout["truncated"]
        assert runner.counts.tolist() == [6 * 32, int(over.sum())], "no match waits for the others"
        last_action = torch.cat((rollout["all_action"][:1], rollout["all_action"]))[:-1]
        starts = torch.cat((over[:1], over[:-1]))
        if number % in_round == 0:
            starts[0], h, lengths = True, [None, None], torch.zeros(6, dtype=torch.long)
            rounds.append(team.policy_id.clone())
        else:
            last_action[0], starts[0] = before
        before = rollout["all_action"][-1].clone(), over[-1].clone()
        assert torch.equal(team.policy_id, rounds[-1])
        assert torch.equal((rollout["last_action"] < 0).all(-1), starts)
        last_action = torch.where(starts.unsqueeze(-1), -1, last_action)
        for t in range(32):
            lengths = torch.where(starts[t], 0, lengths) + 1
            for index, network in enumerate(agents):
                h[index] = network.init_hidden(6, 4) if h[index] is None else h[index] * ~starts[t].view(-1, 1, 1)
                q, h[index] = (
                    x[0] for x in network(rollout["all_obs"][t : t + 1], last_action[t : t + 1], h[index], seats)
                )
                mine = team.policy_id == len(env.policies) + index
                best = iql.greedy_action(q, rollout["all_avail"][t])
                assert torch.equal(best[mine], rollout["all_action"][t][mine])
            assert torch.equal(rollout["truncated"][t], (lengths >= env.match_limit) & ~rollout["terminated"][t])
        cut += 0 if (number + 1) % in_round else int((~over[-1]).sum())
    assert cut and runner.rounds == len(rounds) == 2 and not torch.equal(*rounds)


# ---- learning and runs ----
@EVERY_SCRIPT
def test_it_finds_the_best_of_a_matrix_game(name):
    args = make_args(name, num_envs=32, num_steps=8, num_minibatches=1, update_epochs=4, learning_rate=0.01)
    env = matrix_game(32)
    learner, team = make_learner(name, env, args), Team(env, "self")
    player = POLICY_SCRIPTS[name].Player(learner.agents, team.learner_seats, explore=True)
    runner = RolloutRunner(env, team, player, POLICY_SCRIPTS[name].FIELDS, 8)
    for _ in range(15):
        learner.learn(runner.next_rollout(), 0.0)
    learner.metrics.check_finite()
    greedy = EpisodeRunner(env, team, POLICY_SCRIPTS[name].Player(learner.agents, team.learner_seats))
    assert float(greedy.evaluate(32)[0].mean()) == 6
    assert learner.updates == 60


@pytest.mark.parametrize("name", [pytest.param("ippo", marks=pytest.mark.slow), "mappo"])
def test_a_run_stopped_after_every_rollout_equals_one_that_was_not(name, complete_run, tmp_path):
    folder, sessions = stopped(name, tmp_path), 1
    while not (folder / "results.json").exists():
        sessions += 1
        try:
            train(name, tmp_path, resume=folder, time_limit=1e-9)
        except SystemExit as stop:
            assert "stopped at step" in str(stop)
    assert sessions > 3
    assert_same_run(complete_run(name)["run"].folder, folder)
    log = read_log(folder)
    assert {"charts/win_rate", "losses/policy_loss", "losses/value_loss", "eval/win_rate"} <= log.keys()
    assert "charts/epsilon" not in log


@pytest.mark.parametrize(
    ("other", "options"),
    [
        pytest.param("iql", {"matches_per_partner": 2}, marks=pytest.mark.slow),
        ("liam_iql", {"matches_per_partner": 2, "persist_hidden": True, "oracle": True}),
    ],
)
def test_a_run_among_others_is_resumed_exactly(other, options, tmp_path):
    """Also in the middle of a round, where the others remember the match."""
    env = envs.make("stag_hunt_4x4", num_envs=4)
    pool = write_run(tmp_path / other, other, env)
    options |= {"env_id": env.name, "team": f"1NH2{other}1learner", "pool": [pool], "total_timesteps": 200}
    options |= {"teammate_epsilon": (0.1, 0.5), "keep_checkpoints": (0.5, 1)}
    whole = train("ippo", tmp_path / "whole", **options)["run"].folder
    assert {path.name for path in whole.glob("at-*")} == {"at-0.5", "at-1"}
    if other == "iql":
        Team(env, "3ippo1learner", pool=[whole / "at-0.5"])  # a copy is a run that others play with
    folder = stopped("ippo", tmp_path / "parts", **options)
    train("ippo", tmp_path / "parts", resume=folder, **options)
    assert_same_run(whole, folder)


@needs_cuda
@pytest.mark.parametrize(("env_id", "team"), [("3m", "self"), ("stag_hunt_4x4", "scripted")])
@EVERY_SCRIPT
def test_a_run_on_the_gpu_is_captured_and_repeats_exactly(name, env_id, team, tmp_path):
    options = {"env_id": env_id, "team": team, "cuda": True, "total_timesteps": 1500, "final_eval_episodes": 16}
    options["teammate_epsilon"] = (0.1, 0.5) if team == "scripted" else 0.0
    one, other = (train(name, tmp_path / folder, **options)["run"].folder for folder in ("a", "b"))
    found, again = (json.loads((folder / "results.json").read_text()) for folder in (one, other))
    assert found["complete"] and found["args"]["cuda"] and found["final"] == again["final"]


@EVERY_SCRIPT
def test_a_run_plays_as_a_team_mate_as_it_plays_itself(name, tmp_path):
    env = envs.make("3m", num_envs=6, agent_state=True)
    run = write_run(tmp_path / name, name, env)
    env = envs.make("3m", num_envs=6)
    team = Team(env, f"2{name}1learner", pool=[str(run)])
    seats = torch.arange(3).repeat(6, 1)
    own = EpisodeRunner(env, Team(env, "self"), load_player(run, env, seats))
    env.reset()
    last_action = torch.full((6, 3), -1)
    for _ in range(20):
        action = own.policy()
        assert torch.equal(team.joint_action(team.select(action), last_action), action)
        last_action = action.clone()
        env.step(action)


@EVERY_SCRIPT
def test_the_real_game_is_rejected(name):
    with pytest.raises(SystemExit, match="--env-id sc2/3m: this script plays simulated matches"):
        make_args(name, env_id="sc2/3m")


def test_sizes_that_are_refused():
    with pytest.raises(SystemExit, match="--update-epochs is at most 8192, not 1000000000000"):
        make_args("ippo", update_epochs=10**12)
    with pytest.raises(SystemExit, match="--num-minibatches divides --num-envs 10, not 4"):
        make_args("ippo", num_envs=10, num_minibatches=4)


# ---- what the critic of mappo.py sees ----
@pytest.mark.parametrize("env_id", ["3m", "2s3z", "MMM"])
def test_the_state_of_an_agent_in_a_battle(env_id):
    """Every unit once, in columns as in the state, with its place from the agent: itself, other allies, enemies."""
    env = envs.make(env_id, num_envs=3, seed=2, agent_state=True, check=False)
    env.reset()
    while env.info["alive"].all():
        env.step(env.scripted_actions("nearest"))
    info, units, agents = env.info, env.units(), env.n_agents
    assert "agent_state" not in envs.make(env_id).info and info["agent_state"].shape == (3, agents, env.agent_state_dim)
    rule = env._rule
    width, enemy_width = 4 + rule.ally_shield + rule.types, 3 + rule.enemy_shield + rule.types
    for m in range(3):
        state = info["state"][m]
        for a in range(agents):
            if not info["alive"][m, a]:
                assert not info["agent_state"][m, a].any()
                continue
            order = [a, *(b for b in range(agents) if b != a)]
            view = []
            for u in (*order, *range(agents, agents + env.n_enemies)):
                x, y = (float(units[axis][m, u] - units[axis][m, a]) / 9 for axis in "xy")
                distance = (x * x + y * y) ** 0.5
                living = bool(units["health"][m, u] > 0)
                view += [distance, x, y, float(distance < 1)] if living else [0.0] * 4
            expected = [state[b * width : (b + 1) * width] for b in order]
            expected += [torch.tensor(view), state[agents * width : agents * width + env.n_enemies * enemy_width]]
            last_actions = state[rule.state_units :].view(agents, -1)
            expected += [last_actions[order].flatten(), info["avail"][m, a].float()]
            torch.testing.assert_close(info["agent_state"][m, a], torch.cat(expected))
    env.restore(env.snapshot())
    torch.testing.assert_close(env.info["agent_state"][m, a], torch.cat(expected) * info["alive"][m, a])


@pytest.mark.parametrize("env_id", ["stag_hunt_4x4", "kuhn", "3m,obs_instead_of_state=True"])
def test_the_state_of_an_agent_elsewhere_is_state_and_observation(env_id):
    env = envs.make(env_id, num_envs=3, agent_state=True)
    obs, info = env.reset()
    obs, *_, info = env.step(env.scripted_actions(env.policies[0]))
    for a in range(env.n_agents):
        assert torch.equal(info["agent_state"][:, a], torch.cat((info["state"], obs[:, a]), 1))

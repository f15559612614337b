"""Plays whole episodes of all matches in lock step and records them. Nothing here learns.

    runner = EpisodeRunner(env, team, player, fields=("obs", "action", "avail"))
    episodes = runner.play(epsilon=0.1)                     # `Episodes`, one of every match
    episodes.data["obs"]                                    # (episode_limit + 1, matches, seats, obs_dim)

A player acts for the learner's seats. It has

    act(inputs, epsilon)    -> actions (matches, seats), from `Inputs`
    reset(mask)             clears its hidden state where mask (matches,) is set: an episode begins there

and may have

    outputs                 a dictionary of tensors (matches, seats, ...) to record with each step
    per_match               a dictionary of tensors (matches, ...) that `reset` sets, to record once
    memory                  a dictionary of tensors that outlast a match
    forget()                clears `memory`: the next match has new partners
    after_match(episodes)   metrics of the match just played; `evaluate` averages them over first matches with new
                            partners, over second ones, ...
    fields                  the fields that `analyse(episodes)`, which returns metrics, needs; with visible_last_action
                            among them `Inputs` have it as well
    goals(env, seat)        predicted places to mark in a picture
    observe(action, over)   called after each step with everybody's actions (matches, n_agents) and which matches are
                            over (matches,)
    own_graphs              true: it captures what it does by itself, so that a step cannot be captured
"""

import contextlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from envs.batch import GameFailed, memory_of
from training import checkpoints
from training.graphs import Graphed
from training.gru import SeatLinear

CHUNK = 8  # steps captured in one CUDA graph, between two checks whether all matches are over
MAX_INVALID_ROUNDS = 20  # in a row, before giving up
LONG_EVALUATION = 16  # rounds
# recorded for the learner's seats; all_<name>: for everybody
PER_AGENT = ("action", "reward", "obs", "avail", "alive", "last_action", "agent_state")
OF_STEP = ("action", "all_action", "reward", "all_reward", "terminated")  # recorded with the step; the rest after it


# ---- the loop ----
@torch.no_grad()
def play_chunk(runner):
    """A few steps of all matches, as a CUDA graph captures them."""
    for row in range(CHUNK):
        action, obs, reward, terminated, truncated, info = play_step(runner)
        # what was done and what is seen now goes into row `row` of the chunk, under the names that were asked for
        fields = runner.fields(action=action, reward=reward, terminated=terminated, obs=obs, **info)
        runner.record(runner.chunk, row, fields | runner.outputs | runner.watched())
        # a match that is over stays as it is, and its episode grows no longer
        runner.lengths += runner.running
        runner.running &= ~(terminated | truncated)


@torch.no_grad()
def play_step(runner):
    """One step of all matches; returns everybody's actions and what the environment returns."""
    runner.before_step()
    # the learner's seats act on what they see, (matches, seats), and team-mates in all others, (matches, n_agents)
    action = runner.player.act(runner.inputs(), runner.epsilon)
    action = runner.last_action.copy_(runner.team.joint_action(action, runner.team_last_action))
    # every match goes on by one step, and a player with `observe` is shown all actions
    obs, reward, terminated, truncated, info = runner.env.step(action)
    runner.after_step(terminated, truncated)
    return action, obs, reward, terminated, truncated, info


# ---- what goes in and out ----
class Stopped(Exception):
    """Raised by an EpisodeRunner that leaves its game because the run was asked to stop."""


class Inputs(NamedTuple):
    """What a player acts on."""

    obs: torch.Tensor  # (matches, seats, obs_dim)
    avail: torch.Tensor  # (matches, seats, n_actions)
    last_action: torch.Tensor  # (matches, seats), -1 at the start of an episode
    all_last_action: torch.Tensor  # (matches, n_agents)
    seat: torch.Tensor  # (matches, seats), which seats these are
    alive: torch.Tensor | None = None  # (matches, seats), in a match that goes on; None for team-mates
    match: torch.Tensor | None = None  # (matches,), which matches of the environment these are; None: all, in order
    visible_last_action: torch.Tensor | None = None  # (matches, seats, n_agents), see `visible_last_action`


@dataclass
class Episodes:
    """An episode of every match, in memory that the next round overwrites."""

    data: dict  # what was recorded by name, (episode_limit + 1, matches, ...); behind an end old data
    returns: torch.Tensor  # (matches, seats)
    lengths: torch.Tensor  # (matches,)
    won: torch.Tensor  # (matches,)
    valid: torch.Tensor  # (matches,), false where a match of the real game has failed

    def count(self):
        """(steps, valid episodes) as numbers: reading them waits for the device."""
        return int(self.lengths.sum()), int(self.valid.sum())


def visible_last_action(visible, last_action):
    """(matches, seats, n_agents): everybody's last action, as far as a seat sees them now; else, and at first, -1.

    visible (matches, seats, n_agents), of `env.visible`; last_action (matches, n_agents)
    """
    return torch.where(visible, last_action.unsqueeze(1), -1).to(torch.int16)


class EpisodeRunner:
    def __init__(self, env, team, player, fields=(), cudagraphs=True):
        if env.matches_per_episode > 1 and "match_index" not in fields:
            fields = (*fields, "match_index")
        self.rounds = 0
        self.env = env
        self.team = team
        self.player = player
        self.cudagraphs = cudagraphs  # whether steps on the GPU are captured
        # of the run, see `attend`; where other programs play the matches `should_stop` is asked in every step
        self.should_stop, self.show_progress = lambda: False, lambda: None
        self.invalid_rounds = 0  # in a row
        self.last_action = torch.zeros_like(env.actions)
        self.watches = "visible_last_action" in (*fields, *getattr(player, "fields", ()))  # see `watched`
        self.rng = None  # the random state of evaluations, from the first one on
        # of the last evaluation: see returns_by_match, `after_match` of players, returns_by_side
        self.match_returns, self.match_metrics, self.side_returns = {}, {}, []
        recorded = [name for name in ("reward", *fields) if name not in ("policy", *self.per_match)]
        rows = round_up(env.episode_limit, CHUNK) + 1
        values = self.fields(action=env.actions, reward=env.reward, terminated=env.terminated, obs=env.obs, **env.info)
        values |= self.outputs | self.watched()
        needed = rows * sum(values[name].nbytes for name in recorded)
        if needed > memory_of(env.device):
            raise MemoryError(f"a round of {env.num_envs} matches takes {needed / 2**30:.0f} GiB: play fewer at a time")
        self.episodes = {name: values[name].new_zeros((rows, *values[name].shape)) for name in recorded}
        self.chunk = {name: torch.zeros_like(values[:CHUNK]) for name, values in self.episodes.items()}
        self.episodes["seat"] = team.learner_seats.unsqueeze(0)  # the same at all times
        if "policy" in fields:
            self.episodes["policy"] = team.policy_id.unsqueeze(0)
        self.episodes |= {name: values.unsqueeze(0) for name, values in self.per_match.items()}
        self.epsilon = torch.zeros((), device=env.device)
        self.running = torch.zeros_like(env.terminated)
        self.lengths = torch.zeros_like(env.actions[:, 0])
        self.team_last_action = torch.zeros_like(env.actions) if env.matches_per_episode > 1 else self.last_action
        self.play_chunk = self._graphed(lambda: play_chunk(self))
        if env.simulated:
            env.reset()  # so that a snapshot has its random streams

    def _graphed(self, function):
        """The function that plays, captured if all players can be."""
        players = (self.player, *(teammate.player for teammate in getattr(self.team, "players", {}).values()))
        captured = self.env.simulated and not any(getattr(player, "own_graphs", False) for player in players)
        return Graphed(function, self.env.device, self.cudagraphs and captured)

    def fields(self, **values):
        """Values by the names they are recorded under."""
        fields = dict(values)
        for name in PER_AGENT:
            if name in values:
                fields[name] = self.team.select(values[name])
                fields[f"all_{name}"] = values[name]
        return fields

    def watched(self):
        """The last actions that can be seen now, if `fields` of the runner or the player name them."""
        if not self.watches:
            return {}
        return {"visible_last_action": visible_last_action(self.team.select(self.env.visible), self.last_action)}

    @property
    def outputs(self):
        return getattr(self.player, "outputs", {})

    @property
    def per_match(self):
        return getattr(self.player, "per_match", {})

    def _draw_others(self):
        self.team.draw()
        if hasattr(self.player, "forget"):
            self.player.forget()

    def record(self, record, row, values):
        for name in record.keys() & values.keys():
            record[name][row] = values[name]

    def inputs(self):
        """What the player acts on now."""
        select = self.team.select
        return Inputs(
            obs=select(self.env.obs),
            avail=select(self.env.info["avail"]),
            last_action=select(self.last_action),
            all_last_action=self.last_action,
            seat=self.team.learner_seats,
            alive=self.running.unsqueeze(1) & select(self.env.info["alive"]),
            **self.watched(),
        )

    def before_step(self):
        if not self.env.simulated:
            self.check_stop()
        if self.env.matches_per_episode > 1:
            self.match_before = self.env.info["match_index"].clone()

    def after_step(self, terminated, truncated):
        if hasattr(self.player, "observe"):
            self.player.observe(self.last_action, terminated | truncated)
        if self.env.matches_per_episode > 1:  # partners start anew in every match
            new_match = (self.env.info["match_index"] != self.match_before).unsqueeze(1)
            self.team_last_action.copy_(torch.where(new_match, -1, self.last_action))

    def attend(self, should_stop, show_progress):
        """Plays for a run: `should_stop()` says whether to leave a game, `show_progress()` is called between chunks."""
        self.should_stop, self.show_progress = should_stop, show_progress

    def check_stop(self):
        """Raises Stopped when the caller wants an end."""
        if self.should_stop():
            raise Stopped

    def play(self, epsilon=0.0):
        """Plays one episode of every match; returns `Episodes`. Raises Stopped or GameFailed."""
        if self.env.simulated:
            return self._play(epsilon)
        self.env.while_waiting = self.check_stop
        try:
            return self._play(epsilon)
        finally:
            self.env.while_waiting = None

    def _play(self, epsilon):
        if self.rounds % self.team.matches_per_partner == 0:
            self._draw_others()
        self.rounds += 1
        obs, info = self.env.reset()
        self.running.fill_(True)
        self.player.reset(self.running)
        self.lengths.zero_()
        self.episodes["reward"].zero_()
        self.last_action.fill_(-1)
        self.team_last_action.fill_(-1)
        self.epsilon.fill_(epsilon)
        self.record(self.episodes, 0, self.fields(obs=obs, **info) | self.watched())
        for t in range(0, self.env.episode_limit, CHUNK):
            self.play_chunk()
            self.show_progress()
            for name, values in self.chunk.items():
                first = t if name in OF_STEP or name in self.outputs else t + 1
                self.episodes[name][first : first + CHUNK] = values
            if not self.running.any():
                break
        valid = ~info["invalid"]
        self.invalid_rounds = 0 if valid.any() else self.invalid_rounds + 1
        if self.invalid_rounds == MAX_INVALID_ROUNDS:
            raise GameFailed(f"{self.env.name}: no valid match in {MAX_INVALID_ROUNDS} rounds in a row")
        return Episodes(self.episodes, self.episodes["reward"].sum(0), self.lengths, info["won"], valid)

    def collect(self, steps, show=lambda played: None):
        """At least `steps` steps in two or more rounds, a dictionary of copies each; invalid matches are left out.

        `mask` (rows, matches, seats) is set where the learner's seat is alive.
        """
        rounds, played = [], 0
        while played < steps or len(rounds) < 2:
            episodes = self.play()
            lengths, valid = episodes.lengths, episodes.valid
            played += int(lengths.sum())
            rows = torch.arange(int(lengths.max()) + 1, device=lengths.device).view(-1, 1, 1)
            data = {name: values[: len(rows), valid].clone() for name, values in episodes.data.items()}
            data["mask"] = data["alive"] & (rows <= lengths[valid].unsqueeze(-1))
            rounds.append(data)
            show(played)
            self.check_stop()
        return rounds

    @contextlib.contextmanager
    def own_random_numbers(self):
        """A context in which torch's random numbers are of this runner's stream: the caller's one stays as it is."""
        with preserved_rng(self.env.device):
            if self.rng is None:
                torch.manual_seed(int(np.random.SeedSequence([torch.initial_seed(), 1]).generate_state(1)[0]))
            else:
                set_rng_state(self.rng)
            try:
                yield
            finally:
                self.rng = rng_state(self.env.device.type == "cuda")

    def evaluate(self, count):
        """Plays `count` greedy episodes; returns (returns (count, seats), lengths, won) of the valid ones.

        Every partner plays equally often, so a few episodes less may count. All matches with the same partners are
        played, which may take more episodes. The random numbers are not of the training's stream.
        """
        with self.own_random_numbers():
            return self._evaluate(count)

    def _evaluate(self, count):
        results, by_match, metrics = [], {}, {}
        played, per_partner, matches = 0, self.team.matches_per_partner, self.env.num_envs
        self.team.even = True
        self.rounds = round_up(self.rounds, per_partner)  # begins with new partners, also after a round was stopped
        teams = self.team.whole(count if per_partner == 1 else -(-count // (matches * per_partner)) * matches)
        while played < teams * per_partner or self.rounds % per_partner:
            left = teams - len(results) // per_partner * matches  # that still count; 0 or less: failed games
            episodes = self.play()
            numbers, valid = (episodes.returns, episodes.lengths, episodes.won), episodes.valid
            if left > 0:
                valid = valid & (torch.arange(matches, device=valid.device) < left)
            results.append([tensor[valid].cpu() for tensor in (*numbers, *self.returns_by_side(episodes.returns))])
            played += len(results[-1][0])
            if len(results) > LONG_EVALUATION:  # a shorter one is finished, so that the run resumes exactly
                self.check_stop()
            for number, returns in self.returns_by_match().items():
                by_match.setdefault(f"return_{number}", []).append(returns[valid].cpu())
            if hasattr(self.player, "after_match"):
                number = max(self.returns_by_match(), default=1)
                for name, value in self.player.after_match(self.selection()).items():
                    metrics.setdefault(f"{name}_{number}", []).append(value)
        self.match_returns = {name: torch.cat(found).mean().item() for name, found in sorted(by_match.items())}
        self.match_metrics = {name: sum(means) / len(means) for name, means in sorted(metrics.items())}
        results = [torch.cat(tensors)[: teams if per_partner == 1 else None] for tensors in zip(*results)]
        self.side_returns = [returns.nanmean().item() for returns in results[3:]]
        return results[:3]

    def returns_by_side(self, returns):
        """[(matches,) of each side]: what its learners earn on average; nothing if learners play on one side only."""
        if self.env.sides is None or not self.team.is_opposed():
            return []
        side = torch.tensor(self.env.sides, device=returns.device)[self.team.learner_seats]
        return [torch.where(side == number, returns, torch.nan).nanmean(1) for number in (0, 1)]

    def returns_by_match(self):
        """number of a match with the same partners -> returns (matches,) of the last round; {} if it is always 1"""
        reward = self.episodes["reward"].mean(-1)  # (rows, matches)
        if self.team.matches_per_partner > 1:
            return {(self.rounds - 1) % self.team.matches_per_partner + 1: reward.sum(0)}
        if self.env.matches_per_episode == 1:
            return {}
        number = self.episodes["match_index"]  # of row t: the match that step t is played in
        return {n + 1: torch.where(number == n, reward, 0.0).sum(0) for n in range(self.env.matches_per_episode)}

    @torch.no_grad()
    def policy(self, obs=None, info=None):
        """Greedy play, step by step, for a caller that steps the environment: joint actions (matches, n_agents)."""
        starting = (self.env.steps == 0) & (self.env.info["match_index"] == 0)
        if starting.all():
            self._draw_others()
        self.running.fill_(True)
        self.player.reset(starting)
        self.last_action.masked_fill_(starting.unsqueeze(1), -1)
        if self.env.matches_per_episode > 1:
            self.team_last_action.copy_(torch.where((self.env.steps == 0).unsqueeze(1), -1, self.last_action))
        action = self.player.act(self.inputs(), self.epsilon)
        return self.last_action.copy_(self.team.joint_action(action, self.team_last_action))

    def goals(self):
        """Predicted places to mark in a picture of the first match, where the player has such predictions."""
        if not hasattr(self.player, "goals"):
            return []
        return self.player.goals(self.env, int(self.team.learner_seats[0, 0]))

    def selection(self, matches=slice(None)):
        """The recorded episodes of these matches, cut to the longest, with their lengths and everybody's policies."""
        lengths = self.lengths[matches]
        rows = int(lengths.max()) + 1
        episodes = {name: values[:rows, matches] for name, values in self.episodes.items()}
        return episodes | {"lengths": lengths, "policy_id": self.team.policy_id[matches]}

    def others_stay(self):
        """Whether the next round has the same partners again."""
        return self.rounds % self.team.matches_per_partner > 0

    def state_dict(self):
        matches = self.env.snapshot() if self.env.simulated else None
        memory = getattr(self.player, "memory", {})
        rounds = {"rounds": self.rounds, "team_rounds": self.team.rounds}
        return {"matches": matches, **rounds, "memory": memory, "rng": self.rng}

    def begin_anew(self, seed):
        """From here on it plays what a new runner would whose matches have this seed."""
        self.rounds, self.team.rounds, self.rng = 0, 0, None
        if self.env.simulated:
            self.env.reset(seed=seed)

    def load_state_dict(self, state):
        self.rounds, self.team.rounds = (
            checkpoints.check_count(state, name, int) for name in ("rounds", "team_rounds")
        )
        if self.others_stay():
            self.team.rounds -= 1
            self.team.draw()
        for name, values in getattr(self.player, "memory", {}).items():
            values.copy_(state["memory"][name])
        self.rng = state.get("rng")  # not in files of before evaluations had a random state
        if self.rng is not None:
            checkpoints.check_rng_states(self.rng)
        if state["matches"] is not None:
            self.env.restore(state["matches"])


class ScriptedPlayer:
    """A built-in policy of the environment in the learner's seats."""

    def __init__(self, env, policy):
        self.env = env
        self.policy = policy

    def reset(self, mask):
        pass

    def act(self, inputs, epsilon):
        return self.env.scripted_actions(self.policy).gather(1, inputs.seat)


class RandomPlayer:
    """Takes any available action."""

    def reset(self, mask):
        pass

    def act(self, inputs, epsilon):
        noise = torch.rand(inputs.avail.shape, device=inputs.avail.device)
        return noise.masked_fill(~inputs.avail, -1.0).argmax(-1)


class SeatSelection:
    """Some seats of a player that plays all seats of a match, because it has a network for each of them."""

    def __init__(self, player, n_agents):
        self.player = player
        self.n_agents = n_agents
        self.reset = player.reset

    def act(self, inputs, epsilon):
        seat = inputs.seat

        def all_seats(values):
            index = seat.view(*seat.shape, *(1 for _ in values.shape[2:])).expand_as(values)
            return values.new_zeros((len(values), self.n_agents, *values.shape[2:])).scatter(1, index, values)

        last_action = inputs.all_last_action
        every_seat = torch.arange(self.n_agents, device=seat.device).expand(len(seat), -1)
        values = (all_seats(inputs.obs), all_seats(inputs.avail), last_action, last_action, every_seat)
        inputs = Inputs(*values, match=inputs.match)
        return self.player.act(inputs, epsilon).gather(1, seat)


def load_player(run, env, seats):
    """The greedy policy of a run of any script, playing `seats` (matches, seats) of matches like those of `env`."""
    script, _ = checkpoints.script_of(run)
    with preserved_rng(env.device), checkpoints.limited_sizes(run):  # networks are initialised before they are loaded
        player = script.load_player(run, env, seats)
        layers = player.agents.modules() if hasattr(player, "agents") else ()
        if seats.shape[1] == env.n_agents or not any(isinstance(layer, SeatLinear) for layer in layers):
            return player
        every_seat = torch.arange(env.n_agents, device=env.device).repeat(len(seats), 1)
        return SeatSelection(script.load_player(run, env, every_seat), env.n_agents)


def preserved_rng(device):
    """A context that leaves torch's random state as it was."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def rng_state(cuda):
    """Torch's random state: that of the CPU and, where it is used, that of the GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]


def set_rng_state(state):
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1])


def load_runner(run, env, team=None):
    """Plays the greedy policy of a run of any script among `team` (default: the run's own)."""
    if team is None:
        script, args = checkpoints.script_of(run)
        team = script.make_team(args, env, "video")
    player = load_player(run, env, team.learner_seats)
    return EpisodeRunner(env, team, player, getattr(player, "fields", ()))


def round_up(number, multiple):
    return -(-number // multiple) * multiple


def gather(values, episodes, out):
    """values[:, episodes], written to `out`, which may be on another device; returns `out`."""
    if values.device == out.device:
        return torch.index_select(values, 1, episodes, out=out)
    return out.copy_(values.index_select(1, episodes))

"""Plays a fixed number of steps of all matches at a time and records them: what policy gradients learn from.

    runner = RolloutRunner(env, team, player, fields=("obs", "avail", "action", "next_obs"), steps=32)
    rollout = runner.next_rollout()
    rollout["obs"]                                          # (steps, matches, seats, obs_dim)
    runner.results                                          # `Episodes`, valid where a match ended in this rollout

A match that is over starts anew at once, and the next rollout goes on where the last one stopped. Team-mates are drawn
for all matches at the same time. They stay for a round, so many rollouts that several matches fit in, however long they
are. At its end the matches that still go on are cut off: their last value is bootstrapped, as at the end of a rollout,
and they do not count as played.
"""

import sys

import torch

from envs.batch import memory_of
from training import checkpoints
from training.episodes import EpisodeRunner, Episodes, gather, play_step

# A round has time for this many matches of the longest kind. With fewer, more steps are of matches that are cut off;
# with more, new team-mates come later. Of episodes of several matches there is time for two.
MATCHES = 4
STATE = ("last_action", "team_last_action", "returns", "lengths")


class Minibatches:
    """Splits rollouts by matches into so many parts. All use the same memory, so that an update can be replayed."""

    def __init__(self, number):
        self.number = number
        self.memory = {}

    def split(self, data):
        """Yields parts of tensors (time, matches, ...), by name, each with other matches, drawn at random."""
        order = torch.randperm(data["reward"].shape[1]).to(data["reward"].device)
        for matches in order.chunk(self.number):
            for name, values in data.items():
                if name not in self.memory:
                    self.memory[name] = values.new_empty((len(values), len(matches), *values.shape[2:]))
                gather(values, matches, self.memory[name])
            yield self.memory


class RolloutRunner(EpisodeRunner):
    """Besides the fields of EpisodeRunner there are `truncated`; `last_action` (-1 where a match begins);
    `next_<name>`, what was seen after a step, before a match started anew; and `h` (1, matches, ...), the player's
    hidden state before the first step.
    """

    def __init__(self, env, team, player, fields, steps, cudagraphs=True):
        super().__init__(env, team, player, cudagraphs=cudagraphs)
        matches = max(MATCHES, team.matches_per_partner, 2 * env.matches_per_episode)
        longest = matches * env.episode_limit // env.matches_per_episode
        self.rollouts_in_round = -(-longest // steps) if team.used else sys.maxsize
        self.rollouts = 0  # played so far
        self.returns = torch.zeros_like(team.select(env.reward))
        results = [torch.zeros_like(x) for x in (self.returns, self.lengths, self.running, self.running)]
        self.results = Episodes({}, *results)
        self.counts = torch.zeros(2, dtype=torch.long, device=env.device)  # steps and matches of the last rollout
        ends = {"terminated": env.terminated, "truncated": env.terminated}
        values = self._before() | self.fields(action=env.actions, reward=env.reward, **ends) | self._after()
        values |= self.outputs
        names = dict.fromkeys(("reward", *fields))
        needed = steps * sum(values[name].nbytes for name in names)
        if needed > memory_of(env.device):
            raise MemoryError(f"{steps} steps of {env.num_envs} matches take {needed / 2**30:.0f} GiB: play fewer")
        self.rollout = {name: values[name].new_zeros((steps, *values[name].shape)) for name in names}
        self.rollout |= {"seat": team.learner_seats.unsqueeze(0), "h": torch.zeros_like(player.h).unsqueeze(0)}
        self.play_rollout = self._graphed(self._play_rollout)

    def _before(self):
        return self.fields(obs=self.env.obs, last_action=self.last_action, **self.env.info)

    def _after(self):
        return {f"next_{name}": values for name, values in self.fields(obs=self.env.obs, **self.env.info).items()}

    def next_rollout(self):
        """Plays on; returns what was recorded, in memory that the next rollout uses too."""
        if self.rollouts % self.rollouts_in_round == 0:
            self._begin()
        self.results.valid.zero_()
        self.counts.zero_()
        self.play_rollout()
        self.show_progress()
        self.rollouts += 1
        return self.rollout

    def _begin(self):
        """Starts a match everywhere, with new team-mates."""
        self._draw_others()
        self.rounds += 1
        self.env.reset()
        self.running.fill_(True)
        self._clear(self.running)

    def _clear(self, mask):
        """Forgets the last match where one begins."""
        self.player.reset(mask)
        for last_action in (self.last_action, self.team_last_action):
            last_action.masked_fill_(mask.unsqueeze(1), -1)
        self.returns.masked_fill_(mask.unsqueeze(1), 0.0)
        self.lengths.masked_fill_(mask, 0)

    @torch.no_grad()
    def _play_rollout(self):
        self.rollout["h"][0] = self.player.h
        for row in range(len(self.rollout["reward"])):
            self.record(self.rollout, row, self._before())
            action, _, reward, terminated, truncated, info = play_step(self)
            fields = self.fields(action=action, reward=reward, terminated=terminated, truncated=truncated)
            self.record(self.rollout, row, fields | self.outputs | self._after())
            self.returns += fields["reward"]
            self.lengths += 1
            over = terminated | truncated
            self.counts += torch.stack((self.running.sum(), over.sum()))
            results = self.results
            results.returns.copy_(torch.where(over.unsqueeze(1), self.returns, results.returns))
            results.lengths.copy_(torch.where(over, self.lengths, results.lengths))
            results.won.copy_(torch.where(over, info["won"], results.won))
            results.valid.logical_or_(over)
            self.env.reset(mask=over)
            self._clear(over)

    def others_stay(self):
        return self.rollouts % self.rollouts_in_round > 0

    def state_dict(self):
        state = {name: getattr(self, name) for name in ("rollouts", *STATE)} | {"h": self.player.h}
        return super().state_dict() | state | {"team": self.team.memory()}

    def load_state_dict(self, state):
        played = 0 if self.team.used else 1  # of before rollouts were counted, which saved at the end of a round
        self.rollouts = checkpoints.check_count({"rollouts": played, **state}, "rollouts", int)
        super().load_state_dict(state)
        if not self.others_stay():
            return
        self.running.fill_(True)
        for name in STATE:
            getattr(self, name).copy_(state.get(name, self.last_action))
        self.player.h.copy_(state["h"])
        if self.team.used:
            self.team.restore(state["team"])

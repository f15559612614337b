"""Plays a fixed number of steps of all matches at a time and records them: what policy gradients learn from.

    runner = RolloutRunner(env, team, player, fields=("obs", "avail", "action", "next_obs"), steps=32)
    for rollout in runner.rollouts():
        rollout["obs"]                                      # (steps, matches, seats, obs_dim)
    returns, lengths, won, ended = runner.results           # of the matches that ended in these rollouts

Where nobody but the learner plays, a match that is over starts anew at once, and the next rollout goes on where the
last one stopped. Team-mates are drawn for all matches at the same time: there a match that is over waits for the
others, and `rollouts()` goes on to the end of the round.
"""

import torch

from envs.batch import memory_of
from envs.episodes import EpisodeRunner


class RolloutRunner(EpisodeRunner):
    """Besides the fields of EpisodeRunner there are `truncated`; `last_action` (-1 where a match begins); `mask`
    (steps, matches), whether a match was running; `next_<name>`, what was seen after a step, before a match started
    anew; and `h` (1, matches, ...), the player's hidden state before the first step.
    """

    def __init__(self, env, team, player, fields, steps):
        super().__init__(env, team, player)
        self.continuous = not team.used
        self.returns = torch.zeros_like(team.select(env.reward))
        self.results = [torch.zeros_like(x) for x in (self.returns, self.lengths, self.running, self.running)]
        self.counts = torch.zeros(2, dtype=torch.long, device=env.device)  # steps and matches of the last rollouts()
        ends = {"terminated": env.terminated, "truncated": env.terminated}
        values = self._before() | self._fields(action=env.actions, reward=env.reward, **ends) | self._after()
        values |= self.outputs
        names = dict.fromkeys(("reward", *fields))
        needed = steps * sum(values[name].nbytes for name in names)
        if needed > memory_of(env.device):
            raise MemoryError(f"{steps} steps of {env.num_envs} matches take {needed / 2**30:.0f} GiB: play fewer")
        self.rollout = {name: values[name].new_zeros((steps, *values[name].shape)) for name in names}
        self.rollout |= {"seat": team.learner_seats.unsqueeze(0), "h": torch.zeros_like(player.h).unsqueeze(0)}
        self.play_rollout = self._graphed(self._play_rollout)

    def _before(self):
        return self._fields(obs=self.env.obs, last_action=self.last_action, mask=self.running, **self.env.info)

    def _after(self):
        return {f"next_{name}": values for name, values in self._fields(obs=self.env.obs, **self.env.info).items()}

    def rollouts(self):
        """Yields one rollout, or those of a round. All of them use the same memory."""
        if not self.running.any():
            self._begin()
        self.results[-1].zero_()
        self.counts.zero_()
        while True:
            self.play_rollout()
            yield self.rollout
            if self.continuous or not self.running.any():
                break

    def _begin(self):
        """Starts a match everywhere."""
        if self.rounds % self.team.encounter == 0:
            self._draw_others()
        self.rounds += 1
        self.env.reset()
        self.running.fill_(True)
        self._clear(self.running)
        self.team_last_action.fill_(-1)

    def _clear(self, mask):
        """Forgets the last match where one begins."""
        self.player.reset(mask)
        self.last_action.masked_fill_(mask.unsqueeze(1), -1)
        self.returns.masked_fill_(mask.unsqueeze(1), 0.0)
        self.lengths.masked_fill_(mask, 0)

    @torch.no_grad()
    def _play_rollout(self):
        self.rollout["h"][0] = self.player.h
        for row in range(len(self.rollout["reward"])):
            self._record(self.rollout, row, self._before())
            action, _, reward, terminated, truncated, info = self._step()
            fields = self._fields(action=action, reward=reward, terminated=terminated, truncated=truncated)
            self._record(self.rollout, row, fields | self.outputs | self._after())
            self.returns += fields["reward"]
            self.lengths += self.running
            over = (terminated | truncated) & self.running
            self.counts += torch.stack((self.running.sum(), over.sum()))
            for last, values in zip(self.results, (self.returns, self.lengths, info["won"], over)):
                last.copy_(torch.where(over.view(-1, *(1 for _ in last.shape[1:])), values, last))
            if self.continuous:
                self.env.reset(mask=over)
                self._clear(over)
            else:
                self.running &= ~over

    def state_dict(self):
        names = ("last_action", "running", "returns", "lengths")
        return super().state_dict() | {name: getattr(self, name) for name in names} | {"h": self.player.h}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        for name in ("last_action", "running", "returns", "lengths"):
            getattr(self, name).copy_(state[name])
        self.player.h.copy_(state["h"])

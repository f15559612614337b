"""Value decomposition with recurrent agents (VDN): the team's action value is the sum of the seats' own.

Hundreds of matches are played in lock step and stored in a replay buffer on the device. Updates use double Q-learning,
lambda-returns and a slowly moving target network (Sunehag et al. 2018, after PyMARL's VDN).
A match is one of the games that are played side by side; a seat is an agent's place in it.

    python vdn.py --env-id 3m --cuda     docs/value_factorisation.md has the logged keys, the deviations and the results
"""

import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from training.options import RunArgs, TeamArgs, answer_help

STARTED = time.time()  # before the slow imports


@dataclass
class Args(TeamArgs, RunArgs):
    exp_name: str = Path(__file__).stem  # the name of this experiment
    preset: Literal["pymarl"] | None = None  # settings to start from: pymarl, those of SMAC's published results

    env_id: str = "3m"  # the environment: see envs.list_ids()
    team: str = "self"  # self (all seats learn), scripted (one learner, scripted partners), or such as 7qmix1learner
    persist_hidden: bool = False  # whether the hidden state outlasts a match, while the partners stay: one long episode
    oracle: bool = False  # whether observations tell the policies of the other agents, to measure headroom
    num_envs: int | None = None  # matches at a time (default: 1024 on the GPU, 64 or with a team 512 on the CPU)
    total_timesteps: int | None = None  # default: 10 million on the GPU, 1 million or with a team 2 on the CPU

    learning_rate: float = 1e-3  # Adam's learning rate
    gamma: float = 0.97  # discount factor
    reward_scale: float | None = None  # factor of the rewards in targets (default: 5 / env.return_scale)
    td_lambda: float = 0.7  # lambda of the returns; 0 is one-step Q-learning
    tau: float = 0.04  # how far the target network, which plays greedily, moves with every update
    target_interval: int = 0  # updates between copies to the target network (PyMARL: 200, with --tau 0); 0: none
    buffer_size: int | None = None  # episodes (default: 8192 on the GPU, 4096 on the CPU; with a team up to 4 times)
    buffer_device: Literal["same", "cpu"] = "same"  # where the replay buffer is kept
    save_buffer: bool = True  # whether checkpoints include the replay buffer, so that the run resumes exactly
    batch_size: int | None = None  # episodes in an update (default: 128 on the GPU, 32 on the CPU)
    train_frequency: int | None = None  # steps per update, 0: one per episode (default: 500, CPU 200, with a team 400)
    start_e: float = 1.0  # epsilon at the start
    end_e: float = 0.05  # epsilon at the end
    exploration_fraction: float = 0.1  # the fraction of the run over which epsilon falls
    max_grad_norm: float = 10.0  # the norm to which gradients are clipped
    hidden_dim: int = 64  # units of the recurrent layer
    recurrence: bool = True  # whether agents have a memory, or (--no-recurrence) see the present only
    share_parameters: bool = True  # one network for all seats, or (--no-share-parameters) one for each


if __name__ == "__main__":
    answer_help(Args)  # before the slow imports

import torch
import torch.nn as nn
import torch.nn.functional as F

from training import checkpoints
from training.args import buffer_size, check_ranges, fill_in_sizes, parse_args, resolve_device
from training.buffers import SavedBuffer, allocate, padded_length
from training.episodes import EpisodeRunner, gather
from training.exits import UsageError
from training.graphs import Graphed
from training.gru import SeatGRU, SeatLinear, SharedGRU
from training.log import Metrics
from training.metrics import gather_q
from training.run import Run, seed_for, set_up_torch
from training.setup import make_env, make_team, set_up
from training.team import check_common_goal, check_team_options

FIELDS = ("obs", "avail", "alive", "action", "terminated")  # recorded for learning, besides reward and seat
PYMARL = {  # with --preset pymarl
    "num_envs": 1, "train_frequency": 0, "batch_size": 32, "buffer_size": 5000, "learning_rate": 5e-4, "gamma": 0.99,
    "reward_scale": 1.0, "td_lambda": 0.0, "tau": 0.0, "target_interval": 200, "total_timesteps": 2_050_000,
    "exploration_fraction": 50_000 / 2_050_000, "eval_interval": 10_000, "eval_episodes": 32,
}  # fmt: skip


def check_args(args):
    """Rejects invalid values, and fills in the defaults that depend on the device and the team."""
    check_ranges(
        args,
        positive="num_envs total_timesteps buffer_size batch_size hidden_dim reward_scale learning_rate max_grad_norm",
        fractions="gamma td_lambda tau teammate_epsilon start_e end_e exploration_fraction",
        non_negative="train_frequency target_interval",
    )
    if args.team != "self" and not args.share_parameters:
        raise UsageError("--no-share-parameters is for --team self: a learner whose seat changes has one network")
    check_team_options(args)
    resolve_device(args)
    fill_in_sizes(args)
    args.freeze()


# ALGO LOGIC: networks
class QNetwork(nn.Module):
    """The Q-network: Linear, GRU, Linear on observation, own last action and seat."""

    def __init__(self, args, env):
        super().__init__()
        inputs = env.obs_dim + env.n_actions + env.n_agents
        self.hidden_dim = args.hidden_dim
        self.recurrence = args.recurrence
        if args.share_parameters:
            self.fc1 = nn.Linear(inputs, args.hidden_dim)
            self.rnn = SharedGRU(args.hidden_dim, args.hidden_dim)
            self.fc2 = nn.Linear(args.hidden_dim, env.n_actions)
        else:
            self.fc1 = SeatLinear(env.n_agents, inputs, args.hidden_dim)
            self.rnn = SeatGRU(env.n_agents, args.hidden_dim)
            self.fc2 = SeatLinear(env.n_agents, args.hidden_dim, env.n_actions)
        self.register_buffer("seat_one_hot", torch.eye(env.n_agents), persistent=False)
        self.register_buffer("actions", torch.arange(env.n_actions), persistent=False)
        self.to(env.device)

    def init_hidden(self, matches, seats):
        return torch.zeros(matches, seats, self.hidden_dim, device=self.actions.device)

    def forward(self, obs, last_action, h, seat):
        """obs (time, matches, seats, obs_dim), last_action (time, matches, seats) with -1 for none,
        h (matches, seats, hidden), seat (matches, seats) -> Q-values and hidden states of all times
        """
        last_action = (last_action.unsqueeze(-1) == self.actions).to(obs.dtype)
        seat = self.seat_one_hot[seat].expand(*obs.shape[:2], -1, -1)
        x = F.relu(self.fc1(torch.cat((obs, last_action, seat), -1)))
        if self.recurrence:
            h = self.rnn(x, h)  # (time, matches, seats, hidden)
        else:
            h = self.rnn(x.flatten(0, 1).unsqueeze(0), self.init_hidden(*x.flatten(0, 1).shape[:2])).view_as(x)
        return self.fc2(h), h  # (time, matches, seats, actions)


def greedy_action(q, avail):
    return q.masked_fill(~avail, -1e9).argmax(-1)


def lambda_returns(reward, next_value, terminated, truncated, gamma, td_lambda):
    """(time, ...) targets: r + gamma * ((1 - lambda) * next_value + lambda * the next target).

    Where `terminated` nothing follows; where `truncated` the next value stands for all that follows.
    """
    bootstraps = ~terminated
    continues = bootstraps & ~truncated
    target = reward + gamma * torch.where(continues, (1 - td_lambda) * next_value, next_value * bootstraps)
    weight = gamma * td_lambda * continues.to(reward.dtype)
    span = 1
    while span < len(target):  # target[t] = target[t] + weight[t] * target[t + 1], for all t in a few doublings
        target[:-span].add_(weight[: len(target) - span] * target[span:])
        weight = weight[:-span] * weight[span:]
        span *= 2
    return target


class Player:
    """Plays the learner's seats (matches, seats) epsilon-greedily."""

    def __init__(self, agents, seats):
        self.agents = agents
        self.h = agents.init_hidden(*seats.shape)

    def reset(self, mask):
        self.h.masked_fill_(mask.view(-1, 1, 1), 0.0)

    def act(self, inputs, epsilon):
        q, h = self.agents(inputs.obs.unsqueeze(0), inputs.last_action.unsqueeze(0), self.h, inputs.seat)
        self.h.copy_(h[0])
        return epsilon_greedy(q[0], inputs.avail, epsilon)


def epsilon_greedy(q, avail, epsilon):
    noise = torch.rand((*q.shape[:-1], q.shape[-1] + 1), device=q.device)
    return greedy_action(torch.where(noise[..., -1:] < epsilon, noise[..., :-1], q), avail)


class ReplayBuffer:
    """A ring of episodes, time first: (steps + 1, episodes, ...)."""

    def __init__(self, args, episodes, device):
        self.device = torch.device("cpu") if args.buffer_device == "cpu" else device
        self.size = buffer_size(args, episodes, self.device)
        self.data = allocate(episodes, self.size, self.device)
        self.batch = allocate(episodes, args.batch_size, device)
        self.batch["lengths"] = torch.zeros(args.batch_size, dtype=torch.long, device=device)
        self.lengths = torch.zeros(self.size, dtype=torch.long)  # 0: an empty slot
        self.cursor = 0
        self.generator = torch.Generator().manual_seed(seed_for(args.seed, "buffer"))
        self.max_length = len(episodes["reward"]) - 1

    def __len__(self):
        return int((self.lengths > 0).sum())

    def add(self, episodes):
        """Stores the valid episodes of a round."""
        lengths = torch.where(episodes.valid, episodes.lengths, 0).cpu()
        stored = lengths.nonzero().flatten()
        if len(stored) == 0:
            return
        rows = int(lengths.max()) + 1
        first_part = self.size - self.cursor  # as many go to the end of the ring, the rest to its start
        for name, values in episodes.data.items():
            data = self.data[name][:rows]
            new = values[:rows] if len(stored) == len(lengths) else values[:rows, stored.to(values.device)]
            data[:, self.cursor : self.cursor + len(stored)] = new[:, :first_part]
            data[:, : max(len(stored) - first_part, 0)] = new[:, first_part:]
        slots = (torch.arange(len(stored)) + self.cursor) % self.size
        self.lengths[slots] = lengths[stored]
        self.cursor = (self.cursor + len(stored)) % self.size

    def sample(self, batches, batch_size):
        """Yields batches of different episodes, cut after the longest one, rounded up to few different lengths.

        All batches use the same memory, so that a captured update can be replayed on it.
        """
        filled = self.lengths.nonzero().flatten()
        for _ in range(batches):
            episodes = filled[torch.randperm(len(filled), generator=self.generator)[:batch_size]]
            chosen = torch.stack((episodes, self.lengths[episodes]))
            rows = padded_length(int(chosen[1].max()), self.max_length, self.batch["lengths"].is_cuda) + 1
            if self.device.type == "cuda":  # from pinned memory the transfer does not wait for the last update
                chosen = chosen.pin_memory().to(self.device, non_blocking=True)
            batch = {"lengths": self.batch["lengths"].copy_(chosen[1])}
            for name, data in self.data.items():
                batch[name] = gather(data[:rows], chosen[0], self.batch[name][:rows])
            yield batch


class Learner:
    """The networks, the optimiser and the update."""

    def __init__(self, args, env):
        self.args, self.env = args, env
        self.reward_scale = args.reward_scale or 5 / env.return_scale
        self.updates = 0
        self.agents = QNetwork(args, env)
        self.target_agents = copy.deepcopy(self.agents).to(env.device)  # cuDNN wants contiguous weights
        self.parameters = list(self.agents.parameters())
        self.target_parameters = list(self.target_agents.parameters())
        # fused, so that an update that is not finite can be skipped without waiting for the device
        self.optimizer = torch.optim.Adam(self.parameters, args.learning_rate, fused=True, capturable=args.cuda)
        self.metrics = Metrics(env.device)
        self.graphed_update = Graphed(self.update, env.device, args.cudagraphs)

    def networks(self):
        return {"agents": self.agents, "target_agents": self.target_agents}

    def learn(self, buffer, updates):
        for batch in buffer.sample(updates, self.args.batch_size):
            self.graphed_update(batch)
            self.updates += 1
            if self.args.target_interval and self.updates % self.args.target_interval == 0:
                with torch.no_grad():
                    torch._foreach_copy_(self.target_parameters, self.parameters)

    # ALGO LOGIC: the loss
    def mix(self, q, alive):
        """(steps, matches, seats) -> (steps, matches, 1); with individual rewards, who has left counts as 0."""
        return (q if self.env.team_reward else q * alive).sum(-1, keepdim=True)

    def loss(self, batch):
        """The loss of a batch of episodes, time first, and a dictionary of values to log."""
        action, reward = batch["action"][:-1], batch["reward"][:-1]  # (steps, matches, seats)
        avail, alive, seat = batch["avail"], batch["alive"], batch["seat"][0]
        steps_left = batch["lengths"] - torch.arange(len(avail), device=avail.device).unsqueeze(1)  # (rows, matches)
        obs = torch.where(steps_left[..., None, None] >= 0, batch["obs"], 0.0)  # behind an end there is old data
        last_action = torch.cat((torch.full_like(action[:1], -1), action))
        h = self.agents.init_hidden(*seat.shape)
        q, _ = self.agents(obs, last_action, h, seat)  # (steps + 1, matches, seats, actions)
        q_taken = gather_q(q[:-1], action)  # (steps, matches, seats)
        with torch.no_grad():
            target_q, _ = self.target_agents(obs, last_action, h, seat)
            next_value = gather_q(target_q, greedy_action(q, avail))[1:]
            next_value = self.mix(next_value, alive[1:])
            reward = reward[..., :1] if self.env.team_reward else reward.sum(-1, keepdim=True)
            mask = (steps_left[:-1] > 0).unsqueeze(-1).expand_as(next_value)
            terminated = batch["terminated"][:-1].unsqueeze(-1)
            truncated = (steps_left[:-1] == 1).unsqueeze(-1)  # the last step, unless it is terminated
            reward = torch.where(mask, self.reward_scale * reward, 0.0)
            target = lambda_returns(reward, next_value, terminated, truncated, self.args.gamma, self.args.td_lambda)
        q_taken = self.mix(q_taken, alive[:-1])
        td_error = torch.where(mask, q_taken - target, 0.0)
        td_loss = td_error.square().sum() / mask.sum()
        q_values = torch.where(mask, q_taken, 0.0).sum() / mask.sum()
        return td_loss, {"losses/td_loss": td_loss, "losses/q_values": q_values}

    def update(self, batch):
        loss, logs = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        logs["losses/grad_norm"] = nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm)
        finite = self.metrics.add(logs)
        self.optimizer.found_inf = (~finite).float()  # the optimiser skips such a step
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.target_parameters, self.parameters, self.args.tau)


def load_player(run, env, seats):
    """The greedy policy of a run, playing `seats` (matches, seats) of matches like those of `env`."""
    args = checkpoints.load_args(Args, run)
    agents = QNetwork(args, env)
    checkpoints.load_networks(run, env, {"target_agents": agents})
    return Player(agents, seats)


if __name__ == "__main__":
    args = parse_args(Args, __file__, preset=PYMARL)
    check_args(args)
    device = set_up_torch(args)
    env, team, eval_env, eval_team = set_up(args, make_env, make_team, device)
    check_common_goal(args, env, team)
    learner = Learner(args, env)
    runner = EpisodeRunner(env, team, Player(learner.agents, team.learner_seats), FIELDS, args.cudagraphs)
    eval_player = Player(learner.target_agents, eval_team.learner_seats)
    eval_runner = EpisodeRunner(eval_env, eval_team, eval_player, cudagraphs=args.cudagraphs)
    buffer = ReplayBuffer(args, runner.episodes, device)
    state = {"buffer": SavedBuffer(buffer, args.save_buffer), "runner": runner, "eval_runner": eval_runner}

    with Run(args, __file__, STARTED, env, learner, state) as run:
        while run.in_progress():
            # ALGO LOGIC: play a round of episodes, store them, learn from the buffer
            progress = min(run.steps / max(args.exploration_fraction * args.total_timesteps, 1), 1)
            epsilon = args.start_e + (args.end_e - args.start_e) * progress
            episodes = runner.play(epsilon)
            steps, number = episodes.count()  # read before the updates, to wait for less
            buffer.add(episodes)
            every = args.train_frequency  # steps per update; 0, as in PyMARL: an update per episode
            updates = (run.steps + steps) // every - run.steps // every if every else number
            if updates and len(buffer) >= args.batch_size:
                learner.learn(buffer, updates)

            run.count(steps, number)
            if run.log_due() and number:
                run.log(learner.metrics.pop())
                run.log_episodes(episodes, epsilon)
            if run.evaluation_due():
                run.log_evaluation(*eval_runner.evaluate(args.eval_episodes))
            if run.save_due():
                run.save()
        run.finish(*eval_runner.evaluate(args.final_eval_episodes))

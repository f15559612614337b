"""Best-response diversity: a pool of policies that are hard to play with for each other's partners.

K confederates and K best responses are trained together (BRDiv, Rahman et al. 2023, here with Q-learning). Confederate
i maximises its return with best response i minus a multiple of its return with the other best responses; best response
i maximises its return with confederate i. Each confederate is saved as a run of iql.py, as a team-mate for learners.
A match is one of the games that are played side by side; a seat is an agent's place in it.

    python brdiv.py --env-id matrix_bos,limit=10 --population-size 2 --diversity-weight 1     docs/brdiv.md has the rest
    python iql.py --env-id matrix_bos,limit=10 --team 1other1learner --pool "runs/*__brdiv__*/confederate_*"
"""

import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from training.options import RunArgs, answer_help

STARTED = time.time()  # before the slow imports


@dataclass
class Args(RunArgs):
    exp_name: str = Path(__file__).stem  # the name of this experiment

    env_id: str = "3m"  # the environment: see envs.list_ids()
    n_agents: int | None = None  # number of agents, where the environment leaves it open
    num_envs: int | None = None  # matches at a time (default: 1024 on the GPU, 64 on the CPU)
    total_timesteps: int | None = None  # default: 10 million on the GPU, 1 million on the CPU

    population_size: int = 4  # confederates, and as many best responses
    diversity_weight: float = 0.5  # what a confederate's return with other best responses counts, with a minus
    learning_rate: float = 1e-3  # Adam's learning rate
    gamma: float = 0.97  # discount factor
    reward_scale: float | None = None  # factor of the rewards in targets (default: 5 / env.return_scale)
    td_lambda: float = 0.7  # lambda of the returns; 0 is one-step Q-learning
    tau: float = 0.04  # how far the target network, which plays greedily, moves with every update
    target_interval: int = 0  # updates between copies to the target network (PyMARL: 200, with --tau 0); 0: none
    buffer_size: int | None = None  # episodes (default: 8192 on the GPU, 4096 on the CPU)
    buffer_device: Literal["same", "cpu"] = "same"  # where the replay buffer is kept
    save_buffer: bool = True  # whether checkpoints include the replay buffer, so that the run resumes exactly
    batch_size: int | None = None  # episodes in an update (default: 128 on the GPU, 32 on the CPU)
    train_frequency: int | None = None  # steps per update, 0: one per episode (default: 500, on the CPU 200)
    start_e: float = 1.0  # epsilon at the start
    end_e: float = 0.05  # epsilon at the end
    exploration_fraction: float = 0.1  # the fraction of the run over which epsilon falls
    max_grad_norm: float = 10.0  # the norm to which gradients are clipped
    hidden_dim: int = 64  # units of the recurrent layer
    recurrence: bool = True  # whether agents have a memory, or (--no-recurrence) see the present only


if __name__ == "__main__":
    answer_help(Args)  # before the slow imports

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from training import checkpoints
from training.args import buffer_size, check_ranges, fill_in_sizes, option, parse_args, resolve_device
from training.buffers import SavedBuffer, allocate, padded_length
from training.episodes import EpisodeRunner, gather
from training.exits import UsageError
from training.graphs import Graphed
from training.gru import SharedGRU
from training.log import Metrics
from training.metrics import gather_q
from training.run import Run, seed_for, set_up_torch
from training.setup import make_env, set_up

FIELDS = ("obs", "avail", "alive", "action", "terminated", "policy")  # recorded for learning, besides reward and seat


def check_args(args):
    """Rejects invalid values, and fills in the defaults that depend on the device."""
    check_ranges(
        args,
        positive="num_envs total_timesteps buffer_size batch_size hidden_dim reward_scale learning_rate max_grad_norm "
        "population_size",
        fractions="gamma td_lambda tau start_e end_e exploration_fraction",
        non_negative="train_frequency target_interval diversity_weight",
    )
    if args.population_size < 2:
        raise UsageError(f"--population-size is at least 2, not {args.population_size}")
    pairs = 2 * args.population_size * (args.population_size - 1)  # i with j, and as many i with i
    for name in ("eval_episodes", "final_eval_episodes"):
        if getattr(args, name) < pairs:
            raise UsageError(f"{option(name)} is at least {pairs} (every pair), not {getattr(args, name)}")
    resolve_device(args)
    fill_in_sizes(args)
    args.freeze()


def make_team(args, env, purpose):
    if env.n_agents < 2 or env.zero_sum or env.sides is not None:
        raise UsageError(f"--env-id {args.env_id}: this is for two or more agents on one side")
    return Pairs(env, args.population_size)


# ALGO LOGIC: who plays whom
class Pairs:
    """In every match best response j has one seat and confederate i all others; every second match has i = j.

    `learner_seats` (num_envs, n_agents) has the best response's seat first; `policy_id` (num_envs, n_agents) is j there
    and i behind it. An EpisodeRunner uses this as its team: all it records is in that order of seats.
    """

    matches_per_partner = 1

    def __init__(self, env, population_size):
        self.env = env
        self.population_size = population_size
        self.rounds = 0
        self.learner_seats = torch.zeros((env.num_envs, env.n_agents), dtype=torch.long, device=env.device)
        self.policy_id = torch.zeros_like(self.learner_seats)
        self.draw()

    def draw(self):
        """The pairs of the next round: all of them take turns, in all seats."""
        population, matches = self.population_size, self.env.num_envs
        number = np.arange(matches) + matches * self.rounds
        turn = number // 2
        confederate = turn % population
        distance = np.where(number % 2 == 0, 0, 1 + turn // population % (population - 1))  # 0: self-play
        policy_id = np.tile(confederate[:, None], self.env.n_agents)
        policy_id[:, 0] = (confederate + distance) % population
        first_seat = turn // (population * (population - 1))
        seats = (first_seat[:, None] + np.arange(self.env.n_agents)) % self.env.n_agents
        self.policy_id.copy_(torch.from_numpy(policy_id))
        self.learner_seats.copy_(torch.from_numpy(seats))
        self.rounds += 1

    def select(self, values):
        """(num_envs, n_agents, ...) -> the same in the order of `learner_seats`"""
        seats = self.learner_seats.view(*self.learner_seats.shape, *(1 for _ in values.shape[2:]))
        return values.gather(1, seats.expand_as(values))

    def joint_action(self, action, last_action):
        return torch.zeros_like(action).scatter(1, self.learner_seats, action)


# ALGO LOGIC: networks
class Policies(nn.Module):
    """K policies in a Q-network: Linear, GRU, Linear on observation, own last action, seat and the policy's number."""

    def __init__(self, args, env):
        super().__init__()
        inputs = env.obs_dim + env.n_actions + env.n_agents
        self.hidden_dim = args.hidden_dim
        self.recurrence = args.recurrence
        self.fc1 = nn.Linear(inputs + args.population_size, args.hidden_dim)
        self.rnn = SharedGRU(args.hidden_dim, args.hidden_dim)
        self.fc2 = nn.Linear(args.hidden_dim, env.n_actions)
        self.register_buffer("seat_one_hot", torch.eye(env.n_agents), persistent=False)
        self.register_buffer("number_one_hot", torch.eye(args.population_size), persistent=False)
        self.register_buffer("actions", torch.arange(env.n_actions), persistent=False)
        self.to(env.device)

    def init_hidden(self, matches, seats):
        return torch.zeros(matches, seats, self.hidden_dim, device=self.actions.device)

    def forward(self, obs, last_action, h, seat, number):
        """obs (time, matches, seats, obs_dim), last_action (time, matches, seats) with -1 for none,
        h (matches, seats, hidden), seat and number (matches, seats) -> Q-values and hidden states of all times
        """
        last_action = (last_action.unsqueeze(-1) == self.actions).to(obs.dtype)
        seat = self.seat_one_hot[seat].expand(*obs.shape[:2], -1, -1)
        number = self.number_one_hot[number].expand(*obs.shape[:2], -1, -1)
        x = F.relu(self.fc1(torch.cat((obs, last_action, seat, number), -1)))
        if self.recurrence:
            h = self.rnn(x, h)  # (time, matches, seats, hidden)
        else:
            h = self.rnn(x.flatten(0, 1).unsqueeze(0), self.init_hidden(*x.flatten(0, 1).shape[:2])).view_as(x)
        return self.fc2(h), h  # (time, matches, seats, actions)

    def fold(self, number):
        """The weights of one policy as those of a network of iql.py: a constant input is part of the bias."""
        weights = {name: values.clone() for name, values in self.state_dict().items()}
        inputs = self.fc1.in_features - len(self.number_one_hot)
        weights["fc1.bias"] += weights["fc1.weight"][:, inputs + number]
        weights["fc1.weight"] = weights["fc1.weight"][:, :inputs].clone()
        return weights


class QNetwork(nn.Module):
    """The best responses, which play the first of a match's seats, and the confederates, which play the others."""

    def __init__(self, args, env):
        super().__init__()
        self.responses = Policies(args, env)
        self.confederates = Policies(args, env)

    def init_hidden(self, matches, seats):
        return self.responses.init_hidden(matches, seats)

    def forward(self, obs, last_action, h, seat, number):
        """As Policies.forward, of all seats."""
        outputs = []
        for policies, seats in ((self.responses, slice(0, 1)), (self.confederates, slice(1, None))):
            if seat[:, seats].shape[1]:
                hidden = h[:, seats].contiguous()  # for cuDNN
                of_match = seat[:, seats], number[:, seats]
                outputs.append(policies(obs[:, :, seats], last_action[:, :, seats], hidden, *of_match))
        q, h = zip(*outputs)
        return torch.cat(q, 2), torch.cat(h, 2)


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
    """Plays seats (matches, seats) epsilon-greedily, each with the policy of that number (matches, seats)."""

    def __init__(self, agents, seats, number):
        self.agents = agents
        self.number = number
        self.h = agents.init_hidden(*seats.shape)

    def reset(self, mask):
        self.h.masked_fill_(mask.view(-1, 1, 1), 0.0)

    def act(self, inputs, epsilon):
        obs, last_action = inputs.obs.unsqueeze(0), inputs.last_action.unsqueeze(0)
        q, h = self.agents(obs, last_action, self.h, inputs.seat, self.number)
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

    def exports(self):
        """folder -> what a checkpoint has there: each confederate as a run of iql.py"""
        exports = {}
        for number in range(self.args.population_size):
            networks = {name: network.confederates.fold(number) for name, network in self.networks().items()}
            exports[f"confederate_{number}"] = {"algorithm": "iql", "networks": networks, "optimizer": {}}
        return exports

    def learn(self, buffer, updates):
        for batch in buffer.sample(updates, self.args.batch_size):
            self.graphed_update(batch)
            self.updates += 1
            if self.args.target_interval and self.updates % self.args.target_interval == 0:
                with torch.no_grad():
                    torch._foreach_copy_(self.target_parameters, self.parameters)

    # ALGO LOGIC: the loss
    def loss(self, batch):
        """The loss of a batch of episodes, time first, and a dictionary of values to log."""
        action, reward = batch["action"][:-1], batch["reward"][:-1]  # (steps, matches, seats)
        avail, alive, seat, number = batch["avail"], batch["alive"], batch["seat"][0], batch["policy"][0]
        self_play = number[:, :1] == number[:, 1:2]  # (matches, 1): best response and confederate belong together
        is_response = torch.arange(seat.shape[1], device=seat.device) == 0  # (seats,)
        steps_left = batch["lengths"] - torch.arange(len(avail), device=avail.device).unsqueeze(1)  # (rows, matches)
        obs = torch.where(steps_left[..., None, None] >= 0, batch["obs"], 0.0)  # behind an end there is old data
        last_action = torch.cat((torch.full_like(action[:1], -1), action))
        h = self.agents.init_hidden(*seat.shape)
        q, _ = self.agents(obs, last_action, h, seat, number)  # (steps + 1, matches, seats, actions)
        q_taken = gather_q(q[:-1], action)  # (steps, matches, seats)
        with torch.no_grad():
            target_q, _ = self.target_agents(obs, last_action, h, seat, number)
            next_value = gather_q(target_q, greedy_action(q, avail))[1:]
            mask = (steps_left[:-1] > 0).unsqueeze(-1).expand_as(next_value)
            terminated = batch["terminated"][:-1].unsqueeze(-1)
            truncated = (steps_left[:-1] == 1).unsqueeze(-1)  # the last step, unless it is terminated
            if self.env.leaving_ends:  # an agent's own game ends when it leaves
                mask = mask & alive[:-1]
                terminated = terminated | ~alive[1:]
            mask = mask & (self_play | ~is_response)  # a best response learns with its confederate only
            factor = torch.where(self_play, self.reward_scale, -self.args.diversity_weight * self.reward_scale)
            reward = torch.where(mask, factor * reward, 0.0)
            target = lambda_returns(reward, next_value, terminated, truncated, self.args.gamma, self.args.td_lambda)
        squares = torch.where(mask, q_taken - target, 0.0).square()
        values = torch.where(mask, q_taken, 0.0)
        logs = {}
        for name, seats in (("response", slice(0, 1)), ("confederate", slice(1, None))):
            steps = mask[..., seats].sum().clamp(min=1)  # a batch may have no match of self-play
            logs[f"losses/{name}_loss"] = squares[..., seats].sum() / steps
            logs[f"losses/{name}_q_values"] = values[..., seats].sum() / steps
        td_loss = logs["losses/response_loss"] + logs["losses/confederate_loss"]
        return td_loss, {"losses/td_loss": td_loss, **logs}

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
    """The greedy policies of a run, playing `seats` (matches, seats) of matches like those of `env`.

    The first of the seats is a best response's, the others are its confederate's; each match has a pair drawn for it.
    """
    args = checkpoints.load_args(Args, run)
    agents = QNetwork(args, env)
    checkpoints.load_networks(run, env, {"target_agents": agents})
    generator = torch.Generator().manual_seed(args.seed)
    number = torch.randint(args.population_size, (len(seats), 1), generator=generator)
    return Player(agents, seats, number.to(seats.device).expand_as(seats))


def evaluate(runner, count):
    """Plays `count` greedy matches; returns ((returns, lengths, won) of self-play, a dictionary of mean returns)."""
    rounds = []
    with runner.own_random_numbers():
        while sum(len(returns) for returns, *_ in rounds) < count:
            played = runner.play()
            results = (played.returns, played.lengths, played.won, runner.team.policy_id)
            rounds.append([values[played.valid].cpu() for values in results])
    *results, number = (torch.cat(values)[:count] for values in zip(*rounds))
    returns, response, confederate = results[0].mean(1), number[:, 0], number[:, 1]
    self_play = response == confederate
    means = {"self_play": returns[self_play].mean().item(), "cross_play": returns[~self_play].mean().item()}
    for i, j in number[:, [1, 0]].unique(dim=0).tolist():
        means[f"return_{i}_{j}"] = returns[(confederate == i) & (response == j)].mean().item()
    return [values[self_play] for values in results], means


if __name__ == "__main__":
    args = parse_args(Args, __file__)
    check_args(args)
    device = set_up_torch(args)
    env, team, eval_env, eval_team = set_up(args, make_env, make_team, device)
    learner = Learner(args, env)
    player = Player(learner.agents, team.learner_seats, team.policy_id)
    runner = EpisodeRunner(env, team, player, FIELDS, args.cudagraphs)
    eval_player = Player(learner.target_agents, eval_team.learner_seats, eval_team.policy_id)
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
                results, means = evaluate(eval_runner, args.eval_episodes)
                run.log_evaluation(*results, brdiv=means)
            if run.save_due():
                run.save()
        results, means = evaluate(eval_runner, args.final_eval_episodes)
        run.finish(*results, brdiv=means)
    print("return in self-play {self_play:.2f}, in cross-play {cross_play:.2f}".format(**means))

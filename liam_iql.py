"""LIAM, local information agent modelling: act on an embedding of the others, made from one's own past alone.

A recurrent encoder reads what the learner sees and does; its embedding is an input of the Q-network. In training a
decoder gives back from it what the others see and do. Everything else is independent Q-learning, as in omg_iql.py. The
others have fixed policies, drawn anew for every match (Papoudakis, Christianos, Albrecht, NeurIPS 2021).

    python liam_iql.py --env-id 3m --n-agents 8 --cuda            docs/liam_iql.md has every option, key and result
"""

import contextlib
import gc
import importlib.util
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

STARTED = time.time()  # before the imports that take seconds


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of everything that is random"""
    torch_deterministic: bool = True
    """whether torch keeps to algorithms that give the same result every time"""
    cuda: bool = False
    """whether to use the GPU; if there is none, the run says so and uses the CPU"""
    track: bool = False
    """whether Weights and Biases mirrors the TensorBoard logs"""
    wandb_project_name: str = "omg-marl"
    """wandb's project"""
    wandb_entity: str | None = None
    """wandb's entity (team)"""
    wandb_group: str | None = None
    """wandb's group of runs"""
    capture_video: bool = False
    """whether to save a GIF of a match of the final policy"""
    run_root: str = "runs"
    """the folder that run folders are made in"""
    checkpoint_interval: float = 120.0
    """seconds between checkpoints; there is one at the end in any case"""
    save_buffer: bool = True
    """whether checkpoints come with the replay buffer, so that the run resumes exactly"""
    resume: str | None = None
    """a run folder to go on with; other arguments must be as they were"""
    init: str | None = None
    """a run folder whose networks this run starts from"""
    time_limit: float | None = None
    """seconds after which the run saves and stops (it can be resumed)"""

    env_id: str = "3m"
    """the environment: see envs.list_ids()"""
    n_agents: int | None = None
    """number of agents, where the environment leaves it open"""
    team: str = "scripted"
    """who sits where: scripted (one learner among scripted others), self (all learn), or such as 7qmix1liam"""
    pool: tuple[str, ...] = ()
    """run folders of iql.py, vdn.py or qmix.py (patterns will do) that the team's names are found in"""
    seat: str = "rotate"
    """the learner's seat among others: rotate, random or a number"""
    mix_teammates: bool = False
    """whether every other seat draws its own policy, or one is drawn for all of a match"""
    teammate_epsilon: float = 0.0
    """the others' chance of a random action (networks only)"""
    num_envs: int | None = None
    """matches played at a time (default: 1024 on the GPU, 64 or for one seat 512 on the CPU, 8 of the real game)"""
    total_timesteps: int | None = None
    """environment steps of the run (default: 20 million on the GPU, 1 million or for one seat 4 million on the CPU)"""
    eval_interval: int | None = None
    """environment steps between greedy evaluations (default: a 50th of the run; PyMARL: 10,000)"""
    eval_episodes: int = 128
    """matches of an evaluation (PyMARL: 32)"""
    final_eval_episodes: int = 512
    """matches of the last evaluation"""
    log_interval: float = 1.0
    """seconds between lines of the log"""

    learning_rate: float = 1e-3
    """Adam's learning rate"""
    gamma: float = 0.99
    """discount"""
    td_lambda: float = 0.7
    """weight of longer returns in the target; 0 is one-step Q-learning"""
    tau: float = 0.005
    """how far the target network, which plays greedily, moves to the online one with every update"""
    buffer_size: int | None = None
    """episodes in the replay buffer (default: 8192 on the GPU, 4096 on the CPU; for one seat up to four times that)"""
    buffer_device: str = "same"
    """where the replay buffer is kept: same (as the networks) or cpu"""
    batch_size: int | None = None
    """episodes in an update (default: 64 on the GPU, 32 on the CPU)"""
    train_frequency: int | None = None
    """steps for each update (default: 2000 on the GPU, 200 on the CPU; for one seat 1000, 400; 60 of the real game)"""
    start_e: float = 1.0
    """exploration at the start: the chance of a random action"""
    end_e: float = 0.05
    """exploration at the end"""
    exploration_fraction: float = 0.1
    """the share of the run over which exploration falls"""
    max_grad_norm: float = 10.0
    """gradients are scaled down to this norm"""
    hidden_dim: int = 64
    """units of the recurrent layer"""
    dueling: bool = False
    """whether Q is a value plus advantages, from two heads"""
    model_learning_rate: float = 1e-3
    """Adam's learning rate for the opponent model"""
    latent_dim: int = 20
    """size of the embedding"""


if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):
    tyro.cli(Args)  # answers and leaves, before the imports that take seconds

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.utils.tensorboard import SummaryWriter  # noqa: E402
from tqdm import tqdm  # noqa: E402

import envs  # noqa: E402
from envs.team import Team, refuse_another_map, sizes_of  # noqa: E402

CHUNK = 8  # steps between two looks at whether all matches are over; lengths of updates are multiples of it
LENGTHS = 8  # different lengths of updates on the GPU at most: each is a graph with memory of its own
OF_THE_STEP = ("action", "all_action", "reward", "terminated")  # what a story has of the step itself
SEEN = ("obs", "avail", "alive", "action", "all_action", "all_alive", "all_obs")  # what `analyse` looks at


def check(args):
    """Refuses values that make no sense, with what is allowed, and fills in those that depend on the device."""
    positive = "num_envs total_timesteps eval_interval eval_episodes final_eval_episodes buffer_size batch_size"
    positive += " model_learning_rate latent_dim"
    for name in (*positive.split(), "train_frequency", "hidden_dim", "learning_rate", "max_grad_norm", "time_limit"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise SystemExit(f"--{name.replace('_', '-')} is above 0, not {getattr(args, name)}")
    for name in ("gamma", "td_lambda", "tau", "teammate_epsilon", "start_e", "end_e", "exploration_fraction"):
        if not 0 <= getattr(args, name) <= 1:
            raise SystemExit(f"--{name.replace('_', '-')} is from 0 to 1, not {getattr(args, name)}")
    for name in ("checkpoint_interval", "log_interval"):
        if not getattr(args, name) >= 0:
            raise SystemExit(f"--{name.replace('_', '-')} is from 0 up, not {getattr(args, name)}")
    if args.buffer_device not in ("same", "cpu"):
        raise SystemExit(f"--buffer-device is same or cpu, not {args.buffer_device}")
    if args.cuda and not torch.cuda.is_available():
        print("There is no GPU that torch can use: going on with the CPU.")
        args.cuda = False
    elif args.cuda and importlib.util.find_spec("numba_cuda") is None and not args.env_id.startswith("sc2/"):
        print('For the GPU the environments need pip install -e ".[cuda]": going on with the CPU.')
        args.cuda = False
    usual = {"total_timesteps": (20_000_000, 1_000_000), "batch_size": (64, 32)}
    usual |= {"num_envs": (1024, 64), "train_frequency": (2000, 200)}
    if args.env_id.startswith("sc2/"):  # a game that takes its time is learned from more often
        usual |= {"num_envs": (8, 8), "train_frequency": (60, 60)}
    elif args.team != "self":  # a match has less to learn from
        usual |= {"total_timesteps": (20_000_000, 4_000_000), "num_envs": (1024, 512), "train_frequency": (1000, 400)}
    for name, (on_gpu, on_cpu) in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, on_gpu if args.cuda else on_cpu)
    args.eval_interval = args.eval_interval or max(args.total_timesteps // 50, 1)
    least = max(args.batch_size, args.num_envs)
    if args.buffer_size is not None and args.buffer_size < least:
        raise SystemExit(f"--buffer-size holds at least a round and a batch, {least} episodes, not {args.buffer_size}")


def make_env(args, num_envs, device, seed):
    try:
        return envs.make(args.env_id, num_envs=num_envs, device=device, seed=seed, n_agents=args.n_agents, check=False)
    except ValueError as error:
        raise SystemExit(f"--env-id {args.env_id}: {error}") from None


def make_team(args, env, seed):
    if env.n_agents == 1:
        raise SystemExit("--n-agents 1: there is nobody to model")
    others = (args.pool, args.seat, args.mix_teammates, args.teammate_epsilon)
    try:
        return Team(env, args.team, ("liam", "learner"), *others, seed)
    except ValueError as error:
        raise SystemExit(f"--team {args.team}: {error}") from None


# ALGO LOGIC: networks
class Unroll(torch.autograd.Function):
    """All states of a GRU, from what its inputs bring to the gates: cuDNN's, with a quicker gradient of the weights.

    cuDNN's own takes most of a backward pass. What it gives for the gates is enough to have that of the weights from.
    """

    @staticmethod
    def forward(ctx, gates, h, weight, bias):  # (time, rows, 3 * hidden), (rows, hidden)
        with torch.enable_grad():
            gates, h = gates.detach().requires_grad_(), h.detach().requires_grad_()
            parts = torch.eye(len(bias), device=h.device), weight.detach(), torch.zeros_like(bias), bias.detach()
            flat = torch.cat([part.flatten() for part in parts])  # cuDNN wants them in one piece
            weights = [w.view_as(part) for w, part in zip(flat.split([part.numel() for part in parts]), parts)]
            y, _ = torch.gru(gates, h.unsqueeze(0), weights, True, 1, 0.0, True, False, False)
        ctx.kept = gates, h, y, weight, bias
        return y.detach()

    @staticmethod
    def backward(ctx, gradient):
        gates, h, y, weight, bias = ctx.kept
        d_gates, d_h = torch.autograd.grad(y, (gates, h), gradient)
        hidden, before = h.shape[-1], torch.cat((h.unsqueeze(0), y[:-1]))
        reset = torch.sigmoid(gates[..., :hidden] + F.linear(before, weight[:hidden], bias[:hidden]))
        d_hidden = torch.cat((d_gates[..., : 2 * hidden], d_gates[..., 2 * hidden :] * reset), -1).flatten(0, 1)
        return d_gates, d_h, d_hidden.T @ before.flatten(0, 1), d_hidden.sum(0)


class SharedGRU(nn.GRU):
    """A GRU for all seats."""

    def forward(self, x, h):  # (time, matches, seats, inputs), (matches, seats, hidden)
        rows, state = x.flatten(1, 2), h.flatten(0, 1)
        if len(x) == 1:
            y = torch.gru_cell(rows[0], state, *self._flat_weights)  # at a single step cuDNN is slow
        elif x.is_cuda and torch.is_grad_enabled():
            y = Unroll.apply(F.linear(rows, self.weight_ih_l0, self.bias_ih_l0), state, *self._flat_weights[1::2])
        else:
            y, _ = super().forward(rows, state.unsqueeze(0))
        return y.view(*x.shape[:-1], -1)  # (time, matches, seats, hidden)


class Agents(nn.Module):
    """Linear, GRU, Linear on observation, own last action, seat and what the opponent model infers."""

    def __init__(self, env, hidden, inferred, dueling):
        super().__init__()
        self.seats, self.hidden = env.n_agents, hidden
        inputs = env.obs_dim + env.n_actions + env.n_agents + inferred
        self.into, self.gru = nn.Linear(inputs, hidden), SharedGRU(hidden, hidden)
        self.out, self.value = nn.Linear(hidden, env.n_actions), nn.Linear(hidden, 1) if dueling else None
        self.register_buffer("seat", torch.eye(self.seats), persistent=False)
        self.register_buffer("action", torch.arange(env.n_actions), persistent=False)

    def start(self, matches, seats=None):
        return torch.zeros(matches, seats or self.seats, self.hidden, device=self.seat.device)

    def inputs(self, obs, last_action, seat):
        last = (last_action.unsqueeze(-1) == self.action).to(obs.dtype)
        return obs, last, self.seat[seat].expand(*obs.shape[:2], -1, -1)

    def values(self, h):
        q = self.out(h)
        return q if self.value is None else self.value(h) + q - q.mean(-1, keepdim=True)

    def forward(self, obs, last_action, h, seat, inferred):
        """(time, matches, seats, ...) but h (matches, seats, hidden) and seat (matches, seats) -> Q, h of all times"""
        x = torch.cat((*self.inputs(obs, last_action, seat), inferred), -1)
        h = self.gru(F.relu(self.into(x)), h)  # (time, matches, seats, hidden)
        return self.values(h), h  # (time, matches, seats, actions)


# ALGO LOGIC: the opponent model's network
def seats_from(env):
    """(agents, agents): for every seat its own, then the others' in the order in which its observation has them."""
    seat, own = torch.arange(env.n_agents), torch.arange(env.n_agents).unsqueeze(1)
    if env.ego_first:
        return (own + seat) % env.n_agents
    return torch.cat((own, seat[:-1] + (seat[:-1] >= own)), 1)


class Inference(nn.Module):
    """What the own past tells of the others: a GRU, an embedding, and a decoder to train it by."""

    def __init__(self, env, latent, memory=96):
        super().__init__()
        self.memory = memory
        self.past, self.code = SharedGRU(env.obs_dim + env.n_actions, memory), nn.Linear(memory, latent)
        self.decoder, others = nn.Linear(latent, 128), env.n_agents - 1
        self.obs_out, self.action_out = nn.Linear(128, others * env.obs_dim), nn.Linear(128, others * env.n_actions)
        self.register_buffer("order", seats_from(env), persistent=False)
        self.register_buffer("action", torch.arange(env.n_actions), persistent=False)

    def start(self, matches, seats):
        return torch.zeros(matches, seats, self.memory, device=self.order.device)

    def forward(self, obs, last_action, h):
        """(time, matches, own seats, ...) but h (matches, own seats, memory) -> embedding, h of all times"""
        last = (last_action.unsqueeze(-1) == self.action).to(obs.dtype)
        h = self.past(torch.cat((obs, last), -1), h)
        return self.code(h), h

    def decode(self, embedding):
        """(observations, logarithms of the actions' probabilities) of the others: (..., others, features)"""
        x = F.relu(self.decoder(embedding))
        obs, action = self.obs_out(x), self.action_out(x).unflatten(-1, (-1, len(self.action)))
        return obs.unflatten(-1, (action.shape[-2], -1)), F.log_softmax(action, -1)


def best_action(q, avail):
    return q.masked_fill(~avail, -1e9).argmax(-1)


def value_of(action, q):
    """(...), (..., actions) -> (...): what a gather gives, but its gradient is quick to take in a fixed order too."""
    return torch.where(action.unsqueeze(-1) == torch.arange(q.shape[-1], device=q.device), q, 0.0).sum(-1)


def lambda_returns(reward, bootstrap, ended, last, gamma, td_lambda):
    """(time, ...) targets: r + gamma * ((1 - lambda) * bootstrap + lambda * the next target).

    `ended`: nothing follows; `last`: nothing later is known, so the bootstrap stands for all of it (a time limit).
    """
    going_on = ~ended
    goes_far = going_on & ~last
    target = reward + gamma * torch.where(goes_far, (1 - td_lambda) * bootstrap, bootstrap * going_on)
    weight = gamma * td_lambda * goes_far.to(reward.dtype)
    span = 1
    while span < len(target):  # target[t] = target[t] + weight[t] * target[t + 1], for all t in a few doublings
        target[:-span].add_(weight[: len(target) - span] * target[span:])
        weight = weight[:-span] * weight[span:]
        span *= 2
    return target


class Graphed:
    """Calls a function without arguments; on CUDA the second call captures it as a graph, later ones replay that."""

    def __init__(self, function, device):
        self.function, self.captures, self.graph, self.calls = function, device.type == "cuda", None, 0

    def __call__(self):
        self.calls += 1
        if not self.captures:
            self.function()
        elif self.calls == 1:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.function()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                gc.disable()  # memory that is freed during a capture ends it
                with torch.cuda.graph(self.graph):
                    self.function()
                gc.enable()
            self.graph.replay()


class Rollout:
    """Plays whole episodes of all matches in lock step; `story` keeps what is to be learned from, time first."""

    def __init__(self, env, agents, inference, kept, team):
        self.env, self.agents, self.inference, self.team, device = env, agents, inference, team, env.device
        rows, own = -(-env.episode_limit // CHUNK) * CHUNK + 1, self.team.own.shape
        fields = self.mine(action=env.actions, reward=env.reward, terminated=env.terminated, obs=env.obs, **env.info)
        self.story = {name: fields[name].new_zeros((rows, *fields[name].shape)) for name in ("reward", *kept)}
        self.part = {name: torch.zeros_like(values[:CHUNK]) for name, values in self.story.items()}
        self.epsilon = torch.zeros((), device=device)
        self.story["seat"] = self.team.own.unsqueeze(0)  # the same at all times of a match
        self.h, self.last_action = agents.start(*own), torch.zeros_like(env.actions)
        self.memory = inference.start(*own)
        self.running, self.lengths = torch.zeros_like(env.terminated), torch.zeros_like(env.actions[:, 0])
        self.chunk = Graphed(self.steps, device) if env.simulated else self.steps
        if env.simulated:
            env.reset()  # so that a snapshot has its random streams

    def mine(self, **values):
        """The learner's seats of what agents have each, and everybody's under other names."""
        agents = ("action", "reward", "obs", "avail", "alive")
        everybody = {f"all_{name}": values[name] for name in agents if name in values}
        return everybody | {name: self.team.mine(value) if name in agents else value for name, value in values.items()}

    def write(self, where, row, values):
        for name in where.keys() & values.keys():
            where[name][row] = values[name]

    @torch.no_grad()
    def act(self):
        """Everybody's actions now, (matches, agents); what the networks remember goes on by a step."""
        obs, last = (self.team.mine(x).unsqueeze(0) for x in (self.env.obs, self.last_action))
        inferred, memory = self.inference(obs, last, self.memory)
        q, h = self.agents(obs, last, self.h, self.team.own, inferred)
        noise = torch.rand((*q.shape[1:-1], q.shape[-1] + 1), device=q.device)
        wish = torch.where(noise[..., -1:] < self.epsilon, noise[..., :-1], q[0])
        action = self.team.complete(best_action(wish, self.team.mine(self.env.info["avail"])), self.last_action)
        self.h.copy_(h[0])
        self.memory.copy_(memory[0])
        self.last_action.copy_(action)
        return action

    @torch.no_grad()
    def steps(self):
        for row in range(CHUNK):
            action = self.act()
            obs, reward, terminated, truncated, info = self.env.step(action)
            step = self.mine(action=action, reward=reward, terminated=terminated, obs=obs, **info)
            self.write(self.part, row, step)
            self.lengths += self.running
            self.running &= ~(terminated | truncated)

    def play(self, epsilon):
        """One episode of every match: (returns (matches, seats), lengths, won, valid), there until the next call."""
        self.team.draw()
        obs, info = self.env.reset()
        for tensor in (self.h, self.memory, self.lengths, self.story["reward"]):
            tensor.zero_()
        self.last_action.fill_(-1)
        self.running.fill_(True)
        self.epsilon.fill_(epsilon)
        self.write(self.story, 0, self.mine(obs=obs, **info))
        for t in range(0, self.env.episode_limit, CHUNK):
            self.chunk()
            for name, values in self.part.items():
                first = t if name in OF_THE_STEP else t + 1  # the rest is seen after the step
                self.story[name][first : first + CHUNK] = values
            if not self.running.any():
                break
        return self.story["reward"].sum(0), self.lengths, info["won"], ~info["invalid"]


def bytes_of_episode(story):
    return sum(values[:, 0].nbytes for values in story.values())


def usual_size(story, args):
    """Episodes in the buffer by default. One learner among others does better with more of them, if they are small."""
    size, each = 8192 if args.cuda else 4096, bytes_of_episode(story)
    if args.team != "self":
        size = max(size, min(4 * size, (4 if args.cuda else 2) * 2**30 // each))
    most = (16 if args.cuda else 8) * 2**30 // each  # only episodes of very many units are so large
    return max(min(size, most), args.num_envs, args.batch_size)


class Buffer:
    """A ring of episodes, time first: (steps + 1, episodes, ...)."""

    def __init__(self, story, size, device, seed):
        each = bytes_of_episode(story)
        room = torch.cuda.mem_get_info()[0] if device.type == "cuda" else free_memory()
        takes, fits = f"{each * size / 2**30:.2f} GiB on the {device.type.upper()}", int(0.9 * min(room / each, 2**31))
        print(f"The replay buffer takes {takes}, {each / 2**10:.0f} KiB an episode.")
        if size > fits:
            raise SystemExit(
                f"That does not fit into the {room / 2**30:.2f} GiB that are free: --buffer-size {fits} would."
            )
        self.data = {
            name: torch.zeros((len(values), size, *values.shape[2:]), dtype=values.dtype, device=device)
            for name, values in story.items()
        }
        self.device, self.cursor = device, 0
        self.lengths = torch.zeros(size, dtype=torch.long)  # 0: nothing there
        self.generator = torch.Generator().manual_seed(seed)

    def add(self, story, lengths, valid):
        """Keeps the valid episodes of a round."""
        lengths = torch.where(valid, lengths, 0).cpu()
        keep = lengths.nonzero().flatten()
        if len(keep) == 0:
            return
        slots = (torch.arange(len(keep)) + self.cursor) % len(self.lengths)
        rows, room = int(lengths.max()) + 1, len(self.lengths) - self.cursor  # until the ring begins anew
        for name, values in story.items():
            data = self.data[name][:rows]
            episodes = values[:rows] if len(keep) == len(lengths) else values[:rows, keep.to(values.device)]
            data[:, self.cursor : self.cursor + len(keep)] = episodes[:, :room]
            data[:, : max(len(keep) - room, 0)] = episodes[:, room:]
        self.lengths[slots] = lengths[keep]
        self.cursor = (self.cursor + len(keep)) % len(self.lengths)

    def sample(self, batches, count):
        """(batches, 2, count): numbers and lengths of episodes, no two alike in a batch."""
        there = self.lengths.nonzero().flatten()
        orders = [torch.randperm(len(there), generator=self.generator)[:count] for _ in range(batches)]
        episodes = there[torch.stack(orders)]
        return torch.stack((episodes, self.lengths[episodes]), 1)


def masked_mean(mask, values):
    """The mean of the values that the mask selects."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


class Learner:
    """The networks, the optimiser, and the update, which is one captured graph for every length of a batch."""

    def __init__(self, args, env):
        self.args, self.env, self.updates, self.graphs, self.batch = args, env, 0, {}, {}
        self.online, self.target = ({"agents": make_agents(args, env)} for _ in range(2))
        for name, network in self.target.items():
            network.load_state_dict(self.online[name].state_dict())
        self.model = make_model(args, env)
        self.parameters = [p for network in self.online.values() for p in network.parameters()]
        self.target_parameters = [p for network in self.target.values() for p in network.parameters()]
        self.model_parameters = list(self.model["inference"].parameters())
        groups = [{"params": self.parameters}, {"params": self.model_parameters, "lr": args.model_learning_rate}]
        # fused, so that an update that is not finite can be skipped without asking the device
        self.optimizer = torch.optim.Adam(groups, args.learning_rate, eps=1e-5, fused=True, capturable=args.cuda)
        self.sums, self.wrong = (torch.zeros(5, device=env.device) for _ in range(2))

    def learn(self, buffer, updates):
        """Updates, each from a batch of episodes."""
        chosen = buffer.sample(updates, self.args.batch_size)
        longest = chosen[:, 1].amax(1).tolist()
        rows = -(-self.env.episode_limit // CHUNK) * CHUNK
        unit = CHUNK * -(-rows // (CHUNK * LENGTHS)) if self.args.cuda else CHUNK
        if not self.batch:
            for name, data in buffer.data.items():
                shape = (len(data), chosen.shape[-1], *data.shape[2:])
                self.batch[name] = data.new_empty(shape, device=self.env.device)
            self.batch["lengths"] = torch.zeros_like(chosen[0, 1], device=self.env.device)
        for (episodes, lengths), steps in zip(chosen.to(buffer.device), longest):  # moved at once: each move waits
            steps = min(-(-steps // unit) * unit, rows)
            for name, data in buffer.data.items():
                self.batch[name][: steps + 1] = data[: steps + 1].index_select(1, episodes)
            self.batch["lengths"].copy_(lengths)
            if steps not in self.graphs:
                part = {name: data[: steps + 1] if name != "lengths" else data for name, data in self.batch.items()}
                self.graphs[steps] = Graphed(lambda part=part: self.update(part), self.env.device)
            self.graphs[steps]()
            self.updates += 1

    def inputs(self, batch):
        """(obs, own last actions, steps left) of episodes, time first; obs is 0 where nobody is there to see."""
        action, avail, alive = batch["action"][:-1], batch["avail"], batch["alive"]
        time_left = batch["lengths"] - torch.arange(len(avail), device=avail.device).unsqueeze(1)  # (rows, matches)
        shown = (time_left >= 0).unsqueeze(-1) & (alive | self.env.team_reward)
        obs = torch.where(shown.unsqueeze(-1), batch["obs"], 0.0)  # the buffer has anything behind an end
        return obs, torch.cat((torch.full_like(action[:1], -1), action)), time_left

    # ALGO LOGIC: the opponent model
    def others(self, batch, time_left):
        """(their seats, their actions, where they are alive and the learner is there to see), in the model's order"""
        seat = self.model["inference"].order[batch["seat"][0]][..., 1:].expand(len(time_left) - 1, -1, -1, -1)
        action, alive = (batch[name][:-1].unsqueeze(2) for name in ("all_action", "all_alive"))
        action, alive = (x.expand(-1, -1, seat.shape[2], -1).gather(-1, seat) for x in (action, alive))
        there = batch["alive"][:-1] & (time_left[:-1] > 0).unsqueeze(-1)
        return seat, action, there.unsqueeze(-1) & alive  # (steps, matches, own seats, others)

    def model_loss(self, batch, obs, before, time_left):
        """(what goes into the Q-network at every row of episodes, the model's loss, what it got right)"""
        inference = self.model["inference"]
        inferred, _ = inference(obs, before, inference.start(*batch["seat"].shape[1:]))
        rebuilt, logs = inference.decode(inferred[:-1])
        seat, action, mask = self.others(batch, time_left)
        seen = batch["all_obs"][:-1].unsqueeze(2).expand(-1, -1, seat.shape[2], -1, -1)
        seen = seen.gather(3, seat.unsqueeze(-1).expand(-1, -1, -1, -1, seen.shape[-1]))
        seen = torch.where(mask.unsqueeze(-1), seen, 0.0)  # (steps, matches, own seats, others, obs)
        obs_error = masked_mean(mask, (rebuilt - seen).square().mean(-1))
        loss = obs_error + masked_mean(mask, -value_of(action, logs))
        right = masked_mean(mask, (logs.argmax(-1) == action).float())
        return inferred.detach(), loss, {"action_accuracy": right, "obs_error": obs_error}

    # ALGO LOGIC: the losses
    def loss(self, batch):
        """(the Q-network's loss, the model's, the mean value of the actions taken) of episodes, time first."""
        action, reward, avail, alive = batch["action"][:-1], batch["reward"][:-1], batch["avail"], batch["alive"]
        obs, before, time_left = self.inputs(batch)
        start, seat = self.online["agents"].start(*action.shape[1:]), batch["seat"][0]
        inferred, model_loss, _ = self.model_loss(batch, obs, before, time_left)
        q, _ = self.online["agents"](obs, before, start, seat, inferred)  # (steps + 1, matches, seats, actions)
        chosen = value_of(action, q[:-1])  # (steps, matches, seats)
        with torch.no_grad():
            target_q, _ = self.target["agents"](obs, before, start, seat, inferred)
            following = value_of(best_action(q, avail), target_q)[1:]
            ended, mask, last = batch["terminated"][:-1], time_left[:-1] > 0, time_left[:-1] == 1
            ended, mask, last = (flags.unsqueeze(-1).expand_as(reward) for flags in (ended, mask, last))
            if not self.env.team_reward:  # an agent's own game ends when it leaves
                ended, mask = ended | ~alive[1:], mask & alive[:-1]
            reward = torch.where(mask, reward, 0.0)
            target = lambda_returns(reward, following, ended, last, self.args.gamma, self.args.td_lambda)
        error = torch.where(mask, chosen - target, 0.0)
        return error.square().sum() / mask.sum(), model_loss, torch.where(mask, chosen, 0.0).sum() / mask.sum()

    def update(self, batch):
        loss, model_loss, value = self.loss(batch)
        self.optimizer.zero_grad()
        (loss + model_loss).backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm)
        model_norm = nn.utils.clip_grad_norm_(self.model_parameters, self.args.max_grad_norm)
        with torch.no_grad():
            numbers = torch.stack((loss, model_loss, value, norm, model_norm))
            wrong = ~torch.isfinite(numbers)
            bad = wrong.any()
            self.optimizer.found_inf = bad.float()
            self.optimizer.step()
            torch._foreach_lerp_(self.target_parameters, self.parameters, self.args.tau)
            self.sums += torch.where(bad, 0.0, numbers)
            self.wrong += wrong

    def check_finite(self):
        """Stops the run if an update was not finite."""
        if any(wrong := self.wrong.tolist()):
            raise FloatingPointError(f"{'the loss' if wrong[0] + wrong[1] else 'a gradient'} was not finite")

    def report(self):
        """The sums since the last report."""
        self.check_finite()
        sums = dict(zip(("td_loss", "model_loss", "q_values", "grad_norm"), self.sums.tolist()))
        self.sums.zero_()
        return sums


def make_agents(args, env):
    return Agents(env, args.hidden_dim, args.latent_dim, args.dueling).to(env.device)


def make_model(args, env):
    return {"inference": Inference(env, args.latent_dim).to(env.device)}


def free_memory():
    """Bytes of the CPU's memory that can be had, where the system says so."""
    facts = Path("/proc/meminfo")  # memory that is free alone would leave out what files fill until it is needed
    if not facts.exists():
        return float("inf")
    kibibytes = dict(line.split(":") for line in facts.read_text().splitlines())["MemAvailable"].split()[0]
    return int(kibibytes) * 1024


# ---- evaluation ----
def evaluate(rollout, episodes):
    """Greedy matches, at least so many, the valid ones: returns (matches, seats), lengths and won (matches,)."""
    results, played = [], 0
    while played < episodes:
        *numbers, valid = rollout.play(epsilon=0.0)
        results.append([tensor[valid].cpu() for tensor in numbers])
        played += len(results[-1][0])
    return [torch.cat(parts)[:episodes] for parts in zip(*results)]


def interval(successes, trials):
    """Wilson's 95% interval of a share."""
    z, share = 1.959964, successes / trials
    centre, spread = share + z * z / (2 * trials), z * (share * (1 - share) / trials + z * z / (4 * trials**2)) ** 0.5
    return [(centre - spread) / (1 + z * z / trials), (centre + spread) / (1 + z * z / trials)]


# ---- is the embedding right? ----
def sensitivity(learner, batch, inferred):
    """Mean change of Q when what is inferred is exchanged between matches, as long as the learner of both is there."""
    (obs, before, time_left), seat, agents = learner.inputs(batch), batch["seat"][0], learner.target["agents"]
    q, exchanged = (agents(obs, before, agents.start(*seat.shape), seat, x)[0] for x in (inferred, inferred.roll(1, 1)))
    there = batch["alive"] & (time_left > 0).unsqueeze(-1)
    there &= there.roll(1, 1)
    return masked_mean(there.unsqueeze(-1) & batch["avail"], (q - exchanged).abs()).item()


@torch.no_grad()
def analyse(args, learner, rollout, matches=64):
    """How right the model was in the round just played, and whether Q listens: docs/liam_iql.md."""
    rows = int(rollout.lengths[:matches].max()) + 1
    batch = {name: values[:rows, :matches] for name, values in rollout.story.items()}
    batch["lengths"] = rollout.lengths[:matches]
    inferred, _, numbers = learner.model_loss(batch, *learner.inputs(batch))
    right = {name: number.item() for name, number in numbers.items()}
    if inferred.shape[1] > 1:  # one match has nobody to exchange with
        right["q_sensitivity"] = sensitivity(learner, batch, inferred)
    return right


def policy_of(rollout):
    """Greedy play of the matches of `env` with the run's team: act(obs, info) -> actions (matches, seats)."""
    env = rollout.env

    @torch.no_grad()
    def act(obs, info):
        begun = (env.steps > 0).view(-1, 1)  # a match that has just started has no past
        if not begun.any():
            rollout.team.draw()
        for tensor in (rollout.h, rollout.memory):
            tensor *= begun.unsqueeze(-1)
        rollout.last_action.masked_fill_(~begun, -1)
        return rollout.act()

    return act


def film(args, learner, device, path):
    """A GIF of one greedy match."""
    from PIL import Image

    env = make_env(args, 1, device, args.seed + 2)
    team, over = make_team(args, env, args.seed + 2), False
    act = policy_of(Rollout(env, learner.target["agents"], learner.model["inference"], (), team))
    obs, info = env.reset()
    frames = [Image.fromarray(env.render())]
    while not over:
        obs, _, terminated, truncated, info = env.step(act(obs, info))
        frames.append(Image.fromarray(env.render()))
        over = bool(terminated[0] | truncated[0])
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=120, loop=0)


# ---- checkpoints: tensors and plain types only ----
def write_file(content, path):
    """In one piece or not at all, and whether it was; a disk that is full is a warning."""
    part = path.with_suffix(".part")
    try:
        torch.save(content, part)
        os.replace(part, path)
        return True
    except (OSError, RuntimeError) as error:
        print(f"warning: {path} was not written ({error}); the run goes on", file=sys.stderr)
        with contextlib.suppress(OSError):
            part.unlink()
        return False


def read_file(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def known(arguments):
    """Those of a run that this version still has."""
    return {name: value for name, value in arguments.items() if name in Args.__dataclass_fields__}


def load_rollout(run, env, team=None):
    """(arguments, learner, rollout) of a run, for matches of `env`, among `team` or the run's own."""
    saved = read_file(Path(run) / "checkpoint.pt")
    refuse_another_map(run, saved, env)
    args = Args(**{**known(saved["args"]), "cuda": env.device.type == "cuda"})
    learner = Learner(args, env)
    for which in ("online", "target", "model"):
        for name, network in getattr(learner, which).items():
            network.load_state_dict(saved[which][name])
    team = team or make_team(args, env, args.seed + 2)
    return args, learner, Rollout(env, learner.target["agents"], learner.model["inference"], SEEN, team)


def load_policy(run, env):
    """The greedy policy of a run, for matches of `env`: act(obs, info) -> actions."""
    return policy_of(load_rollout(run, env)[-1])


def start_from(args, learner):
    """The networks of an earlier run, as far as both have them."""
    path = Path(args.init) / "checkpoint.pt"
    if not path.exists():
        raise SystemExit(f"--init {args.init}: there is no checkpoint.pt")
    saved = read_file(path)
    try:
        refuse_another_map(f"--init {args.init}", saved, learner.env)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for which in ("online", "target", "model"):
        for name, network in getattr(learner, which).items():
            try:
                network.load_state_dict(saved.get(which, {}).get(name, network.state_dict()))
            except RuntimeError:
                told = f"the {name} of a run of {saved['algorithm']}.py do not fit: other sizes or options"
                raise SystemExit(f"--init {args.init}: {told}") from None


def save(run, args, learner, buffer, rollouts, progress):
    """checkpoint.pt: what it takes to act and to go on; resume.pt: what else it takes to go on exactly."""
    learner.check_finite()  # nothing that is not finite is saved
    networks = {
        which: {name: network.state_dict() for name, network in getattr(learner, which).items()}
        for which in ("online", "target", "model")
    }
    about = {"algorithm": Path(__file__).stem, "env_id": args.env_id, "sizes": sizes_of(learner.env)}
    about["args"] = asdict(args)
    state = {"optimizer": learner.optimizer.state_dict(), "updates": learner.updates, "progress": progress}
    written = write_file({**about, **networks, **state}, run / "checkpoint.pt")
    if progress["complete"]:
        if written:
            (run / "resume.pt").unlink(missing_ok=True)
        return
    exact = {
        "steps": progress["steps"],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if args.cuda else None,
        "sampling": buffer.generator.get_state(),
        "matches": [rollout.env.snapshot() for rollout in rollouts if rollout.env.simulated],
        "rounds": [rollout.team.rounds for rollout in rollouts],
    }
    if args.save_buffer:
        filled = int((buffer.lengths > 0).sum())
        exact |= {"lengths": buffer.lengths, "cursor": buffer.cursor}
        exact["episodes"] = buffer.data
        if filled < len(buffer.lengths):  # a full one is not copied: it may be most of the memory
            exact["episodes"] = {name: data[:, :filled].clone() for name, data in buffer.data.items()}
    write_file(exact, run / "resume.pt")


def restore(run, args, learner, buffer, rollouts):
    """Puts a saved run back; returns its progress."""
    saved, path = read_file(run / "checkpoint.pt"), run / "resume.pt"
    for which in ("online", "target", "model"):
        for name, network in getattr(learner, which).items():
            network.load_state_dict(saved[which][name])
    learner.optimizer.load_state_dict(saved["optimizer"])
    learner.updates = saved["updates"]
    exact = read_file(path) if path.exists() else {}
    if exact.get("steps") != saved["progress"]["steps"]:
        print(f"{path} is not there or from another time: going on with new matches and an empty buffer.")
        return saved["progress"]
    torch.set_rng_state(exact["torch"])
    if args.cuda:
        torch.cuda.set_rng_state(exact["cuda"])
    buffer.generator.set_state(exact["sampling"])
    for rollout, snapshot in zip(rollouts, exact["matches"]):
        rollout.env.restore(snapshot)
    for rollout, rounds in zip(rollouts, exact["rounds"]):
        rollout.team.rounds = rounds
    if "episodes" in exact:
        buffer.lengths, buffer.cursor = exact["lengths"], exact["cursor"]
        for name, episodes in exact["episodes"].items():
            buffer.data[name][:, : episodes.shape[1]] = episodes.to(buffer.data[name].device)
    else:
        print("This run was saved without its buffer: going on with an empty one.")
    return saved["progress"]


def as_before(args):
    """The arguments of the run to resume; whoever gives others is told which."""
    if args.init:
        raise SystemExit("--init starts a new run and --resume goes on with an old one: give one of them")
    path = Path(args.resume) / "checkpoint.pt"
    if not path.exists():
        raise SystemExit(f"--resume {args.resume}: there is no checkpoint.pt")
    saved = read_file(path)
    if saved["algorithm"] != Path(__file__).stem:
        raise SystemExit(f"--resume {args.resume} is a run of {saved['algorithm']}.py")
    if saved["progress"]["complete"] and path.with_name("results.json").exists():
        raise SystemExit(f"--resume {args.resume}: that run is complete")
    usual, given = asdict(Args()), asdict(args)
    if unknown := saved["args"].keys() - usual.keys():
        raise SystemExit(f"--resume {args.resume} is of another version: it has {', '.join(sorted(unknown))}")
    before = {**usual, **saved["args"]}  # an older run may lack an option
    free = ("resume", "time_limit", "track", "capture_video", "checkpoint_interval", "log_interval")
    wrong = [name for name in given if name not in free and given[name] not in (usual[name], before[name])]
    if wrong:
        told = ", ".join(f"--{name.replace('_', '-')} {before[name]} (not {given[name]})" for name in wrong)
        raise SystemExit(f"--resume {args.resume} has {told}")
    return Args(**{**before, **{name: given[name] for name in free}})


if __name__ == "__main__":
    args, started = tyro.cli(Args), STARTED
    args = as_before(args) if args.resume else args
    check(args)
    name = f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{int(started)}"
    run = Path(args.resume) if args.resume else Path(args.run_root) / name
    torch.manual_seed(args.seed)
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)

    device = torch.device("cuda" if args.cuda else "cpu")
    env = make_env(args, args.num_envs, device, args.seed)
    eval_env = make_env(args, args.eval_episodes, device, args.seed + 1) if env.simulated else env
    print(
        f"{run}: {args.env_id}, {env.n_agents} agents, {args.num_envs} matches at a time on the {device.type.upper()}"
    )
    team, eval_team = make_team(args, env, args.seed), make_team(args, eval_env, args.seed + 1)
    learner = Learner(args, env)
    agents, steady = learner.online["agents"], learner.target["agents"]  # who explores, and who plays greedily
    inference = learner.model["inference"]
    rollout = Rollout(env, agents, inference, (*SEEN, "terminated"), team)
    eval_rollout = Rollout(eval_env, steady, inference, SEEN, eval_team)
    args.buffer_size = args.buffer_size or usual_size(rollout.story, args)
    buffer = Buffer(
        rollout.story, args.buffer_size, device if args.buffer_device == "same" else torch.device("cpu"), args.seed
    )
    progress = {"steps": 0, "episodes": 0, "seconds": 0.0, "evals": [], "complete": False}
    progress["next_eval"] = args.eval_interval
    if args.resume:
        progress = restore(run, args, learner, buffer, (rollout, eval_rollout))
    elif args.init:
        start_from(args, learner)
    started -= progress["seconds"]

    if args.track:
        import wandb

        wandb.init(
            project=args.wandb_project_name, entity=args.wandb_entity, group=args.wandb_group, name=run.name,
            id=run.name, resume="allow", sync_tensorboard=True, config=asdict(args), save_code=True,
        )  # fmt: skip
    writer = SummaryWriter(run, purge_step=progress["steps"] + 1 if args.resume else None)
    rows = "\n".join(f"|{key}|{value}|" for key, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")

    def log(group, scalars):
        for key, value in scalars.items():
            writer.add_scalar(f"{group}/{key}", value, progress["steps"])

    stopping = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopping.append(number))
    bar = tqdm(total=args.total_timesteps, initial=progress["steps"], unit_scale=True, disable=not sys.stderr.isatty())
    logged = {"at": time.time(), "steps": progress["steps"], "updates": learner.updates}
    saved_at = time.time()
    try:
        while progress["steps"] < args.total_timesteps and not stopping:
            # ALGO LOGIC: play a round, keep it, learn from the buffer
            share = min(progress["steps"] / max(args.exploration_fraction * args.total_timesteps, 1), 1)
            epsilon = args.start_e + (args.end_e - args.start_e) * share
            returns, lengths, won, valid = rollout.play(epsilon)
            steps, episodes = int(lengths.sum()), int(valid.sum())  # asked before the updates: nothing waits for those
            buffer.add(rollout.story, lengths, valid)
            updates = (progress["steps"] + steps) // args.train_frequency - progress["steps"] // args.train_frequency
            if updates and (buffer.lengths > 0).sum() >= args.batch_size:
                learner.learn(buffer, updates)

            progress["steps"] += steps
            progress["episodes"] += episodes
            progress["seconds"] = time.time() - started
            bar.update(steps)
            if time.time() - logged["at"] >= args.log_interval and episodes:
                updates, losses = learner.updates - logged["updates"], learner.report()
                if updates:
                    log("om", {"loss": losses.pop("model_loss") / updates})
                    log("losses", {name: total / updates for name, total in losses.items()})
                charts = {
                    "episodic_return": returns[valid].mean().item(),
                    "episodic_length": lengths[valid].float().mean().item(),
                    "win_rate": won[valid].float().mean().item(),
                    "epsilon": epsilon,
                    "SPS": (progress["steps"] - logged["steps"]) / (time.time() - logged["at"]),
                }
                if not env.team_reward:
                    charts |= {f"episodic_return_{a}": r for a, r in enumerate(returns[valid].mean(0).tolist())}
                log("charts", charts)
                logged = {"at": time.time(), "steps": progress["steps"], "updates": learner.updates}
                line = "return {episodic_return:.2f}, won {win_rate:.0%}, {SPS:,.0f} steps/s".format(**charts)
                bar.set_postfix_str(line)
                if bar.disable:
                    print(f"{progress['seconds']:7.1f} s  {progress['steps']:12,} steps  {line}", flush=True)
            if progress["steps"] >= progress["next_eval"]:
                progress["next_eval"] = (progress["steps"] // args.eval_interval + 1) * args.eval_interval
                returns, _, won = evaluate(eval_rollout, args.eval_episodes)
                result = {"win_rate": won.float().mean().item(), "episodic_return": returns.mean().item()}
                log("eval", result)
                log("om", analyse(args, learner, eval_rollout))
                progress["evals"].append({"steps": progress["steps"], "seconds": time.time() - started, **result})
            if time.time() - saved_at >= args.checkpoint_interval:
                save(run, args, learner, buffer, (rollout, eval_rollout), progress)
                saved_at = time.time()
            if args.time_limit is not None and time.time() - STARTED >= args.time_limit:
                stopping.append("time limit")
        if stopping:
            save(run, args, learner, buffer, (rollout, eval_rollout), progress)
            raise SystemExit(f"stopped at step {progress['steps']:,}; go on with --resume {run}")

        returns, lengths, won = evaluate(eval_rollout, args.final_eval_episodes)
        predicted = analyse(args, learner, eval_rollout)
        progress |= {"seconds": time.time() - started, "complete": True}
        save(run, args, learner, buffer, (rollout, eval_rollout), progress)
    except FloatingPointError as error:
        path = run / "checkpoint.pt"
        good = f"the last good checkpoint is {path}" if path.exists() else "no checkpoint was saved before"
        raise SystemExit(f"stopped at step {progress['steps']:,}: {error}; {good}") from None
    finally:
        bar.close()
        writer.flush()

    final = {
        "win_rate": won.float().mean().item(), "win_rate_interval": interval(int(won.sum()), len(won)),
        "episodic_return": returns.mean().item(), "returns_by_agent": returns.mean(0).tolist(),
        "episodic_length": lengths.float().mean().item(), "episodes": len(won),
    }  # fmt: skip
    best = {key: max([final[key], *(e[key] for e in progress["evals"])]) for key in ("win_rate", "episodic_return")}
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__}
    results = {
        "env_id": args.env_id, "algorithm": Path(__file__).stem, "seed": args.seed, "command": " ".join(sys.argv),
        "final": final, "best": best, **progress, "updates": learner.updates, "versions": versions,
        "om": predicted, "args": asdict(args),
    }  # fmt: skip
    (run / "results.part").write_text(json.dumps(results, indent=1))
    os.replace(run / "results.part", run / "results.json")
    log("eval", {"win_rate": final["win_rate"], "episodic_return": final["episodic_return"]})
    writer.close()
    if args.capture_video:
        film(args, learner, device, run / "match.gif")
    low, high = final["win_rate_interval"]
    print(f"{progress['seconds']:.1f} s, {progress['steps']:,} steps, {learner.updates:,} updates")
    share = f"{final['win_rate']:.1%} ({low:.1%} to {high:.1%})"
    print(f"of {len(won)} greedy matches won {share}, return {final['episodic_return']:.2f}")

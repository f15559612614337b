"""Opponent modelling by subgoal inference (OMG): act on the future state that the others seem to be heading for.

A conditional VAE infers from the past a latent subgoal, which the Q-network takes as an input. In training, hindsight
gives the subgoal to infer: of the next states, encoded by a frozen VAE, the one the Q-network values most (optimistic)
or least (conservative). The others have fixed policies, drawn anew for every match (Yu, Jiang, Lu, NeurIPS 2024).

    python omg_iql.py --env-id 3m --n-agents 8 --cuda        docs/omg_iql.md has every option, logged key and result
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
from typing import Literal

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
    """who sits where: scripted (one learner among scripted others), self (all learn), or such as 7qmix1omg"""
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
    vae: str | None = None
    """a file of pretrain_cvae.py (default: the same pre-training first)"""
    pretrain_timesteps: int | None = None
    """environment steps of that pre-training (default: 2 million on the GPU, 100,000 on the CPU)"""
    pretrain_updates: int = 1500
    """updates of that pre-training, at most; it stops early when the held-out error no longer falls"""
    model_learning_rate: float = 1e-3
    """Adam's learning rate for the opponent model"""
    kl_weight: float = 0.001
    """weight of the divergence beside the reconstruction, in VAE and inference model"""
    latent_dim: int = 64
    """size of a subgoal"""
    horizon: int = 10
    """how many of the next states are candidates for the subgoal"""
    subgoal_input: Literal["obs", "state"] = "obs"
    """what subgoals are codes of: the learner's view or the global state (acting never reads the state)"""
    subgoal_mode: Literal["optimistic", "conservative"] = "optimistic"
    """which candidate is selected: the one of highest value, or of lowest"""
    selector: str = "value"
    """how candidates are chosen: value, random, next, or a number k for the k-th next state"""
    inference: Literal["cvae", "mlp"] = "cvae"
    """the inference model: the conditional VAE, or a network that predicts the subgoal itself"""
    reconstruct: Literal["obs", "features"] = "obs"
    """what the inference model reconstructs: the observation (paper) or its learned features (released code)"""
    q_subgoal: Literal["mixed", "inferred", "selected"] = "mixed"
    """the subgoal in updates: the selected one with a chance that falls to 0, else the inferred; or always one"""
    mix: Literal["q-input", "kl-target"] = "q-input"
    """where that chance applies: the Q-network's input (paper) or the target of the divergence (released code)"""
    mix_start: float = 0.5
    """the chance at the start"""
    mix_fraction: float = 0.1
    """the share of the run over which it falls to 0"""
    bootstrap_subgoal: Literal["same", "next"] = "same"
    """the subgoal in the bootstrap: that of the step (paper) or the next one's (released code)"""


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
# what a story has of the step itself
OF_THE_STEP = ("action", "all_action", "reward", "terminated", "mean", "log_variance")
SEEN = ("obs", "avail", "alive", "action", "all_action", "all_alive")  # what `analyse` looks at


def check(args):
    """Refuses values that make no sense, with what is allowed, and fills in those that depend on the device."""
    positive = "num_envs total_timesteps eval_interval eval_episodes final_eval_episodes buffer_size batch_size"
    positive += " model_learning_rate latent_dim horizon pretrain_timesteps pretrain_updates"
    for name in (*positive.split(), "train_frequency", "hidden_dim", "learning_rate", "max_grad_norm", "time_limit"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise SystemExit(f"--{name.replace('_', '-')} is above 0, not {getattr(args, name)}")
    shares = "gamma td_lambda tau teammate_epsilon start_e end_e exploration_fraction kl_weight mix_start mix_fraction"
    for name in shares.split():
        if not 0 <= getattr(args, name) <= 1:
            raise SystemExit(f"--{name.replace('_', '-')} is from 0 to 1, not {getattr(args, name)}")
    for name in ("checkpoint_interval", "log_interval"):
        if not getattr(args, name) >= 0:
            raise SystemExit(f"--{name.replace('_', '-')} is from 0 up, not {getattr(args, name)}")
    if args.buffer_device not in ("same", "cpu"):
        raise SystemExit(f"--buffer-device is same or cpu, not {args.buffer_device}")
    if args.selector not in ("value", "random", "next") and not (args.selector.isdigit() and int(args.selector) > 0):
        raise SystemExit(f"--selector is value, random, next or a number from 1 up, not {args.selector}")
    if args.mix == "kl-target" and args.q_subgoal != "mixed":
        raise SystemExit("--q-subgoal is for --mix q-input: with kl-target the Q-network has the inferred subgoal")
    if args.cuda and not torch.cuda.is_available():
        print("There is no GPU that torch can use: going on with the CPU.")
        args.cuda = False
    elif args.cuda and importlib.util.find_spec("numba_cuda") is None and not args.env_id.startswith("sc2/"):
        print('For the GPU the environments need pip install -e ".[cuda]": going on with the CPU.')
        args.cuda = False
    usual = {"total_timesteps": (20_000_000, 1_000_000), "batch_size": (64, 32)}
    usual["pretrain_timesteps"] = (2_000_000, 100_000)
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


def make_team(args, env, seed, understudy=False):
    if env.n_agents == 1:
        raise SystemExit("--n-agents 1: there is nobody to model")
    others = (args.pool, args.seat, args.mix_teammates, args.teammate_epsilon)
    try:
        return Team(env, args.team, ("omg", "iql_omg", "learner"), *others, seed, understudy)
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

    def fork(self, x, h):
        """One step from each state h (time, matches, seats, hidden), with every one of x (time, k, matches, ...)."""
        reset, keep, new = F.linear(x, self.weight_ih_l0, self.bias_ih_l0).chunk(3, -1)
        reset_h, keep_h, new_h = F.linear(h, self.weight_hh_l0, self.bias_hh_l0).unsqueeze(1).chunk(3, -1)
        new = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
        return torch.lerp(new, h.unsqueeze(1), torch.sigmoid(keep + keep_h))


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

    def compare(self, obs, last_action, h, seat, subgoals, index):
        """Q of single steps, each from a state h of its own, with every one of its candidates among the subgoals.

        `index` (time, candidates, matches, seats) says which. What candidates share is computed once, and so is what a
        subgoal brings to all the steps that it is a candidate of.
        """
        match, place = (torch.arange(size, device=obs.device) for size in seat.shape)
        of_seen, of_subgoal = self.into.weight.tensor_split((-subgoals.shape[-1],), 1)
        seen = F.linear(torch.cat(self.inputs(obs, last_action, seat), -1), of_seen, self.into.bias)
        brought = F.linear(subgoals, of_subgoal)[index, match.unsqueeze(1), place]
        return self.values(self.gru.fork(F.relu(seen.unsqueeze(1) + brought), h))


# ALGO LOGIC: the opponent model's networks
class Gaussian(nn.Module):
    """(mean, log variance) of a latent code."""

    def __init__(self, inputs, latent):
        super().__init__()
        self.mean, self.log_variance = nn.Linear(inputs, latent), nn.Linear(inputs, latent)

    def forward(self, x):
        return self.mean(x), self.log_variance(x).clamp(-10.0, 10.0)


def sample(mean, log_variance):
    return torch.addcmul(mean, torch.randn_like(mean), torch.exp(0.5 * log_variance))


def divergence(mean, log_variance, other_mean, other_log_variance):
    """KL(N(mean, variance) || N(other)), dimension by dimension."""
    gap = (mean - other_mean).square() + torch.exp(log_variance)
    return 0.5 * (other_log_variance - log_variance + gap * torch.exp(-other_log_variance) - 1)


class StateVAE(nn.Module):
    """Codes of states: an MLP of 128 and 128 each way."""

    def __init__(self, inputs, latent):
        super().__init__()

        def layers(first):
            return nn.Sequential(nn.Linear(first, 128), nn.LeakyReLU(), nn.Linear(128, 128), nn.LeakyReLU())

        self.encoder, self.code = layers(inputs), Gaussian(128, latent)
        self.decoder, self.out = layers(latent), nn.Linear(128, inputs)

    def encode(self, state):
        return self.code(self.encoder(state))

    def decode(self, code):
        return self.out(self.decoder(code))


def seats_from(env):
    """(agents, agents): for every seat its own, then the others' in the order in which its observation has them."""
    seat, own = torch.arange(env.n_agents), torch.arange(env.n_agents).unsqueeze(1)
    if env.ego_first:
        return (own + seat) % env.n_agents
    return torch.cat((own, seat[:-1] + (seat[:-1] >= own)), 1)


class Inference(nn.Module):
    """The subgoal the past speaks for: a GRU over what was seen and done, an encoder, and a decoder to train it by."""

    def __init__(self, env, args, memory=96):
        super().__init__()
        self.memory, self.latent = memory, args.latent_dim
        self.certain, self.of_features = args.inference == "mlp", args.reconstruct == "features"
        self.past = SharedGRU(env.obs_dim + env.n_agents * env.n_actions, memory)
        self.now = nn.Linear(env.obs_dim, 32)
        self.encoder, self.code = nn.Linear(32 + memory, 64), Gaussian(64, self.latent)
        self.decoder = nn.Linear(self.latent + memory, 128)
        self.out = nn.Linear(128, 32 if self.of_features else env.obs_dim)
        self.register_buffer("order", seats_from(env), persistent=False)
        self.register_buffer("action", torch.arange(env.n_actions), persistent=False)

    def start(self, matches, seats):
        return torch.zeros(matches, seats, self.memory, device=self.order.device)

    def forward(self, obs, last_obs, last_action, seat, h):
        """(time, matches, own seats, ...), last_action (time, matches, agents) -> subgoal, h, (mean, log variance)

        The past is what was seen and what everybody did one step earlier: zeros and -1 at the start.
        """
        order = self.order[seat].expand(*obs.shape[:-1], -1)  # (time, matches, own seats, agents)
        done = last_action.unsqueeze(-2).expand_as(order).gather(-1, order)
        done = (done.unsqueeze(-1) == self.action).to(obs.dtype).flatten(-2)
        h = self.past(torch.cat((last_obs, done), -1), h)
        x = F.relu(self.now(obs))
        code = self.code(F.relu(self.encoder(torch.cat((x, h), -1))))
        return code[0] if self.certain else sample(*code), h, code

    def errors(self, obs, subgoal, h, code, goal):
        """What it learns by: (the reconstruction's error, the divergence from the goal, dimension by dimension)"""
        if self.certain:
            return (code[0] - goal[0]).square().mean(-1), torch.zeros_like(code[0])
        rebuilt = self.out(F.relu(self.decoder(torch.cat((subgoal, h), -1))))
        wanted = F.relu(self.now(obs)).detach() if self.of_features else obs
        return (rebuilt - wanted).square().mean(-1), divergence(*code, *goal)


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
        fields["mean"] = fields["log_variance"] = torch.zeros(*own, inference.latent, device=device)
        self.story = {name: fields[name].new_zeros((rows, *fields[name].shape)) for name in ("reward", *kept)}
        self.part = {name: torch.zeros_like(values[:CHUNK]) for name, values in self.story.items()}
        self.epsilon = torch.zeros((), device=device)
        self.story["seat"] = self.team.own.unsqueeze(0)  # the same at all times of a match
        self.h, self.last_action = agents.start(*own), torch.zeros_like(env.actions)
        self.memory, self.last_obs = inference.start(*own), torch.zeros_like(fields["obs"])
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
        """Everybody's actions now, (matches, agents); what was inferred for them stays in `inferred`."""
        obs, last = (self.team.mine(x).unsqueeze(0) for x in (self.env.obs, self.last_action))
        past = self.last_obs.unsqueeze(0), self.last_action.unsqueeze(0), self.team.own, self.memory
        self.inferred, memory, self.code = self.inference(obs, *past)
        q, h = self.agents(obs, last, self.h, self.team.own, self.inferred)
        noise = torch.rand((*q.shape[1:-1], q.shape[-1] + 1), device=q.device)
        wish = torch.where(noise[..., -1:] < self.epsilon, noise[..., :-1], q[0])
        action = self.team.complete(best_action(wish, self.team.mine(self.env.info["avail"])), self.last_action)
        self.h.copy_(h[0])
        self.memory.copy_(memory[0])
        self.last_obs.copy_(obs[0])
        self.last_action.copy_(action)
        return action

    @torch.no_grad()
    def steps(self):
        for row in range(CHUNK):
            action = self.act()
            obs, reward, terminated, truncated, info = self.env.step(action)
            step = self.mine(action=action, reward=reward, terminated=terminated, obs=obs, **info)
            self.write(self.part, row, step)
            self.write(self.part, row, {"mean": self.code[0][0], "log_variance": self.code[1][0]})
            self.lengths += self.running
            self.running &= ~(terminated | truncated)

    def play(self, epsilon):
        """One episode of every match: (returns (matches, seats), lengths, won, valid), there until the next call."""
        self.team.draw()
        obs, info = self.env.reset()
        for tensor in (self.h, self.memory, self.last_obs, self.lengths, self.story["reward"]):
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


def single(agents, obs, last_action, h, seat, subgoal):
    """Q of single steps, each from a state h of its own; all have the leading shape of `last_action`."""
    obs, subgoal = (x.reshape(1, -1, 1, x.shape[-1]) for x in (obs, subgoal))
    rows = last_action.reshape(1, -1, 1), h.reshape(-1, 1, h.shape[-1]), seat.expand_as(last_action).reshape(-1, 1)
    q, _ = agents(obs, *rows, subgoal)
    return q.view(*last_action.shape, -1)


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
        self.model_sizes = [1, args.latent_dim, args.horizon]  # of recon, kl_per_dim, selected_k
        self.model_sums = torch.zeros(sum(self.model_sizes), device=env.device)
        self.mix_chance = torch.zeros((), device=env.device)
        self.mixing = args.mix == "q-input" and args.q_subgoal != "inferred"
        self.side, self.shared = torch.cuda.Stream() if args.cuda else None, ()

    @contextlib.contextmanager
    def beside(self):
        """On the GPU what is inside runs at the same time as what follows it, up to `meet`."""
        if self.side is None:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield

    def meet(self):
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)

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
    def infer(self, obs, everybody, seat):
        """What the inference model says at every step of episodes: (subgoal, memory, (mean, log variance))"""
        last_obs = torch.cat((torch.zeros_like(obs[:1]), obs[:-1]))
        last_action = torch.cat((torch.full_like(everybody[:1], -1), everybody))
        inference = self.model["inference"]
        return inference(obs, last_obs, last_action, seat, inference.start(*seat.shape))

    def mix(self, chance):
        """Sets the chance of the selected subgoal; once it is 0, updates need one unroll less."""
        self.mix_chance.fill_(chance)
        if self.mixing and self.args.q_subgoal == "mixed" and chance == 0:
            self.mixing, self.graphs = False, {}

    @torch.no_grad()
    def select(self, obs, last_action, h, seat, avail, codes, final):
        """The index of the state chosen as each step's subgoal, (steps, matches, own seats); how far ahead (0: next).

        Candidates are the next `horizon` states; past the `final` one, where the learner's part ends, that one again.
        `h` is what the Q-network remembers after each step; candidates are valued from what it remembered before.
        """
        horizon, time = self.args.horizon, torch.arange(len(avail), device=obs.device).view(-1, 1, 1)
        if self.args.selector == "random":
            k = torch.randint(horizon, last_action.shape, device=obs.device)
        elif self.args.selector == "value":
            ahead = torch.arange(1, horizon + 1, device=obs.device).view(-1, 1, 1)
            candidates = torch.minimum(time.unsqueeze(1) + ahead, final)  # (steps, horizon, matches, own seats)
            h = torch.cat((torch.zeros_like(h[:1]), h[:-1]))
            q = self.online["agents"].compare(obs, last_action, h, seat, codes, candidates)
            # the sum ranks as the mean does: all candidates have as many actions
            value = torch.where(avail.unsqueeze(1), q, 0.0).sum(-1)
            k = value.argmax(1) if self.args.subgoal_mode == "optimistic" else value.argmin(1)
        else:
            k = torch.full_like(last_action, 0 if self.args.selector == "next" else int(self.args.selector) - 1)
        return torch.minimum(time + 1 + k, final), k

    def model_loss(self, batch, obs, before, time_left, h, inferred, memory, code):
        """(subgoals for the Q-network at every row of episodes, the inference model's loss)

        `h` is what the Q-network remembers with the inferred subgoals; `memory` and `code` came with those.
        """
        args, alive = self.args, batch["alive"] & (time_left >= 0).unsqueeze(-1)
        final = (alive.sum(0) - 1).clamp(min=0)  # the last state that the learner is there to see
        real = (time_left[:-1] > 0).unsqueeze(-1)
        there = alive[:-1] & real  # (steps, matches, own seats)
        with torch.no_grad():
            codes = self.model["vae"].encode(states_of(args, batch, obs))  # (mean, log variance)
            drawn, seat, avail = sample(*codes), batch["seat"][0], batch["avail"][:-1]
            index, k = self.select(obs[:-1], before[:-1], h[:-1], seat, avail, drawn, final)
            where = index.unsqueeze(-1).expand(-1, -1, -1, args.latent_dim)
            goal, subgoal = [values.gather(0, where) for values in codes], inferred.detach()
            if self.mixing or args.mix == "kl-target":
                chance = {"mixed": self.mix_chance, "inferred": 0.0, "selected": 1.0}[args.q_subgoal]
                hindsight = ((torch.rand(index.shape, device=obs.device) < chance) & real).unsqueeze(-1)
                if args.mix == "q-input":
                    subgoal = torch.where(hindsight, drawn.gather(0, where), inferred[:-1])
                    subgoal = torch.cat((subgoal, inferred[-1:]))
                else:  # as in the released code: else the divergence is from what was inferred while acting
                    played = (
                        torch.where(there.unsqueeze(-1), batch[name][:-1], 0.0) for name in ("mean", "log_variance")
                    )
                    goal = [torch.where(hindsight, *pair) for pair in zip(goal, played)]
        said = inferred[:-1], memory[:-1], [values[:-1] for values in code]
        recon, kl_per_dim = self.model["inference"].errors(obs[:-1], *said, goal)
        selected_k = k.clamp(max=args.horizon - 1).unsqueeze(-1) == torch.arange(args.horizon, device=obs.device)
        parts = torch.cat((recon.unsqueeze(-1), kl_per_dim, selected_k.to(recon.dtype)), -1)
        means = torch.where(there.unsqueeze(-1), parts, 0.0).sum((0, 1, 2)) / there.sum().clamp(min=1)
        self.model_sums += means.detach()
        recon, kl_per_dim, _ = means.split(self.model_sizes)
        return subgoal, recon.sum() + args.kl_weight * kl_per_dim.sum()

    # ALGO LOGIC: the losses
    def loss(self, batch):
        """(the Q-network's loss, the model's, the mean value of the actions taken) of episodes, time first."""
        action, reward, avail, alive = batch["action"][:-1], batch["reward"][:-1], batch["avail"], batch["alive"]
        obs, before, time_left = self.inputs(batch)
        start, seat = self.online["agents"].start(*action.shape[1:]), batch["seat"][0]
        with self.beside():  # then its gradient, too, is taken beside the Q-network's
            inferred, memory, code = self.infer(obs, batch["all_action"][:-1], seat)
        self.meet()
        subgoal = inferred.detach()
        with torch.set_grad_enabled(not self.mixing):  # this unroll is learned by if no subgoal is replaced
            q, h = self.online["agents"](obs, before, start, seat, subgoal)
        with self.beside():
            mixed, model_loss = self.model_loss(batch, obs, before, time_left, h.detach(), inferred, memory, code)
        if self.mixing:
            self.meet()
            subgoal = mixed
            q, h = self.online["agents"](obs, before, start, seat, subgoal)
        chosen = value_of(action, q[:-1])  # (steps, matches, seats)
        with torch.no_grad():
            target_q, target_h = self.target["agents"](obs, before, start, seat, subgoal)
            q, target_q = q[1:], target_q[1:]
            if self.args.bootstrap_subgoal == "same":  # the next step's values with this step's subgoal
                q = single(self.online["agents"], obs[1:], action, h[:-1], seat, subgoal[:-1])
                target_q = single(self.target["agents"], obs[1:], action, target_h[:-1], seat, subgoal[:-1])
            following = value_of(best_action(q, avail[1:]), target_q)
            ended, mask, last = batch["terminated"][:-1], time_left[:-1] > 0, time_left[:-1] == 1
            ended, mask, last = (flags.unsqueeze(-1).expand_as(reward) for flags in (ended, mask, last))
            if not self.env.team_reward:  # an agent's own game ends when it leaves
                ended, mask = ended | ~alive[1:], mask & alive[:-1]
            reward = torch.where(mask, reward, 0.0)
            target = lambda_returns(reward, following, ended, last, self.args.gamma, self.args.td_lambda)
        error = torch.where(mask, chosen - target, 0.0)
        self.meet()
        self.shared = obs, subgoal  # gradients on both sides need them: not to be freed before both are taken
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
        """The sums since the last report, and the model's."""
        self.check_finite()
        sums = dict(zip(("td_loss", "model_loss", "q_values", "grad_norm"), self.sums.tolist()))
        model = dict(zip(("recon", "kl_per_dim", "selected_k"), self.model_sums.clone().split(self.model_sizes)))
        self.sums.zero_()
        self.model_sums.zero_()
        return sums, model


def states_of(args, batch, obs):
    """What subgoals are codes of, (rows, matches, own seats, features)."""
    return obs if args.subgoal_input == "obs" else batch["state"].unsqueeze(2).expand(*obs.shape[:3], -1)


# ---- pre-training ----
def collect(args, rollout):
    """Rounds of the others' play; `there`: where the learner's seat is there to see."""
    stories, steps = [], 0
    while steps < args.pretrain_timesteps or len(stories) < 2:  # one is held out
        _, lengths, _, valid = rollout.play(epsilon=1.0)
        steps += int(lengths.sum())
        rows = torch.arange(int(lengths.max()) + 1, device=lengths.device).view(-1, 1, 1)
        stories.append({name: values[: len(rows), valid].clone() for name, values in rollout.story.items()})
        stories[-1]["there"] = stories[-1]["alive"] & (rows <= lengths[valid].unsqueeze(-1))
    return stories


def vae_loss(args, vae, states):
    """(the loss, the mean squared error, the divergence from N(0, I))"""
    mean, log_variance = vae.encode(states)
    recon = (vae.decode(sample(mean, log_variance)) - states).square().mean()
    kl = divergence(mean, log_variance, torch.zeros_like(mean), torch.zeros_like(mean)).sum(-1).mean()
    return recon + args.kl_weight * kl, recon, kl


def train_vae(args, vae, states, held_out, writer=None):
    """Until the error held out no longer falls; after that the VAE is frozen."""
    optimizer = torch.optim.Adam(vae.requires_grad_(True).parameters(), args.model_learning_rate)
    best, patience = float("inf"), 0
    for update in tqdm(range(1, args.pretrain_updates + 1), disable=not sys.stderr.isatty(), desc="VAE"):
        loss, *_ = vae_loss(args, vae, states[torch.randint(len(states), (1024,), device=states.device)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 100 == 0:
            with torch.no_grad():
                error, recon, kl = (number.item() for number in vae_loss(args, vae, held_out))
            if writer:
                writer.add_scalar("pretrain/recon", recon, update)
                writer.add_scalar("pretrain/kl", kl, update)
            patience = 0 if error < 0.99 * best else patience + 1
            best = min(best, error)
            if patience == 3:
                break
    vae.requires_grad_(False)


def inference_loss(args, learner, story, chosen):
    """Of the inference model, whose goal is the next state, over the matches chosen."""
    story = {name: values[:, chosen] for name, values in story.items()}
    obs = torch.where(story["there"].unsqueeze(-1), story["obs"], 0.0)
    subgoal, memory, code = learner.infer(obs, story["all_action"][:-1], story["seat"][0])
    goal = learner.model["vae"].encode(states_of(args, story, obs)[1:])
    said = subgoal[:-1], memory[:-1], [values[:-1] for values in code]
    recon, kl = learner.model["inference"].errors(obs[:-1], *said, goal)
    return masked_mean(story["there"][1:], recon + args.kl_weight * kl.sum(-1))


def warm_up(args, learner, stories):
    optimizer = torch.optim.Adam(learner.model["inference"].parameters(), args.model_learning_rate)
    for update in tqdm(range(args.pretrain_updates // 5), disable=not sys.stderr.isatty(), desc="CVAE"):
        story = stories[update % len(stories)]
        chosen = torch.randint(story["obs"].shape[1], (args.batch_size,), device=story["obs"].device)
        optimizer.zero_grad()
        inference_loss(args, learner, story, chosen).backward()
        optimizer.step()


def pretrain(args, learner, rollout, writer=None):
    """Trains the VAE on states met while the others play every seat, then the inference model to expect the next state.

    Returns the errors held out: {"recon": ..., "kl": ..., "inference": ...}.
    """
    stories, vae = collect(args, rollout), learner.model["vae"]
    held_out = stories.pop()
    states = torch.cat([states_of(args, story, story["obs"])[story["there"]] for story in stories])
    test_states = states_of(args, held_out, held_out["obs"])[held_out["there"]][:8192]
    train_vae(args, vae, states, test_states, writer)
    warm_up(args, learner, stories)
    with torch.no_grad():
        _, recon, kl = vae_loss(args, vae, test_states)
        matches = torch.arange(min(held_out["obs"].shape[1], 64), device=states.device)
        expected = inference_loss(args, learner, held_out, matches)
    return {"recon": recon.item(), "kl": kl.item(), "inference": expected.item(), "states": len(states)}


def make_agents(args, env):
    return Agents(env, args.hidden_dim, args.latent_dim, args.dueling).to(env.device)


def fits(args, env):
    """What the model's networks depend on."""
    choices = {name: getattr(args, name) for name in ("latent_dim", "subgoal_input", "reconstruct")}
    return {"map": env.name.removeprefix("sc2/"), **sizes_of(env), **choices}  # the real game's or not


def make_model(args, env):
    vae = StateVAE(env.obs_dim if args.subgoal_input == "obs" else env.state_dim, args.latent_dim)
    return {"vae": vae.requires_grad_(False).to(env.device), "inference": Inference(env, args).to(env.device)}


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


# ---- is the subgoal right? ----
def hit_ratio(predicted, places, seen, there, distance):
    """The share of a trajectory's distinct states that some prediction made before them hits, of all trajectories.

    predicted, places (steps, trajectories, others, 2); seen (steps, trajectories, others); there (steps, trajectories).
    A hit: everyone seen is within `distance` of the place predicted.
    """
    hit, distinct, found = torch.zeros_like(there), 0, 0
    for t in range(len(places)):  # step by step: all pairs of steps at once would take gigabytes
        near = (predicted[t] - places[t + 1 :]).square().sum(-1) <= distance**2
        hit[t + 1 :] |= (near | ~seen[t + 1 :]).all(-1) & there[t]
    hit &= seen.any(-1) & there
    for t in range(len(places)):
        alike = ((places - places[t]).abs().amax((-1, -2)) < 1e-4) & (seen == seen[t]).all(-1) & there
        new = there[t] & ~alike[:t].any(0)
        distinct, found = distinct + new.sum(), found + (new & (alike & hit).any(0)).sum()
    return (found / distinct.clamp(min=1)).item()


def probe(features, labels, classes, train):
    """The accuracy, held out, of a linear read-out (ridge regression) of labels from features."""
    features = (features - features[train].mean(0)) / features[train].std(0).clamp(min=1e-6)  # small ones count too
    x = torch.cat((features, torch.ones_like(features[:, :1])), 1)
    x, held_out, goal = x[train], x[~train], F.one_hot(labels[train], classes).to(x.dtype)
    weights = torch.linalg.solve(x.T @ x + 1e-2 * len(x) * torch.eye(x.shape[1], device=x.device), x.T @ goal)
    return ((held_out @ weights).argmax(1) == labels[~train]).float().mean().item()


def sensitivity(learner, batch, inferred):
    """Mean change of Q when what is inferred is exchanged between matches, as long as the learner of both is there."""
    (obs, before, time_left), seat, agents = learner.inputs(batch), batch["seat"][0], learner.target["agents"]
    q, exchanged = (agents(obs, before, agents.start(*seat.shape), seat, x)[0] for x in (inferred, inferred.roll(1, 1)))
    there = batch["alive"] & (time_left > 0).unsqueeze(-1)
    there &= there.roll(1, 1)
    return masked_mean(there.unsqueeze(-1) & batch["avail"], (q - exchanged).abs()).item()


@torch.no_grad()
def analyse(args, learner, rollout, matches=64):
    """What the inferred subgoals of the round just played know: docs/omg_iql.md defines the numbers."""
    env, rows = rollout.env, int(rollout.lengths[:matches].max()) + 1
    batch = {name: values[:rows, :matches] for name, values in rollout.story.items()}
    batch["lengths"] = rollout.lengths[:matches]
    (obs, _, time_left), seat, who = learner.inputs(batch), batch["seat"][0], rollout.team.who[:matches]
    subgoal, _, (mean, _) = learner.infer(obs, batch["all_action"][:-1], seat)
    numbers = {}
    if args.subgoal_input == "obs" and hasattr(env, "places"):
        (predicted, _), (places, seen) = env.places(learner.model["vae"].decode(subgoal)), env.places(obs)
        known = batch["alive"] & (time_left >= 0).unsqueeze(-1)
        numbers["hit_ratio"] = hit_ratio(*(x.flatten(1, 2) for x in (predicted, places, seen, known)), env.hit_distance)
    if len(seat) == 1:  # nothing to exchange, nothing to hold out
        return numbers

    numbers["q_sensitivity"] = sensitivity(learner, batch, subgoal)
    # a probe learns from half of the matches; seats turn from match to match, so that both halves have all of them
    there = batch["alive"] & (time_left > 0).unsqueeze(-1)
    first_half = (torch.arange(len(seat), device=seat.device) < (len(seat) + 1) // 2).view(1, -1, 1).expand_as(there)
    other = ((seat + 1) % env.n_agents).expand(rows, -1, -1)  # the next seat stands for the team-mates
    policy = who.expand(rows, -1, -1).gather(-1, other)
    fixed = there & (policy >= 0)  # the next seat may be the learner's too
    if len(policy[fixed].unique()) > 1:
        numbers["teammate_probe"] = probe(mean[fixed], policy[fixed], int(policy.max()) + 1, first_half[fixed])
    moves = there & batch["all_alive"].gather(-1, other)
    action = batch["all_action"].gather(-1, other)
    numbers["next_action_probe"] = probe(mean[moves], action[moves], env.n_actions, first_half[moves])
    return numbers


def goals_of(args, learner, rollout):
    """Where the learner of the first match expects the others it sees: (learner, x, y), on a grid row and column."""
    env, agent = rollout.env, int(rollout.team.own[0, 0])
    if args.subgoal_input != "obs" or not hasattr(env, "places"):
        return []
    places = env.places(learner.model["vae"].decode(rollout.inferred[0]))[0][0, 0]
    if hasattr(env, "units"):
        places = places + torch.stack([env.units()[axis][0, agent] for axis in ("x", "y")])
    seen = env.places(rollout.last_obs)[1][0, 0]
    return [(agent, *place) for place, visible in zip(places.tolist(), seen.tolist()) if visible]


def policy_of(args, learner, rollout):
    """Greedy play of the matches of `env` with the run's team: act(obs, info) -> actions; act.goals: others' places."""
    env = rollout.env

    @torch.no_grad()
    def act(obs, info):
        begun = (env.steps > 0).view(-1, 1)  # a match that has just started has no past
        if not begun.any():
            rollout.team.draw()
        for tensor in (rollout.h, rollout.memory, rollout.last_obs):
            tensor *= begun.unsqueeze(-1)
        rollout.last_action.masked_fill_(~begun, -1)
        action = rollout.act()
        act.goals = goals_of(args, learner, rollout)
        return action

    act.goals = []
    return act


def film(args, learner, device, path):
    """A GIF of one greedy match, with the places where the learner expects the others."""
    from PIL import Image

    env = make_env(args, 1, device, args.seed + 2)
    team, over, frames = make_team(args, env, args.seed + 2), False, []
    act = policy_of(args, learner, Rollout(env, learner.target["agents"], learner.model["inference"], (), team))
    obs, info = env.reset()
    while not over:
        action = act(obs, info)
        frames.append(Image.fromarray(env.render(goals=act.goals)))
        obs, _, terminated, truncated, info = env.step(action)
        over = bool(terminated[0] | truncated[0])
    frames.append(Image.fromarray(env.render()))
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
    return policy_of(*load_rollout(run, env))


def load_vae(path, args, env, learner):
    """A file of pretrain_cvae.py; one that was made for something else is refused."""
    if not Path(path).exists():
        raise SystemExit(f"--vae {path}: there is no such file")
    saved, wanted = read_file(path), fits(args, env)
    if saved.get("fits") != wanted:
        raise SystemExit(f"--vae {path} is for {saved.get('fits')}; this run needs {wanted}")
    for name, network in learner.model.items():
        network.load_state_dict(saved["model"][name])


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
    kept = [*SEEN, "terminated"]
    kept += ["state"] * (args.subgoal_input == "state") + ["mean", "log_variance"] * (args.mix == "kl-target")
    rollout = Rollout(env, agents, inference, kept, team)
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
    if args.vae and not args.resume:
        load_vae(args.vae, args, env, learner)
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

    if not (args.resume or args.init or args.vae):
        print(f"Pre-training on {args.pretrain_timesteps:,} steps of the others' play (--vae FILE skips this) ...")
        understudies = make_team(args, env, args.seed + 3, understudy=True)
        try:
            errors = pretrain(args, learner, Rollout(env, agents, inference, kept, understudies), writer)
        except KeyboardInterrupt:
            raise SystemExit(
                "stopped in pre-training, of which nothing is kept: pretrain_cvae.py makes a file"
            ) from None
        print("... held-out error {recon:.4f}, divergence {kl:.2f}, {states:,} states".format(**errors))
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
            mixed = min(progress["steps"] / max(args.mix_fraction * args.total_timesteps, 1), 1)
            learner.mix(args.mix_start * (1 - mixed))
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
                updates, (losses, model) = learner.updates - logged["updates"], learner.report()
                if updates:
                    log("omg", {"loss": losses.pop("model_loss") / updates})
                    log("losses", {name: total / updates for name, total in losses.items()})
                    model = {name: total / updates for name, total in model.items()}
                    log("omg", {"kl": model["kl_per_dim"].sum(), "kl_per_dim_max": model["kl_per_dim"].max()})
                    log("omg", {"recon": model["recon"]})
                    log("omg", {f"selected_k/{k}": share for k, share in enumerate(model["selected_k"], 1)})
                    writer.add_histogram("omg/kl_per_dim", model["kl_per_dim"], progress["steps"])
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
                log("omg", analyse(args, learner, eval_rollout))
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
        inferred = analyse(args, learner, eval_rollout)
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
        "omg": inferred, "args": asdict(args),
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

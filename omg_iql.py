"""Opponent modelling by subgoal inference (OMG): act on the future state that the others seem to be heading for.

A conditional VAE infers from the past a latent subgoal, which the Q-network takes as an input. In training, hindsight
gives the subgoal to infer: of the next states, encoded by a frozen VAE, the one the Q-network values most (optimistic)
or least (conservative). The others have fixed policies, drawn anew for every match (Yu, Jiang, Lu, NeurIPS 2024).

    python omg_iql.py --env-id 3m --n-agents 8 --cuda        docs/omg_iql.md has every option, logged key and result
"""

import contextlib
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
    time_limit: float | None = None
    """seconds after which the run saves and stops (it can be resumed)"""

    env_id: str = "3m"
    """the environment: see envs.list_ids()"""
    n_agents: int | None = None
    """number of agents, where the environment leaves it open"""
    team: str | None = None
    """who sits where, such as 7qmix1omg, 3NH1omg or self (default: one learner among scripted others)"""
    pool: tuple[str, ...] = ()
    """run folders of iql.py, vdn.py or qmix.py (patterns will do) that the team's names are found in"""
    seat: str = "rotate"
    """the learner's seat: rotate, random or a number"""
    mix_teammates: bool = False
    """whether every other seat draws its own policy, or one is drawn for all of a match"""
    teammate_epsilon: float = 0.0
    """the others' chance of a random action (networks only)"""
    num_envs: int | None = None
    """matches played at a time (default: 1024 on the GPU, 64 on the CPU, 8 of the real game)"""
    total_timesteps: int | None = None
    """environment steps of the run, all matches together (default: 20 million on the GPU, 1 million on the CPU)"""
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
    """how far the target network moves to the online one with every update"""
    buffer_size: int | None = None
    """episodes in the replay buffer (default: 8192 on the GPU, 4096 on the CPU)"""
    buffer_device: str = "same"
    """where the replay buffer is kept: same (as the networks) or cpu"""
    batch_size: int | None = None
    """episodes in an update (default: 64 on the GPU, 32 on the CPU)"""
    updates_per_round: int | None = None
    """updates after each round of num_envs episodes (default: 16 on the GPU, 8 on the CPU)"""
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
    vae: str | None = None
    """a file of pretrain_cvae.py (default: the same pre-training first)"""
    pretrain_timesteps: int | None = None
    """environment steps of that pre-training (default: 2 million on the GPU, 100,000 on the CPU)"""
    pretrain_updates: int = 1500
    """updates of that pre-training, at most; it stops early when the held-out error no longer falls"""
    model_learning_rate: float = 1e-3
    """Adam's learning rate for the VAE and the inference model"""
    kl_weight: float = 0.001
    """weight of the divergence beside the reconstruction, in both"""
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
from envs.team import Team, sizes_of  # noqa: E402

CHUNK = 8  # steps between two looks at whether all matches are over; lengths of updates are multiples of it


def check(args):
    """Refuses values that make no sense, with what is allowed, and fills in those that depend on the device."""
    positive = "num_envs total_timesteps eval_interval eval_episodes final_eval_episodes buffer_size batch_size"
    for name in (
        *positive.split(),
        "updates_per_round",
        "hidden_dim",
        "latent_dim",
        "horizon",
        "pretrain_timesteps",
        "pretrain_updates",
        "learning_rate",
        "model_learning_rate",
        "max_grad_norm",
        "time_limit",
    ):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise SystemExit(f"--{name.replace('_', '-')} is above 0, not {getattr(args, name)}")
    shares = "gamma td_lambda tau kl_weight mix_start mix_fraction start_e end_e exploration_fraction teammate_epsilon"
    for name in shares.split():
        if not 0 <= getattr(args, name) <= 1:
            raise SystemExit(f"--{name.replace('_', '-')} is from 0 to 1, not {getattr(args, name)}")
    if args.buffer_device not in ("same", "cpu"):
        raise SystemExit(f"--buffer-device is same or cpu, not {args.buffer_device}")
    if args.cuda and not torch.cuda.is_available():
        print("There is no GPU that torch can use: going on with the CPU.")
        args.cuda = False
    elif args.cuda and importlib.util.find_spec("numba_cuda") is None and not args.env_id.startswith("sc2/"):
        print('For the GPU the environments need pip install -e ".[cuda]": going on with the CPU.')
        args.cuda = False
    usual = {"total_timesteps": (20_000_000, 1_000_000), "buffer_size": (8192, 4096), "updates_per_round": (16, 8)}
    usual["batch_size"] = (64, 32)
    usual["pretrain_timesteps"] = (2_000_000, 100_000)
    if args.selector not in ("value", "random", "next") and not (args.selector.isdigit() and int(args.selector) > 0):
        raise SystemExit(f"--selector is value, random, next or a number from 1 up, not {args.selector}")
    usual["num_envs"] = (8, 8) if args.env_id.startswith("sc2/") else (1024, 64)
    for name, (on_gpu, on_cpu) in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, on_gpu if args.cuda else on_cpu)
    args.eval_interval = args.eval_interval or max(args.total_timesteps // 50, 1)
    if not args.batch_size <= args.buffer_size >= args.num_envs:
        least = max(args.batch_size, args.num_envs)
        raise SystemExit(f"--buffer-size holds at least a round and a batch, {least} episodes, not {args.buffer_size}")


def make_env(args, num_envs, device, seed):
    try:
        return envs.make(args.env_id, num_envs=num_envs, device=device, seed=seed, n_agents=args.n_agents, check=False)
    except ValueError as error:
        raise SystemExit(f"--env-id {args.env_id}: {error}") from None


def make_team(args, env, seed, understudy=False):
    try:
        return Team(
            env, args.team, ("omg", "iql_omg", "learner"), args.pool, args.seat, args.mix_teammates,
            args.teammate_epsilon, seed, understudy,
        )  # fmt: skip
    except ValueError as error:
        raise SystemExit(f"--team {args.team}: {error}") from None


# ALGO LOGIC: networks
class SharedGRU(nn.GRU):
    """A GRU for all seats."""

    def forward(self, x, h):  # (time, matches, seats, inputs), (matches, seats, hidden)
        rows, state = x.flatten(1, 2), h.flatten(0, 1)
        if len(x) == 1:
            y = torch.gru_cell(rows[0], state, *self._flat_weights)  # at a single step cuDNN is slow
        else:
            y, _ = super().forward(rows, state.unsqueeze(0))
        return y.view(*x.shape[:-1], -1)  # (time, matches, seats, hidden)


class Agents(nn.Module):
    """Linear, GRU, Linear on observation, own last action, seat and subgoal."""

    def __init__(self, env, hidden, latent):
        super().__init__()
        self.hidden = hidden
        self.into = nn.Linear(env.obs_dim + env.n_actions + env.n_agents + latent, hidden)
        self.gru, self.out = SharedGRU(hidden, hidden), nn.Linear(hidden, env.n_actions)
        self.register_buffer("seats", torch.arange(env.n_agents), persistent=False)
        self.register_buffer("actions", torch.arange(env.n_actions), persistent=False)

    def forward(self, obs, last_action, seat, subgoal, h):
        """(time, matches, seats, ...) all but h (matches, seats, hidden) -> Q, the states h after each step"""
        last = (last_action.unsqueeze(-1) == self.actions).to(obs.dtype)
        place = (seat.unsqueeze(-1) == self.seats).to(obs.dtype).expand(*obs.shape[:-1], -1)
        x = F.relu(self.into(torch.cat((obs, last, place, subgoal), -1)))
        states = self.gru(x, h)
        return self.out(states), states


class Gaussian(nn.Module):
    """(mean, log variance) of a latent code."""

    def __init__(self, inputs, latent):
        super().__init__()
        self.mean, self.log_variance = nn.Linear(inputs, latent), nn.Linear(inputs, latent)

    def forward(self, x):
        return self.mean(x), self.log_variance(x).clamp(-10.0, 10.0)


def sample(mean, log_variance):
    return mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)


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


class Inference(nn.Module):
    """The subgoal the past speaks for: a GRU over what was seen and done, an encoder, and a decoder to train it by."""

    def __init__(self, env, latent, memory=96):
        super().__init__()
        self.memory, self.actions, self.ego_first = memory, env.n_actions, env.ego_first
        self.past = SharedGRU(env.obs_dim + env.n_agents * env.n_actions, memory)
        self.now = nn.Linear(env.obs_dim, 32)
        self.encoder, self.code = nn.Linear(32 + memory, 64), Gaussian(64, latent)
        self.decoder, self.out = nn.Linear(latent + memory, 128), nn.Linear(128, env.obs_dim)
        self.register_buffer("seats", torch.arange(env.n_agents), persistent=False)
        self.register_buffer("choices", torch.arange(env.n_actions), persistent=False)

    def remember(self, obs, actions, seat, h):
        """The past before each step from the observation and everybody's actions one step earlier (-1: none yet)."""
        first = seat.unsqueeze(-1)  # own action, then the others' in the order in which the observation has them
        order = (first + self.seats) % len(self.seats)
        if not self.ego_first:
            order = torch.cat((first, self.seats[:-1] + (self.seats[:-1] >= first).long()), -1)
        order = order.expand(*obs.shape[:-1], -1)  # (time, matches, seats, agents)
        actions = actions.unsqueeze(-2).expand_as(order).gather(-1, order)
        done = (actions.unsqueeze(-1) == self.choices).to(obs.dtype).flatten(-2)
        return self.past(torch.cat((obs, done), -1), h)

    def forward(self, obs, memory):
        """(mean, log variance) of the subgoal"""
        x = F.relu(self.now(obs))
        return self.code(F.relu(self.encoder(torch.cat((x, memory), -1))))

    def reconstruct(self, code, memory):
        return self.out(F.relu(self.decoder(torch.cat((code, memory), -1))))


def best_action(q, avail):
    return q.masked_fill(~avail, -1e9).argmax(-1)


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
        target = torch.cat((target[:-span] + weight[:-span] * target[span:], target[-span:]))
        weight = torch.cat((weight[:-span] * weight[span:], torch.zeros_like(weight[-span:])))
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
                with torch.cuda.graph(self.graph):
                    self.function()
            self.graph.replay()


class Rollout:
    """Plays whole episodes of all matches in lock step; `story` keeps what is to be learned from, time first."""

    def __init__(self, env, team, agents, inference, args, kept):
        self.env, self.team, self.agents, self.inference, self.mlp = (
            env,
            team,
            agents,
            inference,
            args.inference == "mlp",
        )
        device, rows = env.device, -(-env.episode_limit // CHUNK) * CHUNK + 1
        fields = {"action": env.actions, "reward": team.mine(env.reward), "terminated": env.terminated, **env.info}
        fields |= {"obs": team.mine(env.obs), "avail": team.mine(env.info["avail"])}
        fields["mean"] = fields["log_variance"] = torch.zeros(*team.own.shape, args.latent_dim, device=device)
        self.story = {name: fields[name].new_zeros((rows, *fields[name].shape)) for name in ("reward", *kept)}
        self.story["seat"] = team.own.unsqueeze(0)  # the same at all times
        self.t, self.epsilon = torch.zeros(1, dtype=torch.long, device=device), torch.zeros((), device=device)
        self.h = torch.zeros(*team.own.shape, agents.hidden, device=device)
        self.memory = torch.zeros(*team.own.shape, inference.memory, device=device)
        self.last_obs, self.last_action = torch.zeros_like(fields["obs"]), torch.zeros_like(env.actions)
        self.running, self.lengths = torch.zeros_like(env.terminated), torch.zeros_like(env.actions[:, 0])
        self.chunk = Graphed(self.steps, device) if env.simulated else self.steps
        if env.simulated:
            env.reset()  # so that a snapshot has its random streams

    def write(self, when, **values):
        for name in self.story.keys() & values.keys():
            self.story[name].index_copy_(0, when, values[name].unsqueeze(0))

    @torch.no_grad()
    def steps(self):
        team, env = self.team, self.env
        for _ in range(CHUNK):
            obs, last = team.mine(env.obs), self.last_action.gather(1, team.own)
            memory = self.inference.remember(
                self.last_obs.unsqueeze(0), self.last_action.unsqueeze(0), team.own, self.memory
            )
            mean, log_variance = self.inference(obs, memory[0])
            subgoal = mean if self.mlp else sample(mean, log_variance)
            q, states = self.agents(obs.unsqueeze(0), last.unsqueeze(0), team.own, subgoal.unsqueeze(0), self.h)
            noise = torch.rand((*q.shape[1:-1], q.shape[-1] + 1), device=q.device)
            wish = torch.where(noise[..., -1:] < self.epsilon, noise[..., :-1], q[0])
            action = team.complete(best_action(wish, team.mine(env.info["avail"])), self.last_action)
            self.last_obs.copy_(obs)
            obs, reward, terminated, truncated, info = env.step(action)
            self.write(self.t, action=action, reward=team.mine(reward), terminated=terminated)
            self.write(self.t, mean=mean, log_variance=log_variance)
            self.t += 1
            self.write(self.t, **{**info, "obs": team.mine(obs), "avail": team.mine(info["avail"])})
            self.lengths += self.running
            self.running &= ~(terminated | truncated)
            self.h.copy_(states[0])
            self.memory.copy_(memory[0])
            self.last_action.copy_(action)

    def play(self, epsilon):
        """One episode of every match: (returns (matches, own seats), lengths, won, valid), until the next call."""
        self.team.draw()
        obs, info = self.env.reset()
        for tensor in (self.t, self.h, self.memory, self.last_obs, self.lengths, self.story["reward"]):
            tensor.zero_()
        self.last_action.fill_(-1)
        self.running.fill_(True)
        self.epsilon.fill_(epsilon)
        self.write(self.t, **{**info, "obs": self.team.mine(obs), "avail": self.team.mine(info["avail"])})
        for _ in range(0, self.env.episode_limit, CHUNK):
            self.chunk()
            if not self.running.any():
                break
        return self.story["reward"].sum(0), self.lengths, info["won"], ~info["invalid"]


class Buffer:
    """A ring of episodes, time first: (steps + 1, episodes, ...)."""

    def __init__(self, story, size, device, seed):
        each = sum(values[:, 0].nbytes for values in story.values())
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
        rows, places = int(lengths.max()) + 1, slots.to(self.device)
        for name, values in story.items():
            data = self.data[name]
            episodes = values[:rows] if len(keep) == len(lengths) else values[:rows, keep.to(values.device)]
            data[:rows].index_copy_(1, places, episodes.to(self.device))
        self.lengths[slots] = lengths[keep]
        self.cursor = (self.cursor + len(keep)) % len(self.lengths)

    def sample(self, batches, count):
        """(batches, 2, count): numbers and lengths of episodes, no two alike in a batch."""
        there = self.lengths.nonzero().flatten()
        orders = [torch.randperm(len(there), generator=self.generator)[:count] for _ in range(batches)]
        episodes = there[torch.stack(orders)]
        return torch.stack((episodes, self.lengths[episodes]), 1)


def single(agents, obs, last_action, seat, subgoal, h):
    """Q of single steps, each from a state h of its own; all have the leading shape of `last_action`."""
    rows = [x.reshape(1, -1, 1, x.shape[-1]) for x in (obs, subgoal)]
    seats, last = seat.expand_as(last_action).reshape(-1, 1), last_action.reshape(1, -1, 1)
    q, _ = agents(rows[0], last, seats, rows[1], h.reshape(-1, 1, h.shape[-1]))
    return q.view(*last_action.shape, -1)


def spread(mask, values):
    """The mean of the values that the mask selects."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


class Learner:
    """The networks, the optimisers, and the update, which is one captured graph for every length of a batch."""

    def __init__(self, args, env):
        self.args, self.env, self.updates, self.graphs, self.batch = args, env, 0, {}, {}
        self.online, self.target = ({"agents": make_agents(args, env)} for _ in range(2))
        for name, network in self.target.items():
            network.load_state_dict(self.online[name].state_dict())
        seen = env.obs_dim if args.subgoal_input == "obs" else env.state_dim
        self.model = {
            "vae": StateVAE(seen, args.latent_dim).to(env.device),
            "inference": Inference(env, args.latent_dim).to(env.device),
        }
        self.parameters = [p for network in self.online.values() for p in network.parameters()]
        self.target_parameters = [p for network in self.target.values() for p in network.parameters()]
        # fused, so that an update with a gradient that is not finite can be skipped without asking the device
        options = {"eps": 1e-5, "fused": True, "capturable": args.cuda}
        self.optimizer = torch.optim.Adam(self.parameters, args.learning_rate, **options)
        self.model_parameters = list(self.model["inference"].parameters())
        self.model_optimizer = torch.optim.Adam(self.model_parameters, args.model_learning_rate, **options)
        self.mix_chance = torch.zeros((), device=env.device)
        names = ("td_loss", "q_values", "grad_norm", "kl", "recon", "bad_loss", "bad_gradient")
        self.sums = {name: torch.zeros((), device=env.device) for name in names}
        self.kl_per_dim = torch.zeros(args.latent_dim, device=env.device)
        self.selected_k = torch.zeros(args.horizon, device=env.device)

    def learn(self, buffer, updates):
        """Updates, each from a batch of episodes."""
        chosen = buffer.sample(updates, self.args.batch_size)
        longest = chosen[:, 1].amax(1).tolist()
        if not self.batch:
            for name, data in buffer.data.items():
                shape = (len(data), chosen.shape[-1], *data.shape[2:])
                self.batch[name] = data.new_empty(shape, device=self.env.device)
            self.batch["lengths"] = torch.zeros_like(chosen[0, 1], device=self.env.device)
        for (episodes, lengths), steps in zip(chosen.to(buffer.device), longest):  # moved at once: each move waits
            steps = -(-steps // CHUNK) * CHUNK
            for name, data in buffer.data.items():
                self.batch[name][: steps + 1] = data[: steps + 1].index_select(1, episodes)
            self.batch["lengths"].copy_(lengths)
            if steps not in self.graphs:
                part = {name: data[: steps + 1] if name != "lengths" else data for name, data in self.batch.items()}
                self.graphs[steps] = Graphed(lambda part=part: self.update(part), self.env.device)
            self.graphs[steps]()
            self.updates += 1

    # ALGO LOGIC: the opponent model
    def infer(self, obs, everybody, seat):
        """(mean, log variance, memory) at every step of episodes: (steps + 1, matches, own seats, ...)"""
        before = torch.cat((torch.zeros_like(obs[:1]), obs[:-1]))
        done = torch.cat((torch.full_like(everybody[:1], -1), everybody))
        inference = self.model["inference"]
        start = torch.zeros(*seat.shape, inference.memory, device=obs.device)
        memory = inference.remember(before, done, seat, start)
        return *inference(obs, memory), memory

    @torch.no_grad()
    def select(self, obs, last, seat, avail, states, codes, final):
        """The index of the state chosen as each step's subgoal, (steps, matches, own seats); how far ahead (0: next).

        Candidates are the next `horizon` states; past the `final` one, where the learner's part ends, that one again.
        """
        steps, horizon = len(avail), self.args.horizon
        time = torch.arange(steps, device=obs.device).view(-1, 1, 1, 1)
        ahead = torch.arange(1, horizon + 1, device=obs.device).view(1, -1, 1, 1)
        if self.args.selector.isdigit() or self.args.selector == "next":
            k = torch.full_like(last, 0 if self.args.selector == "next" else int(self.args.selector) - 1)
        elif self.args.selector == "random":
            k = torch.randint(horizon, last.shape, device=obs.device)
        else:
            index = torch.minimum(time + ahead, final)  # (steps, horizon, matches, own seats)
            everyone = torch.arange(final.shape[0], device=obs.device).unsqueeze(1)
            candidates = codes[index, everyone, torch.arange(final.shape[1], device=obs.device)]

            def repeated(x):
                return x.unsqueeze(1).expand(-1, horizon, *x.shape[1:])

            before = torch.cat((torch.zeros_like(states[:1]), states[:-1]))
            q = single(self.online["agents"], *map(repeated, (obs, last)), seat, candidates, repeated(before))
            allowed = repeated(avail)
            value = torch.where(allowed, q, 0.0).sum(-1) / allowed.sum(-1).clamp(min=1)
            k = value.argmax(1) if self.args.subgoal_mode == "optimistic" else value.argmin(1)
        return torch.minimum(time.squeeze(1) + 1 + k, final), k

    # ALGO LOGIC: the losses
    def loss(self, batch):
        """(the Q-network's loss, the model's, the mean value of the actions taken) of episodes, time first."""
        args, seat, everybody = self.args, batch["seat"][0], batch["action"][:-1]  # seat (matches, own seats)
        obs, avail, reward, steps = batch["obs"], batch["avail"], batch["reward"][:-1], len(everybody)
        alive = batch["alive"].gather(-1, seat.expand(steps + 1, -1, -1))
        action = everybody.gather(-1, seat.expand(steps, -1, -1))  # (steps, matches, own seats)
        last = torch.cat((torch.full_like(action[:1], -1), action))
        start = torch.zeros(*seat.shape, args.hidden_dim, device=obs.device)
        time = torch.arange(steps + 1, device=obs.device).view(-1, 1, 1)
        lengths = batch["lengths"].unsqueeze(-1)  # (matches, 1)
        final = ((alive & (time <= lengths)).sum(0) - 1).clamp(min=0)  # the learner's last state
        mask, ended, cut = time[:-1] < lengths, batch["terminated"][:-1].unsqueeze(-1), time[:-1] == lengths - 1
        mask, ended, cut = (flags.expand_as(reward) for flags in (mask, ended, cut))
        there = alive[:-1] & mask  # where the learner is there to see
        if not self.env.team_reward:  # an agent's own game ends when it leaves
            ended, mask = ended | ~alive[1:], there
        # what does not count is not computed with either: 0 times what is not finite would count
        shown = (time <= lengths) & (alive | self.env.team_reward)
        obs, reward = torch.where(shown.unsqueeze(-1), obs, 0.0), torch.where(mask, reward, 0.0)

        mean, log_variance, memory = self.infer(obs, everybody, seat)
        inferred = mean if args.inference == "mlp" else sample(mean, log_variance)
        with torch.no_grad():
            view = obs if args.subgoal_input == "obs" else batch["state"].unsqueeze(2).expand(-1, -1, seat.shape[1], -1)
            code_mean, code_log_variance = self.model["vae"].encode(view)
            codes = sample(code_mean, code_log_variance)
            _, states = self.online["agents"](obs, last, seat, inferred, start)
            index, k = self.select(obs[:-1], last[:-1], seat, avail[:-1], states[:-1], codes, final)
            where = index.unsqueeze(-1).expand(-1, -1, -1, args.latent_dim)
            selected = codes.gather(0, where)  # (steps, matches, own seats, latent)
            chance = {"mixed": self.mix_chance, "inferred": 0.0, "selected": 1.0}[args.q_subgoal]
            mixed = ((torch.rand(index.shape, device=obs.device) < chance) & mask).unsqueeze(-1)
            goal = [code_mean.gather(0, where), code_log_variance.gather(0, where)]
            if args.mix == "kl-target":  # as in the released code: the divergence to what was inferred while acting
                played = [torch.where(there.unsqueeze(-1), batch[name][:-1], 0.0) for name in ("mean", "log_variance")]
                goal, mixed = [torch.where(mixed, new, old) for new, old in zip(goal, played)], torch.zeros_like(mixed)
            subgoal = torch.cat((torch.where(mixed, selected, inferred[:-1]), inferred[-1:]))

        # the inference model
        if args.inference == "mlp":
            kl_per_dim, recon = torch.zeros_like(mean[:-1]), (mean[:-1] - goal[0]).square().mean(-1)
        else:
            kl_per_dim = divergence(mean[:-1], log_variance[:-1], *goal)
            rebuilt = self.model["inference"].reconstruct(inferred[:-1], memory[:-1])
            recon = (rebuilt - obs[:-1]).square().mean(-1)
        kl = kl_per_dim.sum(-1)
        model_loss = spread(there, recon + args.kl_weight * kl)
        with torch.no_grad():
            self.sums["kl"] += spread(there, kl)
            self.sums["recon"] += spread(there, recon)
            self.kl_per_dim += torch.where(there.unsqueeze(-1), kl_per_dim, 0.0).sum((0, 1, 2)) / there.sum().clamp(
                min=1
            )
            counted = F.one_hot(k.clamp(max=args.horizon - 1), args.horizon) * there.unsqueeze(-1)
            self.selected_k += counted.sum((0, 1, 2))

        # the Q-network
        q, states = self.online["agents"](obs, last, seat, subgoal, start)  # (steps + 1, matches, own seats, actions)
        chosen = q[:-1].gather(-1, action.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            target_q, target_states = self.target["agents"](obs, last, seat, subgoal, start)
            q, target_q = q[1:], target_q[1:]
            if args.bootstrap_subgoal == "same":
                step = (obs[1:], action, seat, subgoal[:-1])
                q = single(self.online["agents"], *step, states[:-1])
                target_q = single(self.target["agents"], *step, target_states[:-1])
            following = target_q.gather(-1, best_action(q, avail[1:]).unsqueeze(-1)).squeeze(-1)
            target = lambda_returns(reward, following, ended, cut, args.gamma, args.td_lambda)
        error = torch.where(mask, chosen - target, 0.0)
        return error.square().sum() / mask.sum(), model_loss, spread(mask, chosen)

    def update(self, batch):
        loss, model_loss, value = self.loss(batch)
        self.optimizer.zero_grad()
        self.model_optimizer.zero_grad()
        (loss + model_loss).backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm)
        model_norm = nn.utils.clip_grad_norm_(self.model_parameters, self.args.max_grad_norm)
        bad = (~torch.isfinite(norm + model_norm)).float()
        self.optimizer.found_inf = self.model_optimizer.found_inf = bad
        self.optimizer.step()
        self.model_optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.target_parameters, self.parameters, self.args.tau)
            for name, number in (("td_loss", loss), ("q_values", value), ("grad_norm", norm)):
                self.sums[name] += torch.where(bad > 0, 0.0, number)
            self.sums["bad_loss"] += ~torch.isfinite(loss + model_loss)
            self.sums["bad_gradient"] += bad

    def report(self):
        """The sums since the last report; stops the run if an update was not finite."""
        sums = dict(zip(self.sums, torch.stack(list(self.sums.values())).tolist()))
        if sums["bad_gradient"]:
            raise FloatingPointError(f"{'the loss' if sums['bad_loss'] else 'a gradient'} was not finite")
        for total in (*self.sums.values(), self.kl_per_dim, self.selected_k):
            total.zero_()
        return {name: sums[name] for name in ("td_loss", "q_values", "grad_norm", "kl", "recon")}


def pretrain(args, learner, rollout, writer=None):
    """Trains the VAE on states met while the others play every seat, then the inference model to expect the next state.

    Returns the errors held out: {"recon": ..., "kl": ..., "inference": ...}.
    """
    stories, steps = [], 0
    while steps < args.pretrain_timesteps:
        _, lengths, _, valid = rollout.play(epsilon=1.0)
        steps += int(lengths.sum())
        rows = int(lengths.max()) + 1
        stories.append({name: values[:rows, valid].clone() for name, values in rollout.story.items()})
        stories[-1]["lengths"] = lengths[valid].clone()
    vae, inference = learner.model["vae"], learner.model["inference"]
    optimizer = torch.optim.Adam(vae.parameters(), args.model_learning_rate)
    held_out = stories.pop() if len(stories) > 1 else stories[0]

    def view(story):
        """(states, own seats, features) that the learner's unit is there to see."""
        seat, rows = story["seat"][0], len(story["obs"])
        there = story["alive"].gather(-1, seat.expand(rows, -1, -1))
        there &= torch.arange(rows, device=seat.device).view(-1, 1, 1) <= story["lengths"].unsqueeze(-1)
        seen = (
            story["obs"]
            if args.subgoal_input == "obs"
            else story["state"].unsqueeze(2).expand(-1, -1, seat.shape[1], -1)
        )
        return seen, there

    def vae_loss(states):
        mean, log_variance = vae.encode(states)
        recon = (vae.decode(sample(mean, log_variance)) - states).square().mean(-1).mean()
        kl = divergence(mean, log_variance, torch.zeros_like(mean), torch.zeros_like(mean)).sum(-1).mean()
        return recon + args.kl_weight * kl, recon, kl

    states = torch.cat([seen[there] for seen, there in map(view, stories)])
    test_states = view(held_out)[0][view(held_out)[1]][:8192]
    best, patience = float("inf"), 0
    for update in range(args.pretrain_updates):
        loss, _, _ = vae_loss(states[torch.randint(len(states), (1024,), device=states.device)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 100 == 99:
            with torch.no_grad():
                error, recon, kl = (number.item() for number in vae_loss(test_states))
            if writer:
                writer.add_scalar("pretrain/recon", recon, update)
                writer.add_scalar("pretrain/kl", kl, update)
            patience = 0 if error < 0.99 * best else patience + 1
            best = min(best, error)
            if patience == 3:
                break
    vae.requires_grad_(False)

    optimizer = torch.optim.Adam(inference.parameters(), args.model_learning_rate)

    def inference_loss(story, chosen):
        obs, seat = story["obs"][:, chosen], story["seat"][0][chosen]
        seen, there = (values[:, chosen] for values in view(story))
        mean, log_variance, memory = learner.infer(obs, story["action"][:-1, chosen], seat)
        goal = vae.encode(seen[1:])
        kl = divergence(mean[:-1], log_variance[:-1], *goal).sum(-1)
        recon = (inference.reconstruct(sample(mean, log_variance), memory)[:-1] - obs[:-1]).square().mean(-1)
        if args.inference == "mlp":
            return spread(there[1:], (mean[:-1] - goal[0]).square().mean(-1))
        return spread(there[1:], recon + args.kl_weight * kl)

    for update in range(args.pretrain_updates // 5):
        story = stories[update % len(stories)]
        loss = inference_loss(story, torch.randint(story["obs"].shape[1], (args.batch_size,), device=states.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        _, recon, kl = vae_loss(test_states)
        expected = inference_loss(held_out, torch.arange(min(held_out["obs"].shape[1], 64), device=states.device))
    return {"recon": recon.item(), "kl": kl.item(), "inference": expected.item(), "states": len(states)}


def make_agents(args, env):
    return Agents(env, args.hidden_dim, args.latent_dim).to(env.device)


def free_memory():
    """Bytes of the CPU's memory that are free, where the system says so."""
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float("inf")


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
    return found / distinct.clamp(min=1)


def probe(features, labels, classes, train):
    """The accuracy, held out, of a linear read-out (ridge regression) of labels from features."""
    features = (features - features[train].mean(0)) / features[train].std(0).clamp(min=1e-6)  # small ones count too
    x = torch.cat((features, torch.ones_like(features[:, :1])), 1)
    x, held_out, goal = x[train], x[~train], F.one_hot(labels[train], classes).to(x.dtype)
    weights = torch.linalg.solve(x.T @ x + 1e-2 * len(x) * torch.eye(x.shape[1], device=x.device), x.T @ goal)
    return ((held_out @ weights).argmax(1) == labels[~train]).float().mean().item()


@torch.no_grad()
def analyse(args, learner, rollout, matches=64):
    """What the inferred subgoals of the round just played know: docs/omg_iql.md defines the numbers."""
    env, team, rows = rollout.env, rollout.team, int(rollout.lengths[:matches].max()) + 1
    obs, avail, alive, everybody = (
        rollout.story[name][:rows, :matches] for name in ("obs", "avail", "alive", "action")
    )
    seat, lengths, who = team.own[:matches], rollout.lengths[:matches].unsqueeze(-1), team.who[:matches]
    own_alive = alive.gather(-1, seat.expand(rows, -1, -1))
    there = own_alive & (torch.arange(rows, device=seat.device).view(-1, 1, 1) < lengths)
    mean, log_variance, _ = learner.infer(obs, everybody[:-1], seat)
    subgoal = mean if args.inference == "mlp" else sample(mean, log_variance)
    numbers = {}
    if args.subgoal_input == "obs" and hasattr(env, "places"):
        ends = own_alive & (torch.arange(rows, device=seat.device).view(-1, 1, 1) <= lengths)
        predicted, _ = env.places(learner.model["vae"].decode(subgoal))
        places, seen = env.places(obs)
        flat = [x.flatten(1, 2) for x in (predicted, places, seen, ends)]
        numbers["hit_ratio"] = hit_ratio(*flat, env.hit_distance).item()

    action = everybody.gather(-1, seat.expand(rows, -1, -1))
    last = torch.cat((torch.full_like(action[:1], -1), action[:-1]))
    start = torch.zeros(*seat.shape, args.hidden_dim, device=obs.device)
    q, _ = learner.online["agents"](obs, last, seat, subgoal, start)
    shuffled, _ = learner.online["agents"](obs, last, seat, subgoal.roll(1, 1), start)
    numbers["q_sensitivity"] = spread(there.unsqueeze(-1) & avail, (q - shuffled).abs()).item()

    # seats turn from match to match, so that both halves have all of them
    half = torch.arange(len(seat), device=seat.device) < (len(seat) + 1) // 2
    train = half.view(1, -1, 1).expand_as(there)[there]
    other = (seat + 1) % env.n_agents  # the next seat stands for the team-mates
    policy = who.gather(-1, other).expand(rows, -1, -1)[there]
    features, fixed = mean[there], policy >= 0  # the next seat may be the learner's too
    if len(policy[fixed].unique()) > 1:
        numbers["teammate_probe"] = probe(features[fixed], policy[fixed], int(policy.max()) + 1, train[fixed])
    if env.n_agents > 1:
        index = other.expand(rows, -1, -1)
        moves = alive.gather(-1, index)[there]
        numbers["next_action_probe"] = probe(
            features[moves], everybody.gather(-1, index)[there][moves], env.n_actions, train[moves]
        )
    return numbers


def policy_of(args, env, agents, model):
    """Greedy play of the matches of `env` with the run's team: act(obs, info) -> actions; act.goals: others' places."""
    team = make_team(args, env, args.seed + 2)
    rollout = Rollout(env, team, agents, model["inference"], args, ())

    @torch.no_grad()
    def act(obs, info):
        begun = (env.steps > 0).view(-1, 1)  # a match that has just started has no past
        if not begun.any():
            team.draw()
        last, own = torch.where(begun, rollout.last_action, -1), team.mine(obs)
        for tensor in (rollout.h, rollout.memory, rollout.last_obs):
            tensor *= begun.unsqueeze(-1)
        memory = model["inference"].remember(
            rollout.last_obs.unsqueeze(0), last.unsqueeze(0), team.own, rollout.memory
        )[0]
        subgoal, _ = model["inference"](own, memory)
        before = last.gather(1, team.own).unsqueeze(0)
        q, states = agents(own.unsqueeze(0), before, team.own, subgoal.unsqueeze(0), rollout.h)
        rollout.memory.copy_(memory)
        rollout.h.copy_(states[0])
        rollout.last_obs.copy_(own)
        if args.subgoal_input == "obs" and hasattr(env, "places"):
            act.goals = goals_of(env, team, own, model["vae"].decode(subgoal))
        return rollout.last_action.copy_(team.complete(best_action(q[0], team.mine(info["avail"])), last))

    act.goals = []
    return act


def goals_of(env, team, obs, expected):
    """Where the learner of the first match expects the others it sees: (learner, x, y), on a grid row and column."""
    agent = int(team.own[0, 0])
    places, (_, seen) = env.places(expected)[0][0, 0], env.places(obs)
    if hasattr(env, "units"):
        places = places + torch.stack([env.units()[axis][0, agent] for axis in ("x", "y")])
    return [(agent, *place) for place, visible in zip(places.tolist(), seen[0, 0].tolist()) if visible]


def film(args, agents, model, device, path):
    """A GIF of one greedy match, with the places where the learner expects the others."""
    from PIL import Image

    env = make_env(args, 1, device, args.seed + 2)
    act, (obs, info), over, frames = policy_of(args, env, agents, model), env.reset(), False, []
    while not over:
        action = act(obs, info)
        frames.append(Image.fromarray(env.render(goals=act.goals)))
        obs, _, terminated, truncated, info = env.step(action)
        over = bool(terminated[0] | truncated[0])
    frames.append(Image.fromarray(env.render()))
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=120, loop=0)


# ---- checkpoints: tensors and plain types only ----
def write_file(content, path):
    """In one piece or not at all; a disk that is full is a warning."""
    part = path.with_suffix(".part")
    try:
        torch.save(content, part)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        print(f"warning: {path} was not written ({error}); the run goes on", file=sys.stderr)
        with contextlib.suppress(OSError):
            part.unlink()


def read_file(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def load_policy(run, env):
    """The greedy policy of a run, for matches of `env`: act(obs, info) -> actions."""
    saved = read_file(Path(run) / "checkpoint.pt")
    if saved["sizes"] != sizes_of(env):
        raise ValueError(f"{run} was trained on {saved['env_id']} {saved['sizes']}; this is {env.name} {sizes_of(env)}")
    args = Args(**saved["args"])
    learner = Learner(args, env)
    for which in ("online", "model"):
        for name, network in getattr(learner, which).items():
            network.load_state_dict(saved[which][name])
    return policy_of(args, env, learner.online["agents"], learner.model)


def load_vae(path, args, env, learner):
    """A file of pretrain_cvae.py; one that was made for something else is refused."""
    if not Path(path).exists():
        raise SystemExit(f"--vae {path}: there is no such file")
    saved = read_file(path)
    wanted = {**sizes_of(env), "latent_dim": args.latent_dim, "subgoal_input": args.subgoal_input}
    if saved.get("fits") != wanted:
        raise SystemExit(f"--vae {path} is for {saved.get('fits')}; this run needs {wanted}")
    for name, network in learner.model.items():
        network.load_state_dict(saved["model"][name])
    learner.model["vae"].requires_grad_(False)


def save(run, args, learner, buffer, rollouts, progress):
    """checkpoint.pt: what it takes to act and to go on; resume.pt: what else it takes to go on exactly."""
    learner.report()  # nothing that is not finite is saved
    networks = {
        which: {name: network.state_dict() for name, network in getattr(learner, which).items()}
        for which in ("online", "target", "model")
    }
    about = {
        "algorithm": Path(__file__).stem,
        "env_id": args.env_id,
        "sizes": sizes_of(learner.env),
        "args": asdict(args),
    }
    optimizers = {name: getattr(learner, name).state_dict() for name in ("optimizer", "model_optimizer")}
    state = {**optimizers, "updates": learner.updates, "progress": progress}
    write_file({**about, **networks, **state}, run / "checkpoint.pt")
    if progress["complete"]:
        (run / "resume.pt").unlink(missing_ok=True)
        return
    exact = {
        "updates": learner.updates,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if args.cuda else None,
        "sampling": buffer.generator.get_state(),
        "matches": [rollout.env.snapshot() for rollout in rollouts if rollout.env.simulated],
        "rounds": [rollout.team.rounds for rollout in rollouts],
    }
    if args.save_buffer:
        filled = int((buffer.lengths > 0).sum())
        exact |= {"lengths": buffer.lengths, "cursor": buffer.cursor}
        exact["episodes"] = {name: data[:, :filled].clone() for name, data in buffer.data.items()}
    write_file(exact, run / "resume.pt")


def restore(run, args, learner, buffer, rollouts):
    """Puts a saved run back; returns its progress."""
    saved, path = read_file(run / "checkpoint.pt"), run / "resume.pt"
    for which in ("online", "target", "model"):
        for name, network in getattr(learner, which).items():
            network.load_state_dict(saved[which][name])
    learner.model["vae"].requires_grad_(False)
    for name in ("optimizer", "model_optimizer"):
        getattr(learner, name).load_state_dict(saved[name])
    learner.updates = saved["updates"]
    exact = read_file(path) if path.exists() else {}
    if exact.get("updates") != saved["updates"]:
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
    path = Path(args.resume) / "checkpoint.pt"
    if not path.exists():
        raise SystemExit(f"--resume {args.resume}: there is no checkpoint.pt")
    saved = read_file(path)
    if saved["algorithm"] != Path(__file__).stem:
        raise SystemExit(f"--resume {args.resume} is a run of {saved['algorithm']}.py")
    if saved["progress"]["complete"]:
        raise SystemExit(f"--resume {args.resume}: that run is complete")
    usual, given, before = asdict(Args()), asdict(args), saved["args"]
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
    learner = Learner(args, env)
    agents, inference = learner.online["agents"], learner.model["inference"]
    kept = ["obs", "avail", "alive", "action", "terminated"]
    kept += ["state"] * (args.subgoal_input == "state") + ["mean", "log_variance"] * (args.mix == "kl-target")
    rollout = Rollout(env, make_team(args, env, args.seed), agents, inference, args, kept)
    eval_team = make_team(args, eval_env, args.seed + 1)
    eval_rollout = Rollout(eval_env, eval_team, agents, inference, args, ("obs", "avail", "alive", "action"))
    buffer = Buffer(
        rollout.story, args.buffer_size, device if args.buffer_device == "same" else torch.device("cpu"), args.seed
    )
    progress = {
        "steps": 0,
        "episodes": 0,
        "seconds": 0.0,
        "next_eval": args.eval_interval,
        "evals": [],
        "complete": False,
    }
    if args.resume:
        progress = restore(run, args, learner, buffer, (rollout, eval_rollout))
    elif args.vae:
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

    if not args.resume and not args.vae:
        print(
            f"Pre-training the VAE on {args.pretrain_timesteps:,} steps of the others' play (--vae FILE skips this) ..."
        )
        learned = Rollout(env, make_team(args, env, args.seed + 3, understudy=True), agents, inference, args, kept)
        errors = pretrain(args, learner, learned, writer)
        print("... held-out error {recon:.4f}, divergence {kl:.2f}, {states:,} states".format(**errors))
        del learned
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
            learner.mix_chance.fill_(args.mix_start * (1 - mixed))
            returns, lengths, won, valid = rollout.play(epsilon)
            buffer.add(rollout.story, lengths, valid)
            if (buffer.lengths > 0).sum() >= args.batch_size:
                learner.learn(buffer, args.updates_per_round)

            steps = int(lengths.sum())
            progress["steps"] += steps
            progress["episodes"] += int(valid.sum())
            progress["seconds"] = time.time() - started
            bar.update(steps)
            if time.time() - logged["at"] >= args.log_interval and valid.any():
                updates = max(learner.updates - logged["updates"], 1)
                kl_per_dim = learner.kl_per_dim / updates
                chosen = learner.selected_k / learner.selected_k.sum().clamp(min=1)
                losses = {name: total / updates for name, total in learner.report().items()}
                log("omg", {name: losses.pop(name) for name in ("kl", "recon")})
                log("losses", losses)
                log("omg", {"kl_per_dim_max": kl_per_dim.max().item()})
                writer.add_histogram("omg/kl_per_dim", kl_per_dim, progress["steps"])
                log("omg", {f"selected_k/{k + 1}": share for k, share in enumerate(chosen.tolist())})
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
                saved_at, logged["updates"] = time.time(), learner.updates
            if args.time_limit is not None and time.time() - STARTED >= args.time_limit:
                stopping.append("time limit")
        if stopping:
            save(run, args, learner, buffer, (rollout, eval_rollout), progress)
            raise SystemExit(f"stopped at step {progress['steps']:,}; go on with --resume {run}")

        returns, lengths, won = evaluate(eval_rollout, args.final_eval_episodes)
        subgoals = analyse(args, learner, eval_rollout)
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
        "final": final, "best": best, "omg": subgoals, **progress, "updates": learner.updates, "versions": versions,
        "args": asdict(args),
    }  # fmt: skip
    (run / "results.json").write_text(json.dumps(results, indent=1))
    log("eval", {"win_rate": final["win_rate"], "episodic_return": final["episodic_return"]})
    writer.close()
    if args.capture_video:
        film(args, agents, learner.model, device, run / "match.gif")
    low, high = final["win_rate_interval"]
    print(f"{progress['seconds']:.1f} s, {progress['steps']:,} steps, {learner.updates:,} updates")
    share = f"{final['win_rate']:.1%} ({low:.1%} to {high:.1%})"
    print(f"of {len(won)} greedy matches won {share}, return {final['episodic_return']:.2f}")

"""Opponent modelling by subgoal inference (OMG): act on the future state that the others seem to be heading for.

A conditional VAE infers a latent subgoal from the past, which is an input of the Q-network. In training hindsight gives
the subgoal to infer, the code that a VAE has of a later state: by default what the learner sees of the others two steps
on, with --paper the view that the Q-network values most (Yu, Jiang, Lu, NeurIPS 2024).
A match is one of the games that are played side by side; a seat is an agent's place in it.

    python omg_iql.py --env-id 3m --n-agents 8 --cuda            docs/omg_iql.md has the logged keys and the results
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

    env_id: str = "3m"  # the environment: see envs.list_ids()
    team: str = "scripted"  # scripted (one learner, scripted partners), self (all learn), or such as 7qmix1omg
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
    dueling: bool = False  # whether Q is a value plus advantages, from two heads
    model_learning_rate: float = 1e-3  # Adam's learning rate of the opponent model
    vae: str | None = None  # a file of pretrain_cvae.py (default: the same pre-training first)
    pretrain_timesteps: int | None = None  # steps of pre-training (default: 2 million on the GPU, 100,000 on the CPU)
    pretrain_updates: int = 1000  # updates of the VAE, and a tenth of the CVAE
    paper: bool = False  # whether to use the published subgoal settings, on our Q-learning: docs/omg_iql.md
    vae_kl_weight: float = 0.01  # weight of the VAE's KL divergence beside its error, a sum over features
    kl_weight: float = 0.001  # weight of the inference model's KL divergence beside its error
    latent_dim: int = 64  # size of a subgoal
    horizon: int = 10  # how many of the next states are candidates for the subgoal
    subgoal_input: Literal["others", "obs", "state"] = "others"  # encoded: others in view, the view, the global state
    subgoal_mode: Literal["optimistic", "conservative"] = "optimistic"  # candidate of highest or lowest value
    selector: str = "2"  # how a candidate is selected: value, random, next, or a number k for the k-th next state
    predict: Literal["future", "view", "features"] = "future"  # decoded: the selected state, the view or features of it
    code: Literal["mean", "sample"] = "mean"  # what Q reads: the mean of the subgoal's Gaussian or a sample
    q_gradient: bool = True  # whether Q's loss trains the inference model, too, through what Q reads
    inference_weight: float = 0.1  # weight of the inference model's own loss beside Q's
    inference: Literal["cvae", "mlp"] = "cvae"  # the conditional VAE, or a network that predicts the subgoal itself
    q_subgoal: Literal["mixed", "inferred", "selected"] = "mixed"  # Q's subgoal in updates: selected with epsilon
    mix: Literal["q-input", "kl-target"] = "q-input"  # where that applies: Q's input (paper) or the KL (released code)
    mix_start: float = 0.5  # that epsilon at the start
    mix_fraction: float = 0.1  # the fraction of the run over which it falls to 0
    bootstrap_subgoal: Literal["same", "next"] = "next"  # of the next value: the step's (paper) or the next step's


if __name__ == "__main__":
    answer_help(Args)  # before the slow imports

import torch
import torch.nn as nn
import torch.nn.functional as F

from training import checkpoints, play, setup
from training.args import buffer_size, check_ranges, fill_in, fill_in_sizes, parse_args, resolve_device
from training.buffers import SavedBuffer, allocate, padded_length
from training.episodes import EpisodeRunner, RandomPlayer, gather, preserved_rng
from training.exits import UsageError
from training.graphs import Graphed, SideStream
from training.gru import SharedGRU
from training.log import Metrics
from training.metrics import code_metrics, gather_q, last_alive_row, masked_mean, place_metrics, probes, usage
from training.opponents import learner_inputs
from training.oracle import PartnerOracle
from training.pretraining import Phases, load_pretrained
from training.run import Run, seed_for, set_up_torch
from training.setup import make_env, set_up
from training.team import check_team_options, seat_order

# recorded for learning and `analyse`
FIELDS = ("obs", "avail", "alive", "action", "all_action", "all_alive", "visible_last_action")
PRETRAIN_FIELDS = ("obs", "alive", "visible_last_action")  # and for pre-training
PRETRAIN_TIMESTEPS = (100_000, 2_000_000)  # by default, on the CPU and on the GPU
PAPER = {  # with --paper
    "subgoal_input": "obs", "selector": "value", "predict": "view", "code": "sample",
    "q_gradient": False, "inference_weight": 1.0, "bootstrap_subgoal": "same", "pretrain_updates": 5000,
}  # fmt: skip


def check_args(args):
    """Rejects invalid values, and fills in the defaults that depend on the device and the team."""
    check_ranges(
        args,
        positive="num_envs total_timesteps buffer_size batch_size hidden_dim reward_scale learning_rate "
        "max_grad_norm model_learning_rate pretrain_timesteps pretrain_updates latent_dim horizon",
        fractions="gamma td_lambda tau teammate_epsilon start_e end_e exploration_fraction kl_weight vae_kl_weight "
        "mix_start mix_fraction",
        non_negative="train_frequency target_interval inference_weight",
        largest={"horizon": 2**13},
    )
    if args.selector not in ("value", "random", "next") and not (args.selector.isdigit() and int(args.selector) > 0):
        raise UsageError(f"--selector is value, random, next or a number from 1 up, not {args.selector}")
    if args.subgoal_mode == "conservative" and args.selector != "value":
        raise UsageError("--subgoal-mode is for --selector value, which --paper has too")
    if args.mix == "kl-target" and args.q_subgoal != "mixed":
        raise UsageError("--q-subgoal is for --mix q-input: with kl-target the Q-network has the inferred subgoal")
    check_team_options(args)
    resolve_device(args)
    fill_in_sizes(args)
    fill_in(args, {"pretrain_timesteps": PRETRAIN_TIMESTEPS[args.cuda]})
    args.freeze()


def make_team(args, env, purpose, teammates_everywhere=False):
    if env.n_agents == 1:
        raise UsageError("--n-agents is at least 2: there is no other agent to model")
    return setup.make_team(args, env, purpose, ("omg", "iql_omg", "learner"), teammates_everywhere)


# ALGO LOGIC: networks
class QNetwork(nn.Module):
    """The Q-network: Linear, GRU, Linear on observation, own last action, seat and what the opponent model infers."""

    def __init__(self, args, env):
        super().__init__()
        inputs = env.obs_dim + env.n_actions + env.n_agents + args.latent_dim
        self.hidden_dim = args.hidden_dim
        self.fc1 = nn.Linear(inputs, args.hidden_dim)
        self.rnn = SharedGRU(args.hidden_dim, args.hidden_dim)
        self.fc2 = nn.Linear(args.hidden_dim, env.n_actions)
        self.value = nn.Linear(args.hidden_dim, 1) if args.dueling else None
        self.register_buffer("seat_one_hot", torch.eye(env.n_agents), persistent=False)
        self.register_buffer("actions", torch.arange(env.n_actions), persistent=False)
        self.to(env.device)

    def init_hidden(self, matches, seats):
        return torch.zeros(matches, seats, self.hidden_dim, device=self.actions.device)

    def inputs(self, obs, last_action, seat):
        last_action = (last_action.unsqueeze(-1) == self.actions).to(obs.dtype)
        return obs, last_action, self.seat_one_hot[seat].expand(*obs.shape[:2], -1, -1)

    def q_values(self, h):
        q = self.fc2(h)
        return q if self.value is None else self.value(h) + q - q.mean(-1, keepdim=True)

    def forward(self, obs, last_action, h, seat, inferred):
        """obs (time, matches, seats, obs_dim), last_action (time, matches, seats) with -1 for none,
        h (matches, seats, hidden), seat (matches, seats), inferred (time, matches, seats, features)
        -> Q-values and hidden states of all times
        """
        x = F.relu(self.fc1(torch.cat((*self.inputs(obs, last_action, seat), inferred), -1)))
        h = self.rnn(x, h)  # (time, matches, seats, hidden)
        return self.q_values(h), h  # (time, matches, seats, actions)

    def step(self, obs, last_action, h, seat, subgoal):
        """Q-values of single steps, each from its own hidden state h (time, matches, seats, hidden)."""
        x = F.relu(self.fc1(torch.cat((*self.inputs(obs, last_action, seat), subgoal), -1)))
        return self.q_values(self.rnn.branch(x.unsqueeze(1), h).squeeze(1))

    def compare(self, obs, last_action, h, seat, subgoals, index):
        """Q-values of single steps, each from its own hidden state, with each of its candidates among the subgoals.

        subgoals (time, matches, seats, features); index (time, candidates, matches, seats): which times they are of.
        The first layer is computed once for each observation and once for each subgoal.
        """
        match_index = torch.arange(seat.shape[0], device=obs.device).unsqueeze(1)
        seat_index = torch.arange(seat.shape[1], device=obs.device)
        obs_weight, subgoal_weight = self.fc1.weight.tensor_split((-subgoals.shape[-1],), 1)
        of_obs = F.linear(torch.cat(self.inputs(obs, last_action, seat), -1), obs_weight, self.fc1.bias)
        of_subgoal = F.linear(subgoals, subgoal_weight)[index, match_index, seat_index]
        return self.q_values(self.rnn.branch(F.relu(of_obs.unsqueeze(1) + of_subgoal), h))


# ALGO LOGIC: the opponent model's networks
def gaussian(x):
    """Mean and log-variance of a latent code."""
    mean, log_variance = x.chunk(2, -1)
    return mean, log_variance.clamp(-10.0, 10.0)


def sample(mean, log_variance):
    return torch.addcmul(mean, torch.randn_like(mean), torch.exp(0.5 * log_variance))


def kl_divergence(mean, log_variance, other_mean, other_log_variance):
    """KL(N(mean, variance) || N(other)) of each dimension."""
    gap = (mean - other_mean).square() + torch.exp(log_variance)
    return 0.5 * (other_log_variance - log_variance + gap * torch.exp(-other_log_variance) - 1)


class StateVAE(nn.Module):
    """Encodes states: two hidden layers of 128 units each way."""

    def __init__(self, inputs, latent_dim):
        super().__init__()

        def layers(inputs):
            return nn.Sequential(nn.Linear(inputs, 128), nn.LeakyReLU(), nn.Linear(128, 128), nn.LeakyReLU())

        self.encoder = layers(inputs)
        self.code = nn.Linear(128, 2 * latent_dim)
        self.decoder = layers(latent_dim)
        self.out = nn.Linear(128, inputs)
        self.register_buffer("binary", torch.zeros(inputs, dtype=torch.bool))  # features that are 0 or 1

    def encode(self, state):
        return gaussian(self.code(self.encoder(state)))

    def decode(self, code):
        x = self.out(self.decoder(code))
        return torch.where(self.binary, torch.sigmoid(x), x)

    def error(self, code, state):
        """Of each feature: the squared error, or the cross-entropy of one that is 0 or 1."""
        x = self.out(self.decoder(code))
        entropy = F.binary_cross_entropy_with_logits(x, state.clamp(0.0, 1.0), reduction="none")
        return torch.where(self.binary, entropy, (x - state).square())

    def errors(self, state):
        """(error of the reconstruction, KL divergence from N(0, I)), of each dimension"""
        mean, log_variance = self.encode(state)
        prior = torch.zeros_like(mean)
        return self.error(sample(mean, log_variance), state), kl_divergence(mean, log_variance, prior, prior)


class OpponentModel(nn.Module):
    """Infers subgoals: a GRU over past observations and actions, an encoder, and the VAE that encodes later states."""

    def __init__(self, args, env, hidden_dim=96):
        super().__init__()
        self.args = args
        self.hidden_dim = hidden_dim
        sizes = {"others": int(env.about_others.sum()), "obs": env.obs_dim, "state": env.state_dim}
        self.vae = StateVAE(sizes[args.subgoal_input], args.latent_dim).requires_grad_(not args.paper)
        self.rnn = SharedGRU(env.obs_dim + env.n_agents * env.n_actions, hidden_dim)
        self.fc_obs = nn.Linear(env.obs_dim, 32)
        self.fc1 = nn.Linear(32 + hidden_dim, 64)
        self.code = nn.Linear(64, 2 * args.latent_dim)
        if args.predict != "future":
            self.decoder = nn.Linear(args.latent_dim + hidden_dim, 128)
            self.out = nn.Linear(128, 32 if args.predict == "features" else env.obs_dim)
        self.register_buffer("seat_order", seat_order(env), persistent=False)
        self.register_buffer("actions", torch.arange(env.n_actions), persistent=False)
        self.register_buffer("about_others", env.about_others.nonzero().flatten(), persistent=False)
        self.to(env.device)

    def init_hidden(self, matches, seats):
        return torch.zeros(matches, seats, self.hidden_dim, device=self.actions.device)

    def forward(self, obs, last_obs, visible_last_action, seat, h):
        """obs and last_obs (time, matches, seats, obs_dim), visible_last_action (time, matches, seats, agents)
        -> inferred subgoal, hidden states, (mean, log-variance)

        At the start last_obs is 0. Who is out of sight has -1.
        """
        order = self.seat_order[seat].expand(*obs.shape[:-1], -1)  # (time, matches, seats, agents)
        actions = visible_last_action.gather(-1, order)
        actions = (actions.unsqueeze(-1) == self.actions).to(obs.dtype).flatten(-2)
        h = self.rnn(torch.cat((last_obs, actions), -1), h)
        x = F.relu(self.fc_obs(obs))
        mean, log_variance = gaussian(self.code(F.relu(self.fc1(torch.cat((x, h), -1)))))
        subgoal = sample(mean, log_variance) if self.args.inference == "cvae" and self.args.code == "sample" else mean
        return subgoal, h, (mean, log_variance)

    def unroll(self, obs, visible_last_action, seat):
        """The outputs of `forward` at all steps of episodes."""
        last_obs = torch.cat((torch.zeros_like(obs[:1]), obs[:-1]))
        return self(obs, last_obs, visible_last_action, seat, self.init_hidden(*seat.shape))

    def states(self, batch, obs):
        """What subgoals encode, (rows, matches, seats, features)."""
        if self.args.subgoal_input != "state":
            return obs if self.args.subgoal_input == "obs" else obs[..., self.about_others]
        return batch["state"].unsqueeze(2).expand(*obs.shape[:3], -1)

    def views(self, subgoal, obs):
        """(the view that a subgoal stands for, the present one); both are 0 where it stands for nothing."""
        views = [self.vae.decode(subgoal), self.states({}, obs)]
        if self.args.subgoal_input == "others":
            views = [torch.zeros_like(obs).index_copy(-1, self.about_others, view) for view in views]
        return views

    def errors(self, obs, subgoal, h, code, target, state):
        """(the error of what is decoded, the KL divergence of each dimension from the target's code)"""
        if self.args.inference == "mlp":
            return (code[0] - target[0]).square().mean(-1), torch.zeros_like(code[0])
        if self.args.predict == "future":
            return self.vae.error(subgoal, state).sum(-1), kl_divergence(*code, *target)
        reconstruction = self.out(F.relu(self.decoder(torch.cat((subgoal, h), -1))))
        original = F.relu(self.fc_obs(obs)).detach() if self.args.predict == "features" else obs
        return (reconstruction - original).square().mean(-1), kl_divergence(*code, *target)


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
    """Plays the learner's seats (matches, seats) epsilon-greedily, with either Q-network of a learner."""

    fields = FIELDS

    def __init__(self, learner, agents, seats):
        self.learner = learner
        self.agents = agents
        self.model = learner.target_model if agents is learner.target_agents else learner.model
        self.h = agents.init_hidden(*seats.shape)
        self.model_h = learner.model.init_hidden(*seats.shape)
        self.last_obs = torch.zeros(*seats.shape, learner.env.obs_dim, device=self.h.device)
        self.outputs = dict.fromkeys(("mean", "log_variance"), self.h.new_zeros(*seats.shape, learner.args.latent_dim))

    def reset(self, mask):
        for state in (self.h, self.model_h, self.last_obs):
            state.masked_fill_(mask.view(-1, 1, 1), 0.0)

    def act(self, inputs, epsilon):
        obs = inputs.obs.unsqueeze(0)
        last_obs, last_actions = self.last_obs.unsqueeze(0), inputs.visible_last_action.unsqueeze(0)
        subgoal, model_h, (mean, log_variance) = self.model(obs, last_obs, last_actions, inputs.seat, self.model_h)
        q, h = self.agents(obs, inputs.last_action.unsqueeze(0), self.h, inputs.seat, subgoal)
        self.subgoal = subgoal[0]
        self.outputs = {"mean": mean[0], "log_variance": log_variance[0]}
        self.h.copy_(h[0])
        self.model_h.copy_(model_h[0])
        self.last_obs.copy_(obs[0])
        return epsilon_greedy(q[0], inputs.avail, epsilon)

    def analyse(self, episodes):
        return analyse(self.learner, episodes)

    def goals(self, env, seat):
        """Where the learner in `seat` of the first match expects the others: the decoded subgoal."""
        if self.learner.args.subgoal_input == "state":
            return []
        return play.predicted_places(env, seat, *self.model.views(self.subgoal, self.last_obs))


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
        self.model = OpponentModel(args, env)
        self.target_model = copy.deepcopy(self.model).to(env.device).requires_grad_(False)
        self.parameters = list(self.agents.parameters())
        self.target_parameters = list(self.target_agents.parameters())
        self.model_parameters = list(self.model.parameters())
        self.target_model_parameters = list(self.target_model.parameters())
        groups = [{"params": self.parameters}, {"params": self.model_parameters, "lr": args.model_learning_rate}]
        # fused, so that an update that is not finite can be skipped without waiting for the device
        self.optimizer = torch.optim.Adam(groups, args.learning_rate, fused=True, capturable=args.cuda)
        self.metrics = Metrics(env.device)
        self.mix_probability = torch.tensor(float(args.q_subgoal == "selected"), device=env.device)
        self.mixing = args.mix == "q-input" and args.q_subgoal != "inferred"
        self.side_stream = SideStream(env.device)
        self.graphed_update = Graphed(self.update, env.device, args.cudagraphs)

    def networks(self):
        averages = {"target_agents": self.target_agents, "target_model": self.target_model}
        return {"agents": self.agents, "model": self.model, **averages}

    def learn(self, buffer, updates):
        for batch in buffer.sample(updates, self.args.batch_size):
            self.graphed_update(batch)
            self.updates += 1
            if self.args.target_interval and self.updates % self.args.target_interval == 0:
                with torch.no_grad():
                    torch._foreach_copy_(self.target_parameters, self.parameters)

    def set_mix_probability(self, probability):
        """The probability of the selected subgoal in updates; once it is 0, updates need one unroll less."""
        if self.args.q_subgoal == "mixed":
            self.mix_probability.fill_(probability)
            if self.mixing and probability == 0:
                self.mixing = False
                self.graphed_update.clear()

    # ALGO LOGIC: the opponent model
    @torch.no_grad()
    def select(self, batch, obs, last_action, h, subgoals, last_row):
        """(the row of the state selected as each step's subgoal (steps, matches, seats), how far ahead (0: the next))

        Candidates are the next `horizon` states; behind `last_row`, with which the learner's life ends, that row again.
        They are valued by single steps from the hidden state before each step; `h` is the one after it.
        """
        args, avail = self.args, batch["avail"][:-1]
        row = torch.arange(len(avail), device=obs.device).view(-1, 1, 1)
        if args.selector == "random":
            k = torch.randint(args.horizon, last_action.shape, device=obs.device)
        elif args.selector == "value":
            ahead = torch.arange(1, args.horizon + 1, device=obs.device).view(-1, 1, 1)
            candidates = torch.minimum(row.unsqueeze(1) + ahead, last_row.unsqueeze(1))  # (steps, horizon, ...)
            h = torch.cat((torch.zeros_like(h[:1]), h[:-1]))
            q = self.agents.compare(obs, last_action, h, batch["seat"][0], subgoals, candidates)
            value = torch.where(avail.unsqueeze(1), q, 0.0).sum(-1)  # ranks as the mean over available actions does
            k = value.argmax(1) if args.subgoal_mode == "optimistic" else value.argmin(1)
        else:
            k = torch.full_like(last_action, 0 if args.selector == "next" else int(args.selector) - 1)
        return torch.minimum(row + 1 + k, last_row), k

    def model_loss(self, batch, inputs, h, inferred, subgoals):
        """(what the Q-network and the target network read at all steps, the opponent model's loss, values to log)

        `h` is the Q-network's hidden state with the inferred subgoals; `inferred` are the outputs of model.unroll.
        """
        args = self.args
        obs, last_action, steps_left = inputs
        alive = batch["alive"] & (steps_left >= 0).unsqueeze(-1)
        last_row = last_alive_row(alive)[:-1]
        in_episode = (steps_left[:-1] > 0).unsqueeze(-1)
        mask = alive[:-1] & in_episode  # (steps, matches, seats)
        with torch.no_grad():
            states = torch.where(alive.unsqueeze(-1), self.model.states(batch, obs), 0.0)
            codes = self.model.vae.encode(states)  # mean, log-variance
            candidates = sample(*codes) if args.code == "sample" else codes[0]
            row, k = self.select(batch, obs[:-1], last_action[:-1], h[:-1], candidates, last_row)
            index = row.unsqueeze(-1)
            state, selected, *target = (values.take_along_dim(index, 0) for values in (states, candidates, *codes))
        use_selected = (torch.rand(index.shape, device=obs.device) < self.mix_probability) & in_episode.unsqueeze(-1)
        if self.mixing:
            subgoals = [torch.cat((torch.where(use_selected, selected, g[:-1]), g[-1:])) for g in subgoals]
        elif args.mix == "kl-target":  # the released code: otherwise the KL is from what was inferred while acting
            acted = batch["mean"][:-1], batch["log_variance"][:-1]
            target = [torch.where(use_selected | ~mask.unsqueeze(-1), *pair) for pair in zip(target, acted)]
        subgoal, model_h, code = inferred
        error, kl = self.model.errors(obs[:-1], subgoal[:-1], model_h[:-1], [c[:-1] for c in code], target, state)
        error = masked_mean(mask, error)
        kl = torch.where(mask.unsqueeze(-1), kl, 0.0).sum((0, 1, 2)) / mask.sum().clamp(min=1)
        logs = {"omg/recon": error, "omg/kl": kl.sum(), "omg/kl_per_dim": kl}
        loss = args.inference_weight * (error + args.kl_weight * kl.sum())
        if not args.paper:
            vae_error, vae_kl = (masked_mean(alive, values.sum(-1)) for values in self.model.vae.errors(states))
            logs["omg/vae_recon"] = vae_error
            loss = loss + vae_error + args.vae_kl_weight * vae_kl
        return subgoals, loss, logs | {"omg/loss": loss, "omg/selected_k": masked_mean(mask, k + 1.0)}

    # ALGO LOGIC: the loss
    def td_loss(self, batch, inputs, subgoals, q, h):
        """The Q-network's loss of a batch of episodes, time first, and a dictionary of values to log."""
        subgoal, target_subgoal = subgoals
        action, reward = batch["action"][:-1], batch["reward"][:-1]  # (steps, matches, seats)
        avail, alive, seat = batch["avail"], batch["alive"], batch["seat"][0]
        obs, last_action, steps_left = inputs
        q_taken = gather_q(q[:-1], action)  # (steps, matches, seats)
        with torch.no_grad():
            target_h = self.target_agents.init_hidden(*seat.shape)
            target_q, target_h = self.target_agents(obs, last_action, target_h, seat, target_subgoal)
            q, target_q = q[1:], target_q[1:]
            if self.args.bootstrap_subgoal == "same":  # the next step's values with this step's subgoal
                q = self.agents.step(obs[1:], action, h[:-1], seat, subgoal[:-1])
                target_q = self.target_agents.step(obs[1:], action, target_h[:-1], seat, target_subgoal[:-1])
            next_value = gather_q(target_q, greedy_action(q, avail[1:]))
            mask = (steps_left[:-1] > 0).unsqueeze(-1).expand_as(next_value)
            terminated = batch["terminated"][:-1].unsqueeze(-1)
            truncated = (steps_left[:-1] == 1).unsqueeze(-1)  # the last step, unless it is terminated
            if self.env.leaving_ends:  # an agent's own game ends when it leaves
                mask = mask & alive[:-1]
                terminated = terminated | ~alive[1:]
            reward = torch.where(mask, self.reward_scale * reward, 0.0)
            target = lambda_returns(reward, next_value, terminated, truncated, self.args.gamma, self.args.td_lambda)
        td_error = torch.where(mask, q_taken - target, 0.0)
        td_loss = td_error.square().sum() / mask.sum()
        q_values = torch.where(mask, q_taken, 0.0).sum() / mask.sum()
        return td_loss, {"losses/td_loss": td_loss, "losses/q_values": q_values}

    def update(self, batch):
        """One step of the optimiser. On the GPU the opponent model's part runs on a second stream, backwards too."""
        inputs = learner_inputs(self.env, batch)
        obs, last_action, _ = inputs
        seat, last_actions = batch["seat"][0], batch["visible_last_action"]
        h = self.agents.init_hidden(*seat.shape)
        with self.side_stream:
            inferred = self.model.unroll(obs, last_actions, seat)
            subgoals = [inferred[0] if self.args.q_gradient else inferred[0].detach()] * 2  # Q's, the target network's
            if not self.args.paper:
                subgoals[1], *_ = self.target_model.unroll(obs, last_actions, seat)
        self.side_stream.join()
        with torch.set_grad_enabled(not self.mixing):  # the TD loss uses this unroll if no subgoal is replaced
            q, next_h = self.agents(obs, last_action, h, seat, subgoals[0])
        with self.side_stream:
            subgoals, model_loss, model_logs = self.model_loss(batch, inputs, next_h.detach(), inferred, subgoals)
        if self.mixing:
            self.side_stream.join()
            q, next_h = self.agents(obs, last_action, h, seat, subgoals[0])
        td_loss, logs = self.td_loss(batch, inputs, subgoals, q, next_h)
        self.side_stream.join()
        loss, logs = td_loss + model_loss, logs | model_logs

        # both streams' backward passes need `obs` and `subgoals`: as local variables they are not freed in between
        self.optimizer.zero_grad()
        loss.backward()
        logs["losses/grad_norm"] = nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm)
        logs["omg/grad_norm"] = nn.utils.clip_grad_norm_(self.model_parameters, self.args.max_grad_norm)
        finite = self.metrics.add(logs)
        self.optimizer.found_inf = (~finite).float()  # the optimiser skips such a step
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.target_parameters, self.parameters, self.args.tau)
            copied = self.args.paper or self.args.target_interval  # the published one has no averaged model
            tau = 1.0 if copied else self.args.tau
            torch._foreach_lerp_(self.target_model_parameters, self.model_parameters, tau)


# ALGO LOGIC: pre-training
def vae_loss(args, vae, states):
    """(the loss, the mean error of a feature, the KL divergence)"""
    error, kl = vae.errors(states)
    recon, kl = error.mean(), kl.sum(-1).mean()
    weight = args.kl_weight if args.paper else args.vae_kl_weight / states.shape[-1]
    return recon + weight * kl, recon, kl


def cvae_loss(args, model, episodes, matches):
    """The CVAE's loss over some matches, with the next state as the subgoal."""
    episodes = {name: values[:, matches] for name, values in episodes.items()}
    obs = torch.where(episodes["mask"].unsqueeze(-1), episodes["obs"], 0.0)
    subgoal, h, code = model.unroll(obs, episodes["visible_last_action"], episodes["seat"][0])
    state = model.states(episodes, obs)[1:]
    code, target = [values[:-1] for values in code], model.vae.encode(state)
    error, kl = model.errors(obs[:-1], subgoal[:-1], h[:-1], code, target, state)
    return masked_mean(episodes["mask"][1:], error + args.kl_weight * kl.sum(-1))


class Pretraining:
    """Trains the VAE on the states of played episodes, then the CVAE to expect the next state."""

    def __init__(self, args, model, runner):
        self.args, self.model = args, model
        parameters = model.vae.parameters(), [p for n, p in model.named_parameters() if not n.startswith("vae.")]
        self.optimizers = [torch.optim.Adam(group, args.model_learning_rate, fused=True) for group in parameters]
        self.phases = Phases(runner, self.optimizers, args.cuda)

    def run(self, log, after_update=lambda: None):
        """Returns the held-out errors: {"recon": ..., "kl": ..., "inference": ..., "states": number of states}."""
        args, model, phases = self.args, self.model, self.phases
        *rounds, held_out = phases.play(args.pretrain_timesteps)
        states = torch.cat([model.states(episodes, episodes["obs"])[episodes["mask"]] for episodes in rounds])
        test_states = model.states(held_out, held_out["obs"])[held_out["mask"]][:8192]
        if not args.paper:  # features that are 0 or 1, and both of them
            model.vae.binary.copy_(((states == 0) | (states == 1)).all(0) & (states.amin(0) < states.amax(0)))
        reports = (lambda: self.errors(test_states, held_out), log, after_update)
        model.vae.requires_grad_(True)
        phases.train("VAE", args.pretrain_updates, lambda done: self.update_vae(states), *reports)
        model.vae.requires_grad_(False)
        if not args.paper:
            updates = args.pretrain_updates // 10
            phases.train("CVAE", updates, lambda done: self.update_cvae(rounds[done % len(rounds)]), *reports)
        return self.errors(test_states, held_out) | {"states": len(states)}

    @torch.no_grad()
    def errors(self, states, episodes):
        with preserved_rng(states.device):
            _, recon, kl = vae_loss(self.args, self.model.vae, states)
            inference = cvae_loss(self.args, self.model, episodes, slice(64))
        return {"recon": recon.item(), "kl": kl.item(), "inference": inference.item()}

    def update_vae(self, states):
        """Its learning rate rises at first and falls to 0: at a constant one it would take thrice the updates."""
        done = self.phases.progress["update"] / self.args.pretrain_updates
        self.optimizers[0].param_groups[0]["lr"] = 6 * self.args.model_learning_rate * min(10 * done + 0.01, 1 - done)
        batch = states[torch.randint(len(states), (1024 if self.args.cuda else 256,), device=states.device)]
        self.step(self.optimizers[0], vae_loss(self.args, self.model.vae, batch)[0])

    def update_cvae(self, episodes):
        matches = torch.randint(episodes["obs"].shape[1], (self.args.batch_size,), device=episodes["obs"].device)
        self.step(self.optimizers[1], cvae_loss(self.args, self.model, episodes, matches))

    def step(self, optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def requirements(args, env):
    """What pre-trained networks depend on."""
    choices = {name: getattr(args, name) for name in ("latent_dim", "subgoal_input", "predict")}
    return {"map": env.name.removeprefix("sc2/"), **checkpoints.env_sizes(env), **choices}


@torch.no_grad()
def analyse(learner, episodes):
    """What the inferred subgoals know, in recorded episodes: docs/omg_iql.md defines the metrics."""
    env, agents, model = learner.env, learner.target_agents, learner.target_model
    inputs = learner_inputs(learner.env, episodes)
    obs, last_action, steps_left = inputs
    seat = episodes["seat"][0]
    with preserved_rng(env.device):  # --code sample draws
        subgoal, _, code = model.unroll(obs, episodes["visible_last_action"], seat)
    metrics = code_metrics(episodes, steps_left, *code)
    if learner.args.subgoal_input != "state" and hasattr(env, "places"):
        metrics |= place_metrics(env, episodes, steps_left, *model.views(subgoal, obs), learner.args.selector)
    metrics |= usage(agents, episodes, inputs, subgoal)
    _, h = agents(obs, last_action, agents.init_hidden(*seat.shape), seat, subgoal)
    return metrics | probes(env, episodes, steps_left, {"": code[0], "_view": torch.cat((obs, h), -1)})


def load_player(run, env, seats):
    """The greedy policy of a run, playing `seats` (matches, seats) of matches like those of `env`."""
    args = checkpoints.load_args(Args, run)
    args.cuda = env.device.type == "cuda"
    learner = Learner(args, env)
    checkpoints.load_networks(run, env, learner.networks())
    return Player(learner, learner.target_agents, seats)


if __name__ == "__main__":
    args = parse_args(Args, __file__, paper=PAPER)
    check_args(args)
    device = set_up_torch(args)
    env, team, eval_env, eval_team = set_up(args, make_env, make_team, device)
    learner = Learner(args, env)
    state_field = ["state"] * (args.subgoal_input == "state")
    fields = [*FIELDS, "terminated", *state_field, *["mean", "log_variance"] * (args.mix == "kl-target")]
    player = Player(learner, learner.agents, team.learner_seats)
    eval_player = Player(learner, learner.target_agents, eval_team.learner_seats)
    runner = EpisodeRunner(env, team, player, fields, args.cudagraphs)
    eval_runner = EpisodeRunner(eval_env, eval_team, eval_player, FIELDS, args.cudagraphs)
    buffer = ReplayBuffer(args, runner.episodes, device)
    if args.vae and not args.resume:
        load_pretrained("--vae", args.vae, requirements(args, env), learner.model, "model")
    state = {"buffer": SavedBuffer(buffer, args.save_buffer), "runner": runner, "eval_runner": eval_runner}
    if not (args.init or args.vae):  # its own pre-training, on episodes in which others play everywhere
        plain_env = env.plain if args.oracle else env
        pretraining_team = make_team(args, plain_env, "pre-training", teammates_everywhere=True)
        watched = PartnerOracle(plain_env, pretraining_team) if args.oracle else env
        pretrain_fields = [*PRETRAIN_FIELDS, *state_field]
        pretrain_runner = EpisodeRunner(watched, pretraining_team, RandomPlayer(), pretrain_fields, args.cudagraphs)
        pretraining = Pretraining(args, learner.model, pretrain_runner)
        state["pretraining"] = pretraining.phases

    with Run(args, __file__, STARTED, env, learner, state, rows_before=2 * args.pretrain_updates) as run:
        if run.steps == 0 and not args.init:
            if not args.vae:
                pretraining.run(run.writer, after_update=run.save_or_stop)
            learner.target_model.load_state_dict(learner.model.state_dict())
        learner.model.vae.requires_grad_(not args.paper)  # the published one stays as it is
        while run.in_progress():
            # ALGO LOGIC: play a round of episodes, store them, learn from the buffer
            progress = min(run.steps / max(args.exploration_fraction * args.total_timesteps, 1), 1)
            epsilon = args.start_e + (args.end_e - args.start_e) * progress
            mix_progress = min(run.steps / max(args.mix_fraction * args.total_timesteps, 1), 1)
            learner.set_mix_probability(args.mix_start * (1 - mix_progress))
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
                results = eval_runner.evaluate(args.eval_episodes)
                run.log_evaluation(*results, omg=analyse(learner, eval_runner.selection(slice(64))))
            if run.save_due():
                run.save()
        results = eval_runner.evaluate(args.final_eval_episodes)
        run.finish(*results, omg=analyse(learner, eval_runner.selection()))

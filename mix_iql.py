"""MIX on Q-learning: four embeddings of the others, each for a prediction of its own, and a gate that mixes them.

A recurrent encoder reads what the learner sees and does. Four experts embed it, to predict the others' actions, what
they see, the joint state of the next step, and the learner's own return. A gate in the Q-network mixes each feature of
the embeddings into one input; the Q-network's loss trains all of it. Everything else is independent Q-learning, as in
iql.py. The others have fixed policies, drawn anew for every match (after "Generalized Intention Modeling", arXiv
2605.31318, which uses PPO).
A match is one of the games that are played side by side; a seat is an agent's place in it.

    python mix_iql.py --env-id 3m --n-agents 8 --cuda        docs/opponent_models.md has the logged keys and the results
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
    team: str = "scripted"  # scripted (one learner, scripted partners), self (all learn), or such as 7qmix1mix
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
    dueling: bool = False  # whether Q is a value plus advantages, from two heads
    model_learning_rate: float = 1e-3  # Adam's learning rate of the opponent model
    latent_dim: int = 20  # size of an embedding
    steps_ahead: int = 1  # how far ahead the joint state is that one expert predicts
    temperature: float = 0.2  # of the contrastive loss of returns
    gate: Literal["feature", "expert"] = "feature"  # whether each feature of the experts has a weight, or each expert
    q_gradient: bool = True  # whether Q's loss trains the inference model, too, through what Q reads


if __name__ == "__main__":
    answer_help(Args)  # before the slow imports

import torch
import torch.nn as nn
import torch.nn.functional as F

from training import checkpoints, setup
from training.args import buffer_size, check_ranges, fill_in_sizes, parse_args, resolve_device
from training.buffers import SavedBuffer, allocate, padded_length
from training.episodes import EpisodeRunner, gather
from training.exits import UsageError
from training.graphs import Graphed, SideStream
from training.gru import SharedGRU
from training.log import Metrics
from training.metrics import accuracy, gather_q, masked_mean, usage
from training.opponents import learner_inputs, others, others_obs
from training.run import Run, seed_for, set_up_torch
from training.setup import make_env, set_up
from training.team import check_team_options, seat_order

EXPERTS = ("action", "observation", "state", "return")  # what they predict
# recorded for learning and `analyse`
FIELDS = ("obs", "avail", "alive", "action", "reward", "all_action", "all_alive", "all_obs", "state")


def check_args(args):
    """Rejects invalid values, and fills in the defaults that depend on the device and the team."""
    check_ranges(
        args,
        positive="num_envs total_timesteps buffer_size batch_size hidden_dim reward_scale learning_rate "
        "max_grad_norm latent_dim model_learning_rate steps_ahead temperature",
        fractions="gamma td_lambda tau teammate_epsilon start_e end_e exploration_fraction",
        non_negative="train_frequency target_interval",
    )
    check_team_options(args)
    resolve_device(args)
    fill_in_sizes(args)
    args.freeze()


def make_team(args, env, purpose):
    if env.n_agents == 1:
        raise UsageError("--n-agents is at least 2: there is no other agent to model")
    return setup.make_team(args, env, purpose, learners=("mix", "learner"))


# ALGO LOGIC: networks
class QNetwork(nn.Module):
    """The Q-network: a gate for the embeddings; Linear, GRU, Linear on observation, last action, seat and their mix."""

    def __init__(self, args, env):
        super().__init__()
        inputs = env.obs_dim + env.n_actions + env.n_agents + args.latent_dim
        self.hidden_dim = args.hidden_dim
        self.recurrence = args.recurrence
        size, weights = args.latent_dim, args.latent_dim if args.gate == "feature" else 1
        self.project = nn.ModuleList(nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size)) for _ in EXPERTS)
        self.gate = nn.Linear(len(EXPERTS) * size, len(EXPERTS) * weights)
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

    def mix(self, embeddings):
        """(..., experts * latent_dim) -> (their mix (..., latent_dim), its weights (..., experts, latent_dim or 1))"""
        parts = embeddings.chunk(len(EXPERTS), -1)
        projected = torch.stack([project(part) for project, part in zip(self.project, parts)], -2)
        weight = self.gate(projected.flatten(-2)).unflatten(-1, (len(EXPERTS), -1)).softmax(-2)
        return (weight * projected).sum(-2), weight

    def q_values(self, h):
        q = self.fc2(h)
        return q if self.value is None else self.value(h) + q - q.mean(-1, keepdim=True)

    def forward(self, obs, last_action, h, seat, inferred):
        """obs (time, matches, seats, obs_dim), last_action (time, matches, seats) with -1 for none,
        h (matches, seats, hidden), seat (matches, seats), inferred (time, matches, seats, features)
        -> Q-values and hidden states of all times
        """
        x = F.relu(self.fc1(torch.cat((*self.inputs(obs, last_action, seat), self.mix(inferred)[0]), -1)))
        if self.recurrence:
            h = self.rnn(x, h)  # (time, matches, seats, hidden)
        else:
            h = self.rnn(x.flatten(0, 1).unsqueeze(0), self.init_hidden(*x.flatten(0, 1).shape[:2])).view_as(x)
        return self.q_values(h), h  # (time, matches, seats, actions)


# ALGO LOGIC: the opponent model's network
class OpponentModel(nn.Module):
    """Embeds the learner's own past: a GRU, two linear layers, the second with the four experts; what trains them."""

    def __init__(self, args, env, hidden_dim=128):
        super().__init__()
        self.hidden_dim = hidden_dim
        self.rnn = SharedGRU(env.obs_dim + env.n_actions, hidden_dim)
        self.fc1 = nn.Linear(hidden_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, len(EXPERTS) * args.latent_dim)
        self.obs_decoder = self.mlp(args.latent_dim, (env.n_agents - 1) * env.obs_dim)
        self.action_decoder = self.mlp(args.latent_dim, (env.n_agents - 1) * env.n_actions)
        self.state_decoder = self.mlp(args.latent_dim, env.state_dim)
        self.return_encoder = self.mlp(1, args.latent_dim)
        self.register_buffer("seat_order", seat_order(env), persistent=False)
        self.register_buffer("actions", torch.arange(env.n_actions), persistent=False)
        self.to(env.device)

    def mlp(self, inputs, outputs):
        return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))

    def init_hidden(self, matches, seats):
        return torch.zeros(matches, seats, self.hidden_dim, device=self.actions.device)

    def forward(self, obs, last_action, h):
        """obs (time, matches, seats, obs_dim), last_action (time, matches, seats) -> embeddings, hidden states"""
        last_action = (last_action.unsqueeze(-1) == self.actions).to(obs.dtype)
        h = self.rnn(torch.cat((obs, last_action), -1), h)
        return self.fc2(F.relu(self.fc1(h))), h


def info_nce(embedding, target, mask, temperature):
    """The loss of picking one's own target, by angle, among those of all matches at the same step.

    embedding and target (..., matches, features), mask (..., matches)
    """
    embedding, target = F.normalize(embedding, dim=-1), F.normalize(target, dim=-1)
    logits = embedding @ target.transpose(-1, -2) / temperature  # (..., matches, targets)
    logits = torch.where(mask.unsqueeze(-2), logits, -1e9)
    own = torch.diagonal(logits, dim1=-2, dim2=-1)
    return masked_mean(mask, torch.logsumexp(logits, -1) - own)


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
        self.h = agents.init_hidden(*seats.shape)
        self.model_h = learner.model.init_hidden(*seats.shape)

    def reset(self, mask):
        for state in (self.h, self.model_h):
            state.masked_fill_(mask.view(-1, 1, 1), 0.0)

    def act(self, inputs, epsilon):
        obs = inputs.obs.unsqueeze(0)
        last_action = inputs.last_action.unsqueeze(0)
        inferred, model_h = self.learner.model(obs, last_action, self.model_h)
        q, h = self.agents(obs, last_action, self.h, inputs.seat, inferred)
        self.h.copy_(h[0])
        self.model_h.copy_(model_h[0])
        return epsilon_greedy(q[0], inputs.avail, epsilon)

    def analyse(self, episodes):
        return analyse(self.learner, episodes)


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
        self.parameters = list(self.agents.parameters())
        self.target_parameters = list(self.target_agents.parameters())
        self.model_parameters = list(self.model.parameters())
        groups = [{"params": self.parameters}, {"params": self.model_parameters, "lr": args.model_learning_rate}]
        # fused, so that an update that is not finite can be skipped without waiting for the device
        self.optimizer = torch.optim.Adam(groups, args.learning_rate, fused=True, capturable=args.cuda)
        self.metrics = Metrics(env.device)
        self.side_stream = SideStream(env.device)
        self.graphed_update = Graphed(self.update, env.device, args.cudagraphs)

    def networks(self):
        return {"agents": self.agents, "target_agents": self.target_agents, "model": self.model}

    def learn(self, buffer, updates):
        for batch in buffer.sample(updates, self.args.batch_size):
            self.graphed_update(batch)
            self.updates += 1
            if self.args.target_interval and self.updates % self.args.target_interval == 0:
                with torch.no_grad():
                    torch._foreach_copy_(self.target_parameters, self.parameters)

    # ALGO LOGIC: the opponent model
    def model_loss(self, batch, obs, last_action, steps_left):
        """(the Q-network's additional input at all steps, the opponent model's loss, its metrics)"""
        inferred, _ = self.model(obs, last_action, self.model.init_hidden(*batch["seat"].shape[1:]))
        self.side_stream.join()  # the Q-network needs no more
        action_code, obs_code, state_code, return_code = inferred[:-1].chunk(len(EXPERTS), -1)
        seat, action, mask = others(batch, self.model.seat_order, steps_left)
        logits = self.model.action_decoder(action_code).unflatten(-1, (-1, len(self.model.actions)))
        action_loss = masked_mean(mask, -gather_q(F.log_softmax(logits, -1), action))
        other_obs = others_obs(batch, seat, mask)  # (steps, matches, seats, others, obs_dim)
        predicted_obs = self.model.obs_decoder(obs_code).view_as(other_obs)
        obs_error = masked_mean(mask, (predicted_obs - other_obs).square().mean(-1))
        own = batch["alive"][:-1] & (steps_left[:-1] > 0).unsqueeze(-1)  # (steps, matches, seats)
        steps = torch.arange(len(action), device=action.device).unsqueeze(1)
        ahead = torch.minimum(steps + self.args.steps_ahead, batch["lengths"])  # at most the state at the end
        state = batch["state"].gather(0, ahead.unsqueeze(-1).expand(-1, -1, batch["state"].shape[-1])).unsqueeze(2)
        state_error = masked_mean(own, (self.model.state_decoder(state_code) - state).square().mean(-1))
        # contrastive: among the matches of the batch, at the same step and seat
        returns = self.model.return_encoder(self.returns(batch, steps_left).unsqueeze(-1))
        by_match = (values.transpose(1, 2) for values in (return_code, returns, own))  # (steps, seats, matches, ...)
        return_loss = info_nce(*by_match, self.args.temperature)
        loss = action_loss + obs_error + state_error + return_loss
        metrics = {
            "action_accuracy": accuracy(mask, logits, action), "obs_error": obs_error,
            "state_error": state_error, "return_loss": return_loss,
        }  # fmt: skip
        return inferred if self.args.q_gradient else inferred.detach(), loss, metrics

    def returns(self, batch, steps_left):
        """(steps, matches, seats) discounted returns from each step to the end of the episode."""
        mask = (steps_left[:-1] > 0).unsqueeze(-1) & (batch["alive"][:-1] | (not self.env.leaving_ends))
        reward = torch.where(mask, self.reward_scale * batch["reward"][:-1], 0.0)
        end = (steps_left[:-1] == 1).unsqueeze(-1)
        return lambda_returns(reward, torch.zeros_like(reward), end, end, self.args.gamma, 1.0)

    # ALGO LOGIC: the loss
    def loss(self, batch):
        """The loss of a batch of episodes, time first, and a dictionary of values to log."""
        action, reward = batch["action"][:-1], batch["reward"][:-1]  # (steps, matches, seats)
        avail, alive, seat = batch["avail"], batch["alive"], batch["seat"][0]
        obs, last_action, steps_left = learner_inputs(self.env, batch)
        with self.side_stream:  # beside what follows, in the backward pass too
            inferred, model_loss, _ = self.model_loss(batch, obs, last_action, steps_left)
        h = self.agents.init_hidden(*seat.shape)
        q, _ = self.agents(obs, last_action, h, seat, inferred)  # (steps + 1, matches, seats, actions)
        q_taken = gather_q(q[:-1], action)  # (steps, matches, seats)
        with torch.no_grad():
            target_q, _ = self.target_agents(obs, last_action, h, seat, inferred)
            next_value = gather_q(target_q, greedy_action(q, avail))[1:]
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
        self.side_stream.join(obs, last_action, steps_left, inferred)
        logs = {"losses/td_loss": td_loss, "losses/q_values": q_values, "om/loss": model_loss}
        return td_loss + model_loss, logs

    def update(self, batch):
        loss, logs = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        logs["losses/grad_norm"] = nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm)
        logs["om/grad_norm"] = nn.utils.clip_grad_norm_(self.model_parameters, self.args.max_grad_norm)
        finite = self.metrics.add(logs)
        self.optimizer.found_inf = (~finite).float()  # the optimiser skips such a step
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.target_parameters, self.parameters, self.args.tau)


@torch.no_grad()
def analyse(learner, episodes):
    """How right the model is in recorded episodes, and how much Q depends on it: docs/opponent_models.md."""
    inputs = learner_inputs(learner.env, episodes)
    inferred, _, metrics = learner.model_loss(episodes, *inputs)
    metrics = {name: value.item() for name, value in metrics.items()}
    weight = learner.target_agents.mix(inferred)[1].mean(-1)  # (rows, matches, seats, experts)
    mask = episodes["alive"] & (inputs[-1] > 0).unsqueeze(-1)
    metrics |= {f"gate_{name}": masked_mean(mask, part).item() for name, part in zip(EXPERTS, weight.unbind(-1))}
    return metrics | usage(learner.target_agents, episodes, inputs, inferred)


def load_player(run, env, seats):
    """The greedy policy of a run, playing `seats` (matches, seats) of matches like those of `env`."""
    args = checkpoints.load_args(Args, run)
    args.cuda = env.device.type == "cuda"
    learner = Learner(args, env)
    checkpoints.load_networks(run, env, learner.networks())
    return Player(learner, learner.target_agents, seats)


if __name__ == "__main__":
    args = parse_args(Args, __file__)
    check_args(args)
    device = set_up_torch(args)
    env, team, eval_env, eval_team = set_up(args, make_env, make_team, device)
    learner = Learner(args, env)
    player = Player(learner, learner.agents, team.learner_seats)
    eval_player = Player(learner, learner.target_agents, eval_team.learner_seats)
    runner = EpisodeRunner(env, team, player, (*FIELDS, "terminated"), args.cudagraphs)
    eval_runner = EpisodeRunner(eval_env, eval_team, eval_player, FIELDS, args.cudagraphs)
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
                results = eval_runner.evaluate(args.eval_episodes)
                run.log_evaluation(*results, om=analyse(learner, eval_runner.selection(slice(64))))
            if run.save_due():
                run.save()
        results = eval_runner.evaluate(args.final_eval_episodes)
        run.finish(*results, om=analyse(learner, eval_runner.selection(slice(64))))  # pairs of matches: more take long

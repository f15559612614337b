"""Multi-agent PPO with recurrent agents: every seat learns a policy, and a critic that sees the whole match.

Thousands of matches are played for a few steps at a time and go on where they stopped. Updates use the clipped loss,
generalised advantage estimation, normalised values and masks for dead agents (Yu et al. 2022).
A match is one of the games that are played side by side; a seat is an agent's place in it.

    python mappo.py --env-id 3m --cuda              docs/ppo.md has the logged keys, the deviations and the results
"""

import time
from dataclasses import dataclass
from pathlib import Path

from training.options import RunArgs, TeamArgs, answer_help

STARTED = time.time()  # before the slow imports


@dataclass
class Args(TeamArgs, RunArgs):
    exp_name: str = Path(__file__).stem  # the name of this experiment

    env_id: str = "3m"  # the environment: see envs.list_ids()
    team: str = "self"  # self (all seats learn), scripted (one learner, scripted partners), or such as 7qmix1learner
    persist_hidden: bool = False  # whether the hidden state outlasts a match, while the partners stay: one long episode
    oracle: bool = False  # whether observations tell the policies of the other agents, to measure headroom
    num_envs: int | None = None  # matches at a time (default: 2048 on the GPU, 64 or with a team 512 on the CPU)
    total_timesteps: int | None = None  # default: 20 million on the GPU, 1 million or with a team 2 on the CPU

    learning_rate: float = 3e-3  # Adam's learning rate
    anneal_lr: bool = True  # whether it falls to 0 over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the advantages
    bootstrap_truncated: bool = True  # whether the value of what was cut off by the time limit counts
    num_steps: int = 32  # steps of each match between two rounds of learning
    update_epochs: int | None = None  # passes over these steps (default: 2, CPU 4)
    num_minibatches: int | None = None  # parts of a pass, by matches, one for each update (default: 8, CPU 4)
    clip_coef: float = 0.2  # how far the ratio of new to old probabilities may move from 1
    clip_vloss: bool = True  # whether values move by at most clip_coef as well, in normalised units
    ent_coef: float = 0.01  # weight of the entropy
    max_grad_norm: float = 10.0  # the norm to which gradients are clipped, those of policy and critic by themselves
    hidden_dim: int = 64  # units of the recurrent layers
    recurrence: bool = True  # whether agents have a memory, or (--no-recurrence) see the present only
    value_norm: bool = True  # whether the critic learns values normalised by the mean and deviation of the returns
    policy_alive_mask: bool = True  # whether only living agents count in policy loss, entropy, advantage statistics
    value_alive_mask: bool = False  # whether only living agents count in the value loss
    death_mask: bool = True  # whether a dead agent's critic sees zeros, its last action and its seat only


if __name__ == "__main__":
    answer_help(Args)  # before the slow imports

import torch
import torch.nn as nn
import torch.nn.functional as F

import envs
from training import checkpoints, setup
from training.args import check_ranges, fill_in, parse_args, resolve_device
from training.buffers import SavedTensors
from training.episodes import EpisodeRunner
from training.exits import UsageError
from training.graphs import Graphed, store
from training.gru import RestartingGRU
from training.log import Metrics
from training.metrics import gather_q, log_softmax, masked_mean
from training.rollouts import Minibatches, RolloutRunner
from training.run import Run, set_up_torch
from training.setup import make_team, set_up
from training.team import check_team_options

VALUE_NORM_DECAY = 0.99  # of the statistics of returns, by rollout
CRITIC_INPUT = "agent_state"  # what the critic sees, besides last action and seat: everything, from its own view
FIELDS = (  # recorded for learning, besides reward, seat and h
    "obs", "avail", "alive", "action", "log_prob", "terminated", "truncated", "last_action", "next_alive",
    CRITIC_INPUT, f"next_{CRITIC_INPUT}",
)  # fmt: skip


def check_args(args):
    """Rejects invalid values, and fills in the defaults that depend on the device and the team."""
    check_ranges(
        args,
        positive="num_envs total_timesteps hidden_dim learning_rate max_grad_norm num_steps update_epochs "
        "num_minibatches clip_coef",
        fractions="gamma teammate_epsilon gae_lambda",
        non_negative="ent_coef",
        largest={"num_steps": 2**13, "update_epochs": 2**13},  # a run is stopped after them, not before
    )
    check_team_options(args)
    resolve_device(args)
    if not envs.is_simulated(args.env_id):
        raise UsageError(f"--env-id {args.env_id}: this script plays simulated matches only")
    sizes = {"num_envs": 2048, "total_timesteps": 20_000_000, "update_epochs": 2, "num_minibatches": 8}
    if not args.cuda:
        sizes = {"num_envs": 64, "total_timesteps": 1_000_000, "update_epochs": 4, "num_minibatches": 4}
        if args.team != "self":
            sizes |= {"num_envs": 512, "total_timesteps": 2_000_000}
    fill_in(args, sizes)
    fill_in(args, {"eval_interval": max(args.total_timesteps // 50, 1)})
    if args.num_envs % args.num_minibatches:
        raise UsageError(f"--num-minibatches divides --num-envs {args.num_envs}, not {args.num_minibatches}")
    args.freeze()


def make_env(args, num_envs, device, purpose):
    agent_state = CRITIC_INPUT == "agent_state" and purpose == "training"  # nobody else needs it
    return setup.make_env(args, num_envs, device, purpose, agent_state=agent_state)


# ALGO LOGIC: networks
class RecurrentNetwork(nn.Module):
    """Linear, GRU, Linear on an input, own last action and seat: the policy, or the critic."""

    def __init__(self, args, env, inputs, outputs, gain):
        super().__init__()
        hidden = self.hidden_dim = args.hidden_dim
        self.recurrence = args.recurrence
        self.fc1 = nn.Linear(inputs + env.n_actions + env.n_agents, hidden)
        self.rnn = RestartingGRU(hidden, hidden)
        self.fc2 = nn.Linear(hidden, outputs)
        for weights, scale in ((self.fc1.weight, 2**0.5), (self.rnn.weight_hh_l0, 1.0), (self.fc2.weight, gain)):
            nn.init.orthogonal_(weights, scale)
        nn.init.orthogonal_(self.rnn.weight_ih_l0)
        for name, bias in self.named_parameters():
            if "bias" in name:
                nn.init.zeros_(bias)
        self.rnn.close_gates()  # after the orthogonal weights
        self.register_buffer("seat_one_hot", torch.eye(env.n_agents), persistent=False)
        self.register_buffer("actions", torch.arange(env.n_actions), persistent=False)
        self.to(env.device)

    def init_hidden(self, matches, seats):
        return torch.zeros(matches, seats, self.hidden_dim, device=self.actions.device)

    def forward(self, x, last_action, h, seat):
        """x (time, matches, seats, inputs), last_action (time, matches, seats) with -1 where a match begins,
        h (matches, seats, hidden), seat (matches, seats) -> outputs and hidden states of all times
        """
        last_action = last_action.unsqueeze(-1)
        seat = self.seat_one_hot[seat].expand(*x.shape[:2], -1, -1)
        start = (last_action < 0) if self.recurrence else torch.ones_like(last_action)
        x = F.relu(self.fc1(torch.cat((x, (last_action == self.actions).to(x.dtype), seat), -1)))
        h = self.rnn(x, h, start)  # (time, matches, seats, hidden)
        return self.fc2(h), h


class Critic(RecurrentNetwork):
    """The value of a seat, normalised by running statistics of the returns."""

    def __init__(self, args, env):
        super().__init__(args, env, getattr(env, f"{CRITIC_INPUT}_dim"), 1, 1.0)
        self.register_buffer("moments", torch.zeros(3, device=env.device))  # 1, return, its square: means

    def statistics(self):
        """Mean and standard deviation of returns; 0 and 1 before there are any."""
        weight, mean, square = self.moments.unbind()
        mean, square = mean / weight.clamp(min=1e-9), square / weight.clamp(min=1e-9)
        return mean, torch.where(weight > 0, (square - mean.square()).clamp(min=1e-4).sqrt(), 1.0)

    def update_statistics(self, returns, mask):
        entries = (torch.ones_like(returns), returns, returns.square())  # each counts the same, in any rollout
        batch = torch.stack([torch.where(mask, x, 0.0).mean() for x in entries])
        self.moments.lerp_(batch, 1 - VALUE_NORM_DECAY)


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
    """Plays the learner's seats (matches, seats): takes the most probable action or, to explore, draws one."""

    def __init__(self, agents, seats, explore=False):
        self.agents = agents
        self.explore = explore
        self.h = agents.init_hidden(*seats.shape)
        self.outputs = {"log_prob": torch.zeros_like(self.h[..., 0])} if explore else {}

    def reset(self, mask):
        self.h.masked_fill_(mask.view(-1, 1, 1), 0.0)

    def act(self, inputs, epsilon):
        logits, h = self.agents(inputs.obs.unsqueeze(0), inputs.last_action.unsqueeze(0), self.h, inputs.seat)
        self.h.copy_(h[0])
        log_probs = log_softmax(logits[0], inputs.avail)
        if not self.explore:
            return log_probs.argmax(-1)
        noise = torch.rand_like(log_probs).clamp(min=1e-20)  # a 0 would rule out the only available action
        action = (log_probs - torch.log(-torch.log(noise))).argmax(-1)
        self.outputs["log_prob"].copy_(gather_q(log_probs, action))
        return action


class Learner:
    """The networks, the optimiser and the update."""

    def __init__(self, args, env, seats):
        self.args, self.env = args, env
        self.updates = 0
        self.agents = RecurrentNetwork(args, env, env.obs_dim, env.n_actions, 0.01)
        self.critic = Critic(args, env)
        self.parameters = [*self.agents.parameters(), *self.critic.parameters()]
        self.learning_rate = torch.tensor(args.learning_rate, device=env.device)  # captured updates read it
        # fused, so that an update that is not finite can be skipped without waiting for the device
        self.optimizer = torch.optim.Adam(
            self.parameters, self.learning_rate, eps=1e-5, fused=True, capturable=args.cuda
        )
        self.critic_h = self.critic.init_hidden(args.num_envs, seats)  # before the first step of the next rollout
        self.estimates = {}
        self.minibatches = Minibatches(args.num_minibatches)
        self.metrics = Metrics(env.device)
        self.graphed_estimate = Graphed(self.estimate, env.device, args.cudagraphs)
        self.graphed_update = Graphed(self.update, env.device, args.cudagraphs)

    def networks(self):
        return {"agents": self.agents, "critic": self.critic}

    def learn(self, rollout, progress):
        """Learns from a rollout after that share of the run."""
        self.graphed_estimate(rollout)
        self.learning_rate.fill_(self.args.learning_rate * (1 - progress * self.args.anneal_lr))
        self.optimizer.param_groups[0]["lr"] = self.learning_rate
        data = {name: values for name, values in rollout.items() if not name.startswith("next_")} | self.estimates
        for _ in range(self.args.update_epochs):
            for batch in self.minibatches.split(data):
                self.graphed_update(batch)
                self.updates += 1

    def critic_input(self, rollout, prefix=""):
        x, alive = rollout[prefix + CRITIC_INPUT], rollout[f"{prefix}alive"]
        return x * alive.unsqueeze(-1) if self.args.death_mask else x

    # ALGO LOGIC: advantages and value targets
    @torch.no_grad()
    def estimate(self, rollout):
        """Fills `estimates` for a rollout, time first."""
        seat, last_h = rollout["seat"][0], self.critic_h.clone()
        output, h = self.critic(self.critic_input(rollout), rollout["last_action"], last_h, seat)
        # after a step that ends a match the next row is of another one: next values have inputs of their own
        next_input, action = self.critic_input(rollout, "next_").flatten(0, 1), rollout["action"].flatten(0, 1)
        next_seat = seat.repeat(len(h), 1)
        next_output, _ = self.critic(next_input.unsqueeze(0), action.unsqueeze(0), h.flatten(0, 1), next_seat)
        mean, std = self.critic.statistics()
        value = output.squeeze(-1) * std + mean  # (steps, matches, seats)
        next_value = next_output.view_as(output).squeeze(-1) * std + mean
        alive = rollout["alive"]
        mask = alive if self.env.leaving_ends else torch.ones_like(alive)
        terminated, truncated = rollout["terminated"].unsqueeze(-1), rollout["truncated"].unsqueeze(-1).clone()
        if not self.args.bootstrap_truncated:
            terminated = terminated | truncated
        truncated[-1] = True  # here the rollout ends: the next value stands for all that follows
        if self.env.leaving_ends:  # an agent's own game ends when it leaves
            terminated = terminated | ~rollout["next_alive"]
        reward = torch.where(mask, rollout["reward"], 0.0)
        target = lambda_returns(reward, next_value, terminated, truncated, self.args.gamma, self.args.gae_lambda)
        policy_mask = mask & alive if self.args.policy_alive_mask else mask
        value_mask = mask & alive if self.args.value_alive_mask else mask
        advantage = target - value
        advantage = advantage - masked_mean(policy_mask, advantage)
        advantage = advantage / (masked_mean(policy_mask, advantage.square()).sqrt() + 1e-5)
        estimates = {"advantage": advantage, "value": output.squeeze(-1), "target": target}
        masks = {"policy_mask": policy_mask, "value_mask": value_mask}
        store(self.estimates, estimates | masks | {"critic_h": last_h.unsqueeze(0)})
        self.critic_h.copy_(h[-1])
        if self.args.value_norm:
            self.critic.update_statistics(target, value_mask)

    # ALGO LOGIC: the loss
    def loss(self, batch):
        """The loss of a batch of rollouts, time first, and a dictionary of values to log."""
        last_action, seat = batch["last_action"], batch["seat"][0]
        logits, _ = self.agents(batch["obs"], last_action, batch["h"][0], seat)
        log_probs = log_softmax(logits, batch["avail"])  # (steps, matches, seats, actions)
        mask, advantage, clip = batch["policy_mask"], batch["advantage"], self.args.clip_coef
        log_ratio = torch.where(mask, gather_q(log_probs, batch["action"]) - batch["log_prob"], 0.0)
        ratio = log_ratio.exp()
        gain = torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - clip, 1 + clip))
        policy_loss = -masked_mean(mask, gain)
        entropy = masked_mean(mask, -(log_probs.exp() * log_probs).sum(-1))

        mean, std = self.critic.statistics()
        target = (batch["target"] - mean) / std
        value = self.critic(self.critic_input(batch), last_action, batch["critic_h"][0], seat)[0].squeeze(-1)
        value_loss = F.huber_loss(value, target, reduction="none", delta=10.0)
        if self.args.clip_vloss:
            clipped = batch["value"] + (value - batch["value"]).clamp(-clip, clip)
            value_loss = torch.maximum(value_loss, F.huber_loss(clipped, target, reduction="none", delta=10.0))
        value_loss = masked_mean(batch["value_mask"], value_loss)
        logs = {"losses/policy_loss": policy_loss, "losses/value_loss": value_loss, "losses/entropy": entropy}
        logs["losses/approx_kl"] = masked_mean(mask, ratio - 1 - log_ratio)
        logs["losses/clip_fraction"] = masked_mean(mask, ((ratio - 1).abs() > clip).float())
        return policy_loss - self.args.ent_coef * entropy + value_loss, logs

    def update(self, batch):
        loss, logs = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        for name, network in self.networks().items():
            norm = nn.utils.clip_grad_norm_(network.parameters(), self.args.max_grad_norm)
            logs[f"losses/grad_norm_{name}"] = norm
        finite = self.metrics.add(logs)
        self.optimizer.found_inf = (~finite).float()  # the optimiser skips such a step
        self.optimizer.step()


def load_player(run, env, seats):
    """The greedy policy of a run, playing `seats` (matches, seats) of matches like those of `env`."""
    args = checkpoints.load_args(Args, run)
    agents = RecurrentNetwork(args, env, env.obs_dim, env.n_actions, 0.01)
    checkpoints.load_networks(run, env, {"agents": agents})
    return Player(agents, seats)


if __name__ == "__main__":
    args = parse_args(Args, __file__)
    check_args(args)
    device = set_up_torch(args)
    env, team, eval_env, eval_team = set_up(args, make_env, make_team, device)
    learner = Learner(args, env, team.learner_seats.shape[1])
    player = Player(learner.agents, team.learner_seats, explore=True)
    runner = RolloutRunner(env, team, player, FIELDS, args.num_steps, args.cudagraphs)
    eval_player = Player(learner.agents, eval_team.learner_seats)
    eval_runner = EpisodeRunner(eval_env, eval_team, eval_player, cudagraphs=args.cudagraphs)
    state = {"learner": SavedTensors(critic_h=learner.critic_h), "runner": runner, "eval_runner": eval_runner}

    with Run(args, __file__, STARTED, env, learner, state) as run:
        while run.in_progress():
            # ALGO LOGIC: play a few steps of every match, learn from them
            learner.learn(runner.next_rollout(), run.steps / args.total_timesteps)

            steps, episodes = runner.counts.tolist()
            run.count(steps, episodes)
            if run.log_due():
                run.log(learner.metrics.pop())
                if episodes:  # any that ended in this rollout
                    run.log_episodes(runner.results)
            if run.evaluation_due():
                run.log_evaluation(*eval_runner.evaluate(args.eval_episodes))
            if run.save_due():
                run.save()
        run.finish(*eval_runner.evaluate(args.final_eval_episodes))

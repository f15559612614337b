"""COMA with recurrent agents: a policy for every seat, judged by what its action added to the team's value.

Whole episodes of many matches are played with the policy, and learned from once. A critic that sees the state and
everybody's actions learns lambda-returns; the advantage of an action is its value less the mean over the seat's
policy, given the other seats' actions (Foerster et al. 2018, after PyMARL's COMA).
A match is one of the games that are played side by side; a seat is an agent's place in it.

    python coma.py --env-id 3m --cuda               docs/coma.md has the logged keys, the deviations and the results
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
    num_envs: int | None = None  # matches of a round (default: 256 on the GPU, 32 on the CPU, 8 in sc2/; PyMARL: 8)
    total_timesteps: int | None = None  # default: 20 million on the GPU, 1 million or with a team 2 on the CPU

    learning_rate: float = 5e-4  # Adam's learning rate for the policy
    critic_learning_rate: float = 1e-3  # Adam's learning rate for the critic
    gamma: float = 0.99  # discount factor
    reward_scale: float | None = None  # factor of the rewards in targets (default: 5 / env.return_scale)
    td_lambda: float = 0.8  # lambda of the returns; 0 is one-step learning
    tau: float = 0.005  # how far the target critic moves with each of the critic's steps
    start_e: float = 0.5  # epsilon, which is part of the policy, at the start
    end_e: float = 0.01  # epsilon at the end
    exploration_fraction: float = 0.1  # the fraction of the run over which epsilon falls
    mask_before_softmax: bool = True  # whether epsilon is spread over available actions, or (PyMARL) over all
    max_grad_norm: float = 10.0  # the norm to which gradients are clipped, those of policy and critic by themselves
    hidden_dim: int = 64  # units of the recurrent layer
    critic_dim: int = 128  # units of the critic's two hidden layers
    recurrence: bool = True  # whether agents have a memory, or (--no-recurrence) see the present only
    share_parameters: bool = True  # one network for all seats, or (--no-share-parameters) one for each


if __name__ == "__main__":
    answer_help(Args)  # before the slow imports

import torch
import torch.nn as nn
import torch.nn.functional as F

import envs
from training import checkpoints
from training.args import check_ranges, fill_in, parse_args, resolve_device
from training.buffers import padded_length
from training.episodes import CHUNK, EpisodeRunner, round_up
from training.exits import UsageError
from training.graphs import Graphed
from training.gru import SeatGRU, SeatLinear, SharedGRU
from training.log import Metrics
from training.metrics import gather_q, masked_mean
from training.run import Run, set_up_torch
from training.setup import make_env, make_team, set_up
from training.team import check_common_goal, check_team_options

# recorded for learning, besides reward and seat
FIELDS = ("obs", "state", "avail", "alive", "action", "terminated", "all_action", "all_alive")
PYMARL = {  # with --preset pymarl
    "num_envs": 8, "mask_before_softmax": False, "learning_rate": 5e-4, "critic_learning_rate": 5e-4,
    "reward_scale": 1.0, "total_timesteps": 2_050_000, "exploration_fraction": 100_000 / 2_050_000,
    "eval_interval": 10_000, "eval_episodes": 32,
}  # fmt: skip


def check_args(args):
    """Rejects invalid values, and fills in the defaults that depend on the device and the team."""
    check_ranges(
        args,
        positive="num_envs total_timesteps hidden_dim reward_scale learning_rate max_grad_norm critic_dim "
        "critic_learning_rate",
        fractions="gamma td_lambda tau teammate_epsilon start_e end_e exploration_fraction",
    )
    if args.team != "self" and not args.share_parameters:
        raise UsageError("--no-share-parameters is for --team self: a learner whose seat changes has one network")
    check_team_options(args)
    resolve_device(args)
    sizes = {"num_envs": 32, "total_timesteps": 1_000_000 if args.team == "self" else 2_000_000}
    if args.cuda:
        sizes = {"num_envs": 256, "total_timesteps": 20_000_000}
    if not envs.is_simulated(args.env_id):
        sizes["num_envs"] = 8
    fill_in(args, sizes)
    fill_in(args, {"eval_interval": max(args.total_timesteps // 50, 1)})
    args.freeze()


# ALGO LOGIC: networks
class Policy(nn.Module):
    """The policy network: Linear, GRU, Linear on observation, own last action and seat."""

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
        h (matches, seats, hidden), seat (matches, seats) -> logits and hidden states of all times
        """
        last_action = (last_action.unsqueeze(-1) == self.actions).to(obs.dtype)
        seat = self.seat_one_hot[seat].expand(*obs.shape[:2], -1, -1)
        x = F.relu(self.fc1(torch.cat((obs, last_action, seat), -1)))
        if self.recurrence:
            h = self.rnn(x, h)  # (time, matches, seats, hidden)
        else:
            h = self.rnn(x.flatten(0, 1).unsqueeze(0), self.init_hidden(*x.flatten(0, 1).shape[:2])).view_as(x)
        return self.fc2(h), h  # (time, matches, seats, actions)


class Critic(nn.Module):
    """The team's value for every action of a seat, given the state, the seat's view and what the others do.

    It is an MLP on the state, the seat's observation, the actions of the others, all last actions and the seat. Its
    first layer is computed in parts, so that what all seats have in common is computed once.
    """

    def __init__(self, args, env):
        super().__init__()
        actions = env.n_agents * env.n_actions
        self.sizes = (env.state_dim, env.obs_dim, actions, actions, env.n_agents)
        self.fc1 = nn.Linear(sum(self.sizes), args.critic_dim)
        self.fc2 = nn.Linear(args.critic_dim, args.critic_dim)
        self.fc3 = nn.Linear(args.critic_dim, env.n_actions)
        self.register_buffer("seat_one_hot", torch.eye(env.n_agents), persistent=False)
        self.register_buffer("actions", torch.arange(env.n_actions), persistent=False)
        self.to(env.device)

    def forward(self, state, obs, action, last_action, seat):
        """state (time, matches, state_dim), obs (time, matches, seats, obs_dim), everybody's action and last_action
        (time, matches, n_agents) with -1 for none, seat (matches, seats) -> (time, matches, seats, actions)
        """
        w_state, w_obs, w_action, w_last_action, w_seat = self.fc1.weight.split(self.sizes, 1)
        seat = self.seat_one_hot[seat]  # (matches, seats, n_agents)
        one_hot, last_one_hot = ((x.unsqueeze(-1) == self.actions).to(obs.dtype) for x in (action, last_action))
        shared = F.linear(state, w_state) + F.linear(last_one_hot.flatten(2), w_last_action)
        w_action = w_action.unflatten(1, (len(self.seat_one_hot), -1))  # (critic_dim, n_agents, actions)
        of_agents = torch.einsum("tmna,dna->tmnd", one_hot, w_action)
        of_others = (1 - seat) @ of_agents  # (time, matches, seats, critic_dim)
        x = F.linear(obs, w_obs, self.fc1.bias) + F.linear(seat, w_seat) + of_others + shared.unsqueeze(2)
        return self.fc3(F.relu(self.fc2(F.relu(x))))


def greedy_action(q, avail):
    return q.masked_fill(~avail, -1e9).argmax(-1)


def draw(log_probs):
    """Actions (...) with these log-probabilities (..., actions)."""
    noise = torch.rand_like(log_probs).clamp(min=1e-20)  # a 0 would rule out the only available action
    return (log_probs - torch.log(-torch.log(noise))).argmax(-1)


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
    """Plays the learner's seats (matches, seats): takes the most probable action or, with a policy, draws from it."""

    def __init__(self, agents, seats, policy=None):
        self.agents = agents
        self.policy = policy
        self.h = agents.init_hidden(*seats.shape)

    def reset(self, mask):
        self.h.masked_fill_(mask.view(-1, 1, 1), 0.0)

    def act(self, inputs, epsilon):
        logits, h = self.agents(inputs.obs.unsqueeze(0), inputs.last_action.unsqueeze(0), self.h, inputs.seat)
        self.h.copy_(h[0])
        if self.policy is None:
            return greedy_action(logits[0], inputs.avail)
        return draw(self.policy(logits[0], inputs.avail, epsilon))


class Learner:
    """The networks, the optimiser and the updates."""

    def __init__(self, args, env, seats):
        self.args, self.env = args, env
        self.reward_scale = args.reward_scale or 5 / env.return_scale
        self.updates = 0
        self.agents = Policy(args, env)
        self.critic = Critic(args, env)
        self.target_critic = copy.deepcopy(self.critic)
        critic = {"params": [*self.critic.parameters()], "lr": args.critic_learning_rate}
        groups = [{"params": [*self.agents.parameters()]}, critic]
        # fused, so that an update that is not finite can be skipped without waiting for the device
        self.optimizer = torch.optim.Adam(groups, args.learning_rate, eps=1e-5, fused=True, capturable=args.cuda)
        rows, matches = round_up(env.episode_limit, CHUNK) + 1, args.num_envs
        self.epsilon = torch.zeros((), device=env.device)  # that of the round
        self.lengths = torch.zeros(matches, dtype=torch.long, device=env.device)
        self.target = torch.zeros((rows, matches, seats), device=env.device)
        self.q = torch.zeros((rows, matches, seats, env.n_actions), device=env.device)
        # everybody's actions: those of row t are joint_action[t + 1], before the first there are none
        self.joint_action = torch.full((rows + 1, matches, env.n_agents), -1, device=env.device)
        self.time = torch.zeros(1, dtype=torch.long, device=env.device)  # the step that the critic learns from
        self.critic_sums = torch.zeros(4, device=env.device)  # number of steps, loss, value, gradient norm: sums
        self.metrics = Metrics(env.device)
        self.graphed_estimate = Graphed(self.estimate, env.device, args.cudagraphs)
        self.graphed_critic_step = Graphed(self.critic_step, env.device, args.cudagraphs)
        self.graphed_update = Graphed(self.update, env.device, args.cudagraphs)

    def networks(self):
        return {"agents": self.agents, "critic": self.critic, "target_critic": self.target_critic}

    def policy(self, logits, avail, epsilon):
        """(..., actions) log-probabilities of a softmax that is mixed with a uniform distribution by epsilon."""
        actions = torch.full_like(avail[..., :1], avail.shape[-1], dtype=logits.dtype)
        if self.args.mask_before_softmax:
            logits, actions = logits.masked_fill(~avail, -1e9), avail.sum(-1, keepdim=True).clamp(min=1)
        log_probs = torch.logaddexp(F.log_softmax(logits, -1) + torch.log1p(-epsilon), torch.log(epsilon / actions))
        return F.log_softmax(log_probs.masked_fill(~avail, -1e9), -1)

    # ALGO LOGIC: the critic learns backwards in time, one step at a time, then the policy from all steps at once
    def learn(self, episodes, epsilon):
        """Learns from a round of episodes, time first, that were played with that epsilon."""
        data = episodes.data
        self.epsilon.fill_(epsilon)
        # of a match that is not valid nothing is learned
        self.lengths.copy_(torch.where(episodes.valid, episodes.lengths, -1))
        longest = int(self.lengths.max())
        rows = padded_length(longest, len(data["reward"]) - 1, self.args.cuda) + 1
        batch = {name: values[:rows] for name, values in data.items()} | {"lengths": self.lengths}
        self.graphed_estimate(batch)
        self.critic_sums.zero_()
        for t in reversed(range(longest)):
            self.time.fill_(t)
            self.graphed_critic_step(data)
        self.graphed_update(batch)
        self.updates += 1

    def log_probs(self, batch, steps_left):
        """(rows, matches, seats, actions) of the policy that has played."""
        obs = torch.where(steps_left[..., None, None] >= 0, batch["obs"], 0.0)  # behind an end there is old data
        last_action = torch.cat((torch.full_like(batch["action"][:1], -1), batch["action"][:-1]))
        seat = batch["seat"][0]
        logits, _ = self.agents(obs, last_action, self.agents.init_hidden(*seat.shape), seat)
        return self.policy(logits, batch["avail"], self.epsilon)

    @torch.no_grad()
    def estimate(self, batch):
        """Fills `joint_action` and `target` for a batch of episodes, time first."""
        rows, seat = len(batch["obs"]), batch["seat"]
        steps_left = batch["lengths"] - torch.arange(rows, device=seat.device).unsqueeze(1)  # (rows, matches)
        # where an episode ends nobody acts any more: there actions are drawn, and others repeat their last ones
        drawn = draw(self.log_probs(batch, steps_left))
        action = batch["all_action"]
        final_action = torch.cat((action[:1], action[:-1])).scatter(2, seat.expand_as(drawn), drawn)
        action = torch.where((steps_left == 0).unsqueeze(-1), final_action, action)
        action = torch.where(batch["all_alive"], action, 0)
        self.joint_action[1 : rows + 1] = action

        inside = (steps_left >= 0).unsqueeze(-1)
        state, obs = torch.where(inside, batch["state"], 0.0), self.visible(batch["obs"], batch["alive"] & inside)
        q = self.target_critic(state, obs, action, self.joint_action[:rows], seat[0])
        next_value = gather_q(q, action.gather(2, seat.expand_as(drawn)))[1:]  # (steps, matches, seats)
        reward = batch["reward"][:-1]
        reward = reward[..., :1] if self.env.team_reward else reward.sum(-1, keepdim=True)
        mask = (steps_left[:-1] > 0).unsqueeze(-1).expand_as(next_value)
        terminated = batch["terminated"][:-1].unsqueeze(-1)
        truncated = (steps_left[:-1] == 1).unsqueeze(-1)  # the last step, unless it is terminated
        reward = torch.where(mask, self.reward_scale * reward, 0.0)
        target = lambda_returns(reward, next_value, terminated, truncated, self.args.gamma, self.args.td_lambda)
        self.target[: rows - 1] = target

    @staticmethod
    def visible(obs, alive):
        return torch.where(alive.unsqueeze(-1), obs, 0.0)  # of who is dead or has left, the critic sees nothing

    # ALGO LOGIC: the losses
    def critic_loss(self, batch):
        """(loss of the step `time` of all matches, its values (1, matches, seats, actions), their mean where taken)"""
        state, obs, alive = (batch[name].index_select(0, self.time) for name in ("state", "obs", "alive"))
        last_action, action = (self.joint_action.index_select(0, self.time + k) for k in (0, 1))
        mask = (self.lengths > self.time).view(1, -1, 1)
        state, obs = torch.where(mask, state, 0.0), self.visible(obs, alive & mask)
        q = self.critic(state, obs, action, last_action, batch["seat"][0])
        q_taken = gather_q(q, action.gather(2, batch["seat"]))
        mask = mask.expand_as(q_taken)
        error = q_taken - self.target.index_select(0, self.time)
        return masked_mean(mask, error.square()), q, masked_mean(mask, q_taken)

    def critic_step(self, batch):
        loss, q, value = self.critic_loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.critic.parameters(), self.args.max_grad_norm)
        self.q.index_copy_(0, self.time, q.detach())
        sums = torch.stack((torch.ones_like(norm), loss, value, norm)).detach()
        self.critic_sums += sums
        self.optimizer.found_inf = (~sums.isfinite().all()).float()  # the optimiser skips such a step
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_([*self.target_critic.parameters()], [*self.critic.parameters()], self.args.tau)

    def loss(self, batch):
        """The policy's loss on a batch of episodes, time first, and a dictionary of values to log."""
        rows = len(batch["obs"])
        steps_left = batch["lengths"] - torch.arange(rows, device=self.lengths.device).unsqueeze(1)  # (rows, matches)
        mask = (steps_left > 0).unsqueeze(-1) & batch["alive"]
        log_probs, q = self.log_probs(batch, steps_left), self.q[:rows]
        advantage = gather_q(q, batch["action"]) - (log_probs.detach().exp() * q).sum(-1)
        policy_loss = -masked_mean(mask, advantage * gather_q(log_probs, batch["action"]))
        entropy = masked_mean(mask, -(log_probs.detach().exp() * log_probs.detach()).sum(-1))
        logs = {"losses/policy_loss": policy_loss, "losses/entropy": entropy}
        return policy_loss, logs | {"losses/advantage": masked_mean(mask, advantage.abs())}

    def update(self, batch):
        loss, logs = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        logs["losses/grad_norm_agents"] = nn.utils.clip_grad_norm_(self.agents.parameters(), self.args.max_grad_norm)
        means = self.critic_sums[1:] / self.critic_sums[0]
        logs |= zip(("losses/td_loss", "losses/q_values", "losses/grad_norm_critic"), means)
        finite = self.metrics.add(logs)
        self.optimizer.found_inf = (~finite).float()  # the optimiser skips such a step
        self.optimizer.step()


def load_player(run, env, seats):
    """The greedy policy of a run, playing `seats` (matches, seats) of matches like those of `env`."""
    args = checkpoints.load_args(Args, run)
    agents = Policy(args, env)
    checkpoints.load_networks(run, env, {"agents": agents})
    return Player(agents, seats)


if __name__ == "__main__":
    args = parse_args(Args, __file__, preset=PYMARL)
    check_args(args)
    device = set_up_torch(args)
    env, team, eval_env, eval_team = set_up(args, make_env, make_team, device)
    check_common_goal(args, env, team)
    learner = Learner(args, env, team.learner_seats.shape[1])
    player = Player(learner.agents, team.learner_seats, learner.policy)
    runner = EpisodeRunner(env, team, player, FIELDS, args.cudagraphs)
    eval_player = Player(learner.agents, eval_team.learner_seats)
    eval_runner = EpisodeRunner(eval_env, eval_team, eval_player, cudagraphs=args.cudagraphs)
    state = {"runner": runner, "eval_runner": eval_runner}

    with Run(args, __file__, STARTED, env, learner, state) as run:
        while run.in_progress():
            # ALGO LOGIC: play a round of episodes, learn from them
            progress = min(run.steps / max(args.exploration_fraction * args.total_timesteps, 1), 1)
            epsilon = args.start_e + (args.end_e - args.start_e) * progress
            episodes = runner.play(epsilon)
            steps, number = episodes.count()
            if number:
                learner.learn(episodes, epsilon)

            run.count(steps, number)
            if run.log_due() and number:
                run.log(learner.metrics.pop())
                run.log_episodes(episodes, epsilon)
            if run.evaluation_due():
                run.log_evaluation(*eval_runner.evaluate(args.eval_episodes))
            if run.save_due():
                run.save()
        run.finish(*eval_runner.evaluate(args.final_eval_episodes))

"""HOP (Huang et al., ICML 2024): plan with a belief over the others' goals.

For every other agent there is a belief over the environment's list of goals, and "none", updated by Bayes' rule within
a match, and between matches with the same partners by a moving average of the goals reached. A network predicts the
others' actions given their goals. At every decision several trees are searched over one's own actions in copies of the
match, each with goals of the others drawn from the belief; the policy is a softmax of the mean Q of the trees. A second
network, priors and values of the search, learns from its results.
A match is one of the games that are played side by side; a seat is an agent's place in it.

    python hop.py --env-id stag_hunt_4x4 --cuda     docs/hop.md has the logged keys, the deviations and the results
"""

import copy
import time
from dataclasses import dataclass
from pathlib import Path

from training.options import RunArgs, TeamArgs, answer_help

STARTED = time.time()  # before the slow imports


@dataclass
class Args(TeamArgs, RunArgs):
    exp_name: str = Path(__file__).stem  # the name of this experiment

    env_id: str = "stag_hunt_4x4"  # the environment: one with a list of goals, or any with --no-goals
    team: str = "self"  # self (all seats learn), scripted (one learner, scripted partners), or such as 3NS1learner
    num_envs: int | None = None  # matches at a time (default: 256 on the GPU, 32 on the CPU)
    total_timesteps: int | None = None  # default: 400,000 on the GPU, 20,000 on the CPU
    eval_interval: int | None = None  # steps between greedy evaluations (default: total / 5)
    eval_episodes: int = 64  # episodes of an evaluation
    final_eval_episodes: int = 128  # episodes of the last evaluation

    sims: int | None = None  # simulations of a tree (default: 200 on the GPU, 50 on the CPU); 0: the network's policy
    trees: int = 5  # trees of a decision, each with goals of the others drawn from the belief
    train_sims: int | None = None  # simulations of a tree in training matches (default: a quarter of sims)
    rollout_steps: int = 8  # steps of a rollout from a new node before the network's value; 0 in training matches
    depth: int = 12  # levels of a tree at most
    c_puct: float | None = None  # weight of the prior in the search (default: 1, snowdrift 15)
    node_value: bool = True  # whether Q of an action starts at the value of its node, or (--no-node-value) at 0
    q_temperature: float | None = None  # factor of Q in the softmax that is the policy (default: 10, snowdrift 2)
    goals: bool = True  # whether the others' actions depend on goals, or (--no-goals) not: direct-OM
    intra_belief: bool = True  # whether beliefs follow the others' actions within a match
    inter_belief: bool = True  # whether earlier matches with the same partners count for the prior belief of the next
    commit: float = 0.5  # share of training matches in which some learners pursue one goal, or none, and nothing else
    belief_decay: float = 0.8  # weight of the prior belief, not of the goal reached, in the next match's prior belief
    half: bool = True  # whether the networks search in bfloat16 on the GPU
    planners: int | None = None  # decisions searched at a time at most (default: 1024 on the GPU, 128 on the CPU)
    learning_rate: float = 5e-4  # Adam's learning rate
    gamma: float = 0.95  # discount factor
    batch_size: int | None = None  # decisions in an update (default: 1024 on the GPU, 256 on the CPU)
    update_epochs: int = 15  # passes over the decisions of a round
    symmetries: bool = True  # whether updates see the grids of observations turned and mirrored at random
    value_coef: float = 20.0  # weight of the values' squared error, in units of env.return_scale
    max_grad_norm: float = 10.0  # the norm to which gradients are clipped
    channels: tuple[int, ...] = (16, 32, 32)  # of the convolutions
    hidden_dim: int | None = None  # units of the layer behind them (default: 512 on the GPU, 128 on the CPU)


if __name__ == "__main__":
    answer_help(Args)  # before the slow imports

import torch
import torch.nn as nn
import torch.nn.functional as F

import envs
from training import checkpoints, setup
from training.args import check_ranges, fill_in, parse_args, resolve_device
from training.episodes import EpisodeRunner, round_up
from training.exits import UsageError
from training.graphs import Graphed
from training.log import Metrics
from training.metrics import log_softmax, masked_mean
from training.run import Run, set_up_torch
from training.setup import set_up
from training.team import check_unused

# recorded for learning and `analyse`, besides reward and seat
FIELDS = ("all_obs", "all_avail", "all_alive", "all_action", "search_policy", "belief", "own_goal")
SURPRISE = 0.02  # share of random actions that Bayes' rule allows for: no action rules out a goal
LEAST_PRIOR = 1e-6  # of a goal at the start of a match: nor do matches
VISIT_EXPONENT = 1.5  # with a single tree the policy is visits to this power


def check_args(args):
    """Rejects invalid values, and fills in the defaults that depend on the device and the environment."""
    check_ranges(
        args,
        positive="num_envs total_timesteps batch_size hidden_dim learning_rate max_grad_norm trees depth "
        "planners update_epochs channels gamma",
        fractions="gamma teammate_epsilon belief_decay commit",
        non_negative="sims train_sims rollout_steps c_puct q_temperature value_coef",
        largest=dict.fromkeys(("sims", "train_sims", "rollout_steps", "trees", "depth", "update_epochs"), 2**13),
    )
    check_unused(args, matches_per_partner=False)  # beliefs last for an encounter, of learners too
    resolve_device(args)
    if not envs.is_simulated(args.env_id):
        raise UsageError(f"--env-id {args.env_id}: this script looks ahead in copies of simulated matches")
    names = ("num_envs", "total_timesteps", "sims", "planners", "batch_size", "hidden_dim")
    values = (256, 400_000, 200, 1024, 1024, 512) if args.cuda else (32, 20_000, 50, 128, 256, 128)
    fill_in(args, dict(zip(names, values)))
    c_puct, q_temperature = (15.0, 2.0) if args.env_id.startswith("snowdrift") else (1.0, 10.0)
    fill_in(args, {"c_puct": c_puct, "q_temperature": q_temperature, "train_sims": -(-args.sims // 4)})
    fill_in(args, {"eval_interval": max(args.total_timesteps // 5, 1)})
    args.freeze()


def make_env(args, num_envs, device, purpose):
    env = setup.make_env(args, num_envs, device, purpose)
    if args.goals and not env.goals:
        raise UsageError(f"--env-id {args.env_id} has no list of goals: --no-goals plans without them")
    return env


def make_team(args, env, purpose):
    if env.n_agents == 1:
        raise UsageError("--n-agents is at least 2: there is no other agent to model")
    return setup.make_team(args, env, purpose, learners=("hop", "learner"))


# ALGO LOGIC: networks
class Network(nn.Module):
    """Convolutions over the grid of an observation, then a layer that also has the time and, if there are, the goal."""

    def __init__(self, args, env, outputs, goals=0):
        super().__init__()
        layers, inputs = [], env.obs_dim
        self.grid = env.grid
        if env.grid is not None:
            rows, columns, planes = env.grid
            inputs = round_up(planes, 8)  # what tensor cores like
            for channels in args.channels:
                layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU()]
                inputs = channels
            inputs *= rows * columns
        self.trunk = nn.Sequential(*layers[:-1])  # as in HOP, no ReLU behind the last convolution
        self.fc = nn.Linear(inputs, args.hidden_dim)
        self.time = nn.Linear(1, args.hidden_dim, bias=False)
        self.goal = nn.Linear(goals, args.hidden_dim, bias=False) if goals else None
        self.head = nn.Linear(args.hidden_dim, outputs)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        with torch.no_grad():
            self.head.weight *= 0.1  # policies start almost uniform, values almost zero
        self.to(env.device, memory_format=torch.channels_last)

    def forward(self, obs, time, goal=None):
        """obs (rows, obs_dim), time (rows,), goal (rows,) -> (rows, outputs); for every goal (rows, goals, outputs)"""
        x = obs.to(self.fc.weight.dtype)
        if self.grid is not None:
            x = x[:, : self.grid[0] * self.grid[1] * self.grid[2]].unflatten(1, self.grid)
            x = F.pad(x, (0, round_up(self.grid[2], 8) - self.grid[2])).permute(0, 3, 1, 2)  # channels last in memory
            x = self.trunk(x).permute(0, 2, 3, 1).flatten(1)
        x = self.fc(x) + self.time(time.to(x.dtype).unsqueeze(1))
        if goal is None:
            x = x.unsqueeze(1) + (0 if self.goal is None else self.goal.weight.T)
        elif self.goal is not None:
            x = x + self.goal(one_hot(goal, self.goal.in_features).to(x.dtype))
        return self.head(F.relu(x)).float()


def one_hot(index, size):
    return index.unsqueeze(-1) == torch.arange(size, device=index.device)


def gumbel(like):
    """Noise that makes an argmax of log-probabilities a sample."""
    return -torch.log(-torch.log(torch.rand_like(like).clamp(1e-20, 1 - 1e-7)))


def counted_reward(env, reward, reached, own_goal):
    """What learners maximise: their reward or, if they pursue a goal, 0.5 return_scale for it and -0.5 for another."""
    paid = torch.where(reached == own_goal, 0.5, -0.5) * (reached >= 0) * env.return_scale
    return torch.where(own_goal >= 0, paid, reward)


# ALGO LOGIC: the search
class Search:
    """Trees for so many decisions at a time. In a tree the others' goals are fixed, and so are their actions in every
    node: a tree is one scenario. Arrays are (nodes, trees of all decisions, actions); in each simulation every tree
    gets one node, number `count`, in the same kernels. The last node is a place for what is to be forgotten.
    """

    def __init__(self, args, env, agents, model, planners, sims, rollout_steps=0, own_goals=False):
        self.args, self.agents, self.model = args, agents, model
        self.trees, self.sims, self.rollout_steps, self.own_goals = args.trees, sims, rollout_steps, own_goals
        count, nodes, device = planners * args.trees, sims + 2, env.device
        self.env = env.make_copy(count)  # where simulations take place
        self.states = {name: x.new_zeros((nodes, *x.shape)) for name, x in self.env.match_state().items()}
        self.flat_states = {name: values.flatten(0, 1) for name, values in self.states.items()}

        def zeros(*shape, dtype=torch.float32):
            return torch.zeros(shape, dtype=dtype, device=device)

        shape = (nodes, count)
        self.total, self.visits, self.prior = (zeros(*shape, env.n_actions) for _ in range(3))  # prior -1: unavailable
        self.child = zeros(*shape, env.n_actions, dtype=torch.long)  # 0: there is none yet
        self.best, self.next, self.level = (zeros(*shape, dtype=torch.long) for _ in range(3))
        self.value, self.earned = zeros(*shape), zeros(*shape)  # of the node; discounted, from the root to the node
        self.over = zeros(*shape, dtype=torch.bool)
        self.others_log_probs = zeros(*shape, env.n_agents - 1, env.n_actions)
        self.count = zeros(1, 1, dtype=torch.long)
        self.seat, self.others = zeros(count, 1, dtype=torch.long), zeros(count, env.n_agents - 1, dtype=torch.long)
        self.goal, self.own_goal = torch.zeros_like(self.others), torch.full_like(self.seat, -1)
        self.tree = torch.arange(count, device=device)
        self.first_row = self.tree.unsqueeze(1) * env.n_agents  # the row of agent 0 of a tree among the agents of all
        self.levels = torch.arange(args.depth + 1, device=device).unsqueeze(1)
        self.graphed_simulate = Graphed(self.simulate, device, args.cudagraphs)

    def plan(self, env, match, seat, own_goal, log_belief):
        """Searches from matches (planners,) of `env` for their seats (planners,), with goals of their own (planners,),
        -1 for none, and beliefs (planners, agents, goals); returns the policy and, where an action is available, its Q
        (planners, actions).
        """
        roots = match, seat, own_goal, log_belief
        match, seat, own_goal, log_belief = (x.repeat_interleave(self.trees, 0) for x in roots)
        self.seat.copy_(seat.unsqueeze(1))
        self.own_goal.copy_(own_goal.unsqueeze(1))
        agents = torch.arange(1, env.n_agents, device=seat.device)
        self.others.copy_((self.seat + agents) % env.n_agents)
        log_belief = log_belief.gather(1, self.others.unsqueeze(-1).expand(-1, -1, log_belief.shape[-1]))
        self.goal.copy_((log_belief + gumbel(log_belief)).argmax(-1))
        self.env.set_state(env.match_state(), match)
        for array in (self.total, self.visits, self.child, self.best, self.next, self.count):
            array.zero_()
        start = (torch.zeros_like(array[:1]) for array in (self.level, self.earned, self.over))
        prior = self.add_node(*start)
        self.best[0] = prior.argmax(-1)
        self.count += 1
        for _ in range(self.sims):
            self.graphed_simulate()
        return self.result()

    def result(self):
        total, visits, prior = (x[0].unflatten(0, (-1, self.trees)) for x in (self.total, self.visits, self.prior))
        unavailable = prior[:, 0] < 0
        value = self.value[0].view(-1, self.trees, 1) * self.args.node_value
        q = ((total + value) / (1 + visits)).mean(1).masked_fill(unavailable, -torch.inf)
        if self.sims == 0:
            policy = prior.clamp(min=0).mean(1)
        elif self.trees == 1:
            policy = visits[:, 0].pow(VISIT_EXPONENT)
        else:
            policy = F.softmax(self.args.q_temperature * q, -1)
        return policy / policy.sum(-1, keepdim=True), q

    def predict(self, network, seats, goal):
        """For `seats` (trees, seats) in the copies as they are now: a network's output, the log-probabilities of
        actions, and which are available, each (trees * seats, ...).
        """
        env, rows = self.env, (self.first_row + seats).flatten()
        avail, time = env.info["avail"].flatten(0, 1)[rows], (env.steps / env.match_limit).unsqueeze(1)
        output = network(env.obs.flatten(0, 1)[rows], time.expand_as(seats).flatten(), goal.flatten())
        return output, log_softmax(output[:, : env.n_actions], avail), avail

    def add_node(self, level, earned, over):
        """Writes the matches as they are now to node `count` of all trees; the arguments are (1, trees)."""
        output, log_prior, avail = self.predict(self.agents, self.seat, self.own_goal)
        prior = log_prior.exp().masked_fill(~avail, -1.0)
        _, log_probs, _ = self.predict(self.model, self.others, self.goal)
        for name, new in self.env.match_state().items():
            self.put(self.states[name], new)
        value = self.rollout(output, log_prior, log_probs, ~over)
        arrays = self.prior, self.value, self.others_log_probs, self.level, self.earned, self.over
        for array, new in zip(arrays, (prior, value, log_probs, level, earned, over)):
            self.put(array, new)
        return prior

    def rollout(self, output, log_prior, log_probs, running):
        """Values (1, trees) by some steps in which all act as the networks say, and the network's value after them."""
        earned = torch.zeros_like(running, dtype=log_prior.dtype)
        for step in range(self.rollout_steps):
            if step:
                _, log_probs, _ = self.predict(self.model, self.others, self.goal)
            reward, over = self.step((log_prior + gumbel(log_prior)).argmax(-1, keepdim=True), log_probs)
            earned += torch.where(running, self.args.gamma**step * reward, 0.0)
            running = running & ~over
            output, log_prior, _ = self.predict(self.agents, self.seat, self.own_goal)
        value = output[:, -1] * self.env.return_scale
        return earned + torch.where(running, self.args.gamma**self.rollout_steps * value, 0.0)

    def step(self, action, log_probs):
        """A step with one's actions (trees, 1) and others drawn; the reward, and whether it is over, (1, trees)."""
        env = self.env
        env.actions.scatter_(1, self.seat, action)
        env.actions.scatter_(1, self.others, (log_probs + gumbel(log_probs)).argmax(-1).view_as(self.others))
        _, reward, terminated, truncated, info = env.step(env.actions)
        ended, left, reward = terminated | truncated, ~info["alive"].gather(1, self.seat), reward.gather(1, self.seat)
        if env.goals and self.own_goals:
            reached = env.goal_reached(action, left, ended.unsqueeze(1))
            reward = counted_reward(env, reward, reached, self.own_goal)
        return reward.T, left.T | ended

    def put(self, array, values):
        """array[count] = values"""
        values = values.reshape(1, -1)
        array.view(len(array), -1).scatter_(0, self.count.expand_as(values), values)

    def simulate(self):
        """One simulation of every tree: descend, step, add a node, back up."""
        args, env, steps = self.args, self.env, self.levels
        path = [torch.zeros_like(self.next[:1])]
        for _ in range(args.depth):
            child = self.next.gather(0, path[-1])
            path.append(torch.where(child > 0, child, path[-1]))
        leaf, path = path[-1], torch.cat(path)
        action, level, earned = self.best.gather(0, leaf), self.level.gather(0, leaf), self.earned.gather(0, leaf)
        expands = ~self.over.gather(0, leaf) & (level < args.depth)
        # step
        row = (leaf * len(self.tree) + self.tree).flatten()
        env.set_state(self.flat_states, row, look=False, same_chance=True)  # in a tree chance, too, is one scenario
        reward, over = self.step(action.T, self.others_log_probs.flatten(0, 1)[row])
        earned = earned + args.gamma**level * reward
        self.add_node(level + 1, earned, over)
        # back up: what each edge on the path was followed by
        end = torch.where(expands, self.count, leaf)
        last, value, earned = self.level.gather(0, end), self.value.gather(0, end), self.earned.gather(0, end)
        follows = (earned - self.earned.gather(0, path)) / args.gamma**steps + args.gamma ** (last - steps) * value
        node = torch.where(steps <= level, path, self.sims + 1)
        node = torch.cat((node, self.count.expand_as(leaf)))  # (levels + 1, trees): the new one as well
        taken = F.pad(steps < last, (0, 0, 0, 1)).unsqueeze(-1)
        edge = one_hot(self.best.gather(0, node), env.n_actions) & taken
        nodes = node.unsqueeze(-1).expand_as(edge)
        total = self.total.gather(0, nodes) + torch.where(edge, F.pad(follows, (0, 0, 0, 1)).unsqueeze(-1), 0.0)
        visits, prior = self.visits.gather(0, nodes) + edge, self.prior.gather(0, nodes)
        new_edge = edge & F.pad((steps == level) & expands, (0, 0, 0, 1)).unsqueeze(-1)
        child = torch.where(new_edge, self.count.unsqueeze(-1), self.child.gather(0, nodes))
        # where to go from these nodes the next time
        exploration = args.c_puct * (1 + visits.sum(-1, keepdim=True)).sqrt() * prior
        first = self.value.gather(0, node).unsqueeze(-1) * args.node_value  # as if it had been visited once
        score = ((total + first + exploration) / (1 + visits)).masked_fill(prior < 0, -torch.inf)
        best = score.argmax(-1, keepdim=True)
        for array, values in ((self.total, total), (self.visits, visits), (self.child, child)):
            array.scatter_(0, nodes, values)
        self.best.scatter_(0, node, best.squeeze(-1))
        self.next.scatter_(0, node, child.gather(-1, best).squeeze(-1))
        self.count += 1


class Player:
    """Plays the learner's seats (matches, seats) of `env`: takes the best action or, to explore, draws one."""

    fields = FIELDS
    own_graphs = True

    def __init__(self, learner, env, seats, explore=False):
        self.learner, self.env, self.explore = learner, env, explore
        args = self.args = learner.args
        self.sims, self.rollout_steps = (args.train_sims, 0) if explore else (args.sims, args.rollout_steps)
        self.searches = {}  # by the number of decisions
        self.fast = [copy.deepcopy(network) for network in learner.networks().values()] if learner.half else None
        for network in self.fast or ():
            network.to(torch.bfloat16)
        matches, agents, goals = len(seats), env.n_agents, learner.goals
        self.matches = torch.arange(matches, device=env.device)
        self.prior = torch.zeros(matches, agents, goals, device=env.device)  # beliefs at the start of a match
        self.log_belief = torch.zeros_like(self.prior)
        self.log_probs = torch.zeros(matches, agents, goals, env.n_actions, device=env.device)  # of the last actions
        self.alive = torch.zeros(matches, agents, dtype=torch.bool, device=env.device)  # at the last decision
        self.running, self.reached = self.alive[:, 0].clone(), torch.full_like(self.alive, -1, dtype=torch.long)
        policy = torch.zeros(*seats.shape, env.n_actions, device=env.device)
        self.outputs = {"search_policy": policy, "belief": torch.zeros_like(self.prior)}
        self.outputs["own_goal"] = torch.full_like(seats, -1)  # -1: its reward; len(env.goals): none, it acts at random
        self.memory = {"prior": self.prior}
        self.forget()

    def forget(self):
        """The others are new."""
        self.prior.fill_(1 / self.learner.goals)

    def reset(self, mask):
        log_prior = torch.log(self.prior.clamp(min=LEAST_PRIOR))
        self.log_belief.copy_(torch.where(mask.view(-1, 1, 1), log_prior, self.log_belief))
        self.reached.masked_fill_(mask.unsqueeze(1), -1)
        self.running |= mask
        own_goal, device = self.outputs["own_goal"], mask.device
        if self.explore and self.env.goals and own_goal.shape[1] > 1:  # in some matches some pursue one goal
            goal = torch.randint(len(self.env.goals) + 1, (len(mask), 1), device=device)
            mixed = torch.rand(goal.shape, device=device) < self.args.commit
            pursuers = mixed * torch.randint(1, own_goal.shape[1], goal.shape, device=device)
            drawn = torch.where(torch.rand(own_goal.shape, device=device).argsort(-1) < pursuers, goal, -1)
            own_goal.copy_(torch.where(mask.unsqueeze(1), drawn, own_goal))

    # ALGO LOGIC: beliefs
    def update_belief(self, last_action):
        """Bayes' rule, within a match: the goals that made the others' last actions likely become more so."""
        action = last_action.clamp(min=0)[..., None, None].expand(-1, -1, self.learner.goals, 1)
        probability = self.log_probs.gather(-1, action).squeeze(-1).exp()
        likelihood = torch.log((1 - SURPRISE) * probability + SURPRISE / self.env.n_actions)
        acted = (self.alive & (last_action >= 0)).unsqueeze(-1)
        self.log_belief.copy_(F.log_softmax(self.log_belief + torch.where(acted, likelihood, 0.0), -1))

    def observe(self, action, over):
        """After a step, of all matches of the environment: remembers the first goal that each agent reached."""
        if not self.args.inter_belief or not self.args.goals:
            return
        left = self.alive & ~self.env.info["alive"]
        goal = self.env.goal_reached(action, left, over.unsqueeze(1))
        news = (self.reached < 0) & self.alive & self.running.unsqueeze(1)
        self.reached.copy_(torch.where(news, goal, self.reached))
        ended = over & self.running
        reached = torch.where(self.reached >= 0, self.reached, len(self.env.goals))
        prior = torch.lerp(one_hot(reached, self.learner.goals).float(), self.prior, self.args.belief_decay)
        self.prior.copy_(torch.where(ended.view(-1, 1, 1), prior, self.prior))
        self.running &= ~ended

    def act(self, inputs, epsilon):
        env, match = self.env, self.matches if inputs.match is None else inputs.match
        agents, model = self.networks()
        if self.args.intra_belief:
            self.update_belief(inputs.all_last_action)
        obs, avail, alive = env.obs[match], env.info["avail"][match], env.info["alive"][match]
        time = (env.steps[match] / env.match_limit).repeat_interleave(env.n_agents)
        logits = model(obs.flatten(0, 1), time).unflatten(0, alive.shape)
        self.log_probs.copy_(log_softmax(logits, avail.unsqueeze(2)))
        self.alive.copy_(alive)
        plays = alive.gather(1, inputs.seat) if inputs.alive is None else inputs.alive
        plays = plays & (self.outputs["own_goal"] < len(env.goals))
        policy = inputs.avail / inputs.avail.sum(-1, keepdim=True)
        decisions = plays.flatten().nonzero().flatten()  # the only wait for the device
        for chosen in decisions.split(self.args.planners) if len(decisions) else ():
            size = min(max(1 << (len(chosen) - 1).bit_length(), 8), self.args.planners)
            if size not in self.searches:
                options = {"rollout_steps": self.rollout_steps, "own_goals": self.explore}
                self.searches[size] = Search(self.args, env, agents, model, size, self.sims, **options)
            rows = F.pad(chosen, (0, size - len(chosen)), value=0)
            place, seat = rows // plays.shape[1], inputs.seat.flatten()[rows]
            own_goal, belief = self.outputs["own_goal"].flatten()[rows], self.log_belief[place]
            found, _ = self.searches[size].plan(env, match[place], seat, own_goal, belief)
            policy.flatten(0, 1)[chosen] = found[: len(chosen)]
        self.outputs["search_policy"].copy_(policy)
        self.outputs["belief"].copy_(self.log_belief.exp())
        return ((policy.log() + gumbel(policy)) if self.explore else policy).argmax(-1)

    def networks(self):
        """What searches use: the networks, or copies in half precision."""
        networks = list(self.learner.networks().values())
        if self.fast is None:
            return networks
        for fast, network in zip(self.fast, networks):
            torch._foreach_copy_(list(fast.parameters()), list(network.parameters()))
        return self.fast

    def analyse(self, episodes):
        return analyse(self.learner, episodes)


class Learner:
    """The networks, the optimiser and the update."""

    def __init__(self, args, env):
        self.args, self.env = args, env
        self.updates = 0
        self.goals = len(env.goals) + 1 if args.goals else 1  # the last is to have none
        self.half = args.half and env.device.type == "cuda"
        self.agents = Network(args, env, env.n_actions + 1, len(env.goals))  # logits, a value in units of return_scale
        self.model = Network(args, env, env.n_actions, self.goals if args.goals else 0)
        self.parameters = [*self.agents.parameters(), *self.model.parameters()]
        # fused, so that an update that is not finite can be skipped without waiting for the device
        self.optimizer = torch.optim.Adam(self.parameters, args.learning_rate, fused=True, capturable=args.cuda)
        self.batch = {}
        self.metrics = Metrics(env.device)
        self.graphed_update = Graphed(self.update, env.device, args.cudagraphs)

    def networks(self):
        return {"agents": self.agents, "model": self.model}

    def samples(self, episodes, lengths):
        """What a round shows, (rows, matches, agents or seats, ...), of decisions and of what the others did.

        An agent's goal at a step is the first that it reaches then or later; the last of all stands for none.
        """
        rows, alive = int(lengths.max()), episodes["all_alive"]
        step = torch.arange(rows, device=lengths.device).unsqueeze(1)
        running = (step < lengths).unsqueeze(-1)  # (rows, matches, 1)
        before, after = alive[:rows] & running, alive[1 : rows + 1]
        action, reward, own_goal = (episodes[name][:rows] for name in ("all_action", "reward", "own_goal"))
        seat, goal, none = episodes["seat"][0].expand(rows, -1, -1), torch.zeros_like(action), len(self.env.goals)
        if self.env.goals:
            over = (step == lengths - 1).unsqueeze(-1)
            reached = torch.where(before, self.env.goal_reached(action, before & ~after, over), -1)
            reward = counted_reward(self.env, reward, reached.gather(-1, seat), own_goal)
        if self.args.goals:
            goal = reached.scatter(-1, seat, torch.where(own_goal == none, none, reached.gather(-1, seat)))
            goal[-1] = torch.where(goal[-1] >= 0, goal[-1], none)
            for t in reversed(range(rows - 1)):
                goal[t] = torch.where(goal[t] >= 0, goal[t], goal[t + 1])
        is_other = torch.ones_like(before)
        if seat.shape[-1] == 1:  # a single learner models everybody but itself
            is_other.scatter_(-1, seat, False)
        plays = before.gather(-1, seat) & (own_goal < none)
        target = torch.where(plays, reward, 0.0)
        for t in reversed(range(rows - 1)):
            target[t] += self.args.gamma * target[t + 1]
        time = (step / self.env.match_limit).unsqueeze(-1).expand_as(action)
        return {
            "obs": episodes["all_obs"][:rows], "avail": episodes["all_avail"][:rows], "time": time, "action": action,
            "goal": goal, "policy": episodes["search_policy"][:rows], "target": target, "seat": seat, "plays": plays,
            "own_goal": own_goal, "acts": before & is_other,
        }  # fmt: skip

    def learn(self, episodes):
        """Some passes over the decisions of a round; in each update as many actions of the others."""
        samples = self.samples(episodes.data, episodes.lengths)
        size, device = self.args.batch_size, self.env.device
        plays, acts = (samples[name].flatten().nonzero().flatten() for name in ("plays", "acts"))
        first = torch.arange(0, samples["goal"].numel(), self.env.n_agents, device=device)  # agent 0 of every match
        agent = (first.view(*samples["seat"].shape[:2], 1) + samples["seat"]).flatten()
        flat = {name: values.flatten(0, 2) for name, values in samples.items()}
        acts = acts if len(acts) else plays
        for _ in range(self.args.update_epochs):
            orders = [torch.randperm(len(rows)).to(device) for rows in (plays, acts)]
            for start in range(0, len(plays), size):
                place = torch.arange(start, start + size, device=device)
                own, other = (rows[order[place % len(rows)]] for rows, order in zip((plays, acts), orders))
                batch = {name: flat[name][own] for name in ("policy", "target", "own_goal")}
                batch |= {name: flat[name][agent[own]] for name in ("obs", "avail", "time")}
                others = {name: flat[name][other] for name in ("obs", "avail", "time", "action", "goal", "acts")}
                if self.args.symmetries and self.env.grid:
                    self.env.turn(batch)
                    self.env.turn(others)
                batch |= {f"other_{name}": values for name, values in others.items()}
                for name, values in batch.items():  # all use the same memory, so that an update can be replayed
                    self.batch.setdefault(name, torch.empty_like(values)).copy_(values)
                self.graphed_update(self.batch)
                self.updates += 1

    # ALGO LOGIC: the loss
    def loss(self, batch):
        """The loss of a batch of decisions and of others' actions, and a dictionary of values to log."""
        output = self.agents(batch["obs"], batch["time"], batch["own_goal"])
        log_probs = log_softmax(output[:, :-1], batch["avail"])
        policy_loss = -(batch["policy"] * log_probs).sum(-1).mean()
        value_loss = (output[:, -1] - batch["target"] / self.env.return_scale).square().mean()
        log_probs = self.other_log_probs(*(batch[f"other_{name}"] for name in ("obs", "time", "goal", "avail")))
        taken = one_hot(batch["other_action"], self.env.n_actions)
        model_loss = -(torch.where(taken, log_probs, 0.0).sum(-1) * batch["other_acts"]).mean()
        entropy = -(batch["policy"] * batch["policy"].clamp(min=1e-9).log()).sum(-1).mean()
        logs = {"losses/policy_loss": policy_loss, "losses/value_loss": value_loss, "om/loss": model_loss}
        logs["losses/entropy"] = entropy
        return (policy_loss + self.args.value_coef * value_loss) / 2 + model_loss, logs

    def other_log_probs(self, obs, time, goal, avail):
        return log_softmax(self.model(obs, time, goal), avail)

    def update(self, batch):
        loss, logs = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        logs["losses/grad_norm"] = nn.utils.clip_grad_norm_(self.agents.parameters(), self.args.max_grad_norm)
        logs["om/grad_norm"] = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        finite = self.metrics.add(logs)
        self.optimizer.found_inf = (~finite).float()  # the optimiser skips such a step
        self.optimizer.step()


@torch.no_grad()
def analyse(learner, episodes):
    """How right the model of the others and the belief are in recorded episodes: docs/hop.md."""
    samples = learner.samples(episodes, episodes["lengths"])
    flat = {name: values.flatten(0, 2) for name, values in samples.items()}
    log_probs = learner.other_log_probs(*(flat[name] for name in ("obs", "time", "goal", "avail")))
    metrics = {"action_accuracy": masked_mean(flat["acts"], (log_probs.argmax(-1) == flat["action"]).float()).item()}
    if learner.args.goals:
        belief = episodes["belief"][: len(samples["goal"])].flatten(0, 2)
        belief = belief.gather(-1, flat["goal"].unsqueeze(-1)).squeeze(-1)
        metrics["goal_belief"] = masked_mean(flat["acts"], belief).item()
    return metrics


def load_player(run, env, seats):
    """The greedy policy of a run, playing `seats` (matches, seats) of matches like those of `env`."""
    args = checkpoints.load_args(Args, run)
    args.cuda = env.device.type == "cuda"
    check_args(args)
    learner = Learner(args, env)
    checkpoints.load_networks(run, env, learner.networks())
    return Player(learner, env, seats)


if __name__ == "__main__":
    args = parse_args(Args, __file__)
    check_args(args)
    device = set_up_torch(args)
    env, team, eval_env, eval_team = set_up(args, make_env, make_team, device)
    learner = Learner(args, env)
    player = Player(learner, env, team.learner_seats, explore=True)
    runner = EpisodeRunner(env, team, player, FIELDS, args.cudagraphs)
    eval_player = Player(learner, eval_env, eval_team.learner_seats)
    eval_runner = EpisodeRunner(eval_env, eval_team, eval_player, FIELDS, args.cudagraphs)
    state = {"runner": runner, "eval_runner": eval_runner}

    with Run(args, __file__, STARTED, env, learner, state) as run:
        while run.in_progress():
            # ALGO LOGIC: play a round of matches, learn from its decisions
            episodes = runner.play()
            steps, number = episodes.count()
            learner.learn(episodes)

            run.count(steps, number)
            if run.log_due():
                run.log(learner.metrics.pop())
                run.log_episodes(episodes)
            if run.evaluation_due():
                results = eval_runner.evaluate(args.eval_episodes)
                run.log_evaluation(*results, om=analyse(learner, eval_runner.selection(slice(64))))
            if run.save_due():
                run.save()
        results = eval_runner.evaluate(args.final_eval_episodes)
        run.finish(*results, om=analyse(learner, eval_runner.selection()))

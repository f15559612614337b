"""Team-mates: seats played by fixed policies, scripted ones or earlier runs, drawn anew for every match.

    team = Team(env, "6qmix1nearest1learner", pool=["runs/8m__qmix__*"])
    team.draw()                                                 before every reset: policies and seats of each match
    action = policy(team.select(env.obs))                       (matches, the learner's seats)
    joint_action = team.joint_action(action, last_action)       (matches, n_agents)

Runs whose networks have the layout of iql.py act in one batched call; any other run acts through the player that its
script loads. A step can be captured in a CUDA graph.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from training import checkpoints
from training.args import option
from training.episodes import Inputs, load_player, visible_last_action
from training.exits import UsageError
from training.stacked import StackedNetworks, can_stack

GROUP = re.compile(r"(\d+)([A-Za-z_]+)")


class Team:
    """`learner_seats` (num_envs, seats); `policy_id` (num_envs, n_agents) of everybody else, -1 for the learner.

    `spec` names the seats in order: `self` gives all to the learner; `scripted` (or None) is one learner among scripted
    team-mates; otherwise numbers and names, such as 6qmix2learner. Seats rotate from match to match, so that every one
    of them is learned. A pool has run folders and names of scripted policies; in the spec `other` is any of them, and
    an algorithm's name any of its runs. Team-mates' actions are random with probability `epsilon`; of a pair of
    numbers one between them is drawn for every match. With `teammates_everywhere` the team-mates' policies play
    the learner's seats as well.
    """

    def __init__(
        self,
        env,
        spec=None,
        learner_names=("learner",),
        pool=(),
        seat="rotate",
        mix=False,
        epsilon=0.0,
        seed=0,
        teammates_everywhere=False,
        matches_per_partner=1,
    ):
        self.env = env
        self.mix = mix
        self.epsilons = tuple(epsilon) if isinstance(epsilon, (tuple, list)) else (epsilon, epsilon)  # least and most
        self.seed = seed
        self.rounds = 0
        self.even = False  # whether to seat everybody everywhere equally often, as an evaluation wants it
        self.matches_per_partner = matches_per_partner  # rounds in a row with the same team-mates
        self.runs = read_pool([path for path in pool if str(path) not in env.policies], env)
        self.policy_names = [*env.policies, *(run.path for run in self.runs)]  # by policy_id
        scripts = [env.policies.index(name) for name in map(str, pool) if name in env.policies]
        self.pool = [*dict.fromkeys(scripts), *range(len(env.policies), len(self.policy_names))]
        if self.pool and spec in (None, "self", "scripted"):
            example = f"{env.n_agents - 1}other1{learner_names[0]}"
            raise ValueError(f"--team does not use --pool; try --team {example}")
        self.groups = self._groups(spec, learner_names)
        if (count := sum(count for count, _ in self.groups)) != env.n_agents:
            raise ValueError(f"team {spec!r} has {count} seats, but {env.name} has {env.n_agents}")
        seats = [g for g, (count, _) in enumerate(self.groups) for _ in range(count)]
        self._learner_groups = [g for g, (_, policies) in enumerate(self.groups) if policies is None]
        own = [place for place, g in enumerate(seats) if g in self._learner_groups]
        if not own:
            names = " or ".join(learner_names)
            raise ValueError(f"team {spec!r} leaves no seat for the learner: name one of them {names}")
        self.used = sorted({policy for _, policies in self.groups for policy in policies or ()})
        if teammates_everywhere and self.used:
            self.groups = [(count, self.used if policies is None else policies) for count, policies in self.groups]
        self.arrangement = np.array(seats)
        self.rotation = _rotation(seat, own[0], env.n_agents)
        self.shifts = np.arange(env.n_agents)  # what rotation goes through
        if getattr(env, "sides", None) is not None:
            sides = np.array(env.sides)[(self.shifts[:, None] + own) % env.n_agents]  # of the learner's seats
            for wanted in (sides == env.learner_side, sides == sides[:, :1]):  # its usual side, or at least one side
                if wanted.all(1).any():
                    self.shifts = self.shifts[wanted.all(1)]
                    break

        def zeros(dtype, seats=env.n_agents):
            return torch.zeros((env.num_envs, seats), dtype=dtype, device=env.device)

        self.learner_seats = zeros(torch.long, len(own))
        self.policy_id = zeros(torch.long)
        self._is_learner = zeros(torch.bool)
        self._is_scripted = zeros(torch.bool)
        self._script = zeros(torch.long)
        self._epsilon = zeros(torch.float32, 1)
        largest = max((len(policies) for _, policies in self.groups if policies), default=1)
        self.most = 1 if mix else largest  # policies to draw one from
        moves = self.used and self.rotation in ("rotate", "random")
        self.turns = len(self.shifts) if moves else 1  # rotations to go through
        self._has_scripts = any(policy < len(env.policies) for policy in self.used)
        self.networks, self.players = self._load_runs()
        self.draw()

    def _groups(self, spec, learner_names):
        """(seats, policies to draw from) of every group of seats; None instead of policies for the learner."""
        env = self.env
        if spec == "self":
            return [(env.n_agents, None)]
        if spec in (None, "scripted"):
            names = env.default_others or env.policies
            return [(env.n_agents - 1, [env.policies.index(name) for name in names]), (1, None)]
        return [
            (count, None if name in learner_names else self._candidates(name, spec, learner_names))
            for count, name in _parse(spec)
        ]

    def _candidates(self, name, spec, learner_names):
        if name in self.env.policies:
            return [self.env.policies.index(name)]
        if name == "other" and self.pool:
            return self.pool
        first = len(self.env.policies)
        policies = [first + r for r, run in enumerate(self.runs) if run.algorithm == name]
        if not policies:
            known = ", ".join([*learner_names, *self.env.policies, *sorted({run.algorithm for run in self.runs})])
            raise ValueError(f"team {spec!r}: there is no {name!r} in the pool; known are {known}")
        return policies

    def _load_runs(self):
        """(the runs that act in one batched call, players of all other runs by policy_id)"""
        env = self.env
        stacked, players = {}, {}
        hidden_dims = set()
        for policy in (policy for policy in self.used if policy >= len(env.policies)):
            run = self.runs[policy - len(env.policies)]
            if can_stack(run, env) and len(hidden_dims | {run.weights["fc1.bias"].shape[-1]}) == 1:
                hidden_dims.add(run.weights["fc1.bias"].shape[-1])
                stacked[policy] = run.weights
            else:
                matches = min(self.max_seats(policy), env.num_envs)
                players[policy] = RunPlayer(run.path, env, matches)
        capacity = max((self.max_seats(policy) for policy in stacked), default=0)
        return StackedNetworks(env, stacked, capacity), players

    def draw(self):
        """Draws policies and seats of all matches: every policy of a group equally often, in a new order each round.

        Where that does not divide evenly, rounds take turns. With `even` any `most * turns` matches in a row have every
        policy of the largest group (unless seats are mixed) once with every rotation.
        """
        if self.rounds and self.learner_seats.shape[1] == self.env.n_agents:
            return  # there is nobody to draw
        matches = self.env.num_envs
        rng = np.random.default_rng([self.seed, self.rounds])
        rotation = self.rotation
        if rotation == "rotate":
            rotation = np.arange(matches) + self.rounds
        elif rotation == "random":
            rotation = rng.integers(len(self.shifts), size=matches)
        in_turn = []
        if self.even and self.turns > 1:  # along diagonals: policies and seats alternate within any few matches, too
            number = np.arange(matches) + self.rounds * matches
            rotation = number + number // math.lcm(self.most, self.turns) % math.gcd(self.most, self.turns)
        if self.even and not self.mix:
            in_turn.append(np.arange(matches))

        def choose(count, policies):
            draws = matches * (count if self.mix else 1)
            order = in_turn.pop() if in_turn and policies == self.most else rng.permutation(draws)
            drawn = (order + self.rounds * draws) % policies
            return drawn if self.mix else drawn.repeat(count)

        self.assign(rotation, choose)

    def whole(self, matches):
        """As many matches, up to this, as play every policy from every seat equally often; every policy, or simply all,
        where that would leave out more than a tenth."""
        kept = (matches // cycle * cycle for cycle in (self.most * self.turns, self.most))
        return next((number for number in kept if number >= 0.9 * matches), matches)

    def assign(self, rotation, choose):
        """Seats the teams of a round, rotated by `rotation`, a number or one for every match. A learner whose seat is
        not fixed stays on its side.

        choose(count, policies) returns which of so many policies gets each of a group's seats, match after match.
        """
        env = self.env
        seats = np.arange(env.n_agents)
        if self.rotation in ("rotate", "random"):
            rotation = self.shifts[np.asarray(rotation) % len(self.shifts)]
        group = self.arrangement[(seats - np.reshape(rotation, (-1, 1))) % env.n_agents]
        group = np.broadcast_to(group, (env.num_envs, env.n_agents))
        policy_id = np.full(group.shape, -1)
        for g, (count, policies) in enumerate(self.groups):
            if policies is not None:
                policy_id[group == g] = np.array(policies)[np.ravel(choose(count, len(policies)))]
        if self.epsilons[1] > 0:
            epsilon = np.random.default_rng([self.seed, self.rounds, 1]).uniform(*self.epsilons, self._epsilon.shape)
            self._epsilon.copy_(torch.from_numpy(epsilon))
        self.rounds += 1
        learner_seats = np.nonzero(np.isin(group, self._learner_groups))[1].reshape(self.learner_seats.shape)
        is_scripted = (policy_id >= 0) & (policy_id < len(env.policies))
        self.learner_seats.copy_(torch.from_numpy(learner_seats))
        self.policy_id.copy_(torch.from_numpy(policy_id))
        self._is_learner.copy_(self.policy_id < 0)
        self._is_scripted.copy_(torch.from_numpy(is_scripted))
        self._script.copy_(torch.from_numpy(np.where(is_scripted, policy_id, 0)))
        self.networks.assign(policy_id)
        for policy, player in self.players.items():
            player.assign((policy_id == policy).any(1))

    def memory(self):
        """What the team-mates remember in the middle of their matches."""
        stacked = {"stacked": {"hidden": self.networks.hidden}} if self.networks.count else {}
        return stacked | {str(policy): tensors_of(player.player) for policy, player in self.players.items()}

    def restore(self, memory):
        """Continues with that memory, in the same matches."""
        for name, tensors in self.memory().items():
            for key in tensors.keys() & memory[name].keys():
                tensors[key].copy_(memory[name][key])

    def is_opposed(self):
        """Whether learners of one match are on different sides."""
        sides = getattr(self.env, "sides", None)
        if sides is None:
            return False
        sides = torch.tensor(sides)[self.learner_seats.cpu()]
        return bool((sides != sides[:, :1]).any())

    def max_seats(self, policy):
        """How many seats, of all matches together, a policy can be assigned in a round."""
        matches = self.env.num_envs
        seats = 0
        for count, policies in self.groups:
            if policies is not None and policy in policies:
                if self.mix:
                    seats += -(-matches * count // len(policies))
                else:
                    seats += -(-matches // len(policies)) * count
        return seats

    def select(self, values):
        """(num_envs, n_agents, ...) -> (num_envs, the learner's seats, ...)"""
        if self.learner_seats.shape[1] == self.env.n_agents:
            return values
        seats = self.learner_seats.view(*self.learner_seats.shape, *(1 for _ in values.shape[2:]))
        return values.gather(1, seats.expand(*self.learner_seats.shape, *values.shape[2:]))

    @torch.no_grad()
    def joint_action(self, action, last_action):
        """Everybody's actions, (num_envs, n_agents): the learner's, and the team-mates'.

        `last_action` (num_envs, n_agents) is -1 where an episode begins: there hidden states start anew.
        """
        if not self.used:
            return action
        joint = self.env.scripted_actions(self._script) if self._has_scripts else self._script
        if self.networks.count:
            joint = torch.where(self._is_scripted, joint, self.networks.act(last_action))
        for policy, player in self.players.items():
            joint = torch.where(self.policy_id == policy, player.act(last_action), joint)
        if self.epsilons[1] > 0:
            noise = torch.rand((*joint.shape, self.env.n_actions + 1), device=joint.device)
            chance = noise[..., :-1].masked_fill(~self.env.info["avail"], -1.0).argmax(-1)
            joint = torch.where(noise[..., -1] < self._epsilon, chance, joint)
        return torch.where(self._is_learner, joint.scatter(1, self.learner_seats, action), joint)


def _parse(spec):
    groups = [(int(count), name) for count, name in GROUP.findall(spec)]
    if "".join(f"{count}{name}" for count, name in groups) != spec or not all(count for count, _ in groups):
        raise ValueError(f"a team is written as numbers and names, such as 7qmix1omg or 3NH1learner, not {spec!r}")
    return groups


def _rotation(seat, first, n_agents):
    """`rotate`, `random`, or by how many seats the arrangement is shifted to put its learner at a fixed seat."""
    if seat in ("rotate", "random"):
        return seat
    if str(seat).isdigit() and int(seat) < n_agents:
        return (int(seat) - first) % n_agents
    raise ValueError(
        f"the learner's seat is rotate, random or a number from 0 to {n_agents - 1}, not {str(seat)[:100]!r}"
    )


# ---- runs as team-mates ----
@dataclass
class PoolRun:
    path: str
    algorithm: str
    weights: dict  # of the network that plays greedily


def read_pool(pool, env):
    """The runs of a pool: paths or patterns of run folders, of any script."""
    runs = []
    for pattern in pool:
        paths = checkpoints.find_runs(pattern)
        if not paths:
            raise ValueError(f"there is no run with a checkpoint.pt at {pattern}")
        for path in paths:
            saved = checkpoints.read_run(path)
            checkpoints.check_env(path, saved, env)
            runs.append(PoolRun(path, saved["algorithm"], saved.get("networks", {}).get("target_agents", {})))
    repeated = [path for path, times in Counter(run.path for run in runs).items() if times > 1]
    if repeated:
        raise ValueError(f"the pool names {repeated[0]} more than once")
    return runs


class RunPlayer:
    """A run as a team-mate, through the player of its own script. It plays all seats of the matches assigned to it."""

    def __init__(self, path, env, matches):
        self.env = env
        seats = torch.arange(env.n_agents, device=env.device).repeat(matches, 1)
        self.player = load_player(path, env, seats)
        self.seats = seats
        self.match = torch.zeros(matches, dtype=torch.long, device=env.device)  # which match each row is
        self.row = torch.zeros(env.num_envs, dtype=torch.long, device=env.device)  # which row each match is

    def assign(self, plays):
        """`plays` (num_envs,): the matches it plays in. Unused rows play match 0, and their actions are ignored."""
        mine = np.flatnonzero(plays)
        match = np.zeros(len(self.match), int)
        row = np.zeros(len(self.row), int)
        match[: len(mine)] = mine
        row[mine] = np.arange(len(mine))
        self.match.copy_(torch.from_numpy(match))
        self.row.copy_(torch.from_numpy(row))

    def act(self, last_action):
        last_action = last_action[self.match]
        self.player.reset((last_action < 0).all(1))
        obs, avail = self.env.obs[self.match], self.env.info["avail"][self.match]
        watched = {}
        if "visible_last_action" in getattr(self.player, "fields", ()):
            watched["visible_last_action"] = visible_last_action(self.env.visible[self.match], last_action)
        inputs = Inputs(obs, avail, last_action, last_action, self.seats, match=self.match, **watched)
        return self.player.act(inputs, 0.0)[self.row]


def tensors_of(player):
    """Its tensors by name: its memory is among them."""
    found = vars(getattr(player, "player", player))  # of SeatSelection the player that it selects from
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


# ---- options about teams ----
def seat_order(env):
    """(agents, agents): for every seat itself, then the rest in the order in which its observation lists them."""
    seat = torch.arange(env.n_agents)
    own = seat.unsqueeze(1)
    if env.ego_first:
        return (own + seat) % env.n_agents
    return torch.cat((own, seat[:-1] + (seat[:-1] >= own)), 1)


def check_unused(args, matches_per_partner):
    """Rejects options about team-mates where there are none; `matches_per_partner`: whether that is one of them."""
    if args.team != "self":
        return
    unused = {"seat": args.seat != "rotate", "mix_teammates": args.mix_teammates}
    unused["teammate_epsilon"] = args.teammate_epsilon not in (0.0, (0.0, 0.0))
    unused["matches_per_partner"] = args.matches_per_partner > 1 and matches_per_partner
    for name in (name for name, given in unused.items() if given):
        raise UsageError(
            f"{option(name)} is for a learner with team-mates or opponents: with --team self there are none"
        )


def check_team_options(args):
    """Rejects options that do not go together."""
    check_unused(args, matches_per_partner=not args.persist_hidden)
    if args.oracle and args.team == "self":
        raise UsageError("--oracle is for a learner with partners: with --team self there are none")
    if args.oracle and args.capture_video:
        raise UsageError("--oracle has no video: what such a learner is told is known in its own run only")
    if args.capture_video and args.env_id.startswith("pettingzoo:") and "render_mode=rgb_array" not in args.env_id:
        raise UsageError(f"--capture-video needs pictures: --env-id {args.env_id},render_mode=rgb_array")
    if args.persist_hidden and args.matches_per_partner == 1:
        raise UsageError(
            "--persist-hidden is for several matches with the same partners: --matches-per-partner says how many"
        )


def check_common_goal(args, env, team):
    """For scripts whose learners share a value: rejects learners on opposite sides, and says what is maximised."""
    if team.is_opposed():
        example = f"{env.sides.count(0)}learner{env.sides.count(1)}{env.policies[0]}"
        raise UsageError(f"--team {args.team}: {args.env_id} has two sides, of which one can learn: --team {example}")
    if env.zero_sum and args.team == "self":
        raise UsageError(
            f"--env-id {args.env_id}: the rewards add up to zero, so a team of all players has nothing to learn; "
            "iql.py plays against itself, and --team scripted is one learner against scripted opponents"
        )
    if not env.team_reward:
        print(f"In {args.env_id} every agent has a reward of its own: this learns to maximise their sum.")

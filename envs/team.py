"""Who else is on the team: seats played by fixed policies, scripted ones or networks of earlier runs, anew every match.

    team = Team(env, "6qmix1nearest1learner", pool=["runs/8m__qmix__*"])
    team.draw()                                   before every reset: who plays with whom, and in which seats
    own = policy(team.mine(env.obs))              (matches, the learner's seats)
    actions = team.complete(own, last_actions)    (matches, all seats)

The networks of all runs act in one batched call, and a step can be captured in a CUDA graph.
"""

import glob
import re
from collections import Counter
from pathlib import Path

import numpy as np
import torch

BATTLE_ROSTER = ("nearest", "weakest", "kite")  # the others, where nobody says who they are
PARTS = re.compile(r"(\d+)([A-Za-z_]+)")


def sizes_of(env):
    """What a network's inputs and outputs depend on."""
    return {name: getattr(env, name) for name in ("n_agents", "n_actions", "obs_dim", "state_dim", "episode_limit")}


class Team:
    """`own` (num_envs, seats) are the learner's seats, `who` (num_envs, n_agents) the others' policies (learner: -1).

    The text names the seats in order; `self` gives them all to the learner, `scripted` (or None) is one learner among
    scripted others. The order is turned from match to match, so that every seat is learned. A pool has run folders and
    names of scripted policies; in the text `other` is any of them, and an algorithm's name any of its runs. With an
    understudy the others' policies play the learner's seats as well.
    """

    def __init__(
        self,
        env,
        text=None,
        learners=("learner",),
        pool=(),
        seat="rotate",
        mix=False,
        epsilon=0.0,
        seed=0,
        understudy=False,
    ):
        self.env, self.mix, self.epsilon, self.seed, self.rounds = env, mix, epsilon, seed, 0
        scripts = [env.policies.index(name) for name in map(str, pool) if name in env.policies]
        self.runs = read_runs([path for path in pool if str(path) not in env.policies], env)
        scripted = [name for name in env.policies if name in BATTLE_ROSTER] or list(env.policies)
        self.names = [*env.policies, *(run["path"] for run in self.runs)]  # what the numbers of `who` mean
        self.pool = [*dict.fromkeys(scripts), *range(len(env.policies), len(self.names))]  # these numbers are others
        if self.pool and text in (None, "self", "scripted"):
            raise ValueError(
                f"nobody of the pool would play; a team with them is {env.n_agents - 1}other1{learners[0]}"
            )
        self.parts = []  # (seats, numbers of the policies to draw from), None for the learner
        if text == "self":
            self.parts = [(env.n_agents, None)]
        elif text in (None, "scripted"):
            roster = [env.policies.index(name) for name in scripted]
            self.parts = [(env.n_agents - 1, roster), (1, None)]
        else:
            for count, name in _parse(text):
                self.parts.append((count, None if name in learners else self._candidates(name, text, learners)))
        seats = [p for p, (count, _) in enumerate(self.parts) for _ in range(count)]
        if len(seats) != env.n_agents:
            raise ValueError(f"team {text!r} has {len(seats)} seats, but {env.name} has {env.n_agents}")
        self._open = [p for p, (_, numbers) in enumerate(self.parts) if numbers is None]
        own = [place for place, p in enumerate(seats) if p in self._open]
        if not own:
            raise ValueError(f"team {text!r} leaves no seat for the learner: name one of them {' or '.join(learners)}")
        everybody = sorted({number for _, numbers in self.parts for number in numbers or ()})
        if understudy and everybody:
            self.parts = [(count, everybody if numbers is None else numbers) for count, numbers in self.parts]
        self.arrangement, self.seat = np.array(seats), _seat(seat, env.n_agents)
        if isinstance(self.seat, int):
            self.seat = (self.seat - own[0]) % env.n_agents  # how far the arrangement is turned

        def blank(kind):
            return torch.zeros((env.num_envs, env.n_agents), dtype=kind, device=env.device)

        self.who, self._policy, self._scripted = blank(torch.long), blank(torch.long), blank(torch.bool)
        self.own, self._mine = blank(torch.long)[:, : len(own)].clone(), blank(torch.bool)
        used = {number for _, numbers in self.parts for number in numbers or ()}
        self._has_scripts = any(number < len(env.policies) for number in used)
        first = len(env.policies)
        weights = {r: run["weights"] for r, run in enumerate(self.runs) if first + r in used}
        self.networks = Networks(env, weights, max((self.most_seats(first + r) for r in weights), default=0))
        self.draw()

    def _candidates(self, name, text, learners):
        if name in self.env.policies:
            return [self.env.policies.index(name)]
        if name == "other" and self.pool:
            return self.pool
        numbers = [len(self.env.policies) + r for r, run in enumerate(self.runs) if run["algorithm"] == name]
        if not numbers:
            known = ", ".join([*learners, *self.env.policies, *sorted({run["algorithm"] for run in self.runs})])
            raise ValueError(f"team {text!r}: there is no {name!r} in the pool; known are {known}")
        return numbers

    def draw(self):
        """Deals the matches' teams and seats: every policy of a part to equally many, in an order of this round.

        Where that does not come out even, rounds begin with those whose turn it is.
        """
        if self.rounds and self.own.shape[1] == self.env.n_agents:
            return  # there is nobody to deal for
        matches, rng, turn = self.env.num_envs, np.random.default_rng([self.seed, self.rounds]), self.seat
        if turn == "rotate":
            turn = np.arange(matches) + self.rounds
        elif turn == "random":
            turn = rng.integers(self.env.n_agents, size=matches)

        def choose(count, policies):
            deals = matches * (count if self.mix else 1)
            drawn = (rng.permutation(deals) + self.rounds * deals) % policies
            return drawn if self.mix else drawn.repeat(count)

        self.deal(turn, choose)

    def deal(self, turn, choose):
        """Seats the teams of a round, turned by `turn`, a number or one for every match.

        choose(seats, policies) says which of so many policies gets each seat of a part, match after match.
        """
        env, seats = self.env, np.arange(self.env.n_agents)
        part = self.arrangement[(seats - np.reshape(turn, (-1, 1))) % env.n_agents]
        part = np.broadcast_to(part, (env.num_envs, env.n_agents))
        who = np.full(part.shape, -1)
        for p, (count, numbers) in enumerate(self.parts):
            if numbers is not None:
                who[part == p] = np.array(numbers)[np.ravel(choose(count, len(numbers)))]
        self.rounds += 1
        self.own.copy_(torch.from_numpy(np.nonzero(np.isin(part, self._open))[1].reshape(self.own.shape)))
        self.who.copy_(torch.from_numpy(who))
        self._mine.copy_(self.who < 0)
        self._scripted.copy_(torch.from_numpy((who >= 0) & (who < len(env.policies))))
        self._policy.copy_(torch.from_numpy(np.where((who >= 0) & (who < len(env.policies)), who, 0)))
        self.networks.deal(who - len(env.policies))

    def most_seats(self, number):
        """How many seats, of all matches, a policy can be dealt in a round."""
        matches, most = self.env.num_envs, 0
        for count, numbers in self.parts:
            if numbers is not None and number in numbers:
                most += -(-matches * count // len(numbers)) if self.mix else -(-matches // len(numbers)) * count
        return most

    def mine(self, values):
        """(num_envs, n_agents, ...) -> (num_envs, the learner's seats, ...)"""
        if self.own.shape[1] == self.env.n_agents:
            return values
        own = self.own.view(*self.own.shape, *(1 for _ in values.shape[2:]))
        return values.gather(1, own.expand(*self.own.shape, *values.shape[2:]))

    @torch.no_grad()
    def complete(self, own_action, last_action):
        """Everybody's actions, (num_envs, n_agents): the learner's, and what the others do now.

        `last_action` is what everybody did before; -1 starts the memory of a network anew.
        """
        if not self._has_scripts and not self.networks.count:
            return own_action
        others = self.env.scripted_actions(self._policy) if self._has_scripts else self._policy
        if self.networks.count:
            others = torch.where(self._scripted, others, self.networks.act(last_action, self.epsilon))
        return torch.where(self._mine, others.scatter(1, self.own, own_action), others)


class Networks:
    """The networks of several runs, weights stacked: each acts for the seats dealt to it, all in one call."""

    def __init__(self, env, runs, capacity):
        """`runs`: number -> weights; `capacity`: how many seats, of all matches, a run can be dealt"""
        self.env, self.count = env, 0
        if not runs:
            return
        self.slots = {}  # number of a run -> its networks: one, or one for every seat
        layers = []
        for number, weights in runs.items():
            stacked = _stack(weights)
            self.slots[number] = range(len(layers), len(layers) + len(stacked["into"][0]))
            layers += [{key: (w[i], b[i]) for key, (w, b) in stacked.items()} for i in range(len(stacked["into"][0]))]
        hidden = {layer["into"][0].shape[1] for layer in layers}
        if len(hidden) > 1:
            raise ValueError(f"runs of one pool have equally many hidden units, not {sorted(hidden)}")
        self.layers = {
            key: tuple(torch.stack([layer[key][part] for layer in layers]).to(env.device) for part in range(2))
            for key in layers[0]
        }  # name -> weight (networks, inputs, outputs), bias (networks, outputs)
        self.count = len(layers)
        self.h = torch.zeros(self.count, capacity, hidden.pop(), device=env.device)
        self.rows = torch.zeros(self.count, capacity, dtype=torch.long, device=env.device)  # whom each place acts for
        self.places = torch.zeros_like(env.actions)  # who acts for each row (match, seat)
        self.seat = torch.eye(env.n_agents, device=env.device).repeat(env.num_envs, 1)
        self.choices = torch.arange(env.n_actions, device=env.device)

    def deal(self, run):
        """Gives every row (match, seat) of `run` (num_envs, n_agents) a place with its network; below 0: to others.

        Places that nobody needs act for row 0, and nobody asks what they do.
        """
        if not self.count:
            return
        network = np.full(run.size, -1)
        for number, slots in self.slots.items():
            seats = np.broadcast_to(np.arange(run.shape[1]) if len(slots) > 1 else 0, run.shape)
            network = np.where(run.ravel() == number, slots.start + seats.ravel(), network)
        mine = np.flatnonzero(network >= 0)
        mine = mine[np.argsort(network[mine], kind="stable")]
        of = network[mine]
        place = np.arange(len(of)) - np.searchsorted(of, of)
        rows, places = np.zeros(self.rows.shape, int), np.zeros(run.size, int)
        rows[of, place], places[mine] = mine, of * rows.shape[1] + place
        self.rows.copy_(torch.from_numpy(rows))
        self.places.copy_(torch.from_numpy(places.reshape(run.shape)))

    def act(self, last_action, epsilon):
        env, rows = self.env, self.rows.flatten()
        before = last_action.flatten()[rows]
        inputs = (env.obs.flatten(0, 1)[rows], (before.unsqueeze(1) == self.choices), self.seat[rows])
        h = self.h * (before >= 0).view(*self.rows.shape, 1)  # (networks, places, hidden)
        x = self._layer("into", torch.cat(inputs, 1).unflatten(0, self.rows.shape)).relu()
        reset, keep, new = self._layer("of_input", x).chunk(3, -1)
        reset_h, keep_h, new_h = self._layer("of_state", h).chunk(3, -1)
        new = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
        self.h.copy_(torch.lerp(new, h, torch.sigmoid(keep + keep_h)))
        q = self._layer("out", self.h).flatten(0, 1)
        if epsilon > 0:
            noise = torch.rand((len(q), q.shape[1] + 1), device=q.device)
            q = torch.where(noise[:, -1:] < epsilon, noise[:, :-1], q)
        action = q.masked_fill(~env.info["avail"].flatten(0, 1)[rows], -1e9).argmax(1)
        return action[self.places]

    def _layer(self, name, x):
        weight, bias = self.layers[name]
        return torch.baddbmm(bias.unsqueeze(1), x, weight)


def _parse(text):
    parts = [(int(count), name) for count, name in PARTS.findall(text)]
    if "".join(f"{count}{name}" for count, name in parts) != text or not all(count for count, _ in parts):
        raise ValueError(f"a team is written as numbers and names, such as 7qmix1omg or 3NH1learner, not {text!r}")
    return parts


def _seat(seat, agents):
    if seat in ("rotate", "random"):
        return seat
    if str(seat).isdigit() and int(seat) < agents:
        return int(seat)
    raise ValueError(f"the learner's seat is rotate, random or a number from 0 to {agents - 1}, not {seat!r}")


def refuse_another_map(path, saved, env):
    """A checkpoint is of the map and the sizes of `env`, or a ValueError names both."""
    same_map = saved["env_id"].removeprefix("sc2/") == env.name.removeprefix("sc2/")  # the real game's or not
    if not same_map or saved["sizes"] != sizes_of(env):
        raise ValueError(f"{path} is of {saved['env_id']} {saved['sizes']}; this is {env.name} {sizes_of(env)}")


def read_runs(pool, env):
    """The checkpoints of a pool, paths or patterns of run folders, whatever their algorithm."""
    runs = []
    for pattern in pool:
        paths = sorted(path for path in glob.glob(str(pattern)) if (Path(path) / "checkpoint.pt").exists())
        if not paths:
            raise ValueError(f"there is no run with a checkpoint.pt at {pattern}")
        for path in paths:
            saved = torch.load(Path(path) / "checkpoint.pt", map_location="cpu", weights_only=True)
            refuse_another_map(path, saved, env)
            weights = saved["target"]["agents"]  # who plays greedily
            inputs = env.obs_dim + env.n_actions + env.n_agents
            named = any(set(weights) == set(names.values()) for names in _NAMES)
            if not named or _stack(weights)["into"][0].shape[1] != inputs:
                raise ValueError(
                    f"{path}: a run of {saved['algorithm']}.py cannot be a team-mate, only iql, vdn or qmix"
                )
            runs.append({"path": path, "algorithm": saved["algorithm"], "weights": weights})
    double = [path for path, times in Counter(run["path"] for run in runs).items() if times > 1]
    if double:
        raise ValueError(f"the pool names {double[0]} more than once")
    return runs


_LAYERS = ("into", "of_input", "of_state", "out")
_NAMES = (
    dict(zip(
        ((layer, part) for layer in _LAYERS for part in range(2)),
        ("into.weight", "into.bias", "gru.weight_ih_l0", "gru.bias_ih_l0", "gru.weight_hh_l0", "gru.bias_hh_l0",
         "out.weight", "out.bias"),
    )),
    dict(zip(
        ((layer, part) for layer in _LAYERS for part in range(2)),
        ("into.weight", "into.bias", "gru.of_input.weight", "gru.of_input.bias", "gru.of_state.weight",
         "gru.of_state.bias", "out.weight", "out.bias"),
    )),
)  # fmt: skip


def _stack(weights):
    """name -> weight (networks, inputs, outputs), bias (networks, outputs) of a run with one network or one a seat."""
    shared = "gru.weight_ih_l0" in weights
    names = _NAMES[0 if shared else 1]
    found = {key: weights[name] for key, name in names.items()}
    return {
        layer: (
            (found[layer, 0].T.unsqueeze(0), found[layer, 1].unsqueeze(0))
            if shared
            else (found[layer, 0], found[layer, 1])
        )
        for layer in _LAYERS
    }

"""What every environment shows to the outside: a batch of matches with Gymnasium's words and torch tensors.

An environment hands over its sizes and simulation arrays, sets `_run` and `_act`, its programs (see envs/compiler.py),
and has a `scene(index)`: one match in plain words and numbers, which envs/pictures draws. A small one has
`compile_rules` make the programs of four functions of one match: `reset_one`, `step_one`, `observe_one` and `act_one`
(docs/environments.md has an example).
"""

import functools
import math
import operator
import os
from collections import namedtuple
from numbers import Integral, Real
from typing import ClassVar

import gymnasium
import numpy as np
import torch

from envs import compiler
from envs.compiler import barrier, pick_bit, scalar
from envs.pictures import render

MATCH = ("key", "episode", "step", "stage")
KEY, EPISODE, STEP, STAGE = range(len(MATCH))  # the fields of a match: match[m, field]
RUNNING, OVER, FROZEN = range(3)  # stages; the step after OVER freezes the match
PLAY, RESTART, OBSERVE = range(3)  # what a batch can be told to do
OUTPUTS = ("obs", "state", "avail", "alive", "reward", "terminated", "truncated", "won")
FINAL = ("final_obs", "final_state", "final_avail")
INPUTS = ("actions", "mask", "policy", "scripted")  # what comes in, and what the scripted policies say
TENSORS = ("match", "match_index", *OUTPUTS, *FINAL, *INPUTS)  # what the game of every batch has
# Numbers that every life cycle goes by. idle: the action of a match that is over.
RULE = ("agents", "actions", "obs_dim", "state_dim", "limit", "autoreset", "idle", "matches_per_episode")


# ---- the life cycle of a match, for CPU and CUDA: templates, whose last free names `life_cycle` binds ----
# A match m has its outputs in row m of `game` and its simulation in row `row` of `g`, which has `match` and `rule`.
def _advance(op, m, row, lane, lanes, g, game):
    """Plays a step or freezes the match. Returns whether the match plays, whether to show it, whether to restart it."""
    rule, match = g.rule, g.match
    stage = match[row, STAGE]
    playing = op == PLAY and stage == RUNNING
    freezing = op == PLAY and stage == OVER
    restarting = op == RESTART and game.mask[m]
    barrier()
    if op == PLAY:
        terminated, won = step_match(playing, m, row, lane, lanes, g, game)
        if playing and lane == 0:
            match[row, STEP] += 1
            truncated = not terminated and match[row, STEP] >= rule.limit
            over = terminated or truncated
            if over:
                match[row, STAGE] = OVER
            if over and game.match_index[m] + 1 < rule.matches_per_episode:  # the episode goes on with the next match
                terminated, truncated = False, False
            game.terminated[m], game.truncated[m], game.won[m] = terminated, truncated, won and over
        if freezing:
            freeze_match(m, row, lane, lanes, g, game)
            for a in range(lane, rule.agents, lanes):
                game.reward[m, a] = 0
            if lane == 0:
                match[row, STAGE] = FROZEN
        barrier()
    return playing, playing or freezing or op == OBSERVE, restarting


def _restart(playing, restarting, m, row, lane, lanes, g, game):
    """Sets up the next match if asked to, within an episode of several, or by autoreset. Returns whether it did."""
    rule, match = g.rule, g.match
    over = playing and match[row, STAGE] == OVER
    goes_on = over and game.match_index[m] + 1 < rule.matches_per_episode
    finished = over and rule.autoreset == 1 and not goes_on
    restarting = restarting or finished or goes_on
    barrier()
    if finished:
        keep(m, lane, lanes, rule, game)
    elif restarting and not goes_on:
        for a in range(lane, rule.agents, lanes):
            game.reward[m, a] = 0
        if lane == 0:
            game.terminated[m], game.truncated[m], game.won[m] = False, False, False
    if restarting and lane == 0:
        game.match_index[m] = game.match_index[m] + 1 if goes_on else 0
        match[row, EPISODE] += 1
        match[row, STEP], match[row, STAGE] = 0, RUNNING
    barrier()
    if restarting:
        reset_match(m, row, lane, lanes, g, game)
    barrier()
    return restarting


def _in_a_row(op, m, row, lane, lanes, g, game):
    playing, shown, restarting = advance(op, m, row, lane, lanes, g, game)
    observe_match(shown, m, row, lane, lanes, g, game)
    restarted = restart(playing, restarting, m, row, lane, lanes, g, game)
    observe_match(restarted, m, row, lane, lanes, g, game)


def _in_a_loop(op, m, row, lane, lanes, g, game):
    playing, shown, restarting = advance(op, m, row, lane, lanes, g, game)
    for turn in range(2):
        if turn == 1:
            shown = restart(playing, restarting, m, row, lane, lanes, g, game)
        observe_match(shown, m, row, lane, lanes, g, game)


def bind(template, name, **functions):
    """The template as a function for compiled code, under this name, with `functions` in place of its free names."""
    return scalar(compiler.rebind(template, name, **functions))


def life_cycle(name, step_match, freeze_match, reset_match, observe_match, compact=False):
    """What one call does for a match, `run(op, m, row, lane, lanes, g, game)`, made of the parts of an environment:

        step_match(playing, ...)    plays a step if the match is `playing`; returns (terminated, won) in the first lane
        freeze_match(...)           prepares a match that is over for being shown as frozen
        reset_match(...)            sets up a match
        observe_match(shown, ...)   writes obs, state, avail and alive if the match is to be `shown`

    `...` is m, row, lane, lanes, g, game. All lanes of all matches call step_match and observe_match, which may
    therefore call barrier(). `compact` code has observe_match once, not twice; on CUDA this can take more registers.
    """
    advance = bind(_advance, f"{name}_advance", step_match=step_match, freeze_match=freeze_match)
    restart = bind(_restart, f"{name}_restart", reset_match=reset_match)
    parts = {"advance": advance, "restart": restart, "observe_match": observe_match}
    return bind(_in_a_loop if compact else _in_a_row, f"{name}_life_cycle", **parts)


@scalar
def available_action(m, a, number, rule, game):
    """One of the available actions, by a random number."""
    available = 0
    for action in range(rule.actions):
        available |= int(game.avail[m, a, action]) << action
    return pick_bit(available, number)


@scalar
def keep(m, lane, lanes, rule, game):
    """Copies the last observation, state and mask of a match whose next one starts in the same step."""
    for a in range(rule.agents):
        for column in range(lane, rule.obs_dim, lanes):
            game.final_obs[m, a, column] = game.obs[m, a, column]
        for action in range(lane, rule.actions, lanes):
            game.final_avail[m, a, action] = game.avail[m, a, action]
    for column in range(lane, rule.state_dim, lanes):
        game.final_state[m, column] = game.state[m, column]


@scalar
def observe_last_action(m, a, b, k, seen, rule, game):
    """The last action of agent b, the k-th of a's others, one-hot: columns at the end of a's observation."""
    first = rule.obs_dim - (rule.agents - 1 - k) * rule.actions
    shown = seen and game.match[m, STEP] > 0
    for action in range(rule.actions):
        game.obs[m, a, first + action] = shown and game.last[m, b] == action


# ---- the parts of the life cycle of an environment that is four functions of one match: templates too ----
# The first lane plays the rules; all of them write what is seen.
Simulation = namedtuple("Simulation", "match rule")


def _step_match(playing, m, row, lane, lanes, g, game):
    terminated, won = False, False
    if playing and lane == 0:
        terminated, won = step_one(m, g.rule, game)
    return terminated, won


def _freeze_match(m, row, lane, lanes, g, game):
    pass


def _reset_match(m, row, lane, lanes, g, game):
    if lane == 0:
        reset_one(m, g.rule, game)


def _observe_match(shown, m, row, lane, lanes, g, game):
    if shown and game.match[m, STAGE] == FROZEN:
        blank(m, lane, lanes, g.rule, game)
    elif shown:
        observe_one(m, lane, lanes, g.rule, game)


@scalar
def blank(m, lane, lanes, rule, game):
    """A frozen match: nothing to see, nobody alive, only the idle action available."""
    for a in range(rule.agents):
        for column in range(lane, rule.obs_dim, lanes):
            game.obs[m, a, column] = 0
        for action in range(lane, rule.actions, lanes):
            game.avail[m, a, action] = action == rule.idle
    for a in range(lane, rule.agents, lanes):
        game.alive[m, a] = False
    for column in range(lane, rule.state_dim, lanes):
        game.state[m, column] = 0


def _program(op, m, lane, lanes, rule, game):
    run_match(op, m, m, lane, lanes, Simulation(game.match, rule), game)


def _scripted(op, m, lane, lanes, rule, game):
    for a in range(lane, rule.agents, lanes):
        game.scripted[m, a] = act_one(m, a, game.policy[m, a], rule, game)


@functools.cache
def _programs(*functions):
    """What `compile_rules` runs: the program of the life cycle and that of the scripted policies."""
    where = functions[0].__module__.replace(".", "_")
    names = {function.__name__: function for function in functions}
    templates = (_step_match, _freeze_match, _reset_match, _observe_match)
    parts = {part.__name__[1:]: bind(part, f"{where}{part.__name__}", **names) for part in templates}
    run_match = life_cycle(where, **parts)
    return bind(_program, f"{where}_program", run_match=run_match), bind(_scripted, f"{where}_scripted", **names)


# ---- what comes from outside ----
MOST = 2**31 - 1  # of a number that the rules go by
MOST_STEPS = 100_000  # of a match
MOST_REWARD = 1e6


def whole_seed(seed):
    try:
        return operator.index(seed)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"seed is a whole number, not {seed!r}") from None


def memory_of(device):
    """Bytes that a device has, in use or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):  # Windows refuses by itself
        return math.inf
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_flag(name, value):
    """A ValueError unless the option is True or False; 0 and 1 will do."""
    if not isinstance(value, (bool, np.bool_)) and not (isinstance(value, int) and value in (0, 1)):
        raise ValueError(f"{name} is True or False, not {value!r}")


def check_number(name, value, least, most):
    """A ValueError unless the option is a number in this range."""
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= value <= most:
        raise ValueError(f"{name} is a number from {least:g} to {most:g}, not {value!r}")


def check_whole_number(name, value, least, most):
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= value <= most:
        raise ValueError(f"{name} is a whole number from {least} to {most}, not {value!r}")


def number_table(values, shape):
    """The values as a tensor of that shape, of rewards that are small enough; None if they are something else."""
    try:
        table = torch.tensor(values, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return table if table.shape == shape and (table.abs() <= MOST_REWARD).all() else None


def check_range(values, least, most, called):
    """A ValueError unless all values are finite and from `least` to `most`, numbers or tensors that broadcast.

    `called(*index)` is what the message calls a value.
    """
    least, most = (torch.as_tensor(limit, device=values.device).expand(values.shape) for limit in (least, most))
    wrong = ~values.isfinite() | (values < least) | (values > most)
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        limits = f"{least[index].item():g} to {most[index].item():g}"
        raise ValueError(f"{called(*index)} is {values[index].item():g}, which is not a number from {limits}")


class GameFailed(RuntimeError):
    """A game has failed so often that it is given up; the message is one line."""


class Batch:
    """`num_envs` matches at a time. What its methods return is overwritten by the next call: clone what you keep."""

    policies = ()
    default_others = ()  # the policies that partners are drawn from where none are named; empty: all
    team_reward = True  # whether all agents earn the same; if not, an agent's own game ends when it leaves
    return_scale = 5.0  # how large returns get, roughly: what learners divide rewards by
    zero_sum = False  # whether all rewards of a step add up to nothing
    ego_first = False  # whether observations list the agents from oneself on and round, or in order without oneself
    obs_bound = 1.0  # no number of an observation is larger, or smaller than its negative
    sides = None  # the side, 0 or 1, of each agent, where there are two with opposing interests
    learner_side = 0  # whose seats a single learner rotates through, where there are sides
    simulated = True  # whether matches can be copied and steps captured in a CUDA graph, or other programs play them
    passed_on = ()  # options that go to another package as they are; None: all that are not known
    ranges: ClassVar = {}  # (least, most) of tensors of the simulation by name: numbers, or tensors that broadcast
    match_axis: ClassVar = {}  # which axis of a tensor of the simulation is that of the matches, where it is not 0
    goals = ()  # what an agent may want to reach, by name, where the environment has a `goal_reached`
    grid = None  # (rows, columns, channels), where observations begin with such a grid; actions 0 to 3 are moves then

    def __new__(cls, name, num_envs=1, *arguments, **options):
        batch = super().__new__(cls)
        batch._made_with = name, arguments, options  # for another one like it
        return batch

    def __init__(
        self,
        name,
        num_envs,
        agents,
        sizes,
        simulation,
        *,
        device="cpu",
        seed=0,
        matches_per_episode=1,
        autoreset=False,
        agent_state=False,
        check=None,
    ):
        check_flag("autoreset", autoreset)
        check_flag("agent_state", agent_state)
        check_flag("check", bool(check) if check is None else check)
        self.name, self.num_envs, self.device, self.agents = name, num_envs, torch.device(device), agents
        self.n_agents, self.autoreset, self._started = len(agents), bool(autoreset), False
        self._seed = whole_seed(seed)
        self.n_actions, self.obs_dim, self.state_dim, self.match_limit = sizes
        self.matches_per_episode = matches_per_episode  # matches in a row with the same partners, which are one episode
        self.episode_limit = self.match_limit * matches_per_episode
        self.check = num_envs <= 64 and self.device.type == "cpu" if check is None else bool(check)
        modes = gymnasium.vector.AutoresetMode
        self.metadata = {
            "name": name,
            "render_modes": ["rgb_array"],
            "autoreset_mode": modes.SAME_STEP if autoreset else modes.DISABLED,
        }
        shape, bound = (self.n_agents, self.obs_dim), self.obs_bound
        self.single_observation_space = gymnasium.spaces.Box(-bound, bound, shape, np.float32)
        self.single_action_space = gymnasium.spaces.MultiDiscrete([self.n_actions] * self.n_agents)

        def blank(dtype, *shape):
            return torch.zeros(shape, dtype=dtype, device=self.device)

        of_agent = self.obs_dim + self.n_actions + (self.agent_state_dim if agent_state else 0)
        numbers = num_envs * (self.n_agents * of_agent + self.state_dim)
        numbers += sum(math.prod(shape) for _, shape in simulation.values())
        if numbers * 4 > memory_of(self.device):
            gigabytes = f"{numbers * 4 / 1e9:.3g} GB, and there are {memory_of(self.device) / 1e9:.3g}"
            raise ValueError(f"num_envs {num_envs}: that many matches of {name} take {gigabytes}")
        number, yes, integer, matches, agents = torch.float32, torch.bool, torch.int64, num_envs, self.n_agents
        self._simulation = {name: blank(dtype, *shape) for name, (dtype, shape) in simulation.items()}
        self._simulation["match"] = blank(integer, matches, 4)
        self._simulation["match_index"] = blank(integer, matches)
        kept = matches if autoreset else 0
        self._outputs = {
            "obs": blank(number, matches, agents, self.obs_dim),
            "state": blank(number, matches, self.state_dim),
            "avail": blank(yes, matches, agents, self.n_actions),
            "alive": blank(yes, matches, agents),
            "reward": blank(number, matches, agents),
            "terminated": blank(yes, matches),
            "truncated": blank(yes, matches),
            "won": blank(yes, matches),
            "final_obs": blank(number, kept, agents, self.obs_dim),
            "final_state": blank(number, kept, self.state_dim),
            "final_avail": blank(yes, kept, agents, self.n_actions),
        }
        self._simulation["match"][:, STAGE] = FROZEN
        self.actions, self._mask = blank(integer, matches, agents), blank(yes, matches)
        self._policy, self._scripted = blank(integer, matches, agents), blank(integer, matches, agents)
        self._info = {
            key: self._outputs[key] for key in ("state", "avail", "alive", "won", *(FINAL if autoreset else ()))
        }
        self._info["invalid"] = blank(yes, matches)
        self._info["match_index"] = self._simulation["match_index"]
        if agent_state:
            self._info["agent_state"] = blank(number, matches, agents, self.agent_state_dim)

    @functools.cached_property
    def observation_space(self):  # made when asked for: its bounds take twice the memory of the observations
        return gymnasium.vector.utils.batch_space(self.single_observation_space, self.num_envs)

    @functools.cached_property
    def action_space(self):
        return gymnasium.vector.utils.batch_space(self.single_action_space, self.num_envs)

    def _tensors(self):
        """All that a program works on, by name."""
        hands = {"actions": self.actions, "mask": self._mask, "policy": self._policy, "scripted": self._scripted}
        return {**self._simulation, **self._outputs, **hands}

    def _rule_numbers(self, idle):
        """The numbers of RULE, by name."""
        sizes = (self.n_agents, self.n_actions, self.obs_dim, self.state_dim)
        return dict(zip(RULE, (*sizes, self.match_limit, int(self.autoreset), idle, self.matches_per_episode)))

    def compile_rules(self, functions, game_type, rule_type, idle, tensors=None, lanes=16, **numbers):
        """Compiles `functions`, reset_one, step_one, observe_one and act_one, as what plays the matches.

        `game_type`, a named tuple, has the arrays that they work on: TENSORS, those of the simulation and `tensors`.
        `rule_type` has the numbers that they go by: RULE and `numbers`.
        """
        everything = {**self._tensors(), **(tensors or {})}
        game = game_type(**{name: compiler.view(everything[name]) for name in game_type._fields})
        numbers = {**self._rule_numbers(idle), **numbers}
        for name, value in numbers.items():
            check_number(name, value, -MOST, MOST)
        rule = rule_type(**numbers)
        self._run, self._act = (
            compiler.CompiledRules(program, rule, game, self.device, lanes) for program in _programs(*functions)
        )

    @property
    def obs(self):
        """The observations now, (num_envs, n_agents, obs_dim)."""
        return self._outputs["obs"]

    @property
    def reward(self):
        """What the last step earned, (num_envs, n_agents)."""
        return self._outputs["reward"]

    @property
    def terminated(self):
        """Which matches have ended, other than by the time limit, (num_envs,)."""
        return self._outputs["terminated"]

    @property
    def info(self):
        """State, masks and the rest now, as reset and step return them."""
        return self._info

    @property
    def agent_state_dim(self):
        """Numbers in a row of info["agent_state"]."""
        return self.state_dim + self.obs_dim

    @property
    def leaving_ends(self):
        """Whether an agent that leaves has ended its own episode: with rewards of its own, in the only match."""
        return not self.team_reward and self.matches_per_episode == 1

    @property
    def steps(self):
        """How many steps of its match each has played, (num_envs,)."""
        return self._simulation["match"][:, STEP]

    # ---- playing ----
    def reset(self, seed=None, mask=None):
        """Starts all matches, or those of the mask, anew; with a seed their random streams begin again too."""
        seed = None if seed is None else whole_seed(seed)
        if mask is None:
            self._mask.fill_(True)
        else:
            mask = self._given(mask, f"mask is a boolean tensor of shape ({self.num_envs},)")
            if mask.shape != (self.num_envs,) or mask.dtype != torch.bool:
                given = f"{mask.dtype} {tuple(mask.shape)}"
                raise ValueError(f"mask is a boolean tensor of shape ({self.num_envs},), not {given}")
            self._mask.copy_(mask)
        if seed is None and not self._started:
            seed = self._seed
        if seed is not None:
            self._seed_matches(seed, None if not self._started else self._mask)
        if not self._started and mask is not None:
            self._run(OBSERVE)  # the matches left out wait, frozen
        self._started = True
        self._run(RESTART)
        return self._shown()

    def step(self, actions):
        """Plays one step of all running matches. What it returns is overwritten by the next call."""
        if not self._started:
            raise RuntimeError("reset() comes before step()")
        if actions is not self.actions:
            self.actions.copy_(self._integers("actions", actions))
        if self.check:
            self._refuse_unavailable()
        self._run(PLAY)
        out, (obs, info) = self._outputs, self._shown()
        return obs, out["reward"], out["terminated"], out["truncated"], info

    def scripted_actions(self, policy):
        """What built-in policies do now: one of `policies` for all, or a tensor (num_envs, n_agents) of places in it.

        (num_envs, n_agents) integers, overwritten by the next call. `random` draws anew each step, not each call.
        On CUDA without `check`, a number out of range means the policy that is nearest to it.
        """
        if not self._started:
            raise RuntimeError("reset() comes before scripted_actions()")
        if isinstance(policy, str):
            if policy not in self.policies:
                raise ValueError(f"unknown policy {policy!r}: one of {', '.join(self.policies)}")
            self._policy.fill_(self.policies.index(policy))
        else:
            policy, last = self._integers("policies", policy), len(self.policies) - 1
            torch.clamp(policy, 0, last, out=self._policy)  # the rules look up what they say, without a check
            if (self.check or self.device.type == "cpu") and not torch.equal(policy, self._policy):
                raise ValueError(f"policies are numbered 0 to {last}: {', '.join(self.policies)}")
        self._act()
        return self._scripted

    def _shown(self):
        """(obs, info) now. What each agent would see if it saw everything is made only if it was asked for."""
        if "agent_state" in self._info:
            self._info["agent_state"].copy_(self._agent_state())
        return self._outputs["obs"], self._info

    def _agent_state(self):
        """(num_envs, n_agents, agent_state_dim): here the global state and the agent's own observation."""
        obs, state = self._outputs["obs"], self._outputs["state"]
        return torch.cat((state.unsqueeze(1).expand(-1, self.n_agents, -1), obs), -1)

    @property
    def visible(self):
        """(num_envs, n_agents, n_agents) which agents each of them sees now, itself included."""
        return torch.ones((1, 1, 1), dtype=torch.bool, device=self.device).expand(self.num_envs, *2 * (self.n_agents,))

    def _with_oneself(self, others):
        """The same of all agents, true of oneself: `others` (num_envs, n_agents, n_agents - 1) in order."""
        if self.n_agents == 1:
            return Batch.visible.fget(self)
        agent = torch.arange(self.n_agents, device=self.device)
        place = (agent - (agent > agent.unsqueeze(1)).long()).clamp(max=self.n_agents - 2)
        return others.gather(2, place.expand(self.num_envs, -1, -1)) | (agent == agent.unsqueeze(1))

    @property
    def about_others(self):
        """(obs_dim,) which numbers of an observation tell of the other agents."""
        return self._about_others(torch.arange(self.obs_dim, device=self.device))

    def _about_others(self, column):
        return torch.ones_like(column, dtype=torch.bool)

    # ---- looking into it ----
    def snapshot(self):
        """A copy of the whole simulation, random streams included: tensors by name."""
        return {key: tensor.clone() for key, tensor in {**self._simulation, **self._outputs}.items()}

    def restore(self, snapshot):
        """Puts a snapshot back; returns (obs, info) as they were then. One that cannot be changes nothing."""
        self._refuse_snapshot(snapshot)
        before = self.snapshot()
        self._put(snapshot)
        self._run(OBSERVE)  # what is seen follows from the simulation
        for key in ("avail", "alive"):
            wrong = snapshot[key].to(self.device) & ~self._outputs[key]
            if wrong.any():
                self._put(before)
                index = ", ".join(map(str, wrong.nonzero()[0].tolist()))
                raise ValueError(f"the snapshot does not fit: {key}[{index}] is true, but not in its simulation")
        self._started = True
        return self._shown()

    @functools.cached_property
    def grid_symmetries(self):
        """Ways to turn and mirror grids: the cell that each cell comes from (ways, cells), what each action becomes
        (ways, actions), and which action becomes it. Actions 0 to 3 are up, down, left and right.
        """
        rows, columns, _ = self.grid
        cells, actions = [torch.arange(rows * columns).view(rows, columns)], [torch.arange(self.n_actions)]
        changes = [(lambda grid: grid.flip(0), (1, 0, 2, 3)), (lambda grid: grid.flip(1), (0, 1, 3, 2))]
        if rows == columns:
            changes.append((lambda grid: grid.T, (2, 3, 0, 1)))
        for change, moves in changes:
            cells += [change(grid) for grid in cells]
            actions += [torch.tensor((*moves, *range(4, self.n_actions)))[action] for action in actions]
        cells, actions = torch.stack(cells).flatten(1), torch.stack(actions)
        return cells.to(self.device), actions.to(self.device), actions.argsort(1).to(self.device)

    def turn(self, values):
        """Turns or mirrors each row of observations at random, with its actions, in place: `values` may have `obs`
        (rows, obs_dim), of which only the grid is turned, `action` (rows,), `avail` and `policy` (rows, actions).
        """
        cells, becomes, comes_from = self.grid_symmetries
        way = torch.randint(len(cells), (len(values["obs"]),), device=self.device)
        grid = values["obs"][:, : math.prod(self.grid)].unflatten(1, (cells.shape[1], -1))
        grid.copy_(grid.gather(1, cells[way].unsqueeze(-1).expand_as(grid)))
        for name in ("avail", "policy"):
            if name in values:
                values[name].copy_(values[name].gather(1, comes_from[way]))
        if "action" in values:
            values["action"].copy_(becomes[way, values["action"]])

    def make_copy(self, num_envs):
        """Another batch of such matches, single ones without autoreset, for `set_state`: to look ahead in them."""
        if not self.simulated:
            raise ValueError(f"{self.name}: matches of the real game cannot be copied")
        name, arguments, options = self._made_with
        options = {**options, "autoreset": False, "matches_per_episode": 1, "check": False}
        batch = type(self)(name, num_envs, *arguments, **options)
        batch.name = self.name
        return batch

    def match_state(self):
        """What the next step of every match depends on, by name: the tensors themselves, matches first."""
        state = {name: tensor.movedim(self.match_axis.get(name, 0), 0) for name, tensor in self._simulation.items()}
        return state | {name: self._outputs[name] for name in ("avail", "alive")}

    def set_state(self, state, rows, look=True, same_chance=False):
        """Copies matches `rows` (num_envs,) of such a `state` into this batch, on the device and without a check.

        Every copy goes on with a random stream of its own; with same_chance=True with that of the match, whose future
        it then foretells. With look=False what is seen follows with the next step only.
        """
        for name, tensor in self.match_state().items():
            torch.index_select(state[name], 0, rows, out=tensor)
        self._started = True
        if look:
            self._run(OBSERVE)
        if not same_chance:
            self._draw_anew()

    def _draw_anew(self):
        """New random streams, by the ones before, the time and the place in this batch: no state, no host, no order."""
        match = self._simulation["match"]
        scramble = getattr(compiler.scramble, "py_func", compiler.scramble)
        words = torch.arange(2, device=self.device).unsqueeze(1)  # (2, 1): a key has two, of 32 bits
        place = torch.arange(self.num_envs, device=self.device)
        for number in (match[:, KEY], match[:, KEY] >> 32, match[:, EPISODE], match[:, STEP], place + 1):
            words = scramble(((words + number) * 0x9E3779B9) & 0xFFFFFFFF)
        match[:, KEY] = ((words[0] >> 1) << 32) | words[1]

    def _put(self, snapshot):
        for key, tensor in {**self._simulation, **self._outputs}.items():
            tensor.copy_(snapshot[key])

    def _refuse_snapshot(self, snapshot):
        if not isinstance(snapshot, dict):
            raise ValueError(f"a snapshot is a dictionary of tensors, not {type(snapshot).__name__}")
        match = torch.tensor([[0, -1, 0, RUNNING], [(1 << 63) - 1, 1 << 62, self.match_limit, FROZEN]])
        ours = {"match": match, "match_index": (0, self.matches_per_episode - 1)}
        for key, like in {**self._simulation, **self._outputs}.items():
            tensor, wanted = snapshot.get(key), f"{like.dtype} {tuple(like.shape)}"
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
                raise ValueError(f"the snapshot does not fit: {key} should be a tensor {wanted}")
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                given = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(f"the snapshot does not fit: {key} should be {wanted}, not {given}")
            limits = {**self.ranges, **ours}.get(key, (-math.inf, math.inf))
            if key in self._simulation or tensor.is_floating_point():
                check_range(tensor, *limits, functools.partial(self._called, key))

    def _called(self, key, *index):
        """A value of the simulation, in a message."""
        if key == "match":
            return f"the {MATCH[index[1]]} of match {index[0]}"
        return f"{key}[{', '.join(map(str, index))}]"

    def _given(self, values, wanted):
        """The values as a tensor on the device."""
        try:
            tensor = torch.as_tensor(values, device=self.device)
            if tensor.layout == torch.strided:
                return tensor
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
        raise ValueError(f"{wanted}, not {type(values).__name__}") from None

    def _integers(self, name, values):
        shape = tuple(self.actions.shape)
        tensor = self._given(values, f"{name} are integers of shape {shape}")
        whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)
        if tensor.shape != shape or not whole:
            raise ValueError(f"{name} are integers of shape {shape}, not {tensor.dtype} {tuple(tensor.shape)}")
        return tensor.to(self.actions.dtype)

    def __reduce__(self):  # what copy, deepcopy and pickle ask for
        raise TypeError(
            f"{self.name}: a batch cannot be copied or pickled, since its programs write to the tensors they were made "
            "with; snapshot() copies the matches, and restore() puts them into a batch made with the same arguments"
        )

    def origin(self, agent, index=0):
        """What the places in an agent's observation are measured from, where an environment has `places`."""
        return torch.zeros(2, device=self.device)

    def render(self, index=0, size=480, sight=None, goals=None):
        """A picture of match `index`: RGB bytes (height, width, 3), `size` pixels wide and at most as high.

        `sight` is an agent, or several, whose sight is shaded. `goals` are predictions to mark, each in the colour of
        its agent: (agent, x, y) in a battle, (agent, row, column) on a grid.
        """
        self._check_index(index)
        check_whole_number("size", size, 16, 8192)
        for agent in sight if isinstance(sight, (list, tuple, np.ndarray)) else [] if sight is None else [sight]:
            check_whole_number("sight", agent, 0, self.n_agents - 1)
        for goal in goals or ():
            try:
                agent, *place = (float(number) for number in goal)
            except (TypeError, ValueError):
                agent, place = math.nan, ()
            if agent not in range(self.n_agents) or len(place) != 2 or not all(map(math.isfinite, place)):
                raise ValueError(f"a goal is an agent, 0 to {self.n_agents - 1}, and two coordinates, not {goal!r}")
        return render.draw(self.scene(index), size, sight, goals)

    def _check_index(self, index):
        check_whole_number("index", index, 0, self.num_envs - 1)

    def close(self):
        pass

    def _seed_matches(self, seed, mask):
        match = self._simulation["match"]
        high, low = (int(word) for word in np.random.SeedSequence(seed % (1 << 63)).generate_state(2))
        numbers = torch.arange(self.num_envs, device=self.device)
        keys = ((high >> 1) << 32) | ((low + numbers * 0x9E3779B9) & 0xFFFFFFFF)  # no two matches of a batch alike
        chosen = slice(None) if mask is None else mask
        match[chosen, KEY] = keys[chosen]
        match[chosen, EPISODE] = -1

    def _refuse_unavailable(self):
        actions, avail = self.actions, self._outputs["avail"]
        known = actions.clamp(0, self.n_actions - 1)
        wrong = (actions != known) | ~avail.gather(2, known.unsqueeze(2)).squeeze(2)
        if wrong.any():
            m, a = wrong.nonzero()[0].tolist()
            allowed = avail[m, a].nonzero().flatten().tolist()
            raise ValueError(
                f"match {m}, agent {a} ({self.agents[a]}): action {int(actions[m, a])} is not available, only {allowed}"
            )

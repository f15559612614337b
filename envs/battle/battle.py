"""Battles after SMAC, the StarCraft multi-agent challenge: its 23 maps, observations, actions, masks and rewards.

    envs/battle/rules.py         what one unit does in one game loop
    envs/battle/observations.py  observations, state and available actions
    envs/battle/policies.py      scripted policies
    envs/battle/scene.py         what is drawn
    envs/battle/setup.py         units and their places, from the tables of envs/battle/data.py

Here the rules become a program (see envs/compiler.py, and `life_cycle` in envs/batch.py), and the program a batch of
matches with options. docs/battles.md has the rules in words.
"""

import inspect
import math
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch

from envs import compiler
from envs.batch import OBSERVE, STEP, Batch, check_flag, check_number, check_range, check_whole_number, life_cycle
from envs.battle import paths
from envs.battle.data import MAPS, RACES, RULES, SCENARIOS, TERRAINS, TYPES, Map, Scenario
from envs.battle.observations import FIRST_SCOUT, POINTS, observe_match
from envs.battle.policies import POLICIES, act_here
from envs.battle.rules import (
    ATTACK,
    BEFORE,
    COOLDOWN,
    DAMAGE,
    DETOUR,
    DETOUR_LOOPS,
    ENERGY,
    ENERGY_MAX,
    ENGAGE,
    F32,
    FACING,
    FACINGS,
    FIGHT,
    FIRING,
    FLIES,
    FREE,
    HEALS,
    HEALTH,
    HITS_IN,
    HURT_AT,
    KEPT_REAL,
    KEPT_WHOLE,
    LAST_ACTION,
    LOOPS,
    MAX_HEALTH,
    MAX_SHIELD,
    NEXT_X,
    NO_OP,
    NORTH,
    ORDER,
    RANGE,
    REAL,
    SEES,
    SHIELD,
    SHOOTER,
    SHOT,
    SHOT_AT_OTHERS,
    SIGHT,
    SPEED,
    SPLASH,
    STANCE,
    START,
    STAT,
    STAY,
    STOP,
    SWEPT,
    TARGET,
    TRAITS,
    WHOLE,
    ZERO,
    Game,
    Rule,
    X,
    Y,
    battle_reward,
    decide,
    judge,
    move,
    place,
    scale_of,
    suffer,
    take_order,
    world_in_place,
    world_of,
)  # fmt: skip
from envs.battle.scene import describe
from envs.battle.setup import MOST_AGENTS, build_kinds, build_units, resize
from envs.compiler import barrier, scalar


# ---- the parts of the life cycle; every unit has a lane ----
@scalar
def step_match(playing, m, row, lane, lanes, g, game):
    """The game loops of one step. Returns (terminated, won), which is right in the first lane."""
    units, agents = g.rule.units, g.rule.agents
    if playing:
        for u in range(lane, units, lanes):
            g.real[BEFORE, row, u] = g.real[HEALTH, row, u] + g.real[SHIELD, row, u]
        for a in range(lane, agents, lanes):
            action = game.actions[m, a]
            if action < 0 or action >= g.rule.actions or not game.avail[m, a, action]:
                action = STOP if g.real[HEALTH, row, a] > ZERO else NO_OP
            take_order(row, a, action, g)
    barrier()
    for k in range(LOOPS):
        loop, at = np.uint32(g.match[row, STEP] * LOOPS + k), NEXT_X * (k & 1)
        if playing:
            for u in range(lane, units, lanes):
                decide(row, u, at, loop, g)
        barrier()
        if playing:
            for u in range(lane, units, lanes):
                suffer(row, u, at, loop, g)
                move(row, u, at, loop, g)
        barrier()
    terminated, won = False, False
    if playing and lane == 0:
        reward, terminated, won = judge(row, g)
        for a in range(agents):
            game.reward[m, a] = reward
    return terminated, won


@scalar
def freeze_match(m, row, lane, lanes, g, game):
    """The dead neither see nor are seen, so a match without living units shows nothing."""
    for u in range(lane, g.rule.units, lanes):
        g.real[HEALTH, row, u], g.whole[LAST_ACTION, row, u] = ZERO, -1


@scalar
def reset_match(m, row, lane, lanes, g, game):
    for u in range(lane, g.rule.units, lanes):
        place(row, u, g)


run_one = life_cycle("battle", step_match, freeze_match, reset_match, observe_match, compact=True)


# ---- the programs, on the arrays of the batch ----
@scalar
def run_here(op, m, lane, lanes, rule, game):
    run_one(op, m, m, lane, lanes, world_in_place(rule, game), game)


@scalar
def score_here(op, m, lane, lanes, rule, game):
    """The shaped reward since BEFORE, for `reward_since`."""
    if lane == 0:
        g = world_in_place(rule, game)
        game.reward[m, 0] = battle_reward(m, g) / scale_of(m, g)


FLAGS = ("auto_allies", "obs_last_action", "obs_pathing_grid", "obs_terrain_height", "obs_timestep_number",
         "obs_instead_of_state", "state_last_action", "state_timestep_number", "reward_sparse", "reward_only_positive",
         "reward_scale")  # fmt: skip
REWARDS = ("reward_death_value", "reward_win", "reward_defeat", "reward_negative_scale")
MOST_REWARD = 1e6
MOST_WHO_KNOW = 24  # agents that fit into the bits of who knows of an enemy
MANY = 4  # foes that a CPU compares at a time; on CUDA every lane looks at one after the other


OPEN_FIELD = TERRAINS["field"]
FIXED_TEAMS = Scenario("", 0, 0, unit_ranges=False, own_pos=False)  # on SMAC's maps


def rare_kind(scenario):
    """The number of the kind that no random team has alone; -1: none."""
    kinds = list(RACES[scenario.race].values()) if scenario else []
    return next((number for number, kind in enumerate(kinds) if kind.rare), -1)


def ranges_of(rule, stat):
    """The least and most of a unit's fields: real and whole, each (fields, 1, units)."""
    real, whole = (torch.zeros(2, len(names), 1, rule.units, dtype=torch.float32) for names in (REAL, WHOLE))
    real[0], real[1] = -math.inf, math.inf
    strongest = stat.max(1, keepdims=True) if rule.random_teams else stat
    for field, most in ((X, rule.width), (Y, rule.height), (HEALTH, strongest[MAX_HEALTH]), (ENERGY, ENERGY_MAX)):
        real[0, field], real[1, field] = 0, torch.as_tensor(most)
    shield = torch.as_tensor(strongest[MAX_SHIELD])
    real[0, SHIELD], real[1, SHIELD] = 0, torch.where(shield > 0, shield, math.inf)  # without one nobody sees it
    limits = {TARGET: (-1, rule.units - 1), ORDER: (STAY, FIGHT), STANCE: (FREE, FIRING),
              SHOOTER: (SHOT_AT_OTHERS, rule.units - 1), TRAITS: (-1, 0), DETOUR: (-DETOUR_LOOPS, DETOUR_LOOPS),
              SHOT: (SWEPT, rule.units), LAST_ACTION: (-1, rule.actions - 1)}  # fmt: skip
    if rule.random_teams:
        limits[TRAITS] = (-FACING * FACINGS, FACING * FACINGS - 1)
    for field, (least, most) in limits.items():
        whole[0, field], whole[1, field] = least, most
    if rule.few_know:
        whole[1, LAST_ACTION, :, rule.allies :] = FIRST_SCOUT * (rule.allies + 1) - 1
    return {"real": tuple(real), "whole": tuple(whole)}


class Battle(Batch):
    """Matches on one map. docs/battles.md describes the rules and the options; envs.make builds one."""

    policies = POLICIES
    default_others = ("nearest", "weakest")  # and kite where it helps, see __init__
    hit_distance = 1.0  # how near a predicted place must be to count as right
    match_axis: ClassVar = {"real": 1, "whole": 1}  # fields first

    def __init__(
        self,
        name,
        num_envs=1,
        n_agents=None,
        scenario=None,
        *,
        auto_allies=False,
        map_spec=None,
        obs_last_action=False,
        obs_pathing_grid=False,
        obs_terrain_height=False,
        obs_timestep_number=False,
        obs_instead_of_state=False,
        state_last_action=True,
        state_timestep_number=False,
        reward_sparse=False,
        reward_only_positive=True,
        reward_death_value=10.0,
        reward_win=200.0,
        reward_defeat=0.0,
        reward_negative_scale=0.5,
        reward_scale=True,
        reward_scale_rate=20.0,
        **common,
    ):
        given = locals()
        for option in FLAGS:
            check_flag(option, given[option])
        for option in REWARDS:
            check_number(option, given[option], -MOST_REWARD, MOST_REWARD)
        check_number("reward_scale_rate", reward_scale_rate, 1 / MOST_REWARD, MOST_REWARD)
        if not (map_spec is None or isinstance(map_spec, Map)):
            raise ValueError(f"map_spec is a Map of envs/battle/data.py, not {map_spec!r}")
        spec, v2 = scenario or map_spec or MAPS[name], scenario or FIXED_TEAMS
        terrain = OPEN_FIELD if scenario else TERRAINS[spec.terrain]
        ground, waypoints = paths.read_terrain(terrain), paths.waypoints(terrain)
        mmm = scenario.race == "terran" if scenario else spec.types == "MMM"  # Medivacs alone have lost
        if scenario:
            allies, enemies = scenario.allies, scenario.enemies
            kinds, facts, pitch = build_kinds(scenario.race, allies + enemies, ground)
            types, ally_shield = len(kinds), int(scenario.race == "protoss")
            enemy_shield = ally_shield
        else:
            groups, pitch = resize(spec, n_agents, name), 0
            kinds, facts = build_units(spec, groups, ground)
            allies = sum(count for count, _, _ in groups[0])
            enemies = len(kinds) - allies
            types = len(TYPES[spec.types][1])
            ally_shield, enemy_shield = (int(race == "P") for race in spec.races)
        units, none = allies + enemies, np.zeros(allies + enemies, np.float32)
        stat, start = (np.stack([facts.get(name.lower(), none) for name in names]) for names in (STAT, START))
        if not scenario and stat[RANGE, :allies].min() > stat[RANGE, allies:].max():  # else stepping back is giving up
            self.default_others = (*self.default_others, "kite")
        first_attack = ATTACK + FACINGS * v2.cone
        actions = first_attack + (max(allies, enemies) if scenario and mmm else enemies)
        enemies_at = ATTACK - NORTH + (len(POINTS) - 1) * obs_pathing_grid + len(POINTS) * obs_terrain_height
        enemy_width, friend_width = 5 + enemy_shield + types, 5 + ally_shield + types + actions * obs_last_action
        friends_at = enemies_at + enemies * enemy_width
        self_at = friends_at + (allies - 1) * friend_width
        obs_dim = self_at + 1 + ally_shield + 2 * v2.own_pos + 2 * v2.cone + types + obs_timestep_number
        state_units = allies * (4 + ally_shield + 2 * v2.cone + types) + enemies * (3 + enemy_shield + types)
        state_dim = state_units + allies * actions * state_last_action + state_timestep_number
        if obs_instead_of_state:
            state_dim = allies * obs_dim
        self.n_enemies, self.unit_kinds, self.obs_instead_of_state = enemies, kinds, bool(obs_instead_of_state)
        self._ground_rows = list(reversed(terrain.split()))
        names = [f"agent_{a}" if scenario else f"{kinds[a]}_{a}" for a in range(allies)]
        super().__init__(
            name, num_envs, names, (actions, obs_dim, state_dim, spec.limit),
            {"real": (torch.float32, (len(REAL), num_envs, units)),
             "whole": (torch.int32, (len(WHOLE), num_envs, units))}, **common,
        )  # fmt: skip

        full = stat[MAX_HEALTH, allies:].sum() + stat[MAX_SHIELD, allies:].sum()
        best = reward_death_value * enemies + reward_win + full
        if reward_scale and not best >= 1:
            rewards = f"reward_death_value {reward_death_value} and reward_win {reward_win}"
            raise ValueError(f"with {rewards} the best return, to scale by, is {best:g}: it has to be 1 or more")
        scale = F32(best / reward_scale_rate if reward_scale else 1.0)
        if scenario:  # the enemies of a match are random, and so is what they are worth
            scale, best = F32(reward_scale_rate * reward_scale), max(best, 100.0 * enemies + 200)
        self.return_scale = 1.0 if reward_sparse else reward_scale_rate if reward_scale else max(best, 1.0)
        unarmed = (stat[HEALS] == 0) & ((stat[DAMAGE] == 0) | (stat[FLIES] > 0))  # or might be, to fliers that fight
        rule = Rule(
            **self._rule_numbers(NO_OP), allies=allies, units=units, width=ground.shape[1], height=ground.shape[0],
            auto_allies=int(auto_allies), medivacs_do_not_count=int(mmm),
            open_ground=int(waypoints is None), healers=int(stat[HEALS].any()), fliers=int(stat[FLIES].any()),
            splash=int(stat[SPLASH].any()), unarmed=int(RULES["armed_first"] and bool(unarmed.any())),
            near=F32(2 * stat[SPEED].max() + 0.01), many=MANY if self.device.type == "cpu" else units,
            scan_anew=int(RULES["scan_anew"] and bool((stat[SPEED] == 0).any())),
            **{name: int(RULES[name]) for name in ("look_again", "strike_back", "call_for_help", "surround")},
            sparse=int(reward_sparse), only_positive=int(reward_only_positive), win=F32(reward_win),
            defeat=F32(reward_defeat), death=F32(reward_death_value), negative_scale=F32(reward_negative_scale),
            scale=scale, rare=rare_kind(scenario), pitch=F32(pitch), random_teams=1 if scenario else None,
            attack=first_attack, own_place=1 if v2.own_pos else None, unit_ranges=1 if v2.unit_ranges else None,
            cone=1 if v2.cone else None, free_aim=None if v2.action_mask else 1,
            few_know=1 if v2.prob_obs_enemy < 1 or v2.released else None, told=F32(v2.prob_obs_enemy),
            released=1 if v2.released else None,
            ally_shield=ally_shield, enemy_shield=enemy_shield, types=types, last_action=int(obs_last_action),
            pathing_grid=int(obs_pathing_grid), terrain_height=int(obs_terrain_height),
            obs_time=int(obs_timestep_number),
            state_actions=int(state_last_action), state_time=int(state_timestep_number),
            state_is_obs=int(obs_instead_of_state),
            enemies_at=enemies_at, enemy_width=enemy_width, friends_at=friends_at,
            friend_width=friend_width, self_at=self_at, state_units=state_units,
        )  # fmt: skip
        self._rule = rule
        self.ranges = ranges_of(rule, stat)
        constant = {
            "stat": stat,
            "line": np.zeros((1, 1), np.float32),  # CUDA has a line in shared memory for each match
            "start": start,
            "ground": ground.reshape(-1),
            "waypoints": np.zeros((1, 1, 1), np.int16) if waypoints is None else waypoints,
        }
        self._constant = {key: torch.as_tensor(value).to(self.device) for key, value in constant.items()}
        numbers = torch.arange(allies) - allies * torch.eye(allies, dtype=torch.long)
        self._own_first = numbers.argsort(1).to(self.device)  # (agents, agents): oneself, then the others
        tensors = {**self._tensors(), **self._constant}
        game = Game(**{key: compiler.view(tensor) for key, tensor in tensors.items()})
        staged = compiler.Staged(run_one, world_of, KEPT_REAL, KEPT_WHOLE, max(obs_dim, state_units))
        lanes = compiler.lanes_for(units)
        self._run = compiler.CompiledRules(run_here, rule, game, self.device, lanes, staged)
        self._act = compiler.CompiledRules(act_here, rule, game, self.device, lanes)
        self._score = compiler.CompiledRules(score_here, rule, game, self.device, lanes)

    def set_units(self, x=None, y=None, health=None, shield=None, cooldown=None, energy=None, last_action=None):
        """Sets units by hand, (num_envs, allies + enemies) each, `last_action` (num_envs, n_agents) with -1 for none.

        Cooldown is in game loops; setting it ends attacks under way. Setting health or shield counts as damage just
        taken. Returns (obs, info); no step.
        """
        if not self._started:
            raise RuntimeError("reset() comes before set_units()")
        real, whole = self._simulation["real"], self._simulation["whole"]
        fields = {X: x, Y: y, HEALTH: health, SHIELD: shield, COOLDOWN: cooldown, ENERGY: energy}
        agents, given = whole[LAST_ACTION, :, : self.n_agents], {}
        for field, values in fields.items():
            if values is not None:
                limits = (limit[field] for limit in self.ranges["real"])
                given[field] = self._fitting(REAL[field].lower(), values, real[field], *limits)
        if last_action is not None:
            agents[:] = self._fitting("last_action", last_action, agents, -1, self.n_actions - 1)
        for field, values in given.items():
            real[field] = values
        if cooldown is not None:
            real[HITS_IN] = 0
        if health is not None or shield is not None:
            real[HURT_AT] = (self._simulation["match"][:, STEP] * LOOPS).unsqueeze(1).to(real.dtype)
        self._run(OBSERVE)
        return self._shown()

    def reward_since(self, health, shield):
        """(num_envs,) the shaped reward, without win or defeat, for coming from that health and shield to now."""
        real, reward = self._simulation["real"], self._outputs["reward"]
        real[BEFORE] = self._fitting("health", health, real[HEALTH]) + self._fitting("shield", shield, real[SHIELD])
        shown = reward.clone()
        self._score()
        worth = reward[:, 0].clone()
        reward.copy_(shown)
        return worth

    @property
    def agent_state_dim(self):
        if self.obs_instead_of_state:
            return super().agent_state_dim
        return self.state_dim + 4 * (self.n_agents + self.n_enemies) + self.n_actions

    def _agent_state(self):
        """The global state in the view of each agent, itself first, without a limit of sight. Zeros for the dead.

        Every unit also has its distance, x and y from the agent, and whether it is near enough to be seen. The actions
        that are available come last.
        """
        rule, out, agents = self._rule, self._outputs, self.n_agents
        if self.obs_instead_of_state:
            return super()._agent_state()
        x, y, health = (self._simulation["real"][field] for field in (X, Y, HEALTH))
        place = torch.stack((x, y), -1)
        offset = (place.unsqueeze(1) - place[:, :agents].unsqueeze(2)) / self._sights()  # (matches, agents, units, 2)
        distance = offset.square().sum(-1, keepdim=True).sqrt()
        view = torch.cat((distance, offset, distance < 1), -1) * (health > 0).view(len(health), 1, -1, 1)
        order = self._own_first
        view_of_allies = view[:, :, :agents].gather(2, order.view(1, agents, agents, 1).expand(len(view), -1, -1, 4))
        ally_columns = agents * (4 + rule.ally_shield + 2 * (rule.cone is not None) + rule.types)
        action_columns = agents * self.n_actions * rule.state_actions
        sizes = (ally_columns, rule.state_units - ally_columns, action_columns, rule.state_time)
        allies, enemies, actions, time = out["state"].split(sizes, -1)
        parts = [allies.unflatten(1, (agents, -1))[:, order], view_of_allies, view[:, :, agents:]]
        parts += [part.unsqueeze(1).expand(-1, agents, -1) for part in (enemies, time)]
        parts += [actions.unflatten(1, (agents, -1))[:, order]] * rule.state_actions
        whole = torch.cat([*(part.flatten(2) for part in parts), out["avail"]], -1)
        return whole * out["alive"].unsqueeze(-1)

    def units(self):
        """What a match is made of now, by name, each (num_envs, allies + enemies): views, not copies."""
        real = self._simulation["real"]
        named = {"x": X, "y": Y, "health": HEALTH, "shield": SHIELD, "cooldown": COOLDOWN, "energy": ENERGY}
        return {key: real[field] for key, field in named.items()}

    @property
    def visible(self):
        return self._with_oneself(self.places(self.obs)[1][..., self.n_enemies :])

    def _about_others(self, column):
        return (column >= self._rule.friends_at) & (column < self._rule.self_at)

    def places(self, obs):
        """(x and y of every other unit from the agent (..., others, 2), whether it is seen), read off observations.

        Enemies first, then allies in order without the agent itself.
        """
        rule = self._rule
        enemies = obs[..., rule.enemies_at : rule.friends_at].unflatten(-1, (-1, rule.enemy_width))
        friends = obs[..., rule.friends_at : rule.self_at].unflatten(-1, (-1, rule.friend_width))
        both = torch.cat((enemies[..., 1:5], friends[..., 1:5]), -2)  # distance, x, y, health
        return both[..., 1:3] * self._sight(obs), both[..., 3] > 0

    def _sight(self, obs):
        """What distances in observations are divided by."""
        return float(SIGHT)

    def _sights(self):
        """How far the agents see."""
        return float(SIGHT)

    def origin(self, agent, index=0):
        """The agent's own place, from which those in its observation are measured."""
        return torch.stack([self.units()[axis][index, agent] for axis in ("x", "y")])

    def scene(self, index=0):
        """One match as it stands, in plain words and numbers, to be drawn."""
        self._check_index(index)
        real, whole = (self._simulation[name][:, index].cpu().numpy() for name in ("real", "whole"))
        stat, match = self._constant["stat"].cpu().numpy(), self._simulation["match"][index].tolist()
        terminated, won = bool(self._outputs["terminated"][index]), bool(self._outputs["won"][index])
        ground, kinds = self._ground_rows, self.unit_kinds
        if self._rule.random_teams:
            numbers = self.kinds[index].tolist()
            stat, kinds = stat[:, numbers], [kinds[number] for number in numbers]
        return describe(
            self.name, self.episode_limit, ground, kinds, self.n_agents, real, whole, stat, match, terminated, won
        )

    def _fitting(self, name, values, like, least=-math.inf, most=math.inf):
        values = self._given(values, f"{name} has shape {tuple(like.shape)}").detach()
        if values.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(like.shape)}, not {tuple(values.shape)}")
        if values.is_complex():
            raise ValueError(f"{name} has real numbers, not {values.dtype}")
        check_range(values, least, most, lambda m, u: f"{name} of match {m}, unit {u}")
        return values.to(like.dtype)

    def _refuse_snapshot(self, snapshot):
        super()._refuse_snapshot(snapshot)
        aimless = (snapshot["whole"][ORDER] == ENGAGE) & (snapshot["whole"][TARGET] < 0)
        if aimless.any():
            m, u = aimless.nonzero()[0].tolist()
            raise ValueError(
                f"target of match {m}, unit {u} is -1, but its order is to engage it: 0 to {self._rule.units - 1}"
            )

    def _called(self, key, *index):
        if key in ("real", "whole"):
            field, m, u = index
            return f"{(REAL if key == 'real' else WHOLE)[field].lower()} of match {m}, unit {u}"
        return super()._called(key, *index)


def kinds_of(traits):
    return torch.where(traits < 0, -1 - traits, traits) % FACING


class RandomBattle(Battle):
    """Matches of a scenario of SMACv2: random teams at random places. docs/battles.md has what is SMACv2's."""

    passed_on = tuple(
        name for name, p in inspect.signature(Battle.__init__).parameters.items()
        if p.kind is p.KEYWORD_ONLY and name != "map_spec"
    )  # fmt: skip

    def __init__(
        self,
        name,
        num_envs=1,
        n_agents=None,
        *,
        n_enemies=None,
        obs_own_pos=True,
        use_unit_ranges=True,
        conic_fov=False,
        action_mask=True,
        prob_obs_enemy=1.0,
        released_obs=False,
        **options,
    ):
        spec, given = SCENARIOS[name], locals()
        for option in ("obs_own_pos", "use_unit_ranges", "conic_fov", "action_mask", "released_obs"):
            check_flag(option, given[option])
        check_number("prob_obs_enemy", prob_obs_enemy, 0, 1)
        allies = spec.allies if n_agents is None else n_agents
        check_whole_number("n_agents", allies, 1, MOST_AGENTS)
        enemies = allies + spec.enemies - spec.allies if n_enemies is None else n_enemies
        check_whole_number("n_enemies", enemies, 1, MOST_AGENTS)
        if allies + enemies < len(RACES[spec.race]):
            raise ValueError(f"n_agents and n_enemies are {len(RACES[spec.race])} together or more")
        if (prob_obs_enemy < 1 or released_obs) and allies > MOST_WHO_KNOW:
            option = "prob_obs_enemy below 1" if prob_obs_enemy < 1 else "released_obs"
            raise ValueError(f"{option} is for {MOST_WHO_KNOW} agents at most, not {allies}")
        scenario = replace(
            spec, allies=allies, enemies=enemies, own_pos=bool(obs_own_pos), unit_ranges=bool(use_unit_ranges),
            cone=bool(conic_fov), action_mask=bool(action_mask), prob_obs_enemy=float(prob_obs_enemy),
            released=bool(released_obs),
        )  # fmt: skip
        super().__init__(name, num_envs, None, scenario, **options)

    @property
    def kinds(self):
        """(num_envs, allies + enemies): the number of every unit's kind in `unit_kinds`."""
        return kinds_of(self._simulation["whole"][TRAITS])

    def _sight(self, obs):
        if not self._rule.unit_ranges:
            return super()._sight(obs)
        last = self._rule.obs_dim - self._rule.obs_time
        own_kind = obs[..., last - len(self.unit_kinds) : last]
        return (own_kind * self._constant["start"][SEES, : len(self.unit_kinds)]).sum(-1)[..., None, None]

    def _sights(self):
        if not self._rule.unit_ranges:
            return super()._sights()
        return self._constant["start"][SEES][self.kinds[:, : self.n_agents].long()][..., None, None]

    def _refuse_snapshot(self, snapshot):
        super()._refuse_snapshot(snapshot)
        unknown = kinds_of(snapshot["whole"][TRAITS]) >= len(self.unit_kinds)
        if unknown.any():
            m, u = unknown.nonzero()[0].tolist()
            raise ValueError(f"the kind of match {m}, unit {u} is none of 0 to {len(self.unit_kinds) - 1}")

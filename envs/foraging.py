"""Level-based foraging, as in the package lbforaging: players on a grid load food, alone or together.

One match is scalar code on arrays indexed by match m, player a and food f. The foods of a match are kept in row-major
order; level 0 is no food. docs/foraging.md has the rules in words.
"""

import re
from collections import namedtuple

import gymnasium
import numpy as np
import torch

from envs import batch
from envs.batch import (
    EPISODE,
    KEY,
    OBSERVE,
    RULE,
    RUNNING,
    STAGE,
    STEP,
    TENSORS,
    Batch,
    available_action,
    observe_last_action,
)
from envs.compiler import draw, scalar

NONE, NORTH, SOUTH, WEST, EAST, LOAD = range(6)
ACTIONS = ("stay", "up", "down", "left", "right", "load")
HEURISTICS = ("H1", "H2", "H3", "H4")
ORDERS = ("rows", "rows_back", "columns", "columns_back", "diagonal", "inside", "outside", "near")
POLICIES = (*HEURISTICS, *ORDERS, "meet", "random")
H1, H2, H3, H4, ROWS, ROWS_BACK, COLUMNS, COLUMNS_BACK, DIAGONAL, INSIDE, OUTSIDE, NEAR, MEET, RANDOM = range(
    len(POLICIES)
)
GONE = -1
ATTEMPTS = 1000  # draws of a cell, for a player or for all foods
LONGEST = 64  # rows and columns at most
MOST_LEVELS = 1000
NEVER = 1 << 30  # patience of those who do not give up
FOR_PLAYER, FOR_LEVEL, FOR_FOOD, FOR_FOOD_LEVEL, FOR_ACTION = range(5)  # what a random number is for
LANES = 8  # of a match on CUDA
PATTERN = re.compile(r"Foraging(?:-(\d+)s)?-(\d+)x(\d+)-(\d+)p-(\d+)f(-coop)?(-ind)?(-pen)?-v3")
FORM = "Foraging{-2s}-{rows}x{cols}-{players}p-{foods}f{-coop}{-ind}{-pen}-v3"
ORDERS_ID = "foraging_orders"
IDS = (
    "Foraging-8x8-2p-3f-v3",
    "Foraging-8x8-2p-2f-coop-v3",
    "Foraging-2s-8x8-2p-2f-coop-v3",
    "Foraging-10x10-3p-3f-v3",
    "Foraging-15x15-4p-5f-v3",
    ORDERS_ID,
)

Rule = namedtuple(
    "Rule",
    (*RULE, "foods", "rows", "cols", "sight", "coop", "max_level", "max_food", "penalty", "prosocial", "patience")
    + ("one_hot", "rows_seen", "cols_seen", "player_sight", "obs_last_action"),
)
Forage = namedtuple(
    "Forage",
    (*TENSORS, "row", "col", "level", "food_row", "food_col", "food", "spawned", "last", "bumped", "tries", "earned")
    + ("to_row", "to_col"),
)
# level, food: levels of players and foods; spawned: the sum of all food levels at the start; last: actions; bumped:
# whose move failed; tries: a player's loads of a food that failed; to_row, to_col: the cells that players claim


# ---- where things are ----
@scalar
def distance(m, a, f, game):
    return abs(game.row[m, a] - game.food_row[m, f]) + abs(game.col[m, a] - game.food_col[m, f])


@scalar
def food_at(m, row, col, rule, game):
    for f in range(rule.foods):
        if game.food[m, f] > 0 and game.food_row[m, f] == row and game.food_col[m, f] == col:
            return True
    return False


@scalar
def player_at(m, row, col, players, game):
    """Whether one of the first `players` stands there."""
    for a in range(players):
        if game.row[m, a] == row and game.col[m, a] == col:
            return True
    return False


@scalar
def ahead(row, col, action):
    """The cell that an action claims: its own, but for moves."""
    return row + (action == SOUTH) - (action == NORTH), col + (action == EAST) - (action == WEST)


@scalar
def allowed(m, a, action, rule, game):
    if action == NONE:
        return True
    if action == LOAD:
        for f in range(rule.foods):
            if game.food[m, f] > 0 and distance(m, a, f, game) == 1:
                return True
        return False
    row, col = ahead(game.row[m, a], game.col[m, a], action)
    return row >= 0 and row < rule.rows and col >= 0 and col < rule.cols and not food_at(m, row, col, rule, game)


# ---- a step: all move at once, then they load ----
@scalar
def move_all(m, rule, game):
    """A cell that one player claims is entered. Where several claim one, all of them stay where they are."""
    for a in range(rule.agents):
        row, col = ahead(game.row[m, a], game.col[m, a], game.last[m, a])
        game.to_row[m, a], game.to_col[m, a] = row, col
    for a in range(rule.agents):
        row, col, alone = game.to_row[m, a], game.to_col[m, a], True
        for b in range(rule.agents):
            if b != a and game.to_row[m, b] == row and game.to_col[m, b] == col:
                alone = False
        if alone:
            game.row[m, a], game.col[m, a] = row, col
        game.bumped[m, a] = not alone and game.last[m, a] != NONE and game.last[m, a] != LOAD


@scalar
def load(m, f, rule, game):
    """Those who load food f together get it if their levels sum up to its own; otherwise each pays the penalty."""
    strength, worth = 0, game.food[m, f]
    for a in range(rule.agents):
        if game.last[m, a] == LOAD and distance(m, a, f, game) == 1:
            strength += game.level[m, a]
    for a in range(rule.agents):
        if game.last[m, a] == LOAD and distance(m, a, f, game) == 1:
            if strength >= worth:
                share = np.float32(game.level[m, a] * worth)
                game.reward[m, a] = share / np.float32(strength * max(game.spawned[m], 1))
            else:
                game.reward[m, a] = -rule.penalty
                game.tries[m, a, f] += 1
    if strength >= worth:
        game.food[m, f] = 0


@scalar
def step_one(m, rule, game):
    for a in range(rule.agents):
        action = game.actions[m, a]
        if action < 0 or action > LOAD or not allowed(m, a, action, rule, game):
            action = NONE
        game.last[m, a], game.reward[m, a] = action, 0
    move_all(m, rule, game)
    left = 0
    for f in range(rule.foods):
        if game.food[m, f] > 0:
            load(m, f, rule, game)
            left += game.food[m, f] > 0
    team = np.float32(0)
    for a in range(rule.agents):
        team += game.reward[m, a]
    for a in range(rule.agents):
        if rule.prosocial:
            game.reward[m, a] = team / np.float32(rule.agents)
        game.earned[m, a] += game.reward[m, a]
    return left == 0, left == 0


# ---- reset ----
@scalar
def fits(m, row, col, placed, rule, game):
    """Whether a food may lie there: more than two steps from the others, and on no player."""
    for f in range(placed):
        if abs(game.food_row[m, f] - row) + abs(game.food_col[m, f] - col) <= 2:
            return False
    return not player_at(m, row, col, rule.agents, game)


@scalar
def room_left(m, placed, rule, game):
    for row in range(1, rule.rows - 1):
        for col in range(1, rule.cols - 1):
            if fits(m, row, col, placed, rule, game):
                return True
    return False


@scalar
def highest_food(m, rule, game):
    """The sum of the three lowest levels of players, unless there is a limit."""
    if rule.max_food > 0:
        return rule.max_food
    total = 0
    for a in range(rule.agents):
        lower = 0
        for b in range(rule.agents):
            if game.level[m, b] < game.level[m, a] or (game.level[m, b] == game.level[m, a] and b < a):
                lower += 1
        if lower < 3:
            total += int(game.level[m, a])
    return total


@scalar
def lay_food(m, placed, row, col, level, rule, game):
    """Puts a food into its place among those there are, so that they stay in row-major order."""
    at = placed
    while at > 0 and game.food_row[m, at - 1] * rule.cols + game.food_col[m, at - 1] > row * rule.cols + col:
        game.food_row[m, at], game.food_col[m, at] = game.food_row[m, at - 1], game.food_col[m, at - 1]
        game.food[m, at] = game.food[m, at - 1]
        at -= 1
    game.food_row[m, at], game.food_col[m, at], game.food[m, at] = row, col, level


@scalar
def reset_one(m, rule, game):
    key, episode = game.match[m, KEY], game.match[m, EPISODE]
    for a in range(rule.agents):
        for attempt in range(ATTEMPTS):
            cell = draw(key, episode, attempt, a * 8 + FOR_PLAYER) % (rule.rows * rule.cols)
            row, col = cell // rule.cols, cell % rule.cols
            if not player_at(m, row, col, a, game):
                game.row[m, a], game.col[m, a] = row, col
                break
        game.level[m, a] = 1 + draw(key, episode, a, FOR_LEVEL) % rule.max_level
        game.last[m, a], game.bumped[m, a], game.earned[m, a] = NONE, False, 0
        for f in range(rule.foods):
            game.tries[m, a, f] = 0
    for f in range(rule.foods):
        game.food[m, f] = 0
    highest, placed, attempt, spawned = highest_food(m, rule, game), 0, 0, 0
    while placed < rule.foods and attempt < ATTEMPTS:
        number = draw(key, episode, attempt, FOR_FOOD)
        row, col = 1 + number % (rule.rows - 2), 1 + number // (rule.rows - 2) % (rule.cols - 2)
        attempt += 1
        if fits(m, row, col, placed, rule, game):
            level = highest if rule.coop else 1 + draw(key, episode, placed, FOR_FOOD_LEVEL) % highest
            lay_food(m, placed, row, col, level, rule, game)
            placed += 1
            spawned += level
        elif attempt % 32 == 0 and not room_left(m, placed, rule, game):
            attempt = ATTEMPTS
    game.spawned[m] = spawned


# ---- what the players see ----
@scalar
def row_seen(m, a, row, rule, game):
    """A row as player a counts it: from the first that it sees."""
    own = game.row[m, a]
    return row - own + rule.sight if own > rule.sight else row


@scalar
def col_seen(m, a, col, rule, game):
    own = game.col[m, a]
    return col - own + rule.sight if own > rule.sight else col


@scalar
def sees_food(m, a, f, rule, game):
    rows, cols = game.food_row[m, f] - game.row[m, a], game.food_col[m, f] - game.col[m, a]
    return game.food[m, f] > 0 and abs(rows) <= rule.sight and abs(cols) <= rule.sight


@scalar
def sees_player(m, a, b, rule, game):
    """As the package has it: near the first row or column one sees others farther away than food."""
    row, col = row_seen(m, a, game.row[m, b], rule, game), col_seen(m, a, game.col[m, b], rule, game)
    widest = 2 * rule.sight
    if max(abs(game.row[m, b] - game.row[m, a]), abs(game.col[m, b] - game.col[m, a])) > rule.player_sight:
        return False
    return row >= 0 and row <= widest and col >= 0 and col <= widest


@scalar
def in_slot(m, a, slot, rule, game):
    """(row, column, level) that an observation lists there: foods, then oneself, then the others; (-1, -1, 0): none."""
    row, col, level, seen = -1, -1, 0, 0
    for f in range(rule.foods):
        if sees_food(m, a, f, rule, game):
            if seen == slot:
                row, col, level = game.food_row[m, f], game.food_col[m, f], game.food[m, f]
            seen += 1
    seen = rule.foods
    for k in range(rule.agents):
        b = a if k == 0 else k - (k <= a)
        if sees_player(m, a, b, rule, game):
            if seen == slot:
                row, col, level = game.row[m, b], game.col[m, b], game.level[m, b]
            seen += 1
    if level > 0:
        row, col = row_seen(m, a, row, rule, game), col_seen(m, a, col, rule, game)
    return row, col, level


@scalar
def observe_one(m, lane, lanes, rule, game):
    slots = rule.foods + rule.agents
    width = rule.rows_seen + rule.cols_seen + 1 if rule.one_hot else 3
    for item in range(lane, rule.agents * slots, lanes):
        a, slot = item // slots, item % slots
        row, col, level = in_slot(m, a, slot, rule, game)
        at = slot * width
        if rule.one_hot:
            for k in range(rule.rows_seen):
                game.obs[m, a, at + k] = row == k
            for k in range(rule.cols_seen):
                game.obs[m, a, at + rule.rows_seen + k] = col == k
        else:
            game.obs[m, a, at], game.obs[m, a, at + 1] = row, col
        game.obs[m, a, at + width - 1] = level
    if rule.obs_last_action:
        for item in range(lane, rule.agents * (rule.agents - 1), lanes):
            a, k = item // (rule.agents - 1), item % (rule.agents - 1)
            b = k + (k >= a)
            observe_last_action(m, a, b, k, sees_player(m, a, b, rule, game), rule, game)
    for f in range(lane, rule.foods, lanes):
        there, at = game.food[m, f] > 0, 3 * f
        game.state[m, at] = game.food_row[m, f] if there else GONE
        game.state[m, at + 1] = game.food_col[m, f] if there else GONE
        game.state[m, at + 2] = game.food[m, f]
    for a in range(lane, rule.agents, lanes):
        at = 3 * (rule.foods + a)
        game.state[m, at], game.state[m, at + 1] = game.row[m, a], game.col[m, a]
        game.state[m, at + 2] = game.level[m, a]
        game.alive[m, a] = True
    for item in range(lane, rule.agents * len(ACTIONS), lanes):
        a, action = item // len(ACTIONS), item % len(ACTIONS)
        game.avail[m, a, action] = allowed(m, a, action, rule, game)
    if lane == 0:
        game.state[m, 3 * slots] = np.float32(game.match[m, STEP]) / np.float32(rule.limit)


# ---- scripted players ----
@scalar
def rounded_mean(total, count):
    """To the nearest whole number, halves to the even one."""
    lower = total // count
    rest = 2 * (total - lower * count)
    return lower + (rest > count or (rest == count and lower % 2 == 1))


@scalar
def heuristic_food(m, a, policy, rule, game):
    """The food that H1 to H4 go for, GONE if none that they see will do."""
    row, col = row_seen(m, a, game.row[m, a], rule, game), col_seen(m, a, game.col[m, a], rule, game)
    highest = game.level[m, a] if policy == H3 else NEVER
    if policy == H2 or policy == H4:  # from the centre of all players in view
        rows, cols, levels, count = 0, 0, 0, 0
        for b in range(rule.agents):
            if sees_player(m, a, b, rule, game):
                rows += row_seen(m, a, game.row[m, b], rule, game)
                cols += col_seen(m, a, game.col[m, b], rule, game)
                levels, count = levels + game.level[m, b], count + 1
        row, col = rounded_mean(rows, count), rounded_mean(cols, count)
        highest = levels if policy == H4 else NEVER
    nearest, chosen = NEVER, GONE
    for f in range(rule.foods):
        if sees_food(m, a, f, rule, game) and game.food[m, f] <= highest:
            down = row_seen(m, a, game.food_row[m, f], rule, game) - row
            right = col_seen(m, a, game.food_col[m, f], rule, game) - col
            if down * down + right * right < nearest:
                nearest, chosen = down * down + right * right, f
    return chosen


@scalar
def heuristic_action(m, a, policy, number, rule, game):
    """As the package's agents act: rows first; anything available where the way is blocked or there is no food."""
    f = heuristic_food(m, a, policy, rule, game)
    if f != GONE:
        if distance(m, a, f, game) == 1:
            return LOAD
        down, right = game.food_row[m, f] - game.row[m, a], game.food_col[m, f] - game.col[m, a]
        if down < 0 and game.avail[m, a, NORTH]:
            return NORTH
        if down > 0 and game.avail[m, a, SOUTH]:
            return SOUTH
        if right > 0 and game.avail[m, a, EAST]:
            return EAST
        if right < 0 and game.avail[m, a, WEST]:
            return WEST
    return available_action(m, a, number, rule, game)


@scalar
def cost(m, a, f, policy, rule, game):
    """The food with the lowest comes first in an order."""
    row, col = game.food_row[m, f], game.food_col[m, f]
    by_rows = row * LONGEST + col
    if policy == ROWS:
        return by_rows
    if policy == ROWS_BACK:
        return -by_rows
    if policy == COLUMNS:
        return col * LONGEST + row
    if policy == COLUMNS_BACK:
        return -col * LONGEST - row
    if policy == DIAGONAL:
        return (row + col) * LONGEST + row
    if policy == NEAR:
        return distance(m, a, f, game) * LONGEST * LONGEST + by_rows
    down, right = 2 * row - rule.rows + 1, 2 * col - rule.cols + 1  # from the centre, in half cells
    away = (down * down + right * right) * LONGEST * LONGEST
    return away + by_rows if policy == INSIDE else by_rows - away


@scalar
def next_in_order(m, a, policy, rule, game):
    """The first food in a player's order. One that it gave up comes after those that it gave up less often."""
    chosen, fewest, lowest = GONE, 0, 0
    for f in range(rule.foods):
        if game.food[m, f] > 0:
            given_up, here = game.tries[m, a, f] // rule.patience, cost(m, a, f, policy, rule, game)
            if chosen == GONE or given_up < fewest or (given_up == fewest and here < lowest):
                chosen, fewest, lowest = f, given_up, here
    return chosen


@scalar
def next_of_another(m, a, rule, game):
    """The food that the first other player with an order goes for, the nearest where nobody has one."""
    for b in range(rule.agents):
        if b != a and game.policy[m, b] >= ROWS and game.policy[m, b] < MEET:
            return next_in_order(m, b, game.policy[m, b], rule, game)
    return next_in_order(m, a, NEAR, rule, game)


@scalar
def is_open(m, a, action, rule, game):
    """Whether a move is available; after a move that failed, players count as obstacles."""
    row, col = ahead(game.row[m, a], game.col[m, a], action)
    return game.avail[m, a, action] and not (game.bumped[m, a] and player_at(m, row, col, rule.agents, game))


@scalar
def step_towards(m, a, f, number, rule, game):
    """Along the longer axis first, and round what is in the way."""
    down, right = game.food_row[m, f] - game.row[m, a], game.food_col[m, f] - game.col[m, a]
    coin = number // 2 % 2
    upright, sideways = SOUTH if down > 0 else NORTH, EAST if right > 0 else WEST
    if down == 0:
        upright = NORTH + coin
    if right == 0:
        sideways = WEST + coin
    upright_first = abs(down) >= abs(right)
    first, second = upright if upright_first else sideways, sideways if upright_first else upright
    if is_open(m, a, first, rule, game):
        return NONE if game.bumped[m, a] and number % 2 else first  # somebody else may have wanted the same cell
    if is_open(m, a, second, rule, game):
        return second
    back = ((second - 1) ^ 1) + 1  # the other way
    return back if is_open(m, a, back, rule, game) else NONE


@scalar
def act_one(m, a, policy, rule, game):
    if not game.alive[m, a]:
        return NONE
    number = draw(game.match[m, KEY], game.match[m, EPISODE], game.match[m, STEP], a * 8 + FOR_ACTION)
    if policy < ROWS:
        return heuristic_action(m, a, policy, number, rule, game)
    f = GONE
    if policy < MEET:
        f = next_in_order(m, a, policy, rule, game)
    elif policy == MEET:
        f = next_of_another(m, a, rule, game)
    if f == GONE:
        return available_action(m, a, number, rule, game)
    return LOAD if distance(m, a, f, game) == 1 else step_towards(m, a, f, number, rule, game)


class Foraging(Batch):
    """Foraging on one size of grid. docs/foraging.md describes the rules and the options; envs.make builds one."""

    policies = POLICIES
    hit_distance = 0.5  # cells: a predicted place is right if it is the very one

    def __init__(
        self,
        name,
        num_envs=1,
        n_agents=None,
        *,
        limit=50,
        max_player_level=2,
        penalty=None,
        patience=4,
        prosocial=None,
        one_hot=None,
        player_sight=LONGEST,
        obs_last_action=False,
        **common,
    ):
        stage = name == ORDERS_ID
        sight, rows, cols, agents, foods, coop, lowest, costly = settings_of(name)
        penalty = 0.1 * costly if penalty is None else penalty
        prosocial = stage if prosocial is None else prosocial
        one_hot = stage if one_hot is None else one_hot
        refuse_what_does_not_fit(name, rows, cols, agents, foods, sight, limit, max_player_level, patience, penalty)
        batch.check_whole_number(f"{name}: player_sight", player_sight, 0, LONGEST)
        batch.check_flag(f"{name}: prosocial", prosocial)
        batch.check_flag(f"{name}: one_hot", one_hot)
        batch.check_flag(f"{name}: obs_last_action", obs_last_action)
        self.rows, self.cols, self.foods, self.sight, self.one_hot = rows, cols, foods, sight, one_hot
        self.player_sight = player_sight
        most_food = foods * 3 * MOST_LEVELS
        self.ranges = {"row": (0, rows - 1), "col": (0, cols - 1), "level": (0, MOST_LEVELS), "food_row": (0, rows - 1),
                       "food_col": (0, cols - 1), "food": (0, 3 * MOST_LEVELS), "spawned": (0, most_food),
                       "last": (NONE, LOAD), "tries": (0, limit)}  # fmt: skip
        self.return_scale = 1 / agents  # all foods together are worth 1
        self.team_reward, self.default_others = prosocial, ORDERS if coop else HEURISTICS
        highest = 1 if lowest else max_player_level * min(agents, 3)
        self._window = min(2 * sight + 1, rows), min(2 * sight + 1, cols)  # rows and columns in view, at most
        slots, shown_actions = foods + agents, (agents - 1) * len(ACTIONS) * obs_last_action
        self._width = sum(self._window) + 1 if one_hot else 3  # numbers of a food or player in an observation
        whole, number = torch.int32, torch.float32
        players, places = (whole, (num_envs, agents)), (whole, (num_envs, foods))
        super().__init__(
            name, num_envs, [f"player_{a}" for a in range(agents)],
            (len(ACTIONS), slots * self._width + shown_actions, 3 * slots + 1, limit),
            {"row": players, "col": players, "level": players, "food_row": places, "food_col": places, "food": places,
             "spawned": (whole, (num_envs,)), "last": players, "bumped": (torch.bool, (num_envs, agents)),
             "tries": (whole, (num_envs, agents, foods)), "earned": (number, (num_envs, agents))}, **common,
        )  # fmt: skip
        self._set_spaces(highest, max_player_level, shown_actions)
        room = {key: torch.zeros((num_envs, agents), dtype=whole, device=self.device) for key in ("to_row", "to_col")}
        self.compile_rules(
            (reset_one, step_one, observe_one, act_one), Forage, Rule, NONE, room, LANES,
            foods=foods, rows=rows, cols=cols, sight=sight, coop=int(coop), max_level=max_player_level,
            max_food=int(lowest), penalty=np.float32(penalty), prosocial=int(prosocial),
            patience=NEVER if patience is None else patience, one_hot=int(one_hot), rows_seen=self._window[0],
            cols_seen=self._window[1], player_sight=player_sight, obs_last_action=int(obs_last_action),
        )  # fmt: skip

    def _set_spaces(self, highest_food, highest_player, shown_actions):
        """The package's observations are rows, columns and levels as they are, not numbers from -1 to 1."""
        rows, cols = self._window
        least, most = [-1, -1], [rows - 1, cols - 1]
        if self.one_hot:
            least, most = [0] * (rows + cols), [1] * (rows + cols)
        low = [*least, 0] * (self.foods + self.n_agents) + [0] * shown_actions
        high = [*most, highest_food] * self.foods + [*most, highest_player] * self.n_agents + [1] * shown_actions
        low, high = (np.tile(np.float32(bound), (self.n_agents, 1)) for bound in (low, high))
        self.single_observation_space = gymnasium.spaces.Box(low, high, dtype=np.float32)

    def set_grid(self, players=None, levels=None, foods=None, food_levels=None):
        """Puts things by hand: cells and levels (num_envs, how many); cells are row * cols + column, -1 for no food.

        None leaves things as they are. Foods come with their levels, and are what rewards are measured by. Returns
        (obs, info), without a step.
        """
        if not self._started:
            raise RuntimeError("reset() comes before set_grid()")
        if (foods is None) != (food_levels is None):
            raise ValueError("foods and food_levels come together")
        simulation = self._simulation
        if players is not None:
            cells = self._fitting("players", players, simulation["row"], 0, self.rows * self.cols - 1)
            simulation["row"].copy_(cells // self.cols)
            simulation["col"].copy_(cells % self.cols)
        if levels is not None:
            simulation["level"].copy_(self._fitting("levels", levels, simulation["level"], 1, LONGEST))
        if foods is not None:
            cells = self._fitting("foods", foods, simulation["food"], GONE, self.rows * self.cols - 1)
            food = self._fitting("food_levels", food_levels, simulation["food"], 0, LONGEST)
            there = cells != GONE
            order = torch.where(there, cells, self.rows * self.cols).argsort(dim=1, stable=True)
            cells, food = cells.clamp(min=0).gather(1, order), (food * there).gather(1, order)
            for key, values in (("food_row", cells // self.cols), ("food_col", cells % self.cols), ("food", food)):
                simulation[key].copy_(values)
            simulation["spawned"].copy_(food.sum(1))
            simulation["tries"].zero_()
        self._run(OBSERVE)
        return self._shown()

    def _fitting(self, name, values, like, least, most):
        values = self._given(values, f"{name} has shape {tuple(like.shape)}")
        if values.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(like.shape)}, not {tuple(values.shape)}")
        values = values.real if values.is_complex() else values
        if not ((values >= least) & (values <= most) & (values.double() % 1 == 0)).all():
            raise ValueError(f"{name} are whole numbers from {least} to {most}")
        return values.long()

    @property
    def visible(self):
        if max(self.rows, self.cols) <= min(self.sight, self.player_sight):
            return super().visible
        near = []
        for key in ("row", "col"):  # as `sees_player` has it
            own, other = self._simulation[key].unsqueeze(2), self._simulation[key].unsqueeze(1)
            place = torch.where(own > self.sight, other - own + self.sight, other)
            near.append((place >= 0) & (place <= 2 * self.sight) & ((other - own).abs() <= self.player_sight))
        return near[0] & near[1]

    def _about_others(self, column):
        return column // self._width > self.foods

    def places(self, obs):
        """(row and column of every other player (..., others, 2), whether it is seen), read off observations.

        Rows and columns are counted from `origin`.
        """
        slots = obs[..., : (self.foods + self.n_agents) * self._width].unflatten(-1, (-1, self._width))
        others = slots[..., self.foods + 1 :, :]
        place = others[..., :2]
        if self.one_hot:
            rows, cols = others[..., :-1].split(self._window, -1)
            place = torch.stack((rows.argmax(-1), cols.argmax(-1)), -1).to(obs.dtype)
        return place, others[..., -1] > 0.5

    def origin(self, agent, index=0):
        """The (row, column) of match `index` that the places in an agent's observation are counted from."""
        own = torch.stack([self._simulation[key][index, agent] for key in ("row", "col")])
        return (own - self.sight).clamp(min=0)

    def scene(self, index=0):
        """What a picture of one match shows, as plain numbers and words."""
        self._check_index(index)
        simulation = {key: tensor[index].tolist() for key, tensor in self._simulation.items()}
        match = simulation["match"]
        status = "running"
        if match[STAGE] != RUNNING:
            status = "time" if any(simulation["food"]) else "won"
        foods = zip(*(simulation[key] for key in ("food_row", "food_col", "food")))
        players = zip(*(simulation[key] for key in ("row", "col", "level", "last", "earned")))
        return {
            "game": "hunt", "title": self.name, "step": match[STEP], "limit": self.episode_limit,
            "width": self.cols, "height": self.rows, "obstacles": [],
            "prey": [{"kind": "food", "row": row, "col": col, "level": level} for row, col, level in foods if level],
            "hunters": [
                {"row": row, "col": col, "alive": True, "action": ACTIONS[action] if match[STEP] else "",
                 "return": income, "level": level}
                for row, col, level, action, income in players
            ],
            "radius": self.sight if self.sight < max(self.rows, self.cols) else None, "status": status,
        }  # fmt: skip


def is_foraging(name):
    return name in IDS or PATTERN.fullmatch(str(name)) is not None


def settings_of(name):
    """(sight, rows, columns, players, foods, coop, ind, pen) of an id."""
    name = "Foraging-8x8-2p-5f-coop-v3" if name == ORDERS_ID else name
    sight, *sizes, coop, lowest, costly = PATTERN.fullmatch(name).groups()
    rows, cols, players, foods = (int(number) for number in sizes)
    sight = max(rows, cols) if sight is None else int(sight)
    return sight, rows, cols, players, foods, coop is not None, lowest is not None, costly is not None


def refuse_what_does_not_fit(name, rows, cols, agents, foods, sight, limit, max_player_level, patience, penalty):
    def refuse(what):
        raise ValueError(f"{name}: {what}")

    if not (5 <= rows <= LONGEST and 5 <= cols <= LONGEST):
        refuse(f"a grid has 5 to {LONGEST} rows and columns, not {rows} x {cols}")
    if not 1 <= agents <= 9 or not 1 <= foods <= 9:
        refuse(f"there are 1 to 9 players and 1 to 9 foods, not {agents} and {foods}")
    if sight < 1:
        refuse("players see at least 1 cell around them")
    batch.check_whole_number(f"{name}: limit", limit, 1, batch.MOST_STEPS)
    batch.check_whole_number(f"{name}: max_player_level", max_player_level, 1, MOST_LEVELS)
    if patience is not None:
        batch.check_whole_number(
            f"{name}: patience, if it is not None for never giving up,", patience, 1, batch.MOST_STEPS
        )
    batch.check_number(f"{name}: penalty", penalty, 0, batch.MOST_REWARD)

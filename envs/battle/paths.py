"""Ways round walls and cliffs, as a table: from every cell of a terrain to every other, which cell to walk to next.

The next cell is the farthest one on a shortest path that can be walked to straight from anywhere in the present cell,
so that a unit walks at any angle, not in eight directions, and never scrapes along a wall.
"""

import functools

import numpy as np
from numba import njit

from envs import compiler

WALL, LOW, RAMP, HIGH = 0, 1, 2, 3
LETTERS = {"#": WALL, ".": LOW, "r": RAMP, "H": HIGH}


def read_terrain(art):
    """Text with north up -> (height, width) of WALL, LOW, RAMP, HIGH with row 0 in the south."""
    rows = art.split()
    if len({len(row) for row in rows}) != 1 or set("".join(rows)) - set(LETTERS):
        raise ValueError(f"a terrain is rows of equal length made of {' '.join(LETTERS)}")
    return np.array([[LETTERS[letter] for letter in row] for row in reversed(rows)], np.int8)


@njit
def joined(a, b, climbs):
    """Whether one can step between neighbouring cells of ground a and b."""
    if a == WALL or b == WALL:
        return False
    return climbs or abs(a - b) < HIGH - LOW


@njit
def _straight(ground, ax, ay, bx, by, climbs):
    """Whether every straight line from within cell a to within cell b keeps to joined ground.

    Those lines fill what a unit square sweeps on its way from a to b: cell (x, y) is part of that if at some time t in
    [0, 1] the square's centre is nearer than 1 to the cell's on both axes.
    """
    dx, dy = bx - ax, by - ay
    x_step, y_step = (1 if dx >= 0 else -1), (1 if dy >= 0 else -1)
    for i in range(abs(dx) + 1):
        for j in range(abs(dy) + 1):
            if not _swept(i, j, abs(dx), abs(dy)):
                continue
            x, y = ax + i * x_step, ay + j * y_step
            if ground[y, x] == WALL:
                return False
            if (
                i < abs(dx)
                and _swept(i + 1, j, abs(dx), abs(dy))
                and not joined(ground[y, x], ground[y, x + x_step], climbs)
            ):
                return False
            if (
                j < abs(dy)
                and _swept(i, j + 1, abs(dx), abs(dy))
                and not joined(ground[y, x], ground[y + y_step, x], climbs)
            ):
                return False
    return True


@njit
def _swept(i, j, dx, dy):
    first, last = 0.0, 1.0
    if dx > 0:
        first, last = max(first, (i - 1) / dx), min(last, (i + 1) / dx)
    if dy > 0:
        first, last = max(first, (j - 1) / dy), min(last, (j + 1) / dy)
    return first < last or dx + dy == 0


@njit
def _shortest(ground, goal, climbs, distance, toward, queue):
    """For every cell the length of its way to the goal (straight 10, diagonal 14) and the neighbour that is on it."""
    height, width = ground.shape
    distance[:] = 1 << 30
    distance[goal] = 0
    queue[0], head, tail, size = goal, 0, 1, queue.shape[0]
    while head != tail:
        here = queue[head]
        head = (head + 1) % size
        y, x = here // width, here % width
        for dy in range(-1, 2):
            for dx in range(-1, 2):
                nx, ny = x + dx, y + dy
                if (dx == 0 and dy == 0) or nx < 0 or ny < 0 or nx >= width or ny >= height:
                    continue
                cost = distance[here] + (14 if dx != 0 and dy != 0 else 10)
                there = ny * width + nx
                if cost < distance[there] and _straight(ground, x, y, nx, ny, climbs):
                    distance[there], toward[there] = cost, here
                    queue[tail] = there
                    tail = (tail + 1) % size


def _fill(ground, climbs, table):
    height, width = ground.shape
    cells = height * width
    distance, toward, queue = np.empty(cells, np.int64), np.empty(cells, np.int64), np.empty(8 * cells, np.int64)
    for goal in range(cells):
        table[:, goal] = goal  # where there is no way: straight at it, as far as it goes
        if ground[goal // width, goal % width] == WALL:
            continue
        _shortest(ground, goal, climbs, distance, toward, queue)
        for start in range(cells):
            if distance[start] == 1 << 30:
                continue
            y, x = start // width, start % width
            if _straight(ground, x, y, goal % width, goal // width, climbs):
                continue
            here = toward[start]
            while _straight(ground, x, y, toward[here] % width, toward[here] // width, climbs):
                here = toward[here]
            table[start, goal] = here


_fill_table = compiler.keep(njit(compiler.rebind(_fill, f"fill_table_{compiler.fingerprint(_fill)}")))


@functools.lru_cache(maxsize=32)
def waypoints(art):
    """(layers, cells, cells) of cells: layer 0 for walkers, the last one for units that climb cliffs.

    None where the way is straight between any two cells: nothing to look up.
    """
    ground = read_terrain(art)
    walkable = ground != WALL
    rows, columns = np.flatnonzero(walkable.any(1)), np.flatnonzero(walkable.any(0))
    rectangle = len(rows) > 0 and ground[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    if len(rows) and (rectangle == rectangle[0, 0]).all():
        return None
    if ground.size > 1 << 15:
        raise ValueError(f"a terrain has at most {1 << 15} cells, not {ground.size}")
    table = np.empty((2 if (ground == HIGH).any() else 1, ground.size, ground.size), np.int16)
    for layer in range(len(table)):
        _fill_table(ground, layer == 1, table[layer])
    return table

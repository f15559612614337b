"""Pictures of a match, drawn with Pillow from its scene: what `env.scene(index)` says in plain words and numbers.

A picture is drawn at twice its size and then reduced, which smooths every edge. The colours, letters and proportions
here are also those of the page that plays a match in a browser (page.py).
"""

import functools
import math
from collections import defaultdict, namedtuple

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

FINE = 2  # how much larger than the picture it is drawn

COLOURS = {
    "ground": {".": "#f5f3ee", "r": "#e9e6d6", "H": "#dfe0cc", "#": "#cdc8bd"},
    "edge": "#b3ad9f",
    "grid": "#e3dfd6",
    "ink": "#2b2f36",
    "quiet": "#7d828a",
    "sides": ["#2f6cb5", "#e8833a"],
    "health": "#1f9e77",
    "shield": "#5ab4ee",
    "empty": "#b9b4a8",
    "hunters": ["#2f6cb5", "#e8833a", "#1f9e77", "#b5559b", "#5ab4ee", "#8a6d3b", "#d9b400", "#4b4f57"],
    "obstacle": "#7a7f87",
    "predator": "#d9603b",
    "prey": "#1f9e77",
    "stag": "#7b5535",
    "hare": "#c9b296",
    "drift": "#a9c9e8",
    "food": "#c8453b",
    "leaf": "#4f8f3a",
    "light": "#ffffff",
}
KINDS = {  # a letter, and how much lighter (or, below zero, darker) than its side's colour
    "marine": ("m", 0.0),
    "marauder": ("M", -0.35),
    "medivac": ("+", 0.5),
    "stalker": ("s", -0.35),
    "zealot": ("z", 0.25),
    "colossus": ("C", -0.5),
    "hydralisk": ("h", 0.0),
    "zergling": ("g", 0.0),
    "baneling": ("b", 0.4),
    "spinecrawler": ("S", -0.35),
}
HEADER, FOOTER = 24, 28  # pixels

View = namedtuple("View", "left top unit")  # where the map's corner lies, and how many pixels a cell has
Style = namedtuple("Style", "letter fill")


def draw(scene, size=480, sight=None, goals=None):
    """An RGB array (height, width, 3) of a scene, `size` pixels wide and at most as high.

    `sight` is an agent, or several, whose sight is shaded; `goals` are predictions: (agent, x, y), or
    (agent, row, column) on a grid.
    """
    if scene["game"] == "picture":  # the environment draws by itself
        picture = Image.fromarray(scene["picture"])
        width = min(size, round(size * picture.width / picture.height))
        return np.array(picture.resize((width, max(1, round(width * picture.height / picture.width)))))
    seers = [] if sight is None else list(np.atleast_1d(sight))
    goals = [(int(agent), float(first), float(second)) for agent, first, second in goals or ()]
    image = {"battle": _battle, "hunt": _hunt, "tag": _tag}[scene["game"]](scene, size * FINE, seers, goals)
    return np.array(image.reduce(FINE))


# ---- colours ----
def mixed(colour, other, part):
    pairs = zip(ImageColor.getrgb(colour), ImageColor.getrgb(other))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in pairs)


@functools.lru_cache
def style(side, kind):
    """How a unit looks. A kind that has no entry shows its first letter."""
    letter, shade = KINDS.get(kind, (kind[0], 0.0))
    fill = mixed(COLOURS["sides"][side], "#ffffff" if shade > 0 else "#000000", abs(shade))
    return Style(letter, fill)


def ink_on(fill):
    red, green, blue = ImageColor.getrgb(fill)
    return COLOURS["ink"] if 0.3 * red + 0.59 * green + 0.11 * blue > 150 else COLOURS["light"]


@functools.lru_cache
def rim_of(fill):
    return mixed(fill, "#000000", 0.3)


@functools.lru_cache
def fallen(fill):
    """The colour of the cross where a unit died."""
    return mixed(fill, COLOURS["ground"]["."], 0.55)


@functools.lru_cache
def pale(fill):
    return mixed(fill, COLOURS["light"], 0.6)


def hunter_colour(hunter):
    return COLOURS["hunters"][hunter % len(COLOURS["hunters"])]


@functools.lru_cache
def _clear(colour, alpha):
    return (*ImageColor.getrgb(colour), alpha)


# ---- pieces of a picture ----
@functools.lru_cache
def _font(size):
    return ImageFont.load_default(size)


def _disc(pen, x, y, radius, **paint):
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), **paint)


@functools.lru_cache(maxsize=1024)
def _token(radius, fill, text):
    """A disc with a letter, to be pasted."""
    side = 2 * math.ceil(radius + FINE)
    image = Image.new("RGBA", (side, side), _clear(fill, 0))
    pen = ImageDraw.Draw(image)
    _disc(pen, side / 2 - 0.5, side / 2 - 0.5, radius, fill=fill, outline=rim_of(fill), width=FINE)
    if radius >= 4 * FINE:
        height = min(1.35 * radius, 16 * FINE) / (1 if len(text) == 1 else 1.25)
        pen.text((side / 2, side / 2), text, ink_on(fill), _font(height), anchor="mm")
    return image


def _paste_token(image, x, y, radius, fill, text):
    token = _token(radius, fill, text)
    image.paste(token, (round(x - token.width / 2), round(y - token.height / 2)), token)


def _bar(pen, x, y, width, height, part, colour):
    pen.rectangle((x, y, x + width - 1, y + height - 1), fill=COLOURS["empty"])
    if part > 0:
        pen.rectangle((x, y, x + max(1, width * part) - 1, y + height - 1), fill=colour)


def _goal(pen, start, end, radius, colour):
    """A dashed ring with a cross, and a thin line to it."""
    (x, y), reach = end, math.dist(start, end)
    if reach > radius:
        part = 1 - radius / reach
        pen.line((start, (start[0] + (x - start[0]) * part, start[1] + (y - start[1]) * part)), colour, FINE)
    for turn in range(0, 360, 45):
        pen.arc((x - radius, y - radius, x + radius, y + radius), turn, turn + 28, colour, 2 * FINE)
    for dx, dy in ((1, 1), (1, -1)):
        arm = radius * 0.35
        pen.line((x - arm * dx, y - arm * dy, x + arm * dx, y + arm * dy), colour, 2 * FINE)


def _header(pen, scene):
    """What is played, how far it is, and how it ended."""
    middle, font = HEADER * FINE / 2, _font(14 * FINE)
    x = 8 * FINE
    pen.text((x, middle), scene["title"], COLOURS["ink"], font, anchor="lm")
    x += font.getlength(scene["title"]) + 10 * FINE
    status = "" if scene["status"] == "running" else f"  {scene['status']}"
    text = f"step {scene['step']} / {scene['limit']}{status}"
    pen.text((x, middle), text, COLOURS["quiet"], _font(13 * FINE), anchor="lm")


# ---- battles ----
def view_of(ground, width, height):
    """(left, bottom, right, top) of the part of a map that can be walked on, and a cell more: what is worth showing."""
    free = [(x, y) for y, row in enumerate(ground) for x, letter in enumerate(row) if letter != "#"]
    if not free:
        return 0, 0, width, height
    columns, rows = zip(*free)
    return max(min(columns) - 1, 0), max(min(rows) - 1, 0), min(max(columns) + 2, width), min(max(rows) + 2, height)


@functools.lru_cache(maxsize=32)
def _battlefield(ground, width, height, size):
    """(the picture before anyone is on it, its view)"""
    left, bottom, right, top = view_of(ground, width, height)
    unit = min(size / (right - left), (size - HEADER * FINE) / (top - bottom))
    high = round((top - bottom) * unit)
    shift = (size - (right - left) * unit) / 2
    view = View(shift - left * unit, HEADER * FINE + top * unit, unit)
    image = Image.new("RGB", (size, high + HEADER * FINE), COLOURS["ground"]["#"])
    pen = ImageDraw.Draw(image)

    def at(x, y):
        inside = 0 <= x < width and 0 <= y < height
        return (ground[y][x] if ground else ".") if inside else "#"

    def edges(colour, wanted):
        for y in range(height):
            for x in range(width):
                west, south = view.left + x * unit, view.top - y * unit
                if wanted(at(x, y), at(x - 1, y), x):
                    pen.line((west, south, west, south - unit), colour, FINE)
                if wanted(at(x, y), at(x, y - 1), y):
                    pen.line((west, south, west + unit, south), colour, FINE)

    for y in range(height):
        for x in range(width):
            west, south = view.left + x * unit, view.top - y * unit
            pen.rectangle((west, south - unit, west + unit, south), COLOURS["ground"][at(x, y)])
    edges(COLOURS["grid"], lambda here, there, place: place % 4 == 0 and here == there != "#")
    edges(COLOURS["edge"], lambda here, there, place: here != there)
    return image, view


def _battle(scene, size, seers, goals):
    ground, view = _battlefield(tuple(scene["ground"]), scene["width"], scene["height"], size)
    image, units = ground.copy(), scene["units"]
    pen = ImageDraw.Draw(image, "RGBA")
    places = [(view.left + unit["x"] * view.unit, view.top - unit["y"] * view.unit) for unit in units]
    radii = [max(unit["radius"] * view.unit, 4.5 * FINE) for unit in units]
    looks = [style(unit["side"], unit["kind"]) for unit in units]
    living = [u for u, unit in enumerate(units) if unit["health"] > 0]

    for u in seers:
        if u in living:
            inside, rim = _clear(looks[u].fill, 26), _clear(looks[u].fill, 110)
            _disc(pen, *places[u], scene["sight"] * view.unit, fill=inside, outline=rim, width=FINE)
    for u, unit in enumerate(units):
        if unit["health"] <= 0:
            (x, y), arm, colour = places[u], 0.6 * radii[u], fallen(looks[u].fill)
            pen.line((x - arm, y - arm, x + arm, y + arm), colour, 3)
            pen.line((x - arm, y + arm, x + arm, y - arm), colour, 3)
    for shooter, target, effect in scene["shots"]:
        colour = COLOURS["health"] if effect == "heal" else COLOURS["sides"][units[shooter]["side"]]
        pen.line((places[shooter], places[target]), _clear(colour, 170), 3 * FINE if effect == "heal" else 3)
    for u in sorted(living, key=lambda u: -radii[u]):  # the small ones on top
        _paste_token(image, *places[u], radii[u], looks[u].fill, looks[u].letter)
    for shooter, target, effect in scene["shots"]:
        _impact(pen, places[shooter], places[target], radii[target], effect, units[shooter]["side"])
    thick = 2 * FINE
    for u in living:
        (x, y), wide, unit = places[u], 2 * radii[u], units[u]
        y -= radii[u] + FINE  # partly on its own disc rather than on a neighbour's
        _bar(pen, x - wide / 2, y, wide, thick, unit["health"] / unit["max_health"], COLOURS["health"])
        if unit["max_shield"] > 0:
            _bar(pen, x - wide / 2, y - thick, wide, thick, unit["shield"] / unit["max_shield"], COLOURS["shield"])
    for agent, x, y in goals:
        if agent in living:
            end = view.left + x * view.unit, view.top - y * view.unit
            _goal(pen, places[agent], end, 0.8 * view.unit, looks[agent].fill)
    pen.rectangle((0, 0, size, HEADER * FINE - 1), fill=COLOURS["light"])
    _header(pen, scene)
    _strengths(pen, size, [units[u]["side"] for u in living])
    return image


def _strengths(pen, size, sides):
    """At the right of the header, how many of each side live."""
    x, middle, font = size - 8 * FINE, HEADER * FINE / 2, _font(13 * FINE)
    for side in (1, 0):
        count = str(sides.count(side))
        pen.text((x, middle), count, COLOURS["ink"], font, anchor="rm")
        x -= font.getlength(count) + 10 * FINE
        _disc(pen, x, middle, 5 * FINE, fill=COLOURS["sides"][side])
        x -= 14 * FINE


def _impact(pen, start, end, radius, effect, side):
    """A spark where a shot meets its target's edge, a plus for healing."""
    (x, y), reach = end, max(math.dist(start, end), 1e-6)
    part = min(radius / reach, 0.5)
    x, y = x + (start[0] - x) * part, y + (start[1] - y) * part
    if effect == "heal":
        arm = 3 * FINE
        pen.line((x - arm, y, x + arm, y), COLOURS["health"], 2 * FINE)
        pen.line((x, y - arm, x, y + arm), COLOURS["health"], 2 * FINE)
    else:
        _disc(pen, x, y, 2.5 * FINE, fill=COLOURS["light"], outline=COLOURS["sides"][side], width=FINE)


# ---- grids ----
@functools.lru_cache(maxsize=32)
def _grid(width, height, obstacles, size):
    bars = (HEADER + FOOTER) * FINE
    unit = min((size - 8 * FINE) / width, (size - bars) / height)
    left, top = (size - width * unit) / 2, HEADER * FINE
    image = Image.new("RGB", (size, round(height * unit) + bars), COLOURS["light"])
    pen = ImageDraw.Draw(image)
    pen.rectangle((left, top, left + width * unit, top + height * unit), fill=COLOURS["ground"]["."])
    for column in range(width + 1):
        x = left + column * unit
        pen.line((x, top, x, top + height * unit), COLOURS["grid"], FINE)
    for row in range(height + 1):
        y = top + row * unit
        pen.line((left, y, left + width * unit, y), COLOURS["grid"], FINE)
    for row, column in obstacles:
        x, y, gap = left + column * unit, top + row * unit, 0.06 * unit
        pen.rounded_rectangle((x + gap, y + gap, x + unit - gap, y + unit - gap), 0.12 * unit, COLOURS["obstacle"])
    return image, View(left, top, unit)


def places_in_cells(scene):
    """Where prey and living hunters are drawn, so that all in a cell are seen: two lists of (x, y, radius) in cells.

    The things of a cell share it as a square of equal parts. A hunter who has left has no place: None.
    """
    cells = defaultdict(list)
    for i, prey in enumerate(scene["prey"]):
        cells[prey["row"], prey["col"]].append(("prey", i))
    for i, hunter in enumerate(scene["hunters"]):
        if hunter["alive"]:
            cells[hunter["row"], hunter["col"]].append(("hunters", i))
    places = {"prey": [None] * len(scene["prey"]), "hunters": [None] * len(scene["hunters"])}
    for (row, column), things in cells.items():
        across = math.ceil(math.sqrt(len(things)))
        down = math.ceil(len(things) / across)
        for k, (group, i) in enumerate(things):
            in_row = across if k < (down - 1) * across else len(things) - (down - 1) * across
            x = column + 0.5 + (k % across - (in_row - 1) / 2) * 0.94 / across
            y = row + 0.5 + (k // across - (down - 1) / 2) * 0.94 / across
            places[group][i] = x, y, 0.32 if across == 1 else 0.42 / across
    return places["prey"], places["hunters"]


def _hunt(scene, size, seers, goals):
    grid, view = _grid(scene["width"], scene["height"], tuple(map(tuple, scene["obstacles"])), size)
    image, unit = grid.copy(), view.unit
    pen = ImageDraw.Draw(image, "RGBA")
    prey_places, hunter_places = places_in_cells(scene)

    for i in seers:
        if hunter_places[i]:
            row, column = scene["hunters"][i]["row"], scene["hunters"][i]["col"]
            reach = max(scene["width"], scene["height"]) if scene["radius"] is None else scene["radius"]
            columns = max(column - reach, 0), min(column + reach + 1, scene["width"])
            rows = max(row - reach, 0), min(row + reach + 1, scene["height"])
            corners = [(view.left + c * unit, view.top + r * unit) for c, r in zip(columns, rows)]
            pen.rectangle(corners, _clear(hunter_colour(i), 28), _clear(hunter_colour(i), 115), FINE)
    for row, column, text in scene.get("words", ()):
        middle = view.left + (column + 0.5) * unit, view.top + (row + 0.5) * unit
        pen.text(middle, text, COLOURS["ink"], _font(unit / max(3, 0.8 * len(text))), anchor="mm")
    for prey, (x, y, radius) in zip(scene["prey"], prey_places):
        x, y, radius = view.left + x * unit, view.top + y * unit, radius * unit
        PIECES[prey["kind"]](pen, x, y, radius)
        if "level" in prey:
            pen.text((x, y + 0.15 * radius), str(prey["level"]), COLOURS["light"], _font(0.9 * radius), anchor="mm")
    for i, place in enumerate(hunter_places):
        if place:
            x, y, radius = view.left + place[0] * unit, view.top + place[1] * unit, place[2] * unit
            _deed(pen, x, y, radius, scene["hunters"][i]["action"], hunter_colour(i))
            _paste_token(image, x, y, 0.8 * radius, hunter_colour(i), str(i))
            if "level" in scene["hunters"][i]:
                _level(pen, x, y, radius, scene["hunters"][i]["level"], hunter_colour(i))
    for agent, row, column in goals:
        if hunter_places[agent]:
            x, y, _ = hunter_places[agent]
            end = view.left + (column + 0.5) * unit, view.top + (row + 0.5) * unit
            _goal(pen, (view.left + x * unit, view.top + y * unit), end, 0.42 * unit, hunter_colour(agent))
    _header(pen, scene)
    _returns(image, pen, scene["hunters"], map(hunter_colour, range(len(scene["hunters"]))), size)
    return image


def _stag(pen, x, y, radius):
    """A head with antlers."""
    wide = max(2, round(0.13 * radius))
    for right in (-radius, radius):
        for ax, ay, bx, by in ((0.25, 0, 0.65, -0.9), (0.45, -0.45, 0.9, -0.5), (0.55, -0.7, 0.25, -0.95)):
            tine = x + ax * right, y + ay * radius, x + bx * right, y + by * radius
            pen.line(tine, COLOURS["stag"], wide)
    pen.ellipse((x - 0.5 * radius, y - 0.25 * radius, x + 0.5 * radius, y + 0.95 * radius), COLOURS["stag"])


def _hare(pen, x, y, radius):
    """A head with long ears."""
    rim = {"fill": COLOURS["hare"], "outline": rim_of(COLOURS["hare"]), "width": FINE}
    for side in (-1, 1):
        ear = x + side * 0.27 * radius
        pen.ellipse((ear - 0.17 * radius, y - 0.9 * radius, ear + 0.17 * radius, y + 0.2 * radius), **rim)
    _disc(pen, x, y + 0.3 * radius, 0.5 * radius, **rim)


def _coin(owner, pen, x, y, radius):
    """A ring in its owner's colour."""
    _disc(pen, x, y, 0.8 * radius, fill=COLOURS["light"], outline=hunter_colour(owner), width=round(0.3 * radius))


def _drift(pen, x, y, radius):
    """A heap of snow."""
    for dx, dy, part in ((-0.45, 0.25, 0.5), (0.45, 0.25, 0.5), (0, -0.15, 0.6)):
        _disc(pen, x + dx * radius, y + dy * radius, part * radius, fill=COLOURS["drift"])


def _food(pen, x, y, radius):
    """An apple."""
    stalk = max(2, round(0.13 * radius))
    pen.line((x, y - 0.5 * radius, x + 0.12 * radius, y - 0.95 * radius), COLOURS["stag"], stalk)
    pen.ellipse((x + 0.1 * radius, y - 0.95 * radius, x + 0.7 * radius, y - 0.6 * radius), COLOURS["leaf"])
    _disc(pen, x, y + 0.15 * radius, 0.75 * radius, fill=COLOURS["food"], outline=rim_of(COLOURS["food"]), width=FINE)


def _level(pen, x, y, radius, level, colour):
    """A player's level, at its upper right."""
    x, y = x + 0.72 * radius, y - 0.72 * radius
    _disc(pen, x, y, 0.42 * radius, fill=COLOURS["light"], outline=colour, width=FINE)
    pen.text((x, y), str(level), COLOURS["ink"], _font(0.6 * radius), anchor="mm")


PIECES = {"stag": _stag, "hare": _hare, "drift": _drift, "food": _food}
PIECES |= {f"coin_{owner}": functools.partial(_coin, owner) for owner in range(2)}
STEPS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


def _deed(pen, x, y, radius, action, colour):
    """What a hunter did last: a point the way it went, a ring if it hunts or loads."""
    if action in STEPS:
        dx, dy = STEPS[action]
        tip, base, half = 1.12 * radius, 0.7 * radius, 0.4 * radius
        corners = [(x + dx * tip, y + dy * tip)]
        corners += [(x + dx * base + dy * half * s, y + dy * base + dx * half * s) for s in (-1, 1)]
        pen.polygon(corners, colour)
    elif action == "load" or action.startswith(("hunt", "remove")):
        _disc(pen, x, y, 1.08 * radius, outline=colour, width=FINE)


def _returns(image, pen, agents, colours, size):
    """Below the field, what each agent has got; those who have left are pale."""
    middle, font = image.height - FOOTER * FINE / 2, _font(12 * FINE)
    share = size / len(agents)
    for i, (agent, colour) in enumerate(zip(agents, colours)):
        x = (i + 0.5) * share - 16 * FINE
        _paste_token(image, x, middle, 8 * FINE, colour if agent["alive"] else pale(colour), str(i))
        ink = COLOURS["ink"] if agent["alive"] else COLOURS["quiet"]
        pen.text((x + 13 * FINE, middle), f"{agent['return']:.2f}", ink, font, anchor="lm")


# ---- predators and prey ----
def _tag(scene, size, seers, goals):
    bars, half = (HEADER + FOOTER) * FINE, scene["width"] / 2
    unit = (size - bars) / scene["height"]
    left, top = (size - scene["width"] * unit) / 2, HEADER * FINE
    image = Image.new("RGB", (size, size), COLOURS["light"])
    pen = ImageDraw.Draw(image, "RGBA")
    agents = scene["agents"]
    colours = [COLOURS[agent["kind"]] for agent in agents]

    def place(x, y):  # who is beyond the picture is drawn at its edge
        x, y = (min(max(value, -half), half) for value in (x, y))
        return left + (x + half) * unit, top + (half - y) * unit

    def square(middle, reach):
        (x, y), corner = middle, half if reach is None else reach
        return [place(x - corner, y + corner), place(x + corner, y - corner)]

    pen.rectangle(square((0, 0), half), fill=COLOURS["ground"]["#"])
    pen.rectangle(square((0, 0), scene["edge"]), COLOURS["ground"]["."], COLOURS["edge"], 2 * FINE)
    for i in seers:
        agent = agents[i]
        middle, reach = ((0, 0), half) if not agent["sight"] else ((agent["x"], agent["y"]), agent["sight"])
        pen.rectangle(square(middle, reach), _clear(colours[i], 28), _clear(colours[i], 115), FINE)
    for obstacle in scene["obstacles"]:
        _disc(pen, *place(obstacle["x"], obstacle["y"]), obstacle["radius"] * unit, fill=COLOURS["obstacle"])
    for i, (agent, colour) in enumerate(zip(agents, colours)):
        (x, y), radius = place(agent["x"], agent["y"]), agent["radius"] * unit
        if agent["touching"]:
            _disc(pen, x, y, radius + 4 * FINE, outline=COLOURS["ink"], width=FINE)
        ahead = place(agent["x"] + 0.2 * agent["vx"], agent["y"] + 0.2 * agent["vy"])  # where two steps lead
        pen.line(((x, y), ahead), rim_of(colour), 2 * FINE)
        _paste_token(image, x, y, radius, colour, str(i))
    for i, x, y in goals:
        _goal(pen, place(agents[i]["x"], agents[i]["y"]), place(x, y), 0.06 * unit, colours[i])
    _header(pen, scene)
    _returns(image, pen, agents, colours, size)
    return image

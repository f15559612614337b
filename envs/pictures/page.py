"""One self-contained page that plays recorded matches in a browser: nothing is fetched, no server is needed.

What is drawn is the same as render.py draws; page.html does it, with the colours and letters from there.
"""

import json
from pathlib import Path

from envs.pictures import render

MOVING = {  # what changes about a unit or hunter from frame to frame
    "units": ("x", "y", "health", "shield"),
    "hunters": ("row", "col", "alive", "action", "return", "x", "y", "size"),
    "agents": ("x", "y", "vx", "vy", "touching", "return"),
}


def write(path, episodes, names, fps=8, sight=(), captions=None):
    """Writes the page. `episodes` are lists of scenes, each with a name; a scene may have `goals` (see render.draw).

    `sight` are the agents whose sight is shown at first. `captions` say what each match was played with.
    """
    units = {(u["side"], u["kind"]) for scenes in episodes for u in scenes[0].get("units", ())}
    recording = {
        "look": _look(units),
        "moving": MOVING,
        "fps": fps,
        "sight": list(sight),
        "episodes": [
            {"name": name, "caption": caption, **_pack(scenes)}
            for name, caption, scenes in zip(names, captions or [""] * len(names), episodes)
        ],
    }
    text = json.dumps(recording, separators=(",", ":")).replace("<", "\\u003c")  # nothing ends the script element
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    Path(path).write_text(template.replace("__RECORDING__", text), encoding="utf-8")


def _look(units):
    def paint(fill):
        return {"fill": fill, "ink": render.ink_on(fill), "rim": render.rim_of(fill)}

    kinds = {kind: [None, None] for _, kind in units}
    for side, kind in units:
        letter, fill = render.style(side, kind)
        kinds[kind][side] = {"letter": letter, "fallen": render.fallen(fill), **paint(fill)}
    return {
        "colours": render.COLOURS,
        "kinds": kinds,
        "hunters": [paint(fill) for fill in render.COLOURS["hunters"]],
        "rims": {kind: render.rim_of(render.COLOURS[kind]) for kind in ("hare", "food")},
        "tag": {kind: paint(render.COLOURS[kind]) for kind in ("predator", "prey")},
    }


def _pack(scenes):
    """A match as what stays the same, and for each frame what does not."""
    scenes = [_placed(scene) for scene in scenes]
    first = scenes[0]
    constant = {key: value for key, value in first.items() if all(scene.get(key) == value for scene in scenes)}
    frames = [{key: value for key, value in scene.items() if key not in constant} for scene in scenes]
    for group, fields in MOVING.items():
        if group in first:
            constant[group] = [{key: thing[key] for key in thing if key not in fields} for thing in first[group]]
            for frame, scene in zip(frames, scenes):
                frame[group] = [[_short(thing[field]) for field in fields] for thing in scene[group]]
    return {"constant": constant, "frames": frames}


def _placed(scene):
    """The scene with what the page need not work out: the part of the map to show, or places within cells."""
    if scene["game"] == "battle":
        return {**scene, "view": render.view_of(scene["ground"], scene["width"], scene["height"])}
    if scene["game"] == "tag":
        return scene
    if scene["game"] == "picture":
        raise ValueError(f"{scene['title']} draws its own pictures, for a .gif or an .mp4: there is no page of them")
    prey, hunters = (
        [{**thing, **dict(zip(("x", "y", "size"), place or (None,) * 3))} for thing, place in zip(scene[group], places)]
        for group, places in zip(("prey", "hunters"), render.places_in_cells(scene))
    )
    return {**scene, "prey": prey, "hunters": hunters}


def _short(value):
    return round(value, 3) if isinstance(value, float) else value

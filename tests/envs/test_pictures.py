"""Scenes, pictures, what `python -m training.play` writes, and the page in a real browser."""

import base64
import dataclasses
import io
import json
import os
import select
import shutil
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import NOT_TRAINED
from PIL import Image, ImageColor

import envs
from envs.battle.data import MAPS, TERRAINS
from envs.pictures import page, render
from training import checkpoints, play

STOP, NORTH, ATTACK = 1, 2, 6
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def duel(env_id="3m", health=None, **options):
    """Allies in a column at x = 10, enemies at x = 13, all of them in reach of one another."""
    env = envs.make(env_id, **options)
    env.reset(seed=0)
    units = len(env.unit_kinds)
    places = torch.arange(units)
    x = torch.where(places < env.n_agents, 10.0, 13.0).expand(env.num_envs, units)
    y = torch.where(places < env.n_agents, 12.0 + places, 12.0 + places - env.n_agents).expand(env.num_envs, units)
    env.set_units(x=x, y=y, health=None if health is None else torch.tensor([health]).expand(env.num_envs, units))
    return env


def attack(env, enemy=0):
    return torch.full((env.num_envs, env.n_agents), ATTACK + enemy)


def near(picture, colour, tolerance=12):
    """Where a picture has a colour: (rows, columns)"""
    return np.nonzero(np.abs(picture.astype(int) - ImageColor.getrgb(colour)).max(axis=2) <= tolerance)


def battle_scene(**changes):
    marine = {"kind": "marine", "radius": 0.375, "health": 45.0, "max_health": 45.0, "shield": 0.0, "max_shield": 0.0}
    scene = {
        "game": "battle", "title": "3m", "step": 3, "limit": 60, "width": 32, "height": 32, "ground": [], "sight": 9.0,
        "units": [{"side": 0, "x": 8.0, "y": 8.0, **marine}, {"side": 1, "x": 20.0, "y": 24.0, **marine}],
        "shots": [], "status": "running",
    }  # fmt: skip
    return {**scene, **changes}


def hunt_scene(**changes):
    def hunter(row, col, action="stay", alive=True):
        return {"row": row, "col": col, "alive": alive, "action": action, "return": 0.0}

    scene = {
        "game": "hunt", "title": "stag_hunt", "step": 3, "limit": 35, "width": 8, "height": 8,
        "obstacles": [[0, 4], [0, 5], [1, 4]],
        "prey": [{"kind": "stag", "row": 5, "col": 2}, {"kind": "hare", "row": 2, "col": 6}],
        "hunters": [hunter(5, 2, "hunt stag"), hunter(5, 2, "up"), hunter(5, 2), hunter(7, 7, alive=False)],
        "radius": 1, "status": "running",
    }  # fmt: skip
    return {**scene, **changes}


# ---- scenes ----
def test_scene_of_a_battle_tells_what_the_simulation_holds():
    env = envs.make("MMM2", num_envs=2)
    env.reset(seed=3)
    for _ in range(6):
        env.step(env.scripted_actions("weakest"))
    scene = env.scene(1)
    assert json.loads(json.dumps(scene)) == scene
    assert [scene[key] for key in ("game", "title", "step", "limit", "width", "height", "status")] == [
        "battle", "MMM2", 6, 180, 32, 32, "running"]  # fmt: skip
    assert [unit["side"] for unit in scene["units"]] == [0] * 10 + [1] * 12
    assert [unit["kind"] for unit in scene["units"]] == env.unit_kinds
    for name in ("x", "y", "health", "shield"):
        assert [unit[name] for unit in scene["units"]] == env.units()[name][1].tolist()
    medivac = scene["units"][9]
    assert (medivac["kind"], medivac["max_health"], medivac["max_shield"], medivac["radius"]) == (
        "medivac", 150.0, 0.0, 0.75)  # fmt: skip


def test_row_zero_of_the_ground_is_in_the_south():
    env = envs.make("corridor")
    env.reset()
    ground = env.scene()["ground"]
    assert (len(ground), len(ground[0])) == (32, 32)
    assert ground[1] == "#..............#################" and ground[30] == "###################............#"
    assert all(ground[int(unit["y"])][int(unit["x"])] != "#" for unit in env.scene()["units"])


def test_shots_are_those_of_the_last_step():
    env = duel(health=[45.0] * 6)
    assert env.scene()["shots"] == []
    env.step(attack(env, enemy=1))
    shots = env.scene()["shots"]
    assert [shot for shot in shots if shot[0] < 3] == [[0, 4, "hit"], [1, 4, "hit"], [2, 4, "hit"]]
    assert {shooter for shooter, target, _ in shots if target < 3} == {3, 4, 5}
    env.step(torch.full((1, 3), NORTH))  # the allies walk while they reload
    assert not [shot for shot in env.scene()["shots"] if shot[0] < 3]


def test_the_dead_do_not_shoot():
    env = duel(health=[1.0, 45, 45, 45, 45, 45])
    env.step(attack(env))
    for _ in range(3):
        assert env.scene()["units"][0]["health"] == 0
        env.step(env.scripted_actions("hold"))
        assert all(shooter != 0 for shooter, _, _ in env.scene()["shots"])


def test_nearly_all_shots_are_in_the_scene():
    env, shown, fired = envs.make("8m"), set(), set()
    for seed in range(3):
        env.reset(seed=seed)
        for step in range(20):
            before = env.units()["cooldown"][0].clone()
            env.step(env.scripted_actions("weakest"))
            longer = env.units()["cooldown"][0] > (before - 8).clamp(min=0) + 0.001  # than without a shot
            living = longer & (env.units()["health"][0] > 0)
            fired |= {(seed, step, unit) for unit in living.nonzero().flatten().tolist()}
            shown |= {(seed, step, shooter) for shooter, _, _ in env.scene()["shots"]}
    assert len(fired) > 100
    assert len(fired & shown) > 0.9 * max(len(fired), len(shown))


def test_a_medivac_heals_who_is_hurt():
    env = envs.make("MMM")
    env.reset()
    health = env.units()["health"].clone()
    health[0, 3] = 10  # a marine: the marauders are 0 and 1
    env.set_units(health=health)
    actions = torch.full((1, 10), STOP)
    actions[0, 9] = ATTACK + 3
    env.step(actions)
    assert env.scene()["shots"] == [[9, 3, "heal"]]


def test_a_baneling_hits_once_when_it_explodes():
    env = envs.make("so_many_baneling")
    env.reset()
    health, x, y = (env.units()[key].clone() for key in ("health", "x", "y"))
    health[0, 8:] = 0  # one baneling is left, next to a zealot
    x[0, 7], y[0, 7] = x[0, 0] + 0.9, y[0, 0] - 0.9
    env.set_units(x=x, y=y, health=health)
    actions = torch.full((1, 7), STOP)
    shots = []
    for _ in range(4):
        env.step(actions)
        shots += env.scene()["shots"]
        actions = env.scripted_actions("hold")
    assert [(shooter, effect) for shooter, _, effect in shots if shooter == 7] == [(7, "hit")]


def test_status_says_how_a_match_ended():
    won, lost = duel(health=[45.0, 45, 45, 1, 1, 1]), duel(health=[1.0, 1, 1, 45, 45, 45])
    short = envs.make("3m", map_spec=dataclasses.replace(MAPS["3m"], limit=1))
    short.reset()
    short.step(short.scripted_actions("hold"))
    assert short.scene()["status"] == "time"
    for env, status in ((won, "won"), (lost, "lost")):
        assert env.scene()["status"] == "running"
        for _ in range(3):
            env.step(env.scripted_actions("hold"))
        assert env.scene()["status"] == status


def test_after_an_autoreset_the_scene_is_the_new_match():
    env = duel(health=[45.0, 45, 45, 1, 1, 1], autoreset=True)
    while not env.step(env.scripted_actions("hold"))[2].any():
        pass
    scene = env.scene()
    assert (scene["step"], scene["status"], scene["shots"]) == (0, "running", [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")
def test_scenes_and_pictures_are_the_same_on_cuda():
    scenes = []
    for device in ("cpu", "cuda"):
        env = envs.make("MMM", num_envs=3, device=device)
        env.reset(seed=1)
        for _ in range(8):
            env.step(env.scripted_actions("weakest"))
        scenes.append(env.scene(2))
    assert scenes[0] == scenes[1]


# ---- pictures ----
def test_render_gives_an_rgb_array_of_one_match():
    env = envs.make("8m", num_envs=2)
    env.reset()
    assert env.metadata["render_modes"] == ["rgb_array"]
    first, size = env.render(0), env.render(0, size=200).shape
    assert first.dtype == np.uint8 and first.shape[1:] == (480, 3) and first.shape[0] <= 480
    assert size[1:] == (200, 3)
    assert not np.array_equal(first, env.render(1))  # the two start at slightly different places
    for _ in range(8):
        env.step(env.scripted_actions("nearest"))
        assert env.render(0).shape == first.shape
    assert not np.array_equal(first, env.render(0))


@pytest.mark.parametrize("terrain", ["corridor", "plateau", "nest", "field"])
def test_pictures_of_all_shapes_fit(terrain):
    ground = list(reversed(TERRAINS[terrain].split()))
    picture = render.draw(battle_scene(ground=ground))
    assert picture.shape[1] == 480 and 200 < picture.shape[0] <= 480


def test_north_is_up_and_east_is_right():
    picture = render.draw(battle_scene())
    blue, orange = (near(picture, colour) for colour in render.COLOURS["sides"])
    on_map = blue[0] > render.HEADER, orange[0] > render.HEADER  # the header has a disc of each colour
    scale = (480 - render.HEADER) / 32
    left = (480 - 32 * scale) / 2
    for (rows, columns), here, (x, y) in zip((blue, orange), on_map, ((8, 8), (20, 24))):
        assert abs(columns[here].mean() - (left + x * scale)) < 2
        assert abs(rows[here].mean() - (render.HEADER + (32 - y) * scale)) < 3


def test_bars_are_as_long_as_health_and_shield():
    def lengths(health, shield):
        unit = {
            **battle_scene()["units"][0],
            "kind": "colossus",
            "radius": 1.0,
            "max_health": 200.0,
            "max_shield": 150.0,
        }
        picture = render.draw(battle_scene(units=[{**unit, "health": health, "shield": shield}]))
        bars = (near(picture, render.COLOURS[name], 30)[1] for name in ("health", "shield"))
        return [len(set(columns.tolist())) for columns in bars]

    full, half = lengths(200.0, 150.0), lengths(100.0, 37.5)
    assert full[0] == full[1] >= 26
    assert abs(half[0] - full[0] / 2) <= 1 and abs(half[1] - full[1] / 4) <= 1


def test_the_dead_are_a_pale_cross():
    units = battle_scene()["units"]
    units[1]["health"] = 0.0
    picture = render.draw(battle_scene(units=units))[render.HEADER :]
    assert len(near(picture, render.COLOURS["sides"][1])[0]) == 0
    assert len(near(picture, render.fallen(render.COLOURS["sides"][1]), 30)[0]) > 3


def test_shots_join_shooter_and_target():
    before = render.draw(battle_scene()).astype(int)
    after = render.draw(battle_scene(shots=[[0, 1, "hit"]])).astype(int)
    middle_row, middle_column = render.HEADER + 16 * (480 - render.HEADER) / 32, 240 - 2 * (480 - render.HEADER) / 32
    rows, columns = np.nonzero((before != after).any(axis=2))
    assert np.hypot(rows - middle_row, columns - middle_column).min() < 2
    assert (rows.max() - rows.min()) > 200 and (columns.max() - columns.min()) > 150


def test_sight_is_shaded_as_far_as_it_reaches():
    scene, scale = battle_scene(), (480 - render.HEADER) / 32
    before = render.draw(scene).astype(int)
    rows, columns = np.nonzero((before != render.draw(scene, sight=0)).any(axis=2))
    row, column = render.HEADER + 24 * scale, (480 - 32 * scale) / 2 + 8 * scale
    reach = np.hypot(rows - row, columns - column) / scale
    assert 8.9 < reach.max() < 9.2
    both = np.nonzero((before != render.draw(scene, sight=[0, 1])).any(axis=2))
    assert len(both[0]) > 1.5 * len(rows)


def test_goals_are_marked_where_they_are():
    scene, scale = battle_scene(), (480 - render.HEADER) / 32
    before, after = render.draw(scene).astype(int), render.draw(scene, goals=[(0, 28, 4)])
    rows, columns = np.nonzero((before != after).any(axis=2))
    assert abs(rows.max() - (render.HEADER + 28.8 * scale)) < 2
    assert abs(columns.max() - ((480 - 32 * scale) / 2 + 28.8 * scale)) < 2
    assert abs(columns.min() - ((480 - 32 * scale) / 2 + 8 * scale)) < 8  # the line begins at the agent


def test_everyone_in_a_crowded_cell_is_seen():
    scene = hunt_scene()
    picture = render.draw(scene)[render.HEADER : -render.FOOTER]
    scale = (480 - render.HEADER - render.FOOTER) / 8
    left = (480 - 8 * scale) / 2
    for colour in [*render.COLOURS["hunters"][:3], render.COLOURS["stag"]]:
        rows, columns = near(picture, colour)
        assert len(rows) > 20
        assert rows.min() / scale >= 5 and rows.max() / scale < 6.1
        assert (columns.min() - left) / scale >= 2 and (columns.max() - left) / scale < 3.1
    assert len(near(picture, render.COLOURS["hunters"][3])[0]) == 0  # has left


def test_places_in_a_cell_do_not_overlap():
    for crowd in range(1, 10):
        hunter = hunt_scene()["hunters"][0]
        prey, hunters = render.places_in_cells(hunt_scene(hunters=[hunter] * crowd))
        here = [prey[0], *hunters]
        for i, (x, y, radius) in enumerate(here):
            assert max(abs(x - 2.5), abs(y - 5.5)) + radius <= 0.5
            assert all(np.hypot(x - a, y - b) >= radius + other - 1e-9 for a, b, other in here[:i])


def test_a_hunters_sight_is_a_square_of_cells():
    hunters = [{**hunt_scene()["hunters"][0], "row": 4, "col": 5}]
    scale = (480 - render.HEADER - render.FOOTER) / 8
    for radius, box in ((1, (4, 3, 7, 6)), (3, (2, 1, 8, 8)), (None, (0, 0, 8, 8))):
        scene = hunt_scene(hunters=hunters, radius=radius)
        rows, columns = np.nonzero((render.draw(scene) != render.draw(scene, sight=[0])).any(axis=2))
        columns, rows = (columns - (480 - 8 * scale) / 2) / scale, (rows - render.HEADER) / scale
        seen = columns.min(), rows.min(), columns.max(), rows.max()
        assert np.allclose(seen, box, atol=0.06)


# ---- playing ----
def run(*arguments):
    play.main(play.tyro.cli(play.Args, args=[str(argument) for argument in arguments]))


def test_play_writes_a_gif_and_a_summary(tmp_path, capsys):
    run("3m", "--policy", "nearest", "--episodes", 2, "--out", tmp_path / "new" / "match.gif", "--size", 160)
    lines = capsys.readouterr().out.splitlines()
    steps = [int(line.split()[-2]) for line in lines[:2]]
    assert [line.split(":")[0] for line in lines[:2]] == ["match 0", "match 1"]
    assert all(" return " in line and (" won," in line or " lost," in line) for line in lines[:2])
    with Image.open(tmp_path / "new" / "match.gif") as image:
        shown = 0
        for frame in range(image.n_frames):
            image.seek(frame)
            shown += image.info["duration"]
    assert image.size[0] == 160
    # frames at 8 a second, in the hundredths that a GIF counts in; a second for each end
    assert abs(shown - (sum(steps) * 120 + 2 * 1000)) <= 2 * 125


def test_seats_can_have_policies_of_their_own(tmp_path):
    env = envs.make("3m")
    obs, info = env.reset(seed=0)
    for _ in range(6):
        obs, _, _, _, info = env.step(env.scripted_actions("nearest"))
    act, goals, seats = play.load_policy("hold,nearest,kite", env)
    actions = act(obs, info).clone()
    assert goals() == seats() == []
    for seat, name in enumerate(("hold", "nearest", "kite")):
        assert actions[0, seat] == env.scripted_actions(name)[0, seat]
    with pytest.raises(ValueError, match="3 seats"):
        play.load_policy("hold,nearest", env)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--out", "match.avi"], r"\*\.gif, \*\.mp4, \*\.html"),
        (["--policy", "clever"], "nearest, weakest"),
        (["--episodes", "0"], "episodes"),
        (["--sight", "3"], "0 to 2"),
    ],
)
def test_play_rejects_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        run("3m", *arguments)


def test_an_mp4_without_an_encoder_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ValueError, match=r'ffmpeg: pip install -e "\.\[video\]".*\.gif'):
        run("3m", "--out", tmp_path / "match.mp4")

    def nothing_for_this_system():
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", SimpleNamespace(get_ffmpeg_exe=nothing_for_this_system))
    with pytest.raises(ValueError, match=r"\[video\]"):
        run("3m", "--out", tmp_path / "match.mp4")


def test_the_encoder_is_the_systems_or_that_of_a_package(tmp_path, monkeypatch):
    ours = SimpleNamespace(get_ffmpeg_exe=lambda: "of the package")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", ours)
    called = []
    monkeypatch.setattr(play.subprocess, "run", lambda command, input, check: called.append((command, len(input))))
    for found, expected in (("of the system", "of the system"), (None, "of the package")):
        monkeypatch.setattr(play.shutil, "which", lambda name, found=found: found)
        run("3m", "--out", tmp_path / "match.mp4", "--size", 161)
        command, size = called.pop()
        assert command[0] == expected and command[-1] == str(tmp_path / "match.mp4")
        width, height = map(int, command[command.index("-s") + 1].split("x"))
        assert width == 161 and size % (width * height * 3) == 0


def test_play_writes_an_mp4(tmp_path):
    try:
        play.find_ffmpeg()
    except ValueError:
        pytest.skip("there is no ffmpeg here")
    run("3m", "--out", tmp_path / "match.mp4", "--size", 161)  # an odd width, which the format does not have
    assert (tmp_path / "match.mp4").read_bytes()[4:8] == b"ftyp"


def test_a_window_without_a_screen_is_rejected(monkeypatch):
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    with pytest.raises(ValueError, match="screen"):
        run("3m", "--window")
    plt.close("all")


SCRIPT = """
from dataclasses import dataclass

from training import checkpoints
from training.team import Team

@dataclass
class Args:
    seed: int = 1

def make_team(args, env, seed):
    return Team(env, "self")

class Player:
    def __init__(self, env, bias):
        self.env, self.bias = env, bias

    def reset(self, mask):
        assert mask.shape == (1,)

    def act(self, inputs, epsilon):
        return self.env.scripted_actions("nearest") if self.bias == 7 else None

    def goals(self, env, seat):
        return [(seat, self.bias * 2, 16)]

def load_player(run, env, seats):
    return Player(env, checkpoints.read_run(run)["bias"])
"""


def test_a_run_folder_is_played_by_its_script(tmp_path, monkeypatch):
    """A script elsewhere than in the project's folder, such as the current one, has to be named."""
    monkeypatch.delenv("OMG_SCRIPTS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(SCRIPT)
    folder = tmp_path / "runs" / "toy_run"
    folder.mkdir(parents=True)
    env = envs.make("3m")
    with pytest.raises(ValueError, match=r"no checkpoint\.pt in .*toy_run"):
        play.load_policy(str(folder), env)
    content = {"env_id": "3m", "sizes": checkpoints.env_sizes(env), "args": {"seed": 3}, "networks": {}, **NOT_TRAINED}
    torch.save({**content, "algorithm": "unheard_of"}, folder / "checkpoint.pt")
    torch.save({**content, "algorithm": "toy", "bias": torch.tensor(7)}, folder / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"toy_run: there is no script toy\.py in .*; one elsewhere .* toy\.py,"):
        play.load_policy(str(folder), env)
    with pytest.raises(ValueError, match=r"--script gone\.py: there is no such file"):
        run("3m", "--policy", folder, "--script", "gone.py")
    run("3m", "--policy", folder, "--script", "toy.py", "--out", tmp_path / "match.html")
    frames = recorded(tmp_path / "match.html")["episodes"][0]["frames"]
    assert len(frames) > 5
    assert [frame.get("goals") for frame in frames] == [[[0, 14, 16]]] * (len(frames) - 1) + [None]


def test_a_run_knows_its_environment_and_its_agents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMG_SCRIPTS", "toy.py")
    (tmp_path / "toy.py").write_text(SCRIPT)
    folder = tmp_path / "runs" / "toy_run"
    folder.mkdir(parents=True)
    env_id = "3m,obs_last_action=True"
    sizes = checkpoints.env_sizes(envs.make(env_id, n_agents=5))
    content = {"env_id": env_id, "sizes": sizes, "args": {"seed": 3, "n_agents": 5}, "networks": {}, **NOT_TRAINED}
    torch.save({**content, "algorithm": "toy", "bias": torch.tensor(7)}, folder / "checkpoint.pt")
    run("--policy", folder, "--out", tmp_path / "match.html")
    constant = recorded(tmp_path / "match.html")["episodes"][0]["constant"]
    caption = recorded(tmp_path / "match.html")["episodes"][0]["caption"]
    assert caption == "policy toy_run, seed 0, the learner has all seats"
    assert constant["title"] == env_id and [unit["side"] for unit in constant["units"]].count(0) == 5
    for words in ([], ["--policy", "nearest"], ["--policy", tmp_path / "nowhere"]):
        with pytest.raises(ValueError, match=r"name an environment, or the folder .* --policy runs/<run>"):
            run(*words)
    (folder / "checkpoint.pt").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint\.pt in .*toy_run"):
        run("--policy", folder)


def test_captions_name_the_learners_seats():
    env = envs.make("3m")
    assert play.caption_of("nearest", 5, 0, env, []) == "policy nearest, seed 5"
    assert (
        play.caption_of("runs/a", 5, 2, env, [2]) == "policy runs/a, seed 5, match 2, the learner has seat 2 (marine_2)"
    )
    assert play.caption_of("runs/a", 0, 0, env, [2, 0]).endswith("the learner has seat 0 (marine_0), 2 (marine_2)")


# ---- the page ----
def recorded(path):
    text = path.read_text(encoding="utf-8").split('id="recording">')[1].split("</script>")[0]
    return json.loads(text)


def test_the_page_is_self_contained_and_safe(tmp_path):
    title = "</script><script>alert(1)</script><!--"
    page.write(tmp_path / "match.html", [[battle_scene(title=title), battle_scene(title=title, step=4)]], [title])
    text = (tmp_path / "match.html").read_text(encoding="utf-8")
    assert "alert(1)</script>" not in text and text.count("</script>") == 2
    assert not any(word in text for word in ("http:", "https:", "//cdn", "src=", "url(", "<link", "import("))
    episode = recorded(tmp_path / "match.html")["episodes"][0]
    assert episode["name"] == episode["constant"]["title"] == title
    assert [frame["step"] for frame in episode["frames"]] == [3, 4]
    assert "kind" in episode["constant"]["units"][0] and episode["frames"][0]["units"][0] == [8.0, 8.0, 45.0, 0.0]


@pytest.mark.slow
def test_a_wheel_outside_the_checkout_plays_a_trained_run(tmp_path, complete_run):
    pytest.importorskip("setuptools", minversion="77")  # as pyproject.toml has it; Python may bring an older one
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    for package in ("envs", "training", "experiments"):
        shutil.copytree(checkpoints.ROOT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (
        *checkpoints.ROOT.glob("*.py"),
        *map(checkpoints.ROOT.joinpath, ("pyproject.toml", "README.md", "LICENSE")),
    ):
        shutil.copy(path, checkout)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=checkout, capture_output=True, check=True)
    (wheel,) = checkout.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    shutil.rmtree(checkout)
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"envs", "training", "experiments"}
    assert (site / "envs" / "py.typed").is_file() and (site / "envs" / "pictures" / "page.html").is_file()
    variables = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    words = ["-m", "training.play", "--policy", str(complete_run("iql", "matrix_ipd")["run"].folder)]
    played = subprocess.run([sys.executable, *words], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert played.returncode == 0 and "match 0: return" in played.stdout, played.stderr
    # every script starts; in one process, as each takes seconds to import
    start = "import runpy, sys\nsys.argv[:1] = ['-m']\nimport training\nfor name in sys.argv[1:]:\n"
    start += "    found = runpy.run_module(name, run_name='imported')\n"
    start += "    assert found.get('ROOT', training._scripts) == training._scripts"
    names = [f"training.scripts.{path.stem}" for path in sorted((site / "training" / "scripts").glob("*.py"))]
    assert len(names) == 15 and "training.scripts.omg_iql" in names
    names += [f"experiments.{name}" for name in ("sweep", "evaluate", "strangers", "paper", "compare")]
    started = subprocess.run([sys.executable, "-c", start, *names], cwd=tmp_path, env=variables, capture_output=True)
    assert started.returncode == 0, started.stderr.decode()
    words = ["-m", "training.scripts.omg_iql", "--gamma", "7"]
    refused = subprocess.run([sys.executable, *words], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert refused.returncode == 2 and "--gamma is from 0 to 1" in refused.stderr, refused.stderr
    words = ["-m", "experiments.sweep", "--script", "gone.py", "--env-ids", "3m"]
    refused = subprocess.run([sys.executable, *words], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert (
        refused.returncode == 2
        and f"there is no such file, here or in {site / 'training' / 'scripts'}" in refused.stderr
    )


class Browser:
    """Chromium without a window, driven through its DevTools pipe: JSON messages, each ended by a zero byte."""

    def __init__(self, folder):
        for name in ("commands", "answers"):
            os.mkfifo(folder / name)
        self.folder, self.events, self.number, self.rest, self.session = folder, [], 0, b"", None
        flags = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
                 "disable-background-networking", "disable-component-update", "remote-debugging-pipe",
                 f"user-data-dir={folder / 'profile'}"]  # fmt: skip
        self.process = subprocess.Popen(
            ["sh", "-c", 'exec "$0" "$@" 3<commands 4>answers', BROWSER, *(f"--{flag}" for flag in flags)],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.commands = os.open(folder / "commands", os.O_WRONLY)
        self.answers = os.open(folder / "answers", os.O_RDONLY)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.resize(514, 900)

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def read(self):
        while b"\0" not in self.rest:
            assert select.select([self.answers], [], [], 60)[0], "the browser does not answer"
            piece = os.read(self.answers, 1 << 20)
            assert piece, "the browser has ended"
            self.rest += piece
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, episodes, **options):
        path = self.folder / "match.html"
        page.write(path, episodes, [f"match {i}" for i in range(len(episodes))], **options)
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.until("document.readyState === 'complete' && document.getElementById('step').textContent !== ''")
        return path.as_uri()

    def ask(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        assert not [event for event in self.events if event.get("method") == "Runtime.exceptionThrown"], self.events
        return answer["result"].get("value")

    def until(self, expression):
        end = time.monotonic() + 60
        while not self.ask(expression):
            assert time.monotonic() < end, f"never: {expression}"
            time.sleep(0.02)

    def press(self, key):
        text = {"text": " "} if key == " " else {}
        for kind in ("keyDown", "keyUp"):
            code = {" ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}[
                key
            ]
            extra = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **extra)

    def click(self, element, x=0.5, y=0.5):
        box = self.ask(f"(({{x, y, width, height}}) => [x, y, width, height])({element}.getBoundingClientRect())")
        place = {"x": box[0] + x * box[2], "y": box[1] + y * box[3], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **place)

    def frame(self):
        return int(self.ask("part.frame.value"))

    def canvas(self):
        data = self.ask("part.field.toDataURL()").split(",")[1]
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")).astype(int)

    def close(self):
        self.session = None
        self.call("Browser.close")
        self.process.wait(30)
        os.close(self.commands)
        os.close(self.answers)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if BROWSER is None or os.name == "nt" or subprocess.run([BROWSER, "--version"], check=False).returncode != 0:
        pytest.skip("there is no Chromium here")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def matches():
    env = envs.make("8m")
    return [play.play(env, *play.load_policy("nearest", env)[:2], seed)[0] for seed in (0, None)]


def test_the_page_plays_pauses_steps_and_scrubs(browser, matches):
    address = browser.open(matches)
    last = len(matches[0]) - 1
    browser.until("part.frame.value > 1")  # it plays by itself
    browser.press(" ")
    assert browser.ask("part.play.textContent") == "Play"
    browser.click("part.frame", 0.5)
    middle = browser.frame()
    assert abs(middle - last / 2) <= 1
    assert browser.ask("part.step.textContent") == f"step {middle} / 120"
    time.sleep(0.4)
    assert browser.frame() == middle  # it stands
    browser.press("ArrowRight")
    assert browser.frame() == middle + 1
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    assert browser.frame() == middle - 1
    assert browser.ask("part.step.textContent") == f"step {middle - 1} / 120"
    browser.click("part.play")
    browser.until(f"part.frame.value > {middle}")
    browser.click("part.play")
    browser.click("part.frame", 0.999)
    assert browser.ask("part.step.textContent") == f"step {last} / 120  {matches[0][-1]['status']}"
    asked = {event["params"]["request"]["url"] for event in browser.events
             if event.get("method") == "Network.requestWillBeSent"}  # fmt: skip
    assert asked == {address}


def test_home_and_end_go_to_the_first_and_the_last_step(browser, matches):
    browser.open(matches)
    browser.press("End")
    assert browser.ask("[playing, Number(part.frame.value)]") == [False, len(matches[0]) - 1]
    browser.press("Home")
    assert browser.ask("[playing, time]") == [False, 0]


def test_the_page_is_dark_where_that_is_preferred_and_can_be_switched(browser, matches):
    paper = "getComputedStyle(document.body).backgroundColor"
    shown = {}
    for scheme in ("dark", "light"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open(matches[:1])
        shown[scheme] = browser.ask(f"[{paper}, part.theme.getAttribute('aria-pressed')]")
    assert shown == {"dark": ["rgb(27, 29, 33)", "true"], "light": ["rgb(255, 255, 255)", "false"]}
    browser.click("part.theme")
    assert browser.ask(f"[{paper}, part.theme.getAttribute('aria-pressed')]") == shown["dark"]
    browser.click("part.theme")
    assert browser.ask(paper) == "rgb(255, 255, 255)"


def test_the_caption_says_what_was_played(browser, matches):
    browser.open(matches, captions=["policy nearest, seed 0", "policy nearest, seed 0, match 1"])
    assert browser.ask("part.caption.innerText").split() == ["policy", "nearest,", "seed", "0", "ours", "enemies"]
    ours = browser.ask("getComputedStyle(part.caption.querySelector('.chip')).backgroundColor")
    assert ours == "rgb{}".format(ImageColor.getrgb(render.COLOURS["sides"][0]))
    browser.ask("setEpisode(1)")
    assert "match 1" in browser.ask("part.caption.innerText")
    browser.open([[hunt_scene()]], captions=["<b>policy NS"])
    assert browser.ask("part.caption.innerText") == "<b>policy NS"  # text, and one side only


def test_controls_are_in_the_window_whatever_the_board(browser, matches):
    tall, wide = hunt_scene(height=20), hunt_scene(width=40)
    caption = "policy runs/8m__omg_iql__1__1700000000, seed 0, match 0, the learner has seat 2 (marine_2)"
    try:
        browser.resize(1280, 720)
        for scenes in (matches[0], [tall], [wide]):
            browser.open([scenes, scenes], captions=[caption] * 2)
            lowest = "Math.max(...[...document.querySelectorAll('button, input, select, small')]"
            lowest += ".filter((e) => e.offsetParent).map((e) => e.getBoundingClientRect().bottom))"
            assert browser.ask(lowest) <= 720
            width, height = browser.ask("[part.field.clientWidth, part.field.clientHeight]")
            assert (
                min(width, height) > 100 and abs(width / height - browser.ask("480 / measure(sceneNow()).height")) < 0.1
            )
    finally:
        browser.resize(514, 900)


def test_every_control_has_a_name(browser, matches):
    browser.open(matches)
    browser.press(" ")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "slider", "combobox", "checkbox", "img", "image")
    named = [(node["role"]["value"], node["name"]["value"]) for node in nodes if node["role"]["value"] in roles]
    assert {role for role, _ in named} >= {"button", "slider", "combobox", "checkbox"} and all(
        name for _, name in named
    )
    assert any(name.startswith("8m, step ") for _, name in named), named


@pytest.mark.slow
def test_the_speed_can_be_changed(browser, matches):
    browser.open(matches)
    got = {}
    for key, speed in (("ArrowDown", "0.25"), ("ArrowUp", "4")):
        for _ in range(4):
            browser.press(key)
        assert browser.ask("part.speed.value") == speed
        wait = "setPlaying(false); go(0); setPlaying(true); new Promise((r) => setTimeout(() => r(time), 500))"
        got[speed] = browser.ask(wait)
    assert got["4"] > 3 * got["0.25"] > 0


@pytest.mark.slow
def test_one_match_follows_the_other(browser, matches):
    browser.open(matches)
    browser.click("part.frame", 0.999)
    browser.press("ArrowLeft")
    browser.press(" ")
    browser.until("part.episode.value === '1'")
    browser.ask("setPlaying(false)")
    browser.ask("part.episode.value = 0; part.episode.dispatchEvent(new Event('change'))")
    assert browser.ask("part.frame.max") == str(len(matches[0]) - 1)
    assert browser.frame() == 0
    assert browser.ask("part.episodes.hidden") is False
    browser.open(matches[:1])
    assert browser.ask("part.episodes.hidden") is True


def test_overlays_can_be_switched(browser, matches):
    scenes = [dict(scene) for scene in matches[0]]
    at = next(i for i, scene in enumerate(scenes) if scene["shots"])
    scenes[at]["goals"] = [[0, 24.0, 20.0]]
    browser.open([scenes], sight=[2])
    browser.ask(f"setPlaying(false); go({at})")
    before = browser.canvas()
    for overlay in ("shots", "sight", "names", "goals"):
        browser.click(f"part.{overlay}")
        assert (browser.canvas() != before).any(), overlay
        browser.click(f"part.{overlay}")
        assert np.array_equal(browser.canvas(), before), overlay
    browser.open(matches[:1])
    assert browser.ask("part.goals.parentElement.hidden") is True  # none are recorded
    browser.ask("setPlaying(false); go(0)")
    before = browser.canvas()
    (x, y), unit = (matches[0][0]["units"][3][axis] for axis in "xy"), browser.ask("measure(sceneNow())")
    left, top = (x * unit["unit"] - unit["left"]) / 480, ((32 - y) * unit["unit"] - unit["top"]) / unit["height"]
    browser.click("part.field", left, top)
    assert browser.ask("[part.sight.checked, ...selected]") == [True, 3]
    assert (browser.canvas() != before).any()


@pytest.mark.parametrize("game", ["battle", "hunt", "tag"])
def test_the_page_looks_as_the_pictures_do(browser, matches, game):
    scenes, (left, right), bottom = matches[0][:11:10], (0, 480), None
    if game == "hunt":  # it has margins and a footer
        moved = [{**hunter, "row": 7, "col": 4} for hunter in hunt_scene()["hunters"]]
        scenes, bottom = [hunt_scene(), hunt_scene(step=4, hunters=moved)], 480 - render.FOOTER
    if game == "tag":
        env = envs.make("popp", seed=1)
        scenes, bottom = play.play(env, *play.load_policy("chase", env)[:2], 1)[0][:11:10], 480 - render.FOOTER
    if bottom:
        left, right = 240 - (bottom - render.HEADER) / 2, 240 + (bottom - render.HEADER) / 2
    browser.open([scenes])
    browser.until("time > 0.2")
    browser.ask("setPlaying(false)")
    drawn, pictures = [], []
    for frame, scene in enumerate(scenes):
        browser.ask(f"go({frame})")
        drawn.append(browser.canvas())
        picture = Image.fromarray(render.draw(scene))
        picture = picture.crop((round(left), render.HEADER, round(right), bottom or picture.height))
        size = drawn[-1].shape[1], drawn[-1].shape[0]
        pictures.append(np.asarray(picture.resize(size, Image.Resampling.BOX)).astype(int))
    same = [np.abs(a - b).mean() for a, b in zip(drawn, pictures)]
    other = [np.abs(a - b).mean() for a, b in zip(drawn, reversed(pictures))]
    assert max(same) < 0.7 * min(other), (same, other)
    shot = Image.open(io.BytesIO(base64.b64decode(browser.call("Page.captureScreenshot")["data"])))
    colour = render.COLOURS["predator"] if game == "tag" else render.COLOURS["sides"][0]
    assert len(near(np.asarray(shot.convert("RGB")), colour)[0]) > 50

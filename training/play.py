"""Plays matches, and shows them: as a GIF, an MP4, a page for the browser, or in a window.

python -m training.play 8m --policy nearest --episodes 3 --out match.gif
python -m training.play 8m --policy weakest --out match.html
python -m training.play --policy runs/8m__omg_iql__1 --window
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from PIL import Image

import envs
from envs.pictures import page, render
from training import checkpoints, files
from training.episodes import load_runner

FORMATS = (".gif", ".mp4", ".html")


@dataclass
class Args:
    env_id: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[ENV_ID]")] = None
    """the environment, one of envs.list_ids() (None: that of the run, with its number of agents)"""
    policy: str | None = None
    """one of the environment's policies (None: its first), one for each seat with commas, or a training run's folder"""
    script: tuple[str, ...] = ()  # scripts of your own that the run needs and that are not in the project's folder
    episodes: int = 1  # how many matches to play
    out: Path | None = None  # file to write: .gif, .mp4 or .html
    seed: int = 0  # of the first match
    n_agents: int | None = None  # number of agents, where the environment can be resized
    size: int = 480  # width of the picture in pixels
    fps: float = 8.0  # steps shown in a second
    sight: tuple[int, ...] = ()  # agents whose sight is shaded
    window: bool = False  # show the matches while they are played
    device: str = "cpu"  # where to play: cpu or cuda


# ---- who plays ----
def make_env(args):
    """The environment that is asked for, or the one that the run in --policy was trained in."""
    env_id, n_agents = args.env_id, args.n_agents
    if env_id is None:
        if args.policy is None or not Path(args.policy).is_dir():
            raise ValueError("name an environment, or the folder of a training run: --policy runs/<run>")
        saved = checkpoints.read_run(args.policy)
        env_id = checkpoints.id_from_file(args.policy, saved["env_id"], "python -m training.play")
        n_agents = n_agents or saved["args"].get("n_agents")
    return envs.make(env_id, device=args.device, seed=args.seed, n_agents=n_agents)


def load_policy(name, env):
    """Who plays, from scripted policies or a run's folder.

    (act(obs, info) -> joint actions, goals() -> predictions to mark, seats() -> the learner's in the first match)
    """
    seats = name.split(",")
    if set(seats) <= set(env.policies):
        if len(seats) not in (1, env.n_agents):
            raise ValueError(f"{env.name} has {env.n_agents} seats, but there are {len(seats)} policies")
        numbers = torch.tensor([env.policies.index(seat) for seat in seats]).expand(env.num_envs, env.n_agents)
        return lambda obs, info: env.scripted_actions(numbers), lambda: [], lambda: []
    if Path(name).is_dir():
        runner = load_runner(name, env)
        return runner.policy, runner.goals, lambda: runner.team.learner_seats[0].tolist()
    raise ValueError(
        f"unknown policy {name!r}: one of {', '.join(env.policies)}, {env.n_agents} of them with commas, "
        "or the folder of a training run"
    )


def predicted_places(env, seat, predicted_obs, obs):
    """The places of the others that the agent in `seat` of the first match sees, taken from predicted observations.

    (seat, x, y) in a battle, (seat, row, column) on a grid, to be marked by env.render.
    """
    if not hasattr(env, "places"):
        return []
    places = env.places(predicted_obs)[0][0, 0] + env.origin(seat)
    visible = env.places(obs)[1][0, 0]
    return [(seat, *place) for place, seen in zip(places.tolist(), visible.tolist()) if seen]


@torch.no_grad()
def picture_of_views(runner, views, steps=10):
    """A picture of a match after some steps, with the others where views have them that were made of observations.

    views(obs) -> (such views, the present ones), each (matches, seats, obs_dim)
    """
    env, team = runner.env, runner.team
    env.reset()
    for _ in range(min(steps, env.episode_limit // 2)):
        env.step(runner.policy())
    seat = int(team.learner_seats[0, 0])
    return env.render(goals=predicted_places(env, seat, *views(team.select(env.obs))), sight=seat)


# ---- playing ----
def play(env, act, goals, seed, watch=lambda scene: None):
    """Plays a match; returns (its scenes, its summary). Each scene is passed to `watch` at once."""
    obs, info = env.reset(seed=seed)
    scenes, total, over = [], 0.0, False
    while True:
        scenes.append(env.scene(0))
        if not over:
            with torch.no_grad():
                actions = act(obs, info)
                predicted = goals()
            if predicted:
                scenes[-1]["goals"] = [[float(value) for value in goal] for goal in predicted]
        watch(scenes[-1])
        if over:
            return scenes, f"return {total:.2f}, {scenes[-1]['status']}, {scenes[-1]['step']} steps"
        obs, reward, terminated, truncated, info = env.step(actions)
        total += float(reward[0].mean())
        over = bool(terminated[0] | truncated[0])


def record(runner, path, seed=None, fps=8.0):
    """A GIF of one greedy match of a runner's, in place of what is at `path`, which may be a link."""
    scenes, _ = play(runner.env, runner.policy, runner.goals, seed)
    frames = [render.draw(scene, goals=scene.get("goals")) for scene in scenes]
    files.write(path, lambda file: write_gif(file, frames, fps))


# ---- showing ----
def caption_of(policy, seed, number, env, seats):
    """What a match was played with, in a line."""
    words = [f"policy {Path(policy).resolve().name if Path(policy).is_dir() else policy}", f"seed {seed}"]
    if number:
        words.append(f"match {number}")
    if len(seats) == env.n_agents:
        words.append("the learner has all seats")
    elif seats:
        named = (f"{seat} ({env.agents[seat]})" for seat in sorted(seats))
        words.append(f"the learner has seat {', '.join(named)}")
    return ", ".join(words)


def picture_of(scene, args):
    return render.draw(scene, args.size, args.sight, scene.get("goals"))


def pictures(episodes, args):
    """The frames of all matches; the end of each stands for a second."""
    for scenes in episodes:
        for scene in scenes:
            picture = picture_of(scene, args)
            yield from [picture] * (1 if scene is not scenes[-1] else max(1, round(args.fps)))


def write_gif(path, frames, fps):
    images = [Image.fromarray(frame) for frame in frames]
    sample = np.concatenate([np.asarray(image) for image in images[:: max(1, len(images) // 8)]])
    palette = Image.fromarray(sample).quantize(256)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    images[0].save(path, "GIF", save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0)


def find_ffmpeg():
    """ffmpeg's path: the one of the system, or the one that comes with the package imageio-ffmpeg."""
    installed = shutil.which("ffmpeg")
    if installed:
        return installed
    try:
        import imageio_ffmpeg  # optional

        return imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):  # it has none for this system
        raise ValueError('an MP4 needs ffmpeg: pip install -e ".[video]" brings it; a .gif needs nothing') from None


def write_mp4(path, frames, fps):
    frames = list(frames)
    height, width, _ = frames[0].shape
    even = "pad=ceil(iw/2)*2:ceil(ih/2)*2:color=white"  # the format has no odd sizes
    command = [find_ffmpeg(), "-y", "-loglevel", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", f"{width}x{height}", "-r", str(fps), "-i", "-", "-vf", even, "-pix_fmt", "yuv420p"]
    command += ["-movflags", "+faststart", str(path)]
    subprocess.run(command, input=b"".join(frame.tobytes() for frame in frames), check=True)


class Window:
    """A window of matplotlib's that shows one scene after the other."""

    def __init__(self, args):
        import matplotlib.pyplot as plt  # slow to import, and only needed here

        self.args, self.plt = args, plt
        self.figure = plt.figure(figsize=(6, 6))
        if self.figure.canvas.required_interactive_framework is None:
            raise ValueError("--window needs a screen and a toolkit such as Tk; without them, --out match.gif works")
        self.image = None

    def __call__(self, scene):
        if not self.plt.fignum_exists(self.figure.number):
            raise KeyboardInterrupt("the window was closed")
        picture = picture_of(scene, self.args)
        if self.image is None:
            axes = self.figure.add_axes((0, 0, 1, 1))
            axes.axis("off")
            self.image = axes.imshow(picture)
        self.image.set_data(picture)
        self.plt.pause(1 / self.args.fps)


def main(args):
    if args.out and args.out.suffix.lower() not in FORMATS:
        raise ValueError(f"--out {args.out} is not one of {', '.join('*' + ending for ending in FORMATS)}")
    if args.out and args.out.suffix.lower() == ".mp4":
        find_ffmpeg()  # before anything is played
    if args.out:
        files.writable_folder(args.out.parent)
    for name, largest in (("episodes", 10**6), ("size", 4096), ("fps", 1000)):
        if not 0 < getattr(args, name) <= largest:
            raise ValueError(f"--{name} is above 0 and at most {largest}, not {getattr(args, name)}")
    checkpoints.name_scripts(args.script)
    env = make_env(args)
    if not all(0 <= agent < env.n_agents for agent in args.sight):
        raise ValueError(f"--sight takes agents from 0 to {env.n_agents - 1}, not {args.sight}")
    policy = args.policy or env.policies[0]
    act, goals, seats = load_policy(policy, env)
    watch = Window(args) if args.window else lambda scene: None
    episodes, names, captions = [], [], []
    for number in range(args.episodes):
        scenes, summary = play(env, act, goals, args.seed if number == 0 else None, watch)
        print(f"match {number}: {summary}", flush=True)
        episodes.append(scenes)
        names.append(f"{number}: {summary}")
        captions.append(caption_of(policy, args.seed, number, env, seats()))
    if args.out:
        if args.out.suffix.lower() == ".html":
            page.write(args.out, episodes, names, args.fps, args.sight, captions)
        else:
            write = {".gif": write_gif, ".mp4": write_mp4}[args.out.suffix.lower()]
            write(args.out, pictures(episodes, args), args.fps)
        print(args.out)


if __name__ == "__main__":
    files.drop_what_cannot_be_printed()
    try:
        main(tyro.cli(Args, prog="python -m training.play", description=__doc__.splitlines()[0]))
    except ValueError as error:
        files.print_safely(f"error: {error}", sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

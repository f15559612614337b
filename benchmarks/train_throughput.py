"""Environment steps a second with learning included, on the CPU or (--cuda) the GPU.

python benchmarks/train_throughput.py
python benchmarks/train_throughput.py --replay-ratio 16
python benchmarks/train_throughput.py --scripts qmix --ids 8m --cuda

Every row runs a script for some seconds and leaves out the start, which compiles and captures. Actions stay random, so
that the length of matches does not depend on what was learned. Nothing is evaluated. The replay ratio is how many
samples are learned from for each step that is played: of ippo and mappo the passes over a rollout, whose batches are
some steps of as many matches; coma learns once from every round, whatever ratio and batch are given.
"""

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

import envs
from training import checkpoints

ROOT = Path(__file__).parent.parent
NEVER = "1000000000000"  # steps that no row gets to

SCRIPTS = (
    "iql", "vdn", "qmix", "qtran", "coma", "naive_om_iql", "liam_iql", "mix_iql", "belief_iql", "omg_iql", "ippo",
    "mappo",
)  # fmt: skip


@dataclass
class Args:
    scripts: tuple[str, ...] = SCRIPTS  # training scripts
    ids: tuple[str, ...] = ("3m", "8m")  # environments
    cuda: bool = False  # use the GPU
    replay_ratio: float | None = None  # samples learned from for each step played (default: as the script has it)
    num_envs: int | None = None  # matches at a time (default: as the script has it)
    batch_size: int | None = None  # episodes or matches in an update (default: as the script has it)
    warmup: float = 10.0  # seconds left out, from the first line of the log on
    seconds: float = 20.0  # seconds that count


def settings(script, env_id, args):
    """(matches, steps for each update, batch, replay ratio) of a row."""
    module = checkpoints.load_script(script)
    defaults = module.Args(env_id=env_id, cuda=args.cuda)
    module.check_args(defaults)
    matches = args.num_envs or defaults.num_envs
    if has_rollouts(script):
        batch = min(args.batch_size or matches // defaults.num_minibatches, matches)
        ratio = defaults.update_epochs if args.replay_ratio is None else max(round(args.replay_ratio), 1)
        return matches, batch * defaults.num_steps // ratio, batch, ratio
    if not has_buffer(script):
        return matches, round(matches * random_length(env_id)), matches, 1
    every = defaults.train_frequency
    batch = args.batch_size or defaults.batch_size
    samples = batch * random_length(env_id)  # of an update
    if args.replay_ratio is not None:
        every = max(round(samples / args.replay_ratio), 1)
    return matches, every, batch, samples / every


def has_rollouts(script):
    """Whether it learns from the steps it has just played, not from a replay buffer."""
    return "update_epochs" in checkpoints.load_script(script).Args.__dataclass_fields__


def has_buffer(script):
    return "buffer_size" in checkpoints.load_script(script).Args.__dataclass_fields__


def random_length(env_id):
    """Mean steps of matches with random actions."""
    env, steps = envs.make(env_id.removeprefix("sc2/"), num_envs=1024), 0
    running = torch.ones_like(env.terminated)
    _, info = env.reset()
    while running.any():
        steps += int(running.sum())
        _, _, terminated, truncated, info = env.step((torch.rand(info["avail"].shape) * info["avail"]).argmax(2))
        running &= ~(terminated | truncated)
    return steps / env.num_envs


def throughput(script, env_id, matches, every, batch, ratio, args):
    """Steps a second, from the lines of the log after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / f"{script}.py"), "--env-id", env_id, "--run-root", folder]
        command += ["--num-envs", str(matches), "--total-timesteps", NEVER, "--eval-interval", NEVER]
        command += ["--checkpoint-interval", NEVER, *["--cuda"] * args.cuda]
        if has_rollouts(script):
            command += ["--num-minibatches", str(matches // batch), "--update-epochs", str(ratio)]
        if not has_buffer(script):
            command += ["--learning-rate", "1e-30"]  # its policy stays random
        else:
            command += ["--train-frequency", str(every), "--batch-size", str(batch), "--no-save-buffer"]
        if "pretrain_updates" in checkpoints.load_script(script).Args.__dataclass_fields__:
            command += ["--pretrain-timesteps", "1", "--pretrain-updates", "1"]
        run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines, marks = [], []
        for line in run.stdout:
            lines.append(line)
            if found := re.match(r" *([\d.]+) s +([\d,]+) steps  ", line):
                marks.append((float(found[1]), int(found[2].replace(",", ""))))
                counted = [mark for mark in marks if mark[0] >= marks[0][0] + args.warmup]
                if counted and marks[-1][0] >= counted[0][0] + args.seconds:
                    break
        else:
            raise SystemExit("".join(lines))  # it stopped by itself: what it said is why
        run.kill()
        run.communicate()
    (start, before), (end, after) = counted[0], counted[-1]
    return (after - before) / (end - start)


if __name__ == "__main__":
    args = tyro.cli(Args)
    heads = ("script", "environment", "matches", "every", "batch", "ratio", "steps/s", "replayed/s")
    print("{:12} {:14} {:>8} {:>8} {:>6} {:>6} {:>10} {:>11}".format(*heads))
    for env_id in args.ids:
        for script in args.scripts:
            matches, every, batch, ratio = settings(script, env_id, args)
            rate = throughput(script, env_id, matches, every, batch, ratio, args)
            row = f"{matches:8} {every:8} {batch:6} {ratio:6.2f} {rate:10,.0f} {rate * ratio:11,.0f}"
            print(f"{script:12} {env_id:14} {row}", flush=True)

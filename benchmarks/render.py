"""Milliseconds a picture takes: `env.render()` in the middle of a match.

python benchmarks/render.py
python benchmarks/render.py --ids 8m --size 960
"""

import time
from dataclasses import dataclass

import tyro

import envs


@dataclass
class Args:
    ids: tuple[str, ...] = ("3m", "27m_vs_30m", "2c_vs_64zg")  # environments to draw
    size: int = 480  # width of the picture in pixels
    pictures: int = 100  # how many to draw for each


if __name__ == "__main__":
    args = tyro.cli(Args)
    print(f"{'environment':18} {'picture':>9} {'median ms':>10} {'worst ms':>9}")
    for env_id in args.ids:
        env = envs.make(env_id)
        env.reset()
        for _ in range(10):
            env.step(env.scripted_actions(env.policies[0]))
        height, width, _ = env.render(size=args.size, sight=0).shape
        times = []
        for _ in range(args.pictures):
            started = time.perf_counter()
            env.render(size=args.size, sight=0)
            times.append((time.perf_counter() - started) * 1000)
        print(f"{env_id:18} {width:4}x{height:<4} {sorted(times)[len(times) // 2]:10.1f} {max(times):9.1f}")

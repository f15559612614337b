"""How many environment steps a second, with random available actions and autoreset: only running matches count.

    python benchmarks/env_throughput.py            all environments on the CPU, and on the GPU if there is one
    python benchmarks/env_throughput.py --ids 3m 8m --matches 4096 65536 --devices cuda

On CUDA the steps are captured in a graph, as training uses them. One match alone is timed without a policy. Where an
environment has the rules of a package, and that is installed, one match of the package is timed beside it.
"""

import importlib.util
import time
from dataclasses import dataclass, field

import torch
import tyro

import envs
from envs.battle_data import MAPS
from envs.predator_prey import IDS as TAG_IDS
from envs.stag_hunt import IDS


@dataclass
class Args:
    ids: list[str] = field(default_factory=lambda: [*MAPS, *IDS, *TAG_IDS])  # environments to time
    matches: list[int] = field(default_factory=list)
    """batch sizes (default: 1 and 1024 on the CPU; 4096, 16384 and 65536 on CUDA)"""
    devices: list[str] = field(default_factory=lambda: ["cpu"] + ["cuda"] * torch.cuda.is_available())  # cpu, cuda
    seconds: float = 1.0  # how long to time each row
    options: dict[str, bool] = field(default_factory=dict)  # options of the environments, such as obs_last_action True


STEPS = 32  # in one CUDA graph


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def throughput(env_id, matches, device, seconds, options):
    """(steps a second, agents, seconds to the first step's end)"""
    started = time.perf_counter()
    env = envs.make(env_id, num_envs=matches, device=device, autoreset=True, check=False, **options)
    _, info = env.reset()
    random = "RAND" if "RAND" in env.policies else "random"

    def step():
        env.step(env.scripted_actions(random))

    step()
    synchronize(device)
    first = time.perf_counter() - started
    for _ in range(env.episode_limit // 2):  # a batch that started together spreads out
        step()

    if device == "cpu" and matches == 1:
        actions = info["avail"].int().argmax(2)  # the first that is available: what is not counts as standing still

        def run():
            for _ in range(STEPS):
                env.step(actions)
    elif device == "cpu":

        def run():
            for _ in range(STEPS):
                step()
    else:
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        synchronize(device)
        with torch.cuda.graph(graph):
            for _ in range(STEPS):
                step()
        run = graph.replay
    run()
    synchronize(device)
    rounds, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        run()
        synchronize(device)
        rounds += 1
    return rounds * STEPS * matches / (time.perf_counter() - started), env.n_agents, first


def mpe2():
    """One match of simple_tag."""
    from mpe2 import simple_tag_v3

    return simple_tag_v3.parallel_env()


PACKAGES = {"simple_tag": mpe2}  # by environment; the name of the function is that of the package


def package_throughput(make, seconds):
    """Steps a second of one PettingZoo match with random actions, resets included; and its agents."""
    env = make()
    env.reset(seed=0)
    for agent in env.agents:
        env.action_space(agent).seed(0)
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        steps += 1
        if not env.agents:
            env.reset()
    return steps / (time.perf_counter() - started), env.num_agents


if __name__ == "__main__":
    args = tyro.cli(Args)
    heads = ("environment", "device", "matches", "steps/s", "agent steps/s", "us a step", "first s")
    print("{:18} {:6} {:>8} {:>14} {:>14} {:>10} {:>8}".format(*heads))
    for device in args.devices:
        sizes = args.matches or ([1, 1024] if device == "cpu" else [4096, 16384, 65536])
        for env_id in args.ids:
            for matches in sizes:
                rate, agents, first = throughput(env_id, matches, device, args.seconds, args.options)
                rates = f"{rate:14,.0f} {rate * agents:14,.0f} {matches / rate * 1e6:10.1f} {first:8.1f}"
                print(f"{env_id:18} {device:6} {matches:8} {rates}", flush=True)
            package = PACKAGES.get(env_id)
            if device == "cpu" and package and importlib.util.find_spec(package.__name__):
                rate, agents = package_throughput(package, args.seconds)
                rates = f"{rate:14,.0f} {rate * agents:14,.0f} {1 / rate * 1e6:10.1f}"
                print(f"  {package.__name__:16} {device:6} {1:8} {rates}", flush=True)

"""How many environment steps a second, with random available actions and autoreset: only running matches count.

    python benchmarks/env_throughput.py            all environments on the CPU, and on the GPU if there is one
    python benchmarks/env_throughput.py --ids 3m 8m --matches 4096 65536 --devices cuda

On CUDA the steps are captured in a graph, as training uses them. One match alone is timed without a policy. Where an
environment has the rules of a package, and that is installed, one match of the package is timed beside it.
"""

import importlib.util
import time
from dataclasses import dataclass, field

import gymnasium
import numpy as np
import torch
import tyro

import envs


@dataclass
class Args:
    ids: list[str] = field(default_factory=lambda: [*envs.KINDS])  # environments to time
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


def lbforaging(env_id):
    import lbforaging  # noqa: F401  registers its ids

    return gymnasium.make(env_id, disable_env_checker=True).unwrapped if env_id in gymnasium.registry else None


def mpe2(env_id):
    from mpe2 import simple_tag_v3

    return simple_tag_v3.parallel_env()


PACKAGES = {"Foraging": lbforaging, "simple_tag": mpe2}  # by how ids begin; functions are named after their package


def package_throughput(env, seconds):
    """(steps a second, agents) of one match of a package with random actions, resets included."""
    by_name = hasattr(env, "possible_agents")  # PettingZoo's
    agents = len(env.possible_agents) if by_name else env.n_agents
    choices = 5 if by_name else env.action_space[0].n
    actions = np.random.default_rng(0).integers(choices, size=(1000, agents))
    env.reset(seed=0)
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        action = actions[steps % 1000]
        if by_name:
            env.step(dict(zip(env.possible_agents, action)))
            over = not env.agents
        else:
            *_, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
        if over:
            env.reset()
        steps += 1
    return steps / (time.perf_counter() - started), agents


if __name__ == "__main__":
    args = tyro.cli(Args)
    heads = ("environment", "device", "matches", "steps/s", "agent steps/s", "us a step", "first s")
    print("{:29} {:8} {:>8} {:>14} {:>14} {:>10} {:>8}".format(*heads))
    for device in args.devices:
        sizes = args.matches or ([1, 1024] if device == "cpu" else [4096, 16384, 65536])
        for env_id in args.ids:
            for matches in sizes:
                rate, agents, first = throughput(env_id, matches, device, args.seconds, args.options)
                rates = f"{rate:14,.0f} {rate * agents:14,.0f} {matches / rate * 1e6:10.1f} {first:8.1f}"
                print(f"{env_id:29} {device:8} {matches:8} {rates}", flush=True)
            make = next((make for start, make in PACKAGES.items() if env_id.startswith(start)), None)
            if device == "cpu" and make and importlib.util.find_spec(make.__name__):
                original = make(env_id)
                if original is not None:
                    rate, agents = package_throughput(original, args.seconds)
                    rates = f"{rate:14,.0f} {rate * agents:14,.0f} {1e6 / rate:10.1f}"
                    print(f"  {make.__name__:27} {device:8} {1:8} {rates}", flush=True)

"""Files of training runs: reading and writing them, and loading a run's policy.

A run folder has checkpoint.pt (arguments, networks, optimiser, progress) and, until the run is complete, resume.pt
(random states, matches, replay buffer). Both hold tensors and plain types only.
"""

import contextlib
import functools
import importlib.util
import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent  # where the training scripts are


def read(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def read_run(folder):
    """The checkpoint of a run folder."""
    path = Path(folder) / "checkpoint.pt"
    if not path.is_file():
        raise ValueError(f"there is no checkpoint.pt in {folder}")
    return read(path)


def networks_of(run, saved):
    """The weights in a checkpoint, by the name of the network."""
    if "networks" not in saved:
        raise ValueError(f"{run} is of another version of this project: it has no networks by name")
    return saved["networks"]


def write(content, path):
    """Writes a file completely or not at all, and returns whether it did; a full disk is only a warning."""
    temporary = path.with_suffix(".part")
    try:
        torch.save(content, temporary)
        os.replace(temporary, path)
        return True
    except (OSError, RuntimeError) as error:
        print(f"warning: {path} was not written ({error}); the run goes on", file=sys.stderr)
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False


def env_sizes(env):
    """The sizes that a network's inputs and outputs depend on."""
    return {name: getattr(env, name) for name in ("n_agents", "n_actions", "obs_dim", "state_dim", "episode_limit")}


def check_env(source, saved, env):
    """Raises a ValueError if a checkpoint is of another map or of other sizes than `env`."""
    same_map = saved["env_id"].removeprefix("sc2/") == env.name.removeprefix("sc2/")  # the real game or its simulation
    if not same_map or saved["sizes"] != env_sizes(env):
        raise ValueError(f"{source} is of {saved['env_id']} {saved['sizes']}; this is {env.name} {env_sizes(env)}")


def load_script(name, source=""):
    """The training script of that name as a module: from the project's folder or the current one.

    `source` is what names the script, for the message if there is none.
    """
    folders = [folder for folder in (ROOT, Path.cwd()) if (folder / f"{name}.py").is_file()]
    if not str(name).isidentifier() or not folders:
        raise ValueError(f"{source} there is no script {name}.py in {ROOT} or the current folder".strip())
    return _import(folders[0] / f"{name}.py")


@functools.cache
def _import(path):
    if "\ndef load_player(" not in path.read_text():
        raise ValueError(f"{path} is not a training script: it has no load_player")
    if path.stem in sys.modules and getattr(sys.modules[path.stem], "__file__", None) == str(path):
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look up their module
    sys.path.insert(0, str(path.parent))  # a script may import another one
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def script_of(run):
    """(the script that made a run, its arguments there)"""
    script = load_script(read_run(run)["algorithm"], f"{run}:")
    return script, load_args(script.Args, run)


def load_args(args_class, run):
    """The arguments of a run, as far as this version of the script has them."""
    saved = read_run(run)["args"]
    return args_class(**{name: value for name, value in saved.items() if name in args_class.__dataclass_fields__})


def load_networks(run, env, networks):
    """Loads networks, a dictionary of modules, from a run; returns its checkpoint."""
    saved = read_run(run)
    check_env(run, saved, env)
    weights = networks_of(run, saved)
    for name, network in networks.items():
        network.load_state_dict(weights[name])
    return saved

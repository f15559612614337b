"""Files of training runs: reading and writing them, and loading a run's policy.

A run folder has checkpoint.pt (arguments, networks, optimiser, progress) and, until the run is complete, the file that
its "resume" names (random states, matches, replay buffer). Both hold tensors and plain types only. Files may come from
anybody: whatever is wrong with one is a ValueError in one line, before any network is built.
"""

import contextlib
import copy
import functools
import glob
import importlib.util
import io
import itertools
import math
import os
import shlex
import sys
import types
import typing
import zipfile
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

import envs
from training import files

INSTALLED = Path(__file__).parent / "scripts"  # where a wheel has the training scripts
ROOT = INSTALLED if INSTALLED.is_dir() else Path(__file__).parent.parent
KINDS = {  # what a checkpoint has, and of which type
    "algorithm": str,
    "env_id": str,
    "sizes": dict,
    "args": dict,
    "networks": dict,
    "optimizer": dict,
    "updates": int,
    "progress": dict,
}
PROGRESS = {"steps": int, "episodes": int, "seconds": float, "evals": list, "complete": bool, "next_eval": int}
EVALUATION = ("steps", "seconds", "win_rate", "episodic_return")
SIZES = ("n_agents", "n_actions", "obs_dim", "state_dim", "episode_limit")  # what inputs and outputs depend on
FORMER_OPTIONS = {  # accepted for one version
    "encounter": "matches_per_partner", "keep_memory": "persist_hidden", "tell_who": "oracle",
    "checkpoint_at": "keep_checkpoints",
}  # fmt: skip
FORMER_FIELDS = {"encounter": "match_index"}  # of matches and recorded episodes
LARGEST_WEIGHT = 2**24  # numbers in a weight that no checkpoint has to prove
DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
MOST_PARTS, DEEPEST = 2**20, 32  # of what a file has beside tensors: all its parts, and how deep they are nested
LONGEST_PICKLE = 2**22  # bytes of the names, numbers and shapes in a file


# ---- reading ----
def read(path):
    """The content of a file. Code in it is not run."""
    try:
        _check_archive(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise ValueError(f"it has a {type(content).__name__}")
    except MemoryError:
        raise ValueError(f"{path} is not a file of this project: it does not fit into memory") from None
    except Exception as error:  # torch.load has many ways to fail
        cause = str(error).strip().split("\n")[0].split(". ")[0][:150] or type(error).__name__
        raise ValueError(f"{path} is damaged or not a file of this project: {cause}") from None
    check_tensors(path, content, finite=False)
    return content


def _check_archive(path):
    """Raises a ValueError or BadZipFile, before anything is unpacked, if a file would grow by that."""
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        file.seek(0)
        starts = file.read(4) == b"PK\x03\x04" and min(entry.header_offset for entry in entries) == 0
    if not starts:  # torch goes by the first bytes
        raise ValueError("it has something in front of its archive")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is compressed")
    if sum(entry.file_size for entry in entries) > os.path.getsize(path):
        raise ValueError("it claims to be larger than it is")
    if any(entry.file_size > LONGEST_PICKLE for entry in entries if entry.filename.lower().endswith(".pkl")):
        raise ValueError("it has too many parts")


def with_new_names(content, former):
    """Nested dictionaries whose keys have today's names."""
    if not isinstance(content, dict):
        return content
    return {former.get(name, name): with_new_names(value, former) for name, value in content.items()}


def read_run(folder):
    """The checkpoint of a run folder, checked."""
    path = Path(folder) / "checkpoint.pt"
    if not path.is_file():
        raise ValueError(f"there is no checkpoint.pt in {folder}")
    saved = read(path)
    if "networks" not in saved:
        raise ValueError(f"{path} is of another version of this project: it has no networks by name")
    for name, kind in KINDS.items():
        _check(path, name, kind, saved.get(name))
    saved["args"] = with_new_names(saved["args"], FORMER_OPTIONS)
    for name, kind in PROGRESS.items():
        _check(path, f"progress: {name}", (int, float) if kind is float else kind, saved["progress"].get(name))
    for evaluation in saved["progress"]["evals"]:
        numbers = [evaluation.get(name) for name in EVALUATION] if isinstance(evaluation, dict) else [None]
        if not all(isinstance(number, (int, float)) and abs(number) < 2**63 for number in numbers):
            raise ValueError(f"{path} is damaged: progress: evals has {_short(evaluation)}")
    for name in SIZES:
        _check(path, f"sizes: {name}", int, saved["sizes"].get(name))
    if not saved["algorithm"].isidentifier() or len(saved["algorithm"]) > 100:
        raise ValueError(f"{path}: algorithm is the name of a script, not {_short(saved['algorithm'])}")
    for name in ("env_id", "exp_name"):  # that of the environment is never used as a path
        value = saved["args"].get(name, "")
        elsewhere = ("..", "\\", "/") if name == "exp_name" else ()
        if not isinstance(value, str) or any(part in value for part in (*elsewhere, "\0")):
            raise ValueError(f"{path}: {name} is a name without a path, not {_short(value)}")
    if saved["args"].get("env_id", saved["env_id"]) != saved["env_id"]:
        raise ValueError(f"{path} is damaged: it is of {_short(saved['env_id'])}, but its arguments are not")
    resume = saved.get("resume")
    is_name = isinstance(resume, str) and "/" not in resume and "\0" not in resume and len(resume) <= 100
    if not (resume is None or is_name):
        raise ValueError(f"{path}: resume is the name of a file, not {_short(resume)}")
    _check_networks(path, saved["networks"])
    check_tensors(path, saved)
    return saved


def _check(path, name, kind, value):
    """Numbers in a checkpoint are counts: none is below 0."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{path} is damaged: {name} is {_short(value)}")
    if isinstance(value, (int, float)) and not 0 <= value < 2**63:
        raise ValueError(f"{path} is damaged: {name} is {_short(value)}")


def check_count(state, name, kind):
    """A number from 0 up of that very type; a ValueError if it is something else."""
    if type(state[name]) is not kind or not state[name] >= 0 or (kind is int and state[name] >= 2**62):
        raise ValueError(f"{name} is {_short(state[name])}")
    return state[name]


def check_rng_states(*states):
    """Raises a TypeError or RuntimeError if one is no random state."""
    for state in states:
        torch.Generator().set_state(state[0])


def _check_networks(path, networks):
    for network, weights in networks.items():
        if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
            raise ValueError(f"{path}: networks: {_short(network)} has something else than tensors")


def _short(value, length=60):
    text = repr(value) if not isinstance(value, torch.Tensor) else f"a tensor {tuple(value.shape)}"
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 3]}..."


def check_tensors(path, content, name="", finite=True, parts=None, depth=0):
    """Raises a ValueError if there is something else than plain tensors and types in few containers, if a tensor claims
    to be larger than its data, or (if `finite`) if it has a number that is not finite.
    """
    parts = itertools.count() if parts is None else parts
    if next(parts) > MOST_PARTS or depth > DEEPEST:  # a list may have itself as a part, or another one many times
        raise ValueError(f"{path} is damaged: {name[:60]} has too many parts")
    if isinstance(content, (dict, list, tuple)):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            if not isinstance(key, (str, int)) or len(str(key)) > 200:
                raise ValueError(f"{path} is damaged: {name[:60]} has a part named {_short(key)}")
            check_tensors(path, value, " ".join(f"{name}.{key}".split()).lstrip("."), finite, parts, depth + 1)
    elif isinstance(content, torch.Tensor):
        if not _is_plain(content) or content.nbytes > content.untyped_storage().nbytes():
            raise ValueError(f"{path} is damaged: {name} is no plain tensor")
        if finite and content.is_floating_point() and not content.isfinite().all():
            raise ValueError(f"{path} has numbers that are not finite, in {name}")
    elif type(content) not in (str, int, float, bool, types.NoneType) or (
        type(content) is int and abs(content) >= 2**128
    ):
        raise ValueError(f"{path} is damaged: {name} is of the type {type(content).__name__}")


def _is_plain(tensor):
    kinds = tensor.dtype in DTYPES and tensor.layout == torch.strided and tensor.device.type == "cpu"
    return kinds and type(tensor) is torch.Tensor and not tensor.is_nested


def find_runs(pattern):
    """The run folders that a path or a pattern names; one that is there may have brackets and stars in its name."""
    pattern = str(pattern)
    paths = [pattern] if (Path(pattern) / "checkpoint.pt").exists() else sorted(glob.glob(pattern))
    return [path for path in paths if (Path(path) / "checkpoint.pt").exists()]


def read_networks(path, requirements):
    """The networks in a file that was made for the same `requirements`."""
    if not Path(path).is_file():
        raise ValueError("there is no such file")
    saved = read(path)
    check_tensors(path, saved)
    made_for = saved.get("requirements")
    if not isinstance(made_for, dict) or made_for.keys() != requirements.keys():
        raise ValueError("it is of another version")
    differ = [name for name in requirements if repr(made_for[name]) != repr(requirements[name])]
    if differ:
        raise ValueError(f"it is for {', '.join(f'{n} {_short(made_for[n])}, not {requirements[n]}' for n in differ)}")
    if not isinstance(saved.get("networks"), dict):
        raise ValueError("it has no networks by name")
    _check_networks("it", saved["networks"])
    return saved["networks"]


# ---- writing ----
def write(content, path):
    """Writes a file completely or not at all, and returns whether it did; a full disk is only a warning."""
    try:
        files.write(path, lambda file: torch.save(content, file))
        return True
    except (OSError, RuntimeError) as error:
        files.warn(f"{files.reason(error)}: {path} was not written; the run goes on")
        return False


# ---- what a checkpoint is of ----
def env_sizes(env):
    sizes = {name: getattr(env, name) for name in SIZES}
    sizes["episode_limit"] = getattr(env, "match_limit", env.episode_limit)  # of one match
    return sizes


def check_env(source, saved, env):
    """Raises a ValueError if a checkpoint is of another map or of other sizes than `env`."""
    ours, theirs = (envs.parse_id(env_id)[0].removeprefix("sc2/") for env_id in (env.name, saved["env_id"]))
    if ours != theirs or saved["sizes"] != env_sizes(env):
        raise ValueError(f"{source} is of {saved['env_id']} {saved['sizes']}; this is {env.name} {env_sizes(env)}")


# ---- code, which a file never chooses ----
def id_from_file(source, env_id, option):
    """The id of an environment that a file has; a ValueError if it names code that nobody has asked for here.

    `option` is what it follows on the command line.
    """
    if envs.names_code(env_id) and envs.parse_id(env_id)[0] not in envs.code_asked_for:
        words = f"{option} {shlex.quote(' '.join(env_id.split())[:300])}"
        raise ValueError(f"{source} is of an environment whose code runs only if you name it: {words}")
    return env_id


def name_scripts(paths):
    """--script: allows runs of these scripts, here and in the processes that this one starts."""
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"--script {path}: there is no such file")
    named = [*(os.path.abspath(path) for path in paths), os.environ.get("OMG_SCRIPTS", "")]
    os.environ["OMG_SCRIPTS"] = os.pathsep.join(filter(None, named))


def load_script(name, source="", more=()):
    """The training script of that name as a module: of the project, the one that runs here, or one of OMG_SCRIPTS.

    `source` is what names the script, for the message if there is none; `more` are files that the user has named.
    """
    running = getattr(sys.modules["__main__"], "__file__", None) or ""
    named = [running, *more, *os.environ.get("OMG_SCRIPTS", "").split(os.pathsep)]
    paths = [ROOT / f"{name}.py", *(Path(os.path.abspath(path)) for path in named if Path(path).name == f"{name}.py")]
    found = [path for path in paths if path.is_file()]
    if not str(name).isidentifier() or not found:
        elsewhere = f"one elsewhere runs only if you name it: --script {name}.py, or OMG_SCRIPTS={name}.py with --pool"
        raise ValueError(f"{source} there is no script {name}.py in {ROOT}; {elsewhere}".strip())
    return _import(found[0])


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
    """The arguments of a run, as far as this version of the script has them; the script's own check accepts them."""
    checkpoint = read_run(run)
    id_from_file(run, checkpoint["env_id"], "--env-id")
    saved = checkpoint["args"]
    known = {name: value for name, value in saved.items() if name in args_class.__dataclass_fields__}
    check_types(run, args_class, known)
    args = args_class(**known)
    script = sys.modules.get(args_class.__module__)
    if hasattr(script, "check_args"):
        checked = copy.copy(args)
        checked.cuda = False
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                script.check_args(checked)
        except SystemExit as error:
            raise ValueError(f"{run} has an invalid argument: {error}") from None
    return args


def check_types(run, args_class, values):
    """Raises a ValueError if an argument of a checkpoint does not have the type of its option."""
    hints = typing.get_type_hints(args_class)
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise ValueError(f"{run} has an invalid argument: {name} is {_short(value)}")


def _fits(value, hint):
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, choice) for choice in choices)
    if origin is typing.Literal:
        return value in choices
    if origin is tuple:
        return isinstance(value, (tuple, list)) and all(_fits(item, choices[0]) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is (types.NoneType if hint is None else hint)


def limit_sizes(run, saved, error=ValueError):
    """From now on no network can be built that is much larger than those of a checkpoint; remove() ends that."""
    sizes = [tensor.numel() for weights in saved["networks"].values() for tensor in weights.values()]
    largest = max([LARGEST_WEIGHT, *sizes])

    def check(module, name, parameter):
        if parameter is not None and parameter.numel() > largest:
            raise error(f"{run}: its arguments ask for larger networks than it has")

    return register_module_parameter_registration_hook(check)


@contextlib.contextmanager
def limited_sizes(run):
    hook = limit_sizes(run, read_run(run))
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "allocate" in str(error):
            raise ValueError(f"{run}: its arguments ask for larger networks than fit into memory") from None
        raise
    finally:
        hook.remove()


def load_networks(run, env, networks):
    """Loads networks, a dictionary of modules, from a run; returns its checkpoint."""
    saved = read_run(run)
    check_env(run, saved, env)
    for name, network in networks.items():
        load_weights(run, name, network, saved["networks"].get(name, {}))
    return saved


def load_weights(source, name, network, weights):
    """Loads the weights of one network; a ValueError says what does not fit."""
    expected = {key: tensor.shape for key, tensor in network.state_dict().items()}
    found = {key: tensor.shape for key, tensor in weights.items()}
    for key in expected.keys() | found.keys():
        if expected.get(key) != found.get(key):
            shapes = [tuple(shapes[key]) if key in shapes else "nothing" for shapes in (expected, found)]
            key = " ".join(f"{name}.{key}".split())  # in one line, whatever a file has
            raise ValueError(f"{source} does not fit the script: {key} is {shapes[1]}, not {shapes[0]}")
    network.load_state_dict(weights)


def load_optimizer(optimizer, saved):
    """Loads the state of an optimiser; a ValueError says what does not fit."""
    current = optimizer.state_dict()
    groups, expected = saved.get("param_groups"), current["param_groups"]
    kinds = [{key: type(value) for key, value in group.items()} for group in expected]
    if (
        not isinstance(groups, list)
        or [{key: type(value) for key, value in group.items()} for group in groups] != kinds
    ):
        raise ValueError("the optimizer has other options")
    if [group["params"] for group in groups] != [group["params"] for group in expected]:
        raise ValueError("the optimizer is of other networks")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = next((values.keys() for values in saved["state"].values()), None)
    for number, values in saved["state"].items():
        if number not in range(len(parameters)) or values.keys() != names:
            raise ValueError("the optimizer is of other networks")
        for name, value in values.items():
            parameter = parameters[number]
            shape = () if name == "step" else parameter.shape
            if not torch.is_tensor(value) or value.shape != shape or value.dtype != parameter.dtype:
                raise ValueError(f"the optimizer's {_short(name)} {number} is {_short(value)}")
    optimizer.load_state_dict(saved)


def check_buffer(state, data, max_length):
    """Raises a ValueError if the state of a replay buffer with such `data` cannot be right."""
    lengths, size = state["lengths"], len(next(iter(data.values()))[0])
    filled = int((lengths > 0).sum())
    if lengths.shape != (size,) or lengths.dtype != torch.int64 or not 0 <= check_count(state, "cursor", int) < size:
        raise ValueError(f"the buffer has {tuple(lengths.shape)} lengths from {state['cursor']} on, not ({size},)")
    if lengths.min() < 0 or lengths.max() > max_length:
        raise ValueError(f"lengths of episodes are from 0 to {max_length}, not {lengths.min()} to {lengths.max()}")
    for name, values in data.items():
        expected = (len(values), filled, *values.shape[2:])
        found = state["episodes"][name]
        if found.shape != expected or found.dtype != values.dtype:
            raise ValueError(
                f"the buffer's {name} is {found.dtype} {tuple(found.shape)}, not {values.dtype} {expected}"
            )

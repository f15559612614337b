"""The options of a script: parsing them, also of a run that is continued; ranges, the device, and sizes.

args = parse_args(Args, __file__)
"""

import importlib.util
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import tyro

import envs
from training import checkpoints, files
from training.exits import NO_MEMORY, Exit, UsageError, exit_on_signals

LARGEST = {"num_envs": 2**22, "batch_size": 2**22}  # of an option; of one whose name ends in _dim it is LARGEST_DIM
LARGEST_DIM = 2**13
# ranges of the options that manage a run
POSITIVE = ("matches_per_partner", "eval_interval", "eval_episodes", "final_eval_episodes", "time_limit")
NON_NEGATIVE = ("seed", "checkpoint_interval", "log_interval")
FRACTIONS = ("keep_checkpoints",)
OUTWARD = ("track", "wandb_project_name", "wandb_entity", "wandb_group")  # no file says where a log goes
CHANGEABLE = (  # on resuming
    *OUTWARD, "resume", "time_limit", "capture_video", "checkpoint_interval", "log_interval", "cudagraphs",
)  # fmt: skip
FOUND_OUT = ("n_policies",)  # options of earlier versions that a run has set by itself, and does not need any more


def use_new_names(argv):
    """The words of a command with today's names of options; says what has another name now."""
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        former = name.removeprefix("--").removeprefix("no-").replace("-", "_")
        if name.startswith("--") and former in checkpoints.FORMER_OPTIONS:
            new = option(checkpoints.FORMER_OPTIONS[former])
            new = new.replace("--", "--no-", 1) if name.startswith("--no-") else new
            print(f"{name} is {new} now.")
            word = new + equals + value
        words.append(word)
    return words


def option(name):
    return f"--{name.replace('_', '-')}"


def to_argv(options):
    """Options by name as words of a command; None is left out."""
    words = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(option(name) if value else option(f"no_{name}"))
        elif value is not None:
            words += [option(name), *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return words


def with_defaults(args_class, changed):
    """The arguments of a script with other defaults; those that it does not have are left out."""
    names = args_class.__dataclass_fields__.keys()
    return args_class(**{name: value for name, value in changed.items() if name in names})


def command(args, changed, names, **more):
    """What runs args.script with those options that do not have its defaults, `changed` among these."""
    defaults = with_defaults(type(args), changed)
    options = {name: getattr(args, name) for name in names if getattr(args, name) != getattr(defaults, name)}
    return shlex.join(["python", f"{args.script}.py", *to_argv({**options, **more})])


def from_command_line(args_class, **presets):
    """The arguments of the command line; `presets`: an option -> the other defaults that it asks for."""
    sys.argv[1:] = use_new_names(sys.argv[1:])
    args = tyro.cli(args_class)
    for name, settings in presets.items():
        if getattr(args, name):
            return tyro.cli(args_class, default=with_defaults(args_class, settings))
    return args


def parse_args(args_class, script, **presets):
    """The same, with the runs that a pool's patterns name; a resumed run keeps its options, and rejects others."""
    args = from_command_line(args_class, **presets)
    exit_on_signals()
    if hasattr(args, "pool"):
        args.pool = expanded(args.pool)
    if not args.resume:
        return args
    if args.init:
        raise UsageError("--init starts a new run and --resume continues an old one: give one of them")
    folder = Path(args.resume)
    try:
        saved = checkpoints.read_run(folder)
    except ValueError as error:
        raise UsageError(f"--resume {folder}: {error}") from None
    if owner := files.is_locked(folder):
        raise UsageError(f"--resume {folder} is in use by {owner}")
    try:
        if args.env_id != saved["env_id"]:  # what is typed may name code
            checkpoints.id_from_file(f"--resume {folder}", saved["env_id"], "--env-id")
    except ValueError as error:
        raise UsageError(error) from None
    if link := files.first_link(folder):
        raise UsageError(f"--resume {folder}: {link} is a link, through which a run would write elsewhere")
    if saved["algorithm"] != Path(script).stem:
        raise UsageError(f"--resume {folder} is a run of {saved['algorithm']}.py")
    if saved["progress"]["complete"] and (folder / "results.json").exists():
        raise UsageError(f"--resume {folder}: that run is complete")
    unfinished_copy = not saved["progress"]["complete"] and saved.get("resume") is None
    if unfinished_copy or (folder.resolve().parent / "checkpoint.pt").exists():
        raise UsageError(f"--resume {folder}: that is a copy for pools, which cannot be continued; its run can")
    defaults = asdict(args_class())
    saved["args"] = {name: value for name, value in saved["args"].items() if name not in FOUND_OUT}
    if unknown := saved["args"].keys() - defaults.keys():
        raise UsageError(f"--resume {folder} is of another version: it has {', '.join(sorted(map(str, unknown)))}")
    try:
        checkpoints.check_types("it", args_class, saved["args"])
    except ValueError as error:
        raise UsageError(f"--resume {folder}: {error}") from None
    previous = {**defaults, **saved["args"]}  # an older run may lack an option
    if "pool" in previous:  # an older run may have patterns there
        others = (path for path in expanded(previous["pool"]) if Path(path).resolve() != folder.resolve())
        previous["pool"] = tuple(others)
    of_command_line = {name: getattr(args, name) for name in OUTWARD if hasattr(args, name)}
    kept = {**previous, **of_command_line, "resume": None, "time_limit": None}
    given = tyro.cli(args_class, default=args_class(**kept))
    if previous.get("track") and not given.track:
        print("This run was mirrored by Weights and Biases: --track (with --wandb-entity, ...) goes on with it.")
    if "pool" in previous and is_pool(given.pool, previous["pool"]):
        given.pool = previous["pool"]
    invalid = [
        f"{option(name)} {previous[name]} (not {value})"
        for name, value in asdict(given).items()
        if name not in CHANGEABLE and value != previous[name]
    ]
    if invalid:
        raise UsageError(f"--resume {folder} has {', '.join(invalid)}")
    given.size_limit = checkpoints.limit_sizes(folder, saved, UsageError)  # until its networks are loaded
    return given


def expanded(pool):
    """A pool with the runs that its patterns name now, so that they are the same whenever the run is resumed."""
    return tuple(str(name) for pattern in pool for name in checkpoints.find_runs(pattern) or [pattern])


def is_pool(typed, saved):
    """Whether a pool that is typed again names a saved one: its patterns may name other runs by now, too."""
    plain = {name for name in typed if expanded([name]) == (name,)}
    return plain <= set(saved) <= {*expanded(typed)}


def check_ranges(args, positive="", non_negative="", fractions="", largest=None):
    """Rejects numbers out of range, also of the options in training/options.py; each parameter lists names of
    arguments. None is accepted.

    `largest`: name -> the largest number that is accepted, where the script has a limit of its own
    """
    limits = LARGEST | (largest or {})
    ranges = (
        (positive, POSITIVE, "above 0", lambda x: x > 0),
        (non_negative, NON_NEGATIVE, "from 0 up", lambda x: x >= 0),
        (fractions, FRACTIONS, "from 0 to 1", lambda x: 0 <= x <= 1),
    )
    for names, of_run, allowed, accepts in ranges:
        for name in [*names.split(), *(name for name in of_run if hasattr(args, name))]:
            value, most = getattr(args, name), limits.get(name, LARGEST_DIM if name.endswith("_dim") else 2**62)
            numbers = value if isinstance(value, (tuple, list)) else [] if value is None else [value]
            if not all(map(accepts, numbers)):
                raise UsageError(f"{option(name)} is {allowed}, not {value}")
            if not all(number <= most for number in numbers):
                raise UsageError(f"{option(name)} is at most {most}, not {value}")
            if list(numbers) != sorted(numbers):
                raise UsageError(f"{option(name)} is in rising order, not {value}")
    name = getattr(args, "exp_name", "x")
    if Path(name).name != name or name in ("", ".") or ".." in name or "\\" in name:
        raise UsageError(f"--exp-name is a name without a path, not {name!r}")


def resolve_device(args):
    """Falls back to the CPU where the GPU cannot be used, and says why."""
    if args.cuda and not torch.cuda.is_available():
        print("There is no GPU that torch can use: going on with the CPU.")
        args.cuda = False
    elif args.cuda and importlib.util.find_spec("numba_cuda") is None and envs.is_simulated(args.env_id):
        print('For the GPU the environments need pip install -e ".[cuda]": going on with the CPU.')
        args.cuda = False


def fill_in(args, defaults):
    """Sets the arguments that were not given."""
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def fill_in_sizes(args):
    """Sets the sizes of a run that were not given: they depend on the device and on how many seats learn."""
    slow_game = not envs.is_simulated(args.env_id)
    single = getattr(args, "team", "self") != "self" and not slow_game  # one learner: a match has less to learn from
    if args.cuda:
        defaults = {"num_envs": 1024, "total_timesteps": 10_000_000, "batch_size": 128, "train_frequency": 500}
    elif single:
        defaults = {"num_envs": 512, "total_timesteps": 2_000_000, "batch_size": 32, "train_frequency": 400}
    else:
        defaults = {"num_envs": 64, "total_timesteps": 1_000_000, "batch_size": 32, "train_frequency": 200}
    if slow_game:  # slow: it is learned from more often
        defaults |= {"num_envs": 8, "train_frequency": 60}
    fill_in(args, defaults)
    fill_in(args, {"eval_interval": max(args.total_timesteps // 50, 1)})
    most = args.total_timesteps + args.num_envs  # episodes: each has a step or more, the last round may begin late
    if args.batch_size > most:
        files.warn(f"--batch-size {args.batch_size}: the run has at most {most} episodes, so it learns nothing")
    smallest = max(args.batch_size, args.num_envs)
    if args.buffer_size is not None and args.buffer_size < smallest:
        raise UsageError(f"--buffer-size is at least {smallest} (a round and a batch), not {args.buffer_size}")


# ---- memory ----
def free_memory(device):
    """Bytes available on a device, as far as the system reports them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return float("inf")
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024  # MemFree would leave out the file cache


def buffer_size(args, episodes, device):
    """How many episodes the replay buffer holds: as asked for, else the default; rejects what does not fit."""
    episode_bytes = sum(values[:, 0].nbytes for values in episodes.values())
    size = args.buffer_size or default_buffer_size(args, episode_bytes)
    free = free_memory(device)
    largest = int(0.9 * min(free / episode_bytes, 2**31))
    needed = f"{episode_bytes * size / 2**30:.2f} GiB on the {device.type.upper()}"
    print(f"The replay buffer takes {needed}, {episode_bytes / 2**10:.0f} KiB an episode.")
    if size > largest:
        message = f"That does not fit into the {free / 2**30:.2f} GiB that are free: --buffer-size {largest} would."
        raise Exit(message, NO_MEMORY)
    return size


def default_buffer_size(args, episode_bytes):
    """8192 episodes on the GPU, 4096 on the CPU; a single learner with partners has up to four times as many."""
    size = 8192 if args.cuda else 4096
    if getattr(args, "team", "self") != "self":
        size = max(size, min(4 * size, (4 if args.cuda else 2) * 2**30 // episode_bytes))
    largest = (16 if args.cuda else 8) * 2**30 // episode_bytes  # a limit only with very many units
    return max(min(size, largest), args.num_envs, args.batch_size)

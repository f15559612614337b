"""A training run and its folder: arguments, log, progress bar, checkpoints, stopping and resuming. Nothing here learns.

    args = runs.parse_args(Args, __file__)
    with runs.Run(args, __file__, STARTED, env, learner, state={"buffer": buffer, ...}) as run:
        while run.in_progress():
            ...
            run.count(steps, episodes)

A learner has `networks()` (name -> module), `optimizer`, `updates` and `metrics`. checkpoint.pt has what it takes to
act and to continue; resume-<steps>.pt what else it takes to continue exactly: random states, and what is in `state`,
objects with state_dict and load_state_dict. A learner may have `exports()`: name -> what a checkpoint has there that
differs. With every save each of them is written as a run folder of its own, which cannot be continued.

Exit codes: 0 done, 1 error, 2 bad arguments, 128 + n stopped by signal n and saved (130 Ctrl-C, 143 SIGTERM, and 143 at
the time limit).
"""

import _thread
import contextlib
import functools
import importlib.util
import json
import os
import platform
import re
import shlex
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import tyro
from tqdm import tqdm

import envs
from envs import checkpoints, files
from envs.episodes import (
    EpisodeRunner,
    GameFailed,
    Graphed,
    ScriptedPlayer,
    Stopped,
    load_runner,
    rng_state,
    set_rng_state,
)
from envs.files import say

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
RETRY = 60.0  # seconds until a file that could not be written is tried again
BAR_INTERVAL, LINE_INTERVAL = 0.1, 3.0  # seconds between two states of a progress bar, and between lines in a file
LARGEST = {
    **dict.fromkeys(("hidden_dim", "latent_dim", "mixing_dim", "hypernet_dim", "horizon"), 2**13),
    **dict.fromkeys(("joint_dim", "critic_dim"), 2**13),
    "joint_layers": 2**4,
    **dict.fromkeys(("num_steps", "update_epochs"), 2**13),  # a run is stopped after them, not before
    **dict.fromkeys(("sims", "train_sims", "rollout_steps", "trees", "depth"), 2**13),
    **dict.fromkeys(("num_envs", "batch_size"), 2**22),
}
PRETRAIN_TIMESTEPS = (100_000, 2_000_000)  # by default, on the CPU and on the GPU
OUTWARD = ("track", "wandb_project_name", "wandb_entity", "wandb_group")  # no file says where a log goes
CHANGEABLE = (*OUTWARD, "resume", "time_limit", "capture_video", "checkpoint_interval", "log_interval")  # on resuming
FOUND_OUT = ("n_policies",)  # options of earlier versions that a run has set by itself, and does not need any more
NO_MEMORY = 3  # the exit code of a run that lacks memory: beside fewer others it may have enough
NO_MEMORY_MESSAGE = re.compile("tried to allocate|can't allocate|out of memory|OUT_OF_MEMORY|ALLOC_FAILED")


_size_limits = []


# ---- ending ----
class Exit(SystemExit):
    """Ends the program with a message and an exit code."""

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code
        say(message, sys.stderr)


class UsageError(Exit):
    def __init__(self, message):
        message = str(message)
        super().__init__(message if len(message) <= 1500 else f"{message[:1500]}...", 2)


def not_ignored():
    """The signals to act on: nohup, for one, ignores SIGHUP for its program."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def exit_on_signals():
    """Until a run starts, a signal ends the program at once; lack of memory ends it with one line, always.

    Lines that cannot be printed are dropped from here on.
    """

    def end(number, frame):
        raise Exit("interrupted before the first step: nothing was saved", 128 + number)

    sys.excepthook = report_lack_of_memory
    files.drop_what_cannot_be_printed()
    for number in not_ignored():
        signal.signal(number, end)
    if os.environ.get("OMG_STOP_ON_EOF") == "1":  # who started this closes its stdin by ending, however it ends
        threading.Thread(target=_signal_at_eof, daemon=True).start()


def _signal_at_eof():
    while os.read(sys.stdin.fileno(), 1024):  # sys.stdin itself would be locked when the program ends
        pass
    _thread.interrupt_main(signal.SIGTERM)


def report_lack_of_memory(kind, error, trace, default=sys.excepthook):
    """One line instead of a traceback."""
    if issubclass(kind, MemoryError) or (issubclass(kind, Exception) and NO_MEMORY_MESSAGE.search(str(error))):
        cause = (str(error).strip() or "no more can be allocated").splitlines()[0][:200]
        raise Exit(f"out of memory: {cause}", NO_MEMORY) from None
    else:
        default(kind, error, trace)


# ---- arguments ----
def option(name):
    return f"--{name.replace('_', '-')}"


def words_of(options):
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
    return shlex.join(["python", f"{args.script}.py", *words_of({**options, **more})])


def from_command_line(args_class, settings=None):
    """The arguments of the command line; `settings` are other defaults, which --paper or --preset asks for."""
    args = tyro.cli(args_class)
    if not (getattr(args, "paper", False) or getattr(args, "preset", None)):
        return args
    return tyro.cli(args_class, default=with_defaults(args_class, settings))


def parse_args(args_class, script, settings=None):
    """The same, with the runs that a pool's patterns name; a resumed run keeps what it had, and rejects others."""
    args = from_command_line(args_class, settings)
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
    _size_limits.append(checkpoints.limit_sizes(folder, saved, UsageError))  # until they are loaded
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
    return given


def expanded(pool):
    """A pool with the runs that its patterns name now, so that they are the same whenever the run is resumed."""
    return tuple(str(name) for pattern in pool for name in checkpoints.find_runs(pattern) or [pattern])


def is_pool(typed, saved):
    """Whether a pool that is typed again names a saved one: its patterns may name other runs by now, too."""
    plain = {name for name in typed if expanded([name]) == (name,)}
    return plain <= set(saved) <= {*expanded(typed)}


def load_script(args):
    """The script of --script."""
    try:
        return checkpoints.load_script(args.script, f"--script {args.script}:", [f"{args.script}.py"])
    except ValueError as error:
        raise UsageError(error) from None


def check_ranges(args, positive="", non_negative="", fractions=""):
    """Rejects numbers out of range; each parameter lists names of arguments. None is accepted."""
    ranges = (
        (positive, "above 0", lambda x: x > 0),
        (non_negative, "from 0 up", lambda x: x >= 0),
        (fractions, "from 0 to 1", lambda x: 0 <= x <= 1),
    )
    for names, allowed, accepts in ranges:
        for name in names.split():
            value = getattr(args, name)
            numbers = value if isinstance(value, (tuple, list)) else [] if value is None else [value]
            if not all(map(accepts, numbers)):
                raise UsageError(f"{option(name)} is {allowed}, not {value}")
            if not all(number <= LARGEST.get(name, 2**62) for number in numbers):
                raise UsageError(f"{option(name)} is at most {LARGEST.get(name, 2**62)}, not {value}")
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


def check_unused(args, encounter):
    """Rejects options about others where there are none; `encounter`: whether --encounter is one of them."""
    if args.team != "self":
        return
    unused = {"seat": args.seat != "rotate", "mix_teammates": args.mix_teammates}
    unused["teammate_epsilon"] = args.teammate_epsilon not in (0.0, (0.0, 0.0))
    unused["encounter"] = args.encounter > 1 and encounter
    for name in (name for name, given in unused.items() if given):
        raise UsageError(f"{option(name)} is for a learner among others: with --team self there are none")


def check_team_options(args):
    """Rejects options that do not go together."""
    if args.team != "self" and not getattr(args, "share_parameters", True):
        raise UsageError("--no-share-parameters is for --team self: a learner whose seat changes has one network")
    check_unused(args, encounter=not args.keep_memory)
    if args.tell_who and args.team == "self":
        raise UsageError("--tell-who is for a learner among others: with --team self there are none to tell of")
    if args.tell_who and args.capture_video:
        raise UsageError("--tell-who has no video: what such a learner is told is known in its own run only")
    if args.capture_video and args.env_id.startswith("pettingzoo:") and "render_mode=rgb_array" not in args.env_id:
        raise UsageError(f"--capture-video needs pictures: --env-id {args.env_id},render_mode=rgb_array")
    if args.keep_memory and args.encounter == 1:
        raise UsageError("--keep-memory is for encounters of several matches: --encounter says how many")


def check_common_goal(args, env, team):
    """For scripts whose learners share a value: rejects learners on opposite sides, and says what is maximised."""
    if team.is_opposed():
        example = f"{env.sides.count(0)}learner{env.sides.count(1)}{env.policies[0]}"
        raise UsageError(f"--team {args.team}: {args.env_id} has two sides, of which one can learn: --team {example}")
    if env.zero_sum and args.team == "self":
        raise UsageError(
            f"--env-id {args.env_id}: the rewards add up to zero, so a team of all players has nothing to learn; "
            "iql.py plays against itself, and --team scripted is one learner against scripted others"
        )
    if not env.team_reward:
        print(f"In {args.env_id} every agent has a reward of its own: this learns to maximise their sum.")


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
    if hasattr(args, "pretrain_timesteps"):
        defaults["pretrain_timesteps"] = PRETRAIN_TIMESTEPS[args.cuda]
    fill_in(args, defaults)
    fill_in(args, {"eval_interval": max(args.total_timesteps // 50, 1)})
    most = args.total_timesteps + args.num_envs  # episodes: each has a step or more, the last round may begin late
    if args.batch_size > most:
        files.warn(f"--batch-size {args.batch_size}: the run has at most {most} episodes, so it learns nothing")
    smallest = max(args.batch_size, args.num_envs)
    if args.buffer_size is not None and args.buffer_size < smallest:
        raise UsageError(f"--buffer-size is at least {smallest} (a round and a batch), not {args.buffer_size}")


def seed_for(seed, purpose):
    """A seed for one purpose. Other seeds and other purposes have unrelated random numbers."""
    words = np.random.SeedSequence([seed, *purpose.encode()]).generate_state(2)
    return int(words[0]) << 31 | int(words[1]) >> 1


def set_up_torch(args):
    """Seeds torch and returns the device."""
    torch.manual_seed(args.seed)
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import torch.compile
        torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel a tensor: a fifth of an update
    if args.cuda:
        torch.set_float32_matmul_precision("high")  # TF32: a learner's noise is larger, and updates are a third faster
    if platform.machine() == "aarch64":
        torch.backends.mkldnn.enabled = False  # oneDNN is slow there at matrices as small as these
    _do_not_import_torch_compile()
    return torch.device("cuda" if args.cuda else "cpu")


@functools.cache  # once in a process: `step` is wrapped
def _do_not_import_torch_compile():
    """torch.optim imports torch.compile only to say what it should not compile, which takes seconds at every start.

    Here its methods are marked already, and steps run as they do without compilation. A script that has imported
    torch.compile by itself is left alone.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        original = getattr(method, "__wrapped__", None)
        if original is not None:
            setattr(original, "__dynamo_disable", original)
    for optimizer in (torch.optim.Adam, torch.optim.RMSprop):
        step = getattr(optimizer.step, "__wrapped__", None)
        if step is not None:
            optimizer.step = torch.no_grad()(step)


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
    """8192 episodes on the GPU, 4096 on the CPU; a single learner among others has up to four times as many."""
    size = 8192 if args.cuda else 4096
    if getattr(args, "team", "self") != "self":
        size = max(size, min(4 * size, (4 if args.cuda else 2) * 2**30 // episode_bytes))
    largest = (16 if args.cuda else 8) * 2**30 // episode_bytes  # a limit only with very many units
    return max(min(size, largest), args.num_envs, args.batch_size)


# ---- what is logged ----
class Metrics:
    """Means of named values over the updates since the last log, kept on the device so that nothing waits for them."""

    def __init__(self, device):
        self.device = device
        self.shapes = {}

    def add(self, values):
        """Adds a dictionary of tensors, always of the same names; returns whether all are finite (a tensor).

        Values of an update that is not finite are not counted.
        """
        if not self.shapes:
            self.shapes = {name: value.shape for name, value in values.items()}
            self.one = torch.ones(1, device=self.device)  # sums up to the number of updates
            size = sum(shape.numel() for shape in self.shapes.values())
            self.sums = torch.zeros(size + 1, device=self.device)
            self.errors = torch.zeros(size, device=self.device)
        flat = torch.cat([*(value.detach().flatten() for value in values.values()), self.one])
        errors = flat - flat  # nan where a value is not finite, else 0
        self.errors += errors[:-1]
        finite = (errors == 0).all()
        self.sums += torch.where(finite, flat, 0.0)
        return finite

    def check_finite(self):
        """Raises a FloatingPointError if a value was not finite."""
        if not self.shapes:
            return
        for name, errors in self._split(self.errors.cpu()).items():
            if errors.isnan().any():
                raise FloatingPointError(f"{name} was not finite")

    def pop(self):
        """The means since the last call: name -> number, or a tensor where it has several."""
        self.check_finite()
        *sums, count = self.sums.tolist() if self.shapes else [0]
        if not count:
            return {}
        self.sums.zero_()
        means = self._split(torch.tensor(sums) / count)
        return {name: value if value.dim() else value.item() for name, value in means.items()}

    def _split(self, flat):
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts)}


def wilson_interval(successes, trials):
    """The 95% interval of a proportion."""
    z = 1.959964
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * (share * (1 - share) / trials + z * z / (4 * trials**2)) ** 0.5
    low, high = ((centre + side * spread) / (1 + z * z / trials) for side in (-1, 1))
    return [max(low, 0.0), min(high, 1.0)]  # beyond them by rounding only


def summary_of(returns, lengths, won):
    """The results of EpisodeRunner.evaluate in numbers."""
    return {
        "win_rate": won.float().mean().item(),
        "win_rate_interval": wilson_interval(int(won.sum()), len(won)),
        "episodic_return": returns.mean().item(),
        "returns_by_agent": returns.mean(0).tolist(),
        "episodic_length": lengths.float().mean().item(),
        "episodes": len(won),
    }


def versions():
    return {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__}


# ---- progress ----
class Progress:
    """How far something is, in steps, updates, ...: a bar in a terminal, elsewhere a line every few seconds."""

    started = time.monotonic()  # of the command; a resumed run sets it back by what it has run before

    def __init__(self, what, total, unit, done=0):
        self.what, self.total, self.unit, self.first, self.done, self.numbers = what, total, unit, done, done, ""
        self.began = self.shown_at = self.reached_at = time.monotonic()
        form = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} " + unit + " [{elapsed}<{remaining}{postfix}]"
        self.bar = tqdm(total=total, initial=done, desc=what, unit_scale=True, bar_format=form, leave=False,
                        disable=not sys.stderr.isatty(), mininterval=0)  # fmt: skip
        self.in_terminal, self.close = not self.bar.disable, self.bar.close

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()
        if kind is None and self.done > self.first:
            seconds = time.monotonic() - self.began
            say(f"{self.what}{self.total:,} {self.unit}, {duration(seconds)}{self.numbers and ': '}{self.numbers}")

    def show(self, done, numbers=None, now=False):
        """Shows that so much is done, and some numbers: `now`, or if that was some time ago."""
        if done > self.done:
            self.reached_at = time.monotonic()
        self.done, self.numbers = min(done, self.total), self.numbers if numbers is None else numbers
        if time.monotonic() - self.shown_at < (BAR_INTERVAL if self.in_terminal else LINE_INTERVAL) and not now:
            return
        self.shown_at = time.monotonic()
        if not self.in_terminal:
            say(f"{time.monotonic() - self.started:7.1f} s  {self.line()}")
        else:
            self.bar.n = self.done
            self.bar.set_postfix_str(self.numbers)

    def line(self):
        text = f"{self.what}{int(self.done):,} of {self.total:,} {self.unit} ({self.done / self.total:.0%})"
        if self.done > self.first:
            left = (self.total - self.done) * (self.reached_at - self.began) / (self.done - self.first)
            text += f", {duration(max(left - (time.monotonic() - self.reached_at), 0))} left"
        return f"{text}: {self.numbers}" if self.numbers else text


def monotonic(started):
    """When it was by the monotonic clock, which nobody sets, that time.time() was `started`."""
    return time.monotonic() - max(time.time() - started, 0.0)


def duration(seconds):
    """Roughly, in the largest unit that fits: 42 s, 3 min, 1.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


# ---- networks of earlier runs ----
def initialise_from(run, learner):
    """--init: loads the networks that both runs have. A mixer of other sizes stays new; other misfits are errors.

    Where the run has no `target_<name>` this one starts from <name>, as in a new run.
    """
    try:
        saved = checkpoints.read_run(run)
        checkpoints.check_env("it", saved, learner.env)
        networks = saved["networks"]
    except ValueError as error:
        raise UsageError(f"--init {run}: {error}") from None
    theirs, mine = (_agents_output(found) for found in (networks, learner.networks()))
    if theirs != mine:
        misfit = f"the agents of a run of {saved['algorithm']}.py have {theirs} as outputs, and here they have {mine}"
        raise UsageError(f"--init {run}: {misfit}")
    for name, network in learner.networks().items():
        weights = networks.get(name, networks.get(name.removeprefix("target_")))
        fits = weights is not None and _shapes(weights) == _shapes(network.state_dict())
        if fits:
            network.load_state_dict(weights)
        elif name == "agents" or (weights is not None and "mixer" not in name):
            misfit = f"the {name} of a run of {saved['algorithm']}.py have other sizes or options"
            raise UsageError(f"--init {run}: {misfit}")


def _agents_output(networks):
    """What networks that may have the same sizes are for: beside a critic the agents are policies, else values."""
    return "the logits of a policy" if "critic" in networks else "action values"


def _shapes(weights):
    return {name: tensor.shape for name, tensor in weights.items()}


# ---- a run ----
def folder_of(args, started):
    return Path(args.run_root) / f"{files.as_name(args.env_id)}__{args.exp_name}__{args.seed}__{int(started)}"


def make_folder(args, started):
    """The new folder of a run, which no other run has."""
    try:
        return files.make_folder(folder_of(args, started))
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise UsageError(f"--run-root {args.run_root}: no folder can be made there ({cause})") from None


def writable_folder(path):
    """Makes the folder where there is none, and returns its path; ends the program where nothing can be written."""
    try:
        return files.writable_folder(path)
    except ValueError as error:
        raise UsageError(error) from None


class Log:
    """TensorBoard's writer, mirrored by Weights and Biases with --track. What cannot be written is left out."""

    wandb = None

    def __init__(self, args, folder, purge_step=None):
        if args.track:
            import wandb

            self.wandb = wandb
            names = {"name": folder.name, "id": folder.name, "resume": "allow"}
            project = {"project": args.wandb_project_name, "entity": args.wandb_entity, "group": args.wandb_group}
            run = wandb.init(**names, **project, config=asdict(args), save_code=True)
            run.define_metric("*", step_metric="steps")
            run.define_metric("pretrain/*", step_metric="pretrain/update")
            for key in ("eval/win_rate", "eval/episodic_return"):
                run.define_metric(key, step_metric="steps", summary="max")
        self.folder = folder
        self.before_steps = 2 * getattr(args, "pretrain_updates", 0)  # rows of pre-training come first
        self.writer = None
        self.failed = False
        self.retry_at = 0.0
        threading.excepthook = functools.partial(_ignore_log_threads, default=threading.excepthook)
        rows = "\n".join(f"|{key}|{value}|" for key, value in asdict(args).items())
        text = f"|param|value|\n|-|-|\n{rows}"
        self._write(lambda writer: writer.add_text("hyperparameters", text), purge_step)

    def add_scalar(self, key, value, step):
        self._write(lambda writer: writer.add_scalar(key, value, step))
        self._mirror(key, step, lambda wandb: float(value))

    def add_histogram(self, key, values, step):
        self._write(lambda writer: writer.add_histogram(key, values, step))
        self._mirror(key, step, lambda wandb: wandb.Histogram(values.tolist()))

    def add_image(self, key, image, step):
        """A picture (height, width, 3)."""
        self._write(lambda writer: writer.add_image(key, image, step, dataformats="HWC"))
        self._mirror(key, step, lambda wandb: wandb.Image(image))

    def add_gif(self, key, path, step):
        """The file as it is: TensorBoard shows it among the images, moving."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        image = Summary.Image(colorspace=3, encoded_image_string=path.read_bytes())
        summary = Summary(value=[Summary.Value(tag=key, image=image)])
        self._write(lambda writer: writer.file_writer.add_summary(summary, step))
        self._mirror(key, step, lambda wandb: wandb.Video(str(path), format="gif"))

    def add_hparams(self, args, keys):
        """The arguments beside the last values of these keys, for TensorBoard's HParams; wandb has both anyway."""
        from torch.utils.tensorboard.summary import hparams

        plain = {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in args.items()}
        summaries = hparams(plain, dict.fromkeys(keys, 0.0))
        self._write(lambda writer: [writer.file_writer.add_summary(summary) for summary in summaries])

    def _mirror(self, key, step, content):
        """Rows have numbers of ours: wandb's own would start at 0 again in a run that goes on offline."""
        if self.wandb is None:
            return
        pretraining = key.startswith("pretrain/")
        place = {"pretrain/update": step} if pretraining else {"steps": step}
        row = step if pretraining else self.before_steps + step
        self.wandb.log({key: content(self.wandb), **place}, step=row)

    def _write(self, write, purge_step=None):
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        if time.monotonic() < self.retry_at:
            return
        try:
            if self.writer is None:
                self.writer = SummaryWriter(self.folder, purge_step=purge_step)
            write(self.writer)
            self.failed = False
        except OSError as error:
            self.writer = None  # its thread has ended; a later call opens a new file
            self.retry_at = time.monotonic() + RETRY
            if not self.failed:
                files.warn(f"{files.reason(error)}: the log is not written; the run goes on")
            self.failed = True
            for path in self.folder.glob("events.out.*"):
                if path.stat().st_size == 0:
                    path.unlink()

    def close(self):
        if self.writer is not None:
            with contextlib.suppress(OSError):
                self.writer.close()
        if self.wandb is not None:
            self.wandb.finish()


def _ignore_log_threads(args, default):
    """TensorBoard writes in a thread; its error is reported by the next call."""
    if type(args.thread).__name__ != "_AsyncWriterThread":
        default(args)


class Run:
    def __init__(self, args, script, started, env, learner, state):
        self.args = args
        self.env = env
        self.learner = learner
        self.state = state
        self.algorithm = Path(script).stem
        if args.init and not args.resume:
            initialise_from(args.init, learner)
        self.folder = Path(args.resume) if args.resume else make_folder(args, started)
        self.lock = files.FolderLock(self.folder)
        try:
            self.lock.acquire()
        except ValueError as error:
            raise UsageError(error) from None
        except OSError as error:
            raise UsageError(f"{self.folder} cannot be written to ({error.strerror})") from None
        device = env.device.type.upper()
        print(f"{self.folder}: {args.env_id}, {env.n_agents} agents, {args.num_envs} matches at a time on the {device}")
        self.resume_file = None
        self.progress = {"steps": 0, "episodes": 0, "seconds": 0.0, "evals": [], "complete": False}
        self.progress["next_eval"] = args.eval_interval
        if args.resume:
            self.restore()
        self.launched = monotonic(started)
        self.started = Progress.started = self.launched - self.progress["seconds"]
        self.stop_requests = []
        self.bar = None
        self.writer = Log(args, self.folder, self.steps + 1 if args.resume else None)
        for part in state.values():
            part.should_stop = self.should_stop  # asked by what can last

    def __enter__(self):
        self.signals = not_ignored()
        for number in self.signals:
            signal.signal(number, lambda number, frame: self.stop_requests.append(number))
        Graphed.on_call = self.show_progress
        self.save_at = time.monotonic() + self.args.checkpoint_interval
        self.logged_at = time.monotonic()
        self.logged_steps = self.steps
        self.first_step = self.steps
        return self

    def __exit__(self, kind, error, trace):
        try:
            if kind is Stopped:
                self.stop()
            if kind is GameFailed:
                self.save()
        except FloatingPointError as not_saved:
            kind, error = FloatingPointError, not_saved
        finally:
            default = signal.SIG_IGN if self.progress["complete"] else signal.SIG_DFL
            for number in self.signals:  # once a run is complete, or stopped and saved, further signals change nothing
                action = signal.default_int_handler if number == signal.SIGINT else default
                signal.signal(number, signal.SIG_IGN if self.stop_requests else action)
            Graphed.on_call = None
            self._set_bar(None)
            self.writer.close()
            self.lock.release()
        if kind in (FloatingPointError, GameFailed):
            raise Exit(f"stopped at step {self.steps:,}: {error}; {self._last_checkpoint()}", 1) from None

    @property
    def steps(self):
        return self.progress["steps"]

    # ---- stopping ----
    def should_stop(self):
        """Whether a signal asked the run to stop."""
        return bool(self.stop_requests)

    def stop_if_asked(self, progressed=True):
        """Saves the run and ends the program if it was asked to stop, or if its time is up and it has `progressed`."""
        limit = self.args.time_limit
        time_is_up = limit is not None and time.monotonic() - self.launched >= limit
        if self.stop_requests or (time_is_up and progressed):
            self.stop()

    def stop(self):
        """Saves the run and ends the program."""
        self._set_bar(None)
        number = next(iter(self.stop_requests), signal.SIGTERM)  # the time limit counts as SIGTERM
        if not self.save():
            raise Exit(f"stopped at step {self.steps:,} and not saved; {self._last_checkpoint()}", 1)
        also = f" --env-id {self.args.env_id}" if envs.names_code(self.args.env_id) else ""
        raise Exit(f"stopped at step {self.steps:,}; continue with --resume {self.folder}{also}", 128 + number)

    def save_or_stop(self):
        """For what comes before the first step."""
        self.stop_if_asked()
        if self.save_due():
            self.save()

    def _last_checkpoint(self):
        path = self.folder / "checkpoint.pt"
        return f"the last good checkpoint is {path}" if path.exists() else "no checkpoint was saved before"

    def in_progress(self):
        """Whether there are steps left. A run that was asked to stop is saved, and ends the program."""
        unfinished = self.steps < self.args.total_timesteps
        if unfinished:
            self.stop_if_asked(progressed=self.steps > self.first_step)
            if self.bar is None:
                self._set_bar("", self.args.total_timesteps, "steps", self.steps)
                self.round_began = self.logged_at = time.monotonic()
                self.last_round = 0, 1.0  # steps, seconds
        else:
            self._begin_final_evaluation()
            self._set_bar("final evaluation: ", self.args.final_eval_episodes, "matches")
        return unfinished

    def _begin_final_evaluation(self):
        """What it finds depends on the policy and the seed alone: a run that was killed in it finds it again."""
        if runner := self.state.get("eval_runner"):
            seed = seed_for(self.args.seed, "final evaluation")
            torch.manual_seed(seed)
            runner.begin_anew(seed)
            self.before_evaluation = runner.state_dict()

    def _set_bar(self, *arguments):
        """Ends the progress bar, and begins another one."""
        if self.bar is not None:
            self.bar.close()
        self.bar = None if arguments == (None,) else Progress(*arguments)
        self.rounds_before = getattr(self.state.get("eval_runner"), "rounds", 0)

    def show_progress(self):
        """Called within rounds. A bar moves on as the last round did; a line has the steps of whole rounds."""
        if self.bar is None:
            return
        if self.bar.unit == "steps":
            steps, seconds = self.last_round if self.bar.in_terminal else (0, 1.0)
            self.bar.show(self.steps + steps * min((time.monotonic() - self.round_began) / seconds, 1))
        elif self.bar.unit == "matches" and (eval_runner := self.state.get("eval_runner")):
            complete = eval_runner.rounds - 1 - self.rounds_before  # a round counts from its beginning
            self.bar.show(max(complete, 0) * eval_runner.env.num_envs)
        else:
            self.bar.show(self.bar.done)

    def count(self, steps, episodes):
        before = self.steps
        self.progress["steps"] += steps
        self.progress["episodes"] += episodes
        self.progress["seconds"] = time.monotonic() - self.started
        self.last_round = steps, max(time.monotonic() - self.round_began, 1e-3)
        self.round_began = time.monotonic()
        for share in getattr(self.args, "checkpoint_at", ()):
            if (before or -1) < share * self.args.total_timesteps <= self.steps:
                self.save_copy(self.folder / f"at-{share:g}")

    # ---- logs ----
    def log(self, values):
        """Logs a dictionary: numbers as scalars, tensors with several values as histograms."""
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim():
                self.writer.add_histogram(key, value, self.steps)
            else:
                self.writer.add_scalar(key, value, self.steps)

    def log_due(self):
        return time.monotonic() - self.logged_at >= self.args.log_interval

    def log_episodes(self, returns, lengths, won, valid, epsilon=None):
        """Logs a round of training episodes, and shows how far the run is."""
        speed = (self.steps - self.logged_steps) / (time.monotonic() - self.logged_at)
        episodic_return = returns[valid].mean().item()
        win_rate = won[valid].float().mean().item()
        charts = {
            "charts/episodic_return": episodic_return,
            "charts/episodic_length": lengths[valid].float().mean().item(),
            "charts/win_rate": win_rate,
            "charts/SPS": speed,
        }
        if epsilon is not None:
            charts["charts/epsilon"] = epsilon
        if hasattr(self.env, "restarts"):
            charts["charts/restarts"] = self.env.restarts
        if not self.env.team_reward:
            by_seat = returns[valid].mean(0).tolist()
            charts |= {f"charts/episodic_return_{seat}": value for seat, value in enumerate(by_seat)}
        self.log(charts)
        line = f"return {episodic_return:.2f}, {speed:,.0f} steps/s"
        if self.env.team_reward:
            line = f"return {episodic_return:.2f}, won {win_rate:.0%}, {speed:,.0f} steps/s"
        self.bar.show(self.steps, line, now=True)
        self.logged_at = time.monotonic()
        self.logged_steps = self.steps

    def evaluation_due(self):
        due = self.steps >= self.progress["next_eval"]
        if due:
            self.progress["next_eval"] = (self.steps // self.args.eval_interval + 1) * self.args.eval_interval
        return due

    def log_evaluation(self, returns, lengths, won, **groups):
        """Logs the results of EpisodeRunner.evaluate, and further metrics, a dictionary for each group."""
        groups |= self._encounters()
        result = {"win_rate": won.float().mean().item(), "episodic_return": returns.mean().item(), **self._by_side()}
        shown = {name: result[name] for name in dict.fromkeys(("win_rate", *self._measures()))}
        for group, metrics in {"eval": shown, **groups}.items():
            self.log({f"{group}/{name}": value for name, value in metrics.items()})
        self.progress["evals"].append({"steps": self.steps, "seconds": time.monotonic() - self.started, **result})

    def _by_side(self):
        """The mean return of each side in the last evaluation, if learners play against each other."""
        found = getattr(self.state.get("eval_runner"), "side_returns", [])
        return {f"episodic_return_side_{side}": mean for side, mean in enumerate(found)}

    def _measures(self):
        """What says how good a run is. Who wins does if the reward is the team's; else `won` may be somebody else's
        success. The mean over two sides that learn against each other does not.
        """
        return ["win_rate"] * bool(self.env.team_reward) + [*(self._by_side() or ["episodic_return"])]

    def _encounters(self):
        """The mean returns by the number of a match in its encounter, if there are encounters."""
        found = getattr(self.state.get("eval_runner"), "match_returns", {})
        return {"encounter": found} if found else {}

    def finish(self, returns, lengths, won, **groups):
        """Writes the last checkpoint and results.json, and prints a summary; parameters as in log_evaluation."""
        groups |= self._encounters()
        self.progress |= {"seconds": time.monotonic() - self.started, "complete": True}
        saved = self.save()
        final, measures, sides = summary_of(returns, lengths, won) | self._by_side(), self._measures(), self._by_side()
        script = self._best_script()
        self._set_bar(None)
        best = {
            key: max([final[key], *(evaluation[key] for evaluation in self.progress["evals"])])
            if key in measures
            else None
            for key in ("win_rate", "episodic_return")
        }
        results = {
            "env_id": self.args.env_id,
            "algorithm": self.algorithm,
            "seed": self.args.seed,
            "command": " ".join(sys.argv),
            "final": final,
            "best": best,
            **({"best_script": script} if script else {}),
            **self.progress,
            "updates": self.learner.updates,
            "versions": versions(),
            **({"restarts": self.env.restarts} if hasattr(self.env, "restarts") else {}),
            **groups,
            "args": asdict(self.args),
        }
        saved = write_json(results, self.folder / "results.json") and saved
        self.log({f"eval/{key}": final[key] for key in dict.fromkeys(("win_rate", *measures))})
        figures = {"final": final, "best": best, **({"best_script": script} if script else {})}
        figures = {f"{group}/{key}": found[key] for group, found in figures.items() for key in measures if key in found}
        self.log(figures)
        self.writer.add_hparams(asdict(self.args), figures)
        low, high = final["win_rate_interval"]
        print(f"{self.progress['seconds']:.1f} s, {self.steps:,} steps, {self.learner.updates:,} updates")
        share = f" won {final['win_rate']:.1%} ({100 * low:.1f} to {100 * high:.1f})"
        played = f"encounters of {self.env.encounters} matches" if self.env.encounters > 1 else "matches"
        line = f"of {len(won)} greedy {played}{share}" if self.env.team_reward else f"{len(won)} greedy {played}"
        if sides:
            line += ", return {:.2f} of one side, {:.2f} of the other".format(*sides.values())
        else:
            line += f", return {final['episodic_return']:.2f}"
        if not self.learner.updates:
            print("Nothing was learned: the run was too short for a single update.")
        if script:
            seats = "its seat" if returns.shape[1] == 1 else "its seats"
            share = f"{script['win_rate']:.1%}, " if self.env.team_reward else ""
            line += f"; `{script['policy']}` in {seats}: {share}return {script['episodic_return']:.2f}"
        print(line)
        if self.args.capture_video:
            self.record_video()
        if not saved:
            raise Exit(f"the results could not be written to {self.folder}", 1)

    def _best_script(self):
        """What the best scripted policy has in the learner's seats, in the matches of the last evaluation.

        None where nobody else plays, where there is no script, and in the real game, whose matches do not repeat.
        """
        runner = self.state.get("eval_runner")
        if not (runner and getattr(runner.team, "used", ()) and runner.env.simulated and runner.env.policies):
            return None
        found, policies = [], runner.env.default_others or runner.env.policies
        self._set_bar("scripts in the learner's seat: ", len(policies), "policies")
        for policy in policies:
            stand_in = EpisodeRunner(runner.env, runner.team, ScriptedPlayer(runner.env, policy))
            stand_in.load_state_dict(self.before_evaluation)
            found.append({"policy": policy, **summary_of(*stand_in.evaluate(self.args.final_eval_episodes))})
            self.bar.show(len(found))
        won = runner.env.team_reward  # else it may be another's success
        return max(found, key=lambda summary: (won and summary["win_rate"], summary["episodic_return"]))

    def record_video(self):
        """Writes and logs match.gif: a match of the final policy, in the team of the run."""
        from envs import play  # it draws, which other runs do not need

        script, args = checkpoints.script_of(self.folder)
        path = self.folder / "match.gif"
        play.record(load_runner(self.folder, script.make_env(args, 1, self.env.device, "video")), path)
        self.writer.add_gif("eval/match", path, self.steps)

    # ---- checkpoints ----
    def save_due(self):
        return time.monotonic() >= self.save_at

    def save(self):
        """Saves the run, completely or not at all; returns whether it did.

        Replacing checkpoint.pt, which names its resume file, is the commit: before it the old pair of files is valid,
        after it the new one.
        """
        resume_file = None if self.progress["complete"] else self._resume_file()
        checkpoint = self._checkpoint(resume_file)
        written = True
        if resume_file is not None:
            resume = {"steps": self.steps, "rng": rng_state(self.args.cuda)}
            resume |= {name: part.state_dict() for name, part in self.state.items()}
            written = checkpoints.write(resume, self.folder / resume_file)
        written = written and checkpoints.write(checkpoint, self.folder / "checkpoint.pt")
        if written:
            self.resume_file = resume_file
        for path in (*self.folder.glob("resume*.pt"), *self.folder.glob(".*.part")):  # .part: of a process that died
            if path.name != self.resume_file:
                path.unlink(missing_ok=True)
        written = written and self._save_exports(self.folder)
        self.save_at = time.monotonic() + (self.args.checkpoint_interval if written else RETRY)
        return written

    def save_copy(self, folder):
        """Keeps the policy as it is now in a folder of its own, as a run that cannot be continued."""
        self._write_copy(folder, {})
        self._save_exports(folder)

    def _save_exports(self, folder):
        """Writes the runs that a learner exports to folders in `folder`; returns whether it did."""
        exports = getattr(self.learner, "exports", dict)()
        written = [self._write_copy(folder / name, content) for name, content in exports.items()]
        return all(written)

    def _write_copy(self, folder, content):
        with contextlib.suppress(OSError):  # that it cannot be written there is said below
            folder.mkdir(exist_ok=True)
        return checkpoints.write(self._checkpoint(None) | content, folder / "checkpoint.pt")

    def _checkpoint(self, resume_file):
        self.learner.metrics.check_finite()
        if not self.folder.is_dir():
            raise Exit(f"the run folder {self.folder} is gone: nothing can be saved", 1)
        checkpoint = {
            "algorithm": self.algorithm,
            "env_id": self.args.env_id,
            "sizes": checkpoints.env_sizes(self.env),
            "args": asdict(self.args),
            "networks": {name: network.state_dict() for name, network in self.learner.networks().items()},
            "optimizer": self.learner.optimizer.state_dict(),
            "updates": self.learner.updates,
            "progress": self.progress,
            "resume": resume_file,
        }
        for name in ("networks", "optimizer"):  # of an update that was finite, weights may not be, or what is beside it
            check_finite(checkpoint[name], name)
        return checkpoint

    def _resume_file(self):
        """A name that the last save did not use."""
        name = f"resume-{self.steps}.pt"
        return name if name != self.resume_file else f"resume-{self.steps}-2.pt"

    def restore(self):
        while _size_limits:
            _size_limits.pop().remove()
        try:
            saved = checkpoints.load_networks(self.folder, self.env, self.learner.networks())
            self.progress = saved["progress"]
            self.learner.updates = saved["updates"]
            checkpoints.load_optimizer(self.learner.optimizer, saved["optimizer"])
            self.resume_file = saved.get("resume")
            if self.resume_file is not None:
                self._restore_exactly(self.folder / self.resume_file)
        except (ValueError, KeyError, TypeError, RuntimeError, IndexError, AttributeError) as error:
            self.lock.release()
            raise UsageError(f"--resume {self.folder} does not fit or is damaged: {error}") from None

    def _restore_exactly(self, path):
        if not path.exists():
            print(f"{path} is missing: going on with new matches and an empty buffer.")
            return
        resume = checkpoints.read(path)
        if resume.get("steps") != self.steps:
            raise ValueError(f"{path.name} is of another step")
        set_rng_state(resume["rng"])
        for name, part in self.state.items():
            part.load_state_dict(resume[name])


def check_finite(content, name):
    """Raises a FloatingPointError if a tensor in nested dictionaries has a number that is not finite."""
    if isinstance(content, dict):
        for key, value in content.items():
            check_finite(value, f"{name}.{key}")
    elif isinstance(content, torch.Tensor) and content.is_floating_point() and not content.isfinite().all():
        raise FloatingPointError(f"{name} was not finite")


def check_buffer(state, data, max_length):
    """Raises a ValueError if the state of a replay buffer with such `data` cannot be right."""
    lengths, size = state["lengths"], len(next(iter(data.values()))[0])
    filled = int((lengths > 0).sum())
    if (
        lengths.shape != (size,)
        or lengths.dtype != torch.int64
        or not 0 <= checkpoints.number(state, "cursor", int) < size
    ):
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


def write_json(content, path):
    """Whether it was written."""
    try:
        files.write_text(path, json.dumps(content, indent=1))
        return True
    except OSError as error:
        files.warn(f"{files.reason(error)}: {path} was not written")
        return False

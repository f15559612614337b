"""Runs scripts over environments, seeds and settings, and summarises them: a table with intervals, and curves.

Runs share a GPU or take a core each, here or on a Ray cluster. One that crashes is tried once more. Finished runs are
skipped and interrupted ones continue: run folders hold all the state, so they can move to another machine. Runs end
with the sweep, and nobody starts a run that is at work.

    python sweep.py --script iql.py qmix.py --env-ids 3m 8m --seeds 5 -- --total-timesteps 2000000
                                                                                     docs/benchmarks.md has the details
"""

import contextlib
import getpass
import glob
import hashlib
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent
TRIES = 2  # of a run that crashes
LOSSES = 5  # times that a run may lose its node
LOST = "lost"  # what becomes of a run whose node is gone, in place of an exit code
REJECTED = 2  # the exit code of a script that does not accept its arguments, or whose run is at work already
LARGEST = 64 * 2**20  # bytes of a file that comes back from a node
FREE = ("track", "capture-video", "checkpoint-interval", "log-interval")  # what may change when a run goes on


@dataclass
class Args:
    script: tuple[str, ...]  # training scripts
    env_ids: tuple[str, ...]  # environments: see envs.list_ids()
    seeds: int = 5  # seeds: 1, 2, ...
    # an option of the script and its values, such as: learning-rate 1e-3 5e-4 (again for another option)
    vary: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    cuda: bool = False  # whether the runs use the GPU
    jobs: int | None = None  # runs at a time (default: one to a core, or --runs-per-gpu to a GPU)
    runs_per_gpu: int = 6  # runs that share a GPU
    mps: bool = True  # whether runs share a GPU through NVIDIA's Multi-Process Service, where it is installed
    run_root: str = "runs"  # the folder of the run folders
    report: str = "sweep"  # the name of the table and the curves, in that folder
    ray_address: str | None = None  # a Ray cluster to run on, such as auto


# ---- jobs ----
@dataclass(eq=False)
class Job:
    """A script with its arguments; a Job among them stands for its run folder, which has to be there first."""

    script: Path
    env_id: str
    seed: int
    arguments: tuple = ()
    label: str = ""

    @cached_property
    def needs(self):
        return [word.job if isinstance(word, Output) else word for word in self.arguments if not isinstance(word, str)]

    @cached_property
    def name(self):
        """How its run folders begin: other arguments make another name."""
        return f"{self.env_id.replace('/', '-')}__{self.exp_name}__{self.seed}"

    @cached_property
    def exp_name(self):
        words = [self.script.stem, *(word if isinstance(word, str) else word.name for word in self.arguments)]
        digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:6]
        return re.sub(r"[\\/]|\.\.", "-", f"{(self.label or words[0])[:100]}-{digest}".replace(" ", "_"))

    def runs(self, root):
        return sorted(Path(root).glob(f"{glob.escape(self.name)}__*"))

    def done(self, root):
        """The run folder with its results, if there is one."""
        return next((run for run in self.runs(root) if is_done(run)), None)

    def begun(self, root):
        """The run folder to go on with, if there is one."""
        return next((run for run in reversed(self.runs(root)) if (run / "checkpoint.pt").exists()), None)

    def words(self, root, run_root):
        """The arguments as text, with the folders of the runs that they stand for."""
        found = [word if isinstance(word, str) else word.done(root).relative_to(root) for word in self.arguments]
        return [word if isinstance(word, str) else os.fspath(Path(run_root) / word) for word in found]

    def options(self, words, run_root, resume=None):
        """The script's options, to begin or to go on."""
        if resume:
            return ["--resume", os.fspath(Path(run_root) / resume.name), *options_of(words, FREE)]
        own = ("--env-id", self.env_id, "--seed", str(self.seed), "--exp-name", self.exp_name, "--run-root", run_root)
        return [*own, *words]


@dataclass(eq=False)
class Output:
    """A file that a job makes."""

    job: Job
    file: str

    @property
    def name(self):
        return f"{self.job.name}/{self.file}"

    def done(self, root):
        return self.job.done(root) / self.file


def options_of(words, names):
    """Those options, with their values, that have one of these names."""
    kept, keeps = [], False
    for word in words:
        if word.startswith("--"):
            keeps = word[2:].partition("=")[0].removeprefix("no-") in names
        kept += [word] * keeps
    return kept


def refuse(message):
    """Ends the program as for invalid arguments."""
    error = SystemExit(message)
    error.code = REJECTED
    print(message, file=sys.stderr)
    raise error


def check_args(args, extra):
    """Rejects invalid arguments, and says what is allowed."""
    for script in args.script:
        find_script(script)
    if leads_outside(args.report) or Path(args.report).name != args.report:
        refuse(f"--report {args.report} is a name, not a path: the report is in --run-root")
    check_counts(args, ("seeds", "jobs", "runs_per_gpu"))
    own = {"env-id": "--env-ids", "seed": "--seeds", "cuda": "--cuda before --", "run-root": "--run-root before --"}
    own |= {"exp-name": "--report", "resume": "the same command again", "time-limit": "Ctrl-C"}
    for name, instead in own.items():
        if options_of(extra, (name,)) or any(setting[:1] == (name,) for setting in args.vary):
            refuse(f"--{name} is the sweep's to set: use {instead}")
    for setting in args.vary:
        if len(setting) < 2:
            refuse(f"--vary takes an option and its values, such as learning-rate 1e-3 5e-4, not {setting}")


def check_counts(args, names):
    for name in names:
        if isinstance(getattr(args, name), int) and getattr(args, name) < 1:
            refuse(f"--{name.replace('_', '-')} is from 1 up, not {getattr(args, name)}")


def find_script(name):
    """Where it is from here, or beside this file."""
    path = next((path for path in (Path(name), ROOT / name) if path.is_file()), None)
    if path is None:
        refuse(f"--script {name}: there is no such file, here or in {ROOT}")
    return path.resolve()


def jobs_of(args, extra):
    given = tuple(["--cuda"] * args.cuda + extra)
    names, values = [setting[0] for setting in args.vary], [setting[1:] for setting in args.vary]
    for script, env_id, setting in itertools.product(args.script, args.env_ids, itertools.product(*values)):
        varied = tuple(word for name, value in zip(names, setting) for word in (f"--{name}", value))
        label = " ".join([Path(script).stem, *(f"{name}={value}" for name, value in zip(names, setting))])
        for seed in range(1, args.seeds + 1):
            yield Job(find_script(script), env_id, seed, given + varied, label)


# ---- where jobs run ----
class Process:
    """A running script; its output goes to a file. When whoever holds it is gone, its input ends, and it stops."""

    def __init__(self, script, options, folder, log, settings, lock=None):
        self.log = Path(log)
        settings = {**os.environ, **settings, "PYTHONUNBUFFERED": "1", "OMG_STOP_ON_EOF": "1"}
        held = lock.file if lock else None
        inherited = (held.fileno(),) if held and os.name != "nt" else ()
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, script, *options], cwd=folder, env=settings, pass_fds=inherited,
                stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        if held:
            held.truncate(0)
            held.write(f"process {self.process.pid}, started by process {os.getpid()}\n")
            held.flush()
        self.asked = 0

    def poll(self):
        """The exit code, or None while it runs."""
        code = self.process.poll()
        if code is not None:
            self.process.stdin.close()
        return code

    def stop(self):
        """Asks it to save and leave; whoever asks twice does not want to wait."""
        self.asked += 1
        if self.asked > 1:
            self.process.kill()
        elif os.name == "nt":
            self.process.stdin.close()  # a signal would end it at once
        else:
            self.process.send_signal(signal.SIGTERM)

    def line(self):
        """The last line of its output."""
        with open(self.log, "rb") as log:
            log.seek(max(self.log.stat().st_size - 2000, 0))
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "starts")


class Here:
    """This machine: a core for each run, or several runs to a GPU."""

    def __init__(self, args, folder):
        self.folder, self.running = folder, []
        self.gpus = gpus() if args.cuda else []
        if args.cuda and not self.gpus:
            print("There is no GPU that torch can use: the runs go on with the CPU.")
        self.slots = args.jobs or (args.runs_per_gpu * len(self.gpus) if self.gpus else cores())
        # the threads of torch and of the environments wait busily: on shared cores that costs more than it gives
        self.settings = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"} if self.slots > 1 else {}
        self.services = contextlib.ExitStack()
        if args.mps and self.slots > len(self.gpus) > 0:
            self.settings |= self.services.enter_context(multi_process_service())

    def room(self):
        return self.slots

    def start(self, job, root, run_root, resume, log, lock=None):
        settings = dict(self.settings)
        self.running = [(process, gpu) for process, gpu in self.running if process.poll() is None]
        if self.gpus:
            busy = Counter(gpu for _, gpu in self.running)
            settings["CUDA_VISIBLE_DEVICES"] = min(self.gpus, key=lambda gpu: busy[gpu])
        options = job.options(job.words(root, run_root), run_root, resume)
        process = Process(job.script, options, self.folder, log, settings, lock)
        self.running.append((process, settings.get("CUDA_VISIBLE_DEVICES")))
        return process

    def close(self):
        self.services.close()


class OnRay:
    """A Ray cluster. Nothing but files in messages goes to a node and comes back, so there need be no shared disk."""

    def __init__(self, args, folder):
        try:
            import ray
        except ImportError:
            raise SystemExit('--ray-address needs Ray: pip install -e ".[ray]"') from None
        self.ray, self.args, self.folder = ray, args, Path(folder)
        try:
            ray.init(address=args.ray_address, logging_level="warning", log_to_driver=False)
        except Exception as error:  # Ray has many
            refuse(f"--ray-address {args.ray_address}: {(str(error) or repr(error)).strip().splitlines()[0][:200]}")
        if __name__ != "__main__":
            ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # nodes do not have this file
        demand = {"num_cpus": 0, "num_gpus": 1 / args.runs_per_gpu} if args.cuda else {"num_cpus": 1}
        self.runner = ray.remote(**demand, scheduling_strategy="SPREAD")(Runner)
        self.code = {
            path.relative_to(ROOT).as_posix(): path.read_bytes()
            for pattern in ("*.py", "envs/*.py", "envs/*.html")
            for path in sorted(ROOT.glob(pattern))
        }

    def room(self):
        there = self.ray.cluster_resources()
        fits = there.get("GPU", 0) * self.args.runs_per_gpu if self.args.cuda else there.get("CPU", 0)
        return self.args.jobs or max(int(fits), 1)

    def start(self, job, root, run_root, resume, log, lock=None):
        words, files = job.words(root, run_root), {}
        for word in words:
            files |= self.files_at(word)
        for path in (resume / "checkpoint.pt", *resume.glob("resume-*.pt")) if resume else ():
            files[f"{resume.name}/{path.name}"] = path.read_bytes()
        code = {**self.code, job.script.name: job.script.read_bytes()}
        runner = self.runner.remote(code, files, job.script.name, job.options(words, ".", resume))
        return RemoteProcess(self.ray, runner, root, log)

    def files_at(self, word):
        """What an argument names: a file, or the policies of runs."""
        found = {}
        for path in map(Path, glob.glob(os.fspath(self.folder / word))):
            for file in (path, path / "checkpoint.pt", path / "results.json"):
                if file.is_file():
                    name = Path(os.path.relpath(file, self.folder)).as_posix()
                    if os.path.isabs(word) or name.startswith(".."):
                        refuse(f"{word}: on a cluster, paths are relative to the current folder and in it")
                    found[name] = file.read_bytes()
        return found

    def close(self):
        self.ray.shutdown()


class RemoteProcess:
    """A script at work on some node, as seen from here: its files come here while it runs."""

    def __init__(self, ray, runner, root, log):
        self.ray, self.runner, self.root, self.log, self.asked = ray, runner, root, log, 0
        self.pending, self.last_line = runner.report.remote(), "waits for a node"

    def poll(self):
        if not self.ray.wait([self.pending], timeout=0)[0]:
            return None
        try:
            code, self.last_line, files = self.ray.get(self.pending)
            if "log" in files:
                write_file(self.log, files.pop("log"))
            put_files(files, self.root)
        except (self.ray.exceptions.RayError, OSError, ValueError) as error:
            self.last_line = str(error).strip().split("\n")[-1]
            self.ray.kill(self.runner)
            return LOST
        if code is None:
            self.pending = self.runner.report.remote()
        else:
            self.ray.kill(self.runner)
        return code

    def stop(self):
        self.asked += 1
        if self.asked > 1:
            self.ray.kill(self.runner)
        else:
            self.runner.stop.remote()

    def line(self):
        return self.last_line


class Runner:
    """A script at work on this node of a cluster, in a folder of its own."""

    def __init__(self, code, files, script, options):
        self.home, self.kept = code_folder(code)
        self.folder = Path(tempfile.mkdtemp(prefix="omg-marl-run-"))
        put_files(files, self.folder)
        self.sent = self.versions()
        threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        self.process = Process(self.home / script, options, self.folder, self.folder / "log", threads)

    def versions(self, pattern="*"):
        found = {}
        for path in self.folder.rglob(pattern):
            with contextlib.suppress(FileNotFoundError):  # the script puts files in place of others
                if path.is_file() and path.suffix != ".part" and path.name != ".lock":
                    facts = path.stat()
                    found[path] = facts.st_mtime_ns, facts.st_size, facts.st_ino
        return found

    def report(self):
        """After a moment: (exit code or None, last line, files that are new or have changed, None for those gone)"""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.process.wait(1)
        code, line = self.process.poll(), self.process.line()
        files = self.changes()
        while files is None:
            files = self.changes()
        if code is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            if not self.kept:
                shutil.rmtree(self.home, ignore_errors=True)
        return code, line, files

    def changes(self):
        """{name: content, or None if it is gone} since the last call; None where a save came between."""
        checkpoints, found = self.versions("checkpoint.pt"), self.versions()
        changed = [path for path, version in found.items() if self.sent.get(path) != version and version[1] <= LARGEST]
        opened = {}
        with contextlib.ExitStack() as stack:
            for path in changed:
                with contextlib.suppress(FileNotFoundError):
                    opened[path] = stack.enter_context(open(path, "rb"))
            if self.versions("checkpoint.pt") != checkpoints:
                return None
            files = {path: file.read() for path, file in opened.items()}  # of one save, whatever comes now
        files |= dict.fromkeys(self.sent.keys() - found.keys())
        self.sent = found
        return {path.relative_to(self.folder).as_posix(): content for path, content in files.items()}

    def stop(self):
        self.process.stop()


def code_folder(code):
    """(a folder that is this user's alone and has exactly this code, whether it stays for the next run)"""
    user = re.sub(r"\W", "_", getpass.getuser()) if os.name == "nt" else os.getuid()
    parent = Path(tempfile.gettempdir()) / f"omg-marl-{user}"
    with contextlib.suppress(OSError):
        parent.mkdir(mode=0o700)
    private = is_private(parent)
    home = parent / hashlib.sha256(repr(sorted(code.items())).encode()).hexdigest()[:16]
    if private and has_exactly(home, code):
        return home, True
    fresh = Path(tempfile.mkdtemp(prefix="omg-marl-code-", dir=parent if private else None))
    put_files(code, fresh)
    if private and not os.path.lexists(home):
        with contextlib.suppress(OSError):  # another run was quicker
            os.rename(fresh, home)
            return home, True
    return fresh, False


def is_private(folder):
    """Whether it is a folder, not a link to one, that belongs to this user and is closed to all others."""
    try:
        facts = os.lstat(folder)
    except OSError:
        return False
    mine = os.name == "nt" or (facts.st_uid == os.getuid() and not facts.st_mode & 0o077)
    return stat.S_ISDIR(facts.st_mode) and mine


def has_exactly(folder, code):
    """Whether a folder has these files and, beside Python's and Numba's caches, no others; no links anywhere."""
    found, folders = {}, {folder, *((folder / name).parent for name in code)}
    try:
        for path in (folder, *folder.rglob("*")):
            facts = os.lstat(path)
            if facts.st_uid != os.lstat(folder.parent).st_uid:
                return False
            if stat.S_ISDIR(facts.st_mode) and (path in folders or path.name == "__pycache__"):
                continue
            if not stat.S_ISREG(facts.st_mode):
                return False
            if path.parent.name != "__pycache__" or path.suffix not in (".pyc", ".nbi", ".nbc"):
                found[path.relative_to(folder).as_posix()] = path.read_bytes()
    except OSError:
        return False
    return found == code


# ---- files ----
def write_file(path, content):
    """Writes bytes or text aside and moves them into place: what is there is complete, or as it was before."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def put_files(files, folder):
    """{name: content, or None to remove it}. A checkpoint comes after what belongs to it, and results at the end."""
    order = ("checkpoint.pt", "results.json")
    for name in files:
        if leads_outside(name):
            raise ValueError(f"{name} is not in the folder")
    written = {name: content for name, content in files.items() if content is not None}
    for name in sorted(written, key=lambda name: order.index(Path(name).name) if Path(name).name in order else -1):
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, written[name])
    for name in files.keys() - written.keys():
        (Path(folder) / name).unlink(missing_ok=True)


def leads_outside(name):
    """Whether a name of a file in a folder is none, here or on another system."""
    return not name or bool(re.search(r"^[/\\]|:|(^|[/\\])\.\.([/\\]|$)", name))


def lock_job(job, root):
    """A lock that is held until this process releases it and the run that inherits it ends.

    A ValueError says who has it: another sweep, or a run that one has left behind.
    """
    from envs.files import FolderLock, is_locked  # slow to import

    for run in job.runs(root):
        owner = is_locked(run)
        if owner:
            raise ValueError(f"{run} is in use by {owner}")
    folder = root / "logs" / f"{job.name}.lock"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder)
    lock.acquire()
    return lock


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def gpus():
    """The GPUs to share, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


@contextlib.contextmanager
def multi_process_service():
    """NVIDIA's Multi-Process Service, without which the runs on a GPU take turns; yields the settings to find it by."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps", ignore_cleanup_errors=True) as folder:
        settings = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        # no pipes: a daemon that keeps its output open would keep this waiting
        quiet = {"env": {**os.environ, **settings}, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        test = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"]
        works = all(subprocess.call(words, stdin=subprocess.DEVNULL, **quiet) == 0 for words in ([control, "-d"], test))
        if works:
            print("Runs share the GPU through NVIDIA's Multi-Process Service (--no-mps turns it off).")
        else:
            print("NVIDIA's Multi-Process Service does not start here: the runs on a GPU take turns.")
        try:
            yield settings if works else {}
        finally:
            subprocess.run([control], input=b"quit\n", check=False, **quiet)


# ---- running them ----
class Terminal:
    """Events, line by line; and where somebody watches, below them a line for every run at work."""

    def __init__(self):
        self.live, self.drawn, self.shown = sys.stdout.isatty(), 0, 0.0
        if self.live:
            os.system("")  # Windows' terminals understand the codes below only after this

    def tell(self, text):
        self.erase()
        print(text, flush=True)

    def show(self, lines):
        if self.live and time.time() - self.shown > 0.5:
            self.erase()
            (width, height), lines = shutil.get_terminal_size(), list(lines())
            lines = lines if len(lines) < height else [*lines[: height - 3], "...", lines[-1]]
            print("\n".join(line[: width - 1] for line in lines), flush=True)
            self.drawn, self.shown = len(lines), time.time()

    def erase(self):
        if self.drawn:
            print(f"\x1b[{self.drawn}A\x1b[J", end="")
        self.drawn = 0


@contextlib.contextmanager
def stop_signals():
    """A list that Ctrl-C and SIGTERM are noted in, so that the runs can save before this ends."""
    noted = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: noted.append(number)) for number in numbers]
    try:
        yield noted
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def run_all(jobs, place, root, run_root="."):
    """Runs all that is not done, as far as there is room; whether everything is done in the end."""
    root, terminal, began = Path(root), Terminal(), time.time()
    (root / "logs").mkdir(parents=True, exist_ok=True)
    done, running = {job for job in jobs if job.done(root)}, {}
    waiting = [job for job in jobs if job not in done]
    crashes, losses, given_up, why = Counter(), Counter(), {}, {}
    for job in waiting:
        try:
            lock_job(job, root).release()
        except ValueError as error:
            refuse(str(error))
    if done:
        terminal.tell(f"{len(done)} of {len(jobs)} runs are done already")

    def start(job):
        waiting.remove(job)
        try:
            lock = lock_job(job, root)
        except ValueError as error:  # another sweep was quicker
            why[job] = str(error)
            return terminal.tell(why[job])
        if job.done(root):  # by another sweep
            lock.release()
            return done.add(job)
        for run in job.runs(root):
            set_aside(run, terminal)
        resume, log = job.begun(root), root / "logs" / f"{job.name}.log"
        resume = None if resume and given_up.get(job) == age(resume) else resume
        before = resume and age(resume)
        process = place.start(job, root, run_root, resume, log, lock)
        running[job] = process, lock, resume, before
        terminal.tell(f"{job.name} {'goes on' if resume else 'starts'}")

    def end(job, code):
        process, lock, resume, before = running.pop(job)
        lock.release()
        if job.done(root):
            done.add(job)
            terminal.tell(f"{job.name} is done: {process.line()}")
        elif stops:
            terminal.tell(f"{job.name} stopped")
        elif code == LOST:
            losses[job] += 1
            terminal.tell(f"{job.name} lost its node{'' if losses[job] < LOSSES else ' too often'}: {process.line()}")
        else:
            rejected = code == REJECTED
            crashes[job] += 1 if resume or not rejected else TRIES  # new runs would be rejected again
            terminal.tell(f"{job.name} {'was rejected' if rejected else 'crashed'}: {process.line()}")
            if resume and age(resume) == before:
                given_up[job] = before  # it came no further from there: the next try starts anew
        if job not in done and crashes[job] < TRIES and losses[job] < LOSSES:
            waiting.insert(0, job)

    def lines():
        yield from (f"{job.name}  {process.line()}" for job, (process, *_) in running.items())
        yield f"{len(done)} of {len(jobs)} done, {len(running)} at work, {time.time() - began:.0f} s"

    with stop_signals() as stops:
        try:
            while waiting or running:
                ready = [job for job in waiting if done.issuperset(job.needs)] if not stops else []
                for job in ready[: max(place.room() - len(running), 0)]:
                    start(job)
                if not running and not ready:
                    break  # what still waits needs a run that failed
                for job, (process, *_) in list(running.items()):
                    for _ in range(process.asked, min(len(stops), 2)):
                        process.stop()
                    code = process.poll()
                    if code is not None:
                        end(job, code)
                terminal.show(lines)
                time.sleep(0.1)
        finally:
            for process, *_ in running.values():
                process.stop()
    terminal.erase()
    missing = [job for job in jobs if job not in done]
    if stops and missing:
        print(f"stopped with {len(missing)} of {len(jobs)} runs to do: the same command goes on", file=sys.stderr)
        raise SystemExit(128 + stops[0])
    for job in missing:
        failed = crashes[job] or losses[job]
        log = f"{job.name} failed: see {root / 'logs' / job.name}.log"
        print(log if failed else why.get(job, f"{job.name} waits for these"))
    return not missing


def age(run):
    return (run / "checkpoint.pt").stat().st_mtime_ns


def set_aside(run, terminal):
    """Results that cannot be used, in a run that is not done."""
    path = run / "results.json"
    try:
        load_results(path)
    except FileNotFoundError:
        pass
    except ValueError as error:
        terminal.tell(f"{error}: that run is done again")
        os.replace(path, f"{path}.invalid")


# ---- results ----
def iqm(values, axis=-1):
    """The interquartile mean: the mean without the lowest and the highest quarter."""
    values = np.sort(values, axis)
    cut = values.shape[axis] // 4
    return np.take(values, range(cut, values.shape[axis] - cut), axis).mean(axis)


def bootstrap(strata, statistic, samples=5000, seed=0):
    """The 95% interval of a statistic of all values, drawn anew within each stratum (an environment's seeds, say)."""
    rng = np.random.default_rng(seed)
    drawn = [rng.choice(np.asarray(values), (samples, len(values))) for values in strata]
    return np.quantile(statistic(np.concatenate(drawn, 1), -1), (0.025, 0.975)).tolist()


def summary(strata):
    together = np.concatenate([np.asarray(values) for values in strata])
    return {
        "mean": float(together.mean()), "mean_interval": bootstrap(strata, np.mean),
        "iqm": float(iqm(together)), "iqm_interval": bootstrap(strata, iqm),
    }  # fmt: skip


MEASURES = {
    "win_rate": lambda run: run["final"]["win_rate"],
    "best_win_rate": lambda run: run["best"]["win_rate"],
    "episodic_return": lambda run: run["final"]["episodic_return"],
    "best_episodic_return": lambda run: run["best"]["episodic_return"],
    "seconds": lambda run: run["seconds"],
}


def load_results(path):
    """The content of a results.json; a ValueError names one that is cut, or lacks what is read here and in paper.py."""
    try:
        results = json.loads(path.read_bytes())
        numbers = [results["seconds"]]
        if "final" in results:
            numbers += [measure(results) for measure in MEASURES.values()]
            numbers += [e[name] for e in results["evals"] for name in ("steps", "win_rate", "episodic_return")]
        for row in results.get("rows", ()):
            numbers += [row["episodes"], *(row[name] for name in ("win_rate", "return") if row["episodes"])]
            numbers += [len(row[name]) for name in ("ego", "group", "other")]
        if not all(map(math.isfinite, numbers)) or not isinstance(results["args"], dict):
            raise ValueError("no numbers")
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path} is cut or not of a run ({type(error).__name__}: {error})") from None
    return results


def is_done(run):
    try:
        return bool(load_results(run / "results.json"))
    except (OSError, ValueError):
        return False


def rows_of(groups):
    """{(label, environment): results of its runs} -> a row for each, and one for a label's environments together."""
    rows = []
    for label in dict.fromkeys(label for label, _ in groups):
        mine = {env_id: runs for (name, env_id), runs in groups.items() if name == label}
        parts = [(env_id, [runs]) for env_id, runs in mine.items()]
        if len(mine) > 1:
            parts.append(("all", list(mine.values())))
        for env_id, strata in parts:
            row = {"script": label, "env_id": env_id, "runs": sum(map(len, strata))}
            for name, measure in MEASURES.items():
                row[name] = summary([[measure(run) for run in runs] for runs in strata])
            rows.append(row)
    return rows


def markdown(head, rows):
    """A table that can also be read as it is."""
    widths = [max(len(row[c]) for row in (head, *rows)) for c in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths)] for row in (head, *rows)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(rows):
    def cells(row):
        yield from (row["script"], row["env_id"], str(row["runs"]))
        for name, form in (("win_rate", "{:.1%}"), ("episodic_return", "{:.2f}")):
            interval = f" ({form} to {form})".format(*row[name]["iqm_interval"]) if row["runs"] > 1 else ""
            yield form.format(row[name]["mean"])
            yield form.format(row[name]["iqm"]) + interval
            yield form.format(row[f"best_{name}"]["mean"])
        yield f"{row['seconds']['mean']:.0f}"

    win, earn = (("won, mean", "won, IQM (95%)", "best, mean"), ("return, mean", "return, IQM (95%)", "best, mean"))
    return markdown(["script", "environment", "runs", *win, *earn, "seconds"], [list(cells(row)) for row in rows])


def curves(groups, path):
    """For every environment the evaluations against steps: each group's mean over seeds, and its 95% interval."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    env_ids, labels = ([*dict.fromkeys(key[part] for key in groups)] for part in (1, 0))
    figure = Figure(figsize=(4.2 * len(env_ids), 3.4), layout="constrained")
    for axes, env_id in zip(figure.subplots(1, len(env_ids), squeeze=False)[0], env_ids):
        won = any(e["win_rate"] > 0 for (_, env), runs in groups.items() if env == env_id for e in evals_of(runs))
        metric = "win_rate" if won and is_won_together(env_id) else "episodic_return"
        for number, label in enumerate(labels):
            seeds = [run["evals"] for run in groups.get((label, env_id), ()) if run["evals"]]
            if not seeds:
                continue
            steps = np.linspace(max(e[0]["steps"] for e in seeds), min(e[-1]["steps"] for e in seeds), 100)
            values = [np.interp(steps, [e["steps"] for e in run], [e[metric] for e in run]) for run in seeds]
            band = np.transpose([bootstrap([column], np.mean, 500) for column in np.transpose(values)])
            axes.plot(steps, np.mean(values, 0), color=f"C{number}", label=label)
            axes.fill_between(steps, *band, color=f"C{number}", alpha=0.2, linewidth=0)
        axes.set(title=env_id, xlabel="steps", ylabel=f"eval/{metric}", xlim=(0, None))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False)
    save_figure(figure, path)


def save_figure(figure, path):
    content = io.BytesIO()
    figure.savefig(content, dpi=120)
    write_file(path, content.getvalue())


def is_won_together(env_id):
    """Whether winning says how well an agent did: not where each has a reward of its own."""
    import envs

    try:
        return envs.make(env_id.removeprefix("sc2/")).team_reward
    except ValueError:  # an environment of the script's own
        return True


def evals_of(runs):
    return [evaluation for run in runs for evaluation in run["evals"]]


def read_results(job, root):
    return load_results(job.done(root) / "results.json")


if __name__ == "__main__":
    words, extra = sys.argv[1:], []
    if "--" in words:
        words, extra = words[: words.index("--")], words[words.index("--") + 1 :]
    args = tyro.cli(Args, args=words)
    check_args(args, extra)
    root, jobs = Path(args.run_root), list({job.name: job for job in jobs_of(args, extra)}.values())
    with contextlib.closing(OnRay(args, ".") if args.ray_address else Here(args, ".")) as place:
        complete = run_all(jobs, place, root, args.run_root)
    groups = {}
    for job in jobs:
        results = read_results(job, root) if job.done(root) else {}
        if "final" in results:
            groups.setdefault((job.label, job.env_id), []).append(results)
    if groups:
        rows = rows_of(groups)
        write_file(root / f"{args.report}.json", json.dumps(rows, indent=1))
        write_file(root / f"{args.report}.md", table(rows) + "\n")
        curves(groups, root / f"{args.report}.png")
        print(f"{table(rows)}\n{root / args.report}.md, .json and .png have this and the curves")
    raise SystemExit(not complete)

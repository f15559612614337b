"""Jobs: scripts with their arguments, run here or on a Ray cluster until all of them are done.

A job that crashes is tried once more. Finished runs are skipped and interrupted ones continue: run folders hold all the
state, so they can move to another machine. Jobs end with the program that started them.
"""

import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from experiments.cluster import LOST, PROJECT, OnRay, ScriptProcess
from experiments.results import is_done, load_results
from training import files
from training.exits import NO_MEMORY, Exit, UsageError, not_ignored
from training.run import writable_folder

EVALUATE = Path(__file__).with_name("evaluate.py")
TRIES = 2  # of a run that crashes
LOSSES = 5  # times that a run may lose its node
REJECTED = 2  # the exit code of a script that does not accept its arguments, or whose run is at work already
FREE = (  # what may change when a run goes on
    "track", "wandb-project-name", "wandb-entity", "wandb-group", "capture-video", "checkpoint-interval",
    "log-interval",
)  # fmt: skip


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
        return f"{files.as_name(self.env_id)}__{self.exp_name}__{self.seed}"

    @cached_property
    def exp_name(self):
        words = [self.script.stem, *(word if isinstance(word, str) else word.name for word in self.arguments)]
        if files.as_name(self.env_id) != self.env_id.replace("/", "-"):  # as a name it may be that of another id
            words.append(self.env_id)
        digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:6]
        return re.sub(r'[\\/:*?"<>|\[\]]|\.\.', "-", f"{(self.label or words[0])[:100]}-{digest}".replace(" ", "_"))

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
            resumed = ("--resume", os.fspath(Path(run_root) / resume.name), "--env-id", self.env_id)
            return [*resumed, *options_of(words, FREE)]
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


class Evaluation(Job):
    """A job of experiments/evaluate.py, whose folder has no time in its name; what was interrupted begins again."""

    def runs(self, root):
        return [Path(root) / self.name]

    def done(self, root):
        """The same, if it played with the runs that are there now: one that was made again has another folder."""
        folder, found = super().done(root), [job.done(root) for job in self.needs]
        if folder is None or None in found:
            return None
        args = load_results(folder / "results.json")["args"]
        played = {Path(name).name for name in (*args["ego"], *args["others"])}
        return folder if played.issuperset(run.name for run in found) else None

    def options(self, words, run_root, resume=None):
        return [*words, "--out", (Path(run_root) / self.name).as_posix()]


def options_of(words, names):
    """Those options, with their values, that have one of these names."""
    kept, keeps = [], False
    for word in words:
        if word.startswith("--"):
            keeps = word[2:].partition("=")[0].replace("_", "-").removeprefix("no-") in names
        kept += [word] * keeps
    return kept


def check_counts(args, names):
    for name in names:
        if isinstance(getattr(args, name), int) and getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is from 1 up, not {getattr(args, name)}")


# ---- where jobs run ----
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
        process = ScriptProcess(job.script, options, self.folder, log, settings, PROJECT, lock)
        self.running.append((process, settings.get("CUDA_VISIBLE_DEVICES")))
        return process

    def close(self):
        self.services.close()


def lock_job(job, root):
    """A lock that is held until this process releases it and the run that inherits it ends.

    A ValueError says who has it: another sweep, or a run that one has left behind.
    """
    for run in job.runs(root):
        owner = files.is_locked(run)
        if owner:
            raise ValueError(f"{run} is in use by {owner}")
    folder = root / "logs" / f"{job.name}.lock"
    folder.mkdir(parents=True, exist_ok=True)
    lock = files.FolderLock(folder)
    lock.acquire()
    return lock


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def gpus():
    """The GPUs to share, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def place_of(args, folder):
    """Where the jobs run."""
    try:
        return OnRay(args, folder) if args.ray_address else Here(args, folder)
    except ValueError as error:
        raise UsageError(error) from None


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
        try:
            start = ([control, "-d"], test)
            works = all(subprocess.call(words, stdin=subprocess.DEVNULL, **quiet) == 0 for words in start)
            if works:
                print("Runs share the GPU through NVIDIA's Multi-Process Service (--no-mps turns it off).")
            else:
                print("NVIDIA's Multi-Process Service does not start here: the runs on a GPU take turns.")
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
        if self.live and time.monotonic() - self.shown > 0.5:
            self.erase()
            (width, height), lines = shutil.get_terminal_size(), list(lines())
            lines = lines if len(lines) < height else [*lines[: height - 3], "...", lines[-1]]
            print("\n".join(line[: width - 1] for line in lines), flush=True)
            self.drawn, self.shown = len(lines), time.monotonic()

    def erase(self):
        if self.drawn:
            print(f"\x1b[{self.drawn}A\x1b[J", end="")
        self.drawn = 0


@contextlib.contextmanager
def stop_signals():
    """A list that signals to end are noted in, so that the runs can save before this ends."""
    noted = []
    numbers = not_ignored()
    before = [signal.signal(number, lambda number, frame: noted.append(number)) for number in numbers]
    try:
        yield noted
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def run_all(jobs, place, root, run_root=".", more=None):
    """Runs all that is not done, as far as there is room; whether everything is done in the end.

    Where there is room for more, `more(jobs that are not through)` is asked for it, and `jobs` grows.
    """
    root, terminal, began = Path(root), Terminal(), time.monotonic()
    writable_folder(root / "logs")
    if link := files.first_link(root / "logs", itself=True):
        raise UsageError(f"{link} is a link: what would be written to it may be somebody else's")
    done, running = {job for job in jobs if job.done(root)}, {}
    waiting = [job for job in jobs if job not in done]
    crashes, losses, given_up, why = Counter(), Counter(), {}, {}
    crowded = set()  # jobs that wait for what those at work have: memory, open files
    for job in waiting:
        try:
            lock_job(job, root).release()
        except ValueError as error:
            raise UsageError(error) from None
    if done:
        terminal.tell(f"{len(done)} of {len(jobs)} runs are done already")

    def refill():
        while more and not stops and len(waiting) + len(running) < place.room():
            new = more([*waiting, *running])
            if not new:
                break
            jobs.extend(new)
            done.update(job for job in new if job.done(root))
            waiting.extend(job for job in new if job not in done)

    def postpone(job, error):
        """For lack of open files or processes: it starts when another job has ended."""
        reason = error.strerror or error
        if not running:
            raise Exit(f"{job.name} cannot be started ({reason})", 1)
        crowded.add(job)
        waiting.insert(0, job)
        terminal.tell(f"{job.name} waits ({reason})")

    def start(job):
        waiting.remove(job)
        try:
            lock = lock_job(job, root)
        except ValueError as error:  # another sweep was quicker
            why[job] = str(error)
            return terminal.tell(why[job])
        except OSError as error:
            return postpone(job, error)
        if job.done(root):  # by another sweep
            lock.release()
            return done.add(job)
        for run in job.runs(root):
            invalidate(run, terminal)
        resume, log = job.begun(root), root / "logs" / f"{job.name}.log"
        resume = None if resume and given_up.get(job) == age(resume) else resume
        before = resume and age(resume)
        try:
            process = place.start(job, root, run_root, resume, log, lock)
        except ValueError as error:
            raise UsageError(error) from None
        except OSError as error:
            lock.release()
            return postpone(job, error)
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
        elif code == NO_MEMORY and running:
            crowded.add(job)
            terminal.tell(f"{job.name} waits for memory: {process.line()}")
            return waiting.insert(0, job)
        else:
            rejected = code == REJECTED
            crashes[job] += 1 if resume or not rejected else TRIES  # new runs would be rejected again
            terminal.tell(f"{job.name} {'was rejected' if rejected else 'crashed'}: {process.line()}")
            if resume and age(resume) == before:
                given_up[job] = before  # it came no further from there: the next try starts anew
        if job not in done and crashes[job] < TRIES and losses[job] < LOSSES:
            waiting.insert(0, job)
        crowded.clear()  # there is more memory now

    def lines():
        yield from (f"{job.name}  {process.line()}" for job, (process, *_) in running.items())
        yield f"{len(done)} of {len(jobs)} done, {len(running)} at work, {time.monotonic() - began:.0f} s"

    with stop_signals() as stops:
        try:
            refill()
            while waiting or running:
                ready = [job for job in waiting if done.issuperset(job.needs) and not (running and job in crowded)]
                ready = [] if stops else ready
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
                refill()
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


def run_and_time(jobs, args, root):
    """Runs all that is not done; (whether everything is done, the seconds that this and earlier calls took)"""
    started, clock, before = time.monotonic(), root / "seconds.json", 0.0
    with contextlib.suppress(OSError, ValueError, TypeError):  # there is none, or it is cut
        before = float(json.loads(clock.read_text()))
    try:
        with contextlib.closing(place_of(args, root)) as place:
            complete = run_all(jobs, place, root)
    finally:
        seconds = before + time.monotonic() - started
        files.write_text(clock, json.dumps(seconds))
    return complete, seconds


def age(run):
    """Of its checkpoint; None if somebody deleted it."""
    with contextlib.suppress(OSError):
        return (run / "checkpoint.pt").stat().st_mtime_ns


def invalidate(run, terminal):
    """Results that cannot be used, in a run that is not done."""
    path = run / "results.json"
    try:
        load_results(path)
    except FileNotFoundError:
        pass
    except ValueError as error:
        terminal.tell(f"{error}: that run is done again")
        os.replace(path, f"{path}.invalid")


def read_results(job, root):
    return load_results(job.done(root) / "results.json")

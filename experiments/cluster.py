"""Scripts as processes, here or on the nodes of a Ray cluster, which get files in messages and send files back.

Nodes need not have this project: what runs there is pickled with everything that it uses of this file and
training/files.py.
"""

import contextlib
import getpass
import glob
import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from training.files import write_bytes

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = "envs", "training", "experiments"
LOST = "lost"  # what becomes of a script whose node is gone, in place of an exit code
LARGEST = 64 * 2**20  # bytes of a file that comes back from a node


# ---- a process ----
class ScriptProcess:
    """A running script; its output goes to a file. When whoever holds it is gone, its input ends, and it stops.

    `project` is the folder of the packages that it imports.
    """

    def __init__(self, script, options, folder, log, settings, project, lock=None):
        self.log = Path(log)
        path = os.pathsep.join(filter(None, (os.fspath(project), os.environ.get("PYTHONPATH"))))
        settings = {**os.environ, **settings, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMG_STOP_ON_EOF": "1"}
        held = lock.file if lock else None
        inherited = (held.fileno(),) if held and os.name != "nt" else ()
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, script, *options], cwd=folder, env=settings, pass_fds=inherited,
                stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        if held:
            with contextlib.suppress(OSError):  # it is locked even where nothing can be written
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
        lines = []
        with contextlib.suppress(OSError), open(self.log, "rb") as log:  # somebody may delete it
            log.seek(max(self.log.stat().st_size - 2000, 0))
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "starts")


# ---- a cluster ----
class OnRay:
    """A Ray cluster. Nothing but files in messages goes to a node and comes back, so there need be no shared disk."""

    def __init__(self, args, folder):
        try:
            import ray
        except ImportError:
            raise ValueError('--ray-address needs Ray: pip install -e ".[ray]"') from None
        self.ray, self.args, self.folder = ray, args, Path(folder)
        try:
            ray.init(address=args.ray_address, logging_level="warning", log_to_driver=False)
        except Exception as error:  # Ray has many
            cause = (str(error) or repr(error)).strip().splitlines()[0][:200]
            raise ValueError(f"--ray-address {args.ray_address}: {cause}") from None
        for name in (__name__, "training.files"):
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])  # nodes do not have them
        demand = {"num_cpus": 0, "num_gpus": 1 / args.runs_per_gpu} if args.cuda else {"num_cpus": 1}
        self.runner = ray.remote(**demand, scheduling_strategy="SPREAD")(NodeRunner)
        self.code = {
            path.relative_to(PROJECT).as_posix(): path.read_bytes()
            for pattern in ("*.py", *(f"{package}/**/*.{kind}" for package in PACKAGES for kind in ("py", "html")))
            for path in sorted(PROJECT.glob(pattern))
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
        script = job.script.name if job.script.parent != Path(__file__).parent else f"experiments/{job.script.name}"
        code = {**self.code, script: job.script.read_bytes()}
        runner = self.runner.remote(code, files, script, job.options(words, ".", resume))
        return RemoteProcess(self.ray, runner, root, log)

    def files_at(self, word):
        """What an argument names: a file, or the policies of runs."""
        found = {}
        for path in map(Path, glob.glob(os.fspath(self.folder / word))):
            for file in (path, path / "checkpoint.pt", path / "results.json"):
                if file.is_file():
                    name = Path(os.path.relpath(file, self.folder)).as_posix()
                    if os.path.isabs(word) or name.startswith(".."):
                        raise ValueError(f"{word}: on a cluster, paths are relative to the current folder and in it")
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
                write_bytes(self.log, files.pop("log"))
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


class NodeRunner:
    """A script at work on this node of a cluster, in a folder of its own."""

    def __init__(self, code, files, script, options):
        self.home, self.kept = code_folder(code)
        self.folder = Path(tempfile.mkdtemp(prefix="omg-marl-run-"))
        put_files(files, self.folder)
        self.sent = self.versions()
        threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        self.process = ScriptProcess(self.home / script, options, self.folder, self.folder / "log", threads, self.home)

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
def put_files(files, folder):
    """{name: content, or None to remove it}. A checkpoint comes after what belongs to it, and results at the end."""
    order = ("checkpoint.pt", "results.json")
    for name in files:
        if escapes_folder(name):
            raise ValueError(f"{name} is not in the folder")
    written = {name: content for name, content in files.items() if content is not None}
    for name in sorted(written, key=lambda name: order.index(Path(name).name) if Path(name).name in order else -1):
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, written[name])
    for name in files.keys() - written.keys():
        (Path(folder) / name).unlink(missing_ok=True)


def escapes_folder(name):
    """Whether a name of a file in a folder is none, here or on another system."""
    return not name or bool(re.search(r"^[/\\]|:|(^|[/\\])\.\.([/\\]|$)", name))

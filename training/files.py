"""Files and folders of runs: written completely or not at all, made only once, and locked while in use; and output.

Nothing here needs torch.
"""

import contextlib
import errno
import io
import os
import re
import socket
import stat
import sys
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    import msvcrt

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def as_name(text):
    """A text as part of the name of a file or folder, on every system."""
    return re.sub(r"[^\w.,=+-]", "-", text)


# ---- writing ----
def write(path, save):
    """Calls save(file) on a binary file that becomes `path` once it is complete and on the disk; or raises OSError."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    temporary.unlink(missing_ok=True)  # of a process that died, or a link
    try:
        with open(temporary, "xb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if os.name == "posix":  # the new name is on the disk only when its folder is
        folder = os.open(path.parent, os.O_RDONLY)
        with contextlib.suppress(OSError):
            os.fsync(folder)
        os.close(folder)


def write_bytes(path, content):
    write(path, lambda file: file.write(content))


def write_text(path, text):
    write_bytes(path, text.encode())


def reason(error):
    """Why a file was not written, in few words."""
    if isinstance(error, OSError):
        return "disk full" if error.errno in NO_ROOM else error.strerror or str(error)
    # torch hides the error of a write that came up short
    return "disk full" if "unexpected pos" in str(error) or "PytorchStreamWriter" in str(error) else str(error)


# ---- output ----
def print_safely(line, file=None):
    """Prints a line, on standard output by default; where it cannot be written, the program goes on."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        print(line, file=file, flush=True)


def warn(line):
    print_safely(f"warning: {line}", sys.stderr)


class _Lenient(io.RawIOBase):
    """Writes to a file; what cannot be written, because a disk is full or nobody reads it, is dropped."""

    def __init__(self, file):
        self.file, self.fileno, self.isatty = file, file.fileno, file.isatty

    def writable(self):
        return True

    def write(self, data):
        try:
            return self.file.write(data)
        except OSError:
            return len(data)


def lenient(stream):
    """The text stream with a lenient file below it, as far as it is one of the system; None becomes one to nowhere."""
    if stream is None:  # closed when the program was started
        return open(os.devnull, "w")
    buffer = getattr(stream, "buffer", None)
    file = getattr(buffer, "raw", buffer)  # with python -u there is no buffer between
    if not isinstance(file, io.RawIOBase) or isinstance(file, _Lenient):
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    below = _Lenient(file) if buffer is file else io.BufferedWriter(_Lenient(file))
    modes = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
    return io.TextIOWrapper(below, stream.encoding, stream.errors, **modes)


def drop_what_cannot_be_printed():
    """From now on no print, warning or progress bar of this program can end it."""
    sys.stdout, sys.stderr = lenient(sys.stdout), lenient(sys.stderr)


# ---- folders ----
def first_link(folder, depth=3, itself=False):
    """A link in a folder or its folders, as deep as a run writes: it may lead elsewhere. None if there is none.

    `itself`: the folder itself counts, too.
    """
    if itself and is_link(folder):
        return folder
    for entry in os.scandir(folder):
        if is_link(entry.path):
            return entry.path
        if depth > 1 and entry.is_dir(follow_symlinks=False) and (found := first_link(entry.path, depth - 1)):
            return found
    return None


def is_link(path):
    facts = os.lstat(path)
    is_junction = getattr(facts, "st_reparse_tag", 0) == getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", None)  # Windows
    return stat.S_ISLNK(facts.st_mode) or is_junction


def make_folder(path):
    """Makes a new folder: `path`, or with a number behind it where that is taken. Returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def writable_folder(path):
    """Makes the folder where there is none, and returns its path; a ValueError if nothing can be written there."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"no folder can be made at {path} ({getattr(error, 'strerror', None) or error})") from None
    if not os.access(path, os.W_OK):
        raise ValueError(f"{path} cannot be written to")
    return path


class FolderLock:
    """Keeps other processes out of a folder. The system releases it when its process ends, however it ends."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.file = None

    def acquire(self):
        """Raises a ValueError if another process holds it."""
        file = _open_lock(self.folder, os.O_CREAT)
        try:
            _lock(file)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                file.close()
                return  # a file system without locks
            owner = _owner(file)
            file.close()
            raise ValueError(f"{self.folder} is in use by {owner}") from None
        with contextlib.suppress(OSError):  # it is locked even where nothing can be written
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self.file = file

    def release(self):
        if self.file is not None:
            with contextlib.suppress(OSError):  # it is closed even where nothing can be written
                self.file.close()
            self.file = None


def is_locked(folder):
    """Who uses a folder, such as `process 17 on node3`; None if nobody does."""
    try:
        file = _open_lock(folder)
    except OSError:
        return None
    with file:
        try:
            _lock(file)
        except OSError as error:
            return _owner(file) if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK) else None
    return None


def _open_lock(folder, flags=0):
    """The file .lock for reading and writing, at its end; an OSError if it is a link or no file."""
    path = Path(folder) / ".lock"
    if os.path.lexists(path) and not (stat.S_ISREG(os.lstat(path).st_mode) and os.lstat(path).st_nlink == 1):
        raise OSError(errno.ELOOP, f"{path.name} is a link")
    flags |= os.O_RDWR | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)  # should it become a link only now
    return os.fdopen(os.open(path, flags, 0o666), "a+")


def _lock(file):
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        file.seek(2**30)  # others can read what is before the locked byte
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)


def _owner(file):
    file.seek(0)
    return file.readline().strip() or "another process"

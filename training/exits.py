"""How a program ends: its messages and exit codes, and signals before a run has started.

Exit codes: 0 done, 1 error, 2 bad arguments, 128 + n stopped by signal n and saved (130 Ctrl-C, 143 SIGTERM, and 143 at
the time limit).
"""

import _thread
import os
import re
import signal
import sys
import threading

from training import files
from training.files import print_safely

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
NO_MEMORY = 3  # the exit code of a run that lacks memory: beside fewer others it may have enough
NO_MEMORY_MESSAGE = re.compile("tried to allocate|can't allocate|out of memory|OUT_OF_MEMORY|ALLOC_FAILED")


class Exit(SystemExit):
    """Ends the program with a message and an exit code."""

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code
        print_safely(message, sys.stderr)


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

"""A game in a process of its own: envs/external/processes.py starts this file and talks to it through pipes.

First it is told which file has the class Game to play. Then a request is (method of Game, arguments), a reply
(True, result) or (False, reason). The end of the requests ends the process, whatever it is doing. It imports neither
torch nor the rest of `envs`, so that it starts quickly.
"""

import os
import pickle
import queue
import runpy
import signal
import sys
import threading
import time

SECONDS_TO_CLOSE = 10.0


def main():
    requests, replies = take_pipes()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who plays: it closes the pipes
    sys.path[:], file, options = pickle.load(requests)
    inbox = queue.SimpleQueue()
    threading.Thread(target=listen, args=(requests, inbox), daemon=True).start()
    game = runpy.run_path(file)["Game"](options)
    try:
        for method, arguments in iter(inbox.get, None):
            try:
                reply = True, getattr(game, method)(*arguments)
            except (Exception, SystemExit) as error:  # pysc2 gives up with sys.exit
                reply = False, f"{type(error).__name__}: {error}"
            pickle.dump(reply, replies)
            replies.flush()
        game.close()
    finally:
        end_all()


def take_pipes():
    """Standard input and output for ourselves: what the game reads or prints must not come between."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, replies


def listen(requests, inbox):
    try:
        while True:
            inbox.put(pickle.load(requests))
    except (EOFError, OSError, pickle.UnpicklingError):
        inbox.put(None)
    time.sleep(SECONDS_TO_CLOSE)
    end_all()


def end_all():
    """Ends this process and, where process groups exist, every game it has started."""
    if os.name == "nt":
        os._exit(0)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()

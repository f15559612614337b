"""Environments whose matches are played by other programs, one process each: the real game, and those of PettingZoo.

A process runs worker.py with a class Game: `sizes()`, `reset(seed, anew)` and `step(actions)`. One that crashes, dies
or does not answer in time is replaced; its match is invalid. Matches cannot be copied.
"""

import contextlib
import itertools
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref

import numpy as np
import torch

from envs.batch import EPISODE, FINAL, FROZEN, KEY, OVER, PLAY, RESTART, RUNNING, STAGE, STEP, Batch, GameFailed
from envs.external import worker

IDLE = 0  # the action of those who are dead, or whose match is over
MAX_FAILURES = 5  # of a game in a row, without a match played to its end, before giving up
SECONDS_BETWEEN_CHECKS = 0.2  # whether to go on waiting for a game


class GameLost(Exception):
    """A game has crashed, died or not answered in time."""


class GameProcess:
    """A game's process, seen from here."""

    def __init__(self, file, options, variables=None):
        """`file` has the class Game, which gets the options."""
        own_group = (
            {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if os.name == "nt" else {"start_new_session": True}
        )
        self._process = subprocess.Popen(
            [sys.executable, worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(variables or {})},
            **own_group,  # Ctrl-C does not reach it, and it can be killed with the game
        )
        self._replies = queue.SimpleQueue()
        threading.Thread(target=_collect, args=(self._process.stdout, self._replies), daemon=True).start()
        self._send((sys.path, file, options))

    def ask(self, method, *arguments):
        self._send((method, arguments))

    def _send(self, message):
        with contextlib.suppress(OSError, ValueError):  # that it is dead is noticed where its answer is awaited
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()

    def answer(self, deadline, while_waiting=None):
        """The reply to what was asked; `while_waiting` is called again and again until then, and may raise."""
        reply = self._wait(deadline, while_waiting)
        if reply is None:
            self._replies.put(None)
            raise GameLost("its process died")
        fine, result = reply
        if not fine:
            raise GameLost(result.splitlines()[0])
        return result

    def _wait(self, deadline, while_waiting):
        while True:
            if while_waiting is not None:
                while_waiting()
            seconds_left = deadline - time.monotonic()
            try:
                # a few moments at a time: on Windows Ctrl-C is noticed only between them
                return self._replies.get(timeout=min(max(0.0, seconds_left), SECONDS_BETWEEN_CHECKS))
            except queue.Empty:
                if seconds_left <= SECONDS_BETWEEN_CHECKS:
                    self.end(deadline)
                    raise GameLost("it did not answer in time") from None

    def hang_up(self):
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def end(self, deadline):
        """Ends the process and the game: by itself until the deadline, then by force."""
        if self._process.returncode is not None:
            return
        self.hang_up()
        with contextlib.suppress(queue.Empty):
            while self._replies.get(timeout=max(0.0, deadline - time.monotonic())) is not None:
                pass
        self._replies.put(None)
        if os.name == "nt":
            tree = ["taskkill", "/F", "/T", "/PID", str(self._process.pid)]
            subprocess.run(tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        else:
            # before wait(): until then nobody else can have this number
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the system has not ended it yet, but will
            self._process.wait(worker.SECONDS_TO_CLOSE)


def _collect(pipe, replies):
    with pipe, contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        while True:
            replies.put(pickle.load(pipe))
    replies.put(None)


def _end_all(games):
    for game in games:
        game.hang_up()
    deadline = time.monotonic() + worker.SECONDS_TO_CLOSE
    for game in games:
        game.end(deadline)


class ProcessBatch(Batch):
    """Matches of other programs. Its policies are `random` and at most one more.

    A subclass has `_show(host, m, look)`, which writes what match m looks like from the reply of its game, and
    `_script(m, avail)`, the actions (n_agents,) of the second policy where there is one.
    """

    simulated = False
    policies = ("random",)
    advice = ""  # what to try where a game fails again and again

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._outputs["avail"][:, :, IDLE] = True

    def start(self, num_envs, new_game, step_timeout, reset_timeout):
        """Before __init__: starts a process for every match.

        Returns the sizes that the first one reports, or raises GameLost.
        """
        for option, value in (("step_timeout", step_timeout), ("reset_timeout", reset_timeout)):
            if not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{option} is a number of seconds above 0, not {value!r}")
        self.step_timeout, self.reset_timeout, self.restarts = step_timeout, reset_timeout, 0
        self.while_waiting = None  # called again and again while a game is waited for; it may raise
        self._failures = [0] * num_envs  # of each game since the last match that it played to its end
        self._new_game, self._games = new_game, []
        self._end = weakref.finalize(self, _end_all, self._games)  # also when it is forgotten, and at exit
        try:
            self._games += [new_game() for _ in range(num_envs)]
            self._games[0].ask("sizes")
            return self._games[0].answer(time.monotonic() + reset_timeout)
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def close(self):
        self._end()

    def snapshot(self):
        raise NotImplementedError(f"{self.name} is played by another program: it can be neither saved nor restored")

    def restore(self, snapshot):
        self.snapshot()

    # ---- what Batch calls ----
    def _run(self, op):
        if not self._end.alive:
            raise RuntimeError(f"{self.name} is closed")
        try:
            with self._on_host() as host:
                if op == PLAY:
                    self._play(host)
                elif op == RESTART:
                    self._restart(host, host.mask.nonzero().flatten().tolist())
        except BaseException:  # Ctrl-C too: half a step cannot be played on
            self.close()
            raise

    def _act(self):
        with self._on_host() as host:
            for m in range(self.num_envs):
                avail, match = host.avail[m].numpy(), host.match[m]
                draw = np.random.default_rng([int(match[KEY]), int(match[EPISODE]) + 1, int(match[STEP])])
                chosen = np.where(avail, draw.random(avail.shape), -1.0).argmax(1)
                if len(self.policies) > 1:
                    chosen = np.where(host.policy[m] == 0, chosen, self._script(m, avail))
                host.scripted[m] = torch.from_numpy(chosen)

    @contextlib.contextmanager
    def _on_host(self):
        """The batch's tensors by name in the CPU's memory; what is written there is then in the batch."""
        tensors = {**self._tensors(), "invalid": self._info["invalid"]}
        host = {name: tensor.cpu() for name, tensor in tensors.items()}  # on the CPU these are the batch's own
        yield types.SimpleNamespace(**host)
        for name, tensor in tensors.items():
            tensor.copy_(host[name])

    # ---- playing ----
    def _play(self, host):
        stage = host.match[:, STAGE]
        running = (stage == RUNNING).nonzero().flatten().tolist()
        over = stage == OVER
        for name in ("obs", "state", "reward", "alive", "avail"):
            getattr(host, name)[over] = 0
        host.avail[over, :, IDLE] = True
        stage[over] = FROZEN

        known = host.actions.clamp(0, self.n_actions - 1)
        fine = (known == host.actions) & host.avail.gather(2, known.unsqueeze(2)).squeeze(2)
        actions = torch.where(fine, known, host.avail.int().argmax(-1))  # else the first available
        replies = self._ask({m: ("step", actions[m].tolist()) for m in running}, self.step_timeout)
        for m, reply in replies.items():
            result = (0.0, False, True, False)
            if reply is not None:
                result, look = reply
                self._show(host, m, look)
                if result[1] or result[2]:
                    self._failures[m] = 0
            reward, host.terminated[m], host.truncated[m], host.won[m] = result
            host.reward[m] = torch.as_tensor(reward)
            host.invalid[m] = reply is None
            host.match[m, STEP] += 1
        ended = [m for m in running if host.terminated[m] or host.truncated[m]]
        stage[ended] = OVER
        if self.autoreset and ended:
            for name in FINAL:
                getattr(host, name)[ended] = getattr(host, name.removeprefix("final_"))[ended]
            self._begin(host, ended)

    def _restart(self, host, matches):
        for name in ("reward", "terminated", "truncated", "won", "invalid"):
            getattr(host, name)[matches] = 0
        self._begin(host, matches)

    def _begin(self, host, matches):
        seeded = {m for m in matches if host.match[m, EPISODE] < 0}
        host.match[matches, EPISODE] += 1
        host.match[matches, STEP] = 0
        host.match[matches, STAGE] = RUNNING
        for attempt in itertools.count():  # up to MAX_FAILURES in a row
            seeds = {m: int(host.match[m, KEY] + host.match[m, EPISODE] + attempt) % (1 << 32) for m in matches}
            replies = self._ask({m: ("reset", seeds[m], m in seeded) for m in matches}, self.reset_timeout)
            for m, look in replies.items():
                if look is not None:
                    self._show(host, m, look)
            matches = [m for m, look in replies.items() if look is None]
            if not matches:
                return

    def _ask(self, requests, timeout):
        """The games' answers by match; None where the game failed, and another has been put in its place."""
        for m, request in requests.items():
            self._games[m].ask(*request)
        deadline = time.monotonic() + timeout
        answers = {}
        for m in requests:
            try:
                answers[m] = self._games[m].answer(deadline, self.while_waiting)
            except GameLost as loss:
                answers[m] = None
                self._replace(m, loss)
        return answers

    def _replace(self, m, loss):
        """Puts a new game in the place of one that failed, unless it has failed too often."""
        self._failures[m] += 1
        if self._failures[m] == MAX_FAILURES:
            raise GameFailed(
                f"{self.name}: game {m} failed {MAX_FAILURES} times in a row without finishing a match "
                f"(the last time: {loss}){self.advice}"
            )
        self.restarts += 1
        message = f"{self.name}: game {m} is restarted (restart {self.restarts}): {loss}"
        warnings.warn(message, RuntimeWarning, stacklevel=6)
        self._games[m].end(deadline=0.0)
        self._games[m] = self._new_game()

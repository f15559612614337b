"""The thin layer under every environment: one match written as scalar Python, thousands run on CPU threads or on CUDA.

A game is a *program*, `run_one(op, m, lane, lanes, game)`: what `lanes` workers do together for match `m` of the batch.
On the CPU one thread is all the workers of a match (lane 0 of 1). On CUDA a match has up to a warp of them, each doing
every `lanes`-th unit. `barrier()` parts the phases of a program: what is written before it may be read after it. The
program is the only place that calls it, so that its phases are plain functions of one unit.

`game` is a named tuple of arrays and numbers. The arrays are torch tensors seen through NumPy or Numba: same memory,
no copies. With NUMBA_DISABLE_JIT=1 everything runs as plain Python, slowly, for debugging.
"""

import contextlib
import functools
import hashlib
import math
import os
import shutil
import sys
import time
import types
from pathlib import Path

import numba
import numpy as np
import torch
from numba import njit, prange

SERIAL_BELOW = 8  # matches; waking the threads costs more than playing fewer than these
THREADS_PER_BLOCK = 64
WARP = 32


# A function of the rules: called from compiled code only, so it needs no entry from Python and holds no references.
scalar = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False, forceinline=True)


@scalar
def barrier():
    """Parts two phases. Nothing to wait for on the CPU; CUDA puts a warp barrier in its place."""


# ---- numbers that mean the same on every device ----
@scalar
def root(value):
    return np.float32(math.sqrt(value))


@njit
def _scramble(h):
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return h ^ (h >> 16)


@njit
def draw(key, a, b, c):
    """A random 32-bit integer that depends on nothing but its arguments: no stream, so no order of calls."""
    h = _scramble((int(key) + 0x9E3779B9) & 0xFFFFFFFF)
    h = _scramble((h + int(a) * 0x85EBCA6B) & 0xFFFFFFFF)
    h = _scramble((h + int(b) * 0xC2B2AE35) & 0xFFFFFFFF)
    return _scramble((h + int(c) * 0x27D4EB2F) & 0xFFFFFFFF)


@scalar
def uniform(key, a, b, c):
    """The same, as a float32 in [0, 1)."""
    return np.float32(draw(key, a, b, c) >> 8) * np.float32(1 / (1 << 24))


# ---- compiled code is kept between runs, under the hash of the sources it came from ----
@functools.cache
def cache_folder():
    root_folder = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or str(Path.home() / ".cache")
    home = Path(root_folder) / "omg-marl"
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    with contextlib.suppress(OSError):
        for old in home.glob("*"):
            if time.time() - old.stat().st_mtime > 30 * 24 * 3600:
                shutil.rmtree(old, ignore_errors=True)
    return str(home / f"{digest.hexdigest()[:16]}-{sys.implementation.cache_tag}")


@contextlib.contextmanager
def our_cache():
    """Numba notes where to cache when a function is decorated; its own default does not see edits in other files."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = before or cache_folder()
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def _rebind(function, name, **names):
    """The same code under another name with some of its globals replaced (a closure could not be cached)."""
    clone = types.FunctionType(function.__code__, {**function.__globals__, **names}, name)
    clone.__qualname__, clone.__module__ = name, function.__module__
    return clone


# ---- CPU ----
def _serial(op, matches, game):
    for m in range(matches):
        run_one(op, m, 0, 1, game)  # noqa: F821  (bound by _rebind)


def _threaded(op, matches, game):
    for m in prange(matches):
        run_one(op, m, 0, 1, game)  # noqa: F821


@functools.cache
def _compile_cpu(run_one, threaded):
    body = _threaded if threaded else _serial
    with our_cache():
        return njit(cache=True, nogil=True, parallel=threaded)(
            _rebind(body, f"{run_one.__name__}{body.__name__}", run_one=run_one)
        )


# ---- CUDA ----
@functools.cache
def _compile_cuda(run_one):
    from numba import cuda

    @cuda.jit(device=True)
    def warp_barrier():
        cuda.syncwarp()

    program = getattr(run_one, "py_func", run_one)
    on_device = cuda.jit(device=True)(_rebind(program, f"{program.__name__}_cuda", barrier=warp_barrier))

    def kernel(op, matches, lanes, game):
        thread = cuda.grid(1)
        m = thread // lanes
        lane = thread - m * lanes
        if m >= matches:  # the tail of the last warp must still come to every barrier
            m, lane = matches - 1, IDLE
        on_device(op, m, lane, lanes, game)

    with our_cache():
        return cuda.jit(cache=True)(kernel)


IDLE = 1 << 30  # a lane beyond all units: it does nothing


@contextlib.contextmanager
def _no_fused_multiply_add():
    """CPU and CUDA must round alike. Numba has no switch for this, its compiler has."""
    from numba.cuda.cudadrv import nvvm

    compile_ir = nvvm.compile_ir
    nvvm.compile_ir = functools.partial(compile_ir, fma=False)
    try:
        yield
    finally:
        nvvm.compile_ir = compile_ir


def view(tensor):
    """The tensor's memory as an array that compiled code reads and writes."""
    if tensor.device.type == "cpu":
        return tensor.numpy()
    from numba import cuda

    return cuda.as_cuda_array(tensor)


class Runner:
    """Runs a program over a batch: `runner(op, game)`. On CUDA it launches on torch's current stream."""

    def __init__(self, run_one, matches, units, device):
        self.matches = matches
        if device.type == "cpu":
            run = _compile_cpu(run_one, threaded=matches >= SERIAL_BELOW)
            self._launch = lambda op, game: run(op, matches, game)
        else:
            from numba import cuda

            kernel = _compile_cuda(run_one)
            lanes = min(WARP, 1 << (units - 1).bit_length())  # a match never straddles two warps
            blocks = -(-matches * lanes // THREADS_PER_BLOCK)

            def launch(op, game):
                stream = cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)
                with _no_fused_multiply_add():
                    kernel[blocks, THREADS_PER_BLOCK, stream](op, matches, lanes, game)

            self._launch = launch

    def __call__(self, op, game):
        self._launch(op, game)

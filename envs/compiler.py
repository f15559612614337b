"""The thin layer under every environment: one match written as scalar Python, thousands run on CPU threads or on CUDA.

A game is a *program*, `run_one(op, m, lane, lanes, rule, game)`: what `lanes` workers do together for match `m` of the
batch. On the CPU one thread is all the workers of a match (lane 0 of 1). On CUDA a match has up to a warp of them, each
doing every `lanes`-th unit. `barrier()` parts the phases of a program: what is written before it may be read after it.
All workers of all matches come to every barrier: only a program, and the parts of it that all of them always call
(`step_match` and `observe_match`, see `life_cycle` in envs/batch.py), have barriers. The rules are plain functions.

`rule` is a named tuple of numbers (constants of the kernel on CUDA), `game` one of arrays: torch tensors seen through
NumPy or Numba, same memory, no copies. With NUMBA_DISABLE_JIT=1 everything runs as plain Python, slowly, for debugging.
"""

import ast
import contextlib
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import math
import os
import pickle
import sys
import textwrap
import time
import types
import warnings
from collections import namedtuple
from pathlib import Path

import numba
import numpy as np
import torch
from numba import njit, prange
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.extending import overload

SERIAL_BELOW = 8  # matches; waking the threads costs more than playing fewer than these
BLOCK_SIZES = (256, 128, 64, 32)  # threads; the first whose matches fit into SHARED_BYTES
PLAIN_BLOCK = 128  # threads; for programs that work on the batch as it lies
SHARED_BYTES = 48 * 1024
IN_STEP_FROM = 16384  # matches; from here on the warps of a block keep in step, and blocks are as large as can be
REGISTERS, REGISTERS_IN_STEP = 80, 64  # at most: more warps at a time are worth a few spills
WARP = 32
WHOLE_ONCE = (0, 63), (0, 68)  # the first and the last version of Numba that _compile_whole_once has been tried with


# A function of the rules: called from compiled code only, so it needs no entry from Python and holds no references.
scalar = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False, forceinline=True, error_model="numpy")


@scalar
def barrier():
    """Parts two phases. Nothing to wait for on the CPU; CUDA puts a real one in its place."""


# ---- numbers that mean the same on every device ----
@scalar
def root(value):
    return np.float32(math.sqrt(value))


@scalar
def scramble(h):
    """Another 32-bit integer for each."""
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return h ^ (h >> 16)


@scalar
def draw(key, a, b, c):
    """A random 32-bit integer that depends on nothing but its arguments: no stream, so no order of calls.

    The key has up to 63 bits, the others 32.
    """
    h = scramble(int(key) & 0xFFFFFFFF)
    h = scramble((h + (int(key) >> 32) * 0x9E3779B9) & 0xFFFFFFFF)
    h = scramble((h + int(a) * 0x85EBCA6B) & 0xFFFFFFFF)
    h = scramble((h + int(b) * 0xC2B2AE35) & 0xFFFFFFFF)
    return scramble((h + int(c) * 0x27D4EB2F) & 0xFFFFFFFF)


@scalar
def uniform(key, a, b, c):
    """The same, as a float32 in [0, 1)."""
    return np.float32(draw(key, a, b, c) >> 8) * np.float32(1 / (1 << 24))


def pop_bit(mask):
    """(the place of the lowest bit that is set, the mask without it). A mask has one bit a unit, at most 62."""
    return (mask & -mask).bit_length() - 1, mask & (mask - 1)


@overload(pop_bit, inline="always")
def _pop_bit(mask):
    return lambda mask: (trailing_zeros(mask), mask & (mask - 1))


@scalar
def pick_bit(mask, number):
    """The place of one of the bits that are set, by a random number; -1 if none is."""
    count, rest = 0, mask
    while rest != 0:
        _, rest = pop_bit(rest)
        count += 1
    if count == 0:
        return -1
    for _ in range(number % count):
        _, mask = pop_bit(mask)
    place, _ = pop_bit(mask)
    return place


# ---- compiled code is kept between runs, in files named after a hash of all that it came from ----
def _file(path):
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


SOURCE = _file(__file__)


def fingerprint(*functions):
    """A hash of what compiled code is made of: the functions, all that they call, the constants, the versions.

    It goes by what was imported, not by what the files hold now, and sees nothing of the code that is not compiled.
    """
    parts, seen, waiting = set(), set(), list(functions)
    while waiting:
        value = waiting.pop()
        function = getattr(value, "py_func", value)
        if function in seen or str(function.__module__).partition(".")[0] in ("numpy", "numba"):
            continue
        seen.add(function)
        parts.add(repr((_code(function.__code__), function.__defaults__, getattr(value, "targetoptions", None))))
        if value is function:  # compiled in another form, such as pop_bit, which is in the same file
            parts.add(hashlib.sha256(_file(function.__code__.co_filename)).hexdigest())
        for name, item in _referred_to(function):
            if isinstance(getattr(item, "py_func", item), types.FunctionType):
                waiting.append(item)
            else:
                parts.add(f"{function.__module__}: {name} = {_constant(item)}")
    digest = hashlib.sha256(SOURCE)
    versions = (sys.version, numba.__version__, np.__version__, _version("numba-cuda"), numba.config.BOUNDSCHECK)
    for part in (str(versions), *sorted(parts)):
        digest.update(part.encode())
    return digest.hexdigest()[:16]


def _referred_to(function):
    """(name, value) of the globals that the code may mean, those of modules too: draw, paths.joined, paths.WALL."""
    names, closure = _names(function.__code__), inspect.getclosurevars(function).nonlocals
    yield from closure.items()
    scopes, seen = [("", function.__globals__)], []
    for prefix, scope in scopes:
        for name in names & scope.keys():
            if not isinstance(scope[name], types.ModuleType):
                yield prefix + name, scope[name]
            elif scope[name] not in seen:
                seen.append(scope[name])
                scopes.append((f"{prefix}{name}.", vars(scope[name])))


def _names(code):
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _code(code):
    constants = [_code(item) if isinstance(item, types.CodeType) else item for item in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars


def _constant(value):
    """What compiled code takes it for, as text that is the same in every run."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes()}"
    if isinstance(value, tuple):
        return str([_constant(item) for item in value])
    if isinstance(value, type):
        return f"{value.__qualname__}{getattr(value, '_fields', '')}"
    plain = (bool, int, float, complex, str, bytes, np.generic, np.dtype, numba.types.Type, enum.Enum)
    return repr(value) if isinstance(value, plain) else str(type(value))


@functools.cache
def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def cache_folder():
    """Where compiled code is kept unless NUMBA_CACHE_DIR says where; files unused for a month are removed."""
    root_folder = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or str(Path.home() / ".cache")
    home = Path(root_folder) / "omg-marl"
    with contextlib.suppress(OSError):
        for old in home.rglob("*.*"):
            if time.time() - old.stat().st_mtime > 30 * 24 * 3600:
                old.unlink()
    return str(home)


class _Files:
    """The files of one function's cache, in place of Numba's: one a signature, with a checksum.

    Numba's own would run garbage, end the program at a cut file, and never replace it.
    """

    def __init__(self, folder, name, dump):
        self.folder, self.name, self.dump = Path(folder), name, dump

    def _path(self, key):
        return self.folder / f"{self.name}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"

    def load(self, key):
        path = self._path(key)
        content = path.read_bytes()
        checksum, data = content[:32], content[32:]
        if hashlib.sha256(data).digest() == checksum:
            with contextlib.suppress(OSError):
                os.utime(path)  # in use
            return pickle.loads(data)

    def save(self, key, data):
        path, data = self._path(key), self.dump(data)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            aside.write_bytes(hashlib.sha256(data).digest() + data)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def flush(self):
        pass


def keep(dispatcher):
    """The compiled function, kept between runs where there is a place for it. Its name has to have the fingerprint."""
    if not hasattr(dispatcher, "enable_caching"):  # NUMBA_DISABLE_JIT
        return dispatcher
    # Numba notes where to cache when caching is enabled; its CUDA part may have a configuration of its own
    configs = [sys.modules[name] for name in ("numba.core.config", "numba.cuda.core.config") if name in sys.modules]
    with _compiler_lock("cpu"):  # of two threads the second would find the folder of the first, and leave it there
        swaps = [(config, "CACHE_DIR", config.CACHE_DIR or cache_folder()) for config in configs]
        try:
            with _in_place_of(*swaps):
                dispatcher.enable_caching()
        except (OSError, RuntimeError):  # no place that can be written to
            return dispatcher
    cache = dispatcher._cache
    cache._cache_file = _Files(cache.cache_path, dispatcher.py_func.__name__, cache._cache_file._dump)
    cache.load_overload, cache.save_overload = _announced(cache.load_overload), _or_none(cache.save_overload)
    return dispatcher


def _or_none(function):
    def tried(*args):
        with contextlib.suppress(Exception):  # a file that cannot be read is compiled anew, a full disk keeps nothing
            return function(*args)

    return tried


def _announced(load):
    """`load`, and a word about the wait where nothing is found, once in a process: what is compiled now is kept."""

    def loaded(*args):
        found = _or_none(load)(*args)
        if found is None:
            _announce_compilation()
        return found

    return loaded


@functools.cache
def _announce_compilation():
    with contextlib.suppress(OSError, ValueError):  # it goes on where nothing can be printed
        print("compiling, for half a minute at the first use of an environment ...", file=sys.stderr, flush=True)


def rebind(function, name, **names):
    """The same code under another name with some of its globals replaced (a closure could not be cached)."""
    clone = types.FunctionType(function.__code__, {**function.__globals__, **names}, name)
    clone.__qualname__, clone.__module__ = name, function.__module__
    return clone


# ---- CPU: templates; `run_one` is bound by rebind ----
def _serial(op, matches, rule, game):
    for m in range(matches):
        run_one(op, m, 0, 1, rule, game)


def _threaded(op, matches, rule, game):
    for m in prange(matches):
        run_one(op, np.int64(m), 0, 1, rule, game)


@functools.cache
def _compile_cpu(run_one, threaded):
    body = _threaded if threaded else _serial
    name = f"{run_one.__module__}.{run_one.__name__}_{fingerprint(run_one)}{body.__name__}"
    return keep(njit(nogil=True, parallel=threaded)(rebind(body, name, run_one=run_one)))


def _entry_point(function, *arguments):
    """The machine code for arguments of these types. A call of `function` would look at their 80 types first."""
    if not hasattr(function, "compile"):  # NUMBA_DISABLE_JIT
        return function
    return function.compile(tuple(function.typeof_pyval(argument) for argument in arguments))


# ---- CUDA: templates; the capitals, `run_one`, `world_of`, `place_of` and Numba's names are bound by _for_cuda ----
def _in_shared_memory(op, matches, game):
    # A match's simulation lives in shared memory for the length of a call, and its rules are constants: addresses cost
    # little. Only the first KEPT fields outlive it.
    real, whole = cuda.shared.array(REAL_SHAPE, float32), cuda.shared.array(WHOLE_SHAPE, int32)
    match, stat = cuda.shared.array(MATCH_SHAPE, int64), cuda.shared.array(STAT_SHAPE, float32)
    line = cuda.shared.array((ROWS, LINE), float32)
    units, thread = REAL_SHAPE[2], cuda.threadIdx.x
    row, lane, m = place_of(thread, matches)
    for field in range(STAT_SHAPE[0]):
        for u in range(thread, units, THREADS):
            stat[field, u] = game.stat[field, u]
    for u in range(lane, units, LANES):
        for field in range(KEPT[0]):
            real[field, row, u] = game.real[field, m, u]
        for field in range(KEPT[1]):
            whole[field, row, u] = game.whole[field, m, u]
    for field in range(lane, MATCH_SHAPE[1], LANES):
        match[row, field] = game.match[m, field]
    cuda.syncthreads()
    run_one(op, m, row, lane, LANES, world_of(real, whole, match, stat, line, RULE, game), game)
    cuda.syncwarp()
    for u in range(lane, units, LANES):
        for field in range(KEPT[0]):
            game.real[field, m, u] = real[field, row, u]
        for field in range(KEPT[1]):
            game.whole[field, m, u] = whole[field, row, u]
    for field in range(lane, MATCH_SHAPE[1], LANES):
        game.match[m, field] = match[row, field]


def _in_place(op, matches, game):
    _, lane, m = place_of(cuda.threadIdx.x, matches)
    run_one(op, m, lane, LANES, RULE, game)


def _place_of(thread, matches):
    """(row in the block, lane, match) of a thread; matches do not straddle warps."""
    row = thread % WARP // LANES
    lane = thread % WARP - row * LANES
    present = row < PER_WARP
    row += thread // WARP * PER_WARP
    m = cuda.blockIdx.x * ROWS + row
    if present and m < matches:
        return row, lane, m
    return 0, IDLE, 0  # beyond all units: it does nothing, but comes to every barrier


IDLE = 1 << 30


def lanes_for(units):
    """Lanes to a match: as few rounds over its units as keep most of the lanes of a warp busy."""

    def busy(rounds):
        lanes = -(-units // rounds)
        return WARP // lanes * units / (WARP * rounds) if lanes <= WARP else 0

    rounds = max(range(1, max(4, 1 + -(-units // WARP))), key=lambda r: (min(busy(r), 0.85), -r))
    return -(-units // rounds)


def _names_in(parts):
    return [name for part in parts for name in ast.walk(part) if isinstance(name, ast.Name)]


class _CountedLoops(ast.NodeTransformer):
    """`for i in range(...)` as a while loop with a 32-bit counter: CUDA's compiler does not see through Numba's.

    `range(lane, n, lanes)`, what the lanes of a match share, takes as many rounds as the first lane has: often one,
    and then there is no loop.
    """

    def visit_For(self, node):
        self.generic_visit(node)
        i, bounds, lines = node.target.id, [f"({ast.unparse(bound)})" for bound in node.iter.args], []
        assigned = {name.id for name in _names_in(node.body) if isinstance(name.ctx, ast.Store)}
        if assigned & {name.id for name in _names_in(node.iter.args)}:
            lines = [f"bound_{node.lineno}_{k} = {bound}" for k, bound in enumerate(bounds)]
            bounds = [f"bound_{node.lineno}_{k}" for k in range(len(bounds))]
        if len(bounds) == 3:
            start, stop, step = bounds
            body = [f"{i} = int32({start} + {i}_round * {step})", f"if {i} < {stop}: pass"]
            start, stop, counter = "0", f"({stop} + {step} - 1) // {step}", f"{i}_round"
        else:
            start, stop, counter, body = "0" if len(bounds) == 1 else bounds[0], bounds[-1], i, []
            if i in assigned:
                counter, body = f"count_{node.lineno}", [f"{i} = count_{node.lineno}"]
        # the count comes first in the body, so that `continue` works
        lines += [f"{counter} = int32({start} - 1)", f"while {counter} < {stop} - 1:"]
        lines += [f"    {line}" for line in (f"{counter} = int32({counter} + 1)", *body)]
        *first, loop = ast.parse("\n".join(lines)).body
        (loop.body[-1] if len(bounds) == 3 else loop).body += node.body
        return [*first, loop]


def _for_cuda(function, done, **names):
    """The function as CUDA device code, and with it all that it calls; `names` replace globals."""
    from numba import cuda, int32

    function = getattr(function, "py_func", function)
    if function not in done:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        tree.body[0].decorator_list = []
        scope = {**function.__globals__, **names, "int32": int32}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}  # an attribute may be called alike
        for name in (name for name in function.__code__.co_names if name in used):
            if name not in names and getattr(scope.get(name), "targetoptions", {}).get("forceinline"):
                scope[name] = cuda.jit(_for_cuda(scope[name], done, **names), device=True)
        counted = ast.fix_missing_locations(_CountedLoops().visit(tree))
        exec(compile(counted, function.__code__.co_filename, "exec"), scope)
        done[function] = scope[tree.body[0].name]
    return done[function]


@functools.cache
def _compile_cuda(run_one, rule, lanes, threads, in_step=False, staged=None, shapes=None):
    from numba import cuda, float32, int32, int64, uint32

    names = {"cuda": cuda, "float32": float32, "int32": int32, "int64": int64, "IDLE": IDLE, "RULE": rule}
    names |= {"LANES": lanes, "PER_WARP": WARP // lanes, "ROWS": threads // WARP * (WARP // lanes), "THREADS": threads}
    if staged:
        names |= dict(zip(("REAL_SHAPE", "WHOLE_SHAPE", "MATCH_SHAPE", "STAT_SHAPE"), shapes))
        names |= {"KEPT": (staged.real, staged.whole), "LINE": staged.line, "world_of": staged.world_of}

    def warp_barrier():
        cuda.syncwarp()

    def block_barrier():  # a warp's would do, but warps in step share what they fetch of the program: a fifth faster
        cuda.syncthreads()

    def pop_bit(mask):
        return cuda.ffs(mask) - 1, mask & (mask - 1)

    def pop_bit_of_32(mask):  # 64 bits take twice the instructions
        mask = uint32(mask)
        return cuda.ffs(mask) - 1, uint32(mask & (mask - 1))

    done = {}
    names["place_of"] = cuda.jit(_for_cuda(_place_of, done, **names), device=True)
    program = _for_cuda(
        staged.run_one if staged else run_one,
        done,
        barrier=cuda.jit(block_barrier if in_step else warp_barrier, device=True),
        pop_bit=cuda.jit(pop_bit_of_32 if shapes and shapes[0][2] <= 32 else pop_bit, device=True),
    )
    names["run_one"] = cuda.jit(program, device=True)
    kernel = _for_cuda(_in_shared_memory if staged else _in_place, done, **names)
    sizes = (rule, shapes, lanes, in_step, staged and staged[2:])
    # CUDA compiles what the files hold now
    sources = sorted(inspect.getsource(function) for function in done)
    made_of = (fingerprint(run_one, *(staged[:2] if staged else ())), sources, sizes)
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    kernel.__name__ = kernel.__qualname__ = f"{run_one.__name__}_{digest}"  # what the cache knows it by
    registers = REGISTERS_IN_STEP if in_step and lanes < WARP else REGISTERS
    return keep(cuda.jit(kernel, lto=False, max_registers=registers))  # as a decorator it would forget lto


# ---- three things about Numba's compilers that have no switch; in force while our code is compiled ----
def _take_index_as_is(context, builder, index_type, index, size):
    """Python's negative indices cost a comparison at every access; the rules use none."""
    return context.cast(builder, index, index_type, numba.types.intp)


def _compile_whole_once(run_one):
    """Numba makes machine code of every function, and of all it calls with it: of a whole program up to six times.

    Here a program, and what Numba wraps round it, becomes machine code only in the function called from Python. This
    goes deep into Numba, so versions it has not been tried with compile as they always do.
    """
    if not WHOLE_ONCE[0] <= numba.version_info[:2] <= WHOLE_ONCE[1]:
        return []
    from numba.core.codegen import JITCodeLibrary, JITCPUCodegen

    finalize_one, set_env_of_one = JITCodeLibrary.finalize, JITCPUCodegen.set_env
    wholes, waiting = {run_one.__name__, barrier.__name__}, []  # only a program calls barrier()

    def finalize(library):
        parts = dict.fromkeys(library._linking_libraries)
        if library.name.endswith((_serial.__name__, _threaded.__name__)):
            finalize_one(library)
            for codegen, name, environment in waiting:
                set_env_of_one(codegen, name, environment)
        elif library.name in wholes or any(part.name in wholes for part in parts):
            wholes.add(library.name)
            for part in parts:
                library._reload_init.update(part._reload_init)
                library._final_module.link_in(part._get_module_for_linking(), preserve=True)
            library._finalized = True
        else:
            finalize_one(library)

    def set_env(codegen, name, environment):
        if codegen._engine.is_symbol_defined(name):
            set_env_of_one(codegen, name, environment)
        else:
            waiting.append((codegen, name, environment))

    return [(JITCodeLibrary, "finalize", finalize), (JITCPUCodegen, "set_env", set_env)]


@contextlib.contextmanager
def _in_place_of(*swaps):
    """Within this context the modules' names mean something else: (module, name, replacement)."""
    before = [(module, name, getattr(module, name)) for module, name, _ in swaps]
    try:
        for module, name, replacement in swaps:
            setattr(module, name, replacement)
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)


def _compiler_lock(device_type):
    """The lock that Numba compiles under: who holds it is the only one who compiles for such devices."""
    if device_type != "cpu":
        from numba import cuda  # noqa: F401 (it may have a lock of its own)
    names = ("numba.cuda.core.compiler_lock",) * (device_type != "cpu") + ("numba.core.compiler_lock",)
    return next(sys.modules[name] for name in names if name in sys.modules).global_compiler_lock


@contextlib.contextmanager
def _compiling(device_type, run_one=None):
    """For our code alone: other threads compile before or after it, with Numba as it was."""
    with _compiler_lock(device_type):
        if device_type == "cpu":
            from numba.np import arrayobj

            swaps = [(arrayobj, "fix_integer_index", _take_index_as_is), *_compile_whole_once(run_one)]
        else:
            from numba.cuda.cudadrv import nvvm
            from numba.cuda.np import arrayobj

            no_fused_multiply_add = functools.partial(nvvm.compile_ir, fma=False)  # CPU and CUDA must round alike
            swaps = [(arrayobj, "fix_integer_index", _take_index_as_is)]
            swaps += [(nvvm, "compile_ir", no_fused_multiply_add)] if run_one else []
        with _in_place_of(*swaps):
            yield


def _accept_small_grids():
    """Small batches are few blocks: that is meant, and Numba need not say so at every start."""
    warnings.filterwarnings("ignore", ".*Grid size .* will likely result in GPU under-utilization")


class Kernel:
    """A CUDA kernel of a plain function, kept between runs; its name has to have the fingerprint."""

    def __init__(self, function, registers):
        from numba import cuda

        self._kernel, self._compiled = keep(cuda.jit(function, lto=False, max_registers=registers)), False
        _accept_small_grids()

    def __call__(self, blocks, threads, device, *arguments):
        """Launches it on torch's current stream."""
        with contextlib.nullcontext() if self._compiled else _compiling("cuda"):
            self._kernel[blocks, threads, cuda_stream(device)](*arguments)
        self._compiled = True


def cuda_stream(device):
    """Torch's current stream, for kernels of Numba."""
    from numba import cuda

    return cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)


def view(tensor):
    """The tensor's memory as an array that compiled code reads and writes."""
    if tensor.device.type == "cpu":
        return tensor.numpy()
    from numba import cuda

    return cuda.as_cuda_array(tensor)


# A program's form for shared memory on CUDA: `run_one(op, m, row, lane, lanes, world, game)`, with the world built from
# the arrays there; how many fields, of real and of whole, outlive a call; the length of the line a match's lanes share.
Staged = namedtuple("Staged", "run_one world_of real whole line")


@functools.cache
def _start_threads():
    """Starts Numba's threads, no more than OMP_NUM_THREADS unless NUMBA_NUM_THREADS says so: idle ones keep cores busy.

    Torch keeps the number that it has. Both use OpenMP, whose number Numba sets to its own.
    """
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ and "NUMBA_NUM_THREADS" not in os.environ:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    else:
        numba.get_num_threads()
    torch.set_num_threads(threads)


class CompiledRules:
    """Runs a program over a batch: `runner(op)`. On CUDA it launches on torch's current stream."""

    def __init__(self, run_one, rule, game, device, lanes, staged=None):
        matches = game.match.shape[0]
        self._launch, self._device, self._program = None, device, run_one
        if device.type == "cpu":
            threaded = matches >= SERIAL_BELOW
            if threaded:
                _start_threads()
            run = _compile_cpu(run_one, threaded=threaded)

            def compiled():
                entry = _entry_point(run, 0, matches, rule, game)
                return lambda op: entry(op, matches, rule, game)

            self._compile = compiled
        else:
            if staged:
                kernel, threads = _staged_kernel(run_one, rule, game, lanes, staged)
            else:
                kernel, threads = _compile_cuda(run_one, rule, lanes, PLAIN_BLOCK), PLAIN_BLOCK
            blocks = -(-matches // (threads // WARP * (WARP // lanes)))
            _accept_small_grids()

            def launch(op):
                kernel[blocks, threads, cuda_stream(device)](op, matches, game)

            self._compile = lambda: launch  # which compiles by itself

    def __call__(self, op=-1):
        if self._launch:
            self._launch(op)
        else:
            with _compiling(self._device.type, self._program):
                launch = self._compile()
                launch(op)
            self._launch = launch


def _staged_kernel(run_one, rule, game, lanes, staged):
    """(kernel, threads of a block): blocks as large as shared memory allows."""
    (real, matches, units), whole, match = game.real.shape, game.whole.shape[0], game.match.shape[1]
    each = 4 * ((real + whole) * units + staged.line) + 8 * match
    room = SHARED_BYTES - 4 * game.stat.shape[0] * units
    in_step = matches >= IN_STEP_FROM
    sizes = BLOCK_SIZES if in_step else BLOCK_SIZES[1:]
    threads = next((t for t in sizes if t // WARP * (WARP // lanes) * each <= room), BLOCK_SIZES[-1])
    rows = threads // WARP * (WARP // lanes)
    shapes = (real, rows, units), (whole, rows, units), (rows, match), tuple(game.stat.shape)
    return _compile_cuda(run_one, rule, lanes, threads, in_step, staged, shapes), threads

import gc
import os
import signal
from pathlib import Path

import numba
import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by `pytest &` in a script; tests stop runs with it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:  # one of the processes that share the tests, each of which has a core
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("NUMBA_NUM_THREADS", str(numba.config.NUMBA_NUM_THREADS))  # for tests of several threads

import torch

import envs
from envs import compiler
from experiments.jobs import cores

# Environments are compiled for one thread only: for several, which play the same, they would be compiled again.
SERIAL_BELOW, compiler.SERIAL_BELOW = compiler.SERIAL_BELOW, 10**9
WORLDS = [  # one for every program; those first that take longest to compile
    "3m", "smacv2/terran_5_vs_5", "foraging_orders", "stag_hunt", "popp", "kuhn", "coin_game", "snowdrift_4x4",
    "matrix_ipd",
]  # fmt: skip
MANY = 1000  # tests
MOST_PROCESSES = 4  # each needs a gigabyte, and a container may see more cores than it has


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """The whole suite is shared out among the cores, unless -n says otherwise; single files and tests are not."""
    few = any(config.getoption(option, False) for option in ("keyword", "lf", "usepdb"))
    few = few or not all(Path(folder).is_dir() for folder in config.args) or "PYTEST_XDIST_WORKER" in os.environ
    if not few and config.getoption("numprocesses", 0) is None:
        config.option.numprocesses, config.option.dist = min(cores(), MOST_PROCESSES), "worksteal"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Processes that share many tests compile the environments first, each a part of them."""
    if "PYTEST_XDIST_WORKER" not in os.environ or len(session.items) < MANY:
        return
    slow = any(item.get_closest_marker("slow") for item in session.items)
    common = session.config._tmp_path_factory.getbasetemp().parent
    for name in WORLDS:
        try:
            (common / name.replace("/", "_")).touch(exist_ok=False)
        except FileExistsError:
            continue  # compiled by another
        for serial_below in (10**9, SERIAL_BELOW) if slow or name == "3m" else (10**9,):
            compiler.SERIAL_BELOW = serial_below
            env = envs.make(name, num_envs=8)
            env.reset()
            env.scripted_actions(env.policies[0])
    compiler.SERIAL_BELOW = 10**9


@pytest.fixture
def threads(monkeypatch):
    """Many matches run on threads, as they do outside the tests."""
    monkeypatch.setattr(compiler, "SERIAL_BELOW", SERIAL_BELOW)


@pytest.fixture
def one_thread():
    """Small networks and few matches are faster with one thread than with several that wait for each other."""
    torch_threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    yield
    torch.set_num_threads(torch_threads)
    numba.set_num_threads(numba_threads)


@pytest.fixture(scope="session")
def complete_run(tmp_path_factory):
    """Complete runs, each made once: complete_run(name, env_id) -> the names that the script had at the end."""
    from helpers import train

    made = {}

    def get(name, env_id="3m"):
        if (name, env_id) not in made:
            made[name, env_id] = train(name, tmp_path_factory.mktemp("complete"), env_id=env_id)
        return made[name, env_id]

    return get


@pytest.fixture
def samples_are_means(monkeypatch):
    """Codes of omg_iql.py without noise."""
    monkeypatch.setattr("omg_iql.sample", lambda mean, log_variance: mean)


@pytest.fixture
def real_game(tmp_path, monkeypatch):
    """A stand-in for StarCraft II, so that sc2/3m can be played; no game may be left behind."""
    from test_starcraft2 import FAKE, World

    world = World(tmp_path / "world")
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setenv("SC2PATH", str(world.sc2))
    monkeypatch.setenv("FAKE_SMAC", str(world.notes))
    yield world
    gc.collect()  # games end with their environment
    assert not world.wait_for_the_end(20)

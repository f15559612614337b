import gc
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that tests can import the scripts

from envs import vector

# Environments are compiled for one thread only: for several, which play the same, they would be compiled again.
SERIAL_BELOW, vector.SERIAL_BELOW = vector.SERIAL_BELOW, 10**9
WORLDS = ["foraging_orders", "popp", "snowdrift_4x4", "coin_game", "matrix_ipd", "kuhn", "stag_hunt"]
COMPILE = """
import sys
import envs
from envs import vector
usual, vector.SERIAL_BELOW = vector.SERIAL_BELOW, 10**9
for name in sys.argv[1:]:
    if name == "3m":  # from here on for threads
        vector.SERIAL_BELOW = usual
    env = envs.make(name, num_envs=8)
    env.reset()
    env.scripted_actions(env.policies[0])
"""


def pytest_collection_finish(session):
    """For many tests, another process compiles the environments too: those first that the tests come to last."""
    if len(session.items) > 1000 and not session.config.option.collectonly:
        names = [*WORLDS, "3m", *(WORLDS if any(item.get_closest_marker("slow") for item in session.items) else ())]
        command, folder = [sys.executable, "-c", COMPILE, *names], Path(__file__).parent.parent
        session.compiler = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def pytest_sessionfinish(session):
    if hasattr(session, "compiler"):
        session.compiler.kill()
        session.compiler.wait()


@pytest.fixture
def threads(monkeypatch):
    """Many matches run on threads, as they do outside the tests."""
    monkeypatch.setattr(vector, "SERIAL_BELOW", SERIAL_BELOW)


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
    from scripts import train

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

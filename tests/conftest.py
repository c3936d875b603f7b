"""Fixtures for every test: a real server, empty at the start of each test that asks for it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from redis import Redis

# Test modules are imported one by one (importlib mode), so the helpers beside them need a path,
# and so do the tools that they test.
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).parent))

from batchkv_worker.kv.backends import blas
from parity import few_cases
from parity.few import RUNS_ALL
from support.homes import remove_measurements
from support.redis_server import RedisServer, running_server

# Processes that tests start buffer their output and keep what they compile, as anybody's do. So do
# these: the next run does not compile the tests again.
os.environ.pop("PYTHONUNBUFFERED", None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub for a model's name
if "PYTEST_XDIST_WORKER" in os.environ:  # several at once: a core for each
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
blas.load()  # before any test imports MLX: a BLAS can only be exchanged then

# A shell starts what runs in its background without Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is slow at times; that is no fault of the code.
settings.register_profile(
    "batchkv", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("batchkv")


@pytest.fixture(scope="session", autouse=True)
def home_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is written into the home folder of whoever runs the tests."""
    os.environ.setdefault("BATCHKV_HOME", str(tmp_path_factory.mktemp("home")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of tests that have many. One that is named itself has no others beside it."""
    if RUNS_ALL:
        return
    items[:], left_out = few_cases.split(items)
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """What collecting has made lives as long as the run: no search for garbage reads it again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The process that started all others deletes what they have in common."""
    if not hasattr(session.config, "workerinput"):
        remove_measurements()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """The one server of the test session. Do not stop it: make your own with running_server()."""
    with running_server() as server:
        yield server


@pytest.fixture
def redis_connection(redis_server: RedisServer) -> Iterator[Redis]:
    """A connection to the session's server, which is emptied first."""
    with redis_server.connect() as connection:
        connection.flushall()
        yield connection


@pytest.fixture
def redis_url(redis_server: RedisServer, redis_connection: Redis) -> str:
    """The URL of the session's server, emptied at the start of the test."""
    return redis_server.url

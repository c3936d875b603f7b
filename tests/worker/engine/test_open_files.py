"""The limits of open files: those of the process, not those that mlx_lm sets."""

from __future__ import annotations

import subprocess
import sys

import pytest

BUILD = """
import resource, sys
wanted = (int(sys.argv[1]), int(sys.argv[2]))
resource.setrlimit(resource.RLIMIT_NOFILE, wanted)
from batchkv_worker.engine.factory import build_engine
from batchkv_worker.errors import ModelError
from batchkv_worker.settings import WorkerSettings
try:
    build_engine(WorkerSettings.from_env({"BATCHKV_MODEL": "/nowhere/at/all"}))
except ModelError:
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("before", "after"), [((512, 1024), (1024, 1024)), ((2500, 3000), (2500, 3000))]
)
def test_an_engine_is_built_under_any_limit(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    """A hard limit below mlx_lm's is no fault and stays; a low soft one is raised."""
    command = [sys.executable, "-c", BUILD, *map(str, before)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stdout.strip() == str(after), ran.stderr[-2000:]

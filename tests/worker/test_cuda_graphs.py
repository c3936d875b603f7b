"""MLX launches without CUDA graphs, unless the environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from batchkv_worker.kv.backends import blas
from batchkv_worker.kv.start.machine import machine_facts

NAME = "MLX_USE_CUDA_GRAPHS"
SHOWS = f"""
import os, sys
from batchkv_worker import BatchWorker  # what `rq worker -w` imports
print(os.environ.get({NAME!r}), "mlx.core" in sys.modules)
"""


@pytest.mark.parametrize(("given", "used"), [(None, "0"), ("1", "1"), ("0", "0")])
def test_it_is_chosen_before_mlx_is_loaded(given: str | None, used: str) -> None:
    """MLX reads the variable once. What somebody has set stays."""
    env = {name: value for name, value in os.environ.items() if name != NAME}
    if given is not None:
        env[NAME] = given
    command = [sys.executable, "-c", SHOWS]
    told = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    assert told.split() == [used, "False"]


def test_what_was_measured_with_graphs_is_not_used_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what earlier versions measured, which had them and set no variable."""
    facts = []
    for given in ("0", "1", None):
        if given is None:
            monkeypatch.delenv(NAME)
        else:
            monkeypatch.setenv(NAME, given)
        facts.append(machine_facts(blas.load()))
    assert facts[0] != facts[1] and facts[0] != facts[2]

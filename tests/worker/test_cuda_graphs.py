"""Variables of MLX on CUDA: no graphs, any number of plans; the environment goes before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from batchkv_worker.kv.backends import blas
from batchkv_worker.kv.start.machine import machine_facts

NAME = "MLX_USE_CUDA_GRAPHS"
CHOSEN = {
    NAME: "0",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    "MLX_CUDA_SDPA_CACHE_SIZE": "512",
}
SHOWS = f"""
import os, sys
from batchkv_worker import BatchWorker  # what `rq worker -w` imports
print(*map(os.environ.get, {[*CHOSEN]!r}), "mlx.core" in sys.modules)
"""


@pytest.mark.parametrize("given", [None, "1", "0"])
def test_they_are_chosen_before_mlx_is_loaded(given: str | None) -> None:
    """MLX reads each variable once. What somebody has set stays."""
    env = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    if given is not None:
        env |= dict.fromkeys(CHOSEN, given)
    command = [sys.executable, "-c", SHOWS]
    told = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    assert told.split() == [given or value for value in CHOSEN.values()] + ["False"]


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


def test_what_was_measured_is_used_whatever_plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before these variables were set. Plans change the time of a shape's first use alone."""
    facts = machine_facts(blas.load())
    for name in (*CHOSEN,):
        if name != NAME:
            monkeypatch.delenv(name)
    assert machine_facts(blas.load()) == facts

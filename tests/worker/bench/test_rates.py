"""Bandwidth is that of the memory, whatever it costs to start an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.bench import rates

SIDE = 64
START, EACH = 1.0, 1.0  # seconds: a start costs as much as one reading


@pytest.mark.parametrize("operation", ["read", "copy"])
def test_the_start_of_an_evaluation_is_no_part_of_a_gpus_bandwidth(
    monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """A GPU whose evaluation costs a start, and as much again for each pass over the matrix."""

    def seconds(run: Callable[[], Any]) -> float:
        found = run()
        is_read = isinstance(found, list)
        # Each copy adds 1 to numbers whose mean is 0.
        passes = len(found) if is_read else round(mx.mean(found).item())
        return START + passes * EACH if is_read == (operation == "read") else 1e9

    monkeypatch.setattr(rates, "_time", seconds)
    monkeypatch.setattr(rates.device, "kind", lambda: "metal")
    monkeypatch.setattr(rates, "READ_SIDE", {True: SIDE})
    monkeypatch.setattr(rates, "SIDE", {True: SIDE})
    num_bytes = SIDE * SIDE * 4 * (1 if operation == "read" else 2)
    found = rates.measure_rates(mx.float32).bytes_per_second
    assert 0.9 * num_bytes / EACH < found <= num_bytes / EACH

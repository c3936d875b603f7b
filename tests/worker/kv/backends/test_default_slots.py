"""How many rows decode at once where nobody says."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kv.backends import default_slots as module
from batchkv_worker.kv.backends.default_slots import default_slots, slots_of_this_machine

GIB = 2**30


@pytest.mark.parametrize(
    ("chip", "gib", "slots"),
    [
        ("Apple M1", 8, 16),
        ("Apple M4", 16, 32),
        ("Apple M5", 16, 32),
        ("Apple M5", 8, 16),
        ("Apple M4", 24, 32),
        ("Apple M2 Max", 96, 32),
        ("Apple M4 Max", 128, 32),
        ("Apple M1 Ultra", 64, 64),
        ("Apple M3 Ultra", 512, 64),
        ("Apple M5", 24, 64),
        ("Apple M5 Max", 128, 64),
        ("Apple M10 Pro", 48, 64),
        ("Apple Paravirtual device", 64, 32),
        ("Apple A18 Pro", 64, 32),
        ("", 64, 32),
        ("Apple M4 Max", 0, 32),  # memory of unknown size
    ],
)
def test_slots_follow_the_chip_and_the_memory(chip: str, gib: int, slots: int) -> None:
    """By generation and memory: an M5 and an Ultra have 64 rows if they have more than 16 GB."""
    assert default_slots("metal", chip, gib * GIB) == slots


def test_a_cpu_has_the_usual_number() -> None:
    """Neither a name nor a memory changes it."""
    assert default_slots("cpu") == default_slots("cpu", "Apple M5", 512 * GIB) == 32


@pytest.mark.parametrize(("gib", "slots"), [(0, 32), (12, 32), (16, 32), (24, 64), (80, 64)])
def test_cuda_has_more_rows_where_its_memory_has_room(gib: int, slots: int) -> None:
    """The name does not matter; memory of unknown size is taken for little."""
    assert default_slots("cuda", "NVIDIA H100 80GB HBM3", gib * GIB) == slots


@pytest.mark.parametrize(
    ("kind", "info", "slots"),
    [
        ("metal", {"device_name": "Apple M3 Ultra", "memory_size": 96 * GIB}, 64),
        ("metal", {"device_name": "Apple M2", "memory_size": 8 * GIB}, 16),
        ("metal", {}, 32),
        ("metal", {"device_name": "Apple M2", "memory_size": "plenty"}, 32),
        ("cuda", {"device_name": "NVIDIA H100 80GB HBM3", "total_memory": 80 * GIB}, 64),
        ("cuda", {"device_name": "NVIDIA A2", "total_memory": 16 * GIB}, 32),
        ("cuda", {}, 32),
    ],
)
def test_the_machine_is_asked_once_what_it_is(
    monkeypatch: pytest.MonkeyPatch, kind: str, info: dict[str, Any], slots: int
) -> None:
    """MLX names chip and memory; what it does not name changes nothing."""
    monkeypatch.setattr(module.device, "kind", lambda: kind)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert slots_of_this_machine() == slots


def test_here_it_is_a_cpu() -> None:
    """A CPU has the usual number."""
    if module.device.kind() == "cpu":
        assert slots_of_this_machine() == 32

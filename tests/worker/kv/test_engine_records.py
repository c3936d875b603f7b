"""Whole engines whose decode slots keep records give the tokens of those that keep parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kv.kernels.decode import DecodeKernels
from batchkv_worker.kv.kernels.layout import RecordLayout
from batchkv_worker.kv.layers.record_slots import RecordSlots
from batchkv_worker.kv.slots import prefix_pool
from worker.kv.crowd import Crowd, random_prompt
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler
from worker.kv.record_backends import WithRecords, x86_with_records

LENGTHS = (3, 40, 17, 90, 5, 33)
PREFIX = random_prompt(1, 520)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> dict[str, list[int]]:
    """All but two begin with the same tokens, of which two blocks are shared."""
    return {
        str(index): (PREFIX if index > 1 else []) + random_prompt(index + 5, length)
        for index, length in enumerate(lengths)
    }


def crowd_of(family: str, scheme: str, backend: Any = None, **changes: Any) -> Crowd:
    """Without a backend, slots keep parts."""
    path = "folded" if backend is None else "kernel"
    given: dict[str, Any] = {} if backend is None else {"backend": backend}
    given |= {"path": path, "group_cost": 16, "prefix_cells": 1}
    found = Crowd(family, scheme=scheme, **given, **changes)
    layers = found.engine._slots.layers
    assert any(isinstance(layer, RecordSlots) for layer in layers) is (backend is not None)
    return found


def answers(crowd: Crowd, rows: dict[str, list[int]]) -> dict[str, list[int]]:
    """Of all rows, which share a prefix if the model takes shared prefixes."""
    for job_id, prompt in rows.items():
        crowd.add(job_id, prompt)
    has_shared = False
    while not crowd.engine.is_idle:
        crowd.step()
        has_shared |= bool(crowd.engine._slots.layouts.prefixes)
    assert has_shared is crowd.engine.plan.shares
    return {job_id: crowd.tokens(job_id) for job_id in rows}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("llama", "affine8"),
        ("gpt_oss", "turbo3"),  # windows and sinks
        ("gemma3_text", "k8v4"),
        ("qwen3_next", "float"),  # and states
        ("qwen3", "affine4,last=float"),
    ],
)
def test_tokens_are_those_of_slots_with_parts(family: str, scheme: str) -> None:
    """Rows of unequal length, with shared prefixes where the model takes them."""
    wanted = answers(crowd_of(family, scheme), prompts())
    assert answers(crowd_of(family, scheme, WithRecords()), prompts()) == wanted


@pytest.mark.parametrize("start_cells", [0, 2**20])
def test_prefixes_in_the_pool_or_by_themselves_give_the_same(
    start_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of prefixes, and rows without; and both ways in turns, as rows come and go."""
    rows = prompts() | {
        str(index): PREFIX + random_prompt(9, 300) + random_prompt(index, 7 + index)
        for index in (7, 8, 9)
    }
    wanted = answers(crowd_of("llama", "affine8", slots=8), rows)
    monkeypatch.setattr(prefix_pool, "START_CELLS", start_cells)
    crowd = crowd_of("llama", "affine8", WithRecords(), slots=8)
    used: set[bool] = set()
    views = crowd.engine._slots._views
    real = views.view

    def watched(layouts: Any) -> Any:
        if start_cells:
            monkeypatch.setattr(prefix_pool, "START_CELLS", start_cells * (len(used) % 2))
        found = real(layouts)
        used.add(found.spans[None].pool is not None)
        return found

    monkeypatch.setattr(views, "view", watched)
    assert answers(crowd, rows) == wanted
    assert (True in used) is (start_cells > 0)


def test_the_pool_goes_with_the_last_row_that_reads_it() -> None:
    """Slots hold no more bytes than are counted, also when no step follows."""
    crowd = crowd_of("llama", "affine8", WithRecords())
    layouts, costs = crowd.engine._slots.layouts, crowd.engine._scheduler.budget.costs
    most = 0
    for job_id, prompt in prompts().items():
        crowd.add(job_id, prompt)
    while not crowd.engine.is_idle:
        crowd.step()
        pools = [layer._pool for layer in crowd.engine._slots.layers]
        most = max(most, sum(pool.nbytes for pool in pools if pool is not None))
        assert crowd.engine.kv_bytes <= layouts.bytes_held(costs)
    assert most


def test_a_cpu_starts_each_layer_with_records_too() -> None:
    """Buffers are written in place there while later layers are still built."""
    wanted = answers(crowd_of("llama", "affine8"), prompts())
    assert answers(crowd_of("llama", "affine8", x86_with_records()), prompts()) == wanted


@pytest.mark.parametrize("prefix_bytes", [2**24, 0])
def test_rows_that_leave_their_slots_come_back(prefix_bytes: int) -> None:
    """What is parked are parts, and they are copied back as records; or all is computed again."""
    long = {str(index): random_prompt(index, 60 + index) for index in range(3)}
    wanted = crowd_of("llama", "affine8").answers(long)
    crowd = crowd_of("llama", "affine8", WithRecords(), prefix_bytes=prefix_bytes)
    for job_id, prompt in long.items():
        crowd.add(job_id, prompt)
    while not crowd.engine._rows:
        crowd.step()
    crowd.step(2)
    crowd.engine._read_in_flight()
    rows = crowd.engine._decode_rows
    rows._preempt([rows.by_slot[0], rows.by_slot[2]])
    crowd.drain()
    assert rows.num_preempted == 2
    assert {job_id: crowd.tokens(job_id) for job_id in long} == wanted


@pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")
def test_the_kernels_themselves_serve_an_engine(tmp_path: Path) -> None:
    """The bodies that GPUs compile, compiled as C++, pack and attend for every row."""
    launch = CppLaunch(tmp_path)

    def make(layout: RecordLayout, lines: int) -> Any:
        return DecodeKernels.of(layout, lines, launch)

    few = prompts((3, 15, 9, 12, 2))
    wanted = answers(crowd_of("llama", "affine8"), few)
    crowd = crowd_of("llama", "affine8", WithRecords(make=make))
    assert answers(crowd, few) == wanted
    assert mx.default_device() == mx.Device(mx.cpu)

"""The kernel that draws tokens, compiled for a CPU, draws those that MLX's operations draw."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from batchkv_worker.engine.tokens.sampling import FewTokens, sample
from batchkv_worker.kv.kernels.draw import DRAW, DrawKernel
from batchkv_worker.sequence import Generation, Sequence
from parity.few import few
from worker.kv.kernels.cpp_launch import CppLaunch, is_there_a_compiler

pytestmark = pytest.mark.skipif(not is_there_a_compiler(), reason="there is no C++ compiler")
ASKED: list[dict[str, Any]] = [
    {"top_k": 20, "top_p": 0.95, "temperature": 0.7},
    {"top_k": 1, "temperature": 1.0},
    {"top_k": 64, "min_p": 0.05, "temperature": 1.3},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.1, "temperature": 1.0},
    {"top_k": 100, "temperature": 1.0},
    {"top_k": 20, "top_p": 0.0, "temperature": 1.0},
    {"temperature": 0.0},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("draw")


def numbers(kind: str, rows: int, total: int) -> mx.array:
    """Logits; ``few``: most tokens are masked, ``equal``: half of them are the largest."""
    found = 3 * mx.random.normal((rows, total))
    if kind == "equal":
        return (mx.random.uniform(shape=found.shape) < 0.5).astype(mx.float32)
    if kind == "few":
        return mx.where(mx.random.uniform(shape=found.shape) < 6 / total, found, -math.inf)
    return mx.round(2 * found) / 2 if kind == "ties" else found


def rows_of(count: int, seed: int) -> list[Sequence | None]:
    choose = random.Random(seed)
    rows: list[Sequence | None] = [None]
    for place in range(count - 1):
        asked = Generation(max_tokens=9, seed=choose.randrange(2**40), **ASKED[place % len(ASKED)])
        rows.append(Sequence("x", [1], asked))
    return rows


@pytest.mark.few(4)
@pytest.mark.parametrize("total", [7, 500, 5000])
@pytest.mark.parametrize("kind", ["any", "ties", "equal", "few"])
def test_tokens_are_those_of_operations(kind: str, total: int, folder: Path) -> None:
    """For rows with filters, ties and masks; beside rows that draw otherwise, and free slots."""
    mx.random.seed(total)
    launch = CppLaunch(folder)
    few = FewTokens(DrawKernel(launch))
    rows, inputs = rows_of(24, total), mx.zeros((24,), mx.int32)
    for _ in range(3):
        logits = numbers(kind, 24, total)
        found = sample(logits, inputs, rows, few=few).tokens
        assert mx.array_equal(found, sample(logits, inputs, rows).tokens)
    assert launch.counts == {DRAW.name: 3}


def assert_same(logits: mx.array, rows: list[Sequence | None], folder: Path) -> None:
    """Two draws in a row are the kernel's: after a wrong first one, it is not used again."""
    launch, inputs = CppLaunch(folder), mx.zeros((len(rows),), mx.int32)
    few, wanted = FewTokens(DrawKernel(launch)), sample(logits, inputs, rows).tokens
    for _ in range(2):
        assert mx.array_equal(sample(logits, inputs, rows, few=few).tokens, wanted)
    assert launch.counts == {DRAW.name: 2}


def test_numbers_in_order(folder: Path) -> None:
    """Falling, rising, or all equal: of more candidates than have room, the first are taken."""
    falling = mx.array(np.repeat(np.arange(4000, 0, -1, dtype=np.float32) / 9, 3))[None]
    rising = falling[:, ::-1]
    both = mx.concatenate([falling, rising, mx.zeros_like(falling)] * 8)
    rows: list[Sequence | None] = [
        Sequence("x", [1], Generation(max_tokens=9, seed=place, temperature=9.0, top_k=50))
        for place in range(len(both))
    ]
    assert_same(both, rows, folder)


def test_both_zeros_are_equal(folder: Path) -> None:
    """The first of them is the likelier one, whatever its sign."""
    zeros = mx.array([[0.0, -0.0] * 40, [-0.0, 0.0] * 40])
    rows: list[Sequence | None] = [
        Sequence("x", [1], Generation(max_tokens=9, seed=place, temperature=1.0, top_k=3))
        for place in range(64)
    ]
    assert_same(mx.concatenate([zeros] * 32), rows, folder)


FAULTS = (
    ("key == own_key && i < thread", "key == own_key && FAULT(0) == 0 && i < thread"),
    ("rank == top_k - 1", "rank == top_k - 1 - FAULT(1)"),
    ("number - highest >= parameters[3]", "(FAULT(2) || number - highest >= parameters[3])"),
    ("above < parameters[1]", "(FAULT(3) || above < parameters[1])"),
    ("/ parameters[0]", "/ (FAULT(4) ? 1.0f : parameters[0])"),
    ("pool[INDEXES + other] < index", "(pool[INDEXES + other] < index) != FAULT(5)"),
    ("key == least && num_before", "key == least && !FAULT(6) && num_before"),
    ("passed <= parameters[4]", "passed <= !FAULT(7) * parameters[4]"),
)


@pytest.mark.parametrize("fault", few(range(len(FAULTS)), 3))
def test_planted_faults_are_seen_at_the_first_draw(
    fault: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The row gets the right token, a warning says why, and the kernel is not used again."""
    mx.random.seed(fault)
    launch = CppLaunch(folder, FAULTS)
    rows, inputs = rows_of(96, 3), mx.zeros((96,), mx.int32)
    parts = [numbers(kind, 48, 2000) for kind in ("ties", "equal")]
    logits = mx.concatenate(parts)
    wanted = sample(logits, inputs, rows).tokens
    sound, faulty = FewTokens(DrawKernel(launch)), replace(launch, fault=fault, counts={})
    assert mx.array_equal(sample(logits, inputs, rows, few=sound).tokens, wanted)
    assert not caplog.text
    few = FewTokens(DrawKernel(faulty))
    for _ in range(2):
        assert mx.array_equal(sample(logits, inputs, rows, few=few).tokens, wanted)
    assert "drawn without their kernel" in caplog.text and faulty.counts[DRAW.name] == 1


def test_a_kernel_that_does_not_compile_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """As MLX says it: an error when the result is computed."""

    def fails(*_: object) -> Any:
        raise RuntimeError("no such word")

    rows, inputs = rows_of(6, 1), mx.zeros((6,), mx.int32)
    logits = numbers("any", 6, 300)
    found = sample(logits, inputs, rows, few=FewTokens(DrawKernel(fails)))
    assert mx.array_equal(found.tokens, sample(logits, inputs, rows).tokens)
    assert "no such word" in caplog.text

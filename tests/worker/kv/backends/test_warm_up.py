"""What the launching thread computes before there are rows: which shapes, where, and until when."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from batchkv_worker.kv.backends import launching, warm_up
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.cpu.backend import CpuBackend
from batchkv_worker.kv.backends.cuda.backend import CudaBackend
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.launching import AtOnce, Beside, choose
from batchkv_worker.kv.backends.metal.backend import MetalBackend
from batchkv_worker.kv.backends.warm_up import (
    EarlyLaunches,
    Heads,
    chunk_shapes,
    heads_of,
    shapes_behind,
)
from worker.engine.test_launches import SECONDS, beside_others, threads

MLX_KEEPS = 256  # plans of attention, by itself
ARGS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@dataclass(frozen=True, eq=False)
class LikeCuda(GenericBackend):
    launches_beside: bool = True

    plans_attention = CudaBackend.plans_attention


def model(**args: Any) -> Any:
    return SimpleNamespace(args=SimpleNamespace(**args))


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never comes true"
        time.sleep(0.001)


def default_stream() -> Any:
    return mx.default_stream(mx.default_device())


def a_launch(launches: Any) -> float:
    """The sum that a launch gives: 300."""
    array = mx.full((100,), 3.0) @ mx.ones((100, 1))
    launches.start(array)
    launches.join()
    return float(array.sum().item())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of each call of MLX's attention: shapes and strides, the mask, and the scale."""
    found: list[Any] = []
    real = mx.fast.scaled_dot_product_attention

    def watched(*arrays: mx.array, mask: Any, **named: Any) -> mx.array:
        mx.eval(arrays)
        views = [np.array(one, copy=False) for one in arrays]
        found.append(([(one.shape, one.strides) for one in views], mask, named["scale"]))
        return real(*arrays, mask=mask, **named)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    return found


# -- which shapes


def test_the_usual_shapes_of_chunks_come_first() -> None:
    """Those that were seen on an H100 are among them. None comes twice. MLX keeps all plans."""
    seen = {(2, 1024), (4, 512), (4, 768), (8, 256), (8, 384), (16, 128), (16, 256), (32, 128)}
    found = chunk_shapes(CudaBackend(), 8 * 128)
    assert {(1, 2048), *seen} <= set(found)
    assert found[0] == (1, 2048), "the first chunk of every long prompt"
    assert len(set(found)) == len(found) < MLX_KEEPS


def test_attention_leaves_these_shapes_as_they_are() -> None:
    """A shape that attention would pad again is one that no plan is ever asked for."""
    backend = CudaBackend()
    for rows, tokens in chunk_shapes(backend, 8 * 128):
        assert backend.padded_chunk(rows, tokens, tokens, 8 * 128) == (rows, 0)
        assert rows * tokens <= 2 * backend.largest_chunk, "no more memory than a chunk takes"


def test_the_usual_shapes_behind_prefixes_follow() -> None:
    """Most of those of 27 groups of 40 prompts, as the engine asks for them, are among them."""
    groups = {(64, 128, 704), (32, 128, 704), (64, 128, 768), (32, 128, 768), (64, 64, 512)}
    groups |= {(16, 128, 768), (64, 64, 640), (32, 64, 512), (32, 64, 768), (64, 128, 576)}
    backend = CudaBackend()
    found = shapes_behind(backend, 8 * 128)
    assert groups <= set(found) and len(set(found)) == len(found)
    first = chunk_shapes(backend, 8 * 128)
    assert len(found) + len(first) < MLX_KEEPS
    for numbers in (8 * 128, 64 * 128):
        for shape in shapes_behind(backend, numbers):
            assert backend.attended_shape(*shape, numbers) == shape, "attention would pad it again"
            assert 2 * shape[0] * shape[2] * numbers <= backend.most_joined, "it would be cut"


def test_the_call_is_that_of_a_chunk_behind_a_prefix(calls: list[Any]) -> None:
    queries = mx.random.normal((36, 40, 4, 16)).transpose(0, 2, 1, 3)
    keys, values = (mx.random.normal((36, 2, 608 + 40, 16)) for _ in range(2))
    CudaBackend().attention(queries, keys, values, 0.25, "causal", None)
    (rows, _, length, _), columns = calls[0][0][0][0], calls[0][0][1][0][2]
    shape = rows, length, columns
    assert shape == (64, 128, 704) and shape in shapes_behind(CudaBackend(), 2 * 16)
    warm_up._attend(Heads(4, 2, 16), mx.float32, *shape)
    assert calls[1] == calls[0]


def test_the_call_is_that_of_a_chunk(calls: list[Any]) -> None:
    """Shapes, strides and mask find MLX's plan. A chunk's rows with pads are in one piece."""
    rows, tokens = 10, 190  # of 2,048; the width is 192
    queries, keys, values = (
        mx.random.normal((rows, 192, heads, 16)).transpose(0, 2, 1, 3) for heads in (4, 2, 2)
    )
    CudaBackend().attention(queries, keys, values, 0.25, "causal", None)
    shape = calls[0][0][0][0][0], calls[0][0][0][0][2]
    assert 10 * tokens < 2048 and shape == (16, 256)
    assert shape in chunk_shapes(CudaBackend(), 2 * 16)
    warm_up._attend(Heads(4, 2, 16), mx.float32, *shape, 256)
    assert calls[1][:2] == ([*calls[0][0][:3]], "causal") and calls[1] == (*calls[0][:2], 0.25)


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (ARGS, Heads(4, 2, 16)),
        ({**ARGS, "head_dim": None, "hidden_size": 96}, Heads(4, 2, 24)),
        ({**ARGS, "num_key_value_heads": None}, None),
        ({**ARGS, "num_attention_heads": [4, 8]}, None),
        ({**ARGS, "head_dim": None}, None),
        ({**ARGS, "head_dim": "16", "hidden_size": -1}, None),
        ({}, None),
    ],
)
def test_heads_are_those_of_the_arguments(args: dict[str, Any], wanted: Heads | None) -> None:
    """A model that does not say how many it has is not prepared for."""
    assert heads_of(model(**args)) == wanted


def test_attention_that_mlx_does_not_plan_is_left_out() -> None:
    """Numbers of 32 bits, and large heads: its other kernels would take memory for scores."""
    works = partial(warm_up.works_for, CudaBackend())
    num_shapes = len(chunk_shapes(CudaBackend(), 32)) + len(shapes_behind(CudaBackend(), 32))
    assert len(works(model(**ARGS), mx.bfloat16)) == 1 + num_shapes
    assert not works(model(**ARGS), mx.float32)
    for size in (192, 12):
        assert not works(model(**{**ARGS, "head_dim": size}), mx.float16)
    assert not works(SimpleNamespace(), mx.bfloat16) and not works(None, mx.bfloat16)


# -- where, and until when


def test_plans_are_made_while_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launching thread on a stream of its own; the engine's thread goes on with its own."""
    shapes = [(2, 64), (4, 32), (8, 16)]
    monkeypatch.setattr(warm_up, "chunk_shapes", lambda *_: shapes[:2])
    monkeypatch.setattr(warm_up, "shapes_behind", lambda *_: [(8, 16, 48)])
    seen: list[tuple[str, Any, Any]] = []
    real = mx.fast.scaled_dot_product_attention

    def watched(*arrays: mx.array, **named: Any) -> mx.array:
        seen.append((threading.current_thread().name, default_stream(), arrays[0].shape))
        return real(*arrays, **named)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)

    def run() -> Any:
        early = EarlyLaunches(LikeCuda())
        early.begin(model(**ARGS), mx.bfloat16)
        weights = mx.ones((64, 64))
        while len(seen) < len(shapes):  # reading takes as long
            weights = weights @ mx.eye(64)
            mx.eval(weights)
        launches = early.take(is_wanted=True)
        assert isinstance(launches, Beside) and threads() == ["batchkv-launch"]
        assert early.take(is_wanted=True) is None, "the next engine makes its own"
        early.close()  # which is not the engine's
        found = weights.sum().item(), a_launch(launches), default_stream(), launches._stream
        launches.close()
        return found

    total, launched, shared, given = beside_others(run)
    assert (total, launched) == (64 * 64, 300) and given == shared
    assert [(name, shape[0], shape[2]) for name, _, shape in seen] == [
        ("batchkv-launch", *one) for one in shapes
    ]
    assert len({str(stream) for _, stream, _ in seen}) == 1 and seen[0][1] != shared
    assert not threads()


class Works:
    """The first one lasts until ``end`` is set."""

    def __init__(self, count: int = 5) -> None:
        self.begun, self.end = threading.Event(), threading.Event()
        self.done: list[int] = []
        self.all = [partial(self._do, number) for number in range(count)]

    def _do(self, number: int) -> None:
        self.begun.set()
        assert self.end.wait(SECONDS)
        mx.eval(mx.zeros((3,)) + number)
        self.done.append(number)


def warming(works: Works) -> Beside:
    """A thread that does the first of these works."""
    launches = choose(is_beside=True)
    assert isinstance(launches, Beside)
    launches.warm_up(works.all)
    assert works.begun.wait(SECONDS)
    return launches


def test_a_launch_waits_for_the_work_at_hand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed on the shared stream, and no other work is begun, then or later."""
    streams: list[Any] = []
    real = mx.async_eval

    def noting(*arrays: Any) -> None:
        streams.append(default_stream())
        real(*arrays)

    works = Works()

    def run() -> float:
        launches = warming(works)
        launches.join()  # nothing is launched: this waits for no work
        assert not works.done
        monkeypatch.setattr(mx, "async_eval", noting)
        threading.Timer(0.05, works.end.set).start()
        found = a_launch(launches)
        assert works.done == [0] and streams == [default_stream()]
        assert a_launch(launches) == found
        launches.close()
        return found

    assert beside_others(run) == 300
    assert works.done == [0] and not threads()


def test_a_warm_up_ends_without_a_launch() -> None:
    """The work at hand is waited for, no other is begun, and launches come later."""
    works = Works()

    def run() -> None:
        launches = warming(works)
        threading.Timer(0.05, works.end.set).start()
        launches.end_warm_up()
        assert works.done == [0]
        assert a_launch(launches) == a_launch(launches)
        launches.close()

    beside_others(run)
    assert works.done == [0] and not threads()


def test_the_end_waits_for_the_work_at_hand_alone() -> None:
    works = Works()

    def run() -> None:
        launches = warming(works)
        threading.Timer(0.05, works.end.set).start()
        launches.close()
        assert not threads()

    beside_others(run)
    assert works.done == [0]


@pytest.mark.parametrize(
    "fault",
    [RuntimeError("[malloc] Unable to allocate 9 bytes."), MemoryError(), ValueError("x")],
)
@pytest.mark.parametrize("place", ["a work", "the stream"])
def test_a_fault_changes_nothing(
    fault: Exception,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged. Nothing more is prepared, and what is launched has its results."""
    caplog.set_level(logging.DEBUG, "batchkv.engine")
    works = Works()
    works.end.set()

    def fail(*_: Any) -> Any:
        raise fault

    def run() -> float:
        if place == "the stream":
            monkeypatch.setattr(launching.mx, "new_stream", fail)
        launches = choose(is_beside=True)
        assert isinstance(launches, Beside)
        launches.warm_up([works.all[0], fail, works.all[1]])
        until(lambda: "works" in caplog.text)
        found = a_launch(launches)
        launches.close()
        return found

    assert beside_others(run) == 300
    assert works.done == ([0] if place == "a work" else [])
    assert "begins without all plans" in caplog.text and not threads()


def test_a_thread_that_cannot_launch_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever MLX raises at its trial: the engine tries again, as without it."""
    for fault in (RuntimeError("[gpu] failed"), MemoryError(), ValueError("x")):

        def failing(*_: Any, fault: Exception = fault) -> None:
            raise fault

        def run(failing: Any = failing) -> None:
            early = EarlyLaunches(LikeCuda())
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launching.mx, "async_eval", failing)
                early.begin(model(**ARGS), mx.bfloat16)
            assert early.take(is_wanted=True) is None and not threads()

        beside_others(run)
    # Without a shared stream MLX refuses another thread.
    early = EarlyLaunches(LikeCuda())
    early.begin(model(**ARGS), mx.bfloat16)
    assert early.take(is_wanted=True) is None and not threads()
    assert isinstance(choose(is_beside=True), AtOnce)


@pytest.mark.parametrize("is_wanted", [False, None])
def test_a_thread_that_no_engine_takes_ends(
    is_wanted: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot use it, or none at all."""
    works = Works()
    works.end.set()
    monkeypatch.setattr(warm_up, "works_for", lambda *_: works.all)

    def run() -> None:
        early = EarlyLaunches(LikeCuda())
        early.begin(model(), mx.bfloat16)
        assert threads()
        if is_wanted is None:
            early.close()
        else:
            assert early.take(is_wanted=is_wanted) is None
        assert not threads()

    beside_others(run)


@pytest.mark.parametrize("backend", [CpuBackend(), MetalBackend(), GenericBackend()])
def test_other_devices_have_no_such_thread(backend: Backend) -> None:
    def run() -> None:
        early = EarlyLaunches(backend)
        early.begin(model(**ARGS), mx.bfloat16)
        assert not threads() and early.take(is_wanted=True) is None

    beside_others(run)


def test_a_model_without_such_arguments_has_no_such_thread() -> None:
    def run() -> None:
        early = EarlyLaunches(LikeCuda())
        early.begin(model(hidden_size=64), mx.bfloat16)
        early.begin(model(**ARGS), mx.float32)
        assert not threads() and early.take(is_wanted=True) is None

    beside_others(run)

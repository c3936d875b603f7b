"""The device's arithmetic against the host's: right here, and found where it is planted wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from batchkv_producer.doctor.contract import Level
from batchkv_worker.doctor import arithmetic
from batchkv_worker.doctor.arithmetic import (
    Compared,
    compare_products,
    compare_quantized,
    compare_sorting,
    largest_error,
)
from batchkv_worker.doctor.device import (
    device_verdict,
    judge_compared,
    judge_speed,
    quantization_verdict,
)
from batchkv_worker.kv.backends import device as backend_device

Fault = Callable[[Callable[..., Any]], Callable[..., Any]]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_products_of_this_device_are_right(dtype: mx.Dtype) -> None:
    """All shapes; in float32 to the last bit."""
    assert all(each.is_good for each in compare_products(dtype))


def test_quantization_and_sorting_of_this_device_are_right() -> None:
    """Packed, unpacked, multiplied while packed; sorted, partitioned, summed."""
    assert all(each.is_good for each in [*compare_quantized(8), *compare_sorting()])


def zeros_in_tails(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """As a split kernel that launches no group for the columns beyond a multiple of 64."""

    def product(left: mx.array, *rest: Any, **named: Any) -> mx.array:
        out = original(left, *rest, **named)
        whole = out.shape[-1] // 64 * 64
        return mx.where(mx.arange(out.shape[-1]) < whole, out, mx.zeros_like(out))

    return product


def no_number(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """One number of the result is none."""

    def product(*args: Any, **named: Any) -> mx.array:
        out = original(*args, **named)
        return mx.where(mx.arange(out.shape[-1]) == 3, float("nan"), out)

    return product


def slightly_off(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A tenth too much: fast kernels that lose a part of a sum do that."""
    return lambda *args, **named: original(*args, **named) * 1.1


@pytest.mark.parametrize("fault", [zeros_in_tails, no_number, slightly_off])
@pytest.mark.parametrize(
    ("name", "compare"),
    [
        ("matmul", lambda: compare_products(mx.float32)),
        ("quantized_matmul", lambda: compare_quantized(8)),
    ],
)
def test_a_wrong_product_is_found(
    name: str,
    compare: Callable[[], list[Compared]],
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Zeros behind the last 64 columns, no number, a tenth too much."""
    monkeypatch.setattr(arithmetic, "PACKED", ((100, (1, 4)),))
    monkeypatch.setattr(arithmetic, "PRODUCTS", ((4, 110, 65), (1, 64, 40)))
    monkeypatch.setattr(mx, name, fault(getattr(mx, name)))
    verdict = judge_compared(compare())
    assert verdict.level is Level.FAIL and "do not trust" in verdict.todo


def test_a_wrong_unpacking_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that come back as zeros."""
    monkeypatch.setattr(arithmetic, "PACKED", ((100, (1,)),))
    right = mx.dequantize
    monkeypatch.setattr(mx, "dequantize", lambda *a, **k: mx.zeros_like(right(*a, **k)))
    assert not all(each.is_good for each in compare_quantized(4))


@pytest.mark.parametrize("name", ["argsort", "argpartition", "argmax", "cumsum"])
def test_a_wrong_order_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort that leaves the ends unsorted, a partition of others, a sum that starts late."""
    monkeypatch.setattr(arithmetic, "LONG_SORT", 20_000)
    right = getattr(mx, name)

    def wrong(array: mx.array, **named: Any) -> mx.array:
        out = right(array, **named)
        return mx.zeros_like(out) + 17 if name == "argmax" else mx.roll(out, 1000)

    monkeypatch.setattr(mx, name, wrong)
    assert not all(each.is_good for each in compare_sorting())


def test_a_kernel_that_is_missing_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend without a kernel says so, and the engine takes another path."""

    def refuse(*_: Any, **__: Any) -> mx.array:
        raise RuntimeError("[quantized_matmul] not implemented for this shape")

    monkeypatch.setattr(mx, "quantized_matmul", refuse)
    assert all(each.is_good for each in compare_quantized(8))


def test_cuda_is_not_asked_for_what_it_compiles_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few rows with keys are in MLX's library. Each other one takes 23 s and more."""
    asked = []
    right = mx.quantized_matmul

    def noting(x: mx.array, *parts: mx.array, **named: Any) -> mx.array:
        asked.append((x.shape[0], named["transpose"]))
        return right(x, *parts, **named)

    monkeypatch.setattr(mx, "quantized_matmul", noting)
    monkeypatch.setattr(backend_device, "kind", lambda: "cuda")
    assert quantization_verdict().level == "ok"
    assert sorted(set(asked)) == [(1, True), (4, True)]
    asked.clear()
    monkeypatch.setattr(backend_device, "kind", lambda: "metal")
    assert quantization_verdict().level == "ok"
    assert set(asked) >= {(33, True), (33, False), (1, False)}


def test_differences_are_shares_of_the_largest_number() -> None:
    """No number, and another shape, are infinitely far."""
    assert largest_error([[1.0, 2.0]], [[1.0, 4.0]]) == 0.5
    assert largest_error([[float("nan")]], [[1.0]]) == float("inf")
    assert largest_error([[1.0]], [[1.0, 2.0]]) == float("inf")
    assert arithmetic.product([[1.0, 2.0]], [[3.0], [4.0]]) == [[11.0]]


@pytest.mark.parametrize(
    ("kind", "phrase", "gflops", "level"),
    [
        ("cpu", "BLAS: OpenBLAS (libopenblas.so.0)", 160.0, Level.OK),
        ("cpu", "BLAS: MLX's reference BLAS, about 50 times slower", 5.0, Level.WARN),
        ("cpu", "BLAS: OpenBLAS (libopenblas.so.0)", 3.0, Level.WARN),
        ("cuda", "BLAS: OpenBLAS (libopenblas.so.0)", 3.0, Level.OK),
    ],
)
def test_speeds_are_judged(kind: str, phrase: str, gflops: float, level: Level) -> None:
    """A slow BLAS on a CPU is named with the package that mends it."""
    verdict = judge_speed(kind, phrase, gflops)
    assert verdict.level is level
    assert ("libopenblas0-pthread" in verdict.todo) == ("reference" in phrase)


def test_the_device_of_this_machine_is_named() -> None:
    """The kind and the name, as MLX says them."""
    assert "MLX computes on" in device_verdict().found

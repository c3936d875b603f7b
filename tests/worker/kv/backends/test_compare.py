"""How far rounding lets two ways to compute the same differ."""

from __future__ import annotations

import mlx.core as mx
import pytest

from batchkv_worker.kv.backends.compare import (
    are_close,
    difference,
    model_tolerance,
    path_tolerance,
    rounds_float32,
)


@pytest.mark.parametrize(
    ("architecture", "environ", "rounds"),
    [
        ("applegpu_g13s", {}, False),  # M1
        ("applegpu_g16d", {}, False),  # M4 Max
        ("applegpu_g17s", {}, True),  # M5
        ("applegpu_g17p", {"MLX_ENABLE_TF32": "1"}, True),
        ("applegpu_g18g", {}, True),
        ("applegpu_g17s", {"MLX_ENABLE_TF32": "0"}, False),
        ("applegpu_g17s", {"MLX_ENABLE_TF32": "no"}, False),  # C reads a 0
        ("sm_75", {}, False),
        ("sm_90", {}, True),
        ("sm_90a", {}, True),
        ("x86_64", {}, False),
        ("arm64", {}, False),
        ("", {}, False),
    ],
)
def test_which_devices_round_float32(
    architecture: str, environ: dict[str, str], rounds: bool
) -> None:
    """Apple's from the M5 on, NVIDIA's from Ampere on, unless MLX is asked not to."""
    assert rounds_float32(architecture, environ) is rounds


def test_tolerances_follow_the_rounding() -> None:
    """Where products are rounded, float32 may differ as float16 does; half precision is as ever."""
    assert model_tolerance(mx.float32, is_rounded=False) == 0.005
    assert model_tolerance(mx.float32, is_rounded=True) == 0.02
    for dtype in (mx.float16, mx.bfloat16):
        assert len({model_tolerance(dtype, is_rounded=is_rounded) for is_rounded in (0, 1)}) == 1
        assert len({path_tolerance(dtype, is_rounded=is_rounded) for is_rounded in (0, 1)}) == 1
    assert path_tolerance(mx.float32, is_rounded=False) == 0.002
    assert path_tolerance(mx.float32, is_rounded=True) == path_tolerance(
        mx.float16, is_rounded=True
    )


def test_products_of_rounded_numbers_stay_within() -> None:
    """Attention over float32 numbers of which 10 bits are used differs by less than the tolerance.

    By more than float32 may differ elsewhere: without a tolerance of its own it would be refused.
    """
    mx.random.seed(3)
    queries, keys, values = (mx.random.normal((64, size, 64)) for size in (1, 256, 256))

    def attend(round_it: bool) -> mx.array:
        def rounded(x: mx.array) -> mx.array:  # to the nearest of 10 bits
            bits = (x.view(mx.uint32) + 0x1000) & 0xFFFFE000
            return bits.view(mx.float32) if round_it else x

        scores = rounded(queries) @ rounded(keys).swapaxes(-1, -2)
        return rounded(mx.softmax(scores * 0.25, axis=-1)) @ rounded(values)

    found = difference(attend(False), attend(True))
    assert 1e-4 < found < path_tolerance(mx.float32, is_rounded=True) / 5


def test_no_number_is_never_close() -> None:
    one = mx.ones((4,))
    assert difference(one, one) == 0
    assert difference(one, mx.array([1.0, float("nan"), 1, 1])) == float("inf")
    assert difference(one, mx.array([1.0, float("inf"), 1, 1])) == float("inf")
    assert are_close(one, 1.04 * one)
    assert not are_close(one, 1.06 * one)
    assert difference(mx.zeros((2,)), mx.zeros((2,))) == 0

"""The checks of MLX on this device, without a model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from batchkv_producer.doctor.contract import Verdict, fail, ok, warn
from batchkv_worker.kv.backends import blas

SLOW_GFLOPS = 20.0  # a product of float32 on two cores with OpenBLAS reaches 200
MAX_SHOWN = 3
_SIZE = 512
_REFERENCE = "reference BLAS"
REPORT = (
    "do not trust answers of this machine: run `make venv`, which installs the tested MLX, update "
    "the system, and report it"
)


def steps() -> Iterator[tuple[str, Callable[[], Verdict | None]]]:
    """All checks; MLX is imported by the first."""
    logging.disable(logging.INFO)
    phrase = blas.load()  # before MLX: another BLAS can only be chosen then
    yield "device", device_verdict
    yield "speed", partial(speed_verdict, phrase)
    yield "products", products_verdict
    yield "quantization", quantization_verdict
    yield "sorting", sorting_verdict
    yield "grammars", grammars_verdict


def device_verdict() -> Verdict:
    """MLX can be imported, and computes on the device that is best here."""
    import mlx.core as mx

    from batchkv_worker.kv.backends import device

    (mx.ones((8,)) * 2).sum().item()
    info = device_info()
    name = str(info.get("device_name") or info.get("name") or device.name())
    memory = info.get("max_recommended_working_set_size") or info.get("memory_size") or 0
    shown = f"MLX computes on {device.kind()}: {name}"
    return ok(shown + (f", {int(memory) / 2**30:,.1f} GiB for it" if memory else ""))


def device_info() -> dict[str, Any]:
    """What MLX says of the device; empty where it says nothing."""
    import mlx.core as mx

    try:
        found: dict[str, Any] = dict(mx.device_info())
    except (RuntimeError, AttributeError, ValueError):
        return {}
    return found


def speed_verdict(phrase: str) -> Verdict | None:
    """On a CPU with Linux the BLAS decides: OpenBLAS is many times as fast as MLX's own."""
    import mlx.core as mx

    from batchkv_worker.kv.backends import device

    square = mx.random.normal((_SIZE, _SIZE))
    mx.eval(square @ square)
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        mx.eval(square @ square)
        spent.append(time.perf_counter() - began)
    gflops = 2 * _SIZE**3 / min(spent) / 1e9
    return judge_speed(device.kind(), phrase, gflops)


def judge_speed(kind: str, phrase: str, gflops: float) -> Verdict:
    """A GPU has its own products."""
    shown = f"{gflops:,.0f} GFLOP/s in float32"
    if kind == "cpu" and _REFERENCE in phrase:
        return warn(
            f"MLX multiplies with its own slow BLAS, {shown}",
            "`apt install libopenblas0-pthread` makes models many times as fast",
        )
    if kind == "cpu" and gflops < SLOW_GFLOPS:
        return warn(
            f"this processor computes slowly now, {shown}", "end other programs and run this again"
        )
    return ok(f"{shown} ({phrase})" if kind == "cpu" else shown)


def products_verdict() -> Verdict:
    """Matrix products in the three dtypes in which models compute."""
    import mlx.core as mx

    from batchkv_worker.doctor.arithmetic import compare_products

    dtypes = (mx.float32, mx.float16, mx.bfloat16)
    return judge_compared([each for dtype in dtypes for each in compare_products(dtype)])


def quantization_verdict() -> Verdict:
    """8 and 4 bits: packed, unpacked, and multiplied while packed."""
    from batchkv_worker.doctor.arithmetic import compare_quantized
    from batchkv_worker.kv.backends import device

    compiles = device.kind() == "cuda"
    return judge_compared(
        [each for bits in (8, 4) for each in compare_quantized(bits, compiles=compiles)]
    )


def sorting_verdict() -> Verdict:
    """The best tokens of a vocabulary are the best."""
    from batchkv_worker.doctor.arithmetic import compare_sorting

    return judge_compared(compare_sorting())


def grammars_verdict() -> Verdict:
    """Answers can be made to match a schema."""
    from batchkv_worker.engine.grammar.available import why_not

    if fault := why_not():
        return warn(
            f"rows with a schema or a grammar are left to other workers: {fault}",
            "run `make venv`, which installs it",
        )
    import llguidance

    return ok(f"llguidance {llguidance.__version__} holds answers to schemas and grammars")


def judge_compared(compared: Sequence[Any]) -> Verdict:
    """All operations agree with exact arithmetic, or the first that do not are named."""
    wrong = [each for each in compared if not each.is_good]
    if not wrong:
        return ok(f"{len(compared)} operations agree with exact arithmetic")
    shown = "; ".join(
        f"{each.name}: {each.fault or f'off by {each.error:.1%}'}" for each in wrong[:MAX_SHOWN]
    )
    more = f"; and {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
    return fail(f"{len(wrong)} of {len(compared)} operations are wrong: {shown}{more}", REPORT)

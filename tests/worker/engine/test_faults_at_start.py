"""A device that fails while an engine starts: no measurement or check counts as failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx_lm.utils
import pytest

from batchkv_worker.engine import chunk_size
from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.backends import timing
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.gpu import fused_linear
from batchkv_worker.kv.backends.measurements import Measurements
from batchkv_worker.kv.layers import discover
from batchkv_worker.kv.layers.discover import CacheTree
from batchkv_worker.kv.schemes.packing import LayerShape, fit_layer
from batchkv_worker.kv.schemes.spec import SchemeSpec
from batchkv_worker.kv.start import check_tokens, layer_choice, pathcheck, probe, selfcheck
from batchkv_worker.model.loader import load
from support import tiny_models
from worker.engine.test_device_faults import TIMEOUT, engine
from worker.engine.test_oom import drain, failing, submit

GENERIC, NO_LAYERS = GenericBackend(), CacheTree((), ())
LAYER = fit_layer(SchemeSpec.parse("affine8").base, LayerShape(2, 64, 64))


def always(*_: Any, **__: Any) -> Any:
    raise TIMEOUT


# A function that fails, and a call that reaches it; None where the call is given what fails.
PLACES: dict[str, tuple[Any, str, Callable[[], object]]] = {
    "a comparison": (
        None,
        "",
        lambda: pathcheck._compared("x", 1, False, mx.float32, mx.zeros(1), always),
    ),
    "what checks": (mx, "quantize", lambda: check_tokens._computes_on_cpu.__wrapped__()),
    "a timing": (None, "", lambda: timing.least_times((always,))),
    "the choice of a path": (
        probe,
        "choose",
        lambda: layer_choice.choose_path("m", GENERIC, LAYER, 2, mx.float32, 4, None),
    ),
    "the self-check": (
        selfcheck,
        "disagreement",
        lambda: selfcheck.find_traits(GENERIC, "m", None, NO_LAYERS, (), (), mx.float32),
    ),
    "the caches": (
        discover,
        "_with_lists",
        lambda: discover.discover("m", tiny_models.build("llama")),
    ),
    "fused layers": (
        fused_linear,
        "_faster_groups",
        lambda: fused_linear.choose(None, 4, Measurements()),
    ),
    "loading": (mlx_lm.utils, "load", lambda: load("demo")),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_at_start_is_raised_as_it_is(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No path is dropped for it, no model is refused, and so nothing wrong is kept."""
    owner, name, call = PLACES[place]
    if owner is not None:
        monkeypatch.setattr(owner, name, always)
    with pytest.raises(RuntimeError) as raised:
        call()
    assert is_device_fault(raised.value)


def chunk_sizes(
    monkeypatch: pytest.MonkeyPatch,
    faults: list[int],
    after: int = 0,
    fault: Exception = TIMEOUT,
) -> dict[int, float]:
    """The sizes that are measured where the device fails at these, after so many calls of each."""
    calls: Counter[int] = Counter()

    def compute(_loaded: object, _plan: object, size: int, _launches: object) -> None:
        calls[size] += 1
        if calls[size] > after and size in faults:
            faults.remove(size)
            raise fault

    monkeypatch.setattr(chunk_size, "_compute", compute)
    loaded: Any = SimpleNamespace(context=32_768)
    found = chunk_size.measure(loaded, cast("Any", SimpleNamespace(backend=GENERIC)), 9.0)
    assert found.is_whole
    return found.speeds


def test_chunks_that_the_device_cannot_compute_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start would fail at them again and again. One fault alone may be another program's."""
    assert chunk_sizes(monkeypatch, [1024, 1024]).keys() == {256, 512}
    for after in range(4):
        assert chunk_sizes(monkeypatch, [512], after).keys() == {256, 512, 1024, 2048}
    assert chunk_sizes(monkeypatch, [1024, 1024], 1).keys() == {256, 512}
    with pytest.raises(RuntimeError, match="GPU Timeout"):
        chunk_sizes(monkeypatch, [256, 256])


@pytest.mark.parametrize(
    "fault", [RuntimeError("[malloc] Unable to allocate 9 bytes."), MemoryError()]
)
def test_chunks_for_which_there_is_no_memory_are_not_used(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start goes on with smaller ones. Other faults, or one at the smallest, end it."""
    assert chunk_sizes(monkeypatch, [2048], fault=fault).keys() == {256, 512, 1024}
    for at, raised in ((256, fault), (2048, RuntimeError("another"))):
        with pytest.raises(type(raised)):
            chunk_sizes(monkeypatch, [at], fault=raised)


def test_an_idle_engine_recovers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is reported while no row is computed ends nothing."""
    running = engine("llama")
    monkeypatch.setattr(mx, "clear_cache", failing(mx.clear_cache, {1}, TIMEOUT))
    running.rest()
    assert running._recovery.num_device_faults == 1
    submit(running)
    assert len(drain(running)) == 6

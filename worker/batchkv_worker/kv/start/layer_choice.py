"""How the layers of one scheme decode: checked and measured now, or by an earlier start."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import mlx.core as mx

from batchkv_worker.errors import ModelError, SettingsError
from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.attention import paths
from batchkv_worker.kv.attention.paths import LayerAttention, Path
from batchkv_worker.kv.backends.contract import Backend, ChunkKernels, RecordKernels
from batchkv_worker.kv.backends.measurements import WHOLE, YES_OR_NO
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.start import chunkcheck, pathcheck, prefix_cost, probe

# Names of stored results; the layer follows.
# Of the paths there are two: without our kernel, and with a version of it.
PATHS_WITH_KERNEL = "attention paths and kernel 3 of"
PATHS, PROMPTS, SHARING = "attention paths of", "prefill of", "shared prefixes 2 of"
TRIES = "unfinished tries of the kernel of"
CELLS = "cells of a shared prefix of"
CHUNKS, CHUNK_TRIES = "chunks by one kernel of", "unfinished tries of chunks by one kernel of"

log = logging.getLogger("batchkv.engine")


@dataclass(frozen=True, slots=True)
class SchemeChoice:
    """How layers of one scheme decode.

    ``path`` None leaves attention to the model, on dense keys and values. ``has_fused``: the fused
    path is right. ``shares``: attention over shared prefixes is. ``records``: the kernels of the
    path ``kernel``; ``chunks``: those that pack chunks of prompts.
    """

    path: Path | None = None
    group_cost: int | None = None
    has_fused: bool = True
    shares: bool = True
    records: RecordKernels | None = None
    chunks: ChunkKernels | None = None


def choose_path(
    name: str,
    backend: Backend,
    layer: LayerScheme,
    heads: int,
    dtype: mx.Dtype,
    rows: int,
    path: Path | None,
) -> SchemeChoice:
    """Measured, unless the path is given. SettingsError for a given path that the device lacks."""
    records = backend.record_kernels(layer, heads // layer.shape.num_heads, dtype)
    if path is not None:
        if path == "kernel" and records is None:
            raise SettingsError(f"this device has no kernel for {layer}: choose another path")
        return SchemeChoice(path, records=records if path == "kernel" else None)

    def measure() -> probe.Choice:
        name = f"{TRIES} {_named(layer, heads)}"
        with_kernel = records is not None and _may_try(backend, name, "the attention kernel", layer)
        return probe.choose(backend, layer, heads, dtype, num_rows=rows, with_kernel=with_kernel)

    try:
        choice = backend.measurements.of(
            f"{PATHS if records is None else PATHS_WITH_KERNEL} {_named(layer, heads)}",
            measure,
            probe.CHOICE,
        )
    except (ValueError, RuntimeError) as fault:  # MLX raises these for a kernel that it lacks
        if is_device_fault(fault):
            raise
        raise ModelError(
            f"model {name!r}: this device cannot keep {layer}: {fault}; choose another KV scheme "
            "(`float` needs the fewest kernels), or another version of MLX"
        ) from fault
    backend.measurements.log_once(
        "decode attention: %s for %s keys, %s values (%s); one more group of rows takes as long as "
        "%d tokens",
        *(choice.path, layer.keys, layer.values),
        ", ".join(f"{path} {spent:.2f} ms" for path, spent in choice.long.items()),
        choice.group_cost,
    )
    if choice.path != "kernel":
        return SchemeChoice(choice.path, choice.group_cost, choice.has_fused)
    # Its rows need no groups, so what another group would cost must not count.
    return SchemeChoice(choice.path, has_fused=choice.has_fused, records=records)


def _may_try(backend: Backend, name: str, what: str, layer: LayerScheme) -> bool:
    """Whether a kernel is tried: it is new, and a fault of it could end each start."""
    if backend.measurements.begin_try(name):
        return True
    log.warning(
        "%s is not used for %s: earlier starts ended while it was tried; `batchkv tune` tries it "
        "again",
        *(what, layer),
    )
    return False


def choose_chunks(
    backend: Backend, layer: LayerScheme, dtype: mx.Dtype, is_used: bool | None = None
) -> ChunkKernels | None:
    """The kernels that pack chunks of prompts, where they are right and faster.

    ``is_used``: whether to use them, where there are any; None: measured.
    """
    kernels = backend.chunk_kernels(layer, dtype)
    if kernels is None or is_used is not None:
        return kernels if is_used else None
    name = _sized(layer)

    def measure() -> bool:
        if not _may_try(backend, f"{CHUNK_TRIES} {name}", "the kernel for chunks", layer):
            return False
        return chunkcheck.are_better(kernels, LayerAttention(backend, layer, dtype))

    try:
        is_better = backend.measurements.of(f"{CHUNKS} {name}", measure, YES_OR_NO)
    except (ValueError, RuntimeError) as fault:  # MLX raises these for a kernel that it lacks
        if is_device_fault(fault):
            raise
        log.warning("chunks of %s are not packed by one kernel: %s", layer, fault)
        return None
    if not is_better:
        return None
    backend.measurements.log_once("chunks of prompts: one kernel packs and gives back %s", layer)
    return kernels


def check_prompts(
    name: str, backend: Backend, layer: LayerScheme, heads: int, dtype: mx.Dtype
) -> None:
    """Raise ModelError where chunks of prompts get other numbers: there is no other way.

    What the device refuses shows in the self-check.
    """
    checks = backend.measurements.of(
        f"{PROMPTS} {_named(layer, heads)}",
        lambda: pathcheck.check_prefill(backend, layer, heads, dtype),
        pathcheck.CHECKS,
    )
    wrong = [check for check in checks if not (check.is_ok or check.fault)]
    if wrong:
        raise ModelError(
            f"model {name!r}: this device cannot compute prompts of {layer}: {wrong[0]}; choose "
            "another version of MLX"
        )


def can_attend_prefixes(attention: LayerAttention, heads: int) -> bool:
    """Whether attention over shared prefixes is right without the backend's own kernel.

    Prefill does not use that kernel, nor do prefixes that are too long for its scores.
    """
    checks = attention.backend.measurements.of(
        f"{SHARING} {_described(attention, heads)}",
        lambda: pathcheck.check_prefix(attention, heads),
        pathcheck.CHECKS,
    )
    fault = pathcheck.worst(checks, pathcheck.PREFIX)
    if not fault.is_ok:
        log.warning("rows do not share prefixes in attention on this device: %s", fault)
    return fault.is_ok


def measure_prefix_cells(attention: LayerAttention, heads: int, rows: int) -> int:
    """Cells that a shared prefix must save."""
    cells = attention.backend.measurements.of(
        f"{CELLS} {_described(attention, heads)}",
        lambda: prefix_cost.measure(attention, heads, num_rows=rows),
        WHOLE,
    )
    attention.backend.measurements.log_once(
        "a prefix is stored once where %d tokens or more need not be read again", cells
    )
    return cells


def _described(attention: LayerAttention, heads: int) -> str:
    return f"{_named(attention.scheme, heads)} by {attention.path}"


def _named(layer: LayerScheme, heads: int) -> str:
    """One text for each scheme, shape and number of query heads."""
    return f"{_sized(layer)}, for {heads} query heads"


def _sized(layer: LayerScheme) -> str:
    """One text for each scheme and shape."""
    shape = layer.shape
    return f"{layer}, {shape.num_heads} heads of {shape.key_size} and {shape.value_size}"


def attention_of(
    backend: Backend, layer: LayerScheme, dtype: mx.Dtype, choice: SchemeChoice
) -> LayerAttention:
    """As the layer's slots will have it."""
    path = choice.path
    assert path is not None
    in_slots = paths.in_slots(layer, path)
    return LayerAttention(backend, in_slots, dtype, path, records=choice.records)

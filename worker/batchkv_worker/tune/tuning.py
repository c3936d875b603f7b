"""What an engine has chosen, and what each choice was made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from batchkv_worker.engine.chunk_size import CHUNKS, MEASURED
from batchkv_worker.engine.engine import Engine
from batchkv_worker.kv.backends.measurements import FUSED_AGREE, FUSED_LINEARS
from batchkv_worker.kv.start import pathcheck
from batchkv_worker.kv.start.backend import num_residual_blocks, rotary_in_use
from batchkv_worker.kv.start.layer_choice import (
    CELLS,
    PATHS,
    PATHS_WITH_KERNEL,
    PROMPTS,
    SHARING,
)
from batchkv_worker.kv.start.pathcheck import CHECKS, PREFILL, PREFIX, STORED, PathCheck
from batchkv_worker.kv.start.probe import CHOICE, LONG, SHORT, Choice


@dataclass(frozen=True, slots=True)
class PathLine:
    """One way to attend. ``error`` is the largest, as a share of the largest number.

    None is not timed, or no number. ``fault`` says why it is not used; "" is right.
    """

    name: str
    short_ms: float | None
    long_ms: float | None
    error: float | None
    tolerance: float
    is_chosen: bool
    fault: str = ""


@dataclass(frozen=True, slots=True)
class LayerTuning:
    """Layers of one scheme and shape. ``group_cost`` and ``prefix_cells`` are in cells."""

    layer: str
    paths: tuple[PathLine, ...]
    group_cost: int
    prefix_cells: int | None = None


@dataclass(frozen=True, slots=True)
class Tuning:
    """Of one model, scheme, number of slots and dtype on one device.

    ``chunks`` has tokens a second by size, empty if not measured. ``num_fused`` groups of linear
    layers are multiplied at once, and ``num_rotary`` layers have norms and positions by one kernel:
    in chunks of prompts, too, with ``rotary_in_chunks``. In ``num_packed`` layers one kernel packs
    the keys and values of chunks; ``num_residual`` blocks have sums and norms by one kernel.
    """

    model: str
    scheme: str
    slots: int
    dtype: str
    backend: str
    chip: str
    mlx: str
    layers: tuple[LayerTuning, ...]
    chunk_tokens: int
    chunks: Mapping[int, float]
    num_fused: int
    num_rotary: int
    rotary_in_chunks: bool
    num_packed: int
    num_residual: int
    shares_prefixes: bool
    kept_in: str | None

    def as_json(self) -> dict[str, Any]:
        """All of it; ``short`` and ``long`` times are over these numbers of tokens a row."""
        return {"short_tokens": SHORT, "long_tokens": LONG, **asdict(self)}


def tuning_of(engine: Engine) -> Tuning:
    """What is known of an engine that was built just now."""
    plan, measured = engine.plan, engine.plan.backend.measurements
    results = measured.results()
    chunks = MEASURED.from_json(results[CHUNKS]).speeds if CHUNKS in results else {}
    groups = results.get(FUSED_LINEARS, []) if results.get(FUSED_AGREE) else []
    num_rotary, rotary_in_chunks = rotary_in_use(engine.loaded.model)
    file = measured.file
    return Tuning(
        model=engine.loaded.name,
        scheme=engine.config.scheme,
        slots=engine.config.slots,
        dtype=str(engine.loaded.dtype).removeprefix("mlx.core."),
        backend=plan.backend.name,
        chip=str(measured.facts.get("chip", "")),
        mlx=str(measured.facts.get("mlx", "")),
        layers=tuple(_layers(results)),
        chunk_tokens=engine.chunk_tokens,
        chunks=chunks,
        num_fused=len(groups),
        num_rotary=num_rotary,
        rotary_in_chunks=rotary_in_chunks,
        num_packed=plan.num_packed,
        num_residual=num_residual_blocks(engine.loaded.model),
        shares_prefixes=plan.shares,
        kept_in=str(file) if file is not None and file.exists() else None,
    )


def _layers(results: Mapping[str, Any]) -> Iterable[LayerTuning]:
    for name, value in results.items():
        start = next(
            (one for one in (PATHS, PATHS_WITH_KERNEL) if name.startswith(f"{one} ")), None
        )
        if start is None:
            continue
        layer, choice = name.removeprefix(f"{start} "), CHOICE.from_json(value)
        yield LayerTuning(
            layer,
            (*_path_lines(choice), *_prompt_lines(results, layer), *_prefix_lines(results, layer)),
            choice.group_cost,
            next((cells for _, cells in _of_layer(results, CELLS, layer)), None),
        )


def _of_layer(results: Mapping[str, Any], kind: str, layer: str) -> list[tuple[str, Any]]:
    """Results of a kind for a layer, whatever its path and the form that slots keep it in.

    There are at most two forms of one scheme, which share its description.
    """
    start = f"{kind} {layer} by "
    return [(name, value) for name, value in results.items() if name.startswith(start)]


def _path_lines(choice: Choice) -> Iterable[PathLine]:
    for name in dict.fromkeys(check.name for check in choice.checks):
        if name == STORED:
            continue
        short, long = (times.get(name) for times in (choice.short, choice.long))  # type: ignore[call-overload]
        yield _line(choice.checks, name, short, long, is_chosen=name == choice.path)


def _prompt_lines(results: Mapping[str, Any], layer: str) -> Iterable[PathLine]:
    if (value := results.get(f"{PROMPTS} {layer}")) is not None:
        yield _line(CHECKS.from_json(value), PREFILL, None, None, is_chosen=True)


def _prefix_lines(results: Mapping[str, Any], layer: str) -> Iterable[PathLine]:
    for _, value in _of_layer(results, SHARING, layer):
        checks = CHECKS.from_json(value)
        yield _line(checks, PREFIX, None, None, is_chosen=pathcheck.is_right(checks, PREFIX))


def _line(
    checks: tuple[PathCheck, ...],
    name: str,
    short: float | None,
    long: float | None,
    *,
    is_chosen: bool,
) -> PathLine:
    worst = pathcheck.worst(checks, name)
    error = worst.error if worst.error < float("inf") else None
    fault = "" if worst.is_ok else str(worst)
    return PathLine(name, short, long, error, worst.tolerance, is_chosen, fault)

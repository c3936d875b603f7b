"""What a bench found: plain numbers, for tables and for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured. Nothing here names a person, a host or a path.

    ``gigabytes_per_second`` and ``teraflops`` are measured, in ``dtype``.
    """

    chip: str
    memory_gb: float
    system: str
    device: str
    mlx: str
    mlx_lm: str
    batchkv: str
    gigabytes_per_second: float
    teraflops: float


@dataclass(frozen=True, slots=True)
class Model:
    """What was served. ``weight_gb`` in 10^9 bytes."""

    name: str
    layers: str
    dtype: str
    weight_gb: float


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One token of ``rows`` rows through the model; ``bound_ms`` is the least that it can take."""

    rows: int
    ms: float
    bound_ms: float


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """A prompt of ``tokens`` in one pass, in tokens a second."""

    tokens: int
    tokens_per_second: float
    bound_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One decode step of ``rows`` rows of ``context`` tokens each, under a KV scheme."""

    scheme: str
    context: int
    rows: int
    path: str
    ms: float
    bound_ms: float


@dataclass(frozen=True, slots=True)
class BatchRun:
    """A workload through the engine and through mlx-lm's BatchGenerator, medians of ``repeats``.

    ``generated`` tokens in all. ``same_rows`` got the same tokens from both.
    """

    workload: str
    rows: int
    generated: int
    repeats: int
    engine_seconds: float
    mlx_lm_seconds: float
    bound_seconds: float
    same_rows: int


@dataclass(frozen=True, slots=True)
class ProductRun:
    """The same rows by ``batchkv run``: from its first running row to its last ended one.

    ``start_seconds``: from the command to the first row.
    """

    workload: str
    rows: int
    generated: int
    seconds: float
    engine_seconds: float
    bound_seconds: float
    start_seconds: float


Figure = ForwardPass | PrefillSpeed | DecodeStep | BatchRun | ProductRun

# The field of a report for each kind of figure.
_PARTS: dict[type[Figure], str] = {
    ForwardPass: "passes",
    PrefillSpeed: "prefill",
    DecodeStep: "decode",
    BatchRun: "batches",
    ProductRun: "product",
}


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All of it; a part that was not asked for is empty."""

    machine: Machine
    model: Model
    scheme: str
    slots: int
    passes: tuple[ForwardPass, ...] = ()
    prefill: tuple[PrefillSpeed, ...] = ()
    decode: tuple[DecodeStep, ...] = ()
    batches: tuple[BatchRun, ...] = ()
    product: tuple[ProductRun, ...] = ()

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All figures, part by part."""
        return (*self.passes, *self.prefill, *self.decode, *self.batches, *self.product)

    def with_figure(self, figure: Figure) -> BenchReport:
        """The report with one more figure, at the end of its part."""
        name = _PARTS[type(figure)]
        part: dict[str, Any] = {name: (*getattr(self, name), figure)}
        return replace(self, **part)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)

"""A bench as tables in Markdown, to paste into an issue or a page. They grow line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from batchkv_worker.bench.results import (
    BatchRun,
    BenchReport,
    DecodeStep,
    Figure,
    ForwardPass,
    PrefillSpeed,
    ProductRun,
)


def as_markdown(report: BenchReport) -> str:
    """Every part that was measured, each figure beside its bound."""
    lines: list[str] = []
    tables = Tables(lines.append)
    tables.begin(report)
    for figure in report.figures:
        tables.add(figure)
    return "\n".join(lines) + "\n"


class Tables:
    """Writes the text of a bench, line by line. Figures of one kind follow each other."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._kind: type[Figure] | None = None

    def begin(self, report: BenchReport) -> None:
        """Say what is measured, and where."""
        machine, model = report.machine, report.model
        self._write(
            f"**{machine.chip}**, {machine.memory_gb:g} GB, {machine.system}, {machine.device}; "
            f"MLX {machine.mlx}, mlx-lm {machine.mlx_lm}, batchkv {machine.batchkv}\n"
        )
        self._write(
            f"It reads {machine.gigabytes_per_second:,.1f} GB/s and multiplies "
            f"{machine.teraflops:,.2f} TFLOP/s in {model.dtype}. Bounds follow from these two.\n"
        )
        self._write(
            f"Model: {model.name}, {model.layers}, {model.dtype}, {model.weight_gb:,.2f} GB of "
            f"weights. KV scheme {report.scheme}, {report.slots} slots."
        )

    def add(self, figure: Figure) -> None:
        """Write a figure's line, after the head of its table if it is the first of its kind."""
        if type(figure) is not self._kind:
            self._kind = type(figure)
            title, *names = _HEADS[self._kind]
            self._write(f"\n{title}:\n")
            self._write(_line(names))
            self._write(_line(["---", *["---:"] * (len(names) - 1)]))
        self._write(_line([*_cells(figure)]))


# The title and the head of each kind's table.
_HEADS: dict[type[Figure], tuple[str, ...]] = {
    ForwardPass: (
        "Forward passes, one token a row",
        *("rows", "ms", "tokens/s", "bound ms", "of bound"),
    ),
    PrefillSpeed: ("Prefill, one prompt in one pass", "tokens", "tokens/s", "bound", "of bound"),
    DecodeStep: (
        "Decode steps",
        *("scheme", "context", "rows", "path", "ms", "tokens/s", "bound ms", "of bound"),
    ),
    BatchRun: (
        "Batches, engine and mlx-lm's BatchGenerator in turns",
        *("workload", "rows", "runs", "engine s", "mlx-lm s", "mlx-lm / engine", "bound s"),
        *("of bound", "same tokens"),
    ),
    ProductRun: (
        "batchkv run, from its first running row to its last ended one",
        *("workload", "rows", "run s", "engine s", "run / engine", "bound s", "of bound"),
        "start s",
    ),
}


def _cells(figure: Figure) -> Iterator[str]:
    match figure:
        case ForwardPass(rows, ms, bound):
            yield from (f"{rows}", f"{ms:.2f}", f"{1e3 * rows / ms:,.0f}", f"{bound:.2f}")
            yield _share(bound / ms)
        case PrefillSpeed(tokens, speed, bound):
            yield from (f"{tokens:,}", f"{speed:,.0f}", f"{bound:,.0f}", _share(speed / bound))
        case DecodeStep(scheme, context, rows, path, ms, bound):
            yield from (scheme, f"{context:,}", f"{rows}", path, f"{ms:.2f}")
            yield from (f"{1e3 * rows / ms:,.0f}", f"{bound:.2f}", _share(bound / ms))
        case BatchRun() as b:
            yield from (b.workload, f"{b.rows}", f"{b.repeats}", f"{b.engine_seconds:.2f}")
            yield from (f"{b.mlx_lm_seconds:.2f}", f"{b.mlx_lm_seconds / b.engine_seconds:.2f}x")
            yield from (f"{b.bound_seconds:.2f}", _share(b.bound_seconds / b.engine_seconds))
            yield f"{b.same_rows} of {b.rows}"
        case ProductRun() as p:
            yield from (p.workload, f"{p.rows}", f"{p.seconds:.2f}", f"{p.engine_seconds:.2f}")
            yield from (f"{p.seconds / p.engine_seconds:.2f}x", f"{p.bound_seconds:.2f}")
            yield from (_share(p.bound_seconds / p.seconds), f"{p.start_seconds:.1f}")


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"

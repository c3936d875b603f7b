"""A bench as tables in Markdown, to paste into an issue or a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batchkv_worker.bench.results import BenchReport


def as_markdown(report: BenchReport) -> str:
    """Every part that was measured, each figure beside its bound."""
    machine, model = report.machine, report.model
    parts = [
        f"**{machine.chip}**, {machine.memory_gb:g} GB, {machine.system}, {machine.device}; "
        f"MLX {machine.mlx}, mlx-lm {machine.mlx_lm}, batchkv {machine.batchkv}",
        f"It reads {machine.gigabytes_per_second:,.1f} GB/s and multiplies "
        f"{machine.teraflops:,.2f} TFLOP/s in {model.dtype}. Bounds follow from these two.",
        f"Model: {model.name}, {model.layers}, {model.dtype}, {model.weight_gb:,.2f} GB of "
        f"weights. KV scheme {report.scheme}, {report.slots} slots.",
    ]
    parts += [_passes(report), _prefill(report), _decode(report), _batches(report)]
    return "\n\n".join(part for part in [*parts, _product(report)] if part) + "\n"


def _passes(report: BenchReport) -> str:
    lines = [
        (f"{p.rows}", f"{p.ms:.2f}", f"{1e3 * p.rows / p.ms:,.0f}", f"{p.bound_ms:.2f}",
         _share(p.bound_ms / p.ms))
        for p in report.passes
    ]  # fmt: skip
    head = ("rows", "ms", "tokens/s", "bound ms", "of bound")
    return _table("Forward passes, one token a row", head, lines)


def _prefill(report: BenchReport) -> str:
    lines = [
        (f"{p.tokens:,}", f"{p.tokens_per_second:,.0f}", f"{p.bound_tokens_per_second:,.0f}",
         _share(p.tokens_per_second / p.bound_tokens_per_second))
        for p in report.prefill
    ]  # fmt: skip
    head = ("tokens", "tokens/s", "bound", "of bound")
    return _table("Prefill, one prompt in one pass", head, lines)


def _decode(report: BenchReport) -> str:
    lines = [
        (d.scheme, f"{d.context:,}", f"{d.rows}", d.path, f"{d.ms:.2f}",
         f"{1e3 * d.rows / d.ms:,.0f}", f"{d.bound_ms:.2f}", _share(d.bound_ms / d.ms))
        for d in report.decode
    ]  # fmt: skip
    head = ("scheme", "context", "rows", "path", "ms", "tokens/s", "bound ms", "of bound")
    return _table("Decode steps", head, lines)


def _batches(report: BenchReport) -> str:
    lines = [
        (b.workload, f"{b.rows}", f"{b.repeats}", f"{b.engine_seconds:.2f}",
         f"{b.mlx_lm_seconds:.2f}", f"{b.mlx_lm_seconds / b.engine_seconds:.2f}x",
         f"{b.bound_seconds:.2f}", _share(b.bound_seconds / b.engine_seconds),
         f"{b.same_rows} of {b.rows}")
        for b in report.batches
    ]  # fmt: skip
    head = ("workload", "rows", "runs", "engine s", "mlx-lm s", "mlx-lm / engine", "bound s",
            "of bound", "same tokens")  # fmt: skip
    return _table("Batches, engine and mlx-lm's BatchGenerator in turns", head, lines)


def _product(report: BenchReport) -> str:
    lines = [
        (p.workload, f"{p.rows}", f"{p.seconds:.2f}", f"{p.engine_seconds:.2f}",
         f"{p.seconds / p.engine_seconds:.2f}x", f"{p.bound_seconds:.2f}",
         _share(p.bound_seconds / p.seconds), f"{p.start_seconds:.1f}")
        for p in report.product
    ]  # fmt: skip
    head = ("workload", "rows", "run s", "engine s", "run / engine", "bound s", "of bound",
            "start s")  # fmt: skip
    return _table("batchkv run, from its first running row to its last ended one", head, lines)


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _table(title: str, head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [list(line) for line in lines]
    if not rows:
        return ""
    text = [f"{title}:", "", _line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    return "\n".join([*text, *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"

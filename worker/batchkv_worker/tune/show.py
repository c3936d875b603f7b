"""Shows a tuning as plain tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batchkv_worker.kv.start.probe import LONG, SHORT
from batchkv_worker.tune.tuning import LayerTuning, PathLine, Tuning

_NONE = "-"
_HEAD = ("path", f"ms at {SHORT}", f"ms at {LONG}", "error", "at most", "chosen")


def as_text(tuning: Tuning) -> str:
    """All of it, with a blank line between parts."""
    parts = [_heading(tuning), *map(_layer, tuning.layers), _rest(tuning)]
    return "\n\n".join(parts) + "\n"


def _heading(tuning: Tuning) -> str:
    return (
        f"{tuning.model}, {tuning.scheme}, {tuning.slots} slots, {tuning.dtype} "
        f"on {tuning.chip or tuning.backend}, MLX {tuning.mlx or 'of an unknown version'}"
    )


def _layer(layer: LayerTuning) -> str:
    lines = [f"attention of {layer.layer}", *_columns([_HEAD, *map(_cells, layer.paths)])]
    lines += [f"not used: {path.fault}" for path in layer.paths if path.fault]
    lines.append(f"a further group of rows takes as long as {layer.group_cost:,} tokens of one row")
    if layer.prefix_cells is not None:
        lines.append(f"a shared prefix must save {layer.prefix_cells:,} tokens")
    return "\n".join(lines)


def _cells(path: PathLine) -> tuple[str, ...]:
    times = (_NONE if time is None else f"{time:.3f}" for time in (path.short_ms, path.long_ms))
    error = _NONE if path.error is None else f"{path.error:.1e}"
    chosen = "yes" if path.is_chosen else ""
    return (path.name, *times, error, f"{path.tolerance:g}", chosen)


def _rest(tuning: Tuning) -> str:
    speeds = ", ".join(f"{size}: {speed:,.0f}" for size, speed in sorted(tuning.chunks.items()))
    of_chunks = f"tokens a second: {speeds}" if speeds else "not measured on this device"
    shares = "share" if tuning.shares_prefixes else "do not share"
    in_chunks = ", in chunks of prompts too" if tuning.rotary_in_chunks else ""
    lines = [
        f"chunks of prompts have {tuning.chunk_tokens} tokens ({of_chunks})",
        f"{tuning.num_fused} groups of linear layers are multiplied at once",
        f"{tuning.num_rotary} layers have norms and positions by one kernel{in_chunks}",
        f"{tuning.num_packed} layers have keys and values of chunks packed by one kernel",
        f"{tuning.num_residual} layers have residual sums and norms by one kernel",
        f"rows {shares} prefixes in attention",
        f"kept in {tuning.kept_in}" if tuning.kept_in else "nothing of this is kept",
    ]
    return "\n".join(lines)


def _columns(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        yield "  ".join(cells).rstrip()

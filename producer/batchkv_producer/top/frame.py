"""Draws a view of ``batchkv top`` for a terminal of some size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.text import Text

from batchkv_producer.client import BatchStatus, WorkerInfo
from batchkv_producer.monitor.remaining import percent_done, share_done
from batchkv_producer.progress import duration, printable
from batchkv_producer.server.memory_use import size_text
from batchkv_producer.tables import Column, shorten_models, shorten_names, table_lines
from batchkv_producer.top.view import View, WorkerView

KEYS = "q ends  up, down select a worker  d drains it  u resumes it"
OTHER_LINES = 8  # titles, empty lines, the sums and the keys
MIN_ROWS = 3
BAR_CHARS = 10
MARK = "> "  # before the selected worker
DONE, SELECTED, AWAY, RESTING, FAULTY = "dim", "reverse", "red", "yellow", "red"


@dataclass(frozen=True, slots=True)
class Screen:
    """The size of the terminal, the selected worker's name, and a message.

    ``is_live``: keys are read, and a worker is selected.
    """

    width: int
    height: int
    selected: str = ""
    message: str = ""
    is_live: bool = True


def draw(view: View, screen: Screen) -> Text:
    """The frame: lines of at most ``width`` characters; not more than ``height`` of them if the
    terminal has 14 lines or more."""
    room = max(2 * MIN_ROWS, screen.height - OTHER_LINES)
    num_workers = min(len(view.workers), max(MIN_ROWS, room // 2, room - len(view.batches)))
    num_batches = max(MIN_ROWS, room - num_workers)
    lines = [Text(_sums(view), style="bold"), Text("")]
    if view.batches:
        lines += _batches(view, view.batches[:num_batches], screen)
        if hidden := view.num_batches - min(num_batches, len(view.batches)):
            lines.append(Text(f"{hidden:,} more: `batchkv list`", style="dim"))
    else:
        lines.append(Text("no batches"))
    lines.append(Text(""))
    if view.workers:
        lines += _workers(_window(view.workers, screen.selected, num_workers), screen)
    else:
        lines.append(Text("no workers: `batchkv worker -m MODEL` starts one on this machine"))
    if screen.is_live:
        lines += [Text(""), Text(printable(screen.message).replace("\n", " ") or KEYS, style="dim")]
    for line in lines:
        line.truncate(screen.width, overflow="ellipsis")
    return Text("\n").join(lines)


def _sums(view: View) -> str:
    num_open = sum(not batch.is_done for batch in view.batches)
    queued = sum(batch.queued for batch in view.batches)
    held = sum(batch.running for batch in view.batches)
    now = datetime.fromtimestamp(view.read_at, UTC).strftime("%H:%M:%S UTC")
    # A host takes no rows itself: its workers do, and have lines of their own.
    num_workers = sum(not worker.info.is_host for worker in view.workers)
    noun = "worker" if num_workers == 1 else "workers"
    return (
        f"{now}  {num_workers:,} {noun}, {view.tokens_per_second:,} tok/s; "
        f"{num_open:,} open, {held:,} rows held, {queued:,} queued"
    )


def _batches(view: View, batches: Sequence[BatchStatus], screen: Screen) -> list[Text]:
    speeds = [view.speeds.get(batch.batch_id) for batch in batches]
    left = [view.left.get(batch.batch_id) for batch in batches]
    columns = [
        Column("BATCH", [b.batch_id for b in batches]),
        Column("", [_bar(b) for b in batches], drop=1),
        Column("DONE", [share_done(b) for b in batches]),
        Column("TOK/S", [None if speed is None else round(speed) for speed in speeds], drop=7),
        Column("LEFT", ["" if each is None else duration(each) for each in left], if_any=True),
        Column("OK", [b.ok for b in batches], drop=5),
        Column("FAILED", [b.failed for b in batches], if_any=True),
        Column("HELD", [b.running for b in batches], drop=3),
        Column("QUEUED", [b.queued for b in batches], drop=6),
        Column("MODEL", [b.model for b in batches], shorten_models, drop=2),
        Column("NAME", [b.name for b in batches], shorten_names, drop=4),
    ]
    title, *lines = table_lines(columns, screen.width)
    styles = [DONE if b.is_done else FAULTY if b.failed else "" for b in batches]
    return [Text(title, style="dim"), *map(Text, lines, styles)]


def _bar(batch: BatchStatus) -> str:
    filled = percent_done(batch) * BAR_CHARS // 100
    return "#" * filled + "." * (BAR_CHARS - filled)


def _workers(workers: Sequence[WorkerView], screen: Screen) -> list[Text]:
    shares = [worker.cached_share for worker in workers]
    infos = [worker.info for worker in workers]
    columns = [
        Column("WORKER", [w.name for w in infos], shorten_names, min_width=14),
        Column("STATE", [w.shown_state for w in infos], shorten_names, min_width=16),
        Column("SLOTS", [_slots(w) for w in workers], drop=8),
        Column("TOK/S", [w.tokens_per_second for w in infos]),
        Column("MEMORY", [_memory(w) for w in infos], drop=7),
        Column("KV", [_kv_memory(w) for w in workers], drop=3),
        Column("PRESSURE", [w.pressure for w in workers], drop=5),
        Column("CACHED", ["" if one is None else f"{100 * one:.0f} %" for one in shares], drop=6),
        Column("SEEN", [f"{w.silent_seconds:.0f}s ago" for w in infos], drop=4),
        Column("MODEL", [w.model or ", ".join(w.models) for w in infos], shorten_models, drop=2),
        Column("VERSION", [w.version for w in infos], drop=1),
    ]
    indent = len(MARK) if screen.is_live else 0
    title, *lines = table_lines(columns, screen.width - indent)
    drawn = [Text(" " * indent + title, style="dim")]
    for worker, line in zip(workers, lines, strict=True):
        is_selected = screen.is_live and worker.info.name == screen.selected
        mark = MARK if is_selected else " " * indent
        drawn.append(Text(mark + line, style=SELECTED if is_selected else _style(worker)))
    return drawn


def _style(worker: WorkerView) -> str:
    if worker.info.is_away or worker.is_short_of_memory:
        return AWAY
    return RESTING if worker.info.is_resting or worker.info.is_loading else ""


def _slots(worker: WorkerView) -> str:
    """Rows that decode, of its slots. Older workers report the slots alone."""
    slots, decoding = worker.info.num_slots, worker.level("rows.decode")
    if slots is None:
        return ""
    return f"{slots}" if decoding is None else f"{decoding:.0f}/{slots}"


def _memory(worker: WorkerInfo) -> str:
    return size_text(worker.memory_bytes) if worker.memory_bytes else ""


def _kv_memory(worker: WorkerView) -> str:
    used, budget = worker.level("kv_memory"), worker.level("kv_memory_budget")
    return f"{100 * used / budget:.0f} %" if used is not None and budget else ""


def _window(workers: Sequence[WorkerView], selected: str, count: int) -> Sequence[WorkerView]:
    """``count`` workers, the selected one among them."""
    names = [worker.info.name for worker in workers]
    place = names.index(selected) if selected in names else 0
    start = max(0, min(place - count // 2, len(workers) - count))
    return workers[start : start + count]

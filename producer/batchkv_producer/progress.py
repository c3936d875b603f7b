"""Progress on standard error: a live bar on a terminal, a plain line now and then elsewhere.

``printable`` keeps control sequences in prompts, answers and logs away from terminals.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import click

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

PLAIN_INTERVAL_SECONDS = 5.0
WINDOW_SECONDS = 30.0  # rates are means over this time

# C0 except tab and newline, DEL, C1, and characters that change the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def rows(count: int, one: str = "", many: str = "") -> str:
    """A number of rows in words, with the verb for one row or for several: ``3 rows are``."""
    text, verb = (f"{count:,} row", one) if count == 1 else (f"{count:,} rows", many)
    return f"{text} {verb}" if verb else text


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a batch: its rows by outcome, and the tokens generated so far.

    ``is_queuing``: the submit still queues rows, and it is not known how many have ended.
    """

    total: int
    ok: int = 0
    failed: int = 0
    canceled: int = 0
    running: int = 0
    completion_tokens: int = 0
    delay: str = ""  # the reason why it is slow, if it is
    is_queuing: bool = False

    @property
    def num_ended(self) -> int:
        return self.ok + self.failed + self.canceled


class Rates:
    """Rows and tokens a second over the last ``WINDOW_SECONDS``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int, int]] = deque()

    def add(self, snapshot: Snapshot) -> None:
        if snapshot.is_queuing:  # else rows that ended earlier would count as ended now
            return
        now = self._clock()
        self._samples.append((now, snapshot.num_ended, snapshot.completion_tokens))
        while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW_SECONDS:
            self._samples.popleft()

    @property
    def rows_per_second(self) -> float:
        return self._slope(1)

    @property
    def tokens_per_second(self) -> float:
        return self._slope(2)

    def _slope(self, column: int) -> float:
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        seconds = last[0] - first[0]
        # A retried row no longer counts as ended, so the sum can fall.
        return max(0.0, (last[column] - first[column]) / seconds) if seconds > 0 else 0.0


class Reporter(Protocol):
    """Shows progress. ``note`` prints a sentence once, above the progress."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def update(self, snapshot: Snapshot) -> None: ...

    def note(self, text: str) -> None: ...


class PlainReporter:
    """Prints a line after a change, at most one every few seconds. A new delay is shown at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates = Rates(clock)
        self._shown_at = clock()
        self._shown: Snapshot | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, snapshot: Snapshot) -> None:
        self._rates.add(snapshot)
        is_due = self._clock() - self._shown_at >= PLAIN_INTERVAL_SECONDS
        before = self._shown.delay if self._shown else ""
        if snapshot.delay and snapshot.delay.split()[0] not in before:
            is_due = True
        if is_due and snapshot != self._shown:
            self._shown_at, self._shown = self._clock(), snapshot
            click.echo(
                f"{snapshot.num_ended}/{snapshot.total} {details(snapshot, self._rates)}", err=True
            )

    def note(self, text: str) -> None:
        click.echo(f"batchkv: {printable(text)}", err=True)


class LiveReporter:
    """A bar that is redrawn in place and removed at the end."""

    def __init__(self) -> None:
        self._rates = Rates()
        self._bar: RichProgress = _bar()
        self._task = self._bar.add_task("", total=None, details="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, snapshot: Snapshot) -> None:
        self._rates.add(snapshot)
        self._bar.update(
            self._task,
            total=snapshot.total,
            completed=snapshot.num_ended,
            details=details(snapshot, self._rates),
        )

    def note(self, text: str) -> None:
        self._bar.console.print(
            f"batchkv: {printable(text)}", markup=False, highlight=False, soft_wrap=True
        )


def reporter() -> Reporter:
    """The reporter for standard error: live on a terminal, plain elsewhere."""
    is_terminal = sys.stderr.isatty()
    return LiveReporter() if is_terminal else PlainReporter()


def details(snapshot: Snapshot, rates: Rates) -> str:
    """The text after the count: held rows, failures, tokens a second, time left, delay."""
    parts = [f"{snapshot.running} held"]
    if snapshot.failed:
        parts.append(f"{snapshot.failed} failed")
    if snapshot.canceled:
        parts.append(f"{snapshot.canceled} canceled")
    if rates.tokens_per_second:
        parts.append(f"{rates.tokens_per_second:,.0f} tok/s")
    if rates.rows_per_second and not snapshot.delay:  # during a delay an old rate means nothing
        left = (snapshot.total - snapshot.num_ended) / rates.rows_per_second
        parts.append(f"{duration(left)} left")
    if snapshot.delay:
        parts.append(printable(snapshot.delay))
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Seconds in words: ``45s``, ``3m20s``, ``2h05m``, ``3d04h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def printable(text: str) -> str:
    """The text with control and direction characters as escapes. Newline and tab stay."""
    safe = _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return safe.encode("utf-8", "backslashreplace").decode("utf-8")


def _bar() -> RichProgress:
    # Imported here: rich takes 50 ms, and most commands show no bar.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[details]}", markup=False),
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=5,
    )

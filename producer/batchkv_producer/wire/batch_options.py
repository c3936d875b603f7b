"""Options of a batch: priority, deadline, dedupe, reuse, how long results are kept, the adapter.

Except for the adapter, the batch's identity does not depend on them. The same file, model and
defaults join the batch that exists, and that batch keeps its own options.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from batchkv_producer.errors import UsageError
from batchkv_producer.wire.adapter import Adapter
from batchkv_producer.wire.maker import NOBODY, Maker
from batchkv_producer.wire.redis_keys import PRIORITIES
from batchkv_producer.wire.transition_types import BatchRecord

MAX_SECONDS = 10 * 365 * 86400
LOCAL_SCOPE = "local"  # of batches that are submitted without a key
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"(?:[0-9]{1,9}[smhdw])+")
_PART = re.compile(r"([0-9]+)([smhdw])")


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment: seconds from now, or ``at`` in seconds since 1970 (0: not given)."""

    in_seconds: int = 0
    at: int = 0

    def moment(self, server_seconds: Callable[[], int]) -> int:
        """Seconds since 1970, by the server's clock; raises UsageError when it is past."""
        now = server_seconds()
        if not self.at:
            return now + self.in_seconds
        if self.at <= now:
            raise UsageError(f"--expires: {moment_text(self.at)} is past")
        return self.at


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of a batch; None is "not given". ``keep_seconds`` counts from the batch's end.

    ``fresh``: compute all rows again, in a new generation. ``mixed``: workers of several KV schemes
    and dtypes may share the batch. ``maker``: the known part of its maker. ``adapter``: the model's
    adapter. It is the only option that the batch's identity depends on. ``reuse``: its rows may end
    with answers of earlier batches that have it, and its answers are remembered for later ones.
    ``reuse_scope``: only batches of one scope exchange answers; the gateway gives each key one.
    """

    priority: str | None = None
    expires: Deadline | None = None
    dedupe: bool = False
    keep_seconds: int | None = None
    fresh: bool = False
    mixed: bool = False
    maker: Maker = NOBODY
    adapter: Adapter | None = None
    reuse: bool = False
    reuse_scope: str = LOCAL_SCOPE

    def __post_init__(self) -> None:
        if self.priority not in (None, *PRIORITIES):
            known = ", ".join(PRIORITIES)
            raise UsageError(f"the priority must be one of {known}; got {self.priority!r}")
        if self.keep_seconds is not None and not 1 <= self.keep_seconds <= MAX_SECONDS:
            raise UsageError(f"keep must be 1 second to 10 years, got {self.keep_seconds} s")
        if self.reuse and self.fresh:
            raise UsageError(
                "--fresh computes all rows, and --reuse takes remembered answers: give one of them"
            )

    def as_fields(self, server_seconds: Callable[[], int]) -> dict[str, str | int]:
        """Fields of the batch's hash, for the options that were given."""
        found: dict[str, str | int] = {}
        if self.priority not in (None, "normal"):
            found["priority"] = str(self.priority)
        if self.expires is not None:
            found["expires"] = self.expires.moment(server_seconds)
        if self.dedupe:
            found["dedupe"] = 1
        if self.reuse:
            found["reuse"] = self.reuse_scope
        if self.keep_seconds is not None:
            found["keep"] = self.keep_seconds
        if self.adapter is not None:
            found["adapter"] = self.adapter.name
        return found


NO_OPTIONS = BatchOptions()
Terms = BatchOptions  # its name up to 0.1.0
NEVER = Deadline()  # for a retry: removes the deadline


def differences(there: BatchRecord, asked: BatchOptions) -> tuple[str, ...]:
    """One sentence for each option that differs in the joined batch, which keeps its own."""
    found = []
    if asked.priority not in (None, there.priority):
        found.append(f"its priority stays {there.priority}")
    if asked.expires is not None:
        found.append(
            f"its deadline stays: {moment_text(there.expires) if there.expires else 'none'}"
        )
    if asked.dedupe and not there.is_deduped:
        found.append("it was submitted without --dedupe, and stays so")
    if asked.reuse and not there.is_reusing:
        found.append("it was submitted without --reuse, and stays so")
    if asked.keep_seconds not in (None, there.keep_seconds):
        kept = f"{there.keep_seconds} s after its end" if there.keep_seconds else "without a limit"
        found.append(f"its results stay {kept}, as it was submitted")
    return tuple(found)


def seconds_of(text: str) -> int:
    """A duration like ``30m``, ``8h``, ``2d`` or ``1d12h`` in seconds; raises ValueError."""
    word = text.strip().lower()
    seconds = 0
    if _DURATION.fullmatch(word):
        seconds = sum(int(count) * _UNITS[unit] for count, unit in _PART.findall(word))
    if not 1 <= seconds <= MAX_SECONDS:
        raise ValueError(f"{text!r} is not a duration of 1s to 10 years, like 30m, 8h or 2d")
    return seconds


def deadline_of(text: str) -> Deadline:
    """A duration, or a time in ISO 8601 (in this machine's zone if it names none)."""
    try:
        return Deadline(in_seconds=seconds_of(text))
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text.strip())
        at = int(moment.timestamp())
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"{text!r} is neither a duration (30m, 8h, 2d) nor a time (2026-08-01T18:00)"
        ) from None
    if at <= time.time():
        raise ValueError(f"{moment_text(at)} is past")
    return Deadline(at=at)


def moment_text(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

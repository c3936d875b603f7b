"""Copies answers of an earlier batch to a corrected file's batch.

A row whose request was answered there (equal digests, ``row_facts``) is not computed again, if the
earlier batch was computed with the same weights, KV scheme and dtype. The server copies the answer
in the step that queues the rest of the chunk (``lua/submit.lua``, which compares once more). So a
row is either kept or queued, never both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from batchkv_producer.monitor.status import find_batch
from batchkv_producer.order.planner import BatchPlan
from batchkv_producer.results.stored_rows import in_finish_order
from batchkv_producer.submit import fingerprint as weights
from batchkv_producer.wire import redis_keys, row_facts

_COUNTS = ("total", "ok", "failed", "canceled", "cut")
_FIELDS = ("style", "model", "fingerprint", "scheme", "mixed", "forgotten", *_COUNTS)


@dataclass(slots=True)
class EarlierBatch:
    """The batch whose answers may be kept, by its full id, and its answers.

    ``num_alike`` rows of the new file have a request that was answered there, even if no answer is
    kept. ``num_ended`` is the number of ends of its rows when it was read; a row that ends later
    may have no answer. ``num_left`` rows of it had not ended. ``cut_lines`` of it ended at
    max_tokens. ``why_not``: the reason if no answer can be kept.
    """

    batch_id: str
    num_alike: int = 0
    num_ended: int = 0
    num_left: int = 0
    why_not: str = ""
    cut_lines: set[int] = field(default_factory=set)

    def look(
        self,
        connection: Redis,
        plan: BatchPlan,
        relatives: Collection[str],
        model: str,
        *,
        fresh: bool = False,
    ) -> None:
        """Give a sealed plan the rows that were answered there.

        ``relatives`` are the ids of the plan's own batch in all generations. ``fresh``: compute all
        rows.
        """
        values: Any = connection.hmget(redis_keys.batch(self.batch_id), _FIELDS)
        texts = [(value or b"").decode("utf-8", "replace") for value in values]
        stored = dict(zip(_FIELDS, texts, strict=True))
        same_file = "it was made of the same file" if self.batch_id in relatives else ""
        self.why_not = same_file or _why_not(stored, model)
        if self.why_not:
            return
        self.num_ended = int(connection.llen(redis_keys.done(self.batch_id)))
        unanswered = set[int]()
        total, ok, failed, canceled, _ = (_whole(stored[name]) for name in _COUNTS)
        self.num_left = max(0, total - ok - failed - canceled)
        if failed or canceled or stored["cut"]:
            for row in in_finish_order(connection, self.batch_id):
                if row.result.outcome != "ok":
                    unanswered.add(row.line)
                elif row.result.finish_reason == "length":
                    self.cut_lines.add(row.line)
        alike = row_facts.digests(connection, self.batch_id)
        self.num_alike = plan.keep(pair for pair in alike if pair[1] not in unanswered)
        if not self.num_alike:
            self.why_not = "none of its rows has the same request as a row of this file"
        elif weights.of_model(model) not in ("", stored["fingerprint"]):
            self.why_not = "the model's files have changed since"
        elif fresh:
            self.why_not = "--fresh computes all rows"

    def sentence(self, num_kept: int) -> str:
        """The outcome in a sentence."""
        if num_kept:
            rows = "1 answer" if num_kept == 1 else f"{num_kept:,} answers"
            kept = f"kept {rows} of batch {self.batch_id}: these rows have the same request"
            return kept + self._open_rows()
        why = self.why_not or (
            "it was computed with other weights, KV scheme or dtype, or rows of it ended meanwhile"
        )
        return f"no answer of batch {self.batch_id} can be kept: {why}{self._open_rows()}"

    def _open_rows(self) -> str:
        """The sentence about its open rows, which are still computed."""
        if not (self.num_alike and self.num_left):
            return ""
        rows = "1 row of it waits" if self.num_left == 1 else f"{self.num_left:,} rows of it wait"
        return f". {rows} to be computed all the same: `batchkv cancel {self.batch_id}` ends that"


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 16 else 0


def _why_not(stored: dict[str, str], model: str) -> str:
    """Why no answer of a batch with these fields can be kept; "" if answers can be."""
    if not stored["model"] or stored["forgotten"]:
        return "it is no longer on the server"
    if not stored["style"]:
        return "it was submitted by an older version"
    if stored["model"] != model:
        return f"its model is {stored['model']}"
    if not (stored["fingerprint"] and stored["scheme"]) or stored["mixed"]:
        return "the weights and KV scheme that computed it are not known"
    return "it has no answers" if stored["ok"] in ("", "0") else ""


def earlier_named(connection: Redis, wanted: str | None) -> EarlierBatch | None:
    """Find the batch by its id or a prefix of it. Raises NotFoundError."""
    return EarlierBatch(find_batch(connection, wanted)) if wanted else None

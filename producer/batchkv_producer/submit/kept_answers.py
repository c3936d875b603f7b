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
_SAID = ("style", "model", "fingerprint", "scheme", "mixed", "forgotten", *_COUNTS)


@dataclass(slots=True)
class EarlierBatch:
    """The batch whose answers may be kept, by its full id, and what was found there.

    ``num_alike`` rows of the new file ask for what was answered there, also where nothing is kept.
    ``num_ended`` is how often rows of it had ended when it was looked at: what ends later is not
    known to be an answer. ``num_left`` rows of it had not ended. ``cut_lines`` of it ended at
    max_tokens. ``why_not``, in words, if nothing can be kept of it.
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
        """Tell a sealed plan which of its rows were answered there.

        ``relatives`` are the ids of the plan's own batch in all generations; ``fresh``: all rows
        are to be computed.
        """
        values: Any = connection.hmget(redis_keys.batch(self.batch_id), _SAID)
        texts = [(value or b"").decode("utf-8", "replace") for value in values]
        said = dict(zip(_SAID, texts, strict=True))
        same_file = "it is of the same file" if self.batch_id in relatives else ""
        self.why_not = same_file or _why_not(said, model)
        if self.why_not:
            return
        self.num_ended = int(connection.llen(redis_keys.done(self.batch_id)))
        unanswered = set[int]()
        total, ok, failed, canceled, _ = (_whole(said[name]) for name in _COUNTS)
        self.num_left = max(0, total - ok - failed - canceled)
        if failed or canceled or said["cut"]:
            for row in in_finish_order(connection, self.batch_id):
                if row.result.outcome != "ok":
                    unanswered.add(row.line)
                elif row.result.finish_reason == "length":
                    self.cut_lines.add(row.line)
        alike = row_facts.digests(connection, self.batch_id)
        self.num_alike = plan.keep(pair for pair in alike if pair[1] not in unanswered)
        if not self.num_alike:
            self.why_not = "none of its rows asks for what a row of this file does"
        elif weights.of_model(model) not in ("", said["fingerprint"]):
            self.why_not = "the model's files have changed since"
        elif fresh:
            self.why_not = "--fresh computes all rows"

    def told(self, num_kept: int) -> str:
        """What became of it, in a sentence."""
        if num_kept:
            rows = "1 answer" if num_kept == 1 else f"{num_kept:,} answers"
            kept = f"kept {rows} of batch {self.batch_id}: these rows ask for the same"
            return kept + self._what_is_left()
        why = self.why_not or (
            "it was computed with other weights, KV scheme or dtype, or rows of it ended meanwhile"
        )
        return f"no answer of batch {self.batch_id} can be kept: {why}{self._what_is_left()}"

    def _what_is_left(self) -> str:
        """Rows of it that are still to be computed, as if its file had not been mended."""
        if not (self.num_alike and self.num_left):
            return ""
        rows = "1 row of it waits" if self.num_left == 1 else f"{self.num_left:,} rows of it wait"
        return f". {rows} to be computed all the same: `batchkv cancel {self.batch_id}` ends that"


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 16 else 0


def _why_not(said: dict[str, str], model: str) -> str:
    """Why nothing can be kept of a batch that says this of itself; "" when something may be."""
    if not said["model"] or said["forgotten"]:
        return "it is no longer on the server"
    if not said["style"]:
        return "it was submitted by an older version"
    if said["model"] != model:
        return f"its model is {said['model']}"
    if not (said["fingerprint"] and said["scheme"]) or said["mixed"]:
        return "with which weights and KV scheme it was computed is not known"
    return "it has no answers" if said["ok"] in ("", "0") else ""


def earlier_named(connection: Redis, wanted: str | None) -> EarlierBatch | None:
    """The batch that somebody names, by its id or a prefix; raises NotFoundError."""
    return EarlierBatch(find_batch(connection, wanted)) if wanted else None

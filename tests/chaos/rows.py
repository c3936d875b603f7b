"""The rows of a storm: how they come into the queue, and what each must have come to at the end."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from redis import Redis
from redis.exceptions import RedisError

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.choice import Choice
from batchkv_producer.wire.job import Request, SamplingParams, decode_result, encode_job
from batchkv_producer.wire.transitions import MAX_DEATHS, Transitions
from batchkv_worker.events import Completed
from chaos import audit
from support.worker_harness import MODEL, QUEUE


@dataclass(frozen=True, slots=True)
class Work:
    """A request for each line, and what its choices have to say (``said``)."""

    requests: Sequence[Request]
    answers: Sequence[tuple[str, ...]]

    @classmethod
    def of_prompts(
        cls,
        prompts: Sequence[str],
        answers: Sequence[tuple[str, ...]],
        params: Sequence[SamplingParams],
    ) -> Work:
        """Prompts that no template changes."""
        pairs = enumerate(zip(prompts, params, strict=True), 1)
        requests = [
            Request(f"c{line}", "completion", prompt=prompt, params=one)
            for line, (prompt, one) in pairs
        ]
        return cls(requests, answers)


def said(choice: Choice | Completed) -> str:
    """All that a choice says: its text, and behind it the thought and the calls, if there are."""
    calls = "".join(f" calls {one.name}({one.arguments})" for one in choice.tool_calls)
    thought = f" thought {choice.reasoning}" if choice.reasoning else ""
    return f"{choice.text}{thought}{calls}"


@dataclass(slots=True)
class Ends:
    """How rows ended: those that cost too many holders, and how many cost how many."""

    num_failed: int = 0
    deaths: Counter[int] = field(default_factory=Counter)


class Rows:
    """One batch, submitted in chunks as they fall due."""

    def __init__(self, work: Work, name: str, chunk_rows: int) -> None:
        self._work = work
        self._chunk_rows = chunk_rows
        self.total = len(work.requests)
        self.num_chunks = -(-self.total // chunk_rows)
        self.batch_id = hashlib.sha256(name.encode()).hexdigest()[:16]
        self.num_due = self._most_submitted = 0
        self.num_resubmitted = 0

    def submit_to(self, connection: Redis, num_due: int) -> None:
        """Submit the first chunks. A server that lost its last second gets them again."""
        self.num_due = min(self.num_chunks, max(self.num_due, num_due))
        with suppress(RedisError):
            moves = Transitions(connection)
            fields: dict[str, str | int] = {"digest": "0" * 64, "name": "storm", "model": MODEL}
            fields |= {"queue": QUEUE, "total": self.total, "num_chunks": self.num_chunks}
            there = moves.create(self.batch_id, fields).num_enqueued
            self.num_resubmitted += max(0, self._most_submitted - there)
            for chunk in range(there, self.num_due):
                moves.submit(self.batch_id, QUEUE, chunk, self._jobs(chunk), [], 0)
            self._most_submitted = self.num_due

    def _jobs(self, chunk: int) -> list[tuple[int, bytes, int]]:
        first = chunk * self._chunk_rows
        requests = self._work.requests[first : first + self._chunk_rows]
        return [(line, encode_job(one), 0) for line, one in enumerate(requests, first + 1)]

    def is_done(self, connection: Redis) -> bool:
        """Whether all rows have ended, and stale ids have left the queue too."""
        num_ended = connection.hlen(redis_keys.results(self.batch_id))
        return num_ended == self.total and not connection.exists(redis_keys.queue(QUEUE))

    def books(self, connection: Redis) -> audit.Books | None:
        """See ``audit.look``; None when the batch is not there."""
        if not connection.exists(redis_keys.batch(self.batch_id)):
            return None
        return audit.look(connection, self.batch_id, QUEUE, self.total, self._chunk_rows)

    def check(self, connection: Redis) -> Ends:
        """Each line has one result, the right one, and nothing of any job is left anywhere."""
        books = self.books(connection)
        assert books is not None and books.faults(self.total) == []
        assert (books.ended, books.num_done, books.lost) == (self.total, self.total, [])
        found = connection.hgetall(redis_keys.results(self.batch_id))
        ends = Ends()
        for line, answer in enumerate(self._work.answers, 1):
            key = redis_keys.job(redis_keys.job_id(self.batch_id, line))
            names = ("bkv_died", "bkv_halves", "retries_left")
            deaths, halves, retries_left = (
                int(value or 0) for value in connection.hmget(key, names)
            )
            ends.deaths[deaths] += 1
            result = decode_result(found[str(line).encode()])
            assert result.custom_id == f"c{line}"
            if result.outcome == "failed" and (halves >= 2 * MAX_DEATHS or retries_left == 0):
                # It died alone, by our count, or by that of RQ's clean-up, which was quicker.
                ends.num_failed += 1
                continue
            texts = tuple(said(choice) for choice in result.choices)
            assert (result.outcome, texts) == ("ok", answer), (line, result)
        assert audit.leftovers(connection, QUEUE) == []
        return ends

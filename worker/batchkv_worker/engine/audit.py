"""Checks that cached prefixes are right: a share of the rows that used one is computed again.

Such a replay is a row like any other, without the cache. Its answer is not reported. Its tokens
should be those of the first row. Two correct computations may still differ: they round differently,
and two tokens may be nearly equally likely. If a block has wrong content, many rows differ early.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from batchkv_worker.sequence import Sequence

log = logging.getLogger("batchkv.cache")


class Audit:
    """Chooses the rows to replay and compares them.

    ``share``: of the rows with a cached prefix, 0 to 1. ``count`` gets "audited" and
    "audit_differs".
    """

    def __init__(self, share: float, count: Callable[[str], None]) -> None:
        self._share = share
        self._count = count
        self._random = random.Random()
        self.num_audited = self.num_differing = 0

    def close(self) -> None:
        """Log how many rows were compared and how many differed."""
        if self._share:
            log.info(
                "audit: %d hits computed again, %d differ", self.num_audited, self.num_differing
            )

    def replay(self, row: Sequence, tokenizer: Any) -> Sequence | None:
        """The row that repeats a row that has ended; None when this one is not chosen."""
        # A row on converted blocks may differ: its user asked for that.
        is_hit = row.num_cached > 0 and not row.is_converted
        if not is_hit or not self._share or self._random.random() >= self._share:
            return None
        detokenizer = tokenizer.detokenizer if row.generation.stop else None
        job_id = f"replay of {row.job_id}"  # no job has such an id: it has blanks
        replay = Sequence(job_id, row.prompt, row.generation, replay_of=row)
        replay.detokenizer, replay.guide = detokenizer, row.guide and row.guide.fresh()
        return replay

    def compare(self, replay: Sequence) -> None:
        """A replay has ended: count it, and log where it differs from its row."""
        row = replay.replay_of
        assert row is not None
        self._count("audited")
        self.num_audited += 1
        if replay.generated == row.generated:
            return
        self._count("audit_differs")
        self.num_differing += 1
        pairs = enumerate(zip(replay.generated, row.generated, strict=False))
        shorter = min(len(replay.generated), len(row.generated))
        at = next((place for place, (a, b) in pairs if a != b), shorter)
        log.warning(
            "audit: job %s went on from %d cached tokens and differs from its computation without "
            "them at token %d of its answer",
            *(row.job_id, row.num_cached, at),
        )

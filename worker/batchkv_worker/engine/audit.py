"""Trust, and look: a share of the rows that went on from a cached prefix is computed again without.

The second computation is a row like any other, of which nobody hears. Its tokens must be those of
the first. They can differ where two correct computations round differently and two tokens were
nearly even; a block of wrong content shows as many rows that differ early.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from batchkv_worker.sequence import Sequence

log = logging.getLogger("batchkv.cache")


class Audit:
    """``share`` of the hits, 0 to 1; ``count`` hears "audited" and "audit_differs"."""

    def __init__(self, share: float, count: Callable[[str], None]) -> None:
        self._share = share
        self._count = count
        self._random = random.Random()
        self.num_audited = self.num_differing = 0

    def close(self) -> None:
        """Say what came of it."""
        if self._share:
            log.info(
                "audit: %d hits computed again, %d differ", self.num_audited, self.num_differing
            )

    def twin(self, row: Sequence, tokenizer: Any) -> Sequence | None:
        """The row to compute for a row that has ended, or None: it is not looked at."""
        # A row on converted blocks may differ: its user asked for that.
        is_hit = row.num_cached > 0 and row.twin_of is None and not row.is_converted
        if not is_hit or not self._share or self._random.random() >= self._share:
            return None
        detokenizer = tokenizer.detokenizer if row.generation.stop else None
        return Sequence(
            row.job_id, row.prompt, row.generation, detokenizer=detokenizer, twin_of=row
        )

    def compare(self, twin: Sequence) -> None:
        """A twin has ended too."""
        row = twin.twin_of
        assert row is not None
        self._count("audited")
        self.num_audited += 1
        if twin.generated == row.generated:
            return
        self._count("audit_differs")
        self.num_differing += 1
        pairs = enumerate(zip(twin.generated, row.generated, strict=False))
        shorter = min(len(twin.generated), len(row.generated))
        at = next((place for place, (a, b) in pairs if a != b), shorter)
        log.warning(
            "audit: job %s went on from %d cached tokens and differs from its computation without "
            "them at token %d of its answer",
            *(row.job_id, row.num_cached, at),
        )

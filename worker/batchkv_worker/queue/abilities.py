"""The abilities that this worker claims: rows that need another one wait for another worker."""

from __future__ import annotations

import logging

from batchkv_producer.wire.maker import ABILITIES, GRAMMAR
from batchkv_worker.engine.grammar.available import why_not

log = logging.getLogger("batchkv.worker")


def own_abilities() -> tuple[str, ...]:
    """All of this version, without grammars if their library cannot be loaded."""
    return tuple(name for name in ABILITIES if name != GRAMMAR or not why_not())


def log_missing() -> None:
    """Log at the start what this worker cannot do."""
    if fault := why_not():
        log.warning(
            "rows with response_format, structured_outputs or guided_* are left to other workers: "
            "%s",
            fault,
        )

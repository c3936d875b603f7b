"""Whether the model on the disk is still the one that was loaded.

It is checked only while rows wait that need another model. A worker whose model is outdated may be
of no use until it is started again.
"""

from __future__ import annotations

import logging
import time

from batchkv_worker.errors import EXIT_MODEL_CHANGED
from batchkv_worker.queue.timers import Timer

log = logging.getLogger("batchkv.worker")

CHECK_SECONDS = 2.0  # between two checks


class ModelWatch:
    """When to compare the model's files, and the outcome."""

    def __init__(self) -> None:
        self._timer = Timer(CHECK_SECONDS)
        self.has_changed = False

    @property
    def is_due(self) -> bool:
        """Whether to compare the files now."""
        return not self.has_changed and self._timer.is_due(time.monotonic())

    def note(self, has_changed: bool) -> None:
        """The files were compared."""
        self._timer.restart(time.monotonic())
        self.has_changed = has_changed
        if has_changed:
            log.warning(
                "rows wait for another model than was loaded, and its files have changed since: "
                "ending with code %d, to be started again",
                EXIT_MODEL_CHANGED,
            )

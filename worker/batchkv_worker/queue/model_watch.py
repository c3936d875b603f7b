"""Whether the model that was loaded is the one that stands on the disk now.

Looked at only while rows are passed by for what the worker computes with: such a worker may be of
no use until it is started again.
"""

from __future__ import annotations

import logging
import time

from batchkv_worker.engine.thread import EngineThread
from batchkv_worker.errors import EXIT_MODEL_CHANGED
from batchkv_worker.queue.background import Beside
from batchkv_worker.queue.timers import Timer

log = logging.getLogger("batchkv.worker")

LOOK_SECONDS = 2.0  # between two looks


class ModelWatch:
    """``is_outdated`` once other files stand there: what has started then is the last."""

    def __init__(self, engine: EngineThread, beside: Beside) -> None:
        self._engine = engine
        self._beside = beside
        self._timer = Timer(LOOK_SECONDS)
        self.is_outdated = False

    def look(self) -> None:
        """To be called after rows were passed by."""
        now = time.monotonic()
        if self.is_outdated or not self._timer.is_due(now):
            return
        self.is_outdated = self._beside(self._engine.has_changed)
        self._timer.restart(time.monotonic())
        if self.is_outdated:
            log.warning(
                "rows wait for another model than was loaded, and its files have changed since: "
                "ending with code %d, to be started again",
                EXIT_MODEL_CHANGED,
            )

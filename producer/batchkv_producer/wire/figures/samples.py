"""Workers count their work here: totals of each queue, and one sample of it a minute.

The call may be repeated and may come from several workers: no work is counted twice. It is optional
for a worker. A hub of an older version refuses the keys (``live.is_refused``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.scripts import Scripts

MAX_SAMPLES = 1440  # of a queue: those of a day
EXPIRY_SECONDS = 2 * 86_400  # after the last call for a queue


@dataclass(frozen=True, slots=True)
class WorkCounts:
    """What was done. ``prompt_tokens`` has the cached tokens, too. Rows of questions count."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    rows_done: int = 0
    rows_failed: int = 0


class SampleMoves(Scripts):
    """The calls over one connection."""

    def count(self, worker: str, queues: Sequence[str], since: str, counts: WorkCounts) -> int:
        """Add a worker's work to its queue's totals, and store samples that are due.

        ``queues``: all queues that it serves; the work is of the first. ``since`` names the process
        that made the counts. Returns how many samples were stored.
        """
        keys = [redis_keys.worker(worker)]
        for queue in queues:
            keys += [redis_keys.samples(queue), redis_keys.totals(queue)]
            keys += redis_keys.waiting_lists(queue)
            keys += [redis_keys.registry("wip", queue), redis_keys.workers(queue)]
        args = [MAX_SAMPLES, EXPIRY_SECONDS, since, *astuple(counts)]
        return int(self._run("sample", keys, args))

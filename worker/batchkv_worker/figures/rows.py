"""How the rows of one lane of a worker ended, and their tokens."""

from __future__ import annotations

from batchkv_producer.wire.figures.samples import WorkCounts
from batchkv_producer.wire.job import Usage

OK, CANCELED, REUSED = "ok", "canceled", "reused"


class RowCounts:
    """Written by one thread; any thread may read it."""

    def __init__(self) -> None:
        self.by_code: dict[str, int] = {}  # "ok", "canceled", "reused" or an error code
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0

    def add(self, code: str, usage: Usage | None = None, count: int = 1) -> None:
        """A row has ended, or ``count`` of them."""
        self.by_code[code] = self.by_code.get(code, 0) + count
        if usage is not None:
            self.prompt_tokens += usage.prompt
            self.cached_tokens += usage.cached
            self.completion_tokens += usage.completion

    @property
    def work(self) -> WorkCounts:
        """For the totals of the queue. A canceled or reused row is neither done nor failed."""
        codes = self.by_code.copy()
        num_done, _, _ = (codes.pop(code, 0) for code in (OK, CANCELED, REUSED))
        tokens = self.prompt_tokens, self.cached_tokens, self.completion_tokens
        return WorkCounts(*tokens, num_done, sum(codes.values()))

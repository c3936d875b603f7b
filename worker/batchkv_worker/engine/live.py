"""Live rows in the engine: rows that somebody waits for.

They are computed before all others, and their text is sent as it is made. A prompt of a batch that
is being computed is set aside until theirs are done. If no slot is free, a row of a batch leaves
its slot: its content is parked, and it goes on later where it was.

While live rows come, and for ``IN_USE_SECONDS`` after the last one, one slot is kept free, and
prompts of batches are computed in smaller chunks. An engine without live rows does none of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from batchkv_worker.engine.decode_rows import DecodeRows
from batchkv_worker.engine.tokens.text_stream import TextStream
from batchkv_worker.events import Work
from batchkv_worker.sequence import Sequence

IN_USE_SECONDS = 60.0
CHUNKS_BESIDE = 2  # one while live rows come, which wait for it


class LiveRows:
    """The engine's side of the live lane. ``chunk_tokens``: of prompts of batches meanwhile."""

    def __init__(
        self,
        decode_rows: DecodeRows,
        chunk_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decode_rows = decode_rows
        self._scheduler = decode_rows.scheduler
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._until = 0.0  # the lane is in use; 0: it is not

    @property
    def chunks_beside(self) -> int:
        """How many prompt chunks a step has in which rows decode, at most."""
        return 1 if self._until else CHUNKS_BESIDE

    def attach(self, row: Sequence, work: Work, tokenizer: Any) -> None:
        """If somebody waits for the row, let its text be sent as it is made."""
        if not work.is_live:
            return
        row.is_live = True
        self._until = self._clock() + IN_USE_SECONDS
        self._scheduler.use_lane(self._chunk_tokens)
        if work.num_wanted > 1 or work.pieces == "none":
            return  # its choices come together, at the end
        row.detokenizer = row.detokenizer or tokenizer.detokenizer
        reader = row.reader
        if reader is None:
            row.stream = TextStream(row.generation.stop)
        else:
            ends = (*row.generation.stop, *reader.ends)
            row.stream = TextStream(ends, reader.certain, has_thought=work.pieces == "all")

    def make_way(self, read_back: Callable[[], bool]) -> None:
        """Let the first live row have a slot. ``read_back`` reads the step in flight."""
        if not self._until:
            return
        if self._clock() > self._until:
            self._until = 0.0
            self._scheduler.use_lane(0)
        if self._scheduler.needs_way:
            self._decode_rows.give_way(read_back)

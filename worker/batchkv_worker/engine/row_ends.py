"""How rows end: their tokens are read, and what became of them is kept as events.

A row with several choices is reported when its last choice has ended (``engine.tokens.choices``). A
replay of the audit is compared, and not reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from batchkv_producer.wire.job import ErrorCode
from batchkv_worker.engine.audit import Audit
from batchkv_worker.engine.decode_rows import DecodeRows
from batchkv_worker.engine.decode_step import Step
from batchkv_worker.engine.prefill import Prefill
from batchkv_worker.engine.tokens import outputs
from batchkv_worker.engine.tokens.choices import Choices
from batchkv_worker.events import Completed, Event, Piece, Rejected
from batchkv_worker.figures.engine import RowTimes
from batchkv_worker.guide import GuideFault
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.prefix.interface import PrefixClient
from batchkv_worker.sequence import Sequence

log = logging.getLogger("batchkv.engine")


class RowEnds:
    """Ends the rows of one engine. ``events`` are those that its caller has not got yet."""

    def __init__(
        self,
        loaded: LoadedModel,
        decode_rows: DecodeRows,
        prefill: Prefill,
        audit: Audit,
        choices: Choices,
        client: PrefixClient,
        cancel: Callable[[str], None],
    ) -> None:
        self._loaded = loaded
        self.decode_rows = decode_rows
        self.prefill = prefill
        self.audit = audit
        self.choices = choices
        self.client = client
        self._cancel = cancel  # one choice of a row, by its id
        self.events: list[Event] = []
        self.times = RowTimes()
        self.num_generated = 0  # tokens, since the engine was built

    def close(self) -> None:
        """Log what the audit found."""
        self.audit.close()

    def read(self, step: Step, read: outputs.ReadBack) -> None:
        """Take what was read of a computed step, and end the rows that it completes."""
        for index, row in enumerate(step.rows):
            if row is None or row.is_ended:
                continue
            self.num_generated += 1
            if not row.generated:
                self.times.note_first_token(row)
            try:
                event = outputs.take(row, index, read, self._loaded.tokenizer)
                if row.guide is not None and not row.is_ended:
                    row.guide.take(row.generated[-1])
                if row.stream is not None and event is None:
                    for text, is_thought in row.stream.next(row):
                        self.events.append(Piece(row.job_id, text, is_thought))
            except GuideFault as fault:
                self.stop(row, ErrorCode.INVALID_REQUEST, str(fault))
                continue
            except Exception as fault:
                log.exception("row %s: its answer cannot be read back", row.job_id)
                self.stop(row, ErrorCode.ENGINE_ERROR, f"{type(fault).__name__}")
                continue
            if event is not None:
                self.decode_rows.free(row)
                self._complete(row, event)

    def _complete(self, row: Sequence, event: Completed) -> None:
        """A row has ended well: compare a replay; report any other row, and perhaps replay it."""
        if row.replay_of is not None:
            self.audit.compare(row)
            return
        scheduler = self.decode_rows.scheduler
        scheduler.note_completed(len(row.generated))
        saved_ms = round(row.num_cached * self.prefill.seconds_per_token * 1000)
        event = replace(event, saved_ms=saved_ms, note=self.client.note(row))
        if (replay := self.audit.replay(row, self._loaded.tokenizer)) is not None:
            scheduler.add(replay)  # without keys: nothing cached is used or kept
        if (whole := self.choices.end(row, event)) is not None:
            self.times.note_end(row)
            self.events.append(whole)

    def stop(self, row: Sequence, code: str, message: str) -> None:
        """End a row that decodes, or waits again, with an error.

        All its choices have failed, too. A replay that fails is not reported.
        """
        row.end("error")
        self.decode_rows.free(row)
        if row.replay_of is None:
            for one in self.choices.leave(row.row_id):
                self._cancel(one)
            self.refuse(row.row_id, code, message)

    def refuse(self, job_id: str, code: str, message: str) -> None:
        """Report a row that cannot be generated."""
        self.events.append(Rejected(job_id, code, message))

"""The answer to one live row, as it comes. Thread-safe: one thread gives, another one reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from batchkv_producer.errors import BatchkvError
from batchkv_producer.wire.job import Result


class LostAnswerError(BatchkvError):
    """A live row will have no result: its worker, or the server, is gone. It may be asked again."""


class Answer:
    """Iterate over it for the pieces of the text. ``result`` is there once they have ended.

    The pieces together are the text of the result. A row that failed has a result with an error,
    and may have had pieces. Raises LostAnswerError if there will be no result.
    """

    def __init__(self, row_id: str, queue: str, cancel: Callable[[Answer], None]) -> None:
        self.row_id = row_id
        self.queue = queue
        self.result: Result | None = None
        self.is_asked = False  # the server has the row; written by the lane
        self.is_ended = False  # nothing more will be given
        self._cancel = cancel
        self._given: SimpleQueue[str | Result | LostAnswerError] = SimpleQueue()
        self._text: list[str] = []  # pieces that were read
        self._fault: LostAnswerError | None = None

    def __iter__(self) -> Iterator[str]:
        while (piece := self.next()) is not None:
            yield piece

    def next(self, timeout_seconds: float | None = None) -> str | None:
        """The next piece; None at the end. After ``timeout_seconds`` without one: an empty text."""
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            if self._fault is not None:
                raise self._fault
            if self.result is not None:
                return None
            try:
                wait = None if until is None else max(0.0, until - time.monotonic())
                given = self._given.get(wait is None or wait > 0, wait or None)
            except Empty:
                return ""
            if isinstance(given, str):
                self._text.append(given)
                return given
            if isinstance(given, LostAnswerError):
                self._fault = given
            elif rest := self._end(given):
                return rest

    def _end(self, result: Result) -> str:
        """The result is there. Returns the part of its text that was in no piece."""
        self.result = result
        sent = "".join(self._text)
        return result.text[len(sent) :] if result.text.startswith(sent) else ""

    def cancel(self) -> None:
        """Nobody waits for the answer any more. Its slot becomes free at once."""
        self._cancel(self)

    # -- called by the lane

    def give(self, piece: str | Result | LostAnswerError) -> None:
        """The next piece, or the end. After the end nothing is given."""
        if not self.is_ended:
            self.is_ended = not isinstance(piece, str)
            self._given.put(piece)

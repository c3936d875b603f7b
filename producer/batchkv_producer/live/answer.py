"""The answer to one live row, as it comes. Thread-safe: one thread gives, another one reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from batchkv_producer.errors import BatchkvError
from batchkv_producer.wire.job import Result


class LostAnswerError(BatchkvError):
    """A live row will have no result: its worker, or the server, is gone. It may be asked again."""


@dataclass(frozen=True, slots=True)
class Piece:
    """More of an answer's text, or of its thought."""

    text: str
    is_thought: bool = False


class Answer:
    """Iterate over it for the pieces of the text. ``result`` is there once they have ended.

    The pieces together are the text of the result. A row that failed has a result with an error,
    and may have had pieces. Raises LostAnswerError if there will be no result.

    Read it by ``next`` or by ``take``, not by both. ``on_given`` is called after each piece and the
    end, by the thread that gives it.
    """

    def __init__(
        self,
        row_id: str,
        queue: str,
        cancel: Callable[[Answer], None],
        on_given: Callable[[], object] = bool,
    ) -> None:
        self.row_id = row_id
        self.queue = queue
        self.result: Result | None = None
        self.is_asked = False  # the server has the row; written by the lane
        self.is_ended = False  # nothing more will be given
        self._cancel = cancel
        self._on_given = on_given
        self._given: SimpleQueue[Piece | Result | LostAnswerError] = SimpleQueue()
        self._read: dict[bool, list[str]] = {True: [], False: []}  # of the thought, of the text
        self._fault: LostAnswerError | None = None

    def __iter__(self) -> Iterator[str]:
        while (piece := self.next()) is not None:
            yield piece

    def next(self, timeout_seconds: float | None = None) -> str | None:
        """The next piece of the text; None at the end. After ``timeout_seconds``: an empty text."""
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
            for piece in self._noted(given):
                if not piece.is_thought:
                    return piece.text

    def take(self) -> list[Piece]:
        """All pieces that have come, without a wait. With the end comes the rest of each part.

        Raises LostAnswerError if there will be no result, once all pieces were returned.
        """
        found: list[Piece] = []
        with suppress(Empty):
            while True:
                found += self._noted(self._given.get_nowait())
        if self._fault is not None and not found:
            raise self._fault
        return found

    def _noted(self, given: Piece | Result | LostAnswerError) -> list[Piece]:
        if isinstance(given, Piece):
            self._read[given.is_thought].append(given.text)
            return [given]
        if isinstance(given, LostAnswerError):
            self._fault = given
            return []
        self.result = given
        rests = ((True, given.reasoning), (False, given.text))
        return [Piece(rest, kind) for kind, whole in rests if (rest := self._rest(whole, kind))]

    def _rest(self, whole: str, is_thought: bool) -> str:
        """The part of a whole text that was in no piece."""
        read = "".join(self._read[is_thought])
        return whole[len(read) :] if whole.startswith(read) else ""

    def cancel(self) -> None:
        """Nobody waits for the answer any more. Its slot becomes free at once."""
        self._cancel(self)

    # -- called by the lane

    def give(self, piece: Piece | Result | LostAnswerError) -> None:
        """The next piece, or the end. After the end nothing is given."""
        if not self.is_ended:
            self.is_ended = not isinstance(piece, Piece)
            self._given.put(piece)
            self._on_given()

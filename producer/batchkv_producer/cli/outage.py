"""What a command that follows a batch says while its server is away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from batchkv_producer.retry import called_during_outages

SAID_AFTER_SECONDS = 2.0  # a shorter outage, of a server that starts again, is not worth a line


class OutageNote:
    """Says once that the server does not answer, and since when; and that it is back.

    ``away`` is to be called again and again during an outage, ``back`` after it (``outages_told``).
    """

    def __init__(
        self, note: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._note, self._clock = note, clock
        self._since: float | None = None
        self._is_said = False

    def away(self) -> None:
        now = self._clock()
        if self._since is None:
            self._since = now
        elif not self._is_said and now - self._since >= SAID_AFTER_SECONDS:
            self._is_said = True
            began = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - self._since)))
            self._note(f"the server has not answered since {began}: asking it again")

    def back(self) -> None:
        if self._is_said:
            self._note("the server answers again")
        self._since, self._is_said = None, False


@contextmanager
def outages_told(note: Callable[[str], object]) -> Iterator[None]:
    """Inside, ``note`` gets what is to be said of long outages that ``read_with_retry`` meets."""
    outage = OutageNote(note)
    with called_during_outages(outage.away, outage.back):
        yield

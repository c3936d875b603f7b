"""The text of a live row while it is made: only what no later token can change.

Held back is a character that is not whole, and an end that may begin a stop string or a marker of
the model. Of an answer with a thought or tool calls, only the text after the thought is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from batchkv_worker.sequence import Sequence

View = Callable[[str], str]  # the part of an output so far that is certain to be the answer's text


class TextStream:
    """Implements ``sequence.TextStream``. ``ends``: no part of these texts is sent."""

    def __init__(self, ends: Iterable[str] = (), view: View = lambda text: text) -> None:
        self._ends = tuple(ends)
        self._view = view
        self._sent = ""

    def next(self, row: Sequence) -> str:
        """The text that has become certain since the last call; mostly the newest token's."""
        text = str(row.detokenizer.text).rstrip("\ufffd")
        text = self._view(text[: len(text) - held_back(text, self._ends)])
        if len(text) <= len(self._sent) or not text.startswith(self._sent):
            return ""
        new, self._sent = text[len(self._sent) :], text
        return new


def held_back(text: str, ends: Iterable[str]) -> int:
    """How many characters at the end of a text may be the beginning of one of ``ends``."""
    most = 0
    for end in ends:
        for length in range(min(len(end) - 1, len(text)), most, -1):
            if text.endswith(end[:length]):
                most = length
                break
    return most

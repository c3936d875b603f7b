"""The text of a live row while it is made: only what no later token can change.

Held back is a character that is not whole, and an end that may begin a stop string or a marker of
the model. Tool calls are not sent: they come with the result. The thought is sent if it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from batchkv_worker.sequence import Sequence

# The parts of an output so far that are certain: of the thought, and of the answer's text.
View = Callable[[str], tuple[str, str]]


class TextStream:
    """Implements ``sequence.TextStream``. ``ends``: no part of these texts is sent."""

    def __init__(
        self,
        ends: Iterable[str] = (),
        view: View = lambda text: ("", text),
        *,
        has_thought: bool = False,
    ) -> None:
        self._ends = tuple(ends)
        self._view = view
        self._has_thought = has_thought
        self._sent = {True: "", False: ""}  # of the thought, of the text

    def next(self, row: Sequence) -> list[tuple[str, bool]]:
        """What has become certain since the last call; mostly the newest token's text.

        Pieces come with whether they are of the thought.
        """
        text = str(row.detokenizer.text).rstrip("\ufffd")
        thought, answer = self._view(text[: len(text) - held_back(text, self._ends)])
        found = self._new(thought, is_thought=True) if self._has_thought else []
        return found + self._new(answer, is_thought=False)

    def _new(self, text: str, *, is_thought: bool) -> list[tuple[str, bool]]:
        sent = self._sent[is_thought]
        if len(text) <= len(sent) or not text.startswith(sent):
            return []
        self._sent[is_thought] = text
        return [(text[len(sent) :], is_thought)]


def held_back(text: str, ends: Iterable[str]) -> int:
    """How many characters at the end of a text may be the beginning of one of ``ends``."""
    most = 0
    for end in ends:
        for length in range(min(len(end) - 1, len(text)), most, -1):
            if text.endswith(end[:length]):
                most = length
                break
    return most

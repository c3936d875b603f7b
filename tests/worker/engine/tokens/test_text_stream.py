"""Pieces of a text while it is made: nothing that a later token could change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from batchkv_worker.engine.tokens.text_stream import TextStream, held_back


def row(text: str) -> Any:
    return SimpleNamespace(detokenizer=SimpleNamespace(text=text))


def pieces(stream: TextStream, *texts: str) -> list[str]:
    return ["".join(piece for piece, _ in stream.next(row(text))) for text in texts]


def test_half_a_character_waits_for_its_other_half() -> None:
    """The mark of an incomplete character is not sent; the character is, once it is whole."""
    assert pieces(TextStream(), "a", "a\ufffd", "a\ufffd\ufffd", "a\U0001f600", "a\U0001f600b") == [
        *("a", "", "", "\U0001f600", "b")
    ]


@pytest.mark.parametrize(
    ("text", "count"), [("abc", 0), ("abcS", 1), ("abcST", 2), ("S", 1), ("", 0), ("abSTOx", 0)]
)
def test_the_beginning_of_a_stop_string_waits(text: str, count: int) -> None:
    """Characters that may begin a stop string are held back, the longest beginning counts."""
    assert held_back(text, ["STOP", "Tx"]) == count
    assert held_back("abT", ["STOP", "Tx"]) == 1


def test_what_was_no_stop_string_is_sent_later() -> None:
    """A beginning that another character disproves comes with that character."""
    assert pieces(TextStream(["STOP"]), "a ST", "a STO", "a STOx", "a STOx S") == [
        *("a ", "", "STOx", " ")
    ]


def test_a_view_that_takes_text_back_sends_nothing_wrong() -> None:
    """If the certain part is no continuation of what was sent, nothing more is sent."""
    texts = iter(["ab", "ax", "abc"])
    assert pieces(TextStream((), lambda _: ("", next(texts))), "1", "2", "3") == ["ab", "", "c"]


def test_the_thought_is_sent_to_those_who_want_it() -> None:
    """Pieces of the thought are marked and come before the text's; else they are left out."""

    def view(text: str) -> tuple[str, str]:
        thought, _, answer = text.partition("|")
        return thought, answer

    wanted = TextStream((), view, has_thought=True)
    found = [piece for text in ("so", "so it", "so it|is") for piece in wanted.next(row(text))]
    assert found == [*(("so", True), (" it", True), ("is", False))]
    assert pieces(TextStream((), view), "so", "so it", "so it|is") == ["", "", "is"]

"""Outputs of rows: when a row ends, its text without the stop string, its log-probabilities."""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx
import pytest

from batchkv_worker.engine.tokens import outputs
from batchkv_worker.engine.tokens.outputs import ReadBack, read_back, take
from batchkv_worker.engine.tokens.sampling import Sampled
from batchkv_worker.events import Completed
from batchkv_worker.sequence import Generation, Sequence

END = 0


class Detokenizer:
    """Adds the pieces of tokens. Like real ones it holds back bytes of unfinished characters."""

    def __init__(self, pieces: dict[int, bytes]) -> None:
        self.pieces = pieces
        self.data = b""
        self.is_final = False

    def add_token(self, token: int) -> None:
        self.data += self.pieces[token]  # KeyError, as for ids that a tokenizer lacks

    def finalize(self) -> None:
        self.is_final = True

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace" if self.is_final else "ignore")


class Tokenizer:
    """A tokenizer of a few tokens; 0 ends a row."""

    known: ClassVar = {
        1: b"Paris",
        2: b" is",
        3: b" big",
        4: b"ST",
        5: b"OP",
        6: b"\xc3",
        7: b"\xa9",
    }
    eos_token_ids = frozenset({END})

    def __init__(self, pieces: dict[int, bytes] | None = None) -> None:
        self.pieces = pieces or self.known

    @property
    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.pieces)

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.pieces.get(token, b"?") for token in tokens).decode("utf-8", "replace")


def generate(
    *tokens: int, pieces: dict[int, bytes] | None = None, **params: Any
) -> tuple[Sequence, Completed]:
    """Give a row these tokens one by one; only the last may end it."""
    tokenizer = Tokenizer(pieces)
    row = Sequence("x", [1, 2], Generation(**({"max_tokens": 10} | params)))
    if row.generation.stop:
        row.detokenizer = tokenizer.detokenizer
    *first, last = tokens
    for token in first:
        assert take(row, 0, ReadBack([token], [-0.5], [[]], [[]]), tokenizer) is None
        assert not row.is_ended
    event = take(row, 0, ReadBack([last], [-0.5], [[]], [[]]), tokenizer)
    assert event is not None and row.is_ended
    return row, event


def test_an_end_token_ends_a_row() -> None:
    """Its text is not in the answer. It counts as generated."""
    _, event = generate(1, 2, 3, END)
    assert (event.text, event.finish_reason) == ("Paris is big", "stop")
    assert (event.usage.prompt, event.usage.completion) == (2, 4)
    assert event.token_ids == (1, 2, 3, END) and event.logprobs is None


def test_the_last_allowed_token_ends_a_row() -> None:
    """After max_tokens the reason is length, and the text has every token."""
    _, event = generate(1, 2, 3, max_tokens=3)
    assert (event.text, event.finish_reason) == ("Paris is big", "length")


@pytest.mark.parametrize(
    ("tokens", "stop", "text"),
    [
        ((1, 2, 4, 5), ("STOP",), "Paris is"),  # over two tokens
        ((1, 2, 3), (" big", " is b"), "Paris"),  # the one that begins first
        ((1,), ("a",), "P"),  # inside the first token
        ((1,), ("Paris",), ""),
        ((1, 99, 2, 4, 5), ("STOP",), "Paris is"),  # an id without text changes nothing
    ],
)
def test_a_stop_string_ends_a_row(
    tokens: tuple[int, ...], stop: tuple[str, ...], text: str
) -> None:
    """The row ends at the token that completes a stop string; the text ends before the string."""
    _, event = generate(*tokens, stop=stop)
    assert (event.text, event.finish_reason) == (text, "stop")
    assert event.token_ids == tokens


def test_a_stop_string_in_the_held_back_end_counts() -> None:
    """Text that the detokenizer only gives at the end is searched, too; the reason is stop."""
    _, event = generate(1, 6, max_tokens=2, stop=("\ufffd",))
    assert (event.text, event.finish_reason) == ("Paris", "stop")
    _, event = generate(1, 6, END, stop=("\ufffd",))
    assert (event.text, event.finish_reason) == ("Paris", "stop")


def test_a_character_over_two_tokens_is_whole() -> None:
    """Its first bytes are no text yet, so a stop string of the whole character is found."""
    _, event = generate(1, 6, 7, stop=("é",))
    assert (event.text, event.finish_reason) == ("Paris", "stop")


def test_stop_tokens_end_a_row() -> None:
    """Their text is not in the answer, unless the row wants what stopped it. They count."""
    _, event = generate(1, 2, 3, stop_token_ids=frozenset({3, 7}))
    assert (event.text, event.finish_reason) == ("Paris is", "stop")
    assert event.usage.completion == 3 and event.token_ids == (1, 2, 3)
    _, event = generate(1, 2, 3, stop_token_ids=frozenset({3}), include_stop=True)
    assert (event.text, event.finish_reason) == ("Paris is big", "stop")
    _, event = generate(1, 2, 3, stop_token_ids=frozenset({3}), include_stop=True, stop=("z",))
    assert (event.text, event.finish_reason) == ("Paris is big", "stop")


def test_an_end_token_may_be_like_any_other() -> None:
    """With ignore_eos a row goes on after it; as the last token it is not cut off."""
    shown = {END: b"<end>", **Tokenizer.known}
    for tokens, text in (((1, END, 3), "Paris<end> big"), ((1, 2, END), "Paris is<end>")):
        _, event = generate(*tokens, pieces=shown, max_tokens=3, ignore_eos=True)
        assert (event.text, event.finish_reason) == (text, "length")
    _, event = generate(1, END, pieces=shown, include_stop=True)
    assert (event.text, event.finish_reason) == ("Paris<end>", "stop")
    _, event = generate(1, END, 4, stop_token_ids=frozenset({4}), ignore_eos=True)
    assert (event.text, event.finish_reason) == ("Paris", "stop")


def test_special_tokens_have_no_text() -> None:
    """Wherever they are, and no stop string is found in them or over them."""
    hidden: dict[str, Any] = {"hidden_tokens": frozenset({4}), "max_tokens": 4}
    _, event = generate(1, 4, 5, 4, **hidden)
    assert (event.text, event.finish_reason) == ("ParisOP", "length")
    _, event = generate(1, 4, 5, 4, **hidden, stop=("STOP",))
    assert (event.text, event.finish_reason) == ("ParisOP", "length")
    _, event = generate(1, 4, 5, **hidden, stop=("sOP",))
    assert (event.text, event.finish_reason) == ("Pari", "stop")
    _, event = generate(1, 4, **hidden, stop_token_ids=frozenset({4}), include_stop=True)
    assert event.text == "Paris"


def test_the_stop_string_may_stay() -> None:
    """The text ends after it, also where more follows in its token; the first to begin counts."""
    for tokens, stop, text in (
        ((1, 2, 4, 5), ("STOP",), "Paris isSTOP"),
        ((1,), ("ar",), "Par"),
        ((1, 2, 3), (" big", " is b"), "Paris is b"),
    ):
        _, event = generate(*tokens, stop=stop, include_stop=True)
        assert (event.text, event.finish_reason) == (text, "stop")
    _, event = generate(1, 6, END, stop=("\ufffd",), include_stop=True)
    assert (event.text, event.finish_reason) == ("Paris\ufffd", "stop")


@pytest.mark.parametrize(
    ("tokens", "min_tokens", "text", "reason"),
    [
        ((1, 4, 5, 3, 3), 3, "ParisSTOP big big", "length"),  # ends within the first tokens
        ((1, 2, 4, 5), 3, "Paris is", "stop"),  # begins there, and ends after
        ((4, 5, 1, 4, 5), 2, "STOPParis", "stop"),  # the first is passed over, the second is not
        ((4, 5), 2, "STOP", "length"),
        ((4, 5, END), 2, "STOP", "stop"),
        ((4, 6, 7), 2, "ST", "stop"),  # a character over the boundary is whole after it
    ],
)
def test_stop_strings_wait_for_the_fewest_tokens(
    tokens: tuple[int, ...], min_tokens: int, text: str, reason: str
) -> None:
    """A stop string that ends in the text of the first ``min_tokens`` does not end the row."""
    _, event = generate(*tokens, stop=("STOP", "é"), min_tokens=min_tokens, max_tokens=len(tokens))
    assert (event.text, event.finish_reason) == (text, reason)


def test_token_ids_are_reported_to_rows_that_ask() -> None:
    """The prompt's are set for these rows alone: the result stores none for others."""
    _, event = generate(1, END)
    assert event.prompt_token_ids is None
    _, event = generate(1, END, return_token_ids=True)
    assert (event.prompt_token_ids, event.token_ids) == ((1, 2), (1, END))


def test_a_text_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token costs one search of the text, also the token that completes a stop string."""
    searched, find = list[str](), outputs._find_stop

    def counted(text: str, row: Sequence) -> int | None:
        searched.append(text)
        return find(text, row)

    monkeypatch.setattr(outputs, "_find_stop", counted)
    generate(1, 2, 4, 5, stop=("STOP",))
    assert searched == ["Paris", "Paris is", "Paris isST", "Paris isSTOP"]


def test_log_probabilities_of_each_token() -> None:
    """A row gets the log-probability of its token, with as many alternatives as it wants."""
    tokenizer = Tokenizer()
    read = ReadBack(
        [3, 1], [-0.5, -0.25], [[3, 2, 4], [1, 2, 3]], [[-0.5, -1, -2], [-0.25, -3, -4]]
    )
    for wanted, top in ((0, ()), (2, (("Paris", -0.25), (" is", -3)))):
        row = Sequence("x", [1], Generation(max_tokens=1, logprobs=wanted))
        event = take(row, 1, read, tokenizer)
        assert event is not None and event.logprobs is not None
        (found,) = event.logprobs
        assert (found.token, found.logprob, found.top) == ("Paris", -0.25, top)


def test_results_of_a_step_are_read_back() -> None:
    """Arrays become lists. An array that no row wants is an empty list."""
    tokens = mx.array([1, 2])
    read = read_back(Sampled(tokens, mx.array([-0.5, -1.0]), None, None))
    assert read == ReadBack([1, 2], [-0.5, -1.0], [], [])

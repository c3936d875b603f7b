"""Refuses texts that cannot fit the context, before ``requests`` tokenizes them.

Tokenizers are native code, and templates come with the model. Both may fail in any way. Here every
such failure refuses one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from batchkv_producer.intake.checks import MAX_DEPTH
from batchkv_producer.wire.job import ErrorCode

# No token is longer, so that a text beyond this many characters for each of the context's tokens
# cannot fit: it is refused before it is tokenized, which would take minutes.
MAX_TOKEN_CHARS = 128
SLICE_CHARS = 2**16  # tokenized at once while a long text is counted: megabytes, and a moment
CUT_TOKENS = 64  # a text may have that many tokens fewer for each place where it is cut
INDENT_CHARS = 4  # templates write JSON with up to that many blanks a level


class RowRefused(Exception):
    """This row cannot be generated; ``code`` is one of ``job.ErrorCode``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def check_values(values: list[Any], context: int) -> int:
    """Refuse texts and JSON whose characters cannot fit the context; how many there are.

    Numbers and brackets count, too, and so does the indentation that a template may write. The
    count stops at the limit, however large or deep the values are.
    """
    most, num_chars = context * MAX_TOKEN_CHARS, 0
    for num in _sizes(values):
        num_chars += num
        if num_chars > most:
            raise too_long(f"more than {most} characters", context)
    return num_chars


def check_text(text: str, tokenizer: Any, context: int) -> None:
    """Refuse a text that has more tokens than the context, counted in slices up to there."""
    if len(text) > context * MAX_TOKEN_CHARS:
        raise too_long(f"{len(text)} characters", context)
    if not is_within(text, tokenizer, context):
        raise too_long(f"more than {context} tokens", context)


def is_within(text: str, tokenizer: Any, num_tokens: int) -> bool:
    """Whether the text may have at most so many tokens; short texts are not counted."""
    if len(text) <= SLICE_CHARS:
        return True
    for start in range(0, len(text), SLICE_CHARS):
        num_tokens -= len(tokenizer.encode(text[start : start + SLICE_CHARS])) - CUT_TOKENS
        if num_tokens < 0:
            return False
    return True


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Turn any exception inside into a refusal of the row.

    A panic in a tokenizer's native code is a BaseException, and also the fault of one row.
    """
    try:
        yield
    except (RowRefused, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as fault:
        message = f"{what}: {type(fault).__name__}: {fault}"[:300]
        raise RowRefused(ErrorCode.INVALID_REQUEST, message) from fault


def too_long(what: str, context: int) -> RowRefused:
    """The refusal of a row that is too long for the context."""
    message = f"{what} cannot fit the model's context of {context} tokens: shorten the prompt"
    return RowRefused(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)


def _sizes(values: list[Any]) -> Iterator[int]:
    """Characters of every part of the values, one after the other."""
    open_parts = [iter(values)]
    while open_parts:
        for part in open_parts[-1]:
            yield 1 + INDENT_CHARS * min(len(open_parts) - 1, MAX_DEPTH)
            if isinstance(part, str):
                yield len(part)
            elif isinstance(part, list):
                open_parts.append(iter(part))
                break
            elif isinstance(part, dict):
                yield sum(len(name) for name in part if isinstance(name, str))
                open_parts.append(iter(part.values()))
                break
        else:
            open_parts.pop()

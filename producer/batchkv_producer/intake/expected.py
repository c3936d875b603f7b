"""Answers that the input expects (``metadata.expected``), to count the right ones."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from contextlib import suppress

from batchkv_producer.errors import InputFileError
from batchkv_producer.intake.formats import MAX_LINE_BYTES
from batchkv_producer.intake.json_array import elements
from batchkv_producer.intake.reading import opened_piece
from batchkv_producer.intake.source import Inputs, Source, inputs_of


class Expected:
    """The expected answers in the input (``metadata.expected``), 8 bytes a line."""

    def __init__(self, digests: array[int]) -> None:
        self._digests = digests
        self.num_expected = sum(1 for digest in digests if digest)

    @classmethod
    def read(cls, source: Source) -> Expected:
        """Read the input. A row that cannot be read has no answer here; the submit reports it."""
        digests = array("Q")
        with suppress(OSError, InputFileError):
            for number, raw in _rows(inputs_of(source)):
                text = _expected_text(raw) if b'"expected"' in raw else None
                if text is not None:
                    digests.extend([0] * (number - len(digests) - 1))
                    digests.append(_digest(text))
        return cls(digests)

    def is_right(self, line: int, answer: str) -> bool:
        """Whether the answer is the line's expected one. Blanks around it are ignored."""
        return line <= len(self._digests) and self._digests[line - 1] == _digest(answer)


def _rows(inputs: Inputs) -> Iterator[tuple[int, bytes]]:
    """Every row's number, as ``reading`` counts them, and its text."""
    number = 0
    for piece in inputs.pieces:
        with opened_piece(piece, inputs.read_as) as (stream, kind):
            found = elements(stream, MAX_LINE_BYTES) if kind == "array" else stream.lines()
            for raw in found:
                number += 1
                yield number, raw or b""


def _expected_text(raw: bytes) -> str | None:
    try:
        value = json.loads(raw)
        bodies = [value, value.get("body")]
        metadata = next(b["metadata"] for b in bodies if isinstance(b, dict) and "metadata" in b)
        text = metadata["expected"]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, StopIteration):
        return None
    return str(text) if isinstance(text, str | int | float) else None


def _digest(text: str) -> int:
    raw = text.strip().encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest()) | 1  # 0 means none

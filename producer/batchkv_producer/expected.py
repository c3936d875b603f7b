"""Answers that the input itself expects (``metadata.expected``), to count the right ones."""

from __future__ import annotations

import hashlib
import json
from array import array
from contextlib import suppress
from pathlib import Path


class Expected:
    """The answers that the input itself names (``metadata.expected``), 8 bytes a line."""

    def __init__(self, digests: array[int]) -> None:
        self._digests = digests
        self.num_expected = sum(1 for digest in digests if digest)

    @classmethod
    def read(cls, source: Path) -> Expected:
        """Look through the input; what cannot be read is no answer (submitting will tell)."""
        digests = array("Q")
        with suppress(OSError), source.open("rb") as file:
            for number, raw in enumerate(file, 1):
                text = _expected_text(raw) if b'"expected"' in raw else None
                if text is not None:
                    digests.extend([0] * (number - len(digests) - 1))
                    digests.append(_digest(text))
        return cls(digests)

    def is_right(self, line: int, answer: str) -> bool:
        """Whether the answer is the one expected of that line, blanks around it aside."""
        return line <= len(self._digests) and self._digests[line - 1] == _digest(answer)


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

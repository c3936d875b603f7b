"""Reads the elements of a JSON array from a stream, one at a time.

This module only finds where elements begin and end: it looks at brackets, commas and strings. The
parser of an element reports its faults. A wrong element does not affect the next one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

from batchkv_producer.errors import InputFileError

CHUNK_BYTES = 2**20
BLANKS = b" \t\r\n"

_BETWEEN = re.compile(rb'[{\[\],"]')  # at the top of the array
_INSIDE = re.compile(rb'[{}\[\]"]')
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # complete characters of a string


class Readable(Protocol):
    """The part of a stream that this module uses."""

    def read(self, size: int, /) -> bytes: ...


class _Scanner:
    """The position in the array. ``buffer`` begins at the current element, or within it."""

    def __init__(self, stream: Readable, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._buffer = b""
        self._at = 0
        self._begin = 0
        self._depth = 0
        self._is_in_string = False
        self._is_too_long = False

    def open(self) -> None:
        """Skip the array's first bracket."""
        while b"[" not in self._buffer:
            if not self._grow():
                raise InputFileError("there is no JSON array")
        self._at = self._begin = self._buffer.index(b"[") + 1

    def elements(self) -> Iterator[bytes | None]:
        number = 1
        while True:
            found = self._separator()
            if found is None:
                raise InputFileError(
                    f"the JSON array has no end: element {number} is cut off, or a bracket or a "
                    "quote in it is never closed"
                )
            is_too_long = self._is_too_long or found - self._begin > self._max_bytes
            element = None if is_too_long else self._buffer[self._begin : found]
            is_last = self._buffer[found] == b"]"[0]
            self._begin = self._at = found + 1
            self._is_too_long = False
            if element is None or element.strip(BLANKS) or not is_last:
                yield element
            if is_last:
                self._expect_end(number)
                return
            number += 1

    def _separator(self) -> int | None:
        """Find the end of the current element: a comma or the array's last bracket."""
        while True:
            if self._is_in_string and not self._leave_string():
                return None
            found = (_INSIDE if self._depth else _BETWEEN).search(self._buffer, self._at)
            if found is None:
                self._at = len(self._buffer)
                if not self._grow():
                    return None
                continue
            self._at = found.end()
            mark = found[0]
            if mark == b'"':
                self._is_in_string = True
            elif mark in b"{[":
                self._depth += 1
            elif self._depth:
                self._depth -= 1
            else:
                return found.start()

    def _leave_string(self) -> bool:
        """Skip to after the string's last quote. False if there is none."""
        while True:
            whole = _STRING.match(self._buffer, self._at)
            assert whole is not None  # also matches an empty string
            self._at = whole.end()
            if self._buffer[self._at : self._at + 1] == b'"':
                self._at += 1
                self._is_in_string = False
                return True
            if not self._grow():
                return False

    def _grow(self) -> bool:
        """Read on; False at the stream's end. An element that is too long is not kept."""
        chunk = self._stream.read(CHUNK_BYTES)
        begin = self._begin
        self._is_too_long |= len(self._buffer) - begin > self._max_bytes
        if self._is_too_long:
            begin = self._at
        self._buffer = self._buffer[begin:] + chunk
        self._at -= begin
        self._begin = 0
        return bool(chunk)

    def _expect_end(self, number: int) -> None:
        rest = self._buffer[self._begin :]
        while not rest.strip(BLANKS):
            rest = self._stream.read(CHUNK_BYTES)
            if not rest:
                return
        raise InputFileError(
            f"more text follows the JSON array, which ends after element {number}: give one array, "
            "or one JSON object a line"
        )


def elements(stream: Readable, max_bytes: int) -> Iterator[bytes | None]:
    """The text of each element; None for one that is longer than ``max_bytes``.

    The stream begins with an array's bracket, after blanks or a byte order mark if it has any.
    A comma after the last element adds none. Raises InputFileError if the array does not end, or if
    text follows it.
    """
    scanner = _Scanner(stream, max_bytes)
    scanner.open()
    return scanner.elements()

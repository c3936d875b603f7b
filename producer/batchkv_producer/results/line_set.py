"""A set of line numbers."""

from __future__ import annotations

PAGE_BITS = 2**16
MAX_PAGED_LINE = 2**30  # all pages up to it have 128 MiB; no file reaches a higher line


class LineSet:
    """A set of line numbers in about one bit each: 125 kB for a million rows.

    Line numbers from ``MAX_PAGED_LINE`` on, which only a damaged server or file has, are stored one
    by one, so that few of them need little memory.
    """

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._far: set[int] = set()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, line: int) -> bool:
        if line >= MAX_PAGED_LINE:
            return line in self._far
        page = self._pages.get(line // PAGE_BITS)
        bit = line % PAGE_BITS
        return page is not None and bool(page[bit >> 3] & (1 << (bit & 7)))

    def add(self, line: int) -> bool:
        """Add a line number. False if it was in the set."""
        if line in self:
            return False
        self._count += 1
        if line >= MAX_PAGED_LINE:
            self._far.add(line)
            return True
        page = self._pages.setdefault(line // PAGE_BITS, bytearray(PAGE_BITS // 8))
        bit = line % PAGE_BITS
        page[bit >> 3] |= 1 << (bit & 7)
        return True

    def discard(self, line: int) -> bool:
        """Remove a line number. False if it was not in the set."""
        if line not in self:
            return False
        self._count -= 1
        if line >= MAX_PAGED_LINE:
            self._far.discard(line)
            return True
        bit = line % PAGE_BITS
        self._pages[line // PAGE_BITS][bit >> 3] &= ~(1 << (bit & 7))
        return True

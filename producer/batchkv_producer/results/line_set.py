"""A set of line numbers."""

from __future__ import annotations

PAGE_BITS = 2**16


class LineSet:
    """A set of line numbers in about one bit each: 125 kB for a million rows."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, line: int) -> bool:
        page = self._pages.get(line // PAGE_BITS)
        bit = line % PAGE_BITS
        return page is not None and bool(page[bit >> 3] & (1 << (bit & 7)))

    def add(self, line: int) -> bool:
        """Put a line number in; False when it was there."""
        if line in self:
            return False
        page = self._pages.setdefault(line // PAGE_BITS, bytearray(PAGE_BITS // 8))
        bit = line % PAGE_BITS
        page[bit >> 3] |= 1 << (bit & 7)
        self._count += 1
        return True

    def discard(self, line: int) -> bool:
        """Take a line number out; False when it was not there."""
        if line not in self:
            return False
        bit = line % PAGE_BITS
        self._pages[line // PAGE_BITS][bit >> 3] &= ~(1 << (bit & 7))
        self._count -= 1
        return True

"""How much work prompts are that are not decoded yet: a job's data are compressed text.

What compressing saves is learned from the rows that have started. A prompt's work is its tokens.
"""

from __future__ import annotations

import math

from batchkv_producer.order.prefix_order import BYTES_PER_TOKEN
from batchkv_producer.wire.job import Request

ENOUGH_BYTES = 1_000_000  # of data, from which older rows count half


class DataSizes:
    """The sizes of a backlog. All are in bytes."""

    def __init__(self) -> None:
        self._num_data = self._num_text = 0.0  # of rows that have started, old ones fading
        self._num_rows = self._held_data = self._held_shared = 0

    def note_text(self, num_data: int, num_text: int) -> None:
        """A row has started whose data were so long, and its text."""
        if self._num_data > ENOUGH_BYTES:
            self._num_data, self._num_text = self._num_data / 2, self._num_text / 2
        self._num_data, self._num_text = self._num_data + num_data, self._num_text + num_text

    def hold(self, num_data: int, shared_bytes: int | None) -> None:
        """A job comes into the backlog."""
        self._num_rows += 1
        self._held_data += num_data
        self._held_shared += shared_bytes or 0

    def release(self, num_data: int, shared_bytes: int | None) -> None:
        """It leaves it."""
        self._num_rows -= 1
        self._held_data -= num_data
        self._held_shared -= shared_bytes or 0

    @property
    def held_work(self) -> float:
        """The work of all prompts of the backlog."""
        stretch = self._num_text / self._num_data if self._num_data else 1.0
        num_text = self._held_data * stretch - self._held_shared
        return max(float(self._num_rows), num_text / BYTES_PER_TOKEN)


def text_size(request: Request) -> int:
    """About how many bytes a request's prompt has. Images and tools are not counted."""
    if request.prompt is not None:
        return _num_bytes(request.prompt)
    contents = (message.get("content") for message in request.messages or ())
    return sum(_num_bytes(text) for text in contents if isinstance(text, str))


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def prompt_work(num_bytes: int, shared_bytes: int | None) -> float:
    """The work of a prompt of so many bytes, if what it shares is computed already."""
    return max(1, math.ceil((num_bytes - (shared_bytes or 0)) / BYTES_PER_TOKEN))

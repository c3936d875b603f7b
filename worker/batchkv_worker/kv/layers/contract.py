"""The contract between the engine and the caches of all kinds of layers.

A model's caches are of few kinds: keys and values of all tokens, or of the last window of them;
states without a time axis. The engine treats all kinds alike. For each cache of the model there is
one ``LayerKind``. It makes a ``PrefillLayer`` for the prompts that are computed together, and one
``SlotLayer`` for the rows in slots.

A row's way through a layer::

    prefill.begin(chunk)  the model appends  prefill.end()  ...          for every chunk
    prefill.row(i, n)                                                    its pieces
    slots.admit(slot, write, pieces)                                     copied, bit for bit
    slots.admit_group(rows, write, prefill)                              or all rows at once
    slots.begin(view)  the model appends one token a row  slots.end()   at every step
    slots.snapshot(slot, start, write)                                   its pieces again
    slots.move(moves, slots.copies(moves))                               rows go to other slots

The layout alone releases a row: attention never reads the contents of a slot without a row, and
``admit`` overwrites what a former row left. Keys and values are packed once: pieces move from
prefill to blocks to slots unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from batchkv_worker.kv.layers.row_moves import RowMoves
from batchkv_worker.kv.slots.changes import Arrivals, Relayout
from batchkv_worker.kv.slots.step_view import StepView
from batchkv_worker.kv.types import PackedKV, Pieces, Window


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens to compute, [position, position + width) of every row of a group.

    ``lengths``: how many of them each row really has (0 to ``width``); None: all of them.
    """

    position: int
    width: int
    lengths: tuple[int, ...] | None = None


class PrefillLayer(ABC):
    """One layer while prompts are computed: rows start together and are right-padded.

    Follows mlx-lm's cache contract as far as the models use it.
    """

    @abstractmethod
    def begin(self, chunk: Chunk) -> None:
        """Prepare for the chunk that the model computes next. Chunks follow without a gap."""

    @abstractmethod
    def end(self) -> None:
        """After the chunk's graph is built, drop all that belongs to the chunk only."""

    @abstractmethod
    def restore(self, pieces: Pieces, first: int, end: int) -> None:
        """Start after ``end`` tokens, whose pieces from token ``first`` on are ``[rows, ...]``.

        Only before the first chunk.
        """

    def share(self, prefixes: Sequence[PackedKV], num_tokens: int) -> None:
        """Start after a chain of prefixes of that many tokens; only layers with every token can.

        Only before the first chunk. Restored pieces follow the prefixes.
        """
        raise ValueError("this kind of layer shares no prefix")

    def share_each(self, pieces: Pieces, num_tokens: int) -> None:
        """``share`` with a prefix for each row: ``pieces`` ``[rows, ...]`` of that many tokens."""
        raise ValueError("this kind of layer shares no prefix")

    @abstractmethod
    def row(self, index: int, length: int, prefix_tokens: int = 0, count: int = 1) -> Pieces:
        """The pieces that a slot needs of row ``index`` after its ``length`` tokens (at least one).

        In layers that keep every token, a slot with a prefix needs only the tokens after it. With a
        ``count`` they are ``[count, ...]``, of so many adjacent rows of that length.
        """

    @abstractmethod
    def block(self, index: int, start: int, end: int, count: int = 1) -> Pieces | None:
        """Pieces of tokens [start, end) of ``count`` rows from ``index`` on.

        None from a layer without a time axis.
        """

    @property
    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate, so that the last chunk is computed."""


class SlotLayer(ABC):
    """One layer of the rows that decode, one token a row and step.

    Follows mlx-lm's cache contract as far as the models use it. Between steps it holds only
    ``arrays``, whose sizes follow the layout and not the number of steps. ``place``: its number
    among the leaves of the model's caches.
    """

    place: int = 0

    @abstractmethod
    def begin(self, view: StepView) -> None:
        """Prepare for the step whose graph is built next."""

    @abstractmethod
    def end(self) -> None:
        """After the graph is built, drop all that belongs to the step only."""

    @abstractmethod
    def admit(self, slot: int, write: int, pieces: Pieces | None) -> None:
        """Copy a row in, so that it ends before column ``write``; None: it has no token yet.

        Pieces ``[count, ...]`` are of so many rows, from ``slot`` on.
        """

    def admit_group(self, rows: Arrivals, write: int, source: PrefillLayer) -> bool:
        """Copy rows of a group in, as ``admit`` does; False: this layer takes them one by one."""
        return False

    @abstractmethod
    def snapshot(self, slot: int, start: int, write: int) -> Pieces:
        """A copy of a row's columns [start, write), in the form for ``admit``."""

    @abstractmethod
    def copies(self, moves: RowMoves) -> list[mx.array]:
        """Copies of what moves, lazily, for ``move``. They are to be computed before it.

        None from a layer that does not write in place.
        """

    @abstractmethod
    def move(self, moves: RowMoves, copies: list[mx.array]) -> None:
        """Write the copies to the rows' new slots; the slots that were left keep what they have."""

    def settle(self) -> bool:
        """After rows were copied in: whether the layer has started that and waits for it itself."""
        return False

    def as_prefix(self, pieces: Pieces) -> tuple[PackedKV, PackedKV]:
        """The parts of a shared prefix, in the forms for prefill and for decode.

        Only layers that keep every token have it.
        """
        raise ValueError("this kind of layer shares no prefix")

    def drop_pool(self) -> None:  # noqa: B027 - most layers have none
        """Drop copies of shared prefixes: no row has one any more."""

    @abstractmethod
    def relayout(self, change: Relayout) -> None:
        """Change the buffers as the layout has decided."""

    @abstractmethod
    def drop(self) -> None:
        """Drop the buffers. No row is in them, and the next row makes new ones."""

    @abstractmethod
    def check(self, rows: int, capacity: int) -> None:
        """Raise AssertionError unless the buffers are as the layout says."""

    @property
    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """The buffers."""

    @property
    def unread(self) -> list[mx.array]:
        """Those of ``arrays`` that a step writes for the next one, and does not read itself."""
        return self.arrays

    @abstractmethod
    def swap(self, arrays: list[mx.array]) -> None:
        """Have these in the place of ``arrays``, in the same order and of the same shapes."""

    @property
    def is_exact(self) -> bool:
        """Whether it reads groups of rows of one length without rounding their columns."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers as they are now."""
        return sum(array.nbytes for array in self.arrays)


class LayerKind(ABC):
    """The kind of one cache of a model, and its scheme."""

    @property
    @abstractmethod
    def window(self) -> Window:
        """The number of last tokens that it keeps; None: all of them, or no time axis at all."""

    @property
    @abstractmethod
    def has_state(self) -> bool:
        """Whether it keeps a state, which exists only where a chunk ended."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in the slots; packed pieces take as many, or fewer."""

    @property
    @abstractmethod
    def bytes_per_row(self) -> int:
        """Bytes that one row takes whatever its length."""

    @abstractmethod
    def prefill(self, capacity: int, chunk_tokens: int) -> PrefillLayer:
        """A layer for prompts of up to ``capacity`` tokens in chunks of up to ``chunk_tokens``."""

    @abstractmethod
    def template(self, num_tokens: int) -> Pieces:
        """Pieces as a block of that many tokens has them, or a state's: shapes and dtypes alone.

        The numbers mean nothing and are never computed.
        """

    @abstractmethod
    def slots(self) -> SlotLayer:
        """A layer for decoding, empty."""

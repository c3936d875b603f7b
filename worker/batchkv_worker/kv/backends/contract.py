"""The interface to a device, for keys, values and attention: one object, chosen once at start.

``kv.start.backend`` chooses it, the engine's parts get it through their constructors. Nothing
outside this room and ``kv.start`` asks which device serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from batchkv_worker.kv.backends.launching import Launches
from batchkv_worker.kv.backends.measurements import Measurements
from batchkv_worker.kv.kernels.decode import Partials
from batchkv_worker.kv.kernels.launch import Input
from batchkv_worker.kv.kernels.layout import RecordLayout
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.types import PackedKV, Parts

Undo = Callable[[], None]


class Softmax(Protocol):
    """How scores that are stored in memory become weights."""

    @property
    def unit(self) -> float:
        """Scores are multiplied with this, beyond their scale, before they are weighed."""

    def weigh(
        self, parts: Sequence[mx.array], sinks: mx.array | None = None
    ) -> tuple[list[mx.array], mx.array | None]:
        """Weights of scores ``[..., columns]`` in several arrays, each in its shape.

        ``sinks``, as the model has them, broadcast to ``[..., 1]`` and take their share. Also
        returns the divisor of the sum of weighted values, ``[..., 1]``, or None for 1.
        """

    def weigh_alone(self, scores: mx.array) -> tuple[mx.array, mx.array | None, mx.array]:
        """``weigh`` for scores ``[..., columns]`` that are joined with others later.

        Also returns the logarithm of the sum of the scores' exponentials, in ``unit``, ``[..., 1]``
        in float32: the one score that has the weight of them all.
        """


class Early(Protocol):
    """What is done for a model while its weights are read."""

    def wait(self, report: Callable[[str], object]) -> None:
        """Until it is done; ``report`` gets what is waited for, if it is."""

    def close(self) -> None:
        """End it."""


class Pacing(Protocol):
    """How far the host runs ahead of the device while one group of prompts is computed."""

    def begin(self) -> None:
        """A chunk begins; all that was built before is started."""

    def follow(self, output: mx.array, num_dense: int) -> None:
        """The attention of the next layer gives ``output``, from so many dense numbers."""

    def start(self, arrays: Sequence[mx.array]) -> None:
        """Start all that is left: the layers are built, and give ``arrays``. No launch is open."""


class DrawKernel(Protocol):
    """Draws one of the likeliest tokens of each row."""

    def __call__(self, logits: mx.array, given: mx.array) -> mx.array:
        """Tokens (uint32, ``[rows]``) for ``logits`` (float32, ``[rows, vocabulary]``).

        ``given`` (float32, ``[rows, 5]``): temperature, top_p, top_k, the logarithm of min_p, and a
        point in [0, 1). A top_k is at most 64; a row whose top_k is 0 has the token 0.
        """
        ...


class RecordKernels(Protocol):
    """Kernels for slots that keep one record a token: packed keys and values side by side."""

    @property
    def layout(self) -> RecordLayout:
        """Where things are in a record, and exact moves between records and packed parts."""

    def attend(
        self,
        queries: mx.array,
        records: mx.array,
        bounds: mx.array,
        longest: int,
        scale: float,
        sinks: mx.array | None = None,
        partials: Partials | None = None,
    ) -> mx.array:
        """Attention of ``queries`` ``[rows, heads, 1, size]``, in the basis of storage.

        ``records`` (uint32) are ``[rows, kv heads, columns, words]``, perhaps of more rows.
        ``bounds`` (int32, ``[rows, 2]``, perhaps of more rows) are the first column of each row and
        the one after its last; no row has more than ``longest``. The result ``[rows, heads, 1,
        size]`` is 0 for rows that see nothing. ``sinks`` are ``[heads]``.
        """

    def attend_alone(
        self, queries: mx.array, records: mx.array, bounds: mx.array, longest: int, scale: float
    ) -> tuple[mx.array, mx.array]:
        """``attend`` with its log-sum-exps before it: scores and values as ``Partials`` have them.

        They are ``[kv heads, rows, lines, 1]``, float32, and ``[kv heads, rows, lines, size]``.
        Records of one row are those of all.
        """

    def place_rows(
        self, places: mx.array, keys: Parts, values: Parts, count: int, columns: int
    ) -> mx.array:
        """Records ``[count, kv heads, columns, words]`` of whole slots that rows come into.

        ``keys`` and ``values`` are the packed parts of a group, ``[rows, kv heads, time, size]``,
        with numbers of the layer's dtype. ``places`` (int32, ``[count, 4]``, perhaps of more rows)
        has of each row its number in the group, the first of its columns, the one after its last,
        and what is added to a column for its token's place in time. Other columns are 0. No array
        may have fewer numbers than ``launch.LEAST_NUMBERS``.
        """

    def pack(self, keys: mx.array, values: Input) -> mx.array:
        """Records ``[rows, kv heads, 1, words]`` of ``[rows, kv heads, 1, size]``.

        Keys and values are in the basis of storage. Bits are those that the schemes pack.
        """


class ChunkKernels(Protocol):
    """Kernels for the keys and values of a chunk of prompts, in the basis of storage.

    ``keys`` and ``values`` are ``[rows, kv heads, tokens, size]``. The parts are those that the
    schemes pack. No array may have fewer numbers than ``launch.LEAST_NUMBERS``.
    """

    def pack(self, keys: mx.array, values: Input) -> PackedKV:
        """The parts of both."""

    def pack_and_give(
        self, keys: mx.array, values: Input, prefix: PackedKV | None, rows: int, tokens: int
    ) -> tuple[PackedKV, tuple[mx.array, mx.array]]:
        """The parts, and the dense numbers that the schemes give back, ``[rows, kv heads, ...]``.

        Columns are those of the ``prefix`` (parts of one row for all, or of each row), then
        ``tokens``. Rows and tokens that are not given are zeros.
        """


class Change(Protocol):
    """A change to a loaded model, decided already."""

    def install(self, model: Any) -> Undo:
        """Make the change. Returns a function that undoes it."""


class Backend(Protocol):
    """A device, as far as keys, values and attention depend on it."""

    @property
    def name(self) -> str:
        """For the log."""

    @property
    def measurements(self) -> Measurements:
        """The stored results of measurements."""

    @property
    def columns_multiple(self) -> int:
        """Columns that a step reads are rounded up to this."""

    @property
    def history_multiple(self) -> int:
        """Columns that a chunk of a prompt unpacks are rounded up to this, as far as there are."""

    @property
    def rows_multiple(self) -> int:
        """Rows of a step and of its groups are rounded up to this."""

    @property
    def keeps_shapes(self) -> bool:
        """Whether packed columns are read rounded even where exact ones would need no mask."""

    @property
    def has_fused_attention(self) -> bool:
        """Whether a fused kernel attends whole chunks without scores in memory."""

    @property
    def starts_each_layer(self) -> bool:
        """Whether each layer of a decode step is started when it is built, not the whole step."""

    @property
    def joins_groups(self) -> bool:
        """Whether few prompts behind each of several prefixes are computed in one chunk."""

    @property
    def most_joined(self) -> int:
        """Numbers of keys and values that a chunk and the prefix before it may have in one piece.

        Two bytes each in half precision. More are attended to a few rows at a time.
        """

    @property
    def copies_values(self) -> bool:
        """Whether values of a chunk may be part of a larger array, which they would keep alive."""

    @property
    def writes_rows_at_once(self) -> bool:
        """Whether rows that move are written with one operation, not with one for each row.

        It saves launches, but finds the place of each number. On a CPU that takes four times as
        long.
        """

    @property
    def joins_with_room(self) -> bool:
        """Whether blocks from memory are joined layer by layer, with room for the tokens after.

        Then these are written in place. It saves a copy of all blocks, but takes a call for each
        block of each layer. A GPU copies them in less time than so many calls take.
        """

    @property
    def launches_beside(self) -> bool:
        """Whether another thread launches a step while the next one is built."""

    @property
    def replays_steps(self) -> bool:
        """Whether the graph of a step is worth keeping for the next ones."""

    @property
    def spreads_codes(self) -> bool:
        """Whether decode may read 3-bit codes as 4-bit ones; see ``schemes.turbo.TurboSlots``."""

    @property
    def usual_chunk(self) -> int:
        """Tokens of a prompt to compute at once where nothing was measured."""

    @property
    def largest_chunk(self) -> int:
        """The most tokens of a prompt that are tried at once where sizes are measured."""

    @property
    def chunk_steps(self) -> float:
        """What any chunk of prompts costs besides its tokens, in decode steps."""

    @property
    def chunk_seconds(self) -> float:
        """The host's time for any chunk besides computing it: it chooses and inserts rows."""

    @property
    def measures_chunk(self) -> bool:
        """Whether the size of chunks makes enough of a difference to measure it."""

    def padded_rows(self, rows: int) -> int:
        """Rows that a step computes when ``rows`` are in use, if its buffers have so many."""

    def padded_width(self, tokens: int) -> int:
        """Tokens to pad prompts of up to ``tokens`` to, if the model may see pads."""

    def reads_whole(self, visible: int, stored: int) -> bool:
        """Whether to dequantize whole buffers and slice the dense result.

        Else a slice is dequantized. A layer's buffers have ``stored`` cells (one row's keys and
        values of one column), of which ``visible`` are read.
        """

    def softmax(self, dtype: mx.Dtype) -> Softmax:
        """How scores of ``dtype`` are weighed."""

    def attention(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of ``queries`` ``[rows, heads, tokens, size]`` over dense keys and values.

        ``keys`` and ``values`` are ``[rows, kv heads, columns, size]``. A ``mask`` of a word is
        causal.
        """

    def padded_chunk(self, rows: int, length: int, columns: int, numbers: int) -> tuple[int, int]:
        """The rows to which ``attention`` pads a chunk, and how many tokens it adds to each.

        ``length`` tokens of each row attend to ``columns`` under a causal mask; ``numbers`` are
        those of a column's keys.
        """

    def plans_attention(self, dtype: mx.Dtype, size: int) -> bool:
        """Whether attention takes long for a chunk of a new shape, with heads of ``size`` numbers.

        ``attention`` makes such shapes few. So all chunks should go there.
        """

    def attended_shape(
        self, rows: int, length: int, columns: int, numbers: int
    ) -> tuple[int, int, int]:
        """Rows, queries and columns that ``attention`` computes for such a chunk, pads included."""

    def pacing(self, launches: Launches) -> Pacing:
        """For one group of prompts, shared by all of its layers, which ``launches`` starts."""

    def begin_step(self, offsets: mx.array) -> None:
        """A decode step begins; its tokens have the positions ``offsets`` (int32, ``[rows]``)."""

    def unpack_weights(self, model: Any, dtype: mx.Dtype, *, has_room: bool = False) -> int:
        """Replace layers whose weights this device multiplies faster dense, if there is room.

        ``has_room``: there is, whatever else the memory is for. Returns their number. The weights
        need not be read yet.
        """

    def compile_early(self, model: Any, dtype: mx.Dtype) -> Early | None:
        """Begin to compile what rows of ``model`` would wait for, beside this process.

        Its weights need not be read yet. None: nothing is missing.
        """

    def changes(self, model: Any, dtype: mx.Dtype, rows: int) -> Sequence[Change]:
        """The changes to make to ``model``, for steps of up to ``rows`` rows. Makes none yet."""

    def draw_kernel(self) -> DrawKernel | None:
        """The kernel that draws tokens, if there is one. It is not compiled yet."""

    def record_kernels(
        self, scheme: LayerScheme, lines: int, dtype: mx.Dtype
    ) -> RecordKernels | None:
        """The kernels over records of ``scheme``, the scheme of pieces, if there are any.

        ``lines``: query heads a KV head. None of them is compiled yet.
        """

    def chunk_kernels(self, scheme: LayerScheme, dtype: mx.Dtype) -> ChunkKernels | None:
        """The kernels that pack chunks of prompts, if there are any. None is compiled yet."""

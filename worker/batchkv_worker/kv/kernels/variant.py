"""The constants of one layer's kernels: its record, and how threads divide the work."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import mlx.core as mx

from batchkv_worker.kv.kernels.launch import Constant
from batchkv_worker.kv.kernels.layout import Form, RecordLayout, TensorLayout
from batchkv_worker.kv.schemes.turbo import Turbo

SIMDS = 2  # simdgroups of a threadgroup: what each does once costs as much as 20 columns
_MATRIX_SIMDS = (4, 2)  # with products of matrices, as many as memory allows
_COLUMNS = {False: 128, True: 256}  # of a split, for each simdgroup; with products of matrices
_STAGES = (3, 2)  # tiles of records that a simdgroup has room for: one is read, others are copied
UNIT = 8  # numbers that a thread packs
_AHEAD = 2  # columns that a thread loads before it computes
_MOST_NUMBERS = 64  # of queries, or of sums, in the registers of a thread
_MOST_LINES = 16
_POOL_NUMBERS = 8128  # of outputs: with two for each query head 32 KiB, which Metal allows
_MATRIX_POOL_WORDS = 12288  # 48 KiB, which CUDA allows without asking


@dataclass(frozen=True, slots=True)
class Sharing:
    """``tiles`` simdgroups divide the query heads; ``lanes`` threads share a key, or a value."""

    tiles: int
    key_lanes: int
    value_lanes: int

    @classmethod
    def choose(cls, key_size: int, value_size: int, lines: int) -> Sharing:
        """The fewest threads a column whose registers suffice; ValueError if there is no way."""
        for tiles in (1, 2):
            tile = -(-lines // tiles)
            keys, values = (next(_lanes(size, tile), None) for size in (key_size, value_size))
            if keys and values and lines <= _MOST_LINES:
                found = cls(tiles, keys, values)
                if found.num_outputs(lines) * value_size <= _POOL_NUMBERS:
                    return found
        raise ValueError(f"no kernel for {lines} query heads of {key_size} and {value_size}")

    def num_outputs(self, lines: int) -> int:
        """Vectors that the simdgroups of a threadgroup compute, to be added up."""
        return SIMDS * -(-lines // self.tiles)


def _lanes(size: int, tile: int) -> Iterator[int]:
    """Numbers of threads that may share a vector of ``size`` numbers, few first."""
    for lanes in (8, 16, 32):
        if size % lanes == 0 and tile * size // lanes <= _MOST_NUMBERS:
            yield lanes


@dataclass(frozen=True, slots=True)
class Variant:
    """Constants by name, for the sources' bodies."""

    layout: RecordLayout
    lines: int
    sharing: Sharing

    @classmethod
    def of(cls, layout: RecordLayout, lines: int) -> Variant:
        """For ``lines`` query heads a KV head; ValueError where there is no kernel."""
        sizes = layout.keys.size, layout.values.size
        if any(size % UNIT for size in sizes):
            raise ValueError(f"no kernel for heads of {sizes[0]} and {sizes[1]} numbers")
        return cls(layout, lines, Sharing.choose(*sizes, lines))

    @property
    def record(self) -> list[Constant]:
        """Where things are in a record."""
        _, values, key_scales, value_scales = self.layout.offsets
        return [
            ("T", self.layout.dtype),
            ("WORDS", self.layout.words),
            ("VALUE_CODES", values),
            ("KEY_SCALES", key_scales),
            ("VALUE_SCALES", value_scales),
            *tensor_constants("KEY", self.layout.keys),
            *tensor_constants("VALUE", self.layout.values),
        ]

    def simds(self, *, matrices: bool) -> int:
        """Simdgroups of a threadgroup."""
        return self._room[0] if matrices else SIMDS

    def split(self, *, matrices: bool) -> int:
        """Columns that one threadgroup attends to."""
        return _COLUMNS[matrices] * self.simds(matrices=matrices)

    def splits_of(self, *, matrices: bool) -> list[Constant]:
        """For ``splits_body``; ValueError where there are no products of matrices."""
        return self._matrix_splits() if matrices else self._splits()

    def _splits(self) -> list[Constant]:
        sharing, layout = self.sharing, self.layout
        keys, values = layout.keys, layout.values
        all_lines = sharing.tiles * -(-self.lines // sharing.tiles)
        columns = max(self.lines * keys.size, all_lines * self.split(matrices=False))
        return [
            *self.record,
            ("LINES", self.lines),
            ("SIMDS", SIMDS),
            ("SPLIT", self.split(matrices=False)),
            ("TILES", sharing.tiles),
            ("AHEAD", _AHEAD),
            *self._pool(max(columns, sharing.num_outputs(self.lines) * values.size)),
            ("KEY_LANES", sharing.key_lanes),
            ("KEY_PIECE", gcd(keys.size // sharing.key_lanes, keys.group)),
            ("KEY_WIDE", self._wide(0, keys.num_code_words // sharing.key_lanes)),
            ("VALUE_LANES", sharing.value_lanes),
            ("VALUE_PIECE", gcd(values.size // sharing.value_lanes, values.group)),
            (
                "VALUE_WIDE",
                self._wide(layout.offsets[1], values.num_code_words // sharing.value_lanes),
            ),
        ]

    def _matrix_splits(self) -> list[Constant]:
        layout = self.layout
        keys, values = layout.keys, layout.values
        forms = (Form.FLOAT, Form.AFFINE, Form.TURBO)
        if layout.dtype == mx.float32 or any(one.form not in forms for one in (keys, values)):
            raise ValueError(f"no products of matrices for {layout.scheme} in {layout.dtype}")
        simds, stages = self._room
        biases = self.lines * values.size
        ends = biases + self.lines * values.num_groups
        region = max(stages * self._tile_words, -(-(ends + 2 * self.lines) // 4) * 4)
        key_scales, value_scales = layout.offsets[2:]
        return [
            *self.record,
            ("LINES", self.lines),
            ("SIMDS", simds),
            ("SPLIT", self.split(matrices=True)),
            ("STAGES", stages),
            ("REGION", region),
            ("POOL", simds * region),
            ("BIASES", biases),
            ("ENDS", ends),
            ("KEY_BFLOAT", _is_bfloat(keys)),
            ("KEY_WIDE", self._wide(0, keys.num_code_words // (4 * keys.num_groups))),
            ("KEY_SCALE_WIDE", self._wide(key_scales, keys.num_scale_words)),
            ("VALUE_BFLOAT", _is_bfloat(values)),
            (
                "VALUE_WIDE",
                self._wide(layout.offsets[1], values.num_code_words // (8 * values.num_groups)),
            ),
            ("VALUE_SCALE_WIDE", self._wide(value_scales, values.num_scale_words)),
        ]

    @property
    def _tile_words(self) -> int:
        """Words of the records that a simdgroup multiplies at once."""
        return 16 * self.layout.words

    @property
    def _room(self) -> tuple[int, int]:
        """Simdgroups of a threadgroup, and stages of each; ValueError if memory has no room."""
        values = self.layout.values
        outputs = self.lines * (values.size + values.num_groups + 2) + 3
        for simds in _MATRIX_SIMDS:
            for stages in _STAGES:
                if simds * max(stages * self._tile_words, outputs) <= _MATRIX_POOL_WORDS:
                    return simds, stages
        words = self.layout.words
        raise ValueError(f"no products of matrices for {self.lines} heads and {words} words")

    def merge(self, *, matrices: bool) -> list[Constant]:
        """For ``merge_body``."""
        return [
            ("T", self.layout.dtype),
            ("VALUE_SIZE", self.layout.values.size),
            ("LINES", self.lines),
            ("SPLIT", self.split(matrices=matrices)),
        ]

    @property
    def pack(self) -> list[Constant]:
        """For ``PACK``."""
        return [
            *self.record,
            ("KEY_STEP", _step_bits(self.layout.keys)),
            ("VALUE_STEP", _step_bits(self.layout.values)),
        ]

    def _pool(self, numbers: int) -> list[Constant]:
        """Memory of a threadgroup: so many numbers, and two for each query head at the end."""
        return [("POOL", numbers + 2 * self.lines), ("ENDS", numbers)]

    def _wide(self, first_word: int, words: int) -> int:
        """Words that a thread can load at once: all of its loads begin at a multiple."""
        places = self.layout.words, first_word, words
        return next(wide for wide in (4, 2, 1) if all(place % wide == 0 for place in places))


def tensor_constants(name: str, tensor: TensorLayout) -> list[Constant]:
    """How a tensor is packed; ``name`` comes before each constant's."""
    return [
        (f"{name}_SIZE", tensor.size),
        (f"{name}_FORM", int(tensor.form)),
        (f"{name}_BITS", tensor.bits),
        (f"{name}_GROUP", tensor.group),
    ]


def _is_bfloat(tensor: TensorLayout) -> int:
    """Whether its products are of bfloat16; codes are multiplied as float16."""
    return int(tensor.form == Form.FLOAT and tensor.dtype == mx.bfloat16)


def _step_bits(tensor: TensorLayout) -> int:
    """The distance of turbo's levels, as the bits of the float32 nearest to it in the dtype."""
    codec = tensor.scheme.codec
    if not isinstance(codec, Turbo):
        return 0
    return float_bits(mx.array(codec.step).astype(tensor.dtype).item())


def float_bits(number: float) -> int:
    """The bits of the float32 nearest to it, as a constant that the sources read as a float."""
    (bits,) = struct.unpack("<i", struct.pack("<f", number))
    return int(bits)

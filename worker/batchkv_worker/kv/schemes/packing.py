"""KV schemes: how keys and values are packed, tensor by tensor.

A packed tensor is a tuple of arrays ("parts") that all keep their time axis at -2, so that every
buffer, slice and copy in this package treats any scheme alike; no part packs two tokens into one
number. The parts of ``[..., time, size]``:

=========  =======================================================================================
float      the numbers
affine     codes (uint32), scales, biases (in the numbers' dtype), as ``mlx.core.quantize`` makes
           them: each group of 128, 64 or 32 from its smallest number to its largest
mxfp nvfp  codes (uint32) and scales (uint8): small floats in groups of 32 (mx) or 16 (nv)
turbo      codes (uint32) and one scale a group; see ``Turbo``. In decode slots biases too, and
           3-bit codes perhaps in another order (``TurboSlots``): ``in_slots``, ``take``, ``give``
=========  =======================================================================================

A rotated scheme stores every vector in another orthonormal basis (``rotation``). ``names`` and
``spec`` parse the text of users; ``fit_model`` makes the scheme of each layer of a model of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from batchkv_worker.kv.schemes import rotation
from batchkv_worker.kv.schemes.names import SMALL_FLOATS, TURBO_BITS, TensorName, TensorNames
from batchkv_worker.kv.schemes.spec import SchemeSpec
from batchkv_worker.kv.schemes.turbo import Turbo, TurboSlots
from batchkv_worker.kv.types import Parts


@dataclass(frozen=True, slots=True)
class Float:
    """The numbers as they are."""

    num_parts = 1

    def pack(self, stored: mx.array) -> Parts:
        return (stored,)

    def unpack(self, parts: Parts, dtype: mx.Dtype) -> mx.array:
        return parts[0].astype(dtype)

    def times(self, left: mx.array, parts: Parts, transpose: bool) -> mx.array:
        return left @ (parts[0].swapaxes(-1, -2) if transpose else parts[0])

    def bytes_per_token(self, size: int, float_bytes: int) -> int:
        return size * float_bytes

    def __str__(self) -> str:
        return "float"


@dataclass(frozen=True, slots=True)
class Quantized:
    """One of MLX's own modes: ``affine`` of any bits, ``mxfp8``, ``mxfp4`` or ``nvfp4``."""

    mode: str
    bits: int
    group: int

    @property
    def num_parts(self) -> int:
        return 3 if self._is_affine else 2

    @property
    def _is_affine(self) -> bool:
        return self.mode == "affine"

    def pack(self, stored: mx.array) -> Parts:
        return tuple(mx.quantize(stored, group_size=self.group, bits=self.bits, mode=self.mode))

    def unpack(self, parts: Parts, dtype: mx.Dtype) -> mx.array:
        # The small floats' scales are uint8, so the wanted dtype must be given.
        wanted = None if self._is_affine else dtype
        dense = mx.dequantize(
            *parts, group_size=self.group, bits=self.bits, mode=self.mode, dtype=wanted
        )
        return dense.astype(dtype)

    def times(self, left: mx.array, parts: Parts, transpose: bool) -> mx.array:
        return mx.quantized_matmul(
            left, *parts, transpose=transpose, group_size=self.group, bits=self.bits, mode=self.mode
        )

    def bytes_per_token(self, size: int, float_bytes: int) -> int:
        scale_bytes = 2 * float_bytes if self._is_affine else 1
        return size * self.bits // 8 + size // self.group * scale_bytes

    def __str__(self) -> str:
        return f"affine{self.bits}" if self._is_affine else self.mode


Codec = Float | Quantized | Turbo | TurboSlots


@dataclass(frozen=True, slots=True)
class TensorScheme:
    """How one tensor ``[..., time, size]`` is stored: a codec, and whether it is rotated first."""

    codec: Codec = Float()
    rotated: bool = False

    @property
    def is_packed(self) -> bool:
        return not isinstance(self.codec, Float)

    @property
    def is_rotated(self) -> bool:
        return self.rotated

    def pack(self, dense: mx.array) -> Parts:
        """Pack ``[..., time, size]``, not empty; each part is ``[..., time, part size]``."""
        return self.codec.pack(self.rotate(dense))

    def unpack(self, parts: Parts, dtype: mx.Dtype) -> mx.array:
        """The values in the basis that they came in, ``[..., time, size]``."""
        return self.unrotate(self.unpack_stored(parts, dtype))

    def unpack_stored(self, parts: Parts, dtype: mx.Dtype) -> mx.array:
        """The values in the basis of storage; without a rotation the same as ``unpack``."""
        return self.codec.unpack(parts, dtype)

    def rotate(self, x: mx.array, scale: float = 1.0) -> mx.array:
        """``x`` ``[..., size]``, times ``scale``, in the basis of storage."""
        if self.rotated:
            return rotation.rotate(x, scale)
        return x if scale == 1.0 else x * scale

    def unrotate(self, x: mx.array) -> mx.array:
        """``x`` ``[..., size]`` back from the basis of storage."""
        return rotation.unrotate(x) if self.rotated else x

    def times(self, left: mx.array, parts: Parts, *, transpose: bool) -> mx.array:
        """``left`` times the stored values, read packed.

        ``transpose``: ``left`` is ``[rows, heads, n, size]``, rotated queries, and the result
        ``[rows, heads, n, time]``; else ``[rows, heads, n, time]``, weights, and the result
        ``[rows, heads, n, size]``, still to be rotated back. Raises what MLX raises (ValueError,
        RuntimeError) where a backend lacks the kernel.
        """
        return self.codec.times(left, parts, transpose)

    @property
    def can_spread(self) -> bool:
        """Whether decode slots may keep its codes as planes (``TurboSlots``)."""
        return isinstance(self.codec, Turbo) and self.codec.bits == 3

    @property
    def dequantized(self) -> TensorScheme:
        """The scheme of the result of ``unpack_stored``: dense, in the same basis."""
        return TensorScheme(Float(), self.rotated)

    def in_slots(self, spread: bool) -> TensorScheme:
        """The scheme of the parts that decode slots keep; ``spread`` where there is a choice."""
        if not isinstance(self.codec, Turbo):
            return self
        return TensorScheme(TurboSlots(self.codec, spread and self.can_spread), self.rotated)

    def take(self, parts: Parts) -> Parts:
        """The parts for slots of this scheme, made of packed parts."""
        return self.codec.take(parts) if isinstance(self.codec, TurboSlots) else parts

    def give(self, parts: Parts) -> Parts:
        """Undo ``take``."""
        return self.codec.give(parts) if isinstance(self.codec, TurboSlots) else parts

    def bytes_per_token(self, size: int, float_bytes: int) -> int:
        """Bytes that one vector of ``size`` numbers takes, given the bytes of a float."""
        return self.codec.bytes_per_token(size, float_bytes)

    def __str__(self) -> str:
        if isinstance(self.codec, Float):
            return "float"
        is_turbo = isinstance(self.codec, Turbo | TurboSlots)
        suffix = "r" if self.rotated and not is_turbo else ""
        return f"{self.codec}{suffix}/g{self.codec.group}"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one layer: heads, and the numbers of a head for each."""

    num_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class LayerScheme:
    """The scheme of one layer: its shape, and the schemes of its keys and of its values."""

    shape: LayerShape
    keys: TensorScheme
    values: TensorScheme

    @property
    def is_packed(self) -> bool:
        return self.keys.is_packed or self.values.is_packed

    @property
    def is_rotated(self) -> bool:
        return self.keys.is_rotated or self.values.is_rotated

    @property
    def can_spread(self) -> bool:
        return self.keys.can_spread or self.values.can_spread

    @property
    def dequantized(self) -> LayerScheme:
        """See ``TensorScheme.dequantized``."""
        return LayerScheme(self.shape, self.keys.dequantized, self.values.dequantized)

    def in_slots(self, spread: bool) -> LayerScheme:
        """The scheme of decode slots; see ``TensorScheme.in_slots``."""
        return LayerScheme(self.shape, self.keys.in_slots(spread), self.values.in_slots(spread))

    def split(self, pieces: Parts) -> tuple[Parts, Parts]:
        """Parts of keys and parts of values; ValueError for a wrong number of parts."""
        keys, values = self.keys.codec.num_parts, self.values.codec.num_parts
        if len(pieces) != keys + values:
            raise ValueError(f"{len(pieces)} pieces do not fit {self}")
        return pieces[:keys], pieces[keys:]

    def bytes_per_token(self, float_bytes: int) -> int:
        """Bytes that one token takes in this layer."""
        keys = self.keys.bytes_per_token(self.shape.key_size, float_bytes)
        values = self.values.bytes_per_token(self.shape.value_size, float_bytes)
        return self.shape.num_heads * (keys + values)

    def __str__(self) -> str:
        return str(self.keys) if self.keys == self.values else f"{self.keys}+{self.values}"


def fit_tensor(name: TensorName, size: int) -> TensorScheme:
    """The scheme for vectors of ``size`` numbers; float where no group divides them."""
    group = name.group_for(size)
    if group is None:
        return TensorScheme()
    if name.is_turbo:
        return TensorScheme(Turbo(TURBO_BITS[name.base], group), rotated=True)
    if name.base in SMALL_FLOATS:
        return TensorScheme(Quantized(name.base, *SMALL_FLOATS[name.base]), name.rotated)
    bits = int(name.base.removeprefix("affine"))
    return TensorScheme(Quantized("affine", bits, group), name.rotated)


def fit_layer(names: TensorNames, shape: LayerShape) -> LayerScheme:
    """The scheme of a layer; keys and values each fit their own size."""
    keys = fit_tensor(names.keys, shape.key_size)
    return LayerScheme(shape, keys, fit_tensor(names.values, shape.value_size))


def fit_model(spec: SchemeSpec, shapes: Sequence[LayerShape]) -> tuple[LayerScheme, ...]:
    """The scheme of each attention layer, given their shapes, first to last.

    Raises ValueError if an override names a layer that the model does not have.
    """
    names = spec.names(len(shapes))
    return tuple(fit_layer(name, shape) for name, shape in zip(names, shapes, strict=True))

"""KV schemes: how keys and values are packed, tensor by tensor.

A packed tensor is a tuple of arrays ("parts") that all keep their time axis at -2, so that every
buffer, slice and copy in this package treats any scheme alike. float has one part; an affine
scheme has three: codes (uint32), scales and biases, as ``mlx.core.quantize`` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

Parts = tuple[mx.array, ...]

SCHEMES = ("float", "affine8", "affine4")
_GROUPS = (64, 32)  # preferred first; MLX packs whole groups only


@dataclass(frozen=True, slots=True)
class TensorScheme:
    """How one tensor ``[..., time, size]`` is packed; ``bits`` None keeps it as it is."""

    bits: int | None = None
    group: int = 64

    @property
    def is_packed(self) -> bool:
        return self.bits is not None

    def pack(self, dense: mx.array) -> Parts:
        """Pack ``[..., time, size]``; each part is ``[..., time, part size]``."""
        if self.bits is None:
            return (dense,)
        return tuple(mx.quantize(dense, group_size=self.group, bits=self.bits))

    def unpack(self, parts: Parts) -> mx.array:
        """The values that attention sees, ``[..., time, size]`` in the scales' dtype."""
        if self.bits is None:
            return parts[0]
        return mx.dequantize(*parts, group_size=self.group, bits=self.bits)

    def bytes_per_token(self, size: int, float_bytes: int) -> int:
        """Bytes that one vector of ``size`` numbers takes."""
        if self.bits is None:
            return size * float_bytes
        return size * self.bits // 8 + 2 * (size // self.group) * float_bytes

    def __str__(self) -> str:
        return "float" if self.bits is None else f"affine{self.bits}/g{self.group}"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one layer: heads, and numbers a head keeps for each."""

    num_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class LayerScheme:
    """What one layer keeps: its shape and the schemes of its keys and of its values."""

    shape: LayerShape
    keys: TensorScheme
    values: TensorScheme

    @property
    def is_packed(self) -> bool:
        return self.keys.is_packed or self.values.is_packed

    def bytes_per_token(self, float_bytes: int) -> int:
        """Bytes that one token takes in this layer."""
        keys = self.keys.bytes_per_token(self.shape.key_size, float_bytes)
        values = self.values.bytes_per_token(self.shape.value_size, float_bytes)
        return self.shape.num_heads * (keys + values)


def layer_scheme(name: str, shape: LayerShape) -> LayerScheme:
    """The named scheme fitted to one layer.

    A head size that no group divides keeps that tensor in float: MLX packs whole groups only.
    """
    return LayerScheme(
        shape, _tensor_scheme(name, shape.key_size), _tensor_scheme(name, shape.value_size)
    )


def _tensor_scheme(name: str, size: int) -> TensorScheme:
    if name not in SCHEMES:
        raise ValueError(f"unknown KV scheme {name!r}; known: {', '.join(SCHEMES)}")
    if name == "float":
        return TensorScheme()
    for group in _GROUPS:
        if size % group == 0:
            return TensorScheme(int(name.removeprefix("affine")), group)
    return TensorScheme()

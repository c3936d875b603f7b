"""Turbo: codes for rotated vectors after TurboQuant, in a form that MLX multiplies in place."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from batchkv_worker.kv.schemes import codes

_Parts = tuple[mx.array, ...]

# The range that the codes span, as a share of the group's largest magnitude, by (bits, group):
# least squared error on Gaussian data, found by search; rotated tensors are near enough to that.
_SPAN = {
    (4, 128): 0.88, (4, 64): 0.92, (4, 32): 0.96,
    (3, 128): 0.74, (3, 64): 0.80, (3, 32): 0.86,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turbo:
    """TurboQuant's plan (Zandieh et al. 2025) with codes that quantized products read in place.

    The paper rotates at random, keeps one norm a vector and maps each rotated coordinate to the
    nearest of ``2**bits`` levels which are optimal for its distribution, near a Gaussian. Here

    - the levels are evenly spaced and symmetric, ``scale * (code - (2**bits - 1) / 2)``, which is
      all that MLX's affine products know; biases follow from scales and are not stored (decode
      slots keep them, see ``TurboSlots``);
    - the scale follows the largest magnitude of each group of 64, not the vector's norm. It is
      shrunk so that the squared error is least. That gain pays for the even spacing: 9.6 % at 4
      bits and 18.7 % at 3 (optimal levels at a fixed norm: 9.75 % and 18.6 %);
    - the paper's variant with a 1-bit sketch of the residual, which makes scores unbiased, is left
      out: it needs a second product, and a bias is not the error that hurts attention;
    - 3.5 bits, for which the paper gives more bits to outlier channels, are 4 for keys and 3 for
      values: after a full rotation no channel is special, and scores suffer more than sums do.
    """

    bits: int
    group: int

    num_parts = 2

    @property
    def step(self) -> float:
        """Distance of two levels for a group whose largest magnitude is 1."""
        return 2 * _SPAN[self.bits, self.group] / ((1 << self.bits) - 1)

    def pack(self, stored: mx.array) -> _Parts:
        """Codes ``[..., size * bits / 32]`` and scales ``[..., size / group]``."""
        found, scales = self._round(stored)
        return (codes.nibbles if self.bits == 4 else codes.stream)(found), scales

    def _round(self, stored: mx.array) -> _Parts:
        """The nearest level of each number, ``[..., size]``, and the scales of the groups."""
        grouped = stored.reshape(*stored.shape[:-1], -1, self.group)
        scales = (mx.abs(grouped).max(axis=-1) * self.step).astype(stored.dtype)
        highest = (1 << self.bits) - 1
        steps = mx.maximum(scales.astype(mx.float32), 1e-30)[..., None]  # zeros have scale 0
        found = mx.clip(mx.floor(grouped / steps + (highest + 1) / 2), 0, highest)
        return found.reshape(stored.shape), scales

    def _biases(self, scales: mx.array) -> mx.array:
        return scales * (-((1 << self.bits) - 1) / 2)

    def unpack(self, parts: _Parts, dtype: mx.Dtype) -> mx.array:
        packed, scales = parts
        affine = packed, scales, self._biases(scales)
        return mx.dequantize(*affine, group_size=self.group, bits=self.bits).astype(dtype)

    def times(self, left: mx.array, parts: _Parts, transpose: bool) -> mx.array:
        packed, scales = parts
        affine = packed, scales, self._biases(scales)
        return mx.quantized_matmul(
            left, *affine, transpose=transpose, group_size=self.group, bits=self.bits
        )

    def bytes_per_token(self, size: int, float_bytes: int) -> int:
        return size * self.bits // 8 + size // self.group * float_bytes

    def __str__(self) -> str:
        return f"turbo{self.bits}"


@dataclass(frozen=True, slots=True)
class TurboSlots:
    """Turbo in decode slots, which are read at every step.

    Biases are stored besides codes and scales, because deriving them would cost one more kernel a
    tensor and step. ``spread``: 3-bit codes are stored as planes (``codes``) and multiplied as
    4-bit ones, which is several times faster on some backends; levels and bytes are the same. Parts
    that ``stored`` has packed go in and come out bit for bit.
    """

    stored: Turbo
    spread: bool

    num_parts = 3

    @property
    def group(self) -> int:
        return self.stored.group

    def pack(self, stored: mx.array) -> _Parts:
        """Codes, scales and biases of new numbers, one token a row."""
        if not self.spread:
            return self.take(self.stored.pack(stored))
        found, scales = self.stored._round(stored)
        return codes.planes_of(codes.nibbles(found)), scales, self.stored._biases(scales)

    def take(self, parts: _Parts) -> _Parts:
        """Codes, scales and biases, made of parts that ``stored`` has packed."""
        packed, scales = parts
        if self.spread:
            packed = codes.planes_of(codes.nibbles_of(packed))
        return packed, scales, self.stored._biases(scales)

    def give(self, parts: _Parts) -> _Parts:
        """Undo ``take``."""
        packed, scales, _ = parts
        if self.spread:
            packed = codes.stream_of(codes.nibbles_of_planes(packed))
        return packed, scales

    def _affine(self, parts: _Parts) -> tuple[_Parts, int]:
        """The parts as MLX wants them, and the bits of a code in them."""
        packed, scales, biases = parts
        if self.spread:
            return (codes.nibbles_of_planes(packed), scales, biases), 4
        return parts, self.stored.bits

    def unpack(self, parts: _Parts, dtype: mx.Dtype) -> mx.array:
        affine, bits = self._affine(parts)
        return mx.dequantize(*affine, group_size=self.group, bits=bits).astype(dtype)

    def times(self, left: mx.array, parts: _Parts, transpose: bool) -> mx.array:
        affine, bits = self._affine(parts)
        return mx.quantized_matmul(
            left, *affine, transpose=transpose, group_size=self.group, bits=bits
        )

    def bytes_per_token(self, size: int, float_bytes: int) -> int:
        stored = self.stored.bytes_per_token(size, float_bytes)
        return stored + size // self.group * float_bytes

    def __str__(self) -> str:
        return str(self.stored)

"""Turbo: codes for rotated vectors after TurboQuant, in a form that MLX multiplies in place."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

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
      all that MLX's affine products know; biases follow from scales and are not stored;
    - the scale follows the largest magnitude of each group of 64, shrunk to what minimizes the
      squared error, instead of the vector's norm. That gain pays for the even spacing: 9.6 % at 4
      bits and 18.7 % at 3 (optimal levels at a fixed norm: 9.75 % and 18.6 %);
    - the paper's variant with a 1-bit sketch of the residual, which makes scores unbiased, is left
      out: it needs a second product, and the mean is not what attention suffers from;
    - 3.5 bits, for which the paper gives more bits to outlier channels, are 4 for keys and 3 for
      values: after a full rotation no channel is special, and scores suffer more than sums do.
    """

    bits: int
    group: int

    @property
    def _step(self) -> float:
        """Distance of two levels for a group whose largest magnitude is 1."""
        return 2 * _SPAN[self.bits, self.group] / ((1 << self.bits) - 1)

    def pack(self, stored: mx.array) -> _Parts:
        """Codes ``[..., size * bits / 32]`` and scales ``[..., size / group]``."""
        grouped = stored.reshape(*stored.shape[:-1], -1, self.group)
        scales = (mx.abs(grouped).max(axis=-1) * self._step).astype(stored.dtype)
        return _codes(grouped, scales, self.bits), scales

    def _affine(self, parts: _Parts) -> _Parts:
        """The parts as MLX wants them: codes, scales, biases."""
        codes, scales = parts
        return codes, scales, scales * (-((1 << self.bits) - 1) / 2)

    def unpack(self, parts: _Parts, dtype: mx.Dtype) -> mx.array:
        dense = mx.dequantize(*self._affine(parts), group_size=self.group, bits=self.bits)
        return dense.astype(dtype)

    def times(self, left: mx.array, parts: _Parts, transpose: bool) -> mx.array:
        affine = self._affine(parts)
        return mx.quantized_matmul(
            left, *affine, transpose=transpose, group_size=self.group, bits=self.bits
        )

    def bytes_per_token(self, size: int, float_bytes: int) -> int:
        return size * self.bits // 8 + size // self.group * float_bytes

    def __str__(self) -> str:
        return f"turbo{self.bits}"


def _codes(groups: mx.array, scales: mx.array, bits: int) -> mx.array:
    """Nearest level of each number, packed as ``mlx.core.quantize`` packs.

    ``groups`` is ``[..., groups, group]``, ``scales`` ``[..., groups]``; the codes of a token are
    one stream of bits, the lowest first, in uint32 ``[..., numbers * bits / 32]``.
    """
    highest = (1 << bits) - 1
    steps = mx.maximum(scales.astype(mx.float32), 1e-30)[..., None]  # a group of zeros has scale 0
    codes = mx.clip(mx.floor(groups / steps + (highest + 1) / 2), 0, highest).astype(mx.uint32)
    lead = groups.shape[:-2]
    eights = codes.reshape(*lead, -1, 8) << mx.arange(0, 8 * bits, bits, dtype=mx.uint32)
    packed = eights.sum(axis=-1)  # disjoint bits: the sum is their union
    if bits == 4:
        return packed
    octets = packed[..., None].view(mx.uint8)[..., :bits]
    return mx.contiguous(octets.reshape(*lead, -1)).view(mx.uint32)

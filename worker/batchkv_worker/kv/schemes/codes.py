"""Codes of 3 and 4 bits in words of uint32, and the three forms in which 3-bit codes are kept.

========  =========================================================================================
nibbles   8 codes a word, 4 bits each, the first lowest: ``[..., numbers / 8]``. For 4-bit codes it
          is the form of ``mlx.core.quantize``. A 3-bit code in it has a 0 as its top bit.
stream    3-bit codes one after the other, as ``mlx.core.quantize`` packs them, the first lowest:
          ``[..., 3 numbers / 32]``
planes    four nibble words in three: the bits of the last quarter of a vector's words fill the top
          bits of the other three quarters. Also ``[..., 3 numbers / 32]``.
========  =========================================================================================

Unpacking a stream takes many operations, unpacking planes a few for every 32 codes. So 3-bit codes
are stored as planes and become 4-bit ones for a product. All functions are exact and work on the
last axis; the others may be empty.
"""

from __future__ import annotations

import mlx.core as mx

_ONES = 0x11111111  # the lowest bit of every nibble


def nibbles(codes: mx.array) -> mx.array:
    """Codes ``[..., numbers]``, below 16, as nibbles."""
    return _words(codes, 4)


def stream(codes: mx.array) -> mx.array:
    """Codes ``[..., numbers]``, below 8, as a stream; ``numbers`` is a multiple of 32."""
    return _octets(_words(codes, 3))


def stream_of(words: mx.array) -> mx.array:
    """Nibbles of 3-bit codes as a stream."""
    words = (words & 0x07070707) | ((words >> 1) & 0x38383838)
    words = (words & 0x003F003F) | ((words >> 2) & 0x0FC00FC0)
    return _octets((words & 0xFFF) | ((words >> 4) & 0xFFF000))


def nibbles_of(packed: mx.array) -> mx.array:
    """A stream as nibbles."""
    shape = *packed.shape[:-1], 4 * packed.shape[-1] // 3, 3
    octets = packed.view(mx.uint8).reshape(shape).astype(mx.uint32)
    words = octets[..., 0] | (octets[..., 1] << 8) | (octets[..., 2] << 16)
    words = (words & 0xFFF) | ((words & 0xFFF000) << 4)
    words = (words & 0x003F003F) | ((words & 0x0FC00FC0) << 2)
    return (words & 0x07070707) | ((words & 0x38383838) << 1)


def planes_of(words: mx.array) -> mx.array:
    """Nibbles of 3-bit codes as planes."""
    first, second, third, last = mx.split(words, 4, axis=-1)
    quarters = (first, 0), (second, 1), (third, 2)
    filled = [quarter | (((last >> bit) & _ONES) << 3) for quarter, bit in quarters]
    return mx.concatenate(filled, axis=-1)


def nibbles_of_planes(planes: mx.array) -> mx.array:
    """Planes as nibbles."""
    third = planes.shape[-1] // 3
    top = planes & (_ONES << 3)
    last = (
        (top[..., :third] >> 3) | (top[..., third : 2 * third] >> 2) | (top[..., 2 * third :] >> 1)
    )
    return mx.concatenate([planes & (7 * _ONES), last], axis=-1)


def _words(codes: mx.array, width: int) -> mx.array:
    """Eight codes in each word, ``width`` bits apart."""
    eights = codes.astype(mx.uint32).reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8)
    # Disjoint bits: the sum is their union.
    return (eights << mx.arange(0, 8 * width, width, dtype=mx.uint32)).sum(axis=-1)


def _octets(words: mx.array) -> mx.array:
    """The lower 24 bits of each word, one after the other."""
    octets = words[..., None].view(mx.uint8)[..., :3]
    octets = octets.reshape(*words.shape[:-1], 3 * words.shape[-1])
    return mx.contiguous(octets).view(mx.uint32)

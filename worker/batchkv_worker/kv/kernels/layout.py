"""The record of a token: its packed keys and values of one KV head, side by side.

A kernel reads one array instead of six, and a step writes it with one operation. A record is a row
of ``uint32`` words, without padding between its four fields::

    [codes of the key][codes of the value][scales of the key][scales of the value]

Codes are the words that the schemes pack, floats the words of their bits. Scales, by form:

========  ==========================================================================================
float     none
affine    scale and bias of each group by turns, in the numbers' dtype
turbo     the scale of each group, in the numbers' dtype
mx, nv    the scale of each group, one byte
========  ==========================================================================================

The last word of scales is filled with zeros. All functions are exact: they move bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import mlx.core as mx

from batchkv_worker.kv.schemes.packing import Float, LayerScheme, Quantized, TensorScheme
from batchkv_worker.kv.schemes.turbo import Turbo
from batchkv_worker.kv.types import PackedKV, Parts

WORD_BYTES = 4


class Form(IntEnum):
    """How a code and its scales become a number. The kernels' sources know these values."""

    FLOAT = 0
    AFFINE = 1
    TURBO = 2
    MX = 3  # small floats with powers of two as scales
    NV = 4  # small floats of 4 bits with floats of 8 bits as scales


_SMALL_FLOATS = {"mxfp4": Form.MX, "mxfp8": Form.MX, "nvfp4": Form.NV}


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The fields of one tensor in a record. ``group`` is ``size`` for floats."""

    scheme: TensorScheme
    dtype: mx.Dtype
    size: int
    form: Form
    bits: int
    group: int

    @classmethod
    def of(cls, scheme: TensorScheme, size: int, dtype: mx.Dtype) -> TensorLayout:
        """The layout of vectors of ``size`` numbers; ValueError where records cannot hold them."""
        codec = scheme.codec
        if isinstance(codec, Float):
            if size * dtype.size % WORD_BYTES:
                raise ValueError(f"{size} numbers of {dtype.size} bytes do not fill whole words")
            return cls(scheme, dtype, size, Form.FLOAT, 8 * dtype.size, size)
        if isinstance(codec, Turbo):
            return cls(scheme, dtype, size, Form.TURBO, codec.bits, codec.group)
        if isinstance(codec, Quantized):
            form = _SMALL_FLOATS.get(codec.mode, Form.AFFINE)
            return cls(scheme, dtype, size, form, codec.bits, codec.group)
        raise ValueError(f"{scheme} is a scheme of decode slots; records hold that of pieces")

    @property
    def num_groups(self) -> int:
        return self.size // self.group

    @property
    def num_code_words(self) -> int:
        return self.size * self.bits // (8 * WORD_BYTES)

    @property
    def num_scale_words(self) -> int:
        each = {Form.FLOAT: 0, Form.AFFINE: 2 * self.dtype.size, Form.TURBO: self.dtype.size}
        num_bytes: int = self.num_groups * each.get(self.form, 1)
        return -(-num_bytes // WORD_BYTES)

    def codes(self, parts: Parts) -> mx.array:
        """The field of codes, ``[..., words]``."""
        return parts[0].view(mx.uint32) if self.form == Form.FLOAT else parts[0]

    def scales(self, parts: Parts) -> mx.array | None:
        """The field of scales, ``[..., words]``; None for floats."""
        if self.form == Form.FLOAT:
            return None
        if self.form == Form.AFFINE:
            turns = mx.stack(parts[1:], axis=-1)
            found = turns.reshape(*turns.shape[:-2], 2 * self.num_groups)
        else:
            found = parts[1]
        missing = self.num_scale_words * WORD_BYTES // found.dtype.size - found.shape[-1]
        if missing:
            found = mx.pad(found, [(0, 0)] * (found.ndim - 1) + [(0, missing)])
        return found.view(mx.uint32)

    def parts(self, codes: mx.array, scales: mx.array) -> Parts:
        """Undo ``codes`` and ``scales``."""
        if self.form == Form.FLOAT:
            return (mx.contiguous(codes).view(self.dtype),)
        small = self.form in (Form.MX, Form.NV)
        found = mx.contiguous(scales).view(mx.uint8 if small else self.dtype)
        if self.form == Form.AFFINE:
            turns = found.reshape(*found.shape[:-1], self.num_groups, 2)
            return codes, turns[..., 0], turns[..., 1]
        return codes, found[..., : self.num_groups]


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The record of one layer; ``dtype`` is that of the model's keys and values."""

    scheme: LayerScheme
    dtype: mx.Dtype
    keys: TensorLayout
    values: TensorLayout

    @classmethod
    def of(cls, scheme: LayerScheme, dtype: mx.Dtype) -> RecordLayout:
        """For a layer whose pieces have ``scheme``; ValueError where records cannot hold them."""
        keys = TensorLayout.of(scheme.keys, scheme.shape.key_size, dtype)
        values = TensorLayout.of(scheme.values, scheme.shape.value_size, dtype)
        return cls(scheme, dtype, keys, values)

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """The words at which codes of key and value, scales of key and value begin."""
        values = self.keys.num_code_words
        key_scales = values + self.values.num_code_words
        return 0, values, key_scales, key_scales + self.keys.num_scale_words

    @property
    def words(self) -> int:
        """Words of a record."""
        return self.offsets[3] + self.values.num_scale_words

    def join(self, keys: Parts, values: Parts) -> mx.array:
        """Records ``[..., time, words]`` of the parts of keys and values."""
        both = (self.keys, keys), (self.values, values)
        fields = [tensor.codes(parts) for tensor, parts in both]
        fields += [scales for tensor, parts in both if (scales := tensor.scales(parts)) is not None]
        return mx.concatenate(fields, axis=-1)

    def split(self, records: mx.array) -> PackedKV:
        """Undo ``join``."""
        places = list(self.offsets[1:])
        key_codes, value_codes, key_scales, value_scales = mx.split(records, places, axis=-1)
        return self.keys.parts(key_codes, key_scales), self.values.parts(value_codes, value_scales)

    def pack(self, keys: mx.array, values: mx.array) -> mx.array:
        """Records of dense keys and values ``[..., time, size]``, packed as the schemes do."""
        return self.join(self.scheme.keys.pack(keys), self.scheme.values.pack(values))

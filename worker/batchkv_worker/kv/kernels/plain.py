"""The kernels' results by plain operations of MLX: for tests, and to compare with.

Numbers are unpacked and multiplied in float32. Nothing here is fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.kernels.body import Body
from batchkv_worker.kv.kernels.decode import Partials
from batchkv_worker.kv.kernels.launch import Constant, Input, Output, Run, Size, arrays_of
from batchkv_worker.kv.kernels.layout import RecordLayout
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.types import PackedKV, Parts

LOWEST = float(mx.finfo(mx.float32).min)  # the score of rows that see nothing


@dataclass(frozen=True, slots=True)
class PlainKernels:
    """Implements ``RecordKernels``."""

    layout: RecordLayout

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
        """As ``DecodeKernels.attend``."""
        rows, heads, _, size = queries.shape
        kv_heads, columns = records.shape[1], records.shape[2]
        scheme, lines = self.layout.scheme, heads // kv_heads
        low, high = (bounds[:rows, side].reshape(rows, 1, 1, 1) for side in (0, 1))
        place = mx.arange(columns).reshape(1, 1, columns, 1)
        seen = (place >= low) & (place < high)
        packed = self.layout.split(records[:rows])
        # What no row sees may be no number, and a weight of 0 does not hide that.
        keys, values = (
            mx.where(seen, tensor.unpack_stored(parts, mx.float32), 0)
            for tensor, parts in zip((scheme.keys, scheme.values), packed, strict=True)
        )
        folded = queries.astype(mx.float32).reshape(rows, kv_heads, lines, size)
        scores = scale * (folded @ keys.swapaxes(-1, -2))
        scores = mx.where(seen.swapaxes(-1, -2), scores, -mx.inf)
        found = [values]
        parts = [scores]
        if partials is not None:
            scores_before, values_before = self._before(partials, rows)
            parts.append(scores_before)
            found.append(values_before)
        if sinks is not None:
            ones = (rows, kv_heads, lines, 1)
            sink = sinks.astype(mx.float32).reshape(1, kv_heads, lines, 1)
            parts.append(mx.broadcast_to(sink, ones))
        joined = mx.concatenate(parts, axis=-1)
        top = joined.max(axis=-1, keepdims=True)
        weights = mx.exp(joined - mx.where(top == -mx.inf, 0, top))
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / mx.where(total == 0, 1, total)
        out = weights[..., :columns] @ found[0]
        if partials is not None:
            depth = partials.chain.shape[1]
            share = weights[..., columns : columns + depth, None]
            out = out + (share * found[1]).sum(axis=-2)
        return out.reshape(rows, heads, 1, out.shape[-1]).astype(self.layout.dtype)

    def attend_alone(
        self, queries: mx.array, records: mx.array, bounds: mx.array, longest: int, scale: float
    ) -> tuple[mx.array, mx.array]:
        """As ``DecodeKernels.attend_alone``."""
        rows, heads, _, size = queries.shape
        if records.shape[0] < rows:
            records = mx.broadcast_to(records, (rows, *records.shape[1:]))
        kv_heads, columns = records.shape[1], records.shape[2]
        low, high = (bounds[:rows, side].reshape(rows, 1, 1, 1) for side in (0, 1))
        place = mx.arange(columns).reshape(1, 1, 1, columns)
        keys = self.layout.scheme.keys.unpack_stored(self.layout.split(records)[0], mx.float32)
        folded = queries.astype(mx.float32).reshape(rows, kv_heads, heads // kv_heads, size)
        scores = scale * (folded @ keys.swapaxes(-1, -2))
        scores = mx.where((place >= low) & (place < high), scores, -mx.inf)
        score = mx.maximum(mx.logsumexp(scores, axis=-1, keepdims=True), LOWEST)
        out = self.attend(queries, records, bounds, longest, scale)
        value = out.reshape(rows, kv_heads, heads // kv_heads, -1)
        return score.swapaxes(0, 1), value.swapaxes(0, 1)

    def _before(self, partials: Partials, rows: int) -> tuple[mx.array, mx.array]:
        """Scores ``[rows, kv heads, lines, depth]`` and values ``[..., depth, size]``."""
        chain = partials.chain[:rows]
        places = mx.maximum(chain, 0)
        scores = partials.scores[..., 0][:, places].transpose(1, 0, 3, 2)
        values = partials.values[:, places].transpose(1, 0, 3, 2, 4).astype(mx.float32)
        missing = (chain < 0)[:, None, None]
        hidden = mx.where(missing, -mx.inf, scores)
        return hidden, mx.where(missing[..., None], 0, values)

    def pack(self, keys: mx.array, values: Input) -> mx.array:
        """As ``DecodeKernels.pack``: of keys and values in the basis of storage."""
        scheme = self.layout.scheme
        (given,) = arrays_of([values])
        return self.layout.join(scheme.keys.codec.pack(keys), scheme.values.codec.pack(given))

    def place_rows(
        self, places: mx.array, keys: Parts, values: Parts, count: int, columns: int
    ) -> mx.array:
        """As ``DecodeKernels.place_rows``."""
        whole = self.layout.join(keys, values)
        found = mx.zeros((count, whole.shape[1], columns, self.layout.words), mx.uint32)
        for row, (place, low, high, shift) in enumerate(places.tolist()[:count]):
            found[row, :, low:high] = whole[place, :, low + shift : high + shift]
        return found


@dataclass(frozen=True, slots=True)
class PlainChunks:
    """Implements ``ChunkKernels`` for any scheme; dense numbers have ``dtype``."""

    scheme: LayerScheme
    dtype: mx.Dtype

    def pack(self, keys: mx.array, values: Input) -> PackedKV:
        """As ``ChunkKernel.pack``."""
        (given,) = arrays_of([values])
        return self.scheme.keys.codec.pack(keys), self.scheme.values.codec.pack(given)

    def pack_and_give(
        self, keys: mx.array, values: Input, prefix: PackedKV | None, rows: int, tokens: int
    ) -> tuple[PackedKV, tuple[mx.array, mx.array]]:
        """As ``ChunkKernel.pack_and_give``."""
        packed, before = self.pack(keys, values), prefix or ((), ())
        width = [(0, rows - keys.shape[0]), (0, 0), (0, tokens - keys.shape[2]), (0, 0)]
        found = []
        for tensor, own, old in zip(
            (self.scheme.keys, self.scheme.values), packed, before, strict=True
        ):
            dense = tensor.unpack_stored(own, self.dtype)
            if old:
                shared = tensor.unpack_stored(old, self.dtype)
                lines = mx.broadcast_to(shared, (keys.shape[0], *shared.shape[1:]))  # one, or all
                dense = mx.concatenate([lines, dense], axis=2)
            has_pads = (rows, tokens) != (keys.shape[0], keys.shape[2])
            found.append(mx.pad(dense, width) if has_pads else dense)
        return packed, (found[0], found[1])


def plain_rotary(body: Body, constants: tuple[Constant, ...]) -> Run:
    """Implements ``Launch`` for ``rotary.ROTARY``, in a form that MLX can trace."""
    given: dict[str, Any] = dict(constants)
    epsilons = [mx.array(given[name]).view(mx.float32).item() for name in ("QUERY_EPS", "KEY_EPS")]

    def run(
        inputs: Sequence[Input], grid: Size, group: Size, outputs: Sequence[Output]
    ) -> list[mx.array]:
        *heads, of_queries, of_keys, frequencies, offsets = arrays_of(inputs)
        how: Any = {"traditional": bool(given["NEIGHBOURS"]), "base": None, "scale": 1.0}
        how |= {"freqs": 1 / frequencies, "offset": offsets}
        three = zip(heads, (of_queries, of_keys), epsilons, strict=True)
        normed = (mx.fast.rms_norm(*one).transpose(0, 2, 1, 3) for one in three)
        return [mx.fast.rope(x, 2 * given["TURNED"], **how) for x in normed]

    return run


def plain_residual(body: Body, constants: tuple[Constant, ...]) -> Run:
    """Implements ``Launch`` for ``residual.RESIDUAL``, in a form that MLX can trace."""
    given: dict[str, Any] = dict(constants)
    epsilon = mx.array(given["EPSILON"]).view(mx.float32).item()

    def run(
        inputs: Sequence[Input], grid: Size, group: Size, outputs: Sequence[Output]
    ) -> list[mx.array]:
        x, added, weights = arrays_of(inputs)
        return [x + added, mx.fast.rms_norm(x + added, weights, epsilon)]

    return run

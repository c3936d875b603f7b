"""Random layers, rows and lengths for the kernels, and attention over them in float32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

import mlx.core as mx

from batchkv_worker.kv.kernels.decode import DecodeKernels, Partials
from batchkv_worker.kv.kernels.launch import Launch
from batchkv_worker.kv.kernels.layout import RecordLayout
from batchkv_worker.kv.schemes.packing import LayerScheme, LayerShape, TensorScheme, fit_model
from batchkv_worker.kv.schemes.spec import SchemeSpec
from batchkv_worker.kv.types import PackedKV, Parts

# The first of each are tried in the whole suite; sizes that no group divides keep floats.
NAMES = (
    *("affine8", "affine4", "turbo3", "mxfp4", "float", "nvfp4", "affine3/32", "mxfp8"),
    *("turbo4", "affine5", "affine6/128", "affine2/32", "affine4r/128", "affine8/32"),
)
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
SIZES = (128, 64, 80, 256, 96, 192)
LINES = (4, 1, 7, 16, 2, 3, 8, 5, 12, 6)
# Lengths around the borders of a simdgroup's columns, of a threadgroup's and of a split.
LENGTHS = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513, 700)
DEPTHS = (0, 1, 2)  # shared prefixes of a row
SCALE = 0.3
TOLERANCES = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """One layer and the rows that attend in it. ``seed`` chooses numbers and lengths."""

    keys: str
    values: str
    dtype: mx.Dtype
    key_size: int
    value_size: int
    lines: int
    depth: int
    has_sinks: bool
    rows: int
    seed: int

    @property
    def scheme(self) -> LayerScheme:
        spec = SchemeSpec.parse(f"{self.keys}+{self.values}")
        return fit_model(spec, [LayerShape(2, self.key_size, self.value_size)])[0]

    @property
    def layout(self) -> RecordLayout:
        return RecordLayout.of(self.scheme, self.dtype)

    def kernels(
        self, launch: Launch, *, matrices: bool = False, counts: bool = False
    ) -> DecodeKernels:
        what = self.layout, self.lines, launch
        return DecodeKernels.of(*what, matrices=matrices, counts=counts)


def has_matrices(case: Case) -> bool:
    """Whether there are products of matrices for such a layer."""
    is_small = any(name in ("mxfp4", "mxfp8", "nvfp4") for name in (case.keys, case.values))
    return case.dtype != mx.float32 and not is_small


def covering(seed: int = 0) -> Iterator[Case]:
    """Cases in which each pair of two properties' values occurs, greedily few."""
    choose = random.Random(seed)
    axes = [NAMES, NAMES, DTYPES, SIZES, SIZES, LINES, DEPTHS, (False, True), (1, 2, 5)]
    pairs = {
        (one, i, other, j)
        for one, other in combinations(range(len(axes)), 2)
        for i, j in product(range(len(axes[one])), range(len(axes[other])))
    }
    while pairs:
        best: tuple[int, list[int]] = (-1, [])
        for _ in range(60):
            one, i, other, j = choose.choice(sorted(pairs)) if _ < 30 else next(iter(pairs))
            row = [choose.randrange(len(axis)) for axis in axes]
            row[one], row[other] = i, j
            covers = sum((a, row[a], b, row[b]) in pairs for a, b in combinations(range(9), 2))
            best = max(best, (covers, row))
        row = best[1]
        pairs -= {(a, row[a], b, row[b]) for a, b in combinations(range(9), 2)}
        yield Case(*(axis[i] for axis, i in zip(axes, row, strict=True)), choose.randrange(2**31))  # type: ignore[arg-type]


def drawn(seed: int) -> Iterator[tuple[Sample, bool]]:
    """Random layers with up to 64 rows; and whether products of matrices are to be tried."""
    choose = random.Random(seed)
    names = [choose.choice(NAMES) for _ in range(2)]
    sizes = [choose.choice(SIZES) for _ in range(2)]
    lines, rows = choose.choice(LINES), choose.choice((1, 3, 8, 64))
    rest = choose.choice(DTYPES), *sizes, lines, choose.randrange(4), choose.random() < 0.5
    case = Case(*names, *rest, rows, seed)
    sample = Sample.of(case, LENGTHS if rows < 64 else (0, 1, 33, 257))
    yield sample, False
    if has_matrices(case):
        yield sample, True
        yield Sample.of(replace(case, rows=min(rows, 3)), (1, 500, 1024, 1100)), True


def exact(tensor: TensorScheme, parts: Parts) -> mx.array:
    """Stored numbers in float32, as their codes and scales say, before any rounding."""
    small = parts[0].dtype == mx.uint32 and len(parts) == 2 and parts[1].dtype == mx.uint8
    wide = (
        parts
        if small
        else tuple(part if part.dtype == mx.uint32 else part.astype(mx.float32) for part in parts)
    )
    return tensor.unpack_stored(wide, mx.float32)


@dataclass(frozen=True)
class Sample:
    """Arrays of a case. ``records`` are a slice of larger buffers, full of what is no number."""

    case: Case
    queries: mx.array
    records: mx.array
    packed: PackedKV
    bounds: mx.array
    sinks: mx.array | None
    partials: Partials | None

    @classmethod
    def of(cls, case: Case, lengths: tuple[int, ...] = LENGTHS) -> Sample:
        choose, scheme, dtype = random.Random(case.seed), case.scheme, case.dtype
        mx.random.seed(case.seed)
        rows, heads = case.rows, scheme.shape.num_heads
        held = [choose.choice(lengths) for _ in range(rows)]
        columns = max(held) + 5
        firsts = [choose.randrange(columns - length) for length in held]

        def numbers(*shape: int) -> mx.array:
            return mx.random.normal(shape).astype(dtype)

        packed = (
            scheme.keys.pack(numbers(rows, heads, columns, case.key_size)),
            scheme.values.pack(numbers(rows, heads, columns, case.value_size)),
        )
        records = case.layout.join(*packed)
        seen = mx.arange(columns) >= mx.array(firsts)[:, None]
        seen = seen & (mx.arange(columns) < (mx.array(firsts) + mx.array(held))[:, None])
        # Cells that no row reads would give what is no number, whatever their weight.
        records = mx.where(seen[:, None, :, None], records, mx.array(0xFFFFFFFF, mx.uint32))
        wide = mx.full((rows + 1, heads, columns + 9, case.layout.words), 0xFFFFFFFF, mx.uint32)
        wide[:rows, :, 4 : 4 + columns] = records
        both = zip(firsts, held, strict=True)
        bounds = [[first, first + length] for first, length in both]
        bounds += [[0, 0]] * (4 - rows)
        of_heads = numbers(rows, 1, heads * case.lines, case.key_size).swapaxes(1, 2)
        return cls(
            case,
            of_heads,
            wide[:rows, :, 4 : 4 + columns],
            packed,
            mx.array(bounds, mx.int32),
            mx.random.normal((heads * case.lines,)) + 2 if case.has_sinks else None,
            _partials(case, choose) if case.depth else None,
        )

    @property
    def longest(self) -> int:
        return int((self.bounds[:, 1] - self.bounds[:, 0]).max().item())

    def wanted(self) -> mx.array:
        """Attention in float32, ``[rows, heads, 1, size]``."""
        case, bounds = self.case, self.bounds[: self.case.rows]
        rows, heads, _, size = self.queries.shape
        kv_heads = case.scheme.shape.num_heads
        keys, values = (
            exact(tensor, parts)
            for tensor, parts in zip(
                (case.scheme.keys, case.scheme.values), self.packed, strict=True
            )
        )
        queries = self.queries.astype(mx.float32).reshape(rows, kv_heads, case.lines, size)
        columns = mx.arange(keys.shape[2])
        seen = (columns >= bounds[:, :1]) & (columns < bounds[:, 1:])
        scores = SCALE * (queries @ keys.swapaxes(-1, -2))
        scores = [mx.where(seen[:, None, None], scores, -mx.inf)]
        sums = [lambda weights: weights @ values]
        if self.partials is not None:
            for depth in range(case.depth):
                entry = self.partials.chain[:rows, depth]
                score = self.partials.scores[:, entry].swapaxes(0, 1)
                scores.append(mx.where((entry >= 0)[:, None, None, None], score, -mx.inf))
                value = self.partials.values[:, entry].swapaxes(0, 1).astype(mx.float32)
                sums.append(lambda weights, value=value: weights * value)
        if self.sinks is not None:
            sinks = self.sinks.reshape(1, kv_heads, case.lines, 1)
            scores.append(mx.broadcast_to(sinks, (rows, kv_heads, case.lines, 1)))
        both = mx.concatenate(scores, axis=-1)
        top = both.max(axis=-1, keepdims=True)
        weights = [mx.where(top == -mx.inf, 0.0, mx.exp(part - top)) for part in scores]
        total = sum(part.sum(axis=-1, keepdims=True) for part in weights)
        found = sum(add(part) for add, part in zip(sums, weights, strict=False))
        return (found / mx.maximum(total, 1e-30)).reshape(rows, heads, 1, -1)

    def check(self, launch: Launch, *, matrices: bool = False, counts: bool = False) -> None:
        """The kernels' result is that of float32, except for the rounding of the result."""
        kernels = self.case.kernels(launch, matrices=matrices, counts=counts)
        given = self.queries, self.records, self.bounds, self.longest, SCALE
        found = kernels.attend(*given, self.sinks, self.partials)
        compare(found, self.wanted(), self.case)


def _partials(case: Case, choose: random.Random) -> Partials:
    kv_heads, total = case.scheme.shape.num_heads, case.rows + 2
    shape = total, kv_heads, case.lines, case.value_size
    values = mx.random.normal(shape).astype(case.dtype).swapaxes(0, 1)
    scores = 4 + mx.random.normal((kv_heads, total, case.lines, 1))
    rows = max(case.rows, 8)
    chain = [[choose.randrange(-1, total) for _ in range(case.depth)] for _ in range(rows)]
    return Partials(scores, values, mx.array(chain, mx.int32))


def compare(
    found: mx.array, wanted: mx.array, what: object, tolerance: float | None = None
) -> None:
    """AssertionError unless the difference is rounding."""
    assert found.shape == wanted.shape
    share = TOLERANCES[found.dtype] if tolerance is None else tolerance
    bound = share * max(1.0, mx.abs(wanted).max().item())
    apart = mx.abs(found.astype(mx.float32) - wanted).max().item()
    assert apart <= bound, f"{what}: {apart} apart"  # also for what is no number

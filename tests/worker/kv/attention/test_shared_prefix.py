"""A prefix held once for all of its rows: attention over it, slots, and whole engines."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_causal_mask

from batchkv_worker.events import Completed
from batchkv_worker.kv.attention import paths, shared_prefix, shared_prefix_prefill
from batchkv_worker.kv.attention.paths import LayerAttention, Path
from batchkv_worker.kv.attention.shared_prefix import SharedPrefix
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.layers.contract import Chunk, LayerKind
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.kv.layers.discover import CacheTree
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.layers.slot_costs import costs_of
from batchkv_worker.kv.schemes.packing import LayerScheme, TensorScheme
from batchkv_worker.kv.slots.changes import Demand, Move
from batchkv_worker.kv.slots.layouts import SlotLayouts
from batchkv_worker.kv.slots.step_view import Shapes, StepViews
from batchkv_worker.kv.start.decision import Fixed
from batchkv_worker.kv.start.plan import make_plan
from batchkv_worker.kv.types import PackedKV, Parts, Pieces
from parity.matrix import RUNS_ALL
from support import tiny_models
from worker.kv.crowd import Crowd, model_of, random_prompt
from worker.kv.reference import (
    BACKEND,
    HEADS,
    SIZE,
    VALUE_SIZE,
    Reference,
    attention_kind,
    bits,
    check_content,
    keys_of,
    prefilled,
    run_layers,
    state_kind,
    values_of,
    x86,
)

BLOCK = 256
ROUNDED = x86(columns_multiple=64, rows_multiple=8)
QUERY_HEADS = 3 * HEADS
SCALE = SIZE**-0.5
SCHEMES = ("float", "affine8", "affine4r", "affine2/32", "k8v4", "mxfp8", "nvfp4r", "turbo3.5")
# A path's products are rounded in other places than those of the fused kernel.
BOUNDS = {mx.float32: 1e-5, mx.bfloat16: 0.03}

# -- attention over a shared prefix and each row's own


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def packed(scheme: LayerScheme, keys: mx.array, values: mx.array, kind: AttentionKind) -> PackedKV:
    """As decode slots keep them."""
    pack = kind.scheme.keys.pack(keys), kind.scheme.values.pack(values)
    return scheme.keys.take(pack[0]), scheme.values.take(pack[1])


def joined(first: PackedKV, own: PackedKV, rows: int) -> PackedKV:
    """The same tokens in one line for each row."""
    sides = [
        tuple(
            mx.concatenate([mx.repeat(a, rows, axis=0), b], axis=-2)
            for a, b in zip(*parts, strict=True)
        )
        for parts in zip(first, own, strict=True)
    ]
    return sides[0], sides[1]


def chains(first: PackedKV) -> list[list[PackedKV]]:
    """The same columns as one shared prefix, and as three that stand on each other."""
    columns = first[0][0].shape[-2]
    ends = [1, columns // 2, columns]
    cut: list[PackedKV] = []
    for low, high in pairwise([0, *ends]):
        sides = [tuple(part[..., low:high, :] for part in parts) for parts in first]
        cut.append((sides[0], sides[1]))
    return [[first], cut]


def check_attend(
    kind: AttentionKind,
    path: Path | None,
    sizes: tuple[int, int, int, int],
    mask: mx.array | None,
    with_sinks: bool,
) -> None:
    """``sizes``: rows, tokens, columns of the shared prefix, columns of each row."""
    rows, tokens, columns, own_columns = sizes
    mx.random.seed(sum(sizes))
    dtype = kind.dtype
    scheme = paths.in_slots(kind.scheme, path)
    layer = LayerAttention(BACKEND, scheme, dtype, path or "fused")
    first, own = (
        packed(
            scheme,
            normal(lines, HEADS, count, SIZE).astype(dtype),
            normal(lines, HEADS, count, VALUE_SIZE).astype(dtype),
            kind,
        )
        for lines, count in ((1, columns), (rows, own_columns))
    )
    queries = (2.0 * normal(rows, QUERY_HEADS, tokens, SIZE)).astype(dtype)
    sinks = normal(QUERY_HEADS).astype(dtype) if with_sinks else None
    whole = None
    if mask is not None:
        seen = mx.ones((*mask.shape[:-1], columns), mx.bool_)
        whole = mx.concatenate([seen, mask], axis=-1)
    # The fused kernel on dense copies: nothing of what is compared is used to compute this.
    fused = replace(layer, path="fused")
    wanted = paths.attend(fused, queries, *joined(first, own, rows), SCALE, whole, sinks)
    for shared in chains(first):
        # With one token a row, the first shared prefixes of a chain may have been attended before.
        for count in range(len(shared) + 1 if tokens == 1 else 1):
            before = [
                shared_prefix.attend_partial(layer, queries, one, SCALE) for one in shared[:count]
            ]
            rest = shared[count:]
            got = shared_prefix.attend(layer, queries, rest, own, SCALE, mask, sinks, before)
            assert got.shape == wanted.shape == (rows, QUERY_HEADS, tokens, VALUE_SIZE)
            assert got.dtype == wanted.dtype
            apart = mx.abs(got.astype(mx.float32) - wanted.astype(mx.float32)).max().item()
            bound = BOUNDS[dtype] * mx.abs(wanted).max().item()
            assert apart <= bound, (path, sizes, count, apart)


def ragged(rows: int, columns: int) -> mx.array:
    """Row i owns its last columns: all, then fewer and fewer, one at last."""
    starts = [index * (columns - 1) // max(1, rows - 1) for index in range(rows)]
    return mx.arange(columns) >= mx.array(starts).reshape(rows, 1, 1, 1)


@pytest.fixture(params=[None, 1, 2000], ids=["whole", "token by token", "sliced"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many scores may stand at once."""
    if request.param is not None:
        monkeypatch.setattr(shared_prefix, "MAX_SCORES", request.param)


@pytest.mark.parametrize("few", [1, 2**14, 2**26], ids=["row by row", "some rows", "all rows"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_chunk_on_copies_of_its_prefix(
    name: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU computes of a chunk is what a CPU computes: causal, in as many rows at once."""
    monkeypatch.setattr(shared_prefix_prefill, "MAX_DENSE", few)
    kind = attention_kind(name)
    for rows, tokens, columns, own_columns in ((3, 7, 40, 7), (2, 5, 9, 30), (4, 1, 33, 12)):
        mx.random.seed(rows)
        first, own = (
            (
                kind.scheme.keys.pack(normal(lines, HEADS, count, SIZE)),
                kind.scheme.values.pack(normal(lines, HEADS, count, VALUE_SIZE)),
            )
            for lines, count in ((1, columns), (rows, own_columns))
        )
        queries = 2.0 * normal(rows, QUERY_HEADS, tokens, SIZE)
        mask = "causal" if tokens > 1 else None
        for sinks in (None, normal(QUERY_HEADS)):
            got = []
            for backend in (GenericBackend(), BACKEND):
                layer = LayerAttention(backend, kind.scheme, mx.float32)
                for shared in chains(first):
                    what = (queries, shared, own, SCALE, mask, sinks)
                    got.append(shared_prefix_prefill.attend_chunk(layer, *what))
            for one in got:
                assert one.shape == (rows, QUERY_HEADS, tokens, VALUE_SIZE)
                apart = mx.abs(one - got[-1]).max().item()
                assert apart <= BOUNDS[mx.float32] * mx.abs(got[-1]).max().item(), (rows, apart)


def added(mask: mx.array) -> mx.array:
    """The mask as numbers that are added to scores."""
    return mx.where(mask, 0.0, -1e9).astype(mx.float32)


@pytest.mark.parametrize("few", [1, 2 * 8000, 2**26], ids=["row by row", "some rows", "all rows"])
@pytest.mark.parametrize("name", ["float", "affine8", "turbo4"])
def test_a_chunk_of_rows_behind_prefixes_of_their_own(
    name: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row as it is alone, with every kind of mask that a model makes."""
    kind, rows, tokens, columns = attention_kind(name), 3, 7, 40
    mx.random.seed(1)
    first, own = (
        (
            kind.scheme.keys.pack(normal(rows, HEADS, count, SIZE)),
            kind.scheme.values.pack(normal(rows, HEADS, count, VALUE_SIZE)),
        )
        for count in (columns, tokens)
    )
    queries = 2.0 * normal(rows, QUERY_HEADS, tokens, SIZE)
    causal = create_causal_mask(tokens, 0)
    lengths = mx.arange(tokens) < mx.array([7, 5, 2]).reshape(rows, 1, 1, 1)
    of_rows = causal & lengths | mx.eye(tokens, dtype=mx.bool_)  # each token sees itself
    for mask in (
        "causal",
        None,
        causal,
        causal[None, None],
        of_rows,
        added(causal),
        added(of_rows),
    ):
        wanted = []
        monkeypatch.setattr(shared_prefix_prefill, "MAX_DENSE", 2**26)
        for row in range(rows):
            one = slice(row, row + 1)
            prefix, rest = (
                tuple(tuple(part[one] for part in parts) for parts in both) for both in (first, own)
            )
            is_of_row = isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[0] > 1
            layer = LayerAttention(BACKEND, kind.scheme, mx.float32)
            what = (queries[one], [prefix], rest, SCALE, mask[one] if is_of_row else mask)
            wanted.append(shared_prefix_prefill.attend_chunk(layer, *what))
        monkeypatch.setattr(shared_prefix_prefill, "MAX_DENSE", few)
        layer = LayerAttention(GenericBackend(), kind.scheme, mx.float32)
        found = shared_prefix_prefill.attend_chunk(layer, queries, [first], own, SCALE, mask)
        apart = mx.abs(found - mx.concatenate(wanted)).max().item()
        assert apart <= BOUNDS[mx.float32] * mx.abs(found).max().item(), (mask, apart)


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SCHEMES)
def test_decode_is_attention_over_both_parts(name: str, dtype: mx.Dtype) -> None:
    """One token a row after a shared prefix equals the same with a copy in each row, every path."""
    paths: list[Path | None] = ["fused", "folded", "packed"]
    if attention_kind(name).scheme.can_spread:
        paths += ["spread-fused", "spread-folded", "spread-packed"]
    for path in paths:
        kind = attention_kind(name, None, dtype, path=path or "fused")
        for with_sinks in (False, True):
            check_attend(kind, path, (1, 1, 32, 1), None, with_sinks)
            check_attend(kind, path, (3, 1, 64, 5), ragged(3, 5), with_sinks)
            check_attend(kind, path, (4, 1, 5, 96), ragged(4, 96), with_sinks)


@pytest.mark.few(16)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.usefixtures("at_once")
def test_prefill_is_attention_over_both_parts(name: str, dtype: mx.Dtype) -> None:
    """Several tokens a row, causal among their own; whole, in slices, and token by token."""
    kind = attention_kind(name, None, dtype)
    for past in (0, 3, 70):
        mask = create_causal_mask(7, past)
        check_attend(kind, None, (2, 7, 40, past + 7), mask, with_sinks=past == 3)
    check_attend(kind, None, (3, 6, 16, 9), ragged(3, 9), with_sinks=False)
    check_attend(kind, None, (3, 6, 16, 9), None, with_sinks=True)


@pytest.mark.parametrize("restored", [0, 13])
@pytest.mark.parametrize("name", ["float", "affine8", "turbo3.5"])
def test_prompts_go_on_after_a_prefix(name: str, restored: int) -> None:
    """Chunks of two rows after a shared prefix and cached tokens see both."""
    kind = attention_kind(name)
    rng = random.Random(3)
    prefix = [rng.randrange(1, 4096) for _ in range(48)]
    rows = [prefix + [rng.randrange(1, 4096) for _ in range(40)] for _ in range(2)]
    whole = prefilled([kind], rows, ()).layers[0]
    first = 48 + restored
    layer = kind.prefill(88, 88)
    prefixes = [kind.scheme.split(whole.block(0, *ends) or ()) for ends in ((0, 30), (30, 48))]
    layer.share(prefixes, 48)
    if restored:
        cached = [whole.block(index, 48, first) or () for index in range(2)]
        own = tuple(mx.concatenate(parts) for parts in zip(*cached, strict=True))
        layer.restore(own, 48, first)
    for low, high, mask in ((first, first + 9, "causal"), (first + 9, first + 10, None)):
        chunk = [row[low:high] for row in rows]
        layer.begin(Chunk(low, high - low))
        assert layer.offset == low
        layer.update_and_fetch(keys_of(chunk), values_of(chunk))
        queries = normal(2, QUERY_HEADS, high - low, SIZE)
        attend = layer.attend
        assert attend is not None
        got = attend(queries, SCALE, mask, None)
        seen = [row[:high] for row in rows]
        wanted = mx.fast.scaled_dot_product_attention(
            queries, keys_of(seen), values_of(seen), scale=SCALE, mask=mask
        )
        bound = {"float": 1e-5, "affine8": 0.05, "turbo3.5": 1.0}[name]
        assert mx.abs(got - wanted).max().item() <= bound
        layer.end()
    assert layer.arrays[0].shape[-2] <= 88 - 48
    for index in range(2):
        own, wanted_parts = layer.row(index, first + 10, 48), whole.block(index, 48, first + 10)
        assert own is not None and wanted_parts is not None
        if name == "turbo3.5":
            are_rounded_alike(own, wanted_parts)
        else:
            assert bits(own) == bits(wanted_parts)


def are_rounded_alike(some: Pieces, others: Pieces) -> None:
    """Equal but for rounding: turbo rotates by a product, which some CPUs round by its rows."""
    for one, other in zip(some, others, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        if mx.issubdtype(one.dtype, mx.floating):
            assert mx.allclose(one, other, rtol=1e-5).item()
        else:
            assert mx.mean(one == other).item() > 0.99


# -- rows in slots


class Herd:
    """Decode slots with shared prefixes beside what each row should hold and attend to."""

    def __init__(self, name: str = "float", slots: int = 6, cost: int = 1) -> None:
        self.kinds: list[LayerKind] = [
            attention_kind(name),
            attention_kind(name, 40),
            state_kind(),
            attention_kind(name, path="folded"),
        ]
        tree = CacheTree((), tuple(range(len(self.kinds))))
        self.slots = DecodeSlots(BACKEND, self.kinds, tree, slots, Shapes(group_cost=cost))
        self.rows: dict[int, tuple[Reference, SharedPrefix | None]] = {}
        self.rng = random.Random(2)
        self.prefixes: dict[bytes, tuple[int, ...]] = {}
        self.bound = 1e-5 if name == "float" else 0.05

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(1, 4096) for _ in range(count))

    def prefix(self, key: bytes, length: int, parent: SharedPrefix | None = None) -> SharedPrefix:
        """Of ``length`` tokens after its parent's."""
        before = self.prefixes[parent.key] if parent else ()
        self.prefixes[key] = prefix = (*before, *self.tokens(length))
        pieces = prefilled(self.kinds, [prefix], ()).block(0, len(before), len(prefix))
        shared: dict[int, Pieces] = {place: pieces[place] or () for place in (0, 3)}
        return self.slots.make_prefix(key, len(prefix), shared, parent)

    def join(self, shared: SharedPrefix | None, length: int) -> int:
        """A row of ``length`` tokens of its own."""
        prefix = self.prefixes[shared.key] if shared else ()
        row = Reference((*prefix, *self.tokens(length)))
        group = prefilled(self.kinds, [row.tokens], ())
        demand = Demand(len(row.tokens), 30, len(prefix))
        pieces = group.row(0, len(row.tokens), len(prefix))
        slot, move = self.slots.admit(demand, pieces, shared)
        self._follow(move)
        assert slot not in self.rows
        self.rows[slot] = row, shared
        return slot

    def leave(self, slot: int) -> None:
        self.slots.release(slot)
        del self.rows[slot]

    def close_gaps(self) -> list[Move]:
        moves = self.slots.close_gaps()
        for move in moves:
            self._follow(move)
        return moves

    def _follow(self, move: Move | None) -> None:
        if move is not None:
            self.rows[move.target] = self.rows.pop(move.source)

    def step(self) -> None:
        """One token a row; every row attends to all that it has had, and to nothing else."""
        view = self.slots.begin_step()
        fed = [self.tokens(1)[0] for _ in range(view.num_rows)]
        run_layers(self.slots.layers, [[token] for token in fed])
        for slot, (row, shared) in self.rows.items():
            assert view.offsets[slot].item() == len(row.tokens)
            self.rows[slot] = Reference((*row.tokens, fed[slot])), shared
        queries = normal(view.num_rows, QUERY_HEADS, 1, SIZE)
        for place, kind in enumerate(self.kinds):
            if isinstance(kind, AttentionKind):
                layer: Any = self.slots.layers[place]
                keys, values = layer.keys_and_values()
                assert layer.handed_out(keys, values, layer.make_mask(1))
                got = layer.attend(queries, SCALE, layer.make_mask(1), None)
                self._check_attended(got, queries, kind.window)
        self.slots.end_step()
        mx.eval(self.slots.arrays)

    def _check_attended(self, got: mx.array, queries: mx.array, window: int | None) -> None:
        for slot, (row, _) in self.rows.items():
            seen = [row.tokens if window is None else row.tokens[-window:]]
            wanted = mx.fast.scaled_dot_product_attention(
                queries[slot : slot + 1], keys_of(seen), values_of(seen), scale=SCALE
            )
            assert mx.abs(got[slot] - wanted[0]).max().item() <= self.bound, (slot, window)

    def check(self) -> None:
        """Compare records and contents; layers that keep every token hold only the suffix."""
        self.slots.check()
        assert self.slots.layouts.main.slots == set(self.rows)
        for slot, (row, shared) in self.rows.items():
            assert self.slots.layouts.prefixes.get(slot) is shared
            assert self.slots.size(slot) == len(row.tokens)
            pieces = self.slots.snapshot(slot)
            own = Reference(row.tokens[shared.num_tokens if shared else 0 :])
            for kind, piece in zip(self.kinds, pieces, strict=True):
                keeps_all = kind.window is None and not kind.has_state
                check_content(kind, piece, own if keeps_all else row)


@pytest.mark.parametrize("name", ["float", "affine8"])
def test_rows_take_their_prefix_along(name: str) -> None:
    """Rows with shared prefixes, with longer ones on top, and with none come, go, move and decode.

    None ever reads another row's shared prefix.
    """
    herd = Herd(name)
    prefixes = [herd.prefix(b"a", 48), herd.prefix(b"b", 21), None]
    prefixes += [herd.prefix(b"ac", 9, prefixes[0]), herd.prefix(b"ad", 70, prefixes[0])]
    prefixes.append(herd.prefix(b"ade", 1, prefixes[-1]))
    for _ in range(90 if RUNS_ALL else 40):
        choice = herd.rng.random()
        if herd.slots.layouts.num_free and choice < 0.4:
            herd.join(herd.rng.choice(prefixes), herd.rng.choice([1, 2, 39, 60, 300]))
        elif herd.rows and choice < 0.55:
            herd.leave(herd.rng.choice(list(herd.rows)))
        elif choice < 0.65:
            herd.close_gaps()
        elif herd.rows:
            herd.step()
        herd.check()


@pytest.mark.parametrize("name", ["float", "affine8"])
def test_rows_enter_slots_that_others_leave_with_them(name: str) -> None:
    """A gap moves up through the rows of each prefix, and all of these moves are made together."""
    herd = Herd(name, slots=9)
    prefixes = [herd.prefix(b"a", 30), herd.prefix(b"b", 21), None]
    for index, shared in enumerate(prefix for prefix in prefixes for _ in range(3)):
        herd.join(shared, 5 + 7 * index)
    before = [herd.rows[slot][1] for slot in range(9)]
    herd.leave(0)
    herd.step()
    moves = herd.close_gaps()
    assert {move.source for move in moves} & {move.target for move in moves}
    assert [herd.rows[slot][1] for slot in range(8)] == before[1:]
    herd.check()
    herd.step()
    herd.check()


def test_a_prefix_that_does_not_fit_is_refused() -> None:
    """A shared length that is not its prefix's length is an error, not a wrong position."""
    layouts = SlotLayouts(2)
    some = SharedPrefix(b"a", 512, packed={}, slots={})
    for shared, given in ((256, some), (512, None), (0, some)):
        with pytest.raises(ValueError, match="does not fit its prefix"):
            layouts.admit(Demand(600, 10, shared), 0, given)


def test_a_prefix_dies_with_its_last_row() -> None:
    """After its last row a shared prefix is freed with its arrays; slots and views live on."""
    herd = Herd()
    held = [weakref.ref(herd.prefix(key, 64)) for key in (b"a", b"b")]
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    shared = herd.prefix(b"a", 64)
    parts = [array.nbytes for array in shared.arrays]
    held = [weakref.ref(shared)]
    slots = [herd.join(shared, 3), herd.join(shared, 5), herd.join(None, 4)]
    del shared
    herd.step()
    herd.leave(slots[0])
    herd.step()
    gc.collect()
    assert held[0]() is not None
    mx.synchronize()
    before = mx.get_active_memory()
    herd.leave(slots[1])
    gc.collect()
    assert held[0]() is None and not herd.slots.layouts.prefixes
    assert before - mx.get_active_memory() >= sum(parts) / 2  # slots may read the packed ones
    herd.step()


def test_prefixes_are_bit_for_bit_what_prefill_packed() -> None:
    """Prefill reads the very pieces, decode those that slots would hold; both are reckoned with."""
    for path in ("fused", "spread-packed"):
        kind = attention_kind("turbo3.5", path=path)
        slots = DecodeSlots(BACKEND, [kind], CacheTree((), (0,)), 2, Shapes())
        group = prefilled([kind], [tuple(range(1, 41))], ())
        pieces = group.row(0, 40)[0]
        found = slots.make_prefix(b"a", 40, {0: pieces})
        keys, values = found.packed[0]
        assert bits((*keys, *values)) == bits(pieces)
        slots.admit(Demand(40, 5), [pieces])
        buffers: Any = slots.layers[0].arrays
        write = slots.layouts.main.write
        wanted = tuple(part[:1, ..., write - 40 : write, :] for part in buffers)
        costs = costs_of([kind])
        held = {id(array): array.nbytes for array in found.arrays}
        assert sum(held.values()) == 40 * (costs.per_token + costs.extra_per_shared)
        assert bits((*found.slots[0][0], *found.slots[0][1])) == bits(wanted)


def sharing(layouts: SlotLayouts, shared: SharedPrefix | None, length: int) -> int:
    """A row joins; no tensors."""
    before = shared.num_tokens if shared else 0
    demand = Demand(before + length, 50, before)
    slot, _ = layouts.make_way(demand, shared)
    layouts.admit(demand, slot, shared)
    return slot


def num_groups(layouts: SlotLayouts) -> int:
    """Groups of the next step. Each row is in one with its shared prefix; lengths split none."""
    layouts.before_step()
    view = StepViews(Shapes(group_cost=10**9)).view(layouts)
    groups = view.spans[None].groups
    assert [group.first for group in groups[1:]] == [group.last for group in groups[:-1]]
    assert (groups[0].first, groups[-1].last) == (0, view.num_rows)
    for group in groups:
        rows = set(range(group.first, group.last)) & layouts.main.slots
        assert {layouts.prefixes.get(slot) for slot in rows} <= {group.prefix}
        assert group.low <= min((layouts.main.start(slot) for slot in rows), default=group.low)
    return len(groups)


def readings(layouts: SlotLayouts) -> Counter[SharedPrefix]:
    """How often each shared prefix is read in the next step, in which lengths split groups, too.

    Every group reads the chain of its shared prefix, each of it once.
    """
    layouts.before_step()
    span = StepViews(Shapes(group_cost=40)).view(layouts).spans[None]
    for group in span.groups:
        before = [common.prefix for common in span.common if common.has(group)]
        chain = group.prefix.chain if group.prefix else []
        assert sorted(s.rank for s in (*before, *group.prefixes)) == sorted(s.rank for s in chain)
    for common in span.common:
        inside = [group for group in span.groups if common.has(group)]
        assert (inside[0].first, inside[-1].last) == (common.first, common.last)
        assert len(inside) > 1 and all(common.prefix in g.prefix.chain for g in inside if g.prefix)
    read = [prefix for group in span.groups for prefix in group.prefixes]
    return Counter([*read, *(common.prefix for common in span.common)])


def test_groups_read_what_they_have_in_common_once() -> None:
    layouts = SlotLayouts(16)
    root = SharedPrefix(b"r", 512, packed={}, slots={})
    branches = [
        SharedPrefix(bytes([number]), 768, root, packed={}, slots={}) for number in range(3)
    ]
    twig = SharedPrefix(b"t", 1024, branches[1], packed={}, slots={})
    order = [root, branches[0], branches[0], branches[1], twig, twig, branches[2], None, None]
    for slot, one in enumerate(order):
        depth = one.num_tokens if one else 0
        layouts.admit(Demand(depth + 60 + 50 * (slot % 2), 5, depth), slot, one)
    assert readings(layouts) == dict.fromkeys([root, *branches, twig], 1)
    layouts.release(3)  # between others of the root's
    assert readings(layouts) == dict.fromkeys([root, *branches, twig], 1)
    layouts.admit(Demand(0, 5), 3)  # without any token yet, but there
    assert readings(layouts) == {root: 2, branches[0]: 1, branches[1]: 1, twig: 1, branches[2]: 1}


def test_a_prefix_is_read_once_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a group: what is multiplied with it has the rows of all groups."""
    herd = Herd()
    root = herd.prefix(b"r", 48)
    leaves = [herd.prefix(b"ra", 20, root), herd.prefix(b"rb", 30, root)]
    for slot in [herd.join(None, 3) for _ in range(6)]:  # so that there are buffers to move rows in
        herd.leave(slot)
    order = [root, *leaves, *leaves]
    for one, length in zip(order, (5, 90, 7, 60, 33), strict=True):
        herd.join(one, length)
    read: Counter[int] = Counter()
    unpack = TensorScheme.unpack_stored
    known = {id(both[0]): one for one in (root, *leaves) for both in one.slots.values()}

    def counted(self: TensorScheme, parts: Parts, dtype: mx.Dtype) -> mx.array:
        if id(parts) in known:
            read[known[id(parts)].num_tokens] += 1
        return unpack(self, parts, dtype)

    monkeypatch.setattr(TensorScheme, "unpack_stored", counted)
    herd.step()
    assert read == {48: 2, 68: 2, 78: 2}  # two layers keep every token


def test_branches_of_a_prefix_are_neighbours() -> None:
    """Rows of a tree that come and go in any order: each of two roots is read twice, on average."""
    more = []
    for seed in range(8 if RUNS_ALL else 3):
        rng = random.Random(seed)
        layouts = SlotLayouts(16)
        roots = [SharedPrefix(bytes([number]), 512, packed={}, slots={}) for number in range(2)]
        leaves = [
            SharedPrefix(bytes([n, m]), 768, roots[n], packed={}, slots={})
            for n in range(2)
            for m in range(2)
        ]
        for _ in range(300):
            if layouts.num_free and rng.random() < 0.65:
                sharing(layouts, rng.choice([*roots, *leaves, None]), rng.randrange(1, 200))
            elif layouts.num_active:
                layouts.release(rng.choice(list(layouts.main.slots)))
            if layouts.num_active:
                read = readings(layouts)
                assert set(read) == set(layouts.all_prefixes.values())
                more.append(sum(read[one] - 1 for one in roots if one in read))
                layouts.after_step()
    assert sum(more) / len(more) <= 2.0


def test_rows_of_a_prefix_are_neighbours() -> None:
    """Rows that join in turns behind two shared prefixes, or none, are attended in three groups."""
    layouts = SlotLayouts(16)
    prefixes = [
        SharedPrefix(b"a", 512, packed={}, slots={}),
        SharedPrefix(b"b", 256, packed={}, slots={}),
    ]
    for slot in range(16):  # so that there are buffers to move rows in
        layouts.admit(Demand(1, 1), slot)
    for slot in range(16):
        layouts.release(slot)
    for turn in range(5):
        for index, shared in enumerate(prefixes):
            sharing(layouts, shared, 20 + turn + index)
            assert num_groups(layouts) == len(set(layouts.prefixes.values()))
    for turn in range(4):
        sharing(layouts, None, 30 + 40 * turn)
        assert num_groups(layouts) == 3


def histories(seeds: int) -> Iterator[tuple[SlotLayouts, random.Random]]:
    """Layouts after each join and leave of rows behind three shared prefixes, or none."""
    for seed in range(seeds):
        rng = random.Random(seed)
        layouts = SlotLayouts(16)
        prefixes = [SharedPrefix(bytes([number]), 512, packed={}, slots={}) for number in range(3)]
        for _ in range(300):
            if layouts.num_free and rng.random() < 0.65:
                sharing(layouts, rng.choice([*prefixes, None]), rng.randrange(1, 200))
            elif layouts.num_active:
                layouts.release(rng.choice(list(layouts.main.slots)))
            layouts.check()
            if layouts.num_active:
                yield layouts, rng


def test_groups_are_few() -> None:
    """Rows come and go in any order: on average at most one group more than shared prefixes."""
    extra = []
    for layouts, _ in histories(8):
        extra.append(
            num_groups(layouts) - len({layouts.prefixes.get(s) for s in layouts.main.slots})
        )
        layouts.after_step()
    assert min(extra) >= 0 and sum(extra) / len(extra) <= 1.3


def test_closing_gaps_keeps_prefixes_together() -> None:
    """Rows move down until there are no gaps, and no shared prefix gets more groups than before."""
    for layouts, rng in histories(4):
        if rng.random() < 0.2 and layouts.num_active <= 0.75 * layouts.main.num_rows:
            before, held = num_groups(layouts), sorted(s.key for s in layouts.prefixes.values())
            layouts.close_gaps()
            layouts.check()
            assert layouts.main.slots == set(range(layouts.num_active))
            assert num_groups(layouts) <= before
            assert sorted(s.key for s in layouts.prefixes.values()) == held
            layouts.after_step()


# -- whole engines

SHARING = (
    *tiny_models.FAMILIES,
    *("gemma3_text", "gemma3n", "gpt_oss", "cohere2", "olmo3", "llama4_text"),
    *("qwen3_next", "qwen3_5", "falcon_h1", "lfm2", "granitemoehybrid", "nemotron_h", "gear"),
)
# One of each way of keeping a cache; `make parity` takes all.
FEW = ("llama", "gemma3n", "gpt_oss", "qwen3_next", "nemotron_h", "gear")
# They compute attention over what caches hand out, hand it to layers without a cache, or keep no
# tokens at all. llama4 is not served.
APART = (
    *("gemma2", "gemma2_mha", "deepseek_v32", "gemma4_text", "longcat_flash", "deepseek_v3"),
    *("rwkv7", "mamba2"),
)
# How far logarithms of probabilities may be apart. A code at the edge of a bin may go either way.
# In float32 one row of gemma3, after copies of shared prefixes, is off by 1e-4, others by 1e-5.
CLOSE = {"float": 2e-4, "affine8": 2e-3, "k8v4": 0.01, "turbo3.5": 0.03}


def prompts() -> dict[str, list[int]]:
    """Rows behind two prefixes, behind a part of one of them, and behind none, all mixed."""
    long, short = random_prompt(1, 2 * BLOCK), random_prompt(2, BLOCK)
    found = {}
    for index, length in enumerate((9, 1, 30, 3, 17)):
        found[f"long {index}"] = long + random_prompt(10 + index, length)
        found[f"short {index}"] = short + random_prompt(20 + index, length + 1)
    for index, (length, other) in enumerate(((5, 1), (1, 40), (270, 2))):
        found[f"part {index}"] = long[:BLOCK] + random_prompt(30 + index, length)
        found[f"other {index}"] = random_prompt(40 + index, other)
    # Their last token is fed by the first step: these have a block less, and a token less.
    found |= {"exact long": long, "exact short": short}
    found["one after"] = [*long, 7]
    return found


def herded(crowd: Crowd, late: int = 6) -> set[int]:
    """Add all prompts, the last ``late`` later, and run; the lengths of shared prefixes in use."""
    rows = list(prompts().items())
    seen: set[int] = set()
    for index, (name, prompt) in enumerate(rows):
        if index >= len(rows) - late:
            crowd.step()
            seen |= lengths_of(crowd)
        crowd.add(name, prompt, count=2 + index % 5, logprobs=2)
    while not crowd.engine.is_idle:
        crowd.step()
        seen |= lengths_of(crowd)
    return seen


def lengths_of(crowd: Crowd) -> set[int]:
    return {held.num_tokens for held in crowd.engine._slots.layouts.prefixes.values()}


def engine_of(family: str, scheme: str, **changes: Any) -> Crowd:
    values = {"slots": 12, "group_cost": 64, "chunk_tokens": 512, "prefix_cells": 768, **changes}
    return Crowd(family, scheme=scheme, **values)


@cache
def unshared(family: str, scheme: str, slots: int = 12) -> dict[str, Completed]:
    """What each row gives with its prefix in its own line; with one slot, alone."""
    crowd = engine_of(family, scheme, slots=slots, share=False)
    assert not herded(crowd)
    return crowd.ended


def unshared_first(
    crowd: Crowd, run: Callable[[Crowd], Collection[Any]] = herded
) -> dict[str, Completed]:
    """The same of the very engine, before anybody shares: prefixes are in its memory then."""
    scheduler = crowd.engine._scheduler
    shares, scheduler._shares = scheduler._shares, False
    assert not run(crowd)
    expected = dict(crowd.ended)
    crowd.ended.clear()
    scheduler._shares = shares
    return expected


def check_same(crowd: Crowd, expected: dict[str, Completed], scheme: str) -> None:
    """Tokens and their probabilities; after a tie a row has another history."""
    bound = CLOSE[scheme]
    for name, event in crowd.ended.items():
        wanted, got = expected[name].logprobs, event.logprobs
        assert wanted and got
        for step, (one, other) in enumerate(zip(got, wanted, strict=False)):
            first, second = (logprob for _, logprob in other.top)
            if one.token != other.token:
                assert first - second <= bound, (name, step, one, other)
                break
            assert abs(one.logprob - other.logprob) <= bound, (name, step, one, other)


def shares(model: Any) -> bool:
    caches = tiny_models.loaded(model).caches
    fixed = Fixed("fused", 64)
    plan = make_plan("tiny", model, caches, "float", mx.float32, BACKEND, slots=2, fixed=fixed)
    return plan.shares


@pytest.mark.few(4)
@pytest.mark.parametrize("family", APART)
def test_who_does_not_share(family: str) -> None:
    """Where attention passes the caches by, no prefix is taken out of a row's line."""
    assert not shares(model_of(family))


def test_gemma4_without_shared_layers_shares() -> None:
    """Its layers without keys of their own attend without a cache; sizes that have none share."""
    assert shares(tiny_models.build("gemma4_text", num_kv_shared_layers=0))


def test_every_family_is_known() -> None:
    """Each is among those that share or those that do not; llama4 is not served."""
    assert {*SHARING, *APART, "llama4"} == {*tiny_models.ALL_FAMILIES, "gear"}


@pytest.mark.few(2)
@pytest.mark.parametrize("family", SHARING if RUNS_ALL else FEW)
def test_rows_behind_prefixes(family: str) -> None:
    """Two prefixes and a part of one at once, joins and leaves: the tokens of rows without.

    One engine for both: the rows that share find the prefixes that the others have computed.
    """
    crowd = engine_of(family, "affine8")
    expected = unshared_first(crowd)
    assert {BLOCK, 2 * BLOCK} <= herded(crowd) and len(crowd.ended) == len(prompts())
    check_same(crowd, expected, "affine8")
    assert not crowd.engine._slots.layouts.prefixes


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "gemma3_text"])
def test_floats_behind_prefixes(family: str) -> None:
    """Engines of their own with shared prefixes and without; and mlx-lm's own tokens."""
    crowd = engine_of(family, "float", path="folded")
    assert {BLOCK, 2 * BLOCK} <= herded(crowd) and len(crowd.ended) == len(prompts())
    check_same(crowd, unshared(family, "float"), "float")
    crowd.check_alone("long 0", "short 3", "exact long", "one after", "part 2")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("llama", "turbo3.5"),
        ("gemma3_text", "k8v4"),
        ("qwen3_next", "turbo3.5"),
        ("qwen3_next", "k8v4"),
    ],
)
def test_schemes_behind_prefixes(family: str, scheme: str) -> None:
    """Other paths and packings, and columns and rows rounded up."""
    path = {"turbo3.5": "spread-packed", "k8v4": "packed"}[scheme]
    crowd = engine_of(family, scheme, path=path, backend=ROUNDED)
    expected = unshared_first(crowd)
    assert {BLOCK, 2 * BLOCK} <= herded(crowd) and len(crowd.ended) == len(prompts())
    check_same(crowd, expected, scheme)


@pytest.mark.parametrize(("family", "scheme"), [("llama", "affine8"), ("gemma3_text", "float")])
def test_chunks_on_copies_of_their_prefixes(family: str, scheme: str) -> None:
    """Whole engines that compute prompts as a GPU does: the same tokens."""
    crowd = engine_of(family, scheme, backend=GenericBackend())
    expected = unshared_first(crowd)
    assert {BLOCK, 2 * BLOCK} <= herded(crowd) and len(crowd.ended) == len(prompts())
    check_same(crowd, expected, scheme)


@pytest.mark.parametrize(("scheme", "path"), [("affine8", "folded"), ("turbo3.5", "spread-folded")])
def test_rows_of_one_length_behind_a_prefix_need_no_mask(scheme: str, path: Path) -> None:
    """Columns are rounded, but not for rows that start together: the same tokens, no mask."""
    prefix = random_prompt(1, BLOCK)
    rows = {f"row {n}": prefix + random_prompt(10 + n, 20) for n in range(9)}
    crowd = engine_of("llama", scheme, path=path, backend=ROUNDED, slots=9, chunk_tokens=BLOCK)
    exact: set[tuple[bool, bool]] = set()
    view = crowd.engine._slots._views.view

    def watched(layouts: SlotLayouts) -> Any:
        made = view(layouts)
        exact.update((g.is_exact, g.prefix is not None) for g in made.spans[None].exact_groups)
        return made

    crowd.engine._slots._views.view = watched  # type: ignore[method-assign]
    for name, prompt in rows.items():
        crowd.add(name, prompt, count=6)
    while not crowd.engine.is_idle:
        crowd.step()
    assert (True, True) in exact
    alone = engine_of("llama", scheme, path=path, slots=1, share=False)
    for name, prompt in rows.items():
        alone.add(name, prompt, count=6)
    while not alone.engine.is_idle:
        alone.step()
    for name in rows:
        assert crowd.ended[name].token_ids == alone.ended[name].token_ids, name


def test_rows_behind_prefixes_equal_themselves_alone() -> None:
    """Packed rows with shared prefixes equal the same rows one after the other in one slot."""
    crowd = engine_of("llama", "affine8", group_cost=1)
    herded(crowd)
    check_same(crowd, unshared("llama", "affine8", slots=1), "affine8")


def test_cancels_behind_prefixes() -> None:
    """Rows of two shared prefixes are cancelled in wait, prefill and slots: the others go on."""
    crowd, gone = engine_of("llama", "affine8", slots=6, chunk_tokens=64), set()
    for name, prompt in prompts().items():
        crowd.add(name, prompt, count=9, logprobs=2)  # as far as the others go, they must agree
    rng = random.Random(5)
    seen: set[int] = set()
    while not crowd.engine.is_idle:
        crowd.step()
        seen |= lengths_of(crowd)
        group = crowd.engine._scheduler.group
        chosen = [row.job_id for row in group.rows[:1]] if group is not None else []
        chosen += [row.job_id for row in crowd.engine._rows.values()]
        chosen += [row.job_id for row in crowd.engine._scheduler.waiting][:1]
        if chosen and len(gone) < 10 and rng.random() < 0.5:
            gone.add(name := rng.choice(chosen))
            crowd.engine.cancel(name)
            crowd.engine.check_integrity()
    assert seen and len(gone) == 10 and not gone & set(crowd.ended)
    expected = unshared("llama", "affine8")
    assert set(crowd.ended) == set(expected) - gone
    check_same(crowd, expected, "affine8")


# -- memory


def bytes_held(crowd: Crowd) -> int:
    """Bytes of slots, of shared prefixes (once each, also in prefill), and of cached prefixes."""
    group = crowd.engine._scheduler.group
    held = crowd.engine._slots.layouts.prefixes_with(group.shared_prefix if group else None)
    prefixes = {id(one): one for one in held.values()}
    arrays = {id(array): array for held in prefixes.values() for array in held.arrays}
    shared = sum(array.nbytes for array in arrays.values())
    return crowd.engine.kv_bytes + shared + crowd.engine.prefixes.num_bytes


@pytest.mark.parametrize(("scheme", "path"), [("affine8", "fused"), ("turbo3", "spread-packed")])
def test_more_rows_decode_at_once_when_they_share(scheme: str, path: Path) -> None:
    """Memory for few copies of a prefix: the rows that share it are all in at once, in it."""
    costs = engine_of("llama", scheme, path=path).engine.plan.costs
    prefix = random_prompt(1, 4 * BLOCK)
    most: dict[bool, int] = {}
    for share in (True, False):
        crowd = engine_of(
            "llama",
            scheme,
            slots=16,
            share=share,
            path=path,
            prefix_bytes=5 * BLOCK * costs.per_new_token,
            memory_bytes=(5 * BLOCK + 9000) * costs.per_new_token,
        )
        for index in range(10):
            crowd.add(str(index), prefix + random_prompt(9 + index, 5 + index), count=16)
        most[share] = 0
        while not crowd.engine.is_idle:
            crowd.step()
            layouts = crowd.engine._slots.layouts
            most[share] = max(most[share], layouts.num_active)
            assert bytes_held(crowd) <= crowd.engine.config.memory_bytes
            assert not share or layouts.main.capacity < len(prefix)  # the first row's line too
        assert len(crowd.ended) == 10
    assert most[True] == 10 and most[False] <= 4


def test_a_closed_engine_holds_no_prefix() -> None:
    """An engine that is closed while rows run frees shared prefixes with the buffers."""
    crowd = engine_of("llama", "affine8")
    for index in range(8):
        crowd.add(str(index), [*random_prompt(1, 600), index, 5], count=30)
    while not lengths_of(crowd):
        crowd.step()
    held = [weakref.ref(found) for found in crowd.engine._slots.layouts.prefixes.values()]
    crowd.step(2)
    crowd.engine.close()
    gc.collect()
    assert held[0]() is None


@pytest.mark.parametrize(
    ("family", "blocks"), [("llama", 1), ("gear", 2), *([("qwen3_next", 2)] if RUNS_ALL else [])]
)
def test_small_prefix_memory(family: str, blocks: int) -> None:
    """Blocks are evicted before the rows that wait for them: all rows are right all the same."""
    costs = engine_of(family, "affine8").engine.plan.costs
    room = blocks * BLOCK * costs.per_new_token + 2 * costs.per_row
    crowd = engine_of(family, "affine8", prefix_bytes=room, slots=5)
    seen = herded(crowd)
    assert seen <= {BLOCK * count for count in range(1, blocks + 1)}
    assert len(crowd.ended) == len(prompts())
    check_same(crowd, unshared(family, "affine8"), "affine8")


def test_a_prefix_outlives_its_blocks() -> None:
    """Its blocks are evicted while rows are behind it: they go on, and so do those that come."""
    crowd = engine_of("llama", "float", slots=6)
    rows = {name: prompt for name, prompt in prompts().items() if name.startswith("long")}
    for name, prompt in rows.items():
        crowd.add(name, prompt, count=12)
    while not lengths_of(crowd):
        crowd.step()
    crowd.engine.prefixes.clear()
    for name, prompt in rows.items():
        crowd.add(f"{name} again", prompt, count=12)
    crowd.drain().check_alone()


@pytest.mark.parametrize("most", [0, 1, 3, 25, 64])
def test_parts_of_rows_have_one_size(most: int) -> None:
    """A power of two, if there are several. Each row is taken once, in order."""
    for num_rows in range(1, 70):
        parts = shared_prefix_prefill._slices(num_rows, most)
        sizes = {rows.stop - rows.start for rows, _ in parts}
        taken = [row for rows, known in parts for row in range(rows.start + known, rows.stop)]
        assert taken == [*range(num_rows)]
        assert len(sizes) == 1 and sizes <= {1, 2, 4, 8, 16, 32, 64, num_rows}
        assert max(sizes) <= max(1, most)

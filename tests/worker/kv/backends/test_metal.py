"""Metal's constants, and what they are for: steps that allocate what the step before has freed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.events import Completed
from batchkv_worker.kv.attention import paths
from batchkv_worker.kv.attention.paths import Path
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.metal.backend import MetalBackend
from batchkv_worker.kv.layers.attention_slots import AttentionSlots
from batchkv_worker.kv.layers.contract import Chunk
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.kv.layers.discover import CacheTree
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.schemes.packing import LayerShape, fit_layer
from batchkv_worker.kv.schemes.spec import SchemeSpec
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.step_view import Shapes
from batchkv_worker.sequence import Generation, Sequence
from parity.few import few
from support import tiny_models
from worker.kv.step_trace import allocations, new_bytes_by_step, one_kernel, trace_step

# MLX would compile what a CPU dequantizes by many operations, for seconds.
METAL = MetalBackend(replays_steps=False)


def test_rows_are_padded_where_products_cost_the_same() -> None:
    """None below 10, then 16, 32 and whole tiles of 32; never fewer than are in use."""
    padded = {rows: METAL.padded_rows(rows) for rows in range(1, 130)}
    assert all(padded[rows] == rows for rows in range(1, 10))
    wanted = {10: 16, 16: 16, 17: 32, 32: 32, 33: 64, 64: 64, 65: 96, 97: 128}
    assert {rows: padded[rows] for rows in wanted} == wanted
    assert all(rows <= found < max(10, 2 * rows) for rows, found in padded.items())


def test_prompts_get_an_eighth_of_padding_at_most() -> None:
    """Widths are multiples of 8 to 64, by their length; long ones of 64, as decode's columns."""
    assert [METAL.padded_width(n) for n in (1, 64, 65, 129, 257, 513, 1000)] == [
        *(8, 64, 72, 144, 288, 576, 1024)
    ]
    for tokens in range(64, 3000, 7):
        assert tokens <= METAL.padded_width(tokens) <= tokens * 9 / 8 + 1
        assert METAL.padded_width(tokens) <= -(-tokens // 64) * 64  # what the budget reckons with


def test_whole_buffers_are_read_where_that_moves_fewer_bytes() -> None:
    """At three quarters a whole buffer is cheaper for every packed scheme, at half for none."""

    def bytes_moved(visible: float, packed: float, *, is_whole: bool) -> float:
        dense = 2.0
        if is_whole:
            return packed + dense + visible * dense
        return visible * (3 * packed + 2 * dense)

    for packed in (0.4375, 0.5625, 1.0625):  # turbo3, affine4 and affine8, in groups of 64
        gains = {
            visible: bytes_moved(visible, packed, is_whole=False)
            - bytes_moved(visible, packed, is_whole=True)
            for visible in (0.5, 0.75)
        }
        assert gains[0.5] < 0 < gains[0.75]
    assert METAL.reads_whole(960, 1280) and not METAL.reads_whole(959, 1280)


# -- two steps of one engine


def running(
    backend: Backend,
    scheme: str,
    family: str,
    path: Path,
    lengths: list[int],
    max_tokens: int = 600,
    chunk_tokens: int = 512,
) -> Engine:
    """An engine with rows, some of them behind a common prefix of 256 tokens."""
    model = tiny_models.build(family)
    config = EngineConfig(
        scheme=scheme,
        slots=16,
        chunk_tokens=chunk_tokens,
        memory_bytes=2**30,
        path=path,
        group_cost=600,
        prefix_cells=64,
        backend=backend,
    )
    engine = Engine(tiny_models.loaded(model), config)
    rng = random.Random(3)
    common = [rng.randrange(tiny_models.VOCABULARY) for _ in range(256)]
    for index, length in enumerate(lengths):
        own = [rng.randrange(tiny_models.VOCABULARY) for _ in range(length)]
        prompt = [*common[: 256 if index % 2 else 0], *own]
        engine.submit_row(Sequence(str(index), prompt, Generation(max_tokens, temperature=0.0)))
    return engine


def decoding(backend: Backend, scheme: str, family: str, path: Path, lengths: list[int]) -> Engine:
    """The same, once all rows decode."""
    engine = running(backend, scheme, family, path, lengths)
    while len(engine._rows) < len(lengths):
        engine.step()
    engine.step()
    return engine


def step_shapes(engine: Engine, count: int) -> list[list[Any]]:
    """Every primitive of the next steps with its shapes."""
    slots, model = engine._slots, engine.loaded.model

    def run(rows: int) -> list[mx.array]:
        return [model(mx.zeros((rows, 1), mx.int32), cache=slots.model_cache)]

    return [[node.shapes for node in trace_step(slots, run)] for _ in range(count)]


RAGGED = [90, 91, 95, 100, 140, 150, 160, 230, 240, 250, 251]
MODELS: dict[str, tuple[str, str, Path, list[int]]] = {
    "float": ("float", "llama", "fused", RAGGED),
    "affine8": ("affine8", "llama", "fused", RAGGED),
    "of one length": ("affine8", "llama", "folded", [100] * 11),
    "turbo3": ("turbo3", "llama", "spread-folded", RAGGED),
    "a window": ("affine8", "gemma3_text", "fused", RAGGED),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODELS)
def test_steps_between_two_multiples_have_the_same_shapes(name: str) -> None:
    """A step's whole graph, primitive by primitive; prefixes are shared where the model allows."""
    scheme, family, path, lengths = MODELS[name]
    engine = decoding(METAL, scheme, family, path, lengths)
    layouts = engine._slots.layouts
    assert bool(layouts.prefixes) == engine.plan.shares
    while layouts.main.write % 64 > 60:
        engine.step()
    capacity = layouts.main.capacity
    first, *others = step_shapes(engine, 3)
    assert layouts.main.capacity == capacity
    assert len(first) > 100 and all(shapes == first for shapes in others)


def test_steps_of_other_devices_have_other_shapes() -> None:
    """Where columns are not rounded, the next step's arrays are larger: the test above can fail."""
    engine = decoding(GenericBackend(), *MODELS["affine8"])
    first, second = step_shapes(engine, 2)
    assert first != second


# -- what Metal's pool allocates


def slots_of_4b(backend: Backend, lengths: list[int], longest: int = 0) -> DecodeSlots:
    """One layer of Qwen3-4B's shape under affine8; a row of ``longest`` tokens has just left.

    Nothing is computed, and its buffers are never allocated.
    """
    scheme = fit_layer(SchemeSpec.parse("affine8").base, LayerShape(8, 128, 128))
    kind = AttentionKind(backend, scheme, mx.bfloat16, None, "folded")
    shapes = Shapes(backend.columns_multiple, backend.rows_multiple, backend.padded_rows)
    slots = DecodeSlots(backend, [kind], CacheTree((), (0,)), len(lengths) + 1, shapes)
    for length in lengths:
        slots.place(Demand(length, 200))
    if longest:
        slots.release(slots.place(Demand(longest, 200))[0])
    forget_content(slots)
    return slots


def forget_content(slots: DecodeSlots) -> None:
    """Leave out of the next step's graph how rows came in, and what grew."""
    for layer in slots.layers:
        assert isinstance(layer, AttentionSlots)
        layer._keys, layer._values = (
            [mx.zeros(part.shape, part.dtype) for part in parts]
            for parts in (layer._keys, layer._values)
        )


def attention_of_4b(slots: DecodeSlots) -> Callable[[int], list[mx.array]]:
    """A step's attention: 32 query heads, of 8 KV heads."""
    (layer,) = slots.layers
    assert isinstance(layer, AttentionSlots)

    def run(rows: int) -> list[mx.array]:
        new, queries = (mx.zeros((rows, heads, 1, 128), mx.bfloat16) for heads in (8, 32))
        keys, values = layer.update_and_fetch(new, new)
        return [paths.attention(queries, keys, values, layer, 0.1, layer.make_mask(1))]

    return run


def mean_new_megabytes(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, lengths: list[int], longest: int = 0
) -> float:
    """Newly allocated at each of the steps after the first, in 36 layers."""
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", lambda *_: None)
        patch.setattr(mx, "dequantize", one_kernel)
        slots = slots_of_4b(backend, lengths, longest)
        run = attention_of_4b(slots)
        main = slots.layouts.main
        capacity, steps = main.capacity, []
        for _ in range(min(96, capacity - main.write)):
            steps.append(allocations(trace_step(slots, run)))
        assert main.capacity == capacity and len(steps) > 64
    _, *found = new_bytes_by_step(steps, num_layers=36)
    return sum(found) / len(found) / 1e6


_RNG = random.Random(5)
LOADS: dict[str, tuple[list[int], int]] = {
    "equal": ([1000] * 32, 0),
    "ragged": ([1000, *(_RNG.randrange(500, 1000) for _ in range(31))], 0),
    # The buffers are wider than what is read, so that slices are dequantized.
    "after a long row": ([1000] * 32, 1700),
}


@pytest.mark.parametrize("load", LOADS)
def test_a_step_allocates_little(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At Qwen3-4B's shape, 32 rows of about 1,000 columns: at most 16 MB a step are new."""
    assert mean_new_megabytes(monkeypatch, METAL, *LOADS[load]) <= 16


def test_rows_that_come_and_go_allocate_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other groups, buffers that grow, both ways to read them: still at most 16 MB a step."""
    monkeypatch.setattr(mx, "eval", lambda *_: None)
    monkeypatch.setattr(mx, "dequantize", one_kernel)
    rng = random.Random(3)
    slots = slots_of_4b(METAL, [rng.randrange(600, 1000) for _ in range(31)])
    run, left, steps = attention_of_4b(slots), {slot: slot + 9 for slot in range(31)}, []
    for _ in range(150):
        steps.append(allocations(trace_step(slots, run)))
        left = {slot: count - 1 for slot, count in left.items()}
        for slot in [slot for slot, count in left.items() if not count]:
            del left[slot]
            slots.release(slot)
        while slots.layouts.main.num_free:
            demand = Demand(rng.randrange(200, 1200), rng.randrange(50, 400))
            slot, move = slots.place(demand)
            if move is not None:
                left[move.target] = left.pop(move.source)
            left[slot] = demand.remaining
        slots.make_room(None)
        forget_content(slots)
    found = new_bytes_by_step(steps, num_layers=36)[20:]
    assert sum(found) / len(found) <= 16e6


def test_without_constant_shapes_nothing_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps allocate three layers anew each time: 600 MB. So the test above can fail."""
    assert 550 < mean_new_megabytes(monkeypatch, GenericBackend(), *LOADS["equal"]) < 700


# -- the same answers


def tokens_of(engine: Engine) -> dict[str, list[int]]:
    """What each row generates."""
    found = {}
    while not engine.is_idle:
        for event in engine.step():
            assert isinstance(event, Completed), event
            found[event.job_id] = list(event.token_ids)
    engine.close()
    return found


@dataclass(frozen=True, eq=False)
class Watched(MetalBackend):
    """Counts how often whole buffers were read, and how often not."""

    answers: Counter[bool] = field(default_factory=Counter)

    def reads_whole(self, visible: int, stored: int) -> bool:
        found = super().reads_whole(visible, stored)
        self.answers[found] += 1
        return found


@pytest.mark.parametrize(
    ("family", "scheme", "path"),
    few(
        [
            ("llama", "affine8", "folded"),
            ("llama", "affine8", "fused"),
            ("llama", "turbo3", "spread-folded"),
            ("gemma3_text", "k8v4,last=float", "fused"),
            ("deepseek_v3", "affine8", "fused"),  # whose attention reads dense arrays
        ],
        3,
    ),
)
def test_constants_change_no_token(family: str, scheme: str, path: Path) -> None:
    """Rows behind a prefix, in windows and in several chunks: as without any rounding.

    Whole buffers are read at some steps and chunks, and slices at others.
    """
    lengths = [5, 60, 61, 100, 230, 250, 250, 400, 700, 1090]
    found = []
    for backend in (GenericBackend(), watched := Watched(replays_steps=False)):
        engine = running(backend, scheme, family, path, lengths, max_tokens=6, chunk_tokens=256)
        found.append(tokens_of(engine))
    assert found[0] == found[1] and len(found[0]) == len(lengths)
    assert watched.answers[True] and watched.answers[False]


@pytest.mark.parametrize("is_shared", [False, True])
def test_prefill_reads_whole_buffers_and_slices_them(is_shared: bool) -> None:
    """The third chunk of four reads three quarters; all chunks give what slices give."""
    rng = np.random.RandomState(1)
    shape = LayerShape(2, 64, 128)
    scheme = fit_layer(SchemeSpec.parse("affine8").base, shape)

    def random_array(rows: int, heads: int, size: int) -> mx.array:
        return mx.array(rng.standard_normal((rows, heads, 256, size)).astype(np.float32))

    chunks = [[random_array(2, *each) for each in ((2, 64), (2, 128), (4, 64))] for _ in range(4)]
    prefix = scheme.keys.pack(random_array(1, 2, 64)), scheme.values.pack(random_array(1, 2, 128))
    found = []
    for backend in (GenericBackend(), watched := Watched(replays_steps=False)):
        kind = AttentionKind(backend, scheme, mx.float32, None, "fused")
        prefill = kind.prefill(1024 + 256 * is_shared, 256)
        if is_shared:
            prefill.share([prefix], 256)
        for keys, values, queries in chunks:
            prefill.begin(Chunk(prefill.offset, 256, None))
            seen = prefill.update_and_fetch(keys, values)
            mask = prefill.make_mask(256)
            found.append(paths.attention(queries, *seen, prefill, 0.1, mask))
            prefill.end()
    assert watched.answers == {False: 2, True: 1}
    for plain, whole in zip(found[:4], found[4:], strict=True):
        assert mx.allclose(plain, whole, atol=1e-5).item()

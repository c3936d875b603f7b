"""Known failures of batches, masks and positions (``REGRESSIONS.md``: F, O, M, R and B)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from batchkv_worker.errors import ModelError
from batchkv_worker.kv.attention import paths
from batchkv_worker.kv.attention.paths import LayerAttention
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.layers.attention_slots import AttentionSlots
from batchkv_worker.kv.layers.contract import Chunk
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.kv.layers.discover import CacheTree, discover
from batchkv_worker.kv.schemes.packing import LayerScheme, LayerShape, fit_layer
from batchkv_worker.kv.schemes.spec import SchemeSpec
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.step_view import Shapes
from support import tiny_models
from worker.kv.checked_slots import CheckedSlots
from worker.kv.crowd import Crowd, random_prompt
from worker.kv.reference import (
    BACKEND,
    SIZE,
    attention_kind,
    keys_of,
    prefilled,
    state_kind,
    values_of,
    x86,
)

HYBRID = ("qwen3_next", "falcon_h1", "lfm2", "mamba2")


@pytest.mark.few(2)
@pytest.mark.parametrize("family", [*HYBRID, "gemma3_text"])
def test_rows_without_a_token_in_a_chunk(family: str) -> None:
    """F4, F5, F6: one group of 1 token to more than a block; a chunk ends where states are kept.

    Short rows have no token in the last chunk, others have one.
    """
    crowd = Crowd(family, slots=6, prefix_bytes=2**26)
    for index, length in enumerate((300, 10, 257, 258, 1, 2)):
        crowd.add(str(index), random_prompt(index, length))
    crowd.drain().check_alone()


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_every_row_of_a_ragged_group_is_harvested_clean(family: str) -> None:
    """F3, O7, K7: blocks of any row of a ragged group hold its tokens and no pads."""
    crowd = Crowd(family, slots=4, chunk_tokens=2048, prefix_bytes=2**26)
    for index, length in enumerate((290, 400, 300)):
        crowd.add(f"cold{index}", random_prompt(index, length), count=3)
    crowd.drain()
    for index, length in enumerate((290, 400, 300)):
        crowd.add(f"warm{index}", random_prompt(index, length), count=3)
    crowd.drain().check_alone()
    assert crowd.cached() == [0, 0, 0, 256, 256, 256]


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("heads_each", [1, 2, 8])
@pytest.mark.parametrize("name", ["float", "affine8", "turbo4"])
def test_attention_is_that_of_the_dense_values(name: str, heads_each: int, rows: int) -> None:
    """M1, M6: every path, rows as many as KV heads too; the caller's queries are left alone."""
    kv_heads = 2
    scheme = fit_layer(SchemeSpec.parse(name).base, LayerShape(kv_heads, 64, 64))
    keys, values = (mx.random.normal((rows, kv_heads, 21, 64)) for _ in range(2))
    mask = mx.arange(21) >= mx.array([3 * row for row in range(rows)]).reshape(-1, 1, 1, 1)
    packed = scheme.keys.pack(keys), scheme.values.pack(values)
    dense = [
        mx.repeat(side.unpack(parts, mx.float32), heads_each, axis=1)
        for side, parts in zip((scheme.keys, scheme.values), packed, strict=True)
    ]
    for length, names in ((1, ("fused", "folded", "packed")), (3, ("fused",))):
        queries = mx.random.normal((rows, kv_heads * heads_each, length, 64))
        before = mx.array(queries)
        scores = mx.where(mask, 0.2 * queries @ dense[0].swapaxes(-1, -2), -mx.inf)
        wanted = mx.softmax(scores, axis=-1) @ dense[1]
        for path in names:
            found = _attend(path, scheme, queries, *packed, mask)
            assert mx.allclose(found, wanted, atol=2e-4), path
        assert mx.array_equal(queries, before)


def _attend(path: Any, scheme: LayerScheme, queries: mx.array, *rest: Any) -> mx.array:
    keys, values, mask = rest
    layer = LayerAttention(BACKEND, scheme, mx.float32, path)
    return paths.attend(layer, queries, keys, values, 0.2, mask)


@pytest.mark.few(2)
@pytest.mark.parametrize("scheme", ["affine8,first=float", "affine8,last=float", "float,0=turbo4"])
@pytest.mark.parametrize("family", ["gemma3_text", "cohere2"])
def test_masks_are_of_the_layers_own_kind(family: str, scheme: str) -> None:
    """M2, M5: windows and full layers, packed and float ones, in every order."""
    crowd = Crowd(family, scheme=scheme, group_cost=1)
    lengths = (40, 3, 70, 24)
    for index, length in enumerate(lengths):
        crowd.add(f"crowd{index}", random_prompt(index, length), count=8)
    crowd.drain()
    lonely = Crowd(family, scheme=scheme, slots=1)
    for index, length in enumerate(lengths):
        lonely.run(f"crowd{index}", random_prompt(index, length), count=8)
    assert [crowd.tokens(job) for job in crowd.prompts] == [
        lonely.tokens(job) for job in crowd.prompts
    ]


@pytest.mark.parametrize("chunk", [32, 256])
def test_prompts_longer_than_a_window(chunk: int) -> None:
    """M3, W4: a window of 300 with chunks of less, and prompts around it, as mlx-lm has them."""
    model = tiny_models.build("gemma3_text", sliding_window=300)
    crowd = Crowd(model, chunk_tokens=chunk, prefix_bytes=0)
    for index, length in enumerate((700, 301, 299, 20)):
        crowd.add(str(index), random_prompt(index, length), count=5)
    crowd.drain().check_alone()


@pytest.mark.parametrize("window", [2, 3])
def test_the_smallest_windows(window: int) -> None:
    """W5: windows of two and three tokens, prompts of one."""
    model = tiny_models.build("gemma3_text", sliding_window=window)
    crowd = Crowd(model, prefix_bytes=2**24)
    for index, length in enumerate((1, 2, 3, 40, 300)):
        crowd.add(str(index), random_prompt(index, length), count=5)
    crowd.drain().check_alone()
    again = crowd.run("again", random_prompt(4, 300), count=5)
    assert again.usage.cached == 256 and list(again.token_ids) == crowd.tokens("4")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_is_not_a_number_stays_in_its_row(family: str) -> None:
    """M4, H5: a row that overflowed harms neither its neighbours nor who takes its slot."""
    model = tiny_models.build(family)
    embedding = model.model.embed_tokens
    table = mx.array(embedding.weight)
    table[500] = mx.array(float("nan"))
    embedding.weight = table
    crowd = Crowd(model, slots=2, prefix_bytes=0)
    crowd.add("neighbour", [1, 2, 3], count=40)
    crowd.add("broken", [500] * 60, count=3)
    crowd.step(8)
    crowd.add("next", [4, 5, 6, 7], count=12)
    crowd.drain()
    for job_id in ("neighbour", "next"):
        expected = tiny_models.alone(model, crowd.prompts[job_id], len(crowd.tokens(job_id)))
        assert crowd.tokens(job_id) == expected, job_id


def test_positions_are_bound_anew_at_each_step() -> None:
    """R1, R2: held positions do not change, and grow past a window by one a step."""
    checked = CheckedSlots([attention_kind("float", 24), attention_kind("float")], 2)
    checked.join(20, 5, remaining=60)
    held = []
    for _ in range(40):
        frame = checked.slots.begin_step()
        offsets = checked.slots.layers[0].offset  # type: ignore[attr-defined]
        assert offsets is checked.slots.layers[1].offset is frame.offsets  # type: ignore[attr-defined]
        held.append(offsets)
        for layer in checked.slots.layers:
            token = [[7]] * frame.num_rows
            layer.update_and_fetch(keys_of(token), values_of(token))  # type: ignore[attr-defined]
        checked.slots.end_step()
        mx.eval(checked.slots.arrays)
    first = {int(n) for n in held[0].tolist()}
    assert first == {20, 5}
    assert [held[step].tolist() for step in (0, 39)] == [
        held[0].tolist(),
        [n + 39 for n in held[0].tolist()],
    ]


def test_a_position_of_the_first_row_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """R3, R4: were only the first row's position used, the model would not be served."""

    def first(self: AttentionSlots) -> mx.array:
        return mx.broadcast_to(self._offsets[:1], self._offsets.shape)

    monkeypatch.setattr(AttentionSlots, "offset", property(first))
    with pytest.raises(ModelError, match="not served"):
        Crowd("llama", backend=x86())


def test_the_next_chunk_follows_what_was_restored() -> None:
    """R5, H1: after blocks the position is their end, and a chunk elsewhere is refused."""
    for window in (None, 300):
        kind = attention_kind("affine8", window)
        (pieces,) = prefilled([kind], [random_prompt(1, 512)], ()).block(0, 256, 512)
        layer = kind.prefill(600, 128)
        assert pieces is not None
        layer.restore(pieces, 256, 512)
        assert layer.offset == 512
        with pytest.raises(ValueError, match="cannot follow"):
            layer.begin(Chunk(256, 10))


def test_keys_without_heads_are_refused_by_name() -> None:
    """D1: a model that hands three axes to its cache is refused at the start, never cut wrong."""
    model = tiny_models.build("llama")
    attend = llama.Attention.__call__

    class Flat:
        def __init__(self, cache: Any) -> None:
            self.cache, self.offset = cache, cache.offset

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
            return self.cache.update_and_fetch(keys[:, 0], values[:, 0])

    def flat(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return attend(self, x, mask, Flat(cache))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama.Attention, "__call__", flat)
        with pytest.raises(ModelError, match="cannot be run"):
            discover("flat", model)


def test_slots_keep_their_dtype() -> None:
    """B1: rows that join the empty side or half-precision ones widen no buffer."""
    kinds = [attention_kind("float", None, mx.bfloat16), state_kind()]
    slots = DecodeSlots(BACKEND, kinds, CacheTree((), (0, 1)), 2, Shapes())
    rows = prefilled(kinds, [[1, 2, 3]], ())
    slots.admit(Demand(0, 5), None)
    slots.admit(Demand(3, 5), rows.row(0, 3))
    dtypes = [[array.dtype for array in layer.arrays] for layer in slots.layers]
    assert dtypes == [[mx.bfloat16] * 2, [mx.float32] * 2]


def test_a_slot_that_is_not_there_is_an_error() -> None:
    """B2: slots beyond the last, taken ones and free ones are told apart in Python."""
    checked = CheckedSlots([attention_kind("float")], 1)
    checked.join(2)
    with pytest.raises(ValueError, match="no slot is free"):
        checked.join(2)
    with pytest.raises(KeyError):
        checked.slots.release(1)


def test_a_row_without_penalty_beside_one_with() -> None:
    """B3, B4, B5: parameters, stop strings and what is looked back at are each row's own."""
    crowd = Crowd("llama")
    crowd.add("penalty", random_prompt(1, 9), count=14, repetition_penalty=1.5)
    crowd.add("plain", random_prompt(2, 30), count=9)
    crowd.add("short", random_prompt(3, 4), count=3)
    crowd.drain().check_alone("plain", "short")
    lonely = Crowd("llama", slots=1)
    lonely.add("penalty", random_prompt(1, 9), count=14, repetition_penalty=1.5)
    assert lonely.drain().tokens("penalty") == crowd.tokens("penalty")


def test_admission_holds_a_row_twice_not_the_batch() -> None:
    """B9, G7: moving a row into its slot takes no more than the row beside the buffers."""
    kind = attention_kind("float")
    checked = CheckedSlots([kind], 16)
    checked.join(*[200] * 15, remaining=20)
    rows = prefilled([kind], [random_prompt(1, 200)], ())
    pieces = rows.row(0, 200)
    mx.eval(pieces)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    checked.slots.admit(Demand(200, 20), pieces)
    assert mx.get_peak_memory() - before < 3 * 200 * kind.bytes_per_token


@pytest.mark.parametrize("way", ["fused", "folded", "packed"])
def test_slots_may_keep_codes_spread(way: str) -> None:
    """The form that slots keep 3-bit codes in changes no token, no block and no byte."""
    crowds = []
    for path in (way, f"spread-{way}"):
        crowd = Crowd("llama", scheme="turbo3", path=path, prefix_bytes=2**24, group_cost=1)
        for index, length in enumerate((300, 40, 7, 256, 90)):
            crowd.add(str(index), random_prompt(index, length), count=12)
        crowd.step(3)
        crowds.append((crowd, crowd.engine.kv_bytes))
        crowd.drain().run("warm", random_prompt(0, 300))
    (one, one_bytes), (other, other_bytes) = crowds
    assert one_bytes == other_bytes > 0
    assert [one.tokens(job) for job in one.prompts] == [other.tokens(job) for job in one.prompts]
    assert one.cached("warm") == other.cached("warm") == [256]


@pytest.mark.parametrize("name", ["affine8", "turbo3+nvfp4", "float"])
def test_history_is_unpacked_in_few_sizes_and_once_a_chunk(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded up where a GPU uses buffers again, never beyond the buffer; results stay the same."""
    sizes: list[int] = []
    real = mx.dequantize

    def noted(codes: mx.array, *rest: Any, **options: Any) -> mx.array:
        sizes.append(codes.shape[-2])
        return real(codes, *rest, **options)

    monkeypatch.setattr(mx, "dequantize", noted)
    found = []
    for multiple in (1, 64):
        backend = GenericBackend(history_multiple=multiple)
        kind = replace(attention_kind(name, backend=backend), is_read=False)
        layer, position, sizes[:] = kind.prefill(150, 30), 0, []
        for _ in range(5):
            tokens = [list(range(position + 1, position + 31))]
            layer.begin(Chunk(position, 30))
            seen = layer.update_and_fetch(keys_of(tokens), values_of(tokens))
            queries = mx.random.normal((1, 2, 30, SIZE), key=mx.random.key(position))
            mask = layer.make_mask(30)
            found.append(paths.attention(queries, *seen, layer, 0.1, mask))
            layer.end()
            position += 30
        if name == "float":
            assert sizes == []
        else:
            wanted = [64, 64, 128, 128, 150] if multiple > 1 else [30, 60, 90, 120, 150]
            assert sizes == [size for size in wanted for _ in "kv"]
    assert all(map(mx.array_equal, found[:5], found[5:]))

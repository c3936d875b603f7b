"""What a block holds: the same arrays in every worker, bit for bit, and nothing else accepted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_cache_store.blocks.block import Block, Kind
from batchkv_worker.prefix.block_layout import BlockLayout, joined
from batchkv_worker.prefix.bundle import Bundle
from support import tiny_models
from worker.kv.reference import attention_kind, bits
from worker.prefix.engines_on_store import access, on_disk, random_prompt, run, running


def block_of(block_layout: BlockLayout, kind: Kind, bundle: Bundle) -> Block:
    return Block(
        b"n" * 32,
        b"k" * 32,
        b"p" * 32,
        0,
        kind,
        b"",
        block_layout.tensors(kind, memoryview(joined(bundle))),
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("scheme", ["float", "affine8", "affine3", "k8v4", "mxfp4", "turbo3.5"])
def test_arrays_survive_as_bytes(scheme: str, dtype: mx.Dtype) -> None:
    """Every scheme in every dtype: out to tensors and back, the same shapes, dtypes and bits."""
    kinds = [replace(attention_kind(scheme), dtype=dtype) for _ in range(3)]
    block_layout = BlockLayout(kinds)
    template = block_layout.template(Kind.KV)
    bundle = template.with_arrays(
        [
            mx.random.randint(0, 256, (*array.shape, array.dtype.size), mx.uint8)
            .view(array.dtype)
            .reshape(array.shape)
            for array in template.arrays
        ]
    )
    assert block_layout.is_like(Kind.KV, bundle)
    again = block_layout.bundle(block_of(block_layout, Kind.KV, bundle))
    assert bits(tuple(again.arrays)) == bits(tuple(bundle.arrays))
    for index in range(3):
        assert bits(again.layer(index)) == bits(bundle.layer(index))


# Half precision is slow on a CPU, and MLX has no mixtures of experts in it there.
CASES = [(family, mx.float32) for family in tiny_models.ALL_FAMILIES if family != "llama4"] + [
    (family, mx.bfloat16) for family in ("gemma3_text", "lfm2", "mamba2", "rwkv7")
]


@pytest.mark.few(6)
@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_what_prefill_makes_is_what_the_template_says(
    family: str, dtype: mx.Dtype, tmp_path: Path
) -> None:
    """For every family that is served, no part is held back since its arrays differ."""
    model = tiny_models.build(family)
    model.set_dtype(dtype)
    with running(model, access(on_disk(tmp_path)), "affine8", dtype=dtype) as engine:
        run(engine, [random_prompt(1, 260)], 1)
        counters = engine.client.counters
    assert "unlike" not in counters and counters["published"] >= 1, counters


def test_words_are_the_same_from_prefill_to_another_workers_slot(tmp_path: Path) -> None:
    """Packed words: as prefill made them, as they lie in the store, as in the other's slot."""
    model = tiny_models.build("llama")
    prompt = random_prompt(5, 513)
    seen: list[Any] = []
    for _ in range(2):
        with running(model, access(on_disk(tmp_path)), "affine4") as engine:
            row = submit(engine, prompt)
            while row.slot is None:
                engine.step()
            slots = engine._slots
            place = row.slot
            start, write = slots.layouts.main.start(place), slots.layouts.main.write
            layers = [layer.snapshot(place, start, start + 512) for layer in slots.layers]
            assert write >= start + 512
            seen.append(([bits(pieces) for pieces in layers], row.num_cached))
            while not engine.is_idle:
                engine.step()
    assert [number for _, number in seen] == [0, 512]
    assert seen[0][0] == seen[1][0]


def submit(engine: Any, prompt: list[int]) -> Any:
    from batchkv_worker.sequence import Generation, Sequence

    row = Sequence("0", prompt, Generation(4, temperature=0.0))
    engine.submit_row(row)
    return row


def test_other_arrays_are_refused() -> None:
    """A block with one array more, another dtype or another shape is no block of this model."""
    block_layout = BlockLayout([attention_kind("affine8")])
    template = block_layout.template(Kind.KV)
    good = block_of(
        block_layout, Kind.KV, template.with_arrays(list(map(mx.zeros_like, template.arrays)))
    )
    first = good.tensors[0]
    others = [
        (*good.tensors, first),
        good.tensors[1:],
        (replace(first, dtype="int32"), *good.tensors[1:]),
        (
            replace(first, shape=(first.shape[0] * first.shape[1], *first.shape[2:])),
            *good.tensors[1:],
        ),
    ]
    for tensors in others:
        with pytest.raises(ValueError, match="other arrays"):
            block_layout.bundle(replace(good, tensors=tuple(tensors)))

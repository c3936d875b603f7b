"""A store that fails, lies or was filled by others costs a recompute, never a row or a token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_cache_store.blocks.block import Expected, Kind, decode, encode, join
from batchkv_cache_store.blocks.names import block_name
from batchkv_cache_store.blocks.seal import Buffer, Sealer
from batchkv_cache_store.errors import TierError
from batchkv_cache_store.tiers.base import Put
from batchkv_cache_store.tiers.memory import MemoryTier
from batchkv_worker.prefix.block_layout import packed_tokens
from support import tiny_models
from worker.prefix.engines_on_store import (
    BLOCK,
    access,
    cached,
    eventually,
    on_disk,
    random_prompt,
    run,
    running,
    tokens,
)

PROMPTS = [[*random_prompt(1, 600), *random_prompt(index, 20)] for index in range(4)]
MIB = 2**20


class BadTier(MemoryTier):
    """A memory tier that can be set to fail, or to return other bytes than it was given."""

    def __init__(self) -> None:
        super().__init__(256 * MIB)
        self.fails = False
        self.spoil = bytes

    def contains_many(self, names: Sequence[str]) -> dict[str, int]:
        self._may_fail()
        return super().contains_many(names)

    def get_many(self, names: Sequence[str], sizes: Any = None) -> dict[str, Buffer]:
        self._may_fail()
        return {name: self.spoil(data) for name, data in super().get_many(names, sizes).items()}

    def put(self, name: str, buffers: Sequence[Buffer]) -> Put:
        self._may_fail()
        return super().put(name, buffers)

    def _may_fail(self) -> None:
        if self.fails:
            raise TierError("it is broken")


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(flipped, "checksum"), (lambda data: data[:-9], "truncated"), (lambda data: b"", "truncated"),
     (lambda data: b"PK" + data[2:], "bad_magic"), (lambda data: data + b"x", "trailing")],
)  # fmt: skip
def test_damage_is_a_miss(spoil: object, reason: str) -> None:
    """Every kind of damage: all rows are computed, with the tokens of a cold run."""
    model, tier = tiny_models.build("llama"), BadTier()
    with running(model, access([tier])) as engine:
        cold = tokens(run(engine, PROMPTS))
    tier.spoil = spoil
    with running(model, access([tier])) as engine:
        warm = run(engine, PROMPTS)
        counters = engine.client.counters
    assert tokens(warm) == cold and sorted(cached(warm)) == [0, 592, 592, 592]
    assert counters[f"rejected.{reason}"] >= 1


def test_a_tier_that_fails_is_a_miss() -> None:
    """Nothing is stored, nothing found; rows do not notice, and the breaker opens."""
    model, tier = tiny_models.build("llama"), BadTier()
    with running(model, None) as engine:
        cold = tokens(run(engine, PROMPTS))
    tier.fails = True
    with running(model, access([tier])) as engine:
        assert tokens(run(engine, PROMPTS)) == cold
        assert engine.client.counters["error.memory"] >= 3


def test_a_full_queue_of_writes_drops_them_and_goes_on(tmp_path: Path) -> None:
    """What finds no room to wait for the disk is counted and dropped; its lease is let go."""
    from batchkv_cache_store.lease import LocalLeases
    from batchkv_cache_store.store import Store, StoreSettings
    from batchkv_worker.prefix.shared.access import Access

    leases = LocalLeases()
    store = Store(on_disk(tmp_path), settings=StoreSettings(max_queued_bytes=1))
    with running(tiny_models.build("llama"), Access(store, leases)) as engine:
        run(engine, PROMPTS)
        assert engine.client.counters["dropped"] >= 2
        eventually(lambda: leases.held() == [])


def test_only_blocks_signed_with_our_secret_are_taken() -> None:
    """With a secret, what others wrote is a miss; it is the same tokens all the same."""
    model, tier = tiny_models.build("llama"), MemoryTier(256 * MIB)
    with running(model, access([tier], secret=b"a secret of sixteen bytes")) as engine:
        cold = tokens(run(engine, PROMPTS[:1]))
    for secret, expected in (
        (b"a secret of sixteen bytes", 512),
        (b"another secret of the like", 0),
    ):
        with running(model, access([tier], secret=secret)) as engine:
            warm = run(engine, PROMPTS[:1])
        assert (tokens(warm), cached(warm)) == (cold, [expected])


def tampered(tier: MemoryTier, prompt: list[int], space: bytes, keys: list[bytes]) -> None:
    """Write a well-formed block of other numbers in place of the first one."""
    name = block_name(keys[0], Kind.KV)
    ids = packed_tokens(prompt[:BLOCK], BLOCK)[0]
    block = decode(tier.get_many([name])[name], Sealer(), Expected(space, keys[0], Kind.KV, ids))
    changed = tuple(replace_data(tensor) for tensor in block.tensors)
    tier.delete(name)
    tier.put(name, [join(encode(replace(block, tensors=changed), Sealer()))])


def replace_data(tensor: object) -> object:
    values = mx.array(memoryview(tensor.data).cast("B").cast("f")) * -3.0 + 1.0
    return replace(tensor, data=memoryview(values).tobytes())


def test_an_audit_finds_what_no_checksum_can(caplog: pytest.LogCaptureFixture) -> None:
    """Hits are recomputed: equal ones are counted, a block of other numbers is reported."""
    model, tier = tiny_models.build("llama"), MemoryTier(256 * MIB)
    with running(model, access([tier])) as engine:
        run(engine, PROMPTS[:1])
        space, keys = engine.client.namespace, engine.prefixes.keys(PROMPTS[0], None)
    with running(model, access([tier]), audit=1.0) as engine:
        assert len(run(engine, PROMPTS[:2])) == 2  # twins are nobody's results
        counters = engine.client.counters
        assert (counters["audited"], counters.get("audit_differs", 0)) == (2, 0)
    tampered(tier, PROMPTS[0], space, keys)
    with caplog.at_level(logging.WARNING), running(model, access([tier]), audit=1.0) as engine:
        run(engine, PROMPTS[:1])
        assert engine.client.counters["audit_differs"] == 1
    assert "differs from its computation without" in caplog.text


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_float_blocks_are_converted_only_if_set_so(family: str) -> None:
    """A quantized worker packs float blocks if set so, for its own use only; never the reverse."""
    model, tier = tiny_models.build(family), MemoryTier(256 * MIB)
    prompt = PROMPTS[0]
    with running(model, access([tier]), "float") as engine:
        run(engine, [prompt])
    with running(model, access([tier], adopts_float=True), "affine8") as engine:
        assert cached(run(engine, [prompt])) == [512]
        counters = engine.client.counters
        assert counters["converted"] >= 2
        more = [*prompt[:600], *random_prompt(9, 400)]
        assert cached(run(engine, [more])) == [512]
        # Its own third block rests on converted ones: it is used here and not published.
        assert cached(run(engine, [[*more[:768], 1]])) == [768]
        assert engine.client.flush(30) and engine.client.counters.get("published", 0) == 0
    with running(model, access([tier]), "affine8") as engine:
        assert cached(run(engine, [prompt])) == [0]
    with running(model, access([tier], adopts_float=True), "affine4") as engine:
        assert cached(run(engine, [prompt])) == [512]
    with running(model, access([MemoryTier(MIB)], adopts_float=True), "float") as engine:
        assert cached(run(engine, [prompt])) == [0]

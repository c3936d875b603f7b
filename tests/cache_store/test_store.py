"""The tiered store: the longest usable prefix, and never an error."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchkv_cache_store import lookup
from batchkv_cache_store.blocks.block import Block, Kind, Limits
from batchkv_cache_store.blocks.manifests import decode_manifest
from batchkv_cache_store.blocks.names import block_name, manifest_name
from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.errors import TierError
from batchkv_cache_store.keys import Manifest, namespace
from batchkv_cache_store.load_or_compute import Gate
from batchkv_cache_store.lookup import Found, Wanted
from batchkv_cache_store.store import Store, StoreSettings
from batchkv_cache_store.tiers.base import Put, Tier
from batchkv_cache_store.tiers.disk import DiskTier
from batchkv_cache_store.tiers.memory import MemoryTier
from batchkv_cache_store.tiers.redis import RedisTier
from cache_store.blocks import NAMESPACE, chain_of, encoded, make_block
from support.redis_server import running_server

MIB = 1024 * 1024
PROMPT = list(range(100, 140))  # ten blocks
FLUSH_SECONDS = 30.0


class FaultyTier(MemoryTier):
    """A memory tier that can be set to fail, to wait or to return wrong bytes. It records calls."""

    is_instant = False

    def __init__(self, name: str = "shared", max_bytes: int = 64 * MIB) -> None:
        super().__init__(max_bytes)
        self.name = name
        self.is_broken = False
        self.may_put = threading.Event()
        self.may_put.set()
        self.calls: list[tuple[str, int]] = []

    def contains_many(self, names: Sequence[str]) -> dict[str, int]:
        return self._called(
            "contains", len(names), lambda: super(FaultyTier, self).contains_many(names)
        )

    def get_many(self, names: Sequence[str], sizes: Any = None) -> dict[str, Buffer]:
        return self._called(
            "get", len(names), lambda: super(FaultyTier, self).get_many(names, sizes)
        )

    def put(self, name: str, buffers: Sequence[Buffer]) -> Put:
        assert self.may_put.wait(FLUSH_SECONDS)
        return self._called("put", 1, lambda: super(FaultyTier, self).put(name, buffers))

    def _called(self, what: str, amount: int, call: Callable[[], Any]) -> Any:
        self.calls.append((what, amount))
        if self.is_broken:
            raise TierError("it is broken")
        return call()


def wanted(blocks: Sequence[Block], **needs: Any) -> Wanted:
    """What a prompt of these blocks asks for."""
    keys, tokens = [block.key for block in blocks], [block.tokens for block in blocks]
    return Wanted(NAMESPACE, keys, tokens, **needs)


def publish(store: Store, blocks: Sequence[Block]) -> None:
    """Publish blocks and wait until they are written."""
    assert all([store.publish(block) for block in blocks])
    assert store.flush(FLUSH_SECONDS)


def put(tier: Tier, blocks: Sequence[Block]) -> None:
    """Put blocks into a tier without a store."""
    for block in blocks:
        tier.put(block_name(block.key, block.kind), [encoded(block)])


def counted(store: Store, *names: str) -> list[int]:
    """The values of these counters."""
    return [store.counters().get(name, 0) for name in names]


def test_what_is_published_is_found(tmp_path: Path) -> None:
    """The longest prefix comes back bit for bit, also after a restart and for a longer prompt."""
    blocks = chain_of(PROMPT)
    with closing_store([MemoryTier(MIB), DiskTier(tmp_path, MIB)]) as store:
        assert store.lookup(wanted(blocks)) == Found(stop="missing kv 0")
        publish(store, blocks[:7])
        found = store.lookup(wanted(blocks))
        assert (found.depth, found.kv, found.stop) == (7, tuple(blocks[:7]), "missing kv 7")
        assert counted(store, "published", "hit.memory", "hit.disk") == [7, 7, 0]
    with closing_store([MemoryTier(MIB), DiskTier(tmp_path, MIB)]) as store:
        for _ in range(2):
            assert store.lookup(wanted(blocks)).kv == tuple(blocks[:7])
        assert counted(store, "hit.disk", "hit.memory", "lookups", "lookups_empty") == [7, 7, 2, 0]
        assert counted(store, "wanted_blocks", "found_blocks") == [20, 14]


class closing_store(closing[Store]):
    """A store that is closed at the end, after all writes."""

    def __init__(self, tiers: Sequence[Tier], **settings: Any) -> None:
        super().__init__(Store(tiers, **settings))

    def __exit__(self, *_: object) -> None:
        self.thing.close(FLUSH_SECONDS)


def test_a_manifest_lies_beside_its_blocks(tmp_path: Path) -> None:
    """A manifest goes to every tier under its namespace's digest, and can be read back."""
    manifest: Manifest = {"format": 1, "model": "test", "layers": ["full", "window"]}
    tiers = [MemoryTier(MIB), DiskTier(tmp_path, MIB)]
    with closing_store(tiers) as store:
        digest = store.publish_manifest(manifest)
        assert digest == store.publish_manifest(manifest) == namespace(manifest)
        assert store.flush(FLUSH_SECONDS) and counted(store, "stored.memory", "published") == [1, 0]
        for tier in tiers:
            data = tier.get_many([manifest_name(digest)])[manifest_name(digest)]
            assert decode_manifest(data, digest) == manifest
        with pytest.raises(ValueError, match="manifest of 7"):
            store.publish_manifest({"layers": ["full"] * 10_000})


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[1]", b'{"a": 1}', b'{"a":1.5}', b'{"a":[1]}', b'{"a":{}}', b"[" * 60_000,
     b'{"a":' + b"9" * 5000 + b"}", b'{"a":"' + b"x" * 70_000 + b'"}', b"\xff\xfe"],
)  # fmt: skip
def test_what_is_no_manifest_is_none(text: bytes) -> None:
    """Damaged, non-canonical, too large or too deep manifests are None, never an error."""
    digest = hashlib.sha256(text).digest()
    assert decode_manifest(text, digest) == ({} if text == b"{}" else None)
    assert decode_manifest(text, b"0" * 32) is None


def test_a_gap_ends_the_chain() -> None:
    """A chain with a missing block in the middle is usable up to the gap."""
    blocks = chain_of(PROMPT)
    with closing_store([MemoryTier(MIB)]) as store:
        publish(store, blocks[:3] + blocks[4:])
        assert store.lookup(wanted(blocks)).depth == 3


def test_tiers_complete_each_other_and_hits_move_up() -> None:
    """A chain may be spread over several tiers; hits of slow tiers are copied to faster ones."""
    blocks = chain_of(PROMPT)
    memory, disk, shared = MemoryTier(MIB), FaultyTier("disk"), FaultyTier()
    put(memory, blocks[:2])
    put(disk, blocks[2:5])
    put(shared, blocks[4:])
    with closing_store([memory, disk, shared]) as store:
        found = store.lookup(wanted(blocks))
        assert found.kv == tuple(blocks)
        tiers = [found.tiers[piece] for piece in sorted(found.pieces)]
        assert tiers == ["memory"] * 2 + ["disk"] * 3 + ["shared"] * 5
        assert counted(store, "hit.memory", "hit.disk", "hit.shared") == [2, 3, 5]
        assert memory.stats().num_blocks == 10 and store.flush(FLUSH_SECONDS)
        assert disk.stats().num_blocks == 8 and counted(store, "promoted") == [5]


def test_64_keys_are_one_round_trip() -> None:
    """A tier gets one call for 64 keys, and one for their bytes; 65 keys take two of each."""
    for num_blocks, trips in ((64, [64]), (65, [64, 1])):
        shared = FaultyTier()
        blocks = chain_of(range(4 * num_blocks))
        put(shared, blocks)
        with closing_store([shared]) as store:
            store.lookup(wanted(blocks[:1]))  # a tier that was never timed is tried with one block
            shared.calls.clear()
            assert store.lookup(wanted(blocks)).depth == num_blocks
        expected = [("contains", n) for n in trips] + [("get", n) for n in trips]
        assert shared.calls == expected


def test_nothing_is_asked_behind_a_gap() -> None:
    """If one of a prompt's first 64 blocks is missing, no later keys are looked up."""
    shared = FaultyTier()
    with closing_store([shared]) as store:
        assert store.lookup(wanted(chain_of(range(4 * 300)))).depth == 0
    assert shared.calls == [("contains", 64)]


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "empty", "huge"])
def test_a_damaged_block_is_a_miss_and_set_aside(tmp_path: Path, damage: str) -> None:
    """A damaged block ends the chain, is counted by reason, and can be stored again."""
    blocks = chain_of(PROMPT)
    disk = DiskTier(tmp_path, MIB)
    put(disk, blocks)
    file = next(tmp_path.rglob(block_name(blocks[4].key, Kind.KV)))
    data = bytearray(file.read_bytes())
    match damage:
        case "flip":
            data[-20] ^= 1
        case "cut":
            del data[-5:]
        case "swap":
            data[:] = encoded(blocks[5])
        case "empty":
            data.clear()
        case _:
            data.extend(bytes(20_000))
    file.write_bytes(data)
    settings = StoreSettings(limits=Limits(max_block_bytes=10_000))
    reasons = {"flip": "checksum", "swap": "key", "huge": "limits"}
    with closing_store([disk], settings=settings) as store:
        assert store.lookup(wanted(blocks)).depth == 4
        assert counted(store, f"rejected.{reasons.get(damage, 'truncated')}") == [1]
        assert not file.exists() and (tmp_path / "aside" / file.name).exists()
        publish(store, [blocks[4]])
        assert store.lookup(wanted(blocks)).depth == 10


def test_a_damaged_block_is_taken_from_the_next_tier() -> None:
    """A block that a fast tier lost or damaged is loaded from a slower one in the same lookup."""
    blocks = chain_of(PROMPT)
    disk, shared = FaultyTier("disk"), FaultyTier()
    put(disk, blocks[:3])
    disk.put(block_name(blocks[3].key, Kind.KV), [b"damaged"])
    put(disk, blocks[4:])
    put(shared, blocks)
    with closing_store([disk, shared]) as store:
        assert store.lookup(wanted(blocks)).kv == tuple(blocks)
        assert counted(store, "hit.disk", "hit.shared", "rejected.truncated") == [9, 1, 1]


def test_blocks_that_vanish_between_asking_and_fetching_are_misses() -> None:
    """A tier that reports a block and then lacks it ends the chain; the lookup does not fail."""
    blocks = chain_of(PROMPT)

    class Forgetful(FaultyTier):
        def get_many(self, names: Sequence[str], sizes: Any = None) -> dict[str, Buffer]:
            found = super().get_many(names, sizes)
            return {name: data for name, data in found.items() if name != gone}

    gone = block_name(blocks[6].key, Kind.KV)
    tier = Forgetful()
    put(tier, blocks)
    with closing_store([tier]) as store:
        assert store.lookup(wanted(blocks)).kv == tuple(blocks[:6])


def test_signed_blocks_need_their_secret() -> None:
    """With a secret, unsigned blocks are misses; without one, signed blocks are, and they stay."""
    blocks = chain_of(PROMPT)
    tier = FaultyTier()
    with closing_store([tier], secret=b"secret of the first") as store:
        publish(store, blocks)
        assert store.lookup(wanted(blocks)).depth == 10
    with closing_store([tier]) as store:
        assert store.lookup(wanted(blocks)).depth == 0
        # Without its head the rest of a chain is of no use, and is not read.
        assert counted(store, "rejected.no_secret") == [1] and tier.stats().num_blocks == 10
    with closing_store([tier], secret=b"secret of the second") as store:
        assert store.lookup(wanted(blocks)).depth == 0
        assert counted(store, "rejected.mac") == [1] and tier.stats().num_blocks == 9


def test_states_and_windows_decide_where_a_prompt_is_taken_up() -> None:
    """A depth is used only if all its kinds are stored; windows are needed only at its end."""
    kv = chain_of(PROMPT)
    windows = [dataclasses.replace(block, kind=Kind.WINDOW) for block in kv]
    states = [dataclasses.replace(block, kind=Kind.STATE) for block in kv]
    with closing_store([MemoryTier(MIB)]) as store:
        publish(store, [*kv[:9], *windows[3:9], states[4], states[7], states[9]])
        found = store.lookup(wanted(kv, num_window_blocks=2, has_state=True))
        assert (found.depth, found.kv, found.stop) == (8, tuple(kv[:8]), "missing state 8")
        assert (found.window, found.state) == (tuple(windows[6:8]), states[7])
        assert store.lookup(wanted(kv, num_window_blocks=6)).depth == 9
        assert store.lookup(wanted(kv, num_window_blocks=7)).depth == 0
        found = store.lookup(wanted(kv, has_kv=False, has_state=True))
        assert (found.depth, dict(found.pieces)) == (10, {(9, Kind.STATE): states[9]})


def test_a_tier_is_timed_before_much_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """First one block is loaded. If the tier is too slow, no other is, but this one is used."""
    blocks = chain_of(PROMPT)
    shared = FaultyTier()
    put(shared, blocks)
    gate = Gate()
    gate.observe_prefill(1_000_000, 1.0)  # four tokens take 4 microseconds: nothing is quicker
    # The calls that ask for names take no time here, unless the machine pauses.
    monkeypatch.setattr(gate, "observe_round_trip", lambda tier, seconds: None)
    with closing_store([shared], gate=gate) as store:
        found = store.lookup(wanted(blocks))
        assert (found.depth, found.stop) == (1, "gated")
        assert [call for call in shared.calls if call[0] == "get"] == [("get", 1)]


def test_batches_grow_so_that_a_tier_that_became_slow_costs_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One block of ten is the first batch, then two, then four. If the first is slow, it is all."""
    blocks = chain_of(PROMPT)
    monkeypatch.setattr(lookup, "FIRST_BYTES", len(encoded(blocks[0])))
    for seconds, loads in [(0.0, [1, 2, 4, 3]), (1e9, [1])]:
        shared = FaultyTier()
        put(shared, blocks)
        gate = Gate()
        gate.observe_prefill(1, 1.0)
        gate.observe_load("shared", 10**9, 1e-9)
        observe = gate.observe_load
        monkeypatch.setattr(
            gate, "observe_load", lambda tier, size, _, to=observe, s=seconds: to(tier, size, s)
        )
        with closing_store([shared], gate=gate) as store:
            found = store.lookup(wanted(blocks))
            assert found.depth == sum(loads)
            assert [count for call, count in shared.calls if call == "get"] == loads


def test_a_search_ends_when_nobody_wants_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block is refused: no other is loaded, and the tier's speed is known."""
    blocks = chain_of(PROMPT)
    near, shared = FaultyTier("near"), FaultyTier()
    put(near, blocks)
    put(shared, blocks)
    near.calls.clear()
    shared.calls.clear()
    with closing_store([near, shared]) as store:
        found = store.lookup(wanted(blocks), hand_over=lambda *_: False)
        assert (found.depth, found.stop, len(found.handed)) == (0, "unwanted", 1)
        assert near.calls == [("contains", len(blocks)), ("get", 1)] and not shared.calls
        assert store.gate.is_measured("near")


def test_what_the_caller_has_is_not_fetched() -> None:
    """Pieces that the caller already has count as found and are not loaded again."""
    kv = chain_of(PROMPT)
    windows = [dataclasses.replace(block, kind=Kind.WINDOW) for block in kv]
    had = {(0, Kind.KV), (1, Kind.KV), (2, Kind.KV), (4, Kind.WINDOW)}
    with closing_store([MemoryTier(MIB)]) as store:
        publish(store, [*kv[1:6], windows[5]])  # the first is in no tier any more
        assert store.lookup(wanted(kv, num_window_blocks=2)).depth == 0
        found = store.lookup(wanted(kv, num_window_blocks=2, had=had))
        assert (found.depth, found.kv, found.window) == (6, tuple(kv[3:6]), (windows[5],))
        assert counted(store, "hit.memory") == [4]


def test_the_end_of_a_write_is_told() -> None:
    """``on_end`` is called when the block can be found, and also if every tier refused it."""
    block = make_block()
    shared = FaultyTier()
    with closing_store([shared]) as store:
        seen: list[bool] = []
        store.publish(block, lambda: seen.append(store.lookup(wanted([block])).depth == 1))
        assert store.flush(FLUSH_SECONDS) and seen == [True]
        shared.is_broken = True
        store.publish(make_block((9, 9, 9, 9)), lambda: seen.append(False))
        assert store.flush(FLUSH_SECONDS) and seen == [True, False]


def test_a_lookup_says_why_it_went_no_deeper() -> None:
    """``stop`` is the first gap, the gate, damage, or a failing tier."""
    blocks = chain_of(PROMPT)
    memory, shared = MemoryTier(MIB), FaultyTier()
    put(memory, blocks[:2])
    with closing_store([memory, shared]) as store:
        assert store.lookup(wanted(blocks[:2])).stop == ""
        assert store.lookup(wanted(blocks)).stop == "missing kv 2"
        shared.is_broken = True
        for _ in range(3):
            store.lookup(wanted(blocks))
        assert store.lookup(wanted(blocks)).stop == "trouble shared"
    damaged = MemoryTier(MIB)
    put(damaged, blocks[:1])
    damaged.put(block_name(blocks[1].key, Kind.KV), [encoded(blocks[1])[:-1]])
    with closing_store([damaged]) as store:
        assert store.lookup(wanted(blocks)).stop == "rejected truncated"


def test_a_broken_tier_is_left_alone_and_asked_again() -> None:
    """Failures are misses. After three the tier gets no calls, and after the cooldown one call."""
    blocks = chain_of(PROMPT)
    memory, shared = MemoryTier(MIB), FaultyTier()
    put(memory, blocks[:2])
    put(shared, blocks)
    now = [0.0]
    with closing_store([memory, shared], clock=lambda: now[0]) as store:
        shared.is_broken = True
        for _ in range(6):
            assert store.lookup(wanted(blocks)).depth == 2
        assert counted(store, "error.shared", "skipped.shared") == [3, 3]
        assert store.open_breakers() == ["shared"]
        assert store.publish(make_block((9, 9, 9, 9))) and store.flush(FLUSH_SECONDS)
        now[0] = 6.0
        assert store.lookup(wanted(blocks)).depth == 2
        assert counted(store, "error.shared") == [4]
        shared.is_broken = False
        now[0] = 30.0
        assert store.lookup(wanted(blocks)).depth == 10 and store.open_breakers() == []
        assert store.tier_stats()["shared"] is not None


def test_a_full_queue_drops_the_write_and_never_waits() -> None:
    """While a tier hangs, blocks that do not fit into the queue are dropped and counted."""
    blocks = chain_of(PROMPT, num_bytes=4000)
    shared = FaultyTier()
    shared.may_put.clear()
    settings = StoreSettings(max_queued_bytes=3 * len(encoded(blocks[0])))
    with closing_store([shared], settings=settings) as store:
        assert [store.publish(block) for block in blocks] == [True] * 3 + [False] * 7
        assert store.num_queued_bytes <= settings.max_queued_bytes
        assert not store.flush(0.01)
        shared.may_put.set()
        assert store.flush(FLUSH_SECONDS) and store.num_queued_bytes == 0
        assert counted(store, "published", "dropped", "stored.shared") == [3, 7, 3]
        assert store.lookup(wanted(blocks)).depth == 3


def test_closing_writes_what_waits_for_so_long() -> None:
    """``close`` flushes. If a tier hangs, it ends in time and counts the lost writes."""
    blocks = chain_of(PROMPT)
    shared = FaultyTier()
    store = Store([shared])
    assert all([store.publish(block) for block in blocks])
    assert store.close(FLUSH_SECONDS) and shared.stats().num_blocks == 10
    assert not store.publish(blocks[0])
    stuck = FaultyTier()
    stuck.may_put.clear()
    store = Store([stuck])
    assert all([store.publish(block) for block in blocks])
    assert not store.close(0.05)
    assert counted(store, "given_up") == [10]
    stuck.may_put.set()


def test_one_block_published_twice_is_written_once() -> None:
    """A block that already waits is not queued again, and a stored one does not change."""
    shared = FaultyTier()
    block = make_block()
    with closing_store([shared]) as store:
        shared.may_put.clear()
        assert store.publish(block) and store.publish(block)
        assert store.num_queued_bytes == len(encoded(block))
        shared.may_put.set()
        assert store.flush(FLUSH_SECONDS)
        publish(store, [block])
        assert counted(store, "stored.shared", "present.shared") == [1, 1]


def test_a_bug_in_one_write_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """The writer's thread survives any exception of a write, and logs its trace."""
    shared = FaultyTier()
    with closing_store([shared]) as store:
        broken = dataclasses.replace(make_block(), writer="w")
        store.publish(broken)
        assert store.flush(FLUSH_SECONDS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("batchkv_cache_store.store.encode", lambda *_: 1 / 0)
            store.publish(make_block((5, 5, 5, 5)))
            assert store.flush(FLUSH_SECONDS)
        publish(store, [make_block((6, 6, 6, 6))])
    assert "ZeroDivisionError" in caplog.text and shared.stats().num_blocks == 2


def test_what_is_slower_than_computing_is_not_loaded() -> None:
    """The gate refuses a slow tier's blocks; the head in the fast tier is loaded."""
    blocks = chain_of(PROMPT, num_bytes=4000)
    memory, shared = MemoryTier(MIB), FaultyTier()
    put(memory, blocks[:2])
    put(shared, blocks)
    gate = Gate(weight=1e-9)
    gate.observe_load("memory", 10**9, 0.001)
    gate.observe_round_trip("memory", 0.0)
    gate.observe_load("shared", 1000, 10.0)
    gate.observe_prefill(1000, 1.0)
    with closing_store([memory, shared], gate=gate) as store:
        assert store.lookup(wanted(blocks)).depth == 2
        assert counted(store, "gated", "hit.shared") == [1, 0]


def test_wrong_arguments_are_errors_of_the_caller() -> None:
    """Only bugs raise: blocks beyond the format, keys without tokens, tiers of one name."""
    with closing_store([MemoryTier(MIB)]) as store:
        with pytest.raises(ValueError, match="key is not 32"):
            store.publish(dataclasses.replace(make_block(), key=b"short"))
        with pytest.raises(ValueError, match="tokens of 0"):
            Wanted(NAMESPACE, [b"k" * 32], [])
        with pytest.raises(ValueError, match="no kind"):
            Wanted(NAMESPACE, [], [], has_kv=False)
        assert store.lookup(Wanted(NAMESPACE, [], [])) == Found()
    with pytest.raises(ValueError, match="one name"):
        Store([MemoryTier(1), MemoryTier(1)])


def test_two_machines_share_blocks_through_redis(tmp_path: Path) -> None:
    """One worker finds the blocks of another. A restart of Redis costs misses only."""
    blocks = chain_of(PROMPT, num_bytes=40_000)
    settings = StoreSettings(cooldown_seconds=0.0, max_failures=1)

    def machine(name: str) -> Store:
        tiers = [MemoryTier(MIB), DiskTier(tmp_path / name, MIB), RedisTier(server.url)]
        return Store(tiers, settings=settings)

    with running_server("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server:
        first, second = machine("a"), machine("b")
        publish(first, blocks)
        assert second.lookup(wanted(blocks)).kv == tuple(blocks)
        assert counted(second, "hit.redis") == [10]
        other = chain_of(range(500, 540))
        server.stop()
        assert second.lookup(wanted(other)).depth == 0
        assert second.lookup(wanted(blocks)).depth == 10
        assert counted(second, "error.redis")[0] > 0
        server.start()
        publish(first, other)
        assert second.lookup(wanted(other)).depth == 10
        assert first.close(FLUSH_SECONDS) and second.close(FLUSH_SECONDS)


def test_nothing_is_copied_out_for_tiers_that_rest(tmp_path: Path) -> None:
    """``has_room`` is False if no tier works; one working tier of two is enough."""
    store = Store([MemoryTier(2**20), DiskTier(tmp_path, 2**20)])
    for tier in store._tiers:
        assert store.has_room(100)
        for _ in range(10):
            tier.breaker.failed()
    assert len(store.open_breakers()) == 2 and not store.has_room(100)
    store._tiers[1].breaker.succeeded()
    assert store.has_room(100)
    store.close(FLUSH_SECONDS)


def test_only_blocks_tell_how_quick_a_tier_is() -> None:
    """A manifest is a few hundred bytes: its time is that of the round trips."""
    shared = FaultyTier()
    with closing_store([shared]) as store:
        store.publish_manifest({"a": "b"})
        assert store.flush(FLUSH_SECONDS)
        store.gate.observe_prefill(1000, 1.0)
        assert store.gate.pays("shared", 256, 1000) is None
        publish(store, [make_block()])
        assert store.gate.pays("shared", 256, 1000) is not None


def test_far_tiers_can_be_left_out() -> None:
    """``is_near`` leaves out the tiers from the first far one on."""
    near, far = FaultyTier("near"), FaultyTier("far")
    far.is_far = True
    blocks = chain_of(PROMPT)
    put(far, blocks)
    with closing_store([near, far]) as store:
        assert store.has_near and store.has_far
        assert store.lookup(wanted(blocks), is_near=True).depth == 0
        assert store.lookup(wanted(blocks)).depth == len(blocks)


def test_blocks_are_handed_over_as_they_arrive() -> None:
    """Head first, one by one, before the search has ended; the result lacks them."""
    shared = FaultyTier()
    blocks = chain_of(PROMPT)
    put(shared, blocks)
    with closing_store([shared]) as store:
        given: list[tuple[int, bytes, str]] = []
        found = store.lookup(
            wanted(blocks),
            hand_over=lambda piece, block, tier: given.append((piece[0], block.key, tier)),
        )
        assert given == [(n, block.key, "shared") for n, block in enumerate(blocks)]
        assert found.depth == len(blocks) and not found.pieces
        assert found.handed == {(n, Kind.KV) for n in range(len(blocks))}
        assert store.counters()["hit.shared"] == len(blocks)


def test_writes_rest_until_the_bandwidth_allows_the_next() -> None:
    """One byte a second: the second block waits, and a store that closes does not rest."""
    shared = FaultyTier()
    settings = StoreSettings(max_write_bytes_per_second=1.0)
    store = Store([shared], settings=settings)
    blocks = chain_of(PROMPT)[:2]
    assert all([store.publish(block) for block in blocks])
    assert not store.flush(0.2) and shared.stats().num_blocks == 1
    assert store.close(FLUSH_SECONDS) and shared.stats().num_blocks == 2

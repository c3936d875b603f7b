"""The contract of all tiers, and the further promises of each."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from redis import Redis

from batchkv_cache_store.errors import TierError, TierMisconfigured
from batchkv_cache_store.tiers.base import MAX_OBJECT_BYTES, Put, Swept, Tier
from batchkv_cache_store.tiers.disk import DiskTier, Durability
from batchkv_cache_store.tiers.disk_folder import MAX_ASIDE
from batchkv_cache_store.tiers.memory import MemoryTier
from batchkv_cache_store.tiers.redis import PREFIX, RedisTier
from cache_store.places import MIB, name, objects_tier
from support.redis_server import RedisServer, running_server

BLOCK = 64 * 1024  # a whole number of the file system's units


def test_what_is_put_is_got(tier: Tier) -> None:
    """Buffers of all types come back as one, with their size; missing names are left out."""
    parts = [b"head", memoryview(bytearray(b"x" * 100_000)), bytearray(b"tail")]
    assert tier.put(name(1), parts) is Put.STORED
    assert tier.put(name(2, "state"), [b"s"]) is Put.STORED
    wanted = [name(0), name(1), name(2, "state"), name(2)]
    assert tier.contains_many(wanted) == {name(1): 100_008, name(2, "state"): 1}
    found = {key: bytes(value) for key, value in tier.get_many(wanted).items()}
    assert found == {name(1): b"".join(parts), name(2, "state"): b"s"}
    assert tier.contains_many([]) == {} == tier.get_many([])


def test_objects_are_streamed_in_order(tier: Tier) -> None:
    """Each whole, in the order of the names, without missing ones; never more than was asked for.

    A reader may stop early, and the tier goes on to serve.
    """
    values = {name(n): bytes([n]) * (100_000 * n) for n in (3, 1, 2)}
    for key, value in values.items():
        tier.put(key, [value])
    sizes = {key: len(value) for key, value in values.items()} | {name(4): 7}
    found = [(key, bytes(value)) for key, value in tier.stream(list(sizes), sizes)]
    assert found == list(values.items())
    ((_, cut),) = tier.stream([name(3)], {name(3): 10})
    assert len(cut) == 11
    reader = tier.stream(list(sizes), sizes)
    next(reader)
    reader.close()
    assert tier.contains_many([name(1)]) == {name(1): 100_000}
    assert list(tier.stream([])) == []


def test_the_first_put_stays(tier: Tier) -> None:
    """A second put of a name returns PRESENT and changes nothing."""
    assert tier.put(name(1), [b"first"]) is Put.STORED
    assert tier.put(name(1), [b"second"]) is Put.PRESENT
    assert bytes(tier.get_many([name(1)])[name(1)]) == b"first"


def test_buffers_are_not_kept(tier: Tier) -> None:
    """A buffer that changes after its put does not change what is stored, nor what was read."""
    buffer = bytearray(b"before")
    tier.put(name(1), [buffer])
    read = tier.get_many([name(1)])[name(1)]
    buffer[:] = b"after!"
    tier.delete(name(1))
    assert bytes(read) == b"before"


@pytest.mark.parametrize("remove", ["delete", "set_aside", "delete_many"])
def test_what_is_removed_is_gone(tier: Tier, remove: str) -> None:
    """After ``delete`` or ``set_aside`` a name can be put again; a missing name is no error."""
    tier.put(name(1), [b"first"])
    for _ in range(2):
        getattr(tier, remove)([name(1), name(2)] if remove == "delete_many" else name(1))
    assert tier.get_many([name(1)]) == {} == tier.contains_many([name(1)])
    assert tier.put(name(1), [b"second"]) is Put.STORED
    assert bytes(tier.get_many([name(1)])[name(1)]) == b"second"


def test_names_are_listed(tier: Tier) -> None:
    """Blocks and manifests are listed with their sizes, and no foreign objects."""
    sizes = {name(number): 10 + number for number in range(20)}
    sizes |= {name(3, "manifest"): 5, name(4, "window"): 6, name(4, "state"): 7}
    assert list(tier.iter_names()) == []
    for each, size in sizes.items():
        tier.put(each, [bytes(size)])
    tier.delete(name(7))
    entries = list(tier.iter_names())
    assert {entry.name: entry.num_bytes for entry in entries} == {
        each: size for each, size in sizes.items() if each != name(7)
    }
    assert len(entries) == len(sizes) - 1
    if tier.name in ("disk", "redis"):
        assert all(abs(time.time() - (entry.last_used or 0)) < 60 for entry in entries)
    else:
        assert {entry.last_used for entry in entries} == {None}
    # Redis is asked for the number of all its keys.
    assert tier.stats().num_blocks == len(sizes) - (1 if tier.name == "redis" else 2)


def test_a_listing_is_lazy_and_survives_changes(tier: Tier) -> None:
    """An unread listing makes no calls; a listing goes on while blocks are deleted."""
    num_blocks = 20 if tier.name == "objects" else 600
    for number in range(num_blocks):
        tier.put(name(number), [b"x"])
    listing = tier.iter_names()
    first = next(listing)
    tier.delete_many([name(number) for number in range(0, num_blocks, 2)])
    left = {first.name} | {entry.name for entry in listing}
    assert left >= {name(number) for number in range(1, num_blocks, 2)}


def test_heads_are_read_alone(tier: Tier) -> None:
    """The first bytes of blocks, all bytes of a shorter one, and no missing names."""
    tier.put(name(1), [b"head", bytes(100_000)])
    tier.put(name(2, "manifest"), [b"{}"])
    found = tier.get_heads([name(0), name(1), name(2, "manifest")], 4)
    assert {key: bytes(head) for key, head in found.items()} == {
        name(1): b"head",
        name(2, "manifest"): b"{}",
    }
    whole = tier.get_heads([name(1)], MAX_OBJECT_BYTES)
    assert len(whole[name(1)]) == 100_004 and tier.get_heads([], 4) == {}


def test_looking_is_no_use(cache_server: RedisServer, tmp_path: Path) -> None:
    """Neither a listing nor a head makes a block look used lately."""
    disk, memory = DiskTier(tmp_path, MIB), MemoryTier(8)
    disk.put(name(1), [b"x"])
    (path,) = tmp_path.rglob(name(1))
    os.utime(path, (1000, 1000))
    memory.put(name(1), [b"1234"])
    memory.put(name(2), [b"1234"])
    for tier in (disk, memory):
        assert list(tier.iter_names()) and tier.get_heads([name(1)], 2)
    (entry,) = disk.iter_names()
    assert entry.last_used == 1000
    memory.put(name(3), [b"1234"])
    assert not memory.contains_many([name(1)])
    with closing(RedisTier(cache_server.url)) as redis, cache_server.connect() as connection:
        redis.put(name(1), [b"x" * 10])
        dump = connection.dump(PREFIX + name(1))
        connection.restore(PREFIX + name(1), 0, dump, replace=True, idletime=1000)
        (entry,) = redis.iter_names()
        assert redis.get_heads([name(1)], 2) and 0 < (entry.last_used or 0) < time.time() - 900
        assert connection.object("idletime", PREFIX + name(1)) >= 1000
        assert redis.get_many([name(1)])
        assert connection.object("idletime", PREFIX + name(1)) < 900


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "x",
        "../" + "0" * 61 + ".kv",
        "0" * 64,
        "A" * 64 + ".kv",
        "0" * 64 + ".kv\n",
        "0" * 64 + ".manifests",
    ],
)
def test_names_are_checked(tier: Tier, bad: str) -> None:
    """A text that is no name is refused by every tier: no path, no key of other programs."""
    for call in (tier.delete, tier.set_aside, lambda n: tier.put(n, [b"x"])):
        with pytest.raises(ValueError, match="not the name"):
            call(bad)
    head = lambda names: tier.get_heads(names, 9)  # noqa: E731
    for many in (tier.contains_many, tier.get_many, tier.delete_many, head):
        with pytest.raises(ValueError, match="not the name"):
            many([name(1), bad])


def test_what_has_grown_is_not_read(tier: Tier) -> None:
    """If an object has grown, one byte more than the given size is read."""
    tier.put(name(1), [b"x" * 1000])
    sizes = tier.contains_many([name(1)])
    tier.delete(name(1))
    tier.put(name(1), [b"y" * MIB])
    assert bytes(tier.get_many([name(1)], sizes)[name(1)]) == b"y" * 1001


def test_racing_puts_leave_one_whole_block(tier: Tier) -> None:
    """Threads that put one name at once all succeed, one is stored, and readers see it whole."""
    barrier = threading.Barrier(4)
    outcomes: list[Put] = []

    def put(letter: bytes) -> None:
        barrier.wait()
        outcomes.append(tier.put(name(1), [letter * 5000, letter * 5000]))

    threads = [threading.Thread(target=put, args=(letter,)) for letter in (b"a", b"b", b"c", b"d")]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for value in tier.get_many([name(1)]).values():
            assert len(value) == 10_000 and len(set(bytes(value))) == 1
    assert sorted(outcomes) == ["present"] * 3 + ["stored"]


def test_the_cap_is_never_passed(tier: Tier) -> None:
    """The tier never holds more than its cap and refuses a block larger than that."""
    tier.check()
    assert tier.max_bytes is not None
    block = bytes(MIB)
    outcomes = [tier.put(name(number), [block]) for number in range(24)]
    stats = tier.stats()
    assert stats.num_bytes is not None and stats.num_bytes <= tier.max_bytes
    assert stats.num_blocks is not None and stats.num_blocks >= 10
    if tier.name in ("memory", "disk"):  # objects never go, and the test's Redis has 64 MiB
        assert outcomes == [Put.STORED] * 24 and stats.num_evicted == 24 - stats.num_blocks
        assert tier.contains_many([name(23)])
    assert tier.put(name(99), [bytes(tier.max_bytes + MIB)]) is Put.FULL


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_least_recently_used_goes_first(kind: str, tmp_path: Path) -> None:
    """Recently read blocks stay; of blocks read together the first stays longest."""
    tier = MemoryTier(8 * BLOCK) if kind == "memory" else small_disk(tmp_path)
    for number in range(6):
        tier.put(name(number), [bytes(BLOCK)])
    tier.get_many([name(0), name(1), name(2)])
    for number in range(6, 12):
        tier.put(name(number), [bytes(BLOCK)])
        tier.get_many([name(0)])
    left = tier.contains_many([name(number) for number in range(12)])
    assert name(0) in left and name(11) in left
    assert not {name(3), name(4), name(5)} & set(left)


def small_disk(root: Path, num_blocks: int = 8) -> DiskTier:
    """A disk tier with room for so many test blocks and its own folders."""
    return DiskTier(root, int(num_blocks * BLOCK / 0.95) + 4096)


# Disk


def physical(root: Path) -> int:
    """Bytes of disk of all files below a folder, without the ledger."""
    files = (path for path in root.rglob("*") if path.is_file() and path.name != "usage")
    return sum(path.stat().st_blocks * 512 for path in files)


def ledger(root: Path) -> int:
    """The used bytes in the folder's ledger."""
    return int((root / "usage").read_text().split()[0])


@pytest.mark.parametrize("durability", list(Durability))
def test_disk_outlives_its_process(tmp_path: Path, durability: Durability) -> None:
    """Another tier on the same folder finds the blocks; the ledger agrees with the disk."""
    first = DiskTier(tmp_path, MIB, durability)
    first.put(name(1), [b"x" * 5000])
    second = DiskTier(tmp_path, MIB)
    assert bytes(second.get_many([name(1)])[name(1)]) == b"x" * 5000
    assert ledger(tmp_path) == physical(tmp_path) > 0
    second.delete(name(1))
    assert ledger(tmp_path) == 0 == physical(tmp_path)


def test_disk_over_its_cap_at_start_is_cut(tmp_path: Path) -> None:
    """A folder above a new, lower cap is below it before the first call."""
    large = DiskTier(tmp_path, 100 * BLOCK)
    for number in range(40):
        large.put(name(number), [bytes(BLOCK)])
    small = small_disk(tmp_path)
    stats = small.stats()
    assert physical(tmp_path) <= small.max_bytes and stats.num_bytes == ledger(tmp_path)
    assert 0 < (stats.num_blocks or 0) <= 8 and name(39) in small.contains_many([name(39)])


def test_disk_processes_share_one_cap(tmp_path: Path) -> None:
    """Two tiers that write alternately keep one cap, though neither sees the other's puts."""
    tiers = [small_disk(tmp_path), small_disk(tmp_path)]
    for number in range(40):
        assert tiers[number % 2].put(name(number), [bytes(BLOCK)]) is Put.STORED
        assert physical(tmp_path) <= tiers[0].max_bytes


def test_disk_room_is_reserved_while_writing(tmp_path: Path) -> None:
    """A block that is being written counts before its bytes are there."""
    tier = small_disk(tmp_path, 3)
    writing = tmp_path / "temporary" / f"{name(50)}.{os.getpid()}.0.{2 * BLOCK}"
    writing.touch()
    (tmp_path / "usage").write_text("0")  # as after a crash: the walk must find it
    outcomes = [tier.put(name(number), [bytes(BLOCK)]) for number in range(6)]
    assert outcomes[0] is Put.STORED and writing.exists()
    assert physical(tmp_path) + 2 * BLOCK <= tier.max_bytes + 3 * BLOCK
    tier.stats()
    restarted = small_disk(tmp_path, 3)
    assert restarted.put(name(60), [bytes(2 * BLOCK)]) is Put.FULL


def test_disk_leftovers_are_swept_by_age(tmp_path: Path) -> None:
    """A start removes old temporary files; young ones may still be written, foreign ones stay."""
    DiskTier(tmp_path, MIB)
    old, young = (tmp_path / "temporary" / f"{name(n)}.123.0.4096" for n in (1, 2))
    foreign = tmp_path / "temporary" / "notes.txt"
    for file in (old, young, foreign):
        file.write_bytes(b"x")
    for file in (old, foreign):
        os.utime(file, (1, 1))
    DiskTier(tmp_path, MIB)
    assert not old.exists() and young.exists() and foreign.exists()


def test_disk_leaves_foreign_files_alone(tmp_path: Path) -> None:
    """Foreign files and folders are counted and stay, even if the folder is full."""
    tier = small_disk(tmp_path)
    tier.put(name(0), [b"x"])
    foreign = [
        tmp_path / "photo.jpg",
        tmp_path / "blocks-1" / "0" / "0" / "block.safetensors",
        tmp_path / "blocks-1" / "0" / "0" / name(1),  # a block's name in another block's place
        tmp_path / "blocks-1" / "README",
        tmp_path / "blocks-2" / "a" / "later.kv",
    ]
    for file in foreign:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"not ours")
    restarted = small_disk(tmp_path)
    for number in range(20):
        restarted.put(name(number), [bytes(BLOCK)])
    assert restarted.stats().num_foreign == 5
    assert [file.read_bytes() for file in foreign] == [b"not ours"] * 5
    (tmp_path / "huge").write_bytes(bytes(9 * BLOCK))
    full = small_disk(tmp_path)
    assert full.put(name(30), [bytes(BLOCK)]) is Put.FULL and (tmp_path / "huge").exists()


def test_disk_keeps_few_damaged_blocks(tmp_path: Path) -> None:
    """The latest damaged blocks are set aside, and they are evicted first."""
    tier = DiskTier(tmp_path, 100 * BLOCK)
    for number in range(MAX_ASIDE + 4):
        tier.put(name(number), [bytes(BLOCK)])
        tier.set_aside(name(number))
    assert len(list((tmp_path / "aside").iterdir())) == MAX_ASIDE
    assert ledger(tmp_path) == physical(tmp_path)
    tier.put(name(50), [bytes(BLOCK)])
    small = DiskTier(tmp_path, 2 * BLOCK)
    assert not list((tmp_path / "aside").iterdir()) and small.contains_many([name(50)])


def test_disk_pins_are_not_evicted(tmp_path: Path) -> None:
    """A pin holds in all tiers on the folder, also after a restart."""
    first, second = small_disk(tmp_path), small_disk(tmp_path)
    for number in range(3):
        first.put(name(number), [bytes(BLOCK)])
    assert first.pin([name(1), name(2), name(77)])
    for number in range(10, 30):
        assert second.put(name(number), [bytes(BLOCK)]) is Put.STORED
        assert physical(tmp_path) <= second.max_bytes
    restarted = small_disk(tmp_path)
    assert restarted.pinned() == sorted([name(1), name(2)])
    assert set(restarted.contains_many([name(0), name(1), name(2)])) == {name(1), name(2)}
    stats = restarted.stats()
    assert (stats.num_pinned, stats.pinned_bytes) == (2, 2 * BLOCK)
    assert stats.num_evicted == 23 - (stats.num_blocks or 0)
    restarted.unpin([name(1), name(2), name(3)])
    for number in range(30, 50):
        restarted.put(name(number), [bytes(BLOCK)])
    assert restarted.contains_many([name(1), name(2)]) == {} and restarted.pinned() == []


def test_disk_pins_take_half_of_the_cap_at_most(tmp_path: Path) -> None:
    """Pins above half of the cap are all refused; under a lower cap the latest have no effect."""
    tier = DiskTier(tmp_path, 8 * BLOCK)
    for number in range(6):
        tier.put(name(number), [bytes(BLOCK)])
    assert tier.pin([name(0), name(1), name(2)])
    assert not tier.pin([name(3), name(4)]) and tier.pinned() == sorted(map(name, range(3)))
    assert tier.pin([name(0), name(4)])
    assert tier.stats().num_pinned == 4
    small = DiskTier(tmp_path, 4 * BLOCK)
    assert physical(tmp_path) <= small.max_bytes and small.stats().num_pinned == 2
    for number in range(10, 20):
        assert small.put(name(number), [bytes(BLOCK)]) is Put.STORED
        assert physical(tmp_path) <= small.max_bytes
    assert len(small.contains_many(list(map(name, range(5))))) == 2


def test_disk_manifests_go_last(tmp_path: Path) -> None:
    """Manifests are evicted after blocks, and count in the cap."""
    tier = small_disk(tmp_path)
    tier.put(name(0, "manifest"), [b"{}"])
    for number in range(20):
        tier.put(name(number), [bytes(BLOCK)])
    assert tier.contains_many([name(0, "manifest")]) and ledger(tmp_path) == physical(tmp_path)
    stats = tier.stats()
    assert (stats.num_blocks or 0) <= 8 and stats.num_foreign == 0


def test_disk_guests_change_nothing(tmp_path: Path) -> None:
    """A guest makes no folder, evicts nothing and removes no stale files."""
    with pytest.raises(TierMisconfigured, match="no folder"):
        DiskTier(tmp_path / "none", MIB, is_guest=True)
    assert not (tmp_path / "none").exists()
    tier = DiskTier(tmp_path, 100 * BLOCK)
    for number in range(10):
        tier.put(name(number), [bytes(BLOCK)])
    tier.set_aside(name(9))
    stale = tmp_path / "temporary" / f"{name(50)}.1.0.4096"
    stale.write_bytes(bytes(10))
    os.utime(stale, (1, 1))
    guest = DiskTier(tmp_path, 2 * BLOCK, is_guest=True)
    assert guest.stats().num_blocks == 9 == len(list(guest.iter_names())) and stale.exists()
    assert guest.sweep(is_dry_run=True) == Swept(1, 1, BLOCK + 4096) and stale.exists()
    assert guest.sweep() == Swept(1, 1, BLOCK + 4096) and not stale.exists()
    assert ledger(tmp_path) == physical(tmp_path) == 9 * BLOCK


def test_only_disks_pin(cache_server: RedisServer) -> None:
    """A tier that cannot pin raises ValueError before any call."""
    with closing(RedisTier(cache_server.url)) as tier:
        assert not tier.can_pin and tier.pinned() == []
        with pytest.raises(ValueError, match="redis tier cannot pin"):
            tier.pin([name(1)])
        tier.unpin([name(1)])
        assert tier.sweep() == Swept()


def test_disk_folder_may_vanish(tmp_path: Path) -> None:
    """After its folder is deleted, lookups miss, and the next put makes the folder again."""
    root = tmp_path / "cache"
    tier = DiskTier(root, MIB)
    tier.put(name(1), [b"x"])
    _remove_tree(root)
    assert tier.get_many([name(1)]) == {} == tier.contains_many([name(1)])
    tier.delete(name(1))
    _remove_tree(root)
    assert tier.put(name(1), [b"again"]) is Put.STORED
    assert bytes(tier.get_many([name(1)])[name(1)]) == b"again"


def _remove_tree(root: Path) -> None:
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()


def test_disk_follows_no_links_and_reads_no_pipes(tmp_path: Path) -> None:
    """A pipe, link or folder in a block's place is no block, and never blocks a reader."""
    tier = DiskTier(tmp_path, MIB)
    secret = tmp_path.parent / f"{tmp_path.name}-secret"
    secret.write_text("secret")
    places = [tmp_path / "blocks-1" / name(n)[0] / name(n)[1] / name(n) for n in range(3)]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
    places[0].symlink_to(secret)
    os.mkfifo(places[1])
    places[2].mkdir()
    assert tier.contains_many([name(n) for n in range(3)]) == {}
    assert set(map(bytes, tier.get_many([name(n) for n in range(3)]).values())) == {b""}


def test_disk_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    """A folder that cannot be made is refused at the start."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TierMisconfigured, match="cannot be used"):
        DiskTier(tmp_path / "file" / "cache", MIB)


def test_disk_without_space_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full in the midst of a write, no part of the block stays."""
    tier = DiskTier(tmp_path, MIB)

    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("batchkv_cache_store.tiers.disk.os.writev", no_space)
    assert tier.put(name(1), [b"x"]) is Put.FULL
    assert ledger(tmp_path) == 0 and not list((tmp_path / "temporary").iterdir())


# Redis


def test_redis_that_holds_a_queue_is_refused(redis_server: RedisServer, redis_url: str) -> None:
    """The queue's database is recognized by batchkv's keys and by RQ's, also later."""
    for key in ("batchkv:batches", "rq:queues", "rq:workers"):
        with redis_server.connect() as connection:
            connection.flushall()
            tier = RedisTier(redis_url, MIB)
            connection.set(key, 1)
        with pytest.raises(TierMisconfigured, match="holds a queue"):
            tier.check()
        with pytest.raises(TierMisconfigured, match="holds a queue"):
            tier.put(name(1), [b"x"])
        tier.close()
    with closing(RedisTier(f"{redis_url}".replace("db=0", "db=1"), 100 * MIB)) as beside:
        assert beside.put(name(1), [b"x"]) is Put.STORED
        with Redis(unix_socket_path=str(redis_server.socket), db=1) as connection:
            connection.sadd("rq:queues", "q")
        with pytest.raises(TierMisconfigured, match="holds a queue"):
            beside.put(name(2), [b"x"])


def test_redis_that_evicts_a_queue_beside_it_is_refused(cache_server: RedisServer) -> None:
    """A server that evicts is refused if any of its databases holds a queue."""
    with Redis(unix_socket_path=str(cache_server.socket), db=3) as connection:
        connection.sadd("rq:queues", "q")
        with closing(RedisTier(cache_server.url)) as tier:
            with pytest.raises(TierMisconfigured, match="evicts keys of all databases"):
                tier.check()
            connection.flushall()
            tier.check()


def test_redis_without_a_limit_is_refused(redis_url: str) -> None:
    """A server without maxmemory needs ``max_bytes``, and then writes stop before that."""
    with closing(RedisTier(redis_url)) as tier, pytest.raises(TierMisconfigured, match="maxmemory"):
        tier.check()
    with closing(RedisTier(redis_url, 8 * MIB)) as tier:
        outcomes = [tier.put(name(number), [bytes(MIB)]) for number in range(10)]
        assert outcomes[0] is Put.STORED and outcomes[-1] is Put.FULL
        assert (tier.stats().num_bytes or 0) <= 8 * MIB


def test_redis_that_is_full_evicts_or_says_so(cache_server: RedisServer) -> None:
    """A server that evicts makes room by itself; another one is full, which is no error."""
    with closing(RedisTier(cache_server.url)) as tier:
        for number in range(20):
            assert tier.put(name(number), [bytes(8 * MIB)]) is Put.STORED
        stats = tier.stats()
        assert stats.num_evicted and (stats.num_bytes or 0) <= 64 * MIB
        assert tier.put(name(99), [bytes(65 * MIB)]) is Put.FULL
    with (
        running_server("--maxmemory", "16mb") as server,
        closing(RedisTier(server.url)) as tier,
    ):
        outcomes = [tier.put(name(number), [bytes(3 * MIB)]) for number in range(8)]
        assert outcomes[0] is Put.STORED and outcomes[-1] is Put.FULL


def test_redis_put_that_loses_the_race_changes_nothing(
    cache_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another worker stores the block after the check, its block stays."""
    with closing(RedisTier(cache_server.url)) as tier, cache_server.connect() as other:

        def too_late(*_: object) -> bool:
            other.set(PREFIX + name(1), b"first")
            return True

        monkeypatch.setattr(tier, "_has_room", too_late)
        assert tier.put(name(1), [b"second"]) is Put.PRESENT
        assert bytes(tier.get_many([name(1)])[name(1)]) == b"first"


def test_redis_keys_of_another_type_are_no_blocks(cache_server: RedisServer) -> None:
    """A list in a block's place counts as missing; the other blocks are found."""
    with closing(RedisTier(cache_server.url)) as tier, cache_server.connect() as connection:
        connection.rpush(PREFIX + name(1), "x")
        tier.put(name(2), [b"block"])
        connection.set(PREFIX + "notes", "not ours")
        assert tier.contains_many([name(1), name(2)]) == {name(2): 5}
        assert [entry.name for entry in tier.iter_names()] == [name(2)]
        assert set(tier.get_heads([name(1), name(2)], 9)) == {name(2)}
        assert set(tier.get_many([name(1), name(2)])) == {name(2)}


def test_redis_keys_have_a_prefix_of_their_own(cache_server: RedisServer) -> None:
    """No key of the cache begins like a key of the queue."""
    with closing(RedisTier(cache_server.url)) as tier:
        tier.put(name(1), [b"x"])
    with cache_server.connect() as connection:
        assert PREFIX + name(1) in {key.decode() for key in connection.scan_iter()}
    assert not PREFIX.startswith(("batchkv:", "rq:"))


def test_redis_fetches_in_one_round_trip(cache_server: RedisServer) -> None:
    """64 blocks take one batch of commands, and the check for them another one."""
    names = [name(number) for number in range(64)]
    with closing(RedisTier(cache_server.url)) as tier, cache_server.connect() as connection:
        for each in names:
            tier.put(each, [b"x" * 1000])
        before = connection.info("stats")["total_reads_processed"]
        assert len(tier.get_many(names)) == 64 == len(tier.contains_many(names))
        after = connection.info("stats")["total_reads_processed"]
    assert after - before <= 6  # a batch is read in one or two


# Objects


def test_objects_that_others_wrote_count(bucket_url: str) -> None:
    """Objects that are already in the bucket count in the cap; foreign ones are counted apart."""
    from batchkv_cache_store.tiers.objects import ObjectsTier

    with closing(objects_tier(bucket_url, "shared/")) as first:
        assert isinstance(first, ObjectsTier)
        assert first.put(name(1), [bytes(MIB)]) is Put.STORED
        first._client.put_object(Bucket="blocks", Key="shared/1/notes.txt", Body=b"not ours")
    with closing(objects_tier(bucket_url, "shared/", 2 * MIB)) as second:
        assert second.put(name(2), [bytes(MIB)]) is Put.FULL
        second.delete(name(1))
        assert second.put(name(2), [bytes(MIB)]) is Put.STORED
        stats = second.stats()
    assert (stats.num_blocks, stats.num_bytes, stats.num_foreign) == (1, MIB + 8, 1)


# Servers that are gone


def test_servers_that_are_gone_are_tier_errors(bucket_url: str, tmp_path: Path) -> None:
    """A server that does not answer, or refuses, gives TierError and nothing else."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tiers: list[Tier] = [
        RedisTier(f"unix://{tmp_path}/none", MIB),
        RedisTier(f"redis://127.0.0.1:{port}/0", MIB),
        objects_tier(f"http://127.0.0.1:{port}", "p/"),
        objects_tier(bucket_url, "p/", bucket="no-such-bucket"),
    ]
    for tier in tiers:
        calls: list[Callable[[], object]] = [
            tier.check,
            lambda tier=tier: tier.put(name(1), [b"x"]),  # type: ignore[misc]
            lambda tier=tier: tier.stats(),  # type: ignore[misc]
            lambda tier=tier: list(tier.iter_names()),  # type: ignore[misc]
            lambda tier=tier: tier.get_heads([name(1)], 9),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(TierError):
                call()
        tier.close()

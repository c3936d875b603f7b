"""A tier that is missing is away: nothing is written in its place; it is used when it is back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchkv_cache_store.block import Block
from batchkv_cache_store.errors import TierAway, TierError, TierMisconfigured
from batchkv_cache_store.opening import open_tiers, parse_tiers
from batchkv_cache_store.store import Store, StoreSettings
from batchkv_cache_store.tiers.base import Put
from batchkv_cache_store.tiers.disk import DiskTier
from batchkv_worker.settings import WorkerSettings
from batchkv_worker.store.access import open_access
from cache_store.blocks import encoded, make_block

MIB = 1024 * 1024


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a volume is mounted, when it is: at present it is not."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "volumes" / "fast"


def stored(tier: DiskTier, block: Block) -> bool:
    name = f"{block.key.hex()}.kv"
    return tier.put(name, [encoded(block)]) is Put.STORED


@contextmanager
def opened(tier: DiskTier) -> Iterator[DiskTier]:
    try:
        yield tier
    finally:
        tier.close()


def test_nothing_is_made_where_a_volume_is_missing(volume: Path) -> None:
    """The tier opens, every call says what is missing, and no folder appears; then it is used."""
    block = make_block()
    name = f"{block.key.hex()}.kv"
    with opened(DiskTier(volume / "blocks", 100 * MIB)) as tier:
        for call in (
            tier.check,
            lambda: tier.contains_many([name]),
            lambda: tier.put(name, [encoded(block)]),
            lambda: tier.pin([name]),
        ):
            with pytest.raises(TierError, match=f"{volume.parent} is missing: mount its volume"):
                call()
        assert not volume.parent.exists()
        volume.mkdir(parents=True)
        tier.check()
        assert stored(tier, block) and tier.contains_many([name])


def test_a_volume_that_goes_is_not_made_anew(volume: Path) -> None:
    """Unmounted while it is in use, nothing is written in its place; mounted again it goes on."""
    volume.mkdir(parents=True)
    block = make_block()
    name = f"{block.key.hex()}.kv"
    with opened(DiskTier(volume / "blocks", 100 * MIB)) as tier:
        assert stored(tier, block)
        volume.rename(volume.with_name("elsewhere"))
        with pytest.raises(TierAway):
            tier.put(name, [encoded(block)])
        with pytest.raises(TierAway):
            tier.contains_many([name])
        assert not volume.exists()
        volume.with_name("elsewhere").rename(volume)
        assert tier.contains_many([name])


def test_folders_in_the_home_are_made(volume: Path, tmp_path: Path) -> None:
    """There nothing is mounted as a rule: every folder on the way is made, as before."""
    (tmp_path / "home").mkdir()
    root = tmp_path / "home" / ".batchkv" / "deep" / "blocks"
    with opened(DiskTier(root, 100 * MIB)) as tier:
        tier.check()
    assert root.is_dir()


def test_a_folder_that_cannot_be_used_is_still_refused(volume: Path) -> None:
    """What is no matter of waiting, such as a file in its place, is a fault of the settings."""
    volume.parent.mkdir()
    volume.write_text("no folder")
    with pytest.raises(TierMisconfigured):
        DiskTier(volume / "blocks", 100 * MIB)


def test_a_guest_is_told_what_is_missing(volume: Path) -> None:
    """``batchkv cache`` names the volume, and not a worker that would make the folder."""
    with pytest.raises(TierMisconfigured, match="mount its volume"):
        DiskTier(volume / "blocks", 100 * MIB, is_guest=True)


def test_a_store_comes_back_to_a_tier(volume: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other tiers are used meanwhile; once the volume is there it gets blocks, and is told."""
    (tiers, now) = (open_tiers(parse_tiers(f"memory: disk:{volume}/blocks")), [0.0])
    store = Store(tiers, settings=StoreSettings(), clock=lambda: now[0])
    blocks = [make_block((index, 2, 3, 4)) for index in range(6)]
    for block in blocks[:4]:
        store.publish(block)
        assert store.flush(10)
    assert store.open_breakers() == ["disk"] and not volume.exists()
    memory = store.tier_stats()["memory"]
    assert memory is not None and memory.num_blocks == 4
    volume.mkdir(parents=True)
    now[0] += 1000
    store.publish(blocks[4])
    assert store.flush(10) and store.open_breakers() == []
    disk = store.tier_stats()["disk"]
    assert disk is not None and disk.num_blocks == 1
    assert "cache tier disk is back" in caplog.text
    store.close(1)


def test_a_worker_starts_without_its_tiers(volume: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A volume that is not mounted and a Redis that is down are told of; no exit code 2."""
    cache = f"memory: disk:{volume}/blocks redis://127.0.0.1:1/0?max=1GB"
    access = open_access(WorkerSettings(model="m", cache=cache))
    assert access is not None
    assert "cache tier disk is away, and asked again later" in caplog.text
    assert "cache tier redis is away, and asked again later" in caplog.text
    access.store.publish(make_block())
    access.store.flush(10)
    memory = access.store.tier_stats()["memory"]
    assert memory is not None and memory.num_blocks == 1 and not volume.exists()
    access.store.close(1)
    access.leases.close()
    shutil.rmtree(volume, ignore_errors=True)

"""A tier that is missing is away: nothing is written in its place; it is used when it is back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from batchkv_cache_store.blocks.block import Block
from batchkv_cache_store.errors import TierAway, TierError, TierMisconfigured
from batchkv_cache_store.opening import open_tiers, parse_tiers
from batchkv_cache_store.store import Store, StoreSettings
from batchkv_cache_store.tiers import disk_folder
from batchkv_cache_store.tiers.base import Put
from batchkv_cache_store.tiers.disk import DiskTier
from batchkv_worker.prefix.shared.access import open_access
from batchkv_worker.settings import WorkerSettings
from cache_store.blocks import encoded, make_block

MIB = 1024 * 1024
TESTS = Path(__file__).parents[1]


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mount point of a volume that is not mounted now."""
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
    """The tier opens, every call names the missing folder, none is made; later it is used."""
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
    """After an unmount nothing is written in its place; mounted again, the tier is used again."""
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
    """In the home all missing folders of the path are made, because volumes are rare there."""
    (tmp_path / "home").mkdir()
    root = tmp_path / "home" / ".batchkv" / "deep" / "blocks"
    with opened(DiskTier(root, 100 * MIB)) as tier:
        tier.check()
    assert root.is_dir()


def test_a_folder_that_cannot_be_used_is_still_refused(volume: Path) -> None:
    """A fault that will not pass, such as a file in its place, is a fault of the settings."""
    volume.parent.mkdir()
    volume.write_text("no folder")
    with pytest.raises(TierMisconfigured):
        DiskTier(volume / "blocks", 100 * MIB)


def test_a_guest_is_told_what_is_missing(volume: Path) -> None:
    """``batchkv cache`` names the volume and does not say that a worker makes the folder."""
    with pytest.raises(TierMisconfigured, match="mount its volume"):
        DiskTier(volume / "blocks", 100 * MIB, is_guest=True)


def test_a_store_comes_back_to_a_tier(volume: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other tiers are used meanwhile. The mounted volume gets blocks, and the log says so."""
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
    """A worker logs an unmounted volume and a Redis that is down, and does not end with 2."""
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


def test_a_worker_starts_beside_a_locked_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that another process has locked is away at the start, and used after that."""
    monkeypatch.setattr(disk_folder, "LOCK_TIMEOUT_SECONDS", 0.05)
    (tmp_path / "usage").touch()
    code = "import fcntl,sys; f=open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(1); input()"
    command = [sys.executable, "-uc", code, str(tmp_path / "usage")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdin and holder.stdout.readline()
        access = open_access(WorkerSettings(model="m", cache=f"memory: disk:{tmp_path}"))
        assert access is not None
        assert "away, and asked again later" in caplog.text and "holds the lock" in caplog.text
        holder.stdin.close()
        holder.wait(10)
    access.store.publish(make_block())
    assert access.store.flush(10)
    disk = access.store.tier_stats()["disk"]
    assert disk is not None and disk.num_blocks == 1
    access.store.close(1)


def test_a_worker_starts_beside_a_full_tier(tmp_path: Path) -> None:
    """A full disk is away at the start, and used when it has room."""
    code = f"""
import resource, sys
sys.path.append('')
from batchkv_worker.settings import WorkerSettings
from batchkv_worker.prefix.shared.access import open_access
from cache_store.blocks import make_block
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
access = open_access(WorkerSettings(model="m", cache="memory: disk:{tmp_path}/blocks"))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
access.store.publish(make_block())
assert access.store.flush(10)
print(access.store.tier_stats()["disk"].num_blocks)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=TESTS, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
    assert "cache tier disk is away, and asked again later" in ended.stderr
    assert "File too large" in ended.stderr


@pytest.mark.parametrize("place", ["usage", "temporary", "aside", "pins", "blocks-1"])
@pytest.mark.parametrize("thing", ["pipe", "link", "file", "folder"])
def test_no_thing_in_the_folder_keeps_workers_from_starting(
    place: str, thing: str, tmp_path: Path
) -> None:
    """With a foreign object in place of its files, the tier opens, and its calls fail."""
    DiskTier(tmp_path / "blocks", MIB).close()
    path = tmp_path / "blocks" / place
    path.rmdir() if path.is_dir() else path.unlink()
    if thing == "pipe":
        os.mkfifo(path)
    elif thing == "link":
        path.symlink_to(tmp_path / "nowhere")
    elif thing == "file":
        path.write_text("nothing of ours")
    else:
        path.mkdir()
    block = make_block()
    with opened(DiskTier(tmp_path / "blocks", 100 * MIB)) as tier:
        for call in (tier.check, tier.check, lambda: stored(tier, block), tier.stats):
            with suppress(TierError):
                call()
    assert not (tmp_path / "nowhere").exists()

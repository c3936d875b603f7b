"""A folder with parts of another user (root, for example): the rest of it is used."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from batchkv_cache_store.tiers.base import Put
from batchkv_cache_store.tiers.disk import DiskTier
from cache_store.places import MIB, name

NOBODY = 65534
BLOCK = 8192


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that all users may read and write."""
    folder = Path(tempfile.mkdtemp(prefix="batchkv-users-", dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def _another_user(closed: Path) -> Iterator[None]:
    """Inside the block, the process is a user without access to this folder."""
    if os.geteuid() == 0:
        for path in (closed.parents[2], *closed.parents[2].rglob("*")):
            if path != closed and closed not in path.parents:
                os.chown(path, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    else:
        closed.chmod(0)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        else:
            closed.chmod(0o700)


def _filled(root: Path) -> Path:
    """Five blocks; the first is in the returned folder."""
    with closing(DiskTier(root / "blocks", MIB)) as tier:
        for number in range(1, 6):
            assert tier.put(name(number), [bytes(BLOCK)]) is Put.STORED
    first = name(1)
    return root / "blocks" / "blocks-1" / first[0] / first[1]


def test_a_closed_folder_of_another_user_costs_its_blocks_alone(root: Path) -> None:
    """A tier opens, lists, counts, reads and writes without a folder that is closed to it."""
    with _another_user(_filled(root)):
        tier = DiskTier(root / "blocks", MIB)
        assert {entry.name for entry in tier.iter_names()} == {name(n) for n in range(2, 6)}
        stats = tier.stats()
        assert (stats.num_blocks, stats.num_foreign) == (4, 1)
        both = [name(1), name(2)]
        assert list(tier.contains_many(both)) == list(tier.get_many(both)) == [name(2)]
        assert list(tier.get_heads(both, 9)) == [name(2)]
        assert tier.put(name(6), [bytes(BLOCK)]) is Put.STORED
        guest = DiskTier(root / "blocks", MIB, is_guest=True)
        assert guest.stats().num_blocks == 5


def test_what_may_not_be_removed_is_no_room(root: Path) -> None:
    """Eviction skips files in another user's folder; the tier opens under a smaller cap, too."""
    closed = _filled(root)
    closed.chmod(0o755)
    for path in closed.iterdir():
        path.chmod(0o644)
        os.utime(path, (1, 1))  # it would go first
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")
    with _another_user(closed):
        tier = DiskTier(root / "blocks", 5 * BLOCK)
        assert tier.contains_many([name(1)])
        for number in range(7, 12):
            assert tier.put(name(number), [bytes(BLOCK)]) is Put.STORED
        assert tier.contains_many([name(1)])
        assert (tier.stats().num_bytes or 0) <= 5 * BLOCK

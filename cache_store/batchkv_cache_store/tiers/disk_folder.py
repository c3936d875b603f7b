"""The folder of the disk tier: where things lie, how full it is, and what goes first.

::

    root/
      usage                        bytes that the folder has taken (20 digits); also its lock
      blocks-1/a/b/ab<62>.kv       blocks of format 1, fanned out by the key's first two digits
      temporary/                   blocks being written: <name>.<pid>.<count>.<bytes reserved>
      aside/                       damaged blocks, the latest few, for a look

Two digits make 256 folders: enough for a million blocks, few enough to read through at a start.

Several processes share the folder. How full it is stands in ``usage``, changed only under its
lock, so that a put reads no folder. Room is reserved there before a byte is written. A process
that dies leaves at most what it had reserved; the next walk through the folder, at any start and
before any eviction, counts everything anew.

Bytes are physical (``st_blocks``): that is what the disk lacks. What is not ours is counted, its
bytes too, and left alone.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from batchkv_cache_store.errors import TierError
from batchkv_cache_store.names import is_block_name

LOCK_TIMEOUT_SECONDS = 10.0
TEMPORARY_AGE_SECONDS = 3600.0
MAX_ASIDE = 8
_LOCK_POLL_SECONDS = 0.002
_USAGE, _BLOCKS, _TEMPORARY, _ASIDE = "usage", "blocks-1", "temporary", "aside"
_HEX = "0123456789abcdef"


@dataclass(slots=True)
class Ledger:
    """What the folder has taken, while its lock is held; written back when that is released."""

    num_bytes: int


@dataclass(slots=True)
class Survey:
    """What one walk through the folder found; bytes are physical.

    ``removable``: (is a block, mtime in nanoseconds, bytes, path); damaged blocks come first.
    """

    num_bytes: int = 0
    num_foreign: int = 0
    removable: list[tuple[bool, int, int, str]] = field(default_factory=list)

    @property
    def removable_bytes(self) -> int:
        """Bytes that eviction could free."""
        return sum(num_bytes for _, _, num_bytes, _ in self.removable)

    @property
    def num_blocks(self) -> int:
        """Blocks in use."""
        return sum(1 for is_block, *_ in self.removable if is_block)


class DiskFolder:
    """Paths, the ledger and the walk. Methods raise OSError; ``locked`` raises TierError too."""

    def __init__(self, root: Path, temporary_age_seconds: float = TEMPORARY_AGE_SECONDS) -> None:
        self.root = root
        self.temporary = root / _TEMPORARY
        self.aside = root / _ASIDE
        self._blocks = root / _BLOCKS
        self._temporary_age_seconds = temporary_age_seconds

    def path(self, name: str) -> Path:
        """Where the block of this name lies."""
        return self._blocks / name[0] / name[1] / name

    def make(self) -> None:
        """Make the folders that are always there; prompts are private, so nobody else may look."""
        for folder in (self.root, self.temporary, self.aside, self._blocks):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[Ledger]:
        """Hold the folder's lock, among threads and processes alike."""
        descriptor = self._open_usage()
        try:
            _lock(descriptor, self.root)
            text = os.pread(descriptor, 32, 0)
            # A usage file that says nothing is as if nothing had been counted: walk.
            before = int(text) if text.isdigit() else self.survey().num_bytes
            ledger = Ledger(before)
            try:
                yield ledger
            finally:
                after = b"%020d" % max(0, ledger.num_bytes)
                if after != text:
                    os.pwrite(descriptor, after, 0)
        finally:
            os.close(descriptor)

    def _open_usage(self) -> int:
        flags = os.O_RDWR | os.O_CREAT
        try:
            return os.open(self.root / _USAGE, flags, 0o600)
        except FileNotFoundError:
            self.make()
            return os.open(self.root / _USAGE, flags, 0o600)

    def survey(self) -> Survey:
        """Walk through everything; old leftovers of writers that died are removed on the way."""
        found = Survey()
        for entry in _entries(self.root):
            if entry.name not in (_USAGE, _BLOCKS, _TEMPORARY, _ASIDE):
                _count_foreign(found, entry)
        for entry in _entries(self._blocks):
            if len(entry.name) != 1 or entry.name not in _HEX:
                _count_foreign(found, entry)
                continue
            for leaf in _entries(entry.path):
                if len(leaf.name) != 1 or leaf.name not in _HEX:
                    _count_foreign(found, leaf)
                    continue
                self._survey_leaf(found, entry.name + leaf.name, leaf.path)
        for entry in _entries(self.aside):
            _count_removable(found, entry, is_block=False)
        self._survey_temporary(found)
        return found

    def _survey_leaf(self, found: Survey, digits: str, folder: str) -> None:
        for entry in _entries(folder):
            if is_block_name(entry.name) and entry.name.startswith(digits):
                _count_removable(found, entry, is_block=True)
            else:
                _count_foreign(found, entry)

    def _survey_temporary(self, found: Survey) -> None:
        now = time.time()
        for entry in _entries(self.temporary):
            name, _, reserved = entry.name.rpartition(".")
            if not is_block_name(".".join(name.split(".")[:2])) or not reserved.isdigit():
                _count_foreign(found, entry)
                continue
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if now - status.st_mtime > self._temporary_age_seconds:
                    os.unlink(entry.path)
                else:  # still being written: what it will take was reserved, not what it has now
                    found.num_bytes += max(status.st_blocks * 512, int(reserved))


def evict(found: Survey, max_bytes: int) -> int:
    """Remove files until the folder has at most ``max_bytes``; returns the blocks removed."""
    removed = 0
    for is_block, _, num_bytes, path in sorted(found.removable):
        if found.num_bytes <= max_bytes:
            break
        with suppress(FileNotFoundError):
            os.unlink(path)
        found.num_bytes -= num_bytes
        removed += is_block
    return removed


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    """A folder's entries; none when it is gone or no folder."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _count_removable(found: Survey, entry: os.DirEntry[str], is_block: bool) -> None:
    if not entry.is_file(follow_symlinks=False):
        _count_foreign(found, entry)
        return
    with suppress(FileNotFoundError):
        status = entry.stat(follow_symlinks=False)
        num_bytes = status.st_blocks * 512
        found.num_bytes += num_bytes
        found.removable.append((is_block, status.st_mtime_ns, num_bytes, entry.path))


def _count_foreign(found: Survey, entry: os.DirEntry[str]) -> None:
    with suppress(FileNotFoundError):
        found.num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
        found.num_foreign += 1


def _lock(descriptor: int, root: Path) -> None:
    # Not a blocking call: a stopped process may hold the lock, and a lookup must still end.
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as fault:
            if time.monotonic() > deadline:
                raise TierError(f"{root}: another process holds the lock") from fault
            time.sleep(_LOCK_POLL_SECONDS)

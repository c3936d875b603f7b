"""The folder of the disk tier: its paths, its ledger of used bytes, and its pins.

::

    root/
      usage                        the ledger: bytes used, and blocks evicted so far (20 digits
                                   each); also the folder's lock
      blocks-1/a/b/ab<62>.kv       blocks of format 1, fanned out by the key's first two digits;
                                   manifests too
      temporary/                   blocks being written: <name>.<pid>.<count>.<bytes reserved>
      aside/                       the latest damaged blocks, for inspection
      pins/                        an empty file for each pinned name

Two digits make 256 folders: enough for a million blocks, and few enough to list at a start.

Several processes share the folder. ``usage`` has the number of used bytes, so that a put lists no
folder. It changes under its lock only. A writer reserves room there before it writes a byte. A
process that dies leaves at most its reservation. Every start and every eviction walks through the
folder and counts again.

Bytes are physical (``st_blocks``), because these are what fills a disk. Foreign files are counted
with their bytes, and stay.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from batchkv_cache_store.blocks.names import is_name
from batchkv_cache_store.errors import TierAway, TierError
from batchkv_cache_store.tiers.disk_files import read_file
from batchkv_cache_store.tiers.disk_survey import Rank, Survey, entries, walk_blocks

LOCK_TIMEOUT_SECONDS = 10.0
TEMPORARY_AGE_SECONDS = 3600.0
MAX_ASIDE = 8
_LOCK_POLL_SECONDS = 0.002
_USAGE, _BLOCKS, _TEMPORARY, _ASIDE, _PINS = "usage", "blocks-1", "temporary", "aside", "pins"
_OURS = frozenset((_USAGE, _BLOCKS, _TEMPORARY, _ASIDE, _PINS))
_USAGE_BYTES = 64  # more than the file has


@dataclass(slots=True)
class Ledger:
    """The folder's used bytes and evictions, read under its lock and written at its release."""

    num_bytes: int
    num_evicted: int

    def __bytes__(self) -> bytes:
        return b"%020d\n%020d" % (max(0, self.num_bytes), self.num_evicted)


class DiskFolder:
    """Paths, the ledger, the pins. Methods raise OSError; ``locked`` raises TierError, too.

    ``max_pinned_bytes``: the most bytes that pins protect. ``is_guest``: removes no stale files.
    """

    def __init__(
        self,
        root: Path,
        max_pinned_bytes: int,
        temporary_age_seconds: float = TEMPORARY_AGE_SECONDS,
        is_guest: bool = False,
    ) -> None:
        self.root = root
        self.blocks = root / _BLOCKS
        self.temporary = root / _TEMPORARY
        self.aside = root / _ASIDE
        self._pins = root / _PINS
        self.max_pinned_bytes = max_pinned_bytes
        self._temporary_age_seconds = temporary_age_seconds
        self._is_guest = is_guest
        self._device: int | None = None  # of the folder above, at the last check

    def path(self, name: str) -> Path:
        """The path of the block or manifest with this name."""
        return self.blocks / name[0] / name[1] / name

    def check_volume(self) -> None:
        """Raise TierAway if the folder's volume is missing, or another volume is in its place.

        Folders above the tier's folder are made in the user's home only. Elsewhere a missing folder
        may be the mount point of a volume, and a block written there would fill the system's disk.
        """
        parent = self.root.parent
        if not self.root.exists() and not parent.exists() and not _is_in_home(parent):
            missing = next(f for f in reversed(self.root.parents) if not f.exists())
            raise TierAway(f"{missing} is missing: mount its volume, or make {parent}")
        with suppress(FileNotFoundError):
            device = os.stat(parent).st_dev
            if device != self._device and self._device is not None and not self.root.exists():
                raise TierAway(f"{parent} is another volume than it was: its own is not mounted")
            self._device = device

    def why_missing(self) -> str:
        """Why the folder does not exist, and what to do."""
        try:
            self.check_volume()
        except TierAway as fault:
            return str(fault)
        return "the first worker makes it"

    def make(self) -> None:
        """Make the folder and its subfolders. They are closed to others: prompts are private."""
        self.check_volume()
        above = [folder for folder in self.root.parents if not folder.exists()]
        own = (self.root, self.temporary, self.aside, self._pins, self.blocks)
        for folder in (*reversed(above), *own):
            if folder == self.root or not folder.is_symlink():
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def check(self, *paths: Path) -> None:
        """Raise FileNotFoundError if a folder below the root, on these paths, is a link.

        The link's target is foreign, so the paths count as missing.
        """
        for path in paths:
            for folder in path.parents:
                if folder == self.root:
                    break
                if folder.is_symlink():
                    raise FileNotFoundError(errno.ENOTDIR, f"{folder.name} is a link, no folder")

    @contextmanager
    def locked(self) -> Iterator[Ledger]:
        """Hold the folder's lock, which excludes other threads and processes."""
        descriptor = self._open_usage()
        try:
            _lock(descriptor, self.root)
            text = os.pread(descriptor, _USAGE_BYTES, 0)
            num_bytes, num_evicted = _read_usage(text)
            # A usage file without a number needs a walk that counts.
            ledger = Ledger(
                self.survey().num_bytes if num_bytes is None else num_bytes, num_evicted
            )
            try:
                yield ledger
            finally:
                if bytes(ledger) != text:
                    os.pwrite(descriptor, bytes(ledger), 0)
        finally:
            os.close(descriptor)

    def _open_usage(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(self.root / _USAGE, flags, 0o600)
        except FileNotFoundError:
            self.make()
            return os.open(self.root / _USAGE, flags, 0o600)

    def survey(self) -> Survey:
        """Walk through the folder. Old files of writers that died are removed on the way."""
        found = Survey()
        for entry in entries(self.root):
            if entry.name not in _OURS or entry.is_symlink():
                found.count_foreign(entry)
        for entry, rank in walk_blocks(self.blocks):
            if rank is None:
                found.count_foreign(entry)
            else:
                found.count_file(entry, rank)
        for entry in self._own(self.aside):
            if is_name(entry.name):
                found.count_file(entry, Rank.ASIDE)
            else:
                found.count_foreign(entry)
        for entry in self._own(self.temporary):
            found.count_temporary(entry, self._temporary_age_seconds)
        found.hold_pins(self._pins_by_age(found), self.max_pinned_bytes)
        if not self._is_guest:
            while found.stale:
                found.remove(found.stale.pop())
        return found

    def _pins_by_age(self, found: Survey) -> dict[str, int]:
        pins: dict[str, int] = {}
        for entry in self._own(self._pins):
            if is_name(entry.name):
                with suppress(FileNotFoundError):
                    pins[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
            else:
                found.count_foreign(entry)
        return pins

    def pins(self) -> list[str]:
        """The pinned names, with or without blocks."""
        return sorted(entry.name for entry in self._own(self._pins) if is_name(entry.name))

    def _own(self, folder: Path) -> list[os.DirEntry[str]]:
        """The entries of a subfolder; none if it is a link."""
        return [] if folder.is_symlink() else entries(folder)

    def add_pins(self, names: Iterable[str]) -> None:
        """Pin these names."""
        if not self._pins.is_symlink():
            self._pins.mkdir(mode=0o700, exist_ok=True)
        for name in names:
            self.check(self._pins / name)
            (self._pins / name).touch(mode=0o600)

    def remove_pins(self, names: Iterable[str]) -> None:
        """Remove the pins of these names, if there are any."""
        for name in names:
            with suppress(FileNotFoundError):
                self.check(self._pins / name)
                (self._pins / name).unlink()

    def num_evicted(self) -> int:
        """The number of blocks that all processes have evicted so far."""
        with suppress(FileNotFoundError):
            return _read_usage(read_file(self.root / _USAGE, _USAGE_BYTES))[1]
        return 0


def _is_in_home(path: Path) -> bool:
    try:
        home = Path.home()
    except RuntimeError:  # the user has no home
        return False
    return home.is_dir() and path.is_relative_to(home)


def _read_usage(text: bytes) -> tuple[int | None, int]:
    """(bytes used, None if the text has no number; blocks evicted so far)."""
    numbers = [int(word) if word.isdigit() else None for word in text.split()]
    num_bytes, num_evicted = (*numbers, None, None)[:2]
    return num_bytes, num_evicted or 0


def _lock(descriptor: int, root: Path) -> None:
    # The call does not block: a stopped process may hold the lock, and a lookup must still end.
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as fault:
            if time.monotonic() > deadline:
                raise TierError(f"{root}: another process holds the lock") from fault
            time.sleep(_LOCK_POLL_SECONDS)

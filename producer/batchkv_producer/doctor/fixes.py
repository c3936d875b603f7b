"""What ``--fix`` changes: only files that batchkv made, and each change is said.

Nothing that a user stored is among them: no batch, no result, no block, no setting. What is removed
is made again when it is needed.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from batchkv_producer.doctor.contract import Check, Verdict, ok, warn
from batchkv_producer.doctor.home_folder import home_of
from batchkv_producer.doctor.machine import Machine
from batchkv_producer.local.presence import FILE_TTL_SECONDS, Record
from batchkv_producer.server.embedded import holds_data
from batchkv_producer.server.home import Home

STALE_SECONDS = 3600.0  # a temporary file that is older was left by a process that died
MAX_SHOWN = 4
# Files that commands make for a moment, in the home folder.
_TEMPORARY = (".fingerprints.json.*", ".doctor.*", ".room.*", "workers/*.part")
# Files that hold what was measured, as JSON. A broken one is ignored anyway.
_MEASURED = ("fingerprints.json", "measured/*.json")
_KEPT_PARTS = ("facts", "results")  # of a file of measurements, both objects
_MEASURED_TEMPORARY = ("measured/.*", "measured/*.new", "measured/*.part", "measured/*.tmp")
_OWN_FOLDERS = "batchkv-doctor-*"  # of the temporary folder


@dataclass(frozen=True, slots=True)
class Fix:
    """One change: ``what`` in words, and the function that makes it (OSError)."""

    what: str
    make: Callable[[], None]


def find_fixes(machine: Machine) -> tuple[Fix, ...]:
    """All changes that ``--fix`` would make now. Nothing is changed here."""
    home = home_of(machine)
    fixes = list(_in_temporary_folder())
    if home.path.is_dir() and home.path.stat().st_uid == os.geteuid():
        for each in (_rights, _leftovers, _broken, _sockets, _dead_workers):
            with suppress(OSError):  # a folder that is closed, or gone meanwhile
                fixes += each(machine, home)
    return tuple(fixes)


def _rights(machine: Machine, home: Home) -> Iterator[Fix]:
    for folder in (home.path, home.data, home.logs, home.path / "workers"):
        if folder.is_dir() and not folder.is_symlink():
            found = folder.stat()
            if found.st_uid == os.geteuid() and found.st_mode & 0o077:
                mode = stat.S_IMODE(found.st_mode)
                what = f"close {machine.shown(folder)} to other users (mode {mode:o} to 700)"
                yield Fix(what, partial(folder.chmod, 0o700))


def _leftovers(machine: Machine, home: Home) -> Iterator[Fix]:
    for pattern in (*_TEMPORARY, *_MEASURED_TEMPORARY):
        for path in sorted(home.path.glob(pattern)):
            if _is_own_file(path) and _age_seconds(path) > STALE_SECONDS:
                yield _removal(machine, path, "a leftover of a command that died")


def _broken(machine: Machine, home: Home) -> Iterator[Fix]:
    for pattern in _MEASURED:
        for path in sorted(home.path.glob(pattern)):
            is_temporary = path.name.startswith(".")
            if not is_temporary and _is_own_file(path) and not _can_be_read(path):
                yield _removal(machine, path, "which cannot be read, and is measured again")


def _sockets(machine: Machine, home: Home) -> Iterator[Fix]:
    """The socket of a server that died. One that runs holds a lock."""
    path = home.socket
    if path.is_socket() and path.lstat().st_uid == os.geteuid():
        lock = home.path / "running.lock"
        if not (lock.exists() and holds_data(home)) and _age_seconds(path) > STALE_SECONDS:
            yield _removal(machine, path, "the socket of a server that is gone")


def _dead_workers(machine: Machine, home: Home) -> Iterator[Fix]:
    """Files of workers that nobody reads any more. Younger ones bring rows back: they stay."""
    for path in sorted((home.path / "workers").glob("*.json")):
        if _is_own_file(path) and _age_seconds(path) > FILE_TTL_SECONDS and not _may_live(path):
            yield _removal(machine, path, "of a worker that ended over a week ago")


def _in_temporary_folder() -> Iterator[Fix]:
    for folder in sorted(Path(tempfile.gettempdir()).glob(_OWN_FOLDERS)):
        try:
            found = folder.lstat()
        except OSError:
            continue
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if is_ours and time.time() - found.st_mtime > STALE_SECONDS:
            yield Fix(
                f"remove {folder.name} in the temporary folder, a leftover of doctor",
                partial(_remove_folder, folder),
            )


def _remove_folder(folder: Path) -> None:
    """Our own folder has files only."""
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _removal(machine: Machine, path: Path, why: str) -> Fix:
    return Fix(f"remove {machine.shown(path)}, {why}", partial(path.unlink, missing_ok=True))


def _is_own_file(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _can_be_read(path: Path) -> bool:
    """Whether a file of digests or measurements is one."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    except OSError:  # it may be whole, and closed to us for the moment
        return True
    if not isinstance(content, dict):
        return False
    parts = _KEPT_PARTS if path.parent.name == "measured" else ()
    return all(isinstance(content.get(part), dict) for part in parts)


def _may_live(path: Path) -> bool:
    record = Record.read(path)
    if record is None:
        return False
    if not record.has_visible_process:
        return False  # of an earlier start of the machine, or of another one
    try:
        os.kill(record.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _age_seconds(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def apply_fixes(fixes: tuple[Fix, ...]) -> Iterator[tuple[str, str]]:
    """Make the changes, one by one: (what was done, why not; empty if it was)."""
    for each in fixes:
        try:
            each.make()
        except OSError as fault:
            yield each.what, fault.strerror or str(fault)
        else:
            yield each.what, ""


def own_facts(machine: Machine) -> tuple[str, ...]:
    """What ``--fix`` would do, in words."""
    return tuple(each.what for each in find_fixes(machine))


def judge_own(facts: tuple[str, ...]) -> Verdict:
    """Leftovers do no harm, but take room; open folders keep commands from running."""
    if not facts:
        return ok("nothing of batchkv's own files needs a change")
    shown = "; ".join(facts[:MAX_SHOWN])
    more = f"; and {len(facts) - MAX_SHOWN} more" if len(facts) > MAX_SHOWN else ""
    return warn(f"own files: {shown}{more}", "`batchkv doctor --fix` does that, and nothing else")


CHECKS = (Check("own files", own_facts, judge_own),)

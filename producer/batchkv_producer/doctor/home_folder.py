"""The home folder of batchkv, and the disks on which it and the models are."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from batchkv_producer.doctor.contract import Check, Verdict, fail, ok, warn
from batchkv_producer.doctor.machine import Machine
from batchkv_producer.server.home import HOME_VARIABLE, MAX_SOCKET_PATH_BYTES, Home

GIB = 2**30
LEAST_BYTES = 200 * 2**20
FEW_BYTES = 2 * GIB
FEW_MODEL_BYTES = 10 * GIB
# File systems on which a lock of one machine is not seen by another, or is lost.
NETWORK_TYPES = frozenset(
    {
        "nfs",
        "nfs4",
        "smbfs",
        "smb3",
        "cifs",
        "afpfs",
        "webdav",
        "davfs",
        "fuse.sshfs",
        "fuse.s3fs",
        "9p",
        "fuse.rclone",
        "ceph",
        "glusterfs",
        "lustre",
    }
)


@dataclass(frozen=True, slots=True)
class HomeFacts:
    """``exists`` False: it is made at the first use, and ``is_writable`` is the folder's above."""

    shown: str
    exists: bool
    is_folder: bool = True
    is_own: bool = True
    mode: int = 0o700
    is_writable: bool = True
    locks: bool = True
    file_system: str = ""
    free_bytes: int | None = None
    socket_bytes: int = 0


def home_of(machine: Machine) -> Home:
    """The home folder that the machine's environment names."""
    value = machine.environ.get(HOME_VARIABLE)
    if value:
        return Home(Path(value).expanduser().absolute())
    return Home(machine.user_home / ".batchkv")


def home_facts(machine: Machine) -> HomeFacts:
    """Look at the folder. A file for the lock is made in it for a moment."""
    home = home_of(machine)
    folder, shown = home.path, machine.shown(home.path)
    socket_bytes = len(os.fsencode(folder / "redis.sock"))
    place = existing_above(folder)
    kind, free = file_system(machine, place), free_bytes(place)
    if not folder.exists():
        writable = os.access(place, os.W_OK | os.X_OK)
        return HomeFacts(
            shown,
            False,
            is_writable=writable,
            file_system=kind,
            free_bytes=free,
            socket_bytes=socket_bytes,
        )
    found = folder.stat()
    writable = os.access(folder, os.W_OK | os.X_OK)
    return HomeFacts(
        shown,
        True,
        stat.S_ISDIR(found.st_mode),
        found.st_uid == os.geteuid(),
        stat.S_IMODE(found.st_mode),
        writable,
        locks_hold(folder) if writable else True,
        kind,
        free,
        socket_bytes,
    )


def judge_home(facts: HomeFacts) -> Verdict:
    """The folder can hold the embedded server, logs and locks."""
    other = f"set {HOME_VARIABLE} to another folder"
    if not facts.is_folder or not facts.is_own:
        return fail(f"{facts.shown} is not a folder of yours", other)
    if facts.exists and facts.mode & 0o077:
        return fail(
            f"{facts.shown} can be opened by other users (mode {facts.mode:o})",
            f"run `batchkv doctor --fix`, or `chmod 700 {facts.shown}`",
        )
    if not facts.is_writable:
        return fail(f"{facts.shown} cannot be written", other)
    if not facts.locks:
        return fail(f"a lock in {facts.shown} does not keep a second one out", other)
    if facts.free_bytes is not None and facts.free_bytes < LEAST_BYTES:
        return fail(
            f"the disk of {facts.shown} has {facts.free_bytes / 1e6:,.0f} MB left",
            f"make room there, or {other}",
        )
    if facts.file_system in NETWORK_TYPES:
        return warn(
            f"{facts.shown} is on a network volume ({facts.file_system})",
            f"{other} on a disk of this machine: the server's data and locks are in it",
        )
    if facts.free_bytes is not None and facts.free_bytes < FEW_BYTES:
        return warn(
            f"the disk of {facts.shown} has {facts.free_bytes / 1e9:,.1f} GB left",
            "make room: the queue stops when the disk is full",
        )
    return ok(_home_text(facts))


def _home_text(facts: HomeFacts) -> str:
    kind = f" ({facts.file_system})" if facts.file_system else ""
    free = "" if facts.free_bytes is None else f", {facts.free_bytes / 1e9:,.0f} GB free"
    made = "" if facts.exists else ", made at the first use"
    far = ", its socket is in /tmp" if facts.socket_bytes > MAX_SOCKET_PATH_BYTES else ""
    return f"{facts.shown}{kind}{free}{made}{far}"


@dataclass(frozen=True, slots=True)
class ModelDiskFacts:
    """The folder into which models are downloaded."""

    shown: str
    free_bytes: int | None
    is_writable: bool


def model_disk_facts(machine: Machine) -> ModelDiskFacts:
    """Where Hugging Face's client keeps its repositories."""
    folder = model_cache(machine)
    place = existing_above(folder)
    writable = os.access(place, os.W_OK | os.X_OK)
    return ModelDiskFacts(machine.shown(folder), free_bytes(place), writable)


def judge_model_disk(facts: ModelDiskFacts) -> Verdict:
    """There is room for a model."""
    if not facts.is_writable:
        return warn(
            f"{facts.shown}, where models are kept, cannot be written",
            "a model that is not there yet cannot be downloaded: set HF_HOME to a folder of yours",
        )
    if facts.free_bytes is not None and facts.free_bytes < FEW_MODEL_BYTES:
        return warn(
            f"the disk of {facts.shown} has {facts.free_bytes / 1e9:,.1f} GB left for models",
            "make room: a model of 4 billion parameters takes 2.3 GB at 4 bits, one of 32 billion "
            "18 GB",
        )
    free = "" if facts.free_bytes is None else f", {facts.free_bytes / 1e9:,.0f} GB free"
    return ok(f"models are kept in {facts.shown}{free}")


def model_cache(machine: Machine) -> Path:
    """The folder of Hugging Face's client, as its variables say."""
    hub = machine.environ.get("HF_HUB_CACHE") or machine.environ.get("HUGGINGFACE_HUB_CACHE")
    if hub:
        return Path(hub).expanduser()
    base = machine.environ.get("HF_HOME")
    home = Path(base).expanduser() if base else machine.user_home / ".cache" / "huggingface"
    return home / "hub"


def existing_above(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    for place in (path, *path.parents):
        if place.exists():
            return place
    return Path("/")


def free_bytes(path: Path) -> int | None:
    """Bytes that this user may still write there."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def locks_hold(folder: Path) -> bool:
    """Whether a lock on a file of the folder keeps a second holder out."""
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".doctor.")
    except OSError:
        return False
    try:
        with open(name, "rb") as other:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return not _can_lock(other.fileno())
    except OSError:
        return False
    finally:
        os.close(handle)
        os.unlink(name)


def _can_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def file_system(machine: Machine, path: Path) -> str:
    """The type of the file system of a path, as ``mount`` calls it; empty if it is unknown."""
    if machine.is_mac:
        return type_in_mounts_of_mac(machine.run("mount").text, str(path))
    return type_in_mounts(machine.read("/proc/self/mounts") or "", os.path.realpath(path))


def type_in_mounts(text: str, path: str) -> str:
    """From Linux' ``/proc/self/mounts``: device, place, type, options."""
    best, kind = "", ""
    for line in text.splitlines():
        parts = line.split()
        if len(parts) > 2 and _is_under(path, parts[1]) and len(parts[1]) >= len(best):
            best, kind = parts[1], parts[2]
    return kind


def type_in_mounts_of_mac(text: str, path: str) -> str:
    """From macOS' ``mount``: ``/dev/disk3s5 on /System/Volumes/Data (apfs, local, ...)``."""
    best, kind = "", ""
    for line in text.splitlines():
        _, _, rest = line.partition(" on ")
        place, _, options = rest.rpartition(" (")
        if place and _is_under(path, place) and len(place) >= len(best):
            best, kind = place, options.split(",")[0].rstrip(")")
    return kind


def _is_under(path: str, place: str) -> bool:
    return place == "/" or path == place or path.startswith(place.rstrip("/") + "/")


CHECKS = (
    Check("home folder", home_facts, judge_home),
    Check("model disk", model_disk_facts, judge_model_disk),
)

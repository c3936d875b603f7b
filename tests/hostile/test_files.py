"""Foreign files in place of batchkv's: in the disk tier, in the home, as secrets."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from batchkv_cache_store import opening
from batchkv_cache_store.blocks.names import block_name
from batchkv_cache_store.errors import TierError
from batchkv_cache_store.tiers.disk import DiskTier
from batchkv_producer.errors import BatchkvError, UsageError
from batchkv_producer.server import connection
from batchkv_producer.server import embedded as server
from batchkv_producer.server.home import Home
from cache_store.blocks import encoded, make_block
from hostile.traps import batchkv

MIB = 2**20
BLOCK = make_block()
NAME = block_name(BLOCK.key, BLOCK.kind)
DATA = encoded(BLOCK)
PRECIOUS = b"precious" * 1000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tier's folder with one block in it."""
    DiskTier(tmp_path / "blocks", 4 * MIB).put(NAME, [DATA])
    return tmp_path / "blocks"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Another user's file, which must not be changed or removed."""
    path = tmp_path / "foreign"
    path.write_bytes(PRECIOUS)
    return path


def place_of(root: Path) -> Path:
    return root / "blocks-1" / NAME[0] / NAME[1] / NAME


def walk_all(tier: DiskTier) -> None:
    """All calls that read a folder or remove from it."""
    tier.contains_many([NAME])
    tier.get_many([NAME])
    tier.get_heads([NAME], 10)
    list(tier.iter_names())
    tier.stats()
    tier.pin([NAME])
    tier.unpin([NAME])
    tier.sweep()


@pytest.mark.parametrize("kind", ["link", "folder link", "fifo", "folder", "device", "socket"])
def test_what_is_no_file_in_a_blocks_place_is_a_miss(root: Path, foreign: Path, kind: str) -> None:
    """A foreign object is not followed and not waited for, and a link's target does not change."""
    place = place_of(root)
    place.unlink()
    match kind:
        case "link":
            place.symlink_to(foreign)
        case "folder link":
            place.symlink_to(foreign.parent)
        case "fifo":
            os.mkfifo(place)
        case "folder":
            place.mkdir()
        case "device":
            place.symlink_to("/dev/zero")
        case _:
            short = contextlib.chdir(place.parent)  # a socket's path must be
            with socket.socket(socket.AF_UNIX) as listener, short:
                listener.bind(NAME)
    tier = DiskTier(root, 4 * MIB)
    assert not tier.contains_many([NAME])
    try:
        assert not tier.get_many([NAME]).get(NAME)
        walk_all(tier)
    except TierError:
        pass  # named, and the store goes on without the tier
    assert foreign.read_bytes() == PRECIOUS


@pytest.mark.parametrize(
    "folder",
    [
        "blocks-1",
        f"blocks-1/{NAME[0]}",
        f"blocks-1/{NAME[0]}/{NAME[1]}",
        "temporary",
        "aside",
        "pins",
    ],
)
def test_what_a_folder_link_leads_to_is_not_ours(root: Path, tmp_path: Path, folder: str) -> None:
    """One of the tier's own folders is a link: nothing is read, evicted or written there."""
    elsewhere = tmp_path / "elsewhere"
    (root / folder).rename(elsewhere)
    (root / folder).symlink_to(elsewhere)

    (elsewhere / NAME).write_bytes(PRECIOUS)
    before = contents(elsewhere)
    tier = DiskTier(root, 4096)  # less than what lies there: at the start there is too much
    if folder.startswith("blocks"):
        assert not tier.get_many([NAME]) and not tier.contains_many([NAME])
    other = NAME[:2] + "0" * 62 + NAME[64:]
    uses = [lambda: walk_all(tier), lambda: tier.put(NAME, [DATA]), lambda: tier.put(other, [DATA])]
    for use in [*uses, lambda: tier.set_aside(NAME), lambda: tier.delete(NAME), tier.sweep]:
        with suppress(TierError):  # named, and the store goes on without the tier
            use()
    assert contents(elsewhere) == before


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All files below, with their contents and times of use."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_hard_link_is_never_written_to(root: Path, foreign: Path) -> None:
    """Another user's file under a block's name is refused by its seal and never changed."""
    place = place_of(root)
    place.unlink()
    place.hardlink_to(foreign)
    tier = DiskTier(root, 4 * MIB)
    tier.put(NAME, [DATA])
    walk_all(tier)
    tier.set_aside(NAME)
    tier.put(NAME, [DATA])
    tier.delete(NAME)
    assert foreign.read_bytes() == PRECIOUS
    assert foreign.stat().st_nlink == 2  # what was set aside


def test_a_planted_ledger_is_not_followed(root: Path, foreign: Path) -> None:
    """With a link in place of the ledger, the tier fails, and the link's target stays whole."""
    (root / "usage").unlink()
    (root / "usage").symlink_to(foreign)
    with pytest.raises(TierError, match=r"cannot be used|symbolic"):
        DiskTier(root, 4 * MIB).check()
    assert foreign.read_bytes() == PRECIOUS
    guest = DiskTier(root, 4 * MIB, is_guest=True)
    assert guest.stats().num_evicted == 0
    assert foreign.read_bytes() == PRECIOUS


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_ledger_that_is_no_file_is_told(root: Path, kind: str) -> None:
    """A pipe is not waited for; the error names the folder."""
    (root / "usage").unlink()
    os.mkfifo(root / "usage") if kind == "fifo" else (root / "usage").mkdir()
    with pytest.raises(TierError, match=str(root)):
        DiskTier(root, 4 * MIB).check()
    DiskTier(root, 4 * MIB, is_guest=True).stats()


@pytest.mark.parametrize(
    "text", [b"9" * 60, b"-5\n-5", b"\xff" * 60, b"", b"nan\nnan", b"1e400", "٣٣".encode()]
)
def test_a_ledger_that_lies_is_counted_anew(root: Path, text: bytes) -> None:
    """With any content of the ledger, the cap holds and blocks are put."""
    (root / "usage").write_bytes(text)
    tier = DiskTier(root, 4 * MIB)
    tier.delete(NAME)
    assert str(tier.put(NAME, [DATA])) == "stored"
    assert tier.stats().num_bytes < MIB


def test_a_planted_temporary_is_not_followed(root: Path, foreign: Path) -> None:
    """A link in place of a temporary file is not followed."""
    tier = DiskTier(root, 4 * MIB)
    tier.delete(NAME)
    room = -(-len(DATA) // 4096) * 4096
    for number in range(5):
        planted = root / "temporary" / f"{NAME}.{os.getpid()}.{number}.{room}"
        planted.symlink_to(foreign)
    assert str(tier.put(NAME, [DATA])) == "stored"
    assert foreign.read_bytes() == PRECIOUS
    assert place_of(root).read_bytes() == DATA and not place_of(root).is_symlink()


@pytest.mark.parametrize("age", [0, 10**6])
def test_foreign_files_are_counted_and_left(root: Path, foreign: Path, age: int) -> None:
    """Files of any name in every folder, links and pipes among them, survive start and sweep."""
    planted = []
    for folder in ("", "temporary", "aside", "pins", "blocks-1", "blocks-1/a", "blocks-1/a/b"):
        here = root / folder
        here.mkdir(exist_ok=True)
        for name in ("notes.txt", "\x1b[31m", f"{NAME}.1.1.²", "x" * 200, ".hidden"):
            (here / name).write_text("mine")
            planted.append(here / name)
        (here / "pipe").parent.mkdir(exist_ok=True)
        os.mkfifo(here / "pipe")
        (here / "away").symlink_to(foreign.parent)
        planted += [here / "pipe", here / "away"]
    (root / "temporary" / f"{NAME}.1.1.4096").mkdir()
    planted.append(root / "temporary" / f"{NAME}.1.1.4096")
    for path in planted:
        os.utime(path, (time.time() - age,) * 2, follow_symlinks=False)
    tier = DiskTier(root, 4 * MIB)
    walk_all(tier)
    assert all(path.exists() or path.is_symlink() for path in planted)
    assert tier.stats().num_foreign >= len(planted)
    assert tier.get_many([NAME]) == {NAME: DATA}
    assert foreign.read_bytes() == PRECIOUS


def test_a_fan_out_folder_that_leads_away_is_not_evicted_from(root: Path, tmp_path: Path) -> None:
    """A link among the folders of blocks is foreign: its target is not listed or changed."""
    away = tmp_path / "away" / "e"
    away.mkdir(parents=True)
    theirs = away / ("ee" + "0" * 62 + ".kv")
    theirs.write_bytes(PRECIOUS)
    shutil.rmtree(root / "blocks-1" / "e", ignore_errors=True)
    (root / "blocks-1" / "e").symlink_to(away.parent)
    tier = DiskTier(root, 4096)  # everything of ours has to go
    assert theirs.name not in [entry.name for entry in tier.iter_names()]
    assert theirs.read_bytes() == PRECIOUS


def test_a_disk_tiers_folders_are_closed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are private: only the owner has access to folders and blocks."""
    monkeypatch.setenv("HOME", str(tmp_path))  # only there those above are made
    DiskTier(tmp_path / "new" / "deep" / "blocks", 4 * MIB).put(NAME, [DATA])
    for path in [root, *root.rglob("*"), tmp_path / "new", *(tmp_path / "new").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


# -- the home of the embedded server --------------------------------------------------------------


@pytest.fixture
def home() -> Iterator[Home]:
    folder = Path(tempfile.mkdtemp(prefix="bkv-", dir="/tmp"))
    yield Home(folder)
    folder.chmod(0o700)
    server.stop(Home(folder))
    shutil.rmtree(folder)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755, 0o711, 0o750, 0o705, 0o1777])
@pytest.mark.parametrize("folder", [".", "data", "logs"])
def test_a_home_that_is_open_to_others_is_refused(home: Home, mode: int, folder: str) -> None:
    """A home that others may write, read or enter is refused with chmod 700; no server starts."""
    for name in ("data", "logs"):
        (home.path / name).mkdir(mode=0o700)
    (home.path / folder).chmod(mode)
    with pytest.raises(UsageError, match=r"by other users.*chmod 700"):
        server.ensure_running(home)
    assert not home.socket.exists()


@pytest.mark.parametrize("kind", ["file", "link to nothing", "fifo"])
def test_a_home_that_is_no_folder_is_refused(tmp_path: Path, kind: str) -> None:
    """The error is one sentence that names the path and the variable."""
    path = tmp_path / "odd"
    match kind:
        case "file":
            path.write_text("x")
        case "fifo":
            os.mkfifo(path)
        case _:
            path.symlink_to(tmp_path / "nowhere" / "at" / "all")
    found = batchkv("server", "start", BATCHKV_HOME=str(path))
    assert found.exit_code == 2 and str(path) in found.stderr and "BATCHKV_HOME" in found.stderr


def test_an_embedded_server_is_the_owners_alone(home: Home) -> None:
    """Other users can open neither socket, data, log nor lock, and no port listens."""
    server.ensure_running(home)
    with server.client_of(home) as asked:
        asked.set("k", "v")
        assert asked.config_get("port")["port"] == "0"
        assert asked.config_get("unixsocketperm")["unixsocketperm"] == "700"
    for path in [home.path, *home.path.rglob("*")]:
        assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0, path


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_cannot_reach_the_socket(home: Home) -> None:
    """The file system refuses another user's process before it reaches the server."""
    server.ensure_running(home)
    script = (
        f"import os, socket\nos.setgid(65534); os.setuid(65534)\n"
        f"s = socket.socket(socket.AF_UNIX)\ntry:\n    s.connect({str(home.socket)!r})\n"
        f"except PermissionError:\n    print('refused')\n"
    )
    import subprocess
    import sys

    # The interpreter itself may lie where nobody else may look: it is imported before.
    ran = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True)
    assert ran.stdout.strip() == "refused", ran.stderr


def test_a_planted_pid_ends_no_process(home: Home) -> None:
    """`server stop` trusts no pid file in a folder that others may write; else it checks it."""
    victim = os.getpid()
    (home.path / "server.pid").write_text(str(victim))
    assert server.stop(home) is False  # nobody holds the lock
    home.path.chmod(0o777)
    with pytest.raises(UsageError, match="chmod 700"):
        server.stop(home)


# -- files with secrets ---------------------------------------------------------------------------

URL = "redis://worker:hidden-password@h:1/0"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o602, 0o620, 0o666])
def test_a_url_file_that_others_may_open_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """A file with a password must be closed to others; the error repeats no part of it."""
    path = tmp_path / "url"
    path.write_text(URL)
    path.chmod(mode)
    monkeypatch.setenv("BATCHKV_REDIS_URL_FILE", str(path))
    with pytest.raises(UsageError, match="chmod 600") as caught:
        connection.resolve_url(None)
    assert "hidden" not in str(caught.value)
    path.write_text("redis://h:1/0")
    if mode & 0o022:
        with pytest.raises(UsageError, match="chmod 600"):
            connection.resolve_url(None)
    else:
        assert connection.resolve_url(None) == "redis://h:1/0"


@pytest.mark.parametrize(
    "variable", ["BATCHKV_CACHE", "BATCHKV_CACHE_SECRET", "BATCHKV_CACHE_SALT"]
)
def test_cache_files_that_others_may_open_are_refused(tmp_path: Path, variable: str) -> None:
    """Tiers with a password, the secret and the salt are read from closed files only."""
    path = tmp_path / "secret"
    path.write_text("redis://cache:hidden-password@h:1/0")
    read = {
        "BATCHKV_CACHE": opening.read_cache,
        "BATCHKV_CACHE_SECRET": opening.read_secret,
        "BATCHKV_CACHE_SALT": opening.read_salt,
    }[variable]
    for mode in (0o644, 0o640, 0o602):
        path.chmod(mode)
        with pytest.raises(ValueError, match="chmod 600") as caught:
            read({f"{variable}_FILE": str(path)})
        assert "hidden" not in str(caught.value)
    path.chmod(0o600)
    assert read({f"{variable}_FILE": str(path)})


@pytest.mark.parametrize("kind", ["fifo", "endless", "folder", "binary", "empty"])
def test_a_url_file_that_is_none_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A folder, an endless device or bytes in place of the file give one sentence with its name."""
    path = tmp_path / "url"
    match kind:
        case "fifo":
            os.mkfifo(path, 0o600)
            threading.Thread(target=path.write_bytes, args=(b"",), daemon=True).start()
        case "endless":
            path = Path("/dev/zero")
        case "folder":
            path.mkdir()
        case "binary":
            path.write_bytes(b"\xff\xfe\x00")
            path.chmod(0o600)
        case _:
            path.touch(0o600)
    monkeypatch.setenv("BATCHKV_REDIS_URL_FILE", str(path))
    with pytest.raises(BatchkvError):
        url = connection.resolve_url(None)
        connection.connect(url)

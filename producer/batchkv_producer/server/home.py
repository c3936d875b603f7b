"""The home folder of the embedded server: its paths, and its permissions."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from batchkv_producer.disk import full_home, is_full
from batchkv_producer.errors import UsageError

HOME_VARIABLE = "BATCHKV_HOME"
MAX_SOCKET_PATH_BYTES = 103  # macOS allows 104 with the closing NUL, Linux 108
_UNQUOTABLE = re.compile(r"[%#?\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Home:
    """The paths in a home folder. They need not exist."""

    path: Path

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def log(self) -> Path:
        return self.logs / "server.log"

    @property
    def pid_file(self) -> Path:
        return self.path / "server.pid"

    @property
    def socket(self) -> Path:
        """In the home folder; if its path is too long, in a folder of /tmp named by its hash."""
        socket = self.path / "redis.sock"
        if len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES:
            return socket
        digest = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:12]
        return Path(f"/tmp/batchkv-{os.getuid()}-{digest}") / "redis.sock"

    @property
    def url(self) -> str:
        """The socket's URL. Characters with a meaning in URLs (``%``, ``#``, ``?``) are quoted."""
        return "unix://" + _UNQUOTABLE.sub(lambda found: quote(found[0]), str(self.socket))


def home_from_environment() -> Home:
    """The home folder that ``BATCHKV_HOME`` names, or ``~/.batchkv``."""
    value = os.environ.get(HOME_VARIABLE)
    if value:
        return Home(Path(value).expanduser().absolute())
    try:
        return Home(Path.home() / ".batchkv")
    except RuntimeError as fault:
        raise UsageError(
            f"there is no home folder here: set {HOME_VARIABLE} to a folder"
        ) from fault


def make_folders(home: Home) -> None:
    """Create the home folder and the folders in it, for its owner only.

    Raises FullHomeError if the disk is full, UsageError if a folder cannot be made or other users
    may open it.
    """
    try:
        home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_foreign(home.path)
        for folder in (home.data, home.logs, home.socket.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as fault:
        if is_full(fault):
            raise full_home(home.path, str(fault.strerror)) from fault
        problem = fault.strerror or fault
        raise UsageError(
            f"cannot make {fault.filename or home.path}: {problem}. "
            f"Set {HOME_VARIABLE} to a folder that you can write"
        ) from fault
    for folder in (home.path, home.data, home.logs, home.socket.parent):
        refuse_foreign(folder)


def refuse_foreign(folder: Path) -> None:
    """Raise UsageError if another user owns the folder or may open it.

    A socket in it could be another user's, and a user who reaches the socket can read every prompt.
    """
    found = folder.lstat() if folder.parent == Path("/tmp") else folder.stat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise UsageError(f"{folder} is not a folder of yours. Set {HOME_VARIABLE} to another one")
    if found.st_mode & 0o077:
        verb = "written" if found.st_mode & 0o022 else "opened"
        raise UsageError(
            f"{folder} can be {verb} by other users. Run `chmod 700 {folder}` "
            f"or set {HOME_VARIABLE} to another one"
        )

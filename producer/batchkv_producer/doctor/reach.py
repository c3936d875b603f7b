"""Connects to one address: from here, or as a program that launchd runs.

``python -m batchkv_producer.doctor.reach HOST PORT FILE`` writes what came of it into FILE, as
JSON. Only a host and a port are given to it, never a password.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

CONNECT_SECONDS = 3.0
DEFAULT_PORT = 6379


@dataclass(frozen=True, slots=True)
class Reached:
    """``error`` is 0, or the number that the system gives; ``resolved``: the name has an address.

    ``number_name`` such as EHOSTUNREACH: numbers differ between systems.
    """

    error: int = 0
    number_name: str = ""
    resolved: bool = True
    milliseconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether there was a connection."""
        return self.resolved and not self.error

    @property
    def is_denied(self) -> bool:
        """Whether it failed as macOS' Local Network privacy makes it fail."""
        return self.number_name == "EHOSTUNREACH" or not self.resolved


def address_of(url: str) -> tuple[str, int] | None:
    """Host and port of a URL of Redis; None for a socket, and for what is no URL."""
    try:
        split = urlsplit(url)
        host, port = split.hostname, split.port
    except ValueError:
        return None
    if split.scheme not in ("redis", "rediss") or not host:
        return None
    return host, port or DEFAULT_PORT


def reach(host: str, port: int, seconds: float = CONNECT_SECONDS) -> Reached:
    """Resolve the name, connect, and let go again. Never raises."""
    began = time.monotonic()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return Reached(resolved=False)
    number = errno.ENOENT
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as connection:
                connection.settimeout(seconds)
                connection.connect(address)
            return Reached(milliseconds=(time.monotonic() - began) * 1000)
        except TimeoutError:
            number = errno.ETIMEDOUT
        except OSError as fault:
            number = fault.errno or errno.EIO
    return Reached(number, errno.errorcode.get(number, ""))


def read_reached(text: str) -> Reached | None:
    """What the program wrote; None if that cannot be read."""
    try:
        values = json.loads(text)
        return Reached(
            int(values["error"]),
            str(values["number_name"]),
            bool(values["resolved"]),
            float(values["milliseconds"]),
        )
    except (ValueError, TypeError, KeyError):
        return None


def main(arguments: list[str]) -> int:
    """Connect, and write the outcome at once or not at all."""
    host, port, name = arguments
    place = Path(name)
    new = place.with_name(place.name + ".new")
    new.write_text(json.dumps(asdict(reach(host, int(port)))), "utf-8")
    os.replace(new, place)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

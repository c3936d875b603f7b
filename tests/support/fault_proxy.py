"""A TCP proxy in front of a server that does to the bytes what bad networks do.

One thread a direction of each connection. What the proxy does is said by its ``Link``, which may be
changed at any moment and holds for all connections::

    with FaultProxy(server.socket) as proxy:
        Redis.from_url(proxy.url)
        proxy.link = Link(delay_seconds=0.02, jitter_seconds=0.01)
        proxy.hang()                # a black hole: connections stay open, nothing passes
        proxy.heal()
        proxy.cut_replies(after_bytes=100)
"""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

CHUNK_BYTES = 16 * 1024
TICK_SECONDS = 0.01
SEND_SECONDS = 10.0  # a peer that reads nothing for so long is cut off


@dataclass(frozen=True, slots=True)
class Link:
    """What a line is like. Delay and jitter are for each piece in each direction, seconds."""

    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    bytes_per_second: float | None = None
    is_hung: bool = False  # nothing passes, in either direction; connections are still accepted
    is_deaf: bool = False  # half open: requests pass, replies do not


class FaultProxy:
    """Listens on a port of its own on this machine. ``seed`` is that of the jitter."""

    def __init__(self, upstream: Path, seed: int = 0) -> None:
        self._upstream = upstream
        self._random = random.Random(seed)
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._reply_bytes: int | None = None  # after so many more bytes of replies: a cut
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.link = Link()
        self.num_cuts = 0
        self.num_connections = 0

    @property
    def url(self) -> str:
        """What a client connects to."""
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def hang(self) -> None:
        """A black hole: no byte passes and nothing is closed, until ``heal``."""
        self.link = replace(self.link, is_hung=True)

    def deafen(self) -> None:
        """Half open: what clients say arrives, what the server answers is kept until ``heal``."""
        self.link = replace(self.link, is_deaf=True)

    def heal(self) -> None:
        """A good line again; what was held up arrives now, as it does in TCP."""
        self.link = Link()

    def reset(self) -> None:
        """Reset all connections, with RST."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _abort(*pair)
        self.num_cuts += len(pairs)

    def cut_replies(self, after_bytes: int) -> None:
        """Reset the connection whose reply has the byte after so many: in the middle of it."""
        with self._lock:
            self._reply_bytes = after_bytes

    def __enter__(self) -> Self:
        self._begin(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self.reset()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _begin(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            if not select.select([self._listener], [], [], TICK_SECONDS)[0]:
                continue
            client, _ = self._listener.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(str(self._upstream))
            except OSError:
                _abort(client, server)
                continue
            for one in (client, server):
                one.settimeout(SEND_SECONDS)
            self.num_connections += 1
            with self._lock:
                self._pairs.append((client, server))
            self._begin(self._carry, client, server, False)
            self._begin(self._carry, server, client, True)

    def _carry(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        """Pass on what comes, until one side is gone; then the other goes too."""
        try:
            while not self._is_over.is_set():
                if not select.select([source], [], [], TICK_SECONDS)[0]:
                    continue
                data = source.recv(CHUNK_BYTES)
                if not data:
                    break
                self._hold_up(len(data), is_reply)
                is_last = False
                if is_reply:
                    data, is_last = self._before_a_cut(data)
                target.sendall(data)
                if is_last:
                    break
        except (OSError, ValueError):
            pass  # reset by one side, or by us
        self._drop(source, target)

    def _before_a_cut(self, data: bytes) -> tuple[bytes, bool]:
        """(what may pass, whether the connection is cut after it)."""
        with self._lock:
            if self._reply_bytes is None or len(data) <= self._reply_bytes:
                if self._reply_bytes is not None:
                    self._reply_bytes -= len(data)
                return data, False
            passed = data[: self._reply_bytes]
            self._reply_bytes = None
            self.num_cuts += 1
            return passed, True

    def _hold_up(self, num_bytes: int, is_reply: bool) -> None:
        link = self.link
        seconds = link.delay_seconds + self._random.uniform(0, link.jitter_seconds)
        if link.bytes_per_second:
            seconds += num_bytes / link.bytes_per_second
        if seconds:
            time.sleep(seconds)
        while self.link.is_hung or (is_reply and self.link.is_deaf):
            if self._is_over.wait(TICK_SECONDS):
                return

    def _drop(self, *pair: socket.socket) -> None:
        with self._lock:
            self._pairs = [other for other in self._pairs if pair[0] not in other]
        _abort(*pair)


def _abort(*sockets: socket.socket) -> None:
    """Close with RST, so that nobody waits for what was on its way."""
    for one in sockets:
        with suppress(OSError):
            if one.family != socket.AF_UNIX:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.shutdown(socket.SHUT_RDWR) if one.family == socket.AF_UNIX else None
        with suppress(OSError):
            one.close()

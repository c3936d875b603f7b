"""A proxy in front of an HTTP server that fails in the ways of real networks and real servers.

A fault is for one request: the next one of a method and a path. All other requests pass::

    with HttpFaults(gateway.port) as proxy:
        proxy.plan("POST", "/v1/batches", Fault("lost"))
        OpenAI(base_url=proxy.url, ...).batches.create(...)

It needs nothing but the standard library, because clients in environments of their own use it.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

PIECE_BYTES = 2**16
CALL_SECONDS = 30.0

Kind = Literal["unsent", "lost", "cut", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one request.

    ======== ==============================================================================
    unsent   the connection is reset, and the server never gets the request
    lost     the server carries the request out, and the connection is reset before its answer
    cut      so does the server, and the connection is reset in the middle of its answer
    refused  the server never gets it: the client gets ``status``, with Retry-After if it is given
    failed   the server carries it out, and the client gets ``status``
    ======== ==============================================================================
    """

    kind: Kind
    status: int = 500
    retry_after: str = ""


class HttpFaults:
    """Listens on a port of its own on this machine; ``port`` is the server's."""

    def __init__(self, port: int) -> None:
        self._upstream = ("127.0.0.1", port)
        self._planned: list[tuple[str, str, Fault]] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self.num_faults = 0

    @property
    def url(self) -> str:
        """The base URL for clients."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    def plan(self, method: str, path: str, *faults: Fault) -> None:
        """These faults are for the next requests of this method whose path matches, one each."""
        with self._lock:
            self._planned += [(method, path, fault) for fault in faults]

    @property
    def is_done(self) -> bool:
        """Whether each planned fault has happened."""
        with self._lock:
            return not self._planned

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.settimeout(CALL_SECONDS)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One request of a connection, which then ends."""
        with client, suppress(OSError, ValueError):
            head, rest = _until(client, b"", b"\r\n\r\n")
            if not head:
                return
            fault = self._fault_of(head)
            kind = fault.kind if fault else ""
            body = _body(client, head, rest)
            if kind in ("", "lost", "cut", "failed"):
                with socket.create_connection(self._upstream, CALL_SECONDS) as server:
                    server.sendall(_closing(head) + body)
                    if not fault:
                        _pass_on(server, client)
                        return
                    answer = b"".join(iter(lambda: server.recv(PIECE_BYTES), b""))
                if kind == "cut":
                    client.sendall(answer[: _half(answer)])
            if fault and kind in ("refused", "failed"):
                client.sendall(_own_answer(fault))
            else:
                _reset(client)

    def _fault_of(self, head: bytes) -> Fault | None:
        method, path, _ = head.decode("latin-1").split("\r\n", 1)[0].split(" ", 2)
        with self._lock:
            for planned in self._planned:
                if planned[0] == method and re.fullmatch(planned[1], path.partition("?")[0]):
                    self._planned.remove(planned)
                    self.num_faults += 1
                    return planned[2]
        return None


def _until(source: socket.socket, found: bytes, end: bytes) -> tuple[bytes, bytes]:
    """(the bytes up to ``end`` and with it, those after it); both are empty if there is no end."""
    while end not in found:
        piece = source.recv(PIECE_BYTES)
        if not piece:
            return b"", b""
        found += piece
    at = found.index(end) + len(end)
    return found[:at], found[at:]


def _body(client: socket.socket, head: bytes, rest: bytes) -> bytes:
    """The whole body of a request."""
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    if re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head):
        whole, _ = _until(client, b"\r\n" + rest, b"\r\n0\r\n\r\n")
        return whole[2:]
    pieces, missing = [rest], int(length[1]) - len(rest) if length else 0
    while missing > 0:
        pieces.append(client.recv(PIECE_BYTES))
        if not pieces[-1]:
            raise OSError("the client left")
        missing -= len(pieces[-1])
    return b"".join(pieces)


def _closing(head: bytes) -> bytes:
    """The head of the request, for a connection that ends after its answer."""
    head = re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", head)
    return head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)


def _pass_on(server: socket.socket, client: socket.socket) -> None:
    """Pass an answer on, piece by piece as it comes."""
    while piece := server.recv(PIECE_BYTES):
        client.sendall(piece)


def _half(answer: bytes) -> int:
    """So many bytes of an answer are its head and half of its body."""
    start = answer.find(b"\r\n\r\n") + 4
    return start + (len(answer) - start) // 2


def _own_answer(fault: Fault) -> bytes:
    body = b'{"error":{"message":"made by a test","type":"server_error","param":null,"code":null}}'
    lines = [f"HTTP/1.1 {fault.status} Fault", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"Retry-After: {fault.retry_after}"] if fault.retry_after else []
    return "\r\n".join([*lines, "", ""]).encode() + body


def _reset(client: socket.socket) -> None:
    """Close with RST."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

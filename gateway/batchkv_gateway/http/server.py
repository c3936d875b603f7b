"""The server: uvicorn, with bounds on connections and on the time until a request is complete."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from batchkv_gateway.http.errors import error_body, new_request_id
from batchkv_gateway.http.limits import MAX_HEADER_BYTES
from batchkv_gateway.settings import GatewaySettings
from batchkv_gateway.stopping import Stopping
from batchkv_producer.errors import UsageError

MAX_CONNECTIONS = 1024
OPEN_FILES = 2048  # connections, and files; macOS allows 256 unless a process asks for more
HEADER_SECONDS = 10.0  # until a connection's next request has all its headers
KEEP_ALIVE_SECONDS = 30
STOP_SECONDS = 10
BACKLOG = 512  # connections that come at once; systems may cap it


class Protocol(H11Protocol):
    """uvicorn's connection that ends when its first request does not come in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection. It is closed at once if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.close()
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request. The time runs from its first byte until its headers are complete."""
        if self._timer is None and self.conn.their_state is h11.IDLE:
            self._watch()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._unwatch()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in the shape of all errors, and close."""
        self._unwatch()
        body = error_body(400, msg, "invalid_http")
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(body)).encode()))
        headers.append((b"x-request-id", new_request_id().encode()))
        try:
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # an answer was under way
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing. Java's client offers HTTP/2 with each request, and takes HTTP/1.1."""

    def _watch(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """uvicorn's server that says when it listens, and when it stops."""

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], stopping: Stopping
    ) -> None:
        super().__init__(config)
        self._on_ready, self._stopping = on_ready, stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop to accept connections, and wait for the requests that run."""
        self._stopping.begin()
        await super().shutdown(sockets)


def listening_socket(settings: GatewaySettings) -> socket.socket:
    """A socket on the settings' address. Raises UsageError if it cannot be had."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as unless_listening:
            # With the protocol named, asyncio sends small pieces at once (TCP_NODELAY). Else each
            # answer after the first of a connection waits 40 ms for an acknowledgement.
            found = unless_listening.enter_context(
                socket.socket(kind, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            )
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(BACKLOG)
            unless_listening.pop_all()
    except OSError as fault:
        raise UsageError(
            f"cannot listen on {settings.host} port {settings.port}: {fault.strerror or fault}. "
            "Choose another --host or --port"
        ) from fault
    return found


def _allow_open_files() -> None:
    """Raise the limit of open files, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextmanager
def _terminated_in_order() -> Iterator[None]:
    """Let SIGTERM end the serving alone: what comes after it still runs.

    uvicorn raises the signal again when it has stopped, which would end the process at once. A
    second signal, after the block, does so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def serve(
    app: ASGIApp,
    settings: GatewaySettings,
    stopping: Stopping,
    on_ready: Callable[[str], None],
) -> None:
    """Serve until a signal ends it. ``on_ready`` gets the base URL when requests are accepted."""
    tls: dict[str, Any] = {}
    if settings.tls_cert:
        tls = {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key}
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        **tls,
    )
    _allow_open_files()
    try:
        config.load()
    except OSError as fault:  # also ssl.SSLError
        raise UsageError(f"--tls-cert and --tls-key cannot be used: {fault}") from fault
    with listening_socket(settings) as listening, _terminated_in_order():
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"{'https' if tls else 'http'}://{shown}:{port}/v1"
        Server(config, lambda: on_ready(url), stopping).run(sockets=[listening])

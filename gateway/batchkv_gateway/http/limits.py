"""What a request may be before anything reads it: its host, its origin, its size, its pace."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

from redis.exceptions import RedisError
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchkv_gateway.errors import (
    FORBIDDEN,
    LONG_HEADERS,
    TIMED_OUT,
    TOO_LARGE,
    UNAVAILABLE,
    UNSUPPORTED,
    ApiError,
    invalid,
)
from batchkv_gateway.http.errors import error_response, new_request_id, queue_unavailable
from batchkv_gateway.http.sites import Sender, preflight_headers, sender_of
from batchkv_producer.intake.formats import MAX_LINE_BYTES

MAX_REQUESTS = 512  # at once
MAX_HEADERS = 100
MAX_HEADER_BYTES = 2**14  # with the path
MAX_BODY_BYTES = 2**20  # of a request that is neither an upload nor a call
MAX_CALL_BYTES = MAX_LINE_BYTES  # of a call: what a line of a file may have
MAX_CALLS_BYTES = 2**28  # of all bodies of calls together, beyond ``MAX_BODY_BYTES`` of each
FORM_BYTES = 2**16  # of an upload, besides its file
DRAIN_BYTES = 2**26  # of a body that is too large: read and dropped, so that the answer arrives
PIECE_SECONDS = 30.0  # between two pieces of a body
GRACE_SECONDS = 30.0
MIN_BYTES_PER_SECOND = 4096  # on average, after the grace
SEND_SECONDS = 60.0  # until a client has read a piece of the answer
CALLS = ("/v1/chat/completions", "/v1/completions")
UPLOADS = re.compile(r"/v1/files/?|/batchkv/v1/batches(/[^/]+/retry)?/?")


def own_names(more: Iterable[str]) -> frozenset[str]:
    """The names by which clients may call this machine, in lower case."""
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return frozenset({"localhost", name, short, f"{short}.local", *(each.lower() for each in more)})


def is_known_host(value: str, names: frozenset[str]) -> bool:
    """Whether a Host header names this machine: by an address, or by one of its names.

    A page of another site whose name is bound to this machine's address (DNS rebinding) sends that
    site's name.
    """
    if any(char in value for char in "@/\\?# \t,"):
        return False
    try:
        host = urlsplit(f"//{value}")
        name, _ = (host.hostname or "").rstrip("."), host.port
    except ValueError:
        return False
    if name in names:
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


class Limits:
    """The outermost part of the application. What it refuses reaches nothing else."""

    def __init__(
        self,
        app: ASGIApp,
        names: frozenset[str],
        max_file_bytes: int,
        origins: frozenset[str] = frozenset(),
    ) -> None:
        self._app, self._names, self._max_file_bytes = app, names, max_file_bytes
        self._origins = origins
        self._num_requests = 0
        self._room = _Room(MAX_CALLS_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._most_bytes(scope)
        room = self._room if scope["path"] in CALLS else None
        request_id = new_request_id()
        body, answer = _Body(receive, most, room), _Answer(send, request_id)
        self._num_requests += 1
        try:
            sender = self._check(scope, most)
            answer.more, answer.is_last = sender.headers(), False
            state = scope.setdefault("state", {})
            state |= {"is_cross_origin": bool(sender.origin), "request_id": request_id}
            if sender.is_preflight:
                answer.more += preflight_headers(_values(scope))
                await Response(status_code=204)(scope, receive, answer.send)
            else:
                await self._app(scope, body.receive, answer.send)
        except ApiError as fault:
            await error_response(fault)(scope, receive, answer.send)
        except RedisError as fault:  # while the key was looked up
            await queue_unavailable(fault)(scope, receive, answer.send)
        finally:
            self._num_requests -= 1
            body.leave_room()

    def _most_bytes(self, scope: Scope) -> int:
        """How large the body of a request may be."""
        if scope["method"] == "POST" and UPLOADS.fullmatch(scope["path"]):
            return self._max_file_bytes + FORM_BYTES
        return MAX_CALL_BYTES if scope["path"] in CALLS else MAX_BODY_BYTES

    def _check(self, scope: Scope, max_bytes: int) -> Sender:
        if self._num_requests > MAX_REQUESTS:
            raise ApiError(UNAVAILABLE, "too many requests at once: try again", code="busy")
        _refuse_long_headers(scope)
        values = _values(scope)
        hosts = [value.decode("latin-1") for value in values.get(b"host", [])]
        if len(hosts) != 1 or not is_known_host(hosts[0], self._names):
            raise ApiError(
                FORBIDDEN,
                "this gateway is not called by that name: use its address, or start it with "
                "--allow-host NAME",
                code="unknown_host",
            )
        sender = sender_of(scope["method"], scope["path"], values, hosts[0], self._origins)
        if b"content-length" in values and b"transfer-encoding" in values:
            raise invalid("a request has one length: Content-Length or Transfer-Encoding")
        if any(value.lower() != b"identity" for value in values.get(b"content-encoding", [])):
            raise ApiError(
                UNSUPPORTED,
                "bodies are not decompressed: send it without Content-Encoding",
                code="unsupported_encoding",
            )
        length = values.get(b"content-length", [b"0"])[0]
        if length.isdigit() and int(length) > max_bytes + DRAIN_BYTES:
            raise _too_large(max_bytes)
        return sender


def _values(scope: Scope) -> dict[bytes, list[bytes]]:
    """The values of each header, by its name in lower case."""
    values: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        values.setdefault(name.lower(), []).append(value)
    return values


def _refuse_long_headers(scope: Scope) -> None:
    """Raise ApiError for headers that came in one piece, which the parser does not measure."""
    headers = scope["headers"]
    num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
    num_bytes += sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES:
        raise ApiError(LONG_HEADERS, "the path or the headers are too long", code="too_large")


class _Room:
    """The memory that the bodies of large calls may have together."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def take(self, num_bytes: int) -> None:
        """Take some. Raises ApiError if there is less."""
        if num_bytes > self._left:
            raise ApiError(UNAVAILABLE, "too many large requests at once: try again", code="busy")
        self._left -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Give some back."""
        self._left += num_bytes


class _Body:
    """Receives a body of bounded size and pace. ``room``: of a call, which is kept in memory."""

    def __init__(self, receive: Receive, max_bytes: int, room: _Room | None) -> None:
        self._receive, self._max_bytes, self._room = receive, max_bytes, room
        self._num_bytes, self._num_taken, self._is_over = 0, 0, False
        self._began = time.monotonic()

    async def receive(self) -> Message:
        """The next message. Raises ApiError for a body that is too large or too slow."""
        if self._is_over:
            return await self._receive()  # waits until the client has left
        message = await self._next()
        if self._num_bytes > self._max_bytes:
            while not self._is_over and self._num_bytes < self._max_bytes + DRAIN_BYTES:
                await self._next()
            raise _too_large(self._max_bytes)
        if self._room is not None:
            more = max(0, self._num_bytes - MAX_BODY_BYTES) - self._num_taken
            self._room.take(more)
            self._num_taken += more
        return message

    def leave_room(self) -> None:
        """The request has ended."""
        if self._room is not None:
            self._room.give_back(self._num_taken)

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout(PIECE_SECONDS):
                message = await self._receive()
        except TimeoutError:
            raise _too_slow() from None
        self._num_bytes += len(message.get("body", b""))
        self._is_over = message["type"] != "http.request" or not message.get("more_body", False)
        seconds = time.monotonic() - self._began - GRACE_SECONDS
        if not self._is_over and seconds > 0 and self._num_bytes < seconds * MIN_BYTES_PER_SECOND:
            raise _too_slow()
        return message


class _Answer:
    """Sends pieces of an answer to a client that reads them in time. ``more`` are headers.

    Each answer names the request's id, which OpenAI's clients show: a call that of its first row.
    ``is_last``: the connection ends, so that what comes after a request that was not understood is
    never read as another one.
    """

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._request_id = send, request_id.encode("ascii")
        self.more: list[tuple[bytes, bytes]] = []
        self.is_last = True  # until the request has passed all checks

    async def send(self, message: Message) -> None:
        """Send a message. TimeoutError, which ends the connection, if the client does not read."""
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", []), *self.more]
            headers.append((b"x-content-type-options", b"nosniff"))
            given = {name.lower() for name, _ in headers}
            if b"x-request-id" not in given:
                headers.append((b"x-request-id", self._request_id))
            if b"cache-control" not in given:
                headers.append((b"cache-control", b"no-store"))
            if self.is_last and b"connection" not in given:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        async with asyncio.timeout(SEND_SECONDS):
            await self._send(message)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(TOO_LARGE, f"the body is larger than {max_bytes:,} bytes", code="too_large")


def _too_slow() -> ApiError:
    return ApiError(TIMED_OUT, "the body comes too slowly: send it again", code="too_slow")


async def read_body(receive_stream: Receive) -> bytes:
    """A whole small body. Raises ApiError if the client leaves."""
    parts = []
    while True:
        message = await receive_stream()
        if message["type"] != "http.request":
            raise invalid("the client left before its request was complete")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)

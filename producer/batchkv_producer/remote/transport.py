"""Requests to a gateway: their errors as sentences, and their repetition while it is away.

Python's own ``http.client`` sends them. So an installation for producers needs no further package,
and a refusal is read although the body was not sent to its end.
"""

from __future__ import annotations

import json
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Protocol
from urllib.parse import urlencode

from batchkv_producer.errors import AwayError, ServerError
from batchkv_producer.remote.address import PREFIX, Address
from batchkv_producer.remote.refusals import refusal
from batchkv_producer.remote.terms import REQUEST_HEADER

CONNECT_SECONDS = 5.0
REPLY_SECONDS = 60.0  # six times the pause between two blank lines of a stream
SUBMIT_SECONDS = 900.0  # the gateway reads and orders all rows before it answers
SLOW_QUERIES = {"facts"}  # the gateway reads all results before it answers
RETRY_SECONDS = 6.0  # enough for a gateway that restarts
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 1.0
MAX_ANSWER_BYTES = 2**28  # of an answer that is no stream
MAX_REFUSAL_BYTES = 2**16
PIECE_BYTES = 2**16
OK = range(200, 300)

Note = Callable[[str], None]


class Body(Protocol):
    """A body of known size that can be sent again."""

    @property
    def num_bytes(self) -> int:
        """The size."""
        ...

    def pieces(self) -> Iterable[bytes]:
        """The bytes, from the beginning."""
        ...


@dataclass(frozen=True, slots=True)
class _Request:
    """``path`` is below the API's prefix. A ``query`` of None is left out."""

    method: str
    path: str
    query: Mapping[str, object] | None = None
    headers: Mapping[str, str] | None = None
    body: Body | None = None


class Transport:
    """Sends requests to one gateway, each on a connection of its own.

    A request is repeated for ``retry_seconds`` while the gateway is away, and ``note`` gets a
    sentence when that begins. Then AwayError is raised. All other faults are raised at once.
    """

    def __init__(self, address: Address, note: Note) -> None:
        self.address = address
        self.retry_seconds = RETRY_SECONDS
        self.note, self._is_away = note, False
        self._tls = address.tls()

    def get(self, path: str, **query: object) -> Any:
        """The JSON of an answer."""
        return self.send("GET", path, query)

    def send(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        *,
        may_repeat: bool = True,
    ) -> Any:
        """The JSON of an answer. ``may_repeat``: a second request of this kind does no harm."""
        request = _Request(method, path, query, headers, body)

        def once() -> Any:
            with self._opened(request) as response:
                return self._json(self._whole(response))

        return self._repeated(once) if may_repeat else once()

    def lines(self, path: str, **query: object) -> Iterator[bytes]:
        """The lines of a stream, without blank ones. AwayError if it is cut off."""
        with self._opened(_Request("GET", path, query)) as response:
            yield from self._lines(response)

    def parsed(self, line: bytes) -> Any:
        """The JSON of a line."""
        return self._json(line)

    def connect(self) -> None:
        """Raise an error, soon, unless a gateway is there that accepts the key."""
        with self._opened(_Request("GET", "server")) as response:
            answer = self._json(self._whole(response))
        if not isinstance(answer, dict) or "memory" not in answer:
            raise no_gateway(self.address)

    @contextmanager
    def _opened(self, request: _Request) -> Iterator[HTTPResponse]:
        """An answer that is no refusal, while it is read."""
        with self._faults():
            connection = self._connection()
        try:
            with self._faults():
                response = self._answer(connection, request)
                if response.status not in OK:
                    raise refusal(self.address, response, response.read(MAX_REFUSAL_BYTES))
            yield response
        finally:
            connection.close()

    # ---- one request ----

    def _connection(self) -> HTTPConnection:
        address = self.address
        host, port = address.proxy or (address.host, address.port)
        found: HTTPConnection
        if self._tls is None:
            found = HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        else:
            found = HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=self._tls)
            if address.proxy:
                found.set_tunnel(address.host, address.port)
        try:
            found.connect()
        except BaseException:
            found.close()
            raise
        return found

    def _answer(self, connection: HTTPConnection, request: _Request) -> HTTPResponse:
        body, asked = request.body, request.query or {}
        target = f"{self.address.root}{PREFIX}/{request.path}"
        given = {name: str(value) for name, value in asked.items() if value is not None}
        target += f"?{urlencode(given)}" if given else ""
        if self.address.proxy and self._tls is None:
            target = f"{self.address.url.removesuffix(self.address.root)}{target}"
        if connection.sock is not None:
            is_slow = body is not None or bool(SLOW_QUERIES & given.keys())
            connection.sock.settimeout(SUBMIT_SECONDS if is_slow else REPLY_SECONDS)
        connection.putrequest(request.method, target, skip_accept_encoding=True)
        for name, value in {**self._headers(), **(request.headers or {})}.items():
            connection.putheader(name, value)
        if request.method != "GET":
            connection.putheader("Content-Length", str(body.num_bytes if body else 0))
        try:
            connection.endheaders()
            for piece in body.pieces() if body else ():
                connection.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the gateway may have refused the body, and says why
        return connection.getresponse()

    def _headers(self) -> dict[str, str]:
        found = {"Accept": "application/json", "Connection": "close"}
        found[REQUEST_HEADER] = "1"
        if self.address.key:
            found["Authorization"] = f"Bearer {self.address.key}"
        return found

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Inside, every fault of the network becomes a ServerError or an AwayError."""
        try:
            yield
        except (OSError, HTTPException) as fault:
            raise explained(self.address, fault) from fault

    def _whole(self, response: HTTPResponse) -> bytes:
        with self._faults():
            found = response.read(MAX_ANSWER_BYTES + 1)
        if len(found) > MAX_ANSWER_BYTES:
            raise ServerError(f"the answer of {self.address.url} is too large to be a gateway's")
        if response.length:  # read() with a number does not complain
            raise AwayError(f"the gateway at {self.address.url} cut its answer off")
        return found

    def _json(self, raw: bytes) -> Any:
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise no_gateway(self.address) from None

    def _lines(self, response: HTTPResponse) -> Iterator[bytes]:
        rest = b""
        while True:
            with self._faults():
                piece = response.read1(PIECE_BYTES)
            if not piece:
                break
            *lines, rest = (rest + piece).split(b"\n") if b"\n" in piece else ([rest + piece])
            yield from filter(None, lines)
        if rest:
            raise AwayError(f"the gateway at {self.address.url} cut its answer off")

    # ---- repetition ----

    def _repeated(self, once: Callable[[], Any]) -> Any:
        deadline, pause = time.monotonic() + self.retry_seconds, FIRST_PAUSE_SECONDS
        while True:
            try:
                found = once()
                self._is_away = False
                return found
            except AwayError as fault:
                wait = max(pause, fault.retry_after_seconds) * random.uniform(0.8, 1.2)
                if time.monotonic() + wait > deadline:
                    raise
                if not self._is_away:  # one sentence for each outage
                    text = str(fault)
                    self.note(f"{text}{'' if text.endswith('?') else '.'} Trying again")
                self._is_away = True
            time.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def no_gateway(address: Address) -> ServerError:
    """The error for a server that is none of batchkv."""
    return ServerError(
        f"the server at {address.url} is no gateway of this batchkv: check the URL, and that "
        "`batchkv serve` of this version runs there"
    )


def explained(address: Address, fault: Exception) -> ServerError:
    """The error for a fault of the network. AwayError if the same request may succeed later."""
    where = f"the gateway at {address.url}"
    via = f" through the proxy {address.proxy[0]}:{address.proxy[1]}" if address.proxy else ""
    if isinstance(fault, ssl.SSLCertVerificationError):
        return ServerError(f"{where} has a certificate that is not accepted: {_why(fault)}")
    if isinstance(fault, ssl.SSLError) and not isinstance(fault, ssl.SSLEOFError):
        return ServerError(
            f"{where} cannot be reached over TLS ({fault.reason or fault}): is it http:// instead?"
        )
    if isinstance(fault, socket.gaierror):
        return AwayError(f"{where} cannot be found{via}: there is no machine by that name")
    if isinstance(fault, TimeoutError):
        return AwayError(
            f"{where} does not answer{via}: is the address right, and the machine awake?"
        )
    if isinstance(fault, ConnectionRefusedError):
        return AwayError(f"{where} cannot be reached{via}: is `batchkv serve` running there?")
    if isinstance(fault, OSError) and "Tunnel connection failed" in str(fault):
        return ServerError(f"{where} cannot be reached{via}: {fault}")
    if isinstance(fault, HTTPException) and not isinstance(fault, ConnectionError):
        is_cut = type(fault).__name__ == "IncompleteRead"
        return AwayError(f"{where} cut its answer off") if is_cut else no_gateway(address)
    if isinstance(fault, ConnectionError):
        hint = "" if address.scheme == "https" else " A gateway with TLS needs https://"
        return AwayError(f"{where} closed the connection{via}: was it stopped?{hint}")
    return AwayError(f"{where} cannot be reached{via} ({fault})")


def _why(fault: ssl.SSLCertVerificationError) -> str:
    text = fault.verify_message
    if "expired" in text:
        return "it has expired. Renew it there"
    if "mismatch" in text or "not valid for" in text:
        return "it is for another name. Use the name that it is for in the URL"
    return f"{text}. Name the file of your authority in BATCHKV_CA_FILE"

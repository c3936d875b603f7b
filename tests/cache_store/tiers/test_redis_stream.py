"""Values of a server are read whole, whatever the pieces in which they come."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from redis.exceptions import ConnectionError

from batchkv_cache_store.tiers.redis_stream import TOGETHER_BYTES, WINDOW_BYTES, read_values

LIMIT_SECONDS = 0.3


@dataclass
class Connection:
    """What the reader needs of a connection of redis-py; ``sent`` has the requests of each call."""

    _sock: socket.socket
    sent: list[int] = field(default_factory=list)

    def send_packed_command(self, requests: Sequence[bytes]) -> None:
        self.sent.append(len(requests))


class ByPython(socket.socket):
    """A socket whose reads return what has arrived, as those of TLS do."""


@contextmanager
def connected(
    *pieces: bytes | float, kind: type[socket.socket] = socket.socket
) -> Iterator[Connection]:
    """A connection whose server sends these pieces, and then ends; a number is a pause."""
    given, other = socket.socketpair()
    own = kind(fileno=given.detach())
    own.settimeout(LIMIT_SECONDS)

    def send() -> None:
        for piece in pieces:
            if isinstance(piece, bytes):
                other.sendall(piece)
            else:
                time.sleep(piece)
        other.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    with own, other:
        yield Connection(own)
        thread.join()


def reply(value: bytes) -> bytes:
    """A string as the server sends it."""
    return b"$%d\r\n%s\r\n" % (len(value), value)


@pytest.mark.parametrize("kind", [socket.socket, ByPython])
def test_values_may_come_in_pieces(kind: type[socket.socket]) -> None:
    """A value is read to its end, and the socket has its time limit again afterwards."""
    first, second = bytes(range(256)) * 4000, b"second"
    text = reply(first) + b"-WRONGTYPE another type\r\n" + b"$0\r\n\r\n" + reply(second)
    wanted = [(name, len(first)) for name in ("a", "b", "c", "d")]
    pieces = text[:5], 0.05, text[5:500_000], 0.1, text[500_000:]
    with connected(*pieces, kind=kind) as connection:
        assert [*read_values(connection, wanted)] == [("a", first), ("d", second)]
        assert connection._sock.gettimeout() == LIMIT_SECONDS


def test_a_server_that_stops_within_a_value_is_waited_for_no_longer_than_the_limit() -> None:
    """The system keeps the limit while Python's own is off."""
    with connected(b"$1000\r\nabc", 3 * LIMIT_SECONDS) as connection:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            next(read_values(connection, [("a", 1000)]))
        assert LIMIT_SECONDS <= time.monotonic() - start < 2.9 * LIMIT_SECONDS
        assert connection._sock.gettimeout() == LIMIT_SECONDS


def test_a_connection_that_ends_within_a_value_is_a_fault() -> None:
    """Nothing of a part of a value is returned."""
    own, other = socket.socketpair()
    own.settimeout(LIMIT_SECONDS)
    with own:
        other.sendall(b"$1000\r\nabc")
        other.close()
        with pytest.raises(ConnectionError):
            next(read_values(Connection(own), [("a", 1000)]))


def test_large_values_are_requested_one_by_one() -> None:
    """A server copies all that it is asked for at once before it sends. Small ones go together."""
    count = 2 * WINDOW_BYTES // TOGETHER_BYTES
    with connected(reply(b"x") * count) as connection:
        values = read_values(connection, [("a", TOGETHER_BYTES)] * count)
        next(values)
        assert connection.sent == [1, 1]
        assert len([*values]) == count - 1 and connection.sent == [1] * count
    with connected(reply(b"x") * count) as connection:
        assert len([*read_values(connection, [("a", 1000)] * count)]) == count
        assert connection.sent == [count]

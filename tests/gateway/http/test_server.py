"""The gateway's sockets."""

from __future__ import annotations

import asyncio
import socket

from batchkv_gateway.http.server import listening_socket
from batchkv_gateway.settings import GatewaySettings


def test_small_pieces_are_sent_at_once() -> None:
    """Connections have TCP_NODELAY: else each answer but the first of a connection waits 40 ms."""

    async def option() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            its_socket = writer.get_extra_info("socket")
            found.set_result(its_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listening_socket(GatewaySettings(port=0)) as listening:
            async with await asyncio.start_server(connected, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname()[:2])
                is_set = await found
                writer.close()
                await writer.wait_closed()
                return is_set

    assert asyncio.run(option())

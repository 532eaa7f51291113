"""The listening socket and its connections."""

from __future__ import annotations

import asyncio
import socket

from omnistage.entrypoints.http.server import listen


async def test_answers_do_not_wait_for_the_clients_acknowledgement_on_a_plain_event_loop() -> None:
    """Without TCP_NODELAY every answer to a connection that is kept open takes 40 ms."""
    delays = list[int]()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        delays.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listen("127.0.0.1", 0)
    async with await asyncio.start_server(accepted, sock=listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await reader.read() == b""
        writer.close()
    assert delays == [1]

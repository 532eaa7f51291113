"""Serving an ASGI application with uvicorn: event-driven start, drain and stop, for an owner that handles signals."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from omnistage.entrypoints.http.app import HttpApp
from omnistage.entrypoints.http.protocol import GuardedProtocol

BACKLOG = 2048


class HttpServer:
    """One listening socket and its connections. The owner calls `start`, then `stop_accepting`, `drain`, `close`."""

    def __init__(self, app: HttpApp, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            lifespan="off",
            http=GuardedProtocol,
            ws="websockets-sansio",
            timeout_keep_alive=75,
        )
        self._app = app
        self._listener = listener
        self._server = uvicorn.Server(config)
        self._closed = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that are listened on (a port of 0 was chosen by the system)."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    async def start(self) -> None:
        """Begins to accept connections."""
        self._server.config.load()
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        await self._server.startup(sockets=[self._listener])

    def stop_accepting(self) -> None:
        """Closes the listener and idle connections; requests in progress go on, and their connections end with them."""
        for server in self._server.servers:
            server.close()
        self._listener.close()
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    async def drain(self, timeout_s: float) -> bool:
        """Waits for the requests in progress; False when some are left after `timeout_s`."""
        tasks = list(self._server.server_state.tasks)
        if not tasks:
            return True
        _, pending = await asyncio.wait(tasks, timeout=timeout_s)
        return not pending

    async def close(self) -> None:
        """Cancels what still runs, cuts its connections and ends the media threads."""
        if self._closed:
            return
        self._closed = True
        self.stop_accepting()
        tasks = list(self._server.server_state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await self._app.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError when the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small packets at once on sockets that say they are TCP; others wait 40 ms for the client's ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener

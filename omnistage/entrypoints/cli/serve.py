"""`omnistage serve`: the server process. First SIGTERM or Ctrl-C drains, the second stops at once."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
from pathlib import Path

import uvloop

from omnistage.config.model import OmniConfig
from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.cli.main import overrides_of
from omnistage.entrypoints.http.access import KeyRing, read_keys
from omnistage.entrypoints.http.app import create_app
from omnistage.entrypoints.http.server import HttpServer, listen
from omnistage.entrypoints.http.state import HttpOptions
from omnistage.entrypoints.trace.sinks import SinkThread, TraceFile, TraceSink
from omnistage.errors import ConfigError

EXIT_FORCED = 130


def run(arguments: argparse.Namespace) -> int:
    """Serves until signalled. Raises ConfigError when the port is taken, StageError when a stage cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    overrides = overrides_of(arguments)
    if arguments.record is not None:
        overrides["record.folder"] = str(Path(arguments.record).expanduser().resolve())
    config = resolve_config(arguments.model, arguments.deploy, overrides)
    keys = read_keys(Path(arguments.api_keys)) if arguments.api_keys is not None else None
    try:
        listener = listen(arguments.host, arguments.port)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"--port {arguments.port}: cannot listen on {arguments.host}: {reason}; choose another or 0", param="port"
        ) from None
    sinks = _sinks(config, arguments.trace)
    return uvloop.run(_serve(config, listener, keys, sinks, quiet=arguments.quiet))


def _sinks(config: OmniConfig, trace_file: str | None) -> list[TraceSink]:
    """Where timelines go. Raises ConfigError."""
    sinks: list[TraceSink] = [TraceFile(Path(trace_file))] if trace_file is not None else []
    if config.trace.otlp:
        try:
            from omnistage.entrypoints.trace.otel import otlp_sink
        except ImportError:
            raise ConfigError("trace.otlp: install omnistage[otel] first", param="trace.otlp") from None
        sinks.append(otlp_sink(config.trace.otlp, config.served_name))
    if sinks and not config.trace.enabled:
        raise ConfigError("trace.enabled: is false, so there is nothing to write or to export", param="trace.enabled")
    return sinks


async def _serve(
    config: OmniConfig, listener: socket.socket, keys: KeyRing | None, sinks: list[TraceSink], *, quiet: bool
) -> int:
    engine = AsyncOmniEngine(config)
    server = HttpServer(create_app(engine, options=HttpOptions(isolate=True), keys=keys, control=engine), listener)
    tracing = SinkThread(engine.timelines, sinks)
    signals = _Signals()
    await server.start()
    try:
        started = asyncio.create_task(engine.start())
        await signals.wait_or(1, started)
        if signals.count:
            return 0
        host, port = server.address
        print(banner(config, f"http://{host}:{port}", quiet=quiet), flush=True)
        await signals.wait(1)
        draining = asyncio.create_task(_drain(engine, server, config.limits.drain_timeout_s))
        await signals.wait_or(2, draining)
        return 0 if draining.done() else EXIT_FORCED
    finally:
        await server.close()
        await engine.stop()
        await asyncio.to_thread(tracing.close)


async def _drain(engine: AsyncOmniEngine, server: HttpServer, timeout_s: float) -> None:
    server.stop_accepting()
    await engine.drain()
    await server.drain(timeout_s)


class _Signals:
    """Counts SIGINT and SIGTERM."""

    def __init__(self) -> None:
        self.count = 0
        loop = asyncio.get_running_loop()
        self._arrived = (asyncio.Event(), asyncio.Event())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.count < len(self._arrived):
            self._arrived[self.count].set()
        self.count += 1

    async def wait(self, number: int) -> None:
        await self._arrived[number - 1].wait()

    async def wait_or(self, number: int, task: asyncio.Task[None]) -> None:
        """Returns when the task is done (raising its error) or that signal came, whichever is first."""
        arrived = asyncio.create_task(self.wait(number))
        await asyncio.wait({arrived, task}, return_when=asyncio.FIRST_COMPLETED)
        arrived.cancel()
        if task.done():
            await task
        else:
            task.cancel()


def banner(config: OmniConfig, address: str, *, quiet: bool) -> str:
    """What a newcomer needs next: the address, a curl line, a Python client."""
    if quiet:
        return address
    name = config.served_name
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"""
OmniStage serves {name} at {address}
stages: {" -> ".join(config.stages)}

  curl {address}/v1/chat/completions -H 'content-type: application/json' -d '{body}'

  from openai import OpenAI
  client = OpenAI(base_url="{address}/v1", api_key="none")
  answer = client.chat.completions.create(model="{name}", messages=[{{"role": "user", "content": "Hello!"}}])
  print(answer.choices[0].message.content)
"""

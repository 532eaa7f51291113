"""Admin routes: the state of stages; sleep, wake and restart of a stage; drain and resume of the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec

from omnistage.engine.client import EngineControl, Health
from omnistage.entrypoints.http.asgi import JSON, Exchange
from omnistage.entrypoints.http.parse import decode_json
from omnistage.entrypoints.http.sse import json_bytes
from omnistage.entrypoints.http.state import ServerState
from omnistage.errors import ErrorCode, RequestError


class StageCommand(msgspec.Struct, forbid_unknown_fields=True):
    """Which stage a command is for."""

    stage: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class StageAnswer(msgspec.Struct):
    """The stages that a command acted on: those that share a process act together."""

    stages: list[str]


def _control(state: ServerState) -> EngineControl:
    if state.control is None:
        raise RequestError("this server's engine takes no commands", code=ErrorCode.FORBIDDEN)
    return state.control


async def _command(state: ServerState, exchange: Exchange, act: Callable[[str], Awaitable[list[str]]]) -> None:
    body = decode_json(exchange, StageCommand)
    if body.stage not in state.engine.config.stages:
        known = ", ".join(state.engine.config.stages)
        raise RequestError(f"stage: no such stage (stages: {known})", param="stage")
    await exchange.answer(200, JSON, json_bytes(StageAnswer(await act(body.stage))))


async def sleep(state: ServerState, exchange: Exchange) -> None:
    """Finishes a stage's work, then ends its process: weights and caches are released until it is woken."""
    await _command(state, exchange, _control(state).sleep)


async def wake(state: ServerState, exchange: Exchange) -> None:
    """Loads a sleeping stage again; answers when it is ready."""
    await _command(state, exchange, _control(state).wake)


async def restart(state: ServerState, exchange: Exchange) -> None:
    """Restarts a stage replica by replica without losing a request; answers when all are ready."""
    await _command(state, exchange, _control(state).restart)


async def drain(state: ServerState, exchange: Exchange) -> None:
    """Admits no more requests until resumed; those in progress go on."""
    _control(state).set_draining(True)
    await stages(state, exchange)


async def resume(state: ServerState, exchange: Exchange) -> None:
    """Admits requests again."""
    _control(state).set_draining(False)
    await stages(state, exchange)


async def stages(state: ServerState, exchange: Exchange) -> None:
    """The state of every replica, and whether the server is draining."""
    report: Health = state.engine.health()
    await exchange.answer(200, JSON, json_bytes(report))

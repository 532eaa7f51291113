"""The interfaces between the entrypoints and the engine: what HTTP, CLI and offline Python may call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

import msgspec

from omnistage.config.model import OmniConfig, PipelineConfig
from omnistage.engine.timeline import Timelines
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest, OmniRequestOutput


class ReplicaHealth(msgspec.Struct, kw_only=True):
    """One replica of one stage. "draining" finishes its work before a planned restart or sleep."""

    stage: str
    replica: int
    state: Literal["starting", "ready", "draining", "sleeping", "restarting", "failed", "stopped"]
    pid: int | None = None
    restarts: int = 0
    detail: str = ""


class Health(msgspec.Struct, kw_only=True):
    """`ready`: every stage has a ready replica and the engine is not draining; `healthy`: no replica is down that
    nobody took down."""

    ready: bool
    healthy: bool
    draining: bool
    replicas: list[ReplicaHealth]


class EngineClient(Protocol):
    """An engine that is running in this event loop."""

    @property
    def config(self) -> OmniConfig: ...

    @property
    def pipeline(self) -> PipelineConfig: ...

    @property
    def timelines(self) -> Timelines: ...

    def generate(
        self, request: OmniRequest, media: dict[str, MultimodalPayload] | None = None
    ) -> AsyncIterator[OmniRequestOutput]:
        """Submits a request and yields its events; the last one has `finished` set (with `error` set if it failed).

        Closing the iterator early aborts the request. Raises RequestError (4xx) or OmniError(OVERLOADED, 429) at the
        first `__anext__` when the request is not admitted; an error found later by a stage comes as the last event.
        """
        ...

    async def abort(self, request_id: str) -> bool:
        """Ends a request with finish reason "abort"; False when there is none of that id."""
        ...

    def health(self) -> Health: ...

    def render_metrics(self) -> bytes:
        """Prometheus text exposition."""
        ...


class EngineControl(Protocol):
    """Commands for the operator of an engine. Stages that share a process act together; all of them are returned.

    Raises RequestError for an unknown stage or one that is not in a state for the command, OmniError(UNAVAILABLE) when
    the stage does not finish its work in time: it is as before then.
    """

    async def sleep(self, stage: str) -> list[str]:
        """Ends the stage's processes once no request needs them; requests that do are refused until `wake`."""
        ...

    async def wake(self, stage: str) -> list[str]:
        """Starts a sleeping stage and returns when it is ready."""
        ...

    async def restart(self, stage: str) -> list[str]:
        """Restarts the stage's processes one after the other; no request is lost."""
        ...

    def set_draining(self, draining: bool) -> None:
        """While draining, nothing more is admitted."""
        ...

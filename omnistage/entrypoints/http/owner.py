"""An engine behind another one, and an engine as one API key sees it: its requests carry the owner."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from omnistage.config.model import OmniConfig, PipelineConfig
from omnistage.engine.client import EngineClient, Health
from omnistage.engine.timeline import Timelines
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest, OmniRequestOutput


class EngineView:
    """An `EngineClient` that passes everything on."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    @property
    def config(self) -> OmniConfig:
        return self._engine.config

    @property
    def pipeline(self) -> PipelineConfig:
        return self._engine.pipeline

    @property
    def timelines(self) -> Timelines:
        return self._engine.timelines

    def generate(
        self, request: OmniRequest, media: dict[str, MultimodalPayload] | None = None
    ) -> AsyncIterator[OmniRequestOutput]:
        """See `EngineClient.generate`."""
        return self._engine.generate(request, media)

    async def abort(self, request_id: str) -> bool:
        return await self._engine.abort(request_id)

    def health(self) -> Health:
        return self._engine.health()

    def render_metrics(self) -> bytes:
        return self._engine.render_metrics()


class OwnedEngine(EngineView):
    """Names `owner` in every request, which separates caches."""

    def __init__(self, engine: EngineClient, owner: str) -> None:
        super().__init__(engine)
        self.owner = owner

    def generate(
        self, request: OmniRequest, media: dict[str, MultimodalPayload] | None = None
    ) -> AsyncIterator[OmniRequestOutput]:
        """See `EngineClient.generate`."""
        return self._engine.generate(msgspec.structs.replace(request, owner=self.owner), media)

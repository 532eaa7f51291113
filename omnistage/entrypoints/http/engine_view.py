"""An engine as one API key, or one exchange with a client, sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from omnistage.engine.client import EngineClient, Health
from omnistage.engine.timeline import Front
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest, OmniRequestOutput


class EngineView:
    """An `EngineClient` that passes everything on. It names `owner` in every request, which separates caches, and makes
    every request one of `front`, on whose timelines it goes."""

    def __init__(self, engine: EngineClient, *, owner: str = "", front: Front | None = None) -> None:
        self._engine, self._owner, self._front = engine, owner, front
        self.config, self.pipeline, self.timelines = engine.config, engine.pipeline, engine.timelines

    def generate(
        self, request: OmniRequest, media: dict[str, MultimodalPayload] | None = None
    ) -> AsyncIterator[OmniRequestOutput]:
        """See `EngineClient.generate`."""
        if self._owner:
            request = msgspec.structs.replace(request, owner=self._owner)
        if self._front is not None:
            self.timelines.claim(request.id, self._front)
        return self._engine.generate(request, media)

    async def abort(self, request_id: str) -> bool:
        return await self._engine.abort(request_id)

    def health(self) -> Health:
        return self._engine.health()

    def render_metrics(self) -> bytes:
        return self._engine.render_metrics()

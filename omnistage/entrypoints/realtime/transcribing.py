"""What the user said, written down beside the conversation."""

from __future__ import annotations

from contextlib import aclosing

from omnistage.engine.client import EngineClient
from omnistage.entrypoints.http.events import request_events
from omnistage.entrypoints.http.state import new_id
from omnistage.entrypoints.http.transcriptions import Heard
from omnistage.entrypoints.realtime.conversation import Content
from omnistage.entrypoints.realtime.events import InputTranscription
from omnistage.entrypoints.realtime.response import Emit
from omnistage.errors import OmniError
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest

_KIND = "conversation.item.input_audio_transcription"


class Transcription:
    """Hears one part of one item, tells what it hears, and notes it in the part."""

    def __init__(self, engine: EngineClient, emit: Emit, item_id: str, content: Content) -> None:
        self._engine, self._emit, self._content = engine, emit, content
        self._place = {"item_id": item_id, "content_index": 0}

    async def run(self, settings: InputTranscription) -> None:
        """An error of the engine becomes a `failed` event."""
        try:
            heard = await self._hear(settings)
        except OmniError as error:
            shown = {"type": "transcription_error", "code": error.info.code.value, "message": error.info.message}
            await self._emit(f"{_KIND}.failed", error=shown, **self._place)
            return
        self._content.text = heard.text
        usage = {"type": "duration", "seconds": round(heard.seconds, 3)}
        await self._emit(f"{_KIND}.completed", transcript=heard.text, usage=usage, **self._place)

    async def _hear(self, settings: InputTranscription) -> Heard:
        samples, rate = self._content.audio, self._content.rate
        assert samples is not None
        given = {"language": settings.language, "prompt": settings.prompt}
        params = {name: value for name, value in given.items() if value is not None}
        request = OmniRequest(id=new_id("transcript-"), task="transcription", modalities=("text",), params=params)
        media = {"audio": MultimodalPayload.of({"sample_rate": rate}, audio=samples)}
        heard = Heard(samples.shape[1] / rate, "")
        async with aclosing(request_events(self._engine, request, media)) as outputs:
            async for output in outputs:
                if delta := heard.note(output):
                    await self._emit(f"{_KIND}.delta", delta=delta, **self._place)
        return heard

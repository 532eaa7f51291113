"""Audio of one choice on its way out: a streaming encoder that opens with the first samples, and a collector."""

from __future__ import annotations

import base64

import numpy as np

from omnistage.entrypoints.http.state import ServerState
from omnistage.errors import ErrorCode, OmniError
from omnistage.media.audio_encode import INLINE_VALUES, AudioEncoder, encode_audio, open_encoder
from omnistage.media.samples import FloatAudio
from omnistage.payload import MultimodalPayload


def samples_of(payload: MultimodalPayload | None) -> FloatAudio | None:
    """The payload's audio, float32 [channels, samples]; None when it has none."""
    if payload is None or "audio" not in payload.tensors or payload["audio"].shape[-1] == 0:
        return None
    return np.asarray(payload["audio"], np.float32)


def rate_of(payload: MultimodalPayload, default: int) -> int:
    """The payload's sample rate in Hz."""
    return int(payload.meta.get("sample_rate", default))


class AudioStream:
    """Encodes samples as they come. The joined bytes of all calls are one valid file."""

    def __init__(self, state: ServerState, format_name: str) -> None:
        self._state = state
        self._format = format_name
        self._encoder: AudioEncoder | None = None

    async def feed(self, payload: MultimodalPayload | None) -> bytes:
        """Encoded bytes that are ready after this payload; may be empty."""
        samples = samples_of(payload)
        if samples is None or payload is None:
            return b""
        encoder = self._encoder
        if encoder is None:
            encoder = await self._open(rate_of(payload, self._state.sample_rate), samples.shape[0])
        if encoder.inline and samples.size <= INLINE_VALUES:
            return encoder.feed(samples)
        return await self._state.run(encoder.feed, samples)

    async def finish(self) -> bytes:
        """The rest of the file; of an answer without a sound, a valid file of (nearly) no length."""
        encoder = self._encoder or await self._open(self._state.sample_rate, 1)
        return encoder.finish() if encoder.inline else await self._state.run(encoder.finish)

    async def _open(self, rate: int, channels: int) -> AudioEncoder:
        self._encoder = await self._state.run(open_encoder, self._format, rate, channels)
        return self._encoder


class AudioCollector:
    """Keeps a whole answer's samples, then encodes them as one file with exact sizes."""

    def __init__(self, state: ServerState, format_name: str) -> None:
        self._state = state
        self._format = format_name
        self._rate = state.sample_rate
        self._parts = list[FloatAudio]()

    def feed(self, payload: MultimodalPayload | None) -> None:
        """Copies the payload's samples. Raises OmniError when rate or channels change within an answer."""
        samples = samples_of(payload)
        if samples is None or payload is None:
            return
        rate = rate_of(payload, self._rate)
        if self._parts and (rate != self._rate or samples.shape[0] != self._parts[0].shape[0]):
            raise OmniError("the audio's rate or channel count changed within an answer", code=ErrorCode.INTERNAL)
        self._rate = rate
        self._parts.append(samples.copy())

    async def encode(self) -> bytes:
        """The file."""
        samples = np.concatenate(self._parts, axis=1) if self._parts else np.zeros((1, 0), np.float32)
        return await self._state.run(encode_audio, self._format, samples, self._rate)


def base64_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def encoder_name(format_name: str) -> str:
    """The encoder for a name of the API: chat says pcm16 where speech says pcm."""
    return "pcm" if format_name == "pcm16" else format_name

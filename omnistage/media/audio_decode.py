"""Audio bytes -> samples, with limits on what comes out: from the header first, then while decoding."""

from __future__ import annotations

import io
import time

import av
import msgspec
import numpy as np
from av.container import InputContainer

from omnistage.media.errors import DECODER_ERRORS, too_large, unsupported
from omnistage.media.samples import FloatAudio
from omnistage.media.sniff import AUDIO_CONTAINERS, container_of

MAX_CHANNELS = 8
MIN_RATE, MAX_RATE = 4_000, 192_000
# Values a decode may hold per second of the limit: stereo at 48 kHz.
VALUES_PER_SECOND = 96_000
DECODE_TIMEOUT_S = 30.0
# Consecutive undecodable packets after which a file counts as broken.
MAX_BAD_PACKETS = 50


class DecodedAudio(msgspec.Struct, frozen=True, eq=False):
    """`samples` float32 [channels, n] in -1..1 at `rate` Hz."""

    samples: FloatAudio
    rate: int

    @property
    def seconds(self) -> float:
        return float(self.samples.shape[1] / self.rate)


def decode_audio(data: bytes, max_seconds: float, param: str = "file") -> DecodedAudio:
    """Decodes wav, mp3, flac, ogg (vorbis, opus), m4a/mp4, webm or adts.

    Raises RequestError naming `param`: UNSUPPORTED_MEDIA for anything unreadable, TOO_LARGE beyond `max_seconds`.
    """
    container = container_of(data)
    if container not in AUDIO_CONTAINERS:
        raise unsupported("not audio in a known format (wav, mp3, flac, ogg, opus, m4a, mp4, webm, aac)", param)
    try:
        with av.open(io.BytesIO(data), "r", format=container.partition(",")[0], metadata_errors="ignore") as source:
            return _decode(source, max_seconds, param)
    except DECODER_ERRORS:
        raise unsupported("the audio is damaged or of an unsupported codec", param) from None


def _decode(source: InputContainer, max_seconds: float, param: str) -> DecodedAudio:
    stream = next(iter(source.streams.audio), None)
    if stream is None:
        raise unsupported("the file has no audio track", param)
    if source.duration is not None and source.duration / av.time_base > max_seconds * 1.05 + 1:
        raise too_large(f"audio is longer than the limit of {max_seconds:g} s", param)
    rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
    if not MIN_RATE <= rate <= MAX_RATE or not 1 <= channels <= MAX_CHANNELS:
        raise unsupported(f"sample rate {rate} Hz with {channels} channels is not supported", param)
    collector = _Collector(max_seconds, rate, channels, param)
    packets = source.demux(stream)
    bad = 0
    for packet in packets:
        try:
            for frame in packet.decode():
                collector.add(frame)
            bad = 0
        except av.error.InvalidDataError:
            bad += 1
            if bad > MAX_BAD_PACKETS:
                raise
    return collector.result()


class _Collector:
    """Converts frames to float32 planes and counts them against the limits."""

    def __init__(self, max_seconds: float, rate: int, channels: int, param: str) -> None:
        self._rate, self._channels, self._param = rate, channels, param
        self._max_seconds = max_seconds
        self._limit = int(min(max_seconds * rate, max_seconds * VALUES_PER_SECOND / channels))
        self._deadline = time.monotonic() + DECODE_TIMEOUT_S
        self._resampler = av.AudioResampler(format="fltp", rate=rate)
        self._parts: list[FloatAudio] = []
        self._count = 0

    def add(self, frame: av.AudioFrame) -> None:
        if frame.sample_rate != self._rate or frame.layout.nb_channels != self._channels:
            raise unsupported("the sample rate or channel count changes within the file", self._param)
        if time.monotonic() > self._deadline:
            raise too_large("decoding takes too long", self._param)
        self._keep(frame)

    def result(self) -> DecodedAudio:
        if self._count == 0:
            raise unsupported("the file holds no audio samples", self._param)
        self._keep(None)
        return DecodedAudio(np.concatenate(self._parts, axis=1), self._rate)

    def _keep(self, frame: av.AudioFrame | None) -> None:
        for piece in self._resampler.resample(frame):
            self._count += piece.samples
            if self._count > self._limit:
                seconds = self._limit / self._rate
                raise too_large(f"audio is longer than the limit of {seconds:g} s", self._param)
            self._parts.append(np.array(piece.to_ndarray(), np.float32, copy=True))

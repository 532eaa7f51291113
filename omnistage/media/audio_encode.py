"""Streaming audio encoders with carried state: mp3, opus, aac, flac, wav, pcm.

A streamed answer and a whole one come from the same encoder: feed pieces, then finish. The bytes of all calls, joined,
are one valid file.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Protocol

import av
import msgspec
import numpy as np
from av.audio.stream import AudioStream

from omnistage.errors import ErrorCode, RequestError
from omnistage.media.samples import FloatAudio, Resampler, to_s16le

PCM_RATE = 24_000
UNKNOWN_SIZE = 0xFFFFFFFF
WAV_HEADER_BYTES = 44
MAX_CHANNELS = 2
# Pieces up to this many values are converted on the event loop: a hop to a thread costs more.
INLINE_VALUES = 65_536


class AudioFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A format that clients can ask for. `rates` are the sample rates (Hz) that it stores; empty means any."""

    name: str
    media_type: str
    codec: str = ""
    container: str = ""
    bit_rate: int = 0
    rates: tuple[int, ...] = ()
    options: dict[str, str] = {}


_MP3_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_AAC_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)
_FLAC_RATES = (8000, 16000, 22050, 24000, 32000, 44100, 48000, 96000)

AUDIO_FORMATS: dict[str, AudioFormat] = {
    entry.name: entry
    for entry in (
        AudioFormat(
            name="mp3", media_type="audio/mpeg", codec="libmp3lame", container="mp3", bit_rate=96_000, rates=_MP3_RATES
        ),
        AudioFormat(
            name="opus",
            media_type="audio/ogg",
            codec="libopus",
            container="ogg",
            bit_rate=64_000,
            rates=(48_000,),
            options={"page_duration": "100000"},
        ),
        AudioFormat(
            name="aac", media_type="audio/aac", codec="aac", container="adts", bit_rate=96_000, rates=_AAC_RATES
        ),
        AudioFormat(name="flac", media_type="audio/flac", codec="flac", container="flac", rates=_FLAC_RATES),
        AudioFormat(name="wav", media_type="audio/wav"),
        AudioFormat(name="pcm", media_type="audio/pcm", rates=(PCM_RATE,)),
    )
}


class AudioEncoder(Protocol):
    """Turns float32 [channels, samples] into bytes of a format. `rate` is the sample rate (Hz) of what comes out."""

    rate: int
    inline: bool

    def feed(self, samples: FloatAudio) -> bytes:
        """Bytes that are ready after these samples; may be empty."""
        ...

    def finish(self) -> bytes:
        """The rest, headers included when nothing was fed. Called once; nothing may be fed after it."""
        ...


def wav_header(rate: int, channels: int, data_bytes: int = UNKNOWN_SIZE) -> bytes:
    """The 44 bytes before 16-bit samples; sizes are 0xFFFFFFFF when the length is not known yet (RIFF, WAVE PCM)."""
    riff_bytes = UNKNOWN_SIZE if data_bytes == UNKNOWN_SIZE else data_bytes + WAV_HEADER_BYTES - 8
    block = channels * 2
    layout = struct.pack("<IHHIIHH", 16, 1, channels, rate, rate * block, block, 16)
    return b"RIFF" + struct.pack("<I", riff_bytes) + b"WAVEfmt " + layout + b"data" + struct.pack("<I", data_bytes)


class PcmEncoder:
    """s16le at `rate` Hz, behind a header."""

    inline = True

    def __init__(self, source_rate: int, rate: int, channels: int, header: bytes = b"") -> None:
        self.rate = rate
        self._header = header
        self._resampler = Resampler(source_rate, rate, channels)

    def feed(self, samples: FloatAudio) -> bytes:
        return self._take_header() + to_s16le(self._resampler.feed(samples))

    def finish(self) -> bytes:
        return self._take_header() + to_s16le(self._resampler.flush())

    def _take_header(self) -> bytes:
        header, self._header = self._header, b""
        return header


class _Drain(io.RawIOBase):
    """Collects what a muxer writes; not seekable."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        piece = bytes(memoryview(data))  # type: ignore[arg-type]
        self._parts.append(piece)
        return len(piece)

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


class CodecEncoder:
    """mp3, opus, aac or flac through FFmpeg. A whole file is written seekable, so that it carries its exact length."""

    inline = False

    def __init__(self, fmt: AudioFormat, rate: int, channels: int, whole: bool = False) -> None:
        self.rate = nearest_rate(rate, fmt.rates)
        self._channels = channels
        self._layout = "mono" if channels == 1 else "stereo"
        self._resampler = Resampler(rate, self.rate, channels)
        self._pts = 0
        self._sink: io.BytesIO | _Drain = io.BytesIO() if whole else _Drain()
        options = dict(fmt.options)
        if not whole:
            options |= {"flush_packets": "1"} | ({"write_xing": "0"} if fmt.name == "mp3" else {})
        self._container = av.open(self._sink, "w", format=fmt.container, options=options)
        self._stream: AudioStream = self._container.add_stream(fmt.codec, rate=self.rate)
        self._stream.codec_context.layout = self._layout
        if fmt.bit_rate:
            self._stream.codec_context.bit_rate = fmt.bit_rate * channels

    def feed(self, samples: FloatAudio) -> bytes:
        self._write(self._resampler.feed(samples))
        return self._take()

    def finish(self) -> bytes:
        self._write(self._resampler.flush())
        if self._pts == 0:
            # A muxer writes no valid file without a packet: one silent sample stands for "nothing was said".
            self._write(np.zeros((self._channels, 1), np.float32))
        for packet in self._stream.encode(None):
            self._container.mux(packet)
        self._container.close()
        return self._sink.getvalue() if isinstance(self._sink, io.BytesIO) else self._sink.take()

    def _take(self) -> bytes:
        return b"" if isinstance(self._sink, io.BytesIO) else self._sink.take()

    def _write(self, samples: FloatAudio) -> None:
        if samples.shape[1] == 0:
            return
        planes = np.ascontiguousarray(np.clip(np.nan_to_num(samples), -1.0, 1.0), np.float32)
        frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout=self._layout)
        frame.sample_rate = self.rate
        frame.pts = self._pts
        self._pts += samples.shape[1]
        for packet in self._stream.encode(frame):
            self._container.mux(packet)


def nearest_rate(rate: int, rates: tuple[int, ...]) -> int:
    """`rate` itself if the format stores it, else the next higher rate, else the highest."""
    if not rates or rate in rates:
        return rate
    return min((r for r in rates if r > rate), default=max(rates))


def open_encoder(name: str, rate: int, channels: int = 1) -> AudioEncoder:
    """A streaming encoder for a format name of `AUDIO_FORMATS`. Raises RequestError for more than two channels."""
    return _encoder(name, rate, channels, None)


def encode_audio(name: str, samples: FloatAudio, rate: int) -> bytes:
    """float32 [channels, samples] at `rate` Hz as one file, with exact sizes where the format has them."""
    encoder = _encoder(name, rate, samples.shape[0], samples.shape[1])
    return b"".join((*(encoder.feed(piece) for piece in _pieces(samples)), encoder.finish()))


def _encoder(name: str, rate: int, channels: int, total_samples: int | None) -> AudioEncoder:
    if not 1 <= channels <= MAX_CHANNELS:
        raise RequestError(
            f"audio with {channels} channels cannot be encoded as {name}", code=ErrorCode.UNSUPPORTED_MEDIA
        )
    if name == "pcm":
        return PcmEncoder(rate, PCM_RATE, channels)
    if name == "wav":
        size = UNKNOWN_SIZE if total_samples is None else total_samples * channels * 2
        return PcmEncoder(rate, rate, channels, wav_header(rate, channels, size))
    return CodecEncoder(AUDIO_FORMATS[name], rate, channels, whole=total_samples is not None)


def _pieces(samples: FloatAudio, size: int = 1 << 16) -> Iterator[FloatAudio]:
    for start in range(0, samples.shape[1], size):
        yield samples[:, start : start + size]

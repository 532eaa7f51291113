"""Every format: magic bytes, decoded length, and streamed bytes that are one valid file."""

from __future__ import annotations

import io
import struct
import wave

import numpy as np
import pytest

from omnistage.errors import RequestError
from omnistage.media.audio_decode import decode_audio
from omnistage.media.audio_encode import AUDIO_FORMATS, PCM_RATE, UNKNOWN_SIZE, encode_audio, open_encoder
from omnistage.media.samples import FloatAudio, Resampler

MAGIC = {"mp3": (b"ID3", b"\xff"), "opus": (b"OggS",), "aac": (b"\xff\xf1",), "flac": (b"fLaC",), "wav": (b"RIFF",)}
# Seconds by which a streamed file of the format may be longer than what went in (encoder delay and padding).
SLACK_S = {"mp3": 0.11, "opus": 0.03, "aac": 0.11, "flac": 0.0, "wav": 0.0}


def tone(seconds: float, rate: int, channels: int = 1) -> FloatAudio:
    time_axis = np.arange(int(seconds * rate)) / rate
    rows = [0.4 * np.sin(2 * np.pi * (330 + 110 * channel) * time_axis) for channel in range(channels)]
    return np.array(rows, np.float32)


def streamed(name: str, samples: FloatAudio, rate: int, chunk: int) -> bytes:
    encoder = open_encoder(name, rate, samples.shape[0])
    parts = [encoder.feed(samples[:, i : i + chunk]) for i in range(0, samples.shape[1], chunk)]
    return b"".join((*parts, encoder.finish()))


@pytest.mark.parametrize("rate", [16_000, 22_050, 24_000, 44_100])
@pytest.mark.parametrize("name", sorted(MAGIC))
def test_streamed_file_has_magic_and_length(name: str, rate: int) -> None:
    samples = tone(1.3, rate)
    data = streamed(name, samples, rate, 1999)
    assert data.startswith(MAGIC[name])
    seconds = decode_audio(data, 60).seconds
    assert 1.3 - 0.01 <= seconds <= 1.3 + SLACK_S[name] + 1e-3


@pytest.mark.parametrize("name", sorted(MAGIC))
def test_whole_file_sounds_like_the_source(name: str) -> None:
    samples = tone(1.0, 24_000)
    decoded = decode_audio(encode_audio(name, samples, 24_000), 60)
    heard = Resampler(decoded.rate, 24_000, 1).feed(decoded.samples, last=True)[0]
    power = np.abs(np.fft.rfft(heard[:20_000] * np.hanning(20_000)))
    assert abs(np.argmax(power) * 24_000 / 20_000 - 330) < 3
    assert 0.35 < np.abs(heard[4000:16_000]).max() < 0.45


@pytest.mark.parametrize("name", ["mp3", "opus", "flac", "wav"])
def test_whole_file_has_exact_length(name: str) -> None:
    decoded = decode_audio(encode_audio(name, tone(1.25, 24_000), 24_000), 60)
    assert decoded.seconds == pytest.approx(1.25, abs=1e-3)


@pytest.mark.parametrize("name", sorted(MAGIC))
def test_stereo_keeps_its_channels_apart(name: str) -> None:
    decoded = decode_audio(streamed(name, tone(0.5, 48_000, channels=2), 48_000, 4800), 60)
    assert decoded.samples.shape[0] == 2
    peaks = [np.argmax(np.abs(np.fft.rfft(row[:20_000]))) * decoded.rate / 20_000 for row in decoded.samples]
    assert peaks == pytest.approx([330, 440], abs=5)


def test_pcm_is_s16le_at_24_khz_for_any_source_rate() -> None:
    data = streamed("pcm", tone(1.0, 16_000), 16_000, 777)
    assert len(data) == 2 * PCM_RATE
    assert 0.38 < np.abs(np.frombuffer(data, "<i2")).max() / 32767 < 0.42


@pytest.mark.parametrize("name", ["pcm", "wav", "flac"])
@pytest.mark.parametrize("chunk", [1, 100, 4801])
def test_chunking_does_not_change_the_bytes(name: str, chunk: int) -> None:
    samples = tone(0.1, 22_050)
    assert streamed(name, samples, 22_050, chunk) == streamed(name, samples, 22_050, 10**6)


def test_streamed_wav_has_one_header_with_open_sizes() -> None:
    samples = tone(0.2, 24_000)
    data = streamed("wav", samples, 24_000, 500)
    assert data.count(b"RIFF") == 1
    assert struct.unpack_from("<I", data, 40)[0] == UNKNOWN_SIZE
    assert len(data) == 44 + 2 * samples.shape[1]


def test_whole_wav_has_exact_sizes() -> None:
    data = encode_audio("wav", tone(0.2, 24_000), 24_000)
    with wave.open(io.BytesIO(data)) as reader:
        assert (reader.getnframes(), reader.getframerate(), reader.getnchannels()) == (4800, 24_000, 1)
    assert struct.unpack_from("<I", data, 4)[0] == len(data) - 8


@pytest.mark.parametrize("name", sorted(AUDIO_FORMATS))
def test_first_bytes_come_before_the_end(name: str) -> None:
    encoder = open_encoder(name, 24_000)
    early = b"".join(encoder.feed(tone(0.1, 24_000)) for _ in range(6))
    assert len(early) > 300


@pytest.mark.parametrize("name", sorted(AUDIO_FORMATS))
def test_no_audio_still_gives_a_readable_file(name: str) -> None:
    data = encode_audio(name, np.zeros((1, 0), np.float32), 24_000)
    if name == "pcm":
        assert data == b""
    elif name == "wav":
        assert len(data) == 44
    else:
        assert decode_audio(data, 1).seconds < 0.12


@pytest.mark.parametrize("name", sorted(AUDIO_FORMATS))
def test_values_out_of_range_are_clipped_not_wrapped(name: str) -> None:
    samples = np.full((1, 4800), 3.0, np.float32)
    samples[0, 7] = np.nan
    data = encode_audio(name, samples, 24_000)
    if name == "pcm":
        assert np.frombuffer(data, "<i2")[100:].min() == 32767
    elif name == "wav":
        assert decode_audio(data, 1).samples[0, 100:].min() > 0.99


def test_three_channels_are_refused() -> None:
    with pytest.raises(RequestError, match="3 channels"):
        open_encoder("mp3", 24_000, 3)


@pytest.mark.parametrize(("source", "target"), [(16_000, 24_000), (24_000, 48_000), (22_050, 24_000)])
def test_resampled_stream_equals_resampled_whole(source: int, target: int) -> None:
    samples = tone(0.5, source)
    whole = Resampler(source, target, 1).feed(samples, last=True)
    stream = Resampler(source, target, 1)
    parts = [stream.feed(samples[:, i : i + 313]) for i in range(0, samples.shape[1], 313)]
    joined = np.concatenate([*parts, stream.feed(np.zeros((1, 0), np.float32), last=True)], axis=1)
    np.testing.assert_allclose(joined, whole, atol=1e-6)
    assert joined.shape[1] == round(samples.shape[1] * target / source)

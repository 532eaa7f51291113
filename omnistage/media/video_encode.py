"""Frames, and the sound that belongs to them, as one mp4 file: H.264 and AAC."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
from av.audio.stream import AudioStream
from av.container import OutputContainer

from omnistage.media.audio_encode import AUDIO_FORMATS, MAX_CHANNELS, nearest_rate
from omnistage.media.samples import FloatAudio, Resampler

MEDIA_TYPE = "video/mp4"
# Sound is handed to the encoder in frames of so many samples.
_SAMPLES = 1024
_QUALITY = {"crf": "18", "preset": "veryfast"}


def encode_video(frames: npt.NDArray[np.uint8], fps: float, audio: FloatAudio | None = None, rate: int = 0) -> bytes:
    """uint8 [T, H, W, 3] at `fps`, with float32 [channels, samples] at `rate` Hz, as mp4 (index first).

    Odd sides are cut by one pixel: H.264 stores colour at half resolution. Raises ValueError for no frames, sides under
    two pixels, or more than two channels.
    """
    height, width = frames.shape[1] // 2 * 2, frames.shape[2] // 2 * 2
    if not len(frames) or not height or not width or (audio is not None and len(audio) > MAX_CHANNELS):
        raise ValueError(f"no video can be made of frames {list(frames.shape)}")
    with tempfile.TemporaryDirectory(prefix="omnistage-") as folder:
        file = Path(folder) / "video.mp4"  # the muxer reads its own file again to move the index to the front
        with av.open(str(file), "w", format="mp4", options={"movflags": "+faststart"}) as container:
            _write(container, frames[:, :height, :width], fps, (audio, rate))
        return file.read_bytes()


def _write(
    container: OutputContainer, frames: npt.NDArray[np.uint8], fps: float, sound: tuple[FloatAudio | None, int]
) -> None:
    audio, rate = sound
    pictures = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options=_QUALITY)
    pictures.height, pictures.width, pictures.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
    track = None if audio is None else _sound_stream(container, len(audio), rate)
    for frame in frames:
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        container.mux(pictures.encode(picture))
    container.mux(pictures.encode(None))
    if track is not None and audio is not None:
        _write_sound(container, track, audio, rate)


def _sound_stream(container: OutputContainer, channels: int, rate: int) -> AudioStream:
    stream: AudioStream = container.add_stream("aac", rate=nearest_rate(rate, AUDIO_FORMATS["aac"].rates))
    stream.codec_context.layout = "mono" if channels == 1 else "stereo"
    stream.codec_context.bit_rate = 96_000 * channels
    return stream


def _write_sound(container: OutputContainer, stream: AudioStream, audio: FloatAudio, rate: int) -> None:
    target = stream.codec_context.sample_rate
    samples = Resampler(rate, target, len(audio)).feed(np.clip(np.nan_to_num(audio), -1, 1), last=True)
    for start in range(0, samples.shape[1], _SAMPLES):
        piece = np.ascontiguousarray(samples[:, start : start + _SAMPLES], np.float32)
        frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout=stream.codec_context.layout.name)
        frame.sample_rate, frame.pts = target, start
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))

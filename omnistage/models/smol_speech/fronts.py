"""The acoustic front ends of the voices: phonemes to frames, by onnxruntime. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import onnxruntime

from omnistage.models.smol_speech import convert_names as names
from omnistage.models.smol_speech.phonemes import to_ipa

Array = npt.NDArray[Any]

# Silence kept on each side of a join inside a sentence, in frames of 12.5 ms.
JOIN_FRAMES = 6


class Utterance(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of speech to make. `joins_before`, `joins_after`: the sentence goes on beyond that side.

    `speed` is relative to the voice's own pace; `seed` and `segment` (counts from 0 in a request) decide its noise.
    """

    phonemes: str
    speed: float = 1.0
    seed: int = 0
    segment: int = 0
    joins_before: bool = False
    joins_after: bool = False


class Front(Protocol):
    """The front end of one voice."""

    def frames(self, utterance: Utterance) -> dict[str, Array]:
        """`z` float32 [channels, F] and what else the voice's decoder needs, F >= 1."""
        ...


class HeartFront:
    """hibari: `z` [130, F] and `f0` [F] in Hz (0 where unvoiced), one frame per 12.5 ms."""

    def __init__(self, folder: Path, vocabulary: dict[str, int], threads: int) -> None:
        self._session = _session(folder / "front.onnx", threads)
        self._ids = vocabulary

    def frames(self, utterance: Utterance) -> dict[str, Array]:
        ids = [0, *(self._ids[p] for p in utterance.phonemes if p in self._ids), 0]
        feeds = {"ids": np.array([ids], np.int64), "speed": np.array([utterance.speed], np.float32)}
        z, f0, durations = self._session.run(None, feeds)
        first, last = _kept(durations.reshape(-1), z.shape[2], utterance)
        return {"z": np.ascontiguousarray(z[0, :, first:last]), "f0": np.ascontiguousarray(f0[0, first:last])}


class JoeFront:
    """Piper's VITS: the latent `z` [192, F], one frame per 256 samples at 22050 Hz.

    Its graph predicts durations and samples the prior with noise, which comes from the request's seed here.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        self._encoder = _session(folder / "encoder.onnx", threads)
        self._flow = _session(folder / "flow.onnx", threads)
        voice = json.loads((folder / "voice.json").read_text(encoding="utf-8"))
        self._ids: dict[str, int] = voice["phoneme_ids"]
        self._noise_scale = voice["noise_scale"]
        self._scales = (voice["noise_scale"], voice["length_scale"], voice["duration_noise_scale"])

    def frames(self, utterance: Utterance) -> dict[str, Array]:
        ids = self._phoneme_ids(utterance.phonemes)
        random = seeded(utterance.seed, utterance.segment)
        noise_scale, length_scale, duration_noise_scale = self._scales
        scales = (noise_scale, length_scale / utterance.speed, duration_noise_scale)
        feeds = {
            "input": np.array([ids], np.int64),
            "input_lengths": np.array([len(ids)], np.int64),
            "scales": np.array(scales, np.float32),
            names.DURATION_NOISE: random.standard_normal((1, 2, len(ids)), np.float32),
        }
        mean, deviation, mask = self._encoder.run(None, feeds)
        noise = random.standard_normal(mean.shape, np.float32)
        sample = mean + noise * deviation * np.float32(noise_scale)
        latent = self._flow.run(None, {names.PRIOR_SAMPLE: sample, names.FRAME_MASK: mask})[0]
        return {"z": np.ascontiguousarray(latent[0])}

    def _phoneme_ids(self, phonemes: str) -> list[int]:
        """Piper's form: start, pad, then each phoneme with a pad behind it, end."""
        pad = self._ids["_"]
        ids = [self._ids["^"], pad]
        for phoneme in to_ipa(phonemes):
            if phoneme in self._ids:
                ids += [self._ids[phoneme], pad]
        return [*ids, self._ids["$"]]


def seeded(seed: int, segment: int) -> np.random.Generator:
    """The random numbers of one segment of one request, whatever else runs beside it."""
    return np.random.Generator(np.random.Philox(key=np.array([seed & (2**64 - 1), segment], np.uint64)))


def load_fronts(heart: Path, joe: Path, vocabulary: dict[str, int], threads: int) -> dict[str, Front]:
    """The front end of every voice, by the voice's name."""
    return {"heart": HeartFront(heart, vocabulary, threads), "joe": JoeFront(joe, threads)}


def _kept(durations: Array, frames: int, utterance: Utterance) -> tuple[int, int]:
    """The range of frames to keep: at a join, the silence of the outer pad is cut down to JOIN_FRAMES."""
    lead, trail = int(durations[0]), int(durations[-1])
    first = max(0, lead - JOIN_FRAMES) if utterance.joins_before else 0
    last = frames - max(0, trail - JOIN_FRAMES) if utterance.joins_after else frames
    return first, last


def _session(path: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

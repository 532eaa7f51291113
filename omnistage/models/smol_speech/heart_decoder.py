"""The decoder of the voice "heart" (hibari): ConvNeXt blocks in torch, source filter and streaming inverse STFT.

Signal model, from the published package hibari-tts (`hibari/dsp.py`), per frame of 300 samples at 24 kHz:
S = exp(lh) e^{i pi tanh(theta)} STFT(pulses(f0)) + exp(ln) Z + exp(lr) e^{i phi}, with complex normal noise Z, then an
inverse STFT (1200 points, hop 300, periodic Hann window on both sides, normalised by the sum of squared windows).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from omnistage.models.smol_speech.decoding import Decoded, Part, Stream, frame_noise
from omnistage.models.smol_speech.packed import Flow, Packed, PackedConv

Array = npt.NDArray[Any]

SAMPLE_RATE = 24000
HOP = 300
FFT = 1200
BINS = FFT // 2 + 1
OVERLAPS = FFT // HOP
_LOG_MAGNITUDE_LIMIT = 7.0
_VOICED_HZ = 40.0
_HIGHEST_HARMONIC_HZ = 11000.0
_WINDOW = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FFT) / FFT)).astype(np.float32)
# With this window on the pulses exp(lh) is a harmonic's magnitude: a unit cosine peaks at sum(window) / 2 = 300.
_SOURCE_WINDOW = torch.from_numpy(_WINDOW / HOP)
_SYNTHESIS_WINDOW = torch.from_numpy(_WINDOW)
_SQUARED_WINDOW = (_WINDOW * _WINDOW).reshape(OVERLAPS, HOP)


class HeartNet:
    """Frames [n, 130] to the five spectral parts [n, 5 * 601], all streams of a batch at once."""

    def __init__(self, weights: dict[str, Tensor], blocks: int, epsilon: float) -> None:
        self._weights = weights
        self._epsilon = epsilon
        self._blocks = [f"dec.{index}" for index in range(blocks)]
        self._input = PackedConv(0, weights["dec_in.weight"], weights["dec_in.bias"], (3, 3))
        self._convs = [
            PackedConv(slot, weights[f"{name}.dw.weight"], weights[f"{name}.dw.bias"], (3, 3))
            for slot, name in enumerate(self._blocks, start=1)
        ]

    def __call__(self, frames: Packed, flows: Sequence[Flow]) -> Packed:
        rows = self._input(frames, flows)
        for name, conv in zip(self._blocks, self._convs, strict=True):
            mixed, residual = conv.with_aligned(rows, flows)
            rows = Packed(
                torch.addcmul(residual.rows, self._pointwise(name, mixed.rows), self._gain(name)), mixed.lengths
            )
        return rows.map(lambda x: self._linear("head", self._norm("dec_norm", x)))

    def _pointwise(self, name: str, rows: Tensor) -> Tensor:
        hidden = F.gelu(self._linear(f"{name}.pw1", self._norm(f"{name}.norm", rows)))
        return self._linear(f"{name}.pw2", hidden)

    def _gain(self, name: str) -> Tensor:
        return self._weights[f"{name}.gamma"]

    def _linear(self, name: str, rows: Tensor) -> Tensor:
        return torch.addmm(self._weights[f"{name}.bias"], rows, self._weights[f"{name}.weight"])

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.layer_norm(rows, (rows.shape[1],), weight, bias, self._epsilon)


class HeartDecoder:
    """A `Decoder`. `Stream.extra` holds the framed pulse train [F, 1200], `Stream.overlap` the last 3 hops [3, 300]."""

    sample_rate = SAMPLE_RATE

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        settings = json.loads((folder / "decoder.json").read_text(encoding="utf-8"))
        self._device = device
        self._net = HeartNet(
            load_file(folder / "decoder.safetensors", device), settings["blocks"], settings["norm_eps"]
        )
        self.lookahead = 3 * (settings["blocks"] + 1)

    def begin(self, tensors: dict[str, Array], seed: int, segment: int) -> Stream:
        rows = np.ascontiguousarray(tensors["z"].T)
        return Stream(rows=rows, seed=seed, segment=segment, extra=framed_pulses(tensors["f0"]))

    @torch.inference_mode()
    def decode(self, parts: list[Part]) -> list[Decoded]:
        flows = [Flow(part.stream.carry, part.ends) for part in parts]
        taken = [part.stream.rows[part.stream.taken : part.stream.taken + part.count] for part in parts]
        spectrum = self._net(Packed.of([torch.from_numpy(rows).to(self._device) for rows in taken]), flows)
        waves = self._synthesise(parts, spectrum)
        return [_overlap_add(part, flow, wave) for part, flow, wave in zip(parts, flows, waves, strict=True)]

    def _synthesise(self, parts: list[Part], spectrum: Packed) -> list[Array]:
        """Per part its windowed frames [n, 4, 300], before they are added up."""
        spans = [(part.stream, length) for part, length in zip(parts, spectrum.lengths, strict=True)]
        if not sum(spectrum.lengths):
            return [np.zeros((0, OVERLAPS, HOP), np.float32) for _ in parts]
        pulses = np.concatenate([_pulses_of(stream)[stream.given : stream.given + n] for stream, n in spans])
        noise = np.concatenate([frame_noise(s.seed, s.segment, s.given, n, 2 * BINS) for s, n in spans if n])
        source = torch.from_numpy(pulses).to(self._device)
        frames = synthesise(spectrum.rows, source, torch.from_numpy(noise).to(self._device)).cpu().numpy()
        borders = np.cumsum(spectrum.lengths)[:-1]
        return [wave.reshape(-1, OVERLAPS, HOP) for wave in np.split(frames, borders)]


def synthesise(spectrum: Tensor, pulses: Tensor, noise: Tensor) -> Tensor:
    """Frames [n, 1200] from the spectral parts [n, 5 * 601], framed pulses [n, 1200] and noise [n, 2 * 601]."""
    log_harmonic, theta, log_noise, log_rest, phase = torch.functional.split(spectrum, BINS, dim=1)
    source = torch.fft.rfft(pulses * _SOURCE_WINDOW.to(pulses.device))
    total = torch.polar(_magnitude(log_harmonic), torch.tanh(theta) * torch.pi) * source
    total += torch.view_as_complex(noise.view(-1, BINS, 2)) * _magnitude(log_noise)
    total += torch.polar(_magnitude(log_rest), phase)
    frames: Tensor = torch.fft.irfft(total, FFT) * _SYNTHESIS_WINDOW.to(pulses.device)
    return frames


def framed_pulses(f0: Array) -> Array:
    """The pulse train of a pitch curve [F] in Hz, cut into overlapping frames [F, 1200] (a view of one array)."""
    padded = np.pad(pulse_train(f0), FFT // 2, mode="reflect")
    return np.lib.stride_tricks.sliding_window_view(padded, FFT)[::HOP][: len(f0)]


def pulse_train(f0: Array) -> Array:
    """Samples [300 F] of all harmonics below 11 kHz at unit amplitude; 0 where the pitch is below 40 Hz.

    sum_{h=1..H} cos(h t) = sin((H + 1/2) t) / (2 sin(t / 2)) - 1/2, with the limit H near t = 0.
    """
    pitch = _per_sample(np.asarray(f0, np.float32))
    voiced = pitch > _VOICED_HZ
    pitch = np.maximum(pitch, np.float32(_VOICED_HZ))
    turns = np.cumsum(pitch, dtype=np.float64) / SAMPLE_RATE
    phase = (2 * np.pi * (turns % 1.0)).astype(np.float32)
    order = np.floor(np.float32(_HIGHEST_HARMONIC_HZ) / pitch) + np.float32(0.5)
    below = 2 * np.sin(phase * np.float32(0.5))
    at_pulse = np.abs(below) <= 2e-3
    ratio = np.sin(order * phase) / np.where(at_pulse, np.float32(1), below)
    pulses = np.where(at_pulse, order, ratio) - np.float32(0.5)
    return np.where(voiced, pulses, np.float32(0))


def _per_sample(f0: Array) -> Array:
    """Linear interpolation between frame centres: sample j of frame k lies at k + (j + 1/2) / 300 - 1/2."""
    half = HOP // 2
    padded = np.pad(f0, 1, mode="edge")
    upper = (((np.arange(HOP) + 0.5) / HOP - 0.5) % 1.0).astype(np.float32)
    before, here, after = padded[:-2, None], padded[1:-1, None], padded[2:, None]
    rising = before * (1 - upper[:half]) + here * upper[:half]
    falling = here * (1 - upper[half:]) + after * upper[half:]
    return np.concatenate((rising, falling), axis=1).reshape(-1)


def _magnitude(log: Tensor) -> Tensor:
    return torch.exp(log.clamp(max=_LOG_MAGNITUDE_LIMIT))


def _pulses_of(stream: Stream) -> Array:
    if stream.extra is None:
        raise ValueError("a stream of another decoder")
    return stream.extra


def _overlap_add(part: Part, flow: Flow, frames: Array) -> Decoded:
    """Adds frames [n, 4, 300] to what is carried; gives the samples that no later frame changes."""
    stream, count = part.stream, len(frames)
    hops = np.zeros((count + OVERLAPS - 1, HOP), np.float32)
    if stream.overlap is not None:
        hops[: OVERLAPS - 1] = stream.overlap
    for shift in range(OVERLAPS):
        hops[shift : shift + count] += frames[:, shift]
    total = len(stream.rows)
    # Hop h of the padded signal holds the samples from 300 h - 600 on; the signal is hops 2 to F + 1.
    first = max(2, stream.given)
    last = total + 2 if part.ends else stream.given + count
    complete = hops[first - stream.given : max(first, last) - stream.given]
    samples = complete / _window_sum(first, max(first, last), total)
    return Decoded(part=part, samples=samples.reshape(-1), given=count, carry=flow.after, overlap=hops[count:].copy())


def _window_sum(first: int, last: int, frames: int) -> Array:
    """Sum of squared windows over the hops first..last-1 when `frames` frames overlap: [last - first, 300]."""
    frame = np.arange(first, last)[:, None] - np.arange(OVERLAPS)
    inside = ((frame >= 0) & (frame < frames)).astype(np.float32)
    return np.maximum(inside @ _SQUARED_WINDOW, np.float32(1e-11))

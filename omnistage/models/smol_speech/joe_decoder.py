"""The decoder of the voice "joe" (Piper): HiFi-GAN with 256 samples per frame, streamed without recomputation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from omnistage.models.smol_speech.decoding import Decoded, Part, Stream
from omnistage.models.smol_speech.packed import Flow, Packed, PackedConv, PackedSum, PackedUpsample

Array = npt.NDArray[Any]

STRIDES = (8, 8, 4)
# Dilations of the two convolutions in each of the three residual blocks behind an upsampling; kernels 3, 5, 7.
DILATIONS = ((1, 2), (2, 6), (3, 12))
# Frames behind a frame that its samples depend on (half the receptive field, rounded up).
LOOKAHEAD = 11

_leaky = partial(F.leaky_relu, negative_slope=0.1)
_leaky_last = partial(F.leaky_relu, negative_slope=0.01)


class _Residual:
    """x -> x + conv(leaky(x)), twice."""

    def __init__(self, weights: dict[str, Tensor], name: str, dilations: tuple[int, ...], slots: count[int]) -> None:
        self._convs = []
        for index, dilation in enumerate(dilations):
            weight = weights[f"{name}.convs.{index}.weight"]
            padding = (weight.shape[2] - 1) // 2 * dilation
            bias = weights[f"{name}.convs.{index}.bias"]
            self._convs.append(PackedConv(next(slots), weight, bias, (padding, padding), dilation))

    def __call__(self, packed: Packed, flows: Sequence[Flow]) -> Packed:
        for conv in self._convs:
            change, kept = conv.with_aligned(packed, flows, _leaky)
            packed = Packed(change.rows + kept.rows, change.lengths)
        return packed


class _Level:
    """Upsampling, then the mean of three residual blocks."""

    def __init__(self, weights: dict[str, Tensor], index: int, stride: int, slots: count[int]) -> None:
        name = f"dec.ups.{index}"
        self._upsample = PackedUpsample(next(slots), weights[f"{name}.weight"], weights[f"{name}.bias"], stride)
        blocks = enumerate(DILATIONS, start=index * len(DILATIONS))
        self._blocks = [_Residual(weights, f"dec.resblocks.{block}", dilations, slots) for block, dilations in blocks]
        self._sum = PackedSum([next(slots) for _ in self._blocks])

    def __call__(self, packed: Packed, flows: Sequence[Flow]) -> Packed:
        packed = self._upsample(packed, flows, _leaky)
        total = self._sum([block(packed, flows) for block in self._blocks], flows)
        return total.map(lambda rows: rows / len(self._blocks))


class JoeNet:
    """Latent frames [n, 192] to samples [256 n, 1], all streams of a batch at once."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        slots = count()
        self._input = PackedConv(next(slots), weights["dec.conv_pre.weight"], weights["dec.conv_pre.bias"], (3, 3))
        self._levels = [_Level(weights, index, stride, slots) for index, stride in enumerate(STRIDES)]
        self._output = PackedConv(next(slots), weights["dec.conv_post.weight"], None, (3, 3))

    def __call__(self, frames: Packed, flows: Sequence[Flow]) -> Packed:
        packed = self._input(frames, flows)
        for level in self._levels:
            packed = level(packed, flows)
        return self._output(packed, flows, _leaky_last).map(torch.tanh)


class JoeDecoder:
    """A `Decoder`; 22050 Hz."""

    lookahead = LOOKAHEAD

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        voice = json.loads((folder / "voice.json").read_text(encoding="utf-8"))
        self.sample_rate: int = voice["sample_rate"]
        self._device = device
        self._net = JoeNet(load_file(folder / "decoder.safetensors", device))

    def begin(self, tensors: dict[str, Array], seed: int, segment: int) -> Stream:
        return Stream(rows=np.ascontiguousarray(tensors["z"].T), seed=seed, segment=segment)

    @torch.inference_mode()
    def decode(self, parts: list[Part]) -> list[Decoded]:
        flows = [Flow(part.stream.carry, part.ends) for part in parts]
        taken = [part.stream.rows[part.stream.taken : part.stream.taken + part.count] for part in parts]
        packed = self._net(Packed.of([torch.from_numpy(rows).to(self._device) for rows in taken]), flows)
        results = []
        for part, flow, rows in zip(parts, flows, packed.split(), strict=True):
            samples = rows[:, 0].cpu().numpy().copy()
            given = len(part.stream.rows) - part.stream.given if part.ends else 0
            results.append(Decoded(part=part, samples=samples, given=given, carry=flow.after))
        return results

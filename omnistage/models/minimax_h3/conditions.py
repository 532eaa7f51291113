"""What a request is conditioned on: text states and encoded media.

`Conditions` is all that a denoiser needs of prompt and media, and travels between stages as a payload.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnistage.payload import Array, MultimodalPayload
from omnistage.payload import Tensor as PayloadTensor

Media = dict[str, Array]


@dataclass
class Conditions:
    """On the CPU. `text` [L, width]; `tags` int8 [L]; `visual`: latents [1, C, T, h, w], normalised, float32; `sound`:
    rows [2 * latents, C], left channel first, normalised, float32; both in the client's order."""

    text: Tensor
    tags: npt.NDArray[np.int8]
    visual: list[Tensor] = field(default_factory=list)
    sound: list[Tensor] = field(default_factory=list)

    def payload(self) -> MultimodalPayload:
        tensors = {"text": _packed(self.text), "tags": PayloadTensor("int8", self.tags)}
        for name, latents in (("visual", self.visual), ("sound", self.sound)):
            tensors |= {f"{name}.{index}": _packed(tensor) for index, tensor in enumerate(latents)}
        return MultimodalPayload(tensors, {"visual": len(self.visual), "sound": len(self.sound)})


def read_conditions(payload: MultimodalPayload) -> Conditions:
    """Copies out of a payload, which may be released afterwards."""
    tensors = payload.tensors
    return Conditions(
        text=_unpacked(tensors["text"]),
        tags=tensors["tags"].array.copy(),
        visual=[_unpacked(tensors[f"visual.{index}"]) for index in range(int(payload.meta["visual"]))],
        sound=[_unpacked(tensors[f"sound.{index}"]) for index in range(int(payload.meta["sound"]))],
    )


def _packed(tensor: Tensor) -> PayloadTensor:
    if tensor.dtype == torch.bfloat16:
        return PayloadTensor("bfloat16", tensor.contiguous().view(torch.uint16).numpy())
    array = tensor.contiguous().numpy()
    return PayloadTensor(str(array.dtype), array)


def _unpacked(packed: PayloadTensor) -> Tensor:
    tensor = torch.from_numpy(packed.array.copy())
    return tensor.view(torch.bfloat16) if packed.dtype == "bfloat16" else tensor


class Encoded(NamedTuple):
    """`prompt_s` and `media_s`: seconds of the text encoder's batch and of the request's own media."""

    conditions: Conditions
    prompt_s: float
    media_s: float

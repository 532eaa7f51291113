"""Torch tensors in payloads: bfloat16 travels as its bits."""

from __future__ import annotations

import numpy as np
import torch

from omnistage.payload import Tensor as PayloadTensor

_BITS = {torch.bfloat16: "bfloat16"}


def to_payload(tensor: torch.Tensor) -> PayloadTensor:
    """A payload tensor with the values of `tensor`, on the CPU."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype in _BITS:
        return PayloadTensor(_BITS[host.dtype], host.view(torch.uint16).numpy())
    array = host.numpy()
    return PayloadTensor(str(array.dtype), array)


def from_payload(tensor: PayloadTensor) -> torch.Tensor:
    """A copy of a payload tensor."""
    copy = torch.from_numpy(np.array(tensor.array))
    return copy.view(torch.bfloat16) if tensor.dtype == "bfloat16" else copy

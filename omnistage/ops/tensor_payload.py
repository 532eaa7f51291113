"""Torch tensors in payloads: bfloat16 travels as its bits."""

from __future__ import annotations

import numpy as np
import torch

from omnistage.payload import Tensor as PayloadTensor


def to_payload(tensor: torch.Tensor) -> PayloadTensor:
    """A payload tensor with the values of `tensor`, on the CPU."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return PayloadTensor("bfloat16", host.view(torch.uint16).numpy())
    array = host.numpy()
    return PayloadTensor(str(array.dtype), array)


def from_payload(tensor: PayloadTensor, device: torch.device | None = None) -> torch.Tensor:
    """A copy of a payload tensor on `device` (None: the CPU)."""
    copied = torch.from_numpy(np.array(tensor.array))
    return (copied.view(torch.bfloat16) if tensor.dtype == "bfloat16" else copied).to(device)

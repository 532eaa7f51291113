"""Packed weights as a transformation of a loaded model: 4-bit linears, 8-bit output head, bfloat16 activations.

Weight-only, so a row's result does not depend on its batch mates. Quantising activations as well (dynamic int8) would
be faster, but shares one scale among all rows of a step and is refused for that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from omnistage.errors import ConfigError

GROUP = 32
_LEVELS = 15
_ROW_MULTIPLE = 16


class Int4Linear(nn.Module):
    """A linear layer with 4-bit weights in groups of `GROUP` inputs, each with a scale and a zero point in bfloat16.

    Kernel: torch's `_weight_int4pack_mm_for_cpu`, weight = (q - 8) * scale + zero.
    """

    packed: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        levels, scale, zero = group_levels(linear.weight.detach().float())
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        self.register_buffer("packed", packed)
        # [in / GROUP, out, 2]
        self.register_buffer("scales", torch.stack([scale, zero], -1).transpose(0, 1).contiguous().bfloat16())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        # x: [..., in] -> [..., out]
        rows = x.reshape(-1, self.in_features).bfloat16()
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scales)
        y = y.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights and one scale per output, for heads: 4 bits there cost too much quality.

    The embedding that a head may share its weight with stays whole.
    """

    levels: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(1) / 127).clamp_min(1e-12)
        self.register_buffer("levels", torch.round(weight / scale[:, None]).clamp(-127, 127).to(torch.int8))
        self.register_buffer("scales", scale.bfloat16())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        # x: [..., in] -> [..., out]
        rows = x.reshape(-1, self.in_features).bfloat16()
        y = torch._weight_int8pack_mm(rows, self.levels, self.scales)
        y = y.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def group_levels(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Levels int32 0..15 [out, in], scales and zero points float32 [out, in / GROUP] of a weight [out, in]."""
    out, columns = weight.shape
    groups = weight.view(out, columns // GROUP, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / _LEVELS).clamp_min(1e-12)
    levels = torch.round((groups - low[..., None]) / scale[..., None]).clamp(0, _LEVELS)
    return levels.view(out, columns).to(torch.int32), scale, low + 8 * scale


def pack_linears(module: nn.Module) -> int:
    """Replaces the linear layers below `module` by packed ones, in place; returns how many.

    A layer whose sides do not fit the kernel's blocks stays as it is. Raises ConfigError on anything but a CPU.
    """
    packed = 0
    for name, child in list(module.named_children()):
        if not isinstance(child, nn.Linear):
            packed += pack_linears(child)
            continue
        if child.weight.device.type != "cpu":
            raise ConfigError(f"quantization int4 runs on a CPU, not on {child.weight.device.type}")
        if child.in_features % GROUP == 0 and child.out_features % _ROW_MULTIPLE == 0:
            setattr(module, name, Int4Linear(child))
            packed += 1
    return packed

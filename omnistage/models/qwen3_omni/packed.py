"""4-bit weights for the thinker: its linear layers, its experts, and its output head at 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omnistage.ops.quantize import Int8Linear, pack_linears


class PackedExperts(nn.Module):
    """Transformers' experts with one packed linear layer per expert and matrix; each expert sees its tokens at once.

    A matrix whose sides do not fit the packed kernel stays whole.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._act = experts.act_fn
        self.gate_up = nn.ModuleList([_linear(weight) for weight in experts.gate_up_proj])
        self.down = nn.ModuleList([_linear(weight) for weight in experts.down_proj])
        pack_linears(self.gate_up)
        pack_linears(self.down)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [N, H], chosen experts and their weights [N, k] -> [N, H]."""
        total = torch.zeros_like(hidden)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            gate, up = self.gate_up[expert](hidden[rows]).chunk(2, dim=-1)
            made = self.down[expert](self._act(gate) * up)
            total.index_add_(0, rows, (made * weights[rows, ranks, None]).to(total.dtype))
        return total


def pack_thinker(thinker: Any) -> None:
    """Packs the text model and head of transformers' thinker in place; the encoders stay whole. Raises ConfigError on
    anything but a CPU."""
    model = thinker.model.language_model
    pack_linears(model)
    for layer in model.layers:
        if "experts" in dict(layer.mlp.named_children()):
            layer.mlp.experts = PackedExperts(layer.mlp.experts)
    thinker.lm_head = Int8Linear(thinker.lm_head)


def _linear(weight: Tensor) -> nn.Linear:
    """A linear layer over a weight [out, in], which it shares."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return linear

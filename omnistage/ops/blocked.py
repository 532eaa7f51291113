"""Layers whose weights lie in blocks, the order in which a CPU's vector units read them: a transformation of a loaded
float32 model.

oneDNN's kernel for such weights is 1.3 to 1.6 times as fast as the one for plain weights on 4 to 32 rows (a batch of
decode steps); on one row plain weights are about a tenth faster (`python -m bench.ar`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from omnistage.errors import ConfigError
from omnistage.ops.layout_rule import LayoutName, automatic_layout

# From this many rows on blocks win.
_MANY_ROWS = 4
# The length for which a convolution's blocks are chosen; they serve any other.
_TYPICAL_LENGTH = 128


class BlockedLinear(nn.Module):
    """A linear layer [..., in] -> [..., out] with blocked weights and, with `keep_plain`, the plain ones for up to
    three rows."""

    def __init__(self, linear: nn.Linear, *, keep_plain: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.plain = linear if keep_plain else None
        self.bias = linear.bias
        # An opaque tensor: neither a parameter nor a buffer, it cannot be moved or cast.
        self._blocks: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _MANY_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        if self.plain is not None and x.numel() < _MANY_ROWS * self.in_features:
            plain: Tensor = self.plain(x)
            return plain
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocks, self.bias, "none", [], "")
        return y


class BlockedConv1d(nn.Module):
    """A convolution [B, in, T] -> [B, out, T2] with blocked weights; every call would put plain ones in blocks."""

    def __init__(self, conv: nn.Conv1d) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.bias = conv.kernel_size, conv.stride, conv.bias
        self._groups = conv.groups
        self._padding, self._stride, self._dilation = [0, _one(conv.padding)], [1, *conv.stride], [1, *conv.dilation]
        size = [1, conv.in_channels, 1, _TYPICAL_LENGTH]
        self._blocks: Tensor = torch.ops.mkldnn._reorder_convolution_weight(
            conv.weight.detach()[:, :, None], self._padding, self._stride, self._dilation, conv.groups, size
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._convolution_pointwise(
            x[:, :, None], self._blocks, self.bias, self._padding, self._stride, self._dilation, self._groups,
            "none", [], "",
        )  # fmt: skip
        return y[:, :, 0]


class BlockedConvTranspose1d(nn.Module):
    """A transposed convolution [B, in, T] -> [B, out, (T - 1) * stride + kernel] whose kernel is a multiple of its
    stride, as one linear layer and a sum of shifted rows."""

    def __init__(self, conv: nn.ConvTranspose1d) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.bias = conv.kernel_size, conv.stride, conv.bias
        self._overlap = conv.kernel_size[0] // conv.stride[0]
        # [kernel * out, in]
        rows = conv.weight.detach().permute(2, 1, 0).reshape(-1, conv.in_channels).contiguous()
        self._blocks: Tensor = torch.ops.mkldnn._reorder_linear_weight(rows, _MANY_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, length = x.shape
        stride = self.stride[0]
        made = torch.ops.mkldnn._linear_pointwise(x.transpose(1, 2), self._blocks, None, "none", [], "")
        parts = made.view(batch, length, self._overlap, stride, -1)
        total = parts.new_zeros(batch, length + self._overlap - 1, stride, parts.shape[-1])
        for shift in range(self._overlap):
            total[:, shift : shift + length] += parts[:, :, shift]
        y: Tensor = total.view(batch, -1, parts.shape[-1])
        return (y if self.bias is None else y + self.bias).transpose(1, 2)


def choose_layout(requested: LayoutName, model: nn.Module, memory_bytes: int | None = None) -> LayoutName:
    """How `model` holds the weights of its linear layers: "plain", "blocked" or "both".

    "auto" is plain but for float32 on a CPU, there both while the weights take at most a sixteenth of the machine's
    memory, else blocked. Raises ConfigError for blocks elsewhere.
    """
    weight = next(model.parameters())
    possible = weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if requested == "auto":
        return automatic_layout(parameter_bytes(model), memory_bytes) if possible else "plain"
    if requested != "plain" and not possible:
        raise ConfigError(f"weight_layout {requested}: blocks are for float32 on a CPU", param="weight_layout")
    return requested


def block_linears(module: nn.Module, layout: LayoutName) -> int:
    """Replaces the linear layers below `module` by blocked ones, in place; returns how many. Nothing for "plain"."""
    if layout == "plain":
        return 0
    blocked = 0
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, BlockedLinear(child, keep_plain=layout == "both"))
            blocked += 1
        elif not isinstance(child, BlockedLinear):
            blocked += block_linears(child, layout)
    return blocked


def block_linear(linear: nn.Linear, layout: LayoutName) -> nn.Module:
    """One layer; itself for "plain". An output head that shares its weight with an embedding leaves that as it is."""
    return linear if layout == "plain" else BlockedLinear(linear, keep_plain=layout == "both")


def block_convolutions(module: nn.Module, layout: LayoutName) -> int:
    """Replaces the convolutions along one axis below `module`, in place; returns how many. Nothing for "plain".

    Depthwise and pointwise ones, and transposed ones of another kind, stay as they are: blocks gain nothing there.
    """
    if layout == "plain":
        return 0
    blocked = 0
    for name, child in list(module.named_children()):
        made = _blocked_convolution(child)
        if made is not None:
            setattr(module, name, made)
            blocked += 1
        elif not isinstance(child, BlockedConv1d | BlockedConvTranspose1d):
            blocked += block_convolutions(child, layout)
    return blocked


def _blocked_convolution(module: nn.Module) -> nn.Module | None:
    if type(module) is nn.Conv1d:
        gains = module.groups == 1 and module.kernel_size[0] > 1 and module.out_channels > 1
        return BlockedConv1d(module) if gains and not isinstance(module.padding, str) else None
    if type(module) is nn.ConvTranspose1d:
        whole = module.kernel_size[0] % module.stride[0] == 0
        usual = module.groups == 1 and not any((*module.padding, *module.output_padding)) and module.dilation == (1,)
        return BlockedConvTranspose1d(module) if whole and usual else None
    return None


def _one(padding: str | tuple[int, ...]) -> int:
    assert not isinstance(padding, str)
    return padding[0]


def parameter_bytes(model: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())

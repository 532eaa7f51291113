"""What a step holds beside weights and caches, from the sizes that a configuration gives. Bytes. Torch-free.

Counted are the tensors that are alive together at the fullest point of one layer, as the modules of the libraries
compute it one operation after the other; what one layer held is free for the next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from omnistage.config.footprint import CACHED_KERNELS, Working
from omnistage.config.model import StageConfig

_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOAT32 = 4
# One compiled kernel of oneDNN for a linear layer and a row count, measured.
_KERNEL_BYTES = 640 << 10


class Layer(NamedTuple):
    """A layer of a transformer: `inner` is the width of its feed-forward part, or of one of the `experts` (most experts
    of a row) beside it."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    experts: int = 0
    expert_inner: int = 0

    def nbytes(self, rows: int, dtype: str) -> int:
        """Of `rows` rows that go through it together."""
        item = _ITEM[dtype]
        # The residual and the normed rows; norms compute in float32: the rows, their squares.
        stream = rows * self.width * (2 * item + 2 * _FLOAT32)
        # Queries, keys and values before and after rotation, and the attended rows.
        attention = rows * self.head_dim * item * (2 * (self.heads + 2 * self.kv_heads) + self.heads)
        # Gate, activated gate, up and their product.
        dense = 4 * rows * self.inner * item
        # A row's copy per expert in and out, twice the latter (weighted); gate and up as one, cut and multiplied.
        routed = rows * self.experts * item * (3 * self.width + 4 * self.expert_inner)
        return stream + max(attention, dense + routed)


def layer_of(text: dict[str, Any]) -> Layer:
    """From the configuration of a transformers text model; without `intermediate_size` it is four times the width."""
    heads, width = int(text["num_attention_heads"]), int(text["hidden_size"])
    experts = int(text.get("num_experts_per_tok") or 0) if text.get("num_experts") else 0
    dense = int(text.get("intermediate_size") or 4 * width)
    return Layer(
        width=width,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or width // heads),
        inner=int(text.get("shared_expert_intermediate_size") or 0) if experts else dense,
        experts=experts,
        expert_inner=int(text.get("moe_intermediate_size") or 0),
    )


def ar_step(layer: Layer, vocab: int, stage: StageConfig, max_model_len: int) -> Working:
    """A step of an AR stage on its full token budget, or the sampling of all its sequences if that is more.

    A prompt chunk sees up to `max_model_len` positions: its mask, and keys and values out of their blocks. Logits are
    there as computed and in float32 as they came, as demanded, scaled and cut.
    """
    item = _ITEM[stage.dtype]
    longest = min(max_model_len, stage.max_model_len or max_model_len, _cached(layer, stage))
    seen = longest * (stage.token_budget + 2 * layer.kv_heads * layer.head_dim) * item
    rows = Working(layer.nbytes(stage.token_budget, stage.dtype) + seen, f"{stage.token_budget} tokens")
    logits = vocab * (item + 4 * _FLOAT32)
    return fullest(rows, Working(stage.max_num_seqs * logits, f"logits of {stage.max_num_seqs}", logits))


def denoising_step(layer: Layer, stage: StageConfig, largest: int = 0) -> Working:
    """A step of a denoiser: of its whole budget of rows, or of all its requests, of `largest` rows each (0: any).

    A request that alone has more rows than the budget runs all the same, and takes more.
    """
    asked = stage.max_num_seqs * largest or stage.token_budget
    rows = min(stage.token_budget, asked)
    one = layer.nbytes(largest, stage.dtype) if asked <= stage.token_budget else 0
    return Working(layer.nbytes(rows, stage.dtype), f"{rows} rows", one)


def fullest(*steps: Working, beside: int = 0) -> Working:
    """The step that holds most, and `beside` bytes that all have."""
    most = max(steps, key=lambda step: step.nbytes, default=Working())
    return Working(most.nbytes + beside, most.of, most.per_stream)


def at_once(first: Working, second: Working) -> Working:
    """Of work that two threads of a stage do at the same time: denoising and the decoding of an earlier request."""
    return Working(first.nbytes + second.nbytes, f"{first.of}, {second.of}", first.per_stream + second.per_stream)


def _cached(layer: Layer, stage: StageConfig) -> int:
    """Positions that the KV memory can hold at most (of one layer's width: an upper bound)."""
    return (stage.kv_memory_mb << 20) // (2 * layer.kv_heads * layer.head_dim * _ITEM[stage.dtype])


def kernels(stage: StageConfig, layout: str) -> int:
    """Compiled kernels of linear layers that a process keeps: of blocked float32 and of 16-bit types on a CPU.

    Each row count that comes brings some, up to the bound of the process: half of it is counted for blocks, and all of
    it for 16-bit types, of which products of attention are compiled too.
    """
    if stage.device != "cpu":
        return 0
    bound = CACHED_KERNELS * _KERNEL_BYTES
    return bound if stage.dtype != "float32" else bound // 2 * (layout in ("blocked", "both"))

"""Attention over a paged key/value cache, plugged into unmodified transformers modules.

A step runs one forward over a *flat batch*: the new rows of every request behind each other, [1, N, hidden]. The module
computes queries, keys and values (rotary applied); the function registered here writes the keys and values into the
cache and attends per request through its block table. One `AttentionPlan` per step serves all layers; it reaches the
function as the model's `plan=` keyword. Modules must be called with `use_cache=False`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from omnistage.errors import ConfigError, StageError

# Deploy-file name -> name in the transformers registry. The latter must not be in its mask registry: then the model
# builds no mask of its own, which would see the flat batch as one sequence.
_REGISTERED = {"TORCH_SDPA": "omnistage_torch_sdpa"}


def attention_implementation(backend: str) -> str:
    """The transformers attention name for a deploy file's `attention_backend`. Raises ConfigError when it is not
    there."""
    name = _REGISTERED.get("TORCH_SDPA" if backend == "auto" else backend)
    if name is None:
        raise ConfigError(
            f"attention_backend {backend!r} is not available for AR stages; use one of {sorted(_REGISTERED)}",
            param="attention_backend",
        )
    return name


class PagedCache:
    """Keys and values of all layers: each [kv_heads, blocks * block_size, head_dim], slot = block * block_size +
    offset."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (kv_heads, blocks * block_size, head_dim)
        self.block_size = block_size
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._scratch = (torch.empty(0, dtype=dtype, device=device), torch.empty(0, dtype=dtype, device=device))

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores new rows: slots [N], key and value [kv_heads, N, head_dim]."""
        self.keys[layer].index_copy_(1, slots, key)
        self.values[layer].index_copy_(1, slots, value)

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Whole blocks [n] of a layer as key, value [kv_heads, n, block_size, head_dim], valid until the next
        gather."""
        heads, _, dim = self.keys[layer].shape
        size = heads * blocks.numel() * self.block_size * dim
        if self._scratch[0].numel() < size:
            self._scratch = (self._scratch[0].new_empty(size * 2), self._scratch[1].new_empty(size * 2))
        key, value = (part[:size].view(heads, blocks.numel(), self.block_size, dim) for part in self._scratch)
        paged = (heads, -1, self.block_size, dim)
        torch.index_select(self.keys[layer].view(paged), 1, blocks, out=key)
        torch.index_select(self.values[layer].view(paged), 1, blocks, out=value)
        return key, value

    def read(self, slots: Tensor) -> Tensor:
        """Keys and values of `slots` [n] as [layers, 2, kv_heads, n, head_dim] (a copy)."""
        pairs = zip(self.keys, self.values, strict=True)
        return torch.stack([torch.stack((key[:, slots], value[:, slots])) for key, value in pairs])


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """New rows of one request: positions `start..stop` on top of `start` cached ones; `blocks` covers `stop` positions.

    Rows of a `bidirectional` span see each other wholly; such a span may not be split over two steps.
    """

    blocks: Sequence[int]
    start: int
    stop: int
    bidirectional: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """`count` rows from `row` of the flat batch. `slots` [start + count] and `mask` [count, start + count] are None
    when nothing is cached and plain causal attention over the chunk's own rows is right."""

    row: int
    count: int
    slots: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Single rows, one per request: `rows` [B] in the flat batch (None: all), `blocks` [B * width], lengths <=
    `length`.

    `ends` [B, 1] are the lengths. `mask` [B, 1, 1, width * block_size] is additive; None when every request has exactly
    `length` positions and sees them all.
    """

    batch: int
    width: int
    length: int
    ends: Tensor
    rows: Tensor | None
    blocks: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where the rows of one step go (`slots` [N]) and what each of them sees."""

    cache: PagedCache
    slots: Tensor
    decode: DecodeRows | None
    chunks: list[PrefillChunk] = field(default_factory=list)
    _within: dict[int, AttentionPlan] = field(default_factory=dict)

    def within(self, window: int | None) -> AttentionPlan:
        """The plan with rows that see only the last `window` positions, their own included; None: all of them."""
        if window is None:
            return self
        if window not in self._within:
            decode = None if self.decode is None else _windowed_rows(self.cache, self.decode, window)
            chunks = [_windowed_chunk(chunk, window, self.slots.device) for chunk in self.chunks]
            self._within[window] = AttentionPlan(self.cache, self.slots, decode, chunks)
        return self._within[window]


def slots_of(blocks: Sequence[int], start: int, stop: int, block_size: int, device: torch.device) -> Tensor:
    """Cache slots [stop - start] of a request's positions `start..stop`."""
    first = start // block_size
    table = torch.tensor(blocks[first : -(-stop // block_size)], dtype=torch.long, device=device)
    grid = table[:, None] * block_size + torch.arange(block_size, device=device)
    return grid.view(-1)[start - first * block_size : stop - first * block_size]


def plan_attention(cache: PagedCache, spans: Sequence[AttentionSpan]) -> AttentionPlan:
    """The plan of one step; the flat batch holds the rows of `spans` in order."""
    slots: list[int] = []
    singles: list[tuple[int, AttentionSpan]] = []
    chunks: list[PrefillChunk] = []
    row = 0
    for span in spans:
        size = cache.block_size
        slots.extend(span.blocks[at // size] * size + at % size for at in range(span.start, span.stop))
        if span.stop - span.start == 1:
            singles.append((row, span))
        else:
            chunks.append(_chunk(cache, span, row))
        row += span.stop - span.start
    decode = _decode_rows(cache, singles, mixed=bool(chunks)) if singles else None
    return AttentionPlan(cache, torch.tensor(slots, device=cache.device), decode, chunks)


def _chunk(cache: PagedCache, span: AttentionSpan, row: int) -> PrefillChunk:
    count = span.stop - span.start
    inside = [pair for pair in span.bidirectional if pair[0] < span.stop and pair[1] > span.start]
    if span.start == 0 and not inside:
        return PrefillChunk(row, count, None, None)
    mask = torch.ones(count, span.stop, dtype=torch.bool, device=cache.device).tril(span.start)
    for begin, end in inside:
        if begin < span.start or end > span.stop:
            raise StageError(f"bidirectional span {begin}..{end} is split by the chunk {span.start}..{span.stop}")
        mask[begin - span.start : end - span.start, begin:end] = True
    return PrefillChunk(row, count, slots_of(span.blocks, 0, span.stop, cache.block_size, cache.device), mask)


def _decode_rows(cache: PagedCache, singles: Sequence[tuple[int, AttentionSpan]], *, mixed: bool) -> DecodeRows:
    size = cache.block_size
    lengths = [span.stop for _, span in singles]
    longest = max(lengths)
    width = -(-longest // size)
    table: list[int] = []
    for _, span in singles:
        used = -(-span.stop // size)
        table.extend(span.blocks[:used])
        table.extend([0] * (width - used))
    ends = torch.tensor(lengths, device=cache.device)[:, None]
    mask = None
    if min(lengths) < longest:
        mask = _additive(torch.arange(width * size, device=cache.device) >= ends, cache.dtype)
    rows = torch.tensor([row for row, _ in singles], device=cache.device) if mixed else None
    blocks = torch.tensor(table, dtype=torch.long, device=cache.device)
    return DecodeRows(len(singles), width, longest, ends, rows, blocks, mask)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask [B, 1, 1, L] that keeps `hidden` [B, L] positions out of sight."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]


def _windowed_rows(cache: PagedCache, decode: DecodeRows, window: int) -> DecodeRows:
    if decode.length <= window:
        return decode
    at = torch.arange(decode.width * cache.block_size, device=cache.device)
    return replace(decode, mask=_additive((at >= decode.ends) | (at < decode.ends - window), cache.dtype))


def _windowed_chunk(chunk: PrefillChunk, window: int, device: torch.device) -> PrefillChunk:
    start = 0 if chunk.slots is None else chunk.slots.numel() - chunk.count
    if start + chunk.count <= window:
        return chunk
    mask = chunk.mask
    if mask is None:
        mask = torch.ones(chunk.count, chunk.count, dtype=torch.bool, device=device).tril()
    return replace(chunk, mask=mask.triu(start - window + 1))


def paged_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: AttentionPlan | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """A transformers attention function: query [1, H, N, D], key and value [1, KV, N, D] -> [1, N, H, D].

    With the option `sliding_window` a row sees that many positions, its own included.
    Raises StageError for a module or option that it does not compute: non-causal modules, soft caps, attention sinks,
    dropout, a mask made elsewhere, a batch above 1, a call without plan.
    """
    if plan is None:
        raise StageError(f"{type(module).__name__}: paged attention was called without a plan")
    _refuse_unexpected(module, query, attention_mask, dropout, options)
    cache, layer = plan.cache, module.layer_idx
    cache.write(layer, plan.slots, key[0], value[0])
    plan = plan.within(options.get("sliding_window"))
    out = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
    if plan.decode is not None:
        _attend_decode(cache, layer, plan.decode, query, out, scaling)
    for chunk in plan.chunks:
        _attend_chunk(cache, layer, chunk, (query, key, value), out, scaling)
    return out[None], None


def _refuse_unexpected(
    module: Any, query: Tensor, attention_mask: Tensor | None, dropout: float, options: dict[str, Any]
) -> None:
    name = type(module).__name__
    if not module.is_causal:
        raise StageError(f"{name}: paged attention serves causal modules only")
    if attention_mask is not None or dropout or query.shape[0] != 1:
        raise StageError(f"{name}: paged attention takes a flat batch of one without mask and without dropout")
    for option in ("softcap", "s_aux"):
        if options.get(option) is not None:
            raise StageError(f"{name}: paged attention does not support {option}")


def _attend_decode(
    cache: PagedCache, layer: int, decode: DecodeRows, query: Tensor, out: Tensor, scaling: float | None
) -> None:
    """One query row per request; the heads of a group act as query rows, so keys are not repeated."""
    key, value = cache.gather(layer, decode.blocks)
    heads, _, size, dim = key.shape
    flat = query[0].transpose(0, 1)  # [N, H, D]
    picked = flat if decode.rows is None else flat[decode.rows]
    grouped = picked.reshape(decode.batch, heads, -1, dim)  # [B, KV, H / KV, D]
    shape = (heads, decode.batch, decode.width * size, dim)
    key, value = (part.view(shape).transpose(0, 1) for part in (key, value))  # [B, KV, L, D]
    if decode.mask is None:
        key, value = key[:, :, : decode.length], value[:, :, : decode.length]
    result = scaled_dot_product_attention(grouped, key, value, attn_mask=decode.mask, scale=scaling)
    result = result.reshape(decode.batch, -1, dim)
    if decode.rows is None:
        out.copy_(result)
    else:
        out[decode.rows] = result


def _attend_chunk(
    cache: PagedCache,
    layer: int,
    chunk: PrefillChunk,
    states: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    scaling: float | None,
) -> None:
    rows = slice(chunk.row, chunk.row + chunk.count)
    query, key, value = (part[:, :, rows] for part in states)
    if chunk.slots is not None:
        key, value = cache.keys[layer][None, :, chunk.slots], cache.values[layer][None, :, chunk.slots]
    result = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    out[rows] = result[0].transpose(0, 1)


AttentionInterface.register(_REGISTERED["TORCH_SDPA"], paged_sdpa)

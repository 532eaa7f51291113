"""Attention over documents: rows of several requests packed one after the other, each attending only to its own.

Three implementations with one meaning, chosen by name in the stage configuration: a loop of SDPA calls (any device),
flex attention with a document mask, and variable-length flash attention (both on CUDA).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from omnistage.errors import ConfigError

Backend = Literal["TORCH_SDPA", "FLEX_ATTENTION", "FLASH_ATTN"]
Prefix = tuple[Tensor, Tensor]

_HALF = (torch.float16, torch.bfloat16)


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype, *, stage: str = "") -> Backend:
    """The implementation for a stage. "auto": FLASH_ATTN on CUDA in half precision, else TORCH_SDPA.

    Raises ConfigError for what the device or dtype cannot run.
    """
    if requested == "TORCH_SDPA":
        return "TORCH_SDPA"
    on_cuda, half = device.type == "cuda", dtype in _HALF
    if requested == "auto":
        return "FLASH_ATTN" if on_cuda and half else "TORCH_SDPA"
    if requested == "FLASH_ATTN" and on_cuda and half:
        return "FLASH_ATTN"
    if requested == "FLEX_ATTENTION" and on_cuda:
        return "FLEX_ATTENTION"
    need = "a CUDA device" if requested == "FLEX_ATTENTION" else "a CUDA device and bfloat16 or float16"
    key = f"stages.{stage}.attention_backend"
    raise ConfigError(
        f"{key}: {requested} needs {need}, not {device.type} with {dtype}; use auto or TORCH_SDPA", param=key
    )


class _Layout(NamedTuple):
    """Per document the count of its query rows and of its key rows (prefix included)."""

    queries: list[int]
    keys: list[int]


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    *,
    prefixes: Sequence[Prefix] | None = None,
    causal: bool = False,
    backend: Backend = "TORCH_SDPA",
) -> Tensor:
    """Softmax attention inside each document, [rows, heads, dim] like `query`.

    `query` [rows, heads, dim], `key` and `value` [rows, kv_heads, dim] (kv_heads divides heads); `lengths` are the rows
    of each document, in order, summing to rows. `prefixes`: per document keys and values [n, kv_heads, dim] that its
    rows see in addition (cached context), before its own. `causal` lets a row see its own document up to itself.
    Raises ValueError when lengths and rows differ, or for a causal document with a prefix.
    """
    if sum(lengths) != query.shape[0] or (causal and prefixes is not None):
        raise ValueError(f"{query.shape[0]} rows do not split into {list(lengths)}, or causal rows have a prefix")
    if backend == "TORCH_SDPA":
        return _sdpa_loop(query, key, value, lengths, prefixes, causal)
    keys, values, layout = _with_prefixes(key, value, lengths, prefixes)
    if backend == "FLASH_ATTN":
        return _flash(query, keys, values, layout, causal)
    return _flex(query, keys, values, layout, causal)


def _sdpa_loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    prefixes: Sequence[Prefix] | None,
    causal: bool,
) -> Tensor:
    output = torch.empty_like(query)
    for index, (start, stop) in enumerate(pairwise(accumulate(lengths, initial=0))):
        k, v = key[start:stop], value[start:stop]
        if prefixes is not None:
            k, v = torch.cat((prefixes[index][0], k)), torch.cat((prefixes[index][1], v))
        output[start:stop] = _sdpa(query[start:stop], k, v, causal)
    return output


def _sdpa(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return attended.squeeze(0).transpose(0, 1)


def _with_prefixes(
    key: Tensor, value: Tensor, lengths: Sequence[int], prefixes: Sequence[Prefix] | None
) -> tuple[Tensor, Tensor, _Layout]:
    """Keys and values with each document's prefix put before it."""
    if prefixes is None:
        return key, value, _Layout(list(lengths), list(lengths))
    pieces_k: list[Tensor] = []
    pieces_v: list[Tensor] = []
    for (prefix_k, prefix_v), (start, stop) in zip(prefixes, pairwise(accumulate(lengths, initial=0)), strict=True):
        pieces_k += [prefix_k, key[start:stop]]
        pieces_v += [prefix_v, value[start:stop]]
    counts = [len(prefix[0]) + length for prefix, length in zip(prefixes, lengths, strict=True)]
    return torch.cat(pieces_k), torch.cat(pieces_v), _Layout(list(lengths), counts)


def _flash(query: Tensor, key: Tensor, value: Tensor, layout: _Layout, causal: bool) -> Tensor:
    def starts(counts: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=query.device)

    attended = varlen_attn(
        query,
        key,
        value,
        starts(layout.queries),
        starts(layout.keys),
        max(layout.queries),
        max(layout.keys),
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, Tensor)  # a tuple comes only when return_aux is asked for
    return attended


def _flex(query: Tensor, key: Tensor, value: Tensor, layout: _Layout, causal: bool) -> Tensor:
    def numbers(counts: list[int]) -> Tensor:
        documents = torch.arange(len(counts), device=query.device)
        return documents.repeat_interleave(torch.tensor(counts, device=query.device))

    query_of, key_of = numbers(layout.queries), numbers(layout.keys)

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        same = query_of[row] == key_of[column]
        return same & (column <= row) if causal else same

    mask = create_block_mask(visible, None, None, query.shape[0], key.shape[0], device=query.device.type)
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))
    attended: Tensor = flex_attention(q, k, v, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
    return attended.squeeze(0).transpose(0, 1)

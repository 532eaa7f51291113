"""The understanding tower: token ids in, per-layer keys and values of the text out.

Generation rows attend to the text but the text never sees them, so this runs once per distinct text and not per step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from omnistage.models.cosmos3.prompt import Messages
from omnistage.ops.packed_attention import Backend, packed_attention

Ids = tuple[int, ...]


class TextKV:
    """Keys and values of one text, as the generation rows see them: [layers, tokens, kv_heads, head_dim] each."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.keys[index], self.values[index]

    @property
    def tokens(self) -> int:
        return int(self.keys.shape[1])

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [rows, heads, dim] with [rows, dim] angles (halves convention)."""
    half = rows.shape[-1] // 2
    turned = torch.cat((-rows[..., half:], rows[..., :half]), dim=-1)
    return rows * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


class Tokens:
    """Chat messages to token ids, with the two tokens that start generation."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tail = (int(tokenizer.eos_token_id), int(tokenizer.convert_tokens_to_ids("<|vision_start|>")))

    def __call__(self, messages: Messages) -> Ids:
        encoded = self._tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, add_vision_id=False, return_dict=True
        )
        return (*(int(token) for token in encoded["input_ids"]), *self._tail)


class Reasoner:
    """The tower's modules, taken from a loaded transformer, and the texts it has read lately (up to `cache_bytes`)."""

    def __init__(self, transformer: Any, backend: Backend, cache_bytes: int) -> None:
        self._embed = transformer.embed_tokens
        self._layers = [_Layer(layer) for layer in transformer.layers]
        self._rotary = transformer.rotary_emb
        self._backend = backend
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[Ids, TextKV] = OrderedDict()
        self.tokens_computed = 0

    def read(self, texts: Sequence[Ids]) -> list[TextKV]:
        """Keys and values of each text; equal texts, now or lately, are computed once, new ones in one batch."""
        found = {ids: self._cache[ids] for ids in texts if ids in self._cache}
        new = [ids for ids in dict.fromkeys(texts) if ids not in found]
        if new:
            found |= zip(new, self._compute(new), strict=True)
        for ids in texts:
            self._cache[ids] = found[ids]
            self._cache.move_to_end(ids)
        self._evict()
        return [found[ids] for ids in texts]

    def cached(self, ids: Ids) -> bool:
        return ids in self._cache

    def _evict(self) -> None:
        held = sum(kv.nbytes for kv in self._cache.values())
        while held > self._cache_bytes and self._cache:
            held -= self._cache.popitem(last=False)[1].nbytes

    def _compute(self, texts: Sequence[Ids]) -> list[TextKV]:
        lengths = [len(ids) for ids in texts]
        hidden = self._embed(torch.tensor([t for ids in texts for t in ids], device=self._embed.weight.device))
        angles = self._angles(lengths, hidden)
        kept: list[tuple[Tensor, Tensor]] = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return packed_attention(query, key, value, lengths, causal=True, backend=self._backend)

        for index, layer in enumerate(self._layers):
            last = index == len(self._layers) - 1
            hidden, kv = layer(hidden, angles, None if last else attend)
            kept.append(kv)
        keys, values = (torch.stack(rows) for rows in zip(*kept, strict=True))
        self.tokens_computed += sum(lengths)
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        return [
            TextKV(keys[:, start : start + length].clone(), values[:, start : start + length].clone())
            for start, length in zip(starts, lengths, strict=True)
        ]

    def _angles(self, lengths: list[int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [rows, head_dim]; every text counts its tokens from 0."""
        positions = torch.cat([torch.arange(length, dtype=torch.float32) for length in lengths])
        cos, sin = self._rotary(
            position_ids=positions.expand(3, 1, -1).to(like.device), device=like.device, dtype=like.dtype
        )
        return cos.squeeze(0), sin.squeeze(0)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Layer:
    """The understanding half of one decoder layer. Holds references: the transformer may drop its own afterwards."""

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        self._head_dim = int(attention.head_dim)
        self._norm_in, self._norm_out, self._mlp = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.mlp,
        )
        self._to_q, self._to_k, self._to_v = attention.to_q, attention.to_k, attention.to_v
        self._to_out = attention.to_out
        self._norm_q, self._norm_k = attention.norm_q, attention.norm_k
        self._norm_for_generation = attention.k_norm_und_for_gen

    def __call__(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor], attend: Attend | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The next hidden rows, and keys and values for the generation tower. The last layer (no `attend`) is not
        computed any further than that."""
        rows = self._norm_in(hidden)
        key = self._norm_k(self._heads(self._to_k(rows)))
        value = self._heads(self._to_v(rows))
        shown = key if self._norm_for_generation is None else self._norm_for_generation(key)
        kv = (rotate(shown, *angles), value)
        if attend is None:
            return hidden, kv
        query = self._norm_q(self._heads(self._to_q(rows)))
        attended = attend(rotate(query, *angles), rotate(key, *angles), value)
        hidden = hidden + self._to_out(attended.flatten(-2, -1))
        return hidden + self._mlp(self._norm_out(hidden)), kv

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), -1, self._head_dim)

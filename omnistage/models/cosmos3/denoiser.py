"""One transformer call over the documents of any requests: packing, attention per document, unpacking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from omnistage.models.cosmos3.layout import Layout
from omnistage.models.cosmos3.reasoner import TextKV, rotate
from omnistage.models.cosmos3.steady import make_steady
from omnistage.ops.packed_attention import Backend, Prefix, packed_attention
from omnistage.ops.step_cache import CachedStack, CacheMemory, CacheTurn, Selection

# Cosines and sines of the text rows, then of the generation rows.
Rotary = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One branch of one request at one step. Latents float32: vision items [1, C, T, h, w], sound [D, S], action
    [chunk, A]; `domain` [1] selects the action head; `timestep` is the scheduler's number; `turn` is that of the
    branch's step cache."""

    layout: Layout
    text: TextKV
    vision: list[Tensor]
    sound: Tensor | None
    action: Tensor | None
    domain: Tensor | None
    timestep: int | float
    turn: CacheTurn


@dataclass(frozen=True, kw_only=True)
class Velocity:
    """Predictions for the target of a document, float32, shapes as its latents; zero at clean frames. `memory`:
    what the step cache keeps."""

    vision: Tensor
    sound: Tensor | None
    action: Tensor | None
    memory: CacheMemory = field(default_factory=CacheMemory)


class _DocumentAttention:
    """Attention processor of the generation rows. `begin` sets the documents of the next call."""

    def __init__(self, layers: Sequence[Any], backend: Backend) -> None:
        self._index = {id(layer.self_attn): index for index, layer in enumerate(layers)}
        self._backend = backend
        self._lengths: list[int] = []
        self._prefixes: list[list[Prefix]] = []

    def begin(self, documents: Sequence[Document]) -> None:
        self._lengths = [document.layout.rows for document in documents]
        self._prefixes = [[document.text.layer(index) for document in documents] for index in self._index.values()]

    def __call__(self, attn: Any, und_seq: Tensor, gen_seq: Tensor, rotary_emb: Rotary) -> tuple[Tensor, Tensor]:
        """The text rows `und_seq` are empty here: their keys and values come from the documents."""
        cos, sin = rotary_emb[2:]
        rows, dim = len(gen_seq), attn.head_dim
        query = attn.norm_added_q(attn.add_q_proj(gen_seq).view(rows, -1, dim))
        key = attn.norm_added_k(attn.add_k_proj(gen_seq).view(rows, -1, dim))
        attended = packed_attention(
            rotate(query, cos, sin),
            rotate(key, cos, sin),
            attn.add_v_proj(gen_seq).view(rows, -1, dim),
            self._lengths,
            prefixes=self._prefixes[self._index[id(attn)]],
            backend=self._backend,
        )
        return und_seq, attn.to_add_out(attended.flatten(-2, -1))


class _CachedLayers(CachedStack[Document]):
    """Stands for the layers of the transformer."""

    def __init__(self, layers: nn.ModuleList, attention: _DocumentAttention) -> None:
        super().__init__()
        self.layers = layers
        self._attention = attention

    def forward(self, und_seq: Tensor, gen_seq: Tensor, rotary_emb: Rotary) -> tuple[Tensor, Tensor]:
        """`gen_seq` [rows, width] are the documents' rows, `rotary_emb` their angles after two empty tensors."""

        def stack(rows: Tensor, chosen: Selection) -> Tensor:
            self._attention.begin([self.documents[index] for index in chosen.documents])
            angles = (*rotary_emb[:2], chosen.of(rotary_emb[2]), chosen.of(rotary_emb[3]))
            for layer in self.layers:
                _, rows = layer(und_seq, rows, angles)
            return rows

        def signal(first: int, last: int) -> Tensor:
            read: Tensor = self.layers[0].input_layernorm_moe_gen(gen_seq[first:last])  # type: ignore[operator]
            return read

        lengths = [document.layout.rows for document in self.documents]
        return und_seq, self.through(stack, gen_seq, signal, lengths)


class Denoiser:
    """The generation tower. Takes the understanding half out of `transformer`: `Reasoner` must have its modules."""

    def __init__(self, transformer: Any, dtype: torch.dtype, device: torch.device, backend: Backend) -> None:
        self._dtype = dtype
        self._device = device
        self.transformer = transformer
        attention = _DocumentAttention(transformer.layers, backend)
        _drop_understanding(transformer, dtype, device)
        if device.type == "cpu":
            make_steady(transformer)
        transformer.set_attn_processor(attention)
        self._layers = _CachedLayers(transformer.layers, attention)
        transformer.layers = nn.ModuleList([self._layers])

    def __call__(self, documents: Sequence[Document]) -> list[Velocity]:
        """The velocities of each document, all from one call of the transformer."""
        self._layers.begin(documents)
        packed = _pack(documents, self._dtype, self._device)
        vision, sound, action = self.transformer(**packed, return_dict=False)
        return _unpack(documents, vision, sound or [], action or [], self._layers.end())


def _drop_understanding(transformer: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Text rows never come here: their modules make way for identities, the embedding for one that tells the dtype."""
    transformer.embed_tokens = nn.Embedding(1, transformer.config.hidden_size, dtype=dtype, device=device)
    transformer.norm = nn.Identity()
    transformer.lm_head = nn.Identity()
    for layer in transformer.layers:
        layer.input_layernorm = layer.post_attention_layernorm = layer.mlp = nn.Identity()
        attention = layer.self_attn
        attention.to_q = attention.to_k = attention.to_v = attention.to_out = nn.Identity()
        attention.norm_q = attention.norm_k = nn.Identity()
        attention.k_norm_und_for_gen = None
    transformer.requires_grad_(False)


def _pack(documents: Sequence[Document], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of the transformer for all documents: no text rows, generation rows one document after the other."""
    empty = torch.empty(0, dtype=torch.long, device=device)
    starts = [0]
    for document in documents:
        starts.append(starts[-1] + document.layout.rows)
    packed: dict[str, Any] = {
        "input_ids": empty,
        "text_indexes": empty,
        "und_len": 0,
        "sequence_length": starts[-1],
        "position_ids": torch.cat([d.layout.positions for d in documents], dim=1).to(device),
    }
    placed = list(zip(documents, starts, strict=False))
    packed |= _pack_vision(placed, dtype, device)
    with_sound = [(d, start + d.layout.vision_rows) for d, start in placed if d.sound is not None]
    if with_sound:
        packed |= _pack_sound(with_sound, dtype, device)
    with_action = [
        (d, start + d.layout.vision_rows + d.layout.sound_rows) for d, start in placed if d.action is not None
    ]
    if with_action:
        packed |= _pack_action(with_action, dtype, device)
    return packed


Placed = list[tuple[Document, int]]


def _pack_vision(placed: Placed, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {
        "vision_tokens": [item.to(device, dtype) for d, _ in placed for item in d.vision],
        "vision_token_shapes": [shape for d, _ in placed for shape in d.layout.shapes],
        "vision_sequence_indexes": _cat([_span(start, d.layout.vision_rows) for d, start in placed], device),
        "vision_mse_loss_indexes": _cat([start + d.layout.vision_noisy_rows for d, start in placed], device),
        "vision_timesteps": _cat([_times(d, len(d.layout.vision_noisy_rows)) for d, _ in placed], device),
        "vision_noisy_frame_indexes": [frames.to(device) for d, _ in placed for frames in d.layout.noisy_frames],
    }


def _pack_sound(placed: Placed, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    spans = _cat([_span(start, d.layout.sound_rows) for d, start in placed], device)
    return {
        "sound_tokens": [d.sound.to(device, dtype) for d, _ in placed if d.sound is not None],
        "sound_token_shapes": [(d.layout.sound_rows, 1, 1) for d, _ in placed],
        "sound_sequence_indexes": spans,
        "sound_mse_loss_indexes": spans,
        "sound_timesteps": _cat([_times(d, d.layout.sound_rows) for d, _ in placed], device),
        "sound_noisy_frame_indexes": [torch.arange(d.layout.sound_rows, device=device) for d, _ in placed],
    }


def _pack_action(placed: Placed, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {
        "action_tokens": [d.action.to(device, dtype) for d, _ in placed if d.action is not None],
        "action_token_shapes": [(d.layout.action_rows, 1, 1) for d, _ in placed],
        "action_sequence_indexes": _cat([_span(start, d.layout.action_rows) for d, start in placed], device),
        "action_mse_loss_indexes": _cat([start + d.layout.action_noisy for d, start in placed], device),
        "action_timesteps": _cat([_times(d, len(d.layout.action_noisy)) for d, _ in placed], device),
        "action_noisy_frame_indexes": [d.layout.action_noisy.to(device) for d, _ in placed],
        "action_domain_ids": [d.domain.to(device) for d, _ in placed if d.domain is not None],
    }


def _span(start: int, rows: int) -> Tensor:
    return torch.arange(start, start + rows)


def _times(document: Document, rows: int) -> Tensor:
    return torch.full((rows,), document.timestep)


def _cat(parts: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat(parts).to(device)


def _unpack(
    documents: Sequence[Document],
    vision: list[Tensor],
    sound: list[Tensor],
    action: list[Tensor],
    memories: list[CacheMemory],
) -> list[Velocity]:
    """The transformer gives one entry per vision item, per document with sound, per document with actions."""
    velocities: list[Velocity] = []
    items, sounds, actions = 0, iter(sound), iter(action)
    for document, memory in zip(documents, memories, strict=True):
        items += len(document.vision)
        velocities.append(
            Velocity(
                vision=vision[items - 1].float(),  # the target is the last item
                sound=next(sounds).float() if document.sound is not None else None,
                action=next(actions).float() if document.action is not None else None,
                memory=memory,
            )
        )
    return velocities

"""One call of the transformer for any mix of requests: their rows packed one after the other, each its own document."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from omnistage.models.minimax_h3.layout import Layout
from omnistage.ops.packed_attention import Backend, packed_attention
from omnistage.ops.step_cache import CachedStack, CacheMemory, CacheTurn, Selection

Rotary = tuple[Tensor, Tensor]


class PackedLayout(NamedTuple):
    """A `Layout` on the device. `present`: the noise levels that occur, which become the call's timesteps."""

    positions: Tensor
    tags: Tensor
    levels: Tensor
    video: Tensor
    audio: Tensor
    text_rows: int
    present: tuple[int, ...]

    @property
    def rows(self) -> int:
        return len(self.tags)


def on_device(layout: Layout, device: torch.device) -> PackedLayout:
    parts = (layout.positions, layout.tags, layout.levels, layout.video, layout.audio)
    positions, tags, levels, video, audio = (torch.from_numpy(part).to(device) for part in parts)
    present = tuple(sorted({int(level) for level in layout.levels}))
    return PackedLayout(positions, tags, levels, video, audio, layout.text_rows, present)


class Document(NamedTuple):
    """One request in a call. `text` [L, width] is refined text; `video`, `audio` rows with conditions first; `times`
    per noise level of `layout.levels`."""

    text: Tensor
    video: Tensor
    audio: Tensor
    times: tuple[float, ...]
    layout: PackedLayout
    turn: CacheTurn


class Velocity(NamedTuple):
    """float32, rows as in the document; those of conditions mean nothing. `memory`: of the step cache, after this
    step."""

    video: Tensor
    audio: Tensor
    memory: CacheMemory


class _Passing(nn.Module):
    """Stands where text used to be embedded: hands refined text on. `like` tells the dtype that callers look up."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        first = next(like.parameters())
        self.register_buffer("empty", first.new_empty(0), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        return rows


class DocumentAttention:
    """Attention processor of all blocks of one transformer: rows see their own document only.

    `lengths` are the rows of each document of the coming call; calls are serial.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend: Backend = backend
        self.lengths: Sequence[int] = ()

    def __call__(
        self, attn: Any, hidden_states: Tensor, rotary_emb: Rotary, attention_mask: Tensor | None = None
    ) -> Tensor:
        """`hidden_states` [1, rows, width]. Raises ValueError for a mask, which documents leave no room for."""
        if attention_mask is not None:
            raise ValueError("packed documents take no attention mask")
        rows = hidden_states[0]
        query, key, value = (project(rows).unflatten(-1, (attn.heads, -1)) for project in _projections(attn))
        query, key = _rotated(attn.norm_q(query), *rotary_emb), _rotated(attn.norm_k(key), *rotary_emb)
        attended = packed_attention(query, key, value, self.lengths, backend=self._backend)
        mixed = attended.flatten(1).to(query.dtype)
        for layer in attn.to_out:
            mixed = layer(mixed)
        return mixed[None]


class CachedBlocks(CachedStack[Document]):
    """Stands for the blocks of a transformer."""

    def __init__(self, blocks: nn.ModuleList, attention: DocumentAttention) -> None:
        super().__init__()
        self.blocks = blocks
        self._attention = attention

    def forward(self, hidden: Tensor, time: Tensor, modulation_rows: Tensor, rotary: Rotary) -> Tensor:
        """`hidden` [1, rows, width], `time` [times, width], `modulation_rows` [rows] index the modulation tables."""
        lengths = [document.layout.rows for document in self.documents]

        def stack(rows: Tensor, chosen: Selection) -> Tensor:
            self._attention.lengths = [lengths[index] for index in chosen.documents]
            table, angles = chosen.of(modulation_rows), (chosen.of(rotary[0]), chosen.of(rotary[1]))
            moved = rows[None]
            for block in self.blocks:
                moved = block(moved, time, table, angles)
            return moved[0]

        def signal(first: int, last: int) -> Tensor:
            return _modulated(self.blocks[0], hidden[0, first:last], time, modulation_rows[first:last])

        return self.through(stack, hidden[0], signal, lengths)[None]


def _modulated(block: Any, rows: Tensor, time: Tensor, modulation_rows: Tensor) -> Tensor:
    """What the attention of `block` reads."""
    shift, scale = block.adaln_proj(time)[:2]
    read: Tensor = block.norm1(rows) * (1.0 + scale[modulation_rows]) + shift[modulation_rows]
    return read


def _projections(attn: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
    return attn.to_q, attn.to_k, attn.to_v


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[rows, heads, dim]: the leading channels turned by their angles [rows, n], halves paired."""
    cos, sin = (part.to(heads.dtype)[:, None] for part in (cos, sin))
    turned, rest = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    left, right = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-right, left), dim=-1) * sin, rest), dim=-1)


class Denoiser:
    """A transformer whose text front is run once per request (`refine`) and whose blocks take documents."""

    def __init__(self, transformer: Any, backend: Backend, device: torch.device) -> None:
        self._transformer = transformer
        self._device = device
        self._embed: Any = transformer.context_embedder
        self._refiner: Any = transformer.token_refiner
        transformer.context_embedder = _Passing(self._embed)
        transformer.token_refiner = nn.Identity()
        self._attention = DocumentAttention(backend)
        transformer.set_attn_processor(self._attention)
        self._blocks = CachedBlocks(transformer.transformer_blocks, self._attention)
        transformer.transformer_blocks = nn.ModuleList([self._blocks])

    @torch.inference_mode()
    def refine(self, text: Tensor) -> Tensor:
        """Text states [L, width of the text encoder] to rows [L, width of the transformer]; the same at every step."""
        embedded = self._embed(text[None].to(self._device, self._embed.weight.dtype))
        refined: Tensor = self._refiner(embedded)[0]
        return refined

    @torch.inference_mode()
    def velocities(self, documents: Sequence[Document]) -> list[Velocity]:
        """One call of the transformer."""
        self._blocks.begin(documents)
        times, time_rows = _times(documents, self._device)
        video, audio = self._transformer(
            hidden_states=torch.cat([document.video for document in documents])[None],
            audio_hidden_states=torch.cat([document.audio for document in documents])[None],
            encoder_hidden_states=torch.cat([document.text for document in documents])[None],
            timestep=times,
            timestep_indices=time_rows,
            **_packed([document.layout for document in documents]),
            return_dict=False,
        )
        videos = video[0].float().split([len(document.video) for document in documents])
        audios = audio[0].float().split([len(document.audio) for document in documents])
        return [Velocity(*parts) for parts in zip(videos, audios, self._blocks.end(), strict=True)]


def _packed(layouts: Sequence[PackedLayout]) -> dict[str, Tensor]:
    """The layouts as one, by the transformer's own names."""
    text = [torch.arange(layout.text_rows, device=layout.tags.device) for layout in layouts]
    return {
        "token_tags": torch.cat([layout.tags for layout in layouts]),
        "position_ids": torch.cat([layout.positions for layout in layouts]),
        "video_indices": _shifted([layout.video for layout in layouts], layouts),
        "audio_indices": _shifted([layout.audio for layout in layouts], layouts),
        "text_indices": _shifted(text, layouts),
    }


def _shifted(rows: Sequence[Tensor], layouts: Sequence[PackedLayout]) -> Tensor:
    """Row numbers of each document as row numbers of the call."""
    starts = accumulate((layout.rows for layout in layouts[:-1]), initial=0)
    return torch.cat([part + start for part, start in zip(rows, starts, strict=True)])


def _times(documents: Sequence[Document], device: torch.device) -> tuple[Tensor, Tensor]:
    """The distinct times of the call, rising, and for each row which one it has."""
    values = [document.times[level] for document in documents for level in document.layout.present]
    distinct, which = torch.unique(torch.tensor(values, dtype=torch.float32), sorted=True, return_inverse=True)
    rows, at = [], 0
    for document in documents:
        table = torch.zeros(len(document.times), dtype=torch.long)
        count = len(document.layout.present)
        table[list(document.layout.present)] = which[at : at + count]
        rows.append(table.to(device)[document.layout.levels])
        at += count
    return distinct.to(device), torch.cat(rows)

"""Attention of the backbone: over the paged cache in the text stage, over documents in the drawing stage.

A document is one guidance row of one request: `pieces` of keys and values that are already known, then new rows in
segments. Rows of a `full` segment see everything up to the segment's end, rows of other segments everything up to
themselves. Documents lie one after the other in the flat batch and never see each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from omnistage.errors import StageError
from omnistage.ops.paged_attention import AttentionPlan, paged_sdpa

IMPLEMENTATION = "omnistage_hunyuan_image3"


class KeysValues(NamedTuple):
    """Post-rotary, post-norm keys and values of all layers, each [layers, kv_heads, rows, head_dim]."""

    keys: Tensor
    values: Tensor

    @property
    def rows(self) -> int:
        return int(self.keys.shape[2])

    def cut(self, stop: int) -> KeysValues:
        """The first `stop` rows, as views."""
        return KeysValues(self.keys[:, :, :stop], self.values[:, :, :stop])


def cut_pieces(pieces: Sequence[KeysValues], stop: int) -> tuple[KeysValues, ...]:
    """The pieces of the first `stop` rows."""
    cut: list[KeysValues] = []
    for piece in pieces:
        if stop <= 0:
            break
        cut.append(piece if piece.rows <= stop else piece.cut(stop))
        stop -= piece.rows
    return tuple(cut)


class Segment(NamedTuple):
    """New rows `start..stop` of a document, counted from its first new row."""

    start: int
    stop: int
    full: bool


@dataclass(frozen=True, slots=True)
class Document:
    pieces: tuple[KeysValues, ...]
    segments: tuple[Segment, ...]

    @property
    def known(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def rows(self) -> int:
        return self.segments[-1].stop if self.segments else 0


@dataclass(slots=True)
class DocumentPlan:
    """The documents of a flat batch, in order. With `keep`, `kept[layer]` holds the keys and values of all new rows,
    [kv_heads, N, head_dim] each."""

    documents: Sequence[Document]
    keep: bool = False
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def new_rows(self) -> list[KeysValues]:
        """What was kept, per document (copies)."""
        keys, values = (torch.stack(parts) for parts in zip(*self.kept, strict=True))
        made: list[KeysValues] = []
        start = 0
        for document in self.documents:
            stop = start + document.rows
            made.append(KeysValues(keys[:, :, start:stop].clone(), values[:, :, start:stop].clone()))
            start = stop
        return made


def segments_of(start: int, stop: int, spans: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    """Segments of the rows `start..stop` of a sequence whose `spans` (ascending) are bidirectional.

    Raises StageError for a span that the range cuts.
    """
    found: list[Segment] = []
    at = start
    for begin, end in spans:
        if end <= start or begin >= stop:
            continue
        if begin < start or end > stop:
            raise StageError(f"bidirectional rows {begin}..{end} are cut by {start}..{stop}")
        if begin > at:
            found.append(Segment(at - start, begin - start, False))
        found.append(Segment(begin - start, end - start, True))
        at = end
    if at < stop:
        found.append(Segment(at - start, stop - start, False))
    return tuple(found)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: AttentionPlan | DocumentPlan | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """A transformers attention function: query [1, H, N, D], key and value [1, KV, N, D] -> [1, N, H, D].

    Queries and keys come in float32 from the rotation and are brought to the values' type. Raises StageError when it
    is called without a plan.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    if isinstance(plan, AttentionPlan):
        return paged_sdpa(module, query, key, value, attention_mask, plan=plan, scaling=scaling, **options)
    if plan is None:
        raise StageError("the backbone's attention was called without a plan")
    if plan.keep:
        plan.kept.append((key[0], value[0]))
    out = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
    row = 0
    for document in plan.documents:
        rows = slice(row, row + document.rows)
        states = (query[0, :, rows], key[0, :, rows], value[0, :, rows])
        _attend_document(document, module.layer_idx, states, out[rows], scaling)
        row += document.rows
    return out[None], None


def _attend_document(
    document: Document, layer: int, states: tuple[Tensor, Tensor, Tensor], out: Tensor, scaling: float | None
) -> None:
    """`states` [heads, rows, D] of the document's new rows; `out` [rows, heads, D]."""
    query, key, value = states
    if document.pieces:
        key = torch.cat([*(piece.keys[layer] for piece in document.pieces), key], dim=1)
        value = torch.cat([*(piece.values[layer] for piece in document.pieces), value], dim=1)
    known = document.known
    for start, stop, full in document.segments:
        end = known + stop
        attended = scaled_dot_product_attention(
            query[None, :, start:stop],
            key[None, :, :end],
            value[None, :, :end],
            attn_mask=None if full or stop - start == 1 else _causal(stop - start, end, query.device),
            scale=scaling,
            enable_gqa=query.shape[0] != key.shape[0],
        )
        out[start:stop] = attended[0].transpose(0, 1)


def _causal(rows: int, end: int, device: torch.device) -> Tensor:
    """[rows, end]: the last of `rows` sees all `end` positions, each before it one fewer."""
    return torch.ones(rows, end, dtype=torch.bool, device=device).tril(end - rows)


AttentionInterface.register(IMPLEMENTATION, attend)

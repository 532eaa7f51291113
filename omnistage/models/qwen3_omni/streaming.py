"""The vocoder as a stream: transformers' modules, fed frame by frame, for several streams of any position at once.

Every layer is causal up to a fixed delay, so each carries what its next outputs still need of its past input and no
frame is computed twice. New rows of all streams lie behind each other along time in one tensor [1, C, T]; a
convolution sees each stream's carried rows before its new ones, and outputs that straddle two streams are dropped.
Since time can be cut anywhere, rows that have become many go on in tiles: memory does not grow with frames or streams.

A transposed convolution of stride r and kernel 2r, trimmed by r on both sides, needs one later input frame, so T frames
give a fixed number of samples less than T whole frames (555 of 1920 * T in the released model). There is no tail to
flush: a whole decode ends at the same sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2WavDecoderBlock,
    Qwen3OmniMoeCode2WavDecoderResidualUnit,
    Qwen3OmniMoeConvNeXtBlock,
    Qwen3OmniMoeSnakeBeta,
)

from omnistage.errors import StageError
from omnistage.models.qwen3_omni.tiles import TILE

_WINDOWED = "omnistage_carried_window"


@dataclass(slots=True)
class StreamState:
    """What one stream carries: `frames` computed so far, past inputs [1, C, t] of convolutions, past keys and values
    [heads, t, d] of each attention layer (as many as its window can still see)."""

    frames: int = 0
    inputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    windows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def successor(self, frames: int) -> StreamState:
        """A state to advance by `frames`; this one stays as it is."""
        return StreamState(self.frames + frames, dict(self.inputs), dict(self.windows))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of streams along time, [1, C, T]; `lengths` [streams] adds up to T, `states` are the streams' own."""

    values: Tensor
    lengths: tuple[int, ...]
    states: tuple[StreamState, ...]

    def split(self) -> tuple[Tensor, ...]:
        return torch.functional.split(self.values, list(self.lengths), dim=-1)

    def with_values(self, values: Tensor) -> Rows:
        return replace(self, values=values)

    def tiles(self, limit: int) -> list[Rows]:
        """All rows in order, at most `limit` elements together (but at least one row)."""
        room = max(1, limit // self.values.shape[1])
        if self.values.shape[-1] <= room:
            return [self]
        batches = list(_portions(self.lengths, room))
        sizes = [sum(stop - start for _, start, stop in batch) for batch in batches]
        parts = torch.functional.split(self.values, sizes, dim=-1)
        return [
            Rows(part, tuple(stop - start for _, start, stop in batch), tuple(self.states[i] for i, _, _ in batch))
            for part, batch in zip(parts, batches, strict=True)
        ]


class StreamingVocoder:
    """Over transformers' `Qwen3OmniMoeCode2Wav`, whose sliding-window attention it sets to carried windows.

    At most `max_frames` frames are computed together: beyond what the processor's caches hold, more at once costs more
    per frame, and a longer chunk is as exact in parts. Rows of more than `tile` elements go on in tiles.
    """

    def __init__(self, module: Any, max_frames: int, tile: int = TILE) -> None:
        self._module = module
        self._layers = list(_layers(module))
        self._max_frames = max_frames
        self._tile = tile
        module.pre_transformer.config._attn_implementation = _WINDOWED

    @property
    def groups(self) -> int:
        return int(self._module.config.num_quantizers)

    @property
    def codebook(self) -> int:
        return int(self._module.config.codebook_size)

    def advance(self, codes: Sequence[Tensor], states: Sequence[StreamState]) -> tuple[list[Tensor], list[StreamState]]:
        """Per stream the samples [n] that codes [G, frames] complete, and its next state; `states` do not change."""
        nexts = list(states)
        pieces: list[list[Tensor]] = [[] for _ in codes]
        for batch in _portions([part.shape[1] for part in codes], self._max_frames):
            parts = [codes[index][:, start:stop] for index, start, stop in batch]
            made, advanced = self._step(parts, [nexts[index] for index, _, _ in batch])
            for (index, _, _), piece, state in zip(batch, made, advanced, strict=True):
                pieces[index].append(piece)
                nexts[index] = state
        return [torch.cat(made) if len(made) != 1 else made[0] for made in pieces], nexts

    def _step(self, codes: Sequence[Tensor], states: Sequence[StreamState]) -> tuple[list[Tensor], list[StreamState]]:
        lengths = tuple(part.shape[1] for part in codes)
        nexts = [state.successor(length) for state, length in zip(states, lengths, strict=True)]
        module = self._module
        flat = torch.cat(tuple(codes), dim=1)[None]
        hidden = module.code_embedding(flat + module.code_offset).mean(1)
        positions = [torch.arange(state.frames, state.frames + n) for state, n in zip(states, lengths, strict=True)]
        hidden = module.pre_transformer(
            inputs_embeds=hidden,
            position_ids=torch.cat(positions)[None].to(hidden.device),
            use_cache=False,
            streams=_Windows(lengths, nexts, int(module.config.sliding_window)),
        ).last_hidden_state
        made: list[list[Tensor]] = [[hidden.new_zeros(0)] for _ in nexts]
        places = {id(state): pieces for state, pieces in zip(nexts, made, strict=True)}
        for ends in _decode(self._layers, Rows(hidden.transpose(1, 2), lengths, tuple(nexts)), self._tile):
            for state, part in zip(ends.states, ends.split(), strict=True):
                places[id(state)].append(part[0, 0].clamp(-1, 1))
        return [torch.cat(pieces).float() for pieces in made], nexts


def _layers(module: Any) -> Iterator[Any]:
    """What follows the transformer, one after the other."""
    for blocks in module.upsample:
        yield from blocks
    for layer in module.decoder:
        yield from layer.block if isinstance(layer, Qwen3OmniMoeCode2WavDecoderBlock) else (layer,)


def _decode(layers: Sequence[Any], rows: Rows, limit: int) -> Iterator[Rows]:
    """The rows after all layers, in order. A tile goes through all that is left before the next one starts."""
    for index, layer in enumerate(layers):
        tiles = rows.tiles(limit)
        if len(tiles) > 1:
            for tile in tiles:
                yield from _decode(layers[index:], tile, limit)
            return
        rows = _run(layer, rows)
    yield rows


def _portions(lengths: Sequence[int], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Batches of at most `limit` frames that cover all streams: (stream, start, stop), each stream's parts in order."""
    batch: list[tuple[int, int, int]] = []
    room = limit
    for index, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            batch.append((index, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch


def _run(module: Any, rows: Rows) -> Rows:
    if not rows.values.shape[-1]:
        return rows
    if isinstance(module, Qwen3OmniMoeCausalConvNet):
        return _convolve(module, rows)
    if isinstance(module, Qwen3OmniMoeCausalTransConvNet):
        return _upsample(module, rows)
    if isinstance(module, Qwen3OmniMoeConvNeXtBlock):
        return _convnext(module, rows)
    if isinstance(module, Qwen3OmniMoeCode2WavDecoderResidualUnit):
        inner = _convolve(module.conv1, rows.with_values(_snake(module.act1, rows.values)))
        inner = _convolve(module.conv2, inner.with_values(_snake(module.act2, inner.values)))
        return rows.with_values(inner.values.add_(rows.values))
    if isinstance(module, Qwen3OmniMoeSnakeBeta):
        return rows.with_values(_snake(module, rows.values))
    raise StageError(f"the vocoder has a layer that cannot be streamed: {type(module).__name__}")


def _snake(module: Any, values: Tensor) -> Tensor:
    """SnakeBeta, x + sin(a x)^2 / b (arXiv:2006.08195), in fewer passes over memory than the module's own forward."""
    rate, scale = torch.exp(module.alpha)[:, None], 1.0 / (torch.exp(module.beta) + module.no_div_by_zero)[:, None]
    wave = (values * rate).sin_()
    return torch.addcmul(values, wave.mul_(wave), scale)


def _convolve(module: Any, rows: Rows) -> Rows:
    """Stride 1: the last `padding` inputs are carried; zeros before the first."""
    left = module.padding
    if not left:
        return rows.with_values(module.conv(rows.values))
    pieces: list[Tensor] = []
    for new, state in zip(rows.split(), rows.states, strict=True):
        past = state.inputs.get(module)
        past = new.new_zeros(1, new.shape[1], left) if past is None else past
        pieces += (past, new)
        recent = new if new.shape[-1] >= left else torch.cat((past, new), dim=-1)
        state.inputs[module] = recent[..., -left:].clone()
    output = module.conv(torch.cat(pieces, dim=-1))
    return rows.with_values(_pick(output, left, rows.lengths))


def _pick(output: Tensor, gap: int, lengths: tuple[int, ...]) -> Tensor:
    """Of an output in which streams lie `gap` apart, the first `lengths` rows of each."""
    if len(lengths) == 1:
        return output
    starts = [sum(lengths[:index]) + index * gap for index in range(len(lengths))]
    kept = [output[..., start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return torch.cat(kept, dim=-1)


def _upsample(module: Any, rows: Rows) -> Rows:
    """Kernel = stride: every row alone. Kernel = 2 * stride, trimmed by one stride: one past row is carried, and a
    stream's first row gives nothing yet."""
    stride, kernel = module.conv.stride[0], module.conv.kernel_size[0]
    if kernel == stride:
        return Rows(module.conv(rows.values), tuple(length * stride for length in rows.lengths), rows.states)
    pieces: list[Tensor] = []
    for new, state in zip(rows.split(), rows.states, strict=True):
        past = state.inputs.get(module)
        whole = new if past is None else torch.cat((past, new), dim=-1)
        if whole.shape[-1]:
            state.inputs[module] = whole[..., -1:].clone()
        pieces.append(whole)
    output = module.conv(torch.cat(pieces, dim=-1))
    kept: list[Tensor] = []
    begin = 0
    for piece in pieces:
        end = begin + piece.shape[-1]
        kept.append(output[..., (begin + 1) * stride : max(end, begin + 1) * stride])
        begin = end
    return Rows(torch.cat(kept, dim=-1), tuple(part.shape[-1] for part in kept), rows.states)


def _convnext(module: Any, rows: Rows) -> Rows:
    inner = _convolve(module.dwconv, rows).values.transpose(1, 2)
    inner = module.pwconv2(module.act(module.pwconv1(module.norm(inner))))
    return rows.with_values(rows.values + (module.gamma * inner).transpose(1, 2))


class _Windows:
    """The attention windows of one step, shared by its layers; writes the new windows into `states`.

    Streams are padded to one batch [streams, heads, past + longest, d]: what a stream carries ends at `past`, its new
    rows begin there.
    """

    def __init__(self, lengths: tuple[int, ...], states: Sequence[StreamState], window: int) -> None:
        self.window = window
        self._lengths = lengths
        self._states = states
        self._longest = max(lengths)
        self._carried = [min(window - 1, state.frames - n) for state, n in zip(states, lengths, strict=True)]
        self._past = max(self._carried)
        self._mask: Tensor | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """[1, heads, T, d] of all streams' new rows, in and out."""
        olds = [state.windows.get(layer, (None, None)) for state in self._states]
        keys = self._batch(key, [old[0] for old in olds])
        values = self._batch(value, [old[1] for old in olds])
        for index, state in enumerate(self._states):
            end = self._past + self._lengths[index]
            begin = end - min(self.window - 1, state.frames)
            state.windows[layer] = (keys[index, :, begin:end].clone(), values[index, :, begin:end].clone())
        queries = self._batch(query, [None] * len(olds))[:, :, self._past :]
        result = scaled_dot_product_attention(queries, keys, values, attn_mask=self._visible(key.device), scale=scale)
        rows = [result[index, :, :count] for index, count in enumerate(self._lengths)]
        return torch.cat(rows, dim=1)[None]

    def _batch(self, flat: Tensor, olds: Sequence[Tensor | None]) -> Tensor:
        """New rows [1, heads, T, d] behind the carried ones [heads, t, d]."""
        _, heads, _, dim = flat.shape
        batch = flat.new_zeros(len(olds), heads, self._past + self._longest, dim)
        news = torch.functional.split(flat[0], list(self._lengths), dim=1)
        for target, new, old in zip(batch, news, olds, strict=True):
            target[:, self._past : self._past + new.shape[1]] = new
            if old is not None:
                target[:, self._past - old.shape[1] : self._past] = old
        return batch

    def _visible(self, device: torch.device) -> Tensor:
        """[streams, 1, longest, past + longest]: what each new row sees."""
        if self._mask is None:
            at = torch.arange(self._longest, device=device)[:, None]
            other = torch.arange(self._past + self._longest, device=device)[None] - self._past
            near = (other <= at) & (other > at - self.window)
            begins = -torch.tensor(self._carried, device=device)[:, None, None]
            self._mask = (near[None] & (other[None] >= begins))[:, None]
        return self._mask


def _carried_window(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """A transformers attention function for a module with a sliding window. Raises StageError without one."""
    streams = options.get("streams")
    if (
        not isinstance(streams, _Windows)
        or options.get("sliding_window") != streams.window
        or attention_mask is not None
    ):
        raise StageError(f"{type(module).__name__}: carried windows serve streams with that sliding window only")
    result = streams.attend(module.layer_idx, query, key, value, options.get("scaling"))
    return result.transpose(1, 2), None


AttentionInterface.register(_WINDOWED, _carried_window)

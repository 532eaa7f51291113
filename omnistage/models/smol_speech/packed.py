"""Streaming 1-D convolutions over several streams at once, each frame computed once.

Streams of different position and length are packed along time: `Packed.rows` is [sum of lengths, channels], one stream
after the other. Every layer keeps, per stream, the inputs that its next outputs still need (`Flow.after`), so a layer
runs behind its input by its right padding, and the zero padding at both ends of a stream is that of a whole decode.
A step writes only `Flow.after`; the caller makes it the stream's state once the whole step has succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Carry = dict[int, Tensor]
Activation = Callable[[Tensor], Tensor]


class Packed:
    """Rows of several streams, one after the other: `rows` [sum(lengths), channels]."""

    __slots__ = ("lengths", "rows")

    def __init__(self, rows: Tensor, lengths: Sequence[int]) -> None:
        self.rows = rows
        self.lengths = tuple(lengths)

    @classmethod
    def of(cls, streams: Sequence[Tensor]) -> Packed:
        """Packs one [length, channels] tensor per stream."""
        rows = streams[0] if len(streams) == 1 else torch.cat(tuple(streams))
        return cls(rows, [len(stream) for stream in streams])

    def split(self) -> tuple[Tensor, ...]:
        """Per stream its rows, as views."""
        return torch.functional.split(self.rows, list(self.lengths))

    def map(self, function: Activation) -> Packed:
        """Applies a function that acts on each row alone."""
        return Packed(function(self.rows), self.lengths)


class Flow:
    """One stream in one step: what each layer carries in, whether the stream ends here, what each layer carries out.

    Layers are known by their slot number. A missing slot means that the layer has seen no row of the stream yet.
    """

    __slots__ = ("after", "before", "ends")

    def __init__(self, before: Carry, ends: bool) -> None:
        self.before = before
        self.after: Carry = {}
        self.ends = ends


class PackedConv:
    """A stride-1 convolution along time with zero padding at the ends of each stream.

    `weight` [out, in, taps] as in torch.nn.Conv1d, or [channels, 1, taps] with `depthwise`. `left` + `right` zeros are
    padded to each stream as a whole, so it gives length + left + right - (taps - 1) * dilation rows in all.
    """

    def __init__(
        self, slot: int, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], dilation: int = 1
    ) -> None:
        self._slot = slot
        self._left, self._right = padding
        self._dilation = dilation
        self._span = (weight.shape[2] - 1) * dilation
        self._depthwise = weight.shape[1] == 1 and weight.shape[0] > 1
        # One [in, out] matrix per tap, or one [channels] row per tap.
        self._taps = [tap.squeeze(1) if self._depthwise else tap.t().contiguous() for tap in weight.unbind(2)]
        self._bias = weight.new_zeros(weight.shape[0]) if bias is None else bias

    def __call__(self, packed: Packed, flows: Sequence[Flow], activation: Activation | None = None) -> Packed:
        """The rows that are complete now. `activation` (with f(0) = 0) acts on the input first."""
        return self.with_aligned(packed, flows, activation)[0]

    def with_aligned(
        self, packed: Packed, flows: Sequence[Flow], activation: Activation | None = None
    ) -> tuple[Packed, Packed]:
        """The complete rows, and the input rows (before `activation`) that stand at the same times."""
        padded = self._pad(packed, flows)
        lengths = [max(0, length - self._span) for length in padded.lengths]
        rows = padded.rows if activation is None else activation(padded.rows)
        output = self._convolve(rows)
        starts = _starts(padded.lengths)
        aligned = [start + self._left for start in starts]
        return _pick(output, starts, lengths), _pick(padded.rows, aligned, lengths)

    def _pad(self, packed: Packed, flows: Sequence[Flow]) -> Packed:
        pieces: list[Tensor] = []
        lengths: list[int] = []
        for rows, flow in zip(packed.split(), flows, strict=True):
            stream = self._pieces(rows, flow)
            pieces += stream
            lengths.append(sum(len(piece) for piece in stream))
        padded = Packed(torch.cat(pieces), lengths)
        for rows, flow in zip(padded.split(), flows, strict=True):
            if len(rows) and not flow.ends:
                flow.after[self._slot] = rows[max(0, len(rows) - self._span) :].clone()
        return padded

    def _pieces(self, rows: Tensor, flow: Flow) -> list[Tensor]:
        carried = flow.before.get(self._slot)
        if carried is None and not len(rows):
            return [rows]
        head = rows.new_zeros(self._left, rows.shape[1]) if carried is None else carried
        return [head, rows, rows.new_zeros(self._right, rows.shape[1])] if flow.ends else [head, rows]

    def _convolve(self, rows: Tensor) -> Tensor:
        count = max(0, len(rows) - self._span)
        add = _add_scaled if self._depthwise else torch.addmm
        output = add(self._bias, rows[:count], self._taps[0])
        for index, tap in enumerate(self._taps[1:], start=1):
            shifted = rows[index * self._dilation : index * self._dilation + count]
            output = output.addcmul_(shifted, tap) if self._depthwise else output.addmm_(shifted, tap)
        return output


class PackedUpsample:
    """torch.nn.ConvTranspose1d with kernel 2 * stride and padding stride / 2: every row becomes `stride` rows.

    y[t * stride + j] = x[t] W[j] + x[t - 1] W[j + stride]: a convolution with two taps whose output holds `stride` rows
    side by side. `weight` [in, out, 2 * stride].
    """

    def __init__(self, slot: int, weight: Tensor, bias: Tensor, stride: int) -> None:
        if weight.shape[2] != 2 * stride or stride % 2:
            raise ValueError("the kernel must be twice the stride, and the stride even")
        self._slot = slot
        self._stride = stride
        self._channels = weight.shape[1]
        late, early = weight[:, :, stride:], weight[:, :, :stride]
        taps = torch.stack([part.permute(2, 1, 0).reshape(-1, weight.shape[0]) for part in (late, early)], dim=2)
        self._conv = PackedConv(slot, taps, bias.repeat(stride), (1, 1))

    def __call__(self, packed: Packed, flows: Sequence[Flow], activation: Activation) -> Packed:
        """`activation` acts on the input first."""
        crop = self._stride // 2
        blocks = self._conv(packed, flows, activation)
        streams: list[Tensor] = []
        for rows, flow in zip(blocks.split(), flows, strict=True):
            samples = rows.reshape(-1, self._channels)
            first = 0 if self._slot in flow.before else min(crop, len(samples))
            last = len(samples) - crop if flow.ends else len(samples)
            streams.append(samples[first:last])
        return Packed.of(streams)


class PackedSum:
    """Adds branches that run behind their common input by different delays; early rows wait for the late branch."""

    def __init__(self, slots: Sequence[int]) -> None:
        self._slots = tuple(slots)

    def __call__(self, branches: Sequence[Packed], flows: Sequence[Flow]) -> Packed:
        by_stream = zip(*(branch.split() for branch in branches), strict=True)
        return Packed.of([self._add(rows, flow) for rows, flow in zip(by_stream, flows, strict=True)])

    def _add(self, branches: tuple[Tensor, ...], flow: Flow) -> Tensor:
        queues = [self._queue(slot, rows, flow) for slot, rows in zip(self._slots, branches, strict=True)]
        ready = min(len(queue) for queue in queues)
        total = queues[0][:ready].clone()
        for queue in queues[1:]:
            total += queue[:ready]
        for slot, queue in zip(self._slots, queues, strict=True):
            if not flow.ends:
                flow.after[slot] = queue[ready:].clone()
        return total

    def _queue(self, slot: int, rows: Tensor, flow: Flow) -> Tensor:
        carried = flow.before.get(slot)
        return rows if carried is None else torch.cat((carried, rows))


def _add_scaled(bias: Tensor, rows: Tensor, tap: Tensor) -> Tensor:
    return torch.addcmul(bias, rows, tap)


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    return starts


def _pick(rows: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> Packed:
    return Packed.of([rows[start : start + length] for start, length in zip(starts, lengths, strict=True)])

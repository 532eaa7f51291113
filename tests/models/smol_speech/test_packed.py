"""Packed streaming convolutions equal torch's own over whole streams, for any chunking and any batch mates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from omnistage.models.smol_speech.packed import Carry, Flow, Packed, PackedConv, PackedSum, PackedUpsample

torch.set_num_threads(1)

Layer = Callable[[Packed, Sequence[Flow]], Packed]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stream(layer: Layer, streams: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Runs streams side by side; stream i takes `sizes[(i + step) % n]` rows per step, so their positions differ."""
    carries: list[Carry] = [{} for _ in streams]
    outputs: list[list[Tensor]] = [[] for _ in streams]
    taken = [0] * len(streams)
    step = 0
    while any(position < len(rows) for position, rows in zip(taken, streams, strict=True)):
        active = [index for index, rows in enumerate(streams) if taken[index] < len(rows)]
        counts = [min(sizes[(i + step) % len(sizes)], len(streams[i]) - taken[i]) for i in active]
        flows = [Flow(carries[i], taken[i] + n == len(streams[i])) for i, n in zip(active, counts, strict=True)]
        pieces = [streams[i][taken[i] : taken[i] + n] for i, n in zip(active, counts, strict=True)]
        result = layer(Packed.of(pieces), flows)
        for index, count, flow, rows in zip(active, counts, flows, result.split(), strict=True):
            outputs[index].append(rows)
            carries[index] = flow.after
            taken[index] += count
        step += 1
    return [torch.cat(pieces) for pieces in outputs]


def whole_conv(rows: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int], dilation: int) -> Tensor:
    groups = weight.shape[0] if weight.shape[1] == 1 else 1
    padded = F.pad(rows.t()[None], padding)
    return F.conv1d(padded, weight, bias, dilation=dilation, groups=groups)[0].t()


@settings(max_examples=60, deadline=None)
@given(
    taps=st.sampled_from([1, 2, 3, 5, 7]),
    dilation=st.integers(1, 4),
    depthwise=st.booleans(),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 17), min_size=1, max_size=4),
)
def test_streamed_convolution_equals_the_whole_one(
    taps: int, dilation: int, depthwise: bool, lengths: list[int], sizes: list[int]
) -> None:
    weight = normal(6, 1, taps) if depthwise else normal(5, 6, taps)
    bias = normal(len(weight), seed=1)
    span = (taps - 1) * dilation
    padding = (span // 2, span - span // 2)
    streams = [normal(length, 6, seed=10 + index) for index, length in enumerate(lengths)]
    layer = PackedConv(0, weight, bias, padding, dilation)
    for got, rows in zip(stream(layer, streams, sizes), streams, strict=True):
        expected = whole_conv(rows, weight, bias, padding, dilation)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    stride=st.sampled_from([2, 4, 8]),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_streamed_upsampling_equals_the_transposed_convolution(
    stride: int, lengths: list[int], sizes: list[int]
) -> None:
    weight, bias = normal(6, 3, 2 * stride), normal(3, seed=1)
    upsample = PackedUpsample(0, weight, bias, stride)
    streams = [normal(length, 6, seed=20 + index) for index, length in enumerate(lengths)]
    results = stream(lambda packed, flows: upsample(packed, flows, torch.relu), streams, sizes)
    for got, rows in zip(results, streams, strict=True):
        expected = F.conv_transpose1d(torch.relu(rows).t()[None], weight, bias, stride=stride, padding=stride // 2)
        assert len(got) == stride * len(rows)
        torch.testing.assert_close(got, expected[0].t(), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 11), min_size=1, max_size=3),
)
def test_branches_of_different_delay_are_added_at_equal_times(lengths: list[int], sizes: list[int]) -> None:
    short, long = normal(4, 4, 3), normal(4, 4, 7, seed=1)
    bias = torch.zeros(4)
    near, far = PackedConv(0, short, bias, (1, 1)), PackedConv(1, long, bias, (9, 9), dilation=3)
    total = PackedSum((2, 3))

    def layer(packed: Packed, flows: Sequence[Flow]) -> Packed:
        return total([near(packed, flows), far(packed, flows)], flows)

    streams = [normal(length, 4, seed=30 + index) for index, length in enumerate(lengths)]
    for got, rows in zip(stream(layer, streams, sizes), streams, strict=True):
        expected = whole_conv(rows, short, bias, (1, 1), 1) + whole_conv(rows, long, bias, (9, 9), 3)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_aligned_rows_stand_at_the_times_of_the_output() -> None:
    conv = PackedConv(0, torch.eye(2)[:, :, None] * torch.tensor([0.0, 1.0, 0.0]), None, (1, 1))
    rows = normal(9, 2)
    flow = Flow({}, ends=False)
    output, aligned = conv.with_aligned(Packed.of([rows]), [flow])
    assert output.lengths == (8,)
    torch.testing.assert_close(output.rows, rows[:8])
    torch.testing.assert_close(aligned.rows, rows[:8])


def test_a_step_changes_nothing_that_was_carried_in() -> None:
    conv = PackedConv(0, normal(3, 3, 3), None, (1, 1))
    first = Flow({}, ends=False)
    conv(Packed.of([normal(4, 3)]), [first])
    kept = {slot: rows.clone() for slot, rows in first.after.items()}
    again = [conv(Packed.of([normal(2, 3, seed=5)]), [Flow(first.after, ends=True)]).rows for _ in range(2)]
    torch.testing.assert_close(again[0], again[1])
    assert first.after.keys() == kept.keys()
    torch.testing.assert_close(first.after[0], kept[0])


def test_upsampling_refuses_kernels_that_are_not_twice_the_stride() -> None:
    with pytest.raises(ValueError, match="twice the stride"):
        PackedUpsample(0, normal(3, 3, 5), torch.zeros(3), 2)

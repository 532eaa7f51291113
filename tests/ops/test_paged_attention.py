from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from omnistage.errors import ConfigError, StageError
from omnistage.ops.paged_attention import (
    AttentionSpan,
    PagedCache,
    attention_implementation,
    paged_sdpa,
    plan_attention,
    slots_of,
)

HEADS, KV_HEADS, DIM = 6, 2, 8
CPU = torch.device("cpu")


def cache(*, blocks: int = 40, block_size: int = 4) -> PagedCache:
    return PagedCache(
        layers=1,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        blocks=blocks,
        block_size=block_size,
        dtype=torch.float32,
        device=CPU,
    )


def module(**fields: Any) -> Any:
    return SimpleNamespace(**{"layer_idx": 0, "is_causal": True, **fields})


class Stream:
    """One request: its full queries, keys and values [heads, length, D] and the dense answer."""

    def __init__(self, length: int, seed: int, spans: tuple[tuple[int, int], ...] = ()) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.query = torch.randn(HEADS, length, DIM, generator=draw)
        self.key = torch.randn(KV_HEADS, length, DIM, generator=draw)
        self.value = torch.randn(KV_HEADS, length, DIM, generator=draw)
        self.spans = spans
        self.blocks: list[int] = []
        self.done = 0

    def dense(self, window: int | None = None) -> Tensor:
        length = self.query.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - (window or length))
        for begin, end in self.spans:
            seen[begin:end, begin:end] = True
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (self.key, self.value))
        scores = (self.query @ key.transpose(1, 2)) * DIM**-0.5
        answer: Tensor = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value
        return answer.transpose(0, 1)  # [length, H, D]


def step(paged: PagedCache, parts: list[tuple[Stream, int]], window: int | None = None) -> list[Tensor]:
    """Runs the next `count` rows of each stream in one flat batch; per stream [count, H, D]."""
    spans = [AttentionSpan(s.blocks, s.done, s.done + count, s.spans) for s, count in parts]
    plan = plan_attention(paged, spans)
    query, key, value = (
        torch.cat([tensor[:, s.done : s.done + count] for (s, count), tensor in zip(parts, tensors, strict=True)], 1)
        for tensors in (
            [s.query for s, _ in parts],
            [s.key for s, _ in parts],
            [s.value for s, _ in parts],
        )
    )
    out, weights = paged_sdpa(
        module(), query[None], key[None], value[None], None, plan=plan, scaling=DIM**-0.5, sliding_window=window
    )
    assert weights is None
    assert out.shape == (1, query.shape[1], HEADS, DIM)
    for stream, count in parts:
        stream.done += count
    return list(torch.split_with_sizes(out[0], [count for _, count in parts]))


@pytest.mark.parametrize("window", [None, 1, 5, 24])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_random_mixes_of_chunks_and_single_rows_equal_dense_attention(block_size: int, window: int | None) -> None:
    draw = random.Random(block_size)
    paged = cache(blocks=160, block_size=block_size)
    free = list(range(160))
    draw.shuffle(free)
    streams = [Stream(length, seed) for seed, length in enumerate([30, 7, 19, 1, 24])]
    for stream in streams:
        stream.blocks = [free.pop() for _ in range(-(-stream.query.shape[1] // block_size))]
    answers: dict[int, list[Tensor]] = {index: [] for index in range(len(streams))}
    while unfinished := [i for i, s in enumerate(streams) if s.done < s.query.shape[1]]:
        chosen = draw.sample(unfinished, draw.randint(1, len(unfinished)))
        parts = [(streams[i], draw.choice([1, 1, min(6, streams[i].query.shape[1] - streams[i].done)])) for i in chosen]
        for index, rows in zip(chosen, step(paged, parts, window), strict=True):
            answers[index].append(rows)
    for index, stream in enumerate(streams):
        torch.testing.assert_close(torch.cat(answers[index]), stream.dense(window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunks", [[14], [3, 11], [3, 6, 5], [2, 1, 9, 2], [9, 1, 1, 3]])
def test_bidirectional_spans_see_themselves_wholly(chunks: list[int]) -> None:
    stream = Stream(14, 3, ((3, 9), (12, 14)))
    stream.blocks = [5, 1, 7, 2]
    paged = cache()
    rows = torch.cat([step(paged, [(stream, count)])[0] for count in chunks])
    torch.testing.assert_close(rows, stream.dense(), atol=1e-5, rtol=1e-5)


def test_splitting_a_bidirectional_span_is_refused() -> None:
    with pytest.raises(StageError, match=r"span 3\.\.9 is split by the chunk 0\.\.5"):
        plan_attention(cache(), [AttentionSpan([0, 1, 2], 0, 5, ((3, 9),))])


def test_slots_follow_the_block_table() -> None:
    assert slots_of([7, 2, 5], 3, 9, 4, CPU).tolist() == [31, 8, 9, 10, 11, 20]


def test_reading_the_cache_gives_what_was_written() -> None:
    paged, stream = cache(), Stream(9, 1)
    stream.blocks = [4, 0, 9]
    step(paged, [(stream, 9)])
    read = paged.read(slots_of(stream.blocks, 2, 9, 4, CPU))
    assert read.shape == (1, 2, KV_HEADS, 7, DIM)
    assert torch.equal(read[0, 0], stream.key[:, 2:])
    assert torch.equal(read[0, 1], stream.value[:, 2:])


def call(module_fields: dict[str, Any], options: dict[str, Any]) -> None:
    paged, stream = cache(), Stream(3, 0)
    plan = plan_attention(paged, [AttentionSpan([0], 0, 3)])
    arguments: dict[str, Any] = {"attention_mask": None, "plan": plan, **options}
    paged_sdpa(module(**module_fields), stream.query[None], stream.key[None], stream.value[None], **arguments)


@pytest.mark.parametrize(
    ("module_fields", "options", "words"),
    [
        ({"is_causal": False}, {}, "causal modules only"),
        ({}, {"attention_mask": torch.ones(1)}, "without mask"),
        ({}, {"dropout": 0.1}, "without dropout"),
        ({}, {"softcap": 30.0}, "softcap"),
        ({}, {"s_aux": torch.ones(1)}, "s_aux"),
        ({}, {"plan": None}, "without a plan"),
    ],
)
def test_what_it_does_not_compute_is_refused_by_name(
    module_fields: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(StageError, match=words):
        call(module_fields, options)


def test_options_that_are_off_are_no_obstacle() -> None:
    call({}, {"sliding_window": None, "softcap": None})


def test_backends_go_by_name() -> None:
    assert attention_implementation("auto") == attention_implementation("TORCH_SDPA")
    with pytest.raises(ConfigError, match=r"FLASH_ATTN.*TORCH_SDPA"):
        attention_implementation("FLASH_ATTN")

"""ar2dit through the whole runtime: the picture is right only if every key, value and hidden row came and was right."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from omnistage.errors import ErrorCode
from omnistage.testing.ar2dit_stages import description_of, handed_tokens
from omnistage.testing.faults import fault
from omnistage.testing.toydit_stage import ToyParams, picture
from tests.engines import answer, running

LONG = "a lighthouse stands where the river meets the sea "


def assert_drawn_from(image: Any, tokens: list[int], seed: int) -> None:
    right = picture(description_of(tokens), ToyParams(), seed)
    assert image.shape == right.shape
    assert np.abs(image.astype(int) - right).max() <= 1


@pytest.mark.parametrize("placement", ["inline", "process"])
@pytest.mark.parametrize("async_chunk", [True, False])
async def test_picture_is_drawn_from_every_row_of_the_thinker(placement: str, async_chunk: bool) -> None:
    edges = {"thinker->dit": {"async_chunk": async_chunk}}
    async with running("ar2dit", {"placement": placement, "edges": edges}) as engine:
        whole = await answer(engine, id="a", prompt="hello", seed=1, modalities=("image", "text"))
        cut = await answer(engine, id="b", prompt="hello", seed=1, sampling={"thinker": {"max_tokens": 4}})
    assert whole.text == "hello"
    assert_drawn_from(whole.tensors["image"], handed_tokens("hello"), 1)
    assert_drawn_from(cut.tensors["image"], handed_tokens("hello", 4), 1)


def test_every_row_shapes_the_description() -> None:
    tokens = handed_tokens("hello")
    whole = description_of(tokens)
    assert len(whole) == 16 * len(tokens)
    for at in range(len(tokens)):
        other = description_of([*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]])
        assert other[: 16 * at] == whole[: 16 * at]
        assert all(other[16 * i : 16 * i + 16] != whole[16 * i : 16 * i + 16] for i in range(at, len(tokens)))


@pytest.mark.parametrize("caching", [True, False])
async def test_rows_of_a_cached_or_preempted_prompt_give_the_same_picture(caching: bool) -> None:
    stage = {"prefix_caching": caching, "block_size": 4, "token_budget": 8, "max_num_seqs": 4}
    async with running("ar2dit", {"placement": "inline", "stages": {"thinker": stage}}) as engine:
        prompts = [LONG, LONG + "and waits", LONG, "another", LONG + "and sings"]
        first = await answer(engine, id="first", prompt=LONG, seed=0)
        results = await asyncio.gather(
            *(answer(engine, id=f"r{index}", prompt=prompt, seed=index) for index, prompt in enumerate(prompts))
        )
    assert_drawn_from(first.tensors["image"], handed_tokens(LONG), 0)
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert_drawn_from(result.tensors["image"], handed_tokens(prompt), index)
    cached = [stage.cached_tokens for result in results if result.metrics for stage in result.metrics.stages.values()]
    assert any(cached) == caching


@pytest.mark.parametrize("after", [0, 3])
async def test_lost_rows_end_the_request_and_never_make_a_picture(after: int) -> None:
    lost = fault("dit", "chunk_received", "drop", after=after)
    edges = {"edges": {"thinker->dit": {"deadline_s": 1.0}}}
    async with running("ar2dit", {"placement": "inline", **edges, **lost}) as engine:
        result = await answer(engine, id="a", prompt="hello")
    assert result.error is not None
    assert result.error.code == ErrorCode.HANDOFF
    assert "thinker" in (result.error.edge or "")
    assert "image" not in result.tensors

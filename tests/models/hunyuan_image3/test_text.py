"""The text stage under the AR engine, against the official implementation and against itself alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.errors import RequestError
from omnistage.models.hunyuan_image3.attention import Document, DocumentPlan, segments_of
from omnistage.models.hunyuan_image3.backbone import embedded
from omnistage.models.hunyuan_image3.components import Components
from omnistage.models.hunyuan_image3.layout import Conversation, Part, Renderer, Turn
from omnistage.models.hunyuan_image3.references import ReferenceEncoder, References, place
from omnistage.models.hunyuan_image3.rotary import positions
from omnistage.models.hunyuan_image3.text_stage import Talk
from omnistage.models.hunyuan_image3.vocabulary import Vocabulary
from omnistage.stages.ar.engine import AREngine
from omnistage.stages.base import Emission
from tests.models.hunyuan_image3.conftest import Near
from tests.models.hunyuan_image3.harness import REFERENCE, pictures, think, visit

Engine = AREngine[Talk]
PARAMS = REFERENCE["params"]
THINK = {"prompt": "a red cat", "system_prompt": "You draw.", "bot_task": "think", "size": "256x256"}
CAPTION = {"prompt": "a blue door", "bot_task": "think_recaption"}


def written(emissions: list[Emission], request_id: str = "r") -> list[int]:
    own = [e for e in emissions if e.port == "text" and e.request_id == request_id]
    return [token for emission in own for token in emission.payload.meta["token_ids"]]


def together(engine: Engine, asks: list[dict[str, Any]]) -> list[list[int]]:
    """The tokens of requests that are submitted at once."""
    for index, ask in enumerate(asks):
        request, chunks = visit(ask, "ar", variant="ar_dit", request_id=f"r{index}")
        engine.add(request)
        for chunk in chunks:
            engine.feed(chunk)
    emissions: list[Emission] = []
    while engine.has_work():
        emissions += engine.step().emissions
    return [written(emissions, f"r{index}") for index in range(len(asks))]


def test_greedy_tokens_are_those_of_the_reference(text_engine: Engine) -> None:
    emissions = think(text_engine, THINK | {"sampling": {"ar": {"max_tokens": 16}}})
    assert written(emissions) == PARAMS["text_greedy_think16"]


@pytest.mark.slow
def test_greedy_tokens_about_a_picture_are_those_of_the_reference(text_engine: Engine) -> None:
    emissions = think(text_engine, THINK | {"images": ["a"], "sampling": {"ar": {"max_tokens": 12}}})
    assert written(emissions) == PARAMS["edit_ar"]["tokens12"]
    # The picture's rows exceed the budget of 100 rows: they are one chunk.
    assert text_engine.counters()["prefill_tokens"] == PARAMS["edit_ar"]["prefill_len"]


@pytest.mark.slow
@torch.inference_mode()
def test_logits_after_a_picture(
    near: Near, arrays: dict[str, Any], components: Components, vocabulary: Vocabulary, checkpoint: Any
) -> None:
    references = References(checkpoint, vocabulary.sizes)
    grid, seed = references.grid((128, 512)), PARAMS["edit_ar"]["vae_seed"]
    said = Conversation("You draw.", (Turn("user", (Part(picture=0), Part("a red cat"))),), (grid,))
    layout = Renderer(vocabulary, "instruct", 260).question(said, "think")
    noise = references.noise([(128, 512)], torch.Generator().manual_seed(seed))
    rows = embedded(components.backbone(), layout.ids)
    place(rows, 0, layout, ReferenceEncoder(components)([references.read(pictures()["a"], noise[0])]))
    segments = segments_of(0, len(layout.ids), [layout.references[0].joint])
    seen = [
        segment.stop if segment.full else row + 1 for segment in segments for row in range(segment.start, segment.stop)
    ]
    assert (np.array(seen) == arrays["edit/ar_mask_rowsum"]).all()
    plan = DocumentPlan([Document((), segments)])
    hidden = components.backbone()(rows, components.rotary(positions(layout.grids, 0, len(layout.ids))), plan)
    head = components.text_head()
    near("edit/ar_prefill_logits_last", head.logits(head.norm(hidden[-1:]))[0])


def test_the_format_is_kept_and_the_thinking_is_marked(text_engine: Engine, vocabulary: Vocabulary) -> None:
    emissions = think(text_engine, CAPTION)
    special, ids = vocabulary.special, written(emissions)
    assert ids[ids.index(special.end_think) + 1] == special.recaption
    end = ids.index(special.end_recaption)
    assert ids[end + 1 : -1] == [special.answer, special.boi, special.size]
    assert vocabulary.ratios.index(ids[-1]) == 28
    text = [e for e in emissions if e.port == "text"]
    by_kind = {True: "", False: ""}
    for emission in text:
        by_kind[emission.payload.meta["reasoning"]] += emission.payload.meta["text"]
    assert by_kind[True] == vocabulary.decode(ids[: ids.index(special.end_think)])
    assert by_kind[False] == vocabulary.decode(ids[ids.index(special.recaption) : end])
    assert text[-1].final
    assert text[-1].payload.meta["finish_reason"] == "stop"


def test_a_size_alone_takes_one_token(text_engine: Engine, vocabulary: Vocabulary) -> None:
    emissions = think(text_engine, {"prompt": "a blue door", "bot_task": "image", "seed": 1})
    assert [vocabulary.ratios.index(token) for token in written(emissions)] == [28]


def test_the_size_is_greedy_whatever_the_temperature(text_engine: Engine, vocabulary: Vocabulary) -> None:
    ask = {"prompt": "a blue door", "bot_task": "image", "sampling": {"ar": {"temperature": 2.0}}}
    found = together(text_engine, [ask | {"seed": seed} for seed in range(4)])
    assert found == [[vocabulary.ratios[28]]] * 4


def test_tokens_do_not_depend_on_batch_mates_or_chunks(components: Components, text_engine: Engine) -> None:
    asks: list[dict[str, Any]] = [
        CAPTION,
        THINK | {"sampling": {"ar": {"max_tokens": 30}}},
        {"prompt": "a blue door " * 15, "bot_task": "think", "size": "64x64", "sampling": {"ar": {"max_tokens": 20}}},
        {
            "prompt": "z",
            "bot_task": "recaption",
            "size": "64x64",
            "sampling": {"ar": {"max_tokens": 9, "temperature": 1}},
        },
    ]
    assert together(text_engine, asks) == [written(think(text_engine, ask)) for ask in asks]


def test_a_second_request_with_the_same_beginning_reuses_its_blocks(text_engine: Engine) -> None:
    ask = THINK | {"sampling": {"ar": {"max_tokens": 3}}}
    first = written(think(text_engine, ask))
    before = text_engine.counters()["cached_tokens"]
    assert written(think(text_engine, ask)) == first
    assert text_engine.counters()["cached_tokens"] - before == 32
    think(text_engine, ask | {"cache_salt": "other"})
    assert text_engine.counters()["cached_tokens"] - before == 32


@pytest.mark.slow
def test_blocks_of_a_picture_are_reused_for_the_same_picture_and_seed_only(
    small_text_engine: Engine, small_folder: Path
) -> None:
    engine = small_text_engine
    ask = THINK | {"images": ["s"], "sampling": {"ar": {"max_tokens": 2}}}
    reused = []
    for change in ({}, {}, {"seed": 43}, {"images": ["t"]}):
        before = engine.counters()["cached_tokens"]
        think(engine, ask | change, folder=small_folder)
        reused.append(engine.counters()["cached_tokens"] - before)
    assert reused[0] == 0
    assert reused[1] >= 22 + 2 * 8 + 1 + 260  # past the picture
    assert reused[2] == reused[3] == 16  # the rows before the picture


def test_a_prompt_beyond_the_context_is_refused(text_engine: Engine) -> None:
    request, _ = visit(THINK | {"prompt": "word " * 500}, "ar", variant="ar_dit")
    with pytest.raises(RequestError, match="context length"):
        text_engine.add(request)
    assert text_engine.request_ids() == frozenset()


def test_sampled_texts_follow_their_seed(text_engine: Engine) -> None:
    ask = {"prompt": "q", "bot_task": "think", "sampling": {"ar": {"temperature": 1.0, "max_tokens": 8}}}
    once, again, other = together(text_engine, [ask | {"seed": seed} for seed in (1, 1, 2)])
    assert once == again
    assert once != other

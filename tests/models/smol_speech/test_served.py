"""smol-speech as a whole: four stages with their real weights, behind the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.payload import MultimodalPayload
from omnistage.request import FinishReason, OmniRequest
from omnistage.testing.leakcheck import check_no_leaks, settled, snapshot
from tests.engines import answer, running
from tests.models.smol_speech.sentences import SENTENCES, word_errors, words

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

QUESTIONS = (
    "What is the capital of France?",
    "Tell me two facts about the moon.",
    "How do plants make food?",
    "Why is the sky blue, in one sentence?",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[AsyncOmniEngine]:
    async with running("smol-speech") as engine:
        yield engine


def greedy(**more: Any) -> dict[str, Any]:
    return {"sampling": {"thinker": {"temperature": 0.0, "max_tokens": 48} | more}, "seed": 11}


async def hear(engine: AsyncOmniEngine, audio: np.ndarray[Any, Any], name: str = "hear") -> str:
    payload = MultimodalPayload.of({"sample_rate": 24000}, audio=audio)
    outputs = [o async for o in engine.generate(OmniRequest(id=name, task="transcription"), {"audio": payload})]
    return "".join(output.text for output in outputs)


async def test_spoken_text_equals_written_text(served: AsyncOmniEngine) -> None:
    errors = total = 0
    for index, question in enumerate(QUESTIONS):
        result = await answer(served, id=f"q{index}", prompt=question, **greedy())
        heard = words(await hear(served, result.tensors["audio"]))
        errors += word_errors(words(result.text), heard)
        total += len(words(result.text))
    assert total > 60
    assert errors / total <= 0.08  # free text has names and numbers that Whisper spells its own way


async def test_whisper_hears_the_sentences_of_the_speech_route(served: AsyncOmniEngine) -> None:
    jobs = [answer(served, id=f"s{i}", task="speech", prompt=text, seed=i) for i, text in enumerate(SENTENCES)]
    spoken = await asyncio.gather(*jobs)
    heard = await asyncio.gather(*(hear(served, r.tensors["audio"], f"h{i}") for i, r in enumerate(spoken)))
    errors = sum(word_errors(words(s), words(h)) for s, h in zip(SENTENCES, heard, strict=True))
    assert errors / sum(len(words(s)) for s in SENTENCES) <= 0.05


async def test_spoken_question_gets_a_spoken_answer(served: AsyncOmniEngine) -> None:
    question = await answer(served, id="ask", task="speech", prompt="What is the capital of France?", seed=1)
    media = {"q": MultimodalPayload.of({"sample_rate": 24000}, audio=question.tensors["audio"])}
    messages = [{"role": "user", "content": [{"type": "audio", "media": "q"}]}]
    request = OmniRequest(id="spoken", messages=messages, **greedy())
    outputs = [o async for o in served.generate(request, media)]
    text = "".join(o.text for o in outputs if o.modality == "text")
    audio = np.concatenate([o.payload["audio"] for o in outputs if o.modality == "audio" and o.payload is not None], 1)
    assert "Paris" in text
    assert "paris" in words(await hear(served, audio))


async def test_audio_reaches_the_client_before_the_last_text(served: AsyncOmniEngine) -> None:
    for index, question in enumerate(QUESTIONS[1:]):
        request = OmniRequest(id=f"o{index}", prompt=question, **greedy())
        events = [o async for o in served.generate(request)]
        kinds = [o.modality for o in events if o.text or (o.payload is not None and o.payload.nbytes)]
        clauses = "".join(o.text for o in events)
        assert any(mark in clauses[:-2] for mark in ",;:.!?")
        assert kinds.index("audio") < len(kinds) - 1 - kinds[::-1].index("text"), clauses


async def test_many_at_once_equal_one_at_a_time(served: AsyncOmniEngine) -> None:
    asks = [(f"{q} Answer {n}.", n) for n, q in enumerate(QUESTIONS + QUESTIONS)]
    alone = [await answer(served, id=f"a{n}", prompt=q, **greedy(max_tokens=24)) for q, n in asks]
    together = await asyncio.gather(*(answer(served, id=f"t{n}", prompt=q, **greedy(max_tokens=24)) for q, n in asks))
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.tensors["audio"], other.tensors["audio"], atol=1e-5)


@pytest.mark.parametrize("limit", [1, 2, 5, 9])
async def test_text_cut_by_max_tokens_is_spoken_as_far_as_it_is_returned(served: AsyncOmniEngine, limit: int) -> None:
    prompt = QUESTIONS[2]
    cut = await answer(served, id=f"cut{limit}", prompt=prompt, **greedy(max_tokens=limit))
    assert cut.finish_reason == FinishReason.LENGTH
    assert len(cut.token_ids) == limit
    said = await answer(served, id=f"say{limit}", task="speech", prompt=cut.text, seed=11)
    np.testing.assert_allclose(cut.tensors["audio"], said.tensors["audio"], atol=1e-5)


async def test_empty_answer_is_empty_audio(served: AsyncOmniEngine) -> None:
    result = await answer(served, id="none", prompt="Say nothing.", **greedy(max_tokens=0))
    assert (result.text, result.error) == ("", None)
    assert result.tensors["audio"].shape == (1, 0)


async def test_disconnects_leave_nothing_behind(served: AsyncOmniEngine) -> None:
    await answer(served, id="warm", prompt="Hello.", **greedy(max_tokens=4))
    await settled(served)
    before = snapshot(served)

    async def leave_after(index: int) -> None:
        stream = served.generate(OmniRequest(id=f"d{index}", prompt=QUESTIONS[index % 4], **greedy(max_tokens=12)))
        for _ in range(index % 9):
            await anext(stream, None)
        await stream.aclose()  # type: ignore[attr-defined]

    for start in range(0, 300, 30):
        await asyncio.gather(*(leave_after(index) for index in range(start, start + 30)))
    kept = await answer(served, id="kept", prompt=QUESTIONS[0], **greedy())
    assert "Paris" in kept.text
    await check_no_leaks(served, before)


async def test_inline_equals_process_at_other_chunk_sizes(served: AsyncOmniEngine) -> None:
    expected = [await answer(served, id=f"p{i}", prompt=q, **greedy(max_tokens=20)) for i, q in enumerate(QUESTIONS)]
    for first, size in ((1, 1), (7, 100)):
        chunks = {"first_chunk_frames": first, "chunk_frames": size}
        async with running("smol-speech", {"placement": "inline", "stages": {"code2wav": chunks}}) as engine:
            for index, (question, whole) in enumerate(zip(QUESTIONS, expected, strict=True)):
                result = await answer(engine, id=f"i{index}", prompt=question, **greedy(max_tokens=20))
                assert result.token_ids == whole.token_ids
                np.testing.assert_allclose(result.tensors["audio"], whole.tensors["audio"], atol=1e-5)

"""The runtime as a whole on closed-form stages: what is streamed, cut, batched, aborted and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.errors import ErrorCode, RequestError
from omnistage.request import FinishReason, OmniRequest, OmniRequestOutput
from omnistage.testing.closed_form import CODES_PER_TOKEN, text_of_wave, wave_of
from omnistage.testing.leakcheck import check_no_leaks, settled, snapshot
from tests.engines import answer, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLACEMENTS: dict[str, dict[str, Any]] = {
    "inline": {"placement": "inline"},
    "process": {"placement": "process"},
    "talker_with_thinker": {"stages": {"talker": {"placement": "inline", "with": "thinker"}}},
}


@pytest_asyncio.fixture(params=PLACEMENTS, scope="module", loop_scope="module")
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[AsyncOmniEngine]:
    async with running("echo3", PLACEMENTS[request.param]) as engine:
        yield engine


async def test_text_and_wave_are_what_the_closed_form_says(engine: AsyncOmniEngine) -> None:
    text = "Grüße, 世界! 🎉"
    result = await answer(engine, id="a", prompt=text)
    assert (result.text, result.finish_reason, result.error) == (text, FinishReason.STOP, None)
    np.testing.assert_allclose(result.tensors["audio"][0], wave_of(text), atol=1e-6)
    assert result.meta["sample_rate"] == 24_000


async def test_short_answers_and_answers_around_one_chunk_have_all_their_audio(engine: AsyncOmniEngine) -> None:
    for count in (0, 1, 2, 3, 4, 5, 7, 8, 9):
        result = await answer(engine, id="a", prompt="abcdefghi"[:count])
        assert result.text == "abcdefghi"[:count] == text_of_wave(result.tensors["audio"][0])


async def test_text_cut_by_max_tokens_is_spoken_exactly_as_far_as_it_is_returned(engine: AsyncOmniEngine) -> None:
    for limit in (1, 2, 5):
        result = await answer(engine, id="a", prompt="hello world", sampling={"thinker": {"max_tokens": limit}})
        assert result.text == "hello world"[:limit] == text_of_wave(result.tensors["audio"][0])
        assert result.finish_reason == FinishReason.LENGTH


async def test_many_at_once_equal_one_at_a_time(engine: AsyncOmniEngine) -> None:
    prompts = [f"request {i} says {'x' * (i * 3 % 17)}" for i in range(24)]
    alone = [await answer(engine, id=f"s{i}", prompt=prompt) for i, prompt in enumerate(prompts)]
    together = await asyncio.gather(*(answer(engine, id=f"c{i}", prompt=prompt) for i, prompt in enumerate(prompts)))
    for one, other, prompt in zip(alone, together, prompts, strict=True):
        assert one.text == other.text == prompt
        np.testing.assert_array_equal(one.tensors["audio"], other.tensors["audio"])


async def test_text_only_request_never_touches_the_talker(engine: AsyncOmniEngine) -> None:
    def steps() -> dict[str, float]:
        return {r.id.stage: r.counters.get("steps", 0) for r in engine.runtime.replicas.values()}

    await settled(engine)
    before = steps()
    result = await answer(engine, id="a", prompt="quiet", modalities=("text",))
    assert (result.text, result.tensors) == ("quiet", {})
    await settled(engine)
    assert steps() == before | {"thinker": steps()["thinker"]}
    assert steps()["thinker"] > before["thinker"]


async def test_speech_enters_at_the_talker(engine: AsyncOmniEngine) -> None:
    result = await answer(engine, id="a", task="speech", prompt="say this")
    assert text_of_wave(result.tensors["audio"][0]) == "say this"
    assert result.text == ""


async def test_events_carry_seq_and_one_terminal_event_comes_last(engine: AsyncOmniEngine) -> None:
    events = [o async for o in engine.generate(OmniRequest(id="a", prompt="count me"))]
    assert [e.finished for e in events] == [False] * (len(events) - 1) + [True]
    for modality in ("text", "audio"):
        stream = [e for e in events if e.modality == modality]
        assert [e.seq for e in stream] == list(range(len(stream)))
        assert [e.final for e in stream] == [False] * (len(stream) - 1) + [True]


async def test_first_audio_comes_before_the_last_text() -> None:
    async with running("echo3", {"stages": {"thinker": {"step_delay_s": 0.005}}}) as engine:
        events = [o async for o in engine.generate(OmniRequest(id="a", prompt="a rather long answer" * 3))]
    kinds = [e.modality for e in events if e.text or (e.payload is not None and e.payload.nbytes)]
    assert kinds.index("audio") < len(kinds) - 1 - kinds[::-1].index("text")


async def test_metrics_add_up(engine: AsyncOmniEngine) -> None:
    def stopped() -> float:
        lines = engine.render_metrics().decode().splitlines()
        name = 'omnistage_requests_total{reason="stop",task="chat"} '
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    before = stopped()
    result = await answer(engine, id="a", prompt="metrics")
    metrics = result.metrics
    assert metrics is not None
    assert metrics.audio_s is not None
    assert metrics.audio_s == pytest.approx(len(wave_of("metrics")) / 24_000)
    assert metrics.rtf == pytest.approx(metrics.e2el_s / metrics.audio_s)
    assert metrics.ttft_s is not None
    assert metrics.ttfp_s is not None
    assert 0 < metrics.ttft_s < metrics.ttfp_s < metrics.e2el_s
    assert metrics.stages["talker"].output_tokens == len("metrics") * CODES_PER_TOKEN + 1
    assert stopped() == before + 1
    assert 'omnistage_stage_up{replica="0",stage="wave"} 1.0' in engine.render_metrics().decode()


async def test_unseeded_requests_draw_and_report_their_own_seed(engine: AsyncOmniEngine) -> None:
    seeds = {(await answer(engine, id=f"r{i}", prompt="x")).seed for i in range(3)}
    assert len(seeds) == 3
    assert (await answer(engine, id="s", prompt="x", seed=7)).seed == 7


async def test_abort_gives_one_terminal_event_and_frees_everything(engine: AsyncOmniEngine) -> None:
    await answer(engine, id="warm", prompt="x")
    await settled(engine)
    before = snapshot(engine)
    events: list[OmniRequestOutput] = []
    async for output in engine.generate(OmniRequest(id="a", prompt="y" * 3000)):
        events.append(output)
        if len(events) == 3:
            assert await engine.abort("a")
            assert not await engine.abort("a")
    assert [e.finish_reason for e in events if e.finished] == [FinishReason.ABORT]
    assert events[-1].finished
    await check_no_leaks(engine, before)


async def test_closing_the_stream_early_aborts_and_others_go_on(engine: AsyncOmniEngine) -> None:
    await answer(engine, id="warm", prompt="x")
    await settled(engine)
    before = snapshot(engine)

    async def leave_after(name: str, count: int) -> None:
        stream = engine.generate(OmniRequest(id=name, prompt="z" * 200))
        async for _ in stream:
            count -= 1
            if count <= 0:
                break
        await stream.aclose()  # type: ignore[attr-defined]

    jobs = [leave_after(f"r{i}", i % 23) for i in range(40)]
    kept = [answer(engine, id=f"k{i}", prompt=f"keep {i}") for i in range(10)]
    results = await asyncio.gather(*jobs, *kept)
    for i, result in enumerate(results[40:]):
        assert result is not None
        assert text_of_wave(result.tensors["audio"][0]) == f"keep {i}"
    await check_no_leaks(engine, before)


async def test_slow_reader_holds_the_stages_back_and_loses_nothing() -> None:
    edges = {"thinker->talker": {"max_inflight": 4}, "talker->wave": {"max_inflight": 4}}
    async with running("echo3", {"edges": edges, "stages": {"wave": {"chunk_frames": 1}}}) as engine:
        stream = engine.generate(OmniRequest(id="a", prompt="slow" * 50))
        first = await anext(stream)
        await asyncio.sleep(0.3)
        held = engine.orchestrator.outstanding_chunks
        rest = [o async for o in stream]
    assert held < 200  # of 200 text, 600 code and 600 audio chunks
    pieces = [o.payload["audio"] for o in [first, *rest] if o.payload is not None and "audio" in o.payload.tensors]
    assert text_of_wave(np.concatenate(pieces, axis=1)[0]) == "slow" * 50


async def test_whole_payload_mode_gives_the_same_answer() -> None:
    edges = {name: {"async_chunk": False, "max_inflight": 2} for name in ("thinker->talker", "talker->wave")}
    async with running("echo3", {"edges": edges}) as engine:
        result = await answer(engine, id="a", prompt="all at once, please")
    assert text_of_wave(result.tensors["audio"][0]) == "all at once, please"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"task": "image", "prompt": "x"}, "task"),
        ({"prompt": "x", "sampling": {"speaker": {}}}, "sampling.speaker"),
        ({"prompt": "x", "sampling": {"thinker": {"temperature": 5}}}, "sampling.thinker"),
        ({"prompt": "x", "sampling": {"thinker": {"tempo": 5}}}, "sampling.thinker"),
        ({"prompt": "x", "voice": "nobody"}, "voice"),
        ({"prompt": "x", "modalities": ("image",)}, "modalities"),
        ({}, "messages"),
    ],
)
async def test_bad_request_names_its_parameter(fields: dict[str, Any], param: str) -> None:
    async with running("echo3", {"placement": "inline"}) as engine:
        with pytest.raises(RequestError) as caught:
            await answer(engine, id="a", **fields)
        assert caught.value.info.param == param
        assert (await answer(engine, id="b", prompt="fine")).text == "fine"


async def test_too_long_prompt_is_refused_not_shortened(engine: AsyncOmniEngine) -> None:
    result = await answer(engine, id="a", prompt="x" * 20_000)
    assert result.error is not None
    assert result.error.code == ErrorCode.INVALID_REQUEST
    assert "20001" in result.error.message
    assert result.error.stage == "thinker"


async def test_second_request_of_a_running_id_is_refused() -> None:
    async with running("echo3", {"placement": "inline"}) as engine:
        stream = engine.generate(OmniRequest(id="a", prompt="x" * 500))
        await anext(stream)
        with pytest.raises(RequestError, match="is running"):
            await answer(engine, id="a", prompt="y")
        assert [o async for o in stream][-1].finish_reason == FinishReason.STOP


async def test_full_queue_is_429_with_retry_after() -> None:
    limits = {"limits": {"max_running": 2, "max_queue": 1}}
    async with running("echo3", {**limits, "stages": {"thinker": {"step_delay_s": 0.01}}}) as engine:
        tasks = [asyncio.create_task(answer(engine, id=f"r{i}", prompt="busy " * 4)) for i in range(3)]
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError) as caught:
            await answer(engine, id="late", prompt="x")
        assert caught.value.info.code == ErrorCode.OVERLOADED
        assert caught.value.info.retry_after_s is not None
        assert caught.value.info.retry_after_s > 0
        results = await asyncio.gather(*tasks)
    assert [r.text for r in results] == ["busy " * 4] * 3


async def test_request_past_its_timeout_ends_with_a_deadline_error() -> None:
    async with running("echo3", {"stages": {"thinker": {"step_delay_s": 0.02}}}) as engine:
        result = await answer(engine, id="a", prompt="late" * 100, timeout=0.2)
        assert result.error is not None
        assert result.error.code == ErrorCode.DEADLINE
        assert "thinker" in result.error.message
        assert (await answer(engine, id="b", prompt="ok")).text == "ok"


async def test_drain_finishes_running_requests_and_admits_no_more() -> None:
    async with running("echo3", {"stages": {"thinker": {"step_delay_s": 0.005}}}) as engine:
        task = asyncio.create_task(answer(engine, id="a", prompt="finish me"))
        await asyncio.sleep(0.02)
        drained = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="shutting down"):
            await answer(engine, id="b", prompt="x")
        assert not engine.health().ready
        await drained
        assert (await task).text == "finish me"

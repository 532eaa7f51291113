"""Timelines: they cover a request's time, say where it went, stay bounded, and survive whatever ends a request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from omnistage.config.model import TraceConfig
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.engine.timeline import Timeline, Timelines
from omnistage.engine.timeline_view import union_s, view_of
from omnistage.errors import RequestError
from omnistage.request import FinishReason, OmniRequest
from omnistage.spans import Kind, Span, SpanBlock, SpanBook
from tests.engines import answer, running

INLINE = {"placement": "inline"}
TEXT = "forty letters that three stages work on."


def paced(seconds: float) -> dict[str, Any]:
    """Overrides that make every step of echo3 take so long."""
    return {"stages": {stage: {"step_delay_s": seconds} for stage in ("thinker", "talker", "wave")}}


def timeline_of(engine: AsyncOmniEngine, request_id: str) -> Timeline:
    found = engine.timelines.find(request_id, "")
    assert found is not None
    return found


def spans_of(timeline: Timeline, kind: str, lane: str) -> list[Span]:
    return [span for span in timeline.spans() if (span.kind, span.lane) == (kind, lane)]


def test_union_counts_overlaps_once_and_clips() -> None:
    spans = [Span("compute", "stage", "run", start, end, end - start) for start, end in ((0, 4), (2, 6), (8, 12))]
    assert union_s(spans, 1, 10) == pytest.approx(5 + 2)


def book_of(*spans: tuple[Kind, str, float, float]) -> list[SpanBlock]:
    book = SpanBook(64)
    for span in spans:
        book.add(*span)
    return book.blocks()


def test_gap_of_a_stage_is_a_wait_until_its_input_comes_and_queueing_from_then_on() -> None:
    timeline = Timeline(OmniRequest(id="r"), 0.0, 64)
    timeline.enter("talker")
    timeline.visits[0].start_s = 10.0
    steps: list[tuple[Kind, str, float, float]] = [("compute", "prefill", 13, 14), ("compute", "decode", 15, 16)]
    timeline.leave("talker", book_of(("handoff", "thinker.text", 9, 11), *steps))
    timeline.visits[0].end_s = 17.0
    gaps = [
        (s.kind, s.start_s, s.end_s) for s in timeline.spans() if s.lane == "talker" and s.name in ("wait", "queue")
    ]
    assert gaps == [("wait", 10, 11), ("queue", 11, 13), ("wait", 14, 15), ("wait", 16, 17)]


async def test_every_step_and_chunk_of_every_stage_is_on_the_timeline() -> None:
    async with running("echo3", INLINE) as engine:
        result = await answer(engine, id="r", prompt=TEXT)
        timeline = timeline_of(engine, "r")
        counts = Counter((s.kind, s.lane, s.name) for s in timeline.spans() if s.kind in ("compute", "handoff"))
        assert result.metrics is not None
        stages = result.metrics.stages
        for lane, phases in (("thinker", ("prefill", "decode")), ("talker", ("prefill", "decode")), ("wave", ("run",))):
            assert sum(counts["compute", lane, phase] for phase in phases) == stages[lane].steps
        assert counts["handoff", "talker", "thinker.text"] == stages["thinker"].chunks_out
        assert counts["handoff", "wave", "talker.codes"] == stages["talker"].chunks_out
        assert counts["handoff", "client", "wave.audio"] == stages["wave"].chunks_out
        seqs = [span.seq for span in spans_of(timeline, "handoff", "wave")]
        assert sorted(seqs) == list(range(stages["talker"].chunks_out))
        assert timeline.finish_reason is FinishReason.STOP


async def test_timeline_covers_the_wall_time_of_a_request_through_three_stages() -> None:
    async with running("echo3", INLINE | paced(0.001)) as engine:
        started = time.monotonic()
        await answer(engine, id="r", prompt=TEXT)
        wall_s = time.monotonic() - started
        view = view_of(timeline_of(engine, "r"), time.monotonic())
        assert view.complete
        assert view.covered >= 0.99
        assert 0.95 * wall_s < view.wall_s <= wall_s
        assert all(span.duration_s >= 0 for span in view.spans)


async def test_steps_of_a_picture_account_for_its_time() -> None:
    async with running(
        "toydit", INLINE | {"stages": {"dit": {"step_delay_s": 0.04, "decode_delay_s": 0.08}}}
    ) as engine:
        await answer(engine, id="r", task="image", prompt="a star", params={"num_inference_steps": 8})
        timeline = timeline_of(engine, "r")
        phases = Counter(span.name for span in spans_of(timeline, "compute", "dit"))
        assert phases == {"encode": 1, "prepare": 1, "denoise": 8, "decode": 1}
        assert 0.32 <= sum(s.busy_s for s in spans_of(timeline, "compute", "dit") if s.name == "denoise") < 0.6
        view = view_of(timeline, time.monotonic())
        assert view.covered >= 0.99
        assert view.busy >= 0.9


async def test_request_that_waits_for_admission_shows_it_as_queueing() -> None:
    settings = INLINE | paced(0.005) | {"limits": {"max_running": 1}}
    async with running("echo3", settings) as engine:
        await asyncio.gather(*(answer(engine, id=name, prompt=TEXT, modalities=("text",)) for name in ("a", "b")))
        first, second = timeline_of(engine, "a"), timeline_of(engine, "b")
        (admission,) = [span for span in spans_of(second, "queue", "server") if span.name == "admission"]
        assert first.ended_s is not None
        assert admission.end_s == pytest.approx(first.ended_s, abs=0.02)
        assert view_of(second, time.monotonic()).covered >= 0.99


async def test_client_that_leaves_gets_a_complete_timeline_that_says_aborted() -> None:
    done: list[Timeline] = []
    async with running("echo3", INLINE | paced(0.002)) as engine:
        engine.timelines.sinks.append(done.append)
        stream = engine.generate(OmniRequest(id="r", prompt=TEXT))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert [(one.id, one.finish_reason) for one in done] == [("r", FinishReason.ABORT)]


async def test_only_the_last_requests_are_kept_and_owners_see_their_own() -> None:
    async with running("echo3", INLINE | {"trace": {"requests": 2}}) as engine:
        for name in ("a", "b", "c"):
            await answer(engine, id=name, prompt="hi", owner="me")
        assert len(engine.timelines) == 2
        assert engine.timelines.find("a", "me") is None
        assert engine.timelines.find("c", "me") is not None
        assert engine.timelines.find("c", "you") is None


async def test_under_load_some_requests_are_traced_in_detail_and_the_others_stage_by_stage() -> None:
    async with running("echo3", INLINE | {"trace": {"detailed": 2}}) as engine:
        await asyncio.gather(*(answer(engine, id=str(i), prompt=TEXT) for i in range(5)))
        timelines = [timeline_of(engine, str(i)) for i in range(5)]
        assert [timeline.detailed for timeline in timelines] == [True, True, False, False, False]
        coarse = timelines[-1]
        assert [span.lane for span in coarse.spans() if span.kind == "stage"] == ["thinker", "talker", "wave"]
        assert not spans_of(coarse, "compute", "wave")
        assert view_of(coarse, time.monotonic()).covered >= 0.99
        await answer(engine, id="later", prompt="hi")
        assert timeline_of(engine, "later").detailed


async def test_nothing_is_kept_when_tracing_is_off() -> None:
    async with running("echo3", INLINE | {"trace": {"enabled": False}}) as engine:
        await answer(engine, id="r", prompt="hi")
        assert engine.timelines.find("r", "") is None


def test_claim_of_a_request_that_never_came_is_forgotten_with_its_exchange() -> None:
    timelines = Timelines(TraceConfig())
    front = timelines.open("req_1", {})
    timelines.claim("r", front)
    timelines.close(front)
    timeline = timelines.begin(OmniRequest(id="r"), time.monotonic())
    assert timeline is not None
    assert timeline.front is None


async def test_refused_request_leaves_no_timeline() -> None:
    async with running("echo3", INLINE) as engine:
        with pytest.raises(RequestError):
            await answer(engine, id="r", task="image", prompt="hi")
        assert len(engine.timelines) == 0


@pytest.mark.slow
async def test_clocks_of_processes_agree() -> None:
    """Nothing arrives before it was sent, and no stage works before the request came."""
    async with running("echo3", paced(0.001)) as engine:
        await answer(engine, id="r", prompt=TEXT)
        timeline = timeline_of(engine, "r")
        assert timeline.ended_s is not None
        for span in timeline.spans():
            assert timeline.arrived_s <= span.start_s <= span.end_s <= timeline.ended_s + 0.05, span
        first_audio = spans_of(timeline, "compute", "wave")[0]
        first_codes = spans_of(timeline, "handoff", "wave")[0]
        assert first_codes.end_s <= first_audio.start_s
        assert view_of(timeline, time.monotonic()).covered >= 0.99

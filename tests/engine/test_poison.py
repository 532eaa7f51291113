"""An input that kills a stage is found, its batch mates are answered, and it is refused when it comes again."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from omnistage.engine.poison import MAX_KEPT, PoisonBook, Quarantine, fingerprint
from omnistage.errors import ErrorCode, RequestError
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from omnistage.testing.closed_form import text_of_wave
from omnistage.testing.faults import fault
from tests.engines import answer, running

TEXT = "an innocent sentence"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["thinker", "wave"])
async def test_input_that_kills_a_stage_is_found_and_refused_and_its_batch_mates_are_answered(stage: str) -> None:
    deadly = fault(stage, "after_add", "kill", request="bad", always=True, times=9)
    slow = {"stages.thinker.step_delay_s": 0.002}
    async with running("echo3", deadly | slow) as engine:
        mates = [asyncio.create_task(answer(engine, id=f"m{i}", prompt=TEXT, stream=False)) for i in range(4)]
        bad = await answer(engine, id="bad", prompt="deadly", stream=False)
        results = await asyncio.gather(*mates)
        while not engine.health().ready:
            await asyncio.sleep(0.01)
        restarts = engine.runtime.of_stage(stage)[0].restarts
        for name in ("again", "and again"):
            with pytest.raises(RequestError) as refused:
                await answer(engine, id=name, prompt="deadly")
            assert refused.value.info.code == ErrorCode.INVALID_REQUEST
        assert (await answer(engine, id="late", prompt=TEXT)).text == TEXT
        metrics = engine.render_metrics().decode()
        assert engine.runtime.of_stage(stage)[0].restarts == restarts == 3
    assert bad.error is not None
    assert (bad.error.code, bad.error.stage) == (ErrorCode.STAGE_DIED, stage)
    assert [text_of_wave(result.tensors["audio"][0]) for result in results] == [TEXT] * 4
    assert "omnistage_poisoned_inputs 1.0" in metrics
    assert 'omnistage_requests_rejected_total{code="invalid_request"} 2.0' in metrics


@pytest.mark.slow
async def test_stage_killed_from_outside_poisons_nobody() -> None:
    async with running("echo3", fault("talker", "before_step", "kill", after=5)) as engine:
        results = await asyncio.gather(*(answer(engine, id=str(i), prompt=TEXT, stream=False) for i in range(4)))
        assert engine.gauges()["poisoned_inputs"] == 0
    assert [result.text for result in results] == [TEXT] * 4


def request(**fields: object) -> OmniRequest:
    return OmniRequest(**{"id": "a", "prompt": "x", **fields})  # type: ignore[arg-type]


def test_fingerprint_is_of_what_is_computed_and_not_of_who_asks() -> None:
    same = [request(), request(id="b"), request(owner="o"), request(seed=3), request(priority=2), request(timeout=1.0)]
    assert len({fingerprint(each, {}) for each in same}) == 1
    picture = MultimodalPayload.of(image=np.zeros((2, 3, 3), np.uint8))
    turned = MultimodalPayload.of(image=np.zeros((3, 2, 3), np.uint8))
    other = [request(prompt="y"), request(task="speech"), request(params={"n": 1}), request(modalities=("text",))]
    prints = {fingerprint(each, {}) for each in [request(), *other]}
    prints |= {fingerprint(request(), {"image0": payload}) for payload in (picture, turned)}
    assert len(prints) == 7


def test_book_is_bounded_and_forgets_the_oldest() -> None:
    book = PoisonBook()
    for number in range(MAX_KEPT + 1):
        book.note(request(prompt=str(number)), {}, "s")
    assert len(book) == MAX_KEPT
    book.check(request(prompt="0"), {})
    with pytest.raises(RequestError):
        book.check(request(prompt="1"), {})


def test_suspects_take_turns_and_others_wait_until_all_are_through() -> None:
    quarantine = Quarantine()
    assert quarantine.admits("s", "c")
    assert not quarantine.alone("s", "c")
    quarantine.suspect("s", "a")
    quarantine.suspect("s", "b")
    quarantine.suspect("s", "a")
    assert [quarantine.admits("s", name) for name in "abc"] == [True, False, False]
    assert quarantine.admits("other", "c")
    assert quarantine.ended("s", "a")
    assert not quarantine.ended("s", "a")
    assert [quarantine.admits("s", name) for name in "bc"] == [True, False]
    assert quarantine.ended("s", "b")
    assert quarantine.admits("s", "c")

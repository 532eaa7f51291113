"""Realtime sessions on echo3: the right samples are known, and nothing may be left in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from omnistage.testing.closed_form import wave_of
from omnistage.testing.leakcheck import check_no_leaks, settled, snapshot
from tests.engines import running
from tests.entrypoints.http.real import serving_engine
from tests.entrypoints.realtime.talk import Talk, talking

SLOW_STEPS = {"stages.wave.step_delay_s": 0.02}


@asynccontextmanager
async def talking_to_echo3() -> AsyncIterator[Talk]:
    async with running("echo3") as engine, serving_engine(engine) as server, talking(str(server.http.base_url)) as talk:
        yield talk


async def test_text_goes_in_and_the_known_wave_comes_out() -> None:
    async with talking_to_echo3() as talk:
        await talk.say("Hello echo")
        done = await talk.answer()
        samples = np.frombuffer(talk.audio(), "<i2") / 32767
        assert np.abs(samples - wave_of("Hello echo")).max() < 1 / 32767
        assert done["output"][0]["content"][0]["transcript"] == "Hello echo"


async def test_audio_that_the_model_cannot_hear_fails_the_response_by_name() -> None:
    async with talking_to_echo3() as talk:
        await talk.send("session.update", session={"audio": {"input": {"turn_detection": None}}})
        await talk.until("session.updated")
        await talk.hear(bytes(9600))
        await talk.send("input_audio_buffer.commit")
        done = await talk.answer()
        assert done["status"] == "failed"
        assert "text only" in done["status_details"]["error"]["message"]
        assert done["output"] == []


@pytest.mark.slow
async def test_200_sockets_closed_in_mid_generation_leave_nothing_behind() -> None:
    async def hang_up(url: str, index: int) -> None:
        async with talking(url) as talk:
            await talk.say("a long text that is spoken slowly " * 3)
            await talk.send("response.create")
            await talk.until("response.output_audio.delta")
            if index % 2:
                talk.socket.transport.abort()

    async with running("echo3", SLOW_STEPS) as engine, serving_engine(engine) as server:
        url = str(server.http.base_url)
        await hang_up(url, 0)
        await settled(engine)
        before = snapshot(engine)
        for start in range(0, 200, 20):
            await asyncio.gather(*(hang_up(url, start + i) for i in range(20)))
        await check_no_leaks(engine, before)

"""Realtime sessions on the embedded pipeline: a spoken dialogue with turns by voice activity and barge-in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from omnistage.media.g711 import g711_encode
from omnistage.media.samples import Resampler, to_s16le
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from omnistage.testing.leakcheck import settled
from tests.engines import answer, running
from tests.entrypoints.http.real import Running, serving_engine
from tests.entrypoints.realtime.talk import Talk, talking
from tests.models.smol_speech.sentences import words

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
RATE = 24_000
SILENCE = np.zeros((1, RATE), np.float32)


class Dialogue:
    """A served pipeline and two spoken sentences, float32 [1, samples] at 24 kHz."""

    def __init__(self, server: Running, url: str, question: np.ndarray, interruption: np.ndarray) -> None:
        self.server, self.url = server, url
        self.question, self.interruption = question, interruption


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dialogue() -> AsyncIterator[Dialogue]:
    async with running("smol-speech") as engine, serving_engine(engine) as server:
        spoken = []
        for index, text in enumerate(("Tell me three facts about the moon.", "What is the capital of France?")):
            result = await answer(engine, id=f"ask{index}", task="speech", prompt=text, seed=1)
            spoken.append(result.tensors["audio"])
        yield Dialogue(server, str(server.http.base_url).rstrip("/"), *spoken)


async def speak(talk: Talk, samples: np.ndarray) -> None:
    await talk.hear(to_s16le(np.concatenate([SILENCE[:, : RATE // 2], samples, SILENCE], axis=1)))


async def heard(dialogue: Dialogue, data: bytes) -> list[str]:
    audio = (np.frombuffer(data, "<i2") / np.float32(32768)).astype(np.float32)[None]
    payload = MultimodalPayload.of({"sample_rate": RATE}, audio=audio)
    outputs = dialogue.server.engine.generate(OmniRequest(id="listen", task="transcription"), {"audio": payload})
    return words("".join([output.text async for output in outputs]))


async def test_spoken_turn_is_found_heard_and_answered_in_speech(dialogue: Dialogue) -> None:
    async with talking(dialogue.url) as talk:
        await talk.send("session.update", session={"audio": {"input": {"transcription": {}}}, "max_output_tokens": 32})
        await talk.until("session.updated")
        await speak(talk, dialogue.question)
        started = await talk.until("input_audio_buffer.speech_started")
        stopped = await talk.until("input_audio_buffer.speech_stopped")
        length_ms = dialogue.question.shape[1] * 1000 // RATE
        assert 0 <= started["audio_start_ms"] <= 600
        assert abs(stopped["audio_end_ms"] - (500 + length_ms + 500)) <= 400
        done = (await talk.until("response.done"))["response"]
        transcript = done["output"][0]["content"][0]["transcript"]
        spoken = set(await heard(dialogue, talk.audio()))
        assert len(spoken & set(words(transcript))) >= len(set(words(transcript))) * 0.7
        while "conversation.item.input_audio_transcription.completed" not in talk.kinds():
            await talk.next()
    written = next(e for e in talk.log if e["type"] == "conversation.item.input_audio_transcription.completed")
    assert "moon" in words(written["transcript"])


async def test_barge_in_cancels_truncates_and_the_next_answer_starts_at_once(dialogue: Dialogue) -> None:
    async with talking(dialogue.url) as talk:
        await talk.say("Tell me a long story about a dragon.")
        await talk.send("response.create")
        await talk.until("response.output_audio.delta")
        await speak(talk, dialogue.interruption)
        await talk.until("input_audio_buffer.speech_started")
        cut = (await talk.until("response.done"))["response"]
        assert (cut["status"], cut["status_details"]["reason"]) == ("cancelled", "turn_detected")
        item_id = cut["output"][0]["id"]
        await talk.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=200)
        after = len(talk.log)
        await talk.until("conversation.item.truncated")
        while not (ended := [e for e in talk.log[after:] if e["type"] == "response.done"]):
            await talk.next()
        assert all(e.get("response_id") != cut["id"] for e in talk.log[after:])
        done = ended[0]["response"]
        assert done["status"] == "completed"
        assert "paris" in words(done["output"][0]["content"][0]["transcript"])


async def test_duplex_input_flows_while_output_plays_and_is_answered_after_it(dialogue: Dialogue) -> None:
    async with talking(dialogue.url, "/v1/duplex") as talk:
        await talk.say("Say hello in one sentence.")
        await talk.send("response.create")
        await talk.until("response.output_audio.delta")
        await speak(talk, dialogue.interruption)
        ended = [(await talk.until("response.done"))["response"] for _ in range(2)]
        assert [response["status"] for response in ended] == ["completed", "completed"]
        assert "paris" in words(ended[1]["output"][0]["content"][0]["transcript"])
        assert "input_audio_buffer.speech_stopped" in talk.kinds()


async def test_telephone_audio_is_understood(dialogue: Dialogue) -> None:
    async with talking(dialogue.url) as talk:
        audio = {"input": {"format": {"type": "audio/pcmu"}, "turn_detection": None, "transcription": {}}}
        await talk.send("session.update", session={"audio": audio})
        await talk.until("session.updated")
        await talk.hear(g711_encode("mu", Resampler(RATE, 8000, 1).feed(dialogue.interruption, last=True)))
        await talk.send("input_audio_buffer.commit")
        done = await talk.until("conversation.item.input_audio_transcription.completed")
        assert "france" in words(done["transcript"])


async def test_sockets_cut_in_mid_speech_leave_the_engine_at_rest(dialogue: Dialogue) -> None:
    async def hang_up() -> None:
        async with talking(dialogue.url) as talk:
            await talk.say("Tell me a long story.")
            await talk.send("response.create")
            await talk.until("response.output_audio.delta")
            talk.socket.transport.abort()

    await asyncio.gather(*(hang_up() for _ in range(4)))
    await settled(dialogue.server.engine)

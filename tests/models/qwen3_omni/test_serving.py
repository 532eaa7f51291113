"""The whole system on the tiny checkpoint: placements, hand-off modes, order of events, counters, faults, HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import soundfile
import yaml
from PIL import Image

from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.engine.timeline_view import view_of
from omnistage.entrypoints.omni import OmniResult, ResultBuilder
from omnistage.errors import ErrorCode
from omnistage.faults import Point
from omnistage.models.qwen3_omni import pipeline
from omnistage.request import OmniRequest
from omnistage.testing.faults import fault
from tests.engines import running
from tests.media.test_video_payload import film as filmed
from tests.models.qwen3_omni.reference import ASKS, Reference, media
from tests.servers import serving

pytestmark = pytest.mark.slow

BASE = {"dtype": "float32", "threads": 1, "device": "cpu", "kv_memory_mb": 8}
INLINE = BASE | {"placement": "inline"}
PROCESSES = BASE | {"placement": "process"}
MIXED = ("text", "audio", "image", "audio_image", "video", "heard_video", "earlier_turns", "chelsie")


async def ask(engine: AsyncOmniEngine, request: OmniRequest, events: list[str] | None = None) -> OmniResult:
    """The whole answer; `events` gets the modality of each output as it comes."""
    builder = ResultBuilder(request.id)
    async for output in engine.generate(request, media()):
        builder.add(output)
        if events is not None:
            events.append(f"{output.modality}{' final' if output.final else ''}")
    return builder.result()


def assert_equal(result: OmniResult, reference: Reference, name: str) -> None:
    answer = reference[name]
    assert result.error is None, result.error
    assert result.token_ids == answer.text_ids, name
    np.testing.assert_array_equal(result.tensors["codes"], answer.codes, name)
    assert result.tensors["audio"].shape == (1, *answer.wave.shape), name
    np.testing.assert_allclose(result.tensors["audio"][0], answer.wave, rtol=0, atol=1e-4, err_msg=name)


def counters(engine: AsyncOmniEngine, stage: str) -> dict[str, float]:
    (replica,) = engine.runtime.of_stage(stage)
    return replica.counters


def deployment(name: str) -> dict[str, Any]:
    """The stages of a deploy file beside the pipeline."""
    content: dict[str, Any] = yaml.safe_load((Path(pipeline.__file__).parent / name).read_text())
    return {"stages": content["stages"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart(checkpoint: Path) -> AsyncIterator[AsyncOmniEngine]:
    """Three processes; a word takes at least 20 ms, so that it is no race whether speech comes before the last."""
    paced = fault("thinker", "before_decode", "stall", times=1_000_000, stall_s=0.02)
    async with running(str(checkpoint), PROCESSES | paced) as engine:
        yield engine


async def assert_answers(engine: AsyncOmniEngine, reference: Reference) -> None:
    results = await asyncio.gather(*[ask(engine, ASKS[name].request(name)) for name in MIXED])
    for name, result in zip(MIXED, results, strict=True):
        assert_equal(result, reference, name)


@pytest.mark.parametrize(
    "overrides",
    [
        BASE | deployment("colocated.yaml"),
        BASE | deployment("two_processes.yaml"),
        INLINE | {"edges": {"thinker->talker": {"async_chunk": False}, "talker->code2wav": {"async_chunk": False}}},
        INLINE | {"stages": {"code2wav": {"first_chunk_frames": 300, "chunk_frames": 300}}, "token_budget": 7},
    ],
    ids=["one process", "two processes", "whole payloads", "big chunks, small budget"],
)
async def test_a_deployment_changes_no_answer(
    checkpoint: Path, reference: Reference, overrides: dict[str, Any]
) -> None:
    async with running(str(checkpoint), overrides) as engine:
        await assert_answers(engine, reference)


@pytest.mark.asyncio(loop_scope="module")
async def test_three_processes_change_no_answer(apart: AsyncOmniEngine, reference: Reference) -> None:
    await assert_answers(apart, reference)


@pytest.mark.asyncio(loop_scope="module")
async def test_speech_reaches_the_client_before_the_last_word_from_separate_processes(apart: AsyncOmniEngine) -> None:
    for name in ("text", "audio", "image"):
        events: list[str] = []
        await ask(apart, ASKS[name].request(f"early {name}"), events)
        assert events.index("audio") < events.index("text final"), name
        timeline = apart.timelines.find(f"early {name}", "")
        assert timeline is not None
        assert view_of(timeline, time.monotonic()).covered >= 0.99
        computed = {span.lane for span in timeline.spans() if span.kind == "compute"}
        assert computed == {"thinker", "talker", "code2wav"}
    counts = counters(apart, "code2wav")
    assert counts["frames_computed"] == counts["frames_in"] == counts["frames_out"] > 0


async def test_text_only_requests_never_touch_the_talker(checkpoint: Path, reference: Reference) -> None:
    async with running(str(checkpoint), INLINE) as engine:
        for name in ("text", "audio_image"):
            result = await ask(engine, ASKS[name].request(name, modalities=("text",)))
            assert result.token_ids == reference[name].text_ids
            assert result.tensors == {}
            assert result.metrics is not None
            assert set(result.metrics.stages) == {"thinker"}
        for stage in ("talker", "code2wav"):
            assert counters(engine, stage).get("steps", 0) == 0


async def test_a_checkpoint_without_talker_deploys_the_thinker_alone(
    checkpoint: Path, reference: Reference, tmp_path: Path
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((checkpoint / "config.json").read_text()) | {"enable_audio_output": False}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    async with running(str(tmp_path), INLINE) as engine:
        assert list(engine.config.stages) == ["thinker"]
        request = ASKS["image"].request("r", modalities=("text",))
        del request.sampling["talker"]
        assert (await ask(engine, request)).token_ids == reference["image"].text_ids


@pytest.mark.parametrize(
    ("stage", "edge"), [("thinker", "thinker.speech"), ("talker", "talker.codes")], ids=["words", "codes"]
)
async def test_a_lost_hand_off_ends_its_request_by_name_and_no_other(
    checkpoint: Path, reference: Reference, stage: str, edge: str
) -> None:
    point: Point = "chunk_received"
    reader = {"thinker": "talker", "talker": "code2wav"}[stage]
    overrides = INLINE | fault(reader, point, "drop", request="lost", after=3)
    async with running(str(checkpoint), overrides | {f"edges.{stage}->{reader}.deadline_s": 1}) as engine:
        lost, kept = await asyncio.gather(
            ask(engine, ASKS["text"].request("lost")), ask(engine, ASKS["audio"].request("kept"))
        )
        assert lost.error is not None
        assert (lost.error.code, lost.error.edge) == (ErrorCode.HANDOFF, edge)
        assert_equal(kept, reference, "audio")


async def test_unseeded_requests_differ_and_report_their_seeds(checkpoint: Path) -> None:
    async with running(str(checkpoint), INLINE) as engine:
        request: dict[str, Any] = {"prompt": "Hello", "sampling": {"thinker": {"temperature": 1.0, "max_tokens": 20}}}
        first, second = [await ask(engine, OmniRequest(id=name, **request, modalities=("text",))) for name in "ab"]
        assert first.token_ids != second.token_ids
        again = await ask(engine, OmniRequest(id="c", **request, modalities=("text",), seed=first.seed))
        assert again.token_ids == first.token_ids


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    sampling = {"talker": {"temperature": 0.0, "repetition_penalty": 1.05, "max_tokens": 100}}
    return {
        "messages": [{"role": "user", "content": list(parts)}],
        "temperature": 0,
        "max_completion_tokens": 48,
        "sampling": sampling,
        **fields,
    }


def test_chat_completions_over_http(checkpoint: Path, reference: Reference, tmp_path: Path) -> None:
    wav, png = io.BytesIO(), io.BytesIO()
    soundfile.write(wav, media()["short"]["audio"][0], 16000, format="WAV", subtype="PCM_16")
    Image.fromarray(media()["wide"]["image"]).save(png, "PNG")
    sound = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav.getvalue()).decode(), "format": "wav"}}
    picture = {"type": "image_url", "image_url": {"url": _data_url("image/png", png.getvalue())}}
    with serving(tmp_path, str(checkpoint), "--set", "dtype=float32") as server:
        check_chat(server.address, sound, picture, reference)


def check_chat(address: str, sound: dict[str, Any], picture: dict[str, Any], reference: Reference) -> None:
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}}
    with httpx.Client(base_url=address, timeout=120) as client:
        body = _chat(sound, picture, {"type": "text", "text": "Describe"}, **spoken)
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        audio = answer["choices"][0]["message"]["audio"]
        wave, rate = soundfile.read(io.BytesIO(base64.b64decode(audio["data"])), dtype="float32")
        expected = reference["audio_image"]
        assert rate == 24000
        np.testing.assert_allclose(wave, expected.wave.clip(-1, 1), rtol=0, atol=1e-3)
        assert answer["usage"]["completion_tokens"] == len(expected.text_ids)

        streamed = client.post("/v1/chat/completions", json=body | {"stream": True}).raise_for_status().text
        chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        deltas = [choice["delta"].get("audio") or {} for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("transcript") or "" for delta in deltas) == audio["transcript"]
        assert sum(bool(delta.get("data")) for delta in deltas) > 1

        silent = client.post("/v1/chat/completions", json=_chat(picture, {"type": "text", "text": "Say"}))
        assert silent.raise_for_status().json()["choices"][0]["message"].get("audio") is None

        film = {"type": "video_url", "video_url": {"url": _data_url("video/mp4", filmed())}}
        question = _chat(film, {"type": "text", "text": "Describe"})
        counts = []
        for heard in (False, True):
            options = {"mm_processor_kwargs": {"use_audio_in_video": heard}}
            watched = client.post("/v1/chat/completions", json=question | options).raise_for_status().json()
            counts.append(watched["usage"]["prompt_tokens"])
        assert counts[1] >= counts[0] + 13

        wrong = client.post("/v1/chat/completions", json=body | {"audio": {"voice": "robbie", "format": "wav"}})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "audio.voice")

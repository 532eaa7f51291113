"""The load generator against a server whose timings are scripted."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnistage.entrypoints.bench.load import closed_loop, open_loop, prompts_of
from omnistage.entrypoints.bench.offline import OfflineTarget
from omnistage.entrypoints.bench.report import BenchResult, compare, summarise, table
from omnistage.entrypoints.bench.sample import Sample, underrun
from omnistage.entrypoints.cli.bench import measure, measure_offline, read_result, run
from omnistage.entrypoints.cli.main import build_parser
from omnistage.errors import RequestError
from omnistage.request import OmniRequest, OmniRequestOutput
from omnistage.testing.closed_form import SAMPLE_RATE, wave_of
from tests.engines import running
from tests.entrypoints.http.conftest import Start, start
from tests.entrypoints.http.fake_engine import FakeEngine, Media, audio_event, last_event
from tests.entrypoints.http.real import serving_engine

__all__ = ["start"]

# How late an event may be noted on a busy machine, in seconds.
SLACK_S = 0.06
Script = Callable[[asyncio.StreamWriter, list[float]], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
SOUND = base64.b64encode(np.full(2400, 1000, "<i2").tobytes()).decode()


def event(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[tuple[str, list[list[float]]]]:
    """A server that runs `script` for each request; gives its address and, per request, when it began and sent."""
    sent: list[list[float]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(
            next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")).split()[1]
        )
        await reader.readexactly(length)
        marks = [time.perf_counter()]
        sent.append(marks)
        await script(writer, marks)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", sent


async def spoken(writer: asyncio.StreamWriter, marks: list[float]) -> None:
    """Text after 100 ms, more after 50 ms, then twice 100 ms of sound, 150 ms apart: the player waits 50 ms."""
    writer.write(HEAD)
    for delay, data in (
        (0.1, event({"audio": {"transcript": "one"}})),
        (0.05, event({"audio": {"transcript": "two"}})),
        (0.0, event({"audio": {"data": SOUND}})),
        (0.15, event({"audio": {"data": SOUND}})),
    ):
        await asyncio.sleep(delay)
        marks.append(time.perf_counter())
        writer.write(data)
        await writer.drain()
    writer.write(event({}, "stop") + event({}, None, usage={"completion_tokens": 6}) + b"data: [DONE]\n\n")
    marks.append(time.perf_counter())


def arguments(url: str, *more: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", "serve", "--url", url, "--model", "m", *more])


async def test_numbers_are_those_of_the_scripted_server() -> None:
    async with scripted(spoken) as (url, sent):
        result = await measure(arguments(url, "--task", "chat-audio", "--requests", "3", "--concurrency", "1"))
    assert (result.requests, result.failed) == (3, 0)
    began, first, second, packet, last, end = (np.mean([marks[i] for marks in sent]) for i in range(6))
    expected = {
        "ttft": first - began,
        "itl": second - first,
        "tpot": (second - first) / 5,
        "ttfp": packet - began,
        "underrun": last - packet - 0.1,
        "e2el": end - began,
        "rtf": (end - began) / 0.2,
    }
    for name, value in expected.items():
        assert abs(result.metrics[name].mean - value) < SLACK_S * (5 if name == "rtf" else 1), name
    assert result.metrics["audio"].mean == pytest.approx(0.2)
    assert result.tokens_per_s == pytest.approx(18 / result.duration_s)


async def test_goodput_counts_what_met_every_objective() -> None:
    async with scripted(spoken) as (url, _):
        common = ("--task", "chat-audio", "--requests", "2")
        loose = await measure(arguments(url, *common, "--slo", "ttft=30", "--slo", "e2el=30"))
        tight = await measure(arguments(url, *common, "--slo", "ttft=30", "--slo", "e2el=0.2"))
    assert loose.goodput == pytest.approx(loose.requests_per_s)
    assert tight.goodput == 0


def broken(*pieces: bytes) -> Script:
    async def script(writer: asyncio.StreamWriter, marks: list[float]) -> None:
        writer.write(b"".join(pieces))

    return script


REFUSAL = b'HTTP/1.1 400 No\r\nconnection: close\r\n\r\n{"error": {"message": "no stream_options here"}}'
SILENCE = base64.b64encode(bytes(4800)).decode()
TEXT = event({"audio": {"transcript": "one"}})


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ((b"HTTP/1.1 503 No\r\nconnection: close\r\ncontent-length: 0\r\n\r\n",), "status 503"),
        ((REFUSAL,), "status 400: no stream_options here"),
        ((HEAD, TEXT), "no finish reason"),
        ((HEAD, event({}, "stop")), "no text"),
        ((HEAD, TEXT, event({}, "stop")), "no audio"),
        ((HEAD, TEXT, event({"audio": {"data": SILENCE}}), event({}, "stop")), "silent audio"),
        ((HEAD, TEXT, event({"audio": {"data": "AAAA"}}), event({}, "stop")), "audio ends within a sample"),
        ((HEAD, b'data: {"error": {"message": "a stage died"}}\n\n'), "error event: a stage died"),
        ((HEAD, b'data: {"choices": 3}\n\n'), "unreadable answer: Expected `array | null`, got `int` - at `$.choices`"),
        ((b"nonsense\r\n\r\n",), "RemoteProtocolError"),
    ],
)
async def test_answers_that_are_not_right_are_failures_by_name(pieces: tuple[bytes, ...], error: str) -> None:
    async with scripted(broken(*pieces)) as (url, _):
        result = await measure(arguments(url, "--task", "chat-audio", "--requests", "1"))
    assert result.errors == {error: 1}
    assert result.metrics == {}


async def test_speech_and_chat_of_a_real_front_are_valid(start: Start) -> None:
    server = await start()
    for task, names in (("speech", {"ttfp", "rtf", "audio"}), ("chat", {"ttft", "tpot"}), ("chat-audio", {"ttfp"})):
        more = ("--task", task, "--model", "fake-model", "--requests", "3")
        result = await measure(arguments(server.url, *more))
        assert result.errors == {}
        assert names <= set(result.metrics)


@pytest.mark.parametrize("task", ["chat", "chat-audio", "speech"])
async def test_offline_load_on_echo3_gives_its_counts_and_its_stages(task: str) -> None:
    words = ["bench", "offline", "echo3", "--task", task, "--dataset", "random", "--words", "3", "--requests", "4"]
    result = await measure_offline(build_parser().parse_args(words))
    assert result.errors == {}
    prompts = prompts_of("random", 4, 3, 0)
    letters = sum(len(prompt) for prompt in prompts)
    if task != "speech":
        assert result.tokens_per_s * result.duration_s == pytest.approx(letters + len(prompts))  # the end token too
    if task != "chat":
        seconds = sum(len(wave_of(prompt)) for prompt in prompts) / SAMPLE_RATE
        assert result.audio_s_per_s * result.duration_s == pytest.approx(seconds)
    stages = {"chat": {"thinker"}, "chat-audio": {"thinker", "talker", "wave"}, "speech": {"talker", "wave"}}
    assert set(result.stages) == stages[task]
    assert all(row.requests == 4 and row.compute_s > 0 for row in result.stages.values())


async def test_silence_is_no_answer_offline_either() -> None:
    async def silent(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        yield audio_event(request, np.zeros((1, 240)))
        yield last_event(request)

    assert (await OfflineTarget(FakeEngine(silent), "speech", {}).ask("hi")).error == "silent audio"
    assert (await OfflineTarget(FakeEngine(), "speech", {}).ask("hi")).error == ""
    with pytest.raises(RequestError, match="--extra-body"):
        OfflineTarget(FakeEngine(), "speech", {"wings": 2})


async def test_stage_times_come_over_http_when_asked_for() -> None:
    async with running("echo3") as engine, serving_engine(engine) as server:
        url = str(server.http.base_url)
        more = ("--model", "echo3", "--task", "chat-audio", "--requests", "2")
        asked = await measure(arguments(url, *more, "--stages"))
        assert (await measure(arguments(url, *more))).stages == {}
    assert set(asked.stages) == {"thinker", "talker", "wave"}
    assert "stage thinker: queue" in table(asked)


async def test_open_loop_does_not_wait_for_answers_and_closed_loop_does() -> None:
    running = most = 0

    async def ask(prompt: str) -> Sample:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return Sample(end=0.05)

    await closed_loop(ask, ["a"] * 6, 2)
    assert most == 2
    samples, _ = await open_loop(ask, ["a"] * 6, 1000.0, 0)
    assert (most, len(samples)) == (6, 6)


def test_player_that_never_waits_has_no_underrun() -> None:
    assert underrun([(1.0, 0.5), (1.4, 0.5), (2.0, 0.5)]) == 0.0
    assert underrun([(1.0, 0.5), (1.7, 0.1), (1.9, 1.0)]) == pytest.approx(0.2)


def test_prompts_repeat_with_their_seed_and_come_from_files(tmp_path: Path) -> None:
    assert prompts_of("random", 3, 5, 1) == prompts_of("random", 3, 5, 1) != prompts_of("random", 3, 5, 2)
    assert [len(prompt.split()) for prompt in prompts_of("random", 2, 5, 1)] == [5, 5]
    (tmp_path / "p").write_text('one\n\n{"prompt": "two"}\n')
    assert prompts_of(str(tmp_path / "p"), 3, 1, 0) == ["one", "two", "one"]
    with pytest.raises(RequestError, match="--dataset"):
        prompts_of(str(tmp_path / "none"), 1, 1, 0)


def result_of(*ends: float) -> BenchResult:
    return summarise([Sample(end=end) for end in ends], 2.0, [50.0], {})


def test_comparison_and_table_say_what_changed(tmp_path: Path) -> None:
    before, after = result_of(0.1, 0.2, 0.3), result_of(0.1, 0.1, 0.1)
    assert "e2el p50        200.0 ms -> 100.0 ms (-50.0 %)" in compare(before, after)
    assert "3 requests, 0 failed" in table(before)
    assert "requests/s      1.50 -> 1.50 (+0.0 %)" in compare(before, after)
    broken_off = summarise([Sample(end=0.1), Sample(error="ConnectError")], 2.0, [50.0], {})
    assert "failed          0 of 3 -> 1 of 2" in compare(before, broken_off)


def test_result_file_is_read_back_and_nonsense_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match="no result"):
        read_result(str(tmp_path / "none"))
    port_of_nobody = "http://127.0.0.1:9"
    out = tmp_path / "r.json"
    assert run(arguments(port_of_nobody, "--requests", "1", "--out", str(out))) == 1
    assert read_result(str(out)).errors == {"ConnectError": 1}
    assert "1 x ConnectError" in capsys.readouterr().out


async def test_what_other_servers_leave_out_or_call_otherwise_fails_no_answer() -> None:
    odd = b'data: {"choices": [{"delta": null, "metrics": {"stages": 3}}], "usage": {"total": 3}}\n\n'
    odd += b'data: {"choices": null}\n\n'
    spoken = event({"audio": {"data": base64.b64encode(b"\0\1" * 2400).decode()}}, "stop")
    async with scripted(broken(HEAD, TEXT, odd, spoken)) as (url, _):
        result = await measure(arguments(url + "/v1", "--task", "chat-audio", "--requests", "1"))
    assert (result.errors, result.tokens_per_s, result.stages) == ({}, 0, {})


@pytest.mark.parametrize("out", ["", "none/x.json"])
def test_result_that_could_not_be_written_is_refused_before_the_run(tmp_path: Path, out: str) -> None:
    with pytest.raises(RequestError, match="--out"):
        run(arguments("http://127.0.0.1:9", "--requests", "1", "--out", str(tmp_path / out)))


@pytest.mark.parametrize(
    "more", [("--slo", "ttft"), ("--slo", "x=1"), ("--extra-body", "[]"), ("--url", "localhost:8000")]
)
async def test_unusable_arguments_are_refused_by_name(more: tuple[str, str]) -> None:
    with pytest.raises(RequestError, match=more[0]):
        await measure(arguments("http://127.0.0.1:9", *more))

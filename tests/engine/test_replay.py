"""Records replay to the same bytes and the same schedule, whatever happened; changes are noticed and placed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.engine.record_files import FAILURES, ReadRecord
from omnistage.engine.replay import Replay, replay_bundle
from omnistage.entrypoints.cli.main import main
from omnistage.errors import ConfigError, ErrorCode
from omnistage.request import OmniRequest
from omnistage.runtime.journal import RecordError
from omnistage.testing.echo3_stages import EchoTalker, EchoWave
from tests.engines import answer, running

REQUESTS = 6
INLINE = {"placement": "inline"}


async def take(engine: AsyncOmniEngine, request: OmniRequest, events: int | None = None) -> None:
    """Reads an answer, or aborts it after so many events."""
    stream = engine.generate(request)
    count = 0
    async for _ in stream:
        count += 1
        if count == events:
            break
    await stream.aclose()  # type: ignore[attr-defined]


async def record(folder: Path, model: str, overrides: dict[str, Any]) -> None:
    """Requests without seeds that overlap; one is aborted after its third event."""
    async with running(model, {**overrides, "record.folder": str(folder)}) as engine:
        prompts = [f"request {i} says {'x' * (5 * i)}" for i in range(REQUESTS)]
        asked = [OmniRequest(id=f"r{i}", prompt=prompt, owner="sk-secret") for i, prompt in enumerate(prompts)]
        await asyncio.gather(*(take(engine, r, 3 if r.id == "r4" else None) for r in asked))


@pytest.fixture
async def echo(tmp_path: Path) -> Path:
    folder = tmp_path / "echo"
    await record(folder, "echo3", INLINE)
    return folder


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        pytest.param("echo3", {"placement": "process"}, marks=pytest.mark.slow),
        ("echo3", INLINE | {"max_num_seqs": 2, "edges": {"talker->wave": {"max_inflight": 2}}}),
        ("echo3", INLINE | {"stages": {"wave": {"replicas": 2}}}),
        ("toydit", INLINE),
        ("ar2dit", INLINE),
    ],
)
async def test_record_replays_to_the_same_bytes_and_schedule(
    tmp_path: Path, model: str, overrides: dict[str, Any]
) -> None:
    await record(tmp_path / "record", model, overrides)
    read = ReadRecord(tmp_path / "record")
    assert len(read.answers) == REQUESTS
    report = Replay(read).run()
    assert report.difference is None
    assert (report.answers, report.cut_off) == (REQUESTS, [])
    assert report.schedule == report.recorded_schedule
    assert report.steps > 1


@pytest.mark.slow
async def test_stage_that_died_is_replayed_in_each_of_its_lives(tmp_path: Path) -> None:
    kill = {"point": "before_step", "action": "kill", "after": 20}
    overrides = {"placement": "process", "stages": {"talker": {"faults": [kill]}}, "record.folder": str(tmp_path / "r")}
    async with running("echo3", overrides) as engine:
        result = await answer(engine, id="a", prompt="said twice, heard once", stream=False)
    assert result.error is None
    read = ReadRecord(tmp_path / "r")
    assert [name.life for name in read.journals if name.stage == "talker"] == [0, 1]
    report = Replay(read).run()
    assert (report.difference, report.answers, report.cut_off) == (None, 1, [])


@pytest.mark.slow
async def test_record_of_real_weights_in_processes_replays(tmp_path: Path) -> None:
    """Sampled without seeds, streamed, one aborted while it is spoken."""
    async with running("smol-speech", {"placement": "process", "record.folder": str(tmp_path / "r")}) as engine:
        sampling = {"thinker": {"temperature": 0.8, "max_tokens": 24}}
        prompts = ["What is the capital of France?", "Tell me a story.", "Count to five."]
        asked = [OmniRequest(id=f"r{i}", prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]
        await asyncio.gather(*(take(engine, r, 16 if r.id == "r1" else None) for r in asked))
    read = ReadRecord(tmp_path / "r")
    assert any(part.name == "audio" and part.nbytes > 100_000 for part in read.answers["r0"].parts)
    report = await asyncio.to_thread(Replay(read).run)
    assert (report.difference, report.answers, report.cut_off) == (None, 3, [])
    assert report.schedule == report.recorded_schedule


async def test_other_bytes_are_placed_by_stage_step_and_request(echo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = EchoWave.run

    def run(self: EchoWave, states: list[Any]) -> Any:
        produced = original(self, states)
        if len(states) > 1:
            audio = produced[1][0].payload.tensors["audio"].array
            audio += np.float32(1e-6)
        return produced

    monkeypatch.setattr(EchoWave, "run", run)
    difference = Replay(ReadRecord(echo)).run().difference
    assert difference is not None
    assert (difference.stage, difference.request) == ("wave", "r1")
    assert "gave other bytes for audio" in difference.what


async def test_other_schedule_is_placed(echo: Path) -> None:
    read = ReadRecord(echo)
    stages = dict(read.header.config.stages)
    stages["talker"] = msgspec.structs.replace(stages["talker"], max_num_seqs=2)
    read.header.config = msgspec.structs.replace(read.header.config, stages=stages)
    report = Replay(read).run()
    assert report.difference is not None
    assert report.difference.stage == "talker"
    assert report.difference.what.startswith("scheduled r0:1, r1:1 instead of r0:1, r1:1, r2:1")
    assert report.schedule != report.recorded_schedule


async def test_error_that_does_not_come_back_is_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = EchoTalker.execute

    def fail(self: EchoTalker, works: list[Any]) -> Any:
        if any(work.seq.request_id == "r2" for work in works):
            raise ValueError("bad luck")
        return original(self, works)

    with monkeypatch.context() as patched:
        patched.setattr(EchoTalker, "execute", fail)
        await record(tmp_path / "r", "echo3", INLINE)
        same = Replay(ReadRecord(tmp_path / "r")).run()
        assert (same.difference, same.answers) == (None, REQUESTS)
    difference = Replay(ReadRecord(tmp_path / "r")).run().difference
    assert difference is not None
    assert (difference.stage, difference.what) == ("talker", "no error instead of ValueError")


@pytest.mark.parametrize("name", ["record.json", "requests.journal", "talker-0-0.journal", "media"])
async def test_change_of_any_file_is_noticed(tmp_path: Path, name: str) -> None:
    async with running("echo3", {**INLINE, "record.folder": str(tmp_path / "r")}) as engine:
        await answer(engine, id="a", task="speech", prompt="spoken")
    file = tmp_path / "r" / name
    file = next(file.iterdir()) if file.is_dir() else file
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(RecordError, match="was changed after it was written"):
        Replay(ReadRecord(tmp_path / "r")).run()


async def test_missing_bytes_of_an_answer_are_noticed(echo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ReadRecord(echo)
    ended = read.answers["r1"]
    parts = [msgspec.structs.replace(part, digest="0" * 16) for part in ended.parts]
    read.answers["r1"] = msgspec.structs.replace(ended, parts=parts)
    difference = Replay(read).run().difference
    assert difference is not None
    assert (difference.stage, difference.request) == ("client", "r1")


async def test_record_that_was_cut_off_is_replayed_as_far_as_it_goes(echo: Path) -> None:
    file = echo / "thinker-0-0.journal"
    file.write_bytes(file.read_bytes()[:-3000])
    report = Replay(ReadRecord(echo)).run()
    assert report.difference is None
    assert "talker" in report.cut_off
    assert report.steps > 0


async def test_nothing_of_who_asked_is_written(echo: Path) -> None:
    files = [file for file in echo.rglob("*") if file.is_file()]
    assert len(files) >= 5
    assert not any(b"sk-secret" in file.read_bytes() for file in files)


async def test_folder_with_a_record_is_not_written_over(echo: Path) -> None:
    config = resolve_config("echo3", None, {**INLINE, "record.folder": str(echo)})
    with pytest.raises(RecordError, match="holds a record already"):
        await AsyncOmniEngine(config).start()


async def failed(folder: Path, *, bundles: int = 32, count: int = 1) -> list[Path]:
    """Bundles of requests that fail at the talker."""
    fault = {"point": "before_feed", "action": "raise", "times": count, "always": True}
    overrides = {**INLINE, "stages": {"talker": {"faults": [fault]}}, "record.bundles": bundles}
    async with running("echo3", {**overrides, "record.folder": str(folder)}) as engine:
        for index in range(count):
            result = await answer(engine, id=f"bad/{index}", task="speech", prompt=f"fails {index}", owner="sk-secret")
            assert result.error is not None
    return sorted((folder / FAILURES).iterdir())


async def test_failed_request_leaves_a_bundle_that_fails_again_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle,) = await failed(tmp_path / "r")
    report = await replay_bundle(ReadRecord(bundle))
    assert report.same
    assert report.replayed is not None
    assert (report.replayed.code, report.replayed.stage) == (ErrorCode.STAGE_FAILED, "talker")
    assert await asyncio.to_thread(main, ["replay", str(bundle)]) == 0
    assert "request bad/0 fails again: stage_failed at talker" in capsys.readouterr().out
    assert not any(b"sk-secret" in file.read_bytes() for file in bundle.rglob("*") if file.is_file())


async def test_bundle_tells_that_the_error_is_gone(tmp_path: Path) -> None:
    (bundle,) = await failed(tmp_path / "r")
    read = ReadRecord(bundle)
    stages = {name: msgspec.structs.replace(stage, faults=()) for name, stage in read.header.config.stages.items()}
    read.header.config = msgspec.structs.replace(read.header.config, stages=stages)
    report = await replay_bundle(read)
    assert (report.same, report.replayed) == (False, None)


async def test_only_so_many_bundles_are_kept(tmp_path: Path) -> None:
    bundles = await failed(tmp_path / "r", bundles=2, count=4)
    assert [bundle.name for bundle in bundles] == ["000003-bad_2", "000004-bad_3"]


async def test_replay_command_says_what_it_found(
    echo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(echo)]) == 0
    assert f"{REQUESTS} answers of the same bytes" in capsys.readouterr().out
    assert main(["replay", str(tmp_path)]) == 1
    assert "is no record" in capsys.readouterr().err


def test_record_section_is_checked() -> None:
    with pytest.raises(ConfigError, match="did you mean 'folder'"):
        resolve_config("echo3", None, {"record": {"foldr": "x"}})

"""Stages of one's own: joined by their ports, served from a file, checked, and never run without being asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from omnistage.config.model import EdgeSpec
from omnistage.config.resolve import resolve_config
from omnistage.config.user_code import user_code
from omnistage.engine.record_files import ReadRecord
from omnistage.engine.replay import Replay
from omnistage.entrypoints.omni import AsyncOmni, Omni, OmniResult
from omnistage.errors import ConfigError, ErrorCode
from omnistage.kit import Array, Audio, Image, Port, Stage, Text, pipeline, stage
from omnistage.kit.files import load
from omnistage.kit.graph import KitPipeline
from omnistage.payload import MultimodalPayload
from omnistage.testing import check_stage
from tests.servers import serving

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "own_stage.py"
PAGE = ROOT / "docs" / "own_stage.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def named(name: str, takes: dict[str, Port], gives: dict[str, Port], **changes: Any) -> Stage:
    return stage(takes=takes, gives=gives, name=name, **changes)(lambda part: None)


def ask(model: Path, *requests: dict[str, Any], **overrides: Any) -> list[OmniResult]:
    with Omni(str(model), **{"placement": "inline"} | overrides) as omni:
        return omni.generate(list(requests))


@pytest.fixture
def fragile(tmp_path: Path) -> Path:
    file = tmp_path / "fragile.py"
    file.write_text("""
import numpy as np
from omnistage.kit import Array, Part, Text, stage

@stage(takes={"text": Text(), "scale": Array("scale", "float32", (None,), whole=True)}, gives={"text": Text()}, chunk=2)
def shout(part: Part):
    if "!" in part["text"]:
        raise RuntimeError("loud already")
    return part["text"].upper() * int(part["scale"][0])
""")
    return file


@pytest.mark.slow
def test_example_speaks_and_its_stages_keep_every_promise() -> None:
    result, loud = ask(EXAMPLE, {"prompt": "Hello, World!"}, {"prompt": "aha", "loud": True})
    assert (result.text, loud.text) == ("HelloWorld", "AHA")
    assert result.tensors["audio"].shape == (1, 10 * 1600)
    assert result.meta["sample_rate"] == 16_000
    speller = load(user_code(str(EXAMPLE)) or "")
    assert isinstance(speller, KitPipeline)
    check_stage(speller.kit["spell"], [{"text": "Some words, and 3 numbers"}, {"text": "more"}, {"text": ""}])
    check_stage(speller.kit["tones"], [{"letters": "abcdefghij"}, {"letters": "xyz"}, {"letters": ""}])


def test_file_with_one_stage_is_a_pipeline_and_errors_are_those_of_the_request(fragile: Path) -> None:
    good, bad, none = ask(
        fragile, {"prompt": "three", "scale": [2]}, {"prompt": "no!", "scale": [1]}, {"prompt": "scale is missing"}
    )
    assert (good.text, good.error) == ("THTHREREEE", None)
    assert bad.error is not None
    assert bad.error.code == ErrorCode.STAGE_FAILED
    assert none.error is not None
    assert (none.error.code, none.error.param) == (ErrorCode.INVALID_REQUEST, "scale")


def test_unknown_or_wrong_parameter_is_refused() -> None:
    unknown, wrong, voice = ask(
        EXAMPLE, {"prompt": "x", "louder": True}, {"prompt": "x", "loud": 1}, {"prompt": "x", "voice": "bass"}
    )
    assert [r.error.param for r in (unknown, wrong, voice) if r.error] == ["louder", "loud", "voice"]
    assert "/" not in "".join(r.error.message for r in (unknown, wrong, voice) if r.error)


async def test_pipeline_of_the_user_is_recorded_and_replayed(tmp_path: Path) -> None:
    async with AsyncOmni(str(EXAMPLE), placement="inline", **{"record.folder": str(tmp_path / "r")}) as omni:
        assert (await omni.result("recorded words")).error is None
    report = Replay(ReadRecord(tmp_path / "r")).run()
    assert (report.difference, report.answers) == (None, 1)


def test_inputs_are_joined_by_name_or_as_told() -> None:
    text, codes = Text(), Array("codes", "int32", (None,))
    first = named("first", {"text": text}, {"codes": codes, "text": text})
    second = named("second", {"codes": codes, "words": text}, {"audio": Audio(8000)})
    graph = pipeline("g", first, second, join={"second.words": "first.text"}).variants["default"]
    assert EdgeSpec("first.codes", "second.codes") in graph.edges
    assert EdgeSpec("first.text", "second.words") in graph.edges
    assert [edge for edge in graph.edges if edge.target_stage == "client"] == [EdgeSpec("second.audio", "client.audio")]
    assert EdgeSpec("client.words", "second.words") in pipeline("g", first, second).variants["default"].edges


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: stage(takes={}, gives={"text": Text()}), "at least one input"),
        (lambda: named("a", {"x": Text(), "y": Text()}, {"text": Text()}, chunk=2), "one input is streamed, not 2"),
        (lambda: named("a", {"x": Text()}, {"text": Text()}, chunk=-1), "chunk is at least 0"),
        (lambda: pipeline("g"), "at least one stage"),
        (lambda: pipeline("g", named("a", {"x": Text()}, {"y": Text()}), join={"a.z": "a.y"}), "no input 'a.z'"),
        (lambda: pipeline("g", named("a", {"x": Text()}, {"y": Text()}), outputs=["a.z"]), "no output 'a.z'"),
        (lambda: pipeline("g", named("a", {"x": Text()}, {"y": Text(), "z": Text()})), "second output 'client.text'"),
    ],
)
def test_declaration_that_cannot_be_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_ports_check_what_passes_and_join_what_was_cut() -> None:
    audio = Audio(8000, channels=2)
    value = np.arange(12, dtype=np.float32).reshape(2, 6)
    pieces = [audio.cut(value, start, start + 4) for start in (0, 4)]
    np.testing.assert_array_equal(audio.join(pieces), value)
    assert audio.size(value) == 6
    assert audio.payload(value).meta == {"sample_rate": 8000}
    for port, wrong in ((audio, value[:1]), (audio, value.astype(np.float64)), (Image(), "x"), (Text(), value)):
        with pytest.raises(ValueError, match=r"where .* declared"):
            port.checked(wrong)
    with pytest.raises(ValueError, match="image where audio is declared"):
        audio.read(MultimodalPayload.of(image=value))


def test_media_of_a_request_reach_the_port_of_their_type(tmp_path: Path) -> None:
    file = tmp_path / "bright.py"
    file.write_text("""
from omnistage.kit import Array, Image, Part, stage

@stage(takes={"picture": Image()}, gives={"mean": Array("mean", "float32", (None,))})
def bright(part: Part):
    return part["picture"].mean((1, 2, 3)).astype("float32")
""")
    picture = MultimodalPayload.of(image=np.full((4, 4, 3), 7, np.uint8))
    with Omni(str(file), placement="inline") as omni:
        lines = [omni._omni.line({"id": "a"}, {"image0": picture})]
        (result,) = omni.generate_lines(lines, lambda output: None)
    assert result.error is None
    np.testing.assert_array_equal(result.tensors["mean"], [7.0])


# -- whose code runs


def test_code_runs_only_when_it_is_named_as_the_model(tmp_path: Path, fragile: Path) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(f"pipeline: py:{fragile}#\n")
    with pytest.raises(ConfigError, match="code is run only when it is the MODEL"):
        resolve_config("echo3", deploy)
    (tmp_path / "config.json").write_text('{"architectures": ["py:evil"]}')
    with pytest.raises(ConfigError, match="no pipeline serves architecture"):
        resolve_config(str(tmp_path))


def test_references_to_code_are_told_from_other_models(fragile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_code(str(fragile)) == f"py:{fragile}#"
    assert user_code(f"{fragile}:shout") == f"py:{fragile}#shout"
    monkeypatch.chdir(fragile.parent)
    assert user_code("fragile:shout") == f"py:{fragile}#shout"
    assert [user_code(each) for each in ("echo3", "org/model", "./folder", "pypi:x==1#y#sha256=0")] == [None] * 4
    with pytest.raises(ConfigError, match="there is no file or module 'missing'"):
        user_code("missing:stage")
    with pytest.raises(ConfigError, match="has no stage or pipeline 'other'"):
        resolve_config(f"{fragile}:other")


def test_file_with_two_stages_asks_which(tmp_path: Path) -> None:
    file = tmp_path / "two.py"
    file.write_text("""
from omnistage.kit import Text, stage
made = stage(takes={"text": Text()}, gives={"text": Text()})
one, two = made(lambda part: "1"), made(lambda part: "2")
""")
    with pytest.raises(ConfigError, match=r"has 2 pipelines or stages; name one as two.py:NAME"):
        resolve_config(str(file))
    assert resolve_config(f"{file}:two").served_name == "two"


# -- the page and the command


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=[f"block{index}" for index in range(len(BLOCKS))])
def test_code_of_the_page_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block is the file that the others use."""
    (tmp_path / "my_stage.py").write_text(BLOCKS[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    exec(compile(block, "block", "exec"), {"__name__": "block"})


def test_stage_of_the_page_has_at_most_30_lines() -> None:
    assert len(BLOCKS) >= 3
    assert len(BLOCKS[0].splitlines()) <= 30


@pytest.mark.slow
def test_stage_is_served_from_its_file_recorded_and_replayed(tmp_path: Path) -> None:
    (tmp_path / "my_stage.py").write_text(BLOCKS[0])
    record = tmp_path / "record"
    with serving(tmp_path, str(tmp_path / "my_stage.py"), "--record", str(record)) as server:
        body = {
            "model": "my_stage",
            "input": "spoken by a stage of my own",
            "voice": "default",
            "response_format": "pcm",
        }
        answer = httpx.post(f"{server.address}/v1/audio/speech", json=body, timeout=20)
        assert answer.status_code == 200, answer.text
        assert len(answer.content) > 1000
        server.process.terminate()
        assert server.process.wait(20) == 0
    report = Replay(ReadRecord(record)).run()
    assert (report.difference, report.answers, report.requests) == (None, 1, 1)

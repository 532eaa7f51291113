"""generate, chat, config, models and doctor on the closed-form pipeline, in this process."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import yaml

from omnistage.config.resolve import resolve_config
from omnistage.entrypoints.cli.generate import Progress
from omnistage.entrypoints.cli.main import main
from omnistage.entrypoints.omni import Omni
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequestOutput
from omnistage.testing.closed_form import text_of_wave, wave_of

INLINE = ("--set", "placement=inline")


def generate(tmp_path: Path, *rows: object, extra: tuple[str, ...] = ()) -> int:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return main(["generate", "echo3", "--requests", str(source), "--out", str(tmp_path / "out"), *INLINE, *extra])


def test_generate_writes_json_media_and_tensors(tmp_path: Path) -> None:
    rows = ({"id": "a", "prompt": "hello"}, {"prompt": "text", "modalities": ["text"]})
    assert generate(tmp_path, *rows, extra=("--save-tensors",)) == 0
    answer = json.loads((tmp_path / "out" / "a.json").read_text())
    assert (answer["text"], answer["finish_reason"], answer["error"]) == ("hello", "stop", None)
    assert answer["token_ids"] == list(b"hello")
    assert answer["sample_rate"] == 24000
    assert answer["metrics"]["e2el_s"] > 0
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "a.npz")["audio"][0], wave_of("hello"))
    samples, rate = soundfile.read(tmp_path / "out" / "a.wav")
    assert (rate, text_of_wave(samples)) == (24000, "hello")
    assert json.loads((tmp_path / "out" / "request-2.json").read_text())["files"] == []


def test_generate_reports_each_failed_request_and_answers_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ({"id": "ok", "prompt": "x"}, {"id": "bad", "prompt": "x", "voice": "no"}, {"id": "worse", "prompt": 7})
    assert generate(tmp_path, *rows) == 1
    errors = capsys.readouterr().err
    assert "bad: no voice 'no'" in errors
    assert "worse: Expected `str" in errors
    assert json.loads((tmp_path / "out" / "bad.json").read_text())["error"]["param"] == "voice"
    assert json.loads((tmp_path / "out" / "ok.json").read_text())["text"] == "x"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", "in.jsonl:1: "),
        ("[1]", "in.jsonl:1: each line is a JSON object"),
        ('{"id": "../up", "prompt": "x"}', "cannot be a file name"),
        ('{"id": ".", "prompt": "x"}', "cannot be a file name"),
    ],
)
def test_generate_names_a_bad_line(tmp_path: Path, row: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(tmp_path, row) == 1
    assert message in capsys.readouterr().err


def test_generate_refuses_two_lines_of_one_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(tmp_path, {"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}) == 1
    assert "in.jsonl:2: id 'a' stands twice" in capsys.readouterr().err


def test_chat_answers_line_by_line_and_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n/reset\nagain\n/exit\nnever\n"))
    assert main(["chat", "echo3", "--speak", str(tmp_path / "spoken"), *INLINE]) == 0
    assert capsys.readouterr().out == "hello\nagain\n"
    samples, _ = soundfile.read(tmp_path / "spoken" / "2.wav")
    assert text_of_wave(samples) == "again"


def test_config_show_prints_a_deploy_file_that_gives_the_same_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", "echo3", "--set", "stages.wave.chunk_frames=9", "--set", "dtype=float32"]) == 0
    file = tmp_path / "deploy.yaml"
    file.write_text(capsys.readouterr().out)
    assert yaml.safe_load(file.read_text())["stages"]["wave"]["chunk_frames"] == 9
    again = resolve_config("echo3", file)
    expected = resolve_config("echo3", None, {"stages.wave.chunk_frames": 9, "dtype": "float32"})
    assert (again.stages, again.edges, again.limits) == (expected.stages, expected.edges, expected.limits)


def test_config_show_origin_has_a_line_per_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "echo3", "--origin", "--set", "sampling.thinker.top_k=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "sampling.thinker.top_k = 3  # override sampling.thinker.top_k" in lines
    assert "stages.talker.kv_memory_mb = 1  # pipeline" in lines
    assert all("  # " in line for line in lines)


@pytest.mark.slow
def test_config_show_origin_tells_what_auto_becomes_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "smol-speech", "--origin", "--set", "stages.listener.dtype=float32"]) == 0
    lines = {line.partition(" = ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert re.search(r"= auto -> (float32|bfloat16)  # probe: bfloat16 .* rows; default", lines["stages.thinker.dtype"])
    assert re.search(r"= auto -> (both|blocked|plain)  # .+; default", lines["stages.thinker.weight_layout"])
    assert lines["stages.listener.dtype"] == "stages.listener.dtype = float32  # override stages.listener.dtype"
    assert lines["stages.talker.dtype"] == "stages.talker.dtype = auto  # default"


def test_config_schema_knows_the_stages_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema", "echo3"]) == 0
    stages = json.loads(capsys.readouterr().out)["properties"]["stages"]["properties"]
    assert "chunk_frames" in stages["wave"]["properties"]
    assert "chunk_frames" not in stages["thinker"]["properties"]
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["stages"]["additionalProperties"]


def test_models_lists_every_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["echo3"]["variants"]["default"] == ["thinker", "talker", "wave"]
    assert "heart" in rows["smol-speech"]["voices"]
    assert main(["models"]) == 0
    assert "thinker -> talker -> wave" in capsys.readouterr().out


def test_doctor_names_versions_and_says_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch 2.13.0" in out
    assert out.rstrip().endswith("ready to serve")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_line_counts_answers_and_steps_and_tells_the_time_left() -> None:
    now, terminal = [0.0], Terminal()
    progress = Progress(2, terminal, lambda: now[0])
    for request, step in (("a", 5), ("b", 15)):
        now[0] += 5
        payload = MultimodalPayload(meta={"step": step, "steps": 20})
        progress.update(OmniRequestOutput(request_id=request, modality="progress", payload=payload))
    assert progress.line() == "0/2 answered, step 20 of 40, 10 s left"
    progress.update(OmniRequestOutput(request_id="a", finished=True))
    assert "1/2 answered" in terminal.getvalue()


def test_steps_are_no_part_of_the_answer(tmp_path: Path) -> None:
    with Omni("toydit", placement="inline") as omni:
        request = {"id": "a", "task": "image", "prompt": "x", "progress": True, "num_inference_steps": 3}
        (result,) = omni.generate(request)
    assert "step" not in result.meta
    assert result.tensors["image"].shape == (1, 32, 32, 3)


def test_output_whose_reader_has_gone_ends_without_a_traceback() -> None:
    command = (sys.executable, "-m", "omnistage", "config", "show", "smol-speech", "--origin")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1

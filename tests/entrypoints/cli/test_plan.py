"""`omnistage plan`: what it prints, its status, that it is quick; and that processes take what it says."""

from __future__ import annotations

import base64
import json
import random
import re
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import soundfile

from omnistage.entrypoints.cli.main import main
from omnistage.entrypoints.cli.plan import device_memory
from omnistage.entrypoints.omni import Omni
from omnistage.models.smollm2 import SMOLLM2_GGUF
from omnistage.runtime.memory_plan import MIB
from tests.stage_peaks import TOLERANCE, stage_peaks

WINDOWS, STREAMS = 2, 4
SETTINGS: dict[str, Any] = {
    "stages.thinker.dtype": "float32", "stages.thinker.kv_memory_mb": 64, "stages.listener.max_num_seqs": WINDOWS,
    "stages.code2wav.max_num_seqs": STREAMS,
}  # fmt: skip
WORDS = ("river", "mountain", "speaks", "little", "things", "every", "day", "walks", "home", "red", "houses")


def test_plan_prints_stages_processes_and_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "echo3", "--memory-mb", "100000"]) == 0
    out = capsys.readouterr().out
    assert "wave/0" in out
    assert out.rstrip().endswith("fits")


def test_plan_fails_naming_the_stage_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "echo3", "--memory-mb", "150"]) == 1
    total = json.loads(_json(capsys, "echo3"))["total"]["cpu"] // MIB
    assert main(["plan", "echo3", "--memory-mb", str(total - 3)]) == 1
    assert f"does not fit: stage wave; cpu has {total - 3} MiB, 3 too little" in capsys.readouterr().out


def test_given_memory_is_that_of_every_device_by_whatever_name(capsys: pytest.CaptureFixture[str]) -> None:
    places = ("--set", "stages.thinker.device=cuda", "--set", "stages.talker.device=cuda:0")
    elsewhere = ("--set", "stages.wave.device=cuda:3")
    assert main(["plan", "echo3", "--memory-mb", "100000", *places, *elsewhere]) == 0
    out = capsys.readouterr().out
    assert "not checked" not in out
    assert re.findall(r"^(\S+): \d+ of 100000$", out, re.MULTILINE) == ["cpu", "cuda", "cuda:3"]


def test_memory_of_each_nvidia_device_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told = subprocess.CompletedProcess((), 0, stdout="81559\n40960\n")
    monkeypatch.setattr("omnistage.entrypoints.cli.plan.detect_platform", lambda: "cuda")
    monkeypatch.setattr("omnistage.entrypoints.cli.plan.subprocess.run", lambda *args, **options: told)
    limits = device_memory()
    assert (limits["cuda"], limits["cuda:1"]) == (81559 * MIB, 40960 * MIB)


def _json(capsys: pytest.CaptureFixture[str], model: str) -> str:
    capsys.readouterr()
    assert main(["plan", model, "--json"]) == 0
    return capsys.readouterr().out


def test_plan_names_weights_that_are_not_here_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "smol-speech", "--set", f"cache_dir={tmp_path}"]) == 0
    assert "whisper-tiny.en: not on this machine yet" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smol-speech", str(SMOLLM2_GGUF)])
def test_plan_is_there_within_two_seconds_and_imports_no_torch(model: str) -> None:
    code = "import sys; from omnistage.entrypoints.cli.main import main; rc = main(sys.argv[1:])"
    before = psutil.Process().cpu_times()
    check = f"{code}; assert not {{'torch', 'transformers', 'diffusers'}} & set(sys.modules); sys.exit(rc)"
    subprocess.run([sys.executable, "-c", check, "plan", model, "--memory-mb", "100000"], check=True)
    after = psutil.Process().cpu_times()  # its own seconds, however many others want the cores
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert 0 < spent < 2.0


@pytest.mark.slow
def test_processes_of_real_weights_take_what_the_plan_says() -> None:
    """Within 10 % or 30 MiB over an empty process: once ready, and after requests that fill KV blocks and steps."""
    for peak in stage_peaks("smol-speech", keep_busy, SETTINGS):
        assert peak.is_right, str(peak)
        assert abs(peak.base - peak.empty) <= max(0.15 * peak.empty, TOLERANCE), str(peak)


def keep_busy(omni: Omni) -> None:
    text = " ".join(WORDS) + ". " + " ".join(reversed(WORDS)) + "."
    voices = ("heart", "joe") * (STREAMS // 2)
    spoken = omni.generate([{"task": "speech", "prompt": text, "voice": voice} for voice in voices])
    omni.generate([text_of(random.Random(seed)) for seed in range(5)])
    wave = BytesIO()
    soundfile.write(wave, spoken[0].tensors["audio"][0], 24000, format="WAV")
    sound = {"data": base64.b64encode(wave.getvalue()).decode(), "format": "wav"}
    part = {"type": "input_audio", "input_audio": sound}
    asked = {"messages": [{"role": "user", "content": [part]}], "modalities": ["text"]}
    heard = omni.generate([asked | {"sampling": {"thinker": {"max_tokens": 4}}}] * WINDOWS)
    assert not [result.error for result in (*spoken, *heard) if result.error is not None]


def text_of(draw: random.Random) -> dict[str, Any]:
    """A prompt that fills about a quarter of the KV memory."""
    words = " ".join(draw.choice(WORDS) for _ in range(350))
    return {"prompt": words, "modalities": ["text"], "sampling": {"thinker": {"max_tokens": 4}}}

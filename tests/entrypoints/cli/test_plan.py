"""`omnistage plan`: what it prints, its status, that it is quick; and that processes take what it says."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import soundfile

from omnistage.config.registry import load_pipeline
from omnistage.config.resolve import resolve_config
from omnistage.entrypoints.cli.main import main
from omnistage.entrypoints.omni import Omni
from omnistage.models.smollm2 import SMOLLM2_GGUF
from omnistage.runtime.memory_plan import MIB, memory_plan

SETTINGS: dict[str, Any] = {"stages.thinker.dtype": "float32", "stages.thinker.kv_memory_mb": 64}
TOLERANCE = 30 * MIB
WORDS = ("river", "mountain", "speaks", "little", "things", "every", "day", "walks", "home", "red", "houses")
# Resident kilobytes of a stage's process that has imported everything and loaded nothing.
EMPTY = """
import importlib, sys
import omnistage.runtime.worker, omnistage.stages.factory
importlib.import_module(sys.argv[1])
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")][0])
"""


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
    started = time.perf_counter()
    check = f"{code}; assert not {{'torch', 'transformers', 'diffusers'}} & set(sys.modules); sys.exit(rc)"
    subprocess.run([sys.executable, "-c", check, "plan", model, "--memory-mb", "100000"], check=True)
    assert time.perf_counter() - started < 2.0


@pytest.mark.slow
def test_processes_of_real_weights_take_what_the_plan_says() -> None:
    """Peak over an empty process within 10 % or 30 MiB, after requests that use every weight and every KV block."""
    config = resolve_config("smol-speech", None, SETTINGS)
    pipeline = load_pipeline("smol-speech")
    plan = memory_plan(config, pipeline, {})
    components = {spec.name: spec.component for spec in pipeline.variants["default"].stages}
    peaks = peaks_of_a_busy_engine()
    for stage, process in zip(plan.stages, plan.processes[1:], strict=True):
        module = components[stage.name].partition(":")[0]
        told = subprocess.run([sys.executable, "-c", EMPTY, module], capture_output=True, text=True, check=True)
        empty = int(told.stdout) << 10
        grown = peaks[stage.name] - empty
        assert stage.peak is not None
        assert abs(grown - stage.peak) <= max(0.1 * grown, TOLERANCE), (stage.name, grown // MIB, stage.peak // MIB)
        assert abs(process.base - empty) <= max(0.15 * empty, TOLERANCE), (stage.name, process.base, empty)


def peaks_of_a_busy_engine() -> dict[str, int]:
    with Omni("smol-speech", **SETTINGS) as omni:
        short = {"thinker": {"max_tokens": 24}}
        spoken = omni.generate(
            [{"prompt": "Tell me about ships.", "voice": voice, "sampling": short} for voice in ("heart", "joe")]
        )
        omni.generate([text_of(random.Random(seed)) for seed in range(5)])
        wave = BytesIO()
        soundfile.write(wave, spoken[0].tensors["audio"][0], 24000, format="WAV")
        sound = {"data": base64.b64encode(wave.getvalue()).decode(), "format": "wav"}
        part = {"type": "input_audio", "input_audio": sound}
        heard = omni.generate({"messages": [{"role": "user", "content": [part]}], "modalities": ["text"]})
        assert not [result.error for result in (*spoken, *heard) if result.error is not None]
        return {name_of(child): peak_of(child) for child in psutil.Process().children() if is_stage(child)}


def text_of(draw: random.Random) -> dict[str, Any]:
    """A prompt that fills about a quarter of the KV memory."""
    words = " ".join(draw.choice(WORDS) for _ in range(350))
    return {"prompt": words, "modalities": ["text"], "sampling": {"thinker": {"max_tokens": 4}}}


def is_stage(process: psutil.Process) -> bool:
    return "omnistage.runtime.worker" in process.cmdline()


def name_of(process: psutil.Process) -> str:
    return process.cmdline()[3].partition("/")[0]


def peak_of(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10

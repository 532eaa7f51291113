"""What stages take at their peak against what `omnistage plan` predicts, on random checkpoints of a few hundred MB.

    python -m bench.memory [CASE ...]

Every stage runs in a process of its own and is driven to the load that its configuration allows.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
from PIL import Image

from bench.memory_models import write_hunyuan_image3, write_minimax_h3, write_other_qwen3_omni
from bench.qwen3_omni_model import write_checkpoint as write_qwen3_omni
from bench.report import machine, table
from omnistage.entrypoints.omni import Omni
from omnistage.runtime.memory_plan import MIB
from tests.models.cosmos3.tiny import make as make_cosmos3
from tests.stage_peaks import StagePeak, stage_peaks

STREAMS, BUDGET, LENGTHS = 8, 256, 6
# Codec frames of an answer: some, and as many as the vocoder's chunks need to grow to their full length.
SHORT, LONG = 9, 58
COSMOS3_SIZES: dict[str, Any] = {
    "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64, "num_attention_heads": 10,
    "num_key_value_heads": 2, "rope_scaling": {"mrope_section": [12, 10, 10], "rope_type": "default"},
}  # fmt: skip
# A guided picture of 512 x 512 has 256 rows for each of its two branches.
SIDE, PICTURE_ROWS = 512, 512


def write_cosmos3(folder: Path) -> None:
    make_cosmos3("base", folder, **COSMOS3_SIZES)


def talk(omni: Omni, longest: int = LONG) -> None:
    """All streams speak together, one of them for `longest` frames; prompts of many lengths one by one; whole steps of
    prompt rows."""
    _check(omni, [_spoken(index, longest if index == 0 else SHORT) for index in range(STREAMS)])
    for index in range(LENGTHS):
        _check(omni, [_written(STREAMS + index, 20 + 7 * index)])
    _check(omni, [_written(STREAMS + LENGTHS + index, BUDGET) for index in range(STREAMS // 2)])


def draw(omni: Omni) -> None:
    """A picture that fills a step, then two at once."""
    for count in (1, 2):
        _check(omni, [_drawn(10 * count + index) for index in range(count)])


def speak(omni: Omni) -> None:
    """Twice as many streams as `talk`, with text and speech; a sound and a picture, without which pages of the towers
    are never read."""
    _check(omni, [_spoken(index, LONG if index == 0 else SHORT) for index in range(2 * STREAMS)])
    with tempfile.TemporaryDirectory() as place:
        sound, picture = Path(place) / "sound.wav", Path(place) / "picture.png"
        noise = np.random.default_rng(1)
        soundfile.write(sound, noise.uniform(-0.1, 0.1, 20 * 16000), 16000)
        Image.fromarray(noise.integers(0, 256, (480, 640, 3), np.uint8)).save(picture)
        _check(omni, [_told("heard", "audio_url", sound), _told("seen", "image_url", picture)])
    _check(omni, [_written(2 * STREAMS + index, 2 * BUDGET) for index in range(STREAMS)])


def paint(omni: Omni) -> None:
    """A picture alone, then two."""
    for count in (1, 2):
        given = {"task": "image", "size": "256x256", "bot_task": "image", "num_inference_steps": 2}
        _check(omni, [given | {"id": f"r{10 * count + i}", "prompt": "A red cup.", "seed": i} for i in range(count)])


def film(omni: Omni) -> None:
    """A clip of the default length and size, without a reference video and with one."""
    clip = {"prompt": "A red cup.", "num_frames": 124, "num_inference_steps": 2, "seed": 1}
    _check(omni, [clip | {"id": "r1"}])
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "clip.npy"
        np.save(file, np.random.default_rng(1).integers(0, 256, (140, 256, 448, 3), np.uint8))
        _check(omni, [clip | {"id": "r2", "references": [{"video": str(file), "fps": 24}]}])


def _written(number: int, words: int) -> dict[str, Any]:
    sampling = {"thinker": {"temperature": 0.0, "min_tokens": 2, "max_tokens": 2}}
    return {"id": f"r{number}", "prompt": f"{number}" + " say" * words, "modalities": ["text"], "sampling": sampling}


def _told(name: str, kind: str, file: Path) -> dict[str, Any]:
    content = [{"type": kind, kind: {"url": str(file)}}, {"type": "text", "text": "Say."}]
    request = _written(0, 0) | {"id": name, "messages": [{"role": "user", "content": content}]}
    return {key: value for key, value in request.items() if key != "prompt"}


def _spoken(number: int, frames: int) -> dict[str, Any]:
    sampling = {
        "thinker": {"temperature": 0.0, "min_tokens": 4, "max_tokens": 4},
        "talker": {"min_tokens": frames, "max_tokens": frames},
    }
    return _written(number, 20) | {"modalities": ["text", "audio"], "sampling": sampling}


def _drawn(number: int) -> dict[str, Any]:
    size = {"height": SIDE, "width": SIDE, "num_frames": 1, "num_inference_steps": 2}
    return {"id": f"r{number}", "prompt": "A red cup.", "seed": number, **size}


def _check(omni: Omni, requests: list[dict[str, Any]]) -> None:
    for result in omni.generate(requests):
        result.raise_for_error()


class Case(NamedTuple):
    """A checkpoint that `write` makes, how it is deployed, and what drives it to its peak."""

    write: Callable[[Path], object]
    drive: Callable[[Omni], None]
    settings: dict[str, Any]

    def peaks(self, folder: Path) -> list[StagePeak]:
        if not folder.exists():
            self.write(folder)
        return stage_peaks(str(folder), self.drive, {"device": "cpu", "threads": 1} | self.settings)


QWEN3_OMNI: dict[str, Any] = {
    "max_num_seqs": STREAMS, "kv_memory_mb": 16, "stages.thinker.token_budget": BUDGET,
    "stages.talker.token_budget": BUDGET, "stages.thinker.encoder_cache_mb": 0,
}  # fmt: skip
COSMOS3: dict[str, Any] = {"token_budget": PICTURE_ROWS, "stages.diffusion.reasoner_cache_mb": 0}
OTHER = QWEN3_OMNI | {"max_num_seqs": 2 * STREAMS, "kv_memory_mb": 32, "dtype": "float32"}
PAINTING: dict[str, Any] = {"variant": "dit", "token_budget": 1024}
CASES: dict[str, Case] = {
    f"qwen3_omni {name}": Case(write_qwen3_omni, talk, QWEN3_OMNI | settings)
    for name, settings in {
        "float32 both": {"dtype": "float32", "weight_layout": "both"},
        "float32 blocked": {"dtype": "float32", "weight_layout": "blocked"},
        "float32 plain": {"dtype": "float32", "weight_layout": "plain"},
        "bfloat16": {"dtype": "bfloat16"},
        "int4": {"dtype": "float32", "stages.thinker.quantization": "int4"},
    }.items()
}
CASES |= {f"cosmos3 {name}": Case(write_cosmos3, draw, COSMOS3 | {"dtype": name}) for name in ("float32", "bfloat16")}
# The formulas had not seen these when they were made.
INDEPENDENT: dict[str, Case] = {
    "hunyuan_image3 float32": Case(write_hunyuan_image3, paint, PAINTING | {"dtype": "float32"}),
    "hunyuan_image3 bfloat16": Case(write_hunyuan_image3, paint, PAINTING | {"dtype": "bfloat16"}),
    "minimax_h3 float32": Case(write_minimax_h3, film, {"variant": "split", "token_budget": 9000, "dtype": "float32"}),
    "qwen3_omni_other bfloat16": Case(write_other_qwen3_omni, speak, OTHER | {"dtype": "bfloat16"}),
    "qwen3_omni_other plain": Case(write_other_qwen3_omni, speak, OTHER | {"weight_layout": "plain"}),
}
CASES |= INDEPENDENT


def main(wanted: list[str]) -> None:
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as place:
        for name in wanted or CASES:
            for peak in CASES[name].peaks(Path(place) / name.partition(" ")[0]):
                pairs = ((peak.rested, peak.rest), (peak.measured, peak.peak))
                figures = (
                    f"{measured // MIB} / {said // MIB} ({said / measured - 1:+.0%})" for measured, said in pairs
                )
                rows.append((name, peak.stage, *figures))
    print(machine() + "\n")
    print(table(("case", "stage", "at rest, measured / predicted MiB", "at the peak"), rows))


if __name__ == "__main__":
    main(sys.argv[1:])

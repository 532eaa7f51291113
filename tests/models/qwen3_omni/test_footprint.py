"""The plan counts the weights that each stage loads, in the form in which it holds them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from omnistage.config.model import StageConfig
from omnistage.models.qwen3_omni.footprint import vocoder_step
from omnistage.models.weight_files import TensorHeader
from tests.models.held import declared_and_held
from tests.models.qwen3_omni.tiny import CODE2WAV

pytestmark = pytest.mark.slow
VOCODER = StageConfig(name="code2wav", kind="generation", device="cpu", dtype="float32", max_num_seqs=4)


def test_a_vocoders_step_grows_with_streams_by_what_they_carry_and_not_with_frames() -> None:
    weights = [TensorHeader("code2wav.decoder.0.conv.weight", "F32", (8, 8, 7))]

    def step(**fields: int) -> int:
        return vocoder_step(CODE2WAV, msgspec.structs.replace(VOCODER, **fields), weights).nbytes

    assert step(token_budget=1000) == step(token_budget=8)
    windows = 3 * 2 * 4 * 8 * 16
    carried = 6 * (1 + 3 + 9) * (16 + 8 + 4)
    assert step(max_num_seqs=5) - step(max_num_seqs=4) == 4 * (windows + carried)


@pytest.mark.parametrize(("stage", "dtype"), [("thinker", "float32"), ("talker", "bfloat16"), ("code2wav", "float32")])
def test_plain_weights_are_counted_exactly(checkpoint: Path, stage: str, dtype: str) -> None:
    declared, held = declared_and_held(
        checkpoint, stage, dtype=dtype, weight_layout="auto" if dtype != "float32" else "plain"
    )
    assert declared == held > 100_000


@pytest.mark.parametrize(
    ("stage", "layout"), [("thinker", "both"), ("talker", "blocked"), ("code2wav", "both"), ("code2wav", "blocked")]
)
def test_weights_in_blocks_are_counted_exactly(checkpoint: Path, stage: str, layout: str) -> None:
    declared, held = declared_and_held(checkpoint, stage, **{f"stages.{stage}.weight_layout": layout})
    assert declared == held > 100_000


def test_packed_weights_are_counted_exactly(checkpoint: Path) -> None:
    declared, held = declared_and_held(checkpoint, "thinker", **{"stages.thinker.quantization": "int4"})
    assert declared == held > 100_000

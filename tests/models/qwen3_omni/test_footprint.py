"""The plan counts the weights that each stage loads, in the form in which it holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from omnistage.config.model import StageConfig
from omnistage.models.qwen3_omni.footprint import vocoder_step
from omnistage.models.qwen3_omni.tiles import TILE
from omnistage.models.weight_files import TensorHeader
from tests.models.held import declared_and_held
from tests.models.qwen3_omni.tiny import CODE2WAV

pytestmark = pytest.mark.slow
VOCODER = StageConfig(name="code2wav", kind="generation", device="cpu", dtype="float32", max_num_seqs=4, token_budget=8)


def step(layout: str = "plain", **fields: Any) -> int:
    weights = [TensorHeader("code2wav.decoder.0.conv.weight", "F32", (8, 8, 7))]
    return vocoder_step(CODE2WAV, msgspec.structs.replace(VOCODER, **fields), weights, layout).nbytes


def test_a_vocoders_step_grows_with_streams_by_their_states_before_and_after_and_rows_in_front_of_their_own() -> None:
    windows = 3 * 2 * 4 * 8 * 16
    carried = 6 * (1 + 3 + 9) * (16 + 8 + 4)
    in_front = 38 * 6 * 9 * 16
    assert step(max_num_seqs=5) - step(max_num_seqs=4) == 4 * (2 * (windows + carried) + in_front)
    assert step(max_num_seqs=20) - step(max_num_seqs=19) == 4 * 2 * (windows + carried)


def test_a_vocoders_step_grows_with_frames_until_they_fill_a_tile() -> None:
    frame = 4 * 4 * 3 * 2 * 4
    assert step(token_budget=9) - step(token_budget=8) == 38 * frame * 4
    assert step(token_budget=2 * TILE) == step(token_budget=-(-TILE // frame)) > step(token_budget=TILE // frame)


def test_only_plain_convolutions_put_a_weight_in_order() -> None:
    buffer = 8 * 384 + 4 * 6 * 9 * 16
    assert step("both") - step("plain") == (54 - 38) * buffer * 4 - 8 * 8 * 7 * 4


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

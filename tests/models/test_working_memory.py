"""The working memory of steps: it follows what each factor of the formula stands for, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omnistage.config.footprint import Working
from omnistage.config.model import StageConfig
from omnistage.models.working_memory import Layer, ar_step, denoising_step, kernels, layer_of

STAGE = StageConfig(name="s", kind="ar", device="cpu", dtype="float32", token_budget=100, max_num_seqs=4)
DENSE = Layer(width=64, heads=4, kv_heads=2, head_dim=16, inner=256)
SMALL_VOCAB, LENGTH = 10, 50


def changed(**fields: Any) -> StageConfig:
    return msgspec.structs.replace(STAGE, **fields)


def test_a_layers_tensors_are_counted_by_hand() -> None:
    stream, feed_forward = 100 * 64 * (2 * 4 + 2 * 4), 4 * 100 * 256 * 4
    assert DENSE.nbytes(100, "float32") == stream + feed_forward
    attention = 100 * 16 * 4 * (2 * (4 + 2 * 2) + 4)
    assert DENSE._replace(inner=1).nbytes(100, "float32") == stream + attention


def test_rows_of_experts_count_once_per_expert() -> None:
    routed = DENSE._replace(inner=0, experts=8, expert_inner=128).nbytes(1, "bfloat16")
    assert routed == 64 * (2 * 2 + 2 * 4) + 8 * 2 * (3 * 64 + 4 * 128)


def test_a_step_grows_with_the_token_budget_and_a_large_vocabulary_with_the_sequences() -> None:
    step = ar_step(DENSE, SMALL_VOCAB, STAGE, LENGTH)
    assert ar_step(DENSE, SMALL_VOCAB, changed(token_budget=200), LENGTH).nbytes > 1.9 * step.nbytes
    assert ar_step(DENSE, SMALL_VOCAB, changed(max_num_seqs=8), LENGTH) == step
    assert ar_step(DENSE, 150_000, STAGE, LENGTH) == Working(4 * 150_000 * 20, "logits of 4", 150_000 * 20)


def test_what_a_prompt_sees_is_bounded_by_the_kv_memory() -> None:
    held = (1 << 20) // (2 * 2 * 16 * 4)
    assert ar_step(DENSE, SMALL_VOCAB, changed(kv_memory_mb=1), 10**9) == ar_step(DENSE, SMALL_VOCAB, STAGE, held)


@pytest.mark.parametrize(
    ("fields", "layout", "compiled"),
    [
        ({}, "plain", False),
        ({}, "both", True),
        ({"dtype": "bfloat16"}, "plain", True),
        ({"dtype": "bfloat16", "device": "cuda"}, "plain", False),
    ],
)
def test_kernels_are_counted_where_they_are_compiled(fields: dict[str, str], layout: str, compiled: bool) -> None:
    assert (kernels(changed(**fields), layout) > 0) == compiled


def test_all_kernels_count_for_sixteen_bits_and_half_for_blocks() -> None:
    assert kernels(changed(dtype="bfloat16"), "plain") == 2 * kernels(STAGE, "both") == 96 * 640 << 10


def test_a_denoiser_takes_its_whole_budget_of_rows_at_once() -> None:
    assert denoising_step(DENSE, changed(token_budget=7)) == Working(DENSE.nbytes(7, "float32"), "7 rows")


def test_a_denoiser_never_takes_more_rows_than_its_requests_have() -> None:
    one = DENSE.nbytes(20, "float32")
    assert denoising_step(DENSE, STAGE, largest=20) == Working(4 * one, "80 rows", one)
    assert denoising_step(DENSE, STAGE, largest=26) == denoising_step(DENSE, STAGE)


def test_a_layer_is_read_from_a_text_models_configuration() -> None:
    told = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}
    assert layer_of(told) == DENSE
    routed = told | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert layer_of(routed) == DENSE._replace(inner=0, experts=2, expert_inner=32)

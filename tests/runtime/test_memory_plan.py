"""The memory plan: sums by process and device, the stage that does not fit, streams, files that are damaged or cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from omnistage.config.footprint import Footprint, Weights, Working
from omnistage.config.model import OmniConfig
from omnistage.config.registry import load_pipeline
from omnistage.config.resolve import resolve_config
from omnistage.models.weight_files import tensors_of
from omnistage.runtime.memory_plan import MIB, MemoryPlan, memory_plan
from omnistage.runtime.stage_runtime import CLIENT_ARENA_MB
from omnistage.weights import WeightError

WIDTH, ROWS, LAYERS, VOCAB, LENGTH = 64, 128, 2, 256, 512
LINEAR = LAYERS * ROWS * WIDTH
EMBEDDING = VOCAB * WIDTH


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama by its headers: tied head, float32, two shards."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
        "intermediate_size": ROWS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shards: dict[str, dict[str, Any]] = {"a.safetensors": {"model.embed_tokens.weight": zeros(VOCAB, WIDTH)}}
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(LAYERS)]
    shards["b.safetensors"] = {name: zeros(ROWS, WIDTH) for name in names} | {"model.norm.weight": zeros(WIDTH)}
    for file, tensors in shards.items():
        save_file(tensors, tmp_path / file)
    index = {name: file for file, tensors in shards.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file({"unused": zeros(9)}, tmp_path / "left_over.safetensors")
    return tmp_path


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def resolved(folder: Path, **settings: Any) -> OmniConfig:
    return resolve_config(str(folder), None, {"dtype": "float32", "device": "cpu"} | settings)


def planned(folder: Path, limits: dict[str, int] | None = None, tokens: int = 0, **settings: Any) -> MemoryPlan:
    return memory_plan(resolved(folder, **settings), load_pipeline("causal-lm"), limits or {}, tokens)


@pytest.mark.parametrize(
    ("settings", "nbytes"),
    [
        ({"weight_layout": "plain"}, 4 * (EMBEDDING + LINEAR + WIDTH)),
        ({"weight_layout": "both"}, 4 * (2 * EMBEDDING + 2 * LINEAR + WIDTH)),
        ({"weight_layout": "blocked"}, 4 * (2 * EMBEDDING + LINEAR + WIDTH)),
        ({"dtype": "bfloat16"}, 2 * (EMBEDDING + LINEAR + WIDTH)),
        ({"quantization": "int4"}, 4 * (EMBEDDING + WIDTH) + LINEAR * 5 // 8 + EMBEDDING + 2 * VOCAB),
    ],
)
def test_weights_are_counted_in_the_form_in_which_the_stage_holds_them(
    folder: Path, settings: dict[str, Any], nbytes: int
) -> None:
    (stage,) = planned(folder, **settings).stages
    assert sum(stage.weights.values()) == nbytes


def test_kv_memory_is_counted_in_whole_blocks_and_bounds_the_streams(folder: Path) -> None:
    plan = planned(folder, kv_memory_mb=1, block_size=16, max_num_seqs=5)
    (stage,) = plan.stages
    token = 2 * LAYERS * 2 * 16 * 4
    assert stage.kv is not None
    assert (stage.kv.blocks, stage.kv.tokens) == (MIB // (16 * token), MIB // token)
    assert (stage.streams, stage.stream_tokens) == (4, LENGTH)
    assert planned(folder, tokens=300, kv_memory_mb=1, max_num_seqs=5).stages[0].streams == 5
    assert planned(folder, tokens=300, kv_memory_mb=1, max_num_seqs=50, replicas=2).stages[0].streams == 2 * 6


def test_the_totals_are_sums_of_their_parts_and_a_lack_is_told_to_the_byte(folder: Path) -> None:
    plan = planned(folder, replicas=2)
    (stage,) = plan.stages
    assert stage.need is not None
    workers = [process for process in plan.processes if process.stages]
    assert [process.taken["cpu"] for process in workers] == [workers[0].base + stage.need] * 2
    assert plan.arenas == 2 * stage.arena + CLIENT_ARENA_MB * MIB
    assert plan.total == {"cpu": plan.arenas + sum(process.taken["cpu"] for process in plan.processes)}
    held = plan.total["cpu"] - sum(process.working.get("cpu", 0) for process in plan.processes)
    assert planned(folder, {"cpu": held}, replicas=2).lacks == []
    (lack,) = planned(folder, {"cpu": held - 7}, replicas=2).lacks
    assert (lack.device, lack.stage, lack.nbytes) == ("cpu", "thinker", 7)


def test_the_working_memory_of_steps_is_a_line_of_its_own_and_part_of_what_a_stage_needs(folder: Path) -> None:
    (small,), (large,) = (planned(folder, token_budget=budget).stages for budget in (64, 4096))
    assert small.need is not None
    assert large.need is not None
    assert large.working.nbytes > small.working.nbytes > 0
    assert large.need - small.need == large.working.nbytes - small.working.nbytes
    assert (small.working.of, large.working.of) == ("64 tokens", "4096 tokens")


def test_full_steps_that_do_not_fit_are_told_and_refuse_nothing(folder: Path) -> None:
    whole = planned(folder, token_budget=4096)
    (step,) = (stage.working.nbytes for stage in whole.stages)
    tight = planned(folder, {"cpu": whole.total["cpu"] - step}, token_budget=4096)
    assert (tight.lacks, tight.tight[0].stage, tight.tight[0].nbytes) == ([], "thinker", step)
    lacking = planned(folder, {"cpu": whole.total["cpu"] - step - 7}, token_budget=4096)
    assert (lacking.lacks[0].nbytes, lacking.tight) == (7, [])


def test_working_memory_of_streams_lowers_their_number_where_it_does_not_fit(folder: Path) -> None:
    """Sixty-four rows of logits take more than the tokens of a step of one."""
    settings: dict[str, Any] = {"token_budget": 1, "max_num_seqs": 64, "kv_memory_mb": 512, "max_model_len": 32}
    whole = planned(folder, **settings)
    (stage,) = whole.stages
    each = VOCAB * (4 + 4 * 4)
    assert (stage.streams, stage.working.per_stream) == (64, each)
    fewer = planned(folder, {"cpu": whole.total["cpu"] - 10 * each - 1}, **settings)
    assert (fewer.stages[0].streams, fewer.lacks) == (64 - 11, [])


def test_pages_of_a_file_count_while_it_is_read_and_later_only_if_tensors_stay_in_it(folder: Path) -> None:
    stored = 4 * (EMBEDDING + LINEAR + WIDTH)
    (cast,) = planned(folder, dtype="bfloat16", kv_memory_mb=1).stages
    assert cast.need is not None
    assert cast.peak == max(cast.need, stored * 3 // 2)
    (blocked,) = planned(folder, weight_layout="blocked", kv_memory_mb=1).stages
    assert blocked.need is not None
    assert blocked.peak == blocked.need + 4 * LINEAR


def test_an_accelerator_has_a_total_of_its_own(folder: Path) -> None:
    plan = planned(folder, {"cuda": 1}, device="cuda", dtype="auto")
    assert plan.stages[0].dtype == "bfloat16"
    need, working = plan.stages[0].need, plan.stages[0].working.nbytes
    assert need == plan.total["cuda"] == plan.lacks[0].nbytes + 1 + working
    assert plan.stages[0].peak == need  # its files are mapped into the host's memory


def test_an_inline_stage_counts_in_the_engines_process(folder: Path) -> None:
    (main,) = planned(folder, placement="inline").processes
    assert (main.name, main.stages) == ("main", ("thinker",))


def test_a_damaged_or_missing_shard_is_named(folder: Path) -> None:
    (folder / "b.safetensors").write_bytes(b"\x00" * 5)
    with pytest.raises(WeightError, match=r"b\.safetensors is no readable"):
        planned(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(WeightError, match=r"b\.safetensors cannot be read"):
        planned(folder)


def test_a_folder_without_index_gives_the_tensors_of_all_its_files(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    assert "unused" in {tensor.name for tensor in tensors_of(folder)}


def test_a_pipeline_that_declares_nothing_is_planned_without_its_memory() -> None:
    plan = memory_plan(resolve_config("echo3"), load_pipeline("echo3"), {"cpu": 1 << 40})
    assert [stage.need for stage in plan.stages] == [None] * 3
    assert plan.lacks == []


def test_a_stage_at_rest_takes_its_peak_without_the_step(folder: Path) -> None:
    (stage,) = planned(folder, token_budget=4096).stages
    assert stage.rest is not None
    assert stage.peak == stage.rest + stage.working.nbytes
    assert stage.kv is not None
    assert stage.rest == sum(stage.weights.values()) + stage.kv.nbytes + sum(stage.extra.values())


def test_weights_that_load_at_their_first_use_and_caches_are_no_part_of_a_stage_at_rest(folder: Path) -> None:
    """A cache that does not fit when it is full refuses nothing."""
    parts = {"now": Weights(5 * MIB, 5 * MIB), "later": Weights(7 * MIB, 7 * MIB, late=True)}
    declared = Footprint(weights=parts, caches={"media": 11 * MIB}, working=Working(2 * MIB))
    pipeline = msgspec.structs.replace(load_pipeline("causal-lm"), footprint=lambda config, stage: declared)
    (stage,) = memory_plan(resolved(folder), pipeline, {}).stages
    assert (stage.rest, stage.peak, stage.need) == (5 * MIB, 14 * MIB, 25 * MIB)
    whole = memory_plan(resolved(folder), pipeline, {}).total["cpu"]
    short = memory_plan(resolved(folder), pipeline, {"cpu": whole - 13 * MIB})
    assert (short.lacks, short.tight[0].nbytes) == ([], 13 * MIB)
    assert memory_plan(resolved(folder), pipeline, {"cpu": whole - 14 * MIB}).lacks[0].nbytes == MIB

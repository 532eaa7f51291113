"""vLLM-Omni deploy files: what is mapped, what is listed, and that nothing is lost."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.config.resolve import resolve_config
from omnistage.config.vllm_omni import import_deploy
from omnistage.entrypoints.cli.main import main
from omnistage.errors import ConfigError

NEWER = """
pipeline: qwen3_omni_moe
async_chunk: true
dtype: bfloat16
connectors:
  shm: {name: SharedMemoryConnector, extra: {codec_chunk_frames: 25, initial_codec_chunk_frames: 4, left: 25}}
edges: [{from: 0, to: 1, window_size: -1, max_inflight: 8}]
stages:
  - {stage_id: 0, devices: "1", gpu_memory_utilization: 0.9, max_num_seqs: 64, tensor_parallel_size: 2,
     default_sampling_params: {temperature: 0.4, stop_token_ids: [1, 2], detokenize: true}}
  - {stage_id: 1, devices: "0,1", engine_extras: {max_num_batched_tokens: 2048, foo: {bar: 1, dtype: half}}}
  - {stage_id: 2, enforce_eager: true, max_num_seqs: 3, max_batch_size: 5}
platforms:
  cuda: {stages: [{stage_id: 1, max_num_seqs: 9}]}
  npu: {stages: [{stage_id: 1, max_num_seqs: 9}]}
"""
OLDER = """
stage_args:
  - stage_id: 0
    stage_type: llm
    runtime: {process: true, devices: "0", max_batch_size: 4}
    engine_args: {model_stage: talker, enforce_eager: false, max_num_batched_tokens: 32768, dtype: half}
    default_sampling_params: {temperature: 0.4, seed: 42}
  - {stage_id: 1, engine_args: {model_stage: code2wav}}
  - {stage_id: 2, engine_args: {model_stage: thinker}}
runtime:
  edges: [{from: 0, to: 1, max_inflight: 5}]
"""
KEYS = ("stage_id", "devices", "max_num_seqs", "dtype", "engine_args", "edges", "stages", "name", "runtime", "new_key")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.sampled_from(["0", "half", "SharedMemoryConnector"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


def imported(tmp_path: Path, text: str, model: str | None = None) -> Any:
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    return import_deploy(file, model)


def test_a_file_of_the_newer_shape_becomes_a_deploy_file(tmp_path: Path) -> None:
    found = imported(tmp_path, NEWER)
    document = found.document
    assert (document["pipeline"], document["variant"]) == ("qwen3_omni", "default")
    assert document["stages"] == {
        "thinker": {"device": "cuda:1", "max_num_seqs": 64},
        "talker": {"token_budget": 2048},
        "code2wav": {"chunk_frames": 25, "first_chunk_frames": 4, "graphs": "eager", "max_num_seqs": 3},
    }
    assert document["sampling"] == {"thinker": {"temperature": 0.4, "stop_token_ids": [1, 2]}}
    assert document["edges"]["thinker->talker"] == {"async_chunk": True, "connector": "shm", "max_inflight": 8}
    assert document["platforms"] == {"cuda": {"stages": {"talker": {"max_num_seqs": 9}}}}
    assert document["stage_defaults"] == {"dtype": "bfloat16"}
    ours = tmp_path / "ours.yaml"
    ours.write_text(yaml.safe_dump(document))
    assert resolve_config("qwen3_omni", ours).stages["thinker"].max_num_seqs == 64


def test_numbers_of_a_file_with_more_stages_than_ours_name_none_of_them(tmp_path: Path) -> None:
    """A prefill and a decode stage: their stage 1 is the decoder, our second stage paints."""
    stages = "\n".join(f"  - {{stage_id: {number}, max_num_seqs: 3}}" for number in range(3))
    edges = "edges: [{from: 0, to: 1, max_inflight: 2}]"
    found = imported(tmp_path, f"pipeline: hunyuan_image3_pd\n{edges}\nstages:\n{stages}\n")
    assert not {"stages", "edges"} & set(found.document)
    assert {f"stages.{number}.max_num_seqs" for number in range(3)} < set(found.unmapped)
    assert "edges.0.max_inflight" in found.unmapped


def test_what_has_no_equivalent_is_listed_with_the_reason(tmp_path: Path) -> None:
    assert imported(tmp_path, NEWER).unmapped.keys() == {
        "connectors.shm.extra.left", "edges.0.window_size", "stages.0.gpu_memory_utilization",
        "stages.0.tensor_parallel_size", "stages.0.default_sampling_params.detokenize", "stages.1.devices",
        "stages.1.engine_extras.foo.bar", "stages.1.engine_extras.foo.dtype",
        "stages.2.max_batch_size", "platforms.npu.stages.0.max_num_seqs",
    }  # fmt: skip
    reasons = imported(tmp_path, NEWER).unmapped
    assert "kv_memory_mb" in reasons["stages.0.gpu_memory_utilization"]
    assert reasons["stages.2.max_batch_size"] == "stages.code2wav.max_num_seqs is 3 already"
    assert "not supported" in reasons["stages.0.tensor_parallel_size"]


def test_a_file_of_the_older_shape_names_stages_by_model_stage(tmp_path: Path) -> None:
    found = imported(tmp_path, OLDER, "qwen3_omni")
    stage = {"placement": "process", "device": "cuda:0", "max_num_seqs": 4, "token_budget": 32768, "dtype": "float16"}
    assert found.document["stages"] == {"talker": stage}
    assert found.document["sampling"] == {"talker": {"temperature": 0.4, "seed": 42}}
    assert found.document["edges"] == {"talker->code2wav": {"max_inflight": 5}}
    assert set(found.unmapped) == {"stage_args.0.stage_type", "stage_args.0.engine_args.enforce_eager"}


def scalars(value: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Paths of all values that are no mapping and no list, and of the empty ones that are."""
    pairs = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    inner = [found for key, item in pairs for found in scalars(item, (*path, str(key)))]
    return inner if pairs else [path] if path else []


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5))
def test_every_value_is_either_mapped_or_listed(content: dict[str, Any]) -> None:
    file = Path(tempfile.gettempdir()) / f"theirs-{os.getpid()}.yaml"
    file.write_text(yaml.safe_dump(content))
    found = import_deploy(file, "echo3")
    listed = found.mapped.keys() | found.unmapped.keys()
    lost = [
        path for path in scalars(content, ()) if not any(".".join(path[:end]) in listed for end in range(len(path) + 1))
    ]
    assert lost == []
    assert not found.mapped.keys() & found.unmapped.keys()


def test_the_command_prints_the_file_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(NEWER)
    assert main(["config", "import", str(file)]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["pipeline"] == "qwen3_omni"
    assert "#   edges.0.window_size: no equivalent" in out
    assert "not carried over: edges.0.window_size: no equivalent" in err


def test_a_file_that_names_no_pipeline_needs_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        imported(tmp_path, OLDER)
    with pytest.raises(ConfigError, match="mapping of keys"):
        imported(tmp_path, "- 1", "echo3")

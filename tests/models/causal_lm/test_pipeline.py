"""Any text model from a folder, a GGUF file or a file of a PyPI wheel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from omnistage.config.registry import load_pipeline
from omnistage.config.resolve import resolve_config
from omnistage.errors import ConfigError, OmniError, RequestError
from omnistage.models.causal_lm.pipeline import plan
from omnistage.models.smollm2 import SMOLLM2_GGUF
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from omnistage.runtime.memory_plan import footprint_of
from tests.engines import answer, running

CONFIG = resolve_config("causal-lm")


def test_chat_and_completion_reach_the_thinker() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    chat = plan(OmniRequest(id="x", messages=messages), {}, CONFIG)
    assert chat.params == {"thinker": {"messages": [{"role": "user", "content": "ab"}]}}
    raw = plan(OmniRequest(id="x", task="completion", prompt="Once"), {}, CONFIG)
    assert raw.params == {"thinker": {"raw_prompt": "Once"}}
    ids = plan(OmniRequest(id="x", task="completion", params={"prompt_token_ids": [1, 2]}), {}, CONFIG)
    assert ids.params == {"thinker": {"token_ids": [1, 2]}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "voice": "heart"}, "voice"),
        ({"prompt": "x", "modalities": ("audio",)}, "modalities"),
        ({"prompt": "x", "params": {"steps": 3}}, "steps"),
        ({}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "media": "i"}]}]}, "messages"),
    ],
)
def test_what_a_text_model_cannot_do_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan(OmniRequest(id="x", **fields), {}, CONFIG)
    assert caught.value.info.param == param


def test_media_are_refused() -> None:
    with pytest.raises(RequestError, match="text only"):
        plan(OmniRequest(id="x", prompt="x"), {"a": MultimodalPayload()}, CONFIG)


def test_file_of_an_unknown_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"file of type '\.bin'"):
        resolve_config(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("reference", ["pypi:x", "pypi:a==1#../up#sha256=" + "0" * 64, "pypi:a==1#f.gguf"])
def test_malformed_wheel_reference_is_refused(reference: str) -> None:
    with pytest.raises(OmniError, match="pypi:"):
        resolve_config(reference)


def test_a_configuration_without_a_key_is_told_so_by_the_plan(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "n_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes}))
    save_file({"model.embed_tokens.weight": np.zeros((4, 8), np.float32)}, tmp_path / "model.safetensors")
    config = resolve_config(str(tmp_path), None, {"dtype": "float32", "device": "cpu"})
    with pytest.raises(ConfigError, match="configuration lacks 'num_attention_heads'"):
        footprint_of(config, load_pipeline("causal-lm"), config.stages["thinker"])


@pytest.mark.slow
async def test_folder_gguf_file_and_wheel_reference_give_the_same_text(smollm2_folder: Path) -> None:
    texts = set()
    for model in (str(smollm2_folder), str(SMOLLM2_GGUF)):
        config = resolve_config(model)
        assert config.pipeline == "causal-lm"
        async with running(model, {"stages.thinker.placement": "inline"}) as engine:
            sampling = {"thinker": {"temperature": 0.0, "max_tokens": 12}}
            result = await answer(engine, id="a", prompt="What is the capital of France?", sampling=sampling)
            texts.add(result.text)
    assert len(texts) == 1
    assert "Paris" in texts.pop()

"""Weights that do not fit the configuration: the library would draw or drop them without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from omnistage.errors import ConfigError
from omnistage.ops.pretrained import load_auto_tokenizer, load_pretrained, load_tokenizer, make_resident

Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def change_weights(folder: Path, change: Change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"),
            r"lacks 1 weights, .*layers\.1\.mlp\.up",
        ),
        (lambda weights: weights.update(draft=torch.zeros(2)), "has a weight draft that its configuration lacks"),
    ],
)
def test_weights_that_are_missing_or_have_no_place_are_named(folder: Path, change: Change, words: str) -> None:
    change_weights(folder, change)
    with pytest.raises(ConfigError, match=words):
        load_pretrained(LlamaForCausalLM, folder)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("intermediate_size", 32, r"mlp\.\w+\.weight is \[.*24.*\], its configuration says \[.*32.*\]"),
        ("num_hidden_layers", 1, r"has a weight model\.layers\.1\."),
    ],
)
def test_a_configuration_that_is_not_that_of_the_weights_is_refused(
    folder: Path, key: str, value: int, words: str
) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=words):
        load_pretrained(LlamaForCausalLM, folder)


def test_a_part_of_a_checkpoint_has_no_place_for_the_rest(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update(draft=torch.zeros(2)))
    assert not load_pretrained(LlamaForCausalLM, folder, whole=False).training


def test_pickled_weights_are_not_opened(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="weights cannot be loaded"):
        load_pretrained(LlamaForCausalLM, folder)


def test_an_error_names_files_without_their_place(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "second.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"second\.safetensors") as caught:
        load_pretrained(LlamaForCausalLM, folder)
    assert str(folder) not in caught.value.info.message


def test_a_file_that_was_cut_short_is_told_so(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="weights cannot be loaded"):
        load_pretrained(LlamaForCausalLM, folder)


def test_a_folder_without_tokenizer_is_told_so(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(folder)


def test_a_tokenizer_without_words_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    with pytest.raises(ConfigError, match=r"no tokenizer\.json and no vocab\.json"):
        load_auto_tokenizer(folder)


def test_first_request_waits_for_no_page_of_a_mapped_weight_file(tmp_path: Path) -> None:
    megabytes = 64
    save_file({"weight": torch.ones(megabytes << 18)}, tmp_path / "model.safetensors")
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(load_file(tmp_path / "model.safetensors")["weight"]))
    module.register_buffer("empty", torch.empty(0))
    before = psutil.Process().memory_info().rss
    make_resident(module)
    assert psutil.Process().memory_info().rss - before > (megabytes - 8) << 20

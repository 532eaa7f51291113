"""Loading of the official layout: whole, in shards, in part, damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from omnistage.errors import ConfigError
from omnistage.models.hunyuan_image3.checkpoint import read_checkpoint
from omnistage.models.hunyuan_image3.components import Components
from omnistage.models.hunyuan_image3.vocabulary import Vocabulary
from omnistage.shared import SharedObjects
from tests.models.hunyuan_image3.harness import FOLDER

Weights = dict[str, Tensor]
CPU = torch.device("cpu")


@pytest.fixture
def remade(tmp_path: Path) -> Callable[..., Components]:
    """The checkpoint's parts from a folder whose weight files are those given."""

    def make(*files: Weights, dtype: torch.dtype = torch.float32) -> Components:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            shutil.copy(FOLDER / name, folder / name)
        for index, content in enumerate(files):
            save_file(content, folder / f"model-{index:05}.safetensors")
        return Components(read_checkpoint(folder), CPU, dtype, SharedObjects())

    return make


@pytest.fixture
def stored() -> Weights:
    return load_file(FOLDER / "model.safetensors")


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_shards_load_like_one_file(remade: Callable[..., Components], stored: Weights, components: Components) -> None:
    names = sorted(stored)
    made = remade(*[{name: stored[name] for name in names[start::3]} for start in range(3)])
    assert equal(made.backbone(), components.backbone())
    assert equal(made.vision(), components.vision())


def test_parts_that_no_stage_asked_for_may_be_missing(remade: Callable[..., Components], stored: Weights) -> None:
    text_only = {name: tensor for name, tensor in stored.items() if name.startswith(("model.", "lm_head."))}
    made = remade(text_only)
    made.backbone()
    made.text_head()
    with pytest.raises(ConfigError, match="lack patch_embed"):
        made.patch_embed()


def test_a_weight_of_another_shape_is_named(remade: Callable[..., Components], stored: Weights) -> None:
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    made = remade(stored | {name: stored[name][:, 1:].contiguous()})
    with pytest.raises(ConfigError, match=r"experts\.2\.down_proj.*\[64, 47\].*\[64, 48\]"):
        made.backbone()


def test_a_weight_that_is_stored_twice_is_refused(remade: Callable[..., Components], stored: Weights) -> None:
    made = remade(stored, {"model.ln_f.weight": stored["model.ln_f.weight"]})
    with pytest.raises(ConfigError, match=r"model\.ln_f\.weight is in"):
        made.text_head()


def test_no_weights_at_all_and_no_safetensors_are_named(
    remade: Callable[..., Components], tmp_path: Path, stored: Weights
) -> None:
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        remade().backbone()
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        Components(read_checkpoint(tmp_path / "checkpoint"), CPU, torch.float32, SharedObjects()).backbone()


def test_router_and_autoencoder_stay_float32(remade: Callable[..., Components], stored: Weights) -> None:
    made = remade(stored, dtype=torch.bfloat16)
    kinds = {name: parameter.dtype for name, parameter in made.backbone().named_parameters()}
    assert {kind for name, kind in kinds.items() if name.endswith("gate.wg.weight")} == {torch.float32}
    assert {kind for name, kind in kinds.items() if not name.endswith("gate.wg.weight")} == {torch.bfloat16}
    assert {parameter.dtype for parameter in made.vae_decoder().parameters()} == {torch.float32}


@torch.inference_mode()
def test_half_precision_stages_compute_close_to_full_ones(components: Components, stored: Weights) -> None:
    half = Components(components.checkpoint, CPU, torch.bfloat16, SharedObjects())
    time, latents = torch.tensor([640.0]), torch.randn(1, 8, 4, 4)
    rows = half.patch_embed()(latents.bfloat16(), half.times("time_embed")(time))
    right = components.patch_embed()(latents, components.times("time_embed")(time))
    assert rows.dtype == torch.bfloat16
    assert (rows.float() - right).abs().max() < 0.05 * right.abs().max()


def test_stages_of_one_process_share_their_parts(components: Components) -> None:
    shared = SharedObjects()
    first = Components(components.checkpoint, CPU, torch.float32, shared)
    second = Components(components.checkpoint, CPU, torch.float32, shared)
    backbone = first.backbone()
    assert second.backbone() is backbone
    assert Components(components.checkpoint, CPU, torch.bfloat16, shared).backbone() is not backbone


@pytest.mark.parametrize("token", ["<img>", "<img_size_256>", "</recaption>"])
def test_a_tokenizer_without_a_special_token_is_refused(vocabulary: Vocabulary, token: str) -> None:
    text = vocabulary.tokenizer.to_str().replace(f'"{token}"', '"<other>"')
    with pytest.raises(ConfigError, match=f"lacks {token}"):
        Vocabulary(type(vocabulary.tokenizer).from_str(text), 256)

"""A checkpoint that cannot be served is refused at start, naming component and file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from omnistage.errors import ConfigError
from omnistage.models.minimax_h3 import decoder_stage, encoder_stage
from omnistage.models.minimax_h3.checkpoint import read_checkpoint, weight_files
from omnistage.models.minimax_h3.stages import middle, whole
from tests.models.minimax_h3 import tiny
from tests.models.minimax_h3.harness import context


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    shutil.copytree(checkpoint, tmp_path / "copy")
    return tmp_path / "copy"


def test_sizes_come_from_the_configurations(checkpoint: Path) -> None:
    read = read_checkpoint(checkpoint)
    assert (read.channels, read.audio_channels, read.sample_rate, read.hop) == (6, 4, tiny.RATE, tiny.HOP)
    assert (read.canvas_short_edge, read.canvas_max_pixels, read.reference_short_edge) == (32, 2048, 64)
    assert (read.multiple, read.clip_frames, read.clip_latents, read.flow_shift) == (32, 17, 5, 12.0)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def _garbage(file: Path) -> None:
    file.write_bytes(b"\x10" * 64)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [Path.unlink, _cut, _garbage])
@pytest.mark.parametrize(
    ("component", "file"),
    [
        ("transformer", "diffusion_pytorch_model.safetensors"),
        ("transformer_ref", "diffusion_pytorch_model.safetensors"),
        ("vae", "diffusion_pytorch_model.safetensors"),
        ("audio_vae", "diffusion_pytorch_model.safetensors"),
        ("text_encoder", "model.safetensors"),
        ("vae", "config.json"),
        ("scheduler", "scheduler_config.json"),
        ("processor", "preprocessor_config.json"),
        ("text_encoder", "config.json"),
    ],
)
def test_missing_or_damaged_file_names_its_component(
    copy: Path, component: str, file: str, damage: Callable[[Path], None]
) -> None:
    damage(copy / component / file)
    with pytest.raises(ConfigError, match=component):
        whole(context(copy))


def test_missing_shard_is_named(copy: Path) -> None:
    index = {"weight_map": {"a": "diffusion_pytorch_model-00002-of-00002.safetensors"}}
    (copy / "vae" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="00002-of-00002"):
        weight_files(copy, "vae")


@pytest.mark.slow
def test_weights_of_another_shape_are_refused(copy: Path) -> None:
    config = json.loads((copy / "transformer" / "config.json").read_text())
    (copy / "transformer" / "config.json").write_text(json.dumps(config | {"num_layers": 3}))
    with pytest.raises(ConfigError, match=r"transformer lacks .* weights"):
        whole(context(copy, {"stages.diffusion.partition": "both"}))


@pytest.mark.slow
def test_text_encoder_with_too_few_layers_is_refused(copy: Path) -> None:
    shutil.rmtree(copy / "text_encoder")
    tiny.text_encoder(tiny.tokenizer(), 1, layers=50).save_pretrained(str(copy / "text_encoder"))
    with pytest.raises(ConfigError, match="more than 50"):
        whole(context(copy))


def test_partition_that_the_checkpoint_lacks_is_refused(copy: Path) -> None:
    shutil.rmtree(copy / "transformer_ref")
    for partition in ("both", "transformer_ref"):
        with pytest.raises(ConfigError, match="transformer_ref"):
            middle(context(copy, {"variant": "split", "stages.diffusion.partition": partition}))


@pytest.mark.slow
def test_each_split_stage_needs_the_files_of_its_own_components_only(copy: Path) -> None:
    split = {"variant": "split"}
    for name, own, build in (
        ("encoder", {"text_encoder", "vae", "audio_vae"}, encoder_stage.create),
        ("diffusion", {"transformer", "transformer_ref"}, middle),
        ("decoder", {"vae", "audio_vae"}, decoder_stage.create),
    ):
        folder = copy.parent / name
        shutil.copytree(copy, folder)
        for file in folder.glob("*/*.safetensors"):
            if file.parent.name not in own:
                file.unlink()
        build(context(folder, split, name))

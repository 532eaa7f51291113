"""Embedders, autoencoder, vision tower and schedule against the official implementation."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from omnistage.models.hunyuan_image3.checkpoint import Checkpoint
from omnistage.models.hunyuan_image3.components import Components
from omnistage.models.hunyuan_image3.embedders import sinusoid
from omnistage.models.hunyuan_image3.references import References, content_key
from omnistage.models.hunyuan_image3.schedule import Schedule
from omnistage.models.hunyuan_image3.vision import PatchCutter, Patches
from omnistage.models.hunyuan_image3.vocabulary import Vocabulary
from tests.models.hunyuan_image3.conftest import Near
from tests.models.hunyuan_image3.harness import pictures


@torch.inference_mode()
def test_patch_embedding_and_final_layer(near: Near, arrays: dict[str, Any], components: Components) -> None:
    time = torch.tensor([640.0])
    rows = components.patch_embed()(torch.tensor(arrays["proj/latent"]), components.times("time_embed")(time))
    near("proj/patch_embed_t640", rows)
    hidden = torch.tensor(arrays["proj/hidden"])
    near("proj/final_layer_t640", components.final_layer()(hidden, components.times("time_embed_2")(time), (3, 5)))


@torch.inference_mode()
def test_autoencoder(near: Near, arrays: dict[str, Any], components: Components) -> None:
    pixels = torch.tensor(arrays["vae/enc_in"])
    moments = components.vae_encoder()(pixels)
    noise = torch.randn(moments.mean.shape, generator=torch.Generator().manual_seed(5))
    near("vae/enc_mean", moments.mean[:, :, None])
    near("vae/enc_sample_seed5", (moments.mean + moments.std * noise)[:, :, None])
    assert np.abs(moments.std.log().numpy() * 2 - arrays["vae/enc_logvar"][:, :, 0]).max() < 1e-4
    latents = torch.tensor(arrays["vae/dec_in"])[:, :, 0]
    near("vae/dec_raw_all_frames", components.vae_decoder().frames(latents))
    near("vae/dec_out", components.vae_decoder()(latents)[:, :, None])


@torch.inference_mode()
def test_vision_tower_and_projection(near: Near, arrays: dict[str, Any], components: Components) -> None:
    patches = [Patches(torch.tensor(arrays["vit/pixel_values"])[0], (3, 3))]
    near("vit/last_hidden", components.vision().features(patches))
    near("vit/aligned", components.vision()(patches))


@pytest.mark.parametrize("steps", [4, 8, 50])
def test_schedule(near: Near, steps: int) -> None:
    schedule = Schedule(steps, 3.0)
    near(f"sched/sigmas_shift3_{steps}", schedule.sigmas)
    near(f"sched/timesteps_shift3_{steps}", [schedule.time(step) for step in range(steps)])
    assert (schedule.steps, schedule.time(steps)) == (steps, 0.0)


@torch.inference_mode()
def test_time_embeddings(near: Near, components: Components) -> None:
    times = torch.tensor([0.0, 300.0, 954.5, 1000.0, 2496.0])
    near("embed/timestep_sinusoid_256", sinusoid(times))
    for name in ("timestep_emb", "time_embed", "time_embed_2"):
        near(f"embed/{name}", components.times(name)(times[:4]))


def test_schedule_of_another_shift_ends_at_the_clean_latents() -> None:
    schedule = Schedule(7, 1.0)
    clean, noise = torch.randn(1, 2, 3, 3), torch.randn(1, 2, 3, 3)
    latents = noise
    for step in range(schedule.steps):
        assert torch.allclose(schedule.expected(step, latents, noise - clean), clean, atol=1e-5)
        latents = schedule.advance(step, latents, noise - clean)
    assert torch.allclose(latents, clean, atol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(128, 512), (256, 256), (90, 300), (1, 1), (2000, 30), (33, 700)])
def test_patch_grid_is_known_from_the_size_alone(checkpoint: Checkpoint, height: int, width: int) -> None:
    cutter = PatchCutter(checkpoint)
    patches = cutter(np.zeros((height, width, 3), np.uint8))
    assert patches.grid == cutter.grid(height, width)
    assert patches.pixels.shape == (checkpoint.vit_tokens, 16 * 16 * 3)


def test_patches_are_rows_of_pixels_in_minus_one_to_one(checkpoint: Checkpoint) -> None:
    picture = pictures()["c"]
    patches = PatchCutter(checkpoint)(picture)
    assert patches.grid == (16, 16)
    second = picture[:16, 16:32].reshape(-1).astype(np.float32) / 255 * 2 - 1
    assert np.abs(patches.pixels[1].numpy() - second).max() < 1e-5
    assert not patches.pixels[256:].any()


def test_pictures_are_scaled_to_cover_and_cut_in_the_middle(checkpoint: Checkpoint, vocabulary: Vocabulary) -> None:
    references = References(checkpoint, vocabulary.sizes)
    picture = np.zeros((100, 300, 3), np.uint8)
    picture[:, 100:200] = 255
    grid = references.grid((100, 300))
    read = references.read(picture, torch.zeros(8, *grid.latent))
    height, width = read.pixels.shape[1:]
    assert (height // 16, width // 16) == grid.latent
    assert read.pixels[:, height // 2, width // 2].tolist() == [1.0] * 3
    assert read.pixels[:, height // 2, 0].tolist() == [-1.0] * 3
    edges = (read.pixels[0, height // 2] > 0).nonzero()[:, 0]
    assert abs(int(edges[0]) - (width - 1 - int(edges[-1]))) <= 1


@pytest.mark.parametrize("shape", [(100, 300), (531, 400), (257, 256), (64, 1000)])
def test_scaling_and_cutting_in_one_go_is_the_same_as_one_after_the_other(
    checkpoint: Checkpoint, vocabulary: Vocabulary, shape: tuple[int, int]
) -> None:
    picture = np.random.default_rng(1).integers(0, 256, (*shape, 3), np.uint8)
    size = vocabulary.sizes.nearest(*shape)
    scale = max(size.height / shape[0], size.width / shape[1])
    whole = Image.fromarray(picture).resize((round(shape[1] * scale), round(shape[0] * scale)), 1)
    left, top = round((whole.width - size.width) / 2), round((whole.height - size.height) / 2)
    right = np.asarray(whole.crop((left, top, left + size.width, top + size.height)), int)
    read = References(checkpoint, vocabulary.sizes).read(picture, torch.zeros(1)).pixels
    assert np.abs((read.permute(1, 2, 0).numpy() + 1) * 127.5 - right).max() <= 1.01


def test_a_picture_of_one_row_needs_no_memory_beyond_its_size(checkpoint: Checkpoint, vocabulary: Vocabulary) -> None:
    picture = np.full((1, 1 << 20, 3), 128, np.uint8)
    read = References(checkpoint, vocabulary.sizes).read(picture, torch.zeros(1))
    assert read.pixels.shape == (3, 128, 512)


def test_a_picture_of_a_listed_size_stays_as_it_is(checkpoint: Checkpoint, vocabulary: Vocabulary) -> None:
    picture = pictures()["a"]
    read = References(checkpoint, vocabulary.sizes).read(picture, torch.zeros(8, 8, 32))
    assert np.abs((read.pixels.permute(1, 2, 0).numpy() + 1) * 127.5 - picture).max() < 1e-3


def test_noise_of_pictures_is_drawn_in_order(checkpoint: Checkpoint, vocabulary: Vocabulary) -> None:
    references = References(checkpoint, vocabulary.sizes)
    draw = torch.Generator().manual_seed(3)
    right = [torch.randn(1, 8, 8, 32, generator=draw), torch.randn(1, 8, 16, 16, generator=draw)]
    found = references.noise([(128, 512), (256, 256)], torch.Generator().manual_seed(3))
    assert all(torch.equal(one[None], other) for one, other in zip(found, right, strict=True))


def test_content_key_tells_pixels_grid_and_seed_apart(checkpoint: Checkpoint, vocabulary: Vocabulary) -> None:
    references, picture = References(checkpoint, vocabulary.sizes), pictures()["a"]
    grid = references.grid((128, 512))
    changed = picture.copy()
    changed[5, 5, 1] ^= 1
    keys = {
        content_key(picture, grid, 1),
        content_key(picture, grid, 2),
        content_key(changed, grid, 1),
        content_key(picture, grid._replace(ratio=1), 1),
        content_key(picture.reshape(512, 128, 3), grid, 1),
    }
    assert len(keys) == 5
    assert content_key(picture.copy(), grid, 1) in keys

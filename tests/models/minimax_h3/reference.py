"""The same request through diffusers' own pipeline, one at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import ModularPipeline
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from PIL import Image

from tests.models.minimax_h3 import tiny

_KINDS = {"image": 1, "video": 2}


class Outcome(NamedTuple):
    """`calls`: the keyword arguments of each transformer call. Shapes as in an answer."""

    video: np.ndarray
    audio: np.ndarray
    latents: np.ndarray
    audio_latents: np.ndarray
    prompt_embeds: np.ndarray
    calls: list[dict[str, Any]]


class _ClipProcessor:
    """The library's own needs torchvision; this one takes clips that need no resize."""

    temporal_patch_size = 2

    def __call__(self, videos: list[np.ndarray], **options: Any) -> dict[str, torch.Tensor]:
        rows: list[torch.Tensor] = []
        grids: list[list[int]] = []
        for video in videos:
            pixels = torch.from_numpy(np.ascontiguousarray(video)).permute(0, 3, 1, 2).float() / 255.0
            pixels = (pixels - 0.5) / 0.5
            if len(pixels) % 2:
                pixels = torch.cat([pixels, pixels[-1:]])
            frames, _, height, width = pixels.shape
            assert height % 32 == width % 32 == 0
            split = pixels.reshape(frames // 2, 2, 3, height // 32, 2, 16, width // 32, 2, 16)
            rows.append(split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * 16 * 16))
            grids.append([frames // 2, height // 16, width // 16])
        return {"pixel_values_videos": torch.cat(rows), "video_grid_thw": torch.tensor(grids)}


class _Processor:
    def __init__(self, tokenizer: Any) -> None:
        self.image_processor = tiny.image_processor()
        self.video_processor = _ClipProcessor()
        self._kinds = {
            tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>"): i for kind, i in (("image", 1), ("video", 2))
        }

    def create_mm_token_type_ids(self, batches: list[list[int]]) -> list[list[int]]:
        return [[self._kinds.get(token, 0) for token in ids] for ids in batches]


class Reference:
    """Runs requests on the modules that `tiny.build` returned."""

    def __init__(self, folder: str, modules: dict[str, Any]) -> None:
        self._folder = folder
        self._modules = modules
        self._processor = _Processor(modules["tokenizer"])

    def run(self, seed: int, *, pipe: Any = None, **params: Any) -> Outcome:
        """`params` as in a request, with arrays for media and (array, rate) for sounds; one pipeline shell each."""
        pipe = pipe or ModularPipeline.from_pretrained(self._folder)
        pipe.update_components(**self._modules, processor=self._processor)
        pipe.set_progress_bar_config(disable=True)
        shifts = {"scheduler": params.pop("flow_shift", 12.0), "audio_scheduler": params.pop("audio_flow_shift", 3.0)}
        for name, shift in shifts.items():
            self._modules[name].set_shift(shift)
        for name in ("image", "last_image"):
            if name in params:
                params[name] = Image.fromarray(params[name])
        if "references" in params:
            params["references"] = [_reference(item) for item in params["references"]]
        model = self._modules["transformer_ref" if "references" in params else "transformer"]
        calls: list[dict[str, Any]] = []
        hook = model.register_forward_pre_hook(lambda _m, _a, kwargs: calls.append(dict(kwargs)), with_kwargs=True)
        state = pipe(generator=torch.Generator().manual_seed(seed), output_type="pt", **params)
        hook.remove()
        return _outcome(state, calls)


def _reference(item: dict[str, Any]) -> Any:
    if "image" in item:
        return MiniMaxH3ImageReference(image=Image.fromarray(item["image"]))
    wave, rate = item.get("audio", (None, None))
    tensor = None if wave is None else torch.from_numpy(wave)
    if "video" in item:
        return MiniMaxH3VideoReference(frames=item["video"], fps=item.get("fps"), audio=tensor, sample_rate=rate)
    return MiniMaxH3AudioReference(audio=tensor, sample_rate=rate)


def _outcome(state: Any, calls: list[dict[str, Any]]) -> Outcome:
    frames = state.get("videos")[0].float().numpy()
    return Outcome(
        video=(frames * 255).round().astype(np.uint8).transpose(0, 2, 3, 1),
        audio=state.get("audio")[0].numpy(),
        latents=state.get("latents").numpy(),
        audio_latents=state.get("audio_latents").numpy(),
        prompt_embeds=state.get("prompt_embeds")[0].float().numpy(),
        calls=calls,
    )

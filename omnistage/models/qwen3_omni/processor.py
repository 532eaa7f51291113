"""The model's own processor, put together without torchvision, and what it makes of a conversation.

The stock processor class cannot be built without torchvision, whose video processors it insists on. Here videos are
cut into patches with numpy and Pillow by the same rules (frames [T, H, W, 3] uint8 in).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soxr
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoFeatureExtractor, AutoImageProcessor, Qwen3OmniMoeProcessor
from transformers.feature_extraction_utils import BatchFeature
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.video_processing_utils import VideoProcessorMixin

from omnistage.errors import RequestError
from omnistage.models.qwen3_omni.media import MediaItem, MediaSet
from omnistage.ops.pretrained import load_auto_tokenizer
from omnistage.stages.ar.chat_template import read_json

Array = npt.NDArray[Any]
_VIDEO_KEYS = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "size")


class NumpyVideoProcessor(VideoProcessorMixin):  # type: ignore[misc]
    """Frames to patches: resize (bicubic) to whole merge units within the pixel limits of `size`, normalise, cut."""

    model_input_names = ["pixel_values_videos", "video_grid_thw"]

    def __init__(
        self,
        *,
        patch_size: int = 16,
        temporal_patch_size: int = 2,
        merge_size: int = 2,
        image_mean: tuple[float, ...] = (0.5, 0.5, 0.5),
        image_std: tuple[float, ...] = (0.5, 0.5, 0.5),
        size: dict[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.temporal_patch_size = temporal_patch_size
        self.merge_size = merge_size
        self.image_mean = np.array(image_mean, np.float32)
        self.image_std = np.array(image_std, np.float32)
        self.size = size

    def __call__(self, videos: list[Array], size: dict[str, int] | None = None, **_: Any) -> BatchFeature:
        """`size` applies when the checkpoint states none of its own."""
        limits = self.size or size
        pairs = [self._patches(np.asarray(video), limits) for video in videos]
        return BatchFeature(
            {
                "pixel_values_videos": torch.from_numpy(np.concatenate([patches for patches, _ in pairs])),
                "video_grid_thw": torch.tensor([grid for _, grid in pairs]),
            }
        )

    def _patches(self, frames: Array, limits: dict[str, int] | None) -> tuple[Array, tuple[int, int, int]]:
        """float32 [t * h * w, 3 * temporal_patch * patch * patch] in the order of merge units, and (t, h, w)."""
        values = self._resized(frames, limits).astype(np.float32) / np.float32(255)
        values = ((values - self.image_mean) / self.image_std).transpose(0, 3, 1, 2)  # [T, 3, H, W]
        short = -len(values) % self.temporal_patch_size
        values = np.concatenate([values, *[values[-1:]] * short])
        patch, merge, span = self.patch_size, self.merge_size, self.temporal_patch_size
        grid = (len(values) // span, values.shape[2] // patch, values.shape[3] // patch)
        split = values.reshape(grid[0], span, 3, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch)
        return split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(math.prod(grid), -1), grid

    def _resized(self, frames: Array, limits: dict[str, int] | None) -> Array:
        height, width = frames.shape[1:3]
        bounds = {"min_pixels": limits["shortest_edge"], "max_pixels": limits["longest_edge"]} if limits else {}
        new = smart_resize(height, width, factor=self.patch_size * self.merge_size, **bounds)
        if new == (height, width):
            return frames
        shape = (new[1], new[0])
        return np.stack([np.asarray(Image.fromarray(one).resize(shape, Image.Resampling.BICUBIC)) for one in frames])


class _Processor(Qwen3OmniMoeProcessor):  # type: ignore[misc]
    """The stock processor, content with any video processor."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == "video_processor" and isinstance(argument, VideoProcessorMixin):
            return VideoProcessorMixin
        return super().check_argument_for_proper_class(argument_name, argument)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt with its media as the model takes them; absent kinds are None.

    `ids` [n]; `pixels` [patches, d] of all images with `image_grids` [images, 3] (t, h, w in patches), likewise
    videos with `video_seconds` [videos] per temporal patch; `mels` holds one [bins, frames] per sound.
    `paired` is True when videos are heard.
    """

    ids: torch.Tensor
    pixels: torch.Tensor | None = None
    image_grids: torch.Tensor | None = None
    video_pixels: torch.Tensor | None = None
    video_grids: torch.Tensor | None = None
    video_seconds: torch.Tensor | None = None
    mels: tuple[torch.Tensor, ...] = ()
    paired: bool = False


class MediaProcessor:
    """Tokenizes prompts and makes features of media, by the files of a checkpoint folder."""

    def __init__(self, path: str, config: Any) -> None:
        self._processor = _Processor(
            image_processor=AutoImageProcessor.from_pretrained(path, backend="pil", local_files_only=True),
            video_processor=NumpyVideoProcessor(**_video_settings(Path(path))),
            feature_extractor=AutoFeatureExtractor.from_pretrained(path, local_files_only=True),
            tokenizer=load_auto_tokenizer(path),
        )
        self._position_rate = config.position_id_per_seconds
        self._n_window = config.audio_config.n_window

    @property
    def tokenizer(self) -> Tokenizer:
        found: Tokenizer = self._processor.tokenizer.backend_tokenizer
        return found

    def prepare(self, text: str, media: MediaSet, arrays: list[Array]) -> Prepared:
        """A prompt whose placeholders stand in the order of `media`. Raises RequestError."""
        paired = any(item.sounds is not None for item in media.items)
        return _prepared(self.features(text, media, arrays), paired=paired)

    def features(self, text: str, media: MediaSet, arrays: list[Array]) -> BatchFeature:
        """What the model's processor gives, a batch of one. Raises RequestError for media that it refuses."""
        kinds: dict[str, list[Any]] = {"audio": [], "image": [], "video": []}
        for item, array in zip(media.items, arrays, strict=True):
            kinds[item.kind].append(self._readable(item, array, media.fps))
        sounds = [item.sounds for item in media.items if item.kind == "audio"]
        options: dict[str, Any] = {"position_id_per_seconds": self._position_rate, "n_window": self._n_window}
        if any(video is not None for video in sounds):
            options |= {"load_audio_from_video": True, "audio_from_video_indices": sounds}
        try:
            return self._processor(
                text=[text],
                images=kinds["image"] or None,
                audio=kinds["audio"] or None,
                videos=kinds["video"] or None,
                videos_kwargs={"fps": media.fps} if kinds["video"] else {},
                return_tensors="pt",
                **options,
            )
        except ValueError as error:
            raise RequestError(f"the model's processor refuses these media: {error}", param="messages") from None

    def _readable(self, item: MediaItem, array: Array, fps: float) -> Any:
        if item.kind == "image":
            return Image.fromarray(array)
        if item.kind == "video":
            return sampled_frames(array, item.rate, fps)
        return self._mono(array, item.rate)

    def _mono(self, audio: Array, rate: float) -> Array:
        """float32 [channels, samples] as one channel at the model's rate."""
        mono = audio.mean(axis=0, dtype=np.float32) if len(audio) > 1 else audio[0]
        wanted = self._processor.feature_extractor.sampling_rate
        resampled: Array = np.array(mono) if rate == wanted else soxr.resample(mono, rate, wanted)
        if not len(resampled):
            raise RequestError("a sound is too short to be heard", param="messages")
        return resampled


def _video_settings(folder: Path) -> dict[str, Any]:
    """How the checkpoint cuts videos. What it says of pictures holds too, except for their size."""
    pictures = read_json(folder / "preprocessor_config.json")
    videos = read_json(folder / "processor_config.json").get("video_processor")
    stated = videos or read_json(folder / "video_preprocessor_config.json")
    settings = {key: value for key, value in pictures.items() if key != "size"} | stated
    return {key: settings[key] for key in _VIDEO_KEYS if key in settings}


def sampled_frames(frames: Array, rate: float, fps: float) -> Array:
    """The frames on show at times 0, 1 / fps, 2 / fps, ...; all of them when they have no rate of their own."""
    if not rate:
        return frames
    count = max(1, round(len(frames) / rate * fps))
    shown = np.floor(np.arange(count) * (rate / fps)).astype(np.int64)
    picked: Array = frames[np.minimum(shown, len(frames) - 1)]
    return picked


def _prepared(features: BatchFeature, *, paired: bool) -> Prepared:
    mels: tuple[torch.Tensor, ...] = ()
    if "input_features" in features:
        lengths = features["feature_attention_mask"].sum(-1).tolist()
        mels = tuple(mel[:, :length] for mel, length in zip(features["input_features"], lengths, strict=True))
    return Prepared(
        ids=features["input_ids"][0],
        pixels=features.get("pixel_values"),
        image_grids=features.get("image_grid_thw"),
        video_pixels=features.get("pixel_values_videos"),
        video_grids=features.get("video_grid_thw"),
        video_seconds=features.get("video_second_per_grid"),
        mels=mels,
        paired=paired,
    )

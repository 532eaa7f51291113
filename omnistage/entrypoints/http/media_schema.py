"""What clients may send to the image, video and action routes, and what they get."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from omnistage.entrypoints.http.schema import Label, Labels
from omnistage.request import RequestMetrics

Prompt = Annotated[str, Meta(min_length=1, max_length=32_768)]
Size = Annotated[str, Meta(pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$")]
Side = Annotated[int, Meta(ge=1, le=16_384)]
Steps = Annotated[int, Meta(ge=1, le=1000)]
Guidance = Annotated[float, Meta(ge=0.0, le=100.0)]
Shift = Annotated[float, Meta(gt=0.0, le=1000.0)]
ImageFormat = Literal["png", "jpeg", "webp"]
DataUrl = Annotated[str, Meta(min_length=1)]
ModelParams = Annotated[dict[str, Any], Meta(max_length=64)]


class DiffusionFields(Labels, kw_only=True):
    """Fields that every diffusion request may have; `params` holds the model's other parameters by their own names."""

    prompt: Prompt
    size: Size | None = None
    height: Side | None = None
    width: Side | None = None
    num_inference_steps: Steps | None = None
    guidance_scale: Guidance | None = None
    flow_shift: Shift | None = None
    negative_prompt: Annotated[str, Meta(max_length=32_768)] | None = None
    params: ModelParams = {}


class ImageFields(DiffusionFields, kw_only=True):
    n: Annotated[int, Meta(ge=1, le=10)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: ImageFormat | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    background: Literal["auto", "opaque"] | None = None
    quality: Literal["auto", "standard"] | None = None
    moderation: Label | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    bot_task: Annotated[str, Meta(max_length=64)] | None = None
    use_system_prompt: Annotated[str, Meta(max_length=32_768)] | None = None


class ImageRequest(ImageFields, kw_only=True):
    """POST /v1/images/generations."""


class ImageEditForm(ImageFields, kw_only=True):
    """POST /v1/images/edits: the text fields; pictures come as file parts `image` or `image[]`."""

    input_fidelity: Label | None = None


class VideoRequest(DiffusionFields, kw_only=True):
    """POST /v1/videos and /v1/videos/sync, as JSON or as a form with the file part `input_reference`.

    `seconds` gives the length where `num_frames` does not; media are data URLs, `references` as the model has them.
    """

    seconds: Annotated[float, Meta(gt=0.0, le=600.0)] | None = None
    num_frames: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    fps: Annotated[float, Meta(gt=0.0, le=240.0)] | None = None
    action: Annotated[dict[str, Any], Meta(max_length=32)] | None = None
    image: DataUrl | None = None
    last_image: DataUrl | None = None
    video: DataUrl | None = None
    references: Annotated[list[dict[str, Any]], Meta(max_length=16)] | None = None


class ActionRequest(DiffusionFields, kw_only=True):
    """POST /v1/actions: `action` holds the model's action keys; its `image` or `video` (data URLs) are what it sees."""

    action: Annotated[dict[str, Any], Meta(max_length=32)]
    fps: Annotated[float, Meta(gt=0.0, le=240.0)] | None = None


class ImageData(msgspec.Struct, kw_only=True):
    b64_json: str | UnsetType = UNSET
    url: str | UnsetType = UNSET
    revised_prompt: str | UnsetType = UNSET


class ImagesAnswer(msgspec.Struct, kw_only=True):
    created: int
    data: list[ImageData]
    background: str
    output_format: str
    quality: str
    size: str
    seed: int | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class ImageEvent(msgspec.Struct, kw_only=True):
    """image_generation.partial_image and .completed, and the image_edit twins."""

    type: str
    b64_json: str
    created_at: int
    size: str
    quality: str
    background: str
    output_format: str
    partial_image_index: int | UnsetType = UNSET
    usage: ImageUsage | UnsetType = UNSET


class ImageTokenDetails(msgspec.Struct, kw_only=True):
    image_tokens: int = 0
    text_tokens: int = 0


class ImageUsage(msgspec.Struct, kw_only=True):
    """Tokens are counted where an AR stage ran; pixels are not tokens here."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: ImageTokenDetails = msgspec.field(default_factory=ImageTokenDetails)


class VideoError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class Video(msgspec.Struct, kw_only=True):
    """A video job, as OpenAI has it. `seconds` and `size` are known exactly once it is completed."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = None
    prompt: str | None = None
    seconds: str
    size: str
    error: VideoError | None = None
    remixed_from_video_id: str | None = None
    seed: int | None = None
    action: list[list[float]] | None = None
    metrics: RequestMetrics | UnsetType = UNSET


class VideoList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class VideoDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


class ActionAnswer(msgspec.Struct, kw_only=True):
    """`data` is [steps][width]; `timing` gives seconds."""

    data: list[list[float]]
    shape: tuple[int, int]
    domain: str | None
    fps: float | None
    seed: int | None
    timing: RequestMetrics

"""A request's parameters, checked against the checkpoint and completed: everything that is known before work starts.

Torch-free: the planner, the reasoner and the generator resolve the same `Ask` from the same plain data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from omnistage.errors import RequestError
from omnistage.models.cosmos3.action import DOMAINS, TIERS, VIEWPOINTS, Canvas, Domain, canvas_for
from omnistage.models.cosmos3.checkpoint import Checkpoint
from omnistage.models.cosmos3.transfer_plan import HINTS, TransferAsk, plan_transfer
from omnistage.ops.step_policy import StepCache
from omnistage.stages.diffusion.parameters import read_parameters

DEFAULT_FRAMES, DEFAULT_HEIGHT, DEFAULT_WIDTH = 189, 720, 1280
DEFAULT_GUIDANCE = 6.0
# Latents that a client brings to start from travel to ports of this prefix and their parameter's name.
START = "start_"

Count = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Interval = tuple[float, float]
Mode = Literal["policy", "forward_dynamics", "inverse_dynamics"]
Source = Literal["", "image", "video"]


class ActionParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The `action` parameter. Its media travel as ports; `raw_actions`, if written inline, is a list of rows."""

    mode: Mode
    chunk_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    domain_name: str
    resolution_tier: int = 480
    view_point: str = "ego_view"


class CosmosParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters as clients send them. `media_shapes` is written by the planner: port name -> array shape."""

    prompt: str
    negative_prompt: str = ""
    num_frames: Count | None = None
    height: Count | None = None
    width: Count | None = None
    size: str | None = None
    fps: Annotated[float, msgspec.Meta(gt=0, le=240)] = 24.0
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, msgspec.Meta(ge=-100, le=100)] | None = None
    condition_frame_indexes_vision: tuple[NonNegative, ...] = (0, 1)
    condition_video_keep: Literal["first", "last"] = "first"
    enable_sound: bool = False
    action: ActionParams | None = None
    use_system_prompt: bool | None = None
    add_resolution_template: bool = True
    add_duration_template: bool = True
    flow_shift: Annotated[float, msgspec.Meta(gt=0, le=1000)] | None = None
    use_karras_sigmas: bool | None = None
    step_cache: StepCache | None = None
    partial_images: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    control_guidance: Annotated[float, msgspec.Meta(ge=-100, le=100)] = 1.0
    guidance_interval: Interval | None = None
    control_guidance_interval: Interval | None = None
    num_video_frames_per_chunk: Count | None = None
    num_conditional_frames: NonNegative = 1
    num_first_chunk_conditional_frames: NonNegative = 0
    media_shapes: dict[str, tuple[int, ...]] = {}


@dataclass(frozen=True, kw_only=True)
class ActionAsk:
    mode: Mode
    chunk: int
    domain: Domain
    view_point: str
    canvas: Canvas


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request, complete. Pixels and frames of the output, latent sizes, which latent frames are clean.

    `source` is the medium that conditions the vision latents. `sound_latents` 0: no sound.
    """

    prompt: str
    negative_prompt: str
    frames: int
    height: int
    width: int
    fps: float
    latent_frames: int
    latent_height: int
    latent_width: int
    steps: int
    guidance: float
    source: Source
    clean_frames: tuple[int, ...]
    keep: Literal["first", "last"]
    sound_latents: int
    action: ActionAsk | None
    transfer: TransferAsk | None
    system_prompt: bool
    resolution_template: bool
    duration_template: bool
    flow_shift: float | None
    karras: bool | None
    step_cache: StepCache | None
    partial_images: int

    @property
    def is_image(self) -> bool:
        return self.frames == 1 and self.transfer is None

    @property
    def branches(self) -> tuple[str, ...]:
        """Documents of a full step: "bare" is the positive branch without control videos."""
        if self.transfer is None:
            return ("cond", "uncond") if self.guidance != 1.0 else ("cond",)
        bare = ("bare",) if self.transfer.control_guidance != 1.0 else ()
        return ("cond", *bare, *(("uncond",) if self.guidance > 1.0 else ()))

    @property
    def texts(self) -> tuple[str, ...]:
        """The branches whose text differs."""
        return ("cond", "uncond") if "uncond" in self.branches else ("cond",)

    def rows(self, patch: int) -> int:
        """Transformer rows of a full step, over all its documents."""
        frame = math.ceil(self.latent_height / patch) * math.ceil(self.latent_width / patch)
        target = self.latent_frames * frame
        actions = self.action.chunk if self.action is not None else 0
        controls = len(self.transfer.hints) * target if self.transfer is not None else 0
        whole = target + self.sound_latents + actions + controls
        return sum(target if branch == "bare" else whole for branch in self.branches)


class Limits(msgspec.Struct, frozen=True):
    """Bounds of the server on one request."""

    max_frames: int
    max_pixels: int


def resolve(given: dict[str, Any], checkpoint: Checkpoint, limits: Limits) -> Ask:
    """Raises RequestError naming the parameter for everything that this checkpoint cannot do."""
    params = read_parameters(CosmosParams, given, hidden=frozenset({"media_shapes"}))
    ask = _resolve(params, checkpoint, limits)
    _check_start(ask, params.media_shapes, checkpoint)
    if ask.partial_images and not ask.is_image:
        raise RequestError("partial_images: only pictures (num_frames 1) have previews", param="partial_images")
    return ask


def _resolve(params: CosmosParams, checkpoint: Checkpoint, limits: Limits) -> Ask:
    _check_exclusive(params)
    if checkpoint.is_distilled:
        _check_distilled(params, checkpoint)
    if params.action is not None:
        return _resolve_action(params, params.action, checkpoint, limits)
    height, width = _size(params, checkpoint.spatial, limits)
    latent_size = (height // checkpoint.spatial, width // checkpoint.spatial)
    if any(port.startswith("control_") for port in params.media_shapes):
        transfer = _transfer(params, checkpoint, limits)
        seed: Source = "video" if "video" in params.media_shapes else ""
        picture = _Picture(transfer.chunk_frames, (height, width), latent_size, (), seed)
        return _ask(params, checkpoint, picture, transfer=transfer)
    frames = params.num_frames or DEFAULT_FRAMES
    _bound(frames, limits)
    clean, source = _vision_condition(params, frames, checkpoint)
    return _ask(params, checkpoint, _Picture(frames, (height, width), latent_size, clean, source))


def _check_start(ask: Ask, shapes: dict[str, tuple[int, ...]], checkpoint: Checkpoint) -> None:
    """Latents that the client brings must be those of the request."""
    vision = (1, checkpoint.channels, ask.latent_frames, ask.latent_height, ask.latent_width)
    makes: dict[str, tuple[int, ...] | None] = {
        "latents": vision if ask.transfer is None else None,
        "sound_latents": (checkpoint.sound_dim, ask.sound_latents) if ask.sound_latents else None,
        "action_latents": (ask.action.chunk, checkpoint.action_dim) if ask.action is not None else None,
    }
    for name, right in makes.items():
        shape = shapes.get(START + name)
        if shape is None:
            continue
        if right is None:
            raise RequestError(f"{name}: this request has no such latents to start from", param=name)
        if shape != right:
            raise RequestError(f"{name} must be {list(right)}, not {list(shape)}", param=name)


class _Picture(NamedTuple):
    """Frames, (height, width) in pixels and in latents, clean latent frames and the medium that they come from."""

    frames: int
    size: tuple[int, int]
    latent_size: tuple[int, int]
    clean: tuple[int, ...]
    source: Source


def _ask(
    params: CosmosParams,
    checkpoint: Checkpoint,
    picture: _Picture,
    *,
    action: ActionAsk | None = None,
    transfer: TransferAsk | None = None,
) -> Ask:
    default_system = True if transfer is not None else checkpoint.default_system_prompt
    default_guidance = 1.0 if checkpoint.is_distilled else DEFAULT_GUIDANCE
    return Ask(
        prompt=params.prompt,
        negative_prompt=params.negative_prompt,
        frames=picture.frames,
        height=picture.size[0],
        width=picture.size[1],
        fps=params.fps,
        latent_frames=(picture.frames - 1) // checkpoint.temporal + 1,
        latent_height=picture.latent_size[0],
        latent_width=picture.latent_size[1],
        steps=params.num_inference_steps or len(checkpoint.distilled_sigmas) or checkpoint.default_steps,
        guidance=params.guidance_scale if params.guidance_scale is not None else default_guidance,
        source=picture.source,
        clean_frames=picture.clean,
        keep=params.condition_video_keep,
        sound_latents=_sound_latents(params, picture.frames, checkpoint),
        action=action,
        transfer=transfer,
        system_prompt=params.use_system_prompt if params.use_system_prompt is not None else default_system,
        resolution_template=params.add_resolution_template,
        duration_template=params.add_duration_template,
        flow_shift=params.flow_shift,
        karras=params.use_karras_sigmas,
        step_cache=params.step_cache,
        partial_images=params.partial_images,
    )


def _resolve_action(params: CosmosParams, action: ActionParams, checkpoint: Checkpoint, limits: Limits) -> Ask:
    if not checkpoint.action_dim:
        raise RequestError("this checkpoint has no action head", param="action")
    for name, value in (("num_frames", params.num_frames), ("height", params.height), ("width", params.width)):
        if value is not None or params.size is not None:
            raise RequestError(f"{name} follows from action and must not be given", param=name)
    domain = _domain(action, checkpoint)
    source: Source = "image" if "image" in params.media_shapes else "video"
    shape = params.media_shapes.get(source)
    if shape is None or (action.mode == "inverse_dynamics" and source == "image"):
        need = "a video" if action.mode == "inverse_dynamics" else "an image or a video"
        raise RequestError(f"action: {action.mode} needs {need}", param="action")
    _check_actions(params, action, domain)
    canvas = canvas_for(shape[-3], shape[-2], action.resolution_tier, checkpoint.spatial)
    frames = action.chunk_size + 1
    _bound(frames, limits)
    latent_frames = (frames - 1) // checkpoint.temporal + 1
    clean = tuple(range(latent_frames)) if action.mode == "inverse_dynamics" else (0,)
    asked = ActionAsk(
        mode=action.mode, chunk=action.chunk_size, domain=domain, view_point=action.view_point, canvas=canvas
    )
    latent_size = (
        max(canvas.content_height // checkpoint.spatial, 1),
        max(canvas.content_width // checkpoint.spatial, 1),
    )
    picture = _Picture(frames, (canvas.height, canvas.width), latent_size, clean, source)
    return _ask(params, checkpoint, picture, action=asked)


def _domain(action: ActionParams, checkpoint: Checkpoint) -> Domain:
    domain = DOMAINS.get(action.domain_name)
    if domain is None:
        known = ", ".join(sorted(DOMAINS))
        raise RequestError(f"action.domain_name {action.domain_name!r} is not one of {known}", param="action")
    if domain.width > checkpoint.action_dim:
        raise RequestError(
            f"action.domain_name {action.domain_name!r} has {domain.width} channels, this checkpoint's action head "
            f"{checkpoint.action_dim}",
            param="action",
        )
    if action.resolution_tier not in TIERS:
        raise RequestError(f"action.resolution_tier must be one of {', '.join(map(str, TIERS))}", param="action")
    if action.view_point not in VIEWPOINTS:
        raise RequestError(f"action.view_point must be one of {', '.join(VIEWPOINTS)}", param="action")
    return domain


def _check_actions(params: CosmosParams, action: ActionParams, domain: Domain) -> None:
    shape = params.media_shapes.get("actions")
    if (action.mode == "forward_dynamics") != (shape is not None):
        raise RequestError("action.raw_actions is needed by forward_dynamics, and by no other mode", param="action")
    if shape is not None and (len(shape) != 2 or shape[0] < 1 or shape[1] != domain.width):
        raise RequestError(f"action.raw_actions must be [rows, {domain.width}], not {list(shape)}", param="action")


def _check_exclusive(params: CosmosParams) -> None:
    media = params.media_shapes
    if "image" in media and "video" in media:
        raise RequestError("give image or video, not both", param="video")
    controls = [port for port in media if port.startswith("control_")]
    if not controls:
        _check_uncontrolled(params)
    elif params.action is not None or "image" in media or params.enable_sound:
        raise RequestError("control_videos take no action, image or sound", param="control_videos")


def _check_uncontrolled(params: CosmosParams) -> None:
    """Without control videos there is nothing to say about them."""
    given, usual = msgspec.structs.asdict(params), msgspec.structs.asdict(CosmosParams(prompt=""))
    for name in ("num_video_frames_per_chunk", "num_conditional_frames", "num_first_chunk_conditional_frames"):
        if given[name] != usual[name]:
            raise RequestError(f"{name} needs control_videos", param=name)
    if params.control_guidance != 1.0 or params.guidance_interval or params.control_guidance_interval:
        raise RequestError("control_guidance and guidance intervals need control_videos", param="control_guidance")


def _check_distilled(params: CosmosParams, checkpoint: Checkpoint) -> None:
    steps = len(checkpoint.distilled_sigmas)
    if params.num_inference_steps not in (None, steps):
        raise RequestError(f"this distilled checkpoint takes {steps} steps", param="num_inference_steps")
    if params.guidance_scale not in (None, 1.0):
        raise RequestError("this distilled checkpoint has its guidance built in: 1.0 only", param="guidance_scale")
    if params.negative_prompt:
        raise RequestError("this distilled checkpoint takes no negative prompt", param="negative_prompt")
    if params.flow_shift is not None or params.use_karras_sigmas is not None:
        raise RequestError("this distilled checkpoint has a fixed schedule", param="flow_shift")
    if params.action is not None or any(port.startswith("control_") for port in params.media_shapes):
        raise RequestError("this distilled checkpoint takes neither action nor control_videos", param="action")


def _size(params: CosmosParams, multiple: int, limits: Limits) -> tuple[int, int]:
    """(height, width) in pixels."""
    height, width = params.height or DEFAULT_HEIGHT, params.width or DEFAULT_WIDTH
    if params.size is not None and params.size != "auto":
        if params.height is not None or params.width is not None:
            raise RequestError("give size or height and width, not both", param="size")
        width, height = _parse_size(params.size)
    for name, side in (("height", height), ("width", width)):
        if side % multiple or side < multiple:
            raise RequestError(f"{name} must be a multiple of {multiple}, not {side}", param=name)
    if height * width > limits.max_pixels:
        raise RequestError(f"{width}x{height} has more than {limits.max_pixels} pixels", param="size")
    return height, width


def _parse_size(size: str) -> tuple[int, int]:
    width, by, height = size.partition("x")
    if not (by and width.isdecimal() and height.isdecimal() and len(size) <= 11):
        raise RequestError(f"size {size!r} is not WIDTHxHEIGHT", param="size")
    return int(width), int(height)


def _bound(frames: int, limits: Limits) -> None:
    if frames > limits.max_frames:
        raise RequestError(f"num_frames {frames} is more than {limits.max_frames}", param="num_frames")


def _vision_condition(params: CosmosParams, frames: int, checkpoint: Checkpoint) -> tuple[tuple[int, ...], Source]:
    """The latent frames that are clean, and the medium that they come from."""
    source: Source = "image" if "image" in params.media_shapes else "video" if "video" in params.media_shapes else ""
    if source and frames == 1:
        raise RequestError(f"{source} needs num_frames > 1", param=source)
    if source != "video":
        return ((0,) if source else ()), source
    indexes = params.condition_frame_indexes_vision
    latent_frames = (frames - 1) // checkpoint.temporal + 1
    if not indexes or max(indexes) >= latent_frames:
        raise RequestError(
            f"condition_frame_indexes_vision must lie within 0..{latent_frames - 1}",
            param="condition_frame_indexes_vision",
        )
    return indexes, source


def _sound_latents(params: CosmosParams, frames: int, checkpoint: Checkpoint) -> int:
    if not params.enable_sound:
        return 0
    if not checkpoint.sound_dim or frames == 1:
        why = "this checkpoint makes no sound" if frames > 1 else "an image has no sound"
        raise RequestError(f"enable_sound: {why}", param="enable_sound")
    samples = int(frames / params.fps * checkpoint.sound_rate)
    return -(-samples // checkpoint.sound_hop)


def _transfer(params: CosmosParams, checkpoint: Checkpoint, limits: Limits) -> TransferAsk:
    hints = tuple(hint for hint in HINTS if f"control_{hint}" in params.media_shapes)
    given = params.media_shapes[f"control_{hints[0]}"][0]
    total = min(given, params.num_frames or given)
    _bound(total, limits)
    if bool(params.num_first_chunk_conditional_frames) != ("video" in params.media_shapes):
        raise RequestError(
            "num_first_chunk_conditional_frames and video need each other", param="num_first_chunk_conditional_frames"
        )
    return plan_transfer(
        hints=hints,
        total_frames=total,
        frames_per_chunk=params.num_video_frames_per_chunk,
        overlap=params.num_conditional_frames,
        first_overlap=params.num_first_chunk_conditional_frames,
        temporal=checkpoint.temporal,
        guidance=(params.control_guidance, params.guidance_interval, params.control_guidance_interval),
    )

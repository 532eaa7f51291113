"""The parameters of a request, checked and completed. Torch-free.

`choose_task` is the only place that picks the task; everything that depends on it starts from its answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from omnistage.errors import RequestError
from omnistage.models.minimax_h3 import geometry
from omnistage.models.minimax_h3.checkpoint import Checkpoint, Partition
from omnistage.ops.step_policy import StepCache
from omnistage.stages.diffusion.parameters import read_parameters

Task = Literal["t2va", "fl2va", "ref2va"]
Kind = Literal["image", "video", "audio"]
Anchor = Literal["first", "last"]

TASKS: tuple[Task, ...] = ("t2va", "fl2va", "ref2va")
DEFAULT_FRAMES = 124
DEFAULT_STEPS = 50
MAX_OF_KIND: dict[Kind, int] = {"image": 9, "video": 3, "audio": 3}
MAX_REFERENCES = 12
MIN_REFERENCE_FRAMES = 13
# These tokens stand for media rows; a prompt that spells them would claim rows that no medium has.
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
_SIZE = re.compile(r"(?P<width>[1-9][0-9]{0,4})x(?P<height>[1-9][0-9]{0,4})")
KEYFRAMES: tuple[tuple[str, Anchor], ...] = (("image", "first"), ("last_image", "last"))

Side = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Shift = Annotated[float, msgspec.Meta(gt=0, le=1000)]
Shape = tuple[int, ...]


class Reference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reference medium. `shape`: image [H, W, 3], video [T, H, W, 3] or audio [channels, samples].

    `sound` is the shape of the sound that belongs to a video. `sample_rate` None: the rate of the audio autoencoder.
    """

    kind: Kind
    shape: Shape
    fps: Annotated[float, msgspec.Meta(gt=0, le=1000)] = float(geometry.FPS)
    sound: Shape | None = None
    sample_rate: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None

    @property
    def has_sound(self) -> bool:
        return self.kind == "audio" or self.sound is not None

    @property
    def sound_shape(self) -> Shape | None:
        return self.shape if self.kind == "audio" else self.sound


class H3Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client may say, and (last) the shapes of its media, which the planner adds."""

    prompt: str
    task: Task | None = None
    height: Side | None = None
    width: Side | None = None
    size: str | None = None
    num_frames: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    num_inference_steps: Annotated[int, msgspec.Meta(ge=2, le=1000)] = DEFAULT_STEPS
    flow_shift: Shift | None = None
    audio_flow_shift: Shift | None = None
    step_cache: StepCache | None = None
    references: tuple[Reference, ...] = ()
    media_shapes: dict[str, Shape] = {}


HIDDEN = frozenset({"media_shapes"})


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request, complete. Pixels and frames of the output, latent sizes; `own_*`: noise that the client brings."""

    prompt: str
    task: Task
    height: int
    width: int
    frames: int
    latent_frames: int
    latent_height: int
    latent_width: int
    audio_latents: int
    steps: int
    flow_shift: float
    audio_flow_shift: float
    step_cache: StepCache | None
    anchors: tuple[Anchor, ...]
    references: tuple[Reference, ...]
    own_latents: bool
    own_audio_latents: bool

    @property
    def partition(self) -> Partition:
        return "transformer_ref" if self.task == "ref2va" else "transformer"


def choose_task(params: H3Params) -> Task:
    """The task that the inputs ask for. Raises RequestError when `task` says something else."""
    keyframes = [name for name, _ in KEYFRAMES if name in params.media_shapes]
    if params.references and keyframes:
        raise RequestError(f"references cannot be combined with {keyframes[0]}", param="references")
    task: Task = "ref2va" if params.references else "fl2va" if keyframes else "t2va"
    if params.task not in (None, task):
        needs = {"t2va": "no media", "fl2va": "image or last_image", "ref2va": "references"}
        raise RequestError(f"task {params.task} takes {needs[str(params.task)]}; these inputs are {task}", param="task")
    return task


def resolve(given: dict[str, Any], checkpoint: Checkpoint, max_pixels: int) -> Ask:
    """Raises RequestError naming the parameter for whatever this checkpoint cannot do."""
    params = read_parameters(H3Params, given, hidden=HIDDEN)
    task = choose_task(params)
    _check_prompt(params.prompt, task)
    frames = _frames(params, task, checkpoint)
    height, width = _size(params, checkpoint, max_pixels)
    _check_references(params.references, checkpoint)
    ask = Ask(
        prompt=params.prompt,
        task=task,
        height=height,
        width=width,
        frames=frames,
        latent_frames=geometry.latent_frames(frames, checkpoint.clip_frames, checkpoint.clip_latents),
        latent_height=height // checkpoint.spatial,
        latent_width=width // checkpoint.spatial,
        audio_latents=geometry.audio_latents(frames),
        steps=params.num_inference_steps,
        flow_shift=params.flow_shift or checkpoint.flow_shift,
        audio_flow_shift=params.audio_flow_shift or checkpoint.audio_flow_shift,
        step_cache=params.step_cache,
        anchors=tuple(anchor for name, anchor in KEYFRAMES if name in params.media_shapes),
        references=params.references,
        own_latents="latents" in params.media_shapes,
        own_audio_latents="audio_latents" in params.media_shapes,
    )
    _check_own_noise(ask, params.media_shapes, checkpoint)
    if ask.partition not in checkpoint.partitions:
        raise RequestError(f"this deployment has no {ask.partition}, which {task} needs", param="task")
    return ask


def _check_prompt(prompt: str, task: Task) -> None:
    if not prompt and task == "t2va":
        raise RequestError("prompt must not be empty", param="prompt")
    for token in (IMAGE_PAD, VIDEO_PAD):
        if token in prompt:
            raise RequestError(f"prompt must not contain {token}", param="prompt")


def _frames(params: H3Params, task: Task, checkpoint: Checkpoint) -> int:
    if params.num_frames is None and task == "ref2va":
        raise RequestError("num_frames is required with references", param="num_frames")
    asked = params.num_frames or DEFAULT_FRAMES
    frames = geometry.aligned_frames(asked, checkpoint.clip_frames, checkpoint.clip_latents)
    if not geometry.MIN_FRAMES <= frames <= geometry.MAX_FRAMES:
        raise RequestError(
            f"num_frames {asked} becomes {frames} ({checkpoint.clip_frames} n + {checkpoint.clip_latents}), which must "
            f"lie within {geometry.MIN_FRAMES}..{geometry.MAX_FRAMES}",
            param="num_frames",
        )
    return frames


def _size(params: H3Params, checkpoint: Checkpoint, max_pixels: int) -> tuple[int, int]:
    """(height, width) in pixels."""
    height, width = _given_size(params)
    if height is None or width is None:
        height, width = _canvas(params, checkpoint)
    for name, side in (("height", height), ("width", width)):
        if side % checkpoint.multiple:
            raise RequestError(f"{name} must be a multiple of {checkpoint.multiple}, not {side}", param=name)
    if height * width > max_pixels:
        raise RequestError(f"{width}x{height} has more than {max_pixels} pixels", param="height")
    return height, width


def _given_size(params: H3Params) -> tuple[int | None, int | None]:
    if params.size not in (None, "auto"):
        if params.height is not None or params.width is not None:
            raise RequestError("give size or height and width, not both", param="size")
        return parse_size(str(params.size))
    if (params.height is None) != (params.width is None):
        missing = "height" if params.height is None else "width"
        raise RequestError("height and width must be given together, or neither", param=missing)
    return params.height, params.width


def parse_size(size: str) -> tuple[int, int]:
    """(height, width) of "WIDTHxHEIGHT". Raises RequestError."""
    match = _SIZE.fullmatch(size)
    if match is None:
        raise RequestError(f"size {size[:40]!r} is not WIDTHxHEIGHT", param="size")
    return int(match["height"]), int(match["width"])


def _canvas(params: H3Params, checkpoint: Checkpoint) -> tuple[int, int]:
    """The canvas of the first keyframe's ratio, else of 16:9."""
    for name, _ in KEYFRAMES:
        if name in params.media_shapes:
            high, wide, _ = params.media_shapes[name]
            return canvas_of(wide, high, checkpoint, name)
    return canvas_of(16, 9, checkpoint, "size")


def canvas_of(width: int, height: int, checkpoint: Checkpoint, param: str) -> tuple[int, int]:
    """(height, width) of the canvas for a ratio. Raises RequestError naming `param`."""
    try:
        return geometry.canvas(
            width,
            height,
            multiple=checkpoint.multiple,
            short_edge=checkpoint.canvas_short_edge,
            max_pixels=checkpoint.canvas_max_pixels,
        )
    except ValueError as error:
        raise RequestError(f"{param}: {error}", param=param) from None


def _check_references(references: tuple[Reference, ...], checkpoint: Checkpoint) -> None:
    kinds = [reference.kind for reference in references]
    for kind, most in MAX_OF_KIND.items():
        if kinds.count(kind) > most:
            raise RequestError(f"at most {most} {kind} references, not {kinds.count(kind)}", param="references")
    if len(kinds) > MAX_REFERENCES:
        raise RequestError(f"at most {MAX_REFERENCES} references, not {len(kinds)}", param="references")
    if kinds and set(kinds) == {"audio"}:
        raise RequestError("audio references need an image or a video beside them", param="references")
    for reference in references:
        _check_reference(reference, checkpoint)


def _check_reference(reference: Reference, checkpoint: Checkpoint) -> None:
    if reference.kind != "audio":
        high, wide, _ = reference.shape[-3:]
        canvas_of(wide, high, checkpoint, "references")
    if reference.kind == "video":
        held = int(reference.shape[0] * geometry.FPS / reference.fps + 0.5)
        if held < MIN_REFERENCE_FRAMES:
            raise RequestError(
                f"a reference video must last {MIN_REFERENCE_FRAMES} frames at {geometry.FPS} fps, not {held}",
                param="references",
            )
    shape = reference.sound_shape
    if shape is not None and (shape[0] not in (1, geometry.STEREO) or shape[1] < 1):
        raise RequestError("reference sound must be mono or stereo and not empty", param="references")


def _check_own_noise(ask: Ask, shapes: dict[str, Shape], checkpoint: Checkpoint) -> None:
    right = {
        "latents": (1, checkpoint.channels, ask.latent_frames, ask.latent_height, ask.latent_width),
        "audio_latents": (geometry.STEREO, checkpoint.audio_channels, ask.audio_latents),
    }
    for name, shape in right.items():
        if name in shapes and shapes[name] != shape:
            raise RequestError(f"{name} must be {list(shape)}, not {list(shapes[name])}", param=name)

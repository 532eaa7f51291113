"""The painter as a diffusion stage: any requests and both guidance branches share a call, step caches per request."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnistage.config.model import StageContext
from omnistage.errors import ConfigError, RequestError
from omnistage.models.tiny_shapes.captions import caption, read_prompt, tokens
from omnistage.models.tiny_shapes.drawing import SIDE, Attributes
from omnistage.models.tiny_shapes.network import (
    CHANNELS,
    HIDDEN_TOKENS,
    HIDDEN_WIDTH,
    ROWS,
    HiddenPainter,
    Painter,
    load_weights,
)
from omnistage.ops.device import choose_device
from omnistage.ops.step_cache import CacheMemory, CacheTurn, Selection, StepCache, cached_stack
from omnistage.payload import MultimodalPayload
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.diffusion.model import PARTIAL_PORT, Capabilities, DiffusionModel, Preview, Produced
from omnistage.stages.diffusion.parameters import read_parameters
from omnistage.stages.diffusion.previews import preview_is_due
from omnistage.stages.diffusion.step_caching import stage_cache, with_stage_cache

WEIGHTS = Path(__file__).parent / "weights" / "painter.safetensors"
HIDDEN_WEIGHTS = WEIGHTS.with_name("hidden_painter.safetensors")
MAX_SIDE = 1024
_SIZE = re.compile(r"(?P<width>[0-9]{1,4})x(?P<height>[0-9]{1,4})")
_PORTS = ("image", "latents")


class PainterParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sides in pixels, multiples of 32: the picture of 32 x 32 is enlarged by repeating pixels."""

    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 20
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.3
    size: str | None = None
    height: int | None = None
    width: int | None = None
    partial_images: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    step_cache: StepCache | None = None


@dataclass
class PainterState:
    """`waiting`: input ports that have not delivered. `hidden` [1, 11, width]: states of a language model, if it is
    one that conditions; `words` [branches, tokens, ...]: the condition, guided branch first.

    `picture`, `velocity` [1, 3, 32, 32].
    """

    request: StageRequest
    params: PainterParams
    size: tuple[int, int]
    waiting: set[str]
    prompt: str = ""
    asked: Attributes | None = None
    hidden: Tensor | None = None
    words: Tensor | None = None
    picture: Tensor | None = None
    velocity: Tensor | None = None
    memory: CacheMemory = field(default_factory=CacheMemory)
    step: int = 0
    done: bool = False

    @property
    def branches(self) -> int:
        return 1 if self.params.guidance_scale == 1.0 else 2

    def time(self, step: int) -> float:
        """From 1 (noise) down to 0."""
        return 1.0 - step / self.params.num_inference_steps


class PainterModel:
    """`DiffusionModel` over the network."""

    capabilities = Capabilities(partial_images=True)

    def __init__(self, network: Painter, device: torch.device, cache: StepCache | None = None) -> None:
        self._network = network
        self._device = device
        self._cache = cache

    def open(self, request: StageRequest) -> PainterState:
        params = read_parameters(PainterParams, with_stage_cache(request.params, self._cache))
        return PainterState(request=request, params=params, size=read_size(params), waiting=set(request.inputs))

    def feed(self, state: PainterState, chunk: InputChunk) -> None:
        if chunk.port == "text":
            prompt = state.prompt + str(chunk.payload.meta.get("text", ""))
            if chunk.final:
                state.asked = read_prompt(prompt)
            state.prompt = prompt
        elif "hidden" in chunk.payload.tensors:
            state.hidden = _hidden(chunk.payload["hidden"])
        if chunk.final:
            state.waiting.discard(chunk.port)
        chunk.payload.release()

    def ready(self, state: PainterState) -> bool:
        return not state.waiting

    def encode(self, states: list[PainterState]) -> None:
        for state in states:
            assert state.asked is not None
            guided = torch.tensor([tokens(state.asked)]) if state.hidden is None else state.hidden
            state.words = torch.cat([guided, torch.zeros_like(guided)][: state.branches]).to(self._device)

    def prepare(self, state: PainterState) -> None:
        generator = torch.Generator().manual_seed(state.request.seed)
        state.picture = torch.randn(1, CHANNELS, SIDE, SIDE, generator=generator).to(self._device)

    def group(self, state: PainterState) -> Hashable:
        return None

    def rows(self, state: PainterState) -> int:
        return ROWS * state.branches

    def remaining(self, state: PainterState) -> int:
        return state.params.num_inference_steps - state.step

    @torch.inference_mode()
    def denoise(self, states: list[PainterState]) -> None:
        velocities, memories = self._velocities(states)
        moved = []
        for state, velocity in zip(states, velocities, strict=True):
            moved.append(picture_of(state) + (state.time(state.step + 1) - state.time(state.step)) * velocity)
        for state, picture, velocity, memory in zip(states, moved, velocities, memories, strict=True):
            state.picture, state.velocity, state.memory = picture, velocity, memory
            state.step += 1

    def _velocities(self, states: list[PainterState]) -> tuple[list[Tensor], list[CacheMemory]]:
        """Guided velocities [1, 3, 32, 32]; one run of the stack for all documents that need it."""
        network = self._network
        counts = [state.branches for state in states]
        pictures = torch.cat([picture_of(state).expand(state.branches, -1, -1, -1) for state in states])
        words = torch.cat([state.words for state in states if state.words is not None])
        times = torch.tensor([state.time(state.step) for state in states], device=self._device)
        time = network.time(times.repeat_interleave(torch.tensor(counts, device=self._device)))
        rows, modulation = network.embed(pictures, words), network.modulations(time)

        def signal(first: int, last: int) -> Tensor:
            watched: Tensor = network.blocks[0].modulated(rows[first:last], modulation[first:last])  # type: ignore[operator]
            return watched

        def stack(part: Tensor, chosen: Selection) -> Tensor:
            return network.stack(part, chosen.of(modulation))

        output, memories = cached_stack(stack, rows, signal, counts, [_turn(state) for state in states])
        raw = torch.split(network.head(output, time), counts)
        return [_guided(part, state.params.guidance_scale) for part, state in zip(raw, states, strict=True)], memories

    def preview(self, state: PainterState) -> Preview | None:
        """The clean picture as it is expected after this step."""
        count, steps = state.params.partial_images, state.params.num_inference_steps
        if state.velocity is None or not preview_is_due(state.step, steps, count):
            return None
        expected = picture_of(state) - state.time(state.step) * state.velocity
        size, meta = state.size, {"step": state.step, "steps": steps}
        return lambda: Produced(port=PARTIAL_PORT, payload=MultimodalPayload.of(meta, image=drawn(expected, size)))

    def decode_group(self, state: PainterState) -> Hashable:
        return state.request.request_id

    def decode(self, states: list[PainterState]) -> list[list[Produced]]:
        made = [_outputs(state) for state in states]
        for state in states:
            state.done = True
        return made

    def done(self, state: PainterState) -> bool:
        return state.done

    def metrics(self, state: PainterState) -> dict[str, float]:
        return {"skipped_steps": float(state.memory.skipped)}

    def close(self, state: PainterState) -> None:
        state.picture = state.velocity = state.words = state.hidden = None
        state.memory = state.memory.emptied()

    def shutdown(self) -> None:
        """Holds nothing beyond the network."""


def _hidden(states: npt.NDArray[np.float32]) -> Tensor:
    """[tokens, width] to [1, tokens, width]. Raises RequestError for states that the painter was not trained on."""
    if states.shape != (HIDDEN_TOKENS, HIDDEN_WIDTH):
        raise RequestError(
            f"hidden states must be {HIDDEN_TOKENS} x {HIDDEN_WIDTH}, not {states.shape}", param="prompt"
        )
    return torch.from_numpy(states.astype(np.float32))[None]


def read_size(params: PainterParams) -> tuple[int, int]:
    """(height, width) in pixels. Raises RequestError naming the parameter."""
    if params.size in (None, "auto"):
        height, width = params.height or SIDE, params.width or SIDE
        _check_side("height", height, "height")
        _check_side("width", width, "width")
        return height, width
    if params.height is not None or params.width is not None:
        raise RequestError("give size or height and width, not both", param="size")
    match = _SIZE.fullmatch(str(params.size))
    if match is None:
        raise RequestError(f"size {str(params.size)[:40]!r} is not WIDTHxHEIGHT", param="size")
    height, width = int(match["height"]), int(match["width"])
    _check_side("height", height, "size")
    _check_side("width", width, "size")
    return height, width


def _check_side(name: str, side: int, param: str) -> None:
    if side % SIDE or not SIDE <= side <= MAX_SIDE:
        raise RequestError(f"{name} must be a multiple of {SIDE} up to {MAX_SIDE}, not {side}", param=param)


def picture_of(state: PainterState) -> Tensor:
    """Raises RuntimeError before `prepare`."""
    if state.picture is None:
        raise RuntimeError("a request must be prepared before its first step")
    return state.picture


def drawn(picture: Tensor, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """[1, 3, 32, 32] in -1..1 to uint8 [1, H, W, 3]."""
    pixels = ((picture.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return pixels.repeat(size[0] // SIDE, axis=1).repeat(size[1] // SIDE, axis=2)


def _guided(velocity: Tensor, scale: float) -> Tensor:
    if len(velocity) == 1:
        return velocity
    guided, free = velocity[:1], velocity[1:]
    return free + scale * (guided - free)


def _turn(state: PainterState) -> CacheTurn:
    return CacheTurn(state.params.step_cache, state.memory, state.step, state.params.num_inference_steps)


def _outputs(state: PainterState) -> list[Produced]:
    picture = picture_of(state)
    assert state.asked is not None
    made = {
        "image": MultimodalPayload.of({"caption": caption(state.asked)}, image=drawn(picture, state.size)),
        "latents": MultimodalPayload.of({}, latents=picture.cpu().numpy()),
    }
    return [Produced(port=port, payload=made[port], final=True) for port in _PORTS if port in state.request.outputs]


def painter(context: StageContext) -> DiffusionModel[PainterState]:
    """The stage's component, conditioned on words."""
    network = Painter()
    load_weights(network, WEIGHTS)
    return _model(context, network)


def hidden_painter(context: StageContext) -> DiffusionModel[PainterState]:
    """The stage's component, conditioned on the hidden states of the thinker."""
    network = HiddenPainter()
    load_weights(network, HIDDEN_WEIGHTS)
    return _model(context, network)


def _model(context: StageContext, network: Painter) -> PainterModel:
    """The network is so small that it always computes in float32 and with SDPA."""
    stage = context.stage
    for key, value, known in (
        ("dtype", stage.dtype, ("auto", "float32")),
        ("attention_backend", stage.attention_backend, ("auto", "TORCH_SDPA")),
    ):
        if value not in known:
            name = f"stages.{stage.name}.{key}"
            raise ConfigError(f"{name}: {value} is not supported here; use {known[1]}", param=name)
    device = choose_device(stage.device)
    return PainterModel(network.to(device), device, stage_cache(stage.options))

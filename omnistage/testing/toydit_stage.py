"""The stage of toydit: a closed-form denoiser behind the contract of the diffusion engine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable

import msgspec
import numpy as np
import numpy.typing as npt

from omnistage.config.model import StageContext
from omnistage.errors import RequestError
from omnistage.payload import MultimodalPayload
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.diffusion.model import PARTIAL_PORT, Capabilities, DiffusionModel, Preview, Produced
from omnistage.testing.knobs import pause

PATCH = 8
MAX_SIDE = 1024
MAX_STEPS = 1000

Latents = npt.NDArray[np.float64]


class ToyParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one picture. Sides in pixels, multiples of 8; `partial_images` previews lie evenly in the steps."""

    negative_prompt: str = ""
    height: int = 32
    width: int = 32
    num_inference_steps: int = 4
    guidance_scale: float = 3.0
    partial_images: int = 0


def target(prompt: str, height: int, width: int) -> Latents:
    """[H, W, 3] in 0..1: a plane wave per channel; direction, period and phase from the prompt's hash."""
    numbers = np.frombuffer(hashlib.sha256(prompt.encode()).digest(), np.uint8).astype(np.float64) / 255
    y, x = np.mgrid[0:height, 0:width]
    waves = [numbers[3 * c] * y / 4 + numbers[3 * c + 1] * x / 4 + numbers[3 * c + 2] * 2 * math.pi for c in range(3)]
    pattern: Latents = 0.5 + 0.3 * np.sin(np.stack(waves, -1))
    return pattern


def noise(seed: int, height: int, width: int) -> Latents:
    """[H, W, 3] standard normal noise of a seed."""
    return np.random.default_rng(seed & (2**63 - 1)).standard_normal((height, width, 3))


def guided(prompt: str, params: ToyParams) -> Latents:
    """Where the denoiser heads: negative + guidance * (positive - negative), [H, W, 3]."""
    positive = target(prompt, params.height, params.width)
    negative = target(params.negative_prompt, params.height, params.width)
    return negative + params.guidance_scale * (positive - negative)


def latents_of(prompt: str, params: ToyParams, seed: int) -> Latents:
    """Final latents: goal + (noise - goal) * (n / (n + 1)) ** n for n steps, [H, W, 3]."""
    goal = guided(prompt, params)
    n = params.num_inference_steps
    return goal + (noise(seed, params.height, params.width) - goal) * (n / (n + 1)) ** n


def picture_of_latents(latents: Latents) -> npt.NDArray[np.uint8]:
    """uint8 [1, H, W, 3]."""
    return (latents.clip(0, 1) * 255).round().astype(np.uint8)[None]


def picture(prompt: str, params: ToyParams, seed: int) -> npt.NDArray[np.uint8]:
    """The picture that toydit draws, uint8 [1, H, W, 3]."""
    return picture_of_latents(latents_of(prompt, params, seed))


class ToyState:
    """One request; `goal` and `latents` [H, W, 3] exist from `encode` and `prepare` on."""

    def __init__(self, params: ToyParams, request: StageRequest) -> None:
        self.params = params
        self.request = request
        self.prompt = ""
        self.complete = False
        self.goal: Latents | None = None
        self.latents: Latents | None = None
        self.step = 0
        self.done = False


class ToyDiT:
    """Steps every request of a batch towards its goal by 1 / (steps + 1) of the way left."""

    capabilities = Capabilities(partial_images=True, batched_decode=True)

    def __init__(self, step_delay_s: float = 0.0, decode_delay_s: float = 0.0) -> None:
        self._step_delay_s = step_delay_s
        self._decode_delay_s = decode_delay_s

    def open(self, request: StageRequest) -> ToyState:
        try:
            params = msgspec.convert(request.params, ToyParams)
        except msgspec.ValidationError as error:
            raise RequestError(str(error), param=_name_in(str(error))) from None
        for name, side in (("height", params.height), ("width", params.width)):
            if not 0 < side <= MAX_SIDE or side % PATCH:
                raise RequestError(f"{name} must be a multiple of {PATCH} up to {MAX_SIDE}, not {side}", param=name)
        if not 0 <= params.num_inference_steps <= MAX_STEPS:
            raise RequestError(f"num_inference_steps must be 0..{MAX_STEPS}", param="num_inference_steps")
        return ToyState(params, request)

    def feed(self, state: ToyState, chunk: InputChunk) -> None:
        state.prompt += str(chunk.payload.meta.get("text", ""))
        state.complete = chunk.final
        chunk.payload.release()

    def ready(self, state: ToyState) -> bool:
        return state.complete

    def encode(self, states: list[ToyState]) -> None:
        goals = [guided(state.prompt, state.params) for state in states]
        for state, goal in zip(states, goals, strict=True):
            state.goal = goal

    def prepare(self, state: ToyState) -> None:
        state.latents = noise(state.request.seed, state.params.height, state.params.width)

    def group(self, state: ToyState) -> Hashable:
        return None

    def rows(self, state: ToyState) -> int:
        branches = 1 if state.params.guidance_scale == 1.0 else 2
        return branches * (state.params.height // PATCH) * (state.params.width // PATCH)

    def remaining(self, state: ToyState) -> int:
        return state.params.num_inference_steps - state.step

    def denoise(self, states: list[ToyState]) -> None:
        pause(self._step_delay_s)
        moved = [_moved(state) for state in states]
        for state, latents in zip(states, moved, strict=True):
            state.latents = latents
            state.step += 1

    def preview(self, state: ToyState) -> Preview | None:
        count, steps = state.params.partial_images, state.params.num_inference_steps
        due = {steps * (i + 1) // (count + 1) for i in range(count)}
        snapshot = state.latents
        if state.step not in due or snapshot is None:
            return None
        meta = {"step": state.step, "steps": steps}
        return lambda: Produced(
            port=PARTIAL_PORT, payload=MultimodalPayload.of(meta, image=picture_of_latents(snapshot))
        )

    def decode_group(self, state: ToyState) -> Hashable:
        return (state.params.height, state.params.width)

    def decode(self, states: list[ToyState]) -> list[list[Produced]]:
        pause(self._decode_delay_s)
        produced = [_outputs(state) for state in states]
        for state in states:
            state.done = True
        return produced

    def done(self, state: ToyState) -> bool:
        return state.done

    def metrics(self, state: ToyState) -> dict[str, float]:
        return {"pixels": float(state.params.height * state.params.width)}

    def close(self, state: ToyState) -> None:
        state.latents = state.goal = None

    def shutdown(self) -> None:
        """Holds nothing."""


def _moved(state: ToyState) -> Latents:
    if state.latents is None or state.goal is None:
        raise RuntimeError("a request must be prepared before its first step")
    moved: Latents = state.latents + (state.goal - state.latents) / (state.params.num_inference_steps + 1)
    return moved


def _outputs(state: ToyState) -> list[Produced]:
    if state.latents is None:
        raise RuntimeError("a request must be prepared before it is decoded")
    made = {"image": MultimodalPayload.of(image=picture_of_latents(state.latents))}
    made["latents"] = MultimodalPayload.of(latents=state.latents.astype(np.float32))
    return [
        Produced(port=port, payload=payload, final=True)
        for port, payload in made.items()
        if port in state.request.outputs
    ]


def _name_in(message: str) -> str | None:
    """The field that a msgspec message speaks of: "... `$.width`" or "... unknown field `widht`"."""
    quoted = message.split("`")
    return quoted[-2].removeprefix("$.") if len(quoted) > 2 else None


def dit(context: StageContext) -> DiffusionModel[ToyState]:
    return ToyDiT(float(context.stage.options["step_delay_s"]), float(context.stage.options["decode_delay_s"]))

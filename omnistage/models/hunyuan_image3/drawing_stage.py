"""The stage `dit`: draws and edits pictures, from the text stage's thoughts or from the prompt alone."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from omnistage.config.model import StageContext
from omnistage.errors import ErrorCode, RequestError
from omnistage.models.hunyuan_image3 import kv_payload
from omnistage.models.hunyuan_image3.ask import TRIGGERS, read_ask
from omnistage.models.hunyuan_image3.attention import KeysValues, cut_pieces
from omnistage.models.hunyuan_image3.checkpoint import Checkpoint, read_checkpoint
from omnistage.models.hunyuan_image3.components import Components
from omnistage.models.hunyuan_image3.denoiser import Denoiser, guided
from omnistage.models.hunyuan_image3.flight import Branch, Drawing, Flight, Thoughts
from omnistage.models.hunyuan_image3.layout import (
    Canvas,
    Conversation,
    Flags,
    Layout,
    Renderer,
    common_prefix,
    without_thinking,
)
from omnistage.models.hunyuan_image3.prompts import Prompts, PromptWork
from omnistage.models.hunyuan_image3.references import Reference, References
from omnistage.models.hunyuan_image3.rotary import positions
from omnistage.models.hunyuan_image3.schedule import Schedule
from omnistage.models.hunyuan_image3.vocabulary import Vocabulary
from omnistage.ops.device import choose_device
from omnistage.ops.dtype import choose_dtype
from omnistage.ops.finite import finite
from omnistage.ops.paged_attention import attention_implementation
from omnistage.payload import Array, MultimodalPayload
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.diffusion.model import PARTIAL_PORT, Capabilities, DiffusionModel, Preview, Produced
from omnistage.stages.diffusion.previews import preview_is_due

MEDIA, THOUGHTS, KV = "media", "thoughts", "kv"
_OWN_PORTS = ("image", "latents")


class Drawer:
    """`DiffusionModel` of the family: requests of any size, step count and guidance share a call."""

    capabilities = Capabilities(partial_images=True, batched_decode=True)

    def __init__(self, components: Components, vocabulary: Vocabulary) -> None:
        self._checkpoint: Checkpoint = components.checkpoint
        self._components = components
        self._vocabulary = vocabulary
        self._references = References(components.checkpoint, vocabulary.sizes)
        self._prompts = Prompts(components)
        self._denoiser = Denoiser(components)
        self._decoder = components.vae_decoder()
        self._rotary = components.rotary

    # -- before the first step

    def open(self, request: StageRequest) -> Flight:
        ask = read_ask(request.params)
        flight = Flight(request, ask, torch.Generator().manual_seed(request.seed))
        self._check_length(flight)
        flight.noise = self._references.noise(ask.pictures, flight.generator)
        return flight

    def feed(self, state: Flight, chunk: InputChunk) -> None:
        if chunk.port == KV:
            self._take_kv(state, chunk)
        elif chunk.port == THOUGHTS:
            state.thoughts = _read_thoughts(chunk.payload, chooses_size=state.ask.chooses_size)
        else:
            state.media |= {name: tensor.array.copy() for name, tensor in chunk.payload.tensors.items()}
        if chunk.final:
            state.complete.add(chunk.port)
        chunk.payload.release()

    def ready(self, state: Flight) -> bool:
        return state.complete.issuperset(state.request.inputs)

    @torch.inference_mode()
    def encode(self, states: list[Flight]) -> None:
        """Lays the requests out and computes the prompt rows that were not handed over, of all in one go."""
        branches = [self._lay_out(state) for state in states]
        usable = [self._usable(state, own[0].layout) for state, own in zip(states, branches, strict=True)]
        works = [
            PromptWork(tuple(branch.layout for branch in own), known, partial(self._read, state))
            for state, own, known in zip(states, branches, usable, strict=True)
        ]
        computed = self._prompts.compute(works)
        for state, own, work, pieces in zip(states, branches, works, computed, strict=True):
            for branch, found in zip(own, pieces, strict=True):
                branch.pieces = found
            state.branches = own
            state.counts |= {
                "prefill_rows": float(sum(b.layout.prompt - work.start(i) for i, b in enumerate(own))),
                "kv_reused_rows": float(work.known_rows),
                "kv_refused": float(state.ask.handover and not work.known),
            }
            state.handed, state.media = [], {}

    def prepare(self, state: Flight) -> None:
        """Noise in bfloat16, as the model was trained with; the pictures' noise was drawn before it."""
        place, device = state.place, self._components.device
        shape = (1, self._checkpoint.latent_channels, *state.grid)
        noise = torch.randn(shape, generator=state.generator, dtype=torch.bfloat16)
        pairs = positions([place.image], place.timestep, place.image.stop)
        schedule = Schedule(state.ask.steps, state.ask.flow_shift)
        state.drawing = Drawing(noise.float().to(device), schedule, self._rotary(pairs))

    # -- steps

    def group(self, state: Flight) -> Hashable:
        return None

    def rows(self, state: Flight) -> int:
        if state.branches:
            return len(state.branches) * (state.place.image.stop - state.place.timestep)
        height, width = state.ask.size or (self._checkpoint.base_size, self._checkpoint.base_size)
        size = self._vocabulary.sizes.nearest(height, width)
        return self._branch_count(state) * (size.height * size.width // self._checkpoint.spatial**2 + 1)

    def remaining(self, state: Flight) -> int:
        return state.ask.steps - state.step

    @torch.inference_mode()
    def denoise(self, states: list[Flight]) -> None:
        velocities = [
            guided(found, state.ask.guidance) for state, found in zip(states, self._denoiser(states), strict=True)
        ]
        for state, velocity in zip(states, velocities, strict=True):
            drawing = state.ready()
            latents = drawing.schedule.advance(state.step, drawing.latents, velocity)
            if state.ask.partial_images:
                state.expected = drawing.schedule.expected(state.step, drawing.latents, velocity)
            state.drawing = drawing._replace(latents=latents)
            state.step += 1

    def preview(self, state: Flight) -> Preview | None:
        """The picture that the last step points to, at evenly spaced steps."""
        count, steps = state.ask.partial_images, state.ask.steps
        if state.expected is None or not preview_is_due(state.step, steps, count):
            return None
        expected, meta = state.expected, {"step": state.step, "steps": steps}
        return lambda: Produced(
            port=PARTIAL_PORT, payload=MultimodalPayload.of(meta, image=self._pixels(expected).numpy())
        )

    # -- after the last step

    def decode_group(self, state: Flight) -> Hashable:
        return state.grid

    def decode(self, states: list[Flight]) -> list[list[Produced]]:
        """The decoder takes as many pixels at once as a picture of the base size has."""
        latents = torch.cat([state.ready().latents for state in states])
        found = {"latents": latents.cpu().numpy()}
        if any("image" in state.request.outputs for state in states):
            most = max(1, self._checkpoint.base_size**2 // (latents[0, 0].numel() * self._checkpoint.spatial**2))
            found["image"] = np.concatenate([self._pixels(part).numpy() for part in torch.split(latents, most)])
        for state in states:
            state.done = True
        return [
            [_produced(port, found[port][index : index + 1]) for port in _OWN_PORTS if port in state.request.outputs]
            for index, state in enumerate(states)
        ]

    def done(self, state: Flight) -> bool:
        return state.done

    def metrics(self, state: Flight) -> dict[str, float]:
        return dict(state.counts)

    def close(self, state: Flight) -> None:
        state.release()

    def shutdown(self) -> None:
        """Holds nothing beyond its modules."""

    # -- parts

    def _take_kv(self, state: Flight, chunk: InputChunk) -> None:
        """Raises RequestError (hand-off) for a chunk that is not what was agreed."""
        if not state.ask.handover:
            return
        ids, rows = kv_payload.read(chunk.payload, len(state.handed_ids), self._components.device)
        if chunk.final:
            kv_payload.check_whole(chunk.payload, len(state.handed_ids) + len(ids))
        state.handed_ids += ids
        state.handed.append(rows)

    def _lay_out(self, state: Flight) -> tuple[Branch, ...]:
        ask, thoughts = state.ask, state.thoughts
        sizes = self._vocabulary.sizes
        ratio = thoughts.ratio if thoughts.ratio is not None else sizes.index_of(*(ask.size or (1, 1)))
        size = sizes.sizes[ratio]
        canvas = Canvas(ratio, (size.height // self._checkpoint.spatial, size.width // self._checkpoint.spatial))
        ids = without_thinking(thoughts.ids, self._vocabulary) if ask.drop_think else thoughts.ids
        said = self._conversation(state, ask.drawing_system)
        renderer = self._renderer(state)
        return tuple(
            Branch(renderer.drawing(said, ids, canvas, unconditional=branch == 1))
            for branch in range(self._branch_count(state))
        )

    def _check_length(self, state: Flight) -> None:
        """Raises RequestError for a conversation that is longer than the model's context."""
        rows = len(self._renderer(state).question(self._conversation(state, state.ask.system), "").ids)
        if rows > self._checkpoint.max_tokens:
            limit = self._checkpoint.max_tokens
            raise RequestError(f"the prompt has {rows} tokens, the model takes {limit}", param="prompt")

    def _branch_count(self, state: Flight) -> int:
        return 1 if self._checkpoint.distilled else state.ask.branches

    def _renderer(self, state: Flight) -> Renderer:
        flags = Flags(self._checkpoint.distilled, self._checkpoint.meanflow)
        return Renderer(self._vocabulary, state.ask.template, self._checkpoint.vit_tokens, flags)

    def _conversation(self, state: Flight, system: str | None) -> Conversation:
        grids = tuple(self._references.grid(shape) for shape in state.ask.pictures)
        return Conversation(system, state.ask.turns, grids)

    def _usable(self, state: Flight, layout: Layout) -> tuple[KeysValues, ...]:
        """What the text stage handed over, as far as the row with the prompt begins with the same tokens.

        Nothing unless the tokens that it stands for are exactly those that the text stage read and thought."""
        if not state.ask.handover:
            return ()
        expected = handed_ids(self._renderer(state), self._conversation(state, state.ask.system), state)
        if state.handed_ids != expected:
            return ()
        return cut_pieces(state.handed, min(common_prefix(expected, layout.ids), layout.prompt))

    def _read(self, state: Flight, index: int) -> Reference:
        return self._references.read(state.media[str(index)], state.noise[index])

    @torch.inference_mode()
    def _pixels(self, latents: Tensor) -> Tensor:
        """uint8 [n, H, W, 3] of latents [n, channels, h, w]."""
        with self._components.half_precision():
            pixels = self._decoder(latents / self._checkpoint.scaling)
        levels: Tensor = (finite(pixels, "pictures").float() / 2 + 0.5).clamp(0, 1) * 255
        return levels.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()


def handed_ids(renderer: Renderer, said: Conversation, state: Flight) -> list[int]:
    """The tokens whose keys and values the text stage hands over: its prompt and its thoughts without their end tag."""
    if state.ask.task == "ratio":
        return renderer.question(said, TRIGGERS["ratio"]).ids
    return [*renderer.question(said, "").ids, *state.thoughts.ids[:-1]]


def _produced(port: str, array: Array) -> Produced:
    return Produced(port=port, payload=MultimodalPayload.of({}, **{port: array}), final=True)


def _read_thoughts(payload: MultimodalPayload, *, chooses_size: bool) -> Thoughts:
    """Raises RequestError (hand-off) when the text stage was cut short."""
    ids, ratio = payload.meta.get("ids"), payload.meta.get("ratio")
    if ids is None or not payload.meta.get("complete", False) or (chooses_size and ratio is None):
        raise RequestError(
            "the text stage ended before its thoughts did; raise max_tokens of the stage ar",
            code=ErrorCode.HANDOFF,
            param="max_tokens",
        )
    return Thoughts(tuple(ids), ratio)


def components_of(context: StageContext) -> tuple[Components, Vocabulary]:
    """The checkpoint's parts for a stage. Raises ConfigError for settings that it cannot run with."""
    stage = context.stage
    attention_implementation(stage.attention_backend)
    checkpoint = read_checkpoint(Path(context.model_path))
    device = choose_device(stage.device)
    dtype = choose_dtype(stage.dtype, device).dtype
    return Components(checkpoint, device, dtype, context.shared), Vocabulary.load(checkpoint)


def create(context: StageContext) -> DiffusionModel[Flight]:
    """Component factory of the stage `dit`."""
    return Drawer(*components_of(context))

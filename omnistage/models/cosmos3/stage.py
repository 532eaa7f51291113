"""The diffusion stage of Cosmos3: whole checkpoint in one stage, or the generation tower behind a reasoner stage."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from omnistage.config.model import StageContext
from omnistage.errors import RequestError
from omnistage.models.cosmos3 import kv_payload
from omnistage.models.cosmos3.ask import START, Limits, resolve
from omnistage.models.cosmos3.checkpoint import Checkpoint, read_checkpoint
from omnistage.models.cosmos3.codecs import PictureCodec, SoundCodec
from omnistage.models.cosmos3.conditions import Conditions
from omnistage.models.cosmos3.decoding import Decoder
from omnistage.models.cosmos3.denoiser import Denoiser
from omnistage.models.cosmos3.flight import Branch, Flight, Latents
from omnistage.models.cosmos3.layout import Grid, layout_of
from omnistage.models.cosmos3.loading import (
    load_sound,
    load_tokenizer,
    load_transformer,
    load_vae,
    warn_about_safety,
)
from omnistage.models.cosmos3.media import Frames
from omnistage.models.cosmos3.prompt import messages_of
from omnistage.models.cosmos3.reasoner import Reasoner, Tokens
from omnistage.models.cosmos3.request import LATENTS
from omnistage.models.cosmos3.schedules import Schedule
from omnistage.ops.device import choose_device
from omnistage.ops.dtype import choose_dtype
from omnistage.ops.packed_attention import Backend, choose_backend
from omnistage.ops.step_cache import StepCache
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.diffusion.model import Capabilities, DiffusionModel, Preview, Produced
from omnistage.stages.diffusion.step_caching import stage_cache, with_stage_cache

KV_PORT = "kv"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a generator is made of. `reasoner` None: texts arrive on the port "kv"."""

    checkpoint: Checkpoint
    limits: Limits
    tokens: Tokens
    reasoner: Reasoner | None
    denoiser: Denoiser
    pictures: PictureCodec
    sound: SoundCodec | None
    device: torch.device
    cache: StepCache | None


class Generator:
    """`DiffusionModel` of Cosmos3: any mix of requests and guidance branches in one transformer call."""

    capabilities = Capabilities(partial_images=True, batched_decode=True)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._checkpoint = parts.checkpoint
        self._grid = Grid.of(parts.checkpoint.transformer, parts.checkpoint.temporal)
        self._conditions = Conditions(Frames(parts.checkpoint.spatial), parts.pictures, parts.checkpoint)
        self._decoder = Decoder(parts.pictures, parts.sound, self._conditions)

    # -- before the first step

    def open(self, request: StageRequest) -> Flight:
        params = with_stage_cache(request.params, self._parts.cache)
        ask = resolve(params, self._checkpoint, self._parts.limits)
        generator = torch.Generator().manual_seed(request.seed)
        flight = Flight(request, ask, generator, reanchor=self._checkpoint.is_distilled)
        messages = messages_of(ask)
        flight.ids["cond"] = self._parts.tokens(messages.positive)
        if "uncond" in ask.texts:
            flight.ids["uncond"] = self._parts.tokens(messages.negative)
        return flight

    def feed(self, state: Flight, chunk: InputChunk) -> None:
        if chunk.port == KV_PORT:
            name, text = kv_payload.read(chunk.payload, state.ids, self._parts.device)
            state.texts[name] = text
        else:
            array = next(iter(chunk.payload.tensors.values())).array.copy()
            if array.shape != tuple(state.request.params["media_shapes"][chunk.port]):
                raise RequestError(f"{chunk.port} is not the medium that was announced", param=chunk.port)
            state.media[chunk.port] = array
        if chunk.final:
            state.complete.add(chunk.port)
        chunk.payload.release()

    def ready(self, state: Flight) -> bool:
        return state.complete.issuperset(state.request.inputs)

    def encode(self, states: list[Flight]) -> None:
        """Texts of all requests in one prefill (those that nobody has read yet), media one by one."""
        if self._parts.reasoner is not None:
            wanted = [(state, name) for state in states for name in state.ask.texts]
            texts = self._parts.reasoner.read([state.ids[name] for state, name in wanted])
            for (state, name), text in zip(wanted, texts, strict=True):
                state.texts[name] = text
        for state in states:
            state.encoded = self._conditions.encode(state)

    def prepare(self, state: Flight) -> None:
        missing = [name for name in state.ask.texts if name not in state.texts]
        if missing:
            raise RequestError(f"the reasoner's keys and values of branch {missing[0]} are missing", param=KV_PORT)
        if state.ask.transfer is not None:
            state.encoded = self._conditions.next_chunk(state)
        self._start_run(state)

    def _start_run(self, state: Flight) -> None:
        """Noise, layouts and schedules of a run: of the request, or of one transfer chunk."""
        ask, device = state.ask, self._parts.device
        clean_frames = self._conditions.clean_frames(state)
        state.latents = self._noise(state, clean_frames)
        modalities = ["vision"] + ["sound"] * bool(ask.sound_latents) + ["action"] * (ask.action is not None)
        state.schedule = Schedule(self._checkpoint, ask, tuple(modalities), device)
        state.branches = tuple(
            Branch(
                name,
                layout_of(
                    ask,
                    self._grid,
                    self._text_of(state, name).tokens,
                    controls=0 if name == "bare" else len(state.controls),
                    clean=clean_frames,
                ),
                self._text_of(state, name),
            )
            for name in ask.branches
        )
        state.step = 0
        state.forget_steps()

    @staticmethod
    def _text_of(state: Flight, branch: str) -> kv_payload.TextKV:
        return state.texts["uncond" if branch == "uncond" else "cond"]

    def _noise(self, state: Flight, clean_frames: tuple[int, ...]) -> Latents:
        """Initial latents. The generator's order: vision, sound, action; what the client brought is not drawn, and
        taken as it is."""
        ask, device, checkpoint = state.ask, self._parts.device, self._checkpoint
        shape = (1, checkpoint.channels, ask.latent_frames, ask.latent_height, ask.latent_width)
        clean = torch.zeros(shape, device=device) if state.encoded is None else state.encoded.to(device)
        mask = torch.zeros(ask.latent_frames, 1, 1, device=device)
        mask[[frame for frame in clean_frames if frame < ask.latent_frames]] = 1.0

        def draw(*sides: int) -> Tensor:
            return torch.randn(sides, generator=state.generator).to(device)

        brought = {name: _brought(state, name, device) for name in LATENTS}
        vision = brought["latents"]
        if vision is None:
            vision = mask * clean + (1.0 - mask) * draw(*shape)
        latents = Latents(vision=vision, clean=clean, mask=mask)
        if ask.sound_latents:
            sound = brought["sound_latents"]
            latents.sound = draw(checkpoint.sound_dim, ask.sound_latents) if sound is None else sound
        if ask.action is not None:
            latents.action = brought["action_latents"]
        if ask.action is not None and latents.action is None:
            noise = draw(ask.action.chunk, checkpoint.action_dim)
            given = self._conditions.actions(state)
            latents.action = noise if given is None else given.to(device)
            latents.action[:, ask.action.domain.width :] = 0
        return latents

    # -- steps

    def group(self, state: Flight) -> Hashable:
        return None

    def rows(self, state: Flight) -> int:
        return state.ask.rows(self._checkpoint.patch)

    def remaining(self, state: Flight) -> int:
        return state.remaining

    def denoise(self, states: list[Flight]) -> None:
        for state in states:
            if state.chunk_ended:
                self._turn_over(state)
        documents = [state.documents() for state in states]
        velocities = iter(self._parts.denoiser([document for own in documents for document in own]))
        for state, own in zip(states, documents, strict=True):
            state.advance([next(velocities) for _ in own])

    def _turn_over(self, state: Flight) -> None:
        """Ends a transfer chunk that has had its steps and starts the next, seeded with its last frames."""
        state.end_chunk(self._conditions.decode_chunk(state))
        state.chunk += 1
        state.encoded = self._conditions.next_chunk(state)
        self._start_run(state)

    def preview(self, state: Flight) -> Preview | None:
        return self._decoder.preview(state)

    # -- after the last step

    def decode_group(self, state: Flight) -> Hashable:
        return self._decoder.group(state)

    def decode(self, states: list[Flight]) -> list[list[Produced]]:
        return self._decoder.decode(states)

    def done(self, state: Flight) -> bool:
        return state.done

    def metrics(self, state: Flight) -> dict[str, float]:
        return state.seconds | {"skipped_steps": state.skipped_steps}

    def close(self, state: Flight) -> None:
        """Lets go of everything large."""
        state.latents = state.schedule = state.encoded = None
        state.texts, state.media, state.branches = {}, {}, ()
        state.controls, state.control_clips, state.chunks, state.chunk_latents = [], [], [], []
        state.previous = state.expected = None
        state.forget_steps()

    def shutdown(self) -> None:
        """Holds nothing outside the process."""


def _brought(state: Flight, name: str, device: torch.device) -> Tensor | None:
    """The latents of the parameter `name`, if the client gave any."""
    given = state.media.get(START + name)
    return None if given is None else torch.from_numpy(given).to(device)


def limits_of(context: StageContext) -> Limits:
    limits = context.config.limits
    return Limits(limits.max_video_frames, limits.max_image_pixels)


def _build(context: StageContext, *, with_reasoner: bool) -> Generator:
    stage = context.stage
    checkpoint = read_checkpoint(Path(context.model_path))
    warn_about_safety(checkpoint)
    device = choose_device(stage.device)
    dtype = choose_dtype(stage.dtype, device).dtype
    backend: Backend = choose_backend(stage.attention_backend, device, dtype, stage=stage.name)
    transformer = load_transformer(checkpoint, "both" if with_reasoner else "generation", dtype, device)
    reasoner = None
    if with_reasoner:
        reasoner = Reasoner(transformer, backend, int(stage.options["reasoner_cache_mb"]) << 20)
    return Generator(
        Parts(
            checkpoint=checkpoint,
            limits=limits_of(context),
            tokens=Tokens(load_tokenizer(checkpoint)),
            reasoner=reasoner,
            denoiser=Denoiser(transformer, dtype, device, backend),
            pictures=PictureCodec(load_vae(checkpoint, dtype, device)),
            sound=SoundCodec(load_sound(checkpoint, dtype, device), checkpoint.sound_rate)
            if checkpoint.sound_dim
            else None,
            device=device,
            cache=stage_cache(stage.options),
        )
    )


def diffusion(context: StageContext) -> DiffusionModel[Flight]:
    """The whole checkpoint in one stage."""
    return _build(context, with_reasoner=True)


def generator(context: StageContext) -> DiffusionModel[Flight]:
    """The generation tower and the codecs; texts come from the stage `reasoner`."""
    return _build(context, with_reasoner=False)

"""The stages of MiniMax-H3: the whole model, or encoder, transformers and decoder apart."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch

from omnistage.config.model import StageContext
from omnistage.models.minimax_h3 import state as arithmetic
from omnistage.models.minimax_h3.ask import Ask, resolve
from omnistage.models.minimax_h3.autoencoders import AudioCodec, VideoCodec
from omnistage.models.minimax_h3.checkpoint import Checkpoint, Partition, weight_files
from omnistage.models.minimax_h3.conditions import Encoded, Media, read_conditions
from omnistage.models.minimax_h3.decoding import (
    AUDIO,
    AUDIO_LATENTS,
    LATENTS,
    VIDEO,
    decode_audio,
    decode_video,
    latent_chunks,
)
from omnistage.models.minimax_h3.denoiser import Denoiser
from omnistage.models.minimax_h3.layout import rows_of, text_rows_guess
from omnistage.models.minimax_h3.loading import load_transformer
from omnistage.models.minimax_h3.schedule import sigmas
from omnistage.models.minimax_h3.serving import codecs, device_and_dtype, max_pixels, served_checkpoint
from omnistage.models.minimax_h3.state import H3State
from omnistage.ops.packed_attention import choose_backend
from omnistage.ops.step_cache import StepCache
from omnistage.payload import MultimodalPayload
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.diffusion.model import Capabilities, DiffusionModel, Preview, Produced
from omnistage.stages.diffusion.step_caching import stage_cache, with_stage_cache

_OWN_PORTS = (VIDEO, AUDIO, LATENTS, AUDIO_LATENTS)


class Partitions:
    """The transformers of a stage, each loaded at its first use unless all are wanted from the start."""

    def __init__(self, context: StageContext, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._folder = checkpoint.folder
        self._device = device
        self._dtype = dtype
        self._backend = choose_backend(context.stage.attention_backend, device, dtype, stage=context.stage.name)
        self._loaded: dict[Partition, Denoiser] = {}
        for name in checkpoint.partitions:
            weight_files(checkpoint.folder, name)
        if context.stage.options["partition"] != "auto":
            for name in checkpoint.partitions:
                self.get(name)

    def get(self, name: Partition) -> Denoiser:
        """Raises ConfigError when the component cannot be loaded."""
        if name not in self._loaded:
            transformer = load_transformer(self._folder, name, self._dtype, self._device)
            self._loaded[name] = Denoiser(transformer, self._backend, self._device)
        return self._loaded[name]


class Encoder(Protocol):
    """`ConditionEncoder`, which only the stage that owns one imports."""

    def encode(self, asks: list[tuple[Ask, Media]]) -> list[Encoded]: ...


class H3Diffusion:
    """`DiffusionModel` of the family. Without `encoder` the conditions come by the port "conditions"; without `codecs`
    the stage ends with latents."""

    capabilities = Capabilities()

    def __init__(
        self,
        checkpoint: Checkpoint,
        partitions: Partitions,
        *,
        device: torch.device,
        max_pixels: int,
        cache: StepCache | None,
        encoder: Encoder | None = None,
        codecs: tuple[VideoCodec, AudioCodec] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._partitions = partitions
        self._device = device
        self._max_pixels = max_pixels
        self._cache = cache
        self._encoder = encoder
        self._codecs = codecs

    def open(self, request: StageRequest) -> H3State:
        params = with_stage_cache(request.params, self._cache)
        ask = resolve(params, self._checkpoint, self._max_pixels)
        return H3State(
            request=request,
            ask=ask,
            sigmas=sigmas(ask.steps, ask.flow_shift),
            audio_sigmas=sigmas(ask.steps, ask.audio_flow_shift),
            waiting=set(request.inputs),
            left=[port for port in _OWN_PORTS if port in request.outputs],
        )

    def feed(self, state: H3State, chunk: InputChunk) -> None:
        if chunk.port == "conditions":
            state.conditions = read_conditions(chunk.payload)
        else:
            state.media |= {name: tensor.array.copy() for name, tensor in chunk.payload.tensors.items()}
        if chunk.final:
            state.waiting.discard(chunk.port)
        chunk.payload.release()

    def ready(self, state: H3State) -> bool:
        return not state.waiting

    def encode(self, states: list[H3State]) -> None:
        if self._encoder is None:
            return
        encoded = self._encoder.encode([(state.ask, state.media) for state in states])
        for state, made in zip(states, encoded, strict=True):
            state.conditions = made.conditions
            state.seconds |= {"prompt_encode_s": made.prompt_s, "media_encode_s": made.media_s}

    def prepare(self, state: H3State) -> None:
        if state.conditions is None:
            raise RuntimeError("a request must be encoded before it is prepared")
        text = self._partitions.get(state.ask.partition).refine(state.conditions.text)
        state.prepared = arithmetic.prepare(state, text, self._checkpoint, self._device)
        state.media = {}

    def group(self, state: H3State) -> Hashable:
        return state.ask.partition

    def rows(self, state: H3State) -> int:
        if state.prepared is not None:
            return state.prepared.layout.rows
        return rows_of(state.ask, self._checkpoint.patch, text_rows_guess(state.ask.prompt))

    def remaining(self, state: H3State) -> int:
        return state.calls - state.step

    @torch.inference_mode()
    def denoise(self, states: list[H3State]) -> None:
        denoiser = self._partitions.get(states[0].ask.partition)
        velocities = denoiser.velocities([arithmetic.document(state) for state in states])
        moved = [arithmetic.stepped(state, velocity) for state, velocity in zip(states, velocities, strict=True)]
        for state, (video, audio), velocity in zip(states, moved, velocities, strict=True):
            ready = arithmetic.ready_of(state)
            ready.video, ready.audio = video, audio
            state.memory = velocity.memory
            state.step += 1

    def preview(self, state: H3State) -> Preview | None:
        return None

    def decode_group(self, state: H3State) -> Hashable:
        return state.request.request_id

    def decode(self, states: list[H3State]) -> list[list[Produced]]:
        return [self._decode_next(state) for state in states]

    def _decode_next(self, state: H3State) -> list[Produced]:
        """The next port's chunks: one port per call, so that pictures do not wait for sound."""
        port = state.left[0]
        chunks = self._port(state, port)
        state.left = state.left[1:]
        return finished_port(port, chunks)

    def _port(self, state: H3State, port: str) -> list[MultimodalPayload]:
        video, audio = arithmetic.final_latents(state, self._checkpoint)
        if port == LATENTS:
            return latent_chunks(port, video)
        if port == AUDIO_LATENTS:
            return latent_chunks(port, audio)
        if self._codecs is None:
            raise RuntimeError(f"this stage has no port {port}")
        if port == VIDEO:
            chunks, state.seconds["video_decode_s"] = decode_video(self._codecs[0], video)
        else:
            rate = self._checkpoint.sample_rate
            chunks, state.seconds["audio_decode_s"] = decode_audio(self._codecs[1], audio, rate)
        return chunks

    def done(self, state: H3State) -> bool:
        return not state.left

    def metrics(self, state: H3State) -> dict[str, float]:
        return state.seconds | {"skipped_steps": float(state.memory.skipped)}

    def close(self, state: H3State) -> None:
        state.media = {}
        state.conditions = state.prepared = None
        state.memory = state.memory.emptied()

    def shutdown(self) -> None:
        """Holds nothing beyond its modules."""


def finished_port(port: str, chunks: list[MultimodalPayload]) -> list[Produced]:
    """The chunks of a port, the last of them final."""
    last = len(chunks) - 1
    return [Produced(port=port, payload=chunk, final=at == last) for at, chunk in enumerate(chunks)]


def whole(context: StageContext) -> DiffusionModel[H3State]:
    """All components in one stage."""
    from omnistage.models.minimax_h3.encoding import ConditionEncoder

    checkpoint = served_checkpoint(context)
    device, dtype = device_and_dtype(context)
    both = codecs(checkpoint, device, dtype)
    return H3Diffusion(
        checkpoint,
        Partitions(context, checkpoint, device, dtype),
        device=device,
        max_pixels=max_pixels(context),
        cache=stage_cache(context.stage.options),
        encoder=ConditionEncoder(checkpoint, dtype, device, *both),
        codecs=both,
    )


def middle(context: StageContext) -> DiffusionModel[H3State]:
    """The transformers only."""
    checkpoint = served_checkpoint(context)
    device, dtype = device_and_dtype(context)
    return H3Diffusion(
        checkpoint,
        Partitions(context, checkpoint, device, dtype),
        device=device,
        max_pixels=max_pixels(context),
        cache=stage_cache(context.stage.options),
    )

"""The talker: from the thinker's words to codec frames, one frame per step, one word per frame as far as they go.

Row r of a request's input is, in its prompt, what `SpeechPrefill` says; after it, the embedded frame that the talker
gave last plus one row of text: the next word, after the last word once the end-of-text row, then padding. A step whose
word is not known yet waits; nothing is put in its place, because every later code would be another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from omnistage.config.model import StageContext
from omnistage.errors import RequestError, StageError
from omnistage.models.qwen3_omni.handoff import PORT, SpokenPrompt
from omnistage.models.qwen3_omni.loading import TalkerPart, load_part
from omnistage.models.qwen3_omni.predictor import CodePredictor, FrameStart, predictor_seed
from omnistage.models.qwen3_omni.prefill import END_OF_TEXT, Prefill, SpeechPrefill
from omnistage.ops.blocked import block_linears, choose_layout
from omnistage.ops.paged_attention import AttentionPlan, attention_implementation
from omnistage.ops.tensor_payload import from_payload
from omnistage.payload import MultimodalPayload
from omnistage.stages.ar.model import Constraint, Emitted, Event, Produced, Prompt, Sequence, Work
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.stages.ar.torch_model import ForwardResult, ModelShape, SequenceMemory
from omnistage.stages.base import InputChunk, StageRequest

# The last ids of the vocabulary control the talker and are never spoken, the end of speech excepted.
CONTROL_IDS = 1024


@dataclass(slots=True)
class TalkerState:
    """One request. `words` are the spoken token ids known so far, `frames[g]` the codes of the g-th generated token."""

    request: StageRequest
    speaker: int
    seed: int
    frame_limit: int
    words: list[int] = field(default_factory=list)
    all_known: bool = False
    prompt: SpokenPrompt | None = None
    media_rows: Tensor | None = None
    prefill: Prefill | None = None
    frames: list[tuple[int, ...]] = field(default_factory=list)
    generated: int = 0


class Talker:
    """An `ARModel` over transformers' talker. `params` may hold "voice", the name of a speaker."""

    def __init__(self, context: StageContext) -> None:
        part, device, dtype = load_part(TalkerPart, context.model_path, context.stage)
        talker: Any = part.talker
        talker.model.config._attn_implementation = attention_implementation(context.stage.attention_backend)
        block_linears(talker, choose_layout(context.stage.weight_layout, part))
        config = part.config.talker_config
        self._model: Any = talker.model
        self._head: Any = talker.codec_head
        self._speakers: dict[str, int] = {name.lower(): token for name, token in config.speaker_id.items()}
        self._predictor = CodePredictor(talker.code_predictor, talker.model.codec_embedding)
        self._prefill = SpeechPrefill(part)
        self._eos = config.codec_eos_token_id
        self._max_frames = int(context.stage.options["max_frames"])
        self._shape = _shape(config.text_config, self._eos, device, dtype)
        self._spoken_ids = tuple(range(self._shape.vocab_size - CONTROL_IDS))
        silent = torch.arange(self._shape.vocab_size, device=device) >= len(self._spoken_ids)
        silent[self._eos] = False
        self._silent = silent

    @property
    def shape(self) -> ModelShape:
        return self._shape

    def open(self, request: StageRequest) -> TalkerState:
        voice = request.params.get("voice")
        speaker = self._speakers.get(voice.lower()) if isinstance(voice, str) else self._default_speaker()
        if speaker is None:
            known = ", ".join(sorted(self._speakers))
            raise RequestError(f"unknown voice {str(voice)[:32]!r}; this model has: {known}", param="voice")
        seed = request.seed if request.sampling.seed is None else request.sampling.seed
        return TalkerState(request, speaker, predictor_seed(seed), self._max_frames)

    def feed(self, state: TalkerState, chunk: InputChunk) -> None:
        payload = chunk.payload
        meta = payload.meta
        if chunk.port != PORT or not isinstance(meta.get("spoken", []), list):
            raise RequestError(f"the talker cannot read a chunk for the port {chunk.port!r}", param=chunk.port)
        if "prompt" in meta:
            state.prompt = msgspec.convert(meta["prompt"], SpokenPrompt)
        if "rows" in payload.tensors:
            state.media_rows = from_payload(payload.tensors["rows"])
        state.words += meta.get("spoken", [])
        state.all_known = chunk.final
        payload.release()

    def prompt(self, state: TalkerState) -> Prompt | None:
        """Empty when there is nothing to speak: that request ends at once with empty audio."""
        if not state.words:
            return Prompt(token_ids=[]) if state.all_known else None
        if state.prompt is None:
            raise StageError("the talker got words to speak but no prompt")
        with torch.inference_mode():
            state.prefill = self._prefill.build(state.prompt, state.media_rows, state.speaker, state.words[0])
        state.media_rows = None
        # The ids stand for rows that they do not determine.
        return Prompt(token_ids=[0] * len(state.prefill.rows), cacheable=False, param="messages")

    def can_step(self, state: TalkerState) -> bool:
        return state.all_known or state.generated < len(state.words)

    def constraint(self, state: TalkerState) -> Constraint | None:
        return Constraint(allowed=self._spoken_ids) if state.request.sampling.ignore_eos else None

    def forward(self, works: list[Work[TalkerState]], plan: AttentionPlan) -> ForwardResult:
        rows = self._rows(works)
        positions = torch.cat([_prefill_of(work).positions.of(work.start, work.stop) for work in works], dim=1).to(
            rows.device
        )
        result = self._model(inputs_embeds=rows[None], position_ids=positions[:, None], use_cache=False, plan=plan)
        return ForwardResult(result.last_hidden_state[0])

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden)
        return logits.masked_fill(self._silent, float("-inf"))

    def sampled(self, works: list[Work[TalkerState]], hidden: Tensor, tokens: list[int]) -> None:
        """Completes the frames of the new tokens. The last token of a request never becomes a frame."""
        going_on = [
            index
            for index, (work, token) in enumerate(zip(works, tokens, strict=True))
            if work.seq.finish_after(token) is None
        ]
        if not going_on:
            return
        starts = [_frame_start(works[index].seq, tokens[index]) for index in going_on]
        frames = self._predictor.complete(hidden[torch.tensor(going_on, device=hidden.device)], starts)
        for index, frame in zip(going_on, frames, strict=True):
            seq = works[index].seq
            seq.state.frames[seq.generated :] = [frame]

    def emit(self, seq: Sequence[TalkerState], event: Event, memory: SequenceMemory) -> Emitted:
        state = seq.state
        state.generated = event.generated
        too_long = state.request.sampling.max_tokens is None and event.generated >= state.frame_limit
        last = event.finish is not None or too_long
        if event.sampled is None or last:
            return Emitted((Produced(port="codes", payload=MultimodalPayload(), final=True),), stop=too_long)
        codes = np.array(state.frames[event.generated - 1], np.int32)[:, None]
        return Emitted((Produced(port="codes", payload=MultimodalPayload.of(codes=codes)),))

    def close(self, state: TalkerState) -> None:
        """Nothing is held: chunks are read when they come."""

    def _default_speaker(self) -> int | None:
        """Ethan, as in the reference, else the checkpoint's first speaker."""
        return self._speakers.get("ethan", next(iter(self._speakers.values()), None))

    def _rows(self, works: list[Work[TalkerState]]) -> Tensor:
        """The input rows [N, H] of a step: prompt rows as they were built, generated rows from frames and words."""
        frames: list[tuple[int, ...]] = []
        words: list[int | None] = []
        for work in works:
            state = work.seq.state
            for number in range(max(work.start - work.seq.prompt_len, 0), work.stop - work.seq.prompt_len):
                frames.append(state.frames[number])
                words.append(_word(state, number + 1))
        spoken = self._predictor.embed(frames) + self._prefill.text(words) if frames else None
        pieces: list[Tensor] = []
        used = 0
        for work in works:
            pieces.append(_prefill_of(work).rows[work.start : work.stop])
            count = max(work.stop - max(work.start, work.seq.prompt_len), 0)
            if spoken is not None:
                pieces.append(spoken[used : used + count])
            used += count
        return torch.cat(pieces)


def create(context: StageContext) -> TorchBackend[TalkerState]:
    """Component factory of the stage `talker`."""
    return TorchBackend(Talker(context), context.stage)


def _shape(config: Any, eos: int, device: torch.device, dtype: torch.dtype) -> ModelShape:
    return ModelShape(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        dtype=dtype,
        device=device,
        eos_token_ids=frozenset({eos}),
        penalize_prompt=False,
    )


def _word(state: TalkerState, number: int) -> int | None:
    """Text row `number`: a token id, `END_OF_TEXT` once after the last one, None (padding) beyond it."""
    if number < len(state.words):
        return state.words[number]
    return END_OF_TEXT if number == len(state.words) else None


def _frame_start(seq: Sequence[TalkerState], code: int) -> FrameStart:
    greedy = seq.params.temperature == 0
    return FrameStart(code=code, number=seq.generated, seed=seq.state.seed, greedy=greedy)


def _prefill_of(work: Work[TalkerState]) -> Prefill:
    prefill = work.seq.state.prefill
    assert prefill is not None, "a sequence in a step has a prompt"
    return prefill

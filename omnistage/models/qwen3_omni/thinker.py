"""The thinker: hears, sees and reads, writes text, and hands the talker what it needs to speak it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor

from omnistage.config.model import StageContext
from omnistage.errors import RequestError
from omnistage.models.qwen3_omni.encoders import Encoded, Encoders, Medium
from omnistage.models.qwen3_omni.handoff import PORT, Speech, SpokenTokens, TokenRoles, speech_of
from omnistage.models.qwen3_omni.loading import ThinkerPart, load_part
from omnistage.models.qwen3_omni.media import MediaSet
from omnistage.models.qwen3_omni.packed import pack_thinker
from omnistage.models.qwen3_omni.processor import MediaProcessor
from omnistage.models.qwen3_omni.prompt import ThinkerPrompt, media_prompt, text_prompt
from omnistage.ops.blocked import block_linear, block_linears, choose_layout
from omnistage.ops.paged_attention import AttentionPlan, attention_implementation
from omnistage.ops.tensor_payload import to_payload
from omnistage.payload import MultimodalPayload
from omnistage.stages.ar.chat_template import ChatTemplate
from omnistage.stages.ar.model import Constraint, Emitted, Event, Produced, Prompt, Sequence, Work
from omnistage.stages.ar.sections import Sections
from omnistage.stages.ar.text_model import eos_ids
from omnistage.stages.ar.text_output import TextOutput
from omnistage.stages.ar.text_prompt import conversation_text
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.stages.ar.torch_model import ForwardResult, ModelShape, SequenceMemory
from omnistage.stages.base import InputChunk, StageRequest


@dataclass(slots=True)
class ThinkerState:
    """One request. `prompt` is there once text and media are; `speech` when it is to be spoken."""

    request: StageRequest
    text: TextOutput
    prompt: ThinkerPrompt | None = None
    speech: Speech | None = None
    begun: bool = False
    spoken: SpokenTokens = field(default_factory=SpokenTokens)


class Thinker:
    """An `ARModel` over transformers' thinker.

    `params` hold "messages" (parts of type audio, image, video stand for the media of the port "media", in order) or
    "raw_prompt", and optionally "cache_salt". The rows kept beside keys and values are the hidden rows that the talker
    accepts, so a cached prompt gives the same speech.
    """

    def __init__(self, context: StageContext) -> None:
        stage, path = context.stage, context.model_path
        part, device, dtype = load_part(ThinkerPart, path, stage)
        self._thinker: Any = part.thinker
        model = self._thinker.model
        model.language_model.config._attn_implementation = attention_implementation(stage.attention_backend)
        if stage.quantization == "int4":
            pack_thinker(self._thinker)
        else:
            layout = choose_layout(stage.weight_layout, part)
            block_linears(model.language_model, layout)
            self._thinker.lm_head = block_linear(self._thinker.lm_head, layout)
        self._text: Any = model.language_model
        self._embed: Any = self._text.embed_tokens
        cache_bytes = int(context.stage.options["encoder_cache_mb"]) << 20
        self.encoders = Encoders(model.audio_tower, model.visual, cache_bytes)
        self._processor = MediaProcessor(path, part.config.thinker_config)
        self.tokenizer: Tokenizer = self._processor.tokenizer
        self._template = ChatTemplate.load(Path(path))
        self._roles = TokenRoles.of(part.config)
        self._markup = context.spec.markup
        self._speaks = PORT in context.spec.outputs
        self._accept = part.config.talker_config.accept_hidden_layer if self._speaks else -1
        self._captured: Tensor | None = None
        ends = eos_ids(Path(path)) or frozenset({part.config.im_end_token_id})
        self._shape = _shape(self._thinker.config.text_config, ends, (device, dtype), handoff=self._speaks)
        if 0 < self._accept < self._shape.layers:
            self._text.layers[self._accept - 1].register_forward_hook(self._capture)

    @property
    def shape(self) -> ModelShape:
        return self._shape

    def open(self, request: StageRequest) -> ThinkerState:
        sections = Sections(self._markup, request.tools) if "messages" in request.params else None
        state = ThinkerState(request, TextOutput(self.tokenizer, request.sampling, sections))
        if "media" not in request.inputs:
            text = self._prompt_text(state)
            state.prompt = text_prompt(self.tokenizer.encode(text, add_special_tokens=False).ids)
            self._plan_speech(state)
        return state

    def feed(self, state: ThinkerState, chunk: InputChunk) -> None:
        payload = chunk.payload
        media = msgspec.convert(payload.meta, MediaSet)
        arrays = [payload[str(index)] for index in range(len(media.items))]
        prepared = self._processor.prepare(self._prompt_text(state), media, arrays)
        state.prompt = media_prompt(self._thinker, prepared)
        self._plan_speech(state)
        payload.release()

    def prompt(self, state: ThinkerState) -> Prompt | None:
        if state.prompt is None:
            return None
        if not state.prompt.ids:
            raise RequestError("the prompt has no tokens", param="raw_prompt")
        salt = str(state.request.params.get("cache_salt", "")).encode()
        return Prompt(token_ids=state.prompt.ids, content=state.prompt.content(), salt=salt, param="messages")

    def can_step(self, state: ThinkerState) -> bool:
        return True

    def constraint(self, state: ThinkerState) -> Constraint | None:
        return None

    def forward(self, works: list[Work[ThinkerState]], plan: AttentionPlan) -> ForwardResult:
        device = self._shape.device
        self.encoders.encode([medium for work in works for medium in _media_of(work)])
        ids = [token for work in works for token in work.seq.tokens[work.start : work.stop]]
        embeds = self._embed(torch.tensor(ids, device=device))
        seen = _place_media(works, embeds)
        positions = torch.cat([_prompt_of(work).positions.of(work.start, work.stop) for work in works], dim=1).to(
            device
        )
        wants_rows = self._speaks and any(_media_of(work) for work in works)
        self._captured = embeds if wants_rows and self._accept == 0 else None
        result = self._text(
            inputs_embeds=embeds[None], position_ids=positions[:, None], use_cache=False, plan=plan, **seen
        )
        hidden: Tensor = result.last_hidden_state[0]
        handoff = hidden if self._accept == self._shape.layers else self._captured
        self._captured = None
        _drop_passed(works)
        return ForwardResult(hidden, handoff if wants_rows else None)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._thinker.lm_head(hidden)
        return logits

    def sampled(self, works: list[Work[ThinkerState]], hidden: Tensor, tokens: list[int]) -> None:
        """Nothing follows from a text token but its own embedding."""

    def emit(self, seq: Sequence[ThinkerState], event: Event, memory: SequenceMemory) -> Emitted:
        emitted = seq.state.text.emit(seq, event, memory)
        if seq.state.speech is None:
            return emitted
        last = event.finish is not None or emitted.stop
        return Emitted((*emitted.outputs, *self._speak(seq.state, event, memory, last=last)), stop=emitted.stop)

    def close(self, state: ThinkerState) -> None:
        """Nothing is held: chunks are read when they come."""

    def _prompt_text(self, state: ThinkerState) -> str:
        request = state.request
        raw = request.params.get("raw_prompt")
        if isinstance(raw, str):
            return raw
        if self._template is None:
            raise RequestError("the checkpoint has no chat template: use raw_prompt", param="messages")
        text = conversation_text(self._template, request.params["messages"], self._markup, request)
        state.text.sections.follow(text)
        return text

    def _plan_speech(self, state: ThinkerState) -> None:
        if PORT in state.request.outputs and state.prompt is not None:
            state.speech = speech_of(state.prompt, self._roles)

    def _capture(self, module: Any, inputs: Any, output: Any) -> None:
        """The output of the accepted layer, before deepstack rows are added: [N, hidden]."""
        self._captured = output[0]

    def _speak(self, state: ThinkerState, event: Event, memory: SequenceMemory, *, last: bool) -> tuple[Produced, ...]:
        token = event.sampled.token if event.sampled is not None else None
        spoken = state.spoken.push(token, last=last, withheld=state.text.withholds, unsaid=state.text.unsaid)
        meta: dict[str, Any] = {"spoken": spoken}
        tensors = {}
        speech = state.speech
        if not state.begun and speech is not None and event.sampled is not None:
            state.begun = True
            spoken[:0] = speech.written
            meta["prompt"] = msgspec.to_builtins(speech.prompt)
            if speech.rows:
                first = speech.rows[0]
                rows = memory.handoff(first, speech.rows[-1] + 1)
                tensors["rows"] = to_payload(rows[torch.tensor(speech.rows, device=rows.device) - first])
        if not (spoken or last or tensors or "prompt" in meta):
            return ()
        return (Produced(port=PORT, payload=MultimodalPayload(tensors, meta), final=last),)


def create(context: StageContext) -> TorchBackend[ThinkerState]:
    """Component factory of the stage `thinker`."""
    model = Thinker(context)
    return TorchBackend(model, context.stage, tokenizer=model.tokenizer, markup=context.spec.markup)


def _shape(config: Any, ends: frozenset[int], place: tuple[torch.device, torch.dtype], *, handoff: bool) -> ModelShape:
    return ModelShape(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        dtype=place[1],
        device=place[0],
        eos_token_ids=ends,
        handoff_width=config.hidden_size if handoff else 0,
    )


def _prompt_of(work: Work[ThinkerState]) -> ThinkerPrompt:
    prompt = work.seq.state.prompt
    assert prompt is not None, "a sequence in a step has a prompt"
    return prompt


def _media_of(work: Work[ThinkerState]) -> list[Medium]:
    """The media that the rows of `work` touch."""
    media = _prompt_of(work).media
    return [medium for medium in media if medium.start < work.stop and medium.stop > work.start]


def _seen_rows(works: list[Work[ThinkerState]]) -> Iterator[tuple[Encoded, Tensor, Tensor]]:
    """Per medium that a step touches: its encoding, the rows of the flat batch it goes to, and which of its own rows
    those are."""
    row = 0
    for work in works:
        for medium in _media_of(work):
            assert medium.encoded is not None
            inside = (medium.positions >= work.start) & (medium.positions < work.stop)
            yield medium.encoded, medium.positions[inside] - work.start + row, inside.nonzero()[:, 0]
        row += work.stop - work.start


def _place_media(works: list[Work[ThinkerState]], embeds: Tensor) -> dict[str, Any]:
    """Writes encoded media over the rows [N, hidden] of their placeholders; the arguments that add pictures again in
    later layers (deepstack)."""
    mask = torch.zeros(len(embeds), dtype=torch.bool, device=embeds.device)
    levels: list[Tensor] = []
    for encoded, places, chosen in _seen_rows(works):
        places, chosen = places.to(embeds.device), chosen.to(embeds.device)
        embeds[places] = encoded.rows[chosen].to(embeds.dtype)
        mask[places] = bool(encoded.deep)
        if encoded.deep and not levels:
            levels = [torch.zeros_like(embeds) for _ in encoded.deep]
        for level, rows in zip(levels, encoded.deep, strict=False):
            level[places] = rows[chosen].to(embeds.dtype)
    if not levels:
        return {}
    return {"visual_pos_masks": mask[None], "deepstack_visual_embeds": [level[mask] for level in levels]}


def _drop_passed(works: list[Work[ThinkerState]]) -> None:
    """Encodings whose last row is computed stay with the cache only."""
    for work in works:
        for medium in _prompt_of(work).media:
            if medium.stop <= work.stop:
                medium.encoded = None

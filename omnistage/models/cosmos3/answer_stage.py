"""The reasoner as a chat model that sees: transformers' Cosmos3 classes under the AR engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForImageTextToText

from omnistage.config.model import StageContext
from omnistage.errors import ConfigError, RequestError
from omnistage.models.cosmos3.answer_prompt import AnswerPrompt, Picture, PromptBuilder
from omnistage.ops.device import choose_device
from omnistage.ops.dtype import choose_dtype
from omnistage.ops.paged_attention import AttentionPlan, attention_implementation
from omnistage.ops.pretrained import load_pretrained, load_tokenizer
from omnistage.stages.ar.chat_template import ChatTemplate
from omnistage.stages.ar.model import Constraint, ContentSpan, Emitted, Event, Prompt, Sequence, Work
from omnistage.stages.ar.sections import Sections
from omnistage.stages.ar.text_model import eos_ids
from omnistage.stages.ar.text_output import TextOutput
from omnistage.stages.ar.text_prompt import conversation_text
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.stages.ar.torch_model import ForwardResult, ModelShape, SequenceMemory
from omnistage.stages.base import InputChunk, StageRequest


@dataclass(slots=True)
class AnswerState:
    """One request; `prompt` is there once its media are."""

    request: StageRequest
    text: TextOutput
    prompt: AnswerPrompt | None = None


class AnswerModel:
    """An `ARModel`. `params` hold "messages" or "raw_prompt", and optionally "cache_salt"."""

    def __init__(self, context: StageContext) -> None:
        stage, folder = context.stage, Path(context.model_path)
        device = choose_device(stage.device)
        dtype = choose_dtype(stage.dtype, device).dtype
        whole: Any = load_pretrained(AutoModelForImageTextToText, folder, dtype=dtype)
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        whole.requires_grad_(False).to(device)
        self._model: Any = whole.model
        self._text: Any = whole.model.language_model
        self._text.config._attn_implementation = attention_implementation(stage.attention_backend)
        self._head: Any = whole.lm_head
        self._template = ChatTemplate.load(folder)
        self._markup = context.spec.markup
        self._prompts = PromptBuilder(folder, self.tokenizer, whole.model)
        self._shape = _shape(whole.config.text_config, folder, device, dtype)

    @property
    def shape(self) -> ModelShape:
        return self._shape

    def open(self, request: StageRequest) -> AnswerState:
        sections = Sections(self._markup, request.tools) if "messages" in request.params else None
        state = AnswerState(request, TextOutput(self.tokenizer, request.sampling, sections))
        if "media" not in request.inputs:
            state.prompt = self._prompts.text(self._written(state))
        return state

    def feed(self, state: AnswerState, chunk: InputChunk) -> None:
        state.prompt = self._prompts.with_media(self._written(state), chunk.payload)
        chunk.payload.release()

    def prompt(self, state: AnswerState) -> Prompt | None:
        prompt = state.prompt
        if prompt is None:
            return None
        if not prompt.ids:
            raise RequestError("the prompt has no tokens", param="raw_prompt")
        content = tuple(ContentSpan(picture.start, picture.stop, picture.key) for picture in prompt.pictures)
        salt = str(state.request.params.get("cache_salt", "")).encode()
        return Prompt(token_ids=prompt.ids, content=content, salt=salt, param="messages")

    def can_step(self, state: AnswerState) -> bool:
        return True

    def constraint(self, state: AnswerState) -> Constraint | None:
        return None

    def forward(self, works: list[Work[AnswerState]], plan: AttentionPlan) -> ForwardResult:
        device = self._shape.device
        self._see([picture for work in works for picture in _pictures_in(work)])
        ids = [token for work in works for token in work.seq.tokens[work.start : work.stop]]
        embeds = self._text.embed_tokens(torch.tensor(ids, device=device))
        seen = _place(works, embeds)
        positions = torch.cat([_prompt_of(work).positions_of(work.start, work.stop) for work in works], dim=1)
        result = self._text(
            inputs_embeds=embeds[None], position_ids=positions[:, None].to(device), use_cache=False, plan=plan, **seen
        )
        for work in works:
            _forget_passed(work)
        return ForwardResult(result.last_hidden_state[0])

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden)
        return logits

    def sampled(self, works: list[Work[AnswerState]], hidden: Tensor, tokens: list[int]) -> None:
        """Nothing follows from a text token but its own embedding."""

    def emit(self, seq: Sequence[AnswerState], event: Event, memory: SequenceMemory) -> Emitted:
        return seq.state.text.emit(seq, event, memory)

    def close(self, state: AnswerState) -> None:
        """Nothing is held: chunks are read when they come."""

    def _written(self, state: AnswerState) -> str:
        request = state.request
        raw = request.params.get("raw_prompt")
        if isinstance(raw, str):
            return raw
        if self._template is None:
            raise RequestError("the checkpoint has no chat template: use raw_prompt", param="messages")
        text = conversation_text(self._template, request.params["messages"], self._markup, request)
        state.text.sections.follow(text)
        return text

    def _see(self, pictures: list[Picture]) -> None:
        """Encodes the pictures that have no rows, in one call of the vision tower."""
        wanted = [picture for picture in pictures if picture.rows is None]
        if not wanted:
            return
        device = self._shape.device
        pixels = torch.cat([picture.pixels for picture in wanted]).to(device)
        grids = torch.tensor([picture.grid for picture in wanted], device=device)
        result = self._model.get_image_features(pixels, grids, return_dict=True)
        levels = result.get("deepstack_features") or ()  # the edge model has none
        for index, picture in enumerate(wanted):
            picture.rows = result.pooler_output[index]
            picture.deep = tuple(level[index] for level in levels)


def create(context: StageContext) -> TorchBackend[AnswerState]:
    """Component factory of the stage `reasoner` of the variant `answers`."""
    model = AnswerModel(context)
    return TorchBackend(model, context.stage, tokenizer=model.tokenizer, markup=context.spec.markup)


def _shape(config: Any, folder: Path, device: torch.device, dtype: torch.dtype) -> ModelShape:
    ids = eos_ids(folder)
    if not ids:
        raise ConfigError("cosmos3: the checkpoint names no eos_token_id (generation_config.json)", param="model")
    return ModelShape(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        dtype=dtype,
        device=device,
        eos_token_ids=ids,
    )


def _prompt_of(work: Work[AnswerState]) -> AnswerPrompt:
    prompt = work.seq.state.prompt
    assert prompt is not None, "a sequence in a step has a prompt"
    return prompt


def _pictures_in(work: Work[AnswerState]) -> list[Picture]:
    """The pictures that the rows of `work` touch."""
    return [p for p in _prompt_of(work).pictures if p.start < work.stop and p.stop > work.start]


def _place(works: list[Work[AnswerState]], embeds: Tensor) -> dict[str, Any]:
    """Writes picture rows over `embeds` [N, hidden]; the arguments that add their deepstack rows in later layers."""
    mask = torch.zeros(len(embeds), dtype=torch.bool, device=embeds.device)
    levels: list[Tensor] = []
    row = 0
    for work in works:
        for picture in _pictures_in(work):
            assert picture.rows is not None
            inside = (picture.places >= work.start) & (picture.places < work.stop)
            places, chosen = (picture.places[inside] - work.start + row).to(embeds.device), inside.to(embeds.device)
            embeds[places] = picture.rows[chosen].to(embeds.dtype)
            mask[places] = True
            levels = levels or [torch.zeros_like(embeds) for _ in picture.deep]
            for level, rows in zip(levels, picture.deep, strict=True):
                level[places] = rows[chosen].to(embeds.dtype)
        row += work.stop - work.start
    if not levels:
        return {}
    return {"visual_pos_masks": mask[None], "deepstack_visual_embeds": [level[mask] for level in levels]}


def _forget_passed(work: Work[AnswerState]) -> None:
    for picture in _pictures_in(work):
        if picture.stop <= work.stop:
            picture.rows, picture.deep = None, ()

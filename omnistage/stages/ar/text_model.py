"""Causal text models from a Hugging Face folder, run by the torch backend with their unmodified transformers
modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from omnistage.config.model import StageConfig, StageContext, TextMarkup
from omnistage.errors import ConfigError, RequestError
from omnistage.ops.blocked import block_linear, block_linears, choose_layout
from omnistage.ops.device import choose_device
from omnistage.ops.dtype import choose_dtype
from omnistage.ops.paged_attention import AttentionPlan, attention_implementation
from omnistage.ops.pretrained import load_pretrained, load_tokenizer
from omnistage.ops.quantize import Int8Linear, pack_linears
from omnistage.stages.ar.chat_template import ChatTemplate, read_json
from omnistage.stages.ar.model import Constraint, Emitted, Event, Prompt, Sequence, Work
from omnistage.stages.ar.sections import Sections
from omnistage.stages.ar.text_output import TextOutput
from omnistage.stages.ar.text_prompt import conversation_text, flatten_messages
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.stages.ar.torch_model import ForwardResult, ModelShape, SequenceMemory
from omnistage.stages.base import InputChunk, StageRequest

PROMPT_KEYS = ("messages", "prompt", "raw_prompt", "token_ids")
_OTHER_KEYS = frozenset({"cache_salt"})
# Rotary embeddings of these types look at the longest position of the flat batch, which belongs to somebody else.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(slots=True)
class TextState:
    """One request. `transcripts` holds what was said in its audio parts, in order, once `complete`."""

    request: StageRequest
    text: TextOutput
    complete: bool
    transcripts: list[str] = field(default_factory=list)


class CausalTextModel:
    """An `ARModel` for any transformers causal language model with a `tokenizer.json`.

    A request's `params` hold one of "messages" (chat messages), "prompt" (one user message, or the text itself when the
    model has no chat template), "raw_prompt" (text as it is) and "token_ids"; "cache_salt" separates prefix caches. The
    port "transcript", if the request has it, delivers `{"texts": [...]}`, one text per audio part of the messages.

    The port "text" gives chunks as `TextOutput` makes them. Subclasses override `messages` to compose a conversation
    and `extra_params` to accept more keys. `markup` tells how answers to messages are written.
    """

    extra_params: frozenset[str] = frozenset()

    def __init__(self, folder: str | Path, config: StageConfig, *, markup: TextMarkup | None = None) -> None:
        self.markup = markup or TextMarkup()
        path = Path(folder)
        target = choose_device(config.device)
        dtype = choose_dtype(config.dtype, target).dtype
        self._name = config.name
        self.tokenizer: Tokenizer = load_tokenizer(path)
        self._template = ChatTemplate.load(path)
        attention = attention_implementation(config.attention_backend)
        model: PreTrainedModel = load_pretrained(
            AutoModelForCausalLM, path, dtype=dtype, attn_implementation=attention
        ).to(target)
        self._decoder: Any = model.get_decoder()
        self._head: Any = model.get_output_embeddings()
        if config.quantization == "int4":
            pack_linears(self._decoder)
            self._head = Int8Linear(self._head)
        else:
            layout = choose_layout(config.weight_layout, model)
            block_linears(self._decoder, layout)
            self._head = block_linear(self._head, layout)
        self._shape = _shape_of(model.config, path, dtype, target)

    @property
    def shape(self) -> ModelShape:
        return self._shape

    def open(self, request: StageRequest) -> TextState:
        known = {*PROMPT_KEYS, *_OTHER_KEYS, *self.extra_params}
        unknown = sorted(request.params.keys() - known)
        if unknown:
            raise RequestError(f"stage {self._name} does not know the parameter {unknown[0]!r}", param=unknown[0])
        given = [key for key in PROMPT_KEYS if request.params.get(key) is not None]
        if len(given) != 1:
            raise RequestError(f"stage {self._name} takes one of {', '.join(PROMPT_KEYS)}, not {given}", param="prompt")
        converses = given[0] == "messages" or (given[0] == "prompt" and self._template is not None)
        sections = Sections(self.markup, request.tools) if converses else None
        return TextState(
            request=request,
            text=TextOutput(self.tokenizer, request.sampling, sections),
            complete="transcript" not in request.inputs,
        )

    def feed(self, state: TextState, chunk: InputChunk) -> None:
        texts = chunk.payload.meta.get("texts", [])
        if chunk.port != "transcript" or not isinstance(texts, list):
            raise RequestError(f"stage {self._name} cannot read a chunk for the port {chunk.port!r}", param=chunk.port)
        state.transcripts += [str(text) for text in texts]
        state.complete = chunk.final
        chunk.payload.release()

    def prompt(self, state: TextState) -> Prompt | None:
        if not state.complete:
            return None
        params = state.request.params
        key = next(key for key in PROMPT_KEYS if params.get(key) is not None)
        token_ids = params["token_ids"] if key == "token_ids" else self._encode(state, key)
        if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
            raise RequestError("token_ids must be a list of integers", param="token_ids")
        if not token_ids:
            raise RequestError(f"{key} has no tokens", param=key)
        return Prompt(token_ids=token_ids, salt=str(params.get("cache_salt", "")).encode(), param=key)

    def messages(self, state: TextState) -> list[dict[str, Any]]:
        """The conversation that goes into the chat template: each message with its content as one string."""
        return flatten_messages(state.request.params["messages"], state.transcripts)

    def can_step(self, state: TextState) -> bool:
        return True

    def constraint(self, state: TextState) -> Constraint | None:
        return None

    def forward(self, works: list[Work[TextState]], plan: AttentionPlan) -> ForwardResult:
        ids: list[int] = []
        positions: list[int] = []
        for work in works:
            ids += work.seq.tokens[work.start : work.stop]
            positions += range(work.start, work.stop)
        device = self._shape.device
        result = self._decoder(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            plan=plan,
        )
        return ForwardResult(result.last_hidden_state[0])

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden)
        return logits

    def sampled(self, works: list[Work[TextState]], hidden: Tensor, tokens: list[int]) -> None:
        """Nothing follows from a text token but its own embedding."""

    def emit(self, seq: Sequence[TextState], event: Event, memory: SequenceMemory) -> Emitted:
        return seq.state.text.emit(seq, event, memory)

    def close(self, state: TextState) -> None:
        """Nothing is held: chunks are read when they come."""

    def _encode(self, state: TextState, key: str) -> list[int]:
        if key == "messages":
            return self._render(state, self.messages(state), key)
        text = state.request.params[key]
        if not isinstance(text, str):
            raise RequestError(f"{key} must be a string", param=key)
        if key == "prompt" and self._template is not None:
            return self._render(state, [{"role": "user", "content": text}], key)
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def _render(self, state: TextState, messages: list[dict[str, Any]], key: str) -> list[int]:
        if self._template is None:
            raise RequestError(f"the model of stage {self._name} has no chat template: use raw_prompt", param=key)
        text = conversation_text(self._template, messages, self.markup, state.request)
        state.text.sections.follow(text)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def backend_of(model: CausalTextModel, context: StageContext) -> TorchBackend[TextState]:
    """The runner around a text model."""
    return TorchBackend(model, context.stage, tokenizer=model.tokenizer, markup=model.markup)


def _shape_of(config: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> ModelShape:
    """Raises ConfigError for rotary embeddings that depend on the batch."""
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind in _BATCH_DEPENDENT_ROPE:
        raise ConfigError(f"rotary embeddings of type {kind!r} depend on batch mates and are not supported")
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    return ModelShape(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        dtype=dtype,
        device=device,
        eos_token_ids=eos_ids(folder),
    )


def eos_ids(folder: Path) -> frozenset[int]:
    """End tokens: of the generation config, else of the model config."""
    for name in ("generation_config.json", "config.json"):
        eos = read_json(folder / name).get("eos_token_id")
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()

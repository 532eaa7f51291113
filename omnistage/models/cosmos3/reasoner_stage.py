"""The stage `reasoner`: reads the texts of a request and hands their keys and values to the stage `generator`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from omnistage.config.model import StageContext
from omnistage.errors import RequestError
from omnistage.models.cosmos3 import kv_payload
from omnistage.models.cosmos3.ask import Limits, resolve
from omnistage.models.cosmos3.checkpoint import Checkpoint, read_checkpoint
from omnistage.models.cosmos3.loading import load_tokenizer, load_transformer, warn_about_safety
from omnistage.models.cosmos3.prompt import messages_of
from omnistage.models.cosmos3.reasoner import Ids, Reasoner, Tokens
from omnistage.ops.device import choose_device
from omnistage.ops.dtype import choose_dtype
from omnistage.ops.packed_attention import choose_backend
from omnistage.request import StageMetrics
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.generation.model import GenerationModel, Produced


@dataclass
class TextState:
    """The texts of one request by branch; `cached` counts tokens that had been read before."""

    ids: dict[str, Ids] = field(default_factory=dict)
    done: bool = False
    cached: int = 0


class ReasonerModel:
    """One batched prefill per step over all requests that wait; texts in the reasoner's cache cost nothing."""

    def __init__(self, reasoner: Reasoner, tokens: Tokens, checkpoint: Checkpoint, limits: Limits) -> None:
        self._reasoner = reasoner
        self._tokens = tokens
        self._checkpoint = checkpoint
        self._limits = limits

    def open(self, request: StageRequest) -> TextState:
        ask = resolve(request.params, self._checkpoint, self._limits)
        messages = messages_of(ask)
        state = TextState({"cond": self._tokens(messages.positive)})
        if "uncond" in ask.texts:
            state.ids["uncond"] = self._tokens(messages.negative)
        return state

    def feed(self, state: TextState, chunk: InputChunk) -> None:
        raise RequestError(f"the reasoner has no input port {chunk.port!r}")

    def pending(self, state: TextState) -> int:
        return 0 if state.done else sum(len(ids) for ids in state.ids.values())

    def run(self, states: list[TextState]) -> list[list[Produced]]:
        cached = [sum(len(ids) for ids in state.ids.values() if self._reasoner.cached(ids)) for state in states]
        texts = iter(self._reasoner.read([ids for state in states for ids in state.ids.values()]))
        produced: list[list[Produced]] = []
        for state in states:
            payloads = [kv_payload.write(name, ids, next(texts)) for name, ids in state.ids.items()]
            produced.append([Produced(port="kv", payload=payload) for payload in payloads])
            produced[-1][-1].final = True
        for state, count in zip(states, cached, strict=True):
            state.done, state.cached = True, count
        return produced

    def done(self, state: TextState) -> bool:
        return state.done

    def metrics(self, state: TextState) -> StageMetrics:
        return StageMetrics(input_tokens=sum(len(ids) for ids in state.ids.values()), cached_tokens=state.cached)

    def close(self, state: TextState) -> None:
        """Holds no payload."""


def reasoner(context: StageContext) -> GenerationModel[TextState]:
    stage, limits = context.stage, context.config.limits
    checkpoint = read_checkpoint(Path(context.model_path))
    warn_about_safety(checkpoint)
    device = choose_device(stage.device)
    dtype = choose_dtype(stage.dtype, device).dtype
    backend = choose_backend(stage.attention_backend, device, dtype, stage=stage.name)
    transformer = load_transformer(checkpoint, "understanding", dtype, device)
    return ReasonerModel(
        Reasoner(transformer, backend, int(stage.options["reasoner_cache_mb"]) << 20),
        Tokens(load_tokenizer(checkpoint)),
        checkpoint,
        Limits(limits.max_video_frames, limits.max_image_pixels),
    )

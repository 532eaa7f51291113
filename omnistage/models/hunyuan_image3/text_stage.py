"""The stage `ar`: answers about texts and pictures, thinks about a picture to draw, chooses its size."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from omnistage.config.model import StageContext
from omnistage.models.hunyuan_image3 import kv_payload
from omnistage.models.hunyuan_image3.ask import TRIGGERS, Ask, read_ask
from omnistage.models.hunyuan_image3.backbone import embedded
from omnistage.models.hunyuan_image3.components import Components
from omnistage.models.hunyuan_image3.course import Course
from omnistage.models.hunyuan_image3.drawing_stage import KV, THOUGHTS, components_of
from omnistage.models.hunyuan_image3.layout import Conversation, Layout, Renderer
from omnistage.models.hunyuan_image3.references import (
    Reference,
    ReferenceEncoder,
    ReferenceRows,
    References,
    content_key,
    place,
)
from omnistage.models.hunyuan_image3.rotary import positions
from omnistage.models.hunyuan_image3.vocabulary import Vocabulary
from omnistage.ops.paged_attention import AttentionPlan
from omnistage.payload import MultimodalPayload
from omnistage.request import FinishReason
from omnistage.stages.ar.model import Constraint, ContentSpan, Emitted, Event, Produced, Prompt, Sequence, Work
from omnistage.stages.ar.text_output import TextOutput
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.stages.ar.torch_model import ForwardResult, ModelShape, SequenceMemory
from omnistage.stages.base import InputChunk, StageRequest


@dataclass(slots=True)
class Talk:
    """One request. `references` and `keys` are there once its pictures are; `rows` while their part is computed."""

    request: StageRequest
    ask: Ask
    layout: Layout
    course: Course
    text: TextOutput
    noise: list[Tensor]
    references: list[Reference] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    rows: list[ReferenceRows | None] = field(default_factory=list)


class Writer:
    """An `ARModel` over the backbone. Text chunks carry `reasoning`: True while the model thinks."""

    def __init__(self, components: Components, vocabulary: Vocabulary) -> None:
        self._checkpoint = components.checkpoint
        self._vocabulary = vocabulary
        self._references = References(components.checkpoint, vocabulary.sizes)
        self._backbone, self._head = components.backbone(), components.text_head()
        self._encoder = ReferenceEncoder(components)
        self._rotary = components.rotary
        checkpoint = components.checkpoint
        self._shape = ModelShape(
            layers=checkpoint.layers,
            kv_heads=checkpoint.kv_heads,
            head_dim=checkpoint.head_dim,
            vocab_size=checkpoint.vocab,
            max_model_len=checkpoint.max_tokens,
            dtype=components.dtype,
            device=components.device,
            eos_token_ids=checkpoint.defaults.eos,
        )

    @property
    def shape(self) -> ModelShape:
        return self._shape

    def open(self, request: StageRequest) -> Talk:
        ask = read_ask(request.params)
        renderer = Renderer(self._vocabulary, ask.template, self._checkpoint.vit_tokens)
        grids = tuple(self._references.grid(shape) for shape in ask.pictures)
        generator = torch.Generator().manual_seed(request.seed)
        return Talk(
            request=request,
            ask=ask,
            layout=renderer.question(Conversation(ask.system, ask.turns, grids), TRIGGERS[ask.task]),
            course=Course(self._vocabulary, ask.task, renderer.tail(), chooses_size=ask.chooses_size),
            text=TextOutput(self._vocabulary.tokenizer, request.sampling),
            noise=self._references.noise(ask.pictures, generator),
        )

    def feed(self, state: Talk, chunk: InputChunk) -> None:
        pictures = [chunk.payload[str(index)] for index in range(len(state.ask.pictures))]
        grids = [self._references.grid(shape) for shape in state.ask.pictures]
        seed = state.request.seed
        state.references = [self._references.read(*pair) for pair in zip(pictures, state.noise, strict=True)]
        state.keys = [content_key(picture, grid, seed) for picture, grid in zip(pictures, grids, strict=True)]
        state.rows = [None] * len(pictures)
        chunk.payload.release()

    def prompt(self, state: Talk) -> Prompt | None:
        layout = state.layout
        if len(state.references) < len(layout.references):
            return None
        return Prompt(
            token_ids=layout.ids,
            content=tuple(
                ContentSpan(where.timestep, where.vision.stop, key)
                for where, key in zip(layout.references, state.keys, strict=True)
            ),
            unsplittable=tuple(where.joint for where in layout.references),
            salt=state.ask.cache_salt.encode(),
        )

    def can_step(self, state: Talk) -> bool:
        return True

    def constraint(self, state: Talk) -> Constraint | None:
        return state.course.constraint

    def forward(self, works: list[Work[Talk]], plan: AttentionPlan) -> ForwardResult:
        self._see(works)
        ids = [token for work in works for token in work.seq.tokens[work.start : work.stop]]
        rows = embedded(self._backbone, ids)
        row = 0
        for work in works:
            count = work.stop - work.start
            place(rows[row : row + count], work.start, work.seq.state.layout, work.seq.state.rows)
            row += count
        pairs = [positions(work.seq.state.layout.grids, work.start, work.stop) for work in works]
        hidden = self._backbone(rows, self._rotary(torch.cat(pairs)), plan)
        for work in works:
            _forget_passed(work)
        return ForwardResult(self._head.norm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head.logits(hidden)

    def sampled(self, works: list[Work[Talk]], hidden: Tensor, tokens: list[int]) -> None:
        """Nothing follows from a token but its own embedding."""

    def emit(self, seq: Sequence[Talk], event: Event, memory: SequenceMemory) -> Emitted:
        state = seq.state
        reasoning = state.course.section == "think"
        if event.sampled is not None:
            state.course.take(event.sampled.token)
        if state.course.ended:
            event = msgspec.structs.replace(event, finish=FinishReason.STOP)
        emitted = state.text.emit(seq, event, memory)
        for output in emitted.outputs:
            output.payload.meta["reasoning"] = reasoning
        stop = emitted.stop or state.course.ended
        handed = self._hand_over(state, memory) if stop or event.finish is not None else ()
        return Emitted((*emitted.outputs, *handed), stop=stop)

    def close(self, state: Talk) -> None:
        """Nothing is held: chunks are read when they come."""

    def _see(self, works: Rows[Work[Talk]]) -> None:
        """Encodes the pictures that have no rows and whose places a step touches, in one go."""
        wanted = [(work.seq.state, index) for work in works for index in _touched(work)]
        wanted = [(state, index) for state, index in wanted if state.rows[index] is None]
        made = self._encoder([state.references[index] for state, index in wanted])
        for (state, index), rows in zip(wanted, made, strict=True):
            state.rows[index] = rows

    def _hand_over(self, state: Talk, memory: SequenceMemory) -> tuple[Produced, ...]:
        """The thoughts, and the keys and values of the prompt and of the thoughts but for their end tag."""
        if THOUGHTS not in state.request.outputs:
            return ()
        course, thoughts = state.course, state.course.thoughts
        meta = {"ids": thoughts, "ratio": course.ratio, "complete": course.ended and thoughts is not None}
        outputs = [Produced(port=THOUGHTS, payload=MultimodalPayload(meta=meta), final=True)]
        if state.ask.handover and thoughts is not None and course.ended:
            said = state.layout.ids if state.ask.task == "ratio" else [*state.layout.ids[:-1], *thoughts[:-1]]
            chunks = kv_payload.write(said, memory.keys_values(0, len(said)))
            last = len(chunks) - 1
            outputs += [Produced(port=KV, payload=chunk, final=at == last) for at, chunk in enumerate(chunks)]
        return tuple(outputs)


def create(context: StageContext) -> TorchBackend[Talk]:
    """Component factory of the stage `ar`."""
    return TorchBackend(Writer(*components_of(context)), context.stage)


def _touched(work: Work[Talk]) -> list[int]:
    """The reference pictures that the rows of `work` touch."""
    places = work.seq.state.layout.references
    return [i for i, where in enumerate(places) if where.timestep < work.stop and where.vision.stop > work.start]


def _forget_passed(work: Work[Talk]) -> None:
    """Rows of pictures whose last row is computed stay with the cache only."""
    state = work.seq.state
    for index, where in enumerate(state.layout.references):
        if where.vision.stop <= work.stop:
            state.rows[index] = None

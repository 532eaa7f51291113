"""A torch-free backend whose answers betray every mistake of scheduler and block pool.

It keeps a paged memory of token ids. The next token is a hash of what the block table reads back, so a row that was
lost, overwritten, shared wrongly or never computed changes the answer; `expected` gives the right one in closed form.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from omnistage.config.model import StageConfig
from omnistage.errors import RequestError
from omnistage.payload import MultimodalPayload
from omnistage.sampling import SamplingParams
from omnistage.stages.ar.engine import AREngine
from omnistage.stages.ar.model import (
    BackendLimits,
    ContentSpan,
    Emitted,
    Event,
    Produced,
    Prompt,
    Sampled,
    Sequence,
    Work,
)
from omnistage.stages.base import InputChunk, StageRequest, StepOutput

VOCAB = 1000
EOS = 999


def next_token(tokens: Tokens[int]) -> int:
    digest = blake2b(repr(list(tokens)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % EOS


def expected(prompt: Tokens[int], count: int) -> list[int]:
    """The `count` tokens that follow `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class FakeState:
    params: dict[str, Any]
    steps_allowed: int | None
    prompt: Prompt | None = None
    chunks: list[InputChunk] = field(default_factory=list)
    closed: bool = False


class PagedFake:
    """Params: `tokens` (the prompt; absent: the first chunk's meta "tokens"), `gated` (each step needs one chunk),
    `stop_at` (number of tokens after which the model itself stops), and the fields of `Prompt`."""

    def __init__(self, *, blocks: int = 64, block_size: int = 4, max_model_len: int = 512) -> None:
        self.limits = BackendLimits(
            total_blocks=blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            eos_token_ids=frozenset({EOS}),
        )
        self.memory = [[-1] * block_size for _ in range(blocks)]
        self.batches: list[list[tuple[str, int, int]]] = []
        self.broken_execute: set[str] = set()
        self.broken_emit: set[str] = set()
        self.script: dict[str, list[int]] = {}
        self.closed: list[str] = []
        self.shut = False

    def open(self, request: StageRequest) -> FakeState:
        if request.params.get("refuse"):
            raise RequestError("refused", param="refuse")
        return FakeState(request.params, 0 if request.params.get("gated") else None)

    def feed(self, seq: Sequence[FakeState], chunk: InputChunk) -> None:
        if chunk.payload.meta.get("bad"):
            raise RequestError("bad chunk", param=chunk.port)
        seq.state.chunks.append(chunk)
        if seq.prompt is not None and seq.state.steps_allowed is not None:
            seq.state.steps_allowed += 1

    def prompt(self, seq: Sequence[FakeState]) -> Prompt | None:
        params, tokens = seq.state.params, seq.state.params.get("tokens")
        if tokens is None:
            if not seq.state.chunks:
                return None
            tokens = seq.state.chunks[0].payload.meta["tokens"]
        return Prompt(
            token_ids=list(tokens),
            content=tuple(ContentSpan(*span) for span in params.get("content", ())),
            unsplittable=tuple(params.get("unsplittable", ())),
            salt=params.get("salt", b""),
            cacheable=params.get("cacheable", True),
        )

    def can_step(self, seq: Sequence[FakeState]) -> bool:
        allowed = seq.state.steps_allowed
        return allowed is None or seq.generated <= allowed

    def execute(self, works: list[Work[FakeState]]) -> list[Sampled | None]:
        self.batches.append([(work.seq.request_id, work.start, work.stop) for work in works])
        for work in works:
            if work.seq.request_id in self.broken_execute:
                raise ValueError(f"cannot compute {work.seq.request_id}")
        return [self._compute(work) for work in works]

    def _compute(self, work: Work[FakeState]) -> Sampled | None:
        size, seq = self.limits.block_size, work.seq
        for position in range(work.start, work.stop):
            self.memory[seq.blocks[position // size]][position % size] = seq.tokens[position]
        if not work.sample:
            return None
        scripted = self.script.get(seq.request_id)
        if scripted:
            return Sampled(scripted[seq.generated])
        read = [self.memory[seq.blocks[position // size]][position % size] for position in range(work.stop)]
        return Sampled(next_token(read))

    def emit(self, seq: Sequence[FakeState], event: Event) -> Emitted:
        if seq.request_id in self.broken_emit:
            raise ValueError(f"cannot emit {seq.request_id}")
        assert not seq.state.closed
        stop = event.generated == seq.state.params.get("stop_at")
        seq.state.closed = stop or event.finish is not None
        token_ids = [] if event.sampled is None else [event.sampled.token]
        payload = MultimodalPayload.text("", token_ids=token_ids, generated=event.generated)
        return Emitted((Produced(port="text", payload=payload, final=seq.state.closed),), stop=stop)

    def close(self, seq: Sequence[FakeState]) -> None:
        assert seq.request_id not in self.closed, "closed twice"
        self.closed.append(seq.request_id)
        for chunk in seq.state.chunks:
            chunk.payload.release()

    def shutdown(self) -> None:
        self.shut = True


def stage_config(**overrides: Any) -> StageConfig:
    return StageConfig(name="thinker", kind="ar", **{"token_budget": 16, "max_num_seqs": 8, **overrides})


def fake_engine(backend: PagedFake | None = None, **overrides: Any) -> AREngine[FakeState]:
    return AREngine(backend or PagedFake(), stage_config(**overrides))


def stage_request(request_id: str, tokens: Tokens[int] | None = None, **fields: Any) -> StageRequest:
    """A request with greedy sampling; `params` and `sampling` entries may be given among `fields`."""
    sampling = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__}
    own = {"priority", "inputs", "outputs"} & fields.keys()
    outer = {name: fields.pop(name) for name in own}
    params = fields if tokens is None else {"tokens": list(tokens), **fields}
    return StageRequest(
        request_id=request_id,
        params=params,
        sampling=SamplingParams(temperature=0, **sampling),
        **{"outputs": ("text",), **outer},
    )


def chunk(request_id: str, *, port: str = "in", seq: int = 0, final: bool = False, **meta: Any) -> InputChunk:
    return InputChunk(request_id=request_id, port=port, seq=seq, final=final, payload=MultimodalPayload(meta=meta))


@dataclass
class Collected:
    """What an engine gave out, per request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    finals: dict[str, list[str]] = field(default_factory=dict)

    def take(self, output: StepOutput) -> None:
        for emission in output.emissions:
            assert emission.request_id not in self.reasons, "emission after the end"
            self.tokens.setdefault(emission.request_id, []).extend(emission.payload.meta.get("token_ids", []))
            if emission.final:
                self.finals.setdefault(emission.request_id, []).append(emission.port)
        for finished in output.finished:
            assert finished.request_id not in self.reasons, "finished twice"
            self.reasons[finished.request_id] = finished.reason.value
            self.metrics[finished.request_id] = finished.metrics


def run(engine: AREngine[Any], collected: Collected | None = None, *, limit: int = 10_000) -> Collected:
    """Steps until there is no work; each step checks the books."""
    result = collected or Collected()
    for _ in range(limit):
        if not engine.has_work():
            return result
        result.take(engine.step())
        engine.check_integrity()
    raise AssertionError(f"still at work after {limit} steps")

"""The stages of ar2dit: a closed-form AR backend with paged keys, values and hidden rows, and toydit drawing from them.

A row of hidden state is a digest of its token and of the row before it, read back from the backend's paged memory; its
keys and values follow from it. So a row is right only if all rows before it are, whoever computed them, and the picture
is right only if every row arrived. No torch anywhere.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from omnistage.config.model import StageContext
from omnistage.errors import StageError
from omnistage.payload import MultimodalPayload
from omnistage.stages.ar.model import (
    ARBackend,
    BackendLimits,
    Emitted,
    Event,
    Produced,
    Prompt,
    Sampled,
    Sequence,
    Work,
)
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.diffusion.model import DiffusionModel
from omnistage.testing.closed_form import EOS, tokens_of
from omnistage.testing.echo3_stages import limits_of
from omnistage.testing.knobs import pause
from omnistage.testing.toydit_stage import ToyDiT, ToyState

PORT = "rows"
HIDDEN = 32
# Layers, keys and values, heads, head size.
KV_SHAPE = (2, 2, 2, 2)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def hidden_row(token: int, before: Bytes) -> Bytes:
    """uint8 [32] of a token after the row `before`, zeros for the first token."""
    return np.frombuffer(sha256(before.tobytes() + token.to_bytes(2, "little")).digest(), np.uint8)


def keys_values(hidden: Bytes) -> Floats:
    """float32 [layers, 2, heads, dim] of a hidden row [32]."""
    values: Floats = hidden[:16].astype(np.float32) / 255 + hidden[-1]
    return values.reshape(KV_SHAPE)


def description(hidden: Bytes, kv: Floats) -> str:
    """What rows, hidden [n, 32] and kv [n, layers, 2, heads, dim], tell toydit to draw."""
    return "".join(sha256(h.tobytes() + k.tobytes()).hexdigest()[:16] for h, k in zip(hidden, kv, strict=True))


def description_of(tokens: Iterable[int]) -> str:
    """The same for a sequence of tokens, in closed form."""
    row, told = np.zeros(HIDDEN, np.uint8), ""
    for token in tokens:
        row = hidden_row(token, row)
        told += description(row[None], keys_values(row)[None])
    return told


def handed_tokens(prompt: str, answered: int | None = None) -> list[int]:
    """Tokens whose rows are handed over: all that were computed. `answered` is the bound on answer tokens; the last
    token of an answer is never computed."""
    answer = [*tokens_of(prompt), EOS][:answered]
    return [EOS, *tokens_of(prompt), *answer[:-1]]


@dataclass
class RowState:
    """One request: what it answers, and how many of its rows are handed over."""

    prompt: list[int] = field(default_factory=list)
    complete: bool = False
    handed: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))


class RowThinker:
    """Answers with its prompt and hands every computed row over as soon as it is there."""

    def __init__(self, limits: BackendLimits, delay_s: float) -> None:
        self.limits = limits
        self._delay_s = delay_s
        slots = limits.total_blocks * limits.block_size
        self._hidden: Bytes = np.zeros((slots, HIDDEN), np.uint8)
        self._kv: Floats = np.zeros((slots, *KV_SHAPE), np.float32)

    def open(self, request: StageRequest) -> RowState:
        return RowState()

    def feed(self, seq: Sequence[RowState], chunk: InputChunk) -> None:
        seq.state.prompt += tokens_of(str(chunk.payload.meta.get("text", "")))
        seq.state.complete = chunk.final
        chunk.payload.release()

    def prompt(self, seq: Sequence[RowState]) -> Prompt | None:
        return Prompt(token_ids=[EOS, *seq.state.prompt]) if seq.state.complete else None

    def can_step(self, seq: Sequence[RowState]) -> bool:
        return True

    def execute(self, works: list[Work[RowState]]) -> list[Sampled | None]:
        pause(self._delay_s)
        for work in works:
            self._compute(work.seq, work.start, work.stop)
        return [self._next(work) if work.sample else None for work in works]

    def _compute(self, seq: Sequence[RowState], start: int, stop: int) -> None:
        slots = self._slots(seq, max(0, start - 1), stop)
        row = self._hidden[slots.pop(0)] if start else np.zeros(HIDDEN, np.uint8)
        for token, slot in zip(seq.tokens[start:stop], slots, strict=True):
            row = hidden_row(token, row)
            self._hidden[slot], self._kv[slot] = row, keys_values(row)

    def _slots(self, seq: Sequence[RowState], start: int, stop: int) -> list[int]:
        size = self.limits.block_size
        return [seq.blocks[at // size] * size + at % size for at in range(start, stop)]

    def _next(self, work: Work[RowState]) -> Sampled:
        answer = work.seq.state.prompt
        done = work.stop - work.seq.prompt_len
        return Sampled(answer[done] if done < len(answer) else EOS)

    def emit(self, seq: Sequence[RowState], event: Event) -> Emitted:
        token = event.sampled.token if event.sampled is not None else EOS
        tokens = [] if token == EOS else [token]
        final = event.finish is not None
        text = seq.state.decoder.decode(bytes(tokens), final)
        told = MultimodalPayload.text(text, token_ids=tokens)
        rows = Produced(port=PORT, payload=self._rows(seq, event), final=final)
        return Emitted((Produced(port="text", payload=told, final=final), rows))

    def _rows(self, seq: Sequence[RowState], event: Event) -> MultimodalPayload:
        """Rows that are computed and not handed over; the new token's own row is not computed yet."""
        state = seq.state
        start, stop = state.handed, state.handed
        if event.sampled is not None:
            stop = seq.prompt_len + event.generated - 1
        slots = self._slots(seq, start, stop)
        state.handed = stop
        return MultimodalPayload.of({"start": start}, hidden=self._hidden[slots], kv=self._kv[slots])

    def close(self, seq: Sequence[RowState]) -> None:
        """Holds nothing: a request's rows are in its blocks."""

    def shutdown(self) -> None:
        """Holds nothing."""


class RowDiT(ToyDiT):
    """toydit, whose prompt is the description of the rows that came. Raises StageError when rows are missing."""

    def feed(self, state: ToyState, chunk: InputChunk) -> None:
        payload = chunk.payload
        if payload.tensors:
            hidden, kv = payload["hidden"], payload["kv"]
            known, start = len(state.prompt) // 16, payload.meta["start"]
            if start != known:
                raise StageError(f"rows from {start} came after {known} rows")
            state.prompt += description(hidden, kv)
        state.complete = chunk.final
        payload.release()


def thinker(context: StageContext) -> ARBackend[RowState]:
    return RowThinker(limits_of(context, EOS), float(context.stage.options["step_delay_s"]))


def dit(context: StageContext) -> DiffusionModel[ToyState]:
    options = context.stage.options
    return RowDiT(float(options["step_delay_s"]), float(options["decode_delay_s"]))

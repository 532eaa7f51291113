"""The narrow interface between the AR engine and what computes: `ARBackend`. Torch-free.

The engine owns requests, scheduling, KV blocks, finish rules and metrics; a backend owns numbers: it turns the rows
of a step into next tokens. The torch runner (`omnistage.stages.ar.torch_backend`) is one backend, closed-form test
models and other inference engines are others. The component of a stage of kind "ar" is an `ARBackend`.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import msgspec

from omnistage.request import FinishReason
from omnistage.stages.ar.sequence import ContentSpan, Prompt, Sequence
from omnistage.stages.base import InputChunk, Produced, StageRequest

__all__ = [
    "ARBackend",
    "BackendLimits",
    "Constraint",
    "ContentSpan",
    "Emitted",
    "Event",
    "Produced",
    "Prompt",
    "Sampled",
    "Sequence",
    "Work",
]

S = TypeVar("S")


class BackendLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend holds: `total_blocks` KV blocks of `block_size` tokens, sequences of at most `max_model_len`
    tokens.

    `eos_token_ids` end a request unless it ignores them; `vocab_size` bounds every token id of a request.
    """

    total_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()


class Constraint(msgspec.Struct, frozen=True):
    """What the model itself demands of the next token of a request: one `forced` id, or one of the `allowed` ids.

    `greedy` takes the likeliest of the permitted ids whatever the request's temperature. A forced token ignores all
    sampling parameters.
    """

    forced: int | None = None
    allowed: tuple[int, ...] | None = None
    greedy: bool = False


class Sampled(msgspec.Struct, frozen=True):
    """The next token of a sequence. `logprob` (natural log, of the model's unmodified distribution) when it was asked
    for; `top` the likeliest (token, logprob) pairs, best first."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Work(msgspec.Struct, Generic[S], eq=False):
    """Rows `start..stop` of a sequence to compute in this step. With `sample` its next token is wanted too.

    `seq.blocks` covers `stop` positions; the positions before `start` are in the cache.
    """

    seq: Sequence[S]
    start: int
    stop: int
    sample: bool

    @property
    def is_decode(self) -> bool:
        """True for the single row of a sequence whose prompt is computed."""
        return self.stop - self.start == 1 and self.start >= self.seq.prompt_len


class Event(msgspec.Struct, frozen=True):
    """Progress of a sequence: the new token (not yet in `seq.tokens`), how many are generated with it, and the finish
    reason if the request ends here. `sampled` is None when a request ends without a new token."""

    sampled: Sampled | None
    generated: int
    finish: FinishReason | None


class Emitted(msgspec.Struct, frozen=True):
    """What a request gives out after an event. `stop` ends the request here (stop string, model-owned end).

    Ports that are still open when a request ends are closed by the engine with an empty final payload.
    """

    outputs: tuple[Produced, ...] = ()
    stop: bool = False


class ARBackend(Protocol[S]):
    """See the module docstring. `S` is the backend's state of one request; it is found in `Sequence.state`.

    One thread calls. `execute` may be repeated for the same rows (after an error of a batch mate, after a
    preemption), so it must not change what a request has got so far; `emit` is called exactly once per token, in
    order.
    """

    @property
    def limits(self) -> BackendLimits: ...

    def open(self, request: StageRequest) -> S:
        """A fresh state. Raises RequestError when the request can never run; then nothing is kept."""
        ...

    def feed(self, seq: Sequence[S], chunk: InputChunk) -> None:
        """Takes a chunk and from then on releases its payload. Raises RequestError without having taken it."""
        ...

    def prompt(self, seq: Sequence[S]) -> Prompt | None:
        """The prompt, or None while it waits for input. Asked after `open` and after each `feed` until it is there.

        Raises RequestError when the input makes no usable prompt.
        """
        ...

    def can_step(self, seq: Sequence[S]) -> bool:
        """False while the next step of the sequence needs input that has not come. Asked after `prompt`, `feed`,
        `emit`."""
        ...

    def execute(self, works: list[Work[S]]) -> list[Sampled | None]:
        """Computes the rows of a step; per work its next token (None without `sample`)."""
        ...

    def emit(self, seq: Sequence[S], event: Event) -> Emitted:
        """Takes note of a token or the end of a request and gives what goes out because of it."""
        ...

    def close(self, seq: Sequence[S]) -> None:
        """Drops the state and releases payloads still held; once per sequence, also after an abort or an error."""
        ...

    def shutdown(self) -> None:
        """Releases everything; nothing is called afterwards."""
        ...

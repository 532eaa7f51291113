"""What a model that the torch runner runs provides (`ARModel`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from omnistage.ops.paged_attention import AttentionPlan, PagedCache, slots_of
from omnistage.stages.ar.model import Constraint, Emitted, Event, Prompt, Sampled, Sequence, Work
from omnistage.stages.base import InputChunk, StageRequest

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the runner has to know of a model.

    `handoff_width` is the length of the row that the model keeps beside the keys and values of every position (0:
    none). With `penalize_prompt` repetition penalties count the prompt's tokens, else only generated ones.
    """

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: frozenset[int] = frozenset()
    handoff_width: int = 0
    penalize_prompt: bool = True


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """`hidden` [N, H] of the flat batch, after the final norm; `handoff` [N, W] rows to keep, None to keep none."""

    hidden: Tensor
    handoff: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SequenceMemory:
    """What the cache holds of one sequence: positions that are computed, cached ones included.

    `rows` [slots, W] are the hand-off rows of all sequences, `told` the logprobs of this one's prompt by position.
    """

    cache: PagedCache
    rows: Tensor
    told: Mapping[int, Sampled]
    seq: Sequence[Any]

    def handoff(self, start: int, stop: int) -> Tensor:
        """Hand-off rows [stop - start, W] (a copy)."""
        return self.rows[self._slots(start, stop)]

    def keys_values(self, start: int, stop: int) -> Tensor:
        """Keys and values [layers, 2, kv_heads, stop - start, head_dim] (a copy)."""
        return self.cache.read(self._slots(start, stop))

    def prompt_logprobs(self) -> list[Sampled]:
        """For each prompt token after the first its own logprob and the likeliest ones; empty unless asked for."""
        return [self.told[position] for position in sorted(self.told)]

    def _slots(self, start: int, stop: int) -> Tensor:
        blocks, size = self.seq.blocks, self.cache.block_size
        if not 0 <= start <= stop <= len(blocks) * size:
            raise IndexError(f"positions {start}..{stop} of request {self.seq.request_id} are not in the cache")
        return slots_of(blocks, start, stop, size, self.cache.device)


class ARModel(Protocol[S]):
    """A model behind `TorchBackend`. `S` is its state of one request, found in `Sequence.state`.

    The rows of a request are numbered by position: prompt, then generated tokens. A row may be computed more than once
    (preemption), so the state keeps whatever its input needs. The model owns embeddings, positions and attention kinds:
    `forward` gets the flat batch and calls the library's module with `plan=`.
    """

    @property
    def shape(self) -> ModelShape: ...

    def open(self, request: StageRequest) -> S:
        """A fresh state. Raises RequestError when the request can never run."""
        ...

    def feed(self, state: S, chunk: InputChunk) -> None:
        """Takes a chunk and from then on releases its payload. Raises RequestError without having taken it."""
        ...

    def prompt(self, state: S) -> Prompt | None:
        """The prompt, or None while it waits for input. Raises RequestError when there is no usable one."""
        ...

    def can_step(self, state: S) -> bool:
        """False while the input row of the newest token needs a chunk that has not come."""
        ...

    def constraint(self, state: S) -> Constraint | None:
        """What the model demands of the next token."""
        ...

    def forward(self, works: list[Work[S]], plan: AttentionPlan) -> ForwardResult:
        """One forward over the rows of all works, in order."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab] of the rows [R, H] after which a token is sampled."""
        ...

    def sampled(self, works: list[Work[S]], hidden: Tensor, tokens: list[int]) -> None:
        """Batched work on new tokens (a code predictor, the next input rows): hidden [B, H], one token per work.

        May come again for the same position with the same token; it must overwrite, not append. Whether a token is the
        last of its request tells `work.seq.finish_after(token)`.
        """
        ...

    def emit(self, seq: Sequence[S], event: Event, memory: SequenceMemory) -> Emitted:
        """Takes note of a token or the end of a request and gives what goes out because of it; once per token."""
        ...

    def close(self, state: S) -> None:
        """Releases payloads still held; once per state, also after an abort or an error."""
        ...

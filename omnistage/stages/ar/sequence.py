"""The record of one request in an AR stage. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

import msgspec

from omnistage.request import FinishReason, StageMetrics
from omnistage.sampling import SamplingParams
from omnistage.stages.base import StageRequest

S = TypeVar("S")


class ContentSpan(msgspec.Struct, frozen=True):
    """Prompt positions `start..stop` whose rows are determined by `key` (a hash of media content), not by token ids."""

    start: int
    stop: int
    key: bytes


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a request starts from. An empty prompt ends the request at once.

    `content` and `salt` enter the hash under which blocks of the prompt are shared; `cacheable` False keeps the request
    out of the prefix cache (its rows depend on more than tokens and content). Positions `start..stop` of an
    `unsplittable` span (bidirectional attention) are computed in one step; spans are disjoint and ascending.
    `param` is the request field that errors about the prompt name.
    """

    token_ids: list[int]
    content: tuple[ContentSpan, ...] = ()
    unsplittable: tuple[tuple[int, int], ...] = ()
    salt: bytes = b""
    cacheable: bool = True
    param: str = "prompt"


class Status(Enum):
    """Where a sequence is. PENDING has no prompt yet, EMPTY has nothing to compute; PARKED waits for input or credit,
    with or without blocks."""

    PENDING = "pending"
    EMPTY = "empty"
    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence(Generic[S]):
    """One request: its tokens (prompt, then generated), its KV blocks and how far they are filled.

    Positions `0..computed` are in the cache; `blocks` covers at least those. A sequence is computed up to
    `len(tokens)`, then the next token is sampled. `state` belongs to the backend.
    """

    request: StageRequest
    state: S
    arrival: int
    added_s: float
    request_id: str = field(init=False)
    params: SamplingParams = field(init=False)
    seed: int = field(init=False)
    status: Status = Status.PENDING
    prompt: Prompt | None = None
    tokens: list[int] = field(default_factory=list)
    prompt_len: int = 0
    max_length: int = 0
    stop_ids: frozenset[int] = frozenset()
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    computed: int = 0
    cached_tokens: int = 0
    ready: bool = True
    held: bool = False
    started: bool = False
    metrics: StageMetrics = field(default_factory=StageMetrics)

    def __post_init__(self) -> None:
        self.request_id, self.params = self.request.request_id, self.request.sampling
        self.seed = self.request.seed if self.params.seed is None else self.params.seed

    @property
    def rank(self) -> tuple[int, int]:
        """Service order, lowest first: higher `priority`, then earlier arrival."""
        return (-self.request.priority, self.arrival)

    @property
    def runnable(self) -> bool:
        return self.ready and not self.held

    @property
    def ruled(self) -> bool:
        """True when a grammar may end the text before `min_tokens`."""
        tools = self.request.tools
        return self.params.structured_outputs is not None or (tools is not None and tools.enforced)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    def begin(self, prompt: Prompt, max_length: int, eos_ids: frozenset[int]) -> None:
        """Gives the sequence its prompt; `max_length` bounds prompt and generated tokens together."""
        self.prompt = prompt
        self.tokens = list(prompt.token_ids)
        self.prompt_len = len(self.tokens)
        self.max_length = max_length
        eos = frozenset[int]() if self.params.ignore_eos else eos_ids
        self.stop_ids = eos | frozenset(self.params.stop_token_ids)

    def finish_after(self, token: int) -> FinishReason | None:
        """Why the request ends with `token` as the next generated one; None when it goes on (as far as tokens tell)."""
        if token in self.stop_ids and (self.ruled or self.generated >= self.params.min_tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) + 1 >= self.max_length else None

    def chunk_stop(self, budget: int, *, may_exceed: bool) -> int:
        """Where a chunk of at most `budget` rows from `computed` ends; equal to `computed` when none fits.

        A chunk never ends inside an unsplittable span. A span that does not fit waits, or exceeds the budget if
        `may_exceed` (it is the step's first prefill chunk: then it would never fit).
        """
        stop = min(self.computed + budget, len(self.tokens))
        for begin, end in self.prompt.unsplittable if self.prompt else ():
            if begin < stop < end:
                return begin if begin > self.computed else end if may_exceed else self.computed
        return stop

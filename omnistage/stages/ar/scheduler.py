"""Which rows of which requests the next step computes. Pure Python over `Sequence` records; torch-free.

Continuous batching: every step takes one row of each sequence that is generating, then fills the token budget with
chunks of prompts, first of admitted sequences, then of waiting ones. A sequence is admitted with the blocks of all its
tokens, so only generation makes it grow; when no block is left, the sequence that ranks last gives its blocks back and
is computed again later (preemption by recompute). Sequences that wait for input or credit are parked: they keep their
blocks and take no place in the batch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Generic, TypeVar

from omnistage.errors import IntegrityError
from omnistage.stages.ar.block_pool import BlockPool, block_hash
from omnistage.stages.ar.model import Work
from omnistage.stages.ar.sequence import Sequence, Status

S = TypeVar("S")


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start. Token counts are rows computed, `cached_tokens` rows that were found computed."""

    steps: int = 0
    mixed_steps: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0


class Ranked(Generic[S]):
    """Sequences in service order. A rank never changes while a sequence is in."""

    def __init__(self) -> None:
        self._items: list[Sequence[S]] = []

    def __len__(self) -> int:
        return len(self._items)

    def items(self) -> list[Sequence[S]]:
        return self._items.copy()

    def last(self) -> Sequence[S]:
        return self._items[-1]

    def add(self, seq: Sequence[S]) -> None:
        insort(self._items, seq, key=_rank)

    def remove(self, seq: Sequence[S]) -> None:
        index = bisect_left(self._items, seq.rank, key=_rank)
        if index == len(self._items) or self._items[index] is not seq:
            raise IntegrityError(f"request {seq.request_id} is not where its status says")
        del self._items[index]


def _rank(seq: Sequence[S]) -> tuple[int, int]:
    return seq.rank


def _salt(seq: Sequence[S]) -> bytes:
    """What separates this request's blocks from those of other owners and other salts."""
    own = seq.prompt.salt if seq.prompt else b""
    owner = seq.request.cache_salt.encode()
    return len(owner).to_bytes(4, "little") + owner + own if owner else own


class _Batch(Generic[S]):
    """A step in the making: `budget` rows are left, `places` sequences may still join."""

    def __init__(self, budget: int, places: int) -> None:
        self.works: dict[Sequence[S], Work[S]] = {}
        self.budget = budget
        self.places = places
        self.prefills = 0

    def put(self, seq: Sequence[S], stop: int, *, prefill: bool) -> None:
        self.works[seq] = Work(seq, seq.computed, stop, stop == len(seq.tokens) and stop < seq.max_length)
        self.budget -= stop - seq.computed
        self.places -= 1
        self.prefills += prefill


class Scheduler(Generic[S]):
    """Owns the block pool and every sequence that has a prompt.

    `token_budget` bounds the rows of a step, `max_num_seqs` the sequences in it and those admitted and not parked.
    """

    def __init__(self, pool: BlockPool, *, token_budget: int, max_num_seqs: int, prefix_caching: bool) -> None:
        self.pool = pool
        self.stats = SchedulerStats()
        self._token_budget = token_budget
        self._max_num_seqs = max_num_seqs
        self._prefix_caching = prefix_caching
        self._waiting: Ranked[S] = Ranked()
        self._running: Ranked[S] = Ranked()
        self._parked: dict[str, Sequence[S]] = {}

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def parked(self) -> int:
        return len(self._parked)

    def has_work(self) -> bool:
        """True when `schedule()` would return work."""
        return bool(len(self._running) or len(self._waiting))

    def add(self, seq: Sequence[S]) -> None:
        """Takes a sequence that has a prompt and no blocks."""
        seq.status = Status.PARKED
        self._parked[seq.request_id] = seq
        self.refresh(seq)

    def refresh(self, seq: Sequence[S]) -> None:
        """Parks or wakes a sequence after its `ready` or `held` has changed."""
        parked = seq.status is Status.PARKED
        if seq.runnable and parked:
            del self._parked[seq.request_id]
            self._enter(seq, Status.RUNNING if seq.blocks else Status.WAITING)
        elif not seq.runnable and not parked:
            self._leave(seq)
            seq.status = Status.PARKED
            self._parked[seq.request_id] = seq

    def remove(self, seq: Sequence[S]) -> None:
        """Forgets a sequence and releases its blocks."""
        self._leave(seq)
        seq.status = Status.DONE
        self.pool.release(seq.blocks)
        seq.blocks = []

    def schedule(self, only: frozenset[str] | None = None) -> list[Work[S]]:
        """The work of one step, for `only` these requests if given. Sequences change when `advance` is called."""
        batch: _Batch[S] = _Batch(self._token_budget, self._max_num_seqs)
        running = [seq for seq in self._running.items() if only is None or seq.request_id in only]
        prefills: list[Sequence[S]] = []
        for seq in running:
            if len(seq.tokens) - seq.computed > 1 or seq.computed < seq.prompt_len:
                prefills.append(seq)
            else:
                self._place(seq, batch, prefill=False)
        for seq in prefills:
            self._place(seq, batch, prefill=True)
        self._admit(batch, only)
        return list(batch.works.values())

    def advance(self, work: Work[S], token: int | None) -> None:
        """Notes that the rows of `work` are in the cache and appends the token sampled after them."""
        seq = work.seq
        filled = seq.computed // self.pool.block_size
        seq.computed = work.stop
        if work.stop // self.pool.block_size > filled:
            self._register(seq, filled)
        if token is not None:
            seq.tokens.append(token)

    def stepped(self, works: list[Work[S]]) -> None:
        """Counts a step that was computed."""
        decodes = sum([work.is_decode for work in works])
        rows = sum([work.stop - work.start for work in works])
        self.stats.steps += 1
        self.stats.mixed_steps += 0 < decodes < len(works)
        self.stats.decode_tokens += decodes
        self.stats.prefill_tokens += rows - decodes

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every block is held by exactly the sequences that list it, and lists fit
        states."""
        groups = (
            (Status.WAITING, self._waiting.items()),
            (Status.RUNNING, self._running.items()),
            (Status.PARKED, list(self._parked.values())),
        )
        everyone = [seq for _, members in groups for seq in members]
        self.pool.check_integrity([seq.blocks for seq in everyone])
        for status, members in groups:
            for seq in members:
                if seq.status is not status or seq.runnable == (status is Status.PARKED):
                    raise IntegrityError(f"request {seq.request_id} is {seq.status.value} in the list {status.value}")
        for seq in everyone:
            if seq.computed > len(seq.blocks) * self.pool.block_size or seq.computed > len(seq.tokens):
                raise IntegrityError(f"request {seq.request_id} has more rows computed than it has blocks or tokens")

    def _place(self, seq: Sequence[S], batch: _Batch[S], *, prefill: bool) -> bool:
        """Puts the next rows of a running sequence into the batch if budget and blocks allow."""
        if batch.budget < 1 or batch.places < 1 or seq.status is not Status.RUNNING:
            return False
        stop = seq.chunk_stop(batch.budget, may_exceed=prefill and not batch.prefills) if prefill else seq.computed + 1
        if stop == seq.computed or not self._grow(seq, stop):
            return False
        batch.put(seq, stop, prefill=prefill)
        return True

    def _grow(self, seq: Sequence[S], stop: int) -> bool:
        """Gives a running sequence the blocks up to `stop`; False when it had to give way itself.

        Only generating sequences grow, and they are placed in rank order: whoever gives way is not in the batch yet.
        """
        while len(seq.blocks) * self.pool.block_size < stop:
            more = self.pool.acquire((), 1)
            if more is not None:
                seq.blocks += more
                continue
            victim = self._victim()
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _victim(self) -> Sequence[S]:
        """The sequence with blocks that ranks last."""
        parked = [seq for seq in self._parked.values() if seq.blocks]
        return max([*parked, self._running.last()] if len(self._running) else parked, key=_rank)

    def _preempt(self, seq: Sequence[S]) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.computed = 0
        seq.metrics.preemptions += 1
        self.stats.preemptions += 1
        if seq.status is Status.RUNNING:
            self._leave(seq)
            self._enter(seq, Status.WAITING)

    def _admit(self, batch: _Batch[S], only: frozenset[str] | None) -> None:
        """Lets waiting sequences in, in order, until one finds no room."""
        for seq in self._waiting.items():
            if only is not None and seq.request_id not in only:
                continue
            if len(self._running) >= self._max_num_seqs or batch.budget < 1 or batch.places < 1:
                return
            if not self._reserve(seq, alone=not len(self._running)):
                return
            self._leave(seq)
            self._enter(seq, Status.RUNNING)
            if not self._place(seq, batch, prefill=True):
                return

    def _reserve(self, seq: Sequence[S], *, alone: bool) -> bool:
        """Gives a waiting sequence the blocks of all its tokens, shared ones first.

        When nothing runs (`alone`), parked sequences give their blocks back until there is room.
        """
        needed = self.pool.blocks_for(len(seq.tokens))
        shared = self._shared(seq)
        blocks = self.pool.acquire(shared, needed - len(shared))
        while blocks is None and alone and any(other.blocks for other in self._parked.values()):
            self._preempt(self._victim())
            shared = self._shared(seq)
            blocks = self.pool.acquire(shared, needed - len(shared))
        if blocks is None:
            return False
        seq.blocks = blocks
        seq.computed = len(shared) * self.pool.block_size
        if not seq.started:
            seq.started = True
            seq.cached_tokens = seq.computed
        self.stats.cached_tokens += seq.computed
        return True

    def _shared(self, seq: Sequence[S]) -> list[int]:
        """The blocks of the prefix cache that a sequence can start from: at least its last row remains to be computed,
        and no unsplittable span is entered half-way."""
        if not self._caches(seq) or seq.params.prompt_logprobs:
            return []
        size = self.pool.block_size
        self._hash_blocks(seq, (len(seq.tokens) - 1) // size)
        found = self.pool.match(seq.hashes[: (len(seq.tokens) - 1) // size])
        count = len(found)
        for begin, end in reversed(seq.prompt.unsplittable if seq.prompt else ()):
            if begin < count * size < end:
                count = begin // size
        return found[:count]

    def _caches(self, seq: Sequence[S]) -> bool:
        return self._prefix_caching and seq.prompt is not None and seq.prompt.cacheable

    def _hash_blocks(self, seq: Sequence[S], count: int) -> None:
        """Extends `seq.hashes` to its first `count` full blocks."""
        size = self.pool.block_size
        content = seq.prompt.content if seq.prompt else ()
        while len(seq.hashes) < count:
            start = len(seq.hashes) * size
            parent = seq.hashes[-1] if start else _salt(seq)
            seq.hashes.append(block_hash(parent, seq.tokens[start : start + size], start, content))

    def _register(self, seq: Sequence[S], first: int) -> None:
        """Makes the blocks from `first` on that are full now findable."""
        if not self._caches(seq):
            return
        full = seq.computed // self.pool.block_size
        self._hash_blocks(seq, full)
        for index in range(first, full):
            self.pool.register(seq.blocks[index], seq.hashes[index])

    def _enter(self, seq: Sequence[S], status: Status) -> None:
        seq.status = status
        (self._running if status is Status.RUNNING else self._waiting).add(seq)

    def _leave(self, seq: Sequence[S]) -> None:
        if seq.status is Status.PARKED:
            del self._parked[seq.request_id]
        else:
            (self._running if seq.status is Status.RUNNING else self._waiting).remove(seq)

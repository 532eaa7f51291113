"""`AREngine`: the stage engine of autoregressive stages, over an `ARBackend`. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from omnistage.config.model import StageConfig
from omnistage.errors import RequestError
from omnistage.faults import Faults
from omnistage.payload import MultimodalPayload
from omnistage.request import FinishReason
from omnistage.stages.ar.block_pool import BlockPool
from omnistage.stages.ar.model import ARBackend, Emitted, Event, Produced, Prompt, Sampled, Sequence, Work
from omnistage.stages.ar.scheduler import Scheduler
from omnistage.stages.ar.sequence import Status
from omnistage.stages.base import Computed, Emission, Finished, InputChunk, StageRequest, StepOutput

S = TypeVar("S")


class AREngine(Generic[S]):
    """Continuous batching over a backend; implements `omnistage.stages.base.StageEngine`.

    A step that raises has computed for nobody: every request is as it was, except those whose token of this step was
    already taken note of; what they gave out comes with the next step. `clock` gives seconds.
    """

    def __init__(
        self,
        backend: ARBackend[S],
        config: StageConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        faults: Faults | None = None,
    ) -> None:
        limits = backend.limits
        self._faults = faults or Faults()
        self._backend = backend
        self._name = config.name
        self._clock = clock
        self._eos_ids = limits.eos_token_ids
        self._vocab_size = limits.vocab_size
        self._model_len = min(limits.max_model_len, config.max_model_len or limits.max_model_len)
        self._pool_len = limits.total_blocks * limits.block_size
        self._sequences: dict[str, Sequence[S]] = {}
        self._arrivals = 0
        self._empty: list[Sequence[S]] = []
        self._open_ports: dict[str, list[str]] = {}
        self._out = StepOutput()
        self.scheduler: Scheduler[S] = Scheduler(
            BlockPool(limits.total_blocks, limits.block_size),
            token_budget=config.token_budget,
            max_num_seqs=config.max_num_seqs,
            prefix_caching=config.prefix_caching,
        )

    @property
    def context_length(self) -> int:
        """The longest sequence (prompt and generated tokens) that this stage runs."""
        return min(self._model_len, self._pool_len)

    def add(self, request: StageRequest) -> None:
        if request.request_id in self._sequences:
            raise RequestError(f"stage {self._name} already runs request {request.request_id}", param="id")
        self._check_tokens(request)
        state = self._backend.open(request)
        seq = Sequence(request, state, self._arrivals, self._clock())
        self._arrivals += 1
        self._sequences[seq.request_id] = seq
        self._open_ports[seq.request_id] = list(request.outputs)
        self._begin(seq)

    def feed(self, chunk: InputChunk) -> None:
        """Takes a chunk. A request whose chunk or prompt is refused is dropped: nothing of it is held any more."""
        seq = self._sequences[chunk.request_id]
        taken = False
        try:
            self._backend.feed(seq, chunk)
            taken = True
        except RequestError:
            chunk.payload.release()
            raise
        finally:
            if not taken:
                self._drop(seq)
        if seq.status is Status.PENDING:
            self._begin(seq)
        elif seq.status is not Status.EMPTY:
            self._refresh(seq)

    def abort(self, request_id: str) -> None:
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._drop(seq)
        self._out.emissions = [item for item in self._out.emissions if item.request_id != request_id]
        self._out.finished = [item for item in self._out.finished if item.request_id != request_id]

    def hold(self, request_id: str, held: bool) -> None:
        seq = self._sequences.get(request_id)
        if seq is None:
            return
        seq.held = held
        if seq.status not in (Status.PENDING, Status.EMPTY):
            self.scheduler.refresh(seq)

    def has_work(self) -> bool:
        if self._out.emissions or self._out.finished or self.scheduler.has_work():
            return True
        return any(not seq.held for seq in self._empty)

    def step(self, only: frozenset[str] | None = None) -> StepOutput:
        for seq in [seq for seq in self._empty if not seq.held and (only is None or seq.request_id in only)]:
            self._end(seq, self._backend.emit(seq, Event(None, 0, FinishReason.STOP)), FinishReason.STOP)
        works = self.scheduler.schedule(only)
        if works:
            started = self._clock()
            decodes = all(work.is_decode for work in works)
            self._faults.hit("before_decode" if decodes else "before_prefill")
            results = self._backend.execute(works)
            self._faults.hit("after_decode" if decodes else "after_prefill")
            elapsed = self._clock() - started
            self.scheduler.stepped(works)
            for work, sampled in zip(works, results, strict=True):
                self._commit(work, sampled, started, elapsed)
            self._out.spans += _spans(works, started, self._clock())
        out, self._out = self._out, StepOutput()
        out.batch = tuple([work.seq.request_id for work in works])
        out.rows = tuple([work.stop - work.start for work in works])
        return out

    def request_ids(self) -> frozenset[str]:
        return frozenset(self._sequences)

    def counters(self) -> dict[str, float]:
        stats, pool = self.scheduler.stats, self.scheduler.pool
        return {
            "running": self.scheduler.running,
            "waiting": self.scheduler.waiting,
            "parked": self.scheduler.parked,
            "requests": len(self._sequences),
            "steps": stats.steps,
            "mixed_steps": stats.mixed_steps,
            "preemptions": stats.preemptions,
            "prefill_tokens": stats.prefill_tokens,
            "decode_tokens": stats.decode_tokens,
            "cached_tokens": stats.cached_tokens,
            "free_blocks": pool.available,
            "total_blocks": pool.total,
            "shared_blocks": pool.shared_blocks(),
            "evicted_blocks": pool.evictions,
        }

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()

    def close(self) -> None:
        for seq in list(self._sequences.values()):
            self._drop(seq)
        self._out = StepOutput()
        self._backend.shutdown()

    def _begin(self, seq: Sequence[S]) -> None:
        """Hands a sequence to the scheduler if its prompt is there. Drops it when the prompt cannot run."""
        usable = False
        try:
            prompt = self._backend.prompt(seq)
            if prompt is not None and prompt.token_ids:
                seq.begin(prompt, self._max_length(seq, prompt), self._eos_ids)
                seq.ready = self._backend.can_step(seq)
            usable = True
        finally:
            if not usable:
                self._drop(seq)
        if prompt is None:
            return
        if prompt.token_ids:
            self.scheduler.add(seq)
        else:
            seq.status = Status.EMPTY
            self._empty.append(seq)

    def _refresh(self, seq: Sequence[S]) -> None:
        seq.ready = self._backend.can_step(seq)
        self.scheduler.refresh(seq)

    def _check_tokens(self, request: StageRequest) -> None:
        """Raises RequestError for token ids in the sampling parameters that the vocabulary does not have."""
        given = {"stop_token_ids": map(str, request.sampling.stop_token_ids), "logit_bias": request.sampling.logit_bias}
        for field, token in ((field, token) for field, tokens in given.items() for token in tokens):
            if not token.isdecimal() or int(token) >= self._vocab_size:
                raise RequestError(
                    f"sampling for stage {self._name}: {token[:32]!r} is not a token id below {self._vocab_size}",
                    param=f"sampling.{self._name}.{field}",
                )

    def _max_length(self, seq: Sequence[S], prompt: Prompt) -> int:
        """Prompt and generated tokens at most. Raises RequestError for foreign token ids and for a prompt that, with
        `max_tokens`, fits neither the context nor the KV memory."""
        bad = next((token for token in prompt.token_ids if not 0 <= token < self._vocab_size), None)
        if bad is not None:
            raise RequestError(f"{prompt.param}: {bad} is not a token id below {self._vocab_size}", param=prompt.param)
        count, wanted, limit = len(prompt.token_ids), seq.params.max_tokens, self.context_length
        why = (
            f"the context length of stage {self._name} is {limit} tokens"
            if self._model_len <= self._pool_len
            else f"the KV memory of stage {self._name} holds {limit} tokens (raise kv_memory_mb)"
        )
        if count > limit or (count == limit and wanted != 0):
            raise RequestError(f"{prompt.param} has {count} tokens and leaves no room: {why}", param=prompt.param)
        if wanted is not None and count + wanted > limit:
            raise RequestError(
                f"{prompt.param} has {count} tokens and max_tokens asks for {wanted} more: {why}", param="max_tokens"
            )
        return limit if wanted is None else count + wanted

    def _commit(self, work: Work[S], sampled: Sampled | None, started: float, elapsed: float) -> None:
        """Takes note of one request's part of a step. Changes nothing when the backend raises."""
        seq = work.seq
        emitted, reason = Emitted(), None
        if sampled is not None:
            reason = seq.finish_after(sampled.token)
            emitted = self._backend.emit(seq, Event(sampled, seq.generated + 1, reason))
        elif work.stop == seq.max_length:
            reason = FinishReason.LENGTH
            emitted = self._backend.emit(seq, Event(None, seq.generated, reason))
        if emitted.stop:
            reason = reason or FinishReason.STOP
        self.scheduler.advance(work, None if sampled is None else sampled.token)
        self._measure(seq, started, elapsed)
        if reason is None:
            self._publish(seq, emitted)
            self._refresh(seq)
        else:
            self._end(seq, emitted, reason)

    def _measure(self, seq: Sequence[S], started: float, elapsed: float) -> None:
        metrics = seq.metrics
        if metrics.steps == 0:
            metrics.queue_s = started - seq.added_s
        metrics.steps += 1
        metrics.compute_s += elapsed

    def _publish(self, seq: Sequence[S], emitted: Emitted) -> None:
        open_ports = self._open_ports[seq.request_id]
        for output in emitted.outputs:
            if output.port not in open_ports:
                continue
            if output.final:
                open_ports.remove(output.port)
            self._out.emissions.append(
                Emission(request_id=seq.request_id, port=output.port, payload=output.payload, final=output.final)
            )
            seq.metrics.chunks_out += 1

    def _end(self, seq: Sequence[S], emitted: Emitted, reason: FinishReason) -> None:
        self._publish(seq, emitted)
        still_open = self._open_ports[seq.request_id].copy()
        self._publish(
            seq, Emitted(tuple([Produced(port=port, payload=MultimodalPayload(), final=True) for port in still_open]))
        )
        metrics = seq.metrics
        metrics.input_tokens, metrics.output_tokens = seq.prompt_len, seq.generated
        metrics.cached_tokens = seq.cached_tokens
        self._out.finished.append(Finished(request_id=seq.request_id, reason=reason, metrics=metrics))
        self._drop(seq)

    def _drop(self, seq: Sequence[S]) -> None:
        """Releases everything held of a request."""
        if seq.status is Status.EMPTY:
            self._empty.remove(seq)
        elif seq.status is not Status.PENDING:
            self.scheduler.remove(seq)
        seq.status = Status.DONE
        del self._sequences[seq.request_id]
        del self._open_ports[seq.request_id]
        self._backend.close(seq)


def _spans(works: list[Work[S]], start_s: float, end_s: float) -> list[Computed]:
    """A step as its requests see it: those that read their prompt in it, those that wrote a token."""
    reading = tuple([work.seq.request_id for work in works if not work.is_decode])
    if len(reading) in (0, len(works)):
        return [Computed("prefill" if reading else "decode", start_s, end_s)]
    writing = tuple([work.seq.request_id for work in works if work.is_decode])
    return [Computed("prefill", start_s, end_s, reading), Computed("decode", start_s, end_s, writing)]

"""The built-in runner: an `ARBackend` over an `ARModel`, one flattened forward per step."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from omnistage.config.model import StageConfig, TextMarkup
from omnistage.errors import ConfigError, RequestError
from omnistage.ops.paged_attention import AttentionSpan, PagedCache, plan_attention
from omnistage.stages.ar.grammar import request_grammar
from omnistage.stages.ar.matchers import Matchers, Matching
from omnistage.stages.ar.model import BackendLimits, Constraint, Emitted, Event, Prompt, Sampled, Sequence, Work
from omnistage.stages.ar.sampler import SampleRow, TokenCounts, needs_counts, sample, token_logprobs
from omnistage.stages.ar.sections import TOOL_FORMATS
from omnistage.stages.ar.torch_model import ARModel, ModelShape, SequenceMemory
from omnistage.stages.base import InputChunk, StageRequest

S = TypeVar("S")

# Rows whose logits are formed together for prompt_logprobs: bounds the memory to rows * vocabulary.
_LOGIT_ROWS = 64


class TorchBackend(Generic[S]):
    """Owns the paged cache, the hand-off rows beside it and the sampling state; the model owns the rest.

    The cache has as many blocks as `kv_memory_mb` holds, or `blocks`. Raises ConfigError when that is not one. With the
    `tokenizer` of a model that writes text, requests may demand a grammar; `markup` tells how it calls tools.
    """

    def __init__(
        self,
        model: ARModel[S],
        config: StageConfig,
        *,
        blocks: int | None = None,
        tokenizer: Tokenizer | None = None,
        markup: TextMarkup | None = None,
    ) -> None:
        shape = model.shape
        if blocks is None:
            blocks = _block_count(shape, config)
        self._model = model
        self._shape = shape
        self._cache = PagedCache(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            blocks=blocks,
            block_size=config.block_size,
            dtype=shape.dtype,
            device=shape.device,
        )
        rows = blocks * config.block_size if shape.handoff_width else 0
        self._handoff = torch.zeros(rows, shape.handoff_width, dtype=shape.dtype, device=shape.device)
        self._counts: dict[str, TokenCounts] = {}
        self._prompt_logprobs: dict[str, dict[int, Sampled]] = {}
        self._name = config.name
        self._tool_format = TOOL_FORMATS.get(markup.tool_format) if markup is not None else None
        self._matchers = Matchers(tokenizer, shape) if tokenizer is not None else None
        self._matching: dict[str, Matching] = {}
        self.limits = BackendLimits(
            total_blocks=blocks,
            block_size=config.block_size,
            max_model_len=shape.max_model_len,
            vocab_size=shape.vocab_size,
            eos_token_ids=shape.eos_token_ids,
        )

    def open(self, request: StageRequest) -> S:
        grammar = request_grammar(request.sampling, request.tools, self._tool_format)
        matching = None if grammar is None else self._open_matching(request, grammar)
        state = self._model.open(request)
        if matching is not None:
            self._matching[request.request_id] = matching
        return state

    def _open_matching(self, request: StageRequest, grammar: str) -> Matching:
        wanted = request.sampling.structured_outputs
        param = "tools" if wanted is None else wanted.param
        if self._matchers is None:
            raise RequestError(f"stage {self._name} writes no text that a grammar could rule", param=param)
        return self._matchers.open(grammar, param)

    def feed(self, seq: Sequence[S], chunk: InputChunk) -> None:
        self._model.feed(seq.state, chunk)

    def prompt(self, seq: Sequence[S]) -> Prompt | None:
        return self._model.prompt(seq.state)

    def can_step(self, seq: Sequence[S]) -> bool:
        return self._model.can_step(seq.state)

    def execute(self, works: list[Work[S]]) -> list[Sampled | None]:
        with torch.inference_mode():
            plan = plan_attention(self._cache, [_span(work) for work in works])
            result = self._model.forward(works, plan)
            if result.handoff is not None:
                self._handoff.index_copy_(0, plan.slots, result.handoff)
            self._keep_prompt_logprobs(works, result.hidden)
            return self._sample(works, result.hidden)

    def emit(self, seq: Sequence[S], event: Event) -> Emitted:
        told = self._prompt_logprobs.get(seq.request_id, {})
        return self._model.emit(seq, event, SequenceMemory(self._cache, self._handoff, told, seq))

    def close(self, seq: Sequence[S]) -> None:
        self._counts.pop(seq.request_id, None)
        self._prompt_logprobs.pop(seq.request_id, None)
        self._matching.pop(seq.request_id, None)
        self._model.close(seq.state)

    def shutdown(self) -> None:
        self._counts.clear()
        self._prompt_logprobs.clear()
        self._matching.clear()

    def _sample(self, works: list[Work[S]], hidden: Tensor) -> list[Sampled | None]:
        """Next tokens after the last rows of the works that want one; `hidden` [N, H] is the flat batch."""
        picked, ends, end = list[Work[S]](), list[int](), 0
        for work in works:
            end += work.stop - work.start
            if work.sample:
                picked.append(work)
                ends.append(end - 1)
        if not picked:
            return [None] * len(works)
        last = hidden if len(ends) == len(hidden) else hidden[torch.tensor(ends, device=hidden.device)]
        chosen = sample(self._model.logits(last), self._rows([work.seq for work in picked]))
        self._model.sampled(picked, last, [one.token for one in chosen])
        results = iter(chosen)
        return [next(results) if work.sample else None for work in works]

    def _rows(self, seqs: list[Sequence[S]]) -> list[SampleRow]:
        rows = [self._row(seq) for seq in seqs]
        ruled = [(row, seq) for row, seq in zip(rows, seqs, strict=True) if seq.request_id in self._matching]
        if ruled and self._matchers is not None:
            matching = [self._matching[seq.request_id] for _, seq in ruled]
            for one, (_, seq) in zip(matching, ruled, strict=True):
                one.catch_up(seq.tokens[seq.prompt_len :])
            for (row, _), permitted in zip(ruled, self._matchers.permitted(matching), strict=True):
                row.permitted = permitted
        return rows

    def _row(self, seq: Sequence[S]) -> SampleRow:
        params = seq.params
        return SampleRow(
            params=params,
            seed=seq.seed,
            position=seq.generated,
            banned=tuple(seq.stop_ids) if seq.generated < params.min_tokens else (),
            constraint=self._model.constraint(seq.state) or Constraint(),
            counts=self._updated_counts(seq) if needs_counts(params) else None,
        )

    def _updated_counts(self, seq: Sequence[S]) -> TokenCounts:
        counts = self._counts.get(seq.request_id)
        if counts is None:
            counts = self._counts[seq.request_id] = TokenCounts(self._shape.vocab_size, self._shape.device)
        counts.update(seq.tokens, seq.prompt_len, penalize_prompt=self._shape.penalize_prompt)
        return counts

    def _keep_prompt_logprobs(self, works: list[Work[S]], hidden: Tensor) -> None:
        row = 0
        for work in works:
            seq = work.seq
            stop = min(work.stop, seq.prompt_len - 1)
            if seq.params.prompt_logprobs and work.start < stop:
                known = self._prompt_logprobs.setdefault(seq.request_id, {})
                for begin in range(work.start, stop, _LOGIT_ROWS):
                    end = min(begin + _LOGIT_ROWS, stop)
                    logits = self._model.logits(hidden[row + begin - work.start : row + end - work.start])
                    told = token_logprobs(logits, seq.tokens[begin + 1 : end + 1], seq.params.top_logprobs)
                    known.update(enumerate(told, begin + 1))
            row += work.stop - work.start


def _span(work: Work[S]) -> AttentionSpan:
    spans = work.seq.prompt.unsplittable if work.seq.prompt else ()
    return AttentionSpan(work.seq.blocks, work.start, work.stop, spans)


def _block_count(shape: ModelShape, config: StageConfig) -> int:
    width = 2 * shape.layers * shape.kv_heads * shape.head_dim + shape.handoff_width
    block_bytes = width * shape.dtype.itemsize * config.block_size
    blocks = config.kv_memory_mb * 2**20 // block_bytes
    if blocks < 1:
        raise ConfigError(
            f"stage {config.name}: kv_memory_mb={config.kv_memory_mb} holds no block of {block_bytes} bytes",
            param=f"stages.{config.name}.kv_memory_mb",
            stage=config.name,
        )
    return blocks

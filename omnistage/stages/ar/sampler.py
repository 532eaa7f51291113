"""Batched sampling: from logits [R, V] to one next token per row.

Order: grammar, model constraint, `min_tokens`, `logit_bias`, penalties, then greedy choice or temperature, top-k,
top-p, min-p and one draw. The draw is the inverse of the cumulative distribution in vocabulary order at a number that
is a function of seed and position (`omnistage.stages.ar.randomness`), so neither batch mates nor preemption change it.

Repetition penalty as in CTRL (arXiv:1909.05858), top-p as in arXiv:1904.09751, min-p as in arXiv:2407.01082, presence
and frequency penalties as OpenAI defines them (over generated tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omnistage.errors import StageError
from omnistage.sampling import SamplingParams
from omnistage.stages.ar.model import Constraint, Sampled
from omnistage.stages.ar.randomness import uniform

_FREE = Constraint()
_MINUS_INFINITY = float("-inf")
# Sorted logits of so many likeliest tokens usually decide top-p.
_HEAD = 1024


class TokenCounts:
    """Which tokens a request has had: `counts` [V] of generated ones, `seen` [V] of those that repetition penalties
    hit."""

    __slots__ = ("_counted", "counts", "seen")

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(vocab_size, device=device)
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._counted = 0

    def update(self, tokens: Sequence[int], prompt_len: int, *, penalize_prompt: bool) -> None:
        """Catches up with a request's tokens, of which the first `prompt_len` are its prompt."""
        if self._counted == 0 and penalize_prompt:
            self.seen[torch.tensor(tokens[:prompt_len], device=self.seen.device)] = True
        start = max(self._counted, prompt_len)
        if len(tokens) > start:
            new = torch.tensor(tokens[start:], device=self.seen.device)
            self.seen[new] = True
            self.counts.index_add_(0, new, torch.ones_like(new, dtype=self.counts.dtype))
        self._counted = len(tokens)


@dataclass(slots=True)
class SampleRow:
    """One row's demands. `position` is the index of the token to choose, `banned` ids must not come (min_tokens).

    `counts` is None when the request has no penalties. `permitted` [V] (bool) are the tokens that the request's grammar
    lets come next; a ban of all of them is void.
    """

    params: SamplingParams
    seed: int
    position: int
    banned: Sequence[int] = ()
    constraint: Constraint = _FREE
    counts: TokenCounts | None = None
    permitted: Tensor | None = None

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0 or self.constraint.greedy or self.constraint.forced is not None

    @property
    def plain(self) -> bool:
        """True when the likeliest token of the unmodified logits is the choice and nothing is reported."""
        free = self.constraint.allowed is None and self.constraint.forced is None and self.permitted is None
        return (
            free and self.greedy and not (self.params.logit_bias or self.params.logprobs or self.banned or self.counts)
        )


def needs_counts(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """One token per row of `logits` [R, V]. Raises StageError when a row is not finite."""
    if all(row.plain for row in rows):
        best, plain = logits.max(dim=-1)
        _check_finite(best)
        return [Sampled(token) for token in plain.tolist()]
    raw = logits.float()
    changed = _with_demands(raw, rows)
    best, likeliest = changed.max(dim=-1)
    _check_finite(best)
    tokens: list[int] = likeliest.tolist()
    drawn = [index for index, row in enumerate(rows) if not row.greedy]
    if drawn:
        for index, token in zip(drawn, _draw(changed[drawn], [rows[i] for i in drawn]), strict=True):
            tokens[index] = token
    for index, row in enumerate(rows):
        if row.constraint.forced is not None:
            tokens[index] = row.constraint.forced
    return _report(raw, rows, tokens)


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[Sampled]:
    """Natural-log probabilities of `tokens` and of the `top` likeliest ones, per row of `logits` [R, V]."""
    wide = logits.float()
    chosen = wide.gather(1, torch.tensor(tokens, device=wide.device)[:, None])[:, 0]
    norm = wide.logsumexp(dim=-1)
    values, ids = (part.tolist() for part in torch.topk(wide - norm[:, None], top, dim=-1))
    own = (chosen - norm).tolist()
    return [
        Sampled(token, logprob, tuple(zip(row_ids, row_values, strict=True)))
        for token, logprob, row_ids, row_values in zip(tokens, own, ids, values, strict=True)
    ]


def _check_finite(best: Tensor) -> None:
    if not bool(torch.isfinite(best).all()):
        raise StageError("the model gave logits that are not finite")


def _with_demands(raw: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Logits after constraints, bans, bias and penalties; `raw` stays as it is."""
    changed = raw.clone()
    _keep_permitted(changed, rows)
    for logits, row in zip(changed, rows, strict=True):
        if row.constraint.allowed is not None:
            allowed = torch.tensor(row.constraint.allowed, device=raw.device)
            kept = logits[allowed]
            logits.fill_(_MINUS_INFINITY)[allowed] = kept
        elif row.banned:
            _ban(logits, torch.tensor(row.banned, device=raw.device))
        if row.params.logit_bias:
            ids = torch.tensor([int(key) for key in row.params.logit_bias], device=raw.device)
            logits[ids] += torch.tensor(list(row.params.logit_bias.values()), device=raw.device)
    _penalize(changed, rows)
    return changed


def _keep_permitted(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    index = [i for i, row in enumerate(rows) if row.permitted is not None]
    if not index:
        return
    ruled_out = ~torch.stack([allowed for row in rows if (allowed := row.permitted) is not None])
    if len(index) == len(rows):
        logits.masked_fill_(ruled_out, _MINUS_INFINITY)
    else:
        logits[index] = logits[index].masked_fill(ruled_out, _MINUS_INFINITY)


def _ban(logits: Tensor, ids: Tensor) -> None:
    """Rules out `ids` in one row of logits [V], unless nothing else is left."""
    kept = logits[ids]
    logits[ids] = _MINUS_INFINITY
    if bool(logits.max() == _MINUS_INFINITY):
        logits[ids] = kept


def _penalize(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    index = [i for i, row in enumerate(rows) if row.counts is not None]
    if not index:
        return
    hit = [(rows[i].params, counts) for i in index if (counts := rows[i].counts) is not None]
    repetition = _column(logits, [params.repetition_penalty for params, _ in hit])
    frequency = _column(logits, [params.frequency_penalty for params, _ in hit])
    presence = _column(logits, [params.presence_penalty for params, _ in hit])
    seen = torch.stack([counts.seen for _, counts in hit])
    counted = torch.stack([counts.counts for _, counts in hit])
    chosen = logits[index]
    repeated = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
    chosen = torch.where(seen, repeated, chosen)
    logits[index] = chosen - frequency * counted - presence * (counted > 0)


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """One random token per row of `logits` [R, V]."""
    temperature = _column(logits, [row.params.temperature for row in rows])
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # the best is 0
    floor = _top_k_p_floor(scaled, rows)
    min_p = _column(logits, [row.params.min_p for row in rows])
    kept = scaled.masked_fill(scaled < torch.maximum(floor, min_p.log()), _MINUS_INFINITY)
    edges = kept.exp().cumsum(dim=-1, dtype=torch.float64)
    numbers = torch.tensor([uniform(row.seed, row.position) for row in rows], dtype=torch.float64, device=edges.device)
    picked = torch.searchsorted(edges, numbers[:, None] * edges[:, -1:], right=True)
    return [int(token) for token in picked[:, 0].tolist()]


def _top_k_p_floor(scaled: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Per row [R, 1] the smallest scaled logit that top-k and top-p keep (ties of it are kept)."""
    vocab = scaled.shape[1]
    limits = [min(row.params.top_k or vocab, vocab) for row in rows]
    if all(limit == vocab for limit in limits) and all(row.params.top_p == 1 for row in rows):
        return scaled.new_full((len(rows), 1), _MINUS_INFINITY)
    narrow = max([limit for limit in limits if limit < vocab], default=0)
    width = min(vocab, max(_HEAD, narrow))
    floor, decided = _head_floor(scaled, rows, limits, width)
    return floor if decided else _head_floor(scaled, rows, limits, vocab)[0]


def _head_floor(scaled: Tensor, rows: Sequence[SampleRow], limits: Sequence[int], width: int) -> tuple[Tensor, bool]:
    """The floor as far as the `width` likeliest tokens of each row tell, and whether they tell it for every row."""
    vocab = scaled.shape[1]
    head = torch.topk(scaled, width, dim=-1).values if width < vocab else scaled.sort(dim=-1, descending=True).values
    limit = torch.tensor(limits, device=scaled.device)[:, None]
    outside = torch.arange(width, device=scaled.device) >= limit
    weights = head.exp().masked_fill(outside, 0)
    # What top-p is a share of: the mass of the top-k set, which is all of the row for rows without top-k.
    whole = torch.where(limit >= vocab, scaled.exp().sum(dim=-1, keepdim=True), weights.sum(dim=-1, keepdim=True))
    top_p = _column(scaled, [row.params.top_p for row in rows])
    before = weights.cumsum(dim=-1) - weights
    kept = ~outside & ((before < top_p * whole) | (top_p >= 1))
    last = kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    unbounded = (limit >= vocab) & (top_p >= 1)
    floor = head.gather(1, last).masked_fill(unbounded, _MINUS_INFINITY)
    cut_off = kept[:, -1:] & (limit > width) & ~unbounded
    return floor, width == vocab or not bool(cut_off.any())


def _report(raw: Tensor, rows: Sequence[SampleRow], tokens: Sequence[int]) -> list[Sampled]:
    """The chosen tokens, with logprobs where they were asked for."""
    asked = [index for index, row in enumerate(rows) if row.params.logprobs]
    results = [Sampled(token) for token in tokens]
    if asked:
        top = max(rows[index].params.top_logprobs for index in asked)
        told = token_logprobs(raw[asked], [tokens[index] for index in asked], top)
        for index, one in zip(asked, told, strict=True):
            results[index] = Sampled(one.token, one.logprob, one.top[: rows[index].params.top_logprobs])
    return results

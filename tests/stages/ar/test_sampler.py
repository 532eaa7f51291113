from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omnistage.errors import StageError
from omnistage.sampling import SamplingParams
from omnistage.stages.ar.model import Constraint
from omnistage.stages.ar.sampler import SampleRow, TokenCounts, needs_counts, sample, token_logprobs

VOCAB = 50


def row(position: int = 0, *, seed: int = 1, **fields: Any) -> SampleRow:
    extra = {name: fields.pop(name) for name in ("banned", "constraint", "counts") if name in fields}
    return SampleRow(params=SamplingParams(**fields), seed=seed, position=position, **extra)


def random_logits(rows: int = 1, *, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def counts_of(prompt: list[int], generated: list[int], *, penalize_prompt: bool = True) -> TokenCounts:
    counts = TokenCounts(VOCAB, torch.device("cpu"))
    counts.update([*prompt, *generated], len(prompt), penalize_prompt=penalize_prompt)
    return counts


def picks(logits: torch.Tensor, draws: int, **fields: Any) -> list[int]:
    """Tokens drawn for one row of logits at many positions."""
    rows = [row(position, **fields) for position in range(draws)]
    return [one.token for one in sample(logits.expand(draws, -1), rows)]


def kept(logits: torch.Tensor, **fields: Any) -> set[int]:
    return set(picks(logits, 4000, **fields))


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = random_logits(3)
    assert [one.token for one in sample(logits, [row(temperature=0)] * 3)] == logits.argmax(-1).tolist()


def test_draws_follow_the_distribution() -> None:
    logits = random_logits(seed=3)
    count = 20_000
    drawn = Counter(picks(logits, count, temperature=0.8))
    for token, probability in enumerate(torch.softmax(logits[0] / 0.8, -1).tolist()):
        spread = (probability * (1 - probability) / count) ** 0.5
        assert abs(drawn[token] / count - probability) < 5 * spread + 1e-4


WARPERS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"top_k": 7}, [TopKLogitsWarper(7)]),
    ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
    ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    ({"top_k": 9, "top_p": 0.7}, [TopKLogitsWarper(9), TopPLogitsWarper(0.7)]),
    ({"top_k": 9, "top_p": 0.9, "min_p": 0.2}, [TopKLogitsWarper(9), TopPLogitsWarper(0.9), MinPLogitsWarper(0.2)]),
    ({"top_k": 1000}, []),
]


@pytest.mark.parametrize(("fields", "warpers"), WARPERS)
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_filters_keep_the_tokens_that_transformers_keeps(
    fields: dict[str, Any], warpers: list[Any], temperature: float
) -> None:
    logits = random_logits(seed=5, scale=1.5)
    processed = LogitsProcessorList([TemperatureLogitsWarper(temperature), *warpers])(None, logits)
    probabilities = torch.softmax(processed[0], -1)
    certain = {token for token, probability in enumerate(probabilities.tolist()) if probability > 5e-3}
    possible = {token for token, probability in enumerate(probabilities.tolist()) if probability > 0}
    assert certain <= kept(logits, temperature=temperature, **fields) <= possible


def test_rows_with_different_filters_share_a_batch() -> None:
    logits = random_logits(6, seed=8)
    fields: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"temperature": 0}, {"top_k": 1}]
    rows = [row(4, seed=index, **extra) for index, extra in enumerate(fields)]
    together = sample(logits, rows)
    alone = [sample(logits[index : index + 1], [rows[index]])[0] for index in range(6)]
    assert together == alone


def test_top_p_beyond_the_likeliest_thousand_is_exact() -> None:
    flat = torch.zeros(1, 3000)
    flat[0, :1500] = 1.0
    share = 1500 * 2.718281828 / (1500 * 2.718281828 + 1500)
    assert max(picks(flat, 2000, top_p=share * 0.99)) < 1500
    assert max(picks(flat, 2000, top_p=0.999)) >= 1500


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = random_logits(1, seed=2, scale=0.1)
    mine = row(9, seed=77)
    mates = [row(index, seed=index) for index in range(5)]
    alone = sample(logits, [mine])[0]
    assert sample(logits.expand(6, -1), [*mates, mine])[5] == alone
    assert sample(logits.expand(6, -1), [mine, *mates])[0] == alone
    assert len({one.token for one in sample(logits.expand(30, -1), [row(n, seed=77) for n in range(30)])}) > 10
    assert len({one.token for one in sample(logits.expand(30, -1), [row(9, seed=n) for n in range(30)])}) > 10


def test_repetition_penalty_equals_transformers() -> None:
    logits = random_logits(seed=4)
    prompt, generated = [1, 2, 3], [4, 4, 5]
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, *generated]]), logits.clone())
    chosen = row(temperature=0, repetition_penalty=1.7, counts=counts_of(prompt, generated))
    assert sample(logits, [chosen])[0].token == int(want.argmax())
    boosted = logits.clone()
    boosted[0, 2] = boosted.max() + 0.1
    assert sample(boosted, [chosen])[0].token != 2


def test_the_prompt_may_be_spared_by_the_repetition_penalty() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 3] = 2.0, 1.9
    for spared, token in ((False, 2), (True, 3)):
        chosen = row(temperature=0, repetition_penalty=1.5, counts=counts_of([2], [], penalize_prompt=spared))
        assert sample(logits, [chosen])[0].token == token


def test_presence_counts_once_and_frequency_every_time_and_neither_the_prompt() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1], logits[0, 2], logits[0, 3] = 3.0, 2.9, 2.0
    counts = counts_of([3], [1, 1, 2])
    assert sample(logits, [row(temperature=0, presence_penalty=0.5, counts=counts)])[0].token == 1
    assert sample(logits, [row(temperature=0, frequency_penalty=0.5, counts=counts)])[0].token == 2
    assert sample(logits, [row(temperature=0, presence_penalty=2.0, counts=counts)])[0].token == 3


def test_counts_follow_the_tokens_whatever_the_steps() -> None:
    counts = TokenCounts(VOCAB, torch.device("cpu"))
    tokens = [5, 6, 7]
    counts.update(tokens, 3, penalize_prompt=True)
    for token in (8, 8, 5):
        tokens.append(token)
        counts.update(tokens, 3, penalize_prompt=True)
        counts.update(tokens, 3, penalize_prompt=True)
    whole = counts_of([5, 6, 7], [8, 8, 5])
    assert torch.equal(counts.counts, whole.counts)
    assert torch.equal(counts.seen, whole.seen)


def test_counts_are_needed_for_penalties_only() -> None:
    assert not needs_counts(SamplingParams())
    assert needs_counts(SamplingParams(repetition_penalty=1.5))
    assert needs_counts(SamplingParams(presence_penalty=1.5))
    assert needs_counts(SamplingParams(frequency_penalty=-1.5))


def test_logit_bias_moves_the_choice() -> None:
    logits = random_logits()
    assert sample(logits, [row(temperature=0, logit_bias={"17": 100.0})])[0].token == 17
    best = int(logits.argmax())
    assert sample(logits, [row(temperature=0, logit_bias={str(best): -100.0})])[0].token != best


def test_banned_tokens_do_not_come() -> None:
    logits = random_logits()
    order = logits[0].argsort(descending=True).tolist()
    assert sample(logits, [row(temperature=0, banned=order[:2])])[0].token == order[2]


def test_allowed_tokens_bound_the_choice_and_greedy_overrides_temperature() -> None:
    logits = random_logits()
    allowed = (3, 11, 30)
    best = max(allowed, key=lambda token: float(logits[0, token]))
    assert kept(logits, constraint=Constraint(allowed=allowed)) <= set(allowed)
    assert kept(logits, temperature=2.0, constraint=Constraint(allowed=allowed, greedy=True)) == {best}


def test_a_forced_token_comes_whatever_is_asked() -> None:
    fields = {"logit_bias": {"9": -100.0}, "temperature": 1.0}
    assert kept(random_logits(), constraint=Constraint(forced=9), **fields) == {9}


def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    logits = random_logits(3, seed=6)
    rows = [
        row(temperature=0, logprobs=True, top_logprobs=2, logit_bias={"17": 100.0}),
        row(temperature=0),
        row(3, temperature=0.7, logprobs=True),
    ]
    first, silent, third = sample(logits, rows)
    want = torch.log_softmax(logits, -1)
    assert first.token == 17
    assert first.logprob == pytest.approx(float(want[0, 17]), abs=1e-5)
    assert [token for token, _ in first.top] == want[0].topk(2).indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(want[0].topk(2).values.tolist(), abs=1e-5)
    assert (silent.logprob, silent.top) == (None, ())
    assert third.logprob == pytest.approx(float(want[2, third.token]), abs=1e-5)
    assert third.top == ()


def test_token_logprobs_of_given_tokens() -> None:
    logits = random_logits(2)
    told = token_logprobs(logits, [4, 8], 1)
    want = torch.log_softmax(logits, -1)
    assert [one.logprob for one in told] == pytest.approx([float(want[0, 4]), float(want[1, 8])], abs=1e-5)
    assert [one.top[0][0] for one in told] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(bad: float, temperature: float) -> None:
    logits = random_logits()
    logits[0, 3] = bad
    with pytest.raises(StageError, match="not finite"):
        sample(logits, [row(temperature=temperature)])


def test_a_very_low_temperature_is_the_likeliest_token() -> None:
    logits = random_logits(scale=30)
    assert kept(logits, temperature=1e-30) == {int(logits.argmax())}

from __future__ import annotations

from typing import Any

import pytest

from omnistage.request import FinishReason
from omnistage.stages.ar.sequence import Prompt, Sequence
from tests.stages.ar.fakes import stage_request


def sequence(length: int, *, spans: tuple[tuple[int, int], ...] = (), **fields: Any) -> Sequence[None]:
    seq: Sequence[None] = Sequence(stage_request("r", **fields), None, 0, 0.0)
    seq.begin(Prompt(token_ids=list(range(length)), unsplittable=spans), length + 8, frozenset({900}))
    return seq


@pytest.mark.parametrize(
    ("computed", "budget", "may_exceed", "stop"),
    [
        (0, 100, False, 20),
        (0, 3, False, 3),
        (0, 6, False, 4),
        (0, 9, False, 9),
        (4, 3, False, 4),
        (4, 3, True, 9),
        (4, 7, False, 11),
        (9, 5, False, 12),
        (12, 1, True, 16),
    ],
)
def test_a_chunk_never_ends_inside_an_unsplittable_span(
    computed: int, budget: int, may_exceed: bool, stop: int
) -> None:
    seq = sequence(20, spans=((4, 9), (12, 16)))
    seq.computed = computed
    assert seq.chunk_stop(budget, may_exceed=may_exceed) == stop


def test_end_token_counts_from_min_tokens_on() -> None:
    seq = sequence(3, min_tokens=2)
    assert seq.finish_after(900) is None
    seq.tokens += [1, 2]
    assert seq.finish_after(900) is FinishReason.STOP


def test_an_end_token_at_the_length_limit_is_a_stop() -> None:
    seq = sequence(3)
    seq.tokens += [1] * 7
    assert seq.finish_after(1) is FinishReason.LENGTH
    assert seq.finish_after(900) is FinishReason.STOP


def test_ignore_eos_leaves_the_request_own_stop_ids() -> None:
    seq = sequence(3, ignore_eos=True, stop_token_ids=(7,))
    assert seq.finish_after(900) is None
    assert seq.finish_after(7) is FinishReason.STOP

from __future__ import annotations

from typing import Any

import pytest

from tests.stages.ar.fakes import Collected, PagedFake, expected, fake_engine, run, stage_request

SHARED = list(range(100, 112))  # three blocks of four


def serve(caching: bool, requests: dict[str, list[int]], *, blocks: int = 64, together: bool = False) -> Any:
    """The answers and counters of requests that come one after the other, or all at once."""
    engine = fake_engine(PagedFake(blocks=blocks), prefix_caching=caching, token_budget=64)
    collected = Collected()
    for name, tokens in requests.items():
        engine.add(stage_request(name, tokens, max_tokens=5))
        if not together:
            run(engine, collected)
    return run(engine, collected), engine.counters()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("blocks", [64, 9])
@pytest.mark.parametrize(
    "requests",
    [
        {"a": SHARED, "b": SHARED},
        {"a": [*SHARED, 1], "b": [*SHARED, 2], "c": [*SHARED[:8], 3], "d": SHARED[:5]},
        {"a": [*SHARED, 1], "evicts": list(range(30)), "b": [*SHARED, 1]},
    ],
)
def test_answers_do_not_depend_on_the_cache(requests: dict[str, list[int]], blocks: int, together: bool) -> None:
    cached, _ = serve(True, requests, blocks=blocks, together=together)
    plain, counters = serve(False, requests, blocks=blocks, together=together)
    assert cached.tokens == plain.tokens == {name: expected(tokens, 5) for name, tokens in requests.items()}
    assert counters["cached_tokens"] == 0


def test_a_repeated_prompt_is_found_but_for_its_last_row() -> None:
    collected, counters = serve(True, {"a": [*SHARED, 7], "b": [*SHARED, 7], "c": SHARED})
    assert [collected.metrics[name].cached_tokens for name in "abc"] == [0, 12, 8]
    assert counters["cached_tokens"] == 20


def test_an_answer_is_found_as_the_beginning_of_the_next_turn() -> None:
    engine = fake_engine()
    engine.add(stage_request("turn1", SHARED, max_tokens=6))
    answer = run(engine).tokens["turn1"]
    engine.add(stage_request("turn2", [*SHARED, *answer, 1, 2, 3], max_tokens=2))
    collected = run(engine)
    assert collected.metrics["turn2"].cached_tokens == 16
    assert collected.tokens["turn2"] == expected([*SHARED, *answer, 1, 2, 3], 2)


def test_two_live_requests_share_blocks_and_the_first_may_leave() -> None:
    engine = fake_engine()
    engine.add(stage_request("a", [*SHARED, 1], max_tokens=40))
    collected = Collected()
    collected.take(engine.step())
    engine.add(stage_request("b", [*SHARED, 2], max_tokens=9))
    collected.take(engine.step())
    assert engine.counters()["shared_blocks"] == 3
    engine.abort("a")
    engine.check_integrity()
    assert run(engine, collected).tokens["b"] == expected([*SHARED, 2], 9)


def test_a_preempted_request_starts_again_from_what_is_left_in_the_cache() -> None:
    with_cache = fake_engine(PagedFake(blocks=14))
    without = fake_engine(PagedFake(blocks=14), prefix_caching=False)
    for engine in (with_cache, without):
        for index in range(4):
            engine.add(stage_request(str(index), [index] * 9, max_tokens=12))
        assert run(engine).tokens == {str(index): expected([index] * 9, 12) for index in range(4)}
        assert engine.counters()["preemptions"] >= 1
    assert with_cache.counters()["prefill_tokens"] < without.counters()["prefill_tokens"]
    assert with_cache.counters()["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        ({}, {}, 12),
        ({"salt": b"key one"}, {"salt": b"key two"}, 0),
        ({"salt": b"key one"}, {"salt": b"key one"}, 12),
        ({"content": ((4, 6, b"cat"),)}, {"content": ((4, 6, b"dog"),)}, 4),
        ({"content": ((4, 6, b"cat"),)}, {"content": ((4, 6, b"cat"),)}, 12),
        ({"cacheable": False}, {}, 0),
        ({}, {"cacheable": False}, 0),
        ({}, {"prompt_logprobs": True}, 0),
        ({"unsplittable": ((2, 6),)}, {"unsplittable": ((2, 6),)}, 12),
        ({"unsplittable": ((7, 14),)}, {"unsplittable": ((7, 14),)}, 4),
        ({"unsplittable": ((3, 5), (6, 14))}, {"unsplittable": ((3, 5), (6, 14))}, 0),
    ],
)
def test_what_two_requests_with_equal_tokens_share(first: dict[str, Any], second: dict[str, Any], cached: int) -> None:
    engine = fake_engine()
    engine.add(stage_request("first", [*SHARED, 1, 2], max_tokens=1, **first))
    run(engine)
    engine.add(stage_request("second", [*SHARED, 1, 2], max_tokens=1, **second))
    assert run(engine).metrics["second"].cached_tokens == cached

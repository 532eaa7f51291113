from __future__ import annotations

import random
from typing import Any

import pytest

from omnistage.errors import RequestError
from omnistage.stages.ar.engine import AREngine
from tests.stages.ar.fakes import (
    EOS,
    Collected,
    PagedFake,
    chunk,
    expected,
    fake_engine,
    run,
    stage_config,
    stage_request,
)

PROMPTS = {f"r{index}": [random.Random(index).randrange(900) for _ in range(3 + 5 * index)] for index in range(8)}


def answers(engine: AREngine[Any], **fields: Any) -> Collected:
    for name, tokens in PROMPTS.items():
        engine.add(stage_request(name, tokens, max_tokens=12, **fields))
    return run(engine)


@pytest.mark.parametrize("budget", [1, 3, 16, 500])
@pytest.mark.parametrize(("blocks", "block_size"), [(400, 1), (64, 4), (14, 4), (4, 16)])
def test_batching_chunking_and_preemption_change_no_token(budget: int, blocks: int, block_size: int) -> None:
    engine = fake_engine(PagedFake(blocks=blocks, block_size=block_size), token_budget=budget)
    collected = answers(engine)
    assert collected.tokens == {name: expected(tokens, 12) for name, tokens in PROMPTS.items()}
    assert set(collected.reasons.values()) == {"length"}
    assert engine.counters()["free_blocks"] == blocks


def test_a_small_pool_preempts_and_says_so() -> None:
    engine = fake_engine(PagedFake(blocks=14), prefix_caching=False)
    collected = answers(engine)
    counters = engine.counters()
    assert counters["preemptions"] >= 3
    assert counters["preemptions"] == sum(metrics.preemptions for metrics in collected.metrics.values())
    assert counters["mixed_steps"] >= 1
    assert counters["prefill_tokens"] > sum(map(len, PROMPTS.values()))


def test_counters_add_up_without_preemption() -> None:
    engine = fake_engine(prefix_caching=False)
    answers(engine)
    counters = engine.counters()
    assert counters["prefill_tokens"] == sum(map(len, PROMPTS.values()))
    assert counters["decode_tokens"] == 8 * 11
    assert counters["preemptions"] == counters["running"] == counters["waiting"] == counters["requests"] == 0


def test_no_step_has_more_rows_or_requests_than_allowed() -> None:
    backend = PagedFake()
    answers(fake_engine(backend, token_budget=7, max_num_seqs=3))
    assert max(sum(stop - start for _, start, stop in batch) for batch in backend.batches) == 7
    assert max(map(len, backend.batches)) == 3


def test_generating_requests_are_not_starved_by_a_long_prompt() -> None:
    backend = PagedFake(blocks=200)
    engine = fake_engine(backend, token_budget=8)
    engine.add(stage_request("short", [1, 2], max_tokens=30))
    engine.step()
    engine.add(stage_request("long", list(range(200)), max_tokens=1))
    run(engine)
    assert all(batch[0][0] == "short" for batch in backend.batches[:30])


def test_a_request_that_cannot_step_is_left_out_and_keeps_its_blocks() -> None:
    backend = PagedFake()
    engine = fake_engine(backend)
    engine.add(stage_request("gated", [1, 2, 3], max_tokens=4, gated=True))
    engine.add(stage_request("free", [4, 5], max_tokens=6))
    collected = run(engine)
    assert collected.tokens["gated"] == expected([1, 2, 3], 1)
    assert collected.reasons == {"free": "length"}
    assert engine.counters()["free_blocks"] < engine.counters()["total_blocks"]
    assert not engine.has_work()
    for seq in range(3):
        engine.feed(chunk("gated", seq=seq))
        run(engine, collected)
        assert len(collected.tokens["gated"]) == seq + 2
    assert collected.tokens["gated"] == expected([1, 2, 3], 4)
    assert engine.counters()["preemptions"] == 0


def test_parked_requests_take_no_place_in_the_batch() -> None:
    engine = fake_engine(max_num_seqs=2)
    for name in ("a", "b"):
        engine.add(stage_request(name, [1, 2, 3], max_tokens=4, gated=True))
    run(engine)
    engine.add(stage_request("c", [7], max_tokens=3))
    assert run(engine).reasons == {"c": "length"}


def test_parked_requests_give_their_blocks_back_when_nothing_else_can_run() -> None:
    engine = fake_engine(PagedFake(blocks=4))
    engine.add(stage_request("parked", range(9), max_tokens=3, gated=True))
    collected = run(engine)
    engine.add(stage_request("big", range(20, 33), max_tokens=2))
    run(engine, collected)
    assert collected.reasons == {"big": "length"}
    for seq in range(2):
        engine.feed(chunk("parked", seq=seq))
    run(engine, collected)
    assert collected.tokens["parked"] == expected(range(9), 3)
    assert collected.metrics["parked"].preemptions == 1


def test_a_held_request_does_not_advance() -> None:
    engine = fake_engine()
    engine.add(stage_request("r", [1, 2, 3], max_tokens=5))
    collected = Collected()
    collected.take(engine.step())
    engine.hold("r", True)
    assert not engine.has_work()
    assert engine.step().batch == ()
    engine.hold("r", False)
    assert run(engine, collected).tokens["r"] == expected([1, 2, 3], 5)


@pytest.mark.parametrize("tokens", [None, [], [1, 2]])
def test_a_request_held_from_the_start_waits(tokens: list[int] | None) -> None:
    engine = fake_engine()
    engine.add(stage_request("r", tokens, max_tokens=2))
    engine.hold("r", True)
    if tokens is None:
        engine.feed(chunk("r", tokens=[1, 2]))
    assert not engine.has_work()
    assert engine.step().emissions == []
    engine.hold("r", False)
    assert run(engine).reasons["r"] in ("length", "stop")


def test_a_prompt_may_come_with_a_chunk() -> None:
    engine = fake_engine()
    engine.add(stage_request("r", max_tokens=3))
    assert not engine.has_work()
    engine.feed(chunk("r", tokens=[5, 6]))
    assert run(engine).tokens["r"] == expected([5, 6], 3)


def test_an_empty_prompt_ends_at_once_with_every_port_closed() -> None:
    backend = PagedFake()
    engine = fake_engine(backend)
    engine.add(stage_request("r", [], outputs=("text", "kv")))
    collected = run(engine)
    assert collected.reasons == {"r": "stop"}
    assert sorted(collected.finals["r"]) == ["kv", "text"]
    assert backend.batches == []


def test_max_tokens_zero_computes_the_prompt_and_ends_by_length() -> None:
    engine = fake_engine()
    engine.add(stage_request("r", range(20), max_tokens=0))
    collected = run(engine)
    assert collected.tokens["r"] == []
    assert collected.reasons == {"r": "length"}
    assert engine.counters()["prefill_tokens"] == 20


def test_ports_that_nobody_reads_are_not_emitted() -> None:
    engine = fake_engine()
    engine.add(stage_request("r", [1], max_tokens=2, outputs=()))
    collected = run(engine)
    assert collected.tokens == {}
    assert collected.reasons == {"r": "length"}


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason"),
    [
        ({}, [5, 6, EOS], "stop"),
        ({"ignore_eos": True, "max_tokens": 4}, [5, 6, EOS, 7], "length"),
        ({"stop_token_ids": (6,)}, [5, 6], "stop"),
        ({"min_tokens": 2, "stop_token_ids": (6,), "max_tokens": 3}, [5, 6, EOS], "stop"),
        ({"max_tokens": 1}, [5], "length"),
        ({"max_tokens": 3}, [5, 6, EOS], "stop"),
    ],
)
def test_finish_reasons(sampling: dict[str, Any], tokens: list[int], reason: str) -> None:
    backend = PagedFake()
    backend.script["r"] = [5, 6, EOS, 7, 8]
    engine = fake_engine(backend)
    engine.add(stage_request("r", [1], **sampling))
    collected = run(engine)
    assert (collected.tokens["r"], collected.reasons["r"]) == (tokens, reason)
    assert collected.finals["r"] == ["text"]


def test_the_model_itself_may_stop() -> None:
    engine = fake_engine()
    engine.add(stage_request("r", [1, 2], stop_at=3))
    collected = run(engine)
    assert collected.tokens["r"] == expected([1, 2], 3)
    assert collected.reasons["r"] == "stop"


def test_generation_ends_at_the_context_length() -> None:
    engine = fake_engine(max_model_len=10)
    engine.add(stage_request("r", [1, 2, 3]))
    collected = run(engine)
    assert len(collected.tokens["r"]) == 7
    assert collected.reasons["r"] == "length"


@pytest.mark.parametrize(
    ("overrides", "blocks", "tokens", "sampling", "param", "words"),
    [
        ({"max_model_len": 8}, 64, 9, {}, "prompt", "prompt has 9 tokens .* thinker is 8 tokens"),
        ({"max_model_len": 8}, 64, 8, {}, "prompt", "leaves no room"),
        ({"max_model_len": 8}, 64, 5, {"max_tokens": 4}, "max_tokens", "5 tokens .* 4 more"),
        ({}, 2, 9, {}, "prompt", "kv_memory_mb"),
        ({}, 64, 2, {"stop_token_ids": (1000,)}, "sampling.thinker.stop_token_ids", "1000"),
        ({}, 64, 2, {"logit_bias": {"x": 1.0}}, "sampling.thinker.logit_bias", "'x'"),
    ],
)
def test_requests_that_can_never_run_are_refused_by_name(
    overrides: dict[str, Any], blocks: int, tokens: int, sampling: dict[str, Any], param: str, words: str
) -> None:
    engine = fake_engine(PagedFake(blocks=blocks), **overrides)
    with pytest.raises(RequestError, match=words) as caught:
        engine.add(stage_request("r", [1] * tokens, **sampling))
    assert caught.value.info.param == param
    assert engine.request_ids() == frozenset()
    engine.check_integrity()


def test_foreign_token_ids_in_a_prompt_are_refused() -> None:
    engine = fake_engine()
    with pytest.raises(RequestError, match="-1 is not a token id below 1000"):
        engine.add(stage_request("r", [1, -1], max_tokens=1))


def test_a_request_exactly_as_long_as_the_pool_runs() -> None:
    engine = fake_engine(PagedFake(blocks=3))
    engine.add(stage_request("r", range(5), max_tokens=7))
    assert run(engine).tokens["r"] == expected(range(5), 7)


def test_a_refused_late_prompt_drops_the_request() -> None:
    backend = PagedFake()
    engine = fake_engine(backend, max_model_len=8)
    engine.add(stage_request("r"))
    with pytest.raises(RequestError, match="prompt has 9 tokens"):
        engine.feed(chunk("r", tokens=list(range(9))))
    assert engine.request_ids() == frozenset()
    assert backend.closed == ["r"]


def test_a_refused_chunk_is_released_once_and_the_request_dropped() -> None:
    engine = fake_engine()
    engine.add(stage_request("r"))
    bad = chunk("r", bad=True)
    with pytest.raises(RequestError, match="bad chunk"):
        engine.feed(bad)
    with pytest.raises(RuntimeError, match="released twice"):
        bad.payload.release()
    assert engine.request_ids() == frozenset()


def test_a_request_that_the_backend_refuses_leaves_nothing() -> None:
    engine = fake_engine()
    with pytest.raises(RequestError, match="refused"):
        engine.add(stage_request("r", [1], refuse=True))
    assert engine.request_ids() == frozenset()


def test_the_same_id_twice_is_refused_and_the_first_goes_on() -> None:
    engine = fake_engine()
    engine.add(stage_request("r", [1], max_tokens=2))
    with pytest.raises(RequestError, match="already runs"):
        engine.add(stage_request("r", [2]))
    assert run(engine).tokens["r"] == expected([1], 2)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_gives_everything_back_and_says_nothing_more(steps: int) -> None:
    backend = PagedFake()
    engine = fake_engine(backend)
    engine.add(stage_request("gone", range(30), max_tokens=9))
    engine.add(stage_request("stays", [1, 2], max_tokens=9))
    collected = Collected()
    for _ in range(steps):
        collected.take(engine.step())
    engine.abort("gone")
    engine.abort("gone")
    engine.abort("unknown")
    run(engine, collected)
    assert collected.reasons == {"stays": "length"}
    assert collected.tokens["stays"] == expected([1, 2], 9)
    assert backend.closed == ["gone", "stays"]
    assert engine.counters()["free_blocks"] == 64


def test_a_failing_step_leaves_every_request_as_it_was() -> None:
    backend = PagedFake()
    engine = fake_engine(backend)
    for name in ("good", "bad", "fine"):
        engine.add(stage_request(name, [len(name), 2, 3], max_tokens=6))
    collected = Collected()
    collected.take(engine.step())
    backend.broken_execute = {"bad"}
    for _ in range(3):
        with pytest.raises(ValueError, match="cannot compute bad"):
            engine.step()
        engine.check_integrity()
    with pytest.raises(ValueError, match="cannot compute bad"):
        engine.step(frozenset({"bad"}))
    for name in ("good", "fine"):
        collected.take(engine.step(frozenset({name})))
    engine.abort("bad")
    run(engine, collected)
    assert collected.tokens["good"] == expected([4, 2, 3], 6)
    assert collected.tokens["fine"] == expected([4, 2, 3], 6)


def test_an_emission_that_fails_loses_no_output_of_batch_mates() -> None:
    backend = PagedFake()
    engine = fake_engine(backend)
    for name in ("one", "bad", "two"):
        engine.add(stage_request(name, [len(name), ord(name[0])], max_tokens=5))
    backend.broken_emit = {"bad"}
    collected = Collected()
    with pytest.raises(ValueError, match="cannot emit bad"):
        engine.step()
    assert engine.has_work()
    engine.abort("bad")
    run(engine, collected)
    assert collected.tokens == {name: expected([3, ord(name[0])], 5) for name in ("one", "two")}


def test_only_restricts_the_step() -> None:
    engine = fake_engine()
    for name in ("a", "b", "c"):
        engine.add(stage_request(name, [ord(name)], max_tokens=3))
    assert engine.step(frozenset({"b"})).batch == ("b",)
    assert engine.step(frozenset({"nobody"})).batch == ()
    assert set(engine.step().batch) == {"a", "b", "c"}


def test_higher_priority_is_served_first_and_preempted_last() -> None:
    backend = PagedFake(blocks=6)
    engine = fake_engine(backend, max_num_seqs=2, prefix_caching=False)
    engine.add(stage_request("low", range(8), max_tokens=12, priority=-1))
    collected = Collected()
    collected.take(engine.step())
    engine.add(stage_request("middle", range(10, 18), max_tokens=8))
    engine.add(stage_request("high", range(20, 28), max_tokens=8, priority=3))
    run(engine, collected)
    assert list(collected.reasons) == ["high", "middle", "low"]
    assert collected.metrics["high"].preemptions == 0
    assert collected.metrics["low"].preemptions > 0
    assert collected.tokens["low"] == expected(range(8), 12)


def test_metrics_tell_queue_compute_and_counts() -> None:
    now = [100.0]

    class Slow(PagedFake):
        def execute(self, works: Any) -> Any:
            now[0] += 0.5
            return super().execute(works)

    engine = AREngine(Slow(), stage_config(token_budget=4), clock=lambda: now[0])
    engine.add(stage_request("r", range(6), max_tokens=3))
    now[0] += 2
    metrics = run(engine).metrics["r"]
    assert (metrics.queue_s, metrics.compute_s, metrics.steps) == (2.0, 2.0, 4)
    assert (metrics.input_tokens, metrics.output_tokens, metrics.chunks_out) == (6, 3, 3)


def test_close_releases_every_request() -> None:
    backend = PagedFake()
    engine = fake_engine(backend)
    engine.add(stage_request("late"))
    waiting = chunk("late2", tokens=[1])
    engine.add(stage_request("late2"))
    engine.feed(waiting)
    engine.add(stage_request("running", [1, 2, 3]))
    engine.step()
    engine.close()
    assert sorted(backend.closed) == ["late", "late2", "running"]
    assert backend.shut
    assert not engine.has_work()
    engine.check_integrity()

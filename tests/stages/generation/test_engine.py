"""The generation engine over a counting model: who is served, what is emitted, what is released."""

from __future__ import annotations

import pytest

from omnistage.config.model import StageConfig
from omnistage.errors import IntegrityError, RequestError, StageError
from omnistage.payload import MultimodalPayload
from omnistage.request import FinishReason, StageMetrics
from omnistage.stages.base import InputChunk, StageRequest, StepOutput
from omnistage.stages.generation.engine import GenerationEngine
from omnistage.stages.generation.model import Produced


class CountState:
    def __init__(self, name: str) -> None:
        self.name = name
        self.todo = 0
        self.made = 0
        self.complete = False
        self.closed = False
        self.released = 0


class Counting:
    """Counts its input up: a chunk with meta `n` brings n units, each step gives one; "poison" raises in `run`."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.batches: list[list[str]] = []
        self.poison: set[str] = set()

    def open(self, request: StageRequest) -> CountState:
        if request.params.get("refuse"):
            raise RequestError("refused", param="refuse")
        return CountState(request.request_id)

    def feed(self, state: CountState, chunk: InputChunk) -> None:
        if chunk.payload.meta.get("bad"):
            raise RequestError("bad content", param="text")
        state.todo += chunk.payload.meta.get("n", 0)
        state.complete = chunk.final
        chunk.payload.release()

    def pending(self, state: CountState) -> int:
        return 0 if state.closed else state.todo + state.complete

    def run(self, states: list[CountState]) -> list[list[Produced]]:
        if any(state.name in self.poison for state in states):
            raise ValueError("poisoned")
        self.batches.append([state.name for state in states])
        return [self._advance(state) for state in states]

    def _advance(self, state: CountState) -> list[Produced]:
        state.todo -= state.todo > 0
        state.closed = state.complete and state.todo == 0
        state.made += 1
        return [Produced(port="out", payload=MultimodalPayload(meta={"i": state.made}), final=state.closed)]

    def done(self, state: CountState) -> bool:
        return state.closed

    def metrics(self, state: CountState) -> StageMetrics:
        return StageMetrics(extra={"frames_out": state.made})

    def close(self, state: CountState) -> None:
        self.closed.append(state.name)


Engine = GenerationEngine[CountState]


def make(max_num_seqs: int = 4, objective: str = "throughput") -> tuple[Engine, Counting]:
    model = Counting()
    config = StageConfig(name="wave", kind="generation", max_num_seqs=max_num_seqs, objective=objective)  # type: ignore[arg-type]
    return GenerationEngine(model, config), model


def add(engine: Engine, name: str, units: int, *, final: bool = True, priority: int = 0) -> None:
    engine.add(StageRequest(request_id=name, priority=priority))
    feed(engine, name, units, final=final)


def feed(engine: Engine, name: str, units: int, *, final: bool) -> None:
    engine.feed(chunk(name, final=final, n=units))


def chunk(name: str, *, final: bool = True, **meta: int) -> InputChunk:
    return InputChunk(request_id=name, port="in", seq=0, final=final, payload=MultimodalPayload(meta=meta))


def drain(engine: Engine) -> list[StepOutput]:
    steps = []
    while engine.has_work():
        steps.append(engine.step())
        engine.check_integrity()
    return steps


def test_a_request_emits_its_chunks_in_order_and_finishes_once() -> None:
    engine, model = make()
    add(engine, "a", 3)
    steps = drain(engine)
    assert [[e.payload.meta["i"] for e in step.emissions] for step in steps] == [[1], [2], [3]]
    assert [e.final for step in steps for e in step.emissions] == [False, False, True]
    finished = [f for step in steps for f in step.finished]
    assert [(f.request_id, f.reason, f.metrics.steps, f.metrics.chunks_out) for f in finished] == [
        ("a", FinishReason.STOP, 3, 3)
    ]
    assert model.closed == ["a"]
    assert engine.request_ids() == frozenset()


def test_requests_share_a_step_up_to_max_num_seqs() -> None:
    engine, model = make(max_num_seqs=3)
    for name in "abcde":
        add(engine, name, 1)
    drain(engine)
    assert [len(batch) for batch in model.batches] == [3, 2]


def test_served_requests_queue_up_again_so_nobody_starves() -> None:
    engine, model = make(max_num_seqs=2)
    for name in "abc":
        add(engine, name, 6)
    drain(engine)
    served = [sum(name in batch for batch in model.batches[:6]) for name in "abc"]
    assert served == [4, 4, 4]


def test_a_late_request_waits_for_one_round_of_the_others() -> None:
    engine, model = make(max_num_seqs=2)
    for index in range(4):
        add(engine, f"long{index}", 50)
    engine.step()
    add(engine, "late", 1)
    for _ in range(2):
        engine.step()
        assert "late" not in model.batches[-1]
    engine.step()
    assert "late" in model.batches[-1]


def test_higher_priority_goes_first() -> None:
    engine, model = make(max_num_seqs=1)
    add(engine, "low", 2, priority=-1)
    add(engine, "normal", 2)
    add(engine, "high", 2, priority=5)
    drain(engine)
    assert [batch[0] for batch in model.batches] == ["high", "high", "normal", "normal", "low", "low"]


def test_objective_ttfp_serves_requests_without_output_first() -> None:
    for objective, expected in (("ttfp", "new"), ("throughput", "old")):
        engine, model = make(max_num_seqs=1, objective=objective)
        add(engine, "old", 9)
        add(engine, "other", 9)
        engine.step()
        engine.step()
        engine.add(StageRequest(request_id="new"))
        engine.step()
        feed(engine, "new", 1, final=True)
        engine.hold("other", True)
        if objective == "throughput":
            engine.hold("new", True)
        engine.step()
        assert model.batches[-1] == [expected]


def test_a_request_without_input_has_no_work() -> None:
    engine, _ = make()
    engine.add(StageRequest(request_id="a"))
    assert not engine.has_work()
    assert engine.step().batch == ()
    feed(engine, "a", 1, final=False)
    assert engine.has_work()


def test_a_held_request_is_left_out_until_it_is_let_go() -> None:
    engine, model = make()
    add(engine, "a", 2)
    add(engine, "b", 2)
    engine.hold("a", True)
    engine.step()
    engine.step()
    assert model.batches == [["b"], ["b"]]
    assert not engine.has_work()
    assert engine.counters()["held"] == 1
    engine.hold("a", False)
    drain(engine)
    assert model.batches[2:] == [["a"], ["a"]]


def test_abort_drops_the_request_and_says_nothing_about_it() -> None:
    engine, model = make()
    add(engine, "a", 3)
    add(engine, "b", 1)
    engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("never seen")
    assert drain(engine) == []
    assert model.closed == ["b", "a"]
    assert engine.counters()["aborted"] == 1


def test_a_step_that_raises_leaves_every_request_as_it_was() -> None:
    engine, model = make()
    for name in "abc":
        add(engine, name, 2)
    before = engine.counters()
    model.poison.add("b")
    with pytest.raises(ValueError, match="poisoned"):
        engine.step()
    assert engine.counters() == before
    assert engine.step(only=frozenset({"a"})).batch == ("a",)
    with pytest.raises(ValueError, match="poisoned"):
        engine.step(only=frozenset({"b"}))
    engine.abort("b")
    steps = drain(engine)
    assert sorted(f.request_id for step in steps for f in step.finished) == ["a", "c"]


def test_only_restricts_the_step() -> None:
    engine, _ = make()
    for name in "abc":
        add(engine, name, 1)
    assert engine.step(only=frozenset({"b", "unknown"})).batch == ("b",)


def test_a_refused_chunk_is_released_once_and_the_request_lives() -> None:
    released: list[int] = []
    engine, _ = make()
    engine.add(StageRequest(request_id="a"))
    payload = MultimodalPayload(meta={"bad": True}, on_release=lambda: released.append(1))
    with pytest.raises(RequestError):
        engine.feed(InputChunk(request_id="a", port="in", seq=0, final=True, payload=payload))
    assert released == [1]
    assert engine.request_ids() == {"a"}


def test_a_refused_request_leaves_nothing() -> None:
    engine, _ = make()
    with pytest.raises(RequestError):
        engine.add(StageRequest(request_id="a", params={"refuse": True}))
    assert engine.request_ids() == frozenset()


def test_an_id_in_use_is_refused() -> None:
    engine, model = make()
    add(engine, "a", 1)
    with pytest.raises(StageError):
        engine.add(StageRequest(request_id="a"))
    assert model.closed == []


def test_counters_tell_running_and_waiting_with_capacity_one() -> None:
    engine, _ = make(max_num_seqs=1)
    for index in range(10):
        add(engine, f"r{index}", 5)
    engine.step()
    counters = engine.counters()
    assert (counters["running"], counters["waiting"]) == (1, 9)
    drain(engine)
    counters = engine.counters()
    assert (counters["running"], counters["waiting"]) == (0, 0)
    assert (counters["steps"], counters["batch_rows"], counters["frames_out"]) == (50, 50, 50)
    assert (counters["chunks_out"], counters["finished"]) == (50, 10)


def test_frames_of_aborted_and_open_requests_stay_counted() -> None:
    engine, _ = make()
    add(engine, "a", 3)
    add(engine, "b", 3)
    engine.step()
    engine.abort("a")
    assert engine.counters()["frames_out"] == 2


def test_queue_time_counts_only_while_there_is_work() -> None:
    engine, _ = make(max_num_seqs=1)
    add(engine, "first", 200)
    add(engine, "second", 1)
    engine.hold("second", True)
    for _ in range(100):
        engine.step()
    engine.hold("second", False)
    steps = drain(engine)
    metrics = {f.request_id: f.metrics for step in steps for f in step.finished}
    assert 0.0 <= metrics["second"].queue_s < metrics["first"].queue_s + metrics["first"].compute_s


def test_close_releases_every_request() -> None:
    engine, model = make()
    for name in "ab":
        add(engine, name, 3)
    engine.close()
    assert sorted(model.closed) == ["a", "b"]
    assert not engine.has_work()


def test_integrity_check_finds_work_that_nobody_scheduled() -> None:
    engine, model = make()
    engine.add(StageRequest(request_id="a"))
    model.pending = lambda state: 1  # type: ignore[method-assign]
    with pytest.raises(IntegrityError, match="ready set"):
        engine.check_integrity()

"""Random histories of the whole engine: whatever happens, the books add up and the answers are right."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fuzzing import examples
from tests.stages.ar.fakes import Collected, PagedFake, chunk, expected, fake_engine, run, stage_request


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(5, 16),
        block_size=st.integers(1, 5),
        budget=st.integers(1, 20),
        seqs=st.integers(1, 5),
        caching=st.booleans(),
    )
    def start(self, blocks: int, block_size: int, budget: int, seqs: int, caching: bool) -> None:
        self.backend = PagedFake(blocks=blocks, block_size=block_size)
        self.engine = fake_engine(self.backend, token_budget=budget, max_num_seqs=seqs, prefix_caching=caching)
        self.collected = Collected()
        self.prompts: dict[str, list[int]] = {}
        self.counts: dict[str, int] = {}
        self.alive: list[str] = []
        self.gated: dict[str, int] = {}
        self.held: set[str] = set()

    @rule(data=st.data(), gated=st.booleans(), priority=st.integers(-1, 1))
    def add(self, data: st.DataObject, gated: bool, priority: int) -> None:
        room = self.engine.context_length
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=room - 1))
        count = data.draw(st.integers(1, min(8, room - len(tokens))))
        name = f"r{len(self.prompts)}"
        self.engine.add(stage_request(name, tokens, max_tokens=count, gated=gated, priority=priority))
        self.prompts[name], self.counts[name] = tokens, count
        self.alive.append(name)
        if gated:
            self.gated[name] = 0

    @precondition(lambda self: self.engine.has_work())
    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            output = self.engine.step()
            assert output.batch or output.finished or not self.engine.has_work(), "has_work promised progress"
            self.take(output)
            if not self.engine.has_work():
                return

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def step_one(self, data: st.DataObject) -> None:
        self.take(self.engine.step(frozenset({data.draw(st.sampled_from(self.alive))})))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def failing_step(self, data: st.DataObject) -> None:
        self.backend.broken_execute = {data.draw(st.sampled_from(self.alive))}
        try:
            self.take(self.engine.step())
        except ValueError:
            pass
        finally:
            self.backend.broken_execute = set()

    @precondition(lambda self: any(name in self.gated for name in self.alive))
    @rule(data=st.data())
    def feed(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in self.alive if name in self.gated]))
        self.engine.feed(chunk(name, seq=self.gated[name]))
        self.gated[name] += 1

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), held=st.booleans())
    def hold(self, data: st.DataObject, held: bool) -> None:
        name = data.draw(st.sampled_from(self.alive))
        self.engine.hold(name, held)
        (self.held.add if held else self.held.discard)(name)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.alive))
        self.engine.abort(name)
        self.alive.remove(name)

    @invariant()
    def books_add_up(self) -> None:
        if self.__dict__.get("engine"):
            self.engine.check_integrity()
            assert self.engine.request_ids() == frozenset(self.alive)

    def take(self, output: object) -> None:
        self.collected.take(output)  # type: ignore[arg-type]
        self.alive = [name for name in self.alive if name not in self.collected.reasons]

    def teardown(self) -> None:
        if not self.__dict__.get("engine"):
            return
        for name in self.alive:
            self.engine.hold(name, False)
            for seq in range(self.gated.get(name, 99), 9):
                self.engine.feed(chunk(name, seq=seq))
        run(self.engine, self.collected)
        for name in self.collected.reasons:
            assert self.collected.tokens[name] == expected(self.prompts[name], self.counts[name])
        assert set(self.alive) <= self.collected.reasons.keys()
        assert self.engine.counters()["free_blocks"] == self.backend.limits.total_blocks
        assert sorted(self.backend.closed) == sorted(self.prompts)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

"""A decode thread that runs when told, a clock that is moved by hand, and toydit with spies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from omnistage.config.model import StageConfig
from omnistage.payload import MultimodalPayload
from omnistage.stages.base import InputChunk, StageRequest, StepOutput
from omnistage.stages.diffusion.engine import DiffusionEngine
from omnistage.stages.diffusion.model import Produced
from omnistage.testing.toydit_stage import ToyDiT, ToyState


class Clock:
    """Seconds; each reading costs `tick`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class AtOnce(Executor):
    """Decodes in the caller's thread."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class ManualThread(Executor):
    """Runs submitted work in `run`, one piece per call."""

    def __init__(self) -> None:
        self.queue: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.queue.append((future, fn, args))
        return future

    def run(self) -> None:
        future, work, args = self.queue.pop(0)
        try:
            future.set_result(work(*args))
        except ValueError as error:
            future.set_exception(error)


class SpiedDiT(ToyDiT):
    """Notes which seeds share a call; seeds in `poison_step` / `poison_decode` raise; a step costs a second per row."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.calls: list[list[int]] = []
        self.decodes: list[list[int]] = []
        self.encodes: list[list[int]] = []
        self.closed: list[int] = []
        self.poison_step: set[int] = set()
        self.poison_decode: set[int] = set()
        self.groups: dict[int, str] = {}

    def group(self, state: ToyState) -> str:
        return self.groups.get(state.request.seed, "")

    def encode(self, states: list[ToyState]) -> None:
        self.encodes.append(seeds(states))
        super().encode(states)

    def denoise(self, states: list[ToyState]) -> None:
        if self.poison_step & set(seeds(states)):
            raise ValueError("poisoned step")
        self.calls.append(seeds(states))
        self.clock.now += sum(self.rows(state) for state in states)
        super().denoise(states)

    def decode(self, states: list[ToyState]) -> list[list[Produced]]:
        if self.poison_decode & set(seeds(states)):
            raise ValueError("poisoned decode")
        self.decodes.append(seeds(states))
        self.clock.now += 1
        return super().decode(states)

    def close(self, state: ToyState) -> None:
        assert state.request.seed not in self.closed
        self.closed.append(state.request.seed)
        super().close(state)


def seeds(states: list[ToyState]) -> list[int]:
    return [state.request.seed for state in states]


class Bench:
    """An engine on toydit, on a virtual clock. Requests are known by their seed: request "r7" has seed 7."""

    def __init__(self, **config: Any) -> None:
        self.clock = Clock()
        self.thread = ManualThread()
        self.model = SpiedDiT(self.clock)
        self.wakes = 0
        fields: dict[str, Any] = {"name": "dit", "kind": "diffusion", "max_num_seqs": 16, "token_budget": 4096} | config
        self.engine = DiffusionEngine(
            self.model, StageConfig(**fields), self._wake, executor=self.thread, clock=self.clock
        )

    def _wake(self) -> None:
        self.wakes += 1

    def add(
        self,
        seed: int,
        *,
        steps: int = 4,
        side: int = 8,
        priority: int = 0,
        ports: tuple[str, ...] = ("image",),
        **params: Any,
    ) -> None:
        size = {"height": side, "width": side, "num_inference_steps": steps, "guidance_scale": 1.0}
        request = StageRequest(
            request_id=f"r{seed}",
            seed=seed,
            priority=priority,
            inputs=("text",),
            outputs=ports,
            params=size | params,
        )
        self.engine.add(request)
        self.feed(seed)

    def feed(self, seed: int) -> None:
        payload = MultimodalPayload.text(f"prompt {seed}")
        self.engine.feed(InputChunk(request_id=f"r{seed}", port="text", seq=0, final=True, payload=payload))

    def tick(self, only: frozenset[str] | None = None) -> StepOutput:
        """One step of the engine; the decode thread then does all it was given."""
        output = self.engine.step(only)
        while self.thread.queue:
            self.thread.run()
        return output

    def run(self, limit: int = 1000) -> list[StepOutput]:
        """Ticks until there is nothing to do, then checks the books."""
        outputs: list[StepOutput] = []
        while self.engine.has_work():
            outputs.append(self.tick())
            assert len(outputs) < limit
        self.engine.check_integrity()
        return outputs


def finished(outputs: list[StepOutput]) -> list[str]:
    return [end.request_id for output in outputs for end in output.finished]

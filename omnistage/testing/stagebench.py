"""Runs examples through one kit stage in the real engine, in whatever order and pieces, and says what came out."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

from omnistage.config.model import StageConfig
from omnistage.kit.model import KitModel, KitState
from omnistage.kit.ports import Value
from omnistage.kit.stage import Stage, Target
from omnistage.payload import MultimodalPayload
from omnistage.runtime.journaled import digest_of
from omnistage.stages.base import InputChunk, StageRequest, StepOutput
from omnistage.stages.generation.engine import GenerationEngine

logger = logging.getLogger(__name__)

# The seed by which a request is known whose inputs raise when they are read.
POISON_SEED = 0x7E57_BAD
MAX_STEPS = 10_000


class Unreadable(RuntimeError):
    """Raised by the inputs of a poisoned request."""


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One request: an input per port, parameters, seed."""

    inputs: Mapping[str, Value]
    params: Mapping[str, Any] = {}
    seed: int = 1


class _Unreadable(Mapping[str, Value]):
    def __getitem__(self, port: str) -> NoReturn:
        raise Unreadable("this input cannot be read")

    def __iter__(self) -> Iterator[str]:
        raise Unreadable("this input cannot be read")

    def __len__(self) -> int:
        raise Unreadable("this input cannot be read")


class Watched:
    """The user's code, watched: which of the parts that it was given are still alive. `wrote`: it changed an input."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.wrote = False
        self._given: list[weakref.ref[Any]] = []

    def __call__(self, given: Any) -> Any:
        parts = given if isinstance(given, list) else [given]
        inputs = [value for part in parts for value in part.inputs.values() if not isinstance(value, str)]
        for part in parts:
            self._given += [weakref.ref(part), weakref.ref(part.state)]
            if part.seed == POISON_SEED:
                part.inputs = _Unreadable()
        before = [value.tobytes() for value in inputs]
        returned = self._target(given)
        self.wrote |= before != [value.tobytes() for value in inputs]
        return returned

    def alive(self) -> int:
        """Parts and states that somebody still holds."""
        gc.collect()
        return sum(ref() is not None for ref in self._given)


@dataclass
class Heard:
    """What came of an example: `pieces` per output port, as they came; the error that ended it."""

    pieces: dict[str, list[Value]] = field(default_factory=dict)
    error: Exception | None = None
    closed: set[str] = field(default_factory=set)


class Bench:
    """One engine with one stage in it; `overrides` change the stage's declaration.

    `changed`: something was changed after it had been given out; `failed_together`: what a step raised in which no
    request fails alone.
    """

    def __init__(self, stage: Stage, **overrides: Any) -> None:
        self.stage: Stage = msgspec.structs.replace(stage, **overrides)
        self.watched = Watched(stage.make())
        model = KitModel(msgspec.structs.replace(self.stage, run=self.watched))
        config = StageConfig(name=stage.name, kind="generation", max_num_seqs=max(stage.batch, 1))
        self.engine: GenerationEngine[KitState] = GenerationEngine(model, config)
        self.heard: dict[str, Heard] = {}
        self.changed = False
        self.failed_together: Exception | None = None
        self._handed: list[tuple[MultimodalPayload, str]] = []
        self._count = 0

    def alone(self, examples: Sequence[Example], piece: int | None = None) -> list[Heard]:
        """Each example after the other."""
        return [self.together([example], piece)[0] for example in examples]

    def together(
        self, examples: Sequence[Example], piece: int | None = None, abort_first_after: int | None = None
    ) -> list[Heard]:
        """All at once, fed in turns, `piece` characters or rows at a time (None: whole). The first one can be aborted
        after so many steps."""
        feeds = {self._add(example): self._pieces(example, piece) for example in examples}
        first, steps = next(iter(feeds)), 0
        live = dict(feeds)
        while live or self.engine.has_work():
            for name, feed in list(live.items()):
                chunk = next(feed, None)
                if chunk is None:
                    del live[name]
                elif name in self.engine.request_ids():
                    self._feed(name, chunk)
            if abort_first_after is not None and steps >= abort_first_after:
                self.engine.abort(first)
            if self.engine.has_work():
                self._step()
                steps += 1
            assert steps < MAX_STEPS, "the stage never ends"
        self.changed |= any(digest_of(payload) != digest for payload, digest in self._handed)
        self._handed.clear()
        return [self.heard.pop(name) for name in feeds]

    def _add(self, example: Example) -> str:
        self._count += 1
        name = f"request-{self._count}"
        self.heard[name] = Heard({port: [] for port in self.stage.gives})
        self.engine.add(
            StageRequest(
                request_id=name,
                inputs=tuple(self.stage.takes),
                outputs=tuple(self.stage.gives),
                params=dict(example.params),
                seed=example.seed,
            )
        )
        return name

    def _pieces(self, example: Example, piece: int | None) -> Iterator[InputChunk]:
        """Whole inputs first, then what is streamed."""
        for port, spec in sorted(self.stage.takes.items(), key=lambda item: not item[1].whole):
            value = spec.checked(example.inputs[port])
            size = spec.size(value)
            step = size if piece is None or spec.whole else piece
            starts = range(0, max(size, 1), max(step, 1))
            for seq, start in enumerate(starts):
                payload = spec.payload(spec.cut(value, start, start + max(step, 1)))
                final = seq == len(starts) - 1
                yield InputChunk(request_id="", port=port, seq=seq, final=final, payload=payload)

    def _feed(self, name: str, chunk: InputChunk) -> None:
        self.engine.feed(msgspec.structs.replace(chunk, request_id=name))

    def _step(self) -> None:
        """One step as the stage loop takes it: when it fails, each request alone, to find the culprit."""
        error = _attempt(lambda: self._take(self.engine.step()))
        if error is None:
            return
        culprits = [name for name in sorted(self.engine.request_ids()) if self._fails_alone(name)]
        if not culprits:
            self.failed_together = error

    def _fails_alone(self, name: str) -> bool:
        error = _attempt(lambda: self._take(self.engine.step(frozenset((name,)))))
        if error is not None:
            self.heard[name].error = error
            self.engine.abort(name)
        return error is not None

    def _take(self, output: StepOutput) -> None:
        for emission in output.emissions:
            heard, port = self.heard[emission.request_id], self.stage.gives[emission.port]
            heard.pieces[emission.port].append(port.read(emission.payload))
            self._handed.append((emission.payload, digest_of(emission.payload)))
            if emission.final:
                heard.closed.add(emission.port)


def _attempt(action: Callable[[], None]) -> Exception | None:
    """What the user's code raised."""
    try:
        action()
    except Exception as error:
        logger.debug("a step failed", exc_info=True)
        return error
    return None

"""Runs a kit stage in the generation engine: buffers inputs, calls by the chunk and batch rules, checks outputs."""

from __future__ import annotations

import contextlib
import copy
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from omnistage.config.model import StageContext
from omnistage.config.registry import load_pipeline
from omnistage.errors import RequestError, StageError
from omnistage.kit.graph import KitPipeline
from omnistage.kit.ports import Value
from omnistage.kit.stage import Part, Stage, State
from omnistage.payload import MultimodalPayload
from omnistage.request import StageMetrics
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.generation.model import GenerationModel, Produced


class KitState:
    """One request: input that no call has seen yet, and what the user's code keeps."""

    def __init__(self, stage: Stage, request: StageRequest) -> None:
        self.request = request
        self.waiting: dict[str, Value] = {name: port.empty() for name, port in stage.takes.items()}
        self.open = set(request.inputs)
        self.kept = State()
        self.rng = np.random.default_rng([request.seed, zlib.crc32(stage.name.encode())])
        self.calls = 0
        self.ended = False


class KitModel:
    """A `GenerationModel` of a `Stage`. Raises whatever making the user's object raises."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        with _no_grad():
            self._target = stage.make()
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(self._target, torch.nn.Module):
                self._target.eval()

    def open(self, request: StageRequest) -> KitState:
        return KitState(self._stage, request)

    def feed(self, state: KitState, chunk: InputChunk) -> None:
        port = self._stage.takes[chunk.port]
        try:
            value = port.read(chunk.payload)
            joined = port.join([state.waiting[chunk.port], value])
        except ValueError as error:
            text = f"stage {self._stage.name}, input {chunk.port}: {error}"
            raise RequestError(text, param=chunk.port, stage=self._stage.name) from None
        state.waiting[chunk.port] = joined
        if chunk.final:
            state.open.discard(chunk.port)
        chunk.payload.release()

    def pending(self, state: KitState) -> int:
        paced = self._stage.paced
        if state.ended or any(name != paced for name in state.open):
            return 0
        if paced is None or paced not in state.open:
            return 1
        return int(self._stage.takes[paced].size(state.waiting[paced]) >= self._stage.chunk)

    def run(self, states: list[KitState]) -> list[list[Produced]]:
        parts = [self._part(state) for state in states]
        outputs: list[dict[str, Value]] = []
        with _no_grad():
            for start in range(0, len(parts), self._stage.batch):
                outputs += self._call(parts[start : start + self._stage.batch])
        return [self._commit(*each) for each in zip(states, parts, outputs, strict=True)]

    def _part(self, state: KitState) -> Part:
        stage, paced = self._stage, self._stage.paced
        inputs = dict(state.waiting)
        final = True
        if paced is not None:
            port, waiting = stage.takes[paced], state.waiting[paced]
            final = paced not in state.open and port.size(waiting) <= stage.chunk
            inputs[paced] = port.cut(waiting, 0, stage.chunk)
        for value in inputs.values():
            if not isinstance(value, str):
                value.flags.writeable = False
        params = stage.params | state.request.params
        kept, rng = copy.deepcopy((state.kept, state.rng))
        return Part(inputs, kept, rng, final=final, params=params, seed=state.request.seed)

    def _call(self, parts: list[Part]) -> list[dict[str, Value]]:
        if self._stage.batch == 1:
            returned: Any = [self._target(parts[0])]
        else:
            returned = self._target(parts)
        if not isinstance(returned, (list, tuple)) or len(returned) != len(parts):
            got = f"{len(returned)} results" if isinstance(returned, (list, tuple)) else type(returned).__name__
            raise self._error(f"it was called with {len(parts)} requests and returned {got}")
        return [self._outputs(value) for value in returned]

    def _outputs(self, value: object) -> dict[str, Value]:
        gives = self._stage.gives
        if value is None:
            return {}
        named: Mapping[Any, object] = value if isinstance(value, Mapping) else {next(iter(gives)): value}
        if not isinstance(value, Mapping) and len(gives) > 1:
            raise self._error(f"it has outputs {', '.join(gives)}; return a mapping of them")
        for name in named:
            if name not in gives:
                raise self._error(f"it returned {name!r}, which is no output port; those are {', '.join(gives)}")
        checked: dict[str, Value] = {}
        for name, each in named.items():
            try:
                checked[name] = gives[name].checked(each)
            except ValueError as error:
                raise self._error(f"output {name}: {error}") from None
        return checked

    def _commit(self, state: KitState, part: Part, outputs: dict[str, Value]) -> list[Produced]:
        stage, paced = self._stage, self._stage.paced
        state.kept, state.rng, state.ended = part.state, part.rng, part.final
        state.calls += 1
        if paced is not None:
            state.waiting[paced] = stage.takes[paced].cut(state.waiting[paced], stage.chunk, None)
        produced: list[Produced] = []
        for name in state.request.outputs:
            port, value = stage.gives[name], outputs.get(name)
            filled = value is not None and port.size(value) > 0
            if filled or part.final:
                payload = port.payload(value) if value is not None and filled else MultimodalPayload()
                produced.append(Produced(port=name, payload=payload, final=part.final))
        return produced

    def _error(self, text: str) -> StageError:
        return StageError(f"stage {self._stage.name}: {text}", stage=self._stage.name)

    def done(self, state: KitState) -> bool:
        return state.ended

    def metrics(self, state: KitState) -> StageMetrics:
        return StageMetrics(extra={"calls": float(state.calls)})

    def close(self, state: KitState) -> None:
        state.kept = State()
        state.waiting = {}


def _no_grad() -> contextlib.AbstractContextManager[object]:
    torch = sys.modules.get("torch")
    context: contextlib.AbstractContextManager[object] = contextlib.nullcontext() if torch is None else torch.no_grad()
    return context


def component(context: StageContext) -> GenerationModel[KitState]:
    """The component of every kit stage: finds the user's stage by its name."""
    pipeline = load_pipeline(context.config.pipeline)
    assert isinstance(pipeline, KitPipeline), "only kit pipelines name this component"
    return KitModel(pipeline.kit[context.spec.name])

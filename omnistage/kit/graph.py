"""A pipeline of kit stages: ports of the same name are joined, the rest is the client's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from omnistage.config.model import (
    CLIENT,
    ClientInput,
    EdgeSpec,
    OmniConfig,
    PipelineConfig,
    RequestPlan,
    StageSpec,
    Variant,
)
from omnistage.errors import ConfigError, RequestError
from omnistage.kit.ports import Port, Value
from omnistage.kit.stage import Stage
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest, prompt_of

# Outputs that clients know by what they are; others go by the name of their port.
_MODALITIES = ("text", "audio", "image")
_ARENA_MB = 8
# Speech routes ask for a voice; a pipeline of the user has just its own.
VOICES = ("default",)


class KitPipeline(PipelineConfig, frozen=True, kw_only=True):
    """A pipeline that knows its stages' code: `kit` by stage name."""

    kit: dict[str, Stage]


def pipeline(
    name: str, *stages: Stage, join: Mapping[str, str] | None = None, outputs: Iterable[str] = ()
) -> KitPipeline:
    """Joins stages to a graph.

    An input is fed by the nearest earlier stage with an output of that name, or as `join` says ({"stage.input":
    "stage.output"}); an input that nobody feeds is the client's. Outputs that no stage reads go to the client, and so
    do those that `outputs` names ("stage.port"). Raises ConfigError for names that do not exist.
    """
    if not stages:
        raise ConfigError(f"pipeline {name}: give it at least one stage")
    edges = _inner_edges(name, stages, dict(join or {}))
    edges += _client_edges(name, stages, edges, tuple(outputs))
    specs = tuple([_spec(each) for each in stages])
    rates = [port.meta["sample_rate"] for each in stages for port in each.gives.values() if port.type == "audio"]
    planner = _Planner(name, stages, edges)
    speaks = planner.speaks
    return KitPipeline(
        name=name,
        variants={"default": Variant(stages=specs, edges=tuple(edges))},
        plan=planner.plan,
        tasks=("chat", "completion", "speech") if speaks else ("chat", "completion"),
        voices=VOICES if speaks else (),
        sample_rate=rates[-1] if rates else None,
        description=f"stages of the user: {', '.join(each.name for each in stages)}",
        kit={each.name: each for each in stages},
    )


def _spec(stage: Stage) -> StageSpec:
    return StageSpec(
        name=stage.name,
        kind="generation",
        component="omnistage.kit.model:component",
        inputs={name: port.type for name, port in stage.takes.items()},
        outputs={name: port.type for name, port in stage.gives.items()},
        defaults={"max_num_seqs": stage.batch, "arena_mb": _ARENA_MB},
        objective="ttfp" if any(port.type == "audio" for port in stage.gives.values()) else "throughput",
    )


def _inner_edges(name: str, stages: tuple[Stage, ...], join: dict[str, str]) -> list[EdgeSpec]:
    edges: list[EdgeSpec] = []
    for at, stage in enumerate(stages):
        for port in stage.takes:
            target = f"{stage.name}.{port}"
            near = next((each.name for each in reversed(stages[:at]) if port in each.gives), None)
            source = join.pop(target, f"{near}.{port}" if near is not None else "")
            if source:
                edges.append(EdgeSpec(source, target))
    if join:
        raise ConfigError(f"pipeline {name}: join: there is no input {next(iter(join))!r}")
    return edges


def _client_edges(
    name: str, stages: tuple[Stage, ...], inner: list[EdgeSpec], outputs: tuple[str, ...]
) -> list[EdgeSpec]:
    fed, read = {edge.target for edge in inner}, {edge.source for edge in inner}
    taken = [(port, f"{stage.name}.{port}") for stage in stages for port in stage.takes]
    edges = [EdgeSpec(f"{CLIENT}.{port}", target) for port, target in taken if target not in fed]
    given = {f"{stage.name}.{port}": (port, kind.type) for stage in stages for port, kind in stage.gives.items()}
    unknown = next((source for source in outputs if source not in given), None)
    if unknown is not None:
        raise ConfigError(f"pipeline {name}: outputs: there is no output {unknown!r}; those are {', '.join(given)}")
    return edges + _output_edges(name, {s: each for s, each in given.items() if s not in read or s in outputs})


def _output_edges(name: str, given: Mapping[str, tuple[str, str]]) -> list[EdgeSpec]:
    """The edges of outputs ("stage.port": port and type) to the client."""
    edges: dict[str, EdgeSpec] = {}
    for source, (port, kind) in given.items():
        target = f"{CLIENT}.{kind if kind in _MODALITIES else port}"
        if target in edges:
            raise ConfigError(f"pipeline {name}: {source} is a second output {target!r}; feed it to a stage")
        edges[target] = EdgeSpec(source, target)
    return list(edges.values())


class _Planner:
    """Which stages a request visits, and what of it goes to which port."""

    def __init__(self, name: str, stages: tuple[Stage, ...], edges: list[EdgeSpec]) -> None:
        self._name = name
        self._stages = {stage.name: stage for stage in stages}
        self._edges = edges
        self.inputs: dict[str, Port] = {
            edge.source_port: self._stages[edge.target_stage].takes[edge.target_port]
            for edge in edges
            if edge.source_stage == CLIENT and edge.target_stage in self._stages
        }
        self.outputs = {edge.target_port: edge.source_stage for edge in edges if edge.target_stage == CLIENT}

    @property
    def speaks(self) -> bool:
        """Text in, sound out."""
        return "audio" in self.outputs and any(port.is_text for port in self.inputs.values())

    def plan(self, request: OmniRequest, media: dict[str, MultimodalPayload], config: OmniConfig) -> RequestPlan:
        """See `Planner`."""
        wanted = request.modalities if request.modalities is not None else tuple(self.outputs)
        if request.voice not in (None, *VOICES):
            raise RequestError(f"no voice {request.voice!r}; voices are {', '.join(VOICES)}", param="voice")
        if request.task == "speech":
            wanted = ("audio",)
        unknown = [each for each in wanted if each not in self.outputs]
        if unknown or not wanted:
            known = ", ".join(self.outputs)
            raise RequestError(f"modalities: {self._name} gives {known}, not {unknown}", param="modalities")
        stages = self._needed(wanted)
        ports = [e.source_port for e in self._edges if e.source_stage == CLIENT and e.target_stage in stages]
        given = dict(request.params)
        inputs = [self._input(port, request, media, given) for port in dict.fromkeys(ports)]
        params = self._params(stages, given)
        return RequestPlan(stages=stages, params=params, inputs=inputs, outputs=tuple(wanted))

    def _needed(self, wanted: Iterable[str]) -> tuple[str, ...]:
        needed = {self.outputs[each] for each in wanted}
        for _ in self._stages:
            needed |= {e.source_stage for e in self._edges if e.target_stage in needed and e.source_stage != CLIENT}
        return tuple(name for name in self._stages if name in needed)

    def _input(
        self, name: str, request: OmniRequest, media: dict[str, MultimodalPayload], params: dict[str, Any]
    ) -> ClientInput:
        port = self.inputs[name]
        try:
            if name in params:
                given = params.pop(name)
                if not (isinstance(given, Mapping) and "media" in given):
                    return ClientInput(port=name, payload=port.payload(_value(port, given)))
            if port.is_text:
                return ClientInput(port=name, payload=port.payload(prompt_of(request)))
            return ClientInput(port=name, payload=_medium(port, media))
        except ValueError as error:
            raise RequestError(f"{name}: {error}", param=name) from None

    def _params(self, stages: tuple[str, ...], given: dict[str, Any]) -> dict[str, dict[str, Any]]:
        declared = {key: default for stage in self._stages.values() for key, default in stage.params.items()}
        for key, value in given.items():
            if key not in declared:
                known = ", ".join(declared) or "none"
                raise RequestError(f"{self._name} has no parameter {key!r}; it has {known}", param=key)
            wanted = type(declared[key])
            if type(value) is not wanted and not (wanted is float and type(value) is int):
                raise RequestError(f"{key}: {wanted.__name__} was expected", param=key)
        return {
            name: {key: value for key, value in given.items() if key in self._stages[name].params} for name in stages
        }


def _value(port: Port, given: object) -> Value:
    return port.checked(np.array(given, port.dtype) if isinstance(given, list) and not port.is_text else given)


def _medium(port: Port, media: Mapping[str, MultimodalPayload]) -> MultimodalPayload:
    """The first medium of the port's type. Raises ValueError."""
    found = next((payload for payload in media.values() if port.type in payload.tensors), None)
    if found is None:
        raise ValueError(f"the request brings no {port.type}")
    value = found[port.type]
    rate = port.meta.get("sample_rate")
    if rate is not None and found.meta.get("sample_rate") != rate:
        raise ValueError(f"sound at {found.meta.get('sample_rate')} Hz; {rate} Hz are needed")
    if value.ndim == len(port.shape) - 1:  # one picture
        value = value[None]
    return port.payload(port.checked(value))

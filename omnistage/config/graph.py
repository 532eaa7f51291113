"""Checks of a pipeline's graph and of the placement that a deploy file gives it."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.config.model import CLIENT, EdgeSpec, StageConfig, StageSpec, Variant
from omnistage.errors import ConfigError


def check_graph(pipeline: str, variant: Variant) -> None:
    """Raises ConfigError naming the stage or edge: unique names, ends exist, types agree, no cycle, entry, output."""
    names = [stage.name for stage in variant.stages]
    for name in names:
        if names.count(name) > 1 or name == CLIENT:
            raise ConfigError(f"pipeline {pipeline}: stage name {name!r} is used twice or reserved")
    for edge in variant.edges:
        _check_edge(pipeline, variant, edge)
    if not any(edge.source_stage == CLIENT for edge in variant.edges):
        raise ConfigError(f"pipeline {pipeline}: no edge from {CLIENT!r}: nothing can enter")
    if not any(edge.target_stage == CLIENT for edge in variant.edges):
        raise ConfigError(f"pipeline {pipeline}: no edge to {CLIENT!r}: there is no final output")
    _check_acyclic(pipeline, variant)


def _check_edge(pipeline: str, variant: Variant, edge: EdgeSpec) -> None:
    outputs = {f"{stage.name}.{port}": kind for stage in variant.stages for port, kind in stage.outputs.items()}
    inputs = {f"{stage.name}.{port}": kind for stage in variant.stages for port, kind in stage.inputs.items()}
    if edge.source_stage != CLIENT and edge.source not in outputs:
        raise ConfigError(f"pipeline {pipeline}: edge source {edge.source!r} is no output port of any stage")
    if edge.target_stage != CLIENT and edge.target not in inputs:
        raise ConfigError(f"pipeline {pipeline}: edge target {edge.target!r} is no input port of any stage")
    if CLIENT in (edge.source_stage, edge.target_stage):
        return
    if outputs[edge.source] != inputs[edge.target]:
        raise ConfigError(
            f"pipeline {pipeline}: {edge.source} gives {outputs[edge.source]!r}, "
            f"{edge.target} takes {inputs[edge.target]!r}"
        )


def _check_acyclic(pipeline: str, variant: Variant) -> None:
    waiting = {stage.name for stage in variant.stages}
    while waiting:
        free = {
            name
            for name in waiting
            if not any(edge.target_stage == name and edge.source_stage in waiting for edge in variant.edges)
        }
        if not free:
            raise ConfigError(f"pipeline {pipeline}: cycle through {', '.join(sorted(waiting))}")
        waiting -= free


def check_capabilities(spec: StageSpec, stage: StageConfig, origins: Mapping[str, str]) -> None:
    """Raises ConfigError for a setting that the stage does not advertise."""
    asked = {
        "quantization": (stage.quantization, stage.quantization != "none"),
        "weight_layout": (stage.weight_layout, stage.weight_layout not in ("auto", "plain")),
        "graphs": (stage.graphs, stage.graphs != "eager"),
        "tensor_parallel": (str(stage.tensor_parallel), stage.tensor_parallel > 1),
    }
    for key, (value, unusual) in asked.items():
        capability = value if key == "quantization" else key
        if unusual and capability not in spec.capabilities:
            name = f"stages.{stage.name}.{key}"
            raise ConfigError(f"{name}: {value} is not supported by this stage ({origins.get(name, '')})", param=name)


def check_placement(stages: Mapping[str, StageConfig], origins: Mapping[str, str]) -> None:
    """Raises ConfigError for co-location that cannot be: unknown stage, ring, process placement, unequal replicas."""
    for stage in stages.values():
        host = stage.co_located_with
        if not host:
            continue
        key = f"stages.{stage.name}.with"
        where = origins.get(key, "")
        if host not in stages or host == stage.name:
            raise ConfigError(f"{key}: no other stage {host!r}; stages are {', '.join(stages)} ({where})", param=key)
        if stage.placement == "process":
            raise ConfigError(f"{key}: {host!r} needs placement: inline, not process ({where})", param=key)
        if stages[host].replicas != stage.replicas:
            raise ConfigError(
                f"{key}: {stage.name} has {stage.replicas} replicas, {host} has {stages[host].replicas}; "
                f"make them equal ({where})",
                param=key,
            )
        _check_chain(stages, stage, where)


def _check_chain(stages: Mapping[str, StageConfig], stage: StageConfig, where: str) -> None:
    seen, name = {stage.name}, stage.co_located_with
    while name:
        if name in seen:
            raise ConfigError(f"stages.{stage.name}.with: ring of co-located stages ({where})")
        seen.add(name)
        name = stages[name].co_located_with if name in stages else ""

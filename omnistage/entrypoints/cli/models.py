"""`omnistage models`: the built-in pipelines."""

from __future__ import annotations

import argparse
import json
from typing import Any

from omnistage.config.model import CLIENT, PipelineConfig
from omnistage.config.registry import PIPELINES, load_pipeline


def run(arguments: argparse.Namespace) -> int:
    rows = [describe(load_pipeline(name)) for name in PIPELINES]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        print(f"{row['name']}: {row['description']}")
        print(f"  tasks: {', '.join(row['tasks'])}; outputs: {', '.join(row['outputs'])}")
        if row["voices"]:
            print(f"  voices: {', '.join(row['voices'])}")
        for variant, stages in row["variants"].items():
            print(f"  {variant}: {' -> '.join(stages)}")
        if row["architectures"]:
            print(f"  checkpoints: {', '.join(row['architectures'])}")
    return 0


def describe(pipeline: PipelineConfig) -> dict[str, Any]:
    """What a pipeline takes and gives, as plain data."""
    edges = [edge for variant in pipeline.variants.values() for edge in variant.edges]
    outputs = dict.fromkeys(edge.target_port for edge in edges if edge.target_stage == CLIENT)
    return {
        "name": pipeline.name,
        "description": pipeline.description,
        "tasks": list(pipeline.tasks),
        "outputs": list(outputs),
        "voices": list(pipeline.voices),
        "variants": {name: [stage.name for stage in v.stages] for name, v in pipeline.variants.items()},
        "architectures": list(pipeline.architectures),
    }

"""`omnistage config show`: the resolved configuration, with origins on request. `config diff`: what two differ in.
`config schema`: the deploy file's JSON schema. `config import`: a vLLM-Omni deploy file as one of ours."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

from omnistage.config.model import OmniConfig
from omnistage.config.registry import load_pipeline
from omnistage.config.resolve import resolve_config
from omnistage.config.schema import deploy_schema
from omnistage.config.vllm_omni import Imported, import_deploy
from omnistage.entrypoints.cli.main import overrides_of
from omnistage.runtime.memory_plan import decided, footprint_of


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "schema":
        pipeline = load_pipeline(resolve_config(arguments.model).pipeline) if arguments.model is not None else None
        print(json.dumps(deploy_schema(pipeline), indent=2))
        return 0
    if arguments.action == "import":
        imported = import_deploy(Path(arguments.file), arguments.model)
        print(show_import(imported), end="")
        print("".join(f"not carried over: {row}\n" for row in _left_out(imported)), end="", file=sys.stderr)
        return 0
    config = resolve_config(arguments.model, arguments.deploy, overrides_of(arguments))
    if arguments.action == "diff":
        other = resolve_config(arguments.model, arguments.to, {})
        lines = differences(config, other)
        print("".join(lines), end="")
        return 1 if lines else 0
    print(show_origins(config) if arguments.origin else show(config), end="")
    return 0


def deploy_document(config: OmniConfig) -> dict[str, Any]:
    """The configuration as the deploy file that would produce it."""
    data = msgspec.to_builtins(config)
    stages: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, values in data["stages"].items():
        stage = {key: value for key, value in values.items() if key not in ("name", "kind", "options", "sampling")}
        stage["with"] = stage.pop("co_located_with")
        stages[name] = {key: value for key, value in (stage | values["options"]).items() if value not in ("", [])}
        if values["sampling"]:
            sampling[name] = values["sampling"]
    edges = {name: {k: v for k, v in values.items() if k != "name"} for name, values in data["edges"].items()}
    head = {key: data[key] for key in ("pipeline", "variant", "served_name", "cache_dir")}
    return (
        head
        | {"stages": stages, "edges": edges, "sampling": sampling}
        | {key: data[key] for key in ("limits", "media", "trace", "record")}
    )


def show(config: OmniConfig) -> str:
    text: str = yaml.safe_dump(deploy_document(config), sort_keys=False, allow_unicode=True)
    return text


def show_import(imported: Imported) -> str:
    """A deploy file; what it could not take over stands above as comments."""
    text: str = yaml.safe_dump(imported.document, sort_keys=False, allow_unicode=True)
    rows = _left_out(imported)
    head = ["# not carried over:", *(f"#   {row}" for row in rows)] if rows else []
    return "".join(f"{line}\n" for line in head) + text


def _left_out(imported: Imported) -> list[str]:
    return [" ".join(f"{key}: {reason}".split()) for key, reason in imported.unmapped.items()]


def show_origins(config: OmniConfig) -> str:
    """One line per value: key, value, origin; for what is decided where the stage runs, also what and why."""
    chosen = decisions(config)
    return "".join(
        f"{'.'.join(path)} = {value}{chosen.get('.'.join(path), '  #')} {_origin(config, path)}\n"
        for path, value in _flat(deploy_document(config), ())
    )


def decisions(config: OmniConfig) -> dict[str, str]:
    """What "auto" becomes on this machine, by key: ` -> choice  # reason;`. Imports torch for the probe of types."""
    pipeline = load_pipeline(config.pipeline)
    if pipeline.footprint is None:
        return {}
    from omnistage.ops.device import choose_device
    from omnistage.ops.dtype import choose_dtype

    found: dict[str, str] = {}
    for stage in config.stages.values():
        wanted = [
            key for key, value in (("dtype", stage.dtype), ("weight_layout", stage.weight_layout)) if value == "auto"
        ]
        if not wanted:
            continue
        probed = choose_dtype(stage.dtype, choose_device(stage.device))
        dtype = str(probed.dtype).removeprefix("torch.")
        declared = footprint_of(config, pipeline, decided(stage, dtype))
        if declared is None or declared.library in ("python", "onnxruntime"):
            continue
        reasons = {"dtype": probed.reason if declared.dtype == dtype else "fixed by the stage"}
        reasons |= {"weight_layout": declared.reason} if declared.reason else {}
        values = {"dtype": declared.dtype, "weight_layout": declared.layout}
        found |= {
            f"stages.{stage.name}.{key}": f" -> {values[key]}  # {reasons[key]};" for key in wanted if key in reasons
        }
    return found


def _origin(config: OmniConfig, path: tuple[str, ...]) -> str:
    key = ".".join(path)
    stage_key = f"stages.{path[1]}.sampling.{path[2]}" if len(path) == 3 and path[0] == "sampling" else key
    return config.origins.get(stage_key, config.origins.get(key, "default"))


def differences(before: OmniConfig, after: OmniConfig) -> list[str]:
    """One line per value that is not the same in both: key, both values, both origins."""
    old, new = (dict(_flat(deploy_document(config), ())) for config in (before, after))
    lines = list[str]()
    for path in dict.fromkeys((*old, *new)):
        if path in old and path in new and old[path] == new[path]:
            continue
        left, right = (
            f"{rows[path]} ({_origin(config, path)})" if path in rows else "nothing"
            for rows, config in ((old, before), (new, after))
        )
        lines.append(f"{'.'.join(path)}: {left} -> {right}\n")
    return lines


def _flat(value: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        return [row for key, item in value.items() for row in _flat(item, (*path, str(key)))]
    return [(path, value)]

"""`omnistage config show`: the resolved configuration, with origins on request. `config diff`: what two differ in."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
import yaml

from omnistage.config.model import OmniConfig
from omnistage.config.resolve import resolve_config
from omnistage.entrypoints.cli.main import overrides_of


def run(arguments: argparse.Namespace) -> int:
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


def show_origins(config: OmniConfig) -> str:
    """One line per value: key, value, origin."""
    rows = _flat(deploy_document(config), ())
    return "".join(f"{'.'.join(path)} = {value}  # {_origin(config, path)}\n" for path, value in rows)


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

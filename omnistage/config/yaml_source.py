"""YAML deploy files as flat entries with the line each value stands on. No YAML tag builds an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from omnistage.errors import ConfigError

MAX_FILE_BYTES = 1 << 20


class Entry(msgspec.Struct, frozen=True):
    """One value of a layer: its path of keys, and where it was written ("deploy.yaml:7", "--set", ...)."""

    path: tuple[str, ...]
    value: Any
    origin: str

    @property
    def key(self) -> str:
        return ".".join(self.path)


def read_entries(file: Path, label: str | None = None) -> list[Entry]:
    """The values of a deploy file in order. Raises ConfigError naming file and line for what is not plain YAML."""
    name = label or file.name
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"deploy file {name}: {error.strerror}; give an existing file", param="deploy") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"deploy file {name} is larger than {MAX_FILE_BYTES} bytes", param="deploy")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        entries: list[Entry] = []
        if root is not None:
            _walk(root, (), name, entries)
    except yaml.YAMLError as error:
        raise ConfigError(f"deploy file {name}: {' '.join(str(error).split())}", param="deploy") from None
    return entries


def _walk(node: yaml.Node, path: tuple[str, ...], name: str, entries: list[Entry]) -> None:
    where = f"{name}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        if not path:
            raise ConfigError(f"{where}: the file must be a mapping of keys", param="deploy")
        entries.append(Entry(path, _plain(node), where))
        return
    if path and not node.value:
        entries.append(Entry(path, {}, where))
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = str(_plain(key_node))
        if key in seen:
            raise ConfigError(f"{name}:{key_node.start_mark.line + 1}: key {key!r} stands twice", param=key)
        seen.add(key)
        _walk(value_node, (*path, key), name, entries)


def _plain(node: yaml.Node) -> Any:
    return yaml.SafeLoader("").construct_object(node, deep=True)

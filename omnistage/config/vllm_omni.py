"""Reads a vLLM-Omni deploy file, of the shape with `stages` or the older one with `stage_args`, as one of ours.

Every value of the file is either carried over or listed with the reason why not. What we would refuse is listed too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from omnistage.config.model import PipelineConfig, Variant
from omnistage.config.registry import PIPELINES, load_pipeline
from omnistage.config.resolve import PLATFORMS, resolve_config
from omnistage.errors import ConfigError

_NO_EQUIVALENT = "no equivalent"
_STAGE_LISTS = ("stages", "stage_args")
_STRUCTURED = (*_STAGE_LISTS, "edges", "platforms")
_SAMPLING = "default_sampling_params"
_NESTS = {"engine_args", "engine_extras", "runtime", "parallel_config"}
_SHARED_MEMORY = "SharedMemoryConnector"
Path_ = tuple[str, ...]


class Imported(msgspec.Struct, frozen=True):
    """`document` is a deploy file of ours; `mapped` and `unmapped` hold every value of theirs by its dotted path: our
    keys that it became, and the reason why it became none."""

    document: dict[str, Any]
    mapped: dict[str, list[str]]
    unmapped: dict[str, str]


def import_deploy(file: Path, model: str | None = None) -> Imported:
    """`model` names the pipeline where the file does not. Raises ConfigError for what is no YAML mapping, and when no
    pipeline can be told."""
    try:
        content = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file.name}: {' '.join(str(error).split())}", param="file") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file.name}: the file must be a mapping of keys", param="file")
    name = model if model in PIPELINES else _pipeline_for(str(model or content.get("pipeline") or ""))
    return _Importer(content, load_pipeline(name)).run()


def _pipeline_for(theirs: str) -> str:
    """Ours of the longest name that theirs begins with: `x_moe` and `x_deploy` are `x`."""
    written = theirs.replace("-", "_")
    found = [name for name in PIPELINES if written.startswith(name.replace("-", "_"))]
    if not found:
        known = ", ".join(sorted(PIPELINES))
        raise ConfigError(f"no pipeline for {theirs!r}; give one with --model: {known}", param="model")
    return max(found, key=len)


@cache
def _keys() -> dict[str, Any]:
    told: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return told


def _leaves(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Values by path; an empty mapping and a list of plain values are values."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        pairs = enumerate(value)
    if path and not pairs:
        yield path, value
    for key, item in pairs:
        yield from _leaves(item, (*path, str(key)))


class _Importer:
    def __init__(self, content: dict[str, Any], pipeline: PipelineConfig) -> None:
        self._content = content
        self._pipeline = pipeline
        listed: list[Any] = next((content[key] for key in _STAGE_LISTS if isinstance(content.get(key), list)), [])
        graphs = sorted(pipeline.variants.items(), key=lambda pair: pair[0] != pipeline.default_variant)
        self._variant, graph = next((pair for pair in graphs if len(pair[1].stages) == len(listed)), graphs[0])
        self._graph: Variant = graph
        self._numbered = len(listed) <= len(graph.stages)
        ids = [str(dict(_leaves(entry)).get(("stage_id",), index)) for index, entry in enumerate(listed)]
        self._ids = {ids[index]: self._stage_name(entry, index) for index, entry in enumerate(listed)}
        self._document: dict[str, Any] = {"pipeline": pipeline.name, "variant": self._variant}
        self._mapped: dict[str, list[str]] = {}
        self._unmapped: dict[str, str] = {}

    def run(self) -> Imported:
        for path, value in _leaves(self._content):
            self._take(path, value)
        return Imported(self._document, self._mapped, self._unmapped)

    def _take(self, path: Path_, value: Any) -> None:
        where = ".".join(path)
        within = path[0] in _STRUCTURED or path[:2] == ("runtime", "edges") or len(path) == 1
        if within and path[-1] in _keys()["structure"]:
            self._mapped[where] = [path[-1]]
            return
        targets = list(self._targets(path, value)) if value != {} else []
        problem = self._problem(path, targets)
        if problem:
            self._unmapped[where] = problem
            return
        for key, ours in targets:
            self._put(key, ours)
        self._mapped[where] = [".".join(key) for key, _ in targets]

    def _problem(self, path: Path_, targets: list[tuple[Path_, Any]]) -> str:
        """Why a value cannot become what it should; "" when it can."""
        if not targets:
            reasons = _keys()["reasons"]
            return str(next((reasons[part] for part in reversed(path) if part in reasons), _NO_EQUIVALENT))
        return next((text for each in targets if (text := self._contradicted(*each) or self._refused(*each))), "")

    def _targets(self, path: Path_, value: Any) -> Iterator[tuple[Path_, Any]]:
        """What a value becomes: our keys and values; none without an equivalent."""
        match path:
            case ("async_chunk",):
                yield from (((*("edges", name), "async_chunk"), value) for name in self._graph.between)
            case ("edges", index, "max_inflight"):
                yield from self._edge(self._content["edges"], index, value)
            case ("runtime", "edges", index, "max_inflight"):
                yield from self._edge(self._content["runtime"]["edges"], index, value)
            case ("platforms", platform, "stages", index, *rest) if platform in PLATFORMS:
                for key, ours in self._of_stage(self._content["platforms"][platform]["stages"], index, rest, value):
                    yield ("platforms", platform, *key), ours
            case (("stages" | "stage_args") as key, index, *rest):
                yield from self._of_stage(self._content[key], index, rest, value)
            case ("connectors", *_, "codec_chunk_frames" | "initial_codec_chunk_frames"):
                option = _keys()["stage"][path[-1]]
                takers = [spec.name for spec in self._graph.stages if option in spec.options]
                yield from ((("stages", name, option), value) for name in takers)
            case ("connectors", *_, "name") | ("runtime", "connectors", *_, "name") if value == _SHARED_MEMORY:
                yield from ((("edges", name, "connector"), "shm") for name in self._graph.between)
            case (key,) if key in _keys()["stage"]:
                yield ("stage_defaults", _keys()["stage"][key]), _ours(_keys()["stage"][key], value)

    def _of_stage(self, listed: Any, index: str, rest: list[str], value: Any) -> Iterator[tuple[Path_, Any]]:
        name = self._stage_name(listed[int(index)], int(index)) if isinstance(listed, list) else None
        if name is None or not rest:
            return
        if rest[0] == _SAMPLING and len(rest) == 2:
            yield ("sampling", name, rest[1]), value
            return
        key = _keys()["stage"].get(rest[-1])
        if key and set(rest[:-1]) <= _NESTS and not (key == "device" and "," in str(value)):
            yield ("stages", name, key), _ours(key, value)

    def _stage_name(self, entry: Any, index: int) -> str | None:
        """By the name that the entry gives, else by its number, unless the file divides the model into more stages than
        we do: theirs of a number is another one then."""
        names = [spec.name for spec in self._graph.stages]
        told = {path[-1]: value for path, value in _leaves(entry)}
        if told.get("model_stage") in names:
            return str(told["model_stage"])
        number = told.get("stage_id", index)
        numbered = self._numbered and isinstance(number, int) and 0 <= number < len(names)
        return names[number] if numbered else None

    def _edge(self, listed: Any, index: str, value: Any) -> Iterator[tuple[Path_, Any]]:
        entry = listed[int(index)] if isinstance(listed, list) else {}
        name = "->".join(str(self._ids.get(str(entry.get(end)))) for end in ("from", "to"))
        if name in self._graph.between:
            yield ("edges", name, "max_inflight"), value

    def _refused(self, key: Path_, value: Any) -> str:
        """Why we would not take a value; "" if we would."""
        plain = key[2:] if key[0] == "platforms" else key
        nested: Any = value
        for part in reversed(plain):
            nested = {part: nested}
        try:
            resolve_config(self._pipeline.name, None, {"variant": self._variant} | nested)
        except ConfigError as error:
            return error.info.message.replace(" (override", " (value").partition(" (value")[0]
        return ""

    def _contradicted(self, key: Path_, value: Any) -> str:
        """Names the key if another value of the file has set it to something else."""
        held: Any = self._document
        for part in key:
            held = held.get(part, {}) if isinstance(held, dict) else {}
        return f"{'.'.join(key)} is {held!r} already" if held not in ({}, value) else ""

    def _put(self, key: Path_, value: Any) -> None:
        target = self._document
        for part in key[:-1]:
            target = target.setdefault(part, {})
        target[key[-1]] = value


def _ours(key: str, value: Any) -> Any:
    if key == "device":
        return f"cuda:{value}" if str(value).isdigit() else value
    named = _keys()["values"].get(key, {})
    return named.get(value, value) if isinstance(value, str | bool) else value

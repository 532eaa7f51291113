"""Resolves authoring layers into one `OmniConfig`, remembering where every value came from.

Layers, later ones win: schema defaults, the pipeline's own defaults, its built-in deploy file (with the platform's
overlay), the user's deploy file (likewise), overrides. Within one layer a value for one stage beats a value for all.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from omnistage.config.graph import check_capabilities, check_graph, check_placement
from omnistage.config.model import (
    EdgeConfig,
    LimitsConfig,
    MediaConfig,
    OmniConfig,
    OptionSpec,
    PipelineConfig,
    RecordConfig,
    StageConfig,
    StageSpec,
    TraceConfig,
    Variant,
)
from omnistage.config.model_ref import ModelRef, resolve_model
from omnistage.config.registry import load_pipeline
from omnistage.config.yaml_source import Entry, read_entries
from omnistage.errors import ConfigError, hint_for
from omnistage.sampling import SamplingParams
from omnistage.weights import default_cache_dir

STAGE_KEYS = {field.name: field.type for field in msgspec.structs.fields(StageConfig)}
EDGE_KEYS = {field.name: field.type for field in msgspec.structs.fields(EdgeConfig) if field.name != "name"}
# Sections whose keys are those of one struct.
_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "limits": LimitsConfig,
    "media": MediaConfig,
    "trace": TraceConfig,
    "record": RecordConfig,
}
SECTION_KEYS: dict[str, dict[str, Any]] = {
    name: {field.name: field.type for field in msgspec.structs.fields(struct)} for name, struct in _SECTIONS.items()
}
SAMPLING_KEYS = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
# Stage keys under other names in files, and keys that no file may set.
_ALIASES = {"with": "co_located_with"}
_NOT_SETTABLE = frozenset({"name", "kind", "options", "sampling", "co_located_with"})
SETTABLE_STAGE_KEYS = sorted((STAGE_KEYS.keys() - _NOT_SETTABLE) | set(_ALIASES))
TOP_KEYS = (
    "pipeline", "variant", "served_name", "cache_dir", "stages", "stage_defaults", "edges", "sampling",
    "limits", "media", "trace", "record", "platforms",
)  # fmt: skip
PLATFORMS = ("cpu", "cuda")


def resolve_config(
    model: str, deploy: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> OmniConfig:
    """One validated configuration for a model reference. Raises ConfigError with key, value, place and fix."""
    user = read_entries(Path(deploy)) if deploy is not None else []
    typed = _override_entries(overrides or {})
    named = _last(user + typed, "pipeline")
    reference = resolve_model(model, str(named.value) if named is not None else None, _cache_dir(user + typed))
    pipeline = load_pipeline(reference.pipeline)
    variant_name, variant_origin = _variant(pipeline, reference, user + typed)
    variant = pipeline.variants[variant_name]
    check_graph(pipeline.name, variant)
    built_in = built_in_entries(pipeline, variant_name)
    layers = [_with_platform(built_in), _with_platform(user), typed]
    return _Resolver(reference, pipeline, variant_name, variant).resolve(layers, {"variant": variant_origin})


def _cache_dir(entries: list[Entry]) -> Path:
    asked = _last(entries, "cache_dir")
    return Path(str(asked.value)).expanduser() if asked is not None else default_cache_dir()


def built_in_entries(pipeline: PipelineConfig, variant: str) -> list[Entry]:
    """The deploy file beside the pipeline's module, if it has one: `deploy.<variant>.yaml`, else `deploy.yaml`."""
    module = sys.modules[pipeline.plan.__module__]
    folder = Path(str(module.__file__)).parent
    for name in (f"deploy.{variant}.yaml", "deploy.yaml"):
        if (folder / name).exists():
            entries = read_entries(folder / name, f"built-in {name}")
            known = {stage.name for stage in pipeline.variants[variant].stages}
            return [e for e in entries if e.path[0] not in ("stages", "sampling") or e.path[1] in known]
    return []


def detect_platform() -> str:
    """`cuda` where an NVIDIA driver is loaded, else `cpu`; found without importing torch."""
    return "cuda" if os.path.exists("/dev/nvidiactl") else "cpu"


def _variant(pipeline: PipelineConfig, reference: ModelRef, entries: list[Entry]) -> tuple[str, str]:
    asked = _last(entries, "variant")
    if asked is None:
        if reference.path and pipeline.variant_for is not None:
            return pipeline.variant_for(reference.path), "checkpoint"
        return pipeline.default_variant, "pipeline"
    if asked.value not in pipeline.variants:
        raise ConfigError(_unknown("variant", str(asked.value), pipeline.variants, asked.origin), param="variant")
    return str(asked.value), asked.origin


def _last(entries: list[Entry], key: str) -> Entry | None:
    return next((entry for entry in reversed(entries) if entry.key == key), None)


def _with_platform(entries: list[Entry]) -> list[Entry]:
    """A file's own values, then those of its overlay for this platform."""
    platform = detect_platform()
    plain, overlay = [], []
    for entry in entries:
        if entry.path[0] != "platforms":
            plain.append(entry)
            continue
        if len(entry.path) < 2 or entry.path[1] not in PLATFORMS:
            name = entry.path[1] if len(entry.path) > 1 else str(entry.value)
            raise ConfigError(_unknown("platforms", name, PLATFORMS, entry.origin), param="platforms")
        if entry.path[1] == platform and len(entry.path) > 2:
            overlay.append(Entry(entry.path[2:], entry.value, f"{entry.origin} (platform {platform})"))
    return plain + overlay


def _override_entries(overrides: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[Entry]:
    """Overrides as entries: nested mappings, dotted keys ("stages.thinker.dtype"), bare stage keys for all stages."""
    entries: list[Entry] = []
    for key, value in overrides.items():
        full = (*path, *key.split("."))
        if isinstance(value, Mapping) and value:
            entries += _override_entries(value, full)
        elif len(full) == 1 and full[0] in SETTABLE_STAGE_KEYS:
            entries.append(Entry(("stage_defaults", full[0]), value, f"override {key}"))
        else:
            entries.append(Entry(full, value, f"override {'.'.join(full)}"))
    return entries


def _unknown(where: str, name: str, known: Iterable[str], origin: str) -> str:
    return f"{where}: unknown key or name {name!r}; {hint_for(name, known)} ({origin})"


class _Resolver:
    """Applies entries to the books of one variant; every `_set` is checked by the type of its field."""

    def __init__(self, reference: ModelRef, pipeline: PipelineConfig, variant_name: str, variant: Variant) -> None:
        self._reference = reference
        self._pipeline = pipeline
        self._variant_name = variant_name
        self._specs: dict[str, StageSpec] = {stage.name: stage for stage in variant.stages}
        self._stages: dict[str, dict[str, Any]] = {}
        self._edges: dict[str, dict[str, Any]] = {name: {} for name in variant.between}
        self._named = {"stages": self._stages, "edges": self._edges, "sampling": self._stages}
        self._sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
        self._top: dict[str, str] = {}
        self._origins: dict[str, str] = {}

    def resolve(self, layers: list[list[Entry]], origins: dict[str, str]) -> OmniConfig:
        for name, spec in self._specs.items():
            self._declare(name, spec)
        for layer in layers:
            for_all = [entry for entry in layer if entry.path[0] == "stage_defaults"]
            for entry in for_all + [entry for entry in layer if entry.path[0] != "stage_defaults"]:
                self._apply(entry)
        stages = {name: self._stage(name, values) for name, values in self._stages.items()}
        self._origins |= origins
        for name, stage in stages.items():
            check_capabilities(self._specs[name], stage, self._origins)
        check_placement(stages, self._origins)
        sections: dict[str, Any] = {name: struct(**self._sections[name]) for name, struct in _SECTIONS.items()}
        return OmniConfig(
            model=self._reference.reference,
            model_path=self._reference.path,
            pipeline=self._reference.pipeline,
            variant=self._variant_name,
            stages=stages,
            edges={name: EdgeConfig(name=name, **values) for name, values in self._edges.items()},
            **sections,
            served_name=self._top.get("served_name", self._reference.served_name),
            cache_dir=str(Path(self._top.get("cache_dir", default_cache_dir())).expanduser()),
            origins=self._with_defaults(),
        )

    def _declare(self, name: str, spec: StageSpec) -> None:
        values: dict[str, Any] = {"name": name, "kind": spec.kind, "objective": spec.objective} | spec.defaults
        values["options"] = {key: option.default for key, option in spec.options.items()}
        values["sampling"] = dict(spec.sampling)
        self._stages[name] = values
        for key in [*spec.defaults, "kind", "objective", *values["options"], *(f"sampling.{k}" for k in spec.sampling)]:
            self._origins[f"stages.{name}.{key}"] = "pipeline"

    def _stage(self, name: str, values: dict[str, Any]) -> StageConfig:
        try:
            return msgspec.convert(values, StageConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"stages.{name}: {error}", param=f"stages.{name}") from None

    def _with_defaults(self) -> dict[str, str]:
        origins: dict[str, str] = {}
        for name in self._stages:
            origins |= {f"stages.{name}.{key}": "default" for key in SETTABLE_STAGE_KEYS}
        for name in self._edges:
            origins |= {f"edges.{name}.{key}": "default" for key in EDGE_KEYS}
        origins |= {f"{section}.{key}": "default" for section, keys in SECTION_KEYS.items() for key in keys}
        return origins | self._origins

    # -- one entry

    def _apply(self, entry: Entry) -> None:
        section = entry.path[0]
        if section not in TOP_KEYS:
            raise ConfigError(_unknown("deploy", section, TOP_KEYS, entry.origin), param=section)
        if section in ("pipeline", "variant"):
            return
        if section in ("served_name", "cache_dir"):
            self._top[section] = str(entry.value)
            self._origins[section] = entry.origin
            return
        named = self._named.get(section)
        if named is not None and len(entry.path) > 1 and entry.path[1] not in named:
            raise ConfigError(_unknown(section, entry.path[1], named, entry.origin), param=f"{section}.{entry.path[1]}")
        if len(entry.path) < (2 if named is None else 3):
            if entry.value in ({}, None):
                return
            raise ConfigError(
                f"{entry.key}: {entry.value!r} is not a mapping of keys ({entry.origin})", param=entry.key
            )
        self._apply_in(section, entry)

    def _apply_in(self, section: str, entry: Entry) -> None:
        if section == "stage_defaults":
            for name in self._stages:
                self._set_stage(name, entry.path[1], entry)
        elif section == "stages":
            self._set_stage(entry.path[1], entry.path[2], entry)
        elif section == "edges":
            self._set(self._edges[entry.path[1]], entry.path[2], EDGE_KEYS, entry)
        elif section == "sampling":
            self._set_sampling(entry)
        else:
            self._set(self._sections[section], entry.path[1], SECTION_KEYS[section], entry)

    def _set_sampling(self, entry: Entry) -> None:
        stage = entry.path[1]
        if self._specs[stage].kind != "ar":
            raise ConfigError(
                f"{entry.key}: stage {stage} ({self._specs[stage].kind}) does not sample ({entry.origin})",
                param=entry.key,
            )
        self._set(self._stages[stage]["sampling"], entry.path[2], SAMPLING_KEYS, entry)
        self._origins[f"stages.{stage}.sampling.{entry.path[2]}"] = entry.origin

    def _set_stage(self, stage: str, key: str, entry: Entry) -> None:
        options = self._specs[stage].options
        if key in options:
            self._stages[stage]["options"][key] = _option_value(options[key], entry)
            self._origins[f"stages.{stage}.{key}"] = entry.origin
            return
        if key not in SETTABLE_STAGE_KEYS:
            raise ConfigError(
                _unknown(f"stages.{stage}", key, [*SETTABLE_STAGE_KEYS, *options], entry.origin), param=entry.key
            )
        self._set(self._stages[stage], _ALIASES.get(key, key), STAGE_KEYS, entry)
        self._origins[f"stages.{stage}.{key}"] = entry.origin
        by_pipeline = bool(self._stages[stage].get("co_located_with")) and f"stages.{stage}.with" not in self._origins
        if key == "placement" and entry.value == "process" and by_pipeline:
            self._leave_host(stage, entry)

    def _leave_host(self, stage: str, entry: Entry) -> None:
        """A process of its own undoes the co-location that only the pipeline has asked for."""
        self._stages[stage]["co_located_with"] = ""
        self._origins[f"stages.{stage}.with"] = entry.origin

    def _set(self, target: dict[str, Any], key: str, types: Mapping[str, Any], entry: Entry) -> None:
        if key not in types:
            raise ConfigError(_unknown(".".join(entry.path[:-1]), key, types, entry.origin), param=entry.key)
        value = 0 if key == "threads" and entry.value == "auto" else entry.value
        try:
            target[key] = msgspec.convert(value, types[key])
        except msgspec.ValidationError as error:
            raise ConfigError(_bad_value(entry, types[key], str(error)), param=entry.key) from None
        self._origins[entry.key] = entry.origin


def _bad_value(entry: Entry, expected: Any, error: str) -> str:
    info = msgspec.inspect.type_info(expected)
    if isinstance(info, msgspec.inspect.LiteralType):
        choices = [str(value) for value in info.values]
        near = difflib.get_close_matches(str(entry.value), choices, n=1, cutoff=0.5)
        error = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(choices)}"
    return f"{entry.key}: {entry.value!r} is not valid: {error} ({entry.origin})"


_OPTION_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}


def _option_value(option: OptionSpec, entry: Entry) -> int | float | bool | str:
    try:
        value: int | float | bool | str = msgspec.convert(entry.value, _OPTION_TYPES[option.type])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{entry.key}: {entry.value!r} is not valid: {error} ({entry.origin})") from None
    if option.choices and value not in option.choices:
        raise ConfigError(_unknown(entry.key, str(value), option.choices, entry.origin), param=entry.key)
    if isinstance(value, (str, bool)):
        return value
    low, high = option.minimum, option.maximum
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"{'' if low is None else low}..{'' if high is None else high}"
        raise ConfigError(f"{entry.key}: {value!r} is not within {bounds} ({entry.origin})", param=entry.key)
    return value

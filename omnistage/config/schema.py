"""The JSON schema of the deploy file, for editors; with a pipeline, also the names of its stages and their options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from omnistage.config.model import OptionSpec, PipelineConfig
from omnistage.config.resolve import (
    EDGE_KEYS,
    PLATFORMS,
    SAMPLING_KEYS,
    SECTION_KEYS,
    SETTABLE_STAGE_KEYS,
    STAGE_KEYS,
    TOP_KEYS,
)

Schema = dict[str, Any]
_OPTION_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string"}
_STAGE_TYPES = {key: STAGE_KEYS.get(key, str) for key in SETTABLE_STAGE_KEYS}


def meanings() -> dict[str, dict[str, str]]:
    """What every key means, by section."""
    told: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("meanings.yaml").read_text("utf-8"))
    return told


def deploy_schema(pipeline: PipelineConfig | None = None) -> Schema:
    """JSON schema (draft 2020-12) of a deploy file, of any variant of `pipeline` if one is given."""
    told = meanings()
    components: Schema = {}
    stage = _struct(_STAGE_TYPES, told["stages"], components)
    stage["properties"]["threads"] = {"anyOf": [{"const": "auto"}, stage["properties"]["threads"]]}
    edge = _struct(EDGE_KEYS, told["edges"], components)
    sampling = _struct(SAMPLING_KEYS, told["sampling"], components)
    top: Schema = {key: {"type": "string"} for key in ("pipeline", "variant", "served_name", "cache_dir")}
    top |= {name: _struct(keys, told[name], components) for name, keys in SECTION_KEYS.items()}
    top["stage_defaults"] = stage
    top |= _named(pipeline, stage, edge, sampling)
    top = {key: {"description": told["top"][key]} | top[key] for key in TOP_KEYS if key != "platforms"}
    overlays = {name: _object(top) for name in PLATFORMS}
    top["platforms"] = {"description": told["top"]["platforms"]} | _object(overlays)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "OmniStage deploy file"}
    return head | _object(top) | {"$defs": components}


def _named(pipeline: PipelineConfig | None, stage: Schema, edge: Schema, sampling: Schema) -> Schema:
    if pipeline is None:
        open_stage = {key: value for key, value in stage.items() if key != "additionalProperties"}
        each = {"stages": open_stage, "edges": edge, "sampling": sampling}
        return {name: {"type": "object", "additionalProperties": schema} for name, schema in each.items()}
    specs = [spec for variant in pipeline.variants.values() for spec in variant.stages]
    between = {name for variant in pipeline.variants.values() for name in variant.between}
    options: dict[str, Schema] = {}
    for spec in specs:
        options.setdefault(spec.name, {}).update({key: _option(option) for key, option in spec.options.items()})
    return {
        "variant": {"enum": sorted(pipeline.variants)},
        "stages": _object({name: _object(stage["properties"] | own) for name, own in options.items()}),
        "edges": _object(dict.fromkeys(sorted(between), edge)),
        "sampling": _object({spec.name: sampling for spec in specs if spec.kind == "ar"}),
    }


def _object(properties: Mapping[str, Any]) -> Schema:
    return {"type": ["object", "null"], "properties": dict(properties), "additionalProperties": False}


def _struct(types: Mapping[str, Any], told: Mapping[str, str], components: Schema) -> Schema:
    schemas, shared = msgspec.json.schema_components(list(types.values()), ref_template="#/$defs/{name}")
    components |= shared
    return _object({key: {"description": told[key]} | schema for key, schema in zip(types, schemas, strict=True)})


def _option(option: OptionSpec) -> Schema:
    bounds = {"minimum": option.minimum, "maximum": option.maximum, "enum": list(option.choices) or None}
    given = {key: value for key, value in bounds.items() if value is not None}
    return {"description": option.help, "type": _OPTION_TYPES[option.type], "default": option.default} | given

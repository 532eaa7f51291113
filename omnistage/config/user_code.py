"""References to the user's own code: `FILE.py`, `FILE.py:NAME` or `MODULE:NAME`, given as the model of a command."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from omnistage.errors import ConfigError

# What a pipeline's name in the configuration begins with when it is code: "py:/folder/file.py#NAME".
USER_CODE = "py:"
_REFERENCE = re.compile(r"(?P<where>[^:]+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(?=:))(:(?P<name>[A-Za-z_]\w*))?")


def user_code(reference: str) -> str | None:
    """The pipeline name for a reference to code, None for any other. Raises ConfigError when the file is missing."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        return None
    where, name = match["where"], match["name"] or ""
    file = Path(where).expanduser() if where.endswith(".py") else _file_of(where)
    if file is None or not file.is_file():
        raise ConfigError(f"model: {reference!r}: there is no file or module {where!r}", param="model")
    return f"{USER_CODE}{file.resolve()}#{name}"


def parts_of(code: str) -> tuple[Path, str]:
    """File and attribute ("" for the only pipeline or stage of the file)."""
    file, _, name = code.removeprefix(USER_CODE).rpartition("#")
    return Path(file), name


def name_of(code: str) -> str:
    """What clients call it: the file's name without its ending."""
    return parts_of(code)[0].stem


def _file_of(module: str) -> Path | None:
    here = Path(*module.split(".")).with_suffix(".py")
    if here.is_file():
        return here
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None

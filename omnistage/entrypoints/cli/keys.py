"""`omnistage keys`: makes an API key. The key goes to stdout once; the file keeps its SHA-256 only."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from omnistage.entrypoints.http.access import RIGHTS, new_key
from omnistage.errors import ConfigError, OmniError


def run(arguments: argparse.Namespace) -> int:
    """Appends a line to the key file and prints the key. Raises OmniError for bad scopes or a bad name."""
    scopes = arguments.scopes.split(",")
    unknown = [scope for scope in scopes if scope not in RIGHTS]
    if unknown:
        raise OmniError(f"--scopes: no scope {unknown[0]!r}; scopes are {', '.join(RIGHTS)}")
    if not arguments.name or any(c.isspace() or c == "#" for c in arguments.name):
        raise OmniError("--name: one word without #")
    key, digest = new_key()
    try:
        handle = os.open(Path(arguments.file), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{arguments.file}: cannot be written: {error.strerror}") from None
    with os.fdopen(handle, "a") as file:
        file.write(f"{digest} {','.join(scopes)} {arguments.name}\n")
    print(key)
    return 0

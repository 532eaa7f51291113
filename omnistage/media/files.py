"""`file://` media: only below one configured folder, and never through a link."""

from __future__ import annotations

import os
import stat
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from omnistage.media.errors import refused, too_large

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK the opening of a pipe would wait for its writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_file_url(url: str, root: str, max_bytes: int, param: str) -> bytes:
    """The bytes of `file://<root>/<path>`. Raises RequestError naming `param` for anything outside, links included."""
    try:
        inside = _inside(url, root, param)
        with open(_open_below(root, inside), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise refused("no such file below the media folder", param)
            if status.st_size > max_bytes:
                raise too_large(f"more than {max_bytes} bytes", param)
            return file.read(max_bytes)
    except (OSError, ValueError):  # ValueError: not a URL, or a name that no file can have
        raise refused("no such file below the media folder", param) from None


def _inside(url: str, root: str, param: str) -> tuple[str, ...]:
    """The components of the path below the folder."""
    parts = urlsplit(url)
    path = unquote(parts.path, errors="strict") if "%" in parts.path else parts.path
    if not root or parts.netloc not in ("", "localhost") or parts.query or parts.fragment or "\0" in path:
        raise refused("file URLs are not read by this server", param)
    below = path.removeprefix(root.rstrip("/") + "/")
    components = tuple(below.split("/"))
    if below == path or any(part in ("", ".", "..") for part in components):
        raise refused("no such file below the media folder", param)
    return components


def _open_below(root: str, components: tuple[str, ...]) -> int:
    """A descriptor of the file, every step of the way opened relative to the folder before it. Raises OSError."""
    folder = os.open(str(PurePosixPath(root)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in components[:-1]:
            below = os.open(name, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
        return os.open(components[-1], _FILE, dir_fd=folder)
    finally:
        os.close(folder)

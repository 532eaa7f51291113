"""`omnistage replay`: a record or a bundle once more. Exit status 0 when it is the same, 1 when it is not."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from omnistage.engine.record_files import ReadRecord
from omnistage.engine.replay import BundleReport, Replay, ReplayReport, replay_bundle
from omnistage.errors import ErrorInfo


def run(arguments: argparse.Namespace) -> int:
    """Raises RecordError for a folder that holds no record, or one that was changed."""
    record = ReadRecord(Path(arguments.record))
    if record.header.kind == "bundle":
        report = asyncio.run(replay_bundle(record))
        print("\n".join(bundle_lines(report)))
        return 0 if report.same else 1
    replayed = Replay(record).run()
    print("\n".join(replay_lines(replayed)))
    return 0 if replayed.same else 1


def replay_lines(report: ReplayReport) -> list[str]:
    lines = [f"other version: {line}" for line in report.other_versions]
    lines.append(f"{report.requests} requests, {report.steps} steps, {report.answers} answers of the same bytes")
    if report.difference is not None:
        return [*lines, f"first difference: {report.difference}"]
    if report.cut_off:
        lines.append(f"the record ends early (stopped or full) at: {', '.join(report.cut_off)}; the same up to there")
    if report.answers < report.requests:
        lines.append(f"the record ends before {report.requests - report.answers} of the requests did")
    return [*lines, f"schedule {report.schedule}, recorded {report.recorded_schedule}"]


def bundle_lines(report: BundleReport) -> list[str]:
    lines = [f"other version: {line}" for line in report.other_versions]
    if report.same:
        return [*lines, f"request {report.request} fails again: {_shown(report.recorded)}"]
    if report.replayed is None:
        return [*lines, f"request {report.request} does not fail alone; recorded: {_shown(report.recorded)}"]
    return [
        *lines,
        f"request {report.request} fails otherwise: {_shown(report.replayed)}; recorded: {_shown(report.recorded)}",
    ]


def _shown(error: ErrorInfo | None) -> str:
    return "no error" if error is None else f"{error.code} at {error.stage or 'the engine'}: {error.message}"

"""`omnistage bench`: load on a running server (`serve`) or on an engine of this process (`offline`), and `compare`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import httpx
import msgspec

from omnistage.entrypoints.bench.load import Ask, closed_loop, open_loop, prompts_of
from omnistage.entrypoints.bench.offline import OfflineTarget
from omnistage.entrypoints.bench.report import BenchResult, compare, summarise, table
from omnistage.entrypoints.bench.sample import METRICS
from omnistage.entrypoints.bench.target import Target
from omnistage.entrypoints.cli.main import overrides_of
from omnistage.entrypoints.omni import AsyncOmni
from omnistage.errors import RequestError


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 when a request failed. Raises RequestError for an argument or file that cannot be used."""
    if arguments.action == "compare":
        print(compare(read_result(arguments.before), read_result(arguments.after)))
        return 0
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise RequestError(f"--out {out}: not a file in a folder that exists", param="out")
    result = asyncio.run(measure(arguments) if arguments.action == "serve" else measure_offline(arguments))
    print(table(result))
    if out is not None:
        _write(out, result)
    return 1 if result.failed else 0


def _write(out: Path, result: BenchResult) -> None:
    try:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    except OSError as error:
        raise RequestError(f"--out {out}: cannot be written: {error.strerror}", param="out") from None


def read_result(path: str) -> BenchResult:
    """Raises RequestError for a file that is no result."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=BenchResult)
    except (OSError, msgspec.DecodeError) as error:
        raise RequestError(f"{path}: no result of bench serve: {type(error).__name__}") from None


async def measure(arguments: argparse.Namespace) -> BenchResult:
    """One run."""
    extra = _extra(arguments.extra_body)
    headers = {"authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    if arguments.stages:
        extra |= {"return_metrics": True}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=arguments.timeout, headers=headers, limits=limits, trust_env=False) as client:
        target = Target(client, arguments.url, arguments.model, arguments.task, extra)
        return await _load(target.ask, arguments, arguments.url)


async def measure_offline(arguments: argparse.Namespace) -> BenchResult:
    """One run on an engine of this process."""
    extra = _extra(arguments.extra_body)
    async with AsyncOmni(arguments.model, arguments.deploy, **overrides_of(arguments)) as omni:
        target = OfflineTarget(omni.engine, arguments.task, extra)
        return await _load(target.ask, arguments, arguments.model)


async def _load(ask: Ask, arguments: argparse.Namespace, where: str) -> BenchResult:
    objectives = dict(_objective(text) for text in arguments.slo)
    prompts = prompts_of(arguments.dataset, arguments.requests, arguments.words, arguments.seed)
    if arguments.rate is not None:
        samples, duration = await open_loop(ask, prompts, arguments.rate, arguments.seed)
    else:
        samples, duration = await closed_loop(ask, prompts, arguments.concurrency)
    result = summarise(samples, duration, arguments.percentiles, objectives)
    return msgspec.structs.replace(result, url=where, task=arguments.task)


def _objective(text: str) -> tuple[str, float]:
    """`ttft=0.2`: a metric and its bound in seconds (RTF: a ratio)."""
    name, _, bound = text.partition("=")
    try:
        value = float(bound)
    except ValueError:
        value = -1.0
    if name not in METRICS or not value > 0:
        raise RequestError(f"--slo {text}: write METRIC=SECONDS with one of {', '.join(METRICS)}", param="slo")
    return name, value


def _extra(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError:
        raise RequestError(f"--extra-body {text}: write a JSON object", param="extra_body") from None

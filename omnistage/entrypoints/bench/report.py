"""Samples -> the result of a run, its table, and the comparison of two results."""

from __future__ import annotations

import msgspec
import numpy as np

from omnistage.entrypoints.bench.sample import METRICS, Sample
from omnistage.request import StageMetrics

UNITLESS = ("rtf",)


class Spread(msgspec.Struct, kw_only=True):
    """Seconds, or a ratio. `percentiles` maps "p50" and so on to values."""

    count: int
    mean: float
    std: float
    percentiles: dict[str, float]


class StageRow(msgspec.Struct, kw_only=True):
    """Means per request, in seconds and counts."""

    requests: int
    queue_s: float
    compute_s: float
    handoff_s: float
    steps: float
    output_tokens: float


class BenchResult(msgspec.Struct, kw_only=True):
    """`goodput` is requests per second that were valid and met every objective; None without objectives."""

    url: str
    task: str
    requests: int
    failed: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    tokens_per_s: float
    audio_s_per_s: float
    images_per_s: float = 0.0
    video_s_per_s: float = 0.0
    goodput: float | None
    objectives: dict[str, float]
    metrics: dict[str, Spread]
    stages: dict[str, StageRow]


def summarise(
    samples: list[Sample], duration_s: float, percentiles: list[float], objectives: dict[str, float]
) -> BenchResult:
    """The result of a run; `objectives` are upper bounds in the units of the metrics."""
    valid = [sample for sample in samples if not sample.error]
    errors: dict[str, int] = {}
    for sample in samples:
        if sample.error:
            errors[sample.error] = errors.get(sample.error, 0) + 1
    good = [sample for sample in valid if _meets(sample, objectives)]
    return BenchResult(
        url="",
        task="",
        requests=len(samples),
        failed=len(samples) - len(valid),
        errors=errors,
        duration_s=duration_s,
        requests_per_s=len(valid) / duration_s,
        tokens_per_s=sum(sample.tokens or 0 for sample in valid) / duration_s,
        audio_s_per_s=sum(length for sample in valid for _, length in sample.audio) / duration_s,
        images_per_s=sum(len(sample.images) for sample in valid) / duration_s,
        video_s_per_s=sum(sample.video_s for sample in valid) / duration_s,
        goodput=len(good) / duration_s if objectives else None,
        objectives=objectives,
        metrics=_spreads(valid, percentiles),
        stages=_stage_rows(valid),
    )


def _meets(sample: Sample, objectives: dict[str, float]) -> bool:
    """A metric that the request does not have misses its objective."""
    figures = sample.figures()
    return all(figures.get(name) and max(figures[name]) <= bound for name, bound in objectives.items())


def _spreads(samples: list[Sample], percentiles: list[float]) -> dict[str, Spread]:
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    for sample in samples:
        for name, figures in sample.figures().items():
            values[name] += figures
    return {name: _spread(found, percentiles) for name, found in values.items() if found}


def _spread(values: list[float], percentiles: list[float]) -> Spread:
    array = np.array(values)
    cuts = {f"p{cut:g}": float(np.percentile(array, cut)) for cut in percentiles}
    return Spread(count=len(values), mean=float(array.mean()), std=float(array.std()), percentiles=cuts)


def _stage_rows(samples: list[Sample]) -> dict[str, StageRow]:
    names = dict.fromkeys(name for sample in samples for name in sample.stages)
    return {name: _stage_row([s.stages[name] for s in samples if name in s.stages]) for name in names}


def _stage_row(rows: list[StageMetrics]) -> StageRow:
    count = len(rows)
    return StageRow(
        requests=count,
        queue_s=sum(row.queue_s for row in rows) / count,
        compute_s=sum(row.compute_s for row in rows) / count,
        handoff_s=sum(row.handoff_s for row in rows) / count,
        steps=sum(row.steps for row in rows) / count,
        output_tokens=sum(row.output_tokens for row in rows) / count,
    )


def table(result: BenchResult) -> str:
    """The result for a terminal; times in milliseconds."""
    lines = [
        f"{result.requests} requests, {result.failed} failed, {result.duration_s:.2f} s",
        f"{result.requests_per_s:.2f} requests/s, {result.tokens_per_s:.1f} tokens/s, "
        f"{result.audio_s_per_s:.2f} s of audio, {result.images_per_s:.2f} images, "
        f"{result.video_s_per_s:.2f} s of video per s",
    ]
    if result.goodput is not None:
        lines.append(f"goodput {result.goodput:.2f} requests/s under {_bounds(result.objectives)}")
    lines += [f"  {count} x {error}" for error, count in result.errors.items()]
    for name, spread in result.metrics.items():
        cuts = "  ".join(f"{cut} {_shown(name, value)}" for cut, value in spread.percentiles.items())
        lines.append(f"{name:9s} mean {_shown(name, spread.mean)}  {cuts}  (n={spread.count})")
    lines += [_stage_line(name, row) for name, row in result.stages.items()]
    return "\n".join(lines)


def _stage_line(name: str, row: StageRow) -> str:
    times = (
        f"queue {row.queue_s * 1000:.1f}  compute {row.compute_s * 1000:.1f}  hand-off {row.handoff_s * 1000:.1f} ms"
    )
    return f"stage {name}: {times}, {row.steps:.1f} steps, {row.output_tokens:.1f} tokens (n={row.requests})"


def _bounds(objectives: dict[str, float]) -> str:
    return ", ".join(f"{name} <= {_shown(name, bound)}" for name, bound in objectives.items())


def _shown(name: str, value: float) -> str:
    return f"{value:.3f}" if name in UNITLESS else f"{value * 1000:.1f} ms"


def compare(before: BenchResult, after: BenchResult) -> str:
    """Rates, then percentile by percentile: earlier, later, change in percent."""
    lines = [f"{'task':15s} {before.task} -> {after.task}"] if before.task != after.task else []
    lines.append(f"{'failed':15s} {before.failed} of {before.requests} -> {after.failed} of {after.requests}")
    pairs = [(name, old, new) for (name, old), new in zip(_rates(before).items(), _rates(after).values(), strict=True)]
    lines += [f"{name:15s} {old:.2f} -> {new:.2f}{_change(old, new)}" for name, old, new in pairs if old or new]
    for name in (name for name in before.metrics if name in after.metrics):
        old, new = before.metrics[name].percentiles, after.metrics[name].percentiles
        for cut in (cut for cut in old if cut in new):
            change = _change(old[cut], new[cut])
            lines.append(f"{name + ' ' + cut:15s} {_shown(name, old[cut])} -> {_shown(name, new[cut])}{change}")
    return "\n".join(lines)


def _rates(result: BenchResult) -> dict[str, float]:
    return {
        "requests/s": result.requests_per_s,
        "goodput": result.goodput or 0.0,
        "tokens/s": result.tokens_per_s,
        "audio s/s": result.audio_s_per_s,
        "images/s": result.images_per_s,
        "video s/s": result.video_s_per_s,
    }


def _change(old: float, new: float) -> str:
    return f" ({(new / old - 1) * 100:+.1f} %)" if old else ""

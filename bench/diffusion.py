"""Cosmos3 and MiniMax-H3 on the diffusion engine against their library pipelines, on small random checkpoints.

    python -m bench.diffusion [--family cosmos3|minimax_h3]

One request end to end (tensors out); what the reasoner's kept K/V saves over steps; 8 and 16 mixed requests against the
pipeline one by one, our own one by one and batching of equal shapes only; the share of the time that the measured cost
curve calls for; media seconds per second; latency of action-policy requests; peak memory per request.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil
import torch
from diffusers.utils import logging

from bench.diffusion_families import Ask, Cosmos, MiniMaxH3
from bench.report import machine, table
from omnistage.stages.diffusion.cost import CostCurve
from tests.models.cosmos3.test_stage import Bench

Row = tuple[str, str, str, str]
PAIRS = 5
CONTROL_LOOPS = 60


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def one_request(family: Cosmos | MiniMaxH3, steps: int) -> Row:
    ask = family.ask(family.one, steps)
    family.ours.run([ask])
    pairs = [(seconds(lambda: family.ours.run([ask])), seconds(family.library(ask))) for _ in range(PAIRS)]
    return (
        f"one request, {steps} steps",
        f"{median(p[0] for p in pairs) * 1e3:.0f} ms",
        f"{median(p[0] / p[1] for p in pairs):.2f} of the pipeline's time",
        "",
    )


def mixed(family: Cosmos | MiniMaxH3, count: int, pairs: int) -> Row:
    jobs = family.mix(count)
    family.ours.run(jobs)
    runs = [
        (
            seconds(lambda: family.ours.run(jobs)),
            seconds(lambda: family.ours.run(jobs, together=False)),
            sum(seconds(family.library(job)) for job in jobs),
            seconds(lambda: [family.ours.run(group) for group in equal_shapes(jobs)]),
        )
        for _ in range(pairs)
    ]
    return (
        f"{count} mixed requests",
        f"{count / median(run[0] for run in runs):.2f} requests/s",
        f"{median(r[2] / r[0] for r in runs):.2f}x of the pipeline one by one",
        f"{median(r[1] / r[0] for r in runs):.2f}x of ours one by one, "
        f"{median(r[3] / r[0] for r in runs):.2f}x of equal shapes together",
    )


def equal_shapes(jobs: list[Ask]) -> list[list[Ask]]:
    """Requests of equal mode, shape and steps: what a batch axis could take together."""

    def key(job: Ask) -> str:
        return str(sorted((k, str(v)) for k, v in job.items() if k not in ("seed",) and "latents" not in k))

    return [list(group) for _, group in groupby(sorted(jobs, key=key), key)]


class Timed:
    """Rows and seconds of each transformer call of a stage that is stepped by hand."""

    def __init__(self, folder: Path) -> None:
        self.bench = Bench(folder)
        self.calls: list[tuple[int, float]] = []
        self._started = 0.0
        transformer = self.bench.model._parts.denoiser.transformer  # type: ignore[attr-defined]
        transformer.register_forward_pre_hook(self._start)
        transformer.register_forward_hook(self._end, with_kwargs=True)

    def _start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def _end(self, _module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        self.calls.append((kwargs["sequence_length"], time.perf_counter() - self._started))

    def run(self, asks: list[Ask]) -> float:
        """Seconds from the first to the last."""
        self.calls.clear()
        for index, ask in enumerate(asks):
            self.bench.add(f"r{index}", ask)
        return seconds(self.bench.run)


def share_of_ideal(family: Cosmos, count: int) -> Row:
    """The curve is measured on 1 to 16 copies of one request; every call of the mix is held against it."""
    timed = Timed(family.folder)
    points = []
    for copies in (1, 2, 4, 8, 16):
        timed.run([family.ask("video", 10) for _ in range(copies)])
        most = max(rows for rows, _ in timed.calls)
        points.append((most, median(took for rows, took in timed.calls if rows == most)))
    curve = CostCurve(tuple(points))
    jobs = family.mix(count)
    timed.run(jobs)
    walls = []
    for _ in range(PAIRS):
        wall = timed.run(jobs)
        ideal = sum(curve.seconds(rows) for rows, _ in timed.calls)
        walls.append((ideal / sum(took for _, took in timed.calls), ideal / wall))
    timed.bench.engine.close()
    return (
        f"{count} mixed requests, share of the cost curve's ideal",
        f"{median(w[0] for w in walls) * 100:.0f} % of transformer calls",
        f"{median(w[1] for w in walls) * 100:.0f} % of the whole",
        "the rest: encoding of media conditions before, decoding after the steps",
    )


def media(family: Cosmos | MiniMaxH3, name: str, steps: int) -> Row:
    ask = family.ask(name, steps)
    results = family.ours.run([ask])
    took = median(seconds(lambda: family.ours.run([ask])) for _ in range(3))
    media_s = len(results[0].tensors["video"]) / 24.0
    return (f"video with sound, {steps} steps", f"RTF {took / media_s:.2f}", f"{media_s / took:.2f} media s per s", "")


def control_loop(family: Cosmos) -> Row:
    ask = family.ask("policy", 4)
    family.ours.run([ask])
    loops = [seconds(lambda: family.ours.run([ask])) * 1e3 for _ in range(CONTROL_LOOPS)]
    cuts = quantiles(loops, n=100, method="inclusive")
    return ("action policy, 4 steps", f"p50 {cuts[49]:.0f} ms", f"p99 {cuts[98]:.0f} ms", f"{CONTROL_LOOPS} loops")


def memory(family: Cosmos | MiniMaxH3, count: int) -> Row:
    """Growth of the resident set while requests run together, sampled every few milliseconds."""
    process, stop = psutil.Process(), threading.Event()
    jobs = family.mix(count)
    family.ours.run(jobs[:1])
    gc.collect()
    before = process.memory_info().rss
    seen = [before]

    def watch() -> None:
        while not stop.wait(0.003):
            seen.append(process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    family.ours.run(jobs)
    stop.set()
    watcher.join()
    return (f"peak memory per request, {count} together", f"{(max(seen) - before) / count / 2**20:.1f} MB", "", "")


def cosmos(folder: Path) -> list[Row]:
    family = Cosmos(folder)
    rows = [memory(family, 16)]  # first: memory once taken is kept by the allocator
    rows += [one_request(family, steps) for steps in (4, 12, 36)]
    rows += [mixed(family, count, 2) for count in (8, 16)]
    rows += [share_of_ideal(family, count) for count in (8, 16)]
    rows += [media(family, "sound", 8), control_loop(family)]
    family.ours.stop()
    return rows


def minimax_h3(folder: Path) -> list[Row]:
    family = MiniMaxH3(folder)
    rows = [memory(family, 8)]
    rows += [one_request(family, steps) for steps in (3, 8)]
    rows += [mixed(family, count, 2) for count in (8, 16)]
    rows.append(media(family, "text", 8))
    family.ours.stop()
    return rows


FAMILIES: dict[str, Callable[[Path], list[Row]]] = {"cosmos3": cosmos, "minimax_h3": minimax_h3}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=sorted(FAMILIES), help="default: both")
    chosen = parser.parse_args().family
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(machine() + ", 1 thread\n")
    for name, figures in FAMILIES.items():
        if chosen in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                print(table((f"{name}, small random weights", "figure", "against", ""), figures(Path(folder))), "\n")


if __name__ == "__main__":
    main()

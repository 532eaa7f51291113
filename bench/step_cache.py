"""Step caches on tiny-shapes: CPU time against accuracy, Frechet distance and PSNR, as a table and a plot.

python -m bench.step_cache [--pictures 64] [--plot out/step_cache.svg]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from bench.report import machine, table
from omnistage.models.tiny_shapes.judge import load_judge
from omnistage.models.tiny_shapes.network import Painter, load_weights
from omnistage.models.tiny_shapes.quality import Quality, asked_attributes, draw_pictures, measure
from omnistage.models.tiny_shapes.stage import WEIGHTS

STEPS = 32
CACHES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "fixed_budget 16": {"kind": "fixed_budget", "runs": 16},
    "fixed_budget 8": {"kind": "fixed_budget", "runs": 8},
    "fixed_budget 5": {"kind": "fixed_budget", "runs": 5},
    "relative_change 0.1": {"kind": "relative_change", "threshold": 0.1},
    "relative_change 0.2": {"kind": "relative_change", "threshold": 0.2},
    "relative_change 0.4": {"kind": "relative_change", "threshold": 0.4},
    "relative_change 0.8": {"kind": "relative_change", "threshold": 0.8},
}


@torch.inference_mode()
def measured(count: int) -> dict[str, Quality]:
    painter = Painter().eval()
    load_weights(painter, WEIGHTS)
    judge = load_judge()
    plain, _, _ = draw_pictures(painter, asked_attributes(count), num_inference_steps=STEPS)
    results = {}
    for name, cache in CACHES.items():
        params: dict[str, Any] = {"num_inference_steps": STEPS} | ({"step_cache": cache} if cache else {})
        results[name] = measure(painter, judge, count, None if cache is None else plain, **params)
    return results


def plot(results: dict[str, Quality], base: Quality) -> str:
    """An SVG of PSNR over speed-up; the figure beside each point is its accuracy."""
    points = [
        (n, base.cpu_s / q.cpu_s, q.psnr_db, q.all_attributes) for n, q in results.items() if q.psnr_db is not None
    ]
    fastest = max(speed for _, speed, _, _ in points) * 1.1
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 400" font-family="sans-serif" font-size="11">',
        '<rect width="640" height="400" fill="white"/><path d="M60 20V350H620" fill="none" stroke="black"/>',
        '<text x="300" y="385">speed-up (CPU time)</text><text x="12" y="14">PSNR to the uncached picture, dB</text>',
    ]
    for mark in range(10, 61, 10):
        y = 350 - mark * 5.5
        parts.append(f'<text x="36" y="{y + 4:.0f}">{mark}</text><path d="M60 {y:.0f}H620" stroke="#ddd"/>')
    for mark in range(1, int(fastest) + 1):
        parts.append(f'<text x="{60 + 560 * mark / fastest:.0f}" y="366">{mark}x</text>')
    for name, speed, decibels, right in points:
        x, y = 60 + 560 * speed / fastest, 350 - min(60.0, decibels or 0.0) * 5.5
        colour = "#36c" if name.startswith("fixed") else "#c53"
        label = f"{name} ({right:.2f})"
        parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x - 6:.0f}" y="{y - 8:.0f}" text-anchor="end">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", type=int, default=64)
    parser.add_argument("--plot", type=Path, default=Path("out/step_cache.svg"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = measured(arguments.pictures)
    base = results["none"]
    rows = [
        (
            name,
            f"{base.cpu_s / q.cpu_s:.2f}x",
            f"{q.skipped_steps:.1f} of {STEPS}",
            f"{q.all_attributes:.3f}",
            f"{q.frechet:.0f}",
            "-" if q.psnr_db is None else f"{q.psnr_db:.1f}",
        )
        for name, q in results.items()
    ]
    print(f"{machine()}, 1 thread, {arguments.pictures} pictures\n")
    print(table(("step cache", "speed-up", "steps skipped", "all attributes right", "Frechet", "PSNR dB"), rows))
    arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    arguments.plot.write_text(plot(results, base))
    print(f"\nplot: {arguments.plot}")


if __name__ == "__main__":
    main()

"""Which floating-point type a stage computes in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Batch sizes at which bfloat16 has to win, and the side of the probed square weight (elements).
_PROBE_ROWS = (1, 8)
_PROBE_SIDE = 1024
_REQUIRED_GAIN = 1.5


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The type and, in words, why."""

    dtype: torch.dtype
    reason: str


def choose_dtype(
    requested: DtypeName, device: torch.device, measure: Callable[[torch.dtype, int], float] | None = None
) -> DtypeChoice:
    """The type to use on `device`; "auto" is bfloat16 on accelerators and, on a CPU, float32 unless a probe says
    otherwise.

    The probe multiplies rows by a square weight: bfloat16 has to be 1.5 times faster at one row and at eight rows: CPUs
    with units for it are far above, others near 1, and blocked float32 weights gain as much as 1.5 (`ops.blocked`).
    `measure(dtype, rows)` gives seconds and is `matmul_seconds` by default.
    """
    if requested != "auto":
        return DtypeChoice(DTYPES[requested], "requested")
    if device.type != "cpu":
        return DtypeChoice(torch.bfloat16, f"default of {device.type}")
    seconds = measure or matmul_seconds
    gains = [seconds(torch.float32, rows) / seconds(torch.bfloat16, rows) for rows in _PROBE_ROWS]
    told = ", ".join(f"{gain:.2f}x at {rows}" for gain, rows in zip(gains, _PROBE_ROWS, strict=True))
    dtype = torch.bfloat16 if min(gains) >= _REQUIRED_GAIN else torch.float32
    return DtypeChoice(dtype, f"probe: bfloat16 against float32 {told} rows")


def matmul_seconds(dtype: torch.dtype, rows: int) -> float:
    """The fastest of five products [rows, 1024] x [1024, 1024] on the CPU, in seconds."""
    left = torch.ones(rows, _PROBE_SIDE, dtype=dtype)
    right = torch.ones(_PROBE_SIDE, _PROBE_SIDE, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        torch.nn.functional.linear(left, right)
        best = min(best, time.perf_counter() - started)
    return best

"""What every bench prints besides its figures: medians, ratios, the machine and its load."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from statistics import median


def machine() -> str:
    """One line: cores, architecture, load average, Python."""
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores {platform.machine()}, load {load}, python {platform.python_version()}"


def spread(values: Sequence[float], unit: str = "", digits: int = 3) -> str:
    """Median with minimum and maximum."""
    low, middle, high = min(values), median(values), max(values)
    return f"{middle:.{digits}f}{unit} ({low:.{digits}f}..{high:.{digits}f})"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)

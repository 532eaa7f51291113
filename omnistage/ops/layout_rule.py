"""Which layout weights get where none is asked for. Torch-free, so that a plan can tell."""

from __future__ import annotations

import os
from typing import Literal

LayoutName = Literal["auto", "plain", "blocked", "both"]

# Weights of at most this share of the machine's memory are held twice.
SMALL_SHARE = 1 / 16


def automatic_layout(weight_bytes: int, memory_bytes: int | None = None) -> LayoutName:
    """For float32 weights on a CPU: both while they take at most a sixteenth of the machine's memory, else blocked."""
    total = physical_memory() if memory_bytes is None else memory_bytes
    return "both" if weight_bytes <= total * SMALL_SHARE else "blocked"


def physical_memory() -> int:
    """Of the machine, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

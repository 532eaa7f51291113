"""How many threads the torch calls of a thread take. Torch-free."""

from __future__ import annotations

import sys


def use_threads(count: int) -> None:
    """Threads of the torch calls that this thread makes from now on; nothing where torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is not None:
        vars(torch)["set_num_threads"](count)

"""How many threads a stage gets, and the environment that its process starts with. Torch-free."""

from __future__ import annotations

import sys


def thread_count(requested: int, *, cores: int, stages: int) -> int:
    """Threads of one stage: `requested`, or an equal share of the cores (at least 1) when it is 0.

    Raises ValueError for negative counts and for a machine without cores or stages.
    """
    if requested < 0 or cores < 1 or stages < 1:
        raise ValueError(f"thread_count needs requested >= 0, cores >= 1, stages >= 1: {requested}, {cores}, {stages}")
    return requested or max(1, cores // stages)


def openmp_environment(threads: int) -> dict[str, str]:
    """Variables to set before a stage process imports torch.

    The passive wait policy makes an idle OpenMP thread sleep: stages that share cores otherwise spin against each
    other.
    """
    count = str(threads)
    return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "OMP_WAIT_POLICY": "PASSIVE"}


def use_threads(count: int) -> None:
    """Threads of the torch calls that this thread makes from now on; nothing where torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is not None:
        vars(torch)["set_num_threads"](count)

"""`omnistage doctor`: what a bug report needs, and whether this machine can run the server."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys

import psutil

from omnistage.config.resolve import detect_platform
from omnistage.connectors.arena import create_arena_file
from omnistage.errors import OmniError

PACKAGES = ("omnistage", "torch", "transformers", "diffusers", "numpy", "msgspec", "av", "uvicorn", "starlette")
ARENA_TRIAL_BYTES = 64 << 20
NEEDED_GIB = 2.0


def run(arguments: argparse.Namespace) -> int:
    """Prints one line per finding; exit status 1 when something needed is missing."""
    memory = psutil.virtual_memory()
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"cores {os.cpu_count()}, memory {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free")
    print(f"platform {detect_platform()}")
    problems = [*_packages(), *_shared_memory(), *_memory(memory.available / 2**30)]
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    print("ready to serve" if not problems else f"{len(problems)} problem(s)")
    return 1 if problems else 0


def _packages() -> list[str]:
    problems = []
    for name in PACKAGES:
        try:
            print(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"package {name} is not installed; run `make` or pip install it")
    return problems


def _shared_memory() -> list[str]:
    try:
        os.close(create_arena_file(ARENA_TRIAL_BYTES))
    except OmniError as error:
        return [error.info.message]
    print("shared memory: ok")
    return []


def _memory(free_gib: float) -> list[str]:
    return [f"{free_gib:.1f} GiB of memory free; smol-speech needs {NEEDED_GIB}"] if free_gib < NEEDED_GIB else []

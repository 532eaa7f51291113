"""Faults at named protocol points, for tests: plain data in the stage's configuration, a null object otherwise."""

from __future__ import annotations

import os
import signal
import time
from typing import Literal, get_args

import msgspec

Action = Literal["raise", "stall", "drop", "duplicate", "kill"]

Point = Literal[
    "engine_built",
    "message_received",
    "before_abort",
    "after_abort",
    "before_release",
    "before_add",
    "after_add",
    "chunk_received",
    "before_feed",
    "after_feed",
    "before_step",
    "after_step",
    "before_store",
    "after_store",
    "before_send",
    "after_send",
    "before_finish",
    "after_finish",
    "probe_received",
    "shutdown_received",
    "going_idle",
    "before_load",
    "after_load",
    "credit_lost",
    "credit_back",
    "first_stored",
    "last_stored",
    "mid_send",
    "before_prefill",
    "after_prefill",
    "before_decode",
    "after_decode",
    "before_run",
    "after_run",
    "before_encode",
    "before_denoise",
    "after_denoise",
    "before_picture",
    "after_picture",
]
POINTS: tuple[Point, ...] = get_args(Point)


class FaultSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`action` at the `after`-th hit (counted from 0) of `point`, `times` times; `request` narrows to one request id.

    `always` keeps the fault in replicas that were restarted; else it is in the first of a replica only.
    `stall_s` is how long "stall" sleeps, once. "raise" raises `InjectedFault`; "drop" and "duplicate" act on chunks.
    """

    point: Point
    action: Action
    after: int = 0
    times: int = 1
    request: str = ""
    stall_s: float = 0.0
    always: bool = False


class InjectedFault(RuntimeError):
    """Raised by a "raise" fault."""


class Faults:
    """Counts hits and acts. Without specs every call returns at once."""

    def __init__(self, specs: tuple[FaultSpec, ...] = ()) -> None:
        self._specs = specs
        self._hits = [0] * len(specs)

    def watches(self, point: Point) -> bool:
        """True when a fault waits at that point."""
        return any(spec.point == point for spec in self._specs)

    def hit(self, point: Point, request_id: str = "") -> Action | None:
        """Acts, or returns "drop" / "duplicate" for the caller to act on."""
        for index, spec in enumerate(self._specs):
            if spec.point != point or (spec.request and spec.request != request_id):
                continue
            self._hits[index] += 1
            if spec.after < self._hits[index] <= spec.after + spec.times:
                return _act(spec)
        return None


def _act(spec: FaultSpec) -> Action | None:
    if spec.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if spec.action == "raise":
        raise InjectedFault(f"injected at {spec.point}")
    if spec.action == "stall":
        time.sleep(spec.stall_s)
        return None
    return spec.action

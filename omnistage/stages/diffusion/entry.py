"""The diffusion engine's books of one request."""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar

from omnistage.stages.base import StageRequest
from omnistage.stages.diffusion.model import PARTIAL_PORT, PROGRESS_PORT

S = TypeVar("S")


class Phase(Enum):
    """What a request does next."""

    ENCODE = "encode"
    PREPARE = "prepare"
    DENOISE = "denoise"
    DECODE = "decode"


class Entry(Generic[S]):
    """One request: model state, phase, times in seconds. `open_ports`: ports of the engine's own that it must close.

    `using` counts the calls on the decode thread that hold the state; `closed` is set once the request is dropped.
    """

    __slots__ = (
        "alone", "chunks_out", "closed", "held", "id", "open_ports", "phase", "queue_s", "ready_at", "request",
        "seconds", "state", "steps", "steps_done", "ticks_at_start", "using",
    )  # fmt: skip

    def __init__(self, request: StageRequest, state: S, *, ticks: float) -> None:
        self.request = request
        self.id = request.request_id
        self.state = state
        self.phase = Phase.ENCODE
        self.held = False
        self.alone = False
        self.closed = False
        self.using = 0
        self.ready_at: float | None = None
        self.queue_s = 0.0
        self.seconds = dict.fromkeys(("encode_s", "prepare_s", "denoise_s", "decode_s"), 0.0)
        self.steps = 0
        self.steps_done = 0
        self.chunks_out = 0
        self.ticks_at_start = ticks
        self.open_ports = {PROGRESS_PORT, PARTIAL_PORT}.intersection(request.outputs)

"""The diffusion engine's books of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from omnistage.stages.base import StageRequest
from omnistage.stages.diffusion.model import PARTIAL_PORT, PROGRESS_PORT

S = TypeVar("S")

_PHASES = ("encode_s", "prepare_s", "denoise_s", "decode_s")


class Phase(Enum):
    """What a request does next."""

    ENCODE = "encode"
    PREPARE = "prepare"
    DENOISE = "denoise"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Entry(Generic[S]):
    """One request: model state, phase, times in seconds. `open_ports`: ports of the engine's own that it must close.

    `using` counts the calls on the decode thread that hold the state; `closed` is set once the request is dropped.
    `ticks_at_start` counts the engine's calls before it came.
    """

    request: StageRequest
    state: S
    ticks_at_start: float
    id: str = field(init=False)
    open_ports: set[str] = field(init=False)
    phase: Phase = Phase.ENCODE
    held: bool = False
    alone: bool = False
    closed: bool = False
    using: int = 0
    ready_at: float | None = None
    queue_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PHASES, 0.0))
    steps: int = 0
    steps_done: int = 0
    chunks_out: int = 0

    def __post_init__(self) -> None:
        self.id = self.request.request_id
        self.open_ports = {PROGRESS_PORT, PARTIAL_PORT}.intersection(self.request.outputs)

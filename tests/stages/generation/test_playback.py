"""Streams of sound are served by when they run dry: no underrun up to 95 % of capacity, where turns in order fail."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest

from omnistage.config.model import StageConfig
from omnistage.payload import MultimodalPayload
from omnistage.request import StageMetrics, StageRequest
from omnistage.stages.base import InputChunk
from omnistage.stages.generation.engine import GenerationEngine
from omnistage.stages.generation.model import Produced

RATE = 100
STEP_S = 0.01
LENGTH_S = 60.0
ARRIVAL_S = 0.05
SHORT_S, LONG_S = 0.2, 2.0


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Stream:
    chunk_s: float
    left_s: float = LENGTH_S


class Speaker:
    """A step costs `STEP_S` of the clock and gives one chunk of each stream's own length."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def open(self, request: StageRequest) -> Stream:
        return Stream(float(request.params["chunk_s"]))

    def feed(self, state: Stream, chunk: InputChunk) -> None:
        chunk.payload.release()

    def pending(self, state: Stream) -> int:
        return int(state.left_s > 0)

    def run(self, states: list[Stream]) -> list[list[Produced]]:
        self._clock.now += STEP_S * len(states)
        return [[self._chunk(state)] for state in states]

    def _chunk(self, state: Stream) -> Produced:
        state.left_s = round(state.left_s - state.chunk_s, 6)
        audio = np.zeros((1, round(state.chunk_s * RATE)), np.float32)
        payload = MultimodalPayload.of({"sample_rate": RATE}, audio=audio)
        return Produced(port="audio", payload=payload, final=state.left_s <= 0)

    def done(self, state: Stream) -> bool:
        return state.left_s <= 0

    def metrics(self, state: Stream) -> StageMetrics:
        return StageMetrics()

    def close(self, state: Stream) -> None:
        """Holds nothing."""


def underruns(short: int, long: int, objective: str) -> int:
    """Times that a stream's listener heard silence: a packet came after all before it had been played."""
    clock = Clock()
    config = StageConfig(name="speaker", kind="generation", max_num_seqs=1, objective=objective)  # type: ignore[arg-type]
    engine = GenerationEngine(Speaker(clock), config, clock=clock)
    coming = [(clock.now + index * ARRIVAL_S, SHORT_S if index < short else LONG_S) for index in range(short + long)]
    played_until: dict[str, float] = defaultdict(lambda: float("inf"))
    dry = 0
    while coming or engine.has_work():
        if not engine.has_work():
            clock.now = max(clock.now, coming[0][0])
        while coming and coming[0][0] <= clock.now:
            chunk_s = coming.pop(0)[1]
            request = StageRequest(request_id=str(len(coming)), outputs=("audio",), params={"chunk_s": chunk_s})
            engine.add(request)
        for emission in engine.step().emissions:
            due = played_until[emission.request_id]
            dry += clock.now > due + 1e-9
            seconds = emission.payload["audio"].shape[-1] / RATE
            played_until[emission.request_id] = max(clock.now, due if due < float("inf") else clock.now) + seconds
    return dry


def load(short: int, long: int) -> float:
    """The share of all steps that streams of these numbers need to play without a stop."""
    return short * STEP_S / SHORT_S + long * STEP_S / LONG_S


@pytest.mark.parametrize(("short", "long"), [(5, 5), (8, 20), (14, 20), (16, 25), (18, 10)])
def test_no_stream_runs_dry_up_to_95_percent_of_capacity(short: int, long: int) -> None:
    assert load(short, long) <= 0.95 + 1e-9
    assert underruns(short, long, "ttfp") == 0


def test_turns_in_order_run_dry_at_half_of_it() -> None:
    assert load(8, 20) <= 0.5 + 1e-9
    assert underruns(8, 20, "throughput") > 50


def test_nothing_helps_beyond_capacity() -> None:
    assert load(22, 10) > 1.1
    assert underruns(22, 10, "ttfp") > 0

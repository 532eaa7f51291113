"""Streams of sound through a whole engine: served by when they run dry they play on, in turns some run dry."""

from __future__ import annotations

from typing import Any

import pytest

from bench.playback import LONG_S, SHORT_S, STEP_S, dry, play, settings, share
from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.stages.base import StepOutput
from omnistage.testing.virtual import Stages, run
from tests.engines import running

SHORT, LONG = 6, 10
SECONDS = 4.0


def wave_seconds(stage: str, output: StepOutput) -> float:
    return STEP_S if stage == "wave" and output.batch else 0.0


def dry_streams(objective: str) -> int:
    async def main() -> int:
        config = resolve_config("echo3", None, settings(objective, step_s=0.0))
        async with AsyncOmniEngine(config, Stages(wave_seconds)) as engine:
            return dry(await play(engine, SHORT, LONG, SECONDS, arrival_s=0.05))

    return run(main())


@pytest.mark.slow
def test_streams_served_by_when_they_run_dry_play_on_where_turns_in_order_let_some_run_dry() -> None:
    assert 0.75 < share(SHORT, LONG) < 1
    assert dry_streams("ttfp") == 0
    assert dry_streams("throughput") >= 3


@pytest.mark.slow
async def test_a_stage_process_serves_short_chunks_as_much_oftener_as_they_are_shorter() -> None:
    """The order of service, which no slow core changes: in turns, a stream of long chunks has all when one of short
    chunks has a fifth."""
    overrides: dict[str, Any] = settings("ttfp", STEP_S)
    async with running("echo3", overrides) as engine:
        streams = await play(engine, SHORT, LONG, SECONDS, arrival_s=0.0)
    first_end = min(packets[-1][0] for packets in streams[SHORT:])
    for packets in streams[:SHORT]:
        assert sum(came < first_end for came, _ in packets) > 0.5 * SECONDS / SHORT_S
    assert all(len(packets) >= SECONDS / LONG_S for packets in streams)

"""What the tests on virtual time prove, shown once on real processes; bounds are wide, the cores are shared."""

from __future__ import annotations

import pytest

from bench.overload import SLO_S, UNBOUNDED, measure
from bench.playback import dry_streams

pytestmark = pytest.mark.slow
CAPACITY = 18.0


async def test_ten_times_the_load_leaves_goodput_and_objectives_where_an_unbounded_queue_loses_both() -> None:
    fits = await measure(0.9 * CAPACITY, 6.0, {}, returning=0.0)
    over = await measure(10 * CAPACITY, 6.0, {}, returning=0.0)
    lost = await measure(4 * CAPACITY, 5.0, UNBOUNDED, returning=0.0)
    assert over.goodput(SLO_S, 2.0, 6.0) >= 0.8 * fits.goodput(SLO_S, 2.0, 6.0)
    assert over.kept(SLO_S) >= 0.95
    assert lost.kept(SLO_S) < 0.6
    assert sum(fate.refusals > 0 for fate in over.fates) > len(over.fates) / 2


async def test_streams_served_by_when_they_run_dry_play_on_where_turns_in_order_let_some_run_dry() -> None:
    runs: list[tuple[int, int]] = []
    for _ in range(3):  # busy cores let any stream run dry
        runs.append((await dry_streams("ttfp", 6, 10, 4.0), await dry_streams("throughput", 6, 10, 4.0)))
        if runs[-1][0] <= 1 and runs[-1][1] >= 3:
            return
    raise AssertionError(f"streams that ran dry, by deadline and in turns: {runs}")

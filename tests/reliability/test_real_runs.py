"""What the tests on virtual time prove, shown once on real processes; bounds are wide, the cores are shared."""

from __future__ import annotations

import pytest

from bench.overload import SLO_S, measure

pytestmark = pytest.mark.slow
CAPACITY = 18.0


async def test_ten_times_the_load_leaves_goodput_and_objectives_as_they_are() -> None:
    fits = await measure(0.9 * CAPACITY, 4.0, {}, returning=0.0)
    over = await measure(10 * CAPACITY, 4.0, {}, returning=0.0)
    assert over.goodput(SLO_S, 1.5, 4.0) >= 0.8 * fits.goodput(SLO_S, 1.5, 4.0)
    assert over.kept(SLO_S) >= 0.95
    assert sum(fate.refusals > 0 for fate in over.fates) > len(over.fates) / 2

"""Stage processes of a checkpoint of a few hundred MB take what the plan says, at the load that it speaks of."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.memory import CASES


@pytest.mark.slow
def test_stage_processes_take_at_their_peak_what_the_plan_says(tmp_path: Path) -> None:
    """Within 10 % or 30 MiB over an empty process, working memory of steps included: two AR stages and a vocoder."""
    peaks = CASES["qwen3_omni float32 both"].peaks(tmp_path / "checkpoint")
    assert [str(peak) for peak in peaks if not peak.is_right] == []

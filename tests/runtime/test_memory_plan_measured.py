"""Stage processes of checkpoints of a few hundred MB take what the plan says, at the load that it speaks of."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.memory import CASES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_omni float32 both", "cosmos3 float32"])
def test_stage_processes_take_at_their_peak_what_the_plan_says(tmp_path: Path, name: str) -> None:
    """Within 10 % or 30 MiB over an empty process, working memory of steps included."""
    peaks = CASES[name].peaks(tmp_path / "checkpoint")
    assert [str(peak) for peak in peaks if not peak.is_right] == []

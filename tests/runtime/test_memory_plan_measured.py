"""Stage processes of a checkpoint of a few hundred MB take what the plan says, at the load that it speaks of."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from bench.memory import CASES, SHORT, talk


@pytest.mark.slow
def test_stage_processes_take_at_their_peak_what_the_plan_says(tmp_path: Path) -> None:
    """Within 10 % or 30 MiB over an empty process: AR stages in full steps; a vocoder, whose chunks short speech
    does not fill, between rest and full steps."""
    case = CASES["qwen3_omni float32 both"]._replace(drive=partial(talk, longest=SHORT))
    thinker, talker, code2wav = case.peaks(tmp_path / "checkpoint")
    assert [str(peak) for peak in (thinker, talker) if not peak.is_right] == []
    assert code2wav.is_between, str(code2wav)

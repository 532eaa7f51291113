from __future__ import annotations

from omnistage.engine.replay import ReplayReport
from omnistage.entrypoints.cli.replay import replay_lines


def test_requests_that_a_killed_server_left_open_are_told() -> None:
    report = ReplayReport(requests=3, answers=2, steps=9, recorded_schedule="x", schedule="x")
    assert "the record ends before 1 of the requests did" in replay_lines(report)
    assert len(replay_lines(ReplayReport(requests=2, answers=2, steps=9, recorded_schedule="x", schedule="x"))) == 2

"""The soak of `make soak`, short: mixed load, disconnects, one kill."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.reliability.load import Outcome
from tests.reliability.soak import Report, soak
from tests.servers import serving


@pytest.mark.slow
def test_short_soak_leaves_nothing_and_answers_rightly(tmp_path: Path) -> None:
    with serving(tmp_path, "echo3", "--set", "media.decode_processes=0") as server:
        report = asyncio.run(soak(server, 20, kill_every_s=8))
    assert report.problems() == []
    assert report.kills >= 1
    assert report.right > 100
    assert report.left > 30


def test_report_tells_leaks_wrong_answers_and_growth() -> None:
    assert Report(held={"x": 0.0}, rss=[100] * 30).problems() == []
    assert Report(held={"x": 1.0}).problems() == ["still held: x = 1"]
    assert "wrong answer" in Report(wrong=[Outcome("text", False, 0.0)]).problems()[0]
    assert "grew" in Report(rss=[100] * 20 + [110] * 10).problems()[0]

"""`omnistage config diff`: what differs between two deployments, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnistage.entrypoints.cli.main import main


def test_diff_names_key_values_and_origins_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("stages:\n  thinker: {max_num_seqs: 3}\nsampling:\n  talker: {top_k: 7}\n")
    (tmp_path / "b.yaml").write_text("stages:\n  thinker: {max_num_seqs: 5}\n")
    arguments = ["config", "diff", "echo3", "--deploy", str(tmp_path / "a.yaml"), "--to", str(tmp_path / "b.yaml")]
    assert main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "stages.thinker.max_num_seqs: 3 (a.yaml:2) -> 5 (b.yaml:2)" in lines
    assert "sampling.talker.top_k: 7 (a.yaml:4) -> nothing" in lines
    assert all(line.startswith(("stages.thinker.max_num_seqs:", "sampling")) for line in lines)


def test_equal_deployments_have_no_diff(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "diff", "echo3"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["config", "diff", "echo3", "--set", "stages.wave.chunk_frames=9"]) == 1
    assert capsys.readouterr().out.startswith("stages.wave.chunk_frames: 9 (")

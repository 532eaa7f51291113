"""Schemathesis over our own OpenAPI document: no answer of 500 or more, none that hangs, in any of its phases."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import serving

pytestmark = pytest.mark.slow
KEY = "explorer"
CONFIG = """
[generation]
max-examples = 6
deterministic = true
database = "none"
mode = "all"
"""


def explore(address: str, folder: Path, phases: str) -> dict[str, int]:
    """Runs these phases; returns the statuses that were seen and how often. Raises AssertionError with the report."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG)
    report = folder / "report.ndjson"
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", f"{address}/openapi.json",
        "--phases", phases, "--checks", "not_a_server_error", "--workers", "2",
        "--request-timeout", "10", "--continue-on-failure", "--report", "ndjson", "--report-ndjson-path", str(report),
        "--exclude-path-regex", "^/admin/(drain|sleep|restart)", "--header", f"Authorization: Bearer {KEY}",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    return statuses(report)


def statuses(report: Path) -> dict[str, int]:
    found: dict[str, int] = {}

    def visit(node: object) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("status_code"), int):
                found[str(node["status_code"])] = found.get(str(node["status_code"]), 0) + 1
            for value in node.values():
                visit(value)
        elif isinstance(node, list):
            for value in node:
                visit(value)

    for line in report.read_text().splitlines():
        visit(json.loads(line))
    return found


@pytest.mark.parametrize(
    ("model", "phases"), [("echo3", "examples,coverage,fuzzing,stateful"), ("toydit", "fuzzing,stateful")]
)
def test_no_request_that_the_document_allows_or_forbids_is_a_server_error(
    tmp_path: Path, model: str, phases: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{hashlib.sha256(KEY.encode()).hexdigest()} infer,admin,metrics explorer\n")
    with serving(tmp_path, model, "--api-keys", str(keys)) as server:
        found = explore(server.address, tmp_path, phases)
        assert server.get("/health").status_code == 200
    assert sum(found.values()) > 100
    assert not [status for status in found if int(status) >= 500]
    assert {"200", "400"} <= set(found)

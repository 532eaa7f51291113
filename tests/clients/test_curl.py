"""curl against every route: a script that anybody can read and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_script_passes(addresses: dict[str, str], tmp_path: Path) -> None:
    command = ["bash", str(Path(__file__).parent / "curl.sh")]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | addresses, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "all right"), done.stderr

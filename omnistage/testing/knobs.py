"""What the knobs of the test pipelines do."""

from __future__ import annotations

import time


def pause(seconds: float) -> None:
    """Sleeps, unless it is for nothing: a sleep of zero seconds still costs a timer's slack."""
    if seconds:
        time.sleep(seconds)

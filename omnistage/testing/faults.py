"""Deploy overrides that inject faults; see `omnistage.faults` for the points and actions."""

from __future__ import annotations

from typing import Any

import msgspec

from omnistage.faults import POINTS, Action, FaultSpec, Point

__all__ = ["POINTS", "fault"]


def fault(stage: str, point: Point, action: Action, **details: Any) -> dict[str, Any]:
    """Overrides with one fault at `stage`, for `resolve_config` or `Omni(**overrides)`.

    `details` are `FaultSpec` fields: after, times, request, stall_s, always.
    """
    spec = FaultSpec(point=point, action=action, **details)
    return {f"stages.{stage}.faults": [msgspec.to_builtins(spec)]}

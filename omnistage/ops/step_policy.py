"""When a step cache lets the middle of a denoiser run: the request's parameter `step_cache`. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Kind = Literal["relative_change", "fixed_budget"]


class StepCache(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each kind reads its own number. The first and the last step always run.

    - relative_change: run once the watched signal has changed by more than `threshold` since the last run, summed over
      steps as mean |difference| / mean |signal|. After TeaCache (Liu et al., 2024, arXiv:2411.19108).
    - fixed_budget: exactly `runs` steps run (all, if there are no more), evenly spread.
    """

    kind: Kind
    threshold: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.2
    runs: Annotated[int, msgspec.Meta(ge=2, le=1000)] = 8

    def is_due(self, change: float, step: int, steps: int) -> bool:
        """True when the middle must run at `step` (from 0) of `steps`; `change` since its last run."""
        if step in (0, steps - 1):
            return True
        if self.kind == "relative_change":
            return change > self.threshold
        return step in {round(at * (steps - 1) / (self.runs - 1)) for at in range(self.runs)}

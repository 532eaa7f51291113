"""After which steps a request's partial pictures are due. Torch-free."""

from __future__ import annotations


def preview_is_due(done: int, steps: int, count: int) -> bool:
    """True when one of `count` previews, spread evenly over `steps`, is due after `done` of them; never after the
    last."""
    return done in {steps * (at + 1) // (count + 1) for at in range(count)}

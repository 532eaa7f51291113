"""How long property tests look: as in CI, or many times as long under `make fuzz` (Hypothesis profile "fuzz")."""

from __future__ import annotations

from hypothesis import settings

LONG = 50
_USUAL = 100


def register() -> None:
    """Makes the profile known; it looks `LONG` times as long and at other examples every time."""
    settings.register_profile("fuzz", max_examples=LONG * _USUAL, deadline=None)


def examples(count: int) -> int:
    """`count`, or as many times more as the profile in use wants."""
    return count * max(1, settings.default.max_examples // _USUAL) if settings.default is not None else count


def repeatable() -> bool:
    """True in CI: the same examples every time."""
    return examples(1) == 1

"""OmniStage: stage-based serving of omni-modality models.

`Omni` runs a model in this process, blocking; `AsyncOmni` does the same in an event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnistage.entrypoints.omni import AsyncOmni, Omni

__version__ = "0.1.0"
__all__ = ["AsyncOmni", "Omni", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports the public classes when they are first used, so that importing the package costs nothing."""
    if name in ("AsyncOmni", "Omni"):
        from omnistage.entrypoints import omni

        return vars(omni)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

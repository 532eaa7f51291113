"""Numbers that have run out of range end a request, not in a black picture."""

from __future__ import annotations

import torch
from torch import Tensor

from omnistage.errors import StageError


def finite(tensor: Tensor, what: str) -> Tensor:
    """The tensor. Raises StageError that names `what` when a number of it is infinite or none."""
    if not bool(torch.isfinite(tensor).all()):
        raise StageError(f"the model gave {what} that are not finite; a wider dtype may help")
    return tensor

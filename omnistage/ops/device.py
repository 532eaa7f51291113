"""Which device a stage computes on."""

from __future__ import annotations

import torch

from omnistage.errors import ConfigError


def choose_device(requested: str, accelerator: str | None = None) -> torch.device:
    """The device called `requested`; "auto" is the machine's accelerator, else the CPU.

    `accelerator` is the type of the accelerator ("" for none), found by torch by default. Raises ConfigError for names
    that torch does not know and for devices that the machine does not have.
    """
    if accelerator is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        accelerator = found.type if found is not None else ""
    if requested == "auto":
        return torch.device(accelerator or "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError:
        raise ConfigError(f"device {requested[:32]!r} is no device of torch; use auto, cpu or cuda:0") from None
    if device.type not in ("cpu", accelerator):
        raise ConfigError(f"this machine has no device {requested!r}; use {accelerator or 'cpu'} or auto")
    return device

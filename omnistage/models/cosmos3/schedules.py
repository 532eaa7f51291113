"""Scheduler objects of one request: one per modality, never shared."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch import Tensor

from omnistage.models.cosmos3.ask import Ask
from omnistage.models.cosmos3.checkpoint import Checkpoint


class Schedule:
    """The steps of one denoising run. `samplers` maps a modality to its own scheduler object."""

    def __init__(self, checkpoint: Checkpoint, ask: Ask, modalities: tuple[str, ...], device: torch.device) -> None:
        first = _distilled(checkpoint, device) if checkpoint.is_distilled else _base(checkpoint, ask, device)
        self._stochastic = checkpoint.is_distilled
        self._samplers = {name: first if name == modalities[0] else copy.deepcopy(first) for name in modalities}
        self._timesteps = first.timesteps

    def __len__(self) -> int:
        return len(self._timesteps)

    def timestep(self, step: int) -> int | float:
        """The number that the transformer is given (an integer for the base checkpoints)."""
        number: int | float = self._timesteps[step].item()
        return number

    def expected(self, step: int, velocity: Tensor, latents: Tensor) -> Tensor:
        """The clean latents that a step's prediction points to: x - sigma v, of the first modality."""
        sigma = next(iter(self._samplers.values())).sigmas[step].to(latents.device)
        clean: Tensor = latents - sigma * velocity
        return clean

    def step(self, modality: str, step: int, velocity: Tensor, latents: Tensor, generator: torch.Generator) -> Tensor:
        """The next latents, float32. Distilled schedules draw noise from `generator` in every step."""
        more = {"generator": generator} if self._stochastic else {}
        moved: Tensor = self._samplers[modality].step(
            velocity.unsqueeze(0), self._timesteps[step], latents.unsqueeze(0), return_dict=False, **more
        )[0]
        return moved.squeeze(0)


def _base(checkpoint: Checkpoint, ask: Ask, device: torch.device) -> Any:
    asked = {"flow_shift": ask.flow_shift, "use_karras_sigmas": ask.karras}
    overrides = {name: value for name, value in asked.items() if value is not None}
    if checkpoint.scheduler["_class_name"] != "UniPCMultistepScheduler":
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(checkpoint.scheduler)
    else:
        scheduler = UniPCMultistepScheduler.from_config(checkpoint.scheduler, **overrides)
    if checkpoint.native_schedule and ask.transfer is None:
        sigmas = np.linspace(1.0 - 1.0 / scheduler.config.num_train_timesteps, 0.0, ask.steps + 1)[:-1]
        scheduler.set_timesteps(ask.steps, device=device, sigmas=sigmas)
    else:
        scheduler.set_timesteps(ask.steps, device=device)
    return scheduler


def _distilled(checkpoint: Checkpoint, device: torch.device) -> Any:
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(checkpoint.scheduler)
    scheduler.set_timesteps(sigmas=list(checkpoint.distilled_sigmas), device=device)
    return scheduler

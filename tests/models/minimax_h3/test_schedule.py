"""The schedule is the library's, without its state."""

from __future__ import annotations

import pytest
import torch
from diffusers import MiniMaxH3Scheduler

from omnistage.models.minimax_h3.schedule import noised_condition, sigmas, step


@pytest.mark.parametrize(("points", "shift"), [(2, 12.0), (50, 12.0), (50, 3.0), (7, 1.0), (1000, 1000.0)])
def test_grid_and_steps_equal_the_library(points: int, shift: float) -> None:
    scheduler = MiniMaxH3Scheduler(shift=shift)
    scheduler.set_timesteps(points)
    ours = sigmas(points, shift)
    assert torch.equal(ours, scheduler.sigmas)
    generator = torch.Generator().manual_seed(1)
    theirs = rows = torch.randn(5, 4, generator=generator)
    for index, t in enumerate(scheduler.timesteps[:20]):
        velocity = torch.randn(5, 4, generator=generator)
        theirs = scheduler.step(velocity, t, theirs, return_dict=False)[0]
        rows = step(rows, velocity, ours, index)
        assert torch.equal(rows, theirs)


def test_neighbours_that_fall_together_are_merged() -> None:
    assert len(sigmas(1000, 1000.0)) <= 1000
    assert sigmas(1000, 1000.0)[-1] == 0.0
    assert bool((sigmas(1000, 1000.0).diff() < 0).all())


def test_condition_is_noised_as_the_library_does() -> None:
    clean, noise = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(noised_condition(clean, noise), MiniMaxH3Scheduler().scale_noise(clean, 0.999, noise))

"""How the painter and its judge are trained: the optimizers, the loops, and the schedule of the learning rate.

Data are drawn as they are needed. Budgets are seconds of CPU time of this process, so that the same recipe fits any
machine; a run of so many steps is the same on each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from omnistage.models.tiny_shapes.captions import tokens
from omnistage.models.tiny_shapes.drawing import Attributes, random_attributes, render
from omnistage.models.tiny_shapes.judge import Judge
from omnistage.models.tiny_shapes.network import Painter

# Share of captions that are dropped, so that the unguided branch is learnt too.
_DROPPED = 0.1
_EMA = 0.998
_MUON_MOMENTUM = 0.95
_LOG_EVERY = 25
# Quintic Newton-Schulz iteration of Muon (Jordan et al., 2024).
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)

Log = Callable[[str], None]
# Gives what the painter is conditioned on, a fresh tensor [n, ...].
Conditions = Callable[[list[Attributes]], Tensor]


def word_conditions(asked: list[Attributes]) -> Tensor:
    """Word numbers [n, 12]."""
    return torch.tensor([tokens(one) for one in asked])


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """`seconds` of CPU time or `steps`, whichever ends first. The rate is constant up to `decay_from` (share of the
    run), then falls in a straight line."""

    seconds: float
    steps: int = 1 << 30
    batch: int = 64
    rate: float = 1.0
    warmup: int = 100
    decay_from: float = 0.65
    seed: int = 0
    muon_rate: float = 0.01
    adam_rate: float = 2e-3

    def rate_at(self, step: int, done: float) -> float:
        """Factor of both learning rates after the share `done` of the run."""
        fall = 1.0 if done < self.decay_from else max(0.02, (1 - done) / (1 - self.decay_from))
        return self.rate * min(1.0, (step + 1) / self.warmup) * fall


class Muon:
    """Momentum whose update is made orthogonal: for the weight matrices of the blocks."""

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        self._matrices = matrices
        self._momentum = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for matrix, momentum in zip(self._matrices, self._momentum, strict=True):
            if matrix.grad is None:
                raise RuntimeError("a matrix has no gradient")
            momentum.mul_(_MUON_MOMENTUM).add_(matrix.grad)
            update = orthogonal(matrix.grad + _MUON_MOMENTUM * momentum)
            matrix.add_(update, alpha=-rate * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)
            matrix.grad = None


def orthogonal(matrix: Tensor, iterations: int = 5) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, roughly: singular values end between 0.7 and 1.2."""
    a, b, c = _NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    result: Tensor = x.T if tall else x
    return result


class PainterTrainer:
    """Rectified flow on freshly drawn pictures; `average` is the exponential moving average, which is what is kept."""

    def __init__(self, painter: Painter, recipe: Recipe, conditions: Conditions = word_conditions) -> None:
        torch.manual_seed(recipe.seed)
        self._conditions = conditions
        self._recipe = recipe
        self._draw = np.random.default_rng(recipe.seed + 1)
        self._painter = painter
        matrices = [p for name, p in painter.named_parameters() if is_matrix(name, p)]
        chosen = {id(matrix) for matrix in matrices}
        self._rest = [p for p in painter.parameters() if id(p) not in chosen]
        self._muon = Muon(matrices)
        self._adam = torch.optim.AdamW(self._rest, lr=recipe.adam_rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.average = {name: value.clone() for name, value in painter.state_dict().items()}

    def run(self, log: Log) -> int:
        """Trains to the end of the budget; returns the steps taken."""
        recipe, start = self._recipe, time.process_time()
        step, loss = 0, float("nan")
        while True:
            spent = time.process_time() - start
            done = max(spent / recipe.seconds, step / recipe.steps)
            if done >= 1:
                return step
            if step % _LOG_EVERY == 0:
                log(f"step {step} loss {loss:.4f} cpu {spent / 60:.1f} min")
            loss = self.step(step, recipe.rate_at(step, done))
            step += 1

    def step(self, step: int, rate: float) -> float:
        """One step; returns the loss."""
        asked = random_attributes(self._recipe.batch, self._draw)
        pictures = torch.from_numpy(render(asked, self._draw)).permute(0, 3, 1, 2).contiguous()
        loss = self._loss(pictures, self._words(asked))
        loss.backward()  # type: ignore[no-untyped-call]
        for group in self._adam.param_groups:
            group["lr"] = self._recipe.adam_rate * rate
        torch.nn.utils.clip_grad_norm_(self._rest, 1.0)
        self._adam.step()
        self._adam.zero_grad()
        self._muon.step(self._recipe.muon_rate * rate)
        keep = min(_EMA, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, value in self._painter.state_dict().items():
                self.average[name].lerp_(value, 1 - keep)
        return float(loss.detach())

    def _words(self, asked: list[Attributes]) -> Tensor:
        words = self._conditions(asked)
        words[torch.rand(len(asked)) < _DROPPED] = 0
        return words

    def _loss(self, pictures: Tensor, words: Tensor) -> Tensor:
        times = torch.sigmoid(torch.randn(len(pictures)) + 0.3)
        noise = torch.randn_like(pictures)
        at = times.view(-1, 1, 1, 1)
        velocity = self._painter((1 - at) * pictures + at * noise, times, words)
        loss: Tensor = (velocity - (noise - pictures)).square().mean()
        return loss


def is_matrix(name: str, parameter: Tensor) -> bool:
    """True for the weight matrices of the blocks."""
    return name.startswith("blocks.") and parameter.ndim == 2 and not name.endswith("table")


def train_judge(judge: Judge, *, steps: int, seed: int, batch: int = 128, log: Log = print) -> None:
    """Supervised, on fresh pictures with a little noise; the rate falls in a straight line over the last two thirds."""
    torch.manual_seed(seed)
    draw = np.random.default_rng(seed)
    adam = torch.optim.AdamW(judge.parameters(), 2e-3)
    judge.train()
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = 2e-3 * min(1.0, (steps - step) / steps * 1.5)
        asked = random_attributes(batch, draw)
        pictures = torch.from_numpy(render(asked, draw)).permute(0, 3, 1, 2)
        right = torch.tensor([one.numbers() for one in asked])
        scores = judge(pictures + torch.randn_like(pictures) * 0.05)
        loss = torch.stack([functional.cross_entropy(s, right[:, at]) for at, s in enumerate(scores)]).sum()
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        if step % 100 == 0:
            log(f"judge step {step} loss {float(loss.detach()):.4f}")
    judge.eval()

"""The judge: a small network that names the attributes of a picture, for measuring prompt adherence.

Its features also give a Frechet distance between two sets of pictures (lower is closer).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from omnistage.models.tiny_shapes.drawing import HEADS, Attributes
from omnistage.models.tiny_shapes.network import load_weights

WEIGHTS = Path(__file__).parent / "weights"
FEATURES = 128


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *_layer(3, 24, 5, 2),
            *_layer(24, 48, 3, 2),
            *_layer(48, 64, 3, 1),
            nn.Flatten(),
            nn.Linear(64 * 8 * 8, FEATURES),
            nn.ReLU(),
        )
        self.heads = nn.ModuleList(nn.Linear(FEATURES, count) for count in HEADS)

    def features(self, pictures: Tensor) -> Tensor:
        """[n, 3, 32, 32] in -1..1 to [n, 128]."""
        out: Tensor = self.trunk(pictures)
        return out

    def forward(self, pictures: Tensor) -> list[Tensor]:
        """Scores [n, values] per attribute."""
        seen = self.features(pictures)
        return [head(seen) for head in self.heads]


def _layer(source: int, target: int, kernel: int, stride: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(source, target, kernel, stride, kernel // 2), nn.BatchNorm2d(target), nn.ReLU()


def load_judge() -> Judge:
    """The judge with its stored weights."""
    judge = Judge()
    load_weights(judge, WEIGHTS / "judge.safetensors")
    return judge


@torch.inference_mode()
def verdicts(judge: Judge, pictures: Tensor, asked: list[Attributes]) -> npt.NDArray[np.bool_]:
    """[n, 5]: which attributes of which picture are as asked."""
    seen = torch.stack([scores.argmax(1) for scores in judge(pictures)], 1).numpy()
    right: npt.NDArray[np.bool_] = seen == np.array([one.numbers() for one in asked])
    return right


@torch.inference_mode()
def frechet_distance(judge: Judge, left: Tensor, right: Tensor) -> float:
    """Between the feature distributions of two sets of pictures [n, 3, 32, 32], taken as Gaussian."""
    a, b = judge.features(left).double(), judge.features(right).double()
    spread_a, spread_b = torch.cov(a.T), torch.cov(b.T)
    shared = torch.linalg.eigvals(spread_a @ spread_b).real.clamp_min(0).sqrt().sum()
    apart = (a.mean(0) - b.mean(0)).square().sum()
    return float(apart + spread_a.trace() + spread_b.trace() - 2 * shared)


def pictures_of(arrays: npt.NDArray[np.uint8]) -> Tensor:
    """uint8 [n, 32, 32, 3] as the judge takes them."""
    return torch.from_numpy(arrays.astype(np.float32) / 127.5 - 1.0).permute(0, 3, 1, 2)

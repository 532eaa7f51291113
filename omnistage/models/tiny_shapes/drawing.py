"""The pictures that tiny-shapes knows: one shape on a background, drawn by signed distance functions. Numpy only.

A picture is 32 x 32 RGB and is described by five attributes, 2560 combinations; place, size, angle, colours and shading
vary a little from picture to picture. Coordinates run from -1 to 1, x to the right, y down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Field = Callable[[Floats, Floats, float], Floats]

SIDE = 32
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross", "heart", "diamond")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (50, 180, 70),
    "blue": (50, 90, 230),
    "yellow": (240, 210, 40),
    "purple": (150, 60, 190),
    "orange": (245, 140, 30),
    "pink": (245, 130, 190),
    "cyan": (50, 200, 220),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "black": (15, 15, 18),
    "white": (240, 240, 240),
    "gray": (125, 125, 130),
    "navy": (20, 30, 90),
}
PLACES: dict[str, tuple[float, float]] = {
    "center": (0.0, 0.0),
    "left": (-0.4, 0.0),
    "right": (0.4, 0.0),
    "top": (0.0, -0.4),
    "bottom": (0.0, 0.4),
}
SIZES: dict[str, float] = {"small": 0.26, "large": 0.46}
# Large shapes move less, so that they stay inside.
_TRAVEL = {"small": 1.15, "large": 0.8}
VALUES: tuple[tuple[str, ...], ...] = (SHAPES, tuple(COLOURS), tuple(BACKGROUNDS), tuple(PLACES), tuple(SIZES))
HEADS = tuple(len(values) for values in VALUES)


class Attributes(NamedTuple):
    """What a picture shows, by name."""

    shape: str
    colour: str
    background: str
    place: str
    size: str

    def numbers(self) -> tuple[int, ...]:
        """The index of each attribute in `VALUES`."""
        return tuple(values.index(value) for values, value in zip(VALUES, self, strict=True))


def random_attributes(count: int, draw: np.random.Generator) -> list[Attributes]:
    """Evenly drawn from all combinations."""
    columns = [draw.integers(0, len(values), count) for values in VALUES]
    return [
        Attributes(*(values[int(number)] for values, number in zip(VALUES, row, strict=True)))
        for row in zip(*columns, strict=True)
    ]


def render(attributes: list[Attributes], draw: np.random.Generator) -> npt.NDArray[np.float32]:
    """Pictures [n, 32, 32, 3] in -1..1, edges smoothed over one pixel."""
    return np.stack([_picture(one, draw) for one in attributes]).astype(np.float32) / 127.5 - 1.0


def _picture(one: Attributes, draw: np.random.Generator) -> Floats:
    axis = (np.arange(SIDE) + 0.5) / SIDE * 2 - 1
    across, down = np.meshgrid(axis, axis)
    radius = SIZES[one.size] * draw.uniform(0.9, 1.1)
    travel, (right, low) = _TRAVEL[one.size], PLACES[one.place]
    x = across - right * travel - draw.uniform(-0.05, 0.05)
    y = down - low * travel - draw.uniform(-0.05, 0.05)
    angle = draw.uniform(-0.15, 0.15)
    x, y = np.cos(angle) * x - np.sin(angle) * y, np.sin(angle) * x + np.cos(angle) * y
    inside = np.clip(0.5 - _FIELDS[one.shape](x, y, radius) * SIDE / 2, 0, 1)[..., None]
    colour = np.array(COLOURS[one.colour]) + draw.uniform(-12, 12, 3)
    background = np.array(BACKGROUNDS[one.background]) + draw.uniform(-8, 8, 3)
    shade = 1 - 0.12 * down[..., None] * draw.uniform(0, 1)
    mixed: Floats = np.clip(background * (1 - inside) + colour * shade * inside, 0, 255)
    return mixed


def _circle(x: Floats, y: Floats, radius: float) -> Floats:
    return np.hypot(x, y) - radius


def _ring(x: Floats, y: Floats, radius: float) -> Floats:
    return np.abs(np.hypot(x, y) - radius * 0.78) - radius * 0.22


def _square(x: Floats, y: Floats, radius: float) -> Floats:
    return np.maximum(np.abs(x), np.abs(y)) - radius * 0.86


def _diamond(x: Floats, y: Floats, radius: float) -> Floats:
    return (np.abs(x) * 1.25 + np.abs(y)) * 0.72 - radius * 0.74


def _cross(x: Floats, y: Floats, radius: float) -> Floats:
    arm = radius * 0.33
    flat = np.maximum(np.abs(x) - radius, np.abs(y) - arm)
    upright = np.maximum(np.abs(x) - arm, np.abs(y) - radius)
    return np.minimum(flat, upright)


def _triangle(x: Floats, y: Floats, radius: float) -> Floats:
    y = y - radius * 0.15
    return np.maximum(np.abs(x) * 0.866 - y * 0.5, y) - radius * 0.55


def _star(x: Floats, y: Floats, radius: float) -> Floats:
    turns = np.arctan2(x, -y) / (2 * np.pi) * 5
    towards_tip = np.abs((turns % 1) - 0.5) * 2  # 0 between two tips, 1 at a tip
    return (np.hypot(x, y) - radius * (0.45 + 0.65 * towards_tip**1.3)) * 0.75


def _heart(x: Floats, y: Floats, radius: float) -> Floats:
    u, v = x / radius, 0.15 - y / radius
    value = (u * u + v * v - 0.62) ** 3 - u * u * v**3 * 1.2
    return np.cbrt(value) * radius * 0.35


_FIELDS: dict[str, Field] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "ring": _ring,
    "cross": _cross,
    "heart": _heart,
    "diamond": _diamond,
}

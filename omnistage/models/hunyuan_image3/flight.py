"""All of one request in the drawing stage: conditions, prompt keys and values, latents, schedule, step index."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from omnistage.models.hunyuan_image3.ask import Ask
from omnistage.models.hunyuan_image3.attention import KeysValues
from omnistage.models.hunyuan_image3.layout import DrawingPlace, Layout
from omnistage.models.hunyuan_image3.rotary import Angles
from omnistage.models.hunyuan_image3.schedule import Schedule
from omnistage.payload import Array
from omnistage.stages.base import StageRequest


class Thoughts(NamedTuple):
    """What the text stage said: tokens with their tags, and the index of the size that it chose, if it did."""

    ids: tuple[int, ...] = ()
    ratio: int | None = None


@dataclass(slots=True)
class Branch:
    """A guidance row: its tokens, and from `encode` on the keys and values of its prompt."""

    layout: Layout
    pieces: tuple[KeysValues, ...] = ()


class Drawing(NamedTuple):
    """What `prepare` makes: latents float32 [1, channels, h, w], angles of the rows of a step."""

    latents: Tensor
    schedule: Schedule
    angles: Angles


@dataclass(slots=True)
class Flight:
    """`thoughts`, `handed` and `media` are there once the ports of the request are `complete`.

    `branches` (with the prompt first) are known from `encode` on, `drawing` from `prepare` on. `expected` are the clean
    latents that the last step points to, kept for previews.
    """

    request: StageRequest
    ask: Ask
    generator: torch.Generator
    noise: list[Tensor] = field(default_factory=list)
    complete: set[str] = field(default_factory=set)
    media: dict[str, Array] = field(default_factory=dict)
    thoughts: Thoughts = field(default_factory=Thoughts)
    handed_ids: list[int] = field(default_factory=list)
    handed: list[KeysValues] = field(default_factory=list)
    branches: tuple[Branch, ...] = ()
    drawing: Drawing | None = None
    expected: Tensor | None = None
    step: int = 0
    done: bool = False
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def place(self) -> DrawingPlace:
        """Where the picture's rows stand; the same in all branches."""
        place = self.branches[0].layout.drawing
        assert place is not None, "drawing layouts have a picture to draw"
        return place

    @property
    def grid(self) -> tuple[int, int]:
        return self.place.image.height, self.place.image.width

    def ready(self) -> Drawing:
        """Only after `prepare`."""
        if self.drawing is None:
            raise RuntimeError("the request is not prepared")
        return self.drawing

    def release(self) -> None:
        """Lets go of everything large."""
        self.media, self.handed, self.noise = {}, [], []
        self.branches, self.drawing, self.expected = (), None, None

"""One request, complete, as both stages read it: plain data that the planner makes and no client writes. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from omnistage.errors import RequestError
from omnistage.models.hunyuan_image3.checkpoint import Template
from omnistage.models.hunyuan_image3.layout import Trigger, Turn

# What the text stage does. "" - nothing: it is not part of the request.
Task = Literal["", "answer", "think", "recaption", "think_recaption", "ratio"]
TRIGGERS: dict[Task, Trigger] = {
    "": "",
    "answer": "",
    "think": "think",
    "recaption": "recaption",
    "think_recaption": "think",
    "ratio": "ratio",
}


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`pictures` are the (height, width) of the reference pictures in pixels. `draws`: the text leads to a picture,
    whose `size` (height, width) it chooses if that is None. `drawing_system` is the system prompt of the drawing stage.
    `handover`: the text stage's keys and values go along."""

    template: Template
    turns: tuple[Turn, ...]
    task: Task
    draws: bool
    system: str | None = None
    drawing_system: str | None = None
    pictures: tuple[tuple[int, int], ...] = ()
    size: tuple[int, int] | None = None
    steps: int = 1
    guidance: float = 1.0
    flow_shift: float = 1.0
    drop_think: bool = False
    handover: bool = False
    partial_images: int = 0
    cache_salt: str = ""

    @property
    def chooses_size(self) -> bool:
        return self.task == "ratio" or (self.draws and self.size is None)

    @property
    def branches(self) -> int:
        """Guidance rows of a step of a model whose guidance is not a token."""
        return 1 if self.guidance == 1.0 else 2


def read_ask(params: Mapping[str, Any]) -> Ask:
    """The request behind a stage's parameters. Raises RequestError when they are not what the planner writes."""
    try:
        return msgspec.convert({key: value for key, value in params.items() if key != "sampling"}, Ask)
    except msgspec.ValidationError as error:
        raise RequestError(f"parameters: {error}") from None


def write_ask(ask: Ask) -> dict[str, Any]:
    written: dict[str, Any] = msgspec.to_builtins(ask)
    return written

"""From a conversation to the token row of each guidance branch, with what its tokens stand for. Torch-free.

Pieces, where [] belong to the template "instruct" only:

    <bos> {system} [\\n\\n] [User: ] {pictures} {text} [\\n\\n] [Assistant: ] {thoughts}
    [<answer>] PICTURE [</answer>] [\\n\\n]

A picture that is given has a span of latent tokens, a separator and a span of vision tokens, which all see each other;
the picture to draw has a span of latent tokens. Everything else sees what comes before it. In the row without the
prompt all tokens of the user's text and of the thoughts are `<cfg>`, so both rows have equal lengths and positions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from omnistage.errors import ConfigError
from omnistage.models.hunyuan_image3.checkpoint import Template
from omnistage.models.hunyuan_image3.vocabulary import Vocabulary

Trigger = Literal["", "think", "recaption", "ratio"]


class Part(NamedTuple):
    """Text, or the reference picture of this number in order of appearance."""

    text: str = ""
    picture: int | None = None


class Turn(NamedTuple):
    """What one side says."""

    role: Literal["user", "assistant"]
    parts: tuple[Part, ...]


class PictureGrid(NamedTuple):
    """A reference picture's sizes: the index of its ratio token, its latent grid and its grid of vision patches."""

    ratio: int
    latent: tuple[int, int]
    patches: tuple[int, int]


class GridSpan(NamedTuple):
    """Tokens `start..stop`, of which the first height * width are a grid in row-major order."""

    start: int
    stop: int
    height: int
    width: int


class ReferencePlace(NamedTuple):
    """Where the rows of one reference picture stand: index of its `<timestep>`, spans of latents and of vision."""

    timestep: int
    latent: GridSpan
    vision: GridSpan

    @property
    def joint(self) -> tuple[int, int]:
        """The rows that see each other."""
        return self.latent.start, self.vision.stop


class DrawingPlace(NamedTuple):
    """Where the rows of the picture to draw stand; `guidance` and `next_timestep` None: the model has no such token."""

    timestep: int
    guidance: int | None
    next_timestep: int | None
    image: GridSpan


@dataclass
class Layout:
    """One row of tokens. The rows before `drawing.timestep` do not change from step to step."""

    ids: list[int] = field(default_factory=list)
    references: list[ReferencePlace] = field(default_factory=list)
    drawing: DrawingPlace | None = None

    @property
    def grids(self) -> list[GridSpan]:
        """The spans with two-dimensional positions, in order."""
        spans = [span for place in self.references for span in (place.latent, place.vision)]
        return spans + ([self.drawing.image] if self.drawing is not None else [])

    @property
    def prompt(self) -> int:
        """Rows that are the same in every step."""
        return len(self.ids) if self.drawing is None else self.drawing.timestep


class Conversation(NamedTuple):
    """What is said before the model's turn. `pictures[n]` are the sizes of reference picture n."""

    system: str | None
    turns: tuple[Turn, ...]
    pictures: tuple[PictureGrid, ...] = ()


class Canvas(NamedTuple):
    """The picture to draw: index of its ratio token and its latent grid."""

    ratio: int
    grid: tuple[int, int]


class Flags(NamedTuple):
    """Which extra tokens the picture to draw has."""

    guidance: bool = False
    next_timestep: bool = False


class Renderer:
    """Writes layouts for one vocabulary and template. `vision_tokens`: vision tokens per reference picture."""

    def __init__(
        self, vocabulary: Vocabulary, template: Template, vision_tokens: int, flags: Flags | None = None
    ) -> None:
        self._vocabulary = vocabulary
        self._wordy = template == "instruct"
        self._vision_tokens = vision_tokens
        self._flags = flags or Flags()

    def question(self, conversation: Conversation, trigger: Trigger) -> Layout:
        """What the text stage starts from: the conversation, then what makes it begin as `trigger` says."""
        layout = self._said(conversation, unconditional=False)
        special = self._vocabulary.special
        if trigger in ("think", "recaption"):
            layout.ids.append(special.think if trigger == "think" else special.recaption)
        elif trigger == "ratio":
            layout.ids += self.tail()
        return layout

    def tail(self) -> list[int]:
        """The tokens between the thoughts and the ratio token."""
        special = self._vocabulary.special
        return [special.answer] * self._wordy + [special.boi, special.size]

    def drawing(
        self, conversation: Conversation, thoughts: Sequence[int], canvas: Canvas, *, unconditional: bool = False
    ) -> Layout:
        """A whole row. `thoughts` are the text stage's tokens, its trigger and end tags included."""
        layout = self._said(conversation, unconditional=unconditional)
        special, ids = self._vocabulary.special, layout.ids
        ids += self._thoughts(thoughts, unconditional)
        ids += [*self.tail(), self._vocabulary.ratios[canvas.ratio]]
        timestep = len(ids)
        ids.append(special.timestep)
        guidance = self._extra(layout, special.guidance if self._flags.guidance else None)
        following = self._extra(layout, special.next_timestep if self._flags.next_timestep else None)
        image = self._span(layout, canvas.grid, canvas.grid[0] * canvas.grid[1])
        layout.drawing = DrawingPlace(timestep, guidance, following, image)
        ids.append(special.eoi)
        if self._wordy:
            ids += [special.end_answer, *self._vocabulary.encode("\n\n")]
        return layout

    def _said(self, conversation: Conversation, *, unconditional: bool) -> Layout:
        layout = Layout([self._vocabulary.special.bos])
        if conversation.system:
            layout.ids += self._vocabulary.encode(conversation.system) + self._words("\n\n")
        for turn in conversation.turns:
            layout.ids += self._words("User: " if turn.role == "user" else "Assistant: ")
            for part in turn.parts:
                self._part(layout, turn, part, conversation, unconditional)
            layout.ids += self._words("\n\n")
        layout.ids += self._words("Assistant: ")
        return layout

    def _part(self, layout: Layout, turn: Turn, part: Part, conversation: Conversation, unconditional: bool) -> None:
        special = self._vocabulary.special
        if part.picture is not None:
            self._reference(layout, conversation.pictures[part.picture])
            return
        if turn.role == "user":
            ids = self._vocabulary.encode(part.text)
            layout.ids += [special.cfg] * len(ids) if unconditional else ids
            return
        tagged = self._tagged(part.text)
        if special.end_think in tagged or special.end_recaption in tagged:
            layout.ids += self._thoughts(tagged, unconditional)
            return
        ids = [special.cfg] * len(tagged) if unconditional else tagged
        layout.ids += [special.answer, *ids, special.end_answer] if self._wordy else ids

    def _reference(self, layout: Layout, picture: PictureGrid) -> None:
        special, ids = self._vocabulary.special, layout.ids
        if special.joint is None:
            raise ConfigError("hunyuan_image3: the tokenizer lacks <joint_img_sep>, which pictures need", param="model")
        ids += [special.boi, special.size, self._vocabulary.ratios[picture.ratio]]
        timestep = len(ids)
        ids.append(special.timestep)
        latent = self._span(layout, picture.latent, picture.latent[0] * picture.latent[1])
        ids.append(special.joint)
        vision = self._span(layout, picture.patches, self._vision_tokens)
        layout.references.append(ReferencePlace(timestep, latent, vision))
        ids.append(special.eoi)

    def _span(self, layout: Layout, grid: tuple[int, int], tokens: int) -> GridSpan:
        start = len(layout.ids)
        layout.ids += [self._vocabulary.special.image] * tokens
        return GridSpan(start, start + tokens, *grid)

    def _extra(self, layout: Layout, token: int | None) -> int | None:
        if token is None:
            return None
        layout.ids.append(token)
        return len(layout.ids) - 1

    def _words(self, text: str) -> list[int]:
        """Role words and line breaks, which the template "pretrain" does without."""
        return self._vocabulary.encode(text) if self._wordy else []

    def _thoughts(self, ids: Sequence[int], unconditional: bool) -> list[int]:
        special = self._vocabulary.special
        tags = (special.think, special.end_think, special.recaption, special.end_recaption)
        return [special.cfg if unconditional and token not in tags else token for token in ids]

    def _tagged(self, text: str) -> list[int]:
        """An earlier answer's text, in which the tags of thoughts are tokens."""
        special = self._vocabulary.special
        tags = {
            "<think>": special.think,
            "</think>": special.end_think,
            "<recaption>": special.recaption,
            "</recaption>": special.end_recaption,
        }
        ids: list[int] = []
        for piece in re.split("(" + "|".join(tags) + ")", text):
            ids += [tags[piece]] if piece in tags else self._vocabulary.encode(piece)
        return ids


def without_thinking(ids: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Thoughts without their thinking part, if that is complete."""
    special = vocabulary.special
    if special.think not in ids or special.end_think not in ids:
        return list(ids)
    start, stop = ids.index(special.think), ids.index(special.end_think)
    return [*ids[:start], *ids[stop + 1 :]] if start < stop else list(ids)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two rows begin with in common."""
    limit = min(len(one), len(other))
    return next((index for index in range(limit) if one[index] != other[index]), limit)

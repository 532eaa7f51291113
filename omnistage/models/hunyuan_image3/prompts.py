"""Prompt rows of the drawing stage: computed once per request, over whatever the text stage has handed over.

The row without the prompt begins like the row with it: up to its first `<cfg>` it takes that row's keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from omnistage.models.hunyuan_image3.attention import Document, DocumentPlan, KeysValues, cut_pieces, segments_of
from omnistage.models.hunyuan_image3.backbone import embedded
from omnistage.models.hunyuan_image3.components import Components
from omnistage.models.hunyuan_image3.layout import Layout, common_prefix
from omnistage.models.hunyuan_image3.references import Reference, ReferenceEncoder, ReferenceRows, place
from omnistage.models.hunyuan_image3.rotary import positions


class PromptWork(NamedTuple):
    """The rows of one request: its branches (with the prompt first) and what is known of the first one's beginning.

    `reference` reads the picture of that number.
    """

    layouts: tuple[Layout, ...]
    known: tuple[KeysValues, ...]
    reference: Callable[[int], Reference]

    @property
    def known_rows(self) -> int:
        return sum(piece.rows for piece in self.known)

    def start(self, branch: int) -> int:
        """The first row of a branch that has to be computed."""
        if branch == 0:
            return self.known_rows
        with_prompt, without = self.layouts[0], self.layouts[branch]
        return min(common_prefix(with_prompt.ids, without.ids), without.prompt)


class _Part(NamedTuple):
    """New rows of one branch, over `pieces`."""

    layout: Layout
    start: int
    pieces: tuple[KeysValues, ...]
    references: list[ReferenceRows | None]


class Prompts:
    """Runs prompt rows through the backbone."""

    def __init__(self, components: Components) -> None:
        self._backbone = components.backbone()
        self._rotary = components.rotary
        self._encoder = ReferenceEncoder(components)

    def compute(self, works: Sequence[PromptWork]) -> list[list[tuple[KeysValues, ...]]]:
        """Per work and branch the keys and values of all prompt rows, in two calls of the backbone at most."""
        seen = self._see(works)
        first = [_Part(w.layouts[0], w.start(0), w.known, rows) for w, rows in zip(works, seen, strict=True)]
        made = [[pieces] for pieces in self._run(first)]
        second: list[_Part] = []
        owners: list[list[tuple[KeysValues, ...]]] = []
        for work, rows, pieces in zip(works, seen, made, strict=True):
            for branch in range(1, len(work.layouts)):
                start = work.start(branch)
                second.append(_Part(work.layouts[branch], start, cut_pieces(pieces[0], start), rows))
                owners.append(pieces)
        for owner, found in zip(owners, self._run(second), strict=True):
            owner.append(found)
        return made

    def _see(self, works: Sequence[PromptWork]) -> list[list[ReferenceRows | None]]:
        """Rows of the reference pictures that some branch still has to compute, encoded in one go."""
        wanted: list[Reference] = []
        needed: list[list[bool]] = []
        for work in works:
            starts = [(layout, work.start(branch)) for branch, layout in enumerate(work.layouts)]
            marks = [
                any(layout.references[index].vision.stop > start for layout, start in starts)
                for index in range(len(work.layouts[0].references))
            ]
            needed.append(marks)
            wanted += [work.reference(index) for index, mark in enumerate(marks) if mark]
        rows = iter(self._encoder(wanted))
        return [[next(rows) if mark else None for mark in marks] for marks in needed]

    def _run(self, parts: Sequence[_Part]) -> list[tuple[KeysValues, ...]]:
        busy = [part for part in parts if part.start < part.layout.prompt]
        new = iter(self._forward(busy) if busy else [])
        return [(*part.pieces, next(new)) if part.start < part.layout.prompt else part.pieces for part in parts]

    def _forward(self, parts: Sequence[_Part]) -> list[KeysValues]:
        embeds, pairs, documents = [], [], []
        for part in parts:
            layout, start, stop = part.layout, part.start, part.layout.prompt
            rows = embedded(self._backbone, layout.ids[start:stop])
            place(rows, start, layout, part.references)
            embeds.append(rows)
            pairs.append(positions(layout.grids, start, stop))
            spans = [reference.joint for reference in layout.references]
            documents.append(Document(part.pieces, segments_of(start, stop, spans)))
        plan = DocumentPlan(documents, keep=True)
        self._backbone(torch.cat(embeds), self._rotary(torch.cat(pairs)), plan)
        return plan.new_rows()

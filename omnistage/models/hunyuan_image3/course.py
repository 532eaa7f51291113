"""Where a text that is being written stands: its sections, the tokens that the model's format demands, its end.

Torch-free. After its thinking the text goes on with `<recaption>`, after its last section with the tokens that lead to
the size of the picture, of which the likeliest is taken; each of these happens once.
"""

from __future__ import annotations

from typing import Literal

from omnistage.models.hunyuan_image3.ask import Task
from omnistage.models.hunyuan_image3.vocabulary import Vocabulary
from omnistage.stages.ar.model import Constraint

Section = Literal["think", "recaption", "answer"]


class Course:
    """The generated tokens of one request. `tail` are the tokens between the last section and the size."""

    def __init__(self, vocabulary: Vocabulary, task: Task, tail: list[int], *, chooses_size: bool) -> None:
        self._special = vocabulary.special
        self._sizes = vocabulary.ratios[: len(vocabulary.sizes.sizes)]
        self._task = task
        self._tail = tail
        self._chooses_size = chooses_size
        self._forced: list[int] = []
        self._size_next = task == "ratio"
        self._fired: set[int] = set()
        self._written: list[int] = {
            "think": [self._special.think],
            "think_recaption": [self._special.think],
            "recaption": [self._special.recaption],
        }.get(task, [])
        self.section: Section = "answer" if task in ("answer", "ratio", "") else task.split("_")[0]  # type: ignore[assignment]
        self.ended = False
        self.ratio: int | None = None

    @property
    def constraint(self) -> Constraint | None:
        """What the next token must be."""
        if self._forced:
            return Constraint(forced=self._forced[0])
        return Constraint(allowed=self._sizes, greedy=True) if self._size_next else None

    @property
    def thoughts(self) -> list[int] | None:
        """The text from its first tag to the end of its last section; None while that has not come."""
        if self._task == "ratio":
            return []
        for tag in (self._special.end_recaption, self._special.end_think):
            if tag in self._written:
                return self._written[: self._written.index(tag) + 1]
        return None

    def take(self, token: int) -> None:
        """Takes note of a generated token."""
        self._written.append(token)
        special = self._special
        if self._chooses_size and token in self._sizes:
            self.ratio, self.ended = self._sizes.index(token), True
        elif self._forced:
            del self._forced[0]
            self._size_next = not self._forced and token == special.size
        elif token in (special.end_think, special.end_recaption) and token not in self._fired:
            self._fired.add(token)
            self._end_section(token)
        self.section = self._section_after(token)

    def _end_section(self, tag: int) -> None:
        special, task = self._special, self._task
        if task == "think_recaption" and tag == special.end_think:
            self._forced = [special.recaption]
        elif tag == special.end_think if task == "think" else tag == special.end_recaption:
            self._finish_thoughts()
        elif task == "think" and not self._chooses_size:
            self.ended = True

    def _finish_thoughts(self) -> None:
        if self._task == "answer":
            return
        self._forced = list(self._tail) if self._chooses_size else []
        self.ended = not self._chooses_size

    def _section_after(self, token: int) -> Section:
        special = self._special
        if token == special.think:
            return "think"
        if token == special.recaption:
            return "recaption"
        return "answer" if token in (special.end_think, special.end_recaption) else self.section

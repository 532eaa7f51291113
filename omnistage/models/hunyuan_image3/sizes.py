"""The sizes that the model draws: a table by aspect ratio, whose index is a token. Torch-free.

Table: from a square of the base size, one side grows and the other shrinks by base/16 up to 2:1/2, both ways, kept
within base/2 and 2*base; sorted by height/width. Vocabularies with more ratio tokens append four common sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from omnistage.errors import RequestError

RATIO_TOKENS = 33
_COMMON = ((1024, 768), (1280, 720), (768, 1024), (720, 1280))
_STEPS = 16


class Size(NamedTuple):
    """Pixels."""

    height: int
    width: int


@dataclass(frozen=True)
class SizeTable:
    """`sizes[i]` is what the token `<img_ratio_i>` stands for."""

    sizes: tuple[Size, ...]

    @classmethod
    def of(cls, base: int, *, extended: bool) -> SizeTable:
        """`extended`: with the common sizes whose ratio the table lacks."""
        step, low, high = base // _STEPS, base // 2, base * 2
        found = {Size(base, base)}
        for turn in (1, -1):
            height, width = base, base
            while low < min(height, width) or max(height, width) < high:
                height = min(max(height + turn * step, low), high)
                width = min(max(width - turn * step, low), high)
                found.add(Size(height // 16 * 16, width // 16 * 16))
        sizes = sorted(found, key=lambda size: size.height / size.width)
        if extended:
            ratios = {size.height / size.width for size in sizes}
            sizes += [Size(*common) for common in _COMMON if common[0] / common[1] not in ratios]
        return cls(tuple(sizes))

    def index_of(self, height: int, width: int) -> int:
        """The entry whose ratio is nearest; the first of equals."""
        ratio = height / width
        return min(
            range(len(self.sizes)), key=lambda index: abs(self.sizes[index].height / self.sizes[index].width - ratio)
        )

    def nearest(self, height: int, width: int) -> Size:
        return self.sizes[self.index_of(height, width)]


def parse_size(size: str) -> tuple[int, int]:
    """(height, width) of "WIDTHxHEIGHT". Raises RequestError naming `size`."""
    width, by, height = size.partition("x")
    sides = (width, height)
    if not by or not all(side.isascii() and side.isdecimal() and len(side) <= 5 and int(side) for side in sides):
        raise RequestError(f"size {size[:32]!r} is neither auto nor WIDTHxHEIGHT", param="size")
    return int(height), int(width)

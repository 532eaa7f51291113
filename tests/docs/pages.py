"""The Markdown pages of the project, taken apart into blocks of code.

A comment in front of a block tells the tests what the reader sees from the text:
`<!-- server: omnistage serve echo3 -->` (to which server the blocks from here on talk), `<!-- server: stopped -->`,
`<!-- file: NAME -->` (the block is the content of that file), `<!-- model: NAME -->` (whose deploy file it is),
`<!-- post: /v1/... -->` (the block is a body of that route), `<!-- not run: REASON -->`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LANGUAGES = ("python", "bash", "json", "yaml", "text")
_NOTE = re.compile(r"<!-- (server|file|model|post|not run): (.*?) -->")


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its fence."""

    page: str
    line: int
    language: str
    text: str
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: str, text: str) -> list[Block]:
    """All blocks of a page. Raises AssertionError for fences without end and comments without block."""
    fences = [line for line in text.splitlines() if line.startswith("```")]
    assert len(fences) % 2 == 0, f"{page}: a block has no end"
    blocks: list[Block] = []
    notes: dict[str, str] = {}
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if found := _NOTE.fullmatch(line.strip()):
            notes[found[1]] = found[2]
        elif line.startswith("```"):
            body = [inner for _, inner in takewhile(lambda row: row[1] != "```", lines)]
            blocks.append(Block(page, number, line[3:].strip(), "\n".join(body) + "\n", notes))
            notes = {}
    assert not notes, f"{page}: {notes} is in front of no block"
    return blocks


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(name_of(page), page.read_text())]

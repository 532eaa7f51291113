"""Every block of code in the README and in docs/ does what its page says."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from omnistage.entrypoints.cli.main import build_parser
from omnistage.errors import ConfigError
from tests.docs.pages import LANGUAGES, PAGES, ROOT, Block, all_blocks, blocks_of, name_of
from tests.docs.running import Reader, Servers

BLOCKS = all_blocks()
COMMAND = re.compile(r"^(omnistage|curl|make|pip|docker|python) ", re.MULTILINE)
# Blocks that start a package manager, a container or the build of the project itself.
MOST_NOT_RUN = 3


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        servers = Servers(tmp_path_factory.mktemp("servers"), stack)
        yield servers
        servers.close()


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks_of(name_of(p), p.read_text())], ids=name_of)
def test_page_does_what_it_says(page: Path, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    reader = Reader(tmp_path, servers)
    for block in blocks_of(name_of(page), page.read_text()):
        try:
            reader.read(block)
        except BaseException as error:
            error.add_note(f"in the block at {block.where}")
            raise


def test_every_block_names_its_language_and_no_command_hides_as_text() -> None:
    assert [block.where for block in BLOCKS if block.language not in LANGUAGES] == []
    hidden = [b.where for b in BLOCKS if b.language == "text" and COMMAND.search(b.text) and "[" not in b.text]
    assert hidden == []


def test_few_blocks_are_not_run_and_they_parse() -> None:
    left_out = [block for block in BLOCKS if "not run" in block.notes]
    assert len(left_out) <= MOST_NOT_RUN
    for block in left_out:
        assert block.language == "bash"
        subprocess.run(["bash", "-n", "-c", block.text], check=True)


def parser_of(words: list[str]) -> argparse.ArgumentParser:
    """The parser of the (sub)command that the words begin with."""
    parser = build_parser()
    for word in words:
        choices = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not choices or word not in choices[0]:
            break
        parser = choices[0][word]
    return parser


def test_synopses_name_commands_and_options_that_exist() -> None:
    lines = [(b.where, line) for b in BLOCKS for line in b.text.splitlines() if line.startswith("omnistage ")]
    assert len(lines) > 10
    for where, line in lines:
        for words in ([line.split()[1]], line.split()[1:]):
            parser = parser_of([alternative.split("|")[0] for alternative in words])
        assert parser.prog != "omnistage", (where, line)
        options = {option for action in parser._actions for option in action.option_strings}
        assert set(re.findall(r"(?<=[\s\[])--[a-z-]+", line.partition("#")[0])) <= options, (where, line)


def test_make_targets_of_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for block in BLOCKS for name in re.findall(r"^make ([a-z]+)", block.text, re.MULTILINE)}
    assert named
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:omnistage|tests|docs|examples|deploy)/[\w./-]+)`", text)
    missing = [link for link in links if link and not (page.parent / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()]
    assert missing == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[\w]+\.md)", (ROOT / "README.md").read_text()))
    assert linked == {name_of(page) for page in PAGES[1:]}


@pytest.mark.parametrize(
    ("language", "text", "error"),
    [
        ("python", "assert 1 == 2\n", AssertionError),
        ("bash", "false | true\n", AssertionError),
        ("json", '{"a": }\n', ValueError),
        ("yaml", "stages: {thinker: {wings: 2}}\n", ConfigError),
        ("yaml", "a: [\n", (ConfigError, yaml.YAMLError)),
    ],
)
def test_block_that_is_wrong_is_found(
    language: str, text: str, error: type[Exception] | tuple[type[Exception], ...], tmp_path: Path
) -> None:
    with ExitStack() as stack, pytest.raises(error):
        Reader(tmp_path, Servers(tmp_path, stack)).read(Block("page", 1, language, text))


def test_comments_belong_to_the_next_block_and_fences_must_close() -> None:
    text = "<!-- file: a.py -->\n\n```python\nx = 1\n```\n\n```json\n{}\n```\n"
    assert [block.notes for block in blocks_of("page", text)] == [{"file": "a.py"}, {}]
    with pytest.raises(AssertionError, match="no end"):
        blocks_of("page", "```bash\nls\n")
    with pytest.raises(AssertionError, match="no block"):
        blocks_of("page", "<!-- model: x -->\n")

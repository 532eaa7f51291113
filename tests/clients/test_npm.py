"""A missing network skips tests of npm packages; nothing else does."""

from __future__ import annotations

import pytest

from tests.clients.npm import unreachable


@pytest.mark.parametrize(
    ("code", "skips"), [("ECONNREFUSED", True), ("EAI_AGAIN", True), ("EINTEGRITY", False), ("E404", False)]
)
def test_only_what_npm_says_of_the_network_skips(code: str, skips: bool) -> None:
    assert unreachable(f"npm warn config old\nnpm error code {code}\nnpm error syscall connect\n") is skips

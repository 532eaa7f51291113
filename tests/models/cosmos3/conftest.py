"""Checkpoints and references, made once per run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.models.cosmos3.asks import ask_of
from tests.models.cosmos3.tiny import Reference, Tiny, make, reference

Make = Callable[[str], Tiny]
Refer = Callable[[str, str], Reference]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[str, Tiny] = {}

    def get(kind: str) -> Tiny:
        if kind not in made:
            made[kind] = make(kind, tmp_path_factory.mktemp("cosmos3") / kind)
        return made[kind]

    return get


@pytest.fixture(scope="session")
def refer(tiny: Make) -> Refer:
    known: dict[tuple[str, str], Reference] = {}

    def get(kind: str, name: str) -> Reference:
        if (kind, name) not in known:
            known[kind, name] = reference(tiny(kind), ask_of(kind, name))
        return known[kind, name]

    return get

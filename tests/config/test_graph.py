from dataclasses import dataclass

import pytest

from omnistage.config.graph import check_graph
from omnistage.config.model import EdgeSpec, StageSpec, Variant
from omnistage.errors import ConfigError


def stage(name: str, takes: str = "x", gives: str = "x") -> StageSpec:
    return StageSpec(name=name, kind="generation", component="m:f", inputs={"i": takes}, outputs={"o": gives})


def edges(*pairs: str) -> tuple[EdgeSpec, ...]:
    return tuple(EdgeSpec(*pair.split(">")) for pair in pairs)


@dataclass
class Case:
    variant: Variant
    message: str


BAD = [
    Case(Variant(stages=(stage("a"), stage("a")), edges=edges("client.i>a.i", "a.o>client.o")), "used twice"),
    Case(Variant(stages=(stage("client"),), edges=edges("client.i>client.i")), "reserved"),
    Case(Variant(stages=(stage("a"),), edges=edges("client.i>a.i", "b.o>client.o")), r"'b.o' is no output port"),
    Case(Variant(stages=(stage("a"),), edges=edges("client.i>a.z", "a.o>client.o")), r"'a.z' is no input port"),
    Case(Variant(stages=(stage("a"),), edges=edges("a.o>client.o")), "nothing can enter"),
    Case(Variant(stages=(stage("a"),), edges=edges("client.i>a.i")), "no final output"),
    Case(
        Variant(stages=(stage("a"), stage("b", takes="y")), edges=edges("client.i>a.i", "a.o>b.i", "b.o>client.o")),
        "gives 'x', b.i takes 'y'",
    ),
    Case(
        Variant(stages=(stage("a"), stage("b")), edges=edges("client.i>a.i", "a.o>b.i", "b.o>a.i", "b.o>client.o")),
        "cycle through a, b",
    ),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.message)
def test_bad_graph_is_named(case: Case) -> None:
    with pytest.raises(ConfigError, match=case.message):
        check_graph("p", case.variant)


def test_good_graph_passes() -> None:
    check_graph("p", Variant(stages=(stage("a"), stage("b")), edges=edges("client.i>a.i", "a.o>b.i", "b.o>client.o")))

"""A stage as its user writes it: a function or a class, typed ports, a chunk rule and a batch rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import msgspec
import numpy as np

from omnistage.errors import ConfigError
from omnistage.kit.ports import Port, Value

# A function or callable object; or a class, of which the process that owns the stage makes one.
Target = Callable[..., Any]


class State(dict[str, Any]):
    """What a stage keeps of one request between calls."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Part:
    """One request's share of a call: `part["port"]` is what is new of an input (all of it for a whole one).

    `final` is set in the last call of a request. `state` is kept from call to call; when a call raises, the changes
    that it made are undone. `rng` draws from the request's seed. `params` are the stage's parameters.
    """

    inputs: Mapping[str, Value]
    state: State
    rng: np.random.Generator
    _: KW_ONLY
    final: bool
    params: Mapping[str, Any]
    seed: int

    def __getitem__(self, port: str) -> Any:
        return self.inputs[port]


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """See `stage`."""

    name: str
    run: Target
    takes: dict[str, Port]
    gives: dict[str, Port]
    chunk: int = 0
    batch: int = 1
    params: dict[str, int | float | bool | str] = {}

    @property
    def paced(self) -> str | None:
        """The input whose size the chunk rule counts; None when every call gets whole inputs."""
        return next((name for name, port in self.takes.items() if not port.whole), None) if self.chunk else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What was decorated, as it was."""
        return self.run(*args, **kwargs)

    def make(self) -> Target:
        """What is called: the function itself, or a new object of the class."""
        made: Any = self.run
        target: Target = made() if inspect.isclass(self.run) else made
        return target


def stage(
    *,
    takes: Mapping[str, Port],
    gives: Mapping[str, Port],
    chunk: int = 0,
    batch: int = 1,
    params: Mapping[str, int | float | bool | str] | None = None,
    name: str | None = None,
) -> Callable[[Target], Stage]:
    """Makes a stage of a function or a class (a torch.nn.Module, for example).

    Chunk rule: a call gets `chunk` characters or rows of its one input that is not whole, the last call what is left; 0
    waits for whole inputs, in one call. Batch rule: with `batch` 1 it is called with a `Part`; with more it is called
    with a list of up to so many and returns a list. For each it returns an array or text for the one output, or a
    mapping of port to that, or None. `params` are the request parameters that it reads, with their defaults. Raises
    ConfigError for a declaration that cannot be.
    """
    if not takes or not gives:
        raise ConfigError("stage: declare at least one input and one output port")
    if chunk < 0 or batch < 1:
        raise ConfigError(f"stage: chunk {chunk} and batch {batch}: chunk is at least 0, batch at least 1")
    streamed = [port for port, spec in takes.items() if not spec.whole]
    if chunk and len(streamed) != 1:
        raise ConfigError(
            f"stage: with chunk={chunk} one input is streamed, not {len(streamed)}; set whole=True on others"
        )

    def made(target: Target) -> Stage:
        given = name or _name_of(target)
        return Stage(
            name=given,
            run=target,
            takes=dict(takes),
            gives=dict(gives),
            chunk=chunk,
            batch=batch,
            params=dict(params or {}),
        )

    return made


def _name_of(target: Target) -> str:
    if inspect.isfunction(target) or inspect.isclass(target):
        return target.__name__.lower()
    return type(target).__name__.lower()

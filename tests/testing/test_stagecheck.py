"""Stages with one mistake each: `check_stage` finds it and names the promise; stages without pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.kit import Array, Audio, Part, Stage, Text, stage
from omnistage.testing import BrokenPromise, Example, check_stage

FRAMES = Array("frames", "float32", (None, 3))
LEVELS = Array("levels", "float32", (None,))
CHUNK = 4
_chance = np.random.default_rng(7)
LONG, SHORT = (_chance.normal(size=(rows, 3)).astype(np.float32) for rows in (13, 6))
EXAMPLES = [{"frames": LONG}, {"frames": SHORT}, {"frames": LONG[:9]}]

Rows = np.ndarray[Any, np.dtype[np.float32]]


def of_parts(function: Callable[..., Any], **changes: Any) -> Stage:
    """A stage from frames to levels that is called with up to four requests."""
    given: dict[str, Any] = {"takes": {"frames": FRAMES}, "gives": {"levels": LEVELS}, "chunk": CHUNK, "batch": 4}
    return stage(**given | changes)(function)


def of_part(function: Callable[..., Any], **changes: Any) -> Stage:
    return of_parts(function, batch=1, **changes)


# -- stages without a mistake


def sums(parts: list[Part]) -> list[Rows]:
    return [part["frames"].sum(1) for part in parts]


def smooth(part: Part) -> Rows:
    """Mean of each level and the one before."""
    levels = np.concatenate(([part.state.get("last", 0.0)], part["frames"].sum(1)))
    part.state["last"] = levels[-1]
    return ((levels[1:] + levels[:-1]) / 2).astype(np.float32)


def noisy(part: Part) -> Rows:
    noise = part.rng.normal(size=len(part["frames"])).astype(np.float32)
    return np.asarray(part["frames"].sum(1) * part.params["gain"] + noise, np.float32)


class Layer(torch.nn.Module):
    """Levels of all requests in one call of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(self.linear.weight, 0.5)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, parts: list[Part]) -> list[torch.Tensor]:
        rows = [torch.from_numpy(part["frames"].copy()) for part in parts]
        return list(self.linear(torch.cat(rows))[:, 0].split([len(each) for each in rows]))


def loud_text(part: Part) -> dict[str, Any]:
    text = part["text"].upper()
    return {"loud": text, "beeps": np.ones((1, 10 * len(text)), np.float32) * part["level"][0]}


LEVEL = Array("level", "float32", (1,), whole=True)
LOUD = stage(
    takes={"text": Text(), "level": LEVEL}, gives={"loud": Text(), "beeps": Audio(8000)}, chunk=3, name="loud"
)(loud_text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "good", [of_parts(sums), of_parts(sums, chunk=0), of_part(smooth), of_parts(Layer)], ids=lambda good: good.name
)
def test_stage_without_a_mistake_passes(good: Stage) -> None:
    check_stage(good, EXAMPLES)


def test_chance_from_the_seed_and_parameters_pass() -> None:
    examples = [Example(inputs=each, params={"gain": 2.0}, seed=seed) for seed, each in enumerate(EXAMPLES)]
    check_stage(of_part(noisy, params={"gain": 1.0}), examples)


def test_stage_of_several_ports_passes() -> None:
    texts = ["several words in a row", "x", ""]
    check_stage(LOUD, [{"text": text, "level": np.full(1, i, np.float32)} for i, text in enumerate(texts)])


# -- stages with one mistake each


def forgets_the_border(part: Part) -> Rows:
    levels = np.concatenate(([0.0], part["frames"].sum(1)))
    return ((levels[1:] + levels[:-1]) / 2).astype(np.float32)


def drops_the_short_rest(part: Part) -> Rows:
    rows = part["frames"]
    return rows.sum(1) if len(rows) >= CHUNK else rows.sum(1)[:0]


def scales_by_the_batch(parts: list[Part]) -> list[Rows]:
    peak = max(float(np.abs(part["frames"]).max(initial=0.0)) for part in parts)
    return [part["frames"].sum(1) / np.float32(peak or 1) for part in parts]


def keeps_the_padding(parts: list[Part]) -> list[Rows]:
    length = max(len(part["frames"]) for part in parts)
    return [np.pad(part["frames"].sum(1), (0, length - len(part["frames"]))) for part in parts]


def returns_in_order_of_size(parts: list[Part]) -> list[Rows]:
    return [part["frames"].sum(1) for part in sorted(parts, key=lambda part: -len(part["frames"]))]


class CountsItsCalls:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, part: Part) -> Rows:
        self.calls += 1
        return np.asarray(part["frames"].sum(1) + self.calls, np.float32)


class CountsBeforeItFails:
    """The answer depends on how many calls are going on: a failed one is never taken back."""

    def __init__(self) -> None:
        self.open = 0

    def __call__(self, parts: list[Part]) -> list[Rows]:
        self.open += 1
        levels = [np.asarray(part["frames"].sum(1) * self.open, np.float32) for part in parts]
        self.open -= 1
        return levels


class OneStateForAll:
    """The value before a request's first is that of whoever was served last, and 0 when a request has ended."""

    def __init__(self) -> None:
        self.last = 0.0

    def __call__(self, part: Part) -> Rows:
        levels = np.concatenate(([self.last], part["frames"].sum(1)))
        self.last = 0.0 if part.final else levels[-1]
        return ((levels[1:] + levels[:-1]) / 2).astype(np.float32)


def draws_without_the_seed(part: Part) -> Rows:
    return np.asarray(part["frames"].sum(1) + np.random.default_rng().normal(), np.float32)


def reads_the_time(part: Part) -> Rows:
    return np.asarray(part["frames"].sum(1) + time.perf_counter() % 1, np.float32)


def gives_other_numbers(part: Part) -> Any:
    return part["frames"].sum(1).astype(np.float64)


def gives_an_unknown_port(part: Part) -> Any:
    return {"levels": part["frames"].sum(1), "extra": part["frames"]}


def gives_other_shapes(part: Part) -> Any:
    return part["frames"]


def gives_too_few(parts: list[Part]) -> list[Rows]:
    return [part["frames"].sum(1) for part in parts[:1]]


def writes_into_its_input(part: Part) -> Rows:
    part["frames"][:] *= 2
    return np.asarray(part["frames"].sum(1), np.float32)


def writes_behind_the_lock_of_its_input(part: Part) -> Rows:
    """As tensors do that share an input's memory."""
    part["frames"].flags.writeable = True
    part["frames"][:] *= 2
    return np.asarray(part["frames"].sum(1), np.float32)


def divides_by_nothing(part: Part) -> Rows:
    return np.asarray(part["frames"].sum(1) * np.float32(np.nan), np.float32)


def waits_for_ever(part: Part) -> Rows:
    threading.Event().wait()
    return np.asarray(part["frames"].sum(1), np.float32)


class ReusesItsBuffer:
    def __init__(self) -> None:
        self.buffer = np.zeros(64, np.float32)

    def __call__(self, part: Part) -> Rows:
        count = len(part["frames"])
        self.buffer[:count] = part["frames"].sum(1)
        return self.buffer[:count]


class KeepsEveryPart:
    def __init__(self) -> None:
        self.seen: list[Part] = []

    def __call__(self, part: Part) -> Rows:
        self.seen.append(part)
        return np.asarray(part["frames"].sum(1), np.float32)


def starts_a_thread(part: Part) -> Rows:
    if part.final:
        threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()
    return np.asarray(part["frames"].sum(1), np.float32)


def swallows_errors(parts: list[Part]) -> list[Rows]:
    try:
        return sums(parts)
    except RuntimeError:
        return [np.zeros(0, np.float32) for _ in parts]


MISTAKES = [
    (of_part(forgets_the_border), "streaming: example 0 in chunks of 2|streaming: example 0 whole"),
    (of_part(drops_the_short_rest), "streaming: example 0 .*: output levels has shape"),
    (of_parts(scales_by_the_batch, chunk=0), "batching: example . together .*: output levels differs by"),
    (of_parts(keeps_the_padding), "batching: example . together .*: output levels has shape"),
    (of_parts(returns_in_order_of_size), "batching: example . together"),
    (of_part(CountsItsCalls), "replay: example 0 asked again: output levels has other values"),
    (of_parts(CountsBeforeItFails), "isolation: example . beside a request that fails"),
    (of_part(OneStateForAll), "batching: example . together"),
    (of_part(draws_without_the_seed), "replay: example 0 asked again"),
    (of_part(reads_the_time), "replay: example 0 asked again"),
    (of_part(gives_other_numbers), "ports: example 0: .*output levels: dtype float64 where float32 is declared"),
    (of_part(gives_an_unknown_port), "ports: example 0: .*'extra', which is no output port"),
    (of_part(gives_other_shapes), r"ports: example 0: .*output levels: shape \(4, 3\) where \(None,\) is declared"),
    (of_parts(gives_too_few), "batching: requests fail together .* called with 2 requests and returned 1 results"),
    (of_part(writes_into_its_input), "hand-over: example 0: the stage writes into its input"),
    (of_part(writes_behind_the_lock_of_its_input), "hand-over: the stage writes into its input"),
    (of_part(divides_by_nothing), "ports: example 0: output levels holds NaN"),
    (of_part(ReusesItsBuffer), "hand-over: an array that was given out is changed later"),
    (of_part(KeepsEveryPart), "abort: the stage still holds .* parts or states"),
    (of_part(starts_a_thread), "abort: threads that the stage started"),
    (of_parts(swallows_errors), "isolation: a request whose input raises when it is read ends without an error"),
]


@pytest.mark.parametrize(("bad", "message"), MISTAKES, ids=[bad.name for bad, _ in MISTAKES])
def test_mistake_is_found_and_the_promise_is_named(bad: Stage, message: str) -> None:
    with pytest.raises(BrokenPromise, match=message):
        check_stage(bad, EXAMPLES)


def test_call_that_never_returns_is_a_broken_promise_and_no_hang() -> None:
    with pytest.raises(BrokenPromise, match="progress: a call has not returned"):
        check_stage(of_part(waits_for_ever), EXAMPLES, limit_s=0.2)


def test_one_example_is_not_enough() -> None:
    with pytest.raises(ValueError, match="at least two"):
        check_stage(of_parts(sums), EXAMPLES[:1])

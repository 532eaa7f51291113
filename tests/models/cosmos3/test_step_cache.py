"""Step caches on the packed denoiser: whose steps are left out, what the others notice, the stage default."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from omnistage.payload import Array
from tests.models.cosmos3.asks import ask_of
from tests.models.cosmos3.conftest import Make
from tests.models.cosmos3.test_stage import Bench

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers.*")]

FIXED = {"kind": "fixed_budget", "runs": 4}
CHANGE = {"kind": "relative_change", "threshold": 0.3}


class Answers:
    """What a bench gave: arrays by (request, port), skipped steps by request."""

    def __init__(self, bench: Bench) -> None:
        outputs = bench.run()
        self.arrays: dict[tuple[str, str], Array] = {
            (emission.request_id, emission.port): emission.payload[emission.port]
            for output in outputs
            for emission in output.emissions
            if emission.port in emission.payload.tensors
        }
        done = [finished for output in outputs for finished in output.finished]
        self.skipped = {finished.request_id: finished.metrics.extra["skipped_steps"] for finished in done}


def answers(tiny: Make, asks: dict[str, dict[str, Any]], **deploy: Any) -> Answers:
    bench = Bench(tiny("base").folder, **deploy)
    for name, ask in asks.items():
        bench.add(name, ask)
    made = Answers(bench)
    bench.engine.close()
    return made


def long(name: str, steps: int = 9, **more: Any) -> dict[str, Any]:
    return ask_of("base", name) | {"num_inference_steps": steps} | more


def test_other_requests_of_the_batch_get_the_same_bits(tiny: Make) -> None:
    others = {"policy": long("policy_guided"), "sound": long("sound", 7), "image": long("image", 5)}
    plain = answers(tiny, {"cached": long("video")} | others)
    cached = answers(tiny, {"cached": long("video", step_cache=FIXED)} | others)
    assert cached.skipped == {"cached": 5.0, "policy": 0.0, "sound": 0.0, "image": 0.0}
    for key, array in plain.arrays.items():
        assert np.array_equal(array, cached.arrays[key]) == (key[0] != "cached"), key


def test_a_guided_request_skips_in_both_branches_and_computes_no_rows_then(tiny: Make) -> None:
    bench = Bench(tiny("base").folder)
    rows: list[int] = []
    first = bench.model._parts.denoiser.transformer.layers[0].layers[0]  # type: ignore[attr-defined]
    first.register_forward_hook(lambda _module, args, _output: rows.append(len(args[1])))
    bench.add("a", long("video", step_cache=FIXED))
    made = Answers(bench)
    bench.engine.close()
    assert made.skipped == {"a": 5.0}
    assert len(rows) == 4
    assert len(set(rows)) == 1


@pytest.mark.parametrize("name", ["transfer_intervals", "transfer_chunks", "sound", "forward_dynamics"])
def test_each_run_and_each_branch_has_its_own_memory(tiny: Make, name: str) -> None:
    """A budget of all steps skips none; the bits are those of a request without a cache."""
    everything = {"kind": "fixed_budget", "runs": 1000}
    plain, cached = (answers(tiny, {"a": long(name, 4, **more)}) for more in ({}, {"step_cache": everything}))
    assert cached.skipped == {"a": 0.0}
    for key, array in plain.arrays.items():
        assert np.array_equal(array, cached.arrays[key])


def test_relative_change_decides_by_the_request(tiny: Make) -> None:
    made = answers(
        tiny,
        {
            "never": long("video", 8, step_cache={"kind": "relative_change", "threshold": 0.0}),
            "always": long("video", 8, step_cache={"kind": "relative_change", "threshold": 100.0}),
        },
    )
    assert made.skipped["never"] < made.skipped["always"] == 6.0


def test_the_stage_default_holds_unless_the_request_says_otherwise(tiny: Make) -> None:
    made = answers(
        tiny,
        {"default": long("video"), "own": long("video", step_cache=CHANGE), "none": long("video", step_cache=None)},
        **{"stages.diffusion.step_cache": "fixed_budget", "stages.diffusion.step_cache_runs": 3},
    )
    assert (made.skipped["default"], made.skipped["none"]) == (6.0, 0.0)
    assert made.skipped["own"] != 6.0


def test_memory_is_released_with_the_last_step(tiny: Make) -> None:
    bench = Bench(tiny("base").folder)
    bench.add("a", long("video", 4, step_cache=FIXED))
    state = bench.engine._entries["a"].state
    for _ in range(2):
        bench.engine.step()
    assert all(isinstance(memory.added, torch.Tensor) for memory in state.memories.values())
    bench.run()
    bench.engine.close()
    assert [memory.added for memory in state.memories.values()] == [None, None]

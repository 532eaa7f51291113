"""The diffusion engine over toydit on a virtual clock: calls, phases, emissions, faults."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.config.model import StageConfig
from omnistage.errors import ConfigError, IntegrityError, RequestError, StageError
from omnistage.payload import MultimodalPayload
from omnistage.request import FinishReason
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.diffusion.engine import step_limits
from omnistage.stages.diffusion.model import Capabilities
from omnistage.testing.toydit_stage import ToyParams, picture
from tests.stages.diffusion.fakes import Bench, finished

PLAIN = {"height": 8, "width": 8, "guidance_scale": 1.0}


def test_ten_mixed_requests_cost_as_many_calls_as_ticks_and_not_the_sum_of_their_steps() -> None:
    bench = Bench()
    steps = [3, 7, 5, 4, 6, 3, 8, 5, 4, 6]
    images: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = {}
    for seed, count in enumerate(steps):
        bench.add(seed, steps=count, side=8 * (1 + seed % 3))
        for emission in bench.tick().emissions:
            images[emission.request_id] = emission.payload["image"]
    for output in bench.run():
        images |= {emission.request_id: emission.payload["image"] for emission in output.emissions}
    assert len(bench.model.calls) == max(seed + count for seed, count in enumerate(steps)) == 15
    assert bench.engine.counters()["transformer_calls"] == bench.engine.counters()["ticks"] == 15
    assert bench.engine.counters()["steps"] == sum(steps)
    for seed, count in enumerate(steps):
        side = 8 * (1 + seed % 3)
        params = ToyParams(height=side, width=side, num_inference_steps=count, guidance_scale=1.0)
        right = picture(f"prompt {seed}", params, seed)
        assert np.abs(images[f"r{seed}"].astype(int) - right).max() <= 1


def test_a_request_waits_for_its_input() -> None:
    bench = Bench()
    bench.engine.add(StageRequest(request_id="r1", seed=1, inputs=("text",), outputs=("image",), params=PLAIN))
    assert not bench.engine.has_work()
    bench.feed(1)
    assert bench.engine.has_work()
    assert finished(bench.run()) == ["r1"]


def test_newcomers_of_one_tick_are_encoded_together_when_their_turn_comes() -> None:
    bench = Bench(max_num_seqs=2)
    for seed in (1, 2, 3):
        bench.add(seed, steps=2)
    bench.run()
    assert bench.model.encodes == [[1, 2], [3]]


def test_decoding_runs_beside_the_next_steps() -> None:
    bench = Bench()
    bench.add(1, steps=1)
    bench.add(2, steps=3)
    bench.engine.step()
    assert len(bench.thread.queue) == 1  # request 1 is with the decode thread now
    bench.engine.step()
    assert bench.model.calls == [[1, 2], [2]]
    bench.thread.run()
    assert bench.wakes == 1
    assert finished([bench.engine.step()]) == ["r1"]
    bench.run()


def test_requests_of_one_shape_are_decoded_together_and_others_apart() -> None:
    bench = Bench()
    for seed, side in ((1, 8), (2, 16), (3, 8)):
        bench.add(seed, steps=2, side=side)
    assert sorted(finished(bench.run())) == ["r1", "r2", "r3"]
    assert bench.model.decodes == [[1, 3], [2]]


def test_engine_sleeps_while_only_the_decode_thread_works() -> None:
    bench = Bench()
    bench.add(1, steps=1)
    bench.engine.step()
    assert not bench.engine.has_work()
    bench.thread.run()
    assert bench.engine.has_work()
    bench.run()


def test_progress_counts_steps_and_closes_its_port_before_the_end() -> None:
    bench = Bench()
    bench.add(1, steps=3, ports=("image", "progress"))
    emissions = [emission for output in bench.run() for emission in output.emissions]
    progress = [e for e in emissions if e.port == "progress"]
    assert [e.payload.meta for e in progress] == [{"step": i, "steps": 3} for i in (1, 2, 3)] + [{}]
    assert [e.final for e in progress] == [False, False, False, True]
    assert [e.final for e in emissions if e.port == "image"] == [True]


def test_partial_pictures_come_evenly_from_the_decode_thread() -> None:
    bench = Bench()
    bench.add(1, steps=6, ports=("image", "partial"), partial_images=2)
    partial = [e for output in bench.run() for e in output.emissions if e.port == "partial"]
    assert [e.payload.meta.get("step") for e in partial] == [2, 4, None]
    assert partial[0].payload["image"].shape == (1, 8, 8, 3)
    assert [e.final for e in partial] == [False, False, True]


def test_aborted_request_takes_no_further_step_and_its_state_is_closed() -> None:
    bench = Bench()
    bench.add(1, steps=9)
    bench.add(2, steps=3)
    bench.tick()
    bench.engine.abort("r1")
    assert bench.model.closed == [1]
    assert finished(bench.run()) == ["r2"]
    assert bench.model.calls == [[1, 2], [2], [2]] or bench.model.calls == [[2, 1], [2], [2]]
    assert bench.engine.counters()["aborted"] == 1


def test_request_aborted_while_it_is_decoded_is_closed_after_the_decode() -> None:
    bench = Bench()
    bench.add(1, steps=1)
    bench.engine.step()
    bench.engine.abort("r1")
    assert bench.model.closed == []
    assert bench.engine.request_ids() == frozenset()
    bench.thread.run()
    assert finished(bench.run()) == []
    assert bench.model.closed == [1]


def test_held_request_goes_on_denoising_but_is_not_decoded() -> None:
    bench = Bench()
    bench.add(1, steps=2, ports=("image", "progress"))
    bench.engine.hold("r1", True)
    outputs = bench.run()
    assert [e for output in outputs for e in output.emissions] == []
    assert len(bench.model.calls) == 2
    bench.engine.hold("r1", False)
    assert finished(bench.run()) == ["r1"]


def test_failing_step_leaves_every_request_as_it_was_and_the_culprit_can_be_found() -> None:
    bench = Bench()
    for seed in (1, 2, 3):
        bench.add(seed, steps=2)
    bench.model.poison_step = {2}
    with pytest.raises(ValueError, match="poisoned step"):
        bench.tick()
    assert bench.engine.counters()["steps"] == 0
    for name in ("r1", "r3"):
        bench.tick(frozenset({name}))
    with pytest.raises(ValueError, match="poisoned step"):
        bench.tick(frozenset({"r2"}))
    bench.engine.abort("r2")
    assert sorted(finished(bench.run())) == ["r1", "r3"]


def test_failing_decode_of_a_batch_fails_the_culprit_only() -> None:
    bench = Bench()
    for seed in (1, 2, 3):
        bench.add(seed, steps=1)
    bench.model.poison_decode = {2}
    outputs = [bench.tick()]
    failed: list[str] = []
    while bench.engine.has_work():
        try:
            outputs.append(bench.tick())
        except ValueError:
            for name in sorted(bench.engine.request_ids()):
                try:
                    outputs.append(bench.tick(frozenset({name})))
                except ValueError:
                    failed.append(name)
                    bench.engine.abort(name)
    assert failed == ["r2"]
    assert sorted(finished(outputs)) == ["r1", "r3"]
    assert sorted(bench.model.closed) == [1, 2, 3]
    bench.engine.check_integrity()


def test_request_without_steps_is_decoded_at_once() -> None:
    bench = Bench()
    bench.add(1, steps=0)
    assert finished(bench.run()) == ["r1"]
    assert bench.model.calls == []


def test_different_groups_never_share_a_call() -> None:
    bench = Bench()
    bench.model.groups = {1: "base", 2: "other", 3: "base"}
    for seed in (1, 2, 3):
        bench.add(seed, steps=2)
    bench.run()
    assert {tuple(sorted(call)) for call in bench.model.calls} == {(1, 3), (2,)}


def test_request_policy_admits_nobody_before_the_batch_has_ended() -> None:
    bench = Bench(options={"batching": "request"})
    bench.add(1, steps=2)
    bench.tick()
    bench.add(2, steps=1)
    bench.run()
    assert bench.model.calls == [[1], [1], [2]]


def test_phase_times_and_counts_are_reported() -> None:
    bench = Bench()
    bench.add(1, steps=3, side=16)
    (end,) = [end for output in bench.run() for end in output.finished]
    assert end.reason == FinishReason.STOP
    extra = end.metrics.extra
    assert (extra["steps"], extra["ticks"], extra["transformer_calls"], extra["pixels"]) == (3, 3, 3, 256)
    assert (extra["denoise_s"], extra["decode_s"], extra["encode_s"]) == (12.0, 1.0, 0.0)  # 4 rows, a second each
    assert end.metrics.compute_s == 13.0


def test_queue_time_counts_from_ready_to_first_turn() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(1, steps=2)
    bench.tick()
    bench.add(2, steps=2)
    ends = [end for output in bench.run() for end in output.finished]
    assert [(end.request_id, end.metrics.queue_s >= 1.0) for end in ends] == [("r1", False), ("r2", True)]


def test_newcomer_that_turns_out_too_large_waits_a_step() -> None:
    bench = Bench(token_budget=10)
    sizes = {1: 4, 2: 4}
    bench.model.rows = lambda state: sizes[state.request.seed]  # type: ignore[method-assign]
    bench.add(1, steps=1)
    bench.add(2, steps=1)
    sizes[2] = 9
    bench.run()
    assert bench.model.calls == [[1], [2]]


def test_bad_parameters_are_refused_and_nothing_is_kept() -> None:
    bench = Bench()
    for params, name in (({"widht": 8}, "widht"), ({"width": 9}, "width"), ({"num_inference_steps": "x"}, "num_infer")):
        with pytest.raises(RequestError) as error:
            bench.engine.add(StageRequest(request_id="r1", outputs=("image",), params=params))
        assert str(error.value.info.param).startswith(name)
    assert bench.engine.request_ids() == frozenset()


def test_an_id_in_use_is_refused() -> None:
    bench = Bench()
    bench.add(1)
    with pytest.raises(StageError, match="already"):
        bench.add(1)


def test_refused_chunk_is_released_by_the_engine() -> None:
    bench = Bench()
    bench.add(1)
    released: list[str] = []

    def refuse(state: object, chunk: InputChunk) -> None:
        raise RequestError("bad")

    bench.model.feed = refuse  # type: ignore[method-assign]
    payload = MultimodalPayload({}, {}, lambda: released.append("x"))
    with pytest.raises(RequestError):
        bench.engine.feed(InputChunk(request_id="r1", port="text", seq=1, final=True, payload=payload))
    assert released == ["x"]


def test_partial_pictures_are_refused_by_a_model_that_has_none() -> None:
    bench = Bench()
    bench.model.capabilities = Capabilities()
    with pytest.raises(RequestError, match="partial"):
        bench.add(1, ports=("partial",))


def test_batching_that_a_model_does_not_advertise_is_refused() -> None:
    none = Capabilities(batching=frozenset())
    with pytest.raises(ConfigError, match="max_num_seqs"):
        step_limits(StageConfig(name="dit", kind="diffusion", max_num_seqs=2), none)
    assert step_limits(StageConfig(name="dit", kind="diffusion", max_num_seqs=1), none).max_requests == 1
    only = Capabilities(batching=frozenset({"request"}))
    with pytest.raises(ConfigError, match="set batching to request"):
        step_limits(StageConfig(name="dit", kind="diffusion", max_num_seqs=2), only)


def test_a_request_lost_from_the_queues_is_found() -> None:
    bench = Bench()
    bench.add(1)
    bench.engine._scheduler.remove("r1")
    with pytest.raises(IntegrityError, match="r1"):
        bench.engine.check_integrity()


def test_close_ends_everything() -> None:
    bench = Bench()
    bench.add(1, steps=1)
    bench.add(2, steps=5)
    bench.tick()
    bench.engine.close()
    assert sorted(bench.model.closed) == [1, 2]

"""Random histories of a diffusion engine: whatever comes, the books add up and every request ends exactly once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from omnistage.testing.toydit_stage import ToyParams, picture
from tests.stages.diffusion.fakes import Bench


class History:
    """Plays random events against one engine and notes what each request got."""

    def __init__(self, seed: int, **config: object) -> None:
        self.draw = random.Random(seed)
        self.bench = Bench(**config)
        self.asked: dict[str, ToyParams] = {}
        self.aborted: set[str] = set()
        self.ended: list[str] = []
        self.images: dict[str, list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]] = {}

    @property
    def live(self) -> list[str]:
        return sorted(self.asked.keys() - self.aborted - set(self.ended))

    def play(self, events: int) -> None:
        actions = [self.add, self.step, self.step, self.step, self.decode, self.decode, self.abort, self.hold]
        for _ in range(events):
            self.draw.choice(actions)()
            self.bench.engine.check_integrity()
        for name in self.live:
            self.bench.engine.hold(name, False)
        while self.live:
            self.step()
            self.decode()
        self.step()

    def add(self) -> None:
        seed, draw = len(self.asked), self.draw
        side, steps = 8 * draw.randint(1, 3), draw.randint(0, 6)
        ports = ("image", "progress") if draw.random() < 0.3 else ("image",)
        self.bench.add(seed, steps=steps, side=side, priority=draw.randint(0, 2), ports=ports)
        self.asked[f"r{seed}"] = ToyParams(height=side, width=side, num_inference_steps=steps, guidance_scale=1.0)

    def step(self) -> None:
        if not self.bench.engine.has_work():
            return
        output = self.bench.engine.step()
        for emission in output.emissions:
            assert emission.request_id not in self.aborted
            if emission.port == "image":
                self.images.setdefault(emission.request_id, []).append(emission.payload["image"])
        self.ended += [end.request_id for end in output.finished]

    def decode(self) -> None:
        if self.bench.thread.queue:
            self.bench.thread.run()

    def abort(self) -> None:
        if self.live and self.draw.random() < 0.3:
            name = self.draw.choice(self.live)
            self.bench.engine.abort(name)
            self.aborted.add(name)

    def hold(self) -> None:
        if self.live:
            self.bench.engine.hold(self.draw.choice(self.live), self.draw.random() < 0.5)


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_once_with_its_own_picture_and_is_closed_once(seed: int) -> None:
    configs: list[dict[str, object]] = [
        {},
        {"max_num_seqs": 2, "token_budget": 10},
        {"options": {"batching": "request"}, "max_num_seqs": 3},
        {"objective": "e2el", "max_num_seqs": 4},
    ]
    history = History(seed, **configs[seed % 4])
    history.play(200)
    bench = history.bench
    assert sorted(history.ended) == sorted(history.asked.keys() - history.aborted)
    assert sorted(bench.model.closed) == list(range(len(history.asked)))
    for name in history.ended:
        (image,) = history.images[name]
        right = picture(f"prompt {name[1:]}", history.asked[name], int(name[1:]))
        assert np.abs(image.astype(int) - right).max() <= 1
    counters = bench.engine.counters()
    assert (counters["running"], counters["waiting"], counters["held"], counters["decoding"]) == (0, 0, 0, 0)
    assert counters["ticks"] == counters["transformer_calls"] == len(bench.model.calls)
    bench.engine.close()

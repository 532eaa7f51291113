"""The stage's own behaviour on a tiny checkpoint: calls, sharing, aborts, halves of the weights, broken files."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.config.model import StageContext
from omnistage.config.resolve import resolve_config
from omnistage.errors import ConfigError, ErrorCode, RequestError, StageError
from omnistage.models.cosmos3 import kv_payload
from omnistage.models.cosmos3.checkpoint import read_checkpoint, tower_of
from omnistage.models.cosmos3.codecs import PictureCodec
from omnistage.models.cosmos3.flight import Flight
from omnistage.models.cosmos3.loading import load_transformer, load_vae
from omnistage.models.cosmos3.pipeline import PIPELINE, plan
from omnistage.models.cosmos3.reasoner import Reasoner, TextKV
from omnistage.models.cosmos3.stage import Generator, diffusion
from omnistage.stages.base import InputChunk, StageRequest, StepOutput
from omnistage.stages.diffusion.engine import DiffusionEngine
from tests.models.cosmos3.asks import ASKS, ask_of, request_of
from tests.models.cosmos3.conftest import Make

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers.*")]

CPU = torch.device("cpu")


class Bench:
    """A generator behind its engine, stepped by hand; `calls` counts the documents of each transformer call."""

    def __init__(self, folder: Path, *, executor: Executor | None = None, **deploy: Any) -> None:
        deploy = {"dtype": "float32", "device": "cpu"} | deploy
        self.config = resolve_config(str(folder), None, deploy)
        spec = PIPELINE.variants["default"].stages[0]
        stage = self.config.stages["diffusion"]
        self.model = diffusion(StageContext(config=self.config, stage=stage, spec=spec, model_path=str(folder)))
        assert isinstance(self.model, Generator)
        self.woken = threading.Event()
        self.engine: DiffusionEngine[Flight] = DiffusionEngine(self.model, stage, self.woken.set, executor=executor)
        self.calls: list[int] = []
        self.transformer = self.model._parts.denoiser.transformer
        self.transformer.register_forward_hook(
            lambda _module, _args, kwargs, _output: self.calls.append(len(kwargs["vision_tokens"])), with_kwargs=True
        )

    def add(self, identity: str, ask: dict[str, Any]) -> None:
        request, media = request_of(identity, ask)
        planned = plan(request, media, self.config)
        inputs = tuple(item.port for item in planned.inputs)
        self.engine.add(
            StageRequest(
                request_id=identity,
                seed=ask["seed"],
                inputs=inputs,
                outputs=planned.outputs,
                params=planned.params["diffusion"],
            )
        )
        for item in planned.inputs:
            self.engine.feed(InputChunk(request_id=identity, port=item.port, seq=0, final=True, payload=item.payload))

    def run(self) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        while self.engine.request_ids():
            if not self.engine.has_work():
                assert self.woken.wait(30)
            self.woken.clear()
            outputs.append(self.engine.step())
        self.engine.check_integrity()
        return outputs


@pytest.fixture
def bench(tiny: Make) -> Iterator[Bench]:
    made = Bench(tiny("base").folder)
    yield made
    made.engine.close()


def test_ten_mixed_requests_admitted_one_per_tick_cost_one_transformer_call_per_tick(bench: Bench) -> None:
    names = [*[name for name in ASKS["base"] if not name.startswith("transfer")][:9], "transfer_chunks"]
    total = 0
    for index, name in enumerate(names):
        ask = ask_of("base", name) | {"num_inference_steps": 3 + index % 4}
        total += ask["num_inference_steps"] * (4 if name == "transfer_chunks" else 1)
        bench.add(name, ask)
        bench.engine.step()
    bench.run()
    counters = bench.engine.counters()
    assert len(names) == 10
    assert len(bench.calls) == counters["ticks"] == counters["transformer_calls"]
    assert counters["steps"] == total > 2 * len(bench.calls)
    assert max(bench.calls) > 10  # both guidance branches of many requests in one call


@pytest.mark.parametrize("name", ["image", "policy"])
def test_numbers_out_of_range_end_a_request_instead_of_a_black_picture(bench: Bench, name: str) -> None:
    with torch.no_grad():
        for parameter in bench.transformer.proj_out.parameters():
            parameter.fill_(float("nan"))
    bench.add(name, ask_of("base", name))
    with pytest.raises(StageError, match="not finite"):
        bench.run()


def test_aborted_request_stops_the_denoiser_within_one_step(bench: Bench) -> None:
    bench.add("long", ask_of("base", "video") | {"num_inference_steps": 50})
    for _ in range(3):
        bench.engine.step()
    bench.engine.abort("long")
    assert not bench.engine.has_work()
    bench.run()
    assert len(bench.calls) == 3


def test_texts_are_read_once_for_requests_that_share_them(bench: Bench) -> None:
    reasoner = bench.model._parts.reasoner  # type: ignore[attr-defined]
    ask = ask_of("base", "video")
    bench.add("a", ask)
    bench.run()
    first = reasoner.tokens_computed
    bench.add("b", ask | {"seed": 77})
    bench.run()
    assert reasoner.tokens_computed == first
    bench.add("c", ask | {"prompt": "Another prompt"})  # the negative branch is shared
    bench.run()
    assert first < reasoner.tokens_computed < 2 * first


def test_a_full_text_cache_changes_nothing_but_work(tiny: Make) -> None:
    checkpoint = read_checkpoint(tiny("base").folder)
    transformer = load_transformer(checkpoint, "understanding", torch.float32, CPU)
    wide = Reasoner(transformer, "TORCH_SDPA", 1 << 30)
    narrow = Reasoner(transformer, "TORCH_SDPA", 0)
    texts = [tuple(range(40)), tuple(range(7, 30)), tuple(range(40))]
    for one, other in zip(wide.read(texts), narrow.read(texts), strict=True):
        assert torch.equal(one.keys, other.keys)
    assert narrow.read(texts[:1])[0].tokens == 40
    assert (wide.tokens_computed, narrow.tokens_computed) == (63, 103)
    assert wide.cached(texts[1])
    assert not narrow.cached(texts[1])


def test_each_tower_loads_only_its_half_of_the_weights(tiny: Make) -> None:
    checkpoint = read_checkpoint(tiny("edge").folder)
    loaded = {}
    for tower in ("understanding", "generation"):
        model = load_transformer(checkpoint, tower, torch.float32, CPU)
        loaded[tower] = {name for name, weight in model.named_parameters() if not weight.is_meta}
        assert {tower_of(name) for name in loaded[tower]} == {tower}
    everything = set(tiny("edge").parts["transformer"].state_dict()) - {"lm_head.weight"}
    assert loaded["understanding"] | loaded["generation"] == everything
    assert not loaded["understanding"] & loaded["generation"]


def test_half_precision_keeps_the_time_embedder_in_float32(tiny: Make) -> None:
    model = load_transformer(read_checkpoint(tiny("base").folder), "generation", torch.bfloat16, CPU)
    assert model.time_embedder.linear_1.weight.dtype == torch.float32
    assert model.proj_in.weight.dtype == torch.bfloat16


def test_bfloat16_stays_near_float32(tiny: Make) -> None:
    made = {}
    for dtype in ("float32", "bfloat16"):
        bench = Bench(tiny("base").folder, dtype=dtype)
        bench.add("a", ask_of("base", "video_unguided"))
        outputs = bench.run()
        bench.engine.close()
        made[dtype] = next(e.payload["latents"] for o in outputs for e in o.emissions if e.port == "latents")
    assert np.abs(made["float32"] - made["bfloat16"]).mean() < 0.05


def test_picture_codec_serialises_threads_that_share_its_causal_caches(tiny: Make) -> None:
    codec = PictureCodec(load_vae(read_checkpoint(tiny("base").folder), torch.float32, CPU))
    latents = [torch.randn(1, 6, 4, 2, 3, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    alone = [codec.decode(item) for item in latents]

    async def together() -> list[torch.Tensor]:
        return list(await asyncio.gather(*(asyncio.to_thread(codec.decode, item) for item in latents)))

    for one, other in zip(alone, asyncio.run(together()), strict=True):
        assert torch.equal(one, other)


def test_keys_and_values_of_other_tokens_are_refused() -> None:
    text = TextKV(torch.zeros(1, 3, 1, 2), torch.zeros(1, 3, 1, 2))
    payload = kv_payload.write("cond", (1, 2, 3), text)
    assert kv_payload.read(payload, {"cond": (1, 2, 3)}, CPU)[0] == "cond"
    with pytest.raises(RequestError) as error:
        kv_payload.read(payload, {"cond": (1, 2, 4)}, CPU)
    assert error.value.info.code == ErrorCode.HANDOFF


def test_bfloat16_keys_and_values_survive_the_wire() -> None:
    keys = torch.randn(2, 3, 1, 4).to(torch.bfloat16)
    payload = kv_payload.write("uncond", (5,), TextKV(keys, keys + 1))
    _, text = kv_payload.read(payload, {"uncond": (5,)}, CPU)
    assert torch.equal(text.keys, keys)
    assert torch.equal(text.values, keys + 1)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("transformer/diffusion_pytorch_model.safetensors", "transformer"),
        ("vae/diffusion_pytorch_model.safetensors", "vae"),
        ("vae/config.json", "vae/config.json"),
        ("scheduler/scheduler_config.json", "scheduler"),
        ("text_tokenizer/tokenizer.json", "text_tokenizer"),
    ],
)
@pytest.mark.parametrize("how", ["missing", "cut"])
def test_missing_or_cut_files_are_named_before_work_starts(
    tiny: Make, tmp_path: Path, damage: str, named: str, how: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny("base").folder, folder)
    if how == "missing":
        (folder / damage).unlink()
    else:
        (folder / damage).write_bytes((folder / damage).read_bytes()[:50])
    with pytest.raises(ConfigError, match=named):
        Bench(folder)

"""Exactness of the torch runner against `generate` of transformers, float32, greedy, one request at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from omnistage.config.model import StageConfig
from omnistage.errors import ConfigError
from omnistage.sampling import SamplingParams
from omnistage.stages.ar.engine import AREngine
from omnistage.stages.ar.text_model import CausalTextModel, TextState
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.stages.base import StageRequest
from tests.stages.ar.fakes import Collected, run, stage_config

NEW_TOKENS = 24


@dataclass(frozen=True)
class Reference:
    prompts: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Reference:
    """16 prompts of 3 to 60 tokens, some with a common beginning; no choice is closer than 1e-4 in the logits."""
    draw = random.Random(0)
    common = [draw.randrange(3, 320) for _ in range(20)]
    prompts = [[draw.randrange(3, 320) for _ in range(draw.randrange(3, 40))] for _ in range(16)]
    prompts = [(common + prompt if index % 3 == 0 else prompt) for index, prompt in enumerate(prompts)]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation="eager")
    answers = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.scores).topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-4
        answers.append(out.sequences[0, len(prompt) :].tolist())
    assert len({len(answer) for answer in answers}) > 1, "some answers end early"
    return Reference(prompts, answers)


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> CausalTextModel:
    return CausalTextModel(tiny_llama, stage_config(dtype="float32"))


def engine_of(
    model: CausalTextModel, *, blocks: int = 200, block_size: int = 16, budget: int = 64, **overrides: Any
) -> AREngine[TextState]:
    config = stage_config(token_budget=budget, block_size=block_size, max_num_seqs=16, **overrides)
    return AREngine(TorchBackend(model, config, blocks=blocks), config)


def ask(name: str, prompt: list[int], **sampling: Any) -> StageRequest:
    given = {"temperature": 0.0, "max_tokens": NEW_TOKENS, **sampling}
    return StageRequest(
        request_id=name, outputs=("text",), params={"token_ids": prompt}, sampling=SamplingParams(**given)
    )


def staggered(engine: AREngine[Any], requests: list[StageRequest]) -> Collected:
    """All requests, arriving every one to three steps."""
    draw, collected = random.Random(5), Collected()
    for request in requests:
        engine.add(request)
        for _ in range(draw.randrange(1, 4)):
            collected.take(engine.step())
    return run(engine, collected)


def check(collected: Collected, reference: Reference) -> None:
    assert [collected.tokens[str(index)] for index in range(16)] == reference.answers


def requests_of(reference: Reference) -> list[StageRequest]:
    return [ask(str(index), prompt) for index, prompt in enumerate(reference.prompts)]


def test_alone_equals_generate(model: CausalTextModel, reference: Reference) -> None:
    engine, collected = engine_of(model), Collected()
    for request in requests_of(reference):
        engine.add(request)
        run(engine, collected)
    check(collected, reference)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("budget", "block_size"), [(5, 1), (7, 7), (16, 16), (33, 5), (512, 64)])
def test_sixteen_staggered_requests_equal_generate(
    model: CausalTextModel, reference: Reference, budget: int, block_size: int, caching: bool
) -> None:
    blocks = 16 * 84 // block_size + 16
    engine = engine_of(model, budget=budget, block_size=block_size, blocks=blocks, prefix_caching=caching)
    check(staggered(engine, requests_of(reference)), reference)
    assert engine.counters()["mixed_steps"] >= 1
    assert (engine.counters()["cached_tokens"] > 0) == (caching and block_size < 20)


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
def test_forced_preemption_equals_generate(model: CausalTextModel, reference: Reference, caching: bool) -> None:
    engine = engine_of(model, budget=16, block_size=4, blocks=40, prefix_caching=caching)
    check(staggered(engine, requests_of(reference)), reference)
    counters = engine.counters()
    assert counters["preemptions"] >= 3
    assert counters["mixed_steps"] >= 1


@pytest.mark.slow
def test_a_request_with_a_seed_draws_the_same_tokens_in_any_company(
    model: CausalTextModel, reference: Reference
) -> None:
    fields: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1}
    requests = [ask(str(i), prompt, seed=i, **fields) for i, prompt in enumerate(reference.prompts)]
    alone, together, crowded = engine_of(model), engine_of(model, budget=9), engine_of(model, block_size=4, blocks=40)
    single = Collected()
    for request in requests:
        alone.add(request)
        run(alone, single)
    assert staggered(together, requests).tokens == single.tokens
    assert staggered(crowded, requests).tokens == single.tokens
    assert crowded.counters()["preemptions"] >= 3
    other = engine_of(model)
    other.add(ask("0", reference.prompts[0], seed=99, **fields))
    assert run(other).tokens["0"] != single.tokens["0"]


def test_the_request_seed_counts_when_sampling_names_none(model: CausalTextModel, reference: Reference) -> None:
    def tokens(seed: int) -> list[int]:
        engine = engine_of(model)
        request = ask("r", reference.prompts[1], temperature=1.0)
        request.seed = seed
        engine.add(request)
        return run(engine).tokens["r"]

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)


def test_repetition_penalty_equals_generate(tiny_llama: Path, model: CausalTextModel, reference: Reference) -> None:
    library = AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation="eager")
    prompt = reference.prompts[2]
    want = library.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, repetition_penalty=1.3)
    engine = engine_of(model, block_size=4)
    engine.add(ask("r", prompt, repetition_penalty=1.3, max_tokens=20))
    assert run(engine).tokens["r"] == want[0, len(prompt) :].tolist()


def test_min_tokens_keeps_the_end_token_away(model: CausalTextModel, reference: Reference) -> None:
    index = min(range(16), key=lambda i: len(reference.answers[i]))
    assert len(reference.answers[index]) < NEW_TOKENS
    engine = engine_of(model)
    engine.add(ask("r", reference.prompts[index], min_tokens=NEW_TOKENS))
    assert len(run(engine).tokens["r"]) == NEW_TOKENS


def test_memory_decides_the_number_of_blocks(model: CausalTextModel) -> None:
    token_bytes = 2 * 3 * 2 * 8 * 4
    backend = TorchBackend(model, stage_config(kv_memory_mb=2, block_size=8))
    assert backend.limits.total_blocks == 2 * 2**20 // (token_bytes * 8)
    assert backend.limits.eos_token_ids == frozenset({2})


def test_memory_that_holds_no_block_is_a_configuration_error(model: CausalTextModel) -> None:
    config = StageConfig(name="thinker", kind="ar", kv_memory_mb=1, block_size=1 << 20)
    with pytest.raises(ConfigError, match="thinker: kv_memory_mb=1 holds no block"):
        TorchBackend(model, config)

"""The embedded language model with its real weights: greedy tokens equal `generate` of transformers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from omnistage.sampling import SamplingParams
from omnistage.stages.ar.engine import AREngine
from omnistage.stages.ar.text_model import CausalTextModel
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.stages.base import StageRequest
from tests.stages.ar.fakes import Collected, run, stage_config

pytestmark = pytest.mark.slow

NEW_TOKENS = 24
SUBJECTS = ["the moon", "bread", "a river", "jazz", "glass", "bees", "Norway", "chess", "salt", "a lighthouse"]
FORMS = ["What is {}?", "Write one short sentence about {} for a child.", "List three facts about {}, please."]
QUESTIONS = [form.format(subject) for form in FORMS for subject in SUBJECTS]


@dataclass(frozen=True)
class Reference:
    model: CausalTextModel
    prompts: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def reference(smollm2_folder: Path) -> Reference:
    torch.set_num_threads(1)
    model = CausalTextModel(smollm2_folder, stage_config(dtype="float32"))
    library = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    prompts = [prompt_ids(model, question) for question in QUESTIONS]
    answers = [
        library.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    return Reference(model, prompts, answers)


def prompt_ids(model: CausalTextModel, question: str) -> list[int]:
    prompt = model.prompt(model.open(StageRequest(request_id="p", params={"prompt": question})))
    assert prompt is not None
    return prompt.token_ids


def ask(index: int, prompt: list[int]) -> StageRequest:
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    return StageRequest(request_id=str(index), outputs=("text",), params={"token_ids": prompt}, sampling=sampling)


def serve(engine: AREngine[Any], prompts: list[list[int]], *, together: bool) -> list[list[int]]:
    """Answers of requests that come one after the other, or every one to three steps."""
    draw, collected = random.Random(2), Collected()
    for index, prompt in enumerate(prompts):
        engine.add(ask(index, prompt))
        for _ in range(draw.randrange(1, 4) if together else 0):
            collected.take(engine.step())
        if not together:
            run(engine, collected)
    run(engine, collected)
    return [collected.tokens[str(index)] for index in range(len(prompts))]


def engine_of(reference: Reference, *, blocks: int, **overrides: Any) -> AREngine[Any]:
    config = stage_config(**{"max_num_seqs": 16, **overrides})
    return AREngine(TorchBackend(reference.model, config, blocks=blocks), config)


def test_the_chat_template_is_rendered_as_transformers_does(reference: Reference, smollm2_folder: Path) -> None:
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(smollm2_folder)
    for question, prompt in zip(QUESTIONS, reference.prompts, strict=True):
        messages = [{"role": "user", "content": question}]
        want = library.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert library(want, add_special_tokens=False).input_ids == prompt


def test_one_after_the_other_equals_generate(reference: Reference) -> None:
    engine = engine_of(reference, blocks=64)
    assert serve(engine, reference.prompts, together=False) == reference.answers
    assert engine.counters()["cached_tokens"] > 0


@pytest.mark.parametrize(("budget", "block_size", "caching"), [(16, 16, True), (40, 5, False), (512, 32, True)])
def test_sixteen_at_once_equal_generate(reference: Reference, budget: int, block_size: int, caching: bool) -> None:
    engine = engine_of(
        reference, blocks=2048 // block_size, token_budget=budget, block_size=block_size, prefix_caching=caching
    )
    assert serve(engine, reference.prompts, together=True) == reference.answers
    assert engine.counters()["mixed_steps"] >= 1


def test_forced_preemption_equals_generate(reference: Reference) -> None:
    engine = engine_of(reference, blocks=70, block_size=8, token_budget=32, prefix_caching=False)
    assert serve(engine, reference.prompts, together=True) == reference.answers
    assert engine.counters()["preemptions"] >= 3
    assert engine.counters()["mixed_steps"] >= 1

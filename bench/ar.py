"""The AR engine on SmolLM2-135M against transformers' `generate`, in one process and one thread.

    python -m bench.ar [--pairs N]

Decode steps at batch 1, 8, 32; 32 requests with staggered arrivals and 8 to 256 output tokens against `generate` in
batches of 8 in arrival order and against the library's continuous batching (what `generate_batch` runs, with each
request's own length) of the same arrivals; the share of a step that the linear layers alone would take, with the
plain weights of the library; int4 against float32, and what int4 costs in perplexity on a text of our own.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.report import machine, table
from omnistage.config.model import StageConfig
from omnistage.models.smollm2 import SMOLLM2
from omnistage.sampling import SamplingParams
from omnistage.stages.ar.engine import AREngine
from omnistage.stages.ar.text_model import CausalTextModel
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.stages.base import StageRequest

PROMPT_TOKENS = 64
NEW_TOKENS = 24
BATCHES = (1, 8, 32)
TEXT = (
    "A lighthouse stands where the river meets the sea. Every evening its keeper climbs the stairs, cleans the glass, "
    "and lights the lamp, so that the boats which come home late can find the harbour. In winter the storms are long, "
    "and the keeper reads, repairs nets, and writes letters to a sister in the city, who answers with news and fruit."
)


Job = tuple[list[int], int]


def stage(quantization: str = "none") -> StageConfig:
    return StageConfig(
        name="thinker",
        kind="ar",
        dtype="float32",
        quantization="int4" if quantization == "int4" else "none",
        max_num_seqs=32,
        token_budget=512,
        kv_memory_mb=1024,
        prefix_caching=False,
    )


def prompts(count: int, seed: int = 7) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(100, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def request(name: str, prompt: list[int], tokens: int) -> StageRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
    return StageRequest(request_id=name, outputs=("text",), params={"token_ids": prompt}, sampling=sampling)


def run_engine(engine: AREngine[Any], jobs: list[Job]) -> tuple[float, list[float]]:
    """Seconds to serve all jobs, one more arriving every second step; and when each arrived."""
    waiting = [request(str(index), prompt, tokens) for index, (prompt, tokens) in enumerate(jobs)]
    arrivals: list[float] = []
    started, steps = time.perf_counter(), 0
    while waiting or engine.has_work():
        if waiting and steps % 2 == 0:
            engine.add(waiting.pop(0))
            arrivals.append(time.perf_counter() - started)
        engine.step()
        steps += 1
    return time.perf_counter() - started, arrivals


def ours(engine: AREngine[Any], batch: int) -> float:
    """Seconds of a step that decodes all requests."""
    for index, prompt in enumerate(prompts(batch)):
        engine.add(request(str(index), prompt, NEW_TOKENS))
    steps = []
    while engine.has_work():
        started = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started)
    return median(steps[-NEW_TOKENS + 2 :])


def reference(model: Any, batch: int) -> float:
    """Seconds per decode step: a long answer less a short one, so that prefill cancels out."""

    def run(tokens: int) -> float:
        ids = torch.tensor(prompts(batch))
        started = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        return time.perf_counter() - started

    return (run(NEW_TOKENS) - run(2)) / (NEW_TOKENS - 2)


def linear_floor(model: nn.Module, batch: int) -> float:
    """Seconds for the linear layers alone on so many rows, the fastest of three times."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    rows = {layer.in_features: torch.randn(batch, layer.in_features) for layer in layers}

    def once() -> float:
        started = time.perf_counter()
        for layer in layers:
            layer(rows[layer.in_features])
        return time.perf_counter() - started

    return min(once() for _ in range(3))


def mixed_jobs() -> list[Job]:
    chance = random.Random(3)
    return [(prompt, chance.choice((8, 16, 32, 64, 128, 256))) for prompt in prompts(32, seed=9)]


def generate_in_batches(model: Any, jobs: list[Job]) -> float:
    """`generate` eight at a time in arrival order; each batch runs as long as its longest answer."""
    started = time.perf_counter()
    for first in range(0, len(jobs), 8):
        batch = jobs[first : first + 8]
        ids = torch.tensor([prompt for prompt, _ in batch])
        longest = max(tokens for _, tokens in batch)
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest, min_new_tokens=longest, do_sample=False
        )
    return time.perf_counter() - started


def continuous_batching(model: Any, jobs: list[Job], arrivals: list[float]) -> float:
    """Transformers' continuous batching of the same arrivals, in seconds from the start."""
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=256)
    batching = ContinuousBatchingConfig(
        num_blocks=512, page_size=32, max_batch_tokens=512, use_cuda_graph=False, use_async_batching=False
    )
    started = time.perf_counter()
    with model.continuous_batching_context_manager(generation, continuous_batching_config=batching) as manager:
        for (prompt, tokens), arrival in zip(jobs, arrivals, strict=True):
            time.sleep(max(0.0, started + arrival - time.perf_counter()))
            manager.add_request(prompt, max_new_tokens=tokens)
        done = 0
        while done < len(jobs):
            result = manager.get_result(timeout=60)
            assert result is not None
            assert result.error is None
            done += result.is_finished()
    return time.perf_counter() - started


def perplexity(model: CausalTextModel) -> float:
    """Of `TEXT`, through the model's own modules."""
    ids = torch.tensor([model.tokenizer.encode(TEXT).ids])
    decoder = model._decoder
    decoder.config._attn_implementation = "sdpa"
    hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
    loss = nn.functional.cross_entropy(model.logits(hidden[:-1]).float(), ids[0, 1:])
    return float(loss.exp())


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5, help="interleaved runs of both sides, 20 minutes for five")
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    folder: Path = SMOLLM2.locate("")
    whole = AREngine(TorchBackend(CausalTextModel(folder, stage()), stage()), stage())
    packed = AREngine(TorchBackend(CausalTextModel(folder, stage("int4")), stage("int4")), stage("int4"))
    library = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print(machine() + ", 1 thread\n")
    rows = []
    for batch in BATCHES:
        runs = [
            (ours(whole, batch), reference(library, batch), ours(packed, batch), linear_floor(library, batch))
            for _ in range(pairs)
        ]
        own, other, small, floor = (median(column) * 1e3 for column in zip(*runs, strict=True))
        against = median(r[1] / r[0] for r in runs)
        rows.append(
            (batch, f"{own:.0f}", f"{other:.0f}", f"{against:.2f}x", f"{floor / own:.0%}", f"{small:.0f}",
             f"{median(r[0] / r[2] for r in runs):.2f}x")
        )  # fmt: skip
    print(table(("batch", "ours ms/step", "generate", "ours is", "linear floor", "int4", "int4 is"), rows), flush=True)
    jobs = mixed_jobs()
    mixed = []
    for _ in range(pairs):
        seconds, arrivals = run_engine(whole, jobs)
        mixed.append(
            (generate_in_batches(library, jobs) / seconds, continuous_batching(library, jobs, arrivals) / seconds)
        )
    gains = [median(column) for column in zip(*mixed, strict=True)]
    told = f"{gains[0]:.2f}x of generate in batches of 8, {gains[1]:.2f}x of continuous batching"
    print(f"\n32 staggered requests, 8 to 256 tokens: {told}", flush=True)
    texts = (CausalTextModel(folder, stage()), CausalTextModel(folder, stage("int4")))
    print(f"perplexity: float32 {perplexity(texts[0]):.3f}, int4 {perplexity(texts[1]):.3f}")


if __name__ == "__main__":
    main()

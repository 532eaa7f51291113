"""The AR engine on SmolLM2-135M against transformers' `generate`, in one process and one thread.

    python -m bench.ar [--quick]

Decode steps at batch 1, 8, 32; 32 requests with staggered arrivals and 8 to 256 output tokens against `generate` in
batches of 8 in arrival order and `generate_batch`; the share of the linear-layers-only floor; int4 against float32, and
what int4 costs in perplexity on a text of our own.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

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


def run_engine(engine: AREngine[Any], jobs: list[tuple[list[int], int]], stagger: int = 0) -> float:
    """Seconds to serve all jobs, one more arriving every `stagger` steps (0: all at once)."""
    waiting = [request(str(index), prompt, tokens) for index, (prompt, tokens) in enumerate(jobs)]
    started, steps = time.perf_counter(), 0
    while waiting or engine.has_work():
        while waiting and (stagger == 0 or steps >= stagger * (len(jobs) - len(waiting))):
            engine.add(waiting.pop(0))
        engine.step()
        steps += 1
    return time.perf_counter() - started


def decode_seconds(run: Callable[[int], float]) -> float:
    """Seconds per decode step: a long answer less a short one, so that prefill cancels out."""
    return (run(NEW_TOKENS) - run(2)) / (NEW_TOKENS - 2)


def ours(engine: AREngine[Any], batch: int) -> float:
    return decode_seconds(lambda tokens: run_engine(engine, [(prompt, tokens) for prompt in prompts(batch)]))


def reference(model: Any, batch: int) -> float:
    def run(tokens: int) -> float:
        ids = torch.tensor(prompts(batch))
        started = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        return time.perf_counter() - started

    return decode_seconds(run)


def linear_floor(model: nn.Module, batch: int) -> float:
    """Seconds for the linear layers alone on so many rows."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    rows = {layer.in_features: torch.randn(batch, layer.in_features) for layer in layers}
    started = time.perf_counter()
    for layer in layers:
        layer(rows[layer.in_features])
    return time.perf_counter() - started


def mixed_jobs() -> list[tuple[list[int], int]]:
    chance = random.Random(3)
    return [(prompt, chance.choice((8, 16, 32, 64, 128, 256))) for prompt in prompts(32, seed=9)]


def generate_in_batches(model: Any, jobs: list[tuple[list[int], int]]) -> float:
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
    parser.add_argument("--quick", action="store_true", help="one pair instead of five")
    pairs = 1 if parser.parse_args().quick else 5
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
    print(table(("batch", "ours ms/step", "generate", "ours is", "linear floor", "int4", "int4 is"), rows))
    jobs = mixed_jobs()
    mixed = [(run_engine(whole, jobs, stagger=2), generate_in_batches(library, jobs)) for _ in range(min(pairs, 2))]
    print(
        f"\n32 staggered requests, 8 to 256 tokens: {median(b / a for a, b in mixed):.2f}x of generate in batches of 8"
    )
    texts = (CausalTextModel(folder, stage()), CausalTextModel(folder, stage("int4")))
    print(f"perplexity: float32 {perplexity(texts[0]):.3f}, int4 {perplexity(texts[1]):.3f}")


if __name__ == "__main__":
    main()

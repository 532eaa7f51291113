"""SmolLM2-135M side by side: this engine, llama.cpp and vLLM on the same prompts, tokens per second.

    python -m bench.others [--environment DIR]

The others run in an environment of their own (see bench/README.md); what is not installed there is skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path

import torch

from bench.ar import prompts, run_engine, stage
from bench.report import machine, table
from omnistage.models.smollm2 import SMOLLM2, SMOLLM2_GGUF
from omnistage.stages.ar.engine import AREngine
from omnistage.stages.ar.text_model import CausalTextModel
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.weights import default_cache_dir, fetch

NEW_TOKENS = 48
BATCHES = (1, 8)
TIMEOUT_S = 900

# Each program reads {"model", "prompts", "tokens"} and prints seconds for all prompts; llama.cpp serves one at a time.
LLAMA_CPP = """
import json, sys, time
from llama_cpp import Llama
job = json.loads(sys.argv[1])
model = Llama(job["model"], n_ctx=512, n_threads=1, verbose=False)
started = time.perf_counter()
for prompt in job["prompts"]:
    model.reset()
    for count, _ in enumerate(model.generate(prompt, temp=0.0), 1):
        if count == job["tokens"]:
            break
print(time.perf_counter() - started)
"""
VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
job = json.loads(sys.argv[1])
model = LLM(job["model"], dtype="float32", max_model_len=512)
sampling = SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True)
asks = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
model.generate(asks[:1], sampling)
started = time.perf_counter()
model.generate(asks, sampling)
print(time.perf_counter() - started)
"""


def elsewhere(environment: Path, package: str, program: str, job: dict[str, object]) -> float | None:
    """Seconds, or None where the environment lacks the package."""
    python = environment / "bin" / "python"
    if not python.exists():
        return None
    probe = subprocess.run([python, "-c", f"import {package}"], capture_output=True, check=False)
    if probe.returncode:
        return None
    done = subprocess.run(
        [python, "-c", program, json.dumps(job)], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    return float(done.stdout.strip().splitlines()[-1])


@torch.inference_mode()
def ours(quantization: str, batch: int) -> float:
    torch.set_num_threads(1)
    config = stage(quantization)
    engine = AREngine(TorchBackend(CausalTextModel(SMOLLM2.locate(""), config), config), config)
    run_engine(engine, [(prompts(1)[0], 4)])
    started = time.perf_counter()
    run_engine(engine, [(prompt, NEW_TOKENS) for prompt in prompts(batch)])
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--environment", type=Path, default=Path(".venv-others"))
    environment = parser.parse_args().environment
    gguf = fetch([SMOLLM2_GGUF], default_cache_dir())[SMOLLM2_GGUF]
    rows = []
    for batch in BATCHES:
        job: dict[str, object] = {"prompts": prompts(batch), "tokens": NEW_TOKENS}
        seconds = {
            "float32": ours("none", batch),
            "int4": ours("int4", batch),
            "vLLM float32": elsewhere(environment, "vllm", VLLM, job | {"model": str(SMOLLM2.locate(""))}),
            "llama.cpp Q4_1": elsewhere(environment, "llama_cpp", LLAMA_CPP, job | {"model": str(gguf)}),
        }
        rates = [f"{batch * NEW_TOKENS / s:.0f}" if s is not None else "not installed" for s in seconds.values()]
        rows.append((batch, *rates))
    print(machine() + ", 1 thread\n")
    print(table(("prompts", "ours float32", "ours int4", "vLLM float32", "llama.cpp Q4_1"), rows))


if __name__ == "__main__":
    main()

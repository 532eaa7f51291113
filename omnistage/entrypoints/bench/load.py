"""Prompts, and when they are sent: at a rate (open loop) or as answers come (closed loop)."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from omnistage.entrypoints.bench.sample import Sample
from omnistage.errors import RequestError

Ask = Callable[[str], Awaitable[Sample]]
BUILT_IN = (
    "What is the capital of France?",
    "Tell me two facts about the moon.",
    "How do plants make food?",
    "Why is the sky blue, in one sentence?",
    "Name three animals that live in the sea.",
    "What should I cook tonight?",
)
WORDS = [
    "river", "stone", "light", "green", "seven", "walk", "paper", "cloud", "music", "window", "bread", "ocean", "quiet",
    "train", "garden", "winter",
]  # fmt: skip


def prompts_of(dataset: str, count: int, words: int, seed: int) -> list[str]:
    """`count` prompts: "builtin", "random" (of so many words), or a file with a prompt (or {"prompt"}) per line.

    Raises RequestError for a file that cannot be read or holds none.
    """
    if dataset == "random":
        draw = random.Random(seed)
        return [" ".join(draw.choices(WORDS, k=words)) for _ in range(count)]
    rows = list(BUILT_IN) if dataset == "builtin" else _file(Path(dataset))
    return [rows[index % len(rows)] for index in range(count)]


def _file(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
        rows = [json.loads(line)["prompt"] if line.startswith("{") else line for line in lines]
    except (OSError, ValueError, KeyError) as error:
        raise RequestError(f"--dataset {path}: cannot be read: {type(error).__name__}", param="dataset") from None
    if not rows:
        raise RequestError(f"--dataset {path}: no prompt in it", param="dataset")
    return rows


async def closed_loop(ask: Ask, prompts: list[str], concurrency: int) -> tuple[list[Sample], float]:
    """So many clients, each with one request at a time; returns samples and seconds."""
    waiting = iter(prompts)
    samples = list[Sample]()

    async def client() -> None:
        for prompt in waiting:
            samples.append(await ask(prompt))

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return samples, time.perf_counter() - started


async def open_loop(ask: Ask, prompts: list[str], rate: float, seed: int) -> tuple[list[Sample], float]:
    """Requests arrive as a Poisson process of `rate` per second, whatever the answers do."""
    draw = random.Random(seed)
    started = time.perf_counter()
    due = 0.0
    tasks = list[asyncio.Task[Sample]]()
    for prompt in prompts:
        await asyncio.sleep(max(started + due - time.perf_counter(), 0.0))
        tasks.append(asyncio.ensure_future(ask(prompt)))
        due += draw.expovariate(rate)
    samples = await asyncio.gather(*tasks)
    return list(samples), time.perf_counter() - started

"""Small random checkpoints of both diffusion families; the same requests through us and the library's pipeline."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ModularPipeline

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.omni import OmniResult, ResultBuilder
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from tests.models.cosmos3 import tiny as cosmos_tiny
from tests.models.cosmos3.asks import ask_of, request_of
from tests.models.minimax_h3 import harness as h3
from tests.models.minimax_h3 import tiny as h3_tiny
from tests.models.minimax_h3.reference import Reference

Ask = dict[str, Any]
Made = tuple[OmniRequest, dict[str, MultimodalPayload]]

COSMOS_MIX = (
    "image", "video", "video_unguided", "image_to_video", "video_to_video", "sound", "policy", "forward_dynamics",
)  # fmt: skip
# Large enough that products of matrices, not calls, take the time of a step.
COSMOS_SIZES: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "head_dim": 32, "num_attention_heads": 6,
    "num_key_value_heads": 2, "rope_scaling": {"mrope_section": [6, 5, 5], "rope_type": "default"},
}  # fmt: skip
COSMOS_SHAPES = ((96, 128), (128, 96), (64, 160), (128, 128))
H3_MIX = ("text", "first", "last", "both")


class Ours:
    """The engine in this process; `run` answers requests together or one by one."""

    def __init__(self, folder: Path, made: Callable[[str, Ask], Made]) -> None:
        self._made = made
        self._loop = asyncio.new_event_loop()
        self._engine = AsyncOmniEngine(resolve_config(str(folder), None, {"placement": "inline", "dtype": "float32"}))
        self._loop.run_until_complete(self._engine.start())
        self._count = 0

    def run(self, asks: list[Ask], *, together: bool = True) -> list[OmniResult]:
        return self._loop.run_until_complete(self._all(asks) if together else self._each(asks))

    def stop(self) -> None:
        self._loop.run_until_complete(self._engine.stop())
        self._loop.close()

    async def _all(self, asks: list[Ask]) -> list[OmniResult]:
        return list(await asyncio.gather(*(self._answer(ask) for ask in asks)))

    async def _each(self, asks: list[Ask]) -> list[OmniResult]:
        return [await self._answer(ask) for ask in asks]

    async def _answer(self, ask: Ask) -> OmniResult:
        self._count += 1
        request, media = self._made(f"r{self._count}", ask)
        request.params.pop("return_latents")
        builder = ResultBuilder(request.id)
        async for output in self._engine.generate(request, media):
            builder.add(output)
        return builder.result().raise_for_error()


class Cosmos:
    """`library(ask)` prepares a call of diffusers' pipeline, which gives tensors."""

    name = "Cosmos3"
    one = "video"

    def __init__(self, folder: Path) -> None:
        self._tiny = cosmos_tiny.make("base", folder / "cosmos3", **COSMOS_SIZES)
        self.folder = self._tiny.folder
        self.ours = Ours(self.folder, request_of)

    def ask(self, name: str, steps: int, seed: int = 0) -> Ask:
        ask = ask_of("base", name) | {"num_inference_steps": steps, "seed": seed}
        if "height" in ask:
            ask["height"], ask["width"] = COSMOS_SHAPES[seed % len(COSMOS_SHAPES)]
        return ask

    def mix(self, count: int) -> list[Ask]:
        """Requests of other modes, shapes, step counts and seeds."""
        return [self.ask(COSMOS_MIX[i % len(COSMOS_MIX)], 4 + i % 5, i) for i in range(count)]

    def library(self, ask: Ask) -> Callable[[], object]:
        given = dict(ask)
        generator = torch.Generator().manual_seed(given.pop("seed"))
        overrides = {key: given.pop(key) for key in ("flow_shift", "use_karras_sigmas") if key in given}
        scheduler = self._tiny.parts["scheduler"]
        parts = self._tiny.parts | {"scheduler": type(scheduler).from_config(scheduler.config, **overrides)}
        pipe = diffusers.Cosmos3OmniPipeline(**parts, **self._tiny.config)
        pipe.set_progress_bar_config(disable=True)
        given = {key: cosmos_tiny._for_library(key, value) for key, value in given.items()}
        return lambda: pipe(generator=generator, output_type="pt", **given)


class MiniMaxH3:
    name = "MiniMax-H3"
    one = "text"

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "h3"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weight_norm of the audio autoencoder is deprecated in torch
            self._modules = h3_tiny.build(self.folder)
        self._reference = Reference(str(self.folder), self._modules)
        self.ours = Ours(self.folder, lambda identity, ask: h3.submission(identity, ask["seed"], _without_seed(ask)))

    def ask(self, name: str, steps: int, seed: int = 0) -> Ask:
        """`steps` calls of the model: the library counts the grid's points."""
        return h3.ASKS[name] | {"num_inference_steps": steps + 1, "seed": seed}

    def mix(self, count: int) -> list[Ask]:
        return [self.ask(H3_MIX[i % len(H3_MIX)], 3 + i % 4, i) for i in range(count)]

    def library(self, ask: Ask) -> Callable[[], object]:
        given = _without_seed(ask)
        shell = ModularPipeline.from_pretrained(str(self.folder))
        return lambda: self._reference.run(ask["seed"], pipe=shell, **given)


def _without_seed(ask: Ask) -> Ask:
    return {key: value for key, value in ask.items() if key != "seed"}

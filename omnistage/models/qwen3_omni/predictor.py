"""The code predictor: completes frames of codes, for any number of requests at once.

A frame has G codes. The first comes from the talker; each of the others is predicted from the ones before it, starting
from the talker's hidden row, by a small transformer whose keys and values live for one frame only. Every request does
the same G - 1 sub-steps, so a batch is one tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from omnistage.sampling import SamplingParams
from omnistage.stages.ar.sampler import SampleRow, sample

_GREEDY = SamplingParams(temperature=0.0)
# How the model's authors draw residual codes whenever the first code is drawn.
_DRAWN = SamplingParams(temperature=1.0, top_k=50, top_p=0.8)


@dataclass(frozen=True, slots=True)
class FrameStart:
    """A frame to complete: its first code, its number in its request, and how its codes are chosen."""

    code: int
    number: int
    seed: int
    greedy: bool


def predictor_seed(seed: int) -> int:
    """The seed of a request's residual codes: another sequence of draws than that of its first codes."""
    digest = blake2b(struct.pack("<q", seed), digest_size=8, key=b"code predictor").digest()
    return int.from_bytes(digest, "little") >> 1


class CodePredictor:
    """Over transformers' code predictor; `first_embedding` embeds first codes."""

    def __init__(self, module: Any, first_embedding: Any) -> None:
        self._model = module.model
        self._heads = module.lm_head
        self._embeddings = module.model.codec_embedding
        self._first = first_embedding
        self.groups = len(self._heads) + 1

    def complete(self, hidden: Tensor, starts: Sequence[FrameStart]) -> list[tuple[int, ...]]:
        """Whole frames of G codes; `hidden` [B, H] is the talker's row (after its final norm) that gave each first
        code."""
        device = hidden.device
        firsts = torch.tensor([start.code for start in starts], device=device)
        rows = torch.stack((hidden, self._first(firsts)), dim=1)  # [B, 2, H]
        cache = DynamicCache(config=self._model.config)
        frames = [[start.code] for start in starts]
        for index, head in enumerate(self._heads):
            last = self._model(inputs_embeds=rows, cache=cache, use_cache=True).last_hidden_state[:, -1]
            codes = self._choose(head(last), starts, index)
            for frame, code in zip(frames, codes, strict=True):
                frame.append(code)
            rows = self._embeddings[index](torch.tensor(codes, device=device))[:, None]
        return [tuple(frame) for frame in frames]

    def embed(self, frames: Sequence[Sequence[int]]) -> Tensor:
        """[n, H]: the sum of the embeddings of each frame's codes."""
        codes = torch.tensor(frames, device=self._first.weight.device)
        rows = [self._first(codes[:, 0])]
        rows += [embedding(codes[:, index]) for index, embedding in enumerate(self._embeddings, start=1)]
        return torch.stack(rows, dim=1).sum(1)

    def _choose(self, logits: Tensor, starts: Sequence[FrameStart], index: int) -> list[int]:
        rows = [
            SampleRow(
                params=_GREEDY if start.greedy else _DRAWN,
                seed=start.seed,
                position=start.number * (self.groups - 1) + index,
            )
            for start in starts
        ]
        return [one.token for one in sample(logits, rows)]

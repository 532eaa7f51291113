"""What the painter's pictures are worth: adherence by the judge, Frechet distance, likeness to an uncached run."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from omnistage.models.tiny_shapes.captions import caption
from omnistage.models.tiny_shapes.drawing import Attributes, random_attributes, render
from omnistage.models.tiny_shapes.judge import Judge, frechet_distance, verdicts
from omnistage.models.tiny_shapes.network import Painter
from omnistage.models.tiny_shapes.stage import PainterModel, picture_of
from omnistage.models.tiny_shapes.training import Conditions
from omnistage.payload import MultimodalPayload
from omnistage.stages.base import InputChunk, StageRequest

# The captions and the real pictures of every measurement are the same.
_ASKED_SEED, _REAL_SEED = 77, 3
_BATCH = 32


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of 1; `frechet` against as many real pictures (compare equal `pictures` only); CPU seconds per picture.

    `psnr_db` is the likeness to other pictures of the same noise, where there are any.
    """

    pictures: int
    shape: float
    colour: float
    background: float
    place: float
    size: float
    all_attributes: float
    frechet: float
    cpu_s: float
    skipped_steps: float
    psnr_db: float | None = None


def asked_attributes(count: int) -> list[Attributes]:
    return random_attributes(count, np.random.default_rng(_ASKED_SEED))


def measure(
    painter: Painter,
    judge: Judge,
    count: int,
    likeness: Tensor | None = None,
    *,
    conditions: Conditions | None = None,
    **params: Any,
) -> Quality:
    """Draws `count` pictures with the stage's own steps. `params` as in a request; seeds are 0, 1, 2, ...

    `conditions` gives the hidden states of captions for a painter that reads those.
    """
    asked = asked_attributes(count)
    pictures, seconds, skipped = draw_pictures(painter, asked, conditions, **params)
    right = verdicts(judge, pictures, asked)
    real = torch.from_numpy(render(asked, np.random.default_rng(_REAL_SEED))).permute(0, 3, 1, 2)
    shares = dict(zip(Attributes._fields, right.mean(0).round(4).tolist(), strict=True))
    return Quality(
        pictures=count,
        **shares,
        all_attributes=round(float(right.all(1).mean()), 4),
        frechet=round(frechet_distance(judge, pictures, real), 2),
        cpu_s=round(seconds / count, 4),
        skipped_steps=skipped / count,
        psnr_db=None if likeness is None else round(psnr(pictures, likeness), 2),
    )


def draw_pictures(
    painter: Painter, asked: list[Attributes], conditions: Conditions | None = None, **params: Any
) -> tuple[Tensor, float, float]:
    """Pictures [n, 3, 32, 32] in -1..1, CPU seconds, and the sum of skipped steps."""
    model = PainterModel(painter, torch.device("cpu"))
    start = time.process_time()
    pictures, skipped = [], 0.0
    for first in range(0, len(asked), _BATCH):
        states = []
        for at in range(first, min(len(asked), first + _BATCH)):
            state = model.open(StageRequest(request_id=str(at), seed=at, params=params, outputs=("image",)))
            given = {"text": MultimodalPayload.text(caption(asked[at]))}
            if conditions is not None:
                given["hidden"] = MultimodalPayload.of({}, hidden=conditions([asked[at]])[0].numpy())
            for port, payload in given.items():
                model.feed(state, InputChunk(request_id=str(at), port=port, seq=0, final=True, payload=payload))
            states.append(state)
        model.encode(states)
        for state in states:
            model.prepare(state)
        while model.remaining(states[0]):
            model.denoise(states)
        pictures += [picture_of(state).clamp(-1, 1) for state in states]
        skipped += sum(model.metrics(state)["skipped_steps"] for state in states)
    return torch.cat(pictures), time.process_time() - start, skipped


def psnr(left: Tensor, right: Tensor) -> float:
    """Decibels between two sets of pictures in -1..1."""
    error = ((left - right) / 2).square().mean().clamp_min(1e-10)
    return float(-10 * torch.log10(error))

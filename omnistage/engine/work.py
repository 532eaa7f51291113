"""What a request will cost each stage, predicted from what it asks and learnt from what requests have cost.

A stage's work is linear in what is asked of it: seconds = a + b * characters of input + c * bound on output tokens +
d * steps * pixels * frames + e * bytes of media. The factors are learnt per stage and task by recursive least squares
with forgetting (Ljung, System Identification, 1999, section 11.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from omnistage.config.model import OmniConfig, RequestPlan
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest, StageMetrics

# Seconds that a request is taken to cost a stage of which nothing is known.
FIRST_GUESS_S = 0.1
# Units of the features, so that their factors are of like size: characters, tokens, pixel-steps, bytes.
_UNITS = np.array([1.0, 1e3, 1e2, 1e6, 1e6])
_FORGET = 0.995
# Variances of the first factors, in those of what is observed: the constant is a guess, of the others nothing is known.
_UNCERTAINTY = np.diag([1e2, 1e8, 1e8, 1e8, 1e8])

# Parameters whose product is the work of drawing, whatever a model calls them.
_DRAWN = ("num_inference_steps", "steps", "width", "height", "num_frames", "frames")

Vector = npt.NDArray[np.float64]
# Stage and task, whose requests are alike.
Kind = tuple[str, str]


class Ask:
    """What one request asks of each stage that it visits, as feature vectors [5] (see the module docstring)."""

    def __init__(
        self, request: OmniRequest, plan: RequestPlan, media: Mapping[str, MultimodalPayload], config: OmniConfig
    ) -> None:
        shared = (_characters(request), float(sum(payload.nbytes for payload in media.values())))
        self.features: dict[Kind, Vector] = {
            (stage, request.task): _features(request, plan.params.get(stage, {}), stage, shared, config)
            for stage in plan.stages
        }

    @property
    def stages(self) -> Iterator[str]:
        return (stage for stage, _ in self.features)


def _features(
    request: OmniRequest, params: Mapping[str, Any], stage: str, shared: tuple[float, float], config: OmniConfig
) -> Vector:
    characters, nbytes = shared
    layers: tuple[Mapping[str, Any], ...] = (
        request.sampling.get(stage, {}),
        request.sampling.get("", {}),
        params.get("sampling") or {},
        config.stages[stage].sampling,
    )
    tokens = next((bound for layer in layers if (bound := _number(layer.get("max_tokens")))), 0.0)
    given = {**request.params, **params}
    asked = [_number(given.get(name)) for name in _DRAWN]
    drawn = prod(value for value in asked if value) if any(asked) else 0.0
    vector: Vector = np.array([1.0, characters, tokens, drawn, nbytes]) / _UNITS
    return vector


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and 0 < value < 1e12 else 0.0


def _characters(request: OmniRequest) -> float:
    count = len(request.prompt or "") + len(request.raw_prompt or "")
    for message in request.messages or ():
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        count += sum(len(text) for text in texts if isinstance(text, str))
    return float(count)


class Load:
    """The sum of what several requests ask. Empty again, it is exactly zero."""

    def __init__(self) -> None:
        self._count = 0
        self._sums: dict[Kind, Vector] = {}

    def __len__(self) -> int:
        return self._count

    def add(self, ask: Ask) -> None:
        self._count += 1
        for kind, features in ask.features.items():
            self._sums[kind] = self._sums[kind] + features if kind in self._sums else features

    def remove(self, ask: Ask) -> None:
        """Takes out a request that was added."""
        self._count -= 1
        if self._count == 0:
            self._sums.clear()
            return
        for kind, features in ask.features.items():
            self._sums[kind] = self._sums[kind] - features

    def items(self) -> Iterable[tuple[Kind, Vector]]:
        return self._sums.items()


class _Law:
    """The factors of one kind."""

    def __init__(self) -> None:
        size = len(_UNITS)
        self.factors: Vector = np.zeros(size)
        self.factors[0] = FIRST_GUESS_S
        self._uncertainty = _UNCERTAINTY

    def learn(self, features: Vector, seconds: float) -> None:
        spread = self._uncertainty @ features
        gain = spread / (_FORGET + features @ spread)
        self.factors = self.factors + gain * (seconds - features @ self.factors)
        shrunk = self._uncertainty - np.outer(gain, spread)
        grown = shrunk / _FORGET
        self._uncertainty = grown if np.trace(grown) < np.trace(_UNCERTAINTY) else shrunk


class WorkModel:
    """Seconds of each stage, all its replicas together, for what requests ask."""

    def __init__(self, config: OmniConfig) -> None:
        self._replicas = {name: stage.replicas for name, stage in config.stages.items()}
        self._laws: dict[Kind, _Law] = {}

    def learn(self, ask: Ask, costs: Mapping[str, StageMetrics]) -> None:
        """Takes what an answered request has cost."""
        for kind, features in ask.features.items():
            if kind[0] in costs:
                self._laws.setdefault(kind, _Law()).learn(features, costs[kind[0]].work_s)

    def per_stage(self, load: Load) -> dict[str, float]:
        """Predicted seconds until each stage has done a load, if nothing else holds it up."""
        seconds: dict[str, float] = dict.fromkeys(self._replicas, 0.0)
        for kind, features in load.items():
            law = self._laws.get(kind)
            work = float(law.factors @ features) if law is not None else FIRST_GUESS_S * float(features[0])
            seconds[kind[0]] += max(0.0, work) / self._replicas[kind[0]]
        return seconds

    def done(self, stage: str, costs: Mapping[str, StageMetrics]) -> float:
        """Seconds that a request has cost a stage, all its replicas together."""
        return costs[stage].work_s / self._replicas[stage] if stage in costs else 0.0

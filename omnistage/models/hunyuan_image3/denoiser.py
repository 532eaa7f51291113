"""One step of any number of requests: the rows of their pictures in one call of the backbone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omnistage.models.hunyuan_image3.attention import Document, DocumentPlan, Segment
from omnistage.models.hunyuan_image3.components import Components
from omnistage.models.hunyuan_image3.flight import Flight
from omnistage.models.hunyuan_image3.schedule import MODEL_TIME


class Denoiser:
    """Velocities of the latents. Of every row only the timestep (with its companions) and the picture are computed:
    everything before them is in the prompt's keys and values, nothing after them is seen."""

    def __init__(self, components: Components) -> None:
        checkpoint = components.checkpoint
        self._backbone = components.backbone()
        self._dtype, self._device = components.dtype, components.device
        self._patch_embed, self._final = components.patch_embed(), components.final_layer()
        self._time, self._time_out = components.times("time_embed"), components.times("time_embed_2")
        self._timestep = components.times("timestep_emb")
        self._guidance = components.times("guidance_emb") if checkpoint.distilled else None
        self._next_timestep = components.times("timestep_r_emb") if checkpoint.meanflow else None

    def __call__(self, flights: Sequence[Flight]) -> list[Tensor]:
        """Per request the velocities [branches, channels, h, w] of its branches, float32, before guidance."""
        rows: list[Tensor] = []
        documents: list[Document] = []
        turns: list[tuple[Tensor, Tensor]] = []
        for flight in flights:
            own, special = self._rows(flight)
            segments = (Segment(0, special, False), Segment(special, len(own), True))
            for branch in flight.branches:
                rows.append(own)
                turns.append(flight.ready().angles)
                documents.append(Document(branch.pieces, segments))
        angles = torch.cat([cos for cos, _ in turns]), torch.cat([sin for _, sin in turns])
        hidden = self._backbone(torch.cat(rows), angles, DocumentPlan(documents))
        return self._velocities(flights, hidden)

    def _rows(self, flight: Flight) -> tuple[Tensor, int]:
        """The embedded rows of a step [n, hidden], and how many of them come before the picture's."""
        drawing = flight.ready()
        now = self._times(drawing.schedule.time(flight.step))
        special = [self._timestep(now)]
        if self._guidance is not None:
            # The model was given this number in bfloat16.
            scale = torch.tensor(MODEL_TIME * flight.ask.guidance, dtype=torch.bfloat16)
            special.append(self._guidance(self._times(float(scale))))
        if self._next_timestep is not None:
            special.append(self._next_timestep(self._times(drawing.schedule.time(flight.step + 1))))
        picture = self._patch_embed(drawing.latents.to(self._dtype), self._time(now))[0]
        return torch.cat((*special, picture)), len(special)

    def _velocities(self, flights: Sequence[Flight], hidden: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        start = 0
        for flight in flights:
            height, width = flight.grid
            branches, count = len(flight.branches), len(flight.ready().angles[0])
            rows = hidden[start : start + branches * count].view(branches, count, -1)[:, -height * width :]
            time = self._time_out(self._times(flight.ready().schedule.time(flight.step))).expand(branches, -1)
            found.append(self._final(rows, time, flight.grid).float())
            start += branches * count
        return found

    def _times(self, time: float) -> Tensor:
        return torch.tensor([time], device=self._device)


def guided(velocities: Tensor, scale: float) -> Tensor:
    """One velocity [1, channels, h, w] of those of the branches: without + scale * (with - without)."""
    if len(velocities) == 1:
        return velocities
    with_prompt, without = velocities[:1], velocities[1:]
    return without + scale * (with_prompt - without)

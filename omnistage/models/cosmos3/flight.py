"""All of one request in the generator: conditions, latents, schedules, random generator, step index."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from omnistage.models.cosmos3.ask import Ask
from omnistage.models.cosmos3.denoiser import Document, Velocity
from omnistage.models.cosmos3.layout import Layout
from omnistage.models.cosmos3.reasoner import Ids, TextKV
from omnistage.models.cosmos3.schedules import Schedule
from omnistage.ops.step_cache import CacheMemory, CacheTurn
from omnistage.payload import Array
from omnistage.stages.base import StageRequest


@dataclass
class Latents:
    """Float32: `vision` [1, C, T, h, w], `sound` [D, S], `action` [chunk, A]. `clean` is what clean frames hold and
    `mask` [T, 1, 1] is 1 where they are."""

    vision: Tensor
    clean: Tensor
    mask: Tensor
    sound: Tensor | None = None
    action: Tensor | None = None


class Branch(NamedTuple):
    """A document of a step: its name, its layout and its text."""

    name: str
    layout: Layout
    text: TextKV


@dataclass
class Flight:
    """`media` holds client arrays by port. `texts` is complete when the reasoner's part is done; `latents`, `schedule`
    and `branches` exist from `prepare` on. `controls` are the clean latents of control videos, `chunk` the transfer
    chunk under way; `chunks` and `chunk_latents` are the new pixels and the latents of those that are done, `previous`
    all pixels of the last one. `reanchor`: the schedule moves clean frames, which are put back after each step.
    `memories`: of the step cache, by branch. `expected`: the clean latents that the last step points to
    (for previews)."""

    request: StageRequest
    ask: Ask
    generator: torch.Generator
    ids: dict[str, Ids] = field(default_factory=dict)
    media: dict[str, Array] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    texts: dict[str, TextKV] = field(default_factory=dict)
    encoded: Tensor | None = None
    latents: Latents | None = None
    schedule: Schedule | None = None
    branches: tuple[Branch, ...] = ()
    controls: list[Tensor] = field(default_factory=list)
    control_clips: list[Tensor] = field(default_factory=list)
    seeded_frames: int = 0
    chunk: int = 0
    chunks: list[Tensor] = field(default_factory=list)
    chunk_latents: list[Tensor] = field(default_factory=list)
    previous: Tensor | None = None
    reanchor: bool = False
    memories: dict[str, CacheMemory] = field(default_factory=dict)
    expected: Tensor | None = None
    step: int = 0
    done: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def chunk_count(self) -> int:
        return self.ask.transfer.chunks if self.ask.transfer is not None else 1

    @property
    def remaining(self) -> int:
        """Steps still to do, over all chunks."""
        return (self.chunk_count - self.chunk) * self.ask.steps - self.step

    @property
    def chunk_ended(self) -> bool:
        return self.schedule is not None and self.step == len(self.schedule)

    def documents(self) -> list[Document]:
        """One per branch that is active at this step."""
        latents, schedule = self.ready()
        timestep = schedule.timestep(self.step)
        action = self.ask.action
        domain = torch.tensor([action.domain.number]) if action is not None else None
        return [
            Document(
                layout=branch.layout,
                text=branch.text,
                vision=[latents.vision] if branch.name == "bare" else [*self.controls, latents.vision],
                sound=latents.sound,
                action=latents.action,
                domain=domain,
                timestep=timestep,
                turn=CacheTurn(self.ask.step_cache, self._memory(branch.name), self.step, len(schedule)),
            )
            for branch in self._active(timestep)
        ]

    def advance(self, velocities: list[Velocity]) -> None:
        """One step of every modality, from the predictions for `documents()` in the same order."""
        latents, schedule = self.ready()
        names = [branch.name for branch in self._active(schedule.timestep(self.step))]
        self.memories |= {name: velocity.memory for name, velocity in zip(names, velocities, strict=True)}
        merged = self._merge(dict(zip(names, velocities, strict=True)))
        step, generator = self.step, self.generator
        if self.ask.partial_images:
            self.expected = schedule.expected(step, merged.vision, latents.vision)
        latents.vision = self._anchored(
            latents, schedule.step("vision", step, merged.vision, latents.vision, generator)
        )
        if merged.sound is not None and latents.sound is not None:
            latents.sound = schedule.step("sound", step, merged.sound, latents.sound, generator)
        action = self.ask.action
        if action is not None and action.mode != "forward_dynamics":
            assert merged.action is not None
            assert latents.action is not None
            merged.action[:, action.domain.width :] = 0
            latents.action = schedule.step("action", step, merged.action, latents.action, generator)
            latents.action[:, action.domain.width :] = 0
        self.step += 1

    def _memory(self, branch: str) -> CacheMemory:
        return self.memories.get(branch, CacheMemory())

    @property
    def skipped_steps(self) -> float:
        """Steps that the step cache has left out, the mean over guidance branches."""
        return sum(memory.skipped for memory in self.memories.values()) / max(1, len(self.memories))

    def forget_steps(self) -> None:
        """Empties the step cache's memories: a run has ended or starts anew."""
        self.memories = {name: memory.emptied() for name, memory in self.memories.items()}

    def end_chunk(self, clip: Tensor) -> None:
        """Takes the pixels [1, 3, frames, H, W] of the chunk that has had its steps; frames it repeats are dropped."""
        self.previous = clip
        self.chunks.append(clip if self.chunk == 0 else clip[:, :, self.seeded_frames :])
        self.chunk_latents.append(self.ready()[0].vision)

    def ready(self) -> tuple[Latents, Schedule]:
        """Latents and schedule; only after `prepare`."""
        if self.latents is None or self.schedule is None:
            raise RuntimeError("the request is not prepared")
        return self.latents, self.schedule

    def _active(self, timestep: float) -> list[Branch]:
        transfer = self.ask.transfer
        if transfer is None:
            return list(self.branches)
        off = set[str]()
        if not _within(transfer.guidance_interval, timestep):
            off.add("uncond")
        if not _within(transfer.control_interval, timestep):
            off.add("bare")
        return [branch for branch in self.branches if branch.name not in off]

    def _merge(self, by_name: dict[str, Velocity]) -> Velocity:
        """Guidance: uncond + g (cond - uncond), where a control guidance has first moved cond away from bare."""
        merged = by_name["cond"]
        if "bare" in by_name and self.ask.transfer is not None:
            merged = _guided(by_name["bare"], merged, self.ask.transfer.control_guidance)
        if "uncond" in by_name:
            merged = _guided(by_name["uncond"], merged, self.ask.guidance)
        return merged

    def _anchored(self, latents: Latents, vision: Tensor) -> Tensor:
        """Clean frames put back where the schedule moves them (distilled) or must not drift (transfer)."""
        if not (self.reanchor or self.ask.transfer is not None):
            return vision
        return latents.mask * latents.clean + (1.0 - latents.mask) * vision


def _within(interval: tuple[float, float] | None, timestep: float) -> bool:
    return interval is None or interval[0] <= timestep <= interval[1]


def _guided(base: Velocity, toward: Velocity, scale: float) -> Velocity:
    return Velocity(
        vision=base.vision + scale * (toward.vision - base.vision),
        sound=_guided_tensor(base.sound, toward.sound, scale),
        action=_guided_tensor(base.action, toward.action, scale),
    )


def _guided_tensor(base: Tensor | None, toward: Tensor | None, scale: float) -> Tensor | None:
    return None if base is None or toward is None else base + scale * (toward - base)

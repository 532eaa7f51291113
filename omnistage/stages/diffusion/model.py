"""What a model of a diffusion stage provides. Torch-free protocol.

A request passes through phases, each of them only once except `denoise`:

    open -> (feed ...) -> encode -> prepare -> denoise, once per step -> decode, once per piece -> close

The engine decides who shares a call; the model does the arithmetic. All calls come from the stage's thread, except
`decode` and the callables that `preview` returns: these run one after the other on one decode thread, beside the next
denoise step of *other* requests. So `decode` must not touch what `encode` or `prepare` use without a lock of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Literal, Protocol, TypeVar

import msgspec

from omnistage.config.model import OptionSpec
from omnistage.stages.base import InputChunk, Produced, StageRequest

__all__ = ["BATCHING", "Capabilities", "DiffusionModel", "PARTIAL_PORT", "PROGRESS_PORT", "Preview", "Produced"]

S = TypeVar("S")

# Output ports with a meaning for the engine: `{"step": i, "steps": n}` in the metadata after each step, and previews.
PROGRESS_PORT = "progress"
PARTIAL_PORT = "partial"

# The stage option "batching" of pipelines that can do both. One that cannot declares fewer choices.
BATCHING = OptionSpec(
    type="str",
    default="step",
    choices=("step", "request"),
    help="step: requests join and leave between steps; request: a batch runs to its end before the next one starts",
)


Preview = Callable[[], Produced]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a model can do; a stage configuration that asks for more is refused with ConfigError.

    `batching` lists the policies that may put several requests into one call (none: `max_num_seqs` must be 1).
    `partial_images`: `preview` gives pictures. `batched_decode`: `decode` takes several states whose `decode_group`
    agree.
    """

    batching: frozenset[Literal["step", "request"]] = frozenset({"step", "request"})
    partial_images: bool = False
    batched_decode: bool = False


class DiffusionModel(Protocol[S]):
    """A denoiser with what goes before and after it. `S` holds all of one request: parameters, conditions, latents,
    schedulers, generator, step index. Nothing that a request changes is shared with another one.

    `encode`, `prepare`, `denoise` and `decode` are all or nothing: when one raises, every state is as it was before, so
    that the call can be repeated without the state at fault. Compute first, then change states.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def open(self, request: StageRequest) -> S:
        """A fresh state; cheap (no model call). Raises RequestError naming the parameter: every parameter is validated
        here, unknown ones are refused."""
        ...

    def feed(self, state: S, chunk: InputChunk) -> None:
        """Takes a chunk; copies or keeps it, and releases its payload when no view is held any more.

        When it raises (RequestError for bad content), it has neither taken nor released the chunk: the engine does.
        """
        ...

    def ready(self, state: S) -> bool:
        """True when the inputs of the next phase are complete. Asked after `open` and after each `feed`."""
        ...

    def encode(self, states: list[S]) -> None:
        """Text and media conditions of requests whose turn has come, in one batch where the model can."""
        ...

    def prepare(self, state: S) -> None:
        """Layout, schedulers, noise: everything up to the first step. The model may do nothing here."""
        ...

    def group(self, state: S) -> Hashable:
        """Requests with equal groups may share one transformer call. Known from `open` on."""
        ...

    def rows(self, state: S) -> int:
        """Rows of the transformer call that the next step costs, over all documents of the request (both guidance
        branches). An estimate until `prepare`; at least 1."""
        ...

    def remaining(self, state: S) -> int:
        """Steps still to do; the count of all steps before the first one. 0: nothing (left) to denoise."""
        ...

    def denoise(self, states: list[S]) -> None:
        """One step for each state, all in ONE transformer call. Only states of one group with `remaining > 0`."""
        ...

    def preview(self, state: S) -> Preview | None:
        """After a step, for requests that read the port "partial": a callable for the decode thread that works on a
        snapshot taken now, or None when no picture is due after this step."""
        ...

    def decode_group(self, state: S) -> Hashable:
        """States whose decode groups agree may share one `decode` call (capability `batched_decode`)."""
        ...

    def decode(self, states: list[S]) -> list[list[Produced]]:
        """The next piece of each state's output, on the decode thread. Called until `done`."""
        ...

    def done(self, state: S) -> bool:
        """True when every output port of the model's own is closed (the engine closes "progress" and "partial")."""
        ...

    def metrics(self, state: S) -> dict[str, float]:
        """The model's own figures of the request ("video_decode_s", "skipped_steps", ...); the engine adds phase times
        and counts."""
        ...

    def close(self, state: S) -> None:
        """Releases what is held, payloads included; called once per state, also after an abort or an error."""
        ...

    def shutdown(self) -> None:
        """Releases what the model itself holds; no call comes after it."""
        ...

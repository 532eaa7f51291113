"""What the thinker tells the talker: once the part of the prompt that the talker sees, then the words to speak.

The talker sees the user's turns (system and earlier assistant turns are dropped) and the three tokens that open the
answer. Of a text position it needs the token id only; of a media position the thinker's hidden row. The first chunk of
the port "speech" carries `meta["prompt"]` (a `SpokenPrompt`) and the tensor "rows" [media positions, hidden]; every
chunk carries `meta["spoken"]`, the token ids that became certain to be spoken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from omnistage.errors import RequestError
from omnistage.models.qwen3_omni.encoders import Medium
from omnistage.models.qwen3_omni.prompt import ThinkerPrompt

PORT = "speech"
_HEAD = 3


class SpokenPrompt(msgspec.Struct, frozen=True):
    """`ids` of the user's turns, `places` of the media rows among them, `head` the ids that open the answer.

    Grids are (t, h, w) per image and video of the user's turns, `video_seconds` per temporal patch of each video,
    `sounds` the mel frames of each sound.
    """

    ids: list[int]
    places: list[int]
    head: list[int]
    image_grids: list[list[int]]
    video_grids: list[list[int]]
    video_seconds: list[float]
    sounds: list[int]


@dataclass(frozen=True, slots=True)
class TokenRoles:
    """The ids by which turns are told apart."""

    start: int
    user: int
    assistant: int

    @classmethod
    def of(cls, config: Any) -> TokenRoles:
        return cls(config.im_start_token_id, config.user_token_id, config.assistant_token_id)


@dataclass(frozen=True, slots=True)
class Speech:
    """The talker's view of a prompt. `rows` are the prompt positions whose hidden rows it needs, `written` the ids of
    an answer that the prompt already begins."""

    prompt: SpokenPrompt
    rows: list[int]
    written: list[int]


def speech_of(prompt: ThinkerPrompt, roles: TokenRoles) -> Speech:
    """Raises RequestError when the prompt opens no answer."""
    ids = prompt.ids
    segments = _segments(ids, roles.start)
    answer = next((start for start, _, role in reversed(segments) if role == roles.assistant), None)
    if answer is None or len(ids) < answer + _HEAD:
        raise RequestError("speech needs a prompt that opens an assistant turn", param="raw_prompt")
    kept = [position for start, stop, role in segments if role == roles.user for position in range(start, stop)]
    spoken, rows = _spoken(prompt, kept, ids[answer : answer + _HEAD])
    return Speech(spoken, rows, ids[answer + _HEAD :])


def _segments(ids: Sequence[int], start_id: int) -> list[tuple[int, int, int | None]]:
    """From one start token to the next: first position, position behind the last, second token (the role)."""
    starts = [index for index, token in enumerate(ids) if token == start_id]
    ends = [*starts[1:], len(ids)]
    return [
        (start, stop, ids[start + 1] if start + 1 < len(ids) else None)
        for start, stop in zip(starts, ends[: len(starts)], strict=True)
    ]


def _spoken(prompt: ThinkerPrompt, kept: list[int], head: list[int]) -> tuple[SpokenPrompt, list[int]]:
    """What the talker sees of the positions `kept`, and those of them whose hidden rows it needs."""
    place_of = {position: place for place, position in enumerate(kept)}
    seen = [medium for medium in prompt.media if medium.start in place_of]
    rows = sorted(position for medium in seen for position in medium.positions.tolist())
    spoken = SpokenPrompt(
        ids=[prompt.ids[position] for position in kept],
        places=[place_of[position] for position in rows],
        head=head,
        image_grids=_grids(seen, "image"),
        video_grids=_grids(seen, "video"),
        video_seconds=[medium.seconds for medium in seen if medium.kind == "video"],
        sounds=[medium.features.shape[1] for medium in seen if medium.kind == "audio"],
    )
    return spoken, rows


def _grids(media: list[Medium], kind: str) -> list[list[int]]:
    return [list(medium.grid) for medium in media if medium.kind == kind]


class SpokenTokens:
    """Decides which generated tokens are spoken: all but the last one, as far as their text is given out.

    A token waits while its text may turn out to be the beginning of a stop string, of thoughts or of a call.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[int] = []

    def push(self, token: int | None, *, last: bool, withheld: bool, unsaid: bool) -> list[int]:
        """The ids that are certain now. `last`: no token follows; `unsaid`: what waits is dropped, this one too."""
        if token is not None and not last:
            self._waiting.append(token)
        if unsaid:
            self._waiting.clear()
        if withheld and not last:
            return []
        certain, self._waiting = self._waiting, []
        return certain

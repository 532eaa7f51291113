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
    starts = [index for index, token in enumerate(ids) if token == roles.start]
    heads = [start for start in starts if start + 1 < len(ids) and ids[start + 1] == roles.assistant]
    if not heads or len(ids) < heads[-1] + _HEAD:
        raise RequestError("speech needs a prompt that opens an assistant turn", param="raw_prompt")
    kept = _user_positions(ids, starts, roles.user)
    place_of = {position: place for place, position in enumerate(kept)}
    seen = [medium for medium in prompt.media if medium.start in place_of]
    rows = sorted(position for medium in seen for position in medium.positions.tolist())
    videos = [medium for medium in seen if medium.kind == "video"]
    spoken = SpokenPrompt(
        ids=[ids[position] for position in kept],
        places=[place_of[position] for position in rows],
        head=ids[heads[-1] : heads[-1] + _HEAD],
        image_grids=[list(medium.grid) for medium in seen if medium.kind == "image"],
        video_grids=[list(medium.grid) for medium in videos],
        video_seconds=[medium.seconds for medium in videos],
        sounds=[medium.features.shape[1] for medium in seen if medium.kind == "audio"],
    )
    return Speech(spoken, rows, ids[heads[-1] + _HEAD :])


def _user_positions(ids: Sequence[int], starts: Sequence[int], user: int) -> list[int]:
    """Positions of the segments (from one start token to the next) whose second token is the user's role."""
    kept: list[int] = []
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        if start + 1 < len(ids) and ids[start + 1] == user:
            kept += range(start, stop)
    return kept


class SpokenTokens:
    """Decides which generated tokens are spoken: all but the last one, as far as their text is given out.

    A token waits while its text may turn out to be the beginning of a stop string.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[int] = []

    def push(self, token: int | None, *, last: bool, withheld: bool, stopped: bool) -> list[int]:
        """The ids that are certain now. `last`: no token follows; `stopped`: by a stop string, whose tokens are
        dropped."""
        if token is not None and not last:
            self._waiting.append(token)
        if stopped:
            self._waiting.clear()
        if withheld and not last:
            return []
        certain, self._waiting = self._waiting, []
        return certain

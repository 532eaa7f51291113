"""From a request to the chat messages of its two branches. Torch-free; sentences as the model was trained on them."""

from __future__ import annotations

from typing import NamedTuple

from omnistage.models.cosmos3.action import caption
from omnistage.models.cosmos3.ask import Ask

Messages = list[dict[str, str]]

_SYSTEM = "You are a helpful assistant who will generate {medium} from a give prompt."
_SYSTEM_TRANSFER = (
    "You are a helpful assistant that generates images or videos following the user's instructions"
    " and control signals (edge maps, blur, depth, or segmentation)."
)


class Branches(NamedTuple):
    """Messages of the positive and of the negative branch."""

    positive: Messages
    negative: Messages


def messages_of(ask: Ask) -> Branches:
    """The negative branch is only used with guidance; its text is never empty except where templates are off."""
    if ask.action is not None:
        text = caption(
            ask.prompt, view_point=ask.action.view_point, frames=ask.frames, fps=ask.fps, canvas=ask.action.canvas
        )
        return Branches(_chat(ask, text), _chat(ask, ask.negative_prompt))
    if ask.transfer is not None:
        return Branches(_chat(ask, ask.prompt), _chat(ask, ask.negative_prompt))
    return Branches(
        _chat(ask, _with_templates(ask, ask.prompt, "is")),
        _chat(ask, _with_templates(ask, ask.negative_prompt, "is not")),
    )


def _chat(ask: Ask, text: str) -> Messages:
    user = {"role": "user", "content": text}
    if not ask.system_prompt:
        return [user]
    system = _SYSTEM.format(medium="images" if ask.is_image else "videos")
    return [{"role": "system", "content": _SYSTEM_TRANSFER if ask.transfer is not None else system}, user]


def _with_templates(ask: Ask, text: str, verb: str) -> str:
    if ask.duration_template and not ask.is_image:
        seconds = ask.frames / ask.fps
        text = _append(text, f"The video {verb} {seconds:.1f} seconds long and {verb} of {ask.fps:.0f} FPS.")
    if ask.resolution_template:
        medium = "image" if ask.is_image else "video"
        text = _append(text, f"This {medium} {verb} of {ask.height}x{ask.width} resolution.")
    return text


def _append(text: str, sentence: str) -> str:
    text = text.rstrip(".")
    return f"{text}. {sentence}" if text else sentence

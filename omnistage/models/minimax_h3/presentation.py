"""The token list that the text encoder reads: labels and vision blocks of the media, then the prompt, verbatim.

Torch-free. A label numbers media per kind; the sound of a video is announced before the video. Vision blocks are tagged
as video rows. Formulas: diffusers 0.42, `modular_pipelines/minimax_h3/encoders.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from omnistage.models.minimax_h3.ask import IMAGE_PAD, VIDEO_PAD, Ask
from omnistage.models.minimax_h3.geometry import FPS
from omnistage.models.minimax_h3.layout import TEXT_TAG, VIDEO_TAG

# A clip is read at 2 frames per second.
STRIDE = FPS // 2
_START, _END = "<|vision_start|>", "<|vision_end|>"
_PADS = {"image": IMAGE_PAD, "video": VIDEO_PAD}
_IMAGE, _VIDEO = 1, 2


class Blocks(NamedTuple):
    """Vision blocks of one medium: pads per block, and the seconds that label them (a picture has one, unlabelled)."""

    pads: int
    seconds: tuple[float, ...] = ()


@dataclass
class Presentation:
    """Equal lengths: token ids, row tags (see `layout`), and kinds (0 text, 1 picture pad, 2 clip pad)."""

    tokens: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)


def block_seconds(read_frames: int, group: int) -> tuple[float, ...]:
    """The mean time of each group of frames that were read; the last frame is repeated to fill its group."""
    times = [index * STRIDE / FPS for index in range(read_frames)]
    times += [times[-1]] * (-len(times) % group)
    return tuple((times[at] + times[at + group - 1]) / 2 for at in range(0, len(times), group))


class Presenter:
    """Writes presentations with a checkpoint's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in (_START, _END, *_PADS.values())}

    def present(self, ask: Ask, blocks: list[Blocks]) -> Presentation:
        """`blocks`: of the keyframes, or of the pictures and clips among the references, in order."""
        made = Presentation()
        left = iter(blocks)
        for index in range(len(ask.anchors)):
            self._text(made, f"<Picture {index + 1}>: ")
            self._block(made, "image", next(left).pads)
        self._references(made, ask, left)
        self._text(made, ask.prompt)
        return made

    def _references(self, made: Presentation, ask: Ask, left: Any) -> None:
        counts = {"image": 0, "video": 0, "sound": 0}
        for reference in ask.references:
            if reference.has_sound:
                counts["sound"] += 1
                self._text(made, f"<Audio {counts['sound']}>: ")
            if reference.kind == "audio":
                continue
            counts[reference.kind] += 1
            block: Blocks = next(left)
            label = "Picture" if reference.kind == "image" else "Video"
            self._text(made, f"<{label} {counts[reference.kind]}>: ")
            if reference.kind == "image":
                self._block(made, "image", block.pads)
            for seconds in block.seconds:
                self._text(made, f"<{seconds:.1f} seconds>")
                self._block(made, "video", block.pads)

    def _text(self, made: Presentation, text: str) -> None:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        made.tokens += ids
        made.tags += [TEXT_TAG] * len(ids)
        made.kinds += [0] * len(ids)

    def _block(self, made: Presentation, kind: str, pads: int) -> None:
        made.tokens += [self._ids[_START], *[self._ids[_PADS[kind]]] * pads, self._ids[_END]]
        made.tags += [VIDEO_TAG] * (pads + 2)
        made.kinds += [0, *[_IMAGE if kind == "image" else _VIDEO] * pads, 0]

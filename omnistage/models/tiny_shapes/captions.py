"""Captions and free prompts as the words that the model knows. Torch-free.

The model was trained on one form of sentence. A free prompt is read for the five attributes, synonyms included, and
written anew in that form; what it leaves open gets a fixed value, what nobody knows is refused by its name.
"""

from __future__ import annotations

import re

from omnistage.errors import RequestError
from omnistage.models.tiny_shapes.drawing import BACKGROUNDS, COLOURS, PLACES, SHAPES, SIZES, VALUES, Attributes

LENGTH = 12
# Token 0 fills up, and, on its own, is the caption of the unguided branch.
WORDS = (
    "", "a", "at", "background", "black", "blue", "bottom", "center", "circle", "cross", "cyan", "diamond", "gray",
    "green", "heart", "in", "large", "left", "navy", "of", "on", "orange", "pink", "purple", "red", "right", "ring",
    "small", "square", "star", "the", "top", "triangle", "white", "yellow",
)  # fmt: skip
_KINDS = ("shape", "colour", "background", "place", "size")
_DEFAULTS = {"colour": "red", "background": "white", "place": "center", "size": "large"}
_PLACE_WORDS = {
    "center": "in the center",
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
}
_SYNONYMS = {
    "disc": "circle", "disk": "circle", "dot": "circle", "ball": "circle", "round": "circle", "box": "square",
    "block": "square", "plus": "cross", "donut": "ring", "doughnut": "ring", "hoop": "ring", "rhombus": "diamond",
    "lozenge": "diamond",
    "crimson": "red", "scarlet": "red", "ruby": "red", "lime": "green", "emerald": "green", "azure": "blue",
    "cobalt": "blue", "gold": "yellow", "golden": "yellow", "violet": "purple", "lilac": "purple", "amber": "orange",
    "rose": "pink", "magenta": "pink", "turquoise": "cyan", "teal": "cyan", "aqua": "cyan",
    "grey": "gray", "midnight": "navy",
    "middle": "center", "centre": "center", "centered": "center", "centred": "center", "upper": "top", "above": "top",
    "lower": "bottom", "below": "bottom",
    "tiny": "small", "little": "small", "mini": "small", "big": "large", "huge": "large", "giant": "large",
}  # fmt: skip
_FILLERS = frozenset((
    "a", "an", "the", "of", "on", "in", "at", "to", "with", "against", "and", "is", "there", "one", "it", "its",
    "background", "backdrop", "picture", "image", "drawing", "painting", "photo", "icon", "draw", "paint", "show",
    "make", "please", "me", "side", "shape", "coloured", "colored",
))  # fmt: skip


def caption(one: Attributes) -> str:
    """The sentence that the model was trained on."""
    return f"a {one.size} {one.colour} {one.shape} {_PLACE_WORDS[one.place]} of a {one.background} background"


def tokens(one: Attributes) -> list[int]:
    """`LENGTH` word numbers."""
    found = [WORDS.index(word) for word in caption(one).split()]
    return found + [0] * (LENGTH - len(found))


def read_prompt(prompt: str) -> Attributes:
    """What a prompt asks for. Raises RequestError (param "prompt") naming the word that is unknown or one too many.

    Left open: red, large, in the center, on white. A shape must be named.
    """
    found: dict[str, str] = {}
    for word in re.findall(r"[^\W_]+", prompt.lower()):
        known = _SYNONYMS.get(word, word)
        kind = _kind(known)
        if kind is None:
            if known not in _FILLERS:
                raise RequestError(f"prompt: the word {word[:40]!r} is unknown; {_vocabulary()}", param="prompt")
            continue
        if found.setdefault(kind, known) != known:
            raise RequestError(f"prompt: {word!r} is a second {kind} beside {found[kind]!r}", param="prompt")
    if "shape" not in found:
        raise RequestError(f"prompt: no shape is named; shapes are {', '.join(SHAPES)}", param="prompt")
    _check_background(prompt)
    return Attributes(**(_DEFAULTS | found))


def _kind(word: str) -> str | None:
    """The attribute that a word is a value of."""
    return next((kind for kind, values in zip(_KINDS, VALUES, strict=True) if word in values), None)


def _check_background(prompt: str) -> None:
    """Colours of shapes are no backgrounds, and the other way round."""
    for colour in re.findall(r"(\w+) (?:background|backdrop)", prompt.lower()):
        if _SYNONYMS.get(colour, colour) in COLOURS:
            raise RequestError(
                f"prompt: {colour} is no background; backgrounds are {', '.join(BACKGROUNDS)}", param="prompt"
            )


def _vocabulary() -> str:
    lists = (SHAPES, COLOURS, BACKGROUNDS, PLACES, SIZES)
    return "it draws " + "; ".join(", ".join(values) for values in lists)

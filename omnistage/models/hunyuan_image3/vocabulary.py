"""The tokenizer: text pieces and special tokens by name. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from omnistage.errors import ConfigError
from omnistage.models.hunyuan_image3.checkpoint import Checkpoint
from omnistage.models.hunyuan_image3.sizes import RATIO_TOKENS, SizeTable


class Specials(NamedTuple):
    """Ids of the special tokens. `guidance`, `next_timestep` and `joint` are None where a vocabulary lacks them."""

    bos: int
    boi: int
    eoi: int
    image: int
    pad: int
    cfg: int
    timestep: int
    think: int
    end_think: int
    recaption: int
    end_recaption: int
    answer: int
    end_answer: int
    size: int
    guidance: int | None
    next_timestep: int | None
    joint: int | None


_NAMES = {
    "bos": "<|startoftext|>",
    "boi": "<boi>",
    "eoi": "<eoi>",
    "image": "<img>",
    "pad": "<pad>",
    "cfg": "<cfg>",
    "timestep": "<timestep>",
    "think": "<think>",
    "end_think": "</think>",
    "recaption": "<recaption>",
    "end_recaption": "</recaption>",
    "answer": "<answer>",
    "end_answer": "</answer>",
}
_OPTIONAL = {"guidance": "<guidance>", "next_timestep": "<timestep_r>", "joint": "<joint_img_sep>"}


class Vocabulary:
    """Encodes pieces of text apart from each other, as the model was trained: merges never cross their borders.

    Text of users cannot spell special tokens: such a spelling is encoded as the plain characters it consists of.
    """

    def __init__(self, tokenizer: Tokenizer, base_size: int) -> None:
        self.tokenizer = tokenizer
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True
        self.special = self._specials(f"<img_size_{base_size}>")
        self.ratios = tuple(self._ratios())
        self.sizes = SizeTable.of(base_size, extended=len(self.ratios) > RATIO_TOKENS)
        if len(self.sizes.sizes) > len(self.ratios):
            raise ConfigError(
                f"hunyuan_image3: {len(self.ratios)} ratio tokens for {len(self.sizes.sizes)} sizes", param="model"
            )

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> Vocabulary:
        """Raises ConfigError when the tokenizer is missing or lacks a token."""
        file = checkpoint.folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError("hunyuan_image3: the folder has no tokenizer.json", param="model")
        found = cls(Tokenizer.from_file(str(file)), checkpoint.base_size)
        if checkpoint.distilled and found.special.guidance is None:
            raise ConfigError(
                "hunyuan_image3: the tokenizer lacks <guidance>, which cfg_distilled needs", param="model"
            )
        if checkpoint.meanflow and found.special.next_timestep is None:
            raise ConfigError(
                "hunyuan_image3: the tokenizer lacks <timestep_r>, which use_meanflow needs", param="model"
            )
        return found

    def encode(self, text: str) -> list[int]:
        """A piece of text; no special tokens come of it."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens left out."""
        text: str = self.tokenizer.decode(list(ids))
        return text

    def _specials(self, size: str) -> Specials:
        ids: dict[str, Any] = {field: self._need(name) for field, name in (_NAMES | {"size": size}).items()}
        ids |= {field: self.tokenizer.token_to_id(name) for field, name in _OPTIONAL.items()}
        return Specials(**ids)

    def _need(self, name: str) -> int:
        found: int | None = self.tokenizer.token_to_id(name)
        if found is None:
            raise ConfigError(f"hunyuan_image3: the tokenizer lacks {name}", param="model")
        return found

    def _ratios(self) -> Iterable[int]:
        index = 0
        while (found := self.tokenizer.token_to_id(f"<img_ratio_{index}>")) is not None:
            yield found
            index += 1

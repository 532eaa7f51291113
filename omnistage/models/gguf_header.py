"""The head of a GGUF file: sizes and tensor shapes, as the folder that it is converted to has them. Torch-free.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from omnistage.models.weight_files import TensorHeader
from omnistage.weights import WeightError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONFIG = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
}
_OPTIONAL = ("num_key_value_heads", "head_dim")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


class GgufHeader(NamedTuple):
    """`config` by transformers' names; `tensors` float32, embedding and head by transformers' names."""

    config: dict[str, Any]
    tensors: list[TensorHeader]


def read_gguf(file: Path) -> GgufHeader:
    """Raises WeightError for what is no GGUF file, or one that is cut within its head."""
    try:
        with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parsed(_Cursor(data))
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise WeightError(f"{file.name} is no readable GGUF file: {error}") from None


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A value; arrays are passed over and give None."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            self._at += count * struct.calcsize(f"<{_SCALARS[inner]}")
            return None
        for _ in range(count):
            self.value(inner)
        return None


def _parsed(cursor: _Cursor) -> GgufHeader:
    if cursor.scalar("I") != int.from_bytes(b"GGUF", "little"):
        raise ValueError("it does not begin with GGUF")
    cursor.scalar("I")  # version
    tensor_count, field_count = cursor.scalar("Q"), cursor.scalar("Q")
    fields = {cursor.text(): cursor.value(cursor.scalar("I")) for _ in range(field_count)}
    family = fields["general.architecture"]
    config = {name: fields.get(f"{family}.{key}") for name, key in _CONFIG.items()}
    if missing := [_CONFIG[name] for name in _CONFIG if config[name] is None and name not in _OPTIONAL]:
        raise KeyError(missing[0])
    return GgufHeader(config, [_tensor(cursor) for _ in range(tensor_count)])


def _tensor(cursor: _Cursor) -> TensorHeader:
    """Shapes are stored with the fastest axis first."""
    name = cursor.text()
    shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
    cursor.scalar("I"), cursor.scalar("Q")  # element type and offset
    known = {_EMBEDDING: "model.embed_tokens.weight", _HEAD: "lm_head.weight"}
    return TensorHeader(known.get(name, name), "F32", shape)

"""`MultimodalPayload`: tensors and metadata that travel between stages, to and from clients.

Torch-free. On the wire a payload is a msgpack header (names, dtypes, shapes, byte ranges, metadata) and one body of raw
little-endian C-ordered bytes in which every tensor starts on a 64-byte boundary. Readers get views, not copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
# numpy has no bfloat16: its bits travel as uint16 under the name "bfloat16".
_NUMPY_DTYPES: dict[str, str] = {"bfloat16": "uint16"}
_ALLOWED_DTYPES = frozenset(_NUMPY_DTYPES) | {
    "bool", "uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "complex64",
}  # fmt: skip

Array = npt.NDArray[Any]


class Tensor(msgspec.Struct, frozen=True, eq=False):
    """An n-dimensional array with its logical dtype name. `array` of a bfloat16 tensor is uint16 bits."""

    dtype: str
    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    """Where one tensor lies in a body: `offset` and `nbytes` are bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class PayloadHeader(msgspec.Struct, frozen=True, array_like=True):
    tensors: tuple[TensorHeader, ...]
    meta: dict[str, Any]
    nbytes: int


class MultimodalPayload:
    """Tensors plus metadata (text, sample rate, fps, layout); the only thing a chunk carries.

    A payload that was read from a connector holds memory of the sender: whoever takes it calls `release()` exactly once
    when its arrays are no longer needed (copies are free to live on). Releasing twice raises `RuntimeError`.
    """

    __slots__ = ("_on_release", "_released", "meta", "tensors")

    def __init__(
        self,
        tensors: dict[str, Tensor] | None = None,
        meta: dict[str, Any] | None = None,
        on_release: Callable[[], None] | None = None,
    ) -> None:
        self.tensors = tensors or {}
        self.meta = meta or {}
        self._on_release = on_release
        self._released = False

    @classmethod
    def of(cls, meta: dict[str, Any] | None = None, **arrays: Array) -> MultimodalPayload:
        """A payload from numpy arrays by name."""
        return cls({name: Tensor(str(a.dtype), np.ascontiguousarray(a)) for name, a in arrays.items()}, meta)

    @classmethod
    def text(cls, text: str, **meta: Any) -> MultimodalPayload:
        return cls(meta={"text": text, **meta})

    def __getitem__(self, name: str) -> Array:
        """The array called `name`. Raises KeyError."""
        return self.tensors[name].array

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def release(self) -> None:
        if self._released:
            raise RuntimeError("payload released twice")
        self._released = True
        if self._on_release is not None:
            self._on_release()

    def header(self) -> PayloadHeader:
        """Lays the tensors out in a body."""
        offset, rows = 0, list[TensorHeader]()
        for name, tensor in self.tensors.items():
            rows.append(TensorHeader(name, tensor.dtype, tensor.shape, offset, tensor.nbytes))
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return PayloadHeader(tuple(rows), self.meta, offset)

    def write(self, header: PayloadHeader, body: memoryview) -> None:
        """Copies the tensors into `body` (writable bytes, at least `header.nbytes` long)."""
        for row in header.tensors:
            source = np.ascontiguousarray(self.tensors[row.name].array).reshape(-1)
            target = np.frombuffer(body, source.dtype, source.size, row.offset)
            np.copyto(target, source)

    def packed(self) -> tuple[PayloadHeader, bytes]:
        """Header and body."""
        header = self.header()
        body = bytearray(header.nbytes)
        self.write(header, memoryview(body))
        return header, bytes(body)


def read_payload(
    header: PayloadHeader, body: memoryview | bytes, on_release: Callable[[], None] | None = None
) -> MultimodalPayload:
    """A payload whose arrays are read-only views of `body`. Raises ValueError when header and body do not fit."""
    tensors: dict[str, Tensor] = {}
    for row in header.tensors:
        tensors[row.name] = Tensor(row.dtype, _view(row, body))
    return MultimodalPayload(tensors, header.meta, on_release)


def _view(row: TensorHeader, body: memoryview | bytes) -> Array:
    if row.dtype not in _ALLOWED_DTYPES:
        raise ValueError(f"dtype {row.dtype!r} is not allowed in a payload")
    dtype = np.dtype(_NUMPY_DTYPES.get(row.dtype, row.dtype))
    count = 1
    for side in row.shape:
        if side < 0:
            raise ValueError(f"tensor {row.name!r} has a negative side")
        count *= side
    if count * dtype.itemsize != row.nbytes or row.offset < 0 or row.offset + row.nbytes > len(body):
        raise ValueError(f"tensor {row.name!r} does not fit its payload body")
    array = np.frombuffer(body, dtype, count, row.offset).reshape(row.shape)
    array.flags.writeable = False
    return array

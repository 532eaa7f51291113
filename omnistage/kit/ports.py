"""Typed ports: what passes through them, how it grows chunk by chunk, how it lies in a payload."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from omnistage.payload import MultimodalPayload

Value = str | npt.NDArray[Any]


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """`type` is the payload type; both ends of an edge have the same. Arrays have `dtype` and `shape` (None: any size)
    and grow along `axis`; text has no dtype. A `whole` input is complete before the first call and given to each.
    """

    type: str
    dtype: str = ""
    shape: tuple[int | None, ...] = ()
    axis: int = 0
    meta: dict[str, Any] = {}
    whole: bool = False

    @property
    def is_text(self) -> bool:
        return not self.dtype

    def size(self, value: Value) -> int:
        """Characters, or rows along the axis."""
        return len(value) if isinstance(value, str) else value.shape[self.axis]

    def empty(self) -> Value:
        if self.is_text:
            return ""
        sides = [side or 0 for side in self.shape]
        sides[self.axis] = 0
        return np.zeros(sides, self.dtype)

    def join(self, pieces: list[Value]) -> Value:
        if self.is_text:
            return "".join(str(piece) for piece in pieces)
        arrays = [piece for piece in pieces if not isinstance(piece, str)]
        filled = [array for array in arrays if array.shape[self.axis]]
        if len(filled) < 2:
            return filled[0] if filled else arrays[0] if arrays else self.empty()
        return np.concatenate(filled, self.axis)

    def cut(self, value: Value, start: int, stop: int | None) -> Value:
        """A part along the axis."""
        if isinstance(value, str):
            return value[start:stop]
        place = [slice(None)] * value.ndim
        place[self.axis] = slice(start, stop)
        return value[tuple(place)]

    def checked(self, value: object) -> Value:
        """The value as it passes through. Raises ValueError telling what was given and what is declared."""
        if self.is_text:
            if not isinstance(value, str):
                raise ValueError(f"{type(value).__name__} where text is declared")
            return value
        if isinstance(value, (str, bytes, int, float, list, tuple, dict)) or value is None:
            raise ValueError(f"{type(value).__name__} where an array is declared")
        array = np.asarray(value)
        if str(array.dtype) != self.dtype:
            raise ValueError(f"dtype {array.dtype} where {self.dtype} is declared")
        if array.ndim != len(self.shape) or any(
            wanted is not None and side != wanted and axis != self.axis
            for axis, (side, wanted) in enumerate(zip(array.shape, self.shape, strict=True))
        ):
            raise ValueError(f"shape {array.shape} where {self.shape} is declared")
        return array

    def payload(self, value: Value) -> MultimodalPayload:
        if isinstance(value, str):
            return MultimodalPayload.text(value, **self.meta)
        return MultimodalPayload.of(dict(self.meta), **{self.type: value})

    def read(self, payload: MultimodalPayload) -> Value:
        """A copy of what a payload holds; a payload without it stands for nothing. Raises ValueError."""
        if self.is_text:
            return self.checked(payload.meta.get("text", ""))
        if self.type not in payload.tensors:
            if payload.tensors:
                raise ValueError(f"{', '.join(payload.tensors)} where {self.type} is declared")
            return self.empty()
        return np.array(self.checked(payload[self.type]))


def Text(*, whole: bool = False) -> Port:
    return Port(type="text", whole=whole)


def Audio(rate: int, channels: int = 1, *, whole: bool = False) -> Port:
    """Sound, float32 [channels, samples] at `rate` samples per second."""
    meta = {"sample_rate": rate}
    return Port(type="audio", dtype="float32", shape=(channels, None), axis=1, meta=meta, whole=whole)


def Image(*, whole: bool = False) -> Port:
    """Pictures, uint8 [count, height, width, 3]."""
    return Port(type="image", dtype="uint8", shape=(None, None, None, 3), whole=whole)


def Array(type: str, dtype: str, shape: tuple[int | None, ...], *, axis: int = 0, whole: bool = False) -> Port:
    """Anything else, under a word of its own ("codes", "frames", ...). It grows along `axis`."""
    return Port(type=type, dtype=dtype, shape=shape, axis=axis, whole=whole)

"""What the vocoders of the two voices have in common: streams of frames that are decoded in chunks, many at once."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from omnistage.models.smol_speech.packed import Carry

Array = npt.NDArray[Any]


class Stream(msgspec.Struct, kw_only=True):
    """One segment of speech on its way through a decoder.

    `rows` [F, channels] are the frames; `taken` of them went into the decoder, `given` came out. `carry` is the state
    of its convolutions, `extra` and `overlap` are the decoder's own.
    """

    rows: Array
    seed: int
    segment: int
    taken: int = 0
    given: int = 0
    carry: Carry = {}
    extra: Array | None = None
    overlap: Array | None = None


class Part(msgspec.Struct, frozen=True):
    """The next `count` frames of a stream, to be decoded now; `ends` when they are its last ones."""

    stream: Stream
    count: int
    ends: bool

    @classmethod
    def next(cls, stream: Stream, wanted: int) -> Part:
        """At most `wanted` frames from where the stream stands."""
        left = len(stream.rows) - stream.taken
        return cls(stream, min(wanted, left), wanted >= left)


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """What a part gave: `samples` float32 [n], and the stream's state behind it, set by `commit`."""

    part: Part
    samples: Array
    given: int
    carry: Carry
    overlap: Array | None = None

    def commit(self) -> None:
        stream = self.part.stream
        stream.taken += self.part.count
        stream.given += self.given
        stream.carry = self.carry
        stream.overlap = self.overlap


class Decoder(Protocol):
    """The vocoder of one voice. `lookahead`: frames it must see behind a frame to finish it."""

    sample_rate: int
    lookahead: int

    def begin(self, tensors: dict[str, Array], seed: int, segment: int) -> Stream:
        """A stream for one chunk of the talker. Copies what it keeps. Raises KeyError when a tensor is missing."""
        ...

    def decode(self, parts: list[Part]) -> list[Decoded]:
        """Decodes the parts together; changes no stream."""
        ...


def frame_noise(seed: int, segment: int, first: int, count: int, width: int) -> Array:
    """Normal noise float32 [count, width] of frames `first`.. of a segment: a function of these numbers alone.

    Counter-based (Philox), in blocks of 8 frames, so that it does not matter where chunks begin.
    """
    block_frames = 8
    blocks = []
    for block in range(first // block_frames, (first + count - 1) // block_frames + 1):
        key = np.array([seed & (2**64 - 1), segment], np.uint64)
        random = np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, block, 1], np.uint64)))
        blocks.append(random.standard_normal((block_frames, width), np.float32))
    offset = first % block_frames
    return np.concatenate(blocks)[offset : offset + count]

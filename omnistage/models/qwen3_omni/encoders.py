"""Sounds and pictures encoded for the thinker: in batches over requests, remembered by content.

What a medium becomes does not depend on its batch mates. The audio encoder cuts a sound into windows of
`2 * n_window` mel frames and pads the last one to the longest window of the call; `Medium.padding` fixes that width, so
that it is the width of the request's own sounds, as when the request is encoded alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.functional import split
from torch.nn.functional import pad

# Audio tokens of a whole window of 100 mel frames; a fact of the encoder's three stride-2 convolutions.
_HALVINGS = 3


@dataclass(slots=True, eq=False)
class Encoded:
    """`rows` [k, hidden] for the positions of a medium; `deep` holds one [k, hidden] per deepstack level (pictures)."""

    rows: Tensor
    deep: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.rows, *self.deep))


@dataclass(slots=True, eq=False)
class Medium:
    """One medium of one prompt. `positions` [k] ascending; `key` stands for everything that determines its rows.

    `features` is a mel [bins, frames], to be padded to `padding` frames per window, or patches [t * h * w, d] with
    `grid` (t, h, w), `seconds` apart along t. `encoded` is kept from the first of its prompt chunks to the last.
    """

    kind: str
    positions: Tensor
    features: Tensor
    key: bytes
    grid: tuple[int, ...] = ()
    padding: int = 0
    seconds: float = 0.0
    encoded: Encoded | None = None

    @property
    def start(self) -> int:
        return int(self.positions[0])

    @property
    def stop(self) -> int:
        return int(self.positions[-1]) + 1


def content_key(kind: str, features: Tensor, *facts: float) -> bytes:
    """A digest of features and of whatever else determines the rows at a medium's positions."""
    digest = blake2b(digest_size=16)
    digest.update(repr((kind, features.dtype, tuple(features.shape), facts)).encode())
    digest.update(features.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


def window_tokens(frames: int, n_window: int) -> int:
    """Audio tokens of a sound of `frames` mel frames."""
    whole, rest = divmod(frames, 2 * n_window)
    return whole * _halved(2 * n_window) + _halved(rest)


def _halved(frames: int) -> int:
    for _ in range(_HALVINGS):
        frames = -(-frames // 2)
    return frames


class EncoderCache:
    """Encoded media by content key, the least recently used dropped beyond `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[bytes, Encoded] = OrderedDict()
        self.nbytes = 0
        self.hits = 0
        self.misses = 0

    def find(self, key: bytes) -> Encoded | None:
        found = self._entries.get(key)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
            self._entries.move_to_end(key)
        return found

    def keep(self, key: bytes, encoded: Encoded) -> None:
        if key in self._entries or encoded.nbytes > self._limit:
            return
        self._entries[key] = encoded
        self.nbytes += encoded.nbytes
        while self.nbytes > self._limit:
            self.nbytes -= self._entries.popitem(last=False)[1].nbytes


class Encoders:
    """The thinker's audio and vision towers behind one cache."""

    def __init__(self, audio: Any, visual: Any, cache_bytes: int) -> None:
        self._audio = audio
        self._visual = visual
        self.cache = EncoderCache(cache_bytes)

    def encode(self, media: Sequence[Medium]) -> None:
        """Gives every medium its `encoded`; equal contents are computed once, those of a kind together."""
        wanted: dict[bytes, Medium] = {}
        for medium in media:
            medium.encoded = medium.encoded or self.cache.find(medium.key)
            if medium.encoded is None:
                wanted.setdefault(medium.key, medium)
        self._compute(list(wanted.values()))
        for medium in wanted.values():
            if medium.encoded is not None:
                self.cache.keep(medium.key, medium.encoded)
        for medium in media:
            medium.encoded = medium.encoded or wanted[medium.key].encoded

    def _compute(self, media: list[Medium]) -> None:
        self._encode_pictures([medium for medium in media if medium.kind != "audio"])
        sounds = [medium for medium in media if medium.kind == "audio"]
        for padding in {medium.padding for medium in sounds}:
            self._encode_sounds([medium for medium in sounds if medium.padding == padding], padding)

    def _encode_pictures(self, media: list[Medium]) -> None:
        if not media:
            return
        tower = self._visual
        pixels = torch.cat([medium.features for medium in media]).to(tower.device, tower.dtype)
        grids = torch.tensor([medium.grid for medium in media], device=tower.device)
        result = tower(pixels, grid_thw=grids, return_dict=True)
        sizes = [len(medium.positions) for medium in media]
        rows = split(result.pooler_output, sizes)
        levels = [split(level, sizes) for level in result.deepstack_features]
        for index, medium in enumerate(media):
            medium.encoded = Encoded(rows[index], tuple(level[index] for level in levels))

    def _encode_sounds(self, media: list[Medium], padding: int) -> None:
        tower = self._audio
        width = 2 * tower.n_window
        windows = [window for medium in media for window in split(medium.features, width, dim=1)]
        lengths = torch.tensor([window.shape[1] for window in windows], device=tower.device)
        padded = torch.stack([pad(window, (0, padding - window.shape[1])) for window in windows])
        given = torch.tensor([_halved(window.shape[1]) for window in windows], device=tower.device)
        valid = torch.arange(_halved(padding), device=tower.device) < given[:, None]
        rows = tower(
            feature_lens=torch.tensor([medium.features.shape[1] for medium in media], device=tower.device),
            padded_feature=padded.to(tower.device, tower.dtype),
            chunk_lengths=lengths,
            valid_indices=valid.flatten().nonzero()[:, 0],
            return_dict=True,
        ).last_hidden_state
        sizes = [len(medium.positions) for medium in media]
        for medium, part in zip(media, split(rows, sizes), strict=True):
            medium.encoded = Encoded(part)

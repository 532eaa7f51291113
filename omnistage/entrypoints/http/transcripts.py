"""What spoken answers said, so that a later turn may name an answer by its audio id."""

from __future__ import annotations

import time
from collections import OrderedDict

LIFETIME_S = 3600
CAPACITY = 1024
MAX_CHARS = 1 << 22


class TranscriptStore:
    """Audio id -> transcript: bounded by count and characters, least recently used go first, gone after an hour."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._chars = 0

    def keep(self, audio_id: str, transcript: str) -> None:
        """Stores a transcript; one that is larger than the whole store is not kept."""
        if len(transcript) > MAX_CHARS:
            return
        self._entries[audio_id] = (time.monotonic() + LIFETIME_S, transcript)
        self._chars += len(transcript)
        while len(self._entries) > CAPACITY or self._chars > MAX_CHARS:
            self._drop(next(iter(self._entries)))

    def find(self, audio_id: str) -> str | None:
        """The transcript, None when it is unknown or expired."""
        entry = self._entries.get(audio_id)
        if entry is None:
            return None
        if entry[0] < time.monotonic():
            self._drop(audio_id)
            return None
        self._entries.move_to_end(audio_id)
        return entry[1]

    def _drop(self, audio_id: str) -> None:
        self._chars -= len(self._entries.pop(audio_id)[1])

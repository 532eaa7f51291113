"""What the microphone sent and nobody has committed yet."""

from __future__ import annotations

import numpy as np

from omnistage.media.samples import FloatAudio


class InputBuffer:
    """Samples at `rate` Hz on the session's clock: `start_ms` is the session time of the first sample ever appended."""

    def __init__(self, rate: int, start_ms: int = 0) -> None:
        self.rate = rate
        self._origin_ms = start_ms
        self._held: FloatAudio = np.zeros((1, 0), np.float32)
        self._dropped = 0

    @property
    def _samples(self) -> int:
        return int(self._held.shape[1])

    @property
    def held_ms(self) -> float:
        return self._samples * 1000 / self.rate

    @property
    def end_ms(self) -> int:
        """Session time after the last sample."""
        return self._origin_ms + (self._dropped + self._samples) * 1000 // self.rate

    def append(self, samples: FloatAudio) -> None:
        """float32 [1, samples]."""
        self._held = np.concatenate([self._held, samples], axis=1)

    def take(self, from_ms: int | None = None, to_ms: int | None = None) -> FloatAudio:
        """The samples between two session times (default: all); what lies before the second is held no more."""
        end = self._samples if to_ms is None else self._index(to_ms)
        taken = self._held[:, 0 if from_ms is None else self._index(from_ms) : end]
        self._drop(end)
        return taken

    def keep_last(self, milliseconds: int) -> None:
        """Forgets all but the last part."""
        self._drop(max(self._samples - milliseconds * self.rate // 1000, 0))

    def _index(self, session_ms: int) -> int:
        index = (session_ms - self._origin_ms) * self.rate // 1000 - self._dropped
        return min(max(index, 0), self._samples)

    def _drop(self, count: int) -> None:
        self._held = self._held[:, count:].copy()
        self._dropped += count

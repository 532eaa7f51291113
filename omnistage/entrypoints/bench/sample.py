"""What one request's client saw, and the figures that follow from it. Times are seconds from the request's start."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from omnistage.request import StageMetrics

METRICS = ("ttft", "tpot", "itl", "e2el", "ttfp", "rtf", "underrun", "audio", "step", "video")


class Sample(msgspec.Struct, kw_only=True):
    """`texts` are arrival times of text events, `audio` arrival times with the seconds of sound that came.

    `images` and `previews` are arrival times of pictures, `steps` those of news of the progress, `video_s` the length
    of the video. `tokens` is the server's own count, None when it gave none. `stages` are its times per stage, where it
    gives them.
    `error` is empty for a valid answer.
    """

    texts: list[float] = []
    audio: list[tuple[float, float]] = []
    images: list[float] = []
    previews: list[float] = []
    steps: list[float] = []
    video_s: float = 0.0
    tokens: int | None = None
    end: float = 0.0
    error: str = ""
    stages: dict[str, StageMetrics] = {}

    def figures(self) -> dict[str, list[float]]:
        """Every metric that this request has, in seconds (RTF: a ratio); ITL has a value per gap, others one."""
        found: dict[str, list[float]] = {"e2el": [self.end]}
        if self.texts:
            found["ttft"] = [self.texts[0]]
            found["itl"] = _gaps(self.texts)
        if self.texts and self.tokens is not None and self.tokens > 1:
            found["tpot"] = [(self.texts[-1] - self.texts[0]) / (self.tokens - 1)]
        seconds = sum(length for _, length in self.audio)
        if seconds:
            found |= {"ttfp": [self.audio[0][0]], "audio": [seconds], "rtf": [self.end / seconds]}
            found["underrun"] = [underrun(self.audio)]
        if self.images:
            found["ttfp"] = [min(*self.images, *self.previews, self.end)]
        if self.video_s:
            found |= {"ttfp": [self.end], "video": [self.video_s], "rtf": [self.end / self.video_s]}
        if gaps := _gaps(self.steps):
            found["step"] = gaps
        return found


def _gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def underrun(audio: list[tuple[float, float]]) -> float:
    """The longest wait of a player that starts with the first packet and plays on whenever it has sound."""
    played_until, worst = audio[0][0], 0.0
    for arrival, length in audio:
        worst = max(worst, arrival - played_until)
        played_until = max(played_until, arrival) + length
    return worst

"""Transcripts with times as SubRip (srt) and WebVTT (vtt)."""

from __future__ import annotations

from omnistage.entrypoints.http.answers import Segment


def to_srt(segments: list[Segment]) -> str:
    """SubRip: numbered blocks, comma before the milliseconds."""
    blocks = [
        f"{number}\n{_clock(s.start, ',')} --> {_clock(s.end, ',')}\n{_line(s.text)}\n"
        for number, s in enumerate(segments, 1)
    ]
    return "\n".join(blocks)


def to_vtt(segments: list[Segment]) -> str:
    """WebVTT: header, full stop before the milliseconds."""
    blocks = [f"{_clock(s.start, '.')} --> {_clock(s.end, '.')}\n{_line(s.text)}\n" for s in segments]
    return "\n".join(["WEBVTT\n", *blocks])


def _clock(seconds: float, point: str) -> str:
    """hh:mm:ss and milliseconds."""
    total = max(0, round(seconds * 1000))
    hours, rest = divmod(total, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def _line(text: str) -> str:
    """One line without the arrow that separates times."""
    return " ".join(text.split()).replace("-->", "->")

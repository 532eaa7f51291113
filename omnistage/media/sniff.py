"""Which container a file is, by its first bytes.

Only these demuxers are ever opened: playlist and concat formats, which read other files or URLs, have no entry.
"""

from __future__ import annotations

AUDIO_CONTAINERS = frozenset({"wav", "mp3", "flac", "ogg", "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "aac"})
VIDEO_CONTAINERS = frozenset({"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi"})
ID3_HEADER_BYTES = 10


def container_of(data: bytes) -> str | None:
    """FFmpeg's demuxer name, None when the bytes are of no known kind."""
    head = data[:12]
    if head[:4] == b"RIFF" and head[8:12] in (b"WAVE", b"AVI "):
        return "wav" if head[8:12] == b"WAVE" else "avi"
    by_magic = {b"fLaC": "flac", b"OggS": "ogg", b"\x1a\x45\xdf\xa3": "matroska,webm"}
    if head[:4] in by_magic:
        return by_magic[head[:4]]
    if head[4:8] == b"ftyp":
        return "mov,mp4,m4a,3gp,3g2,mj2"
    return _mpeg_audio(data)


def _mpeg_audio(data: bytes) -> str | None:
    if data[:3] == b"ID3":
        return "flac" if data[_id3_size(data) :][:4] == b"fLaC" else "mp3"
    if len(data) < 2 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return None
    layer = data[1] >> 1 & 3
    return "aac" if layer == 0 and data[1] & 0xF0 == 0xF0 else "mp3"


def _id3_size(data: bytes) -> int:
    """Bytes of an ID3v2 tag: four 7-bit groups at offset 6, header excluded."""
    size = 0
    for byte in data[6:ID3_HEADER_BYTES]:
        size = size << 7 | byte & 0x7F
    return ID3_HEADER_BYTES + size

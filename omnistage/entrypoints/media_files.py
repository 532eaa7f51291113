"""Writes the tensors of an answer as media files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from omnistage.media.audio_encode import encode_audio
from omnistage.media.video_encode import encode_video
from omnistage.payload import Array

DEFAULT_RATE = 24_000


def write_media(tensors: Mapping[str, Array], meta: Mapping[str, Any], stem: Path) -> list[Path]:
    """`stem`.mp4 for a video with its sound, else `stem`.wav for audio, `stem`.png (or -N.png) for images,
    `stem`.action.json; other tensors have no file."""
    files: list[Path] = []
    rate = int(meta.get("sample_rate", DEFAULT_RATE))
    if "video" in tensors:
        file = stem.with_name(f"{stem.name}.mp4")
        file.write_bytes(encode_video(tensors["video"], float(meta["fps"]), tensors.get("audio"), rate))
        files.append(file)
    elif "audio" in tensors:
        file = stem.with_name(f"{stem.name}.wav")
        file.write_bytes(encode_audio("wav", tensors["audio"], rate))
        files.append(file)
    for index, picture in enumerate(tensors.get("image", ())):
        name = f"{stem.name}.png" if len(tensors["image"]) == 1 else f"{stem.name}-{index}.png"
        Image.fromarray(picture).save(stem.with_name(name), compress_level=1)
        files.append(stem.with_name(name))
    if "action" in tensors:
        file = stem.with_name(f"{stem.name}.action.json")
        file.write_text(json.dumps(tensors["action"].tolist()))
        files.append(file)
    return files

"""uint8 [height, width, 3] -> image bytes."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

MEDIA_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
DEFAULT_QUALITY = 90


def encode_image(picture: npt.NDArray[np.uint8], name: str, quality: int | None = None) -> bytes:
    """`name` is a key of `MEDIA_TYPES`; `quality` 0..100 is for jpeg and webp. PNG is packed lightly, for speed."""
    sink = io.BytesIO()
    image = Image.fromarray(picture)
    if name == "png":
        image.save(sink, "PNG", compress_level=1)
    else:
        image.save(sink, name.upper(), quality=DEFAULT_QUALITY if quality is None else quality)
    return sink.getvalue()

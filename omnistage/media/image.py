"""Image bytes -> uint8 [height, width, 3]."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from omnistage.media.errors import DECODER_ERRORS, too_large, unsupported

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def decode_image(data: bytes, max_pixels: int, param: str = "image") -> npt.NDArray[np.uint8]:
    """The first frame as RGB uint8 [height, width, 3], upright by its EXIF orientation, transparency over white.

    The size is read from the header and checked before any pixel is decoded. Raises RequestError naming `param`:
    UNSUPPORTED_MEDIA for anything unreadable, TOO_LARGE beyond `max_pixels`.
    """
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            if image.width * image.height > max_pixels:
                raise too_large(f"{image.width}x{image.height} exceeds the limit of {max_pixels} pixels", param)
            return _rgb(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise too_large(f"the image exceeds the limit of {max_pixels} pixels", param) from None
    except DECODER_ERRORS:
        raise unsupported("not a readable PNG, JPEG, WebP, GIF or BMP image", param) from None


def _rgb(image: Image.Image) -> npt.NDArray[np.uint8]:
    upright = ImageOps.exif_transpose(image)
    if upright.has_transparency_data:
        rgba = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return np.array(upright.convert("RGB"), np.uint8)

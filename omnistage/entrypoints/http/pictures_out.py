"""Pictures of an answer as content parts with data URLs."""

from __future__ import annotations

from omnistage.entrypoints.http.answers import PicturePart, PictureUrl
from omnistage.entrypoints.http.audio_out import base64_text
from omnistage.entrypoints.http.state import ServerState
from omnistage.media.image_encode import MEDIA_TYPES, encode_image
from omnistage.request import OmniRequestOutput

_FORMAT = "png"


async def picture_parts(state: ServerState, output: OmniRequestOutput) -> list[PicturePart]:
    """The finished pictures of an event; empty for events of other kinds."""
    if output.modality != "image" or output.payload is None or "image" not in output.payload.tensors:
        return []
    encoded = [await state.run(encode_image, array, _FORMAT, None) for array in output.payload["image"]]
    return [PicturePart(PictureUrl(f"data:{MEDIA_TYPES[_FORMAT]};base64,{base64_text(data)}")) for data in encoded]

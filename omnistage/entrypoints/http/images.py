"""POST /v1/images/generations and /v1/images/edits: whole answers, or events with partial pictures."""

from __future__ import annotations

import base64
import time
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET

from omnistage.entrypoints.http.asgi import JSON, Exchange
from omnistage.entrypoints.http.diffusion_inputs import Ask, ask_of, picture
from omnistage.entrypoints.http.events import Media, choice_events
from omnistage.entrypoints.http.inputs import choice_requests
from omnistage.entrypoints.http.media_schema import (
    ImageData,
    ImageEditForm,
    ImageEvent,
    ImageFields,
    ImageRequest,
    ImagesAnswer,
    ImageUsage,
)
from omnistage.entrypoints.http.multipart import Form, read_form
from omnistage.entrypoints.http.parse import convert_fields, decode_json
from omnistage.entrypoints.http.sse import DONE, event, json_bytes
from omnistage.entrypoints.http.state import ServerState, new_id
from omnistage.errors import ErrorCode, OmniError, RequestError
from omnistage.media.image_encode import MEDIA_TYPES, encode_image
from omnistage.payload import Array
from omnistage.request import OmniRequestOutput, RequestMetrics, is_reasoning

MAX_EDIT_IMAGES = 16


async def generations(state: ServerState, exchange: Exchange) -> None:
    """Makes pictures of a prompt."""
    body = decode_json(exchange, ImageRequest)
    await _answer(state, exchange, body, {}, "image_generation")


async def edits(state: ServerState, exchange: Exchange) -> None:
    """Makes pictures of a prompt and of one or more pictures."""
    form = read_form(exchange)
    body = convert_fields(_typed(form), ImageEditForm)
    state.check_task("image")
    if "image_edit" not in state.capabilities.features:
        raise RequestError(f"model: {state.model!r} cannot edit pictures", param="model")
    media: Media = {}
    for index, (name, data) in enumerate(_uploads(form)):
        media[f"image{index}"] = await picture(state, data, name)
    exchange.body = b""
    await _answer(state, exchange, body, media, "image_edit")


def _typed(form: Form) -> dict[str, Any]:
    """Form fields with `params` and `sampling` read as JSON."""
    fields: dict[str, Any] = dict(form.fields)
    for name in ("params", "sampling", "metadata"):
        if name in fields:
            try:
                fields[name] = msgspec.json.decode(str(fields[name]))
            except msgspec.DecodeError:
                raise RequestError(f"{name}: not valid JSON", param=name) from None
    return fields


def _uploads(form: Form) -> list[tuple[str, bytes]]:
    files = [(name, data) for name, pieces in form.uploads.items() for data in pieces]
    for name, _ in files:
        if name == "mask":
            raise RequestError("mask: this model edits whole pictures", param="mask")
        if name != "image":
            raise RequestError(f"{name}: unknown file field", param=name)
    if not files:
        raise RequestError("image: missing; send pictures as file parts", param="image")
    if len(files) > MAX_EDIT_IMAGES:
        raise RequestError(f"image: more than {MAX_EDIT_IMAGES} pictures", param="image")
    return files


async def _answer(state: ServerState, exchange: Exchange, body: ImageFields, media: Media, kind: str) -> None:
    if body.partial_images and not body.stream:
        raise RequestError("partial_images needs stream to be true", param="partial_images")
    partial = ("partial",) if body.stream and body.partial_images else ()
    if partial and "partial" not in state.capabilities.output_modalities:
        raise RequestError("partial_images: this model gives none", param="partial_images")
    ask = ask_of(
        state, body, new_id("img-"), "image", ("image", *partial) if partial else None, stream=bool(body.stream)
    )
    if partial:
        ask.request.params["partial_images"] = body.partial_images
    if media:
        ask.request.params["images"] = [{"media": key} for key in media]
    picture_of = Pictures(state, body)
    if body.stream:
        await _events(state, exchange, ask, media, (picture_of, kind))
    else:
        await _whole(state, exchange, ask, media, picture_of)


class Pictures:
    """Encodes the pictures of one answer and describes them."""

    def __init__(self, state: ServerState, body: ImageFields) -> None:
        self._state = state
        self.body = body
        self.format = body.output_format or "png"
        self.size = "auto"

    async def encode(self, array: Array) -> str:
        """Base64 of one picture, uint8 [H, W, 3]."""
        self.size = f"{array.shape[1]}x{array.shape[0]}"
        return await self._state.run(_base64_image, array, self.format, self.body.output_compression)

    def data(self, encoded: str, text: str) -> ImageData:
        revised = text or UNSET
        if self.body.response_format == "url":
            return ImageData(url=f"data:{MEDIA_TYPES[self.format]};base64,{encoded}", revised_prompt=revised)
        return ImageData(b64_json=encoded, revised_prompt=revised)

    def event(self, kind: str, encoded: str) -> ImageEvent:
        return ImageEvent(
            type=kind,
            b64_json=encoded,
            created_at=int(time.time()),
            size=self.size,
            quality="auto",
            background="opaque",
            output_format=self.format,
        )


def _base64_image(array: Array, name: str, quality: int | None) -> str:
    return base64.b64encode(encode_image(array, name, quality)).decode()


async def _whole(state: ServerState, exchange: Exchange, ask: Ask, media: Media, pictures: Pictures) -> None:
    requests = choice_requests(ask.request, pictures.body.n or 1)
    found: list[list[str]] = [[] for _ in requests]
    texts = [""] * len(requests)
    last = OmniRequestOutput(request_id=ask.request.id)
    async with aclosing(choice_events(state.engine, requests, media)) as events:
        async for index, output in events:
            last = output if output.finished and index == 0 else last
            texts[index] += "" if is_reasoning(output) else output.text
            found[index] += [await pictures.encode(array) for array in _images(output)]
    if not all(found):
        raise OmniError("the model gave no picture", code=ErrorCode.INTERNAL)
    data = [pictures.data(one, text) for encoded, text in zip(found, texts, strict=True) for one in encoded]
    await exchange.answer(200, JSON, json_bytes(_answer_of(pictures, data, last)))


def _answer_of(pictures: Pictures, data: list[ImageData], last: OmniRequestOutput) -> ImagesAnswer:
    """`last` is the event that ended the first choice."""
    return ImagesAnswer(
        created=int(time.time()),
        data=data,
        background="opaque",
        output_format=pictures.format,
        quality="auto",
        size=pictures.size,
        seed=last.seed if last.seed is not None else UNSET,
        metrics=(last.metrics or RequestMetrics()) if pictures.body.return_metrics else UNSET,
    )


def _images(output: OmniRequestOutput, modality: str = "image") -> list[Array]:
    if output.modality != modality or output.payload is None or "image" not in output.payload.tensors:
        return []
    return list(output.payload["image"])


async def _events(state: ServerState, exchange: Exchange, ask: Ask, media: Media, shown: tuple[Pictures, str]) -> None:
    """Up to `partial_images` previews, then the finished picture."""
    pictures, kind = shown
    if (pictures.body.n or 1) > 1:
        raise RequestError("n: streamed pictures come one at a time", param="n")
    previews = pictures.body.partial_images or 0
    sent = 0
    async with aclosing(choice_events(state.engine, [ask.request], media)) as events:
        async for _, output in events:
            await exchange.send_events(b"", DONE)
            for array in _images(output, "partial")[: previews - sent]:
                item = pictures.event(f"{kind}.partial_image", await pictures.encode(array))
                await exchange.write(event(msgspec.structs.replace(item, partial_image_index=sent)))
                sent += 1
            for array in _images(output):
                item = pictures.event(f"{kind}.completed", await pictures.encode(array))
                await exchange.write(event(msgspec.structs.replace(item, usage=ImageUsage())))
    await exchange.end(DONE)

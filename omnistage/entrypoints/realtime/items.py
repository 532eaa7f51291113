"""Items that clients write, read and checked."""

from __future__ import annotations

from omnistage.entrypoints.http.state import ServerState, new_id
from omnistage.entrypoints.realtime.conversation import Content, Item
from omnistage.entrypoints.realtime.events import AnyItem, CallFields, OutputFields, Part
from omnistage.entrypoints.realtime.formats import FormatName, wire_format
from omnistage.entrypoints.realtime.refusal import Refusal
from omnistage.media.data_url import decode_base64, decode_data_url
from omnistage.media.image import decode_image
from omnistage.payload import MultimodalPayload
from omnistage.tools import MadeCall, read_arguments

_TYPES = {
    "user": ("input_text", "input_audio", "input_image"),
    "assistant": ("output_text", "output_audio"),
    "system": ("input_text",),
}
_VALUE = {"input_text": "text", "output_text": "text", "input_audio": "audio", "input_image": "image_url"}


async def read_item(state: ServerState, input_format: FormatName, fields: AnyItem) -> Item:
    """Raises Refusal or RequestError naming the part at fault. A spoken answer is known by its transcript."""
    item_id = fields.id or new_id("item_")
    if isinstance(fields, CallFields):
        return Item(id=item_id, role="assistant", call=_call(fields))
    if isinstance(fields, OutputFields):
        return Item(id=item_id, role="tool", call=MadeCall(id=fields.call_id, name=""), output=fields.output)
    content = list[Content]()
    for index, part in enumerate(fields.content):
        param = f"item.content[{index}]"
        if part.type not in _TYPES[fields.role]:
            known = ", ".join(_TYPES[fields.role])
            raise Refusal("invalid_value", f"{param}.type: a message of the {fields.role} has {known}", f"{param}.type")
        content.append(await _content(state, input_format, part, param))
    return Item(id=item_id, role=fields.role, content=content)


def _call(fields: CallFields) -> MadeCall:
    if fields.arguments and read_arguments(fields.arguments) is None:
        raise Refusal("invalid_value", "item.arguments: not a JSON object", "item.arguments")
    return MadeCall(id=fields.call_id or new_id("call_"), name=fields.name, arguments=fields.arguments)


async def _content(state: ServerState, input_format: FormatName, part: Part, param: str) -> Content:
    field = _VALUE.get(part.type, "transcript")
    given = {"text": part.text, "audio": part.audio, "image_url": part.image_url, "transcript": part.transcript}
    value = given[field]
    if value is None:
        raise Refusal("missing_required_parameter", f"{param}.{field}: missing", f"{param}.{field}")
    if field == "audio":
        fmt = wire_format(input_format)
        samples = fmt.decode(decode_base64(value, state.max_body, f"{param}.audio"))
        return Content(type=part.type, text=part.transcript, audio=samples, rate=fmt.rate)
    if field == "image_url":
        data = decode_data_url(value, state.max_body, f"{param}.image_url")
        image = await state.run(decode_image, data, state.limits.max_image_pixels, f"{param}.image_url")
        return Content(type=part.type, image=MultimodalPayload.of(image=image))
    return Content(type=part.type, text=value)

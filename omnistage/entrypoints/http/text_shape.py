"""The shape that a body demands of its text, as `sampling.structured_outputs`."""

from __future__ import annotations

from typing import Any

import msgspec

from omnistage.entrypoints.http import schema
from omnistage.errors import RequestError
from omnistage.sampling import StructuredOutputs

_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def text_shape(body: schema.TextSampling) -> dict[str, Any] | None:
    """None for free text. Raises RequestError for two demands at once and for fields of a wrong type."""
    given = _given(body)
    if len(given) > 1:
        first, second = list(given)[:2]
        raise RequestError(f"{second}: {first} demands a shape already", param=second)
    for param, fields in given.items():
        try:
            msgspec.convert(fields | {"param": param}, StructuredOutputs)
        except msgspec.ValidationError as error:
            raise RequestError(f"{param}: {error}", param=param) from None
        return fields | {"param": param}
    return None


def _given(body: schema.TextSampling) -> dict[str, dict[str, Any]]:
    """The demands by the name of their field."""
    values = msgspec.structs.asdict(body)
    given = {name: {field: values[name]} for name, field in _FIELDS.items() if values[name] is not None}
    if body.structured_outputs is not None:
        given["structured_outputs"] = body.structured_outputs
    if isinstance(body, schema.ChatRequest):
        given |= _response_format(body.response_format)
    return given


def _response_format(wanted: schema.ResponseFormat | None) -> dict[str, dict[str, Any]]:
    match wanted:
        case schema.JsonObjectFormat():
            return {"response_format": {"json_object": True}}
        case schema.SchemaFormat(json_schema=given):
            return {"response_format": {"json": given.schema, "strict": given.strict is True}}
    return {}

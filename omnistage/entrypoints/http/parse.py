"""Request bytes -> typed structs, with errors that name the field."""

from __future__ import annotations

import re
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from omnistage.entrypoints.http.asgi import Exchange
from omnistage.errors import RequestError

T = TypeVar("T")

# msgspec's text: "<what> - at `$.a.b[0]`" or "<what> - at `key` in `$.a`"; the path is absent at the top level.
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL)
MAX_PARAM_CHARS = 200


def decode_json(exchange: Exchange, kind: type[T]) -> T:
    """The request's JSON body. Raises RequestError naming the field at fault ("body" when no field is)."""
    content_type = exchange.header(b"content-type").partition(b";")[0].strip().lower()
    if content_type != b"application/json":
        raise RequestError("send the body as content-type application/json", param="content-type")
    try:
        return msgspec.json.decode(exchange.body, type=kind)
    except msgspec.ValidationError as error:
        raise validation_error(error) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", param="body") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", param="body") from None


def convert_fields(fields: dict[str, Any], into: type[T]) -> T:
    """Form fields (text) as a struct; numbers and booleans are read from their text."""
    try:
        return msgspec.convert(fields, into, strict=False)
    except msgspec.ValidationError as error:
        raise validation_error(error) from None


def read_query(exchange: Exchange, known: set[str]) -> dict[str, str]:
    """The query parameters; of one that comes twice the last. Raises RequestError for any but the known ones."""
    query = dict(parse_qsl(exchange.scope.get("query_string", b"").decode("latin-1")))
    for name in sorted(query.keys() - known):
        raise RequestError(f"{name}: unknown query parameter", param=name)
    return query


def validation_error(error: msgspec.ValidationError) -> RequestError:
    """The same complaint as a RequestError whose `param` is the field's path."""
    match = _WHERE.match(str(error))
    what, path = (match["what"], match["path"] or "") if match else (str(error), "")
    field = _FIELD.match(what)
    if field:
        path = f"{path}.{field['name']}" if path else field["name"]
    param = path[:MAX_PARAM_CHARS] or "body"
    return RequestError(f"{param}: {what}", param=param)

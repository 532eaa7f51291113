"""OpenAPI 3.1 out of the route table and the msgspec structs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from omnistage.entrypoints.http.errors import ErrorBody
from omnistage.entrypoints.http.routes import Route

_REF = "#/components/schemas/{name}"


def openapi_document(routes: Sequence[Route], version: str) -> bytes:
    """The document as JSON."""
    typed = [kind for route in routes for kind in (route.body, route.answer) if kind is not None]
    kinds = list(dict.fromkeys([*typed, ErrorBody]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    refs = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, refs, components)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "OmniStage", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    return msgspec.json.encode(document)


def _operation(route: Route, refs: dict[Any, dict[str, Any]], components: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {kind: {"schema": {"type": "string"}} for kind in route.media_types}
    if route.answer is not None:
        content["application/json"] = {"schema": refs[route.answer]}
    failure = {"description": "error", "content": {"application/json": {"schema": refs[ErrorBody]}}}
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": (route.handler.__doc__ or "").partition("\n")[0],
        "responses": {"200": {"description": "answer", "content": content}, "default": failure},
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _body(route, refs, components)}
    if "{" in route.path:
        name = route.path.partition("{")[2].partition("}")[0]
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _body(route: Route, refs: dict[Any, dict[str, Any]], components: dict[str, Any]) -> dict[str, Any]:
    if not route.form:
        return {"application/json": {"schema": refs[route.body]}}
    fields = components[route.body.__name__]
    upload = {route.form: {"type": "string", "format": "binary"}}
    whole = fields | {
        "properties": fields["properties"] | upload,
        "required": [*fields.get("required", ()), route.form],
    }
    return {"multipart/form-data": {"schema": whole}}

"""Reads the parameters that a client sent into a model's own struct. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from omnistage.errors import RequestError, field_of

P = TypeVar("P", bound=msgspec.Struct)


def read_parameters(struct: type[P], given: Mapping[str, Any], *, hidden: frozenset[str] = frozenset()) -> P:
    """`given` as a `struct`, types and bounds checked. Raises RequestError naming the parameter.

    An unknown name is refused with the nearest known one; `hidden` fields are not offered.
    """
    known = [field.name for field in msgspec.structs.fields(struct)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, [n for n in known if n not in hidden], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(f"unknown parameter {name!r}{hint}", param=name)
    try:
        return msgspec.convert(dict(given), struct)
    except msgspec.ValidationError as error:
        path = field_of(error)
        raise RequestError(f"{path or 'parameters'}: {error}", param=path) from None

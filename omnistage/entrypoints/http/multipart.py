"""multipart/form-data: the text fields and the one file of a form, from a body that is already within its limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from omnistage.entrypoints.http.asgi import Exchange
from omnistage.errors import RequestError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_PARTS = 64
MAX_FIELD_BYTES = 1 << 20
MAX_HEADER_BYTES = 4096


class Form(msgspec.Struct, frozen=True):
    """`fields` holds texts, or lists of them for names that end in "[]" (the suffix is dropped).

    `files` holds the file parts that come once; `uploads` all of them, those of a name with "[]" in order.
    """

    fields: dict[str, str | list[str]]
    files: dict[str, bytes]
    uploads: dict[str, list[bytes]]


class _Part(msgspec.Struct):
    name: str = ""
    is_file: bool = False
    data: list[bytes] = []
    size: int = 0
    header_name: bytes = b""
    header_value: bytes = b""


class FormReader:
    """Collects the parts as the parser reports them."""

    def __init__(self) -> None:
        self._part = _Part()
        self._count = 0
        self.complete = False
        self.form = Form({}, {}, {})

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _finish(self) -> None:
        self.complete = True

    def _begin(self) -> None:
        self._count += 1
        if self._count > MAX_PARTS:
            raise RequestError(f"the form has more than {MAX_PARTS} parts", param="body")
        self._part = _Part()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._part.header_name += data[start:end]
        self._check_header()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.header_value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._part.header_name) + len(self._part.header_value) > MAX_HEADER_BYTES:
            raise RequestError("a form part's header is too long", param="body")

    def _header_end(self) -> None:
        part = self._part
        if part.header_name.lower() == b"content-disposition":
            _, options = parse_options_header(part.header_value)
            part.name = options.get(b"name", b"").decode("utf-8", "replace")
            part.is_file = b"filename" in options
        part.header_name = part.header_value = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        part.size += end - start
        if not part.is_file and part.size > MAX_FIELD_BYTES:
            raise RequestError(f"{part.name}: longer than {MAX_FIELD_BYTES} bytes", param=part.name)
        part.data.append(data[start:end])

    def _end(self) -> None:
        part = self._part
        if not part.name:
            raise RequestError("a form part has no name", param="body")
        data = b"".join(part.data)
        if part.is_file:
            self._file(part.name, data)
        else:
            self._field(part.name, _text(part.name, data))

    def _file(self, name: str, data: bytes) -> None:
        if name.endswith("[]"):
            self.form.uploads.setdefault(name[:-2], []).append(data)
            return
        self._once(name, name in self.form.uploads)
        self.form.uploads[name] = [data]
        self.form.files[name] = data

    def _field(self, name: str, text: str) -> None:
        fields = self.form.fields
        if not name.endswith("[]"):
            self._once(name, name in fields)
            fields[name] = text
            return
        values = fields.setdefault(name[:-2], [])
        if not isinstance(values, list):
            raise RequestError(f"{name}: given both as a value and as a list", param=name)
        values.append(text)

    def _once(self, name: str, seen: bool) -> None:
        if seen:
            raise RequestError(f"{name}: given twice", param=name)


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError(f"{name}: not valid UTF-8", param=name) from None


def read_form(exchange: Exchange) -> Form:
    """The request's form. Raises RequestError when it is none, or broken."""
    kind, options = parse_options_header(exchange.header(b"content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise RequestError("send the body as content-type multipart/form-data", param="content-type")
    reader = FormReader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(exchange.body)
        parser.finalize()
    except FormParserError:
        raise RequestError("the multipart body is malformed", param="body") from None
    if not reader.complete:
        raise RequestError("the multipart body ends too early", param="body")
    return reader.form

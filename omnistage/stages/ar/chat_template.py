"""Chat templates of Hugging Face checkpoints: messages in, prompt text out. Torch-free.

Templates are untrusted code: they run in jinja2's immutable sandbox, with the helpers that transformers gives them.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from omnistage.errors import ConfigError, RequestError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """A compiled template with the special tokens that it may write. Raises ConfigError for broken ones."""

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.reads_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"model: the chat template is broken: line {error.lineno}: {error}", param="model"
            ) from None
        self._special_tokens = special_tokens or {}

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """The template of a checkpoint folder (`chat_template.jinja`, else in `tokenizer_config.json` or
        `chat_template.json`); None if it has none."""
        config = read_json(folder / "tokenizer_config.json")
        source = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
        if isinstance(source, list):
            source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
        file = folder / "chat_template.jinja"
        if file.is_file():
            source = file.read_text("utf-8")
        return cls(source, _special_tokens(config)) if source else None

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt up to where the assistant's answer begins. Raises RequestError when the template refuses."""
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file. Raises ConfigError for what is no JSON."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"model: {path.name} cannot be read: {error}", param="model") from None
    return content if isinstance(content, dict) else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens are strings or objects with the string under "content"."""
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

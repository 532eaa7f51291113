from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from omnistage.config.model import TextMarkup
from omnistage.errors import ConfigError, RequestError
from omnistage.request import StageRequest
from omnistage.stages.ar.chat_template import ChatTemplate, read_json
from omnistage.stages.ar.text_prompt import conversation_text
from omnistage.tools import ToolUse, tool_use
from tests.stages.ar.conftest import CHAT_TEMPLATE

MESSAGES = [{"role": "system", "content": "be <brief>"}, {"role": "user", "content": "naïve?"}]
TEMPLATES = [
    CHAT_TEMPLATE,
    "{%- for m in messages %}\n    {%- if loop.first %}{{ bos_token }}{% endif %}\n {{ m | tojson }}\n{%- endfor %}",
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content | upper }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ tools }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_rendering_equals_transformers(source: str) -> None:
    want, _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True, bos_token="<s>")
    ours = ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES).replace("None", "[]")
    assert ours == want[0].replace("None", "[]")


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"é": {}}}}}
]
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "go"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"é": 1}}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "done"},
]
TOOL_TEMPLATE = """{%- if tools %}<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_tools_and_calls_are_rendered_as_transformers_renders_them(tools: list[dict[str, Any]] | None) -> None:
    want, _ = render_jinja_template([CALLED], tools=tools, chat_template=TOOL_TEMPLATE, add_generation_prompt=True)
    template = ChatTemplate(TOOL_TEMPLATE)
    assert template.reads_tools
    assert template.render(CALLED, tools) == want[0]


def conversation(use: ToolUse | None) -> str:
    request = StageRequest(request_id="r", tools=use)
    return conversation_text(ChatTemplate(CHAT_TEMPLATE), CALLED, TextMarkup(tool_format="hermes"), request)


def test_template_without_tools_gets_them_in_plain_messages() -> None:
    text = conversation(tool_use(TOOLS, "auto", parallel=True))
    assert text.index("<|im_start|>system\n# Tools") == 0
    assert json.dumps(TOOLS[0], ensure_ascii=False) in text
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"é": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\ndone\n</tool_response><|im_end|>" in text


def test_earlier_calls_are_shown_without_tools_too() -> None:
    text = conversation(None)
    assert "# Tools" not in text
    assert "<tool_call>" in text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.x.y }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set _ = messages.append(1) %}",
        "{{ messages[0].content + 3 }}",
    ],
)
def test_a_template_that_refuses_or_breaks_out_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert caught.value.info.param == "messages"


def folder(path: Path, config: dict[str, Any], jinja: str | None = None) -> Path:
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja)
    return path


@pytest.mark.parametrize(
    ("config", "jinja", "rendered"),
    [
        ({"chat_template": "A{{ eos_token }}", "eos_token": "</s>"}, None, "A</s>"),
        ({"chat_template": "A{{ eos_token }}", "eos_token": {"content": "</e>"}}, None, "A</e>"),
        ({"chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]}, None, "D"),
        ({"chat_template": "A"}, "J", "J"),
    ],
)
def test_templates_are_found_where_checkpoints_keep_them(
    tmp_path: Path, config: dict[str, Any], jinja: str | None, rendered: str
) -> None:
    template = ChatTemplate.load(folder(tmp_path, config, jinja))
    assert template is not None
    assert template.render(MESSAGES) == rendered


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("chat_template.jinja", "one\n{% for", "chat template is broken: line 2"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json cannot be read"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, content: str, words: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=words):
        ChatTemplate.load(tmp_path)


def test_a_checkpoint_without_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    (tmp_path / "list.json").write_text("[1]")
    assert read_json(tmp_path / "list.json") == {}

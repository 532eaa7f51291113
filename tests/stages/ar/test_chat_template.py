from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from omnistage.errors import RequestError
from omnistage.stages.ar.chat_template import ChatTemplate, read_json
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


def test_a_checkpoint_without_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    (tmp_path / "list.json").write_text("[1]")
    assert read_json(tmp_path / "list.json") == {}

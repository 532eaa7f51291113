"""The JSON schema takes what the resolver takes and refuses what it refuses; every key has a meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

import omnistage
from omnistage.config.registry import PIPELINES, load_pipeline
from omnistage.config.resolve import (
    EDGE_KEYS,
    SAMPLING_KEYS,
    SECTION_KEYS,
    SETTABLE_STAGE_KEYS,
    TOP_KEYS,
    resolve_config,
)
from omnistage.config.schema import deploy_schema, meanings
from omnistage.entrypoints.cli.config import deploy_document
from omnistage.errors import ConfigError

ROOT = Path(omnistage.__file__).parent
SHIPPED = sorted(ROOT.glob("models/*/*.yaml"))
GENERAL = Draft202012Validator(deploy_schema())
SPEECH = Draft202012Validator(deploy_schema(load_pipeline("smol-speech")))
PAGE = ROOT.parent / "docs" / "configuration.md"


def test_every_key_has_a_meaning_and_every_meaning_a_key() -> None:
    keys: dict[str, Any] = {"top": TOP_KEYS, "stages": SETTABLE_STAGE_KEYS, "edges": EDGE_KEYS}
    keys |= {"sampling": SAMPLING_KEYS} | SECTION_KEYS
    assert {section: set(told) for section, told in meanings().items()} == {
        section: set(names) for section, names in keys.items()
    }


def test_the_page_on_configuration_has_a_row_for_every_key_with_its_meaning() -> None:
    text = PAGE.read_text("utf-8")
    for section, told in meanings().items():
        assert f"`{section}`" in text
        assert [key for key, meaning in told.items() if f"| `{key}` | {meaning} |" not in text] == []


@pytest.mark.parametrize("name", PIPELINES)
def test_schemas_are_schemas(name: str) -> None:
    Draft202012Validator.check_schema(deploy_schema(load_pipeline(name)))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_shipped_deploy_files_are_valid(file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    pipeline = next(name for name, target in PIPELINES.items() if f".{file.parent.name}." in target)
    GENERAL.validate(content)
    Draft202012Validator(deploy_schema(load_pipeline(pipeline))).validate(content)


@pytest.mark.parametrize("name", ["smol-speech", "echo3", "toydit"])
def test_a_whole_configuration_is_valid(name: str) -> None:
    document = yaml.safe_load(yaml.safe_dump(deploy_document(resolve_config(name))))
    Draft202012Validator(deploy_schema(load_pipeline(name))).validate(document)


@pytest.mark.parametrize(
    "content",
    [
        {"stage": {"thinker": {"threads": 1}}},
        {"variant": "other"},
        {"stages": {"speaker": {"dtype": "float32"}}},
        {"stages": {"thinker": {"max_num_seqs": 0}}},
        {"stages": {"thinker": {"max_num_seq": 4}}},
        {"stages": {"thinker": {"dtype": "float8"}}},
        {"stages": {"thinker": {"chunk_frames": 4}}},
        {"stages": {"code2wav": {"chunk_frames": 0}}},
        {"edges": {"thinker->listener": {"deadline_s": 1.0}}},
        {"edges": {"thinker->talker": {"deadline_s": 0}}},
        {"sampling": {"thinker": {"temperature": 9}}},
        {"sampling": {"talker": {"temperature": 0.5}}},
        {"limits": {"max_queue": "many"}},
        {"platforms": {"tpu": {}}},
        {"platforms": {"cpu": {"stages": {"thinker": {"threads": "all"}}}}},
    ],
    ids=str,
)
def test_mistakes_are_no_valid_files_for_the_schema_nor_for_the_resolver(
    content: dict[str, Any], tmp_path: Path
) -> None:
    assert not SPEECH.is_valid(content)
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError):
        resolve_config("smol-speech", file)


def test_without_a_pipeline_any_stage_and_option_may_be_named() -> None:
    GENERAL.validate({"stages": {"painter": {"batching": "step", "threads": "auto"}}})
    assert not GENERAL.is_valid({"stages": {"painter": {"max_num_seqs": "four"}}})

"""`Omni` and `AsyncOmni` as a user's script sees them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import omnistage
from omnistage import AsyncOmni, Omni
from omnistage.entrypoints.omni import Ask
from omnistage.errors import ConfigError, ErrorCode, OmniError
from omnistage.request import FinishReason, OmniRequest
from omnistage.testing.closed_form import text_of_wave


def test_prompts_mappings_and_requests_are_answered_in_order() -> None:
    with Omni("echo3", placement="inline") as omni:
        asks: list[Ask] = ["one", {"prompt": "two", "modalities": ["text"]}, OmniRequest(id="three", prompt="three")]
        results = omni.generate(asks)
    assert [r.text for r in results] == ["one", "two", "three"]
    assert text_of_wave(results[0].tensors["audio"][0]) == "one"
    assert results[1].tensors == {}
    assert results[2].request_id == "three"


def test_one_bad_request_of_a_batch_has_its_error_and_the_others_their_answers() -> None:
    with Omni("echo3", placement="inline") as omni:
        good, bad = omni.generate([{"prompt": "good"}, {"prompt": "bad", "voice": "nobody"}])
    assert good.raise_for_error().text == "good"
    assert bad.error is not None
    assert (bad.error.code, bad.error.param, bad.finish_reason) == (
        ErrorCode.INVALID_REQUEST,
        "voice",
        FinishReason.ERROR,
    )
    with pytest.raises(OmniError, match="nobody"):
        bad.raise_for_error()


def test_outputs_are_seen_while_they_come() -> None:
    seen: list[str] = []
    with Omni("echo3", placement="inline") as omni:
        omni.generate("abc", lambda output: seen.append(output.text))
    assert [text for text in seen if text] == ["a", "b", "c"]


def test_closing_twice_is_harmless_and_a_wrong_start_raises() -> None:
    omni = Omni("echo3", placement="inline")
    omni.close()
    omni.close()
    with pytest.raises(ConfigError, match="no built-in name"):
        Omni("echo4")


async def test_async_omni_streams_and_aborts() -> None:
    async with AsyncOmni("echo3", placement="inline") as omni:
        events = []
        async for output in omni.generate({"id": "a", "prompt": "long " * 200}):
            events.append(output)
            if len(events) == 2:
                assert await omni.abort("a")
        assert events[-1].finish_reason == FinishReason.ABORT
        assert (await omni.result("whole")).text == "whole"


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import omnistage, sys; print([m for m in ('numpy', 'torch', 'msgspec', 'asyncio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Omno"):
        _ = omnistage.Omno


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [{"limits.max_running": 2, "limits.max_queue": 1}, {"limits.max_wait_s": 0.01}],
)
def test_many_requests_are_all_answered_however_little_the_engine_takes_at_once(limits: dict[str, Any]) -> None:
    prompts = [f"prompt {index}" for index in range(40)]
    with Omni("echo3", placement="inline", **limits) as omni:
        results = omni.generate(prompts)
    assert [result.error for result in results] == [None] * 40
    assert [result.text for result in results] == prompts

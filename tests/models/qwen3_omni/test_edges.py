"""Answers that the reference cannot give or gives wrongly, and random choices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omnistage.errors import RequestError
from omnistage.models.qwen3_omni.predictor import predictor_seed
from omnistage.request import OmniRequest
from tests.models.qwen3_omni.reference import HELLO
from tests.models.qwen3_omni.stages import Heard, Models, Stages
from tests.models.qwen3_omni.tiny import CODEC, LOST_SAMPLES, SAMPLES_PER_FRAME

pytestmark = pytest.mark.slow

END = 354


def request(name: str = "r", thinker: dict[str, Any] | None = None, **fields: Any) -> OmniRequest:
    talker = {"temperature": 0.0, "max_tokens": 30} | fields.pop("talker", {})
    sampling = {"thinker": {"max_tokens": 24} | (thinker or {}), "talker": talker}
    prompt: dict[str, Any] = {} if {"messages", "raw_prompt"} & fields.keys() else {"prompt": HELLO}
    return OmniRequest(id=name, sampling=sampling, **prompt, **fields)


def answer(models: Models, *requests: OmniRequest) -> list[Heard]:
    stages = Stages(models)
    for one in requests:
        stages.add(one)
    stages.run()
    return [stages.heard[one.id] for one in requests]


def test_an_empty_answer_is_empty_audio(models: Models) -> None:
    (heard,) = answer(models, request(thinker={"logit_bias": {str(END): 100.0}}))
    assert (heard.token_ids, heard.text) == ([END], "")
    assert len(heard.wave) == 0
    assert heard.finished == {"thinker": "stop", "talker": "stop", "code2wav": "stop"}


def test_an_answer_of_no_tokens_is_empty_audio(models: Models) -> None:
    (heard,) = answer(models, request(thinker={"max_tokens": 0}))
    assert (heard.token_ids, len(heard.wave)) == ([], 0)


def test_an_answer_of_one_token_cut_by_its_length_speaks_nothing(models: Models) -> None:
    (heard,) = answer(models, request(thinker={"max_tokens": 1}))
    assert len(heard.token_ids) == 1
    assert len(heard.wave) == 0


def test_a_talker_that_ends_at_once_gives_empty_audio(models: Models) -> None:
    (heard,) = answer(models, request(talker={"logit_bias": {str(CODEC + 2): 100.0}}))
    assert len(heard.token_ids) > 1
    assert (len(heard.codes), len(heard.wave)) == (0, 0)


def test_a_request_without_user_turn_speaks(models: Models) -> None:
    (heard,) = answer(models, request(messages=[{"role": "system", "content": "You are a helpful assistant"}]))
    assert len(heard.codes) > 0


def test_forced_lengths_are_kept(models: Models) -> None:
    forced = {"min_tokens": 20, "max_tokens": 20}
    (heard,) = answer(models, request(thinker=forced, talker={"min_tokens": 28, "max_tokens": 28}))
    assert len(heard.token_ids) == 20
    assert heard.frames.shape[1] == 27
    assert len(heard.wave) == 27 * SAMPLES_PER_FRAME - LOST_SAMPLES


def test_speech_without_max_tokens_ends_at_the_limit_of_the_deployment(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = request(talker={"ignore_eos": True})
    del endless.sampling["talker"]["max_tokens"]
    monkeypatch.setattr(models.talker, "_max_frames", 40)
    (heard,) = answer(models, endless)
    assert heard.frames.shape[1] == 39


def test_a_stop_string_cuts_speech_where_it_cuts_the_text(models: Models) -> None:
    text, stopped = answer(models, request("whole"), request("stopped", thinker={"stop": ["ell"]}))
    cut = text.text.index("ell")
    assert stopped.text == text.text[:cut]
    spoken = len(stopped.token_ids) - 1
    (same,) = answer(models, request("same", thinker={"max_tokens": spoken + 1}))
    np.testing.assert_array_equal(stopped.frames, same.frames)


def test_a_raw_prompt_that_begins_the_answer_speaks_its_beginning(models: Models) -> None:
    head = f"<|im_start|>user\n{HELLO}<|im_end|>\n<|im_start|>assistant\n"
    (whole,) = answer(models, request(raw_prompt=head))
    (begun,) = answer(models, request(raw_prompt=head + whole.text[:2]))
    assert begun.text == whole.text[2:]
    np.testing.assert_array_equal(begun.frames, whole.frames)


def test_an_unknown_voice_is_refused_by_name(models: Models) -> None:
    with pytest.raises(RequestError, match="aiden, chelsie, ethan") as error:
        answer(models, request(voice="Robbie"))
    assert error.value.info.param == "voice"


def test_a_voice_has_no_case(models: Models) -> None:
    upper, lower, default = (
        answer(models, request(voice="ETHAN")),
        answer(models, request(voice="ethan")),
        answer(models, request()),
    )
    np.testing.assert_array_equal(upper[0].frames, lower[0].frames)
    np.testing.assert_array_equal(upper[0].frames, default[0].frames)


def test_random_speech_depends_on_its_seed_and_on_no_batch_mate(models: Models) -> None:
    drawn = {"temperature": 0.9, "top_k": 50}
    seeds = {"a": 1, "b": 2, "c": 3}
    together = answer(models, *[request(name, talker=drawn, seed=seed) for name, seed in seeds.items()])
    for (name, seed), mine in zip(seeds.items(), together, strict=True):
        (alone,) = answer(models, request(name, talker=drawn, seed=seed))
        np.testing.assert_array_equal(alone.frames, mine.frames)
    assert not np.array_equal(together[0].frames[:, :5], together[1].frames[:, :5])


def test_residual_codes_are_drawn_apart_from_first_codes() -> None:
    assert predictor_seed(1) not in (1, predictor_seed(2))
    assert 0 <= predictor_seed(-(2**63)) < 2**63

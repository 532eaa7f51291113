"""Text, codes and waveform equal those of the reference, whatever the schedule."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.request import OmniRequest
from tests.models.qwen3_omni.reference import ASKS, Reference
from tests.models.qwen3_omni.stages import STAGES, Heard, Models, Stages

pytestmark = pytest.mark.slow

MIXED = ("text", "audio", "image", "audio_image", "video", "heard_video", "earlier_turns", "chelsie")
SHORT = ("text", "image", "audio_image", "heard_video")
TOLERANCE = 1e-4


def assert_equal(heard: Heard, reference: Reference, name: str) -> None:
    answer = reference[name]
    assert heard.token_ids == answer.text_ids, name
    np.testing.assert_array_equal(heard.frames, answer.codes, name)
    assert heard.wave.shape == answer.wave.shape, name
    np.testing.assert_allclose(heard.wave, answer.wave, rtol=0, atol=TOLERANCE, err_msg=name)


def answered(stages: Stages, reference: Reference, names: tuple[str, ...], order: tuple[str, ...] = STAGES) -> None:
    """Runs the requests all at once and compares each with the reference."""
    for name in names:
        stages.add(ASKS[name].request(name))
    stages.run(order)
    for name in names:
        assert_equal(stages.heard[name], reference, name)


@pytest.mark.parametrize("name", ASKS)
def test_a_request_alone_equals_the_reference(models: Models, reference: Reference, name: str) -> None:
    answered(Stages(models), reference, (name,))


def test_all_requests_at_once_equal_the_reference(models: Models, reference: Reference) -> None:
    stages = Stages(models)
    answered(stages, reference, tuple(ASKS))
    assert stages.thinker.counters()["mixed_steps"] > 0


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16, 50])
def test_a_prompt_may_be_cut_anywhere(models: Models, reference: Reference, budget: int) -> None:
    answered(Stages(models, budget=budget, caching=False), reference, SHORT)


@pytest.mark.parametrize(
    "order",
    [("thinker", *["talker"] * 5, "code2wav"), (*["thinker"] * 5, "talker"), ("code2wav", "talker", "thinker")],
    ids=["slow thinker", "slow talker", "backwards"],
)
def test_a_slow_stage_changes_nothing(models: Models, reference: Reference, order: tuple[str, ...]) -> None:
    answered(Stages(models), reference, MIXED, (*order, "code2wav", "talker", "thinker"))


def test_a_slow_thinker_makes_the_talker_wait_without_blocking_others(models: Models, reference: Reference) -> None:
    stages = Stages(models)
    stages.add(ASKS["text"].request("early"))
    while stages.thinker.has_work():
        stages.step("thinker")
    stages.add(ASKS["audio"].request("late"))
    for _ in range(3):
        stages.step("thinker")
    for _ in range(20):
        stages.step("talker")
    counters = stages.talker.counters()
    assert counters["parked"] == 1
    assert len(stages.heard["early"].codes) > len(stages.heard["late"].codes) > 0
    stages.run()
    assert_equal(stages.heard["early"], reference, "text")
    assert_equal(stages.heard["late"], reference, "audio")


def test_speech_starts_before_the_text_ends(models: Models) -> None:
    stages = Stages(models)
    for name in MIXED:
        stages.add(ASKS[name].request(name))
    stages.run()
    for name in MIXED:
        mine = [event for request, event in stages.events if request == name]
        assert mine.index("audio") < mine.index("thinker ends"), name


@pytest.mark.parametrize("name", ["audio_image", "heard_video", "text"])
def test_a_cached_prompt_gives_the_same_speech(models: Models, reference: Reference, name: str) -> None:
    stages = Stages(models)
    for turn in ("first", "second"):
        stages.add(ASKS[name].request(turn))
        stages.run()
        assert_equal(stages.heard[turn], reference, name)
    assert stages.heard["first"].metrics["thinker"].cached_tokens == 0
    assert stages.heard["second"].metrics["thinker"].cached_tokens >= 8


def test_a_prompt_cached_by_a_text_only_request_gives_the_same_speech(models: Models, reference: Reference) -> None:
    stages = Stages(models)
    stages.add(ASKS["audio_image"].request("silent", modalities=("text",)))
    stages.run()
    answered(stages, reference, ("audio_image",))
    assert stages.heard["audio_image"].metrics["thinker"].cached_tokens >= 8


def test_equal_words_with_other_media_share_no_cache_beyond_them(models: Models, reference: Reference) -> None:
    stages = Stages(models)
    other = ASKS["audio"].messages[0]["content"][0] | {"media": "long"}
    messages = [{"role": "user", "content": [other, *ASKS["audio"].messages[0]["content"][1:]]}]
    stages.add(
        OmniRequest(id="other", messages=messages, sampling={"thinker": {"max_tokens": 4}}, modalities=("text",))
    )
    stages.run()
    answered(stages, reference, ("audio",))
    assert stages.heard["audio"].metrics["thinker"].cached_tokens <= 4


def test_preemption_changes_nothing(models: Models, reference: Reference) -> None:
    stages = Stages(models, blocks=(56, 60), caching=False)
    answered(stages, reference, ("text", "audio", "image", "audio_image", "chelsie"))
    assert stages.thinker.counters()["preemptions"] > 0
    assert stages.talker.counters()["preemptions"] > 0


def test_an_abort_in_mid_stream_changes_nothing_for_others(models: Models, reference: Reference) -> None:
    stages = Stages(models)
    for name in ("text", "image", "endless", "audio"):
        stages.add(ASKS[name].request(name))
    for _ in range(12):
        for stage in STAGES:
            stages.step(stage)
    stages.abort("endless")
    stages.abort("image")
    stages.run()
    assert_equal(stages.heard["text"], reference, "text")
    assert_equal(stages.heard["audio"], reference, "audio")
    assert stages.thinker.counters()["free_blocks"] == stages.thinker.counters()["total_blocks"]

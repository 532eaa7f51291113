"""Text to audio with the real weights: intelligible, independent of company, right for texts of any length."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.models.smol_speech.hearing import Question, Recogniser
from omnistage.models.smol_speech.windows import to_mono_16k
from tests.models.smol_speech.conftest import Speaker
from tests.models.smol_speech.sentences import SENTENCES, word_errors, words

pytestmark = pytest.mark.slow

VOICES = ("heart", "joe")


@pytest.mark.parametrize("voice", VOICES)
def test_whisper_hears_the_words(speaker: Speaker, recogniser: Recogniser, voice: str) -> None:
    for index, sentence in enumerate(SENTENCES):
        speaker.say(str(index), sentence, voice)
    speaker.drain()
    assert speaker.rates == {24000}
    errors = total = 0
    for start in range(0, len(SENTENCES), 5):
        batch = range(start, start + 5)
        recordings = [to_mono_16k(speaker.wave_of(str(index)), 24000) for index in batch]
        for index, heard in zip(batch, recogniser.hear([Question(audio) for audio in recordings]), strict=True):
            reference = words(SENTENCES[index])
            errors += word_errors(reference, words(heard.text))
            total += len(reference)
    assert errors / total <= 0.05


@pytest.mark.parametrize("voice", VOICES)
def test_many_at_once_equal_one_by_one(speaker: Speaker, voice: str) -> None:
    for index, sentence in enumerate(SENTENCES[:6]):
        speaker.say(f"together-{index}", sentence, voice, seed=index)
    speaker.drain()
    for index, sentence in enumerate(SENTENCES[:6]):
        speaker.say(f"alone-{index}", sentence, voice, seed=index)
        speaker.drain()
        together, alone = speaker.wave_of(f"together-{index}"), speaker.wave_of(f"alone-{index}")
        np.testing.assert_allclose(together, alone, atol=1e-5)
    counters = speaker.wave.counters()
    assert counters["frames_in"] == counters["frames_out"] > 0


def test_the_seed_decides_the_samples(speaker: Speaker) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        speaker.say(name, "Good morning.", seed=seed)
    speaker.drain()
    np.testing.assert_allclose(speaker.wave_of("a"), speaker.wave_of("b"), atol=1e-6)
    assert np.abs(speaker.wave_of("a") - speaker.wave_of("c")).max() > 1e-4


@pytest.mark.parametrize(("text", "seconds"), [("", 0), ("...", 0), ("😀", 0), ("Yes", 0.5), ("Good day.", 0.8)])
def test_texts_of_nothing_one_and_two_tokens(speaker: Speaker, text: str, seconds: float) -> None:
    speaker.say("r", text)
    speaker.drain()
    length = len(speaker.wave_of("r")) / 24000
    assert length == 0 if not seconds else seconds <= length <= 3 * seconds
    assert speaker.wave.request_ids() == frozenset()


@pytest.mark.parametrize("voice", VOICES)
def test_speed_changes_the_duration(speaker: Speaker, voice: str) -> None:
    for speed in (0.25, 1.0, 4.0):
        speaker.say(str(speed), "The train leaves from platform nine.", voice, speed=speed)
    speaker.drain()
    slow, normal, fast = (len(speaker.wave_of(str(speed))) for speed in (0.25, 1.0, 4.0))
    assert slow > 2 * normal
    assert normal > 1.5 * fast


def test_a_very_long_word_and_a_very_long_text_are_spoken_whole(speaker: Speaker) -> None:
    speaker.say("digits", "1234567890" * 30)
    speaker.say("long", "This sentence has no comma and goes on " * 30)
    speaker.drain()
    assert len(speaker.wave_of("digits")) / 24000 > 60
    assert len(speaker.wave_of("long")) / 24000 > 40


def test_aborted_requests_leave_nothing_and_disturb_nobody(speaker: Speaker) -> None:
    speaker.say("kept", SENTENCES[0], seed=1)
    speaker.drain()
    speaker.say("again", SENTENCES[0], seed=1)
    speaker.say("gone", SENTENCES[1])
    speaker._hand_over(speaker.talker.step())
    speaker._collect(speaker.wave.step())
    for engine in (speaker.talker, speaker.wave):
        engine.abort("gone")
    speaker.drain()
    np.testing.assert_allclose(speaker.wave_of("again"), speaker.wave_of("kept"), atol=1e-5)
    assert speaker.wave.request_ids() == speaker.talker.request_ids() == frozenset()

"""Whisper with the real weights: complete conversion, batches equal to single windows, timestamps, silence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

from omnistage.models.smol_speech.artefacts import LISTENER
from omnistage.models.smol_speech.hearing import Question, Recogniser
from omnistage.models.smol_speech.windows import SAMPLE_RATE, to_mono_16k
from tests.models.smol_speech.conftest import Speaker
from tests.models.smol_speech.sentences import SENTENCES, word_errors, words

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recordings(real_talker: object, real_code2wav: object) -> list[np.ndarray]:
    speaker = Speaker(real_talker, real_code2wav)  # type: ignore[arg-type]
    for index in range(3):
        speaker.say(str(index), SENTENCES[index])
    speaker.drain()
    return [to_mono_16k(speaker.wave_of(str(index)), 24000) for index in range(3)]


def test_the_converted_checkpoint_has_no_missing_and_no_unexpected_keys() -> None:
    _, report = WhisperForConditionalGeneration.from_pretrained(
        LISTENER.locate(""), local_files_only=True, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]


def test_it_decodes_as_transformers_generate_does(recogniser: Recogniser, recordings: list[np.ndarray]) -> None:
    features = recogniser._features(recordings[0], sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
    with torch.inference_mode():
        ids = recogniser._model.generate(features, return_timestamps=False, do_sample=False)[0].tolist()
    expected = recogniser._tokenizer.decode(ids, skip_special_tokens=True).strip()
    assert recogniser.hear([Question(recordings[0])])[0].text == expected


def test_windows_heard_together_read_as_alone(recogniser: Recogniser, recordings: list[np.ndarray]) -> None:
    questions = [Question(audio) for audio in recordings]
    assert recogniser.hear(questions) == [recogniser.hear([question])[0] for question in questions]


def test_questions_of_every_kind_share_a_batch(recogniser: Recogniser, recordings: list[np.ndarray]) -> None:
    questions = [
        Question(recordings[0]),
        Question(recordings[1], timestamps=True),
        Question(recordings[2], prompt="A family of musicians."),
    ]
    for index, heard in enumerate(recogniser.hear(questions)):
        assert word_errors(words(SENTENCES[index]), words(heard.text)) <= 1


def test_timestamps_give_phrases_in_time(recogniser: Recogniser, recordings: list[np.ndarray]) -> None:
    pause = np.zeros(SAMPLE_RATE, np.float32)
    audio = np.concatenate([recordings[0], pause, recordings[2]])
    heard = recogniser.hear([Question(audio, timestamps=True)])[0]
    seconds = len(audio) / SAMPLE_RATE
    times = [time for phrase in heard.phrases for time in (phrase.start, phrase.end)]
    assert len(heard.phrases) >= 2
    assert times == sorted(times)
    assert 0.0 <= times[0] <= 1.0
    assert seconds - 2.5 <= times[-1] <= seconds


@pytest.mark.parametrize("level", [0.0, 1e-5, 1e-3])
def test_silence_says_nothing(recogniser: Recogniser, level: float) -> None:
    audio = (np.random.default_rng(0).standard_normal(4 * SAMPLE_RATE) * level).astype(np.float32)
    assert recogniser.hear([Question(audio)])[0].text == ""


def test_sampling_is_decided_by_the_seed(recogniser: Recogniser, recordings: list[np.ndarray]) -> None:
    def heard(seed: int) -> str:
        return recogniser.hear([Question(recordings[0], temperature=1.0, seed=seed)])[0].text

    assert heard(1) == heard(1)
    assert len({heard(seed) for seed in range(4)}) > 1

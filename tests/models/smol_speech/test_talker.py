"""The talker over a front end that counts: clauses, segments, joins, ends, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omnistage.errors import RequestError
from omnistage.models.smol_speech.clause import ClauseRules
from omnistage.models.smol_speech.fronts import Utterance
from omnistage.models.smol_speech.talker import Talker, TalkerState
from omnistage.payload import MultimodalPayload
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.generation.model import Produced


class FakeFront:
    """One frame per phoneme character."""

    def __init__(self) -> None:
        self.utterances: list[Utterance] = []
        self.fail = False

    def frames(self, utterance: Utterance) -> dict[str, Any]:
        if self.fail:
            raise RuntimeError("front end broke")
        self.utterances.append(utterance)
        return {"z": np.zeros((2, len(utterance.phonemes)), np.float32)}


def phonemize(clause: str) -> list[str]:
    """The words themselves, in pieces of at most 3 words; numbers are not spoken."""
    words = [word for word in clause.split() if word[0].isalpha()]
    return [" ".join(words[index : index + 3]) for index in range(0, len(words), 3)]


class Setup:
    def __init__(self) -> None:
        self.front = FakeFront()
        self.talker = Talker({"heart": self.front}, phonemize, ClauseRules(growth=0))  # type: ignore[arg-type]

    def open(self, **params: Any) -> TalkerState:
        return self.talker.open(StageRequest(request_id="r", params=params, seed=7))

    def feed(self, state: TalkerState, text: str, final: bool = True) -> None:
        payload = MultimodalPayload.text(text)
        self.talker.feed(state, InputChunk(request_id="r", port="text", seq=0, final=final, payload=payload))

    def drain(self, state: TalkerState) -> list[Produced]:
        produced: list[Produced] = []
        while self.talker.pending(state):
            produced += self.talker.run([state])[0]
        return produced


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_each_clause_is_a_segment_and_only_the_last_is_final(setup: Setup) -> None:
    state = setup.open()
    setup.feed(state, "One, two. Three.")
    produced = setup.drain(state)
    assert [item.payload.meta["segment"] for item in produced] == [0, 1, 2]
    assert [item.final for item in produced] == [False, False, True]
    assert [utterance.phonemes for utterance in setup.front.utterances] == ["One,", "two.", "Three."]
    assert setup.talker.done(state)


def test_silence_is_shortened_only_inside_a_sentence(setup: Setup) -> None:
    state = setup.open()
    setup.feed(state, "One, two. Three.")
    setup.drain(state)
    joins = [(utterance.joins_before, utterance.joins_after) for utterance in setup.front.utterances]
    assert joins == [(False, True), (True, False), (False, False)]


def test_a_clause_of_many_phonemes_becomes_joined_pieces(setup: Setup) -> None:
    state = setup.open()
    setup.feed(state, "a b c d e f g.")
    produced = setup.drain(state)
    assert [item.payload.meta["segment"] for item in produced] == [0, 1, 2]
    assert [(u.joins_before, u.joins_after) for u in setup.front.utterances] == [
        (False, True),
        (True, True),
        (True, False),
    ]


@pytest.mark.parametrize("text", ["", "  ", "42", "... 7!"])
def test_text_that_says_nothing_gives_one_empty_final_chunk(setup: Setup, text: str) -> None:
    state = setup.open()
    setup.feed(state, text)
    produced = setup.drain(state)
    assert [(item.final, item.payload.tensors) for item in produced] == [(True, {})]


def test_the_end_is_told_when_the_last_clause_was_already_spoken(setup: Setup) -> None:
    state = setup.open()
    setup.feed(state, "One. \n", final=False)
    assert len(setup.drain(state)) == 1
    assert not setup.talker.done(state)
    setup.feed(state, "", final=True)
    assert [(item.final, item.payload.tensors) for item in setup.drain(state)] == [(True, {})]


def test_streamed_text_gives_the_same_speech(setup: Setup) -> None:
    text = "Well, this is one sentence. And this, then, is another one!"
    whole = setup.open()
    setup.feed(whole, text)
    setup.drain(whole)
    expected, setup.front.utterances = setup.front.utterances, []
    state = setup.open()
    for index, character in enumerate(text):
        setup.feed(state, character, final=index == len(text) - 1)
        while state.clauses:
            setup.talker.run([state])
    setup.drain(state)
    assert setup.front.utterances == expected


def test_seed_voice_and_speed_reach_the_front_end(setup: Setup) -> None:
    state = setup.open(speed=1.5)
    setup.feed(state, "One, two.")
    setup.drain(state)
    assert [(u.seed, u.segment, u.speed) for u in setup.front.utterances] == [(7, 0, 1.5), (7, 1, 1.5)]


@pytest.mark.parametrize(
    ("params", "name"),
    [({"voice": "emma"}, "voice"), ({"speed": 0.1}, "speed"), ({"speed": 4.5}, "speed"), ({"speed": "x"}, "speed")],
)
def test_bad_parameters_are_refused_by_name(setup: Setup, params: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError) as caught:
        setup.open(**params)
    assert caught.value.info.param == name


def test_a_failing_front_end_leaves_the_request_as_it_was(setup: Setup) -> None:
    state, mate = setup.open(), setup.open()
    for each in (state, mate):
        setup.feed(each, "One, two.")
    setup.front.fail = True
    with pytest.raises(RuntimeError, match="front end broke"):
        setup.talker.run([state, mate])
    assert (len(state.clauses), state.segment, len(mate.clauses)) == (2, 0, 2)
    setup.front.fail = False
    assert len(setup.drain(state)) == 2


def test_payloads_are_released_when_they_are_read(setup: Setup) -> None:
    released: list[int] = []
    payload = MultimodalPayload(meta={"text": "One"}, on_release=lambda: released.append(1))
    state = setup.open()
    setup.talker.feed(state, InputChunk(request_id="r", port="text", seq=0, final=True, payload=payload))
    assert released == [1]

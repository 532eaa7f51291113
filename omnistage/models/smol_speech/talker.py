"""The talker: text to acoustic frames, clause by clause. Torch-free.

Input port "text": chunks with `meta["text"]`, a delta each. Output port "frames": one chunk per piece of speech with
the tensors of the voice's front end (see `omnistage.models.smol_speech.fronts`) and `meta` {"voice", "segment"};
segments count from 0. Text without anything to say gives only the empty final chunk.
"""

from __future__ import annotations

import json
from collections import deque
from importlib import resources

import msgspec

from omnistage.config.model import StageContext
from omnistage.errors import RequestError
from omnistage.models.smol_speech.artefacts import HEART, JOE
from omnistage.models.smol_speech.clause import Clause, ClauseRules, ClauseSplitter
from omnistage.models.smol_speech.fronts import Front, Utterance, load_fronts
from omnistage.models.smol_speech.phonemes import Phonemizer
from omnistage.payload import MultimodalPayload
from omnistage.request import StageMetrics
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.generation.model import Produced

MIN_SPEED, MAX_SPEED = 0.25, 4.0
DEFAULT_VOICE = "heart"


class TalkerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request may ask of the talker."""

    voice: str = DEFAULT_VOICE
    speed: float = 1.0


class TalkerState:
    """One request: text that is not yet spoken and where its speech stands."""

    __slots__ = ("clauses", "closed", "complete", "frames_out", "in_sentence", "params", "seed", "segment", "splitter")

    def __init__(self, params: TalkerParams, seed: int, rules: ClauseRules) -> None:
        self.params = params
        self.seed = seed
        self.splitter = ClauseSplitter(rules)
        self.clauses: deque[Clause] = deque()
        self.complete = False
        self.closed = False
        self.in_sentence = False
        self.segment = 0
        self.frames_out = 0


class Talker:
    """A `GenerationModel`: each step speaks the next clause of every request in the batch."""

    def __init__(self, fronts: dict[str, Front], phonemizer: Phonemizer, rules: ClauseRules | None = None) -> None:
        self._fronts = fronts
        self._phonemizer = phonemizer
        self._rules = rules or ClauseRules()

    def open(self, request: StageRequest) -> TalkerState:
        params = talker_params(request.params)
        if params.voice not in self._fronts:
            raise RequestError(f"unknown voice {params.voice!r}; known: {', '.join(self._fronts)}", param="voice")
        return TalkerState(params, request.seed, self._rules)

    def feed(self, state: TalkerState, chunk: InputChunk) -> None:
        text = chunk.payload.meta.get("text", "")
        if not isinstance(text, str):
            raise RequestError("the text to speak must be a string", param="text")
        state.clauses += state.splitter.feed(text)
        if chunk.final:
            state.clauses += state.splitter.finish()
            state.complete = True
        chunk.payload.release()

    def pending(self, state: TalkerState) -> int:
        """Clauses to speak; one more step closes the port."""
        return 0 if state.closed else len(state.clauses) + state.complete

    def run(self, states: list[TalkerState]) -> list[list[Produced]]:
        spoken = [self._speak(state) for state in states]
        return [self._commit(state, payloads) for state, payloads in zip(states, spoken, strict=True)]

    def done(self, state: TalkerState) -> bool:
        return state.closed

    def metrics(self, state: TalkerState) -> StageMetrics:
        return StageMetrics(extra={"segments": state.segment, "frames_out": state.frames_out})

    def close(self, state: TalkerState) -> None:
        state.clauses.clear()

    def _speak(self, state: TalkerState) -> list[MultimodalPayload]:
        """The speech of the next clause: usually one piece, none when it says nothing."""
        if not state.clauses:
            return []
        clause = state.clauses[0]
        pieces = self._phonemizer(clause.text)
        front = self._fronts[state.params.voice]
        payloads = []
        for index, piece in enumerate(pieces):
            utterance = Utterance(
                phonemes=piece,
                speed=state.params.speed,
                seed=state.seed,
                segment=state.segment + index,
                joins_before=state.in_sentence or index > 0,
                joins_after=index + 1 < len(pieces) or not clause.ends_sentence,
            )
            meta = {"voice": state.params.voice, "segment": utterance.segment}
            payloads.append(MultimodalPayload.of(meta, **front.frames(utterance)))
        return payloads

    def _commit(self, state: TalkerState, payloads: list[MultimodalPayload]) -> list[Produced]:
        if state.clauses:
            clause = state.clauses.popleft()
            state.in_sentence = not clause.ends_sentence and (state.in_sentence or bool(payloads))
        state.segment += len(payloads)
        state.frames_out += sum(payload["z"].shape[1] for payload in payloads)
        state.closed = state.complete and not state.clauses
        if state.closed and not payloads:
            payloads = [MultimodalPayload()]
        last = len(payloads) - 1
        return [
            Produced(port="frames", payload=payload, final=state.closed and index == last)
            for index, payload in enumerate(payloads)
        ]


def talker_params(params: dict[str, object]) -> TalkerParams:
    """Raises RequestError naming `speed` or `voice`."""
    try:
        parsed = msgspec.convert(params, TalkerParams)
    except msgspec.ValidationError as error:
        name = "speed" if "speed" in str(error) else "voice"
        raise RequestError(f"{name}: {error}", param=name) from None
    if not MIN_SPEED <= parsed.speed <= MAX_SPEED:
        raise RequestError(f"speed must be from {MIN_SPEED} to {MAX_SPEED}, not {parsed.speed}", param="speed")
    return parsed


def create(context: StageContext) -> Talker:
    """Component factory of the stage `talker`."""
    path, cache = context.model_path, context.config.cache_dir
    vocabulary = json.loads((resources.files("hibari") / "assets" / "vocab.json").read_text(encoding="utf-8"))
    fronts = load_fronts(HEART.locate(path, cache), JOE.locate(path, cache), vocabulary, max(1, context.stage.threads))
    phonemizer = Phonemizer()
    phonemizer("Warm up, unpronounceablewordx.")
    return Talker(fronts, phonemizer, _rules(context))


def _rules(context: StageContext) -> ClauseRules:
    options = context.stage.options
    return ClauseRules(
        growth=int(options["clause_growth"]),
        longest_minimum=int(options["clause_chars"]),
        maximum=int(options["max_clause_chars"]),
    )

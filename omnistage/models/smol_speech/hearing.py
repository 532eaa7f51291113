"""Whisper in torch: windows of audio to tokens, batched, on the unmodified transformers modules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.modeling_outputs import BaseModelOutput

from omnistage.models.smol_speech.windows import SAMPLE_RATE
from omnistage.ops.pretrained import load_pretrained

Array = npt.NDArray[Any]

# A window is taken for silence as in OpenAI's Whisper: no-speech probability above 0.6 and mean log probability of the
# words below -1. Noise and hum give this model 0.91 to 0.94 whatever the words, single quiet words at most 0.87.
_NO_SPEECH_PROBABILITY = 0.6
_NO_SPEECH_LOGPROB = -1.0
_SURELY_NO_SPEECH = 0.9
# Below this peak (-80 dB) there is nothing to hear.
_AUDIBLE_PEAK = 1e-4
_NO_SPEECH_TOKEN = "<|nocaptions|>"
_SECONDS_PER_TIMESTAMP = 0.02
_MAX_PROMPT_TOKENS = 223


class Question(msgspec.Struct, frozen=True):
    """A window to hear: `audio` float32 [n] at 16 kHz, n <= 30 s. `temperature` 0 is greedy; else `seed` decides."""

    audio: Array
    prompt: str = ""
    timestamps: bool = False
    temperature: float = 0.0
    seed: int = 0


class Phrase(msgspec.Struct, frozen=True):
    """Words with their start and end in seconds from the start of the window."""

    start: float
    end: float
    text: str


class Heard(msgspec.Struct, frozen=True):
    """What was said in a window: `text`, its `phrases` in order, and the number of generated tokens."""

    text: str
    phrases: list[Phrase]
    tokens: int


class _Row:
    """One window while it is decoded."""

    __slots__ = ("generator", "logprob", "no_speech", "question", "tokens")

    def __init__(self, question: Question, no_speech: float) -> None:
        self.question = question
        self.no_speech = no_speech
        self.tokens: list[int] = []
        self.logprob = 0.0
        self.generator = torch.Generator().manual_seed(question.seed & (2**63 - 1))


class Recogniser:
    """Loads a Whisper folder; `hear` decodes any windows together."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._model: Any = load_pretrained(WhisperForConditionalGeneration, folder).to(device)
        self._device = device
        self._features = WhisperFeatureExtractor(feature_size=self._model.config.num_mel_bins)
        self._rules = GenerationConfig(**settings)
        self._start: int = settings["decoder_start_token_id"]
        self._end: int = settings["eos_token_id"]
        self._previous: int = settings["prev_sot_token_id"]
        self._plain: int = settings["no_timestamps_token_id"]
        self._no_speech: int = self._tokenizer.get_vocab()[_NO_SPEECH_TOKEN]
        self._never = torch.tensor(settings["suppress_tokens"], device=device)
        self._not_first = torch.tensor(settings["begin_suppress_tokens"], device=device)
        self._positions: int = self._model.config.max_target_positions

    @torch.inference_mode()
    def hear(self, questions: Sequence[Question]) -> list[Heard]:
        """One answer per window. Windows with prefixes of equal form are decoded together; silence costs nothing."""
        audible = [index for index, question in enumerate(questions) if _is_audible(question.audio)]
        answers = [Heard("", [], 0) for _ in questions]
        heard = self._hear([questions[index] for index in audible]) if audible else []
        for index, answer in zip(audible, heard, strict=True):
            answers[index] = answer
        return answers

    def _hear(self, questions: Sequence[Question]) -> list[Heard]:
        encoded = self._encode([question.audio for question in questions])
        prefixes = [self._prefix(question) for question in questions]
        groups: dict[tuple[int, bool], list[int]] = {}
        for index, (prefix, question) in enumerate(zip(prefixes, questions, strict=True)):
            groups.setdefault((len(prefix), question.timestamps), []).append(index)
        answers: dict[int, Heard] = {}
        for members in groups.values():
            rows = self._decode(
                [questions[i] for i in members], [prefixes[i] for i in members], encoded[torch.tensor(members)]
            )
            answers |= {index: self._answer(row) for index, row in zip(members, rows, strict=True)}
        return [answers[index] for index in range(len(questions))]

    def _encode(self, audios: list[Array]) -> Tensor:
        features = self._features(audios, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        hidden: Tensor = self._model.model.encoder(features.to(self._device)).last_hidden_state
        return hidden

    def _prefix(self, question: Question) -> list[int]:
        words = self._tokenizer.encode(" " + question.prompt.strip(), add_special_tokens=False).ids
        context = [self._previous, *words[-_MAX_PROMPT_TOKENS:]] if question.prompt.strip() else []
        return [*context, self._start] if question.timestamps else [*context, self._start, self._plain]

    def _decode(self, questions: list[Question], prefixes: list[list[int]], encoded: Tensor) -> list[_Row]:
        """Token by token; rows that end leave the batch."""
        length = len(prefixes[0])
        ids = torch.tensor(prefixes, device=self._device)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        logits = self._forward(ids, encoded, cache)
        silence = logits[:, prefixes[0].index(self._start)].softmax(-1)[:, self._no_speech].tolist()
        rows = [_Row(question, value) for question, value in zip(questions, silence, strict=True)]
        active = list(rows)
        times = WhisperTimeStampLogitsProcessor(self._rules, begin_index=length) if questions[0].timestamps else None
        while True:
            tokens = self._choose(active, ids, logits[:, -1], times)
            kept = [index for index, token in enumerate(tokens) if token != self._end]
            for index in kept:
                active[index].tokens.append(tokens[index])
            if not kept or length + len(active[kept[0]].tokens) >= self._positions:
                return rows
            if len(kept) < len(active):
                chosen = torch.tensor(kept, device=self._device)
                cache.batch_select_indices(chosen)
                ids, encoded = ids[chosen], encoded[chosen]
                active = [active[index] for index in kept]
            new = torch.tensor([[row.tokens[-1]] for row in active], device=self._device)
            ids = torch.cat((ids, new), dim=1)
            logits = self._forward(new, encoded, cache)

    def _forward(self, ids: Tensor, encoded: Tensor, cache: EncoderDecoderCache) -> Tensor:
        """Logits [rows, new tokens, vocabulary]."""
        output = self._model(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            decoder_input_ids=ids,
            cache=cache,
            use_cache=True,
        )
        logits: Tensor = output.logits
        return logits

    def _choose(
        self, rows: list[_Row], ids: Tensor, logits: Tensor, times: WhisperTimeStampLogitsProcessor | None
    ) -> list[int]:
        scores = logits.clone()
        scores[:, self._never] = -torch.inf
        if not rows[0].tokens:
            scores[:, self._not_first] = -torch.inf
        if times is not None:
            scores = times(ids, scores)
        logprobs = scores.log_softmax(-1)
        best = logprobs.argmax(-1).tolist()
        tokens = [_drawn(row, logprobs[index], best[index]) for index, row in enumerate(rows)]
        for index, row in enumerate(rows):
            row.logprob += float(logprobs[index, tokens[index]])
        return tokens

    def _answer(self, row: _Row) -> Heard:
        if _is_silence(row):
            return Heard("", [], len(row.tokens))
        phrases = self._phrases(row.tokens, len(row.question.audio) / SAMPLE_RATE)
        return Heard(" ".join(phrase.text for phrase in phrases), phrases, len(row.tokens))

    def _phrases(self, tokens: list[int], seconds: float) -> list[Phrase]:
        """Cuts at timestamp tokens; without any, one phrase over the whole window."""
        phrases: list[Phrase] = []
        start, words = 0.0, list[int]()
        for token in tokens:
            if token <= self._plain:
                words.append(token)
                continue
            time = min(seconds, (token - self._plain - 1) * _SECONDS_PER_TIMESTAMP)
            phrases += self._phrase(start, time, words)
            start, words = time, []
        return phrases + self._phrase(start, seconds, words)

    def _phrase(self, start: float, end: float, words: list[int]) -> list[Phrase]:
        text: str = self._tokenizer.decode(words, skip_special_tokens=True).strip()
        is_said = any(character.isalnum() for character in text)
        return [Phrase(round(start, 2), round(end, 2), text)] if is_said else []


def _drawn(row: _Row, logprobs: Tensor, best: int) -> int:
    temperature = row.question.temperature
    if temperature == 0.0:
        return best
    weights = (logprobs / temperature).softmax(-1).cpu()
    return int(torch.multinomial(weights, 1, generator=row.generator))


def _is_silence(row: _Row) -> bool:
    mean = row.logprob / (len(row.tokens) + 1)
    unlikely = row.no_speech > _NO_SPEECH_PROBABILITY and mean < _NO_SPEECH_LOGPROB
    return unlikely or row.no_speech > _SURELY_NO_SPEECH


def _is_audible(audio: Array) -> bool:
    return len(audio) > 0 and float(np.abs(audio).max()) > _AUDIBLE_PEAK

"""Requests to the tiny checkpoint, and what transformers' own `generate` answers: a batch of one, greedy everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from omnistage.models.qwen3_omni.media import MediaSet, collect_media
from omnistage.models.qwen3_omni.processor import MediaProcessor
from omnistage.models.qwen3_omni.request import conversation, read_params
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from omnistage.stages.ar.chat_template import ChatTemplate
from tests.models.qwen3_omni.tiny import CODEBOOK, TALKER_VOCAB

Array = np.ndarray[Any, Any]
REPETITION_PENALTY = 1.05


@dataclass(frozen=True)
class Ask:
    """A request. `endless`: the talker may not end its speech, so it goes on to `max_frames` tokens."""

    messages: tuple[dict[str, Any], ...]
    voice: str = "Ethan"
    max_tokens: int = 48
    max_frames: int = 100
    endless: bool = False
    params: dict[str, Any] = field(default_factory=dict)

    def request(self, name: str, modalities: tuple[str, ...] = ("text", "audio"), **more: Any) -> OmniRequest:
        talker = {"temperature": 0.0, "repetition_penalty": REPETITION_PENALTY, "max_tokens": self.max_frames}
        return OmniRequest(
            id=name,
            messages=list(self.messages),
            voice=self.voice,
            modalities=modalities,
            sampling={
                "thinker": {"temperature": 0.0, "max_tokens": self.max_tokens},
                "talker": talker | ({"ignore_eos": True} if self.endless else {}),
            },
            params={"return_codes": True, **self.params},
            **more,
        )


def _user(*parts: str) -> dict[str, Any]:
    """A user's message; parts like "audio:short" are media."""
    return {"role": "user", "content": [_part(part) for part in parts]}


def _part(part: str) -> dict[str, Any]:
    kind, _, key = part.partition(":")
    return {"type": kind, "media": key} if key else {"type": "text", "text": part}


_EARLIER = (
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Say one two"},
)
HELLO = "Hello world, what you hear?"
ASKS: dict[str, Ask] = {
    "text": Ask((_user(HELLO),)),
    "chelsie": Ask((_user(HELLO),), voice="Chelsie"),
    "aiden": Ask((_user(HELLO),), voice="Aiden"),
    "cut": Ask((_user("Describe the picture"),), max_tokens=9),
    "brief": Ask((_user("Say one two"),)),
    "endless": Ask((_user("What is the sound of a video?"),), max_frames=310, endless=True),
    "audio": Ask((_user("audio:short", "What is the sound?"),)),
    "image": Ask((_user("image:wide", "Describe the picture"),)),
    "odd_image": Ask((_user("image:odd", "What is the picture?"),)),
    "audio_image": Ask((_user("audio:short", "image:wide", "Describe"),)),
    "two_images": Ask((_user("image:wide", " and ", "image:odd"),)),
    "video": Ask((_user("video:clip", "Describe the video"),)),
    "video_audio": Ask((_user("video:clip", "audio:long", "Describe the video"),)),
    "heard_video": Ask(
        (_user("video:clip", "audio:long", "Describe the video"),),
        params={"mm_processor_kwargs": {"use_audio_in_video": True}},
    ),
    "earlier_turns": Ask((*_EARLIER, _user("What is a video?"))),
}


def media() -> dict[str, MultimodalPayload]:
    """Two sounds, two pictures and a clip without a frame rate, the same everywhere."""
    random = np.random.default_rng(7)
    payloads = {}
    for name, seconds, pitch in (("short", 1.3, 220.0), ("long", 4.2, 330.0)):
        t = np.arange(int(16000 * seconds)) / 16000
        tone = sum(0.12 / k * np.sin(2 * np.pi * pitch * k * (1 + 0.1 * t) * t) for k in (1, 2, 3))
        sound = tone * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * t)) + 0.01 * random.standard_normal(len(t))
        samples = (sound * 32767).astype(np.int16).astype(np.float32) / 32768
        payloads[name] = MultimodalPayload.of({"sample_rate": 16000}, audio=samples[None])
    for name, width, height in (("wide", 128, 64), ("odd", 90, 75)):
        y, x = np.mgrid[0:height, 0:width]
        shades = np.stack([128 + 100 * np.sin(x / 7.0), 128 + 100 * np.cos(y / 9.0), (x * 3 + y * 5) % 256], -1)
        pixels = shades + random.integers(-20, 20, shades.shape)
        payloads[name] = MultimodalPayload.of(image=pixels.clip(0, 255).astype(np.uint8))
    ramp = np.indices((6, 64, 96)).sum(0)[..., None] * np.array([1, 2, 3]) * 3 % 256
    payloads["clip"] = MultimodalPayload.of(video=ramp.astype(np.uint8))
    return payloads


@dataclass(frozen=True)
class Answer:
    """`text_ids`, end token included; `codes` [G, frames]; `wave` [samples], decoded in one piece."""

    text_ids: list[int]
    codes: Array
    wave: Array


class Reference:
    """Answers of transformers, each computed once."""

    def __init__(self, folder: Path) -> None:
        model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        # The reference fails on sound together with pictures without this.
        model.talker.config.audio_config = model.thinker.config.audio_config
        self.model: Any = model
        self._processor = MediaProcessor(str(folder), model.config.thinker_config)
        self._template = ChatTemplate.load(folder)
        self._answers: dict[str, Answer] = {}

    def __getitem__(self, name: str) -> Answer:
        if name not in self._answers:
            self._answers[name] = self._answer(ASKS[name])
        return self._answers[name]

    def _answer(self, ask: Ask) -> Answer:
        features = self._features(ask)
        spoken: list[Any] = []
        talk = self.model.talker.generate

        def listen(**options: Any) -> Any:
            spoken.append(talk(**options))
            return spoken[0]

        self.model.talker.generate = listen
        silence = {"talker_suppress_tokens": list(range(CODEBOOK, TALKER_VOCAB))} if ask.endless else {}
        sequence, _ = self.model.generate(
            **features,
            speaker=ask.voice,
            use_audio_in_video=bool(ask.params),
            return_audio=True,
            thinker_max_new_tokens=ask.max_tokens,
            thinker_do_sample=False,
            thinker_eos_token_id=self.model.generation_config.eos_token_id,
            talker_max_new_tokens=ask.max_frames,
            talker_do_sample=False,
            talker_repetition_penalty=REPETITION_PENALTY,
            **silence,
        )
        del self.model.talker.generate
        codes = torch.stack([row[-1][0] for row in spoken[0].hidden_states if row[-1] is not None], 1)
        ids = sequence[0, features["input_ids"].shape[1] :].tolist()
        return Answer(ids, codes.numpy(), self.decode(codes))

    def decode(self, codes: torch.Tensor) -> Array:
        """The waveform of codes [G, frames], in one piece."""
        with torch.no_grad():
            wave: Array = self.model.code2wav(codes[None])[0, 0].numpy()
        return wave

    def _features(self, ask: Ask) -> Any:
        assert self._template is not None
        request = ask.request("reference")
        messages, payload = collect_media(
            conversation(request), media(), read_params(request.params).mm_processor_kwargs
        )
        items = MediaSet([], 1.0) if payload is None else msgspec.convert(payload.meta, MediaSet)
        arrays = [] if payload is None else [payload[str(index)] for index in range(len(items.items))]
        return self._processor.features(self._template.render(messages), items, arrays)

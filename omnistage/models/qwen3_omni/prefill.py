"""The talker's prompt: the user's turns as the thinker hands them over, then nine rows that open the speech."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omnistage.models.qwen3_omni.handoff import SpokenPrompt
from omnistage.models.qwen3_omni.positions import Positions

END_OF_TEXT = -1


@dataclass(frozen=True, slots=True)
class Prefill:
    """`rows` [n, H] and where they stand."""

    rows: Tensor
    positions: Positions


class SpeechPrefill:
    """Builds prompts. Text rows are the projected word embeddings of the thinker, media rows its projected hidden
    rows."""

    def __init__(self, part: Any) -> None:
        config = part.config
        self._talker = part.talker
        self._words = part.thinker["model"]["embed_tokens"]
        self._codes = part.talker.model.codec_embedding
        self._bos, self._eos, self._pad = config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id
        codec = config.talker_config
        self._opening = [codec.codec_nothink_id, codec.codec_think_bos_id, codec.codec_think_eos_id]
        self._codec_pad, self._codec_bos = codec.codec_pad_id, codec.codec_bos_id

    def text(self, words: Sequence[int | None]) -> Tensor:
        """[n, H] rows of thinker token ids; `END_OF_TEXT` and None stand for the end of the text and padding."""
        special = {END_OF_TEXT: self._eos, None: self._pad}
        ids = torch.tensor([special.get(word, word) for word in words], device=self._words.weight.device)
        rows: Tensor = self._talker.text_projection(self._words(ids))
        return rows

    def build(self, prompt: SpokenPrompt, media_rows: Tensor | None, speaker: int, word: int) -> Prefill:
        """The prompt of a speech that begins with `word`; `media_rows` [len(prompt.places), thinker hidden]."""
        rows = torch.cat((self._user_rows(prompt, media_rows), self._opening_rows(prompt.head, speaker, word)))
        return Prefill(rows, self._positions(prompt, len(rows)))

    def _user_rows(self, prompt: SpokenPrompt, media_rows: Tensor | None) -> Tensor:
        rows = self.text(prompt.ids) if prompt.ids else self._codes.weight.new_zeros(0, self._codes.embedding_dim)
        if media_rows is not None:
            places = torch.tensor(prompt.places, device=rows.device)
            rows[places] = self._talker.hidden_projection(media_rows.to(rows.device, rows.dtype))
        return rows

    def _opening_rows(self, head: list[int], speaker: int, word: int) -> Tensor:
        """[9, H]: text rows with, from the fourth on, codec rows added."""
        text = self.text([*head, *[None] * 4, self._bos, word])
        codes = [*self._opening, speaker, self._codec_pad, self._codec_bos]
        text[len(head) :] += self._codes(torch.tensor(codes, device=text.device))
        return text

    def _positions(self, prompt: SpokenPrompt, count: int) -> Positions:
        """Plain ones, unless the user shows pictures."""
        if not prompt.image_grids and not prompt.video_grids:
            return Positions.plain(count)
        ids = torch.tensor([*prompt.ids, *[self._pad] * (count - len(prompt.ids))])
        found, deltas = self._talker.get_rope_index(
            ids[None],
            image_grid_thw=torch.tensor(prompt.image_grids) if prompt.image_grids else None,
            video_grid_thw=torch.tensor(prompt.video_grids) if prompt.video_grids else None,
            attention_mask=torch.ones_like(ids)[None],
            audio_seqlens=torch.tensor(prompt.sounds),
            second_per_grids=torch.tensor(prompt.video_seconds),
        )
        return Positions(found[:, 0], int(deltas[0, 0]))

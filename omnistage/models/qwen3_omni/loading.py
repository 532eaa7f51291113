"""Loads one stage's part of a checkpoint: transformers' own modules, only the weights that the stage runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Qwen3OmniMoeConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoePreTrainedModel,
    Qwen3OmniMoeTalkerForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from omnistage.config.model import StageConfig
from omnistage.ops.device import choose_device
from omnistage.ops.dtype import choose_dtype
from omnistage.ops.pretrained import load_pretrained


class ThinkerPart(Qwen3OmniMoePreTrainedModel):  # type: ignore[misc]
    """The thinker with its audio and vision encoders."""

    _keys_to_ignore_on_load_unexpected = [r"^talker\.", r"^code2wav\."]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.thinker = Qwen3OmniMoeThinkerForConditionalGeneration._from_config(config.thinker_config)
        self.post_init()


class TalkerPart(Qwen3OmniMoePreTrainedModel):  # type: ignore[misc]
    """The talker with its code predictor, and of the thinker the word embeddings, which the talker projects."""

    _keys_to_ignore_on_load_unexpected = [r"^thinker\.", r"^code2wav\."]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        text = config.thinker_config.text_config
        self.thinker = nn.ModuleDict(
            {"model": nn.ModuleDict({"embed_tokens": nn.Embedding(text.vocab_size, text.hidden_size)})}
        )
        self.talker = Qwen3OmniMoeTalkerForConditionalGeneration._from_config(config.talker_config)
        self.post_init()


class Code2WavPart(Qwen3OmniMoePreTrainedModel):  # type: ignore[misc]
    """The vocoder."""

    _keys_to_ignore_on_load_unexpected = [r"^thinker\.", r"^talker\."]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.code2wav = Qwen3OmniMoeCode2Wav._from_config(config.code2wav_config)
        self.post_init()


# transformers finds a checkpoint's renamings by the name of the class.
for _part in (ThinkerPart, TalkerPart, Code2WavPart):
    register_checkpoint_conversion_mapping(
        _part.__name__, get_checkpoint_conversion_mapping(Qwen3OmniMoeConfig.model_type), overwrite=True
    )


def load_part(kind: type[Any], path: str, stage: StageConfig) -> tuple[Any, torch.device, torch.dtype]:
    """The part `kind` of the checkpoint folder on the stage's device. Raises ConfigError when weights are missing."""
    device = choose_device(stage.device)
    dtype = choose_dtype(stage.dtype, device).dtype
    config = Qwen3OmniMoeConfig.from_pretrained(path, local_files_only=True)
    # Positions of speech over sound and pictures ask the talker's config for the length of audio windows.
    config.talker_config.audio_config = config.thinker_config.audio_config
    part = load_pretrained(kind, path, whole=False, config=config, dtype=dtype)
    return part.to(device), device, dtype

"""A tiny random Qwen3-Omni checkpoint in Hugging Face layout: real structure, 0.9 M parameters, own tokenizer.

Weights come from numpy's generator, so they are the same everywhere. `SEED` is one of the few for which no greedy
choice of the requests in `reference.py` is a near-tie in float32 and several answers end by themselves.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Qwen2Tokenizer,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SEED = 146
VOCAB = 512
GROUPS = 6
CODEBOOK = 64
TALKER_VOCAB = CODEBOOK + 1024
CODEC = CODEBOOK + 100
SAMPLES_PER_FRAME = 96
LOST_SAMPLES = 32
END_GAIN, CODEC_END_GAIN = 2.6, 1.8

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>"),
    *("<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>"),
]
NAMED = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
WORDS = [
    *("system", "user", "assistant", " the", " a", " what", "What", " is", " you", " hear", " see", " say", "Say"),
    *("Describe", " picture", " sound", " and", " of", " in", " video", " helpful", "Hello", " world", " one"),
    *(" two", "You", " are", "ing", "ed", "er"),
]
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'text' -%}{{ part['text'] }}"
    "{%- elif part['type'] == 'audio' -%}<|audio_start|><|audio_pad|><|audio_end|>"
    "{%- elif part['type'] == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part['type'] == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- endif -%}{%- endfor -%}{%- endif -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
PICTURES: dict[str, Any] = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 64 * 32 * 32},
}


def byte_letters() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(spare)) for byte in range(256)]


def tokenizer() -> Qwen2Tokenizer:
    """Bytes, the merges that make each of `WORDS` one token, then the special tokens."""
    letters = byte_letters()
    vocab = {letter: index for index, letter in enumerate(letters)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        parts = [letters[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            known = [pair for pair in merges if pair in pairs]
            pair = known[0] if known else pairs[0]
            if not known:
                merges.append(pair)
                vocab.setdefault("".join(pair), len(vocab))
            at = pairs.index(pair)
            parts[at : at + 2] = ["".join(pair)]
    for token in SPECIAL:
        vocab[token] = len(vocab)
    made = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        extra_special_tokens=SPECIAL,
        model_specific_special_tokens=NAMED,
        model_max_length=32768,
    )
    made.add_special_tokens({"extra_special_tokens": SPECIAL})
    made.chat_template = TEMPLATE
    return made


def _ids(made: Qwen2Tokenizer) -> dict[str, int]:
    names = {token.strip("<|>"): token for token in SPECIAL} | {role: role for role in ("system", "user", "assistant")}
    return {name: made.convert_tokens_to_ids(token) for name, token in names.items()}


def _rope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1000000.0, **more}


def _text(width: int, inner: int, layers: int, expert: int, **more: Any) -> dict[str, Any]:
    axes = _rope(mrope_section=[6, 5, 5], mrope_interleaved=True, interleaved=True)
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "moe_intermediate_size": expert,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rope_parameters": axes,
        "max_position_embeddings": 4096,
        **more,
    }


_AUDIO = {
    "num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "d_model": 32,
    "n_window": 50, "n_window_infer": 200, "conv_chunksize": 500, "downsample_hidden_size": 4,
    "max_source_positions": 1500, "output_dim": 64,
}  # fmt: skip
_VISION = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "in_channels": 3, "out_hidden_size": 64, "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
_PREDICTOR = {
    "vocab_size": CODEBOOK, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_code_groups": GROUPS,
    "max_position_embeddings": 4096, "rope_parameters": _rope(),
}  # fmt: skip
CODE2WAV: dict[str, Any] = {
    "codebook_size": CODEBOOK, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_hidden_layers": 3, "sliding_window": 16, "num_quantizers": GROUPS,
    "upsample_rates": [4, 3, 2], "upsampling_ratios": [2, 2], "decoder_dim": 32, "max_position_embeddings": 8000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def config(made: Qwen2Tokenizer) -> Qwen3OmniMoeConfig:
    ids = _ids(made)
    media = {
        "audio_token_id": ids["audio_pad"],
        "image_token_id": ids["image_pad"],
        "video_token_id": ids["video_pad"],
        "audio_start_token_id": ids["audio_start"],
        "audio_end_token_id": ids["audio_end"],
        "vision_start_token_id": ids["vision_start"],
        "vision_end_token_id": ids["vision_end"],
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    codec = {"pad_id": 0, "bos_id": 1, "eos_token_id": 2, "nothink_id": 7, "think_bos_id": 8, "think_eos_id": 9}
    talker_text = _text(48, 56, 3, 16, vocab_size=TALKER_VOCAB, num_experts=6, shared_expert_intermediate_size=24)
    talker = {
        "text_config": talker_text,
        "code_predictor_config": _PREDICTOR,
        "num_code_groups": GROUPS,
        "thinker_hidden_size": 64,
        "accept_hidden_layer": 3,
        "speaker_id": {"chelsie": CODEC + 253, "ethan": CODEC + 254, "aiden": CODEC + 255},
        "spatial_merge_size": 2,
        **{f"codec_{name}": CODEC + offset for name, offset in codec.items()},
        **media,
    }
    thinker = {
        "audio_config": _AUDIO,
        "vision_config": _VISION,
        "text_config": _text(64, 96, 5, 24, vocab_size=VOCAB, num_experts=8),
        "user_token_id": ids["user"],
        **media,
    }
    return Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=talker,
        code2wav_config=CODE2WAV,
        enable_audio_output=True,
        im_start_token_id=ids["im_start"],
        im_end_token_id=ids["im_end"],
        tts_pad_token_id=ids["tts_pad"],
        tts_bos_token_id=ids["tts_text_bos"],
        tts_eos_token_id=ids["tts_text_eod"],
        system_token_id=ids["system"],
        user_token_id=ids["user"],
        assistant_token_id=ids["assistant"],
    )


def scaled(name: str, shape: tuple[int, ...], noise: torch.Tensor) -> torch.Tensor:
    """A weight from standard normal noise: scales that keep activations alive and choices clear-cut."""
    last = name.rsplit(".", 1)[-1]
    if last in ("alpha", "beta"):
        return 0.3 * noise
    if last in ("gamma", "scale"):
        return 0.5 + 0.1 * noise
    if last == "bias":
        return 0.05 * noise
    if len(shape) == 1:
        return 1.0 + 0.1 * noise
    if "embed" in name:
        return noise
    fan = shape[-1] if len(shape) == 2 or "experts" in name else math.prod(shape[1:])
    router = "gate.weight" in name and len(shape) == 2
    head = "lm_head" in name or "codec_head" in name
    gain = 2.0 if router or head else 0.6 if name.startswith("code2wav.decoder") else 1.2
    return noise * gain / fan**0.5


def randomise(model: Any, made: Qwen2Tokenizer) -> None:
    """Fills all weights; the thinker says text or <|im_end|> only."""
    random = np.random.default_rng(SEED)

    def noise(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape).astype(np.float32))

    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            shape = tuple(weight.shape)
            weight.copy_(scaled(name, shape, noise(shape)))
        head, codec_head = model.thinker.lm_head.weight, model.talker.codec_head.weight
        head[len(made) :] = 0
        head[made.convert_tokens_to_ids(SPECIAL)] = 0
        end = made.convert_tokens_to_ids("<|im_end|>")
        head[end] = noise((head.shape[1],)) * END_GAIN / head.shape[1] ** 0.5
        codec_head[CODEC + 2] = noise((codec_head.shape[1],)) * CODEC_END_GAIN / codec_head.shape[1] ** 0.5


def write_checkpoint(folder: Path) -> None:
    """A whole checkpoint folder."""
    made = tokenizer()
    model = Qwen3OmniMoeForConditionalGeneration(config(made)).float().eval()
    randomise(model, made)
    model.generation_config.eos_token_id = made.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.pad_token_id = made.convert_tokens_to_ids("<|endoftext|>")
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    write_processor(folder)


def write_processor(folder: Path) -> None:
    sounds = WhisperFeatureExtractor(
        feature_size=128, sampling_rate=16000, hop_length=160, n_fft=400, chunk_length=300, return_attention_mask=True
    )
    images = Qwen2VLImageProcessorPil(**PICTURES).to_dict() | {"image_processor_type": "Qwen2VLImageProcessor"}
    videos = {**PICTURES, "video_processor_type": "Qwen2VLVideoProcessor", "do_sample_frames": False}
    parts = {"feature_extractor": sounds.to_dict(), "image_processor": images, "video_processor": videos}
    flat = {**parts["feature_extractor"], **images, "processor_class": "Qwen3OmniMoeProcessor"}
    whole = {**parts, "processor_class": "Qwen3OmniMoeProcessor"}
    for name, content in (("processor_config.json", whole), ("preprocessor_config.json", flat)):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True))

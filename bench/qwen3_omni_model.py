"""A random Qwen3-Omni checkpoint of about 180 M parameters, with the released model's codec rates and 16 codebooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from tests.models.qwen3_omni.tiny import SPECIAL, config, scaled, tokenizer, write_processor

GROUPS, CODEBOOK, VOCAB = 16, 2048, 512
THINKER, TALKER, WAVE = 512, 384, 512


def bench_config() -> Qwen3OmniMoeConfig:
    made = config(tokenizer()).to_dict()
    thinker, talker = made["thinker_config"], made["talker_config"]
    thinker["audio_config"] |= {"output_dim": THINKER}
    thinker["vision_config"] |= {"out_hidden_size": THINKER}
    thinker["text_config"] |= _text(THINKER, layers=8, heads=8, experts=12) | {"vocab_size": VOCAB}
    talker["text_config"] |= _text(TALKER, layers=6, heads=6, experts=8) | {
        "vocab_size": CODEBOOK + 1024,
        "num_local_experts": 8,
        "shared_expert_intermediate_size": TALKER,
    }
    talker["code_predictor_config"] |= {
        "vocab_size": CODEBOOK, "hidden_size": TALKER, "intermediate_size": 1024, "num_hidden_layers": 3,
        "num_attention_heads": 6, "head_dim": 64, "num_code_groups": GROUPS, "layer_types": ["full_attention"] * 3,
    }  # fmt: skip
    talker |= {"num_code_groups": GROUPS, "thinker_hidden_size": THINKER, "accept_hidden_layer": 4}
    talker |= {f"codec_{name}": CODEBOOK + 100 + at for at, name in enumerate(_CODEC)}
    talker["speaker_id"] = {"ethan": CODEBOOK + 200}
    made["code2wav_config"] |= {
        "codebook_size": CODEBOOK, "num_quantizers": GROUPS, "hidden_size": WAVE, "intermediate_size": 1024,
        "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 4, "sliding_window": 72,
        "upsample_rates": [8, 5, 4, 3], "decoder_dim": 768,
    }  # fmt: skip
    return Qwen3OmniMoeConfig(**made)


_CODEC = ("pad_id", "bos_id", "eos_token_id", "nothink_id", "think_bos_id", "think_eos_id")


def _text(width: int, *, layers: int, heads: int, experts: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "moe_intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "num_experts": experts,
    }


def vocoder_of_released_size() -> Any:
    """Random weights in the shape of the released vocoder: 216 M parameters."""
    config = bench_config().code2wav_config
    for name, value in _RELEASED_VOCODER.items():
        setattr(config, name, value)
    torch.manual_seed(1)
    return Qwen3OmniMoeCode2Wav._from_config(config).float().eval()


_RELEASED_VOCODER = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 16,
    "num_hidden_layers": 8, "decoder_dim": 1536,
}  # fmt: skip


def write_checkpoint(folder: Path, sizes: Qwen3OmniMoeConfig | None = None) -> int:
    """Writes the checkpoint, of `sizes` if given; how many parameters it has."""
    made = tokenizer()
    model = Qwen3OmniMoeForConditionalGeneration(sizes or bench_config()).float().eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            shape = tuple(weight.shape)
            weight.copy_(scaled(name, shape, torch.randn(shape, generator=random)))
        # Only ids that the tokenizer knows are said, so that text streams.
        model.thinker.lm_head.weight[len(made) :] = 0
        model.thinker.lm_head.weight[made.convert_tokens_to_ids(SPECIAL)] = 0
    model.generation_config.eos_token_id = made.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.pad_token_id = made.convert_tokens_to_ids("<|endoftext|>")
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    write_processor(folder)
    return int(model.num_parameters())

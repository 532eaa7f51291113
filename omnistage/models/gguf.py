"""A Llama in GGUF to a Hugging Face folder: config, tokenizer, chat template, generation config, fp32 safetensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from omnistage.weights import WeightError

_CONTROL_TOKEN = 3
_HEAD = "output.weight"
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    _HEAD: "lm_head.weight",
}
_LAYER_WEIGHT = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.weight")
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPECTED = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}


def convert(gguf: Path, folder: Path) -> None:
    """Writes the Hugging Face folder. Raises WeightError when the file is no Llama with the smollm tokenizer."""
    reader = GGUFReader(gguf)
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    for name, expected in _EXPECTED.items():
        if fields.get(name) != expected:
            raise WeightError(f"{gguf.name}: {name} is {fields.get(name)!r}; only {expected!r} can be converted")
    if (scaling := fields.get("llama.rope.scaling.type", "none")) != "none":
        raise WeightError(f"{gguf.name}: llama.rope.scaling.type is {scaling!r}; only 'none' can be converted")
    try:
        _write(reader.tensors, fields, folder)
    except KeyError as error:
        raise WeightError(f"{gguf.name}: {error.args[0]} is no part of a Llama that can be converted") from None


def _write(stored: list[Any], fields: dict[str, Any], folder: Path) -> None:
    """Raises KeyError for a tensor that has no place and a field that is missing."""
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": _kv_heads(fields)}
    tensors = dict(_tensor(tensor, heads) for tensor in stored)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", _config(fields, tied=hf_name(_HEAD) not in tensors))
    _write_json(folder / "generation_config.json", _special_ids(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    if (template := fields.get("tokenizer.chat_template")) is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    build_tokenizer(fields).save(str(folder / "tokenizer.json"))


def hf_name(gguf_name: str) -> str:
    """The name that transformers' LlamaForCausalLM gives to a GGUF tensor. Raises KeyError for unknown ones."""
    if gguf_name in _TOP_LEVEL:
        return _TOP_LEVEL[gguf_name]
    match = _LAYER_WEIGHT.fullmatch(gguf_name)
    if match is None or match["part"] not in _PER_LAYER:
        raise KeyError(gguf_name)
    return f"model.layers.{match['layer']}.{_PER_LAYER[match['part']]}.weight"


def unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """From llama.cpp's row order of q and k ([heads * width, in]; rotary pairs side by side) to HF's halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE that keeps digits apart: what "tokenizer.ggml.pre" = "smollm" stands for."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tensor(tensor: Any, heads: dict[str, int]) -> tuple[str, npt.NDArray[np.float32]]:
    weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    name = hf_name(tensor.name)
    part = tensor.name.split(".")[-2]
    if part in heads:
        weight = unpermute(weight, heads[part])
    return name, np.ascontiguousarray(weight)


def _kv_heads(fields: dict[str, Any]) -> int:
    heads: int = fields.get("llama.attention.head_count_kv", fields["llama.attention.head_count"])
    return heads


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    width, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields.get("llama.vocab_size", len(fields["tokenizer.ggml.tokens"])),
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(fields),
        "head_dim": fields.get("llama.attention.key_length", width // heads),
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(np.round(fields["llama.attention.layer_norm_rms_epsilon"], 10)),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields.get("llama.rope.freq_base", 10000.0)},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        **_special_ids(fields),
        "dtype": "float32",
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, Any]:
    sources = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {name: fields.get(f"tokenizer.ggml.{source}") for name, source in sources.items()}


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    named = {key.removesuffix("_id"): token for key, token in _special_ids(fields).items()}
    named["unk_token"] = fields.get("tokenizer.ggml.unknown_token_id")
    return {
        **{name: tokens[token] for name, token in named.items() if token is not None},
        "model_max_length": fields["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.get("tokenizer.chat_template"),
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")

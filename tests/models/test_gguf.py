"""SmolLM2 from GGUF: equal tensors, the right tokenizer, an answer to a known question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from omnistage.models.gguf import build_tokenizer, convert, hf_name, unpermute
from omnistage.models.gguf_header import read_gguf
from omnistage.models.smollm2 import SMOLLM2, SMOLLM2_GGUF
from omnistage.weights import WeightError, default_cache_dir, fetch

torch.set_num_threads(1)


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's conversion of a Hugging Face q or k projection (convert_hf_to_gguf.py, LlamaModel.permute)."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def test_unpermute_undoes_llama_cpps_order() -> None:
    weight = np.random.default_rng(0).standard_normal((24, 5)).astype(np.float32)
    np.testing.assert_array_equal(unpermute(permute(weight, 3), 3), weight)


def test_names_of_every_kind_of_tensor() -> None:
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("blk.7.ffn_gate.weight") == "model.layers.7.mlp.gate_proj.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    for name in ("blk.0.unknown.weight", "blk.0.attn_q.bias", "rope_freqs.weight"):
        with pytest.raises(KeyError):
            hf_name(name)


def fields() -> dict[str, Any]:
    alphabet = ["<|end|>", "a", "b", "ab", "1", "2", "12", "Ġ", "Ġa"]
    return {
        "tokenizer.ggml.tokens": alphabet,
        "tokenizer.ggml.token_type": [3] + [1] * 8,
        "tokenizer.ggml.merges": ["a b", "1 2", "Ġ a"],
    }


def test_digits_are_never_merged_and_special_tokens_are_whole() -> None:
    tokenizer = build_tokenizer(fields())
    assert tokenizer.encode("ab12<|end|> a").tokens == ["ab", "1", "2", "<|end|>", "Ġa"]
    assert tokenizer.decode([3, 4, 5, 0, 8]) == "ab12 a"


LLAMA = LlamaConfig(
    vocab_size=9, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
)  # fmt: skip


def write_llama(file: Path, model: Any, extra: dict[str, str] | None = None) -> None:
    """A Llama file as llama.cpp's converter writes it, without the optional fields."""
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(LLAMA.max_position_embeddings)
    writer.add_embedding_length(LLAMA.hidden_size)
    writer.add_block_count(LLAMA.num_hidden_layers)
    writer.add_feed_forward_length(LLAMA.intermediate_size)
    writer.add_head_count(LLAMA.num_attention_heads)
    writer.add_head_count_kv(LLAMA.num_key_value_heads)
    writer.add_key_length(LLAMA.head_dim)
    writer.add_layer_norm_rms_eps(LLAMA.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(fields()["tokenizer.ggml.tokens"])
    writer.add_token_types(fields()["tokenizer.ggml.token_type"])
    writer.add_token_merges(fields()["tokenizer.ggml.merges"])
    writer.add_eos_token_id(0)
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    heads = {"attn_q": LLAMA.num_attention_heads, "attn_k": LLAMA.num_key_value_heads}
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    for name in ("token_embd", "output_norm", "output", *(f"blk.{layer}.{p}" for layer in (0, 1) for p in parts)):
        weight = weights[hf_name(f"{name}.weight")]
        part = name.split(".")[-1]
        writer.add_tensor(f"{name}.weight", permute(weight, heads[part]) if part in heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_llama_with_a_head_of_its_own_and_wide_heads_computes_the_same(tmp_path: Path) -> None:
    source = LlamaForCausalLM(LLAMA).eval()
    write_llama(tmp_path / "llama.gguf", source)
    (tmp_path / "folder").mkdir()
    convert(tmp_path / "llama.gguf", tmp_path / "folder")
    made: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", local_files_only=True).eval()
    ids = torch.tensor([[1, 5, 8, 2]])
    with torch.inference_mode():
        torch.testing.assert_close(made(ids).logits, source(ids).logits)
    header = read_gguf(tmp_path / "llama.gguf")
    assert header.config["head_dim"] == LLAMA.head_dim
    assert "lm_head.weight" in {tensor.name for tensor in header.tensors}


def test_scaled_rotary_positions_are_refused_by_name(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama.gguf", LlamaForCausalLM(LLAMA), {"llama.rope.scaling.type": "yarn"})
    with pytest.raises(WeightError, match=r"llama\.rope\.scaling\.type is 'yarn'"):
        convert(tmp_path / "llama.gguf", tmp_path)


@pytest.mark.slow
def test_every_tensor_equals_its_dequantised_source() -> None:
    reader = GGUFReader(fetch([SMOLLM2_GGUF], default_cache_dir())[SMOLLM2_GGUF])
    heads = {"attn_q": 9, "attn_k": 3}
    with safe_open(SMOLLM2.locate("") / "model.safetensors", "np") as converted:
        assert len(converted.keys()) == len(reader.tensors) == 272
        for tensor in reader.tensors:
            expected = dequantize(tensor.data, tensor.tensor_type)
            got = converted.get_tensor(hf_name(tensor.name))
            part = tensor.name.split(".")[-2]
            np.testing.assert_array_equal(permute(got, heads[part]) if part in heads else got, expected)


@pytest.mark.slow
def test_a_known_question_is_answered() -> None:
    folder = SMOLLM2.locate("")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    with torch.inference_mode():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :].tolist())

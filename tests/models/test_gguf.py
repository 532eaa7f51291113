"""SmolLM2 from GGUF: equal tensors, the right tokenizer, an answer to a known question."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from omnistage.models.gguf import build_tokenizer, hf_name, unpermute
from omnistage.models.smollm2 import SMOLLM2, SMOLLM2_GGUF
from omnistage.weights import default_cache_dir, fetch

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
    with pytest.raises(KeyError):
        hf_name("blk.0.unknown.weight")


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

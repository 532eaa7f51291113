"""Attention over packed documents against one plain softmax per document."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from omnistage.errors import ConfigError
from omnistage.ops.packed_attention import Backend, choose_backend, packed_attention

LENGTHS = [3, 1, 7]
HEADS, KV_HEADS, DIM = 4, 2, 8
# The reference implementation of flex attention warns that it is not compiled.
BACKENDS = [
    "TORCH_SDPA",
    pytest.param("FLEX_ATTENTION", marks=pytest.mark.filterwarnings("ignore:flex_attention called without")),
]


def draw(rows: int, heads: int) -> Tensor:
    return torch.randn(rows, heads, DIM, generator=torch.Generator().manual_seed(rows * 10 + heads))


def plain(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    key, value = (rows.repeat_interleave(HEADS // KV_HEADS, 1) for rows in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / DIM**0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_each_document_attends_to_its_own_rows_only(backend: Backend, causal: bool) -> None:
    query, key, value = draw(11, HEADS), draw(11, KV_HEADS), draw(11, KV_HEADS) + 1
    got = packed_attention(query, key, value, LENGTHS, causal=causal, backend=backend)
    for part in (slice(0, 3), slice(3, 4), slice(4, 11)):
        torch.testing.assert_close(got[part], plain(query[part], key[part], value[part], causal), atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefixes_are_seen_by_their_document_alone(backend: Backend) -> None:
    query, key, value = draw(11, HEADS), draw(11, KV_HEADS), draw(11, KV_HEADS) + 1
    prefixes = [(draw(n, KV_HEADS), draw(n, KV_HEADS) - 1) for n in (5, 2, 1)]
    got = packed_attention(query, key, value, LENGTHS, prefixes=prefixes, backend=backend)
    for part, (prefix_k, prefix_v) in zip((slice(0, 3), slice(3, 4), slice(4, 11)), prefixes, strict=True):
        k, v = torch.cat((prefix_k, key[part])), torch.cat((prefix_v, value[part]))
        torch.testing.assert_close(got[part], plain(query[part], k, v, False), atol=1e-5, rtol=0)


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not split"):
        packed_attention(draw(4, HEADS), draw(4, KV_HEADS), draw(4, KV_HEADS), [3, 2])


def test_auto_is_sdpa_on_a_cpu_and_flash_on_cuda_in_half_precision() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_backend("auto", cpu, torch.bfloat16) == "TORCH_SDPA"
    assert choose_backend("auto", cuda, torch.bfloat16) == "FLASH_ATTN"
    assert choose_backend("auto", cuda, torch.float32) == "TORCH_SDPA"
    assert choose_backend("FLEX_ATTENTION", cuda, torch.float32) == "FLEX_ATTENTION"


@pytest.mark.parametrize(
    ("backend", "device", "dtype"),
    [
        ("FLASH_ATTN", "cpu", torch.bfloat16),
        ("FLASH_ATTN", "cuda", torch.float32),
        ("FLEX_ATTENTION", "cpu", torch.float32),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_the_key(backend: str, device: str, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"stages\.dit\.attention_backend"):
        choose_backend(backend, torch.device(device), dtype, stage="dit")

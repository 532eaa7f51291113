from __future__ import annotations

import pytest
import torch

from omnistage.ops.dtype import DtypeName, choose_dtype, matmul_seconds

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_what_is_asked_for_is_used(name: DtypeName, dtype: torch.dtype) -> None:
    assert choose_dtype(name, CPU).dtype == dtype


@pytest.mark.parametrize(
    ("single", "batched", "dtype"),
    [(2.0, 2.0, torch.bfloat16), (1.3, 0.4, torch.float32), (0.9, 3.0, torch.float32), (1.4, 1.4, torch.float32)],
)
def test_auto_needs_a_gain_at_every_batch_size(single: float, batched: float, dtype: torch.dtype) -> None:
    def measure(kind: torch.dtype, rows: int) -> float:
        return 1.0 if kind == torch.float32 else 1 / (single if rows == 1 else batched)

    choice = choose_dtype("auto", CPU, measure)
    assert choice.dtype == dtype
    assert f"{single:.2f}x at 1" in choice.reason


def test_auto_on_an_accelerator_is_bfloat16_without_a_probe() -> None:
    choice = choose_dtype("auto", torch.device("cuda"))
    assert (choice.dtype, choice.reason) == (torch.bfloat16, "default of cuda")


def test_probe_gives_a_time() -> None:
    assert 0 < matmul_seconds(torch.float32, 1) < 1

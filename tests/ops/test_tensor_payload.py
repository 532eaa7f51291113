"""Torch tensors through payloads: every kind keeps its bits, and the reader owns its copy."""

from __future__ import annotations

import pytest
import torch

from omnistage.ops.tensor_payload import from_payload, to_payload


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    tensor = (torch.arange(12) % 5 / 3).to(dtype).view(3, 4)
    held = to_payload(tensor.T)
    assert held.dtype == str(dtype).removeprefix("torch.")
    assert torch.equal(from_payload(held), tensor.T)


def test_a_copy_does_not_change_with_its_source() -> None:
    tensor = torch.zeros(3)
    copied = from_payload(to_payload(tensor))
    tensor += 1
    assert copied.tolist() == [0, 0, 0]

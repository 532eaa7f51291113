from __future__ import annotations

import sys

import pytest
import torch

from omnistage.ops.threads import use_threads


def test_torch_takes_as_many_threads_as_told() -> None:
    before = torch.get_num_threads()
    try:
        use_threads(before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        use_threads(before)


def test_nothing_is_loaded_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    use_threads(2)
    assert "torch" not in sys.modules

from __future__ import annotations

import pytest
import torch

from omnistage.errors import ConfigError
from omnistage.ops.device import choose_device


@pytest.mark.parametrize(
    ("requested", "accelerator", "device"),
    [("auto", "", "cpu"), ("auto", "cuda", "cuda"), ("cpu", "cuda", "cpu"), ("cuda:1", "cuda", "cuda:1")],
)
def test_auto_prefers_the_accelerator_and_names_are_taken_as_they_are(
    requested: str, accelerator: str, device: str
) -> None:
    assert choose_device(requested, accelerator) == torch.device(device)


@pytest.mark.parametrize(
    ("requested", "words"), [("gpu0", "'gpu0' is no device of torch"), ("cuda", "no device 'cuda'; use cpu or auto")]
)
def test_devices_that_are_not_there_are_refused_by_name(requested: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_device(requested, "")


def test_the_machine_is_asked_when_nothing_is_said() -> None:
    assert choose_device("auto").type in ("cpu", "cuda", "mps", "xpu")

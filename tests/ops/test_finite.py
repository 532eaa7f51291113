from __future__ import annotations

import pytest
import torch

from omnistage.errors import StageError
from omnistage.ops.finite import finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_out_of_range_is_an_error_that_names_what_holds_it(bad: float) -> None:
    with pytest.raises(StageError, match="gave pictures that are not finite"):
        finite(torch.tensor([1.0, bad]), "pictures")


def test_numbers_in_range_pass_as_they_are() -> None:
    given = torch.tensor([1.0, -3.0], dtype=torch.float16)
    assert finite(given, "pictures") is given

"""What follows the last step."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from omnistage.errors import StageError
from omnistage.models.minimax_h3.decoding import decode_audio, decode_video


def test_numbers_out_of_range_end_a_request_instead_of_a_black_picture() -> None:
    codec: Any = Mock()
    latents = torch.full((1, 2, 1, 1, 1), torch.nan)
    with pytest.raises(StageError, match="latents that are not finite"):
        decode_video(codec, latents)
    with pytest.raises(StageError, match="latents that are not finite"):
        decode_audio(codec, latents, 8000)
    codec.decode.assert_not_called()

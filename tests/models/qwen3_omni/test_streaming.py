from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omnistage.models.qwen3_omni.streaming import StreamingVocoder, StreamState
from omnistage.models.qwen3_omni.tiles import TILE
from tests.models.qwen3_omni.tiny import CODE2WAV, CODEBOOK, GROUPS, LOST_SAMPLES, SAMPLES_PER_FRAME

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def module() -> Any:
    torch.manual_seed(4)
    made = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**CODE2WAV)).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            short = name.rsplit(".", 1)[-1]
            if short in ("gamma", "scale"):
                weight.copy_(0.5 + 0.1 * torch.randn_like(weight))
            elif weight.ndim > 1:
                weight.copy_(torch.randn_like(weight) * 0.6 / weight[0].numel() ** 0.5)
    return made


@pytest.fixture(scope="module")
def whole(module: Any) -> dict[int, Tensor]:
    """Waves of streams of several lengths, each decoded in one piece by the module itself."""
    with torch.no_grad():
        return {frames: module(codes_of(frames)[None])[0, 0] for frames in (1, 2, 40, 75, 310)}


@pytest.fixture(params=[(1000, TILE), (13, TILE), (1000, 700)], ids=["whole", "in portions", "in tiles"])
def vocoder(module: Any, whole: dict[int, Tensor], request: pytest.FixtureRequest) -> StreamingVocoder:
    max_frames, tile = request.param
    return StreamingVocoder(module, max_frames, tile)


def codes_of(frames: int) -> Tensor:
    return torch.randint(0, CODEBOOK, (GROUPS, frames), generator=torch.Generator().manual_seed(frames))


def streamed(vocoder: StreamingVocoder, codes: Tensor, sizes: Sequence[int]) -> Tensor:
    """The wave of codes fed in chunks of `sizes`, over and over."""
    state, pieces, done = StreamState(), [], 0
    while done < codes.shape[1]:
        for size in sizes:
            chunk = codes[:, done : done + size]
            done += chunk.shape[1]
            if chunk.shape[1]:
                with torch.no_grad():
                    made, (state,) = vocoder.advance([chunk], [state])
                pieces += made
    return torch.cat(pieces)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1,), (2,), (7,), (25,), (300,), (1, 2, 4, 8, 16)], ids=str)
def test_chunks_of_any_size_join_without_a_seam(
    vocoder: StreamingVocoder, whole: dict[int, Tensor], sizes: tuple[int, ...]
) -> None:
    for frames, expected in whole.items():
        wave = streamed(vocoder, codes_of(frames), sizes)
        assert len(wave) == max(0, frames * SAMPLES_PER_FRAME - LOST_SAMPLES)
        np.testing.assert_allclose(wave, expected, rtol=0, atol=TOLERANCE)
        assert float(wave.abs().max()) > 0.01


def test_streams_at_different_positions_share_a_step(vocoder: StreamingVocoder, whole: dict[int, Tensor]) -> None:
    chunks = {310: 60, 75: 9, 40: 3, 2: 1, 1: 1}
    states = {frames: StreamState() for frames in chunks}
    waves: dict[int, list[Tensor]] = {frames: [] for frames in chunks}
    while True:
        busy = [frames for frames in chunks if states[frames].frames < frames]
        if not busy:
            break
        parts = [codes_of(frames)[:, states[frames].frames :][:, : chunks[frames]] for frames in busy]
        with torch.no_grad():
            made, nexts = vocoder.advance(parts, [states[frames] for frames in busy])
        for frames, wave, state in zip(busy, made, nexts, strict=True):
            waves[frames].append(wave)
            states[frames] = state
    for frames, expected in whole.items():
        np.testing.assert_allclose(torch.cat(waves[frames]), expected, rtol=0, atol=TOLERANCE)


def test_a_step_leaves_the_old_state_as_it_was(vocoder: StreamingVocoder) -> None:
    codes = codes_of(40)
    with torch.no_grad():
        _, (state,) = vocoder.advance([codes[:, :20]], [StreamState()])
        (first,), _ = vocoder.advance([codes[:, 20:]], [state])
        (again,), _ = vocoder.advance([codes[:, 20:]], [state])
    assert state.frames == 20
    torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_a_stream_carries_no_more_than_its_windows(vocoder: StreamingVocoder) -> None:
    def carried(frames: int) -> int:
        with torch.no_grad():
            _, (state,) = vocoder.advance([codes_of(frames)], [StreamState()])
        windows = [part for pair in state.windows.values() for part in pair]
        return sum(part.untyped_storage().nbytes() for part in (*windows, *state.inputs.values()))

    assert carried(310) == carried(75)

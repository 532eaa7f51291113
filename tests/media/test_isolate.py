"""Decoding in processes: equal results, and a decoder that dies, hangs or grows costs its own request only."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time

import numpy as np
import psutil
import pytest
import soundfile
from PIL import Image

from omnistage.config.model import LimitsConfig, MediaConfig
from omnistage.errors import ErrorCode, OmniError
from omnistage.media.isolate import ChildDecoder
from omnistage.media.jobs import DecodeJob, decode

LIMITS = LimitsConfig()


def png(side: int = 64) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 255, (side, side, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def wav(seconds: float = 0.5) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.sin(np.arange(int(16_000 * seconds)) / 9), 16_000, format="WAV")
    return buffer.getvalue()


def job(kind: str, **limits: int) -> DecodeJob:
    return DecodeJob(kind=kind, limits=LimitsConfig(**limits), param="file")  # type: ignore[arg-type]


async def test_child_gives_what_decoding_in_place_gives() -> None:
    decoder = ChildDecoder(MediaConfig(decode_processes=1))
    try:
        for kind, data in (("image", png()), ("audio", wav())):
            apart, here = await decoder.decode(job(kind), data), decode(job(kind), data)
            assert apart.meta == here.meta
            assert [(n, t.array.tobytes()) for n, t in apart.tensors.items()] == [
                (n, t.array.tobytes()) for n, t in here.tensors.items()
            ]
        with pytest.raises(OmniError) as refused:
            await decoder.decode(job("image", max_image_pixels=10), png())
        assert (refused.value.info.code, refused.value.info.param) == (ErrorCode.TOO_LARGE, "file")
    finally:
        decoder.close()


@pytest.mark.slow
async def test_killed_or_stopped_child_costs_one_request_and_is_replaced() -> None:
    decoder = ChildDecoder(MediaConfig(decode_processes=1, decode_timeout_s=1.5))
    try:
        await decoder.decode(job("image"), png())
        (first,) = decoder.pids
        os.kill(first, signal.SIGSTOP)  # a decoder that hangs
        started = time.monotonic()
        with pytest.raises(OmniError, match="limits of time and memory"):
            await decoder.decode(job("image"), png())
        assert time.monotonic() - started < 3
        assert await decoder.decode(job("image"), png())
        (second,) = decoder.pids
        assert second != first
        os.kill(second, signal.SIGKILL)
        await asyncio.sleep(0.1)
        assert await decoder.decode(job("image"), png())
        assert not psutil.pid_exists(first)
    finally:
        decoder.close()


@pytest.mark.slow
async def test_memory_beyond_the_bound_is_an_error_of_the_request() -> None:
    decoder = ChildDecoder(MediaConfig(decode_processes=1, decode_memory_mb=48))
    try:
        with pytest.raises(OmniError) as refused:
            await decoder.decode(job("image", max_image_pixels=1 << 26), png(4000))  # 48 MB of pixels, held twice
        assert refused.value.info.code == ErrorCode.UNSUPPORTED_MEDIA
        assert (await decoder.decode(job("image"), png()))["image"].shape == (64, 64, 3)
    finally:
        decoder.close()


async def test_client_that_leaves_ends_its_decode() -> None:
    decoder = ChildDecoder(MediaConfig(decode_processes=1))
    try:
        await decoder.decode(job("image"), png())
        (pid,) = decoder.pids
        os.kill(pid, signal.SIGSTOP)
        task = asyncio.create_task(decoder.decode(job("image"), png()))
        await asyncio.sleep(0.1)
        task.cancel()
        assert (await decoder.decode(job("image"), png()))["image"].shape == (64, 64, 3)
        assert decoder.pids != [pid]
    finally:
        decoder.close()

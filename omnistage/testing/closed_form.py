"""The arithmetic of echo3: text -> tokens -> codes -> samples, each step known in closed form and reversible."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EOS = 256
CODES_PER_TOKEN = 3
CODEBOOK = 1024
SAMPLES_PER_CODE = 64
TAIL_SAMPLES = 16
SAMPLE_RATE = 24_000

Samples = npt.NDArray[np.float32]


def tokens_of(text: str) -> list[int]:
    """A token per UTF-8 byte."""
    return list(text.encode())


def codes_of_token(token: int) -> list[int]:
    """`CODES_PER_TOKEN` codes that identify a token: its value and two check codes."""
    return [token, 256 + (token * 7 + 3) % 256, 512 + (token * 31 + 11) % 256]


def codes_of(text: str) -> list[int]:
    return [code for token in tokens_of(text) for code in codes_of_token(token)]


def tone(code: int) -> Samples:
    """The `SAMPLES_PER_CODE + TAIL_SAMPLES` samples that one code adds to the wave, from its own position on.

    Level = (code + 1) / 2048 in the body; the tail falls linearly to zero and overlaps the next code's body.
    """
    level = (code + 1) / (2 * CODEBOOK)
    body = np.full(SAMPLES_PER_CODE, level, np.float32)
    tail = np.float32(level) * np.linspace(0.5, 0.0, TAIL_SAMPLES, dtype=np.float32)
    return np.concatenate([body, tail])


def wave_of_codes(codes: list[int]) -> Samples:
    """The whole wave: tones overlapped and added, tail included; empty for no codes."""
    if not codes:
        return np.zeros(0, np.float32)
    wave = np.zeros(len(codes) * SAMPLES_PER_CODE + TAIL_SAMPLES, np.float32)
    for index, code in enumerate(codes):
        start = index * SAMPLES_PER_CODE
        wave[start : start + SAMPLES_PER_CODE + TAIL_SAMPLES] += tone(code)
    return wave


def wave_of(text: str) -> Samples:
    """The wave that echo3 speaks for a text."""
    return wave_of_codes(codes_of(text))


def text_of_wave(wave: Samples) -> str:
    """Decodes a wave back to its text. Raises ValueError when a tone or a check code is wrong."""
    if len(wave) == 0:
        return ""
    count, rest = divmod(len(wave) - TAIL_SAMPLES, SAMPLES_PER_CODE)
    if rest or count % CODES_PER_TOKEN:
        raise ValueError(f"{len(wave)} samples are no whole number of tokens")
    levels = wave[SAMPLES_PER_CODE - 1 :: SAMPLES_PER_CODE][:count]  # the tail of the previous code is over by then
    codes = [round(float(level) * 2 * CODEBOOK) - 1 for level in levels]
    tokens = codes[::CODES_PER_TOKEN]
    if codes != [code for token in tokens for code in codes_of_token(token)]:
        raise ValueError("the wave's check codes do not fit its tokens")
    return bytes(tokens).decode(errors="replace")

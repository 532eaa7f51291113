"""Log-probabilities as plain data for answers: tokens with their text and bytes. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from omnistage.stages.ar.detokenizer import REPLACEMENT, Decoder
from omnistage.stages.ar.model import Sampled


class Vocabulary(Decoder, Protocol):
    """The part of `tokenizers.Tokenizer` that is needed here."""

    def id_to_token(self, id: int) -> str | None: ...


def describe(tokenizer: Vocabulary, sampled: Sampled) -> dict[str, Any]:
    """`{"token", "token_id", "logprob", "bytes", "top_logprobs": [same without top]}`; `bytes` None when unknown."""
    top = [_entry(tokenizer, token, logprob) for token, logprob in sampled.top]
    return {**_entry(tokenizer, sampled.token, sampled.logprob), "top_logprobs": top}


def describe_prompt(tokenizer: Vocabulary, tokens: Sequence[Sampled]) -> list[dict[str, Any] | None]:
    """One entry per prompt token; the first has no distribution before it: None."""
    return [None, *[describe(tokenizer, sampled) for sampled in tokens]]


def _entry(tokenizer: Vocabulary, token: int, logprob: float | None) -> dict[str, Any]:
    text = tokenizer.decode([token], skip_special_tokens=False)
    return {"token": text, "token_id": token, "logprob": logprob, "bytes": _bytes(tokenizer, token, text)}


def _bytes(tokenizer: Vocabulary, token: int, text: str) -> list[int] | None:
    """The bytes of a token; for a part of a character, by the byte-level alphabet or the byte-fallback form
    `<0xE2>`."""
    if REPLACEMENT not in text:
        return list(text.encode())
    piece = tokenizer.id_to_token(token) or ""
    if len(piece) == 6 and piece.startswith("<0x"):
        return [int(piece[3:5], 16)]
    alphabet = _byte_alphabet()
    return [alphabet[char] for char in piece] if piece and all(char in alphabet for char in piece) else None


def _byte_alphabet() -> dict[str, int]:
    """The printable characters by which byte-level BPE (GPT-2) writes the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}

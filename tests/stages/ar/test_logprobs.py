from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from omnistage.stages.ar.logprobs import describe, describe_prompt
from omnistage.stages.ar.model import Sampled
from tests.stages.ar.conftest import token_id


def test_a_token_is_described_with_text_bytes_and_alternatives(tokenizer: Tokenizer) -> None:
    token, other = tokenizer.encode("é").ids[0], tokenizer.encode("a").ids[0]
    told = describe(tokenizer, Sampled(other, -0.5, ((other, -0.5), (token, -1.5))))
    assert (told["token"], told["token_id"], told["logprob"], told["bytes"]) == ("a", other, -0.5, [97])
    assert [entry["token_id"] for entry in told["top_logprobs"]] == [other, token]
    assert "top_logprobs" not in told["top_logprobs"][0]


def test_a_part_of_a_character_has_its_bytes(tokenizer: Tokenizer) -> None:
    parts = [token_id(tokenizer, piece) for piece in "ðŁİī"]
    told = [describe(tokenizer, Sampled(part, -1.0))["bytes"] for part in parts]
    assert bytes(byte for piece in told for byte in piece).decode() == "🎉"


def test_special_tokens_have_their_text(tokenizer: Tokenizer) -> None:
    assert describe(tokenizer, Sampled(token_id(tokenizer, "<|im_end|>"), 0.0))["token"] == "<|im_end|>"


class Strange:
    """A vocabulary of byte-fallback and unknown pieces."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "\N{REPLACEMENT CHARACTER}"

    def id_to_token(self, id: int) -> str | None:
        return {0: "<0xE2>", 1: "\u2581☃"}.get(id)


def test_byte_fallback_pieces_have_bytes_and_unknown_ones_none() -> None:
    assert [describe(Strange(), Sampled(token, 0.0))["bytes"] for token in range(3)] == [[0xE2], None, None]


def test_the_first_prompt_token_has_no_entry(tokenizer: Tokenizer) -> None:
    told = describe_prompt(tokenizer, [Sampled(5, -1.0)])
    assert told[0] is None
    assert told[1] is not None
    assert told[1]["token_id"] == 5

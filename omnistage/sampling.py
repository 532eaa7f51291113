"""Sampling parameters of an autoregressive stage."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from omnistage.errors import RequestError

Probability = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]

MAX_TOKENS_LIMIT = 1 << 20
TOP_LOGPROBS_LIMIT = 20


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What shape a text must have; exactly one of the first five is given.

    `json` is a JSON schema (an object, or its text), `json_object` any JSON object, `regex` an expression of the regex
    crate that the whole text matches, `choice` a list of texts, `grammar` a grammar in Lark or GBNF/EBNF notation.
    A schema with keywords that cannot be enforced is refused if `strict`, else they are left to the model.
    `disable_any_whitespace` has JSON written without blanks. Errors name `param`.
    """

    json: dict[str, Any] | str | None = None
    json_object: bool = False
    regex: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    choice: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] | None = None
    grammar: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    strict: bool = True
    disable_any_whitespace: bool = False
    param: str = "structured_outputs"


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How one stage picks tokens for one request. Temperature 0 is greedy, the stage's helpers included.

    `max_tokens` None means up to the model's context length; `stop` strings end the text before them and are not
    returned; `logit_bias` maps token ids (as strings, as OpenAI writes them) to values in -100..100.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    min_p: Probability = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=10.0)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS_LIMIT)] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS_LIMIT)] = 0
    stop: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=256)], ...] = ()
    stop_token_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]] = {}
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=TOP_LOGPROBS_LIMIT)] = 0
    prompt_logprobs: bool = False
    structured_outputs: StructuredOutputs | None = None


def sampling_params(stage: str, *layers: dict[str, Any]) -> SamplingParams:
    """Merges layers (later ones win) into validated parameters. Raises RequestError naming `sampling.<stage>`."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= layer
    try:
        return msgspec.convert(merged, SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling for stage {stage}: {error}", param=f"sampling.{stage}") from None

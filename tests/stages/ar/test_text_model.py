from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from omnistage.config.model import LimitsConfig, OmniConfig, StageContext, StageSpec
from omnistage.errors import ConfigError, RequestError
from omnistage.payload import MultimodalPayload
from omnistage.sampling import SamplingParams
from omnistage.stages.ar.engine import AREngine
from omnistage.stages.ar.text_model import CausalTextModel, backend_of
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.stages.base import InputChunk, StageRequest
from tests.stages.ar.fakes import stage_config

PROMPT = [40, 50, 60, 70, 80]


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> CausalTextModel:
    return CausalTextModel(tiny_llama, stage_config(dtype="float32"))


@pytest.fixture
def engine(model: CausalTextModel) -> AREngine[Any]:
    config = stage_config(token_budget=64, block_size=4)
    return AREngine(TorchBackend(model, config, blocks=400), config)


def ask(params: dict[str, Any] | None = None, *, inputs: tuple[str, ...] = (), **sampling: Any) -> StageRequest:
    return StageRequest(
        request_id="r",
        inputs=inputs,
        outputs=("text",),
        params={"token_ids": PROMPT} if params is None else params,
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **sampling}),
    )


def metas(engine: AREngine[Any]) -> list[dict[str, Any]]:
    out = []
    while engine.has_work():
        out += [emission.payload.meta for emission in engine.step().emissions]
    engine.check_integrity()
    return out


def answer(engine: AREngine[Any], request: StageRequest) -> tuple[str, list[int], dict[str, Any]]:
    """Whole text, all token ids, meta of the final chunk."""
    engine.add(request)
    got = metas(engine)
    return "".join(meta["text"] for meta in got), [t for meta in got for t in meta["token_ids"]], got[-1]


def test_text_is_the_decoding_of_the_tokens_and_the_last_chunk_tells_the_rest(
    engine: AREngine[Any], tokenizer: Tokenizer
) -> None:
    text, tokens, last = answer(engine, ask())
    assert len(tokens) == 20
    assert text == tokenizer.decode(tokens)
    assert last["finish_reason"] == "length"
    assert last["usage"] == {"prompt_tokens": 5, "completion_tokens": 20, "cached_tokens": 0}


def test_every_chunk_but_the_last_has_text(engine: AREngine[Any]) -> None:
    engine.add(ask())
    got = metas(engine)
    assert all(meta["text"] for meta in got[:-1])
    assert not any("finish_reason" in meta for meta in got[:-1])


def test_a_second_request_reports_its_cached_tokens(engine: AREngine[Any]) -> None:
    first = answer(engine, ask())
    second = answer(engine, ask())
    assert second[:2] == first[:2]
    assert second[2]["usage"]["cached_tokens"] == 4


def test_a_salt_keeps_caches_apart(engine: AREngine[Any]) -> None:
    answer(engine, ask({"token_ids": PROMPT, "cache_salt": "one"}))
    last = answer(engine, ask({"token_ids": PROMPT, "cache_salt": "two"}))[2]
    assert last["usage"]["cached_tokens"] == 0


@pytest.mark.parametrize("start", [0, 2, 5])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_text_ends_before_a_stop_string_wherever_tokens_are_cut(engine: AREngine[Any], start: int, length: int) -> None:
    whole, tokens, _ = answer(engine, ask())
    stop = whole[start : start + length]
    text, used, last = answer(engine, ask(stop=(stop,)))
    assert text == whole[: whole.index(stop)]
    assert last["finish_reason"] == "stop"
    assert used == tokens[: len(used)]
    assert last["usage"]["completion_tokens"] == len(used)
    assert len(used) < 20


def test_text_that_only_began_like_a_stop_string_comes_at_the_end(engine: AREngine[Any]) -> None:
    whole, _, _ = answer(engine, ask())
    text, _, last = answer(engine, ask(stop=(whole[-3:] + "never",)))
    assert text == whole
    assert last["finish_reason"] == "length"


def test_stop_strings_do_not_count_before_min_tokens(engine: AREngine[Any], tokenizer: Tokenizer) -> None:
    whole, tokens, _ = answer(engine, ask())
    first = tokenizer.decode(tokens[:1])[0]
    text, used, _ = answer(engine, ask(stop=(first,), min_tokens=6))
    assert len(used) >= 7
    assert text.startswith(whole[: len(tokenizer.decode(tokens[:5]))])


def test_a_stop_token_is_counted_and_not_spoken(engine: AREngine[Any], tokenizer: Tokenizer) -> None:
    _, tokens, _ = answer(engine, ask())
    index = tokens.index(tokens[4])
    text, used, last = answer(engine, ask(stop_token_ids=(tokens[4],)))
    assert used == tokens[: index + 1]
    assert text == tokenizer.decode(tokens[:index])
    assert last["finish_reason"] == "stop"


def test_one_logprob_entry_per_token_equals_the_library(engine: AREngine[Any], tiny_llama: Path) -> None:
    engine.add(ask(logprobs=True, top_logprobs=2, max_tokens=6))
    got = metas(engine)
    entries = [entry for meta in got for entry in meta["logprobs"]]
    tokens = [token for meta in got for token in meta["token_ids"]]
    library = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad():
        want = torch.log_softmax(library(torch.tensor([PROMPT + tokens])).logits[0], -1)[len(PROMPT) - 1 : -1]
    assert [entry["token_id"] for entry in entries] == tokens
    assert [entry["logprob"] for entry in entries] == pytest.approx(want.max(-1).values.tolist(), abs=1e-4)
    assert [entry["top_logprobs"][1]["token_id"] for entry in entries] == want.topk(2).indices[:, 1].tolist()


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("budget", [2, 64])
def test_prompt_logprobs_equal_the_library(
    model: CausalTextModel, tiny_llama: Path, max_tokens: int, budget: int
) -> None:
    config = stage_config(token_budget=budget, block_size=4)
    engine = AREngine(TorchBackend(model, config), config)
    answer(engine, ask())
    engine.add(ask(prompt_logprobs=True, max_tokens=max_tokens))
    told = [meta["prompt_logprobs"] for meta in metas(engine) if "prompt_logprobs" in meta]
    library = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad():
        table = torch.log_softmax(library(torch.tensor([PROMPT])).logits[0], -1)
    want = [float(table[index, token]) for index, token in enumerate(PROMPT[1:])]
    assert len(told) == 1
    assert told[0][0] is None
    assert [entry["logprob"] for entry in told[0][1:]] == pytest.approx(want, abs=1e-4)


def prompt_of(model: CausalTextModel, request: StageRequest) -> list[int]:
    prompt = model.prompt(model.open(request))
    assert prompt is not None
    return prompt.token_ids


def test_prompts_go_through_the_chat_template_and_raw_prompts_do_not(
    model: CausalTextModel, tokenizer: Tokenizer
) -> None:
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert tokenizer.decode(prompt_of(model, ask({"prompt": "hi"})), skip_special_tokens=False) == rendered
    assert prompt_of(model, ask({"messages": messages})) == prompt_of(model, ask({"prompt": "hi"}))
    assert prompt_of(model, ask({"raw_prompt": "hi"})) == tokenizer.encode("hi").ids
    assert prompt_of(model, ask({"token_ids": [4, 5]})) == [4, 5]


def test_spoken_messages_wait_for_their_transcript(model: CausalTextModel, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": [{"type": "audio", "media": "a"}, {"type": "audio", "media": "b"}]}]
    state = model.open(ask({"messages": messages}, inputs=("transcript",)))
    assert model.prompt(state) is None
    for seq, words in enumerate(["one", "two"]):
        payload = MultimodalPayload(meta={"texts": [words]})
        model.feed(state, InputChunk(request_id="r", port="transcript", seq=seq, final=seq == 1, payload=payload))
        with pytest.raises(RuntimeError):
            payload.release()
    prompt = model.prompt(state)
    assert prompt is not None
    assert "user\none\ntwo<" in tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("params", "param", "words"),
    [
        ({}, "prompt", "takes one of"),
        ({"prompt": "a", "raw_prompt": "b"}, "prompt", "takes one of"),
        ({"prompt": "a", "colour": 1}, "colour", "does not know"),
        ({"prompt": 3}, "prompt", "must be a string"),
        ({"raw_prompt": ""}, "raw_prompt", "no tokens"),
        ({"token_ids": "abc"}, "token_ids", "list of integers"),
        ({"token_ids": [1, True]}, "token_ids", "list of integers"),
        ({"token_ids": [5000]}, "token_ids", "5000 is not a token id"),
        ({"messages": []}, "messages", "non-empty"),
        ({"token_ids": [5] * 600}, "token_ids", "token_ids has 600 tokens .* thinker is 512 tokens"),
    ],
)
def test_bad_parameters_are_refused_by_name(
    engine: AREngine[Any], params: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        engine.add(ask(params))
    assert caught.value.info.param == param
    assert engine.request_ids() == frozenset()


def test_a_chunk_for_another_port_is_refused(model: CausalTextModel) -> None:
    state = model.open(ask({"prompt": "a"}, inputs=("transcript",)))
    with pytest.raises(RequestError, match="image"):
        model.feed(state, InputChunk(request_id="r", port="image", seq=0, final=True, payload=MultimodalPayload()))


def changed(source: Path, target: Path, file: str, **values: Any) -> Path:
    """A copy of a checkpoint with other values in one of its JSON files (None removes a key)."""
    shutil.copytree(source, target)
    content = json.loads((target / file).read_text()) | values
    (target / file).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return target


def test_a_model_without_chat_template_takes_a_prompt_as_it_is(
    tiny_llama: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = changed(tiny_llama, tmp_path / "bare", "tokenizer_config.json", chat_template=None)
    bare = CausalTextModel(folder, stage_config(dtype="float32"))
    assert prompt_of(bare, ask({"prompt": "hi"})) == tokenizer.encode("hi").ids
    with pytest.raises(RequestError, match="no chat template"):
        prompt_of(bare, ask({"messages": [{"role": "user", "content": "hi"}]}))


def test_end_tokens_come_from_the_generation_config_first(tiny_llama: Path, tmp_path: Path) -> None:
    folder = changed(tiny_llama, tmp_path / "ends", "generation_config.json", eos_token_id=[7, 9])
    assert CausalTextModel(folder, stage_config(dtype="float32")).shape.eos_token_ids == {7, 9}


def test_rotary_embeddings_that_depend_on_batch_mates_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    folder = changed(tiny_llama, tmp_path / "rope", "config.json", rope_parameters=rope)
    with pytest.raises(ConfigError, match="'dynamic' depend on batch mates"):
        CausalTextModel(folder, stage_config(dtype="float32"))


def test_the_runner_around_a_text_model_serves_it(tiny_llama: Path) -> None:
    stage = stage_config(dtype="float32", kv_memory_mb=1)
    config = OmniConfig(
        model="tiny", model_path="", pipeline="text", variant="default", stages={}, edges={}, limits=LimitsConfig()
    )
    spec = StageSpec(name="thinker", kind="ar", component="")
    context = StageContext(config=config, stage=stage, spec=spec, model_path=str(tiny_llama))
    backend = backend_of(CausalTextModel(tiny_llama, stage), context)
    assert answer(AREngine(backend, stage), ask({"prompt": "hello"}))[2]["finish_reason"] in ("length", "stop")

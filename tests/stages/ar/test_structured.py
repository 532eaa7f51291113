"""Texts of a demanded shape, from a tiny random model: whatever it wants to write, what it writes is valid."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from omnistage.config.model import TextMarkup
from omnistage.errors import RequestError
from omnistage.sampling import SamplingParams, sampling_params
from omnistage.stages.ar.engine import AREngine
from omnistage.stages.ar.grammar import check_grammar, request_grammar
from omnistage.stages.ar.matchers import Matchers
from omnistage.stages.ar.sections import TOOL_FORMATS
from omnistage.stages.ar.text_model import CausalTextModel
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.stages.base import StageRequest
from omnistage.tools import ToolUse, tool_use
from tests.stages.ar.fakes import stage_config

EOS = 2
NAME = {"type": "string", "maxLength": 8}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"const": {"a": [1, "x"]}},
    {"enum": ["red", "green", 3, None]},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "string", "maxLength": 5},
    {"type": "string", "pattern": "^[a-c]{2,6}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, NAME], "items": False, "minItems": 2},
    {"type": "object", "properties": {"name": NAME}, "required": ["name"], "additionalProperties": False},
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": NAME, "c": {"enum": [1, 2]}},
        "required": ["a", "c"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"x": {"type": "object", "properties": {"y": {"type": "null"}}, "required": ["y"]}},
        "required": ["x"],
        "maxProperties": 1,
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    {"$ref": "#/$defs/pair", "$defs": {"pair": {"type": "array", "items": {"$ref": "#/$defs/bit"}, "maxItems": 2},
                                       "bit": {"enum": [0, 1]}}},
    {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 0},
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> CausalTextModel:
    """The tiny model with a context that holds a prompt with tools."""
    folder = tmp_path_factory.mktemp("long") / "llama"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    markup = TextMarkup(tool_format="hermes", reasoning=("<think>", "</think>"))
    return CausalTextModel(folder, stage_config(dtype="float32"), markup=markup)


@pytest.fixture
def engine(model: CausalTextModel) -> AREngine[Any]:
    return make_engine(model)


def make_engine(model: CausalTextModel, **overrides: Any) -> AREngine[Any]:
    blocks = overrides.pop("blocks", 2000)
    config = stage_config(**{"token_budget": 64, "block_size": 4, "max_num_seqs": 32, **overrides})
    backend = TorchBackend(model, config, blocks=blocks, tokenizer=model.tokenizer, markup=model.markup)
    return AREngine(backend, config)


def ask(request_id: str, *, tools: ToolUse | None = None, seed: int = 0, **sampling: Any) -> StageRequest:
    """Closing characters are made likely, so that random texts end."""
    ends = {str(token): 6.0 for token in (4, 95, 63, 14)} | {str(EOS): 20.0}
    fields: dict[str, Any] = {"temperature": 1.0, "max_tokens": 400, "logit_bias": ends, **sampling}
    if "structured_outputs" in fields:
        fields["structured_outputs"] = {"disable_any_whitespace": True, **fields["structured_outputs"]}
    prompt = [40, 50, 60, 70, 80, ord(request_id[-1]) % 90 + 5]
    messages = {"messages": [{"role": "user", "content": f"the {request_id}"}]}
    return StageRequest(
        request_id=request_id,
        outputs=("text",),
        params={"token_ids": prompt} if tools is None else messages,
        sampling=sampling_params("thinker", fields),
        seed=seed,
        tools=tools,
    )


class Answers:
    """What came out, per request."""

    def __init__(self, engine: AREngine[Any], requests: list[StageRequest]) -> None:
        self.metas: dict[str, list[dict[str, Any]]] = {request.request_id: [] for request in requests}
        for request in requests:
            engine.add(request)
        while engine.has_work():
            for emission in engine.step().emissions:
                self.metas[emission.request_id].append(emission.payload.meta)
        engine.check_integrity()

    def text(self, name: str) -> str:
        return "".join(meta["text"] for meta in self.metas[name])

    def tokens(self, name: str) -> list[int]:
        return [token for meta in self.metas[name] for token in meta["token_ids"]]

    def finish(self, name: str) -> str:
        return str(self.metas[name][-1]["finish_reason"])

    def calls(self, name: str) -> list[dict[str, str]]:
        made: list[dict[str, str]] = []
        for news in (news for meta in self.metas[name] for news in meta.get("tool_calls", [])):
            if news["index"] == len(made):
                made.append({"name": news["name"], "arguments": ""})
            made[-1]["arguments"] += news.get("arguments", "")
        return made


@pytest.mark.slow
def test_texts_of_twenty_schemas_in_one_batch_are_valid(engine: AREngine[Any]) -> None:
    requests = [ask(f"r{at}", seed=at, structured_outputs={"json": schema}) for at, schema in enumerate(SCHEMAS)]
    answers = Answers(engine, requests)
    for at, schema in enumerate(SCHEMAS):
        assert answers.finish(f"r{at}") == "stop", answers.text(f"r{at}")
        jsonschema.validate(json.loads(answers.text(f"r{at}")), schema)


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(ab|c){2,5}[0-9]"}, "(ab|c){2,5}[0-9]"),
    ({"choice": ["yes", "no, never", 'a "quoted" one']}, 'yes|no, never|a "quoted" one'),
    ({"grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]{1,3}/'}, "a[0-9]{1,3}"),
    ({"grammar": 'root ::= "x" ("y" | "z")\n'}, "x[yz]"),
    ({"json_object": True}, r"(?s)\{.*\}"),
]


@pytest.mark.parametrize(("shape", "pattern"), OTHERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_regex_choice_and_grammar_hold_the_whole_text(
    engine: AREngine[Any], shape: dict[str, Any], pattern: str, temperature: float
) -> None:
    bias = {str(EOS): 50.0, "95": 30.0}
    answers = Answers(engine, [ask("a", structured_outputs=shape, temperature=temperature, logit_bias=bias)])
    assert answers.finish("a") == "stop"
    assert re.fullmatch(pattern, answers.text("a")), answers.text("a")


@pytest.mark.slow
def test_batch_mates_of_a_ruled_request_write_what_they_write_alone(model: CausalTextModel) -> None:
    def free(name: str) -> StageRequest:
        return ask(name, seed=7, max_tokens=24, logit_bias={}, logprobs=True)

    def mates(**sampling: Any) -> Answers:
        return Answers(make_engine(model), [free("x"), ask("r", **sampling), free("y")])

    ruled = mates(structured_outputs={"regex": "[a-z]{60}"}, max_tokens=40)
    unruled = mates(max_tokens=40, ignore_eos=True, logit_bias={})
    for name in "xy":
        assert ruled.metas[name] == unruled.metas[name]
        assert ruled.tokens(name) == Answers(make_engine(model), [free(name)]).tokens(name)


@pytest.mark.slow
def test_preempted_and_repeated_steps_change_no_ruled_text(model: CausalTextModel) -> None:
    shape = {"json": {"type": "array", "items": NAME, "minItems": 6, "maxItems": 6}}
    requests = [ask(f"r{at}", seed=at, structured_outputs=shape, max_tokens=120) for at in range(4)]
    alone = {each.request_id: Answers(make_engine(model), [each]).tokens(each.request_id) for each in requests}
    narrow = make_engine(model, blocks=40, max_num_seqs=4)
    answers = Answers(narrow, requests)
    assert narrow.counters()["preemptions"] > 0
    assert {name: answers.tokens(name) for name in alone} == alone
    for request in requests:
        jsonschema.validate(json.loads(answers.text(request.request_id)), shape["json"])


def test_end_token_comes_only_where_the_grammar_allows_it_and_then_at_once(engine: AREngine[Any]) -> None:
    shape = {"regex": "[a-z]{3}"}
    eager = ask("a", structured_outputs=shape, logit_bias={str(EOS): 100.0}, temperature=0.0)
    answers = Answers(engine, [eager])
    assert re.fullmatch("[a-z]{3}", answers.text("a"))
    assert answers.tokens("a")[-1] == EOS


def test_min_tokens_gives_way_where_the_grammar_is_at_its_end(engine: AREngine[Any]) -> None:
    long = ask("a", structured_outputs={"regex": "a{2,60}"}, min_tokens=12, logit_bias={str(EOS): 100.0})
    short = ask("b", structured_outputs={"choice": ["x"]}, min_tokens=12)
    answers = Answers(engine, [long, short])
    assert 12 <= len(answers.text("a")) < 60
    assert (answers.text("b"), answers.finish("b")) == ("x", "stop")


def test_logprobs_of_ruled_tokens_are_those_of_the_unruled_distribution(engine: AREngine[Any]) -> None:
    answers = Answers(engine, [ask("a", structured_outputs={"choice": ["zzz"]}, logprobs=True, top_logprobs=2)])
    told = [entry for meta in answers.metas["a"] for entry in meta["logprobs"]]
    assert all(entry["logprob"] < entry["top_logprobs"][0]["logprob"] < 0 for entry in told[:-1])


def test_stop_strings_end_a_ruled_text_early(engine: AREngine[Any]) -> None:
    answers = Answers(engine, [ask("a", structured_outputs={"choice": ["one two three"]}, stop=["two"])])
    assert (answers.text("a"), answers.finish("a")) == ("one ", "stop")


def test_repeated_prompt_from_the_cache_gives_the_same_ruled_text(engine: AREngine[Any]) -> None:
    request = ask("a", structured_outputs={"json": SCHEMAS[13]}, seed=5)
    first = Answers(engine, [request]).tokens("a")
    assert Answers(engine, [request]).tokens("a") == first


BAD: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "objekt"}}, "objekt"),
    ({"json": "{"}, "not JSON"),
    ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable"),
    ({"json": {"uniqueItems": True}}, "uniqueItems"),
    ({"json": {"$ref": "http://example.org/x"}}, "example.org"),
    ({"regex": "a("}, "unclosed group"),
    ({"regex": "(a{1,1000}){1,1000}" * 2000}, "more than"),
    ({"grammar": "start: foo"}, "foo"),
    ({"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "a"'}, "too deeply"),
    ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply"),
    ({"choice": [""]}, "not empty"),
    ({"choice": ["a"], "regex": "a"}, "exactly one"),
    ({}, "exactly one"),
]


@pytest.mark.parametrize(("shape", "words"), BAD)
def test_bad_shapes_are_refused_by_name(engine: AREngine[Any], shape: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        engine.add(ask("a", structured_outputs=shape))
    assert caught.value.info.param == "structured_outputs"
    assert not engine.request_ids()


def test_chains_of_references_that_would_overflow_the_stack_are_refused(engine: AREngine[Any]) -> None:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)}
    with pytest.raises(RequestError, match="too deeply"):
        engine.add(ask("a", structured_outputs={"json": {"$ref": "#/$defs/a0", "$defs": links}}))


def test_keywords_that_cannot_be_enforced_are_left_to_the_model_when_not_strict(engine: AREngine[Any]) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 2}
    answers = Answers(engine, [ask("a", structured_outputs={"json": schema, "strict": False})])
    assert isinstance(json.loads(answers.text("a")), list)


WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Rome </tool_call>"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
PARAMETERS = {"weather": WEATHER, "now": {"type": "object"}}


def check_calls(calls: list[dict[str, str]]) -> None:
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), PARAMETERS[call["name"]])


@pytest.mark.parametrize("seed", range(4))
def test_required_calls_are_valid_calls_and_nothing_else(engine: AREngine[Any], seed: int) -> None:
    tools = tool_use(TOOLS, "required", parallel=True)
    answers = Answers(engine, [ask("a", tools=tools, seed=seed, max_tokens=480)])
    assert answers.text("a") == ""
    assert answers.calls("a")
    if answers.finish("a") == "stop":
        check_calls(answers.calls("a"))


def test_named_function_is_called_once(engine: AREngine[Any]) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answers = Answers(engine, [ask("a", tools=tool_use(TOOLS, choice, parallel=True), max_tokens=480)])
    assert [call["name"] for call in answers.calls("a")] == ["weather"]
    check_calls(answers.calls("a"))


def test_streamed_pieces_of_a_call_are_more_than_one(engine: AREngine[Any]) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answers = Answers(engine, [ask("a", tools=tool_use(TOOLS, choice, parallel=True), max_tokens=480)])
    assert sum("tool_calls" in meta for meta in answers.metas["a"]) > 3


def test_json_is_demanded_of_answers_that_are_no_calls(engine: AREngine[Any]) -> None:
    tools = tool_use(TOOLS, "auto", parallel=False)
    schema = SCHEMAS[13]
    asks = [ask(f"r{at}", tools=tools, seed=at, structured_outputs={"json": schema}) for at in range(4)]
    answers = Answers(engine, asks)
    for request in asks:
        name = request.request_id
        check_calls(answers.calls(name))
        if answers.text(name):
            jsonschema.validate(json.loads(answers.text(name)), schema)


def test_calls_of_strict_functions_are_valid_whenever_they_are_made(model: CausalTextModel) -> None:
    """The grammar of free text with calls: it takes prose and a right call, not a wrong one."""
    function = {"name": "weather", "parameters": WEATHER, "strict": True}
    strict = tool_use([{"type": "function", "function": function}], "auto", parallel=True)
    grammar = request_grammar(SamplingParams(), strict, TOOL_FORMATS["hermes"])
    assert grammar is not None
    head = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": '
    for text, valid in (
        (head + '{"city": "Paris", "days": 3}}\n</tool_call> So.', True),
        (head + '{"city": "X', False),
    ):
        ids = model.tokenizer.encode(text).ids
        matcher = Matchers(model.tokenizer, model.shape).open(grammar, "tools").matcher
        assert (matcher.validate_tokens(ids) == len(ids)) is valid


def test_a_hundred_functions_can_be_offered() -> None:
    many = [{"type": "function", "function": {"name": f"f{at}", "parameters": WEATHER}} for at in range(100)]
    grammar = request_grammar(SamplingParams(), tool_use(many, "required", parallel=True), TOOL_FORMATS["hermes"])
    assert grammar is not None
    check_grammar(grammar, "tools")


def test_complaint_about_a_schema_does_not_list_the_grammar_around_it() -> None:
    function = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": 12}}}}}
    grammar = request_grammar(SamplingParams(), tool_use([function], "required", parallel=True), TOOL_FORMATS["hermes"])
    assert grammar is not None
    with pytest.raises(RequestError, match=r"type must be a string or array of strings$"):
        check_grammar(grammar, "tools")

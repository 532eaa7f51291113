"""The model interface at its widest: rows from upstream, work after sampling, hand-off rows, KV, constraints."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from omnistage.ops.paged_attention import AttentionPlan
from omnistage.payload import MultimodalPayload
from omnistage.sampling import SamplingParams
from omnistage.stages.ar.engine import AREngine
from omnistage.stages.ar.model import Constraint, Emitted, Event, Produced, Prompt, Sequence, Work
from omnistage.stages.ar.text_model import CausalTextModel, TextState
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.stages.ar.torch_model import ForwardResult, ModelShape, SequenceMemory
from omnistage.stages.base import InputChunk, StageRequest
from tests.stages.ar.fakes import Collected, stage_config

HIDDEN, STEPS, PROMPT_ROWS = 48, 7, 5


@dataclass
class RowState:
    upstream: list[Tensor] = field(default_factory=list)
    own: dict[int, Tensor] = field(default_factory=dict)
    generated: int = 0


class Talker:
    """Its prompt is rows from upstream; the input after token g is a mix of the token, the hidden row that gave it and
    one more upstream row. The mix is made once per step for the whole batch."""

    def __init__(self, folder: Path) -> None:
        self._text = CausalTextModel(folder, stage_config(dtype="float32"))
        self.batches: list[int] = []

    @property
    def shape(self) -> ModelShape:
        return self._text.shape

    def open(self, request: StageRequest) -> RowState:
        return RowState()

    def feed(self, state: RowState, chunk: InputChunk) -> None:
        state.upstream += torch.tensor(chunk.payload["rows"])
        chunk.payload.release()

    def prompt(self, state: RowState) -> Prompt | None:
        return Prompt(token_ids=[0] * PROMPT_ROWS, cacheable=False) if state.upstream else None

    def can_step(self, state: RowState) -> bool:
        return len(state.upstream) >= PROMPT_ROWS + state.generated

    def constraint(self, state: RowState) -> Constraint | None:
        return Constraint(forced=11) if state.generated == 2 else None

    def forward(self, works: list[Work[RowState]], plan: AttentionPlan) -> ForwardResult:
        rows = [self._row(work.seq.state, at) for work in works for at in range(work.start, work.stop)]
        positions = [at for work in works for at in range(work.start, work.stop)]
        result = self._text._decoder(
            inputs_embeds=torch.stack(rows)[None], position_ids=torch.tensor([positions]), use_cache=False, plan=plan
        )
        return ForwardResult(result.last_hidden_state[0])

    def _row(self, state: RowState, at: int) -> Tensor:
        return state.upstream[at] if at < PROMPT_ROWS else state.own[at - PROMPT_ROWS] + state.upstream[at]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._text.logits(hidden)

    def sampled(self, works: list[Work[RowState]], hidden: Tensor, tokens: list[int]) -> None:
        self.batches.append(len(works))
        mixed = mix(self._text._decoder.embed_tokens(torch.tensor(tokens)), hidden)
        for work, row in zip(works, mixed, strict=True):
            work.seq.state.own[work.seq.generated] = row

    def emit(self, seq: Sequence[RowState], event: Event, memory: SequenceMemory) -> Emitted:
        seq.state.generated = event.generated
        token_ids = [event.sampled.token] if event.sampled else []
        payload = MultimodalPayload(meta={"token_ids": token_ids})
        return Emitted((Produced(port="codes", payload=payload, final=event.finish is not None),))

    def close(self, state: RowState) -> None:
        state.upstream.clear()


def mix(embedding: Tensor, hidden: Tensor) -> Tensor:
    return embedding + 0.5 * hidden.tanh()


def reference(folder: Path, rows: Tensor) -> list[int]:
    """The same, with the library alone and without any cache. rows [PROMPT_ROWS + STEPS - 1, HIDDEN]."""
    library = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    inputs, tokens = rows[:PROMPT_ROWS], list[int]()
    for step in range(STEPS):
        with torch.no_grad():
            out = library(inputs_embeds=inputs[None], output_hidden_states=True)
            token = 11 if step == 2 else int(out.logits[0, -1].argmax())
            tokens.append(token)
            own = mix(library.model.embed_tokens(torch.tensor(token)), out.hidden_states[-1][0, -1])
        if step + 1 < STEPS:
            inputs = torch.cat((inputs, (own + rows[PROMPT_ROWS + step])[None]))
    return tokens


def rows_of(name: int) -> Tensor:
    return torch.randn(PROMPT_ROWS + STEPS - 1, HIDDEN, generator=torch.Generator().manual_seed(name))


@pytest.mark.parametrize("blocks", [100, 10])
def test_upstream_rows_in_any_rhythm_give_the_reference_tokens(tiny_llama: Path, blocks: int) -> None:
    draw, talker = random.Random(3), Talker(tiny_llama)
    config = stage_config(token_budget=7, block_size=2)
    engine = AREngine(TorchBackend(talker, config, blocks=blocks), config)
    sent = dict.fromkeys("0123", 0)
    for name in sent:
        sampling = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
        engine.add(StageRequest(request_id=name, inputs=("rows",), outputs=("codes",), sampling=sampling))
    collected = Collected()
    while len(collected.reasons) < len(sent):
        open_names = [name for name in sent if sent[name] < PROMPT_ROWS + STEPS - 1]
        if open_names:
            name = draw.choice(open_names)
            count = PROMPT_ROWS if sent[name] == 0 else 1
            part = rows_of(int(name))[sent[name] : sent[name] + count]
            payload = MultimodalPayload.of(rows=part.numpy())
            engine.feed(InputChunk(request_id=name, port="rows", seq=0, final=False, payload=payload))
            sent[name] += count
        for _ in range(draw.randrange(3)):
            if engine.has_work():
                collected.take(engine.step())
                engine.check_integrity()
    assert collected.tokens == {name: reference(tiny_llama, rows_of(int(name))) for name in sent}
    assert max(talker.batches) > 1
    assert (engine.counters()["preemptions"] > 0) == (blocks == 10)


class HandingOver(CausalTextModel):
    """Keeps the output of its first layer beside the cache; the final chunk carries those rows and the keys."""

    @property
    def shape(self) -> ModelShape:
        return replace(super().shape, handoff_width=HIDDEN)

    def forward(self, works: list[Work[TextState]], plan: AttentionPlan) -> ForwardResult:
        ids = [token for work in works for token in work.seq.tokens[work.start : work.stop]]
        positions = [at for work in works for at in range(work.start, work.stop)]
        result = self._decoder(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            plan=plan,
            output_hidden_states=True,
        )
        return ForwardResult(result.last_hidden_state[0], result.hidden_states[1][0])

    def emit(self, seq: Sequence[TextState], event: Event, memory: SequenceMemory) -> Emitted:
        if event.finish is None:
            return Emitted()
        rows = memory.handoff(0, seq.prompt_len).numpy()
        keys_values = memory.keys_values(0, seq.prompt_len).numpy()
        return Emitted((Produced(port="rows", payload=MultimodalPayload.of(rows=rows, kv=keys_values), final=True),))


def hand_over(engine: AREngine[Any], tokens: list[int]) -> dict[str, np.ndarray[Any, Any]]:
    engine.add(
        StageRequest(
            request_id="r",
            outputs=("rows",),
            params={"token_ids": tokens},
            sampling=SamplingParams(temperature=0, max_tokens=2),
        )
    )
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    while engine.has_work():
        for emission in engine.step().emissions:
            arrays = {name: emission.payload[name] for name in ("rows", "kv")}
    return arrays


def test_rows_and_keys_of_a_cached_prefix_equal_computed_ones(tiny_llama: Path) -> None:
    draw = random.Random(1)
    tokens = [draw.randrange(3, 320) for _ in range(30)]
    model = HandingOver(tiny_llama, stage_config(dtype="float32"))
    config = stage_config(token_budget=9, block_size=4)
    engine = AREngine(TorchBackend(model, config), config)
    first = hand_over(engine, tokens)
    hand_over(engine, tokens[:17] + tokens[:9])
    second = hand_over(engine, tokens)
    assert engine.counters()["cached_tokens"] == 16 + 28
    library = AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation="eager")
    with torch.no_grad():
        out = library(torch.tensor([tokens]), output_hidden_states=True, use_cache=True)
    np.testing.assert_allclose(first["rows"], out.hidden_states[1][0].numpy(), atol=1e-4)
    np.testing.assert_allclose(second["rows"], first["rows"], atol=1e-5)
    assert first["kv"].shape == (3, 2, 2, 30, 8)
    for layer in range(3):
        keys = out.past_key_values.layers[layer].keys[0].numpy()
        np.testing.assert_allclose(first["kv"][layer, 0], keys, atol=1e-3)
    np.testing.assert_allclose(second["kv"], first["kv"], atol=1e-5)


def test_rows_beyond_the_blocks_of_a_request_cannot_be_read(tiny_llama: Path) -> None:
    class Greedy(HandingOver):
        def emit(self, seq: Sequence[TextState], event: Event, memory: SequenceMemory) -> Emitted:
            memory.handoff(0, 1000)
            return Emitted()

    config = stage_config()
    engine = AREngine(TorchBackend(Greedy(tiny_llama, stage_config(dtype="float32")), config), config)
    with pytest.raises(IndexError, match=r"0\.\.1000 of request r"):
        hand_over(engine, [5, 6, 7])


class Spanned(HandingOver):
    """Positions 3..9 of every prompt see each other."""

    def prompt(self, state: TextState) -> Prompt | None:
        return Prompt(token_ids=state.request.params["token_ids"], unsplittable=((3, 9),))


@pytest.mark.parametrize("budget", [4, 7, 64])
def test_unsplittable_spans_attend_in_both_directions(tiny_llama: Path, budget: int) -> None:
    tokens = list(range(40, 56))
    library = AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation="eager")
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    mask[3:9, 3:9] = True
    additive = torch.zeros(16, 16).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        want, causal = (
            library(torch.tensor([tokens]), attention_mask=given, use_cache=True).past_key_values.layers[2].values[0]
            for given in (additive, None)
        )
    assert float((want - causal).abs().max()) > 0.1
    config = stage_config(token_budget=budget, block_size=4)
    engine = AREngine(TorchBackend(Spanned(tiny_llama, stage_config(dtype="float32")), config), config)
    for _ in range(2):
        np.testing.assert_allclose(hand_over(engine, tokens)["kv"][2, 1], want.numpy(), atol=1e-3)
    assert engine.counters()["cached_tokens"] == 12

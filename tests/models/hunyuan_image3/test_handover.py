"""Keys and values of the text stage in the drawing stage: equal pictures, less work, never a picture without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from omnistage.errors import ErrorCode, RequestError
from omnistage.models.hunyuan_image3 import kv_payload
from omnistage.models.hunyuan_image3.drawing_stage import Drawer
from omnistage.models.hunyuan_image3.flight import Flight
from omnistage.models.hunyuan_image3.text_stage import Talk
from omnistage.models.hunyuan_image3.vocabulary import Vocabulary
from omnistage.payload import Array, MultimodalPayload, Tensor
from omnistage.stages.ar.engine import AREngine
from omnistage.stages.base import InputChunk
from tests.models.hunyuan_image3.conftest import Near
from tests.models.hunyuan_image3.harness import SCENARIOS, SMALL_EDIT, begin_handed, draw, handed, think

Engine = AREngine[Talk]
COT = SCENARIOS["cot"]
END_RECAPTION = "273"
CASES: dict[str, dict[str, Any]] = {
    "cot": COT,
    "ratio": SCENARIOS["ratio"],
    # Without the nudge the random weights would go on until the context is full.
    "system": COT
    | {"system_prompt": "You draw.", "bot_task": "recaption", "sampling": {"ar": {"logit_bias": {END_RECAPTION: 3.0}}}},
    "drop_think": COT | {"drop_think": True},
    "given_size": COT | {"size": "320x192"},
}


def changed(chunks: list[InputChunk], **meta: Any) -> list[InputChunk]:
    """The chunks with other metadata in the hand-over of keys and values."""
    return [
        msgspec.structs.replace(
            chunk, payload=MultimodalPayload(dict(chunk.payload.tensors), chunk.payload.meta | meta)
        )
        if chunk.port == "kv"
        else chunk
        for chunk in chunks
    ]


def rows_of(chunks: list[InputChunk]) -> Array:
    (kv,) = [chunk for chunk in chunks if chunk.port == "kv"]
    return kv.payload["kv"]


def with_rows(chunks: list[InputChunk], rows: Array, **meta: Any) -> list[InputChunk]:
    """The chunks with other keys and values."""
    payload = {"kv": Tensor(str(rows.dtype), np.ascontiguousarray(rows))}
    return [
        msgspec.structs.replace(chunk, payload=MultimodalPayload(payload, chunk.payload.meta | meta))
        if chunk.port == "kv"
        else chunk
        for chunk in chunks
    ]


@pytest.fixture
def thought(text_engine: Engine) -> list[InputChunk]:
    return handed(think(text_engine, COT))


@pytest.mark.slow
def test_edits_are_the_same_with_and_without_handover(
    small_drawer: Drawer, small_folder: Path, small_text_engine: Engine
) -> None:
    """Handed over, the reference pictures are not looked at again."""
    ask = SMALL_EDIT | {"bot_task": "think"}
    chunks = handed(think(small_text_engine, ask, folder=small_folder))
    silent = handed(think(small_text_engine, ask, folder=small_folder, handover=False))
    taken = begin_handed(small_drawer, ask, chunks, folder=small_folder)
    alone = begin_handed(small_drawer, ask, silent, folder=small_folder, handover=False)
    (without,) = draw(small_drawer, [alone])
    taken.media = {}
    (with_kv,) = draw(small_drawer, [taken])
    assert np.abs(with_kv - without).max() <= 1e-5
    assert taken.counts["kv_reused_rows"] > 2 * 260
    assert taken.counts["prefill_rows"] < 100 < 2 * 260 < alone.counts["prefill_rows"]


@pytest.mark.parametrize("name", CASES)
def test_pictures_are_the_same_with_and_without_handover(name: str, drawer: Drawer, text_engine: Engine) -> None:
    ask = CASES[name]
    chunks = handed(think(text_engine, ask))
    silent = handed(think(text_engine, ask, handover=False))
    assert [chunk.port for chunk in silent] == ["thoughts", "kv"]
    assert not silent[1].payload.tensors
    taken = begin_handed(drawer, ask, chunks)
    alone = begin_handed(drawer, ask, silent, handover=False)
    (with_kv,), (without,) = draw(drawer, [taken]), draw(drawer, [alone])
    assert np.abs(with_kv - without).max() <= 1e-5
    assert (taken.counts["kv_refused"], alone.counts["kv_refused"], alone.counts["kv_reused_rows"]) == (0, 0, 0)
    assert taken.counts["kv_reused_rows"] > 0


@pytest.mark.parametrize(("name", "noise"), [("cot", "cot"), ("ratio", "ratio")])
def test_the_chosen_size_is_that_of_the_reference(
    name: str, noise: str, near: Near, drawer: Drawer, text_engine: Engine
) -> None:
    flight = begin_handed(drawer, SCENARIOS[name], handed(think(text_engine, SCENARIOS[name])))
    drawer.encode([flight])
    drawer.prepare(flight)
    near(f"{noise}/init_noise", flight.ready().latents)


def test_only_rows_past_the_handover_are_computed(
    drawer: Drawer, thought: list[InputChunk], vocabulary: Vocabulary
) -> None:
    """With the prompt: from the end tag of the thoughts on. Without: from the first replaced token on."""
    flight = begin_handed(drawer, COT, thought)
    drawer.encode([flight])
    special = vocabulary.special
    with_prompt, without = (branch.layout for branch in flight.branches)
    end, first = with_prompt.ids.index(special.end_recaption), without.ids.index(special.cfg)
    assert flight.counts["kv_reused_rows"] == end
    assert flight.counts["prefill_rows"] == (with_prompt.prompt - end) + (without.prompt - first)


def test_a_changed_value_changes_the_picture(drawer: Drawer, thought: list[InputChunk]) -> None:
    rows = rows_of(thought).copy()
    rows[0, 0, 0, 3, 0] += 1.0
    (right,) = draw(drawer, [begin_handed(drawer, COT, thought)])
    (other,) = draw(drawer, [begin_handed(drawer, COT, with_rows(thought, rows))])
    assert np.abs(right - other).max() > 1e-4


def test_a_changed_token_id_is_found_and_everything_computed_again(drawer: Drawer, thought: list[InputChunk]) -> None:
    ids = next(chunk.payload.meta["ids"] for chunk in thought if chunk.port == "kv")
    (right,) = draw(drawer, [begin_handed(drawer, COT, thought)])
    for place in (0, 5, len(ids) - 1):
        flight = begin_handed(drawer, COT, changed(thought, ids=[*ids[:place], 1, *ids[place + 1 :]]))
        (found,) = draw(drawer, [flight])
        assert np.abs(found - right).max() <= 1e-5
        assert (flight.counts["kv_refused"], flight.counts["kv_reused_rows"]) == (1, 0)
        assert drawer.metrics(flight)["kv_refused"] == 1


def test_keys_and_values_of_another_prompt_are_not_used(
    drawer: Drawer, text_engine: Engine, thought: list[InputChunk]
) -> None:
    foreign = handed(think(text_engine, COT | {"prompt": "a red door"}))
    mixed = [*(chunk for chunk in thought if chunk.port != "kv"), *(chunk for chunk in foreign if chunk.port == "kv")]
    flight = begin_handed(drawer, COT, mixed)
    (found,), (right,) = draw(drawer, [flight]), draw(drawer, [begin_handed(drawer, COT, thought)])
    assert np.abs(found - right).max() <= 1e-5
    assert flight.counts["kv_refused"] == 1


def test_a_shorter_handover_that_says_so_is_not_used(drawer: Drawer, thought: list[InputChunk]) -> None:
    rows, ids = rows_of(thought), next(c.payload.meta["ids"] for c in thought if c.port == "kv")
    short = with_rows(thought, rows[:, :, :, :-1], ids=ids[:-1], total=len(ids) - 1)
    flight = begin_handed(drawer, COT, short)
    drawer.encode([flight])
    assert (flight.counts["kv_refused"], flight.counts["kv_reused_rows"]) == (1, 0)


@pytest.mark.parametrize("damage", ["empty", "fewer rows", "announced more", "out of place", "no pair"])
def test_a_damaged_handover_ends_the_request_by_name(drawer: Drawer, thought: list[InputChunk], damage: str) -> None:
    rows = rows_of(thought)
    damaged = {
        "empty": [
            msgspec.structs.replace(chunk, payload=MultimodalPayload()) if chunk.port == "kv" else chunk
            for chunk in thought
        ],
        "fewer rows": with_rows(thought, rows[:, :, :, :-1]),
        "announced more": changed(thought, total=999),
        "out of place": changed(thought, start=2),
        "no pair": with_rows(thought, rows[:, :1]),
    }[damage]
    with pytest.raises(RequestError, match="hand-over") as caught:
        begin_handed(drawer, COT, damaged)
    assert caught.value.info.code is ErrorCode.HANDOFF


def test_thoughts_that_were_cut_short_draw_nothing(drawer: Drawer, text_engine: Engine) -> None:
    ask = COT | {"sampling": {"ar": {"max_tokens": 3}}}
    chunks = handed(think(text_engine, ask))
    with pytest.raises(RequestError, match="max_tokens") as caught:
        begin_handed(drawer, ask, chunks)
    assert caught.value.info.code is ErrorCode.HANDOFF


def test_long_handovers_travel_in_pieces() -> None:
    rows = torch.arange(2 * 2 * 1 * 600 * 3, dtype=torch.float32).view(2, 2, 1, 600, 3)
    pieces = kv_payload.write(list(range(600)), rows)
    assert [piece.meta["start"] for piece in pieces] == [0, 256, 512]
    read = [kv_payload.read(piece, piece.meta["start"], torch.device("cpu")) for piece in pieces]
    assert [token for ids, _ in read for token in ids] == list(range(600))
    assert torch.equal(torch.cat([kv.keys for _, kv in read], 2), rows[:, 0])
    assert torch.equal(torch.cat([kv.values for _, kv in read], 2), rows[:, 1])


def test_bfloat16_rows_survive_the_wire() -> None:
    rows = torch.randn(1, 2, 1, 4, 8, dtype=torch.bfloat16)
    (piece,) = kv_payload.write([1, 2, 3, 4], rows)
    assert piece.tensors["kv"].dtype == "bfloat16"
    _, kv = kv_payload.read(piece, 0, torch.device("cpu"))
    assert torch.equal(kv.keys, rows[:, 0])


def test_requests_from_the_text_stage_and_without_it_share_steps(drawer: Drawer, text_engine: Engine) -> None:
    asks = [COT, SCENARIOS["ratio"], COT | {"seed": 9}]
    given = [handed(think(text_engine, ask)) for ask in asks]

    def flights() -> list[Flight]:
        return [begin_handed(drawer, ask, chunks) for ask, chunks in zip(asks, given, strict=True)]

    together = draw(drawer, flights())
    for mixed, flight in zip(together, flights(), strict=True):
        (alone,) = draw(drawer, [flight])
        assert np.abs(mixed - alone).max() <= 1e-5

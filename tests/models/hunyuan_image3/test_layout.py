"""Token rows against those of the official tokenizer wrapper."""

from typing import Any

import pytest

from omnistage.models.hunyuan_image3.checkpoint import Template
from omnistage.models.hunyuan_image3.layout import (
    Canvas,
    Conversation,
    Flags,
    Part,
    PictureGrid,
    Renderer,
    Trigger,
    Turn,
    common_prefix,
    without_thinking,
)
from omnistage.models.hunyuan_image3.vocabulary import Vocabulary
from tests.models.hunyuan_image3.harness import REFERENCE

CAT = (Turn("user", (Part("a red cat"),)),)
DRAW = Conversation("You draw.", CAT)
EDIT = Conversation(
    "You draw.", (Turn("user", (Part(picture=0), Part("a red cat"))),), (PictureGrid(0, (8, 32), (8, 32)),)
)
WIDE, TALL, SQUARE = Canvas(12, (12, 20)), Canvas(20, (20, 12)), Canvas(16, (16, 16))
TOKENS = REFERENCE["tokens"]


def thoughts(vocabulary: Vocabulary) -> list[int]:
    special, encode = vocabulary.special, vocabulary.encode
    return [
        special.think, *encode("plan"), special.end_think,
        special.recaption, *encode("A cat."), special.end_recaption,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "template", "said", "canvas"),
    [
        ("t2i", "instruct", DRAW, WIDE),
        ("t2i_pretrain", "pretrain", Conversation(None, CAT), WIDE),
        ("t2i_pretrain_sys", "pretrain", DRAW, WIDE),
        ("edit1", "instruct", EDIT, SQUARE),
    ],
)
def test_rows_to_draw_from(
    vocabulary: Vocabulary, name: str, template: Template, said: Conversation, canvas: Canvas
) -> None:
    renderer, right = Renderer(vocabulary, template, 260), TOKENS[name]
    rows = [renderer.drawing(said, (), canvas, unconditional=bare) for bare in (False, True)]
    assert [row.ids for row in rows] == right["tokens"]
    for row in rows:
        assert row.drawing is not None
        assert [list(grid) for grid in row.grids] == right["rope_image_info"][0]
        assert [row.drawing.timestep] == right["gen_timestep_index"][0]
        assert [[row.drawing.image.start, row.drawing.image.stop]] == right["gen_image_slices"][0]
        assert [list(place.joint) for place in row.references] == right["joint_image_slices"][0]


def test_rows_with_thoughts(vocabulary: Vocabulary) -> None:
    renderer, ids = Renderer(vocabulary, "instruct", 260), thoughts(vocabulary)
    for name, own, canvas in (
        ("t2i_cot", ids, TALL),
        ("t2i_cot_drop_think", without_thinking(ids, vocabulary), SQUARE),
    ):
        rows = [renderer.drawing(DRAW, own, canvas, unconditional=bare).ids for bare in (False, True)]
        assert rows == TOKENS[name]["tokens"]


def test_distilled_rows_have_guidance_and_next_timestep(vocabulary: Vocabulary) -> None:
    row = Renderer(vocabulary, "instruct", 260, Flags(True, True)).drawing(DRAW, (), WIDE)
    right: Any = TOKENS["t2i_distil"]
    assert row.ids == right["tokens"][0]
    assert row.drawing is not None
    places = [[row.drawing.timestep], [row.drawing.guidance], [row.drawing.next_timestep]]
    assert places == [right[key][0] for key in ("gen_timestep_index", "guidance_index", "timestep_r_index")]


@pytest.mark.parametrize(
    ("name", "template", "said", "trigger"),
    [
        ("prefill_auto", "instruct", DRAW, ""),
        ("prefill_think", "instruct", DRAW, "think"),
        ("prefill_recaption", "instruct", DRAW, "recaption"),
        ("prefill_img_ratio", "instruct", DRAW, "ratio"),
        ("edit1_prefill_think", "instruct", EDIT, "think"),
        ("pretrain_recaption_prefill", "pretrain", DRAW, "recaption"),
        ("pretrain_img_ratio_prefill", "pretrain", Conversation(None, CAT), "ratio"),
    ],
)
def test_rows_that_the_text_stage_starts_from(
    vocabulary: Vocabulary, name: str, template: Template, said: Conversation, trigger: Trigger
) -> None:
    assert Renderer(vocabulary, template, 260).question(said, trigger).ids == TOKENS[name]["tokens"][0]


def test_what_the_text_stage_reads_and_writes_begins_the_row_to_draw_from(vocabulary: Vocabulary) -> None:
    renderer, ids = Renderer(vocabulary, "instruct", 260), thoughts(vocabulary)
    written = [*renderer.question(EDIT, "think").ids, *ids[1:]]
    assert common_prefix(written, renderer.drawing(EDIT, ids, SQUARE).ids) == len(written)
    bare = renderer.drawing(EDIT, ids, SQUARE, unconditional=True)
    assert bare.ids[common_prefix(written, bare.ids)] == vocabulary.special.cfg


def test_earlier_answers_stand_between_answer_tags(vocabulary: Vocabulary) -> None:
    turns = (CAT[0], Turn("assistant", (Part("ok"),)), CAT[0])
    ids = Renderer(vocabulary, "instruct", 260).question(Conversation(None, turns), "").ids
    special, encode = vocabulary.special, vocabulary.encode
    answer = [*encode("Assistant: "), special.answer, *encode("ok"), special.end_answer, *encode("\n\n")]
    start = ids.index(special.answer) - len(encode("Assistant: "))
    assert ids[start : start + len(answer)] == answer


def test_thoughts_of_earlier_answers_keep_their_tags(vocabulary: Vocabulary) -> None:
    turns = (CAT[0], Turn("assistant", (Part("<think>x</think><recaption>y</recaption>"),)), CAT[0])
    ids = Renderer(vocabulary, "instruct", 260).question(Conversation(None, turns), "").ids
    special = vocabulary.special
    assert special.answer not in ids
    assert [t for t in ids if t in special[7:11]] == [
        special.think, special.end_think, special.recaption, special.end_recaption,
    ]  # fmt: skip


def test_users_cannot_write_special_tokens(vocabulary: Vocabulary) -> None:
    spelled = vocabulary.encode("<img></recaption><cfg>")
    assert max(spelled) < 256
    assert vocabulary.decode(spelled) == "<img></recaption><cfg>"

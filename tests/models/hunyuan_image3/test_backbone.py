"""Layers, positions and attention against the official implementation and against plain formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor

from omnistage.errors import StageError
from omnistage.models.hunyuan_image3.attention import (
    Document,
    DocumentPlan,
    KeysValues,
    Segment,
    attend,
    cut_pieces,
    segments_of,
)
from omnistage.models.hunyuan_image3.backbone import embedded
from omnistage.models.hunyuan_image3.components import Components
from omnistage.models.hunyuan_image3.layout import GridSpan
from omnistage.models.hunyuan_image3.rotary import Rotary, positions
from tests.models.hunyuan_image3.conftest import Near
from tests.models.hunyuan_image3.harness import REFERENCE

PARAMS = REFERENCE["params"]


def grids(rows: Any) -> list[GridSpan]:
    return [GridSpan(*row) for row in rows]


@pytest.mark.parametrize(
    ("name", "spans", "rows"),
    [
        ("t2i_yx", REFERENCE["tokens"]["t2i"]["rope_image_info"][0], 289),
        ("edit1_yx", REFERENCE["tokens"]["edit1"]["rope_image_info"][0], 827),
        ("half_yx", PARAMS["rope_half"]["images"], 60),
        ("vit_pad_yx", PARAMS["rope_vit_pad"]["images"], 40),
    ],
)
def test_positions(near: Near, name: str, spans: Any, rows: int) -> None:
    whole = positions(grids(spans), 0, rows)
    near(f"rope/{name}", whole)
    for start, stop in ((0, 7), (5, rows - 1), (rows - 3, rows), (20, 25)):
        assert torch.equal(positions(grids(spans), start, stop), whole[start:stop])


def test_angles(near: Near) -> None:
    cos, sin = Rotary(16, 10000.0, torch.device("cpu"))(positions(grids(PARAMS["rope_half"]["images"]), 0, 60))
    near("rope/half_cos_d16", cos)
    near("rope/half_sin_d16", sin)


@torch.inference_mode()
def test_text_logits_hidden_states_and_parts_of_a_layer(near: Near, components: Components) -> None:
    ids = REFERENCE["tokens"]["prefill_auto"]["tokens"][0]
    backbone, head = components.backbone(), components.text_head()
    layers: list[Any] = list(backbone.layers)
    layer = layers[0]
    seen: dict[str, Any] = {}
    outputs: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda *call: seen.update(attention=call[2][0][0])),
        layer.mlp.register_forward_hook(lambda *call: seen.update(mlp=call[2][0])),
        layer.mlp.gate.register_forward_hook(lambda *call: seen.update(router=call[2])),
        *(each.register_forward_hook(lambda *call: outputs.append(call[2][0])) for each in layers),
    ]
    rows = embedded(backbone, ids)
    plan = DocumentPlan([Document((), segments_of(0, len(ids), ()))])
    hidden = backbone(rows, components.rotary(positions([], 0, len(ids))), plan)
    for hook in hooks:
        hook.remove()
    near("text/logits", head.logits(head.norm(hidden)))
    near("text/hidden", torch.stack([rows, *outputs]))
    near("text/l0_attn_out", seen["attention"])
    near("text/l0_mlp_out", seen["mlp"])
    _, weights, chosen = seen["router"]
    near("text/l0_router_topk_weight", weights)
    near("text/l0_router_topk_index", chosen)


class _Module:
    layer_idx = 0


@pytest.mark.parametrize("known", [0, 3])
def test_documents_attend_like_a_dense_mask(known: int) -> None:
    torch.manual_seed(0)
    heads, kv, dim, lengths, spans = 4, 2, 8, (9, 1, 12), {0: [(2, 6)], 2: [(0, 4), (4, 7), (10, 12)]}
    pieces = [KeysValues(torch.randn(1, kv, known, dim), torch.randn(1, kv, known, dim)) for _ in lengths]
    shifted = [[(a + known, b + known) for a, b in spans.get(i, [])] for i in range(3)]
    documents = [
        Document((piece,) if known else (), segments_of(known, known + rows, span))
        for piece, rows, span in zip(pieces, lengths, shifted, strict=True)
    ]
    query, key, value = (torch.randn(1, n, sum(lengths), dim) for n in (heads, kv, kv))
    got = attend(_Module(), query, key, value, None, plan=DocumentPlan(documents), scaling=0.3)[0][0]
    row = 0
    for piece, rows, span in zip(pieces, lengths, shifted, strict=True):
        keys = torch.cat((piece.keys[0], key[0, :, row : row + rows]), 1).repeat_interleave(2, 0)
        values = torch.cat((piece.values[0], value[0, :, row : row + rows]), 1).repeat_interleave(2, 0)
        mask = torch.ones(rows, known + rows).tril(known).bool()
        for begin, end in span:
            mask[begin - known : end - known, begin:end] = True
        scores = (query[0, :, row : row + rows] @ keys.transpose(1, 2) * 0.3).masked_fill(~mask, -torch.inf)
        right = (scores.softmax(-1) @ values).transpose(0, 1)
        assert torch.allclose(got[row : row + rows], right, atol=1e-5)
        row += rows


def test_keys_and_values_of_new_rows_are_kept_per_document() -> None:
    plan = DocumentPlan([Document((), (Segment(0, n, True),)) for n in (2, 3)], keep=True)
    key, value = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    attend(_Module(), torch.randn(1, 2, 5, 4), key, value, None, plan=plan)
    first, second = plan.new_rows()
    assert torch.equal(first.keys[0], key[0, :, :2])
    assert torch.equal(second.values[0], value[0, :, 2:])


def test_a_split_span_and_a_missing_plan_are_refused() -> None:
    with pytest.raises(StageError, match=r"3\.\.7 are cut"):
        segments_of(0, 5, [(3, 7)])
    some = torch.zeros(1, 1, 1, 1)
    with pytest.raises(StageError, match="without a plan"):
        attend(_Module(), some, some, some, None)


def test_pieces_are_cut_to_the_rows_asked_for() -> None:
    pieces = [KeysValues(torch.zeros(1, 1, n, 1), torch.zeros(1, 1, n, 1)) for n in (4, 3)]
    assert [[piece.rows for piece in cut_pieces(pieces, stop)] for stop in (0, 2, 4, 6, 9)] == [
        [], [2], [4], [4, 2], [4, 3],
    ]  # fmt: skip


@torch.inference_mode()
def test_experts_of_an_accelerator_compute_the_same(components: Components) -> None:
    mlp: Any = components.backbone().layers[0].mlp
    rows = torch.randn(1, 70, 64)
    config = mlp.experts.config
    right = mlp(rows)
    config._experts_implementation = "grouped_mm"
    grouped = mlp(rows)
    config._experts_implementation = "eager"
    assert torch.allclose(grouped, right, atol=1e-5)

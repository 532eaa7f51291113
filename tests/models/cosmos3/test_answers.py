"""The reasoner's text answers against transformers' `generate`, on a tiny checkpoint with pictures and videos."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    Cosmos3EdgeConfig,
    Cosmos3EdgeForConditionalGeneration,
    Cosmos3OmniConfig,
    Cosmos3OmniForConditionalGeneration,
)

from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.omni import OmniResult, ResultBuilder
from omnistage.errors import RequestError
from omnistage.models.cosmos3.answer_request import plan_answer
from omnistage.payload import Array, MultimodalPayload
from omnistage.request import OmniRequest
from tests.engines import running
from tests.models.cosmos3.tiny import clip, make_tokenizer, picture, seeded

pytestmark = pytest.mark.slow

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant{{ '\n' }}"
)
_DEPLOY: dict[str, Any] = {"placement": "inline", "dtype": "float32", "device": "cpu"}
_LENGTH = 12
# 64 x 96 and 64 x 64 pixels: multiples of patch x merge, so that nothing is resized.
IMAGE, VIDEO = picture(96, 64), clip(64, 64, 4)
ASKS: dict[str, list[Any]] = {
    "text": ["What is this?"],
    "image": [IMAGE, "What is this?"],
    "video": [VIDEO, "What happens?"],
    "mixed": ["First ", IMAGE, " then ", VIDEO, " and ", picture(64, 64, 5), "."],
}


def omni(ids: dict[str, int], vocabulary: int) -> tuple[Any, dict[str, Any]]:
    """The model and the settings of its image processor."""
    config = Cosmos3OmniConfig(
        text_config=_text(vocabulary, "qwen3_vl_text", mrope_interleaved=True),
        vision_config={
            "model_type": "qwen3_vl_vision", "depth": 3, "hidden_size": 24, "intermediate_size": 32, "num_heads": 2,
            "out_hidden_size": 32, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2],
        },
        tie_word_embeddings=False, **ids,
    )  # fmt: skip
    return Cosmos3OmniForConditionalGeneration(config), {"image_processor_type": "Qwen2VLImageProcessor", "span": 2}


def edge(ids: dict[str, int], vocabulary: int) -> tuple[Any, dict[str, Any]]:
    config = Cosmos3EdgeConfig(
        text_config=_text(vocabulary, "cosmos3_edge_text"),
        vision_config={
            "model_type": "cosmos3_edge_vision", "num_hidden_layers": 3, "hidden_size": 24, "intermediate_size": 32,
            "num_attention_heads": 2, "patch_size": 16, "num_patches": 16, "spatial_merge_size": 2,
        },
        projector_hidden_size=40, tie_word_embeddings=False, **ids,
    )  # fmt: skip
    return Cosmos3EdgeForConditionalGeneration(config), {"image_processor_type": "Cosmos3EdgeImageProcessor", "span": 1}


def _text(vocabulary: int, model_type: str, **rope: Any) -> dict[str, Any]:
    return {
        "model_type": model_type, "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2], **rope},
    }  # fmt: skip


@pytest.fixture(scope="module", params=[omni, edge])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers writes it."""
    target = tmp_path_factory.mktemp("answers") / "reasoner"
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|image_pad|>", "<|video_pad|>"], special_tokens=True)
    tokenizer.chat_template = _TEMPLATE
    names = {
        "image_token_id": "image_pad", "video_token_id": "video_pad", "vision_start_token_id": "vision_start",
        "vision_end_token_id": "vision_end",
    }  # fmt: skip
    ids = {key: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}
    made, processor = request.param(ids, len(tokenizer))
    model = seeded(made, 77)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    settings = {
        "image_processor_type": processor["image_processor_type"], "patch_size": 16, "merge_size": 2,
        "temporal_patch_size": processor["span"], "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "size": {"shortest_edge": 1024, "longest_edge": 1 << 20},
    }  # fmt: skip
    (target / "preprocessor_config.json").write_text(json.dumps(settings))
    return target


def reference(folder: Path, parts: list[Any]) -> list[int]:
    """Greedy tokens of transformers, its inputs put together by hand (its processor needs torchvision)."""
    model = AutoModelForImageTextToText.from_pretrained(str(folder), dtype=torch.float32).eval()
    is_edge = isinstance(model, Cosmos3EdgeForConditionalGeneration)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    images = transformers.AutoImageProcessor.from_pretrained(str(folder), backend="pil")
    text = "<|im_start|>user\n"
    pixels: dict[str, list[torch.Tensor]] = {"image": [], "video": []}
    grids: dict[str, list[torch.Tensor]] = {"image": [], "video": []}
    for part in parts:
        if isinstance(part, str):
            text += part
        elif part.ndim == 3:
            made = images(images=[Image.fromarray(part)], return_tensors="pt")
            pixels["image"].append(made["pixel_values"])
            grids["image"].append(made["image_grid_thw"][0])
            text += f"<|vision_start|>{'<|image_pad|>' * (len(made['pixel_values']) // 4)}<|vision_end|>"
        else:
            for at in video_seconds(len(part), is_edge):
                text += f"<{at:.1f} seconds><|vision_start|>{'<|video_pad|>' * 4}<|vision_end|>"
            pixels["video"].append(video_rows(part, is_edge))
            grids["video"].append(torch.tensor([len(part) // (1 if is_edge else 2), 4, 4]))
    text += "<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor(tokenizer(text)["input_ids"])
    kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
    given: dict[str, Any] = {"input_ids": ids[None], "mm_token_type_ids": kinds[None]}
    if pixels["image"]:
        given |= {"pixel_values": torch.cat(pixels["image"]), "image_grid_thw": torch.stack(grids["image"])}
    if pixels["video"]:
        given |= {"pixel_values_videos": torch.cat(pixels["video"]), "video_grid_thw": torch.stack(grids["video"])}
    made = model.generate(**given, do_sample=False, max_new_tokens=_LENGTH, attention_mask=torch.ones_like(ids)[None])
    tokens: list[int] = made[0, len(ids) :].tolist()
    return tokens


def video_seconds(frames: int, is_edge: bool) -> list[float]:
    """Edge: each frame at 24 per second. Else frames are looked at at 2 per second; a pair's time is its mean."""
    return [frame / 24 for frame in range(frames)] if is_edge else [pair + 0.25 for pair in range(frames // 2)]


def video_rows(frames: Array, is_edge: bool) -> torch.Tensor:
    """[rows, 3 * span * 16 * 16] one value at a time, from the definition: rows by time, merge block, then within it;
    in a row the channel comes first, or last (edge)."""
    scaled = frames.astype(np.float32) / 255 * 2 - 1
    span = 1 if is_edge else 2
    corners = [(by, bx) for by in range(0, frames.shape[1], 32) for bx in range(0, frames.shape[2], 32)]
    rows = []
    for t in range(0, len(frames), span):
        for y, x in [(by + dy, bx + dx) for by, bx in corners for dy in (0, 16) for dx in (0, 16)]:
            patch = scaled[t : t + span, y : y + 16, x : x + 16]
            rows.append((patch if is_edge else patch.transpose(3, 0, 1, 2)).ravel())
    return torch.from_numpy(np.stack(rows))


def request_of(name: str) -> tuple[OmniRequest, dict[str, MultimodalPayload]]:
    media: dict[str, MultimodalPayload] = {}
    content: list[dict[str, Any]] = []
    for part in ASKS[name]:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
            continue
        kind, key = ("image" if part.ndim == 3 else "video"), f"m{len(media)}"
        media[key] = MultimodalPayload.of({}, **{kind: part})
        content.append({"type": kind, "media": key})
    sampling = {"reasoner": {"temperature": 0.0, "max_tokens": _LENGTH}}
    return OmniRequest(id=name, messages=[{"role": "user", "content": content}], sampling=sampling), media


async def ask(engine: AsyncOmniEngine, name: str) -> OmniResult:
    request, media = request_of(name)
    builder = ResultBuilder(name)
    async for output in engine.generate(request, media):
        builder.add(output)
    return builder.result().raise_for_error()


@pytest.mark.parametrize("budget", [512, 7])
async def test_answers_equal_generate_alone_together_and_in_small_chunks(folder: Path, budget: int) -> None:
    right = {name: reference(folder, parts) for name, parts in ASKS.items()}
    async with running(str(folder), _DEPLOY | {"token_budget": budget}) as engine:
        alone = {name: await ask(engine, name) for name in ASKS}
        together = await asyncio.gather(*(ask(engine, name) for name in ASKS))
    assert len({tuple(tokens) for tokens in right.values()}) == len(ASKS)  # the media matter
    for name, result in (*alone.items(), *zip(ASKS, together, strict=True)):
        assert result.token_ids == right[name], name


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": "a <|image_pad|> b"}, "messages"),
        ({"raw_prompt": "<|vision_start|>"}, "raw_prompt"),
        ({"prompt": "a", "modalities": ("audio",)}, "modalities"),
        ({"prompt": "a", "params": {"num_frames": 5}}, "num_frames"),
        ({}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "media": "gone"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "audio", "media": "x"}]}]}, "messages"),
    ],
)
def test_what_the_reasoner_cannot_read_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as error:
        plan_answer(OmniRequest(id="a", **fields), {})
    assert error.value.info.param == named

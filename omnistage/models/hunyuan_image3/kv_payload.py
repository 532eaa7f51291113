"""Keys and values of the text stage as payloads between stages, with the token ids that they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omnistage.errors import ErrorCode, RequestError
from omnistage.models.hunyuan_image3.attention import KeysValues
from omnistage.ops.tensor_payload import from_payload, to_payload
from omnistage.payload import MultimodalPayload

# A hand-over travels in at most so many chunks.
_CHUNKS = 8
_MIN_ROWS = 256


def write(ids: Sequence[int], rows: Tensor) -> list[MultimodalPayload]:
    """`rows` [layers, 2, kv_heads, n, head_dim] of `ids` as chunks of consecutive rows, in order."""
    count = max(_MIN_ROWS, -(-len(ids) // _CHUNKS))
    return [
        MultimodalPayload(
            {"kv": to_payload(rows[:, :, :, start : start + count])},
            {"start": start, "ids": list(ids[start : start + count]), "total": len(ids)},
        )
        for start in range(0, len(ids), count)
    ]


def read(payload: MultimodalPayload, start: int, device: torch.device) -> tuple[list[int], KeysValues]:
    """Ids and rows of the chunk that is due at row `start`, as copies on `device`.

    Raises RequestError (hand-off) for a chunk that is empty, out of place or holds other rows than it says.
    """
    tensor, ids = payload.tensors.get("kv"), payload.meta.get("ids", [])
    if tensor is None or not ids:
        raise _broken("carries no keys and values")
    if payload.meta["start"] != start:
        raise _broken(f"begins at row {payload.meta['start']}, {start} was due")
    if len(tensor.shape) != 5 or tensor.shape[1] != 2 or tensor.shape[3] != len(ids):
        raise _broken(f"stands for {len(ids)} tokens but is {list(tensor.shape)}")
    rows = from_payload(tensor, device)
    return list(ids), KeysValues(rows[:, 0], rows[:, 1])


def check_whole(payload: MultimodalPayload, rows: int) -> None:
    """Raises RequestError (hand-off) unless `rows` are all that were announced."""
    if payload.meta["total"] != rows:
        raise _broken(f"ends after {rows} of {payload.meta['total']} rows")


def _broken(what: str) -> RequestError:
    return RequestError(f"the hand-over of the text stage's keys and values {what}", code=ErrorCode.HANDOFF)

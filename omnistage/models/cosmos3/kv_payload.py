"""The reasoner's keys and values as a payload between stages, with the token ids that they stand for."""

from __future__ import annotations

import torch

from omnistage.errors import ErrorCode, RequestError
from omnistage.models.cosmos3.reasoner import Ids, TextKV
from omnistage.ops.tensor_payload import from_payload, to_payload
from omnistage.payload import MultimodalPayload

__all__ = ["TextKV", "read", "write"]


def write(branch: str, ids: Ids, text: TextKV) -> MultimodalPayload:
    """One branch: "keys" and "values" [layers, tokens, kv_heads, head_dim] in the tower's dtype."""
    return MultimodalPayload(
        {"keys": to_payload(text.keys), "values": to_payload(text.values)}, {"branch": branch, "ids": list(ids)}
    )


def read(payload: MultimodalPayload, expected: dict[str, Ids], device: torch.device) -> tuple[str, TextKV]:
    """The branch's name and its own copy on `device`. Raises RequestError (hand-off) when the ids are not those of
    this request."""
    branch = str(payload.meta["branch"])
    if branch not in expected or tuple(payload.meta["ids"]) != expected[branch]:
        raise RequestError(
            f"the reasoner's keys and values stand for other tokens than this request's ({branch})",
            code=ErrorCode.HANDOFF,
        )
    return branch, TextKV(
        from_payload(payload.tensors["keys"], device), from_payload(payload.tensors["values"], device)
    )

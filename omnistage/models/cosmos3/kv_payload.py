"""The reasoner's keys and values as a payload between stages, with the token ids that they stand for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor as TorchTensor

from omnistage.errors import ErrorCode, RequestError
from omnistage.models.cosmos3.reasoner import Ids, TextKV
from omnistage.payload import MultimodalPayload, Tensor

__all__ = ["TextKV", "read", "write"]


def write(branch: str, ids: Ids, text: TextKV) -> MultimodalPayload:
    """One branch: "keys" and "values" [layers, tokens, kv_heads, head_dim] in the tower's dtype."""
    return MultimodalPayload(
        {"keys": _to_wire(text.keys), "values": _to_wire(text.values)}, {"branch": branch, "ids": list(ids)}
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
    return branch, TextKV(_from_wire(payload.tensors["keys"], device), _from_wire(payload.tensors["values"], device))


def _to_wire(tensor: TorchTensor) -> Tensor:
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        return Tensor("bfloat16", plain.view(torch.uint16).numpy())
    return Tensor(str(plain.dtype).removeprefix("torch."), plain.numpy())


def _from_wire(tensor: Tensor, device: torch.device) -> TorchTensor:
    copied = torch.from_numpy(np.array(tensor.array))
    return (copied.view(torch.bfloat16) if tensor.dtype == "bfloat16" else copied).to(device)

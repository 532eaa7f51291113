"""Turns chunks on edges to the client into output events, and cuts what a client already has after a replay."""

from __future__ import annotations

import msgspec
import numpy as np

from omnistage.config.model import EdgeSpec
from omnistage.connectors.hub import ConnectorHub
from omnistage.engine.record import Sent
from omnistage.messages import Chunk
from omnistage.payload import MultimodalPayload, Tensor
from omnistage.request import OmniRequestOutput


def client_output(hub: ConnectorHub, edge: EdgeSpec, chunk: Chunk) -> OmniRequestOutput:
    """The event for a chunk; its payload owns its arrays, so the producer's memory can be freed at once."""
    payload = hub.load(chunk)
    tensors = payload.tensors if chunk.local else _copied(payload.tensors)
    return OmniRequestOutput(
        request_id=chunk.key.request_id,
        stage=edge.source_stage,
        modality=edge.target_port,
        seq=chunk.key.seq,
        text=str(payload.meta.get("text", "")),
        token_ids=tuple(payload.meta.get("token_ids", ())),
        payload=MultimodalPayload(tensors, payload.meta),
        final=chunk.final,
    )


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: Tensor(tensor.dtype, np.array(tensor.array)) for name, tensor in tensors.items()}


def without_sent(output: OmniRequestOutput, skip: Sent) -> OmniRequestOutput | None:
    """Cuts the text, tokens and samples that `skip` still counts (it counts down); None when nothing is left.

    A replay with the same seed produces the same text and samples, in chunks that may be cut elsewhere.
    """
    text = _cut_text(output.text, skip)
    tokens = output.token_ids[skip.tokens :]
    skip.tokens -= len(output.token_ids) - len(tokens)
    payload = _cut_samples(output.payload, skip)
    if payload is not None and output.token_ids and not tokens:
        payload = _without_calls(payload)
    changed = msgspec.structs.replace(output, text=text, token_ids=tokens, payload=payload)
    empty = not text and not tokens and (payload is None or not payload.nbytes)
    if empty and not output.final and skip.chunks > 0:
        skip.chunks -= 1
        return None
    return changed


def _cut_text(text: str, skip: Sent) -> str:
    cut = min(len(text), len(skip.text))
    skip.text = skip.text[cut:]
    return text[cut:]


def _without_calls(payload: MultimodalPayload) -> MultimodalPayload:
    """News of tool calls comes with the tokens that wrote it, and goes with them."""
    meta = {key: value for key, value in payload.meta.items() if key != "tool_calls"}
    return MultimodalPayload(payload.tensors, meta)


def _cut_samples(payload: MultimodalPayload | None, skip: Sent) -> MultimodalPayload | None:
    if payload is None or "audio" not in payload.tensors or not skip.samples:
        return payload
    audio = payload["audio"]
    cut = min(audio.shape[-1], skip.samples)
    skip.samples -= cut
    tensors = payload.tensors | {"audio": Tensor(str(audio.dtype), audio[..., cut:])}
    return MultimodalPayload(tensors, payload.meta)

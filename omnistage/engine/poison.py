"""Requests that kill a stage process: found by running suspects alone, remembered by what they ask, then refused."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import msgspec

from omnistage.errors import RequestError
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest

MAX_KEPT = 1024
FINGERPRINT_BYTES = 16


def fingerprint(request: OmniRequest, media: dict[str, MultimodalPayload]) -> bytes:
    """A hash of everything that decides what is computed; not of who asks, when, or under which id and seed."""
    asked = msgspec.structs.replace(request, id="", owner="", seed=None, priority=0, timeout=None, stream=False)
    digest = blake2b(msgspec.msgpack.encode(asked), digest_size=FINGERPRINT_BYTES)
    for name, payload in sorted(media.items()):
        digest.update(msgspec.msgpack.encode((name, payload.header())))
        for tensor in payload.tensors.values():
            digest.update(tensor.array.tobytes())
    return digest.digest()


class PoisonBook:
    """The inputs that were alone at a stage when its process died, at most `MAX_KEPT`, the oldest forgotten first."""

    def __init__(self) -> None:
        self._stages: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stages)

    def note(self, request: OmniRequest, media: dict[str, MultimodalPayload], stage: str) -> None:
        self._stages[fingerprint(request, media)] = stage
        if len(self._stages) > MAX_KEPT:
            self._stages.popitem(last=False)

    def check(self, request: OmniRequest, media: dict[str, MultimodalPayload]) -> None:
        """Raises RequestError for an input that is in the book. Costs nothing while the book is empty."""
        stage = self._stages.get(fingerprint(request, media)) if self._stages else None
        if stage is not None:
            text = f"this input ended the process of stage {stage} before and is not run again"
            raise RequestError(text, param="body", stage=stage)


class Quarantine:
    """Which suspect runs alone at a stage. A request is suspect when two processes of the stage died under it."""

    def __init__(self) -> None:
        self._turns: dict[str, list[str]] = {}

    def suspect(self, stage: str, request_id: str) -> None:
        turns = self._turns.setdefault(stage, [])
        if request_id not in turns:
            turns.append(request_id)

    def alone(self, stage: str, request_id: str) -> bool:
        """True when the request has the stage for itself."""
        return self._turns.get(stage, [""])[0] == request_id

    def admits(self, stage: str, request_id: str) -> bool:
        """False while another request has the stage for itself."""
        return stage not in self._turns or self.alone(stage, request_id)

    def ended(self, stage: str, request_id: str) -> bool:
        """Takes a request out; True when that lets others in."""
        turns = self._turns.get(stage)
        if turns is None or request_id not in turns:
            return False
        turns.remove(request_id)
        if not turns:
            del self._turns[stage]
        return True

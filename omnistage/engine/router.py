"""Which replica of a stage takes a request: by policy among the ready ones, near its prefix where that is free."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict

import msgspec

from omnistage.config.model import OmniConfig
from omnistage.engine.record import RequestRecord
from omnistage.runtime.plan import ReplicaId
from omnistage.runtime.stage_runtime import Replica

PREFIX_CHARS = 256
MAX_PREFIXES = 4096
# A replica that served the prefix before may have this many more live requests than the idlest one.
PREFIX_SLACK = 2


class Router:
    """Policies: least_work (fewest live requests), round_robin, random (drawn from the request id, so repeatable).

    Under least_work a request whose prompt begins like an earlier one goes to the replica that served that one, whose
    prefix cache may hold it, unless that replica is clearly busier.
    """

    def __init__(self, config: OmniConfig) -> None:
        self._config = config
        self._turns: dict[str, int] = defaultdict(int)
        self._served: OrderedDict[tuple[str, bytes], ReplicaId] = OrderedDict()

    def pick(self, record: RequestRecord, replicas: list[Replica]) -> Replica:
        """A ready replica, or, when none is, the one that a parked request waits for."""
        usable = [r for r in replicas if r.ready] or [r for r in replicas if r.planned] or replicas
        if len(usable) == 1:
            return usable[0]
        stage = usable[0].id.stage
        policy = self._config.stages[stage].replica_policy
        if policy == "random":
            return random.Random(f"{record.id}/{record.epoch}").choice(usable)
        if policy == "round_robin":
            self._turns[stage] += 1
            return usable[(self._turns[stage] - 1) % len(usable)]
        return self._least_work(record, usable, stage)

    def _least_work(self, record: RequestRecord, usable: list[Replica], stage: str) -> Replica:
        best = min(usable, key=lambda replica: (replica.load, replica.id.index))
        prefix = _prefix(record)
        if prefix is None or self._config.stages[stage].kind != "ar":
            return best
        earlier = self._served.get((stage, prefix))
        near = next((replica for replica in usable if replica.id == earlier), best)
        chosen = near if near.load <= best.load + PREFIX_SLACK else best
        self._remember(stage, prefix, chosen.id)
        return chosen

    def _remember(self, stage: str, prefix: bytes, replica: ReplicaId) -> None:
        self._served[stage, prefix] = replica
        self._served.move_to_end((stage, prefix))
        if len(self._served) > MAX_PREFIXES:
            self._served.popitem(last=False)


def _prefix(record: RequestRecord) -> bytes | None:
    """The beginning of the prompt, or None for one too short to be worth a detour."""
    request = record.request
    prompt = request.prompt if request.prompt is not None else request.raw_prompt
    text = prompt.encode() if prompt is not None else msgspec.json.encode(request.messages or [])
    return request.owner.encode() + text[:PREFIX_CHARS] if len(text) >= PREFIX_CHARS else None

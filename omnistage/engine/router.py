"""Which replica of a stage takes a request: by policy among the ready ones."""

from __future__ import annotations

import random
from collections import defaultdict

from omnistage.config.model import OmniConfig
from omnistage.engine.record import RequestRecord
from omnistage.runtime.stage_runtime import Replica


class Router:
    """Policies: least_work (fewest live requests), round_robin, random (seeded by the request, so it is repeatable)."""

    def __init__(self, config: OmniConfig) -> None:
        self._config = config
        self._turns: dict[str, int] = defaultdict(int)

    def pick(self, record: RequestRecord, replicas: list[Replica]) -> Replica:
        """A ready replica, or, when none is, the one that a parked request waits for."""
        usable = [replica for replica in replicas if replica.ready] or replicas
        policy = self._config.stages[usable[0].id.stage].replica_policy
        if policy == "random":
            return random.Random(f"{record.id}/{record.epoch}").choice(usable)
        if policy == "round_robin":
            turn = self._turns[usable[0].id.stage]
            self._turns[usable[0].id.stage] += 1
            return usable[turn % len(usable)]
        return min(usable, key=lambda replica: (replica.load, replica.id.index))

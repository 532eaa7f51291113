"""Finds hand-offs that were lost on the way and stages that stopped answering, within the edge's deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omnistage.config.model import OmniConfig
from omnistage.engine.record import RequestRecord
from omnistage.errors import ErrorCode, ErrorInfo
from omnistage.messages import Probe, Visit
from omnistage.runtime.plan import ReplicaId
from omnistage.runtime.stage_runtime import Replica

DEFAULT_DEADLINE_S = 30.0
# A stage that is silent but uses at least this share of a core is in a long step, not stalled.
BUSY_SHARE = 0.1


class HandoffWatch:
    """Watches the live requests. `ask` sends a probe to a replica, `worked_s` tells the CPU seconds it has computed,
    `fail` ends a request.

    When no stage has spoken of a request for a deadline, the stages that hold it are asked what has reached them. A
    chunk that was sent but not received is lost; a stage that neither answers nor computes within another deadline has
    stalled; otherwise the request is just waiting its turn.
    """

    def __init__(
        self,
        config: OmniConfig,
        ask: Callable[[ReplicaId, Visit], None],
        worked_s: Callable[[ReplicaId], float],
        fail: Callable[[RequestRecord, ErrorInfo], None],
    ) -> None:
        self._config = config
        self._ask = ask
        self._worked_s = worked_s
        self._fail = fail

    def follow(self, record: RequestRecord) -> None:
        """Looks at the request again when its deadline has passed since its last progress."""
        self._look_in(record, record.progress + self._deadline(record) - _now())

    def _deadline(self, record: RequestRecord) -> float:
        """Seconds: the shortest `deadline_s` of the edges in use."""
        used = (self._config.edges.get(edge.name) for edge in record.edges)
        return min((edge.deadline_s for edge in used if edge is not None), default=DEFAULT_DEADLINE_S)

    def _look_in(self, record: RequestRecord, seconds: float) -> None:
        if record.watch is not None:
            record.watch.cancel()
        record.watch = asyncio.get_running_loop().call_later(max(0.0, seconds), self._look, record)

    def _look(self, record: RequestRecord) -> None:
        active = {stage: visit for stage, visit in record.visits.items() if visit.state == "active"}
        if not active:  # parked until a stage is back; the request's own deadline bounds that
            record.progress = _now()
        if record.progress + self._deadline(record) > _now():
            record.asked.clear()
            self.follow(record)
            return
        silent = {stage: visit.replica for stage, visit in active.items() if stage in record.asked}
        stalled = next((stage for stage, replica in silent.items() if not self._computes(record, stage, replica)), None)
        if stalled is not None:
            self._fail(record, ErrorInfo(ErrorCode.HANDOFF, f"stage {stalled} stalled", stage=stalled))
            return
        record.asked = {stage: self._worked_s(visit.replica) for stage, visit in active.items()}
        for stage, visit in active.items():
            if stage not in silent:
                self._ask(visit.replica, Visit(record.id, record.epoch))
        self._look_in(record, self._deadline(record))

    def _computes(self, record: RequestRecord, stage: str, replica: ReplicaId) -> bool:
        """Whether the stage has computed since it was asked, a deadline ago."""
        return self._worked_s(replica) - record.asked[stage] >= BUSY_SHARE * self._deadline(record)

    def on_probe(self, record: RequestRecord, replica: Replica, probe: Probe) -> None:
        """Compares what a stage has received with what was sent to it, and what it has sent with what has come."""
        stage = replica.id.stage
        visit = record.visits[stage]
        for port, count in visit.delivered.items():
            got = probe.received.get(port, 0)
            if visit.state == "active" and got < count:
                edge = next(e for e in record.edges if e.target == f"{stage}.{port}")
                text = f"chunk {got} of {edge.source} never reached stage {stage}"
                self._fail(record, ErrorInfo(ErrorCode.HANDOFF, text, stage=stage, edge=edge.name))
                return
        for port, came in record.came_from(stage).items():
            if visit.state == "active" and probe.sent.get(port, 0) > came:
                source, sent = f"{stage}.{port}", probe.sent[port]
                text = f"chunk {came} of {source} was lost ({sent} were sent)"
                self._fail(record, ErrorInfo(ErrorCode.HANDOFF, text, stage=stage, edge=source))
                return
        record.asked.pop(stage, None)
        if not record.asked:
            record.progress = _now()


def _now() -> float:
    return asyncio.get_running_loop().time()

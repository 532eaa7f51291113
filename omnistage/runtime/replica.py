"""Runs one stage replica in the calling thread: builds the engine, then its loop, and reports why it cannot."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import msgspec
import psutil

from omnistage.config.model import OmniConfig, PipelineConfig, StageContext
from omnistage.connectors.arena import Arena, ArenaView
from omnistage.connectors.hub import ConnectorHub
from omnistage.connectors.inline import InlineConnector, LocalStore
from omnistage.connectors.shm import ShmConnector
from omnistage.errors import ErrorCode, ErrorInfo, OmniError
from omnistage.faults import Faults
from omnistage.messages import StageReady
from omnistage.runtime.loop import StageLoop, Waker, report_fatal
from omnistage.runtime.plan import ReplicaPlan
from omnistage.stages.base import StageEngine
from omnistage.stages.factory import build_engine

logger = logging.getLogger(__name__)


def run_replica(config: OmniConfig, pipeline: PipelineConfig, plan: ReplicaPlan, store: LocalStore) -> bool:
    """Serves until the orchestrator ends it; False when the replica could not start or broke down.

    Owns the socket and closes it, which is how the orchestrator learns of the end.
    """
    stage = plan.replica.stage
    with socket.socket(fileno=plan.socket_fd) as sock:
        try:
            replica = OpenReplica(config, pipeline, plan, store, sock)
            try:
                replica.loop.run(replica.ready())
            finally:
                replica.close()
        except OmniError as error:
            report_fatal(sock, msgspec.structs.replace(error.info, stage=stage))
            return False
        except Exception as error:
            logger.exception("stage %s ended", plan.replica)
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            report_fatal(sock, ErrorInfo(ErrorCode.STAGE_FAILED, cause, stage=stage))
            return False
    return True


@dataclass(frozen=True)
class Pace:
    """How time passes at a replica: its clock (seconds), who runs what engines do beside their steps (None: their own
    threads), and what stands around the engine."""

    clock: Callable[[], float] = time.monotonic
    executor: Executor | None = None
    around: Callable[[StageEngine], StageEngine] = lambda engine: engine


class OpenReplica:
    """A replica's engine, connectors and loop, built in this process. Raises what the engine's component raises."""

    def __init__(
        self,
        config: OmniConfig,
        pipeline: PipelineConfig,
        plan: ReplicaPlan,
        store: LocalStore,
        sock: socket.socket,
        pace: Pace | None = None,
    ) -> None:
        self._started = time.monotonic()
        pace = pace or Pace()
        self._waker = Waker()
        faults = Faults(plan.faults)
        context = StageContext(
            config=config,
            stage=config.stages[plan.replica.stage],
            spec=next(s for s in pipeline.variants[config.variant].stages if s.name == plan.replica.stage),
            model_path=config.model_path,
            replica=plan.replica.index,
            shared=store.objects,
        )
        with store.building:
            self.engine = pace.around(build_engine(context, self._waker.wake, faults, pace.executor))
        faults.hit("engine_built")
        views = {(stage, index): ArenaView(fd) for stage, index, fd in plan.reads}
        shm = ShmConnector(plan.replica.index, Arena(plan.arena_fd), views)
        shm.adopt(plan.extents)
        self.hub = ConnectorHub(InlineConnector(store, plan.replica.index), shm, plan.inline_ports)
        self.loop = StageLoop(
            plan.replica.stage,
            self.engine,
            sock,
            self.hub,
            waker=self._waker,
            credits=plan.credits,
            faults=faults,
            clock=pace.clock,
        )
        self.loop.span_limit = config.trace.spans if config.trace.enabled else 0

    def ready(self) -> StageReady:
        """What the replica reports first."""
        took_s = time.monotonic() - self._started
        return StageReady(pid=os.getpid(), load_s=took_s, rss_bytes=psutil.Process().memory_info().rss)

    def close(self) -> None:
        self._waker.close()
        self.hub.close()

"""Runs one stage replica in the calling thread: builds the engine, then its loop, and reports why it cannot."""

from __future__ import annotations

import logging
import os
import socket
import time

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
from omnistage.stages.factory import build_engine

logger = logging.getLogger(__name__)


def run_replica(config: OmniConfig, pipeline: PipelineConfig, plan: ReplicaPlan, store: LocalStore) -> bool:
    """Serves until the orchestrator ends it; False when the replica could not start or broke down.

    Owns the socket and closes it, which is how the orchestrator learns of the end.
    """
    stage = plan.replica.stage
    with socket.socket(fileno=plan.socket_fd) as sock:
        try:
            _serve(config, pipeline, plan, store, sock)
        except OmniError as error:
            report_fatal(sock, msgspec.structs.replace(error.info, stage=stage))
            return False
        except Exception as error:
            logger.exception("stage %s ended", plan.replica)
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            report_fatal(sock, ErrorInfo(ErrorCode.STAGE_FAILED, cause, stage=stage))
            return False
    return True


def _serve(
    config: OmniConfig, pipeline: PipelineConfig, plan: ReplicaPlan, store: LocalStore, sock: socket.socket
) -> None:
    started = time.monotonic()
    waker = Waker()
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
        engine = build_engine(context, waker.wake, faults)
    faults.hit("engine_built")
    views = {(stage, index): ArenaView(fd) for stage, index, fd in plan.reads}
    shm = ShmConnector(plan.replica.index, Arena(plan.arena_fd), views)
    shm.adopt(plan.extents)
    hub = ConnectorHub(InlineConnector(store, plan.replica.index), shm, plan.inline_ports)
    loop = StageLoop(plan.replica.stage, engine, sock, hub, waker=waker, credits=plan.credits, faults=faults)
    try:
        loop.run(
            StageReady(pid=os.getpid(), load_s=time.monotonic() - started, rss_bytes=psutil.Process().memory_info().rss)
        )
    finally:
        waker.close()
        hub.close()

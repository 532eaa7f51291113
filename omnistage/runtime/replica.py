"""Runs one stage replica in the calling thread: builds the engine, then its loop, and reports why it cannot."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from omnistage.config.model import OmniConfig, PipelineConfig, StageContext
from omnistage.connectors.hub import open_hub
from omnistage.connectors.inline import LocalStore
from omnistage.errors import ConfigError, ErrorCode, ErrorInfo, OmniError
from omnistage.faults import Faults
from omnistage.runtime.journal import SUFFIX, Entry, JournalName, JournalWriter, NotingClock
from omnistage.runtime.journaled import DeliveredExecutor, JournaledEngine, KeptReadings
from omnistage.runtime.loop import StageLoop, Waker, report_fatal
from omnistage.runtime.plan import ReplicaId, ReplicaPlan
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
                replica.loop.run()
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
class EngineSetup:
    """What the engine of a replica is built from."""

    config: OmniConfig
    pipeline: PipelineConfig
    replica: ReplicaId
    store: LocalStore

    def build(
        self,
        wake: Callable[[], None],
        faults: Faults,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> StageEngine:
        """See `build_engine`."""
        stage = self.replica.stage
        context = StageContext(
            config=self.config,
            stage=self.config.stages[stage],
            spec=next(spec for spec in self.pipeline.variants[self.config.variant].stages if spec.name == stage),
            model_path=self.config.model_path,
            replica=self.replica.index,
            shared=self.store.objects,
        )
        with self.store.building:
            return build_engine(context, wake, faults, executor, clock)

    def journaled(
        self,
        wake: Callable[[], None],
        faults: Faults,
        note: Callable[[Entry], object],
        *,
        executor: Executor | None = None,
        clock: KeptReadings | None = None,
    ) -> JournaledEngine:
        """The same inside a journal; one that is given a clock ends work beside its steps only when told."""
        kept = clock or NotingClock()
        threads = executor or ThreadPoolExecutor(1, f"{self.replica.stage}-beside")
        delivered = DeliveredExecutor(threads, wake)
        engine = self.build(wake, faults, delivered, kept)
        return JournaledEngine(engine, note, kept, delivered, delivers=clock is None)


def open_journal(config: OmniConfig, replica: ReplicaId) -> JournalWriter[Entry]:
    """The journal of the replica's next life. Raises ConfigError when the folder cannot be written."""
    folder = Path(config.record.folder)
    try:
        life = len(list(folder.glob(f"{replica.stage}-{replica.index}-*{SUFFIX}")))
        return JournalWriter(folder / JournalName(replica.stage, replica.index, life).file, config.record.max_mb << 20)
    except OSError as error:
        raise ConfigError(f"record.folder: cannot write there: {error.strerror}", param="record.folder") from None


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
        pace = pace or Pace()
        self._waker = Waker()
        faults = Faults(plan.faults)
        self._journal = open_journal(config, plan.replica) if config.record.folder else None
        setup = EngineSetup(config, pipeline, plan.replica, store)
        if self._journal is None:
            engine = setup.build(self._waker.wake, faults, pace.executor, pace.clock)
        else:
            engine = setup.journaled(self._waker.wake, faults, self._journal.write, executor=pace.executor)
        self.engine = pace.around(engine)
        faults.hit("engine_built")
        self.hub = open_hub(plan.replica.index, store, plan.arena_fd, plan.reads, plan.inline_ports, plan.extents)
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

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._waker.close()
        self.hub.close()

"""Entry of a worker process: `python -m omnistage.runtime.worker NAME FD`.

FD is the lifeline: the worker reads its plan from it, and when it closes, however the parent ended, the worker ends.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading

import msgspec

from omnistage.config.registry import load_pipeline
from omnistage.connectors.inline import LocalStore
from omnistage.messages import FrameBuffer
from omnistage.runtime.plan import ReplicaPlan, WorkerPlan
from omnistage.runtime.replica import run_replica

RECEIVE_BYTES = 1 << 16


def main(argv: list[str]) -> int:
    # A supervisor may signal every process of a service: the parent drains, and the lifeline ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {argv[1]} %(levelname)s %(message)s")
    lifeline = socket.socket(fileno=int(argv[2]))
    plan = _read_plan(lifeline)
    threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()
    pipeline = load_pipeline(plan.config.pipeline)
    store = LocalStore()

    def serve(replica: ReplicaPlan) -> None:
        if not run_replica(plan.config, pipeline, replica, store):
            os._exit(1)

    threads = [threading.Thread(target=serve, args=(replica,), name=str(replica.replica)) for replica in plan.replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


def _read_plan(lifeline: socket.socket) -> WorkerPlan:
    buffer = FrameBuffer()
    while data := lifeline.recv(RECEIVE_BYTES):
        for raw in buffer.push(data):
            return msgspec.msgpack.decode(raw, type=WorkerPlan)
    raise SystemExit("the parent closed the lifeline before the plan was read")


def _watch(lifeline: socket.socket) -> None:
    while lifeline.recv(RECEIVE_BYTES):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))

"""Decoding in killable processes: a small pool, spawned ahead, a process killed when it takes too long or dies."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys

import msgspec

from omnistage.config.model import MediaConfig
from omnistage.errors import ErrorCode, OmniError
from omnistage.media.child import MAX_MESSAGE_BYTES, DecodeAnswer, memory_file
from omnistage.media.errors import unsupported
from omnistage.media.jobs import DecodeJob
from omnistage.media.pool import MediaPool
from omnistage.payload import MultimodalPayload, PayloadHeader, read_payload


class ChildDecoder:
    """Decodes in `decode_processes` processes. One that exceeds `decode_timeout_s` or its memory costs its own request
    only, and is replaced."""

    def __init__(self, config: MediaConfig) -> None:
        self._config = config
        self._idle: asyncio.Queue[_Child] = asyncio.Queue()
        self._children = {_Child(config.decode_memory_mb) for _ in range(config.decode_processes)}
        for child in self._children:
            self._idle.put_nowait(child)
        self._pool = MediaPool(config.decode_processes)

    @property
    def pids(self) -> list[int]:
        return sorted(child.pid for child in self._children)

    async def decode(self, job: DecodeJob, data: bytes) -> MultimodalPayload:
        """See `omnistage.media.jobs.decode`."""
        child = await self._idle.get()
        if not child.alive:  # it died while it had nothing to do
            child = self._replaced(child)
        task = asyncio.ensure_future(self._pool.run(child.run, job, data, self._config.decode_timeout_s))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            child.kill()
            raise
        finally:
            task.add_done_callback(lambda done: self._finished(child, done))

    def _finished(self, child: _Child, done: asyncio.Future[MultimodalPayload]) -> None:
        """Takes a child back into the pool, or another in its place."""
        if not done.cancelled():
            done.exception()  # was raised to the caller, unless that is gone
        if child not in self._children:
            return
        self._idle.put_nowait(child if child.alive else self._replaced(child))

    def _replaced(self, child: _Child) -> _Child:
        child.close()
        self._children.discard(child)
        fresh = _Child(self._config.decode_memory_mb)
        self._children.add(fresh)
        return fresh

    def close(self) -> None:
        """Ends the processes at once."""
        children, self._children = self._children, set()
        for child in children:
            child.close()
        self._pool.close()


class _Child:
    """One decoder process."""

    def __init__(self, memory_mb: int) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lifeline, their_lifeline = socket.socketpair()
        ends = (str(theirs.fileno()), str(their_lifeline.fileno()))
        with theirs, their_lifeline:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "omnistage.media.child", *ends, str(memory_mb)),
                pass_fds=(theirs.fileno(), their_lifeline.fileno()),
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal is the parent's
            )
        self._dead = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._dead and self._process.poll() is None

    def run(self, job: DecodeJob, data: bytes, timeout_s: float) -> MultimodalPayload:
        """Blocking. Raises what decoding raises; RequestError when the process dies or takes longer than that."""
        self._socket.settimeout(timeout_s)
        fd = memory_file(len(data))
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            os.lseek(fd, 0, os.SEEK_SET)
            socket.send_fds(self._socket, [msgspec.msgpack.encode(job)], [fd])
            message, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 1)
        except OSError:
            message, fds = b"", []
        finally:
            os.close(fd)
        if not message:
            self.kill()
            raise unsupported("the file could not be decoded within the limits of time and memory", job.param)
        reply = msgspec.msgpack.decode(message, type=DecodeAnswer)
        if reply.error is not None:
            raise OmniError.from_info(reply.error)
        if reply.header is None or not fds:
            raise OmniError("the decoder gave no result", code=ErrorCode.INTERNAL)
        return _payload(reply.header, fds[0])

    def kill(self) -> None:
        self._dead = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kills and reaps the process."""
        self.kill()
        self._process.wait()
        self._socket.close()
        self._lifeline.close()


def _payload(header: PayloadHeader, fd: int) -> MultimodalPayload:
    """The tensors as views of the memory file, whose mapping lives as long as they do."""
    try:
        body = mmap.mmap(fd, header.nbytes, prot=mmap.PROT_READ) if header.nbytes else b""
        return read_payload(header, memoryview(body))
    finally:
        os.close(fd)

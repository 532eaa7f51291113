"""A decoder process: `python -m omnistage.media.child FD MEMORY_MB`. Bytes in, a payload or an error out.

It lives under resource limits, holds no secret, and ends when its parent does. A job and an answer are one message
each; the bytes of both travel in anonymous memory files passed along.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import socket
import sys
import threading

import msgspec

from omnistage.errors import ErrorInfo, OmniError
from omnistage.media.errors import unsupported
from omnistage.media.jobs import DecodeJob, decode
from omnistage.payload import PayloadHeader

MAX_MESSAGE_BYTES = 1 << 20
OPEN_FILES = 64


class DecodeAnswer(msgspec.Struct):
    """`header` describes the memory file that comes along; None with `error`."""

    header: PayloadHeader | None = None
    error: ErrorInfo | None = None


def limit_resources(memory_mb: int) -> None:
    """Bounds this process: address space beyond what it maps now, file sizes, descriptors; no core dumps."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * mmap.PAGESIZE
    wanted = mapped + (memory_mb << 20)
    for kind, value in (
        (resource.RLIMIT_AS, wanted),
        (resource.RLIMIT_FSIZE, memory_mb << 20),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def memory_file(size: int) -> int:
    """A descriptor of an anonymous file of `size` bytes."""
    fd = os.memfd_create("omnistage-media", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def answer(job: DecodeJob, data: bytes) -> tuple[DecodeAnswer, int]:
    """The answer to one job and the memory file with its tensors (-1 without)."""
    try:
        payload = decode(job, data)
    except OmniError as error:
        return DecodeAnswer(error=error.info), -1
    except MemoryError:
        return DecodeAnswer(error=unsupported("decoding needs more memory than is allowed", job.param).info), -1
    header = payload.header()
    fd = memory_file(header.nbytes)
    if header.nbytes:
        with mmap.mmap(fd, header.nbytes) as mapping, memoryview(mapping) as body:
            payload.write(header, body)
    return DecodeAnswer(header), fd


def serve(sock: socket.socket) -> None:
    """Answers jobs until the parent closes the socket."""
    decoder = msgspec.msgpack.Decoder(DecodeJob)
    while True:
        message, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, 1)
        if not message:
            return
        with open(fds[0], "rb") as file:
            data = file.read()
        reply, fd = answer(decoder.decode(message), data)
        socket.send_fds(sock, [msgspec.msgpack.encode(reply)], [fd] if fd >= 0 else [])
        if fd >= 0:
            os.close(fd)


def _end_with_parent(lifeline: socket.socket) -> None:
    lifeline.recv(1)
    os._exit(0)


def main(argv: list[str]) -> int:
    # A supervisor may signal every process of a service: the lifeline ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(argv[1]))
    lifeline = socket.socket(fileno=int(argv[2]))
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    limit_resources(int(argv[3]))
    serve(sock)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

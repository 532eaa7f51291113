"""A reused shared-memory arena: one writer allocates extents, readers map it, acknowledgements free them.

The memory is an anonymous file (memfd), so nothing is left behind however its processes end.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from bisect import bisect

import psutil

from omnistage.errors import ConfigError, IntegrityError
from omnistage.payload import ALIGNMENT


def create_arena_file(size_bytes: int) -> int:
    """A file descriptor of `size_bytes` of reserved shared memory. Raises ConfigError when there is no room."""
    free = psutil.virtual_memory().available
    if size_bytes > free:  # asking for more would have the kernel end a process instead of refusing
        raise ConfigError(
            f"no space for an arena of {size_bytes >> 20} MB: {free >> 20} MB free; lower stages.*.arena_mb"
        )
    if sys.platform == "linux":
        fd = os.memfd_create("omnistage-arena", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"no space for a shared-memory arena of {size_bytes >> 20} MB: {error.strerror}; lower stages.*.arena_mb"
        ) from None
    return fd


class ArenaView:
    """A reader's mapping of a producer's arena."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
        self._bytes = memoryview(self._map)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Read-only bytes of an extent, without a copy."""
        return self._bytes[offset : offset + nbytes]

    def close(self) -> None:
        _unmap(self._map, self._bytes)


class Arena:
    """The writer's side. Extents are first-fit in address order and merge with their neighbours when freed."""

    def __init__(self, fd: int) -> None:
        self.size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.size)
        self._bytes = memoryview(self._map)
        self._free: list[tuple[int, int]] = [(0, self.size)]  # (offset, bytes), ascending, never adjacent
        self._used: dict[int, int] = {}

    @property
    def used_bytes(self) -> int:
        return sum(self._used.values())

    def reserve(self, offset: int, nbytes: int) -> None:
        """Marks an extent that a previous writer left and a reader still views as used."""
        need = _padded(nbytes)
        for index, (start, length) in enumerate(self._free):
            if start <= offset and offset + need <= start + length:
                rest = [(start, offset - start), (offset + need, start + length - offset - need)]
                self._free[index : index + 1] = [piece for piece in rest if piece[1]]
                self._used[offset] = need
                return
        raise IntegrityError(f"extent at {offset} is not free")

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a new extent, or None when no gap is large enough."""
        need = _padded(nbytes)
        for index, (start, length) in enumerate(self._free):
            if length < need:
                continue
            self._free[index : index + 1] = [(start + need, length - need)] if length > need else []
            self._used[start] = need
            return start
        return None

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes of an extent."""
        return self._bytes[offset : offset + nbytes]

    def free(self, offset: int) -> None:
        """Gives an extent back. Raises KeyError when it is not in use."""
        length = self._used.pop(offset)
        index = bisect(self._free, (offset, length))
        self._free.insert(index, (offset, length))
        self._merge(index)
        if index:
            self._merge(index - 1)

    def _merge(self, index: int) -> None:
        if index + 1 < len(self._free):
            (start, length), (following, more) = self._free[index], self._free[index + 1]
            if start + length == following:
                self._free[index : index + 2] = [(start, length + more)]

    def close(self) -> None:
        _unmap(self._map, self._bytes)

    def check_integrity(self) -> None:
        """Free and used extents tile the arena exactly."""
        position = 0
        for start, length in sorted([*self._free, *self._used.items()]):
            if start != position:
                raise IntegrityError(f"arena has a gap or overlap at byte {position}")
            position = start + length
        if position != self.size:
            raise IntegrityError("arena extents do not reach its end")


def _unmap(mapping: mmap.mmap, view: memoryview) -> None:
    """Unmaps, unless arrays still view the memory: then it goes with the last of them."""
    try:
        view.release()
        mapping.close()
    except BufferError:
        return


def _padded(nbytes: int) -> int:
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT

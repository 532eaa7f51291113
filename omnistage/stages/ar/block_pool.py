"""The paged KV cache's books: which block belongs to whom, and which holds content that can be reused. Torch-free.

A block holds the rows of `block_size` consecutive positions of a sequence. Full blocks may be registered under a hash
of everything that determines their rows; sequences with the same beginning then share them. A block is *held* while
its reference count is above 0. Blocks that nobody holds are free, whether or not they still carry reusable content;
the least recently used is taken first, so content lives as long as there is room.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice

from omnistage.errors import IntegrityError
from omnistage.stages.ar.sequence import ContentSpan

HASH_BYTES = 16


def block_hash(parent: bytes, tokens: Sequence[int], start: int, content: Iterable[ContentSpan] = ()) -> bytes:
    """The key of a full block at position `start`: its tokens, the content spans that touch it, all before it
    (`parent`).

    The parent of a first block is the salt of the request.
    """
    digest = blake2b(digest_size=HASH_BYTES)
    digest.update(len(parent).to_bytes(4, "little") + parent)
    digest.update(array("q", tokens).tobytes())
    for span in content:
        if span.start < start + len(tokens) and span.stop > start:
            digest.update(array("q", (span.start - start, span.stop - start, len(span.key))).tobytes() + span.key)
    return digest.digest()


class BlockPool:
    """`total` blocks of `block_size` positions."""

    def __init__(self, total: int, block_size: int) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"a block pool needs at least one block of one position, not {total} of {block_size}")
        self.total = total
        self.block_size = block_size
        self.evictions = 0
        self._references = [0] * total
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))

    @property
    def available(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of known hashes, from the first on. Takes no reference."""
        found: list[int] = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(self, shared: Sequence[int], fresh: int) -> list[int] | None:
        """References `shared` (from `match`) and `fresh` more blocks, all or nothing: None when there are too few."""
        idle = sum(1 for block in shared if not self._references[block])
        if fresh > len(self._free) - idle:
            return None
        for block in shared:
            self._hold(block)
        taken = list(islice(self._free, fresh))
        for block in taken:
            self._hold(block)
            self._forget(block)
        return [*shared, *taken]

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each block. The end of a sequence is reused before its beginning."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise IntegrityError(f"block {block} was released more often than held")
            self._references[block] -= 1
            if self._references[block]:
                continue
            self._free[block] = None
            if block not in self._hash_of:
                self._free.move_to_end(block, last=False)

    def register(self, block: int, key: bytes) -> None:
        """Makes a held, full block findable under `key`; the first block of a key stays the one that is found."""
        if key not in self._block_of and block not in self._hash_of:
            self._block_of[key] = block
            self._hash_of[block] = key

    def shared_blocks(self) -> int:
        """Blocks that more than one sequence holds now."""
        return sum(1 for count in self._references if count > 1)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises IntegrityError unless the references are exactly those of `tables` (every sequence's blocks)."""
        counted = [0] * self.total
        for table in tables:
            for block in table:
                counted[block] += 1
        wrong = [block for block, count in enumerate(counted) if count != self._references[block]]
        if wrong:
            raise IntegrityError(f"blocks {wrong[:8]} are held by another number of sequences than the pool counts")
        if set(self._free) != {block for block, count in enumerate(counted) if not count}:
            raise IntegrityError("the free list is not the set of blocks that nobody holds")
        if {block: key for key, block in self._block_of.items()} != self._hash_of:
            raise IntegrityError("the hash tables of the block pool disagree")

    def _hold(self, block: int) -> None:
        self._references[block] += 1
        self._free.pop(block, None)

    def _forget(self, block: int) -> None:
        key = self._hash_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            self.evictions += 1

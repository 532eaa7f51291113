from __future__ import annotations

import pytest

from omnistage.errors import IntegrityError
from omnistage.stages.ar.block_pool import BlockPool, block_hash
from omnistage.stages.ar.sequence import ContentSpan


def take(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.acquire((), count)
    assert blocks is not None
    return blocks


def test_acquire_is_all_or_nothing() -> None:
    pool = BlockPool(4, 16)
    held = take(pool, 3)
    assert pool.acquire((), 2) is None
    assert pool.available == 1
    pool.check_integrity([held])


def test_registered_content_outlives_its_holder_until_the_room_is_needed() -> None:
    pool = BlockPool(3, 2)
    first = take(pool, 1)
    pool.register(first[0], b"a")
    pool.release(first)
    assert pool.match([b"a"]) == first
    take(pool, 2)
    assert pool.match([b"a"]) == first, "blocks without content are taken first"
    take(pool, 1)
    assert pool.match([b"a"]) == []
    assert pool.evictions == 1


def test_least_recently_used_content_goes_first() -> None:
    pool = BlockPool(2, 2)
    old, new = take(pool, 1), take(pool, 1)
    pool.register(old[0], b"old")
    pool.register(new[0], b"new")
    pool.release(new)
    pool.release(old)
    again = pool.acquire(pool.match([b"new"]), 0)
    assert again == new
    pool.release(new)
    take(pool, 1)
    assert pool.match([b"old"]) == []
    assert pool.match([b"new"]) == new


def test_the_end_of_a_sequence_is_reused_before_its_beginning() -> None:
    pool = BlockPool(3, 2)
    blocks = take(pool, 3)
    for block, key in zip(blocks, [b"1", b"2", b"3"], strict=True):
        pool.register(block, key)
    pool.release(blocks)
    take(pool, 1)
    assert pool.match([b"1", b"2", b"3"]) == blocks[:2]


def test_shared_blocks_that_are_idle_do_not_count_as_room() -> None:
    pool = BlockPool(2, 2)
    blocks = take(pool, 1)
    pool.register(blocks[0], b"a")
    pool.release(blocks)
    assert pool.acquire(blocks, 2) is None
    assert pool.acquire(blocks, 1) is not None
    assert pool.available == 0


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(2, 2)
    one = take(pool, 1)
    pool.register(one[0], b"a")
    two = pool.acquire(pool.match([b"a"]), 0)
    assert two == one
    assert pool.shared_blocks() == 1
    pool.release(one)
    assert pool.available == 1
    pool.release(two)
    assert pool.available == 2


def test_first_block_of_a_key_stays_the_one_that_is_found() -> None:
    pool = BlockPool(2, 2)
    blocks = take(pool, 2)
    pool.register(blocks[0], b"a")
    pool.register(blocks[1], b"a")
    assert pool.match([b"a"]) == blocks[:1]
    pool.check_integrity([blocks])


def test_releasing_too_often_is_found() -> None:
    pool = BlockPool(2, 2)
    blocks = take(pool, 1)
    pool.release(blocks)
    with pytest.raises(IntegrityError, match="more often"):
        pool.release(blocks)


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[0, 1]]])
def test_books_that_do_not_match_the_holders_are_found(tables: list[list[int]]) -> None:
    pool = BlockPool(2, 2)
    take(pool, 1)
    with pytest.raises(IntegrityError):
        pool.check_integrity(tables)


@pytest.mark.parametrize(("total", "size"), [(0, 1), (1, 0)])
def test_a_pool_without_room_is_refused(total: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(total, size)


def test_hash_depends_on_everything_that_determines_the_rows() -> None:
    image = ContentSpan(6, 9, b"image")
    base = block_hash(b"parent", [1, 2, 3, 4], 4, [image])
    others = [
        block_hash(b"other", [1, 2, 3, 4], 4, [image]),
        block_hash(b"parent", [1, 2, 3, 5], 4, [image]),
        block_hash(b"parent", [1, 2, 3, 4], 4, []),
        block_hash(b"parent", [1, 2, 3, 4], 4, [ContentSpan(6, 9, b"picture")]),
        block_hash(b"parent", [1, 2, 3, 4], 4, [ContentSpan(5, 8, b"image")]),
        block_hash(b"parent", [1, 2, 3, 4], 4, [ContentSpan(6, 10, b"image")]),
    ]
    assert len({base, *others}) == 7
    assert base == block_hash(b"parent", [1, 2, 3, 4], 4, [image, ContentSpan(20, 30, b"elsewhere")])

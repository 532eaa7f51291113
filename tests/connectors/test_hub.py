import os

import numpy as np

from omnistage.connectors.arena import Arena, ArenaView, create_arena_file
from omnistage.connectors.base import BODY_LIMIT
from omnistage.connectors.hub import ConnectorHub
from omnistage.connectors.inline import InlineConnector, LocalStore
from omnistage.connectors.shm import ShmConnector
from omnistage.messages import ChunkKey
from omnistage.payload import MultimodalPayload

SIZE = 1 << 18


def key(seq: int) -> ChunkKey:
    return ChunkKey("r", 0, "talker.codes", seq)


def pair(inline: frozenset[str] = frozenset()) -> tuple[ConnectorHub, ConnectorHub, int]:
    """A producer's hub, a consumer's hub, and the arena's descriptor."""
    fd, store = create_arena_file(SIZE), LocalStore()
    producer = ConnectorHub(InlineConnector(store, 0), ShmConnector(0, Arena(fd), {}), inline)
    views = {("talker", 0): ArenaView(fd)}
    consumer = ConnectorHub(InlineConnector(store, 0), ShmConnector(0, None, views), frozenset())
    return producer, consumer, fd


def test_small_payload_rides_in_the_message_and_large_one_in_the_arena() -> None:
    producer, consumer, fd = pair()
    for seq, size in enumerate((4, BODY_LIMIT)):
        array = np.arange(size, dtype=np.float32)
        chunk = producer.store("codes", key(seq), True, MultimodalPayload.of({"n": size}, codes=array))
        assert (chunk.offset >= 0) == (size * 4 > BODY_LIMIT)
        back = consumer.load(chunk)
        np.testing.assert_array_equal(back["codes"], array)
        assert back.meta == {"n": size}
        producer.release(key(seq))
    assert producer.held() == 0
    producer.check_integrity()
    os.close(fd)


def test_full_arena_spills_into_the_message() -> None:
    producer, consumer, fd = pair()
    array = np.ones(SIZE // 8, np.float32)  # half the arena
    chunks = [producer.store("codes", key(i), False, MultimodalPayload.of(codes=array)) for i in range(3)]
    assert [chunk.offset >= 0 for chunk in chunks] == [True, True, False]
    assert producer.counters()["spilled_chunks"] == 1
    for chunk in chunks:
        np.testing.assert_array_equal(consumer.load(chunk)["codes"], array)
        producer.release(chunk.key)
    producer.check_integrity()
    os.close(fd)


def test_inline_hands_over_the_very_array() -> None:
    producer, consumer, fd = pair(frozenset({"codes"}))
    array = np.ones(4, np.float32)
    chunk = producer.store("codes", key(0), True, MultimodalPayload.of(codes=array))
    released: list[int] = []
    payload = consumer.load(chunk, lambda: released.append(1))
    assert np.shares_memory(payload["codes"], array)
    payload.release()
    producer.release(key(0))
    assert (released, producer.held()) == ([1], 0)
    os.close(fd)


def test_a_view_of_shared_memory_is_not_a_copy() -> None:
    producer, consumer, fd = pair()
    chunk = producer.store("codes", key(0), True, MultimodalPayload.of(codes=np.zeros(BODY_LIMIT, np.float32)))
    first, second = consumer.load(chunk), consumer.load(chunk)
    assert np.shares_memory(first["codes"], second["codes"])
    os.close(fd)

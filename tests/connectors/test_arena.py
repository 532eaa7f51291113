import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omnistage.connectors.arena import Arena, ArenaView, create_arena_file
from omnistage.errors import ConfigError, IntegrityError

SIZE = 1 << 14


def test_reader_sees_what_the_writer_wrote() -> None:
    fd = create_arena_file(SIZE)
    arena, view = Arena(fd), ArenaView(fd)
    offset = arena.allocate(5)
    assert offset is not None
    arena.view(offset, 5)[:] = b"hello"
    assert bytes(view.view(offset, 5)) == b"hello"
    os.close(fd)


def test_full_arena_gives_none_and_a_freed_extent_is_used_again() -> None:
    fd = create_arena_file(SIZE)
    arena = Arena(fd)
    whole = arena.allocate(SIZE)
    assert whole == 0
    assert arena.allocate(1) is None
    arena.free(0)
    assert arena.allocate(SIZE) == 0
    os.close(fd)


def test_adopted_extent_is_not_given_out_and_overlap_is_an_error() -> None:
    fd = create_arena_file(SIZE)
    arena = Arena(fd)
    arena.reserve(0, 100)
    with pytest.raises(IntegrityError):
        arena.reserve(64, 10)
    assert arena.allocate(100) == 128
    os.close(fd)


def test_no_room_for_an_arena_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="arena_mb"):
        create_arena_file(1 << 50)


class ArenaMachine(RuleBasedStateMachine):
    """Random allocation and release: extents never overlap, everything freed makes one gap again."""

    def __init__(self) -> None:
        super().__init__()
        self.fd = create_arena_file(SIZE)
        self.arena = Arena(self.fd)
        self.held: dict[int, int] = {}

    @rule(nbytes=st.integers(0, SIZE))
    def allocate(self, nbytes: int) -> None:
        offset = self.arena.allocate(nbytes)
        if offset is None:
            return
        for other, length in self.held.items():
            assert offset + nbytes <= other or other + length <= offset
        self.held[offset] = nbytes

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            offset = data.draw(st.sampled_from(sorted(self.held)))
            del self.held[offset]
            self.arena.free(offset)

    @invariant()
    def books_add_up(self) -> None:
        self.arena.check_integrity()

    def teardown(self) -> None:
        for offset in self.held:
            self.arena.free(offset)
        assert self.arena.allocate(SIZE) == 0
        os.close(self.fd)


TestArenaMachine = ArenaMachine.TestCase

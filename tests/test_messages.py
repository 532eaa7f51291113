import msgspec
import pytest

from omnistage.messages import MAX_FRAME_BYTES, Abort, FrameBuffer, FromStage, ToStage, frame


def test_frames_are_cut_wherever_the_stream_is() -> None:
    messages = [FromStage(batch=["a"]), FromStage(batch=["b", "c" * 300]), FromStage()]
    stream = b"".join(frame(message) for message in messages)
    for size in (1, 3, 7, len(stream)):
        buffer = FrameBuffer()
        raws = [raw for i in range(0, len(stream), size) for raw in buffer.push(stream[i : i + size])]
        assert [msgspec.msgpack.decode(raw, type=FromStage) for raw in raws] == messages


def test_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="frame of"):
        list(FrameBuffer().push((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))


def test_message_round_trip() -> None:
    message = ToStage(aborts=[Abort("r", 2, {"text": 3})], shutdown=True)
    (raw,) = FrameBuffer().push(frame(message))
    assert msgspec.msgpack.decode(raw, type=ToStage) == message

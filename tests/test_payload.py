import numpy as np
import pytest

from omnistage.payload import ALIGNMENT, MultimodalPayload, PayloadHeader, Tensor, TensorHeader, read_payload


def round_trip(payload: MultimodalPayload) -> MultimodalPayload:
    header = payload.header()
    body = bytearray(header.nbytes)
    payload.write(header, memoryview(body))
    return read_payload(header, bytes(body))


def test_tensors_and_metadata_survive() -> None:
    audio = np.linspace(-1, 1, 7, dtype=np.float32)[None]
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    back = round_trip(MultimodalPayload.of({"sample_rate": 24000}, audio=audio, image=image))
    assert back.meta == {"sample_rate": 24000}
    np.testing.assert_array_equal(back["audio"], audio)
    np.testing.assert_array_equal(back["image"], image)


def test_bfloat16_bits_travel_as_they_are() -> None:
    bits = np.array([0x3F80, 0xC000], np.uint16)
    back = round_trip(MultimodalPayload({"kv": Tensor("bfloat16", bits)}))
    assert back.tensors["kv"].dtype == "bfloat16"
    np.testing.assert_array_equal(back["kv"], bits)


def test_views_are_read_only_and_aligned() -> None:
    payload = MultimodalPayload.of(a=np.zeros(3, np.uint8), b=np.ones(2, np.float64))
    assert all(row.offset % ALIGNMENT == 0 for row in payload.header().tensors)
    with pytest.raises(ValueError, match="read-only"):
        round_trip(payload)["b"][0] = 5


@pytest.mark.parametrize(
    "row",
    [
        TensorHeader("a", "object", (1,), 0, 8),
        TensorHeader("a", "float32", (4,), 0, 8),
        TensorHeader("a", "float32", (-1,), 0, 4),
        TensorHeader("a", "float32", (4,), 8, 16),
        TensorHeader("a", "float32", (4,), -8, 16),
    ],
)
def test_header_that_does_not_fit_its_body_is_refused(row: TensorHeader) -> None:
    with pytest.raises(ValueError, match=r"dtype|fit|negative"):
        read_payload(PayloadHeader((row,), {}, 16), bytes(16))


def test_release_runs_once_and_twice_is_an_error() -> None:
    calls: list[int] = []
    payload = MultimodalPayload(on_release=lambda: calls.append(1))
    payload.release()
    assert calls == [1]
    with pytest.raises(RuntimeError, match="twice"):
        payload.release()

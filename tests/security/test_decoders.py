"""Every decoder of outside bytes takes any bytes: a result within the limits, or the one error it names, and soon."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.config.model import LimitsConfig, MediaConfig
from omnistage.entrypoints.http.access import key_of
from omnistage.errors import ErrorCode, ErrorInfo, OmniError, RequestError
from omnistage.media.child import DecodeAnswer
from omnistage.media.data_url import decode_base64, decode_data_url
from omnistage.media.fetch import parse_target
from omnistage.media.files import read_file_url
from omnistage.media.isolate import ChildDecoder
from omnistage.media.jobs import DecodeJob, decode
from omnistage.media.sniff import container_of
from omnistage.messages import MAX_FRAME_BYTES, FrameBuffer, FromStage, ToStage
from omnistage.payload import PayloadHeader, TensorHeader, read_payload
from omnistage.runtime.plan import WorkerPlan
from tests.entrypoints.http.test_fuzz import shared_app
from tests.fuzzing import examples, repeatable
from tests.security.corpus import COUNT, broken, good

LIMITS = LimitsConfig(max_audio_s=5, max_image_pixels=1 << 16, max_video_frames=30)
MORE = settings(max_examples=examples(120), deadline=None, derandomize=repeatable())
ALLOWED = {ErrorCode.UNSUPPORTED_MEDIA, ErrorCode.TOO_LARGE, ErrorCode.INVALID_REQUEST}


def job(kind: str) -> DecodeJob:
    return DecodeJob(kind=kind, limits=LIMITS, param="file", with_sound=True)  # type: ignore[arg-type]


def refusal(job: DecodeJob, data: bytes) -> ErrorInfo | None:
    """The error of decoding; None when it gives something, which is within the limits then."""
    try:
        payload = decode(job, data)
    except RequestError as error:
        return error.info
    assert payload.nbytes < 64 << 20
    return None


def check(info: ErrorInfo) -> None:
    assert info.code in ALLOWED
    assert info.param == "file"
    assert not any(word in info.message for word in ("0x", "object at", "Errno", "/", "libav"))


def test_good_files_of_the_corpus_are_good() -> None:
    for kind, data in good():
        assert decode(job(kind), data).nbytes > 0


def test_two_hundred_broken_files_each_end_in_a_result_or_a_named_error() -> None:
    files = broken()
    assert len({data for _, data in files}) >= COUNT * 0.95
    refused = 0
    for kind, data in files:
        started = time.monotonic()
        info = refusal(job(kind), data)
        if info is not None:
            refused += 1
            check(info)
        assert time.monotonic() - started < 3
    assert refused > COUNT / 2


@pytest.mark.slow
async def test_broken_files_cost_no_decoder_process() -> None:
    decoder = ChildDecoder(MediaConfig(decode_processes=2, decode_memory_mb=1024))
    try:
        pids = decoder.pids
        results = await asyncio.gather(*(decoder.decode(job(k), d) for k, d in broken()), return_exceptions=True)
        unexpected = [r for r in results if isinstance(r, BaseException) and not isinstance(r, OmniError)]
        assert unexpected == []
        assert decoder.pids == pids
    finally:
        decoder.close()


@MORE
@given(data=st.binary(max_size=400), head=st.sampled_from([data[:48] for _, data in good()]))
def test_any_bytes_after_a_true_header(data: bytes, head: bytes) -> None:
    for kind in ("image", "audio", "video"):
        info = refusal(job(kind), head + data)
        if info is not None:
            check(info)
    container_of(data)


@MORE
@given(data=st.binary(max_size=300))
def test_any_bytes_on_a_socket_between_processes(data: bytes) -> None:
    for kind in (ToStage, FromStage, WorkerPlan, DecodeJob, DecodeAnswer, PayloadHeader):
        try:
            msgspec.msgpack.decode(data, type=kind)
        except msgspec.DecodeError:
            continue
    try:
        frames = list(FrameBuffer().push(data))
    except ValueError:
        assert int.from_bytes(data[:4], "little") > MAX_FRAME_BYTES or len(data) > 4
    else:
        assert sum(map(len, frames)) <= len(data)


sides = st.integers(-(2**63), 2**63 - 1)
headers = st.builds(
    TensorHeader,
    name=st.text(max_size=4),
    dtype=st.sampled_from(["float32", "bfloat16", "uint8", "object", "O", "V4", "<U2", "bool", ""]),
    shape=st.lists(sides | st.integers(-2, 5), max_size=4).map(tuple),
    offset=sides | st.integers(-8, 80),
    nbytes=sides | st.integers(-8, 80),
)


@MORE
@given(rows=st.lists(headers, max_size=3), body=st.binary(max_size=64))
def test_any_tensor_header_views_its_body_or_is_refused(rows: list[TensorHeader], body: bytes) -> None:
    try:
        payload = read_payload(PayloadHeader(tuple(rows), {}, len(body)), body)
    except (ValueError, OverflowError):
        return
    for tensor in payload.tensors.values():
        assert tensor.nbytes <= len(body)
        assert not tensor.array.flags.writeable


@MORE
@given(
    text=st.text(max_size=60),
    prefix=st.sampled_from(["", "data:", "data:x;base64,", "http://", "file:///r/", "http://["]),
)
def test_any_url_is_read_or_refused(text: str, prefix: str) -> None:
    for read in (
        lambda: decode_data_url(prefix + text, 1000, "url"),
        lambda: decode_base64(text, 1000, "url"),
        lambda: parse_target(prefix + text, "url"),
        lambda: read_file_url(prefix + text, "/r", 1000, "url"),
    ):
        params = set[str | None]()
        try:
            read()
        except RequestError as error:
            params.add(error.info.param)
        assert params <= {"url"}


@MORE
@given(value=st.binary(max_size=80), name=st.sampled_from([b"authorization", b"sec-websocket-protocol", b"x"]))
def test_any_header_is_a_key_or_none(value: bytes, name: bytes) -> None:
    assert isinstance(key_of({"headers": [(name, value), (b"authorization", b"Basic " + value)]}), bytes)


PIECES = (
    b"--x\r\n",
    b"--x--",
    b"\r\n\r\n",
    b'content-disposition: form-data; name="file"\r\n',
    b'content-disposition: form-data; name="a"; filename="../b"\r\n',
)


@MORE
@given(
    data=st.binary(max_size=200),
    boundary=st.sampled_from([b"x", b"", b'"', b"x" * 80, b"\xff"]),
    parts=st.lists(st.sampled_from(PIECES), max_size=8),
)
def test_any_multipart_body_is_a_4xx(data: bytes, boundary: bytes, parts: list[bytes]) -> None:
    status = asyncio.run(upload(b"".join(parts) + data, b"multipart/form-data; boundary=" + boundary))
    assert 400 <= status < 500


async def upload(body: bytes, content_type: bytes) -> int:
    sent: list[Any] = []
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return incoming.pop() if incoming else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", content_type)]
    scope = {"type": "http", "method": "POST", "path": "/v1/audio/transcriptions", "headers": headers}
    async with asyncio.timeout(5):
        await shared_app()(scope, receive, send)
    status: int = sent[0]["status"]
    return status

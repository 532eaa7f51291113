"""Cosmos3 behind the HTTP front: pictures, video jobs from queued to deleted, files at once, actions."""

from __future__ import annotations

import asyncio
import base64
import io
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.media.image_encode import encode_image
from omnistage.testing.leakcheck import settled
from tests.entrypoints.http.real import Running, serving_engine
from tests.models.cosmos3.conftest import Make

pytestmark = pytest.mark.slow
SMALL: dict[str, Any] = {"size": "48x32", "num_inference_steps": 3, "seed": 4}


@pytest.fixture
async def served(tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    """A server that leaves nothing in the folder for temporary files when it ends."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = resolve_config(str(tiny("base").folder), None, {"placement": "inline", "served_name": "cosmos"})
    async with AsyncOmniEngine(config) as engine:
        async with serving_engine(engine) as running:
            yield running
        await settled(engine)
    assert list(tmp_path.iterdir()) == []


def video_of(data: bytes) -> tuple[int, int, int]:
    """Frames, width, height of an mp4."""
    with av.open(io.BytesIO(data)) as file:
        frames = list(file.decode(video=0))
        return len(frames), frames[0].width, frames[0].height


async def test_official_client_makes_a_picture(served: Running) -> None:
    response = await served.client.images.generate(
        model="cosmos", prompt="a cup", size="48x64", extra_body={"num_inference_steps": 3, "seed": 1}
    )
    assert Image.open(io.BytesIO(base64.b64decode(response.data[0].b64_json))).size == (48, 64)


async def test_streamed_picture_comes_with_partial_pictures(served: Running) -> None:
    stream = await served.client.images.generate(
        model="cosmos", prompt="a cup", size="48x64", stream=True, partial_images=2,
        extra_body={"num_inference_steps": 6, "seed": 1},
    )  # fmt: skip
    events = [event async for event in stream]
    # The first preview finds the decode thread idle; the second gives way when the first takes longer than the steps.
    kinds = [event.type for event in events]
    assert kinds[-1] == "image_generation.completed"
    assert kinds[:-1] in (["image_generation.partial_image"], ["image_generation.partial_image"] * 2)
    assert {Image.open(io.BytesIO(base64.b64decode(event.b64_json))).size for event in events} == {(48, 64)}


async def until_done(served: Running, job_id: str) -> Any:
    async with asyncio.timeout(60):
        while (job := await served.client.videos.retrieve(job_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
    return job


async def test_video_job_from_queued_to_deleted(served: Running) -> None:
    job = await served.client.videos.create(
        model="cosmos", prompt="rain", size="48x32", extra_body={"num_frames": 9, "num_inference_steps": 6}
    )
    assert (job.status, job.progress, job.object) == ("queued", 0, "video")
    done = await until_done(served, job.id)
    assert (done.status, done.progress, done.error, done.size) == ("completed", 100, None, "48x32")
    content = await served.client.videos.download_content(job.id)
    assert video_of(content.content) == (9, 48, 32)
    page = await served.client.videos.list()
    assert [video.id for video in page.data] == [job.id]
    deleted = await served.client.videos.delete(job.id)
    assert deleted.deleted
    assert (await served.http.get(f"/v1/videos/{job.id}")).status_code == 404


async def test_files_of_jobs_lie_where_only_the_server_may_look_and_go_with_it(served: Running, tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []
    job = (await served.http.post("/v1/videos", json={"prompt": "rain", "num_frames": 5} | SMALL)).json()
    await until_done(served, job["id"])
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in folder.iterdir()] == [f"{job['id']}.mp4"]


async def test_progress_grows_and_delete_stops_the_work(served: Running) -> None:
    body = {"prompt": "long", "num_frames": 13} | SMALL | {"num_inference_steps": 400}
    job = (await served.http.post("/v1/videos", json=body)).json()
    seen = set[int]()
    async with asyncio.timeout(60):
        while len(seen) < 3:
            seen.add((await served.http.get(f"/v1/videos/{job['id']}")).json()["progress"])
            await asyncio.sleep(0.02)
    assert max(seen) < 100
    assert (await served.http.delete(f"/v1/videos/{job['id']}")).status_code == 200
    await served.engine.idle()
    await asyncio.sleep(0.3)
    (replica,) = served.engine.runtime.of_stage("diffusion")
    steps = replica.counters["steps"]
    await asyncio.sleep(0.3)
    assert replica.counters["steps"] == steps < 400


async def test_failed_job_says_why(served: Running) -> None:
    job = (await served.http.post("/v1/videos", json={"prompt": "x", "size": "50x32"})).json()
    done = await until_done(served, job["id"])
    assert done.status == "failed"
    assert "multiple of 16" in done.error.message
    content = await served.http.get(f"/v1/videos/{job['id']}/content")
    assert content.status_code == 404


async def test_sync_answers_with_the_file_also_from_an_uploaded_picture(served: Running) -> None:
    body = {"prompt": "x", "num_frames": 5} | SMALL
    plain = await served.http.post("/v1/videos/sync", json=body)
    assert plain.headers["content-type"] == "video/mp4"
    assert video_of(plain.content) == (5, 48, 32)
    picture = encode_image(np.full((32, 48, 3), 90, np.uint8), "png")
    form = {key: str(value) for key, value in body.items()}
    files = {"input_reference": ("a.png", picture, "image/png")}
    shown = await served.http.post("/v1/videos/sync", data=form, files=files)
    assert video_of(shown.content) == (5, 48, 32)
    assert shown.content != plain.content


async def test_actions_are_numbers(served: Running) -> None:
    picture = base64.b64encode(encode_image(np.full((32, 48, 3), 90, np.uint8), "png")).decode()
    action = {
        "mode": "policy", "domain_name": "bridge_orig_lerobot", "resolution_tier": 256, "chunk_size": 6,
        "image": f"data:image/png;base64,{picture}",
    }  # fmt: skip
    body = {"prompt": "Lift", "action": action, "num_inference_steps": 2, "guidance_scale": 1.0, "fps": 5.0, "seed": 2}
    answer = (await served.http.post("/v1/actions", json=body)).json()
    assert (answer["shape"], answer["domain"], answer["fps"]) == ([6, 10], "bridge_orig_lerobot", 5.0)
    assert np.array(answer["data"]).shape == (6, 10)
    assert answer["timing"]["e2el_s"] > 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/videos", {"prompt": "x", "seconds": 0}, "seconds"),
        ("/v1/videos", {"prompt": "x", "seconds": 1, "num_frames": 5}, "seconds"),
        ("/v1/videos", {"prompt": "x", "image": "http://example.com/a.png"}, "image"),
        ("/v1/videos", {"prompt": "x", "frames": 5}, "frames"),
        ("/v1/actions", {"prompt": "x"}, "action"),
    ],
)
async def test_bad_field_is_named(served: Running, path: str, body: dict[str, Any], param: str) -> None:
    response = await served.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=nobody", "colour=red"])
async def test_bad_query_is_named(served: Running, query: str) -> None:
    response = await served.http.get(f"/v1/videos?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.partition("=")[0]

"""The page's pictures and video jobs in a real browser when something goes wrong, over a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from omnistage.config.model import EdgeSpec, StageSpec, Variant
from omnistage.errors import ErrorCode, OmniError
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest, OmniRequestOutput
from tests.browser import chromium, until
from tests.entrypoints.http.conftest import Running, Start
from tests.entrypoints.http.fake_engine import PIPELINE, FakeEngine, Media, last_event

pytestmark = pytest.mark.slow
MODALITIES = ("image", "partial", "video", "progress")
DIT = StageSpec(name="dit", kind="diffusion", component="", outputs={name: name for name in MODALITIES})
EDGES = tuple(EdgeSpec(f"dit.{name}", f"client.{name}") for name in MODALITIES)


class Studio:
    """Pictures and videos: of a "broken" prompt an error after the first step, of a "slow" one when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def script(self, request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        prompt = str(request.prompt)
        yield self._output(request, "progress", MultimodalPayload(meta={"step": 1, "steps": 4}))
        if request.task == "image" and "partial" in (request.modalities or ()):
            yield self._output(request, "partial", self._frames(image=np.zeros((3, 32, 48), np.uint8)))
        if "slow" in prompt:
            await self.go.wait()
        if "broken" in prompt:
            raise OmniError("stage dit died", code=ErrorCode.STAGE_DIED)
        if request.task == "image":
            yield self._output(request, "image", self._frames(image=np.full((3, 32, 48), 200, np.uint8)))
        else:
            yield self._output(request, "video", self._frames(video=np.zeros((4, 32, 48, 3), np.uint8)))
        yield last_event(request)

    def _output(self, request: OmniRequest, modality: str, payload: MultimodalPayload) -> OmniRequestOutput:
        return OmniRequestOutput(request_id=request.id, stage="dit", modality=modality, payload=payload)

    def _frames(self, **tensors: Any) -> MultimodalPayload:
        return MultimodalPayload.of({"fps": 4}, **tensors)


class Page:
    def __init__(self, browser: Chrome, url: str) -> None:
        self.browser, self.url = browser, url

    def open(self) -> None:
        self.browser.get(self.url + "/")
        until(self.browser.find_element(By.ID, "films").is_displayed, "the page offers videos", 20)

    def film(self, plot: str) -> None:
        self.fill("plot", plot)
        self.browser.find_element(By.CSS_SELECTOR, "#film button").click()

    def draw(self, scene: str) -> None:
        self.fill("scene", scene)
        self.browser.find_element(By.CSS_SELECTOR, "#draw button").click()

    def fill(self, name: str, value: str) -> None:
        self.browser.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, value)

    def texts(self, css: str) -> list[str]:
        found: list[str] = self.browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)", css
        )
        return found

    def until_texts(self, css: str, *expected: str) -> None:
        def there() -> bool:
            texts = self.texts(css)
            return len(texts) == len(expected) and all(want in text for want, text in zip(expected, texts, strict=True))

        until(there, f"{css} says {expected}", 20)


def _walk(page: Page, running: Running, studio: Studio, loop: asyncio.AbstractEventLoop) -> None:
    page.open()
    page.film("broken")
    page.until_texts(".job span", "failed: stage dit died")
    page.film("slow one")
    page.film("slow two")
    page.until_texts(".job span", "in_progress 25 %", "in_progress 25 %", "failed")
    page.open()
    page.until_texts(".job span", "in_progress 25 %", "in_progress 25 %", "failed")
    newest = httpx.get(f"{page.url}/v1/videos").json()["data"][0]["id"]
    httpx.delete(f"{page.url}/v1/videos/{newest}").raise_for_status()
    page.until_texts(".job span", "gone: it was deleted", "in_progress 25 %", "failed")
    loop.call_soon_threadsafe(studio.go.set)
    page.until_texts(".job span", "gone: it was deleted", "48x32, 1 s", "failed")
    page.draw("broken")
    page.until_texts(".error", "stage dit died")
    assert page.texts("#gallery img") == []
    loop.call_soon_threadsafe(studio.go.clear)
    page.draw("slow")
    until(lambda: page.texts("#gallery img") == [""], "a partial picture is shown", 20)
    page.browser.find_element(By.ID, "stop").click()
    until(lambda: page.texts("#gallery img") == [] and not running.engine.live, "the request is stopped", 20)


async def test_jobs_outlive_a_reload_and_what_fails_or_goes_says_so_and_leaves_no_half_picture(
    start: Start, tmp_path: Path
) -> None:
    studio = Studio()
    engine = FakeEngine(studio.script)
    variants = {"default": Variant(stages=(DIT,), edges=EDGES)}
    engine.pipeline = msgspec.structs.replace(PIPELINE, tasks=("image", "video"), voices=(), variants=variants)
    running = await start(engine)
    loop = asyncio.get_running_loop()
    with chromium(tmp_path / "profile") as browser:
        await asyncio.to_thread(_walk, Page(browser, running.url), running, studio, loop)

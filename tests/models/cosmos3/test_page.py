"""The page in a real browser on a tiny checkpoint: a picture with live partial pictures, and a video job."""

from __future__ import annotations

from pathlib import Path

import pytest
from selenium.webdriver.common.by import By

from tests.browser import chromium, complaints, until
from tests.models.cosmos3.conftest import Make
from tests.servers import serving

pytestmark = pytest.mark.slow

# Notes every kind of picture and every word on the job that the page has shown.
SPY = """
window.shown = []; window.said = [];
new MutationObserver((changes) => {
  for (const change of changes) if (change.attributeName === 'data-kind') window.shown.push(change.target.dataset.kind);
}).observe(document.getElementById('gallery'), {subtree: true, attributes: true});
new MutationObserver(() => {
  const label = document.querySelector('.job span');
  if (label) window.said.push(label.textContent);
}).observe(document.getElementById('jobs'), {subtree: true, childList: true, characterData: true});
"""


def test_pictures_appear_step_by_step_and_videos_play_when_their_job_is_done(tiny: Make, tmp_path: Path) -> None:
    with serving(tmp_path, str(tiny("base").folder)) as server, chromium(tmp_path / "profile") as browser:

        def element(css: str) -> object:
            return browser.execute_script("return document.querySelector(arguments[0])", css)

        def fill(**fields: str) -> None:
            for name, value in fields.items():
                browser.find_element(By.ID, name.replace("_", "-")).send_keys(value)

        browser.get(server.address + "/")
        until(lambda: browser.find_element(By.ID, "films").is_displayed(), "the page offers videos")
        browser.execute_script(SPY)
        fill(picture_size="48x64", picture_steps="12")
        browser.find_element(By.CSS_SELECTOR, "#draw button").click()
        until(lambda: "completed" in browser.execute_script("return window.shown"), "the picture is done")
        assert "partial_image" in browser.execute_script("return window.shown")
        assert browser.execute_script("return document.querySelector('#gallery img').naturalHeight") == 64
        fill(film_size="48x32", film_frames="13", film_steps="300")
        browser.find_element(By.CSS_SELECTOR, "#film button").click()
        until(lambda: element(".job video") is not None, "the video is there")
        said = browser.execute_script("return window.said")
        assert any(text.startswith("in_progress") for text in said)
        assert said[-1].startswith("48x32")
        ready = "const film = document.querySelector('.job video'); return film.readyState > 0 && film.videoWidth"
        until(lambda: browser.execute_script(ready) == 48, "the video plays")
        browser.find_element(By.CSS_SELECTOR, ".job button").click()
        until(lambda: element(".job") is None and not server.get("/v1/videos").json()["data"], "the job is gone")
        assert complaints(browser) == []

"""The page in a real browser on toydit: a picture with live partial pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from selenium.webdriver.common.by import By

from tests.browser import chromium, complaints, until
from tests.servers import serving

pytestmark = pytest.mark.slow

# Notes every kind of picture that the page has shown.
SPY = """
window.shown = [];
new MutationObserver((changes) => {
  for (const change of changes) if (change.attributeName === 'data-kind') window.shown.push(change.target.dataset.kind);
}).observe(document.getElementById('gallery'), {subtree: true, attributes: true});
"""


def test_picture_appears_step_by_step_and_only_what_the_model_can_is_shown(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "toydit", "--set", "stages.dit.step_delay_s=0.02") as server,
        chromium(tmp_path / "profile") as browser,
    ):
        browser.get(server.address + "/")
        until(lambda: browser.find_element(By.ID, "pictures").is_displayed(), "the page offers pictures")
        for hidden in ("films", "speech", "chat"):
            assert not browser.find_element(By.ID, hidden).is_displayed()
        browser.execute_script(SPY)
        browser.find_element(By.ID, "picture-steps").send_keys("12")
        browser.find_element(By.CSS_SELECTOR, "#draw button").click()
        until(lambda: "whole answer" in browser.find_element(By.ID, "figures").text, "the picture is done")
        shown = browser.execute_script("return window.shown")
        assert shown[-1] == "completed"
        assert "partial_image" in shown[:-1]
        assert browser.execute_script("return document.querySelector('#gallery img').naturalWidth") == 32
        until(lambda: "busy for" in browser.find_element(By.ID, "timeline").text, "the timeline is drawn")
        bars = browser.execute_script(
            "return [...document.querySelectorAll('#timeline i.compute')].map(b => [b.offsetLeft, b.offsetWidth])"
        )
        assert len(bars) >= 12 + 2  # steps, encode, decode
        assert max(width for _, width in bars) > 5
        assert [left for left, _ in bars] == sorted(left for left, _ in bars)
        assert len(server.get("/").content) < 200_000
        assert complaints(browser) == []

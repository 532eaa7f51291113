"""The page at `/` in a real browser on the embedded pipeline: typed and spoken questions, speech that plays early."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from openai import OpenAI
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from omnistage.media.audio_encode import encode_audio
from tests.browser import chromium, complaints, until
from tests.servers import Server

pytestmark = pytest.mark.slow

# Counts what the page plays and when, without changing what it does.
SPY = """
window.played = {samples: 0, first: null, textAtFirst: null};
const create = AudioContext.prototype.createBuffer;
AudioContext.prototype.createBuffer = function (channels, length, rate) {
  const turns = document.querySelectorAll('.turn.assistant');
  if (window.played.first === null) {
    window.played.first = performance.now();
    window.played.textAtFirst = turns.length ? turns[turns.length - 1].textContent : '';
  }
  window.played.samples += length;
  return create.call(this, channels, length, rate);
};
"""


@pytest.fixture(scope="module")
def server(smol_speech: Server) -> Server:
    return smol_speech


@pytest.fixture(scope="module")
def spoken_question(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    client = OpenAI(base_url=server.address + "/v1", api_key="none")
    answer = client.audio.speech.create(
        model="smol-speech", voice="heart", input="What is the capital of France?", response_format="pcm"
    )
    samples = np.frombuffer(answer.read(), "<i2").astype(np.float32)[None] / np.float32(32768)
    file = tmp_path_factory.mktemp("audio") / "question.wav"
    file.write_bytes(encode_audio("wav", samples, 24000))
    return file


@pytest.fixture
def browser(server: Server, spoken_question: Path, tmp_path: Path) -> Iterator[Chrome]:
    with chromium(tmp_path / "profile", spoken_question) as browser:
        browser.get(server.address + "/")
        until(lambda: browser.find_element(By.ID, "model").text == "smol-speech", "the page names the model")
        browser.execute_script(SPY)
        yield browser
        assert complaints(browser) == []


def turns(browser: Chrome, kind: str) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, f".turn.{kind}")


def idle(browser: Chrome) -> bool:
    return browser.find_element(By.ID, "send").is_enabled()


def figures(browser: Chrome) -> str:
    return browser.find_element(By.ID, "figures").text


def test_typed_question_is_answered_in_text_and_speech_that_starts_before_the_text_ends(browser: Chrome) -> None:
    browser.find_element(By.ID, "prompt").send_keys("How do plants make food?\n")
    until(lambda: len(turns(browser, "assistant")) == 1 and idle(browser), "the answer ends")
    text = turns(browser, "assistant")[0].text
    played = browser.execute_script("return window.played")
    assert len(text) > 60
    assert played["samples"] > 24000
    assert len(played["textAtFirst"].strip()) < len(text)
    shown = figures(browser)
    for name in ("first text", "first audio", "whole answer", "real-time factor", "tokens out"):
        assert name in shown
    assert not turns(browser, "error")


def test_text_only_when_speech_is_off(browser: Chrome) -> None:
    browser.find_element(By.ID, "speak").click()
    browser.find_element(By.ID, "prompt").send_keys("What is the capital of France?\n")
    until(lambda: len(turns(browser, "assistant")) == 1 and idle(browser), "the answer ends")
    assert "Paris" in turns(browser, "assistant")[0].text
    assert browser.execute_script("return window.played.samples") == 0


def test_question_into_the_microphone_is_heard_and_answered(browser: Chrome) -> None:
    microphone = browser.find_element(By.ID, "mic")
    microphone.click()
    until(lambda: "recording" in str(microphone.get_attribute("class")), "the recording starts")
    started = browser.execute_script("return performance.now()")
    clock = "return performance.now()"
    until(lambda: browser.execute_script(clock) - started > 3500, "the question is over")
    microphone.click()
    until(lambda: len(turns(browser, "assistant")) == 1 and idle(browser), "the answer ends")
    assert not turns(browser, "error"), [node.text for node in turns(browser, "error")]
    assert "Paris" in turns(browser, "assistant")[0].text


def test_text_box_speaks(browser: Chrome) -> None:
    browser.find_element(By.CSS_SELECTOR, "#tts button[type=submit]").click()
    until(lambda: "first audio" in figures(browser) and idle(browser), "the speech ends")
    assert browser.execute_script("return window.played.samples") > 24000


def test_stop_ends_the_answer(browser: Chrome, server: Server) -> None:
    browser.find_element(By.ID, "prompt").send_keys("Tell me a very long story about the sea.\n")
    until(lambda: len(turns(browser, "assistant")) == 1, "the answer starts")
    browser.find_element(By.ID, "stop").click()
    until(lambda: idle(browser), "the page is idle again")
    gauge = "omnistage_requests_running 0.0"
    until(lambda: gauge in server.get("/metrics").text, "the server has stopped working on it", 10)


def test_page_is_small_and_asks_nobody_else(browser: Chrome, server: Server) -> None:
    page = server.get("/")
    assert len(page.content) < 150_000
    asked = {
        json.loads(entry["message"])["message"]["params"]["request"]["url"]
        for entry in browser.get_log("performance")  # type: ignore[no-untyped-call]
        if json.loads(entry["message"])["message"]["method"] == "Network.requestWillBeSent"
    }
    outside = {url for url in asked if not url.startswith((server.address, "data:", "blob:", "chrome:"))}
    assert outside == set()

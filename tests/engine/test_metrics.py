"""Every counter and histogram after a load that is known exactly; docs/metrics.md against the live exposition."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.http.metrics import HttpMetrics
from omnistage.errors import RequestError
from omnistage.testing.closed_form import CODES_PER_TOKEN, SAMPLE_RATE, wave_of
from omnistage.testing.leakcheck import settled
from tests.engines import answer, running

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
INLINE = {"placement": "inline"}
CHATS = ("hello there", "a second request", "and a third one")
TEXTS = ("words only", "no sound")
SPEECHES = ("spoken",)


class Exposition:
    """A scrape: `value(name, labels...)` is one sample."""

    def __init__(self, text: str) -> None:
        self.families: dict[str, Metric] = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self.samples[(f"omnistage_{name}", *sorted(labels.items()))]

    def of(self, name: str) -> dict[tuple[str, ...], float]:
        """All samples of a name, by the values of their labels."""
        return {
            tuple(value for _, value in labels): amount
            for (sample, *labels), amount in self.samples.items()
            if sample == f"omnistage_{name}"
        }


@pytest.fixture
async def engine() -> AsyncIterator[AsyncOmniEngine]:
    async with running("echo3", INLINE) as started:
        yield started


async def load(engine: AsyncOmniEngine) -> Exposition:
    """Three chats with sound, two without, one speech, one refusal."""
    await asyncio.gather(
        *(answer(engine, id=f"c{i}", prompt=text) for i, text in enumerate(CHATS)),
        *(answer(engine, id=f"t{i}", prompt=text, modalities=("text",)) for i, text in enumerate(TEXTS)),
        *(answer(engine, id=f"s{i}", task="speech", prompt=text) for i, text in enumerate(SPEECHES)),
    )
    with pytest.raises(RequestError):
        await answer(engine, id="x", task="image", prompt="no such task")
    await settled(engine)
    return Exposition(engine.render_metrics().decode())


async def test_counters_equal_the_load(engine: AsyncOmniEngine) -> None:
    seen = await load(engine)
    assert seen.of("requests_total") == {("stop", "chat"): 5, ("stop", "speech"): 1}
    assert seen.of("requests_rejected_total") == {("invalid_request",): 1}
    written = sum(len(text) for text in (*CHATS, *TEXTS))  # a token per letter
    assert seen.value("text_tokens_total") == written
    spoken = (*CHATS, *SPEECHES)
    assert seen.value("audio_seconds_total") == pytest.approx(sum(len(wave_of(text)) for text in spoken) / SAMPLE_RATE)
    assert seen.value("images_total") == seen.value("video_frames_total") == 0
    codes = sum(len(text) * CODES_PER_TOKEN + 1 for text in spoken)
    tokens = seen.of("stage_tokens_total")
    framed = written + len(CHATS) + len(TEXTS)  # with the token that begins a prompt, or ends an answer
    assert tokens["input", "thinker"] == tokens["output", "thinker"] == framed
    assert tokens["output", "talker"] == codes


async def test_histograms_count_each_request_under_its_modality(engine: AsyncOmniEngine) -> None:
    seen = await load(engine)
    counts = {name: seen.of(f"{name}_count") for name in ("e2el_seconds", "ttft_seconds", "tpot_seconds")}
    assert counts["e2el_seconds"] == {("chat",): 5, ("speech",): 1}
    assert counts["ttft_seconds"] == counts["tpot_seconds"] == {("chat",): 5}
    for name in ("ttfp_seconds", "rtf"):
        assert seen.of(f"{name}_count") == {("chat",): 3, ("speech",): 1}
        assert seen.value(f"{name}_sum", task="speech") > 0
    assert seen.value("ttft_seconds_sum", task="chat") < seen.value("e2el_seconds_sum", task="chat")
    visits = seen.of("stage_seconds_count")
    assert {key: visits[key] for key in visits if key[0] == "compute"} == {
        ("compute", "thinker"): 5,
        ("compute", "talker"): 4,
        ("compute", "wave"): 4,
    }


async def test_gauges_are_at_rest_after_the_load(engine: AsyncOmniEngine) -> None:
    seen = await load(engine)
    for name in ("requests_running", "requests_waiting", "request_records", "outstanding_chunks", "backlog_seconds"):
        assert seen.value(name) == 0, name
    assert set(seen.of("stage_up").values()) == {1}
    assert set(seen.of("stage_load").values()) == {0}
    assert set(seen.of("stage_chunks_total")) == {("0", "thinker"), ("0", "talker"), ("0", "wave")}


async def test_pictures_count_and_previews_do_not() -> None:
    async with running("toydit", INLINE) as engine:
        asked = {"task": "image", "prompt": "a star", "modalities": ("image", "partial")}
        await answer(engine, id="p", params={"num_inference_steps": 4, "partial_images": 2}, **asked)
        seen = Exposition(engine.render_metrics().decode())
        assert seen.value("images_total") == 1
        assert seen.value("requests_total", task="image", reason="stop") == 1
        assert seen.value("e2el_seconds_count", task="image") == 1
        assert seen.value("ttfp_seconds_count", task="image") == 1


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels of each metric in the tables of the page."""
    rows = re.findall(r"^\| `(omnistage_\w+)` \| (\w+) \| [^|]* \| ([^|]*) \|", DOCS.read_text(), re.MULTILINE)
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def shown(families: dict[str, Metric]) -> dict[str, tuple[str, frozenset[str]]]:
    found = {}
    for family in families.values():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, frozenset(labels))
    return found


async def test_page_on_metrics_lists_exactly_what_is_exposed(engine: AsyncOmniEngine) -> None:
    live = (await load(engine)).families
    async with running("toydit", INLINE) as drawing:
        await answer(drawing, id="p", task="image", prompt="a star", params={"num_inference_steps": 2})
        await settled(drawing)
        live |= Exposition(drawing.render_metrics().decode()).families
    http = HttpMetrics()
    http.started()
    http.finished("/live", 200)
    live |= Exposition(http.render().decode()).families
    live = {name: family for name, family in live.items() if not name.endswith("_created")}
    page = documented()
    exposed = shown(live)
    assert sorted(exposed.keys() - page.keys()) == [], "not on the page"
    assert sorted(page.keys() - exposed.keys()) == [], "on the page only"
    # The families of a drawing engine replace those of echo3, some of which have no sample there.
    assert {name for name in page if exposed[name][0] != page[name][0]} == set()
    assert {name for name in page if exposed[name][1] and exposed[name][1] != page[name][1]} == set()

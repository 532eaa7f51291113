"""The dashboard against a live server: every query reads what is exposed, and says the right thing of a known load."""

from __future__ import annotations

import asyncio
import json
import re
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import yaml

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.testing.leakcheck import settled
from tests.entrypoints.http.real import Running, serving_engine
from tests.promql import Query, Scrapes, Vector, quantile, read

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
SECONDS = 10.0
REQUESTS = 4


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / "dashboards" / "omnistage.json").read_text())
    return content


def targets() -> list[dict[str, str]]:
    return [target for panel in dashboard()["panels"] for target in panel["targets"]]


async def speak(server: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": "ten letters"}],
        "modalities": ["text", "audio"],
        "audio": {"format": "wav"},
    }
    answers = await asyncio.gather(*(server.http.post("/v1/chat/completions", json=body) for _ in range(REQUESTS)))
    refused = await server.http.post("/v1/images/generations", json={"prompt": "none"})
    engine_refused = await server.http.post("/v1/chat/completions", json=body | {"seed": 1, "sampling": {"nope": {}}})
    assert {answer.status_code for answer in answers} == {200}
    assert {refused.status_code, engine_refused.status_code} == {400}


@pytest.fixture(scope="module")
def scrapes() -> Scrapes:
    """Two scrapes of a server, `REQUESTS` spoken answers between them, taken to be `SECONDS` apart."""

    async def taken() -> Scrapes:
        async with AsyncOmniEngine(resolve_config("echo3", None, {"placement": "inline"})) as engine:
            async with serving_engine(engine) as server:
                before = read((await server.http.get("/metrics")).text)
                await speak(server)
                await settled(engine)
                after = read((await server.http.get("/metrics")).text)
            return Scrapes(before, after, SECONDS)

    return asyncio.run(taken())


def ask(scrapes: Scrapes, text: str) -> dict[tuple[str, ...], float]:
    vector: Vector = Query(text, scrapes).evaluate()
    return {tuple(value for _, value in sorted(labels)): amount for labels, amount in vector.items()}


def test_every_query_reads_metrics_and_labels_that_exist(scrapes: Scrapes) -> None:
    assert len(targets()) > 20
    quiet = {"omnistage_requests_rejected_total"}  # has series only once something was refused
    for target in targets():
        query = Query(target["expr"], scrapes)
        if any(name in target["expr"] for name in quiet):
            scrapes.after.setdefault("omnistage_requests_rejected_total", {frozenset({("code", "x")}): 1.0})
        vector = query.evaluate()
        assert vector, target["expr"]
        assert not all(isnan(value) for value in vector.values()), target["expr"]
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for labels in vector:
            assert shown == {name for name, _ in labels} or not shown, target


def test_queries_say_what_happened(scrapes: Scrapes) -> None:
    exprs = {target["expr"] for target in targets()}

    def of(start: str, name: str) -> dict[tuple[str, ...], float]:
        (text,) = [expr for expr in exprs if expr.startswith(start) and name in expr]
        return ask(scrapes, text)

    rate = REQUESTS / SECONDS
    assert of("sum by (task, reason)", "requests_total") == {("stop", "chat"): rate}
    assert of("sum(rate", "text_tokens") == {(): pytest.approx(len("ten letters") * rate)}
    assert of("sum by (route, status)", "http_requests")["/v1/chat/completions", "200"] == pytest.approx(rate)
    half = of("histogram_quantile(0.5", "e2el")["chat",]
    last = of("histogram_quantile(0.99", "e2el")["chat",]
    mean = sum(scrapes.after["omnistage_e2el_seconds_sum"].values()) / REQUESTS
    assert half <= last
    assert 0 < half < 10 * mean
    assert of("sum by (stage) (omnistage_stage_up", "up") == {("talker",): 1, ("thinker",): 1, ("wave",): 1}


@pytest.mark.parametrize(("q", "expected"), [(0.25, 0.5), (0.5, 1.0), (0.75, 2.0), (1.0, 2.0)])
def test_quantile_is_linear_within_its_bucket(q: float, expected: float) -> None:
    assert quantile(q, [(1.0, 2.0), (2.0, 2.0), (float("inf"), 4.0)]) == expected


@pytest.mark.parametrize(
    "text", ["nope_total", "sum by (nope) (omnistage_stage_up)", "rate(omnistage_e2el_seconds_sum[1m]"]
)
def test_wrong_queries_are_found(scrapes: Scrapes, text: str) -> None:
    with pytest.raises((KeyError, IndexError)):
        Query(text, scrapes).evaluate()


def test_compose_file_mounts_what_exists_and_the_parts_fit_together() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    mounts = [mount.split(":") for service in services.values() for mount in service["volumes"]]
    assert [source for source, _, _ in mounts if not (FOLDER / source).exists()] == []
    assert {mode for _, _, mode in mounts} == {"ro"}
    sources = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in dashboard()["panels"]} == {source["uid"] for source in sources}
    (provider,) = yaml.safe_load((FOLDER / "provisioning/dashboards/omnistage.yaml").read_text())["providers"]
    assert provider["options"]["path"] in [target for _, target, _ in mounts]
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert jobs[0]["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))

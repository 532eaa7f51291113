"""The dashboard against a live server and a real Prometheus: every query says the right thing of a known load."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.errors import RequestError
from omnistage.testing.closed_form import SAMPLE_RATE, wave_of
from omnistage.testing.leakcheck import settled
from tests.deploy.prometheus import Prometheus, Vector, promtool, running, store
from tests.engines import answer
from tests.entrypoints.http.real import Running, serving_engine

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
PINNED = re.compile(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+")
TARGET = "127.0.0.1:8000"
SECONDS = 30.0
REQUESTS = 4
TEXT = "ten letters"


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / "dashboards" / "omnistage.json").read_text())
    return content


def targets() -> list[dict[str, str]]:
    return [target for panel in dashboard()["panels"] for target in panel["targets"]]


async def load(server: Running, name: str) -> str:
    """The exposition after spoken answers and one refusal of each of front and engine."""
    body = {
        "messages": [{"role": "user", "content": TEXT}],
        "modalities": ["text", "audio"],
        "audio": {"format": "wav"},
    }
    answers = await asyncio.gather(*(server.http.post("/v1/chat/completions", json=body) for _ in range(REQUESTS)))
    refused = await server.http.post("/v1/images/generations", json={"prompt": "none"})
    with pytest.raises(RequestError):
        await answer(server.engine, id=name, task="image", prompt="no such task")
    assert {answer.status_code for answer in answers} == {200}
    assert refused.status_code == 400
    await settled(server.engine)
    return (await server.http.get("/metrics")).text


@dataclass
class Seen:
    """Two equal loads, scraped `SECONDS` apart; `live` is what the server itself said when it was scraped."""

    prometheus: Prometheus
    moment: float
    live: Vector
    exposition: str

    def ask(self, query: str) -> dict[tuple[str, ...], float]:
        """Values by the values of the labels, in the order of their names."""
        vector = self.prometheus.ask(query, self.moment)
        return {tuple(value for _, value in sorted(labels)): amount for labels, amount in vector.items()}


async def taken(folder: Path, stack: ExitStack) -> Seen:
    # Long ago, so that no window holds samples of both the stored scrapes and the live one. Both stored ones lie half
    # their distance inside the dashboard's window of a minute: its rates are their difference over `SECONDS`.
    moment = float(int(time.time()) - 6 * 3600)
    config = (FOLDER / "prometheus.yml").read_text().replace("scrape_interval: 5s", "scrape_interval: 1s")
    echo = resolve_config("echo3", None, {"placement": "inline"})
    async with AsyncOmniEngine(echo) as engine, serving_engine(engine) as server:
        before, after = await load(server, "a"), await load(server, "b")
        store(folder, [(moment - SECONDS * 1.5, before), (moment - SECONDS / 2, after)])
        here = server.http.base_url.netloc.decode()
        prometheus = stack.enter_context(running(folder, config.replace(TARGET, here)))
        live = await asyncio.to_thread(prometheus.wait_for, "omnistage_stage_up")
    return Seen(prometheus, moment, live, after)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    with ExitStack() as stack:
        yield asyncio.run(taken(tmp_path_factory.mktemp("prometheus"), stack))


@pytest.mark.slow
def test_every_query_reads_metrics_and_labels_that_exist(seen: Seen) -> None:
    assert len(targets()) > 20
    for target in targets():
        vector = seen.prometheus.ask(target["expr"], seen.moment)
        assert not all(isnan(value) for value in vector.values()), target["expr"]
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for labels in vector:
            assert shown == {name for name, _ in labels} - {"__name__"}, target


@pytest.mark.slow
def test_queries_say_what_happened(seen: Seen) -> None:
    exprs = {target["expr"] for target in targets()}

    def of(start: str, name: str) -> dict[tuple[str, ...], float]:
        (text,) = [expr for expr in exprs if expr.startswith(start) and name in expr]
        return seen.ask(text)

    rate = pytest.approx(REQUESTS / SECONDS)
    assert of("sum by (task, reason)", "requests_total") == {("stop", "chat"): rate}
    assert of("sum by (code)", "rejected") == {("invalid_request",): pytest.approx(1 / SECONDS)}
    assert of("sum(rate", "text_tokens") == {(): pytest.approx(len(TEXT) * REQUESTS / SECONDS)}
    assert of("sum(rate", "audio_seconds") == {(): pytest.approx(len(wave_of(TEXT)) / SAMPLE_RATE * REQUESTS / SECONDS)}
    assert of("sum by (route, status)", "http_requests")["/v1/chat/completions", "200"] == rate
    half = of("histogram_quantile(0.5", "e2el")["chat",]
    last = of("histogram_quantile(0.99", "e2el")["chat",]
    (mean,) = seen.ask("sum(omnistage_e2el_seconds_sum) / sum(omnistage_e2el_seconds_count)").values()
    assert half <= last
    assert 0 < half < 10 * mean
    assert of("sum by (stage) (omnistage_stage_up", "up") == {("talker",): 1, ("thinker",): 1, ("wave",): 1}


@pytest.mark.slow
def test_query_of_no_metric_is_empty_and_what_is_no_query_is_refused(seen: Seen) -> None:
    assert seen.ask("sum by (stage) (nope_total)") == {}
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        seen.ask("rate(omnistage_e2el_seconds_sum[1m]")


@pytest.mark.slow
def test_configuration_scrapes_the_live_server(seen: Seen) -> None:
    stages = {dict(labels)["stage"]: dict(labels)["job"] for labels in seen.live}
    assert stages == {"thinker": "omnistage", "talker": "omnistage", "wave": "omnistage"}


@pytest.mark.slow
def test_the_tool_of_prometheus_has_no_complaint(seen: Seen) -> None:
    promtool("check", "config", str(FOLDER / "prometheus.yml"))
    assert promtool("check", "metrics", given=seen.exposition) == ""


def test_compose_file_mounts_what_exists_and_listens_on_this_machine_only() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    mounts = [mount.split(":") for service in services.values() for mount in service["volumes"]]
    assert [source for source, _, _ in mounts if not (FOLDER / source).exists()] == []
    assert {mode for _, _, mode in mounts} == {"ro"}
    assert [service["image"] for service in services.values() if not PINNED.fullmatch(service["image"])] == []
    assert {service["network_mode"] for service in services.values()} == {"host"}
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    sources = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in dashboard()["panels"]} == {source["uid"] for source in sources}
    (provider,) = yaml.safe_load((FOLDER / "provisioning/dashboards/omnistage.yaml").read_text())["providers"]
    assert provider["options"]["path"] in [target for _, target, _ in mounts]
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert jobs[0]["static_configs"] == [{"targets": [TARGET]}]
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))

"""Routes without a body: models, health, metrics, pages; and what every answer has."""

from __future__ import annotations

import json
import re

import msgspec
import openai
import pytest

from omnistage.engine.client import Health, ReplicaHealth
from omnistage.entrypoints.http.routes import ROUTES
from tests.entrypoints.http.conftest import Running


async def test_models_through_the_official_client(server: Running) -> None:
    models = [model async for model in server.client.models.list()]
    assert [(model.id, model.object, model.owned_by) for model in models] == [("fake-model", "model", "omnistage")]
    one = await server.client.models.retrieve("fake-model")
    assert one.tasks == ["chat", "completion", "speech", "transcription"]
    assert one.output_modalities == ["text", "audio"]
    with pytest.raises(openai.NotFoundError):
        await server.client.models.retrieve("org/other")


async def test_health_routes_tell_good_and_bad_apart(server: Running) -> None:
    for path in ("/health", "/ready", "/live"):
        assert (await server.http.get(path)).status_code == 200
    server.engine.fail_stage("talker")
    for path in ("/health", "/ready"):
        answer = await server.http.get(path)
        assert answer.status_code == 503
        assert answer.json()["reasons"] == ["stage talker replica 0 is failed: exit code 9"]
    assert (await server.http.get("/live")).status_code == 200


async def test_starting_stage_is_healthy_but_not_ready(server: Running) -> None:
    replica = ReplicaHealth(stage="thinker", replica=1, state="restarting")
    server.engine.report = Health(ready=False, healthy=True, draining=True, replicas=[replica])
    assert (await server.http.get("/health")).status_code == 200
    answer = await server.http.get("/ready")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == ["draining", "stage thinker replica 1 is restarting"]


async def test_metrics_hold_those_of_engine_and_http(server: Running) -> None:
    await server.http.get("/live")
    await server.http.post("/v1/chat/completions", content=b"{")
    text = (await server.http.get("/metrics")).text
    assert "fake_total 1" in text
    assert 'omnistage_http_requests_total{route="/live",status="200"} 1.0' in text
    assert 'omnistage_http_requests_total{route="/v1/chat/completions",status="400"} 1.0' in text
    assert "omnistage_http_in_flight 1.0" in text


async def test_every_answer_has_request_id_and_date(server: Running) -> None:
    seen = set()
    for path in ("/health", "/nope", "/v1/models", "/v1/models/x", "/"):
        answer = await server.http.get(path)
        assert re.fullmatch(r"req_[0-9a-f]{24}", answer.headers["x-request-id"])
        assert answer.headers["date"].endswith("GMT")
        seen.add(answer.headers["x-request-id"])
    assert len(seen) == 5


async def test_unknown_route_and_wrong_method_in_openai_shape(server: Running) -> None:
    for path in ("/v1/unknown", "/v1/models/", "/V1/models", "//v1/models", "/v1/chat/completions/"):
        answer = await server.http.get(path)
        assert answer.status_code == 404
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    answer = await server.http.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert (await server.http.put("/v1/models")).status_code == 405


async def test_head_answers_like_get_without_a_body(server: Running) -> None:
    answer = await server.http.head("/health")
    assert answer.status_code == 200
    assert answer.content == b""


async def test_openapi_document_describes_every_route(server: Running) -> None:
    document = (await server.http.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references <= set(document["components"]["schemas"])
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert chat["required"] == ["messages"]


def numbers_of(schema: object) -> list[dict]:
    """Every integer or number node of a JSON schema."""
    if isinstance(schema, list):
        return [node for item in schema for node in numbers_of(item)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if schema.get("type") in ("integer", "number") else []
    return own + [node for value in schema.values() for node in numbers_of(value)]


async def test_every_number_a_client_may_send_has_both_bounds(server: Running) -> None:
    kinds = list({route.body for route in ROUTES if route.body is not None})
    _, components = msgspec.json.schema_components(kinds)
    nodes = numbers_of(list(components.values()))
    assert len(nodes) > 30
    for node in nodes:
        assert {"minimum", "exclusiveMinimum"} & set(node), node
        assert {"maximum", "exclusiveMaximum"} & set(node), node


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_pages_are_small_and_load_nothing_from_elsewhere(server: Running, path: str) -> None:
    answer = await server.http.get(path)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert len(answer.content) < 150_000
    assert not re.findall(r"""(?:src|href|url\(|@import|fetch\()\s*=?\s*['"(]?\s*(?:https?:)?//""", answer.text)
    assert "default-src 'none'" in answer.headers["content-security-policy"]


async def test_version(server: Running) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", (await server.http.get("/version")).json()["version"])

"""GET routes: models, health, metrics, version, pages."""

from __future__ import annotations

from omnistage.engine.client import Health
from omnistage.entrypoints.http.answers import ModelCard, ModelList, ServerStatus, Version
from omnistage.entrypoints.http.asgi import JSON, Exchange
from omnistage.entrypoints.http.sse import json_bytes
from omnistage.entrypoints.http.state import ServerState

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def _card(state: ServerState) -> ModelCard:
    pipeline, abilities = state.engine.pipeline, state.capabilities
    return ModelCard(
        id=state.model,
        created=state.created,
        tasks=list(abilities.tasks),
        output_modalities=list(abilities.output_modalities),
        voices=list(pipeline.voices),
        sample_rate=pipeline.sample_rate,
    )


async def models(state: ServerState, exchange: Exchange) -> None:
    """Lists the one model that is served."""
    await exchange.answer(200, JSON, json_bytes(ModelList([_card(state)])))


async def model(state: ServerState, exchange: Exchange) -> None:
    """The served model, by name; names may hold slashes."""
    state.check_model(exchange.path_tail)
    await exchange.answer(200, JSON, json_bytes(_card(state)))


async def live(state: ServerState, exchange: Exchange) -> None:
    """200 while the event loop runs."""
    await exchange.answer(200, JSON, json_bytes(ServerStatus("alive")))


async def health(state: ServerState, exchange: Exchange) -> None:
    """200 while nothing has failed, else 503 with reasons."""
    report = state.engine.health()
    await _answer_status(exchange, report.healthy, ("healthy", "unhealthy"), _reasons(report, ("failed",)))


async def ready(state: ServerState, exchange: Exchange) -> None:
    """200 when every stage has a ready replica and the server takes requests, else 503 with reasons."""
    report = state.engine.health()
    reasons = _reasons(report, ("failed", "starting", "restarting", "stopped"))
    await _answer_status(exchange, report.ready, ("ready", "not ready"), reasons)


def _reasons(report: Health, states: tuple[str, ...]) -> list[str]:
    reasons = ["draining"] if report.draining else []
    for replica in report.replicas:
        if replica.state in states:
            detail = f": {replica.detail}" if replica.detail else ""
            reasons.append(f"stage {replica.stage} replica {replica.replica} is {replica.state}{detail}")
    return reasons


async def _answer_status(exchange: Exchange, good: bool, names: tuple[str, str], reasons: list[str]) -> None:
    status = ServerStatus(names[0]) if good else ServerStatus(names[1], reasons)
    await exchange.answer(200 if good else 503, JSON, json_bytes(status))


async def metrics(state: ServerState, exchange: Exchange) -> None:
    """Prometheus text: the engine's metrics, then those of the HTTP front."""
    await exchange.answer(200, METRICS_TYPE, state.engine.render_metrics() + state.metrics.render())


async def version(state: ServerState, exchange: Exchange) -> None:
    """The version of OmniStage."""
    await exchange.answer(200, JSON, json_bytes(Version(state.version)))

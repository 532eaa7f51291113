"""The one table of routes. Nothing outside it is reachable; `scope` names the right that a route needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from omnistage.engine.client import Health
from omnistage.engine.timeline_view import TimelineView
from omnistage.entrypoints.http import admin, answers, images, info, media_schema, pages, schema, videos
from omnistage.entrypoints.http.asgi import Exchange
from omnistage.entrypoints.http.chat import chat_completions
from omnistage.entrypoints.http.completions import completions
from omnistage.entrypoints.http.speech import speech, voices
from omnistage.entrypoints.http.state import ServerState
from omnistage.entrypoints.http.timelines import timeline
from omnistage.entrypoints.http.transcriptions import transcriptions

Handler = Callable[[ServerState, Exchange], Awaitable[None]]
RouteRight = Literal["open", "infer", "metrics", "admin"]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One entry. A path that ends in "/{name}" matches everything below it.

    `body` and `answer` are the JSON shapes; a body with `form` is multipart, and that is the name of its file part;
    `media_types` are other answers.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    scope: RouteRight
    body: Any = None
    form: str = ""
    answer: Any = None
    media_types: tuple[str, ...] = ()


def _get(path: str, handler: Handler, scope: RouteRight, answer: Any = None, media: str = "") -> Route:
    types = (media,) if media else ()
    return Route(method="GET", path=path, handler=handler, scope=scope, answer=answer, media_types=types)


def _post(
    path: str, handler: Handler, body: Any, answer: Any = None, *, media: tuple[str, ...] = (), form: str = ""
) -> Route:
    return Route(
        method="POST",
        path=path,
        handler=handler,
        scope="infer",
        body=body,
        form=form,
        answer=answer,
        media_types=media,
    )


def _command(path: str, handler: Handler, body: Any = None, answer: Any = Health) -> Route:
    return Route(method="POST", path=path, handler=handler, scope="admin", body=body, answer=answer)


_EVENTS = ("text/event-stream",)
_SPEECH = ("audio/mpeg", "audio/ogg", "audio/aac", "audio/flac", "audio/wav", "audio/pcm", *_EVENTS)
_TRANSCRIPTS = ("text/plain", "text/vtt", *_EVENTS)
_MP4 = "video/mp4"
_DELETE_VIDEO = Route(
    method="DELETE",
    path="/v1/videos/{video_id}",
    handler=videos.delete_video,
    scope="infer",
    answer=media_schema.VideoDeleted,
)

ROUTES: tuple[Route, ...] = (
    _post("/v1/chat/completions", chat_completions, schema.ChatRequest, answers.ChatCompletion, media=_EVENTS),
    _post("/v1/completions", completions, schema.CompletionRequest, answers.Completion, media=_EVENTS),
    _post("/v1/audio/speech", speech, schema.SpeechRequest, media=_SPEECH),
    _post(
        "/v1/audio/transcriptions",
        transcriptions,
        schema.TranscriptionForm,
        answers.VerboseTranscription,
        media=_TRANSCRIPTS,
        form="file",
    ),
    _post(
        "/v1/images/generations",
        images.generations,
        media_schema.ImageRequest,
        media_schema.ImagesAnswer,
        media=_EVENTS,
    ),
    _post(
        "/v1/images/edits",
        images.edits,
        media_schema.ImageEditForm,
        media_schema.ImagesAnswer,
        media=_EVENTS,
        form="image",
    ),
    _post("/v1/videos", videos.create_video, media_schema.VideoRequest, media_schema.Video),
    _post("/v1/videos/sync", videos.video_sync, media_schema.VideoRequest, media=(_MP4,)),
    _post("/v1/actions", videos.actions, media_schema.ActionRequest, media_schema.ActionAnswer),
    _get("/v1/videos", videos.list_videos, "infer", media_schema.VideoList),
    _get("/v1/videos/{video_id}", videos.get_video, "infer", media_schema.Video, _MP4),
    _DELETE_VIDEO,
    _get("/v1/requests/{id}/timeline", timeline, "infer", TimelineView),
    _get("/v1/audio/voices", voices, "infer", answers.VoiceList),
    _get("/v1/models", info.models, "infer", answers.ModelList),
    _get("/v1/models/{model}", info.model, "infer", answers.ModelCard),
    _get("/health", info.health, "open", answers.ServerStatus),
    _get("/live", info.live, "open", answers.ServerStatus),
    _get("/ready", info.ready, "open", answers.ServerStatus),
    _get("/metrics", info.metrics, "metrics", media="text/plain"),
    _get("/version", info.version, "open", answers.Version),
    _get("/docs", pages.docs, "infer", media="text/html"),
    _get("/openapi.json", pages.openapi, "infer", media="application/json"),
    _get("/", pages.index, "infer", media="text/html"),
    _get("/admin/stages", admin.stages, "admin", Health),
    _command("/admin/sleep", admin.sleep, admin.StageCommand, admin.StageAnswer),
    _command("/admin/wake", admin.wake, admin.StageCommand, admin.StageAnswer),
    _command("/admin/restart", admin.restart, admin.StageCommand, admin.StageAnswer),
    _command("/admin/drain", admin.drain),
    _command("/admin/resume", admin.resume),
)


class RouteTable:
    """Looks routes up by path and method."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes = list[tuple[str, dict[str, Route]]]()
        for route in routes:
            stem, brace, _ = route.path.partition("{")
            methods = self._exact.setdefault(route.path, {})
            methods[route.method] = route
            if brace:
                self._prefixes.append((stem, methods))

    def find(self, path: str) -> tuple[dict[str, Route], str] | None:
        """The methods of a path and what a prefix route matched; None when there is no such path."""
        methods = self._exact.get(path)
        if methods is not None:
            return methods, ""
        for stem, below in self._prefixes:
            if path.startswith(stem) and len(path) > len(stem):
                return below, path[len(stem) :]
        return None

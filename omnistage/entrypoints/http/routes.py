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


def _command(path: str, handler: Handler) -> Route:
    return Route(
        method="POST",
        path=path,
        handler=handler,
        scope="admin",
        body=admin.StageCommand,
        answer=admin.StageAnswer,
    )


_EVENTS = "text/event-stream"
_SPEECH_TYPES = ("audio/mpeg", "audio/ogg", "audio/aac", "audio/flac", "audio/wav", "audio/pcm", _EVENTS)

ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler=chat_completions,
        scope="infer",
        body=schema.ChatRequest,
        answer=answers.ChatCompletion,
        media_types=(_EVENTS,),
    ),
    Route(
        method="POST",
        path="/v1/completions",
        handler=completions,
        scope="infer",
        body=schema.CompletionRequest,
        answer=answers.Completion,
        media_types=(_EVENTS,),
    ),
    Route(
        method="POST",
        path="/v1/audio/speech",
        handler=speech,
        scope="infer",
        body=schema.SpeechRequest,
        media_types=_SPEECH_TYPES,
    ),
    Route(
        method="POST",
        path="/v1/audio/transcriptions",
        handler=transcriptions,
        scope="infer",
        body=schema.TranscriptionForm,
        form="file",
        answer=answers.VerboseTranscription,
        media_types=("text/plain", "text/vtt", _EVENTS),
    ),
    Route(
        method="POST",
        path="/v1/images/generations",
        handler=images.generations,
        scope="infer",
        body=media_schema.ImageRequest,
        answer=media_schema.ImagesAnswer,
        media_types=(_EVENTS,),
    ),
    Route(
        method="POST",
        path="/v1/images/edits",
        handler=images.edits,
        scope="infer",
        body=media_schema.ImageEditForm,
        form="image",
        answer=media_schema.ImagesAnswer,
        media_types=(_EVENTS,),
    ),
    Route(
        method="POST",
        path="/v1/videos",
        handler=videos.create_video,
        scope="infer",
        body=media_schema.VideoRequest,
        answer=media_schema.Video,
    ),
    Route(
        method="POST",
        path="/v1/videos/sync",
        handler=videos.video_sync,
        scope="infer",
        body=media_schema.VideoRequest,
        media_types=("video/mp4",),
    ),
    Route(
        method="POST",
        path="/v1/actions",
        handler=videos.actions,
        scope="infer",
        body=media_schema.ActionRequest,
        answer=media_schema.ActionAnswer,
    ),
    _get("/v1/videos", videos.list_videos, "infer", media_schema.VideoList),
    _get("/v1/videos/{video_id}", videos.get_video, "infer", media_schema.Video, "video/mp4"),
    Route(
        method="DELETE",
        path="/v1/videos/{video_id}",
        handler=videos.delete_video,
        scope="infer",
        answer=media_schema.VideoDeleted,
    ),
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
    _command("/admin/sleep", admin.sleep),
    _command("/admin/wake", admin.wake),
    _command("/admin/restart", admin.restart),
    Route(method="POST", path="/admin/drain", handler=admin.drain, scope="admin", answer=Health),
    Route(method="POST", path="/admin/resume", handler=admin.resume, scope="admin", answer=Health),
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

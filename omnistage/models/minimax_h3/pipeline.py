"""MiniMax-H3's stages and graphs, and how a request runs through them. Torch-free.

Variant `default` is one stage; `split` puts text encoder and decoders into stages of their own.
"""

from __future__ import annotations

from typing import Any

from omnistage.config.model import (
    ClientInput,
    EdgeSpec,
    OmniConfig,
    OptionSpec,
    PipelineConfig,
    RequestPlan,
    StageSpec,
    Variant,
)
from omnistage.errors import RequestError
from omnistage.models.minimax_h3.ask import KEYFRAMES, TASKS
from omnistage.models.minimax_h3.footprint import footprint
from omnistage.models.minimax_h3.geometry import FPS
from omnistage.payload import MultimodalPayload, Tensor
from omnistage.request import OmniRequest
from omnistage.stages.diffusion.model import BATCHING
from omnistage.stages.diffusion.step_caching import STEP_CACHE

_STAGES = "omnistage.models.minimax_h3.stages"
_MEDIA = ("video", "audio")
_LATENTS = ("latents", "audio_latents")
_PROGRESS = "progress"
_MAX_ROWS = 1 << 16
_AXES = {"image": 3, "video": 4, "audio": 2}
_REFERENCE_KEYS = {
    "image": {"image"},
    "video": {"video", "fps", "audio", "sample_rate"},
    "audio": {"audio", "sample_rate"},
}

_OPTIONS = {
    "max_pixels": OptionSpec("int", 1 << 22, 1, help="most pixels of a frame that a request may ask for"),
    "batching": BATCHING,
    "partition": OptionSpec(
        "str",
        "auto",
        choices=("auto", "both", "transformer", "transformer_ref"),
        help="transformers to serve: one, both from the start, or (auto) each from its first request on",
    ),
    **STEP_CACHE,
}
DIFFUSION = StageSpec(
    name="diffusion",
    kind="diffusion",
    component=f"{_STAGES}:whole",
    inputs={"media": "media"},
    outputs={name: name for name in (*_MEDIA, *_LATENTS, _PROGRESS)},
    options=_OPTIONS,
    defaults={"max_num_seqs": 16, "token_budget": _MAX_ROWS, "arena_mb": 64},
    capabilities=frozenset({"video", "audio", "seed", "step_batching", "request_batching", "step_cache"}),
)
ENCODER = StageSpec(
    name="encoder",
    kind="generation",
    component="omnistage.models.minimax_h3.encoder_stage:create",
    inputs={"media": "media"},
    outputs={"conditions": "conditions"},
    defaults={"max_num_seqs": 8, "arena_mb": 64},
)
MIDDLE = StageSpec(
    name="diffusion",
    kind="diffusion",
    component=f"{_STAGES}:middle",
    inputs={"conditions": "conditions", "media": "media"},
    outputs={name: name for name in (*_LATENTS, _PROGRESS)},
    options=_OPTIONS,
    defaults={"max_num_seqs": 16, "token_budget": _MAX_ROWS, "arena_mb": 64},
    capabilities=DIFFUSION.capabilities,
)
DECODER = StageSpec(
    name="decoder",
    kind="generation",
    component="omnistage.models.minimax_h3.decoder_stage:create",
    inputs={name: name for name in _LATENTS},
    outputs={name: name for name in _MEDIA},
    defaults={"max_num_seqs": 1, "arena_mb": 64},
)
VARIANTS = {
    "default": Variant(
        stages=(DIFFUSION,),
        edges=(
            EdgeSpec("client.media", "diffusion.media"),
            *(EdgeSpec(f"diffusion.{name}", f"client.{name}") for name in DIFFUSION.outputs),
        ),
    ),
    "split": Variant(
        stages=(ENCODER, MIDDLE, DECODER),
        edges=(
            EdgeSpec("client.media", "encoder.media"),
            EdgeSpec("client.noise", "diffusion.media"),
            EdgeSpec("encoder.conditions", "diffusion.conditions"),
            *(EdgeSpec(f"diffusion.{name}", f"client.{name}") for name in MIDDLE.outputs),
            *(EdgeSpec(f"diffusion.{name}", f"decoder.{name}") for name in _LATENTS),
            *(EdgeSpec(f"decoder.{name}", f"client.{name}") for name in _MEDIA),
        ),
    ),
}


def plan(request: OmniRequest, media: dict[str, MultimodalPayload], config: OmniConfig) -> RequestPlan:
    """The route of a request. Modalities: video, audio, latents, audio_latents, progress. Raises RequestError."""
    params = dict(request.params)
    outputs = _outputs(request, bool(params.pop("return_latents", False)))
    if request.voice is not None:
        raise RequestError("minimax_h3 takes no voice", param="voice")
    params["prompt"] = _prompt(request)
    if request.task in TASKS:
        params.setdefault("task", request.task)
    box = _MediaBox(media)
    box.take(params)
    decoded = ("decoder",) if set(outputs) & set(_MEDIA) else ()
    names = ("diffusion",) if config.variant == "default" else ("encoder", "diffusion", *decoded)
    return RequestPlan(
        stages=names, params=dict.fromkeys(names, params), inputs=box.inputs(config.variant), outputs=outputs
    )


def _outputs(request: OmniRequest, latents: bool) -> tuple[str, ...]:
    known = (*_MEDIA, *_LATENTS, _PROGRESS)
    wanted = request.modalities or _MEDIA
    for name in wanted:
        if name not in known:
            raise RequestError(f"no modality {name!r}; minimax_h3 gives {', '.join(known)}", param="modalities")
    return tuple(dict.fromkeys((*wanted, *(_LATENTS if latents else ()))))


def _prompt(request: OmniRequest) -> str:
    """The text, verbatim: the model has neither chat template nor special tokens."""
    given = [text for text in (request.prompt, request.raw_prompt) if text is not None]
    if request.messages is not None:
        given.append(_text_of(request.messages))
    if len(given) != 1:
        raise RequestError("give one of prompt, raw_prompt and messages", param="prompt")
    return given[0]


def _text_of(messages: list[dict[str, Any]]) -> str:
    if len(messages) != 1 or messages[0].get("role") != "user":
        raise RequestError("minimax_h3 takes a single user message", param="messages")
    content = messages[0].get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if not parts or any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
        raise RequestError("the message must be text; media go into image, last_image or references", param="messages")
    return "".join(str(part.get("text", "")) for part in parts)


class _MediaBox:
    """Moves the media of a request into tensors by role and leaves their shapes in the parameters.

    Roles: "image", "last_image", "latents", "audio_latents", "reference.<i>", "reference.<i>.sound".
    """

    def __init__(self, media: dict[str, MultimodalPayload]) -> None:
        self._media = media
        self._left = set(media)
        self._tensors: dict[str, Tensor] = {}

    def take(self, params: dict[str, Any]) -> None:
        """Rewrites `params`. Raises RequestError for media that are missing, of the wrong kind or not used."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in (*(name for name, _ in KEYFRAMES), *_LATENTS):
            if params.get(name) is not None:
                kind = "image" if name not in _LATENTS else name
                shapes[name] = self._put(name, params[name], kind, name)[0].shape
            params.pop(name, None)
        references = params.pop("references", None)
        if references is not None:
            if not isinstance(references, list) or not references:
                raise RequestError("references must be a list with at least one entry", param="references")
            params["references"] = [self._reference(i, item) for i, item in enumerate(references)]
        if "media_shapes" in params:
            raise RequestError("unknown parameter 'media_shapes'", param="media_shapes")
        params["media_shapes"] = shapes
        if self._left:
            raise RequestError("the request holds media that no parameter names", param=sorted(self._left)[0])

    def inputs(self, variant: str) -> list[ClientInput]:
        """What the client puts in: everything to the one stage, or noise and media to the stages that read them."""
        noise = {name: tensor for name, tensor in self._tensors.items() if name in _LATENTS}
        if variant == "default":
            parts = {"media": self._tensors}
        else:
            parts = {"media": {n: t for n, t in self._tensors.items() if n not in noise}, "noise": noise}
        return [
            ClientInput(port=port, payload=MultimodalPayload(tensors)) for port, tensors in parts.items() if tensors
        ]

    def _put(self, role: str, item: Any, kind: str, param: str) -> tuple[Tensor, dict[str, Any]]:
        """The medium that `item` ({"media": key}) names, now in the role, and its metadata."""
        key = item.get("media") if isinstance(item, dict) and set(item) == {"media"} else None
        if not isinstance(key, str) or key not in self._media:
            raise RequestError(f"{param}: the {kind} is not among the request's media", param=param)
        self._left.discard(key)
        held = _tensor_of(self._media[key], kind)
        if held is None:
            raise RequestError(f"{param}: {key} is no {kind}", param=param)
        _check_medium(held, kind, param)
        self._tensors[role] = held
        return held, self._media[key].meta

    def _reference(self, index: int, item: Any) -> dict[str, Any]:
        kind = _reference_kind(item)
        tensor, meta = self._put(f"reference.{index}", item[kind], kind, "references")
        found: dict[str, Any] = {"kind": kind, "shape": tensor.shape}
        if kind == "video":
            found["fps"] = item.get("fps") or meta.get("fps") or float(FPS)
            if item.get("audio") is not None:
                tensor, meta = self._put(f"reference.{index}.sound", item["audio"], "audio", "references")
                found["sound"] = tensor.shape
        if kind != "image":
            found["sample_rate"] = item.get("sample_rate") or meta.get("sample_rate")
        return found


def _reference_kind(item: Any) -> str:
    """What a reference is: {"image"}, {"video", "fps", "audio", "sample_rate"} or {"audio", "sample_rate"}."""
    if not isinstance(item, dict):
        raise RequestError("each reference is a mapping with image, video or audio", param="references")
    for kind, allowed in _REFERENCE_KEYS.items():
        if kind in item and item.keys() <= allowed:
            return kind
    raise RequestError(f"a reference cannot have {', '.join(sorted(item))} together", param="references")


def _tensor_of(payload: MultimodalPayload, kind: str) -> Tensor | None:
    """A picture or clip may have a leading axis of one; latents may be held under any one name."""
    held = payload.tensors.get(kind)
    if kind in _LATENTS:
        return held or (next(iter(payload.tensors.values())) if len(payload.tensors) == 1 else None)
    if held is not None and len(held.shape) == _AXES[kind] + 1 and held.shape[0] == 1:
        return Tensor(held.dtype, held.array[0])
    return held


def _check_medium(tensor: Tensor, kind: str, param: str) -> None:
    """uint8 [H, W, 3], uint8 [T, H, W, 3], float32 [channels, samples] or float32 latents; nothing empty."""
    shape = tensor.shape
    right = {
        "image": tensor.dtype == "uint8" and len(shape) == 3 and shape[-1] == 3,
        "video": tensor.dtype == "uint8" and len(shape) == 4 and shape[-1] == 3,
        "audio": tensor.dtype == "float32" and len(shape) == 2,
    }.get(kind, tensor.dtype == "float32")
    if not right or 0 in shape:
        raise RequestError(f"{param}: {tensor.dtype} {list(shape)} is no {kind}", param=param)


PIPELINE = PipelineConfig(
    name="minimax_h3",
    variants=VARIANTS,
    plan=plan,
    tasks=("video", *TASKS, "chat"),
    architectures=("MiniMaxH3ModularPipeline", "MiniMaxH3Pipeline"),
    description="MiniMax-H3: video with sound from text, from first and last pictures, or from reference media",
    footprint=footprint,
)

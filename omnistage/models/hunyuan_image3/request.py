"""From a client's request to the stages it visits, the parameters of each, its pictures and its outputs. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from omnistage.errors import RequestError
from omnistage.models.hunyuan_image3.ask import Ask, Task
from omnistage.models.hunyuan_image3.checkpoint import Checkpoint, Template
from omnistage.models.hunyuan_image3.layout import Part, Turn
from omnistage.models.hunyuan_image3.sizes import parse_size
from omnistage.models.hunyuan_image3.system_prompts import TYPES, system_prompt_of, texts_of
from omnistage.payload import MultimodalPayload, Tensor
from omnistage.request import OmniRequest
from omnistage.stages.diffusion.parameters import read_parameters

BotTask = Literal["auto", "think", "recaption", "think_recaption", "img_ratio", "image"]
DRAWN = ("image", "latents", "partial")
OUTPUTS = ("text", "image", "latents", "progress", "partial")
MAX_PICTURES = 3
_THINKING = ("think", "recaption", "think_recaption")
_TEXT_PARTS = ("text", "input_text")
_RECAPTION = "en_recaption"

T = TypeVar("T")
Side = Annotated[int, msgspec.Meta(ge=16, le=1 << 15)]


class Given(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters as clients send them. `system_prompt` is a type name or a text; `use_system_prompt` a type name, of
    which "custom" takes the text of `system_prompt`."""

    bot_task: BotTask | None = None
    system_prompt: Annotated[str, msgspec.Meta(max_length=1 << 16)] | None = None
    use_system_prompt: str | None = None
    size: str | None = None
    height: Side | None = None
    width: Side | None = None
    images: list[dict[str, Any]] | None = None
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, msgspec.Meta(ge=-100, le=100)] | None = None
    flow_shift: Annotated[float, msgspec.Meta(gt=0, le=1000)] | None = None
    sequence_template: Template | None = None
    drop_think: bool | None = None
    partial_images: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    return_latents: bool = False
    cache_salt: str = ""


class Reading(msgspec.Struct, frozen=True):
    """A request that has been read: what the stages are told, the pictures, the client's ports."""

    ask: Ask
    pictures: dict[str, Tensor]
    outputs: tuple[str, ...]


class Deployment(NamedTuple):
    """What a deployment can do: it has a text stage, it has a drawing stage, the one hands over to the other."""

    thinks: bool
    draws: bool
    handover: bool


def read_request(
    request: OmniRequest, media: dict[str, MultimodalPayload], checkpoint: Checkpoint, deployment: Deployment
) -> Reading:
    """Raises RequestError naming the field at fault."""
    given = read_parameters(Given, request.params)
    if request.voice is not None:
        raise RequestError("this model has no voice", param="voice")
    thinks = deployment.thinks
    outputs = _outputs(request, given, deployment)
    draws = any(name in DRAWN for name in outputs)
    said = _Conversation(media)
    turns = said.turns(request, given.images)
    if said.pictures and checkpoint.defaults.template == "pretrain":
        raise RequestError("this checkpoint draws from text only; pictures need an Instruct checkpoint", param="images")
    # The text is about a picture to draw, whoever draws it.
    leads = draws or request.task == "image" or given.size == "auto"
    bot_task = given.bot_task or _usual_task(checkpoint, leads=leads, thinks=thinks)
    size = _size(given, checkpoint, thinks=thinks)
    task = _task(bot_task, leads=leads, auto_size=size is None)
    defaults = checkpoint.defaults
    drop_think = _given_or(given.drop_think, defaults.drop_think)
    system, drawing_system = _systems(given, said.system, bot_task, checkpoint, drop_think=drop_think)
    ask = Ask(
        template=_given_or(given.sequence_template, defaults.template),
        turns=turns,
        task=task,
        draws=leads,
        system=system,
        drawing_system=drawing_system,
        pictures=tuple((tensor.shape[0], tensor.shape[1]) for tensor in said.pictures.values()),
        size=size,
        steps=_given_or(given.num_inference_steps, defaults.steps),
        guidance=_given_or(given.guidance_scale, defaults.guidance),
        flow_shift=_given_or(given.flow_shift, defaults.flow_shift),
        drop_think=drop_think,
        handover=deployment.handover and bool(task) and draws,
        partial_images=given.partial_images,
        cache_salt=given.cache_salt,
    )
    return Reading(ask, said.pictures, outputs)


def _given_or(given: T | None, default: T) -> T:
    return default if given is None else given


def _outputs(request: OmniRequest, given: Given, deployment: Deployment) -> tuple[str, ...]:
    """The client's ports; all that the deployment gives where the request does not say, of an answer (`auto`) its text.

    `return_latents` adds the latents to a picture; it does not ask for one.
    """
    usual = ("text", "image") if deployment.draws and given.bot_task != "auto" else ("text",)
    wanted = usual if request.modalities is None else request.modalities
    for name in wanted:
        if name not in OUTPUTS:
            raise RequestError(f"no modality {name!r}; this model gives {', '.join(OUTPUTS)}", param="modalities")
    draws = any(name in DRAWN for name in wanted)
    return tuple(dict.fromkeys((*wanted, *(("latents",) if draws and given.return_latents else ()))))


def _usual_task(checkpoint: Checkpoint, *, leads: bool, thinks: bool) -> str:
    """The bot task of a request that names none."""
    if not leads:
        return "auto"
    usual = checkpoint.defaults.bot_task
    return usual if thinks and usual != "auto" else "image"


def _task(bot_task: str, *, leads: bool, auto_size: bool) -> Task:
    if bot_task in _THINKING:
        return bot_task  # type: ignore[return-value]
    if bot_task == "img_ratio":
        return "ratio"
    if leads and bot_task == "auto":
        raise RequestError("bot_task auto answers in text; a picture needs another one", param="bot_task")
    if bot_task == "image" and not leads:
        raise RequestError("bot_task image draws a picture: add image to modalities", param="bot_task")
    if bot_task == "image":
        return "ratio" if auto_size else ""
    return "answer"


def _size(given: Given, checkpoint: Checkpoint, *, thinks: bool) -> tuple[int, int] | None:
    """(height, width) in pixels; None where the text stage chooses."""
    if (given.height is None) != (given.width is None):
        raise RequestError("give both height and width", param="width" if given.width is None else "height")
    if given.height is not None and given.width is not None:
        if given.size is not None:
            raise RequestError("give size or height and width, not both", param="size")
        return given.height, given.width
    if given.size not in (None, "auto"):
        return parse_size(str(given.size))
    if thinks:
        return None
    if given.size == "auto":
        raise RequestError("size auto needs the text stage, which this deployment does not have", param="size")
    return checkpoint.base_size, checkpoint.base_size


def _systems(
    given: Given, said: str | None, bot_task: str, checkpoint: Checkpoint, *, drop_think: bool
) -> tuple[str | None, str | None]:
    """The system prompt of the text stage and that of the drawing stage."""
    kind, text = _wanted_system(given, said)
    folder = checkpoint.folder
    system = system_prompt_of(folder, kind or checkpoint.defaults.system_prompt, bot_task, text)
    drawing = system
    if system and drop_think and bot_task in ("think", "think_recaption"):
        drawing = texts_of(folder).get(_RECAPTION, system)
    if checkpoint.defaults.template == "instruct":
        system, drawing = (part.strip() if part else part for part in (system, drawing))
    return system or None, drawing or None


def _wanted_system(given: Given, said: str | None) -> tuple[str | None, str | None]:
    """Type and text of the system prompt that a request asks for, as a parameter or as what a message `said`."""
    kind, text = given.use_system_prompt, given.system_prompt
    if text is not None and kind is None:
        kind, text = (text, None) if text in TYPES else ("custom", text)
    if said is not None:
        if kind is not None:
            raise RequestError("give the system prompt as a message or as a parameter, not both", param="system_prompt")
        return "custom", said
    if text is not None and kind not in ("custom", "dynamic"):
        raise RequestError(f"use_system_prompt {kind!r} takes no system_prompt text", param="system_prompt")
    if kind == "custom" and text is None:
        raise RequestError("use_system_prompt custom needs the text as system_prompt", param="system_prompt")
    return kind, text


class _Conversation:
    """Collects turns and pictures: tensors "0", "1", ... uint8 [H, W, 3] in order of appearance."""

    def __init__(self, media: dict[str, MultimodalPayload]) -> None:
        self._media = media
        self._left = set(media)
        self.system: str | None = None
        self.pictures: dict[str, Tensor] = {}

    def turns(self, request: OmniRequest, images: list[dict[str, Any]] | None) -> tuple[Turn, ...]:
        if request.raw_prompt is not None:
            raise RequestError("this model lays its prompts out itself: give prompt or messages", param="raw_prompt")
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give one of prompt and messages", param="prompt")
        references = [self._picture(image, f"images[{index}]") for index, image in enumerate(images or [])]
        if request.prompt is not None:
            turns = [Turn("user", (Part(text=request.prompt),))]
        else:
            turns = self._messages(request.messages or [])
        turns[-1] = Turn("user", (*references, *turns[-1].parts))
        if self._left:
            raise RequestError("the request holds media that nothing names", param=sorted(self._left)[0])
        if not any(part.text or part.picture is not None for part in turns[-1].parts):
            raise RequestError("the prompt is empty", param="prompt" if request.messages is None else "messages")
        return tuple(turns)

    def _messages(self, messages: list[dict[str, Any]]) -> list[Turn]:
        turns: list[Turn] = []
        for index, message in enumerate(messages):
            where, role = f"messages[{index}]", message.get("role")
            if role in ("system", "developer"):
                if turns or self.system is not None:
                    raise RequestError(f"{where}: one system message, at the beginning", param=where)
                self.system = "".join(part.text for part in self._parts(message.get("content"), where, text_only=True))
            elif role == "user":
                turns.append(Turn("user", self._parts(message.get("content"), where)))
            elif role == "assistant":
                turns.append(Turn("assistant", self._parts(message.get("content"), where, text_only=True)))
            else:
                raise RequestError(f"{where}: role {str(role)[:32]!r} is not supported", param=where)
        if not turns or turns[-1].role != "user":
            raise RequestError("the last message must be the user's", param="messages")
        return turns

    def _parts(self, content: Any, where: str, *, text_only: bool = False) -> tuple[Part, ...]:
        """Pictures first, as the model was trained, then the text as one piece."""
        if isinstance(content, str):
            return (Part(text=content),)
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise RequestError(f"{where}: content is a string or a list of parts", param=where)
        text: list[str] = []
        pictures: list[Part] = []
        for part in content:
            kind = part.get("type")
            if kind in _TEXT_PARTS:
                text.append(str(part.get("text", "")))
            elif kind == "image" and not text_only:
                pictures.append(self._picture(part, where))
            else:
                raise RequestError(f"{where}: a part of type {str(kind)[:32]!r} is not supported", param=where)
        return (*pictures, Part(text="".join(text))) if text else tuple(pictures)

    def _picture(self, item: dict[str, Any], param: str) -> Part:
        key = item.get("media")
        payload = self._media.get(key) if isinstance(key, str) else None
        if payload is None or not isinstance(key, str):
            raise RequestError(f"{param}: a picture was expected", param=param)
        tensor = _one_picture(payload, param)
        if len(self.pictures) == MAX_PICTURES:
            raise RequestError(f"more than {MAX_PICTURES} pictures", param=param)
        self._left.discard(key)
        number = len(self.pictures)
        self.pictures[str(number)] = tensor
        return Part(picture=number)


def _one_picture(payload: MultimodalPayload, param: str) -> Tensor:
    """uint8 [H, W, 3]. Raises RequestError."""
    tensor = payload.tensors.get("image")
    if tensor is not None and len(tensor.shape) == 4 and tensor.shape[0] == 1:
        tensor = Tensor(tensor.dtype, tensor.array[0])
    if tensor is None or tensor.dtype != "uint8" or len(tensor.shape) != 3 or tensor.shape[2] != 3:
        raise RequestError(f"{param}: one picture, uint8 [H, W, 3], was expected", param=param)
    if not tensor.nbytes:
        raise RequestError(f"{param}: the picture has no pixels", param=param)
    return tensor

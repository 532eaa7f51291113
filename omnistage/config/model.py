"""The configuration's plain data: what a pipeline declares, what a deploy file says, what the two resolve to.

`PipelineConfig` is frozen and lives in its model's folder: stages, ports, edges. `OmniConfig` is the one resolved
configuration: complete, serialisable, with the origin of every value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from omnistage.config.footprint import Footprint
from omnistage.faults import FaultSpec
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from omnistage.shared import SharedObjects

StageKind = Literal["ar", "generation", "diffusion"]
Objective = Literal["ttft", "ttfp", "e2el", "throughput"]
Placement = Literal["inline", "process"]
CLIENT = "client"

Positive = Annotated[int, msgspec.Meta(ge=1)]


class OptionSpec(msgspec.Struct, frozen=True):
    """A deploy-file key that one stage of one pipeline adds: its type (int, float, bool, str), default and bounds."""

    type: Literal["int", "float", "bool", "str"]
    default: int | float | bool | str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    help: str = ""


class TextMarkup(msgspec.Struct, frozen=True, kw_only=True):
    """How a model marks parts of the text that it writes: the notation of its tool calls ("" for a model that was not
    taught any), and the tags around what it thinks before it answers."""

    tool_format: Literal["", "hermes"] = ""
    reasoning: tuple[str, str] | None = None


class StageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One stage as its pipeline declares it.

    `component` is "module:attribute" of a factory `(StageContext) -> component`, resolved only in the process that owns
    the stage. `inputs` and `outputs` map port names to payload types (free words: "text", "audio", "codes", "kv", ...).
    `defaults` overrides StageConfig fields for this stage; `torch` is False for stages that need no torch. `markup`
    says how to read the text that it writes.
    """

    name: str
    kind: StageKind
    component: str
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    objective: Objective = "throughput"
    options: dict[str, OptionSpec] = {}
    defaults: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    capabilities: frozenset[str] = frozenset()
    markup: TextMarkup = TextMarkup()
    torch: bool = True


class EdgeSpec(msgspec.Struct, frozen=True):
    """A connection "stage.port" -> "stage.port"; the stage "client" is where inputs come from and outputs go."""

    source: str
    target: str

    @property
    def source_stage(self) -> str:
        return self.source.partition(".")[0]

    @property
    def source_port(self) -> str:
        return self.source.partition(".")[2]

    @property
    def target_stage(self) -> str:
        return self.target.partition(".")[0]

    @property
    def target_port(self) -> str:
        return self.target.partition(".")[2]

    @property
    def name(self) -> str:
        """`thinker->talker`, the key of the deploy file's `edges`."""
        return f"{self.source_stage}->{self.target_stage}"


class ClientInput(msgspec.Struct, kw_only=True):
    """A whole payload that the client puts on a "client.<port>" edge."""

    port: str
    payload: MultimodalPayload


class RequestPlan(msgspec.Struct, kw_only=True):
    """How one request runs through the graph: the stages it visits, what each is told, what the client puts in.

    `params` is per stage, plain data. `outputs` lists the client ports (targets of "client.<port>" edges) it wants.
    """

    stages: tuple[str, ...]
    params: dict[str, dict[str, Any]] = {}
    inputs: list[ClientInput] = []
    outputs: tuple[str, ...] = ()


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One of the graphs that a pipeline declares."""

    stages: tuple[StageSpec, ...]
    edges: tuple[EdgeSpec, ...]

    @property
    def between(self) -> list[str]:
        """The names of the edges from stage to stage, in order."""
        inner = [edge for edge in self.edges if CLIENT not in (edge.source_stage, edge.target_stage)]
        return list(dict.fromkeys(edge.name for edge in inner))


Footprints = Callable[["OmniConfig", "StageConfig"], Footprint]
Planner = Callable[[OmniRequest, dict[str, MultimodalPayload], "OmniConfig"], RequestPlan]


class PipelineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A model family's topology. `plan` is a pure, torch-free function; it raises RequestError when it cannot run.

    `variant_for` picks a variant from a checkpoint folder's config when the deploy file names none; `default_model` is
    the reference that a built-in name stands for. `footprint(config, stage)` tells from headers and configs what memory
    a stage takes; device and dtype of `stage` are decided then. It raises OmniError for a damaged checkpoint.
    """

    name: str
    variants: dict[str, Variant]
    plan: Planner
    tasks: tuple[str, ...]
    default_variant: str = "default"
    voices: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    default_model: str = ""
    sample_rate: int | None = None
    description: str = ""
    variant_for: Callable[[str], str] | None = None
    footprint: Footprints | None = None


class StageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage, resolved. Sizes in the unit of their name; `threads` 0 means cores / stages, at least 1.

    `co_located_with` (deploy key `with`) puts an inline stage in another stage's process. `options` holds the values of
    the stage's own `OptionSpec` keys. `sampling` holds the default sampling parameters.
    """

    name: str
    kind: StageKind
    placement: Placement = "process"
    co_located_with: str = ""
    device: Annotated[str, msgspec.Meta(pattern=r"^[a-z]+(:[0-9]+)?$")] = "auto"
    replicas: Positive = 1
    replica_policy: Literal["least_work", "round_robin", "random"] = "least_work"
    threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int4"] = "none"
    weight_layout: Literal["auto", "plain", "blocked", "both"] = "auto"
    attention_backend: Literal["auto", "TORCH_SDPA", "FLEX_ATTENTION", "FLASH_ATTN"] = "auto"
    graphs: Literal["eager", "captured"] = "eager"
    tensor_parallel: Positive = 1
    objective: Objective = "throughput"
    max_num_seqs: Positive = 16
    token_budget: Positive = 512
    block_size: Positive = 16
    kv_memory_mb: Positive = 256
    max_model_len: Annotated[int, msgspec.Meta(ge=0)] = 0
    prefix_caching: bool = True
    arena_mb: Positive = 16
    faults: tuple[FaultSpec, ...] = ()
    options: dict[str, int | float | bool | str] = {}
    sampling: dict[str, Any] = {}


class EdgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage-to-stage connection, resolved. `async_chunk` False holds chunks back until the last one."""

    name: str
    connector: Literal["auto", "inline", "shm"] = "auto"
    async_chunk: bool = True
    max_inflight: Positive = 64
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the whole server. Times in seconds, sizes in the unit of their name.

    `max_running` requests run, `max_queue` wait; `max_wait_s` bounds the predicted work ahead of a request that is let
    in (requests of priority > 0 may fill all of it, of priority 0 three quarters, others half).
    """

    max_queue: Positive = 256
    max_wait_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    max_running: Positive = 256
    max_body_mb: Positive = 64
    max_audio_s: Positive = 600
    max_image_pixels: Positive = 1 << 25
    max_video_frames: Positive = 1024
    max_input_chars: Positive = 1 << 18
    request_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    drain_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where client media may come from and how the server decodes them.

    `remote`: fetch http(s) URLs, from public addresses only, and only from `remote_hosts` if any are named.
    `file_root`: the folder below which file:// URLs are read, "" for none. `decode_processes` decode media apart from
    the server, each with so much memory and time; 0 decodes in the server's own threads.
    """

    remote: bool = False
    remote_hosts: tuple[str, ...] = ()
    max_redirects: Annotated[int, msgspec.Meta(ge=0, le=10)] = 3
    fetch_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 20.0
    fetch_max_mb: Positive = 64
    file_root: str = ""
    decode_processes: Annotated[int, msgspec.Meta(ge=0, le=64)] = 2
    decode_memory_mb: Positive = 4096
    decode_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 90.0


class TraceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timelines of requests: of how many; how many spans of each kind and name (beyond that, neighbours are joined; a
    span takes 32 bytes); how many requests at a time get one of every step and chunk, the others one span per stage.

    `otlp` is the URL to which they are exported as OpenTelemetry spans, "" for none.
    """

    enabled: bool = True
    requests: Positive = 128
    spans: Annotated[int, msgspec.Meta(ge=16)] = 512
    detailed: Positive = 8
    otlp: Annotated[str, msgspec.Meta(pattern=r"^(https?://[^\s/]\S*)?$")] = ""


class RecordConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where all that happens is written down for `omnistage replay`: `folder`, "" for nowhere.

    No file of it grows beyond `max_mb`. The last `bundles` failed requests are kept, each up to `bundle_mb`.
    """

    folder: str = ""
    max_mb: Positive = 1024
    bundles: Positive = 32
    bundle_mb: Positive = 64


class OmniConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The one resolved configuration. `origins` maps dotted keys ("stages.thinker.dtype") to where values came from.

    `model_path` is a local folder, or "" for a built-in pipeline that fetches its own weights into `cache_dir`.
    """

    model: str
    model_path: str
    pipeline: str
    variant: str
    stages: dict[str, StageConfig]
    edges: dict[str, EdgeConfig]
    limits: LimitsConfig
    media: MediaConfig = MediaConfig()
    trace: TraceConfig = TraceConfig()
    record: RecordConfig = RecordConfig()
    served_name: str = ""
    cache_dir: str = ""
    origins: dict[str, str] = {}


class StageContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a component factory gets in the process that owns its stage. `shared` is one for all stages of a process."""

    config: OmniConfig
    stage: StageConfig
    spec: StageSpec
    model_path: str
    replica: int = 0
    shared: SharedObjects = msgspec.field(default_factory=SharedObjects)

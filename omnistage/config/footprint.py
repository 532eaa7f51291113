"""What a stage takes of memory, as its model's folder declares it from headers and configs. All sizes in bytes."""

from __future__ import annotations

from typing import Literal

import msgspec

# Compiled kernels that oneDNN may keep in a process; beyond that the least recently used are dropped.
CACHED_KERNELS = 96
# Heaviest library that a stage imports -> resident MiB of its process before anything is loaded.
Library = Literal["python", "onnxruntime", "torch", "transformers", "diffusers"]
PROCESS_MB: dict[Library, int] = {
    "python": 40,
    "onnxruntime": 62,
    "torch": 245,
    "transformers": 340,
    "diffusers": 420,
}


class KvShape(msgspec.Struct, frozen=True, kw_only=True):
    """What an AR stage keeps of every position: keys and values of all layers and the hand-off row."""

    layers: int
    kv_heads: int
    head_dim: int
    max_model_len: int
    handoff_width: int = 0

    @property
    def width(self) -> int:
        """Elements per position."""
        return 2 * self.layers * self.kv_heads * self.head_dim + self.handoff_width


class Weights(msgspec.Struct, frozen=True):
    """One component: bytes that it takes once loaded, and the most that are resident while it is being loaded.

    Pages of a mapped weight file count in `peak`; the kernel takes back those that `held` does not name. With `maps`
    some tensors stay in the file, so that all its pages are resident later too; `passing` bytes of `peak` are copies
    that are dropped again. `late`: it is loaded at its first use.
    """

    held: int
    peak: int
    maps: bool = False
    passing: int = 0
    late: bool = False

    @property
    def resident(self) -> int:
        """The most that is resident once it is loaded."""
        return self.peak - self.passing if self.maps else self.held


class Working(msgspec.Struct, frozen=True):
    """The most that a step holds beside weights and caches: `nbytes` when it is as full as `of` says; of these each
    stream of `max_num_seqs` brings `per_stream`."""

    nbytes: int = 0
    of: str = ""
    per_stream: int = 0


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a stage. `weights` is by component; with `shared`, stages in one process hold equal components
    once. `extra` names further memory, `caches` what fills up with inputs that may come again, at most; `working` is
    what steps hold beside all that. `missing` names weights that are not on this machine yet.

    `dtype` is the type it computes in; `layout` how it holds the weights of linear layers, and `reason` why.
    """

    weights: dict[str, Weights]
    kv: KvShape | None = None
    extra: dict[str, int] = {}
    caches: dict[str, int] = {}
    working: Working = Working()
    library: Library = "transformers"
    shared: bool = False
    missing: tuple[str, ...] = ()
    dtype: str = "float32"
    layout: str = "plain"
    reason: str = ""

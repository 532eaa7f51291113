"""Library modules and tokenizers from checkpoint folders, with every weight accounted for."""

from __future__ import annotations

import mmap
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from omnistage.errors import ConfigError

# Mismatched sizes are reported by weight, not raised for all of them. Without safetensors the library unpickles.
_OPTIONS = {
    "local_files_only": True,
    "use_safetensors": True,
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,
}


def load_pretrained(kind: Any, folder: str | Path, *, whole: bool = True, **options: Any) -> Any:
    """`kind.from_pretrained(folder)` in evaluation mode and in memory, from local safetensors files alone.

    The library draws weights that the files lack at random and drops those that it has no place for; here that is an
    error, the latter if `kind` is the `whole` of what the files hold. Raises ConfigError that names a weight.
    """
    disable_progress_bar()
    try:
        model, report = kind.from_pretrained(folder, **_OPTIONS, **options)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, StrictDataclassError) as error:
        told = str(error).replace(f"{folder}/", "").replace(str(folder), Path(folder).name)
        raise ConfigError(f"model: the weights cannot be loaded: {told}", param="model") from None
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        raise ConfigError(
            f"model: weight {name} is {list(stored)}, its configuration says {list(wanted)}", param="model"
        )
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(f"model: the checkpoint lacks {len(missing)} weights, {missing[0]} among them", param="model")
    if whole and (surplus := sorted(report["unexpected_keys"])):
        raise ConfigError(
            f"model: the checkpoint has a weight {surplus[0]} that its configuration lacks", param="model"
        )
    make_resident(model)
    return model.eval()


def make_resident(module: nn.Module) -> None:
    """Reads every page of the module's weights on a CPU once, so that no request waits for those of a mapped file."""
    for weight in chain(module.parameters(), module.buffers()):
        if weight.device.type == "cpu" and weight.numel():
            weight.detach().flatten().view(torch.uint8)[:: mmap.PAGESIZE].max()


def load_tokenizer(folder: Path) -> Tokenizer:
    """Raises ConfigError for a folder without `tokenizer.json`."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError("model: the folder has no tokenizer.json", param="model")
    return Tokenizer.from_file(str(file))


def load_auto_tokenizer(folder: str | Path) -> Any:
    """The library's tokenizer of a folder with `tokenizer.json`, or `vocab.json` beside `merges.txt`.

    Without any of them the library makes one that has no words; here that is a ConfigError.
    """
    if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise ConfigError(f"model: {Path(folder).name} has no tokenizer.json and no vocab.json", param="model")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        told = f"model: the tokenizer in {Path(folder).name} cannot be loaded ({type(error).__name__})"
        raise ConfigError(told, param="model") from None

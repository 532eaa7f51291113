"""System prompts of a checkpoint, by type name. Torch-free.

The texts are licensed content of the checkpoint: they are read from the `system_prompt.py` of its folder, as literals,
without running it.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

from omnistage.errors import ConfigError, RequestError

TYPES = ("None", "en_vanilla", "en_recaption", "en_think_recaption", "en_unified", "dynamic", "custom")
_FILE = "system_prompt.py"
_DYNAMIC = {
    "think": "en_think_recaption",
    "think_recaption": "en_think_recaption",
    "recaption": "en_recaption",
    "image": "en_vanilla",
}


def system_prompt_of(folder: Path, kind: str, bot_task: str, custom: str | None) -> str | None:
    """The text for a type name; None for no system prompt.

    `dynamic` goes by the task; tasks that it has no text for, and `custom`, take `custom`. Raises RequestError for
    unknown names and for texts that the folder does not have.
    """
    if kind not in TYPES:
        raise RequestError(
            f"system prompt type {kind[:64]!r} is not one of {', '.join(TYPES)}", param="use_system_prompt"
        )
    if kind == "dynamic":
        kind = _DYNAMIC.get(bot_task, "custom")
        if kind == "en_vanilla":
            return _text(folder, kind).strip("\n")
    if kind == "None":
        return None
    return custom if kind == "custom" else _text(folder, kind)


def _text(folder: Path, kind: str) -> str:
    text = texts_of(folder).get(kind)
    if text is None:
        raise RequestError(
            f"the checkpoint has no system prompt {kind!r} (a {_FILE} in its folder); give the text as system_prompt",
            param="use_system_prompt",
        )
    return text


@lru_cache(maxsize=8)
def texts_of(folder: Path) -> dict[str, str]:
    """The texts by type name; empty when the folder has no file of them. Raises ConfigError for a file that is no
    Python."""
    file = folder / _FILE
    if not file.is_file():
        return {}
    try:
        module = ast.parse(file.read_text("utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"hunyuan_image3: {_FILE} cannot be read: {error}", param="model") from None
    literals = dict(_literals(module))
    found: dict[str, str] = {}
    for kind in TYPES:
        words = set(kind.split("_"))
        names = [name for name in literals if name.endswith(f"_{kind}")]
        # The unified prompt puts its words in another order than its type name.
        names = names or [name for name in literals if words < set(name.split("_")) and "t2i" not in name]
        if len(words) > 1 and len(names) == 1:
            found[kind] = literals[names[0]]
    return found


def _literals(module: ast.Module) -> list[tuple[str, str]]:
    """Module-level assignments of plain strings."""
    return [
        (node.targets[0].id, node.value.value)
        for node in module.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]

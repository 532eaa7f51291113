"""`omnistage chat`: a conversation in the terminal, answers streamed as they are generated."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from omnistage.entrypoints.cli.main import overrides_of
from omnistage.entrypoints.media_files import write_media
from omnistage.entrypoints.omni import Omni
from omnistage.request import OmniRequestOutput

LEAVE = ("/exit", "/quit", "/bye")


def run(arguments: argparse.Namespace) -> int:
    """Reads one message a line until end of input or /exit; /reset starts anew."""
    modalities = ["text", "audio"] if arguments.speak else ["text"]
    start = [{"role": "system", "content": arguments.system}] if arguments.system else []
    with Omni(arguments.model, arguments.deploy, **overrides_of(arguments)) as omni:
        messages: list[dict[str, Any]] = list(start)
        turn = 0
        while (text := _read()) is not None and text not in LEAVE:
            if text == "/reset":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": text})
            result = omni.generate({"messages": messages, "modalities": modalities}, _show)[0]
            print()
            if result.error is not None:
                print(f"error: {result.error.message}", file=sys.stderr)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": result.text})
            turn += 1
            if arguments.speak:
                Path(arguments.speak).mkdir(parents=True, exist_ok=True)
                write_media(result.tensors, result.meta, Path(arguments.speak) / str(turn))
    return 0


def _read() -> str | None:
    """The next message, or None at the end of input. Empty lines are skipped."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    for line in sys.stdin:
        if line.strip():
            return line.strip()
    return None


def _show(output: OmniRequestOutput) -> None:
    print(output.text, end="", flush=True)

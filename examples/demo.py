"""Asks one question, prints the answer while it is generated, and writes the spoken answer to out/demo.wav."""

from pathlib import Path

from omnistage import Omni
from omnistage.entrypoints.media_files import write_media
from omnistage.request import OmniRequestOutput

QUESTION = "What is the capital of France?"


def show(output: OmniRequestOutput) -> None:
    print(output.text, end="", flush=True)


def main() -> None:
    print(f"Q: {QUESTION}\nA: ", end="", flush=True)
    with Omni("smol-speech") as omni:
        request = {"prompt": QUESTION, "sampling": {"thinker": {"temperature": 0.0, "max_tokens": 60}}}
        result = omni.generate(request, show)[0].raise_for_error()
    out = Path("out")
    out.mkdir(exist_ok=True)
    (file,) = write_media(result.tensors, result.meta, out / "demo")
    seconds = result.tensors["audio"].shape[1] / result.meta["sample_rate"]
    print(f"\nspoken answer: {file} ({seconds:.1f} s)")


if __name__ == "__main__":
    main()

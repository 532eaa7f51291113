"""Qwen3-Omni against transformers' `generate`, on the same random weights (about 180 M parameters), in the same run.

    python -m bench.qwen3_omni [--quick]

First audio against the reference's whole answer; requests per second at 1, 4, 16 at once against the reference one by
one and in a batch; TTFT, TPOT, RTF with and without speech; the vocoder's stream, at the released model's size, against
decoding again with 25 frames of left context. Lengths are forced, so both sides do the same work. `--quick` has shorter
answers and no batch of 16.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration
from transformers.utils.logging import disable_progress_bar

from bench.qwen3_omni_model import CODEBOOK, vocoder_of_released_size, write_checkpoint
from bench.report import machine, table
from omnistage.entrypoints.omni import Omni, OmniResult
from omnistage.models.qwen3_omni.code2wav import lay_out
from omnistage.models.qwen3_omni.streaming import StreamingVocoder, StreamState
from omnistage.ops.blocked import choose_layout
from omnistage.request import RequestMetrics

QUESTION = "Hello world, what is the sound of a video?"
LEFT_CONTEXT = 25
# Frames of a vocoder stream before it is measured, and how many chunks of each size are.
WARM_FRAMES = 40
STEPS = {1: 8, 4: 4, 25: 2}
THREADS = 2


class Lengths(msgspec.Struct, frozen=True):
    """Text tokens and codec frames of an answer."""

    text: int
    frames: int


LONG, SHORT, QUICK = Lengths(150, 545), Lengths(40, 100), Lengths(20, 40)


def line(name: str, lengths: Lengths, *, speaks: bool = True) -> dict[str, Any]:
    """A request of forced lengths; a last token is neither spoken nor a frame."""
    text = {"temperature": 0.0, "min_tokens": lengths.text, "max_tokens": lengths.text}
    talker = {"temperature": 0.0, "min_tokens": lengths.frames + 1, "max_tokens": lengths.frames + 1}
    sampling = {"thinker": text, "talker": talker} if speaks else {"thinker": text}
    return {
        "id": name,
        "prompt": QUESTION,
        "modalities": ["text", "audio"] if speaks else ["text"],
        "sampling": sampling,
    }


class Ours:
    """OmniStage in its default deployment: three processes."""

    def __init__(self, omni: Omni) -> None:
        self._omni = omni

    def ask(self, name: str, lengths: Lengths, *, speaks: bool = True) -> RequestMetrics:
        (result,) = self._omni.generate(line(name, lengths, speaks=speaks))
        return _metrics(result, lengths)

    def together(self, count: int, lengths: Lengths) -> float:
        """Seconds until `count` requests are answered."""
        began = time.perf_counter()
        results = self._omni.generate([line(f"r{index}", lengths) for index in range(count)])
        seconds = time.perf_counter() - began
        for result in results:
            _metrics(result, lengths)
        return seconds


def _metrics(result: OmniResult, lengths: Lengths) -> RequestMetrics:
    result.raise_for_error()
    assert result.metrics is not None
    assert len(result.token_ids) == lengths.text
    return result.metrics


class Theirs:
    """The reference: `generate` on all threads, in this process."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(THREADS)
        self.model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._ids = self._prompt(folder)

    def _prompt(self, folder: Path) -> torch.Tensor:
        messages = [{"role": "user", "content": QUESTION}]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return torch.tensor([tokenizer(text)["input_ids"]])

    def seconds(self, count: int, lengths: Lengths) -> float:
        """A batch of `count`."""
        ids = self._ids.expand(count, -1)
        began = time.perf_counter()
        self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            speaker="ethan",
            thinker_do_sample=False,
            talker_do_sample=False,
            thinker_min_new_tokens=lengths.text,
            thinker_max_new_tokens=lengths.text,
            thinker_eos_token_id=self.model.generation_config.eos_token_id,
            talker_min_new_tokens=lengths.frames + 1,
            talker_max_new_tokens=lengths.frames + 1,
        )
        return time.perf_counter() - began


def first_audio(ours: Ours, theirs: Theirs, lengths: Lengths) -> str:
    ours.ask("warm", QUICK)
    theirs.seconds(1, QUICK)
    metrics = ours.ask("first", lengths)
    whole = theirs.seconds(1, lengths)
    first = metrics.ttfp_s or 0.0
    row = (f"{lengths.text} / {lengths.frames}", f"{first:.2f}", f"{metrics.e2el_s:.1f}", f"{whole:.1f}")
    head = ("tokens / frames", "TTFP s", "E2EL s", "reference s", "TTFP / reference")
    return table(head, [(*row, f"{100 * first / whole:.1f} %")])


def throughput(ours: Ours, theirs: Theirs, lengths: Lengths, counts: tuple[int, ...]) -> str:
    alone = theirs.seconds(1, lengths)
    rows = []
    for count in counts:
        mine = ours.together(count, lengths)
        batch = alone if count == 1 else theirs.seconds(count, lengths)
        rates = (f"{count / mine:.3f}", f"{alone * count / mine:.2f}x", f"{batch / mine:.2f}x")
        rows.append((count, f"{mine:.1f}", f"{alone * count:.1f}", f"{batch:.1f}", *rates))
    head = ("at once", "ours s", "one by one s", "batch s", "requests/s", "vs one by one", "vs batch")
    return table(head, rows)


def latencies(ours: Ours, lengths: Lengths) -> str:
    rows = []
    for speaks in (True, False):
        got = [ours.ask(f"l{index}", lengths, speaks=speaks) for index in range(3)]
        ttft, tpot = median(m.ttft_s or 0.0 for m in got), median(m.tpot_s or 0.0 for m in got)
        rtf = f"{median(m.rtf or 0.0 for m in got):.2f}" if speaks else "-"
        rows.append(("with speech" if speaks else "text only", f"{ttft * 1e3:.0f}", f"{tpot * 1e3:.1f}", rtf))
    return table(("answer", "TTFT ms", "TPOT ms", "RTF"), rows)


def vocoder() -> str:
    """CPU seconds per chunk of one stream, carried against decoded again with left context; one thread."""
    torch.set_num_threads(1)
    module = vocoder_of_released_size()
    codes = torch.randint(0, CODEBOOK, (module.config.num_quantizers, WARM_FRAMES + 2 * 25))
    with torch.inference_mode():
        whole = module(codes[None])[0, 0]
        again = {size: _decoded_again(module, codes, size, steps) for size, steps in STEPS.items()}
        lay_out(module, choose_layout("auto", module))
        ours = StreamingVocoder(module, max_frames=32)
        rows = [_vocoder_row(ours, codes, size, again[size], whole) for size in STEPS]
    return table(("chunk", "ours CPU s", "left context CPU s", "gain", "frames computed / out", "difference"), rows)


def _vocoder_row(
    ours: StreamingVocoder, codes: torch.Tensor, size: int, again: float, whole: torch.Tensor
) -> tuple[str, ...]:
    made, (state,) = ours.advance([codes[:, :WARM_FRAMES]], [StreamState()])
    pieces = list(made)
    began = time.process_time()
    for step in range(STEPS[size]):
        start = WARM_FRAMES + step * size
        made, (state,) = ours.advance([codes[:, start : start + size]], [state])
        pieces += made
    spent = (time.process_time() - began) / STEPS[size]
    wave = torch.cat(pieces)
    difference = float((wave - whole[: len(wave)]).abs().max())
    share = state.frames / (WARM_FRAMES + STEPS[size] * size)
    return (str(size), f"{spent:.3f}", f"{again:.3f}", f"{again / spent:.1f}x", f"{share:.2f}", f"{difference:.1e}")


def _decoded_again(module: Any, codes: torch.Tensor, size: int, steps: int) -> float:
    began = time.process_time()
    for start in range(WARM_FRAMES, WARM_FRAMES + steps * size, size):
        module(codes[None, :, start - LEFT_CONTEXT : start + size])
    return (time.process_time() - began) / steps


def main(*, quick: bool) -> None:
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        count = write_checkpoint(Path(folder))
        print(f"{machine()}; {count / 1e6:.0f} M random parameters, float32", flush=True)
        theirs = Theirs(Path(folder))
        with Omni(folder, dtype="float32", kv_memory_mb=512) as omni:
            ours = Ours(omni)
            print("\n" + first_audio(ours, theirs, SHORT if quick else LONG), flush=True)
            counts, lengths = ((1, 4), QUICK) if quick else ((1, 4, 16), SHORT)
            print("\n" + throughput(ours, theirs, lengths, counts), flush=True)
            print("\n" + latencies(ours, lengths), flush=True)
    print("\n" + vocoder())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter answers, at most 4 at once")
    main(quick=parser.parse_args().quick)

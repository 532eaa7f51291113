"""Trains the variant that reads a language model: `python -m omnistage.models.tiny_shapes.train_hidden --help`.

The language model stays as it is: the hidden states of all captions are computed once, then the painter with the word
table is fine-tuned to read them.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from omnistage.models.tiny_shapes.captions import caption
from omnistage.models.tiny_shapes.drawing import VALUES, Attributes
from omnistage.models.tiny_shapes.judge import load_judge
from omnistage.models.tiny_shapes.network import (
    HIDDEN_TOKENS,
    HIDDEN_WIDTH,
    HiddenPainter,
    Painter,
    load_weights,
    save_weights,
)
from omnistage.models.tiny_shapes.quality import measure
from omnistage.models.tiny_shapes.stage import WEIGHTS
from omnistage.models.tiny_shapes.training import PainterTrainer, Recipe

_BATCH = 64


class HiddenTable:
    """The hidden states of every caption, float16 [captions, 11, 576]."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._every = [Attributes(*values) for values in itertools.product(*VALUES)]
        self._rows = {one: row for row, one in enumerate(self._every)}
        ids = [tokenizer.encode(caption(one)).ids for one in self._every]
        if {len(row) for row in ids} != {HIDDEN_TOKENS} or model.config.hidden_size != HIDDEN_WIDTH:
            raise ValueError(f"captions must be {HIDDEN_TOKENS} tokens and states {HIDDEN_WIDTH} wide: another model?")
        self.states = _states(model.get_decoder().eval(), ids)

    def __call__(self, asked: list[Attributes]) -> Tensor:
        return self.states[torch.tensor([self._rows[one] for one in asked])].float()


@torch.inference_mode()
def _states(decoder: Any, ids: list[list[int]]) -> Tensor:
    rows = torch.tensor(ids)
    return torch.cat([decoder(input_ids=part).last_hidden_state.half() for part in torch.split(rows, _BATCH)])


def train(folder: Path, language_model: Path, minutes: float, seed: int, *, pictures: int = 128) -> None:
    """Writes hidden_painter.safetensors and hidden_quality.json to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    table = HiddenTable(language_model)
    _log(f"{len(table.states)} captions")
    words = Painter()
    load_weights(words, WEIGHTS)
    torch.manual_seed(seed)
    painter = HiddenPainter()
    kept = {name: value for name, value in words.state_dict().items() if not name.startswith("words.")}
    painter.load_state_dict(kept, strict=False)
    # The first token of a text has states unlike all others.
    painter.hidden_mean.copy_(table.states[:, 1:].float().mean((0, 1)))
    painter.hidden_std.copy_(table.states[:, 1:].float().std((0, 1)).clamp_min(1e-3))
    recipe = Recipe(seconds=minutes * 60, seed=seed, rate=0.6, warmup=40, decay_from=0.4)
    trainer = PainterTrainer(painter, recipe, table)
    steps = trainer.run(_log)
    painter.load_state_dict(trainer.average)
    save_weights(painter, folder / "hidden_painter.safetensors")
    measured = msgspec.to_builtins(measure(painter.eval(), load_judge(), pictures, conditions=table))
    report = {"seed": seed, "cpu_minutes": minutes, "steps": steps, "quality": measured}
    (folder / "hidden_quality.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    _log(f"all attributes {measured['all_attributes']}, Frechet distance {measured['frechet']}")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--language-model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--minutes", type=float, default=25.0, help="CPU minutes of training")
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options.out, options.language_model, options.minutes, options.seed)


if __name__ == "__main__":
    main()

"""The painter: a diffusion transformer on pixels, and how its weights are stored.

Each (request, guidance branch) is a document of 64 picture rows and 12 word rows; as all documents are equally long, a
call is a plain batch of documents. Rectified flow: the network gives the velocity from data to noise at time t, 1 is
noise. Modulation is shared by all blocks, plus a table of each block.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from omnistage.models.tiny_shapes.captions import LENGTH, WORDS
from omnistage.models.tiny_shapes.drawing import SIDE

PATCH = 4
GRID = SIDE // PATCH
PICTURE_ROWS = GRID * GRID
ROWS = PICTURE_ROWS + LENGTH
CHANNELS = 3
WIDTH, DEPTH, HEADS = 128, 8, 4
_FREQUENCIES = 64
_SLOWEST = 1000.0
# What every caption is in the tokens of SmolLM2, and the width of its states.
HIDDEN_TOKENS, HIDDEN_WIDTH = 11, 576
# Hidden states beyond so many deviations are cut.
_LOUDEST = 8.0


class Block(nn.Module):
    """Attention and feed-forward, each shifted, scaled and gated by `modulation` [n, 6, width] plus its own table."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.query_norm = nn.RMSNorm(WIDTH // HEADS)
        self.key_norm = nn.RMSNorm(WIDTH // HEADS)
        self.table = nn.Parameter(torch.zeros(6, WIDTH))
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.narrow.weight)

    def modulated(self, rows: Tensor, modulation: Tensor) -> Tensor:
        """What the attention reads: the signal that step caches watch."""
        part = (modulation + self.table)[:, :2, None]
        return functional.layer_norm(rows, (WIDTH,)) * (1 + part[:, 0]) + part[:, 1]

    def forward(self, rows: Tensor, modulation: Tensor) -> Tensor:
        count, length, _ = rows.shape
        part = (modulation + self.table).unsqueeze(2)
        heads = self.qkv(self.modulated(rows, modulation)).view(count, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(self.query_norm(query), self.key_norm(key), value)
        rows = rows + part[:, 2] * self.mix(attended.transpose(1, 2).reshape(count, length, WIDTH))
        normed = functional.layer_norm(rows, (WIDTH,)) * (1 + part[:, 3]) + part[:, 4]
        out: Tensor = rows + part[:, 5] * self.narrow(functional.gelu(self.widen(normed), approximate="tanh"))
        return out


class Painter(nn.Module):
    """In three parts, so that a step cache can leave out the middle one: `embed`, `stack`, `head`."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_in = nn.Linear(CHANNELS * PATCH * PATCH, WIDTH)
        self.picture_places = nn.Parameter(torch.randn(PICTURE_ROWS, WIDTH) * 0.02)
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.word_places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.time_in = nn.Linear(2 * _FREQUENCIES, WIDTH)
        self.time_out = nn.Linear(WIDTH, WIDTH)
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.final = nn.Linear(WIDTH, 2 * WIDTH)
        self.patch_out = nn.Linear(WIDTH, CHANNELS * PATCH * PATCH)
        self._start()

    def _start(self) -> None:
        """Blocks begin as the identity with open gates, the output as zero."""
        for layer in (self.modulation, self.final, self.patch_out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            self.modulation.bias.view(6, WIDTH)[[2, 5]] = 1.0
        nn.init.normal_(self.words.weight, std=0.5)

    def time(self, times: Tensor) -> Tensor:
        """[n] to [n, width]."""
        speeds = torch.exp(-math.log(_SLOWEST) * torch.arange(_FREQUENCIES, device=times.device) / _FREQUENCIES)
        angles = times[:, None] * speeds * _SLOWEST
        waves = torch.cat([angles.cos(), angles.sin()], 1)
        out: Tensor = self.time_out(functional.silu(self.time_in(waves)))
        return out

    def embed(self, pictures: Tensor, words: Tensor) -> Tensor:
        """[n, 3, 32, 32] and [n, 12] to rows [n, 76, width]."""
        patches = pictures.view(-1, CHANNELS, GRID, PATCH, GRID, PATCH).permute(0, 2, 4, 1, 3, 5)
        picture = self.patch_in(patches.reshape(-1, PICTURE_ROWS, CHANNELS * PATCH * PATCH)) + self.picture_places
        return torch.cat([picture, self.text_rows(words)], 1)

    def text_rows(self, words: Tensor) -> Tensor:
        """The condition as rows [n, words, width]; zeros alone are the unguided branch."""
        rows: Tensor = self.words(words) + self.word_places
        return rows

    def modulations(self, time: Tensor) -> Tensor:
        """[n, 6, width] from `time`."""
        out: Tensor = self.modulation(functional.silu(time)).view(-1, 6, WIDTH)
        return out

    def stack(self, rows: Tensor, modulation: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows, modulation)
        return rows

    def head(self, rows: Tensor, time: Tensor) -> Tensor:
        """The velocity [n, 3, 32, 32]."""
        shift, scale = self.final(functional.silu(time)).chunk(2, 1)
        normed = functional.layer_norm(rows[:, :PICTURE_ROWS], (WIDTH,))
        patches = self.patch_out(normed * (1 + scale[:, None]) + shift[:, None])
        split = patches.view(-1, GRID, GRID, CHANNELS, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
        picture: Tensor = split.reshape(-1, CHANNELS, SIDE, SIDE)
        return picture

    def forward(self, pictures: Tensor, times: Tensor, words: Tensor) -> Tensor:
        time = self.time(times)
        return self.head(self.stack(self.embed(pictures, words), self.modulations(time)), time)


class HiddenPainter(Painter):
    """The painter that reads the hidden states of a language model in the place of a word table.

    The condition is [n, 11, `hidden`] of the model's last layer; all zeros stand for no caption.
    """

    hidden_mean: Tensor
    hidden_std: Tensor

    def __init__(self, hidden: int = HIDDEN_WIDTH) -> None:
        super().__init__()
        del self.words
        self.hidden_in = nn.Linear(hidden, WIDTH)
        self.free = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.register_buffer("hidden_mean", torch.zeros(hidden))
        self.register_buffer("hidden_std", torch.ones(hidden))
        nn.init.normal_(self.hidden_in.weight, std=0.5 / math.sqrt(hidden))

    def text_rows(self, words: Tensor) -> Tensor:
        scaled = ((words - self.hidden_mean) / self.hidden_std).clamp(-_LOUDEST, _LOUDEST)
        rows = self.hidden_in(scaled)
        is_free = (words.abs().sum((1, 2)) == 0)[:, None, None]
        return torch.where(is_free, self.free.expand_as(rows), rows) + self.word_places[: words.shape[1]]


def load_weights(module: nn.Module, file: Path) -> None:
    """Reads weights stored in float16 into a float32 module, all of them."""
    stored = {
        name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in load_file(file).items()
    }
    module.load_state_dict(stored)
    module.eval().requires_grad_(False)


def save_weights(module: nn.Module, file: Path) -> None:
    """Stores floating-point weights in float16."""
    stored = {
        name: (tensor.half() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in module.state_dict().items()
    }
    save_file(stored, file)

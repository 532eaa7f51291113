"""How many of the vocoder's values go through a layer together. Torch-free, so that a plan can tell."""

from __future__ import annotations

# Elements (rows * channels) of a tile: what a layer reads and writes then stays in a processor's caches.
TILE = 1 << 19

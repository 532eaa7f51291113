"""tiny-shapes: a small text-to-picture model with real weights, its data, its judge and its training."""

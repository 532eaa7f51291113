"""Measurements behind the project's figures, one command each: `python -m bench.NAME`."""

"""The stage kit: a stage from any function or class, a graph from stages. See docs/own_stage.md."""

from __future__ import annotations

from omnistage.kit.graph import pipeline
from omnistage.kit.ports import Array, Audio, Image, Port, Text
from omnistage.kit.stage import Part, Stage, stage

__all__ = ["Array", "Audio", "Image", "Part", "Port", "Stage", "Text", "pipeline", "stage"]

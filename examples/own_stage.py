"""Two stages of one's own: text is spelled aloud, a letter is a tone. `omnistage serve examples/own_stage.py`"""

import numpy as np
from numpy.typing import NDArray

from omnistage.kit import Audio, Part, Text, pipeline, stage

RATE, SAMPLES = 16_000, 1_600


@stage(takes={"text": Text()}, gives={"letters": Text()}, chunk=8, batch=16, params={"loud": False})
def spell(parts: list[Part]) -> list[str]:
    """Keeps letters, 8 characters at a time, up to 16 requests at a time."""
    kept = ["".join(letter for letter in part["text"] if letter.isalpha()) for part in parts]
    return [text.upper() if part.params["loud"] else text for text, part in zip(kept, parts, strict=True)]


@stage(takes={"letters": Text()}, gives={"audio": Audio(RATE)}, chunk=4)
def tones(part: Part) -> NDArray[np.float32]:
    """100 ms per letter; the phase goes on from chunk to chunk."""
    pitch = np.array([220 * 2 ** ((ord(letter) % 32) / 12) for letter in part["letters"]])
    steps = np.concatenate(([part.state.get("phase", 0.0)], np.repeat(2 * np.pi * pitch / RATE, SAMPLES)))
    phases = np.cumsum(steps)
    part.state["phase"] = float(phases[-1])
    return np.asarray(0.2 * np.sin(phases[:-1])[None], np.float32)


speller = pipeline("speller", spell, tones, outputs=["spell.letters"])

# ruff: noqa: RUF001 (the look-alike characters of other scripts are meant)
"""Phonemes of a clause, in the alphabet of each voice. Torch-free."""

from __future__ import annotations

from hibari.g2p import G2P

from omnistage.models.smol_speech.spoken import spoken_text

# Beyond this the acoustic model was not trained; longer clauses become several pieces.
MAX_PHONEMES = 400
_NOT_SPOKEN = frozenset(';:,.!?—…"()“” ˈˌː')
# Misaki's alphabet (hibari) to the IPA of espeak, which Piper voices were trained on.
_TO_IPA = {
    "A": "eɪ",
    "I": "aɪ",
    "W": "aʊ",
    "O": "oʊ",
    "Y": "ɔɪ",
    "Q": "əʊ",
    "ʤ": "dʒ",
    "ʧ": "tʃ",
    "ᵊ": "ə",
    "T": "ɾ",
    "ɜ": "ɜː",
    "ɑ": "ɑː",
    "i": "iː",
    "u": "uː",
    "ɔ": "ɔː",
    "—": ",",
    "…": ".",
}
_CONTRACTIONS = {"ɜːɹ": "ɜː", "əɹ": "ɚ"}


class Phonemizer:
    """English text to phoneme strings (misaki alphabet)."""

    def __init__(self) -> None:
        self._g2p = G2P()

    def __call__(self, clause: str) -> list[str]:
        """Pieces of at most MAX_PHONEMES characters (a longer single word stays whole); none when nothing is said."""
        text = spoken_text(clause)
        phonemes: str = self._g2p(text) if text else ""
        return [piece for piece in split_phonemes(phonemes) if is_spoken(piece)]


def is_spoken(phonemes: str) -> bool:
    """False for strings of nothing but punctuation, stress marks and spaces."""
    return any(character not in _NOT_SPOKEN for character in phonemes)


def split_phonemes(phonemes: str, maximum: int = MAX_PHONEMES) -> list[str]:
    """Cuts at spaces into pieces of at most `maximum` characters; words stay whole."""
    pieces: list[str] = []
    piece = ""
    for word in phonemes.split(" "):
        if piece and len(piece) + 1 + len(word) > maximum:
            pieces.append(piece)
            piece = word
        else:
            piece = f"{piece} {word}" if piece else word
    return [*pieces, piece] if piece else pieces


def to_ipa(phonemes: str) -> str:
    """Misaki phonemes as espeak writes American English."""
    text = "".join(_TO_IPA.get(character, character) for character in phonemes)
    for long, short in _CONTRACTIONS.items():
        text = text.replace(long, short)
    return text

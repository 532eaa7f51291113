"""Sentences for intelligibility tests, and the one normaliser for both sides of a word error rate."""

from __future__ import annotations

import re

from num2words import num2words

SENTENCES = (
    "The old lighthouse keeper climbed the winding stairs every evening at sunset.",
    "Fresh bread from the bakery smells wonderful on a cold winter morning.",
    "My sister plays the violin, and my brother prefers the drums.",
    "The museum opens at nine o'clock and closes at five.",
    "We walked along the beach, collected small shells, and watched the waves.",
    "Please remember to water the plants before you leave the house.",
    "A gentle breeze moved the curtains while the cat slept on the sofa.",
    "Doctors recommend drinking plenty of water during hot weather.",
    "The committee decided to postpone the meeting until next Thursday.",
    "Yes, you can borrow my bicycle, but bring it back before dinner.",
    "Mountains covered with snow surrounded the quiet little village.",
    "He bought three apples, two oranges, and a bag of potatoes.",
    "The teacher explained the problem again; this time everyone understood.",
    "Dark clouds gathered quickly, so we decided to go home.",
    "Learning a new language takes time, patience, and a lot of practice.",
    "The bridge was built more than one hundred years ago.",
    "Birds fly south in autumn because food becomes hard to find.",
    "In 1969, two astronauts walked on the surface of the moon.",
    "The recipe needs 4 eggs, some butter, and a cup of sugar.",
    "Thank you for calling; how may I help you today?",
)


def words(text: str) -> list[str]:
    """Lower-case words with numbers, years and full hours written out."""
    text = text.lower().replace("o'clock", " oclock ")
    text = re.sub(r"(\d+):00\b", r"\1 oclock", text)
    text = re.sub(r"\b(1[1-9]\d\d|20\d\d)\b", lambda match: num2words(int(match[1]), to="year"), text)
    text = re.sub(r"\d+", lambda match: num2words(int(match[0])), text)
    return re.sub(r"[^a-z ]", " ", text.replace("'", "")).split()


def word_errors(reference: list[str], heard: list[str]) -> int:
    """Levenshtein distance in words."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(reference, start=1):
        previous, row = row, [i]
        for j, other in enumerate(heard, start=1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (word != other)))
    return row[-1]

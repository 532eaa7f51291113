"""Which tokens the format demands, and where a text ends. Fed with whatever the model would say."""

import pytest

from omnistage.models.hunyuan_image3.ask import Task
from omnistage.models.hunyuan_image3.course import Course
from omnistage.models.hunyuan_image3.vocabulary import Vocabulary

WORD = 65


def run(vocabulary: Vocabulary, task: Task, said: list[int], *, chooses_size: bool) -> tuple[list[int], Course]:
    """What is written when the model says `said`, with ratio 5 where it has to choose, until the end."""
    special = vocabulary.special
    course = Course(vocabulary, task, [special.answer, special.boi, special.size], chooses_size=chooses_size)
    written: list[int] = []
    waiting = list(said)
    while not course.ended and (waiting or course.constraint is not None):
        demand = course.constraint
        if demand is not None and demand.forced is not None:
            token = demand.forced
        elif demand is not None and demand.allowed is not None:
            assert demand.greedy
            assert demand.allowed == vocabulary.ratios
            token = vocabulary.ratios[5]
        else:
            token = waiting.pop(0)
        course.take(token)
        written.append(token)
    return written, course


@pytest.fixture
def tail(vocabulary: Vocabulary) -> list[int]:
    special = vocabulary.special
    return [special.answer, special.boi, special.size, vocabulary.ratios[5]]


def test_thinking_goes_on_with_a_caption_and_then_with_the_size(vocabulary: Vocabulary, tail: list[int]) -> None:
    special = vocabulary.special
    said = [WORD, special.end_think, WORD, WORD, special.end_recaption, WORD]
    written, course = run(vocabulary, "think_recaption", said, chooses_size=True)
    caption = [special.recaption, WORD, WORD, special.end_recaption]
    assert written == [WORD, special.end_think, *caption, *tail]
    assert course.ratio == 5
    assert course.thoughts == [special.think, WORD, special.end_think, *caption]


def test_with_a_given_size_thoughts_end_with_their_tag(vocabulary: Vocabulary) -> None:
    special = vocabulary.special
    for task, said in (
        ("think_recaption", [special.end_think, WORD, special.end_recaption]),
        ("recaption", [WORD, special.end_recaption]),
        ("think", [WORD, special.end_think]),
        ("think", [WORD, special.end_recaption]),
    ):
        _, course = run(vocabulary, task, [*said, WORD], chooses_size=False)  # type: ignore[arg-type]
        assert course.ended
        assert course.ratio is None
        assert course.thoughts is not None
        assert course.thoughts[-1] == said[-1]


def test_thinking_alone_leads_to_the_size(vocabulary: Vocabulary, tail: list[int]) -> None:
    special = vocabulary.special
    written, course = run(vocabulary, "think", [WORD, special.end_think], chooses_size=True)
    assert written == [WORD, special.end_think, *tail]
    assert course.thoughts == [special.think, WORD, special.end_think]


def test_each_demand_is_made_once(vocabulary: Vocabulary, tail: list[int]) -> None:
    special = vocabulary.special
    said = [special.end_think, special.end_think, WORD, special.end_recaption]
    written, _ = run(vocabulary, "think_recaption", said, chooses_size=True)
    assert written == [special.end_think, special.recaption, special.end_think, WORD, special.end_recaption, *tail]


def test_a_caption_without_thinking_still_leads_to_the_size(vocabulary: Vocabulary, tail: list[int]) -> None:
    special = vocabulary.special
    written, course = run(vocabulary, "think_recaption", [WORD, special.end_recaption], chooses_size=True)
    assert written == [WORD, special.end_recaption, *tail]
    assert course.thoughts == [special.think, WORD, special.end_recaption]


def test_any_size_token_ends_the_text(vocabulary: Vocabulary) -> None:
    _, course = run(vocabulary, "think", [WORD, vocabulary.ratios[36], WORD], chooses_size=True)
    assert (course.ended, course.ratio, course.thoughts) == (True, 36, None)


def test_a_size_alone_is_chosen_at_once(vocabulary: Vocabulary) -> None:
    written, course = run(vocabulary, "ratio", [], chooses_size=True)
    assert (written, course.ratio, course.thoughts) == ([vocabulary.ratios[5]], 5, [])


def test_answers_are_free(vocabulary: Vocabulary) -> None:
    special = vocabulary.special
    said = [WORD, special.end_think, special.end_recaption, vocabulary.ratios[0], WORD]
    written, course = run(vocabulary, "answer", said, chooses_size=False)
    assert written == said
    assert not course.ended


def test_sections_are_known_by_their_tags(vocabulary: Vocabulary) -> None:
    special = vocabulary.special
    course = Course(vocabulary, "think_recaption", [], chooses_size=False)
    sections = [course.section]
    for token in (WORD, special.end_think, special.recaption, WORD, special.end_recaption):
        course.take(token)
        sections.append(course.section)
    assert sections == ["think", "think", "answer", "recaption", "recaption", "answer"]

from __future__ import annotations

from omnistage.stages.ar.randomness import uniform


def test_draws_are_a_fixed_function_of_their_arguments() -> None:
    assert uniform(7, 3) == uniform(7, 3)
    assert len({uniform(7, 3), uniform(7, 4), uniform(8, 3), uniform(7, 3, "code"), uniform(-7, 3)}) == 5


def test_values_are_pinned_across_versions() -> None:
    assert [round(uniform(42, position), 12) for position in range(2)] == [0.013842768924, 0.987755698361]


def test_draws_are_spread_evenly() -> None:
    draws = [uniform(seed, position) for seed in range(40) for position in range(100)]
    assert all(0 <= draw < 1 for draw in draws)
    counts = [sum(int(draw * 10) == part for draw in draws) for part in range(10)]
    assert all(320 < count < 480 for count in counts)
    assert abs(sum(draws) / len(draws) - 0.5) < 0.02


def test_extreme_seeds_are_accepted() -> None:
    assert 0 <= uniform(-(2**63), 0) < 1
    assert 0 <= uniform(2**63 - 1, 2**40) < 1

"""The cost curve of transformer calls."""

from __future__ import annotations

import pytest

from omnistage.stages.diffusion.cost import CostCurve


def test_without_measurements_rows_are_the_cost() -> None:
    assert CostCurve().seconds(300) == 300.0


def test_given_points_are_interpolated_and_extended_in_proportion() -> None:
    curve = CostCurve(((100, 1.0), (300, 2.0)))
    assert curve.seconds(200) == pytest.approx(1.5)
    assert curve.seconds(600) == pytest.approx(4.0)
    assert curve.seconds(10) == pytest.approx(1.0)  # a small call costs what the smallest measured one costs


def test_calls_teach_the_curve_and_one_stall_does_not_count() -> None:
    curve = CostCurve()
    for seconds in (0.5, 0.5, 9.0, 0.5):
        curve.observe(64, seconds)
    assert curve.seconds(64) == pytest.approx(0.5, rel=0.1)


def test_two_calls_are_not_trusted_yet() -> None:
    curve = CostCurve()
    curve.observe(64, 0.5)
    curve.observe(64, 0.5)
    assert curve.points == []


def test_a_machine_that_became_slower_is_noticed() -> None:
    curve = CostCurve(((64, 0.1),))
    for _ in range(200):
        curve.observe(64, 1.0)
    assert curve.seconds(64) == pytest.approx(1.0, rel=0.05)

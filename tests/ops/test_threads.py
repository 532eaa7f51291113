from __future__ import annotations

import pytest

from omnistage.ops.threads import openmp_environment, thread_count


@pytest.mark.parametrize(
    ("requested", "cores", "stages", "threads"), [(0, 8, 4, 2), (0, 2, 4, 1), (0, 7, 2, 3), (5, 2, 4, 5)]
)
def test_threads_are_as_asked_or_an_equal_share(requested: int, cores: int, stages: int, threads: int) -> None:
    assert thread_count(requested, cores=cores, stages=stages) == threads


@pytest.mark.parametrize(("requested", "cores", "stages"), [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_impossible_numbers_are_refused(requested: int, cores: int, stages: int) -> None:
    with pytest.raises(ValueError, match="thread_count"):
        thread_count(requested, cores=cores, stages=stages)


def test_idle_threads_sleep() -> None:
    assert openmp_environment(3) == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE"}

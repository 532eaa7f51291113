"""The plan counts the weights that each stage loads, and once what stages of a process share."""

from __future__ import annotations

import pytest

from omnistage.config.registry import load_pipeline
from omnistage.config.resolve import resolve_config
from omnistage.runtime.memory_plan import memory_plan
from tests.models.held import declared_and_held
from tests.models.hunyuan_image3.harness import FOLDER

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("variant", "stage", "dtype"), [("ar", "ar", "bfloat16"), ("dit", "dit", "float32")])
def test_weights_are_counted_exactly(variant: str, stage: str, dtype: str) -> None:
    declared, held = declared_and_held(FOLDER, stage, variant=variant, dtype=dtype)
    assert declared == held > 10_000


def test_stages_of_one_process_count_their_common_parts_once() -> None:
    def in_all(**settings: str) -> int:
        config = resolve_config(str(FOLDER), None, {"variant": "ar_dit", "dtype": "float32"} | settings)
        plan = memory_plan(config, load_pipeline(config.pipeline), {})
        return sum(process.taken["cpu"] - process.base for process in plan.processes)

    plan = memory_plan(resolve_config(str(FOLDER), None, {"dtype": "float32"}), load_pipeline("hunyuan_image3"), {})
    ar, dit = plan.stages
    common = sum(size for name, size in dit.weights.items() if name in ar.weights)
    assert common > 10_000
    assert in_all(**{"stages.dit.placement": "process"}) - in_all() == common


def test_a_small_checkpoint_fits_and_its_steps_have_as_many_rows_as_its_pictures() -> None:
    """With the default budget of 65536 rows: sixteen guided pictures of 16 x 16 rows and one timestep each."""
    config = resolve_config(str(FOLDER), None, {"variant": "dit", "dtype": "float32", "device": "cpu"})
    plan = memory_plan(config, load_pipeline(config.pipeline), {"cpu": 4 << 30})
    (dit,) = plan.stages
    rows = 16 * 2 * (16 * 16 + 1)
    assert (plan.lacks, dit.working.of) == ([], f"{rows} rows, a picture of 256 x 256")
    # Four frames of 64 channels, six times in float32.
    assert dit.working.nbytes > 4 * 64 * 256 * 256 * 6 * 4
